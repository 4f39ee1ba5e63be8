"""One bucket: its flat buffer, which gradients are in it, and its pending collective."""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Mapping, Sequence, Set
from typing import TypeAlias, TypeGuard

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from fusedddp.collectives import Collective
from fusedddp.comm_hooks import CommHook, GradBucket, PendingHook
from fusedddp.layout import BucketLayout
from fusedddp_kernels import Ops, Slots, compute_dtype, is_dense, ops_for

# What a gradient has to have in common with its slot, and a fast way to ask for it.
Kind: TypeAlias = tuple[torch.dtype, torch.Size, torch.layout]
_kind: Callable[[Tensor], Kind] = operator.attrgetter("dtype", "shape", "layout")


class Chunk:
    """Neighbouring slots of a bucket that are filled together.

    Attributes:
        start: its first slot in the bucket.
        params: its parameters.
        arrived: indices of parameters, one for each time that one of the chunk's fired in this
            round. A hook appends to it, so nothing else may cost time there.
        takes_at: when `arrived` is of this length all gradients may be there; -1 if the chunk has
            to wait for the end of the backward.
        is_taken: whether its gradients are in the buffer, so that a further one is late.
    """

    __slots__ = ("_kinds", "_low_kinds", "arrived", "is_taken", "params", "start", "takes_at")

    def __init__(
        self, start: int, params: list[Parameter], grad_dtype: torch.dtype | None = None
    ) -> None:
        self.start = start
        self.params = params
        self._kinds = [_kind(param) for param in params]
        self._low_kinds = [
            (grad_dtype, shape, layout) if grad_dtype and dtype.is_floating_point else None
            for dtype, shape, layout in self._kinds
        ]
        self.start_round(waits_for_end=False)

    def start_round(self, *, waits_for_end: bool) -> None:
        self.arrived: list[int] = []
        self.takes_at = -1 if waits_for_end else len(self.params)
        self.is_taken = False

    @property
    def stop(self) -> int:
        """One past its last slot."""
        return self.start + len(self.params)

    def gradients(self) -> list[Tensor | None]:
        return [param.grad for param in self.params]

    def is_complete(self, gradients: Sequence[Tensor | None]) -> TypeGuard[list[Tensor]]:
        """Whether each parameter has fired, and has one of `gradients` to show for it.

        An undefined gradient fires and delivers nothing.
        """
        return len(set(self.arrived)) == len(self.params) and all(
            [gradient is not None for gradient in gradients]
        )

    def fits(self, gradients: Sequence[Tensor]) -> bool:
        """Whether `gradients` are dense, of the shapes and dtypes (or `grad_dtype`) of slots."""
        kinds = [*map(_kind, gradients)]
        return kinds == self._kinds or all(
            kind in fitting
            for kind, *fitting in zip(kinds, self._kinds, self._low_kinds, strict=True)
        )

    def find_misfit(self) -> tuple[Parameter, Kind] | None:
        """A parameter whose gradient does not fit, and what kind of gradient does."""
        for param, kind, low_kind in zip(self.params, self._kinds, self._low_kinds, strict=True):
            if param.grad is not None and _kind(param.grad) not in (kind, low_kind):
                return param, kind
        return None


class Bucket:
    """The gradients that travel in one collective, over and over, one round after another.

    Nothing refers back to a bucket, so its memory is free as soon as the bucket is.

    A round is `take` for each chunk whose gradients are there, `launch`, `hand_out`, `wait`,
    `finish`.

    See Note [Dropping gradients].

    Args:
        layout: where each gradient lies.
        params: the parameters of the bucket, in slot order.
        collective: what reduces the buffer.
        as_view: `.grad` becomes an alias of its slot instead of a tensor of its own.
        ops: what copies gradients; None for what suits the device.
        comm_hook: what reduces the buffer instead; the layout must be a packed one then.
        index: position among the buckets of a round.
        is_last: whether it is the last of them.
        grad_dtype: dtype in which gradients may arrive beside their parameter's own.

    Attributes:
        chunks: the pieces in which it is filled.
        num_untaken: how many of them are not in the buffer yet.
    """

    # Note [Dropping gradients]
    # ~~~~~~~~~~~~~~~~~~~~~~~~~
    # `.grad` is set to None as soon as its values are in the buffer. Its memory is free from then
    # on, which keeps the peak near 1 instead of 2 times the gradients, and a contribution that
    # comes late (another backward, a checkpointed block run again) lands in a tensor of its own:
    # accumulating into memory that a collective is reading was seen to corrupt it.

    def __init__(
        self,
        layout: BucketLayout,
        params: Sequence[Parameter],
        collective: Collective,
        *,
        as_view: bool,
        ops: Ops | None = None,
        comm_hook: CommHook | None = None,
        index: int = 0,
        is_last: bool = True,
        grad_dtype: torch.dtype | None = None,
    ) -> None:
        self.layout = layout
        self.params = list(params)
        self.device = params[0].device
        self.chunks = self._make_chunks(grad_dtype)
        self._ops = ops or ops_for(self.device)
        self._collective = collective
        self._as_view = as_view and all(
            (p.dtype.to_real() if p.is_complex() else p.dtype) == layout.dtype for p in params
        )
        self._complex_slots = [slot for slot, p in enumerate(params) if p.is_complex()]
        self._comm_hook = comm_hook
        self._index, self._is_last = index, is_last
        dtypes = {p.dtype for p in params} | ({grad_dtype} if grad_dtype else set())
        self._computes_in = {compute_dtype(dtype) for dtype in dtypes}
        self._divide_factor = 0
        self._slots: Slots | None = None
        self._own_uses = 0
        self.start_round()

    def _make_chunks(self, grad_dtype: torch.dtype | None) -> list[Chunk]:
        return [
            Chunk(start, self.params[start:stop], grad_dtype) for start, stop in self.layout.chunks
        ]

    def start_round(self, waits_for_end: Set[int] = frozenset()) -> None:
        """Forgets the last round.

        Args:
            waits_for_end: indices of parameters whose gradient may change until the backward ends.
        """
        self.num_untaken = len(self.chunks)
        for chunk in self.chunks:
            chunk.start_round(
                waits_for_end=bool(waits_for_end)
                and not waits_for_end.isdisjoint(self.layout.params[chunk.start : chunk.stop])
            )
        if self._divide_factor != self._collective.divide_factor:
            self._choose_scale()
        self._work: dist.Work | PendingHook | None = None
        self._is_in_flight = False
        self._in_place: Tensor | None = None
        self._sources: dict[int, Tensor] = {}
        self._held_back: dict[int, Tensor] = {}
        self._producers: set[torch.Stream] = set()
        self._has_memory = False

    def _choose_scale(self) -> None:
        """Settles by what the flatten multiplies; what a comm hook gets is not multiplied."""
        self._divide_factor = self._collective.divide_factor
        # For a direct bucket also where it has to copy, because all ranks need the same operation.
        self._reduction = self._collective.reduction(
            self.layout.dtype, self.device, in_place=self.layout.is_direct
        )
        self._scale: Tensor | None = None
        if self._comm_hook is None:
            self._scale = self._collective.scale(self._reduction, self.device)
        if self._scale is not None and len(self._computes_in) == 1:
            # Once instead of for each gradient: 5 microseconds a time inside of a backward.
            self._scale = self._scale.to(next(iter(self._computes_in)))

    @property
    def slots(self) -> Slots | None:
        """The flat buffer, if there is one. A graph that uses it has to keep it alive."""
        return self._slots

    @property
    def is_launched(self) -> bool:
        return self._work is not None

    def note_producer(self) -> None:
        """The current stream has written a gradient of this bucket."""
        self._producers.add(torch.accelerator.current_stream(self.device))

    def take(self, chunk: Chunk, gradients: Sequence[Tensor | None] | None = None) -> None:
        """Moves the `.grad` of the chunk's parameters into the buffer; None moves zeros.

        A direct bucket leaves its gradient where it is until `launch`.

        Args:
            chunk: one that is not yet taken.
            gradients: what `chunk.gradients()` says, where it is known already.
        """
        chunk.is_taken = True
        self.num_untaken -= 1
        if self._producers:
            self._join_producers()
        if self.layout.is_direct and self._take_in_place():
            return
        if gradients is None:
            gradients = chunk.gradients()
        slots = self._slots if self._has_memory else None
        self._ops.flatten(gradients, slots or self._memory(), self._scale, chunk.start)
        for param in chunk.params:
            param.grad = None
        if not self._as_view:
            self._sources.update(
                (slot, gradient)
                for slot, gradient in enumerate(gradients, chunk.start)
                if gradient is not None
            )
        if self._producers:
            self._release_producers()

    def launch(self, flag: bool = False) -> None:
        """Takes what is not yet taken and starts the collective, or calls the comm hook.

        Args:
            flag: what this rank says in the bucket's flag, if it has one.

        Raises:
            Exception: what the hook raises.
        """
        if self.num_untaken:
            for chunk in self.chunks:
                if not chunk.is_taken:
                    self.take(chunk)
        if self._in_place is not None:
            if self._scale is not None:
                self._ops.scale_(self._in_place, self._scale)
            with torch.no_grad():
                flat = self._in_place.as_strided((self.layout.numel,), (1,))
        else:
            flat = self._memory().flat
            if self.layout.has_flag:
                flat[-1:].fill_(flag)
        self._is_in_flight = True
        if self._comm_hook is not None:
            self._work = self._comm_hook.start(self._grad_bucket())
        else:
            self._work = self._collective.launch(flat, self._reduction)

    def _grad_bucket(self) -> GradBucket:
        slots = self._memory()

        def views_of(buffer: Tensor) -> list[Tensor]:
            same = buffer is slots.flat
            views = (slots if same else Slots(buffer, self.layout.offsets, self.params)).views
            return [
                torch.view_as_complex(view) if param.is_complex() else view
                for view, param in zip(views, self.params, strict=True)
            ]

        return GradBucket(self._index, slots.flat, views_of, self.params, is_last=self._is_last)

    def wait(self) -> None:
        """Makes the current stream (on CPU the host) wait for the collective or the comm hook.

        Raises:
            RuntimeError: it failed or timed out.
        """
        assert self._work is not None
        self._work.wait()
        self._is_in_flight = False

    def is_flagged(self) -> bool:
        """Whether any rank set the flag. Reads on the host; call it after `wait`."""
        return bool(self._memory().flat[-1])

    def hand_out(self, absent: Collection[int] = ()) -> None:
        """Gives every parameter the tensor that holds its reduced gradient after `finish`.

        Comes before `wait`, because while the collective runs it costs nothing.

        Args:
            absent: slots without a gradient here; `finish` decides what their parameter gets.
        """
        if self._in_place is not None:
            self.params[0].grad = self._in_place
            return
        views = self._memory().views
        if self._as_view:
            # Aliases, not views: `grad.detach_()` refuses views.
            gradients = [view.detach() for view in views]
            for slot in self._complex_slots:
                gradients[slot] = torch.view_as_complex(views[slot]).detach()
        else:
            gradients = [self._destination(i, param) for i, param in enumerate(self.params)]
            self._sources = {}
        self._held_back = {slot: gradients[slot] for slot in absent}
        for slot, (param, gradient) in enumerate(zip(self.params, gradients, strict=True)):
            if slot not in self._held_back:
                param.grad = gradient

    def finish(self, restore: Mapping[int, Tensor | None] | None = None) -> None:
        """Fills what `hand_out` gave away; comes after `wait`.

        Args:
            restore: absent slots whose parameter gets this `.grad` instead of the reduced one.
        """
        for slot, reduced in self._held_back.items():
            self.params[slot].grad = restore[slot] if restore and slot in restore else reduced
        if self._in_place is not None:
            self._in_place = None
            return
        if not self._as_view:
            slots = range(len(self.params))
            self._ops.unflatten(
                self._memory(),
                [None if restore and i in restore else self.params[i].grad for i in slots],
            )
        if self.layout.is_direct:
            self._slots = None  # it had to copy this time; the next gradient may not have to

    def set_aside(self, slot: int) -> Tensor | None:
        """The `.grad` of a parameter that got none in this round, out of the buffer's way."""
        gradient = self.params[slot].grad
        if gradient is not None and self._slots is not None and _shares(gradient, self._slots.flat):
            gradient = self.params[slot].grad = gradient.detach().clone()
        return gradient

    def abandon(self) -> None:
        """Forgets the round after an error; gradients that it had taken are gone."""
        for chunk in self.chunks:
            if chunk.is_taken:
                for param in chunk.params:
                    param.grad = None
        if self._is_in_flight:
            self._slots = None  # a collective that nobody waited for may yet write to it
        self.start_round()

    def _memory(self) -> Slots:
        """The flat buffer of this round: the one there is, unless somebody still reads it."""
        if self._slots is None or (not self._has_memory and self._is_held_elsewhere(self._slots)):
            flat = torch.zeros(
                self.layout.padded_numel, dtype=self.layout.dtype, device=self.device
            )
            self._slots = Slots(flat, self.layout.offsets, self.params)
            self._own_uses = _storage_uses(flat)
        self._has_memory = True
        return self._slots

    def _is_held_elsewhere(self, slots: Slots) -> bool:
        """Whether anything refers to the buffer but this bucket and `.grad` in their own slots.

        Writing the next gradients over one that the user kept, or that is another parameter's
        `.grad` by now, would change it in silence.
        """
        uses = _storage_uses(slots.flat) - self._own_uses
        if uses == 0:
            return False
        pairs = [(p.grad, view) for p, view in zip(self.params, slots.views, strict=True)]
        return uses > sum(
            g is not None and _shares(g, slots.flat) and g.data_ptr() == view.data_ptr()
            for g, view in pairs
        )

    def _take_in_place(self) -> bool:
        """Takes the gradient of a direct bucket as its own buffer, if that is safe."""
        param = self.params[0]
        gradient = param.grad
        if (
            gradient is None
            or gradient.layout != torch.strided
            or gradient.dtype != self.layout.dtype
            or gradient.stride() != param.stride()  # memory order is the same on all ranks
            or not is_dense(gradient)
            or gradient.is_neg()
            or gradient.requires_grad
            or is_shared(gradient)
        ):
            return False
        self._in_place = gradient
        param.grad = None
        return True

    def _destination(self, slot: int, param: Parameter) -> Tensor:
        """A tensor for a reduced gradient: the one that was flattened, where it is fit for it."""
        source = self._sources.get(slot)
        if (
            source is not None
            and source.dtype == param.dtype
            and source.stride() == param.stride()
            and is_dense(source)
            and not (source.requires_grad or source.is_conj() or source.is_neg())
            and not is_shared(source)
        ):
            return source
        return torch.empty_like(param, requires_grad=False)

    def _join_producers(self) -> None:
        """Makes the current stream wait for every stream that wrote a gradient of this bucket."""
        current = torch.accelerator.current_stream(self.device)
        for stream in self._producers - {current}:
            current.wait_stream(stream)

    def _release_producers(self) -> None:
        """Lets no producer reuse memory of a dropped gradient before the flatten has read it."""
        current = torch.accelerator.current_stream(self.device)
        for stream in self._producers - {current}:
            stream.wait_stream(current)


def is_shared(gradient: Tensor) -> bool:
    """Whether anybody else refers to the memory of a dense gradient, and may write to it.

    a + b gives both the same gradient memory. A section that `torch.cuda.make_graphed_callables`
    made returns gradients in memory that its next backward writes again.
    """
    return _storage_uses(gradient) > 2  # the gradient, and the storage object that asking makes


def _storage_uses(tensor: Tensor) -> int:
    """How many tensors and storage objects refer to the storage, the one made here included."""
    return torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)


def _shares(a: Tensor, b: Tensor) -> bool:
    return bool(a.untyped_storage()._cdata == b.untyped_storage()._cdata)
