"""Looking into compiled kernels: what they take of a GPU, and how their loop along K runs. Needs no GPU.

`inspect` compiles for any target of the architecture table and reads the machine code; `gemmery inspect` shows it.
"""

from .report import Inspection, inspect

__all__ = ["Inspection", "inspect"]
