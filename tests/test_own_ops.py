"""`wrap(..., ops=...)`: gradients are copied by the user's own kernels."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

import fusedddp
from fusedddp_kernels import GradStats, Slots, reference
from tests.expected import both_views
from tests.models import batch, gradients, mlp
from tests.ranks import Ranks


class CountingOps:
    """Counts the tensors that go through it."""

    def __init__(self) -> None:
        self.tensors: Counter[str] = Counter()

    def flatten(
        self,
        sources: Sequence[Tensor | None],
        slots: Slots,
        scale: Tensor | None = None,
        first: int = 0,
    ) -> None:
        self.tensors["flatten"] += len(sources)
        reference.flatten(sources, slots, scale, first)

    def unflatten(
        self,
        slots: Slots,
        destinations: Sequence[Tensor | None],
        scale: Tensor | None = None,
        *,
        accumulate: bool = False,
    ) -> None:
        self.tensors["unflatten"] += len(destinations)
        reference.unflatten(slots, destinations, scale, accumulate=accumulate)

    def scale_(self, tensor: Tensor, scale: Tensor) -> None:
        self.tensors["scale_"] += 1
        reference.scale_(tensor, scale)

    def grad_stats(self, slots: Slots, *, per_tensor: bool = False) -> GradStats:
        return reference.grad_stats(slots, per_tensor=per_tensor)


def check_own_ops(rank: int, views: bool) -> None:
    model = mlp()  # six parameters
    ops = CountingOps()
    ours = fusedddp.wrap(copy.deepcopy(model), ops=ops, gradient_as_bucket_view=views)
    usual = fusedddp.wrap(copy.deepcopy(model), gradient_as_bucket_view=views)
    for step in range(3):  # the first round is outside of the buckets
        for wrapped in (ours, usual):
            wrapped.zero_grad()
            wrapped(batch(step, rank, (3, 20))).square().sum().backward()
        for name, gradient in gradients(ours).items():
            assert torch.equal(gradient, gradients(usual)[name]), name
        assert ops.tensors["flatten"] == 6 * (step + 1)
        assert ops.tensors["unflatten"] == (0 if views else 6 * (step + 1))


@both_views
def test_own_ops_copy_all_gradients(two_ranks: Ranks, views: bool) -> None:
    two_ranks.run(check_own_ops, views)


def check_direct(rank: int) -> None:
    ops = CountingOps()
    model = torch.nn.Sequential(torch.nn.Linear(4, 64), torch.nn.Linear(64, 64, bias=False))
    wrapped = fusedddp.wrap(model, ops=ops, bucket_cap_mb=0.01)
    for step in range(3):
        wrapped.zero_grad()
        wrapped(batch(step, rank, (3, 4))).sum().backward()
    assert ops.tensors["scale_"] == 2  # the large gradient, in place; the first round takes pieces


def test_own_ops_scale_large_gradients_in_place(two_ranks: Ranks) -> None:
    two_ranks.run(check_direct)


class Half:
    """Only half of what is needed."""

    flatten = staticmethod(reference.flatten)
    scale_ = staticmethod(reference.scale_)


def check_refused(rank: int) -> None:
    with pytest.raises(TypeError, match="found Half without unflatten, grad_stats"):
        fusedddp.wrap(mlp(), ops=Half())
    with pytest.raises(TypeError, match="found the class CountingOps; call it first"):
        fusedddp.wrap(mlp(), ops=CountingOps)
    with pytest.raises(RuntimeError, match=r"keywords of wrap.*\[ops=CountingOps\]"):
        fusedddp.wrap(mlp(), ops=CountingOps() if rank == 0 else None)


def test_ops_that_are_none_or_differ_are_refused(two_ranks: Ranks) -> None:
    two_ranks.run(check_refused)
