"""Bandwidth of the kernels beside what DDP and plain torch do, for the gradients of known models.

    python benchmarks/bench_kernels.py                  # GPU if there is one
    python benchmarks/bench_kernels.py --device cpu     # the reference, on lists made small

Every variant moves the same gradients (`data/gradient_lists.json`: how many tensors of which shape,
in the order of `module.parameters()`) and takes its turn in every repetition, so all see the same
machine. GB/s count what has to move (a flatten reads and writes each gradient once), whatever a
variant really moves; the percentage is of a device-to-device copy of as many bytes in the same run.

On a GPU each variant is timed launched by the host (`eager`) and as a CUDA graph (`graph`, without
the host), after an access to 512 MiB of other memory (`cold`) and right after itself (`hot`).
"""

from __future__ import annotations

import argparse
import csv
import datetime
import json
import math
import statistics
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

import fusedddp_kernels as kernels
from fusedddp_kernels import Slots

LISTS = Path(__file__).parent / "data" / "gradient_lists.json"
FLUSH_BYTES = 512 * 2**20  # several times the L2 cache of any GPU
CPU_NUMEL = 1_000_000  # elements that a list is made small to on CPU
Variants = dict[str, tuple[Callable[[], object], int]]


def read_lists(names: list[str] | None, shrink_to: int | None) -> dict[str, list[int]]:
    """Number of elements of each gradient, by list."""
    lists = {
        name: [math.prod(shape) for count, shape in runs for _ in range(count)]
        for name, runs in json.loads(LISTS.read_text()).items()
        if not names or name in names
    }
    if shrink_to is not None:
        for name, numels in lists.items():
            factor = max(1, sum(numels) // shrink_to)
            lists[name] = [max(1, numel // factor) for numel in numels]
    return lists


def make_variants(numels: list[int], dtype: torch.dtype, device: torch.device) -> Variants:
    """What to time, by name, with the bytes that it has to move."""
    gradients = [torch.randn(numel, dtype=dtype, device=device) for numel in numels]
    offsets, end = [], 0
    for numel in numels:
        offsets.append(end)
        end += -(-numel // 16) * 16
    slots = Slots(torch.zeros(end, dtype=dtype, device=device), offsets, gradients)
    dense = torch.zeros(sum(numels), dtype=dtype, device=device)
    dense_copy = torch.empty_like(dense)
    back = [torch.empty_like(gradient) for gradient in gradients]
    scale = torch.tensor(0.5, dtype=torch.float64, device=device)
    narrow_scale = scale.to(dtype)

    def mul_out() -> None:
        for gradient, view in zip(gradients, slots.views, strict=True):
            torch.mul(gradient, narrow_scale, out=view)

    def foreach_copy() -> None:
        torch._foreach_copy_(slots.views, gradients)
        slots.flat.div_(2.0)

    bytes_once = sum(numels) * dtype.itemsize
    return {
        "copy": (lambda: dense_copy.copy_(dense), 2 * bytes_once),
        "flatten": (lambda: kernels.flatten(gradients, slots, scale), 2 * bytes_once),
        "unflatten": (lambda: kernels.unflatten(slots, back, scale), 2 * bytes_once),
        "grad_stats": (lambda: kernels.grad_stats(slots), bytes_once),
        "mul_out": (mul_out, 2 * bytes_once),
        "foreach_copy+div": (foreach_copy, 2 * bytes_once),
        "cat": (lambda: torch.cat(gradients, out=dense), 2 * bytes_once),
        "get_total_norm": (lambda: torch.nn.utils.get_total_norm(gradients), bytes_once),
    }


def count_launches(run: Callable[[], object]) -> int:
    """Kernels and copies that `run` puts on the GPU."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        run()
        torch.cuda.synchronize()
    return sum(e.device_type == torch.autograd.DeviceType.CUDA for e in profile.events())


def capture(run: Callable[[], object]) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph


def time_on_gpu(runs: dict[str, Callable[[], object]], reps: int, flush: Tensor | None):
    """Milliseconds of each of `runs`, in turns."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for rep in range(reps + 1):
        for name, run in runs.items():
            if flush is None:
                run()  # leaves in the cache what it will want
            else:
                flush.zero_()
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            run()
            end.record()
            end.synchronize()
            if rep:
                times[name].append(begin.elapsed_time(end))
    return times


def time_on_cpu(runs: dict[str, Callable[[], object]], reps: int):
    times: dict[str, list[float]] = {name: [] for name in runs}
    for rep in range(reps + 1):
        for name, run in runs.items():
            begin = time.perf_counter()
            run()
            if rep:
                times[name].append(1e3 * (time.perf_counter() - begin))
    return times


def measure(numels: list[int], dtype: torch.dtype, device: torch.device, reps: int) -> list[dict]:
    """One row for each variant, mode and state of the cache."""
    variants = make_variants(numels, dtype, device)
    eager = {name: run for name, (run, _) in variants.items()}
    launches: dict[str, int] = {}
    if device.type == "cuda":
        for run in eager.values():
            run()
        torch.cuda.synchronize()
        launches = {name: count_launches(run) for name, run in eager.items()}
        graphs = {name: capture(run).replay for name, run in eager.items()}
        flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device=device)
        timed = {
            (mode, cache): time_on_gpu(runs, reps, flush if cache == "cold" else None)
            for mode, runs in (("eager", eager), ("graph", graphs))
            for cache in ("cold", "hot")
        }
    else:
        timed = {("eager", "hot"): time_on_cpu(eager, reps)}
    rows = []
    for (mode, cache), times in timed.items():
        copy_speed = variants["copy"][1] / statistics.median(times["copy"])
        for name, values in times.items():
            p20, median, p80 = (
                statistics.quantiles(values, n=10, method="inclusive")[i] for i in (1, 4, 7)
            )
            speed = variants[name][1] / median
            rows.append(
                {
                    "variant": name,
                    "mode": mode,
                    "l2": cache,
                    "ms": f"{median:.4f}",
                    "p20": f"{p20:.4f}",
                    "p80": f"{p80:.4f}",
                    "gb_per_s": f"{speed / 1e6:.1f}",
                    "percent_of_copy": f"{100 * speed / copy_speed:.1f}",
                    "launches": launches.get(name, ""),
                }
            )
    return rows


def describe(device: torch.device) -> dict[str, str]:
    def git(*command: str) -> str:
        done = subprocess.run(["git", *command], capture_output=True, text=True, cwd=LISTS.parent)
        return done.stdout.strip()

    try:
        import triton

        version = triton.__version__
    except ModuleNotFoundError:
        version = ""
    return {
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        "torch": torch.__version__,
        "triton": version,
        "commit": git("rev-parse", "--short", "HEAD") + ("+" if git("status", "--short") else ""),
        "date": datetime.date.today().isoformat(),
    }


def print_table(rows: list[dict]) -> None:
    names = ["list", "variant", "mode", "l2", "ms", "p20", "p80", "gb_per_s", "percent_of_copy"]
    names.append("launches")
    widths = {name: max(len(name), *(len(str(row[name])) for row in rows)) + 2 for name in names}
    print("".join(name.ljust(widths[name]) for name in names))
    for row in rows:
        print("".join(str(row[name]).ljust(widths[name]) for name in names).rstrip())


def print_verdict(rows: list[dict]) -> None:
    """The targets: what part of a copy's speed, and how much faster than what DDP does."""
    at = {(r["list"], r["variant"], r["mode"], r["l2"]): float(r["ms"]) for r in rows}
    for (name, variant, mode, cache), ms in at.items():
        if variant == "flatten":
            factors = [
                f"{at[name, other, mode, cache] / ms:.2f} times as fast as {other}"
                for other in ("mul_out", "foreach_copy+div", "cat", "copy")
            ]
            print(f"{name} {mode} {cache}: flatten is {', '.join(factors)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16", "float16"])
    parser.add_argument("--list", action="append", help="name in gradient_lists.json; repeatable")
    parser.add_argument("--reps", type=int, default=20)
    parser.add_argument("--out", type=Path, help="CSV file to write the rows to")
    options = parser.parse_args()
    if options.reps < 2:
        parser.error(f"--reps: expected at least 2, found {options.reps}")
    if options.out and not options.out.parent.is_dir():
        parser.error(f"--out: expected a file in a folder that exists, found {options.out}")
    device, dtype = torch.device(options.device), getattr(torch, options.dtype)
    lists = read_lists(options.list, CPU_NUMEL if device.type == "cpu" else None)
    if not lists:
        parser.error(f"expected names of lists in {LISTS}, found {options.list}")
    rows: list[dict] = []
    facts = describe(device)
    for name, numels in lists.items():
        about = {"list": name, "tensors": len(numels), "numel": sum(numels), "dtype": options.dtype}
        rows += [{**about, **row, **facts} for row in measure(numels, dtype, device, options.reps)]
        if options.out:  # after each list, so that what was measured survives a failure
            with options.out.open("w", newline="") as file:
                writer = csv.DictWriter(file, list(rows[0]))
                writer.writeheader()
                writer.writerows(rows)
    print(", ".join(f"{key} {value}" for key, value in facts.items()))
    print_table(rows)
    print_verdict(rows)


if __name__ == "__main__":
    main()
