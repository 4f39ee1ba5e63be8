"""Drives the buckets through a backward: hooks, launch order, the end of backward.

See Note [Rounds].
"""

from __future__ import annotations

import enum
import logging
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import NoReturn

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from fusedddp.bucket import Bucket, Chunk
from fusedddp.collectives import Collective
from fusedddp.config import Options
from fusedddp.control import Control, ControlReading
from fusedddp.hooks import ParamHooks
from fusedddp.layout import Layout, build_layout
from fusedddp.mixed_precision import MixedPrecision
from fusedddp.one_shot import param_specs, reduce_gradients

logger = logging.getLogger(__name__)

# The first round reduces in pieces of about this size, so that its memory is little more than that
# of the gradients.
_FIRST_ROUND_BYTES = 256 * 1024
# On CPU gradients are copied while they are still in cache, in chunks of up to half of a 512 KiB
# second-level cache, the smallest in common use.
_CACHED_BYTES = 256 * 1024

# Note [Rounds]
# ~~~~~~~~~~~~~
# A round issues every bucket once, in index order, on every rank. Whatever happens in a backward,
# each rank that takes part in it issues one round: gradients that did not come are zeros, and a
# backward that an exception ended is completed with zeros before the next forward. So ranks never
# pair different collectives. A backward in which no parameter of the wrapper received anything
# (torch.autograd.grad) is no round.

# Note [The flag]
# ~~~~~~~~~~~~~~~
# In most rounds every rank has every gradient and nothing more need be said. A rank that lacks
# some, or got some too late, must tell the others. A second small collective in each round was seen
# to cost 2 to 4 ms on two gloo ranks that share two cores, a fifth of the whole tax for a small
# model. So where reading a value is free, which is on CPU, the last bucket has one more element: a
# rank that has something to say sets it, all ranks see that it is not zero, and only then issue the
# control exchange. On an accelerator reading would make the host wait for the device; there the
# exchange is issued in every round, but only if unused parameters are allowed, and read only by
# ranks that lack something.


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
        frozen: names and parameters that require no gradient now, and must not start to.
        group: the process group.
        options: the wrapper's options.
        requires_sync: tells whether a backward that begins now is to be reduced.
        on_round: called in every round once all buckets are launched; returns what is to be
            called after they are waited for.
        check_params: called when a backward through the wrapper reached no parameter; raises if
            the module has others by now.
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
        on_round: Callable[[], Callable[[], None]],
        check_params: Callable[[], None],
        precision: MixedPrecision | None = None,
    ) -> None:
        self.names = [name for name, _ in trained]
        self.params = [param for _, param in trained]
        self.options = options
        self.collective = Collective(group)
        self._phase = Phase.IDLE
        self.layout: Layout | None = None
        self.buckets: list[Bucket] = []
        self.num_rounds = 0
        # See Note [The flag].
        self._reads_freely = all(param.device.type == "cpu" for param in self.params)
        self._requires_sync = requires_sync
        self._on_round = on_round
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
        # Parameters that fired more than once in the first backward are final only at its end.
        self._waits_for_end: frozenset[int] = frozenset()
        self._places: list[tuple[Bucket, int]] = []
        self._chunks: list[tuple[Bucket, Chunk]] = []
        self._notes_producers = not self._reads_freely
        # Parameters that lacked a gradient here, and on other ranks, in every round since the last
        # forward; None before the first of them.
        self._lacking: tuple[set[int], set[int]] | None = None
        # Parameters in the order in which they last fired, and how often each did.
        self._order: dict[int, None] = {}
        self._fire_counts: list[int] = []
        self._start_backward_state()
        self._hooks = ParamHooks(self, self.params, frozen)

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
            bucket, chunk = self._chunks[index]
            if self._notes_producers:
                bucket.note_producer()
            chunk.arrived.append(index)
            if len(chunk.arrived) == chunk.takes_at:
                self.take_chunk(index, param)
            return
        gradient = param.grad
        if gradient is None:  # an undefined gradient delivers nothing
            return
        if gradient.is_sparse:
            self._refuse_sparse(index)
        self._fired[index] = 1
        if self.phase is Phase.RECORDING:
            self._order.pop(index, None)  # ordered by the last time it fires
            self._order[index] = None
            self._fire_counts[index] += 1

    def take_chunk(self, index: int, param: Tensor) -> None:
        """Moves a chunk into its bucket if all its gradients are there; that of `index` is last.

        A chunk that is not taken here is taken at the end of the backward.
        """
        bucket, chunk = self._chunks[index]
        gradients = chunk.gradients()
        if not chunk.is_complete(gradients):
            return
        if not self._hooks.is_last(index, param):
            # A hook that the user registered after ours has yet to run; ours is put last for the
            # next backward.
            self._overtaken.append(index)
            return
        if not chunk.fits(gradients):
            self._record_anew(chunk)
            return
        bucket.take(chunk, gradients)
        # The last bucket is launched at the end of the backward, when this rank knows whether it
        # has to raise the flag. Its last gradient is nearly always the last of the backward.
        if not bucket.num_untaken:
            while self._next < len(self.buckets) - 1 and not self.buckets[self._next].num_untaken:
                self.buckets[self._next].launch()
                self._next += 1

    def _gather_arrivals(self) -> None:
        """Notes which parameters fired while gradients were reduced, and which did so too late."""
        chunks = [chunk for bucket in self.buckets for chunk in bucket.chunks]
        if chunks and all([c.is_taken and len(c.arrived) == c.takes_at for c in chunks]):
            self._fired = bytearray(b"\1") * len(self.params)
            return
        late = set()
        for chunk in chunks:
            # What arrived after the chunk was taken is late. An undefined gradient is none.
            on_time = len(chunk.params) if chunk.is_taken else len(chunk.arrived)
            for index in chunk.arrived[:on_time]:
                if chunk.is_taken or self.params[index].grad is not None:
                    self._fired[index] = 1
            late |= {i for i in chunk.arrived[on_time:] if self.params[i].grad is not None}
        self._late: list[int] = sorted(late)

    def _record_anew(self, chunk: Chunk) -> None:
        """Drops the layout, because the module was changed: this backward is recorded instead.

        Args:
            chunk: one with a gradient that does not fit.

        Raises:
            RuntimeError: part of this backward has been reduced for the old layout already.
            NotImplementedError: the gradient is sparse.
        """
        misfit = chunk.find_misfit()
        assert misfit is not None
        param, (dtype, shape, _) = misfit
        assert param.grad is not None
        index = next(i for i, other in enumerate(self.params) if other is param)
        if param.grad.is_sparse:
            self._refuse_sparse(index)
        if any(other.is_taken for bucket in self.buckets for other in bucket.chunks):
            raise RuntimeError(
                f"expected the gradient of {self.names[index]} to be of {dtype} and shape "
                f"{tuple(shape)}, as when the buckets were laid out, found {param.grad.dtype} and "
                f"{tuple(param.grad.shape)}. Wrap the module again after changing a part of it."
            )
        self._gather_arrivals()
        self.layout, self.buckets, self._places, self._chunks = None, [], [], []
        self.phase = Phase.RECORDING
        self._order = {i: None for i, fired in enumerate(self._fired) if fired}
        self._fire_counts = list(self._fired)

    def _refuse_sparse(self, index: int) -> NoReturn:
        raise NotImplementedError(
            f"expected dense gradients, found a sparse one for {self.names[index]}; sparse "
            "gradients are not there yet. Use a dense embedding, or leave the parameter out with "
            "_set_params_and_buffers_to_ignore_for_model."
        )

    # -- phases ----------------------------------------------------------------------------------

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
        reducer_ref = weakref.ref(self)

        def hook(grad: Tensor) -> None:
            reducer = reducer_ref()
            if reducer is not None:
                reducer._output_hook(sync)

        self._hidden_forward_syncs = sync
        for output in outputs:
            if output.grad_fn is not None:  # a leaf would keep the hook for ever
                output.register_hook(hook)  # type: ignore[no-untyped-call]
                self._hidden_forward_syncs = True

    def _output_hook(self, sync: bool) -> None:
        """A backward has reached an output of a forward; it is the outermost one, mostly."""
        self._drop_stale()
        if self.phase is Phase.IDLE:
            if self._precision is not None:
                self._precision.lower()
            self._begin_backward(sync)
        elif self.phase is Phase.LOCAL and sync and self._requires_sync():
            # It began at an output made under no_sync, and reaches one that is to be reduced. What
            # has fired so far is taken at the end.
            self.phase = Phase.RECORDING if self.layout is None else Phase.REDUCING

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
        self._next = 0
        self._fired = bytearray(len(self.params))
        for bucket in self.buckets:
            bucket.start_round(self._waits_for_end)
        self._late = []
        self._overtaken: list[int] = []
        self._order = {}
        self._fire_counts = [0] * len(self.params) if self.layout is None else []

    def _begin_backward(self, sync: bool) -> Phase:
        self._start_backward_state()
        self._graph_task = torch._C._current_graph_task_id()
        if not (self._requires_sync() and sync):
            self.phase = Phase.LOCAL
        else:
            self.phase = Phase.RECORDING if self.layout is None else Phase.REDUCING
        reducer_ref = weakref.ref(self)

        def callback() -> None:
            reducer = reducer_ref()
            if reducer is not None:
                reducer.finalize_backward()

        self._callback = weakref.ref(callback)
        torch.autograd.Variable._execution_engine.queue_callback(callback)
        return self.phase

    def finalize_backward(self) -> None:
        """The end of the outermost backward: completes the round that it began."""
        phase = self.phase
        try:
            if self._precision is not None:
                self._precision.restore()
            self._gather_arrivals()
            if phase is Phase.LOCAL:
                self._fired_before = _either(self._fired_before, self._fired)
                self._hidden_forward_syncs = True  # what a forward under no_sync asked for is done
            elif 1 in self._fired:
                self._complete_round()
            else:
                self._check_params()
                self._check_hooks(range(len(self.params)))
        except BaseException:
            self._abandon()
            raise
        finally:
            self.phase = Phase.IDLE

    def _check_hooks(self, indices: Iterable[int]) -> None:
        """Raises RuntimeError if the hook of a parameter without a gradient is gone."""
        lost = next((i for i in indices if self._hooks.is_lost(i)), None)
        if lost is not None:
            raise RuntimeError(
                f"expected the hook of fusedddp on {self.names[lost]}, found that it is gone, so "
                "that its gradient is not averaged. torch.utils.swap_tensors does that, as do "
                "conversions with torch.__future__.set_swap_module_params_on_conversion. Wrap the "
                "module again after converting it."
            )

    def _complete_abandoned(self, keep: int | None = None) -> None:
        """Issues what is left of the round of a backward that an exception ended.

        Args:
            keep: a parameter that has received a gradient of the next backward already.
        """
        phase = self.phase
        self.phase = Phase.IDLE
        if self._precision is not None:
            self._precision.restore()
        self._gather_arrivals()
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
            elif self._places:
                bucket, slot = self._places[index]
                bucket.set_aside(slot)
            left.append(param.grad)
            param.grad = None
        self._fired = bytearray(len(self.params))
        self._fired_before = bytearray(len(self.params))
        try:
            self._complete_round(recording_was_abandoned=phase is Phase.RECORDING)
            self._lacking = None
        finally:
            self._abandon()
            for param, gradient in zip(self.params, left, strict=True):
                param.grad = gradient

    def _abandon(self) -> None:
        if self.layout is None:
            for index, fired in enumerate(self._fired):
                if fired:
                    self.params[index].grad = None
        for bucket in self.buckets:
            bucket.abandon()
        self._start_backward_state()
        self._fired_before = bytearray(len(self.params))

    # -- rounds ----------------------------------------------------------------------------------

    def _complete_round(self, *, recording_was_abandoned: bool = False) -> None:
        shared = {index for index in self._overtaken if self._hooks.is_shared(index)}
        self._waits_for_end |= shared
        self._hooks.put_last(set(self._overtaken) - shared)
        if 0 in self._fired and 1 in self._fired_before:
            self._fired = _either(self._fired, self._fired_before)
        untaken = (c for bucket in self.buckets for c in bucket.chunks if not c.is_taken)
        misfit = next((chunk for chunk in untaken if chunk.find_misfit() is not None), None)
        if misfit is not None:
            self._record_anew(misfit)
        if self.layout is None:
            self._first_round(recording_was_abandoned)
        else:
            self._round()
        self._fired_before = bytearray(len(self.params))
        self.num_rounds += 1

    def _first_round(self, was_abandoned: bool) -> None:
        """Reduces what the recorded backward left, and lays the buckets out for all later ones."""
        order, fire_counts, is_whole = self._agree_on_order(was_abandoned)
        finish_buffers = self._on_round()
        # In small pieces: all gradients are still there, so a bucket comes on top of them.
        largest = max(p.numel() * p.element_size() for p in self.params)
        lacking = reduce_gradients(
            self.params,
            self.collective,
            bucket_cap_bytes=max(largest, _FIRST_ROUND_BYTES),
            as_view=self.options.gradient_as_bucket_view,
            present=self._fired,
            reduce_dtype=self.options.reduce_dtype,
            ops=self.options.ops,
        )
        finish_buffers()
        self._note_lacking(lacking)
        if is_whole:
            # A parameter of two wrappers is averaged by both, one after the other.
            self._waits_for_end = frozenset(
                i for i, count in enumerate(fire_counts) if count > 1 or self._hooks.is_shared(i)
            )
            self._lay_out(order)

    def _agree_on_order(self, was_abandoned: bool) -> tuple[list[int], list[int], bool]:
        """Exchanges what was recorded. Collective.

        Returns:
            The order in which gradients arrived on rank 0; how often each parameter fired, at most
            on any rank; whether all ranks saw their backward to its end.
        """
        group = self.collective.group
        device = self.params[0].device
        order = list(self._order)
        order += [i for i in reversed(range(len(self.params))) if i not in self._order]
        agreed = torch.tensor(order, dtype=torch.int32, device=device)
        dist.broadcast(agreed, group=group, group_src=0)
        counts = [*self._fire_counts, int(was_abandoned)]
        maxima = torch.tensor(counts, dtype=torch.int32, device=device)
        dist.all_reduce(maxima, op=dist.ReduceOp.MAX, group=group)
        *fire_counts, any_abandoned = maxima.tolist()
        return agreed.tolist(), fire_counts, not any_abandoned

    def _lay_out(self, order: Sequence[int]) -> None:
        self.layout = build_layout(
            param_specs(self.params, self.options.reduce_dtype),
            # Parameters that are final only at the end would hold back the buckets after theirs.
            sorted(order, key=lambda index: index in self._waits_for_end),
            world_size=self.collective.world_size,
            bucket_cap_bytes=self.options.bucket_cap_bytes,
            first_bucket_cap_bytes=self._first_bucket_cap_bytes(),
            has_flag=self._reads_freely,
            chunk_bytes=_CACHED_BYTES if self._reads_freely else None,
        )
        self.buckets = [
            Bucket(
                layout,
                [self.params[i] for i in layout.params],
                self.collective,
                as_view=self.options.gradient_as_bucket_view,
                ops=self.options.ops,
                grad_dtype=self.options.grad_dtype,
            )
            for layout in self.layout.buckets
        ]
        places: dict[int, tuple[Bucket, int]] = {}
        chunks: dict[int, tuple[Bucket, Chunk]] = {}
        for bucket in self.buckets:
            for chunk in bucket.chunks:
                for slot in range(chunk.start, chunk.start + len(chunk.params)):
                    index = bucket.layout.params[slot]
                    places[index], chunks[index] = (bucket, slot), (bucket, chunk)
        self._places = [places[index] for index in range(len(self.params))]
        self._chunks = [chunks[index] for index in range(len(self.params))]
        self._hooks.bind([chunk for _, chunk in self._chunks])

    def _first_bucket_cap_bytes(self) -> int:
        """The cap of the first bucket; on CPU that of all buckets.

        A small bucket that leaves early gains overlap on a GPU. On CPU a collective runs on the
        cores that the backward needs, and one more of them costs more than it hides: 17.5 against
        14.9 ms of synchronisation for 400 gradients of 64x64 on two gloo ranks on two cores.
        """
        if self._reads_freely:
            return self.options.bucket_cap_bytes
        return self.options.first_bucket_cap_bytes

    def _round(self) -> None:
        """Completes the round of all buckets. See Note [The flag]."""
        absent = [i for i, fired in enumerate(self._fired) if not fired] if 0 in self._fired else []
        kept: dict[int, Tensor | None] = {}
        for index in absent:
            bucket, slot = self._places[index]
            kept[index] = None if bucket.is_launched else bucket.set_aside(slot)
        for bucket in self.buckets[self._next :]:
            bucket.launch(flag=bool(absent or self._late))
        control = None
        if not self._reads_freely and self.options.allows_unused:
            control = self._start_control()
        finish_buffers = self._on_round()
        late = {index: self.params[index].grad for index in self._late}
        absent_slots: dict[Bucket, list[int]] = {}
        for index in absent:
            bucket, slot = self._places[index]
            absent_slots.setdefault(bucket, []).append(slot)
        for bucket in self.buckets:
            bucket.hand_out(absent_slots.get(bucket, ()))
        for bucket in self.buckets:
            bucket.wait()
        if self._reads_freely and self.buckets[-1].is_flagged():
            control = self._start_control()
        reading = None
        if control is not None:
            control.wait()
            if self._reads_freely or absent or late:
                reading = control.read()
        restore: dict[Bucket, dict[int, Tensor | None]] = {}
        for index, gradient in kept.items():
            if reading is not None and not reading.num_ranks[index]:
                bucket, slot = self._places[index]
                restore.setdefault(bucket, {})[slot] = gradient
        for bucket in self.buckets:
            bucket.finish(restore.get(bucket))
        finish_buffers()
        if late or reading is not None:
            self._settle_late(late, reading)
        if reading is not None:
            self._note_lacking(
                (reading.num_ranks < self.collective.world_size).nonzero().flatten().tolist()
            )
        else:
            self._note_lacking(absent)
        self._check_hooks(absent)

    def _start_control(self) -> Control:
        assert self.layout is not None
        return Control(
            self.collective.group,
            self.buckets[0].device,
            self.num_rounds,
            self.layout.checksum,
            self._fired,
            self._late,
        )

    def _note_lacking(self, lacking: list[int]) -> None:
        """Remembers parameters without a gradient on some rank, for the next forward to raise.

        Several backwards of one forward, or a nested one that ends early, are several rounds; what
        any of them brought is not lacking.
        """
        here = {i for i in lacking if not self._fired[i]}
        elsewhere = set(lacking) - here
        if self._lacking is not None:
            here &= self._lacking[0]
            elsewhere &= self._lacking[1]
        self._lacking = (here, elsewhere)

    def _settle_late(self, late: dict[int, Tensor | None], reading: ControlReading | None) -> None:
        """Reduces contributions that came after theirs had been taken, and adds them.

        All ranks know of them where the exchange is read everywhere; else this raises.
        """
        if not self._reads_freely or reading is None:
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
        self._waits_for_end |= frozenset(indices)
        params = [self.params[i] for i in indices]
        reduced = [param.grad for param in params]
        for param, index in zip(params, indices, strict=True):
            param.grad = late.get(index)
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
                param.grad = contribution if gradient is None else gradient.add_(contribution)

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


def _either(a: bytearray, b: bytearray) -> bytearray:
    return bytearray(x | y for x, y in zip(a, b, strict=True))
