"""Manual mode: `all_reduce_gradients` between backward and optimizer step."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import nn

import fusedddp
from fusedddp.bucket import Bucket
from tests.models import Branches, mlp
from tests.ranks import Ranks


def check_ops(rank: int, op: str, many: bool) -> None:
    torch.manual_seed(0)
    sizes = [(7,), (3, 5), (), (0, 2), (40, 50)] * (200 if many else 1)
    params = [nn.Parameter(torch.zeros(size)) for size in sizes]
    for i, p in enumerate(params):
        p.grad = torch.full(p.shape, float((i % 13) + 1) * (1 if rank == 0 else -3))
    before = [p.grad for p in params]
    fusedddp.all_reduce_gradients(iter(params), op=op)
    for i, (p, old) in enumerate(zip(params, before, strict=True)):
        value = float((i % 13) + 1)
        want = {"mean": -value, "sum": -2 * value, "max": value}[op]
        assert torch.equal(p.grad, torch.full(p.shape, want)), i
        assert p.grad is old, "not written in place"


@pytest.mark.parametrize("op", ["mean", "sum", "max"])
@pytest.mark.parametrize("many", [False, True], ids=["few", "many"])
def test_operations(two_ranks: Ranks, op: str, many: bool) -> None:
    two_ranks.run(check_ops, op, many)


def check_absent(rank: int) -> None:
    model = Branches()
    x = torch.full((3,), float(rank + 1))
    model(x, [0, 1] if rank == 0 else [1, 2]).backward()
    fusedddp.all_reduce_gradients(model)
    want = [0.5, 1.5, 1.0]
    for p, value in zip(model.w, want, strict=False):
        assert torch.equal(p.grad, torch.full((3,), value))
    assert model.w[3].grad is None


def test_absent_gradients(two_ranks: Ranks) -> None:
    two_ranks.run(check_absent)


def check_dtypes(rank: int) -> None:
    """Any mix of dtypes and strides, on a wire of another dtype."""
    for wire in (torch.float64, torch.float32, torch.bfloat16, None):
        params = [
            nn.Parameter(torch.zeros(3, 4).t()),
            nn.Parameter(torch.zeros(5, dtype=torch.bfloat16)),
            nn.Parameter(torch.zeros(5, dtype=torch.float16)),
            nn.Parameter(torch.zeros(2, dtype=torch.cfloat)),
            nn.Parameter(torch.zeros(2, 3, 2, 2).to(memory_format=torch.channels_last)),
        ]
        if wire is not torch.bfloat16:
            params.append(nn.Parameter(torch.zeros(4, dtype=torch.float64)))
        for p in params:
            p.grad = torch.full_like(p, 3.0 + rank)
        if params[3].grad is not None:
            params[3].grad = torch.full((2,), complex(1 + rank, 4 * rank)).conj()
        shared = torch.full((4, 3), 3.0 + rank)
        params += [nn.Parameter(torch.zeros(4, 3)), nn.Parameter(torch.zeros(4, 3))]
        params[-1].grad = params[-2].grad = shared  # one tensor for two parameters
        params.append(nn.Parameter(torch.zeros(4, 3)))
        params[-1].grad = torch.full((1, 3), 3.0 + rank).expand(4, 3)
        fusedddp.all_reduce_gradients(params, reduce_dtype=wire)
        for p in params:
            want = torch.full_like(p, 3.5) if not p.is_complex() else torch.full_like(p, 1.5 - 2j)
            assert torch.equal(p.grad.resolve_conj(), want), (wire, p.dtype)
            assert p.grad.dtype == p.dtype


def test_dtypes_strides_and_shared_memory(two_ranks: Ranks) -> None:
    two_ranks.run(check_dtypes)


def check_reduce_dtype_rounds(rank: int) -> None:
    """On a bf16 wire each contribution is scaled in fp32 and rounded once, then added in bf16."""
    p = nn.Parameter(torch.zeros(1000))
    values = [torch.randn(1000, generator=torch.Generator().manual_seed(r)) for r in range(2)]
    p.grad = values[rank].clone()
    fusedddp.all_reduce_gradients([p], reduce_dtype=torch.bfloat16)
    want = (values[0] * 0.5).bfloat16() + (values[1] * 0.5).bfloat16()
    assert torch.equal(p.grad, want.float())


def test_reduce_dtype(two_ranks: Ranks) -> None:
    two_ranks.run(check_reduce_dtype_rounds)


def check_memory(rank: int) -> None:
    """Nothing of a call outlives it, without waiting for the garbage collector."""
    params = [nn.Parameter(torch.zeros(100, 10)) for _ in range(5)]
    for p in params:
        p.grad = torch.ones(100, 10)
    gc.collect()
    gc.disable()
    try:
        before = sum(isinstance(o, Bucket) for o in gc.get_objects())
        fusedddp.all_reduce_gradients(params)
        assert sum(isinstance(o, Bucket) for o in gc.get_objects()) == before
    finally:
        gc.enable()


def test_buckets_are_freed_at_once(two_ranks: Ranks) -> None:
    two_ranks.run(check_memory)


def check_bad(rank: int) -> None:
    model = mlp()
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    bad: list[tuple[Any, dict[str, Any], type[Exception], str]] = [
        (model, {"op": "avg"}, ValueError, "op: expected one of 'mean', 'sum', 'max', found 'avg'"),
        (model, {"reduce_dtype": torch.int32}, ValueError, "expected one of torch.bfloat16"),
        (model, {"reduce_dtype": torch.float8_e4m3fn}, ValueError, "expected one of torch.bf"),
        (model, {"reduce_dtype": "bf16"}, ValueError, "expected one of torch.bfloat16"),
        (model, {"process_group": 3}, TypeError, "found int"),
        (model[0].weight, {}, TypeError, "found one tensor"),
        (model.named_parameters(), {}, TypeError, "found tuple as number 0"),
        ([], {}, ValueError, "at least one parameter that requires a gradient"),
        (mlp().requires_grad_(False), {}, ValueError, "at least one parameter"),
    ]
    for target, keywords, kind, text in bad:
        with pytest.raises(kind) as raised:
            fusedddp.all_reduce_gradients(target, **keywords)
        assert text in str(raised.value)
    # Ranks that pass different parameters are told which.
    other = nn.Linear(4, 4 + rank)
    for p in other.parameters():
        p.grad = torch.ones_like(p)
    with pytest.raises(RuntimeError, match=r"expected the same arguments.*weight: shape"):
        fusedddp.all_reduce_gradients(other)
    with pytest.raises(RuntimeError, match="expected the same arguments and parameters"):
        fusedddp.all_reduce_gradients(model if rank else other)
    with pytest.raises(RuntimeError, match=r"rank 0 has .op='sum', .* rank 1 has .op='mean'"):
        fusedddp.all_reduce_gradients(model, op=["sum", "mean"][rank])
    fusedddp.all_reduce_gradients(model)
    assert torch.equal(model[0].weight.grad, torch.ones_like(model[0].weight))


def test_bad_input(two_ranks: Ranks) -> None:
    two_ranks.run(check_bad)
