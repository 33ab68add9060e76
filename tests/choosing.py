"""gemmery as a choice of torch.compile's max-autotune: products, and code that Inductor makes of them."""

import torch
from torch._inductor.utils import fresh_cache, run_and_get_code

import gemmery.compile

#: Only gemmery, where it is offered. Templates would take seconds to compile.
ONLY = {"test_configs.autotune_choice_name_regex": "gemmery"}
OPTIONS = {"max_autotune": True, "max_autotune_gemm_backends": "ATEN"}


def mm(a, b):
    return torch.mm(a, b)


def addmm(bias, a, b):
    return torch.addmm(bias, a, b)


def scaled_addmm(c, a, b):
    return torch.addmm(c, a, b, alpha=0.5, beta=2)


def bmm(a, b):
    return torch.bmm(a, b)


def operands(m=16, n=32, k=48, dtype=torch.bfloat16, device="cpu"):
    """a, b, a bias, and a matrix to add to; b is column-major, as a Linear's weight is."""
    a, b, bias, c = (torch.randn(shape, device=device).to(dtype) for shape in ((m, k), (n, k), (n,), (m, n)))
    return a, b.T, bias, c


def cases(**how):
    """By name: a function, its arguments, and the name of gemmery's choice."""
    a, b, bias, c = operands(**how)
    batch = a.expand(3, *a.shape), torch.stack([b, b * 2, b * 3])
    return {
        "mm": (mm, (a, b), "gemmery_mm"),
        "addmm": (addmm, (bias, a, b), "gemmery_addmm"),
        "scaled addmm": (scaled_addmm, (c, a, b), "gemmery_addmm"),
        "bmm": (bmm, batch, "gemmery_bmm"),
    }


def compiled(function, *args, dynamic=False, **options):
    """The results of a function under torch.compile with options of Inductor, and the code that it was made into."""
    torch._dynamo.reset()
    with fresh_cache():
        run = torch.compile(function, options={**OPTIONS, **options}, dynamic=dynamic, fullgraph=True)
        results, code = run_and_get_code(run, *args)
    return results, "\n".join(code)


def close(result, function, args):
    """Whether a result is that of float64 but for rounding; libraries add in different orders."""
    exact = function(*[x.double() for x in args])
    return float((result.double() - exact).norm()) <= 5e-3 * float(exact.norm())


def offers():
    """What was offered, by the operation and the shape."""
    return {(x.op, x.shape): x for x in gemmery.compile.choices()}
