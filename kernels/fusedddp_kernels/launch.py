"""Launch configuration and the numbers that kernels know dtypes by: pure data, no Triton."""

from __future__ import annotations

from dataclasses import dataclass

import torch

# 0 stands for an absent tensor, and for a scale of 1. The values appear in tables on the device.
ABSENT = 0
FP32 = 1
BF16 = 2
FP16 = 3
FP64 = 4
DTYPE_CODES = {
    torch.float32: FP32,
    torch.bfloat16: BF16,
    torch.float16: FP16,
    torch.float64: FP64,
}

# Bytes of one access of the fast path, and what an address must be a multiple of to take it.
ACCESS_BYTES = 16


def _is_power_of_two(value: int) -> bool:
    return value > 0 and value & (value - 1) == 0


@dataclass(frozen=True, slots=True)
class LaunchConfig:
    """Tile size and warps of the kernels that copy.

    The defaults give each of 256 threads (512 on AMD) 16 (8) elements: several independent 16-byte
    loads in flight. Not yet tuned on hardware. There is no search at run time: it would happen
    inside of a graph capture.

    Attributes:
        block_size: elements of one tile, which one program copies; a power of two from 16 on.
        num_warps: warps of one program; a power of two.

    Raises:
        ValueError: a value is not as described.
    """

    block_size: int = 4096
    num_warps: int = 8

    def __post_init__(self) -> None:
        if not _is_power_of_two(self.block_size) or self.block_size < 16:
            raise ValueError(
                f"expected a power of two from 16 on as block_size, found {self.block_size}"
            )
        if not _is_power_of_two(self.num_warps):
            raise ValueError(f"expected a power of two as num_warps, found {self.num_warps}")


@dataclass(frozen=True, slots=True)
class StatsTree:
    """The order in which `grad_stats` adds, which decides the bits of its result.

    First stage: a tile of `block_size` elements is seen as rows of `width`; squares are added row
    by row, and the `width` sums are added pairwise (0+1, 2+3, ...) until one is left. Second stage:
    the same over the tiles' sums, as rows of `combine_width`. Whatever is missing counts as zero.

    Attributes:
        block_size: elements of a tile; a multiple of `width`.
        width: 2,048 gives each of 256 threads 8 neighbours, one 16-byte load of a half dtype.
        combine_width: sums that the second stage adds at once.
        num_threads: of a program; does not touch the result. (Not warps: theirs are twice as large
            on AMD, and too few elements would be left for each thread to read them 16 bytes wide.)
    """

    block_size: int = 4096
    width: int = 2048
    combine_width: int = 1024
    num_threads: int = 256

    def __post_init__(self) -> None:
        for name in ("block_size", "width", "combine_width", "num_threads"):
            if not _is_power_of_two(getattr(self, name)):
                raise ValueError(f"expected a power of two as {name}, found {getattr(self, name)}")
        if self.width > self.block_size:
            raise ValueError(
                f"expected a width of at most block_size, found {self.width} > {self.block_size}"
            )


DEFAULT_CONFIG = LaunchConfig()
DEFAULT_TREE = StatsTree()
