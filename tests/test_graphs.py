"""Captured steps train as eager ones do, bit for bit.

Without a GPU they are captured by the stand-in of tests/graph_stand_in.py, which says what it
cannot show.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import fusedddp
from tests.graph_cases import NAMES, batches, captures_on, check_same, run, training
from tests.ranks import Ranks

_NUM_STEPS = {"cpu": 50, "cuda": 100}
# Steps that use the gradients that they find have one graph for none and one for some. The sample
# of accumulation reduces without having found any, which its steps never do.
_NUM_GRAPHS = {"no zero": 2, "zero in place": 2, "accumulation": 4, "step first": 2}


def check_parity(rank: int, device: str, name: str) -> None:
    with captures_on(device) as group:
        xs = batches(_NUM_STEPS[device], rank, device)
        eager = training(name, device, group)
        torch.manual_seed(5)
        expected = run(eager, eager.step, xs)
        captured = training(name, device, group)
        before = captured.state()
        torch.manual_seed(5)
        with fusedddp.make_graphed_step(captured.step, (xs[0],), scaler=captured.scaler) as step:
            after = captured.state()
            # State that the optimizer makes is there now, as of one that never stepped.
            check_same({k: after[k] for k in before if k != "scale"}, without(before, "scale"))
            assert all(not v.any() for k, v in after.items() if k not in before)
            losses = run(captured, step, xs)
            assert step.num_graphs == _NUM_GRAPHS.get(name, 1)
            if device == "cpu":
                assert step._backend.num_replays == len(xs)
                assert step._backend.num_captures == step.num_graphs
        assert [loss.tolist() for loss in losses] == [loss.tolist() for loss in expected]
        check_same(captured.state(), eager.state())


def without(state: dict[str, Tensor], key: str) -> dict[str, Tensor]:
    return {k: v for k, v in state.items() if k != key}


@pytest.mark.parametrize("name", NAMES)
def test_captured_equals_eager(one_rank: Ranks, device: str, name: str) -> None:
    one_rank.run(check_parity, device, name)


@pytest.mark.parametrize(
    "name",
    [
        "views",
        "own gradients",
        "find unused",
        "comm hook",
        "bf16 hook",
        "buffers",
        "accumulation",
        "clipping",
    ],
)
def test_captured_equals_eager_on_two_ranks(two_ranks: Ranks, name: str) -> None:
    two_ranks.run(check_parity, "cpu", name)
