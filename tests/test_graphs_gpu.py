"""Captured steps on a GPU: what the stand-in for captures cannot show.

Memory, streams, other threads, NCCL, and torch's own graphs around or inside of a wrapped model.
None of this has an equivalent on CPU; the rest of the tests of graphs runs on both.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fusedddp
from tests.graph_cases import batches, captures_on, check_same, run, training
from tests.ranks import Ranks
from tests.test_graphs import check_parity

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]


# -- memory --------------------------------------------------------------------------------------


def statistic(name: str) -> int:
    torch.cuda.synchronize()
    value: int = torch.cuda.memory_stats()[f"{name}.all.current"]
    return value


def check_replays(rank: int) -> None:
    with captures_on("cuda") as group:
        case = training("clipping", "cuda", group)
        xs = batches(2, rank, "cuda")
        with fusedddp.make_graphed_step(case.step, (xs[0],)) as step:
            step(xs[0])
            before = [statistic(n) for n in ("allocated_bytes", "reserved_bytes", "allocation")]
            for _ in range(1000):
                step(xs[1])
            after = [statistic(n) for n in ("allocated_bytes", "reserved_bytes", "allocation")]
            assert after == before


def test_replays_take_no_memory(one_rank: Ranks) -> None:
    one_rank.run(check_replays)


def large_step(group: Any) -> Callable[[Tensor], Tensor]:
    model = fusedddp.wrap(
        nn.Sequential(nn.Linear(256, 4096), nn.ReLU(), nn.Linear(4096, 16)).cuda(),
        process_group=group,
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def step(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    return step


def check_shapes(rank: int) -> None:
    """Five shapes: graphs share a pool, so the memory is that of the largest and some more."""
    rows = (8192, 6144, 4096, 2048, 1024)
    with captures_on("cuda") as group:
        grown = []
        for shapes in (rows[:1], rows):
            step = large_step(group)
            torch.cuda.empty_cache()
            before = statistic("reserved_bytes")
            with fusedddp.make_graphed_step(step, (torch.randn(rows[0], 256).cuda(),)) as graphed:
                for count in shapes:
                    assert graphed(torch.randn(count, 256).cuda()).isfinite()
                assert graphed.num_graphs == len(shapes)
                torch.cuda.empty_cache()
                grown.append(statistic("reserved_bytes") - before)
            del graphed
        assert grown[1] < 1.5 * grown[0], grown


def test_graphs_of_several_shapes_share_memory(one_rank: Ranks) -> None:
    one_rank.run(check_shapes)


def check_closed(rank: int) -> None:
    with captures_on("cuda") as group:
        step = large_step(group)
        x = torch.randn(4096, 256).cuda()
        before = None
        for _ in range(4):
            with fusedddp.make_graphed_step(step, (x,)) as graphed:
                graphed(x)
            del graphed
            torch.cuda.empty_cache()
            found = statistic("reserved_bytes")
            assert before is None or found <= before, (before, found)
            before = found


def test_closed_steps_give_their_memory_back(one_rank: Ranks) -> None:
    one_rank.run(check_closed)


# -- other threads and streams -------------------------------------------------------------------


@contextlib.contextmanager
def pinning() -> Iterator[None]:
    """Another thread pins memory all the time, as a DataLoader does."""
    done = threading.Event()

    def pins() -> None:
        size = 1 << 12
        while not done.is_set():
            torch.empty(size).pin_memory()
            size = size * 2 if size < 1 << 24 else 1 << 12

    thread = threading.Thread(target=pins)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def check_pinning(rank: int) -> None:
    with captures_on("cuda") as group:
        eager, case = training("views", "cuda", group), training("views", "cuda", group)
        xs = batches(8, rank, "cuda")
        loader = torch.utils.data.DataLoader(
            [x.cpu() for x in xs], batch_size=None, pin_memory=True, num_workers=1
        )
        with pinning(), fusedddp.make_graphed_step(case.step, (xs[0],)) as step:
            for x in loader:
                x = x.to("cuda", non_blocking=True)
                assert step(x).tolist() == eager.step(x).tolist()
        check_same(case.state(), eager.state())


def test_captures_while_a_loader_pins_memory(one_rank: Ranks) -> None:
    one_rank.run(check_pinning)


def check_after_collectives(rank: int) -> None:
    """The watchdog of NCCL asks for the events of earlier collectives, also during a capture."""
    with captures_on("cuda") as group:
        case = training("views", "cuda", group)
        xs = batches(2, rank, "cuda")
        for _ in range(50):
            for _ in range(5):
                dist.all_reduce(torch.ones(1000, device="cuda"), group=group)
            with fusedddp.make_graphed_step(case.step, (xs[0],), warmup=1) as step:
                assert step(xs[0]).isfinite()


@pytest.mark.timeout(120)
def test_captures_right_after_collectives(one_rank: Ranks) -> None:
    one_rank.run(check_after_collectives, deadline_s=100)


def check_streams(rank: int) -> None:
    """Wrapped on one stream, captured on another, called on two, and trained eagerly on a third."""
    with captures_on("cuda") as group, warnings.catch_warnings():
        warnings.simplefilter("error")
        eager = training("own gradients", "cuda", group)
        streams = [torch.cuda.Stream() for _ in range(3)]
        with torch.cuda.stream(streams[0]):
            case = training("own gradients", "cuda", group)
        torch.cuda.synchronize()
        xs = batches(12, rank, "cuda")
        losses, previous = [], torch.cuda.current_stream()
        with fusedddp.make_graphed_step(case.step, (xs[0],)) as step:
            for index, x in enumerate(xs):
                stream = streams[index % 3]
                stream.wait_stream(previous)
                with torch.cuda.stream(stream):
                    function = case.step if index % 3 == 2 else step
                    losses.append(function(x))
                previous = stream
            torch.cuda.synchronize()
        assert [v.tolist() for v in losses] == [eager.step(x).tolist() for x in xs]


def test_streams(one_rank: Ranks) -> None:
    one_rank.run(check_streams)


# -- NCCL ----------------------------------------------------------------------------------------


def check_new_group(rank: int) -> None:
    """The first use of a group is a graphed step; the group ends while the step is open."""
    xs = batches(3, rank, "cuda")
    group = dist.new_group(backend="nccl")
    case = training("views", "cuda", group)
    step = fusedddp.make_graphed_step(case.step, (xs[0],), warmup=1, enabled=True)
    found = [step(x).tolist() for x in xs]
    with captures_on("cuda") as other:
        eager = training("views", "cuda", other)
        assert found == [eager.step(x).tolist() for x in xs]
    dist.destroy_process_group(group)
    with pytest.raises(RuntimeError, match="that it was destroyed"):
        step(xs[0])


def test_a_group_that_is_new_and_ends_early(one_rank: Ranks) -> None:
    one_rank.run(check_new_group)


def check_verbose(rank: int) -> None:
    with captures_on("cuda") as group:
        case = training("clipping", "cuda", group)
        (x,) = batches(1, rank, "cuda")
        logger = logging.getLogger("fusedddp")
        logger.setLevel(logging.DEBUG)
        dist.set_debug_level(dist.DebugLevel.DETAIL)
        try:
            with fusedddp.make_graphed_step(case.step, (x,), enabled=True) as step:
                assert step(x).isfinite()
            case.step(x)
            torch.cuda.set_sync_debug_mode("error")
            case.step(x)  # nothing in it waits for the device
        finally:
            torch.cuda.set_sync_debug_mode("default")
            dist.set_debug_level(dist.DebugLevel.OFF)
            logger.setLevel(logging.NOTSET)


def test_with_all_diagnostics_on(one_rank: Ranks) -> None:
    one_rank.run(check_verbose)


def check_shared_gpu(rank: int, name: str) -> None:
    os.environ["NCCL_MULTI_RANK_GPU_ENABLE"] = "1"  # before the first communicator
    check_parity(rank, "cuda", name)


@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.nccl.version() < (2, 30),
    reason="NCCL before 2.30 refuses two ranks on one GPU",
)
@pytest.mark.parametrize("name", ["views", "own gradients", "buffers", "accumulation"])
def test_two_ranks_on_one_gpu(two_ranks: Ranks, name: str) -> None:
    two_ranks.run(check_shared_gpu, name)


# -- graphs of torch -----------------------------------------------------------------------------


def check_sections(rank: int) -> None:
    with captures_on("cuda") as group:
        xs = batches(10, rank, "cuda")
        results = []
        for is_graphed, views in ((False, True), (True, True), (True, False)):
            torch.manual_seed(0)
            section: Any = nn.Sequential(nn.Linear(20, 20), nn.Tanh()).cuda()
            head = nn.Linear(20, 5).cuda()
            if is_graphed:
                section = torch.cuda.make_graphed_callables(section, (xs[0],))
            model = fusedddp.wrap(
                nn.Sequential(section, head), process_group=group, gradient_as_bucket_view=views
            )
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            losses = []
            for x in xs:
                optimizer.zero_grad()
                for factor in (1, 2, 3):
                    with model.no_sync():
                        model(factor * x).square().mean().backward()
                for _ in range(2):  # the second adds to what was reduced
                    loss = model(x).square().mean()
                    loss.backward()
                optimizer.step()
                losses.append(loss.item())
            results.append(losses)
        assert results[0] == results[1] == results[2]


def test_graphed_sections_in_a_wrapped_model(one_rank: Ranks) -> None:
    one_rank.run(check_sections)


def check_reduce_overhead(rank: int) -> None:
    """torch.compile captures graphs of its own; training and evaluation take turns."""
    with captures_on("cuda") as group:
        xs = batches(40, rank, "cuda")
        results = []
        for mode in (None, "reduce-overhead"):
            torch.manual_seed(0)
            model: Any = fusedddp.wrap(
                nn.Sequential(nn.Linear(20, 64), nn.Tanh(), nn.Linear(64, 5)).cuda(),
                process_group=group,
            )
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            forward = torch.compile(model, mode=mode) if mode else torch.compile(model)
            losses = []
            for index, x in enumerate(xs):
                if index % 8 == 7:
                    with torch.no_grad():
                        losses.append(forward(x).square().mean().item())
                    continue
                optimizer.zero_grad()
                loss = forward(x).square().mean()
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
            results.append(losses)
        assert results[0] == results[1]


@pytest.mark.timeout(120)
def test_compiled_models_with_graphs_of_their_own(one_rank: Ranks) -> None:
    one_rank.run(check_reduce_overhead, deadline_s=100)


def check_compiled_step(rank: int) -> None:
    """A compiled model in a captured step."""
    with captures_on("cuda") as group:
        eager, case = training("views", "cuda", group), training("views", "cuda", group)
        for each in (eager, case):
            each.model.module.body = torch.compile(each.model.module.body)
        xs = batches(20, rank, "cuda")
        with fusedddp.make_graphed_step(case.step, (xs[0],), enabled=True) as step:
            found = run(case, step, xs)
        expected = run(eager, eager.step, xs)
        assert [v.tolist() for v in found] == [v.tolist() for v in expected]


@pytest.mark.timeout(120)
def test_a_compiled_model_in_a_captured_step(one_rank: Ranks) -> None:
    one_rank.run(check_compiled_step, deadline_s=100)
