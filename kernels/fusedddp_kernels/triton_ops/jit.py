"""What the kernels share: finding a tile, reading the scale, copying one tile."""

import triton
import triton.language as tl

from fusedddp_kernels import launch

_FP32 = tl.constexpr(launch.FP32)
_BF16 = tl.constexpr(launch.BF16)
_FP16 = tl.constexpr(launch.FP16)
_FP64 = tl.constexpr(launch.FP64)
_ACCESS_BYTES = tl.constexpr(launch.ACCESS_BYTES)


@triton.jit
def find_tile(layout_ptr, num_entries, BLOCK_SIZE: tl.constexpr):
    """This program's tile: its entry, first element in it, and how much of it there is.

    Returns `entry`, `start`, `offset` of the entry in the flat buffer (int64), and `count` and
    `room` (int32, 0 to `BLOCK_SIZE`): elements of the tensor, and with padding, from `start` on.
    """
    tile = tl.load(layout_ptr + 3 * num_entries + tl.program_id(0))
    entry = tile >> 32
    start = (tile & 0xFFFFFFFF) * BLOCK_SIZE
    numel = tl.load(layout_ptr + entry)
    span = tl.load(layout_ptr + num_entries + entry)
    offset = tl.load(layout_ptr + 2 * num_entries + entry)
    count = tl.minimum(tl.maximum(numel - start, 0), BLOCK_SIZE).to(tl.int32)
    room = tl.minimum(span - start, BLOCK_SIZE).to(tl.int32)
    return entry, start, offset, count, room


@triton.jit
def load_scale(scale_address, scale_code):
    """The scale in fp64; 1 if there is none, which changes no value that it multiplies."""
    scale = tl.full((), 1.0, tl.float64)
    if scale_code == _FP32:
        scale = tl.load(scale_address.to(tl.pointer_type(tl.float32))).to(tl.float64)
    elif scale_code == _FP64:
        scale = tl.load(scale_address.to(tl.pointer_type(tl.float64)))
    return scale


@triton.jit
def is_aligned(ptr):
    """Whether an access of `_ACCESS_BYTES` may start at `ptr`."""
    return ptr.to(tl.int64) % _ACCESS_BYTES == 0


@triton.jit
def as_aligned(ptr):
    """`ptr`, which is a multiple of `_ACCESS_BYTES`, so that the compiler knows it too.

    The detour over an integer is needed: the compiler keeps such a hint on a cast from an integer,
    and drops it from an argument or a sum. The mask keeps it from folding the two casts.
    """
    address = ptr.to(tl.int64) & -_ACCESS_BYTES
    return tl.multiple_of(address.to(ptr.dtype), _ACCESS_BYTES)


@triton.jit
def cast(value, DTYPE: tl.constexpr):
    """Rounds to nearest even; fp64 becomes a half dtype through fp32, as in torch."""
    if value.dtype == tl.float64 and DTYPE.primitive_bitwidth == 16:
        value = value.to(tl.float32)
    return value.to(DTYPE)


@triton.jit
def scaled(value, scale, dst_ptrs, mask, IS_ACCUMULATING: tl.constexpr):
    """`value * scale` as it goes to `dst_ptrs`, added to what is there if accumulating."""
    DST: tl.constexpr = dst_ptrs.dtype.element_ty
    COMPUTE: tl.constexpr = tl.float64 if value.dtype == tl.float64 else tl.float32
    value = value.to(COMPUTE) * scale.to(COMPUTE)
    if IS_ACCUMULATING:
        SUM: tl.constexpr = tl.float64 if DST == tl.float64 else COMPUTE
        value = tl.load(dst_ptrs, mask=mask, other=0.0).to(SUM) + value.to(SUM)
    return cast(value, DST)


@triton.jit
def copy_tile(
    dst_ptr,
    src_ptr,
    count,
    room,
    scale,
    IS_ACCUMULATING: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):
    """`dst[:count] = src[:count] * scale; dst[count:room] = 0`, for one tile.

    Where both addresses are multiples of 16 bytes, all but the last `count % 16` elements go in
    16-byte accesses: the mask ends at a multiple of 16, so no access is cut. What is left, or
    everything at other addresses, goes element by element.

    With BLOCK_SIZE 32, count 20, room 24 and aligned addresses: 16 elements in wide accesses, 4 one
    by one, then 4 zeros.
    """
    lanes = tl.arange(0, BLOCK_SIZE)
    wide = 0
    if is_aligned(dst_ptr) and is_aligned(src_ptr):
        wide = count // 16 * 16
        mask = lanes < tl.multiple_of(wide, 16)
        src_ptrs = as_aligned(src_ptr) + lanes
        dst_ptrs = as_aligned(dst_ptr) + lanes
        value = tl.load(src_ptrs, mask=mask)
        value = scaled(value, scale, dst_ptrs, mask, IS_ACCUMULATING)
        tl.store(dst_ptrs, value, mask=mask)
    # A loop, because it is mostly a few elements, and unrolled it makes most of the kernel's code.
    step: tl.constexpr = BLOCK_SIZE // 4
    lanes = tl.arange(0, step)
    for begin in range(wide // step * step, room, step):
        at = begin + lanes
        mask = (at >= wide) & (at < count)
        value = tl.load(src_ptr + at, mask=mask, other=0.0)
        value = scaled(value, scale, dst_ptr + at, mask, IS_ACCUMULATING)
        # Not 0 * scale: the scale may be inf or NaN.
        value = tl.where(at < count, value, 0.0).to(value.dtype)
        tl.store(dst_ptr + at, value, mask=(at >= wide) & (at < room))


@triton.jit
def zero_tile(dst_ptr, room, BLOCK_SIZE: tl.constexpr):
    """`dst[:room] = 0`, for one tile."""
    lanes = tl.arange(0, BLOCK_SIZE)
    zeros = tl.zeros([BLOCK_SIZE], dst_ptr.dtype.element_ty)
    tl.store(dst_ptr + lanes, zeros, mask=lanes < room)
