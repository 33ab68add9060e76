"""A product with an epilogue as it is to be computed: what the user gave, checked as far as shapes go."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch._C import _are_functorch_transforms_active, _len_torch_dispatch_stack
from torch.compiler import is_compiling

from .dispatch import (
    Options,
    OutTypes,
    check_scalars,
    check_tensor,
    check_tensors,
    moved,
    operand_names,
    result_dtype,
    result_shape,
    right_factor,
)
from .dtypes import PRECISIONS, accumulator
from .epilogues.function import captured_of
from .epilogues.identity import Captured
from .epilogues.table import TYPES
from .epilogues.trace import stand_ins
from .formats.tensor import QuantizedTensor
from .prologue import Prologue

#: A factor, which may be packed, or a bias; or the left and the right half of its columns.
Factor = Tensor | Sequence[Tensor]

#: What results can be.
_NAMES = ", ".join(str(dtype).removeprefix("torch.") for dtype in TYPES)


def unchanged(acc: Tensor) -> Tensor:
    """The epilogue of a product that has only a prologue."""
    return acc


@dataclass(frozen=True)
class Call:
    """A product with an epilogue as it is to be computed.

    Attributes:
        function: the epilogue.
        captured: what it is, and the tensors that it takes from outside.
        inputs: what scales the product's columns, if `scaled`, biases, the function's arguments after the product,
            those tensors; plain Python values among them.
        biases: how many of them are added to the product before the function sees it: 2, side by side, or fewer.
        right: the right half of b's columns, where they are two matrices; b is the left one then.
        swapped: whether b is the right half, and `right` the left one; only for kernels.
        saves: whether the product that the function sees is a last result, in the operands' type, for the gradient.
        prologue: what happens to a before.
        weight: the second factor, where it is packed; b only has its shape, type and device then.
        scales: factors of both operands that change along K, over (..., M) and (N) by K, for how many rows of each
            there is one, and for how many columns.
    """

    op: str
    a: Tensor
    b: Tensor
    function: Callable[..., Any]
    captured: Captured
    inputs: tuple[Any, ...]
    biases: int
    out_dtype: OutTypes
    options: Options
    right: Tensor | None = None
    swapped: bool = False
    saves: bool = False
    prologue: Prologue | None = None
    weight: QuantizedTensor | None = None
    scales: tuple[Tensor, Tensor, int, int, int] | None = None

    @property
    def summed(self) -> torch.dtype:
        """The type of the sum, which the function is given."""
        return accumulator(self.a.dtype) if self.scales is None else torch.float32

    @property
    def scaled(self) -> bool:
        """Whether the first input multiplies the product's columns before anything else happens to them."""
        return self.weight is not None and self.weight.channel is not None

    @property
    def does_nothing(self) -> bool:
        """Whether nothing happens to the product."""
        return self.function is unchanged and not self.biases

    @property
    def lead(self) -> int:
        """How many of the inputs come before the function's own."""
        return self.scaled + self.biases

    @property
    def shape(self) -> tuple[int, ...]:
        """The product's, (..., M, N)."""
        *lead, columns = result_shape(self.op, self.a, self.b)
        return *lead, columns * (1 if self.right is None else 2)

    @property
    def between(self) -> int | None:
        """Elements from the left half of b's columns to the right one, where they are two matrices."""
        if self.right is None:
            return None
        return (self.right.data_ptr() - self.b.data_ptr()) // self.b.element_size()

    @property
    def named_tensors(self) -> list[tuple[str, Tensor]]:
        """All that goes in, each with what its user calls it."""
        first, second, _ = operand_names(self.op)
        named: list[tuple[str, Any]] = [(first, self.a), (second, self.b), (second, self.right)]
        if self.weight is not None:
            named += [(f"{second}'s {name}", x) for name, x in self.weight.parts().items()]
        if self.scales is not None:
            named += [
                (f"{name}'s scales", x) for name, x in zip((first, second), self.scales[:2], strict=True)
            ]
        named += [(input_name(self, i), x) for i, x in enumerate(self.inputs)]
        if self.prologue is not None:
            named += [("a tensor of the prologue", x) for x in self.prologue.tensors]
        return [(name, x) for name, x in named if isinstance(x, Tensor)]

    @property
    def tensors(self) -> list[Tensor]:
        """All that goes in."""
        before = () if self.prologue is None else self.prologue.tensors
        packed = () if self.weight is None else self.weight.parts().values()
        scales = () if self.scales is None else self.scales[:2]
        given = (self.a, self.b, self.right, *packed, *scales, *self.inputs, *before)
        return [x for x in given if isinstance(x, Tensor)]

    def upwards(self) -> Call:
        """The same with the half first that comes first in memory, as kernels want it."""
        if self.right is None or self.right.data_ptr() >= self.b.data_ptr():
            return self
        return replace(self, b=self.right, right=self.b, swapped=True)

    def opened(self) -> Call:
        """The same without a prologue, which has been applied in torch."""
        return (
            self if self.prologue is None else replace(self, a=self.prologue.in_torch(self.a), prologue=None)
        )

    def bare(self) -> Call:
        """The same without biases, for a product that has them in it."""
        return replace(self, biases=0, inputs=self.inputs[self.lead :])

    @property
    def given(self) -> tuple[Any, ...]:
        """The function's own arguments, as the caller gave them."""
        end = len(self.inputs) - self.captured.count
        return self.inputs[self.lead : end]

    def apply(self, product: Tensor, inputs: Sequence[Any], rebuilt: bool) -> tuple[list[Tensor], bool]:
        """The function's results on a product, in torch, and whether it returned a tuple.

        Args:
            rebuilt: run the function as it was captured, with the last inputs in the place of its tensors; otherwise
                as it is now.
        """
        own = len(inputs) - self.captured.count
        function, values = self.function, list(inputs[:own])
        if rebuilt:
            function = self.captured.rebuild(inputs[own:])
        if self.swapped:
            product = torch.cat(product.chunk(2, dim=-1)[::-1], dim=-1)
        if self.scaled:
            product, values = product * values[0], values[1:]
        if self.biases:
            added = values[0] if self.biases == 1 else torch.cat(values[: self.biases], dim=-1)
            product, values = product + added, values[self.biases :]
        # Before the function, which may change the product in place.
        saved = [product.to(self.a.dtype, copy=True)] if self.saves else []
        returned = function(product, *values)
        many = isinstance(returned, tuple | list)
        results = list(returned) if isinstance(returned, tuple | list) else [returned]
        return results + saved, many


def outputs_of(call: Call, product: Tensor, inputs: Sequence[Any] | None = None) -> tuple[list[Tensor], bool]:
    """What the function makes of a product in torch, cast as the kernel would; and whether it returned a tuple."""
    results, many = call.apply(product, call.inputs if inputs is None else inputs, inputs is not None)
    if not results or not all(isinstance(x, Tensor) for x in results):
        what = "something else than tensors" if results else "no tensor"
        raise TypeError(f"{call.op}: the epilogue returns {what}")
    columns = _columns_of_wide(call) if product.shape[-1] <= 2 else None
    types = output_types(call, described(results, product, columns))
    return [x.to(dtype) for x, dtype in zip(results, types, strict=True)], many


def described(
    results: Sequence[Tensor], product: Tensor, columns: Sequence[int] | None = None
) -> list[tuple[torch.dtype, bool]]:
    """The types that a function left its results in, and which are matrices: not the product's reduced rows.

    Args:
        columns: of the results of a wide product, where they are known. In a product of one column or two, the columns
            of its own don't tell a row that has kept its dimension from a matrix.
    """
    narrow = product.shape[-1] <= 2 and columns is None
    widths = [x.shape[-1] if x.dim() else 1 for x in results] if columns is None else columns
    return [
        (x.dtype, x.dim() == product.dim() and (narrow or width != 1))
        for x, width in zip(results, widths, strict=True)
    ]


def _columns_of_wide(call: Call) -> list[int] | None:
    """How many columns a call's results have where the product is wide; None where the function fails there."""
    sizes = stand_ins(len(call.shape), bool(call.shape[-1] % 2))[0]

    def columns() -> list[int] | None:
        meta = [
            torch.empty(sizes.of(dimensions(call, i, x, call.shape)), dtype=x.dtype, device="meta")
            if isinstance(x, Tensor)
            else x
            for i, x in enumerate(call.inputs)
        ]
        product = torch.empty((*sizes.batch, sizes.M, sizes.N), dtype=call.summed, device="meta")
        try:
            return [x.shape[-1] if x.dim() else 1 for x in call.apply(product, meta, rebuilt=True)[0]]
        except (RuntimeError, ValueError, TypeError, IndexError):
            return None  # it depends on the sizes

    # In a thread of its own nothing that surrounds the call, such as a mode, takes part.
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(columns).result()


def output_types(call: Call, outputs: Sequence[tuple[torch.dtype, bool]]) -> list[torch.dtype]:
    """The types of results, given those that the function leaves them in and which are matrices.

    What is still in the accumulator's type becomes the type of a product, or the one that was asked for; reduced rows,
    and what the function has cast, stay.
    """
    if call.saves:
        return [*output_types(replace(call, saves=False), outputs[:-1]), call.a.dtype]
    default = result_dtype(call.op, call.a, call.b, None)
    return kept_types(call.op, outputs, call.summed, default, call.out_dtype)


def kept_types(
    op: str,
    outputs: Sequence[tuple[torch.dtype, bool]],
    wide: torch.dtype,
    default: torch.dtype,
    out_dtype: OutTypes,
) -> list[torch.dtype]:
    """The same for a product that was summed in one type, and is of another where no type is asked for."""
    asked = out_dtype if isinstance(out_dtype, tuple) else (out_dtype,) * len(outputs)
    if len(asked) != len(outputs):
        raise ValueError(f"{op}: out_dtype names {len(asked)} types; the epilogue returns {len(outputs)}")
    types = []
    for (dtype, matrix), choice in zip(outputs, asked, strict=True):
        kept = default if dtype == wide and matrix else dtype
        if choice is not None and choice not in TYPES:
            raise TypeError(f"{op}: out_dtype is {choice}; an epilogue's results can be {_NAMES}")
        types.append(choice if choice is not None and (matrix or isinstance(out_dtype, tuple)) else kept)
    return types


# ---------------------------------------------------------------------------------------------------------------------
# Checks


def make_call(
    op: str, a: Tensor, b: Factor, bias: Factor | None, function: Any, args: Sequence[Any], out_dtype: OutTypes,
    options: Options,
) -> Call:  # fmt: skip
    """A call from a user's arguments; whether they fit each other is for `check` to say.

    Args:
        b: the factor, or the left and the right half of its columns; in words of `op`.
        bias: likewise.

    Raises:
        TypeError: an argument is of no kind that a product or an epilogue can take.
    """
    if isinstance(args, Tensor) or not isinstance(args, tuple | list):
        raise TypeError(
            f"{op}: args is a {type(args).__name__}; it must be a tuple of the epilogue's arguments"
        )
    halves, biases = factors(op, b), added(op, bias)
    check_tensors(op, a, halves[0], None, None)
    weight = halves[0] if isinstance(halves[0], QuantizedTensor) else None
    scale = []
    if weight is not None:
        halves = [standing_in(weight)]
        # A row of factors for every matrix.
        scale = [] if weight.channel is None else [weight.channel.unsqueeze(-2)]
    # A packed weight always is (N, K).
    left, *right = [right_factor(op, x) if weight is None else x.mT for x in halves]
    function, captured = captured_of(function)
    inputs = tuple([moved(x, a) for x in (*scale, *biases, *args, *captured.tensors)])
    return Call(
        op, a, left, function, captured, inputs, len(biases), out_dtype, options, right[0] if right else None,
        weight=weight,
    )  # fmt: skip


def look_at(weight: QuantizedTensor) -> tuple[list[int], tuple[Any, ...]]:
    """Of a packed weight: addresses of words, scales, zeros, offsets and channel, and what decides which code runs.

    An address is 0 where there is no such tensor.
    """
    tensors = (weight.words, weight.scales, weight.zeros, weight.offsets, weight.channel)
    at = [0 if x is None else x.data_ptr() for x in tensors]
    scales, channel = weight.scales, weight.channel
    key = (
        weight.shape, weight.dtype, weight.format.name, weight.group_size, weight.words.get_device(),
        # Whether a tensor is there, and where it begins.
        *[x and 1 + (x & 15) for x in at],
        None if scales is None else scales.dtype,
        # A factor for each row, or one for all.
        None if channel is None else channel.shape,
    )  # fmt: skip
    return at, key


@functools.lru_cache(1024)
def _standing_in(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    *batch, rows, columns = shape
    strides = torch.empty((*batch, 1), device="meta").stride()[:-1]
    return torch.empty_strided((*batch, rows, columns), (*strides, 0, 0), dtype=dtype, device=device)


def standing_in(weight: QuantizedTensor) -> Tensor:
    """A tensor of the shape, type and device of a packed weight; its strides count matrices."""
    # One that is made inside a mode or a transform belongs to it.
    is_seen = is_compiling() or _len_torch_dispatch_stack() or _are_functorch_transforms_active()
    make = _standing_in.__wrapped__ if is_seen else _standing_in
    return make(tuple(weight.shape), weight.dtype, weight.device)


def factors(op: str, b: Factor) -> list[Tensor]:
    """The second factor, or the two halves of its columns; TypeError if it is neither."""
    name = operand_names(op)[1]
    if not isinstance(b, tuple | list):
        return [b]  # type: ignore[list-item]  # whether it is a tensor, `check_tensors` says
    if len(b) != 2:
        raise TypeError(
            f"{op}: {name} is a tuple of {len(b)}; it must be a tensor, or two that stand side by side"
        )
    for i, half in enumerate(b):
        check_tensor(op, f"{name}[{i}]", half)
        if isinstance(half, QuantizedTensor):
            raise TypeError(
                f"{op}: {name}[{i}] is packed; halves of packed columns must be one tensor, so quantise their "
                f"concatenation"
            )
    return list(b)


def added(op: str, bias: Factor | None) -> list[Tensor]:
    """No bias, one, or those of both halves of the columns; TypeError if it is none of these."""
    parts: list[Any] = [] if bias is None else list(bias) if isinstance(bias, tuple | list) else [bias]
    for i, part in enumerate(parts):
        check_tensor(op, "bias" if len(parts) == 1 else f"bias[{i}]", part)
    if len(parts) > 2:
        raise TypeError(
            f"{op}: bias is a tuple of {len(parts)}; it must be a tensor, or two that stand side by side"
        )
    return parts


def _check_halves(call: Call) -> None:
    op, b, right = call.op, call.b, call.right
    assert right is not None
    name = operand_names(op)[1]
    if b.dim() != 2 or right.shape != b.shape:
        shapes = [tuple((x.t() if op == "linear" else x).shape) for x in (b, right)]
        raise ValueError(
            f"{op}: the halves of {name} are {shapes[0]} and {shapes[1]}; they must be matrices of one shape"
        )
    if right.dtype != b.dtype or right.device != b.device:
        raise ValueError(
            f"{op}: the halves of {name} are {b.dtype} on {b.device} and {right.dtype} on {right.device}; "
            f"they must be of one type and on one device"
        )


def check(call: Call) -> None:
    """ValueError or TypeError unless a call's tensors fit each other."""
    op, a, b = call.op, call.a, call.b
    if call.options.precision not in PRECISIONS:
        raise ValueError(
            f"{op}: precision is {call.options.precision!r}; it must be one of {', '.join(PRECISIONS)}"
        )
    shape = call.shape
    if call.right is not None:
        _check_halves(call)
    first, second, _ = operand_names(op)
    if a.dim() < 2 or b.dim() < 2:
        raise ValueError(f"{op}: with an epilogue, {first} and {second} must be matrices, or batches of them")
    result_dtype(op, a, b, None)
    if a.device != b.device:
        raise ValueError(
            f"{op}: {first} is on {a.device} and {second} on {b.device}; they must be on one device"
        )
    for i, value in enumerate(call.inputs):
        if isinstance(value, Tensor):
            check_tensor(op, input_name(call, i), value)
            if value.device != a.device:
                raise ValueError(
                    f"{op}: {input_name(call, i)} is on {value.device} and {first} on {a.device}"
                )
            names = dimensions(call, i, value, shape)
            if call.scaled <= i < call.lead and call.biases == 2 and names[-1:] != ("N/2",):
                raise ValueError(
                    f"{op}: {input_name(call, i)} is {tuple(value.shape)}; the halves' are ({shape[-1] // 2},)"
                )
        elif isinstance(value, int) and not -(1 << 63) <= value < 1 << 63:
            raise ValueError(f"{op}: {input_name(call, i)} is {value}; integers must fit in 64 bits")
        elif isinstance(value, int | float) and not isinstance(value, bool) and a.dtype == torch.float64:
            check_scalars(op, a, value, 1)


def input_name(call: Call, i: int) -> str:
    """What the user calls an input."""
    i -= call.scaled
    if i < call.biases:
        return "the weight's channel scale" if i < 0 else "bias" if call.biases == 1 else f"bias[{i}]"
    own = len(call.given)
    position = i - call.biases
    return (
        f"args[{position}]"
        if position < own
        else f"a tensor of the epilogue's closure (number {position - own})"
    )


def dimensions(call: Call, i: int, tensor: Tensor, shape: tuple[int, ...]) -> tuple[str, ...]:
    """What a tensor's dimensions are in the product's, or ValueError."""
    if tensor.dim() > len(shape):
        raise ValueError(f"{call.op}: {input_name(call, i)} is {tuple(tensor.shape)}; the product is {shape}")
    names: list[str] = []
    N = shape[-1]
    # One of a pair of biases is as wide as half of the product, though that be one column.
    half = call.biases == 2 and call.scaled <= i < call.lead
    for place in range(1, tensor.dim() + 1):
        size, full = tensor.shape[-place], shape[-place]
        # A size that is the product's is that, though it be 1: rows of a batch may become rows of one matrix.
        if place == 1:
            # Compared one by one: under torch.compile sizes are symbols. One column is every column's before it is
            # one half of two.
            if size == N:
                name = "N"
            elif size == 1 and not half:
                name = "1"
            else:
                name = "2N" if size == 2 * N and N > 1 else "N/2" if 2 * size == N else ""
        else:
            name = ("M" if place == 2 else f"b{len(shape) - place}") if size == full else ""
        names.append(name or ("1" if size == 1 else ""))
        if not names[-1]:
            raise ValueError(
                f"{call.op}: {input_name(call, i)} is {tuple(tensor.shape)}; it must broadcast to the product, "
                f"{shape}, or to that with half or twice the columns"
            )
    return tuple(names[::-1])
