"""What the repository shows runs, and shows what it says."""

from __future__ import annotations

import contextlib
import csv
import io
import os
import re
import subprocess
import sys
from pathlib import Path

import graphed_sections
import pytest
import torch
import train_digits
from torch import Tensor, nn

import fusedddp
from tests.ranks import Ranks

ROOT = Path(__file__).parents[1]


def check_digits(rank: int, dtype: torch.dtype, views: bool) -> None:
    data = train_digits.load_data(dtype=dtype)
    results = {
        way: train_digits.train(way, data, steps=50, views=views)
        for way in ("torch", "manual", "fusedddp")
    }
    want = results.pop("torch")
    assert len(want.losses) == 50 and want.losses[-1] < want.losses[0]
    for way, got in results.items():
        assert got.losses == want.losses, way
        for a, b in zip(got.parameters, want.parameters, strict=True):
            assert torch.equal(a, b), way


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("views", [True, False], ids=["views", "own"])
def test_digits_are_bitwise_ddp(two_ranks: Ranks, dtype: torch.dtype, views: bool) -> None:
    two_ranks.run(check_digits, dtype, views)


def torchrun(*arguments: str) -> str:
    done = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *("--nproc-per-node", "2", *arguments),
        ],
        capture_output=True,
        text=True,
        timeout=100,
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_digits_under_torchrun() -> None:
    shown = torchrun("examples/train_digits.py", "--steps", "12")
    assert "fusedddp and torch step for step equal: yes, 12 of 12 losses" in shown
    assert "manual and torch step for step equal: yes, 12 of 12 losses" in shown


def check_sections(rank: int) -> list[float]:
    with contextlib.redirect_stdout(io.StringIO()) as shown:
        losses = graphed_sections.train(100, "cpu")
    assert ("without graphs" in shown.getvalue()) == (rank == 0)
    return losses


def test_graphed_sections_without_a_gpu(two_ranks: Ranks) -> None:
    for losses in two_ranks.run(check_sections):
        assert losses[-1] < losses[0] / 2


def code_of(page: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)


def test_graph_script_of_the_docs(tmp_path: Path) -> None:
    file = tmp_path / "graph_step.py"
    file.write_text(code_of("docs/cuda_graphs.md")[0])
    shown = torchrun(str(file))
    # Ranks share a pipe: one may write between the number and the line end of the other.
    assert len(re.findall(r"\d\.\d{6,}?(?=\d\.|\s|$)", shown)) == 2
    if not torch.cuda.is_available():
        (said,) = re.findall(r"INFO:fusedddp.*", (ROOT / "docs/cuda_graphs.md").read_text())
        assert shown.count(said) == 2


def check_snippets(rank: int) -> None:
    model = fusedddp.wrap(nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
    x, y = torch.ones(4, 8), torch.ones(4, 1)

    def train_step(x: Tensor, y: Tensor) -> None:
        model(x).sum().backward()

    names = {**globals(), "contextlib": contextlib, "batches": [(x, y)] * 8}
    names |= {"model": model, "optimizer": optimizer, "x": x, "y": y, "train_step": train_step}
    snippets = [code for code in code_of("docs/cuda_graphs.md") if "torch.cuda." not in code]
    assert len(snippets) == 3
    for code in snippets:
        exec(code, names)
        if "step" in names:
            names.pop("step")(x, y, *([True] if "micro_step" in code else []))


def test_graph_snippets_of_the_docs(one_rank: Ranks) -> None:
    one_rank.run(check_snippets)


def test_step_benchmark(tmp_path: Path) -> None:
    file = tmp_path / "rows.csv"
    shown = torchrun(
        "benchmarks/bench_step.py", "--models", "small",
        "--sessions", "1", "--turns", "2", "--burst", "2",
        "--variants", "ddp views", "fusedddp", "--csv", str(file),
    )  # fmt: skip
    rows = {row["variant"]: row for row in csv.DictReader(file.open())}
    assert list(rows) == ["no sync", "ddp views", "fusedddp", "collective"]
    for row in rows.values():
        assert float(row["median_ms"]) > 0 and row["model"] == "small" and row["machine"]
        assert row["variant"] in shown
    # Gradients of 400 x 64 x 64 floats are 6.25 MiB. At the same view setting no more than DDP.
    for column in ("peak_mib", "peak_steady_mib"):
        assert 6.25 <= float(rows["fusedddp"][column]) <= float(rows["ddp views"][column]) + 0.01


def test_graph_benchmark(tmp_path: Path) -> None:
    file = tmp_path / "rows.csv"
    command = [
        *(sys.executable, "benchmarks/bench_graph.py", "--models", "small"),
        *("--turns", "2", "--burst", "2", "--modes", "eager", "--csv", str(file)),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "One rank" in done.stdout
    assert torch.cuda.is_available() or "Captured ones need a GPU" in done.stdout
    rows = {row["variant"]: row for row in csv.DictReader(file.open())}
    assert list(rows) == ["no sync", "ddp", "ddp views", "fusedddp"]
    for name, row in rows.items():
        assert 0 < float(row["p20_ms"]) <= float(row["median_ms"]) <= float(row["p80_ms"])
        assert row["model"] == "small" and row["mode"] == "eager" and row["machine"]
        assert f"{name:10} eager " in done.stdout
    assert float(rows["no sync"]["tax_ms"]) == 0


def test_graph_benchmark_looks_at_its_arguments_first(tmp_path: Path) -> None:
    for arguments, said in (
        (("--csv", str(tmp_path / "none" / "rows.csv")), "expected a file in a folder that exists"),
        (("--modes", "captured"), "expected a GPU, found none"),
    ):
        if "captured" in arguments and torch.cuda.is_available():
            continue
        command = [sys.executable, "benchmarks/bench_graph.py", *arguments]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=ROOT)
        assert done.returncode == 2 and said in done.stderr and not done.stdout
