"""What training scripts put around a DDP module: optimizers, autocast, hooks, averages."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import ddp_zero_hook, default_hooks
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import (
    PostLocalSGDState,
    post_localSGD_hook,
)
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.optim import (
    PostLocalSGDOptimizer,
    ZeroRedundancyOptimizer,
    _apply_optimizer_in_backward,
)
from torch.nn.parallel import DistributedDataParallel

import fusedddp
from tests.models import batch, mlp
from tests.ranks import Ranks

WRAPS = {"ours": fusedddp.wrap, "ddp": DistributedDataParallel}


def data(step: int, rank: int) -> Tensor:
    return batch(step, rank, (8, 20))


def check_same(
    rank: int, train: Callable[[Any, int], list[Tensor]], keywords: dict[str, Any]
) -> None:
    """`train(wrap, rank)` returns equal tensors for DDP and for us."""
    ours, theirs = (train(functools.partial(wrap, **keywords), rank) for wrap in WRAPS.values())
    for position, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        assert torch.equal(a, b), (position, a, b)


def values(model: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def steps(
    model: nn.Module, optimizer: Any, rank: int, num_steps: int = 6, finish: Any = None
) -> list[Tensor]:
    history = []
    for step in range(num_steps):
        if optimizer is not None:
            optimizer.zero_grad()
        loss = model(data(step, rank)).square().mean()
        loss.backward()
        if optimizer is not None:
            optimizer.step()
        if finish is not None:
            finish()
        history += [loss.detach(), *values(model)]
    return history


# -- optimizers ----------------------------------------------------------------------------------


def zero_redundancy(wrap: Any, rank: int) -> list[Tensor]:
    model = wrap(mlp())
    optimizer = ZeroRedundancyOptimizer(
        model.parameters(), torch.optim.AdamW, lr=0.01, parameters_as_bucket_view=True
    )
    history = steps(model, optimizer, rank)
    optimizer.consolidate_state_dict(to=0)
    if rank == 0:
        history += [s["exp_avg"] for s in optimizer.state_dict()["state"].values()]
    return history


def post_local_sgd(wrap: Any, rank: int) -> list[Tensor]:
    model = wrap(mlp())
    state = PostLocalSGDState(None, subgroup=torch.distributed.group.WORLD, start_localSGD_iter=3)
    model.register_comm_hook(state, post_localSGD_hook)
    optimizer = PostLocalSGDOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.05),
        PeriodicModelAverager(period=2, warmup_steps=3),
    )
    return steps(model, optimizer, rank)


def local_sgd_by_hand(wrap: Any, rank: int) -> list[Tensor]:
    model = wrap(mlp())
    averager = PeriodicModelAverager(period=2, warmup_steps=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    return steps(
        model, optimizer, rank, finish=lambda: averager.average_parameters(model.parameters())
    )


def fused_optimizer(wrap: Any, rank: int) -> list[Tensor]:
    model = wrap(mlp())
    model._register_fused_optim(torch.optim.Adam, 0.01, betas=(0.8, 0.9))
    return steps(model, None, rank)


def fused_optimizer_of_some(wrap: Any, rank: int) -> list[Tensor]:
    model = wrap(mlp())
    first, *others = model.parameters()
    model._register_fused_optim(torch.optim.SGD, 0.05, optim_params=[first])
    return steps(model, torch.optim.SGD(others, lr=0.01), rank)


OPTIMIZERS = [
    zero_redundancy,
    post_local_sgd,
    local_sgd_by_hand,
    fused_optimizer,
    fused_optimizer_of_some,
]


@pytest.mark.parametrize("train", OPTIMIZERS, ids=lambda train: train.__name__)
def test_optimizers_for_ddp(two_ranks: Ranks, train: Any) -> None:
    two_ranks.run(check_same, train, {})


def check_in_backward(rank: int, when: str) -> None:
    model = DistributedDataParallel(mlp())
    want = steps(model, torch.optim.SGD(model.parameters(), lr=0.05), rank)
    module = mlp()
    if when == "before":
        _apply_optimizer_in_backward(torch.optim.SGD, module.parameters(), {"lr": 0.05})
    model = fusedddp.wrap(module)
    optimizer = None
    if when == "after":
        _apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), {"lr": 0.05})
    elif when == "partly":
        first, *others = model.parameters()
        _apply_optimizer_in_backward(torch.optim.SGD, [first], {"lr": 0.05})
        optimizer = torch.optim.SGD(others, lr=0.05)
    for position, (a, b) in enumerate(zip(steps(model, optimizer, rank), want, strict=True)):
        assert torch.equal(a, b), (position, a, b)
    if optimizer is None:
        assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("when", ["before", "after", "partly"])
def test_optimizers_applied_in_backward(two_ranks: Ranks, when: str) -> None:
    """As if they stepped after it. DDP needs an accelerator for them."""
    two_ranks.run(check_in_backward, when)


def check_zero_hooks(rank: int) -> None:
    """They need NCCL: on gloo torch refuses them, whoever reduces."""
    for make in (ddp_zero_hook.hook_with_zero_step, ddp_zero_hook.hook_with_zero_step_interleaved):
        for wrap in WRAPS.values():
            model = wrap(mlp())
            zero = ZeroRedundancyOptimizer(
                model.parameters(), torch.optim.SGD, overlap_with_ddp=True, lr=0.1
            )
            with pytest.raises(RuntimeError, match="Gloo backend using Overlapping DDP with ZeRO"):
                make(default_hooks.allreduce_hook, model, zero)


def test_hooks_that_overlap_zero_need_nccl(two_ranks: Ranks) -> None:
    two_ranks.run(check_zero_hooks)


# -- mixed precision -----------------------------------------------------------------------------


def autocast(wrap: Any, rank: int) -> list[Tensor]:
    model = wrap(mlp())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    history = []
    for step in range(4):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            out = model(data(step, rank))
            assert out.dtype == torch.bfloat16
            loss = out.float().square().mean()
        loss.backward()
        assert all(p.grad.dtype == torch.float32 for p in model.parameters())
        optimizer.step()
        history += [loss.detach(), *values(model)]
    return history


def grad_scaler(wrap: Any, rank: int) -> list[Tensor]:
    """In step 2 the loss of rank 1 overflows: no rank steps, and both halve the scale."""
    model = wrap(mlp())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3)
    history = []
    for step in range(5):
        optimizer.zero_grad()
        before = values(model)
        loss = model(data(step, rank)).square().mean()
        if step == 2 and rank == 1:
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
        is_same = all(torch.equal(a, b) for a, b in zip(before, values(model), strict=True))
        assert is_same == (step == 2)
        assert scaler.get_scale() == (1024.0 if step < 2 else 512.0)
        history += values(model)
    return history


@pytest.mark.parametrize("train", [autocast, grad_scaler], ids=lambda train: train.__name__)
@pytest.mark.parametrize("views", [True, False], ids=["views", "own"])
def test_lower_precision(two_ranks: Ranks, train: Any, views: bool) -> None:
    two_ranks.run(check_same, train, {"gradient_as_bucket_view": views})


# -- functions and hooks around modules ----------------------------------------------------------


def clipping(wrap: Any, rank: int) -> list[Tensor]:
    model = wrap(mlp())
    norms = []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for step in range(4):
        optimizer.zero_grad()
        model(data(step, rank)).square().mean().backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05))
        torch.nn.utils.clip_grad_value_(model.parameters(), 0.01)
        optimizer.step()
    return [*norms, *values(model)]


def module_hooks(wrap: Any, rank: int) -> list[Tensor]:
    """Forward and full backward hooks, on the wrapper and in it, that change what passes."""
    model = wrap(mlp())
    seen: list[str] = []

    def note(name: str, result: Callable[..., Any] = lambda *_: None) -> Callable[..., Any]:
        def hook(*args: Any) -> Any:
            seen.append(name)
            return result(*args)

        return hook

    for where, target in (("wrapper", model), ("inner", model.module[2])):
        target.register_forward_pre_hook(note(f"{where} pre", lambda _, args: (args[0] * 2,)))
        target.register_forward_hook(note(f"{where} forward", lambda m, args, out: out + 1))
        target.register_full_backward_pre_hook(note(f"{where} backward pre"))
        target.register_full_backward_hook(note(f"{where} backward"))
    history = steps(model, torch.optim.SGD(model.parameters(), lr=0.05), rank, 3)
    assert seen[:4] == ["wrapper pre", "inner pre", "inner forward", "wrapper forward"]
    assert sorted(seen[4:8]) == sorted(
        ["wrapper backward pre", "inner backward pre", "inner backward", "wrapper backward"]
    )
    return history


class Double(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 2


def parametrized(wrap: Any, rank: int) -> list[Tensor]:
    module = mlp()
    torch.nn.utils.parametrize.register_parametrization(module[0], "weight", Double())
    torch.nn.utils.parametrizations.weight_norm(module[2])
    torch.nn.utils.parametrizations.spectral_norm(module[4])
    model = wrap(module)
    return steps(model, torch.optim.SGD(model.parameters(), lr=0.01), rank)


def averaged_model(wrap: Any, rank: int) -> list[Tensor]:
    model = wrap(mlp())
    averages = torch.optim.swa_utils.AveragedModel(
        model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    history = steps(model, optimizer, rank, finish=lambda: averages.update_parameters(model))
    with torch.no_grad():
        return [*history, *values(averages), averages(data(9, rank))]


def anomaly(wrap: Any, rank: int) -> list[Tensor]:
    model = wrap(mlp())
    with torch.autograd.set_detect_anomaly(True):
        return steps(model, torch.optim.SGD(model.parameters(), lr=0.05), rank, 3)


def grad_next_to_backward(wrap: Any, rank: int) -> list[Tensor]:
    """`torch.autograd.grad` of inputs, before and after the backward of the same step."""
    model = wrap(mlp())
    history = []
    for step in range(3):
        model.zero_grad()
        x = data(step, rank).requires_grad_()
        loss = model(x).square().mean()
        (before,) = torch.autograd.grad(loss, x, retain_graph=True)
        loss.backward(retain_graph=True)
        (after,) = torch.autograd.grad(loss, x)
        history += [before, after, x.grad, *(p.grad.clone() for p in model.parameters())]
    return history


WITH_DDP = [
    clipping,
    module_hooks,
    parametrized,
    averaged_model,
    anomaly,
    grad_next_to_backward,
]


@pytest.mark.parametrize("train", WITH_DDP, ids=lambda train: train.__name__)
def test_training_is_bitwise_ddps(two_ranks: Ranks, train: Any) -> None:
    two_ranks.run(check_same, train, {})
