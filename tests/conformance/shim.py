"""Lets tests that were written for one GPU per rank run on CPU.

`install` patches the process that it is called in, for good: the runner calls it in a child that
lives for one test. Each patch is as narrow as the tests allow, so that DDP and `FusedDDP` run as
they would on CPU without it. ``torch.cuda.is_available()`` stays false.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

# Enough for every gate of the tests; the largest asks for four.
NUM_GPUS = 8


def install(rank: int, wrapper: type[DistributedDataParallel]) -> None:
    """Patches this process, which is `rank`; `wrapper` is the class that the tests will wrap in."""
    _open_gates()
    _stay_on_cpu()
    _stub_cuda(rank)
    _stub_streams()
    _drop_devices(wrapper)


class _Stand:
    """An object with some attributes of its own and those of another one beside them."""

    def __init__(self, behind: Any, **attributes: Any) -> None:
        self._behind = behind
        self.__dict__.update(attributes)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._behind, name)


def _open_gates() -> None:
    """Says that there are GPUs, but only to the decorators that skip tests without them.

    They are in one module and ask at the time of the call, through that module's name ``torch``.
    Were ``torch.cuda`` itself patched, all of torch would try to use these GPUs.
    """
    from torch.testing._internal import common_distributed

    cuda = _Stand(torch.cuda, is_available=lambda: True, device_count=lambda: NUM_GPUS)
    common_distributed.torch = _Stand(torch, cuda=cuda)
    common_distributed.TEST_CUDA = True


def _to_cpu(device: Any) -> Any:
    """The CPU for a device that names a GPU; tests name theirs by rank, too. Else `device`."""
    if isinstance(device, (int, str, torch.device)) and not isinstance(device, bool):
        is_gpu = isinstance(device, int) or torch.device(device).type == "cuda"
        return torch.device("cpu") if is_gpu else device
    return device


def _stay_on_cpu() -> None:
    """Turns every device that tests name into the CPU: moves of tensors and modules, factories."""

    def device_keyword(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def patched(*args: Any, **kwargs: Any) -> Any:
            if "device" in kwargs:
                kwargs["device"] = _to_cpu(kwargs["device"])
            return function(*args, **kwargs)

        return patched

    for name in ("empty", "ones", "rand", "randn", "tensor", "zeros"):
        setattr(torch, name, device_keyword(getattr(torch, name)))

    for owner in (torch.Tensor, torch.nn.Module):
        move = device_keyword(owner.to)

        def to(self: Any, *args: Any, _move: Callable[..., Any] = move, **kwargs: Any) -> Any:
            # A number is a device; a string or a torch.device is one, too.
            return _move(self, *map(_to_cpu, args), **kwargs)

        owner.to = to
        owner.cuda = lambda self, device=None: self

    from torch.distributed import device_mesh

    # Asks for a mesh of "cuda", whose backend gloo would have to have.
    init = device_mesh.init_device_mesh
    device_mesh.init_device_mesh = lambda device, *args, **kwargs: init("cpu", *args, **kwargs)


def _stub_cuda(rank: int) -> None:
    """What tests call between steps. (Seeding works without a GPU.)"""
    torch.cuda.set_device = lambda device: None
    torch.cuda.current_device = lambda: rank
    torch.cuda.synchronize = lambda device=None: None


class _NoStream(contextlib.nullcontext):
    """A stream of a device that has none: work is done when its call returns."""

    def wait_stream(self, stream: Any) -> None:
        pass

    def wait_event(self, event: Any) -> None:
        pass

    def synchronize(self) -> None:
        pass


class _NoEvent:
    def record(self, stream: Any = None) -> None:
        pass

    def wait(self, stream: Any = None) -> None:
        pass

    def synchronize(self) -> None:
        pass


def _stub_streams() -> None:
    """DDP's mixed precision asks for streams and events of the current accelerator."""
    torch.Stream = _NoStream
    torch.Event = _NoEvent
    torch.accelerator.current_stream = lambda device=None: _NoStream()


def _drop_devices(wrapper: type[DistributedDataParallel]) -> None:
    """Tests give the wrapper their GPU, which it has to refuse for a module on CPU."""
    construct = wrapper.__init__

    @functools.wraps(construct)
    def patched(self: Any, module: Any, *args: Any, **kwargs: Any) -> None:
        kwargs.pop("device_ids", None)
        kwargs.pop("output_device", None)
        construct(self, module, *args, **kwargs)

    wrapper.__init__ = patched
    # SyncBatchNorm is refused for modules on CPU; two tests have one that is never trained.
    DistributedDataParallel._passing_sync_batchnorm_handle = lambda self, module: None
