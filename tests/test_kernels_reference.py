"""The reference ops, held to a slow element-wise twin: values exactly, and nothing else touched."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fusedddp_kernels import Slots, flatten, is_dense, scale_, unflatten

REAL = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
COMPLEX = [torch.complex64, torch.complex128]
SPECIAL = [0.0, -0.0, 1e-45, 1e-40, -1e-7, 65504.0, 65520.0, 3.3895e38, 1 / 3, 1.00390625]
SPECIAL += [float("inf"), float("-inf"), float("nan"), 2.0**-24, 2.0**-25, 1.0]
scales = st.sampled_from([None, 0.5, 1 / 3, 1.0, 3.0, 2.0**-20]).map(
    lambda v: None if v is None else torch.tensor(v, dtype=torch.float64)
)


def same(a: Tensor, b: Tensor) -> bool:
    """Bitwise but for the sign and payload of NaN."""
    if a.is_complex():
        return same(torch.view_as_real(a.resolve_conj()), torch.view_as_real(b.resolve_conj()))
    a, b = a.resolve_neg(), b.resolve_neg()
    zeros = torch.equal(torch.signbit(a)[a == 0], torch.signbit(b)[a == 0])
    return torch.allclose(a, b, rtol=0, atol=0, equal_nan=True) and zeros


def expected(source: Tensor, dtype: torch.dtype, scale: Tensor | None) -> Tensor:
    """What the module docstring of the reference promises, spelled out."""
    if source.is_complex():
        return expected(torch.view_as_real(source.resolve_conj()), dtype, scale)
    value = source.resolve_neg().clone()
    if scale is not None:
        compute = torch.float64 if value.dtype == torch.float64 else torch.float32
        value = value.to(compute) * scale.to(compute)
    if value.dtype == torch.float64 and dtype in (torch.float16, torch.bfloat16):
        value = value.float()
    return value.to(dtype)


@st.composite
def tensors(draw: st.DrawFn, dtypes: list[torch.dtype]) -> Tensor:
    dtype = draw(st.sampled_from(dtypes))
    shape = draw(st.lists(st.integers(0, 5), max_size=4))
    numel = torch.Size(shape).numel()
    # In a larger storage, so that addresses are unaligned and neighbours can be watched.
    shift = draw(st.integers(0, 3))
    storage = torch.full((numel + shift + 3,), 123.0, dtype=dtype)
    tensor = storage[shift : shift + numel].view(shape)
    if numel:
        values = draw(st.lists(st.sampled_from(SPECIAL), min_size=numel, max_size=numel))
        parts = torch.tensor(values, dtype=torch.float64)
        tensor.copy_(
            (torch.complex(parts, parts.flip(0)) if dtype.is_complex else parts).view(shape)
        )
    tensor = tensor.permute(draw(st.permutations(range(tensor.dim()))))
    if dtype.is_complex and draw(st.booleans()):
        tensor = tensor.conj()
    if draw(st.booleans()):
        tensor = torch._neg_view(tensor)
    return tensor


def make_slots(like: list[Tensor], dtype: torch.dtype, gap: int) -> Slots:
    offsets, end = [], gap
    for tensor in like:
        offsets.append(end)
        end += tensor.numel() * (2 if tensor.is_complex() else 1)
        end += gap + end % 2
    return Slots(torch.full((end,), float("nan"), dtype=dtype), offsets, like)


@given(
    sources=st.lists(tensors(REAL + COMPLEX), min_size=1, max_size=6),
    present=st.lists(st.booleans(), min_size=6, max_size=6),
    buffer=st.sampled_from(REAL),
    scale=scales,
    gap=st.sampled_from([0, 2, 5]),
)
def test_flatten(sources, present, buffer, scale, gap) -> None:
    slots = make_slots(sources, buffer, gap + gap % 2)
    given_sources = [s if here else None for s, here in zip(sources, present, strict=False)]
    memory = [bytes(s.untyped_storage()) for s in sources]
    flatten(given_sources, slots, scale)
    for view, source, here in zip(slots.views, sources, present, strict=False):
        want = expected(source, buffer, scale) if here else torch.zeros_like(view)
        assert same(view, want.reshape(view.shape))
    for padding in slots.padding:
        assert not padding.any()
    for source, before in zip(sources, memory, strict=True):
        assert bytes(source.untyped_storage()) == before, (
            "a source or its neighbourhood was written"
        )


@given(sources=st.lists(tensors(REAL), min_size=2, max_size=5), scale=scales, data=st.data())
def test_flatten_of_neighbours_leaves_other_slots(sources, scale, data) -> None:
    slots = make_slots(sources, torch.float32, 2)
    first = data.draw(st.integers(0, len(sources) - 1))
    stop = data.draw(st.integers(first + 1, len(sources)))
    flatten(sources[first:stop], slots, scale, first)
    for i, (view, source) in enumerate(zip(slots.views, sources, strict=True)):
        if first <= i < stop:
            assert same(view, expected(source, torch.float32, scale))
        else:
            assert view.isnan().all()


@given(
    destinations=st.lists(tensors(REAL + COMPLEX), min_size=1, max_size=6),
    skipped=st.lists(st.booleans(), min_size=6, max_size=6),
    buffer=st.sampled_from(REAL),
    scale=scales,
    seed=st.integers(0, 99),
)
def test_unflatten(destinations, skipped, buffer, scale, seed) -> None:
    destinations = [d.resolve_neg().resolve_conj() for d in destinations]
    slots = make_slots(destinations, buffer, 2)
    generator = torch.Generator().manual_seed(seed)
    slots.flat.copy_(
        torch.randn(slots.flat.numel(), generator=generator, dtype=torch.float64) * 100
    )
    before = [d.clone() for d in destinations]
    flat = slots.flat.clone()
    targets = [None if skip else d for d, skip in zip(destinations, skipped, strict=False)]
    unflatten(slots, targets, scale)
    for old, destination, view, skip in zip(
        before, destinations, slots.views, skipped, strict=False
    ):
        if skip:
            assert same(destination, old)
            continue
        got = torch.view_as_real(destination) if destination.is_complex() else destination
        assert same(got, expected(view, got.dtype, scale))
    assert torch.equal(slots.flat, flat)


@given(st.lists(tensors(REAL), min_size=1, max_size=5), st.sampled_from(REAL))
def test_flatten_then_unflatten_is_the_identity(sources, dtype) -> None:
    sources = [s.to(dtype).resolve_neg() for s in sources]
    slots = make_slots(sources, dtype, 2)
    flatten(sources, slots)
    back = [torch.full_like(s, 77.0) for s in sources]
    unflatten(slots, back)
    assert all(same(a, b) for a, b in zip(sources, back, strict=True))


@given(tensors(REAL + COMPLEX), scales.filter(lambda s: s is not None))
def test_scale_in_place_touches_nothing_else(tensor, scale) -> None:
    tensor = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype).copy_(tensor)
    real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    want = expected(tensor, real.dtype, scale)
    scale_(tensor, scale)
    assert same(real, want)


def test_sentinels_around_destinations_stay() -> None:
    storage = torch.full((20,), 9.0)
    destination = storage[5:11].view(2, 3)
    slots = make_slots([destination], torch.float32, 0)
    slots.flat.fill_(1.0)
    unflatten(slots, [destination], torch.tensor(0.5, dtype=torch.float64))
    assert torch.equal(destination, torch.full((2, 3), 0.5))
    assert torch.equal(storage[:5], torch.full((5,), 9.0))
    assert torch.equal(storage[11:], torch.full((9,), 9.0))


def test_absent_stays_zero_under_a_scale_that_is_not_finite() -> None:
    like = [torch.zeros(3), torch.zeros(2)]
    slots = make_slots(like, torch.float32, 2)
    flatten([None, torch.ones(2)], slots, torch.tensor(float("nan"), dtype=torch.float64))
    assert torch.equal(slots.views[0], torch.zeros(3))
    assert slots.views[1].isnan().all()
    assert all(not padding.any() for padding in slots.padding)


def test_a_source_in_its_own_slot_is_scaled_in_place() -> None:
    like = [torch.zeros(3), torch.zeros(2, 2)]
    slots = make_slots(like, torch.float32, 2)
    slots.flat.copy_(torch.arange(slots.flat.numel()))
    want = [view * 0.5 for view in slots.views]
    flatten([view.detach() for view in slots.views], slots, torch.tensor(0.5, dtype=torch.float64))
    assert all(torch.equal(a, b) for a, b in zip(slots.views, want, strict=True))


@pytest.mark.parametrize(
    ("flat", "offsets", "sizes", "text"),
    [
        (torch.zeros(2, 3), [0], [2], "contiguous 1-D tensor"),
        (torch.zeros(6, dtype=torch.cfloat), [0], [2], "real floating dtype"),
        (torch.zeros(6, dtype=torch.int32), [0], [2], "real floating dtype"),
        (torch.zeros(6)[::2], [0], [2], "strides \\(2,\\)"),
        (torch.zeros(6), [0, 1], [2, 2], "ascending order inside 6 elements"),
        (torch.zeros(6), [5], [2], "ascending order inside 6 elements"),
        (torch.zeros(6), [0, 2], [2], "one offset per tensor, found 2 for 1"),
    ],
)
def test_slots_refuse(flat, offsets, sizes, text) -> None:
    with pytest.raises(ValueError, match=text):
        Slots(flat, offsets, [torch.zeros(n) for n in sizes])


def test_counts_that_do_not_match() -> None:
    slots = make_slots([torch.zeros(3)], torch.float32, 0)
    with pytest.raises(ValueError, match="at most one source per slot, found 2"):
        flatten([None, None], slots)
    with pytest.raises(ValueError, match="one destination per slot, found 0 for 1"):
        unflatten(slots, [])


@pytest.mark.parametrize(
    ("tensor", "want"),
    [
        (torch.zeros(3, 4), True),
        (torch.zeros(3, 4).t(), True),
        (torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last), True),
        (torch.zeros(0, 4), True),
        (torch.tensor(1.0), True),
        (torch.zeros(6)[::2], False),
        (torch.zeros(1).expand(4), False),
        (torch.zeros(4, 4)[:, :2], False),
        (torch.zeros(3, 1, 4).transpose(0, 2), True),
    ],
)
def test_is_dense(tensor: Tensor, want: bool) -> None:
    assert is_dense(tensor) is want
