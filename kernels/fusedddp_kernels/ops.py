"""What an implementation of the ops has to offer: plain torch, Triton, or a user's own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from torch import Tensor

from fusedddp_kernels.slots import Slots


class GradStats(NamedTuple):
    """Statistics of the slots of a flat buffer, on its device.

    Attributes:
        sum_squares: sum of the squares, in the `compute_dtype` of the buffer; inf or NaN if a value
            is, or if it overflows. 0-dim, or one per slot.
        num_nonfinite: int64, how many values are inf or NaN; of the same size.
    """

    sum_squares: Tensor
    num_nonfinite: Tensor


class Ops(Protocol):
    """The four ops. `fusedddp_kernels.testing.check_ops` holds an implementation to them.

    `fusedddp_kernels.reference` says in full what each does. None of them may read a value back to
    the host. Bitwise equality with the reference is asked of all but `grad_stats`, which may add in
    any order that is always the same.
    """

    def flatten(
        self,
        sources: Sequence[Tensor | None],
        slots: Slots,
        scale: Tensor | None = None,
        first: int = 0,
    ) -> None:
        """Copies tensors into neighbouring slots, scaled and cast."""

    def unflatten(
        self,
        slots: Slots,
        destinations: Sequence[Tensor | None],
        scale: Tensor | None = None,
        *,
        accumulate: bool = False,
    ) -> None:
        """Copies slots out to tensors, scaled and cast, or adds them."""

    def scale_(self, tensor: Tensor, scale: Tensor) -> None:
        """Multiplies a tensor in place."""

    def grad_stats(self, slots: Slots, *, per_tensor: bool = False) -> GradStats:
        """Sum of squares and number of non-finite values of all slots, or of each."""
