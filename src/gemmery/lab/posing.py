"""Problems of products that nobody has tensors of: with packed weights, epilogues and scales, and of suites' rows.

`select.shapes.problem_of` is for bare products. What is here goes the way of a call up to its `Problem`, on tensors of
the meta device, which have no memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from .. import fused
from ..call import Call, Factor, check, make_call, output_types
from ..devices import Device
from ..dispatch import Options
from ..dtypes import FP8
from ..formats import quantize
from ..formats.scaled import BLOCK, MX_BLOCK
from ..layout import make_fused_problem
from ..problem import Fusion, Problem
from ..results import Results
from ..select.shapes import LAYOUTS, check_sizes, problem_of
from .fusions import FUSIONS
from .inputs import KINDS, Kind, make_operand
from .suites import SCALES, WEIGHTS, Row
from .tuning import kind_named, problem_of_row


def meta(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """A tensor without memory."""
    return torch.empty(shape, dtype=dtype, device="meta")


def factors_along(a: Tensor, b: Tensor, step: int) -> tuple[Tensor, Tensor, int, int, int]:
    """Factors of (M, K) activations and an (N, K) weight that change each `step` columns, as `call.Call` has them.

    With steps of `MX_BLOCK` each row has its own, and they are exponents of two; with `BLOCK` so many rows of
    the weight share one.
    """
    dtype, b_every = (torch.uint8, 1) if step == MX_BLOCK else (torch.float32, BLOCK)
    left, right = (
        meta(-(-x.shape[0] // every), -(-x.shape[1] // step), dtype=dtype)
        for x, every in ((a, 1), (b, b_every))
    )
    return left, right, 1, b_every, step


def linear_problem(
    a: Tensor, weight: Factor, device: Device, *, bias: Tensor | None = None,
    epilogue: Callable[..., Any] | None = None, args: Sequence[Any] = (), out_dtype: torch.dtype | None = None,
    options: Options | None = None, scales: tuple[Tensor, Tensor, int, int, int] | None = None,
) -> Problem:  # fmt: skip
    """The problem of `gemmery.linear(a, weight, bias, epilogue=epilogue, args=args)` on a GPU, by a traced epilogue.

    Args:
        a, weight: (..., M, K) and (N, K), on the meta device; the weight may be packed.
        scales: factors of both operands that change along K, as in `call.Call`.

    Raises:
        ValueError: the tensors do not fit each other.
        TypeError: nor do their types, or the epilogue can't be part of a kernel.
    """
    options = Options() if options is None else options
    call = make_call("linear", a, weight, bias, epilogue or fused.UNCHANGED, args, out_dtype, options)
    call = replace(call, scales=scales)
    check(call)
    return _posed(call, device)


def _posed(call: Call, device: Device) -> Problem:
    made = fused.program(call)
    types = output_types(call, [(x.dtype, x.matrix) for x in made.outputs])
    results = Results(made, call.shape, tuple(types), call.summed)
    tensors = results.allocate(call.a.device, 1)
    own = results.extras(call.inputs, tensors)
    fusion = Fusion(
        made.source,
        (),
        len(made.numbers),
        made.paired,
        results.reduces,
        made.main is not None,
        made.ahead,
        made.whole,
    )
    how = call.options
    problem = make_fused_problem(
        call.a, call.b, results.main(tensors), results.widths(own), len(own), fusion, fast_accum=how.fast_accum,
        batch_invariant=how.batch_invariant, device=device, scales=call.scales, half_stride=call.between,
        precision=how.precision if how.precision in device.target.precisions else "ieee",
    )  # fmt: skip
    return problem if call.weight is None else fused.packed(problem, call.weight)


def posed(
    M: int, N: int, K: int, *, device: Device, dtype: str = "bf16", weight: str = "", group_size: int | None = None,
    scales: str = "", bias: bool = False, epilogue: str = "", batch_invariant: bool = False, layout: str = "NT",
    batch: Sequence[int] = (),
) -> Problem:  # fmt: skip
    """The problem of a linear layer, (M, K) times a weight (N, K), with all that gemmery puts into one kernel.

    Args:
        M, N, K: sizes.
        dtype: of the activations (and of a weight that is not packed), as the bench calls types: bf16, fp8fast, ....
        weight: a packed weight's format, of `suites.WEIGHTS`.
        group_size: how many of its numbers share a scale; the format's usual number by default.
        scales: what shares a scale where both operands have 8 bits: "tensor", "row", "block" or "mx".
        bias: whether N numbers are added to each row.
        epilogue: of `fusions.FUSIONS`, with the tensors that it takes.
        batch_invariant: see `gemmery.matmul`.
        layout: for a and then b, N for row-major and T for column-major; a weight (N, K), packed or not, is a T as b.
        batch: leading dimensions of both factors, of a product with nothing fused and no packed weight.

    Raises:
        ValueError: a size or a name is none, or they do not go together.
        TypeError: nor do the types.

    Example:
        >>> from gemmery.devices import TABLE
        >>> print(posed(16, 4096, 4096, device=TABLE["NVIDIA H200"], weight="int4"))  # doctest: +ELLIPSIS
        16x4096x4096 bf16[row] @ int4/128 -> bf16[row] ...
    """
    check_sizes(M, N, K)
    for name, value, known in (
        ("weight", weight, WEIGHTS),
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
        raise ValueError("batch is for products without a packed weight, scales or an epilogue")
    if weight and scales:
        raise ValueError("a packed weight has scales of its own: give weight or scales")
    kind = kind_named(dtype)
    if kind.precision != "ieee" and epilogue and kind.precision not in device.target.precisions:
        raise ValueError(f"{device.name} has no {dtype}")
    options = Options(None, kind.precision, kind.fast_accum, batch_invariant, None)
    a = meta(M, K, dtype=kind.dtype) if layout[0] == "N" else meta(K, M, dtype=kind.dtype).mT
    fusion = FUSIONS[epilogue] if epilogue else None
    shapes = {"row": (N,), "matrix": (M, N)}
    # What is added to a product of 8-bit operands has the type of its result.
    added = kind.dtype if kind.dtype.itemsize > 1 else torch.bfloat16
    args = tuple([meta(*shapes[x], dtype=added) for x in fusion.operands]) if fusion else ()
    function = fusion.function if fusion else None
    vector = meta(N, dtype=added) if bias else None
    if scales:
        if fusion is not None:
            raise ValueError("an epilogue behind scales is not among what can be predicted")
        return _scaled(a, meta(N, K, dtype=kind.dtype), scales, vector, options, device)
    right: Any = meta(N, K, dtype=kind.dtype) if layout[1] == "T" else meta(K, N, dtype=kind.dtype).mT
    if weight:
        if layout[1] != "T":
            raise ValueError(f"layout is {layout}; a packed weight is (N, K), so that b is a T: NT or TT")
        right = quantize(right, weight, group_size=WEIGHTS[weight] if group_size is None else group_size)
    return linear_problem(a, right, device, bias=vector, epilogue=function, args=args, options=options)


def _scaled(
    a: Tensor, b: Tensor, scales: str, bias: Tensor | None, options: Options, device: Device
) -> Problem:
    """What `gemmery.scaled_matmul` comes to."""
    if a.dtype.itemsize != 1:
        raise ValueError(f"scales are for operands of 8 bits; dtype is {a.dtype}")
    out = torch.bfloat16
    if scales == "mx" and a.dtype not in FP8:
        raise ValueError(f"scales 'mx' are for fp8; dtype is {a.dtype}")
    if scales in ("block", "mx"):
        along = factors_along(a, b, BLOCK if scales == "block" else MX_BLOCK)
        return linear_problem(a, b, device, bias=bias, out_dtype=out, options=options, scales=along)
    factors = (meta(), meta()) if scales == "tensor" else (meta(a.shape[0], 1), meta(b.shape[0]))
    args = factors if bias is None else (*factors, bias)
    # Its import brings torch's compiler along, and takes longer than everything else here.
    from ..scaled import SCALED, SCALED_BIASED

    function = SCALED if bias is None else SCALED_BIASED
    return linear_problem(a, b, device, epilogue=function, args=args, out_dtype=out, options=options)


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
