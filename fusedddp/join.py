"""Uneven inputs: a rank that ran out of batches mirrors what the others do in a step.

Works under ``torch.distributed.algorithms.join.Join``, which `FusedDDP.join` returns.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch.distributed as dist
from torch.distributed.algorithms.join import Join, JoinHook, _JoinConfig

if TYPE_CHECKING:
    from fusedddp.module import FusedDDP


class MirrorSteps(JoinHook):
    """The join hook of a `FusedDDP`.

    A step of a rank that still has data is one forward and at most one backward: `begin_step`, the
    broadcast of buffers, `tell_sync`, a round. This does the same with nothing to contribute.
    """

    def __init__(self, model: FusedDDP, *, divide_by_initial_world_size: bool) -> None:
        self._model = model
        self._has_mirrored = False
        model._divide_by_initial_world_size = divide_by_initial_world_size
        super().__init__()

    def main_hook(self) -> None:
        """Mirrors one step of the ranks that still have data."""
        model = self._model
        if not model._divide_by_initial_world_size:
            # Not the number of all ranks, so that all choose the same operation. How many are left
            # does not matter here: this rank contributes zeros.
            collective = model.reducer.rounds.collective
            collective.divide_factor = max(collective.world_size - 1, 1)
        model.renew_if_outdated()
        model._check_and_sync_module_buffers()  # type: ignore[no-untyped-call]
        syncs = model._check_global_requires_backward_grad_sync(is_joined_rank=True)  # type: ignore[no-untyped-call]
        model.require_forward_param_sync = bool(syncs)
        if syncs:
            # What an earlier step has left would count as accumulated in this one.
            self._drop_gradients()
            self._has_mirrored = True
            model.reducer.skip_round()

    def post_hook(self, is_last_joiner: bool) -> None:
        """Gives all ranks the parameters and buffers of one that came last."""
        if self._has_mirrored:
            self._drop_gradients()
        self._model._sync_final_model(is_last_joiner)  # type: ignore[no-untyped-call]
        self._model._join_config = _JoinConfig.construct_disabled_join_config()  # type: ignore[no-untyped-call]
        collective = self._model.reducer.rounds.collective
        collective.divide_factor = collective.world_size

    def _drop_gradients(self) -> None:
        for param in self._model.reducer.params:
            param.grad = None


def begin_step(model: FusedDDP) -> None:
    """Tells ranks without data that a step begins, and settles what a mean divides by."""
    work: dist.Work | None = Join.notify_join_context(model)
    if work is None:
        return
    (num_active,) = work.get_future().wait()
    collective = model.reducer.rounds.collective
    collective.divide_factor = (
        collective.world_size if model._divide_by_initial_world_size else int(num_active.item())
    )


def tell_sync(model: FusedDDP) -> None:
    """Tells ranks without data whether the backward of this step will be reduced."""
    model._check_global_requires_backward_grad_sync(is_joined_rank=False)  # type: ignore[no-untyped-call]
