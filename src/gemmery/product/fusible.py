"""Tells without a GPU whether an epilogue can be part of a kernel: on request, and in a warning if torch runs it."""

from __future__ import annotations

import sys
import types
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..epilogues.function import captured_of
from ..memo import keep
from .build import make_call
from .check import captured_name
from .check import check as check_call
from .epilogue import program
from .prepare import check_fused
from .spec import Call, Functions, Options

#: Rows and columns of a product of unknown size. There are more columns than a tile has, so that a function that needs
#: whole rows does not pass as one that can always be fused.
_SIZE = 512
#: The packages whose frames are not the user's.
_PACKAGES = tuple(str(Path(str(x)).parent) + "/" for x in (Path(__file__).parent, torch.__file__))
#: Functions that have been examined, by `_identity`.
_looked: dict[Any, bool] = {}


def check(
    function: Callable[..., Any],
    *args: Any,
    dtype: torch.dtype = torch.float32,
    shape: Sequence[int] | None = None,
) -> None:
    """Raise an error with the reason if a function can't be the epilogue of a product on a GPU.

    It traces the function as the first product on a GPU would, and compiles and launches nothing. A function that
    passes is fused on every GPU, with one exception: functions that use reduced rows again need tiles as wide as the
    product. The widest has 64 to 256 columns, depending on the GPU and the type.

    Args:
        function: an epilogue, as for `epilogue=`.
        args: examples of its arguments, as for `args=`: tensors, of which only shapes and types matter, on any device,
            and numbers.
        dtype: the type of the operands.
        shape: the shape of the product, (..., M, N). The default is the shape to which the tensors in `args` and those
            that the function captures broadcast, with 512 rows and columns if they do not determine it. It is required
            for a function that halves the columns and takes a tensor of one half.

    Raises:
        Untraceable: the function can't be part of a kernel. A ValueError.
        ValueError: the arguments do not broadcast to the product.
        TypeError: a product does not accept a function or arguments of this kind.

    Example:
        >>> import torch
        >>> from gemmery import epilogues
        >>> epilogues.check(epilogues.bias, torch.ones(4096), dtype=torch.bfloat16)
        >>> epilogues.check(lambda acc: acc.softmax(-1), shape=(1024, 64))
        >>> try:
        ...     epilogues.check(lambda acc: acc.cumsum(-1))
        ... except epilogues.Untraceable as error:
        ...     print("uses aten.cumsum" in str(error))
        True
    """
    captured = captured_of(function)[1]
    named = [(f"args[{i}]", x) for i, x in enumerate(args) if isinstance(x, Tensor)]
    named += [(captured_name(captured, "epilogue", i), x) for i, x in enumerate(captured.tensors)]
    *batch, M, N = _shape(named) if shape is None else _checked(shape)
    device = named[0][1].device if named else torch.device("cpu")
    a, b = (
        torch.empty((), dtype=dtype, device=device).expand(size) for size in ((*batch, M, 1), (*batch, 1, N))
    )
    call = make_call("check", a, b, None, Functions(function, args), Options())
    check_call(call)
    program(call)


def _shape(named: Sequence[tuple[str, Tensor]]) -> tuple[int, ...]:
    """The shape to which tensors broadcast, given with their names; default sizes where they have none."""
    try:
        known = torch.broadcast_shapes(*[x.shape for _, x in named])
    except RuntimeError as error:
        shapes = " and ".join(f"{name} is {tuple(x.shape)}" for name, x in named)
        raise ValueError(
            f"check: {shapes}; they must broadcast to the product, whose shape they don't determine; give shape=(M, N)"
        ) from error
    *batch, M, N = (1,) * (2 - len(known)) + tuple(known)
    return *batch, M if M > 1 else _SIZE, N if N > 1 else _SIZE


def _checked(shape: Sequence[int]) -> tuple[int, ...]:
    sizes = tuple(shape)
    if len(sizes) < 2 or not all(isinstance(x, int) and x > 0 for x in sizes):
        raise ValueError(f"check: shape is {sizes}; it must be (..., M, N), each at least 1")
    return sizes


def warn(call: Call) -> None:
    """Warn once about an epilogue that torch has run here and that a GPU could not fuse. Never raises an error."""
    # Whether halves of columns fit depends on the weight.
    key = _identity(call.function), type(call.b), call.shape[-1] % (2 * call.b.strip) == 0
    if key in _looked or 0 in call.shape:
        return
    keep(_looked, key, True)
    try:
        check_fused(call, program(call))
    except Exception as error:  # torch has computed the product in any case
        level, frame = 1, sys._getframe()
        while frame.f_back is not None and frame.f_code.co_filename.startswith(_PACKAGES):
            level, frame = level + 1, frame.f_back
        warnings.warn(
            f"gemmery: torch runs this epilogue on the CPU; on a GPU it can't be fused and raises an error: {error}",
            UserWarning,
            stacklevel=level,
        )


def _identity(function: Any) -> Any:
    """A key that functions with the same code share, for any content of their closures."""
    held: list[Any] = []
    _add_codes(function, held)
    return tuple(held)


def _add_codes(value: Any, held: list[Any]) -> None:
    func, args = getattr(value, "func", None), getattr(value, "args", ())
    if isinstance(value, tuple):
        for x in value:
            _add_codes(x, held)
    elif func is not None:  # a partial
        _add_codes((func, *args), held)
    elif isinstance(value, types.MethodType):
        _add_codes(value.__func__, held)
    elif isinstance(value, types.FunctionType):
        if value.__code__ in held:
            return
        held.append(value.__code__)
        for cell in value.__closure__ or ():
            _add_codes(_content(cell), held)
    elif callable(value):
        held.append(value if isinstance(value, types.BuiltinFunctionType) else type(value))


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return None  # not yet assigned
