"""What DDP cannot do, or does otherwise, around a wrapper: compared with one process alone."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch import Tensor, nn

import fusedddp
from tests.expected import assert_gradients, mean_of_ranks
from tests.models import batch, gradients, mlp
from tests.ranks import Ranks


def data(step: int, rank: int) -> Tensor:
    return batch(step, rank, (8, 20))


def check_functional_call(rank: int) -> None:
    """Gradients go to the tensors that were passed, which are nobody's parameters.

    DDP leaves its reducer waiting for gradients that never come.
    """
    model = fusedddp.wrap(mlp())
    given = {
        name: torch.full_like(p, 0.01).requires_grad_() for name, p in model.named_parameters()
    }
    torch.func.functional_call(model, given, (data(0, rank),)).sum().backward()
    alone = copy.deepcopy(model.module)
    with torch.no_grad():
        for p in alone.parameters():
            p.fill_(0.01)
    alone(data(0, rank)).sum().backward()
    for a, b in zip(given.values(), alone.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad)  # of this rank alone
    assert all(p.grad is None for p in model.parameters())
    for step in range(2):
        model.zero_grad()
        want = mean_of_ranks(model.module, lambda m, r, s=step: m(data(s, r)).square().sum())
        model(data(step, rank)).square().sum().backward()
        assert_gradients(model, want)


def test_functional_call(two_ranks: Ranks) -> None:
    two_ranks.run(check_functional_call)


def penalised(model: nn.Module, rank: int, step: int = 0) -> Tensor:
    """A gradient penalty: the loss holds the gradient of the outputs by the inputs."""
    x = data(step, rank).requires_grad_()
    out = model(x)
    (slope,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
    return out.mean() + slope.square().sum(1).mean()


def check_penalty(rank: int, keywords: dict[str, Any]) -> None:
    model = fusedddp.wrap(mlp(), **keywords)
    for step in range(4):
        model.zero_grad()
        want = mean_of_ranks(model.module, lambda m, r, s=step: penalised(m, r, s))
        penalised(model, rank, step).backward()
        assert_gradients(model, want)


@pytest.mark.parametrize(
    "keywords", [{}, {"find_unused_parameters": True}, {"static_graph": True}], ids=str
)
def test_gradient_penalties(two_ranks: Ranks, keywords: dict[str, Any]) -> None:
    """Right in every step; DDP has no double backward."""
    two_ranks.run(check_penalty, keywords)


def checkpointed(model: nn.Module, rank: int, step: int, reentrant: bool, whole: bool) -> Tensor:
    x = data(step, rank).requires_grad_()
    if whole:
        out = torch.utils.checkpoint.checkpoint(model, x, use_reentrant=reentrant)
    else:
        out = model(x)
    return out.square().mean()


class Checkpointed(nn.Module):
    """Recomputes its layers in the backward."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.layers = mlp()
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=self.reentrant)
        return x


def check_checkpointing(rank: int, reentrant: bool, whole: bool) -> None:
    module = mlp() if whole else Checkpointed(reentrant)
    model = fusedddp.wrap(module)
    for step in range(4):
        model.zero_grad()
        want = mean_of_ranks(module, lambda m, r, s=step: checkpointed(m, r, s, reentrant, False))
        checkpointed(model, rank, step, reentrant, whole).backward()
        assert_gradients(model, want)


@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "not_reentrant"])
@pytest.mark.parametrize("whole", [True, False], ids=["wrapper", "layers"])
def test_activation_checkpointing(two_ranks: Ranks, reentrant: bool, whole: bool) -> None:
    two_ranks.run(check_checkpointing, reentrant, whole)


def check_jvp(rank: int) -> None:
    model = fusedddp.wrap(mlp())
    alone = copy.deepcopy(model.module)
    for step in range(3):
        x, tangent = data(step, rank), data(100 + step, rank)
        with torch.autograd.forward_ad.dual_level():
            out = model(torch.autograd.forward_ad.make_dual(x, tangent))
            ours = torch.autograd.forward_ad.unpack_dual(out)
            out = alone(torch.autograd.forward_ad.make_dual(x, tangent))
            theirs = torch.autograd.forward_ad.unpack_dual(out)
        assert torch.equal(ours.primal, theirs.primal)
        assert torch.equal(ours.tangent, theirs.tangent)
        value, derivative = torch.func.jvp(model, (x,), (tangent,))
        assert torch.equal(value, theirs.primal)
        assert torch.equal(derivative, theirs.tangent)
        model.zero_grad()
        want = mean_of_ranks(model.module, lambda m, r, s=step: m(data(s, r)).square().sum())
        model(x).square().sum().backward()
        assert_gradients(model, want)


def test_forward_mode(two_ranks: Ranks) -> None:
    two_ranks.run(check_jvp)


def check_vmap(rank: int) -> None:
    """Per-sample gradients of a wrapper are this rank's, as `torch.func` gives them to a module."""
    model = fusedddp.wrap(mlp())
    params = {name: p.detach() for name, p in model.named_parameters()}

    def loss(params: dict[str, Tensor], x: Tensor) -> Tensor:
        return torch.func.functional_call(model, params, (x[None],)).square().sum()

    x = data(0, rank)
    each = torch.func.vmap(torch.func.grad(loss), (None, 0))(params, x)
    alone = copy.deepcopy(model.module)
    alone(x[3:4]).square().sum().backward()
    for name, gradient in gradients(alone).items():
        torch.testing.assert_close(each[f"module.{name}"][3], gradient)
    want = mean_of_ranks(model.module, lambda m, r: m(data(1, r)).square().sum())
    model(data(1, rank)).square().sum().backward()
    assert_gradients(model, want)


def test_per_sample_gradients(two_ranks: Ranks) -> None:
    two_ranks.run(check_vmap)
