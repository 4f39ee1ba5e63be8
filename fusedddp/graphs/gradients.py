"""`.grad` around a replay: what the graph expects to find there, and what it leaves.

A graph reads and writes gradients by address. Between replays anybody may put another tensor or
None in the place of a `.grad`, and another graph leaves gradients of its own.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from itertools import compress
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fusedddp.bucket import Bucket
from fusedddp.module import FusedDDP

_grad: Callable[[Parameter], Tensor | None] = operator.attrgetter("grad")


class Gradients(NamedTuple):
    """The `.grad` of all parameters at some time, asked for once, since asking takes time.

    Attributes:
        tensors: `.grad` of each.
        pattern: one byte for each, 1 if there is one.
    """

    tensors: list[Tensor | None]
    pattern: bytes

    @classmethod
    def of(cls, params: Iterable[Parameter]) -> Gradients:
        tensors = [*map(_grad, params)]
        return cls(tensors, bytes([tensor is not None for tensor in tensors]))

    def addresses(self) -> list[int | None]:
        if 0 in self.pattern:
            return [None if tensor is None else tensor.data_ptr() for tensor in self.tensors]
        return [*map(Tensor.data_ptr, self.tensors)]  # type: ignore[arg-type]


class Entry:
    """The gradients that are there when a step begins, as far as it uses them.

    Args:
        params: all parameters.
        dropped: the `id` of those whose gradient the step replaces without looking at it.
    """

    def __init__(self, params: Sequence[Parameter], dropped: set[int]) -> None:
        used = [(i, param.grad) for i, param in enumerate(params) if id(param) not in dropped]
        self._is_used = bytes([id(param) not in dropped for param in params])
        self._pattern = bytes([tensor is not None for _, tensor in used])
        self._destinations = [(i, tensor) for i, tensor in used if tensor is not None]

    def fits(self, found: Gradients) -> bool:
        """Whether the step may begin with these gradients."""
        return bytes(compress(found.pattern, self._is_used)) == self._pattern

    def fill(self, found: Gradients) -> None:
        """Puts gradients where the graph reads them."""
        for index, tensor in self._destinations:
            gradient = found.tensors[index]
            if gradient is not None and gradient is not tensor:
                tensor.data.copy_(gradient.detach())


class Exit:
    """The gradients that a step leaves.

    An alias of a bucket's slot is made anew when it is needed. Were it kept, the bucket would take
    it for a gradient that somebody still reads, and move to other memory.
    """

    def __init__(self, params: Sequence[Parameter], wrappers: Iterable[FusedDDP]) -> None:
        views = _slot_views(wrappers)
        self._params = list(params)
        self._addresses = Gradients.of(params).addresses()
        # Where each gradient is taken from, and whether that is a slot.
        self._sources: list[tuple[Tensor | None, bool]] = []
        for param in params:
            gradient, view = param.grad, views.get(id(param))
            if gradient is not None and view is not None and _is_at(gradient, view):
                self._sources.append((view, True))
            else:
                self._sources.append((gradient, False))

    def restore(self, found: Gradients) -> None:
        """Makes `.grad` of each parameter what the graph has written.

        Args:
            found: what they are.
        """
        addresses = found.addresses()
        if addresses == self._addresses:
            return
        for param, address, expected, (source, is_slot) in zip(
            self._params, addresses, self._addresses, self._sources, strict=True
        ):
            if address != expected:
                param.grad = _alias(source, param) if source is not None and is_slot else source


def find_dropped(params: Sequence[Parameter], run: Any) -> set[int]:
    """Runs a step, and finds out which gradients it replaces without looking at them.

    Such a step (``zero_grad`` comes first) does not depend on what `.grad` was.

    Args:
        params: all parameters, after a step.
        run: called once.

    Returns:
        The `id` of their parameters.
    """
    probes: dict[int, Tensor] = {}
    for index, param in enumerate(params):
        if param.grad is not None and param.grad.layout == torch.strided:
            probes[index] = param.grad = torch.zeros_like(param.grad)
    watch = StorageWatch(probes.values())
    versions = {index: probe._version for index, probe in probes.items()}
    with watch:
        run()
    return {
        id(params[index])
        for index, probe in probes.items()
        if not watch.has_seen(probe)
        and probe._version == versions[index]
        and params[index].grad is not None
        and params[index].grad is not probe
    }


class StorageWatch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes which of some tensors lie in the memory of an argument of any operation."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._watched = {t.untyped_storage()._cdata for t in tensors if t.layout == torch.strided}
        self._seen: set[int] = set()

    def has_seen(self, tensor: Tensor) -> bool:
        return tensor.layout == torch.strided and tensor.untyped_storage()._cdata in self._seen

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for leaf in tree_leaves((args, kwargs)):
            if isinstance(leaf, Tensor) and leaf.layout == torch.strided:
                storage = leaf.untyped_storage()._cdata
                if storage in self._watched:
                    self._seen.add(storage)
        return func(*args, **(kwargs or {}))


def bucket_memory(wrappers: Iterable[FusedDDP]) -> list[Any]:
    """Flat buffers and pointer tables, which a graph needs for as long as it lives."""
    return [bucket.slots for wrapper in wrappers for bucket in wrapper.reducer.buckets]


def _slot_views(wrappers: Iterable[FusedDDP]) -> dict[int, Tensor]:
    """For the `id` of each parameter its place in a bucket's memory."""
    buckets: list[Bucket] = [b for wrapper in wrappers for b in wrapper.reducer.buckets]
    return {
        id(param): view
        for bucket in buckets
        if bucket.slots is not None
        for param, view in zip(bucket.params, bucket.slots.views, strict=True)
    }


def _is_at(gradient: Tensor, view: Tensor) -> bool:
    return bool(
        gradient.untyped_storage()._cdata == view.untyped_storage()._cdata
        and gradient.data_ptr() == view.data_ptr()
    )


def _alias(view: Tensor, param: Parameter) -> Tensor:
    return (torch.view_as_complex(view) if param.is_complex() else view).detach()
