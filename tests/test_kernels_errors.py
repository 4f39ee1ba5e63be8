"""Bad input to the Triton ops: an error in words before any launch (nothing here could launch)."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="needs Triton")

import fusedddp_kernels
from fusedddp_kernels import Ops, Slots
from fusedddp_kernels.launch import LaunchConfig, StatsTree
from fusedddp_kernels.table import CopyTable
from fusedddp_kernels.triton_ops import TritonOps

META = torch.device("meta")
HALF = torch.tensor(0.5, dtype=torch.float64)


@pytest.fixture(params=[TritonOps(), fusedddp_kernels], ids=["triton", "public"])
def ops(request: pytest.FixtureRequest) -> Ops:
    """On CPU the public functions are the reference, behind the same checks."""
    return request.param


def make_slots(*sizes: int) -> Slots:
    offsets = [32 * index for index in range(len(sizes))]
    return Slots(torch.zeros(32 * len(sizes)), offsets, [torch.zeros(n) for n in sizes])


@pytest.mark.parametrize(
    ("destinations", "error", "text"),
    [
        ([torch.zeros(1).expand(4)], ValueError, r"memory of its own, found size \(4,\) with str"),
        ([torch.zeros(5).as_strided((2, 2), (1, 1))], ValueError, "memory of its own"),
        ([torch.zeros(4, dtype=torch.int32)], TypeError, "dtype .* for destination 0, found torch"),
        ([torch.zeros(4, device=META)], ValueError, "destination 0 on cpu, .* found it on meta"),
        ([torch.zeros(5)], ValueError, r"of the size of its slot, \(4,\), found \(5,\)"),
        ([torch._neg_view(torch.zeros(4))], ValueError, "without conj or negative bit"),
        ([], ValueError, "one destination per slot, found 0 for 1"),
    ],
)
def test_destinations(ops, destinations, error, text) -> None:
    slots = make_slots(4)
    if destinations and destinations[0].shape == (2, 2):
        slots = Slots(torch.zeros(4), [0], [torch.zeros(2, 2)])
    with pytest.raises(error, match=text):
        ops.unflatten(slots, destinations)


def test_destinations_that_overlap_each_other_or_the_buffer(ops) -> None:
    memory = torch.zeros(20)
    slots = make_slots(4, 4)
    with pytest.raises(ValueError, match="8 bytes shared by destinations 1 and 0"):
        ops.unflatten(slots, [memory[2:6], memory[:4]])
    with pytest.raises(ValueError, match="tensor 0 outside of the flat buffer"):
        ops.unflatten(slots, [slots.flat[2:6], memory[:4]])
    # The slot of another tensor is no place for it either.
    with pytest.raises(ValueError, match="16 bytes from byte 128 of the buffer on"):
        ops.unflatten(slots, [slots.views[1], None], HALF)


@pytest.mark.parametrize(
    ("source", "error", "text"),
    [
        (torch.zeros(4, dtype=torch.int64), TypeError, "for source 0, found torch.int64"),
        (torch.zeros(4, dtype=torch.bool), TypeError, "for source 0, found torch.bool"),
        (torch.zeros(4, device=META), ValueError, "source 0 on cpu, .* found it on meta"),
        (torch.zeros(2, 2), ValueError, r"\(4,\), found \(2, 2\)"),
    ],
)
def test_sources(ops, source, error, text) -> None:
    with pytest.raises(error, match=text):
        ops.flatten([source], make_slots(4))


def test_sources_in_the_buffer_outside_of_their_slot(ops) -> None:
    slots = make_slots(4)
    with pytest.raises(ValueError, match="tensor 0 outside of the flat buffer or in its own slot"):
        ops.flatten([slots.flat[1:5]], slots)
    with pytest.raises(ValueError, match="at most one source per slot, found 2 from slot 0 of 1"):
        ops.flatten([None, None], slots)


@pytest.mark.parametrize(
    ("scale", "text"),
    [
        (torch.tensor(1.0, device=META), "scale on cpu, found it on meta"),
        (torch.tensor([1.0]), r"0-dim tensor of fp64 or fp32 as scale, found size \(1,\)"),
        (torch.tensor(1), "found size .* torch.int64"),
        (torch.tensor(1.0, dtype=torch.bfloat16), "torch.bfloat16"),
    ],
)
def test_scales(ops, scale, text) -> None:
    slots = make_slots(4)
    for call in (
        lambda: ops.flatten([None], slots, scale),
        lambda: ops.unflatten(slots, [None], scale),
        lambda: ops.scale_(torch.zeros(4), scale),
    ):
        with pytest.raises(ValueError, match=text):
            call()


def test_scale_in_place_refuses_overlap(ops) -> None:
    with pytest.raises(ValueError, match="memory of its own"):
        ops.scale_(torch.zeros(1).expand(3), HALF)


def test_memory_that_was_freed_or_resized(ops) -> None:
    slots = make_slots(4)
    source = torch.zeros(4)
    source.untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match="4 elements of tensor 0, found 0 bytes in its storage"):
        ops.flatten([source], slots)
    table = CopyTable(slots, 0, 1, block_size=16, fills_padding=True)
    table.bind([torch.zeros(4)])
    slots.flat.untyped_storage().resize_(64)
    with pytest.raises(RuntimeError, match="was freed, resized or moved since: make new Slots"):
        table.bind([torch.zeros(4)])


def test_a_table_changes_only_when_an_address_does() -> None:
    slots = make_slots(4, 20)
    table = CopyTable(slots, 0, 2, block_size=16, fills_padding=True)
    tensors = [torch.zeros(4), torch.zeros(20, dtype=torch.float16)]
    addresses = table.bind(tensors)
    assert addresses.tolist() == [tensors[0].data_ptr(), tensors[1].data_ptr(), 1, 3]
    version = addresses._version
    assert table.bind([tensors[0].detach(), tensors[1].detach()]) is addresses
    assert addresses._version == version
    assert table.bind([tensors[0], None]).tolist() == [tensors[0].data_ptr(), 0, 1, 0]
    assert addresses._version == version + 1
    # numel, span, offset, then two tiles of each.
    assert table.layout.tolist() == [4, 20, 32, 32, 0, 32, 0, 1, 1 << 32, 1 << 32 | 1]


def test_a_window_leaves_the_padding_alone_and_leading_padding_is_an_entry() -> None:
    slots = Slots(torch.zeros(64), [16, 32], [torch.zeros(4), torch.zeros(8)])
    table = CopyTable(slots, 0, 2, block_size=32, fills_padding=True)
    assert table.layout.tolist() == [4, 8, 0, 16, 32, 16, 16, 32, 0, 0, 1 << 32, 2 << 32]
    window = CopyTable(slots, 1, 2, block_size=32, fills_padding=False)
    assert window.layout.tolist() == [8, 8, 32, 0]


@pytest.mark.parametrize("value", [0, 3, 8, -16])
def test_launch_configurations_are_checked(value: int) -> None:
    with pytest.raises(ValueError, match=f"block_size, found {value}"):
        LaunchConfig(block_size=value)
    with pytest.raises(ValueError, match="width of at most block_size"):
        StatsTree(block_size=64, width=128)
