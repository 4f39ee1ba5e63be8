"""No graph with collectives outlives its process group, or the interpreter.

NCCL waits at the end of a communicator for the graphs that use it.
"""

from __future__ import annotations

import atexit
import functools
import weakref
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import torch.distributed as dist

_T = TypeVar("_T")


class Closing:
    """What is closed at the end of its `with` block."""

    def close(self) -> None:
        raise NotImplementedError

    def __enter__(self: _T) -> _T:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Live(Protocol):
    def close(self) -> None: ...

    def uses(self, group: dist.ProcessGroup | None) -> bool: ...


_live: weakref.WeakSet[Any] = weakref.WeakSet()
# torch's own function, and ours that takes its place, while there are live steps.
_destroy: Callable[..., None] | None = None
_replacement: Callable[..., None] | None = None


def note_live(step: _Live) -> None:
    """Closes `step` before the process group goes or Python ends, unless `note_closed` comes first.

    While any is live, ``torch.distributed.destroy_process_group`` is one that closes it first.
    """
    global _destroy, _replacement
    _live.add(step)
    if _destroy is None:
        _destroy = dist.destroy_process_group
        _replacement = _closing_first(_destroy)
        _set_destroy(_replacement)


def note_closed(step: _Live) -> None:
    global _destroy
    _live.discard(step)
    if _destroy is not None and not _live and dist.destroy_process_group is _replacement:
        _set_destroy(_destroy)
        _destroy = None


def _closing_first(destroy: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(destroy)
    def destroy_process_group(group: dist.ProcessGroup | None = None) -> None:
        for step in list(_live):
            if step.uses(group):
                step.close()
        destroy(group)

    return destroy_process_group


def _set_destroy(destroy: Callable[..., None]) -> None:
    dist.destroy_process_group = destroy
    dist.distributed_c10d.destroy_process_group = destroy


@atexit.register
def _close_all() -> None:
    for step in list(_live):
        step.close()
