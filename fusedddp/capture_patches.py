"""What Python does beside tensors, watched by patches that are taken back: random numbers, the
clock, waits for the device, seeds, schedulers."""

from __future__ import annotations

import contextlib
import functools
import inspect
import random
import sys
import time
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from fusedddp.capture_places import USER, owner_of
from fusedddp.capture_rules import HOST_SYNC, PYTHON_RANDOM, SCHEDULER_STEP, TIME, TORCH_SEED, Rule

# Called with what it means that something is called, before that runs.
Notify = Callable[[Rule], None]

_NOT_DRAWN = {"seed", "getstate", "setstate", "get_state", "set_state", "get_bit_generator"}
_CLOCKS = (
    "time time_ns perf_counter perf_counter_ns monotonic monotonic_ns process_time process_time_ns"
).split()
_MISSING: Any = object()
_SCHEDULER = Rule(
    SCHEDULER_STEP,
    "A scheduler's step() computes on the host: a replay does not repeat it.",
    "call it after each replay, with lr=torch.tensor(lr, device=...) in the optimizer.",
)
NUMPY_GENERATOR = Rule(
    PYTHON_RANDOM,
    "A generator of NumPy draws numbers on the host, somewhere in this step: every replay repeats "
    "those of the capture.",
    "draw with torch on the device (torch.rand(..., device=...)), which graphs support.",
)
_MANUAL = Rule(
    HOST_SYNC,
    "fusedddp.all_reduce_gradients compares on the host what ranks pass.",
    "give make_graphed_step two functions, (backward, update), or wrap the model.",
)
_SAVE = Rule(HOST_SYNC, "torch.save copies tensors to the host.", "save after a replay.")


class Patches:
    """Attributes that are replaced for a while."""

    def __init__(self) -> None:
        self._old: list[tuple[Any, str, Any]] = []

    def set(self, owner: Any, name: str, value: Any) -> None:
        """Replaces an attribute of `owner`, of its own or inherited."""
        self._old.append((owner, name, vars(owner).get(name, _MISSING)))
        setattr(owner, name, value)

    def restore(self) -> None:
        """Puts back what there was, in reverse order."""
        while self._old:
            owner, name, value = self._old.pop()
            if value is _MISSING:
                delattr(owner, name)
            else:
                setattr(owner, name, value)


class NumpyGenerators:
    """NumPy's generator objects that a step can reach, which no patch can watch.

    Args:
        step: where to look: its arguments, what it closes over, globals that it names, and
            attributes of the object that it is a method of.
    """

    def __init__(
        self, step: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> None:
        numpy_random = sys.modules.get("numpy.random")
        self._found: list[tuple[Any, str]] = []
        if numpy_random is None:
            return
        for value in [*args, *kwargs.values(), *_reachable(step)]:
            if isinstance(value, (numpy_random.Generator, numpy_random.RandomState)):
                self._found.append((value, _state_of(value)))

    def have_drawn(self) -> bool:
        """Whether one of them drew a number since."""
        return any(_state_of(value) != state for value, state in self._found)


def _state_of(generator: Any) -> str:
    """How far a generator of NumPy, of the newer or the older kind, is."""
    is_old = hasattr(generator, "get_state")
    return str(generator.get_state(legacy=False) if is_old else generator.bit_generator.state)


def _reachable(step: Any) -> Iterator[Any]:
    yield from getattr(getattr(step, "__self__", None), "__dict__", {}).values()
    function = inspect.unwrap(getattr(step, "__func__", step))
    if isinstance(function, types.FunctionType):
        for cell in function.__closure__ or ():
            with contextlib.suppress(ValueError):  # not filled yet
                yield cell.cell_contents
        for name in function.__code__.co_names:
            yield function.__globals__.get(name)


def install(patches: Patches, notify: Notify) -> None:
    """Has `notify` called for everything on this page that the step's own code calls."""
    replaced: dict[int, tuple[Any, Any]] = {}

    def patch(owner: Any, name: str, rule: Rule, *, runs: bool = True) -> None:
        if (original := getattr(owner, name, None)) is None:
            return
        wrapper = _notifying(original, rule, notify, runs=runs)
        replaced[id(original)] = (original, wrapper)
        patches.set(owner, name, wrapper)

    drawers: list[tuple[Any, Any]] = [(random, random._inst)]
    if (numpy_random := sys.modules.get("numpy.random")) is not None:
        drawers.append((numpy_random, numpy_random.mtrand._rand))
    for module, instance in drawers:
        for name, value in list(vars(module).items()):
            if getattr(value, "__self__", None) is instance and name not in _NOT_DRAWN:
                patch(module, name, _random_rule(f"{module.__name__}.{name}"))
    for name in [n for n in vars(random) if hasattr(random.Random, n) and n not in _NOT_DRAWN]:
        if callable(getattr(random.Random, name)) and not name.startswith("_"):
            patch(random.Random, name, _random_rule(f"random.Random.{name}"))
    for name in _CLOCKS:
        patch(time, name, _clock_rule(f"time.{name}"))
    for owner, name in _waits():
        # Without a GPU there is nothing to wait for, and torch would raise.
        rule = _wait_rule(f"{owner.__name__}.{name}")
        patch(owner, name, rule, runs=torch.cuda.is_available())
    patch(torch, "save", _SAVE)
    patch(sys.modules["fusedddp"], "all_reduce_gradients", _MANUAL)
    for owner in (torch, torch.random, torch.cuda):
        for name in ("manual_seed", "manual_seed_all", "seed"):
            patch(owner, name, _seed_rule(f"{owner.__name__}.{name}"))
    for cls in _classes_below(LRScheduler):
        if "step" in vars(cls):
            patch(cls, "step", _SCHEDULER)
    _replace_imported_names(patches, replaced)


def _notifying(original: Any, rule: Rule, notify: Notify, *, runs: bool) -> Any:
    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        notify(rule)
        return original(*args, **kwargs) if runs else None

    return wrapper


def _replace_imported_names(patches: Patches, replaced: dict[int, tuple[Any, Any]]) -> None:
    """Replaces what modules of the user's have imported by name (``from time import time``)."""
    for name, module in list(sys.modules.items()):
        if not isinstance(module, types.ModuleType):
            continue
        file = getattr(module, "__file__", None)
        if name != "__main__" and (file is None or owner_of(file) != USER):
            continue
        for key, value in list(vars(module).items()):
            original, wrapper = replaced.get(id(value), (None, None))
            if original is value and original is not None:
                patches.set(module, key, wrapper)


def _waits() -> Iterator[tuple[Any, str]]:
    yield torch.cuda, "synchronize"
    yield torch.cuda.Stream, "synchronize"
    yield torch.cuda.Event, "synchronize"
    if hasattr(torch, "accelerator"):
        yield torch.accelerator, "synchronize"


def _classes_below(cls: type) -> Iterator[type]:
    found: set[type] = {cls}
    todo = [cls]
    while todo:
        below: list[type] = todo.pop().__subclasses__()
        new = [sub for sub in below if sub not in found]
        found.update(new)
        todo += new
    yield from found


def _random_rule(name: str) -> Rule:
    return Rule(
        PYTHON_RANDOM,
        f"{name} draws a number on the host: every replay repeats that of the capture.",
        "draw with torch on the device (torch.rand(..., device=...)), which graphs support.",
    )


def _clock_rule(name: str) -> Rule:
    return Rule(
        TIME,
        f"{name} reads the clock on the host: a replay does not read it again.",
        "measure around the replay.",
    )


def _wait_rule(name: str) -> Rule:
    return Rule(
        HOST_SYNC, f"{name} makes the host wait for the device.", "leave it out of the step."
    )


def _seed_rule(name: str) -> Rule:
    return Rule(
        TORCH_SEED,
        f"{name} seeds torch's generators, which CUDA refuses during a capture.",
        "seed before the capture; each replay then draws new numbers.",
    )
