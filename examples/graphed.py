"""What `train_gpt.py --graph` needs: an optimizer that graphs can hold, and graphed micro-steps."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

import fusedddp


def make_optimizer(
    params: Iterable[Parameter], lr: float, weight_decay: float, device: str
) -> torch.optim.Optimizer:
    """AdamW in the form that a graph can hold; eager steps use it too, to train alike.

    Its learning rate is a tensor. The scheduler writes into it, and a graph reads it there.
    """
    return torch.optim.AdamW(
        params,
        lr=torch.tensor(lr, device=device),
        weight_decay=weight_decay,
        fused=True,
        capturable=True,
    )


def load_optimizer(optimizer: torch.optim.Optimizer, state: dict[str, Any], device: str) -> None:
    """Loads `state` from a checkpoint on the CPU, where torch would leave the learning rate."""
    optimizer.load_state_dict(state)
    for group in optimizer.param_groups:
        group["lr"] = torch.as_tensor(group["lr"], device=device)


class GraphedMicroSteps:
    """Runs the micro-steps of one optimizer step after the other as graphs.

    There are three graphs with three or more micro-batches: the first one, which finds no
    gradients, those that add to them, and the last one, which reduces and updates.

    Args:
        micro_step: called with the tensors of a micro-batch and whether it is the last one; adds
            its gradient, and with the last one updates the parameters. Returns the loss.
        model: the wrapped model.
        optimizer: its optimizer.
    """

    def __init__(
        self,
        micro_step: Callable[..., Tensor],
        model: fusedddp.FusedDDP,
        optimizer: torch.optim.Optimizer,
    ) -> None:
        self._micro_step, self._model, self._optimizer = micro_step, model, optimizer
        self._graphed: Callable[..., Tensor] | None = None

    def run(self, batches: Sequence[tuple[Tensor, ...]]) -> float:
        """Trains on the micro-batches of one optimizer step; gradients are None before.

        Returns:
            The sum of their losses.
        """
        losses = []
        for batch in batches:
            last = batch is batches[-1]
            if last and self._graphed is None:
                # Here, since the last micro-step uses all that the others use, and the optimizer.
                self._graphed = fusedddp.make_graphed_step(
                    self._micro_step,
                    (*batch, last),
                    model=self._model,
                    optimizer=self._optimizer,
                )
            step = self._graphed or self._micro_step
            with contextlib.nullcontext() if last else self._model.no_sync():
                losses.append(step(*batch, last).detach())
        return sum(loss.item() for loss in losses)  # only here the host waits
