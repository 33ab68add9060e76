"""A product in code that torch.compile traces: its arguments become the operator's, in code that the compiler follows.

Imported there alone: what marks a function for the compiler imports the compiler.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..dtypes import OUT_DTYPES, accumulator
from ..epilogues.function import Epilogue, named
from ..epilogues.results import returned
from ..formats.scaled import ScaledTensor
from ..formats.tensor import QuantizedTensor
from ..operands import Operand
from ..operands.dense import AUTOCAST
from ..operands.packed import PARTS
from ..operands.packed import text_of as packed_text
from .build import added, check_packed, operands_of
from .check import check_not_packed, check_tensor
from .dispatch import runs_again
from .epilogue import kept_types, types_of
from .flat import flatten, text_of
from .prologue import apply_prologue
from .shape import operand_names
from .spec import Functions, Number, Options


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]  # torch has no types for it
def held_name(name: str, device: str) -> str:
    """Under which name an operator in compiled code knows an epilogue; "" where torch has to compile the function.

    Args:
        device: the kind of device on which gradients are asked for; "" for none.
    """
    epilogue: Epilogue[Any, Any] = named(name)
    captured = epilogue.captured
    if device and not captured.count and not runs_again(captured, torch.device(device)):
        return ""
    return epilogue.for_compiled_code().name


class _Operand:
    """An operand as the operator takes it: its text, its tensors, its sizes."""

    def __init__(
        self, text: str, tensors: Sequence[Tensor], sizes: Sequence[int], default: torch.dtype
    ) -> None:
        self.text, self.tensors, self.sizes, self.default = text, list(tensors), list(sizes), default

    @classmethod
    def of(cls, operand: Operand) -> _Operand:
        """Of an operand without sizes of its own."""
        return cls(operand.text, operand.tensors, [], operand.default)


def compiled(
    op: str, a: Any, b: Any, bias: Any, functions: Functions, out: Tensor | None, options: Options, alpha: Number,
    beta: Number,
) -> Any:  # fmt: skip
    """A call in code that torch.compile traces."""
    epilogue, args, _, _ = functions
    if epilogue is not None and not isinstance(epilogue, Epilogue):
        raise TypeError(
            f"{op}: under torch.compile, epilogue must be what gemmery.epilogue(f) returned, made outside of "
            f"compiled code"
        )
    if out is not None and (epilogue is not None or isinstance(b, QuantizedTensor | ScaledTensor)):
        what = "an epilogue" if epilogue is not None else "a packed weight"
        raise ValueError(f"{op}: out= with {what} can't be compiled; use what is returned")
    if isinstance(a, Tensor):
        check_tensor(op, operand_names(op)[0], a)
        a, functions = apply_prologue(a, functions)
    left, right = _operands(op, a, b, epilogue is not None)
    # A vector a is one row, a vector b one column.
    vector_a, vector_b = left.tensors[0].dim() == 1, right.text == "dense" and right.tensors[0].dim() == 1
    ready = epilogue is None and left.text == right.text == "dense"
    if ready and bias is not None:
        check_tensor(op, operand_names(op)[2], bias)
        check_not_packed(op, operand_names(op)[2], bias)
    biases = added(op, bias)
    if vector_a or vector_b:
        if not ready and (vector_b or right.text.split(":")[0] != "packed"):
            first, second, _ = operand_names(op)
            raise ValueError(
                f"{op}: with an epilogue, {first} and {second} must be matrices, or batches of them"
            )
        if ready and biases:
            biases = [_of_rows_and_columns(biases[0], left.tensors[0], right.tensors[0])]
        left.tensors = [left.tensors[0].unsqueeze(0)] if vector_a else left.tensors
        right.tensors = [right.tensors[0].unsqueeze(-1)] if vector_b else right.tensors
    if out is None and torch.is_autocast_enabled(left.tensors[0].device.type):
        biases = _lower(op, left, right, biases)
    if out is not None:
        return _into(op, left, right, biases, out, options, alpha, beta, vector_a, vector_b)
    made = _run(op if not vector_b else "matmul", left, right, biases, epilogue, args, options, alpha, beta)
    if not (vector_a or vector_b):
        return made
    results = [
        _squeezed(x, vector_a, vector_b, right) for x in (made if isinstance(made, tuple) else (made,))
    ]
    return tuple(results) if isinstance(made, tuple) else results[0]


def _operands(op: str, a: Any, b: Any, takes_pair: bool) -> tuple[_Operand, _Operand]:
    if not isinstance(b, QuantizedTensor):
        left, right = operands_of(op, a, b, takes_pair)
        return _Operand.of(left), _Operand.of(right)
    # Put together, a weight would be a subclass of a tensor in the graph; its parts are plain tensors.
    check_not_packed(op, operand_names(op)[0], a)
    check_packed(op, a, b)
    if b.permutation is not None and a.shape[-1] == b.shape[-1]:
        a = a.index_select(-1, b.permutation)
    parts = [getattr(b, name) for name in PARTS]
    text, there = packed_text(b.format_name, b.dtype, parts), [x for x in parts if x is not None]
    return _Operand("dense", [a], [], a.dtype), _Operand(text, there, [b.group_size, *b.shape], b.dtype)


def _of_rows_and_columns(addend: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """The addend of a product of vectors, with the dimensions that the result lacks."""
    shape = (*(a.shape[:-1] if b.dim() == 1 else b.shape[:-2]), *(() if b.dim() == 1 else b.shape[-1:]))
    addend = addend.expand(shape)
    addend = addend.unsqueeze(-1) if b.dim() == 1 else addend
    return addend.unsqueeze(-2) if a.dim() == 1 else addend


def _squeezed(made: Tensor, vector_a: bool, vector_b: bool, right: _Operand) -> Tensor:
    if right.text.split(":")[0] == "packed":
        return made.squeeze(-2 if made.dim() == len(right.sizes) - 1 else -1)
    made = made.squeeze(-1) if vector_b else made
    return made.squeeze(-2 if not vector_b else -1) if vector_a else made


def _lower(op: str, left: _Operand, right: _Operand, biases: Sequence[Tensor]) -> list[Tensor]:
    """Operands and biases in the type that autocast asks for; returns the biases."""
    dtype = torch.get_autocast_dtype(left.tensors[0].device.type)
    if right.text.split(":")[0] == "packed":
        if right.default != dtype:
            first, second, _ = operand_names(op)
            raise TypeError(
                f"{op}: autocast brings {first} to {dtype}, and {second} is packed for {right.default}; "
                f"use autocast with that type, or {second}.to({dtype})"
            )
    elif right.text in ("dense", "pair"):
        right.tensors = [x.to(dtype) if x.dtype in AUTOCAST else x for x in right.tensors]
    if left.text == "dense":
        left.tensors = [x.to(dtype) if x.dtype in AUTOCAST else x for x in left.tensors]
        left.default = right.default = OUT_DTYPES.get(left.tensors[0].dtype, (dtype,))[0]
    return [x.to(dtype) if x.dtype in AUTOCAST else x for x in biases]


def _run(
    op: str, left: _Operand, right: _Operand, biases: Sequence[Tensor], epilogue: Epilogue[Any, Any] | None,
    args: Sequence[Any], options: Options, alpha: Number, beta: Number,
) -> Any:  # fmt: skip
    tensors, numbers, kinds = flatten([*biases, *args])
    given = [*left.tensors, *right.tensors, *tensors]
    grad = epilogue is not None and torch.is_grad_enabled() and any([x.requires_grad for x in given])
    if epilogue is None:
        results = _operator(
            op, left, right, given, numbers, kinds, len(biases), "", options, alpha, beta, False
        )
        return results[0]
    name = held_name(epilogue.name, left.tensors[0].device.type if grad else "")
    if not name:
        return _behind(op, left, right, biases, epilogue, args, options)
    results = _operator(op, left, right, given, numbers, kinds, len(biases), name, options, alpha, beta, grad)
    kept = list(results)[: len(results) - 1] if grad else list(results)
    return returned(kept, len(kept) > 1)


def _operator(
    op: str, left: _Operand, right: _Operand, given: Sequence[Tensor], numbers: Sequence[Any], kinds: str, biases: int,
    name: str, options: Options, alpha: Number, beta: Number, save: bool,
) -> Any:  # fmt: skip
    scaled = not (alpha == 1 and beta == 1)
    text = text_of(
        op,
        left.text,
        len(left.tensors),
        right.text,
        len(right.tensors),
        kinds,
        biases,
        name,
        True,
        scaled,
        options,
    )
    values = [alpha, beta, *numbers] if scaled else list(numbers)
    return torch.ops.gemmery.product(list(given), right.sizes, values, text, options.batch_invariant, save)


def _into(
    op: str, left: _Operand, right: _Operand, biases: Sequence[Tensor], out: Tensor, options: Options, alpha: Number,
    beta: Number, vector_a: bool, vector_b: bool,
) -> Tensor:  # fmt: skip
    if torch.is_grad_enabled() and any(
        [x.requires_grad for x in (*left.tensors, *right.tensors, *biases, out)]
    ):
        raise ValueError(f"{op}: out= does not support gradients, but one of the arguments requires them")
    to = out.unsqueeze(-1) if vector_b else out
    to = to.unsqueeze(-2) if vector_a else to
    how = options._replace(out_dtype=out.dtype if options.out_dtype is None else options.out_dtype)
    tensors, _, kinds = flatten(biases)
    scaled = not (alpha == 1 and beta == 1)
    text = text_of(
        op if not vector_b else "matmul", "dense", 1, "dense", 1, kinds, len(biases), "", True, scaled, how
    )
    given = [*left.tensors, *right.tensors, *tensors]
    torch.ops.gemmery.product_out(
        given, [], [alpha, beta] if scaled else [], text, options.batch_invariant, to
    )
    return out


def _behind(
    op: str, left: _Operand, right: _Operand, biases: Sequence[Tensor], epilogue: Any, args: Sequence[Any],
    options: Options,
) -> Any:  # fmt: skip
    """A product with a function that is compiled with the code around it."""
    wide = accumulator(left.tensors[0].dtype) if left.text == "dense" else torch.float32
    how = options._replace(out_dtype=wide)
    halves = [[x] for x in right.tensors] if right.text == "pair" else [right.tensors]
    text = "dense" if right.text == "pair" else right.text
    products = []
    for tensors in halves:
        part = _Operand(text, tensors, right.sizes, right.default)
        given = [*left.tensors, *tensors]
        products.append(_operator(op, left, part, given, [], "", 0, "", how, 1, 1, False)[0])
    product = products[0] if len(products) == 1 else torch.cat(products, dim=-1)
    if biases:
        product = product + (biases[0] if len(biases) == 1 else torch.cat(list(biases), -1))
    made = epilogue(product, *args)
    many = isinstance(made, tuple | list)
    results = list(made) if many else [made]
    types = kept_types(op, types_of(results, product), wide, right.default, options.out_dtype)
    return returned([x.to(kind) for x, kind in zip(results, types, strict=True)], many)
