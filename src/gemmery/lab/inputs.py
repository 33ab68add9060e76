"""The inputs of a suite's row: random operands in its layout, and the check of a result."""

from __future__ import annotations

import itertools
import math
import random
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .. import devices
from ..activations import Per, quantize_activations
from ..dtypes import Precision
from ..formats import QuantizedTensor, quantize
from ..formats.scaled import BLOCK, ScaledTensor
from .fusions import FUSIONS
from .suites import BATCH_NAMES, LAYOUTS, MATRIX_NAMES, Row


@dataclass(frozen=True)
class Kind:
    """The meaning of a name of `suites.DTYPES`.

    Attributes:
        dtype, out: of the operands and of the result.
        tolerance: the largest ‖out − ref‖ / ‖ref‖ that counts as right: a few times what rounding costs.
        precision, fast_accum: gemmery's arguments.
    """

    dtype: torch.dtype
    out: torch.dtype
    tolerance: float
    precision: Precision = "ieee"
    fast_accum: bool = False


KINDS: dict[str, Kind] = {
    "bf16": Kind(torch.bfloat16, torch.bfloat16, 4e-3),
    "fp16": Kind(torch.float16, torch.float16, 1e-3),
    "fp32": Kind(torch.float32, torch.float32, 1e-5),
    "tf32": Kind(torch.float32, torch.float32, 2e-3, precision="tf32"),
    "fp64": Kind(torch.float64, torch.float64, 1e-13),
    "int8": Kind(torch.int8, torch.int32, 0.0),
    "fp8": Kind(torch.float8_e4m3fn, torch.bfloat16, 4e-3),
    # Each of K / 32 instructions may cut the sum by 2^-13, at worst all in one direction.
    "fp8fast": Kind(torch.float8_e4m3fn, torch.bfloat16, 4e-2, fast_accum=True),
}
#: Rows of the output that are compared in float64, and columns at a time.
CHECKED_ROWS, CHECKED_COLUMNS = 512, 8192
#: The value that fills an integer output before the check. No product of int8 matrices reaches it below K = 2^17.
UNWRITTEN = -(2**31)


class Unsuited(Exception):
    """A peer has no such product: the row is measured without it."""


class WrongResult(Exception):
    """A method's result is not that of the product: it is not timed."""


@dataclass(frozen=True)
class Inputs:
    """The inputs of a method.

    Attributes:
        a, b: (..., M, K) and (..., K, N).
        out: (..., M, N), the same for all methods.
        kind: the types, and how exact the result has to be.
        row: the row that they were made for.
        args: what the row's epilogue is given besides the product.
        weight: the packed weight, (N, K), of a row with `weight`; b is then what it stands for, in the type of a.
        scaled: the operands of a row with `scales`, (M, K) and (N, K); a and b are then their data.
        exact: what is compared in float64 where it is not a and b: the numbers that quantized operands stand for.
    """

    a: Tensor
    b: Tensor
    out: Tensor
    kind: Kind
    row: Row
    args: tuple[Tensor, ...] = ()
    weight: QuantizedTensor | None = None
    scaled: tuple[ScaledTensor, ScaledTensor] | None = None
    exact: tuple[Tensor, Tensor] | None = None


@dataclass(frozen=True)
class Bare:
    """A call that is timed without the last step of what its row asks for, which follows in the check alone."""

    call: Callable[[], Tensor]
    finish: Callable[[Tensor], Tensor]

    def __call__(self) -> Tensor:
        """The timed call."""
        return self.call()


# --- making them ----------------------------------------------------------------------------------------------------

#: Makes a buffer of a given shape.
Fill = Callable[[Sequence[int]], Tensor]


def random_numbers(dtype: torch.dtype, generator: torch.Generator) -> Fill:
    """Makes buffers of random normal numbers, or of all that int8 can hold."""

    def fill(shape: Sequence[int]) -> Tensor:
        if dtype == torch.int8:
            return torch.randint(-128, 128, shape, dtype=dtype, device=generator.device, generator=generator)
        # torch draws no random numbers in fp8.
        drawn = torch.bfloat16 if dtype.itemsize == 1 else dtype
        return torch.randn(shape, dtype=drawn, device=generator.device, generator=generator).to(dtype)

    return fill


def make_matrix(batch: Sequence[int], rows: int, cols: int, layout: str, fill: Fill) -> Tensor:
    """A (*batch, rows, cols) view of a buffer, in memory as `layout`, of `suites.LAYOUTS`, says."""
    order, _, view = layout.partition("+")
    outer, inner = (rows, cols) if order == "row" else (cols, rows)
    if view == "half":
        step = inner // 2
        matrix = fill((*batch, (outer - 1) * step + inner)).unfold(-1, inner, step)
    elif view == "step":
        matrix = fill((*batch, outer, 2 * inner))[..., ::2]
    else:
        length, start = {"": (inner, 0), "pad": (inner + 64, 0), "odd": (inner + 1, 1)}[view]
        matrix = fill((*batch, outer, length))[..., start : start + inner]
    return matrix if order == "row" else matrix.mT


def make_ordered(extents: dict[str, int], order: str, fill: Fill) -> Tensor:
    """A view of a buffer whose dimensions have a given order in memory, see `suites.Row`.

    Args:
        extents: size of each named dimension of the view, in the view's order.
        order: names, and sizes of dimensions of the buffer of which the view has the first slice.
        fill: makes the buffer.
    """
    words = order.split()
    buffer = fill([int(word) if word.isdecimal() else extents[word] for word in words])
    for dim in reversed(range(len(words))):
        if words[dim].isdecimal():
            buffer = buffer.select(dim, 0)
    named = [word for word in words if not word.isdecimal()]
    present = [name for name in extents if name in named]
    view = buffer.permute([named.index(name) for name in present])
    first = next(place for place, name in enumerate(extents) if name in named)
    for place, name in enumerate(extents):
        if place > first and name not in named:
            view = view.unsqueeze(place - first)
    return view


def make_operand(row: Row, name: str, fill: Fill) -> Tensor:
    """The operand `name` of a row, "a", "b" or "out"."""
    layout: str = getattr(row, name)
    sizes = {"m": row.M, "n": row.N, "k": row.K}
    rows, cols = tuple(MATRIX_NAMES[name])
    if layout in LAYOUTS:
        return make_matrix(row.batch, sizes[rows], sizes[cols], layout, fill)
    extents = dict(zip(BATCH_NAMES, row.batch, strict=False))
    return make_ordered(extents | {rows: sizes[rows], cols: sizes[cols]}, layout, fill)


def make_inputs(row: Row, dtype: str, seed: int, device: str = "cuda") -> Inputs:
    """Random inputs of a row, the same for the same seed, independent of the other rows."""
    generator = torch.Generator(device).manual_seed(seed ^ zlib.crc32(row.name.encode()))
    kind = KINDS[dtype]
    if row.scales:
        return scaled_inputs(row, kind, random_numbers(torch.bfloat16, generator))
    fill = random_numbers(kind.dtype, generator)
    if row.weight:
        return weight_inputs(row, kind, fill)
    a, b = (make_operand(row, name, fill) for name in ("a", "b"))
    if row.epilogue:
        args = FUSIONS[row.epilogue].arguments(row, fill)
        return Inputs(a, b, _matrix_out(row, kind, a.device), kind, row, args)
    out = make_operand(row, "out", lambda shape: torch.empty(shape, dtype=kind.out, device=device))
    return Inputs(a, b, out, kind, row)


def _matrix_out(row: Row, kind: Kind, device: torch.device) -> Tensor:
    halves = bool(row.epilogue) and FUSIONS[row.epilogue].halves
    return torch.empty(row.M, row.N // 2 if halves else row.N, dtype=kind.out, device=device)


# --- quantized operands ---------------------------------------------------------------------------------------------


def weight_inputs(row: Row, kind: Kind, fill: Fill) -> Inputs:
    """The inputs of a row with a packed weight: packed here, so that it is not timed, on the device of the rest."""
    a, b = (make_operand(row, name, fill) for name in ("a", "b"))
    name, group = row.packing
    weight = quantize(b.mT, name, group_size=group)
    args = FUSIONS[row.epilogue].arguments(row, fill) if row.epilogue else ()
    return Inputs(
        a, weight.dequantize(kind.dtype).mT, _matrix_out(row, kind, a.device), kind, row, args, weight=weight,
        exact=(a, weight.dequantize(torch.float32).mT),
    )  # fmt: skip


#: The names in `quantize_activations` of the scales of a suite's row.
PER: dict[str, Per] = {"tensor": "tensor", "row": "token", "block": "block", "mx": "mx"}


def scaled_inputs(row: Row, kind: Kind, fill: Fill) -> Inputs:
    """The inputs of a row whose operands both have 8 bits and scales."""
    name = "int8" if kind.dtype == torch.int8 else "e4m3"
    x, weight = make_operand(row, "a", fill), make_operand(row, "b", fill).mT
    a = quantize_activations(x, name, per=PER[row.scales])
    if row.scales == "block":
        b = ScaledTensor(*square_blocks(weight))
    else:
        b = quantize_activations(weight, name, per=PER[row.scales])
    if kind.dtype == torch.int8:
        # Sums of int8 are exact, but with scales, they are rounded to bf16.
        kind = replace(kind, out=torch.bfloat16, tolerance=KINDS["bf16"].tolerance)
    out = torch.empty(row.M, row.N, dtype=kind.out, device=x.device)
    exact = (a.dequantize(torch.float32), b.dequantize(torch.float32).mT)
    return Inputs(a.data, b.data.mT, out, kind, row, scaled=(a, b), exact=exact)


def square_blocks(x: Tensor) -> tuple[Tensor, Tensor]:
    """A matrix in e4m3 with a scale for each 128 × 128 of it: the numbers, and the scales, (R / 128, C / 128)."""
    rows, cols = x.shape
    blocks = x.float().view(rows // BLOCK, BLOCK, cols // BLOCK, BLOCK)
    scale = blocks.abs().amax((1, 3), keepdim=True) / torch.finfo(torch.float8_e4m3fn).max
    return (blocks / scale).to(torch.float8_e4m3fn).view(rows, cols), scale.view(rows // BLOCK, cols // BLOCK)


def least_seconds(inputs: Inputs) -> float | None:
    """The least time that the device's datasheet allows for a row with scales, of which no plan can be asked."""
    device = devices.current(inputs.a.device)
    if device is None:
        return None
    moved = inputs.a.nbytes + inputs.b.nbytes + inputs.out.nbytes
    return max(inputs.row.flops / device.rate(inputs.a.dtype), moved / device.bandwidth)


@contextmanager
def tf32_allowed(allowed: bool) -> Iterator[None]:
    """Whether torch's own float32 products may use TF32, inside the block."""
    flags = torch.backends.cuda.matmul
    before = flags.allow_tf32
    flags.allow_tf32 = allowed
    try:
        yield
    finally:
        flags.allow_tf32 = before


# --- checking a result ----------------------------------------------------------------------------------------------


def sample_rows(M: int, rng: random.Random) -> list[int]:
    """All of M rows, or `CHECKED_ROWS`: a random one from each of as many bands, so that no tile is left out."""
    if M <= CHECKED_ROWS:
        return list(range(M))
    edges = [M * i // CHECKED_ROWS for i in range(CHECKED_ROWS + 1)]
    rows = [rng.randrange(low, high) for low, high in itertools.pairwise(edges)]
    # The last tile may be a single row, and is the likeliest to be wrong.
    return [*rows[:-1], M - 1]


def relative_error(inputs: Inputs, rows: Sequence[int]) -> float:
    """‖out − ref‖ / ‖ref‖ over some rows of the output, against the product in float64."""
    index = torch.tensor(rows, device=inputs.a.device)
    a, b = inputs.exact or (inputs.a, inputs.b)
    # By its bytes: torch selects no rows of fp8.
    plain = a.view(torch.int8) if a.dtype.itemsize == 1 else a
    left = plain.index_select(-2, index).view(a.dtype).double()
    if inputs.row.epilogue:
        # Whole rows: an epilogue may combine columns.
        args = [x.double() if x.dim() == 1 else x.index_select(0, index).double() for x in inputs.args]
        reference = FUSIONS[inputs.row.epilogue].function(left @ b.double(), *args)
        got = inputs.out.index_select(-2, index).double()
        return float((got - reference).norm() / reference.norm())
    wrong = norm = 0.0
    for start in range(0, b.shape[-1], CHECKED_COLUMNS):
        columns = slice(start, start + CHECKED_COLUMNS)
        reference = left @ b[..., columns].double()
        got = inputs.out[..., columns].index_select(-2, index).double()
        wrong += (got - reference).square().sum().item()
        norm += reference.square().sum().item()
    return math.sqrt(wrong / norm)


def check(call: Callable[[], object], inputs: Inputs, rows: Sequence[int], slack: float = 1) -> float:
    """Run a method once into an output that holds nothing right and compare.

    Args:
        call, inputs: the method's call for the inputs; a `Bare` one is finished here.
        rows: of the output, to compare; the whole is looked at for numbers that are not written or not finite.
        slack: how many times the tolerance is allowed.

    Returns:
        The relative error over `rows`.

    Raises:
        WrongResult: it is over the tolerance, or something in the whole output was not written or is not finite.
    """
    out, floating = inputs.out, inputs.kind.out.is_floating_point
    before = (out.data_ptr(), out.shape, out.stride())
    out.fill_(math.nan if floating else UNWRITTEN)
    result = call.finish(call()) if isinstance(call, Bare) else call()
    if isinstance(result, Tensor) and result is not out:
        out.copy_(result)
    if (out.data_ptr(), out.shape, out.stride()) != before:
        raise WrongResult(f"the output has another layout, with strides {out.stride()}")
    written = torch.isfinite(out) if floating else out != UNWRITTEN
    if left := out.numel() - int(written.sum().item()):
        raise WrongResult(f"{left} of {out.numel()} elements were not written or are not finite")
    error = relative_error(inputs, rows)
    # Operator by operator, an epilogue's intermediate results are rounded as well.
    tolerance = slack * inputs.kind.tolerance * (3 if inputs.row.epilogue else 1)
    if not error <= tolerance:  # written this way round, NaN fails too
        raise WrongResult(f"relative error {error:.2e} is over {tolerance:.0e}")
    return error
