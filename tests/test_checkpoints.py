"""State dicts, checkpoints and copies: from and to DDP, bare modules and other wrappers."""

from __future__ import annotations

import copy
import io
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.nn.parallel import DistributedDataParallel

import fusedddp
from tests.expected import assert_gradients, mean_of_ranks
from tests.models import batch
from tests.ranks import Ranks


class Net(nn.Module):
    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first = nn.Linear(4, 6)
        self.norm = nn.BatchNorm1d(6)
        self.last = nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.norm(self.first(x)).relu())


WAYS = {
    "wrapped": fusedddp.wrap,
    "ddp": DistributedDataParallel,
    "bare": lambda module: module,
}


def trained(way: str, rank: int, seed: int = 0) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = WAYS[way](Net(seed))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    data = rank if way != "bare" else 0
    for step in range(2):
        optimizer.zero_grad()
        model(batch(step, data, (5, 4))).square().mean().backward()
        optimizer.step()
    return model, optimizer


def assert_same_tensors(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    assert list(ours) == list(theirs)
    for name, value in ours.items():
        assert torch.equal(value, theirs[name]), name


def check_checkpoint(rank: int, folder: str, source: str, target: str) -> None:
    model, optimizer = trained(source, rank)
    states = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    assert list(states["model"]) == list(Net().state_dict())  # no prefix, whoever wrapped it
    dcp.save(states, checkpoint_id=folder)
    twin, twin_optimizer = trained(target, rank, seed=1)
    loaded = dict(zip(("model", "optimizer"), get_state_dict(twin, twin_optimizer), strict=True))
    dcp.load(loaded, checkpoint_id=folder)
    set_state_dict(
        twin,
        twin_optimizer,
        model_state_dict=loaded["model"],
        optim_state_dict=loaded["optimizer"],
    )
    for a, b in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(a, b)
        for key, value in optimizer.state[a].items():
            assert torch.equal(value, twin_optimizer.state[b][key])
    if target == "wrapped":
        twin.zero_grad()
        want = mean_of_ranks(twin.module, lambda m, r: m(batch(9, r, (5, 4))).square().sum())
        twin(batch(9, rank, (5, 4))).square().sum().backward()
        assert_gradients(twin, want)


@pytest.mark.parametrize(
    ("source", "target"),
    [
        ("wrapped", "wrapped"),
        ("wrapped", "ddp"),
        ("wrapped", "bare"),
        ("ddp", "wrapped"),
        ("bare", "wrapped"),
    ],
)
def test_distributed_checkpoints(
    two_ranks: Ranks, tmp_path: Path, source: str, target: str
) -> None:
    two_ranks.run(check_checkpoint, str(tmp_path), source, target)


def check_full_state_dict(rank: int) -> None:
    model, _ = trained("wrapped", rank)
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    state = get_model_state_dict(model, options=options)
    if rank:
        assert not state  # gathered on rank 0
    else:
        assert_same_tensors(state, dict(model.module.state_dict()))


def test_a_full_state_dict_is_on_rank_0(two_ranks: Ranks) -> None:
    two_ranks.run(check_full_state_dict)


def check_state_dicts(rank: int) -> None:
    ours, _ = trained("wrapped", rank)
    theirs, _ = trained("ddp", rank, seed=1)
    bare, _ = trained("bare", rank, seed=2)
    theirs.load_state_dict(ours.state_dict())
    bare.load_state_dict(ours.module.state_dict())
    assert_same_tensors(ours.state_dict(), theirs.state_dict())
    assert_same_tensors(ours.module.state_dict(), bare.state_dict())
    back = fusedddp.wrap(Net(3))
    back.load_state_dict(theirs.state_dict())
    assert_same_tensors(ours.state_dict(), back.state_dict())
    back.module.load_state_dict(Net(4).state_dict())
    assert_same_tensors(back.module.state_dict(), Net(4).state_dict())


def test_state_dicts_go_both_ways(two_ranks: Ranks) -> None:
    two_ranks.run(check_state_dicts)


def check_assign(rank: int) -> None:
    """`assign=True` puts other parameters into the module, which nobody reduces.

    DDP goes on with the old ones and lets replicas drift apart without a word.
    """
    model = fusedddp.wrap(Net())
    state = {name: value.clone() for name, value in model.state_dict().items()}
    model.load_state_dict(state, assign=True)
    with pytest.raises(RuntimeError, match="Wrap the module again after replacing parameters"):
        model(batch(0, rank, (5, 4))).sum().backward()
        model(batch(0, rank, (5, 4))).sum().backward()
    again = fusedddp.wrap(model.module)
    for p in again.parameters():
        p.grad = None
    want = mean_of_ranks(again.module, lambda m, r: m(batch(1, r, (5, 4))).sum())
    again(batch(1, rank, (5, 4))).sum().backward()
    assert_gradients(again, want)


def test_loading_by_assignment_is_told(two_ranks: Ranks) -> None:
    two_ranks.run(check_assign)


def check_copies(rank: int) -> None:
    model, _ = trained("wrapped", rank)
    stream = io.BytesIO()
    torch.save(model, stream)
    stream.seek(0)
    for twin in (torch.load(stream, weights_only=False), copy.deepcopy(model)):
        assert type(twin) is fusedddp.FusedDDP
        assert_same_tensors(twin.state_dict(), model.state_dict())
        before = [p.detach().clone() for p in model.parameters()]
        for step in range(2):
            twin.zero_grad()
            data = 10 + step
            want = mean_of_ranks(twin.module, lambda m, r, d=data: m(batch(d, r, (5, 4))).sum())
            twin(batch(data, rank, (5, 4))).sum().backward()
            assert_gradients(twin, want)
            torch.optim.SGD(twin.parameters(), lr=0.1).step()
        assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_copies_of_a_trained_wrapper_train(two_ranks: Ranks) -> None:
    two_ranks.run(check_copies)
