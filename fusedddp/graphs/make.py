"""`make_graphed_step`: checks what it is given, chooses where to capture, captures once."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.nn import Module
from torch.optim.optimizer import Optimizer

from fusedddp.graphs.backend import BACKENDS, Backend
from fusedddp.graphs.participants import Participants
from fusedddp.graphs.split import SplitStep
from fusedddp.graphs.step import GraphedStep, tensors_of

logger = logging.getLogger(__name__)


def make_graphed_step(
    step: Callable[..., Any] | tuple[Callable[..., Any], Callable[[], Any]],
    sample_args: tuple[Any, ...] | list[Any],
    sample_kwargs: dict[str, Any] | None = None,
    *,
    model: Module | Iterable[Module] | None = None,
    optimizer: Optimizer | Iterable[Optimizer] | None = None,
    scaler: torch.amp.GradScaler | Iterable[torch.amp.GradScaler] | None = None,
    warmup: int = 2,
    max_graphs: int = 8,
    pool: Any = None,
    enabled: bool | None = None,
) -> GraphedStep | SplitStep:
    """Captures a training step, collectives included, and returns what replays it. Collective.

    `step` trains once: forward, loss, backward, clipping, ``optimizer.step()``, or any part of
    that. It runs a few times here, on `sample_args`, and is then captured; parameters, gradients,
    buffers, optimizer state, scaler and random numbers are left as they were, at the same
    addresses. Each call of the result is one step on the arguments of that call.

    Calls with other shapes, dtypes or values that are not tensors, under ``no_sync``, in another
    mode (train, eval, autocast), or that find other gradients, get graphs of their own, captured
    at the first such call. Ranks must meet new ones in the same calls. What a graph has baked in is
    looked at in each call, and the graph is captured anew, with a line in the log, if a learning
    rate that is a number has changed, a checkpoint has been loaded into the optimizer, parameters
    or buffers were replaced or moved, hooks on them came or went, the wrapper has other buckets, or
    globals, free variables or attributes that the step reads have other values. A learning rate
    that is a tensor needs no new graph.

    Not looked at: Python that the step runs besides (counters, schedulers, random numbers of
    Python or NumPy). That happens at the capture, and never again. Random
    numbers of torch go on from replay to replay, as in eager steps.

    Args:
        step: a function of tensors, containers of them and plain values (numbers, strings, None).
            It returns tensors, the loss mostly, in any structure. Or two functions, `backward` and
            `update`, the second without arguments: then gradients are averaged eagerly between two
            graphs. Use that if the collectives cannot be captured (gloo). `backward` runs under
            ``no_sync``; give `model` with it.
        sample_args: arguments of one call. Only what they look like matters.
        sample_kwargs: keyword arguments.
        model: the module or modules that `step` trains; None for those that its code names (as
            globals, free variables, or attributes of ``self``), and whose forward runs in it. Give
            others that it uses, or their state is not put back, and changes to them are not
            noticed; and wrapped ones that no rank can find if the step raises right away.
        optimizer: the optimizer or optimizers; None for those that `step` names or steps.
        scaler: the ``torch.amp.GradScaler`` or several; None for those that `step` names.
        warmup: eager steps before a capture; 1 counts as 2, since the first is watched for what it
            writes, for which torch.compile compiles other code. One before them rehearses without
            collectives, one more shows whether the step uses gradients that it finds, and further
            ones are run if a wrapper has not laid its buckets out by then.
        max_graphs: the least recently used graph is dropped for one more. A graph costs the memory
            of its inputs and results; the rest is shared.
        pool: memory to share with other graphs (``torch.cuda.graph_pool_handle()``).
        enabled: None captures if all is on CUDA, and else runs `step` eagerly and says so in the
            log. True insists, and False never captures.

    Returns:
        A callable with the arguments of `step`, and a context manager that lets the graphs go at
        its end, as ``close()`` does. Results are copies that later calls leave alone.

    Raises:
        TypeError, ValueError: an argument that means nothing; with ``enabled=True`` something that
            is not on CUDA.
        RuntimeError: on every rank, if `step` cannot be captured on any of them. It says which line
            of it, and what to do. Training can go on eagerly.

    Example::

        def train_step(x, y):
            optimizer.zero_grad()
            loss = loss_fn(model(x), y)
            loss.backward()
            optimizer.step()
            return loss

        with fusedddp.make_graphed_step(train_step, (x, y)) as step:
            for x, y in loader:
                loss = step(x, y)
    """
    functions = step if isinstance(step, tuple) else (step,)
    if not 1 <= len(functions) <= 2 or not all(callable(function) for function in functions):
        raise TypeError(
            f"step: expected a function, or a tuple of two, found {step!r} ({type(step).__name__})"
        )
    if not isinstance(sample_args, (tuple, list)):
        raise TypeError(
            "sample_args: expected a tuple of arguments, found "
            f"{type(sample_args).__name__}. Write (x,) for a single one."
        )
    _require_count("warmup", warmup)
    _require_count("max_graphs", max_graphs)
    if sample_kwargs is not None and not (
        isinstance(sample_kwargs, dict) and all(isinstance(key, str) for key in sample_kwargs)
    ):
        raise TypeError(
            "sample_kwargs: expected a dict of arguments by name, or None, found "
            f"{type(sample_kwargs).__name__}."
        )
    if not (enabled is None or isinstance(enabled, bool)):
        raise TypeError(f"enabled: expected True, False or None, found {enabled!r}")
    args, kwargs = tuple(sample_args), dict(sample_kwargs or {})
    participants = Participants()
    participants.add_all(_as_list(model, Module, "model"))
    participants.add_all(_as_list(optimizer, Optimizer, "optimizer"))
    participants.add_all(_as_list(scaler, torch.amp.GradScaler, "scaler"))
    if len(functions) == 2 and not participants.wrappers:
        raise ValueError(
            "model: expected the wrapped model beside a step of two functions, found none. Its "
            "gradients are averaged between them: pass model=model."
        )
    if len(functions) == 2:
        _require_plain_average(participants)
    if len(functions) == 2:
        _require_no_arguments(functions[1])
    device_type, backend = _choose_backend(tensors_of(participants, args, kwargs), enabled)

    if backend is not None and pool is not None:
        backend.check_pool(pool)

    def make(
        function: Callable[..., Any], world: Participants, *, must_return: bool = True
    ) -> GraphedStep:
        return GraphedStep(
            function,
            world,
            backend,
            device_type,
            warmup=warmup,
            max_graphs=max_graphs,
            pool=pool,
            insists=enabled is True,
            must_return=must_return,
        )

    graphed: GraphedStep | SplitStep = make(functions[0], participants)
    if len(functions) == 2:
        own = Participants()
        own.add_all([*participants.roots, *participants.scalers])
        assert isinstance(graphed, GraphedStep)
        graphed = SplitStep(graphed, make(functions[1], own, must_return=False), participants)
    try:
        graphed.prepare(args, kwargs)
    except BaseException:
        graphed.close()
        raise
    return graphed


def _require_no_arguments(update: Callable[..., Any]) -> None:
    try:
        inspect.signature(update).bind()
    except TypeError as error:
        raise TypeError(
            "step: expected the second of two functions, the update, to take no arguments, found "
            f"{update!r} ({error}). Let it find what it needs by a closure."
        ) from None
    except ValueError:  # no signature to be had
        pass


def _require_plain_average(participants: Participants) -> None:
    for wrapper in participants.wrappers:
        rounds = wrapper.reducer.rounds
        if rounds.comm_hook is not None or rounds.options.reduce_dtype is not None:
            found = "mixed_precision" if rounds.comm_hook is None else rounds.comm_hook.name
            raise ValueError(
                "step: expected one function for a model that is not reduced by a plain average, "
                f"found two, and {found}. Gradients are averaged eagerly between the two, as "
                "all_reduce_gradients does: leave the hook or mixed_precision out."
            )


def _choose_backend(
    tensors: list[torch.Tensor], enabled: bool | None
) -> tuple[str, Backend | None]:
    types = {tensor.device.type for tensor in tensors}
    if not types:
        types = {"cuda" if torch.cuda.is_available() else "cpu"}
    device_type = min(types, key=lambda name: (name not in BACKENDS, name))
    if enabled is False:
        return device_type, None
    others = sorted(name for name in types if name != device_type)
    if device_type in BACKENDS and not others:
        _check_current(tensors)
        return device_type, BACKENDS[device_type]()
    off = next((t for t in tensors if t.device.type not in BACKENDS), None)
    found = (
        "a tensor of shape "
        f"{tuple(off.shape)} on {off.device} among arguments, parameters and buffers"
        if off is not None
        else "tensors on several types of devices, or none at all"
    )
    if enabled:
        raise ValueError(
            f"enabled=True: expected everything on CUDA, found {found}. Move it to the GPU, or "
            "leave `enabled` out to run the step eagerly."
        )
    logger.info("The step runs eagerly, without a graph: found %s.", found)
    return device_type, None


def _check_current(tensors: list[torch.Tensor]) -> None:
    for tensor in tensors:
        if tensor.device.type == "cuda" and tensor.device.index != torch.cuda.current_device():
            raise ValueError(
                f"expected all tensors on the current device, cuda:{torch.cuda.current_device()}, "
                f"found one on {tensor.device}. Call torch.cuda.set_device before."
            )


def _require_count(name: str, value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{name}: expected a whole number from 1 on, found {value!r}")


def _as_list(value: Any, kind: type, name: str) -> list[Any]:
    if value is None or isinstance(value, kind):
        return [] if value is None else [value]
    values = list(value) if isinstance(value, Iterable) else [value]
    for item in values:
        if not isinstance(item, kind):
            article = "an" if kind is Optimizer else "a"
            raise TypeError(
                f"{name}: expected {article} {kind.__name__} or several, found "
                f"{type(item).__name__}"
            )
    return values
