"""Products under the transforms of torch.func, with and without what comes behind them."""

import torch
from torch.func import grad, jacrev, vjp, vmap
from torch.nn import functional as F

import gemmery


def values(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).to(dtype)


X, W, B, R = values(3, 8), values(6, 8, seed=1), values(6, seed=2), values(3, 6, seed=3)
PACKED = gemmery.quantize((values(32, 64, seed=4) / 8).half(), "int8")
GATE, UP = values(6, 8, seed=5), values(6, 8, seed=6)

#: Ours and torch's, of (x, w, b, r).
FUNCTIONS = {
    "matmul": (lambda x, w, b, r: gemmery.matmul(x, w.mT), lambda x, w, b, r: x @ w.mT),
    "linear": (lambda x, w, b, r: gemmery.linear(x, w, b), lambda x, w, b, r: F.linear(x, w, b)),
    "addmm": (
        lambda x, w, b, r: gemmery.addmm(r, x, w.mT, beta=2, alpha=3),
        lambda x, w, b, r: torch.addmm(r, x, w.mT, beta=2, alpha=3),
    ),
    "epilogue": (
        lambda x, w, b, r: gemmery.linear(x, w, b, epilogue=lambda acc, r: torch.tanh(acc) * r, args=(r,)),
        lambda x, w, b, r: torch.tanh(F.linear(x, w, b)) * r,
    ),
    "pair": (
        lambda x, w, b, r: gemmery.linear(x, (w, w * 2), epilogue=gemmery.epilogues.swiglu) * r + b,
        lambda x, w, b, r: F.silu(x @ w.mT) * (x @ w.mT * 2) * r + b,
    ),
}


def total(f):
    return lambda *args: f(*args).square().sum()


def check(name):
    """Gradients, their gradients, and those of each row of a batch by vmap."""
    ours, theirs = FUNCTIONS[name]
    args = (X, W, B, R)
    every = (0, 1, 2, 3)
    for transform in (
        lambda f: grad(total(f), every),
        lambda f: grad(lambda *a: sum(g.square().sum() for g in grad(total(f), every)(*a)), every),
        lambda f: lambda *a: vjp(f, *a)[1](R),
        lambda f: jacrev(f, every),
        lambda f: lambda *a: vmap(grad(total(f), (1, 2)), (0, None, None, 0))(a[0][:, None], *a[1:3], a[3][:, None]),
        lambda f: lambda *a: grad(lambda *b: vmap(f, (0, None, None, 0))(b[0][:, None], *b[1:3], b[3][:, None]).sum(), (0, 1))(*a),
        lambda f: lambda *a: (vmap(f, (None, 0, None, None))(a[0], a[1].repeat(2, 1, 1), *a[2:]),),
        lambda f: lambda *a: (vmap(f, (None, None, 1, None))(*a[:2], torch.stack([a[2], a[2] * 2], 1), a[3]),),
    ):  # fmt: skip
        for found, want in zip(transform(ours)(*args), transform(theirs)(*args), strict=True):
            torch.testing.assert_close(found, want, rtol=1e-6, atol=1e-6)


def check_vectors():
    """Vectors have no row or no column for a mapped dimension to stand before."""
    batch = values(5, 8, seed=7)
    for f, g in (
        (lambda v: gemmery.matmul(W, v), lambda v: W @ v),
        (lambda v: gemmery.matmul(v, W.mT), lambda v: v @ W.mT),
        (lambda v: gemmery.matmul(v, B.new_ones(8)), lambda v: v @ B.new_ones(8)),
        (lambda v: gemmery.linear(v, W, B), lambda v: F.linear(v, W, B)),
    ):
        torch.testing.assert_close(vmap(f)(batch), vmap(g)(batch))
        torch.testing.assert_close(
            vmap(grad(total(f)))(batch), vmap(grad(total(g)))(batch), rtol=1e-6, atol=1e-6
        )


def check_packed():
    """A packed weight: gradients of x, with an epilogue and without."""
    x, dense = (values(4, 64, seed=8) / 16).half(), PACKED.dequantize().float()
    for epilogue in (None, torch.tanh):
        ours = lambda x: gemmery.linear(x, PACKED, epilogue=epilogue).float()  # noqa: B023, E731
        theirs = lambda x: (epilogue or (lambda y: y))(x.float() @ dense.mT)  # noqa: B023, E731
        for transform in (
            lambda f: grad(total(f)),
            lambda f: vmap(grad(lambda row: total(f)(row[None]))),
            lambda f: grad(lambda x: grad(total(f))(x).square().sum()),
        ):
            found, want = transform(ours)(x), transform(theirs)(x)
            error = (found.double() - want.double()).norm() / want.double().norm()
            assert error < 5e-3, (epilogue, error)
