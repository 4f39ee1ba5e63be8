"""docs/compatibility.md lists all that the installed torch DDP has, and is right about it."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import fusedddp
from tests.models import mlp
from tests.ranks import Ranks

PAGE = Path(__file__).parents[1] / "docs" / "compatibility.md"
STATUSES = {"same", "better", "accepted", "differs", "not supported"}


def tables() -> dict[str, dict[str, str]]:
    """For each section of the page the names in its table, and their status."""
    found: dict[str, dict[str, str]] = {}
    section = ""
    for line in PAGE.read_text().splitlines():
        if line.startswith("## "):
            section = line.removeprefix("## ")
        row = re.match(r"\| `(\w+)` \| ([a-z ]+) \|", line)
        if row:
            assert row[1] not in found.setdefault(section, {}), f"{row[1]} is listed twice"
            found[section][row[1]] = row[2]
    return found


def test_statuses() -> None:
    for section, rows in tables().items():
        assert rows and set(rows.values()) <= STATUSES, section


@pytest.mark.skipif(
    not torch.__version__.startswith("2.13"), reason="the page lists what torch 2.13 has"
)
def test_every_name_of_ddp_is_listed(two_ranks: Ranks) -> None:
    sections = tables()
    keywords = set(inspect.signature(DistributedDataParallel.__init__).parameters) - {"self"}
    assert set(sections["Keywords"]) == keywords
    methods = {
        name for name in vars(DistributedDataParallel) if not name.startswith("__")
    } - {"_abc_impl"}  # fmt: skip
    listed = [rows for title, rows in sections.items() if "methods" in title]
    assert set().union(*listed) == methods
    attributes, _ = two_ranks.run(attributes_of_ddp)
    # Set by some calls only.
    assert set(sections["Attributes"]) == attributes | {"device_mesh", "buffer_hook"}


def attributes_of_ddp(rank: int) -> set[str]:
    wrapped = DistributedDataParallel(mlp())
    return (set(vars(wrapped)) - set(vars(nn.Module()))) | {"module"}


def uses_of_internals(method: Any) -> set[str]:
    """What a method of DDP reads of its reducer and logger, by its source."""
    function = getattr(method, "fget", None) or getattr(method, "__func__", method)
    if not inspect.isfunction(function):
        return set()
    return set(re.findall(r"self\.(?:reducer|logger)\.(\w+)", inspect.getsource(function)))


def check_not_supported(rank: int) -> None:
    wrapped = fusedddp.wrap(mlp())
    sections = tables()
    for title, rows in sections.items():
        for name, status in rows.items():
            if "methods" not in title:
                continue
            method = inspect.getattr_static(fusedddp.FusedDDP, name)
            if status == "not supported":
                with pytest.raises(NotImplementedError, match=rf"FusedDDP\.{name} belongs to"):
                    getattr(wrapped, name)()
            elif method is inspect.getattr_static(DistributedDataParallel, name):
                for attribute in uses_of_internals(method):
                    assert hasattr(wrapped.reducer, attribute) or hasattr(
                        wrapped.logger, attribute
                    ), f"{name} is inherited and uses {attribute}, which only C++ has"
    for name, status in sections["Attributes"].items():
        if name not in ("device_mesh", "buffer_hook"):
            assert hasattr(wrapped, name) == (status != "not supported"), name


def test_what_is_not_supported_says_so(two_ranks: Ranks) -> None:
    two_ranks.run(check_not_supported)
