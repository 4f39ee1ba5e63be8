"""Whether work that is issued now is recorded into a graph instead of being carried out."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch


def _never() -> bool:
    return False


# A build of torch without CUDA (or ROCm) cannot be asked.
_ask: Callable[[], bool] = (
    torch.cuda.is_current_stream_capturing
    if torch.backends.cuda.is_built()  # type: ignore[no-untyped-call]
    else _never
)


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
