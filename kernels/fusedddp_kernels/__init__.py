"""Multi-tensor copies between gradients and flat buffers.

This package knows tensors and devices only: no parameters, buckets, autograd or process groups.
"""

from fusedddp_kernels.reference import (
    compute_dtype,
    flatten,
    scale_,
    unflatten,
)
from fusedddp_kernels.slots import Slots, is_dense

__all__ = [
    "Slots",
    "compute_dtype",
    "flatten",
    "is_dense",
    "scale_",
    "unflatten",
]
