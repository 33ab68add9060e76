"""When two functions are the same epilogue: by their code and what they take from outside, never by their name.

A lambda in a loop is made anew in every round and is still one function; one whose closure has another number in it is
another. Tensors count by what they look like, since their data is read at every call.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

_PLAIN = (int, float, bool, complex, str, bytes, type(None), torch.dtype, torch.device, torch.layout)
#: Packages whose functions do not change while a program runs.
_LIBRARIES = ("torch", "gemmery", "math", "operator", "functools", "builtins", "numpy", "_operator")


@dataclass(frozen=True, slots=True)
class Captured:
    """A function with what it takes from outside.

    Attributes:
        key: equal for functions that do the same, tensors aside; None where that can't be known, because the function
            uses objects that may change.
        tensors: those it takes from outside, in the order in which they are met.
        rebuild: makes the function again with other tensors in their places.
    """

    key: Any
    tensors: tuple[Tensor, ...]
    rebuild: Callable[[list[Any]], Callable[..., Any]]


def capture(function: Callable[..., Any]) -> Captured:
    """What a function is, for tracing it once; see `Captured`.

    Raises:
        TypeError: it is not a Python function, a partial of one, or an object that is called like one.
    """
    if not callable(function):
        raise TypeError(f"epilogue is a {type(function).__name__}; it must be a function")
    tensors: list[Tensor] = []
    key = _key(function, tensors, {})
    found = tuple(tensors)

    def rebuild(others: list[Any]) -> Callable[..., Any]:
        by_id = {id(tensor): other for tensor, other in zip(found, others, strict=True)}
        made: Callable[..., Any] = _again(function, by_id)
        return made

    return Captured(key, found, rebuild)


@dataclass(frozen=True, slots=True)
class Outside:
    """What a function takes from outside, by identity, so that it is compared in little time.

    Attributes:
        cells, names, attributes: where each thing is, and what it is.
    """

    cells: tuple[tuple[types.CellType, Any], ...]
    names: tuple[tuple[dict[str, Any], str, Any], ...]
    attributes: tuple[tuple[Any, str, Any], ...]

    def is_unchanged(self) -> bool:
        """Whether everything is the same object as before."""
        try:
            for cell, value in self.cells:
                if cell.cell_contents is not value:
                    return False
        except ValueError:
            return False
        for space, name, value in self.names:
            if space.get(name) is not value:
                return False
        return all(getattr(owner, name) is value for owner, name, value in self.attributes)


def outside(function: Callable[..., Any]) -> Outside | None:
    """What a function, and those that it calls, take from outside; None where that may change unseen."""
    if capture(function).key is None:
        return None
    cells: list[Any] = []
    names: list[Any] = []
    attributes: list[Any] = []
    seen: set[int] = set()

    def walk(value: Any) -> None:
        if id(value) in seen:
            return
        seen.add(id(value))
        if isinstance(value, functools.partial):
            for inner in (value.func, *value.args, *value.keywords.values()):
                walk(inner)
        elif isinstance(value, tuple):
            for inner in value:
                walk(inner)
        elif getattr(value, "__gemmery_epilogue__", None) is not None:
            walk(value.__gemmery_epilogue__)
        elif isinstance(value, types.FunctionType) and not _of_library(value):
            for name in ("__code__", "__defaults__", "__kwdefaults__"):
                attributes.append((value, name, getattr(value, name)))
            for cell in value.__closure__ or ():
                cells.append((cell, cell.cell_contents))
            for kind, name, inner in _outside(value):
                if kind == "global":
                    names.append((value.__globals__, name, inner))
                walk(inner)
            for owner, name, inner in _attributes(value):
                attributes.append((owner, name, inner))
                walk(inner)

    walk(function)
    return Outside(tuple(cells), tuple(names), tuple(attributes))


def _names(code: types.CodeType) -> set[str]:
    names = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names |= _names(constant)
    return names


def _outside(function: types.FunctionType) -> list[tuple[str, str, Any]]:
    """What a function takes from outside: cells, globals and defaults, as (kind, name, value)."""
    found: list[tuple[str, str, Any]] = []
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            found.append(("cell", name, cell.cell_contents))
        except ValueError:
            # Not yet assigned: the function fails on it, or never comes there.
            continue
    names = function.__globals__
    found += [("global", name, names[name]) for name in sorted(_names(function.__code__)) if name in names]
    found += [("default", str(i), value) for i, value in enumerate(function.__defaults__ or ())]
    found += [("keyword", name, value) for name, value in sorted((function.__kwdefaults__ or {}).items())]
    return found


def _attributes(function: types.FunctionType) -> list[tuple[Any, str, Any]]:
    """What a function may take from modules and classes that are its user's: (owner, name, value)."""
    owners = [x for _, _, x in _outside(function) if isinstance(x, types.ModuleType | type) and not _known(x)]
    names = sorted(_names(function.__code__))
    return [(x, name, getattr(x, name)) for x in owners for name in names if hasattr(x, name)]


def _known(value: Any) -> bool:
    name = value.__name__ if isinstance(value, types.ModuleType) else value.__module__
    return str(name).split(".")[0] in _LIBRARIES


def _key(value: Any, tensors: list[Tensor], seen: dict[int, int]) -> Any:
    """A hashable stand-in for a value, or None where its meaning may change unseen."""
    if isinstance(value, _PLAIN):
        # Zeros differ in their sign and True is 1.
        return type(value), repr(value) if isinstance(value, float) else value
    if isinstance(value, Tensor):
        if not any(value is known for known in tensors):
            tensors.append(value)
        place = next(i for i, known in enumerate(tensors) if known is value)
        return "tensor", place
    if isinstance(value, types.FunctionType) and not _of_library(value):
        if id(value) in seen:
            return "again", seen[id(value)]
        seen[id(value)] = len(seen)
        parts = [(kind, name, _key(x, tensors, seen)) for kind, name, x in _outside(value)]
        parts += [("attribute", name, _key(x, tensors, seen)) for _, name, x in _attributes(value)]
        return None if any(part[2] is None for part in parts) else (value.__code__, tuple(parts))
    if isinstance(value, functools.partial):
        held = [value.func, *value.args, *(x for _, x in sorted(value.keywords.items()))]
        keys = tuple(_key(x, tensors, seen) for x in held)
        return None if None in keys else ("partial", tuple(sorted(value.keywords)), keys)
    if isinstance(value, tuple):
        keys = tuple(_key(x, tensors, seen) for x in value)
        return None if None in keys else ("tuple", keys)
    inner = getattr(value, "__gemmery_epilogue__", None)
    if inner is not None:
        return _key(inner, tensors, seen)
    return ("static", _Same(value)) if _static(value) else None


class _Same:
    """An object as a key that equals only itself."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and other.value is self.value

    def __hash__(self) -> int:
        return id(self.value)


def value_key(value: Any) -> Any:
    """A hashable stand-in for an argument that is neither a tensor nor a number; None where it may change unseen."""
    tensors: list[Tensor] = []
    key = _key(value, tensors, {})
    return None if tensors else key


def _of_library(value: Any) -> bool:
    """Whether an object belongs to a package that does not change; what was made in a call is as the call made it."""
    module, name = getattr(value, "__module__", ""), getattr(value, "__qualname__", "")
    if isinstance(value, types.FunctionType):
        # Wrappers take on the name of what they wrap; where their code is from, they can't hide.
        module, name = value.__globals__.get("__name__", ""), value.__code__.co_qualname
    return "<locals>" not in str(name) and str(module).split(".")[0] in _LIBRARIES


def _static(value: Any) -> bool:
    """Whether an object means the same as long as it lives: modules, classes, built-in functions and operators."""
    if isinstance(value, types.ModuleType | type | types.BuiltinFunctionType):
        return True
    return (
        callable(value) and _of_library(value) and not isinstance(value, types.MethodType | torch.nn.Module)
    )


def _again(value: Any, by_id: dict[int, Any]) -> Any:
    """A value with other tensors in the place of those it holds."""
    if isinstance(value, Tensor):
        return by_id.get(id(value), value)
    if isinstance(value, functools.partial):
        keywords = {name: _again(x, by_id) for name, x in value.keywords.items()}
        return functools.partial(
            _again(value.func, by_id), *[_again(x, by_id) for x in value.args], **keywords
        )
    if isinstance(value, tuple) and type(value) is tuple:
        return tuple(_again(x, by_id) for x in value)
    inner = getattr(value, "__gemmery_epilogue__", None)
    if inner is not None:
        return _again(inner, by_id)
    if (
        not isinstance(value, types.FunctionType)
        or _of_library(value)
        or not by_id
        or not _holds(value, by_id, set())
    ):
        return value
    cells = tuple(_cell(cell, by_id) for cell in value.__closure__ or ())
    names = dict(value.__globals__)
    for kind, name, inner in _outside(value):
        if kind == "global":
            names[name] = _again(inner, by_id)
    made = types.FunctionType(
        value.__code__, names, value.__name__, _again(value.__defaults__, by_id), cells or None
    )
    made.__kwdefaults__ = {name: _again(x, by_id) for name, x in (value.__kwdefaults__ or {}).items()} or None
    return made


def _cell(cell: types.CellType, by_id: dict[int, Any]) -> types.CellType:
    try:
        return types.CellType(_again(cell.cell_contents, by_id))
    except ValueError:
        return types.CellType()


def _holds(value: Any, by_id: dict[int, Any], seen: set[int]) -> bool:
    """Whether a function takes one of the tensors from outside, itself or in a function that it calls."""
    if isinstance(value, Tensor):
        return id(value) in by_id
    if id(value) in seen:
        return False
    seen.add(id(value))
    inner = getattr(value, "__gemmery_epilogue__", None)
    if inner is not None:
        return _holds(inner, by_id, seen)
    if isinstance(value, functools.partial):
        return any(_holds(x, by_id, seen) for x in (value.func, *value.args, *value.keywords.values()))
    if isinstance(value, tuple):
        return any(_holds(x, by_id, seen) for x in value)
    if isinstance(value, types.FunctionType) and not _of_library(value):
        return any(_holds(x, by_id, seen) for _, _, x in _outside(value))
    return False
