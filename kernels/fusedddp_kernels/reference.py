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

from fusedddp_kernels.launch import DEFAULT_TREE, StatsTree
from fusedddp_kernels.ops import GradStats
from fusedddp_kernels.slots import Slots, as_real

_CPU = torch.device("cpu")
_WIDE = frozenset({torch.float32, torch.float64})
_HALF = frozenset({torch.bfloat16, torch.float16})
_SLOTS_AT_ONCE = 256  # bounds the memory that grad_stats takes beside the buffer


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
    if first < 0 or len(views) != len(sources):
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
    *,
    accumulate: bool = False,
) -> None:
    """Copies slots out to tensors, multiplied by `scale` and cast to each tensor's dtype.

    Args:
        slots: where from.
        destinations: one tensor per slot, of the slot's size; any strides without overlap, any
            floating or complex dtype, no conj or negative bit. None is skipped, and so is a tensor
            that is its own slot when there is no scale and nothing is added.
        scale: as for `flatten`.
        accumulate: adds to the destinations instead of overwriting them. The product is rounded as
            in `flatten`, the sum is made in fp64 if either operand is fp64 and in fp32 otherwise,
            and rounded once.

    Raises:
        ValueError: the number of destinations does not match.
    """
    if len(slots.views) != len(destinations):
        raise ValueError(
            f"expected one destination per slot, found {len(destinations)} for "
            f"{len(slots.views)} slots"
        )
    pairs = [(d, view) for d, view in zip(destinations, slots.views, strict=True) if d is not None]
    if accumulate:
        for destination, view in pairs:
            _scaled_add(as_real(destination), view, scale)
    elif scale is None:
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


def grad_stats(
    slots: Slots, *, per_tensor: bool = False, tree: StatsTree = DEFAULT_TREE
) -> GradStats:
    """Sum of squares and number of non-finite values in the slots of a buffer; padding is left out.

    Sums are made in the `compute_dtype` of the buffer, in the order that `StatsTree` tells.

    Args:
        slots: what to read.
        per_tensor: one result per slot instead of one for all.
        tree: the order.

    Returns:
        Tensors on the device of `slots`, 0-dim or with one element per slot. They are made without
        the host reading anything.
    """
    compute = compute_dtype(slots.flat.dtype)
    device = slots.flat.device
    tiles: list[list[Tensor]] = []  # sums of the tiles of each slot
    counts = [torch.zeros(0, dtype=torch.int64, device=device)]
    for begin in range(0, len(slots.views), _SLOTS_AT_ONCE):
        stop = begin + _SLOTS_AT_ONCE
        group = [
            slots.flat[offset:end]
            for offset, end in zip(slots.offsets[begin:stop], slots.ends[begin:stop], strict=True)
        ]
        # What is left over of each slot after whole tiles, all in one go: slots are often small.
        tails = slots.flat.new_zeros(len(group), tree.block_size)
        count = torch.zeros(len(group), dtype=torch.int64, device=device)
        for index, values in enumerate(group):
            whole = values.numel() // tree.block_size * tree.block_size
            tails[index, : values.numel() - whole] = values[whole:]
            tiles.append([])
            if whole:
                tiles[-1].append(_tile_sums(values[:whole].view(-1, tree.block_size), tree.width))
                count[index] = whole - values[:whole].isfinite().sum()
        count += tree.block_size - tails.isfinite().sum(1)
        counts.append(count)
        for index, total in enumerate(torch.split(_tile_sums(tails, tree.width), 1)):
            if group[index].numel() % tree.block_size:
                tiles[begin + index].append(total)
    none = torch.zeros(0, dtype=compute, device=device)
    if per_tensor:
        totals = [
            each[0] if len(each) == each[0].numel() == 1 else _add_rows(each, tree.combine_width)
            for each in ([none] if not each else each for each in tiles)
        ]
        return GradStats(torch.cat([none, *totals]), torch.cat(counts))
    everything = [each for pieces in tiles for each in pieces]
    total = _add_rows([none, *everything], tree.combine_width)
    return GradStats(total[0], torch.cat(counts).sum())


def _tile_sums(tiles: Tensor, width: int) -> Tensor:
    """First stage: [num_tiles, block_size] -> [num_tiles]."""
    rows = tiles.to(compute_dtype(tiles.dtype)).view(len(tiles), -1, width)
    sums = torch.zeros_like(rows[:, 0])
    for row in rows.unbind(1):
        sums = sums + row * row
    return _add_pairs(sums)


def _add_rows(pieces: Sequence[Tensor], width: int) -> Tensor:
    """Second stage: all of `pieces` -> [1]; rows of `width` one after another, then pairs."""
    values = torch.cat(list(pieces))
    values = torch.nn.functional.pad(values, (0, -values.numel() % width))
    sums = values.new_zeros(width)
    for row in values.view(-1, width):
        sums = sums + row
    return _add_pairs(sums.view(1, width))


def _add_pairs(values: Tensor) -> Tensor:
    """[n, width] -> [n]: neighbours are added until one is left."""
    while values.size(1) > 1:
        values = values[:, 0::2] + values[:, 1::2]
    return values[:, 0]


def _scaled_add(destination: Tensor, source: Tensor, scale: Tensor | None) -> None:
    value = source.to(compute_dtype(source.dtype))
    if scale is not None:
        value = value * scale.to(value.dtype)
    destination.copy_(destination.to(compute_dtype(destination.dtype)) + value)


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
