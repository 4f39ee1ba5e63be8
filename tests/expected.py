"""What tests of the wrapper compare with."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.models import gradients

both_views = pytest.mark.parametrize("views", [True, False], ids=["views", "own"])


def mean_of_ranks(model: nn.Module, losses: Any) -> dict[str, Tensor | None]:
    """Gradients of the mean of `losses(model, rank)` over two ranks, computed alone."""
    alone = copy.deepcopy(model)
    for p in alone.parameters():
        p.grad = None
    for rank in range(2):
        (losses(alone, rank) / 2).backward()
    return gradients(alone)


def assert_gradients(model: nn.Module, want: dict[str, Tensor | None], exact: bool = False) -> None:
    for name, gradient in gradients(model).items():
        expected = want[name]
        if expected is None:
            assert gradient is None, f"{name}: expected no gradient, found {gradient}"
        elif exact:
            assert torch.equal(gradient, expected), name
        else:
            torch.testing.assert_close(gradient, expected, msg=lambda m, n=name: f"{n}: {m}")
