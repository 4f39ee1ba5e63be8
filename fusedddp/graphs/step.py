"""`GraphedStep`: which graph a call needs, when one has to be captured, and what may not be."""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
from collections.abc import Callable, Hashable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Module

from fusedddp.capturing import is_capturing
from fusedddp.graphs import agreement, ending
from fusedddp.graphs.arguments import ArgumentMemory
from fusedddp.graphs.backend import Backend
from fusedddp.graphs.captured import CapturedStep
from fusedddp.graphs.errors import translate
from fusedddp.graphs.gradients import Entry, Gradients, StorageWatch, find_dropped
from fusedddp.graphs.participants import Participants
from fusedddp.graphs.signature import (
    Inputs,
    Outputs,
    copied,
    detached,
    fill,
    first_difference,
    flatten_inputs,
    placeholder,
    rebuild,
)
from fusedddp.graphs.staleness import Bindings, Stale
from fusedddp.graphs.state import Snapshot
from fusedddp.graphs.variables import Variables, find_variables

logger = logging.getLogger(__name__)


class _Running(threading.local):
    """The graphed steps whose function runs in a thread, the innermost last."""

    def __init__(self) -> None:
        self.steps: list[GraphedStep] = []


_running = _Running()

# More runs in warm-up than any wrapper needs to lay its buckets out.
_MAX_FURTHER_RUNS = 4
# A graph that is captured anew for each call costs more than it saves.
_MAX_STALE_IN_A_ROW = 3

# Note [Graphs of a step]
# ~~~~~~~~~~~~~~~~~~~~~~~
# A graph does again what the captured step did, on the same memory. Three things decide whether it
# is what an eager step would do now.
# - What leads to another graph, since steps take turns with it: arguments (signature.py), train or
#   eval, no_sync, autocast and the like (Participants.mode), and which gradients are there when
#   the step begins (gradients.py). With accumulation there are three graphs: the first
#   micro-step, which finds no gradients, those that add to them, and the one that reduces.
# - What leads to a new capture of the same graph: whatever it has baked in (staleness.py).
# - What is put where the graph reads it: arguments, gradients, hyper-parameters that are tensors.
#
# Graphs share a pool of memory. One may use as scratch what another has written as its result, so
# nothing that has to survive the next call stays in the pool: results are copied out, and gradients
# are copied to where the next graph looks for them.


class GraphedStep(ending.Closing):
    """A training step that is captured into graphs and replayed. See `make_graphed_step`.

    A context manager: at its end the graphs are let go.
    """

    def __init__(
        self,
        step: Callable[..., Any],
        participants: Participants,
        backend: Backend | None,
        device_type: str,
        *,
        warmup: int,
        max_graphs: int,
        pool: Any,
        insists: bool,
        must_return: bool = True,
    ) -> None:
        self._step = step
        self._participants = participants
        self._backend = backend
        self._device_type = device_type
        self._warmup = warmup
        self._max_graphs = max_graphs
        self._insists = insists
        self._must_return = must_return
        self._pool = pool
        self._owns_pool = pool is None
        self._graphs: dict[Hashable, list[CapturedStep]] = {}
        self._num_calls = 0
        self._stale_in_a_row = 0
        self._new_in_a_row = 0
        self._last_inputs: Inputs | None = None
        self._thread = threading.get_ident()
        self._is_closed = False
        if backend is not None:
            ending.note_live(self)

    # -- calls -----------------------------------------------------------------------------------

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Trains one step.

        Returns:
            What the step returns, in the same structure, as tensors of its own without an
            autograd history.

        Raises:
            RuntimeError: called after `close` or the end of the process group, inside of a capture
                or of itself, from another thread, or in `join`; what the capture has met.
        """
        self._check_call()
        with self._running():
            if self._backend is None:
                return copied(self._step(*args, **kwargs))
            return self._call(args, kwargs)

    def prepare(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Captures for these arguments, and leaves everything as it was. Collective."""
        self._check_call()
        if self._backend is None:
            return
        with self._running():
            self._capture(flatten_inputs(args, kwargs, self._device_type))

    @contextlib.contextmanager
    def _running(self) -> Iterator[None]:
        _running.steps.append(self)
        try:
            yield
        finally:
            _running.steps.pop()

    def _call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        inputs = flatten_inputs(args, kwargs, self._device_type)
        gradients = Gradients.of(self._participants.params)
        found = self._find(inputs, gradients)
        if found is not None:
            found.bindings.renew()
            change = found.bindings.find_change()
            if change is None:
                self._stale_in_a_row = self._new_in_a_row = 0
            else:
                self._drop_stale(found, change)
                found = None
        elif self._graphs:
            self._note_new(inputs)
        if found is None:
            found = self._capture(inputs)
            if found is None:  # it turned out that it cannot be one
                return copied(self._step(*args, **kwargs))
            gradients = Gradients.of(self._participants.params)  # parameters may be new
        found.arguments.check(inputs.tensors)
        self._num_calls += 1
        found.last_use = self._num_calls
        self._last_inputs = inputs._replace(tensors=[])  # for messages
        return found.replay(inputs.tensors, gradients)

    def _find(self, inputs: Inputs, gradients: Gradients) -> CapturedStep | None:
        for graph in self._graphs.get(self._key(inputs), ()):
            if graph.entry.fits(gradients):
                return graph
        return None

    def _key(self, inputs: Inputs) -> Hashable:
        return inputs.signature, self._participants.mode(self._device_type)

    def _drop_stale(self, graph: CapturedStep, change: Stale) -> None:
        self._stale_in_a_row += 1
        self._remove(graph)
        if self._stale_in_a_row > _MAX_STALE_IN_A_ROW:
            self._stale_in_a_row = 0
            raise RuntimeError(
                f"expected a graph to serve several calls, found {_MAX_STALE_IN_A_ROW + 1} calls "
                f"in a row that needed a new capture, this one because {change.what}. "
                f"{change.remedy}"
            )
        logger.info("The graph is captured anew, because %s.", change.what)

    def _note_new(self, inputs: Inputs) -> None:
        self._new_in_a_row += 1
        if self._new_in_a_row > 2 * self._max_graphs and self._last_inputs is not None:
            number, self._new_in_a_row = self._new_in_a_row, 0
            raise RuntimeError(
                f"expected at most {self._max_graphs} kinds of calls (max_graphs), found "
                f"{number} calls in a row that no graph was there for: "
                f"{first_difference(self._last_inputs, inputs)}. Pass numbers that change as "
                "tensors, pad inputs to a few shapes, or raise max_graphs."
            )

    # -- capture ---------------------------------------------------------------------------------

    def _capture(self, inputs: Inputs) -> CapturedStep | None:
        """Warms up, captures, and puts all state back. Collective.

        Returns:
            What was captured; None if it turned out that the step has to run eagerly.
        """
        world, backend = self._participants, self._backend
        assert backend is not None
        world.refresh()
        variables = find_variables(self._step, world.modules)
        for each in variables:
            world.add_all(each.values())
        agreed = bool(world.wrappers)
        if agreed:
            agreement.agree_to_capture(world)
        while self.num_graphs >= self._max_graphs:
            self._drop_oldest()
        if not self._graphs and self._owns_pool:
            # Gradients may still live in a pool that no graph uses, and torch shares none such.
            self._pool = backend.new_pool()
        snapshot = Snapshot(world, self._device_type)
        captured: CapturedStep | None = None
        try:
            placeholders = [placeholder(tensor) for tensor in inputs.tensors]
            args, kwargs = rebuild(inputs, placeholders)

            def run() -> Any:
                return detached(self._step(*args, **kwargs))

            def refill_and_run() -> None:
                fill(placeholders, inputs.tensors)
                run()

            dropped = self._warm_up(refill_and_run, snapshot, placeholders)
            if not agreed:
                agreement.agree_to_capture(world)
            elsewhere = world.find_elsewhere(self._device_type)
            if elsewhere is not None:
                self._refuse_device(elsewhere)
                return None
            fill(placeholders, inputs.tensors)
            world.refresh()
            key = self._key(inputs)
            captured = self._record(run, placeholders, dropped, snapshot, variables)
        finally:
            if captured is None:
                snapshot.undo()
        self._graphs.setdefault(key, []).append(captured)
        return captured

    def _record(
        self,
        run: Callable[[], Any],
        placeholders: list[Tensor],
        dropped: set[int],
        snapshot: Snapshot,
        variables: list[Variables],
    ) -> CapturedStep:
        """The capture itself, which raises on all ranks if it fails on any."""
        world, backend = self._participants, self._backend
        assert backend is not None
        bindings = Bindings(world, self._step, variables)
        entry = Entry(world.params, dropped)
        versions = [tensor._version for tensor in placeholders]
        captured: CapturedStep | None = None
        problem: BaseException | None = None
        # Casts that autocast has kept are of the parameters as they were.
        torch.clear_autocast_cache()
        # Nothing is issued in a capture, on none of the ranks.
        all_rounds = [wrapper.reducer.rounds for wrapper in world.wrappers]
        counts = [rounds.count for rounds in all_rounds]
        try:
            snapshot.check_restored()
            graph, result = backend.capture(run, self._pool)
            change = bindings.find_change_inside()
            if change is not None:
                raise RuntimeError(
                    "expected the step to change nothing but the values of tensors, in place, "
                    f"found that in the step {change}: a replay would not do that. Do it outside "
                    "of the step."
                )
            outputs = Outputs(result, self._device_type)
            if self._must_return and not outputs.has_tensors:
                raise TypeError(
                    f"expected the step to return a tensor, found that it returns {result!r}. "
                    "A replay shows nothing else of what it computes: return the loss."
                )
            written = [i for i, t in enumerate(placeholders) if t._version != versions[i]]
            memory = ArgumentMemory(
                placeholders, written, snapshot.writes, reads=bindings.tensors()
            )
            captured = CapturedStep(backend, graph, memory, outputs, entry, bindings, world)
            if self._is_closed:
                raise RuntimeError(
                    "expected a step that stays open while it is captured, found that it was "
                    "closed there. Close it after the call."
                )
        except BaseException as error:
            problem = translate(error)
            if problem is not error:
                problem.__cause__ = error
            for wrapper in world.wrappers:
                wrapper.reducer.forget_backward()
        finally:
            torch.clear_autocast_cache()
            for rounds, count in zip(all_rounds, counts, strict=True):
                rounds.count = count
            snapshot.restore()
        try:
            agreement.settle(world, problem)
        except BaseException:
            # A rank that failed has lost its graphs, see Backend.capture. If another one replayed
            # one of its own while that one captures anew, their collectives would not match.
            if captured is not None:
                captured.drop()
            self.close_graphs()
            raise
        assert captured is not None
        return captured

    def _warm_up(
        self, run: Callable[[], None], snapshot: Snapshot, placeholders: list[Tensor]
    ) -> set[int]:
        """Runs the step eagerly, puts all state back; returns which gradients it drops."""
        world, backend = self._participants, self._backend
        assert backend is not None
        rounds = agreement.Rounds(world)

        def watched() -> None:
            with snapshot.first_writes(placeholders):
                run()

        def meet_module(module: Module) -> None:
            snapshot.add_module(module)
            rounds.note_module(module)

        with backend.warm_up(), world.met(meet_module, snapshot.add_optimizer):
            rounds.rehearse(watched)
            # Under a dispatch mode torch.compile compiles other code: the last one is without.
            for function in (watched, *[run] * max(1, self._warmup - 1)):
                snapshot.restore_gradients()
                rounds.run(function)
            snapshot.restore_accumulated()
            dropped = rounds.run(lambda: self._probe(run, snapshot, placeholders))
            for _ in range(_MAX_FURTHER_RUNS):
                if not rounds.lack_steps():
                    break
                snapshot.restore_gradients()
                rounds.run(run)
        snapshot.restore()
        return dropped

    def _probe(
        self, run: Callable[[], None], snapshot: Snapshot, placeholders: list[Tensor]
    ) -> set[int]:
        """Runs the step once, and finds out which gradients it drops without looking at them.

        Raises:
            RuntimeError: it replaces a tensor that it has read, as in ``mean = 0.9 * mean + loss``;
                or it writes one that it has made in an earlier run.
        """
        variables = find_variables(self._step, self._participants.modules)
        before = [each.tensors() for each in variables]
        watch = StorageWatch(t for tensors in before for t in tensors.values())
        writes = snapshot.later_writes(placeholders)
        with watch, writes:
            dropped = find_dropped(self._participants.params, run)
        for each, tensors in zip(variables, before, strict=True):
            for name, tensor in tensors.items():
                if writes.has_written(tensor) and not snapshot.keeps(tensor):
                    raise RuntimeError(
                        "expected the tensors that the step writes to exist before its first run, "
                        f"or never to be written again, found that {name} (in "
                        f"{each.readers[name]}) is made in one run and written in the next. Run "
                        "one step eagerly before make_graphed_step."
                    )
        for each, tensors in zip(variables, before, strict=True):
            now = each.tensors()
            for name, tensor in tensors.items():
                current = now.get(name)
                # A new view of the same memory, of an argument say, is the same to a replay.
                if watch.has_seen(tensor) and not (
                    current is not None
                    and snapshot.storages_of([current]) == snapshot.storages_of([tensor])
                ):
                    raise RuntimeError(
                        "expected the step to change nothing but the values of tensors, in place, "
                        f"found that it reads {name} (in {each.readers[name]}) and puts another "
                        "tensor in its place: a replay would read the first one each time. Write "
                        f"it in place, as in {name}.copy_(...)."
                    )
        return dropped

    def _refuse_device(self, elsewhere: str) -> None:
        if self._insists:
            raise ValueError(
                f"expected all that the step trains on {self._device_type}, found that {elsewhere}."
                " Move it there, or leave `enabled` out to run eagerly."
            )
        logger.info("The step runs eagerly, without a graph, because %s.", elsewhere)
        self._backend = None
        self.close_graphs()

    # -- the end ---------------------------------------------------------------------------------

    def _drop_oldest(self) -> None:
        oldest = min(
            (graph for graphs in self._graphs.values() for graph in graphs),
            key=lambda graph: graph.last_use,
        )
        logger.info("The least recently used graph is dropped: there are max_graphs of them.")
        self._remove(oldest)

    def _remove(self, graph: CapturedStep) -> None:
        for key, graphs in list(self._graphs.items()):
            if graph in graphs:
                graphs.remove(graph)
                if not graphs:
                    del self._graphs[key]
        graph.drop()

    @property
    def num_graphs(self) -> int:
        """How many graphs there are now."""
        return sum(map(len, self._graphs.values()))

    def uses(self, group: dist.ProcessGroup | None) -> bool:
        """Whether graphs hold collectives of `group`; None and the default group stand for all."""
        is_all = group is None or group is dist.group.WORLD
        return is_all or group in self._participants.groups()

    def close_graphs(self) -> None:
        for graphs in self._graphs.values():
            for graph in graphs:
                graph.drop()
        self._graphs = {}

    def close(self) -> None:
        """Lets all graphs go. The step cannot be called any more; calling this twice is fine."""
        if not self._is_closed:
            self._is_closed = True
            self._last_inputs = None
            self.close_graphs()
            ending.note_closed(self)

    def __del__(self) -> None:
        if not self.__dict__.get("_is_closed", True) and not sys.is_finalizing():
            self.close()

    def _check_call(self) -> None:
        problem: tuple[str, str] | None = None
        dead = [g for g in self._participants.groups() if not agreement.group_is_alive(g)]
        if dead:
            problem = (
                "the process group to be there",
                "that it was destroyed. Make a new step after wrapping the model again",
            )
        elif self._is_closed:
            problem = ("an open step", "that it was closed. Make a new one by make_graphed_step")
        elif threading.get_ident() != self._thread:
            problem = (
                "calls from the thread that made the step",
                f"one from {threading.current_thread().name}. Make a step in each thread",
            )
        elif self in _running.steps:
            problem = (
                "a step that does not call itself",
                "that it does. Call the function itself instead",
            )
        elif any(step._backend is not None for step in _running.steps):
            problem = (
                "no graphed step within another one",
                "one. Call or graph the function itself in there",
            )
        elif is_capturing():
            problem = (
                "no capture around a graphed step",
                "one. Call the function itself in there, or leave the outer capture out",
            )
        elif any(wrapper._join_config.enable for wrapper in self._participants.wrappers):
            problem = (
                "no join() around a graphed step",
                "one, in which ranks may end at different times. Use the function itself",
            )
        if problem is not None:
            raise RuntimeError(f"expected {problem[0]}, found {problem[1]}.")


def tensors_of(participants: Participants, args: Any, kwargs: Any) -> list[Tensor]:
    """All tensors by which the device of a step is told."""
    return [*flatten_inputs(args, kwargs).tensors, *participants.params, *participants.buffers]
