"""Captures a function at one moment: its code and the values that it takes from outside, never its name.

A lambda in a loop is created again in every round and is still the same function; with another number in its closure,
it is another function. Tensors count by their types and shapes, because their data is read at every call. A captured
function can be rebuilt as it was, even if its closure and its globals have changed. Gradients run the rebuilt function.
"""

from __future__ import annotations

import builtins
import functools
import itertools
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .reads import Path, reads

#: Types whose values never change; not their subclasses, which may have other attributes.
_PLAIN = {
    int, float, bool, complex, str, bytes, type(None), type(...), torch.dtype, torch.device, torch.layout,
    torch.memory_format,
}  # fmt: skip
#: Packages whose functions and classes do not change while a program runs.
_LIBRARIES = ("torch", "gemmery", "math", "operator", "functools", "builtins", "numpy", "_operator")
#: Functions of these packages whose result depends on more than their arguments.
_CHANGING = (
    torch.is_grad_enabled, torch.is_inference_mode_enabled, torch.is_autocast_enabled, torch.get_autocast_dtype,
    torch.get_default_dtype, torch.get_default_device, torch.are_deterministic_algorithms_enabled,
    torch.get_float32_matmul_precision, torch.initial_seed, torch.get_rng_state,
    globals, locals, vars, dir, eval, exec, compile, __import__, open, input,
)  # fmt: skip
_MISSING = object()
_numbers = itertools.count()

#: Recreates a value with other tensors in its places; `made` are earlier functions, by number.
Build = Callable[[Sequence[Any], dict[int, Any]], Any]


@dataclass(frozen=True, slots=True)
class Captured:
    """A function with the values that it captures.

    Attributes:
        key: equal for functions that do the same, tensors aside; None if that can't be known, because the function
            uses objects that may change.
        tensors: those it takes from outside, in the order in which they are met.
        count: how many these are.
        build: see `rebuild`.
        steps: where each thing was found, and what it is; of a function that has a key.
        number: tells it from all others in this process.
        names: what the function calls each of the tensors, such as "shift" or "config.shift"; for messages.
    """

    key: Any
    tensors: tuple[Tensor, ...]
    count: int
    build: Build
    steps: tuple[tuple[Any, Any, Any], ...]
    number: int
    names: tuple[str, ...]

    def rebuild(self, tensors: Sequence[Any]) -> Callable[..., Any]:
        """The function as it was when it was captured, with other tensors in their places.

        In a function without a key, objects that may change have their present state.
        """
        made: Callable[..., Any] = self.build(tensors, {})
        return made

    def is_unchanged(self) -> bool:
        """Whether everything outside is the same object as before; False for a function without a key."""
        if self.key is None:
            return False
        try:
            for owner, name, value in self.steps:
                kind = type(owner)
                if kind is types.CellType:
                    found = owner.cell_contents
                elif kind is dict:
                    found = owner.get(name, _MISSING)
                else:
                    found = getattr(owner, name)
                if found is not value:
                    return False
        except (ValueError, AttributeError):
            return False  # a cell was emptied, an attribute deleted
        return True

    def without_tensors(self) -> Captured:
        """The same, without keeping tensors alive."""
        return replace(self, tensors=(), steps=())


def capture(function: Callable[..., Any]) -> Captured:
    """Captures a function with its present outside values; see `Captured`.

    Raises:
        TypeError: it is not a Python function, a partial of one, or an object that is called like one.
    """
    if isinstance(function, type):
        name = function.__name__
        raise TypeError(
            f"epilogue is the class {name}; it must be a function or an instance, such as {name}()"
        )
    if not callable(function):
        hint = ", such as gemmery.epilogues.gelu" if isinstance(function, str) else ""
        raise TypeError(f"epilogue is a {type(function).__name__}; it must be a function{hint}")
    walk = _Walk()
    key, build = walk.value(function)
    steps = () if key is None else tuple(walk.steps)
    tensors = tuple(walk.tensors)
    return Captured(key, tensors, len(tensors), build, steps, next(_numbers), tuple(walk.names))


def value_key(value: Any) -> Any:
    """A hashable stand-in for an argument that is neither a tensor nor a number; None if it may change unseen."""
    walk = _Walk()
    key, _ = walk.value(value)
    return None if walk.tensors else key


class _Walk:
    """Collects the values that a function can reach."""

    def __init__(self) -> None:
        self.tensors: list[Tensor] = []
        self.names: list[str] = []
        self.steps: list[tuple[Any, Any, Any]] = []
        self._numbers: dict[int, int] = {}

    def value(self, value: Any, name: str = "") -> tuple[Any, Build]:
        """A hashable stand-in for a value, None if its meaning may change unseen, and a function that recreates it.

        Args:
            name: the name of the value in the user's code.
        """
        kind = type(value)
        if kind in _PLAIN:
            # Zeros differ in their sign and True is 1.
            return (kind, repr(value) if kind in (float, complex) else value), _same(value)
        if isinstance(value, np.generic) and kind.__module__ == "numpy":
            return (kind, value.tobytes()), _same(value)
        if isinstance(value, Tensor):
            return self._tensor(value, name)
        if kind is types.FunctionType and not _of_library(value):
            return self._function(value)
        if kind is functools.partial:
            return self._partial(value)
        if kind in (tuple, torch.Size):
            keys, builds = self._values(value, [f"{name}[{i}]" for i in range(len(value))])
            return keys and (kind, keys), lambda tensors, made: kind(b(tensors, made) for b in builds)
        inner = getattr(value, "__gemmery_epilogue__", None)
        if inner is not None:
            return self.value(inner)
        return (("static", _Same(value)) if _is_static(value) else None), _same(value)

    def _values(self, values: Sequence[Any], names: Sequence[str]) -> tuple[Any, list[Build]]:
        found = [self.value(x, name) for x, name in zip(values, names, strict=True)]
        keys = tuple([key for key, _ in found])
        # A tuple in a tuple, so that an empty one is not mistaken for None.
        return (None if None in keys else (keys,)), [build for _, build in found]

    def _tensor(self, value: Tensor, name: str) -> tuple[Any, Build]:
        if not any(value is known for known in self.tensors):
            self.tensors.append(value)
            self.names.append(name)
        place = next(i for i, known in enumerate(self.tensors) if known is value)
        return ("tensor", place), lambda tensors, made: tensors[place]

    def _partial(self, value: functools.partial[Any]) -> tuple[Any, Build]:
        names = sorted(value.keywords)
        count = 1 + len(value.args)
        called = ["func", *[f"partial.args[{i}]" for i in range(len(value.args))], *names]
        keys, builds = self._values(
            (value.func, *value.args, *[value.keywords[name] for name in names]), called
        )
        self.steps += [(value.keywords, name, value.keywords[name]) for name in names]

        def build(tensors: Sequence[Any], made: dict[int, Any]) -> Any:
            function, *rest = [each(tensors, made) for each in builds]
            keywords = dict(zip(names, rest[count - 1 :], strict=True))
            return functools.partial(function, *rest[: count - 1], **keywords)

        return keys and ("partial", tuple(names), keys), build

    def _function(self, function: types.FunctionType) -> tuple[Any, Build]:
        if id(function) in self._numbers:
            number = self._numbers[id(function)]
            return ("again", number), lambda tensors, made: made[number]
        number = self._numbers[id(function)] = len(self._numbers)
        found = reads(function.__code__)
        places: dict[tuple[str, str], _Place] = {}
        parts: list[Any] = []
        for path in found.paths:
            taken, key, build = self._read(function, path)
            parts.append((path, key))
            places.setdefault((path.kind, path.name), _Place()).put(taken, build)
        defaults, of_defaults = self._defaults(function)
        settled = found.complete and defaults is not None and all(key is not None for _, key in parts)
        key = (function.__code__, tuple(parts), defaults) if settled else None
        return key, _builder(number, function, places, of_defaults, settled)

    def _defaults(self, function: types.FunctionType) -> tuple[Any, Build]:
        """A key for a function's default values, and a function that recreates them: (positional, by name)."""
        given, named = function.__defaults__ or (), function.__kwdefaults__ or {}
        self.steps += [(function, name, getattr(function, name)) for name in _OWN]
        self.steps += [(named, name, value) for name, value in named.items()]
        code = function.__code__
        called = code.co_varnames[code.co_argcount - len(given) : code.co_argcount]
        keys, builds = self._values((*given, *named.values()), (*called, *named))

        def build(tensors: Sequence[Any], made: dict[int, Any]) -> Any:
            values = [each(tensors, made) for each in builds]
            return tuple(values[: len(given)]), dict(zip(named, values[len(given) :], strict=True))

        return keys and (len(given), tuple(named), keys), build

    def _read(self, function: types.FunctionType, path: Path) -> tuple[tuple[str, ...], Any, Build]:
        """Follows a path to its value; returns the attributes that were taken, the value's key and its build."""
        value = self._root(function, path)
        if value is _MISSING:
            # The function fails on it, or never comes there; until it is assigned.
            return (), None if path.kind == "cell" else ("missing",), _same(value)
        taken: list[str] = []
        for name in path.attributes:
            if not _is_owner(value):
                break
            inner = getattr(value, name, _MISSING)
            if inner is _MISSING:
                return (), None, _same(value)
            self.steps.append((value, name, inner))
            taken.append(name)
            value = inner
        return tuple(taken), *self.value(value, ".".join((path.name, *taken)))

    def _root(self, function: types.FunctionType, path: Path) -> Any:
        if path.kind == "cell":
            cell = (function.__closure__ or ())[function.__code__.co_freevars.index(path.name)]
            try:
                value = cell.cell_contents
            except ValueError:
                return _MISSING
            self.steps.append((cell, None, value))
            return value
        names = function.__globals__
        value = names.get(path.name, _MISSING)
        self.steps.append((names, path.name, value))
        if value is _MISSING:
            names = _builtins(function)
            value = names.get(path.name, _MISSING)
            self.steps.append((names, path.name, value))
        return value


#: A function's code and defaults.
_OWN = ("__code__", "__defaults__", "__kwdefaults__")


class _Place:
    """The content of a cell or a global: a value, or an object of which attributes are read."""

    def __init__(self) -> None:
        self.build: Build | None = None
        self.attributes: dict[str, _Place] = {}

    def put(self, attributes: tuple[str, ...], build: Build) -> None:
        """Set the value at the end of some attributes."""
        if attributes:
            self.attributes.setdefault(attributes[0], _Place()).put(attributes[1:], build)
        else:
            self.build = build

    def make(self, tensors: Sequence[Any], made: dict[int, Any]) -> Any:
        """The value; an object with nothing but the attributes that are read, if nothing else of it is used."""
        if self.build is not None:
            return self.build(tensors, made)
        return types.SimpleNamespace(**{name: x.make(tensors, made) for name, x in self.attributes.items()})


def _builder(
    number: int, function: types.FunctionType, places: dict[tuple[str, str], _Place], defaults: Build, settled: bool
) -> Build:  # fmt: skip
    """Returns a build of a function, with the values of its cells, globals and defaults that were found."""
    code, name, qualified = function.__code__, function.__name__, function.__qualname__
    surroundings = {"__builtins__": _builtins(function), "__name__": function.__globals__.get("__name__")}
    # The use that a function without a key makes of its module is unknown, so its identity includes the whole module.
    origin = None if settled else function

    def build(tensors: Sequence[Any], made: dict[int, Any]) -> Any:
        if number in made:
            return made[number]
        names = dict(surroundings) if origin is None else dict(origin.__globals__)
        cells = {x: types.CellType() for x in code.co_freevars}
        if origin is not None:
            cells |= dict(zip(code.co_freevars, map(_copied, origin.__closure__ or ()), strict=True))
        again = types.FunctionType(code, names, name, None, tuple(cells.values()))
        again.__qualname__ = qualified
        made[number] = again
        again.__defaults__, again.__kwdefaults__ = defaults(tensors, made)
        for (kind, place), found in places.items():
            value = found.make(tensors, made)
            if value is _MISSING:
                continue
            if kind == "cell":
                cells[place].cell_contents = value
            else:
                names[place] = value
        return again

    return build


def _copied(cell: types.CellType) -> types.CellType:
    try:
        return types.CellType(cell.cell_contents)
    except ValueError:
        return types.CellType()


def _builtins(function: types.FunctionType) -> dict[str, Any]:
    found = function.__globals__.get("__builtins__", builtins)
    names: dict[str, Any] = found.__dict__ if isinstance(found, types.ModuleType) else found
    return names


def _same(value: Any) -> Build:
    return lambda tensors, made: value


class _Same:
    """An object as a key that equals only itself."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and other.value is self.value

    def __hash__(self) -> int:
        return id(self.value)


# ---------------------------------------------------------------------------------------------------------------------
# What may change


def _is_owner(value: Any) -> bool:
    """Whether a path continues in a value: reading an attribute of it runs no user code."""
    if isinstance(value, tuple):
        return hasattr(value, "_fields")
    return isinstance(value, types.ModuleType | type | types.FunctionType)


def _of_library(value: Any) -> bool:
    """Whether an object belongs to a package that does not change; not a function that a call has created."""
    if isinstance(value, types.FunctionType):
        # Wrappers take on the name of the wrapped function, but not the file of its code.
        module, name = value.__globals__.get("__name__", ""), value.__code__.co_qualname
    elif isinstance(value, types.ModuleType):
        module, name = value.__name__, ""
    else:
        module, name = getattr(value, "__module__", ""), getattr(value, "__qualname__", "")
    return "<locals>" not in str(name) and str(module).split(".")[0] in _LIBRARIES


def _is_static(value: Any) -> bool:
    """Whether an object means the same as long as it lives: a library's modules, classes, functions and operators."""
    if isinstance(value, types.ModuleType):
        return _of_library(value)
    if not callable(value) or any(value is x for x in _CHANGING):
        return False
    if isinstance(value, types.BuiltinFunctionType):
        # A method of an object has the object's state.
        owner = value.__self__
        return _of_library(value) and (owner is None or isinstance(owner, types.ModuleType | type))
    if isinstance(value, types.MethodDescriptorType | types.WrapperDescriptorType):
        return _of_library(value.__objclass__)
    return _of_library(value) and not isinstance(value, types.MethodType | torch.nn.Module)
