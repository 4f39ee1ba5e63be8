"""The options of one wrapper, checked once and frozen."""

from __future__ import annotations

import math
import numbers
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
        first_bucket_cap_bytes: the same for the bucket that is launched first.
        find_unused_parameters: parameters without a gradient are no error.
        static_graph: the user promises that the graph never changes.
        gradient_as_bucket_view: `.grad` aliases the bucket after the reduction.
        ops: what copies gradients to and from buckets; None for our own.
        grad_dtype: dtype in which gradients of floating parameters may arrive beside their
            parameter's own; None for no other.
        reduce_dtype: real dtype on the wire; None for that of each parameter.
    """

    bucket_cap_bytes: int = DEFAULT_BUCKET_CAP_MB * MIB
    first_bucket_cap_bytes: int = DEFAULT_FIRST_BUCKET_CAP_MB * MIB
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


def bucket_caps(bucket_cap_mb: float | None) -> tuple[int, int]:
    """The caps (all buckets, first bucket) in bytes for DDP's `bucket_cap_mb` in MiB.

    As in DDP the smaller cap of the first bucket applies only to the default.

    Raises:
        TypeError: not a number.
        ValueError: not a positive finite number of at least one byte.
    """
    if bucket_cap_mb is None:
        return DEFAULT_BUCKET_CAP_MB * MIB, DEFAULT_FIRST_BUCKET_CAP_MB * MIB
    if isinstance(bucket_cap_mb, bool) or not isinstance(bucket_cap_mb, numbers.Real):
        raise TypeError(
            "bucket_cap_mb: expected a number of MiB or None for the default of "
            f"{DEFAULT_BUCKET_CAP_MB}, found {bucket_cap_mb!r} ({type(bucket_cap_mb).__name__})"
        )
    if not math.isfinite(bucket_cap_mb) or bucket_cap_mb * MIB < 1:
        raise ValueError(
            f"bucket_cap_mb: expected a positive number of MiB, found {bucket_cap_mb!r}. "
            "Leave it out for the default, or use a large number for a single bucket."
        )
    cap = int(bucket_cap_mb * MIB)
    return cap, cap
