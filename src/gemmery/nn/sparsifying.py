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

    Every torch.nn.Linear and gemmery.nn.Linear becomes a gemmery.nn.PrunedLinear and keeps its bias; a
    gemmery.nn.SparseLinear becomes what its `to_inference` gives, whatever `method` says. Layers that share a weight
    share the pruned one. Experts, which are gemmery.nn.Experts and those that `swap` replaces, become
    gemmery.nn.Experts with sparse weights. Left alone, each with a reason in the report, are those that `skip` names,
    those whose weight is also another module's, such as an embedding's, those with code that a replacement would lose,
    experts whose activation can't be part of a product, and those whose in_features are no multiple of 4.

    A model that was trained dense loses accuracy when half of its weights are dropped. Train it further with
    `gemmery.nn.SparseLinear`, or prune it with a method that looks at activations, and then use `method="as_is"`.

    Args:
        model: of any floating type and on any device. Weights that are not of 16 bits become bfloat16.
        pattern, method: as for `gemmery.sparsify`.
        skip: names of layers or experts, or of modules in which these are left: whole parts of qualified names, in
            which * stands for anything, see `quantize`.
        batch_invariant: see `gemmery.matmul`.

    Returns:
        What was replaced and what was left, with a way back. As long as this report lives, so do the weights that were
        replaced.

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
