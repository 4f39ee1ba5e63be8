"""Ranks agree before a capture, and fail together in it. Everything here is collective."""

from __future__ import annotations

from collections.abc import Iterable

import torch.distributed as dist

from fusedddp.graphs.participants import Participants
from fusedddp.module import FusedDDP
from fusedddp.replicas import fail_together, verify_same

# Note [Ranks that fail]
# ~~~~~~~~~~~~~~~~~~~~~~
# In an eager step every rank issues the collectives of a backward and of the buffers. A rank whose
# step raises before that has to issue them as well, or the others wait for it: `skip_backward`
# does so. Only then can it tell them why. In a capture on CUDA nothing is carried out, so nobody
# waits, and the failed backward is forgotten.


def agree_to_capture(participants: Participants) -> None:
    """Checks that all ranks are about to capture the same kind of step.

    Raises:
        RuntimeError: on every rank, if they are not.
    """
    for group in participants.groups():
        lines = [
            f"wrapper {index}: sync {wrapper.require_backward_grad_sync}, "
            f"training {wrapper.training}, {len(wrapper.reducer.params)} parameters"
            for index, wrapper in enumerate(participants.wrappers)
            if wrapper.process_group is group
        ]
        verify_same(group, lines, "steps to capture")


def settle(participants: Participants, problem: BaseException | None) -> None:
    """Raises on every rank of every group if `problem` is set on any."""
    groups = participants.groups()
    if not groups or not (problem is None or isinstance(problem, Exception)):
        if problem is not None:
            raise problem
        return
    for group in groups:
        fail_together(group, problem)


class Rounds:
    """How many rounds each wrapper has issued, to tell what a failed step owes the other ranks.

    See Note [Ranks that fail].
    """

    def __init__(self, wrappers: Iterable[FusedDDP]) -> None:
        self._before = {id(wrapper): wrapper.reducer.rounds.count for wrapper in wrappers}

    def complete(self, wrappers: Iterable[FusedDDP]) -> None:
        """Issues the round that the others wait for, after a step that raised."""
        for wrapper in wrappers:
            reducer = wrapper.reducer
            if reducer.rounds.count == self._before.get(id(wrapper), 0):
                wrapper.skip_backward()
            reducer.rounds.usage.drop_lacking()


def group_is_alive(group: dist.ProcessGroup) -> bool:
    """Whether a process group has not been destroyed."""
    return dist.is_initialized() and group in dist.distributed_c10d._world.pg_map
