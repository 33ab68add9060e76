"""Tensors with scales, their quantising and their products, on the CPU: what they mean, and what they refuse."""

import copy
import functools
import io
import math

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn import functional as F

import gemmery
from gemmery import epilogues
from gemmery.activations import FORMATS, reference
from gemmery.formats.scaled import E8M0, ScaledTensor

INT8, E4M3, E5M2 = torch.int8, torch.float8_e4m3fn, torch.float8_e5m2
F32, F64, BF16 = torch.float32, torch.float64, torch.bfloat16


def values(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def fails(error, call, *said):
    with pytest.raises(error) as caught:
        call()
    assert caught.type is error
    for word in said:
        assert str(word) in str(caught.value), f"{word!r} is not in {str(caught.value)!r}"


def blocks_of(w, dtype=E4M3):
    """A weight with a scale for each block of 128 x 128."""
    N, K = w.shape
    padded = F.pad(w, (0, -K % 128, 0, -N % 128)).unflatten(0, (-1, 128)).unflatten(-1, (-1, 128))
    scale = padded.abs().amax((1, 3), keepdim=True) / torch.finfo(dtype).max
    data = (padded / scale).to(dtype).flatten(2).flatten(0, 1)[:N, :K]
    return ScaledTensor(data, scale[:, 0, :, 0])


# ---------------------------------------------------------------------------------------------------------------------
# The class

KINDS = [
    ((3, 300), (), "tensor"),
    ((3, 300), (1,), "tensor"),
    ((2, 3, 300), (2, 3, 1), "row"),
    ((2, 3, 300), (2, 3, 3), "1x128"),
    ((300, 200), (3, 2), "128x128"),
    ((300, 100), (3, 1), "128x128"),
    ((3, 100), (3, 1), "row"),
    ((1, 300), (1, 3), "1x128"),
    ((0, 300), (0, 1), "row"),
    ((3, 0), (3, 0), "1x128"),
]


@pytest.mark.parametrize(("shape", "scale", "kind"), KINDS, ids=str)
def test_kinds(shape, scale, kind):
    data = torch.randint(-127, 128, shape, dtype=INT8)
    x = ScaledTensor(data, values(*scale).abs() + 0.1)
    assert (x.kind, x.shape, x.dtype, x.device) == (kind, shape, INT8, data.device)
    want = data.double()
    for row in range(shape[-2]):
        for first in range(0, shape[-1], 128):
            part = x.scale.reshape(()) if kind == "tensor" else x.scale
            if kind in ("row", "1x128"):
                part = part[..., row, 0 if kind == "row" else first // 128].unsqueeze(-1)
            elif kind == "128x128":
                part = part[row // 128, first // 128]
            want[..., row, first : first + 128] *= part.double()
    assert torch.equal(x.dequantize(F64), want)
    assert x.dequantize().dtype == F32
    torch.testing.assert_close(x.dequantize(), want.float(), rtol=1e-6, atol=0)
    assert torch.equal(x.dequantize(BF16), x.dequantize().to(BF16))


@pytest.mark.parametrize("shape", [(3, 300), (2, 3, 64), (3, 5), (0, 40), (3, 0)], ids=str)
@pytest.mark.parametrize("dtype", [E4M3, torch.float8_e5m2], ids=str)
def test_powers_of_two_for_32_columns(shape, dtype):
    exponents = torch.randint(0, 256, (*shape[:-1], -(-shape[-1] // 32)), dtype=torch.uint8)
    x = ScaledTensor(values(*shape).to(dtype), exponents.view(E8M0))
    assert (x.kind, x.shape, x.dtype) == ("1x32", shape, dtype)
    powers = torch.where(exponents == 255, torch.nan, 2.0 ** (exponents.double() - 127))
    want = x.data.double() * powers.repeat_interleave(32, -1)[..., : shape[-1]]
    torch.testing.assert_close(x.dequantize(F64), want, rtol=0, atol=0, equal_nan=True)


WRONG = [
    (TypeError, torch.ones(2, 40, dtype=INT8), torch.ones(2, 2).to(E8M0), "such scales are for fp8"),
    (ValueError, torch.ones(2, 40).to(E4M3), torch.ones(2, 1).to(E8M0), "it must be (2, 2)"),
    (TypeError, [1], torch.ones(()), "data is a list"),
    (TypeError, torch.ones(2, 2), torch.ones(()), "data is torch.float32; it must be one of torch.int8"),
    (TypeError, torch.ones(2, 2, dtype=INT8), torch.ones((), dtype=F64), "scale is torch.float64"),
    (TypeError, torch.ones(2, 2, dtype=INT8), 0.5, "scale is a float"),
    (ValueError, torch.ones(2, dtype=INT8), torch.ones(()), "data is (2,); it must be (..., R, K)"),
    (
        ValueError,
        torch.ones(2, 2, dtype=INT8),
        torch.ones(2),
        "scale is (2,); it must be () or (1,) or (2, 1)",
    ),
    (ValueError, torch.ones(2, 2, dtype=INT8), torch.ones((), device="meta"), "scale on meta"),
    (ValueError, torch.ones(2, 300, 200, dtype=INT8), torch.ones(3, 2), "must be () or (1,) or (2, 300, 1)"),
]


@pytest.mark.parametrize(
    ("error", "data", "scale", "said"), WRONG, ids=lambda x: x if isinstance(x, str) else ""
)
def test_wrong_parts(error, data, scale, said):
    fails(error, lambda: ScaledTensor(data, scale), "ScaledTensor: ", said)


def test_it_moves_and_is_kept():
    x = gemmery.quantize_activations(values(3, 5))
    file = io.BytesIO()
    torch.save(x, file)  # torch's tensors of fp8 can't be pickled without it
    file.seek(0)
    for other in (x.to("cpu"), copy.deepcopy(x), torch.load(file, weights_only=False)):
        assert other.kind == x.kind
        assert torch.equal(other.dequantize(), x.dequantize())
    assert x.to("meta").device.type == "meta"
    fails(TypeError, lambda: x.to(torch.float16), "it takes a device. For a type, use dequantize")
    assert repr(x) == "ScaledTensor((3, 5), torch.float8_e4m3fn, kind='row', device='cpu')"
    with pytest.raises(AttributeError):
        x.data = x.data


# ---------------------------------------------------------------------------------------------------------------------
# Quantising


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("per", ["token", "block", "tensor"])
def test_quantised_values_are_near(format, per):
    dtype, largest = FORMATS[format]
    x = values(2, 7, 300) * torch.logspace(-3, 3, 7)[:, None]
    q = gemmery.quantize_activations(x, format, per=per)
    assert q.data.is_contiguous()
    assert q.scale.is_contiguous()
    assert q.scale.shape == {"token": (2, 7, 1), "block": (2, 7, 3), "tensor": ()}[per]
    assert q.data.float().abs().max() == largest
    step = q._spread() if format == "int8" else x.abs() * torch.finfo(dtype).eps
    # Subnormals of fp8 are a step of their own.
    least = (
        0 if format == "int8" else q._spread() * torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
    )
    assert ((q.dequantize() - x).abs() <= (step / 2 + least / 2) * 1.0001).all()
    again = gemmery.quantize_activations(q.dequantize(), format, per=per)
    torch.testing.assert_close(again.dequantize(), q.dequantize(), rtol=1e-6, atol=0)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_spoils_what_shares_its_scale(format, value):
    x = values(3, 300)
    x[1, 130] = value
    for per, spoilt in (("token", x[1:2]), ("block", x[1:2, 128:256]), ("tensor", x)):
        q = gemmery.quantize_activations(x, format, per=per)
        assert q.dequantize().isnan().sum() == spoilt.numel()
        assert not q.scale.isfinite().all()
        assert format != "int8" or q.data[1, 130] == 0
        y = gemmery.scaled_matmul(q, gemmery.quantize_activations(values(4, 300), format))
        assert y[1].isnan().all()
        assert y[0].isnan().any() == (per == "tensor")


@pytest.mark.parametrize("format", FORMATS)
def test_zeros_and_tiny_numbers_stay(format):
    x = torch.tensor([[0.0, 0.0], [1e-45, 0.0], [1e-38, 0.0], [-1e-30, 1e-30]])
    q = gemmery.quantize_activations(x, format)
    assert q.scale[:2, 0].tolist() == [1, 1]
    assert q.dequantize().isfinite().all()
    assert (q.dequantize() - x).abs().max() < 1e-37


@pytest.mark.parametrize("per", ["token", "block", "tensor"])
@pytest.mark.parametrize("shape", [(0, 5), (5, 0), (0, 3, 7), (2, 0, 0)], ids=str)
def test_empty(per, shape):
    q = gemmery.quantize_activations(torch.empty(shape), per=per)
    assert q.shape == shape
    assert q.dequantize().shape == shape


def test_given_magnitudes():
    x = values(4, 6)
    amax = x.abs().amax(-1)
    for per in ("token", "tensor"):
        q, want = (
            gemmery.quantize_activations(x, per=per, amax=amax),
            gemmery.quantize_activations(x, per=per),
        )
        assert torch.equal(q.scale, want.scale)
        assert torch.equal(q.data.view(torch.uint8), want.data.view(torch.uint8))
        # What is larger than was said is cut off.
        q = gemmery.quantize_activations(x, per=per, amax=amax / 2)
        assert q.data.float().abs().max() == 448


X = values(3, 5)
QUANTISING = [
    (TypeError, lambda: gemmery.quantize_activations(X.double()), "x is torch.float64; it must be one of"),
    (TypeError, lambda: gemmery.quantize_activations([1.0]), "x is a list"),
    (TypeError, lambda: gemmery.quantize_activations(X.clone().requires_grad_()), "quantize x.detach()"),
    (ValueError, lambda: gemmery.quantize_activations(X, "fp8"), "format is 'fp8'; it must be one of e4m3"),
    (ValueError, lambda: gemmery.quantize_activations(X, per="row"), "per is 'row'; it must be one of token"),
    (ValueError, lambda: gemmery.quantize_activations(X[0]), "x is (5,); it must be (..., M, K)"),
    (ValueError, lambda: gemmery.quantize_activations(X, amax=X), "amax is (3, 5) and x (3, 5); it must be (3,)"),
    (ValueError, lambda: gemmery.quantize_activations(X, per="block", amax=X[:, 0]), "amax is of rows"),
    (TypeError, lambda: gemmery.quantize_activations(X, amax=X[:, 0].half()), "amax is torch.float16"),
]  # fmt: skip


@pytest.mark.parametrize(("error", "call", "said"), QUANTISING, ids=lambda x: x if isinstance(x, str) else "")
def test_wrong_arguments_of_quantising(error, call, said):
    fails(error, call, "quantize_activations: ", said)


# ---------------------------------------------------------------------------------------------------------------------
# Products


def near(y, want, dtype=BF16):
    assert y.dtype == dtype
    assert y.shape == want.shape
    assert ((y.double() - want).norm() / want.norm()).item() < {BF16: 4e-3, F32: 1e-6}[dtype]


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("per_a", ["token", "block", "tensor"])
@pytest.mark.parametrize("weight", ["token", "tensor", "block", "128x128"])
def test_products(format, per_a, weight):
    x, w, bias = values(2, 5, 300), values(140, 300, seed=1), values(140, seed=2)
    a = gemmery.quantize_activations(x, format, per=per_a)
    if weight == "128x128":
        b = blocks_of(w, E5M2 if format == "e5m2" else E4M3)
        if format == "int8":
            b = ScaledTensor(torch.randint(-9, 9, b.shape, dtype=INT8), b.scale)
    else:
        b = gemmery.quantize_activations(w, format, per=weight)
    want = a.dequantize(F64) @ b.dequantize(F64).T
    near(gemmery.scaled_matmul(a, b), want)
    near(gemmery.scaled_matmul(a, b, bias=bias, out_dtype=F32), want + bias, F32)
    y, amax = gemmery.scaled_matmul(a, b, bias=bias, epilogue=epilogues.with_row_amax)
    near(y, want + bias)
    near(amax, (want + bias).abs().amax(-1), F32)
    near(
        gemmery.scaled_matmul(a, b, epilogue=epilogues.residual, args=(bias,), out_dtype=F32),
        want + bias,
        F32,
    )
    out = torch.empty(2, 5, 140)
    assert gemmery.scaled_matmul(a, b, out=out) is out
    near(out, want, F32)


def test_mx():
    """The numbers of the specification, by a reckoning of its own."""
    x = values(6, 100) * 2.0 ** torch.arange(-140, 100, 40)[:, None]
    x[0, :32], x[1, 40], x[2, 70] = 0, float("nan"), float("inf")
    for format, largest in (("e4m3", 8), ("e5m2", 15)):
        q = gemmery.quantize_activations(x, format, per="mx")
        assert (q.kind, q.scale.shape, q.scale.dtype) == ("1x32", (6, 4), E8M0)
        for row in range(6):
            for block in range(4):
                part = x[row, 32 * block : 32 * block + 32].double()
                scale = q.scale[row, block].double()
                if not part.isfinite().all():
                    assert scale.isnan()
                    continue
                most = part.abs().max().item()
                wanted = max(math.frexp(most)[1] - 1 - largest, -127) if most else 0
                assert scale == 2.0**wanted
                limit = torch.finfo(q.dtype).max
                data = (part / scale).clamp(-limit, limit).float().to(q.dtype)
                assert torch.equal(q.data[row, 32 * block : 32 * block + 32].float(), data.float())
    said = "with per='mx' it must be one of e4m3, e5m2"
    fails(ValueError, lambda: gemmery.quantize_activations(x, "int8", per="mx"), said)
    amax = x.abs().amax(-1)
    fails(ValueError, lambda: gemmery.quantize_activations(x, per="mx", amax=amax), "blocks have no use for")
    a = gemmery.quantize_activations(values(5, 200), per="mx")
    for per in ("mx", "token", "tensor"):
        b = gemmery.quantize_activations(values(9, 200, seed=1), "e5m2", per=per)
        near(gemmery.scaled_matmul(a, b), a.dequantize(F64) @ b.dequantize(F64).T)
        near(gemmery.scaled_matmul(b, a), b.dequantize(F64) @ a.dequantize(F64).T)
    for other in (gemmery.quantize_activations(values(9, 200), per="block"), blocks_of(values(9, 200))):
        fails(
            ValueError, functools.partial(gemmery.scaled_matmul, a, other), "with 1x32, the other's must be"
        )


def test_the_two_types_of_fp8_are_mixed():
    a, b = (
        gemmery.quantize_activations(values(3, 40), "e5m2"),
        gemmery.quantize_activations(values(4, 40), "e4m3"),
    )
    near(gemmery.scaled_matmul(a, b), a.dequantize(F64) @ b.dequantize(F64).T)


def test_types_of_results():
    for format in FORMATS:
        a, b = (
            gemmery.quantize_activations(values(3, 40), format),
            gemmery.quantize_activations(values(4, 40), format),
        )
        kept = lambda acc: (acc, acc.to(torch.float16), acc.sum(-1), acc > 0)  # noqa: E731
        types = lambda **how: [y.dtype for y in gemmery.scaled_matmul(a, b, epilogue=kept, **how)]  # noqa: B023, E731
        assert types() == [BF16, torch.float16, F32, torch.bool]
        assert types(out_dtype=(F32, None, None, None)) == [F32, torch.float16, F32, torch.bool]
        assert types(out_dtype=(None, F32, None, None)) == [BF16, F32, F32, torch.bool]
        y = gemmery.scaled_matmul(a, b, epilogue=epilogues.static_fp8, args=(0.1,))
        assert y.dtype == E4M3


@pytest.mark.parametrize("m", [1, 2, 3])
@pytest.mark.parametrize("n", [1, 2, 3])
def test_small_products(m, n):
    a, b = gemmery.quantize_activations(values(m, 7)), gemmery.quantize_activations(values(n, 7))
    want = a.dequantize(F64) @ b.dequantize(F64).T
    near(gemmery.scaled_matmul(a, b), want)
    for bias in (values(n), values(m, 1), values(1)):
        near(gemmery.scaled_matmul(a, b, bias=bias), want + bias)


def test_compiled():
    one, two = gemmery.epilogue(lambda acc: acc + 1), gemmery.epilogue(lambda acc: acc + 2)
    b = gemmery.quantize_activations(values(8, 32))

    def layer(x, data, scale, function):
        weight = ScaledTensor(data, scale)
        return gemmery.scaled_matmul(gemmery.quantize_activations(x), weight, epilogue=function)

    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend="aot_eager")
    for m, function in ((4, None), (4, one), (4, two), (7, one), (1, None)):
        x = values(m, 32, seed=m)
        torch.testing.assert_close(
            compiled(x, b.data, b.scale, function), layer(x, b.data, b.scale, function)
        )


A, B = gemmery.quantize_activations(values(3, 8)), gemmery.quantize_activations(values(4, 8))
ROOT = torch.ones(4, requires_grad=True)
PRODUCTS = [
    (TypeError, lambda: gemmery.scaled_matmul(A.data, B), "a is a Tensor; it must be a gemmery.ScaledTensor, as gemmery.quantize_activations makes"),
    (TypeError, lambda: gemmery.scaled_matmul(A, B.data), "b is a Tensor; it must be a gemmery.ScaledTensor, or a gemmery.SparseTensor of e4m3"),
    (ValueError, lambda: gemmery.scaled_matmul(A, gemmery.quantize_activations(values(4, 9))), "a is (3, 8) and b is (4, 9): inner sizes 8 and 9 differ"),
    (ValueError, lambda: gemmery.scaled_matmul(A, gemmery.quantize_activations(values(2, 4, 8))), "b is (2, 4, 8); it must be (N, K)"),
    (TypeError, lambda: gemmery.scaled_matmul(A, gemmery.quantize_activations(values(4, 8), "int8")), "a is torch.float8_e4m3fn and b is torch.int8"),
    (ValueError, lambda: gemmery.scaled_matmul(A, B.to("meta")), "a is on cpu and b on meta"),
    (ValueError, lambda: gemmery.scaled_matmul(A, B, bias=torch.ones(3)), "bias is (3,); it must broadcast to the product, (3, 4)"),
    (ValueError, lambda: gemmery.scaled_matmul(A, B, bias=torch.ones(1, 3, 4)), "bias is (1, 3, 4)"),
    (TypeError, lambda: gemmery.scaled_matmul(A, B, bias=1.0), "bias is a float"),
    (TypeError, lambda: gemmery.scaled_matmul(A, B, args=(1,)), "args are given without an epilogue; give epilogue= too, or leave them out"),
    (TypeError, lambda: gemmery.scaled_matmul(A, B, epilogue=torch.add, args=ROOT), "args is a Tensor"),
    (TypeError, lambda: gemmery.scaled_matmul(A, B, epilogue="gelu"), "epilogue is a str"),
    (TypeError, lambda: gemmery.scaled_matmul(A, B, bias=ROOT), "no gradient for torch.float8_e4m3fn operands"),
    (TypeError, lambda: gemmery.scaled_matmul(A, B, epilogue=torch.add, args=(ROOT,)), "no gradient"),
]  # fmt: skip


@pytest.mark.parametrize(("error", "call", "said"), PRODUCTS, ids=lambda x: x if isinstance(x, str) else "")
def test_wrong_arguments_of_products(error, call, said):
    fails(error, call, "scaled_matmul: ", said)


def test_the_users_arguments_keep_their_numbers():
    fails(
        ValueError,
        lambda: gemmery.scaled_matmul(A, B, epilogue=epilogues.residual, args=(X,)),
        "args[0] is (3, 5)",
    )


def test_the_reference_is_what_runs_here():
    x = values(3, 300).half()
    for per in ("token", "block", "tensor"):
        q, want = gemmery.quantize_activations(x, per=per), reference(x, per=per)
        assert torch.equal(q.scale, want.scale)
        assert torch.equal(q.data.view(torch.uint8), want.data.view(torch.uint8))


@pytest.mark.parametrize("biased", [False, True])
def test_blocks_compiled_without_an_epilogue(biased):
    a = gemmery.quantize_activations(torch.randn(5, 256), per="block")
    b = gemmery.ScaledTensor(torch.randn(8, 256).to(torch.float8_e4m3fn), torch.rand(1, 2) + 0.5)
    bias = torch.randn(8) if biased else None

    def product(data, scale, bias):
        return gemmery.scaled_matmul(gemmery.ScaledTensor(data, scale), b, bias=bias)

    compiled = torch.compile(product, backend="eager", fullgraph=True)
    got, want = compiled(a.data, a.scale, bias), product(a.data, a.scale, bias)
    assert torch.equal(got, want)


@pytest.mark.parametrize("name", ["matmul", "linear", "bmm"])
def test_other_products_take_no_scaled_operands(name):
    """Their checks know nothing of scales: shapes and codes that do not go together would give a result."""
    function = getattr(gemmery, name)
    for b in (B, B.data, sparse(4, 8), int8_of(sparse(4, 8, code=""))):
        fails(TypeError, functools.partial(function, A, b), f"{name}: ", "gemmery.scaled_matmul")


def test_plans_check_scaled_operands():
    mx = gemmery.quantize_activations(values(3, 8), per="mx")
    assert gemmery.plan(A, B) is None
    assert gemmery.plan(A, sparse(4, 8)) is None
    for error, a, b, said in (
        (ValueError, A, gemmery.quantize_activations(values(4, 9)), "inner sizes 8 and 9 differ"),
        (TypeError, A, int8_of(sparse(4, 8, code="")), "b keeps elements of int8"),
        (ValueError, mx, sparse(4, 8), "a has scales 1x32"),
        (TypeError, A, B.data, "b is a Tensor"),
    ):
        fails(error, functools.partial(gemmery.plan, a, b), "plan: ", said)


# ---------------------------------------------------------------------------------------------------------------------
# With a sparse weight


def sparse(*shape, code="e4m3", seed=1):
    """A 2:4 sparse weight whose rows have scales of their own."""
    w = gemmery.sparsify(values(*shape, seed=seed).to(BF16))
    return gemmery.quantize(w, code) if code else w


def int8_of(w):
    return gemmery.quantize(w, "int8")


@pytest.mark.parametrize("fast", [False, True])
@pytest.mark.parametrize("per", ["token", "tensor"])
@pytest.mark.parametrize("format", ["e4m3", "e5m2"])
@pytest.mark.parametrize("shape", [(5, 40, 100), (1, 7, 4), (33, 64, 128), (2, 3, 64, 260)], ids=str)
def test_products_with_sparse_weights(shape, format, per, fast):
    *rows, n, k = shape
    a, w = gemmery.quantize_activations(values(*rows, k), format, per=per), sparse(n, k)
    product = functools.partial(gemmery.scaled_matmul, a, w, fast_accum=fast)
    bias, want = values(n, seed=2), a.dequantize(F64) @ w.dense(F64).T
    near(product(), want)
    near(product(bias=bias, out_dtype=F32), want + bias, F32)
    near(product(bias=values(*rows, 1, seed=3), out_dtype=F32), want + values(*rows, 1, seed=3), F32)
    half = product(out_dtype=torch.float16)
    assert half.dtype == torch.float16
    near(half.to(F32).to(BF16), want)
    r = values(*rows, n, seed=4)
    y = product(bias=bias, epilogue=lambda acc, r: F.gelu(acc) + r, args=(r,), out_dtype=F32)
    near(y, F.gelu(want + bias) + r, F32)
    for dtype in (F32, BF16):
        out = torch.full((n, *rows), math.nan, dtype=dtype).movedim(0, -1)
        assert product(out=out) is out
        near(out, want, dtype)


def test_gate_and_up_in_a_sparse_weight():
    a, w = gemmery.quantize_activations(values(5, 100)), sparse(128, 100)
    want = a.dequantize(F64) @ w.dense(F64).T
    near(gemmery.scaled_matmul(a, w, epilogue=epilogues.swiglu), epilogues.swiglu(want))
    y, amax = gemmery.scaled_matmul(a, w, epilogue=epilogues.with_row_amax)
    near(y, want)
    near(amax, want.abs().amax(-1), F32)


@pytest.mark.parametrize("per", ["token", "tensor"])
def test_no_rows_times_a_sparse_weight(per):
    a, w = gemmery.quantize_activations(torch.empty(0, 100), per=per), sparse(40, 100)
    assert gemmery.scaled_matmul(a, w).shape == (0, 40)
    assert gemmery.scaled_matmul(a, w, bias=torch.ones(40), out_dtype=F32).dtype == F32


def test_which_scales_a_sparse_weight_has():
    """Of its rows, one for all, and none; the type that its numbers become in other products is of no account."""
    a, w = gemmery.quantize_activations(values(5, 100)), sparse(40, 100)
    one = w.with_parts(w.parts() | {"channel": torch.tensor([0.25])})
    for weight in (w, one, w.unscaled(), w.half()):
        near(gemmery.scaled_matmul(a, weight, out_dtype=F32), a.dequantize(F64) @ weight.dense(F64).T, F32)


@pytest.mark.parametrize("dtype", [BF16, torch.float16])
def test_autocast_leaves_fp8_and_sums_as_they_are(dtype):
    """Sums of numbers of fp8 pass the largest of float16, and have more digits than bfloat16."""
    a = gemmery.quantize_activations(values(5, 100))
    for b in (gemmery.quantize_activations(values(40, 100)), sparse(40, 100)):
        want = gemmery.scaled_matmul(a, b, epilogue=torch.neg, out_dtype=F32)
        with torch.autocast("cpu", dtype):
            assert torch.equal(gemmery.scaled_matmul(a, b, epilogue=torch.neg, out_dtype=F32), want)


W2_4 = sparse(4, 8)
WITH_SPARSE = [
    (TypeError, lambda: gemmery.scaled_matmul(A.data, W2_4), "a is a Tensor; it must be a gemmery.ScaledTensor, as gemmery.quantize_activations makes"),
    (TypeError, lambda: gemmery.scaled_matmul(W2_4, A), "a is a SparseTensor; it must be a gemmery.ScaledTensor"),
    (TypeError, lambda: gemmery.scaled_matmul(A, sparse(4, 8, code="")), "b keeps elements of torch.bfloat16; a sparse b must keep e4m3: use gemmery.quantize(gemmery.sparsify(w), \"e4m3\")"),
    (TypeError, lambda: gemmery.scaled_matmul(A, int8_of(sparse(4, 8, code=""))), "b keeps elements of int8"),
    (TypeError, lambda: gemmery.scaled_matmul(A, sparse(4, 8, code="int4")), "b keeps elements of int4"),
    (TypeError, lambda: gemmery.scaled_matmul(gemmery.quantize_activations(values(3, 8), "int8"), W2_4), "a is torch.int8 and b is torch.float8_e4m3fn"),
    (ValueError, lambda: gemmery.scaled_matmul(gemmery.quantize_activations(values(3, 256), per="block"), sparse(4, 256)), "a has scales 1x128; with a sparse b, there must be one scale, or one per row"),
    (ValueError, lambda: gemmery.scaled_matmul(gemmery.quantize_activations(values(3, 8), per="mx"), W2_4), "a has scales 1x32"),
    (ValueError, lambda: gemmery.scaled_matmul(blocks_of(values(200, 256)), sparse(4, 256)), "a has scales 128x128"),
    (ValueError, lambda: gemmery.scaled_matmul(A, sparse(4, 12)), "a is (3, 8) and b is (4, 12): inner sizes 8 and 12 differ"),
    (ValueError, lambda: gemmery.scaled_matmul(A, sparse(2, 4, 8)), "b is (2, 4, 8); it must be (N, K)"),
    (ValueError, lambda: gemmery.scaled_matmul(A, W2_4.to("meta")), "a is on cpu and b on meta"),
    (ValueError, lambda: gemmery.scaled_matmul(A, W2_4, bias=torch.ones(3)), "bias is (3,); it must broadcast to the product, (3, 4)"),
    (TypeError, lambda: gemmery.scaled_matmul(A, W2_4, bias=1.0), "bias is a float"),
    (ValueError, lambda: gemmery.scaled_matmul(A, W2_4, out=torch.empty(4, 3)), "out is (4, 3); the result is (3, 4)"),
    (TypeError, lambda: gemmery.scaled_matmul(A, W2_4, out=torch.empty(3, 4), out_dtype=BF16), "out is torch.float32; the result is torch.bfloat16"),
    (TypeError, lambda: gemmery.scaled_matmul(A, W2_4, out=W2_4), "out is a SparseTensor"),
    (TypeError, lambda: gemmery.scaled_matmul(A, (W2_4, W2_4), epilogue=epilogues.swiglu), "b is a tuple"),
    (TypeError, lambda: gemmery.scaled_matmul(A, W2_4, bias=ROOT), "no gradient for torch.float8_e4m3fn operands"),
    (TypeError, lambda: gemmery.scaled_matmul(A, W2_4, epilogue=torch.add, args=(ROOT,)), "no gradient"),
    (TypeError, lambda: gemmery.scaled_matmul(A, W2_4.with_parts(W2_4.parts() | {"channel": ROOT})), "no gradient"),
    (TypeError, lambda: gemmery.scaled_matmul(ScaledTensor(A.data, ROOT[:3, None]), W2_4), "no gradient"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("error", "call", "said"), WITH_SPARSE, ids=lambda x: x if isinstance(x, str) else ""
)
def test_wrong_arguments_with_sparse_weights(error, call, said):
    fails(error, call, "scaled_matmul: ", said)


def test_plain_fp8_with_a_sparse_weight_is_sent_to_scaled_matmul():
    x = A.data
    advice = "multiply fp8 by gemmery.scaled_matmul, with x from gemmery.quantize_activations, or give x in torch.bf"
    said = "linear: x is torch.float8_e4m3fn and weight is a torch.bfloat16 weight that keeps e4m3; "
    fails(TypeError, lambda: gemmery.linear(x, W2_4), said + advice)
    fails(
        TypeError,
        lambda: gemmery.matmul(x, W2_4),
        "matmul: a is torch.float8_e4m3fn and b is a torch.bfloat16",
    )
    other = sparse(4, 8, code="int4")
    fails(TypeError, lambda: gemmery.linear(x, other), "they must have the same type: use x.to(weight.dtype)")


def test_sparse_weights_as_fakes():
    a, w = gemmery.quantize_activations(values(5, 100)), sparse(40, 100)
    for how in ({}, {"out_dtype": F32}, {"epilogue": torch.relu}):
        want = gemmery.scaled_matmul(a, w, **how)
        with FakeTensorMode() as mode:
            data, scale = (mode.from_tensor(x) for x in (a.data, a.scale))
            weight = w.with_parts({name: mode.from_tensor(part) for name, part in w.parts().items()})
            fake = gemmery.scaled_matmul(ScaledTensor(data, scale), weight, **how)
        assert type(fake) is FakeTensor
        assert (fake.shape, fake.stride(), fake.dtype) == (want.shape, want.stride(), want.dtype)


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_with_sparse_weights(dynamic):
    add = gemmery.epilogue(lambda acc, r: F.gelu(acc) + r)
    bias, r = values(40), values(40, seed=3)

    def layer(x, w, epilogue):
        a = gemmery.quantize_activations(x)
        plain = gemmery.scaled_matmul(a, w, bias=bias, out_dtype=F32, fast_accum=True)
        return plain, gemmery.scaled_matmul(a, w, epilogue=epilogue, args=(r,))

    compiled = torch.compile(layer, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for m, seed in ((4, 1), (7, 1), (7, 5), (1, 1)):
        x, w = values(m, 100, seed=m), sparse(40, 100, seed=seed)
        for got, want in zip(compiled(x, w, add), layer(x, w, add), strict=True):
            torch.testing.assert_close(got, want)
