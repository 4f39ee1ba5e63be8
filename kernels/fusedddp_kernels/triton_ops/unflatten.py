"""One flat buffer -> tensors anywhere in memory, in one launch: the inverse of flatten.

    destination[i] = cast(flat[offset[i] : offset[i] + numel[i]] * scale)

for every entry i of a table, or `+=` when accumulating; absent destinations are skipped.
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
)


@triton.jit(do_not_specialize=[0, 1, 2, 3, 4, 5])
def unflatten_kernel(
    flat_ptr,
    addresses_ptr,
    layout_ptr,
    num_entries: tl.int64,
    scale_address: tl.int64,
    scale_code: tl.int32,
    IS_ACCUMULATING: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):
    """One program copies one tile to one destination; see `table.py` for what the table holds.

    flat_ptr: [numel]; addresses_ptr: [2, num_entries]; layout_ptr: [3 * num_entries + num_tiles].
    Example: slots of 5 and 3 elements at offsets 0 and 16, the second skipped, BLOCK_SIZE 16: tile
    0 writes 5 values, tile 1 none.
    """
    entry, start, offset, count, _ = find_tile(layout_ptr, num_entries, BLOCK_SIZE)
    address = tl.load(addresses_ptr + entry)
    code = tl.load(addresses_ptr + num_entries + entry)
    scale = load_scale(scale_address, scale_code)
    src = flat_ptr + offset + start
    if code == _FP32:
        dst = address.to(tl.pointer_type(tl.float32)) + start
        copy_tile(dst, src, count, count, scale, IS_ACCUMULATING, BLOCK_SIZE)
    elif code == _BF16:
        dst = address.to(tl.pointer_type(tl.bfloat16)) + start
        copy_tile(dst, src, count, count, scale, IS_ACCUMULATING, BLOCK_SIZE)
    elif code == _FP16:
        dst = address.to(tl.pointer_type(tl.float16)) + start
        copy_tile(dst, src, count, count, scale, IS_ACCUMULATING, BLOCK_SIZE)
    elif code == _FP64:
        dst = address.to(tl.pointer_type(tl.float64)) + start
        copy_tile(dst, src, count, count, scale, IS_ACCUMULATING, BLOCK_SIZE)
