"""`check_capturable`: says before a capture what would make it fail, or its replays wrong."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from typing import Any

import torch

from fusedddp.capture_patches import NUMPY_GENERATOR, NumpyGenerators
from fusedddp.capture_places import OURS, Places, owner_of
from fusedddp.capture_report import CaptureReport, Place
from fusedddp.capture_rules import PYTHON_NUMBER, Rule
from fusedddp.capture_watch import Watch, tensors_in

_is_checking = False


def check_capturable(step: Callable[..., Any], *args: Any, **kwargs: Any) -> CaptureReport:
    """Runs one training step and reports what stands against capturing it in a CUDA graph.

    Needs no GPU: on a CPU the step runs there, and what is read back from a tensor counts as a wait
    for the device. Optimizers are judged by their settings, since their CPU form differs. What
    cannot be told from the run is in ``report.undecided`` and does not count as a finding.

    The step is a real one: parameters, gradients, buffers, optimizer state and random numbers are
    afterwards what they are after one eager call of ``step(*args, **kwargs)``. Run the check on a
    copy of the model if that step is not wanted. Collective if the step is: with several ranks call
    it on all of them.

    Example::

        def step(inputs, targets):
            optimizer.zero_grad()
            loss = loss_fn(model(inputs), targets)
            loss.backward()
            optimizer.step()
            return loss

        print(fusedddp.check_capturable(step, inputs, targets))

    Args:
        step: a function that runs one training step.
        args, kwargs: what it is called with.

    Returns:
        A report with `findings`, `undecided` and `ok`; its text has a block for each finding.

    Raises:
        TypeError: `step` is not a function to call.
        RuntimeError: called within another check, or during a capture.
        Exception: whatever the step raises.
    """
    global _is_checking
    _require_step(step)
    if _is_checking:
        raise RuntimeError(
            "check_capturable: expected no other check to be running, found a call within the step "
            "of one. Take it out of the step."
        )
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "check_capturable: expected a stream that is not capturing, found a capture under way. "
            "Call it before the capture."
        )
    caller = _place_of_caller(step)
    places = Places(_call_step.__code__, caller)
    watch = Watch(places, tensors_in((args, kwargs)))
    for name, value in _named_arguments(step, args, kwargs):
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            message = f"The argument {name} is a number, {value!r}: every replay uses this one."
            remedy = "pass a tensor if it changes from step to step."
            watch.add(Rule(PYTHON_NUMBER, message, remedy), caller, decided=False)
    generators = NumpyGenerators(step, args, kwargs)
    _is_checking = True
    try:
        with watch:
            _call_step(step, args, kwargs)
    finally:
        _is_checking = False
    if generators.have_drawn():
        watch.add(NUMPY_GENERATOR, _place_of_step(step) or caller)
    return CaptureReport(watch.findings(), watch.undecided())


def _call_step(step: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    step(*args, **kwargs)


def _require_step(step: Any) -> None:
    expected = "check_capturable: expected a function that runs one training step"
    if isinstance(step, torch.nn.Module):
        raise TypeError(
            f"{expected}, found a module, {type(step).__name__}. Pass a function that calls the "
            "module, computes the loss, and calls backward and the optimizer."
        )
    if not callable(step) or isinstance(step, type):
        raise TypeError(
            f"{expected}, found {step!r} ({type(step).__name__}). Pass the function itself and its "
            "arguments after it, check_capturable(step, inputs), not the result of a call."
        )
    if inspect.iscoroutinefunction(step) or inspect.isgeneratorfunction(step):
        raise TypeError(
            f"{expected}, found {step!r}, which does not run when it is called. Pass a plain "
            "function."
        )


def _place_of_caller(step: Any) -> Place:
    """The line that asks for the check; for the command line, that of the step."""
    frame = sys._getframe(2)
    is_ours = owner_of(frame.f_code.co_filename) == OURS
    called = Place(frame.f_code.co_filename, frame.f_lineno)
    return (is_ours and _place_of_step(step)) or called


def _place_of_step(step: Any) -> Place | None:
    """The first line of the step."""
    code = getattr(inspect.unwrap(step), "__code__", None)
    return None if code is None else Place(code.co_filename, code.co_firstlineno)


def _named_arguments(
    step: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> list[tuple[str, Any]]:
    try:
        names = list(inspect.signature(step).parameters)
    except (TypeError, ValueError):  # some callables have no signature
        names = []
    names += [f"number {i}" for i in range(len(names), len(args))]
    return [*zip(names, args, strict=False), *kwargs.items()]
