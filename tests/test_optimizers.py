"""Optimizers inside of a backward, and gradients that no backward reduced."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.optim import _apply_optimizer_in_backward

import fusedddp
from tests.expected import assert_gradients, both_views, mean_of_ranks
from tests.models import batch, mlp
from tests.ranks import Ranks


def assert_same_on_ranks(model: nn.Module) -> None:
    for name, p in model.named_parameters():
        everywhere = [torch.empty_like(p) for _ in range(2)]
        dist.all_gather(everywhere, p.detach())
        assert torch.equal(*everywhere), name


def check_in_backward(rank: int, views: bool, before: bool, accumulate: bool) -> None:
    model, alone = mlp(), mlp()
    plain = torch.optim.Adam(alone.parameters(), lr=0.01)
    if before:
        _apply_optimizer_in_backward(torch.optim.Adam, model.parameters(), {"lr": 0.01})
    wrapped = fusedddp.wrap(model, gradient_as_bucket_view=views, bucket_cap_mb=1 / 256)
    if not before:
        _apply_optimizer_in_backward(torch.optim.Adam, wrapped.parameters(), {"lr": 0.01})
    for step in range(4):
        if accumulate:
            with wrapped.no_sync():
                wrapped(batch(50 + step, rank, (8, 20))).square().mean().backward()
        wrapped(batch(step, rank, (8, 20))).square().mean().backward()
        assert all(p.grad is None for p in model.parameters())
        plain.zero_grad()
        for r in range(2):
            for seed in (step, 50 + step)[: 1 + accumulate]:
                (alone(batch(seed, r, (8, 20))).square().mean() / 2).backward()
        plain.step()
        for (name, p), q in zip(model.named_parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(p, q, msg=lambda m, n=name: f"{n}: {m}")
    assert_same_on_ranks(model)


@both_views
@pytest.mark.parametrize("before", [True, False], ids=["before", "after"])
@pytest.mark.parametrize("accumulate", [False, True], ids=["", "no_sync"])
def test_optimizers_in_backward_step_on_reduced_gradients(
    two_ranks: Ranks, views: bool, before: bool, accumulate: bool
) -> None:
    two_ranks.run(check_in_backward, views, before, accumulate)


def check_too_early(rank: int, find_unused: bool) -> None:
    """The recipe of a hook that steps and drops the gradient, as users write it for one process."""
    model = mlp()
    wrapped = fusedddp.wrap(model, find_unused_parameters=find_unused)
    optimizers = {p: torch.optim.SGD([p], lr=0.1) for p in model.parameters()}

    def step_and_drop(param: Tensor) -> None:
        optimizers[param].step()
        optimizers[param].zero_grad()

    handles = [p.register_post_accumulate_grad_hook(step_and_drop) for p in model.parameters()]
    before = [p.detach().clone() for p in model.parameters()]
    for step in range(2):
        with pytest.raises(RuntimeError, match="expected optimizers to step after the backward"):
            wrapped(batch(step, rank, (8, 20))).sum().backward()
    for p, old in zip(model.parameters(), before, strict=True):
        assert torch.equal(p, old), "stepped on a gradient of this rank"
    # An optimizer of something else may step there, as may one where the backward is local.
    other = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    for handle in handles:
        handle.remove()
    model[0].weight.register_post_accumulate_grad_hook(lambda _: other.step())
    for step in range(2):
        wrapped.zero_grad()
        wrapped(batch(step, rank, (8, 20))).sum().backward()
        want = mean_of_ranks(model, lambda m, r, s=step: m(batch(s, r, (8, 20))).sum())
        assert_gradients(wrapped, want)
    model[0].weight.register_post_accumulate_grad_hook(step_and_drop)
    with wrapped.no_sync():
        wrapped(batch(0, rank, (8, 20))).sum().backward()
    assert model[0].weight.grad is None


@pytest.mark.parametrize("find_unused", [False, True], ids=["strict", "unused"])
def test_an_optimizer_that_steps_too_early_is_told(two_ranks: Ranks, find_unused: bool) -> None:
    two_ranks.run(check_too_early, find_unused)


def check_undelivered(rank: int) -> None:
    model = mlp()
    wrapped = fusedddp.wrap(model)
    params = list(model.parameters())
    optimizer = torch.optim.SGD(params, lr=0.1)

    def assign(step: int) -> None:
        optimizer.zero_grad()
        loss = wrapped(batch(step, rank, (8, 20))).square().mean()
        for p, g in zip(params, torch.autograd.grad(loss, params), strict=True):
            p.grad = g

    for step in range(2):
        assign(step)
        before = [p.detach().clone() for p in params]
        with pytest.raises(RuntimeError, match=r"expected the gradient of 0\.weight to come from"):
            optimizer.step()
        assert all(torch.equal(p, old) for p, old in zip(params, before, strict=True))
    # The three ways out.
    assign(3)
    fusedddp.all_reduce_gradients(model)
    optimizer.step()
    assert_same_on_ranks(model)
    with wrapped.no_sync():
        assign(4)
    for p in params:
        dist.all_reduce(p.grad.div_(2))
    optimizer.step()
    assert_same_on_ranks(model)
    assign(5)
    optimizer.zero_grad()
    wrapped(batch(6, rank, (8, 20))).square().mean().backward()
    optimizer.step()
    assert_same_on_ranks(model)


def test_gradients_assigned_after_autograd_grad_are_told(two_ranks: Ranks) -> None:
    two_ranks.run(check_undelivered)


def check_no_false_alarm(rank: int) -> None:
    """torch.autograd.grad beside the backward of a step, in any order, and clipping after it."""
    model = mlp()
    wrapped = fusedddp.wrap(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        for set_to_none in (True, False):
            optimizer.zero_grad(set_to_none=set_to_none)
            x = batch(step, rank, (8, 20)).requires_grad_()
            saliency = torch.autograd.grad(wrapped(x).sum(), x)[0]
            output = wrapped(x)
            (slope,) = torch.autograd.grad(output.sum(), x, create_graph=True)
            (output.square().mean() + slope.square().mean() + saliency.mean()).backward()
            torch.autograd.grad(wrapped(x).sum(), x)  # for a log, between the two
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            for p in model.parameters():
                p.grad = p.grad.clamp(-0.5, 0.5)  # another tensor, of reduced values
            optimizer.step()
    assert_same_on_ranks(model)


def test_autograd_grad_beside_a_backward_is_no_alarm(two_ranks: Ranks) -> None:
    two_ranks.run(check_no_false_alarm)


def check_fused_optim(rank: int) -> None:
    model, alone = mlp(), mlp()
    wrapped = fusedddp.wrap(model)
    wrapped._register_fused_optim(torch.optim.SGD, 0.05, momentum=0.9)
    plain = torch.optim.SGD(alone.parameters(), 0.05, momentum=0.9)
    for step in range(3):
        wrapped.zero_grad()
        wrapped(batch(step, rank, (8, 20))).square().mean().backward()
        plain.zero_grad()
        for r in range(2):
            (alone(batch(step, r, (8, 20))).square().mean() / 2).backward()
        plain.step()
        for (name, p), q in zip(model.named_parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(p, q, msg=lambda m, n=name: f"{n}: {m}")
    assert_same_on_ranks(model)


def test_a_fused_optimizer(two_ranks: Ranks) -> None:
    two_ranks.run(check_fused_optim)
