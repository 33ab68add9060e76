"""compressed-tensors' formats of 2:4 sparse weights, as llm-compressor saves them for vLLM."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ..aten import converted
from ..sparse import GROUP, SparseTensor, check_places, is_group_size, of_codes, of_kept, places_of
from ..tensor import QuantizedTensor
from .assemble import kind, scaled_codes
from .fp8 import FP8
from .words import check_dims, check_dtype, check_shape, group_size_of, words_to_codes

_MASKED, _MARLIN = "read_sparse24", "read_marlin24"


def read_sparse24(tensors: Mapping[str, Tensor], *, dtype: torch.dtype | None = None) -> SparseTensor:
    """A weight in compressed-tensors' format "sparse-24-bitmask".

    - `compressed`: (N, K / 2), the kept numbers of each row, in order: of a floating type, or fp8 or int8 with a scale.
    - `bitmask`: uint8, (N, ceil(K / 8)): a bit for each column, the first in the lowest; two of each four are set.
    - `shape`: (2,) or (2, 1): N and K.
    - `weight_scale`: of one number, (N,) or (N, 1), where numbers are of fp8 or int8; it becomes the `channel`, and the
      numbers, which 16 bits hold exactly, take 16 bits.

    Args:
        tensors: by these names, without a prefix; others are left alone.
        dtype: of the weight; that of the numbers if None, or of the scale, or bfloat16 if they are not of 16 bits.

    Returns:
        The weight, (N, K).

    Raises:
        ValueError: names, shapes or types that do not match, a mask without two of each four, scales of
            groups, or zero points that are not 0.

    Example:
        >>> import torch
        >>> mask = torch.tensor([[0b10011010]], dtype=torch.uint8)
        >>> tensors = {"compressed": torch.tensor([[1.0, 2, 3, 4]]).bfloat16(), "bitmask": mask}
        >>> read_sparse24(tensors | {"shape": torch.tensor([[1], [8]])}).dense()
        tensor([[0., 1., 0., 2., 3., 0., 0., 4.]], dtype=torch.bfloat16)
    """
    if missing := [name for name in ("compressed", "bitmask", "shape") if name not in tensors]:
        raise ValueError(f"{_MASKED}: there is no {missing[0]}; there must be compressed, bitmask and shape")
    numbers, bitmask, shape = (tensors[name] for name in ("compressed", "bitmask", "shape"))
    if shape.numel() != 2:
        raise ValueError(f"{_MASKED}: shape is {tuple(shape.shape)}; it must be (2,) or (2, 1)")
    rows, columns = (int(size) for size in shape.flatten().tolist())
    if columns % GROUP:
        raise ValueError(
            f"{_MASKED}: the weight is {(rows, columns)}; its columns must be a multiple of {GROUP}"
        )
    why = f"with a weight of {(rows, columns)}"
    check_dtype(_MASKED, "bitmask", bitmask, torch.uint8)
    check_shape(_MASKED, "compressed", numbers, (rows, columns // 2), why)
    check_shape(_MASKED, "bitmask", bitmask, (rows, -(-columns // 8)), why)
    mask = (bitmask.unsqueeze(-1) >> torch.arange(8, dtype=torch.uint8, device=bitmask.device)) & 1
    mask = mask.flatten(-2)[:, :columns]
    counts = mask.unflatten(-1, (-1, GROUP)).sum(-1)
    if bool((counts != 2).any()):
        row, group = (counts != 2).nonzero()[0].tolist()
        raise ValueError(
            f"{_MASKED}: the bitmask has {int(counts[row, group])} of row {row}, columns {GROUP * group} to "
            f"{GROUP * group + GROUP - 1}; it must have two of each four"
        )
    scale = tensors.get("weight_scale")
    channel = _channel(numbers, scale, tensors.get("weight_zero_point"), rows)
    like = numbers.dtype if scale is None else scale.dtype
    dtype = kind(dtype, like)
    made = of_kept(converted(_MASKED, "compressed", numbers, dtype, may_vanish=True), places_of(mask))
    return made if channel is None else made.with_parts(made.parts() | {"channel": channel})


def _channel(numbers: Tensor, scale: Tensor | None, zeros: Tensor | None, rows: int) -> Tensor | None:
    """Numbers for rows, of a scale; None if there is none, and none is needed."""
    is_small = numbers.dtype in FP8 or numbers.dtype == torch.int8
    if scale is None:
        if is_small or not numbers.is_floating_point():
            raise ValueError(f"{_MASKED}: compressed is {numbers.dtype} and weight_scale is missing")
        return None
    if not is_small:
        raise ValueError(
            f"{_MASKED}: compressed is {numbers.dtype} with weight_scale; it must be fp8 or int8"
        )
    if zeros is not None and bool((zeros.float() != 0).any()):
        raise ValueError(f"{_MASKED}: weight_zero_point is not 0, so that what was pruned is not 0 either")
    if scale.numel() == 1:
        return scale.float().reshape(1)
    wanted = (rows,) if scale.dim() == 1 else (rows, 1)
    check_shape(_MASKED, "weight_scale", scale, wanted, f"with {rows} rows, each of which can have one scale")
    return scale.float().reshape(rows).contiguous()


def read_marlin24(
    weight: Tensor, scale: Tensor, meta: Tensor, *, group_size: int | None = None, dtype: torch.dtype | None = None
) -> SparseTensor | QuantizedTensor:  # fmt: skip
    """A weight in compressed-tensors' format "marlin-24": 2:4 sparse, of 4 or 8 bits, in the order of a kernel's tiles.

    It becomes a sparse weight of `int4` or `int8`, which has 3 or 5 bits a number and scales as the checkpoint does.
    If a sparse weight can't hold the scales, it becomes a dense weight of these formats, in which pruned numbers are 0:
    those of groups with 8 bits, of groups of fewer than 32 columns, and those of groups that `dtype` does not hold
    exactly.

    Args:
        weight: `weight_packed`, int32, (K / 32, N * bits / 2): the kept codes, with 2 ** (bits - 1) added, of K / 2 by
            N in tiles of 16 by 64, as lanes of a warp take them.
        scale: `scale_packed`, (1, N) or (groups, N). Where there are more than two groups, each eight of a row are in
            the order 0, 4, 1, 5, 2, 6, 3, 7.
        meta: int16, (K / 32, 2 N): the places of what was kept, four bits for each four numbers, of 16 columns and a
            row in one, in blocks of 64 rows and 32 columns.
        group_size: as in the configuration, where there are groups: 128.
        dtype: of the weight; that of the scales if None.

    Returns:
        The weight, (N, K).

    Raises:
        ValueError: shapes or types do not match, or the metadata has places that are not in order.

    Example:
        >>> import torch
        >>> weight, meta = torch.full((2, 128), -1, dtype=torch.int32), torch.full((2, 128), 0x4444, dtype=torch.int16)
        >>> read_marlin24(weight, torch.ones(1, 64).half(), meta).dense()[0, :5]
        tensor([7., 7., 0., 0., 7.], dtype=torch.float16)
    """
    check_dtype(_MARLIN, "weight_packed", weight, torch.int32)
    check_dtype(_MARLIN, "meta", meta, torch.int16)
    for name, x in (("weight_packed", weight), ("scale_packed", scale), ("meta", meta)):
        check_dims(_MARLIN, name, x, 2)
    blocks, rows = meta.shape[0], meta.shape[1] // 2
    if not blocks or not rows or meta.shape[1] % 128:
        raise ValueError(
            f"{_MARLIN}: meta is {tuple(meta.shape)}; it must be (K / 32, 2 N), where N is a multiple of 64"
        )
    bits = 2 * weight.shape[1] // rows
    if bits not in (4, 8) or tuple(weight.shape) != (blocks, rows * bits // 2):
        raise ValueError(
            f"{_MARLIN}: weight_packed is {tuple(weight.shape)}; with a weight of {(rows, 32 * blocks)}, it must be "
            f"{(blocks, 2 * rows)} for 4 bits or {(blocks, 4 * rows)} for 8"
        )
    if scale.shape[1] != rows:
        raise ValueError(f"{_MARLIN}: scale_packed is {tuple(scale.shape)}; it must be (groups, {rows})")
    if scale.shape[0] > 2:
        scale = scale.view(len(scale), -1, 4, 2).mT.reshape(scale.shape)
    nibbles = _places(meta)
    check_places(nibbles, _MARLIN)
    at = torch.stack([nibbles & 3, nibbles >> 2], -1).long()
    kept, scales, dtype = _kept(weight, bits), scale.T.contiguous(), kind(dtype, scale.dtype)
    made = _sparse(kept, at, bits, scales, group_size, dtype)
    return _dense(kept, at, bits, scales, group_size, dtype) if made is None else made


def _sparse(
    kept: Tensor, at: Tensor, bits: int, scales: Tensor, group_size: int | None, dtype: torch.dtype
) -> SparseTensor | None:  # fmt: skip
    """The codes that were kept, with scales (N, groups), as a sparse weight; None if that can't hold the scales."""
    numbers, code = (kept.to(torch.int16) - (1 << (bits - 1))).to(torch.int8), f"int{bits}"
    size = group_size_of(_MARLIN, 2 * kept.shape[1], scales.shape[1], group_size)
    if scales.shape[1] == 1:
        return of_codes(numbers, at, code, dtype=dtype, channel=scales.float().flatten())
    narrow = scales.to(dtype)
    if bits != 4 or not is_group_size(size) or not narrow.double().equal(scales.double()):
        return None
    return of_codes(numbers, at, code, dtype=dtype, scales=narrow, group_size=size)


def _dense(
    kept: Tensor, at: Tensor, bits: int, scales: Tensor, group_size: int | None, dtype: torch.dtype
) -> QuantizedTensor:  # fmt: skip
    """The same as a dense weight."""
    zeros = kept.new_full((*at.shape[:-1], GROUP), 1 << (bits - 1))
    codes = zeros.scatter(-1, at, kept.unflatten(-1, (-1, 2))).flatten(-2)
    return scaled_codes(_MARLIN, codes, f"int{bits}", scales, group_size=group_size, dtype=dtype)


def _kept(weight: Tensor, bits: int) -> Tensor:
    """The codes that were kept, uint8, (N, K / 2)."""
    codes = words_to_codes(weight, bits, 1)
    tiles = len(codes)
    # Of n: bits 4 and higher, bit 3; of k: bits 1 and 2; of n: bits 0 and 1; then, in an order that depends on the bits
    # of a code: of n bit 2, of k bits 3 and 0.
    if bits == 4:
        parts = codes.view(tiles, -1, 2, 4, 4, 2, 2, 2).permute(0, 1, 2, 3, 4, 6, 7, 5)
    else:
        parts = codes.view(tiles, -1, 2, 4, 4, 2, 2, 2).permute(0, 1, 2, 3, 4, 5, 7, 6)
    # Now: block of k, high n, n3, k12, n01, n2, k3, k0.
    return parts.permute(1, 2, 5, 4, 0, 6, 3, 7).reshape(-1, 16 * tiles)


def _places(meta: Tensor) -> Tensor:
    """The four bits of each four columns, int32, (N, K / 4), as `unpacked_metadata` gives them."""
    blocks, width = meta.shape
    # Block of columns, block of rows, bit 1 of the row, bits 3 to 5, bit 0, half of the columns, bit 2.
    parts = meta.contiguous().view(blocks, width // 128, 2, 8, 2, 2, 2)
    halves = parts.permute(1, 3, 6, 2, 4, 0, 5).reshape(width // 2, 2 * blocks).to(torch.int32)
    shifts = torch.arange(0, 16, 4, dtype=torch.int32, device=meta.device)
    return ((halves.unsqueeze(-1) >> shifts) & 15).flatten(-2)
