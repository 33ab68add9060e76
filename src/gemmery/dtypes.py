"""Types of numbers: their short names, what products of them are summed in, and what results can be."""

from __future__ import annotations

from typing import Literal

import torch

#: The precision of products of float32 operands.
Precision = Literal["ieee", "tf32", "tf32x3"]
PRECISIONS: tuple[Precision, ...] = ("ieee", "tf32", "tf32x3")

#: Short names, as they appear in plans, tables and file names.
DTYPE_NAMES: dict[torch.dtype, str] = {
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.float32: "fp32",
    torch.float64: "fp64",
    torch.float8_e4m3fn: "e4m3",
    torch.float8_e5m2: "e5m2",
    torch.int8: "int8",
    torch.int32: "int32",
}
FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)

#: The types of the result of a product of two such matrices; the first is the default.
OUT_DTYPES: dict[torch.dtype, tuple[torch.dtype, ...]] = {
    torch.float16: (torch.float16, torch.float32, torch.bfloat16),
    torch.bfloat16: (torch.bfloat16, torch.float32, torch.float16),
    torch.float32: (torch.float32, torch.float16, torch.bfloat16),
    torch.float64: (torch.float64, torch.float32),
    torch.float8_e4m3fn: (torch.bfloat16, torch.float16, torch.float32),
    torch.float8_e5m2: (torch.bfloat16, torch.float16, torch.float32),
    torch.int8: (torch.int32,),
}


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """The type in which products of `dtype` are summed: fp64 for fp64, int32 for int8, else fp32."""
    return {torch.float64: torch.float64, torch.int8: torch.int32}.get(dtype, torch.float32)
