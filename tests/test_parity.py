"""The headline: losses, gradients and parameters are torch DDP's, bit for bit, on two ranks."""

from __future__ import annotations

import contextlib
import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import fusedddp
from tests.models import batch, mlp
from tests.ranks import Ranks

STEPS = 50


def train(
    model: nn.Module,
    rank: int,
    dtype: torch.dtype,
    *,
    micro_batches: int,
    set_to_none: bool,
    manual: bool = False,
) -> list[dict[str, Any]]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-3)
    history = []
    for step in range(STEPS):
        optimizer.zero_grad(set_to_none=set_to_none)
        losses = []
        for micro in range(micro_batches):
            is_last = micro == micro_batches - 1
            sync = contextlib.nullcontext() if is_last or manual else model.no_sync()
            with sync:
                x = batch(step * micro_batches + micro, rank, (8, 20), dtype)
                loss = model(x).square().mean()
                loss.backward()
            losses.append(loss.detach().clone())
        if manual:
            fusedddp.all_reduce_gradients(model)
        grads = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
        optimizer.step()
        params = [p.detach().clone() for p in model.parameters()]
        history.append({"losses": losses, "grads": grads, "params": params})
    return history


def assert_same_history(ours: list[dict[str, Any]], theirs: list[dict[str, Any]]) -> None:
    for step, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        for key in ("losses", "grads", "params"):
            for i, (x, y) in enumerate(zip(a[key], b[key], strict=True)):
                assert torch.equal(x, y), f"step {step}: {key}[{i}] differs: {x} is not {y}"


def check_mlp(
    rank: int, dtype: torch.dtype, views: bool, micro_batches: int, set_to_none: bool
) -> None:
    model = mlp(dtype)
    keywords = dict(micro_batches=micro_batches, set_to_none=set_to_none)
    # Small buckets, so that there are several: 4 KiB.
    ours = fusedddp.wrap(copy.deepcopy(model), gradient_as_bucket_view=views, bucket_cap_mb=1 / 256)
    theirs = DistributedDataParallel(copy.deepcopy(model), gradient_as_bucket_view=views)
    assert_same_history(
        train(ours, rank, dtype, **keywords), train(theirs, rank, dtype, **keywords)
    )
    assert len(ours.reducer.buckets) > 1
    assert list(ours.state_dict()) == list(theirs.state_dict())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("views", [True, False], ids=["views", "own"])
@pytest.mark.parametrize("micro_batches", [1, 3], ids=["plain", "no_sync"])
@pytest.mark.parametrize("set_to_none", [True, False], ids=["none", "zero"])
def test_mlp_is_bitwise_ddp(
    two_ranks: Ranks, dtype: torch.dtype, views: bool, micro_batches: int, set_to_none: bool
) -> None:
    two_ranks.run(check_mlp, dtype, views, micro_batches, set_to_none)


def check_manual(rank: int, dtype: torch.dtype) -> None:
    model = mlp(dtype)
    keywords = dict(micro_batches=2, set_to_none=True)
    theirs = DistributedDataParallel(copy.deepcopy(model))
    assert_same_history(
        train(copy.deepcopy(model), rank, dtype, manual=True, **keywords),
        train(theirs, rank, dtype, **keywords),
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_manual_mode_is_bitwise_ddp(two_ranks: Ranks, dtype: torch.dtype) -> None:
    two_ranks.run(check_manual, dtype)


def check_three_ranks(rank: int) -> None:
    """With three ranks the order of summation is the backend's, so the mean has an error bound."""
    model = mlp()
    ours = fusedddp.wrap(copy.deepcopy(model))
    for step in range(3):
        ours.zero_grad()
        ours(batch(step, rank, (8, 20))).square().mean().backward()
        want = [torch.zeros_like(p, dtype=torch.float64) for p in model.parameters()]
        largest = [torch.zeros_like(p, dtype=torch.float64) for p in model.parameters()]
        for other in range(3):
            alone = copy.deepcopy(model)
            alone(batch(step, other, (8, 20))).square().mean().backward()
            for total, most, p in zip(want, largest, alone.parameters(), strict=True):
                total += p.grad.double() / 3
                torch.maximum(most, p.grad.double().abs(), out=most)
        for p, exact, most in zip(ours.parameters(), want, largest, strict=True):
            # Each contribution is rounded once when it is scaled (and 1/3 itself is rounded), each
            # of the two additions once more: at most 4 half-ulps of the largest magnitude.
            bound = 4 * torch.finfo(torch.float32).eps / 2 * most + 1e-30
            assert (p.grad.double() - exact).abs().le(bound).all()


def test_three_ranks_average_within_rounding(three_ranks: Ranks) -> None:
    three_ranks.run(check_three_ranks)
