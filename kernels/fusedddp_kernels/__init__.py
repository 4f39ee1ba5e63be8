"""Multi-tensor copies between gradients and flat buffers.

This package knows tensors and devices only: no parameters, buckets, autograd or process groups.

On GPU tensors the ops are Triton kernels where Triton is installed; everywhere else they are plain
torch (`reference.py`), with the same results.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from fusedddp_kernels import checks, reference
from fusedddp_kernels.ops import GradStats, Ops
from fusedddp_kernels.reference import compute_dtype
from fusedddp_kernels.slots import Slots, is_dense

__all__ = [
    "GradStats",
    "Ops",
    "Slots",
    "compute_dtype",
    "flatten",
    "grad_stats",
    "is_dense",
    "ops_for",
    "scale_",
    "unflatten",
]


def ops_for(device: torch.device) -> Ops:
    """The implementation of the ops for tensors on `device`."""
    return (_triton_ops() if device.type == "cuda" else None) or reference


@functools.cache
def _triton_ops() -> Ops | None:
    """None without Triton. Imported at the first use: it takes a second, for nothing on CPU."""
    try:
        from fusedddp_kernels.triton_ops import TritonOps
    except ModuleNotFoundError as error:
        if error.name != "triton":
            raise
        return None
    return TritonOps()


def flatten(
    sources: Sequence[Tensor | None],
    slots: Slots,
    scale: Tensor | None = None,
    first: int = 0,
) -> None:
    """Copies tensors into neighbouring slots, multiplied by `scale` and cast to the buffer's dtype.

    Arguments and errors: `reference.flatten`, `triton_ops.TritonOps.flatten`.
    """
    ops = ops_for(slots.flat.device)
    if ops is reference:
        checks.check_flatten(sources, slots, scale, first)
    ops.flatten(sources, slots, scale, first)


def unflatten(
    slots: Slots,
    destinations: Sequence[Tensor | None],
    scale: Tensor | None = None,
    *,
    accumulate: bool = False,
) -> None:
    """Copies slots out to tensors, multiplied by `scale` and cast to each tensor's dtype.

    Arguments and errors: `reference.unflatten`, `triton_ops.TritonOps.unflatten`.
    """
    ops = ops_for(slots.flat.device)
    if ops is reference:
        checks.check_unflatten(slots, destinations, scale)
    ops.unflatten(slots, destinations, scale, accumulate=accumulate)


def scale_(tensor: Tensor, scale: Tensor) -> None:
    """Multiplies `tensor` in place.

    Arguments and errors: `reference.scale_`, `triton_ops.TritonOps.scale_`.
    """
    ops = ops_for(tensor.device)
    if ops is reference:
        checks.check_scale(scale, tensor.device)
        checks.as_target(0, tensor, None)
    ops.scale_(tensor, scale)


def grad_stats(slots: Slots, *, per_tensor: bool = False) -> GradStats:
    """Sum of squares and number of non-finite values in the slots of a buffer.

    Arguments and errors: `reference.grad_stats`.
    """
    return ops_for(slots.flat.device).grad_stats(slots, per_tensor=per_tensor)
