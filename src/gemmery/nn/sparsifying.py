"""Pruning the linear layers and the experts of a model."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from ..formats.sparse import PATTERN, ROWS, Method, SparseTensor
from ..formats.sparse import sparsify as sparsify_tensor
from .replacing import Packing, replace
from .sparse import PrunedLinear
from .swap import Swapped


def sparsify(
    model: nn.Module, pattern: str = PATTERN, *, method: Method = "magnitude", skip: Iterable[str] = ("lm_head",),
    batch_invariant: bool = False,
) -> Swapped:  # fmt: skip
    """Replace the plain linear layers and the experts inside a model by 2:4 sparse ones, in place.

    Every torch.nn.Linear and gemmery.nn.Linear becomes a gemmery.nn.PrunedLinear and keeps its bias. A
    gemmery.nn.SparseLinear becomes the result of its `to_inference`, for any `method`. Layers that share a weight
    share the pruned weight. Experts (gemmery.nn.Experts and those that `swap` replaces) become gemmery.nn.Experts with
    sparse weights.

    The report gives a reason for everything that is left in place: layers that `skip` names, layers whose weight
    another module shares, such as an embedding, layers with code that a replacement would lose, experts whose
    activation can't be fused, and layers whose in_features is not a multiple of 4.

    A model that was trained dense loses accuracy when half of its weights are dropped. Train it further with
    `gemmery.nn.SparseLinear`, or prune it with a method that takes activations into account, and then use
    `method="as_is"`.

    Args:
        model: of any floating-point type and on any device. Weights that do not have 16 bits become bfloat16.
        pattern, method: as for `gemmery.sparsify`.
        skip: names of layers or experts, or of modules that contain them, that are left: whole parts of qualified
            names, in which * stands for any text, see `quantize`.
        batch_invariant: see `gemmery.matmul`.

    Returns:
        The modules that were replaced and left; its `undo()` restores the model. The replaced weights take memory as
            long as this report lives.

    Raises:
        TypeError: `model` is not a module, or `skip` is a string.
        ValueError: there is no such pattern or method.

    Example:
        >>> import torch, gemmery.nn
        >>> model = torch.nn.ModuleDict({"up": torch.nn.Linear(64, 32), "lm_head": torch.nn.Linear(32, 100)})
        >>> print(gemmery.nn.sparsify(model, "2:4"))
        1 replaced: 1 Linear
        1 left
          lm_head: skipped by name ('lm_head')
    """

    def pack(weight: torch.Tensor) -> SparseTensor:
        return sparsify_tensor(weight, pattern, method=method)

    packing = Packing("sparsify", pack, PrunedLinear, skip, batch_invariant, ROWS, trained=True)
    packing.check(model)
    pack(torch.zeros(4, 4))  # for its errors about arguments
    return replace(model, packing)
