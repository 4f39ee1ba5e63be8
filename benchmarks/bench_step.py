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
import contextlib
import datetime
import functools
import gc
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from models import MODELS, Model
from steps import (
    BASELINE,
    COLLECTIVE,
    Step,
    Trainer,
    Variant,
    about,
    add_arguments,
    check_arguments,
    measure_times,
    processor,
    rows,
    write_csv,
)
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import fusedddp


def naive_all_reduce(module: nn.Module) -> None:
    """What tutorials show: one blocking all-reduce per gradient."""
    for param in module.parameters():
        dist.all_reduce(param.grad)
        param.grad /= dist.get_world_size()


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


def timed(step: Step, count: int) -> list[float]:
    """Milliseconds of each of `count` steps, begun together on all ranks."""
    times = []
    for _ in range(count):
        dist.barrier()
        began = time.perf_counter()
        step()
        times.append((time.perf_counter() - began) * 1e3)
    return times


@contextlib.contextmanager
def session(model: Model) -> Iterator[Callable[[str], Step]]:
    """Gives what makes the step of a variant, all on the same inputs."""
    inputs = model.batch()

    def make_step(name: str) -> Step:
        if name == COLLECTIVE:
            flat = torch.zeros(sum(p.numel() for p in model.build().parameters()))
            return functools.partial(dist.all_reduce, flat)
        return functools.partial(Trainer(VARIANTS[name], model.build()).step, inputs)

    yield make_step


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
    return tuple(round(min(peaks), 2) for peaks in zip(*found, strict=True))


def one_memory_peak(model: Model, name: str, steps: int = 5) -> tuple[float, float]:
    gc.collect()  # what earlier variants left must not be freed while this one is measured
    module, inputs = model.build(), model.batch()
    with torch.autograd.profiler.profile(profile_memory=True) as prof:
        trainer = Trainer(VARIANTS[name], module)
        for _ in range(steps - 1):
            trainer.step(inputs)
        with torch.autograd.profiler.record_function("last step"):
            trainer.step(inputs)
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=["small", "large"])
    parser.add_argument("--variants", nargs="+", choices=list(VARIANTS), default=list(VARIANTS))
    add_arguments(parser, sessions=6, turns=8, burst=4)
    parser.add_argument("--no-memory", action="store_true", help="leave out the memory columns")
    args = parser.parse_args()
    check_arguments(parser, args)

    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=datetime.timedelta(minutes=2))
    names = [BASELINE, *(n for n in args.variants if n != BASELINE)]
    where = about(processor())
    written = []
    for model_name in args.models:
        model = MODELS[model_name]
        times = measure_times(
            [*names, COLLECTIVE],
            functools.partial(session, model),
            timed,
            sessions=args.sessions,
            turns=args.turns,
            burst=args.burst,
        )
        peaks = {} if args.no_memory else {n: memory_peaks(model, n) for n in names}
        if dist.get_rank() == 0:
            print(
                f"\n{model.title}: " + ", ".join(f"{k} {v}" for k, v in where.items()), flush=True
            )
            print(
                f"{'variant':18} {'step ms':>8} {'p20':>8} {'p80':>8} {'tax ms':>8} {'ratio':>6} "
                f"{'peak MiB':>9} {'steady':>8}"
            )
            for row in rows(times, args.burst - 1):
                peak, steady = peaks.get(row["variant"], ("", ""))
                row |= {"peak_mib": peak, "peak_steady_mib": steady}
                print(
                    f"{row['variant']:18} {row['median_ms']:8.2f} {row['p20_ms']:8.2f} "
                    f"{row['p80_ms']:8.2f} "
                    f"{row['tax_ms']:8.2f} {row['ratio']:6.2f} {row['peak_mib']!s:>9} "
                    f"{row['peak_steady_mib']!s:>8}",
                    flush=True,
                )
                written.append({"model": model_name, **row, **where})
    if args.csv and dist.get_rank() == 0:
        write_csv(args.csv, written)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
