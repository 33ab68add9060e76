"""The vendor's BLAS as torch calls it: which kernels are launched for a product, and a law of their time.

torch passes matrices to the BLAS without a copy if the BLAS supports their layout, and copies them if not (as in
aten/src/ATen/native/LinearAlgebra.cpp and cuda/Blas.cpp); each operator after a product is a kernel.
The product is modeled like ours: waves of tiles, of those sizes that the names of cuBLAS's kernels tell, of which the
quickest is taken.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from ...dtypes import FP8
from ...formats.scaled import MX_BLOCK
from ...operands import Dense, Layout, Scaled
from ...problem import Problem
from . import copies
from .copies import Copies
from .ours import WIDE, granule, throttled

#: Tiles by their longer side, and the parts along K into which they are cut.
LONG = {256: (64, 96, 128), 128: (64, 96, 128, 160, 192, 224), 64: (8, 16, 32, 64, 96)}
TILES = tuple(
    sorted({pair for m, columns in LONG.items() for n in columns for pair in ((m, n), (n, m))}, reverse=True)
)
SPLITS = (1, 2, 3, 4, 8)
#: Rows and columns of the largest tile where elements are loaded in smaller pieces than 16 bytes.
LARGEST_SINGLE = 128
_LARGEST = max(m * n for m, n in TILES)
_ROWS, _COLUMNS, _SPLITS = (
    np.array(column, dtype=float)
    for column in zip(*((m, n, split) for m, n in TILES for split in SPLITS), strict=True)
)
#: Kinds of products with separate kernels, and the part of the datasheet's rate that these are assumed to reach
#: before that is fitted: fp8 with fast sums or accurate ones, and by what has scales; int8 with a B that is (K, N).
KINDS: dict[str, float] = {
    "half": 0.85, "tf32": 0.85, "fp32": 0.8, "fp64": 0.9, "fp8": 0.75, "fp8 fast": 0.8, "fp8 row": 0.75,
    "fp8 fast row": 0.75, "fp8 block": 0.7, "int8": 0.5, "int8 across": 0.07,
}  # fmt: skip
#: Of these, those that are not kernels of the BLAS, and start differently.
FOREIGN = ("fp8 row", "fp8 fast row", "fp8 block")
#: The constants before the fit; rates and bandwidths as parts of the datasheet's, times in seconds.
#:
#: rate KIND: what a long product reaches in the largest tile; small: how much less smaller tiles do.
#: intake: of what a multiprocessor takes in from L2; loads4, loads2: the same where rows begin at multiples of 4 or 8
#:     bytes, or of 2; unlike: how many times slower that is where only the output's do.
#: read, write: of the memory's bandwidth; what is written last stays in L2, so that it can be more than all of it.
#: launch, foreign: of a product's launch; ramp, half: what a stream from memory takes until it is at its speed, and
#:     the length at which half of that shows; turn: the least time of a tile.
#: store, store_single: what storing a tile adds, as a part of the time to take as much in; in pieces below 16 bytes.
#: overlap: how multiplying and memory add up, see `schedules.cost.OVERLAP`.
#: split, parts: what cutting K costs, at all and of the bandwidth for the parts.
#: kernel, elementwise: an elementwise kernel's launch, and its part of the bandwidth.
START: dict[str, float] = {
    **{f"rate {kind}": rate for kind, rate in KINDS.items()},
    "small": 0.15, "intake": 1.2, "loads4": 0.25, "loads2": 0.13, "unlike": 1.3, "read": 0.85, "write": 0.8,
    "launch": 4.5e-6, "foreign": 5e-6, "ramp": 6e-6, "half": 8e-6, "turn": 0.4e-6, "store": 0.5, "store_single": 10.0,
    "overlap": 2.5, "split": 2e-6, "parts": 2.0, "kernel": 2.5e-6, "elementwise": 0.5, "copy_straight": 0.4,
    "copy_turned": 1.0, "copy_launch": 3e-6, "warm": 2.5e-3, "throttle": 1.2,
}  # fmt: skip
GIVEN = ("warm",)


@dataclass(frozen=True)
class Route:
    """torch's launches for a problem.

    Attributes:
        problem: the product.
        kind: of `KINDS`.
        copies: of matrices that the BLAS can't take.
        copied: their names, "a", "b" and "out".
        kernels: elementwise kernels after the product, and the bytes that these read and write.
        alignment: bytes at which the rows of a, b and out begin, at most 16.
    """

    problem: Problem
    kind: str
    copies: Copies
    copied: tuple[str, ...]
    kernels: int
    elementwise: int
    alignment: dict[str, int]


# --- what torch does ------------------------------------------------------------------------------------------------


def route(problem: Problem) -> Route | None:
    """torch's launches for a problem; None if torch has no such product."""
    unpacked = problem.b.is_encoded
    problem = _as_given(problem)
    if not _exists(problem):
        return None
    moved, copied, alignment = Copies(), [], {}
    for name, copy, wide in _matrices(problem):
        alignment[name] = wide
        if copy.launches:
            moved += copy
            copied.append(name)
    if problem.epilogue == "add_matrix":
        moved += Copies.of(problem.matrices * problem.M * problem.N, problem.out.dtype.itemsize, 1)
    kernels, elementwise = _behind(problem, unpacked)
    kind = _kind(problem, min(alignment.values()))
    return Route(problem, kind, moved, tuple(copied), kernels, elementwise, alignment)


def _as_given(problem: Problem) -> Problem:
    """The problem that torch receives: a sparse weight as a dense one, and operands with scales of 32 columns in
    bf16.
    """
    p = problem
    if p.b.is_sparse:
        return replace(p, b=Dense(p.b.dtype, (), 1, p.K, True))
    if not isinstance(p.b, Scaled) or p.b.step != MX_BLOCK:
        return p
    a, b = (Dense(torch.bfloat16, x.steps, x.row, x.col, x.aligned) for x in (p.a, p.b))
    return replace(p, a=a, b=b)


def _exists(problem: Problem) -> bool:
    """Whether torch has the product: 8-bit operands have separate rules (`_int_mm`, `_scaled_mm`)."""
    p, target = problem, problem.device.target
    if p.a.dtype.itemsize > 1 or p.b.unpacks:
        return True
    if p.batch or p.a.col != 1:
        return False
    if p.a.dtype == torch.int8:
        return not p.b.is_scaled and p.M > 16 and p.N % 8 == 0 and p.K % 8 == 0
    if p.b.is_scaled and target.name != "sm_90":
        return False
    both_wide = p.a.dtype == p.b.dtype == torch.float8_e5m2
    known = all(x.dtype in target.fp8 for x in (p.a, p.b)) and target.name != "sm_80"
    return known and not both_wide and p.b.row == 1 and p.N % 16 == 0 and p.K % 16 == 0


def _matrices(problem: Problem) -> Iterator[tuple[str, Copies, int]]:
    """For a, b and out: the copies that torch makes of it, and the bytes at which the rows begin that the BLAS gets."""
    p = problem
    columns = {"a": p.K, "b": p.N, "out": p.N}
    for name, operand, rows in (("a", p.a, p.M), ("b", p.b, p.K), ("out", p.out, p.M)):
        item, cols = operand.dtype.itemsize, columns[name]
        if name == "b" and p.b.unpacks:
            yield name, Copies(), WIDE
            continue
        if name == "out" and p.fusion is not None:
            # A new matrix, which what follows reads.
            yield name, Copies(), math.gcd(WIDE, cols * item)
            continue
        merged = len(p.batch) < 2 or all(
            operand.steps[i] == operand.steps[i + 1] * p.batch[i + 1] for i in range(len(p.batch) - 1)
        )
        if merged and _taken(operand, rows, cols):
            yield name, Copies(), granule(operand)
            continue
        # An output that can't be seen as a batch is copied, written, and copied back.
        times = 2 if name == "out" and not merged else 1
        yield (
            name,
            Copies.of(p.matrices * rows * cols, item, operand.col, times),
            math.gcd(WIDE, cols * item),
        )


def _taken(operand: Layout, rows: int, cols: int) -> bool:
    """Whether the BLAS takes a matrix: adjacent elements in lines that do not overlap."""
    return (operand.col == 1 and operand.row >= cols) or (operand.row == 1 and operand.col >= rows)


def _kind(problem: Problem, alignment: int) -> str:
    """Of `KINDS`; with the bytes at which rows begin where these are fewer than 16."""
    p = problem
    if p.a.dtype == torch.int8:
        return "int8" if p.b.row == 1 else "int8 across"
    if p.a.dtype in FP8:
        if p.b.is_scaled:
            return "fp8 block"
        shared = all(not (x.row or x.col) for x in p.extras)
        return " ".join(["fp8", *(["fast"] if p.fast_accum else []), *([] if shared else ["row"])])
    if p.a.dtype.itemsize == 2:
        return "half" if alignment >= WIDE else "half 4" if alignment >= 4 else "half 2"
    if p.a.dtype == torch.float64:
        return "fp64"
    return "tf32" if p.precision == "tf32" else "fp32"


def _behind(problem: Problem, unpacked: bool) -> tuple[int, int]:
    """Elementwise kernels that torch launches for an epilogue, one for each operator, and the bytes that they move.

    Scales of a weight that torch has unpacked, and of operands whose product has them in it, are none.
    """
    p = problem
    if p.fusion is None:
        return 0, 0
    quantized = unpacked or p.a.dtype.itemsize == 1
    size = p.matrices * p.M * p.out_n * p.out.dtype.itemsize
    blocks, factors = {"acc", "left", "right"}, set()
    kernels = moved = 0
    for name, value in re.findall(r"^\s+(v\d+) = (.*)$", p.fusion.source, re.MULTILINE):
        if loaded := re.search(r"load_(\w+)\(x(\d+)", value):
            operand = p.fusion.operands[int(loaded[2]) - 1]
            if quantized and operand.dtype == torch.float32:
                factors.add(name)
            elif loaded[1] == "block":
                blocks.add(name)
            continue
        used = set(re.findall(r"\b(?:v\d+|acc|left|right)\b", value))
        if not used & blocks:
            continue
        blocks.add(name)
        if not (used & factors or value.startswith("as_type") or value.endswith(".to(tl.float32)")):
            kernels += 1
            moved += size * (1 + len(used & blocks))
    return kernels, moved


# --- the law --------------------------------------------------------------------------------------------------------


def parts(found: Route) -> dict[str, Any]:
    """The terms of the law `seconds`, as numbers and arrays over tiles; seconds at the datasheet's rates."""
    p, device = found.problem, found.problem.device
    precision = p.precision if p.precision == "tf32" else "ieee"
    item = p.a.dtype.itemsize
    tiles = p.matrices * np.ceil(p.M / _ROWS) * np.ceil(p.N / _COLUMNS)
    turns = np.ceil(tiles * _SPLITS / device.sms)
    each = np.ceil(max(p.K, 1) / 64 / _SPLITS) * 64
    area = _ROWS * _COLUMNS
    zeros = np.zeros_like(area)
    out_item = 4 if p.a.dtype == torch.int8 else p.out.dtype.itemsize
    loaded = turns * each * (_ROWS + _COLUMNS) * item / device.sm_bandwidth
    # Tiles at the edges are not full.
    stored = turns / tiles * p.matrices * p.M * p.N * out_item / device.sm_bandwidth
    single = np.where(np.maximum(_ROWS, _COLUMNS) <= LARGEST_SINGLE, loaded, np.inf)
    inputs = min(found.alignment["a"], found.alignment["b"]) >= WIDE
    return {
        "compute": turns * each * 2 * area / (device.rate(p.a.dtype, precision) / device.sms),
        "smaller": np.sqrt(_LARGEST / area) - 1,
        "l2": loaded,
        "loads4": single if found.kind == "half 4" else zeros,
        "loads2": single if found.kind == "half 2" else zeros,
        "inputs": float(inputs),
        "turns": turns,
        "stores": stored * (found.alignment["out"] >= WIDE),
        "stores_single": stored * (found.alignment["out"] < WIDE),
        "cut": (_SPLITS > 1).astype(float),
        "parts": np.where(_SPLITS > 1, _SPLITS * p.matrices * p.M * p.N * 8.0, 0.0) / device.bandwidth,
        "read": _read(p) / device.bandwidth,
        "write": p.matrices * p.M * p.N * out_item / device.bandwidth,
        "foreign": float(found.kind in FOREIGN),
        "kernels": float(found.kernels),
        "elementwise": found.elementwise / device.bandwidth,
        "multiplies": float(item <= 2),
        **found.copies.parts(device),
    }


def _read(problem: Problem) -> int:
    """Bytes of a and b, each distinct byte once; a packed b counts as unpacked."""
    total = 0
    for operand, rows, cols in ((problem.a, problem.M, problem.K), (problem.b, problem.K, problem.N)):
        size = operand.dtype.itemsize
        strides = (*operand.steps, operand.row, operand.col)
        if operand.unpacks:
            strides = (*operand.steps, 1, rows)
        for extent, stride in zip((*problem.batch, rows, cols), strides, strict=True):
            size *= extent if stride or extent == 0 else 1
        total += size
    return total


def rate(found: Route, c: Mapping[str, float]) -> float:
    """The constant of a product's kind."""
    return c[f"rate {found.kind.removesuffix(' 4').removesuffix(' 2')}"]


def _law(parts: Mapping[str, Any], rate: Any, c: Mapping[str, float]) -> dict[str, Any]:
    """The kernel's time for every tile; arrays of (..., tiles), or (tiles,) for a single product."""
    compute = parts["compute"] / rate * (1 + c["small"] * parts["smaller"])
    l2 = parts["l2"] / c["intake"]
    slower = np.where(parts["inputs"], c["unlike"], 1.0)
    l2 = np.maximum(l2, slower * (parts["loads4"] / c["loads4"] + parts["loads2"] / c["loads2"]))
    memory = parts["read"] / c["read"] + parts["write"] / c["write"]
    busy = np.maximum(np.maximum(compute, l2), parts["turns"] * c["turn"])
    body = (busy ** c["overlap"] + memory ** c["overlap"]) ** (1 / c["overlap"])
    reduction = parts["cut"] * c["split"] + parts["parts"] / c["parts"]
    overhead = c["launch"] + parts["foreign"] * c["foreign"] + parts["stores"] * c["store"]
    overhead = overhead + parts["stores_single"] * c["store_single"]
    overhead = overhead + c["ramp"] * memory / (memory + c["half"])
    kernel = body + overhead + reduction
    hot = (parts["multiplies"] > 0) & (compute > memory)
    return {
        "compute": compute, "l2": l2, "memory": memory + 0 * compute, "overhead": overhead, "reduction": reduction,
        "kernel": throttled(kernel, hot, c),
    }  # fmt: skip


def _besides(parts: Mapping[str, Any], c: Mapping[str, float]) -> Any:
    return parts["kernels"] * c["kernel"] + parts["elementwise"] / c["elementwise"]


def seconds(parts: Mapping[str, Any], rate: Any, c: Mapping[str, float]) -> Any:
    """The law: seconds of all that torch launches.

    Args:
        parts: of one product, or of many: then all are arrays of (products, tiles) or (products, 1).
        rate: the constant "rate KIND" of the product, or of each as (products, 1).
    """
    kernel = _law(parts, rate, c)["kernel"].min(axis=-1, keepdims=True)
    return (kernel + _besides(parts, c) + copies.seconds(parts, c))[..., 0]


def cost(parts: Mapping[str, Any], rate: float, c: Mapping[str, float]) -> tuple[dict[str, float], str]:
    """The parts of a predicted time in seconds, which overlap, and the tile that is the quickest."""
    law = _law(parts, rate, c)
    best = int(law["kernel"].argmin())
    found = {name: float(law[name][best]) for name in ("compute", "l2", "memory", "overhead", "reduction")}
    found |= {"elementwise": float(_besides(parts, c)), "copies": float(copies.seconds(parts, c))}
    cut = f", K in {_SPLITS[best]:.0f}" if _SPLITS[best] > 1 else ""
    return found, f"{_ROWS[best]:.0f}x{_COLUMNS[best]:.0f}{cut}"


# --- what a correction looks at -------------------------------------------------------------------------------------


def features(found: Route) -> tuple[list[float], list[str]]:
    """Numbers, and words, by which products are alike; see `residuals`."""
    p = found.problem
    numbers = [math.log2(max(size, 1)) for size in (p.M, p.N, p.K, p.matrices)]
    words = [
        found.kind,
        *("wide" if wide >= WIDE else "narrow" for wide in found.alignment.values()),
        "".join("N" if x.col == 1 else "T" for x in (p.a, p.b)) if found.kind.startswith("half") else "NT",
        " ".join(found.copied),
        str(min(found.kernels, 3)),
    ]
    return numbers, words
