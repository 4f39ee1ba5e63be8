"""Keeps modules on all ranks the same: compares what they are, broadcasts what they hold."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

_T = TypeVar("_T")
# Tensors are broadcast through a byte buffer; this bounds its size, not that of a single tensor.
_BROADCAST_BYTES = 25 * 1024 * 1024
_ALIGNMENT_BYTES = 16  # the widest dtype, complex128


def fail_together(group: dist.ProcessGroup, problem: Exception | None) -> None:
    """Raises on every rank if `problem` is set on any. Collective.

    Raises:
        Exception: `problem` itself on the rank that has it.
        RuntimeError: on the other ranks, with its text.
    """
    found = gather(group, None if problem is None else f"{type(problem).__name__}: {problem}")
    if problem is not None:
        raise problem
    for rank, text in enumerate(found):
        if text is not None:
            raise RuntimeError(f"rank {rank} failed, so no rank can go on. It says: {text}")


def verify_same(group: dist.ProcessGroup, descriptions: Sequence[str], what: str) -> None:
    """Checks that all ranks hold the same descriptions in the same order. Collective.

    Args:
        descriptions: one line per item, such as ``weight: shape (4, 2), torch.float32``.
        what: the items in the plural, such as ``parameters``.

    Raises:
        RuntimeError: on every rank, naming the first item that differs and both its values.
    """
    digest = hashlib.sha256("\n".join(descriptions).encode()).hexdigest()
    if len(set(gather(group, digest))) > 1:
        raise_first_difference(group, descriptions, what)


def raise_first_difference(
    group: dist.ProcessGroup, descriptions: Sequence[str], what: str
) -> None:
    """Raises what `verify_same` says. Collective; call it when ranks are known to differ."""
    everywhere = gather(group, list(descriptions))
    first = everywhere[0]
    for rank, other in enumerate(everywhere):
        if other == first:
            continue
        index = next(
            (i for i, (a, b) in enumerate(zip(first, other, strict=False)) if a != b),
            min(len(first), len(other)),
        )
        mine, theirs = (
            lines[index] if index < len(lines) else "nothing" for lines in (first, other)
        )
        raise RuntimeError(
            f"expected the same {what} on all ranks, found {len(first)} on rank 0 and {len(other)} "
            f"on rank {rank}; the first that differs is number {index}: rank 0 has [{mine}], "
            f"rank {rank} has [{theirs}]. Make them the same on every rank."
        )
    raise RuntimeError(f"expected the same {what} on all ranks, found that they differ")


def gather(group: dist.ProcessGroup, value: _T) -> list[_T]:
    """`value` of every rank, in rank order. Collective."""
    values: list[_T] = [value] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def describe(name: str, tensor: Tensor, *, is_sparse: bool = False) -> str:
    """A line for `verify_same` that holds all that replicas of a parameter must agree on."""
    strides = "" if tensor.is_contiguous() else f", strides {tuple(tensor.stride())}"
    frozen = "" if tensor.requires_grad else ", frozen"
    sparse = ", sparse gradient" if is_sparse else ""
    return f"{name}: shape {tuple(tensor.shape)}{strides}, {tensor.dtype}{frozen}{sparse}"


def broadcast(tensors: Iterable[Tensor], group: dist.ProcessGroup) -> None:
    """Gives every rank the values that rank 0 of the group has. Collective."""
    chunk: list[Tensor] = []
    size = 0
    for tensor in tensors:
        chunk.append(tensor)
        size += tensor.numel() * tensor.element_size()
        if size >= _BROADCAST_BYTES:
            start_broadcast(chunk, group)()
            chunk, size = [], 0
    start_broadcast(chunk, group)()


def start_broadcast(
    tensors: Iterable[Tensor], group: dist.ProcessGroup, source: int = 0
) -> Callable[[], None]:
    """Starts to give every rank the values that rank `source` of the group has. Collective.

    Any mix of dtypes, shapes and strides travels as bytes, in one collective per device. Writing
    does not count as a change to autograd (a second forward before the backward of the first is
    common), and a tensor expanded from a smaller one is written through it.

    Args:
        tensors: the same number, shapes and dtypes on every rank.

    Returns:
        What to call in order to wait and to write the tensors.
    """
    is_source = dist.get_rank(group) == source
    by_device: dict[torch.device, list[Tensor]] = defaultdict(list)
    for tensor in tensors:
        if tensor.numel():
            # .data has a version counter of its own.
            by_device[tensor.device].append(_without_expansion(tensor.data))
    pending: list[tuple[dist.Work, list[Tensor], list[Tensor]]] = []
    for device, members in by_device.items():
        offsets = [0]
        for tensor in members:
            nbytes = tensor.numel() * tensor.element_size()
            offsets.append(offsets[-1] + -(-nbytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES)
        flat = torch.empty(offsets.pop(), dtype=torch.uint8, device=device)
        views = [
            flat[start : start + t.numel() * t.element_size()].view(t.dtype).view(t.shape)
            for start, t in zip(offsets, members, strict=True)
        ]
        if is_source:
            torch._foreach_copy_(views, members)
        work = dist.broadcast(flat, group=group, group_src=source, async_op=True)
        assert work is not None
        pending.append((work, members, views))

    def finish() -> None:
        for work, members, views in pending:
            work.wait()
            if not is_source:
                torch._foreach_copy_(members, views)

    return finish


def _without_expansion(tensor: Tensor) -> Tensor:
    """The elements of `tensor` without repeats along dimensions of stride 0."""
    for dim, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        if stride == 0 and size > 1:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor
