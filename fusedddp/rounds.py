"""Rounds: what all ranks issue together at the end of a backward, whatever happened in it.

See Note [Rounds].
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from fusedddp.bucket import Chunk
from fusedddp.capturing import is_capturing
from fusedddp.collectives import Collective
from fusedddp.comm_hooks import CommHook
from fusedddp.config import Options
from fusedddp.control import ControlReading, Part
from fusedddp.hooks import ParamHooks
from fusedddp.one_shot import reduce_gradients
from fusedddp.plan import Plan
from fusedddp.recording import Agreement, Recording
from fusedddp.sparse import GradientLayouts, add_reduced
from fusedddp.usage import Usage

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
# A rank without data issues a round of zeros.


class Rounds:
    """The rounds of one wrapper, and the plan by which they are issued.

    Args:
        names: of the parameters.
        params: the parameters, in an order that is the same on all ranks.
        group: the process group.
        options: the wrapper's options.
        hooks: those on the parameters.
        on_launched: called in every round once all buckets are launched; returns what is to be
            called after they are waited for.
        check_params: called with indices of parameters that received no gradient; raises if the
            module has others in their place by now.
        comm_hook: what reduces buckets instead of an all-reduce; it gets dense gradients only.
        sparse: indices of the parameters whose gradients are sparse.

    Attributes:
        plan: the buckets; None until a backward has been recorded.
        count: how many rounds have been issued.
        usage: which parameters received gradients in them.
        layouts: converts gradients to the layout of their bucket.
    """

    def __init__(
        self,
        names: Sequence[str],
        params: Sequence[Parameter],
        group: dist.ProcessGroup,
        options: Options,
        *,
        hooks: ParamHooks,
        on_launched: Callable[[], Callable[[], None]],
        check_params: Callable[[Sequence[int]], None],
        comm_hook: CommHook | None,
        sparse: Collection[int],
    ) -> None:
        self.plan: Plan | None = None
        self.count = 0
        self.options = options
        self.collective = Collective(group)
        self.comm_hook = comm_hook
        self.usage = Usage(names, params, options, group)
        self._names = names
        self._params = params
        self._hooks = hooks
        self._on_launched = on_launched
        self._check_params = check_params
        self._sparse = sparse
        self.layouts = self._choose_layouts()

    # -- what can still be chosen ----------------------------------------------------------------

    def set_comm_hook(self, hook: CommHook) -> None:
        """Reduces by `hook` from the next round on.

        Raises:
            RuntimeError: there is one already.
        """
        if self.comm_hook is not None:
            raise RuntimeError(
                "register_comm_hook or register_builtin_comm_hook can only be called once. Found "
                f"{self.comm_hook.name}; wrap the module again to use another hook."
            )
        self.comm_hook = hook
        self.layouts = self._choose_layouts()
        self.plan = None

    def _choose_layouts(self) -> GradientLayouts:
        if self.comm_hook is not None:
            reason = "A communication hook gets dense gradients only."
            return GradientLayouts(self._names, self._params, (), reason)
        reason = (
            "Gradients are reduced sparse for the weights of nn.Embedding and nn.EmbeddingBag with "
            "sparse=True at the time of wrapping, and dense for all others."
        )
        return GradientLayouts(self._names, self._params, self._sparse, reason)

    def set_static_graph(self) -> None:
        """Takes it that every backward uses the parameters of the first one.

        Raises:
            RuntimeError: a backward has been reduced already.
        """
        if self.count:
            raise RuntimeError(
                "_set_static_graph should be called before training loop starts, found that "
                f"{self.count} backwards have been reduced. Pass static_graph=True to "
                "fusedddp.wrap instead."
            )
        self.options = self.usage.options = dataclasses.replace(self.options, static_graph=True)

    # -- one round -------------------------------------------------------------------------------

    def drop_plan(self, chunk: Chunk) -> None:
        """Forgets the layout, because the module was changed.

        Args:
            chunk: one with a gradient that does not fit.

        Raises:
            RuntimeError: part of this backward has been reduced for the old layout already.
        """
        misfit = chunk.find_misfit()
        assert misfit is not None and self.plan is not None
        if is_capturing():
            raise RuntimeError(self._describe_change("a gradient of another shape or dtype"))
        param, (dtype, shape, _) = misfit
        assert param.grad is not None
        if self.plan.has_taken_any():
            index = next(i for i, other in enumerate(self._params) if other is param)
            raise RuntimeError(
                f"expected the gradient of {self._names[index]} to be of {dtype} and shape "
                f"{tuple(shape)}, as when the buckets were laid out, found {param.grad.dtype} and "
                f"{tuple(param.grad.shape)}. Wrap the module again after changing a part of it."
            )
        self.plan = None

    def complete(
        self,
        fired: bytearray,
        late: list[int],
        recording: Recording,
        part: Part,
    ) -> None:
        """Issues what is left of a round, and hands the reduced gradients out. Collective.

        Args:
            fired: one byte per parameter, 1 if it has a gradient here.
            late: parameters whose gradient came after theirs had been taken.
            recording: what was noted of the backward, if there was no plan.
            part: how this rank takes part.

        Raises:
            RuntimeError: a gradient could not be reduced, or ranks disagree.
        """
        misfit = None if self.plan is None else self.plan.find_misfit()
        if self.plan is None or misfit is not None:
            self.layouts.conform(range(len(self._params)))
        if self.plan is not None and misfit is not None:
            misfit = self.plan.find_misfit()  # what was of another layout only fits by now
        if misfit is not None:
            self.drop_plan(misfit)
            recording = Recording.of(fired)
        try:
            if self.plan is None:
                self._first(fired, recording, part)
            else:
                self._planned(self.plan, fired, late, part)
        finally:
            self.count += 1  # also where this rank alone has something to raise

    def _first(self, fired: bytearray, recording: Recording, part: Part) -> None:
        """Reduces what the recorded backward left, and lays the buckets out for all later ones."""
        agreement = recording.agree(
            self.collective.group,
            self._params[0].device,
            part=part,
            has_comm_hook=self.comm_hook is not None,
        )
        # A parameter of two wrappers is averaged by both, one after the other.
        waits_for_end = {
            index
            for index, count in enumerate(agreement.fire_counts)
            if count > 1 or self._hooks.is_shared(index)
        }
        plan = Plan(
            self._params,
            agreement.order,
            waits_for_end,
            self.collective,
            self.options,
            self.comm_hook,
            self.layouts.sparse,
        )
        if self.comm_hook is None:
            self._reduce_at_once(fired, agreement, part)
        else:  # it must see every gradient, in buckets
            self._planned(plan, fired, [], part)
        if agreement.is_whole:
            self.plan = plan
            self._hooks.bind([chunk for _, chunk in plan.chunks])

    def _reduce_at_once(self, fired: bytearray, agreement: Agreement, part: Part) -> None:
        """Reduces in small pieces: all gradients are there, so a bucket comes on top of them."""
        finish_buffers = self._on_launched()
        dense = (p for i, p in enumerate(self._params) if i not in self.layouts.sparse)
        largest = max((p.numel() * p.element_size() for p in dense), default=0)
        num_lacking = reduce_gradients(
            self._params,
            self.collective,
            bucket_cap_bytes=max(largest, _FIRST_ROUND_BYTES),
            as_view=self.options.gradient_as_bucket_view,
            present=fired,
            reduce_dtype=self.options.reduce_dtype,
            ops=self.options.ops,
        )
        finish_buffers()
        num_ranks = [self.collective.world_size - count for count in num_lacking]
        self.usage.note_round(
            fired,
            num_ranks,
            agreement.num_expected,
            part=part,
            num_abandoned=agreement.num_abandoned,
        )

    def _planned(self, plan: Plan, fired: bytearray, late: list[int], part: Part) -> None:
        if is_capturing():
            self._check_like_last(plan, fired, late)
        reading, contributions = plan.complete_round(
            fired,
            late,
            round_index=self.count,
            part=part,
            on_launched=self._on_launched,
        )
        if contributions or reading is not None:
            self._settle_late(plan, contributions, reading)
        self.usage.note_round(
            fired,
            None if reading is None else reading.num_ranks,
            self.collective.world_size if reading is None else reading.num_expected,
            part=part,
            num_abandoned=0 if reading is None else reading.num_abandoned,
        )
        if 0 in fired and part is Part.WHOLE:
            self.check_absent([i for i, has_fired in enumerate(fired) if not has_fired])

    def _settle_late(
        self, plan: Plan, late: dict[int, Tensor | None], reading: ControlReading | None
    ) -> None:
        """Reduces contributions that came after theirs had been taken, and adds them.

        All ranks know of them where the exchange is read everywhere; else this raises.
        """
        if not plan.reads_freely or reading is None:
            if late:
                raise RuntimeError(
                    "expected each of these parameters to receive its last gradient before its "
                    "bucket was reduced, as in the first backward, found a later one on rank "
                    f"{dist.get_rank(self.collective.group)}: "
                    f"{', '.join(self._names[i] for i in late)}. All gradients of this backward "
                    "were dropped. Wrap the model again after changing how often a block runs."
                )
            return
        indices = reading.late
        if not indices:
            return
        plan.waits_for_end |= frozenset(indices)
        params = [self._params[i] for i in indices]
        reduced = [param.grad for param in params]
        for param, index in zip(params, indices, strict=True):
            param.grad = late.get(index)
        self.layouts.conform(indices)
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

    # -- under capture ---------------------------------------------------------------------------

    def num_steps_missing(self) -> int:
        """How many more reduced backwards have to run before one can be captured.

        The first lays the buckets out, the second gives them their memory.
        """
        if self.plan is None:
            return 2
        return int(self.plan.last_fired is None)

    def check_capturable(self) -> None:
        """Raises RuntimeError if a round that is issued now cannot be captured."""
        missing = self.num_steps_missing()
        if missing:
            steps = "1 more step" if missing == 1 else f"{missing} more steps"
            raise RuntimeError(
                "expected the buckets to be laid out and to have their memory before a capture, "
                f"found that they do not: run {steps} eagerly (forward, and backward outside of "
                "no_sync), on any stream, before you capture."
            )
        if self.layouts.sparse:
            names = ", ".join(self._names[i] for i in sorted(self.layouts.sparse))
            raise RuntimeError(
                f"expected dense gradients while capturing, found sparse ones of {names}, whose "
                "size changes from step to step. Use sparse=False, or train without a graph."
            )

    def _check_like_last(self, plan: Plan, fired: bytearray, late: list[int]) -> None:
        """Raises RuntimeError unless this round is like the last one.

        See Note [Rounds under capture] in plan.py.
        """
        if late:
            names = ", ".join(self._names[i] for i in late)
            raise RuntimeError(self._describe_change(f"a late gradient of {names}"))
        assert plan.last_fired is not None
        changed = [i for i, had_fired in enumerate(plan.last_fired) if had_fired != fired[i]]
        if changed:
            names = ", ".join(self._names[i] for i in changed)
            raise RuntimeError(self._describe_change(f"a gradient of {names} in only one of them"))

    def _describe_change(self, found: str) -> str:
        return (
            "expected the backward that is captured to be like the last eager one, found "
            f"{found}. A replay always reduces the same gradients: capture a step that uses the "
            "same parameters each time, or train without a graph."
        )

    def check_absent(self, indices: Sequence[int]) -> None:
        """Raises RuntimeError if it is the module that changed, where gradients did not arrive."""
        lost = next((i for i in indices if self._hooks.is_lost(i)), None)
        if lost is not None:
            raise RuntimeError(
                f"expected the hook of fusedddp on {self._names[lost]}, found that it is gone, so "
                "that its gradient is not averaged. torch.utils.swap_tensors does that, as do "
                "conversions with torch.__future__.set_swap_module_params_on_conversion. Wrap the "
                "module again after converting it."
            )
        self._check_params(indices)
