"""Tensors anywhere in memory -> one flat buffer, in one launch.

    flat[offset[i] : offset[i] + numel[i]] = cast(source[i] * scale)
    flat[offset[i] + numel[i] : offset[i] + span[i]] = 0

for every entry i of a table; a source that is absent is all zeros.
"""

import triton
import triton.language as tl

from fusedddp_kernels.triton_ops.jit import (
    _BF16,
    _FP16,
    _FP32,
    _FP64,
    copy_tile,
    find_tile,
    load_scale,
    zero_tile,
)


@triton.jit(do_not_specialize=[0, 1, 2, 3, 4, 5])
def flatten_kernel(
    flat_ptr,
    addresses_ptr,
    layout_ptr,
    num_entries: tl.int64,
    scale_address: tl.int64,
    scale_code: tl.int32,
    BLOCK_SIZE: tl.constexpr,
):
    """One program copies one tile of one source; see `table.py` for what the table holds.

    flat_ptr: [numel]; addresses_ptr: [2, num_entries]; layout_ptr: [3 * num_entries + num_tiles].
    Example: sources of 5 and 3 elements at offsets 0 and 16 of a buffer of 32, BLOCK_SIZE 16: tile
    0 writes 5 values and 11 zeros, tile 1 writes 3 values and 13 zeros.
    """
    entry, start, offset, count, room = find_tile(layout_ptr, num_entries, BLOCK_SIZE)
    address = tl.load(addresses_ptr + entry)
    code = tl.load(addresses_ptr + num_entries + entry)
    scale = load_scale(scale_address, scale_code)
    dst = flat_ptr + offset + start
    if code == _FP32:
        src = address.to(tl.pointer_type(tl.float32)) + start
        copy_tile(dst, src, count, room, scale, False, BLOCK_SIZE)
    elif code == _BF16:
        src = address.to(tl.pointer_type(tl.bfloat16)) + start
        copy_tile(dst, src, count, room, scale, False, BLOCK_SIZE)
    elif code == _FP16:
        src = address.to(tl.pointer_type(tl.float16)) + start
        copy_tile(dst, src, count, room, scale, False, BLOCK_SIZE)
    elif code == _FP64:
        src = address.to(tl.pointer_type(tl.float64)) + start
        copy_tile(dst, src, count, room, scale, False, BLOCK_SIZE)
    else:
        zero_tile(dst, room, BLOCK_SIZE)
