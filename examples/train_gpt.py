"""Trains a small GPT, character by character, on the sources of Python's standard library.

    torchrun --nproc-per-node 2 examples/train_gpt.py --sync fused

Meant to be copied from: data without overlap between ranks, warm-up and cosine decay, accumulation,
clipping, mixed precision, held-out loss, checkpoints that resume exactly. `--sync` chooses what
keeps replicas in step: `torch` (DistributedDataParallel), `fused` (fusedddp.wrap), `manual`
(fusedddp.all_reduce_gradients) or `none`. On two ranks the first three give the same losses, bit
for bit. `--graph` replays the steps of `fused` as CUDA graphs (graphed.py, docs/cuda_graphs.md).
Runs on CPUs with gloo and, with a GPU for each rank, on GPUs with NCCL.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import logging
import math
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import checkpoint
import torch
import torch.distributed as dist
import tqdm
from gpt import GPT, GPTConfig
from gpt_settings import Settings, parse_arguments
from graphed import GraphedMicroSteps, load_optimizer, make_optimizer
from process_group import process_group
from text import CHARACTERS, Text, decode, encode, load_text
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

import fusedddp


class Trainer:
    """Model, optimizer, schedule, share of the data. ValueError: a batch that cannot be shared."""

    def __init__(
        self, settings: Settings, text: Text, sync: str, device: str = "cpu", graph: bool = False
    ) -> None:
        ranks = dist.get_world_size()
        if settings.batch % (ranks * settings.accumulate):
            raise ValueError(
                f"batch: expected a multiple of ranks ({ranks}) times accumulate "
                f"({settings.accumulate}), found {settings.batch}. Change --batch or --accumulate."
            )
        if settings.batch > len(text.train):
            raise ValueError(f"batch: the text has {len(text.train)} windows, not {settings.batch}")
        self.settings, self.text, self.sync, self.device = settings, text, sync, device
        self.position = 0  # steps done
        torch.manual_seed(settings.seed)  # the same weights on every rank
        names = ("context", "layers", "heads", "width", "dropout")
        sizes = {name: getattr(settings, name) for name in names}
        self.module = GPT(GPTConfig(vocabulary=len(CHARACTERS), **sizes)).to(device)
        torch.manual_seed(settings.seed + 1 + dist.get_rank())  # other dropout on every rank
        self.model = self.module
        if sync == "torch":
            self.model = DistributedDataParallel(self.module, gradient_as_bucket_view=True)
        elif sync == "fused":
            self.model = fusedddp.wrap(self.module)
        self.optimizer = make_optimizer(
            self.module.parameters(), settings.lr, settings.weight_decay, device
        )
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, settings.lr_factor)
        self.graphed: GraphedMicroSteps | None = None
        if graph:
            self.graphed = GraphedMicroSteps(self._micro_step, self.model, self.optimizer)
        self.local_backward_ms = math.nan if graph else self._measure_local_backward()

    def micro_batches(self, step: int) -> Iterator[tuple[Tensor, Tensor]]:
        """This rank's inputs and targets: one permutation an epoch, dealt out without overlap."""
        settings = self.settings
        epoch, place = divmod(step, len(self.text.train) // settings.batch)
        generator = torch.Generator().manual_seed(settings.seed * 1_000_003 + epoch)
        order = torch.randperm(len(self.text.train), generator=generator)
        picked = order[place * settings.batch :][: settings.batch]
        shares = picked.view(settings.accumulate, dist.get_world_size(), -1)
        for windows in shares[:, dist.get_rank()]:
            ids = self.text.train[windows].to(self.device)
            yield ids[:, :-1], ids[:, 1:]

    def _loss(self, model: torch.nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
        is_mixed = self.settings.dtype == "bf16"
        with torch.autocast(self.device.split(":")[0], torch.bfloat16, enabled=is_mixed):
            return model(inputs, targets)

    def _backward(self, inputs: Tensor, targets: Tensor, *, last: bool) -> tuple[float, float]:
        """Adds the gradient of one micro-batch; its loss, and the milliseconds of backward."""
        is_local = not last and isinstance(self.model, DistributedDataParallel)
        with self.model.no_sync() if is_local else contextlib.nullcontext():
            loss = self._loss(self.model, inputs, targets) / self.settings.accumulate
            value = loss.item()  # on a GPU this waits, so that only backward is timed
            began = time.perf_counter()
            loss.backward()
            if last and self.sync == "manual":
                fusedddp.all_reduce_gradients(self.module)
            if last and self.device != "cpu":
                torch.cuda.synchronize()
            return value, (time.perf_counter() - began) * 1e3

    def _measure_local_backward(self) -> float:
        """Median backward without synchronisation in ms; leaves no trace."""
        inputs = next(self.micro_batches(0))
        with torch.random.fork_rng(devices=[] if self.device == "cpu" else [self.device]):
            times = [self._backward(*inputs, last=False)[1] for _ in range(5)]
        self.optimizer.zero_grad()
        return statistics.median(times)

    def _update(self) -> None:
        torch.nn.utils.clip_grad_norm_(self.module.parameters(), self.settings.clip)
        self.optimizer.step()

    def _micro_step(self, inputs: Tensor, targets: Tensor, last: bool) -> Tensor:
        """What graphs hold: `_backward` without a look at values and clocks, and `_update`."""
        loss = self._loss(self.model, inputs, targets) / self.settings.accumulate
        loss.backward()
        if last:
            self._update()
        return loss

    def step(self) -> tuple[float, float, float]:
        """One optimizer step.

        Returns:
            This rank's mean loss, the milliseconds it took, and the share of them (0 to 1) by
            which synchronisation made the last backward longer; NaN with graphs.
        """
        began = time.perf_counter()
        self.optimizer.zero_grad()
        batches = list(self.micro_batches(self.position))
        loss, synchronising_ms = 0.0, math.nan
        if self.graphed is not None:
            loss = self.graphed.run(batches)
        else:
            for i, inputs in enumerate(batches, 1):
                value, backward_ms = self._backward(*inputs, last=i == len(batches))
                loss += value
            synchronising_ms = max(0.0, backward_ms - self.local_backward_ms)
            self._update()
        self.schedule.step()
        self.position += 1
        ms = (time.perf_counter() - began) * 1e3
        return loss, ms, synchronising_ms / ms

    @torch.no_grad()
    def held_out_loss(self, windows: int = 64) -> float:
        """Mean loss on held-out windows, each on one rank; the same value on every rank."""
        self.module.eval()  # not through torch's wrapper, whose forward may wait for other ranks
        mine = self.text.held_out[:windows][dist.get_rank() :: dist.get_world_size()]
        total = torch.zeros(2, dtype=torch.float64, device=self.device)
        for ids in mine.to(self.device).split(8):
            loss = self._loss(self.module, ids[:, :-1], ids[:, 1:])
            total += torch.tensor([loss.item() * len(ids), len(ids)], device=self.device)
        self.module.train()
        dist.all_reduce(total)
        return (total[0] / total[1]).item()

    def _identity(self) -> dict[str, Any]:
        """What must be the same when a training is resumed."""
        about = dataclasses.asdict(self.settings)
        return {**about, "ranks": dist.get_world_size(), "text": self.text.fingerprint}

    def save(self, path: Path) -> None:
        """Writes everything that later losses depend on. Collective."""
        generators: list[Any] = [None] * dist.get_world_size()
        mine = {"cpu": torch.get_rng_state()}
        if self.device != "cpu":
            mine["cuda"] = torch.cuda.get_rng_state()
        dist.all_gather_object(generators, mine)
        state = {
            "identity": self._identity(),
            "position": self.position,
            "model": self.module.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "schedule": self.schedule.state_dict(),
            "generators": generators,
        }
        checkpoint.save(path, state)

    def resume(self, path: Path) -> None:
        """Goes on where `save` was called. Collective.

        Raises:
            ValueError: on every rank: no whole checkpoint, or one of another training.
        """
        state = checkpoint.load(path)
        theirs, ours = state.get("identity", {}), self._identity()
        for name, value in ours.items():
            if theirs.get(name) != value:
                raise ValueError(
                    f"expected a checkpoint of this training at {path}, found one with {name} "
                    f"{theirs.get(name)!r} where this one has {value!r}. Use the settings that it "
                    "was written with, or start without --resume."
                )
        self.module.load_state_dict(state["model"])
        load_optimizer(self.optimizer, state["optimizer"], self.device)
        self.schedule.load_state_dict(state["schedule"])
        self.position = state["position"]
        generators = state["generators"][dist.get_rank()]
        torch.set_rng_state(generators["cpu"])
        if self.device != "cpu":
            torch.cuda.set_rng_state(generators["cuda"])

    def sample(self, start: str, count: int) -> str:
        generator = torch.Generator().manual_seed(self.settings.seed)
        drawn = self.module.eval().sample(encode(start)[None].to(self.device), count, generator)
        self.module.train()
        return decode(drawn[0])


def train(trainer: Trainer, path: Path | None = None, every: int = 50) -> list[float]:
    """Trains to the last step, saving to `path`; this rank's loss at every step from here on."""
    settings, losses = trainer.settings, []
    hidden = None if dist.get_rank() == 0 else True  # None: shown only on a terminal
    tokens = settings.batch * settings.context
    with tqdm.tqdm(total=settings.steps, initial=trainer.position, disable=hidden) as bar:
        bar.set_description(trainer.sync)
        while trainer.position < settings.steps:
            loss, ms, share = trainer.step()
            losses.append(loss)
            bar.set_postfix_str(
                f"loss {loss:.3f}, {tokens / ms * 1e3:.0f} tokens/s"
                + ("" if math.isnan(share) else f", sync {share:.0%}"),
                refresh=False,
            )
            bar.update()
            if path and (trainer.position % every == 0 or trainer.position == settings.steps):
                trainer.save(path)
    return losses


def run(args: argparse.Namespace, device: str) -> int:
    settings = Settings(**{f.name: getattr(args, f.name) for f in dataclasses.fields(Settings)})
    try:
        for file in filter(None, (args.checkpoint, args.history)):
            checkpoint.check_writable(file)
        text = load_text(args.text, settings.context)
        trainer = Trainer(settings, text, args.sync, device, args.graph)
        if args.resume:
            trainer.resume(args.checkpoint)
    except ValueError as error:  # what the user can mend; every rank has it
        print(f"rank {dist.get_rank()}: {error}", file=sys.stderr)
        return 2
    first = trainer.position
    losses = train(trainer, args.checkpoint, args.every)
    held_out = trainer.held_out_loss()
    everywhere: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, losses)
    if dist.get_rank() == 0:
        if args.history:
            history = {"sync": args.sync, "first_step": first, "losses": everywhere}
            args.history.write_text(json.dumps(history))
        print(f"held-out loss {held_out:.4f} nats a character after {settings.steps} steps")
        print(trainer.sample("def ", 160))
    return 0


def main() -> int:
    args = parse_arguments(__doc__.split("\n")[0])
    with process_group() as device:
        if args.graph and dist.get_rank() == 0:  # what the library says of captures
            logging.basicConfig(format="%(name)s: %(message)s")
            logging.getLogger("fusedddp").setLevel(logging.INFO)
        return run(args, device)  # in a function, so that the model is gone before the group


if __name__ == "__main__":
    sys.exit(main())
