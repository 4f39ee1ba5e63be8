"""Sparse gradients: those of nn.Embedding and nn.EmbeddingBag, and those that nobody announced."""

from __future__ import annotations

import copy
import logging
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel.distributed import _MixedPrecision
from torch.utils.checkpoint import checkpoint

import fusedddp
from fusedddp.layout import ParamSpec, build_layout
from fusedddp.sparse import SparseBucket
from tests.expected import both_views, mean_of_ranks
from tests.models import gradients
from tests.ranks import Ranks
from tests.test_exceptions import Bomb

_ROWS = 11


def words(seed: int, rank: int) -> Tensor:
    """Rows to look up: some of them twice, and not equally many on each rank."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    return torch.randint(_ROWS, (3 + 4 * rank, 2), generator=generator)


class Words(nn.Module):
    """An embedding and a bag between dense layers, whichever of them the caller names."""

    def __init__(self, sparse: bool = True, dense: bool = True, **keywords: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.single = nn.Embedding(_ROWS, 4, sparse=sparse, **keywords)
        self.bag = nn.EmbeddingBag(_ROWS, 4, sparse=sparse, mode="sum", **keywords)
        self.out = nn.Linear(4, 3, **keywords) if dense else nn.Identity()

    def forward(self, rows: Tensor, parts: str = "single bag") -> Tensor:
        found = []
        if "single" in parts:
            found.append(self.single(rows).sum(1))
        if "bag" in parts:
            found.append(self.bag(rows))
        hidden = torch.stack(found).sum(0)
        return self.out(Bomb.apply(hidden)).square().mean()


def dense_twin(model: nn.Module) -> nn.Module:
    twin = copy.deepcopy(model)
    for module in twin.modules():
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
            module.sparse = False
    return twin


def expected(model: nn.Module, loss: Any) -> dict[str, Tensor | None]:
    """The mean over two ranks of the gradients of the same model with dense ones."""
    return mean_of_ranks(dense_twin(model), loss)


def assert_gradients(
    model: nn.Module, want: dict[str, Tensor | None], sparse: tuple[str, ...] = ("single", "bag")
) -> None:
    """`.grad` is exactly `want`, and sparse where the name contains one of `sparse`."""
    for name, gradient in gradients(model).items():
        if want[name] is None:
            assert gradient is None, name
            continue
        assert gradient is not None, name
        if any(part in name for part in sparse):
            assert gradient.layout == torch.sparse_coo and gradient.is_coalesced(), name
            assert gradient.sparse_dim() == 1 and gradient.dtype == want[name].dtype, name
            gradient = gradient.to_dense()
        assert gradient.layout == torch.strided, name
        assert torch.equal(gradient, want[name]), name


# -- training ------------------------------------------------------------------------------------


def optimizers(model: nn.Module, adam: bool) -> list[torch.optim.Optimizer]:
    if not adam:
        return [torch.optim.SGD(model.parameters(), lr=0.125)]
    tables = [p for name, p in model.named_parameters() if "single" in name or "bag" in name]
    rest = [p for name, p in model.named_parameters() if "out" in name]
    both = [torch.optim.SparseAdam(tables, lr=0.05)]
    return [*both, torch.optim.Adam(rest, lr=0.05)] if rest else both


def train(model: Any, rank: int, adam: bool, micro_batches: int) -> list[dict[str, Tensor | None]]:
    """Gradients of each step, and at last the parameters."""
    history = []
    steps = optimizers(model, adam)
    for step in range(5):
        model.zero_grad()
        for micro in range(micro_batches):
            model.require_backward_grad_sync = micro == micro_batches - 1
            model(words(10 * step + micro, rank)).backward()
        history.append(gradients(model))
        for optimizer in steps:
            optimizer.step()
    return [*history, {name: p.detach() for name, p in model.named_parameters()}]


def check_parity(rank: int, views: bool, dense: bool, adam: bool, micro_batches: int) -> None:
    model = Words(dense=dense)
    ours = fusedddp.wrap(copy.deepcopy(model), gradient_as_bucket_view=views)
    theirs = DistributedDataParallel(copy.deepcopy(model), gradient_as_bucket_view=views)
    histories = [train(wrapped, rank, adam, micro_batches) for wrapped in (ours, theirs)]
    for step, (mine, reference) in enumerate(zip(*histories, strict=True)):
        for name in map(lambda name: name.removeprefix("module."), reference):
            a, b = (side.get(name, side.get(f"module.{name}")) for side in (mine, reference))
            assert a.layout == b.layout and a.is_sparse == (step < 5 and "out" not in name), name
            if a.is_sparse:
                assert a.is_coalesced() and torch.equal(a.indices(), b.indices()), (step, name)
                a, b = a.values(), b.values()
            assert torch.equal(a, b), (step, name)


@both_views
@pytest.mark.parametrize("dense", [True, False], ids=["mixed", "alone"])
@pytest.mark.parametrize("adam", [False, True], ids=["sgd", "adam"])
@pytest.mark.parametrize("micro_batches", [1, 3], ids=["plain", "no_sync"])
def test_training_is_bitwise_ddp(
    two_ranks: Ranks, views: bool, dense: bool, adam: bool, micro_batches: int
) -> None:
    two_ranks.run(check_parity, views, dense, adam, micro_batches)


def check_dense_training(rank: int, views: bool, dtype: torch.dtype) -> None:
    model = Words(dtype=dtype)
    sparse = fusedddp.wrap(model, gradient_as_bucket_view=views)
    dense = fusedddp.wrap(dense_twin(model), gradient_as_bucket_view=views)
    assert not dense.module.single.sparse
    for step in range(5):
        for wrapped in (sparse, dense):
            wrapped.zero_grad()
            # Each row once, so that nothing depends on the order in which a rank adds up its own.
            rows = torch.randperm(_ROWS, generator=torch.Generator().manual_seed(step))
            wrapped(rows[: 4 + 6 * rank].view(-1, 2)).backward()
        assert_gradients(sparse.module, gradients(dense.module))
        for wrapped in (sparse, dense):
            torch.optim.SGD(wrapped.parameters(), lr=0.125).step()
        for a, b in zip(sparse.parameters(), dense.parameters(), strict=True):
            assert torch.equal(a, b), step


@both_views
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str
)
def test_training_is_bitwise_dense_training(
    two_ranks: Ranks, views: bool, dtype: torch.dtype
) -> None:
    two_ranks.run(check_dense_training, views, dtype)


def check_accumulation(rank: int, views: bool) -> None:
    """Reduced gradients that nobody cleared, and two backwards of one forward."""
    model = Words()
    wrapped = fusedddp.wrap(model, gradient_as_bucket_view=views)
    for step in range(4):
        wrapped(words(step, rank)).backward()

    def reference(m: Any, r: int) -> Tensor:
        return sum(m(words(step, r)) for step in range(4))

    want = expected(model, reference)
    for name, gradient in gradients(model).items():
        torch.testing.assert_close(gradient.to_dense(), want[name], msg=name)
    for step in range(3):
        wrapped.zero_grad(set_to_none=step == 1)
        loss = wrapped(words(step, rank))
        loss.backward(retain_graph=True)
        loss.backward()
        want = expected(model, lambda m, r, s=step: 2 * m(words(s, r)))
        for name, gradient in gradients(model).items():
            torch.testing.assert_close(gradient.to_dense(), want[name], msg=name)


@both_views
def test_accumulating_reduced_gradients(two_ranks: Ranks, views: bool) -> None:
    two_ranks.run(check_accumulation, views)


# -- gradients that are not there, or not as announced -------------------------------------------


def check_unused(rank: int, views: bool, dense: bool) -> None:
    model = Words(dense=dense)
    wrapped = fusedddp.wrap(model, gradient_as_bucket_view=views, find_unused_parameters=True)
    for step in range(4):
        wrapped.zero_grad()

        def loss(m: Any, r: int, step: int = step) -> Tensor:
            parts = "single bag" if step == 1 else ["single", "single bag"][(r + step) % 2]
            return m(words(step, r), parts)

        loss(wrapped, rank).backward()
        assert_gradients(model, expected(model, loss))
    # One that nobody used keeps what it had, which ranks need not have in common.
    for mine in (torch.sparse_coo_tensor([[rank]], torch.ones(1, 4), (_ROWS, 4)), None):
        wrapped.zero_grad()
        model.bag.weight.grad = mine
        wrapped(words(7, rank), "single").backward()
        assert model.bag.weight.grad is mine
        assert model.single.weight.grad.is_coalesced()
    # An empty batch has a gradient without rows, here on one rank and then on both.
    for ranks in ((0,), (0, 1)):
        wrapped.zero_grad()

        def empty(m: Any, r: int, ranks: tuple[int, ...] = ranks) -> Tensor:
            return m(words(8, r)[: 0 if r in ranks else None], "single")

        empty(wrapped, rank).backward()
        assert_gradients(model, expected(model, empty))
    assert model.single.weight.grad._nnz() == 0


@both_views
@pytest.mark.parametrize("dense", [True, False], ids=["mixed", "alone"])
def test_unused_and_empty(two_ranks: Ranks, views: bool, dense: bool) -> None:
    two_ranks.run(check_unused, views, dense)


def check_strict(rank: int, first: bool) -> None:
    """Without find_unused_parameters the round completes, and the next forward tells all ranks."""
    model = Words(dense=False)
    wrapped = fusedddp.wrap(model)
    if not first:
        wrapped(words(0, rank)).backward()
        wrapped.zero_grad()
    wrapped(words(1, rank), ["single", "single bag"][rank]).backward()
    assert_gradients(
        model, expected(model, lambda m, r: m(words(1, r), ["single", "single bag"][r]))
    )
    where = ["for rank 0", "on other ranks than rank 1"][rank]
    with pytest.raises(RuntimeError, match=rf"did not receive grad {where}: bag\.weight"):
        wrapped(words(2, rank))
    wrapped.zero_grad()
    wrapped(words(3, rank)).backward()
    assert_gradients(model, expected(model, lambda m, r: m(words(3, r))))


@pytest.mark.parametrize("first", [True, False], ids=["first", "later"])
def test_a_missing_sparse_gradient_is_told(two_ranks: Ranks, first: bool) -> None:
    two_ranks.run(check_strict, first)


class Announcements(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())

    def __enter__(self) -> Announcements:
        logging.getLogger("fusedddp").addHandler(self)
        return self

    def __exit__(self, *_: object) -> None:
        logging.getLogger("fusedddp").removeHandler(self)


class Tied(nn.Module):
    """The embedding's weights are those of the output, too, where the caller says so."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(_ROWS, 4, sparse=True)
        self.middle = nn.Linear(4, 4)

    def forward(self, rows: Tensor, ties: bool) -> Tensor:
        hidden = self.middle(self.table(rows))
        return (F.linear(hidden, self.table.weight) if ties else hidden).square().sum()


def check_tied(rank: int, views: bool, ranks: tuple[int, ...]) -> None:
    model = Tied()
    wrapped = fusedddp.wrap(model, gradient_as_bucket_view=views)
    with Announcements() as announced:
        for step in range(4):
            wrapped.zero_grad()
            with wrapped.no_sync():
                wrapped(words(step + 10, rank), False).backward()
            wrapped(words(step, rank), rank in ranks).backward()
            want = expected(
                model,
                lambda m, r, s=step: m(words(s + 10, r), False) + m(words(s, r), r in ranks),
            )
            for name, gradient in gradients(model).items():
                assert gradient.is_sparse == (name == "table.weight")
                torch.testing.assert_close(gradient.to_dense(), want[name], msg=name)
    assert len(announced.texts) == (rank in ranks)
    assert all(t.startswith("table.weight has received a dense") for t in announced.texts)


@both_views
@pytest.mark.parametrize("ranks", [(0, 1), (1,)], ids=["both", "one"])
def test_weights_tied_to_an_output(two_ranks: Ranks, views: bool, ranks: tuple[int, ...]) -> None:
    two_ranks.run(check_tied, views, ranks)


class Unannounced(nn.Module):
    """A parameter of no embedding, whose gradient is sparse where the caller says so."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.rows = nn.Parameter(torch.randn(_ROWS, 4))
        self.out = nn.Linear(4, 3)

    def forward(self, rows: Tensor, sparse: bool) -> Tensor:
        return self.out(F.embedding(rows, self.rows, sparse=sparse)).square().sum()


def check_unannounced(rank: int, views: bool, first: bool) -> None:
    model = Unannounced()
    # Small buckets, so that others are reduced already when this gradient comes.
    wrapped = fusedddp.wrap(model, gradient_as_bucket_view=views, bucket_cap_mb=1 / 2**16)
    with Announcements() as announced:
        for step in range(4):
            wrapped.zero_grad()
            is_sparse = first or step % 2 == 1
            if step == 3:
                with wrapped.no_sync():
                    wrapped(words(step, rank), True).backward()
            wrapped(words(step, rank), is_sparse and rank == 1).backward()
            times = 2 if step == 3 else 1
            want = mean_of_ranks(model, lambda m, r, s=step, n=times: n * m(words(s, r), False))
            assert_gradients(model, want, sparse=())
    assert len(announced.texts) == (rank == 1)
    assert all(t.startswith("rows has received a sparse") for t in announced.texts)


@both_views
@pytest.mark.parametrize("first", [True, False], ids=["first", "later"])
def test_a_sparse_gradient_of_a_dense_parameter(two_ranks: Ranks, views: bool, first: bool) -> None:
    two_ranks.run(check_unannounced, views, first)


class Repeated(nn.Module):
    """Looks up more often in some steps, in checkpoints that each accumulate on their own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.single = nn.Embedding(_ROWS, 4, sparse=True)
        self.plain = nn.Parameter(torch.randn(_ROWS, 4))

    def forward(self, rows: Tensor, times: int, ties: bool) -> Tensor:
        def look_up(x: Tensor) -> Tensor:
            found = self.single(rows) * x + F.embedding(rows, self.plain, sparse=ties)
            return found + self.single.weight.sum() if ties else found

        x = torch.ones(4, requires_grad=True)
        for _ in range(times):
            x = checkpoint(look_up, x, use_reentrant=True).mean((0, 1))
        return x.square().sum()


def check_late(rank: int, views: bool, ties: bool) -> None:
    model = Repeated()
    wrapped = fusedddp.wrap(model, gradient_as_bucket_view=views)

    def loss(m: Any, r: int, step: int) -> Tensor:
        times = 3 if step == 1 and r == 1 else 1
        return m(words(step, r), times, ties and times > 1)

    for step in range(4):
        wrapped.zero_grad()
        loss(wrapped, rank, step).backward()
        want = mean_of_ranks(dense_twin(model), lambda m, r, s=step: loss(m, r, s))
        for name, gradient in gradients(model).items():
            assert gradient.is_sparse == (name == "single.weight")
            assert not gradient.is_sparse or gradient.is_coalesced()
            torch.testing.assert_close(gradient.to_dense(), want[name], msg=name)
    names = wrapped.reducer.names
    late = {names[i].removeprefix("module.") for i in wrapped.reducer.plan.waits_for_end}
    assert late == {"single.weight", "plain"}, "nothing came late"


@both_views
@pytest.mark.parametrize("ties", [False, True], ids=["as-announced", "other-layout"])
def test_late_contributions(two_ranks: Ranks, views: bool, ties: bool) -> None:
    two_ranks.run(check_late, views, ties)


def check_exception(rank: int, good_before: int, dense: bool) -> None:
    model = Words(dense=dense)
    wrapped = fusedddp.wrap(model, bucket_cap_mb=1 / 2**18, find_unused_parameters=True)

    def good_step(step: int) -> None:
        wrapped.zero_grad()
        wrapped(words(step, rank)).backward()
        assert_gradients(model, expected(model, lambda m, r: m(words(step, r))))

    for step in range(good_before):
        good_step(step)
    Bomb.armed = rank == 0
    wrapped.zero_grad()
    try:
        wrapped(words(5, rank)).backward()
    except ArithmeticError:
        assert rank == 0
    finally:
        Bomb.armed = False
    with pytest.raises(RuntimeError, match="an exception ended it on 1 of 2"):
        wrapped(words(5, rank))
    for step in range(6, 9):
        good_step(step)


@pytest.mark.parametrize("good_before", [0, 2], ids=["first", "later"])
@pytest.mark.parametrize("dense", [True, False], ids=["mixed", "alone"])
def test_an_exception_in_a_backward(two_ranks: Ranks, good_before: int, dense: bool) -> None:
    two_ranks.run(check_exception, good_before, dense)


def check_converted(rank: int) -> None:
    """A module of another dtype is laid out again."""
    model = Words()
    wrapped = fusedddp.wrap(model)
    for dtype in (torch.float32, torch.float64):
        model.to(dtype)
        for step in range(3):
            wrapped.zero_grad()
            wrapped(words(step, rank)).backward()
            assert_gradients(model, expected(model, lambda m, r, s=step: m(words(s, r))))
    twin = copy.deepcopy(wrapped)
    twin(words(1, rank)).backward()
    twin.zero_grad()
    twin(words(0, rank)).backward()
    assert_gradients(twin.module, expected(model, lambda m, r: m(words(0, r))))
    assert sum(isinstance(bucket, SparseBucket) for bucket in twin.reducer.buckets) == 2
    assert wrapped._set_sparse_metadata({"single.weight": torch.tensor([1])}) is None


def test_conversion_and_copies(two_ranks: Ranks) -> None:
    two_ranks.run(check_converted)


def check_construction(rank: int) -> None:
    with pytest.raises(
        RuntimeError, match=r"single\.weight: .*sparse gradient\], rank 1 has \[single\.weight"
    ):
        fusedddp.wrap(Words(sparse=rank == 0))
    frozen = Words()
    frozen.single.requires_grad_(False)
    wrapped = fusedddp.wrap(frozen)
    for step in range(3):
        wrapped.zero_grad()
        wrapped(words(step, rank)).backward()
        want = expected(frozen, lambda m, r, s=step: m(words(s, r)))
        assert_gradients(frozen, want)
        assert frozen.single.weight.grad is None


def test_ranks_that_differ_and_frozen_tables(two_ranks: Ranks) -> None:
    two_ranks.run(check_construction)


def check_three_ranks(rank: int) -> list[Tensor]:
    model = Words()
    wrapped = fusedddp.wrap(model)
    for step in range(2):
        wrapped.zero_grad()
        wrapped(words(step, rank)).backward()
    for name, p in model.named_parameters():
        want = torch.zeros_like(p, dtype=torch.float64)
        largest = torch.zeros_like(want)
        for other in range(3):
            alone = dense_twin(model)
            alone.zero_grad()
            alone(words(1, other)).backward()
            contribution = dict(alone.named_parameters())[name].grad.double()
            want += contribution / 3
            largest = torch.maximum(largest, contribution.abs())
        # As in the dense case: one rounding of each contribution, one of 1/3, two additions.
        bound = 4 * torch.finfo(torch.float32).eps / 2 * largest
        assert (p.grad.to_dense().double() - want).abs().le(bound).all(), name
    return [p.grad.to_dense() for p in model.parameters()]


def test_three_ranks_hold_the_same_bits(three_ranks: Ranks) -> None:
    for gradient, *others in zip(*three_ranks.run(check_three_ranks), strict=True):
        assert all(torch.equal(gradient, other) for other in others)


# -- manual mode ---------------------------------------------------------------------------------


def contribution(rank: int, kind: str, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    generator = torch.Generator().manual_seed(rank)
    dense = torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
    if dtype.is_complex:
        dense = dense * (1 + 0.5j)
    dense[rank :: 3 - rank] = 0
    if kind == "dense":
        return dense
    if kind == "rows":
        return dense.to_sparse(1)
    if kind == "elements":
        return dense.to_sparse()
    assert kind == "uncoalesced"
    half = (dense / 2).to_sparse(1)
    rows, values = half.indices(), half.values()
    return torch.sparse_coo_tensor(
        torch.cat([rows.flip(1), rows], 1), torch.cat([values.flip(0), values]), shape
    )


def check_manual(rank: int, kinds: tuple[str, str], dtype: torch.dtype, keywords: Any) -> None:
    for shape in ((9, 4), (9,), (9, 2, 3), (9, 0)):
        kind = kinds[rank]
        sparse, dense = (nn.Parameter(torch.zeros(shape, dtype=dtype)) for _ in range(2))
        if kind != "none":
            sparse.grad = contribution(rank, kind, dtype, shape)
            dense.grad = contribution(rank, "dense", dtype, shape)
        other = nn.Parameter(torch.zeros(3))
        other.grad = torch.ones(3)
        lost = nn.Parameter(torch.zeros(3))
        fusedddp.all_reduce_gradients([other, sparse, lost], **keywords)
        fusedddp.all_reduce_gradients([dense], **keywords)
        assert sparse.grad.is_sparse and sparse.grad.is_coalesced() and lost.grad is None
        assert sparse.grad.dtype == dtype and sparse.grad.sparse_dim() == 1
        assert torch.equal(sparse.grad.to_dense(), dense.grad), shape


@pytest.mark.parametrize(
    ("kinds", "dtype", "keywords"),
    [
        (("rows", "uncoalesced"), torch.float32, {}),
        (("rows", "none"), torch.float32, {}),
        (("none", "rows"), torch.float32, {"op": "max"}),
        (("dense", "rows"), torch.float32, {}),
        (("elements", "dense"), torch.float32, {"op": "max"}),
        (("rows", "elements"), torch.float64, {"op": "sum"}),
        (("rows", "uncoalesced"), torch.float64, {"reduce_dtype": torch.float16}),
        (("rows", "rows"), torch.bfloat16, {}),
        (("uncoalesced", "rows"), torch.float16, {}),
        (("rows", "dense"), torch.complex64, {}),
        (("rows", "rows"), torch.complex64, {"op": "max"}),
        (("rows", "rows"), torch.float32, {"reduce_dtype": torch.bfloat16}),
    ],
    ids=str,
)
def test_manual_mode_is_bitwise_dense(
    two_ranks: Ranks, kinds: tuple[str, str], dtype: torch.dtype, keywords: Any
) -> None:
    two_ranks.run(check_manual, kinds, dtype, keywords)


def check_manual_scalar(rank: int) -> None:
    scalar = nn.Parameter(torch.zeros(()))
    scalar.grad = torch.tensor(1.0 + rank).to_sparse() if rank else torch.tensor(1.0)
    fusedddp.all_reduce_gradients([scalar])
    assert scalar.grad.layout == torch.strided and scalar.grad == 1.5


def test_a_sparse_scalar_becomes_dense(two_ranks: Ranks) -> None:
    two_ranks.run(check_manual_scalar)


# -- the layout ----------------------------------------------------------------------------------

specs = st.builds(
    ParamSpec,
    shape=st.tuples(st.integers(0, 40), st.integers(0, 4)),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    is_sparse=st.booleans(),
)


@given(st.lists(specs, min_size=1, max_size=20), st.booleans(), st.sampled_from([1, 100, 10**6]))
def test_sparse_parameters_have_buckets_of_their_own(
    members: list[ParamSpec], has_flag: bool, cap: int
) -> None:
    def lay_out(members: list[ParamSpec]) -> Any:
        return build_layout(
            members,
            range(len(members)),
            world_size=2,
            bucket_cap_bytes=cap,
            has_flag=has_flag,
            chunk_bytes=64,
        )

    layout = lay_out(members)
    assert sorted(i for b in layout.buckets for i in b.params) == list(range(len(members)))
    for bucket in layout.buckets:
        assert bucket.is_sparse == members[bucket.params[0]].is_sparse
        assert not bucket.is_sparse or len(bucket.params) == 1
        assert all(members[i].is_sparse == bucket.is_sparse for i in bucket.params)
    flagged = [bucket for bucket in layout.buckets if bucket.has_flag]
    assert flagged == ([layout.buckets[-1]] if has_flag else [])
    assert not flagged or flagged[0].is_sparse == all(s.is_sparse for s in members)
    # Dense ones are laid out as if the others were not there.
    dense = [i for i, s in enumerate(members) if not s.is_sparse]
    if dense:
        alone = lay_out([members[i] for i in dense])
        mine = [b for b in layout.buckets if not b.is_sparse]
        assert [b.params for b in mine] == [
            tuple(dense[i] for i in b.params) for b in alone.buckets
        ]
        assert [b.offsets for b in mine] == [b.offsets for b in alone.buckets]
        assert [b.chunks for b in mine] == [b.chunks for b in alone.buckets]


def check_mixed_precision(rank: int, views: bool) -> None:
    """The rows that arrive in bf16 travel in fp32 and come back in fp32."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(9, 4, sparse=True), nn.Linear(4, 2))
    alone = copy.deepcopy(model).to(torch.bfloat16)
    wrapped = fusedddp.wrap(
        model,
        mixed_precision=_MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
        gradient_as_bucket_view=views,
    )
    for step in range(3):
        wrapped.zero_grad()
        tokens = torch.tensor([[step, 4 + r] for r in range(2)])
        wrapped(tokens[rank]).float().sum().backward()
        want = [torch.zeros(p.shape) for p in model.parameters()]
        for r in range(2):
            alone.zero_grad()
            alone(tokens[r]).float().sum().backward()
            for total, p in zip(want, alone.parameters(), strict=True):
                total += p.grad.to_dense().float() / 2
        for p, expected in zip(model.parameters(), want, strict=True):
            assert p.grad.dtype == torch.float32 and torch.equal(p.grad.to_dense(), expected)
        assert model[0].weight.grad.is_sparse


@both_views
def test_mixed_precision(two_ranks: Ranks, views: bool) -> None:
    two_ranks.run(check_mixed_precision, views)
