"""Layers and kernels of vLLM as gemmery.nn.vllm makes them, for tests: with vLLM if it is installed, or with a stub."""

import contextlib
import importlib.util
import json

import torch
from torch import nn

from tests import vllm_stub as stub

REAL = importlib.util.find_spec("vllm") is not None
#: Where vLLM can be imported.
there = contextlib.nullcontext if REAL else stub.installed

with there():
    from vllm.model_executor.kernels.linear.mixed_precision.MPLinearKernel import MPLinearLayerConfig
    from vllm.model_executor.kernels.linear.scaled_mm.ScaledMMLinearKernel import FP8ScaledMMLinearLayerConfig
    from vllm.model_executor.layers.linear import ReplicatedLinear
    from vllm.model_executor.layers.quantization.utils.quant_utils import GroupShape, QuantKey, ScaleDesc
    from vllm.model_executor.parameter import GroupQuantScaleParameter, PackedvLLMParameter
    from vllm.scalar_type import scalar_types

    from gemmery.nn.vllm.config import GemmeryQuantization
    from gemmery.nn.vllm.kernels import GemmeryIntKernel

FP8 = torch.float8_e4m3fn
#: The names of an fp8 layer's parameters.
NAMES = ["weight", "weight_scale", "input_scale", "input_scale_ub"]


def created(config, weight, bias=None, name="model.layers.0.mlp.down_proj"):
    """A layer of vLLM before it has read anything."""
    return ReplicatedLinear(
        weight.shape[1], weight.shape[0], bias=bias is not None, params_dtype=weight.dtype, quant_config=config,
        prefix=name, return_bias=False,
    )  # fmt: skip


def loaded(config, weight, bias=None):
    """A layer of vLLM that has read a weight, as its loader does it."""
    layer = created(config, weight, bias)
    for parameter, value in ((layer.weight, weight), (layer.bias, bias)):
        if value is not None:
            parameter.weight_loader(parameter, value)
    layer.quant_method.process_weights_after_loading(layer)
    return layer


def packing(**how):
    return GemmeryQuantization.from_config_dict_json(json.dumps(how))


def words(codes, dim, bits):
    """Codes, the first in the lowest bits of a word."""
    parts = codes.to(torch.int64).unflatten(dim, (-1, 32 // bits))
    shifts = torch.arange(0, 32, bits).view(-1, *[1] * (codes.dim() - dim - 1))
    found = (parts << shifts).sum(dim + 1)
    return (found - (found >= 1 << 31).to(torch.int64) * (1 << 32)).to(torch.int32)


def int_layer(bits, group, zero_points, layout, k=128, n=48):
    """A kernel and a layer with words in the layout of GPTQ or compressed-tensors, and the weight (n, k)."""
    types = {
        (4, False): "uint4b8", (4, True): "uint4", (8, False): "uint8b128", (8, True): "uint8",
    }  # fmt: skip
    groups = 1 if group == -1 else k // group
    codes = torch.randint(1 << bits, (k, n))
    scales = (torch.rand(groups, n) / 8 + 0.05).bfloat16()
    zeros = torch.randint(1 << bits, (groups, n)) if zero_points else torch.full((groups, n), 1 << (bits - 1))
    weight = (
        (codes - zeros.repeat_interleave(k // groups, 0)) * scales.float().repeat_interleave(k // groups, 0)
    ).T

    config = MPLinearLayerConfig(
        full_weight_shape=(k, n), partition_weight_shape=(k, n), weight_type=getattr(scalar_types, types[bits, zero_points]),
        act_type=torch.bfloat16, group_size=group, zero_points=zero_points,
    )  # fmt: skip
    assert GemmeryIntKernel.can_implement(config) == (True, None)
    assert GemmeryIntKernel.get_min_capability() <= 90
    kernel = GemmeryIntKernel(config, "qweight", "scales", "qzeros")
    layer, turned = nn.Module(), layout == "compressed-tensors"

    def add(name, kind, data, **how):
        dims = {"input_dim": 1, "output_dim": 0} if turned else {"input_dim": 0, "output_dim": 1}
        data = data.T.contiguous() if turned else data
        layer.register_parameter(name, kind(data=data, weight_loader=print, **dims, **how))

    packed = {"packed_factor": 32 // bits}
    add("qweight", PackedvLLMParameter, words(codes, 0, bits), packed_dim=1 if turned else 0, **packed)
    add("scales", GroupQuantScaleParameter, scales)
    if zero_points:
        add("qzeros", PackedvLLMParameter, words(zeros, 1, bits), packed_dim=0 if turned else 1, **packed)
    return kernel, layer, weight


def fp8_config(x, weight, dtype=torch.bfloat16, static=False):
    keys = [
        QuantKey(FP8, ScaleDesc(torch.float32, is_static, GroupShape(*shape)))
        for is_static, shape in ((static, x), (True, weight))
    ]
    return FP8ScaledMMLinearLayerConfig(
        weight_quant_key=keys[1], activation_quant_key=keys[0], weight_shape=(48, 256), input_dtype=dtype, out_dtype=dtype
    )  # fmt: skip
