"""What the benchmarks of training steps share: the step, taking turns, medians and taxes."""

from __future__ import annotations

import argparse
import csv
import datetime
import gc
import os
import platform
import random
import statistics
import subprocess
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

BASELINE = "no sync"
COLLECTIVE = "collective"

Step = Callable[[], object]
_Name = TypeVar("_Name", bound=Hashable)


def nothing(module: nn.Module) -> None:
    pass


class Variant(NamedTuple):
    """A way to synchronise gradients: how the model is wrapped, and what follows its backward."""

    wrap: Callable[[nn.Module], nn.Module]
    after_backward: Callable[[nn.Module], None] = nothing


class Trainer:
    """One variant and its copy of the model."""

    def __init__(self, variant: Variant, module: nn.Module) -> None:
        self.variant = variant
        self.model = variant.wrap(module)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-4)

    def step(self, inputs: Tensor) -> Tensor:
        self.optimizer.zero_grad()
        loss = self.model(inputs).square().mean()
        loss.backward()
        self.variant.after_backward(self.model)
        self.optimizer.step()
        return loss


def measure_times(
    names: Sequence[_Name],
    new_session: Callable[[], AbstractContextManager[Callable[[_Name], Step]]],
    timed: Callable[[Step, int], list[float]],
    *,
    sessions: int,
    turns: int,
    burst: int,
) -> dict[_Name, list[float]]:
    """Milliseconds of every measured step of each variant, the slowest rank's. Collective.

    Args:
        names: the variants.
        new_session: gives, for one session, what makes the step of a variant.
        timed: milliseconds of each of so many steps.
        sessions: how often everything is made anew.
        turns: turns of each variant in a session.
        burst: steps of a turn; the first is not counted.
    """
    times: dict[_Name, list[float]] = {name: [] for name in names}
    order = list(times)
    shuffle = random.Random(0).shuffle  # the same on all ranks
    for _ in range(sessions):
        gc.collect()
        with new_session() as make_step:
            steps: dict[_Name, Step] = {}
            shuffle(order)
            for name in order:
                steps[name] = make_step(name)
                timed(steps[name], 4)  # buckets are rebuilt, memory is faulted in
            for _ in range(turns):
                shuffle(order)
                for name in order:
                    times[name] += timed(steps[name], burst)[1:]
    everywhere: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, times)
    return {n: [max(ms) for ms in zip(*(t[n] for t in everywhere), strict=True)] for n in times}


def rows(times: dict[str, list[float]], steps: int) -> Iterator[dict[str, Any]]:
    """The times of each variant, as printed; `times` holds `steps` measured steps of each turn."""
    medians = {name: statistics.median(ms) for name, ms in times.items()}
    of_turns = {
        name: [statistics.median(ms[i : i + steps]) for i in range(0, len(ms), steps)]
        for name, ms in times.items()
    }
    base = of_turns[BASELINE]
    taxes = {
        name: statistics.median(a - b for a, b in zip(turns, base, strict=True))
        for name, turns in of_turns.items()
    }
    if COLLECTIVE in times:
        taxes[COLLECTIVE] = medians[COLLECTIVE]
    best_ddp = min((t for n, t in taxes.items() if n.startswith("ddp")), default=float("nan"))
    for name, ms in times.items():
        quantiles = statistics.quantiles(ms, n=5)
        # With one rank DDP's tax may be lost in the noise, and a ratio to that means nothing.
        ratio = taxes[name] / best_ddp if best_ddp > 0 else float("nan")
        yield {
            "variant": name,
            "median_ms": round(medians[name], 3),
            "p20_ms": round(quantiles[0], 3),
            "p80_ms": round(quantiles[3], 3),
            "tax_ms": round(taxes[name], 3) if name != BASELINE else 0.0,
            "ratio": round(ratio, 3) if name != BASELINE else 0.0,
        }


def add_arguments(
    parser: argparse.ArgumentParser, sessions: int | None, turns: int | None, burst: int | None
) -> None:
    """Adds the arguments that all of these benchmarks take, with these defaults."""
    parser.add_argument(
        "--sessions", type=int, default=sessions, help="how often models are built anew"
    )
    parser.add_argument(
        "--turns", type=int, default=turns, help="turns of each variant in a session"
    )
    parser.add_argument(
        "--burst", type=int, default=burst, help="steps of a turn; the first is not counted"
    )
    parser.add_argument("--csv", type=Path, help="write the rows here as well")


def check_arguments(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    if args.sessions < 1 or args.burst < 2 or args.turns < 2:
        parser.error("expected at least 1 session, 2 turns and bursts of 2 steps")
    if args.csv and not args.csv.parent.is_dir():
        parser.error(f"--csv: expected a file in a folder that exists, found {args.csv}")


def write_csv(path: Path, written: list[dict[str, Any]]) -> None:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(written[0]))
        writer.writeheader()
        writer.writerows(written)


def about(machine: str) -> dict[str, Any]:
    """Where and of what numbers are; once the process group is there."""
    return {
        "machine": machine,
        "world_size": dist.get_world_size(),
        "backend": dist.get_backend(),
        "torch": torch.__version__,
        "commit": commit(),
        "date": datetime.date.today().isoformat(),
    }


def commit() -> str:
    found = subprocess.run(
        ["git", "describe", "--always", "--dirty"],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parent,
    )
    return found.stdout.strip() or "unknown"


def processor() -> str:
    """The processor of this machine, and how many cores it has."""
    name = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    for line in info.read_text().splitlines() if info.exists() else []:
        if line.startswith("model name"):
            name = line.split(":", 1)[1].strip()
            break
    return f"{name}, {os.cpu_count()} cores"
