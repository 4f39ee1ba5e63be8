"""Graphed steps in use: signatures, outputs, endings, wrong calls, users' own captures."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fusedddp
from fusedddp.capturing import is_capturing
from fusedddp.graphs.backend import BACKENDS
from tests.graph_cases import batches, captures_on, check_same, run, training
from tests.models import Branches
from tests.ranks import Ranks

_Run = Callable[..., None]


@pytest.fixture
def on_rank(one_rank: Ranks, device: str) -> _Run:
    return lambda fn, *args: one_rank.run(fn, device, *args)


# -- signatures ----------------------------------------------------------------------------------


def check_signatures(rank: int, device: str, name: str) -> None:
    with captures_on(device) as group:
        eager, case = training(name, device, group), training(name, device, group)
        a, b = batches(2, rank, device), batches(2, rank, device, rows=3)
        sequence = [a[0], b[0], a[1], b[1], a[0]]
        expected = [eager.step(x).tolist() for x in sequence]
        with fusedddp.make_graphed_step(case.step, (a[0],), max_graphs=2) as step:
            assert [step(x).tolist() for x in sequence] == expected
            assert step.num_graphs == 2
            other = batches(1, rank, device, rows=5)[0]  # takes the place of that for `b`
            assert step(other).tolist() == eager.step(other).tolist()
            assert step.num_graphs == 2
            assert step(a[0]).tolist() == eager.step(a[0]).tolist()
            assert step(b[0]).tolist() == eager.step(b[0]).tolist()
        check_same(case.state(), eager.state())


def test_other_shapes_get_graphs_of_their_own(on_rank: _Run) -> None:
    on_rank(check_signatures, "views")


def check_turns(rank: int, device: str, name: str) -> None:
    with captures_on(device) as group:
        eager, case = training(name, device, group), training(name, device, group)
        xs = [batches(12, rank, device, rows=3 + i % 3)[i] for i in range(12)]
        with fusedddp.make_graphed_step(case.step, (xs[0],), warmup=1) as step:
            for x in xs:
                assert step(x).tolist() == eager.step(x).tolist()
        check_same(case.state(), eager.state())


@pytest.mark.parametrize("name", ["own gradients", "no zero", "zero in place"])
def test_graphs_take_turns(on_rank: _Run, name: str) -> None:
    on_rank(check_turns, name)


def check_structure(rank: int, device: str) -> None:
    with captures_on(device):

        def step(pair: tuple[Tensor, Tensor], *, options: dict[str, Any]) -> dict[str, Any]:
            return {
                "sum": pair[0] * options["factor"] + pair[1],
                "both": [pair[0] + 1, (pair[1].sum(), None)],
                "name": "x",
            }

        x, y = (torch.full((2,), v, device=device) for v in (1.0, 2.0))
        graphed = fusedddp.make_graphed_step(step, ((x, y),), {"options": {"factor": 3}})
        first = graphed((x, y), options={"factor": 3})
        second = graphed((y, x), options={"factor": 3})
        assert first["sum"].tolist() == [5, 5] and second["sum"].tolist() == [7, 7]
        assert second["name"] == "x" and second["both"][1][1] is None
        assert isinstance(second["both"][1], tuple)
        assert graphed((x, y), options={"factor": 4})["sum"].tolist() == [6, 6]
        assert graphed((x, y), options={"factor": 3.0})["sum"].tolist() == [5, 5]
        assert graphed.num_graphs == 3


def test_outputs_have_the_structure_of_the_step_and_stay(on_rank: _Run) -> None:
    on_rank(check_structure)


def check_number(rank: int, device: str) -> None:
    with captures_on(device):

        def scale(x: Tensor, factor: float) -> Tensor:
            return x * factor

        x = torch.ones(2, device=device)
        graphed = fusedddp.make_graphed_step(scale, (x, 0.0), max_graphs=2)
        with pytest.raises(RuntimeError, match=r"leaf 1 of the arguments was float .* as tensors"):
            for number in range(1, 20):
                graphed(x, float(number))
        assert graphed(x, 3.0).tolist() == [3, 3]


def test_number_that_changes_in_each_call_is_an_error(on_rank: _Run) -> None:
    on_rank(check_number)


# -- state ---------------------------------------------------------------------------------------


def check_untouched(rank: int, device: str, name: str) -> None:
    with captures_on(device) as group:
        case = training(name, device, group)
        xs = batches(4, rank, device)
        run(case, case.step, xs)
        case.model(xs[0]).sum().backward()
        addresses = [(p.data_ptr(), p.grad.data_ptr()) for p in case.model.module.body.parameters()]
        before, numbers = case.state(), torch.get_rng_state()
        with fusedddp.make_graphed_step(
            case.step,
            (xs[0],),
            model=case.model,
            optimizer=case.optimizer,
            scaler=case.scaler,
        ):
            check_same(case.state(), before)
        now = [(p.data_ptr(), p.grad.data_ptr()) for p in case.model.module.body.parameters()]
        assert now == addresses
        assert torch.equal(torch.get_rng_state(), numbers)


@pytest.mark.parametrize("name", ["views", "buffers", "dropout", "scaler", "no zero", "sgd"])
def test_capture_leaves_state_as_it_was(on_rank: _Run, name: str) -> None:
    on_rank(check_untouched, name)


def check_new_state(rank: int, device: str) -> None:
    with captures_on(device):
        for make in (
            lambda p: torch.optim.NAdam(p, lr=0.1, capturable=device == "cuda", foreach=False),
            lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.5),
        ):
            model = nn.Linear(20, 5).to(device)
            optimizer = make(model.parameters())

            def step(x: Tensor, model: Any = model, optimizer: Any = optimizer) -> Tensor:
                optimizer.zero_grad()
                loss = model(x).square().sum()
                loss.backward()
                optimizer.step()
                return loss

            (x,) = batches(1, rank, device)
            if isinstance(optimizer, torch.optim.SGD):
                with pytest.raises(RuntimeError, match="Run one step eagerly before"):
                    fusedddp.make_graphed_step(lambda x, step=step: step(x), (x,))
                step(x)
                fusedddp.make_graphed_step(lambda x, step=step: step(x), (x,))(x)
            elif device == "cuda":
                graphed = fusedddp.make_graphed_step(lambda x, step=step: step(x), (x,))
                assert optimizer.state[model.bias]["mu_product"].item() == 1.0
                graphed(x)


def test_state_that_an_optimizer_makes_in_warm_up(on_rank: _Run) -> None:
    on_rank(check_new_state)


def check_mixed(rank: int, device: str, name: str) -> None:
    """Eager steps, and gradients that are kept, between replays."""
    with captures_on(device) as group:
        eager, case = training(name, device, group), training(name, device, group)
        xs = batches(12, rank, device)
        kept = []
        with fusedddp.make_graphed_step(case.step, (xs[0],)) as step:
            for index, x in enumerate(xs):
                function = case.step if index % 4 == 2 else step
                assert function(x).tolist() == eager.step(x).tolist()
                if index == 6:  # a gradient of an eager step, which nothing may overwrite
                    gradient = case.model.module.body[0].weight.grad
                    kept.append((gradient, gradient.clone()))
        check_same(case.state(), eager.state())
        if name != "no zero":
            assert all(torch.equal(gradient, copy) for gradient, copy in kept)


@pytest.mark.parametrize("name", ["views", "own gradients", "no zero", "clipping"])
def test_eager_steps_between_replays(two_ranks: Ranks, name: str) -> None:
    two_ranks.run(check_mixed, "cpu", name)


@pytest.mark.parametrize("name", ["views", "own gradients", "no zero"])
def test_eager_steps_between_replays_on_one_rank(on_rank: _Run, name: str) -> None:
    on_rank(check_mixed, name)


# -- eager ---------------------------------------------------------------------------------------


def test_without_a_gpu_the_step_runs_eagerly(caplog: pytest.LogCaptureFixture) -> None:
    x = torch.ones(2, 3)
    with caplog.at_level(logging.INFO, logger="fusedddp.graphs.make"):
        with fusedddp.make_graphed_step(lambda x: x.sum().item() + x, (x,)) as step:
            assert step(x).tolist() == (x + 6).tolist()
    assert len(caplog.records) == 1 and "(2, 3) on cpu" in caplog.text
    with pytest.raises(RuntimeError, match="it was closed"):
        step(x)
    with pytest.raises(ValueError, match=r"enabled=True: .* shape \(2, 3\) on cpu"):
        fusedddp.make_graphed_step(lambda x: x, (x,), enabled=True)
    step = fusedddp.make_graphed_step(lambda x: x.sum().item() + x, (x,), enabled=False)
    assert step(x).tolist() == (x + 6).tolist()
    result = fusedddp.make_graphed_step(lambda x: x, (x,))(x)  # a copy, as from a graph
    assert torch.equal(result, x) and result.data_ptr() != x.data_ptr()


def test_a_build_for_cuda_without_a_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    def raises() -> bool:
        raise RuntimeError("CUDA driver version is insufficient")

    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", raises)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    assert not is_capturing()


# -- endings -------------------------------------------------------------------------------------


def check_endings(rank: int, device: str) -> None:
    with captures_on(device) as given:
        destroy = dist.destroy_process_group
        backend = "nccl" if device == "cuda" else "gloo"
        group = dist.new_group(backend=backend)
        case = training("views", device, group)
        (x,) = batches(1, rank, device)
        step = fusedddp.make_graphed_step(case.step, (x,))
        step(x)
        dist.destroy_process_group(group)
        assert dist.destroy_process_group is destroy
        assert step.num_graphs == 0
        with pytest.raises(RuntimeError, match="that it was destroyed"):
            step(x)
        again = training("views", device, given)
        step = fusedddp.make_graphed_step(again.step, (x,))
        assert dist.destroy_process_group is not destroy
        del step
        assert dist.destroy_process_group is destroy


def test_graphs_go_before_their_process_group(on_rank: _Run) -> None:
    on_rank(check_endings)


_LEAVES = """
import sys, torch, torch.distributed as dist
from tests.graph_cases import batches, captures_on, training
import fusedddp
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
with captures_on(sys.argv[1]) as group:
    case = training("views", sys.argv[1], group)
    (x,) = batches(1, 0, sys.argv[1])
    step = fusedddp.make_graphed_step(case.step, (x,))
    step(x)
"""


def test_leaving_python_with_a_live_graph(device: str) -> None:
    subprocess.run(
        [sys.executable, "-c", _LEAVES, device],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        check=True,
        timeout=60,
    )


# -- wrong calls ---------------------------------------------------------------------------------


def check_calls(rank: int, device: str) -> None:
    with captures_on(device) as group:
        case = training("views", device, group)
        (x,) = batches(1, rank, device)
        step: Any = fusedddp.make_graphed_step(case.step, (x,))
        found: list[BaseException] = []

        def elsewhere() -> None:
            try:
                step(x)
            except RuntimeError as error:
                found.append(error)

        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
        assert "one from Thread-" in str(found[0])
        with pytest.raises(RuntimeError, match="no capture around a graphed step"):
            BACKENDS[device]().capture(lambda: step(x), None)
        itself: Any = None

        def calls_itself(x: Tensor) -> Tensor:
            return x if itself is None else itself(x)

        itself = fusedddp.make_graphed_step(calls_itself, (x,))
        with pytest.raises(RuntimeError, match=r"that it does\. Call the function itself"):
            itself(x[:2])
        with case.model.join(), pytest.raises(RuntimeError, match="no join"):
            step(x)
        for wrong, kind, text in (
            (x.clone().requires_grad_(), ValueError, "leaf 0 .* Pass input.detach"),
            (x[:1].expand(8, 20), ValueError, "an expanded one as leaf 0"),
            (x.to_sparse(), ValueError, "expected dense tensors"),
            (x.to("meta"), ValueError, f"expected tensors on {device} as arguments, .* on meta"),
            (bytearray(1), TypeError, "found bytearray as leaf 0"),
        ):
            with pytest.raises(kind, match=text):
                step(wrong)
        assert step(x).tolist() is not None


def test_calls_that_make_no_sense(on_rank: _Run) -> None:
    on_rank(check_calls)


def check_arguments(rank: int, device: str) -> None:
    with captures_on(device):
        x = torch.ones(2, device=device)
        make: Any = fusedddp.make_graphed_step
        for call, kind, text in (
            (lambda: make(3, (x,)), TypeError, "step: expected a function"),
            (lambda: make(len, x), TypeError, r"Write \(x,\) for a single one"),
            (lambda: make(len, (x,), warmup=0), ValueError, "warmup: expected a whole number"),
            (lambda: make(len, (x,), max_graphs=None), ValueError, "max_graphs: expected"),
            (lambda: make(len, (x,), enabled="yes"), TypeError, "enabled: expected True"),
            (lambda: make(len, (x,), model=3), TypeError, "model: expected a Module or several"),
            (
                lambda: make(len, (x,), optimizer=[3]),
                TypeError,
                "optimizer: expected an Optimizer or several, found int",
            ),
            (lambda: make((len, len), (x,)), ValueError, "pass model=model"),
            (lambda: make(len, (x,)), TypeError, r"found 2 \(int\)"),
            (lambda: make(len, {x}), TypeError, "sample_args: expected a tuple"),
            (lambda: make(len, (x,), {1: x}), TypeError, "sample_kwargs: expected a dict"),
            (lambda: make(len, (x,), [("x", x)]), TypeError, "sample_kwargs: expected a dict"),
            (lambda: make(len, (x,), enabled=0), TypeError, "enabled: expected True"),
            (lambda: make(len, (x,), enabled=torch.ones(2)), TypeError, "enabled: expected True"),
            (lambda: make(len, (x,), scaler=3), TypeError, "scaler: expected a GradScaler"),
            (lambda: make(len, (x,), model=nn.Linear), TypeError, "expected a Module or .* type"),
            (lambda: make(len, (x,), pool=3), TypeError, "pool: expected"),
            (
                lambda: make((len, len), (x,), model=fusedddp.wrap(nn.Linear(2, 2).to(device))),
                TypeError,
                "the update, to take no arguments",
            ),
        ):
            with pytest.raises(kind, match=text):
                call()
        for result in (None, (), {"name": "x", "loss": None}):
            with pytest.raises(TypeError, match=r"to return a tensor, found .* return the loss"):
                make(lambda x, result=result: result, (x,))


def test_arguments_that_make_no_sense(on_rank: _Run) -> None:
    on_rank(check_arguments)


def check_micro_steps(rank: int, device: str) -> None:
    """A parameter that only micro-steps use has its gradient reduced all the same."""
    with captures_on(device) as group:
        results = []
        for is_graphed in (False, True):
            model = fusedddp.wrap(Branches().to(device), process_group=group)
            found = []

            def step(x: Tensor, which: tuple[int, ...], model: Any = model) -> Tensor:
                loss: Tensor = model(x, list(which))
                loss.backward()
                return loss

            x = torch.full((3,), 1.0 + rank, device=device)
            graphed: Any = step
            if is_graphed:
                graphed = fusedddp.make_graphed_step(step, (x, (0, 1, 2, 3)), model=model)
            for factor in range(1, 5):
                for which in ((0, 1), (2, 3)):
                    with model.no_sync():
                        graphed(x * factor, which)
                graphed(x, (0,))
                found += [p.grad.tolist() for p in model.parameters()]
                model.zero_grad()
            results.append(found)
        assert results[0] == results[1]


def test_micro_steps_of_different_kinds(two_ranks: Ranks) -> None:
    two_ranks.run(check_micro_steps, "cpu")


# -- without our help ----------------------------------------------------------------------------


def check_own_capture(rank: int, device: str) -> None:
    with captures_on(device) as group:
        (x,) = batches(1, rank, device)
        for name in ("views", "own gradients", "find unused"):
            eager, case = training(name, device, group), training(name, device, group)
            backend = BACKENDS[device]()
            for missing in ("2 more steps", "1 more step"):
                with pytest.raises(RuntimeError, match=f"run {missing} eagerly"):
                    backend.capture(lambda case=case: case.step(x), None)
                case.model.reducer.forget_backward()
                for param in case.model.parameters():
                    param.grad = None
                with backend.warm_up():
                    case.step(x)
                eager.step(x)
            graph, loss = backend.capture(lambda case=case: case.step(x).detach(), None)
            if device == "cpu":  # the stand-in has carried the step out
                assert loss.tolist() == eager.step(x).tolist()
            for _ in range(5):
                graph.replay()
                assert loss.tolist() == eager.step(x).tolist()
            check_same(case.state(), eager.state())


def test_users_own_capture(on_rank: _Run) -> None:
    on_rank(check_own_capture)


def check_split(rank: int, device: str) -> None:
    with captures_on(device) as group:
        eager, case = training("views", device, group), training("views", device, group)

        def backward(x: Tensor) -> Tensor:
            loss = (case.model(x) - x[:, :5]).square().mean()
            loss.backward()
            return loss

        def update() -> None:
            case.optimizer.step()
            case.optimizer.zero_grad()

        xs = batches(10, rank, device)
        with fusedddp.make_graphed_step((backward, update), (xs[0],), model=case.model) as step:
            for x in xs:
                assert step(x).tolist() == eager.step(x).tolist()
            assert step.num_graphs == 2
            with case.model.no_sync():
                step(xs[0])
            with eager.model.no_sync():
                (eager.model(xs[0]) - xs[0][:, :5]).square().mean().backward()
            for ours, theirs in zip(case.model.parameters(), eager.model.parameters(), strict=True):
                assert (ours.grad is None) == (theirs.grad is None)
            if device == "cpu":
                assert step._backward._backend.num_replays == 21  # it is one for both
        for each in (eager, case):
            each.optimizer.zero_grad()
        check_same(case.state(), eager.state())


def check_split_models(rank: int) -> None:
    with captures_on("cpu"):
        models = [fusedddp.wrap(nn.Linear(20, 5)) for _ in range(2)]

        def backward(x: Tensor) -> Tensor:
            loss: Tensor = sum(model(x).square().mean() for model in models)
            loss.backward()
            return loss

        (x,) = batches(1, rank, "cpu")
        step = fusedddp.make_graphed_step((backward, lambda: None), (x,), model=models)
        step(x)
        with models[0].no_sync(), pytest.raises(RuntimeError, match="found some of 2"):
            step(x)


def test_no_sync_of_one_of_two_models(two_ranks: Ranks) -> None:
    two_ranks.run(check_split_models)


def test_reduction_between_two_graphs(two_ranks: Ranks) -> None:
    two_ranks.run(check_split, "cpu")


def test_reduction_between_two_graphs_on_one_rank(on_rank: _Run) -> None:
    on_rank(check_split)
