"""The precision of float32 products by torch's setting."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from .dtypes import Precision

#: The precisions that a user may select: "torch" follows `torch.backends.cuda.matmul` at the call.
AskedPrecision = Literal["ieee", "tf32", "tf32x3", "torch"]


def resolved(asked: AskedPrecision, a: Any) -> Precision:
    """The precision of a product whose first operand is `a`, a tensor."""
    if asked != "torch":
        return asked
    # Reading the setting takes a microsecond, and it is about float32 alone.
    return _of_torch() if isinstance(a, Tensor) and a.dtype == torch.float32 else "ieee"


def _of_torch() -> Precision:
    """TF32 where torch allows it, by `torch.set_float32_matmul_precision` or `torch.backends`; else IEEE."""
    return "tf32" if torch.backends.cuda.matmul.fp32_precision == "tf32" else "ieee"


# As `torch.compiler.assume_constant_result` does, which imports the compiler. Compiled code is guarded by the setting.
_of_torch._dynamo_marked_constant = True  # type: ignore[attr-defined]
