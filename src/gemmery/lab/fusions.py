"""The epilogues that the bench measures, by the names that rows of suites give."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..epilogues import library
from .suites import Row


@dataclass(frozen=True)
class Fusion:
    """A measured epilogue.

    Attributes:
        function: of the product and the addends. operands: the addends: "row" for (N,), "matrix" for (M, N).
        halves: whether the output has half the product's columns.
    """

    function: Callable[..., Tensor]
    operands: tuple[str, ...] = ("row",)
    halves: bool = False

    def arguments(self, row: Row, fill: Callable[[Sequence[int]], Tensor]) -> tuple[Tensor, ...]:
        """Random operands for a row of a suite."""
        shapes = {"row": (row.N,), "matrix": (row.M, row.N)}
        return tuple(fill(shapes[operand]) for operand in self.operands)


FUSIONS: dict[str, Fusion] = {
    "swiglu": Fusion(library.swiglu, (), halves=True),
    "bias": Fusion(library.bias),
    "bias_gelu": Fusion(library.compose(library.bias, library.gelu)),
    "bias_gelu_tanh": Fusion(library.compose(library.bias, library.gelu_tanh)),
    "bias_relu_squared": Fusion(library.compose(library.bias, library.relu_squared)),
    "bias_residual": Fusion(library.compose(library.bias, library.residual), ("row", "matrix")),
}


def in_torch(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The same without epilogues: a product in torch, and the function applied to it."""

    def fused(a: Tensor, weight: Tensor, *args: Any) -> Tensor:
        return function(torch.nn.functional.linear(a, weight), *args)

    return fused
