"""Training state around warm-up and capture: kept before, put back after, at the same addresses."""

from __future__ import annotations

import contextlib
import random
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, Parameter
from torch.optim import SGD
from torch.optim.optimizer import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

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
        # Memory of these, and the contents of other memory that the step has been seen to write.
        self._storages: set[int] = set()
        self._written: list[tuple[Any, Any]] = []
        # Storages that it has made itself, or that need not be put back.
        self._made: set[int] = set()
        # By identity the storages that it has been seen to write, but for those of gradients.
        self.writes: dict[int, Any] = {}
        self._gradients: list[tuple[Parameter, Tensor | None]] = []
        self._seen: set[int] = set()
        self._buffers: list[tuple[dict[str, Any], dict[str, Any]]] = []
        self._wrappers: list[tuple[FusedDDP, bytes, bool, bool | None]] = []
        self._optimizers: list[_OptimizerState] = []
        self._scalers = [_ScalerState(scaler) for scaler in participants.scalers]
        self._device_module = None if device_type == "cpu" else torch.get_device_module(device_type)
        # Only if it is there already: a step that draws from it has imported it.
        self._numpy_random = sys.modules.get("numpy.random")
        self._random = (
            torch.get_rng_state(),
            self._device_module and self._device_module.get_rng_state(),
            random.getstate(),
            self._numpy_random and self._numpy_random.get_state(),
        )
        for root in participants.roots:
            self.add_module(root)
        for optimizer in participants.optimizers:
            self.add_optimizer(optimizer)

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
            self._storages.update(storage._cdata for storage in _storages(tensor))

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
        """Puts everything back, and leaves state that is new at its first values."""
        for values, before in self._buffers:
            values.update(before)
        for storage, contents in self._written:
            if storage.size() != contents.size():  # the step has resized it
                storage.resize_(contents.size())
            storage.copy_(contents)
        for tensor, value in self._tensors.values():
            tensor.data.copy_(value)  # .data: to autograd nothing has happened
        self.restore_gradients()
        for state in self._optimizers:
            state.restore()
        for scaler_state in self._scalers:
            scaler_state.restore()
        for wrapper, _, syncs_params, pending_forward in self._wrappers:
            wrapper.require_forward_param_sync = syncs_params
            wrapper.reducer.pending_forward = pending_forward
        cpu, device, python, numpy = self._random
        torch.set_rng_state(cpu)
        if self._device_module is not None:
            self._device_module.set_rng_state(device)
        random.setstate(python)
        if self._numpy_random is not None:
            self._numpy_random.set_state(numpy)

    def undo(self) -> None:
        """Puts everything back, and drops state that is new: nothing will be captured."""
        self.restore()
        for optimizer_state in self._optimizers:
            optimizer_state.drop_new()
        for scaler_state in self._scalers:
            scaler_state.drop_new()

    def check_restored(self) -> None:
        """Raises RuntimeError if state was made that `restore` cannot put back."""
        for state in self._optimizers:
            if state.is_lost:
                raise RuntimeError(
                    f"expected the state of {type(state.optimizer).__name__} to exist before its "
                    "first step in a graph, or to be one that can be put back to what it was, "
                    "found neither. Run one step eagerly before make_graphed_step."
                )

    @staticmethod
    def storages_of(tensors: list[Tensor]) -> set[int]:
        """The identities of their storages."""
        return {storage._cdata for storage in _storages(tensors)}

    def keeps(self, tensor: Tensor) -> bool:
        """Whether the memory of `tensor` is put back."""
        known = self._storages | self.writes.keys()
        return any(storage._cdata in known for storage in _storages(tensor))

    def later_writes(self, own: Iterable[Tensor]) -> _FirstWrites:
        """Notes what is written in the body that there was before it, but for `own`."""
        return _FirstWrites(self.storages_of(list(own)), self._storages, [], {})

    def first_writes(self, own: Iterable[Tensor]) -> contextlib.AbstractContextManager[Any]:
        """Keeps, in the body, also what else it writes that there was before it.

        Running means of a loss, say, that a step finds in a closure or an object.

        Args:
            own: what need not be kept.
        """
        gradients = [gradient for _, gradient in self._gradients]
        self._made |= self.storages_of([*own, *(g for g in gradients if g is not None)])
        return _FirstWrites(self._made, self._storages, self._written, self.writes)


# Arguments of normalisations, which write them although their schemas do not say so.
_WRITTEN_ALL_THE_SAME = ("running_mean", "running_var")


class _FirstWrites(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Keeps the contents of memory before it is first written, if it was not made meanwhile.

    Args:
        own: identities of storages that do not matter; those that are made are added.
        kept: and of those that somebody else keeps, as far as that is known at any time.
        written: gets other storages with their contents.
        writes: gets all storages that are written, by identity.
    """

    def __init__(
        self,
        own: set[int],
        kept: set[int],
        written: list[tuple[Any, Any]],
        writes: dict[int, Any],
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._own = own
        self._kept = kept
        self._written = written
        self._writes = writes

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        is_collective = func.namespace == "c10d"  # their schemas do not say what they write
        for argument, value in _arguments(func, args, kwargs):
            alias = argument.alias_info
            is_written = alias is not None and alias.is_write
            if is_written or is_collective or argument.name in _WRITTEN_ALL_THE_SAME:
                for storage in _storages(value):
                    self._note(storage)
        result = func(*args, **kwargs)
        if all(returned.alias_info is None for returned in func._schema.returns):
            self._own.update(storage._cdata for storage in _storages(result))  # made here
        return result

    def has_written(self, tensor: Tensor) -> bool:
        return any(storage._cdata in self._writes for storage in _storages(tensor))

    def _note(self, storage: Any) -> None:
        key = storage._cdata
        if key not in self._own and key not in self._writes:
            self._writes[key] = storage
            if key not in self._kept:
                self._written.append((storage, storage.clone()))


def _arguments(func: Any, args: Any, kwargs: Any) -> Iterator[tuple[Any, Any]]:
    for index, argument in enumerate(func._schema.arguments):
        if index < len(args):
            yield argument, args[index]
        elif argument.name in kwargs:
            yield argument, kwargs[argument.name]


def _storages(value: Any) -> Iterator[Any]:
    for leaf in tree_leaves(value):
        if isinstance(leaf, Tensor) and leaf.layout == torch.strided:
            yield leaf.untyped_storage()


class _ScalerState:
    """The scale of a gradient scaler, and how far it is in a step."""

    def __init__(self, scaler: torch.amp.GradScaler) -> None:
        self._scaler = scaler
        self._tensors = [
            (tensor, tensor.clone())
            for tensor in (scaler._scale, scaler._growth_tracker)
            if tensor is not None
        ]
        self._stages = {key: dict(state) for key, state in scaler._per_optimizer_states.items()}

    def restore(self) -> None:
        scaler = self._scaler
        for tensor, value in self._tensors:
            tensor.copy_(value)
        if not self._tensors and scaler._scale is not None:  # made in warm-up
            assert scaler._growth_tracker is not None
            scaler._scale.fill_(scaler._init_scale)
            scaler._growth_tracker.fill_(scaler._init_growth_tracker)
        scaler._per_optimizer_states.clear()
        scaler._per_optimizer_states.update(self._stages)

    def drop_new(self) -> None:
        if not self._tensors:
            self._scaler._scale = self._scaler._growth_tracker = None


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
    """Hyper-parameters and state of one optimizer.

    Attributes:
        is_lost: whether it has made state that cannot be put back to what it was made with.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self.is_lost = False
        self.optimizer = optimizer
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
        # Others may fill what they have assigned, or derive it from the first gradient.
        self._starts_as_assigned = type(optimizer).__module__.startswith("torch.optim") and not (
            isinstance(optimizer, SGD) and any(g["dampening"] for g in optimizer.param_groups)
        )
        state: Any = optimizer.state
        if isinstance(state, defaultdict):
            state.default_factory = _FirstValues

    def restore(self) -> None:
        """Puts all back; state that is new goes back to what was first assigned, and stays."""
        optimizer = self.optimizer
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
                continue
            self.is_lost |= values.keys() != before_values.keys()
            for key, (value, copy) in before_values.items():
                if isinstance(value, Tensor):
                    value.data.copy_(copy)
                values[key] = value
        state: Any = optimizer.state
        if isinstance(state, defaultdict):
            state.default_factory = dict

    def _reset_new(self, param: Any, values: dict[str, Any]) -> None:
        """Puts state that was made in warm-up to what it was before the first update."""
        first = self._first.get(param, {})
        if not self._starts_as_assigned or first.keys() != values.keys():
            self.is_lost = True
            return
        for key, value in first.items():
            current = values[key]
            if isinstance(self.optimizer, SGD):
                # Its first momentum is the gradient itself; a momentum of zeros comes to the same.
                current.data.zero_()
            elif isinstance(current, Tensor):
                current.data.copy_(value)
            else:
                values[key] = value

    def drop_new(self) -> None:
        """Drops what there was not before."""
        for param, values in list(self.optimizer.state.items()):
            before = self._before.get(param)
            if before is None:
                del self.optimizer.state[param]
                continue
            for key in values.keys() - before.keys():
                del values[key]
