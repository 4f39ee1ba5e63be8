"""The compiled kernels, for GPUs that are not here: width of accesses, registers, spills."""

from __future__ import annotations

import collections
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="needs Triton")

ROOT = Path(__file__).parent.parent
# Two at a time: compiling takes a quarter of a minute for each GPU.
PAIRS = [("sm_80", "sm_90"), ("sm_100", "gfx942")]


def start_report(*archs: str) -> subprocess.Popen[str]:
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "kernels")])
    options = [option for arch in archs for option in ("--arch", arch)]
    return subprocess.Popen(
        [sys.executable, "-m", "fusedddp_kernels.report", *options],
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.slow
@pytest.mark.timeout(300)  # a minute on two cores that are free
def test_every_kernel_is_wide_and_lean_on_every_gpu() -> None:
    running = [start_report(*archs) for archs in PAIRS]
    rows = []
    for process in running:
        out, err = process.communicate(timeout=280)
        assert process.returncode == 0, out + err
        header, *lines = out.splitlines()
        # Dtypes may have blanks in them; everything after is one word each.
        names = header.split()
        for line in lines:
            words = line.split()
            rows.append(dict(zip(names[3:], words[-len(names[3:]) :], strict=True)))
            rows[-1].update(arch=words[0], kernel=words[1])
    kernels = {
        "flatten_kernel": 4,
        "unflatten_kernel": 8,
        "scale_kernel": 4,
        "tile_stats_kernel": 4,
        "combine_stats_kernel": 2,
    }
    for arch in sum(PAIRS, ()):
        count = collections.Counter(row["kernel"] for row in rows if row["arch"] == arch)
        assert count == kernels
    for row in rows:
        has_tiles = row["kernel"] != "combine_stats_kernel"
        assert row["load"] == ("128" if has_tiles else "-"), row
        has_stores = has_tiles and row["kernel"] != "tile_stats_kernel"
        assert row["store"] == ("128" if has_stores else "-"), row
        assert int(row["registers"]) <= 96, row
        assert (row["stack"], row["spills"]) == ("-", "-"), row


def test_narrow_accesses_spills_and_stack_are_reported() -> None:
    report = pytest.importorskip("fusedddp_kernels.report")
    good = report.Row("sm_90", "k", "fp32", 4096, 8, 128, 128, 40, 0, 0, 0, 1)
    bad = report.Row("sm_90", "k", "fp32", 4096, 8, 128, 64, 40, 0, 8, 2, 1)
    lines: list[str] = []
    wrong = report._print_rows([good, bad], lines.append)
    assert wrong == [
        "sm_90 k fp32: stores of full tiles narrower than 128 bits",
        "sm_90 k fp32: 2 spills",
        "sm_90 k fp32: 8 bytes of stack",
    ]
    assert len(lines) == 3


def test_widths_are_counted_in_assembly() -> None:
    report = pytest.importorskip("fusedddp_kernels.report")
    ptx = """
    @%p1 ld.global.v4.b32 { %r1, %r2, %r3, %r4 }, [ %rd1 + 0 ];
    @%p2 ld.global.b16 { %rs1 }, [ %rd2 + 0 ];
    ld.global.v2.b64 { %rd5, %rd6 }, [ %rd1 + 0 ];
    @%p1 st.global.v2.b32 [ %rd3 + 0 ], { %r1, %r2 };
    """
    loads, stores = report._count_nvidia(ptx)
    assert (loads, stores) == ({16: 2, 2: 1}, {8: 1})
    assert report._width(loads, 32) == 128
    assert report._width(loads, 34) == 16
    assert report._width(stores, 8) == 64
    assert report._width(stores, 9) == 0
    loads, stores = report._count_amd("global_load_dwordx4 v\nbuffer_store_short v\n")
    assert (loads, stores) == ({16: 1}, {2: 1})


def test_an_unknown_gpu_is_refused() -> None:
    process = start_report("volta")
    _, err = process.communicate(timeout=60)
    assert process.returncode == 2
    assert "expected a name such as sm_90 or gfx942, found 'volta'" in err


@pytest.mark.slow
def test_what_is_launched_is_what_is_reported() -> None:
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    launches = Path(__file__).with_name("kernel_launches.py")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "--no-header", "-p", "no:cacheprovider", launches],
        env=env,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 passed" in done.stdout, done.stdout
