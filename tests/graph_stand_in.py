"""A backend for `fusedddp.graphs` that captures and replays on CPU.

It records the operations of a step (aten and c10d) with their tensors. Collectives are not carried
out meanwhile (they run on this rank alone), so that ranks do not depend on each other in a capture,
as on a GPU; whatever else is carried out has to be undone, and on a GPU would not have been.
A replay calls them again in order, on the same memory, and copies each new result to where the
recorded one lies. So it freezes what a CUDA graph freezes: addresses, Python numbers, which
branch was taken, which tensors were there. What would make the host wait for the device raises.

What it cannot show, and the tests marked `gpu` have to: memory that a pool uses twice, memory that
is freed while a graph reads it, pinned memory and pointer tables, streams and events, and NCCL. (Of
the first it shows one thing: a replay spoils what later graphs of its pool have made.) It keeps
every tensor of a step alive, so buckets see their memory in use and take new memory for the next
capture, and gradients are never reduced in place.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from fusedddp.capturing import answered_by

# The host would have to wait for the device.
_SYNCS = {"aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select", "aten::_unique2"}
_SILENT = ("profiler::",)
_own_groups: dict[Any, Any] = {}


class StandIn:
    """Records on CPU.

    Attributes:
        num_captures: how many captures have been begun.
        num_replays: how many replays have been run.
    """

    def __init__(self) -> None:
        self.num_captures = 0
        self.num_replays = 0

    def new_pool(self) -> list[RecordedGraph]:
        return []

    def check_pool(self, pool: Any) -> None:
        if not isinstance(pool, list):
            raise TypeError(f"pool: expected a list of graphs, found {pool!r}")

    @contextlib.contextmanager
    def warm_up(self) -> Iterator[None]:
        yield

    def capture(self, run: Callable[[], Any], pool: Any) -> tuple[RecordedGraph, Any]:
        self.num_captures += 1
        recorder = Recorder()
        try:
            with answered_by(lambda: True), recorder:
                result = run()
        except RuntimeError as error:
            error.__traceback__ = _without_this_file(error.__traceback__)
            raise
        graph = RecordedGraph(recorder, pool)
        if pool is not None:
            pool.append(graph)
        return graph, result

    def replay(self, graph: RecordedGraph) -> None:
        self.num_replays += 1
        graph.replay()

    def synchronize(self) -> None:
        pass


class Recorder(TorchDispatchMode):
    """Notes all operations.

    Attributes:
        calls: the operation, its arguments, and its results.
        made: floating tensors in memory that did not exist before.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any, list[Tensor]]] = []
        self.made: list[Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name
        is_mask = name == "aten::index" and any(
            isinstance(i, Tensor) and i.dtype in (torch.bool, torch.uint8) for i in args[1]
        )
        if name in _SYNCS or is_mask:
            raise RuntimeError(f"operation not permitted when stream is capturing ({name})")
        # Aliases, because `param.data = other` would change what was recorded.
        held = tree_map_only(Tensor, _alias, (args, kwargs))
        if name.startswith("c10d::"):
            args = tuple(
                _alone() if isinstance(a, torch.ScriptObject) and i == 1 else a
                for i, a in enumerate(args)
            )
            if name == "c10d::broadcast_":
                args = (*args[:2], 0, *args[3:])
        result = func(*args, **kwargs)
        if name.startswith("c10d::"):
            # A `then` on its future would else run on a thread of gloo, where nothing is recorded.
            _wait(result)
        if not name.startswith(_SILENT):
            # An operation that only makes a view has nothing to do again.
            is_view = any(
                returned.alias_info is not None and not returned.alias_info.is_write
                for returned in func._schema.returns
            )
            if not is_view:
                results = [_alias(r) for r in tree_leaves(result) if isinstance(r, Tensor)]
                self.calls.append((func, *held, results))
                known = {t.data_ptr() for t in tree_leaves(held) if isinstance(t, Tensor)}
                self.made += [
                    r for r in results if r.is_floating_point() and r.data_ptr() not in known
                ]
        return result


class RecordedGraph:
    """What was recorded, in a pool: a list of graphs, in the order of their capture."""

    def __init__(self, recorder: Recorder, pool: list[RecordedGraph] | None) -> None:
        self._calls = recorder.calls
        self._made = recorder.made
        self._pool = pool

    def replay(self) -> None:
        self._spoil_later_graphs()
        # What autocast and autograd did is among the recorded operations.
        with torch.no_grad(), torch.autocast("cpu", enabled=False):
            for func, args, kwargs, recorded in self._calls:
                result = func(*args, **kwargs)
                _wait(result)
                new = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
                for destination, source in zip(recorded, new, strict=True):
                    if destination.data_ptr() != source.data_ptr():
                        destination.copy_(source)

    def _spoil_later_graphs(self) -> None:
        """What later graphs of the pool have made may lie where this one keeps its scratch."""
        if self._pool is not None and self in self._pool:
            for other in self._pool[self._pool.index(self) + 1 :]:
                for tensor in other._made:
                    tensor.fill_(torch.nan)

    def reset(self) -> None:
        self._calls, self._made = [], []


def _wait(result: Any) -> None:
    for leaf in tree_leaves(result):
        if isinstance(leaf, torch.ScriptObject) and hasattr(leaf, "wait"):
            leaf.wait()


def _alone() -> Any:
    """A process group of this rank only, as an argument of an operation."""
    if not dist.is_initialized():
        raise RuntimeError("a collective without a process group")
    if dist.group.WORLD not in _own_groups:
        rank = dist.get_rank()
        _own_groups[dist.group.WORLD] = dist.new_group([rank], use_local_synchronization=True)
    return _own_groups[dist.group.WORLD].boxed()


def _without_this_file(trace: TracebackType | None) -> TracebackType | None:
    """A real capture raises in the operation; ours raises in a frame of its own."""
    if trace is None:
        return None
    rest = _without_this_file(trace.tb_next)
    if trace.tb_frame.f_code.co_filename == __file__:
        return rest
    return TracebackType(rest, trace.tb_frame, trace.tb_lasti, trace.tb_lineno)


def _alias(tensor: Tensor) -> Tensor:
    with torch._C._DisableTorchDispatch():
        return tensor.detach()
