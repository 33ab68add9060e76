"""Other libraries for packed weights, as peers: each gets the row's own numbers in its own layout, not a new rounding.

tinygemm is torch's own; gemlite 0.6 and torchao 0.18 are imported where they are installed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..formats import FORMATS, packing
from ..tuning.stopwatch import Call
from .inputs import Inputs, Unsuited

#: The factor on the tolerance of their results: they round scales or decoded weights to bf16, or sum in bf16.
SLACK = 3.0


# --- the numbers ----------------------------------------------------------------------------------------------------


def codes_of(inputs: Inputs) -> tuple[Tensor, Tensor]:
    """A row's packed weight as stored codes, (N, K), and float32 scales, (N, groups)."""
    weight = inputs.weight
    assert weight is not None
    rows, columns = weight.shape
    codes = packing.unpack(weight.words, weight.format.bits, rows, columns, weight.format.order)
    if weight.scales is None:
        assert weight.channel is not None
        return codes, weight.channel.expand(rows).unsqueeze(-1).contiguous()
    return codes, weight.scales.mT[:rows].float().contiguous()


def _signed(inputs: Inputs) -> tuple[Tensor, Tensor]:
    """The same of an int8 weight, without zero points."""
    codes, scale = codes_of(inputs)
    return (codes.to(torch.int16) - FORMATS["int8"].zero).to(torch.int8), scale


def _format(inputs: Inputs, *known: str) -> tuple[str, int]:
    """The format of a row's weight and its group; Unsuited unless it is a known one, without a fused function."""
    row = inputs.row
    name, group = row.packing if row.weight else ("", None)
    if name not in known:
        raise Unsuited(f"is measured on weights in {', '.join(known)}")
    if row.epilogue:
        raise Unsuited("has no epilogue")
    return name, row.K if group is None else group


# --- tinygemm, in torch ---------------------------------------------------------------------------------------------


def _tiles(inputs: Inputs, group: int) -> tuple[Tensor, Tensor]:
    """An int4 weight as tinygemm wants it, which computes (code - 8) * scale + zero: the tiles, and (K / g, N, 2)."""
    if group not in (32, 64, 128, 256):
        raise Unsuited(f"tinygemm has groups of 32, 64, 128 and 256, not of {group}")
    codes, scale = codes_of(inputs)
    pairs = codes[:, ::2] << 4 | codes[:, 1::2]
    parameters = torch.stack([scale, torch.zeros_like(scale)], -1).bfloat16().transpose(0, 1).contiguous()
    # 8 tiles of 16 columns side by side, as torchao has them.
    return torch.ops.aten._convert_weight_to_int4pack(pairs.contiguous(), 8), parameters


def tinygemm(inputs: Inputs) -> Call:
    """torch's own product with int4 weights, which torchao and gpt-fast call."""
    _, group = _format(inputs, "int4")
    tiles, parameters = _tiles(inputs, group)
    return partial(torch.ops.aten._weight_int4pack_mm, inputs.a, tiles, group, parameters)


# --- torchao --------------------------------------------------------------------------------------------------------


def _imported(name: str) -> Any:
    try:
        return import_module(name)
    except Exception as error:
        # Libraries that ask for a GPU or a version at their import say so in many ways.
        raise Unsuited(f"{name} can't be imported: {type(error).__name__}: {error}") from error


def torchao(inputs: Inputs) -> Call:
    """torchao's tensors as a Linear's weight: int4 in its layout for CUDA, int8 compiled, as its documentation says."""
    name, group = _format(inputs, "int4", "int8")
    module = _imported("torchao.quantization")
    linear, size = torch.nn.functional.linear, torch.Size((inputs.row.N, inputs.row.K))
    if name == "int4":
        tiles, parameters = _tiles(inputs, group)
        packed = module.Int4TilePackedTo4dTensor(tiles, parameters, [1, group], size)
        return partial(linear, inputs.a, packed)
    codes, scale = _signed(inputs)
    if scale.shape[1] > 1:
        raise Unsuited("torchao decodes an int8 weight with groups before it multiplies")
    weight = module.Int8Tensor(codes, scale, [1, group], inputs.a.dtype)
    # Without it, the eighth shape in a process would run uncompiled.
    torch._dynamo.reset()
    best = torch.compile(linear, mode="max-autotune-no-cudagraphs", dynamic=False, fullgraph=True)
    return partial(best, inputs.a, weight)


# --- gemlite --------------------------------------------------------------------------------------------------------


@functools.cache
def _gemlite() -> Any:
    """gemlite with its configs for the H100 on an H200, which has the same multiprocessors and no separate file."""
    module = _imported("gemlite")
    if "H200" in torch.cuda.get_device_name():
        file = Path(module.__file__).parent / "configs" / "h100.json"
        if file.exists():
            module.load_config(str(file))
    return module


def gemlite(inputs: Inputs) -> Call:
    """gemlite with its own quick search, which runs in the first call."""
    name, group = _format(inputs, "int4", "int8", "e4m3")
    helper = _gemlite().helper
    device, dtype = inputs.a.device, inputs.a.dtype
    if name == "int4":
        codes, scale = codes_of(inputs)
        scale = scale.to(dtype)
        maker = helper.A16Wn(device=device, dtype=dtype)
        layer = maker.from_weights(codes.contiguous(), scale, torch.full_like(scale, 8), 4, group)
        return partial(layer, inputs.a)
    if group != inputs.row.K:
        raise Unsuited("is measured on weights of 8 bits with a scale for each row")
    if name == "int8":
        made, (numbers, scale) = helper.A16W8_INT8, _signed(inputs)
    else:
        codes, scale = codes_of(inputs)
        made, numbers = helper.A16W8_FP8, codes.contiguous().view(torch.float8_e4m3fn)
    return partial(made(device=device, dtype=dtype).from_weights(numbers, scales=scale), inputs.a)


LIBRARIES: dict[str, Callable[[Inputs], Call]] = {
    "tinygemm": tinygemm,
    "torchao": torchao,
    "gemlite": gemlite,
}
