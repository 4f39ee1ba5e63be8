"""The Triton kernels on a GPU: the properties, capture and replay, more than 2**31 elements."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="needs Triton")

from fusedddp_kernels import Slots, flatten, grad_stats, ops_for, reference, scale_, unflatten
from fusedddp_kernels.testing import check_ops
from fusedddp_kernels.triton_ops import TritonOps

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"),
]
GPU = torch.device("cuda")


def make_slots(sizes: list[int], dtype: torch.dtype = torch.float32) -> Slots:
    offsets, end = [], 0
    for size in sizes:
        offsets.append(end)
        end += -(-size // 16) * 16
    flat = torch.full((end,), float("nan"), dtype=dtype, device=GPU)
    return Slots(flat, offsets, [torch.empty(size) for size in sizes])


def make_scale(value: float) -> torch.Tensor:
    return torch.tensor(value, dtype=torch.float64, device=GPU)


def test_ops_on_a_gpu_are_triton() -> None:
    assert isinstance(ops_for(GPU), TritonOps)


@pytest.mark.timeout(200)
def test_properties() -> None:
    check_ops(TritonOps(), device=GPU, max_examples=60)


def test_grad_stats_has_the_bits_of_the_reference() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        slots = make_slots([5_000_000, 1, 4095, 4096, 12_289], dtype)
        slots.flat.copy_(torch.randn(slots.flat.numel(), device=GPU))
        on_cpu = Slots(slots.flat.cpu(), slots.offsets, slots.views)
        for per_tensor in (False, True):
            found = grad_stats(slots, per_tensor=per_tensor)
            expected = reference.grad_stats(on_cpu, per_tensor=per_tensor)
            assert torch.equal(found.sum_squares.cpu(), expected.sum_squares)
            assert torch.equal(found.num_nonfinite.cpu(), expected.num_nonfinite)


def test_addresses_that_move_are_followed() -> None:
    sizes = [1000, 7, 5000]
    slots = make_slots(sizes)
    for _ in range(20):  # more uploads than there are stages
        sources = [torch.randn(size, device=GPU) for size in sizes]
        flatten(sources, slots)
        assert all(map(torch.equal, slots.views, sources))


def test_streams_take_turns_with_one_table() -> None:
    slots = make_slots([100_000] * 20)
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    rounds = [[torch.full((100_000,), float(i), device=GPU) for _ in range(20)] for i in range(8)]
    torch.cuda.synchronize()
    copies = []
    for i, sources in enumerate(rounds):
        with torch.cuda.stream(streams[i % 2]):
            flatten(sources, slots)
            copies.append(slots.flat.clone())
            streams[(i + 1) % 2].wait_stream(streams[i % 2])
    torch.cuda.synchronize()
    for i, copy in enumerate(copies):
        assert (Slots(copy, slots.offsets, slots.views).views[19] == i).all()


def test_capture_and_replay() -> None:
    sizes = [10_000, 7, 4096]
    slots = make_slots(sizes)
    sources = [torch.randn(size, device=GPU) for size in sizes]
    destinations = [torch.empty_like(source) for source in sources]
    sums = [torch.zeros_like(source) for source in sources]
    alone = torch.ones(5000, device=GPU)
    scale = make_scale(0.5)

    def step():
        flatten(sources, slots, scale)
        unflatten(slots, destinations, scale)
        unflatten(slots, sums, accumulate=True)
        scale_(alone, scale)
        return grad_stats(slots), grad_stats(slots, per_tensor=True)

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    # What is uploaded now must not reach the graph.
    flatten([torch.full_like(source, 9.0) for source in sources], slots)
    for value in (0.25, 3.0):
        for tensor in sums:
            tensor.zero_()
        alone.fill_(1.0)
        for source in sources:
            source.normal_()
        scale.fill_(value)
        graph.replay()
        expected = make_slots(sizes)
        reference.flatten([s.cpu() for s in sources], on_cpu := _on_cpu(expected), scale.cpu())
        assert torch.equal(slots.flat.cpu(), on_cpu.flat)
        for found, view in zip(destinations, on_cpu.views, strict=True):
            assert torch.equal(found.cpu(), view * value)
        assert all(torch.equal(a.cpu(), b) for a, b in zip(sums, on_cpu.views, strict=True))
        assert torch.equal(alone, torch.full_like(alone, value))
        for found, per_tensor in zip(captured, (False, True), strict=True):
            stats = reference.grad_stats(on_cpu, per_tensor=per_tensor)
            assert torch.equal(found.sum_squares.cpu(), stats.sum_squares)
            assert torch.equal(found.num_nonfinite.cpu(), stats.num_nonfinite)


def _on_cpu(slots: Slots) -> Slots:
    return Slots(slots.flat.cpu(), slots.offsets, slots.views)


def test_capture_without_a_step_before_raises() -> None:
    slots, source = make_slots([64]), torch.ones(64, device=GPU)
    flatten([source], make_slots([64]))  # compiles
    with (
        pytest.raises(RuntimeError, match="run one step with the same buffers before capturing"),
        torch.cuda.graph(torch.cuda.CUDAGraph()),
    ):
        flatten([source], slots)


@pytest.mark.timeout(200)
def test_more_than_two_to_the_31_elements() -> None:
    size = 2**31 + 4099
    if torch.cuda.mem_get_info()[0] < 20 * 2**30:
        pytest.skip("needs 20 GiB of free GPU memory")
    source = torch.zeros(size, dtype=torch.bfloat16, device=GPU)
    marks = torch.tensor([0, 2**31 - 1, 2**31, size - 1], device=GPU)
    source[marks] = torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=torch.bfloat16, device=GPU)
    slots = make_slots([16, size], torch.bfloat16)
    flatten([None, source], slots, make_scale(0.5))
    assert slots.views[1][marks].tolist() == [0.5, 1.0, 1.5, 2.0]
    assert int(torch.count_nonzero(slots.flat)) == 4
    assert grad_stats(slots).sum_squares.item() == 0.25 + 1 + 2.25 + 4
    source.fill_(7.0)
    unflatten(slots, [None, source], make_scale(2.0))
    assert source[marks].tolist() == [1.0, 2.0, 3.0, 4.0]
    assert int(torch.count_nonzero(source)) == 4
    scale_(source, make_scale(0.5))
    assert source[marks].tolist() == [0.5, 1.0, 1.5, 2.0]
