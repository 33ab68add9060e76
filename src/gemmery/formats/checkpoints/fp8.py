"""fp8 weights with scales for the whole, for rows, or for blocks of rows and columns."""

from __future__ import annotations

import torch
from torch import Tensor

from ..tensor import QuantizedTensor
from .assemble import block_codes, scaled_codes

#: The formats of weights whose bytes are the codes.
FP8 = {torch.float8_e4m3fn: "e4m3", torch.float8_e5m2: "e5m2"}


def read_fp8(
    weight: Tensor,
    scale: Tensor,
    *,
    block: tuple[int, int] | None = None,
    dtype: torch.dtype = torch.bfloat16,
) -> QuantizedTensor:
    """A weight in fp8 with scales that multiply it.

    This is compressed-tensors' "float-quantized", FBGEMM's and ModelOpt's fp8 (`weight` and `weight_scale`).

    Args:
        weight: float8_e4m3fn or float8_e5m2, (N, K).
        scale: float32 or another floating type: of one number, of N or (N, 1), of (N, groups), or of blocks if
            `block` is given; see `read_fp8_blocks`.
        block: rows and columns of a block.
        dtype: of the weight.

    Returns:
        The weight, (N, K).

    Raises:
        ValueError: shapes or types that do not match.

    Example:
        >>> import torch
        >>> weight = torch.full((16, 32), 3.0).to(torch.float8_e4m3fn)
        >>> read_fp8(weight, torch.tensor(0.5)).dequantize().unique()
        tensor([1.5000], dtype=torch.bfloat16)
    """
    if block is not None and scale.numel() != 1:
        return read_fp8_blocks(weight, scale, block=block, dtype=dtype)
    return scaled_codes("read_fp8", _codes("read_fp8", weight), FP8[weight.dtype], scale, dtype=dtype)


def read_fp8_blocks(
    weight: Tensor, scale: Tensor, *, block: tuple[int, int] = (128, 128), dtype: torch.dtype = torch.bfloat16
) -> QuantizedTensor:
    """A weight in fp8 with a scale for each block of 128 x 128, as in DeepSeek V3 and many later models.

    Args:
        weight: float8_e4m3fn, (N, K).
        scale: float32 or float8_e8m0fnu, (ceil(N / rows), ceil(K / columns)): `weight_scale_inv` in the checkpoints.
            In spite of that name the weight is the product with it.
        block: rows and columns of a block: `weight_block_size` in configurations.
        dtype: of the weight.

    Returns:
        The weight, (N, K); each row has its own copy of its block's scales.

    Raises:
        ValueError: shapes or types that do not match.

    Example:
        >>> import torch
        >>> weight = torch.ones(160, 256).to(torch.float8_e4m3fn)
        >>> read_fp8_blocks(weight, torch.tensor([[1.0, 2.0], [3.0, 4.0]])).dequantize()[[0, 159], 255]
        tensor([2., 4.], dtype=torch.bfloat16)
    """
    source = "read_fp8_blocks"
    codes = _codes(source, weight)
    return block_codes(source, codes, FP8[weight.dtype], scale, block, dtype=dtype)


def _codes(source: str, weight: Tensor) -> Tensor:
    if weight.dtype not in FP8 or weight.dim() != 2:
        dtype = str(weight.dtype).removeprefix("torch.")
        raise ValueError(
            f"{source}: weight is {dtype}, {tuple(weight.shape)}; it must be float8_e4m3fn or float8_e5m2, (N, K)"
        )
    return weight.view(torch.uint8)
