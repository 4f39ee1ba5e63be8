"""The Triton kernels in the interpreter; `tests/test_kernels_interpreted.py` runs this file."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from fusedddp_kernels import Slots, reference, testing
from fusedddp_kernels.launch import LaunchConfig, StatsTree
from fusedddp_kernels.testing import cases, run_property
from fusedddp_kernels.triton_ops import TritonOps
from fusedddp_kernels.triton_ops.operators import is_interpreted
from tests.kernel_interpreter import faithful_interpreter

BLOCK = 64
OPS = TritonOps(LaunchConfig(BLOCK), StatsTree(BLOCK, 16, 4))
CPU = torch.device("cpu")


@pytest.fixture(scope="session", autouse=True)
def interpreter() -> Iterator[None]:
    assert is_interpreted(), "set TRITON_INTERPRET=1"
    with faithful_interpreter():
        yield


@pytest.mark.parametrize("buffer", testing.REAL, ids=lambda d: str(d)[6:])
def test_flatten(buffer: torch.dtype) -> None:
    run_property(
        lambda case: testing.check_flatten(OPS, case, CPU),
        cases(block_size=BLOCK, buffers=[buffer]),
        45,
    )


@pytest.mark.parametrize("buffer", testing.REAL, ids=lambda d: str(d)[6:])
@pytest.mark.parametrize("check", [testing.check_unflatten, testing.check_accumulate])
def test_unflatten(buffer: torch.dtype, check) -> None:
    run_property(
        lambda case: check(OPS, case, CPU),
        cases(block_size=BLOCK, buffers=[buffer], has_bits=False, has_windows=False),
        30,
    )


def test_round_trip() -> None:
    run_property(
        lambda case: testing.check_round_trip(OPS, case, CPU),
        cases(block_size=BLOCK, has_windows=False),
        30,
    )


def test_scale() -> None:
    run_property(
        lambda case: testing.check_scale(OPS, case, CPU),
        cases(block_size=BLOCK, has_bits=False, has_windows=False),
        30,
    )


@pytest.mark.parametrize("buffer", testing.REAL, ids=lambda d: str(d)[6:])
def test_grad_stats(buffer: torch.dtype) -> None:
    run_property(
        lambda case: testing.check_grad_stats(OPS, case, CPU),
        cases(block_size=BLOCK, buffers=[buffer], has_windows=False, max_tensors=2),
        8,
    )


@pytest.mark.parametrize("buffer", testing.REAL, ids=lambda d: str(d)[6:])
@pytest.mark.parametrize(
    "check", [testing.check_flatten, testing.check_unflatten, testing.check_accumulate]
)
def test_corner_cases(check, buffer: torch.dtype) -> None:
    for case in testing.corner_cases(buffer, block_size=BLOCK):
        check(OPS, case, CPU)


@pytest.mark.parametrize("buffer", testing.REAL, ids=lambda d: str(d)[6:])
def test_grad_stats_has_the_bits_of_the_reference(buffer: torch.dtype) -> None:
    """Several rows in both stages; a NaN in the padding, which must not count."""
    like = [torch.zeros(n, dtype=buffer) for n in (1, 17 * BLOCK + 3, 0, BLOCK, 40)]
    offsets = [16, 32, 1152, 1152, 1216]
    generator = torch.Generator().manual_seed(1)
    flat = torch.randn(1280, generator=generator, dtype=torch.float64).to(buffer)
    slots = Slots(flat, offsets, like)
    for padding in slots.padding:
        padding.fill_(float("nan"))
    for per_tensor in (False, True):
        found = OPS.grad_stats(slots, per_tensor=per_tensor)
        expected = reference.grad_stats(slots, per_tensor=per_tensor, tree=OPS.tree)
        assert found.sum_squares.dtype == expected.sum_squares.dtype
        assert torch.equal(found.sum_squares, expected.sum_squares)
        assert torch.equal(found.num_nonfinite, expected.num_nonfinite)
        assert not found.num_nonfinite.any()
    slots.views[1][5], slots.views[3][0], slots.views[3][1] = 1e-30, float("nan"), float("-inf")
    counts = OPS.grad_stats(slots, per_tensor=True).num_nonfinite
    assert counts.tolist() == [0, 0, 0, 2, 0]
    assert OPS.grad_stats(slots).num_nonfinite.item() == 2


def test_dispatch_modes_see_operators() -> None:
    class Recorder(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    seen: list[str] = []
    slots = Slots(torch.zeros(32), [0], [torch.zeros(7)])
    scale = torch.tensor(0.5, dtype=torch.float64)
    source = torch.ones(7)
    OPS.grad_stats(slots)  # makes its table
    with Recorder():
        OPS.flatten([source], slots, scale)
        OPS.unflatten(slots, [source], scale)
        OPS.scale_(source, scale)
        OPS.grad_stats(slots)
    ours = [name for name in seen if name.startswith("fusedddp.")]
    names = ("flatten", "unflatten", "scale_", "grad_stats")
    assert ours == [f"fusedddp.{name}.default" for name in names]
    assert source.tolist() == [0.125] * 7


def test_autograd_notices_what_kernels_write() -> None:
    slots = Slots(torch.zeros(32), [0], [torch.zeros(7)])
    for write, tensor in (
        (lambda t: OPS.flatten([torch.ones(7)], slots), slots.flat),
        (lambda t: OPS.unflatten(slots, [t]), torch.zeros(7)),
        (lambda t: OPS.scale_(t, torch.tensor(0.5, dtype=torch.float64)), torch.zeros(7)),
    ):
        version = tensor._version
        write(tensor)
        assert tensor._version > version


def test_operators_have_shapes_without_data() -> None:
    with FakeTensorMode():
        flat, layout = torch.empty(32), torch.empty(4, dtype=torch.int64)
        bounds = torch.empty(3, dtype=torch.int64)
        sums, counts = torch.ops.fusedddp.grad_stats(flat, layout, bounds, 1, 1, 64, 16, 4, 32)
    assert (sums.shape, sums.dtype, counts.dtype) == ((2,), torch.float32, torch.int64)
