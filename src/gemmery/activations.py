"""Quantizing activations: elements of 8 bits, and the scales that use the whole range of the type.

The scale is computed for each tensor ("dynamic" quantization), in the same pass that writes the elements.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from . import devices
from .devices import on_device, overlap_on
from .dtypes import FP8
from .formats.scaled import BLOCK, E8M0, MX_BLOCK, ScaledTensor
from .kernels import quantize as kernels
from .layout import fold_blocks
from .operands.base import negated
from .product.check import check_tensor
from .product.operator import LIBRARY
from .product.seen import needs_dispatcher
from .schedules.binding import TL

Per = Literal["token", "block", "tensor", "mx"]
PERS: tuple[Per, ...] = ("token", "block", "tensor", "mx")
#: The formats: their types, and the largest number of each that a quantized one becomes. That of int8 is symmetric.
FORMATS: dict[str, tuple[torch.dtype, float]] = {
    "e4m3": (torch.float8_e4m3fn, 448.0),
    "e5m2": (torch.float8_e5m2, 57344.0),
    "int8": (torch.int8, 127.0),
}
#: Exponents of the largest powers of two in the formats that have scales of the MX formats.
_EXPONENTS = {"e4m3": 8, "e5m2": 15}
#: Columns that share a scale.
_SPANS = {"block": BLOCK, "mx": MX_BLOCK}
_TYPES = (torch.float16, torch.bfloat16, torch.float32)
#: Elements that a program holds at a time, 32 in a thread of its four warps; longer lines take more warps.
_TILE = 4096
#: The longest line that is held as a whole, by 16 warps, and how much of a longer one is looked at at a time.
_WHOLE, _PART = 16384, 8192
#: Programs that look for the largest magnitude of all: four for each multiprocessor of a large GPU, and so few that
#: each program of the next launch can look at what all of them found.
_FINDERS = 512


def quantize_activations(
    x: Tensor, format: str = "e4m3", *, per: Per = "token", amax: Tensor | None = None
) -> ScaledTensor:
    """Quantize x to 8 bits with scales: `scale = amax(|x|) / largest`, `data = round(x / scale)`.

    Everything is computed in float32, rounded to nearest even and clamped to the largest value of the format: 448 for
    e4m3, 57344 for e5m2, 127 for int8, which does not use -128. On a GPU, this is one kernel that reads x once, or two
    for per="tensor". The bits are those of `reference`, which runs on the CPU. "block" is DeepSeek-V3's quantization of
    activations (arXiv:2412.19437, section 3.3.2).

    per="mx" gives MXFP8 (OCP Microscaling Formats, specification 1.0, section 6.3). The scale of 32 columns is a power
    of two: that of their largest magnitude divided by that of the format's largest value, 2^8 for e4m3 and 2^15 for
    e5m2, and at least 2^-127. Values that are still too large are clamped. Hopper has no instructions for MXFP8: on an
    H200, a product of such operands is slower than one in bfloat16 from 128 rows on, with about a third of its speed
    for many rows.

    If all values that share a scale are zero, the scale is 1. A NaN or an infinity makes all elements that share its
    scale NaN: the scale is NaN or infinite, and everything multiplied by it is or becomes NaN. This includes int8,
    whose data contain 0 in place of a NaN.

    Args:
        x: (..., M, K) in float16, bfloat16 or float32, any strides.
        format: "e4m3", "e5m2" or "int8".
        per: what shares a scale: "token", a row; "block", 128 columns of a row; "tensor", the whole tensor; "mx", 32
            columns of a row, for fp8.
        amax: the largest magnitude of each row, (..., M) in float32, if it is known, for example from
            `epilogues.with_row_amax`. x is then not searched for it. Not for per="block" and "mx".

    Returns:
        A contiguous `ScaledTensor` whose scale is (..., M, 1), (..., M, ceil(K / 128)), (), or (..., M, ceil(K / 32))
            in float8_e8m0fnu.

    Raises:
        TypeError: x is not of such a type, or its gradient is required.
        ValueError: format or per is unknown, x has fewer than two dimensions, or amax does not fit.

    Example:
        >>> import torch, gemmery
        >>> x = torch.tensor([[1.0, -2.0, 0.5], [0.0, 0.0, 0.0]])
        >>> q = gemmery.quantize_activations(x, "int8")
        >>> q.data
        tensor([[  64, -127,   32],
                [   0,    0,    0]], dtype=torch.int8)
        >>> q.scale
        tensor([[0.0157],
                [1.0000]])
    """
    _check(x, format, per, amax)
    if needs_dispatcher((x, amax)):
        data, scale = torch.ops.gemmery.quantize_activations(x, format, per, amax)
    else:
        data, scale = _quantize(x, format, per, amax)
    return ScaledTensor(data, scale)


def reference(
    x: Tensor, format: str = "e4m3", *, per: Per = "token", amax: Tensor | None = None
) -> ScaledTensor:
    """The meaning of `quantize_activations`, in plain torch."""
    return ScaledTensor(*_by_reference(x, format, per, amax))


def _by_reference(x: Tensor, format: str, per: str, amax: Tensor | None) -> tuple[Tensor, Tensor]:
    dtype, largest = FORMATS[format]
    *lead, M, K = x.shape
    wide = x.to(torch.float32)
    # A whole row may be empty.
    span = _SPANS.get(per, K)
    groups = -(-K // span) if per in _SPANS else 1
    lines = F.pad(wide, (0, groups * span - K)).reshape(*lead, M, groups, span)
    # Padded, an empty row has a magnitude, too.
    most = F.pad(lines.abs(), (0, 1)).amax(-1) if amax is None else amax.abs().unsqueeze(-1)
    if per == "tensor":
        most = most.amax() if most.numel() else most.new_zeros(())
    kept: Tensor | None = None
    if per == "mx":
        kept = _power_of(most, _EXPONENTS[format])
        scale = kept.to(torch.float32)
    else:
        # torch multiplies by the reciprocal of a number on the CPU.
        scale = most / torch.full_like(most, largest)
        scale = torch.where(scale == 0, 1.0, scale)
    quotient = (lines / scale.unsqueeze(-1) if scale.dim() else lines / scale).clamp(-largest, largest)
    if dtype == torch.int8:
        quotient = torch.where(quotient.isnan(), 0.0, quotient).round()
    data = quotient.to(dtype).reshape(*lead, M, groups * span)[..., :K].contiguous()
    return data, scale if kept is None else kept


def _power_of(magnitude: Tensor, exponent: int) -> Tensor:
    """The scale with which a magnitude's power of two becomes that of `exponent`, in `E8M0`; 1 of 0, and of NaN NaN."""
    biased = magnitude.contiguous().view(torch.int32) >> 23
    kept = torch.where(biased == 255, 255, (biased - exponent).clamp(min=0))
    return torch.where(magnitude == 0, 127, kept).to(torch.uint8).view(E8M0)


def _check(x: Tensor, format: str, per: str, amax: Tensor | None) -> None:
    op = "quantize_activations"
    check_tensor(op, "x", x)
    if format not in FORMATS:
        raise ValueError(f"{op}: format is {format!r}; it must be one of {', '.join(FORMATS)}")
    if per not in PERS:
        raise ValueError(f"{op}: per is {per!r}; it must be one of {', '.join(PERS)}")
    if per == "mx" and format not in _EXPONENTS:
        raise ValueError(
            f"{op}: format is {format!r}; with per='mx' it must be one of {', '.join(_EXPONENTS)}"
        )
    if x.dtype not in _TYPES:
        raise TypeError(f"{op}: x is {x.dtype}; it must be one of {', '.join(map(str, _TYPES))}")
    if x.dim() < 2:
        raise ValueError(f"{op}: x is {tuple(x.shape)}; it must be (..., M, K)")
    if torch.is_grad_enabled() and x.requires_grad:
        raise TypeError(f"{op}: x requires a gradient, which quantizing does not have; quantize x.detach()")
    if amax is None:
        return
    check_tensor(op, "amax", amax)
    if per in _SPANS:
        raise ValueError(
            f"{op}: amax is of rows, which blocks have no use for; it goes with 'token' and 'tensor'"
        )
    if amax.dtype != torch.float32:
        raise TypeError(f"{op}: amax is {amax.dtype}; it must be torch.float32")
    if amax.shape != x.shape[:-1]:
        raise ValueError(
            f"{op}: amax is {tuple(amax.shape)} and x {tuple(x.shape)}; it must be {tuple(x.shape[:-1])}"
        )
    if amax.device != x.device:
        raise ValueError(
            f"{op}: x is on {x.device} and amax on {amax.device}; they must be on the same device"
        )


def _scale_shape(x: Tensor, per: str) -> tuple[int, ...]:
    *lead, M, K = x.shape
    return () if per == "tensor" else (*lead, M, 1 if per == "token" else -(-K // _SPANS[per]))


# ---------------------------------------------------------------------------------------------------------------------
# Running


def _quantize(x: Tensor, format: str, per: str, amax: Tensor | None) -> tuple[Tensor, Tensor]:
    """Numbers and scale, by kernels where there are any for this device."""
    dtype, _ = FORMATS[format]
    device = devices.current(x.device)
    if device is None or not x.numel() or (dtype in FP8 and dtype not in device.target.fp8):
        return _by_reference(x, format, per, amax)
    data = torch.empty(x.shape, dtype=dtype, device=x.device)
    scale = torch.empty(_scale_shape(x, per), dtype=_scale_type(per), device=x.device)
    with on_device(x):
        if amax is not None:
            maxima = amax.contiguous() if per == "token" else amax.abs().amax().reshape(1)
            _cast_known(x, data, scale, maxima, format)
        elif per == "tensor":
            _cast_known(x, data, scale, _maxima(x), format)
        else:
            _cast_lines(x, data, scale, format, _SPANS.get(per, x.shape[-1]))
    return data, scale


def _scale_type(per: str) -> torch.dtype:
    return E8M0 if per == "mx" else torch.float32


class _Walk(NamedTuple):
    """A kernel's walk over x: the last arguments of all kernels, and the grid; see `kernels.quantize`."""

    blocks: int
    arguments: tuple[Any, ...]
    constants: dict[str, Any]


def _walk(x: Tensor, span: int | None) -> _Walk:
    """Lines of `span` columns, or of as many as a program holds at a time."""
    sizes, M, (own,) = fold_blocks(x, [])
    K = x.shape[-1]
    # Rows that are neighbors in memory: enough are loaded at once to use whole memory sectors.
    down = own.row == 1 and own.col != 1
    columns = 1 << (min(span or K, BLOCK if down else K) - 1).bit_length()
    columns = min(columns, _TILE if span is None else columns if columns <= _WHOLE else _PART)
    lines, rows = max(_TILE // columns, 1), x.numel() // K
    span = columns if span is None else span
    groups = -(-K // span)
    # Columns up to the end of the last block.
    wide = (K + span + columns) * max(abs(own.col), 1) >= 1 << 31
    constants = {
        "LINES": lines, "COLS": columns, "DOWN": down, "WIDE": wide,
        "num_warps": min(max(lines * columns // 1024, 4), 16),
    }  # fmt: skip
    strides = (negated(own), own.row, own.col)
    blocks = -(-rows // lines) * groups if down else -(-rows * groups // lines)
    return _Walk(blocks, (rows, groups, span, M, K, sizes, strides), constants)


def _format(format: str) -> dict[str, Any]:
    """A format as compile-time arguments."""
    dtype, largest = FORMATS[format]
    return {"LARGEST": largest, "DTYPE": TL[dtype]}


def _cast_lines(x: Tensor, data: Tensor, scale: Tensor, format: str, span: int) -> None:
    """Each line has its own scale."""
    walk = _walk(x, span)
    whole = walk.constants["COLS"] >= min(span, x.shape[-1])
    power = scale.dtype == E8M0
    kernels.quantize_lines[(walk.blocks,)](
        # Triton has no such type.
        x, data, scale.view(torch.uint8) if power else scale, *walk.arguments, WHOLE=whole,
        EXPONENT=_EXPONENTS[format] if power else None, **_format(format), **walk.constants,
        **overlap_on(x),
    )  # fmt: skip


def _maxima(x: Tensor) -> Tensor:
    """Some magnitudes, of which the largest is that of x."""
    walk = _walk(x, None)
    programs = min(walk.blocks, _FINDERS)
    maxima = torch.empty(programs, dtype=torch.float32, device=x.device)
    kernels.largest_magnitudes[(programs,)](
        x, maxima, walk.blocks, *walk.arguments, **walk.constants, **overlap_on(x)
    )
    return maxima


def _cast_known(x: Tensor, data: Tensor, scale: Tensor, maxima: Tensor, format: str) -> None:
    """Lines whose largest magnitudes are known: of each row, or for a scale of no dimensions some of all."""
    walk = _walk(x, None)
    power = 0 if scale.dim() else 1 << (maxima.numel() - 1).bit_length()
    kernels.quantize_known[(walk.blocks,)](
        x, data, scale, maxima, maxima.numel(), *walk.arguments, FOUND=power, **_format(format), **walk.constants,
        **overlap_on(x),
    )  # fmt: skip


# ---------------------------------------------------------------------------------------------------------------------
# The operator, for torch.compile and dispatch modes

LIBRARY.define(
    "quantize_activations(Tensor x, str format, str per, Tensor? amax) -> (Tensor, Tensor)",
    tags=torch.Tag.pt2_compliant_tag,
)
for _key in ("CPU", "CUDA"):
    LIBRARY.impl("quantize_activations", _quantize, _key)


@torch.library.register_fake("gemmery::quantize_activations", lib=LIBRARY)
def _fake(x: Tensor, format: str, per: str, amax: Tensor | None) -> tuple[Tensor, Tensor]:
    data = x.new_empty(x.shape, dtype=FORMATS[format][0])
    return data, x.new_empty(_scale_shape(x, per), dtype=_scale_type(per))
