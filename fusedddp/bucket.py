"""One bucket: its flat buffer, which gradients are in it, and its pending collective."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from fusedddp_kernels import (
    Slots,
    flatten,
    flatten_one,
    is_dense,
    scale_,
    scales_in_buffer,
    unflatten,
)
from torch import Tensor
from torch.nn import Parameter

from fusedddp.collectives import Collective
from fusedddp.layout import ALIGNMENT, BucketLayout

# Small gradients on CPU are copied one by one as they come and scaled together once they have this
# size, while they are still in cache: half of a 512 KiB second-level cache, the smallest in common
# use. A gradient that is larger by itself is copied and scaled in one pass.
_CACHED_BYTES = 256 * 1024


class Bucket:
    """The gradients that travel in one collective, over and over, one round after another.

    A round is `mark_ready` for each gradient that arrives, `launch`, `wait`, `hand_out`.

    See Note [Dropping gradients].

    Args:
        layout: where each gradient lies.
        params: the parameters of the bucket, in slot order.
        collective: what reduces the buffer.
        as_view: `.grad` becomes an alias of its slot instead of a tensor of its own.
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
    ) -> None:
        self.layout = layout
        self.params = list(params)
        self.device = params[0].device
        self._collective = collective
        self._as_view = as_view and all(
            (p.dtype.to_real() if p.is_complex() else p.dtype) == layout.dtype for p in params
        )
        self._reduction = collective.reduction(layout.dtype, self.device)
        self._scale = collective.scale(self._reduction, self.device)
        self._copies_early = self.device.type == "cpu" and not layout.is_direct
        self._scales_later = [
            p.numel() * layout.dtype.itemsize < _CACHED_BYTES and scales_in_buffer(p.dtype, layout.dtype)
            for p in params
        ]
        self._slots: Slots | None = None
        self._own_uses = 0
        self._start_round()

    def _start_round(self) -> None:
        self.num_missing = len(self.params)
        self._work: dist.Work | None = None
        self._in_place: Tensor | None = None
        self._taken = bytearray(len(self.params))
        self._unscaled = (0, 0)  # elements of the buffer that are copied and not yet scaled
        self._sources: dict[int, Tensor] = {}
        self._producers: set[torch.Stream] = set()
        self._has_memory = False

    @property
    def is_launched(self) -> bool:
        return self._work is not None

    def has_taken(self, slot: int) -> bool:
        """Whether the gradient of this round is in the buffer, so that a further one is late."""
        return bool(self._taken[slot])

    def mark_ready(self, slot: int, gradient: Tensor) -> None:
        """`gradient`, the `.grad` of the parameter at `slot`, is final for this round."""
        self.num_missing -= 1
        if self._copies_early:
            self._take_one(slot, gradient)
        elif self.device.type != "cpu":
            self._producers.add(torch.accelerator.current_stream(self.device))

    def launch(self, flag: bool = False) -> None:
        """Fills what is not yet in the buffer with `.grad`, or zeros, and starts the collective.

        Args:
            flag: what this rank says in the bucket's flag, if it has one.
        """
        gradient = self.params[0].grad if self.layout.is_direct else None
        if gradient is not None and self._may_reduce_in_place(gradient):
            reduction = self._collective.reduction(self.layout.dtype, self.device, in_place=True)
            self._join_producers()
            with torch.no_grad():
                scale = self._collective.scale(reduction, self.device)
                if scale is not None:
                    scale_(gradient, scale)
                flat = gradient.as_strided((gradient.numel(),), (1,))
            self._in_place = gradient
            self._taken[0] = 1
            self.params[0].grad = None
        else:
            reduction = self._reduction
            self._scale_stretch()
            if 0 in self._taken:
                self._take([i for i, taken in enumerate(self._taken) if not taken])
            flat = self._memory().flat
            if self.layout.has_flag:
                flat[-1:].fill_(flag)
        self._work = self._collective.launch(flat, reduction)

    def wait(self) -> None:
        """Makes the current stream (on CPU the host) wait for the collective.

        Raises:
            RuntimeError: the collective failed or timed out.
        """
        assert self._work is not None
        self._work.wait()

    def is_flagged(self) -> bool:
        """Whether any rank set the flag. Reads on the host; call it after `wait`."""
        return bool(self._memory().flat[-1])

    def hand_out(self, restore: Mapping[int, Tensor | None] | None = None) -> None:
        """Gives every parameter its reduced gradient and starts the next round.

        Args:
            restore: slots whose parameter gets this `.grad` instead.
        """
        restore = restore or {}
        if self._in_place is not None:
            self.params[0].grad = self._in_place
        else:
            slots = self._memory()
            gradients: list[Tensor | None]
            if self._as_view:
                # Aliases, not views: `grad.detach_()` refuses views.
                gradients = [view.detach() for view in slots.views]
            else:
                gradients = [self._destination(i, param) for i, param in enumerate(self.params)]
                unflatten(slots, gradients)
            for i, gradient in restore.items():
                gradients[i] = gradient
            for param, gradient in zip(self.params, gradients, strict=True):
                param.grad = gradient
            if self.layout.is_direct:
                self._slots = None  # it had to copy this time; the next gradient may not have to
        self._start_round()

    def set_aside(self, slot: int) -> Tensor | None:
        """The `.grad` of a parameter that got none in this round, out of the buffer's way."""
        gradient = self.params[slot].grad
        if gradient is not None and self._slots is not None and _shares(gradient, self._slots.flat):
            gradient = self.params[slot].grad = gradient.detach().clone()
        return gradient

    def abandon(self) -> None:
        """Forgets the round after an error; gradients that it had taken are gone."""
        for param, taken in zip(self.params, self._taken, strict=True):
            if taken:
                param.grad = None
        self._start_round()

    def _take_one(self, slot: int, gradient: Tensor) -> None:
        memory = self._slots if self._has_memory else None
        memory = memory or self._memory()
        if self._scale is None or not self._scales_later[slot]:
            flatten_one(gradient, memory, slot, self._scale)
        else:
            flatten_one(gradient, memory, slot)
            start, stop = self._unscaled
            offset = memory.offsets[slot]
            if not 0 <= offset - stop < ALIGNMENT:  # not the next slot
                self._scale_stretch()
                start = offset
            self._unscaled = (start, memory.ends[slot])
            if (memory.ends[slot] - start) * self.layout.dtype.itemsize >= _CACHED_BYTES:
                self._scale_stretch()
        self._taken[slot] = 1
        self.params[slot].grad = None
        if not self._as_view:
            self._sources[slot] = gradient

    def _scale_stretch(self) -> None:
        start, stop = self._unscaled
        if stop > start and self._scale is not None:
            scale_(self._memory().flat[start:stop], self._scale)
        self._unscaled = (stop, stop)

    def _take(self, slots: Sequence[int]) -> None:
        """Moves the `.grad` of the given slots (ascending) into the buffer; None moves zeros."""
        if not slots:
            return
        memory = self._memory()
        gradients = [self.params[i].grad for i in slots]
        self._join_producers()
        whole = len(slots) == len(self.params)
        flatten(gradients, memory, self._scale, None if whole else slots)
        for i, gradient in zip(slots, gradients, strict=True):
            self._taken[i] = 1
            if gradient is not None:
                self.params[i].grad = None
                if not self._as_view:
                    self._sources[i] = gradient
        self._release_producers()

    def _memory(self) -> Slots:
        """The flat buffer of this round: the one there is, unless somebody still reads it."""
        if self._slots is None or (not self._has_memory and self._is_held_elsewhere(self._slots.flat)):
            flat = torch.zeros(self.layout.padded_numel, dtype=self.layout.dtype, device=self.device)
            self._slots = Slots(flat, self.layout.offsets, self.params)
            self._own_uses = _storage_uses(flat)
        self._has_memory = True
        return self._slots

    def _is_held_elsewhere(self, flat: Tensor) -> bool:
        """Whether anything but this bucket and its parameters' `.grad` refers to the buffer.

        Writing the next gradients over a gradient that the user kept would change it in silence.
        """
        uses = _storage_uses(flat) - self._own_uses
        if uses == 0:
            return False
        gradients = (param.grad for param in self.params)
        return uses > sum(g is not None and _shares(g, flat) for g in gradients)

    def _may_reduce_in_place(self, gradient: Tensor) -> bool:
        return (
            gradient.layout == torch.strided
            and gradient.dtype == self.layout.dtype
            and gradient.stride() == self.params[0].stride()  # memory order is the same on all ranks
            and is_dense(gradient)
            and not gradient.is_neg()
            and not gradient.requires_grad
            # a + b gives both the same gradient memory. One use is the gradient, one the storage
            # object that asking makes.
            and _storage_uses(gradient) == 2
        )

    def _destination(self, slot: int, param: Parameter) -> Tensor:
        """A tensor for a reduced gradient: the one that was flattened, where it is fit for it."""
        source = self._sources.get(slot)
        if (
            source is not None
            and source.stride() == param.stride()
            and is_dense(source)
            and not (source.requires_grad or source.is_conj() or source.is_neg())
        ):
            return source
        return torch.empty_like(param, requires_grad=False)

    def _join_producers(self) -> None:
        """Makes the current stream wait for every stream that wrote a gradient of this bucket."""
        if self._producers:
            current = torch.accelerator.current_stream(self.device)
            for stream in self._producers - {current}:
                current.wait_stream(stream)

    def _release_producers(self) -> None:
        """Lets no producer reuse the memory of a dropped gradient before the flatten has read it."""
        if self._producers:
            current = torch.accelerator.current_stream(self.device)
            for stream in self._producers - {current}:
                stream.wait_stream(current)


def _storage_uses(tensor: Tensor) -> int:
    """How many tensors and storage objects refer to the storage, the one made here included."""
    return torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)


def _shares(a: Tensor, b: Tensor) -> bool:
    return a.untyped_storage()._cdata == b.untyped_storage()._cdata
