"""Kernels for the linear layers of other libraries' checkpoints in vLLM.

vLLM reads the checkpoint with its own classes. For each kind of weights it has a list of kernels, and takes the first
one that can compute a layer.
"""

from __future__ import annotations

from typing import Any

import torch
import vllm.envs as environment
from torch import Tensor, nn
from vllm.model_executor.kernels import linear as lists
from vllm.model_executor.kernels.linear.mixed_precision.MPLinearKernel import MPLinearKernel
from vllm.model_executor.kernels.linear.scaled_mm.BlockScaledMMLinearKernel import (
    Fp8BlockScaledMMLinearKernel,
)
from vllm.model_executor.kernels.linear.scaled_mm.ScaledMMLinearKernel import FP8ScaledMMLinearKernel
from vllm.model_executor.layers.quantization.utils.quant_utils import GroupShape
from vllm.model_executor.parameter import permute_param_layout_
from vllm.platforms import PlatformEnum
from vllm.scalar_type import scalar_types

from ...api import linear
from ...formats.checkpoints.assemble import assemble
from ...formats.checkpoints.words import group_size_of, words_to_codes
from ...formats.scaled import ScaledTensor
from ...formats.tensor import is_group_size
from ...formats.weight import DTYPES
from ...scaled import scaled_matmul

#: Weights of integers, by whether they have zero points; without, the type has the code that stands for 0.
INTEGERS = {
    False: (scalar_types.uint4b8, scalar_types.uint8b128),
    True: (scalar_types.uint4, scalar_types.uint8),
}
#: The compute capability of the oldest GPUs: for 16-bit activations, and for fp8.
AMPERE, ADA = 80, 89

Refusal = tuple[bool, str | None]


class GemmeryIntKernel(MPLinearKernel):  # type: ignore[misc]  # vLLM is not installed for the check
    """int4 and int8 weights with 16-bit activations: GPTQ, AWQ and compressed-tensors."""

    @classmethod
    def get_min_capability(cls) -> int:
        """The oldest GPUs."""
        return AMPERE

    @classmethod
    def can_implement(cls, c: Any) -> Refusal:
        """Whether a layer is one of these, and if not, why."""
        if getattr(c, "has_g_idx", False):
            return False, "columns are in a different order (act-order)"
        known = INTEGERS[c.zero_points]
        if c.weight_type not in known:
            return False, f"the weight is {c.weight_type}; it must be {' or '.join(map(str, known))}"
        if c.act_type not in DTYPES or c.out_type not in (None, c.act_type):
            return (
                False,
                f"activations are {c.act_type} and results {c.out_type}; both must be float16 or bfloat16",
            )
        if c.group_size != -1 and not is_group_size(c.group_size):
            return False, f"group_size is {c.group_size}; it must be a power of two of at least 16"
        return True, None

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """Packs the weight in gemmery's order, in the place of the checkpoint's words; frees scales and zero points."""
        c = self.config
        found: dict[str, Tensor] = {}

        def read(name: str | None, **layout: int) -> Tensor | None:
            if name is None or getattr(layer, name, None) is None:
                return None
            # The base class gives a copy of the parameter, so that the one for reading weights keeps its layout.
            self._transform_param(
                layer, name, lambda x: found.setdefault(name, permute_param_layout_(x, **layout))
            )
            return found[name].data

        words = read(self.w_q_name, input_dim=0, output_dim=1, packed_dim=0)
        scales = read(self.w_s_name, input_dim=0, output_dim=1)
        zeros = read(self.w_zp_name, input_dim=0, output_dim=1, packed_dim=1) if c.zero_points else None
        assert words is not None
        assert scales is not None
        own, bits = type(self).__name__, c.weight_type.size_bits
        size = group_size_of(
            own, c.partition_weight_shape[0], scales.shape[0], None if c.group_size == -1 else c.group_size
        )
        weight = assemble(
            own, words_to_codes(words, bits, 0).T, f"int{bits}", scales.T, group_size=size, dtype=c.act_type,
            zeros=None if zeros is None else words_to_codes(zeros, bits, 1).T,
        )  # fmt: skip
        layer.register_parameter(self.w_q_name, nn.Parameter(weight, requires_grad=False))
        for name in (self.w_s_name, self.w_zp_name):
            if name is not None and getattr(layer, name, None) is not None:
                layer.register_parameter(name, None)

    def apply_weights(self, layer: nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """(..., in) to (..., out)."""
        weight = getattr(layer, self.w_q_name)
        y: Tensor = linear(x, weight, bias, batch_invariant=environment.VLLM_BATCH_INVARIANT)
        return y


def _is_supported(compute_capability: int | None) -> Refusal:
    if compute_capability is not None and compute_capability < ADA:
        return False, f"needs compute capability {ADA} for fp8"
    return True, None


class GemmeryFp8Kernel(FP8ScaledMMLinearKernel):  # type: ignore[misc]
    """fp8 weights and activations, each with a scale per tensor or per row."""

    @classmethod
    def is_supported(cls, compute_capability: int | None = None) -> Refusal:
        """Whether a GPU has instructions for fp8."""
        return _is_supported(compute_capability)

    @classmethod
    def can_implement(cls, c: Any) -> Refusal:
        """Whether a layer has such scales."""
        of_x, of_weight = (key.scale.group_shape for key in (c.activation_quant_key, c.weight_quant_key))
        if not (of_x.is_per_tensor() or of_x.is_per_token()):
            return False, "needs activations with a scale per tensor or per token"
        if not (of_weight.is_per_tensor() or of_weight.is_per_channel()):
            return False, "needs a weight with a scale per tensor or per channel"
        return True, None

    def apply_scaled_mm(
        self, *, A: Tensor, B: Tensor, out_dtype: torch.dtype, As: Tensor, Bs: Tensor, bias: Tensor | None,
        output_shape: list[int],
    ) -> Tensor:  # fmt: skip
        """A (M, K) with scales As times B (K, N) with scales Bs."""
        keys = (self.config.activation_quant_key, self.config.weight_quant_key)
        scales = [
            x.reshape(()) if key.scale.group_shape.is_per_tensor() and x.numel() == 1 else x.reshape(-1, 1)
            for key, x in zip(keys, (As, Bs), strict=True)
        ]
        y: Tensor = scaled_matmul(
            ScaledTensor(A, scales[0]), ScaledTensor(B.t(), scales[1]), bias=bias, out_dtype=out_dtype,
            batch_invariant=environment.VLLM_BATCH_INVARIANT,
        )  # fmt: skip
        return y.view(*output_shape)


class GemmeryFp8BlockKernel(Fp8BlockScaledMMLinearKernel):  # type: ignore[misc]
    """fp8 weights with a scale per 128 x 128 elements, and activations with one per 1 x 128."""

    @classmethod
    def is_supported(cls, compute_capability: int | None = None) -> Refusal:
        """Whether a GPU has instructions for fp8."""
        return _is_supported(compute_capability)

    @classmethod
    def can_implement(cls, config: Any) -> Refusal:
        """Whether a layer has such scales."""
        done, reason = super().can_implement(config)
        if not done:
            return done, reason
        of_x, of_weight = (
            key.scale.group_shape for key in (config.activation_quant_key, config.weight_quant_key)
        )
        if of_x != GroupShape(1, 128) or of_weight != GroupShape(128, 128):
            return False, "needs scales per 1 x 128 and 128 x 128 elements"
        return True, None

    def apply_block_scaled_mm(self, A: Tensor, B: Tensor, As: Tensor, Bs: Tensor) -> Tensor:
        """A (M, K) with scales As times the transpose of B (N, K) with scales Bs."""
        y: Tensor = scaled_matmul(
            ScaledTensor(A, As), ScaledTensor(B, Bs.to(torch.float32)), out_dtype=self.config.out_dtype,
            batch_invariant=environment.VLLM_BATCH_INVARIANT,
        )  # fmt: skip
        return y


#: The kernels of each kind: the word for vLLM's `register_linear_kernel`, its list, and the class.
OF_KIND: dict[str, tuple[tuple[str, str, type], ...]] = {
    "int": (("mp", "_POSSIBLE_KERNELS", GemmeryIntKernel),),
    "fp8": (
        ("fp8", "_POSSIBLE_FP8_KERNELS", GemmeryFp8Kernel),
        ("fp8_block", "_POSSIBLE_FP8_BLOCK_KERNELS", GemmeryFp8BlockKernel),
    ),
}
#: The platforms on which the kernels run.
PLATFORMS = (PlatformEnum.CUDA, PlatformEnum.ROCM)


def put_first(kind: str) -> None:
    """Puts the kernels of a kind before vLLM's own; a second call does nothing.

    vLLM registers other kernels after its own, where they are never reached, so they are moved in its lists.
    """
    for word, name, kernel in OF_KIND[kind]:
        for platform in PLATFORMS:
            known = getattr(lists, name)[platform]
            if kernel not in known:
                lists.register_linear_kernel(kernel, platform, word)
                known.insert(0, known.pop())
