"""Sparse gradients: which parameters have them, and how they travel."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Mapping, Sequence, Set

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Embedding, EmbeddingBag, Module, Parameter

from fusedddp.bucket import Bucket, Chunk, Kind
from fusedddp.layout import BucketLayout, round_up
from fusedddp_kernels import Slots

logger = logging.getLogger(__name__)

_INDEX_BYTES = 8  # indices of a COO tensor are int64
_ALIGNMENT_BYTES = 16  # of what ranks gather, so that its parts can be seen in their own dtypes

# Note [Sparse gradients]
# ~~~~~~~~~~~~~~~~~~~~~~~
# A sparse gradient is a list of rows. Each rank gathers the rows of all ranks and adds them up
# itself, so any set of rows will do and nothing is agreed on beforehand. How many rows there are is
# known only once they are there: that number is gathered at `launch`, beside the backward, and the
# rows, padded to the longest list, at `wait`, which all ranks reach in the order of the buckets.


def sparse_params(module: Module) -> set[int]:
    """The `id` of each parameter whose gradient its module makes sparse."""
    return {
        id(submodule._parameters.get("weight"))
        for submodule in module.modules()
        if isinstance(submodule, (Embedding, EmbeddingBag)) and submodule.sparse
    }


def find_sparse_gradients(params: Iterable[Parameter]) -> list[int]:
    """Positions of the parameters whose `.grad` is sparse here; a scalar's is made dense instead.

    A scalar has no rows.
    """
    found = []
    for index, param in enumerate(params):
        gradient = param.grad
        if gradient is not None and gradient.layout != torch.strided:
            if gradient.dim():
                found.append(index)
            else:
                param.grad = gradient.detach().to_dense()
    return found


class GradientLayouts:
    """Holds gradients to the layout of their bucket, whichever they arrive in.

    A functional embedding may make the gradient of any parameter sparse. That of an embedding is
    dense if its weights are an output projection, too, because autograd adds the two.

    Args:
        names: of the parameters, for the announcement.
        params: all parameters of the reducer.
        sparse: indices of those that have a sparse bucket.
        reason: why the others have dense ones, for the announcement.
    """

    def __init__(
        self,
        names: Sequence[str],
        params: Sequence[Parameter],
        sparse: Collection[int],
        reason: str,
    ) -> None:
        self.sparse = frozenset(sparse)
        self._names = names
        self._params = params
        self._reason = reason
        self._announced: set[int] = set()

    def conform(self, indices: Iterable[int]) -> None:
        """Converts the `.grad` of these parameters where it is not of the bucket's layout."""
        for index in indices:
            param = self._params[index]
            gradient = param.grad
            if gradient is None:
                continue
            if index in self.sparse:
                if gradient.layout != torch.sparse_coo:
                    param.grad = _from_rows(*_to_rows(gradient), gradient.shape)
                    self._announce(index, found="dense", made="sparse")
            elif gradient.layout != torch.strided:
                param.grad = gradient.detach().to_dense()
                self._announce(index, found="sparse", made="dense")

    def _announce(self, index: int, *, found: str, made: str) -> None:
        if index in self._announced:
            return
        self._announced.add(index)
        logger.warning(
            "%s has received a %s gradient, which is made %s before it is reduced. %s This is said "
            "once.",
            self._names[index],
            found,
            made,
            self._reason,
        )


def add_reduced(gradient: Tensor, contribution: Tensor) -> Tensor:
    """The sum of two reduced gradients of the same layout; a dense one is added to in place."""
    if gradient.layout == torch.strided:
        return gradient.add_(contribution)
    return (gradient + contribution).coalesce()


def bucket_class(layout: BucketLayout) -> type[Bucket]:
    """The kind of bucket that `layout` asks for; both take the same arguments."""
    return SparseBucket if layout.is_sparse else Bucket


class SparseChunk(Chunk):
    """The only slot of a sparse bucket."""

    __slots__ = ()

    def __init__(self, params: list[Parameter], grad_dtype: torch.dtype | None) -> None:
        super().__init__(0, params, grad_dtype)
        self._kinds = [_as_sparse(kind) for kind in self._kinds]
        self._low_kinds = [kind and _as_sparse(kind) for kind in self._low_kinds]


def _as_sparse(kind: Kind) -> Kind:
    dtype, shape, _ = kind
    return dtype, shape, torch.sparse_coo


class SparseBucket(Bucket):
    """The sparse gradient of one parameter, driven as any other bucket.

    `.grad` becomes a coalesced COO tensor with one sparse dimension, the same on all ranks. It is
    a tensor of its own, never an alias. A rank without a gradient contributes no rows.

    See Note [Sparse gradients].
    """

    def _make_chunks(self, grad_dtype: torch.dtype | None) -> list[Chunk]:
        return [SparseChunk(self.params, grad_dtype)]

    def start_round(self, waits_for_end: Set[int] = frozenset()) -> None:
        super().start_round(waits_for_end)
        self._forget_rows()
        self._counts: Tensor | None = None
        self._has_flag_set = False
        self._reduced: Tensor | None = None

    def take(self, chunk: Chunk, gradients: Sequence[Tensor | None] | None = None) -> None:
        """Copies the rows of `.grad`, scaled and in the dtype in which they travel."""
        chunk.is_taken = True
        self.num_untaken -= 1
        if self._producers:
            self._join_producers()
        (gradient,) = chunk.gradients() if gradients is None else gradients
        if gradient is not None:
            self._rows, values = _to_rows(gradient)
            if values.numel():
                numel = values.numel() * (2 if values.is_complex() else 1)
                self._values = torch.empty(numel, dtype=self.layout.dtype, device=self.device)
                self._ops.flatten([values], Slots(self._values, (0,), [values]), self._scale)
        self.params[0].grad = None
        if self._producers:
            self._release_producers()

    def launch(self, flag: bool = False) -> None:
        """Takes the gradient if that is not done yet, and starts to gather how many rows it has.

        Args:
            flag: what this rank says beside that number.
        """
        if self.num_untaken:
            self.take(self.chunks[0])
        mine = torch.tensor([self._rows.numel(), flag], dtype=torch.int64, device=self.device)
        world_size = self._collective.world_size
        self._counts = torch.empty(world_size, 2, dtype=torch.int64, device=self.device)
        self._is_in_flight = True
        self._work = dist.all_gather(
            list(self._counts), mine, group=self._collective.group, async_op=True
        )

    def wait(self) -> None:
        """Gathers the rows and reduces them. Collective; reads on the host how many there are."""
        assert self._counts is not None
        super().wait()
        num_rows, flags = self._counts.t().tolist()
        self._has_flag_set = any(flags)
        rows, values = self._gather_rows(num_rows)
        self._forget_rows()
        reduce = self._maximum if self._collective.op == "max" else self._sum
        row, value = reduce(rows, values)
        param = self.params[0]
        if param.is_complex():
            value = torch.view_as_complex(value)
        self._reduced = _from_rows(row, value.to(param.dtype), param.shape)

    def is_flagged(self) -> bool:
        return self._has_flag_set

    def hand_out(self, absent: Collection[int] = ()) -> None:
        """Does nothing: how large the reduced gradient will be is not known before `wait`."""

    def finish(self, restore: Mapping[int, Tensor | None] | None = None) -> None:
        self.params[0].grad = restore[0] if restore and 0 in restore else self._reduced
        self._reduced = None

    def _forget_rows(self) -> None:
        self._rows = torch.empty(0, dtype=torch.int64, device=self.device)
        self._values = torch.empty(0, dtype=self.layout.dtype, device=self.device)

    def _gather_rows(self, num_rows: Sequence[int]) -> tuple[list[Tensor], list[Tensor]]:
        """Numbers and values of the rows of each rank; values as they travel, in real dtypes."""
        shape = (*self.params[0].shape[1:], *((2,) if self.params[0].is_complex() else ()))
        dtype = self.layout.dtype
        row_bytes = torch.Size(shape).numel() * dtype.itemsize
        # Numbers follow values, in one buffer: half as many collectives.
        start = round_up(max(num_rows) * row_bytes, _ALIGNMENT_BYTES)
        size = round_up(start + max(*num_rows, 1) * _INDEX_BYTES, _ALIGNMENT_BYTES)
        gathered = torch.empty(len(num_rows), size, dtype=torch.uint8, device=self.device)
        if any(num_rows):  # the same on all ranks
            mine = torch.zeros(size, dtype=torch.uint8, device=self.device)
            for offset, part in ((0, self._values), (start, self._rows)):
                as_bytes = part.view(torch.uint8)
                mine[offset : offset + as_bytes.numel()] = as_bytes
            dist.all_gather(list(gathered), mine, group=self._collective.group)
        rows, values = [], []
        for theirs, count in zip(gathered, num_rows, strict=True):
            rows.append(theirs[start : start + count * _INDEX_BYTES].view(torch.int64))
            values.append(theirs[: count * row_bytes].view(dtype).view(count, *shape))
        return rows, values

    def _sum(self, rows: list[Tensor], values: list[Tensor]) -> tuple[Tensor, Tensor]:
        size = (self.params[0].shape[0], *values[0].shape[1:])
        everything = torch.cat(rows)[None], torch.cat(values)
        return _to_rows(torch.sparse_coo_tensor(*everything, size, check_invariants=False))

    def _maximum(self, rows: list[Tensor], values: list[Tensor]) -> tuple[Tensor, Tensor]:
        """The maximum over ranks, where a rank without a row counts as zeros."""
        union, places = torch.unique(torch.cat(rows), return_inverse=True)
        maximum: Tensor | None = None
        for place, value in zip(places.split([len(r) for r in rows]), values, strict=True):
            whole = value.new_zeros(len(union), *value.shape[1:])
            whole[place] = value
            maximum = whole if maximum is None else torch.maximum(maximum, whole)
        assert maximum is not None
        return union, maximum


def _to_rows(gradient: Tensor) -> tuple[Tensor, Tensor]:
    """Splits a gradient of any layout into its rows: numbers, ascending, and contiguous values."""
    gradient = gradient.detach()
    if gradient.layout != torch.sparse_coo or gradient.sparse_dim() != 1:
        # Row numbers are all that ranks would have to agree on.
        dense = gradient if gradient.layout == torch.strided else gradient.to_dense()
        gradient = dense.to_sparse(1)
    gradient = gradient.coalesce()
    return gradient.indices()[0].contiguous(), gradient.values().contiguous()


def _from_rows(rows: Tensor, values: Tensor, shape: Sequence[int]) -> Tensor:
    return torch.sparse_coo_tensor(
        rows[None], values, tuple(shape), is_coalesced=True, check_invariants=False
    )
