"""Wrappers among others: several, nested, in groups, in pipelines; what they show of a module."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.pipelining.schedules import ScheduleInterleavedZeroBubble
from torch.nn.parallel import DistributedDataParallel

import fusedddp
from tests.expected import assert_gradients, mean_of_ranks
from tests.models import batch, gradients, mlp
from tests.ranks import Ranks


def data(step: int, rank: int) -> Tensor:
    return batch(step, rank, (8, 20))


# -- several wrappers ----------------------------------------------------------------------------


class Pair(nn.Module):
    def __init__(self, wrap_first: bool = False, wrap_second: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        first, second = nn.Linear(20, 6), nn.Linear(6, 3)
        self.first = fusedddp.wrap(first) if wrap_first else first
        self.second = fusedddp.wrap(second) if wrap_second else second

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).relu())


def check_nested(rank: int, outer: bool, views: bool) -> None:
    """Averaging an average changes nothing, so nested wrappers come to the same."""
    model: nn.Module = Pair(wrap_first=True, wrap_second=not outer)
    if outer:
        model = fusedddp.wrap(model, gradient_as_bucket_view=views)
    for step in range(4):
        model.zero_grad()
        alone = Pair()
        alone.load_state_dict({n.replace("module.", ""): v for n, v in model.state_dict().items()})
        want = mean_of_ranks(alone, lambda m, r, s=step: m(data(s, r)).square().sum())
        model(data(step, rank)).square().sum().backward()
        assert_gradients(alone, want_from(model, alone, want))
        with torch.no_grad():
            for p in model.parameters():
                p -= 0.01 * p.grad


def want_from(
    model: nn.Module, alone: nn.Module, want: dict[str, Tensor | None]
) -> dict[str, Tensor | None]:
    """Gives `alone` the gradients of a module that has wrappers inside."""
    for a, b in zip(alone.parameters(), model.parameters(), strict=True):
        a.grad = b.grad
    return want


@pytest.mark.parametrize("outer", [True, False], ids=["in_a_wrapper", "side_by_side"])
@pytest.mark.parametrize("views", [True, False], ids=["views", "own"])
def test_wrapped_submodules(two_ranks: Ranks, outer: bool, views: bool) -> None:
    two_ranks.run(check_nested, outer, views)


def check_wrapped_twice(rank: int) -> None:
    model = fusedddp.wrap(fusedddp.wrap(mlp()))
    bare = model.module.module
    for step in range(4):
        model.zero_grad()
        want = mean_of_ranks(copy.deepcopy(bare), lambda m, r, s=step: m(data(s, r)).square().sum())
        model(data(step, rank)).square().sum().backward()
        assert_gradients(bare, want)
    with pytest.raises(RuntimeError, match="one reducer for each parameter"):
        fusedddp.wrap(DistributedDataParallel(mlp()))
    with pytest.raises(RuntimeError, match="one reducer for each parameter"):
        DistributedDataParallel(fusedddp.wrap(mlp()))(data(0, rank))
    # As in DDP's own use of this, an inner wrapper may have parameters of its own.
    torch.manual_seed(0)
    mixed = nn.Sequential(nn.Linear(20, 5), DistributedDataParallel(nn.Linear(5, 2)))
    theirs = ["1.module.weight", "1.module.bias"]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(mixed, theirs)
    bare = nn.Sequential(copy.deepcopy(mixed[0]), copy.deepcopy(mixed[1].module))
    model = fusedddp.wrap(mixed)
    for step in range(3):
        model.zero_grad()
        want = mean_of_ranks(bare, lambda m, r, s=step: m(data(s, r)).square().sum())
        model(data(step, rank)).square().sum().backward()
        assert_gradients(bare, want_from(model, bare, want))


def test_wrapping_twice(two_ranks: Ranks) -> None:
    two_ranks.run(check_wrapped_twice)


def check_two_models(rank: int) -> None:
    """A generator and a discriminator, each with its optimizer; one is frozen for the other."""

    def models(wrap: Any) -> tuple[nn.Module, nn.Module]:
        torch.manual_seed(0)
        return wrap(nn.Linear(20, 20)), wrap(nn.Linear(20, 1))

    def train(wrap: Any) -> list[Tensor]:
        generator, critic = models(wrap)
        steps = [torch.optim.SGD(m.parameters(), lr=0.05) for m in (generator, critic)]
        history = []
        for step in range(5):
            steps[1].zero_grad()
            fake = generator(data(step, rank))
            (critic(fake.detach()).mean() - critic(data(50 + step, rank)).mean()).backward()
            steps[1].step()
            steps[0].zero_grad()
            for p in critic.parameters():
                p.requires_grad_(False)
            (-critic(fake).square().mean()).backward()
            for p in critic.parameters():
                p.requires_grad_(True)
            steps[0].step()
            history += [p.detach().clone() for m in (generator, critic) for p in m.parameters()]
        return history

    ours = train(fusedddp.wrap)
    theirs = train(DistributedDataParallel)
    for position, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        assert torch.equal(a, b), (position, a, b)


def test_two_models_in_one_step(two_ranks: Ranks) -> None:
    two_ranks.run(check_two_models)


# -- groups --------------------------------------------------------------------------------------


def check_alone(rank: int) -> None:
    groups = [dist.new_group([r]) for r in range(2)]
    model = fusedddp.wrap(mlp(), process_group=groups[rank])
    for step in range(3):
        model.zero_grad()
        alone = copy.deepcopy(model.module)
        alone(data(step, rank)).square().sum().backward()
        model(data(step, rank)).square().sum().backward()
        assert_gradients(model, gradients(alone), exact=True)


def test_a_group_of_one(two_ranks: Ranks) -> None:
    two_ranks.run(check_alone)


def check_subgroups(rank: int) -> None:
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    model = fusedddp.wrap(mlp(), process_group=groups[rank // 2])
    for step in range(3):
        model.zero_grad()
        want = mean_of_ranks(model.module, lambda m, r, s=step: m(data(s, rank // 2 * 2 + r)).sum())
        model(data(step, rank)).sum().backward()
        assert_gradients(model, want)


class Half(nn.Module):
    def __init__(self, index: int) -> None:
        super().__init__()
        torch.manual_seed(index)
        self.layer = nn.Linear(4, 4)
        self.layer2 = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer2(self.layer(x).tanh())


def loss_of(out: Tensor, target: Tensor) -> Tensor:
    return (out - target).square().mean()


def microbatched(num: int, replica: int, step: int) -> tuple[Tensor, Tensor]:
    return batch(step, replica, (2 * num, 4)), batch(100 + step, replica, (2 * num, 4))


def check_pipeline(rank: int, kind: str) -> None:
    """Two stages, two replicas of each: ranks 0 and 2 have the first stage, 1 and 3 the second."""
    num = 4
    replica, index = divmod(rank, 2)
    pipelines = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    replicas = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    model = fusedddp.wrap(Half(index), process_group=replicas[index])
    stage = PipelineStage(model, index, 2, torch.device("cpu"), group=pipelines[replica])
    schedule: Any
    if kind == "gpipe":
        schedule = ScheduleGPipe(stage, num, loss_fn=loss_of)
    elif kind == "1f1b":
        schedule = Schedule1F1B(stage, num, loss_fn=loss_of)
    else:
        schedule = ScheduleInterleavedZeroBubble([stage], num, loss_fn=loss_of)
    for step in range(3):
        model.zero_grad()
        x, target = microbatched(num, replica, step)
        if index == 0:
            schedule.step(x)
        else:
            schedule.step(target=target)
        halves = nn.Sequential(Half(0), Half(1))

        def losses(m: nn.Module, r: int, step: int = step) -> Tensor:
            x, target = microbatched(num, r, step)
            chunks = zip(x.chunk(num), target.chunk(num), strict=True)
            return sum(loss_of(m(a), b) for a, b in chunks) / num  # type: ignore[return-value]

        want = mean_of_ranks(halves, losses)
        prefix = f"{index}."
        want = {n.removeprefix(prefix): g for n, g in want.items() if n.startswith(prefix)}
        if kind == "zero_bubble" and index == 1:
            if step == 0:
                with pytest.raises(RuntimeError, match="all_reduce_gradients"):
                    torch.optim.SGD(model.parameters(), lr=0.0).step()
            fusedddp.all_reduce_gradients(model, process_group=replicas[index])
        assert_gradients(model, want)


@pytest.fixture(scope="module")
def four_ranks() -> Any:
    ranks = Ranks(4)
    yield ranks
    ranks.close()


def test_two_groups_of_two(four_ranks: Ranks) -> None:
    four_ranks.run(check_subgroups)


@pytest.mark.parametrize("kind", ["gpipe", "1f1b", "zero_bubble"])
def test_replicated_pipelines(four_ranks: Ranks, kind: str) -> None:
    """Zero-bubble schedules assign gradients without a backward; DDP lets such replicas drift.

    We say so at the first step of the optimizer, and the manual mode reduces them.
    """
    four_ranks.run(check_pipeline, kind)


# -- what shows of the module --------------------------------------------------------------------


class Net(nn.Module):
    scale = 3.0
    device = "hidden by the wrapper"

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(20, 2)
        self.heads = nn.ModuleDict({"a": nn.Linear(2, 2)})

    def forward(self, x: Tensor) -> Tensor:
        return self.heads["a"](self.layer(x))

    def loss(self, x: Tensor) -> Tensor:
        return self(x).square().sum() * self.scale

    @property
    def width(self) -> int:
        return self.layer.out_features


def check_attributes(rank: int) -> None:
    model = fusedddp.wrap(Net())
    assert model.width == 2 and model.scale == 3.0 and model.layer is model.module.layer
    assert model.device == torch.device("cpu")  # as in DDP
    assert not hasattr(model, "nothing")
    with pytest.raises(AttributeError, match="neither FusedDDP nor the Net in it"):
        model.nothing  # noqa: B018
    assert getattr(model, "nothing", 5) == 5
    model.note = 1  # on the wrapper, as in DDP
    assert not hasattr(model.module, "note")
    model.module.note = 2
    assert model.note == 1
    assert isinstance(model, DistributedDataParallel)
    assert type(model.module) is Net
    assert [n for n, _ in model.named_parameters()] == [
        f"module.{n}" for n in dict(model.module.named_parameters())
    ]
    for step in range(3):
        model.zero_grad()
        want = mean_of_ranks(model.module, lambda m, r, s=step: m.loss(data(s, r)))
        model.loss(data(step, rank)).backward()
        assert_gradients(model, want)


def test_attributes_and_methods_of_the_module(two_ranks: Ranks) -> None:
    two_ranks.run(check_attributes)


class Named(NamedTuple):
    main: Tensor
    extra: Tensor


@dataclasses.dataclass
class Record:
    main: Tensor
    extra: Tensor


class Custom:
    def __init__(self, main: Tensor, extra: Tensor) -> None:
        self.main = main
        self.extra = extra


class Two(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(20, 3), nn.Linear(20, 3)
        self.kind = kind

    def forward(self, x: Tensor) -> Any:
        a, b = self.first(x), self.second(x)
        makers: dict[str, Any] = {"named": Named, "record": Record, "custom": Custom}
        makers["nested"] = lambda a, b: {"out": [Named(a, b), None, "text"], "n": 3}
        return makers[self.kind](a, b)


def loss_from(model: nn.Module, x: Tensor, kind: str, uses_both: bool) -> Tensor:
    out = model(x)
    out = out["out"][0] if kind == "nested" else out
    loss = out.main.square().sum()
    return loss + out.extra.square().sum() if uses_both else loss


def check_outputs(rank: int, kind: str) -> None:
    model = fusedddp.wrap(Two(kind), find_unused_parameters=True)
    for step in range(4):
        model.zero_grad()
        # The second rank leaves one output out in some steps.
        want = mean_of_ranks(
            model.module,
            lambda m, r, s=step: loss_from(m, data(s, r), kind, not r or s % 2 == 0),
        )
        out = loss_from(model, data(step, rank), kind, not rank or step % 2 == 0)
        out.backward()
        assert_gradients(model, want)
    assert type(model(data(0, rank))) is type(model.module(data(0, rank)))


@pytest.mark.parametrize("kind", ["named", "record", "custom", "nested"])
def test_kinds_of_outputs(two_ranks: Ranks, kind: str) -> None:
    """Whatever holds them. DDP does not find the tensors in an object of a class of its own."""
    two_ranks.run(check_outputs, kind)


def check_sync_batchnorm(rank: int) -> None:
    """Can be wrapped and evaluated on CPU; torch's DDP refuses to wrap it there."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(20, 4), nn.BatchNorm1d(4))
    model = fusedddp.wrap(nn.SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(module)))
    model.eval()
    module.eval()
    want = mean_of_ranks(module, lambda m, r: m(data(0, r)).square().sum())
    model(data(0, rank)).square().sum().backward()
    assert_gradients(model, want)
    model.train()
    with pytest.raises(ValueError, match="SyncBatchNorm expected input tensor to be on"):
        model(data(0, rank))


def test_sync_batchnorm_on_cpu(two_ranks: Ranks) -> None:
    two_ranks.run(check_sync_batchnorm)
