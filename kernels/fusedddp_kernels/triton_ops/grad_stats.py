"""Sum of squares and number of non-finite values of the slots of a flat buffer, in two launches.

The order of every addition is spelled out (see `launch.StatsTree`), so the result has the same
bits whatever the compiler, the GPU, or the order in which programs run; `reference.py` repeats it.
A built-in reduction would add in an order that depends on the layout of registers.
"""

import triton
import triton.language as tl

from fusedddp_kernels.triton_ops.jit import as_aligned, find_tile, is_aligned


@triton.jit
def _add_pairs(values, NUM_VALUES: tl.constexpr):
    """[NUM_VALUES] -> [1]: neighbours are added until one is left."""
    LEVELS: tl.constexpr = NUM_VALUES.bit_length() - 1
    for level in tl.static_range(LEVELS):
        # A sum of two has one order only.
        values = tl.sum(tl.reshape(values, [NUM_VALUES >> (level + 1), 2]), axis=1)
    return values


@triton.jit
def _add_row(sums, bad, values):
    """Adds a row of squares, and counts what is neither finite nor masked."""
    values = values.to(sums.dtype)
    is_finite = tl.abs(values) < float("inf")
    return sums + values * values, bad + tl.where(is_finite, 0, 1)


@triton.jit(do_not_specialize=[0, 1, 2, 3, 4])
def tile_stats_kernel(
    flat_ptr,
    layout_ptr,
    num_entries: tl.int64,
    sums_ptr,
    bad_ptr,
    WIDTH: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):
    """First stage: one program, one tile of one slot, one sum and one count.

    flat_ptr: [numel]; layout_ptr: [3 * num_entries + num_tiles]; sums_ptr, bad_ptr: [num_tiles].
    Example: values 1, 2, 3 with WIDTH 2 and BLOCK_SIZE 4: rows (1, 4) and (9, 0), then 10 + 4.
    """
    _, start, offset, count, _ = find_tile(layout_ptr, num_entries, BLOCK_SIZE)
    src = flat_ptr + offset + start
    lanes = tl.arange(0, WIDTH)
    sums = tl.zeros([WIDTH], sums_ptr.dtype.element_ty)
    bad = tl.zeros([WIDTH], tl.int32)
    if is_aligned(src) and count == BLOCK_SIZE:
        src_ptrs = as_aligned(src) + lanes
        for row in tl.static_range(0, BLOCK_SIZE, WIDTH):
            sums, bad = _add_row(sums, bad, tl.load(src_ptrs + row))
    else:
        for row in tl.static_range(0, BLOCK_SIZE, WIDTH):
            values = tl.load(src + row + lanes, mask=row + lanes < count, other=0.0)
            sums, bad = _add_row(sums, bad, values)
    one = tl.program_id(0) + tl.arange(0, 1)
    tl.store(sums_ptr + one, _add_pairs(sums, WIDTH))
    tl.store(bad_ptr + tl.program_id(0), tl.sum(bad, axis=0))


@triton.jit(do_not_specialize=[0, 1, 2, 3, 4])
def combine_stats_kernel(
    sums_ptr, bad_ptr, bounds_ptr, total_ptr, num_bad_ptr, WIDTH: tl.constexpr
):
    """Second stage: one program adds the sums and counts of one range of tiles.

    sums_ptr, bad_ptr: [num_tiles]; bounds_ptr: [num_ranges + 1], ascending; total_ptr, num_bad_ptr:
    [num_ranges]. Example: bounds 0, 2, 3: the first program adds tiles 0 and 1, the second tile 2.
    """
    program = tl.program_id(0)
    begin = tl.load(bounds_ptr + program)
    end = tl.load(bounds_ptr + program + 1)
    lanes = tl.arange(0, WIDTH)
    sums = tl.zeros([WIDTH], sums_ptr.dtype.element_ty)
    bad = tl.zeros([WIDTH], tl.int64)
    for row in range(begin, end, WIDTH):
        mask = row + lanes < end
        sums += tl.load(sums_ptr + row + lanes, mask=mask, other=0.0)
        bad += tl.load(bad_ptr + row + lanes, mask=mask, other=0)
    tl.store(total_ptr + program + tl.arange(0, 1), _add_pairs(sums, WIDTH))
    tl.store(num_bad_ptr + program, tl.sum(bad, axis=0))
