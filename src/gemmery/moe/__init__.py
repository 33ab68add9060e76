"""Mixtures of experts: routing of tokens to expert groups, the experts, and the weighted sum of their results."""

from .experts import clamped_swiglu, experts, gate
from .routing import Routing, combine, route

__all__ = ["Routing", "clamped_swiglu", "combine", "experts", "gate", "route"]
