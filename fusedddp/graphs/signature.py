"""Inputs and outputs of a step: nested containers as flat lists, signatures, placeholders."""

from __future__ import annotations

import enum
import inspect
from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

_CONSTANTS = (
    *(int, float, complex, str, bytes, enum.Enum, type),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format),
)


class Inputs(NamedTuple):
    """The arguments of one call.

    Attributes:
        tensors: all tensors in them, in order.
        signature: equal for calls that one graph can serve.
        leaves: one line per leaf, to say what differs.
        spec: how they are nested.
        constants: the leaves, with None for tensors.
    """

    tensors: list[Tensor]
    signature: Hashable
    spec: pytree.TreeSpec
    constants: list[Any]


def flatten_inputs(
    args: tuple[Any, ...], kwargs: dict[str, Any], device_type: str | None = None
) -> Inputs:
    """Takes the arguments of a call apart.

    Args:
        args: positional arguments.
        kwargs: keyword arguments.
        device_type: where tensors have to be; None for anywhere.

    Raises:
        TypeError: an argument that is neither a tensor nor a plain value.
        ValueError: a tensor that no graph can read: elsewhere, sparse, or with a gradient.
    """
    leaves, spec = pytree.tree_flatten((args, kwargs))
    tensors: list[Tensor] = []
    kinds: list[Hashable] = []
    for position, leaf in enumerate(leaves):
        if isinstance(leaf, Tensor):
            _check_tensor(leaf, position, device_type)
            tensors.append(leaf)
            kinds.append((leaf.shape, leaf.dtype, leaf.device, leaf.stride()))
            leaves[position] = None
        else:
            if not _is_constant(leaf):
                raise TypeError(
                    "expected tensors, containers of them and plain values (numbers, strings, "
                    f"None) as arguments of a graphed step, found {type(leaf).__name__} as leaf "
                    f"{position}: what is in it would be read once, at the capture. Pass its "
                    "tensors, or let the step find it by a closure if it never changes."
                )
            # 1, 1.0 and True are equal, and not the same; nan is the same, and not equal.
            kinds.append((type(leaf), "nan" if leaf != leaf else leaf))
    return Inputs(tensors, (spec, tuple(kinds)), spec, leaves)


def _is_constant(leaf: object) -> bool:
    """Whether a value is all that there is to it."""
    return leaf is None or inspect.isroutine(leaf) or isinstance(leaf, _CONSTANTS)


def rebuild(inputs: Inputs, tensors: Sequence[Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments with other tensors in the place of their own."""
    remaining = iter(tensors)
    kinds = inputs.signature[1]  # type: ignore[index]
    leaves = [
        next(remaining) if isinstance(kind[0], torch.Size) else constant
        for kind, constant in zip(kinds, inputs.constants, strict=True)
    ]
    args, kwargs = pytree.tree_unflatten(leaves, inputs.spec)
    return args, kwargs


def placeholder(tensor: Tensor) -> Tensor:
    """Memory that a graph reads instead of `tensor`."""
    return torch.empty_strided(
        tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device
    )


def fill(placeholders: Sequence[Tensor], tensors: Sequence[Tensor]) -> None:
    """Copies the tensors of a call to where a graph reads them."""
    with torch.no_grad():
        for destination, source in zip(placeholders, tensors, strict=True):
            destination.copy_(source, non_blocking=True)


class Outputs:
    """What a captured step returned.

    Args:
        result: the return value.
        device_type: where its tensors have to be.

    Attributes:
        has_tensors: whether it holds any.

    Raises:
        TypeError: something in it that is neither a tensor nor None nor a string.
        ValueError: a tensor on another device, which a replay would not write.
    """

    def __init__(self, result: Any, device_type: str) -> None:
        leaves, self._spec = pytree.tree_flatten(result)
        for leaf in leaves:
            if isinstance(leaf, Tensor):
                if leaf.device.type != device_type:
                    raise ValueError(
                        f"expected the step to return tensors on {device_type}, found one on "
                        f"{leaf.device}: a replay would not write it. Return it where it was "
                        "computed, and move it after the call."
                    )
            elif leaf is not None and not isinstance(leaf, str):
                found = type(leaf).__name__
                if isinstance(leaf, _CONSTANTS):
                    found = f"{leaf!r} ({found})"
                raise TypeError(
                    f"expected the step to return tensors, in containers or not, found {found}: it "
                    "would be the same after every replay. Return a tensor, or leave it out."
                )
        self._leaves = [leaf.detach() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        self.has_tensors = any(isinstance(leaf, Tensor) for leaf in leaves)

    def read(self) -> Any:
        """Copies, which the next replay does not overwrite, in the step's own structure."""
        leaves = [leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in self._leaves]
        return pytree.tree_unflatten(leaves, self._spec)


def detached(result: Any) -> Any:
    """What a graph returns for `result`: tensors without an autograd history."""
    return pytree.tree_map_only(Tensor, Tensor.detach, result)


def copied(result: Any) -> Any:
    """The same, as tensors that nobody else writes."""
    return pytree.tree_map_only(Tensor, lambda tensor: tensor.detach().clone(), result)


def describe(inputs: Inputs) -> list[str]:
    """One line per leaf, to compare with those of another call."""
    kinds = inputs.signature[1]  # type: ignore[index]
    lines = [str(inputs.spec)]
    for kind in kinds:
        if isinstance(kind[0], torch.Size):
            shape, dtype, device, stride = kind
            lines.append(f"{dtype}{list(shape)} strides {stride} on {device}")
        else:
            lines.append(f"{kind[0].__name__} {kind[1]!r}")
    return lines


def first_difference(a: Inputs, b: Inputs) -> str:
    """In what two calls differ, in words."""
    before, now = describe(a), describe(b)
    if before[0] != now[0]:
        return "the arguments are nested differently"
    for position, (was, is_) in enumerate(zip(before[1:], now[1:], strict=True)):
        if was != is_:
            return f"leaf {position} of the arguments was {was} and is {is_}"
    return "the state of the model differs (no_sync, train or eval, autocast, gradients)"


def _check_tensor(tensor: Tensor, position: int, device_type: str | None) -> None:
    if device_type not in (None, tensor.device.type):
        raise ValueError(
            f"expected tensors on {device_type} as arguments, found one on {tensor.device} as leaf "
            f"{position}. Move it there before the call."
        )
    if tensor.requires_grad:
        raise ValueError(
            "expected inputs that do not require gradients, found one that does as leaf "
            f"{position} of the arguments: its gradient would end in the copy that the graph "
            "reads. Pass input.detach(), or make it a parameter."
        )
    if tensor.layout != torch.strided:
        raise ValueError(
            f"expected dense tensors as arguments, found {tensor.layout} as leaf {position}. Pass "
            "its parts as dense tensors and put them together in the step."
        )
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    if any(stride == 0 and size > 1 for size, stride in pairs):
        raise ValueError(
            "expected tensors with memory for each element, found an expanded one as leaf "
            f"{position} of the arguments. Pass tensor.contiguous(), or expand it in the step."
        )
