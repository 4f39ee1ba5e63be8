"""The seam where a flat buffer is reduced: which factor, which operation, which collective.

Knows process groups and flat tensors; nothing of buckets, parameters or hooks.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

Op = Literal["mean", "sum", "max"]
OPS: tuple[Op, ...] = ("mean", "sum", "max")

# NCCL averages these in its own kernel by multiplying before the sum, as our flatten does.
_NCCL_AVERAGES = frozenset({torch.float32, torch.bfloat16})


class Reduction(NamedTuple):
    """How a mean, sum or maximum over ranks is computed.

    Attributes:
        predivide_factor: the flatten multiplies by its inverse; 1 for no multiplication.
        op: operation of the collective.
    """

    predivide_factor: float
    op: dist.ReduceOp.RedOpType


def choose_reduction(
    op: Op, divide_factor: int, dtype: torch.dtype, backend: str, *, in_place: bool = False
) -> Reduction:
    """The reduction for one buffer; a mean divides by `divide_factor`, the number of ranks.

    A mean divides before the sum, as DDP does: sums of many ranks then stay in range, and for
    powers of two the bits are DDP's. Only a gradient that is reduced in place on NCCL is left to
    NCCL's own averaging, because dividing it would cost a pass of its own.
    """
    if op == "max":
        return Reduction(1.0, dist.ReduceOp.MAX)
    if op == "sum" or divide_factor == 1:
        return Reduction(1.0, dist.ReduceOp.SUM)
    if in_place and backend == "nccl" and dtype in _NCCL_AVERAGES:
        return Reduction(1.0, dist.ReduceOp.AVG)
    return Reduction(float(divide_factor), dist.ReduceOp.SUM)


def wire_dtype(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """Dtype in which gradients of `dtype` travel: real, and fp32 for fp16 on CPU.

    Neither order of dividing and summing keeps fp16 gradients exact: 2 * 65504 overflows, and
    2**-24 / 2 is lost (pytorch pull request 61814). On CPU a wider wire costs little, since gloo
    converts every fp16 element to fp32 to add it anyway.
    """
    real = dtype.to_real() if dtype.is_complex else dtype
    return torch.float32 if real == torch.float16 and device.type == "cpu" else real


class Collective:
    """All-reduces flat buffers over one process group.

    Args:
        group: the process group.
        op: what becomes of the values of all ranks.

    Attributes:
        group: the process group.
        world_size: number of ranks in it.
        divide_factor: what a mean divides by: the number of ranks, unless some of them ran out of
            data and are not to count.
    """

    def __init__(self, group: dist.ProcessGroup, op: Op = "mean") -> None:
        self.group = group
        self.op: Op = op
        self.world_size = dist.get_world_size(group)
        self.divide_factor = self.world_size
        self._scales: dict[tuple[torch.device, float], Tensor] = {}
        self._backends: dict[torch.device, str] = {}

    def reduction(
        self, dtype: torch.dtype, device: torch.device, *, in_place: bool = False
    ) -> Reduction:
        if device not in self._backends:
            self._backends[device] = self.group._get_backend(device).name()
        return choose_reduction(
            self.op,
            self.divide_factor,
            dtype,
            self._backends[device],
            in_place=in_place and self.divide_factor == self.world_size,
        )

    def scale(self, reduction: Reduction, device: torch.device) -> Tensor | None:
        """The factor of the flatten as a 0-dim fp64 tensor on `device`; None for 1.

        A device tensor, because a Python number would be frozen into a captured graph.
        """
        if reduction.predivide_factor == 1.0:
            return None
        key = (device, reduction.predivide_factor)
        if key not in self._scales:
            self._scales[key] = torch.tensor(
                1.0 / reduction.predivide_factor, dtype=torch.float64, device=device
            )
        return self._scales[key]

    def launch(self, flat: Tensor, reduction: Reduction) -> dist.Work:
        """Starts the all-reduce of `flat` (1-D, contiguous, real) in place."""
        work: dist.Work | None = dist.all_reduce(
            flat, op=reduction.op, group=self.group, async_op=True
        )
        assert work is not None  # the caller is a member of the group: checked at construction
        return work


def same_on_all_ranks(total: int, total_of_squares: int, mine: int, world_size: int) -> bool:
    """Whether every rank contributed `mine`, told from the sums of the values and their squares.

    By the Cauchy-Schwarz inequality `n * sum(v**2) == sum(v)**2` holds only for equal values.
    """
    return total == world_size * mine and total_of_squares == world_size * mine * mine
