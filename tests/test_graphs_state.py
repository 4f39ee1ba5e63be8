"""Making a graph leaves all as it was: what the step writes, and where it cannot be captured."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fusedddp
from tests.graph_cases import batches, captures_on, check_same, training
from tests.ranks import Ranks

_Run = Callable[..., None]


@pytest.fixture
def on_rank(one_rank: Ranks, device: str) -> _Run:
    return lambda fn, *args: one_rank.run(fn, device, *args)


# -- optimizers ----------------------------------------------------------------------------------


class Momentum(torch.optim.Optimizer):
    """SGD with momentum as other libraries write it."""

    def __init__(self, params: Any, make_state: Callable[[dict[str, Any], Tensor], Tensor]) -> None:
        super().__init__(params, {"lr": 0.1})
        self.make_state = make_state

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for param in self.param_groups[0]["params"]:
            momentum = self.make_state(self.state[param], param.grad)
            param.add_(momentum.mul_(0.9).add_(param.grad), alpha=-0.1)


def by_setdefault(state: dict[str, Any], grad: Tensor) -> Tensor:
    found: Tensor = state.setdefault("m", torch.zeros_like(grad))
    return found


def by_update(state: dict[str, Any], grad: Tensor) -> Tensor:
    if "m" not in state:
        state |= {"m": torch.zeros_like(grad)}
    found: Tensor = state["m"]
    return found


class Foreign(Momentum):
    """Passes for one of torch's own, of which each first value is looked at."""

    __module__ = "torch.optim.foreign"


def filled_later(state: dict[str, Any], grad: Tensor) -> Tensor:
    if "m" not in state:
        state["m"] = torch.full_like(grad, 7.0)
        state["m"].zero_()
    found: Tensor = state["m"]
    return found


def from_gradient(state: dict[str, Any], grad: Tensor) -> Tensor:
    if "m" not in state:
        state["m"] = grad.clone()
    found: Tensor = state["m"]
    return found


def lbfgs(params: Any) -> torch.optim.Optimizer:
    return torch.optim.LBFGS(params)


def dampened(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1, momentum=0.9, dampening=0.5)


def check_optimizer(rank: int, device: str, make: Any, partly: bool) -> None:
    with captures_on(device):
        results = []
        for graphed_first in (False, True):
            torch.manual_seed(0)
            model = nn.Linear(20, 5).to(device)
            optimizer = (
                make(model.parameters())
                if make in (lbfgs, dampened)
                else (Foreign if make is by_setdefault else Momentum)(model.parameters(), make)
            )
            if partly:
                for param in model.parameters():
                    optimizer.state[param]["count"] = torch.zeros((), device=device)

            def step(x: Tensor, model: Any = model, optimizer: Any = optimizer) -> Tensor:
                def closure() -> Tensor:
                    optimizer.zero_grad()
                    loss: Tensor = model(x).square().mean()
                    loss.backward()
                    return loss

                if isinstance(optimizer, torch.optim.LBFGS):
                    return optimizer.step(closure).detach()
                loss = closure()
                optimizer.step()
                return loss.detach()

            xs = batches(4, rank, device)
            torch.manual_seed(3)
            if graphed_first:
                with pytest.raises(RuntimeError, match=r"Run one step eagerly before|captured"):
                    fusedddp.make_graphed_step(step, (xs[0],))
                assert torch.initial_seed() == 3
            losses = [step(xs[0]).tolist(), step(xs[1]).tolist()]
            if graphed_first and make is not lbfgs:
                with fusedddp.make_graphed_step(step, (xs[0],)) as graphed:
                    losses += [graphed(x).tolist() for x in xs[2:]]
            else:
                losses += [step(x).tolist() for x in xs[2:]]
            results.append(losses + [p.tolist() for p in model.parameters()])
        assert results[0] == results[1]


@pytest.mark.parametrize("partly", [False, True], ids=["new", "partly"])
@pytest.mark.parametrize(
    "make", [by_setdefault, by_update, filled_later, from_gradient, lbfgs, dampened]
)
def test_state_that_cannot_be_put_back_is_an_error(on_rank: _Run, make: Any, partly: bool) -> None:
    if partly and make in (lbfgs, dampened):
        pytest.skip("they make all of it in one step")
    on_rank(check_optimizer, make, partly)


# -- what else a step writes ---------------------------------------------------------------------


class Metrics:
    def __init__(self, device: str) -> None:
        self.parts = {
            "total": torch.zeros((), device=device),
            "count": torch.zeros(2, device=device),
        }


def check_metrics(rank: int, device: str) -> None:
    """In an item of a dict of an object, and a view of something larger."""
    with captures_on(device) as group:
        found = []
        for is_graphed in (False, True):
            case, metrics = training("views", device, group), Metrics(device)
            xs = batches(4, rank, device)

            def step(x: Tensor, case: Any = case, metrics: Metrics = metrics) -> Tensor:
                loss = case.step(x)
                metrics.parts["total"] += loss.detach()
                metrics.parts["count"][1:].add_(1)
                return loss

            if is_graphed:
                with fusedddp.make_graphed_step(lambda x, step=step: step(x), (xs[0],)) as graphed:
                    assert metrics.parts["total"].item() == 0
                    for x in xs:
                        graphed(x)
                    graphed(xs[0][:3])  # captures once more
            else:
                for x in xs:
                    step(x)
                step(xs[0][:3])
            found.append({k: v.tolist() for k, v in metrics.parts.items()})
        assert found[0] == found[1], found
        assert found[0]["count"] == [0, 5]


def test_what_a_step_writes_elsewhere_is_put_back(on_rank: _Run) -> None:
    on_rank(check_metrics)


def check_hook_state(rank: int, device: str) -> None:
    """What a communication hook writes, of which the rehearsal sees nothing."""
    with captures_on(device) as group:
        case = training("views", device, group)
        calls = torch.zeros(1, device=device)

        def hook(state: None, bucket: Any) -> torch.futures.Future[Tensor]:
            calls.add_(1)
            done: torch.futures.Future[Tensor] = torch.futures.Future()
            done.set_result(bucket.buffer())
            return done

        case.model.register_comm_hook(None, hook)
        xs = batches(3, rank, device)
        with fusedddp.make_graphed_step(case.step, (xs[0],)) as step:
            assert calls.item() == 0
            for x in xs:
                step(x)
            assert calls.item() == 3 * len(case.model.reducer.buckets)


def test_what_a_hook_writes_is_put_back(on_rank: _Run) -> None:
    on_rank(check_hook_state)


def check_once(rank: int, device: str) -> None:
    """A step that reduces in its first run only: warm-up does not wait for more rounds for ever."""
    with captures_on(device) as group:
        case = training("views", device, group)
        runs = [0]

        def step(x: Tensor) -> Tensor:
            runs[0] += 1
            return case.step(x) if runs[0] == 1 else case.model(x).sum()

        (x,) = batches(1, rank, device)
        with fusedddp.make_graphed_step(step, (x,)) as graphed:
            assert 5 <= runs[0] < 12
            assert torch.equal(graphed(x), case.model(x).sum())


def test_a_step_that_reduces_once(on_rank: _Run) -> None:
    on_rank(check_once)


def check_closed(rank: int, device: str) -> None:
    with captures_on(device) as group:
        case = training("views", device, group)
        (x,) = batches(1, rank, device)
        step = fusedddp.make_graphed_step(case.step, (x,))
        step(x)
        batch = weakref.ref(x)
        del x
        gc.collect()
        assert batch() is None
        step.close()


def test_a_batch_is_not_kept(on_rank: _Run) -> None:
    on_rank(check_closed)


def check_written_arguments(rank: int, device: str) -> None:
    with captures_on(device) as group:
        eager, case = training("views", device, group), training("views", device, group)
        xs = batches(5, rank, device)
        totals = []
        for each in (eager, case):

            def step(x: Tensor, state: dict[str, Tensor], each: Any = each) -> Tensor:
                loss = each.step(x)
                state["total"].add_(loss.detach())
                return loss

            state = {"total": torch.zeros((), device=device)}
            if each is eager:
                for x in xs:
                    step(x, state)
            else:
                with fusedddp.make_graphed_step(
                    lambda x, state, step=step: step(x, state), (xs[0], state)
                ) as graphed:
                    assert state["total"].item() == 0
                    for x in xs:
                        graphed(x, state)
            totals.append(state["total"].item())
        assert totals[0] == totals[1] != 0


def test_arguments_that_the_step_writes(on_rank: _Run) -> None:
    on_rank(check_written_arguments)


def check_shared_arguments(rank: int, device: str) -> None:
    """Memory that a step writes by one name and reads by another."""
    count, norm = torch.zeros(3, device=device), nn.BatchNorm1d(3).to(device)

    def scales(x: Tensor, y: Tensor) -> Tensor:
        y.mul_(0.5)
        return x + y

    def counts(x: Tensor, shown: Tensor) -> Tensor:
        count.add_(1)
        return x + shown

    def normalises(x: Tensor, shown: Tensor) -> Tensor:
        return norm(x) + shown

    with captures_on(device):
        x, y = torch.ones(4, 3, device=device), torch.ones(4, 3, device=device)
        for step, args in (
            (scales, (x, x)),
            (scales, (x, x[:])),
            (counts, (x, count)),
            (normalises, (x, norm.running_mean)),
        ):
            apart = tuple(torch.ones_like(arg) for arg in args)
            with fusedddp.make_graphed_step(step, apart) as graphed:
                graphed(*apart)
                with pytest.raises(ValueError, match="expected arguments with memory of their own"):
                    graphed(*args)
                assert (x == 1).all()
                graphed(*apart)
        staging = torch.ones(8, 3, device=device)
        halves = staging[:4], staging[4:]
        with fusedddp.make_graphed_step(scales, halves) as graphed:
            assert graphed(*halves).tolist() == [[1.5] * 3] * 4  # apart, in one storage
            assert staging.sum().item() == 12 + 6
        module = nn.Module()
        module.h = torch.zeros(1, device=device)

        def reads_another(x: Tensor, h: Tensor) -> Tensor:
            h.add_(1)
            return x + module.h

        with fusedddp.make_graphed_step(reads_another, (x, torch.zeros_like(module.h))) as graphed:
            with pytest.raises(ValueError, match="that it also reads by another name"):
                graphed(x, module.h)
        with fusedddp.make_graphed_step(lambda x, y: x + y, (x, y)) as graphed:
            assert graphed(x, x[:]).tolist() == (2 * x).tolist()  # nothing writes them


def test_arguments_that_share_memory(on_rank: _Run) -> None:
    on_rank(check_shared_arguments)


def check_scaler(rank: int, device: str) -> None:
    """Found without being given; one that is switched off is none."""
    with captures_on(device) as group:
        for is_on in (True, False):
            eager, case = training("scaler", device, group), training("scaler", device, group)
            for each in (eager, case):
                each.scaler = torch.amp.GradScaler(device, init_scale=2.0**10, enabled=is_on)
            xs = batches(4, rank, device)
            given = {} if is_on else {"scaler": case.scaler}
            with fusedddp.make_graphed_step(case.step, (xs[0],), **given) as step:
                assert step._participants.scalers == ([case.scaler] if is_on else [])
                for x in xs:
                    assert step(x).tolist() == eager.step(x).tolist()
            assert case.scaler.get_scale() == eager.scaler.get_scale()


def test_scalers_are_found(on_rank: _Run) -> None:
    on_rank(check_scaler)


def check_threads(rank: int, device: str) -> None:
    """Another thread trains while a step is captured: nothing of it is put back."""
    with captures_on(device) as group:
        case, other = training("views", device, group), nn.Linear(3, 2)
        optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
        begun, done = threading.Event(), threading.Event()

        def trains() -> None:
            begun.wait()
            other(torch.ones(3)).sum().backward()
            optimizer.step()
            done.set()

        def step(x: Tensor) -> Tensor:
            if not begun.is_set():
                begun.set()
                assert done.wait(20)
            return case.step(x)

        before = other.weight.detach().clone()
        thread = threading.Thread(target=trains)
        thread.start()
        with fusedddp.make_graphed_step(step, batches(1, rank, device)) as graphed:
            thread.join()
            assert torch.equal(other.weight, before - 0.1)
            assert optimizer not in graphed._participants.optimizers


def test_what_another_thread_trains_is_left_alone(on_rank: _Run) -> None:
    on_rank(check_threads)


# -- steps within steps --------------------------------------------------------------------------


def check_nested(rank: int, device: str) -> None:
    with captures_on(device) as group:
        outer, inner = training("views", device, group), training("views", device, group)
        (x,) = batches(1, rank, device)
        graphed = fusedddp.make_graphed_step(inner.step, (x,))
        states = [outer.state(), inner.state()]

        def calls(x: Tensor) -> Tensor:
            return outer.step(x) + graphed(x)

        def makes(x: Tensor) -> Tensor:
            return outer.step(x) + fusedddp.make_graphed_step(inner.step, (x,))(x)

        for step in (calls, makes):
            with pytest.raises(RuntimeError, match="no graphed step within another one"):
                fusedddp.make_graphed_step(step, (x,))
            for case, before in zip((outer, inner), states, strict=True):
                check_same(case.state(), before)
        graphed(x)


def test_a_step_within_another_is_refused_before_it_trains(on_rank: _Run) -> None:
    on_rank(check_nested)


def check_closes(rank: int, device: str) -> None:
    with captures_on(device) as group:
        case = training("views", device, group)
        (x,) = batches(1, rank, device)
        graphed: Any = None

        def step(x: Tensor) -> Tensor:
            if graphed is not None:
                graphed.close()
            return case.step(x)

        graphed = fusedddp.make_graphed_step(step, (x,))
        with pytest.raises(RuntimeError, match="found that it was closed there"):
            graphed(x[:2])
        assert graphed.num_graphs == 0


def test_a_step_that_is_closed_within(on_rank: _Run) -> None:
    on_rank(check_closes)
