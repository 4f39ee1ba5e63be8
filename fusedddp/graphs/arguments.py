"""The arguments of a call and the memory in which a graph reads and writes them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fusedddp.graphs.signature import fill


class ArgumentMemory:
    """Tensors that a graph reads instead of those of a call.

    Args:
        placeholders: these tensors.
        written: positions of those that the step writes; the caller's get the values back.
        writes: by identity the storages of other tensors that the step writes.
        reads: other tensors that it reads.
    """

    def __init__(
        self,
        placeholders: Sequence[Tensor],
        written: Sequence[int],
        writes: Mapping[int, Any],
        *,
        reads: Iterable[Tensor],
    ) -> None:
        self._placeholders = placeholders
        self._written = written
        self._writes = dict(writes)
        # Kept alive, as `writes` are, so that no other memory gets their identity.
        strided = [t for t in reads if t.layout == torch.strided] if written else []
        self._reads = {s._cdata: s for s in map(Tensor.untyped_storage, strided)}

    def check(self, tensors: Sequence[Tensor]) -> None:
        """Raises ValueError if the step would see a write to one of `tensors` through another."""
        storages = [tensor.untyped_storage()._cdata for tensor in tensors]
        for position, storage in enumerate(storages):
            if storage in self._writes:
                raise ValueError(
                    f"expected arguments with memory of their own, found leaf {position} in memory "
                    "that the step writes (a buffer, or a tensor that it finds elsewhere): the "
                    "graph reads a copy, which would not follow. Pass a clone, or leave it out of "
                    "the arguments."
                )
        for position in self._written:
            others = [i for i, s in enumerate(storages) if s == storages[position]]
            is_shared = any(
                i != position and _overlap(tensors[i], tensors[position]) for i in others
            )
            if is_shared or storages[position] in self._reads:
                raise ValueError(
                    f"expected arguments with memory of their own, found leaf {position}, which "
                    "the step writes, in memory that it also reads by another name. Pass a clone."
                )

    def fill(self, tensors: Sequence[Tensor]) -> None:
        """Copies the tensors of a call to where the graph reads them."""
        fill(self._placeholders, tensors)

    def give_back(self, tensors: Sequence[Tensor]) -> None:
        """Copies back what the graph has written."""
        with torch.no_grad():
            for index in self._written:
                tensors[index].copy_(self._placeholders[index])

    def drop(self) -> None:
        self._placeholders, self._writes, self._reads = [], {}, {}


def _overlap(a: Tensor, b: Tensor) -> bool:
    """Whether the ranges of memory from first to last element have any in common."""
    (start_a, end_a), (start_b, end_b) = _range(a), _range(b)
    return start_a < end_b and start_b < end_a


def _range(tensor: Tensor) -> tuple[int, int]:
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    last = sum((size - 1) * stride for size, stride in pairs)
    start = tensor.data_ptr()
    return start, start + (last + 1 if tensor.numel() else 0) * tensor.element_size()
