"""Hooks on the outputs of a forward: they tell that a backward through the wrapper has begun."""

from __future__ import annotations

import dataclasses
import inspect
import weakref
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor


class _Listener(Protocol):
    def reach_output(self, sync: bool, accumulates: bool) -> None: ...


def watch_output(listener: _Listener, output: Tensor, sync: bool) -> bool:
    """Calls ``listener.reach_output(sync, accumulates)`` when a backward reaches `output`.

    `accumulates` tells whether that backward accumulates into leaves, as ``backward()`` does and
    ``torch.autograd.grad`` does not.

    Args:
        listener: held weakly.
        output: what a forward returned.
        sync: passed on.

    Returns:
        Whether a backward can reach it at all.
    """
    if output.grad_fn is None:  # a leaf would keep the hook for ever
        return False
    reference = weakref.ref(listener)
    leaf = _nearest_leaf(output.grad_fn)

    def hook(_: Tensor) -> None:
        alive = reference()
        if alive is not None:
            alive.reach_output(sync, leaf is not None and _will_accumulate(leaf))

    output.register_hook(hook)  # type: ignore[no-untyped-call]
    return True


def _nearest_leaf(node: Any) -> Any:
    """A node under `node` that accumulates into a leaf, or None; breadth first, it is near."""
    seen, level = {node}, [node]
    while level:
        below = []
        for current in level:
            for child, _ in current.next_functions:
                if child is None or child in seen:
                    continue
                if hasattr(child, "variable"):
                    return child
                seen.add(child)
                below.append(child)
        level = below
    return None


def _will_accumulate(leaf: Any) -> bool:
    try:
        return torch._C._will_engine_execute_node(leaf)
    except RuntimeError:  # what it says of the inputs of autograd.grad
        return False


def find_tensors(output: Any) -> Iterator[Tensor]:
    """The tensors in what a forward returned; other objects are not looked into."""
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, (list, tuple)):
        for item in output:
            yield from find_tensors(item)
    elif isinstance(output, Mapping):
        for item in output.values():
            yield from find_tensors(item)
    elif dataclasses.is_dataclass(output) and not inspect.isclass(output):
        for field in dataclasses.fields(output):
            yield from find_tensors(getattr(output, field.name))
