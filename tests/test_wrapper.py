"""What a backward through the wrapper does in the cases that users meet."""

from __future__ import annotations

import contextlib
import copy
import gc
import weakref
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import fusedddp
from fusedddp.reducer import Phase
from tests.models import Branches, batch, gradients, mlp
from tests.ranks import Ranks

both_views = pytest.mark.parametrize("views", [True, False], ids=["views", "own"])


def mean_of_ranks(model: nn.Module, losses: Any) -> dict[str, Tensor | None]:
    """Gradients of the mean of `losses(model, rank)` over two ranks, computed alone."""
    alone = copy.deepcopy(model)
    for p in alone.parameters():
        p.grad = None
    for rank in range(2):
        (losses(alone, rank) / 2).backward()
    return gradients(alone)


def assert_gradients(model: nn.Module, want: dict[str, Tensor | None], exact: bool = False) -> None:
    for name, gradient in gradients(model).items():
        expected = want[name]
        if expected is None:
            assert gradient is None, f"{name}: expected no gradient, found {gradient}"
        elif exact:
            assert torch.equal(gradient, expected), name
        else:
            torch.testing.assert_close(gradient, expected, msg=lambda m, n=name: f"{n}: {m}")


# -- which backwards are reduced -------------------------------------------------------------------


def check_no_sync_placement(rank: int, around: str) -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    wrapped = fusedddp.wrap(model)
    for step in range(3):  # recording and later rounds
        wrapped.zero_grad()
        x = batch(step, rank, (3, 4))
        forward = wrapped.no_sync() if around in ("both", "forward") else contextlib.nullcontext()
        backward = wrapped.no_sync() if around in ("both", "backward") else contextlib.nullcontext()
        with forward:
            loss = wrapped(x).square().mean()
        with backward:
            loss.backward()
        alone = copy.deepcopy(model)
        alone.zero_grad()
        alone(x).square().mean().backward()
        assert torch.equal(model.weight.grad, alone.weight.grad), "reduced although under no_sync"
        # The next one reduces what was gathered.
        wrapped(batch(step + 10, rank, (3, 4))).square().mean().backward()
        want = mean_of_ranks(
            model,
            lambda m, r, s=step: sum(
                m(batch(seed, r, (3, 4))).square().mean() for seed in (s, s + 10)
            ),
        )
        assert_gradients(model, want)


@pytest.mark.parametrize("around", ["both", "forward", "backward"])
def test_no_sync_means_what_it_says(two_ranks: Ranks, around: str) -> None:
    two_ranks.run(check_no_sync_placement, around)


def check_no_sync_of_other_forwards(rank: int) -> None:
    """Only the forward that a backward comes from counts."""
    model = Methods()
    wrapped = fusedddp.wrap(model)
    x = [batch(s, rank, (3, 4)) for s in range(3)]
    for _ in range(3):  # recording and later rounds
        wrapped.zero_grad()
        reduced = wrapped(x[0]).square().mean()
        with wrapped.no_sync():
            wrapped(x[1])
        reduced.backward()
        want = mean_of_ranks(model, lambda m, r: m(batch(0, r, (3, 4))).square().mean())
        assert_gradients(wrapped, want)

        wrapped.zero_grad()
        with wrapped.no_sync():
            wrapped(x[1]).sum().backward()
        wrapped.zero_grad()
        wrapped.loss(x[0]).backward()
        assert_gradients(wrapped, mean_of_ranks(model, lambda m, r: m.loss(batch(0, r, (3, 4)))))

        wrapped.zero_grad()
        with wrapped.no_sync():
            local = wrapped(x[1]).square().mean()
        (local + wrapped(x[2]).square().mean()).backward()
        want = mean_of_ranks(
            model,
            lambda m, r: sum(m(batch(s, r, (3, 4))).square().mean() for s in (1, 2)),
        )
        assert_gradients(wrapped, want)


def test_no_sync_around_another_forward_has_no_effect(two_ranks: Ranks) -> None:
    two_ranks.run(check_no_sync_of_other_forwards)


def check_no_sync_state(rank: int) -> None:
    wrapped = fusedddp.wrap(mlp())
    with pytest.raises(KeyError), wrapped.no_sync():
        with wrapped.no_sync():
            assert not wrapped.require_backward_grad_sync
        assert not wrapped.require_backward_grad_sync
        raise KeyError
    assert wrapped.require_backward_grad_sync
    wrapped.require_backward_grad_sync = False  # as nanoGPT sets it
    wrapped(batch(0, rank, (8, 20))).sum().backward()
    alone = mlp()
    alone(batch(0, rank, (8, 20))).sum().backward()
    assert_gradients(wrapped, gradients(alone), exact=True)


def test_no_sync_nests_and_is_undone_by_exceptions(two_ranks: Ranks) -> None:
    two_ranks.run(check_no_sync_state)


def check_several_backwards(rank: int, views: bool) -> None:
    model = mlp()
    wrapped = fusedddp.wrap(model, gradient_as_bucket_view=views)

    def losses(m: nn.Module, r: int, step: int) -> tuple[Tensor, Tensor]:
        out = m(batch(step, r, (8, 20)))
        return out[:, 0].square().mean(), out[:, 1:].abs().mean()

    for step in range(3):
        wrapped.zero_grad()
        one, two = losses(wrapped, rank, step)
        one.backward(retain_graph=True)
        two.backward()
        assert_gradients(wrapped, mean_of_ranks(model, lambda m, r, s=step: sum(losses(m, r, s))))


@both_views
def test_two_backwards_of_one_forward(two_ranks: Ranks, views: bool) -> None:
    two_ranks.run(check_several_backwards, views)


def check_accumulation(rank: int, views: bool) -> None:
    model = mlp()
    wrapped = fusedddp.wrap(model, gradient_as_bucket_view=views, bucket_cap_mb=1 / 256)
    for step in range(4):
        wrapped(batch(step, rank, (8, 20))).square().mean().backward()
    want = mean_of_ranks(
        model, lambda m, r: sum(m(batch(s, r, (8, 20))).square().mean() for s in range(4))
    )
    assert_gradients(wrapped, want)


@both_views
def test_accumulating_reduced_gradients_across_the_first_layout(
    two_ranks: Ranks, views: bool
) -> None:
    two_ranks.run(check_accumulation, views)


def check_two_forwards(rank: int) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 1))
    # Training does not depend on the buffers, and before torch 2.13 their broadcast breaks this.
    theirs = DistributedDataParallel(copy.deepcopy(model), broadcast_buffers=False)
    ours = fusedddp.wrap(model)
    for step in range(3):
        for wrapped in (ours, theirs):
            wrapped.zero_grad()
            real, fake = batch(2 * step, rank, (6, 4)), batch(2 * step + 1, rank, (6, 4))
            (wrapped(real).mean() - wrapped(fake).mean()).backward()
        assert_gradients(ours, gradients(theirs), exact=True)
        for (name, a), (_, b) in zip(ours.named_buffers(), theirs.named_buffers(), strict=True):
            if rank == 0:
                assert torch.equal(a, b), name


@pytest.mark.filterwarnings("ignore:`broadcast_buffers` is deprecated")
def test_two_forwards_through_batchnorm_before_one_backward(two_ranks: Ranks) -> None:
    two_ranks.run(check_two_forwards)


def check_autograd_grad(rank: int) -> None:
    """A gradient penalty: torch.autograd.grad through the wrapper, then a backward."""
    model = mlp()
    wrapped = fusedddp.wrap(model)

    def loss(m: nn.Module, r: int, step: int) -> Tensor:
        x = batch(step, r, (8, 20)).requires_grad_()
        out = m(x)
        (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        return out.square().mean() + slope.norm()

    for step in range(3):
        wrapped.zero_grad()
        loss(wrapped, rank, step).backward()
        want = mean_of_ranks(model, lambda m, r, s=step: loss(m, r, s))
        # The last bias has no part in the slope but in the output.
        assert_gradients(wrapped, want)
    assert wrapped.reducer.num_rounds == 3, "torch.autograd.grad is no round"


def test_autograd_grad_is_not_reduced(two_ranks: Ranks) -> None:
    two_ranks.run(check_autograd_grad)


def check_create_graph(rank: int, views: bool) -> None:
    model = nn.Linear(1, 1, bias=False)
    with torch.no_grad():
        model.weight.fill_(2.0)
    wrapped = fusedddp.wrap(model, gradient_as_bucket_view=views)
    for _ in range(3):
        wrapped.zero_grad()
        (wrapped(torch.ones(1, 1)) ** 3 * (rank + 1)).sum().backward(create_graph=True)
        assert torch.equal(model.weight.grad, torch.tensor([[3 * 4.0 * 1.5]]))
        assert not model.weight.grad.requires_grad


@pytest.mark.filterwarnings("ignore:Using backward")
@both_views
def test_create_graph_gives_averaged_values(two_ranks: Ranks, views: bool) -> None:
    two_ranks.run(check_create_graph, views)


class CheckpointedTwice(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.block, self.last = nn.Linear(4, 6), nn.Linear(6, 6), nn.Linear(6, 1)
        self.reentrant = reentrant
        self.times = 2

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for _ in range(self.times):
            x = checkpoint(lambda t: torch.tanh(self.block(t)), x, use_reentrant=self.reentrant)
        return self.last(x).square().mean()


def check_checkpointing(rank: int, reentrant: bool) -> None:
    model = CheckpointedTwice(reentrant)
    wrapped = fusedddp.wrap(model)
    for step in range(3):
        wrapped.zero_grad()
        wrapped(batch(step, rank, (5, 4))).backward()
        assert_gradients(wrapped, mean_of_ranks(model, lambda m, r, s=step: m(batch(s, r, (5, 4)))))
    assert wrapped.reducer.num_rounds == 3


@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "non-reentrant"])
def test_checkpointing_a_block_used_twice(two_ranks: Ranks, reentrant: bool) -> None:
    two_ranks.run(check_checkpointing, reentrant)


def check_late(rank: int, views: bool) -> None:
    """A block that runs once in the first backward and more often later, on one rank only."""
    model = CheckpointedTwice(True)
    model.times = 1
    wrapped = fusedddp.wrap(model, gradient_as_bucket_view=views)

    def loss(m: Any, r: int, step: int) -> Tensor:
        m.times = 1 if step != 1 or r == 0 else 3
        return m(batch(step, r, (5, 4)))

    for step in range(4):
        wrapped.zero_grad()
        model.times = 1 if step != 1 or rank == 0 else 3
        wrapped(batch(step, rank, (5, 4))).backward()
        assert_gradients(wrapped, mean_of_ranks(model, lambda m, r, s=step: loss(m, r, s)))


@both_views
def test_late_contributions_are_reduced_too(two_ranks: Ranks, views: bool) -> None:
    two_ranks.run(check_late, views)


class Methods(nn.Module):
    version = "v1"

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.encoder, self.head = nn.Linear(4, 4), nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(x))

    def loss(self, x: Tensor) -> Tensor:
        return self(x).square().mean()


def check_other_methods(rank: int) -> None:
    model = Methods()
    wrapped = fusedddp.wrap(model)
    assert wrapped.version == "v1"
    assert wrapped.head is model.head
    with pytest.raises(AttributeError, match=r"neither FusedDDP nor the Methods in it has .* 'x'"):
        wrapped.x  # noqa: B018
    for step in range(3):
        wrapped.zero_grad()
        wrapped.loss(batch(step, rank, (5, 4))).backward()
        assert_gradients(
            wrapped, mean_of_ranks(model, lambda m, r, s=step: m.loss(batch(s, r, (5, 4))))
        )


def test_a_loss_made_by_another_method_is_reduced(two_ranks: Ranks) -> None:
    two_ranks.run(check_other_methods)


# -- unused parameters -----------------------------------------------------------------------------


def check_find_unused(rank: int, views: bool, set_to_none: bool) -> None:
    model = Branches()
    wrapped = fusedddp.wrap(model, find_unused_parameters=True, gradient_as_bucket_view=views)
    x = torch.full((3,), float(rank + 1))
    for step in range(4):
        wrapped.zero_grad(set_to_none=set_to_none)
        # Another order on each rank, and another branch that only one takes.
        which = ([0, 1] if rank == 0 else [1, 0, 2]) if step % 2 == 0 else [1, 2]
        wrapped(x, which).backward()
        grads = gradients(model)
        zero = None if set_to_none or step == 0 else torch.zeros(3)
        if step % 2 == 0:
            want = [torch.full((3,), v) for v in (1.5, 1.5, 1.0)]
        else:
            want = [zero, *(torch.full((3,), v) for v in (1.5, 1.5))]
        for i, expected in enumerate(want):
            got = grads[f"w.{i}"]
            assert (got is None) == (expected is None), (step, i, got)
            assert expected is None or torch.equal(got, expected), (step, i, got)
        assert grads["w.3"] is None, "used nowhere"


@both_views
@pytest.mark.parametrize("set_to_none", [True, False], ids=["none", "zero"])
def test_find_unused_parameters(two_ranks: Ranks, views: bool, set_to_none: bool) -> None:
    two_ranks.run(check_find_unused, views, set_to_none)


def check_unused_keeps_old(rank: int, views: bool) -> None:
    """A parameter that no rank used keeps the gradient that it had, reduced or of the user."""
    model = Branches()
    wrapped = fusedddp.wrap(model, find_unused_parameters=True, gradient_as_bucket_view=views)
    x = torch.full((3,), float(rank + 1))
    model.w[3].grad = torch.full((3,), 7.0 + rank)
    wrapped(x, [0, 1, 2]).backward()
    assert torch.equal(model.w[3].grad, torch.full((3,), 7.0 + rank))
    assert torch.equal(model.w[2].grad, torch.full((3,), 1.5))
    wrapped(x, [0]).backward()
    assert torch.equal(model.w[3].grad, torch.full((3,), 7.0 + rank))
    assert torch.equal(model.w[2].grad, torch.full((3,), 1.5))
    assert torch.equal(model.w[0].grad, torch.full((3,), 3.0))
    # Also where it lies in the bucket, and ranks hold different values.
    wrapped(x, [0, 1, 2, 3]).backward()
    model.w[3].grad.fill_(7.0 + rank)
    wrapped(x, [0]).backward()
    assert torch.equal(model.w[3].grad, torch.full((3,), 7.0 + rank))


@both_views
def test_unused_parameters_keep_what_they_had(two_ranks: Ranks, views: bool) -> None:
    two_ranks.run(check_unused_keeps_old, views)


def check_used_only_under_no_sync(rank: int) -> None:
    model = Branches(2)
    wrapped = fusedddp.wrap(model, find_unused_parameters=True)
    x = torch.full((3,), float(rank + 1))
    for _ in range(3):
        wrapped.zero_grad()
        with wrapped.no_sync():
            wrapped(x, [1]).backward()
        wrapped(x, [0]).backward()
        assert torch.equal(model.w[0].grad, torch.full((3,), 1.5))
        assert torch.equal(model.w[1].grad, torch.full((3,), 1.5)), "gathered under no_sync only"


def test_a_gradient_gathered_under_no_sync_is_reduced(two_ranks: Ranks) -> None:
    two_ranks.run(check_used_only_under_no_sync)


def check_strict(rank: int, first: bool) -> str:
    """Default mode: reduced with zeros, nothing drifts, and the next forward raises everywhere."""
    model = Branches()
    wrapped = fusedddp.wrap(model)
    x = torch.full((3,), float(rank + 1))
    everything, some = [0, 1, 2, 3], ([0, 1, 3] if rank == 0 else [0, 1, 2, 3])
    if not first:
        wrapped(x, everything).backward()
        wrapped.zero_grad()
    wrapped(x, some).backward()
    assert torch.equal(model.w[0].grad, torch.full((3,), 1.5))
    assert torch.equal(model.w[2].grad, torch.full((3,), 1.0)), "zeros of rank 0 averaged in"
    with pytest.raises(RuntimeError) as raised:
        wrapped(x, everything)
    # And training can go on.
    wrapped.zero_grad()
    for _ in range(2):
        wrapped(x, everything).backward()
        assert torch.equal(model.w[2].grad, torch.full((3,), 1.5))
        wrapped.zero_grad()
    return str(raised.value)


@pytest.mark.parametrize("first", [True, False], ids=["first", "later"])
def test_strict_mode_tells_every_rank(two_ranks: Ranks, first: bool) -> None:
    on_0, on_1 = two_ranks.run(check_strict, first)
    for text in (on_0, on_1):
        assert text.startswith("Expected to have finished reduction in the prior iteration")
        assert "find_unused_parameters=True" in text
    assert "Parameters which did not receive grad for rank 0: w.2\n" in on_0
    assert "Parameter indices which did not receive grad for rank 0: 2\n" in on_0
    assert "did not receive grad on other ranks than rank 1: w.2\n" in on_1


def check_static_graph(rank: int) -> None:
    model = Branches()
    wrapped = fusedddp.wrap(model, static_graph=True)
    x = torch.full((3,), float(rank + 1))
    for step in range(4):
        wrapped.zero_grad()
        for micro in range(3):
            with wrapped.no_sync() if micro < 2 else contextlib.nullcontext():
                wrapped(x, [0, 1, 2]).backward()
        for i in range(3):
            assert torch.equal(model.w[i].grad, torch.full((3,), 4.5)), step
        assert model.w[3].grad is None


def test_static_graph_accumulates_and_allows_unused(two_ranks: Ranks) -> None:
    two_ranks.run(check_static_graph)


@dataclass
class Result:
    loss: Tensor
    logits: list[Tensor]


class Structured(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.used, self.spare = nn.Linear(4, 2), nn.Linear(4, 2)
        self.kind = kind

    def forward(self, x: Tensor) -> Any:
        logits = self.used(x)
        loss = logits.square().mean()
        if self.kind == "dataclass":
            return Result(loss, [logits, self.spare(x)])
        if self.kind == "dict":
            return {"loss": loss, "more": {"logits": (logits, self.spare(x))}}
        holder = type("Holder", (), {})()
        holder.loss, holder.logits = loss, [logits, self.spare(x)]
        return holder


def check_outputs(rank: int, kind: str) -> None:
    model = Structured(kind)
    wrapped = fusedddp.wrap(model, find_unused_parameters=True)
    for step in range(3):
        wrapped.zero_grad()
        result = wrapped(batch(step, rank, (5, 4)))
        (result["loss"] if kind == "dict" else result.loss).backward()
        want = mean_of_ranks(
            model.used, lambda m, r, s=step: m(batch(s, r, (5, 4))).square().mean()
        )
        assert_gradients(model.used, want)
        assert model.spare.weight.grad is None


@pytest.mark.parametrize("kind", ["dataclass", "dict", "object"])
def test_outputs_left_out_of_the_loss(two_ranks: Ranks, kind: str) -> None:
    two_ranks.run(check_outputs, kind)


# -- exceptions ------------------------------------------------------------------------------------


class Bomb(torch.autograd.Function):
    armed = False

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        if Bomb.armed:
            raise ArithmeticError("in the middle of backward")
        return gradient


class Explosive(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(4, 6), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(Bomb.apply(self.first(x))).square().mean()


def check_exception(rank: int, good_before: int, views: bool, set_to_none: bool) -> None:
    model = Explosive()
    wrapped = fusedddp.wrap(model, bucket_cap_mb=1 / 2**18, gradient_as_bucket_view=views)

    def good_step(step: int) -> None:
        wrapped.zero_grad(set_to_none=set_to_none)
        wrapped(batch(step, rank, (5, 4))).backward()
        assert_gradients(wrapped, mean_of_ranks(model, lambda m, r: m(batch(step, r, (5, 4)))))

    for step in range(good_before):
        good_step(step)
    wrapped.zero_grad(set_to_none=set_to_none)
    Bomb.armed = True
    with pytest.raises(ArithmeticError):
        wrapped(batch(9, rank, (5, 4))).backward()
    Bomb.armed = False
    assert wrapped.reducer.phase is not Phase.IDLE
    with pytest.raises(RuntimeError, match="expected the last backward to have run to its end"):
        wrapped._check_reducer_finalized()
    for step in range(10, 13):
        good_step(step)
    wrapped._check_reducer_finalized()


@both_views
@pytest.mark.parametrize("set_to_none", [True, False], ids=["none", "zero"])
@pytest.mark.parametrize("good_before", [0, 1, 2])
def test_an_exception_in_backward_then_a_good_step(
    two_ranks: Ranks, good_before: int, views: bool, set_to_none: bool
) -> None:
    two_ranks.run(check_exception, good_before, views, set_to_none)


class TwoOutputs(Explosive):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.first(x)
        return hidden.square().mean(), self.last(Bomb.apply(hidden)).square().mean()

    def loss(self, x: Tensor) -> Tensor:
        return sum(self(x))


def check_exception_without_a_forward(rank: int, laid_out: bool, views: bool) -> None:
    """The next backward comes from the same forward, or from another method of the module."""
    model = TwoOutputs()
    wrapped = fusedddp.wrap(model, find_unused_parameters=True, gradient_as_bucket_view=views)
    if laid_out:
        sum(wrapped(batch(0, rank, (5, 4)))).backward()
    for step in range(1, 4):
        wrapped.zero_grad()
        good, bad = wrapped(batch(step, rank, (5, 4)))
        Bomb.armed = True
        with pytest.raises(ArithmeticError):
            bad.backward(retain_graph=True)
        Bomb.armed = False
        wrapped.zero_grad()
        if step < 3:
            good.backward()
            want = mean_of_ranks(model, lambda m, r, s=step: m(batch(s, r, (5, 4)))[0])
        else:
            wrapped.loss(batch(step, rank, (5, 4))).backward()
            want = mean_of_ranks(model, lambda m, r, s=step: m.loss(batch(s, r, (5, 4))))
        assert_gradients(wrapped, want)


@both_views
@pytest.mark.parametrize("laid_out", [True, False])
def test_an_exception_in_backward_then_a_backward_without_a_forward(
    two_ranks: Ranks, laid_out: bool, views: bool
) -> None:
    two_ranks.run(check_exception_without_a_forward, laid_out, views)


def check_exception_on_one_rank(rank: int) -> None:
    """Rank 0 fails in the middle; rank 1 gets its own half of the mean, and nobody waits."""
    model = Explosive()
    wrapped = fusedddp.wrap(model, bucket_cap_mb=1 / 2**18)
    wrapped(batch(0, rank, (5, 4))).backward()
    wrapped.zero_grad()
    Bomb.armed = rank == 0
    try:
        wrapped(batch(1, rank, (5, 4))).backward()
        assert rank == 1
    except ArithmeticError:
        assert rank == 0
    Bomb.armed = False
    # Rank 1 learns at its next forward that rank 0 had no gradient for some parameters.
    wrapped.zero_grad()
    if rank == 1:
        with pytest.raises(RuntimeError, match="did not receive grad on other ranks"):
            wrapped(batch(2, rank, (5, 4)))
    wrapped(batch(2, rank, (5, 4))).backward()
    assert_gradients(wrapped, mean_of_ranks(model, lambda m, r: m(batch(2, r, (5, 4)))))


def test_an_exception_on_one_rank_hangs_nobody(two_ranks: Ranks) -> None:
    two_ranks.run(check_exception_on_one_rank)


# -- parameters and gradients ----------------------------------------------------------------------


class Odd(nn.Module):
    """Zero-element, zero-dimensional, 64-bit, 16-bit, complex and non-contiguous parameters."""

    def __init__(self) -> None:
        super().__init__()
        g = torch.Generator().manual_seed(0)
        self.empty = nn.Parameter(torch.empty(0, 3))
        self.scalar = nn.Parameter(torch.tensor(1.5))
        self.f64 = nn.Parameter(torch.randn(5, dtype=torch.float64, generator=g))
        self.bf16 = nn.Parameter(torch.randn(7, generator=g).bfloat16())
        self.f16 = nn.Parameter(torch.randn(3, generator=g).half())
        self.c64 = nn.Parameter(torch.randn(3, 2, dtype=torch.cfloat, generator=g))
        self.turned = nn.Parameter(torch.randn(4, 6, generator=g).t())
        self.image = nn.Parameter(
            torch.randn(2, 3, 2, 2, generator=g).to(memory_format=torch.channels_last)
        )

    def forward(self, x: Tensor) -> Tensor:
        parts = [self.empty.sum(), self.scalar * x, (self.f64 * x).sum(), (self.bf16 * x).sum()]
        parts += [(self.f16 * x).sum(), (self.turned * x).square().sum()]
        parts += [(self.c64 * (1 + 2j) * x).abs().sum(), (self.image * x).square().sum()]
        return torch.stack([p.double() for p in parts]).sum()


def check_odd_parameters(rank: int, views: bool) -> None:
    model = Odd()
    wrapped = fusedddp.wrap(model, gradient_as_bucket_view=views)
    for step in range(3):
        wrapped.zero_grad()
        wrapped(torch.tensor(float(rank + 1 + step))).backward()
        want = mean_of_ranks(model, lambda m, r, s=step: m(torch.tensor(float(r + 1 + s))))
        assert_gradients(wrapped, want)
        for name, p in model.named_parameters():
            assert p.grad.dtype == p.dtype and p.grad.stride() == p.stride(), name
    assert model.c64.grad.imag.abs().min() > 0


@both_views
def test_odd_parameters(two_ranks: Ranks, views: bool) -> None:
    two_ranks.run(check_odd_parameters, views)


def check_half_range(rank: int) -> None:
    values = torch.tensor([60000.0, -65504.0, 2.0**-24, 3 * 2.0**-24, 1.0, 0.0]).half()
    model = nn.Linear(6, 1, bias=False, dtype=torch.float16)
    wrapped = fusedddp.wrap(model)
    for _ in range(3):
        wrapped.zero_grad()
        (model.weight.grad is None) or pytest.fail("zero_grad left a gradient")
        wrapped(values[None]).sum().backward()
        assert torch.equal(model.weight.grad[0], values)


def test_equal_fp16_gradients_come_back_unchanged(two_ranks: Ranks) -> None:
    two_ranks.run(check_half_range)


def check_memory_format(rank: int, views: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 1), nn.Conv2d(8, 8, 1), nn.Conv2d(8, 4, 3))
    wrapped = fusedddp.wrap(model, gradient_as_bucket_view=views)
    model.to(memory_format=torch.channels_last)  # after wrapping, as fine-tuning scripts do
    for step in range(3):
        wrapped.zero_grad()
        wrapped(batch(step, rank, (2, 3, 5, 5))).square().mean().backward()
        want = mean_of_ranks(
            model, lambda m, r, s=step: m(batch(s, r, (2, 3, 5, 5))).square().mean()
        )
        assert_gradients(wrapped, want)
        if step == 1:  # back again, once the buckets are laid out
            model.to(memory_format=torch.contiguous_format)


@both_views
def test_gradients_of_another_memory_format(two_ranks: Ranks, views: bool) -> None:
    two_ranks.run(check_memory_format, views)


def check_changed_module(rank: int, views: bool) -> None:
    """A module moved to another dtype after wrapping is laid out again; half of it is refused."""
    model = mlp()
    wrapped = fusedddp.wrap(model, gradient_as_bucket_view=views, bucket_cap_mb=1 / 256)

    def loss(m: nn.Module, r: int, seed: int) -> Tensor:
        dtype = next(m.parameters()).dtype
        return m(batch(seed, r, (8, 20)).to(dtype)).square().mean()

    def good_step(seed: int) -> None:
        wrapped.zero_grad()
        loss(wrapped, rank, seed).backward()
        assert_gradients(wrapped, mean_of_ranks(model, lambda m, r: loss(m, r, seed)))
        assert all(p.grad.dtype == p.dtype for p in model.parameters())

    for dtype in (torch.float32, torch.float64, torch.float32):
        model.to(dtype)
        for seed in range(3):
            good_step(seed)
    first = model[0].weight  # its gradient comes last, when others are reduced already
    first.data, first.grad = first.data[:, :10].clone(), None
    with pytest.raises(
        RuntimeError, match=r"expected the gradient of 0\.weight to be of .*float32"
    ):
        wrapped(batch(7, rank, (8, 10))).sum().backward()


@both_views
def test_a_module_that_changes_after_wrapping(two_ranks: Ranks, views: bool) -> None:
    two_ranks.run(check_changed_module, views)


class Hidden(nn.Module):
    """Returns an object that nobody looks into, made by reentrant checkpoints."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: Tensor) -> Any:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=True)
        holder = type("Holder", (), {})()
        holder.loss = x.square().mean()
        return holder


def check_nested_rounds(rank: int, views: bool) -> None:
    model = Hidden()
    wrapped = fusedddp.wrap(model, gradient_as_bucket_view=views)
    for step in range(3):
        wrapped.zero_grad()
        wrapped(batch(step, rank, (5, 4)).requires_grad_()).loss.backward()
        want = mean_of_ranks(
            model, lambda m, r, s=step: m(batch(s, r, (5, 4)).requires_grad_()).loss
        )
        assert_gradients(wrapped, want)


@both_views
def test_nested_backwards_that_end_early_are_reduced_and_no_error(
    two_ranks: Ranks, views: bool
) -> None:
    two_ranks.run(check_nested_rounds, views)


def check_user_hooks(rank: int) -> None:
    """Hooks of the user see the local gradient and may change it, whenever they were registered."""
    model = mlp()
    seen: list[Tensor] = []

    def triple(p: Tensor) -> None:
        seen.append(p.grad.clone())
        p.grad.mul_(3)

    model[4].weight.register_post_accumulate_grad_hook(triple)
    wrapped = fusedddp.wrap(model)
    model[0].weight.register_post_accumulate_grad_hook(triple)
    model[2].weight.register_hook(lambda g: g * 5)

    def loss(m: nn.Module, r: int, step: int) -> Tensor:
        return m(batch(step, r, (8, 20))).square().mean()

    for step in range(4):
        if step == 2:  # also once the buckets are laid out
            model[2].bias.register_post_accumulate_grad_hook(triple)
        wrapped.zero_grad()
        seen.clear()
        loss(wrapped, rank, step).backward()
        want = mean_of_ranks(mlp(), lambda m, r, s=step: loss(m, r, s))
        want["0.weight"] *= 3
        want["4.weight"] *= 3
        want["2.weight"] *= 5
        if step >= 2:
            want["2.bias"] *= 3
        assert_gradients(wrapped, want)
        alone = mlp()
        loss(alone, rank, step).backward()
        assert torch.equal(seen[0], alone[4].weight.grad), "the hook saw a reduced gradient"
    # What was overtaken once is last from then on, so that its gradient need not wait for the end.
    for index, p in enumerate(model.parameters()):
        assert wrapped.reducer._hooks.is_last(index, p)


def test_hooks_of_the_user_come_first(two_ranks: Ranks) -> None:
    two_ranks.run(check_user_hooks)


def check_direct(rank: int, views: bool) -> None:
    """Gradients of at least the cap are reduced in place, unless somebody shares their memory."""
    torch.manual_seed(0)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Parameter(torch.randn(64, 8))
            self.b = nn.Parameter(torch.randn(64, 8))
            self.rest = nn.Linear(8, 64)
            self.shares = False

        def forward(self, x: Tensor) -> Tensor:
            hidden = self.rest(x)
            if self.shares:  # both get the same gradient memory
                return (hidden @ (self.a + self.b)).square().mean()
            return (hidden @ self.a).square().mean() + (hidden @ self.b).abs().mean()

    model = Net()
    # 2 KiB: a, b and rest.weight are each as large as the cap.
    wrapped = fusedddp.wrap(model, bucket_cap_mb=2 / 1024, gradient_as_bucket_view=views)
    for step in range(6):
        model.shares = step in (2, 4)
        wrapped.zero_grad()
        wrapped(batch(step, rank, (5, 8))).backward()
        assert_gradients(wrapped, mean_of_ranks(model, lambda m, r, s=step: m(batch(s, r, (5, 8)))))
    direct = [b.layout.params for b in wrapped.reducer.buckets if b.layout.is_direct]
    assert len(direct) >= 2, wrapped.reducer.layout


@both_views
def test_large_gradients_are_reduced_in_place(two_ranks: Ranks, views: bool) -> None:
    two_ranks.run(check_direct, views)


def check_views(rank: int) -> None:
    model = mlp()
    wrapped = fusedddp.wrap(model)
    addresses: list[list[int]] = []
    kept: list[tuple[Tensor, Tensor]] = []
    for step in range(6):
        wrapped.zero_grad(set_to_none=step % 2 == 0)
        wrapped(batch(step, rank, (8, 20))).square().mean().backward()
        if step:
            addresses.append([p.grad.data_ptr() for p in model.parameters()])
        for p in model.parameters():
            p.grad.detach_()  # refused for views, so gradients are none
    assert all(a == addresses[0] for a in addresses), "addresses move although nobody held them"
    (flat,) = (bucket._memory().flat for bucket in wrapped.reducer.buckets)
    storage = flat.untyped_storage().data_ptr()
    assert all(p.grad.untyped_storage().data_ptr() == storage for p in model.parameters())
    # A gradient that the user keeps is not overwritten by the next step.
    held = model[0].weight.grad
    kept.append((held, held.clone()))
    wrapped.zero_grad()
    wrapped(batch(7, rank, (8, 20))).square().mean().backward()
    assert torch.equal(*kept[0])
    assert model[0].weight.grad.data_ptr() != held.data_ptr()


def test_gradients_alias_the_bucket_and_leave_kept_ones_alone(two_ranks: Ranks) -> None:
    two_ranks.run(check_views)


def check_swapped_gradients(rank: int) -> None:
    """`.grad` of one parameter put on another: it lies in the other one's slot."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(3)))
    for cap in (None, 1 / 2**18):  # one bucket, and one for each parameter
        wrapped = fusedddp.wrap(model, bucket_cap_mb=cap)
        for step in range(4):
            wrapped.zero_grad()
            wrapped(batch(step, rank, (5, 4))).square().sum().backward()
            a, b, c = model.parameters()
            a.grad, b.grad, c.grad = c.grad, a.grad, b.grad
            before = [p.grad.clone() for p in model.parameters()]
            wrapped(batch(step + 9, rank, (5, 4))).square().sum().backward()
            want = mean_of_ranks(
                model, lambda m, r, s=step: m(batch(s + 9, r, (5, 4))).square().sum()
            )
            for p, old, new in zip(model.parameters(), before, want.values(), strict=True):
                torch.testing.assert_close(p.grad, old + new)


def test_gradients_swapped_between_parameters(two_ranks: Ranks) -> None:
    two_ranks.run(check_swapped_gradients)


def check_own_gradients(rank: int) -> None:
    model = mlp()
    wrapped = fusedddp.wrap(model, gradient_as_bucket_view=False)
    wrapped(batch(0, rank, (8, 20))).sum().backward()
    mine = {id(p): p.grad for p in model.parameters()}
    wrapped.zero_grad(set_to_none=False)
    wrapped(batch(1, rank, (8, 20))).sum().backward()
    assert all(p.grad is mine[id(p)] for p in model.parameters()), "written in place, as under DDP"
    storages = {p.grad.untyped_storage().data_ptr() for p in model.parameters()}
    assert len(storages) == len(mine), "gradients share memory"


def test_without_views_gradients_are_tensors_of_their_own(two_ranks: Ranks) -> None:
    two_ranks.run(check_own_gradients)


def check_frozen(rank: int) -> None:
    model = mlp()
    model[0].weight.requires_grad_(False)
    wrapped = fusedddp.wrap(model)
    for step in range(2):
        wrapped(batch(step, rank, (8, 20))).sum().backward()
    assert model[0].weight.grad is None and not model[0].weight.requires_grad
    model[0].weight.requires_grad_(True)
    with pytest.raises(RuntimeError, match=r"expected 0\.weight to stay frozen"):
        wrapped(batch(3, rank, (8, 20))).sum().backward()


def test_frozen_parameters_stay_out_and_unfreezing_is_told(two_ranks: Ranks) -> None:
    two_ranks.run(check_frozen)


def check_ignored(rank: int) -> None:
    model = mlp()
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ["2.weight"])
    with torch.no_grad():
        model[2].weight.fill_(rank)  # neither compared nor broadcast
    wrapped = fusedddp.wrap(model)
    for step in range(3):
        wrapped.zero_grad()
        wrapped(batch(step, rank, (8, 20))).sum().backward()
    assert torch.equal(model[2].weight, torch.full_like(model[2].weight, rank))
    other = [torch.empty_like(model[2].weight) for _ in range(2)]
    dist.all_gather(other, model[2].weight.grad.contiguous())
    assert not torch.equal(*other), "the ignored parameter was reduced"
    dist.all_gather(other, model[2].weight.detach())
    dist.all_gather(
        reduced := [torch.empty_like(model[4].bias) for _ in range(2)], model[4].bias.grad
    )
    assert torch.equal(*reduced)


def test_ignored_parameters_are_left_alone(two_ranks: Ranks) -> None:
    two_ranks.run(check_ignored)


class PassesLeaf(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin, self.factor = nn.Linear(4, 4), nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.lin(x), self.factor


def check_leaf_outputs(rank: int) -> None:
    model = PassesLeaf()
    wrapped = fusedddp.wrap(model)
    for step in range(3):
        wrapped.zero_grad()
        out, factor = wrapped(batch(step, rank, (5, 4)))
        (out * factor).sum().backward()
        want = mean_of_ranks(model, lambda m, r, s=step: (m.lin(batch(s, r, (5, 4)))).sum())
        torch.testing.assert_close(model.lin.weight.grad, want["lin.weight"])
    assert not model.factor._backward_hooks, "hooks pile up on a leaf"


def test_a_parameter_among_the_outputs(two_ranks: Ranks) -> None:
    two_ranks.run(check_leaf_outputs)


def check_replaced(rank: int) -> None:
    wrapped = fusedddp.wrap(mlp())
    wrapped(batch(0, rank, (8, 20))).sum().backward()
    state = {name: value.clone() for name, value in wrapped.state_dict().items()}
    wrapped.load_state_dict(state, assign=True)
    with pytest.raises(
        RuntimeError, match=r"found another one as 0\.weight.*Wrap the module again"
    ):
        wrapped(batch(0, rank, (8, 20))).sum().backward()


def test_replaced_parameters_are_told(two_ranks: Ranks) -> None:
    two_ranks.run(check_replaced)


# -- life of a wrapper -----------------------------------------------------------------------------


def check_rewrap(rank: int) -> None:
    model = nn.Linear(3, 1, bias=False)
    x = torch.full((1, 3), float(rank + 1))
    for _ in range(3):
        wrapped = fusedddp.wrap(model)
        for _ in range(2):
            model.zero_grad()
            wrapped(x).sum().backward()
            assert torch.equal(model.weight.grad, torch.full((1, 3), 1.5))
        watch = weakref.ref(wrapped.reducer.buckets[0])
        gc.disable()
        del wrapped
        gc.enable()
        assert watch() is None, "a bucket outlives its wrapper"
        assert not model.weight._post_accumulate_grad_hooks
    model.zero_grad()
    model(x).sum().backward()
    assert torch.equal(model.weight.grad, x), "the bare module is still reduced"


def test_hooks_and_buckets_die_with_the_wrapper(two_ranks: Ranks) -> None:
    two_ranks.run(check_rewrap)


def check_copies(rank: int) -> None:
    import io

    group = dist.new_group([0, 1])
    wrapped = fusedddp.wrap(mlp(), process_group=group, find_unused_parameters=True)
    wrapped(batch(0, rank, (8, 20))).sum().backward()
    twin = copy.deepcopy(wrapped)
    assert twin.process_group is group and twin.find_unused_parameters
    assert twin.module is not wrapped.module
    before = gradients(wrapped)
    twin.zero_grad()
    twin(batch(1, rank, (8, 20))).square().sum().backward()
    assert_gradients(
        twin, mean_of_ranks(mlp(), lambda m, r: m(batch(1, r, (8, 20))).square().sum())
    )
    assert_gradients(wrapped, before, exact=True)
    with pytest.raises(
        RuntimeError, match="only supported when using DDP with the default process"
    ):
        torch.save(wrapped, io.BytesIO())

    default = fusedddp.wrap(mlp(), gradient_as_bucket_view=False)
    file = io.BytesIO()
    torch.save(default, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    loaded(batch(1, rank, (8, 20))).square().sum().backward()
    assert_gradients(
        loaded, mean_of_ranks(mlp(), lambda m, r: m(batch(1, r, (8, 20))).square().sum())
    )
    assert loaded.reducer.options == default.reducer.options
    theirs = DistributedDataParallel(mlp())
    theirs.load_state_dict(default.state_dict())
    default.load_state_dict(theirs.state_dict())


def test_copies_pickles_and_state_dicts(two_ranks: Ranks) -> None:
    two_ranks.run(check_copies)


def check_group(rank: int, how: str) -> None:
    from torch.distributed.device_mesh import init_device_mesh

    groups = [dist.new_group([r]) for r in range(2)]
    if how == "mesh":
        mesh = init_device_mesh("cpu", (2,))
        wrapped = fusedddp.wrap(mlp(), device_mesh=mesh)
        assert wrapped.device_mesh is mesh
        want = mean_of_ranks(mlp(), lambda m, r: m(batch(0, r, (8, 20))).sum())
    else:
        wrapped = fusedddp.wrap(mlp(), process_group=groups[rank])
        alone = mlp()
        alone(batch(0, rank, (8, 20))).sum().backward()
        want = gradients(alone)
    for _ in range(3):
        wrapped.zero_grad()
        wrapped(batch(0, rank, (8, 20))).sum().backward()
        assert_gradients(wrapped, want, exact=how == "alone")


@pytest.mark.parametrize("how", ["mesh", "alone"])
def test_process_groups(two_ranks: Ranks, how: str) -> None:
    two_ranks.run(check_group, how)


def check_overlap(rank: int) -> list[str]:
    """The first bucket is on its way before the last gradient is computed."""
    model = mlp()
    events: list[str] = []
    wrapped = fusedddp.wrap(model, bucket_cap_mb=1 / 256)
    launch = wrapped.reducer.collective.launch

    def noting_launch(*args: Any) -> Any:
        events.append("launch")
        return launch(*args)

    wrapped.reducer.collective.launch = noting_launch
    model[0].weight.register_hook(lambda g: events.append("last gradient"))
    for step in range(2):
        events.clear()
        wrapped.zero_grad()
        wrapped(batch(step, rank, (8, 20))).sum().backward()
    return events


def test_buckets_leave_during_backward(two_ranks: Ranks) -> None:
    for events in two_ranks.run(check_overlap):
        assert events[0] == "launch" and "last gradient" in events[1:], events
