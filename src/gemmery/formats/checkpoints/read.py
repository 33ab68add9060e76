"""The choice of the reader for a weight."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..sparse import SparseTensor
from ..tensor import QuantizedTensor
from . import torchao
from .bitsandbytes import read_bnb
from .compressed_tensors import read_compressed_tensors
from .fp8 import read_fp8, read_fp8_blocks
from .gptq import read_awq, read_gptq
from .microscaling import read_mxfp4, read_nvfp4
from .sparse import read_marlin24, read_sparse24
from .words import check_dims, is_size, settings_of

Config = Mapping[str, Any]


def read_weight(
    tensors: Mapping[str, Tensor],
    prefix: str,
    config: Config | Any = None,
    *,
    dtype: torch.dtype | None = None,
) -> QuantizedTensor | SparseTensor:
    """The weight of one layer of a checkpoint, from any supported library.

    Args:
        tensors: the tensors of a checkpoint, such as a state dict or the result of safetensors; only those of the layer
            are read.
        prefix: the layer's name, such as "model.layers.0.mlp.down_proj"; for gpt-oss the name of the weight, such as
            "model.layers.0.mlp.experts.down_proj". Empty if names have no prefix.
        config: the `quantization_config` of a Hugging Face model, or the configuration of a model that contains one: a
            mapping, or an object with `to_dict()`. Without it, GPTQ's zero points are stored minus one ("gptq", not
            "gptq_v2"), AWQ's layout is GEMM's, groups divide K, and fp8 blocks are 128 x 128.
        dtype: the type of the weight; None for that of its source, see the readers.

    Returns:
        The weight, (N, K), or (E, N, K) for experts: a `SparseTensor` for compressed-tensors' "sparse-24-bitmask" and
            most of its "marlin-24", see `read_marlin24`, and a `QuantizedTensor` for all others.

    Raises:
        ValueError: the layer is not packed, its format is unknown, its tensors do not match, or the configuration
            contradicts them.
        TypeError: the tensors are not a mapping, or the configuration is neither a mapping nor an object with
            `to_dict()`.

    Example:
        >>> import torch
        >>> tensors = {"up.weight": torch.ones(16, 32).to(torch.float8_e4m3fn), "up.weight_scale": torch.tensor(2.0)}
        >>> read_weight(tensors, "up").dequantize().unique()
        tensor([2.], dtype=torch.bfloat16)
    """
    if not isinstance(tensors, Mapping):
        raise TypeError(
            f"read_weight: tensors is a {type(tensors).__name__}; it must be a mapping of names to tensors"
        )
    config = _settings(config)
    if f"{prefix}_blocks" in tensors and f"{prefix}_scales" in tensors:
        _check_method(config, "gpt-oss's", "mxfp4")
        blocks, scales = tensors[f"{prefix}_blocks"], tensors[f"{prefix}_scales"]
        return read_mxfp4(blocks, scales, dtype=dtype or torch.bfloat16)
    dot = f"{prefix}." if prefix else ""
    # By name, and not over all: checkpoints that are read lazily have thousands.
    own = {name: tensors[dot + name] for name in _NAMES if dot + name in tensors}
    for name, tensor in own.items():
        _check_tensor(dot + name, tensor, *_NAMES[name])
    if "qweight" in own:
        return _words(own, prefix, config, dtype)
    if any(name.startswith("weight.quant_state.") for name in own) or "SCB" in own:
        _check_method(config, "bitsandbytes'", "bitsandbytes")
        return read_bnb(own, dtype=dtype)
    if "compressed" in own and "bitmask" in own:
        _check_method(config, 'those of "sparse-24-bitmask"', *_COMPRESSED)
        return read_sparse24(own, dtype=dtype)
    if "scale_packed" in own and "meta" in own and "weight_packed" in own:
        _check_method(config, 'those of "marlin-24"', *_COMPRESSED)
        return _marlin24(own, config, dtype)
    if "weight_scale_inv" in own and "weight" in own:
        _check_method(config, "fp8 with weight_scale_inv", *_FP8_METHODS)
        return _fp8(own, config, dtype)
    if "weight_scale_2" in own and "weight" in own and own["weight"].dtype == torch.uint8:
        _check_method(config, "ModelOpt's", "modelopt", "modelopt_fp4", "nvfp4")
        return read_nvfp4(
            own["weight"], own["weight_scale"], own["weight_scale_2"],
            reciprocal=False, dtype=dtype or torch.bfloat16,
        )  # fmt: skip
    if "weight_scale" in own:
        _check_method(config, "those of compressed-tensors or fp8", *_FP8_METHODS)
        scheme = _scheme(config)
        return read_compressed_tensors(
            own, group_size=scheme.group_size, block=scheme.block, num_bits=scheme.num_bits, dtype=dtype
        )
    if is_torchao(own.get("weight")):
        _check_method(config, "torchao's", "torchao")
        return torchao.read_torchao(own["weight"], dtype=dtype)
    raise ValueError(_nothing(own, tensors, prefix, config))


#: The names of a layer's tensors after its prefix, with what they belong to, and their number of dimensions if it is
#: fixed. Other requirements depend on the source, and its reader checks them.
_NAMES: dict[str, tuple[str, int | None]] = {
    "qweight": ("integers", 2), "qzeros": ("integers", 2), "scales": ("floating", 2), "g_idx": ("integers", 1),
    "weight": ("numbers", None), "SCB": ("floating", None), "weight_format": ("integers", None),
    "weight.absmax": ("numbers", None), "weight.quant_map": ("floating", 1), "weight.nested_absmax": ("floating", None),
    "weight.nested_quant_map": ("floating", 1),
    "weight.quant_state.bitsandbytes__nf4": ("integers", None),
    "weight.quant_state.bitsandbytes__fp4": ("integers", None),
    "weight_packed": ("integers", 2), "weight_scale": ("numbers", None), "weight_shape": ("integers", 1),
    "weight_zero_point": ("integers", None), "weight_g_idx": ("integers", 1), "weight_global_scale": ("floating", None),
    "weight_scale_inv": ("floating", None), "weight_scale_2": ("floating", None),
    "compressed": ("numbers", 2), "bitmask": ("integers", 2), "shape": ("integers", None),
    "scale_packed": ("floating", 2), "meta": ("integers", 2),
}  # fmt: skip


def _check_tensor(name: str, tensor: Any, kind: str, dims: int | None) -> None:
    """An error about a tensor that has no such numbers, or other dimensions."""
    if is_torchao(tensor):
        return  # its parts are checked by its reader
    if not isinstance(tensor, Tensor):
        raise TypeError(f"read_weight: {name} is a {type(tensor).__name__}; it must be a tensor")
    dtype = tensor.dtype
    is_integer = not (dtype.is_floating_point or dtype.is_complex or dtype == torch.bool)
    fits = {
        "integers": is_integer,
        "floating": dtype.is_floating_point,
        "numbers": is_integer or dtype.is_floating_point,
    }
    if not fits[kind]:
        wanted = {
            "integers": "integers",
            "floating": "a floating type",
            "numbers": "integers or a floating type",
        }
        raise ValueError(f"read_weight: {name} is {dtype}; it must be of {wanted[kind]}")
    if dims is not None:
        check_dims("read_weight", name, tensor, dims)


#: The values of `quant_method` for weights of compressed-tensors, and for weights with a scale.
_COMPRESSED = ("compressed-tensors", "compressed_tensors")
_FP8_METHODS = (*_COMPRESSED, "fp8", "fbgemm_fp8", "modelopt", "modelopt_fp8")


def _settings(config: Any) -> Config:
    """A configuration as a mapping, its enumerations as their values."""
    if hasattr(config, "to_dict"):
        config = config.to_dict()
    if config is None:
        return {}
    if not isinstance(config, Mapping):
        raise TypeError(
            f"read_weight: config is a {type(config).__name__}; it must be a mapping, or have to_dict()"
        )
    if "quantization_config" in config:
        return _settings(config["quantization_config"])
    return {name: x.value if isinstance(x, Enum) else x for name, x in config.items()}


def _check_method(config: Config, what: str, *known: str) -> None:
    """An error if the configuration is of another method than the tensors."""
    method = config.get("quant_method")
    if method is not None and str(method).lower() not in known:
        raise ValueError(
            f"read_weight: quant_method is {method!r}, and the tensors are {what}; it must be "
            f"{' or '.join(map(repr, known))}, or missing"
        )


def _check_bits(config: Config, bits: float) -> None:
    """An error if the configuration has other bits than the tensors, unless it has others for some layers."""
    given = config.get("bits", config.get("w_bit"))
    if given is not None and given != bits and not config.get("dynamic"):
        raise ValueError(f"read_weight: bits is {given!r} in the configuration; the tensors have {bits:g}")


def _is_second(config: Config) -> bool:
    """Whether GPTQ's zero points are stored as they are."""
    method = str(config.get("quant_method") or "").lower()
    given = config.get("checkpoint_format") or config.get("format")
    if given is None:
        return method == "gptq_v2"
    version = str(given).lower()
    if version not in ("gptq", "gptq_v2"):
        raise ValueError(
            f"read_weight: GPTQ's checkpoint_format is {version!r}; it must be 'gptq' or 'gptq_v2'"
        )
    if method == "gptq_v2" != version:
        raise ValueError(f"read_weight: quant_method is 'gptq_v2' and checkpoint_format is {version!r}")
    return version == "gptq_v2"


def is_torchao(weight: Any) -> bool:
    """Whether a tensor is one of torchao's that `read_torchao` knows, by the name of its class."""
    return type(getattr(weight, "original_weight_tensor", weight)).__name__ in torchao.READERS


def _words(
    own: Mapping[str, Tensor], prefix: str, config: Config, dtype: torch.dtype | None
) -> QuantizedTensor:
    """GPTQ's or AWQ's: the one is packed along k and the other along n."""
    if "scales" not in own:
        raise ValueError(f"read_weight: {prefix or 'the layer'} has qweight and no scales")
    qweight, qzeros, scales = own["qweight"], own.get("qzeros"), own["scales"]
    size = _group_size(config, "group_size", "q_group_size")
    if qweight.dim() == scales.dim() == 2 and qweight.shape[1] * 8 == scales.shape[1]:
        _check_method(config, "AWQ's", "awq")
        _check_bits(config, 4)
        version = str(config.get("version") or "gemm").lower()
        if version != "gemm":
            raise ValueError(
                f"read_weight: the AWQ checkpoint's version is {version!r}; only 'gemm' is known"
            )
        return read_awq(qweight, qzeros, scales, group_size=size, dtype=dtype)
    if qzeros is None or qweight.dim() != 2 or qweight.shape[1] != scales.shape[-1]:
        raise ValueError(
            f"read_weight: {prefix or 'the layer'} has qweight {tuple(qweight.shape)} and scales "
            f"{tuple(scales.shape)}{'' if qzeros is not None else ', and no qzeros'}; with scales of (groups, N) it "
            "must be (K / 8, N) or (K / 4, N) as GPTQ has it, with qzeros, or (K, N / 8) as AWQ has it"
        )
    _check_method(config, "GPTQ's", "gptq", "gptq_v2")
    _check_bits(config, 32 * qzeros.shape[-1] / max(scales.shape[-1], 1))
    if config.get("desc_act") and "g_idx" not in own and scales.shape[0] > 1:
        raise ValueError(
            f"read_weight: desc_act is {config['desc_act']!r} in the configuration, and {prefix or 'the layer'} has no "
            f"g_idx, so the group of each column is unknown"
        )
    first = not _is_second(config)
    return read_gptq(
        qweight, qzeros, scales, own.get("g_idx"), zeros_minus_one=first, group_size=size, dtype=dtype
    )


def _fp8(own: Mapping[str, Tensor], config: Config, dtype: torch.dtype | None) -> QuantizedTensor:
    weight, scale, kind = own["weight"], own["weight_scale_inv"], dtype or torch.bfloat16
    if scale.numel() == 1:
        return read_fp8(weight, scale, dtype=kind)
    block = _block("weight_block_size", config.get("weight_block_size")) or (128, 128)
    return read_fp8_blocks(weight, scale, block=block, dtype=kind)


def _marlin24(
    own: Mapping[str, Tensor], config: Config, dtype: torch.dtype | None
) -> SparseTensor | QuantizedTensor:
    scheme, weight, meta = _scheme(config), own["weight_packed"], own["meta"]
    bits = 4 * weight.shape[1] / max(meta.shape[1], 1)
    if scheme.num_bits and bits not in scheme.num_bits:
        said = " or ".join(map(str, sorted(scheme.num_bits)))
        raise ValueError(
            f"read_weight: num_bits is {said} in the configuration; the tensors have {bits:g}, with weight_packed "
            f"{tuple(weight.shape)} and meta {tuple(meta.shape)}"
        )
    return read_marlin24(weight, own["scale_packed"], meta, group_size=scheme.group_size, dtype=dtype)


class _Scheme(NamedTuple):
    """The settings of weights in compressed-tensors' configuration.

    Attributes:
        group_size: columns that share a scale; None if schemes differ, or there is none.
        block: rows and columns that do; also None.
        num_bits: of a code, those of all schemes.
    """

    group_size: int | None
    block: tuple[int, int] | None
    num_bits: frozenset[int]


def _scheme(config: Config) -> _Scheme:
    """The common properties of a configuration's schemes; a layer's scheme is unknown."""
    groups = _settings_of("config_groups", config.get("config_groups"))
    schemes = [
        _settings_of("weights", _settings_of(f"config_groups.{name}", group).get("weights"))
        for name, group in groups.items()
    ]
    sizes = {_group_size(scheme) for scheme in schemes}
    blocks = {_block("block_structure", scheme.get("block_structure")) for scheme in schemes}
    bits = [scheme["num_bits"] for scheme in schemes if scheme.get("num_bits") is not None]
    for given in bits:
        if not is_size(given) or not 1 <= given <= 32:
            raise ValueError(f"read_weight: num_bits is {given!r}; it must be a whole number from 1 to 32")
    return _Scheme(
        sizes.pop() if len(sizes) == 1 else None, blocks.pop() if len(blocks) == 1 else None, frozenset(bits)
    )


def _settings_of(name: str, value: Any) -> Config:
    """An object within a configuration; one that is missing or null is empty."""
    return settings_of(f"read_weight: {name}", {} if value is None else value)


def _group_size(config: Config, *names: str) -> int | None:
    """The columns that share a scale; -1, as libraries write it, is for all."""
    given = next((config[name] for name in names or ("group_size",) if config.get(name) is not None), None)
    if given is not None and not (type(given) is int and given == -1) and not is_size(given):
        raise ValueError(
            f"read_weight: group_size is {given!r}; it must be a whole number, or -1 for one group"
        )
    return given


def _block(name: str, given: Any) -> tuple[int, int] | None:
    """The rows and columns that share a scale."""
    if given is None or (isinstance(given, list | tuple) and not given):
        return None
    if not (isinstance(given, list | tuple) and len(given) == 2 and all(is_size(x) and x > 0 for x in given)):
        raise ValueError(f"read_weight: {name} is {given!r}; it must be of two positive whole numbers")
    return given[0], given[1]


def _nothing(own: Mapping[str, Tensor], tensors: Mapping[str, Tensor], prefix: str, config: Config) -> str:
    where = f"at {prefix!r}" if prefix else "without a prefix"
    method = config.get("quant_method")
    method = f"; quant_method is {method!r}" if method else ""
    if not own:
        near = [name for name in tensors if prefix and name.startswith(prefix)][:4]
        found = f"there are {', '.join(near)}" if near else "there is nothing"
        layer = "; a prefix is the layer's name, without '.weight' or a dot after it" if near else ""
        return f"read_weight: {where} {found}, and no tensor of a known format{method}{layer}"
    what = ", ".join(
        f"{name} ({str(x.dtype).removeprefix('torch.')}, {tuple(x.shape)})" for name, x in own.items()
    )
    return f"read_weight: {where} there is {what}, which is not a packed weight of a known format{method}"
