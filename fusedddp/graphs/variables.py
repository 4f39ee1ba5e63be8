"""Python variables that a step reads; a replay would go on with what they were at the capture.

Found in its code: globals, free variables, and arguments that are settled before (``self``, those
of a partial, defaults); their attributes and items with constant keys, theirs, and so on; and the
same for functions of the user's own files that it finds on the way. What the code reaches in other
ways (``getattr``, a key that is computed, another name for the same object) is not found.
"""

from __future__ import annotations

import contextlib
import dis
import functools
import inspect
import sys
from collections.abc import Callable, Iterable, Iterator
from types import (
    BuiltinFunctionType,
    CodeType,
    FunctionType,
    MemberDescriptorType,
    MethodType,
    ModuleType,
)
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.nn import Module
from torch.optim.optimizer import Optimizer

from fusedddp.capture_places import is_users_own
from fusedddp.graphs.fields import PLAIN, VALUES, Fields
from fusedddp.module import FusedDDP

# Gives variables by name, those of the given names at least.
_Read: TypeAlias = Callable[[Iterable[Any]], dict[Any, Any]]
_MISSING: Any = object()
_ATTRIBUTE = ("LOAD_ATTR", "LOAD_METHOD")
_NO_EFFECT = ("EXTENDED_ARG", "NOP", "PUSH_NULL", "PRECALL", "CACHE")
# What is looked at; of other objects only the attributes that are read.
_WANTED = (
    *(*VALUES, tuple, list, dict, set, Tensor, Module, Optimizer, torch.amp.GradScaler),
    *(FunctionType, BuiltinFunctionType, functools.partial),
)


class _Place(NamedTuple):
    """Where a variable is: identity of the namespace, how to read it, name."""

    key: Any
    read: _Read
    name: Any


class Variables(NamedTuple):
    """Variables of one namespace: globals of a file, what a function closes over, an object.

    Attributes:
        key: the identity of the namespace.
        read: gives the namespace as it is now.
        fields: those of its variables that are looked at.
        readers: for each of them the name of a function that reads it.
    """

    key: Any
    read: _Read
    fields: Fields
    readers: dict[Any, str]

    def find_change(self) -> str | None:
        """Which one is another by now, in words; None if none is."""
        change = self.fields.find_change(self.read(self.fields.keys))
        return change and f"{change.key} {change.what}, which {self.readers[change.key]} reads"

    def values(self) -> Iterator[Any]:
        """What they are, and what containers among them hold."""
        for value in self.fields.get(self.read(self.fields.keys)):
            if isinstance(value, dict):
                yield from value.values()
            elif isinstance(value, (tuple, list)):
                yield from value
            else:
                yield value

    def tensors(self) -> dict[Any, Tensor]:
        """Those that are tensors, by name."""
        found = self.read(self.fields.keys)
        return {key: found[key] for key in self.fields.keys if isinstance(found.get(key), Tensor)}

    def without_changed(self) -> Variables:
        """Without those that have another value by now."""
        return self._replace(fields=self.fields.without_changed(self.read(self.fields.keys)))

    def without(self, names: set[Any]) -> Variables:
        """Without those of some names."""
        kept = [key for key in self.fields.keys if key not in names]
        return self._replace(fields=Fields(self.read(kept), kept))


def find_variables(step: Callable[..., Any], modules: Iterable[Module]) -> list[Variables]:
    """The variables that a step, and the forwards of modules, read.

    Args:
        step: what is captured.
        modules: those that it uses; their parameters, buffers, submodules and numbers are left out.
    """
    modules = list(modules)
    search = _Search({id(module) for module in modules})
    search.visit(step)
    for module in modules:
        forward = _attribute(module, "forward")
        search.visit(forward, () if "forward" in vars(module) else (module,))
    return search.found()


def changed_names(variables: Iterable[Variables]) -> dict[Any, set[Any]]:
    """For each namespace the names of those that have another value by now."""
    return {
        each.key: set(each.fields.keys) - set(each.without_changed().fields.keys)
        for each in variables
    }


class _Search:
    """Goes from function to function, and notes what they read."""

    def __init__(self, known_modules: set[int]) -> None:
        self._known_modules = known_modules
        self._seen: set[tuple[Any, ...]] = set()
        self._todo: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = []
        # By the identity of a namespace: how to read it, and names in it with who reads them.
        self._namespaces: dict[Any, tuple[_Read, dict[Any, str]]] = {}

    def visit(self, value: Any, args: tuple[Any, ...] = (), **keywords: Any) -> None:
        """Has looked at what `value` reads when it is called, if it can be.

        Args:
            value: anything.
            args: its first arguments, as far as they are settled.
            keywords: and others.
        """
        self._todo.append((value, args, keywords))

    def found(self) -> list[Variables]:
        while self._todo:  # not recursion: chains of functions may be long
            value, args, keywords = self._todo.pop()
            # Objects may refuse to be looked at (a proxy whose object is gone, say).
            with contextlib.suppress(Exception):
                self._visit(value, args, keywords)
        found = []
        for key, (read, readers) in self._namespaces.items():
            values = read(readers)
            names = [name for name in readers if name in values]
            found.append(Variables(key, read, Fields(values, names), readers))
        return found

    def _visit(self, value: Any, args: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        if isinstance(value, functools.partial):
            self.visit(value.func, (*value.args, *args), **{**value.keywords, **keywords})
        elif isinstance(value, MethodType):
            self.visit(value.__func__, (value.__self__, *args), **keywords)
        elif isinstance(value, FunctionType):
            settled = _settled(value, args, keywords)
            visit = (id(value), *((name, id(each)) for name, each in settled.items()))
            if visit not in self._seen:
                self._seen.add(visit)
                self.visit(getattr(value, "__wrapped__", None), args, **keywords)
                if is_users_own(value.__code__.co_filename):
                    self._visit_function(value, args, settled)
        elif not isinstance(value, (type, Module)):
            call = inspect.getattr_static(type(value), "__call__", None)
            if isinstance(call, FunctionType):
                self.visit(call, (value, *args), **keywords)

    def _visit_function(
        self, function: FunctionType, args: tuple[Any, ...], settled: dict[str, Any]
    ) -> None:
        own = id(function.__globals__), lambda _: function.__globals__
        closed = id(function), lambda _: _closure(function)
        for is_global, name, path in _loads(function.__code__):
            if is_global or name in function.__code__.co_freevars:
                key, read = own if is_global else closed
                value = read(()).get(name, _MISSING)
                self._follow(value, path, [_Place(key, read, name)], function.__name__)
            else:
                self._follow(settled.get(name, _MISSING), path, [None], function.__name__)
        for owner in args[:1]:
            for name in _super_names(function.__code__):
                for cls in type(owner).__mro__[1:]:
                    self.visit(vars(cls).get(name), (owner,))

    def _follow(
        self, value: Any, path: Iterable[tuple[bool, Any]], places: list[_Place | None], reader: str
    ) -> None:
        """Goes along attributes and items, and notes the way to the last that is looked at.

        Args:
            value: the variable that it begins with.
            path: whether it is an item, and the key, for each step.
            places: where that variable is; None if it cannot change.
            reader: who reads it.
        """
        num_noted = int(_is_looked_at(value))
        self.visit(value)
        for is_item, name in path:
            owner = value
            value = _item(owner, name) if is_item else _attribute(owner, name)
            if isinstance(value, (property, classmethod, staticmethod, FunctionType)):
                self._visit_member(owner, name, value)
                if _is_of_users_class(owner):
                    num_noted = len(places)  # another object may do something else
                if name not in getattr(owner, "__dict__", {}):
                    break
            elif value is _MISSING or hasattr(type(value), "__get__"):
                break
            is_known = isinstance(owner, FusedDDP) or (
                id(owner) in self._known_modules
                and (isinstance(value, PLAIN) or name not in vars(owner))
            )
            is_theirs = isinstance(owner, ModuleType) and not _is_users_module(owner)
            if is_known or is_theirs or isinstance(owner, tuple):
                places.append(None)
            else:
                read = functools.partial(_items if is_item else _attributes, owner)
                places.append(_Place((is_item, id(owner)), read, name))
            if _is_looked_at(value):
                num_noted = len(places)
            self.visit(value)
        for place in places[:num_noted]:
            if place is not None:
                readers = self._namespaces.setdefault(place.key, (place.read, {}))[1]
                readers.setdefault(place.name, reader)

    def _visit_member(self, owner: Any, name: str, member: Any) -> None:
        if name in getattr(owner, "__dict__", {}) and not isinstance(owner, type):
            self.visit(member)  # a function that an object keeps, as it is
        elif isinstance(member, property):
            self.visit(member.fget, (owner,))
        elif isinstance(member, FunctionType):
            self.visit(member, (owner,))
        else:
            self.visit(member.__func__, (type(owner),) if isinstance(member, classmethod) else ())


def _settled(
    function: FunctionType, args: tuple[Any, ...], keywords: dict[str, Any]
) -> dict[str, Any]:
    """Parameters of a function whose values are known before it is called, by name."""
    code = function.__code__
    names = code.co_varnames[: code.co_argcount]
    defaults = function.__defaults__ or ()
    found = dict(zip(names[len(names) - len(defaults) :], defaults, strict=True))
    found |= {**(function.__kwdefaults__ or {}), **dict(zip(names, args, strict=False)), **keywords}
    for instruction in dis.get_instructions(code):
        if instruction.opname.startswith(("STORE_FAST", "STORE_DEREF", "DELETE_FAST")):
            stored = instruction.argval
            for name in stored if isinstance(stored, tuple) else (stored,):
                found.pop(name, None)
    return found


def _is_looked_at(value: Any) -> bool:
    return isinstance(value, _WANTED) or (callable(value) and _is_of_users_class(value))


def _is_of_users_class(value: Any) -> bool:
    module = sys.modules.get(type(value).__module__)
    return isinstance(module, ModuleType) and _is_users_module(module)


def _is_users_module(module: ModuleType) -> bool:
    file = getattr(module, "__file__", None)
    return file is not None and is_users_own(file)


def _attribute(owner: Any, name: str) -> Any:
    """An attribute, found without running anything: a property, say, comes as it is."""
    members = getattr(owner, "__dict__", {})
    if name in members:
        return members[name]
    if isinstance(owner, Module):
        for values in (owner._parameters, owner._buffers, owner._modules):
            if name in values:
                return values[name]
    for cls in (owner if isinstance(owner, type) else type(owner)).__mro__:
        if name in vars(cls):
            found = vars(cls)[name]
            is_slot = isinstance(found, MemberDescriptorType)
            return getattr(owner, name, _MISSING) if is_slot else found
    return _MISSING


def _attributes(owner: Any, names: Iterable[str]) -> dict[Any, Any]:
    found = {name: _attribute(owner, name) for name in names}
    return {name: value for name, value in found.items() if value is not _MISSING}


def _item(owner: Any, key: Any) -> Any:
    """An item, found without running what a subclass does instead (a defaultdict makes one)."""
    if isinstance(owner, dict):
        return dict.get(owner, key, _MISSING)
    if type(owner) in (list, tuple) and isinstance(key, int) and -len(owner) <= key < len(owner):
        return owner[key]
    return _MISSING


def _items(owner: Any, keys: Iterable[Any]) -> dict[Any, Any]:
    found = {key: _item(owner, key) for key in keys}
    return {key: value for key, value in found.items() if value is not _MISSING}


def _closure(function: FunctionType) -> dict[Any, Any]:
    """What a function closes over, by name."""
    found = {}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            found[name] = cell.cell_contents
        except ValueError:  # not assigned yet, or deleted
            continue
    return found


def _codes(code: CodeType) -> Iterator[CodeType]:
    """The code of a function, and of functions within."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)


@functools.lru_cache(maxsize=256)
def _super_names(code: CodeType) -> frozenset[str]:
    """What code asks of ``super()``."""
    found = set()
    for each in _codes(code):
        instructions = list(dis.get_instructions(each))
        for index, instruction in enumerate(instructions):
            if instruction.opname.startswith("LOAD_SUPER_ATTR"):
                found.add(instruction.argval)
            elif instruction.argval == "super":
                # Its call comes between, with arguments or without.
                following = instructions[index + 1 : index + 8]
                names = [i.argval for i in following if i.opname in _ATTRIBUTE]
                found.update(names[:1])
    return frozenset(found)


@functools.lru_cache(maxsize=256)
def _loads(code: CodeType) -> list[tuple[bool, str, tuple[tuple[bool, Any], ...]]]:
    """Variables that code reads: whether global, the name, and attributes and items of it."""
    found = []
    for each in _codes(code):
        instructions = [i for i in dis.get_instructions(each) if i.opname not in _NO_EFFECT]
        for index, instruction in enumerate(instructions):
            is_global = instruction.opname.startswith("LOAD_GLOBAL")
            is_free = instruction.opname.startswith("LOAD_DEREF")
            # A function within has locals of its own.
            is_local = instruction.opname.startswith("LOAD_FAST") and each is code
            if is_global or is_free or is_local:
                name = instruction.argval
                # Some versions load two at once, the second of which goes on.
                name = name[-1] if isinstance(name, tuple) else name
                found.append((is_global, name, tuple(_path(instructions, index + 1))))
    return found


def _path(instructions: list[dis.Instruction], index: int) -> Iterator[tuple[bool, Any]]:
    """Attributes and items with constant keys that are read in a row, from an index on."""
    while index + 1 < len(instructions):
        name = instructions[index].opname
        if name in _ATTRIBUTE:
            yield False, instructions[index].argval
            index += 1
        elif name == "LOAD_CONST" and instructions[index + 1].opname == "BINARY_SUBSCR":
            yield True, instructions[index].argval
            index += 2
        else:
            return
