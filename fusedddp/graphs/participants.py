"""What a step trains with: modules, optimizers, scalers; given by the user, or found."""

from __future__ import annotations

import contextlib
import operator
import threading
from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Module, Parameter
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from fusedddp.module import FusedDDP


class Participants:
    """Modules and optimizers that a step uses.

    Attributes:
        roots: modules that no other one of them contains.
        modules: they and all their submodules.
        wrappers: those of `modules` that are FusedDDP.
        params: all parameters of modules and optimizers, each once.
        buffers: all buffers.
        optimizers: optimizers.
        scalers: gradient scalers that are not switched off.
    """

    def __init__(self) -> None:
        self.roots: list[Module] = []
        self.modules: list[Module] = []
        self.wrappers: list[FusedDDP] = []
        self.params: list[Parameter] = []
        self.buffers: list[Tensor] = []
        self.optimizers: list[Optimizer] = []
        self.scalers: list[torch.amp.GradScaler] = []
        self._known: set[int] = set()

    def add_module(self, root: Module) -> bool:
        """Takes a module in; returns whether it is a new one."""
        if id(root) in self._known:
            return False
        self.roots.append(root)
        for module in root.modules():
            if id(module) not in self._known:
                self._known.add(id(module))
                self.modules.append(module)
                if isinstance(module, FusedDDP):
                    self.wrappers.append(module)
        self._add_params(root.parameters())
        known = {id(buffer) for buffer in self.buffers}
        self.buffers += [buffer for buffer in root.buffers() if id(buffer) not in known]
        return True

    def add_optimizer(self, optimizer: Optimizer) -> bool:
        """Takes an optimizer in; returns whether it is a new one."""
        if id(optimizer) in self._known:
            return False
        self._known.add(id(optimizer))
        self.optimizers.append(optimizer)
        self._add_params(p for group in optimizer.param_groups for p in group["params"])
        return True

    def add_scaler(self, scaler: torch.amp.GradScaler) -> None:
        """Takes a gradient scaler in."""
        if id(scaler) not in self._known and scaler.is_enabled():
            self._known.add(id(scaler))
            self.scalers.append(scaler)

    def add_all(self, values: Iterable[Any]) -> None:
        """Takes in what of `values` a step trains with."""
        for value in values:
            if isinstance(value, Module):
                self.add_module(value)
            elif isinstance(value, Optimizer):
                self.add_optimizer(value)
            elif isinstance(value, torch.amp.GradScaler):
                self.add_scaler(value)

    def _add_params(self, params: Iterable[Parameter]) -> None:
        for param in params:
            if id(param) not in self._known:
                self._known.add(id(param))
                self.params.append(param)

    def refresh(self) -> None:
        """Looks again at what the modules and optimizers consist of."""
        fresh = Participants()
        fresh.add_all([*self.roots, *self.optimizers, *self.scalers])
        self.__dict__.update(fresh.__dict__)

    @contextlib.contextmanager
    def met(
        self, on_module: Callable[[Module], None], on_optimizer: Callable[[Optimizer], None]
    ) -> Iterator[None]:
        """Takes in whatever runs forward or steps in the body, and says so before it does."""
        thread = threading.get_ident()

        def is_here() -> bool:
            # Other threads may train other models. Backwards on a GPU, in which optimizers may step
            # too, run on threads of autograd, which Python has not started.
            return threading.get_ident() == thread or isinstance(
                threading.current_thread(), threading._DummyThread
            )

        def meet_module(module: Module, _: Any) -> None:
            if is_here() and self.add_module(module):
                on_module(module)

        def meet_optimizer(optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
            if is_here() and self.add_optimizer(optimizer):
                on_optimizer(optimizer)

        handles = [
            register_module_forward_pre_hook(meet_module),
            register_optimizer_step_pre_hook(meet_optimizer),
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def groups(self) -> list[dist.ProcessGroup]:
        """The process groups that the wrappers average over, each once."""
        return list(dict.fromkeys(wrapper.process_group for wrapper in self.wrappers))

    def mode(self, device_type: str) -> Hashable:
        """What decides which graph a call needs, beside its arguments and gradients."""
        return (
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
            torch.is_autocast_enabled(device_type),
            torch.get_autocast_dtype(device_type),
            torch.are_deterministic_algorithms_enabled(),
            bytes(map(_training, self.modules)),
            bytes(map(_requires_grad, self.params)),
            tuple(
                [
                    (
                        wrapper.require_backward_grad_sync,
                        wrapper.will_sync_module_buffers(),  # type: ignore[no-untyped-call]
                        wrapper.reducer.accumulated,
                    )
                    for wrapper in self.wrappers
                ]
            ),
        )

    def find_elsewhere(self, device_type: str) -> str | None:
        """A parameter, buffer or hyper-parameter that is on another type of device, in words.

        A learning rate on the CPU would be read once, at the capture.
        """
        for root in self.roots:
            for name, tensor in [*root.named_parameters(), *root.named_buffers()]:
                if tensor.device.type != device_type:
                    return f"{name} of {type(root).__name__} is on {tensor.device}"
        for param in self.params:
            if param.device.type != device_type:
                return f"an optimizer has a parameter {tuple(param.shape)} on {param.device}"
        for optimizer in self.optimizers:
            for key, value in tensor_options(optimizer):
                if value.device.type != device_type:
                    return f"{key} of {type(optimizer).__name__} is a tensor on {value.device}"
        return None


_training = operator.attrgetter("training")
_requires_grad = operator.attrgetter("requires_grad")

# Keys of param_groups that schedulers keep for themselves.
SCHEDULER_KEYS = frozenset(
    {"initial_lr", "max_lr", "min_lr", "max_momentum", "base_momentum", "swa_lr"}
)


def tensor_options(optimizer: Optimizer) -> Iterator[tuple[str, Tensor]]:
    """The hyper-parameters of an optimizer that are tensors, each with its key."""
    for group in optimizer.param_groups:
        for key, value in group.items():
            if isinstance(value, Tensor) and key not in SCHEDULER_KEYS:
                yield key, value
