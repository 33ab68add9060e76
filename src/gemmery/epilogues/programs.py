"""A user's functions as device functions: traced once, and found again by their identity."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..memo import keep
from .identity import value_key
from .lower import Program, lower
from .record import Untraceable
from .trace import Number, Shape, trace

#: Programs, or why there is none.
_programs: dict[Any, Program | str] = {}


def lowered_program(
    function: Callable[..., tuple[list[Tensor], bool]], key: Any, dtype: torch.dtype, shape: tuple[int, ...],
    inputs: Sequence[Any], dims: Sequence[tuple[str, ...] | None], device: torch.device, role: str = "epilogue",
    narrow: bool = False,
) -> Program:  # fmt: skip
    """A function of a block and other inputs as a device function; memoized by `key`, unless that is None.

    Args:
        function: gives its results and whether it returns a tuple.
        dtype, shape: of its first argument.
        dims: of the inputs that are tensors; see `epilogues.trace.Shape`.
        role: the function's name in messages.
        narrow: whether a tile may be as wide as the block.
    """
    rank, odd = len(shape), shape[-1] % 2 == 1
    arguments: list[Any] = [Shape(dtype, (*(f"b{i}" for i in range(rank - 2)), "M", "N"))]
    places: list[int] = []
    constants: dict[int, Any] = {}
    for i, (value, its_dims) in enumerate(zip(inputs, dims, strict=True)):
        if its_dims is not None:
            arguments.append(Shape(value.dtype, its_dims))
        elif isinstance(value, int | float) and not isinstance(value, bool):
            arguments.append(Number(isinstance(value, int)))
        else:
            constants[i] = value
            continue
        places.append(i)
    known = {i: value_key(value) for i, value in constants.items()}
    if None in known.values():
        key = None
    if key is not None:
        key = (key, tuple(arguments), tuple(places), tuple(known.items()), odd, narrow, device.type)
        found = _programs.get(key)
        if isinstance(found, str):
            raise Untraceable(found)
        if found is not None:
            return found
    many = False

    @functools.wraps(function)
    def traced(product: Tensor, *values: Any) -> tuple[Tensor, ...]:
        nonlocal many
        given = [constants.get(i) for i in range(len(inputs))]
        for place, value in zip(places, values, strict=True):
            given[place] = value
        results, many = function(product, *given)
        return tuple(results)

    try:
        # A function without a key may ask whether gradients are recorded.
        grad = key is None and torch.is_grad_enabled()
        graph, sizes = trace(traced, arguments, rank, odd, device, role, grad)
        made = lower(
            graph, arguments, sizes, getattr(function, "__name__", type(function).__name__), role, narrow
        )
    except Untraceable as error:
        if key is not None:
            # A gradient that torch has to compute asks again in every step.
            keep(_programs, key, str(error))
        raise
    # Arguments are counted from the product; inputs from 0, constants among them.
    made = replace(
        made, inputs=tuple(places[i - 1] for i in made.inputs), numbers=tuple(places[i - 1] for i in made.numbers),
        many=many,
    )  # fmt: skip
    if key is not None:
        keep(_programs, key, made)
    return made
