"""What tests of `lora_linear` share: what it means in torch, and inputs for it."""

import torch

import gemmery

#: By name: how the weight is stored, if it is packed.
WEIGHTS = {
    "dense": None, "int4": {"group_size": 64}, "int8": {}, "nf4": {"group_size": 64}, "nvfp4": {}, "e4m3": {},
}  # fmt: skip
#: By name: what there is besides.
CASES = {"plain": (), "bias": ("bias",), "dropout": ("lora_x",), "bias, dropout": ("bias", "lora_x")}


def by_torch(x, weight, a, b, bias=None, *, scale=1.0, lora_x=None):
    """The layer in the type of its inputs."""
    y = x @ weight.T + scale * ((x if lora_x is None else lora_x) @ a.T) @ b.T
    return y if bias is None else y + bias


def inputs(rows, N, K, r, dtype, *, format="dense", adapter=None, case="plain", device="cpu"):
    """x, a weight, and by name what else `lora_linear` takes; the factors are of the type `adapter`."""

    def normal(*shape, kind=dtype, scale=1.0):
        made = torch.randn(*shape, device=device, dtype=torch.float32) * scale
        return made.to(kind).requires_grad_()

    lead = rows if isinstance(rows, tuple) else (rows,)
    x = normal(*lead, K)
    dense = torch.randn(N, K, device=device) * K**-0.5
    weight = (
        dense.to(dtype)
        if format == "dense"
        else gemmery.quantize(dense, format, dtype=dtype, **WEIGHTS[format])
    )
    adapter = adapter or dtype
    others = {"a": normal(r, K, kind=adapter, scale=K**-0.5), "b": normal(N, r, kind=adapter)}
    if "bias" in CASES[case]:
        others["bias"] = normal(N)
    if "lora_x" in CASES[case]:
        others["lora_x"] = torch.nn.functional.dropout(x.detach(), 0.3).requires_grad_()
    return x, weight, others


def dense(weight):
    """A weight in float64."""
    if isinstance(weight, gemmery.QuantizedTensor):
        return weight.dequantize(torch.float64)
    return (weight.dense() if isinstance(weight, gemmery.SparseTensor) else weight).double()


def errors(x, weight, others, *, scale=1.5, function=gemmery.lora_linear, **how):
    """‖found − wanted‖ / ‖wanted‖ of the result and of each gradient, against float64."""
    leaves = [x, *others.values()]
    made = function(x, weight, **others, scale=scale, **how)
    up = torch.randn_like(made)
    found = [made, *torch.autograd.grad(made, leaves, up)]
    wide = [t.detach().double().requires_grad_() for t in leaves]
    named = dict(zip(others, wide[1:], strict=True))
    meant = by_torch(wide[0], dense(weight), **named, scale=scale)
    wanted = [meant, *torch.autograd.grad(meant, wide, up.double())]
    for leaf, grad in zip(leaves, found[1:], strict=True):
        assert (grad.dtype, grad.shape) == (leaf.dtype, leaf.shape)
    assert made.dtype == x.dtype
    return [
        float((f.detach().double() - w).norm() / w.norm())
        for f, w in zip(found, map(torch.detach, wanted), strict=True)
    ]
