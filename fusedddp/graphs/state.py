"""Training state around warm-up and capture: kept before, put back after, at the same addresses."""

from __future__ import annotations

import random
import sys
from collections import defaultdict
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, Parameter
from torch.optim import SGD
from torch.optim.optimizer import Optimizer

from fusedddp.graphs.participants import Participants
from fusedddp.module import FusedDDP


class Snapshot:
    """What parameters, gradients, buffers, optimizers, scaler and random numbers were.

    Modules and optimizers may be added while a step runs, before it first uses them.

    State that an optimizer makes in its first step stays, since a graph needs its memory. It is put
    back to what the optimizer first assigned, which is that of one that never stepped.

    Args:
        participants: what is known before the first step.
        device_type: where the step trains; random numbers of the current device there are kept.
    """

    def __init__(self, participants: Participants, device_type: str) -> None:
        self._tensors: dict[int, tuple[Tensor, Tensor]] = {}
        self._gradients: list[tuple[Parameter, Tensor | None]] = []
        self._seen: set[int] = set()
        self._buffers: list[tuple[dict[str, Any], dict[str, Any]]] = []
        self._wrappers: list[tuple[FusedDDP, bytes, bool, bool | None]] = []
        self._optimizers: list[_OptimizerState] = []
        self._scaler = participants.scaler
        self._device_module = None if device_type == "cpu" else torch.get_device_module(device_type)
        self._random = (
            torch.get_rng_state(),
            self._device_module and self._device_module.get_rng_state(),
            random.getstate(),
        )
        # Only if it is there already: a step that draws from it has imported it.
        self._numpy_random = sys.modules.get("numpy.random")
        self._numpy_numbers = self._numpy_random and self._numpy_random.get_state()
        for root in participants.roots:
            self.add_module(root)
        for optimizer in participants.optimizers:
            self.add_optimizer(optimizer)
        if self._scaler is not None:
            self._keep(self._scaler._scale)
            self._keep(self._scaler._growth_tracker)

    def add_module(self, root: Module) -> None:
        for module in root.modules():
            if id(module) in self._seen:
                continue
            self._seen.add(id(module))
            if module._buffers:
                self._buffers.append((module._buffers, dict(module._buffers)))
            if isinstance(module, FusedDDP):
                self._wrappers.append(
                    (
                        module,
                        module.reducer.accumulated,
                        module.require_forward_param_sync,
                        module.reducer.pending_forward,
                    )
                )
        for param in root.parameters():
            self._add_param(param)
        for buffer in root.buffers():
            self._keep(buffer)

    def add_optimizer(self, optimizer: Optimizer) -> None:
        for group in optimizer.param_groups:
            for param in group["params"]:
                self._add_param(param)
        self._optimizers.append(_OptimizerState(optimizer))

    def _add_param(self, param: Parameter) -> None:
        if id(param) not in self._seen:
            self._seen.add(id(param))
            self._keep(param)
            self._gradients.append((param, param.grad))
            self._keep(param.grad)

    def _keep(self, tensor: Tensor | None) -> None:
        if tensor is not None and id(tensor) not in self._tensors:
            self._tensors[id(tensor)] = (tensor, tensor.detach().clone())

    def restore_accumulated(self) -> None:
        """Puts back which parameters have gradients that no round has reduced."""
        for wrapper, accumulated, *_ in self._wrappers:
            if len(wrapper.reducer.params) == len(accumulated):
                wrapper.reducer.accumulated = accumulated

    def restore_gradients(self) -> None:
        """Puts `.grad` of every parameter back, and what wrappers have noted of it."""
        self.restore_accumulated()
        for param, gradient in self._gradients:
            param.grad = gradient
            if gradient is not None:
                gradient.data.copy_(self._tensors[id(gradient)][1])

    def restore(self) -> None:
        """Puts everything back."""
        for values, before in self._buffers:
            values.update(before)
        for tensor, value in self._tensors.values():
            tensor.data.copy_(value)  # .data: to autograd nothing has happened
        self.restore_gradients()
        for state in self._optimizers:
            state.restore()
        self._restore_scaler()
        for wrapper, _, syncs_params, pending_forward in self._wrappers:
            wrapper.require_forward_param_sync = syncs_params
            wrapper.reducer.pending_forward = pending_forward
        cpu, device, python = self._random
        torch.set_rng_state(cpu)
        if self._device_module is not None:
            self._device_module.set_rng_state(device)
        random.setstate(python)
        if self._numpy_random is not None:
            self._numpy_random.set_state(self._numpy_numbers)

    def _restore_scaler(self) -> None:
        scaler = self._scaler
        if scaler is None or scaler._scale is None:
            return
        if id(scaler._scale) not in self._tensors:
            scaler._scale.fill_(scaler._init_scale)
            scaler._growth_tracker.fill_(scaler._init_growth_tracker)


class _FirstValues(dict[str, Any]):
    """The state of one parameter, made in this step: notes what was first assigned."""

    def __init__(self) -> None:
        super().__init__()
        self.first: dict[str, Any] = {}

    def __setitem__(self, key: str, value: Any) -> None:
        if key not in self.first:
            self.first[key] = value.detach().clone() if isinstance(value, Tensor) else value
        super().__setitem__(key, value)


class _OptimizerState:
    """Hyper-parameters and state of one optimizer."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._groups = [
            {k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups
        ]
        self._tensor_options = [
            (v, v.detach().clone())
            for group in self._groups
            for v in group.values()
            if isinstance(v, Tensor)
        ]
        self._before = {
            param: {
                k: (v, v.detach().clone() if isinstance(v, Tensor) else v)
                for k, v in values.items()
            }
            for param, values in optimizer.state.items()
        }
        # What the optimizer first assigned to state that it has made since.
        self._first: dict[Any, dict[str, Any]] = {}
        state: Any = optimizer.state
        if isinstance(state, defaultdict):
            state.default_factory = _FirstValues

    def restore(self) -> None:
        optimizer = self._optimizer
        for group, before in zip(optimizer.param_groups, self._groups, strict=True):
            group.update(before)
        for tensor, value in self._tensor_options:
            tensor.data.copy_(value)
        for param, values in list(optimizer.state.items()):
            before_values = self._before.get(param)
            if before_values is None:
                if isinstance(values, _FirstValues):
                    self._first[param] = values.first
                    values = optimizer.state[param] = dict(values)
                self._reset_new(param, values)
            else:
                for key, (value, copy) in before_values.items():
                    if isinstance(value, Tensor):
                        value.data.copy_(copy)
                    values[key] = value
        state: Any = optimizer.state
        if isinstance(state, defaultdict):
            state.default_factory = dict

    def _reset_new(self, param: Any, values: dict[str, Any]) -> None:
        """Puts state that was made in warm-up to what it was before the first update."""
        optimizer = self._optimizer
        first = self._first.get(param)
        if first is None or (
            isinstance(optimizer, SGD) and any(g["dampening"] for g in optimizer.param_groups)
        ):
            raise RuntimeError(
                f"expected the state of {type(optimizer).__name__} to exist before its first step "
                "in a graph, or to be one that can be put back to what it was, found neither. Run "
                "one step eagerly before make_graphed_step."
            )
        if isinstance(optimizer, SGD):
            # Its first momentum is the gradient itself; a momentum of zeros comes to the same.
            first = {key: None for key in first}
        for key, value in first.items():
            current = values[key]
            if isinstance(current, Tensor):
                if value is None:
                    current.data.zero_()
                else:
                    current.data.copy_(value)
            else:
                values[key] = value
