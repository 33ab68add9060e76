"""Weights of floating point as codes and scales, rounded to nearest."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, cast, get_args, overload

import torch
from torch import Tensor
from torch.nn.functional import pad

from . import pieces
from .aten import converted, has_no_values
from .base import Format
from .codes import from_codes
from .kept import CODES, NAMES, Code
from .packing import STRIP
from .scaled import BLOCK
from .sparse import SparseTensor, is_group_size, laid_scales, quantized
from .tensor import QuantizedTensor, lookup
from .weight import DTYPES, check_strided, check_whole

__all__ = ["from_codes", "quantize"]

Scale = Literal["tensor", "channel", "block"]

#: Group sizes that are supported.
SIZES = (16, 32, 64, 128, 256, 512, 1024)
#: The largest number of e2m1, and the exponent of its largest power of two.
E2M1_MAX, E2M1_EXPONENT = 6.0, 2
#: A weight of more numbers is quantized in parts, on the CPU and on a GPU, where a part takes many launches.
PART, PART_ON_GPU = 1 << 16, 1 << 21


@dataclass(frozen=True)
class _Request:
    """The checked arguments of `quantize`."""

    format: Format
    group_size: int
    symmetric: bool
    scale: Scale
    dtype: torch.dtype


@dataclass(frozen=True)
class _Asked:
    """The arguments of `quantize`, as they were given."""

    group_size: int | None
    symmetric: bool
    scale: Scale
    dtype: torch.dtype | None

    def check(self) -> None:
        """Errors about those that no weight and no format takes."""
        dtype, scale, symmetric, group_size = self.dtype, self.scale, self.symmetric, self.group_size
        if dtype is not None and dtype not in DTYPES:
            raise ValueError(f"quantize: dtype is {dtype}; it must be torch.float16 or torch.bfloat16")
        if scale not in get_args(Scale):
            raise ValueError(f"quantize: scale is {scale!r}; it must be 'tensor', 'channel' or 'block'")
        if not isinstance(symmetric, bool):
            raise TypeError(f"quantize: symmetric is {symmetric!r}; it must be True or False")
        if group_size is not None and (isinstance(group_size, bool) or not isinstance(group_size, int)):
            raise TypeError(f"quantize: group_size is {group_size!r}; it must be an int or None")


@dataclass(frozen=True)
class _Rule:
    """The rule by which numbers are quantized to a format.

    Attributes:
        sizes: the supported group sizes.
        size: that by default.
        make: gives the weight, of float32 and a request.
        blocks: the rule with `scale="block"`, where `scale` decides what shares one; None if it is `group_size`.
        has_zeros: whether groups can have zero points.
        takes_nan: whether there are codes for NaN or infinity.
        rows: a part with a multiple of this number of rows can be quantized by itself; 0 if all of a weight shares
            something.
    """

    sizes: tuple[int, ...]
    size: int
    make: Callable[[Tensor, _Request], QuantizedTensor]
    blocks: _Rule | None = None
    has_zeros: bool = False
    takes_nan: bool = False
    rows: int = STRIP


@overload
def quantize(  # type: ignore[overload-overlap]  # it is a Tensor, too
    w: SparseTensor,
    format: Format | str,
    *,
    group_size: int | None = None,
    symmetric: bool = True,
    scale: Scale = "channel",
    dtype: torch.dtype | None = None,
) -> SparseTensor: ...
@overload
def quantize(
    w: Tensor,
    format: Format | str,
    *,
    group_size: int | None = None,
    symmetric: bool = True,
    scale: Scale = "channel",
    dtype: torch.dtype | None = None,
) -> QuantizedTensor: ...
def quantize(
    w: Tensor,
    format: Format | str,
    *,
    group_size: int | None = None,
    symmetric: bool = True,
    scale: Scale = "channel",
    dtype: torch.dtype | None = None,
) -> QuantizedTensor | SparseTensor:
    """A weight in one of `gemmery.formats.FORMATS`, rounded to nearest, ties to even.

    Args:
        w: (*batch, N, K), floating point. It may be a `gemmery.SparseTensor`: its kept elements become int8 or e4m3
            with a scale per row, or int4, without zero points, and the result is a SparseTensor too.
        format: "int8", "int4", "e4m3", "e5m2", "mxfp4", "nvfp4" or "nf4".
        group_size: the number of columns that share a scale, a power of two from 16 to 1024. For int8 and int4, 0 means
            one float32 scale per row, which multiplies the product (`channel`). The default is 128 for int4, 0 for int8
            and 64 for nf4. mxfp4 has 32 and nvfp4 16, and for e4m3 and e5m2 `scale` decides. For a sparse weight, int4
            supports 0 or groups of at least 32 columns, half of which are kept.
        symmetric: for int8 and int4, False gives each group a zero point, and the codes cover the range from its
            smallest to its largest element; requires groups.
        scale: for e4m3 and e5m2, what shares a float32 scale: all of w ("tensor"), a row ("channel"), or a block of 128
            rows and columns ("block").
        dtype: the type of the activations, torch.float16 or torch.bfloat16; by default that of w, or torch.bfloat16.

    Returns:
        The weight, (*batch, N, K), on w's device. On the meta device, no values are checked. The largest magnitude that
            shares a scale is kept up to rounding, with two exceptions: mxfp4's rule (OCP MX 1.0, 6.3) clamps values
            over 6 at its scale, and symmetric integers clamp an equally large value of the opposite sign if this makes
            the total error smaller. Their scales may be negative.

    Raises:
        ValueError: an argument does not fit the format; w contains NaN or infinity, which only e4m3 (NaN) and e5m2 can
            represent; or `dtype` can't represent a scale or an element.
        TypeError: w is not a strided or 2:4 sparse tensor of floating point, or is sharded (a DTensor), or an argument
            has another type.

    Example:
        >>> import torch, gemmery
        >>> w = torch.linspace(-1, 1, 32 * 128).reshape(32, 128).bfloat16()
        >>> q = gemmery.quantize(w, "int4", group_size=32)
        >>> q
        QuantizedTensor((32, 128), format=int4, group_size=32, dtype=torch.bfloat16, device='cpu', bytes=2304)
        >>> bool((q.dequantize() - w).abs().max() < 0.08)
        True
    """
    format = lookup("quantize", format)
    asked = _Asked(group_size, symmetric, scale, dtype)
    asked.check()
    if isinstance(w, Tensor):
        check_whole("quantize", "w", w)
    if isinstance(w, SparseTensor):
        return _sparse(w, format, asked)
    rule = _rule(format)
    _check_weight(w)
    rule, request = _request(w, format, rule, asked)
    return _in_parts(w.detach(), rule, request)


def _in_parts(w: Tensor, rule: _Rule, request: _Request) -> QuantizedTensor:
    """The weight, made of parts where it is large: making one takes tens of bytes a number."""
    limit = PART if w.device.type == "cpu" else PART_ON_GPU
    rows = 0 if request.scale == "tensor" else rule.rows
    if not rows or has_no_values(w) or w.numel() <= limit:
        return _made_of(w, rule, request)
    outline = _made_of(torch.empty(w.shape, device="meta"), rule, request)
    # At once and first, so that all parts use the same memory, one after another.
    result = outline.with_parts(
        {name: torch.empty_like(x, device=w.device) for name, x in outline.parts().items()}
    )
    step = max(1, limit // (w.shape[-1] * rows)) * rows
    for index in itertools.product(*map(range, w.shape[:-2])):
        part = cast(QuantizedTensor, result[index])
        for start in range(0, w.shape[-2], step):
            made = _made_of(w[index][start : start + step], rule, request)
            pieces.put_rows(part, start, made)
    return result


def _made_of(w: Tensor, rule: _Rule, request: _Request) -> QuantizedTensor:
    """The weight of numbers of any floating type."""
    values = w.float()
    if w.device.type != "meta" and not rule.takes_nan and not values.isfinite().all():
        raise ValueError(f"quantize: w has NaN or infinity, which {request.format.name} has no codes for")
    if not request.group_size or w.device.type == "meta":
        return rule.make(values, request)
    largest = _check_range(values, request.dtype)
    result = rule.make(values, request)
    # Scales are rounded, so a number just below the type's limit may exceed it after decoding.
    if (
        largest > torch.finfo(request.dtype).max / 4
        and not result.dequantize()[values.isfinite()].isfinite().all()
    ):
        raise ValueError(f"quantize: w has {largest:g}, too near the largest number of {request.dtype}")
    return result


def _listed(sizes: Sequence[int]) -> str:
    """The group sizes that a format has, for a message."""
    return f"{'one of ' if len(sizes) > 1 else ''}{', '.join(map(str, sizes))}"


def _sparse(w: SparseTensor, format: Format, asked: _Asked) -> SparseTensor:
    """A sparse weight in 8 bits or 4; ValueError for what only dense ones take."""
    if format.name not in NAMES:
        raise ValueError(
            f"quantize: format is {format.name!r} for a sparse weight; it must be one of {', '.join(NAMES)}"
        )
    if not asked.symmetric or asked.scale != "channel":
        raise ValueError(
            "quantize: a sparse weight has no zero points, and no scale of the tensor or of blocks"
        )
    if w.code:
        raise ValueError(f"quantize: the kept numbers of {w!r} have {CODES[w.code].bits} bits already")
    code, rule = CODES[format.name], _rule(format)
    sizes = [x for x in rule.sizes if not x or (code.has_groups and is_group_size(x))]
    size = rule.size if asked.group_size is None else asked.group_size
    if size not in sizes:
        raise ValueError(
            f"quantize: group_size is {size}; with {format.name} and a sparse weight it must be "
            f"{_listed(sizes)}"
        )
    if not has_no_values(w.values) and not bool(w.values.isfinite().all()):
        raise ValueError("quantize: w has NaN or infinity")
    dtype = asked.dtype or w.dtype
    return _sparse_groups(w, code, size, dtype) if code.has_groups else quantized(w, code, dtype)


def _sparse_groups(w: SparseTensor, code: Code, size: int, dtype: torch.dtype) -> SparseTensor:
    """A sparse weight in 4 bits, with a scale for each row, or for each group of `size` columns."""
    N, K = w.shape[-2:]
    values = w.values.detach().float()
    if size and not has_no_values(values):
        _check_range(values, dtype)
    inner, grouped = w.parts(), values.unsqueeze(-2)
    if size:
        # Half of a group's columns are kept, and the padding of the last group is 0.
        grouped = _groups(values, size // 2)[..., : -(-K // size), :]
    scales = _or_one(_symmetric_scales(pad(grouped, (0, 1)), code.bits))
    if size:
        scales = _or_one(converted("quantize", "scales", scales, dtype, may_vanish=True))
        inner["scales"] = laid_scales(scales[..., :N, :], values.shape[-2])
    else:
        channel = scales.squeeze(-1)[..., :N].contiguous()
        inner["channel"] = channel if w.channel is None else channel * w.channel
    codes = (
        (grouped / scales.float().unsqueeze(-1)).round().clamp(-code.largest - 1, code.largest).flatten(-2)
    )
    codes = pad(codes, (0, max(0, values.shape[-1] - codes.shape[-1])))[..., : values.shape[-1]]
    inner["values"] = code.to_values(codes)
    made = SparseTensor._assemble(w.shape, inner, code.name, dtype, size)
    if size and not has_no_values(values) and not bool(made.unscaled().dense().isfinite().all()):
        raise ValueError(f"quantize: w has {values.abs().max():g}, too near the largest number of {dtype}")
    return made


# --- arguments -------------------------------------------------------------------------------------------------------


def _rule(format: Format) -> _Rule:
    if format.name not in _RULES:
        raise ValueError(
            f"quantize: format is {format.name!r}, which has no rule; it must be one of {', '.join(_RULES)}, or "
            "made by from_codes"
        )
    return _RULES[format.name]


def _check_weight(w: Tensor) -> None:
    if isinstance(w, torch.sparse.SparseSemiStructuredTensor):
        raise TypeError("quantize: w is torch's semi-structured tensor; quantize gemmery.sparsify(w)")
    if not isinstance(w, Tensor):
        raise TypeError(f"quantize: w is a {type(w).__name__}; it must be a tensor")
    check_strided("quantize", "w", w)
    if isinstance(w, QuantizedTensor):
        raise TypeError(f"quantize: w is {w!r}; give its dequantize() to quantize it again")
    if not w.is_floating_point():
        raise TypeError(f"quantize: w is {w.dtype}; it must be a floating-point type")
    if w.ndim < 2:
        raise ValueError(f"quantize: w is {tuple(w.shape)}; it must be (*batch, N, K)")


def _request(w: Tensor, format: Format, rule: _Rule, asked: _Asked) -> tuple[_Rule, _Request]:
    """The rule for a request, and the request."""
    symmetric, scale, dtype = asked.symmetric, asked.scale, asked.dtype
    if dtype is None:
        dtype = w.dtype if w.dtype in DTYPES else torch.bfloat16
    if scale != "channel" and rule.blocks is None:
        with_scale = " and ".join(name for name, other in _RULES.items() if other.blocks)
        raise ValueError(
            f"quantize: scale is {scale!r}, which is for {with_scale}; {format.name} has group_size"
        )
    what = format.name if rule.blocks is None else f"scale={scale!r}"
    if rule.blocks is not None and scale == "block":
        rule = rule.blocks
    size = rule.size if asked.group_size is None else asked.group_size
    if size not in rule.sizes:
        raise ValueError(f"quantize: group_size is {size}; with {what} it must be {_listed(rule.sizes)}")
    if not symmetric and not rule.has_zeros:
        with_zeros = " and ".join(name for name, other in _RULES.items() if other.has_zeros)
        raise ValueError(f"quantize: symmetric=False is for {with_zeros}, and format is {format.name!r}")
    if not symmetric and not size:
        raise ValueError("quantize: symmetric=False needs groups, and group_size is 0; give a group_size")
    return rule, _Request(format, size, symmetric, scale, dtype)


def _check_range(values: Tensor, dtype: torch.dtype) -> float:
    """The largest finite magnitude; an error if it exceeds the type to which numbers are rounded later."""
    limit = torch.finfo(dtype).max
    largest = _finite(values).max().item() if values.numel() else 0.0
    if largest > limit:
        raise ValueError(
            f"quantize: w has {largest:g}, which {dtype} can't hold: its largest number is {limit:g}"
        )
    return largest


# --- helpers ---------------------------------------------------------------------------------------------------------


def _groups(values: Tensor, size: int) -> Tensor:
    """(*batch, N, K) as (*batch, N, groups, size), the last group filled up with zeros."""
    *batch, K = values.shape
    return pad(values, (0, -K % size)).reshape(*batch, -(-K // size), size)


def _codes(grouped: Tensor, like: Tensor) -> Tensor:
    """Codes of groups, as uint8 of the weight's shape."""
    return grouped.flatten(-2)[..., : like.shape[-1]].to(torch.uint8)


def _or_one(scales: Tensor) -> Tensor:
    """Scales as divisors: a group of zeros, or a group whose scale is too small for its type, gets 1."""
    return torch.where(scales == 0, torch.ones_like(scales), scales)


def nearest(values: Tensor, table: Tensor) -> Tensor:
    """Index of the nearest number of an ascending table; of two equally near ones, the even index."""
    between = (table[1:] + table[:-1]) / 2
    below, above = torch.bucketize(values, between), torch.bucketize(values, between, right=True)
    return torch.where(below % 2 == 0, below, above)


def _e2m1(values: Tensor, format: Format) -> Tensor:
    """Codes of numbers that are already scaled; those beyond 6 become 6."""
    magnitudes = nearest(values.abs(), format.values[:8].to(values.device))
    return magnitudes + torch.where(values.signbit(), 8, 0)


# --- formats ---------------------------------------------------------------------------------------------------------


def _symmetric_scales(values: Tensor, bits: int) -> Tensor:
    """A scale for the last dimension, that of two which has the smaller error.

    One maps the largest magnitude to -2^(bits-1), for either sign, so the scale may be negative: finer, but the
    same magnitude of the other sign is clipped. The other clips nothing: right for weights of -1, 0 and 1.
    """
    half = 1 << (bits - 1)
    largest = values.gather(-1, values.abs().argmax(-1, keepdim=True))
    fine, wide = largest / -half, largest.abs() / (half - 1)
    error_of_fine, error_of_wide = (
        ((values / _or_one(x)).round().clamp(-half, half - 1) * x - values).square().sum(-1, keepdim=True)
        for x in (fine, wide)
    )
    return torch.where(error_of_fine < error_of_wide, fine, wide).squeeze(-1)


def _int_rows(values: Tensor, request: _Request) -> QuantizedTensor:
    bits = request.format.bits
    half = 1 << (bits - 1)
    scales = _or_one(_symmetric_scales(pad(values, (0, 1)), bits))  # with a zero, for rows that are empty
    codes = (values / scales.unsqueeze(-1)).round().clamp(-half, half - 1) + half
    return from_codes(codes.to(torch.uint8), request.format, channel=scales, dtype=request.dtype)


def _int(values: Tensor, request: _Request) -> QuantizedTensor:
    return (_int_groups if request.group_size else _int_rows)(values, request)


def _made(
    codes: Tensor, values: Tensor, request: _Request, scales: Tensor, **more: Tensor | None
) -> QuantizedTensor:
    """The weight of codes in groups, of which each has a scale."""
    return from_codes(
        _codes(codes, values), request.format, scales=scales, group_size=request.group_size, dtype=request.dtype, **more
    )  # fmt: skip


def _int_groups(values: Tensor, request: _Request) -> QuantizedTensor:
    bits, dtype = request.format.bits, request.dtype
    top = (1 << bits) - 1
    grouped = _groups(values, request.group_size)
    least, most = grouped.amin(-1).clamp(max=0), grouped.amax(-1).clamp(min=0)
    # Each is divided, for their difference may be more than float32 holds.
    scales = _symmetric_scales(grouped, bits) if request.symmetric else most / top - least / top
    scales = _or_one(converted("quantize", "scales", scales, dtype, may_vanish=True))
    wide = scales.float()
    zeros = None if request.symmetric else (-least / wide).round().clamp(0, top)
    shift = torch.full_like(wide, request.format.zero) if zeros is None else zeros
    codes = ((grouped / wide.unsqueeze(-1)).round() + shift.unsqueeze(-1)).clamp(0, top)
    return _made(codes, values, request, scales, zeros=zeros)


def _nf4(values: Tensor, request: _Request) -> QuantizedTensor:
    grouped = _groups(values, request.group_size)
    scales = _or_one(converted("quantize", "scales", grouped.abs().amax(-1), request.dtype, may_vanish=True))
    table = request.format.values.to(values.device)
    codes = nearest(grouped / scales.float().unsqueeze(-1), table)
    return _made(codes, values, request, scales)


def _mxfp4(values: Tensor, request: _Request) -> QuantizedTensor:
    grouped = _groups(values, request.group_size)
    largest = grouped.abs().amax(-1)
    # frexp's mantissa is in [0.5, 1), so that floor(log2(largest)) is its exponent less 1, exactly.
    exponents = (largest.frexp().exponent - 1 - E2M1_EXPONENT).clamp(-127, 127)
    scales = torch.where(largest > 0, torch.exp2(exponents.double()), 1.0).float()
    stored = converted("quantize", "scales", scales, request.dtype)
    codes = _e2m1(grouped / scales.unsqueeze(-1), request.format)
    return _made(codes, values, request, stored)


def _nvfp4(values: Tensor, request: _Request) -> QuantizedTensor:
    grouped = _groups(values, request.group_size)
    largest = grouped.abs().amax(-1)
    e4m3_max = torch.finfo(torch.float8_e4m3fn).max
    overall = (largest.max() if largest.numel() else values.new_zeros(())) / (E2M1_MAX * e4m3_max)
    overall = _or_one(overall)
    scales = (largest / E2M1_MAX / overall).clamp(max=e4m3_max).to(torch.float8_e4m3fn).to(request.dtype)
    codes = _e2m1(grouped / (_or_one(scales).float() * overall).unsqueeze(-1), request.format)
    return _made(codes, values, request, scales, channel=overall.reshape(1))


def _fp8_type(format: Format) -> torch.dtype:
    return torch.float8_e4m3fn if format.code == "e4m3" else torch.float8_e5m2


def _fp8_codes(values: Tensor, scales: Tensor, format: Format) -> Tensor:
    """Codes of numbers divided by scales that broadcast; NaN stays NaN, and so does infinity where there is none."""
    limit = torch.finfo(_fp8_type(format)).max
    scaled = values / scales
    # Rounding of the scale may have moved the largest beyond the limit.
    scaled = torch.where(values.isfinite(), scaled.clamp(-limit, limit), scaled)
    if format.code == "e4m3":
        scaled = torch.where(values.isinf(), torch.nan, scaled)
    return scaled.to(_fp8_type(format)).view(torch.uint8)


def _finite(values: Tensor) -> Tensor:
    return torch.where(values.isfinite(), values.abs(), 0.0)


def _fp8(values: Tensor, request: _Request) -> QuantizedTensor:
    sizes = _finite(values)
    # With a zero, for empty tensors.
    largest = pad(sizes.flatten() if request.scale == "tensor" else sizes, (0, 1)).amax(-1)
    scales = _or_one(largest / torch.finfo(_fp8_type(request.format)).max)
    spread = scales if request.scale == "tensor" else scales.unsqueeze(-1)
    codes = _fp8_codes(values, spread, request.format)
    return from_codes(
        codes, request.format, channel=scales.reshape(spread.shape[:-1] or 1), dtype=request.dtype
    )


def _fp8_blocks(values: Tensor, request: _Request) -> QuantizedTensor:
    *_, N, K = values.shape
    padded = pad(_finite(values), (0, -K % BLOCK, 0, -N % BLOCK))
    blocks = padded.unflatten(-1, (-(-K // BLOCK), BLOCK)).unflatten(-3, (-(-N // BLOCK), BLOCK))
    scales = _or_one(blocks.amax((-3, -1)) / torch.finfo(_fp8_type(request.format)).max)
    by_row = scales.repeat_interleave(BLOCK, -2)[..., :N, :]
    codes = _fp8_codes(values, by_row.repeat_interleave(BLOCK, -1)[..., :K], request.format)
    return from_codes(codes, request.format, scales=by_row, group_size=BLOCK, dtype=request.dtype)


_FP8 = _Rule(
    (0,), 0, _fp8, takes_nan=True, blocks=_Rule((BLOCK,), BLOCK, _fp8_blocks, takes_nan=True, rows=BLOCK)
)
#: By the format's name; a format that only checkpoints have needs none.
_RULES: dict[str, _Rule] = {
    "int8": _Rule((0, *SIZES), 0, _int, has_zeros=True),
    "int4": _Rule((0, *SIZES), 128, _int, has_zeros=True),
    "e4m3": _FP8,
    "e5m2": _FP8,
    "mxfp4": _Rule((32,), 32, _mxfp4),
    "nvfp4": _Rule((16,), 16, _nvfp4, rows=0),
    "nf4": _Rule(SIZES, 64, _nf4),
}
