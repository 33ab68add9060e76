"""A whole feed-forward block, two layers and the activation between them, with its own gradient.

`down(f(up(x)))` takes two kernels. Its backward pass takes one for each gradient of an operand: the epilogue of the
product that computes the gradient of the hidden values continues to the gradient of the first product, and recomputes
the hidden values. So these are not saved, and no elementwise kernel runs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..api import addmm, linear, matmul
from ..dtensors import is_sharded
from ..epilogues.function import Epilogue
from ..precision import AskedPrecision, resolved
from ..product.spec import Factor


class Differentiable:
    """A function of the first product, as the two epilogues of a block.

    Attributes:
        forward: of the product: the function's result, and the product.
        backward: of the result's gradient and the product: the product's gradient, and the result again.
    """

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        def forward(acc: Tensor) -> tuple[Tensor, Tensor]:
            return function(acc), acc

        def backward(acc: Tensor, product: Tensor) -> tuple[Tensor, Tensor]:
            # One row would count as a row for all.
            product = product.expand(*acc.shape[:-1], product.shape[-1])
            pulled: Any = torch.func.vjp(function, product.to(acc.dtype))
            result, pull = pulled
            (grad,) = pull(acc)
            return grad, result

        self.forward = Epilogue(forward)
        self.backward = Epilogue(backward)


def feed_forward(
    x: Tensor, first: Factor, bias: Factor | None, second: Tensor, second_bias: Tensor | None,
    function: Epilogue[..., Tensor], differentiable: Differentiable, precision: AskedPrecision, batch_invariant: bool,
) -> Tensor:  # fmt: skip
    """`f(x @ first.T + bias) @ second.T + second_bias`, for tensors of two dimensions or more.

    Args:
        first, bias: the first layer's; or the halves of its outputs, if f halves its input.
        function, differentiable: f.
    """
    weights = tuple(first) if isinstance(first, tuple | list) else (first,)
    biases = () if bias is None else tuple(bias) if isinstance(bias, tuple | list) else (bias,)
    tensors = (x, second, second_bias, *weights, *biases)
    if _fits(tensors):
        # The backward pass uses the settings of the forward pass.
        how = (resolved(precision, x), batch_invariant)
        result: Tensor = _FeedForward.apply(differentiable, how, len(weights), *tensors)[0]  # type: ignore[no-untyped-call]
        return result
    hidden = linear(x, first, bias, epilogue=function, precision=precision, batch_invariant=batch_invariant)
    return linear(hidden, second, second_bias, precision=precision, batch_invariant=batch_invariant)  # type: ignore[no-any-return]


def _fits(tensors: tuple[Tensor | None, ...]) -> bool:
    """Whether the block's own gradient is required, and is that of these tensors: under autocast it is the layers'."""
    x = tensors[0]
    assert x is not None
    if not torch.is_grad_enabled() or torch.is_autocast_enabled(x.device.type):
        return False
    given = [t for t in tensors if t is not None]
    # For DTensors, each rank differentiates its part of each product.
    return any(t.requires_grad for t in given) and not is_sharded(given)


class _FeedForward(torch.autograd.Function):
    """The block; its second result is the first product, which is saved, so that its gradient can be differentiated."""

    @staticmethod
    def forward(
        differentiable: Differentiable, how: tuple[Any, ...], halves: int, x: Tensor, second: Tensor,
        second_bias: Tensor | None, *others: Tensor,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        options = {"precision": how[0], "batch_invariant": how[1]}
        weights, biases = others[:halves], others[halves:]
        hidden, product = linear(
            x, weights if halves > 1 else weights[0], (biases if len(biases) > 1 else biases[0]) if biases else None,
            epilogue=differentiable.forward, **options,
        )  # fmt: skip
        return linear(hidden, second, second_bias, **options), product

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        differentiable, how, halves, x, second, second_bias, *others = inputs
        ctx.save_for_backward(x, second, output[1], *others[:halves])
        ctx.differentiable, ctx.how, ctx.biases = (
            differentiable,
            how,
            (second_bias is not None, len(others) - halves),
        )
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, of_product: Tensor | None) -> tuple[Any, ...]:
        x, second, product, *weights = ctx.saved_tensors
        options = {"precision": ctx.how[0], "batch_invariant": ctx.how[1]}
        _, _, _, needs_x, needs_second, needs_bias, *needs = ctx.needs_input_grad
        of_second = of_second_bias = None
        if grad is not None:
            made, hidden = matmul(
                grad, second, epilogue=ctx.differentiable.backward, args=(product,), **options
            )
            of_product = made if of_product is None else made + of_product
            if needs_second:
                of_second = matmul(_rows(grad).mT, _rows(hidden), **options)
            if needs_bias:
                of_second_bias = _summed(grad)
        if of_product is None:
            return tuple([None] * len(ctx.needs_input_grad))
        of_weights, of_x = _of_first(x, weights, of_product, needs[: len(weights)], needs_x, options)
        of_biases = _of_biases(of_product, ctx.biases[1], needs[len(weights) :])
        return None, None, None, of_x, of_second, of_second_bias, *of_weights, *of_biases


def _of_first(
    x: Tensor, weights: list[Tensor], grad: Tensor, needs: list[bool], needs_x: bool, options: dict[str, Any]
) -> tuple[list[Tensor | None], Tensor | None]:
    """Gradients of the first layer's weights, and of its input."""
    parts = grad.chunk(len(weights), dim=-1)
    of_weights = [
        matmul(_rows(part).mT, _rows(x), **options) if wanted else None
        for part, wanted in zip(parts, needs, strict=True)
    ]
    if not needs_x:
        return of_weights, None
    of_x = matmul(_rows(parts[0]), weights[0], **options)
    for part, weight in zip(parts[1:], weights[1:], strict=True):
        of_x = addmm(of_x, _rows(part), weight, **options)
    return of_weights, of_x.reshape(x.shape)


def _of_biases(grad: Tensor, count: int, needs: list[bool]) -> list[Tensor | None]:
    parts = grad.chunk(count, dim=-1) if count else ()
    return [_summed(part) if wanted else None for part, wanted in zip(parts, needs, strict=True)]


def _rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])


def _summed(grad: Tensor) -> Tensor:
    wide = torch.float64 if grad.dtype == torch.float64 else torch.float32
    return _rows(grad).sum(0, dtype=wide).to(grad.dtype)
