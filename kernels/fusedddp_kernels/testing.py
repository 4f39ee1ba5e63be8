"""Property tests for implementations of the ops: ours, and those that users bring.

    from fusedddp_kernels.testing import check_ops

    def test_my_kernels():
        check_ops(MyOps(), device="cuda")

Needs hypothesis: `pip install fusedddp[test]`. A failure prints the smallest input that was found
to fail, as a case that can be pasted into a test: `check_flatten(ops, Case(...))`.

Expected values come from `fusedddp_kernels.reference` on CPU, whatever the device. They are
compared bit for bit, NaN with NaN. Whole storages are compared, so nothing next to a tensor may be
written.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, NamedTuple

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from fusedddp_kernels import reference
from fusedddp_kernels.ops import Ops
from fusedddp_kernels.slots import Slots, as_real

REAL = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
COMPLEX = (torch.complex64, torch.complex128)
# What surrounds each tensor in its storage, in elements; 16 keep the tensor's alignment.
_GUARD = 16
_SENTINEL = 123.0
_INTS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

SPECIAL = (
    *(0.0, -0.0, 1.0, -1.0, 1 / 3, math.inf, -math.inf, math.nan),
    # Subnormal in fp32, in fp16, in fp64; the smallest of each.
    *(1e-40, 2.0**-149, 6e-6, 2.0**-24, 1e-310, 5e-324),
    # Halfway between neighbours of bf16 and of fp16, below, above, and to the even one.
    *(1 + 2.0**-8, 1 + 3 * 2.0**-8, 1 + 2.0**-8 - 2.0**-20, 1 + 2.0**-8 + 2.0**-20),
    *(1 + 2.0**-11, 1 + 3 * 2.0**-11, 1 + 2.0**-11 + 2.0**-22, 2.0**-25, 3 * 2.0**-25),
    # Halfway only after a rounding to fp32: whoever narrows fp64 at once gets another result.
    *(1 + 2.0**-8 + 2.0**-40, 1 + 2.0**-11 + 2.0**-40, 1 + 2.0**-24, 1 + 2.0**-24 + 2.0**-50),
    # Where fp16, bf16 and fp32 overflow.
    *(65504.0, 65519.0, 65520.0, 3.3895e38, 3.3961e38, 3.4028235e38, 3.4028236e38, 1e300),
)
SCALES = (None, 1.0, 0.5, 1 / 3, 3.0, 2.0**-20, 1 + 2.0**-30, 0.0, math.inf, math.nan)


class _Short:
    """A repr that leaves out what is at its default, so that a minimal input looks like one."""

    def __repr__(self) -> str:
        assert is_dataclass(self)
        shown = [
            f"{field.name}={getattr(self, field.name)!r}"
            for field in fields(self)
            if getattr(self, field.name) != field.default
        ]
        return f"{type(self).__name__}({', '.join(shown)})"

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        """For hypothesis, which would show every field of a dataclass."""
        printer.text(repr(self))


@dataclass(frozen=True, repr=False)
class TensorCase(_Short):
    """A tensor in a storage of its own, with sentinels around it.

    Attributes:
        shape: its size.
        dtype: real or complex.
        shift: elements from an address that is a multiple of 16 bytes.
        is_transposed: its dimensions lie in memory in reverse order.
        has_gaps: every second element of the storage is not its own.
        is_conj, is_neg: lazy bits; the first for complex dtypes only.
        seed: of its values.
        values: some that replace the random ones.
        is_absent: stands for None.
        is_alias: is its own slot, where dtype and bits allow it.
        is_slot_transposed: its slot's dimensions lie in memory in reverse order.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32
    shift: int = 0
    is_transposed: bool = False
    has_gaps: bool = False
    is_conj: bool = False
    is_neg: bool = False
    seed: int = 0
    values: tuple[float, ...] = ()
    is_absent: bool = False
    is_alias: bool = False
    is_slot_transposed: bool = False


@dataclass(frozen=True, repr=False)
class Case(_Short):
    """Tensors and a flat buffer.

    Attributes:
        tensors: one per slot.
        dtype: of the buffer.
        scale: None for none.
        alignment: what offsets are multiples of, in elements.
        lead: elements of padding in front of the first slot, rounded up to `alignment`.
        shift: elements of the buffer from an address that is a multiple of 16 bytes.
        window: first slot and number of slots to flatten; None for all.
    """

    tensors: tuple[TensorCase, ...]
    dtype: torch.dtype = torch.float32
    scale: float | None = None
    alignment: int = 16
    lead: int = 0
    shift: int = 0
    window: tuple[int, int] | None = None


def tensor_cases(
    *,
    dtypes: Sequence[torch.dtype] = REAL + COMPLEX,
    block_size: int = 4096,
    has_bits: bool = True,
) -> st.SearchStrategy[TensorCase]:
    """Tensors of sizes around `block_size`, any strides without overlap, any address."""
    sizes = (0, 1, 7, 16, 31, block_size - 1, block_size, block_size + 1, 2 * block_size + 17)
    shapes = st.one_of(
        st.sampled_from(sizes).map(lambda n: (n,)),
        st.lists(st.integers(0, 5), max_size=4).map(tuple),
    )
    bits = st.booleans() if has_bits else st.just(False)
    rare = st.sampled_from((False, False, False, True))

    @st.composite
    def build(draw: st.DrawFn) -> TensorCase:
        dtype = draw(st.sampled_from(tuple(dtypes)))
        return TensorCase(
            shape=draw(shapes),
            dtype=dtype,
            shift=draw(st.sampled_from((0, 0, 1, 3))),
            is_transposed=draw(rare),
            has_gaps=draw(rare),
            is_conj=dtype.is_complex and draw(bits),
            is_neg=draw(bits) and draw(rare),
            seed=draw(st.integers(0, 9)),
            values=tuple(draw(st.lists(st.sampled_from(SPECIAL), max_size=8))),
            is_absent=draw(rare),
            is_alias=draw(rare),
            is_slot_transposed=draw(rare),
        )

    return build()


def cases(
    *,
    dtypes: Sequence[torch.dtype] = REAL + COMPLEX,
    buffers: Sequence[torch.dtype] = REAL,
    block_size: int = 4096,
    has_bits: bool = True,
    has_windows: bool = True,
    max_tensors: int = 4,
) -> st.SearchStrategy[Case]:
    """Lists of tensors with a buffer for them."""
    tensors = tensor_cases(dtypes=dtypes, block_size=block_size, has_bits=has_bits)

    @st.composite
    def build(draw: st.DrawFn) -> Case:
        chosen = tuple(draw(st.lists(tensors, min_size=1, max_size=max_tensors)))
        window = None
        if has_windows and draw(st.sampled_from((False, False, True))):
            first = draw(st.integers(0, len(chosen) - 1))
            window = (first, draw(st.integers(1, len(chosen) - first)))
        return Case(
            tensors=chosen,
            dtype=draw(st.sampled_from(tuple(buffers))),
            scale=draw(st.sampled_from(SCALES)),
            alignment=draw(st.sampled_from((16, 16, 2))),
            lead=draw(st.sampled_from((0, 0, 2, block_size + 1))),
            shift=draw(st.sampled_from((0, 0, 1))),
            window=window,
        )

    return build()


def corner_cases(buffer: torch.dtype, *, block_size: int = 4096) -> Iterator[Case]:
    """What random examples may miss: every scale, and every dtype with every awkward size."""
    for seed, scale in enumerate(SCALES):
        tensors = (
            TensorCase((block_size + 1,), REAL[seed % 4], seed=seed, values=SPECIAL),
            TensorCase((7,), REAL[(seed + 1) % 4], seed=seed, is_absent=True),
            TensorCase((7,), buffer, seed=seed, is_alias=True),
        )
        yield Case(tensors, buffer, scale)
    for seed, dtype in enumerate(REAL):
        alone = TensorCase((block_size + 1,), dtype, seed=seed, values=SPECIAL)
        yield Case((alone,), buffer, None)
    neighbours = tuple(TensorCase((size,), buffer, seed=size) for size in (7, 4, 9))
    for window in ((0, 1), (1, 1), (2, 1), (0, 2)):
        yield Case(neighbours, buffer, None, window=window)
    sizes = (0, 1, 7, block_size - 1, block_size, block_size + 1, 3 * block_size, 127)
    yield Case(
        tuple(
            TensorCase((size,), dtype, shift, seed=seed, values=SPECIAL)
            for seed, size in enumerate(sizes)
            for dtype in REAL
            for shift in (0, 1)
        ),
        buffer,
        1 / 3,
    )


class _Built(NamedTuple):
    """The tensors of a case on one device, with every storage that may be looked at."""

    slots: Slots
    tensors: list[Tensor]
    scale: Tensor | None
    flat_storage: Tensor
    storages: list[Tensor]


def check_ops(
    ops: Ops,
    *,
    device: torch.device | str = "cpu",
    block_size: int = 4096,
    max_examples: int = 50,
    dtypes: Sequence[torch.dtype] = REAL + COMPLEX,
) -> None:
    """Holds an implementation of the ops to their contract.

    Args:
        ops: what to check.
        device: where its tensors are.
        block_size: size around which it may go wrong, such as the elements that one program copies.
        max_examples: inputs to try for each property.
        dtypes: of the tensors outside of the buffer.

    Raises:
        AssertionError: a result or a neighbour's memory is not as it has to be; the smallest input
            that shows it is in the message.
    """

    def run(
        check: Callable[[Ops, Case, torch.device], None],
        has_bits: bool = True,
        has_windows: bool = False,
    ) -> None:
        strategy = cases(
            dtypes=dtypes, block_size=block_size, has_bits=has_bits, has_windows=has_windows
        )
        run_property(lambda case: check(ops, case, torch.device(device)), strategy, max_examples)

    run(check_flatten, has_windows=True)
    run(check_unflatten, has_bits=False)
    run(check_accumulate, has_bits=False)
    run(check_round_trip)
    run(check_scale, has_bits=False)
    run(check_grad_stats)
    for buffer in REAL:
        for case in corner_cases(buffer, block_size=block_size):
            if all(tensor.dtype in dtypes for tensor in case.tensors):
                for check in (check_flatten, check_unflatten, check_accumulate):
                    check(ops, case, torch.device(device))


def run_property(
    check: Callable[[Case], None], strategy: st.SearchStrategy[Case], max_examples: int
) -> None:
    """Tries `check` on examples of `strategy`, the same in every run; shrinks what fails."""

    @settings(
        max_examples=max_examples,
        deadline=None,
        derandomize=True,
        database=None,
        report_multiple_bugs=False,  # one AssertionError instead of a group of exceptions
        suppress_health_check=list(HealthCheck),
    )
    @given(strategy)
    def failing_case(case: Case) -> None:
        check(case)

    failing_case()


def check_flatten(ops: Ops, case: Case, device: torch.device) -> None:
    """The buffer holds what the reference writes, and no source is touched.

    Once more with other tensors and another scale in the same slots, which no table of an
    implementation may outlive.
    """
    found, expected = _build(case, device), _build(case, torch.device("cpu"))
    first, count = case.window or (0, len(case.tensors))
    for again in (False, True):
        for built, implementation in ((found, ops), (expected, reference)):
            sources = [
                None if spec.is_absent else _other(tensor) if again else tensor
                for spec, tensor in zip(case.tensors, built.tensors, strict=True)
            ][first : first + count]
            scale = _other_scale(built) if again else built.scale
            implementation.flatten(sources, built.slots, scale, first)
        _compare("the storage of the buffer", found.flat_storage, expected.flat_storage)
    for index, (a, b) in enumerate(zip(found.storages, expected.storages, strict=True)):
        _compare(f"the storage of source {index}", a, b)


def check_unflatten(ops: Ops, case: Case, device: torch.device) -> None:
    """Every destination holds what the reference writes; nothing else is touched."""
    _check_unflatten(ops, case, device, accumulate=False)


def check_accumulate(ops: Ops, case: Case, device: torch.device) -> None:
    """Every destination holds what it held and the reference adds; nothing else is touched."""
    _check_unflatten(ops, case, device, accumulate=True)


def check_round_trip(ops: Ops, case: Case, device: torch.device) -> None:
    """flatten, then unflatten is the identity for equal dtypes."""
    specs = tuple(_of_dtype(spec, case.dtype) for spec in case.tensors)
    built = _build(Case(specs, case.dtype, None, case.alignment, case.lead, case.shift), device)
    ops.flatten(built.tensors, built.slots)
    back = [torch.full_like(tensor, math.nan) for tensor in built.tensors]
    ops.unflatten(built.slots, back)
    for index, (a, b) in enumerate(zip(back, built.tensors, strict=True)):
        _compare(f"tensor {index} after a round trip", as_real(a), as_real(b))


def check_scale(ops: Ops, case: Case, device: torch.device) -> None:
    """Every tensor holds what the reference writes; nothing next to it is touched."""
    found, expected = _build(case, device), _build(case, torch.device("cpu"))
    for built, implementation in ((found, ops), (expected, reference)):
        scale = built.scale
        if scale is None:
            scale = torch.tensor(1.0, dtype=torch.float64, device=built.slots.flat.device)
        for tensor in built.tensors:
            implementation.scale_(tensor, scale)
    for index, (a, b) in enumerate(zip(found.storages, expected.storages, strict=True)):
        _compare(f"the storage of tensor {index}", a, b)


def check_grad_stats(ops: Ops, case: Case, device: torch.device) -> None:
    """Counts are exact, sums within the bound of any order of adding, the same bits each time.

    A sum of n squares takes one rounding of each square and n - 1 of sums: its error is at most
    n * u * sum to first order, with u half the distance from 1 to the next value. A square that is
    subnormal adds half of the smallest positive value.
    """
    built = _build(case, torch.device("cpu"))
    reference.flatten([None if s.is_absent else t for s, t in _pairs(case, built)], built.slots)
    for padding in built.slots.padding:
        padding.fill_(math.nan)
    moved = _build(case, device)
    moved.slots.flat.copy_(built.slots.flat)
    for per_tensor in (False, True):
        sums, counts = ops.grad_stats(moved.slots, per_tensor=per_tensor)
        again = ops.grad_stats(moved.slots, per_tensor=per_tensor)
        _compare("the sum of squares, second time", again.sum_squares, sums)
        _compare("the count, second time", again.num_nonfinite, counts)
        stretches = [
            built.slots.flat[offset:end].double()
            for offset, end in zip(built.slots.offsets, built.slots.ends, strict=True)
        ]
        if not per_tensor:
            stretches = [torch.cat(stretches)]
        assert sums.dtype == reference.compute_dtype(case.dtype), f"sum of squares in {sums.dtype}"
        assert counts.dtype == torch.int64, f"count in {counts.dtype}"
        expected_shape = (len(stretches),) if per_tensor else ()
        assert sums.shape == counts.shape == expected_shape, f"found {sums.shape}, {counts.shape}"
        for index, values in enumerate(stretches):
            found, count = sums.cpu().reshape(-1)[index].item(), counts.cpu().reshape(-1)[index]
            bad = int((~values.isfinite()).sum())
            assert count == bad, f"stretch {index}: expected {bad} non-finite, found {count}"
            _check_sum(index, values, found, sums.dtype)


def _check_unflatten(ops: Ops, case: Case, device: torch.device, *, accumulate: bool) -> None:
    found, expected = _build(case, device), _build(case, torch.device("cpu"))
    generator = torch.Generator().manual_seed(7)
    values = torch.randn(expected.slots.flat.numel(), generator=generator, dtype=torch.float64)
    for position, value in enumerate(v for spec in case.tensors for v in spec.values):
        if position < values.numel():
            values[position * 7 % values.numel()] = value
    for built, implementation in ((found, ops), (expected, reference)):
        built.slots.flat.copy_(values.to(case.dtype))
        destinations = [None if s.is_absent else t for s, t in _pairs(case, built)]
        implementation.unflatten(built.slots, destinations, built.scale, accumulate=accumulate)
    for index, (a, b) in enumerate(zip(found.storages, expected.storages, strict=True)):
        _compare(f"the storage of destination {index}", a, b)
    _compare("the storage of the buffer", found.flat_storage, expected.flat_storage)
    others: list[list[Tensor | None]] = []
    for built, implementation in ((found, ops), (expected, reference)):
        others.append([None if s.is_absent else _other(t) for s, t in _pairs(case, built)])
        scale = _other_scale(built)
        implementation.unflatten(built.slots, others[-1], scale, accumulate=accumulate)
    for index, (a, b) in enumerate(zip(*others, strict=True)):
        if a is not None and b is not None:
            _compare(f"destination {index} of a second call", a, b)


def _other(tensor: Tensor) -> Tensor:
    """Other values of the same kind at another address, in the same memory order."""
    return torch.empty_like(tensor).copy_(tensor.detach().flip(list(range(tensor.dim()))))


def _other_scale(built: _Built) -> Tensor:
    return torch.tensor(0.75, dtype=torch.float64, device=built.slots.flat.device)


def _check_sum(index: int, values: Tensor, found: float, dtype: torch.dtype) -> None:
    info = torch.finfo(dtype)
    if not values.isfinite().all():
        assert not math.isfinite(found), f"stretch {index}: expected no finite sum, found {found}"
        return
    squares = [value * value for value in values.tolist()]
    exact = math.fsum(squares) if all(map(math.isfinite, squares)) else math.inf
    if exact > info.max / 2:
        return
    n = len(squares)
    # Twice to first order covers higher orders and the rounding of the squares here.
    bound = n * info.eps * exact + n * info.smallest_normal * info.eps
    assert abs(found - exact) <= bound, f"stretch {index}: expected {exact} +- {bound}, got {found}"


def _pairs(case: Case, built: _Built) -> list[tuple[TensorCase, Tensor]]:
    return list(zip(case.tensors, built.tensors, strict=True))


def _of_dtype(spec: TensorCase, dtype: torch.dtype) -> TensorCase:
    """`spec` with the dtype of a buffer, as a tensor of its own."""
    return TensorCase(
        spec.shape,
        dtype,
        spec.shift,
        spec.is_transposed,
        is_neg=spec.is_neg,
        seed=spec.seed,
        values=spec.values,
        is_slot_transposed=spec.is_slot_transposed,
    )


def _build(case: Case, device: torch.device) -> _Built:
    like = [_slot_like(spec) for spec in case.tensors]
    offsets: list[int] = []
    end = -(-case.lead // case.alignment) * case.alignment
    for tensor in like:
        offsets.append(end)
        end += tensor.numel() * (2 if tensor.is_complex() else 1)
        end += -end % case.alignment
    flat_storage = torch.full(
        (end + case.shift + 2 * _GUARD,), _SENTINEL, dtype=case.dtype, device=device
    )
    flat = flat_storage[_GUARD + case.shift :][:end]
    flat.fill_(math.nan)
    slots = Slots(flat, offsets, like)
    tensors: list[Tensor] = []
    storages: list[Tensor] = []
    for spec, view in zip(case.tensors, slots.views, strict=True):
        tensor, storage = _build_tensor(spec, device)
        if spec.is_alias and spec.dtype == case.dtype and not spec.is_neg:
            view.copy_(tensor)
            tensor = view.detach()
        tensors.append(tensor)
        storages.append(storage)
    scale = None
    if case.scale is not None:
        scale = torch.tensor(case.scale, dtype=torch.float64, device=device)
    return _Built(slots, tensors, scale, flat_storage, storages)


def _slot_like(spec: TensorCase) -> Tensor:
    if spec.is_slot_transposed:
        return torch.empty(spec.shape[::-1], dtype=spec.dtype).permute(_reversed(spec.shape))
    return torch.empty(spec.shape, dtype=spec.dtype)


def _build_tensor(spec: TensorCase, device: torch.device) -> tuple[Tensor, Tensor]:
    numel, step = math.prod(spec.shape), 2 if spec.has_gaps else 1
    generator = torch.Generator().manual_seed(spec.seed)
    parts = [torch.randn(numel, generator=generator, dtype=torch.float64) for _ in range(2)]
    for part, special in zip(parts, (spec.values, spec.values[::-1]), strict=True):
        chosen = torch.tensor(special[:numel], dtype=torch.float64)
        stride = max(1, numel // max(1, len(special)))
        part[: stride * len(chosen) : stride] = chosen
    values = torch.complex(*parts) if spec.dtype.is_complex else parts[0]
    storage = torch.full((numel * step + spec.shift + 2 * _GUARD,), _SENTINEL, dtype=spec.dtype)
    storage[_GUARD + spec.shift :][: numel * step : step] = values.to(spec.dtype)
    storage = storage.to(device)
    tensor = storage[_GUARD + spec.shift :][: numel * step : step]
    if spec.is_transposed:
        tensor = tensor.view(spec.shape[::-1]).permute(_reversed(spec.shape))
    else:
        tensor = tensor.view(spec.shape)
    if spec.is_conj:
        tensor = tensor.conj()
    if spec.is_neg:
        tensor = torch._neg_view(tensor)
    return tensor, storage


def _reversed(shape: tuple[int, ...]) -> list[int]:
    return list(range(len(shape)))[::-1]


def _compare(what: str, found: Tensor, expected: Tensor) -> None:
    if found.is_complex():
        found, expected = torch.view_as_real(found), torch.view_as_real(expected)
    found, expected = found.cpu().reshape(-1), expected.cpu().reshape(-1)
    if found.is_floating_point():
        bits = _INTS[found.element_size()]
        is_same = found.contiguous().view(bits) == expected.contiguous().view(bits)
        is_same |= found.isnan() & expected.isnan()
    else:
        is_same = found == expected
    if not is_same.all():
        at = int((~is_same).nonzero()[0])
        raise AssertionError(
            f"{what}: element {at} of {found.numel()} and {int((~is_same).sum()) - 1} others "
            f"differ: expected {expected[at].item()!r}, found {found[at].item()!r}"
        )
