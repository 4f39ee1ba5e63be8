"""Whether work that is issued now is recorded into a graph instead of being carried out."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch


def _current_stream_captures() -> bool:
    # Where CUDA was never used there may be no driver (or no CUDA in torch) that could be asked.
    is_used = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return is_used and torch.cuda.is_current_stream_capturing()


_ask: Callable[[], bool] = _current_stream_captures


def is_capturing() -> bool:
    """Whether the current stream is capturing."""
    return _ask()


@contextlib.contextmanager
def answered_by(ask: Callable[[], bool]) -> Iterator[None]:
    """Lets `ask` answer `is_capturing`, for what records without CUDA."""
    global _ask
    before, _ask = _ask, ask
    try:
        yield
    finally:
        _ask = before
