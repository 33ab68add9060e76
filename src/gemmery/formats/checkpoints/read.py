"""Which of the readers a weight is for."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Any

import torch
from torch import Tensor

from ..tensor import QuantizedTensor
from . import torchao
from .bitsandbytes import read_bnb
from .compressed_tensors import read_compressed_tensors
from .fp8 import read_fp8, read_fp8_blocks
from .gptq import read_awq, read_gptq
from .microscaling import read_mxfp4, read_nvfp4

Config = Mapping[str, Any]


def read_weight(
    tensors: Mapping[str, Tensor],
    prefix: str,
    config: Config | Any = None,
    *,
    dtype: torch.dtype | None = None,
) -> QuantizedTensor:
    """The weight of one layer of a checkpoint, whatever library made it.

    Args:
        tensors: a checkpoint's, such as a state dict or what safetensors loads; only those of the layer are read.
        prefix: the layer's name, such as "model.layers.0.mlp.down_proj"; for gpt-oss that of the weight, such as
            "model.layers.0.mlp.experts.down_proj". Empty if names have none.
        config: the `quantization_config` of a Hugging Face model, or a model's configuration with one in it, if there
            is one: a mapping, or an object with `to_dict()`. Without it: GPTQ's zero points are stored minus one
            ("gptq", and not "gptq_v2"), AWQ's layout is GEMM's, groups divide K, and fp8 blocks are of 128 x 128.
        dtype: of the weight; None for what its source says, see the readers.

    Returns:
        The weight, (N, K), or (E, N, K) for experts.

    Raises:
        ValueError: it is not quantised, in no known format, its tensors do not go together, or the configuration
            contradicts them.
        TypeError: the tensors are no mapping, or the configuration is neither one nor an object that gives one.

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
    if "qweight" in own:
        return _words(own, prefix, config, dtype)
    if any(name.startswith("weight.quant_state.") for name in own) or "SCB" in own:
        _check_method(config, "bitsandbytes'", "bitsandbytes")
        return read_bnb(own, dtype=dtype)
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
        size, block = _scheme(config)
        return read_compressed_tensors(own, group_size=size, block=block, dtype=dtype)
    if is_torchao(own.get("weight")):
        _check_method(config, "torchao's", "torchao")
        return torchao.read_torchao(own["weight"], dtype=dtype)
    raise ValueError(_nothing(own, tensors, prefix, config))


#: What a layer's tensors are called after its prefix.
_NAMES = (
    "qweight", "qzeros", "scales", "g_idx",
    "weight", "SCB", "weight.absmax", "weight.quant_map", "weight.nested_absmax", "weight.nested_quant_map",
    "weight.quant_state.bitsandbytes__nf4", "weight.quant_state.bitsandbytes__fp4",
    "weight_packed", "weight_scale", "weight_shape", "weight_zero_point", "weight_g_idx", "weight_global_scale",
    "weight_scale_inv", "weight_scale_2",
)  # fmt: skip


#: What a `quant_method` can be where there is a weight with a scale.
_FP8_METHODS = ("compressed-tensors", "compressed_tensors", "fp8", "fbgemm_fp8", "modelopt", "modelopt_fp8")


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
    size = config.get("group_size", config.get("q_group_size"))
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
            f"g_idx, so that nothing says which group a column is of"
        )
    first = not _is_second(config)
    return read_gptq(
        qweight, qzeros, scales, own.get("g_idx"), zeros_minus_one=first, group_size=size, dtype=dtype
    )


def _fp8(own: Mapping[str, Tensor], config: Config, dtype: torch.dtype | None) -> QuantizedTensor:
    weight, scale, kind = own["weight"], own["weight_scale_inv"], dtype or torch.bfloat16
    if scale.numel() == 1:
        return read_fp8(weight, scale, dtype=kind)
    high, wide = config.get("weight_block_size") or (128, 128)
    return read_fp8_blocks(weight, scale, block=(high, wide), dtype=kind)


def _scheme(config: Config) -> tuple[int | None, tuple[int, int] | None]:
    """The size of groups and of blocks in compressed-tensors' configuration, where all its schemes agree on them."""
    groups = config.get("config_groups") or {}
    schemes = [group.get("weights") or {} for group in groups.values() if isinstance(group, Mapping)]
    sizes = {scheme.get("group_size") for scheme in schemes}
    blocks = {tuple(scheme.get("block_structure") or ()) for scheme in schemes}
    size = sizes.pop() if len(sizes) == 1 else None
    block = blocks.pop() if len(blocks) == 1 else ()
    return size, (int(block[0]), int(block[1])) if len(block) == 2 else None


def _nothing(own: Mapping[str, Tensor], tensors: Mapping[str, Tensor], prefix: str, config: Config) -> str:
    where = f"at {prefix!r}" if prefix else "without a prefix"
    method = config.get("quant_method")
    method = f"; quant_method is {method!r}" if method else ""
    if not own:
        near = [name for name in tensors if prefix and name.startswith(prefix)][:4]
        found = f"there are {', '.join(near)}" if near else "there is nothing"
        layer = "; a prefix is the layer's name, without '.weight' or a dot behind it" if near else ""
        return f"read_weight: {where} {found}, and no tensor of a known format{method}{layer}"
    what = ", ".join(
        f"{name} ({str(x.dtype).removeprefix('torch.')}, {tuple(x.shape)})" for name, x in own.items()
    )
    return f"read_weight: {where} there is {what}, which is no quantised weight of a known format{method}"
