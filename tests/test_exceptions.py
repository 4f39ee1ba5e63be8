"""Backwards that an exception ends leave ranks in step."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fusedddp
from fusedddp import one_shot
from fusedddp.bucket import Bucket
from fusedddp.collectives import Collective
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


def check_exception_on_one_rank(rank: int, first: bool, find_unused: bool) -> None:
    """Rank 0 fails in the middle; rank 1 gets its own half of the mean, and nobody waits."""
    model = Explosive()
    wrapped = fusedddp.wrap(model, bucket_cap_mb=1 / 2**18, find_unused_parameters=find_unused)
    if not first:
        wrapped(batch(0, rank, (5, 4))).backward()
    wrapped.zero_grad()
    Bomb.armed = rank == 0
    try:
        wrapped(batch(1, rank, (5, 4))).backward()
        assert rank == 1
    except ArithmeticError:
        assert rank == 0
    Bomb.armed = False
    # Both learn at their next forward that only rank 1 has stepped on a mean.
    wrapped.zero_grad()
    with pytest.raises(RuntimeError, match="an exception ended it on 1 of 2"):
        wrapped(batch(2, rank, (5, 4)))
    wrapped(batch(2, rank, (5, 4))).backward()
    assert_gradients(wrapped, mean_of_ranks(model, lambda m, r: m(batch(2, r, (5, 4)))))


@pytest.mark.parametrize("first", [True, False], ids=["first", "later"])
@pytest.mark.parametrize("find_unused", [False, True], ids=["strict", "unused"])
def test_an_exception_on_one_rank_is_told_to_all(
    two_ranks: Ranks, first: bool, find_unused: bool
) -> None:
    two_ranks.run(check_exception_on_one_rank, first, find_unused)


def check_failure_in_flight(rank: int) -> None:
    """A buffer that a collective may still write to is not filled again."""
    model = nn.Linear(4, 2)
    wrapped = fusedddp.wrap(model)
    wrapped(batch(0, rank, (3, 4))).sum().backward()
    on_round = wrapped.reducer.rounds._on_launched

    def fail() -> Any:
        raise RuntimeError("failed between launch and wait")

    wrapped.reducer.rounds._on_launched = fail
    wrapped.zero_grad()
    loss = wrapped(batch(1, rank, (3, 4))).sum()
    if rank == 1:
        time.sleep(0.5)  # the collective of rank 0 waits for this one
    with pytest.raises(RuntimeError, match="between launch and wait"):
        loss.backward()
    assert all(p.grad is None for p in model.parameters())
    wrapped.reducer.rounds._on_launched = on_round
    for step in range(2, 5):
        wrapped.zero_grad()
        want = mean_of_ranks(
            model, lambda m, r, step=step: m(batch(step, r, (3, 4))).square().sum()
        )
        wrapped(batch(step, rank, (3, 4))).square().sum().backward()
        assert_gradients(model, want)


def test_a_failure_while_a_collective_is_in_flight(two_ranks: Ranks) -> None:
    two_ranks.run(check_failure_in_flight)


def check_failing_collective(rank: int, rounds_before: int, manual: bool) -> None:
    """No gradient is left that might or might not be reduced."""
    model = nn.Sequential(*(nn.Linear(300, 300) for _ in range(6)))
    wrapped = model if manual else fusedddp.wrap(model, bucket_cap_mb=0.3)
    for step in range(rounds_before):
        wrapped(batch(step, rank, (3, 300))).sum().backward()
    wrapped.zero_grad()
    wait, calls = Bucket.wait, []

    def fail_later(bucket: Bucket) -> None:
        calls.append(bucket)
        if len(calls) == 3:
            raise RuntimeError("the network is down")
        wait(bucket)

    Bucket.wait = fail_later  # type: ignore[method-assign]
    try:
        with pytest.raises(RuntimeError, match="the network is down"):
            wrapped(batch(9, rank, (3, 300))).sum().backward()
            if manual:
                one_shot.reduce_gradients(
                    list(model.parameters()),
                    Collective(dist.group.WORLD),
                    bucket_cap_bytes=300_000,
                )
    finally:
        Bucket.wait = wait  # type: ignore[method-assign]
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize(
    ("rounds_before", "manual"),
    [(0, False), (2, False), (0, True)],
    ids=["first", "later", "manual"],
)
def test_a_failing_collective_leaves_no_gradient(
    two_ranks: Ranks, rounds_before: int, manual: bool
) -> None:
    two_ranks.run(check_failing_collective, rounds_before, manual)


def check_failed_autograd_grad(rank: int, find_unused: bool, views: bool) -> None:
    """torch.autograd.grad is no round, also where it raises, on whichever rank that is."""
    model = Explosive()
    wrapped = fusedddp.wrap(
        model, find_unused_parameters=find_unused, gradient_as_bucket_view=views
    )
    for step in range(4):
        wrapped.zero_grad()
        if rank == 1:
            Bomb.armed = True
            x = batch(step, rank, (5, 4)).requires_grad_()
            with pytest.raises(ArithmeticError):
                torch.autograd.grad(wrapped(x), x)
            Bomb.armed = False
        wrapped(batch(step, rank, (5, 4))).backward()
        want = mean_of_ranks(model, lambda m, r, s=step: m(batch(s, r, (5, 4))))
        assert_gradients(wrapped, want)
    assert wrapped.reducer.rounds.count == 4


@both_views
@pytest.mark.parametrize("find_unused", [False, True], ids=["strict", "unused"])
def test_a_failed_autograd_grad_is_no_round(
    two_ranks: Ranks, find_unused: bool, views: bool
) -> None:
    two_ranks.run(check_failed_autograd_grad, find_unused, views)
