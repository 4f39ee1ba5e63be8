"""The layout: pure data, so no processes."""

from __future__ import annotations

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fusedddp.config import MIB, Options, bucket_caps
from fusedddp.layout import ALIGNMENT, Layout, ParamSpec, build_layout

DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.complex64]
specs = st.builds(
    ParamSpec,
    shape=st.lists(st.integers(0, 40), max_size=3).map(tuple),
    dtype=st.sampled_from(DTYPES),
    group=st.sampled_from(["a", "b"]),
)


@st.composite
def layouts(draw: st.DrawFn) -> tuple[list[ParamSpec], list[int], Layout, dict[str, int]]:
    members = draw(st.lists(specs, min_size=1, max_size=30))
    order = draw(st.permutations(range(len(members))))
    keywords = {
        "world_size": draw(st.integers(1, 5)),
        "bucket_cap_bytes": draw(st.sampled_from([1, 100, 4096, 10**6])),
        "leading_caps_bytes": draw(st.lists(st.sampled_from([1, 64, 4096]), max_size=2)),
        "has_flag": draw(st.booleans()),
        "chunk_bytes": draw(st.sampled_from([None, 1, 4096, 10**6])),
    }
    return members, order, build_layout(members, order, **keywords), keywords


@given(layouts())
def test_every_parameter_has_one_aligned_slot_of_its_own(drawn) -> None:
    members, _, layout, keywords = drawn
    assert sorted(i for b in layout.buckets for i in b.params) == list(range(len(members)))
    for bucket in layout.buckets:
        end = 0
        for param, offset in zip(bucket.params, bucket.offsets, strict=True):
            assert offset % ALIGNMENT == 0 and offset >= end
            end = offset + members[param].numel
            assert members[param].wire_dtype == bucket.dtype
            assert members[param].group == bucket.group
        assert bucket.padded_numel >= end + bucket.has_flag
        assert bucket.numel == sum(members[i].numel for i in bucket.params)
        if not bucket.is_direct:
            assert bucket.padded_numel % (ALIGNMENT * keywords["world_size"]) == 0
            assert bucket.padded_numel > 0
        else:
            assert len(bucket.params) == 1 and bucket.padded_numel == bucket.numel


@given(layouts())
def test_buckets_follow_arrival(drawn) -> None:
    _, order, layout, _ = drawn
    arrival = {param: position for position, param in enumerate(order)}
    last = [arrival[bucket.params[-1]] for bucket in layout.buckets]
    assert last == sorted(last)
    for bucket in layout.buckets:
        positions = [arrival[param] for param in bucket.params]
        assert positions == sorted(positions)


@given(layouts())
def test_chunks_cover_each_bucket_and_stay_small(drawn) -> None:
    members, _, layout, keywords = drawn
    before = 0
    for bucket in layout.buckets:
        assert bucket.chunks[0][0] == 0 and bucket.chunks[-1][1] == len(bucket.params)
        for (_, stop), (start, _) in zip(bucket.chunks, bucket.chunks[1:], strict=False):
            assert stop == start
        for start, stop in bucket.chunks:
            assert start < stop
            size = sum(members[i].nbytes for i in bucket.params[start:stop])
            if keywords["chunk_bytes"] is None:
                assert (start, stop) == (0, len(bucket.params))
            elif stop - start > 1:
                # What waits is at most an eighth of what came before the end of the chunk.
                assert size <= max(4096, (before + size) // 8)
                assert size <= keywords["chunk_bytes"]
            before += size


@given(layouts())
def test_only_the_last_bucket_has_the_flag(drawn) -> None:
    _, _, layout, keywords = drawn
    flags = [bucket.has_flag for bucket in layout.buckets]
    assert flags == [False] * (len(flags) - 1) + [keywords["has_flag"]]
    if keywords["has_flag"]:
        assert not layout.buckets[-1].is_direct


def fp32(*numels: int) -> list[ParamSpec]:
    return [ParamSpec((n,), torch.float32) for n in numels]


@pytest.mark.parametrize(
    ("numels", "cap", "leading", "want"),
    [
        ((4, 4, 4), 16, (), [[0], [1], [2]]),  # each fills its bucket exactly
        ((4, 4, 4), 17, (), [[0, 1], [2]]),  # the one that fills it closes it
        ((4, 4, 4), 10**9, (1,), [[0], [1, 2]]),  # a small first bucket
        ((4, 4, 4), 10**9, (), [[0, 1, 2]]),
        ((1, 100, 1, 1), 400, (8,), [[1], [0, 2, 3]]),  # a direct one passes the open bucket
        ((4, 4, 4, 4), 32, (1, 17), [[0], [1, 2], [3]]),  # one cap after the other
        ((40, 4, 40), 32, (200,), [[0, 1, 2]]),  # only what reaches the largest cap is direct
    ],
    ids=["at cap", "above cap", "first cap", "one bucket", "direct", "list", "largest"],
)
def test_caps(
    numels: tuple[int, ...], cap: int, leading: tuple[int, ...], want: list[list[int]]
) -> None:
    layout = build_layout(
        fp32(*numels),
        range(len(numels)),
        world_size=2,
        bucket_cap_bytes=cap,
        leading_caps_bytes=leading,
    )
    assert [list(bucket.params) for bucket in layout.buckets] == want


def test_a_worked_example() -> None:
    layout = build_layout(
        [ParamSpec((3, 5), torch.float32), ParamSpec((7,), torch.complex64)],
        [1, 0],
        world_size=2,
        bucket_cap_bytes=MIB,
        has_flag=True,
    )
    (bucket,) = layout.buckets
    assert bucket.params == (1, 0)
    assert bucket.offsets == (0, 16)  # seven complex values are fourteen reals
    assert bucket.numel == 14 + 15
    assert bucket.padded_numel == 32  # 31 elements and the flag
    assert bucket.dtype == torch.float32


def test_checksum_tells_layouts_apart() -> None:
    keywords = dict(world_size=2, bucket_cap_bytes=64)
    base = build_layout(fp32(4, 8), [0, 1], **keywords)
    assert base.checksum == build_layout(fp32(4, 8), [0, 1], **keywords).checksum
    assert base.checksum != build_layout(fp32(4, 8), [1, 0], **keywords).checksum
    assert base.checksum != build_layout(fp32(8, 4), [0, 1], **keywords).checksum


def test_bucket_caps() -> None:
    assert bucket_caps() == (25 * MIB, ())
    assert bucket_caps(on_cpu=False) == (25 * MIB, (MIB,))
    for on_cpu in (True, False):
        assert bucket_caps(4, on_cpu=on_cpu) == (4 * MIB, ())
        assert bucket_caps(0.5, on_cpu=on_cpu) == (MIB // 2, ())
        assert bucket_caps(numpy.int64(2), on_cpu=on_cpu) == (2 * MIB, ())
        assert bucket_caps(7, [1, 2, 0.5], on_cpu=on_cpu) == (MIB // 2, (MIB, 2 * MIB))
    with pytest.raises(ValueError, match="bucket_cap_mb_list: expected a positive number"):
        bucket_caps(None, [1, 0])
    with pytest.raises(TypeError, match="bucket_cap_mb_list: expected a list"):
        bucket_caps(None, 3)
    assert Options(static_graph=True).allows_unused
    assert Options(find_unused_parameters=True).allows_unused
    assert not Options().allows_unused
