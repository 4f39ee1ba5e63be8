"""Multi-tensor copies between gradients and flat buffers.

This package knows tensors and devices only: no parameters, buckets, autograd or process groups.
"""

from fusedddp_kernels.reference import (
    flatten,
    flatten_one,
    scale_,
    scales_in_buffer,
    unflatten,
)
from fusedddp_kernels.slots import Slots, is_dense

__all__ = [
    "Slots",
    "flatten",
    "flatten_one",
    "is_dense",
    "scale_",
    "scales_in_buffer",
    "unflatten",
]
