"""Hooks on parameters: they run after those of the user and die with what they call."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.utils.hooks import RemovableHandle

# Attribute of our hooks that tells them from those of the user: a weak reference to the listener.
_LISTENER = "_fusedddp_listener"
_NO_GRAPH_TASK = -2  # torch says -1 outside of a backward


class _Listener(Protocol):
    def mark_ready(self, index: int, param: Tensor) -> None: ...

    def take_chunk(self, index: int, param: Tensor) -> None: ...

    def note_delivery(self) -> None: ...


class _Chunk(Protocol):
    arrived: list[int]
    takes_at: int


class ParamHooks:
    """Calls ``listener.mark_ready(index, param)`` after each accumulation into `param.grad`.

    Post-accumulate hooks, because a retained AccumulateGrad node would stay tied to the stream on
    which it was made. The listener is held weakly, so that a module can be wrapped again.

    In a backward that `shorten` announces the hook only notes the arrival in the parameter's chunk,
    and calls ``listener.take_chunk(index, param)`` once the chunk may be complete. A hook runs with
    cold caches: for 400 parameters going through the listener took 1.5 ms of a backward of 18 ms.

    Args:
        listener: whose method is called.
        trained: the parameters; `index` is the position in here.
        frozen: names and parameters whose gradient is an error.
    """

    def __init__(
        self,
        listener: _Listener,
        trained: Sequence[Parameter],
        frozen: Sequence[tuple[str, Parameter]],
    ) -> None:
        self._params = trained
        self._listener = weakref.ref(listener)
        # Hooks of modules on several devices run on several threads.
        self._lock = threading.RLock() if len({param.device for param in trained}) > 1 else None
        self._short_graph_task = [_NO_GRAPH_TASK]
        self._handles = [
            _register(param, _make_hook(self._listener, index, self._lock))
            for index, param in enumerate(trained)
        ]
        self._tensors = [param._cdata for param in trained]
        handles = [*self._handles, *_refuse_gradients(frozen)]
        self.remove = weakref.finalize(listener, _remove_all, handles)
        self.remove.atexit = False

    def is_last(self, index: int, param: Tensor) -> bool:
        """Whether the hook on `param` runs after all hooks of the user, as DDP's does."""
        hooks = _hooks_of(param)
        return len(hooks) == 1 or next(reversed(hooks)) == self._handles[index].id

    def is_shared(self, index: int) -> bool:
        """Whether another listener, that of another wrapper, hears of this parameter too."""
        own = self._handles[index].id
        return any(
            getattr(hook, _LISTENER, _nobody)() is not None
            for key, hook in (_hooks_of(self._params[index]) or {}).items()
            if key != own
        )

    def is_lost(self, index: int) -> bool:
        """Whether the hook is gone: torch.utils.swap_tensors puts another tensor in its place."""
        return self._params[index]._cdata != self._tensors[index]

    def bind(self, chunks: Sequence[_Chunk]) -> None:
        """Says which chunk each parameter belongs to, and makes our hooks the last ones."""
        for index, (param, chunk) in enumerate(zip(self._params, chunks, strict=True)):
            hook = _make_hook(self._listener, index, self._lock)
            own = self._handles[index].id
            hooks = _hooks_of(param)
            del hooks[own]
            hooks[own] = _make_short_hook(
                self._listener, index, chunk, self._short_graph_task, otherwise=hook
            )

    def shorten(self, graph_task: int | None) -> None:
        """Announces a backward in which arrivals go to the chunks; None ends it.

        Not for gradients on several devices, whose hooks run on several threads.
        """
        assert graph_task is None or self._lock is None
        self._short_graph_task[0] = _NO_GRAPH_TASK if graph_task is None else graph_task

    def put_last(self, indices: Iterable[int]) -> None:
        """Makes the hooks on these parameters the last ones. Not while one of them runs."""
        for index in indices:
            param = self._params[index]
            if not self.is_last(index, param):
                hooks, own = _hooks_of(param), self._handles[index].id
                hooks[own] = hooks.pop(own)  # move_to_end has no effect on autograd's order


def listeners_of(params: Iterable[Tensor]) -> set[_Listener]:
    """All that hear of gradients of `params`."""
    references = {
        getattr(hook, _LISTENER, _nobody)
        for param in params
        for hook in (_hooks_of(param) or {}).values()
    }
    return {listener for listener in (reference() for reference in references) if listener}


def _make_hook(
    reference: weakref.ref[Any], index: int, lock: threading.RLock | None
) -> Callable[[Tensor], None]:
    def hook(param: Tensor) -> None:
        listener = reference()
        if listener is not None:
            listener.mark_ready(index, param)

    def locking_hook(param: Tensor) -> None:
        assert lock is not None
        with lock:
            hook(param)

    chosen = hook if lock is None else locking_hook
    setattr(chosen, _LISTENER, reference)
    return chosen


def _make_short_hook(
    reference: weakref.ref[Any],
    index: int,
    chunk: _Chunk,
    short_graph_task: list[int],
    *,
    otherwise: Callable[[Tensor], None],
) -> Callable[[Tensor], None]:
    current_graph_task = torch._C._current_graph_task_id

    def hook(param: Tensor) -> None:
        if current_graph_task() != short_graph_task[0]:
            otherwise(param)
            return
        arrived = chunk.arrived
        arrived.append(index)
        if len(arrived) == chunk.takes_at:
            listener = reference()
            if listener is not None:
                listener.take_chunk(index, param)

    setattr(hook, _LISTENER, reference)
    return hook


def _refuse_gradients(frozen: Iterable[tuple[str, Parameter]]) -> Iterator[RemovableHandle]:
    for name, param in frozen:
        if param.is_floating_point() or param.is_complex():  # others never require gradients
            requires_grad = param.requires_grad
            param.requires_grad_(True)  # a frozen parameter refuses hooks; the hook survives
            yield _register(param, _make_refusal(name))
            param.requires_grad_(requires_grad)


def _make_refusal(name: str) -> Callable[[Tensor], None]:
    def hook(param: Tensor) -> None:
        raise RuntimeError(
            f"expected {name} to stay frozen until the next forward of the wrapper, found a "
            "gradient for it, which is not averaged. Run the forward after unfreezing parameters, "
            "or wrap the module again."
        )

    return hook


def _register(param: Parameter, hook: Callable[[Tensor], None]) -> RemovableHandle:
    handle: RemovableHandle = param.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
    return handle


def _nobody() -> None:
    return None


def _hooks_of(param: Tensor) -> dict[int, Any]:
    hooks: dict[int, Any] = param._post_accumulate_grad_hooks
    return hooks


def _remove_all(handles: list[RemovableHandle]) -> None:
    for handle in handles:
        handle.remove()
