"""A small convolutional net on real handwritten digits, with each way to synchronise gradients.

    torchrun --nproc-per-node 2 examples/train_digits.py [--sync all]

The digits come with scikit-learn; nothing is downloaded. The same net is trained from the same seed
on the same batches by `none` (each rank alone on its share of the data), `torch`
(DistributedDataParallel), `manual` (fusedddp.all_reduce_gradients) and `fusedddp` (fusedddp.wrap).

Exit status 1: on one or two ranks the losses of fusedddp were not bitwise those of torch, or with
default settings its test accuracy is below 97 %.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import sklearn.datasets
import torch
import torch.distributed as dist
import torch.nn.functional as F
import tqdm
from process_group import process_group
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import fusedddp

WAYS = ("none", "torch", "manual", "fusedddp")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
TEST_IMAGES = 360
REQUIRED_ACCURACY = 97.0
TURNS, BURST = 30, 6  # of each way, to measure its step time; and steps of a turn


class Data(NamedTuple):
    train_images: Tensor
    train_labels: Tensor
    test_images: Tensor
    test_labels: Tensor


class Result(NamedTuple):
    """What one training gave on this rank: exact losses, step by step, and the model's end."""

    losses: list[float]
    parameters: list[Tensor]
    accuracy: float  # on the test images, in percent
    step_ms: list[float]


def load_data(device: str = "cpu", dtype: torch.dtype = torch.float32) -> Data:
    """1,437 images to learn from and 360 to test on, always the same ones."""
    images, labels = map(torch.from_numpy, sklearn.datasets.load_digits(return_X_y=True))
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    images = (images[order].reshape(-1, 1, 8, 8) / 16).to(device, dtype)
    labels = labels[order].to(device)
    return Data(
        images[TEST_IMAGES:], labels[TEST_IMAGES:], images[:TEST_IMAGES], labels[:TEST_IMAGES]
    )


def build_model(seed: int) -> nn.Module:
    """The net; one seed gives the same weights on every rank."""
    torch.manual_seed(seed)
    first = [nn.Conv2d(1, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU()]
    second = [nn.Conv2d(16, 32, 3, padding=1, stride=2, bias=False), nn.BatchNorm2d(32), nn.ReLU()]
    return nn.Sequential(*first, *second, nn.Flatten(), nn.Linear(32 * 4 * 4, 10))


def steps_per_epoch(data: Data, batch: int) -> int:
    share = len(data.train_labels) // dist.get_world_size()
    if not 2 <= batch <= share:
        raise ValueError(f"batch: expected 2 to {share} images for each rank, found {batch}")
    return share // batch


def epoch_batches(data: Data, epoch: int, batch: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """This rank's batches: one permutation for all, dealt out to the ranks without overlap."""
    generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
    order = torch.randperm(len(data.train_labels), generator=generator)
    share = order[dist.get_rank() :: dist.get_world_size()].to(data.train_labels.device)
    for picked in share.split(batch)[: steps_per_epoch(data, batch)]:
        yield data.train_images[picked], data.train_labels[picked]


class Trainer:
    """A net, its optimizer, and one way to keep its replicas in step."""

    def __init__(self, sync: str, data: Data, seed: int, views: bool, total_steps: int) -> None:
        if sync not in WAYS:
            raise ValueError(f"sync: expected one of {', '.join(WAYS)}, found {sync!r}")
        self.sync = sync
        self.module = build_model(seed).to(data.train_images)
        self.model = self.module
        if sync == "torch":
            self.model = DistributedDataParallel(self.module, gradient_as_bucket_view=views)
        elif sync == "fusedddp":
            self.model = fusedddp.wrap(self.module, gradient_as_bucket_view=views)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer, lambda step: 0.5 + 0.5 * math.cos(math.pi * step / total_steps)
        )

    def step(self, images: Tensor, labels: Tensor) -> tuple[float, float]:
        """One training step: its loss, and the milliseconds that it took."""
        began = time.perf_counter()
        self.optimizer.zero_grad()
        loss = F.cross_entropy(self.model(images).float(), labels)
        loss.backward()
        if self.sync == "manual":
            fusedddp.all_reduce_gradients(self.model)
        self.optimizer.step()
        value = loss.item()  # on a GPU this waits for all of the step
        ms = (time.perf_counter() - began) * 1e3
        self.schedule.step()
        return value, ms

    @torch.no_grad()
    def accuracy(self, data: Data) -> float:
        # Not through torch's wrapper: its forward would wait for the other ranks.
        guesses = self.module.eval()(data.test_images).argmax(1)
        self.module.train()
        return 100 * (guesses == data.test_labels).double().mean().item()


def train(
    sync: str,
    data: Data,
    *,
    epochs: int = 10,
    steps: int | None = None,
    batch: int = 32,
    seed: int = 0,
    views: bool = True,
) -> Result:
    """Trains on all ranks for `epochs`, or for the first `steps` steps of them."""
    total = min(epochs * steps_per_epoch(data, batch), steps or sys.maxsize)
    trainer = Trainer(sync, data, seed, views, total)
    batches = (b for epoch in range(epochs) for b in epoch_batches(data, epoch, batch, seed))
    losses, step_ms = [], []
    hidden = None if dist.get_rank() == 0 else True  # None: shown only on a terminal
    with tqdm.tqdm(total=total, desc=f"{sync:8}", unit="step", disable=hidden) as bar:
        for _, inputs in zip(range(total), batches, strict=False):
            loss, ms = trainer.step(*inputs)
            losses.append(loss)
            step_ms.append(ms)
            bar.set_postfix(loss=f"{loss:.4f}", refresh=False)
            bar.update()
    parameters = [p.detach().clone() for p in trainer.module.parameters()]
    return Result(losses, parameters, trainer.accuracy(data), step_ms)


def time_steps(ways: list[str], data: Data, batch: int, seed: int, views: bool) -> dict[str, float]:
    """The median step of each way in ms, on the slowest rank. The ways take turns in rotation."""
    trainers = {way: Trainer(way, data, seed, views, total_steps=TURNS * BURST) for way in ways}
    inputs = next(epoch_batches(data, 0, batch, seed))
    times: dict[str, list[float]] = {way: [] for way in ways}
    for turn in range(TURNS + 1):
        first = turn % len(ways)
        for way in ways[first:] + ways[:first]:
            for step in range(BURST):
                dist.barrier()
                _, ms = trainers[way].step(*inputs)
                if turn > 0 and step > 0:  # a first turn warms up, a first step refills caches
                    times[way].append(ms)
    everywhere = gather(times)
    return {
        way: statistics.median(map(max, zip(*(rank[way] for rank in everywhere), strict=True)))
        for way in ways
    }


def gather(value: Any) -> list[Any]:
    """What every rank holds, in rank order."""
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def compare(args: argparse.Namespace, device: str, must_learn: bool) -> bool:
    """Trains by each way asked for and prints what came out; True if it is as it should be."""
    ways = list(WAYS) if args.sync == "all" else [args.sync]
    data = load_data(device, DTYPES[args.dtype])
    settings = {"batch": args.batch, "seed": args.seed, "views": args.views}
    results = {w: train(w, data, epochs=args.epochs, steps=args.steps, **settings) for w in ways}
    step_ms = time_steps(ways, data, **settings)
    everywhere = gather({w: (r.losses, r.accuracy) for w, r in results.items()})
    steps = len(results[ways[0]].losses)
    last_epoch = min(steps, steps_per_epoch(data, args.batch))
    lines = [
        f"{len(everywhere)} ranks, {dist.get_backend()} on {data.train_images.device.type}, "
        f"{args.dtype}, {steps} steps of {args.batch} images per rank, torch {torch.__version__}\n",
        f"{'way':10} {'final loss':>10} {'accuracy':>10} {'step ms':>8} {'tax ms':>7}",
    ]
    for way in ways:
        loss = statistics.mean(x for rank in everywhere for x in rank[way][0][-last_epoch:])
        row = f"{way:10} {loss:10.5f} {everywhere[0][way][1]:8.2f} % {step_ms[way]:8.2f}"
        lines.append(row + (f" {step_ms[way] - step_ms['none']:7.2f}" if "none" in ways else ""))
    lines += [
        "\nfinal loss: mean of the last epoch over ranks; accuracy: on test images, rank 0;",
        f"step: median on the slowest rank, {TURNS} turns of {BURST - 1} steps, ways in rotation;",
        "tax: step minus the step of none.\n",
    ]
    right = not must_learn or everywhere[0].get("fusedddp", (0, 100))[1] >= REQUIRED_ACCURACY
    for way in ("manual", "fusedddp"):
        if {way, "torch"} <= set(ways):
            equal = min(
                sum(map(float.__eq__, rank[way][0], rank["torch"][0])) for rank in everywhere
            )
            rounding = "no (rounding differs with more than two ranks)"
            answer = "yes" if equal == steps else rounding if len(everywhere) > 2 else "NO"
            lines.append(
                f"{way} and torch step for step equal: {answer}, {equal} of {steps} losses"
            )
            right &= way == "manual" or equal == steps or len(everywhere) > 2
    if dist.get_rank() == 0:
        print("\n".join(lines), flush=True)
    return right


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--sync", choices=[*WAYS, "all"], default="all")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--steps", type=int, help="stop after this many steps")
    parser.add_argument("--batch", type=int, default=32, help="images per rank and step")
    parser.add_argument("--seed", type=int, default=0, help="of weights and order of images")
    parser.add_argument("--dtype", choices=list(DTYPES), default="fp32")
    parser.add_argument("--no-views", dest="views", action="store_false", help="no bucket views")
    args = parser.parse_args()
    if args.epochs < 1 or (args.steps is not None and args.steps < 1):
        parser.error("--epochs and --steps: expected at least 1")
    learning = ("epochs", "steps", "batch", "dtype")
    must_learn = all(getattr(args, name) == parser.get_default(name) for name in learning)

    torch.backends.cudnn.deterministic = True  # losses are compared bit for bit
    with process_group() as device:
        return 0 if compare(args, device, must_learn) else 1


if __name__ == "__main__":
    sys.exit(main())
