"""One round outside of a backward: the gradients that are there, all at once."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch.nn import Parameter

from fusedddp.bucket import Bucket
from fusedddp.collectives import Collective, same_on_all_ranks, wire_dtype
from fusedddp.layout import ParamSpec, build_layout

# One bucket is on the wire while the next is filled and the last one emptied; more would only
# hold memory.
_MAX_IN_FLIGHT = 2


def reduce_gradients(
    params: Sequence[Parameter],
    collective: Collective,
    *,
    bucket_cap_bytes: int,
    reduce_dtype: torch.dtype | None = None,
    on_mismatch: Callable[[], None] = lambda: None,
) -> None:
    """Reduces the `.grad` of `params` over all ranks, in place where that is possible. Collective.

    A parameter without a gradient on this rank counts as zero if another rank has one, and gets
    the result; one without a gradient on any rank keeps None.

    Args:
        params: the same on all ranks.
        collective: what reduces.
        bucket_cap_bytes: how much travels in one collective, in bytes.
        reduce_dtype: real dtype on the wire; None for that of each gradient.
        on_mismatch: called on all ranks when they pass different parameters; may say which.

    Raises:
        RuntimeError: ranks pass different parameters.
    """
    specs = [
        ParamSpec(
            tuple(p.shape), p.dtype, p.device, reduce_dtype or wire_dtype(p.dtype, p.device), p.stride()
        )
        for p in params
    ]
    layout = build_layout(
        specs,
        range(len(params)),
        world_size=collective.world_size,
        bucket_cap_bytes=bucket_cap_bytes,
        first_bucket_cap_bytes=bucket_cap_bytes,
    )
    absent = [i for i, param in enumerate(params) if param.grad is None]
    device = params[0].device
    checksum = layout.checksum
    header = torch.tensor([checksum, checksum**2, len(absent)], dtype=torch.int64, device=device)
    dist.all_reduce(header, group=collective.group)
    total, squares, num_absent = header.tolist()
    if not same_on_all_ranks(total, squares, checksum, collective.world_size):
        on_mismatch()
        raise RuntimeError("expected the same parameters on all ranks, found different ones")
    nowhere: frozenset[int] = frozenset()
    if num_absent:
        counts = torch.zeros(len(params), dtype=torch.int32)
        counts[absent] = 1
        counts = counts.to(device)
        dist.all_reduce(counts, group=collective.group)
        nowhere = frozenset((counts == collective.world_size).nonzero().flatten().tolist())

    in_flight: deque[Bucket] = deque()

    def finish_oldest() -> None:
        bucket = in_flight.popleft()
        bucket.wait()
        bucket.hand_out({slot: None for slot, i in enumerate(bucket.layout.params) if i in nowhere})

    for bucket_layout in layout.buckets:
        bucket = Bucket(
            bucket_layout, [params[i] for i in bucket_layout.params], collective, as_view=False
        )
        bucket.launch()
        in_flight.append(bucket)
        if len(in_flight) >= _MAX_IN_FLIGHT:
            finish_oldest()
    while in_flight:
        finish_oldest()
