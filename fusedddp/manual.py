"""Manual mode: the user says when gradients are reduced. No wrapper, no hooks."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch._compile import _disable_dynamo
from torch.nn import Module, Parameter

from fusedddp.capturing import is_capturing
from fusedddp.collectives import OPS, Collective, Op
from fusedddp.config import bucket_caps
from fusedddp.hooks import listeners_of
from fusedddp.one_shot import reduce_gradients
from fusedddp.process_group import require_group
from fusedddp.replicas import describe, raise_first_difference

_REDUCE_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


@_disable_dynamo
def all_reduce_gradients(
    module_or_params: Module | Iterable[torch.Tensor],
    process_group: dist.ProcessGroup | None = None,
    reduce_dtype: torch.dtype | None = None,
    op: Op = "mean",
) -> None:
    """Reduces gradients over all ranks; call it between ``backward()`` and ``optimizer.step()``.

    Every rank must call it, with the same parameters in the same order. `.grad` is written in
    place where it is dense; where it is not, or shares memory with another gradient, it becomes a
    new tensor. A parameter that has no gradient on this rank counts as zero if any other rank has
    one, and then gets the result; if no rank has one it keeps None. If any rank has a sparse one,
    `.grad` becomes a coalesced COO tensor on all ranks. Parameters that do not require a gradient
    are left out.

    Args:
        module_or_params: a module, or parameters of any shapes, floating or complex dtypes.
        process_group: the ranks to reduce over; None for the default group.
        reduce_dtype: floating dtype in which gradients travel and are added, such as
            ``torch.bfloat16`` to halve the bytes; None for that of each parameter (fp32 for fp16
            on CPU).
        op: ``"mean"`` divides by the number of ranks before adding; ``"sum"`` adds; ``"max"`` takes
            the elementwise maximum, for complex values of real and imaginary parts.

    Raises:
        TypeError: an argument of another type.
        ValueError: an unknown `op`, a `reduce_dtype` that is not floating, no parameter that
            requires a gradient, no process group.
        RuntimeError: called while capturing a graph; on all ranks, if they pass different
            parameters; or a collective failed, and
            no gradient is left then, since some would be reduced and some not.

    Example::

        loss.backward()
        fusedddp.all_reduce_gradients(model)
        optimizer.step()
    """
    if op not in OPS:
        raise ValueError(f"op: expected one of {', '.join(map(repr, OPS))}, found {op!r}")
    if reduce_dtype is not None and reduce_dtype not in _REDUCE_DTYPES:
        raise ValueError(
            f"reduce_dtype: expected one of {', '.join(map(str, _REDUCE_DTYPES))}, or None, found "
            f"{reduce_dtype!r}"
        )
    if is_capturing():
        raise RuntimeError(
            "expected no all_reduce_gradients while capturing, found one: ranks compare on the "
            "host what they pass. Give make_graphed_step two functions, (backward, update), "
            "between which it reduces; or wrap the model."
        )
    group = require_group(process_group, "fusedddp.all_reduce_gradients")
    names, params = _named_params(module_or_params)
    cap, _ = bucket_caps()

    def say_which() -> None:
        lines = [f"op={op!r}, reduce_dtype={reduce_dtype}"]
        lines += [describe(n, p) for n, p in zip(names, params, strict=True)]
        raise_first_difference(group, lines, "arguments and parameters")

    reduce_gradients(
        params,
        Collective(group, op),
        bucket_cap_bytes=cap,
        reduce_dtype=reduce_dtype,
        on_mismatch=say_which,
    )
    for listener in listeners_of(params):
        listener.note_delivery()


def _named_params(
    module_or_params: Module | Iterable[torch.Tensor],
) -> tuple[list[str], list[Parameter]]:
    if isinstance(module_or_params, Module):
        named = list(module_or_params.named_parameters())
    elif isinstance(module_or_params, torch.Tensor):
        raise TypeError(
            "module_or_params: expected a module or an iterable of parameters, found one tensor"
        )
    else:
        unique = dict.fromkeys(module_or_params)
        named = [(f"number {i}", p) for i, p in enumerate(unique)]  # type: ignore[misc]
    for name, param in named:
        if not isinstance(param, torch.Tensor):
            raise TypeError(
                f"module_or_params: expected parameters, found {type(param).__name__} as {name}. "
                "Pass model.parameters(), not model.named_parameters() or optimizer groups."
            )
    named = [(name, param) for name, param in named if param.requires_grad]
    if not named:
        raise ValueError(
            "module_or_params: expected at least one parameter that requires a gradient, found none"
        )
    return [name for name, _ in named], [param for _, param in named]
