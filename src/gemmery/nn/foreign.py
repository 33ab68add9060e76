"""Quantized linear layers of other libraries, by their class names and attributes; none of these is imported."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..formats.checkpoints import read_bnb, read_bnb_state, read_fp8, read_torchao, read_weight
from ..formats.checkpoints.bitsandbytes import check_row_order
from ..formats.checkpoints.read import is_torchao
from ..formats.tensor import QuantizedTensor
from ..formats.weight import PackedWeight
from .linear import own_code
from .quantized import QuantizedLinear

#: Parts of names of classes whose kernels store a weight in a backend-specific order.
_REPACKED = (
    "marlin", "exllama", "machete", "bitblas", "gemv", "ipex", "qbits", "hf_kernel", "hfkernel", "cutlass",
)  # fmt: skip
#: fp8 in one byte.
_FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)


@dataclass(frozen=True)
class Foreign:
    """A layer that was recognized.

    Attributes:
        source: the library, for reports.
        read: makes its weight; raises ValueError with the reason if it can't.
        patched: whether the library replaces `forward` of the layer itself.
    """

    source: str
    read: Callable[[], QuantizedTensor]
    patched: bool = False


def recognise(module: nn.Module) -> Foreign | None:
    """A quantized linear layer of a library, or None.

    Example:
        >>> import torch
        >>> recognise(torch.nn.Linear(4, 4)) is None
        True
        >>> layer = torch.nn.Module()
        >>> layer.qweight, layer.qzeros, layer.scales = (torch.zeros(4, 4) for _ in range(3))
        >>> recognise(layer).source
        'GPTQ or AWQ'
    """
    own = _own(module)
    if "qweight" in own and "scales" in own:
        return Foreign("GPTQ or AWQ", lambda: _grouped(module))
    weight: Any = own.get("weight")
    # Embeddings are quantized as well.
    is_linear = hasattr(module, "in_features") and hasattr(module, "out_features")
    if not is_linear:
        return None
    if hasattr(weight, "quant_state") and hasattr(weight, "quant_type"):
        return Foreign("bitsandbytes, 4 bits", lambda: _four_bits(weight))
    if hasattr(weight, "SCB") and hasattr(module, "state"):
        return Foreign("bitsandbytes, 8 bits", lambda: _eight_bits(module))
    if "weight_scale_inv" in own and weight is not None:
        return Foreign("fp8", lambda: _fp8(module))
    if is_torchao(weight):
        return Foreign("torchao", lambda: read_torchao(weight))
    is_packed = "weight_packed" in own or "weight_scale_2" in own
    if "weight_scale" in own and (is_packed or (weight is not None and weight.dtype in (torch.int8, *_FP8))):
        return Foreign("compressed-tensors", lambda: _compressed(module), patched=True)
    return None


def replacement(module: nn.Module, found: Foreign, batch_invariant: bool) -> QuantizedLinear | str:
    """gemmery's layer for a recognized one, or why there is none."""
    code = own_code(module)
    if code is not None and not (found.patched and code == "its forward was replaced"):
        return code
    if module._modules:
        return f"it is {found.source}'s with additional children: {', '.join(module._modules)}"
    if getattr(module, "adapter", None) is not None:
        return f"it is {found.source}'s with an adapter"
    try:
        weight = found.read()
        _check_sizes(module, weight)
        layer = QuantizedLinear(weight, getattr(module, "bias", None), batch_invariant=batch_invariant)
    except (ValueError, TypeError) as error:
        return f"it is {found.source}'s, and {error}"
    return layer.train(module.training)


def _check_sizes(module: nn.Module, weight: QuantizedTensor) -> None:
    # AutoGPTQ has no underscores.
    rows, columns = (
        getattr(module, name, getattr(module, name.replace("_", ""), size))
        for name, size in zip(("out_features", "in_features"), weight.shape, strict=True)
    )
    if (rows, columns) != tuple(weight.shape):
        raise ValueError(f"its sizes are {(rows, columns)}, and those of the weight {tuple(weight.shape)}")


def _own(module: nn.Module) -> dict[str, Tensor]:
    """A module's parameters and buffers, and tensors that are plain attributes, by name; computes none."""
    kept: Mapping[str, Any] = {**module.__dict__, **module._buffers, **module._parameters}
    return {name: x for name, x in kept.items() if isinstance(x, Tensor)}


def _grouped(module: nn.Module) -> QuantizedTensor:
    name = type(module).__name__
    # ExLlama's kernels keep a handle to the weight, which they have shuffled in place.
    handle = next((x for x in ("q_handle", "q4") if getattr(module, x, None) is not None), None)
    if handle is not None or any(part in name.lower() for part in _REPACKED):
        raise ValueError(
            f"the kernel of {name} stores the weight in a backend-specific order; load it with another backend"
        )
    version = getattr(module, "qzero_format", None)
    second = version() == 2 if callable(version) else False
    config = {
        "checkpoint_format": "gptq_v2" if second else "gptq",
        "group_size": getattr(module, "group_size", None),
    }
    tensors = _own(module)
    if "g_idx" in tensors and not tensors["g_idx"].numel():
        del tensors["g_idx"]
    return _quantized(read_weight(tensors, "", config))


def _four_bits(weight: Any) -> QuantizedTensor:
    if weight.quant_state is None:
        raise ValueError("its weight is not quantized yet; move the layer to its device first")
    return read_bnb_state(weight.data, weight.quant_state)


def _eight_bits(module: Any) -> QuantizedTensor:
    # The first call moves both from the weight into the state.
    largest = getattr(module.weight, "SCB", None)
    largest = getattr(module.state, "SCB", None) if largest is None else largest
    if largest is None:
        raise ValueError("its weight is not quantized yet; move the layer to its device first")
    if getattr(module.state, "CxB", None) is not None:
        # The first call on a GPU puts these in the weight's place.
        check_row_order("bitsandbytes", getattr(module.state, "formatB", "row"))
    return read_bnb({"weight": module.weight.data, "SCB": largest})


def _fp8(module: Any) -> QuantizedTensor:
    if getattr(module, "n_groups", 1) != 1:
        raise ValueError(f"it multiplies {module.n_groups} groups of its input separately")
    weight, scale = module.weight.detach(), module.weight_scale_inv.detach()
    if weight.dtype not in _FP8:
        raise ValueError(f"its weight is {weight.dtype}; it must be in fp8")
    size = getattr(module, "block_size", (128, 128))
    return read_fp8(weight, scale, block=None if size is None else (size[0], size[1]))


def _compressed(module: nn.Module) -> QuantizedTensor:
    scheme = getattr(getattr(module, "quantization_scheme", None), "weights", None)
    weights = {name: getattr(scheme, name, None) for name in ("group_size", "block_structure", "num_bits")}
    return _quantized(read_weight(_own(module), "", {"config_groups": {"group_0": {"weights": weights}}}))


def _quantized(weight: PackedWeight) -> QuantizedTensor:
    assert isinstance(weight, QuantizedTensor)  # layers of sparse weights are not recognized
    return weight
