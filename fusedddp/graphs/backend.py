"""The seam over torch.cuda: capture, replay, streams and memory pools, and nothing else.

Whatever decides what to capture and when is above it, and runs in the tests on another backend.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch


class Graph(Protocol):
    """Recorded work."""

    def replay(self) -> None:
        """Carries the work out again, on the same memory."""

    def reset(self) -> None:
        """Lets the work and its memory go. It cannot be replayed any more."""


class Backend(Protocol):
    """What captures on one type of device."""

    def new_pool(self) -> Any:
        """Memory that several graphs share."""

    def check_pool(self, pool: Any) -> None:
        """Raises TypeError if `pool` is no memory of that kind."""

    def warm_up(self) -> contextlib.AbstractContextManager[None]:
        """Runs the body on the stream of captures, in order with the current stream."""

    def capture(self, run: Callable[[], Any], pool: Any) -> tuple[Graph, Any]:
        """Captures ``run()``.

        Returns:
            The graph, and what `run` returned.

        Raises:
            Exception: what `run` raised, or what is wrong with the capture as a whole. Random
                numbers of earlier graphs may not follow torch.manual_seed any more.
        """

    def replay(self, graph: Graph) -> None:
        """Replays on the current stream, behind the last replay."""

    def synchronize(self) -> None:
        """Waits on the host until replays have ended."""


class CudaBackend:
    """CUDA graphs, and on ROCm HIP graphs, of the current device."""

    def __init__(self) -> None:
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self._last: torch.cuda.Stream | None = None

    def new_pool(self) -> Any:
        return torch.cuda.graph_pool_handle()

    def check_pool(self, pool: Any) -> None:
        is_handle = isinstance(pool, tuple) and [*map(type, pool)] == [int, int]
        if not is_handle:
            raise TypeError(
                "pool: expected what torch.cuda.graph_pool_handle() or CUDAGraph.pool() returns, "
                f"found {pool!r} ({type(pool).__name__})"
            )

    @contextlib.contextmanager
    def warm_up(self) -> Iterator[None]:
        current = torch.cuda.current_stream()
        self._stream.wait_stream(current)
        try:
            with torch.cuda.stream(self._stream):
                yield
        finally:  # what was run before an error is put back on the current stream
            current.wait_stream(self._stream)

    def capture(self, run: Callable[[], Any], pool: Any) -> tuple[Graph, Any]:
        graph = torch.cuda.CUDAGraph()
        generator = torch.cuda.default_generators[torch.cuda.current_device()]
        numbers = generator.clone_state()
        result: Any = None
        problem: BaseException | None = None
        # Earlier collectives have to be over: NCCL's watchdog asks for their events, which a
        # capture would not survive. In thread_local mode other threads (that one, a DataLoader that
        # pins memory) do not disturb it either.
        torch.cuda.synchronize()
        # Freeing a graph or an event while capturing ends the capture.
        gc.collect()
        was_enabled = gc.isenabled()
        gc.disable()
        try:
            with torch.cuda.graph(
                graph, pool=pool, stream=self._stream, capture_error_mode="thread_local"
            ):
                try:
                    result = run()
                except BaseException as error:
                    problem = error  # the end of a broken capture raises too, and says less
        except BaseException as error:
            problem = problem or error
        finally:
            if was_enabled:
                gc.enable()
        if problem is not None:
            # A broken capture leaves the generator in the belief that it is still captured.
            generator.graphsafe_set_state(numbers)
            raise problem
        return graph, result

    def replay(self, graph: Graph) -> None:
        current = torch.cuda.current_stream()
        if self._last is not None and self._last != current:
            current.wait_stream(self._last)
        self._last = current
        graph.replay()

    def synchronize(self) -> None:
        torch.cuda.synchronize()


# Which backend captures on which type of device.
BACKENDS: dict[str, Callable[[], Backend]] = {"cuda": CudaBackend}
