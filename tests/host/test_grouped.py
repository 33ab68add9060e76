"""Products of groups without kernels: their meaning, errors before any launch, the operator, and what torch does with it."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

import gemmery
from gemmery import epilogues
from tests.grouped import (
    ACCUMULATED,
    CASES,
    COUNTS,
    GROUPS,
    KINDS,
    ROWS,
    accumulated,
    added_products,
    close,
    compared,
    ends_of,
    numbers,
    rows_of,
    scaled,
)  # fmt: skip

F32 = torch.float32
X, W, B = torch.randn(ROWS, 16), torch.randn(GROUPS, 8, 16), torch.randn(GROUPS, 8)
OFFS = ends_of(COUNTS)


@pytest.mark.parametrize("dtype", [F32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("name", CASES)
def test_results_and_gradients(name, dtype):
    for ours, theirs in compared(CASES[name], {"M": 12, "N": 24, "K": 33}, dtype):
        assert close(ours, theirs, dtype)


def test_torch_agrees():
    x, w = X.bfloat16(), W.bfloat16()
    offs = ends_of((*COUNTS[:-1], COUNTS[-1] + ROWS - sum(COUNTS)))
    torch.testing.assert_close(
        gemmery.grouped_mm(x, w.mT, offs=offs), torch._grouped_mm(x, w.mT, offs=offs), rtol=2e-2, atol=2e-2
    )


def linear(x=X, w=W, b=None, offs=OFFS, **more):
    return gemmery.grouped_linear(x, w, b, offs=offs, **more)


#: What is wrong, and a part of what is said about it.
WRONG = {
    "no tensor": (lambda: linear(offs=[3, 5]), TypeError, "offs is a list"),
    "no ends": (lambda: gemmery.grouped_mm(X, W.mT), ValueError, "offs is missing"),
    "type of ends": (lambda: linear(offs=OFFS.long()), TypeError, "offs is torch.int64; it must be torch.int32"),
    "too few ends": (lambda: linear(offs=OFFS[:2]), ValueError, r"offs is \(2,\); it must have the shape \(5,\)"),
    "two dimensions of ends": (lambda: linear(offs=OFFS[None]), ValueError, r"offs is \(1, 5\)"),
    "falling ends": (lambda: linear(offs=OFFS.flip(0).contiguous()), ValueError, "it must not decrease"),
    "ends beyond the rows": (lambda: linear(offs=OFFS + ROWS), ValueError, f"must be at most {ROWS}"),
    "strided ends": (lambda: linear(offs=OFFS.repeat_interleave(2)[::2]), ValueError, "it must be contiguous"),
    "ends elsewhere": (lambda: linear(offs=OFFS.to("meta")), ValueError, "offs is on meta and x on cpu"),
    "ranks": (lambda: linear(X[0]), ValueError, r"x has 1 dimensions and weight 3"),
    "ranks of mm": (lambda: gemmery.grouped_mm(X[None, None], W, offs=OFFS), ValueError, "mat_a has 4 dimensions"),
    "K": (lambda: linear(X[:, :9]), ValueError, "inner sizes 9 and 16 differ$"),
    "weights (K, N)": (lambda: linear(w=W.mT), ValueError, r"differ; for weights \(G, K, N\), give weight.mT"),
    "weights (N, K) of mm": (lambda: gemmery.grouped_mm(X, W, offs=OFFS), ValueError, r"differ; .* give mat_b.mT"),
    "types": (lambda: linear(X.half()), TypeError, "x is torch.float16 and weight is torch.float32"),
    "groups of the bias": (lambda: linear(b=B[:3]), ValueError, r"bias is \(3, 8\); it must be \(5, 8\) or \(8,\)"),
    "columns of the bias": (lambda: linear(b=B[:, :5]), ValueError, r"bias is \(5, 5\); it must be \(5, 8\)"),
    "gather": (lambda: linear(gather=torch.zeros(3)), TypeError, "gather is torch.float32"),
    "scatter": (lambda: linear(scatter=OFFS), ValueError, f"scatter is \\(5,\\); it must have the shape \\({ROWS},\\)"),
    "row scale": (lambda: linear(row_scale=torch.ones(3)), ValueError, f"row_scale is \\(3,\\); it must be \\({ROWS},\\)"),
    "a bias of ranges": (lambda: gemmery.grouped_mm(X.T, X, offs=OFFS, bias=B), ValueError, "bias is given with ranges of K"),
    "ends of a batch": (lambda: gemmery.grouped_mm(W, W.mT, offs=OFFS), ValueError, "offs is given with a batch"),
    "halves": (lambda: linear(w=(W, W[:2]), epilogue=epilogues.swiglu), ValueError, "batches of matrices of one shape"),
    "a pair without its epilogue": (lambda: linear(w=(W, W)), TypeError, "which requires an epilogue"),
    "x packed": (lambda: linear(gemmery.quantize(torch.randn(64, 64), "int4")), TypeError, "x is a QuantizedTensor; sparse and quantized weights must be"),
    "an argument": (lambda: linear(epilogue=lambda y, r: y + r, args=(torch.ones(5, 2, 8),)), ValueError, "args"),
    "scales of blocks": (
        lambda: linear(
            gemmery.ScaledTensor(torch.zeros(ROWS, 256).to(torch.float8_e4m3fn), torch.ones(ROWS, 8).to(torch.float8_e8m0fnu)),
            gemmery.ScaledTensor(torch.zeros(GROUPS, 8, 256).to(torch.float8_e4m3fn), torch.ones(GROUPS, 1, 2)),
        ),
        ValueError, "x has scales 1x32 and weight 128x128",
    ),
    "one of two scaled": (
        lambda: linear(gemmery.ScaledTensor(X.to(torch.int8), torch.ones(ROWS, 1))), TypeError, "or neither",
    ),
    "a prologue of codes": (
        lambda: linear(
            gemmery.ScaledTensor(X.to(torch.int8), torch.ones(())), gemmery.ScaledTensor(W.to(torch.int8), torch.ones(())),
            prologue=torch.relu,
        ),
        TypeError, "a prologue takes floating-point operands",
    ),
    "a batch of scaled operands": (
        lambda: gemmery.grouped_mm(*[gemmery.ScaledTensor(W.to(torch.int8), torch.ones(()))] * 2), TypeError, "plain tensors",
    ),
    "a packed weight in ranges": (
        lambda: gemmery.grouped_mm(X.T.bfloat16(), gemmery.quantize(torch.randn(ROWS, ROWS), "int4", group_size=0), offs=OFFS),
        TypeError, "plain tensors",
    ),
    "ends that are a parameter": (
        lambda: linear(offs=torch.nn.Parameter(OFFS - 9, requires_grad=False)), ValueError, "must not decrease",
    ),
    "a number for an epilogue": (
        lambda: linear(epilogue=3, row_scale=torch.ones(ROWS)), TypeError, "epilogue is a int",
    ),
    "names of columns": (
        lambda: gemmery.grouped_mm(W, X, offs=OFFS), ValueError, rf"mat_a is \(5, 8, 16\) and mat_b is \({ROWS}, 16\)",
    ),
    "a gathered row that is not there": (
        lambda: linear(gather=torch.full((ROWS,), ROWS, dtype=torch.int32)), ValueError, f"must be from 0 to {ROWS - 1}",
    ),
    "a scattered row that is not there": (
        lambda: linear(scatter=torch.arange(ROWS, dtype=torch.int32) - 1), ValueError, "scatter contains -1",
    ),
    "several scattered results": (
        lambda: linear(scatter=torch.arange(ROWS, dtype=torch.int32), epilogue=lambda y: (y, y * 2)), ValueError,
        "scatter takes an epilogue with one result; this one returns 2",
    ),
    "half of a sum of gradients": (
        lambda: linear(w=(W, W), epilogue=epilogues.swiglu, weight_grad=(torch.zeros_like(W), None)), TypeError, "weight_grad is a NoneType",
    ),
    "the shape of a sum": (
        lambda: gemmery.grouped_mm(X.T, X, offs=OFFS, out=torch.zeros(5, 16, 9), accumulate=True), ValueError,
        r"out is \(5, 16, 9\); it must be \(5, 16, 16\)",
    ),
    "a place for two rows": (
        lambda: linear(scatter=torch.zeros(ROWS, dtype=torch.int32)), ValueError, "scatter contains a row twice",
    ),
    "the weight as its gradient": (lambda: linear(weight_grad=W), ValueError, "shares memory with the weight"),
    "out": (lambda: linear(out=torch.empty(3, 8)), ValueError, r"out is \(3, 8\); the result is"),
    "a sum without out": (lambda: gemmery.grouped_mm(X.T, X, offs=OFFS, accumulate=True), ValueError, "out is missing"),
    "a sum of 16 bits": (
        lambda: gemmery.grouped_mm(X.T.bfloat16(), X.bfloat16(), offs=OFFS, out=torch.zeros(5, 16, 16).bfloat16(), accumulate=True),
        TypeError, "out is torch.bfloat16; it must be torch.float32",
    ),
    "a sum of rows": (
        lambda: gemmery.grouped_mm(X, W.mT, offs=OFFS, out=torch.zeros(ROWS, 8), accumulate=True), ValueError,
        "accumulate is given with groups of rows",
    ),
    "a sum of gradients in 16 bits": (lambda: linear(weight_grad=W.bfloat16()), TypeError, "weight_grad is torch.bfloat16"),
    "a sum of other gradients": (lambda: linear(weight_grad=W[:2]), ValueError, r"weight_grad is \(2, 8, 16\); it must be \(5, 8, 16\)"),
    "a sum of one half": (lambda: linear(w=(W, W), epilogue=epilogues.swiglu, weight_grad=W), TypeError, "must be a pair"),
    "a sum of overlapping gradients": (
        lambda: linear(weight_grad=torch.zeros(8, 16).expand(5, 8, 16)), ValueError, "overlap one another",
    ),
    "gradients of a packed weight": (
        lambda: linear(torch.randn(ROWS, 64).half(), gemmery.quantize(torch.randn(5, 64, 64), "int4"), weight_grad=torch.zeros(5, 64, 64)),
        TypeError, "has no gradient",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_errors(name):
    call, kind, text = WRONG[name]
    with pytest.raises(kind, match=text):
        call()


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", [x for x in CASES if x not in ("batch", "arguments")])
def test_compiled(name):
    """One graph, forward and backward."""
    case, sizes = CASES[name], {"M": 12, "N": 24, "K": 33}
    inputs = case.inputs({**sizes, "2N": 48}, F32)
    at = numbers()
    plain = [x.clone().requires_grad_() for x in inputs]
    traced = [x.clone().requires_grad_() for x in inputs]
    y = case.product(*plain, OFFS, at)
    z = torch.compile(case.product, backend="aot_eager", fullgraph=True)(*traced, OFFS, at)
    torch.testing.assert_close(z, y)
    grad = torch.randn_like(y)
    y.backward(grad)
    z.backward(grad)
    for a, b in zip(plain, traced, strict=True):
        torch.testing.assert_close(b.grad, a.grad)


def test_the_operator():
    from gemmery.operands import Groups
    from gemmery.product.build import make_call
    from gemmery.product.flat import arguments_of
    from gemmery.product.spec import Functions, Options

    x, w = X.clone().requires_grad_(), W.clone().requires_grad_()
    call = make_call("grouped_linear", Groups(x, OFFS), w, B.unsqueeze(1), Functions(), Options())
    torch.library.opcheck(torch.ops.gemmery.product.default, (*arguments_of(call, ""), True))


def test_fake_tensors():
    with FakeTensorMode() as mode:
        x, w, offs = (mode.from_tensor(t) for t in (X, W, OFFS))
        assert gemmery.grouped_linear(x, w, offs=offs).shape == (ROWS, 8)
        assert gemmery.grouped_mm(x.T, x, offs=offs).shape == (GROUPS, 16, 16)


def test_autocast():
    with torch.autocast("cpu", torch.bfloat16):
        y = linear(b=B)
    assert y.dtype == torch.bfloat16
    assert close(
        y, rows_of(X.double(), OFFS, lambda r, g: r @ W[g].double().T + B[g].double()), torch.bfloat16
    )


def test_second_derivatives_of_a_bare_product():
    x, w = torch.randn(7, 3).double().requires_grad_(), torch.randn(2, 4, 3).double().requires_grad_()
    offs = torch.tensor([2, 6], dtype=torch.int32)
    assert torch.autograd.gradgradcheck(lambda x, w: gemmery.grouped_linear(x, w, offs=offs), (x, w))
    assert torch.autograd.gradcheck(
        lambda x, w: gemmery.grouped_linear(x, w, offs=offs, epilogue=torch.tanh), (x, w)
    )


def test_results_are_what_torch_functions_make_of_rows():
    seen = []

    def function(y):
        seen.append(tuple(y.shape))
        return F.silu(y)

    linear(epilogue=function)
    assert (ROWS, 8) in seen


def test_row_scale():
    """Of matrices alone, in the type of the result, for functions that are made anew, and into `out` when compiled."""
    from gemmery.product import cache

    scale = torch.rand(ROWS)
    both, sums = linear(epilogue=lambda y: (y, y.sum(-1)), row_scale=scale)
    plain = linear()
    torch.testing.assert_close(both, plain * scale[:, None])
    torch.testing.assert_close(sums, plain.sum(-1))
    half = linear(X.half(), W.half(), row_scale=scale.double())
    assert half.dtype == torch.float16
    before = len(cache._known)
    for _ in range(3):
        linear(row_scale=scale, epilogue=lambda y: torch.relu(y))
    assert len(cache._known) <= before + 1
    out = torch.empty(ROWS, 8)

    def into(x, w, scale, out):
        return gemmery.grouped_linear(x, w, offs=OFFS, row_scale=scale, out=out)

    assert torch.compile(into, backend="eager", fullgraph=True)(X, W, scale, out).data_ptr() == out.data_ptr()
    torch.testing.assert_close(out, plain * scale[:, None])


def test_nothing_to_multiply():
    none = torch.zeros(0, dtype=torch.int32)
    assert (gemmery.grouped_linear(X, W[:0], B[:0], offs=none) == 0).all()
    y = gemmery.grouped_linear(X[:0], W, B, offs=OFFS * 0, gather=torch.zeros(5, dtype=torch.int32))
    assert y.shape == (5, 8)
    assert (y == 0).all()


@pytest.mark.parametrize("dtype", [F32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("kind", ACCUMULATED)
def test_gradients_that_are_added_to_others(kind, dtype):
    for ours, theirs in accumulated(kind, dtype):
        assert close(ours, theirs, dtype)


@pytest.mark.parametrize("transposed", [False, True])
def test_products_that_are_added_to_others(transposed):
    for ours, theirs in added_products(transposed):
        assert close(ours, theirs, F32)


def test_sums_of_gradients_are_for_autograd_alone():
    w, total = W.clone().requires_grad_(), torch.zeros_like(W)
    y = linear(w=w, weight_grad=total, epilogue=F.silu)
    with pytest.raises(RuntimeError, match="second derivatives are not supported"):
        torch.autograd.grad(y.sum(), w, create_graph=True)
    with pytest.raises(ValueError, match=r"weight_grad works only with autograd, not in torch.func"):
        torch.func.grad(lambda w: linear(w=w, weight_grad=total).sum())(W)
    compiled = torch.compile(lambda w: linear(w=w, weight_grad=total), backend="eager", fullgraph=True)
    with pytest.raises(Exception, match="use fullgraph=False"):
        compiled(w)
    with torch.no_grad():
        linear(w=w, weight_grad=total)
    assert (total == 0).all()


def test_sums_of_gradients_are_those_that_were_given():
    """Whatever autograd does with the tensors that it keeps."""
    w, total = W.clone().requires_grad_(), torch.zeros_like(W)
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x.clone(), lambda x: x.clone()):
        y = linear(w=w, weight_grad=total)
    y.sum().backward()
    (want,) = torch.autograd.grad(linear(w=w).sum(), w)
    torch.testing.assert_close(total, want)


def test_sums_of_gradients_are_added_to_by_those_who_ask():
    x, w, total = X.clone().requires_grad_(), W.clone().requires_grad_(), torch.zeros_like(W)
    y = linear(x, w, weight_grad=total)
    (want,) = torch.autograd.grad(linear(w=w).sum(), w)
    torch.autograd.grad(y.sum(), x, retain_graph=True, create_graph=True)
    y.sum().backward(inputs=[x], retain_graph=True)
    assert (total == 0).all()
    for count in (1, 2):
        y.sum().backward(retain_graph=True)
        torch.testing.assert_close(total, count * want)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_code_is_interrupted_for_sums_of_gradients(backend):
    torch._dynamo.reset()
    w, total = W.clone().requires_grad_(), torch.zeros_like(W)
    y = torch.compile(lambda x: linear(x * 2, w, weight_grad=total) + 1, backend=backend)(X)
    y.sum().backward()
    (want,) = torch.autograd.grad(linear(X * 2, w).sum(), w)
    torch.testing.assert_close(total, want)


def test_no_rows_to_gather():
    x, w = torch.randn(0, 16, requires_grad=True), W.clone().requires_grad_()
    gather = torch.zeros(4, dtype=torch.int32)
    y = linear(x, w, offs=torch.zeros(GROUPS, dtype=torch.int32), gather=gather)
    y.sum().backward()
    assert (y == 0).all()
    assert x.grad.shape == (0, 16)
    assert (w.grad == 0).all()


def test_other_gradients_beside_sums():
    x, b, w = X.clone().requires_grad_(), B.clone().requires_grad_(), W.clone().requires_grad_()
    total = torch.zeros_like(W)
    made = torch.autograd.grad(
        linear(x, w, b, weight_grad=total, epilogue=F.silu).sum(), (x, b, w), allow_unused=True
    )
    want = torch.autograd.grad(linear(x, w, b, epilogue=F.silu).sum(), (x, b, w))
    assert made[2] is None
    for ours, theirs in zip((*made[:2], total), want, strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("gathers", [False, True])
@pytest.mark.parametrize("kinds", [("row", "row"), *KINDS], ids="-".join)
def test_compiled_products_of_scaled_operands(kinds, gathers):
    torch.manual_seed(0)
    torch._dynamo.reset()
    dtype, at = torch.float8_e4m3fn, numbers()[0] if gathers else None
    x, w = scaled(kinds[0], (9 if gathers else ROWS, 256), dtype), scaled(kinds[1], (GROUPS, 48, 256), dtype)
    exact, full = x.dequantize(torch.float64), w.dequantize(torch.float64)
    exact = exact[at.long()] if gathers else exact

    def product(offs):
        return gemmery.grouped_linear(x, w, offs=offs, gather=at, out_dtype=F32)

    for function in (product, torch.compile(product, backend="aot_eager", fullgraph=True)):
        assert close(function(OFFS), rows_of(exact, OFFS, lambda r, g: r @ full[g].T), F32)
