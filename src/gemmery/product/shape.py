"""The shape of a product, by torch.matmul's rules, and the user's names for the operands."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ..layout import broadcast_batch

#: Operations whose second operand is a weight (..., N, K).
OF_WEIGHTS = ("linear", "grouped_linear")
#: What to do if the transposed second operand fits.
_TRANSPOSED = {
    "matmul": "; for a weight (N, K), give b.T",
    "linear": "; for a weight (K, N), give weight.T",
    "grouped_linear": "; for weights (G, K, N), give weight.mT",
    "grouped_mm": "; for weights (G, N, K), give mat_b.mT",
}


def transposed_hint(op: str, inner: int, second: Sequence[int]) -> str:
    """The end of a message about unequal inner sizes: what to do if the transposed second operand fits, or nothing."""
    return _TRANSPOSED.get(op, "") if inner in second[-2:] else ""


def operand_names(op: str) -> tuple[str, str, str]:
    """The user's names for the two operands and the addend, for messages."""
    if op in OF_WEIGHTS:
        return "x", "weight", "bias"
    if op == "grouped_mm":
        return "mat_a", "mat_b", "bias"
    return "a", "b", "input" if op == "addmm" else "bias"


def result_shape(op: str, a: Tensor, b: Tensor, packed: bool = False) -> tuple[int, ...]:
    """The shape of `a @ b`; raises ValueError if they do not fit.

    Args:
        packed: whether b stands for the transpose of a packed weight.
    """
    for name, tensor in zip(operand_names(op), (a, b), strict=False):
        if tensor.dim() == 0:
            raise ValueError(f"{op}: {name} is a scalar; it must have at least one dimension")
    inner_a, inner_b = a.shape[-1], b.shape[-2] if b.dim() > 1 else b.shape[0]
    if inner_a != inner_b:
        what = _operands(op, a, b, packed)
        hint = transposed_hint(op, inner_a, b.shape) if not packed and b.dim() == 2 else ""
        raise ValueError(f"{what}: inner sizes {inner_a} and {inner_b} differ{hint}")
    try:
        batch = broadcast_batch(a.shape[:-2], b.shape[:-2])
    except RuntimeError as error:
        what = _operands(op, a, b, packed)
        raise ValueError(f"{what}: batch dimensions do not broadcast") from error
    rows = (a.shape[-2],) if a.dim() > 1 else ()
    cols = (b.shape[-1],) if b.dim() > 1 else ()
    return (*batch, *rows, *cols)


def _operands(op: str, a: Tensor, b: Tensor, packed: bool) -> str:
    """The operands' shapes, for messages."""
    if op == "linear":
        return f"linear: x is {tuple(a.shape)} and weight is {tuple(b.shape[::-1])}, which is (N, K)"
    if packed:
        return f"{op}: a is {tuple(a.shape)} and b is a packed weight {tuple(b.mT.shape)}, which is (N, K)"
    return f"{op}: a is {tuple(a.shape)} and b is {tuple(b.shape)}"
