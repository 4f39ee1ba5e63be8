"""Backwards that an exception ends leave ranks in step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fusedddp
from fusedddp.reducer import Phase
from tests.expected import assert_gradients, both_views, mean_of_ranks
from tests.models import batch
from tests.ranks import Ranks


class Bomb(torch.autograd.Function):
    armed = False

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        if Bomb.armed:
            raise ArithmeticError("in the middle of backward")
        return gradient


class Explosive(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(4, 6), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(Bomb.apply(self.first(x))).square().mean()


def check_exception(rank: int, good_before: int, views: bool, set_to_none: bool) -> None:
    model = Explosive()
    wrapped = fusedddp.wrap(model, bucket_cap_mb=1 / 2**18, gradient_as_bucket_view=views)

    def good_step(step: int) -> None:
        wrapped.zero_grad(set_to_none=set_to_none)
        wrapped(batch(step, rank, (5, 4))).backward()
        assert_gradients(wrapped, mean_of_ranks(model, lambda m, r: m(batch(step, r, (5, 4)))))

    for step in range(good_before):
        good_step(step)
    wrapped.zero_grad(set_to_none=set_to_none)
    Bomb.armed = True
    with pytest.raises(ArithmeticError):
        wrapped(batch(9, rank, (5, 4))).backward()
    Bomb.armed = False
    assert wrapped.reducer.phase is not Phase.IDLE
    with pytest.raises(RuntimeError, match="expected the last backward to have run to its end"):
        wrapped._check_reducer_finalized()
    for step in range(10, 13):
        good_step(step)
    wrapped._check_reducer_finalized()


@both_views
@pytest.mark.parametrize("set_to_none", [True, False], ids=["none", "zero"])
@pytest.mark.parametrize("good_before", [0, 1, 2])
def test_an_exception_in_backward_then_a_good_step(
    two_ranks: Ranks, good_before: int, views: bool, set_to_none: bool
) -> None:
    two_ranks.run(check_exception, good_before, views, set_to_none)


class TwoOutputs(Explosive):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.first(x)
        return hidden.square().mean(), self.last(Bomb.apply(hidden)).square().mean()

    def loss(self, x: Tensor) -> Tensor:
        return sum(self(x))


def check_exception_without_a_forward(rank: int, laid_out: bool, views: bool) -> None:
    """The next backward comes from the same forward, or from another method of the module."""
    model = TwoOutputs()
    wrapped = fusedddp.wrap(model, find_unused_parameters=True, gradient_as_bucket_view=views)
    if laid_out:
        sum(wrapped(batch(0, rank, (5, 4)))).backward()
    for step in range(1, 4):
        wrapped.zero_grad()
        good, bad = wrapped(batch(step, rank, (5, 4)))
        Bomb.armed = True
        with pytest.raises(ArithmeticError):
            bad.backward(retain_graph=True)
        Bomb.armed = False
        wrapped.zero_grad()
        if step < 3:
            good.backward()
            want = mean_of_ranks(model, lambda m, r, s=step: m(batch(s, r, (5, 4)))[0])
        else:
            wrapped.loss(batch(step, rank, (5, 4))).backward()
            want = mean_of_ranks(model, lambda m, r, s=step: m.loss(batch(s, r, (5, 4))))
        assert_gradients(wrapped, want)


@both_views
@pytest.mark.parametrize("laid_out", [True, False])
def test_an_exception_in_backward_then_a_backward_without_a_forward(
    two_ranks: Ranks, laid_out: bool, views: bool
) -> None:
    two_ranks.run(check_exception_without_a_forward, laid_out, views)


def check_exception_on_one_rank(rank: int) -> None:
    """Rank 0 fails in the middle; rank 1 gets its own half of the mean, and nobody waits."""
    model = Explosive()
    wrapped = fusedddp.wrap(model, bucket_cap_mb=1 / 2**18)
    wrapped(batch(0, rank, (5, 4))).backward()
    wrapped.zero_grad()
    Bomb.armed = rank == 0
    try:
        wrapped(batch(1, rank, (5, 4))).backward()
        assert rank == 1
    except ArithmeticError:
        assert rank == 0
    Bomb.armed = False
    # Rank 1 learns at its next forward that rank 0 had no gradient for some parameters.
    wrapped.zero_grad()
    if rank == 1:
        with pytest.raises(RuntimeError, match="did not receive grad on other ranks"):
            wrapped(batch(2, rank, (5, 4)))
    wrapped(batch(2, rank, (5, 4))).backward()
    assert_gradients(wrapped, mean_of_ranks(model, lambda m, r: m(batch(2, r, (5, 4)))))


def test_an_exception_on_one_rank_hangs_nobody(two_ranks: Ranks) -> None:
    two_ranks.run(check_exception_on_one_rank)
