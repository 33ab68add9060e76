"""A product in code that torch.compile traces: the operator's arguments are made in code that the compiler follows.

Imported only there, since marking a function for the compiler imports the compiler.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..dtensors import is_sharded
from ..epilogues.function import Epilogue, captured_of, memoised, named
from ..epilogues.results import returned
from ..epilogues.trace import stand_ins
from ..formats.scaled import ScaledTensor
from ..formats.weight import PackedWeight
from ..operands import DenseOperand, Operand, PairOperand, rebuild
from .build import NOTHING, added, lowered, operands_of
from .check import check_matrices, check_not_packed, check_scattered, check_tensor, dimensions
from .dispatch import runs_again, whole
from .epilogue import kept_types, types_of
from .flat import arguments_of
from .gradients import plain_product
from .prologue import apply_prologue
from .seen import autocast_dtype, wants_gradient
from .shape import operand_names
from .spec import Call, Functions, Number, Options, unchanged

if TYPE_CHECKING:
    from .sharded import Sharding

#: Types whose values the compiler distinguishes by their code. It does not see values in a closure or in defaults.
_FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType)
_UNWATCHED = (
    "under torch.compile, {what} must be the result of gemmery.epilogue(f), created outside compiled code"
)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]  # torch has no types for it
def held_name(given: str | Callable[..., Any], device: str) -> str:
    """The name of an epilogue for an operator in compiled code; "" if torch must compile the function.

    Args:
        given: a plain function, or the name of an Epilogue.
        device: the kind of device on which gradients are required; "" for none.

    Raises:
        TypeError: the function has defaults.
    """
    if isinstance(given, types.FunctionType) and (given.__defaults__ or given.__kwdefaults__):
        raise TypeError(_UNWATCHED.format(what="an epilogue with defaults"))
    epilogue: Epilogue[Any, Any] = named(given) if isinstance(given, str) else memoised(given)
    captured = epilogue.captured
    if device and not captured.count and not runs_again(captured, torch.device(device)):
        return ""
    return epilogue.for_compiled_code().name


@torch.compiler.disable(
    reason="weight_grad (of fuse_wgrad_accumulation=True) and sparse tensors are not compiled; use fullgraph=False"
)  # type: ignore[untyped-decorator]
def uncompiled(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """A call at which torch.compile breaks its graph."""
    return function(*args, **kwargs)


def compiled(
    op: str, a: Any, b: Any, bias: Any, functions: Functions, out: Tensor | None, options: Options, alpha: Number,
    beta: Number,
) -> Any:  # fmt: skip
    """A call in code that torch.compile traces."""
    epilogue, args, _, _ = functions
    if epilogue is not None and not isinstance(epilogue, (Epilogue, *_FUNCTIONS)):
        raise TypeError(
            f"{op}: " + _UNWATCHED.format(what=f"an epilogue that is a {type(epilogue).__name__}")
        )
    if isinstance(epilogue, types.FunctionType) and epilogue.__code__.co_freevars:
        raise TypeError(f"{op}: " + _UNWATCHED.format(what="an epilogue with a closure"))
    if out is not None and (epilogue is not None or isinstance(b, PackedWeight | ScaledTensor)):
        what = "an epilogue" if epilogue is not None else "a packed weight"
        raise ValueError(f"{op}: out= with {what} can't be compiled; use the returned tensor")
    if isinstance(a, Tensor):
        check_tensor(op, operand_names(op)[0], a)
        a, functions = apply_prologue(a, functions)
    call = _call(op, a, b, bias, epilogue, args, options, alpha, beta)
    dtype = None if out is not None else autocast_dtype(call.device)
    call = call if dtype is None else lowered(call, dtype)
    if is_sharded(call.tensors if out is None else (out, *call.tensors)):
        return _of_parts(call, epilogue, out)
    if out is not None:
        return _into(call, out)
    return whole(call, is_compiled=True) if epilogue is None else _with_epilogue(call, epilogue)


def _call(
    op: str, a: Any, b: Any, bias: Any, epilogue: Callable[..., Any] | None, args: Sequence[Any], options: Options,
    alpha: Number, beta: Number,
) -> Call:  # fmt: skip
    """The call, with a function that torch.compile does not trace: the operator finds it by its name."""
    if isinstance(b, PackedWeight) and b.permutation is not None and a.shape[-1] == b.shape[-1]:
        a = a.index_select(-1, b.permutation)
    left, right = operands_of(op, a, b, epilogue is not None)
    ready = epilogue is None and left.is_dense and right.is_dense
    if ready and bias is not None:
        check_tensor(op, operand_names(op)[2], bias)
        check_not_packed(op, operand_names(op)[2], bias)
    if not ready:
        check_matrices(op, left.matrix, right.matrix)
    biases = added(op, bias)
    return Call(
        op, left, right, unchanged, NOTHING, (*biases, *args), len(biases), options, alpha, beta, ready, ()
    )  # fmt: skip


def _into(call: Call, out: Tensor) -> Tensor:
    if wants_gradient((*call.tensors, out)):
        raise ValueError(
            f"{call.op}: out= does not support gradients, but one of the arguments requires them"
        )
    if call.options.out_dtype is None:
        call = replace(call, options=call.options._replace(out_dtype=out.dtype))
    torch.ops.gemmery.product_out(*arguments_of(call, "", is_compiled=True), out)
    return out


def _with_epilogue(call: Call, epilogue: Callable[..., Any]) -> Any:
    grad = wants_gradient(call.tensors)
    given = epilogue.name if isinstance(epilogue, Epilogue) else epilogue
    name = held_name(given, call.device.type if grad else "")
    if not name:
        return _behind(call, epilogue)
    results = list(torch.ops.gemmery.product(*arguments_of(call, name, is_compiled=True), grad))
    kept = results[: len(results) - grad]
    return returned(kept, len(kept) > 1)


def _behind(call: Call, epilogue: Callable[..., Any]) -> Any:
    """A product with a function that is compiled with the code around it."""
    how = call.options._replace(out_dtype=_wide(call))
    products = [plain_product(call.a.unscattered(), x, how) for x in call.b.parts()]
    product = products[0] if len(products) == 1 else torch.cat(products, dim=-1)
    return _results(call, epilogue, product)


def _wide(call: Call) -> torch.dtype:
    return call.summed if call.a.is_dense and call.b.outer is None else torch.float32


def _results(call: Call, epilogue: Callable[..., Any], product: Tensor) -> Any:
    """The results of a function on a product."""
    wide, inputs = _wide(call), [call.a.of_rows(x) for x in call.inputs]
    biases = inputs[: call.biases]
    if biases:
        product = product + (biases[0] if len(biases) == 1 else torch.cat(list(biases), -1))
    made = epilogue(product, *inputs[call.biases :])
    many = isinstance(made, tuple | list)
    results = list(made) if many else [made]
    check_scattered(call, len(results))
    types = kept_types(call.op, types_of(results, product), wide, call.b.default, call.options.out_dtype)
    return returned(call.a.finished([x.to(kind) for x, kind in zip(results, types, strict=True)]), many)


# ---------------------------------------------------------------------------------------------------------------------
# Products of DTensors


class _Part(Operand):
    """A part of a packed weight as the operator takes it, since the compiler cannot trace its construction."""

    def __init__(self, whole: Operand, tensors: Sequence[Tensor], sizes: Sequence[int]) -> None:
        self.whole, self.tensors, self.own_sizes = whole, tuple(tensors), list(sizes)
        self.matrix = whole.matrix  # for its type and its device

    @property
    def is_packed(self) -> bool:
        return True

    @property
    def outer(self) -> Tensor | None:
        return self.whole.outer

    @property
    def text(self) -> str:
        return self.whole.text

    @property
    def sizes(self) -> list[int]:
        return self.own_sizes


class _Traced:
    """The computation of a product's local parts in compiled code; see `sharded.Ways`."""

    def __init__(self, epilogue: Callable[..., Any] | None) -> None:
        self.epilogue = epilogue

    def part(self, operand: Operand, tensors: Sequence[Tensor], sizes: Sequence[int]) -> Operand:
        return _Part(operand, tensors, sizes) if operand.is_packed else rebuild(operand.text, tensors, sizes)

    def run(self, call: Call) -> Any:
        if self.epilogue is None:
            return whole(call, is_compiled=True)
        return _with_epilogue(call, self.epilogue)

    def bare(self, call: Call) -> Tensor:
        return whole(call, is_compiled=True)  # type: ignore[no-any-return]

    def behind(self, call: Call, product: Tensor) -> Any:
        assert self.epilogue is not None
        return _results(call, self.epilogue, product)

    def behaviour(self, call: Call) -> str:
        if self.epilogue is None:
            return ""
        given = self.epilogue.name if isinstance(self.epilogue, Epilogue) else self.epilogue
        shape = call.shape
        inputs = tuple([_outline(call, i, x) for i, x in enumerate(call.inputs)])
        # A plain bool; a comparison of symbols would be a symbol.
        is_odd = False
        if shape[-1] % 2:
            is_odd = True
        does: str = behaviour_of(given, call.dtype, len(shape), is_odd, call.b.halves, call.biases, inputs)
        return does

    def remember(self, call: Call, how: Sharding, results: Sequence[Tensor], many: bool) -> None:
        """Compiled code is traced once."""


def _outline(call: Call, i: int, value: Any) -> Any:
    """The properties of an argument that an epilogue may depend on: a tensor's dimensions and type, not its sizes."""
    if isinstance(value, Tensor):
        return dimensions(call, i, value, call.shape), value.dtype
    if value is None or isinstance(value, bool):
        return value
    return 1 if isinstance(value, int) else 1.0


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]  # torch has no types for it
def behaviour_of(
    given: str | Callable[..., Any], dtype: torch.dtype, rank: int, is_odd: bool, halves: int, biases: int, inputs: Any
) -> str:  # fmt: skip
    """See `sharded.behaviour`. The compiler's sizes are symbols; fixed sizes replace them here.

    Args:
        given: a plain function, or the name of an Epilogue.
        dtype, rank, is_odd: of the operands, of the product, and whether its number of columns is odd.
        halves, biases: see `Operand.halves` and `Call`.
        inputs: see `_outline`.
    """
    from .sharded import behaviour

    epilogue: Epilogue[Any, Any] = named(given) if isinstance(given, str) else memoised(given)
    sizes = stand_ins(rank, is_odd)[0]
    a = torch.empty((*sizes.batch, sizes.M, 1), dtype=dtype)
    b = torch.empty((*sizes.batch, 1, sizes.N // halves), dtype=dtype)
    values = tuple([torch.empty(sizes.of(x[0]), dtype=x[1]) if isinstance(x, tuple) else x for x in inputs])
    right = PairOperand(b, b) if halves == 2 else DenseOperand(b)
    function, captured = captured_of(epilogue)
    return behaviour(Call("matmul", DenseOperand(a), right, function, captured, values, biases, Options()))


def _of_parts(call: Call, epilogue: Callable[..., Any] | None, out: Tensor | None) -> Any:
    """A product of DTensors in compiled code."""
    if out is not None:
        raise ValueError(f"{call.op}: out= does not support DTensors; use the returned tensor")
    from .sharded import sharded

    return sharded(call, _Traced(epilogue))
