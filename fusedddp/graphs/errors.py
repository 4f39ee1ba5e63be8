"""Errors in a capture, in words: which operation, whose line, what to do instead."""

from __future__ import annotations

import linecache
import sysconfig
import traceback
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

import torch

_STDLIB = {str(Path(sysconfig.get_paths()[key])) for key in ("stdlib", "platstdlib")}
_OURS = {str(Path(__file__).parent.parent)}
_TORCH = {str(Path(torch.__file__).parent)}

# What is found in torch's message, or in the line; what that does, and what to do instead.
_ADVICE: tuple[tuple[tuple[str, ...], tuple[str, ...], str, str], ...] = (
    (
        ("capturable",),
        (),
        "steps with an optimizer that is not made for graphs",
        "Make it with capturable=True.",
    ),
    (
        ("::nonzero", "::masked_select", "::_unique2", "::index"),
        ("nonzero(", "masked_select(", "unique(", "bincount(", "torch.where(mask)"),
        "makes a tensor whose size depends on values, which the host has to read",
        "Use a size that does not depend on values: torch.where, or multiply with a mask.",
    ),
    (
        (),
        ("print(",),
        "prints a tensor, whose values the host has to read",
        "Return the tensor from the step and print it after the call.",
    ),
    (
        ("::_local_scalar_dense",),
        (".item(", ".tolist(", "float(", "int(", "bool(", "if ", "while "),
        "reads a value on the host, which waits for the device",
        "Keep the value in a tensor (torch.where, clamp), or return it and read it after the call.",
    ),
    (
        (),
        (".cpu(", ".numpy(", "to('cpu", 'to("cpu'),
        "copies to the host and waits for it",
        "Return the tensor from the step and copy it after the call.",
    ),
    (
        (),
        ("torch.tensor(", "as_tensor(", ".cuda(", ".to(", "from_numpy("),
        "copies from memory of the host that is not pinned",
        "Make the tensor before the step, on the device, and pass it as an argument.",
    ),
    (
        (),
        ("synchronize(", "wait_stream(", "Event("),
        "waits on the host, or for work that is not part of the capture",
        "Leave it out of the step.",
    ),
)
_OTHERWISE = (
    "does what no graph can hold (it waits for the device, reads on the host, or copies from it)",
    "Leave it out of the step, or train without a graph.",
)


class _Place(NamedTuple):
    file: str
    line: int
    code: str


def translate(error: BaseException) -> BaseException:
    """The error to raise for `error`, which came out of a capture.

    What the user's code or this package raised for reasons of its own stays as it is.
    """
    text = str(error)
    if not isinstance(error, RuntimeError) or "captur" not in text.lower():
        return error
    if _innermost_file(error.__traceback__).startswith(tuple(_OURS)):
        return error
    place = _users_place(error.__traceback__)
    where = f"{place.file}:{place.line}: `{place.code}`" if place else "the step"
    code = place.code if place else ""
    what, advice = next(
        (
            (what, advice)
            for in_text, in_code, what, advice in _ADVICE
            if any(mark in text for mark in in_text) or any(mark in code for mark in in_code)
        ),
        _OTHERWISE,
    )
    return RuntimeError(
        f"expected a step that can be captured into a graph, found that {where} {what}. {advice} "
        f"Nothing has changed: parameters are as before, and the step can run eagerly. (torch "
        f"says: {text.splitlines()[0]})"
    )


def _innermost_file(trace: TracebackType | None) -> str:
    frames = list(traceback.walk_tb(trace))
    return frames[-1][0].f_code.co_filename if frames else ""


def _users_place(trace: TracebackType | None) -> _Place | None:
    """The innermost frame that is neither torch's, nor ours, nor Python's own."""
    foreign = tuple(_OURS | _TORCH | _STDLIB)
    for frame, line in reversed(list(traceback.walk_tb(trace))):
        file = frame.f_code.co_filename
        is_installed = "site-packages" in file or "dist-packages" in file
        if is_installed or not file.startswith(foreign):
            if file.startswith(tuple(_TORCH | _OURS)) or file.startswith("<"):
                continue
            return _Place(file, line, linecache.getline(file, line).strip())
    return None
