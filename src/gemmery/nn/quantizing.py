"""Quantising the linear layers and the experts of a model."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from ..formats.base import Format
from ..formats.packing import STRIP
from ..formats.quantize import Scale
from ..formats.quantize import quantize as quantize_tensor
from ..formats.tensor import QuantizedTensor
from .quantized import QuantizedLinear
from .replacing import Packing, replace
from .swap import Swapped


def quantize(
    model: nn.Module, format: Format | str = "int4", *, group_size: int | None = None,
    skip: Iterable[str] = ("lm_head",), symmetric: bool = True, scale: Scale = "channel",
    dtype: torch.dtype | None = None, batch_invariant: bool = False,
) -> Swapped:  # fmt: skip
    """Replace the plain linear layers and the experts inside a model by quantised ones, rounded to nearest, in place.

    Every torch.nn.Linear, gemmery.nn.Linear and Hugging Face Conv1D becomes a gemmery.nn.QuantizedLinear and keeps its
    bias. Layers that share a weight share the quantised one. A block that `swap` has fused stays fused: its gate and up
    become one layer `gate_up_proj`, whose packed weight has the rows of both, if each has a multiple of 16. Experts,
    which are gemmery.nn.Experts and those that `swap` replaces, become gemmery.nn.Experts with packed weights. Left
    alone, each with a reason in the report, are those that `skip` names, those whose weight is also another module's,
    such as an embedding's, those with code that a replacement would lose, experts whose activation can't be part of a
    product, and those whose weight the format can't hold.

    To quantise a model of transformers while it is loaded, see `gemmery.nn.transformers.GemmeryConfig`.

    Args:
        model: of any floating type and on any device.
        format, group_size, symmetric, scale, dtype: as for `gemmery.quantize`.
        skip: names of layers or experts, or of modules in which these are left: whole parts of qualified names, in
            which * stands for anything. "lm_head" is that at any depth, "layers.0" all of the first layer. The report
            says which others than "lm_head" name no layer.
        batch_invariant: see `gemmery.matmul`.

    Returns:
        What was replaced and what was left, with a way back. As long as this report lives, so do the weights that were
        replaced.

    Raises:
        TypeError: `model` is not a module, or `skip` is a string.
        ValueError: there is no such format, or it does not go with the other arguments.

    Example:
        >>> import torch, gemmery.nn
        >>> model = torch.nn.ModuleDict({"up": torch.nn.Linear(64, 32), "lm_head": torch.nn.Linear(32, 100)})
        >>> print(gemmery.nn.quantize(model, "int4", group_size=32))
        1 replaced: 1 Linear
        1 left
          lm_head: skipped by name ('lm_head')
    """
    options: dict[str, Any] = {
        "group_size": group_size,
        "symmetric": symmetric,
        "scale": scale,
        "dtype": dtype,
    }

    def pack(weight: torch.Tensor) -> QuantizedTensor:
        return quantize_tensor(weight, format, **options)

    packing = Packing("quantize", pack, QuantizedLinear, skip, batch_invariant, STRIP)
    packing.check(model)
    quantize_tensor(torch.zeros(16, 16), format, **options)  # for its errors about arguments
    return replace(model, packing)
