"""The list of DDP tests: as ``ddp_tests.tsv`` has it, and as it is found in the installed wheel."""

from __future__ import annotations

import ast
import csv
import importlib.metadata
import importlib.util
from pathlib import Path
from typing import NamedTuple

# The wheel whose tests the data file lists. Another minor version has other tests.
TORCH = "2.13"

MODULE = "torch.testing._internal.distributed.distributed_test"
PATH = Path(__file__).with_name("ddp_tests.tsv")


class DdpTest(NamedTuple):
    """One row of the data file.

    ``mode`` is "plain" if the test runs on gloo and CPU as it is, "shim" if it needs the shim.
    ``expect`` is "pass", or "cannot" for a test that cannot pass here, with the ``reason``.
    """

    name: str
    mode: str
    expect: str
    reason: str


def load() -> list[DdpTest]:
    with PATH.open(newline="") as file:
        rows = list(csv.reader(file, delimiter="\t"))
    header = list(DdpTest._fields)
    assert rows[0] == header, f"expected the columns {header}, found {rows[0]}"
    return [DdpTest(*row) for row in rows[1:]]


def is_listed_version() -> bool:
    return installed_version().split(".")[:2] == TORCH.split(".")


def installed_version() -> str:
    return importlib.metadata.version("torch")


def find() -> set[str]:
    """The names of the DDP tests in the wheel.

    A test of ``DistributedTest._DistTestBase`` is one if it has DDP in its name, or if it, or a
    method of the class that it calls, refers to ``DistributedDataParallel``.
    """
    spec = importlib.util.find_spec(MODULE)
    assert spec is not None and spec.origin is not None, f"expected {MODULE} in the wheel of torch"
    tree = ast.parse(Path(spec.origin).read_text())
    base = next(
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef) and node.name == "_DistTestBase"
    )
    refers = {node.name: _names(node) for node in base.body if isinstance(node, ast.FunctionDef)}
    found = set()
    for name in refers:
        if not name.startswith("test_"):
            continue
        lower = name.lower()
        if "ddp" in lower or "distributeddataparallel" in lower or _uses_ddp(name, refers):
            found.add(name)
    return found


def _names(node: ast.AST) -> set[str]:
    names = set()
    for child in ast.walk(node):
        if isinstance(child, ast.Name):
            names.add(child.id)
        elif isinstance(child, ast.Attribute):
            names.add(child.attr)
    return names


def _uses_ddp(name: str, refers: dict[str, set[str]]) -> bool:
    seen: set[str] = set()
    pending = [name]
    while pending:
        names = refers[pending.pop()]
        if "DistributedDataParallel" in names:
            return True
        pending += (names & refers.keys()) - seen
        seen |= names
    return False
