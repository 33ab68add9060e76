"""Kinds of operands: what each says of itself. A new kind is a file here and a loader in `kernels`."""

from .base import Access, Layout, Spec, Traced
from .dense import Dense, DenseAccess
from .packed import Packed
from .pair import Pair
from .scaled import Scaled

__all__ = ["Access", "Dense", "DenseAccess", "Layout", "Packed", "Pair", "Scaled", "Spec", "Traced"]
