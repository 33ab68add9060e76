"""What tests of `linear_cross_entropy` share: the loss as torch has it, whole in memory, and inputs for it."""

import torch
from torch.nn import functional as F

#: By name: what is asked for besides. "bias" and "weights" say that there is one.
CASES = {
    "plain": {},
    "sum": {"reduction": "sum"},
    "none": {"reduction": "none"},
    "bias": {"bias": True},
    "smoothing": {"label_smoothing": 0.1},
    "softcap": {"softcap": 3.0},
    "z-loss": {"z_loss": 1e-2},
    "weights": {"weights": True},
    "weights, smoothing": {"weights": True, "label_smoothing": 0.3},
    "all, sum": {
        "bias": True, "weights": True, "label_smoothing": 0.1, "softcap": 3.0, "z_loss": 1e-2, "reduction": "sum",
    },
    "all, none": {
        "bias": True, "weights": True, "label_smoothing": 0.1, "softcap": 3.0, "z_loss": 1e-2, "reduction": "none",
    },
    "all, mean": {"bias": True, "weights": True, "label_smoothing": 0.1, "softcap": 3.0, "z_loss": 1e-2},
}  # fmt: skip


def by_torch(
    x, weight, target, *, linear_bias=None, weights=None, reduction="mean", ignore_index=-100, label_smoothing=0.0,
    softcap=None, z_loss=0.0,
):  # fmt: skip
    """The loss of rows (N, K), in the type of its inputs."""
    z = F.linear(x, weight, linear_bias)
    z = z if softcap is None else softcap * torch.tanh(z / softcap)
    loss = F.cross_entropy(
        z, target, weights, reduction=reduction, ignore_index=ignore_index, label_smoothing=label_smoothing
    )
    counts = target != ignore_index
    squares = torch.where(counts, z_loss * z.logsumexp(-1).square(), 0.0)
    if reduction == "none":
        return loss + squares
    return loss + (squares.sum() / counts.sum() if reduction == "mean" else squares.sum())


def inputs(rows, classes, features, dtype, *, bias=False, weights=False, ignored=-100, device="cpu"):
    """Tokens, a weight, targets of which every 5th is ignored, a bias and factors of classes, or None."""

    def normal(*shape):
        return torch.randn(*shape, device=device, dtype=torch.float32).to(dtype).requires_grad_()

    x, weight = normal(rows, features), normal(classes, features)
    target = torch.randint(classes, (rows,), device=device)
    target[::5] = ignored
    factors = torch.rand(classes, device=device) + 0.5 if weights else None
    return x, weight, target, normal(classes) if bias else None, factors


def errors(function, case, rows, classes, features, dtype, device="cpu", **how):
    """‖found − wanted‖ / ‖wanted‖ of the loss and of each gradient, against float64."""
    options = dict(CASES[case])
    x, weight, target, bias, factors = inputs(
        rows, classes, features, dtype, bias=options.pop("bias", False), weights=options.pop("weights", False),
        device=device,
    )  # fmt: skip
    leaves = [t for t in (x, weight, bias) if t is not None]
    loss = function(x, weight, target, linear_bias=bias, weight=factors, **options, **how)
    up = torch.randn_like(loss)
    found = [loss, *torch.autograd.grad((loss * up).sum(), leaves)]
    wide = [t.detach().double().requires_grad_() for t in leaves]
    wanted = by_torch(
        wide[0], wide[1], target, linear_bias=wide[2] if bias is not None else None,
        weights=None if factors is None else factors.double(), **options,
    )  # fmt: skip
    wanted = [wanted, *torch.autograd.grad((wanted * up.double()).sum(), wide)]
    for a, b in zip(found[1:], leaves, strict=True):
        assert a.dtype == b.dtype
        assert a.shape == b.shape
    assert loss.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    return [
        float((a.detach().double() - b.detach()).norm() / b.detach().norm())
        for a, b in zip(found, wanted, strict=True)
    ]
