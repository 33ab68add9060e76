"""A torch function as a graph: it runs on tensors without data, and each operator that it calls is recorded.

torch has this (make_fx over fake tensors), but brings its compiler and sympy along, whose import takes longer than a
kernel takes to compile.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from .decompositions import Composed

_META = torch.device("meta")
#: torch's tags of operators whose result, or its shape, depends on data.
_READING = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
#: Operators that select elements by their place, which a tile does not have; slices may be halves and are lowered.
_INDEXING = {
    torch.ops.aten.select.int, torch.ops.aten.index.Tensor, torch.ops.aten.index_select.default,
    torch.ops.aten.gather.default, torch.ops.aten.take.default,
}  # fmt: skip


class Untraceable(ValueError):
    """The error of a function that can't be part of a kernel. The message names the operation and its line."""


class MetaProxy(Tensor):
    """A tensor of some shape, type and device, without data."""

    meta: Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, meta: Tensor, device: torch.device) -> MetaProxy:  # noqa: D102
        made: MetaProxy = torch.Tensor._make_wrapper_subclass(
            cls, meta.shape, strides=meta.stride(), dtype=meta.dtype, device=device
        )
        made.meta = meta
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        raise Untraceable(
            f"{func} is called on a tensor of its trace, which has no data; such a tensor can't be printed, and can't "
            "be used after the call"
        )


def _elementwise(func: Any, args: Any, kwargs: Any) -> Any:
    """A tensor without data like an elementwise operator's result, by broadcasting, and the operator on ones.

    (torch's own functions for this are in Python, and import its compiler.)
    """
    shapes = [x.shape for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, MetaProxy)]
    ones = pytree.tree_map_only(
        MetaProxy, lambda x: torch.ones((1,) * x.dim(), dtype=x.dtype), (args, kwargs)
    )
    try:
        result = func(*ones[0], **ones[1])
    except NotImplementedError:
        return _without_data(func, args, kwargs)  # of a type that the CPU does not compute in
    return torch.empty(np.broadcast_shapes(*shapes), dtype=result.dtype, device=_META)


def _without_data(func: Any, args: Any, kwargs: Any) -> Any:
    """Tensors without data like an operator's results."""
    args, kwargs = pytree.tree_map_only(MetaProxy, lambda x: x.meta, (args, kwargs))
    if "device" in kwargs:
        kwargs["device"] = _META
    return func(*args, **kwargs)


def _picks_by_number(func: Any, args: Any) -> bool:
    """Whether it is an indexing by integers, whose result's shape does not depend on data."""
    return func is torch.ops.aten.index.Tensor and not any(
        isinstance(x, Tensor) and x.dtype in (torch.bool, torch.uint8) for x in args[1]
    )


def _plain(func: Any) -> Any:
    """The operator that returns what `func` writes to its first argument, or None if it writes nothing.

    The user's function is functionalized, but some operators of torch, such as rms_norm, write to internal tensors
    below that. `copy_` stays: functionalization ends with it, where the function writes to one of its arguments.
    """
    name = func._schema.name.split("::")[1]
    if not name.endswith("_") or name.startswith("_") or name == "copy_" or not func._schema.is_mutable:
        return None
    return getattr(getattr(torch.ops.aten, name[:-1], None), func._overloadname, None)


class Recorder(TorchDispatchMode):
    """A mode under which operators on proxy-ins become nodes of a graph.

    Args:
        device: the device that the proxy-ins report.
        files: the files of the user's functions; each node's "where" is its line in one of them.
        decompositions: operators that are run as functions of simpler ones, which may return NotImplemented.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # Or the first operator imports torch's compiler, to keep it out of here.
        return False

    def __init__(
        self, device: torch.device, files: set[str], decompositions: dict[Any, Callable[..., Any]]
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.graph = fx.Graph()
        self.device = device
        self.files = files
        self.decompositions = decompositions
        self._nodes: dict[int, fx.Node] = {}
        self._alive: list[Tensor] = []  # so that no two have the same id
        self._numbers: set[int] = set()

    def placeholder(self, shape: Sequence[int], dtype: torch.dtype, number: bool = False) -> MetaProxy:
        """A proxy-in for an argument, which may be a number."""
        node = self.graph.placeholder(f"x{len(self._alive)}")
        proxy = self._known(torch.empty(shape, dtype=dtype, device=_META), node)
        if number:
            self._numbers.add(id(proxy))
        return proxy

    def run(self, function: Callable[..., Any], inputs: Sequence[MetaProxy], grad: bool) -> fx.Graph:
        """The graph of a function of proxy-ins, without operators that its results do not need."""
        with torch.set_grad_enabled(grad), Composed(), self:
            results = torch.func.functionalize(function)(*inputs)
        self.graph.output(pytree.tree_map_only(Tensor, self._node, results))
        self.graph.eliminate_dead_code()
        return self.graph

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded in func.tags:
            raise Untraceable(
                f"at {self._where()} it draws random numbers ({func}), and the state of torch's generators differs "
                "between devices; use gemmery.epilogues.dropout, whose numbers depend on a seed and a position"
            )
        plain = _plain(func)
        if plain is not None:
            result = self.__torch_dispatch__(plain, types, args, kwargs)
            self._nodes[id(args[0])] = self._node(result)
            return args[0]
        with self:
            result = self.decompositions.get(func, func.decompose)(*args, **kwargs)
        if result is not NotImplemented:
            return result
        tensors = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        if tensors and not any(isinstance(x, MetaProxy) for x in tensors):
            return func(*args, **kwargs)  # of constants
        if _READING & set(func.tags) and not _picks_by_number(func, args):
            if id(args[0]) in self._numbers:
                raise Untraceable(
                    f"at {self._where()} it uses a number from args where torch requires a Python number; capture the "
                    "number in the function instead"
                )
            raise Untraceable(
                f"its control flow, or a Python number in it, depends on the data of a tensor ({func}, at "
                f"{self._where()}); use torch.where and operators on tensors"
            )
        if func in _INDEXING:
            raise Untraceable(
                f"at {self._where()} it indexes a tensor ({func}), and a kernel sees one tile at a time: index "
                "arguments before the call, as in args=(t[0],), and the result after it; take halves with "
                "chunk(2, dim=-1)"
            )
        return self._note(func, args, kwargs)

    def _note(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Add an operator's node, and the nodes of its results."""
        node = self.graph.call_function(func, *pytree.tree_map_only(Tensor, self._node, (args, kwargs)))
        node.meta["where"] = self._where()
        results = (_elementwise if torch.Tag.pointwise in func.tags else _without_data)(func, args, kwargs)
        if not any(isinstance(x, Tensor) for x in pytree.tree_leaves(results)):
            self.graph.erase_node(node)
            return results  # properties of the inputs, not their data
        if isinstance(results, Tensor):
            return self._known(results, node)
        return type(results)(
            self._known(x, self.graph.call_function(operator.getitem, (node, i)))
            for i, x in enumerate(results)
        )

    def _known(self, meta: Tensor, node: fx.Node) -> MetaProxy:
        proxy = MetaProxy(meta, self.device)
        node.meta["val"] = proxy
        self._nodes[id(proxy)] = node
        self._alive.append(proxy)
        return proxy

    def _node(self, tensor: Tensor) -> fx.Node:
        if id(tensor) not in self._nodes:
            raise Untraceable(
                "it uses a tensor that is neither an argument nor captured by the function, such as one that it "
                "creates; pass the tensor through args, or use a number"
            )
        return self._nodes[id(tensor)]

    def _where(self) -> str:
        frame: Any = sys._getframe(2)
        while frame is not None:
            if frame.f_code.co_filename in self.files:
                return f"{frame.f_code.co_filename}:{frame.f_lineno}"
            frame = frame.f_back
        return "code that it calls"
