"""Drives the buckets through a backward: hooks, launch order, the end of backward.

See Note [Rounds].
"""

from __future__ import annotations

import enum
import logging
import weakref
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter
from torch.optim.optimizer import Optimizer

from fusedddp.bucket import Bucket, Chunk
from fusedddp.collectives import Collective
from fusedddp.comm_hooks import CommHook
from fusedddp.config import Options
from fusedddp.control import ControlReading
from fusedddp.dynamo import refuse_compiled_autograd
from fusedddp.hooks import ParamHooks
from fusedddp.layout import Layout
from fusedddp.mixed_precision import MixedPrecision
from fusedddp.one_shot import reduce_gradients
from fusedddp.optimizers import StepWatch, params_of
from fusedddp.plan import Plan
from fusedddp.recording import Recording
from fusedddp.sparse import GradientLayouts, add_reduced

logger = logging.getLogger(__name__)

# The first round reduces in pieces of about this size, so that its memory is little more than that
# of the gradients.
_FIRST_ROUND_BYTES = 256 * 1024

# Note [Rounds]
# ~~~~~~~~~~~~~
# A round issues every bucket once, in index order, on every rank. Whatever happens in a backward,
# each rank that takes part in it issues one round: gradients that did not come are zeros, and a
# backward that an exception ended is completed with zeros before the next forward. So ranks never
# pair different collectives. A backward in which no parameter of the wrapper received anything
# (torch.autograd.grad) is no round, unless parameters may be unused and it would have accumulated.
# A rank without data issues a round of zeros (`skip_round`).


class Phase(enum.Enum):
    """What the reducer is in the middle of."""

    IDLE = "idle"  # between backwards
    LOCAL = "local"  # a backward that accumulates without reducing: no_sync
    RECORDING = "recording"  # the first reducing backward: order and fire counts are noted
    REDUCING = "reducing"  # a backward that launches buckets as they fill


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
        self.device = self.params[0].device
        self.options = options
        self.collective = Collective(group)
        self.comm_hook = comm_hook
        self._sparse = sparse
        self._layouts = self._choose_layouts()
        self.plan: Plan | None = None
        self.num_rounds = 0
        self._frozen = [param for _, param in frozen]
        self._has_frozen_since = False
        self._phase = Phase.IDLE
        self._requires_sync = requires_sync
        self._on_launched = on_launched
        self._on_reduced = on_reduced
        self._check_params = check_params
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
        # Parameters that lacked a gradient here, and on other ranks, in every round since the last
        # forward; None before the first of them.
        self._lacking: tuple[set[int], set[int]] | None = None
        # What `.grad` was after a backward that was to be reduced and delivered nothing.
        self._undelivered: list[Tensor | None] | None = None
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
        self._start_backward_state()
        self._hooks = ParamHooks(self, self.params, frozen)

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
        if self.comm_hook is not None:
            raise RuntimeError(
                "register_comm_hook or register_builtin_comm_hook can only be called once. Found "
                f"{self.comm_hook.name}; wrap the module again to use another hook."
            )
        self.check_finalized()
        self.comm_hook = hook
        self._layouts = self._choose_layouts()
        self.plan = None

    def _choose_layouts(self) -> GradientLayouts:
        sparse = self._sparse if self.comm_hook is None else ()
        return GradientLayouts(self.names, self.params, sparse)

    # -- gradients arrive ------------------------------------------------------------------------

    def mark_ready(self, index: int, param: Tensor) -> None:
        """The hook of parameter `index`: a gradient has been accumulated into its `.grad`.

        While a backward is reduced, `ParamHooks` skips this and goes to the chunk at once.
        """
        if torch._C._current_graph_task_id() != self._graph_task:
            self._drop_stale(index)
        if self.phase is Phase.IDLE:
            self._begin_backward(self._hidden_forward_syncs)
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
            self._layouts.conform(bucket.layout.params[chunk.start : chunk.stop])
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
        """Drops the plan, because the module was changed: this backward is recorded instead.

        Args:
            chunk: one with a gradient that does not fit.

        Raises:
            RuntimeError: part of this backward has been reduced for the old layout already.
        """
        misfit = chunk.find_misfit()
        assert misfit is not None and self.plan is not None
        param, (dtype, shape, _) = misfit
        assert param.grad is not None
        index = next(i for i, other in enumerate(self.params) if other is param)
        if self.plan.has_taken_any():
            raise RuntimeError(
                f"expected the gradient of {self.names[index]} to be of {dtype} and shape "
                f"{tuple(shape)}, as when the buckets were laid out, found {param.grad.dtype} and "
                f"{tuple(param.grad.shape)}. Wrap the module again after changing a part of it."
            )
        if self.phase is Phase.REDUCING:
            self._gather_arrivals()
        self.plan = None
        self._recording = Recording(len(self.params))
        for arrived, has_fired in enumerate(self._fired):
            if has_fired:
                self._recording.note(arrived)
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
            here, elsewhere = self._lacking or (set(), set())
            self._lacking = None
            if (here or elsewhere) and not self.options.allows_unused:
                raise RuntimeError(self._describe_unfinished(sorted(here), sorted(elsewhere)))

    def is_outdated(self) -> bool:
        """Whether other parameters require a gradient now, or the module has been moved.

        Asks every parameter that was frozen, but those that were trained only after a round that
        lacked one which is frozen by now: with 100,000 parameters asking takes 9 ms.
        """
        may_be_frozen, self._has_frozen_since = self._has_frozen_since, False
        return (
            self.params[0].device != self.device
            or any([param.requires_grad for param in self._frozen])
            or (may_be_frozen and not all([param.requires_grad for param in self.params]))
        )

    def take_over(self, other: Reducer) -> None:
        """Counts what was accumulated without reduction under a reducer that this one replaces."""
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
        self._hidden_forward_syncs = sync
        for output in outputs:
            if output.grad_fn is None:  # a leaf would keep the hook for ever
                continue
            leaf = _nearest_leaf(output.grad_fn) if self.options.find_unused_parameters else None
            output.register_hook(_make_output_hook(weakref.ref(self), sync, leaf))  # type: ignore[no-untyped-call]
            self._hidden_forward_syncs = True

    def reach_output(self, sync: bool, leaf: Any) -> None:
        """A backward has reached an output of a forward; it is the outermost one, mostly.

        Args:
            sync: whether a backward through that output is to be reduced.
            leaf: a node that accumulates into a leaf below the output, if any is known.
        """
        self._drop_stale()
        if self.phase is Phase.IDLE:
            if self._precision is not None:
                self._precision.lower()
            self._begin_backward(sync)
        elif self.phase is Phase.LOCAL and sync and self._requires_sync():
            # It began at an output made under no_sync, and reaches one that is to be reduced. What
            # has fired so far is taken at the end.
            self.phase = Phase.RECORDING if self.plan is None else Phase.REDUCING
        if leaf is not None and not self._accumulates:
            self._accumulates = _will_accumulate(leaf)

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

    def _begin_backward(self, sync: bool) -> None:
        refuse_compiled_autograd()
        self._start_backward_state()
        self._graph_task = torch._C._current_graph_task_id()
        if not (self._requires_sync() and sync):
            self.phase = Phase.LOCAL
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

    def finalize_backward(self) -> None:
        """The end of the outermost backward: completes the round that it began."""
        try:
            self._end_arrivals()
            if self.phase is Phase.LOCAL:
                self._fired_before = _either(self._fired_before, self._fired)
                self._hidden_forward_syncs = True  # what a forward under no_sync asked for is done
                if 1 in self._fired:
                    self.note_delivery()
            elif 1 in self._fired or (
                self._accumulates and any(p.requires_grad for p in self.params)
            ):
                self._complete_round()
            else:
                self._check_absent(range(len(self.params)))
                self._undelivered = [param.grad for param in self.params]
        except BaseException:
            self._abandon()
            raise
        finally:
            self.phase = Phase.IDLE

    def _check_absent(self, indices: Sequence[int]) -> None:
        """Raises RuntimeError if it is the module that changed, where gradients did not arrive."""
        lost = next((i for i in indices if self._hooks.is_lost(i)), None)
        if lost is not None:
            raise RuntimeError(
                f"expected the hook of fusedddp on {self.names[lost]}, found that it is gone, so "
                "that its gradient is not averaged. torch.utils.swap_tensors does that, as do "
                "conversions with torch.__future__.set_swap_module_params_on_conversion. Wrap the "
                "module again after converting it."
            )
        self._check_params(indices)

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
            for name, param, before in zip(self.names, self.params, self._undelivered, strict=True):
                if param.grad is not before and param.grad is not None and id(param) in stepped:
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
        if self.phase is not Phase.IDLE:
            self._end_arrivals()
            logger.warning("The last backward ended in an exception; what it left is dropped.")
            for index, fired in enumerate(_either(self._fired, self._fired_before)):
                if fired:
                    self.params[index].grad = None
            self._fired = bytearray(len(self.params))
            self._fired_before = bytearray(len(self.params))
            self._late = []
            self._recording = Recording(len(self.params))
        else:
            self._start_backward_state()
        try:
            self._complete_round(is_skipped=True)
        except BaseException:
            self._abandon()
            raise
        finally:
            self.phase = Phase.IDLE

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
            self._complete_round(was_abandoned=phase is Phase.RECORDING)
            self._lacking = None
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

    # -- rounds ----------------------------------------------------------------------------------

    def _complete_round(self, *, was_abandoned: bool = False, is_skipped: bool = False) -> None:
        if self._overtaken:
            assert self.plan is not None
            shared = {index for index in self._overtaken if self._hooks.is_shared(index)}
            self.plan.waits_for_end |= shared
            self._hooks.put_last(set(self._overtaken) - shared)
        if 0 in self._fired and 1 in self._fired_before:
            self._fired = _either(self._fired, self._fired_before)
        if self.plan is None or self.plan.find_misfit() is not None:
            self._layouts.conform(range(len(self.params)))
        misfit = None if self.plan is None else self.plan.find_misfit()
        if misfit is not None:
            self._record_anew(misfit)
        if self.plan is None:
            self._first_round(was_abandoned=was_abandoned, is_skipped=is_skipped)
        else:
            self._round(is_skipped=is_skipped)
        self._fired_before = bytearray(len(self.params))
        self.num_rounds += 1
        self.note_delivery()
        self._on_reduced()

    def _first_round(self, *, was_abandoned: bool, is_skipped: bool) -> None:
        """Reduces what the recorded backward left, and lays the buckets out for all later ones."""
        agreement = self._recording.agree(
            self.collective.group,
            self.device,
            was_abandoned=was_abandoned,
            is_skipped=is_skipped,
            has_comm_hook=self.comm_hook is not None,
        )
        # A parameter of two wrappers is averaged by both, one after the other.
        waits_for_end = {
            index
            for index, count in enumerate(agreement.fire_counts)
            if count > 1 or self._hooks.is_shared(index)
        }
        plan = Plan(
            self.params,
            agreement.order,
            waits_for_end,
            self.collective,
            self.options,
            self.comm_hook,
            self._layouts.sparse,
        )
        if self.comm_hook is not None:
            self._adopt(plan)
            self._round(is_skipped=is_skipped)
        else:
            finish_buffers = self._on_launched()
            # In small pieces: all gradients are still there, so a bucket comes on top of them.
            dense = (p for i, p in enumerate(self.params) if i not in self._layouts.sparse)
            largest = max((p.numel() * p.element_size() for p in dense), default=0)
            num_lacking = reduce_gradients(
                self.params,
                self.collective,
                bucket_cap_bytes=max(largest, _FIRST_ROUND_BYTES),
                as_view=self.options.gradient_as_bucket_view,
                present=self._fired,
                reduce_dtype=self.options.reduce_dtype,
                ops=self.options.ops,
            )
            finish_buffers()
            num_skipped = self.collective.world_size - agreement.num_expected
            self._note_lacking(
                [i for i, count in enumerate(num_lacking) if count > num_skipped], is_skipped
            )
            if agreement.is_whole:
                self._adopt(plan)
        if not agreement.is_whole:
            self.plan = None

    def _adopt(self, plan: Plan) -> None:
        self.plan = plan
        self._hooks.bind([chunk for _, chunk in plan.chunks])

    def _round(self, *, is_skipped: bool) -> None:
        assert self.plan is not None
        absent = [i for i, fired in enumerate(self._fired) if not fired] if 0 in self._fired else []
        reading, late = self.plan.complete_round(
            self._fired,
            self._late,
            round_index=self.num_rounds,
            is_skipped=is_skipped,
            on_launched=self._on_launched,
        )
        if late or reading is not None:
            self._settle_late(late, reading)
        if reading is not None:
            absent = (reading.num_ranks < reading.num_expected).nonzero().flatten().tolist()
        self._note_lacking(absent, is_skipped)
        if absent and not is_skipped:
            self._check_absent([i for i in absent if not self._fired[i]])

    def _note_lacking(self, lacking: list[int], is_skipped: bool) -> None:
        """Remembers parameters without a gradient on some rank, for the next forward to raise.

        Several backwards of one forward, or a nested one that ends early, are several rounds; what
        any of them brought is not lacking. What is frozen by now is not expected to bring any.
        """
        frozen = {i for i in lacking if not self.params[i].requires_grad}
        self._has_frozen_since |= bool(frozen)
        here = set() if is_skipped else {i for i in lacking if not self._fired[i]} - frozen
        elsewhere = set(lacking) - here - frozen
        if is_skipped:
            elsewhere = set()
        if self._lacking is not None:
            here &= self._lacking[0]
            elsewhere &= self._lacking[1]
        self._lacking = (here, elsewhere)

    def _settle_late(self, late: dict[int, Tensor | None], reading: ControlReading | None) -> None:
        """Reduces contributions that came after theirs had been taken, and adds them.

        All ranks know of them where the exchange is read everywhere; else this raises.
        """
        assert self.plan is not None
        if not self.plan.reads_freely or reading is None:
            if late:
                raise RuntimeError(
                    "expected each of these parameters to receive its last gradient before its "
                    "bucket was reduced, as in the first backward, found a later one on rank "
                    f"{dist.get_rank(self.collective.group)}: "
                    f"{', '.join(self.names[i] for i in late)}. All gradients of this backward "
                    "were dropped. Wrap the model again after changing how often a block runs."
                )
            return
        indices = reading.is_late.nonzero().flatten().tolist()
        if not indices:
            return
        self.plan.waits_for_end |= frozenset(indices)
        params = [self.params[i] for i in indices]
        reduced = [param.grad for param in params]
        for param, index in zip(params, indices, strict=True):
            param.grad = late.get(index)
        self._layouts.conform(indices)
        reduce_gradients(
            params,
            self.collective,
            bucket_cap_bytes=self.options.bucket_cap_bytes,
            reduce_dtype=self.options.reduce_dtype,
            ops=self.options.ops,
        )
        with torch.no_grad():
            for param, gradient in zip(params, reduced, strict=True):
                contribution = param.grad
                assert contribution is not None
                param.grad = (
                    contribution if gradient is None else add_reduced(gradient, contribution)
                )

    def _describe_unfinished(self, here: list[int], elsewhere: list[int]) -> str:
        rank = dist.get_rank(self.collective.group)
        lines = [
            "Expected to have finished reduction in the prior iteration before starting a new one. "
            "In the last backward some parameters received no gradient; zeros were averaged for "
            "them, so that ranks stay in step."
        ]
        if here:
            lines.append(
                f"Parameters which did not receive grad for rank {rank}: "
                + ", ".join(self.names[i] for i in here)
            )
            lines.append(
                f"Parameter indices which did not receive grad for rank {rank}: "
                + " ".join(map(str, here))
            )
        if elsewhere:
            lines.append(
                f"Parameters which did not receive grad on other ranks than rank {rank}: "
                + ", ".join(self.names[i] for i in elsewhere)
            )
        lines.append(
            "If that is intended, wrap the model with find_unused_parameters=True; else make sure "
            "that every output of forward takes part in the loss."
        )
        return "\n".join(lines)


def _make_output_hook(
    reference: weakref.ref[Reducer], sync: bool, leaf: Any
) -> Callable[[Tensor], None]:
    def hook(_: Tensor) -> None:
        reducer = reference()
        if reducer is not None:
            reducer.reach_output(sync, leaf)

    return hook


def _nearest_leaf(node: Any) -> Any:
    """A node under `node` that accumulates into a leaf, or None; breadth first, it is near."""
    seen, level = {node}, [node]
    while level:
        below = []
        for current in level:
            for child, _ in current.next_functions:
                if child is None or child in seen:
                    continue
                if hasattr(child, "variable"):
                    return child
                seen.add(child)
                below.append(child)
        level = below
    return None


def _will_accumulate(leaf: Any) -> bool:
    """Whether the running backward accumulates into leaves: backward() does, autograd.grad not."""
    try:
        return torch._C._will_engine_execute_node(leaf)
    except RuntimeError:  # what it says of the inputs of autograd.grad
        return False


def _either(a: bytearray, b: bytearray) -> bytearray:
    return bytearray(x | y for x, y in zip(a, b, strict=True))
