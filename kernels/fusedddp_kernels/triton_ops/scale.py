"""`tensor *= scale`, in place, for one stretch of memory."""

import triton
import triton.language as tl

from fusedddp_kernels.triton_ops.jit import copy_tile, load_scale


@triton.jit(do_not_specialize=[0, 1, 2, 3])
def scale_kernel(
    data_ptr,
    numel: tl.int64,
    scale_address: tl.int64,
    scale_code: tl.int32,
    BLOCK_SIZE: tl.constexpr,
):
    """One program multiplies BLOCK_SIZE elements of data_ptr: [numel]."""
    start = tl.program_id(0).to(tl.int64) * BLOCK_SIZE
    count = tl.minimum(numel - start, BLOCK_SIZE).to(tl.int32)
    scale = load_scale(scale_address, scale_code)
    copy_tile(data_ptr + start, data_ptr + start, count, count, scale, False, BLOCK_SIZE)
