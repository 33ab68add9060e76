"""From codes and what shares a scale, as checkpoints have them, to the cheapest weight of the same value."""

from __future__ import annotations

import torch
from torch import Tensor

from ..aten import converted
from ..base import FORMATS
from ..codes import from_codes
from ..tensor import LARGEST_SCALE, SMALLEST_GROUP, QuantizedTensor, is_group_size
from ..weight import DTYPES
from .words import check_shape, group_size_of


def kind(dtype: torch.dtype | None, like: torch.dtype) -> torch.dtype:
    """The type of a weight: the requested one, or its source's if this has 16 bits, or bfloat16.

    Example:
        >>> kind(None, torch.float16), kind(None, torch.float32)
        (torch.float16, torch.bfloat16)
    """
    return dtype or (like if like in DTYPES else torch.bfloat16)


def assemble(
    source: str, codes: Tensor, format: str, scales: Tensor, *, dtype: torch.dtype,
    zeros: Tensor | None = None, offsets: Tensor | None = None, group_size: int, permutation: Tensor | None = None,
) -> QuantizedTensor:  # fmt: skip
    """`from_codes`, without what changes nothing.

    Zero points that are all the format's own are left out. A single group without zero points and offsets becomes a
    `channel`, which multiplies the product. Scales that are exact in `dtype` become it, and others stay float32, except
    those with offsets, which are rounded to `dtype` as offsets are.

    Args:
        source: the reader, for errors.
        codes: uint8, (..., N, K).
        scales: (..., N, groups).
        zeros: of that shape, integers.
        offsets: of that shape, in place of zeros.
        group_size: columns of a group.
        dtype: torch.float16 or torch.bfloat16.

    Raises:
        ValueError: there are several groups of a size for which there is no kernel, or a value that `dtype` can't hold.
    """
    columns = codes.shape[-1]
    if zeros is not None and bool((zeros == FORMATS[format].zero).all()):
        zeros = None
    if scales.shape[-1] == 1:
        if zeros is None and offsets is None:
            return from_codes(codes, format, channel=scales.float()[..., 0], dtype=dtype)
        # A kernel's steps divide powers of two; it is one group either way.
        group_size = max(SMALLEST_GROUP, 1 << (columns - 1).bit_length())
    if not is_group_size(group_size):
        raise ValueError(
            f"{source}: the checkpoint's group_size is {group_size}; it must be a power of two of at least "
            f"{SMALLEST_GROUP}"
        )
    scales = _exact(scales, dtype) if offsets is None else converted(source, "scales", scales, dtype)
    return from_codes(
        codes, format, scales=scales, zeros=zeros, offsets=offsets, group_size=group_size,
        dtype=dtype, permutation=permutation,
    )  # fmt: skip


def _exact(scales: Tensor, dtype: torch.dtype) -> Tensor:
    wide = scales.float()
    narrow = wide.to(dtype)
    same = torch.equal(narrow.float().nan_to_num(), wide.nan_to_num())
    return narrow if same and not (wide.abs() >= LARGEST_SCALE).any() else wide


def scaled_codes(
    source: str, codes: Tensor, format: str, scale: Tensor, *,
    zeros: Tensor | None = None, group_size: int | None = None, permutation: Tensor | None = None,
    dtype: torch.dtype,
) -> QuantizedTensor:  # fmt: skip
    """Codes with what libraries call a scale per tensor, per channel or per group.

    Args:
        codes: uint8, (N, K).
        scale: of one number, of N or (N, 1), or of (N, groups).
        zeros: of the scale's shape, of integers.
    """
    rows, columns = codes.shape
    if zeros is not None and zeros.numel() != scale.numel():
        raise ValueError(
            f"{source}: zero_point is {tuple(zeros.shape)} and scale {tuple(scale.shape)}; each scale has a zero point"
        )
    if scale.numel() == 1 and (zeros is None or bool((zeros == FORMATS[format].zero).all())):
        return from_codes(codes, format, channel=scale.float().reshape(1), dtype=dtype)
    if scale.numel() == 1 or tuple(scale.shape) == (rows,):
        scale = scale.reshape(-1, 1).expand(rows, 1)
        zeros = None if zeros is None else zeros.reshape(-1, 1).expand(rows, 1)
    groups = scale.shape[-1] if scale.dim() else 1
    why = f"with a weight of {(rows, columns)} and a scale for each row, or each group of it"
    check_shape(source, "scale", scale, (rows, groups), why)
    if zeros is not None:
        check_shape(source, "zero_point", zeros, (rows, groups), "with scales of that shape")
    return assemble(
        source, codes, format, scale, zeros=zeros, permutation=permutation, dtype=dtype,
        group_size=group_size_of(source, columns, groups, group_size),
    )  # fmt: skip


def block_codes(
    source: str, codes: Tensor, format: str, scale: Tensor, block: tuple[int, int], *,
    zeros: Tensor | None = None, dtype: torch.dtype,
) -> QuantizedTensor:  # fmt: skip
    """Codes with a scale for each block of rows and columns; each row gets its own copy.

    Args:
        codes: uint8, (N, K).
        scale, zeros: (ceil(N / block[0]), ceil(K / block[1])).
    """
    (rows, columns), (high, wide) = codes.shape, block
    shape = (-(-rows // high), -(-columns // wide))
    why = f"with a weight of {(rows, columns)} in blocks of {(high, wide)}"
    check_shape(source, "scale", scale, shape, why)
    scales = scale.float().repeat_interleave(high, 0)[:rows]
    if zeros is not None:
        check_shape(source, "zero_point", zeros, shape, why)
        zeros = zeros.repeat_interleave(high, 0)[:rows]
    return assemble(source, codes, format, scales, zeros=zeros, group_size=wide, dtype=dtype)
