"""Problems of products without tensors: with packed weights, epilogues and scales, and of suites' rows.

`select.shapes.problem_of` is for bare products. This module runs the steps of a call up to its `Problem`, on tensors of
the meta device, which have no memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..devices import Device
from ..dtypes import FP8
from ..epilogues.results import Results
from ..formats import quantize, sparsify
from ..formats.scaled import BLOCK, E8M0, MX_BLOCK, ScaledTensor
from ..formats.weight import PackedWeight
from ..problem import Problem
from ..product.build import UNCHANGED, make_call
from ..product.check import check
from ..product.epilogue import output_types, program
from ..product.prepare import problem_of_traced
from ..product.spec import Factor, Functions, Options
from ..select.shapes import LAYOUTS, check_sizes, problem_of
from .fusions import FUSIONS
from .inputs import KINDS, Kind, make_operand
from .suites import SCALES, SPARSE_WEIGHTS, WEIGHTS, Row
from .tuning import kind_named, problem_of_row


def meta(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """A tensor without memory."""
    return torch.empty(shape, dtype=dtype, device="meta")


def scaled_meta(a: Tensor, b: Tensor, scales: str) -> tuple[ScaledTensor, ScaledTensor]:
    """(M, K) activations and an (N, K) weight with scales, of `suites.SCALES`."""
    (M, K), N = a.shape, b.shape[0]
    shapes: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
        "tensor": ((), ()),
        "row": ((M, 1), (N, 1)),
        "block": ((M, -(-K // BLOCK)), (-(-N // BLOCK), -(-K // BLOCK))),
        "mx": ((M, -(-K // MX_BLOCK)), (N, -(-K // MX_BLOCK))),
    }
    dtype = E8M0 if scales == "mx" else torch.float32
    left, right = (meta(*shape, dtype=dtype) for shape in shapes[scales])
    return ScaledTensor(a, left), ScaledTensor(b, right)


def linear_problem(
    a: Tensor | ScaledTensor, weight: Factor | ScaledTensor, device: Device, *, bias: Tensor | None = None,
    epilogue: Callable[..., Any] | None = None, args: Sequence[Any] = (), options: Options | None = None,
) -> Problem:  # fmt: skip
    """The problem of `gemmery.linear(a, weight, bias, epilogue=epilogue, args=args)` on a GPU, by a traced epilogue.

    Args:
        a, weight: (..., M, K) and (N, K), on the meta device; the weight may be packed, or both scaled.

    Raises:
        ValueError: the tensors do not fit each other.
        TypeError: nor do their types, or the epilogue can't be part of a kernel.
    """
    options = Options() if options is None else options
    op = "scaled_matmul" if isinstance(a, ScaledTensor) else "linear"
    call = make_call(op, a, weight, bias, Functions(epilogue or UNCHANGED, args), options)
    check(call)
    made = program(call)
    types = output_types(call, [(x.dtype, x.matrix) for x in made.outputs])
    results = Results(made, call.shape, tuple(types), call.summed)
    return problem_of_traced(call, results, results.allocate(call.device, 1), device)


def abstract_problem(
    M: int, N: int, K: int, *, device: Device, dtype: str = "bf16", weight: str = "", group_size: int | None = None,
    scales: str = "", bias: bool = False, epilogue: str = "", batch_invariant: bool = False, layout: str = "NT",
    batch: Sequence[int] = (),
) -> Problem:  # fmt: skip
    """The problem of a linear layer, (M, K) times a weight (N, K), with all that gemmery puts into one kernel.

    Args:
        M, N, K: sizes.
        dtype: of the activations (and of a weight that is not packed), as the bench calls types: bf16, fp8fast, ....
        weight: a packed weight's format, of `suites.WEIGHTS`, or that of a sparse one, of `SPARSE_WEIGHTS`.
        group_size: how many of its numbers share a scale; the format's usual number by default.
        scales: what shares a scale where both operands have 8 bits: "tensor", "row", "block" or "mx".
        bias: whether N numbers are added to each row.
        epilogue: of `fusions.FUSIONS`, with the tensors that it takes.
        batch_invariant: see `gemmery.matmul`.
        layout: for a and then b, N for row-major and T for column-major; a weight (N, K), packed or not, is a T as b.
        batch: leading dimensions of both factors, of a product with nothing fused and no packed weight.

    Raises:
        ValueError: a size or a name is invalid, or they do not match.
        TypeError: nor do the types.

    Example:
        >>> from gemmery.devices import TABLE
        >>> print(abstract_problem(16, 4096, 4096, device=TABLE["NVIDIA H200"], weight="int4"))  # doctest: +ELLIPSIS
        16x4096x4096 bf16[row] @ int4/128 -> bf16[row] ...
    """
    check_sizes(M, N, K)
    for name, value, known in (
        ("weight", weight, (*WEIGHTS, *SPARSE_WEIGHTS)),
        ("scales", scales, SCALES),
        ("epilogue", epilogue, FUSIONS),
        ("layout", layout, LAYOUTS),
    ):
        if value and value not in known:
            raise ValueError(f"{name} is {value!r}; it must be one of {', '.join(known)}")
    if not (weight or scales or epilogue):
        kind = kind_named(dtype)
        return problem_of(
            M, N, K, dtype=kind.dtype, layout=layout, precision=kind.precision, fast_accum=kind.fast_accum, bias=bias,
            batch=batch, batch_invariant=batch_invariant, device=device,
        )  # fmt: skip
    if batch:
        raise ValueError("batch is not supported with a packed weight, scales or an epilogue")
    if weight and scales:
        raise ValueError("a packed weight contains scales: give weight or scales, not both")
    kind = kind_named(dtype)
    if kind.precision != "ieee" and epilogue and kind.precision not in device.target.precisions:
        raise ValueError(f"{device.name} has no {dtype}")
    options = Options(None, kind.precision, kind.fast_accum, batch_invariant, None)
    a = meta(M, K, dtype=kind.dtype) if layout[0] == "N" else meta(K, M, dtype=kind.dtype).mT
    fusion = FUSIONS[epilogue] if epilogue else None
    if bias and fusion is not None and "row" in fusion.operands:
        raise ValueError(f"{epilogue} adds a bias already: give bias or this epilogue")
    shapes = {"row": (N,), "matrix": (M, N)}
    # The addend of a product of 8-bit operands has the type of its result.
    added = kind.dtype if kind.dtype.itemsize > 1 else torch.bfloat16
    args = tuple([meta(*shapes[x], dtype=added) for x in fusion.operands]) if fusion else ()
    function = fusion.function if fusion else None
    vector = meta(N, dtype=added) if bias else None
    if scales:
        if fusion is not None:
            raise ValueError(
                "a product with scales and an epilogue can't be predicted; leave out one of them"
            )
        return _scaled(a, meta(N, K, dtype=kind.dtype), scales, vector, options, device)
    right: Any = meta(N, K, dtype=kind.dtype) if layout[1] == "T" else meta(K, N, dtype=kind.dtype).mT
    if weight:
        if layout[1] != "T":
            raise ValueError(f"layout is {layout}; a packed weight is (N, K), so that b is a T: NT or TT")
        right = _weight(right, weight, group_size)
    return linear_problem(a, right, device, bias=vector, epilogue=function, args=args, options=options)


def _weight(dense: Tensor, name: str, group_size: int | None) -> PackedWeight:
    """A weight in a format, made of a dense one."""
    if name in WEIGHTS:
        return quantize(dense, name, group_size=WEIGHTS[name] if group_size is None else group_size)
    pattern, _, code = name.partition("-")
    sparse = sparsify(dense, pattern)
    if code:
        return quantize(sparse, code, group_size=group_size)
    if group_size:
        raise ValueError(f"group_size is {group_size}; a weight {name} of 16 bits has no groups")
    return sparse


def _scaled(
    a: Tensor, b: Tensor, scales: str, bias: Tensor | None, options: Options, device: Device
) -> Problem:
    """The problem of `gemmery.scaled_matmul`."""
    if a.dtype.itemsize != 1:
        raise ValueError(f"scales are for operands of 8 bits; dtype is {a.dtype}")
    if scales == "mx" and a.dtype not in FP8:
        raise ValueError(f"scales 'mx' are for fp8; dtype is {a.dtype}")
    return linear_problem(*scaled_meta(a, b, scales), device, bias=bias, options=options)


def of_row(row: Row, dtype: str, device: Device) -> Problem:
    """The problem of a row of a suite, measured in `dtype`, of `suites.DTYPES`."""
    kind: Kind = KINDS[dtype]
    if not (row.epilogue or row.quantized):
        return problem_of_row(row, kind_named(dtype), device)
    options = Options(None, kind.precision, kind.fast_accum, row.batch_invariant, None)

    def fill(shape: Sequence[int]) -> Tensor:
        return meta(*shape, dtype=kind.dtype)

    a, b = make_operand(row, "a", fill), make_operand(row, "b", fill).mT
    if row.scales:
        return _scaled(a, b, row.scales, None, options, device)
    fusion = FUSIONS[row.epilogue] if row.epilogue else None
    right: Any = b
    if row.weight:
        name, group = row.packing
        right = quantize(b, name, group_size=group)
    return linear_problem(
        a, right, device, epilogue=fusion.function if fusion else None,
        args=fusion.arguments(row, fill) if fusion else (), options=options,
    )  # fmt: skip
