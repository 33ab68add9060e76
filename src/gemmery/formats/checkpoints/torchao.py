"""torchao's tensor subclasses, by their class names and attributes: those of today and the ones before them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..base import FORMATS
from ..tensor import QuantizedTensor
from .assemble import assemble, kind
from .compressed_tensors import signed_to_codes
from .fp8 import FP8
from .words import nibbles

_SOURCE = "read_torchao"


def read_torchao(weight: Any, *, dtype: torch.dtype | None = None) -> QuantizedTensor:
    """A weight from one of torchao's tensor subclasses.

    Known are Int4Tensor, Int4TilePackedTo4dTensor, Int8Tensor, IntxUnpackedToInt8Tensor (of 8 bits at most),
    Float8Tensor, and AffineQuantizedTensor of older releases with a plain or a tensor-core-tiled layout. Activations
    that a tensor would quantize as well are not: only the weight is taken.

    Args:
        weight: such a tensor, (N, K) or (batch, N, K).
        dtype: of the weight; that of the tensor if None.

    Returns:
        The weight.

    Raises:
        ValueError: another class or layout, blocks over several rows or of a size that is not a power of two, a scale
            for activations, or a middle of the range that offsets can't take up exactly.

    Example:
        >>> import torch
        >>> class Int8Tensor:  # as torchao has it
        ...     qdata, scale = torch.full((16, 32), 3, dtype=torch.int8), torch.full((16, 1), 0.5)
        ...     zero_point, block_size, dtype, shape = None, [1, 32], torch.float32, (16, 32)
        >>> read_torchao(Int8Tensor()).dequantize().unique()
        tensor([1.5000], dtype=torch.bfloat16)
    """
    # A dynamically quantized activation is a wrapper around the weight.
    weight = getattr(weight, "original_weight_tensor", weight)
    name = type(weight).__name__
    reader = READERS.get(name)
    if reader is None:
        raise ValueError(f"{_SOURCE}: the weight is a {name}; known are {', '.join(READERS)}")
    if getattr(weight, "act_pre_scale", None) is not None:
        raise ValueError(
            f"{_SOURCE}: the {name} has act_pre_scale, a scale for activations that must be None"
        )
    return reader(weight, kind(dtype, weight.dtype))


def _int4(weight: Any, dtype: torch.dtype) -> QuantizedTensor:
    # (..., N, K / 2), the even column in the lower half, in two's complement; (..., groups, N).
    # weight = code * scale + zero_point.
    codes = nibbles(weight.qdata.view(torch.uint8)) ^ 8
    scales, offsets = weight.scale.mT, weight.zero_point.mT
    size = _columns_of_block(weight)
    return assemble(_SOURCE, codes, "int4", scales, offsets=offsets, group_size=size, dtype=dtype)


def _int8(weight: Any, dtype: torch.dtype) -> QuantizedTensor:
    codes = signed_to_codes(weight.qdata, 8)
    zeros = weight.zero_point
    return _affine(
        codes, "int8", weight.scale, None if zeros is None else zeros.float() + 128, weight.block_size, dtype
    )


def _intx(weight: Any, dtype: torch.dtype) -> QuantizedTensor:
    bits = int(str(weight.target_dtype).removeprefix("torch.int"))
    bits = 4 if bits <= 4 else 8
    zeros = weight.zero_point.float() + (1 << (bits - 1))
    return _affine(
        signed_to_codes(weight.qdata, bits), f"int{bits}", weight.scale, zeros, weight.block_size, dtype
    )


def _tiled(weight: Any, dtype: torch.dtype) -> QuantizedTensor:
    codes = untile(weight.qdata)
    return _tinygemm(codes, weight.scale_and_zero, weight.shape, _columns_of_block(weight), dtype)


def _float8(weight: Any, dtype: torch.dtype) -> QuantizedTensor:
    if weight.qdata.dtype not in FP8:
        raise ValueError(f"{_SOURCE}: the weight is in {weight.qdata.dtype}; it must be one of {list(FP8)}")
    codes = weight.qdata.view(torch.uint8)
    block = getattr(weight, "block_size", None)
    if block is None:  # in older releases, where blocks divide the weight
        block = [-(-n // s) for n, s in zip(codes.shape, weight.scale.shape, strict=True)]
    return _affine(codes, FP8[weight.qdata.dtype], weight.scale, None, block, dtype)


def _older(weight: Any, dtype: torch.dtype) -> QuantizedTensor:
    # `layout_tensor` up to 0.6, `tensor_impl` since.
    inner: Any = getattr(weight, "tensor_impl", None)
    inner = weight.layout_tensor if inner is None else inner
    if (
        hasattr(inner, "packed_weight")
        and hasattr(inner, "scale_and_zero")
        and inner.packed_weight.dim() == 4
    ):
        size = _columns_of_block(weight)
        return _tinygemm(untile(inner.packed_weight), inner.scale_and_zero, weight.shape, size, dtype)
    if not hasattr(inner, "int_data"):
        raise ValueError(
            f"{_SOURCE}: the layout of the AffineQuantizedTensor is a {type(inner).__name__}; it must be plain or "
            "tensor-core-tiled"
        )
    low, high = weight.quant_min, weight.quant_max
    low, high = (-128 if low is None else int(low)), (127 if high is None else int(high))
    bits = 4 if high - low <= 15 else 8
    # Codes count from 0: signed ones are moved up, and their zero points with them.
    up = 0 if low >= 0 else 1 << (bits - 1)
    codes = (inner.int_data.to(torch.int16) + up).to(torch.uint8)
    zeros = inner.zero_point
    if zeros is None or getattr(weight.zero_point_domain, "name", None) != "FLOAT":
        zeros = torch.zeros_like(inner.scale) if zeros is None else zeros
        return _affine(codes, f"int{bits}", inner.scale, zeros.float() + up, weight.block_size, dtype)
    # weight = (code - middle) * scale + zero_point, as tinygemm has it; ours is (code - zero) * scale + offset.
    grid = _grid(codes, weight.block_size)
    scales, offsets = inner.scale.reshape(grid), zeros.reshape(grid)
    middle, zero = (low + high + 1) / 2 + up, FORMATS[f"int{bits}"].zero
    if middle != zero:
        wide = offsets.double() + (zero - middle) * scales.double()
        offsets = wide.to(dtype)
        if not offsets.double().equal(wide):
            raise ValueError(
                f"{_SOURCE}: quant_min is {low} and quant_max {high}, so that {middle - up:g} stands for zero_point; "
                f"it must be {zero - up} that does, or zero_point + {zero - middle:g} * scale must be exact in {dtype}"
            )
    size = int(weight.block_size[-1])
    return assemble(_SOURCE, codes, f"int{bits}", scales, offsets=offsets, group_size=size, dtype=dtype)


#: By the name of the class.
READERS: dict[str, Callable[[Any, torch.dtype], QuantizedTensor]] = {
    "Int4Tensor": _int4,
    "Int8Tensor": _int8,
    "IntxUnpackedToInt8Tensor": _intx,
    "Int4TilePackedTo4dTensor": _tiled,
    "Float8Tensor": _float8,
    "AffineQuantizedTensor": _older,
}


def untile(words: Tensor) -> Tensor:
    """Codes from the layout of torch's `_weight_int4pack_mm` on CUDA, called tinygemm.

    A word has of row `8 i + lane / 4` the columns that a lane has of two tiles of 16 x 8 of a tensor core's right
    operand: with q = 2 (lane % 4) those at q, q + 1, q + 8, q + 9 of the first tile and then of the second. The even
    ones of these eight are in the lower half of the word, the odd ones in the upper (torch's documentation of
    `_convert_weight_to_int4pack`, PTX ISA mma.m16n8k16).

    Args:
        words: int32, (N / 8, K / (16 T), 32, T / 2), where T is how many tiles are stored together.

    Returns:
        uint8, (N, K).

    Example:
        >>> import torch
        >>> untile(torch.zeros(1, 1, 32, 4, dtype=torch.int32)).shape
        torch.Size([8, 128])
    """
    high, wide, _, pairs = words.shape
    # Row in the strip, q / 2, half of the word, and in it: tile, half of the tile.
    codes = _halves(words).reshape(high, wide, 8, 4, pairs, 2, 2, 2)
    # Strip, row, outer tile, pair, tile, half of the tile, q / 2, odd or even.
    return codes.permute(0, 2, 1, 4, 6, 7, 3, 5).reshape(high * 8, wide * pairs * 32)


def _halves(words: Tensor) -> Tensor:
    """uint8, (..., 2, 4): the four codes of each half of a word."""
    shifts = torch.arange(0, 32, 4, device=words.device, dtype=torch.int32).view(2, 4)
    return ((words[..., None, None] >> shifts) & 15).to(torch.uint8)


def _tinygemm(codes: Tensor, both: Tensor, shape: Any, size: int, dtype: torch.dtype) -> QuantizedTensor:
    """Codes padded to whole tiles, with (groups, N, 2): scales, and what is added to (code - 8) * scale."""
    rows, columns = (int(n) for n in shape)
    groups = -(-columns // size)
    scales, offsets = both[:groups, :rows].permute(2, 1, 0).unbind()
    codes = codes[:rows, :columns]
    return assemble(_SOURCE, codes, "int4", scales, offsets=offsets, group_size=size, dtype=dtype)


def _affine(
    codes: Tensor, format: str, scale: Tensor, zeros: Tensor | None, block: Any, dtype: torch.dtype
) -> QuantizedTensor:
    """Codes with a scale and a zero point for each block, the zero point in codes and of a floating type."""
    rows, (high, size) = codes.shape[-2], (int(n) for n in block[-2:])
    grid = _grid(codes, block)
    scales = scale.reshape(grid).repeat_interleave(high, -2)[..., :rows, :]
    if zeros is not None:
        zeros = zeros.reshape(grid).repeat_interleave(high, -2)[..., :rows, :]
    if zeros is None or bool((zeros == zeros.round()).all()):
        return assemble(_SOURCE, codes, format, scales, zeros=zeros, group_size=size, dtype=dtype)
    # Zero points between the integers, such as HQQ's, become offsets, rounded to the weight's type.
    offsets = (FORMATS[format].zero - zeros) * scales.float()
    return assemble(_SOURCE, codes, format, scales, offsets=offsets, group_size=size, dtype=dtype)


def _grid(codes: Tensor, block: Any) -> tuple[int, ...]:
    return tuple(-(-n // int(b)) for n, b in zip(codes.shape, block, strict=True))


def _columns_of_block(weight: Any) -> int:
    *over, size = (int(n) for n in weight.block_size)
    if any(n != 1 for n in over):
        raise ValueError(
            f"{_SOURCE}: block_size is {list(weight.block_size)}; it must be 1 except for columns"
        )
    return size
