"""The prologue: a torch function of A that runs on each tile as it is loaded.

The function is traced and lowered like an epilogue, over (M, K) instead of (M, N), and becomes part of A's loader.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ..dtypes import accumulator
from ..epilogues.function import captured_of
from ..epilogues.identity import Captured
from ..epilogues.lower import Program
from ..epilogues.programs import lowered_program
from ..epilogues.record import Untraceable
from .check import captured_name, check_tensor, moved
from .spec import Functions


@dataclass(frozen=True)
class Prologue:
    """A function of a product's first factor.

    Attributes:
        op: the product's name, for messages.
        function: the user's.
        captured: its identity, and the tensors in its closure.
        inputs: its arguments after the factor, then those tensors; plain Python values among them.
    """

    op: str
    function: Callable[..., Any]
    captured: Captured
    inputs: tuple[Any, ...]

    @property
    def tensors(self) -> list[Tensor]:
        """Its tensors."""
        return [x for x in self.inputs if isinstance(x, Tensor)]

    def in_torch(self, a: Tensor) -> Tensor:
        """The function's result on the whole factor, in the factor's type.

        Raises:
            ValueError: the result is not a tensor of the factor's shape.
        """
        own = len(self.inputs) - self.captured.count
        made = self.function(a.to(accumulator(a.dtype)), *self.inputs[:own])
        if not isinstance(made, Tensor) or made.shape != a.shape:
            what = tuple(made.shape) if isinstance(made, Tensor) else type(made).__name__
            raise ValueError(
                f"{self.op}: the prologue returns {what}; it must return a tensor of {tuple(a.shape)}"
            )
        return made.to(a.dtype)

    def program(self, a: Tensor) -> Program:
        """The function as a device function.

        Raises:
            epilogues.Untraceable: the function cannot be part of a kernel.
        """
        key = None if self.captured.key is None else ("prologue", self.captured.key)

        @functools.wraps(self.function)
        def function(block: Tensor, *inputs: Any) -> tuple[list[Tensor], bool]:
            own = len(inputs) - self.captured.count
            return [self.captured.rebuild(inputs[own:])(block, *inputs[:own])], False

        dims = [
            _dimensions(self, i, x, a) if isinstance(x, Tensor) else None for i, x in enumerate(self.inputs)
        ]
        made = lowered_program(
            function, key, accumulator(a.dtype), tuple(a.shape), self.inputs, dims, a.device, "prologue"
        )
        if "uniform(" in made.source:
            # Elements are counted over the product's batch, which may have more matrices than the factor's.
            raise Untraceable(f"{self.op}: a prologue can't draw random numbers")
        if made.paired or made.main is None or made.outputs[0].columns != "N":
            raise Untraceable(f"{self.op}: the prologue must return a tensor of its first argument's shape")
        return made


def make(op: str, a: Tensor, function: Any, args: Sequence[Any]) -> Prologue:
    """A prologue from a user's arguments.

    Raises:
        ValueError: shapes or devices do not fit.
        TypeError: the factor has integers, or an argument is of a kind that kernels do not accept.
    """
    if isinstance(args, Tensor) or not isinstance(args, tuple | list):
        raise TypeError(
            f"{op}: prologue_args is a {type(args).__name__}; it must be a tuple of the prologue's arguments"
        )
    if not a.dtype.is_floating_point:
        raise TypeError(f"{op}: a prologue takes floating-point operands, not {a.dtype}")
    function, captured = captured_of(function)
    made = Prologue(op, function, captured, tuple([moved(x, a) for x in (*args, *captured.tensors)]))
    for i, value in enumerate(made.inputs):
        if isinstance(value, Tensor):
            name = _name(made, i)
            check_tensor(op, name, value)
            if value.device != a.device:
                raise ValueError(f"{op}: {name} is on {value.device} and the operand on {a.device}")
            _dimensions(made, i, value, a)
        elif isinstance(value, int) and not -(1 << 63) <= value < 1 << 63:
            raise ValueError(f"{op}: {_name(made, i)} is {value}; integers must fit in 64 bits")
    return made


def _name(prologue: Prologue, i: int) -> str:
    own = len(prologue.inputs) - prologue.captured.count
    if i < own:
        return f"prologue_args[{i}]"
    return captured_name(prologue.captured, "prologue", i - own)


def _dimensions(prologue: Prologue, i: int, tensor: Tensor, a: Tensor) -> tuple[str, ...]:
    """A tensor's dimensions by the operand's names, in the words of `epilogues.trace.Shape`; or ValueError."""
    names = ["N", "M", *(f"b{place}" for place in range(a.dim() - 3, -1, -1))]
    found = []
    if tensor.dim() <= a.dim():
        sizes = zip(names, tensor.shape[::-1], a.shape[::-1], strict=False)
        found = [name if size == full else "1" if size == 1 else "" for name, size, full in sizes]
    if tensor.dim() > a.dim() or "" in found:
        raise ValueError(
            f"{prologue.op}: {_name(prologue, i)} is {tuple(tensor.shape)}; it must broadcast to {tuple(a.shape)}"
        )
    return tuple(found[::-1])


def apply_prologue(a: Tensor, functions: Functions) -> tuple[Tensor, Functions]:
    """The first operand with its prologue applied in torch, and the other functions."""
    if functions.prologue is None:
        return a, functions
    made = functions.prologue(a.to(accumulator(a.dtype)), *functions.prologue_args).to(a.dtype)
    return made, functions._replace(prologue=None, prologue_args=())
