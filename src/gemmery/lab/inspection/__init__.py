"""Analyzing compiled kernels: the resources that they take, and how their K loop runs. Needs no GPU.

`inspect` compiles for any target of the architecture table and reads the machine code; `gemmery inspect` shows it.
"""

from .report import Inspection, inspect

__all__ = ["Inspection", "inspect"]
