"""What eager steps honour, replays honour too: each check is needed, and each does its work.

Every case trains, changes something between two steps as a user would, and trains on. With the
check in place results are those of eager steps, bit for bit. With it switched off they are not.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fusedddp
from fusedddp.graphs.gradients import Entry, Exit
from fusedddp.graphs.participants import Participants
from fusedddp.graphs.staleness import Bindings
from tests.graph_cases import Training, batches, captures_on, check_same, training
from tests.ranks import Ranks

_Patch = tuple[type, str, Any]

_CHANGE: _Patch = (Bindings, "find_change", lambda self: None)
_RENEW: _Patch = (Bindings, "renew", lambda self: None)
_MODE: _Patch = (Participants, "mode", lambda self, device_type: None)
_LEAVE: _Patch = (Exit, "restore", lambda self, found: None)
_FILL: _Patch = (Entry, "fill", lambda self, found: None)
_FITS: _Patch = (Entry, "fits", lambda self, found: True)


def plain(device: str, group: Any, *, name: str = "views", lr: float | None = None) -> Training:
    case = training(name, device, group)
    if lr is not None:
        for param_group in case.optimizer.param_groups:
            param_group["lr"] = lr
    return case


def set_lr(case: Training) -> None:
    for group in case.optimizer.param_groups:
        group["lr"] = 0.5


def fill_lr(case: Training) -> None:
    for group in case.optimizer.param_groups:
        group["lr"].fill_(0.5)


def set_weight_decay(case: Training) -> None:
    for group in case.optimizer.param_groups:
        group["weight_decay"] = 0.5


def freeze(case: Training) -> None:
    case.model.module.body[0].weight.requires_grad_(False)


def move(case: Training) -> None:
    for param in case.model.parameters():
        param.data = param.data.clone()


def replace_buffer(case: Training) -> None:
    case.model.module.norm.running_mean = torch.full_like(case.model.module.norm.running_mean, 3.0)


def load_buffers(case: Training) -> None:
    state = case.model.state_dict()
    case.model.load_state_dict({k: v + 1 for k, v in state.items()})


def load_optimizer(case: Training) -> None:
    state = case.optimizer.state_dict()
    for values in state["state"].values():
        values["exp_avg"] = torch.full_like(values["exp_avg"], 0.5)
    case.optimizer.load_state_dict(state)


def replace_optimizer_state(case: Training) -> None:
    for values in case.optimizer.state.values():
        values["exp_avg"] = torch.full_like(values["exp_avg"], 0.5)


def hook_gradient(case: Training) -> None:
    case.model.module.body[2].weight.register_hook(lambda gradient: gradient * 0.5)


def hook_forward(case: Training) -> None:
    case.model.module.body[1].register_forward_hook(lambda module, args, output: output * 0.5)


def evaluate(case: Training) -> None:
    case.model.eval()


def drop_gradients(case: Training) -> None:
    for param in case.model.parameters():
        param.grad = None


def replace_gradients(case: Training) -> None:
    for param in case.model.parameters():
        if param.grad is not None:
            param.grad = torch.ones_like(param.grad)


def set_growth(case: Training) -> None:
    case.scaler.set_growth_factor(8.0)


def set_scale(case: Training) -> None:
    case.scaler.update(new_scale=4.0)


def reduce_alone(case: Training) -> None:
    groups = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
    case.model._update_process_group(groups[dist.get_rank()])


def hold_no_sync(case: Training) -> None:
    case.model.require_backward_grad_sync = False


def set_dropout(case: Training) -> None:
    case.model.module.drop.p = 0.9


def set_momentum(case: Training) -> None:
    case.model.module.norm.momentum = 0.9


_Case = tuple[Callable[[Training], None], dict[str, Any], list[_Patch]]
# What the user does between steps; what is trained; the checks without which it goes wrong.
CASES: dict[str, _Case] = {
    "lr a number": (set_lr, {"lr": 0.01}, [_CHANGE]),
    "weight decay a number": (set_weight_decay, {}, [_CHANGE]),
    "lr a tensor": (fill_lr, {}, []),
    "lr a number for a tensor": (set_lr, {}, [_RENEW, _CHANGE]),
    "frozen": (freeze, {}, [_MODE, _CHANGE]),
    "parameters moved": (move, {}, [_CHANGE]),
    "buffer replaced": (replace_buffer, {"name": "buffers"}, [_CHANGE]),
    "buffers loaded": (load_buffers, {"name": "buffers"}, []),
    "optimizer loaded": (load_optimizer, {}, [_CHANGE]),
    "optimizer state replaced": (replace_optimizer_state, {}, [_CHANGE]),
    "rate of dropout": (set_dropout, {"name": "dropout"}, [_CHANGE]),
    "momentum of a norm": (set_momentum, {"name": "buffers"}, [_CHANGE]),
    "hook on a parameter": (hook_gradient, {}, [_CHANGE]),
    "hook on a module": (hook_forward, {}, [_CHANGE]),
    "evaluation": (evaluate, {"name": "dropout"}, [_MODE]),
    "gradients dropped": (drop_gradients, {"name": "no zero"}, [_FITS]),
    "gradients dropped for good": (drop_gradients, {}, [_LEAVE]),
    "gradients replaced": (replace_gradients, {"name": "no zero"}, [_FILL]),
    "growth of the scale": (set_growth, {"name": "scaler"}, [_CHANGE]),
    "scale": (set_scale, {"name": "scaler"}, []),
    "process group": (reduce_alone, {}, [_CHANGE]),
    "no_sync": (hold_no_sync, {}, [_MODE]),
}
_NEEDS_TWO_RANKS = ("process group", "no_sync")


@contextlib.contextmanager
def switched_off(patches: list[_Patch]) -> Iterator[None]:
    before = [(owner, name, getattr(owner, name)) for owner, name, _ in patches]
    for owner, name, value in patches:
        setattr(owner, name, value)
    try:
        yield
    finally:
        for owner, name, value in before:
            setattr(owner, name, value)


def train(
    case: Training, step: Callable[..., Any], change: Callable[[Training], None], xs: list[Tensor]
) -> list[Any]:
    torch.manual_seed(3)
    results: list[Any] = [step(x).tolist() for x in xs[:4]]
    change(case)
    results += [step(x).tolist() for x in xs[4:]]
    results.append(case.state())
    return results


def is_right(device: str, group: Any, rank: int, name: str, off: list[_Patch]) -> bool:
    change, keywords, _ = CASES[name]
    xs = batches(12, rank, device)
    eager = plain(device, group, **keywords)
    *expected, expected_state = train(eager, eager.step, change, xs)
    case = plain(device, group, **keywords)
    with switched_off(off):
        with fusedddp.make_graphed_step(case.step, (xs[0],), scaler=case.scaler) as step:
            *found, state = train(case, step, change, xs)
    try:
        assert found == expected
        check_same(state, expected_state)
    except AssertionError:
        return False
    return True


def check_case(rank: int, device: str, name: str) -> None:
    with captures_on(device) as group:
        assert is_right(device, group, rank, name, [])
        off = CASES[name][2]
        if off:
            assert not is_right(device, group, rank, name, off), "the check has no effect"


@pytest.mark.parametrize("name", CASES)
def test_change_between_steps(request: pytest.FixtureRequest, device: str, name: str) -> None:
    if device == "cuda" and name in _NEEDS_TWO_RANKS:
        pytest.skip("needs two ranks, which NCCL refuses on one GPU")
    ranks: Ranks = request.getfixturevalue("two_ranks" if device == "cpu" else "one_rank")
    ranks.run(check_case, device, name)


def check_autocast(rank: int, device: str) -> None:
    with captures_on(device) as group:
        xs = batches(6, rank, device)
        eager, case = plain(device, group), plain(device, group)
        with fusedddp.make_graphed_step(case.step, (xs[0],)) as step:
            for function, results in ((eager.step, []), (step, found := [])):
                for index, x in enumerate(xs):
                    with torch.autocast(device, torch.bfloat16, enabled=index % 2 == 1):
                        results.append(function(x).tolist())
                if function is eager.step:
                    expected = results
            assert found == expected
            assert step.num_graphs == 2


def test_autocast_around_the_step(one_rank: Ranks, device: str) -> None:
    one_rank.run(check_autocast, device)


def check_scheduler(rank: int, device: str) -> None:
    with captures_on(device) as group:
        xs = batches(10, rank, device)
        case = plain(device, group, lr=0.01)
        scheduler = torch.optim.lr_scheduler.StepLR(case.optimizer, 1, gamma=0.9)
        with fusedddp.make_graphed_step(case.step, (xs[0],)) as step:
            with pytest.raises(
                RuntimeError,
                match=r"lr was 0.0\d* and is 0.* in AdamW\. Give .* a tensor",
            ):
                for x in xs:
                    step(x)
                    scheduler.step()
            step(xs[0])  # it goes on


def test_number_that_changes_in_each_step_is_an_error(one_rank: Ranks, device: str) -> None:
    one_rank.run(check_scheduler, device)


def check_inside(rank: int, device: str) -> None:
    with captures_on(device) as group:
        case = training("scheduler", device, group)
        (x,) = batches(1, rank, device)

        def schedules(x: Tensor) -> Tensor:
            loss = case.step(x)
            case.scheduler.step()
            return loss

        with pytest.raises(RuntimeError, match="lr of an optimizer was written, by a scheduler"):
            fusedddp.make_graphed_step(schedules, (x,))

        norm = nn.BatchNorm1d(20).to(device)

        def replaces(x: Tensor) -> Tensor:
            norm.running_mean = norm(x).mean(0).detach()
            return norm.running_mean

        with pytest.raises(RuntimeError, match="in the step a parameter, buffer or submodule was"):
            fusedddp.make_graphed_step(replaces, (x,))


def test_what_the_step_itself_replaces_is_an_error(one_rank: Ranks, device: str) -> None:
    one_rank.run(check_inside, device)
