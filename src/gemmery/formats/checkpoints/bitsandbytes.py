"""bitsandbytes' NF4 and LLM.int8(): from saved tensors, and from a weight's quant_state."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ...files import parse_json
from ..base import NF4
from ..codes import from_codes
from ..tensor import SMALLEST_GROUP, QuantizedTensor
from .assemble import assemble, kind
from .compressed_tensors import signed_to_codes
from .words import check_dims, check_dtype, check_shape, is_number, is_size, nibbles, settings_of

_SOURCE = "read_bnb"
_STATE = "quant_state.bitsandbytes__"


def read_bnb(
    tensors: Mapping[str, Tensor], *, name: str = "weight", dtype: torch.dtype | None = None
) -> QuantizedTensor:
    """A weight from the tensors of a saved bitsandbytes layer.

    NF4, with or without double quantization: `weight` has the codes, `weight.absmax` the scales of blocks,
    `weight.quant_map` the 16 values, `weight.quant_state.bitsandbytes__nf4` the rest as JSON in bytes, and with double
    quantization `weight.nested_absmax` and `weight.nested_quant_map`. 8 bits: `weight` int8 and `SCB`, (N,): a row's
    largest magnitude, which stands for 127; and `weight_format`, if there is one, which must be 0.

    Args:
        tensors: by these names, without a prefix.
        name: what stands for "weight" in them.
        dtype: of the weight; what it was quantized from if None (float16 for 8 bits).

    Returns:
        The weight, (N, K).

    Raises:
        ValueError: a tensor is missing or damaged, it is FP4, 8-bit numbers are in the order of a GPU's tiles instead
            of rows, or blocks do not fit into rows; see `read_nf4`.

    Example:
        >>> import torch
        >>> tensors = {"weight": torch.full((16, 32), 127, dtype=torch.int8), "SCB": torch.full((16,), 2.0)}
        >>> read_bnb(tensors).dequantize().unique()
        tensor([2.], dtype=torch.float16)
    """
    if "SCB" in tensors:
        return _int8(name, tensors, dtype or torch.float16)
    of = {key.removeprefix(f"{name}."): tensor for key, tensor in tensors.items()}
    state = next((key for key in of if key.startswith(_STATE)), None)
    if state is None:
        names = ", ".join(sorted(tensors)) or "nothing"
        raise ValueError(f"{_SOURCE}: there is {names}; there must be {name}.{_STATE}nf4, or SCB")
    rest = _state(of[state])
    missing = [x for x in (name, "absmax", "quant_map") if x not in of]
    is_double = "nested_offset" in rest
    if is_double:
        missing += [x for x in ("nested_absmax", "nested_quant_map") if x not in of]
    if missing:
        raise ValueError(f"{_SOURCE}: {', '.join(missing)} of {name} is missing")
    absmax = of["absmax"]
    if is_double:
        absmax = undo_double(
            absmax,
            of["nested_absmax"],
            of["nested_quant_map"],
            rest["nested_blocksize"],
            rest["nested_offset"],
        )
    dtype = kind(dtype, rest["dtype"])
    _check_type(rest["quant_type"], of["quant_map"])
    return read_nf4(of[name], absmax, shape=rest["shape"], blocksize=rest["blocksize"], dtype=dtype)


def read_bnb_state(weight: Tensor, state: Any, *, dtype: torch.dtype | None = None) -> QuantizedTensor:
    """A weight from a `bitsandbytes.nn.Linear4bit`'s weight and its `quant_state`.

    Args:
        weight: the packed codes, of any type that was chosen to store them.
        state: a `QuantState`: its absmax, shape, blocksize, quant_type, code, dtype, and with double quantization
            state2 and offset.
        dtype: of the weight; what it was quantized from if None.

    Returns:
        The weight, (N, K).

    Raises:
        ValueError: it is FP4, was repacked for bitsandbytes' CPU kernel, or blocks do not fit into rows.

    Example:
        >>> from types import SimpleNamespace
        >>> import torch
        >>> state = SimpleNamespace(
        ...     absmax=torch.full((8,), 2.0), shape=(16, 32), blocksize=64, quant_type="nf4", code=torch.tensor(NF4),
        ...     dtype=torch.bfloat16, state2=None, offset=None)
        >>> read_bnb_state(torch.full((256, 1), 0xFF, dtype=torch.uint8), state).dequantize().unique()
        tensor([2.], dtype=torch.bfloat16)
    """
    if getattr(state, "packing_format_for_cpu", False):
        raise ValueError(
            "read_bnb_state: the weight was repacked for bitsandbytes' CPU kernel; call .train() on the layer, or "
            "read it before its first call"
        )
    _check_type(state.quant_type, state.code)
    absmax, second = state.absmax, state.state2
    if second is not None:
        absmax = undo_double(absmax, second.absmax, second.code, second.blocksize, float(state.offset))
    dtype = kind(dtype, state.dtype)
    return read_nf4(weight, absmax, shape=state.shape, blocksize=state.blocksize, dtype=dtype)


def read_nf4(
    weight: Tensor, absmax: Tensor, *, shape: Any, blocksize: int, dtype: torch.dtype = torch.bfloat16
) -> QuantizedTensor:
    """A weight in NF4 with a scale for each block of the flattened matrix.

    Args:
        weight: the bytes of N * K / 2, in any shape and type: two codes each, the first in the upper half.
        absmax: float32, (ceil(N * K / blocksize),): what a block's codes are multiplied by.
        shape: N and K.
        blocksize: numbers of a block. Blocks may cover several rows or end inside one: a group has as many columns
            as both have as a common divisor.
        dtype: of the weight.

    Raises:
        ValueError: sizes that do not match, or groups of less than 16 columns.

    Example:
        >>> import torch
        >>> weight = torch.full((16, 48), 0x70, dtype=torch.uint8)
        >>> read_nf4(weight, torch.ones(24), shape=(16, 96), blocksize=64).dequantize()[0, :3]
        tensor([ 0., -1.,  0.], dtype=torch.bfloat16)
    """
    rows, columns = (int(size) for size in shape)
    packed = weight.detach().contiguous().view(-1).view(torch.uint8)
    blocks = -(-rows * columns // blocksize)
    if packed.numel() * 2 != rows * columns or absmax.numel() != blocks:
        raise ValueError(
            f"{_SOURCE}: there are {packed.numel()} bytes and {absmax.numel()} scales; a weight of {(rows, columns)} "
            f"in blocks of {blocksize} has {rows * columns / 2:g} and {blocks}"
        )
    size = math.gcd(columns, blocksize)
    if size < SMALLEST_GROUP:
        raise ValueError(
            f"{_SOURCE}: blocks of {blocksize} in rows of {columns} make groups of {size} columns with one scale; "
            f"they must be of {SMALLEST_GROUP} at least"
        )
    codes = nibbles(packed, high_first=True).view(rows, columns)
    first = torch.arange(0, rows * columns, size, device=absmax.device)
    scales = absmax.float().flatten()[first // blocksize].view(rows, columns // size)
    return assemble(_SOURCE, codes, "nf4", scales, group_size=size, dtype=dtype)


def undo_double(absmax: Tensor, nested: Tensor, values: Tensor, blocksize: int, offset: float) -> Tensor:
    """The scales of blocks, from their 8-bit codes.

    Args:
        absmax: uint8, (blocks,): codes.
        nested: float32, (ceil(blocks / blocksize),): what a block of codes is multiplied by.
        values: float32, (256,): what a code stands for.
        offset: what is added last.

    Example:
        >>> import torch
        >>> codes = torch.tensor([0, 255], dtype=torch.uint8)
        >>> undo_double(codes, torch.tensor([2.0]), torch.linspace(-1, 1, 256), 256, 3.0)
        tensor([1., 5.])
    """
    check_dtype(_SOURCE, "absmax with a second quantisation", absmax, torch.uint8)
    codes, groups = absmax.flatten(), (-(-absmax.numel() // blocksize),)
    check_shape(_SOURCE, "nested_quant_map", values, (256,), "with a number for each code of 8 bits")
    check_shape(_SOURCE, "nested_absmax", nested.flatten(), groups, f"with {codes.numel()} scales")
    of = torch.arange(codes.numel(), device=codes.device) // blocksize
    return values.float()[codes.long()] * nested.float().flatten()[of] + offset


def _check_type(given: str, values: Tensor) -> None:
    if given != "nf4":
        raise ValueError(f"{_SOURCE}: quant_type is {given!r}; only 'nf4' is known")
    ours = torch.tensor(NF4, device=values.device)
    if values.shape != ours.shape or not torch.allclose(values.float(), ours, rtol=0, atol=1e-6):
        raise ValueError(f"{_SOURCE}: quant_map has other values than NF4: {values.tolist()}")


def _state(text: Tensor) -> dict[str, Any]:
    """The content of a `quant_state`'s bytes; the type is torch's.

    Raises:
        ValueError: they are not as bitsandbytes writes them.
    """
    check_dtype(_SOURCE, "quant_state", text, torch.uint8)
    where = f"{_SOURCE}: quant_state"
    state = settings_of(where, parse_json(bytes(text.flatten().tolist()), where))
    is_double = "nested_offset" in state
    shape, name = state.get("shape"), state.get("dtype")
    if not (isinstance(shape, list) and len(shape) == 2 and all(map(is_size, shape))):
        raise ValueError(f"{where}: shape is {shape!r}; it must be of two sizes")
    for key in ("blocksize", *(("nested_blocksize",) if is_double else ())):
        if not is_size(state.get(key)) or state[key] < 1:
            raise ValueError(f"{where}: {key} is {state.get(key)!r}; it must be a positive whole number")
    if is_double and not is_number(state["nested_offset"]):
        raise ValueError(f"{where}: nested_offset is {state['nested_offset']!r}; it must be a number")
    dtype = getattr(torch, name, None) if isinstance(name, str) else None
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{where}: dtype is {name!r}; it must be the name of a type of torch's")
    return state | {"dtype": dtype, "quant_type": state.get("quant_type")}


#: The values of `Linear8bitLt.weight_format`, by number: the order of int8 numbers in memory.
_WEIGHT_FORMATS = ("row", "col32", "col_turing", "col_ampere")


def check_row_order(source: str, name: str) -> None:
    """An error about int8 numbers in the order of a GPU's tiles, as bitsandbytes had them until 0.44.

    Raises:
        ValueError: the order is not "row".
    """
    if name != "row":
        raise ValueError(
            f"{source}: weight_format is {name!r}, the order of a GPU's tiles; it must be 'row', as bitsandbytes saves "
            "a layer before its first call, and from 0.45 on always"
        )


def _int8(name: str, tensors: Mapping[str, Tensor], dtype: torch.dtype) -> QuantizedTensor:
    if name not in tensors:
        raise ValueError(f"{_SOURCE}: there is SCB, and {name} is missing")
    weight, largest, order = tensors[name], tensors["SCB"], tensors.get("weight_format")
    if order is not None:
        check_shape(_SOURCE, "weight_format", order.flatten(), (1,), "as a number")
        number = int(order)
        known = 0 <= number < len(_WEIGHT_FORMATS)
        check_row_order(_SOURCE, _WEIGHT_FORMATS[number] if known else f"number {number}")
    check_dtype(_SOURCE, "weight", weight, torch.int8)
    check_dims(_SOURCE, "weight", weight, 2)
    why = f"with a weight of {tuple(weight.shape)}"
    check_shape(_SOURCE, "SCB", largest.flatten(), (weight.shape[0],), why)
    channel = largest.float().flatten() / 127
    return from_codes(signed_to_codes(weight, 8), "int8", channel=channel, dtype=dtype)
