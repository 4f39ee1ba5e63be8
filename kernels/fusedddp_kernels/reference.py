"""Every op in plain torch: the path on CPU, and the oracle that the Triton kernels are held to.

Arithmetic of a scaled copy, the same here and in the kernels:

- fp64 sources are computed in fp64, all others in fp32; the fp64 scale is cast to that dtype;
- one multiplication, then one rounding to the destination's dtype, to nearest even;
- fp64 is narrowed to fp16 and bf16 through fp32, as `torch.Tensor.copy_` does;
- complex values are pairs of reals; conjugate and negative bits are resolved first.

Nothing here reads a value back to the host, so that a captured or recorded step stays valid.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fusedddp_kernels.slots import Slots, as_real

_CPU = torch.device("cpu")
_WIDE = frozenset({torch.float32, torch.float64})
_HALF = frozenset({torch.bfloat16, torch.float16})


def compute_dtype(source: torch.dtype) -> torch.dtype:
    """The dtype in which values of dtype `source` are multiplied."""
    return torch.float64 if source in (torch.float64, torch.complex128) else torch.float32


def flatten(
    sources: Sequence[Tensor | None],
    slots: Slots,
    scale: Tensor | None = None,
    first: int = 0,
) -> None:
    """Copies tensors into neighbouring slots, multiplied by `scale` and cast to the buffer's dtype.

    Args:
        sources: one tensor per slot, of the slot's size; any strides and any floating or complex
            dtype (complex exactly where the slot is). None writes zeros. A source that is its own
            slot is scaled in place.
        slots: where to.
        scale: 0-dim tensor on the device of `slots`, fp64 or already in the `compute_dtype` of
            every source; None for 1.
        first: index of the slot of the first source. If all slots are written the padding is
            zeroed; otherwise padding and other slots stay as they are.

    Raises:
        ValueError: there are more sources than slots.
    """
    views = slots.views[first : first + len(sources)]
    if len(views) != len(sources):
        raise ValueError(
            f"expected at most one source per slot, found {len(sources)} from slot {first} of "
            f"{len(slots.views)} on"
        )
    buffer = slots.flat.dtype
    is_exact = _multiplies_exactly(slots.flat)
    zeros: list[Tensor] = []
    # One pass per tensor. Copying all and then scaling the buffer takes fewer calls, but inside of
    # a backward it costs a third more (400 tensors of 64x64, one core of an EPYC).
    for view, source in zip(views, sources, strict=True):
        if source is None:
            zeros.append(view)
            continue
        if source.requires_grad:
            source = source.detach()
        if scale is None:
            view.copy_(as_real(source))
        elif is_exact and source.dtype == buffer:
            torch.mul(source, scale, out=view)
        else:
            _scaled_copy(view, source, scale)
    if len(views) == len(slots.views):
        zeros += slots.padding
    if zeros:
        torch._foreach_zero_(zeros)


@torch.no_grad()
def unflatten(
    slots: Slots,
    destinations: Sequence[Tensor | None],
    scale: Tensor | None = None,
) -> None:
    """Copies slots out to tensors, multiplied by `scale` and cast to each tensor's dtype.

    Args:
        slots: where from.
        destinations: one tensor per slot, of the slot's size; any strides without overlap, any
            floating or complex dtype, no conj or negative bit. None is skipped, and so is a tensor
            that is its own slot when there is no scale.
        scale: as for `flatten`.

    Raises:
        ValueError: the number of destinations does not match.
    """
    if len(slots.views) != len(destinations):
        raise ValueError(
            f"expected one destination per slot, found {len(destinations)} for "
            f"{len(slots.views)} slots"
        )
    pairs = [(d, view) for d, view in zip(destinations, slots.views, strict=True) if d is not None]
    if scale is None:
        pairs = [(as_real(d), view) for d, view in pairs if d.data_ptr() != view.data_ptr()]
        if pairs:
            torch._foreach_copy_([d for d, _ in pairs], [view for _, view in pairs])
    else:
        for destination, view in pairs:
            _scaled_copy(as_real(destination), view, scale)


@torch.no_grad()
def scale_(tensor: Tensor, scale: Tensor) -> None:
    """Multiplies `tensor` in place.

    Args:
        tensor: floating or complex, any strides without overlap, no conj or negative bit.
        scale: as for `flatten`.
    """
    real = as_real(tensor)
    _scaled_copy(real, real, scale)


def _scaled_copy(destination: Tensor, source: Tensor, scale: Tensor) -> None:
    source = as_real(source)
    if source.dtype == destination.dtype and _multiplies_exactly(source):
        torch.mul(source, scale, out=destination)
    else:
        compute = compute_dtype(source.dtype)
        destination.copy_(source.to(compute) * scale.to(compute))


def _multiplies_exactly(tensor: Tensor) -> bool:
    """Whether `torch.mul` with a 0-dim fp64 tensor follows the arithmetic above by itself.

    On CPU it takes such a scalar in the dtype that it computes in (fp32 for halves); on a GPU it
    rounds the scalar to the half dtype first.
    """
    return tensor.dtype in _WIDE or (tensor.dtype in _HALF and tensor.device == _CPU)
