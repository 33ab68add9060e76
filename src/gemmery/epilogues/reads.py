"""Finds what a function's code reads from outside: cells and globals, each with the attributes taken of it.

The byte code shows it, so that `pkg.config.SCALE` is one value and not three names. A path ends where the code does
anything else with a value than read an attribute of it, such as pass it on or index it.
"""

from __future__ import annotations

import dis
import functools
import types
from dataclasses import dataclass

_GLOBALS = {"LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS"}
_CELLS = {"LOAD_DEREF", "LOAD_CLASSDEREF", "LOAD_FROM_DICT_OR_DEREF"}
_ATTRIBUTES = {"LOAD_ATTR", "LOAD_METHOD"}
#: The instructions that may stand between two that belong together.
_PADDING = {"EXTENDED_ARG", "CACHE"}
#: Instructions by which code changes outside objects, or imports objects that no path shows.
_CHANGES = {"STORE_GLOBAL", "DELETE_GLOBAL", "IMPORT_NAME"}
_CELL_CHANGES = {"STORE_DEREF", "DELETE_DEREF"}


@dataclass(frozen=True, slots=True)
class Path:
    """A value that code reads from outside.

    Attributes:
        kind: "cell" or "global".
        name: of the cell or the global.
        attributes: each read from the one before, in their order.
    """

    kind: str
    name: str
    attributes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Reads:
    """The paths that code reads from outside.

    Attributes:
        paths: without repetition, in the order of the code.
        complete: False if the code also changes something outside, or imports.
    """

    paths: tuple[Path, ...]
    complete: bool


@functools.lru_cache(4096)
def reads(code: types.CodeType) -> Reads:
    """Returns the paths that a function's code reads, and that the functions defined in it read."""
    paths: dict[Path, None] = {}
    complete = _scan(code, frozenset(code.co_freevars), paths)
    return Reads(tuple(paths), complete)


def _scan(code: types.CodeType, free: frozenset[str], paths: dict[Path, None]) -> bool:
    """Add the paths of a code object to `paths`; returns whether it does nothing else outside.

    Args:
        free: the names of cells that come from outside.
    """
    complete = True
    instructions = [x for x in dis.get_instructions(code) if x.opname not in _PADDING]
    for i, instruction in enumerate(instructions):
        name, argument = instruction.opname, instruction.argval
        if name in _CHANGES or (name in _CELL_CHANGES and argument in free):
            complete = False
        elif name in _GLOBALS or (name in _CELLS and argument in free):
            kind = "global" if name in _GLOBALS else "cell"
            paths[Path(kind, argument, _attributes(instructions, i + 1))] = None
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            complete &= _scan(constant, free & frozenset(constant.co_freevars), paths)
    return complete


def _attributes(instructions: list[dis.Instruction], start: int) -> tuple[str, ...]:
    names = []
    for instruction in instructions[start:]:
        if instruction.opname not in _ATTRIBUTES:
            break
        names.append(instruction.argval)
    return tuple(names)
