"""What the ops refuse, with what to do instead. The kernels would read or write anywhere."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from fusedddp_kernels.launch import DTYPE_CODES
from fusedddp_kernels.slots import Slots, is_dense


def check_flatten(
    sources: Sequence[Tensor | None], slots: Slots, scale: Tensor | None, first: int
) -> None:
    """Raises what `triton_ops.TritonOps.flatten` raises, for the reference."""
    views = slots.views[first : first + len(sources)]
    if len(views) != len(sources):
        return  # the reference says so
    check_scale(scale, slots.flat.device)
    real = []
    for index, (source, view) in enumerate(zip(sources, views, strict=True), first):
        if source is not None:
            check_dtype("source", index, source)
            source = (
                torch.view_as_real(source.detach().resolve_conj())
                if source.is_complex()
                else source
            )
            check_fits("source", index, source, view)
        real.append(source)
    check_memory(real, views, slots.flat, is_written=False)


def check_unflatten(
    slots: Slots, destinations: Sequence[Tensor | None], scale: Tensor | None
) -> None:
    """Raises what `triton_ops.TritonOps.unflatten` raises, for the reference."""
    if len(slots.views) != len(destinations):
        return  # the reference says so
    check_scale(scale, slots.flat.device)
    real = [
        None if destination is None else _if_dense(as_target(index, destination, view))
        for index, (destination, view) in enumerate(zip(destinations, slots.views, strict=True))
    ]
    check_memory(real, slots.views, slots.flat, is_written=True)


def _if_dense(tensor: Tensor | None) -> Tensor | None:
    """A tensor with gaps may lie between the elements of another one; that is not looked into."""
    return tensor if tensor is None or is_dense(tensor) else None


def as_target(index: int, destination: Tensor, view: Tensor | None) -> Tensor:
    """`destination` as reals, checked to be writable element by element."""
    check_dtype("destination", index, destination)
    if destination.is_conj() or destination.is_neg():
        raise ValueError(
            f"expected destination {index} without conj or negative bit, found one: pass "
            "`.resolve_conj().resolve_neg()`"
        )
    if _may_overlap_itself(destination):
        raise ValueError(
            f"expected each element of destination {index} in memory of its own, found size "
            f"{tuple(destination.shape)} with strides {destination.stride()}: pass a clone"
        )
    real = torch.view_as_real(destination.detach()) if destination.is_complex() else destination
    if view is not None:
        check_fits("destination", index, real, view)
    return real


def _may_overlap_itself(tensor: Tensor) -> bool:
    """Whether two elements may lie at one address (certain for any stride of 0)."""
    if is_dense(tensor) or tensor.numel() == 0:
        return False
    reach = 0
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1:
            if stride <= reach:
                return True
            reach += stride * (size - 1)
    return False


def check_dtype(what: str, index: int, tensor: Tensor) -> None:
    dtype = tensor.dtype.to_real() if tensor.is_complex() else tensor.dtype
    if dtype not in DTYPE_CODES:
        raise TypeError(
            f"expected a floating or complex dtype of 16 to 64 bits for {what} {index}, found "
            f"{tensor.dtype}"
        )


def check_fits(what: str, index: int, tensor: Tensor, view: Tensor) -> None:
    if tensor.shape != view.shape:
        raise ValueError(
            f"expected {what} {index} of the size of its slot, {tuple(view.shape)}, found "
            f"{tuple(tensor.shape)} (complex values count as two reals)"
        )
    if tensor.device != view.device:
        raise ValueError(
            f"expected {what} {index} on {view.device}, where the flat buffer is, found it on "
            f"{tensor.device}"
        )


def check_scale(scale: Tensor | None, device: torch.device) -> None:
    if scale is None:
        return
    if not isinstance(scale, Tensor):
        raise TypeError(
            f"expected a 0-dim tensor as scale, found {scale!r}; a number would be frozen into a "
            "captured graph"
        )
    if scale.dim() != 0 or scale.dtype not in (torch.float32, torch.float64):
        raise ValueError(
            f"expected a 0-dim tensor of fp64 or fp32 as scale, found size {tuple(scale.shape)}, "
            f"{scale.dtype}"
        )
    if scale.device != device:
        raise ValueError(f"expected the scale on {device}, found it on {scale.device}")


def check_memory(
    tensors: Sequence[Tensor | None], views: Sequence[Tensor], flat: Tensor, *, is_written: bool
) -> None:
    """Raises unless every tensor has memory, and shares none that matters."""
    flat_begin = flat.data_ptr()
    flat_end = flat_begin + flat.numel() * flat.element_size()
    stretches: list[tuple[int, int, int]] = []
    for index, (tensor, view) in enumerate(zip(tensors, views, strict=False)):
        if tensor is None or tensor.numel() == 0:
            continue
        if is_cut(tensor):
            raise RuntimeError(
                f"expected memory for the {tensor.numel()} elements of tensor {index}, found "
                f"{tensor.untyped_storage().nbytes()} bytes in its storage: it was freed or "
                "resized"
            )
        begin = tensor.data_ptr()
        end = begin + tensor.numel() * tensor.element_size()
        stretches.append((begin, end, index))
        is_own_slot = begin == view.data_ptr() and tensor.dtype == view.dtype
        if begin < flat_end and end > flat_begin and not is_own_slot:
            raise ValueError(
                f"expected tensor {index} outside of the flat buffer or in its own slot, found "
                f"{end - begin} bytes from byte {begin - flat_begin} of the buffer on: clone it"
            )
    if is_written:
        _check_disjoint(stretches)


def is_cut(tensor: Tensor) -> bool:
    """Whether the storage is too small for `tensor`, which fills one stretch of it."""
    end = (tensor.storage_offset() + tensor.numel()) * tensor.element_size()
    return tensor.untyped_storage().nbytes() < end


def _check_disjoint(stretches: list[tuple[int, int, int]]) -> None:
    stretches.sort()
    for (_, end, index), (begin, _, other) in itertools.pairwise(stretches):
        if begin < end:
            raise ValueError(
                f"expected destinations that do not overlap, found {end - begin} bytes shared by "
                f"destinations {index} and {other}"
            )
