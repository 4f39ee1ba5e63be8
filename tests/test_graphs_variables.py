"""Python variables that a step reads: a change of one is noticed, and what is no change is not."""

from __future__ import annotations

import collections
import dataclasses
import functools
import types
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fusedddp
from fusedddp.graphs.staleness import Bindings
from fusedddp.graphs.variables import find_variables
from tests.graph_cases import captures_on
from tests.ranks import Ranks

FACTOR = 2.0
TARGET = torch.ones(2)
BATCH: Any = (torch.ones(2), torch.ones(2))
settings = types.SimpleNamespace(factor=2.0, other=1)
step_count = 0
model = nn.Linear(2, 2)


@pytest.fixture(autouse=True)
def restored() -> Any:
    names = ("FACTOR", "TARGET", "BATCH", "settings", "step_count", "model")
    before = {name: globals()[name] for name in names}
    yield
    globals().update(before)
    vars(settings).update(factor=2.0, other=1)


def set_global(name: str, value: Any) -> Callable[[], None]:
    return lambda: globals().update({name: value})


def reads_global(x: Tensor) -> Tensor:
    return x * FACTOR


def reads_tensor(x: Tensor) -> Tensor:
    return x * TARGET


def reads_batch() -> Tensor:
    x, y = BATCH
    return x * y


def reads_attribute(x: Tensor) -> Tensor:
    return x * settings.factor


def calls_another(x: Tensor) -> Tensor:
    return reads_global(x) + 1


def reads_within(x: Tensor) -> Tensor:
    return sum((y * FACTOR for y in x), torch.zeros(()))


def uses_model(x: Tensor) -> Tensor:
    return model(x)


@torch.no_grad()
def decorated(x: Tensor) -> Tensor:
    return x * FACTOR


class Trainer:
    def __init__(self) -> None:
        self.factor = 2.0
        self.step = 0  # a counter, with the name of a method that is called in the step
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def train(self, x: Tensor) -> Tensor:
        self.optimizer.step()
        return self.scale(x)

    def scale(self, x: Tensor) -> Tensor:
        return x * self.factor

    def __call__(self, x: Tensor) -> Tensor:
        return self.train(x)


class Net(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * FACTOR


def find_change(
    step: Callable[..., Any], change: Callable[[], Any], modules: tuple[nn.Module, ...] = ()
) -> str | None:
    variables = find_variables(step, modules)
    assert all(each.find_change() is None for each in variables)
    change()
    return next(filter(None, (each.find_change() for each in variables)), None)


@pytest.mark.parametrize(
    ("step", "change", "said"),
    [
        (reads_global, set_global("FACTOR", 3.0), "FACTOR was 2.0 and is 3.0, which reads_global"),
        (reads_tensor, set_global("TARGET", torch.ones(2)), "TARGET was a Tensor and is a Tensor"),
        (reads_batch, set_global("BATCH", [torch.ones(2)] * 2), "BATCH was a tuple and is a list"),
        (reads_attribute, lambda: setattr(settings, "factor", 3.0), "factor was 2.0 and is 3.0"),
        (calls_another, set_global("FACTOR", 3.0), "FACTOR was 2.0 and is 3.0, which reads_global"),
        (reads_within, set_global("FACTOR", 3.0), "FACTOR was 2.0 and is 3.0, which reads_within"),
        (uses_model, set_global("model", nn.Linear(2, 2)), "model was a Linear and is a Linear"),
        (decorated, set_global("FACTOR", None), "FACTOR was 2.0 and is None, which decorated"),
        (decorated, lambda: globals().pop("FACTOR"), "FACTOR was 2.0 and is not there any more"),
        (
            functools.partial(functools.partial(calls_another)),
            set_global("FACTOR", 3.0),
            "FACTOR was 2.0",
        ),
    ],
)
def test_changes_are_found(step: Any, change: Callable[[], Any], said: str) -> None:
    found = find_change(step, change)
    assert found is not None and said in found


def test_closures_and_objects() -> None:
    factor, unassigned = 2.0, None
    del unassigned

    def closes_over(x: Tensor) -> Tensor:
        return x * factor if x.sum() else unassigned  # noqa: F821

    def change() -> None:
        nonlocal factor
        factor = 3.0

    said = "factor was 2.0 and is 3.0, which closes_over reads"
    assert find_change(closes_over, change) == said
    trainer = Trainer()
    said = "factor was 2.0 and is 3.0, which scale reads"
    for step in (trainer.train, trainer, lambda x: trainer.train(x)):
        trainer.factor = 2.0
        assert find_change(step, lambda: setattr(trainer, "factor", 3.0)) == said
    said = "FACTOR was 2.0 and is 3.0, which forward reads"
    assert find_change(lambda x: x, set_global("FACTOR", 3.0), (Net(), Net())) == said


@dataclasses.dataclass(frozen=True)
class Config:
    temp: float = 2.0
    weights: dict[str, float] = dataclasses.field(default_factory=lambda: {"aux": 2.0})


class Base:
    def compute(self, x: Tensor) -> Tensor:
        return x * self.temp


class Styles(Base):
    """Each method reads one thing, by one of the usual ways."""

    shared = 2.0

    def __init__(self) -> None:
        self.temp, self.epoch, self.cfg, self.pair = 2.0, 2, Config(), (torch.ones(2), 2.0)
        self.net = Masked()

    @property
    def scale(self) -> float:
        return 0.5 * self.epoch

    def by_class(self, x: Tensor) -> Tensor:
        return x * self.shared

    def by_property(self, x: Tensor) -> Tensor:
        return x * self.scale

    def by_super(self, x: Tensor) -> Tensor:
        return super().compute(x)

    def by_config(self, x: Tensor) -> Tensor:
        return x * self.cfg.temp

    def by_item(self, x: Tensor) -> Tensor:
        return x * self.cfg.weights["aux"] + self.pair[0]

    def by_module(self, x: Tensor) -> Tensor:
        return self.net(x)


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mask = torch.ones(2)

    def forward(self, x: Tensor) -> Tensor:
        return self.masked(x)

    def masked(self, x: Tensor) -> Tensor:
        return x * self.mask


@pytest.mark.parametrize(
    ("name", "change", "said"),
    [
        ("by_class", lambda t: setattr(t, "shared", 3.0), "shared was 2.0 and is 3.0"),
        ("by_class", lambda t: setattr(Styles, "shared", 3.0), "shared was 2.0 and is 3.0"),
        (
            "by_property",
            lambda t: setattr(t, "epoch", 3),
            "epoch was 2 and is 3, which scale reads",
        ),
        ("by_super", lambda t: setattr(t, "temp", 3.0), "temp was 2.0 and is 3.0, which compute"),
        (
            "by_config",
            lambda t: setattr(t, "cfg", dataclasses.replace(t.cfg, temp=3.0)),
            "cfg was a Config and is a Config, which by_config reads",
        ),
        ("by_item", lambda t: t.cfg.weights.update(aux=3.0), "aux was 2.0 and is 3.0"),
        ("by_item", lambda t: setattr(t, "pair", (torch.ones(2), 2.0)), "pair was a tuple and is"),
        ("by_module", lambda t: setattr(t.net, "mask", torch.ones(2)), "mask was a Tensor and is"),
    ],
)
def test_styles(
    monkeypatch: pytest.MonkeyPatch, name: str, change: Callable[[Any], None], said: str
) -> None:
    monkeypatch.setattr(Styles, "shared", 2.0)
    trainer = Styles()
    found = find_change(getattr(trainer, name), lambda: change(trainer), (trainer.net,))
    assert found is not None and found.startswith(said)


def test_arguments_that_are_settled() -> None:
    config = types.SimpleNamespace(temp=2.0)

    def step(config: Any, x: Tensor, other: Any = config) -> Tensor:
        return x * config.temp

    def with_default(x: Tensor, config: Any = config) -> Tensor:
        return x * config.temp

    def reassigned(x: Tensor, config: Any = config) -> Tensor:
        config = types.SimpleNamespace(temp=1.0)
        return x * config.temp

    for function, is_found in (
        (functools.partial(step, config), True),
        (with_default, True),
        (reassigned, False),
        (step, False),
    ):
        config.temp = 2.0
        found = find_change(function, lambda: setattr(config, "temp", 3.0))
        assert (found or "").startswith("temp was 2.0 and is 3.0, which ") == is_found


def test_what_is_the_same() -> None:
    same, number, nothing = {"aux": 2.0, "list": [1, (2,)]}, float("nan"), torch.float32

    def step(x: Tensor) -> Tensor:
        return (x * same["aux"] * number).to(nothing) if same else x

    def change() -> None:
        nonlocal same, number, nothing
        same, number, nothing = {"aux": 2.0, "list": [1, (2,)]}, float("nan"), torch.float32

    assert find_change(step, change) is None

    def really() -> None:
        nonlocal number
        number = 1.0

    assert find_change(step, really) == "number was nan and is 1.0, which step reads"
    flag: Any = 1

    def asks(x: Tensor) -> Tensor:
        return x if flag is True else -x

    def turn() -> None:
        nonlocal flag
        flag = True

    assert find_change(asks, turn) == "flag was 1 and is True, which asks reads"


class Loss:
    def __init__(self, weight: float) -> None:
        self.weight = weight

    def __call__(self, x: Tensor) -> Tensor:
        return x * self.weight

    def compute(self, x: Tensor) -> Tensor:
        return x * self.weight


class Swaps:
    def __init__(self) -> None:
        self.loss_fn: Any = torch.square
        self.criterion, self.weight = Loss(1.0), np.float32(1.0)
        self.table = collections.defaultdict(list)

    def by_function(self, x: Tensor) -> Tensor:
        return self.loss_fn(x)

    def by_object(self, x: Tensor) -> Tensor:
        return self.criterion(x)

    def by_method(self, x: Tensor) -> Tensor:
        return self.criterion.compute(x)

    def by_numpy(self, x: Tensor) -> Tensor:
        return x * float(self.weight)

    def by_default(self, x: Tensor) -> Tensor:
        return x * 2 if "scale" in self.table and self.table["scale"][0] else x


@pytest.mark.parametrize(
    ("name", "attribute", "value"),
    [
        ("by_function", "loss_fn", torch.abs),
        ("by_function", "loss_fn", lambda x: x),
        ("by_object", "criterion", Loss(1.0)),
        ("by_method", "criterion", Loss(1.0)),
        ("by_numpy", "weight", np.float32(2.0)),
    ],
)
def test_functions_and_objects_that_are_swapped(name: str, attribute: str, value: Any) -> None:
    trainer = Swaps()
    found = find_change(getattr(trainer, name), lambda: setattr(trainer, attribute, value))
    assert found is not None and found.startswith(f"{attribute} was ")


def test_the_search_runs_nothing_and_has_no_depth() -> None:
    trainer = Swaps()
    assert find_change(trainer.by_default, lambda: None) is None
    assert not trainer.table  # a defaultdict makes what is asked of it
    function: Callable[[Tensor], Tensor] = torch.square
    for _ in range(2000):

        def outer(x: Tensor, inner: Callable[[Tensor], Tensor] = function) -> Tensor:
            return inner(x) * FACTOR

        function = outer
    function.__wrapped__ = function  # type: ignore[attr-defined]
    said = "FACTOR was 2.0 and is 3.0, which outer reads"
    assert find_change(function, set_global("FACTOR", 3.0)) == said
    gone = weakref.proxy(Loss(1.0))
    assert find_change(lambda x: gone.compute(x) * FACTOR, lambda: None) is None
    scripted = nn.Sequential(torch.jit.script(nn.Linear(2, 2)), nn.Linear(2, 2))
    assert find_change(lambda x: scripted(x), lambda: None, tuple(scripted.modules())) is None
    patched = Net()
    patched.forward = lambda x: x * settings.factor  # type: ignore[method-assign]
    change = find_change(lambda x: x, lambda: setattr(settings, "factor", 3.0), (patched,))
    assert change == "factor was 2.0 and is 3.0, which <lambda> reads"
    numbers = list(range(70))

    def long(x: Tensor) -> Tensor:
        return x * sum(numbers)

    def longer() -> None:
        nonlocal numbers
        numbers = list(range(71))

    assert len(find_change(long, longer) or "") < 250


class Named:
    """Its step calls a method of another object that has the name of one of its own."""

    def __init__(self) -> None:
        self.position = 0
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(self) -> int:
        return self.position

    def train(self, x: Tensor) -> Tensor:
        self.optimizer.step()
        return x


def test_names_of_methods_are_not_mixed_up() -> None:
    trainer = Named()
    assert find_change(trainer.train, lambda: setattr(trainer, "position", 1)) is None
    assert find_change(trainer.step, lambda: setattr(trainer, "position", 2)) is not None


def test_what_is_not_read_or_did_not_change() -> None:
    trainer = Trainer()

    def changes() -> None:
        trainer.step += 1
        settings.other = 7
        globals().update(step_count=5, FACTOR=float("2"))

    for step in (trainer.train, reads_attribute, calls_another):
        assert find_change(step, changes) is None


def check_step(rank: int, device: str, is_on: bool) -> None:
    """A step that reads a tensor and a number from its closure, and counts."""
    count, factor, x = 0, 2.0, torch.ones(3, device=device)

    def step() -> Tensor:
        nonlocal count
        count += 1
        return x * factor

    if not is_on:
        before, Bindings.find_change = Bindings.find_change, lambda self: None
    try:
        with captures_on(device), fusedddp.make_graphed_step(step, ()) as graphed:
            num_runs = count
            found = [graphed().tolist() for _ in range(5)]
            assert count == num_runs  # not captured anew for what it counts itself
            factor, x = 3.0, torch.full((3,), 2.0, device=device)
            found.append(graphed().tolist())
            said = r"x was a Tensor .*, which step reads\. Move what is only for the log out"
            with pytest.raises(RuntimeError, match=said):
                for _ in range(9):
                    x = torch.ones(3, device=device)
                    graphed()
        assert found == [[2.0] * 3] * 5 + [[6.0] * 3]
    finally:
        if not is_on:
            Bindings.find_change = before


def test_a_step_that_reads_what_changes(one_rank: Ranks, device: str) -> None:
    one_rank.run(check_step, device, True)
    with pytest.raises(AssertionError):
        one_rank.run(check_step, device, False)


def check_replaced(rank: int, device: str) -> None:
    """Tensors that a step reads and replaces; and those that it only replaces."""
    x = torch.ones(3, device=device)
    trainer = types.SimpleNamespace(mean=torch.zeros(3, device=device), loss=None)
    hidden = torch.zeros(3, device=device)

    def averages(x: Tensor) -> Tensor:
        trainer.mean = 0.5 * trainer.mean + x
        return trainer.mean

    def recurs(x: Tensor) -> Tensor:
        nonlocal hidden
        hidden = hidden + x
        return hidden

    def keeps(x: Tensor) -> Tensor:
        trainer.loss = x.square().sum()
        return trainer.loss + 1

    def in_place(x: Tensor) -> Tensor:
        trainer.mean.copy_(0.5 * trainer.mean + x)
        return trainer.mean

    with captures_on(device):
        for step, name in ((averages, "mean"), (recurs, "hidden")):
            said = rf"that it reads {name} \(in {step.__name__}\) .* {name}\.copy_"
            with pytest.raises(RuntimeError, match=said):
                fusedddp.make_graphed_step(step, (x,))
        trainer.loss, trainer.mean = torch.zeros((), device=device), torch.zeros(3, device=device)
        for step, expected in ((keeps, [4, 13, 4]), (in_place, [[1] * 3, [2.5] * 3, [2.25] * 3])):
            with fusedddp.make_graphed_step(step, (x,)) as graphed:
                found = [graphed(factor * x).tolist() for factor in (1, 2, 1)]
            assert found == expected


def test_tensors_that_the_step_replaces(one_rank: Ranks, device: str) -> None:
    one_rank.run(check_replaced, device)


class Sets:
    """Sets attributes before it reads them, and keeps a cache of one entry."""

    def __init__(self) -> None:
        self.x: Any = None
        self.phase = "idle"
        self.mask: Any = None
        self.weight = nn.Parameter(torch.ones(3, 3))

    def step(self, x: Tensor) -> Tensor:
        self.x, self.phase, self.turned = x[:, :2], "train", self.weight.t()
        if self.mask is None or len(self.mask) != len(x):
            self.mask = torch.full((len(x), 1), 2.0, device=x.device)
        return self.compute()

    def compute(self) -> Tensor:
        return (self.x * self.mask * self.turned[0, 0]).sum() if self.phase == "train" else self.x


def check_sets(rank: int, device: str) -> None:
    with captures_on(device):
        trainer = Sets()
        trainer.weight = nn.Parameter(trainer.weight.detach().to(device))
        sizes = [torch.ones(count, 3, device=device) for count in (4, 5)]
        with fusedddp.make_graphed_step(trainer.step, (sizes[0],)) as graphed:
            for index in range(12):
                x = sizes[index % 2]
                trainer.x, trainer.phase = None, "idle"
                assert graphed(x * index).item() == 4 * len(x) * index
            assert graphed.num_graphs == 2
            if device == "cpu":
                assert graphed._backend.num_captures == 2


def test_what_the_step_sets_itself(one_rank: Ranks, device: str) -> None:
    one_rank.run(check_sets, device)


def check_lazy(rank: int, device: str) -> None:
    """A mean that is made in the first step and written in later ones."""
    means: list[list[float]] = []
    with captures_on(device):
        for is_graphed in (False, True):
            trainer = types.SimpleNamespace(mean=None)

            def step(x: Tensor, trainer: Any = trainer) -> Tensor:
                if trainer.mean is None:
                    trainer.mean = x.detach().clone()
                else:
                    trainer.mean.mul_(0.5).add_(x)
                return x.sum()

            xs = [torch.full((2,), float(i), device=device) for i in range(4)]
            function: Any = step
            if is_graphed:
                with pytest.raises(RuntimeError, match=r"mean .* Run one step eagerly before"):
                    fusedddp.make_graphed_step(step, (xs[0],))
                trainer.mean = None
            step(xs[0])
            if is_graphed:
                function = fusedddp.make_graphed_step(step, (xs[0],))
            for x in xs[1:]:
                function(x)
            means.append(trainer.mean.tolist())
    assert means[0] == means[1]


def test_tensors_that_the_step_makes_once(one_rank: Ranks, device: str) -> None:
    one_rank.run(check_lazy, device)
