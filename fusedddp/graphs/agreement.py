"""Ranks agree before a capture, and fail together in it. Everything here is collective."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist

from fusedddp.graphs.participants import Participants
from fusedddp.module import FusedDDP
from fusedddp.replicas import fail_together, verify_same

_T = TypeVar("_T")

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
    """Runs steps eagerly that all ranks take part in, and fail in together.

    See Note [Ranks that fail].
    """

    def __init__(self, participants: Participants) -> None:
        self._participants = participants
        self._issued: dict[FusedDDP, int] = {}

    def run(self, step: Callable[[], _T]) -> _T:
        """Runs one step.

        Raises:
            Exception: what the step raises here.
            RuntimeError: it raises on another rank.
        """
        world = self._participants
        before = {wrapper: wrapper.reducer.rounds.count for wrapper in world.wrappers}
        result: _T | None = None
        problem: BaseException | None = None
        try:
            result = step()
        except BaseException as error:
            problem = error
        counts = {w: w.reducer.rounds.count - before.get(w, 0) for w in world.wrappers}
        if problem is None:
            self._issued = counts
        elif isinstance(problem, Exception):
            for wrapper, count in counts.items():
                # As many as in the last step; in the first one a step is taken to reduce once.
                for _ in range(self._issued.get(wrapper, 1) - count):
                    wrapper.skip_backward()
                wrapper.reducer.rounds.usage.drop_lacking()
        settle(world, problem)
        return result  # type: ignore[return-value]

    def lack_steps(self) -> bool:
        """Whether a wrapper that has reduced in the last step needs more before a capture."""
        return any(
            count and wrapper.reducer.rounds.num_steps_missing()
            for wrapper, count in self._issued.items()
        )


def group_is_alive(group: dist.ProcessGroup) -> bool:
    """Whether a process group has not been destroyed."""
    return dist.is_initialized() and group in dist.distributed_c10d._world.pg_map
