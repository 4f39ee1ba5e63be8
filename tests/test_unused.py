"""Parameters that receive no gradient on some rank, or on any."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fusedddp
from tests.expected import assert_gradients, both_views, mean_of_ranks
from tests.models import Branches, batch, gradients
from tests.ranks import Ranks


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
    assert "\nParameter indices which did not receive grad for rank 0: 2\n" in on_0
    assert on_0.endswith("\nParameters which did not receive grad for rank 0: w.2")
    assert on_1.endswith("did not receive grad on other ranks than rank 1: w.2")


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


def check_static_graph_changes(rank: int, elsewhere: bool) -> list[str]:
    """A graph that is static by promise and changes is told to every rank; training can go on."""
    model = Branches()
    x = torch.full((3,), float(rank + 1))
    texts = []

    def backward(wrapped: nn.Module, which: list[int], changed: list[int]) -> None:
        wrapped.zero_grad()
        wrapped(x, changed if rank == 1 or not elsewhere else which).backward()

    wrapped = fusedddp.wrap(model, static_graph=True)
    for _ in range(2):
        backward(wrapped, [0, 1], [0, 1])
    with pytest.raises(
        RuntimeError, match="Your training graph has changed in this iteration"
    ) as e:
        backward(wrapped, [0, 1], [0, 1, 2])
    texts.append(str(e.value))
    assert all(p.grad is None for p in model.parameters())
    for _ in range(2):  # what it uses from now on counts
        backward(wrapped, [0, 1, 3], [0, 1, 3])
        assert torch.equal(model.w[3].grad, torch.full((3,), 1.5))
        assert model.w[2].grad is None
    backward(wrapped, [0, 1, 3], [0, 1])
    with pytest.raises(RuntimeError, match=r"in the prior iteration.*has changed") as e:
        wrapped(x, [0])
    texts.append(str(e.value))
    for _ in range(2):
        backward(wrapped, [2], [2])
        assert torch.equal(model.w[2].grad, torch.full((3,), 1.5))
    return texts


@pytest.mark.parametrize("elsewhere", [False, True], ids=["all ranks", "one rank"])
def test_a_static_graph_that_changes_is_told_to_all(two_ranks: Ranks, elsewhere: bool) -> None:
    for new, unfinished in two_ranks.run(check_static_graph_changes, elsewhere):
        assert "Found gradients for w.2, which had none in the first iteration" in new
        assert "w.3" in unfinished


def check_static_graph_two_losses(rank: int) -> None:
    """Two backwards of one forward use different parameters; together they are the graph."""

    class TwoLosses(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(3, 2), nn.Linear(3, 2)
            self.spare = nn.Parameter(torch.ones(1))

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return self.a(x), self.b(x)

    torch.manual_seed(0)
    model = TwoLosses()
    wrapped = fusedddp.wrap(model, static_graph=True)
    for step in range(4):
        wrapped.zero_grad()
        a, b = wrapped(batch(step, rank, (4, 3)))
        a.sum().backward()
        b.square().sum().backward()
        want = mean_of_ranks(
            model,
            lambda m, r, s=step: (
                m.a(batch(s, r, (4, 3))).sum() + m.b(batch(s, r, (4, 3))).square().sum()
            ),
        )
        assert_gradients(wrapped, want)


def test_a_static_graph_of_two_backwards(two_ranks: Ranks) -> None:
    two_ranks.run(check_static_graph_two_losses)


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
