"""`torch.compile` around the wrapper, inside of it, and around the whole step."""

from __future__ import annotations

import contextlib
import copy
import shutil
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch._dynamo
import torch._inductor.config
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn.parallel import DistributedDataParallel

import fusedddp
from fusedddp.collectives import Collective
from tests.expected import assert_gradients, mean_of_ranks
from tests.models import batch
from tests.ranks import Ranks

WIDTH = 600  # a layer takes 1.4 MiB, more than a bucket of the smallest size that dynamo splits for


class Deep(nn.Module):
    """Several buckets of 1 MiB."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).relu()
        return x


class Small(nn.Module):
    """A block that may be left out, and BatchNorm, whose buffers the wrapper writes to."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(8, 8)
        self.norm = nn.BatchNorm1d(8)
        self.second = nn.Linear(8, 8)

    def forward(self, x: Tensor, skip: bool = False) -> Tensor:
        x = self.norm(self.first(x)).relu()
        return x if skip else self.second(x)


@contextlib.contextmanager
def fresh_dynamo(**config: Any) -> Iterator[None]:
    torch._dynamo.reset()
    try:
        with torch._dynamo.config.patch(**config):
            yield
    finally:
        torch._dynamo.reset()


def compiled(wrap: Any, module: nn.Module, how: str, backend: Any, **keywords: Any) -> nn.Module:
    if how == "inside":
        return wrap(torch.compile(module, backend=backend), **keywords)
    model = wrap(module, **keywords)
    if how == "around":
        return torch.compile(model, backend=backend)
    model.compile(backend=backend)
    return model


def train(wrap: Any, rank: int, how: str, name: str, **keywords: Any) -> list[Any]:
    """Losses, gradients and numbers of graphs, with other shapes and no_sync among the steps."""
    history: list[Any] = []
    with fresh_dynamo():
        backend = CompileCounterWithBackend(name)
        module = Small()
        model = compiled(wrap, module, how, backend, **keywords)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        for step in range(10):
            sync = step % 4 != 2
            with contextlib.nullcontext() if sync else model.no_sync():
                loss = model(batch(step, rank, (4 + step % 2, 8))).square().mean()
                loss.backward()
            history += [loss.detach(), *(p.grad.clone() for p in module.parameters())]
            history.append(torch.tensor(backend.frame_count))
            if sync:
                optimizer.step()
                optimizer.zero_grad()
    assert backend.frame_count > 0
    return history


def check_training(rank: int, how: str, name: str, keywords: dict[str, Any]) -> None:
    ours = train(fusedddp.wrap, rank, how, name, **keywords)
    theirs = train(DistributedDataParallel, rank, how, name, **keywords)
    for position, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        assert torch.equal(a, b), (position, a, b)


@pytest.mark.parametrize("how", ["around", "inside", "in_place"])
@pytest.mark.parametrize("name", ["eager", "aot_eager"])
def test_training_is_bitwise_ddps(two_ranks: Ranks, how: str, name: str) -> None:
    """So are the numbers of compiled graphs: no state of ours makes dynamo compile again."""
    two_ranks.run(check_training, how, name, {})


def test_training_with_a_static_graph_is_bitwise_ddps(two_ranks: Ranks) -> None:
    two_ranks.run(check_training, "around", "aot_eager", {"static_graph": True})


def check_unused(rank: int, how: str) -> None:
    with fresh_dynamo():
        module = Small()
        model = compiled(fusedddp.wrap, module, how, "aot_eager", find_unused_parameters=True)
        for step in range(6):
            for p in module.parameters():
                p.grad = None

            def losses(alone: nn.Module, r: int, step: int = step) -> Tensor:
                return alone(batch(step, r, (4, 8)), step % 3 == 1).square().mean()

            want = mean_of_ranks(copy.deepcopy(module), losses)
            losses(model, rank).backward()
            assert_gradients(module, want)


@pytest.mark.parametrize("how", ["around", "inside"])
def test_unused_parameters(two_ranks: Ranks, how: str) -> None:
    two_ranks.run(check_unused, how)


def count_graphs(wrap: Any, how: str, optimize: bool) -> list[int]:
    with fresh_dynamo(optimize_ddp=optimize):
        backend = CompileCounterWithBackend("eager")
        model = compiled(wrap, Deep(), how, backend, bucket_cap_mb=1)
        for step in range(3):
            model(batch(step, 0, (2, WIDTH))).sum().backward()
        return [len(graph.graph.nodes) for graph in backend.graphs]


def check_splits(rank: int, how: str) -> None:
    ours = count_graphs(fusedddp.wrap, how, True)
    assert len(ours) == 4
    assert ours == count_graphs(DistributedDataParallel, how, True)
    assert len(count_graphs(fusedddp.wrap, how, False)) == 1


@pytest.mark.parametrize("how", ["around", "inside", "in_place"])
def test_graphs_are_split_where_buckets_end(two_ranks: Ranks, how: str) -> None:
    two_ranks.run(check_splits, how)


def record_backward() -> list[str]:
    """What happens in the third compiled backward, in order."""
    events: list[str] = []
    launch = Collective.launch

    def recording_launch(self: Collective, *args: Any) -> Any:
        events.append("launch")
        return launch(self, *args)

    with fresh_dynamo():
        module = Deep()
        model = torch.compile(fusedddp.wrap(module, bucket_cap_mb=1), backend="aot_eager")
        for step in range(2):
            model(batch(step, 0, (2, WIDTH))).sum().backward()
        assert len(model.reducer.buckets) > len(module.layers)  # one of biases
        handles = [
            layer.weight.register_hook(lambda _, i=i: events.append(f"gradient {i}"))
            for i, layer in enumerate(module.layers)
        ]
        Collective.launch = recording_launch  # type: ignore[method-assign]
        try:
            model(batch(2, 0, (2, WIDTH))).sum().backward()
        finally:
            Collective.launch = launch  # type: ignore[method-assign]
            for handle in handles:
                handle.remove()
    return events


def check_overlap(rank: int) -> None:
    events = record_backward()
    assert events.index("launch") < events.index("gradient 1"), events
    assert events.count("launch") > 4


def test_buckets_leave_between_the_graphs(two_ranks: Ranks) -> None:
    two_ranks.run(check_overlap)


def run_steps(
    wrap: Any, rank: int, compiles: Any, *, by_hand: bool = False, steps_inside: bool = True
) -> list[Tensor]:
    history = []
    module = Small()
    model = wrap(module)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)

    @compiles
    def run_step(x: Tensor) -> Tensor:
        loss = model(x).square().mean()
        loss.backward()
        if by_hand:
            fusedddp.all_reduce_gradients(model)
        if steps_inside:
            optimizer.step()
        return loss

    for step in range(5):
        optimizer.zero_grad()
        loss = run_step(batch(step, rank, (4, 8)))
        if not steps_inside:
            optimizer.step()
        history += [loss.detach(), *(p.detach().clone() for p in module.parameters())]
    return history


def check_whole_step(rank: int) -> None:
    theirs = run_steps(DistributedDataParallel, rank, lambda fn: fn)
    with fresh_dynamo(error_on_recompile=True):
        ours = run_steps(fusedddp.wrap, rank, torch.compile(backend="eager"))
    with fresh_dynamo():
        by_hand = run_steps(
            lambda module: module,
            rank,
            torch.compile(backend="eager"),
            by_hand=True,
            steps_inside=False,
        )
    for position, (a, b, c) in enumerate(zip(ours, theirs, by_hand, strict=True)):
        assert torch.equal(a, b), ("wrap", position, a, b)
        assert torch.equal(c, b), ("manual mode", position, c, b)


def test_a_compiled_step_with_its_backward_and_optimizer(two_ranks: Ranks) -> None:
    two_ranks.run(check_whole_step)


def check_refusals(rank: int) -> None:
    module = Small()
    model = fusedddp.wrap(module)
    with fresh_dynamo(compiled_autograd=True):

        @torch.compile(backend="eager")
        def run_step(x: Tensor) -> None:
            model(x).sum().backward()

        with pytest.raises(RuntimeError, match="Compiled autograd is not compatible"):
            run_step(batch(0, rank, (4, 8)))
    module.zero_grad()
    with fresh_dynamo():  # the same wrapper goes on
        want = mean_of_ranks(copy.deepcopy(module), lambda m, r: m(batch(1, r, (4, 8))).sum())
        torch.compile(model, backend="eager")(batch(1, rank, (4, 8))).sum().backward()
        assert_gradients(module, want)


def test_compiled_autograd_is_refused(two_ranks: Ranks) -> None:
    """DDP refuses it too, unless its reducer is told to be made of functional collectives."""
    two_ranks.run(check_refusals)


def check_modes(rank: int) -> None:
    want = mean_of_ranks(Small(), lambda m, r: m(batch(0, r, (4, 8))).square().sum())
    modes = ["ddp_optimizer", "no_optimization", "python_reducer"]
    modes.append("python_reducer_without_compiled_forward")
    for mode in modes:
        with fresh_dynamo(optimize_ddp=mode):
            model = torch.compile(fusedddp.wrap(Small()), backend="aot_eager")
            model(batch(0, rank, (4, 8))).square().sum().backward()
            assert_gradients(model.module, want)


def test_modes_of_optimize_ddp_that_are_not_about_us(two_ranks: Ranks) -> None:
    two_ranks.run(check_modes)


def check_evaluation(rank: int) -> None:
    with fresh_dynamo():
        module = Small()
        backend = CompileCounterWithBackend("eager")
        model = torch.compile(fusedddp.wrap(module), backend=backend)
        for step in range(4):
            model.train()
            model(batch(step, rank, (4, 8))).sum().backward()
            model.eval()
            with torch.no_grad():
                x = batch(step, rank, (3, 8))
                assert torch.equal(model(x), copy.deepcopy(module).eval()(x))
        assert backend.frame_count == 2
        # Inside, where there is nothing of ours, a whole graph is possible.
        whole = fusedddp.wrap(torch.compile(Small(), backend="eager", fullgraph=True))
        whole(batch(0, rank, (4, 8))).sum().backward()


def test_evaluation_between_compiled_steps(two_ranks: Ranks) -> None:
    two_ranks.run(check_evaluation)


def check_inductor(rank: int) -> None:
    # One thread, or each rank starts processes that compile for it.
    with fresh_dynamo(), torch._inductor.config.patch(compile_threads=1):
        torch.manual_seed(0)
        module = nn.Linear(8, 8)
        model = fusedddp.wrap(torch.compile(module, backend="inductor"))
        for step in range(3):
            module.zero_grad()
            want = mean_of_ranks(
                copy.deepcopy(module), lambda m, r, s=step: m(batch(s, r, (4, 8))).square().mean()
            )
            model(batch(step, rank, (4, 8))).square().mean().backward()
            assert_gradients(module, want)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler on CPU")
def test_inductor(two_ranks: Ranks) -> None:
    two_ranks.run(check_inductor, deadline_s=110)
