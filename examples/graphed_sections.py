"""Captures the parts of a model that a CUDA graph can hold, and leaves the rest of the step eager.

    torchrun --nproc-per-node 2 examples/graphed_sections.py

Between the two sections of this model the host looks at values, so the step as a whole cannot be
captured. Each section can, by `torch.cuda.make_graphed_callables`, before the model is wrapped.
Gradients come out of the graphed backwards as out of any others: the wrapper's hooks on the
parameters fire, and buckets leave while the backward goes on. Without a GPU the sections run as
they are.
"""

from __future__ import annotations

import argparse
import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from process_group import process_group
from torch import Tensor, nn

import fusedddp

BATCH, WIDTH, CLASSES = 32, 64, 4


def make_section() -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)
    )


class Net(nn.Module):
    """Two sections with something between them that no graph can hold."""

    def __init__(self, first: nn.Module, second: nn.Module) -> None:
        super().__init__()
        self.first, self.second = first, second
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        if hidden.abs().max() > 100:  # the host reads a value, and another branch may follow
            hidden = hidden.clamp(-100, 100)
        return self.head(self.second(hidden))


def graph_sections(first: nn.Module, second: nn.Module, device: str) -> None:
    """Makes both sections run as graphs, forward and backward, from now on.

    Samples look like the real inputs, `requires_grad` included: `x` needs no gradient, what the
    second section gets from the first one does.
    """
    x = torch.randn(BATCH, WIDTH, device=device)
    hidden = torch.randn(BATCH, WIDTH, device=device, requires_grad=True)
    torch.cuda.make_graphed_callables((first, second), ((x,), (hidden,)))


def train(steps: int, device: str) -> list[float]:
    """Learns in which quadrant the first two inputs lie; returns this rank's losses."""
    torch.manual_seed(0)  # the same weights on every rank
    first, second = make_section().to(device), make_section().to(device)
    if device == "cpu":
        if dist.get_rank() == 0:
            print("no GPU for each rank: the sections run as they are, without graphs")
    else:
        graph_sections(first, second, device)
    model = fusedddp.wrap(Net(first, second).to(device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    generator = torch.Generator().manual_seed(1 + dist.get_rank())  # other data on every rank
    losses = []
    for _ in range(steps):
        x = torch.randn(BATCH, WIDTH, generator=generator).to(device)
        targets = 2 * (x[:, 0] > 0).long() + (x[:, 1] > 0).long()
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), targets)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=200)
    args = parser.parse_args()
    if args.steps < 1:
        parser.error(f"--steps: expected at least 1, found {args.steps}")
    with process_group() as device:
        losses = train(args.steps, device)
        if dist.get_rank() == 0:
            print(f"loss {losses[0]:.3f} in the first of {args.steps} steps, {losses[-1]:.3f} last")
    return 0


if __name__ == "__main__":
    sys.exit(main())
