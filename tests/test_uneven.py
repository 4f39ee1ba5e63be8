"""Ranks that have nothing to contribute: out of data (join), or with a batch to leave out."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel.distributed import _MixedPrecision

import fusedddp
from tests.expected import assert_gradients, both_views, mean_of_ranks
from tests.models import batch, gradients, mlp
from tests.ranks import Ranks
from tests.test_exceptions import Bomb, Explosive


def train_uneven(
    model: nn.Module, rank: int, counts: tuple[int, int], *, initial: bool, micro: int = 1
) -> list[dict[str, Tensor | None]]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    history = []
    with model.join(divide_by_initial_world_size=initial):
        for step in range(counts[rank]):
            optimizer.zero_grad()
            for part in range(micro - 1):
                with model.no_sync():
                    model(batch(50 * part + step, rank, (8, 20))).square().mean().backward()
            model(batch(step, rank, (8, 20))).square().mean().backward()
            history.append(gradients(model))
            optimizer.step()
    return history


def check_join(
    rank: int, counts: tuple[int, int], initial: bool, find_unused: bool, views: bool, micro: int
) -> None:
    model = mlp()
    keywords = dict(find_unused_parameters=find_unused, gradient_as_bucket_view=views)
    ours = fusedddp.wrap(copy.deepcopy(model), bucket_cap_mb=1 / 256, **keywords)
    theirs = DistributedDataParallel(copy.deepcopy(model), **keywords)
    a = train_uneven(ours, rank, counts, initial=initial, micro=micro)
    b = train_uneven(theirs, rank, counts, initial=initial, micro=micro)
    assert len(a) == len(b) == counts[rank]
    for step, (mine, expected) in enumerate(zip(a, b, strict=True)):
        for name, gradient in mine.items():
            assert torch.equal(gradient, expected[name]), (step, name)
    for (name, p), q in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert torch.equal(p, q), f"{name} after join"
        everywhere = [torch.empty_like(p) for _ in range(2)]
        dist.all_gather(everywhere, p.detach())
        assert torch.equal(*everywhere), f"{name} differs between ranks"
    if counts[rank] < max(counts):
        assert all(p.grad is None for p in ours.parameters()), "mirrored gradients are left"
    # Afterwards it trains as before.
    for step in range(2):
        ours.zero_grad()
        ours(batch(step, rank, (8, 20))).sum().backward()
        want = mean_of_ranks(ours.module, lambda m, r, s=step: m(batch(s, r, (8, 20))).sum())
        assert_gradients(ours, want)


@pytest.mark.parametrize(
    ("counts", "initial", "find_unused", "views", "micro"),
    [
        ((2, 5), True, False, True, 1),
        ((5, 2), True, False, True, 1),
        ((2, 5), False, False, True, 1),
        ((5, 2), False, False, False, 1),
        ((0, 4), True, False, True, 1),
        ((4, 0), False, True, True, 1),
        ((3, 3), False, False, True, 1),
        ((1, 4), True, True, True, 1),
        ((4, 2), False, False, True, 3),
    ],
)
def test_join_is_that_of_ddp(
    two_ranks: Ranks,
    counts: tuple[int, int],
    initial: bool,
    find_unused: bool,
    views: bool,
    micro: int,
) -> None:
    two_ranks.run(check_join, counts, initial, find_unused, views, micro)


def check_join_buffers(rank: int) -> None:
    """Buffers come from a rank that still has data."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 6), nn.BatchNorm1d(6), nn.Linear(6, 2))
    alone = [copy.deepcopy(model) for _ in range(2)]
    wrapped = fusedddp.wrap(model)
    with wrapped.join():
        for step in range((2, 4)[rank]):
            wrapped.zero_grad()
            wrapped(batch(step, rank, (8, 20))).sum().backward()
    for step in range(4):
        # Rank 0 leaves after two steps; the running statistics are those of rank 1 from then on.
        source = 1  # under join the last rank that is active gives its buffers
        alone[source](batch(step, source, (8, 20)))
    torch.testing.assert_close(model[1].running_mean, alone[1][1].running_mean)
    assert int(model[1].num_batches_tracked) == 4


def test_buffers_under_join(two_ranks: Ranks) -> None:
    two_ranks.run(check_join_buffers)


def check_early_termination(rank: int) -> None:
    wrapped = fusedddp.wrap(mlp())
    done = 0
    with pytest.raises(RuntimeError, match=r"exhausted (all )?inputs"):
        with wrapped.join(throw_on_early_termination=True):
            for step in range((2, 5)[rank]):
                wrapped(batch(step, rank, (8, 20))).sum().backward()
                done += 1
    assert done == 2


def test_early_termination_raises_on_all_ranks(two_ranks: Ranks) -> None:
    two_ranks.run(check_early_termination)


def check_join_with_zero(rank: int) -> None:
    """A joined rank steps on reduced gradients, which a sharded optimizer needs."""
    model = mlp()
    alone = copy.deepcopy(model)
    wrapped = fusedddp.wrap(model)
    optimizer = ZeroRedundancyOptimizer(wrapped.parameters(), torch.optim.SGD, lr=0.05)
    with Join([wrapped, optimizer]):
        for step in range((2, 4)[rank]):
            optimizer.zero_grad()
            wrapped(batch(step, rank, (8, 20))).square().mean().backward()
            optimizer.step()
    plain = torch.optim.SGD(alone.parameters(), lr=0.05)
    for step in range(4):
        plain.zero_grad()
        for r in range(2):
            if step < (2, 4)[r]:
                (alone(batch(step, r, (8, 20))).square().mean() / 2).backward()
        plain.step()
    for (name, p), q in zip(model.named_parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(p, q, msg=lambda m, n=name: f"{n}: {m}")


def test_join_with_a_sharded_optimizer(two_ranks: Ranks) -> None:
    two_ranks.run(check_join_with_zero)


def mean_without(model: nn.Module, losses: list[Tensor | None]) -> dict[str, Tensor | None]:
    """The mean over two ranks, of which those without a loss count as zero."""
    alone = copy.deepcopy(model)
    for p in alone.parameters():
        p.grad = None
    for x in losses:
        if x is not None:
            (alone(x).square().mean() / 2).backward()
    return gradients(alone)


def check_skip(rank: int, first: bool, find_unused: bool, views: bool, forward: bool) -> None:
    model = mlp()
    wrapped = fusedddp.wrap(
        model, find_unused_parameters=find_unused, gradient_as_bucket_view=views
    )
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.05)
    for step in range(5):
        optimizer.zero_grad()
        skips = [step == (0 if first else 2), step == 3]
        if not skips[rank]:
            wrapped(batch(step, rank, (8, 20))).square().mean().backward()
        else:
            if forward:
                wrapped(batch(step, rank, (8, 20)))
            wrapped.skip_backward()
        inputs = [None if skips[r] else batch(step, r, (8, 20)) for r in range(2)]
        assert_gradients(wrapped, mean_without(model, inputs))
        optimizer.step()


@both_views
@pytest.mark.parametrize("first", [False, True], ids=["later", "first"])
@pytest.mark.parametrize("find_unused", [False, True], ids=["strict", "unused"])
@pytest.mark.parametrize("forward", [True, False], ids=["forward", "no-forward"])
def test_a_skipped_backward_counts_as_zeros(
    two_ranks: Ranks, first: bool, find_unused: bool, views: bool, forward: bool
) -> None:
    two_ranks.run(check_skip, first, find_unused, views, forward)


def check_skip_after_failure(rank: int, good_before: int) -> None:
    """A backward that raises on one rank: that rank skips, and all go on with the same step."""
    model = Explosive()
    wrapped = fusedddp.wrap(model, bucket_cap_mb=1 / 2**18)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)

    def step(index: int, bad: bool) -> None:
        optimizer.zero_grad()
        Bomb.armed = bad and rank == 1
        try:
            wrapped(batch(index, rank, (5, 4))).backward()
        except ArithmeticError:
            wrapped.skip_backward()
        Bomb.armed = False
        for name, p in wrapped.named_parameters():
            everywhere = [torch.empty_like(p) for _ in range(2)]
            dist.all_gather(everywhere, p.grad.contiguous())
            assert torch.equal(*everywhere), name
        if not bad:
            want = mean_of_ranks(model, lambda m, r: m(batch(index, r, (5, 4))))
            assert_gradients(wrapped, want)
        optimizer.step()

    for index in range(good_before):
        step(index, bad=False)
    step(90, bad=True)
    for index in range(3):
        step(10 + index, bad=False)
    wrapped._check_reducer_finalized()


@pytest.mark.parametrize("good_before", [0, 1, 2])
def test_a_failed_backward_is_skipped(two_ranks: Ranks, good_before: int) -> None:
    two_ranks.run(check_skip_after_failure, good_before)


def check_skip_with_buffers(rank: int) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 6), nn.BatchNorm1d(6), nn.Linear(6, 2))
    wrapped = fusedddp.wrap(model)
    for step in range(4):
        wrapped.zero_grad()
        if rank == 1 and step in (0, 2):
            wrapped.skip_backward()  # before any forward: the loader had nothing
        else:
            wrapped(batch(step, rank, (8, 20))).sum().backward()
        everywhere = [torch.empty_like(model[1].running_mean) for _ in range(2)]
        dist.all_gather(everywhere, model[1].running_mean)
        assert torch.equal(*everywhere)


def test_skipping_keeps_buffers_in_step(two_ranks: Ranks) -> None:
    two_ranks.run(check_skip_with_buffers)


def check_skip_and_accumulation(rank: int) -> None:
    """What has been accumulated under no_sync is contributed by a skipped last micro-batch."""
    model = mlp()
    wrapped = fusedddp.wrap(model)
    for step in range(3):
        wrapped.zero_grad()
        with wrapped.no_sync():
            wrapped(batch(step, rank, (8, 20))).sum().backward()
            if rank == 0:
                wrapped.skip_backward()  # nothing to take part in
        if rank == 1:
            wrapped.skip_backward()
        else:
            wrapped(batch(step + 50, rank, (8, 20))).sum().backward()
        want = mean_of_ranks(
            model,
            lambda m, r, s=step: (
                m(batch(s, r, (8, 20))).sum()
                + (m(batch(s + 50, r, (8, 20))).sum() if r == 0 else 0)
            ),
        )
        assert_gradients(wrapped, want)


def test_skipping_the_last_micro_batch(two_ranks: Ranks) -> None:
    two_ranks.run(check_skip_and_accumulation)


class Passing(nn.Module):
    """Uses its parameters only if told so."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor, uses: bool) -> Tensor:
        return x * self.w if uses else x * 2


def check_nothing_used(rank: int, views: bool) -> None:
    model = Passing()
    wrapped = fusedddp.wrap(model, find_unused_parameters=True, gradient_as_bucket_view=views)
    for step, uses in enumerate([(True, False), (False, True), (False, False), (True, True)]):
        wrapped.zero_grad()
        x = batch(step, rank, (3,)).requires_grad_()
        wrapped(x, uses[rank]).sum().backward()
        parts = [batch(step, r, (3,)) / 2 for r in range(2) if uses[r]]
        if parts:
            torch.testing.assert_close(model.w.grad, sum(parts))
        else:
            assert model.w.grad is None
        # torch.autograd.grad is no backward, whatever it passes through, and on any rank.
        if rank == 1:
            torch.autograd.grad(wrapped(x, True).sum(), [x, model.w])
            torch.autograd.grad(wrapped(x, False).sum(), x)


@both_views
def test_a_rank_that_uses_no_parameter_at_all(two_ranks: Ranks, views: bool) -> None:
    two_ranks.run(check_nothing_used, views)


class Fragile(nn.Module):
    """Has buffers, and a forward that raises for a batch of zeros."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(20, 6), nn.BatchNorm1d(6), nn.Linear(6, 2))

    def forward(self, x: Tensor) -> Tensor:
        if not x.any():
            raise ArithmeticError("a batch of zeros")
        return self.layers(x)


def check_skip_after_failed_forward(rank: int, bad_step: int) -> None:
    model = Fragile()
    wrapped = fusedddp.wrap(model)
    for step in range(4):
        wrapped.zero_grad()
        x = batch(step, rank, (8, 20)) * (0 if rank == 1 and step == bad_step else 1)
        try:
            wrapped(x).sum().backward()
        except ArithmeticError:
            wrapped.skip_backward()
        for tensor in (model.layers[1].running_mean, model.layers[0].weight.grad):
            everywhere = [torch.empty_like(tensor) for _ in range(2)]
            dist.all_gather(everywhere, tensor)
            assert torch.equal(*everywhere)


@pytest.mark.parametrize("bad_step", [0, 2])
def test_a_failed_forward_of_a_module_with_buffers_is_skipped(
    two_ranks: Ranks, bad_step: int
) -> None:
    two_ranks.run(check_skip_after_failed_forward, bad_step)


def check_skip_static(rank: int, how: str) -> None:
    """A round without a contribution says nothing of what a static graph uses."""
    model = mlp()
    wrapped = fusedddp.wrap(model, static_graph=True)
    if how == "join":
        with wrapped.join():
            for step in range((0, 3)[rank]):
                wrapped.zero_grad()
                wrapped(batch(step, rank, (8, 20))).sum().backward()
    elif how == "all" or rank == 1:
        wrapped.skip_backward()
    else:
        wrapped(batch(9, rank, (8, 20))).sum().backward()
    for step in range(3):
        wrapped.zero_grad()
        wrapped(batch(step, rank, (8, 20))).sum().backward()
        want = mean_of_ranks(model, lambda m, r, s=step: m(batch(s, r, (8, 20))).sum())
        assert_gradients(wrapped, want)


@pytest.mark.parametrize("how", ["one", "all", "join"])
def test_a_static_graph_whose_first_round_was_skipped(two_ranks: Ranks, how: str) -> None:
    two_ranks.run(check_skip_static, how)


def check_skip_mixed_precision(rank: int, first: bool, views: bool) -> None:
    model = mlp()
    config = _MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    wrapped = fusedddp.wrap(model, mixed_precision=config, gradient_as_bucket_view=views)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(4):
        optimizer.zero_grad()
        loss = wrapped(batch(step, rank, (8, 20))).float().square().mean()
        if rank == 1 and step == (0 if first else 2):
            wrapped.skip_backward()
        else:
            loss.backward()
        optimizer.step()
        for name, p in model.named_parameters():
            assert p.dtype == p.grad.dtype == torch.float32, name
            for tensor in (p.detach(), p.grad):
                everywhere = [torch.empty_like(tensor) for _ in range(2)]
                dist.all_gather(everywhere, tensor.contiguous())
                assert torch.equal(*everywhere), name


@both_views
@pytest.mark.parametrize("first", [True, False], ids=["first", "later"])
def test_skipping_restores_full_precision(two_ranks: Ranks, first: bool, views: bool) -> None:
    two_ranks.run(check_skip_mixed_precision, first, views)


def check_skip_at_wrong_times(rank: int) -> None:
    model = mlp()
    wrapped = fusedddp.wrap(model)
    # Under no_sync there is nothing to take part in.
    with wrapped.no_sync():
        loss = wrapped(batch(0, rank, (8, 20))).sum()
        if rank == 0:
            loss.backward()
        else:
            wrapped.skip_backward()
    wrapped.zero_grad()

    def skip(_: Tensor) -> None:
        with pytest.raises(RuntimeError, match=r"found skip_backward\(\) inside of one"):
            wrapped.skip_backward()

    output = wrapped(batch(1, rank, (8, 20)))
    output.register_hook(skip)
    output.sum().backward()
    assert_gradients(wrapped, mean_of_ranks(model, lambda m, r: m(batch(1, r, (8, 20))).sum()))


def test_skipping_at_wrong_times(two_ranks: Ranks) -> None:
    two_ranks.run(check_skip_at_wrong_times)


def check_skip_of_accumulation(rank: int, place: str) -> None:
    """A rank that fails in a micro-batch under no_sync leaves out the reduced one with it."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 9), nn.BatchNorm1d(9), nn.Linear(9, 3))
    wrapped = fusedddp.wrap(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(5):
        optimizer.zero_grad()
        try:
            with wrapped.no_sync():
                if place == "before" and rank == 1 and step in (0, 3):
                    raise ArithmeticError
                loss = wrapped(batch(step, rank, (8, 20))).sum()
                if place == "between" and rank == 1 and step in (0, 3):
                    raise ArithmeticError
                loss.backward()
            wrapped(batch(step + 10, rank, (8, 20))).sum().backward()
        except ArithmeticError:
            wrapped.skip_backward()
        optimizer.step()
        for param in model.parameters():
            everywhere = [torch.empty_like(param) for _ in range(2)]
            dist.all_gather(everywhere, param.detach())
            assert torch.equal(*everywhere), step


@pytest.mark.parametrize("place", ["before", "between"])
def test_skipping_after_a_failure_under_no_sync(two_ranks: Ranks, place: str) -> None:
    two_ranks.run(check_skip_of_accumulation, place)


def check_skip_after_unfreezing(rank: int, joins: bool) -> None:
    """A rank that runs no forward lays its buckets out anew together with the others."""
    model = mlp()
    model[0].requires_grad_(False)
    wrapped = fusedddp.wrap(model)
    wrapped(batch(0, rank, (8, 20))).sum().backward()
    model[0].requires_grad_(True)
    wrapped.zero_grad()
    if joins:
        with wrapped.join(divide_by_initial_world_size=False):
            for step in range((0, 2)[rank]):
                wrapped.zero_grad()
                wrapped(batch(step, rank, (8, 20))).sum().backward()
                alone = copy.deepcopy(model)
                alone.zero_grad()
                alone(batch(step, rank, (8, 20))).sum().backward()
                assert_gradients(wrapped, gradients(alone))
    elif rank == 1:
        wrapped.skip_backward()
    else:
        wrapped(batch(1, rank, (8, 20))).sum().backward()
    for step in range(2):
        wrapped.zero_grad()
        wrapped(batch(step, rank, (8, 20))).sum().backward()
        want = mean_of_ranks(model, lambda m, r, s=step: m(batch(s, r, (8, 20))).sum())
        assert_gradients(wrapped, want)


@pytest.mark.parametrize("joins", [False, True], ids=["skip", "join"])
def test_unfreezing_where_a_rank_runs_no_forward(two_ranks: Ranks, joins: bool) -> None:
    two_ranks.run(check_skip_after_unfreezing, joins)
