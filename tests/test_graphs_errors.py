"""Captures that fail say why, on every rank, and leave everything as it was."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fusedddp
from fusedddp.graphs.backend import BACKENDS
from tests.graph_cases import Training, batches, captures_on, check_same, training
from tests.models import Branches
from tests.ranks import Ranks

_Run = Callable[..., None]


@pytest.fixture
def on_rank(one_rank: Ranks, device: str) -> _Run:
    return lambda fn, *args: one_rank.run(fn, device, *args)


def check_errors(rank: int, device: str) -> None:
    with captures_on(device) as group:
        case = training("dropout", device, group)
        eager = training("dropout", device, group)
        xs = batches(3, rank, device)
        before = case.state()

        def reads(x: Tensor) -> Tensor:
            loss = case.step(x)
            if loss.item() > 1e9:
                raise ValueError
            return loss

        def selects(x: Tensor) -> Tensor:
            return case.step(x[x[:, 0] > 0])

        def in_forward(x: Tensor) -> Tensor:
            out = case.model(x)
            return out[out.isnan()].sum()

        for step, text in (
            (
                reads,
                r"test_graphs_errors.py:\d+: `if loss.item\(\) > 1e9:` reads a value on the host",
            ),
            (selects, r"`return case.step\(x\[x\[:, 0\] > 0\]\)`"),
            (in_forward, r"`return out\[out.isnan\(\)\].sum\(\)`"),
        ):
            with pytest.raises(RuntimeError, match=text):
                fusedddp.make_graphed_step(step, (xs[0],))
            after = case.state()
            check_same({k: after[k] for k in before}, before)
        results = []
        for training_step in (case.step, eager.step):  # and training goes on
            torch.manual_seed(2)
            results.append([training_step(x).tolist() for x in xs])
        assert results[0] == results[1]
        with fusedddp.make_graphed_step(case.step, (xs[0],)) as step:
            torch.manual_seed(2)
            found = step(xs[0]).tolist()
            torch.manual_seed(2)
            assert found == eager.step(xs[0]).tolist()


def test_errors_in_a_capture_say_whose_line(on_rank: _Run) -> None:
    on_rank(check_errors)


def check_rank_fails(rank: int, when: str) -> None:
    with captures_on("cpu"):
        case = training("views", "cpu", None)
        eager = training("views", "cpu", None)
        xs = batches(4, rank, "cpu")
        calls = 0

        def step(x: Tensor) -> Tensor:
            nonlocal calls
            calls += 1
            captures = calls == 5  # a rehearsal, two steps of warm-up and the probe come first
            if rank == 1 and when == "rehearsal" and calls == 1:
                raise ValueError("no data")
            if rank == 1 and when == "warm-up" and calls == 3:
                raise ValueError("no data")
            loss = case.model(x).square().mean()
            if rank == 1 and when == "capture" and captures:
                loss.item()
            loss.backward()
            if rank == 1 and when == "optimizer" and captures:
                loss.item()
            case.optimizer.step()
            return loss

        is_early = when in ("rehearsal", "warm-up")
        kind = ValueError if rank == 1 and is_early else RuntimeError
        text = "no data" if is_early else r"loss.item\(\)"
        if rank == 0:
            text = "rank 1 failed, so no rank can go on. .*" + text
        with pytest.raises(kind, match=text):
            fusedddp.make_graphed_step(step, (xs[0],))
        for x in xs:
            assert case.step(x).tolist() == eager.step(x).tolist()
        check_same(case.state(), eager.state())


@pytest.mark.parametrize("when", ["rehearsal", "warm-up", "capture", "optimizer"])
def test_a_rank_that_fails_makes_all_fail(two_ranks: Ranks, when: str) -> None:
    two_ranks.run(check_rank_fails, when)


def check_disagreement(rank: int) -> None:
    with captures_on("cpu"):
        case = training("views", "cpu", None)
        (x,) = batches(1, rank, "cpu")
        case.model.train(rank == 0)
        with pytest.raises(RuntimeError, match="expected the same steps to capture on all ranks"):
            fusedddp.make_graphed_step(case.step, (x,), model=case.model)


def test_ranks_agree_on_what_they_capture(two_ranks: Ranks) -> None:
    two_ranks.run(check_disagreement)


def check_used_set(rank: int, device: str) -> None:
    with captures_on(device) as group:
        model = fusedddp.wrap(
            Branches().to(device), process_group=group, find_unused_parameters=True
        )
        x = torch.ones(3, device=device)
        calls = 0

        def changing(x: Tensor) -> Tensor:
            nonlocal calls
            calls += 1
            return step(x, [0, 1] if calls < 5 else [0])

        def step(x: Tensor, which: list[int]) -> Tensor:
            loss: Tensor = model(x, which)
            loss.backward()
            return loss

        with pytest.raises(RuntimeError, match=r"a gradient of w.1 in only one of them"):
            fusedddp.make_graphed_step(changing, (x,))
        assert step(x, [0, 1, 2]).tolist() == 9


def check_sparse(rank: int, device: str) -> None:
    with captures_on(device) as group:
        net = nn.EmbeddingBag(9, 3, sparse=True).to(device)
        model = fusedddp.wrap(net, process_group=group)
        rows = torch.tensor([[1, 2, 2]], device=device)

        def step(rows: Tensor) -> None:
            model(rows).sum().backward()

        with pytest.raises(
            RuntimeError, match=r"expected dense gradients while capturing, .*weight"
        ):
            fusedddp.make_graphed_step(step, (rows,))
        step(rows)
        assert model.module.weight.grad.is_sparse


def test_sparse_gradients_cannot_be_captured(on_rank: _Run) -> None:
    on_rank(check_sparse)


def check_unfrozen(rank: int, device: str) -> None:
    with captures_on(device) as group:
        case = training("views", device, group)
        (x,) = batches(1, rank, device)
        backend = BACKENDS[device]()
        for _ in range(2):
            case.step(x)
        case.model.module.spare.requires_grad_(True)
        with pytest.raises(RuntimeError, match="Run a step eagerly after freezing, unfreezing"):
            backend.capture(lambda: case.step(x), None)


def test_unfreezing_before_a_capture(on_rank: _Run) -> None:
    on_rank(check_unfrozen)


def test_parameters_that_are_used_must_not_change(on_rank: _Run) -> None:
    on_rank(check_used_set)


class Holder:
    def __init__(self, x: Tensor) -> None:
        self.x = x


def check_arguments(rank: int, device: str) -> None:
    with captures_on(device) as group:
        case = training("views", device, group)
        (x,) = batches(1, rank, device)

        def held(holder: Holder) -> Tensor:
            return case.step(holder.x)

        with pytest.raises(TypeError, match="found Holder as leaf 0: what is in it"):
            fusedddp.make_graphed_step(held, (Holder(x),))

        def scaled(x: Tensor, factor: float) -> Tensor:
            return case.step(x) * factor

        with fusedddp.make_graphed_step(scaled, (x, float("nan"))) as step:
            before = step.num_graphs
            for _ in range(3):
                step(x, float("nan"))
            assert step.num_graphs == before  # nan is not equal to itself

        hooked = training("comm hook", device, group)
        with pytest.raises(ValueError, match="a plain average, found two, and allreduce_hook"):
            fusedddp.make_graphed_step(
                (lambda x: hooked.model(x).sum().backward(), hooked.optimizer.step),
                (x,),
                model=hooked.model,
            )


def test_arguments_that_would_be_frozen(on_rank: _Run) -> None:
    on_rank(check_arguments)


def test_a_learning_rate_that_is_elsewhere_is_found() -> None:
    from fusedddp.graphs.participants import Participants

    participants = Participants()
    param = nn.Parameter(torch.ones(1, device="meta"))
    participants.add_optimizer(torch.optim.SGD([param], lr=torch.tensor(0.1)))
    assert participants.find_elsewhere("meta") == "lr of SGD is a tensor on cpu"


def check_one_rank_fails_at_the_capture(rank: int) -> None:
    """All ranks lose their graphs, so that none replays while another captures anew."""
    with captures_on("cpu") as group:
        case = training("views", "cpu", group)
        xs = batches(2, rank, "cpu")
        runs, fails_at = [0], [-1]

        def step(x: Tensor) -> Tensor:
            runs[0] += 1
            if runs[0] == fails_at[0] and rank == 0:
                raise ArithmeticError("on this rank")
            return case.step(x)

        with fusedddp.make_graphed_step(step, (xs[0],), model=case.model) as graphed:
            graphed(xs[0])
            num_graphs = graphed.num_graphs
            # A rehearsal, two of warm-up, one that looks at gradients: the fifth is the capture.
            runs[0], fails_at[0] = 0, 5
            with pytest.raises((RuntimeError, ArithmeticError), match="on this rank"):
                graphed(xs[1][:3])
            assert runs[0] == 5 and graphed.num_graphs == 0
            fails_at[0] = -1
            results = [graphed(xs[0]), graphed(xs[1][:3]), graphed(xs[0])]
            assert graphed.num_graphs == num_graphs + 1
            assert all(result.isfinite() for result in results)


def test_one_rank_that_fails_at_the_capture(two_ranks: Ranks) -> None:
    two_ranks.run(check_one_rank_fails_at_the_capture)


def check_two_models(rank: int, kind: str, fails_at: int) -> None:
    """Rank 1 fails in some run of a step that reduces two models."""
    with captures_on("cpu"):
        torch.manual_seed(0)
        first, second = (fusedddp.wrap(nn.Linear(a, b)) for a, b in ((6, 5), (5, 2)))
        optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (first, second)]
        xs = batches(3, rank, "cpu")
        runs = 0

        def step(x: Tensor) -> Tensor:
            nonlocal runs
            runs += 1
            x = x[:, :6]
            for optimizer in optimizers:
                optimizer.zero_grad()
            if kind == "apart":  # as with GANs
                second(first(x).detach()).square().mean().backward()
            if rank == 1 and runs == fails_at:
                raise ValueError("no data")
            loss: Tensor = second(first(x)).square().mean()
            loss.backward()
            for optimizer in optimizers:
                optimizer.step()
            return loss.detach()

        text = r"no data" if rank == 1 else "rank 1 failed, so no rank can go on. .*no data"
        with pytest.raises((ValueError, RuntimeError), match=text):
            fusedddp.make_graphed_step(step, (xs[0],), model=[first, second])
        losses = [step(x) for x in xs]
        expected = [loss.clone() for loss in losses]
        for loss in expected:
            torch.distributed.all_reduce(loss)
        weight = second.module.weight.detach().clone()
        torch.distributed.broadcast(weight, 0)
        assert torch.equal(weight, second.module.weight)


@pytest.mark.parametrize("fails_at", range(1, 6))
@pytest.mark.parametrize("kind", ["together", "apart"])
def test_a_rank_that_fails_in_a_step_of_two_models(
    two_ranks: Ranks, kind: str, fails_at: int
) -> None:
    two_ranks.run(check_two_models, kind, fails_at)


def check_other_numbers_of_rounds(rank: int, kind: str, fails_at: int) -> None:
    """Steps with no backward, with two, and one whose model is not told and not reached."""
    with captures_on("cpu"):
        case, eager = training("views", "cpu", None), training("views", "cpu", None)
        xs = batches(3, rank, "cpu")
        runs = 0

        def step(x: Tensor) -> Tensor:
            nonlocal runs
            runs += 1
            if rank == 1 and runs == fails_at and kind != "two backwards":
                raise ValueError("no data")
            if kind == "forward":
                return case.model(x).sum().detach()
            if kind == "two backwards":
                case.model(x).sum().backward()
                if rank == 1 and runs == fails_at:
                    raise ValueError("no data")
            return case.step(x)

        with pytest.raises((ValueError, RuntimeError), match="no data"):
            fusedddp.make_graphed_step(step, (xs[0],))
        for x in xs:
            assert case.step(x).tolist() == eager.step(x).tolist()


@pytest.mark.parametrize("fails_at", [1, 2, 3])
@pytest.mark.parametrize("kind", ["forward", "two backwards", "not told"])
def test_a_rank_that_fails_in_steps_with_other_numbers_of_rounds(
    two_ranks: Ranks, kind: str, fails_at: int
) -> None:
    two_ranks.run(check_other_numbers_of_rounds, kind, fails_at)


def check_update_fails(rank: int, fails_at: int) -> None:
    with captures_on("cpu"):
        case = training("views", "cpu", None)
        (x,) = batches(1, rank, "cpu")
        runs = 0

        def backward(x: Tensor) -> Tensor:
            loss: Tensor = case.model(x).square().mean()
            loss.backward()
            return loss

        def update() -> None:
            nonlocal runs
            runs += 1
            if rank == 1 and runs == fails_at:
                raise ValueError("no data")
            case.optimizer.step()
            case.optimizer.zero_grad()

        step = fusedddp.make_graphed_step((backward, update), (x,), model=case.model)
        with pytest.raises((ValueError, RuntimeError), match="no data"):
            step(x)
        case.optimizer.zero_grad()
        assert step(x).isfinite()


@pytest.mark.parametrize("fails_at", [1, 2, 4])
def test_an_update_that_fails_on_one_rank(two_ranks: Ranks, fails_at: int) -> None:
    two_ranks.run(check_update_fails, fails_at)


def check_manual(rank: int) -> None:
    with captures_on("cpu"):
        model = nn.Linear(20, 5)

        def step(x: Tensor) -> Tensor:
            model.zero_grad()
            loss = model(x).sum()
            loss.backward()
            fusedddp.all_reduce_gradients(model)
            return loss.detach()

        (x,) = batches(1, rank, "cpu")
        (finding,) = fusedddp.check_capturable(step, x).findings
        assert "all_reduce_gradients compares on the host" in finding.message
        with pytest.raises(RuntimeError, match=r"no all_reduce_gradients .*\(backward, update"):
            fusedddp.make_graphed_step(step, (x,))
        step(x)


def test_manual_mode_is_refused(two_ranks: Ranks) -> None:
    two_ranks.run(check_manual)


class FailsInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, fails: bool) -> Tensor:
        ctx.fails = fails
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        if ctx.fails:
            raise ValueError("no data")
        return gradient, None


def check_places(rank: int, name: str, place: str, fails_at: int) -> None:
    """Rank 1 fails somewhere in a step with a micro-batch under no_sync; training goes on."""
    with captures_on("cpu"):
        case, eager = training(name, "cpu", None), training(name, "cpu", None)
        xs = batches(3, rank, "cpu")
        runs = [0, 0]

        def make(case: Training, index: int) -> Callable[[Tensor], Tensor]:
            def step(x: Tensor) -> Tensor:
                runs[index] += 1
                fails = rank == 1 and index == 0 and runs[0] == fails_at
                case.optimizer.zero_grad()
                if fails and place == "before":
                    raise ValueError("no data")
                with case.model.no_sync():
                    loss = case.model(x).square().mean()
                    if fails and place == "under no_sync":
                        raise ValueError("no data")
                    if name != "buffers":
                        loss.backward()
                x_in = FailsInBackward.apply((x + 1).requires_grad_(), fails and place == "inside")
                out = case.model(x_in)
                if name == "buffers":  # reaches a forward under no_sync and one that is reduced
                    out = out + case.model(x).sum()
                loss = FailsInBackward.apply(out, fails and place == "backward").square().mean()
                loss.backward()
                if fails and place == "after":
                    raise ValueError("no data")
                case.optimizer.step()
                return loss.detach()

            return step

        step, eager_step = make(case, 0), make(eager, 1)
        with pytest.raises((ValueError, RuntimeError), match="no data"):
            fusedddp.make_graphed_step(step, (xs[0],))
        case.model.reducer.check_finalized()
        assert not any(case.model.reducer.accumulated)
        for x in xs:
            assert step(x).tolist() == eager_step(x).tolist()
        with fusedddp.make_graphed_step(step, (xs[0],)) as graphed:
            for x in xs:
                assert graphed(x).tolist() == eager_step(x).tolist()


@pytest.mark.parametrize("fails_at", range(1, 6))
@pytest.mark.parametrize("place", ["before", "under no_sync", "backward", "inside", "after"])
@pytest.mark.parametrize("name", ["views", "buffers", "bf16 hook"])
def test_a_rank_that_fails_anywhere(two_ranks: Ranks, name: str, place: str, fails_at: int) -> None:
    two_ranks.run(check_places, name, place, fails_at)


def check_unfrozen_before(rank: int) -> None:
    """The buckets are laid out anew before a rank may fail, not in a forward that it lacks."""
    with captures_on("cpu"):
        case, eager = training("views", "cpu", None), training("views", "cpu", None)
        xs = batches(3, rank, "cpu")
        for each in (case, eager):
            weight = each.model.module.body[0].weight.requires_grad_(False)
            for x in xs:
                each.step(x)
            weight.requires_grad_(True)

        def step(x: Tensor) -> Tensor:
            if rank == 1:
                raise ValueError("no data")
            return case.step(x)

        with pytest.raises((ValueError, RuntimeError), match="no data"):
            fusedddp.make_graphed_step(step, (xs[0],), model=case.model)
        for x in xs:
            assert case.step(x).tolist() == eager.step(x).tolist()


def test_a_rank_that_fails_after_unfreezing(two_ranks: Ranks) -> None:
    two_ranks.run(check_unfrozen_before)
