"""What ranks tell each other once a round, beside the gradients: a small int32 vector, summed.

It has a buffer of its own because a tail of flags in a bucket does not survive compression by a
comm hook.
"""

from __future__ import annotations

import dataclasses
import enum

import torch
import torch.distributed as dist

from fusedddp.collectives import same_on_all_ranks

_HEADER = 7  # round, its square, layout checksum, its square, skipped, abandoned, failed
_MASK = 0xFFF  # so that squares of rounds, summed over 128 ranks, stay inside int32
_LATE = 1 << 16  # one late contribution, counted above the ranks that contributed in time


class Part(enum.Enum):
    """How a rank takes part in a round."""

    WHOLE = "whole"  # with the gradients of its backward
    SKIPPED = "skipped"  # it means to contribute nothing
    ABANDONED = "abandoned"  # an exception ended its backward


class Control:
    """The exchange of one round.

    Args:
        group: the process group.
        device: where the vector lives; a device that the group's backend reduces on.
        round_index: how many rounds this rank has issued.
        checksum: of the layout, below 2**15.
        fired: one byte per parameter: 1 if it contributed since the last round.
        late: indices of parameters whose gradient came after theirs had been taken.
        state: how this rank takes part.
        has_failed: the comm hook failed here.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        device: torch.device,
        round_index: int,
        checksum: int,
        fired: bytearray,
        late: list[int],
        *,
        state: Part,
        has_failed: bool,
    ) -> None:
        self._world_size = dist.get_world_size(group)
        self._round = round_index & _MASK
        self._checksum = checksum & _MASK
        header = [
            self._round,
            self._round**2,
            self._checksum,
            self._checksum**2,
            int(state is not Part.WHOLE),
            int(state is Part.ABANDONED),
            int(has_failed),
        ]
        vector = torch.empty(_HEADER + len(fired), dtype=torch.int32)
        vector[:_HEADER] = torch.tensor(header, dtype=torch.int32)
        vector[_HEADER:] = torch.frombuffer(fired, dtype=torch.uint8)
        for param in late:
            vector[_HEADER + param] += _LATE
        self._vector = vector.to(device)
        work = dist.all_reduce(self._vector, group=group, async_op=True)
        assert work is not None
        self._work = work

    def wait(self) -> None:
        self._work.wait()

    def read(self) -> ControlReading:
        """The sums over all ranks. Reads on the host, so on a GPU it waits for the device.

        Raises:
            RuntimeError: ranks issue different rounds or buckets.
        """
        values = self._vector.cpu()
        total_round, round_squares, total_checksum, checksum_squares, *counts = values[
            :_HEADER
        ].tolist()
        num_left_out, num_abandoned, num_failed = counts
        if not same_on_all_ranks(total_round, round_squares, self._round, self._world_size):
            raise RuntimeError(
                "expected all ranks to reduce the same backward, found that this rank is at its "
                f"backward number {self._round} and another rank is at a different one. Every rank "
                "must call backward equally often outside no_sync()."
            )
        if not same_on_all_ranks(
            total_checksum, checksum_squares, self._checksum, self._world_size
        ):
            raise RuntimeError(
                "expected the same buckets on all ranks, found different ones. Build the wrapper "
                "with the same model and keywords on every rank."
            )
        per_param = values[_HEADER:]
        return ControlReading(
            num_ranks=(per_param & (_LATE - 1)).tolist(),
            late=(per_param >= _LATE).nonzero().flatten().tolist(),
            num_expected=self._world_size - num_left_out,
            num_abandoned=num_abandoned,
            num_failed=num_failed,
        )


@dataclasses.dataclass(frozen=True)
class ControlReading:
    """The outcome of an exchange.

    Attributes:
        num_ranks: for each parameter how many ranks contributed a gradient in time.
        late: indices of parameters for which some rank has a late contribution.
        num_expected: how many ranks meant to contribute.
        num_abandoned: how many ranks had their backward ended by an exception.
        num_failed: how many ranks had their comm hook fail.
    """

    num_ranks: list[int]
    late: list[int]
    num_expected: int
    num_abandoned: int
    num_failed: int
