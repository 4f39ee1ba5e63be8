"""Which gradient travels in which bucket, and where in it: pure data, no devices, no groups.

Shapes and dtypes go in, frozen dataclasses come out. Every rank computes the same layout from
the same input, so nothing here may depend on anything that differs between ranks.
"""

from __future__ import annotations

import math
import zlib
from collections import deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch

# Slots start at multiples of this many elements: 16 elements of the smallest gradient dtype
# (2 bytes) are 32 bytes, so every slot can be read and written in 16-byte accesses.
ALIGNMENT = 16
_PAGE_BYTES = 4096


@dataclass(frozen=True, slots=True)
class ParamSpec:
    """What the layout needs to know of one parameter.

    Attributes:
        shape: size of the parameter and of its gradient.
        dtype: its dtype.
        group: buckets are not shared across groups (a device, say; opaque here).
        flat_dtype: dtype on the wire, real; None for the parameter's own.
        stride: strides of its slot, which ranks must agree on; empty for contiguous.
        is_sparse: its gradient travels as a list of rows.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    group: Hashable = None
    flat_dtype: torch.dtype | None = None
    stride: tuple[int, ...] = ()
    is_sparse: bool = False

    @property
    def wire_dtype(self) -> torch.dtype:
        return self.flat_dtype or (self.dtype.to_real() if self.dtype.is_complex else self.dtype)

    @property
    def numel(self) -> int:
        """Elements of `wire_dtype` that the gradient takes: two for a complex value."""
        return math.prod(self.shape) * (2 if self.dtype.is_complex else 1)

    @property
    def nbytes(self) -> int:
        return self.numel * self.wire_dtype.itemsize


@dataclass(frozen=True, slots=True)
class BucketLayout:
    """One bucket: the parameters in it and where their gradients lie.

    Attributes:
        params: indices of the parameters, in the order of their slots.
        offsets: first element of each slot, multiples of `ALIGNMENT`.
        numel: elements in all slots, without padding.
        padded_numel: elements of the flat buffer, a multiple of `ALIGNMENT` times the world size
            so that it splits into equal aligned shards. A direct bucket is not padded: one rank
            may reduce its gradient in place while another has to copy, and sizes must agree.
        dtype: dtype of the flat buffer, real.
        group: the group that all its parameters share.
        chunks: first and one-past-last slot of the pieces in which the bucket is filled.
        is_direct: the bucket is one large gradient that may be reduced where it is.
        has_flag: the last element of the flat buffer is no padding but a flag of the reducer's.
        is_sparse: the bucket is one sparse gradient. It has no flat buffer, and room for a flag.
    """

    params: tuple[int, ...]
    offsets: tuple[int, ...]
    numel: int
    padded_numel: int
    dtype: torch.dtype
    group: Hashable
    chunks: tuple[tuple[int, int], ...]
    is_direct: bool = False
    has_flag: bool = False
    is_sparse: bool = False


@dataclass(frozen=True)
class Layout:
    """All buckets, in the order in which they are launched, and the parameters they are for."""

    buckets: tuple[BucketLayout, ...]
    specs: tuple[ParamSpec, ...]

    @cached_property
    def checksum(self) -> int:
        """A 15-bit number that differs, most likely, between different layouts."""
        plan = [(b.params, b.offsets, b.padded_numel, b.dtype, b.is_sparse) for b in self.buckets]
        return zlib.crc32(repr((plan, specs_checksum(self.specs))).encode()) & 0x7FFF


def specs_checksum(specs: Sequence[ParamSpec]) -> int:
    """A 15-bit number that differs, most likely, between different parameters.

    Devices are left out: ranks use different ones.
    """
    tensors = [(s.shape, s.stride, s.dtype, s.wire_dtype) for s in specs]
    return zlib.crc32(repr(tensors).encode()) & 0x7FFF


def build_layout(
    specs: Sequence[ParamSpec],
    order: Sequence[int],
    *,
    world_size: int,
    bucket_cap_bytes: int,
    leading_caps_bytes: Sequence[int] = (),
    has_flag: bool = False,
    is_packed: bool = False,
    chunk_bytes: int | None = None,
) -> Layout:
    """Fills buckets with the parameters in `order`, one open bucket per group and wire dtype.

    As in DDP's reducer a bucket is closed by the gradient that fills it to its cap. Buckets are
    launched in the order in which their last gradient arrives. A gradient of at least
    the largest cap, with the parameter's own real dtype on the wire, gets a direct bucket, and a
    sparse one a bucket of its own.

    Args:
        specs: one per parameter.
        order: indices into `specs`, in the order in which gradients arrive; each at most once.
        world_size: number of ranks.
        bucket_cap_bytes: cap of a bucket in bytes.
        leading_caps_bytes: caps of the first buckets of each group and dtype, one by one.
        has_flag: whether the last bucket gets a flag, which a direct bucket has no room for. It is
            a dense one, if there is any.
        is_packed: whether buckets hold the gradients and nothing else: no padding, no direct
            buckets, real and complex gradients apart.
        chunk_bytes: gradients are copied as soon as so many bytes of them are there (see
            `_Chunker`); None to copy a whole bucket at once.
    """
    open_buckets: dict[Hashable, list[int]] = {}
    open_bytes: dict[Hashable, int] = {}
    caps: dict[Hashable, deque[int]] = {}  # of the buckets to come, before the cap of all others
    closed: list[tuple[int, tuple[int, ...], bool]] = []  # (arrival of the last, params, is_direct)
    arrival = {param: position for position, param in enumerate(order)}
    for param in order:
        spec = specs[param]
        if spec.is_sparse:
            closed.append((arrival[param], (param,), False))
            continue
        key = (spec.group, spec.wire_dtype, is_packed and spec.dtype.is_complex)
        cap = caps.setdefault(key, deque(leading_caps_bytes))
        is_large = spec.nbytes >= max(bucket_cap_bytes, *leading_caps_bytes, 0)
        if is_large and spec.dtype == spec.wire_dtype and not is_packed:
            closed.append((arrival[param], (param,), True))
            if cap:
                cap.popleft()  # something is on its way already: no small first bucket
            continue
        open_buckets.setdefault(key, []).append(param)
        open_bytes[key] = open_bytes.get(key, 0) + spec.nbytes
        if open_bytes[key] >= (cap[0] if cap else bucket_cap_bytes):
            closed.append((arrival[param], tuple(open_buckets.pop(key)), False))
            if cap:
                cap.popleft()
            del open_bytes[key]
    closed += [(arrival[params[-1]], tuple(params), False) for params in open_buckets.values()]
    if not closed:
        return Layout((), tuple(specs))
    closed.sort()
    dense = [bucket for bucket in closed if not specs[bucket[1][0]].is_sparse]
    if has_flag and dense:
        closed.remove(dense[-1])
        closed.append(dense[-1])
    chunker = _Chunker(specs, chunk_bytes)
    last = len(closed) - 1
    buckets = []
    for index, (_, params, is_direct) in enumerate(closed):
        has_this_flag = has_flag and index == last
        bucket = _place(
            specs,
            params,
            world_size,
            is_direct=is_direct and not has_this_flag,
            has_flag=has_this_flag,
            is_packed=is_packed,
        )
        if not bucket.is_sparse:
            bucket = replace(bucket, chunks=chunker.split(params))
        buckets.append(bucket)
    return Layout(tuple(buckets), tuple(specs))


class _Chunker:
    """Splits buckets into chunks: few, so that copying is cheap, and small, so that memory is.

    A gradient waits for the rest of its chunk and takes memory meanwhile. A chunk may hold an
    eighth of the bytes that came before it in the backward, whose activations are free by then,
    at least a page, and at most `chunk_bytes`; a gradient that is larger is a chunk by itself.
    """

    def __init__(self, specs: Sequence[ParamSpec], chunk_bytes: int | None) -> None:
        self._specs = specs
        self._chunk_bytes = chunk_bytes
        self._bytes_before = 0

    def split(self, params: Sequence[int]) -> tuple[tuple[int, int], ...]:
        if self._chunk_bytes is None:
            return ((0, len(params)),)
        chunks = []
        start = held = 0
        for slot, param in enumerate(params):
            nbytes = self._specs[param].nbytes
            room = min(self._chunk_bytes, max(self._bytes_before // 8, _PAGE_BYTES))
            if slot > start and held + nbytes > room:
                chunks.append((start, slot))
                start, held = slot, 0
            held += nbytes
            self._bytes_before += nbytes
        return (*chunks, (start, len(params)))


def _place(
    specs: Sequence[ParamSpec],
    params: tuple[int, ...],
    world_size: int,
    *,
    is_direct: bool,
    has_flag: bool,
    is_packed: bool,
) -> BucketLayout:
    offsets = []
    end = 0
    for param in params:
        end = round_up(end, 1 if is_packed else ALIGNMENT)
        offsets.append(end)
        end += specs[param].numel
    first = specs[params[0]]
    shards = ALIGNMENT * world_size
    # At least one shard each, so that a bucket of empty gradients is no special case.
    padded_end = max(round_up(end + has_flag, shards), shards)
    return BucketLayout(
        params=params,
        offsets=tuple(offsets),
        numel=sum(specs[i].numel for i in params),
        padded_numel=end if is_direct or is_packed else padded_end,
        dtype=first.wire_dtype,
        group=first.group,
        chunks=((0, len(params)),),
        is_direct=is_direct,
        has_flag=has_flag,
        is_sparse=first.is_sparse,
    )


def round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
