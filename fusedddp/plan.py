"""The buckets that a wrapper uses over and over, and how one round of them is issued."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence, Set

from torch import Tensor
from torch.nn import Parameter

from fusedddp.bucket import Bucket, Chunk
from fusedddp.capturing import is_capturing
from fusedddp.collectives import Collective
from fusedddp.comm_hooks import CommHook
from fusedddp.config import Options
from fusedddp.control import Control, ControlReading, Part
from fusedddp.layout import build_layout
from fusedddp.one_shot import param_specs
from fusedddp.sparse import bucket_class

# On CPU gradients are copied while they are still in cache, in chunks of up to half of a 512 KiB
# second-level cache, the smallest in common use.
_CACHED_BYTES = 256 * 1024

# Note [The flag]
# ~~~~~~~~~~~~~~~
# In most rounds every rank has every gradient and nothing more need be said. A rank that lacks
# some, or got some too late, must tell the others. A second small collective in each round was seen
# to cost 2 to 4 ms on two gloo ranks that share two cores, a fifth of the whole tax for a small
# model. So where reading a value is free, which is on CPU, the last bucket has one more element: a
# rank that has something to say sets it, all ranks see that it is not zero, and only then issue the
# control exchange. A comm hook may compress or resize its buffer, so with one the exchange is
# issued in every round instead. On an accelerator reading would make the host wait for the device;
# there the exchange is issued in every round, but only if unused parameters are allowed, and read
# only by ranks that lack something.

# Note [Rounds under capture]
# ~~~~~~~~~~~~~~~~~~~~~~~~~~~
# While a graph is captured nothing is carried out, so nothing can be read, and a replay runs none
# of this code: it can only do what the capturing round does. So that round has to be like the last
# eager one: the same gradients arrive, none of them late, or it raises. What ranks told each other
# then still holds, and is not asked again.


class Plan:
    """The buckets of a wrapper.

    Args:
        params: all parameters of the reducer.
        order: their indices, in the order in which gradients arrive; the same on all ranks.
        waits_for_end: indices of those that are final only at the end of a backward.
        collective: what reduces.
        options: the wrapper's options.
        comm_hook: what reduces instead.
        sparse: indices of those whose gradients are sparse.

    Attributes:
        buckets: in the order of their launch.
        places: for each parameter its bucket and its slot in there.
        chunks: for each parameter its bucket and its chunk in there.
        waits_for_end: as above; a parameter that turns out to be of this kind is added.
        last_fired: the gradients that arrived in the last round; None before the first.
    """

    def __init__(
        self,
        params: Sequence[Parameter],
        order: Sequence[int],
        waits_for_end: Set[int],
        collective: Collective,
        options: Options,
        comm_hook: CommHook | None,
        sparse: Set[int],
    ) -> None:
        self._params = params
        self._collective = collective
        self._options = options
        self._comm_hook = comm_hook
        self.waits_for_end = frozenset(waits_for_end)
        # See Note [The flag].
        self.reads_freely = all(param.device.type == "cpu" for param in params)
        self.layout = build_layout(
            param_specs(
                params, options.reduce_dtype, keeps_dtype=comm_hook is not None, sparse=sparse
            ),
            # Parameters that are final only at the end would hold back the buckets after theirs.
            sorted(order, key=lambda index: index in waits_for_end),
            world_size=collective.world_size,
            bucket_cap_bytes=options.bucket_cap_bytes,
            leading_caps_bytes=options.leading_caps_bytes,
            has_flag=self.reads_freely and comm_hook is None,
            is_packed=comm_hook is not None,
            chunk_bytes=_CACHED_BYTES if self.reads_freely else None,
        )
        last = len(self.layout.buckets) - 1
        self.buckets = [
            bucket_class(layout)(
                layout,
                [params[i] for i in layout.params],
                collective,
                as_view=options.gradient_as_bucket_view,
                ops=options.ops,
                comm_hook=comm_hook,
                index=index,
                is_last=index == last,
                grad_dtype=options.grad_dtype,
            )
            for index, layout in enumerate(self.layout.buckets)
        ]
        places: dict[int, tuple[Bucket, int]] = {}
        chunks: dict[int, tuple[Bucket, Chunk]] = {}
        for bucket in self.buckets:
            for chunk in bucket.chunks:
                for slot in range(chunk.start, chunk.start + len(chunk.params)):
                    index = bucket.layout.params[slot]
                    places[index], chunks[index] = (bucket, slot), (bucket, chunk)
        self.places = [places[index] for index in range(len(params))]
        self.chunks = [chunks[index] for index in range(len(params))]
        self._all_chunks = [chunk for bucket in self.buckets for chunk in bucket.chunks]
        self._next = 0
        self.last_fired: bytearray | None = None
        self._last_reading: ControlReading | None = None

    # -- while gradients arrive ------------------------------------------------------------------

    def start_round(self) -> None:
        self._next = 0
        for bucket in self.buckets:
            bucket.start_round(self.waits_for_end)

    def launch_full_buckets(self) -> None:
        """Launches the buckets that are next in order and have all their gradients, but the last.

        That is launched at the end of the backward, when this rank knows whether it has to raise
        the flag. Its last gradient is nearly always the last of the backward.
        """
        while self._next < len(self.buckets) - 1 and not self.buckets[self._next].num_untaken:
            self.buckets[self._next].launch()
            self._next += 1

    def arrivals(self) -> tuple[bytearray, list[int]]:
        """What has arrived in this round.

        Returns:
            One byte per parameter, 1 if it fired; the indices of those that fired too late.
        """
        if all([c.is_taken and len(c.arrived) == c.takes_at for c in self._all_chunks]):
            return bytearray(b"\1") * len(self._params), []
        fired = bytearray(len(self._params))
        late = set()
        for chunk in self._all_chunks:
            # What arrived after the chunk was taken is late. An undefined gradient is none.
            on_time = len(chunk.params) if chunk.is_taken else len(chunk.arrived)
            for index in chunk.arrived[:on_time]:
                if chunk.is_taken or self._params[index].grad is not None:
                    fired[index] = 1
            late |= {i for i in chunk.arrived[on_time:] if self._params[i].grad is not None}
        return fired, sorted(late)

    def has_taken_any(self) -> bool:
        return any(chunk.is_taken for chunk in self._all_chunks)

    def find_misfit(self) -> Chunk | None:
        """A chunk that is not taken yet, with a gradient that does not fit into its slot."""
        untaken = (chunk for chunk in self._all_chunks if not chunk.is_taken)
        return next((chunk for chunk in untaken if chunk.find_misfit() is not None), None)

    def abandon(self) -> None:
        """Forgets the round; gradients that had been taken are gone."""
        for bucket in self.buckets:
            bucket.abandon()

    # -- the end of a round ----------------------------------------------------------------------

    def complete_round(
        self,
        fired: bytearray,
        late: list[int],
        *,
        round_index: int,
        part: Part,
        on_launched: Callable[[], Callable[[], None]],
    ) -> tuple[ControlReading | None, dict[int, Tensor | None]]:
        """Issues what is left of the round and hands the reduced gradients out.

        See Note [The flag] and Note [Rounds under capture].

        Args:
            fired: one byte per parameter, 1 if it has a gradient here.
            late: parameters whose gradient came after theirs had been taken.
            round_index: number of rounds that this rank has issued before.
            part: how this rank takes part.
            on_launched: called once all buckets are launched; returns what is to be called after
                they are waited for.

        Returns:
            What ranks told each other, if they did; the late contributions.

        Raises:
            RuntimeError: a collective failed, or the comm hook did on another rank.
            Exception: what the comm hook raised here.
        """
        absent = [i for i, has_fired in enumerate(fired) if not has_fired] if 0 in fired else []
        kept: dict[int, Tensor | None] = {}
        for index in absent:
            bucket, slot = self.places[index]
            kept[index] = None if bucket.is_launched else bucket.set_aside(slot)
        for bucket in self.buckets[self._next :]:
            bucket.launch(flag=bool(absent or late))

        def exchange() -> Control:
            return Control(
                self._collective.group,
                self.buckets[0].device,
                round_index,
                self.layout.checksum,
                fired,
                late,
                state=part,
                has_failed=failure is not None,
            )

        failure: Exception | None = None
        tells = not is_capturing()
        has_flag = tells and self.buckets[-1].layout.has_flag
        always_exchanges = (
            tells and not has_flag and (self.reads_freely or self._options.allows_unused)
        )
        if self._comm_hook is not None:
            # Hooks issue collectives of their own, at a time of their own. One that fails here
            # must not keep this rank from the exchange that the others are in.
            for bucket in self.buckets:
                try:
                    bucket.wait()
                except Exception as error:
                    failure = failure or error
        control = exchange() if always_exchanges else None
        finish_buffers = on_launched()
        contributions = {index: self._params[index].grad for index in late}
        self._hand_out(absent)
        if self._comm_hook is None:
            for bucket in self.buckets:
                bucket.wait()
        if has_flag and self.buckets[-1].is_flagged():
            control = exchange()
        reading = None if tells else self._last_reading
        if control is not None:
            control.wait()
            if self.reads_freely or absent or late:
                reading = control.read()
        if failure is not None:
            finish_buffers()
            try:
                raise failure
            finally:
                del failure  # its traceback has this frame, which would keep the wrapper alive
        if reading is not None and reading.num_failed:
            finish_buffers()
            raise RuntimeError(
                f"the comm hook failed on {reading.num_failed} other ranks, so no rank has the "
                "gradients of this backward; they are dropped. Those ranks say why."
            )
        self.last_fired = fired
        self._last_reading = reading and dataclasses.replace(reading, late=[], num_abandoned=0)
        self._finish(kept, reading)
        finish_buffers()
        return reading, contributions

    def _hand_out(self, absent: Sequence[int]) -> None:
        absent_slots: dict[Bucket, list[int]] = {}
        for index in absent:
            bucket, slot = self.places[index]
            absent_slots.setdefault(bucket, []).append(slot)
        for bucket in self.buckets:
            bucket.hand_out(absent_slots.get(bucket, ()))

    def _finish(self, kept: dict[int, Tensor | None], reading: ControlReading | None) -> None:
        """Fills the gradients. What no rank has a gradient for keeps the one it had.

        Where ranks did not tell each other that goes for what has been frozen here: a gradient of
        zeros would let an optimizer decay it.
        """
        restore: dict[Bucket, dict[int, Tensor | None]] = {}
        for index, gradient in kept.items():
            if reading is not None:
                keeps = not reading.num_ranks[index]
            else:
                keeps = not self._params[index].requires_grad
            if keeps:
                bucket, slot = self.places[index]
                restore.setdefault(bucket, {})[slot] = gradient
        for bucket in self.buckets:
            bucket.finish(restore.get(bucket))
