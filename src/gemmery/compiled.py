"""Products with an epilogue in code that torch.compile traces.

Imported there alone: what marks a function for the compiler imports the compiler.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .call import Factor, added, factors
from .dispatch import Options, OutTypes, lowered, result_dtype, right_factor
from .dtypes import accumulator
from .epilogues.function import Epilogue, named
from .fused_ops import FROM_COMPILED, flatten, runs_again, type_text
from .ops import gemm
from .problem import config_text
from .results import returned
from .unfused import behind


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]  # torch has no types for it
def held_name(name: str, device: str) -> str:
    """Under which name an operator in compiled code knows an epilogue; "" where torch has to compile the function.

    Args:
        device: the kind of device on which gradients are asked for; "" for none.
    """
    epilogue: Epilogue[Any, Any] = named(name)
    captured = epilogue.captured
    if device and not captured.count and not runs_again(captured, torch.device(device)):
        return ""
    return epilogue.for_compiled_code().name


def compiled(
    op: str, a: Tensor, b: Factor, bias: Factor | None, epilogue: Any, args: Sequence[Any], out: Tensor | None,
    out_dtype: OutTypes, how: Options,
) -> Any:  # fmt: skip
    """A call in code that torch.compile traces."""
    if not isinstance(epilogue, Epilogue):
        raise TypeError(
            f"{op}: under torch.compile, epilogue must be what gemmery.epilogue(f) returned, made outside of "
            f"compiled code"
        )
    if out is not None:
        raise ValueError(f"{op}: out= with an epilogue can't be compiled; use what is returned")
    left, *right = [right_factor(op, x) for x in factors(op, b)]
    biases = added(op, bias)
    if torch.is_autocast_enabled(a.device.type):
        dtype = torch.get_autocast_dtype(a.device.type)
        a, left, *rest = [lowered(x, dtype) for x in (a, left, *right, *biases)]
        right, biases = rest[: len(right)], rest[len(right) :]
    tensors, numbers, kinds = flatten([*biases, *args])
    grad = torch.is_grad_enabled() and any([x.requires_grad for x in (a, left, *right, *tensors)])
    name = held_name(epilogue.name, a.device.type if grad else "")
    if not name:
        options = (accumulator(a.dtype), *how[1:4], config_text(how.config))
        halves = [gemm(a, x, None, 1, 1, *options) for x in (left, *right)]
        product = halves[0] if len(halves) == 1 else torch.cat(halves, dim=-1)
        return behind(op, product, biases, epilogue, args, result_dtype(op, a, left, None), out_dtype)
    results = torch.ops.gemmery.fused(
        a, left, right[0] if right else None, tensors, numbers, FROM_COMPILED + kinds, name, len(biases),
        type_text(out_dtype), how.precision, how.fast_accum, how.batch_invariant, config_text(how.config), [], [], grad,
    )  # fmt: skip
    kept = list(results)[: len(results) - 1] if grad else list(results)
    return returned(kept, len(kept) > 1)
