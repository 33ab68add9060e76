"""GPTQ's and AWQ's checkpoints: int4 and int8 with a scale and a zero point for a group of rows of (K, N)."""

from __future__ import annotations

import torch
from torch import Tensor

from ..tensor import QuantizedTensor
from .assemble import assemble, kind
from .words import check_dtype, check_shape, group_size_of, order_of, words_to_codes

#: Of the columns that one word of AWQ has, which one is in its bits 4 i to 4 i + 3.
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def read_gptq(
    qweight: Tensor, qzeros: Tensor, scales: Tensor, g_idx: Tensor | None = None, *,
    zeros_minus_one: bool = True, group_size: int | None = None, dtype: torch.dtype | None = None,
) -> QuantizedTensor:  # fmt: skip
    """A weight from a GPTQ checkpoint, of 4 or 8 bits, with or without act-order.

    The layout is AutoGPTQ's and GPTQModel's ("gptq" and "gptq_v2"): weight[n, k] is
    `(code[k, n] - zero[g_idx[k], n]) * scales[g_idx[k], n]`. The number of bits per code follows from the shapes.

    Args:
        qweight: int32, (K * bits / 32, N): consecutive k in one word, the first in the lowest bits.
        qzeros: int32, (groups, N * bits / 32): consecutive n in one word.
        scales: (groups, N), of a floating type.
        g_idx: (K,), the group of each k; without it groups are contiguous. With act-order it is not sorted, and the
            result has a permutation.
        zeros_minus_one: whether zero points are stored with 1 subtracted, as in "gptq", or as they are, as in
            "gptq_v2". The addition wraps around, as in the libraries' kernels: stored 15 of 4 bits is 0.
        group_size: as in the configuration; needed only if it does not divide K.
        dtype: of the weight, float16 or bfloat16; that of the scales if None, or bfloat16 if this has 32 bits.

    Returns:
        The weight, (N, K).

    Raises:
        ValueError: shapes or types that do not match, other bits than 4 and 8, groups of different sizes.

    Example:
        >>> import torch
        >>> qweight = torch.full((4, 32), 0x99999999 - 2**32, dtype=torch.int32)
        >>> qzeros = torch.full((1, 4), 0x77777777, dtype=torch.int32)
        >>> weight = read_gptq(qweight, qzeros, torch.full((1, 32), 0.5))
        >>> weight.shape, weight.dequantize().unique()
        (torch.Size([32, 32]), tensor([0.5000], dtype=torch.bfloat16))
    """
    bits, columns = _gptq_sizes(qweight, qzeros, scales, g_idx)
    groups = scales.shape[0]
    group_size = group_size_of("read_gptq", columns, groups, group_size)
    order = None if g_idx is None else order_of("read_gptq", g_idx, groups, group_size)
    codes = words_to_codes(qweight, bits, 0).T
    zeros = words_to_codes(qzeros, bits, 1)
    if zeros_minus_one:
        zeros = (zeros + 1) & ((1 << bits) - 1)
    return assemble(
        "read_gptq", codes if order is None else codes[:, order], f"int{bits}", scales.T, zeros=zeros.T,
        group_size=group_size, dtype=kind(dtype, scales.dtype), permutation=order,
    )  # fmt: skip


def _gptq_sizes(qweight: Tensor, qzeros: Tensor, scales: Tensor, g_idx: Tensor | None) -> tuple[int, int]:
    """Bits of a code, and K; checks everything else."""
    source = "read_gptq"
    check_dtype(source, "qweight", qweight, torch.int32)
    check_dtype(source, "qzeros", qzeros, torch.int32)
    for name, tensor in (("qweight", qweight), ("qzeros", qzeros), ("scales", scales)):
        if tensor.dim() != 2:
            raise ValueError(f"{source}: {name} is {tuple(tensor.shape)}; it must have two dimensions")
    groups, rows = scales.shape
    bits = 32 * qzeros.shape[1] // max(rows, 1)
    if bits not in (4, 8) or rows * bits % 32:
        raise ValueError(
            f"{source}: qzeros is {tuple(qzeros.shape)} and scales is {tuple(scales.shape)}, so that a zero point "
            f"has {32 * qzeros.shape[1] / max(rows, 1):g} bits; it must be 4 or 8"
        )
    check_shape(source, "qzeros", qzeros, (groups, rows * bits // 32), f"with scales of {(groups, rows)}")
    check_shape(source, "qweight", qweight, (qweight.shape[0], rows), f"with scales of {(groups, rows)}")
    columns = qweight.shape[0] * 32 // bits
    if g_idx is not None:
        check_shape(source, "g_idx", g_idx, (columns,), f"with {columns} inputs")
    return bits, columns


def read_awq(
    qweight: Tensor, qzeros: Tensor | None, scales: Tensor, *,
    group_size: int | None = None, dtype: torch.dtype | None = None,
) -> QuantizedTensor:  # fmt: skip
    """A 4-bit weight from an AWQ checkpoint in the layout that AutoAWQ calls GEMM.

    weight[n, k] is `(code[k, n] - zero[k / group_size, n]) * scales[k / group_size, n]`. Codes and zero points are
    packed along n, eight in a word: bits 4 i to 4 i + 3 have the column 0, 2, 4, 6, 1, 3, 5, 7 (the i-th of these).

    Args:
        qweight: int32, (K, N / 8).
        qzeros: int32, (groups, N / 8); without zero points 8 stands for 0.
        scales: (groups, N), of a floating type.
        group_size: as in the configuration; needed only if it does not divide K.
        dtype: of the weight, float16 or bfloat16; that of the scales if None, or bfloat16 if this has 32 bits.

    Returns:
        The weight, (N, K).

    Raises:
        ValueError: shapes or types that do not match.

    Example:
        >>> import torch
        >>> qweight = torch.full((32, 4), 0x76543210, dtype=torch.int32)
        >>> weight = read_awq(qweight, torch.zeros(1, 4, dtype=torch.int32), torch.ones(1, 32))
        >>> weight.dequantize()[:8, 0]
        tensor([0., 4., 1., 5., 2., 6., 3., 7.], dtype=torch.bfloat16)
    """
    source = "read_awq"
    check_dtype(source, "qweight", qweight, torch.int32)
    if qweight.dim() != 2 or scales.dim() != 2:
        raise ValueError(
            f"{source}: qweight is {tuple(qweight.shape)} and scales is {tuple(scales.shape)}; both must have two "
            "dimensions"
        )
    columns, (groups, rows) = qweight.shape[0], scales.shape
    why = f"with scales of {(groups, rows)}"
    check_shape(source, "qweight", qweight, (columns, rows // 8), why)
    zeros = None
    if qzeros is not None:
        check_dtype(source, "qzeros", qzeros, torch.int32)
        check_shape(source, "qzeros", qzeros, (groups, rows // 8), why)
        zeros = _awq_codes(qzeros).T
    return assemble(
        source, _awq_codes(qweight).T, "int4", scales.T, zeros=zeros,
        group_size=group_size_of(source, columns, groups, group_size), dtype=kind(dtype, scales.dtype),
    )  # fmt: skip


def _awq_codes(words: Tensor) -> Tensor:
    places = torch.tensor(AWQ_ORDER, device=words.device).argsort()
    codes: Tensor = words_to_codes(words, 4, 1).unflatten(1, (-1, 8))
    return codes[:, :, places].flatten(1)
