"""What the compiler made of every kernel, for GPUs that this machine does not have.

    python -m fusedddp_kernels.report --arch sm_90 --arch gfx942

prints one row per kernel and combination of dtypes in its default configuration: width of the
loads and stores of full tiles, registers, shared memory, stack, spills, code size. The exit status
is 1 if a kernel spills, needs a stack, or moves a full tile in accesses narrower than 128 bits.
"""

from __future__ import annotations

import argparse
import collections
import itertools
import re
import struct
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from fusedddp_kernels.launch import ACCESS_BYTES, DEFAULT_CONFIG, DEFAULT_TREE
from fusedddp_kernels.triton_ops.flatten import flatten_kernel
from fusedddp_kernels.triton_ops.grad_stats import combine_stats_kernel, tile_stats_kernel
from fusedddp_kernels.triton_ops.operators import OPTIONS, is_interpreted
from fusedddp_kernels.triton_ops.scale import scale_kernel
from fusedddp_kernels.triton_ops.unflatten import unflatten_kernel

DEFAULT_ARCHS = ("sm_80", "sm_90", "sm_100", "gfx942")
_SIZES = {"fp32": 4, "bf16": 2, "fp16": 2, "fp64": 8}
_ALL = sum(_SIZES.values())
# Types of arguments that are the same in every specialisation.
_FIXED = {
    "addresses_ptr": "*i64",
    "layout_ptr": "*i64",
    "bounds_ptr": "*i64",
    "num_bad_ptr": "*i64",
    "bad_ptr": "*i32",
    "num_entries": "i64",
    "numel": "i64",
    "scale_address": "i64",
    "scale_code": "i32",
}


@dataclass(frozen=True)
class Specialisation:
    """One kernel, compiled for one choice of dtypes and constants.

    Attributes:
        kernel: the Triton function.
        dtypes: Triton's names of the dtypes of the remaining pointers.
        constants: values of the `constexpr` arguments.
        block_size: elements of a full tile.
        num_warps: warps of a program, by the size of a warp.
        load_bytes: what a full tile loads in its wide path per element, over all dtypes of tensors
            that the kernel branches on; 0 where it has no wide path.
        store_bytes: the same for stores.
    """

    kernel: Any
    dtypes: dict[str, str]
    constants: dict[str, int]
    block_size: int
    num_warps: Callable[[int], int]
    load_bytes: int = 0
    store_bytes: int = 0

    @property
    def label(self) -> str:
        flags = [name for name, value in self.constants.items() if value is True]
        return " ".join([*dict.fromkeys(self.dtypes.values()), *flags])

    def compile(self, target: GPUTarget) -> Any:
        names = self.kernel.arg_names
        types = {name: "constexpr" for name in self.constants}
        types |= {name: "*" + dtype for name, dtype in self.dtypes.items()}
        signature = {name: types.get(name) or _FIXED[name] for name in names}
        source = ASTSource(self.kernel, signature, self.constants, {})
        options = {"num_warps": self.num_warps(target.warp_size), **OPTIONS}
        return triton.compile(source, target=target, options=options)


@dataclass(frozen=True)
class Row:
    """One line of the report; widths in bits, the rest in bytes but for `registers`."""

    arch: str
    kernel: str
    dtypes: str
    block: int
    warps: int
    load: int
    store: int
    registers: int
    shared: int
    stack: int
    spills: int
    code: int

    @property
    def problems(self) -> list[str]:
        found = [
            f"{what} of full tiles narrower than 128 bits"
            for what, width in (("loads", self.load), ("stores", self.store))
            if 0 < width < 8 * ACCESS_BYTES
        ]
        found += [f"{self.spills} spills"] if self.spills else []
        found += [f"{self.stack} bytes of stack"] if self.stack else []
        return found


def specialisations() -> Iterator[Specialisation]:
    """Everything that the launchers launch with the default configuration."""

    def warps(warp_size: int) -> int:
        return DEFAULT_CONFIG.num_warps

    def stats_warps(warp_size: int) -> int:
        return DEFAULT_TREE.num_threads // warp_size

    block = DEFAULT_CONFIG.block_size
    tile = {"BLOCK_SIZE": block}
    for dtype, size in _SIZES.items():
        flat = {"flat_ptr": dtype}
        yield Specialisation(flatten_kernel, flat, tile, block, warps, _ALL, 4 * size)
        for adds in (False, True):
            yield Specialisation(
                unflatten_kernel,
                flat,
                {"IS_ACCUMULATING": adds, **tile},
                block,
                warps,
                4 * size + adds * _ALL,
                _ALL,
            )
        yield Specialisation(scale_kernel, {"data_ptr": dtype}, tile, block, warps, size, size)
        compute = "fp64" if dtype == "fp64" else "fp32"
        yield Specialisation(
            tile_stats_kernel,
            {"flat_ptr": dtype, "sums_ptr": compute},
            {"WIDTH": DEFAULT_TREE.width, "BLOCK_SIZE": DEFAULT_TREE.block_size},
            DEFAULT_TREE.block_size,
            stats_warps,
            size,
        )
    for dtype in ("fp32", "fp64"):
        yield Specialisation(
            combine_stats_kernel,
            {"sums_ptr": dtype, "total_ptr": dtype},
            {"WIDTH": DEFAULT_TREE.combine_width},
            DEFAULT_TREE.combine_width,
            stats_warps,
        )


def make_report(archs: Iterable[str]) -> Iterator[Row]:
    """Compiles every specialisation for every GPU.

    Args:
        archs: names such as sm_90 or gfx942.

    Raises:
        ValueError: a name is neither.
    """
    for arch, spec in itertools.product(archs, list(specialisations())):
        target = parse_arch(arch)
        compiled = spec.compile(target)
        resources = (_read_nvidia if target.backend == "cuda" else _read_amd)(compiled)
        is_nvidia = target.backend == "cuda"
        assembly = compiled.asm["ptx" if is_nvidia else "amdgcn"]
        loads, stores = (_count_nvidia if is_nvidia else _count_amd)(assembly)
        per_thread = spec.block_size // (compiled.metadata.num_warps * target.warp_size)
        yield Row(
            arch=arch,
            kernel=spec.kernel.__name__,
            dtypes=spec.label,
            block=spec.block_size,
            warps=compiled.metadata.num_warps,
            load=_width(loads, spec.load_bytes * per_thread),
            store=_width(stores, spec.store_bytes * per_thread),
            shared=compiled.metadata.shared,
            code=_code_bytes(compiled.kernel),
            **resources,
        )


def parse_arch(arch: str) -> GPUTarget:
    if match := re.fullmatch(r"sm_(\d+)", arch):
        return GPUTarget("cuda", int(match[1]), 32)
    if re.fullmatch(r"gfx9\w+", arch):
        return GPUTarget("hip", arch, 64)
    raise ValueError(f"expected a name such as sm_90 or gfx942, found {arch!r}")


def _width(accesses: collections.Counter[int], expected: int) -> int:
    """The narrowest width with which `expected` bytes of a thread's full tiles can have moved.

    Accesses are told apart by width only: the path for other addresses has narrow ones of its own.
    So the widest are taken first, until they make up what full tiles move.
    """
    for size in sorted(accesses, reverse=True):
        if expected <= 0:
            break
        expected -= size * accesses[size]
        if expected <= 0:
            return 8 * size
    return 0


def _count_nvidia(ptx: str) -> tuple[collections.Counter[int], collections.Counter[int]]:
    """Number of global loads and stores by size in bytes."""

    def count(verb: str) -> collections.Counter[int]:
        pattern = rf"\b{verb}\.global(?:\.\w+)*?(?:\.v(\d))?\.[bfsu](\d+)\b"
        return collections.Counter(
            int(lanes or 1) * int(bits) // 8 for lanes, bits in re.findall(pattern, ptx)
        )

    return count("ld"), count("st")


def _count_amd(assembly: str) -> tuple[collections.Counter[int], collections.Counter[int]]:
    sizes = {"byte": 1, "ubyte": 1, "ushort": 2, "short": 2, "short_d16": 2, "short_d16_hi": 2}
    sizes |= {"dword": 4, "dwordx2": 8, "dwordx3": 12, "dwordx4": 16}

    def count(verb: str) -> collections.Counter[int]:
        names = re.findall(rf"\b(?:global|buffer|flat)_{verb}_(\w+)", assembly)
        return collections.Counter(sizes[name] for name in names if name in sizes)

    return count("load"), count("store")


def _read_nvidia(compiled: Any) -> dict[str, int]:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.kernel)
        file.flush()
        usage = _run(triton.knobs.nvidia.cuobjdump.path, "-res-usage", file.name)
        code = _run(triton.knobs.nvidia.nvdisasm.path, "-c", file.name)
    numbers = {name: int(value) for name, value in re.findall(r"\b([A-Z]+):(\d+)", usage)}
    spills = len(re.findall(r"\b(?:STL|LDL)\b", code))
    return {"registers": numbers["REG"], "stack": numbers["STACK"], "spills": spills}


def _read_amd(compiled: Any) -> dict[str, int]:
    def read(name: str) -> int:
        match = re.search(rf"\.{name}:\s*(\d+)", compiled.asm["amdgcn"])
        assert match, f"no {name} in the assembly"
        return int(match[1])

    return {
        "registers": read("vgpr_count"),
        "stack": read("private_segment_fixed_size"),
        "spills": read("vgpr_spill_count") + read("sgpr_spill_count"),
    }


def _run(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def _code_bytes(elf: bytes) -> int:
    """Size of all `.text` sections of a 64-bit little-endian ELF file."""
    table_offset, header_size, number, names_index = struct.unpack_from("<40xQ10xHHH", elf)
    headers = [
        struct.unpack_from("<II8xQQQ", elf, table_offset + index * header_size)
        for index in range(number)
    ]
    names_at = headers[names_index][3]
    return sum(
        size for name, _, _, _, size in headers if elf[names_at + name :].startswith(b".text")
    )


def _print_rows(rows: Iterable[Row], write: Callable[[str], object]) -> list[str]:
    """Prints the table as it is made; returns what is wrong."""
    widths = (7, 21, 21, 6, 6, 5, 6, 10, 7, 6, 7, 6)
    names = list(Row.__dataclass_fields__)
    write("".join(name.ljust(width) for name, width in zip(names, widths, strict=True)))
    wrong = []
    for row in rows:
        cells = [str(getattr(row, name) or "-") for name in names]
        write("".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)))
        wrong += [f"{row.arch} {row.kernel} {row.dtypes}: {text}" for text in row.problems]
    return wrong


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="fusedddp_kernels.report", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument(
        "--arch", action="append", help=f"GPU; may be repeated; by default {DEFAULT_ARCHS}"
    )
    options = parser.parse_args(arguments)
    if is_interpreted():
        parser.error("expected compiled kernels, found TRITON_INTERPRET set: unset it")
    archs = options.arch or DEFAULT_ARCHS
    try:
        for arch in archs:
            parse_arch(arch)
    except ValueError as error:
        parser.error(str(error))
    wrong = _print_rows(make_report(archs), lambda line: print(line.rstrip(), flush=True))
    for line in wrong:
        print(f"wrong: {line}", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
