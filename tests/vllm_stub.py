"""What gemmery.nn.vllm imports of vLLM 0.33, in place of vLLM: the same names, signatures and meanings, without an engine.

`installed` puts the modules where an import finds them. tests/host/test_nn_vllm.py compares the signatures with those of
vLLM itself where that is installed, and its other tests then run with vLLM instead.
"""

import contextlib
import enum
import functools
import sys
import types
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import nn


# --- vllm.platforms, vllm.scalar_type ---------------------------------------------------------------------------------
class PlatformEnum(enum.Enum):
    CUDA = 1
    ROCM = 2
    CPU = 5


@dataclass(frozen=True)
class ScalarType:
    size_bits: int
    bias: int


class scalar_types:
    uint4, uint8 = ScalarType(4, 0), ScalarType(8, 0)
    uint3b4, uint4b8, uint8b128 = ScalarType(3, 4), ScalarType(4, 8), ScalarType(8, 128)


# --- vllm.model_executor.parameter, .utils ----------------------------------------------------------------------------
class BasevLLMParameter(nn.Parameter):
    def __new__(cls, data, **kwargs):
        return super().__new__(cls, data, requires_grad=False)

    def __init__(self, data, weight_loader):
        self.weight_loader = weight_loader


class ModelWeightParameter(BasevLLMParameter):
    def __init__(self, output_dim, **kwargs):
        self.input_dim, self.output_dim = kwargs.pop("input_dim"), output_dim
        super().__init__(**kwargs)


class GroupQuantScaleParameter(ModelWeightParameter):
    pass


class PackedvLLMParameter(ModelWeightParameter):
    def __init__(self, packed_factor, packed_dim, marlin_tile_size=None, **kwargs):
        self.packed_factor, self.packed_dim = packed_factor, packed_dim
        super().__init__(**kwargs)


def permute_param_layout_(param, input_dim, output_dim, **kwargs):
    order = [0, 0]
    order[input_dim], order[output_dim] = param.input_dim, param.output_dim
    assert order[kwargs["packed_dim"]] == param.packed_dim if "packed_dim" in kwargs else True
    param.data = param.data.permute(*order)
    param.input_dim, param.output_dim = input_dim, output_dim
    return param


def set_weight_attrs(weight, weight_attrs):
    for name, value in (weight_attrs or {}).items():
        assert not hasattr(weight, name)
        setattr(weight, name, value)


# --- vllm.model_executor.layers ---------------------------------------------------------------------------------------
class QuantizationConfig(ABC):
    online_quantization_config = None

    def __init__(self):
        self.packed_modules_mapping = {}

    @abstractmethod
    def get_name(self): ...

    @abstractmethod
    def get_supported_act_dtypes(self): ...

    @classmethod
    @abstractmethod
    def get_min_capability(cls): ...

    @staticmethod
    @abstractmethod
    def get_config_filenames(): ...

    @classmethod
    @abstractmethod
    def from_config(cls, config): ...

    @abstractmethod
    def get_quant_method(self, layer, prefix): ...


QUANTIZATION_METHODS, _CONFIGS = ["awq", "fp8"], {}


def register_quantization_config(quantization):
    def register(quant_config_cls):
        assert issubclass(quant_config_cls, QuantizationConfig)
        QUANTIZATION_METHODS.append(quantization)
        _CONFIGS[quantization] = quant_config_cls
        return quant_config_cls

    return register


def get_quantization_config(quantization):
    if quantization not in QUANTIZATION_METHODS:
        raise ValueError(quantization)
    return _CONFIGS[quantization]


class LinearMethodBase(ABC):
    @abstractmethod
    def create_weights(
        self, layer, input_size_per_partition, output_partition_sizes, input_size, output_size, params_dtype,
        **extra_weight_attrs,
    ): ...  # fmt: skip

    @abstractmethod
    def apply(self, layer, x, bias=None): ...


WEIGHT_LOADER_V2_SUPPORTED = ["UnquantizedLinearMethod"]


def register_weight_loader_v2_supported_method(cls):
    WEIGHT_LOADER_V2_SUPPORTED.append(cls.__name__)
    return cls


class UnquantizedLinearMethod(LinearMethodBase):
    def create_weights(
        self, layer, input_size_per_partition, output_partition_sizes, input_size, output_size, params_dtype,
        **extra_weight_attrs,
    ):  # fmt: skip
        data = torch.empty(sum(output_partition_sizes), input_size_per_partition, dtype=params_dtype)
        loader = extra_weight_attrs.pop("weight_loader")
        weight = ModelWeightParameter(data=data, input_dim=1, output_dim=0, weight_loader=loader)
        layer.register_parameter("weight", weight)
        set_weight_attrs(weight, extra_weight_attrs)

    def process_weights_after_loading(self, layer):
        # vLLM does this on a CPU, where its own product reads another copy.
        layer.weight = nn.Parameter(torch.empty(0), requires_grad=False)

    def apply(self, layer, x, bias=None):
        return torch.nn.functional.linear(x, layer.weight, bias)


class LinearBase(nn.Module):
    pass


class ReplicatedLinear(LinearBase):
    def __init__(
        self, input_size, output_size, bias=True, skip_bias_add=False, params_dtype=None, quant_config=None, prefix="",
        *, return_bias=True, disable_tp=False,
    ):  # fmt: skip
        super().__init__()
        self.return_bias = return_bias
        dtype = params_dtype or torch.get_default_dtype()
        self.quant_method = quant_config.get_quant_method(self, prefix)
        self.quant_method.create_weights(
            self, input_size, [output_size], input_size, output_size, dtype, weight_loader=self.weight_loader
        )
        self.register_parameter("bias", None)
        if bias:
            self.bias = nn.Parameter(torch.empty(output_size, dtype=dtype), requires_grad=False)
            set_weight_attrs(self.bias, {"output_dim": 0, "weight_loader": self.weight_loader})

    def weight_loader(self, param, loaded_weight):
        assert param.size() == loaded_weight.size()
        param.data.copy_(loaded_weight)

    def forward(self, x):
        y = self.quant_method.apply(self, x, self.bias)
        return (y, None) if self.return_bias else y


class RoutedExperts(nn.Module):
    pass


@dataclass
class UnquantizedFusedMoEMethod:
    moe: object


def initialize_online_processing(layer):
    """Creates a layer on meta, reads and processes it once all of its parameters have been given."""
    given, loaders = {}, {}

    def wrap():
        for name, parameter in layer.named_parameters():
            if name not in loaders:
                loaders[name] = parameter.weight_loader
                parameter.weight_loader = wrapped(name)

    def wrapped(name):
        def online_process_loader(param, loaded_weight):
            wrap()  # a layer gets its bias later
            given[name] = loaded_weight
            if given.keys() == loaders.keys():
                read()

        return online_process_loader

    def read():
        for name, value in given.items():
            if getattr(layer, name).is_meta:
                data = torch.empty_like(getattr(layer, name), device=torch.get_default_device())
                made = ModelWeightParameter(data=data, input_dim=1, output_dim=0, weight_loader=loaders[name])
                layer.register_parameter(name, made)
            loaders[name](getattr(layer, name), value)
        layer.quant_method.process_weights_after_loading(layer)

    wrap()


# --- vllm.model_executor.layers.quantization.utils.quant_utils -----------------------------------------------------------
class GroupShape(NamedTuple):
    row: int
    col: int

    def is_per_tensor(self):
        return self == (-1, -1)

    def is_per_token(self):
        return self == (1, -1)

    def is_per_channel(self):
        return self == (-1, 1)


@dataclass(frozen=True)
class ScaleDesc:
    dtype: torch.dtype
    static: bool
    group_shape: GroupShape


@dataclass(frozen=True)
class QuantKey:
    dtype: torch.dtype
    scale: ScaleDesc
    scale2: ScaleDesc | None = None
    symmetric: bool = True


# --- vllm.model_executor.kernels.linear -------------------------------------------------------------------------------
@dataclass
class MPLinearLayerConfig:
    full_weight_shape: tuple
    partition_weight_shape: tuple
    weight_type: ScalarType
    act_type: torch.dtype
    group_size: int
    zero_points: bool
    out_type: torch.dtype | None = None


class MPLinearKernel(ABC):
    @classmethod
    @abstractmethod
    def get_min_capability(cls): ...

    @classmethod
    @abstractmethod
    def can_implement(cls, c): ...

    def __init__(self, c, w_q_param_name, w_s_param_name, w_zp_param_name=None):
        self.config = c
        self.w_q_name, self.w_s_name, self.w_zp_name = w_q_param_name, w_s_param_name, w_zp_param_name

    @abstractmethod
    def process_weights_after_loading(self, layer): ...

    @abstractmethod
    def apply_weights(self, layer, x, bias=None): ...

    def _transform_param(self, layer, name, fn):
        old = getattr(layer, name)
        copy = torch.Tensor._make_subclass(type(old), old.data, False)
        copy.__dict__.update(old.__dict__)
        old.data = fn(copy).data


@dataclass
class FP8ScaledMMLinearLayerConfig:
    weight_quant_key: QuantKey
    activation_quant_key: QuantKey
    weight_shape: tuple
    input_dtype: torch.dtype
    out_dtype: torch.dtype


class FP8ScaledMMLinearKernel(ABC):
    @classmethod
    @abstractmethod
    def is_supported(cls, compute_capability=None): ...

    @classmethod
    @abstractmethod
    def can_implement(cls, c): ...

    def __init__(self, c, layer_param_names):
        self.config, self.layer_param_names = c, layer_param_names

    @abstractmethod
    def apply_scaled_mm(self, *, A, B, out_dtype, As, Bs, bias, output_shape): ...


class Fp8BlockScaledMMLinearKernel(ABC):
    def __init__(self, config):
        self.config = config

    @classmethod
    @abstractmethod
    def is_supported(cls, compute_capability=None): ...

    @classmethod
    def can_implement(cls, config):
        static = config.activation_quant_key.scale.static
        return (False, "only dynamic scales") if static else (True, None)

    @abstractmethod
    def apply_block_scaled_mm(self, A, B, As, Bs): ...


class TheirKernel:
    """What stands in a list before."""


def _lists():
    return {platform: [TheirKernel] for platform in PlatformEnum}


_POSSIBLE_KERNELS, _POSSIBLE_FP8_KERNELS, _POSSIBLE_FP8_BLOCK_KERNELS = _lists(), _lists(), _lists()
_KINDS = {"mp": _POSSIBLE_KERNELS, "fp8": _POSSIBLE_FP8_KERNELS, "fp8_block": _POSSIBLE_FP8_BLOCK_KERNELS}


def register_linear_kernel(kernel_class, platform, kernel_type="mp"):
    _KINDS[kernel_type][platform].append(kernel_class)


#: The names of each module.
LAYERS, KERNELS = "vllm.model_executor.layers", "vllm.model_executor.kernels.linear"
MODULES = {
    "vllm.platforms": (PlatformEnum,),
    "vllm.scalar_type": (scalar_types,),
    "vllm.model_executor.parameter": (
        GroupQuantScaleParameter, ModelWeightParameter, PackedvLLMParameter, permute_param_layout_,
    ),
    "vllm.model_executor.utils": (set_weight_attrs,),
    "vllm.model_executor.model_loader.reload.layerwise": (initialize_online_processing,),
    f"{LAYERS}.linear": (
        LinearBase, LinearMethodBase, ReplicatedLinear, UnquantizedLinearMethod,
        register_weight_loader_v2_supported_method,
    ),
    f"{LAYERS}.fused_moe": (RoutedExperts, UnquantizedFusedMoEMethod),
    f"{LAYERS}.quantization": (get_quantization_config, register_quantization_config),
    f"{LAYERS}.quantization.base_config": (QuantizationConfig,),
    f"{LAYERS}.quantization.utils.quant_utils": (GroupShape, QuantKey, ScaleDesc),
    KERNELS: (register_linear_kernel,),
    f"{KERNELS}.mixed_precision.MPLinearKernel": (MPLinearKernel, MPLinearLayerConfig),
    f"{KERNELS}.scaled_mm.ScaledMMLinearKernel": (FP8ScaledMMLinearKernel, FP8ScaledMMLinearLayerConfig),
    f"{KERNELS}.scaled_mm.BlockScaledMMLinearKernel": (Fp8BlockScaledMMLinearKernel,),
}  # fmt: skip
#: Values that are no classes or functions.
VALUES = {
    "vllm.envs": {"VLLM_BATCH_INVARIANT": False},
    f"{LAYERS}.quantization": {"QUANTIZATION_METHODS": QUANTIZATION_METHODS},
    KERNELS: {
        "_POSSIBLE_KERNELS": _POSSIBLE_KERNELS, "_POSSIBLE_FP8_KERNELS": _POSSIBLE_FP8_KERNELS,
        "_POSSIBLE_FP8_BLOCK_KERNELS": _POSSIBLE_FP8_BLOCK_KERNELS,
    },
}  # fmt: skip


@functools.cache
def modules():
    """The modules by their names."""
    made = {}
    for path in (*MODULES, *VALUES):
        parts = path.split(".")
        for length in range(1, len(parts) + 1):
            name, parent = ".".join(parts[:length]), ".".join(parts[: length - 1])
            if name not in made:
                made[name] = types.ModuleType(name)
                made[name].__path__ = []
                if parent:
                    setattr(made[parent], parts[length - 1], made[name])
    for path, found in MODULES.items():
        for x in found:
            setattr(made[path], x.__name__, x)
    for path, values in VALUES.items():
        for name, value in values.items():
            setattr(made[path], name, value)
    return made


@contextlib.contextmanager
def installed():
    """Puts the modules where an import finds them, and takes them away again: other packages look for vLLM too."""
    sys.modules.update(modules())
    yield
    for name in modules():
        sys.modules.pop(name, None)
