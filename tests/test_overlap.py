"""Overlap is real: the first bucket is on its way while gradients are still being computed."""

from __future__ import annotations

import contextlib
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel.distributed import _MixedPrecision
from torch.utils.checkpoint import checkpoint

import fusedddp
from fusedddp.collectives import Collective
from fusedddp.comm_hooks import CommHook
from tests.expected import assert_gradients, mean_of_ranks
from tests.models import batch
from tests.ranks import Ranks

SLOW_S = 0.2  # how long the backward takes below the last layer, and a collective at least


class Pause(torch.autograd.Function):
    """A backward that takes its time."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        time.sleep(SLOW_S)
        return gradient


class Model(nn.Module):
    def __init__(self, mode: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.mode = mode
        self.table = nn.Embedding(6, 8, sparse=mode == "sparse")
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 3)
        self.spare = nn.Linear(2, 2) if mode == "unused" else nn.Identity()

    def forward(self, words: Tensor) -> Tensor:
        x = Pause.apply(self.first(self.table(words)))
        if self.mode == "checkpoint":
            return checkpoint(self.last, x, use_reentrant=False)
        return self.last(x)


class Delayed:
    """A pending collective of a slow network."""

    def __init__(self, work: Any) -> None:
        self._work = work
        self.arrives = time.monotonic() + SLOW_S
        self.was_waited_for_s = 0.0

    def wait(self) -> None:
        self.was_waited_for_s = max(0.0, self.arrives - time.monotonic())
        time.sleep(self.was_waited_for_s)
        self._work.wait()


KEYWORDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "own gradients": {"gradient_as_bucket_view": False},
    "unused": {"find_unused_parameters": True},
    "static": {"static_graph": True},
    "comm hook": {},
    "mixed precision": {
        "mixed_precision": _MixedPrecision(
            param_dtype=torch.bfloat16, reduce_dtype=torch.float32, buffer_dtype=torch.bfloat16
        )
    },
    "sparse": {},
    "no_sync": {},
    "checkpoint": {},
    "caps": {"bucket_cap_mb": None, "bucket_cap_mb_list": [1 / 2**18, 1]},
}


def check(rank: int, mode: str) -> None:
    model = Model(mode)
    keywords = {"bucket_cap_mb": 1 / 2**18, **KEYWORDS[mode]}
    wrapped = fusedddp.wrap(model, **keywords)
    if mode == "comm hook":
        wrapped.register_comm_hook(None, default_hooks.allreduce_hook)
    events: list[str] = []
    works: list[Delayed] = []
    original, original_start = Collective.launch, CommHook.start

    def launch(self: Collective, *args: Any) -> Any:
        events.append("launched")
        works.append(Delayed(original(self, *args)))
        return works[-1]

    def start(self: CommHook, *args: Any) -> Any:
        events.append("launched")
        works.append(Delayed(original_start(self, *args)))
        return works[-1]

    words = torch.tensor([rank, 2, 5])
    model.first.weight.register_hook(lambda _: events.append("last gradient"))
    Collective.launch, CommHook.start = launch, start  # type: ignore[method-assign]
    try:
        for step in range(3):  # the first one records in which order gradients arrive
            wrapped.zero_grad()
            events.clear()
            works.clear()
            if mode == "no_sync":
                with wrapped.no_sync():
                    wrapped(words).sum().backward()
                assert "launched" not in events
                events.clear()
            wrapped(words).float().square().sum().backward()
            if step:
                assert events.index("launched") < events.index("last gradient"), events
                # It arrived before anybody waited for it: the backward hid it.
                assert works[0].was_waited_for_s == 0.0
    finally:
        Collective.launch, CommHook.start = original, original_start  # type: ignore[method-assign]
    for p in model.parameters():
        if p.grad is not None:
            everywhere = [torch.empty_like(p) for _ in range(2)]
            dist.all_gather(everywhere, p.grad.to_dense())
            assert torch.equal(*everywhere)


@pytest.mark.parametrize("mode", KEYWORDS)
def test_the_first_bucket_leaves_before_the_last_gradient(two_ranks: Ranks, mode: str) -> None:
    two_ranks.run(check, mode)


def check_other_method(rank: int) -> None:
    """A loss that another method than forward computes overlaps, too."""
    model = Model("plain")
    wrapped = fusedddp.wrap(model, bucket_cap_mb=1 / 2**18)
    events: list[str] = []
    original = Collective.launch

    def launch(self: Collective, *args: Any) -> Any:
        events.append("launched")
        return original(self, *args)

    words = torch.tensor([rank, 2, 5])
    model.first.weight.register_hook(lambda _: events.append("last gradient"))
    with contextlib.ExitStack() as stack:
        stack.callback(setattr, Collective, "launch", original)
        Collective.launch = launch  # type: ignore[method-assign]
        for step in range(2):
            wrapped.zero_grad()
            events.clear()
            model(words).sum().backward()
            if step:
                assert events.index("launched") < events.index("last gradient"), events
    want = mean_of_ranks(model, lambda m, r: m(torch.tensor([r, 2, 5])).sum())
    assert_gradients(wrapped, want)


def test_without_the_wrappers_forward(two_ranks: Ranks) -> None:
    two_ranks.run(check_other_method)


def check_counts(rank: int, in_forward: bool) -> str:
    """One rank runs one backward more than the other: an error on both, in the group's time."""
    import datetime

    group = dist.new_group([0, 1], timeout=datetime.timedelta(seconds=2))
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)) if in_forward else nn.Linear(4, 3)
    wrapped = fusedddp.wrap(model, process_group=group)
    text = "none"
    start = time.monotonic()
    try:
        for step in range(3 if rank else 4):
            wrapped.zero_grad()
            wrapped(batch(step, rank, (5, 4))).sum().backward()
        if rank:
            dist.barrier(group)  # where a script that is done meets the others
    except RuntimeError as error:
        text = f"{type(error).__name__}: {error}"
    assert time.monotonic() - start < 15
    return text


@pytest.mark.parametrize("in_forward", [False, True], ids=["backward", "buffers"])
def test_different_numbers_of_backwards_end_in_an_error_on_every_rank(
    two_ranks: Ranks, in_forward: bool
) -> None:
    for text in two_ranks.run(check_counts, in_forward):
        assert text != "none"
