"""What is noted of the first backward that is reduced, and what ranks make of it."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist

from fusedddp.control import Part


class Agreement(NamedTuple):
    """What all ranks know after a recorded backward.

    Attributes:
        order: indices of all parameters in the order in which their gradients arrived on the
            lowest rank that saw its backward to the end.
        fire_counts: how often each parameter fired, at most on any rank.
        is_whole: whether no rank's backward was ended by an exception, and any had one.
        num_expected: how many ranks meant to contribute.
        num_abandoned: how many ranks had their backward ended by an exception.
    """

    order: list[int]
    fire_counts: list[int]
    is_whole: bool
    num_expected: int
    num_abandoned: int


class Recording:
    """The order in which parameters last fired in a backward, and how often each did."""

    def __init__(self, num_params: int) -> None:
        self._order: dict[int, None] = {}
        self._fire_counts = [0] * num_params

    @classmethod
    def of(cls, fired: bytearray) -> Recording:
        """One in which each parameter whose byte is 1 fired once, in the order of indices."""
        recording = cls(len(fired))
        for index, has_fired in enumerate(fired):
            if has_fired:
                recording.note(index)
        return recording

    def note(self, index: int) -> None:
        self._order.pop(index, None)
        self._order[index] = None
        self._fire_counts[index] += 1

    def agree(
        self,
        group: dist.ProcessGroup,
        device: torch.device,
        *,
        part: Part,
        has_comm_hook: bool,
    ) -> Agreement:
        """Exchanges what was recorded. Collective.

        Args:
            group: the process group.
            device: where its backend reduces.
            part: how this rank takes part.
            has_comm_hook: a comm hook reduces on this rank.

        Raises:
            RuntimeError: on all ranks, if a comm hook is registered on some of them only.
        """
        rank, world_size = dist.get_rank(group), dist.get_world_size(group)
        num_params = len(self._fire_counts)
        is_whole = part is Part.WHOLE
        left_out = [int(not is_whole and other == rank) for other in range(world_size)]
        abandoned = [int(part is Part.ABANDONED and other == rank) for other in range(world_size)]
        lowest = -rank if self._order and is_whole else -world_size
        mine = [
            *self._fire_counts,
            *left_out,
            *abandoned,
            lowest,
            int(has_comm_hook),
            int(not has_comm_hook),
        ]
        maxima = torch.tensor(mine, dtype=torch.int32, device=device)
        dist.all_reduce(maxima, op=dist.ReduceOp.MAX, group=group)
        *totals, lowest, any_hook, any_without = maxima.tolist()
        if any_hook and any_without:
            raise RuntimeError(
                "expected the same comm hook on all ranks, found that some ranks have one and some "
                "have none. Call register_comm_hook on every rank before the first backward."
            )
        order = list(self._order)
        order += [i for i in reversed(range(num_params)) if i not in self._order]
        agreed = torch.tensor(order, dtype=torch.int32, device=device)
        source = -lowest if -lowest < world_size else 0
        dist.broadcast(agreed, group=group, group_src=source)
        num_left_out = sum(totals[num_params : num_params + world_size])
        num_abandoned = sum(totals[num_params + world_size :])
        return Agreement(
            agreed.tolist(),
            totals[:num_params],
            is_whole=-lowest < world_size and not num_abandoned,
            num_expected=world_size - num_left_out,
            num_abandoned=num_abandoned,
        )
