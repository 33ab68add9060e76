"""The quantization "gemmery" of vLLM: which method computes which layer."""

from __future__ import annotations

import json
from typing import Any

import torch
from torch import nn
from vllm.model_executor.layers.fused_moe import RoutedExperts, UnquantizedFusedMoEMethod
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization import QUANTIZATION_METHODS, register_quantization_config
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig

from ..replacing import matches
from ..transformers import NAME, GemmeryConfig
from .methods import GemmeryDenseLinearMethod, GemmeryPackedLinearMethod


class GemmeryQuantization(QuantizationConfig):  # type: ignore[misc]  # vLLM is not installed for the check
    """The settings by which gemmery computes the linear layers of a model in vLLM.

    Layers of experts, embeddings and the output layer remain vLLM's.

    Args:
        how: how weights are packed while they are loaded; None leaves them dense.
    """

    def __init__(self, how: GemmeryConfig | None = None) -> None:
        super().__init__()
        self.how = how

    def __repr__(self) -> str:
        return f"GemmeryQuantization({None if self.how is None else self.how.to_dict()})"

    def get_name(self) -> str:
        """The name by which it is chosen."""
        return NAME

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        """The types of activations: 16 bits, and float32 with dense weights."""
        types = [torch.bfloat16, torch.float16]
        return types if self.how is not None else [*types, torch.float32]

    @classmethod
    def get_min_capability(cls) -> int:
        """The oldest NVIDIA GPUs that kernels are compiled for: Ampere."""
        return 80

    @staticmethod
    def get_config_filenames() -> list[str]:
        """Files with the configuration: none."""
        return []

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> GemmeryQuantization:
        """Raises a NotImplementedError: this is called for checkpoints that are packed already."""
        raise NotImplementedError(
            "gemmery: vLLM can't read the packed weights that save_pretrained has written; serve the original "
            "checkpoint with quantization='gemmery', which packs the weights while it loads them"
        )

    @classmethod
    def from_config_dict_json(cls, text: str) -> GemmeryQuantization:
        """The configuration from `hf_overrides={"quantization_config_dict_json": text}`.

        Args:
            text: a JSON object with the arguments of `gemmery.nn.transformers.GemmeryConfig`.

        Raises:
            ValueError: an argument is unknown or does not match the others.
        """
        how = GemmeryConfig.from_dict(json.loads(text))
        assert isinstance(how, GemmeryConfig)
        return cls(how)

    def get_quant_method(self, layer: nn.Module, prefix: str) -> Any:
        """The method that computes a layer; None leaves it to vLLM."""
        if isinstance(layer, RoutedExperts):
            return UnquantizedFusedMoEMethod(layer.moe_config)
        if not isinstance(layer, LinearBase):
            return None
        if self.how is None:
            return GemmeryDenseLinearMethod()
        if self.is_left(prefix):
            return UnquantizedLinearMethod()
        return GemmeryPackedLinearMethod(self.how, prefix)

    def is_left(self, prefix: str) -> bool:
        """Whether a layer is named in `modules_to_not_convert`.

        Args:
            prefix: its name. If vLLM has made it of several layers, such as qkv_proj, their names count.

        Raises:
            ValueError: some of these layers are named, and others are not.
        """
        assert self.how is not None
        parent, _, own = prefix.rpartition(".")
        names = [f"{parent}.{name}".lstrip(".") for name in self.packed_modules_mapping.get(own, [own])]
        patterns = self.how.modules_to_not_convert or []
        left = {name: any(matches(name, pattern) for pattern in patterns) for name in names}
        if len(set(left.values())) > 1:
            raise ValueError(
                f"{prefix}: vLLM computes {', '.join(names)} as one layer; modules_to_not_convert must name all of "
                f"them, and has only {', '.join(name for name in names if left[name])}"
            )
        return all(left.values())


def register() -> None:
    """Adds the quantization to vLLM's; a second call does nothing."""
    if NAME not in QUANTIZATION_METHODS:
        register_quantization_config(NAME)(GemmeryQuantization)
