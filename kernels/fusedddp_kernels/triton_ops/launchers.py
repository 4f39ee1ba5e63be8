"""The ops on Triton: checks, tables, one launch each."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fusedddp_kernels.checks import as_target, check_dtype, check_fits, check_scale
from fusedddp_kernels.launch import (
    DEFAULT_CONFIG,
    DEFAULT_TREE,
    DTYPE_CODES,
    LaunchConfig,
    StatsTree,
)
from fusedddp_kernels.ops import GradStats
from fusedddp_kernels.slots import Slots, as_real, is_dense
from fusedddp_kernels.table import CopyTable
from fusedddp_kernels.triton_ops import operators  # noqa: F401  (registers what is called below)

_fused = torch.ops.fusedddp


class TritonOps:
    """The ops of `fusedddp_kernels.ops.Ops` as Triton kernels.

    Tables are kept in the `Slots` that they are for, so a call with tensors that stayed where they
    were uploads nothing.

    Args:
        config: of the kernels that copy.
        tree: of `grad_stats`.
    """

    def __init__(
        self, config: LaunchConfig = DEFAULT_CONFIG, tree: StatsTree = DEFAULT_TREE
    ) -> None:
        self.config = config
        self.tree = tree

    def flatten(
        self,
        sources: Sequence[Tensor | None],
        slots: Slots,
        scale: Tensor | None = None,
        first: int = 0,
    ) -> None:
        """Copies tensors into neighbouring slots, multiplied by `scale` and cast.

        See `reference.flatten`. A source whose strides differ from its slot's is copied first.

        Raises:
            TypeError: a source is neither floating nor complex.
            ValueError: more sources than slots; a source or the scale is on another device or of
                another size; a source lies in the buffer but not in its own slot.
            RuntimeError: the memory of the buffer or of a source was freed or resized; under
                capture, what cannot be captured.
        """
        stop = first + len(sources)
        if first < 0 or stop > len(slots.views):
            raise ValueError(
                f"expected at most one source per slot, found {len(sources)} from slot {first} of "
                f"{len(slots.views)} on"
            )
        check_scale(scale, slots.flat.device)
        table = self._table(slots, first, stop, is_written=False)
        ready = [
            None if source is None else _as_slot(index, source, view)
            for index, (source, view) in enumerate(zip(sources, table.views, strict=True), first)
        ]
        _note_writes([slots.flat])
        _fused.flatten(
            slots.flat,
            table.bind(ready),
            table.layout,
            scale,
            table.num_entries,
            table.num_tiles,
            self.config.block_size,
            self.config.num_warps,
        )

    def unflatten(
        self,
        slots: Slots,
        destinations: Sequence[Tensor | None],
        scale: Tensor | None = None,
        *,
        accumulate: bool = False,
    ) -> None:
        """Copies slots out to tensors, multiplied by `scale` and cast, or adds them.

        See `reference.unflatten`. A destination whose strides differ from its slot's costs one more
        copy.

        Raises:
            TypeError: a destination is neither floating nor complex.
            ValueError: not one destination per slot; a destination or the scale is on another
                device or of another size; a destination overlaps itself, another, or the buffer
                outside of its own slot; it has a conj or negative bit.
            RuntimeError: as for `flatten`.
        """
        if len(slots.views) != len(destinations):
            raise ValueError(
                f"expected one destination per slot, found {len(destinations)} for "
                f"{len(slots.views)} slots"
            )
        check_scale(scale, slots.flat.device)
        table = self._table(slots, 0, len(slots.views), is_written=True)
        skips_aliases = scale is None and not accumulate
        targets: list[Tensor | None] = []
        detours: list[tuple[Tensor, Tensor]] = []
        written: list[Tensor] = []
        for index, (destination, view) in enumerate(zip(destinations, slots.views, strict=True)):
            if destination is None or (
                skips_aliases and destination.data_ptr() == view.data_ptr() and view.numel()
            ):
                targets.append(None)
                continue
            real = as_target(index, destination, view)
            target = real
            if not _has_order_of(real, view):
                target = torch.empty_strided(
                    view.shape, view.stride(), dtype=real.dtype, device=real.device
                )
                if accumulate:
                    target.copy_(real.detach())
                detours.append((real, target))
            targets.append(target)
            written.append(destination)
        _fused.unflatten(
            slots.flat,
            table.bind(targets),
            table.layout,
            scale,
            table.num_entries,
            table.num_tiles,
            accumulate,
            self.config.block_size,
            self.config.num_warps,
        )
        with torch.no_grad():
            for real, target in detours:
                real.copy_(target)
        _note_writes(written)

    def scale_(self, tensor: Tensor, scale: Tensor) -> None:
        """Multiplies `tensor` in place; see `reference.scale_`.

        Raises:
            TypeError: `tensor` is neither floating nor complex.
            ValueError: it overlaps itself, has a conj or negative bit, or the scale is on another
                device.
        """
        check_scale(scale, tensor.device)
        real = as_target(0, tensor, None)
        with torch.no_grad():
            dense = real if is_dense(real) else real.contiguous()
            stretch = dense.as_strided((dense.numel(),), (1,))
            _fused.scale_(stretch, scale, self.config.block_size, self.config.num_warps)
            if dense is not real:
                real.copy_(dense)
        _note_writes([tensor])

    def grad_stats(self, slots: Slots, *, per_tensor: bool = False) -> GradStats:
        """Sum of squares and number of non-finite values; see `reference.grad_stats`."""
        key = ("grad_stats", self.tree.block_size)
        table = slots.tables.get(key)
        if not isinstance(table, _StatsTable):
            table = slots.tables[key] = _StatsTable(slots, self.tree.block_size)
        table.check_flat()
        sums, counts = _fused.grad_stats(
            slots.flat,
            table.layout,
            table.bounds if per_tensor else table.outer_bounds,
            table.num_entries,
            table.num_tiles,
            self.tree.block_size,
            self.tree.width,
            self.tree.combine_width,
            self.tree.num_threads,
        )
        return GradStats(sums, counts) if per_tensor else GradStats(sums[0], counts[0])

    def _table(self, slots: Slots, first: int, stop: int, *, is_written: bool) -> CopyTable:
        key = (is_written, first, stop, self.config.block_size)
        table = slots.tables.get(key)
        if not isinstance(table, CopyTable):
            is_whole = first == 0 and stop == len(slots.views)
            table = slots.tables[key] = CopyTable(
                slots,
                first,
                stop,
                block_size=self.config.block_size,
                fills_padding=is_whole and not is_written,
                is_written=is_written,
            )
        return table


class _StatsTable(CopyTable):
    """All slots, read where they are: no addresses, but ranges of tiles for the second stage."""

    def __init__(self, slots: Slots, block_size: int) -> None:
        super().__init__(slots, 0, len(slots.views), block_size=block_size, fills_padding=False)
        self.bounds = self.first_tiles.to(self.device)
        self.outer_bounds = self.first_tiles[[0, -1]].to(self.device)


def _note_writes(tensors: Sequence[Tensor]) -> None:
    """Tells autograd, which would not see a kernel write to an address."""
    tracked = [tensor for tensor in tensors if not tensor.is_inference()]
    if tracked:
        torch.autograd.graph.increment_version(tracked)


def _as_slot(index: int, source: Tensor, view: Tensor) -> Tensor:
    """`source` as reals in the memory order of its slot; itself where it is that already."""
    if source.dtype not in DTYPE_CODES or source.is_neg():
        check_dtype("source", index, source)
        source = as_real(source.detach())
    check_fits("source", index, source, view)
    if _has_order_of(source, view):
        return source
    ordered = torch.empty_strided(
        view.shape, view.stride(), dtype=source.dtype, device=source.device
    )
    return ordered.copy_(source.detach())


def _has_order_of(tensor: Tensor, view: Tensor) -> bool:
    """Whether `tensor` fills one stretch of memory, in the order of its slot."""
    if tensor.stride() == view.stride() or tensor.numel() == 0:
        return True
    return all(
        size == 1 or stride == expected
        for size, stride, expected in zip(tensor.shape, tensor.stride(), view.stride(), strict=True)
    )
