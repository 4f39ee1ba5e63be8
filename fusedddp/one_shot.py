"""One round outside of a backward: the gradients that are there, all at once."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import lru_cache

import torch
import torch.distributed as dist
from torch.nn import Parameter

from fusedddp.bucket import Bucket
from fusedddp.collectives import OPS, Collective, same_on_all_ranks, wire_dtype
from fusedddp.layout import Layout, ParamSpec, build_layout, specs_checksum
from fusedddp.sparse import bucket_class, find_sparse_gradients
from fusedddp_kernels import Ops

# One bucket is on the wire while the next is filled and the last one emptied; more would only
# hold memory.
_MAX_IN_FLIGHT = 2


def reduce_gradients(
    params: Sequence[Parameter],
    collective: Collective,
    *,
    bucket_cap_bytes: int,
    as_view: bool = False,
    present: Sequence[int] | None = None,
    reduce_dtype: torch.dtype | None = None,
    ops: Ops | None = None,
    on_mismatch: Callable[[], None] = lambda: None,
) -> list[int]:
    """Reduces the `.grad` of `params` over all ranks. Collective.

    A parameter without a gradient on this rank counts as zero if another rank has one, and gets
    the result; one without a gradient on any rank keeps the `.grad` that it has. Where any rank has
    a sparse gradient all ranks get one.

    Args:
        params: the same on all ranks.
        collective: what reduces.
        bucket_cap_bytes: how much travels in one collective, in bytes.
        as_view: `.grad` becomes an alias of a bucket; else it is written in place where possible.
        present: for each parameter, whether it counts as having a gradient; None: whether it has.
        reduce_dtype: real dtype on the wire; None for that of each gradient.
        ops: what copies gradients; None for what suits their device.
        on_mismatch: called on all ranks when they pass different parameters; may say which.

    Returns:
        For each parameter the number of ranks that lacked a gradient.

    Raises:
        RuntimeError: ranks pass different parameters, or a collective failed. After the latter no
            parameter has a gradient.
    """
    if present is None:
        present = [param.grad is not None for param in params]
    specs = tuple(param_specs(params, reduce_dtype))
    absent = [i for i, has_gradient in enumerate(present) if not has_gradient]
    device = params[0].device
    checksum = _checksum(specs) ^ OPS.index(collective.op)
    sparse = find_sparse_gradients(params)
    numbers = [checksum, checksum**2, len(absent), len(sparse)]
    header = torch.tensor(numbers, dtype=torch.int64, device=device)
    dist.all_reduce(header, group=collective.group)
    total, squares, num_absent, num_sparse = header.tolist()
    if not same_on_all_ranks(total, squares, checksum, collective.world_size):
        on_mismatch()
        raise RuntimeError(
            "expected the same arguments and parameters on all ranks, found different ones"
        )
    num_lacking = [0] * len(params)
    nowhere: frozenset[int] = frozenset()
    if num_absent or num_sparse:
        counts = torch.zeros(2, len(params), dtype=torch.int32)
        counts[0, absent] = 1
        counts[1, sparse] = 1
        counts = counts.to(device)
        dist.all_reduce(counts, group=collective.group)
        num_lacking = counts[0].tolist()
        nowhere = frozenset(i for i, n in enumerate(num_lacking) if n == collective.world_size)
        is_sparse = counts[1].bool().tolist()
        specs = tuple(replace(s, is_sparse=x) for s, x in zip(specs, is_sparse, strict=True))
    layout = _layout(specs, nowhere, collective.world_size, bucket_cap_bytes)
    in_flight: deque[Bucket] = deque()

    def finish_oldest() -> None:
        in_flight[0].wait()
        in_flight.popleft().finish()

    try:
        for bucket_layout in layout.buckets:
            members = [params[i] for i in bucket_layout.params]
            kind = bucket_class(bucket_layout)
            bucket = kind(bucket_layout, members, collective, as_view=as_view, ops=ops)
            in_flight.append(bucket)
            bucket.launch()
            bucket.hand_out()
            if len(in_flight) >= _MAX_IN_FLIGHT:
                finish_oldest()
        while in_flight:
            finish_oldest()
    except BaseException:
        for param in params:
            param.grad = None  # some are reduced and some are not, and nothing tells which
        raise
    return num_lacking


# Most calls repeat the last one.
_checksum = lru_cache(maxsize=8)(specs_checksum)


@lru_cache(maxsize=8)
def _layout(
    specs: tuple[ParamSpec, ...], left_out: frozenset[int], world_size: int, cap_bytes: int
) -> Layout:
    return build_layout(
        specs,
        [i for i in range(len(specs)) if i not in left_out],
        world_size=world_size,
        bucket_cap_bytes=cap_bytes,
    )


def param_specs(
    params: Sequence[Parameter],
    reduce_dtype: torch.dtype | None = None,
    *,
    keeps_dtype: bool = False,
    sparse: Collection[int] = (),
) -> list[ParamSpec]:
    """What the layout needs to know of `params`.

    Args:
        reduce_dtype: dtype on the wire; None for the one that `wire_dtype` recommends.
        keeps_dtype: the wire has the parameter's own dtype, recommended or not.
        sparse: positions of those whose gradients are sparse.
    """
    return [
        ParamSpec(
            tuple(p.shape),
            p.dtype,
            p.device,
            None if keeps_dtype else reduce_dtype or wire_dtype(p.dtype, p.device),
            p.stride(),
            i in sparse,
        )
        for i, p in enumerate(params)
    ]
