"""A flat buffer cut into one slot per tensor.

A slot is a view of the buffer with the size and strides of the tensor it stands for, so that a
copy between the two goes by logical index whatever the memory format on either side. A complex
tensor has a real slot with a last dimension of 2, as `torch.view_as_real` would show it. Between
slots lies padding, which every whole `flatten` leaves at zero.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import torch
from torch import Tensor


class Slots:
    """A flat buffer and its slots, built once per buffer because making views costs host time.

    Args:
        flat: contiguous 1-D tensor of a real floating dtype; its memory is not initialised here.
        offsets: first element of each slot in `flat`, ascending. A complex slot takes two real
            elements per value and starts at an even offset.
        like: one tensor per slot, read for its size, strides and whether it is complex. Tensors
            that are not dense (gaps or overlaps) get a contiguous slot.

    Raises:
        ValueError: `flat` is not a contiguous 1-D tensor of a real floating dtype, or the slots
            overlap or leave the buffer.

    Attributes:
        flat: the buffer.
        views: one real view of `flat` per slot.
        ends: one past the last real element of each slot.
        padding: views of everything in `flat` that is in no slot; empty stretches left out.
        tables: what implementations of the ops keep for this buffer, each under a key of its own.
    """

    __slots__ = ("ends", "flat", "offsets", "padding", "tables", "views")

    def __init__(self, flat: Tensor, offsets: Sequence[int], like: Sequence[Tensor]) -> None:
        if flat.dim() != 1 or not flat.is_contiguous() or not flat.dtype.is_floating_point:
            raise ValueError(
                "expected a contiguous 1-D tensor of a real floating dtype as the flat buffer, "
                f"found size {tuple(flat.shape)}, strides {flat.stride()}, {flat.dtype}"
            )
        if len(offsets) != len(like):
            raise ValueError(
                f"expected one offset per tensor, found {len(offsets)} for {len(like)}"
            )
        self.flat = flat
        self.offsets = tuple(offsets)
        self.views: list[Tensor] = []
        self.padding: list[Tensor] = []
        ends: list[int] = []
        covered = 0
        for offset, tensor in zip(self.offsets, like, strict=True):
            end = offset + tensor.numel() * (2 if tensor.is_complex() else 1)
            if offset < covered or end > flat.numel():
                raise ValueError(
                    f"expected slots in ascending order inside {flat.numel()} elements, found one "
                    f"from {offset} to {end} after one that ends at {covered}"
                )
            if offset > covered:
                self.padding.append(flat[covered:offset])
            self.views.append(_view_like(flat[offset:end], tensor))
            ends.append(end)
            covered = end
        if covered < flat.numel():
            self.padding.append(flat[covered:])
        self.ends = tuple(ends)
        self.tables: dict[Hashable, object] = {}


def is_dense(tensor: Tensor) -> bool:
    """Whether `tensor` fills one stretch of memory, each element once, in some order.

    (torch's own `is_non_overlapping_and_dense` is private; this is the same rule.)
    """
    if tensor.is_contiguous():
        return True
    expected = 1
    for stride, size in sorted(
        (stride, size)
        for stride, size in zip(tensor.stride(), tensor.shape, strict=True)
        if size != 1
    ):
        if stride != expected:
            return False
        expected *= size
    return True


def as_real(tensor: Tensor) -> Tensor:
    """`tensor` as its slot shows it: complex values as pairs of reals, no conj or negative bit."""
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    return tensor.resolve_neg()


def _view_like(flat: Tensor, tensor: Tensor) -> Tensor:
    """`flat` (1-D, real) seen with the size and strides of `tensor`."""
    if not is_dense(tensor):
        return flat.view(*tensor.shape, 2) if tensor.is_complex() else flat.view(tensor.shape)
    if tensor.is_complex():
        return flat.as_strided((*tensor.shape, 2), (*(2 * s for s in tensor.stride()), 1))
    return flat.as_strided(tensor.shape, tensor.stride())
