"""Which backwards are reduced, and what of a backward is."""

from __future__ import annotations

import contextlib
import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import fusedddp
from tests.expected import assert_gradients, both_views, mean_of_ranks
from tests.models import batch, gradients, mlp
from tests.ranks import Ranks


def check_no_sync_placement(rank: int, around: str) -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    wrapped = fusedddp.wrap(model)
    for step in range(3):  # recording and later rounds
        wrapped.zero_grad()
        x = batch(step, rank, (3, 4))
        forward = wrapped.no_sync() if around in ("both", "forward") else contextlib.nullcontext()
        backward = wrapped.no_sync() if around in ("both", "backward") else contextlib.nullcontext()
        with forward:
            loss = wrapped(x).square().mean()
        with backward:
            loss.backward()
        alone = copy.deepcopy(model)
        alone.zero_grad()
        alone(x).square().mean().backward()
        assert torch.equal(model.weight.grad, alone.weight.grad), "reduced although under no_sync"
        # The next one reduces what was gathered.
        wrapped(batch(step + 10, rank, (3, 4))).square().mean().backward()
        want = mean_of_ranks(
            model,
            lambda m, r, s=step: sum(
                m(batch(seed, r, (3, 4))).square().mean() for seed in (s, s + 10)
            ),
        )
        assert_gradients(model, want)


@pytest.mark.parametrize("around", ["both", "forward", "backward"])
def test_no_sync_means_what_it_says(two_ranks: Ranks, around: str) -> None:
    two_ranks.run(check_no_sync_placement, around)


def check_no_sync_of_other_forwards(rank: int) -> None:
    """Only the forward that a backward comes from counts."""
    model = Methods()
    wrapped = fusedddp.wrap(model)
    x = [batch(s, rank, (3, 4)) for s in range(3)]
    for _ in range(3):  # recording and later rounds
        wrapped.zero_grad()
        reduced = wrapped(x[0]).square().mean()
        with wrapped.no_sync():
            wrapped(x[1])
        reduced.backward()
        want = mean_of_ranks(model, lambda m, r: m(batch(0, r, (3, 4))).square().mean())
        assert_gradients(wrapped, want)

        wrapped.zero_grad()
        with wrapped.no_sync():
            wrapped(x[1]).sum().backward()
        wrapped.zero_grad()
        wrapped.loss(x[0]).backward()
        assert_gradients(wrapped, mean_of_ranks(model, lambda m, r: m.loss(batch(0, r, (3, 4)))))

        wrapped.zero_grad()
        with wrapped.no_sync():
            local = wrapped(x[1]).square().mean()
        (local + wrapped(x[2]).square().mean()).backward()
        want = mean_of_ranks(
            model,
            lambda m, r: sum(m(batch(s, r, (3, 4))).square().mean() for s in (1, 2)),
        )
        assert_gradients(wrapped, want)


def test_no_sync_around_another_forward_has_no_effect(two_ranks: Ranks) -> None:
    two_ranks.run(check_no_sync_of_other_forwards)


def check_no_sync_state(rank: int) -> None:
    wrapped = fusedddp.wrap(mlp())
    with pytest.raises(KeyError), wrapped.no_sync():
        with wrapped.no_sync():
            assert not wrapped.require_backward_grad_sync
        assert not wrapped.require_backward_grad_sync
        raise KeyError
    assert wrapped.require_backward_grad_sync
    wrapped.require_backward_grad_sync = False  # as nanoGPT sets it
    wrapped(batch(0, rank, (8, 20))).sum().backward()
    alone = mlp()
    alone(batch(0, rank, (8, 20))).sum().backward()
    assert_gradients(wrapped, gradients(alone), exact=True)


def test_no_sync_nests_and_is_undone_by_exceptions(two_ranks: Ranks) -> None:
    two_ranks.run(check_no_sync_state)


def check_several_backwards(rank: int, views: bool) -> None:
    model = mlp()
    wrapped = fusedddp.wrap(model, gradient_as_bucket_view=views)

    def losses(m: nn.Module, r: int, step: int) -> tuple[Tensor, Tensor]:
        out = m(batch(step, r, (8, 20)))
        return out[:, 0].square().mean(), out[:, 1:].abs().mean()

    for step in range(3):
        wrapped.zero_grad()
        one, two = losses(wrapped, rank, step)
        one.backward(retain_graph=True)
        two.backward()
        assert_gradients(wrapped, mean_of_ranks(model, lambda m, r, s=step: sum(losses(m, r, s))))


@both_views
def test_two_backwards_of_one_forward(two_ranks: Ranks, views: bool) -> None:
    two_ranks.run(check_several_backwards, views)


def check_accumulation(rank: int, views: bool) -> None:
    model = mlp()
    wrapped = fusedddp.wrap(model, gradient_as_bucket_view=views, bucket_cap_mb=1 / 256)
    for step in range(4):
        wrapped(batch(step, rank, (8, 20))).square().mean().backward()
    want = mean_of_ranks(
        model, lambda m, r: sum(m(batch(s, r, (8, 20))).square().mean() for s in range(4))
    )
    assert_gradients(wrapped, want)


@both_views
def test_accumulating_reduced_gradients_across_the_first_layout(
    two_ranks: Ranks, views: bool
) -> None:
    two_ranks.run(check_accumulation, views)


def check_two_forwards(rank: int) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 1))
    # Training does not depend on the buffers, and before torch 2.13 their broadcast breaks this.
    theirs = DistributedDataParallel(copy.deepcopy(model), broadcast_buffers=False)
    ours = fusedddp.wrap(model)
    for step in range(3):
        for wrapped in (ours, theirs):
            wrapped.zero_grad()
            real, fake = batch(2 * step, rank, (6, 4)), batch(2 * step + 1, rank, (6, 4))
            (wrapped(real).mean() - wrapped(fake).mean()).backward()
        assert_gradients(ours, gradients(theirs), exact=True)
        for (name, a), (_, b) in zip(ours.named_buffers(), theirs.named_buffers(), strict=True):
            if rank == 0:
                assert torch.equal(a, b), name


@pytest.mark.filterwarnings("ignore:`broadcast_buffers` is deprecated")
def test_two_forwards_through_batchnorm_before_one_backward(two_ranks: Ranks) -> None:
    two_ranks.run(check_two_forwards)


def check_autograd_grad(rank: int) -> None:
    """A gradient penalty: torch.autograd.grad through the wrapper, then a backward."""
    model = mlp()
    wrapped = fusedddp.wrap(model)

    def loss(m: nn.Module, r: int, step: int) -> Tensor:
        x = batch(step, r, (8, 20)).requires_grad_()
        out = m(x)
        (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        return out.square().mean() + slope.norm()

    for step in range(3):
        wrapped.zero_grad()
        loss(wrapped, rank, step).backward()
        want = mean_of_ranks(model, lambda m, r, s=step: loss(m, r, s))
        # The last bias has no part in the slope but in the output.
        assert_gradients(wrapped, want)
    assert wrapped.reducer.rounds.count == 3, "torch.autograd.grad is no round"


def test_autograd_grad_is_not_reduced(two_ranks: Ranks) -> None:
    two_ranks.run(check_autograd_grad)


def check_create_graph(rank: int, views: bool) -> None:
    model = nn.Linear(1, 1, bias=False)
    with torch.no_grad():
        model.weight.fill_(2.0)
    wrapped = fusedddp.wrap(model, gradient_as_bucket_view=views)
    for _ in range(3):
        wrapped.zero_grad()
        (wrapped(torch.ones(1, 1)) ** 3 * (rank + 1)).sum().backward(create_graph=True)
        assert torch.equal(model.weight.grad, torch.tensor([[3 * 4.0 * 1.5]]))
        assert not model.weight.grad.requires_grad


@pytest.mark.filterwarnings("ignore:Using backward")
@both_views
def test_create_graph_gives_averaged_values(two_ranks: Ranks, views: bool) -> None:
    two_ranks.run(check_create_graph, views)


class CheckpointedTwice(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.block, self.last = nn.Linear(4, 6), nn.Linear(6, 6), nn.Linear(6, 1)
        self.reentrant = reentrant
        self.times = 2

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for _ in range(self.times):
            x = checkpoint(lambda t: torch.tanh(self.block(t)), x, use_reentrant=self.reentrant)
        return self.last(x).square().mean()


def check_checkpointing(rank: int, reentrant: bool) -> None:
    model = CheckpointedTwice(reentrant)
    wrapped = fusedddp.wrap(model)
    for step in range(3):
        wrapped.zero_grad()
        wrapped(batch(step, rank, (5, 4))).backward()
        assert_gradients(wrapped, mean_of_ranks(model, lambda m, r, s=step: m(batch(s, r, (5, 4)))))
    assert wrapped.reducer.rounds.count == 3


@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "non-reentrant"])
def test_checkpointing_a_block_used_twice(two_ranks: Ranks, reentrant: bool) -> None:
    two_ranks.run(check_checkpointing, reentrant)


def check_late(rank: int, views: bool) -> None:
    """A block that runs once in the first backward and more often later, on one rank only."""
    model = CheckpointedTwice(True)
    model.times = 1
    wrapped = fusedddp.wrap(model, gradient_as_bucket_view=views)

    def loss(m: Any, r: int, step: int) -> Tensor:
        m.times = 1 if step != 1 or r == 0 else 3
        return m(batch(step, r, (5, 4)))

    for step in range(4):
        wrapped.zero_grad()
        model.times = 1 if step != 1 or rank == 0 else 3
        wrapped(batch(step, rank, (5, 4))).backward()
        assert_gradients(wrapped, mean_of_ranks(model, lambda m, r, s=step: loss(m, r, s)))


@both_views
def test_late_contributions_are_reduced_too(two_ranks: Ranks, views: bool) -> None:
    two_ranks.run(check_late, views)


class Methods(nn.Module):
    version = "v1"

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.encoder, self.head = nn.Linear(4, 4), nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(x))

    def loss(self, x: Tensor) -> Tensor:
        return self(x).square().mean()


def check_other_methods(rank: int) -> None:
    model = Methods()
    wrapped = fusedddp.wrap(model)
    assert wrapped.version == "v1"
    assert wrapped.head is model.head
    with pytest.raises(AttributeError, match=r"neither FusedDDP nor the Methods in it has .* 'x'"):
        wrapped.x  # noqa: B018
    for step in range(3):
        wrapped.zero_grad()
        wrapped.loss(batch(step, rank, (5, 4))).backward()
        assert_gradients(
            wrapped, mean_of_ranks(model, lambda m, r, s=step: m.loss(batch(s, r, (5, 4))))
        )


def test_a_loss_made_by_another_method_is_reduced(two_ranks: Ranks) -> None:
    two_ranks.run(check_other_methods)


class Opaque:
    """An output that nobody looks into."""

    def __init__(self, value: Tensor) -> None:
        self.value = value


class HidesItsOutput(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Opaque:
        return Opaque(self.linear(x))

    def loss(self, x: Tensor) -> Tensor:
        return self.linear(x).square().sum()


def check_hidden_no_sync(rank: int) -> None:
    torch.manual_seed(0)
    model = HidesItsOutput()
    wrapped = fusedddp.wrap(model)
    for step in range(4):
        wrapped.zero_grad()
        with wrapped.no_sync():
            hidden = wrapped(batch(step, rank, (3, 4)))
        hidden.value.square().sum().backward()
        alone = nn.Linear(4, 2)
        alone.load_state_dict(model.linear.state_dict())
        alone(batch(step, rank, (3, 4))).square().sum().backward()
        assert torch.equal(model.linear.weight.grad, alone.weight.grad)  # local
        wrapped.zero_grad()
        want = mean_of_ranks(model, lambda m, r, step=step: m.loss(batch(step, r, (3, 4))))
        wrapped.loss(batch(step, rank, (3, 4))).backward()
        assert_gradients(model, want)


def test_no_sync_around_a_hidden_forward_is_over_after_its_backward(two_ranks: Ranks) -> None:
    two_ranks.run(check_hidden_no_sync)
