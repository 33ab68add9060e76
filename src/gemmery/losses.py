"""Losses of a linear layer's outputs, which are never in memory as a whole: `gemmery.linear_cross_entropy`."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from .dtensors import is_sharded
from .dtypes import accumulator
from .logits import Rows, rows_of_logits
from .precision import AskedPrecision, resolved
from .product.check import check_not_packed, check_tensor
from .product.seen import autocast_dtype, check_forward_mode

Reduction = Literal["mean", "sum", "none"]

_OP = "linear_cross_entropy"
_REDUCTIONS = ("mean", "sum", "none")
_TYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_TARGETS = (torch.int32, torch.int64)
#: The default of `ignore_index`, as in torch.
_IGNORED = -100
#: Classes are numbered in int32.
_MOST = (1 << 31) - 1024


def linear_cross_entropy(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *,
    linear_bias: Tensor | None = None,
    weight: Tensor | None = None,
    reduction: Reduction = "mean",
    ignore_index: int | None = None,
    label_smoothing: float = 0.0,
    softcap: float | None = None,
    z_loss: float = 0.0,
    chunk_size: int | None = None,
    precision: AskedPrecision = "ieee",
) -> Tensor:
    """`cross_entropy(linear(input, linear_weight, linear_bias), target)`, without the logits in memory.

    It follows torch's `linear_cross_entropy`. The forward pass is one product whose epilogue reduces rows. The backward
    pass computes the logits again, a block of classes at a time, with three products per block. It needs memory for
    the gradients and for at most one such block, and none that grows with tokens times classes (as in Wijmans et
    al., "Cut Your Losses in Large-Vocabulary Language Models", 2024). All sums are in float32 and have a fixed order,
    so every run gives the same bits. Nothing waits for the GPU.

    Args:
        input: (..., K) in float16, bfloat16, float32 or float64, any strides.
        linear_weight: (C, K), of the same type.
        target: (...), class numbers, int32 or int64. A target that is neither a class nor ignored makes its loss NaN.
        linear_bias: (C,), of the same type.
        weight: (C,), a weight for each class, floating point; it has no gradient.
        reduction: "mean" divides the sum by the sum of the class weights of the targets that are not ignored, as torch
            does.
        ignore_index: targets that do not count; -100 by default.
        label_smoothing: from 0 to 1: the part of each target that is spread over all classes.
        softcap: use `softcap * tanh(logits / softcap)` in place of the logits, as in Gemma 2.
        z_loss: add `z_loss * logsumexp(logits) ** 2` to each loss, as in PaLM; with "mean", its mean over the targets
            that are not ignored.
        chunk_size: the maximum number of classes whose logit gradients are in memory at a time; chosen by default.
        precision: how float32 is multiplied, see `gemmery.matmul`.

    Returns:
        The loss in float32 (float64 for float64): a scalar, or (...) with reduction "none".

    Raises:
        ValueError: shapes or devices do not fit, or a number is out of range.
        TypeError: a type is not supported, or two types differ.
        NotImplementedError: a second derivative or a forward-mode derivative is required.

    Example:
        >>> import torch, gemmery
        >>> _ = torch.manual_seed(0)
        >>> hidden = torch.randn(2, 5, 16, requires_grad=True)
        >>> head, target = torch.randn(100, 16), torch.randint(100, (2, 5))
        >>> loss = gemmery.linear_cross_entropy(hidden, head, target)
        >>> loss.backward()
        >>> torch.allclose(loss, torch.nn.functional.cross_entropy((hidden @ head.T).flatten(0, 1), target.flatten()))
        True
    """
    _check(input, linear_weight, target, linear_bias, weight)
    check_numbers(_OP, reduction, ignore_index, label_smoothing, softcap, z_loss, chunk_size)
    check_forward_mode(_OP, (input, linear_weight, linear_bias))
    dtype = autocast_dtype(input.device)
    if dtype is not None and input.dtype != torch.float64:
        input, linear_weight = input.to(dtype), linear_weight.to(dtype)
        linear_bias = None if linear_bias is None else linear_bias.to(dtype)
    wide = accumulator(input.dtype)
    # It counts as a constant, as in torch.
    weight = None if weight is None else weight.detach().to(wide)
    flat = target.reshape(-1)
    rows = rows_of_logits(
        input.reshape(flat.numel(), input.shape[-1]), linear_weight, linear_bias, flat,
        weight if label_smoothing else None, total=label_smoothing > 0, softcap=softcap, columns=chunk_size,
        precision=resolved(precision, input),
    )  # fmt: skip
    ignored = _IGNORED if ignore_index is None else ignore_index
    losses = _losses(rows, flat, weight, linear_weight.shape[0], reduction, ignored, label_smoothing, z_loss)
    return losses.reshape(target.shape) if reduction == "none" else losses


def _losses(
    rows: Rows, target: Tensor, weight: Tensor | None, classes: int, reduction: str, ignored: int, smoothing: float,
    z_loss: float,
) -> Tensor:  # fmt: skip
    """The loss of rows from their statistics, by torch, which differentiates it."""
    counts = target != ignored
    is_class = (target >= 0) & (target < classes)
    factor = counts.to(rows.lse.dtype)
    if weight is not None:
        factor = torch.where(counts, weight[torch.where(is_class, target, 0)], 0.0)
    losses = factor * (rows.lse - rows.target)
    if smoothing:
        whole: Tensor | int = classes if weight is None else weight.sum()
        spread = torch.where(counts, whole * rows.lse - rows.total, 0.0)
        losses = (1 - smoothing) * losses + (smoothing / classes) * spread
    losses = torch.where(counts, losses, 0.0)
    losses = torch.where(is_class | ~counts, losses, math.nan)
    squares = torch.where(counts, z_loss * rows.lse.square(), 0.0) if z_loss else None
    if reduction == "none":
        return losses if squares is None else losses + squares
    # A sum of zeros if there is no z-loss, so the host does not wait.
    loss = losses.sum()
    if reduction == "mean":
        loss = loss / factor.sum()
    if squares is not None:
        loss = loss + (squares.sum() / counts.sum() if reduction == "mean" else squares.sum())
    return loss


# ---------------------------------------------------------------------------------------------------------------------
# Arguments


def _check(
    input: Tensor, linear_weight: Tensor, target: Tensor, linear_bias: Tensor | None, weight: Tensor | None
) -> None:
    all_given = {
        "input": input, "linear_weight": linear_weight, "target": target, "linear_bias": linear_bias, "weight": weight,
    }  # fmt: skip
    given = [(name, x) for name, x in all_given.items() if x is not None]
    if is_sharded(x for _, x in given):
        raise ValueError(
            f"{_OP}: a tensor is a DTensor; give whole tensors (full_tensor), or local ones (to_local), and combine "
            "the losses yourself"
        )
    for name, x in given:
        check_not_packed(_OP, name, x, "the second operand of gemmery.linear; here, give it dense")
        check_tensor(_OP, name, x)
        if x.device != input.device:
            raise ValueError(
                f"{_OP}: input is on {input.device} and {name} on {x.device}; they must be on the same device"
            )
    _check_types(input, linear_weight, target, linear_bias, weight)
    if linear_weight.dim() != 2 or not 0 < linear_weight.shape[0] <= _MOST:
        raise ValueError(
            f"{_OP}: linear_weight is {tuple(linear_weight.shape)}; it must be (C, K), with at least one class"
        )
    classes, K = linear_weight.shape
    if input.dim() == 0 or input.shape[-1] != K:
        raise ValueError(
            f"{_OP}: input is {tuple(input.shape)} and linear_weight {tuple(linear_weight.shape)}; input must be "
            f"(..., {K})"
        )
    if target.shape != input.shape[:-1]:
        raise ValueError(
            f"{_OP}: target is {tuple(target.shape)} and input {tuple(input.shape)}; target must be "
            f"{tuple(input.shape[:-1])}, a class for each row"
        )
    for name, x in given[3:]:
        if tuple(x.shape) != (classes,):
            raise ValueError(f"{_OP}: {name} is {tuple(x.shape)}; it must be ({classes},)")


def _check_types(
    input: Tensor, linear_weight: Tensor, target: Tensor, linear_bias: Tensor | None, weight: Tensor | None
) -> None:
    if target.dtype not in _TARGETS:
        raise TypeError(
            f"{_OP}: target is {target.dtype}; it must be torch.int64 or torch.int32: probabilities of classes are not "
            "supported"
        )
    lowers = autocast_dtype(input.device) is not None
    for name, x in (("input", input), ("linear_weight", linear_weight), ("linear_bias", linear_bias)):
        if x is None:
            continue
        if x.dtype not in _TYPES:
            raise TypeError(f"{_OP}: {name} is {x.dtype}; it must be one of {', '.join(map(str, _TYPES))}")
        if x.dtype != input.dtype and (not lowers or torch.float64 in (x.dtype, input.dtype)):
            raise TypeError(
                f"{_OP}: input is {input.dtype} and {name} is {x.dtype}; they must have the same type"
            )
    if weight is not None and weight.dtype not in _TYPES:
        raise TypeError(f"{_OP}: weight is {weight.dtype}; it must be one of {', '.join(map(str, _TYPES))}")


def check_numbers(
    op: str, reduction: str, ignore_index: int | None, label_smoothing: float, softcap: float | None, z_loss: float,
    chunk_size: int | None,
) -> None:  # fmt: skip
    """ValueError or TypeError unless the numbers of a loss are such."""
    if reduction not in _REDUCTIONS:
        raise ValueError(f"{op}: reduction is {reduction!r}; it must be one of {', '.join(_REDUCTIONS)}")
    if ignore_index is not None and (isinstance(ignore_index, bool) or not isinstance(ignore_index, int)):
        raise TypeError(f"{op}: ignore_index is a {type(ignore_index).__name__}; it must be an int or None")
    for name, value in (("label_smoothing", label_smoothing), ("softcap", softcap), ("z_loss", z_loss)):
        if value is not None and (isinstance(value, bool) or not isinstance(value, int | float)):
            raise TypeError(f"{op}: {name} is a {type(value).__name__}; it must be a number")
    if not 0 <= label_smoothing <= 1:
        raise ValueError(f"{op}: label_smoothing is {label_smoothing}; it must be from 0 to 1")
    if softcap is not None and not 0 < softcap < math.inf:
        raise ValueError(f"{op}: softcap is {softcap}; it must be positive, or None")
    if not 0 <= z_loss < math.inf:
        raise ValueError(f"{op}: z_loss is {z_loss}; it must not be negative")
    if chunk_size is not None and (isinstance(chunk_size, bool) or not isinstance(chunk_size, int)):
        raise TypeError(f"{op}: chunk_size is a {type(chunk_size).__name__}; it must be an int or None")
    if chunk_size is not None and chunk_size < 1:
        raise ValueError(f"{op}: chunk_size is {chunk_size}; it must be at least 1")
