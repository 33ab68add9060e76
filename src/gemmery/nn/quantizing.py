"""Quantizing the linear layers and the experts of a model."""

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
    """Replace the plain linear layers and the experts inside a model by quantized ones, rounded to nearest, in place.

    Every torch.nn.Linear, gemmery.nn.Linear and Hugging Face Conv1D becomes a gemmery.nn.QuantizedLinear and keeps its
    bias. Layers that share a weight share the quantized weight. A block that `swap` has fused stays fused: its gate and
    up become one layer `gate_up_proj`, whose packed weight contains the rows of both, if each has a multiple of 16
    rows. So do the query, key and value projections of attention in a model that `swap` has changed, as `qkv_proj`.
    Experts (gemmery.nn.Experts and those that `swap` replaces) become gemmery.nn.Experts with packed weights.

    The report gives a reason for everything that is left in place: layers that `skip` names, layers whose weight
    another module shares, such as an embedding, layers with code that a replacement would lose, experts whose
    activation can't be fused, and layers whose weight does not fit the format.

    To quantize a model of transformers while it is loaded, see `gemmery.nn.transformers.GemmeryConfig`.

    Args:
        model: of any floating-point type and on any device.
        format, group_size, symmetric, scale, dtype: as for `gemmery.quantize`.
        skip: names of layers or experts, or of modules that contain them, that are left: whole parts of qualified
            names, in which * stands for any text. "lm_head" matches at any depth, "layers.0" everything in the first
            layer. The report lists names other than "lm_head" that match no layer.
        batch_invariant: see `gemmery.matmul`.

    Returns:
        The modules that were replaced and left; its `undo()` restores the model. The replaced weights take memory as
            long as this report lives.

    Raises:
        TypeError: `model` is not a module, or `skip` is a string.
        ValueError: there is no such format, or it does not match the other arguments.

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
