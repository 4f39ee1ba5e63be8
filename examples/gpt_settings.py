"""What decides a training of the GPT, and the command line of `train_gpt.py`."""

from __future__ import annotations

import argparse
import dataclasses
import math
import sysconfig
from dataclasses import dataclass
from pathlib import Path

SYNCS = ("torch", "fused", "manual", "none")


@dataclass(frozen=True)
class Settings:
    """What decides the losses. A checkpoint is resumed only with the same ones."""

    steps: int = 200
    batch: int = 16  # sequences of an optimizer step, over all ranks and micro-batches
    accumulate: int = 2  # micro-batches of a step; only the last one is synchronised
    lr: float = 3e-3
    warmup: int = 20  # steps in which the learning rate rises
    weight_decay: float = 0.1
    clip: float = 1.0  # largest norm of the gradient
    dtype: str = "fp32"  # or bf16: autocast, parameters and gradients stay fp32
    seed: int = 0
    context: int = 64
    layers: int = 2
    heads: int = 4
    width: int = 64
    dropout: float = 0.1

    def lr_factor(self, step: int) -> float:
        if step < self.warmup:
            return (step + 1) / self.warmup
        share = (step - self.warmup) / max(1, self.steps - self.warmup)
        return 0.5 + 0.5 * math.cos(math.pi * share)


def parse_arguments(description: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--sync", choices=SYNCS, default="fused")
    parser.add_argument("--text", type=Path, default=Path(sysconfig.get_path("stdlib")))
    parser.add_argument("--checkpoint", type=Path, help="write checkpoints to this file")
    parser.add_argument("--every", type=int, default=50, help="steps between checkpoints")
    parser.add_argument("--resume", action="store_true", help="go on from --checkpoint")
    parser.add_argument("--graph", action="store_true", help="replay steps as CUDA graphs")
    parser.add_argument("--history", type=Path, help="write losses of this run as JSON")
    for field in dataclasses.fields(Settings):
        choices = ("fp32", "bf16") if field.name == "dtype" else None
        settings = {"type": type(field.default), "default": field.default, "choices": choices}
        parser.add_argument("--" + field.name.replace("_", "-"), **settings)
    args = parser.parse_args()
    for name in "steps batch accumulate warmup every context layers heads width".split():
        if getattr(args, name) < 1:
            parser.error(f"--{name}: expected at least 1, found {getattr(args, name)}")
    if not (args.lr > 0 and args.clip > 0 and 0 <= args.dropout < 1 and abs(args.seed) < 2**31):
        parser.error("expected --lr and --clip above 0, --dropout from 0 to 1, --seed below 2**31")
    if args.resume and args.checkpoint is None:
        parser.error("--resume: expected --checkpoint with the file to go on from")
    if args.graph and args.sync != "fused":
        parser.error(f"--graph: expected --sync fused, found {args.sync}")
    return args
