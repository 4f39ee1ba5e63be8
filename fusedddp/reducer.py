"""Drives the buckets through a backward: hooks, launch order, the end of backward.

A backward that is to be reduced ends in one round: see Note [Rounds].
"""

from __future__ import annotations

import enum
import logging
import weakref
from collections.abc import Callable, Collection, Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter
from torch.optim.optimizer import Optimizer

from fusedddp.bucket import Bucket, Chunk, is_shared
from fusedddp.capturing import is_capturing
from fusedddp.comm_hooks import CommHook
from fusedddp.config import Options
from fusedddp.control import Part
from fusedddp.dynamo import refuse_compiled_autograd
from fusedddp.hooks import ParamHooks
from fusedddp.layout import Layout
from fusedddp.mixed_precision import MixedPrecision
from fusedddp.optimizers import StepWatch, params_of
from fusedddp.output_hooks import watch_output
from fusedddp.plan import Plan
from fusedddp.recording import Recording
from fusedddp.rounds import Rounds

logger = logging.getLogger(__name__)


class Phase(enum.Enum):
    """What the reducer is in the middle of."""

    IDLE = "idle"  # between backwards
    LOCAL = "local"  # a backward that accumulates without reducing: no_sync
    RECORDING = "recording"  # the first reducing backward: order and fire counts are noted
    REDUCING = "reducing"  # a backward that launches buckets as they fill


class Issue(enum.Enum):
    """What ranks do together in a step."""

    BUFFERS = "buffers"  # before a forward
    ROUND = "round"  # in a backward


class Reducer:
    """Averages the gradients of `params` over a process group during backward.

    Args:
        trained: names and parameters to average, in an order that is the same on all ranks.
        frozen: names and parameters that require no gradient now. Unfreezing them makes this
            reducer outdated.
        group: the process group.
        options: the wrapper's options.
        requires_sync: tells whether a backward that begins now is to be reduced.
        on_launched: called in every round once all buckets are launched; returns what is to be
            called after they are waited for.
        on_reduced: called at the end of every round, with the gradients handed out.
        check_params: called with indices of parameters that received no gradient; raises if the
            module has others in their place by now.
        comm_hook: what reduces buckets instead of an all-reduce; it gets dense gradients only.
        sparse: indices of those of `trained` whose gradients are sparse.
        precision: lowered while a backward runs, restored before gradients are handed out; None
            for none.
    """

    def __init__(
        self,
        trained: Sequence[tuple[str, Parameter]],
        frozen: Sequence[tuple[str, Parameter]],
        group: dist.ProcessGroup,
        options: Options,
        *,
        requires_sync: Callable[[], bool],
        on_launched: Callable[[], Callable[[], None]],
        on_reduced: Callable[[], None],
        check_params: Callable[[Sequence[int]], None],
        comm_hook: CommHook | None = None,
        sparse: Collection[int] = (),
        precision: MixedPrecision | None = None,
    ) -> None:
        self.names = [name for name, _ in trained]
        self.params = [param for _, param in trained]
        self._first = next(param for _, param in (*trained, *frozen))
        self.device = self._first.device
        self._frozen = [param for _, param in frozen]
        self._phase = Phase.IDLE
        self._requires_sync = requires_sync
        self._on_reduced = on_reduced
        self._precision = precision
        # Whether a backward is reduced whose forward returned no tensor that could carry a hook.
        self._hidden_forward_syncs = True
        self._graph_task = -1
        self._callback: weakref.ref[Callable[[], None]] | None = None
        # 1 for parameters that received a gradient: in this backward, and in backwards without
        # reduction since the last round.
        self._fired = bytearray(len(self.params))
        self._fired_before = bytearray(len(self.params))
        self._notes_producers = any(param.device.type != "cpu" for param in self.params)
        # Whether `.grad` was None after a backward that was to be reduced and delivered nothing.
        self._undelivered: list[bool] | None = None
        # Whether the backward of the last forward is to be reduced; None if there is none to come.
        self.pending_forward: bool | None = None
        # While a step is rehearsed no collectives are issued, and this is called in their place.
        self.rehearsal: Callable[[Issue], None] | None = None
        self._is_rehearsed = False
        # Which parameters had no gradient when a backward without reduction began.
        self._was_none: list[bool] = []
        # Whether this backward accumulates into leaves, which torch.autograd.grad does not.
        self._accumulates = False
        self._late: list[int] = []
        self._overtaken: list[int] = []
        reducer_ref = weakref.ref(self)

        def check_step(optimizer: Optimizer) -> None:
            reducer = reducer_ref()
            if reducer is not None:
                reducer.check_step(optimizer)

        self._watch = StepWatch(check_step)
        weakref.finalize(self, self._watch.stop).atexit = False
        self._hooks = ParamHooks(self, self.params, frozen)
        self.rounds = Rounds(
            self.names,
            self.params,
            group,
            options,
            hooks=self._hooks,
            on_launched=on_launched,
            check_params=check_params,
            comm_hook=comm_hook,
            sparse=sparse,
        )
        self._start_backward_state()

    @property
    def plan(self) -> Plan | None:
        return self.rounds.plan

    @property
    def buckets(self) -> list[Bucket]:
        """The buckets, in the order of their launch; none before the first round."""
        return [] if self.plan is None else self.plan.buckets

    @property
    def layout(self) -> Layout | None:
        """Which gradient lies where; None before the first round."""
        return None if self.plan is None else self.plan.layout

    @property
    def phase(self) -> Phase:
        return self._phase

    @phase.setter
    def phase(self, phase: Phase) -> None:
        self._phase = phase
        is_short = phase is Phase.REDUCING and not self._notes_producers
        self._hooks.shorten(self._graph_task if is_short else None)

    def remove_hooks(self) -> None:
        """Takes the hooks off the parameters; backwards are local from then on."""
        self._hooks.remove()

    def set_comm_hook(self, hook: CommHook) -> None:
        """Reduces by `hook` from the next backward on. Every rank must call it.

        Raises:
            RuntimeError: there is one already, or mixed precision, or a backward is under way.
        """
        if self._precision is not None:
            raise RuntimeError(
                "expected no comm hook beside mixed_precision, which reduces in its own dtype, "
                f"found {hook.name}. Leave one of them out."
            )
        self.check_finalized()
        self.rounds.set_comm_hook(hook)

    # -- gradients arrive ------------------------------------------------------------------------

    def mark_ready(self, index: int, param: Tensor) -> None:
        """The hook of parameter `index`: a gradient has been accumulated into its `.grad`.

        While a backward is reduced, `ParamHooks` skips this and goes to the chunk at once.
        """
        if torch._C._current_graph_task_id() != self._graph_task:
            self._drop_stale(index)
        if self.phase is Phase.IDLE:
            self._begin_backward(self._hidden_forward_syncs, first=index)
        if self.phase is Phase.REDUCING:
            assert self.plan is not None
            bucket, chunk = self.plan.chunks[index]
            if self._notes_producers:
                bucket.note_producer()
            chunk.arrived.append(index)
            if len(chunk.arrived) == chunk.takes_at:
                self.take_chunk(index, param)
            return
        if param.grad is None:  # an undefined gradient delivers nothing
            return
        self._fired[index] = 1
        if self.phase is Phase.RECORDING:
            self._recording.note(index)

    def take_chunk(self, index: int, param: Tensor) -> None:
        """Moves a chunk into its bucket if all its gradients are there; that of `index` is last.

        A chunk that is not taken here is taken at the end of the backward.
        """
        assert self.plan is not None
        bucket, chunk = self.plan.chunks[index]
        gradients = chunk.gradients()
        if not chunk.is_complete(gradients):
            return
        if not self._hooks.is_last(index, param):
            # A hook that the user registered after ours has yet to run; ours is put last for the
            # next backward.
            self._overtaken.append(index)
            return
        if not chunk.fits(gradients):
            self.rounds.layouts.conform(bucket.layout.params[chunk.start : chunk.stop])
            if chunk.find_misfit() is not None:
                self._record_anew(chunk)
                return
            gradients = chunk.gradients()
        bucket.take(chunk, gradients)
        if not bucket.num_untaken:
            self.plan.launch_full_buckets()

    def _gather_arrivals(self) -> None:
        """Notes which parameters fired while gradients were reduced, and which did so too late."""
        if self.phase is Phase.REDUCING:
            assert self.plan is not None
            self._fired, self._late = self.plan.arrivals()

    def _end_arrivals(self) -> None:
        """Nothing more arrives in this backward."""
        if self._precision is not None:
            self._precision.restore()
        self._gather_arrivals()

    def _record_anew(self, chunk: Chunk) -> None:
        """Records this backward, because `chunk` has a gradient that does not fit."""
        self._gather_arrivals()
        self.rounds.drop_plan(chunk)
        self._recording = Recording.of(self._fired)
        self.phase = Phase.RECORDING

    # -- forwards --------------------------------------------------------------------------------

    def prepare_for_forward(self, sync: bool = True) -> None:
        """Called before a forward that may lead to a backward.

        Args:
            sync: whether that backward is to be reduced.

        Raises:
            RuntimeError: the last reduction lacked gradients, and that is not allowed.
        """
        if torch._C._current_graph_task_id() != -1:
            return  # activation checkpointing runs the forward again inside of a backward
        if self.phase is not Phase.IDLE:
            self._complete_abandoned()
        if sync:
            self.rounds.usage.start_forward()

    def is_outdated(self) -> bool:
        """Whether other parameters require a gradient now, or the module has been moved.

        Asks every parameter that was frozen, but those that were trained only after a round that
        lacked one which is frozen by now: with 100,000 parameters asking takes 9 ms.
        """
        usage = self.rounds.usage
        may_be_frozen, usage.has_frozen_since = usage.has_frozen_since, False
        return (
            self._first.device != self.device
            or any([param.requires_grad for param in self._frozen])
            or (may_be_frozen and not all([param.requires_grad for param in self.params]))
        )

    def _ddp_graph_static(self) -> bool:
        """DDP's name for whether all backwards so far have used the same parameters here."""
        return not self.rounds.usage.has_varied

    def _get_local_used_map(self) -> Tensor:
        """DDP's name for the number of ranks that each parameter was used on, [params], int32."""
        return self.rounds.usage.local_used_map()

    def take_over(self, other: Reducer) -> None:
        """Counts what was accumulated without reduction under a reducer that this one replaces."""
        self.rehearsal = other.rehearsal
        before = {id(p): fired for p, fired in zip(other.params, other._fired_before, strict=True)}
        self._fired_before = bytearray(before.get(id(param), 0) for param in self.params)

    def restore_abandoned(self) -> None:
        """Restores full precision if an exception ended the last backward."""
        is_outside = torch._C._current_graph_task_id() == -1
        if self._precision is not None and is_outside and self.phase is not Phase.IDLE:
            self._precision.restore()

    def prepare_for_backward(self, outputs: Iterable[Tensor], sync: bool = True) -> None:
        """Called after a forward, with the tensors that it returned.

        Args:
            outputs: a backward through any of them is one through the wrapper.
            sync: whether that backward is to be reduced.
        """
        is_watched = [watch_output(self, output, sync) for output in outputs]
        self._hidden_forward_syncs = sync or any(is_watched)

    def reach_output(self, sync: bool, accumulates: bool) -> None:
        """A backward has reached an output of a forward; it is the outermost one, mostly.

        Args:
            sync: whether a backward through that output is to be reduced.
            accumulates: whether it accumulates into leaves.
        """
        self._drop_stale()
        if self.phase is Phase.IDLE:
            if self._precision is not None:
                self._precision.lower()
            self._begin_backward(sync)
        elif self.phase is Phase.LOCAL and sync and self._requires_sync():
            # It began at an output made under no_sync, and reaches one that is to be reduced. What
            # has fired so far is taken at the end.
            if self.rehearsal is not None:
                self._is_rehearsed = True
            else:
                self.phase = Phase.RECORDING if self.plan is None else Phase.REDUCING
        self._accumulates |= accumulates

    # -- backwards -------------------------------------------------------------------------------

    def _drop_stale(self, index: int | None = None) -> None:
        """Completes an earlier backward that an exception ended, now that another one has begun.

        The engine drops the callbacks of a backward that fails, so a dead callback tells.
        """
        if self.phase is not Phase.IDLE and self._callback is not None and not self._callback():
            is_lowered = self._precision is not None and self._precision.is_lowered
            self._complete_abandoned(keep=index)
            if self._precision is not None and is_lowered:
                self._precision.lower()  # for the backward that runs now

    def check_finalized(self) -> None:
        """Raises RuntimeError if the last backward did not run to its end."""
        if self.phase is not Phase.IDLE:
            raise RuntimeError(
                "expected the last backward to have run to its end, found that it did not (phase "
                f"{self.phase.value!r}); an exception may have ended it. The next forward "
                "completes its reduction."
            )

    def _start_backward_state(self) -> None:
        self._fired = bytearray(len(self.params))
        if self.plan is not None:
            self.plan.start_round()
        else:
            self._recording = Recording(len(self.params))
        self._late = []
        self._overtaken = []
        self._accumulates = False

    def _begin_backward(self, sync: bool, first: int | None = None) -> None:
        """
        Args:
            sync: whether the forward that it comes from was to be reduced.
            first: the parameter that has received a gradient already, if it is what tells.
        """
        syncs = sync and self._requires_sync()
        self._is_rehearsed = syncs and self.rehearsal is not None
        syncs = syncs and not self._is_rehearsed
        if syncs and is_capturing():
            self.rounds.check_capturable()
        refuse_compiled_autograd()
        self._start_backward_state()
        self._graph_task = torch._C._current_graph_task_id()
        if not syncs:
            self.phase = Phase.LOCAL
            self._was_none = [param.grad is None for param in self.params]
            if first is not None:
                self._was_none[first] = True
        else:
            self.phase = Phase.RECORDING if self.plan is None else Phase.REDUCING
            self._undelivered = None
            self._watch.start()
        reducer_ref = weakref.ref(self)

        def callback() -> None:
            reducer = reducer_ref()
            if reducer is not None:
                reducer.finalize_backward()

        self._callback = weakref.ref(callback)
        torch.autograd.Variable._execution_engine.queue_callback(callback)

    # -- graphs ----------------------------------------------------------------------------------

    @property
    def accumulated(self) -> bytes:
        """One byte per parameter: 1 if it received a gradient since the last round.

        A replay runs no Python, so whoever replays sets it to what it was after the capture.
        """
        return bytes(self._fired_before)

    @accumulated.setter
    def accumulated(self, fired: bytes) -> None:
        self._fired_before = bytearray(fired)

    def forget_backward(self) -> None:
        """Drops a backward of which nothing was carried out, because its capture failed."""
        if self.phase is not Phase.IDLE:
            self._end_arrivals()
            self._abandon()
            self.phase = Phase.IDLE
        self.note_delivery()
        self.pending_forward = None
        self.rounds.usage.drop_lacking()

    # -- the end of a backward -------------------------------------------------------------------

    def finalize_backward(self) -> None:
        """The end of the outermost backward: completes the round that it began."""
        try:
            self._end_arrivals()
            if self.phase is Phase.LOCAL:
                self._fired_before = _either(self._fired_before, self._fired)
                self._hidden_forward_syncs = True  # what a forward under no_sync asked for is done
                self.pending_forward = None
                self._detach_from_shared_memory()
                if 1 in self._fired:
                    self.note_delivery()
                if self._is_rehearsed and (1 in self._fired or self._may_use_nothing()):
                    assert self.rehearsal is not None
                    self.rehearsal(Issue.ROUND)
            elif 1 in self._fired or self._may_use_nothing():
                self._complete_round(Part.WHOLE)
            else:
                self.rounds.check_absent(range(len(self.params)))
                self._undelivered = [param.grad is None for param in self.params]
        except BaseException:
            self._abandon()
            self.rounds.usage.drop_lacking()  # the error has said what there is to say
            raise
        finally:
            self.phase = Phase.IDLE

    def _detach_from_shared_memory(self) -> None:
        """Gives gradients that a local backward has left memory that nobody else writes to.

        Autograd takes what a node returns for `.grad` if there was none. The next backward would
        add to it, and may write the same memory on its way. A `.grad` that was there before is
        where the user wants it.
        """
        for param, fired, was_none in zip(self.params, self._fired, self._was_none, strict=True):
            gradient = param.grad
            if (
                fired
                and was_none
                and gradient is not None
                and gradient.layout == torch.strided
                and not gradient.requires_grad
                and is_shared(gradient)
            ):
                param.grad = gradient.clone()

    def _may_use_nothing(self) -> bool:
        """Whether a backward in which nothing fired is a round: other ranks may use parameters."""
        return (
            self._accumulates
            and self.rounds.options.find_unused_parameters
            and any(param.requires_grad for param in self.params)
        )

    def check_step(self, optimizer: Optimizer) -> None:
        """Called before an optimizer steps, while gradients may not be what it takes them for.

        Raises:
            RuntimeError: the optimizer would step on a gradient of this rank only.
        """
        stepped = params_of(optimizer)
        if self.phase is not Phase.IDLE:
            if torch._C._current_graph_task_id() == self._graph_task:
                index = next((i for i, p in enumerate(self.params) if id(p) in stepped), None)
                if index is not None:
                    raise RuntimeError(
                        "expected optimizers to step after the backward, found one that steps on "
                        f"{self.names[index]} inside of it, where its gradient is that of this "
                        "rank only. Step after the backward, or hand the optimizer over by "
                        "torch.distributed.optim._apply_optimizer_in_backward."
                    )
        elif self._undelivered is not None:
            # One that was there before had been reduced, and may have been clipped since.
            was_none = self._undelivered
            for name, param, was in zip(self.names, self.params, was_none, strict=True):
                if was and param.grad is not None and id(param) in stepped:
                    raise RuntimeError(
                        f"expected the gradient of {name} to come from a backward that reduces it, "
                        "found one that was assigned after torch.autograd.grad, which reduces "
                        "nothing, so that ranks would drift apart. Call "
                        "fusedddp.all_reduce_gradients(model) before the optimizer steps; or, if "
                        "you reduce it yourself, run torch.autograd.grad under model.no_sync()."
                    )

    def note_delivery(self) -> None:
        """Gradients have been reduced, or were meant to be local: optimizers may step."""
        self._undelivered = None
        self._watch.stop()

    def skip_round(self) -> None:
        """Takes part in a round without contributing, and gets its gradients. Collective."""
        if not self.params:
            return
        if is_capturing():
            raise RuntimeError(
                "expected no skip_backward while capturing, found one: a replay would skip each "
                "time. Call it outside of what is captured."
            )
        if self.phase is not Phase.IDLE:
            logger.warning("The last backward ended in an exception; what it left is dropped.")
            self._drop_contributions()
        else:
            self._start_backward_state()
        if self._precision is not None:
            self._precision.restore()  # a forward may have lowered it
        try:
            self._complete_round(Part.SKIPPED)
        except BaseException:
            self._abandon()
            self.rounds.usage.drop_lacking()
            raise
        finally:
            self.phase = Phase.IDLE

    def _drop_contributions(self) -> None:
        """Drops what a backward that an exception ended has left in `.grad`, and forgets it."""
        self._end_arrivals()
        for index, fired in enumerate(_either(self._fired, self._fired_before)):
            if fired:
                self.params[index].grad = None
        self._fired = bytearray(len(self.params))
        self._fired_before = bytearray(len(self.params))
        self._late = []
        self._recording = Recording(len(self.params))

    def _complete_abandoned(self, keep: int | None = None) -> None:
        """Issues what is left of the round of a backward that an exception ended.

        Args:
            keep: a parameter that has received a gradient of the next backward already.
        """
        phase = self.phase
        self._end_arrivals()
        self.phase = Phase.IDLE
        if phase is Phase.LOCAL:
            self._fired_before = _either(self._fired_before, self._fired)
            return
        if not (self._accumulates or 1 in self._fired):
            return  # torch.autograd.grad: other ranks have no round for it, either
        logger.warning(
            "The last backward ended in an exception. Its reduction is completed with zeros, so "
            "that ranks stay in step, and its gradients are dropped."
        )
        left: list[Tensor | None] = []
        for index, fired in enumerate(_either(self._fired, self._fired_before)):
            param = self.params[index]
            if fired and index != keep:
                param.grad = None
            elif self.plan is not None:
                bucket, slot = self.plan.places[index]
                bucket.set_aside(slot)
            left.append(param.grad)
            param.grad = None
        self._fired = bytearray(len(self.params))
        self._fired_before = bytearray(len(self.params))
        try:
            self._complete_round(Part.ABANDONED)
            self.rounds.usage.drop_lacking()
        finally:
            self._abandon()
            for param, gradient in zip(self.params, left, strict=True):
                param.grad = gradient

    def _abandon(self) -> None:
        if self.plan is None:
            for index, fired in enumerate(self._fired):
                if fired:
                    self.params[index].grad = None
        else:
            self.plan.abandon()
        self._start_backward_state()
        self._fired_before = bytearray(len(self.params))

    def _complete_round(self, part: Part) -> None:
        if self._overtaken:
            assert self.plan is not None
            shared = {index for index in self._overtaken if self._hooks.is_shared(index)}
            self.plan.waits_for_end |= shared
            self._hooks.put_last(set(self._overtaken) - shared)
        if 0 in self._fired and 1 in self._fired_before:
            for index, fired in enumerate(self._fired_before):
                if fired and self.params[index].grad is not None:  # it may have been zeroed since
                    self._fired[index] = 1
        self.pending_forward = None
        self.rounds.complete(self._fired, self._late, self._recording, part)
        self._fired_before = bytearray(len(self.params))
        self.note_delivery()
        self._on_reduced()


def _either(a: bytearray, b: bytearray) -> bytearray:
    return bytearray(x | y for x, y in zip(a, b, strict=True))
