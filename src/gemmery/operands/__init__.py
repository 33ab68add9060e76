"""Kinds of operands, each with all that the library asks of it. A new kind is a file here and a loader in `kernels`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from .adapted import Adapted, AdaptedOperand, WithAdapter
from .awaiting import Arrivals, Awaiting, AwaitingOperand, AwaitingRows
from .base import Access, Layout, Operand, Spec, Traced
from .blocks import BlocksOperand, PickedOperand, Sampled
from .dense import Dense, DenseAccess, DenseOperand
from .gathered import Gathered, GatheredOperand
from .packed import Packed, PackedOperand
from .pair import Pair, PairOperand
from .ragged import Groups, Ragged, RaggedOperand
from .row_scaled import RowScaledOperand
from .scaled import Scaled, ScaledOperand
from .sparse import Sparse, SparseOperand
from .summed import Exchange, Summed, SummedOperand, SummedOver

__all__ = [
    "Access", "Adapted", "AdaptedOperand", "Arrivals", "Awaiting", "AwaitingOperand", "AwaitingRows", "BlocksOperand",
    "Dense", "DenseAccess", "DenseOperand", "Exchange", "Gathered", "GatheredOperand",
    "Groups", "Layout", "Operand", "Packed", "PackedOperand", "Pair", "PairOperand", "PickedOperand", "Ragged",
    "RaggedOperand", "RowScaledOperand", "Sampled", "Scaled", "ScaledOperand", "Sparse", "SparseOperand", "Spec",
    "Summed", "SummedOperand", "SummedOver", "Traced", "WithAdapter", "rebuild",
]  # fmt: skip

#: The functions that rebuild an operand, by the first word of its text.
_KINDS: dict[str, Callable[[Sequence[str], Sequence[Tensor], Sequence[int]], Operand]] = {
    "blocks": BlocksOperand.rebuild,
    "dense": lambda facts, tensors, sizes: DenseOperand(tensors[0], None, tensors[1:]),
    "gathered": lambda facts, tensors, sizes: GatheredOperand(tensors[0], tensors[1]),
    "pair": lambda facts, tensors, sizes: PairOperand(tensors[0], tensors[1], False, tensors[2:]),
    "packed": PackedOperand.rebuild,
    "picked": PickedOperand.rebuild,
    "ragged": RaggedOperand.rebuild,
    "rows": RowScaledOperand.rebuild,
    "scaled": ScaledOperand.rebuild,
    "sparse": SparseOperand.rebuild,
}


def rebuild(text: str, tensors: Sequence[Tensor], sizes: Sequence[Any]) -> Operand:
    """Rebuilds the operand from the text of `Operand.text`, its tensors and `Operand.sizes`."""
    kind, *facts = text.split(":")
    return _KINDS[kind](facts, tensors, sizes)
