"""How the launchers launch, with a driver that stands for an sm_90; no GPU runs anything.

Run by `tests/test_kernels_report.py` in a process of its own: Triton remembers the driver.
"""

from __future__ import annotations

import contextlib
from typing import ClassVar

import pytest
import torch
from triton import JITFunction
from triton.runtime import driver

from fusedddp_kernels import Slots, report
from fusedddp_kernels.launch import DEFAULT_CONFIG, DEFAULT_TREE
from fusedddp_kernels.triton_ops import TritonOps, operators

TARGET = report.parse_arch("sm_90")


class Driver:
    """As much of a driver as compiling for the current device takes."""

    def get_current_target(self):
        return TARGET

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device=None) -> int:
        return 0


class Recorder:
    """A compiled kernel that notes launches instead of making them."""

    launches: ClassVar[list] = []

    def __init__(self, compiled) -> None:
        self.compiled = compiled

    def __getitem__(self, grid):
        return lambda *arguments: self.launches.append((self.compiled, grid, arguments))


@pytest.fixture
def launches(monkeypatch) -> list:
    warmup = JITFunction.warmup
    monkeypatch.setattr(
        JITFunction, "warmup", lambda self, *a, **options: Recorder(warmup(self, *a, **options))
    )
    monkeypatch.setattr(operators, "_on", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(Recorder, "launches", [])
    driver.set_active(Driver())
    return Recorder.launches


def _instructions(ptx: str) -> str:
    """Without debugging information: Triton's cache knows source text by content, not by path."""
    code = ptx.split("\t.section")[0].splitlines()
    return "\n".join(line for line in code if not line.lstrip().startswith((".loc", ".file", "//")))


def test_one_launch_per_op_of_the_kernels_in_the_report(launches) -> None:
    slots = Slots(torch.zeros(5000), [0, 16], [torch.zeros(7), torch.zeros(4900)])
    scale = torch.tensor(0.5, dtype=torch.float64)
    tensors = [torch.zeros(7), torch.zeros(4900, dtype=torch.bfloat16)]
    ops = TritonOps()
    ops.flatten(tensors, slots, scale)
    ops.flatten(tensors, slots)
    ops.unflatten(slots, tensors)
    ops.unflatten(slots, tensors, scale, accumulate=True)
    ops.scale_(slots.flat, scale)
    ops.grad_stats(slots)
    ops.grad_stats(slots, per_tensor=True)

    names = [compiled.name for compiled, _, _ in launches]
    stats = ["tile_stats_kernel", "combine_stats_kernel"]
    assert names == [*["flatten_kernel"] * 2, *["unflatten_kernel"] * 2, "scale_kernel", *stats * 2]
    # 7 elements are one tile, 4,900 two; per tensor the second stage is one program each.
    assert [grid for _, grid, _ in launches] == [(n, 1, 1) for n in (3, 3, 3, 3, 2, 3, 1, 3, 2)]
    reported = {
        _instructions(spec.compile(TARGET).asm["ptx"])
        for spec in report.specialisations()
        if next(iter(spec.dtypes.values())) == "fp32"
    }
    for compiled, _, arguments in launches:
        assert _instructions(compiled.asm["ptx"]) in reported, compiled.name
        # Triton passes on every argument of the function, constants too.
        assert len(arguments) == len(compiled.src.fn.arg_names)
    flat, addresses, layout, num_entries, address, code, block = launches[0][2]
    assert flat is slots.flat
    assert addresses.numel() == 2 * num_entries == 4
    assert layout.numel() == 3 * num_entries + 3
    assert (address, code, block) == (scale.data_ptr(), 4, DEFAULT_CONFIG.block_size)
    assert launches[1][2][4:6] == (0, 0)  # no scale
    assert launches[0][0].metadata.num_warps == DEFAULT_CONFIG.num_warps
    assert launches[5][0].metadata.num_warps * 32 == DEFAULT_TREE.num_threads
    # Compiled once, whatever the scale.
    assert launches[0][0] is launches[1][0]


def test_nothing_to_do_is_no_launch(launches) -> None:
    empty = Slots(torch.zeros(0), [0], [torch.zeros(0)])
    ops = TritonOps()
    ops.flatten([torch.zeros(0)], empty)
    ops.unflatten(empty, [torch.zeros(0)])
    ops.scale_(torch.zeros(0), torch.tensor(0.5, dtype=torch.float64))
    assert launches == []
