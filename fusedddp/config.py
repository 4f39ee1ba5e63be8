"""The options of one wrapper, checked once and frozen."""

from __future__ import annotations

import math
import numbers
from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch

from fusedddp_kernels import Ops

MIB = 1024 * 1024
# torch DDP's defaults (torch.nn.parallel.distributed: 25 MiB; torch.distributed's
# _DEFAULT_FIRST_BUCKET_BYTES: 1 MiB), kept so that overlap starts as early as users expect.
DEFAULT_BUCKET_CAP_MB = 25
DEFAULT_FIRST_BUCKET_CAP_MB = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What the reducer needs to know of the user's keywords.

    Attributes:
        bucket_cap_bytes: a bucket is closed once it holds this many bytes of gradients.
        leading_caps_bytes: the same for the buckets that are launched first, one by one.
        find_unused_parameters: parameters without a gradient are no error.
        static_graph: the user promises that the graph never changes.
        gradient_as_bucket_view: `.grad` aliases the bucket after the reduction.
        ops: what copies gradients to and from buckets; None for our own.
        grad_dtype: dtype in which gradients of floating parameters may arrive beside their
            parameter's own; None for no other.
        reduce_dtype: real dtype on the wire; None for that of each parameter.
    """

    bucket_cap_bytes: int = DEFAULT_BUCKET_CAP_MB * MIB
    leading_caps_bytes: tuple[int, ...] = ()
    find_unused_parameters: bool = False
    static_graph: bool = False
    gradient_as_bucket_view: bool = True
    ops: Ops | None = None
    grad_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None

    @property
    def allows_unused(self) -> bool:
        return self.find_unused_parameters or self.static_graph


def describe_options(options: Options) -> list[str]:
    """One line per option, the same on ranks whose options mean the same."""
    values = {field.name: getattr(options, field.name) for field in fields(options)}
    ops = values.pop("ops")
    return [
        *(f"{name}={value}" for name, value in values.items()),
        f"ops={None if ops is None else type(ops).__qualname__}",
    ]


def bucket_caps(
    bucket_cap_mb: float | None = None,
    bucket_cap_mb_list: Sequence[float] | None = None,
    *,
    on_cpu: bool = True,
) -> tuple[int, tuple[int, ...]]:
    """The cap of a bucket, and those of the first buckets where they differ, in bytes.

    As in DDP the first bucket is small by default only, so that it leaves early. That gains overlap
    on a GPU. On CPU a collective runs on the cores that the backward needs, and one more of them
    costs more than it hides: 17.5 against 14.9 ms of synchronisation for 400 gradients of 64x64 on
    two gloo ranks on two cores. So there all buckets have the same cap.

    Args:
        bucket_cap_mb: in MiB; None for the default.
        bucket_cap_mb_list: in MiB, one per bucket; the last one is for all others, too.
        on_cpu: whether gradients are on the CPU.

    Raises:
        TypeError: not a number.
        ValueError: not a positive finite number of at least one byte.
    """
    if bucket_cap_mb_list:
        if not isinstance(bucket_cap_mb_list, (list, tuple)):
            raise TypeError(
                "bucket_cap_mb_list: expected a list of numbers of MiB, found "
                f"{type(bucket_cap_mb_list).__name__}"
            )
        *leading, last = (_to_bytes("bucket_cap_mb_list", cap) for cap in bucket_cap_mb_list)
        return last, tuple(leading)
    if bucket_cap_mb is not None:
        return _to_bytes("bucket_cap_mb", bucket_cap_mb), ()
    return DEFAULT_BUCKET_CAP_MB * MIB, () if on_cpu else (DEFAULT_FIRST_BUCKET_CAP_MB * MIB,)


def _to_bytes(keyword: str, megabytes: object) -> int:
    if isinstance(megabytes, bool) or not isinstance(megabytes, numbers.Real):
        raise TypeError(
            f"{keyword}: expected a number of MiB or None for the default of "
            f"{DEFAULT_BUCKET_CAP_MB}, found {megabytes!r} ({type(megabytes).__name__})"
        )
    number = float(megabytes)
    if not math.isfinite(number) or number * MIB < 1:
        raise ValueError(
            f"{keyword}: expected a positive number of MiB, found {megabytes!r}. "
            "Leave it out for the default, or use a large number for a single bucket."
        )
    return int(number * MIB)
