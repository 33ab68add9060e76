"""From the text of a device function to a function that Triton compiles."""

from __future__ import annotations

import functools
import hashlib
import inspect
import linecache
import re
from pathlib import Path
from types import ModuleType
from typing import Any

from .device_function import device_functions

_LOADER = """\
def load_{name}(
    x, shape, strides, sizes, batch, row, col, ROWS: tl.constexpr, COLS: tl.constexpr, CHECK_ROWS: tl.constexpr,
    CHECK_COLS: tl.constexpr, WIDE: tl.constexpr
):
    {layout}{names} = strides
    block = LOAD(x, shape, ({layout}), sizes, batch, row, col, ROWS, COLS, CHECK_ROWS, CHECK_COLS, WIDE)
    if block.dtype == tl.float64:
        wide = block
    else:
        wide = as_type(block, tl.float32)
    value = as_type(FUNCTION(wide, ({given}), shape, sizes, batch, row, col, ROWS, COLS, WIDE), block.dtype)
    if CHECK_COLS:
        # Elements beyond the matrix were loaded as 0, and need not be 0 any more.
        value = tl.where((tl.arange(0, COLS) < shape[1] - col)[None, :], value, 0.0)
    return value
"""


@functools.lru_cache(1024)
def function(source: str) -> Any:
    """The `@triton.jit` function of a text that `lower` made; one for each text."""
    from ..kernels import epilogues, fused

    space: dict[str, Any] = {"scalar": epilogues.scalar} | device_functions()
    return compiled(
        source, space | {key: value for key, value in vars(fused).items() if not key.startswith("_")}
    )


@functools.lru_cache(1024)
def loader_with(source: str, strides: int, arguments: int, load: Any) -> Any:
    """A loader of blocks, see `kernels.operands`, that go through a device function on their way.

    Args:
        source: the function's text.
        strides: how many `load` takes.
        arguments: how many the function takes; they follow the strides.
        load: loads the blocks.
    """
    from ..kernels.fused import as_type

    made = function(source)
    names = "".join(f", a{i}" for i in range(arguments))
    given = "".join(f"a{i}, " for i in range(arguments))
    layout = ", ".join(f"stride_{i}" for i in range(strides))
    text = _LOADER.format(name=f"{load.__name__}_{made.__name__}", layout=layout, names=names, given=given)
    return compiled(text, {"LOAD": load, "FUNCTION": made, "as_type": as_type})


@functools.lru_cache(1024)
def with_constants(function: Any, **constants: Any) -> Any:
    """A device function of which some constexpr parameters are fixed: to numbers, or to other device functions.

    The function that a kernel receives has the signature that the kernel calls, and no other parameters.
    """
    import triton.language as tl

    parameters = inspect.signature(function.fn).parameters
    taken = [
        name + ": tl.constexpr" * (x.annotation is tl.constexpr)
        for name, x in parameters.items()
        if name not in constants
    ]
    space = {name: value for name, value in constants.items() if hasattr(value, "fn")}
    given = [name if name in space else repr(constants.get(name, _Name(name))) for name in parameters]
    words = [function.__name__, *[getattr(x, "__name__", str(x)) for x in constants.values()]]
    name = re.sub(r"\W", "_", "_".join(words))
    text = f"def {name}(\n    {', '.join(taken)}\n):\n    return FUNCTION({', '.join(given)})\n"
    return compiled(text, {"FUNCTION": function, **space})


class _Name(str):
    """A name, which appears unchanged in a text."""

    def __repr__(self) -> str:
        return str(self)


@functools.cache
def digest(*modules: ModuleType) -> str:
    """A digest of a kernel's files, since Triton does not notice changes in functions that write assembly."""
    files = b"".join(Path(inspect.getfile(each)).read_bytes() for each in modules)
    return hashlib.sha256(files).hexdigest()[:16]


def compiled(source: str, space: dict[str, Any]) -> Any:
    """The `@triton.jit` function of a text, which can use the names in `space`."""
    import triton
    import triton.language as tl

    name = source.split("(", 1)[0].split()[-1]
    file = f"<gemmery {name}>"
    # Triton reads a function's source by its file's name.
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    space |= {"tl": tl, "__name__": "gemmery.epilogues.made"}
    exec(compile(source, file, "exec"), space)
    return triton.jit(space[name])
