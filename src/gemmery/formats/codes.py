"""A quantized weight from codes, one per byte, and scales in rows, as in checkpoints."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from . import packing
from .aten import converted, has_no_values
from .base import Format
from .tensor import LARGEST_SCALE, LIMITED_CODES, QuantizedTensor, check_shared, lookup
from .weight import DTYPES


def from_codes(
    codes: Tensor,
    format: Format | str,
    *,
    scales: Tensor | None = None,
    zeros: Tensor | None = None,
    offsets: Tensor | None = None,
    channel: Tensor | None = None,
    group_size: int | None = None,
    dtype: torch.dtype | None = None,
    permutation: Tensor | None = None,
) -> QuantizedTensor:
    """A weight from unpacked codes; `QuantizedTensor` defines the meaning of the tensors.

    Args:
        codes: uint8, (*batch, N, K), each below `2**bits`; integers with `format.zero` added, or with zeros.
        format: one of `FORMATS`, or its name.
        scales: (*batch, N, groups), of a floating-point type, including fp8. float32 and float64 are kept as float32,
            others become `dtype`. In bfloat16, scales of integers and e2m1 without zeros or offsets must be below 2^35.
        zeros: like scales, of any type; become `dtype`. Those of an integer format must be integers. They require
            scales.
        offsets: like scales; become `dtype`. They require scales of at most 16 bits, and replace zeros.
        channel: (*batch, N) or (1,); becomes float32.
        group_size: the number of columns that share a scale, a power of two of at least 16. The default is K / groups,
            if that is an integer; the last group may be shorter.
        dtype: torch.float16 or torch.bfloat16; by default that of scales if it is one of these, or torch.bfloat16.
        permutation: integers, (K,): column k of codes is column `permutation[k]` of the weight.

    Returns:
        The weight, (*batch, N, K), on the device of the codes. On the meta device, no values are checked.

    Raises:
        ValueError: shapes or devices do not fit, a value does not fit its type, or there is no kernel for such groups.
        TypeError: a tensor has an unsupported type.

    Example:
        >>> import torch
        >>> codes = torch.tensor([[7, 9]], dtype=torch.uint8).repeat_interleave(16, -1)
        >>> from_codes(codes, "int4", scales=torch.tensor([[0.5, 2.0]])).dequantize()[:, 14:18]
        tensor([[-0.5000, -0.5000,  2.0000,  2.0000]], dtype=torch.bfloat16)
    """
    format = lookup("from_codes", format)
    _check_codes(codes, format)
    if dtype is None:
        dtype = scales.dtype if scales is not None and scales.dtype in DTYPES else torch.bfloat16
    if dtype not in DTYPES:
        raise ValueError(f"from_codes: dtype is {dtype}; it must be torch.float16 or torch.bfloat16")
    grouped = {"scales": scales, "zeros": zeros, "offsets": offsets}
    group_size = _group_size(codes, grouped, group_size)
    check_shared("from_codes", format, dtype, group_size, grouped)
    laid = {name: _grouped(name, x, codes, group_size, dtype) for name, x in grouped.items()}
    has_values = not has_no_values(codes)
    if zeros is not None and format.code == "int" and has_values:
        _check_zeros(zeros.float(), format)
    kept = laid["scales"]
    if kept is not None and has_values:
        _check_finite(kept, format)
        if dtype == torch.float16:
            _check_padding(kept, zeros, format)
        alone = zeros is None and offsets is None
        if kept.dtype == torch.bfloat16 and alone and format.code in LIMITED_CODES:
            _check_size(kept, format)
    if channel is not None:
        channel = _on_device("channel", channel, codes).float().contiguous()
    if permutation is not None:
        permutation = _permutation(_on_device("permutation", permutation, codes), codes.shape[-1])
    words = packing.pack(format.to_stored(codes), format.bits, format.order)
    return QuantizedTensor(
        tuple(codes.shape), format, words, dtype=dtype, group_size=group_size,
        channel=channel, permutation=permutation, **laid,
    )  # fmt: skip


def _check_zeros(zeros: Tensor, format: Format) -> None:
    """Zero points are codes, because the difference of another number and a code may not be exact in 16 bits."""
    if zeros.numel() and not ((zeros == zeros.round()) & (zeros >= 0) & (zeros < 1 << format.bits)).all():
        raise ValueError(
            f"from_codes: zeros of {format.name} must be whole numbers from 0 to {(1 << format.bits) - 1}; given "
            f"{zeros.min().item():g} to {zeros.max().item():g}"
        )


def _check_padding(scales: Tensor, zeros: Tensor | None, format: Format) -> None:
    """Kernels multiply code 0, with which words are padded, by zeros, so it must not be infinite."""
    if format.code == "int":
        least = float(format.zero) if zeros is None or not zeros.numel() else float(zeros.max())
    else:
        least = abs(float(format.stored_values[0]))
    largest = float(scales.abs().max()) if scales.numel() else 0.0
    if least * largest > torch.finfo(torch.float16).max:
        raise ValueError(
            f"from_codes: scales go up to {largest:g}, with which code 0 of {format.name} is infinite in float16; "
            f"use bfloat16"
        )


def _check_finite(scales: Tensor, format: Format) -> None:
    """Integers are finite; scales of the other formats have types in which NaN has a meaning."""
    if format.code == "int" and not bool(scales.isfinite().all()):
        raise ValueError(f"from_codes: scales have NaN or infinity, which {format.name} has no codes for")


def _check_size(scales: Tensor, format: Format) -> None:
    largest = float(scales.abs().max()) if scales.numel() else 0.0
    if largest >= LARGEST_SCALE:
        raise ValueError(
            f"from_codes: scales go up to {largest:g}; those of {format.name} in bfloat16 must be below "
            f"{LARGEST_SCALE:g}. Scales in float32 may be larger"
        )


def _check_codes(codes: Tensor, format: Format) -> None:
    if not isinstance(codes, Tensor) or codes.dtype != torch.uint8:
        got = codes.dtype if isinstance(codes, Tensor) else type(codes).__name__
        raise TypeError(f"from_codes: codes is {got}; it must be a tensor of torch.uint8")
    if codes.ndim < 2:
        raise ValueError(f"from_codes: codes is {tuple(codes.shape)}; it must be (*batch, N, K)")
    if codes.device.type == "meta" or not codes.numel():
        return
    if format.bits < 8 and int(codes.max()) >> format.bits:
        raise ValueError(
            f"from_codes: codes have {int(codes.max())}; those of {format.name} are below {1 << format.bits}"
        )


def _on_device(name: str, values: Tensor, codes: Tensor) -> Tensor:
    if not isinstance(values, Tensor):
        raise TypeError(f"from_codes: {name} is a {type(values).__name__}; it must be a tensor")
    if values.device != codes.device:
        raise ValueError(f"from_codes: {name} is on {values.device} and codes on {codes.device}")
    return values


def _group_size(codes: Tensor, grouped: dict[str, Tensor | None], group_size: int | None) -> int:
    """The columns of a group, given or from the shapes."""
    present = [(name, _on_device(name, x, codes)) for name, x in grouped.items() if x is not None]
    if not present:
        return group_size or 0
    *_, N, K = codes.shape
    name, first = present[0]
    for each, values in present:
        if group_size is None and tuple(values.shape[:-1]) != tuple(codes.shape[:-1]):
            raise ValueError(
                f"from_codes: {each} is {tuple(values.shape)}; with codes {tuple(codes.shape)} it must be (N, groups) "
                f"with N = {N}, a value for each group of columns of a row; transpose it, or give group_size="
            )
    groups = first.shape[-1] if first.ndim else 0
    if group_size is None:
        if not groups or K % groups:
            raise ValueError(
                f"from_codes: {name} is {tuple(first.shape)} for {K} columns, which {groups} groups do not divide; "
                "give a group_size"
            )
        group_size = K // groups
    if not isinstance(group_size, int) or group_size < 1:
        raise ValueError(f"from_codes: group_size is {group_size!r} with {name}; it must be a positive int")
    wanted = (*codes.shape[:-2], N, -(-K // group_size))
    for name, values in present:
        if tuple(values.shape) != wanted:
            raise ValueError(
                f"from_codes: {name} is {tuple(values.shape)}; with codes {tuple(codes.shape)} and group_size "
                f"{group_size} it must be {wanted}"
            )
    return group_size


def _grouped(
    name: str, values: Tensor | None, codes: Tensor, group_size: int, dtype: torch.dtype
) -> Tensor | None:
    """The parameters of groups, from (*batch, N, groups) to (*batch, groups, Np)."""
    if values is None:
        return None
    if name == "scales" and not values.is_floating_point():
        raise TypeError(
            f"from_codes: scales are {values.dtype}; they must be a floating-point type. Bytes that are powers of "
            "two, as "
            "MX formats have them, are scales.view(torch.float8_e8m0fnu)"
        )
    kept = name == "scales" and values.dtype in (torch.float32, torch.float64)
    values = values.float() if kept else converted("from_codes", name, values, dtype)
    rows = codes.shape[-2]
    return pad(values.transpose(-1, -2), (0, -rows % packing.STRIP)).contiguous()


def _permutation(permutation: Tensor, columns: int) -> Tensor:
    if permutation.is_floating_point() or permutation.dtype == torch.bool:
        raise TypeError(f"from_codes: permutation is {permutation.dtype}; it must be of integers")
    result = permutation.to(torch.int64).contiguous()
    is_meta = result.device.type == "meta"
    if tuple(result.shape) != (columns,) or not (
        is_meta or result.sort()[0].equal(torch.arange(columns, device=result.device))
    ):
        raise ValueError(
            f"from_codes: permutation is {tuple(result.shape)}; it must have each of 0 to {columns - 1} once"
        )
    return result
