"""The description of a product: its operands, its epilogue, and options of its computation."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..dtypes import Precision
from ..epilogues.decompositions import Composed
from ..epilogues.identity import Captured
from ..operands import Operand
from ..problem import Config
from .shape import result_shape

Number = int | float
#: A second operand, which may be packed, or a bias; or the left and the right half of its columns.
Factor = Tensor | Sequence[Tensor]
#: A type for the result, or with an epilogue one for each of its results.
OutTypes = torch.dtype | tuple[torch.dtype | None, ...] | None


class Options(NamedTuple):
    """Options of a product, in the words of `api.matmul`."""

    out_dtype: OutTypes = None
    precision: Precision = "ieee"
    fast_accum: bool = False
    batch_invariant: bool = False
    config: Config | dict[str, Any] | str | None = None


class Functions(NamedTuple):
    """The user's functions and their arguments, as `api.matmul` takes them."""

    epilogue: Any = None
    args: Sequence[Any] = ()
    prologue: Any = None
    prologue_args: Sequence[Any] = ()


NONE = Functions()
#: Alpha and beta of a product that is not scaled, known by their identity.
ONES: tuple[Number, Number] = (1, 1)


def scalars_of(alpha: Number, beta: Number) -> tuple[Number, Number]:
    """Alpha and beta as `run.product` takes them: `ONES` where both are 1."""
    # Types first: a tensor of 1 is equal to 1 as well.
    plain = type(alpha) is int and type(beta) is int and alpha == 1 and beta == 1
    return ONES if plain else (alpha, beta)


def unchanged(acc: Tensor) -> Tensor:
    """The epilogue of a product that has none."""
    return acc


def takes(function: Callable[..., Any], count: int) -> bool:
    """Whether a function can be called with a number of positional arguments; True if its signature is unknown."""
    try:
        signature = inspect.signature(function)
    except ValueError:
        return True  # a function of C without a signature
    try:
        signature.bind(*[None] * count)
    except TypeError:
        return False
    return True


@dataclass(frozen=True)
class Call:
    """A product as it is asked for.

    Attributes:
        op: the user's name for it, for messages.
        a, b: the operands, (..., M, K) and (..., K, N).
        function: the epilogue.
        captured: its identity, and the tensors in its closure.
        inputs: biases, the function's arguments after the product, those tensors; plain Python values among them.
        biases: how many of them are added to the product before the function sees it: 2, side by side, or fewer.
        options: options of its computation; `out_dtype` is the requested type.
        alpha, beta: numbers by which the product and the bias are multiplied.
        ready: whether the product has no user's function, so that a ready-made epilogue is enough.
        outer: factors by which rows and columns of the product are multiplied first.
        saves: whether the product that the function sees is a last result, in the operands' type, for the gradient.
    """

    op: str
    a: Operand
    b: Operand
    function: Callable[..., Any]
    captured: Captured
    inputs: tuple[Any, ...]
    biases: int
    options: Options
    alpha: Number = 1
    beta: Number = 1
    ready: bool = False
    outer: tuple[Tensor, ...] = ()
    saves: bool = False

    @property
    def dtype(self) -> torch.dtype:
        """The operands' type."""
        return self.a.matrix.dtype

    @property
    def device(self) -> torch.device:
        """The device on which it is computed."""
        return self.a.matrix.device

    @property
    def summed(self) -> torch.dtype:
        """The type of the sum."""
        return self.b.summed

    @property
    def wide(self) -> torch.dtype:
        """The type of the function's first argument: scales of rows and columns turn integers into float32."""
        return torch.float32 if self.outer else self.summed

    @property
    def given(self) -> tuple[Any, ...]:
        """The traced epilogue's arguments after the product."""
        return *self.outer, *self.inputs

    @property
    def lead(self) -> int:
        """The number of inputs before the function's own arguments."""
        return len(self.outer) + self.biases

    @property
    def own(self) -> tuple[Any, ...]:
        """The function's own arguments, as the caller gave them."""
        return self.inputs[self.biases : len(self.inputs) - self.captured.count]

    @property
    def does_nothing(self) -> bool:
        """Whether nothing is applied to the product, except for the operands' scales."""
        return self.function is unchanged and not self.biases and self.alpha == 1

    @property
    def shape(self) -> tuple[int, ...]:
        """The product's, (..., M, N)."""
        shape = self.a.shape_of(result_shape(self.op, self.a.matrix, self.b.matrix, self.b.is_packed))
        return shape if self.b.halves == 1 else (*shape[:-1], shape[-1] * self.b.halves)

    @property
    def tensors(self) -> list[Tensor]:
        """All inputs."""
        return [*self.a.tensors, *self.b.tensors, *[x for x in self.inputs if isinstance(x, Tensor)]]

    @property
    def values(self) -> tuple[Any, ...]:
        """The key of this call among others like it, in the order in which `cache.look` builds it."""
        return *self.a.values, *self.b.values, *self.inputs

    def ordered(self) -> Call:
        """The same, with the half first that comes first in memory, as kernels require."""
        return replace(self, b=self.b.ordered()) if self.b.halves > 1 else self

    def prologue_applied(self) -> Call:
        """The same without a prologue, which has been applied in torch."""
        return self if self.a.is_dense else replace(self, a=self.a.prologue_applied())

    def without_bias(self) -> Call:
        """The same without biases and outer scales, for a product that has them in it."""
        return replace(self, biases=0, outer=(), inputs=self.inputs[self.biases :])

    def apply(self, product: Tensor, given: Sequence[Any], rebuilt: bool) -> tuple[list[Tensor], bool]:
        """The function's results on a product, in torch, and whether it returned a tuple.

        Args:
            given: as the attribute.
            rebuilt: whether to run the function as it was captured, with the last inputs instead of its tensors, and
                not as it is now.
        """
        own = len(given) - self.captured.count
        function, values = self.function, [self.a.of_rows(x) for x in given[:own]]
        if rebuilt:
            function = self.captured.rebuild(given[own:])
        if self.b.swapped:
            product = torch.cat(product.chunk(2, dim=-1)[::-1], dim=-1)
        for scale in values[: len(self.outer)]:
            product = product.to(torch.float32) * scale
        values = values[len(self.outer) :]
        if self.biases:
            added = values[0] if self.biases == 1 else torch.cat(values[: self.biases], dim=-1)
            product, values = product + added, values[self.biases :]
        # Before the function, which may change the product in place.
        saved = [product.to(self.dtype, copy=True)] if self.saves else []
        try:
            # As in a kernel: parameters of a norm may be of another type than the product.
            with Composed():
                returned = function(product, *values)
        except TypeError as error:
            if takes(function, 1 + len(values)):
                raise
            raise TypeError(
                f"{self.op}: {error}; the epilogue is given the product and {len(self.own)} of args=; give as many as "
                "it takes after the product"
            ) from error
        many = isinstance(returned, tuple | list)
        results = list(returned) if isinstance(returned, tuple | list) else [returned]
        return results + saved, many
