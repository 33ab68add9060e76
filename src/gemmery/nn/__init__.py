"""Modules: torch.nn's, with their products done by gemmery, and a swap for models that exist."""

from .linear import Linear, swap

__all__ = ["Linear", "swap"]
