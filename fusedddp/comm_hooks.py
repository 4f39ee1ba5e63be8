"""Communication hooks: code of the user's that reduces a bucket in place of our all-reduce.

Takes what torch DDP's ``register_comm_hook`` takes, so that the hooks of
``torch.distributed.algorithms.ddp_comm_hooks`` run unchanged.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import BuiltinCommHookType
from torch._C._distributed_c10d import GradBucket as DDPGradBucket
from torch.futures import Future
from torch.nn import Parameter

CommHookFn: TypeAlias = Callable[[Any, "GradBucket"], "Future[Tensor]"]


class GradBucket:
    """What a hook gets: the methods of ``torch.distributed.GradBucket``, which is not to be built
    from Python.

    Its memory holds this rank's gradients, undivided, one after the other without padding.
    """

    def __init__(
        self,
        index: int,
        buffer: Tensor,
        views_of: Callable[[Tensor], list[Tensor]],
        parameters: Sequence[Parameter],
        *,
        is_last: bool,
    ) -> None:
        self._index = index
        self._buffer = buffer
        self._views_of = views_of
        self._parameters = list(parameters)
        self._is_last = is_last

    def index(self) -> int:
        """Position of the bucket in the order in which buckets are reduced."""
        return self._index

    def buffer(self) -> Tensor:
        """All gradients: 1-D, of the parameters' dtype; complex values as pairs of reals."""
        return self._buffer

    def gradients(self) -> list[Tensor]:
        """One view of `buffer()` per parameter, of the parameter's shape."""
        return self._views_of(self._buffer)

    def parameters(self) -> list[Parameter]:
        return list(self._parameters)

    def is_last(self) -> bool:
        """Whether this is the last bucket of the round."""
        return self._is_last

    def set_buffer(self, buffer: Tensor) -> None:
        """Makes `buffer` what `buffer()` returns and `gradients()` views from now on.

        Args:
            buffer: 1-D, with as many elements, of any floating dtype.
        """
        self._buffer = buffer


class CommHook:
    """A hook and the state that it is called with.

    Raises:
        TypeError, ValueError: `hook` cannot be one.
    """

    def __init__(self, state: object, hook: CommHookFn) -> None:
        _check(hook)
        self._state = state
        self._hook = hook
        self.name = getattr(hook, "__qualname__", type(hook).__qualname__)

    def start(self, bucket: GradBucket) -> PendingHook:
        """Calls the hook. What it raises is raised by `PendingHook.wait`."""
        destination = bucket.buffer()  # the hook may set another one
        try:
            future = self._hook(self._state, bucket)
        except Exception as error:  # raised at `wait`, so that ranks end the round together
            return PendingHook(self.name, None, destination, error)
        # Futures of collectives are of the C++ base class.
        if not isinstance(future, torch._C.Future):
            refusal = RuntimeError(
                f"Communication hook {self.name} must return a torch.futures.Future, found "
                f"{type(future).__name__}. Return work.get_future() of an async collective, or a "
                "future on which set_result was called."
            )
            return PendingHook(self.name, None, destination, refusal)
        return PendingHook(self.name, future, destination, None)


class PendingHook:
    """A hook whose future may not be done yet, or that has failed."""

    def __init__(
        self,
        name: str,
        future: torch._C.Future[Any] | None,
        destination: Tensor,
        error: Exception | None,
    ) -> None:
        self._name = name
        self._future = future
        self._destination = destination
        self._error = error

    def wait(self) -> None:
        """Waits, and puts the result where the gradients were.

        Raises:
            RuntimeError: its result is not the bucket's reduced gradients.
            Exception: the hook failed.
        """
        if self._error is not None:
            error, self._error = self._error, None
            try:
                raise error
            finally:
                del error  # its traceback has this frame, and so whatever it refers to
        assert self._future is not None
        result: Any = self._future.wait()
        if isinstance(result, (list, tuple)) and len(result) == 1:
            result = result[0]  # what the future of a collective holds
        destination = self._destination
        if not _fits(result, destination):
            raise RuntimeError(
                f"Communication hook {self._name}: expected its future to hold one dense, real, "
                f"floating tensor on {destination.device} with the {destination.numel()} elements "
                f"of bucket.buffer(), found {_describe(result)}."
            )
        if result.data_ptr() != destination.data_ptr() or result.dtype != destination.dtype:
            with torch.no_grad():
                destination.copy_(result.reshape(destination.shape))


def _fits(result: object, destination: Tensor) -> bool:
    return (
        isinstance(result, Tensor)
        and result.layout == torch.strided
        and result.device == destination.device
        and result.is_floating_point()
        and result.numel() == destination.numel()
    )


def _describe(result: object) -> str:
    if not isinstance(result, Tensor):
        return type(result).__name__
    return f"{result.numel()} elements of {result.dtype}, {result.layout}, on {result.device}"


def builtin_comm_hook(kind: BuiltinCommHookType, group: dist.ProcessGroup) -> CommHook:
    """The Python hook that does what one of torch DDP's C++ hooks does.

    Raises:
        TypeError: not a kind of built-in hook.
    """
    # Imports DDP's hooks, which nothing else here needs.
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    kinds = {
        BuiltinCommHookType.ALLREDUCE: default_hooks.allreduce_hook,
        BuiltinCommHookType.FP16_COMPRESS: default_hooks.fp16_compress_hook,
    }
    if kind not in kinds:
        raise TypeError(
            "comm_hook_type: expected a torch.distributed.BuiltinCommHookType, found "
            f"{kind!r} ({type(kind).__name__})"
        )
    hook = CommHook(group, kinds[kind])
    hook.name = str(kind)
    return hook


def _check(hook: CommHookFn) -> None:
    """Raises what DDP raises for a hook with another signature."""
    if not callable(hook):
        raise TypeError(
            f"Communication hook must be callable. Found {hook!r} ({type(hook).__name__})."
        )
    try:
        signature = inspect.signature(hook)
    except ValueError:  # a callable of C++ has none to look at
        return
    try:
        signature.bind(None, None)
    except TypeError as error:
        raise TypeError(
            f"Communication hook must take (state, bucket), found {signature}: {error}"
        ) from None
    # As text, under `from __future__ import annotations`, they are not looked into.
    bucket, returns = list(signature.parameters.values())[1:2], signature.return_annotation
    takes = bucket[0].annotation if bucket else inspect.Parameter.empty
    if not isinstance(takes, str) and takes not in (
        inspect.Parameter.empty,
        DDPGradBucket,
        GradBucket,
    ):
        raise ValueError(
            f"Communication hook: bucket annotation should be dist.GradBucket. Found {takes!r}."
        )
    if not isinstance(returns, str) and returns not in (inspect.Signature.empty, Future[Tensor]):
        raise ValueError(
            "Communication hook: return annotation should be torch.futures.Future[torch.Tensor]. "
            f"Found {returns!r}."
        )
