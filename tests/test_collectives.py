"""The choice of a reduction, and how ranks tell that they agree: pure functions."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from fusedddp.collectives import choose_reduction, same_on_all_ranks, wire_dtype

SUM, AVG, MAX = dist.ReduceOp.SUM, dist.ReduceOp.AVG, dist.ReduceOp.MAX


@pytest.mark.parametrize(
    ("op", "world_size", "dtype", "backend", "in_place", "factor", "reduce_op"),
    [
        ("mean", 4, torch.float32, "gloo", False, 4.0, SUM),
        ("mean", 4, torch.float32, "gloo", True, 4.0, SUM),
        ("mean", 4, torch.float32, "nccl", False, 4.0, SUM),
        ("mean", 4, torch.float32, "nccl", True, 1.0, AVG),
        ("mean", 4, torch.bfloat16, "nccl", True, 1.0, AVG),
        ("mean", 4, torch.float64, "nccl", True, 4.0, SUM),
        ("mean", 1, torch.float32, "nccl", True, 1.0, SUM),
        ("sum", 4, torch.float32, "nccl", True, 1.0, SUM),
        ("max", 4, torch.float32, "gloo", False, 1.0, MAX),
    ],
)
def test_choose_reduction(op, world_size, dtype, backend, in_place, factor, reduce_op) -> None:
    reduction = choose_reduction(op, world_size, dtype, backend, in_place=in_place)
    assert reduction.predivide_factor == factor
    assert reduction.op == reduce_op


def test_wire_dtype() -> None:
    cpu, gpu = torch.device("cpu"), torch.device("cuda", 0)
    assert wire_dtype(torch.float16, cpu) == torch.float32
    assert wire_dtype(torch.float16, gpu) == torch.float16
    assert wire_dtype(torch.bfloat16, cpu) == torch.bfloat16
    assert wire_dtype(torch.complex64, cpu) == torch.float32
    assert wire_dtype(torch.complex32, cpu) == torch.float32
    assert wire_dtype(torch.complex128, gpu) == torch.float64


@given(st.lists(st.integers(0, 2**15 - 1), min_size=1, max_size=8))
def test_same_on_all_ranks(values: list[int]) -> None:
    sums = sum(values), sum(v * v for v in values)
    for mine in values:
        assert same_on_all_ranks(*sums, mine, len(values)) == (len(set(values)) == 1)
