"""Values by key that a graph has baked in, kept to be compared before each replay."""

from __future__ import annotations

import enum
import numbers
import operator
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

PLAIN = (bool, int, float, complex, str, type(None))
# What has a value of its own, and no contents that may change.
VALUES = (
    *(*PLAIN, bytes, range, frozenset, numbers.Number, enum.Enum),  # numbers of NumPy among them
    *(torch.dtype, torch.device),
)
_MAX_SHOWN = 80


class Change(NamedTuple):
    """A value that is another by now.

    Attributes:
        key: its key.
        what: the two values, in words.
    """

    key: Any
    what: str


class Fields:
    """Some values of a mapping.

    Attributes:
        keys: theirs.
        get: gives them as they are in a mapping; raises KeyError if one is missing.
        kept: what they were.
    """

    def __init__(self, values: Mapping[Any, Any], keys: Sequence[Hashable]) -> None:
        self.keys = list(keys)
        # One key more than there are, since itemgetter gives a tuple only for several.
        self.get: Callable[[Any], tuple[Any, ...]] = (
            operator.itemgetter(*keys, *keys[:1]) if keys else lambda _: ()
        )
        self.kept = self.get(values)

    def without_changed(self, values: Mapping[Any, Any]) -> Fields:
        """The same but for those that have changed."""
        same = [
            key
            for key, was in zip(self.keys, self.kept, strict=False)
            if key in values and is_equal(was, values[key])
        ]
        return Fields(values, same)

    def find_change(self, values: Mapping[Any, Any]) -> Change | None:
        """The first of them that is another one in `values`; None if none is."""
        try:
            if are_same(self.get(values), self.kept):
                return None
        except KeyError:
            pass
        for key, was in zip(self.keys, self.kept, strict=False):
            if key not in values:
                return Change(key, f"was {_shown(was)} and is not there any more")
            if not is_equal(was, values[key]):
                return Change(key, f"was {_shown(was)} and is {_shown(values[key])}")
        return None


def are_same(found: Sequence[Any], kept: Sequence[Any]) -> bool:
    """Whether two lists have the same objects."""
    return len(found) == len(kept) and all(map(operator.is_, found, kept))


def is_equal(a: Any, b: Any) -> bool:
    """Whether two things are the same to a step: values if they are equal, all else by identity."""
    if a is b:
        return True
    if isinstance(a, (tuple, list)) and isinstance(b, (tuple, list)):
        return len(a) == len(b) and all(map(is_equal, a, b))
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(is_equal(value, b[key]) for key, value in a.items())
    # 1, 1.0 and True are equal, and not the same; nan is the same, and not equal.
    return isinstance(a, VALUES) and type(a) is type(b) and (a == b or (a != a and b != b))


def _shown(value: Any) -> str:
    """A value in a message; a tensor on a device is not read for it."""
    text = f"a {type(value).__name__}"
    items = value if isinstance(value, (tuple, list)) else (value,)
    if len(items) <= _MAX_SHOWN and all(isinstance(item, VALUES) for item in items):
        text = repr(value)
    return text if len(text) <= _MAX_SHOWN else f"{text[: _MAX_SHOWN - 3]}..."
