"""Optimizers: those that step too early, and those that step as soon as gradients are reduced."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle


class StepWatch:
    """Calls ``check(optimizer)`` before any optimizer steps, from `start` to `stop`.

    Not always, because a global hook on optimizers costs their `torch.compile` a graph break.
    """

    def __init__(self, check: Callable[[Optimizer], None]) -> None:
        self._check = check
        self._handle: RemovableHandle | None = None

    def start(self) -> None:
        if self._handle is None:
            self._handle = register_optimizer_step_pre_hook(self._hook)

    def stop(self) -> None:
        if self._handle is not None:
            self._handle.remove()
            self._handle = None

    def _hook(self, optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        self._check(optimizer)


def params_of(optimizer: Optimizer) -> set[int]:
    """The ids of all parameters of an optimizer."""
    return {id(param) for group in optimizer.param_groups for param in group["params"]}


def take_over_in_backward(params: Iterable[Parameter]) -> list[Parameter]:
    """Keeps optimizers of ``_apply_optimizer_in_backward`` from stepping on local gradients.

    Returns:
        The parameters that have such optimizers; `step_in_backward` runs them.
    """
    optimized = [param for param in params if hasattr(param, "_in_backward_optimizers")]
    if optimized:
        # Loaded already, by whoever put the optimizers there.
        from torch.distributed.optim.apply_optimizer_in_backward import (
            param_to_optim_hook_handle_map,
        )

        for param in optimized:
            for handle in param_to_optim_hook_handle_map.get(param, ()):  # type: ignore[no-untyped-call]
                handle.remove()
    return optimized


def step_in_backward(params: Iterable[Tensor]) -> None:
    """Steps on reduced gradients, and drops them, as torch DDP does."""
    for param in params:
        if param.grad is None:
            continue
        with torch.no_grad():
            for optimizer in param._in_backward_optimizers:  # type: ignore[attr-defined]
                optimizer.step()
        param.grad = None
