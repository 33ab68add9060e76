"""The device function that contains a line of the source."""

from __future__ import annotations

import ast
import functools
from pathlib import Path

from ... import kernels


@functools.cache
def _functions(name: str) -> list[tuple[int, int, str]]:
    """First line, last line and name of the functions in a file of gemmery's device code."""
    file = Path(kernels.__file__).with_name(name)
    if not file.is_file():
        return []
    found = [node for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.FunctionDef)]
    return [(node.lineno, node.end_lineno or node.lineno, node.name) for node in found]


def function_at(source: str) -> str:
    """The device function that a line such as "operands.py:63" is in; "" if that is not gemmery's own file."""
    name, _, line = source.partition(":")
    inside = [
        (end - start, name) for start, end, name in _functions(name) if line and start <= int(line) <= end
    ]
    return min(inside)[1] if inside else ""
