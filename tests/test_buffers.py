"""Buffers come from rank 0, and no rank waits for another one in order to evaluate."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fusedddp
from tests.models import batch
from tests.ranks import Ranks


def everywhere(tensor: Tensor) -> list[Tensor]:
    values = [torch.empty_like(tensor.contiguous()) for _ in range(2)]
    dist.all_gather(values, tensor.detach().contiguous())
    return values


class Buffers(nn.Module):
    def __init__(self, rank: int) -> None:
        super().__init__()
        self.lin = nn.Linear(4, 4)
        self.register_buffer("wide", torch.full((1,), float(rank)).expand(4))
        self.register_buffer("steps", torch.tensor(rank, dtype=torch.int64))
        self.register_buffer("mask", torch.tensor([rank == 0, True, False, rank == 1]))
        self.register_buffer("turned", torch.full((3, 2), float(rank)).t())
        self.register_buffer("spiral", torch.full((2,), complex(rank, 1)))
        self.register_buffer("short", torch.full((3,), float(rank), dtype=torch.bfloat16))
        self.register_buffer("empty", torch.empty(0))
        self.register_buffer("again", self.steps)

    def forward(self, x: Tensor) -> Tensor:
        return (self.lin(x) * self.wide).sum()


def check_kinds(rank: int) -> None:
    torch.manual_seed(rank)
    model = Buffers(rank)
    wrapped = fusedddp.wrap(model)
    for step in range(3):
        for name, value in (
            ("wide", 0.0),
            ("steps", 0),
            ("turned", 0.0),
            ("spiral", 1j),
            ("short", 0),
        ):
            buffer = getattr(model, name)
            assert torch.equal(buffer, torch.full_like(buffer, value)), name
        assert model.mask.tolist() == [True, True, False, False]
        assert torch.equal(*everywhere(model.lin.weight))
        wrapped(batch(step, rank, (3, 4))).backward()
        model.steps.fill_(rank)  # somebody changes them outside of forward
        model.turned = torch.full((3, 2), float(rank)).t()  # or puts another tensor there
        wrapped(batch(step, rank, (3, 4)))  # and they are rank 0's before the next forward


def test_buffers_of_every_kind_come_from_rank_0(two_ranks: Ranks) -> None:
    two_ranks.run(check_kinds)


def norm_net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 1))


def check_evaluation(rank: int, how: str) -> None:
    """Rank 0 evaluates alone, any number of times, between training steps."""
    model = norm_net()
    wrapped = fusedddp.wrap(model)
    for step in range(4):
        wrapped.train()
        wrapped(batch(step, rank, (6, 4))).sum().backward()
        # In step as soon as backward has ended: what all ranks evaluate now is the same.
        assert torch.equal(*everywhere(model[1].running_mean))
        if rank == 0:
            for _ in range(step + 1):
                if how == "no_grad":
                    wrapped.eval()
                    with torch.no_grad():
                        wrapped(batch(9, rank, (6, 4)))
                elif how == "eval":
                    wrapped.eval()
                    wrapped(batch(9, rank, (6, 4)))
                else:
                    with torch.inference_mode():
                        wrapped(batch(9, rank, (6, 4)))
    assert torch.equal(*everywhere(model[0].weight.grad))


@pytest.mark.parametrize("how", ["no_grad", "eval", "inference"])
def test_one_rank_evaluates_alone(two_ranks: Ranks, how: str) -> None:
    two_ranks.run(check_evaluation, how)


def check_flags(rank: int, keywords: dict[str, Any], at_init: bool, in_forward: bool) -> None:
    model = norm_net()
    model[1].running_mean.fill_(rank)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        wrapped = fusedddp.wrap(model, **keywords)
    told = [w for w in caught if "broadcast_buffers` is deprecated" in str(w.message)]
    assert len(told) == ("broadcast_buffers" in keywords)
    assert wrapped.forward_sync_buffers is in_forward
    assert wrapped.broadcast_buffers is in_forward  # the old name of the attribute
    assert torch.equal(*everywhere(model[1].running_mean)) is at_init
    for step in range(2):
        wrapped(batch(step, rank, (6, 4))).sum().backward()
    assert torch.equal(*everywhere(model[1].running_mean)) is in_forward


@pytest.mark.parametrize(
    ("keywords", "at_init", "in_forward"),
    [
        ({}, True, True),
        ({"forward_sync_buffers": False}, True, False),
        ({"broadcast_buffers": False}, False, False),
        ({"broadcast_buffers": False, "forward_sync_buffers": True}, True, True),
        ({"broadcast_buffers": True}, True, True),
        ({"init_sync": False, "forward_sync_buffers": False}, False, False),
    ],
    ids=str,
)
def test_buffer_keywords(
    two_ranks: Ranks, keywords: dict[str, Any], at_init: bool, in_forward: bool
) -> None:
    two_ranks.run(check_flags, keywords, at_init, in_forward)


def check_init_sync(rank: int) -> None:
    torch.manual_seed(rank)
    model = nn.Linear(3, 2)
    mine = model.weight.detach().clone()
    fusedddp.wrap(model, init_sync=False)
    assert torch.equal(model.weight, mine)
    wrapped = fusedddp.wrap(model)
    torch.manual_seed(0)
    assert torch.equal(wrapped.weight, nn.Linear(3, 2).weight)


def test_initial_broadcast(two_ranks: Ranks) -> None:
    two_ranks.run(check_init_sync)
