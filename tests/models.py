"""Small models and data, the same on every rank that asks with the same seed."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def mlp(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(20, 33), nn.Tanh(), nn.Linear(33, 64), nn.ReLU(), nn.Linear(64, 5)
    ).to(dtype)


def batch(
    seed: int, rank: int, shape: tuple[int, ...], dtype: torch.dtype = torch.float32
) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    return torch.randn(shape, generator=generator).to(dtype)


class Branches(nn.Module):
    """Uses the parameters that the caller names."""

    def __init__(self, count: int = 4, width: int = 3) -> None:
        super().__init__()
        self.w = nn.ParameterList(nn.Parameter(torch.ones(width)) for _ in range(count))

    def forward(self, x: Tensor, which: list[int]) -> Tensor:
        return torch.stack([(self.w[i] * x).sum() for i in which]).sum()


def gradients(module: nn.Module) -> dict[str, Tensor | None]:
    return {
        name.removeprefix("module."): None if p.grad is None else p.grad.detach().clone()
        for name, p in module.named_parameters()
    }
