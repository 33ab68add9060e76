"""From a torch function over the product to a graph of aten operators.

The function runs on tensors without data (`record`), decompositions make it a small set of operators, and sizes are
stand-ins: it is traced for sets of sizes far apart, and all graphs must agree, so that one graph serves all.
"""

from __future__ import annotations

import functools
import re
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from .decompositions import decompositions
from .record import Recorder, Untraceable

aten = torch.ops.aten


@dataclass(frozen=True)
class Shape:
    """A tensor's type, and what its dimensions are, last first.

    Attributes:
        dims: for each dimension "1", or what the product has there: "M", a batch dimension "0", "1st"..., and for the
            columns the number of them over those of the product, as "N", "N/2" or "2N".
    """

    dtype: torch.dtype
    dims: tuple[str, ...]


@dataclass(frozen=True)
class Number:
    """A number that comes with every call."""

    integer: bool


Argument = Shape | Number


@dataclass(frozen=True)
class Sizes:
    """Sizes of a product that a function is traced with, in place of the true ones."""

    M: int
    N: int
    batch: tuple[int, ...]

    def of(self, dims: tuple[str, ...]) -> tuple[int, ...]:
        """The stand-ins for a tensor's dimensions."""
        known = {"1": 1, "M": self.M, "N": self.N, "N/2": self.N // 2, "2N": 2 * self.N}
        return tuple(known[dim] if dim in known else self.batch[int(dim[1:])] for dim in dims)


def stand_ins(rank: int, odd: bool) -> tuple[Sizes, ...]:
    """Sets of sizes, far apart, of which no two dimensions are alike; `odd` for an odd number of columns."""
    batch = range(rank - 2)
    return (
        Sizes(24, 80 + odd, tuple(5 + 2 * i for i in batch)),
        Sizes(1 << 16, (1 << 18) + odd, tuple(29 + 2 * i for i in batch)),
        Sizes(21, 46 + odd, tuple(13 + 2 * i for i in batch)),
    )


# ---------------------------------------------------------------------------------------------------------------------
# Tracing


def _once(
    function: Callable[..., Any],
    arguments: Sequence[Argument],
    sizes: Sizes,
    device: torch.device,
    files: set[str],
    grad: bool,
) -> fx.Graph:
    """The graph of a function for one set of sizes."""
    first = arguments[0]
    number = torch.float64 if isinstance(first, Shape) and first.dtype == torch.float64 else torch.float32
    recorder = Recorder(device, files, decompositions())
    inputs = [
        recorder.placeholder(sizes.of(x.dims), x.dtype)
        if isinstance(x, Shape)
        # A tensor of no dimensions takes part in type promotion as a Python number does, if it is no wider.
        else recorder.placeholder((), torch.int64 if x.integer else number, number=True)
        for x in arguments
    ]
    return recorder.run(function, inputs, grad)


def trace(
    function: Callable[..., Any],
    arguments: Sequence[Argument],
    rank: int,
    odd: bool,
    device: torch.device,
    role: str = "epilogue",
    grad: bool = False,
) -> tuple[fx.Graph, Sizes]:
    """The graph of `function(product, *others)`, and the stand-ins for sizes that it was traced with.

    Args:
        arguments: the product first.
        rank: dimensions of the product.
        odd: whether its number of columns is.
        role: what messages call the function.
        grad: what `torch.is_grad_enabled` says in the function.

    Raises:
        Untraceable: the function looks at data, or its graph depends on the sizes.
    """
    # In a separate thread, the context of the call, such as a mode or autocast, is not traced with it.
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(_trace_alone, function, arguments, rank, odd, device, role, grad).result()


def _trace_alone(*arguments: Any) -> tuple[fx.Graph, Sizes]:
    # Backward passes run in a thread of the GPU's, which waits for this one when it is traced from there. A function
    # that itself differentiates must not wait for that thread in turn.
    with torch.autograd.set_multithreading_enabled(False):
        return _trace(*arguments)


def _trace(
    function: Callable[..., Any],
    arguments: Sequence[Argument],
    rank: int,
    odd: bool,
    device: torch.device,
    role: str,
    grad: bool,
) -> tuple[fx.Graph, Sizes]:
    files = {code.co_filename for code in _codes(function)}
    graphs = []
    all_sizes = stand_ins(rank, odd)
    for sizes in all_sizes:
        try:
            graphs.append(_once(function, arguments, sizes, device, files, grad))
        except Exception as error:
            _clear_frames(error)
            # Any error of torch is an error in the user's function, or in tracing it.
            raise Untraceable(
                f"the {role} {_name(function)} can't be traced: {_reason(error, sizes)}"
            ) from error
    texts = [_lines(graph, sizes) for graph, sizes in zip(graphs, all_sizes, strict=True)]
    if any(text != texts[0] for text in texts):
        raise Untraceable(f"the {role} {_name(function)} {_difference(graphs[0], texts)}")
    return graphs[0], all_sizes[0]


def _clear_frames(error: BaseException | None) -> None:
    """Deletes the local variables of the functions that an error passed through, and those of its causes.

    In functions of torch, such as those that print tensors, they include guards that restore the state of the thread.
    If the guards were deleted after the thread has ended, they would write to memory that is no longer the thread's.
    """
    seen = set()
    # An error can be its own cause.
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


def _difference(graph: fx.Graph, texts: Sequence[list[str]]) -> str:
    """The reason why the graphs of a function, whose lines are `texts`, differ between sizes; `graph` is the first."""
    for node, *lines in zip(graph.nodes, *texts, strict=False):
        if len(set(lines)) == 1:
            continue
        if node.target in _PLACES:
            return (
                f"takes a part of a dimension that is not a half of the last one, in {node.target}, at "
                f"{node.meta['where']}: take halves with chunk(2, dim=-1), slice arguments before the call, and the "
                "result after it"
            )
        break
    return "depends on the sizes of the product; pass a number that depends on them through args"


def _codes(function: Any) -> list[Any]:
    """The code of a function, of those that it wraps, and of those that partials hold."""
    inner = getattr(function, "__wrapped__", None) or getattr(function, "__gemmery_epilogue__", None)
    if inner is not None:
        return _codes(inner)
    if isinstance(function, functools.partial):
        return [code for x in (function.func, *function.args) for code in _codes(x)]
    if isinstance(function, tuple):
        return [code for x in function for code in _codes(x)]
    code = getattr(function, "__code__", None) or getattr(type(function).__call__, "__code__", None)
    return [code] if code is not None else []


def _name(function: Any) -> str:
    codes = _codes(function)
    name = getattr(function, "__name__", type(function).__name__)
    return f"{name} ({codes[0].co_filename}:{codes[0].co_firstlineno})" if codes else name


def _reason(error: Exception, sizes: Sizes) -> str:
    if isinstance(error, Untraceable):
        return str(error)
    first = [*str(error).strip().splitlines(), ""][0]
    reason = f"{type(error).__name__}: {first}"
    stood = {sizes.M, sizes.N, sizes.N // 2, 2 * sizes.N, *sizes.batch}
    if isinstance(error, TypeError) or stood.isdisjoint(map(int, re.findall(r"\d+", first))):
        return reason
    odd = "the product has an odd number of columns, which has no halves; " if sizes.N % 2 else ""
    # torch complains about a size that is not the product's.
    return (
        f"{reason} ({odd}it is traced at other sizes than the product's: write the number of columns as x.shape[-1], a "
        f"half as x.shape[-1] // 2, and pass tensors of its sizes through args)"
    )


#: Operators whose plain integers are places along a dimension.
_PLACES = (aten.slice.Tensor, aten.split.Tensor, aten.split_with_sizes.default)


def _lines(graph: fx.Graph, sizes: Sizes) -> list[str]:
    """A line for each node, with sizes in words: the same for graphs that differ in sizes alone."""
    words = {sizes.M: "M", sizes.N: "N", sizes.N // 2: "N/2", 2 * sizes.N: "2N"}
    words |= {size: f"b{i}" for i, size in enumerate(sizes.batch)}

    def word(value: Any) -> Any:
        if isinstance(value, list | tuple):
            return [word(each) for each in value]
        if isinstance(value, bool) or not isinstance(value, int):
            return str(value)
        return words.get(value, str(value))

    def argument(node: fx.Node, value: Any) -> Any:
        # Numbers that are not sizes must be the same.
        places = isinstance(value, list | tuple) or node.target in _PLACES
        return word(value) if places else f"{type(value).__name__} {value}"

    lines = []
    for node in graph.nodes:
        inputs = [argument(node, x) for x in node.args]
        inputs += [f"{k}={argument(node, v)}" for k, v in sorted(node.kwargs.items())]
        shape = word(list(node.meta["val"].shape)) if isinstance(node.meta.get("val"), Tensor) else ""
        lines.append(f"{node.name} {node.target} {inputs} {shape}")
    return lines
