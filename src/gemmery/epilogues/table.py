"""From aten to Triton: what an elementwise operator is in a kernel. Adding an operator is adding a line.

A template's {0}, {1}, ... are its inputs, all in the type that the operator computes in: the accumulator's for floating
point. Functions without a module are those of `kernels.fused`.
"""

from __future__ import annotations

import torch

#: Types that Triton has, by their names there.
TYPES = {
    torch.float16: "tl.float16", torch.bfloat16: "tl.bfloat16", torch.float32: "tl.float32",
    torch.float64: "tl.float64", torch.float8_e4m3fn: "tl.float8e4nv", torch.float8_e5m2: "tl.float8e5",
    torch.int8: "tl.int8", torch.uint8: "tl.uint8", torch.int16: "tl.int16", torch.int32: "tl.int32",
    torch.int64: "tl.int64", torch.bool: "tl.int1",
}  # fmt: skip
#: Operators whose result has the type of their inputs.
ARITHMETIC: dict[str, str] = {
    "add": "{0} + {1}",
    "sub": "{0} - {1}",
    "mul": "{0} * {1}",
    "neg": "-{0}",
    "abs": "tl.abs({0})",
    "relu": "maximum({0}, 0)",
    "maximum": "maximum({0}, {1})",
    "minimum": "minimum({0}, {1})",
    "clamp_min": "maximum({0}, {1})",
    "clamp_max": "minimum({0}, {1})",
    "sign": "sign({0})",
    "remainder": "remainder({0}, {1})",
    "fmod": "fmod({0}, {1})",
}
#: Of these, those with another meaning for booleans; torch rejects the others.
OF_BOOLS: dict[str, str] = {
    "add": "{0} | {1}",
    "mul": "{0} & {1}",
    "maximum": "{0} | {1}",
    "minimum": "{0} & {1}",
    "sign": "{0}",
}
#: Quotients in the type of their inputs, by `rounding_mode`.
QUOTIENTS: dict[str, str] = {"floor": "floor_divide({0}, {1})", "trunc": "trunc_divide({0}, {1})"}
#: Operators whose result is floating point for any inputs.
FLOATING: dict[str, str] = {
    "div": "{0} / {1}",
    "reciprocal": "1.0 / {0}",
    "exp": "exp({0})",
    "exp2": "tl.exp2({0})",
    "expm1": "expm1({0})",
    "log": "tl.log({0})",
    "log2": "tl.log2({0})",
    "log10": "tl.log({0}) * 0.4342944819032518",
    "log1p": "log1p({0})",
    "sqrt": "tl.sqrt({0})",
    "rsqrt": "tl.rsqrt({0})",
    "sin": "tl.sin({0})",
    "cos": "tl.cos({0})",
    "tanh": "tanh({0})",
    "sigmoid": "sigmoid({0})",
    "silu": "silu({0})",
    "softplus": "softplus({0})",
    "erf": "tl.erf({0})",
    "gelu": "gelu({0})",
    "floor": "tl.floor({0})",
    "ceil": "tl.ceil({0})",
    "trunc": "trunc({0})",
}
#: Operators whose result is boolean.
LOGICAL: dict[str, str] = {
    "eq": "{0} == {1}",
    "ne": "{0} != {1}",
    "lt": "{0} < {1}",
    "le": "{0} <= {1}",
    "gt": "{0} > {1}",
    "ge": "{0} >= {1}",
    "isnan": "{0} != {0}",
    "isinf": 'tl.abs({0}) == float("inf")',
}
#: Operators on booleans.
BOOLEAN: dict[str, str] = {
    "logical_and": "{0} & {1}",
    "logical_or": "{0} | {1}",
    "logical_not": "{0} == 0",
    "logical_xor": "{0} != {1}",
    "bitwise_and": "{0} & {1}",
    "bitwise_or": "{0} | {1}",
    "bitwise_not": "{0} == 0",
    "bitwise_xor": "{0} != {1}",
}
#: Of these, those with another meaning for integers.
OF_INTEGERS: dict[str, str] = {
    "bitwise_and": "{0} & {1}",
    "bitwise_or": "{0} | {1}",
    "bitwise_xor": "{0} ^ {1}",
}
#: Operators that only change how a tensor is seen.
VIEWS = (
    "alias", "clone", "detach", "expand", "lift_fresh_copy", "squeeze", "unsqueeze", "view", "_unsafe_view", "reshape",
    "view_of", "contiguous",
)  # fmt: skip
#: Operators that create a tensor of one value.
CONSTANTS = ("full", "full_like", "zeros_like", "ones_like", "scalar_tensor", "zeros", "ones")
#: Row reductions that the kernel returns as one number for each block of columns.
REDUCTIONS = ("sum", "mean", "amax", "amin", "logsumexp")
