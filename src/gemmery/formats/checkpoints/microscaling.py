"""4-bit floating-point numbers with a scale for a few columns: MXFP4 as gpt-oss has it, and NVFP4."""

from __future__ import annotations

import torch
from torch import Tensor

from ..codes import from_codes
from ..tensor import QuantizedTensor
from .assemble import assemble
from .words import check_dims, check_dtype, check_shape, nibbles


def read_mxfp4(blocks: Tensor, scales: Tensor, *, dtype: torch.dtype = torch.bfloat16) -> QuantizedTensor:
    """A weight, or one for each expert, in MXFP4.

    The layout is that of gpt-oss (`*_blocks` and `*_scales`) and, with the blocks of a row joined, that of
    compressed-tensors' "mxfp4-pack-quantized": e2m1 codes, the first of two in the lower half of a byte, with a scale
    of `2 ** (s - 127)` for 32 columns (OCP Microscaling Formats, 2023).

    Args:
        blocks: uint8, (..., N, K / 32, 16) or (..., N, K / 2).
        scales: uint8 or float8_e8m0fnu, (..., N, K / 32).
        dtype: of the weight.

    Returns:
        The weight, (..., N, K).

    Raises:
        ValueError: shapes or types that do not match.

    Example:
        >>> import torch
        >>> blocks = torch.full((2, 16, 1, 16), 0x22, dtype=torch.uint8)
        >>> weight = read_mxfp4(blocks, torch.full((2, 16, 1), 128, dtype=torch.uint8))
        >>> weight.shape, weight.dequantize().unique()
        (torch.Size([2, 16, 32]), tensor([2.], dtype=torch.bfloat16))
    """
    source = "read_mxfp4"
    check_dtype(source, "blocks", blocks, torch.uint8)
    check_dtype(source, "scales", scales, torch.uint8, torch.float8_e8m0fnu)
    if scales.dim() < 2:
        raise ValueError(f"{source}: scales is {tuple(scales.shape)}; it must be (..., N, K / 32)")
    packed = blocks.flatten(-2) if blocks.dim() == scales.dim() + 1 else blocks
    check_shape(
        source, "blocks", packed, (*scales.shape[:-1], scales.shape[-1] * 16),
        f"with scales of {tuple(scales.shape)} and blocks joined",
    )  # fmt: skip
    powers = scales.view(torch.float8_e8m0fnu).float()
    return assemble(source, nibbles(packed), "mxfp4", powers, group_size=32, dtype=dtype)


def read_nvfp4(
    packed: Tensor, scale: Tensor, global_scale: Tensor, *,
    reciprocal: bool = True, dtype: torch.dtype = torch.bfloat16,
) -> QuantizedTensor:  # fmt: skip
    """A weight in NVFP4.

    e2m1 codes, the first of two in the lower half of a byte, with a scale in e4m3 for 16 columns and one for the
    whole weight. The libraries differ in the last: compressed-tensors stores the factor by which scales were multiplied
    (`weight_global_scale`, weight = code * scale / global), and ModelOpt the factor by which they must be multiplied
    (`weight_scale_2`, weight = code * scale * global).

    Args:
        packed: uint8, (N, K / 2).
        scale: float8_e4m3fn, (N, K / 16).
        global_scale: float32, of one number.
        reciprocal: whether the scales are divided by `global_scale`, as in compressed-tensors. Its
            reciprocal is taken once, in float32.
        dtype: of the weight.

    Returns:
        The weight, (N, K).

    Raises:
        ValueError: shapes or types that do not match.

    Example:
        >>> import torch
        >>> packed = torch.full((16, 16), 0x22, dtype=torch.uint8)
        >>> scale = torch.full((16, 2), 3.0).to(torch.float8_e4m3fn)
        >>> read_nvfp4(packed, scale, torch.tensor([2.0])).dequantize().unique()
        tensor([1.5000], dtype=torch.bfloat16)
    """
    source = "read_nvfp4"
    check_dtype(source, "packed", packed, torch.uint8)
    check_dtype(source, "scale", scale, torch.float8_e4m3fn)
    check_dims(source, "scale", scale, 2)
    check_shape(
        source,
        "packed",
        packed,
        (*scale.shape[:-1], scale.shape[-1] * 8),
        f"with scales of {tuple(scale.shape)}",
    )
    if global_scale.numel() != 1:
        raise ValueError(f"{source}: global_scale is {tuple(global_scale.shape)}; it must be one number")
    channel = global_scale.float().reshape(1)
    return from_codes(
        nibbles(packed), "nvfp4", scales=scale, channel=channel.reciprocal() if reciprocal else channel,
        group_size=16, dtype=dtype,
    )  # fmt: skip
