"""One captured step: the graph, the memory that it works on, and one replay of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from fusedddp.graphs.arguments import ArgumentMemory
from fusedddp.graphs.backend import Backend, Graph
from fusedddp.graphs.gradients import Entry, Exit, Gradients, bucket_memory
from fusedddp.graphs.participants import Participants
from fusedddp.graphs.signature import Outputs
from fusedddp.graphs.staleness import Bindings


class CapturedStep:
    """A graph that serves calls of one signature.

    Make it right after the capture, before any state is put back.

    Args:
        backend: what has captured.
        graph: the graph.
        arguments: the memory in which it finds those of a call.
        outputs: what it returns.
        entry: the gradients that it begins with.
        bindings: what it depends on, from before the capture.
        participants: what it trains with.

    Attributes:
        arguments: as above.
        bindings: as above.
        entry: as above.
        last_use: a number that grows with each call; for the least recently used.
    """

    def __init__(
        self,
        backend: Backend,
        graph: Graph,
        arguments: ArgumentMemory,
        outputs: Outputs,
        entry: Entry,
        bindings: Bindings,
        participants: Participants,
    ) -> None:
        self.bindings = bindings
        self.entry = entry
        self.last_use = 0
        self._backend = backend
        self._graph = graph
        self.arguments = arguments
        self._outputs = outputs
        self._exit = Exit(participants.params, participants.wrappers)
        self._wrappers = [
            (w, w.reducer, w.reducer.accumulated, w.require_forward_param_sync)
            for w in participants.wrappers
        ]
        self._memory = bucket_memory(participants.wrappers)

    def replay(self, tensors: Sequence[Tensor], gradients: Gradients) -> Any:
        """Trains one step on `tensors`, and returns what the step returns.

        Args:
            tensors: those of the call.
            gradients: those that there are.

        A replay runs no Python of the step. What the step leaves behind in Python, which is
        `.grad` and what wrappers note of a backward, is put in place here.
        """
        self.arguments.fill(tensors)
        self.entry.fill(gradients)
        self._backend.replay(self._graph)
        self.arguments.give_back(tensors)
        self._exit.restore(gradients)
        for wrapper, reducer, accumulated, syncs_params in self._wrappers:
            reducer.accumulated = accumulated
            reducer.note_delivery()
            reducer.pending_forward = None
            wrapper.require_forward_param_sync = syncs_params
        return self._outputs.read()

    def drop(self) -> None:
        """Lets the graph go; gradients that it has left stay."""
        self._backend.synchronize()
        self._graph.reset()
        self.arguments.drop()
        self._memory = []
