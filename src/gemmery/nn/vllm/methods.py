"""The methods of vLLM's linear layers: with a dense weight, or with a weight that is packed while it is loaded."""

from __future__ import annotations

from typing import Any

import torch
import vllm.envs as environment
from torch import Tensor, nn
from vllm.model_executor.layers.linear import (
    LinearMethodBase,
    UnquantizedLinearMethod,
    register_weight_loader_v2_supported_method,
)
from vllm.model_executor.model_loader.reload.layerwise import initialize_online_processing
from vllm.model_executor.parameter import ModelWeightParameter
from vllm.model_executor.utils import set_weight_attrs

from ...api import linear
from ...formats.weight import PackedWeight
from ..transformers import GemmeryConfig


@register_weight_loader_v2_supported_method
class GemmeryDenseLinearMethod(UnquantizedLinearMethod):  # type: ignore[misc]  # vLLM is not installed for the check
    """A layer with the weight that was loaded, computed by `gemmery.linear`."""

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """Leaves the weight as it is."""

    def apply(self, layer: nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """(..., in) to (..., out)."""
        weight: Any = layer.weight
        y: Tensor = linear(
            x, weight, bias, precision="torch", batch_invariant=environment.VLLM_BATCH_INVARIANT
        )
        return y


@register_weight_loader_v2_supported_method
class GemmeryPackedLinearMethod(LinearMethodBase):  # type: ignore[misc]
    """A layer whose weight is packed as soon as it has been read.

    Args:
        how: format and groups.
        prefix: the layer's name, for errors.
    """

    #: vLLM creates the weight once its numbers are read, and hands it over then; otherwise the whole dense model would
    #: be on the GPU first.
    uses_meta_device = True

    def __init__(self, how: GemmeryConfig, prefix: str) -> None:
        self.how, self.prefix = how, prefix

    def create_weights(
        self, layer: nn.Module, input_size_per_partition: int, output_partition_sizes: list[int], input_size: int,
        output_size: int, params_dtype: torch.dtype, **extra_weight_attrs: Any,
    ) -> None:  # fmt: skip
        """Registers the weight as it will be read, (out, in).

        Raises:
            ValueError: such a weight can't be packed, or is packed for activations of another type.
        """
        data = torch.empty(
            sum(output_partition_sizes), input_size_per_partition, dtype=params_dtype, device="meta"
        )
        dtype = self.packed(data).dtype
        if dtype != params_dtype:
            raise ValueError(
                f"{self.prefix}: dtype of the quantization is {dtype} and that of the model {params_dtype}; they must "
                "be the same, so leave dtype out of the quantization"
            )
        loader = extra_weight_attrs.pop("weight_loader")
        weight = ModelWeightParameter(data=data, input_dim=1, output_dim=0, weight_loader=loader)
        layer.register_parameter("weight", weight)
        set_weight_attrs(weight, extra_weight_attrs)
        initialize_online_processing(layer)

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """Packs the weight. vLLM calls this for a layer that was read, and again for all layers."""
        weight: Any = layer.weight
        if not isinstance(weight, PackedWeight):
            packed = nn.Parameter(self.packed(weight.data), requires_grad=False)
            layer.register_parameter("weight", packed)

    def packed(self, weight: Tensor) -> Tensor:
        """A weight as the configuration has it."""
        try:
            return self.how.pack(weight)
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"{self.prefix} can't be quantized: {error}; name it in modules_to_not_convert to leave it as it is"
            ) from error

    def apply(self, layer: nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """(..., in) to (..., out)."""
        invariant = self.how.batch_invariant or environment.VLLM_BATCH_INVARIANT
        weight: Any = layer.weight
        y: Tensor = linear(x, weight, bias, batch_invariant=invariant)
        return y
