"""The device table of a list of tensors: where each lies, and how they are cut into tiles.

A kernel gets two int64 tensors.

- `addresses`, [2, num_entries]: data pointers and dtype codes (`launch.py`), the only part that
  changes from step to step. Uploaded when a value changed, and not otherwise.
- `layout`, [3 * num_entries + num_tiles]: numel, span and offset of each entry, in elements, then
  one word per tile: entry << 32 | number of the tile in its entry. Written once.

An entry is a slot of a flat buffer. Its span is the slot together with the padding behind it where
a kernel has to zero that, so tiles cover spans; a stretch in front of the first slot is one more
entry, always absent.
"""

# Note [Tables under capture]
# ~~~~~~~~~~~~~~~~~~~~~~~~~~~
# A captured kernel reads its table at every replay, so a table that a graph reads must not change
# after the capture. Each `bind` under capture therefore gets an `addresses` tensor of its own, in
# the memory pool of the graph. It is filled by a captured copy from pinned memory that nobody
# writes again. That memory was set aside before, since none may be allocated while capturing. Both
# live as long as the table: whoever owns the graph has to keep the Slots (or the table) alive.

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fusedddp_kernels.checks import check_memory, is_cut
from fusedddp_kernels.launch import ABSENT, DTYPE_CODES
from fusedddp_kernels.slots import Slots

# Eager uploads in flight before the host has to wait for the oldest.
_NUM_STAGES = 4
# Rows of pinned memory set aside for captures; one for each different list of addresses that a
# table is bound to while capturing.
_NUM_SPARES = 4


class CopyTable:
    """Neighbouring slots of a flat buffer, and the tensors that they are copied from or to.

    Args:
        slots: the buffer.
        first: index of the first slot.
        stop: one past the last.
        block_size: elements of a tile.
        fills_padding: whether tiles cover the padding of the buffer, too.
        is_written: whether the tensors are destinations, which must not overlap.

    Raises:
        RuntimeError: the current stream is capturing; tables have to be built before.

    Attributes:
        num_entries: slots, and one more for leading padding.
        num_tiles: programs to launch.
        layout: see the module docstring.
        first_tiles: index of the first tile of each entry, and the number of tiles.
        views: the slots.
    """

    def __init__(
        self,
        slots: Slots,
        first: int,
        stop: int,
        *,
        block_size: int,
        fills_padding: bool,
        is_written: bool = False,
    ) -> None:
        self.device = slots.flat.device
        if self._is_capturing():
            raise RuntimeError(
                "expected the table of these tensors to exist before the capture, found none: run "
                "one step with the same buffers before capturing"
            )
        self.views = slots.views[first:stop]
        self._flat = slots.flat
        self._flat_address = slots.flat.data_ptr()
        self._is_written = is_written
        offsets = list(slots.offsets[first:stop])
        numels = [view.numel() for view in self.views]
        spans = numels
        if fills_padding:
            ends = [*offsets[1:], slots.flat.numel()]
            spans = [end - offset for offset, end in zip(offsets, ends, strict=True)]
            if not offsets or offsets[0] > 0:
                spans.append(offsets[0] if offsets else slots.flat.numel())
                offsets.append(0)
                numels.append(0)
        self.num_entries = len(offsets)
        tiles, self.first_tiles = _cut(spans, block_size)
        self.num_tiles = tiles.numel()
        words = torch.tensor([*numels, *spans, *offsets], dtype=torch.int64)
        self.layout = torch.cat([words, tiles]).to(self.device)
        self._values: list[int] = []
        self._addresses = torch.empty(2 * self.num_entries, dtype=torch.int64, device=self.device)
        self._uploader = _Uploader(2 * self.num_entries) if self.device.type == "cuda" else None

    def bind(self, tensors: Sequence[Tensor | None]) -> Tensor:
        """The `addresses` that a kernel launched now on the current stream is to read.

        Args:
            tensors: one per slot, real, with the strides of its slot; None for absent.

        Raises:
            ValueError: destinations overlap, or a tensor overlaps the buffer outside of its slot.
            RuntimeError: the memory of a tensor or of the buffer was freed or resized, or a capture
                has more different lists of addresses than memory was set aside for.
        """
        self.check_flat()
        absent = [ABSENT] * (self.num_entries - len(tensors))
        values = [0 if t is None else t.data_ptr() for t in tensors] + absent
        values += [ABSENT if t is None else DTYPE_CODES[t.dtype] for t in tensors] + absent
        if values != self._values:
            check_memory(tensors, self.views, self._flat, is_written=self._is_written)
        if self._uploader is None:
            if values != self._values:
                self._addresses.copy_(torch.tensor(values, dtype=torch.int64))
                self._values = values
            return self._addresses
        if self._is_capturing():
            return self._uploader.capture(values, self.device)
        self._uploader.follow_stream(self.device)
        self._uploader.set_aside()
        if values != self._values:
            self._uploader.upload(values, self._addresses)
            self._values = values
        return self._addresses

    def _is_capturing(self) -> bool:
        return self.device.type == "cuda" and torch.cuda.is_current_stream_capturing()

    def check_flat(self) -> None:
        """Raises RuntimeError if the memory of the buffer is not what it was."""
        if self._flat.data_ptr() != self._flat_address or is_cut(self._flat):
            raise RuntimeError(
                f"expected the flat buffer of {self._flat.numel()} elements where it was when its "
                "table was made, found that its memory was freed, resized or moved since: make new "
                "Slots"
            )


class _Uploader:
    """Pinned memory through which addresses reach a GPU without the host waiting for it."""

    def __init__(self, numel: int) -> None:
        self._numel = numel
        self._stages = [
            (_pinned(numel), torch.cuda.Event())  # type: ignore[no-untyped-call]
            for _ in range(_NUM_STAGES)
        ]
        self._next = 0
        self._spares = [_pinned(numel) for _ in range(_NUM_SPARES)]
        # What graphs read at replay. See Note [Tables under capture].
        self._captured: list[tuple[list[int], Tensor]] = []
        self._captured_addresses: list[Tensor] = []
        self._stream: torch.cuda.Stream | None = None

    def follow_stream(self, device: torch.device) -> None:
        """Orders this stream's use of the table behind that of the stream which used it last."""
        current = torch.cuda.current_stream(device)
        if self._stream is not None and self._stream != current:
            current.wait_stream(self._stream)
        self._stream = current

    def set_aside(self) -> None:
        """Allocates the memory for captures anew that earlier ones have taken."""
        while len(self._spares) < _NUM_SPARES:
            self._spares.append(_pinned(self._numel))

    def upload(self, values: list[int], addresses: Tensor) -> None:
        stage, is_copied = self._stages[self._next]
        self._next = (self._next + 1) % _NUM_STAGES
        is_copied.synchronize()  # returns at once for an event that was never recorded
        stage.copy_(torch.tensor(values, dtype=torch.int64))
        addresses.copy_(stage, non_blocking=True)
        is_copied.record(torch.cuda.current_stream(addresses.device))

    def capture(self, values: list[int], device: torch.device) -> Tensor:
        row = next((row for known, row in self._captured if known == values), None)
        if row is None:
            if not self._spares:
                raise RuntimeError(
                    f"expected at most {_NUM_SPARES} different lists of addresses per table while "
                    "capturing, found one more: run one step without capturing in between, or keep "
                    "the tensors where they are"
                )
            row = self._spares.pop()
            row.copy_(torch.tensor(values, dtype=torch.int64))
            self._captured.append((values, row))
        addresses = torch.empty(self._numel, dtype=torch.int64, device=device)
        addresses.copy_(row, non_blocking=True)
        self._captured_addresses.append(addresses)
        return addresses


def _pinned(numel: int) -> Tensor:
    return torch.empty(numel, dtype=torch.int64, pin_memory=True)


def _cut(spans: Sequence[int], block_size: int) -> tuple[Tensor, Tensor]:
    """One word per tile, and the first tile of each span with the number of tiles at the end."""
    num_tiles = (torch.tensor(spans, dtype=torch.int64) + block_size - 1) // block_size
    first_tiles = torch.zeros(len(spans) + 1, dtype=torch.int64)
    torch.cumsum(num_tiles, 0, out=first_tiles[1:])
    entries = torch.repeat_interleave(torch.arange(len(spans)), num_tiles)
    numbers = torch.arange(entries.numel()) - first_tiles[entries]
    return entries << 32 | numbers, first_tiles
