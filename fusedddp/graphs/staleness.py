"""What a graph has baked in by address or by value, and whether it still holds.

Taken at the capture and again before each replay. The latter is on the host's way to the next step,
so long lists are made and compared in C (`map`, `itemgetter`), and put into words only where they
differ.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Module

from fusedddp.graphs.fields import PLAIN, Fields, are_same
from fusedddp.graphs.participants import SCHEDULER_KEYS, Participants
from fusedddp.graphs.variables import Variables, changed_names, find_variables
from fusedddp.module import FusedDDP

_grad_hooks = operator.attrgetter("_backward_hooks")
_accumulated_hooks = operator.attrgetter("_post_accumulate_grad_hooks")
_SCALER_SETTINGS = ("_enabled", "_growth_factor", "_backoff_factor", "_growth_interval")


class Stale(NamedTuple):
    """Something that is not as it was.

    Attributes:
        what: that, in words.
        remedy: what to do where it changes all the time.
    """

    what: str
    remedy: str = "Leave it as it is between calls."


_REMEDY_OPTION = (
    "Give the optimizer a tensor lr, as in AdamW(params, lr=torch.tensor(1e-3, device=...), "
    "capturable=True), which schedulers write in place, and leave its other options as they are "
    "(with OneCycleLR by cycle_momentum=False)."
)
_REMEDY_NUMBER = "Leave it as it is, or make it a buffer that is written in place."
_REMEDY_VARIABLE = (
    "Move what is only for the log out of the step, and pass what changes as an argument: as a "
    "tensor, if it changes from step to step."
)


class _Part(NamedTuple):
    """Things of one kind that a graph depends on.

    Attributes:
        take: gives them as they are now. LookupError stands for a change.
        is_same: compares two of these lists.
        change: what to say if they differ.
    """

    take: Callable[[], list[Any]]
    is_same: Callable[[list[Any], list[Any]], bool]
    change: str


class Bindings:
    """What a graph depends on.

    Args:
        participants: what the captured step trains with.
        step: that step.
        before: the variables that it reads, as they were before its first run.
    """

    def __init__(
        self,
        participants: Participants,
        step: Callable[..., Any],
        before: Iterable[Variables] = (),
    ) -> None:
        self._participants = participants
        # What the step itself sets, a counter or a cache perhaps, is nobody's setting.
        own = changed_names(before)
        self._variables = [
            each.without(own.get(each.key, set()))
            for each in find_variables(step, participants.modules)
        ]
        self._members: list[dict[str, Any]] = [
            values
            for module in participants.modules
            for values in (module._parameters, module._buffers, module._modules)
            if values
        ]
        self._hooks: list[dict[int, Any]] = [
            hooks
            for module in participants.modules
            for hooks in (
                module._forward_hooks,
                module._forward_pre_hooks,
                module._backward_hooks,
                module._backward_pre_hooks,
            )
        ]
        # Ours are among them, in the same dict.
        self._hooks += filter(None, map(_accumulated_hooks, participants.params))
        # Of wrappers other things count, see below.
        self._watch_numbers(
            (module, Fields(module.__dict__, _plain_attributes(module)))
            for module in participants.modules
            if not isinstance(module, FusedDDP)
        )
        self._options = [
            [Fields(group, _option_keys(group)) for group in optimizer.param_groups]
            for optimizer in participants.optimizers
        ]
        equal = operator.eq
        self._parts = [
            _Part(self._take_params, equal, "a parameter was moved to other memory"),
            _Part(self._take_buffers, equal, "a buffer was moved to other memory"),
            _Part(self._take_members, are_same, "a parameter, buffer or submodule was replaced"),
            _Part(self._take_hooks, equal, "hooks on modules or parameters came or went"),
            _Part(self._take_states, are_same, "the state of an optimizer was replaced"),
            _Part(self._take_trained, are_same, "an optimizer trains other parameters"),
            _Part(
                self._take_wrappers,
                are_same,
                "the wrapper has another process group, buckets or communication hook",
            ),
            _Part(self._take_scalers, are_same, "the gradient scaler was replaced"),
            _Part(self._take_settings, equal, "the gradient scaler was set differently"),
        ]
        # Kept alive, so that nothing new is taken for what it took the place of.
        self._kept = [part.take() for part in self._parts]
        # Tensors among the hyper-parameters: where each is found, and what it is.
        self._tensor_options = [
            (optimizer, index, key, value)
            for optimizer in participants.optimizers
            for index, group in enumerate(optimizer.param_groups)
            for key, value in group.items()
            if isinstance(value, Tensor) and key not in SCHEDULER_KEYS
        ]
        self._option_versions = [value._version for *_, value in self._tensor_options]

    def _watch_numbers(self, numbers: Iterable[tuple[Module, Fields]]) -> None:
        self._numbers = list(numbers)
        # The same in a form that is compared faster.
        self._number_getters = [(each.get, module.__dict__) for module, each in self._numbers]
        self._kept_numbers = [each.kept for _, each in self._numbers]

    # -- what there is now -----------------------------------------------------------------------

    def _take_params(self) -> list[Any]:
        return [*map(Tensor.data_ptr, self._participants.params)]

    def _take_buffers(self) -> list[Any]:
        return [*map(Tensor.data_ptr, self._participants.buffers)]

    def _take_members(self) -> list[Any]:
        return [*chain.from_iterable(map(dict.values, self._members))]

    def _take_hooks(self) -> list[Any]:
        found = map(_grad_hooks, self._participants.params)  # None where there never was one
        return [sum(map(len, self._hooks)), sum(map(len, filter(None, found)))]

    def _take_states(self) -> list[Any]:
        states = [optimizer.state for optimizer in self._participants.optimizers]
        of_params = [*chain.from_iterable(map(dict.values, states))]
        try:
            return [*states, *chain.from_iterable(map(dict.values, of_params))]
        except TypeError:  # an optimizer that keeps other things than a dict for each parameter
            return [*states, *of_params]

    def _take_trained(self) -> list[Any]:
        groups = [group for o in self._participants.optimizers for group in o.param_groups]
        return [*chain.from_iterable(group["params"] for group in groups)]

    def _take_wrappers(self) -> list[Any]:
        found: list[Any] = []
        for wrapper in self._participants.wrappers:
            reducer = wrapper.reducer
            found += [reducer, wrapper.process_group, reducer.rounds.comm_hook, reducer.plan]
        return found

    def _take_scalers(self) -> list[Any]:
        scalers = self._participants.scalers
        return [t for scaler in scalers for t in (scaler._scale, scaler._growth_tracker)]

    def _take_settings(self) -> list[Any]:
        scalers = self._participants.scalers
        settings = [getattr(scaler, name) for scaler in scalers for name in _SCALER_SETTINGS]
        wrappers = self._participants.wrappers
        return [*settings, *[w.reducer.rounds.collective.divide_factor for w in wrappers]]

    def tensors(self) -> list[Tensor]:
        """Tensors that the step finds by itself."""
        found = [t for each in self._variables for t in each.tensors().values()]
        return [*found, *self._participants.params, *self._participants.buffers]

    # -- between calls ---------------------------------------------------------------------------

    def renew(self) -> None:
        """Puts tensors back whose place among the hyper-parameters was taken by another value.

        `group["lr"] = value` means what it says: the tensor that the graph reads gets the value.
        """
        for optimizer, index, key, tensor in self._tensor_options:
            groups = optimizer.param_groups
            if index >= len(groups):
                return
            value = groups[index].get(key)
            if value is tensor:
                continue
            if isinstance(value, (int, float)) and not isinstance(value, bool):
                tensor.fill_(value)
            elif isinstance(value, Tensor) and value.numel() == tensor.numel() == 1:
                with torch.no_grad():
                    tensor.copy_(value.reshape(tensor.shape))
            else:
                continue
            groups[index][key] = tensor

    def find_change(self) -> Stale | None:
        """What is not as it was; None if nothing is."""
        for part, kept in zip(self._parts, self._kept, strict=True):
            if not part.is_same(part.take(), kept):
                return Stale(part.change)
        return (
            self._find_changed_option()
            or self._find_changed_number()
            or self._find_changed_variable()
        )

    def _find_changed_option(self) -> Stale | None:
        for optimizer, fields in zip(self._participants.optimizers, self._options, strict=True):
            groups = optimizer.param_groups
            if len(groups) != len(fields):
                return Stale("an optimizer has another number of parameter groups")
            for each, group in zip(fields, groups, strict=True):
                change = each.find_change(group)
                if change is not None:
                    what = f"{change.key} {change.what} in {type(optimizer).__name__}"
                    return Stale(what, _REMEDY_OPTION)
        return None

    def _find_changed_number(self) -> Stale | None:
        try:
            if [get(values) for get, values in self._number_getters] == self._kept_numbers:
                return None
        except KeyError:
            pass  # one is missing
        for module, each in self._numbers:
            change = each.find_change(module.__dict__)
            if change is not None:
                what = f"{change.key} {change.what} in {type(module).__name__}"
                return Stale(what, _REMEDY_NUMBER)
        return None

    def _find_changed_variable(self) -> Stale | None:
        for each in self._variables:
            change = each.find_change()
            if change is not None:
                return Stale(change, _REMEDY_VARIABLE)
        return None

    def find_change_inside(self) -> str | None:
        """What the captured step itself has changed since, and would change once more each time."""
        self._variables = [each.without_changed() for each in self._variables]
        self._watch_numbers((m, each.without_changed(m.__dict__)) for m, each in self._numbers)
        change = self.find_change()
        if change is not None:
            return change.what
        for (*_, key, value), version in zip(
            self._tensor_options, self._option_versions, strict=True
        ):
            if value._version != version:
                return f"{key} of an optimizer was written, by a scheduler perhaps"
        return None


def _option_keys(group: dict[str, Any]) -> list[str]:
    return [key for key in group if key != "params" and key not in SCHEDULER_KEYS]


def _plain_attributes(module: Module) -> list[str]:
    """The attributes of a module that are plain values, such as the rate of a dropout."""
    names = [key for key, value in module.__dict__.items() if isinstance(value, PLAIN)]
    return [name for name in names if name != "training"]  # leads to another graph
