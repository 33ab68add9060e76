"""From a torch function over the product to a graph of aten operators.

The function runs once on tensors without data (torch.fx over fake tensors), torch's own decompositions make it a small
set of operators, and sizes are stand-ins: it is traced for two sizes far apart, and both graphs must agree, so that one
graph serves all.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten


class Untraceable(ValueError):
    """A function that cannot be made part of a kernel; says which operation, where, and what can be."""


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
    """Stand-ins for the sizes of a product."""

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
# Decompositions

#: Reductions whose pieces could not be put together again from sums and maxima.
_WHOLE = ("logsumexp", "mean", "var", "std", "linalg_vector_norm", "norm", "any", "all")
#: Functions for which kernels have one of their own.
_KNOWN = ("gelu",)


@functools.cache
def _decompositions() -> dict[Any, Any]:
    from torch._decomp import core_aten_decompositions, get_decompositions

    table = dict(core_aten_decompositions())
    more = [
        aten.elu, aten.elu_backward, aten.gelu_backward, aten.hardtanh, aten.hardtanh_backward, aten.leaky_relu,
        aten.leaky_relu_backward, aten.sigmoid_backward, aten.silu_backward, aten.tanh_backward,
    ]  # fmt: skip
    table.update(get_decompositions(more))
    return {
        op: how
        for op, how in table.items()
        if op.name().split("::")[1].split(".")[0] not in (*_WHOLE, *_KNOWN)
    }


# ---------------------------------------------------------------------------------------------------------------------
# Tracing


class _Lines(TorchDispatchMode):
    """Notes for each node of the graph which line of the user's function it comes from."""

    def __init__(self, files: set[str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.files = files

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        from torch.fx.experimental.proxy_tensor import get_proxy_mode

        mode = get_proxy_mode()
        before = None if mode is None else len(mode.tracer.graph.nodes)
        result = func(*args, **(kwargs or {}))
        if mode is not None and before is not None:
            where = self._where()
            made = len(mode.tracer.graph.nodes) - before
            node = mode.tracer.graph._root
            for _ in range(made):
                node = node.prev
                node.meta["where"] = where
        return result

    def _where(self) -> str:
        frame: Any = sys._getframe(2)
        while frame is not None:
            if frame.f_code.co_filename in self.files:
                return f"{frame.f_code.co_filename}:{frame.f_lineno}"
            frame = frame.f_back
        return "code that it calls"


def _once(
    function: Callable[..., Any],
    arguments: Sequence[Argument],
    sizes: Sizes,
    device: torch.device,
    files: set[str],
) -> fx.Graph:
    """The graph of a function for one set of sizes."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx

    first = arguments[0]
    number = torch.float64 if isinstance(first, Shape) and first.dtype == torch.float64 else torch.float32

    def traced(*inputs: Any) -> Any:
        with _Lines(files):
            return function(*inputs)

    with FakeTensorMode() as mode, torch.enable_grad():
        inputs = [
            torch.empty(sizes.of(x.dims), dtype=x.dtype, device=device)
            if isinstance(x, Shape)
            # A tensor of no dimensions takes part in type promotion as a Python number does, if it is no wider.
            else torch.empty((), dtype=torch.int64 if x.integer else number, device=device)
            for x in arguments
        ]
        with torch.no_grad():
            made = make_fx(torch.func.functionalize(traced), decomposition_table=_decompositions())(*inputs)
    del mode
    graph: fx.Graph = made.graph
    graph.eliminate_dead_code()
    for node in graph.nodes:
        if node.op == "get_attr":
            raise Untraceable(
                "the epilogue uses a tensor that is neither an argument nor a variable of its own; pass it through args"
            )
    return graph


def trace(
    function: Callable[..., Any], arguments: Sequence[Argument], rank: int, odd: bool, device: torch.device
) -> tuple[fx.Graph, Sizes]:
    """The graph of `function(product, *others)`, and the stand-ins for sizes that it was traced with.

    Args:
        arguments: the product first.
        rank: dimensions of the product.
        odd: whether its number of columns is.

    Raises:
        Untraceable: the function looks at data, or its graph depends on the sizes.
    """
    # In a thread of its own nothing that surrounds the call, such as a mode or autocast, is traced with it.
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(_trace_alone, function, arguments, rank, odd, device).result()


def _trace_alone(*arguments: Any) -> tuple[fx.Graph, Sizes]:
    # Backward passes run in a thread of the GPU's, which waits for this one when it is traced from there. A function
    # that differentiates on its own must not wait for that thread in turn.
    with torch.autograd.set_multithreading_enabled(False):
        return _trace(*arguments)


def _trace(
    function: Callable[..., Any], arguments: Sequence[Argument], rank: int, odd: bool, device: torch.device
) -> tuple[fx.Graph, Sizes]:
    files = {code.co_filename for code in _codes(function)}
    graphs = []
    all_sizes = stand_ins(rank, odd)
    for sizes in all_sizes:
        try:
            graphs.append(_once(function, arguments, sizes, device, files))
        except Untraceable:
            raise
        except Exception as error:
            # Whatever torch fails with is an error in the user's function, or one that tracing it met.
            raise Untraceable(f"the epilogue {_name(function)} can't be traced: {_reason(error)}") from error
    if len({_text(graph, sizes) for graph, sizes in zip(graphs, all_sizes, strict=True)}) > 1:
        raise Untraceable(
            f"the epilogue {_name(function)} does something else for other sizes of the product; a number that depends "
            f"on them has to come through args"
        )
    return graphs[0], all_sizes[0]


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


def _reason(error: Exception) -> str:
    kind = type(error).__name__
    if "allow_non_fake_inputs" in str(error):
        return "it uses a tensor that is neither an argument nor a variable of its own; pass it through args"
    if "DataDependent" in kind or "data-dependent" in str(error) or "_local_scalar_dense" in str(error):
        return (
            "its control flow, or a Python number in it, depends on the data of a tensor; use torch.where and "
            f"operators on tensors ({kind})"
        )
    return f"{kind}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"


#: Operators whose plain integers are places along a dimension.
_PLACES = (aten.slice.Tensor, aten.split.Tensor)


def _text(graph: fx.Graph, sizes: Sizes) -> str:
    """A graph with sizes in words, the same for graphs that differ in sizes alone."""
    words = {sizes.M: "M", sizes.N: "N", sizes.N // 2: "N/2", 2 * sizes.N: "2N"}
    words |= {size: f"b{i}" for i, size in enumerate(sizes.batch)}

    def word(value: Any) -> Any:
        if isinstance(value, list | tuple):
            return [word(each) for each in value]
        if isinstance(value, bool) or not isinstance(value, int):
            return str(value)
        return words.get(value, str(value))

    def argument(node: fx.Node, value: Any) -> Any:
        # Numbers that are not sizes have to be the same ones.
        places = isinstance(value, list | tuple) or node.target in _PLACES
        return word(value) if places else f"{type(value).__name__} {value}"

    lines = []
    for node in graph.nodes:
        inputs = [argument(node, x) for x in node.args]
        inputs += [f"{k}={argument(node, v)}" for k, v in sorted(node.kwargs.items())]
        shape = word(list(node.meta["val"].shape)) if isinstance(node.meta.get("val"), Tensor) else ""
        lines.append(f"{node.name} {node.target} {inputs} {shape}")
    return "\n".join(lines)
