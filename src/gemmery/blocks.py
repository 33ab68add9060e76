"""Products that are computed only at the blocks of a block-sparse matrix: `gemmery.sampled_addmm`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .epilogues.function import epilogue
from .formats.blocks import is_blocks, stored
from .operands.blocks import Sampled
from .precision import AskedPrecision, resolved
from .problem import Config
from .product.check import check_device, check_not_packed, check_scalars, check_tensor
from .product.run import product
from .product.seen import is_followed
from .product.spec import NONE, Functions, Number

_OP = "sampled_addmm"


@epilogue
def _scaled(acc: Tensor, alpha: Any) -> Tensor:
    made: Tensor = alpha * acc
    return made


@epilogue
def _added(acc: Tensor, values: Tensor, alpha: Any, beta: Any) -> Tensor:
    made: Tensor = alpha * acc + beta * values
    return made


def sampled_addmm(
    input: Tensor,
    a: Tensor,
    b: Tensor,
    *,
    beta: Number = 1,
    alpha: Number = 1,
    out: None = None,
    precision: AskedPrecision = "ieee",
    batch_invariant: bool = False,
    config: Config | dict[str, Any] | str | None = None,
) -> Tensor:
    """`beta * input + alpha * (a @ b)`, only at the blocks of `input`, as torch.sparse.sampled_addmm.

    Args:
        input: (M, N), block-sparse: a tensor in torch's BSR or BSC layout, with square blocks of 16, 32, 64 or 128
            rows. If beta is 0, its values are not read, even if they contain NaN.
        a: (M, K), any strides, in the type of `input`.
        b: (K, N).
        beta, alpha: Python numbers.
        out: not supported.
        precision, batch_invariant, config: see `gemmery.matmul`.

    Returns:
        A matrix in the type and the layout of `input`, with the same indices. `input`, `a` and `b` receive gradients.

    Raises:
        ValueError: shapes or devices do not fit, or there is no kernel for blocks of this size.
        TypeError: a type is not supported, or two types differ.

    Example:
        >>> import torch, gemmery
        >>> blocks = torch.ones(2, 16, 16)
        >>> pattern = torch.sparse_bsr_tensor([0, 1, 2], [1, 0], blocks, size=(32, 32), check_invariants=True)
        >>> y = gemmery.sampled_addmm(pattern, torch.ones(32, 8), torch.ones(8, 32), beta=0)
        >>> y.to_dense()[0, :20:5], y.to_dense()[0, 16:].sum()
        (tensor([0., 0., 0., 0.]), tensor(128.))
    """
    if not is_blocks(input):
        given = input.layout if isinstance(input, Tensor) else f"a {type(input).__name__}"
        raise TypeError(
            f"{_OP}: input is {given}; it must be block-sparse, torch.sparse_bsr or torch.sparse_bsc"
        )
    for name, x in (("a", a), ("b", b)):
        check_tensor(_OP, name, x)
        check_not_packed(_OP, name, x, "the second operand of gemmery.linear")
        if x.dim() != 2:
            raise ValueError(f"{_OP}: {name} is {tuple(x.shape)}; it must have 2 dimensions")
    if out is not None:
        raise ValueError(f"{_OP}: out= is not supported; use the returned tensor")
    if is_followed():
        # The compiler fails on objects made from sparse tensors.
        from .product.compiled import uncompiled

        made: Tensor = uncompiled(
            sampled_addmm, input, a, b, beta=beta, alpha=alpha, precision=precision, batch_invariant=batch_invariant,
            config=config,
        )  # fmt: skip
        return made
    pattern = stored(_OP, "input", input)
    if tuple(input.shape) != (a.shape[0], b.shape[1]):
        raise ValueError(
            f"{_OP}: a is {tuple(a.shape)} and b is {tuple(b.shape)}; input is {tuple(input.shape)}, and must be "
            f"{(a.shape[0], b.shape[1])}"
        )
    if a.shape[1] != b.shape[0]:
        # Not left to the product, which is one of a batch of blocks and names their shapes.
        raise ValueError(
            f"{_OP}: a is {tuple(a.shape)} and b is {tuple(b.shape)}: inner sizes {a.shape[1]} and {b.shape[0]} differ"
        )
    if input.dtype != a.dtype:
        raise TypeError(f"{_OP}: input is {input.dtype} and a is {a.dtype}; they must have the same type")
    check_device(_OP, "input", pattern.values, a)
    check_scalars(_OP, a, alpha, beta)
    options = (input.dtype, resolved(precision, a), False, batch_invariant, config)
    functions, bias = NONE, None
    if beta == 0:
        functions = NONE if alpha == 1 else Functions(_scaled, (float(alpha),))
    elif alpha == 1 and beta == 1:
        bias = pattern.values
    else:
        functions = Functions(_added, (pattern.values, float(alpha), float(beta)))
    values = product(_OP, Sampled(a, pattern), Sampled(b, pattern), bias, functions, None, options)
    return torch.sparse_compressed_tensor(
        # Without views of `input`, which the result would keep in memory.
        pattern.compressed.data,
        pattern.plain.data,
        values,
        size=input.shape,
        layout=input.layout,
        check_invariants=False,
    )
