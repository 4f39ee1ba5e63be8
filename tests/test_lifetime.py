"""Wrapping again, copies, process groups, and when buckets leave."""

from __future__ import annotations

import copy
import gc
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import fusedddp
from tests.expected import assert_gradients, mean_of_ranks
from tests.models import batch, gradients, mlp
from tests.ranks import Ranks


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
    assert loaded.reducer.rounds.options == default.reducer.rounds.options
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
    launch = wrapped.reducer.rounds.collective.launch

    def noting_launch(*args: Any) -> Any:
        events.append("launch")
        return launch(*args)

    wrapped.reducer.rounds.collective.launch = noting_launch
    model[0].weight.register_hook(lambda g: events.append("last gradient"))
    for step in range(2):
        events.clear()
        wrapped.zero_grad()
        wrapped(batch(step, rank, (8, 20))).sum().backward()
    return events


def test_buckets_leave_during_backward(two_ranks: Ranks) -> None:
    for events in two_ranks.run(check_overlap):
        assert events[0] == "launch" and "last gradient" in events[1:], events
