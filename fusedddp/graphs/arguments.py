"""The arguments of a call and the memory in which a graph reads and writes them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
    """

    def __init__(
        self, placeholders: Sequence[Tensor], written: Sequence[int], writes: Mapping[int, Any]
    ) -> None:
        self._placeholders = placeholders
        self._written = written
        self._writes = dict(writes)

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
            if storages.count(storages[position]) > 1:
                raise ValueError(
                    f"expected arguments with memory of their own, found leaf {position}, which "
                    "the step writes, in the memory of another one. Pass a clone."
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
        self._placeholders, self._writes = [], {}
