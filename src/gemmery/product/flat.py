"""A call as an operator's arguments: tensors, sizes, numbers, and a text that describes them (`Parsed`)."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..epilogues.function import Held, named
from ..operands import rebuild
from ..problem import config_text
from .build import UNCHANGED
from .spec import Call, Options, OutTypes, unchanged


@dataclass(frozen=True)
class Parsed:
    """The content of an operator's text.

    Attributes:
        a, b: the operands, as `operands.rebuild` takes them, and the number of tensors of each.
        kinds: a letter for each input: t(ensor), f(loat), i(nt), N(one), T(rue) or F(alse).
        biases: the number of inputs that are added first.
        epilogue: the name of the function; "" for none.
        is_compiled: whether it comes from compiled code, which has no tensors of the function's closure.
        scaled: whether alpha and beta are the first numbers; else they are 1.
        out_dtype: see `type_text`.
        precision, fast_accum, config: see `product.spec.Options`.
    """

    op: str
    a: str
    of_a: int
    b: str
    of_b: int
    kinds: str
    biases: int
    epilogue: str
    is_compiled: bool
    scaled: bool
    out_dtype: str
    precision: str
    fast_accum: bool
    config: str


@functools.lru_cache(4096)
def parsed(text: str) -> Parsed:
    """The content of a text."""
    op, a, of_a, b, of_b, kinds, biases, epilogue, is_compiled, scaled, out_dtype, precision, fast, config = (
        text.split("|")
    )
    return Parsed(
        op, a, int(of_a), b, int(of_b), kinds, int(biases), epilogue, is_compiled == "1", scaled == "1", out_dtype,
        precision, fast == "1", config,
    )  # fmt: skip


def flatten(inputs: Sequence[Any]) -> tuple[list[Tensor], list[float], str]:
    """Tensors, numbers, and a letter for each input; see `Parsed`."""
    tensors, numbers, kinds = [], [], ""
    for value in inputs:
        if isinstance(value, Tensor):
            tensors.append(value)
            kinds += "t"
        elif value is None:
            kinds += "N"
        elif isinstance(value, bool):
            kinds += "T" if value else "F"
        elif isinstance(value, int | float):
            numbers.append(value)
            kinds += "i" if isinstance(value, int) else "f"
        else:
            raise TypeError(
                f"epilogue: an argument is a {type(value).__name__}; with gradients and under torch.compile, arguments "
                f"are tensors, numbers, True, False and None"
            )
    return tensors, numbers, kinds


def unflatten(tensors: Sequence[Tensor], numbers: Sequence[float], kinds: str) -> list[Any]:
    """The inverse of `flatten`."""
    left, counted = iter(tensors), iter(numbers)
    constants = {"N": None, "T": True, "F": False}
    values: list[Any] = []
    for kind in kinds:
        if kind == "t":
            values.append(next(left))
        elif kind in "fi":
            number = next(counted)
            values.append(float(number) if kind == "f" else int(number))
        else:
            values.append(constants[kind])
    return values


def type_text(out_dtype: OutTypes) -> str:
    """Types as an operator's argument."""
    types = out_dtype if isinstance(out_dtype, tuple) else (out_dtype,)
    names = ",".join(["" if x is None else str(x).removeprefix("torch.") for x in types])
    return names + ("," if isinstance(out_dtype, tuple) else "")


def type_of_text(text: str) -> OutTypes:
    """Types from an operator's argument."""
    types = tuple([getattr(torch, name) if name else None for name in text.split(",")])
    return types[:-1] if "," in text else types[0]


def call_of(
    tensors: Sequence[Tensor], sizes: Sequence[int], numbers: Sequence[Any], text: str, batch_invariant: bool
) -> Call:
    """The call that an operator was given."""
    d = parsed(text)
    a = rebuild(d.a, tensors[: d.of_a], ())
    b = rebuild(d.b, tensors[d.of_a : d.of_a + d.of_b], sizes)
    alpha, beta = numbers[:2] if d.scaled else (1, 1)
    inputs = tuple(unflatten(tensors[d.of_a + d.of_b :], numbers[2 if d.scaled else 0 :], d.kinds))
    options = Options(type_of_text(d.out_dtype), d.precision, d.fast_accum, batch_invariant, d.config or None)  # type: ignore[arg-type]
    captured = held_by(d).captured
    function = captured.rebuild(inputs[len(inputs) - captured.count :]) if d.epilogue else unchanged
    ready = not d.epilogue and a.is_dense and b.is_dense
    outer = tuple([x for x in (a.outer, b.outer) if x is not None])
    return Call(d.op, a, b, function, captured, inputs, d.biases, options, alpha, beta, ready, outer)


def held_by(d: Parsed) -> Any:
    """The function that an operator names as its epilogue.

    Raises:
        ValueError: the function is from compiled code and has tensors that the compiler does not know.
        RuntimeError: the function is from compiled code, and one of its numbers has changed since.
    """
    if not d.epilogue:
        return UNCHANGED
    held: Held = named(d.epilogue)
    if d.is_compiled:
        if held.captured.count:
            raise ValueError(
                "epilogue: under torch.compile, pass its tensors through args, not through its closure"
            )
        held.check_unchanged()
    return held


def arguments_of(
    call: Call, epilogue: str, is_compiled: bool = False
) -> tuple[list[Tensor], list[int], list[Any], str, bool]:
    """A call as an operator's arguments; written so that torch.compile can trace it.

    Args:
        epilogue: the name under which its function is held; "" for none.
        is_compiled: see `Parsed`.
    """
    tensors, numbers, kinds = flatten(call.inputs)
    scaled = not (call.alpha == 1 and call.beta == 1)
    a, b = call.a, call.b
    out_dtype, precision, fast_accum, batch_invariant, config = call.options
    parts = [
        call.op, a.text, str(len(a.tensors)), b.text, str(len(b.tensors)), kinds, str(call.biases), epilogue,
        str(int(is_compiled)), str(int(scaled)), type_text(out_dtype), precision, str(int(fast_accum)),
        config_text(config) or "",
    ]  # fmt: skip
    given = [call.alpha, call.beta, *numbers] if scaled else numbers
    return [*a.tensors, *b.tensors, *tensors], b.sizes, given, "|".join(parts), batch_invariant
