"""A step in two graphs with the reduction between them, for collectives that cannot be captured."""

from __future__ import annotations

import contextlib
from typing import Any

from fusedddp.graphs import ending
from fusedddp.graphs.participants import Participants
from fusedddp.graphs.step import GraphedStep
from fusedddp.manual import all_reduce_gradients


class SplitStep(ending.Closing):
    """Backward in one graph, gradients averaged eagerly, update in another graph.

    Args:
        backward: the step up to the gradients; runs under `no_sync`.
        update: the step from the gradients on; takes no arguments.
        participants: what the first of them trains with.
    """

    def __init__(
        self, backward: GraphedStep, update: GraphedStep, participants: Participants
    ) -> None:
        self._backward = backward
        self._update = update
        self._participants = participants

    def prepare(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        with self._without_sync():
            self._backward.prepare(args, kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Trains one step; under the user's own `no_sync` it only accumulates gradients."""
        wrappers = self._participants.wrappers
        syncs = all(wrapper.require_backward_grad_sync for wrapper in wrappers)
        if not syncs and any(wrapper.require_backward_grad_sync for wrapper in wrappers):
            raise RuntimeError(
                "expected all wrapped models of a step of two functions under no_sync, or none, "
                f"found some of {len(wrappers)}. Enter no_sync for each of them."
            )
        with self._without_sync():
            result = self._backward(*args, **kwargs)
        if syncs:
            for wrapper in self._participants.wrappers:
                reducer = wrapper.reducer
                all_reduce_gradients(reducer.params, wrapper.process_group)
                reducer.accumulated = bytes(len(reducer.params))  # all of it is reduced
            self._update()
        return result

    @contextlib.contextmanager
    def _without_sync(self) -> Any:
        with contextlib.ExitStack() as stack:
            for wrapper in self._participants.wrappers:
                stack.enter_context(wrapper.no_sync())
            yield

    @property
    def num_graphs(self) -> int:
        return self._backward.num_graphs + self._update.num_graphs

    def close(self) -> None:
        self._backward.close()
        self._update.close()
