"""Which line of the user's own code an event comes from, and which libraries it came through."""

from __future__ import annotations

import functools
import os
import sys
import sysconfig
from dataclasses import dataclass
from types import CodeType

import torch

from fusedddp.capture_report import Place

USER, TORCH, OURS, WATCHING, LIBRARY = "user", "torch", "ours", "watching", "library"

_HERE = os.path.dirname(os.path.abspath(__file__))
# The files that do the watching are on the stack of everything that they see.
_WATCHING = {
    os.path.join(_HERE, name)
    for name in ("capturable.py", "capture_places.py", "capture_watch.py", "capture_patches.py")
}


def _package_dir(name: str) -> str | None:
    module = sys.modules.get(name)
    file = getattr(module, "__file__", None)
    return os.path.dirname(os.path.abspath(file)) + os.sep if file else None


# What torch needs itself, and calls on its own account.
_DEPENDENCIES = (
    "numpy triton sympy mpmath networkx jinja2 markupsafe fsspec filelock typing_extensions"
).split()
_INSTALLED = ("site-packages", "dist-packages")
# Files of torch that are on the stack of whatever a mode sees.
_DISPATCHING = (
    "_compile.py",
    "_dynamo/eval_frame.py",
    "_ops.py",
    "overrides.py",
    "utils/_python_dispatch.py",
)


@functools.cache
def owner_of(file: str) -> str:
    """Whose code a file is: one of the constants above."""
    if file in _WATCHING:
        return WATCHING
    if file.startswith("<"):  # frozen and generated code, apart from what is typed in
        return USER if file.startswith(("<stdin", "<ipython", "<input", "<console")) else LIBRARY
    path = os.path.abspath(file)
    if path.startswith(torch_dir := _package_dir("torch") or "\0"):
        return WATCHING if path[len(torch_dir) :] in _DISPATCHING else TORCH
    if path.startswith((_HERE + os.sep, _package_dir("fusedddp_kernels") or "\0")):
        return OURS
    if any(path.startswith(_package_dir(name) or "\0") for name in _DEPENDENCIES):
        return LIBRARY
    if any(part in path for part in _INSTALLED):
        return USER  # other packages: the line in them is what the reader needs
    standard = {sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib")}
    return LIBRARY if path.startswith(tuple(p + os.sep for p in standard if p)) else USER


def is_installed(place: Place | None) -> bool:
    """Whether a line is in an installed package rather than in the user's own files."""
    return place is not None and any(part in place.file for part in _INSTALLED)


def is_users_own(file: str) -> bool:
    """Whether a file is the user's and not that of an installed package."""
    return owner_of(file) == USER and not any(part in file for part in _INSTALLED)


@dataclass(frozen=True)
class Origin:
    """Where an event comes from.

    Attributes:
        place: the innermost line of the user's own code.
        through: functions of torch between that line and the event, innermost first, as
            (path within torch, name of the function).
        is_ours: whether fusedddp lies between.
        is_direct: whether nothing lies between.
    """

    place: Place | None
    through: tuple[tuple[str, str], ...]
    is_ours: bool
    is_direct: bool

    @property
    def in_backward(self) -> bool:
        """Whether the autograd engine lies between, rather than code called by it."""
        return ("autograd/graph.py", "_engine_run_backward") in self.through

    def passes(self, *prefixes: str) -> bool:
        return any(path.startswith(prefixes) for path, _ in self.through)


class Places:
    """Finds origins on the stack of a running check.

    Args:
        entry: the code that calls the step; what lies outside of it is no part of the step.
        caller: the line that asked for the check, for steps without code of their own.
    """

    def __init__(self, entry: CodeType, caller: Place) -> None:
        self._entry = entry
        self._caller = caller
        self._forward_lines: dict[int, Place] = {}

    def origin(self) -> Origin:
        """The origin of what is running now, seen from the caller of this method."""
        torch_dir = _package_dir("torch") or ""
        through: list[tuple[str, str]] = []
        is_ours, is_direct = False, True
        frame = sys._getframe(1)
        place: Place | None = None
        while frame is not None:
            code = frame.f_code
            if code is self._entry:
                place = self._caller
                break
            owner = owner_of(code.co_filename)
            if owner == USER:
                place = Place(code.co_filename, frame.f_lineno)
                break
            if owner == TORCH:
                path = code.co_filename[len(torch_dir) :].replace(os.sep, "/")
                through.append((path, code.co_name))
            is_ours |= owner == OURS
            is_direct &= owner == WATCHING
            frame = frame.f_back  # type: ignore[assignment]
        return Origin(place, tuple(through), is_ours, is_direct)

    def is_importing(self) -> bool:
        """Whether a module is being imported, which happens once and not in every step."""
        frame = sys._getframe(1)
        while frame is not None and frame.f_code is not self._entry:
            if frame.f_code.co_filename.startswith("<frozen importlib"):
                return True
            frame = frame.f_back  # type: ignore[assignment]
        return False

    def note_forward(self) -> None:
        """Remembers the current line as that of the autograd node which is being made."""
        place = self.origin().place
        if place is not None:
            # The node is made, and counted, before its operator runs.
            self._forward_lines[torch._C._autograd._get_sequence_nr() - 1] = place

    def forward_line(self) -> Place | None:
        """The line that made the autograd node which is running, if that is known."""
        node = torch._C._current_autograd_node()
        return None if node is None else self._forward_lines.get(node._sequence_nr())

    def blame(self, origin: Origin) -> Place:
        """The line to show: in a backward that of the forward, where it is known."""
        if origin.in_backward or origin.place is None:
            return self.forward_line() or origin.place or self._caller
        return origin.place
