"""Fused gradient bucketing for data-parallel training. ``model = fusedddp.wrap(model)``."""

from fusedddp.capturable import check_capturable
from fusedddp.manual import all_reduce_gradients
from fusedddp.module import FusedDDP, wrap

__all__ = ["FusedDDP", "__version__", "all_reduce_gradients", "check_capturable", "wrap"]
__version__ = "0.1.0"
