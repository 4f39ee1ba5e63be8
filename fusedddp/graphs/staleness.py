"""What a graph has baked in by address or by value, and whether it still holds.

Taken at the capture and again before each replay; both are flat lists that compare fast.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from fusedddp.graphs.participants import SCHEDULER_KEYS, Participants

_SCALER_SETTINGS = ("_enabled", "_growth_factor", "_backoff_factor", "_growth_interval")


class Bindings:
    """What a graph depends on.

    Args:
        participants: what the captured step trains with.
    """

    def __init__(self, participants: Participants) -> None:
        self._participants = participants
        self._dicts = [
            values
            for module in participants.modules
            for values in (module._parameters, module._buffers, module._modules)
            if values
        ]
        self._values, self._kept = self._take()
        # Tensors among the hyper-parameters: where each is found, and what it is.
        self._tensor_options = [
            (optimizer, index, key, value)
            for optimizer in participants.optimizers
            for index, group in enumerate(optimizer.param_groups)
            for key, value in group.items()
            if isinstance(value, Tensor) and key not in SCHEDULER_KEYS
        ]
        self._option_versions = [value._version for *_, value in self._tensor_options]

    def _take(self) -> tuple[dict[str, list[Any]], list[Any]]:
        """What there is now by name; objects whose `id` counts, to be kept alive with it."""
        world = self._participants
        members = list(chain.from_iterable([values.values() for values in self._dicts]))
        states = [optimizer.state for optimizer in world.optimizers]
        state_values = list(
            chain.from_iterable(
                chain.from_iterable([v.values() for v in s.values()] for s in states)
            )
        )
        wrapper_parts: list[Any] = []
        for wrapper in world.wrappers:
            rounds = wrapper.reducer.rounds
            wrapper_parts += [
                wrapper.reducer, wrapper.process_group, rounds.comm_hook, rounds.plan
            ]  # fmt: skip
        options = list(chain.from_iterable(_options(o) for o in world.optimizers))
        scaler = world.scaler
        scale = [] if scaler is None else [scaler._scale, scaler._growth_tracker]
        values = {
            "parameters": [*map(Tensor.data_ptr, world.params)],
            "buffers": [*map(Tensor.data_ptr, world.buffers)],
            "members of the modules": [*map(id, members)],
            "hyper-parameters": [id(v) if isinstance(v, Tensor) else v for v in options],
            "state of the optimizer": [*map(id, states), *map(id, state_values)],
            "wrapper": [
                *map(id, wrapper_parts),
                *[w.reducer.rounds.collective.divide_factor for w in world.wrappers],
            ],
            "scaler": [
                *map(id, scale),
                *([] if scaler is None else [getattr(scaler, k, None) for k in _SCALER_SETTINGS]),
            ],
        }
        return values, [members, states, state_values, wrapper_parts, options, scale]

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

    def find_change(self) -> str | None:
        """What is not as it was, in words; None if nothing is."""
        now, _ = self._take()
        if now == self._values:
            return None
        return next(self._describe(now))

    def _describe(self, now: dict[str, list[Any]]) -> Iterator[str]:
        for name, before in self._values.items():
            if now[name] == before:
                continue
            if name == "hyper-parameters":
                yield from self._describe_options(before, now[name])
            yield {
                "parameters": "a parameter was moved to other memory",
                "buffers": "a buffer was moved to other memory",
                "members of the modules": "a parameter, buffer or submodule was replaced",
                "hyper-parameters": "the hyper-parameters of an optimizer changed",
                "state of the optimizer": "the state of an optimizer was replaced",
                "wrapper": "the wrapper has another process group, buckets or communication hook",
                "scaler": "the gradient scaler was replaced or set differently",
            }[name]

    def _describe_options(self, before: list[Any], now: list[Any]) -> Iterator[str]:
        keys = [
            key
            for optimizer in self._participants.optimizers
            for group in optimizer.param_groups
            for key in [None, *[k for k in group if k != "params" and k not in SCHEDULER_KEYS]]
        ]
        if len(keys) == len(before) == len(now):
            for key, was, is_ in zip(keys, before, now, strict=True):
                if was != is_:
                    what = key or "the list of parameters"
                    yield f"{what} of an optimizer was {was} and is {is_}"

    def find_change_inside(self) -> str | None:
        """What the captured step itself has changed since, and would change once more each time."""
        change = self.find_change()
        if change is not None:
            return change
        for (*_, key, value), version in zip(
            self._tensor_options, self._option_versions, strict=True
        ):
            if value._version != version:
                return f"{key} of an optimizer was written, by a scheduler perhaps"
        return None


def _options(optimizer: Any) -> Iterator[Any]:
    for group in optimizer.param_groups:
        yield tuple(map(id, group["params"]))
        for key, value in group.items():
            if key != "params" and key not in SCHEDULER_KEYS:
                yield value
