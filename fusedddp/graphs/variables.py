"""Python variables that a step reads; a replay would go on with what they were at the capture.

Found in its code: free variables, globals, attributes of either and of `self`, and the same for
functions of the user's own files that it finds there. Looked at are plain values, tensors,
containers, modules and optimizers. What the step reaches in other ways (an item of a dict, an
attribute of an attribute) is not.
"""

from __future__ import annotations

import dis
import functools
import inspect
from collections.abc import Callable, Iterable, Iterator
from types import CodeType, FunctionType, MethodType
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.nn import Module
from torch.optim.optimizer import Optimizer

from fusedddp.capture_places import is_users_own
from fusedddp.graphs.fields import PLAIN, Fields
from fusedddp.module import FusedDDP

_Read: TypeAlias = Callable[[], dict[str, Any]]
_WANTED = (*PLAIN, Tensor, tuple, list, dict, Module, Optimizer, torch.amp.GradScaler)


class Variables(NamedTuple):
    """Variables of one namespace: globals of a file, what a function closes over, or an object.

    Attributes:
        read: gives the namespace as it is now.
        fields: those of its variables that are looked at.
        readers: for each of them the name of a function that reads it.
    """

    read: _Read
    fields: Fields
    readers: dict[str, str]

    def find_change(self) -> str | None:
        """Which one is another by now, in words; None if none is."""
        change = self.fields.find_change(self.read())
        return change and f"{change.key} {change.what}, which {self.readers[change.key]} reads"

    def values(self) -> Iterator[Any]:
        """What they are, and what containers among them hold."""
        for value in self.fields.get(self.read()):
            if isinstance(value, dict):
                yield from value.values()
            elif isinstance(value, (tuple, list)):
                yield from value
            else:
                yield value

    def without_changed(self) -> Variables:
        return self._replace(fields=self.fields.without_changed(self.read()))


def find_variables(step: Callable[..., Any], modules: Iterable[Module]) -> list[Variables]:
    """The variables that a step, and the forwards of modules, read.

    Args:
        step: what is captured.
        modules: those that it uses.
    """
    search = _Search()
    search.visit(step)
    for forward in dict.fromkeys(type(module).forward for module in modules):
        search.visit(forward)
    return search.found()


class _Search:
    """Goes from function to function, and notes what they read."""

    def __init__(self) -> None:
        self._seen: set[tuple[int, int]] = set()
        # By the identity of a namespace: how to read it, and names in it with who reads them.
        self._namespaces: dict[int, tuple[_Read, dict[str, str]]] = {}

    def found(self) -> list[Variables]:
        return [
            Variables(read, Fields(read(), sorted(readers)), readers)
            for read, readers in self._namespaces.values()
        ]

    def visit(self, value: Any, bound: Any = None) -> None:
        """Looks at what `value` reads when it is called, if it can be.

        Args:
            value: anything.
            bound: its first argument, if it is a function and that is known.
        """
        if isinstance(value, functools.partial):
            for part in (value.func, *value.args, *value.keywords.values()):
                self.visit(part)
        elif isinstance(value, MethodType):
            self.visit(value.__func__, value.__self__)
        elif isinstance(value, FunctionType):
            self.visit(getattr(value, "__wrapped__", None), bound)
            if is_users_own(value.__code__.co_filename):
                self._visit_function(value, bound)
        elif not isinstance(value, (type, Module)):
            call = inspect.getattr_static(type(value), "__call__", None)
            if isinstance(call, FunctionType):
                self.visit(call, value)

    def _visit_function(self, function: FunctionType, bound: Any) -> None:
        code = function.__code__
        if (id(function), id(bound)) in self._seen:
            return
        self._seen.add((id(function), id(bound)))
        itself = {code.co_varnames[0]: bound} if bound is not None else {}
        namespaces: dict[str, _Read] = {
            "global": lambda: function.__globals__,
            "free": functools.partial(_closure, function),
            "local": lambda: itself,
        }
        keys = {"global": id(function.__globals__), "free": id(function), "local": 0}
        for kind, name, attribute in _loads(code):
            values = namespaces[kind]()
            if name not in values:
                continue
            owner = values[name]
            if kind != "local":
                self._note(keys[kind], namespaces[kind], name, function)
            if attribute is not None and not isinstance(owner, FusedDDP):  # see staleness.py
                self._visit_attribute(owner, attribute, function)

    def _visit_attribute(self, owner: Any, name: str, function: FunctionType) -> None:
        members = getattr(owner, "__dict__", {})
        if name in members:
            self._note(id(owner), lambda: members, name, function)
        elif isinstance(getattr(type(owner), name, None), FunctionType):
            self.visit(getattr(owner, name))

    def _note(self, key: int, read: _Read, name: str, function: FunctionType) -> None:
        value = read()[name]
        if isinstance(value, _WANTED):
            self._namespaces.setdefault(key, (read, {}))[1].setdefault(name, function.__name__)
        self.visit(value)


def _closure(function: FunctionType) -> dict[str, Any]:
    """What a function closes over, by name."""
    found = {}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            found[name] = cell.cell_contents
        except ValueError:  # not assigned yet, or deleted
            continue
    return found


def _loads(code: CodeType) -> Iterator[tuple[str, str, str | None]]:
    """Variables that code reads: global, free or local; the name; an attribute asked of it."""
    previous: tuple[str, str] | None = None
    for instruction in dis.get_instructions(code):
        name, value = instruction.opname, instruction.argval
        if previous is not None:
            is_attribute = name in ("LOAD_ATTR", "LOAD_METHOD")
            yield (*previous, value if is_attribute else None)
            previous = None
        if name.startswith("LOAD_GLOBAL"):
            previous = "global", value
        elif name.startswith("LOAD_DEREF"):
            previous = ("free" if value in code.co_freevars else "local"), value
        elif name.startswith("LOAD_FAST"):
            # Some versions load two at once.
            previous = "local", value[-1] if isinstance(value, tuple) else value
    for constant in code.co_consts:
        if isinstance(constant, CodeType):  # a function within; its free variables are ours
            yield from _loads(constant)
