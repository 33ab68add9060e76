"""Products of groups: cases with their meaning in float64, for every device."""

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch.nn import functional as F

import gemmery
from gemmery import epilogues

#: The sizes of four groups, two of them empty, and how many rows lie behind the last one.
COUNTS, BEHIND = (5, 0, 17, 0, 12), 4
ROWS, GROUPS = sum(COUNTS) + BEHIND, len(COUNTS)


def ends_of(counts, device="cpu"):
    return torch.tensor(counts, device=device).cumsum(0).to(torch.int32)


def rows_of(x, offs, function):
    """`function(rows, group)` of each group's rows, and zeros for rows behind the last one."""
    ends = [0, *offs.tolist()]
    made = [function(x[i:j], g) for g, (i, j) in enumerate(pairwise(ends))]
    return torch.cat([*made, made[0].new_zeros(x.shape[0] - ends[-1], made[0].shape[1])])


def ranges_of(a, b, offs):
    """The products of ranges of K."""
    ends = [0, *offs.tolist()]
    return torch.stack([a[:, i:j] @ b[i:j] for i, j in pairwise(ends)])


@dataclass(frozen=True)
class Case:
    """A product of groups.

    Attributes:
        shapes: of its inputs, of which gradients are asked for. M, N and K stand for sizes.
        product: gemmery's, of the inputs, and the ends of groups, and numbers of rows.
        meaning: the same in torch, for inputs of float64.
    """

    shapes: tuple[str, ...]
    product: Any
    meaning: Any

    def inputs(self, sizes, dtype, device="cpu", seed=0):
        known = {"R": ROWS, "G": GROUPS, "1": 1, "T": 9, **sizes}
        torch.manual_seed(seed)
        return [
            torch.randn([known[x] for x in shape.split()], dtype=torch.float64).to(dtype).to(device)
            for shape in self.shapes
        ]


def numbers(device="cpu"):
    """Which row is gathered, and where it goes, for each row of a product."""
    made = torch.Generator().manual_seed(3)
    gather = torch.randint(9, (ROWS,), generator=made, dtype=torch.int32).to(device)
    return gather, torch.randperm(ROWS, generator=made).to(torch.int32).to(device)


def scattered(y, places):
    return torch.zeros_like(y).index_copy(0, places.long(), y)


def gated(gate, up):
    return F.silu(gate) * up


X, W, B, V = "R K", "G N K", "G N", "N"
CASES = {
    "bare": Case(
        (X, W),
        lambda x, w, offs, at: gemmery.grouped_linear(x, w, offs=offs),
        lambda x, w, offs, at: rows_of(x, offs, lambda r, g: r @ w[g].T),
    ),
    "bias": Case(
        (X, W, B),
        lambda x, w, b, offs, at: gemmery.grouped_linear(x, w, b, offs=offs),
        lambda x, w, b, offs, at: rows_of(x, offs, lambda r, g: r @ w[g].T + b[g]),
    ),
    "one bias": Case(
        (X, W, V),
        lambda x, w, b, offs, at: gemmery.grouped_linear(x, w, b, offs=offs),
        lambda x, w, b, offs, at: rows_of(x, offs, lambda r, g: r @ w[g].T + b),
    ),
    "bias and silu": Case(
        (X, W, B),
        lambda x, w, b, offs, at: gemmery.grouped_linear(x, w, b, offs=offs, epilogue=epilogues.silu),
        lambda x, w, b, offs, at: rows_of(x, offs, lambda r, g: F.silu(r @ w[g].T + b[g])),
    ),
    "gather": Case(
        ("T K", W, B),
        lambda x, w, b, offs, at: gemmery.grouped_linear(x, w, b, offs=offs, gather=at[0]),
        lambda x, w, b, offs, at: rows_of(x[at[0].long()], offs, lambda r, g: r @ w[g].T + b[g]),
    ),
    "scatter": Case(
        (X, W, B),
        lambda x, w, b, offs, at: gemmery.grouped_linear(
            x, w, b, offs=offs, scatter=at[1], epilogue=epilogues.silu
        ),
        lambda x, w, b, offs, at: scattered(
            rows_of(x, offs, lambda r, g: F.silu(r @ w[g].T + b[g])), at[1]
        ),
    ),
    "row scale": Case(
        (X, W, B, "R"),
        lambda x, w, b, s, offs, at: gemmery.grouped_linear(
            x, w, b, offs=offs, row_scale=s, epilogue=epilogues.silu
        ),
        lambda x, w, b, s, offs, at: rows_of(x, offs, lambda r, g: F.silu(r @ w[g].T + b[g])) * s[:, None],
    ),
    "gather, swiglu of a stack, scatter, row scale": Case(
        ("T K", "G 2N K", "R"),
        lambda x, w, s, offs, at: gemmery.grouped_linear(
            x, w, offs=offs, gather=at[0], scatter=at[1], row_scale=s, epilogue=epilogues.swiglu
        ),
        lambda x, w, s, offs, at: scattered(
            rows_of(x[at[0].long()], offs, lambda r, g: gated(*(r @ w[g].T).chunk(2, -1))) * s[:, None], at[1]
        ),
    ),
    "swiglu of a pair": Case(
        (X, W, W, B, B),
        lambda x, w, u, b, c, offs, at: gemmery.grouped_linear(
            x, (w, u), (b, c), offs=offs, epilogue=epilogues.swiglu
        ),
        lambda x, w, u, b, c, offs, at: rows_of(
            x, offs, lambda r, g: gated(r @ w[g].T + b[g], r @ u[g].T + c[g])
        ),
    ),
    "swiglu of alternating rows": Case(
        (X, "G 2N K", "G 2N"),
        lambda x, w, b, offs, at: gemmery.grouped_linear(
            x, (w[:, 0::2], w[:, 1::2]), (b[:, 0::2], b[:, 1::2]), offs=offs, epilogue=epilogues.swiglu
        ),
        lambda x, w, b, offs, at: rows_of(
            x, offs, lambda r, g: gated(r @ w[g, 0::2].T + b[g, 0::2], r @ w[g, 1::2].T + b[g, 1::2])
        ),
    ),
    "swiglu of alternating columns": Case(
        (X, "G K 2N"),
        lambda x, w, offs, at: gemmery.grouped_mm(
            x, (w[..., 0::2], w[..., 1::2]), offs=offs, epilogue=epilogues.swiglu
        ),
        lambda x, w, offs, at: rows_of(x, offs, lambda r, g: gated(r @ w[g, :, 0::2], r @ w[g, :, 1::2])),
    ),
    "arguments": Case(
        (X, W, "G 1 N", "R N"),
        lambda x, w, s, r, offs, at: gemmery.grouped_linear(
            x, w, offs=offs, epilogue=lambda y, s, r: torch.tanh(y) * s + r, args=(s, r)
        ),
        lambda x, w, s, r, offs, at: rows_of(
            torch.cat([x, r], 1), offs, lambda y, g: torch.tanh(y[:, : x.shape[1]] @ w[g].T) * s[g] + y[:, x.shape[1] :]
        ),
    ),
    "K by N": Case(
        (X, "G K N"),
        lambda x, w, offs, at: gemmery.grouped_mm(x, w, offs=offs),
        lambda x, w, offs, at: rows_of(x, offs, lambda r, g: r @ w[g]),
    ),
    "ranges of K": Case(
        ("M R", "R N"),
        lambda a, b, offs, at: gemmery.grouped_mm(a, b, offs=offs),
        lambda a, b, offs, at: ranges_of(a, b, offs),
    ),
    "groups of columns": Case(
        ("G M K", "K R"),
        lambda a, b, offs, at: gemmery.grouped_mm(a, b, offs=offs),
        lambda a, b, offs, at: rows_of(b.T, offs, lambda r, g: r @ a[g].T).T,
    ),
    "batch": Case(
        ("G M K", "G K N"),
        lambda a, b, offs, at: gemmery.grouped_mm(a, b),
        lambda a, b, offs, at: a @ b,
    ),
}  # fmt: skip


def compared(case, sizes, dtype, device="cpu", seed=0, gradients=True):
    """A case's result and gradients, and the same in float64: pairs of tensors."""
    inputs = case.inputs({**sizes, "2N": 2 * sizes["N"]}, dtype, device, seed)
    offs, at = ends_of(COUNTS, device), numbers(device)
    ours = [x.clone().requires_grad_(gradients) for x in inputs]
    theirs = [x.double().requires_grad_(gradients) for x in inputs]
    y, z = case.product(*ours, offs, at), case.meaning(*theirs, offs, at)
    pairs = [(y.detach(), z.detach())]
    if gradients:
        grad = torch.randn(z.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(5)).to(y)
        y.backward(grad)
        z.backward(grad.double())
        pairs += [(a.grad, b.grad) for a, b in zip(ours, theirs, strict=True)]
    return pairs


def close(ours, theirs, dtype):
    """Whether a result is right to the precision of its type."""
    eps = {torch.float32: 2e-5, torch.float64: 1e-10, torch.bfloat16: 3e-2, torch.float16: 6e-3}[dtype]
    return ours.shape == theirs.shape and bool(
        ((ours.double() - theirs).abs() <= eps * max(1.0, theirs.abs().max().item())).all()
    )


#: Weights whose gradients are added to what is there.
ACCUMULATED = ("a stack", "a pair", "alternating rows", "K by N", "gathered")


def accumulated(kind, dtype, device="cpu"):
    """Pairs of tensors: the sum that two backward passes add, and twice the gradient in float64."""
    torch.manual_seed(0)
    offs, at = ends_of(COUNTS, device), numbers(device)
    wide = torch.float64 if dtype == torch.float64 else torch.float32

    def weights(whole):
        if kind == "a pair":
            return tuple([half.contiguous() for half in whole.chunk(2, 1)])
        if kind == "alternating rows":
            return whole[:, 0::2], whole[:, 1::2]
        return (whole.mT.contiguous().mT if kind == "K by N" else whole,)

    own = weights((torch.randn(GROUPS, 48, 33, device=device) / 4).to(dtype))
    own = tuple([x.detach().requires_grad_() for x in own])
    sums = weights(torch.randn(GROUPS, 48, 33, device=device).to(wide))
    before = [x.clone() for x in sums]
    x = torch.randn(9 if kind == "gathered" else ROWS, 33, device=device).to(dtype).requires_grad_()
    how = {"gather": at[0]} if kind == "gathered" else {}
    given, added = (own, sums) if len(own) > 1 else (own[0], sums[0])
    made = [
        gemmery.grouped_linear(x, given, offs=offs, epilogue=epilogues.swiglu, weight_grad=added, **how)
        for _ in range(2)
    ]
    grad = torch.randn(made[0].shape, device=device).to(dtype)
    for y in made:
        y.backward(grad)
    exact = [w.detach().double().requires_grad_() for w in own]
    rows = x.detach().double()
    rows = rows[at[0].long()] if how else rows
    columns = (lambda g: torch.cat([w[g] for w in exact])) if len(exact) > 1 else (lambda g: exact[0][g])
    z = rows_of(rows, offs, lambda r, g: gated(*(r @ columns(g).T).chunk(2, -1)))
    theirs = torch.autograd.grad(z, exact, grad.double())
    assert all(w.grad is None for w in own)
    return [(x - y, 2 * z) for x, y, z in zip(sums, before, theirs, strict=True)]


def added_products(transposed):
    """Pairs of tensors: ranges of K added to `out` twice, then written to it, and the same in float64."""
    torch.manual_seed(0)
    a, b, offs = torch.randn(12, ROWS).bfloat16(), torch.randn(ROWS, 24).bfloat16(), ends_of(COUNTS)
    out = torch.randn(GROUPS, 24, 12).mT if transposed else torch.randn(GROUPS, 12, 24)
    before, exact = out.clone(), ranges_of(a.double(), b.double(), offs)
    for _ in range(2):
        assert gemmery.grouped_mm(a, b, offs=offs, out=out, accumulate=True) is out
    pairs = [(out - before, 2 * exact)]
    gemmery.grouped_mm(a, b, offs=offs, out=out)
    return [*pairs, (out, exact)]


#: Kinds of scales of x and of the weight, see `gemmery.ScaledTensor`, at least one of which change along K.
KINDS = [
    ("1x128", "128x128"), ("1x128", "1x128"), ("row", "128x128"), ("128x128", "1x128"), ("tensor", "128x128"),
    ("1x128", "tensor"), ("1x32", "1x32"), ("1x32", "row"), ("tensor", "1x32"),
]  # fmt: skip


def scaled(kind, shape, dtype, device="cpu"):
    """Small numbers with scales of a kind."""
    *lead, R, K = shape
    steps = -(-K // (32 if kind == "1x32" else 128))
    rows = {"128x128": -(-R // 128)}.get(kind, R)
    size = {"tensor": (), "row": (*lead, R, 1)}.get(kind, (*lead, rows, steps))
    scale = torch.rand(size) + 0.5
    if kind == "1x32":
        scale = torch.randint(-3, 3, size).float().exp2().to(torch.float8_e8m0fnu)
    return gemmery.ScaledTensor(torch.randint(-9, 9, shape).to(dtype), scale).to(device)
