"""Drives the buckets through a backward: hooks, launch order, the end of backward.

See Note [Rounds].
"""

from __future__ import annotations

import enum
import logging
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter
from torch.utils.hooks import RemovableHandle

from fusedddp.bucket import Bucket
from fusedddp.collectives import Collective, wire_dtype
from fusedddp.config import Options
from fusedddp.control import Control, ControlReading
from fusedddp.layout import Layout, ParamSpec, build_layout
from fusedddp.one_shot import reduce_gradients

logger = logging.getLogger(__name__)

# Note [Rounds]
# ~~~~~~~~~~~~~
# A round issues every bucket once, in index order, and then the control exchange, on every rank.
# Whatever happens in a backward, each rank that takes part in it issues one round: gradients that
# did not come are zeros, a backward that an exception ended is completed with zeros before the
# next forward. So ranks never pair different collectives. A backward in which no parameter of the
# wrapper received anything (torch.autograd.grad) is no round.


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
    ) -> None:
        self.names = [name for name, _ in trained]
        self.params = [param for _, param in trained]
        self.options = options
        self.collective = Collective(group)
        self.phase = Phase.IDLE
        self.layout: Layout | None = None
        self.buckets: list[Bucket] = []
        self.num_rounds = 0
        self._requires_sync = requires_sync
        self._on_round = on_round
        self._forward_syncs = True
        # Hooks of modules on several devices run on several threads.
        self._lock = threading.RLock()
        self._fired = bytearray(len(self.params))
        # Parameters that fired more than once in the first backward are final only at its end.
        self._waits_for_end: frozenset[int] = frozenset()
        self._places: list[tuple[Bucket, int]] = []
        self._unfinished: tuple[list[int], list[int]] | None = None
        self._start_backward_state()
        self._handles = [
            param.register_post_accumulate_grad_hook(self._make_hook(index))
            for index, param in enumerate(self.params)
        ]
        self._frozen_handles = [_refuse_gradients(name, param) for name, param in frozen]
        # Hooks hold the reducer weakly and die with it, so that a module can be wrapped again.
        handles = [*self._handles, *self._frozen_handles]
        self._remove_hooks = weakref.finalize(self, _remove_all, handles)
        self._remove_hooks.atexit = False

    # -- hooks -----------------------------------------------------------------------------------

    def _make_hook(self, index: int) -> Callable[[Tensor], None]:
        reducer_ref = weakref.ref(self)

        def hook(param: Tensor) -> None:
            reducer = reducer_ref()
            if reducer is not None:
                reducer.mark_ready(index)

        return hook

    def remove_hooks(self) -> None:
        """Takes the hooks off the parameters; backwards are local from then on."""
        self._remove_hooks()

    def mark_ready(self, index: int) -> None:
        """The hook of parameter `index`: a gradient has been accumulated into its `.grad`."""
        with self._lock:
            if self.phase is Phase.IDLE:
                self._begin_backward()
            param = self.params[index]
            gradient = param.grad
            if gradient is None:  # an undefined gradient delivers nothing
                return
            if gradient.layout is not torch.strided:
                raise NotImplementedError(
                    f"expected dense gradients, found {gradient.layout} for {self.names[index]}; "
                    "sparse gradients are not there yet. Use a dense embedding, or leave the "
                    "parameter out with _set_params_and_buffers_to_ignore_for_model."
                )
            self._fired[index] = 1
            self._any_fired = True
            if self.phase is Phase.REDUCING:
                self._mark_in_bucket(index, param)
            elif self.phase is Phase.RECORDING:
                self._order.pop(index, None)  # ordered by the last time it fires
                self._order[index] = None
                self._fire_counts[index] += 1

    def _mark_in_bucket(self, index: int, param: Parameter) -> None:
        bucket, slot = self._places[index]
        if self._is_ready[index]:
            if bucket.has_taken(slot) and index not in self._late:
                self._late.append(index)
            return
        if index in self._waits_for_end or not self._is_last_hook(index, param):
            return
        self._is_ready[index] = 1
        bucket.mark_ready(slot)
        while self._next < len(self.buckets) and not self.buckets[self._next].num_missing:
            self.buckets[self._next].launch()
            self._next += 1

    def _is_last_hook(self, index: int, param: Parameter) -> bool:
        """Whether hooks that the user registered have run already, as they do under DDP.

        If not, this gradient waits for the end of the backward, and our hook is put last then.
        """
        hooks = param._post_accumulate_grad_hooks  # type: ignore[attr-defined]
        if next(reversed(hooks)) == self._handles[index].id:
            return True
        self._overtaken.append(index)
        return False

    def _put_hooks_last(self, indices: Iterable[int]) -> None:
        for index in indices:
            hooks = self.params[index]._post_accumulate_grad_hooks  # type: ignore[attr-defined]
            own = self._handles[index].id
            if next(reversed(hooks)) != own:
                hooks[own] = hooks.pop(own)

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
        if sync and self._unfinished is not None:
            here, elsewhere = self._unfinished
            self._unfinished = None
            raise RuntimeError(self._describe_unfinished(here, elsewhere))

    def prepare_for_backward(self, outputs: Iterable[Tensor], sync: bool = True) -> None:
        """Called after a forward, with the tensors that it returned.

        Args:
            outputs: a backward through any of them is one through the wrapper.
            sync: whether that backward is to be reduced.
        """
        self._forward_syncs = sync
        reducer_ref = weakref.ref(self)

        def hook(grad: Tensor) -> None:
            reducer = reducer_ref()
            if reducer is not None and reducer.phase is Phase.IDLE:
                with reducer._lock:
                    reducer._begin_backward()

        for output in outputs:
            if output.requires_grad:
                output.register_hook(hook)

    def check_finalized(self) -> None:
        """Raises RuntimeError if the last backward did not run to its end."""
        if self.phase is not Phase.IDLE:
            raise RuntimeError(
                "expected the last backward to have run to its end, found that it did not (phase "
                f"{self.phase.value!r}); an exception may have ended it. The next forward completes it."
            )

    def _start_backward_state(self) -> None:
        self._next = 0
        self._any_fired = False
        self._is_ready = bytearray(len(self.params))
        self._late: list[int] = []
        self._overtaken: list[int] = []
        self._order: dict[int, None] = {}
        self._fire_counts = [0] * len(self.params) if self.layout is None else []

    def _begin_backward(self) -> None:
        if not (self._requires_sync() and self._forward_syncs):
            self.phase = Phase.LOCAL
        else:
            self._start_backward_state()
            self.phase = Phase.RECORDING if self.layout is None else Phase.REDUCING
        reducer_ref = weakref.ref(self)

        def callback() -> None:
            reducer = reducer_ref()
            if reducer is not None:
                reducer.finalize_backward()

        torch.autograd.Variable._execution_engine.queue_callback(callback)  # type: ignore[attr-defined]

    def finalize_backward(self) -> None:
        """The end of the outermost backward: completes the round that it began."""
        phase = self.phase
        try:
            if phase is Phase.LOCAL or not self._any_fired:
                return
            self._complete_round(recording_was_abandoned=False)
        except BaseException:
            self._abandon()
            raise
        finally:
            self.phase = Phase.IDLE

    def _complete_abandoned(self) -> None:
        """Issues what is left of the round of a backward that an exception ended."""
        phase = self.phase
        self.phase = Phase.IDLE
        if phase is Phase.LOCAL:
            return
        logger.warning(
            "The last backward ended in an exception. Its reduction is completed with zeros, so "
            "that ranks stay in step, and its gradients are dropped."
        )
        places = self._places or [None] * len(self.params)
        left = []
        for param, fired, place in zip(self.params, self._fired, places, strict=True):
            if fired:
                param.grad = None
            left.append(param.grad if place is None else place[0].set_aside(place[1]))
            param.grad = None
        self._fired = bytearray(len(self.params))
        try:
            self._complete_round(recording_was_abandoned=phase is Phase.RECORDING)
            self._unfinished = None
        finally:
            self._abandon()
            for param, gradient in zip(self.params, left, strict=True):
                param.grad = gradient

    def _abandon(self) -> None:
        for bucket in self.buckets:
            bucket.abandon()
        self._fired = bytearray(len(self.params))

    # -- rounds ----------------------------------------------------------------------------------

    def _complete_round(self, *, recording_was_abandoned: bool) -> None:
        self._put_hooks_last(self._overtaken)
        provisional = False
        if self.layout is None:
            provisional = self._lay_out(recording_was_abandoned)
        num_absent = self._fired.count(0)
        absent = [i for i, fired in enumerate(self._fired) if not fired] if num_absent else []
        kept: dict[Bucket, dict[int, Tensor | None]] = {}
        for index in absent:
            bucket, slot = self._places[index]
            if not bucket.is_launched:
                kept.setdefault(bucket, {})[slot] = bucket.set_aside(slot)
        for bucket in self.buckets[self._next :]:
            bucket.launch(kept.get(bucket))
        assert self.layout is not None
        control = Control(
            self.collective.group,
            self.buckets[0].device,
            self.num_rounds,
            self.layout.checksum,
            self._fired,
            self._late,
        )
        after_waits = self._on_round()
        late_gradients = {index: self.params[index].grad for index in self._late}
        for bucket in self.buckets:
            bucket.wait()
        control.wait()
        # Reading is free on CPU; on a GPU it makes the host wait, so only ranks that must do it.
        reading = control.read() if self.buckets[0].device.type == "cpu" or absent else None
        for bucket in self.buckets:
            bucket.hand_out(self._unused(bucket, kept.get(bucket, {}), reading))
        after_waits()
        self.num_rounds += 1
        self._fired = bytearray(len(self.params))
        if provisional:
            self.layout, self.buckets, self._places = None, [], []
        self._settle_late(late_gradients, reading)
        if reading is not None and not self.options.allows_unused:
            missing = (reading.num_ranks < self.collective.world_size).nonzero().flatten().tolist()
            if missing:
                self._unfinished = (absent, [i for i in missing if i not in set(absent)])

    def _unused(
        self, bucket: Bucket, kept: dict[int, Tensor | None], reading: ControlReading | None
    ) -> dict[int, Tensor | None]:
        """The slots of `bucket` that no rank had a gradient for, with what they had before."""
        if reading is None:
            return {}
        return {
            slot: gradient
            for slot, gradient in kept.items()
            if not reading.num_ranks[bucket.layout.params[slot]]
        }

    def _settle_late(self, gradients: dict[int, Tensor | None], reading: ControlReading | None) -> None:
        """Reduces contributions that came after theirs had been taken, and adds them.

        All ranks know of them where the control exchange is read everywhere; else this raises.
        """
        if reading is None:
            if gradients:
                names = ", ".join(self.names[i] for i in gradients)
                for index in gradients:
                    self.params[index].grad = None
                raise RuntimeError(
                    f"expected each of these parameters to receive its last gradient before its "
                    f"bucket was reduced, as in the first backward, found a later one on rank "
                    f"{dist.get_rank(self.collective.group)}: {names}. Their gradients were dropped. "
                    "Wrap the model anew after changing how often a block runs in one backward."
                )
            return
        indices = reading.is_late.nonzero().flatten().tolist()
        if not indices:
            return
        self._waits_for_end |= frozenset(indices)
        params = [self.params[i] for i in indices]
        reduced = [param.grad for param in params]
        for param, index in zip(params, indices, strict=True):
            param.grad = gradients.get(index)
        reduce_gradients(params, self.collective, bucket_cap_bytes=self.options.bucket_cap_bytes)
        with torch.no_grad():
            for param, gradient in zip(params, reduced, strict=True):
                late = param.grad
                assert late is not None
                param.grad = late if gradient is None else gradient.add_(late)

    def _lay_out(self, recording_was_abandoned: bool) -> bool:
        """Agrees on the order of arrival and builds the buckets. Collective.

        Returns:
            Whether the layout is for one round only, because a rank did not see a whole backward.
        """
        group = self.collective.group
        device = self.params[0].device
        order = list(self._order)
        order += [i for i in reversed(range(len(self.params))) if i not in self._order]
        agreed = torch.tensor(order, dtype=torch.int32, device=device)
        dist.broadcast(agreed, group=group, group_src=0)
        counts = torch.tensor([*self._fire_counts, recording_was_abandoned], dtype=torch.int32, device=device)
        dist.all_reduce(counts, op=dist.ReduceOp.MAX, group=group)
        *fire_counts, provisional = counts.tolist()
        self._waits_for_end = frozenset(i for i, n in enumerate(fire_counts) if n > 1)
        # Parameters that are final only at the end would hold back the buckets after theirs.
        order = sorted(agreed.tolist(), key=lambda i: i in self._waits_for_end)
        specs = [
            ParamSpec(tuple(p.shape), p.dtype, p.device, wire_dtype(p.dtype, p.device), p.stride())
            for p in self.params
        ]
        self.layout = build_layout(
            specs,
            order,
            world_size=self.collective.world_size,
            bucket_cap_bytes=self.options.bucket_cap_bytes,
            first_bucket_cap_bytes=self.options.first_bucket_cap_bytes,
        )
        self.buckets = [
            Bucket(
                layout,
                [self.params[i] for i in layout.params],
                self.collective,
                as_view=self.options.gradient_as_bucket_view,
            )
            for layout in self.layout.buckets
        ]
        places: dict[int, tuple[Bucket, int]] = {}
        for bucket in self.buckets:
            for slot, index in enumerate(bucket.layout.params):
                places[index] = (bucket, slot)
        self._places = [places[index] for index in range(len(self.params))]
        self._put_hooks_last(range(len(self.params)))
        return bool(provisional)

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


def _refuse_gradients(name: str, param: Parameter) -> RemovableHandle:
    """Makes a backward raise that gives a gradient to a parameter frozen at construction."""

    def hook(param: Tensor) -> None:
        raise RuntimeError(
            f"expected {name} to stay frozen, as it was when the module was wrapped, found a gradient "
            "for it. It would differ between ranks. Wrap the module again after unfreezing parameters."
        )

    param.requires_grad_(True)  # a frozen parameter refuses hooks
    handle = param.register_post_accumulate_grad_hook(hook)
    param.requires_grad_(False)
    return handle


def _remove_all(handles: list[RemovableHandle]) -> None:
    for handle in handles:
        handle.remove()
