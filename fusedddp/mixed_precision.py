"""Mixed precision: low copies of the parameters while a step runs, full precision around it.

See Note [Swapped data].
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Collection, Iterator, Sequence
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor
from torch.distributed.utils import _cast_forward_inputs
from torch.nn import Module, Parameter
from torch.nn.parallel.distributed import _MixedPrecision
from torch.utils.hooks import RemovableHandle

from fusedddp_kernels import is_dense

# What modules compute in and every backend reduces.
_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)

# Note [Swapped data]
# ~~~~~~~~~~~~~~~~~~~
# `param.data` is replaced by a low copy before a forward and put back at the end of the backward.
# It cannot be put back any earlier: what autograd saved of a parameter is the parameter itself, so
# that a backward reads the data that it has by then. A backward that begins with full precision
# in place (a second one over the same graph, or over that of an earlier forward) gets new copies.
# Those hold the same bits, because nobody may change a parameter between its forward and backward.
#
# The low copies are dropped and not resized to nothing: a graph that is retained may hold views of
# them, and keeps them alive for as long as it needs them.
#
# Gradients arrive in the dtype of the copies. One that is not in a bucket by the end of the
# backward is cast to the dtype of its parameter there, because autograd lets nobody assign any
# other, and because a sum over several backwards is to be made in full precision.


class MixedPrecision:
    """The low copies of a module's parameters, and when they are in place.

    Casts the buffers of the module when it is made. Floating parameters and buffers are cast, those
    that DDP is told to ignore are not, nor are integers and complex values. Parameters in
    `param_dtype` already need no copy.

    Sets on each floating parameter, as DDP does, ``_mp_param`` (the low copy; empty while there is
    none) and ``_fp_param`` (the data in full precision).

    ``state_dict`` and ``load_state_dict`` of `module`, and of whatever contains it, see full
    precision at any time. Those of a part of it do so only while the copies are not in place.

    Args:
        config: which dtypes; None in it leaves things as they are.
        module: the module.
        ignored: names of parameters and buffers to leave alone.

    Attributes:
        is_lowered: whether the low copies are in place.
    """

    def __init__(self, config: _MixedPrecision, module: Module, ignored: Collection[str]) -> None:
        self._dtype: torch.dtype | None = config.param_dtype
        self._names: list[str] = []
        self._params: list[Parameter] = []
        # Data in full precision while the copies are in place, else empty.
        self._full: list[Tensor] = []
        self._relowers = False
        for name, param in module.named_parameters():
            if not _is_cast(name, param, ignored):
                continue
            dtype = self._dtype or param.dtype
            _note_copy(param, full=param.data, low=param.new_empty(0, dtype=dtype))
            if dtype != param.dtype:
                self._names.append(name)
                self._params.append(param)
        self._dtypes = [param.dtype for param in self._params]
        if config.buffer_dtype is not None:
            for name, buffer in module.named_buffers():
                if _is_cast(name, buffer, ignored):
                    buffer.data = buffer.to(config.buffer_dtype)
        untyped: Any = module  # these methods of torch have no types
        handles = [
            untyped.register_state_dict_pre_hook(_Hook(self, "_before_state_dict")),
            untyped.register_state_dict_post_hook(_Hook(self, "_after_state_dict")),
            untyped.register_load_state_dict_pre_hook(_Hook(self, "restore")),
        ]
        weakref.finalize(self, _let_go, self._params, self._full, handles).atexit = False

    @property
    def is_lowered(self) -> bool:
        return bool(self._full)

    def lower(self) -> None:
        """Puts low copies in the place of all parameters. Does nothing if they are there.

        A copy has the shape of its parameter, and its strides if those leave no gaps. The copies
        are made on the current stream.

        Raises:
            RuntimeError: parameters have another dtype than when the module was wrapped.
        """
        if self._full:
            return
        full = [param.data for param in self._params]
        if [data.dtype for data in full] != self._dtypes:
            self._refuse_dtypes()
        # Copies made in inference mode would be of no use to a backward.
        with torch.inference_mode(False), torch.no_grad():
            low = [self._empty_copy(data) for data in full]
            if full:
                torch._foreach_copy_(low, full)
            for param, data, copy in zip(self._params, full, low, strict=True):
                _note_copy(param, full=data, low=copy)
                param.data = copy
        self._full.extend(full)

    def restore(self, *_: object) -> None:
        """Puts full precision back, drops the copies, and casts each `.grad` to its parameter's.

        Does nothing if the copies are not in place. Arguments, which hooks pass, are not read.
        """
        if not self._full:
            return
        _put_back(self._params, self._full)
        for param in self._params:
            gradient = param.grad
            if gradient is not None and gradient.dtype != param.dtype:
                param.grad = gradient.to(param.dtype)

    @contextlib.contextmanager
    def lowered(self, *, keep: bool) -> Iterator[None]:
        """Lowers for a forward.

        Args:
            keep: leave the copies in place for a backward. An exception takes them away all the
                same, but not from a backward that they were made for before.
        """
        was_lowered = self.is_lowered
        self.lower()
        try:
            yield
        except BaseException:
            keep = False
            raise
        finally:
            if not (keep or was_lowered):
                self.restore()

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        """Restores for a while."""
        was_lowered = self.is_lowered
        self.restore()
        try:
            yield
        finally:
            if was_lowered:
                self.lower()

    def cast_inputs(
        self, inputs: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Floating tensors of a forward's arguments, in containers too, in `param_dtype`."""
        cast_inputs, cast_kwargs = _cast_forward_inputs(self._dtype, *inputs, **kwargs)
        return cast_inputs, cast_kwargs

    def _empty_copy(self, data: Tensor) -> Tensor:
        # Data with gaps has a contiguous slot in its bucket, so its copy is contiguous: the order
        # in memory must not depend on whether the slot was made during a backward.
        memory_format = torch.preserve_format if is_dense(data) else torch.contiguous_format
        return torch.empty_like(data, dtype=self._dtype, memory_format=memory_format)

    def _before_state_dict(self, module: Module, prefix: str, keep_vars: bool) -> None:
        # With keep_vars the caller gets the parameters themselves. Then full precision stays until
        # the next forward or backward; else a forward that runs now may go on.
        self._relowers = self.is_lowered and not keep_vars
        self.restore()

    def _after_state_dict(self, *_: object) -> None:
        if self._relowers:
            self._relowers = False
            self.lower()

    def _refuse_dtypes(self) -> None:
        name, found, expected = next(
            (name, param.dtype, dtype)
            for name, param, dtype in zip(self._names, self._params, self._dtypes, strict=True)
            if param.dtype != dtype
        )
        raise RuntimeError(
            f"expected {name} to be of {expected}, as when the module was wrapped, found {found}. "
            "With mixed_precision, wrap the module again after converting it, and have no two "
            "wrappers cast the same parameters."
        )


def require_mixed_precision(config: object) -> None:
    """Checks the value of the keyword `mixed_precision`.

    Raises:
        TypeError: neither None nor torch's `_MixedPrecision`, or a field of it is no dtype.
        ValueError: a field is a dtype that gradients cannot be computed or reduced in.
    """
    if config is None:
        return
    if not isinstance(config, _MixedPrecision):
        raise TypeError(
            "mixed_precision: expected None or a torch.nn.parallel.distributed._MixedPrecision, "
            f"found {config!r} ({type(config).__name__}). Pass for example "
            "_MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16), or use "
            "torch.autocast."
        )
    for field in fields(config):
        if field.name not in ("param_dtype", "reduce_dtype", "buffer_dtype"):
            continue
        dtype = getattr(config, field.name)
        if dtype is not None and not isinstance(dtype, torch.dtype):
            raise TypeError(
                f"mixed_precision: expected a torch.dtype or None as {field.name}, found {dtype!r} "
                f"({type(dtype).__name__}). Pass a dtype such as torch.bfloat16."
            )
        if dtype is not None and dtype not in _DTYPES:
            raise ValueError(
                f"mixed_precision: expected one of {', '.join(map(str, _DTYPES))} as "
                f"{field.name}, found {dtype}. Pass one of them, or None to leave it as it is."
            )


class _Hook:
    """Calls a method of an owner that may die; a copy of it, with its module, calls nobody."""

    def __init__(self, owner: MixedPrecision | None, method: str) -> None:
        self._owner = None if owner is None else weakref.ref(owner)
        self._method = method

    def __call__(self, *args: object) -> None:
        owner = None if self._owner is None else self._owner()
        if owner is not None:
            getattr(owner, self._method)(*args)

    def __reduce__(self) -> tuple[type[_Hook], tuple[None, str]]:
        return _Hook, (None, self._method)


def _is_cast(name: str, tensor: Tensor, ignored: Collection[str]) -> bool:
    is_ignored = name in ignored or getattr(tensor, "_ddp_ignored", False)
    return tensor.is_floating_point() and not is_ignored


def _note_copy(param: Any, *, full: Tensor, low: Tensor) -> None:
    param._fp_param = full
    param._mp_param = low


def _put_back(params: Sequence[Parameter], full: list[Tensor]) -> None:
    """Empties `full` into `params`."""
    for param, data in zip(params, full, strict=True):
        _note_copy(param, full=data, low=param.data.new_empty(0))
        param.data = data
    full.clear()


def _let_go(
    params: Sequence[Parameter], full: list[Tensor], handles: Sequence[RemovableHandle]
) -> None:
    if full:
        _put_back(params, full)
    for handle in handles:
        handle.remove()
