"""Ranks agree before a capture, and fail together in it. Everything here is collective."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterable
from typing import TypeVar

import torch.distributed as dist
from torch.nn import Module

from fusedddp.graphs.participants import Participants
from fusedddp.module import FusedDDP
from fusedddp.reducer import Issue
from fusedddp.replicas import fail_together, verify_same

_T = TypeVar("_T")

# Note [Ranks that fail]
# ~~~~~~~~~~~~~~~~~~~~~~
# In an eager step every rank issues the collectives of a backward and of the buffers. A rank whose
# step raises before that has to issue them as well, or the others wait for it, and only then can it
# tell them why. So the step is rehearsed first, without these collectives. What can be wrong with
# it mostly shows there, and which rounds it has is known afterwards. In later steps a rank that
# fails issues those that it has left out, as `skip_backward` does. (Where two wrapped models of
# several buckets are reduced in one backward, those rounds overlap, and one after the other they do
# not match.) In a capture on CUDA nothing is carried out, so nobody waits, and the failed backward
# is forgotten.


def agree_to_capture(participants: Participants) -> None:
    """Checks that all ranks are about to capture the same kind of step.

    Raises:
        RuntimeError: on every rank, if they are not.
    """
    for wrapper in participants.wrappers:
        wrapper.renew_if_outdated()  # else the next forward does, which not all ranks may reach
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
        # What a step issues, in order.
        self._order: list[tuple[FusedDDP, Issue]] = []
        self._rehearsing: list[FusedDDP] | None = None

    def note_module(self, root: Module) -> None:
        """A module is met, and about to run."""
        if self._rehearsing is not None:
            for wrapper in root.modules():
                if isinstance(wrapper, FusedDDP):
                    self._rehearsing.append(wrapper)
                    wrapper.reducer.rehearsal = functools.partial(self._note, wrapper)

    def _note(self, wrapper: FusedDDP, issue: Issue) -> None:
        self._order.append((wrapper, issue))

    def rehearse(self, step: Callable[[], object]) -> None:
        """Runs one step without the collectives of wrappers, and notes which there would be.

        Raises:
            Exception: what the step raises here.
            RuntimeError: it raises on another rank.
        """
        problem: BaseException | None = None
        self._rehearsing = []
        try:
            for root in self._participants.roots:
                self.note_module(root)
            step()
        except BaseException as error:
            problem = error
        finally:
            for wrapper in self._rehearsing:
                wrapper.reducer.rehearsal = None
                if problem is not None:
                    wrapper.reducer.forget_backward()
            self._rehearsing = None
        settle(self._participants, problem)

    def run(self, step: Callable[[], _T]) -> _T:
        """Runs one step.

        Raises:
            Exception: what the step raises here.
            RuntimeError: it raises on another rank.
        """
        world = self._participants
        before = _count_issued(world.wrappers)
        result: _T | None = None
        problem: BaseException | None = None
        try:
            result = step()
        except BaseException as error:
            problem = error
        if isinstance(problem, Exception):
            issued = _count_issued(world.wrappers)
            issued.subtract(before)
            for wrapper, issue in self._order:
                if issued[wrapper, issue] > 0:
                    issued[wrapper, issue] -= 1
                else:
                    wrapper.issue(issue)
            for wrapper in world.wrappers:
                wrapper.reducer.rounds.usage.drop_lacking()
        settle(world, problem)
        return result  # type: ignore[return-value]

    def lack_steps(self) -> bool:
        """Whether a wrapper that has reduced in the last step needs more before a capture."""
        return any(
            wrapper.reducer.rounds.num_steps_missing()
            for wrapper, issue in self._order
            if issue is Issue.ROUND
        )


def _count_issued(wrappers: Iterable[FusedDDP]) -> Counter[tuple[FusedDDP, Issue]]:
    found: Counter[tuple[FusedDDP, Issue]] = Counter()
    for wrapper in wrappers:
        found[wrapper, Issue.BUFFERS] = wrapper.num_buffer_syncs
        found[wrapper, Issue.ROUND] = wrapper.reducer.rounds.count
    return found


def group_is_alive(group: dist.ProcessGroup) -> bool:
    """Whether a process group has not been destroyed."""
    return dist.is_initialized() and group in dist.distributed_c10d._world.pg_map
