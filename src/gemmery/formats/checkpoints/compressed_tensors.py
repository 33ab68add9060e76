"""Checkpoints of llm-compressor: compressed-tensors' integer, fp8 and fp4 formats."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
from torch import Tensor

from ..tensor import QuantizedTensor
from .assemble import block_codes, kind, scaled_codes
from .fp8 import FP8, read_fp8
from .microscaling import read_mxfp4, read_nvfp4
from .words import check_dims, check_dtype, check_shape, group_size_of, order_of, words_to_codes

_SOURCE = "read_compressed_tensors"


def read_compressed_tensors(
    tensors: Mapping[str, Tensor], *,
    group_size: int | None = None, block: tuple[int, int] | None = None, num_bits: Collection[int] = (),
    dtype: torch.dtype | None = None,
) -> QuantizedTensor:  # fmt: skip
    """A weight in one of compressed-tensors' formats, which names and types tell apart.

    - "pack-quantized": `weight_packed` int32, (N, ceil(K * bits / 32)), 4 or 8 bits with 2 ** (bits - 1) added, the
      first code in the lowest bits; `weight_shape`, (2,); `weight_scale` (N, groups), (N, 1) or of one number; with
      zero points `weight_zero_point` int32, (N * bits / 32, groups), packed along rows; with act-order
      `weight_g_idx`, (K,).
    - "int-quantized": `weight` int8 (N, K), `weight_scale`, and `weight_zero_point` of the scale's shape.
    - "float-quantized": `weight` float8_e4m3fn and `weight_scale`; see `read_fp8`.
    - "nvfp4-pack-quantized": `weight_packed` uint8, `weight_scale` in e4m3 and `weight_global_scale`, by which scales
      are divided; see `read_nvfp4`.
    - "mxfp4-pack-quantized": `weight_packed` uint8 and `weight_scale` uint8; see `read_mxfp4`.

    Args:
        tensors: by these names, without a prefix; others are left alone.
        group_size: as in the configuration; needed only if it does not divide K.
        block: rows and columns of a block: `block_structure` in the configuration, with strategy "block".
        num_bits: as in the configuration, of all its schemes: of "pack-quantized" codes, which shapes alone don't tell
            where there are few columns, or 10 codes of 3 bits in a word. By default 4 or 8.
        dtype: of the weight; that of the scales if None, or bfloat16 if they are not of float16 or bfloat16.

    Returns:
        The weight, (N, K).

    Raises:
        ValueError: names, shapes or types that do not match, other bits than 4 and 8, or an unknown number of
            bits.

    Example:
        >>> import torch
        >>> tensors = {"weight": torch.full((16, 32), 3, dtype=torch.int8), "weight_scale": torch.full((16, 1), 0.5)}
        >>> read_compressed_tensors(tensors).dequantize().unique()
        tensor([1.5000], dtype=torch.bfloat16)
    """
    packed, weight, scale = (tensors.get(name) for name in ("weight_packed", "weight", "weight_scale"))
    if scale is None or (packed is None) == (weight is None):
        names = ", ".join(sorted(tensors)) or "nothing"
        raise ValueError(
            f"{_SOURCE}: there is {names}; there must be weight_scale and one of weight_packed and weight"
        )
    dtype = kind(dtype, scale.dtype)
    if packed is not None and packed.dtype == torch.uint8:
        if "weight_global_scale" in tensors:
            return read_nvfp4(packed, scale, tensors["weight_global_scale"], dtype=dtype)
        return read_mxfp4(packed, scale, dtype=dtype)
    if packed is not None:
        return _packed(packed, scale, tensors, group_size, num_bits, dtype)
    assert weight is not None
    if weight.dtype in FP8:
        return read_fp8(weight, scale, block=block, dtype=dtype)
    return _int8(weight, scale, tensors, group_size, block, dtype)


def _packed(
    packed: Tensor, scale: Tensor, tensors: Mapping[str, Tensor], group_size: int | None,
    num_bits: Collection[int], dtype: torch.dtype,
) -> QuantizedTensor:  # fmt: skip
    check_dtype(_SOURCE, "weight_packed", packed, torch.int32)
    if "weight_shape" not in tensors:
        raise ValueError(f"{_SOURCE}: weight_packed is int32 and weight_shape is missing")
    check_shape(_SOURCE, "weight_shape", tensors["weight_shape"], (2,), "with the rows and columns")
    rows, columns = (int(size) for size in tensors["weight_shape"].tolist())
    bits = _bits(packed, rows, columns, num_bits)
    codes = words_to_codes(packed, bits, 1)[:, :columns]
    zeros = tensors.get("weight_zero_point")
    if zeros is not None:
        check_dtype(_SOURCE, "weight_zero_point", zeros, torch.int32)
        check_dims(_SOURCE, "weight_zero_point", zeros, 2)
        zeros = words_to_codes(zeros, bits, 0)[:rows]
    order, groups = None, scale.shape[-1] if scale.dim() == 2 else 1
    if "weight_g_idx" in tensors:
        size = group_size_of(_SOURCE, columns, groups, group_size)
        order = order_of(_SOURCE, tensors["weight_g_idx"], groups, size)
    return scaled_codes(
        _SOURCE, codes if order is None else codes[:, order], f"int{bits}", scale,
        zeros=zeros, group_size=group_size, permutation=order, dtype=dtype,
    )  # fmt: skip


def _bits(packed: Tensor, rows: int, columns: int, known: Collection[int]) -> int:
    """Bits of a code, of which a word has as many as fit whole, and a row no word more than it needs.

    Args:
        known: those that it can be; nothing says so if there are none.
    """
    found = [
        bits for bits in sorted(known) or (4, 8) if tuple(packed.shape) == (rows, -(-columns // (32 // bits)))
    ]
    said = " or ".join(map(str, sorted(known)))
    why = f"; num_bits is {said} in the configuration" if known else ""
    what = f"{_SOURCE}: weight_packed is {tuple(packed.shape)} for a weight of {(rows, columns)}{why}"
    if not found:
        raise ValueError(f"{what}; with codes of 4 or 8 bits it must be (N, ceil(K / 8)) or (N, ceil(K / 4))")
    if len(found) > 1:
        raise ValueError(f"{what}, so that codes can have {' or '.join(map(str, found))} bits; give num_bits")
    if found[0] not in (4, 8):
        raise ValueError(f"{what}; codes of {found[0]} bits are not supported, only those of 4 and 8")
    return found[0]


def _int8(
    weight: Tensor, scale: Tensor, tensors: Mapping[str, Tensor], group_size: int | None,
    block: tuple[int, int] | None, dtype: torch.dtype,
) -> QuantizedTensor:  # fmt: skip
    check_dtype(_SOURCE, "weight", weight, torch.int8)
    codes, zeros = signed_to_codes(weight, 8), tensors.get("weight_zero_point")
    zeros = None if zeros is None else zeros.to(torch.int16) + 128
    if block is None or scale.numel() == 1:
        return scaled_codes(_SOURCE, codes, "int8", scale, zeros=zeros, group_size=group_size, dtype=dtype)
    return block_codes(_SOURCE, codes, "int8", scale, block, zeros=zeros, dtype=dtype)


def signed_to_codes(numbers: Tensor, bits: int) -> Tensor:
    """Integers around 0, in int8, as codes from 0 on.

    Example:
        >>> import torch
        >>> signed_to_codes(torch.tensor([-8, 0, 7], dtype=torch.int8), 4)
        tensor([ 0,  8, 15], dtype=torch.uint8)
    """
    return (numbers.to(torch.int16) + (1 << (bits - 1))).to(torch.uint8)
