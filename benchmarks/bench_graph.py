"""Step time of eager and captured training steps, in one interleaved run.

    python benchmarks/bench_graph.py --csv benchmarks/data/graph_gpu.csv
    torchrun --nproc-per-node 8 benchmarks/bench_graph.py     # a GPU for each rank

Each variant is trained eagerly and as a CUDA graph of its whole step (forward, backward with its
collectives, SGD step):

- no sync: the bare model. Captured by hand, as torch's notes on CUDA graphs show it.
- ddp, ddp views: torch DDP, eager as usual. Captured as the same notes prescribe: built on a side
  stream, 11 steps of warm-up there, TORCH_NCCL_ASYNC_ERROR_HANDLING=0. (A process has one such
  setting, so it holds for all variants.)
- fusedddp: `fusedddp.wrap`, and `fusedddp.make_graphed_step`.

Captured steps copy their inputs to where the graph reads them, and begin with what the library or
the user does on the host for each replay. Variants and modes take turns of a few steps each, in an
order that is shuffled anew each time, over several sessions with new models, as in bench_step.py.
The steps of a turn are launched without waiting, with a CUDA event between them: what is measured
is from the end of one step to the end of the next on the GPU, the first step of a turn left out.

Printed for each variant and mode: median, 20th and 80th percentile of the step in ms (slowest
rank); tax, the step minus the step without synchronisation in the same mode; ratio, the tax over
that of the best of torch DDP's settings in that mode. A variant that fails is left out and named,
and the exit status is 1.

Without a GPU only eager steps run, timed by the clock.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import functools
import gc
import itertools
import os
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from models import MODELS, Model
from steps import (
    BASELINE,
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
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import fusedddp

FUSED = "fusedddp"
EAGER, CAPTURED = MODES = ("eager", "captured")
VARIANTS = {
    BASELINE: Variant(lambda m: m),
    "ddp": Variant(DistributedDataParallel),
    "ddp views": Variant(lambda m: DistributedDataParallel(m, gradient_as_bucket_view=True)),
    FUSED: Variant(fusedddp.wrap),
}
# torch's notes: "DDP-enabled warmup must run at least 11 iterations", its logger samples ten.
NUM_WARMUPS = 11

Way = tuple[str, str]  # variant and mode


class TorchGraph:
    """A step captured with torch alone, as torch's notes on CUDA graphs with DDP prescribe."""

    def __init__(self, variant: Variant, module: nn.Module, inputs: Tensor) -> None:
        self._inputs = inputs.clone()
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            self._trainer = Trainer(variant, module)
            for _ in range(NUM_WARMUPS):
                self._trainer.step(self._inputs)
        torch.cuda.current_stream().wait_stream(side)
        gc.collect()  # an event of an earlier model that is freed in a capture ends it
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self._loss = self._trainer.step(self._inputs)

    def __call__(self, inputs: Tensor) -> Tensor:
        self._inputs.copy_(inputs)
        self._graph.replay()
        return self._loss

    def close(self) -> None:
        self._graph.reset()


def make_step(
    model: Model, device: torch.device, inputs: Tensor, closing: contextlib.ExitStack, way: Way
) -> Step:
    """The step of a variant in a mode; what it holds is let go by `closing`."""
    name, mode = way
    module = model.build().to(device)
    if mode == EAGER:
        return functools.partial(Trainer(VARIANTS[name], module).step, inputs)
    if name != FUSED:
        graph = TorchGraph(VARIANTS[name], module, inputs)
        closing.callback(graph.close)
        return functools.partial(graph, inputs)
    trainer = Trainer(VARIANTS[name], module)
    step = fusedddp.make_graphed_step(
        trainer.step, (inputs,), model=trainer.model, optimizer=trainer.optimizer, enabled=True
    )
    closing.callback(step.close)
    return functools.partial(step, inputs)


@contextlib.contextmanager
def session(model: Model, device: torch.device) -> Iterator[Callable[[Way], Step]]:
    """Gives what makes the step of a variant in a mode, all on the same inputs."""
    # A graph must be gone before the process group, and not live on in the next session.
    with contextlib.ExitStack() as closing:
        inputs = model.batch().to(device)
        yield functools.partial(make_step, model, device, inputs, closing)
        wait(device)


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def timed_on_cpu(step: Step, count: int) -> list[float]:
    """Milliseconds of each of `count` steps, begun together on all ranks."""
    dist.barrier()
    times = [time.perf_counter()]
    for _ in range(count):
        step()
        times.append(time.perf_counter())
    return [1e3 * (end - begin) for begin, end in itertools.pairwise(times)]


def timed_on_gpu(step: Step, count: int) -> list[float]:
    """Milliseconds on the GPU from step to step, launched as they are in training."""
    torch.cuda.synchronize()
    dist.barrier()
    torch.cuda.synchronize()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
    events[0].record()
    for event in events[1:]:
        step()
        event.record()
    torch.cuda.synchronize()
    return [begin.elapsed_time(end) for begin, end in itertools.pairwise(events)]


def find_failure(model: Model, device: torch.device, way: Way) -> str:
    """Why a variant cannot be trained on some rank, or ''. Collective."""
    found = ""
    try:
        with session(model, device) as make:
            step = make(way)
            for _ in range(3):
                step()
            wait(device)
    except Exception as error:
        found = f"rank {dist.get_rank()}: {type(error).__name__}: {error}"
    everywhere: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, found)
    return "; ".join(filter(None, everywhere))


def print_rows(title: str, found: list[dict[str, Any]]) -> None:
    print(f"\n{title}")
    print(
        f"{'variant':10} {'mode':9} {'step ms':>8} {'p20':>8} {'p80':>8} {'tax ms':>8} {'ratio':>6}"
    )
    for row in found:
        print(
            f"{row['variant']:10} {row['mode']:9} {row['median_ms']:8.3f} {row['p20_ms']:8.3f} "
            f"{row['p80_ms']:8.3f} {row['tax_ms']:8.3f} {row['ratio']:6.2f}",
            flush=True,
        )


def parse_arguments() -> argparse.Namespace:
    on_gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=["small", "gpt"])
    parser.add_argument("--variants", nargs="+", choices=list(VARIANTS), default=list(VARIANTS))
    parser.add_argument(
        "--modes", nargs="+", choices=MODES, default=list(MODES) if on_gpu else [EAGER]
    )
    if on_gpu:
        add_arguments(parser, sessions=4, turns=8, burst=11)
    else:
        add_arguments(parser, sessions=1, turns=3, burst=3)
    args = parser.parse_args()
    check_arguments(parser, args)
    if CAPTURED in args.modes and not on_gpu:
        parser.error("--modes captured: expected a GPU, found none. Leave it out for eager steps.")
    local_world = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if on_gpu and local_world > torch.cuda.device_count():
        parser.error(
            f"expected a GPU for each rank, found {local_world} ranks here and "
            f"{torch.cuda.device_count()} GPUs. Start fewer ranks."
        )
    return args


def start() -> torch.device:
    """Makes the process group; without a launcher one of this process alone."""
    keywords: dict[str, Any] = {"timeout": datetime.timedelta(minutes=2)}
    if "RANK" not in os.environ:
        keywords |= {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    if not torch.cuda.is_available():
        torch.set_num_threads(1)
        dist.init_process_group("gloo", **keywords)
        return torch.device("cpu")
    os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "0"  # torch's notes: before the group is made
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device, **keywords)
    return device


def main() -> None:
    args = parse_arguments()
    device = start()
    is_first = dist.get_rank() == 0
    on_gpu = device.type == "cuda"
    where = about(torch.cuda.get_device_name(device) if on_gpu else processor())
    if is_first:
        print(", ".join(f"{key} {value}" for key, value in where.items()))
        if not on_gpu:
            print("No GPU here: eager steps only. Captured ones need a GPU.")
        if dist.get_world_size() == 1:
            print(
                "One rank: nothing has to be communicated, and NCCL may move nothing. The tax is "
                "that of hooks, copies and launches."
            )
    names = [BASELINE, *(n for n in args.variants if n != BASELINE)]
    ways = [(name, mode) for mode in MODES if mode in args.modes for name in dict.fromkeys(names)]
    written: list[dict[str, Any]] = []
    failures: list[str] = []
    for model_name in args.models:
        model = MODELS[model_name]
        broken = {way: find_failure(model, device, way) for way in ways}
        failures += [f"{model_name}, {' '.join(w)}: {why}" for w, why in broken.items() if why]
        # A tax needs the step without synchronisation of its mode.
        working = [w for w in ways if not broken[w] and not broken[BASELINE, w[1]]]
        times = measure_times(
            working,
            functools.partial(session, model, device),
            timed_on_gpu if on_gpu else timed_on_cpu,
            sessions=args.sessions,
            turns=args.turns,
            burst=args.burst,
        )
        found = []
        for mode in dict.fromkeys(mode for _, mode in working):
            of_mode = {name: times[name, mode] for name, m in working if m == mode}
            found += [{"mode": mode, **row} for row in rows(of_mode, args.burst - 1)]
        written += [{"model": model_name, **row, **where} for row in found]
        if is_first:
            print_rows(model.title, found)
            if args.csv and written:  # after each model, so that it survives a failure in the next
                write_csv(args.csv, written)
    wait(device)
    dist.barrier()
    dist.destroy_process_group()
    if failures:
        if is_first:
            print("\nleft out:", *failures, sep="\n", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
