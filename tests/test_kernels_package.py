"""The package around the kernels: without Triton, and the benchmark."""

from __future__ import annotations

import csv
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent

WITHOUT_TRITON = """
import sys
sys.modules["triton"] = None  # as if it were not installed
sys.path[:0] = [{root!r}, {root!r} + "/kernels"]
import torch
import fusedddp_kernels as kernels
slots = kernels.Slots(torch.full((32,), float("nan")), [0], [torch.zeros(7)])
kernels.flatten([torch.ones(7)], slots)
assert slots.flat.tolist() == [1.0] * 7 + [0.0] * 25
assert kernels.grad_stats(slots).sum_squares.item() == 7
assert kernels.ops_for(torch.device("cuda")) is kernels.reference
"""


def run(*command: str) -> str:
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_without_triton_everything_is_plain_torch() -> None:
    run(sys.executable, "-c", WITHOUT_TRITON.format(root=str(ROOT)))


def test_triton_is_not_imported_for_cpu() -> None:
    code = WITHOUT_TRITON.format(root=str(ROOT)).split("assert kernels.ops_for")[0]
    code = code.replace('sys.modules["triton"] = None', "before = set(sys.modules)")
    run(sys.executable, "-c", code + "assert 'fusedddp_kernels.triton_ops' not in sys.modules")


def test_benchmark_runs_every_variant_on_cpu(tmp_path: Path) -> None:
    out = tmp_path / "rows.csv"
    command = (sys.executable, "benchmarks/bench_kernels.py", "--device", "cpu", "--reps", "2")
    env_path = f"import sys; sys.path[:0] = [{str(ROOT / 'kernels')!r}]; import runpy; "
    script = env_path + f"sys.argv = {[*command[1:], '--list', 'resnet50', '--out', str(out)]!r}; "
    shown = run(
        sys.executable, "-c", script + f"runpy.run_path({command[1]!r}, run_name='__main__')"
    )
    rows = list(csv.DictReader(out.open()))
    variants = "copy flatten unflatten grad_stats mul_out foreach_copy+div cat get_total_norm"
    assert [row["variant"] for row in rows] == variants.split()
    assert {row["tensors"] for row in rows} == {"161"}
    assert all(float(row["p20"]) <= float(row["ms"]) <= float(row["p80"]) for row in rows)
    assert "resnet50 eager hot: flatten is" in shown
