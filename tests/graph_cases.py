"""Training steps for the tests of graphs, and where to capture them: a GPU, or the stand-in."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel.distributed import _MixedPrecision

import fusedddp
from fusedddp.graphs import backend
from tests.graph_stand_in import StandIn
from tests.models import mlp

_nccl: list[dist.ProcessGroup] = []


@contextlib.contextmanager
def captures_on(device: str) -> Iterator[dist.ProcessGroup | None]:
    """Captures on `device` in the body; gives the process group for it."""
    if device == "cuda":
        if not _nccl:
            _nccl.append(dist.new_group(backend="nccl"))
        yield _nccl[0]
        return
    backend.BACKENDS["cpu"] = StandIn
    try:
        yield None
    finally:
        del backend.BACKENDS["cpu"]


class Extras(nn.Module):
    """An MLP with dropout, buffers, and a parameter that is never used."""

    def __init__(self, *, p: float = 0.0, unused: bool = False, norm: bool = False) -> None:
        super().__init__()
        self.body = mlp()
        self.norm = nn.BatchNorm1d(20) if norm else nn.Identity()
        self.drop = nn.Dropout(p)
        self.spare = nn.Parameter(torch.ones(3), requires_grad=unused)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.drop(self.body(self.norm(x)))
        return out


@dataclasses.dataclass
class Training:
    """A model with what trains it.

    Attributes:
        step: trains once on a batch; returns the loss.
    """

    model: fusedddp.FusedDDP
    optimizer: torch.optim.Optimizer
    step: Callable[..., Any]
    scheduler: Any = None
    scaler: Any = None
    num_micro: int = 1

    def state(self) -> dict[str, Tensor]:
        """All that a step may change, as copies."""
        found = {f"model.{k}": v for k, v in self.model.state_dict().items()}
        for index, values in self.optimizer.state_dict()["state"].items():
            found |= {f"{k} of {index}": v for k, v in values.items()}
        for name, param in self.model.named_parameters():
            found[f"grad of {name}"] = (
                torch.full((), torch.nan) if param.grad is None else param.grad
            )
        if self.scaler is not None:
            found["scale"] = torch.tensor(self.scaler.get_scale())
        return {k: v.detach().clone() for k, v in found.items()}


NAMES = (
    "views", "own gradients", "small buckets", "find unused", "static graph", "comm hook",
    "bf16 hook", "mixed precision", "zero last", "zero in place", "no zero", "buffers", "dropout",
    "clipping", "autocast", "scaler", "sgd", "scheduler", "accumulation", "checkpointing",
    "step first",
)  # fmt: skip


def training(name: str, device: str, group: dist.ProcessGroup | None) -> Training:
    """A training with the option `name`; the same each time."""
    torch.manual_seed(1)
    keywords: dict[str, Any] = {"process_group": group}
    extras: dict[str, Any] = {}
    if name == "own gradients":
        keywords["gradient_as_bucket_view"] = False
    elif name == "small buckets":
        keywords["bucket_cap_mb"] = 0.004
    elif name == "find unused":
        keywords["find_unused_parameters"] = extras["unused"] = True
    elif name == "static graph":
        keywords["static_graph"] = extras["unused"] = True
    elif name == "mixed precision":
        keywords["mixed_precision"] = _MixedPrecision(
            param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16
        )
    elif name == "buffers":
        extras["norm"] = True
    elif name == "dropout":
        extras["p"] = 0.3
    model = fusedddp.wrap(Extras(**extras).to(device), **keywords)
    if name == "comm hook":
        model.register_comm_hook(group, default_hooks.allreduce_hook)
    if name == "bf16 hook":
        model.register_comm_hook(group, default_hooks.bf16_compress_hook)
    params = list(model.parameters())
    optimizer: torch.optim.Optimizer
    if name == "sgd":
        optimizer = torch.optim.SGD(params, lr=0.01, momentum=0.9, fused=True)
    else:
        optimizer = torch.optim.AdamW(
            params, lr=torch.tensor(0.01, device=device), fused=True, capturable=True
        )
    done = Training(model, optimizer, lambda: None)
    if name == "scheduler":
        done.scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.9)
    if name == "scaler":
        done.scaler = torch.amp.GradScaler(device, init_scale=2.0**10, growth_interval=7)
    if name == "accumulation":
        done.num_micro = 3

    def forward(x: Tensor) -> Tensor:
        with torch.autocast(device, dtype=torch.bfloat16, enabled=name == "autocast"):
            if name == "checkpointing":
                out = torch.utils.checkpoint.checkpoint(model, x, use_reentrant=False)
            else:
                out = model(x)
            loss: Tensor = (out.float() - x[:, :5]).square().mean()
        return loss

    def step(x: Tensor, last: bool = True) -> Tensor:
        if name == "step first":  # on the gradients of the last call
            optimizer.step()
        zeros_last = name in ("zero last", "accumulation")
        if not zeros_last and name != "no zero":
            optimizer.zero_grad(set_to_none=name != "zero in place")
        loss = forward(x)
        if done.scaler is not None:
            done.scaler.scale(loss).backward()
            done.scaler.unscale_(optimizer)
        else:
            loss.backward()
        if not last or name == "step first":
            return loss
        if name in ("clipping", "scaler"):
            nn.utils.clip_grad_norm_(params, 0.1)
        if done.scaler is not None:
            done.scaler.step(optimizer)
            done.scaler.update()
        else:
            optimizer.step()
        if zeros_last:
            optimizer.zero_grad()
        return loss

    done.step = step
    return done


def batches(count: int, rank: int, device: str, rows: int = 8) -> list[Tensor]:
    generator = torch.Generator().manual_seed(7 + rank)
    return [torch.randn(rows, 20, generator=generator).to(device) for _ in range(count)]


def run(case: Training, step: Callable[..., Tensor], xs: list[Tensor]) -> list[Tensor]:
    """Trains on each of `xs`, and steps the scheduler; returns the losses."""
    losses = []
    for index, x in enumerate(xs):
        if case.num_micro == 1:
            losses.append(step(x).detach())
        elif (index + 1) % case.num_micro:
            with case.model.no_sync():
                losses.append(step(x, last=False).detach())
        else:
            losses.append(step(x, last=True).detach())
        if case.scheduler is not None:
            case.scheduler.step()
    return losses


def check_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Raises AssertionError unless all is the same bit for bit."""
    assert found.keys() == expected.keys(), found.keys() ^ expected.keys()
    different = [
        name
        for name in expected
        if not torch.equal(found[name].nan_to_num(7.0), expected[name].nan_to_num(7.0))
    ]
    assert not different, different
