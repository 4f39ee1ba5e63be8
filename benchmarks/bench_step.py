"""Training-step time and memory of every way to synchronise gradients, in one interleaved run.

    torchrun --nproc-per-node 2 benchmarks/bench_step.py [--models small gpt] [--sessions 6]

Every variant trains its own copy of the model. They take turns of a few steps each, in an order
that is shuffled anew each time, so that noise on the machine and what the variant before left in
caches and allocator fall on all alike. Where in memory a model lies changes its step by more than
some variants differ, so there are several sessions, each with new models. Printed per variant:

- step: median, 20th and 80th percentile of the step time in ms (slowest rank; forward, backward,
  SGD step), of all steps of a turn but its first, which refills the caches;
- tax: the step minus the step without synchronisation, each the median of its turn; the median
  over turns, so that drifts of the machine cancel;
- ratio: tax over the tax of the best of torch DDP's settings;
- peak: the most bytes allocated at once for gradients and buckets and whatever comes with them,
  beyond parameters and optimizer, from wrapping to the fifth step / in the fifth step alone (MiB).

`collective` is one all-reduce of a flat buffer with the same bytes and nothing else: the limit.
"""

from __future__ import annotations

import argparse
import csv
import datetime
import functools
import gc
import os
import platform
import random
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from models import MODELS, Model
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import fusedddp

BASELINE = "no sync"
COLLECTIVE = "collective"


def naive_all_reduce(module: nn.Module) -> None:
    """What tutorials show: one blocking all-reduce per gradient."""
    for param in module.parameters():
        dist.all_reduce(param.grad)
        param.grad /= dist.get_world_size()


def nothing(module: nn.Module) -> None:
    pass


class Variant(NamedTuple):
    wrap: Callable[[nn.Module], nn.Module]
    after_backward: Callable[[nn.Module], None] = nothing


VARIANTS = {
    BASELINE: Variant(lambda m: m),
    "ddp": Variant(DistributedDataParallel),
    "ddp views": Variant(lambda m: DistributedDataParallel(m, gradient_as_bucket_view=True)),
    "ddp batched views": Variant(
        lambda m: DistributedDataParallel(m, gradient_as_bucket_view=True, batched_grad_copy=True)
    ),
    "ddp static graph": Variant(lambda m: DistributedDataParallel(m, static_graph=True)),
    "naive": Variant(lambda m: m, naive_all_reduce),
    "manual": Variant(lambda m: m, fusedddp.all_reduce_gradients),
    "fusedddp": Variant(fusedddp.wrap),
    "fusedddp no views": Variant(lambda m: fusedddp.wrap(m, gradient_as_bucket_view=False)),
}


class Trainer:
    """One variant and its copy of the model."""

    def __init__(self, variant: Variant, module: nn.Module, inputs: Tensor) -> None:
        self.variant = variant
        self.inputs = inputs
        self.model = variant.wrap(module)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-4)

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.model(self.inputs).square().mean().backward()
        self.variant.after_backward(self.model)
        self.optimizer.step()


def timed(step: Callable[[], None], count: int) -> list[float]:
    """Milliseconds of each of `count` steps, begun together on all ranks."""
    times = []
    for _ in range(count):
        dist.barrier()
        began = time.perf_counter()
        step()
        times.append((time.perf_counter() - began) * 1e3)
    return times


def measure_times(
    model: Model, names: list[str], sessions: int, turns: int, burst: int
) -> dict[str, list[float]]:
    """Milliseconds of every measured step of each variant, the slowest rank's."""
    times: dict[str, list[float]] = {name: [] for name in [*names, COLLECTIVE]}
    order = list(times)
    shuffle = random.Random(0).shuffle  # the same on all ranks
    for _ in range(sessions):
        gc.collect()
        inputs = model.batch()
        steps: dict[str, Callable[[], None]] = {}
        shuffle(order)
        for name in order:
            if name == COLLECTIVE:
                flat = torch.zeros(sum(p.numel() for p in model.build().parameters()))
                steps[name] = functools.partial(dist.all_reduce, flat)
            else:
                steps[name] = Trainer(VARIANTS[name], model.build(), inputs).step
            timed(steps[name], 4)  # buckets are rebuilt, memory is faulted in
        for _ in range(turns):
            shuffle(order)
            for name in order:
                times[name] += timed(steps[name], burst)[1:]
    everywhere: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, times)
    return {n: [max(ms) for ms in zip(*(t[n] for t in everywhere), strict=True)] for n in times}


def memory_peaks(model: Model, name: str, repeats: int = 3) -> tuple[float, float]:
    """Peak of allocated MiB over five steps from wrapping on, and in the last of them alone.

    The profiler sees what this thread allocates and releases. A buffer that a thread of the backend
    is the last to release looks as if it were never released, so the least of all repeats and ranks
    is taken.
    """
    mine = [one_memory_peak(model, name) for _ in range(repeats)]
    everywhere: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, mine)
    found = [peaks for of_rank in everywhere for peaks in of_rank]
    return min(whole for whole, _ in found), min(steady for _, steady in found)


def one_memory_peak(model: Model, name: str, steps: int = 5) -> tuple[float, float]:
    gc.collect()  # what earlier variants left must not be freed while this one is measured
    module, inputs = model.build(), model.batch()
    with torch.autograd.profiler.profile(profile_memory=True) as prof:
        trainer = Trainer(VARIANTS[name], module, inputs)
        for _ in range(steps - 1):
            trainer.step()
        with torch.autograd.profiler.record_function("last step"):
            trainer.step()
    events = sorted(prof.kineto_results.events(), key=lambda e: e.start_ns())
    last_began = next(e.start_ns() for e in events if e.name() == "last step")
    live = 0
    peaks = [0, 0]
    for event in events:
        if event.name() == "[memory]":
            live += event.nbytes()
            for i, counts in enumerate((True, event.start_ns() >= last_began)):
                peaks[i] = max(peaks[i], live) if counts else peaks[i]
    return peaks[0] / 2**20, peaks[1] / 2**20


def rows(
    times: dict[str, list[float]], peaks: dict[str, tuple[float, float]], steps: int
) -> Iterator[dict[str, Any]]:
    """The printed rows; `times` holds `steps` measured steps of each turn."""
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
    taxes[COLLECTIVE] = medians[COLLECTIVE]
    best_ddp = min((t for n, t in taxes.items() if n.startswith("ddp")), default=float("nan"))
    for name, ms in times.items():
        quantiles = statistics.quantiles(ms, n=5)
        yield {
            "variant": name,
            "median_ms": round(medians[name], 3),
            "p20_ms": round(quantiles[0], 3),
            "p80_ms": round(quantiles[3], 3),
            "tax_ms": round(taxes[name], 3) if name != BASELINE else 0.0,
            "ratio": round(taxes[name] / best_ddp, 3) if name != BASELINE else 0.0,
            "peak_mib": round(peaks[name][0], 2) if name in peaks else "",
            "peak_steady_mib": round(peaks[name][1], 2) if name in peaks else "",
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
    for line in (
        Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    ):
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=["small", "large"])
    parser.add_argument("--variants", nargs="+", choices=list(VARIANTS), default=list(VARIANTS))
    parser.add_argument("--sessions", type=int, default=6, help="how often models are built anew")
    parser.add_argument("--turns", type=int, default=8, help="turns of each variant in a session")
    parser.add_argument(
        "--burst", type=int, default=4, help="steps of a turn; the first is not counted"
    )
    parser.add_argument("--no-memory", action="store_true", help="leave out the memory columns")
    parser.add_argument("--csv", type=Path, help="write the rows here as well")
    args = parser.parse_args()
    if args.sessions < 1 or args.burst < 2 or args.turns < 2:
        parser.error("expected at least 1 session, 2 turns and bursts of 2 steps")

    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=datetime.timedelta(minutes=2))
    names = [BASELINE, *(n for n in args.variants if n != BASELINE)]
    about = {
        "machine": f"{processor()}, {os.cpu_count()} cores",
        "world_size": dist.get_world_size(),
        "backend": dist.get_backend(),
        "torch": torch.__version__,
        "commit": commit(),
        "date": datetime.date.today().isoformat(),
    }
    written = []
    for model_name in args.models:
        model = MODELS[model_name]
        times = measure_times(model, names, args.sessions, args.turns, args.burst)
        peaks = {} if args.no_memory else {n: memory_peaks(model, n) for n in names}
        if dist.get_rank() == 0:
            print(
                f"\n{model.title}: " + ", ".join(f"{k} {v}" for k, v in about.items()), flush=True
            )
            print(
                f"{'variant':18} {'step ms':>8} {'p20':>8} {'p80':>8} {'tax ms':>8} {'ratio':>6} "
                f"{'peak MiB':>9} {'steady':>8}"
            )
            for row in rows(times, peaks, args.burst - 1):
                print(
                    f"{row['variant']:18} {row['median_ms']:8.2f} {row['p20_ms']:8.2f} "
                    f"{row['p80_ms']:8.2f} "
                    f"{row['tax_ms']:8.2f} {row['ratio']:6.2f} {row['peak_mib']!s:>9} "
                    f"{row['peak_steady_mib']!s:>8}",
                    flush=True,
                )
                written.append({"model": model_name, **row, **about})
    if args.csv and dist.get_rank() == 0:
        with args.csv.open("w", newline="") as file:
            writer = csv.DictWriter(file, list(written[0]))
            writer.writeheader()
            writer.writerows(written)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
