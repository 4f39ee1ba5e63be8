"""Trains the GPT by every way to synchronise, side by side, and draws their losses and step times.

    torchrun --nproc-per-node 2 examples/compare_gpt.py --plot demo.png

The ways take turns step by step, in an order that is shuffled anew each time, so that whatever else
the machine does falls on all alike. Exit status 1: on one or two ranks the losses of fusedddp were
not bitwise those of torch.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import sysconfig
from pathlib import Path
from typing import Any

import checkpoint
import torch
import torch.distributed as dist
import tqdm
from gpt_settings import SYNCS, Settings
from process_group import process_group
from text import Text, load_text
from train_gpt import Trainer

UNCOUNTED = 5  # first steps: buckets are laid out, memory is faulted in


class Way:
    """One trainer; the random numbers of its dropout are its own."""

    def __init__(self, sync: str, settings: Settings, text: Text, device: str) -> None:
        self.trainer = Trainer(settings, text, sync, device)
        self.devices = [] if device == "cpu" else [device]
        self.generators = self._generators()
        self.losses: list[float] = []
        self.step_ms: list[float] = []

    def _generators(self) -> tuple[torch.Tensor, list[torch.Tensor]]:
        return torch.get_rng_state(), [torch.cuda.get_rng_state(d) for d in self.devices]

    def step(self) -> None:
        torch.set_rng_state(self.generators[0])
        for device, state in zip(self.devices, self.generators[1], strict=True):
            torch.cuda.set_rng_state(state, device)
        dist.barrier()
        loss, ms, _ = self.trainer.step()
        self.generators = self._generators()
        self.losses.append(loss)
        self.step_ms.append(ms)


def compare(settings: Settings, text: Text, device: str) -> dict[str, dict[str, list[list[float]]]]:
    """Losses and milliseconds of each way and step, of all ranks. Collective."""
    ways = {sync: Way(sync, settings, text, device) for sync in SYNCS}
    order = list(SYNCS)
    shuffle = random.Random(0).shuffle  # the same on all ranks
    hidden = None if dist.get_rank() == 0 else True
    for _ in tqdm.tqdm(range(settings.steps), desc="all ways", unit="step", disable=hidden):
        shuffle(order)
        for sync in order:
            ways[sync].step()
    mine = {s: {"losses": way.losses, "step_ms": way.step_ms} for s, way in ways.items()}
    everywhere: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, mine)
    return {s: {k: [rank[s][k] for rank in everywhere] for k in mine[s]} for s in SYNCS}


def taxes(found: dict[str, dict[str, list[list[float]]]]) -> dict[str, tuple[float, float]]:
    """Median step on the slowest rank, and median of what it is above that of `none` in ms."""
    slowest = {
        sync: [max(ms) for ms in zip(*of["step_ms"], strict=True)][UNCOUNTED:]
        for sync, of in found.items()
    }
    return {
        sync: (
            statistics.median(ms),
            statistics.median(a - b for a, b in zip(ms, slowest["none"], strict=True)),
        )
        for sync, ms in slowest.items()
    }


def plot(file: Path, found: dict[str, dict[str, list[list[float]]]], about: str) -> None:
    import matplotlib

    matplotlib.use("agg")  # no display needed
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.2), constrained_layout=True)
    figure.suptitle(about, fontsize=10)
    styles = {"torch": ("-", 4.5), "manual": ("--", 2.5), "fused": (":", 1.5)}
    for sync, (line, width) in styles.items():
        losses = [statistics.mean(ranks) for ranks in zip(*found[sync]["losses"], strict=True)]
        left.plot(range(1, len(losses) + 1), losses, line, linewidth=width, label=sync)
    left.set(xlabel="step", ylabel="loss in nats a character", title="losses of the same steps")
    left.legend()
    times = taxes(found)
    names = ["none", "torch", "manual", "fused"]
    base = times["none"][0]
    right.bar(names, [base] * len(names), color="lightgrey", label="step without synchronisation")
    tax = [times[name][1] for name in names]
    bars = right.bar(names, tax, bottom=base, color="tab:red", label="synchronisation tax")
    right.bar_label(bars, [f"+{ms:.1f} ms" if ms else "" for ms in tax])
    right.set(ylabel="ms per step (median)", title="step times")
    right.margins(y=0.3)
    right.legend(loc="upper left")
    figure.savefig(file, dpi=120)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--text", type=Path, default=Path(sysconfig.get_path("stdlib")))
    parser.add_argument("--steps", type=int, default=Settings.steps)
    parser.add_argument("--plot", type=Path, help="draw losses and step times into this PNG")
    args = parser.parse_args()
    if args.steps <= UNCOUNTED + 1:
        parser.error(f"--steps: expected at least {UNCOUNTED + 2}, found {args.steps}")
    settings = Settings(steps=args.steps)
    if args.plot:
        args.plot.parent.mkdir(parents=True, exist_ok=True)
    with process_group() as device:
        if args.plot:
            checkpoint.check_writable(args.plot)
        found = compare(settings, load_text(args.text, settings.context), device)
        ranks = dist.get_world_size()
        losses = {sync: list(zip(*of["losses"], strict=True)) for sync, of in found.items()}
        equal = {
            sync: sum(map(tuple.__eq__, losses[sync], losses["torch"]))
            for sync in ("manual", "fused")
        }
        if dist.get_rank() == 0:
            about = f"{ranks} ranks, {dist.get_backend()} on {device.split(':')[0]}"
            about += f", torch {torch.__version__}"
            print(f"\nGPT, {args.steps} steps of {settings.batch} sequences, {about}\n")
            print(f"{'way':10} {'final loss':>10} {'step ms':>8} {'tax ms':>7}")
            for sync, (step, tax) in taxes(found).items():
                print(f"{sync:10} {statistics.mean(losses[sync][-1]):10.5f} {step:8.2f} {tax:7.2f}")
            for sync, count in equal.items():
                print(f"{sync} and torch step for step equal: {count} of {args.steps} losses")
            if args.plot:
                plot(args.plot, found, about)
                print(f"losses and step times are drawn in {args.plot}")
    return 0 if ranks > 2 or equal["fused"] == args.steps else 1


if __name__ == "__main__":
    sys.exit(main())
