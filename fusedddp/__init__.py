"""Fused gradient bucketing for data-parallel training. ``model = fusedddp.wrap(model)``."""

from fusedddp.capturable import check_capturable
from fusedddp.graphs import make_graphed_step
from fusedddp.manual import all_reduce_gradients
from fusedddp.module import FusedDDP, wrap

__all__ = [
    "FusedDDP",
    "__version__",
    "all_reduce_gradients",
    "check_capturable",
    "make_graphed_step",
    "wrap",
]
__version__ = "0.1.0"
