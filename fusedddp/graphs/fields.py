"""Values in dicts that a graph has baked in, kept to be compared before each replay."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

PLAIN = (bool, int, float, complex, str, type(None))


class Change(NamedTuple):
    """A value that is another by now.

    Attributes:
        key: its key.
        what: the two values, in words.
    """

    key: str
    what: str


class Fields:
    """Some values of a dict.

    Attributes:
        keys: theirs.
        get: gives them as they are in a dict; raises KeyError if one is missing.
        kept: what they were.
    """

    def __init__(self, values: Mapping[str, Any], keys: Sequence[str]) -> None:
        self.keys = list(keys)
        # One key more than there are, since itemgetter gives a tuple only for several.
        self.get: Callable[[Any], tuple[Any, ...]] = (
            operator.itemgetter(*keys, *keys[:1]) if keys else lambda _: ()
        )
        self.kept = self.get(values)

    def without_changed(self, values: Mapping[str, Any]) -> Fields:
        """The same but for those that have changed."""
        same = [
            key
            for key, was in zip(self.keys, self.kept, strict=False)
            if key in values and is_equal(was, values[key])
        ]
        return Fields(values, same)

    def find_change(self, values: Mapping[str, Any]) -> Change | None:
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
    """Whether two values are the same to a step: plain ones by value, all others by identity."""
    if isinstance(a, (tuple, list)) and isinstance(b, (tuple, list)):
        return len(a) == len(b) and all(map(is_equal, a, b))
    return a is b or (isinstance(a, PLAIN) and isinstance(b, PLAIN) and a == b)


def _shown(value: Any) -> str:
    """A value in a message; a tensor on a device is not read for it."""
    if isinstance(value, PLAIN):
        return repr(value)
    if isinstance(value, (tuple, list)) and all(isinstance(item, PLAIN) for item in value):
        return repr(value)
    return f"a {type(value).__name__}"
