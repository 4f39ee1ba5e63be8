"""The kernels as `torch.library` operators: profilers show their names, dispatch modes see them,
and `torch.compile` does not look into them.

An operator takes tensors on one device, and for the tensors that a table lists, only the table:
each argument costs host time at each launch. `launchers.py` checks and calls; nothing else should.
"""

from __future__ import annotations

import contextlib
import functools
from typing import Any

import torch
import triton
from torch import Tensor

from fusedddp_kernels.launch import ABSENT, DTYPE_CODES
from fusedddp_kernels.triton_ops.flatten import flatten_kernel
from fusedddp_kernels.triton_ops.grad_stats import combine_stats_kernel, tile_stats_kernel
from fusedddp_kernels.triton_ops.scale import scale_kernel
from fusedddp_kernels.triton_ops.unflatten import unflatten_kernel

# Products and sums round as in torch: no fused multiply-add.
OPTIONS = {"enable_fp_fusion": False}

_library = torch.library.Library("fusedddp", "DEF")
_library.define(
    "flatten(Tensor(a!) flat, Tensor addresses, Tensor layout, Tensor? scale, int num_entries, "
    "int num_tiles, int block_size, int num_warps) -> ()"
)
# Destinations are known by address only, so the schema names the table as what is written: an
# operator that writes nothing may be dropped by a compiler.
_library.define(
    "unflatten(Tensor flat, Tensor(a!) addresses, Tensor layout, Tensor? scale, int num_entries, "
    "int num_tiles, bool accumulate, int block_size, int num_warps) -> ()"
)
_library.define("scale_(Tensor(a!) data, Tensor scale, int block_size, int num_warps) -> ()")
_library.define(
    "grad_stats(Tensor flat, Tensor layout, Tensor bounds, int num_entries, int num_tiles, "
    "int block_size, int width, int combine_width, int num_threads) -> (Tensor, Tensor)"
)

# Kernels compiled for a device. Triton's own look-up costs as much again as the launch.
_compiled: dict[tuple[Any, ...], Any] = {}


def _flatten(
    flat: Tensor,
    addresses: Tensor,
    layout: Tensor,
    scale: Tensor | None,
    num_entries: int,
    num_tiles: int,
    block_size: int,
    num_warps: int,
) -> None:
    arguments = (flat, addresses, layout, num_entries, *_scale_arguments(scale), block_size)
    _launch(flatten_kernel, num_tiles, arguments, flat, num_warps, block_size)


def _unflatten(
    flat: Tensor,
    addresses: Tensor,
    layout: Tensor,
    scale: Tensor | None,
    num_entries: int,
    num_tiles: int,
    accumulate: bool,
    block_size: int,
    num_warps: int,
) -> None:
    table = (flat, addresses, layout, num_entries)
    arguments = (*table, *_scale_arguments(scale), accumulate, block_size)
    _launch(unflatten_kernel, num_tiles, arguments, flat, num_warps, accumulate, block_size)


def _scale(data: Tensor, scale: Tensor, block_size: int, num_warps: int) -> None:
    num_tiles = -(-data.numel() // block_size)
    arguments = (data, data.numel(), *_scale_arguments(scale), block_size)
    _launch(scale_kernel, num_tiles, arguments, data, num_warps, block_size)


def _grad_stats(
    flat: Tensor,
    layout: Tensor,
    bounds: Tensor,
    num_entries: int,
    num_tiles: int,
    block_size: int,
    width: int,
    combine_width: int,
    num_threads: int,
) -> tuple[Tensor, Tensor]:
    total, num_bad = _empty_stats(flat, bounds)
    num_warps = num_threads // _warp_size(flat.device)
    sums = torch.empty(num_tiles, dtype=total.dtype, device=flat.device)
    bad = torch.empty(num_tiles, dtype=torch.int32, device=flat.device)
    arguments: tuple[Any, ...] = (flat, layout, num_entries, sums, bad, width, block_size)
    _launch(tile_stats_kernel, num_tiles, arguments, flat, num_warps, width, block_size)
    arguments = (sums, bad, bounds, total, num_bad, combine_width)
    _launch(combine_stats_kernel, total.numel(), arguments, sums, num_warps, combine_width)
    return total, num_bad


def _fake_grad_stats(
    flat: Tensor, layout: Tensor, bounds: Tensor, *sizes: int
) -> tuple[Tensor, Tensor]:
    return _empty_stats(flat, bounds)


def _empty_stats(flat: Tensor, bounds: Tensor) -> tuple[Tensor, Tensor]:
    compute = torch.float64 if flat.dtype == torch.float64 else torch.float32
    return (
        torch.empty(bounds.numel() - 1, dtype=compute, device=flat.device),
        torch.empty(bounds.numel() - 1, dtype=torch.int64, device=flat.device),
    )


for _name, _function in (
    ("flatten", _flatten),
    ("unflatten", _unflatten),
    ("scale_", _scale),
    ("grad_stats", _grad_stats),
):
    # On CPU it is Triton's interpreter that runs them, if it was switched on before the import.
    for _device in ("CPU", "CUDA"):
        _library.impl(_name, _function, _device)
for _name in ("flatten", "unflatten", "scale_"):
    torch.library.register_fake(f"fusedddp::{_name}", lambda *arguments: None, lib=_library)
torch.library.register_fake("fusedddp::grad_stats", _fake_grad_stats, lib=_library)


def is_interpreted() -> bool:
    """Whether the kernels run on CPU tensors, in Triton's interpreter."""
    return not isinstance(flatten_kernel, triton.JITFunction)


def _scale_arguments(scale: Tensor | None) -> tuple[int, int]:
    return (0, ABSENT) if scale is None else (scale.data_ptr(), DTYPE_CODES[scale.dtype])


@functools.cache
def _warp_size(device: torch.device) -> int:
    if device.type == "cpu":
        return 32
    return int(torch.cuda.get_device_properties(device).warp_size)


def _launch(
    kernel: Any,
    num_programs: int,
    arguments: tuple[Any, ...],
    data: Tensor,
    num_warps: int,
    *constants: int,
) -> None:
    """Launches `kernel`, compiled for the device and dtype of `data` and for `constants`."""
    if num_programs == 0:
        return
    grid = (num_programs, 1, 1)
    if is_interpreted():
        kernel[grid](*arguments)
        return
    device = data.device.index
    with _on(device):
        key = (kernel, data.dtype, device, num_warps, *constants)
        compiled = _compiled.get(key)
        if compiled is None:
            compiled = kernel.warmup(*arguments, grid=grid, num_warps=num_warps, **OPTIONS)
            _compiled[key] = compiled
        compiled[grid](*arguments)


def _on(device: int) -> contextlib.AbstractContextManager[None]:
    """Triton launches on the current device."""
    if device == torch.cuda.current_device():
        return contextlib.nullcontext()
    return torch.cuda.device(device)
