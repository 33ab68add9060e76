"""The values of logits, `x @ weight.T + bias`, that a loss needs, without all logits in memory; and their gradients.

A cross entropy of a row, with or without label smoothing, class weights and z-loss, is a function of three numbers: the
logarithm of the row's sum of exponentials, the target's logit, and the (weighted) sum of the logits. One product
computes them all, by row reductions in its epilogue. So the forward pass writes no logits, and keeps one number a row.

The backward pass computes logits again, some columns at a time, and turns them into their gradient before they are
written, in 16 bits where the operands are: `g_lse * exp(logit - lse) + g_target * (column is the target) + g_sum *
weight`. For such a block, two products compute the complete gradient of these rows of the weight, and a part of the
gradient of x, which is summed in float32. So no gradient of a weight is ever summed up in 16 bits, and none needs a
copy in float32: what walking over tokens would cost (Hsu et al., "Liger Kernel", 2024). The recomputation of logits
instead of storing them follows Wijmans et al., "Cut Your Losses in Large-Vocabulary Language Models", 2024.

The gradient of a block of logits needs memory only until its two products have read it. As long as the weight's
gradient has enough rows that are not written yet, it is stored in these. So blocks are large, of_x is rarely read and
written, and blocks take no additional memory; the last blocks are smaller and do.

All sums are in a fixed order, and there are no atomics: the same bits in every run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from . import devices
from .api import addmm, linear, matmul
from .dtypes import accumulator
from .epilogues.function import Epilogue
from .precision import AskedPrecision
from .product.inner import inner_products
from .product.operator import LIBRARY
from .product.seen import in_transform, needs_dispatcher

#: Elements of a block of the logits' gradient, about: of one that lies in the weight's gradient; of one with memory of
#: its own beside such blocks; and of one where there is no gradient of the weight. 64 MB of 16 bits are not more than
#: the sum of x's gradient takes where it is rounded.
BLOCK, LAST_BLOCK, OWN_BLOCK = 1 << 28, 1 << 25, 1 << 26
#: Columns of such a block: a multiple of this, so that tiles are whole, and no fewer than that many.
_MULTIPLE, _FEWEST = 256, 1024
#: The least divisor of a gradient.
_TINY = 2.0**-100
#: A row of a block has a multiple of this number of elements, and so has its place in another matrix.
_ALIGNED, _LINE = 16, 128
#: Logits whose statistics one product computes on a GPU: it returns a few numbers of each row for every tile of
#: columns, three for 64 columns at most, which is 48 MB. The fewest rows of a block, and the number of logits that the
#: reference holds at a time.
_REDUCED, _LEAST_ROWS, _HELD = 1 << 28, 1 << 10, 1 << 25


class Rows(NamedTuple):
    """The statistics of each row of the logits, in the type of sums.

    Attributes:
        lse: (N,), the logarithms of the sums of exponentials.
        target: (N,), the targets' logits; 0 if the target is not a column.
        total: (N,), the sums of the logits, each times its class's weight; empty unless asked for.
    """

    lse: Tensor
    target: Tensor
    total: Tensor


def _capped(acc: Tensor, cap: Any) -> Tensor:
    return acc if cap is None else cap * torch.tanh(acc * (1 / cap))


def _statistics(acc: Tensor, columns: Tensor, target: Tensor, cap: Any) -> tuple[Tensor, Tensor]:
    z = _capped(acc, cap)
    return z.logsumexp(-1), torch.where(columns == target, z, 0.0).sum(-1)


def _statistics_and_total(
    acc: Tensor, columns: Tensor, target: Tensor, cap: Any, class_weight: Any
) -> tuple[Tensor, Tensor, Tensor]:
    z = _capped(acc, cap)
    total = z if class_weight is None else z * class_weight
    return z.logsumexp(-1), torch.where(columns == target, z, 0.0).sum(-1), total.sum(-1)


def _gradient(
    acc: Tensor, columns: Tensor, target: Tensor, lse: Tensor, of_lse: Tensor, of_target: Tensor, of_total: Any,
    cap: Any, class_weight: Any,
) -> Tensor:  # fmt: skip
    z = _capped(acc, cap)
    grad = torch.exp(z - lse) * of_lse + torch.where(columns == target, of_target, 0.0)
    if of_total is not None:
        grad = grad + (of_total if class_weight is None else of_total * class_weight)
    if cap is not None:
        near = z * (1 / cap)
        grad = grad * (1 - near * near)
    return grad


def _times(acc: Tensor, factor: Tensor) -> Tensor:
    return acc * factor


STATISTICS = Epilogue(_statistics)
STATISTICS_AND_TOTAL = Epilogue(_statistics_and_total)
GRADIENT = Epilogue(_gradient)
TIMES = Epilogue(_times)


def rows_of_logits(
    x: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, class_weight: Tensor | None, *, total: bool,
    softcap: float | None, columns: int | None, precision: AskedPrecision,
) -> Rows:  # fmt: skip
    """The statistics of the rows of `x @ weight.T + bias`, differentiable.

    Args:
        x, weight, bias: (N, K), (V, K) and (V,), of one type.
        target: (N,), integers.
        class_weight: (V,), of the type of sums; it has no gradient.
        total: whether the sum of the logits is asked for.
        softcap: `softcap * tanh(logit / softcap)` is what counts as a logit; None for none.
        columns: how many columns of the logits' gradient are in memory at a time; None to have it chosen.
    """
    arguments = (x, weight, bias, target, class_weight, total, softcap, columns, precision)
    if in_transform():
        return _reference(*arguments)
    given = (x, weight, bias, target, class_weight)
    run = torch.ops.gemmery.logits_rows if needs_dispatcher(given) else _rows
    return Rows(*run(*arguments))


class Block(NamedTuple):
    """Columns of the logits, whose gradient is in memory at a time.

    Attributes:
        columns: their numbers.
        place: the element of the weight's gradient from which their memory begins; None for separate memory.
    """

    columns: slice
    place: int | None


def blocks_of(rows: int, columns: int, features: int, most: int | None, *, is_kept: bool) -> Iterator[Block]:
    """The blocks of columns that a backward pass processes in turn.

    Args:
        most: the most columns of a block; None to have it chosen.
        is_kept: whether there is a gradient of the weight, (columns, features), in which blocks may lie.
    """

    def limit(elements: int) -> int:
        each = elements // max(rows, 1) // _MULTIPLE * _MULTIPLE
        return min(max(each, _FEWEST) if most is None else most, columns)

    begin, width = 0, limit(BLOCK)
    least = limit(LAST_BLOCK if is_kept else OWN_BLOCK)
    while is_kept:
        # The size that a block needs after the rows that are computed from it, with aligned rows and an aligned start.
        needs = width * (rows + features) + rows * _ALIGNED + _LINE
        if width < min(least, columns - begin):
            break
        if needs <= (columns - begin) * features:
            yield Block(slice(begin, begin + width), -(-(begin + width) * features // _LINE) * _LINE)
            begin += width
        else:
            # Few widths, because each has its own plans.
            width = width // 2 // _MULTIPLE * _MULTIPLE
    step = min(_even(columns - begin, least), least)
    for i in range(begin, columns, max(step, 1)):
        yield Block(slice(i, min(i + step, columns)), None)


def _even(size: int, most: int) -> int:
    """Parts of about one size, so that none is much smaller than the others."""
    parts = -(-size // max(most, 1))
    return min(size, -(-size // (parts * _MULTIPLE)) * _MULTIPLE)


# ---------------------------------------------------------------------------------------------------------------------
# Running


def _numbers(weight: Tensor) -> Tensor:
    """The numbers of the columns, with which targets are compared."""
    return torch.arange(weight.shape[0], dtype=torch.int32, device=weight.device)


def _statistics_of(
    x: Tensor, weight: Tensor, bias: Tensor | None, numbers: Tensor, target: Tensor, class_weight: Tensor | None,
    total: bool, softcap: float | None, precision: AskedPrecision,
) -> tuple[Tensor, ...]:  # fmt: skip
    args: tuple[Any, ...] = (numbers, target.to(torch.int32).unsqueeze(-1), softcap)
    if total:
        args = (*args, class_weight)
    epilogue = STATISTICS_AND_TOTAL if total else STATISTICS
    return cast(
        "tuple[Tensor, ...]", linear(x, weight, bias, epilogue=epilogue, args=args, precision=precision)
    )


def _rows(
    x: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, class_weight: Tensor | None, total: bool,
    softcap: float | None, columns: int | None, precision: AskedPrecision,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    N = x.shape[0]
    has_kernels = devices.current(x.device) is not None
    limit = max((_REDUCED if has_kernels else _HELD) // weight.shape[0], _LEAST_ROWS if has_kernels else 1)
    step = _even(max(N, 1), limit) if has_kernels else limit
    with inner_products(x):
        numbers = _numbers(weight)
        parts = [
            _statistics_of(
                x[i : i + step], weight, bias, numbers, target[i : i + step], class_weight, total, softcap, precision
            )
            for i in range(0, max(N, 1), step)
        ]  # fmt: skip
        found = parts[0] if len(parts) == 1 else tuple(map(torch.cat, zip(*parts, strict=True)))
        none = found[0].new_empty(0)
    return found[0], found[1], found[2] if total else none


def _reference(
    x: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, class_weight: Tensor | None, total: bool,
    softcap: float | None, columns: int | None, precision: AskedPrecision,
) -> Rows:  # fmt: skip
    """The same by torch, which any transform can look into; logits are in memory."""
    with torch.autocast(x.device.type, enabled=False):
        found = _statistics_of(
            x, weight, bias, _numbers(weight), target, class_weight, total, softcap, precision
        )
    return Rows(found[0], found[1], found[2] if total else found[0].new_empty(0))


def _backward(
    x: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, class_weight: Tensor | None, lse: Tensor,
    of_lse: Tensor, of_target: Tensor, of_total: Tensor | None, softcap: float | None, columns: int | None,
    precision: AskedPrecision, wanted: list[bool],
) -> list[Tensor]:  # fmt: skip
    """Gradients of x, weight and bias; those that are not requested are empty."""
    needs_x, needs_weight, needs_bias = wanted
    V = weight.shape[0]
    with inner_products(x):
        numbers, own = _numbers(weight), target.to(torch.int32)
        unit = None if x.dtype != torch.float16 else _largest(of_lse, of_target, of_total)
        factors = [t if t is None or unit is None else t / unit for t in (of_lse, of_target, of_total)]
        per_row = [None if t is None else t.unsqueeze(-1) for t in (own, lse, *factors)]

        def store_gradient(part: slice, grad: Tensor) -> None:
            args = (numbers[part], *per_row, softcap, None if class_weight is None else class_weight[part])
            own_bias = None if bias is None else bias[part]
            linear(x, weight[part], own_bias, epilogue=GRADIENT, args=args, out=grad, precision=precision)

        of_x = torch.empty(x.shape if needs_x else 0, dtype=accumulator(x.dtype), device=x.device)
        of_weight = torch.empty(weight.shape if needs_weight else 0, dtype=x.dtype, device=x.device)
        of_bias = torch.empty(V if needs_bias else 0, dtype=x.dtype, device=x.device)
        _by_blocks(
            x, weight, columns, store_gradient, of_x if needs_x else None, of_weight if needs_weight else None,
            of_bias if needs_bias else None, unit, precision,
        )  # fmt: skip
        return [(of_x if unit is None else of_x * unit).to(x.dtype), of_weight, of_bias]


def _largest(first: Tensor, *others: Tensor | None) -> Tensor:
    """The largest magnitude: what gradients of logits are multiples of, for a type in which a mean's would vanish."""
    found = [t.abs().amax() for t in (first, *others) if t is not None and t.numel()]
    return torch.stack(found).amax().clamp(min=_TINY) if found else first.new_ones(())


def _by_blocks(
    x: Tensor, weight: Tensor, most: int | None, store_gradient: Callable[[slice, Tensor], None], of_x: Tensor | None,
    of_weight: Tensor | None, of_bias: Tensor | None, unit: Tensor | None, precision: AskedPrecision,
) -> None:  # fmt: skip
    """Store gradients of x, in the type of sums, of weight and of bias, by blocks of columns of the logits.

    Args:
        most: the most columns of a block; None to have it chosen.
        store_gradient: stores the gradient of the logits in columns.
        unit: what that is a multiple of, and what is stored for x; None for 1.
    """
    how: dict[str, Any] = {"precision": precision}
    of_rows = how if unit is None else how | {"epilogue": TIMES, "args": (unit,)}
    (N, K), V = x.shape, weight.shape[0]
    own = None
    for part, place in blocks_of(N, V, K, most, is_kept=of_weight is not None):
        width = part.stop - part.start
        # Rows begin at multiples of 16 bytes, for any number of columns.
        shape = N, -(-width // _ALIGNED) * _ALIGNED
        if place is not None:
            assert of_weight is not None
            grad = of_weight.view(-1)[place : place + shape[0] * shape[1]].view(shape)[:, :width]
        else:
            own = torch.empty(shape, dtype=x.dtype, device=x.device) if own is None else own
            grad = own[:, :width]
        store_gradient(part, grad)
        if of_weight is not None:
            matmul(grad.mT, x, out=of_weight[part], **of_rows)
        if of_x is not None and part.start == 0:
            matmul(grad, weight[part], out=of_x, out_dtype=of_x.dtype, **how)
        elif of_x is not None:
            addmm(of_x, grad, weight[part], out=of_x, out_dtype=of_x.dtype, **how)
        if of_bias is not None:
            total = grad.sum(0, dtype=accumulator(x.dtype))
            of_bias[part] = total if unit is None else total * unit


# ---------------------------------------------------------------------------------------------------------------------
# The operators, for autograd, torch.compile and dispatch modes


def _rows_fake(
    x: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, class_weight: Tensor | None, total: bool,
    softcap: float | None, columns: int | None, precision: str,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    wide = accumulator(x.dtype)
    N = x.shape[0]
    return (
        x.new_empty(N, dtype=wide),
        x.new_empty(N, dtype=wide),
        x.new_empty(N if total else 0, dtype=wide),
    )


def _backward_fake(
    x: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, class_weight: Tensor | None, lse: Tensor,
    of_lse: Tensor, of_target: Tensor, of_total: Tensor | None, softcap: float | None, columns: int | None,
    precision: str, wanted: list[bool],
) -> list[Tensor]:  # fmt: skip
    shapes = (x.shape, weight.shape, (weight.shape[0],))
    return [x.new_empty(shape if needed else 0) for shape, needed in zip(shapes, wanted, strict=True)]


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    x, weight, bias, target, class_weight, ctx.total, ctx.softcap, ctx.columns, ctx.precision = inputs
    ctx.save_for_backward(x, weight, bias, target, class_weight, output[0])


def _gradients(ctx: Any, of_lse: Tensor, of_target: Tensor, of_total: Tensor) -> tuple[Any, ...]:
    x, weight, bias, target, class_weight, lse = ctx.saved_tensors
    wanted = list(ctx.needs_input_grad[:3])
    found = torch.ops.gemmery.logits_backward(
        x, weight, bias, target, class_weight, lse, of_lse, of_target, of_total if ctx.total else None, ctx.softcap,
        ctx.columns, ctx.precision, wanted,
    )  # fmt: skip
    made = [grad if needed else None for grad, needed in zip(found, wanted, strict=True)]
    return (*made, *[None] * 6)


def _no_second(ctx: Any, grads: list[Tensor]) -> None:
    raise NotImplementedError(
        "linear_cross_entropy: no gradient of a gradient; call backward or torch.autograd.grad without "
        "create_graph=True"
    )


_TENSORS = "Tensor x, Tensor weight, Tensor? bias, Tensor target, Tensor? class_weight"
#: By name: the schema, what runs, and what gives shapes and types alone.
_OPERATORS: dict[str, tuple[str, Any, Any]] = {
    "logits_rows": (
        f"({_TENSORS}, bool total, float? softcap, SymInt? columns, str precision) -> (Tensor, Tensor, Tensor)",
        _rows,
        _rows_fake,
    ),
    "logits_backward": (
        f"({_TENSORS}, Tensor lse, Tensor of_lse, Tensor of_target, Tensor? of_total, float? softcap, "
        "SymInt? columns, str precision, bool[] wanted) -> Tensor[]",
        _backward,
        _backward_fake,
    ),
}
for _name, (_schema, _run, _fake) in _OPERATORS.items():
    LIBRARY.define(_name + _schema, tags=torch.Tag.pt2_compliant_tag)
    for _key in ("CPU", "CUDA"):
        LIBRARY.impl(_name, _run, _key)
    torch.library.register_fake(f"gemmery::{_name}", _fake, lib=LIBRARY)
torch.library.register_autograd("gemmery::logits_rows", _gradients, setup_context=_save, lib=LIBRARY)
torch.library.register_autograd(
    "gemmery::logits_backward", _no_second, setup_context=lambda ctx, inputs, output: None, lib=LIBRARY
)
