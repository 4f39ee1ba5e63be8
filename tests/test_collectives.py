"""The choice of a reduction, and how ranks tell that they agree."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

import fusedddp
from fusedddp.collectives import (
    Collective,
    Reduction,
    choose_reduction,
    same_on_all_ranks,
    wire_dtype,
)
from tests.models import Branches
from tests.ranks import Ranks

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


def check_mean_of_nccl(rank: int) -> None:
    """A direct bucket is averaged by NCCL itself, on the ranks that have to copy as well."""
    collective = Collective(dist.group.WORLD)
    gpu = torch.device("cuda", 0)
    collective._backends[gpu] = "nccl"
    collective.world_size = collective.divide_factor = 4
    assert collective.reduction(torch.float32, gpu, in_place=True) == (1.0, AVG)
    collective.divide_factor = 3  # one rank has run out of data: not NCCL's average
    assert collective.reduction(torch.float32, gpu, in_place=True) == (3.0, SUM)

    model = Branches(3, width=64)
    wrapped = fusedddp.wrap(model, find_unused_parameters=True, bucket_cap_mb=1 / 2**18)
    # gloo averages, too, so that it shows whether all ranks ask for the same operation.
    wrapped.reducer.rounds.collective._backends[torch.device("cpu")] = "nccl"
    launched = []
    original = Collective.launch

    def launch(self: Collective, flat: torch.Tensor, reduction: Reduction) -> dist.Work:
        launched.append(reduction.op)
        return original(self, flat, reduction)

    x = torch.full((64,), float(rank + 1))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Collective, "launch", launch)
        for step in range(3):
            wrapped.zero_grad()
            launched.clear()
            wrapped(x, [0, 1, 2] if rank == 0 else [1]).backward()
            assert torch.equal(model.w[0].grad, torch.full((64,), 0.5)), step
            assert torch.equal(model.w[1].grad, torch.full((64,), 1.5)), step
            everywhere: list[list[object]] = [[], []]
            dist.all_gather_object(everywhere, [str(op) for op in launched])
            assert everywhere[0] == everywhere[1], step
    assert any(bucket.layout.is_direct for bucket in wrapped.reducer.buckets)


def test_all_ranks_average_by_the_same_operation(two_ranks: Ranks) -> None:
    two_ranks.run(check_mean_of_nccl)
