"""Traced epilogues for the check of targets: products and gradients of them, up to the kernels that they launch."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor

import gemmery

from .. import devices
from ..devices import Device
from ..dtypes import DTYPE_NAMES, accumulator
from ..epilogues import library
from ..formats.base import FORMATS
from ..formats.kept import CODES
from ..formats.packing import pack
from ..formats.scaled import BLOCK, E8M0, MX_BLOCK, ScaledTensor
from ..formats.sparse import BLOCK as BLOCK_2_4
from ..formats.sparse import SparseTensor, padded
from ..formats.tensor import QuantizedTensor
from ..kernels import pointwise
from ..nn.feed_forward import Differentiable
from ..operands import Arrivals, AwaitingRows, Exchange, Groups, SummedOver, WithAdapter
from ..operands.summed import places_of
from ..problem import Problem
from ..product import prepare, vjp
from ..product.build import make_call
from ..product.epilogue import outputs_of
from ..product.run import plan
from ..product.spec import Functions, Options, unchanged
from .abstract import scaled_meta


def squares(acc: Tensor) -> tuple[Tensor, Tensor]:
    """The results that a norm after a product needs."""
    return acc, acc.square().sum(-1)


def several(acc: Tensor, row: Tensor) -> tuple[Tensor, ...]:
    """Results of many types, one of them half as wide as the product."""
    gate, up = (acc + row).chunk(2, -1)
    return gate * up, acc.to(torch.float16), acc.to(torch.float32), acc > 0, acc.to(torch.float8_e5m2)


def normed(a: Tensor, column: Tensor, row: Tensor) -> Tensor:
    """A prologue: a norm's factors, for each row and each column."""
    return a * column * row


def dequantised(acc: Tensor, column: Tensor, row: Tensor) -> Tensor:
    """Of 8-bit operands with a scale for each row and each column."""
    return (acc * column * row).to(torch.bfloat16)


def softmax(acc: Tensor) -> Tensor:
    """Of rows that are whole in a tile."""
    return acc.softmax(-1)


@dataclass(frozen=True)
class Fused:
    """A product with an epilogue, with all sizes alike.

    Attributes:
        function: the epilogue.
        args: its arguments: "row", "column", "matrix" and "wide", twice the product's columns, for tensors; numbers.
        bias: whether the product has one.
        pair: whether the weight is two matrices, the halves of its columns.
        prologue: a function of the first factor, with a column and a row.
        dtypes: of the operands; of a sample, the first.
        needs: a type that the target must have.
        rows: of the product in a sample: few of them take small tiles, which compile sooner.
        columns: of the product, where these are not as many as all other sizes.
        packed: the format and the size of a group of a packed weight.
        sparse: of a 2:4 sparse weight the code of kept numbers of 8 bits or 4, or "". With a dtype of fp8 rows of both
            operands have scales.
        group: columns of a sparse weight of int4 that share a scale, or 0.
        step: columns of both factors that share a scale; 0 if there are none that change along K.
        ranks: over how many GPUs the product is summed.
        awaits: whether the epilogue adds partial sums that the other ranks send, for which the product waits.
        adapter: the rank of an adapter whose thin product is added, or 0.
        aligned: whether only sizes that suit all loads are compiled: odd ones are refused, or spill somewhere.
    """

    function: Callable[..., Any]
    args: tuple[Any, ...] = ()
    bias: bool = False
    pair: bool = False
    prologue: Callable[..., Any] | None = None
    dtypes: tuple[str, ...] = ("bf16",)
    needs: torch.dtype | None = None
    rows: int = 16
    columns: int | None = None
    packed: tuple[str, int] | None = None
    sparse: str | None = None
    group: int = 0
    step: int = 0
    ranks: int = 1
    awaits: bool = False
    adapter: int = 0
    aligned: bool = False


FUSED: dict[str, Fused] = {
    "bias_gelu": Fused(library.gelu, bias=True, dtypes=("bf16", "fp32", "fp64"), rows=4096),
    "swiglu": Fused(library.swiglu),
    "swiglu_pair": Fused(library.swiglu, pair=True, rows=4096),
    "normed_swiglu": Fused(library.swiglu, prologue=normed),
    "residual": Fused(library.residual, ("matrix",)),
    "squares": Fused(squares, rows=4096),
    "several": Fused(several, ("row",)),
    # Reduced rows used again: a tile as wide as the product.
    "softmax": Fused(softmax, columns=64),
    "dropout": Fused(library.dropout, (0.1, 1 << 40)),
    "cast_fp8": Fused(library.cast_fp8, (2.0,), needs=torch.float8_e4m3fn),
    "dequantised": Fused(dequantised, ("column", "row"), dtypes=("int8", "e4m3", "e5m2")),
    "int4_gelu": Fused(library.gelu, bias=True, dtypes=("bf16", "fp16"), packed=("int4", 128)),
    "int4_swiglu": Fused(library.swiglu, packed=("int4", 32), aligned=True),
    "e4m3_packed": Fused(unchanged, dtypes=("bf16", "fp16"), packed=("e4m3", 0)),
    "nvfp4": Fused(unchanged, dtypes=("bf16", "fp16"), packed=("nvfp4", 16)),
    "nf4": Fused(unchanged, dtypes=("bf16", "fp16"), packed=("nf4", 64), rows=4096),
    "sparse": Fused(unchanged, dtypes=("bf16", "fp16"), sparse=""),
    "sparse_gelu": Fused(library.gelu, bias=True, sparse="", rows=4096),
    "sparse_swiglu": Fused(library.swiglu, sparse="", aligned=True),
    "sparse_e4m3": Fused(unchanged, dtypes=("bf16", "fp16"), sparse="e4m3"),
    "sparse_int8": Fused(unchanged, sparse="int8"),
    "sparse_int4": Fused(unchanged, dtypes=("bf16", "fp16"), sparse="int4", group=128),
    "sparse_int4_rows": Fused(unchanged, sparse="int4"),
    "sparse_int4_swiglu": Fused(library.swiglu, sparse="int4", group=32, aligned=True),
    "sparse_fp8": Fused(unchanged, dtypes=("e4m3", "e5m2"), needs=torch.float8_e4m3fn, sparse="e4m3"),
    "sparse_fp8_swiglu": Fused(
        library.swiglu, dtypes=("e4m3",), needs=torch.float8_e4m3fn, sparse="e4m3", rows=4096, aligned=True
    ),
    "scaled_blocks": Fused(unchanged, dtypes=("int8", "e4m3"), step=BLOCK, aligned=True),
    "scaled_mx": Fused(
        unchanged, dtypes=("e4m3", "e5m2"), needs=torch.float8_e4m3fn, step=MX_BLOCK, aligned=True
    ),
    "summed": Fused(unchanged, dtypes=("bf16", "int8"), ranks=2),
    "summed_residual": Fused(library.residual, ("matrix",), bias=True, ranks=2, rows=128),
    "summed_swiglu": Fused(library.swiglu, ranks=8, aligned=True),
    "summed_int4": Fused(library.gelu, bias=True, packed=("int4", 128), ranks=2),
    "received": Fused(library.residual, ("matrix",), ranks=2, awaits=True, rows=4096, aligned=True),
    "received_swiglu": Fused(library.swiglu, ranks=8, awaits=True, rows=4096, aligned=True),
    "adapted": Fused(unchanged, dtypes=("bf16", "fp16", "fp32", "fp64"), adapter=16, rows=4096),
    "adapted_bias": Fused(unchanged, bias=True, adapter=64, rows=4096),
    "adapted_residual": Fused(library.residual, ("matrix",), adapter=8, rows=4096),
    "adapted_int4": Fused(unchanged, bias=True, packed=("int4", 128), adapter=16, rows=4096),
    "adapted_nf4": Fused(unchanged, packed=("nf4", 64), adapter=64, rows=4096),
    "adapted_sparse": Fused(unchanged, sparse="", adapter=16, rows=4096),
    # The backward pass of a gated block: a product that goes on to the gradient of the one before.
    "swiglu_backward": Fused(Differentiable(library.swiglu).backward, ("wide",)),
}
#: Of these also the elementwise kernel of the gradient is compiled.
GRADIENTS = ("bias_gelu", "swiglu", "several", "dropout")


class Abstract(NamedTuple):
    """A product before a config is chosen.

    Attributes:
        problem: the problem.
        tensors: what a `Binding` compiles with.
    """

    problem: Problem
    tensors: tuple[Any, ...]


def _operands(name: str, dtype: str, rows: int, size: int) -> tuple[Any, Any, Tensor | None, tuple[Any, ...]]:
    """A matrix, a Linear's weight or the halves of one, a bias and the epilogue's arguments, on the meta device."""
    how = FUSED[name]
    kind = {name: dtype for dtype, name in DTYPE_NAMES.items()}[dtype]
    other = kind if kind.itemsize > 1 else torch.float32

    def empty(*shape: int, dtype: torch.dtype = other) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    columns = how.columns or size
    shapes = {"row": (columns,), "column": (rows, 1), "matrix": (rows, columns), "wide": (rows, 2 * columns)}
    x: Any = empty(rows, size, dtype=kind)
    weight: Any = empty(columns, size, dtype=kind)
    if how.pair:
        # In one buffer, because all tensors of the meta device begin at one address: apart, and the gate after the
        # matrix that it gates.
        weight = empty(3 * size // 2, size, dtype=kind).chunk(3)[::-2]
    if how.sparse is not None:
        is_fp8 = kind.itemsize == 1
        weight = abstract_sparse(how.sparse, columns, size, torch.bfloat16 if is_fp8 else kind, how.group)
        if is_fp8:
            x = ScaledTensor(x, empty(rows, 1))
            weight = weight.with_parts(weight.parts() | {"channel": empty(columns)})
    if how.packed:
        weight = _packed(*how.packed, columns, size, kind)
    args = tuple([empty(*shapes[x]) if isinstance(x, str) else x for x in how.args])
    if how.ranks > 1:
        x = _spread(x, columns, how)
    if how.adapter:
        x = WithAdapter(x, empty(rows, how.adapter), empty(columns, how.adapter).mT)
    return x, weight, empty(columns) if how.bias else None, args


def _spread(x: Tensor, columns: int, how: Fused) -> SummedOver | AwaitingRows:
    """The first operand of a product of several ranks; each tensor is a separate object, as in a launch."""
    rows, failed, patience = x.shape[0], 1 << 40, 1 << 20

    def numbers(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.int32, device="meta")

    if how.awaits:
        return AwaitingRows(x, Arrivals(numbers(how.ranks), numbers(1), 1, how.ranks, failed, patience))
    places = places_of(rows, columns)
    buffers = tuple([numbers(2, how.ranks, places) for _ in range(how.ranks)])
    return SummedOver(x, Exchange(buffers, numbers(places // 64 + 1), 1, places, failed, patience))


def _packed(format: str, group: int, rows: int, columns: int, dtype: torch.dtype) -> QuantizedTensor:
    """A packed weight on the meta device."""
    codes = torch.empty(rows, columns, dtype=torch.uint8, device="meta")
    scales = torch.empty(rows, -(-columns // group), dtype=dtype, device="meta") if group else None
    words = pack(codes, FORMATS[format].bits, FORMATS[format].order)
    shared = None if scales is None else scales.new_empty(scales.shape[1], -(-rows // 16) * 16)
    return QuantizedTensor((rows, columns), format, words, dtype=dtype, group_size=group, scales=shared)


def abstract_sparse(code: str, rows: int, columns: int, dtype: torch.dtype, group: int = 0) -> SparseTensor:
    """A 2:4 sparse weight on the meta device, of "e4m3", "int8" or "int4" or, with "", of `dtype`."""
    shape = padded(rows, columns)

    def empty(*shape: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    values = empty(shape[0], shape[1] // CODES[code].each, dtype=torch.int8 if code else dtype)
    metadata = empty(shape[1] // BLOCK_2_4, shape[0], dtype=torch.int32)
    scales = empty(-(-columns // group), shape[0], dtype=dtype) if group else None
    return SparseTensor(
        (rows, columns), values, metadata, scales=scales, code=code, dtype=dtype, group_size=group
    )


def _block_scaled(x: Tensor, weight: Tensor, function: Callable[..., Any], step: int) -> Any:
    """A product of operands with scales that change along K."""
    a, b = scaled_meta(x, weight, "mx" if step == MX_BLOCK else "block")
    return plan("scaled_matmul", a, b, None, Functions(function), None, Options(torch.bfloat16))


@contextlib.contextmanager
def _made_for(device: Device) -> Iterator[None]:
    """Within, tensors of the meta device count as those of a GPU, and plans are made without compiling."""

    def caught(problem: Problem, config: None, *given: Any) -> Abstract:
        return Abstract(problem, given)

    with (
        mock.patch.object(devices, "current", return_value=device),
        mock.patch.object(prepare, "make_plan", caught),
    ):
        yield


def abstract_product(name: str, dtype: str, rows: int, size: int, device: Device) -> Abstract:
    """A product with one of the epilogues, up to the choice of a config."""
    x, weight, bias, args = _operands(name, dtype, rows, size)
    how = FUSED[name]
    if how.step:
        with _made_for(device):
            blocks: Abstract = _block_scaled(x, weight, how.function, how.step)
            return blocks
    factor = (
        tuple([half.t() for half in weight])
        if how.pair
        else weight
        if how.packed or how.sparse is not None
        else weight.t()
    )
    before = (x.new_empty(rows, 1), x.new_empty(size)) if how.prologue else ()
    with _made_for(device):
        made: Any = gemmery.plan(
            x,
            factor,
            bias=bias,
            epilogue=how.function,
            args=args,
            prologue=how.prologue,
            prologue_args=before,
        )
    assert isinstance(made, Abstract)
    return made


def grouped_problem(
    rows: int, groups: int, N: int, K: int, *, device: Device, dtype: torch.dtype = torch.bfloat16,
    gathers: bool = False, function: Callable[..., Any] | None = None, prologue: Callable[..., Any] | None = None,
) -> Problem:  # fmt: skip
    """The problem of `grouped_linear` for (rows, K) and weights (groups, N, K).

    Operands of 8 bits have scales of blocks: of 1 x 32 in fp8, and of 1 x 128 and 128 x 128 in int8.
    """
    functions = Functions(function, (), prologue)
    return _grouped("grouped_linear", rows, groups, N, K, device, dtype, gathers, functions).problem


def ranges_problem(
    rows: int, groups: int, N: int, K: int, *, device: Device, dtype: torch.dtype = torch.bfloat16
) -> Problem:
    """The problem of the gradient of such weights."""
    return _grouped("grouped_mm", rows, groups, N, K, device, dtype, False, Functions()).problem


def _grouped(
    op: str, rows: int, groups: int, N: int, K: int, device: Device, dtype: torch.dtype, gathers: bool,
    functions: Functions,
) -> Abstract:  # fmt: skip
    x = torch.empty(rows, K, dtype=dtype, device="meta")
    numbers = torch.empty(max(rows, groups), dtype=torch.int32, device="meta")
    offs, gather = numbers[:groups], numbers[:rows] if gathers else None
    b: Any = x.new_empty(groups, N, K)
    a: Groups = Groups(x, offs, "rows", gather)
    if dtype.itemsize == 1:
        every, size, kind = (BLOCK, BLOCK, torch.float32) if dtype == torch.int8 else (1, MX_BLOCK, E8M0)
        steps = -(-K // size)
        a = a._replace(matrix=ScaledTensor(x, torch.empty(rows, steps, dtype=kind, device="meta")))
        b = ScaledTensor(b, torch.empty(groups, -(-N // every), steps, dtype=kind, device="meta"))
    if op == "grouped_mm":
        a, b = Groups(x.new_empty(rows, N).mT, offs, "k"), x
    with _made_for(device):
        made: Any = plan(op, a, b, None, functions, None, Options())
    assert isinstance(made, Abstract)
    return made


class _Compiling:
    """Stands for a kernel: compiles where that would be launched, and keeps what comes out."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self.compiled: list[Any] = []

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        def compile_(*args: Any, **options: Any) -> None:
            self.compiled.append(self.kernel.warmup(*args, grid=grid, **options))

        return compile_


def gradient(name: str, dtype: str, size: int, device: Device) -> Any:
    """The elementwise kernel of the gradients of one of the epilogues, with those of all its tensors, compiled."""
    x, weight, bias, args = _operands(name, dtype, size, size)
    call = make_call("linear", x, weight, bias, Functions(FUSED[name].function, args), Options())
    product = torch.empty(call.shape, dtype=x.dtype, device="meta")
    results, _ = outputs_of(call, product.to(accumulator(x.dtype)))
    grads = [y if y.dtype.is_floating_point else None for y in results]
    wanted = [y.dtype.is_floating_point for y in call.inputs if isinstance(y, Tensor)]
    kernel = _Compiling(pointwise.pointwise)
    with _made_for(device), mock.patch.object(pointwise, "pointwise", kernel):
        vjp.run(call, product, grads, wanted)
    (compiled,) = kernel.compiled
    return compiled
