"""Wrong arguments: the message says what was given, under the names that the caller used, before anything is written."""

import math

import pytest
import torch

import gemmery

F32, F64, F16, BF16 = torch.float32, torch.float64, torch.float16, torch.bfloat16
INT8, INT32, E4M3 = torch.int8, torch.int32, torch.float8_e4m3fn


def t(*shape, dtype=F32, device="cpu"):
    return torch.empty(shape, dtype=dtype, device=device)


def fails(error, call, *said):
    """The call raises `error`, and its message has all of `said`."""
    with pytest.raises(error) as caught:
        call()
    # No subclass: dispatcher and index errors must not pass for ours.
    assert caught.type is error
    for word in said:
        assert str(word) in str(caught.value), f"{word!r} is not in {str(caught.value)!r}"


# Both ways a call can take: straight, and through torch's dispatcher. They have to say the same.
@pytest.fixture(params=(False, True), ids=("eager", "gradients"))
def grad(request):
    def mark(tensor):
        return tensor.requires_grad_() if request.param else tensor

    return mark


SHAPES = [
    ("matmul", (3, 4), (5, 6), "inner sizes 4 and 5 differ"),
    ("matmul", (4,), (5,), "inner sizes 4 and 5 differ"),
    ("matmul", (3, 4), (5,), "inner sizes 4 and 5 differ"),
    ("matmul", (4,), (2, 5, 4), "inner sizes 4 and 5 differ"),
    ("matmul", (2, 3, 4), (3, 4, 5), "batch dimensions do not broadcast"),
    ("matmul", (2, 1, 3, 4), (3, 2, 4, 5), "batch dimensions do not broadcast"),
    ("bmm", (2, 3, 4), (3, 4, 5), "batch sizes differ"),
    ("bmm", (1, 3, 4), (3, 4, 5), "batch sizes differ"),
    ("bmm", (2, 3, 4), (2, 5, 6), "inner sizes 4 and 5 differ"),
]


@pytest.mark.parametrize(("op", "a", "b", "said"), SHAPES, ids=str)
def test_shapes(op, a, b, said, grad):
    fails(ValueError, lambda: getattr(gemmery, op)(grad(t(*a)), t(*b)), f"{op}: a is {a} and b is {b}", said)


def test_shapes_of_linear_are_those_that_were_given(grad):
    """Not the transposed weight's, and not under matmul's names."""
    fails(
        ValueError,
        lambda: gemmery.linear(grad(t(3, 4)), t(6, 5)),
        "linear: ",
        "x is (3, 4)",
        "weight is (6, 5)",
        "4 and 5",
    )
    fails(
        ValueError,
        lambda: gemmery.linear(grad(t(3, 4)), t(5)),
        "linear: ",
        "x is (3, 4)",
        "weight is (5,)",
        "4 and 5",
    )
    fails(ValueError, lambda: gemmery.linear(grad(t(3, 4)), t(4, 6)), "for a weight (K, N)", "weight.T")
    fails(ValueError, lambda: gemmery.linear(grad(t(3, 4)), t(2, 6, 4)), "linear: weight is (2, 6, 4)")
    fails(ValueError, lambda: gemmery.linear(grad(t(3, 4)), t(6, 4), t(5)), "linear: bias is (5,)", (3, 6))


@pytest.mark.parametrize(
    ("op", "names"), [("matmul", "ab"), ("linear", ("x", "weight"))], ids=("matmul", "linear")
)
def test_scalars(op, names):
    for position, name in enumerate(names):
        arguments = [t(3, 3), t(3, 3)]
        arguments[position] = t()
        fails(ValueError, lambda arguments=arguments: getattr(gemmery, op)(*arguments), f"{op}: {name} is ")


@pytest.mark.parametrize("shape", ((3,), (1, 3, 4), ()), ids=str)
def test_ranks(shape, grad):
    fails(
        ValueError,
        lambda: gemmery.addmm(t(3, 3), grad(t(*shape)), t(4, 3)),
        f"addmm: a is {shape}",
        "2 dimensions",
    )
    fails(
        ValueError,
        lambda: gemmery.addmm(t(3, 3), t(3, 4), grad(t(*shape))),
        f"addmm: b is {shape}",
        "2 dimensions",
    )
    if len(shape) != 3:
        fails(
            ValueError, lambda: gemmery.bmm(grad(t(*shape)), t(1, 4, 3)), f"bmm: a is {shape}", "3 dimensions"
        )


@pytest.mark.parametrize("shape", ((4,), (2, 5), (3, 4), (1, 3, 5), (6, 3, 5)), ids=str)
def test_shapes_of_addends(shape, grad):
    a, b = grad(t(3, 4)), t(4, 5)
    fails(ValueError, lambda: gemmery.matmul(a, b, bias=t(*shape)), f"matmul: bias is {shape}", (3, 5))
    fails(ValueError, lambda: gemmery.addmm(t(*shape), a, b), f"addmm: input is {shape}", (3, 5))


@pytest.mark.parametrize("shape", ((3, 4), (5, 3), (15,), (1, 3, 5), (0,)), ids=str)
def test_shapes_of_out(shape):
    out = torch.full(shape, math.nan)
    fails(ValueError, lambda: gemmery.matmul(t(3, 4), t(4, 5), out=out), f"matmul: out is {shape}", (3, 5))
    assert out.isnan().all()
    assert out.shape == shape


# ---------------------------------------------------------------------------------------------------------------------
# Types


@pytest.mark.parametrize(
    "dtype", (torch.int16, INT32, torch.int64, torch.uint8, torch.bool, torch.complex64), ids=str
)
def test_types_that_are_not_supported(dtype):
    fails(
        TypeError,
        lambda: gemmery.matmul(t(3, 4, dtype=dtype), t(4, 5, dtype=dtype)),
        "matmul: a is",
        dtype,
        "float16",
        "int8",
    )
    fails(TypeError, lambda: gemmery.matmul(t(3, 4), t(4, 5, dtype=dtype)), "matmul: b is", dtype)
    fails(TypeError, lambda: gemmery.linear(t(3, 4), t(5, 4, dtype=dtype)), "linear: weight is", dtype)


@pytest.mark.parametrize(
    ("one", "other"), [(F16, BF16), (F32, F64), (F16, F32), (INT8, F32), (E4M3, F16), (E4M3, INT8)], ids=str
)
def test_types_that_differ(one, other):
    a, b = t(3, 4, dtype=one), t(4, 5, dtype=other)
    fails(TypeError, lambda: gemmery.matmul(a, b), f"matmul: a is {one} and b is {other}")
    fails(TypeError, lambda: gemmery.linear(a, b.t()), "linear: ", f"x is {one}", f"weight is {other}")


@pytest.mark.parametrize(
    ("dtype", "asked"),
    [(F16, F64), (F32, F64), (F64, F16), (F32, INT32), (INT8, F32), (INT8, INT8), (E4M3, E4M3), (F32, "fp32"), (F32, float)],
    ids=str,
)  # fmt: skip
def test_types_of_results(dtype, asked):
    a, b = t(3, 4, dtype=dtype), t(4, 5, dtype=dtype)
    fails(TypeError, lambda: gemmery.matmul(a, b, out_dtype=asked), f"matmul: out_dtype is {asked}", dtype)


def test_types_of_out():
    fails(
        TypeError, lambda: gemmery.matmul(t(3, 4), t(4, 5), out=t(3, 5, dtype=F64)), "matmul: out", F64, F32
    )
    fails(
        TypeError,
        lambda: gemmery.matmul(t(3, 4), t(4, 5), out=t(3, 5, dtype=F16), out_dtype=F32),
        "matmul: out is",
        F16,
        F32,
    )


@pytest.mark.parametrize(
    ("dtype", "addend"),
    [(F32, INT32), (F32, INT8), (INT8, F32), (F16, E4M3), (E4M3, E4M3), (F32, torch.complex64), (INT8, torch.bool),
     (F32, torch.int64)],
    ids=str,
)  # fmt: skip
def test_types_of_addends(dtype, addend):
    a, b = t(3, 4, dtype=dtype), t(4, 5, dtype=dtype)
    fails(
        TypeError, lambda: gemmery.matmul(a, b, bias=t(5, dtype=addend)), f"matmul: bias is {addend}", dtype
    )
    fails(TypeError, lambda: gemmery.addmm(t(5, dtype=addend), a, b), f"addmm: input is {addend}", dtype)


@pytest.mark.parametrize("value", ([1.0], 3.0, "x", t(4, 4).numpy()), ids=lambda value: type(value).__name__)
def test_arguments_that_are_no_tensors(value):
    x, kind = t(4, 4), type(value).__name__
    fails(TypeError, lambda: gemmery.matmul(value, x), f"matmul: a is a {kind}")
    fails(TypeError, lambda: gemmery.matmul(x, value), f"matmul: b is a {kind}")
    fails(TypeError, lambda: gemmery.matmul(x, x, bias=value), f"matmul: bias is a {kind}")
    fails(TypeError, lambda: gemmery.matmul(x, x, out=value), f"matmul: out is a {kind}")
    fails(TypeError, lambda: gemmery.linear(value, x), f"linear: x is a {kind}")
    fails(TypeError, lambda: gemmery.linear(x, value), f"linear: weight is a {kind}")
    fails(TypeError, lambda: gemmery.linear(x, x, value), f"linear: bias is a {kind}")
    fails(TypeError, lambda: gemmery.addmm(value, x, x), f"addmm: input is a {kind}")
    fails(TypeError, lambda: gemmery.addmm(x, value, x), f"addmm: a is a {kind}")
    fails(TypeError, lambda: gemmery.bmm(x[None], value), f"bmm: b is a {kind}")


def test_none_is_no_operand():
    fails(TypeError, lambda: gemmery.matmul(t(4, 4), None), "matmul: b is a NoneType")
    fails(TypeError, lambda: gemmery.addmm(None, t(4, 4), t(4, 4)), "addmm: input is a NoneType")


@pytest.mark.parametrize("name", ("alpha", "beta"))
@pytest.mark.parametrize("value", (2j, "2", None, [2]), ids=str)
def test_factors_that_are_no_real_numbers(name, value):
    call = lambda: gemmery.addmm(t(3, 3), t(3, 3), t(3, 3), **{name: value})  # noqa: E731
    fails(TypeError, call, f"addmm: {name} is ", type(value).__name__)


@pytest.mark.parametrize("name", ("alpha", "beta"))
@pytest.mark.parametrize("value", (2.5, math.nan, math.inf, 1 << 40, -0.1), ids=str)
def test_factors_of_integers(name, value):
    a, c = t(7, 7, dtype=INT8), t(7, 7, dtype=INT32)
    gemmery.addmm(c, a, a, **{name: 2})  # the same layouts, so the next call finds a plan
    fails(TypeError, lambda: gemmery.addmm(c, a, a, **{name: value}), f"addmm: {name} is {value}", "int8")


@pytest.mark.parametrize("value", ("fp32", "TF32", "highest", None, 3), ids=str)
def test_precisions(value):
    fails(
        ValueError,
        lambda: gemmery.matmul(t(3, 4), t(4, 5), precision=value),
        f"precision is {value!r}",
        "ieee",
        "tf32x3",
    )


# ---------------------------------------------------------------------------------------------------------------------
# Devices


def test_mixed_devices(grad):
    here, there = t(4, 4), t(4, 4, device="meta")
    fails(ValueError, lambda: gemmery.matmul(grad(here), there), "matmul: a is on cpu", "b on meta")
    fails(ValueError, lambda: gemmery.matmul(there, here), "matmul: a is on meta", "b on cpu")
    fails(ValueError, lambda: gemmery.linear(here, there), "linear: x is on cpu", "weight on meta")
    fails(ValueError, lambda: gemmery.matmul(here, here, bias=there), "matmul: a is on cpu", "bias on meta")
    fails(ValueError, lambda: gemmery.addmm(there, here, here), "addmm: a is on cpu", "input on meta")
    fails(
        ValueError,
        lambda: gemmery.bmm(t(1, 2, 3), t(1, 3, 2, device="meta")),
        "bmm: a is on cpu",
        "b on meta",
    )


def test_out_on_another_device():
    fails(
        ValueError,
        lambda: gemmery.matmul(t(4, 4), t(4, 4), out=t(4, 4, device="meta")),
        "a is on cpu",
        "out on meta",
    )


def test_meta_tensors_have_results_without_data():
    result = gemmery.linear(t(2, 3, 4, device="meta"), t(5, 4, device="meta"), t(5, device="meta"))
    assert (result.shape, result.device.type) == ((2, 3, 5), "meta")


@pytest.mark.parametrize("convert", (torch.Tensor.to_sparse, torch.Tensor.to_sparse_csr), ids=("coo", "csr"))
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support:UserWarning")
def test_sparse_tensors(convert):
    x = torch.eye(4)
    fails(TypeError, lambda: gemmery.matmul(convert(x), x), "matmul: a is", "sparse")
    fails(TypeError, lambda: gemmery.matmul(x, convert(x)), "matmul: b is", "sparse")


# ---------------------------------------------------------------------------------------------------------------------
# Memory


def test_out_and_operands_share_memory():
    memory = torch.ones(64)
    x = memory[:16].view(4, 4)
    before = memory.clone()
    for out in (x, x.t(), memory[1:17].view(4, 4), memory[15:31].view(4, 4), memory[::2][:16].view(4, 4)):
        fails(
            ValueError,
            lambda out=out: gemmery.matmul(x, torch.ones(4, 4), out=out),
            "matmul: out and a share memory",
        )
        fails(
            ValueError,
            lambda out=out: gemmery.matmul(torch.ones(4, 4), x, out=out),
            "matmul: out and b share memory",
        )
        fails(
            ValueError,
            lambda out=out: gemmery.linear(torch.ones(4, 4), x, out=out),
            "linear: out and weight share memory",
        )
    assert torch.equal(memory, before)
    gemmery.matmul(x, torch.ones(4, 4), out=memory[16:32].view(4, 4))
    assert (memory[16:32] == 4).all()


def test_interleaved_columns_share_nothing():
    memory = torch.ones(4, 8)
    gemmery.matmul(memory[:, ::2], torch.ones(4, 4), out=memory[:, 1::2])
    assert torch.equal(memory, torch.tensor([1.0, 4.0] * 4).expand(4, 8))


def test_out_and_addend_share_some_memory():
    memory = torch.ones(64)
    out, a, b = memory[:16].view(4, 4), torch.ones(4, 3), torch.ones(3, 4)
    for c in (out.t(), out[0], out[:1], out[:, :1], memory[4:20].view(4, 4), out[0, 0]):
        fails(ValueError, lambda c=c: gemmery.addmm(c, a, b, out=out), "addmm: out and input share memory")
        fails(
            ValueError, lambda c=c: gemmery.matmul(a, b, bias=c, out=out), "matmul: out and bias share memory"
        )
    assert (memory == 1).all()
    # What is not read may lie anywhere.
    gemmery.addmm(out.t(), a, b, beta=0, out=out)
    assert (out == 3).all()


@pytest.mark.parametrize(
    ("shape", "strides"),
    [((4, 4), (0, 1)), ((4, 4), (1, 1)), ((4, 4), (3, 1)), ((2, 4, 4), (0, 4, 1))],
    ids=str,
)
def test_out_overlaps_itself(shape, strides):
    out = torch.zeros(64).as_strided(shape, strides)
    a, b = torch.ones(*shape[:-1], 3), torch.ones(*shape[:-2], 3, shape[-1])
    fails(ValueError, lambda: gemmery.matmul(a, b, out=out), "matmul: out", strides, shape)
    assert not out.any()


def test_nothing_is_written_before_an_error():
    out = torch.full((3, 5), math.nan)
    for call in (
        lambda: gemmery.matmul(t(3, 4), t(4, 5), bias=t(4), out=out),
        lambda: gemmery.matmul(t(3, 4), t(4, 5), precision="no", out=out),
        lambda: gemmery.matmul(t(3, 4), t(4, 5), config="no", out=out),
        lambda: gemmery.matmul(t(3, 4), t(4, 5, device="meta"), out=out),
    ):
        with pytest.raises(ValueError, match=r"\w"):
            call()
    assert out.isnan().all()


HINTS = {
    "bias is a function": (
        lambda: gemmery.linear(t(3, 4), t(6, 4), torch.nn.functional.gelu), TypeError, "did you mean epilogue=?"
    ),
    "epilogue by name": (
        lambda: gemmery.linear(t(3, 4), t(6, 4), epilogue="gelu"), TypeError, "such as gemmery.epilogues.gelu"
    ),
    "a weight in matmul": (lambda: gemmery.matmul(t(3, 4), t(6, 4)), ValueError, "for a weight (N, K), give b.T"),
    "precision": (lambda: gemmery.linear(t(3, 4), t(6, 4), precision="high"), ValueError, "tf32x3, torch"),
    "an argument is missing": (
        lambda: gemmery.linear(t(3, 4), t(6, 4), epilogue=lambda acc, g: acc * g), TypeError,
        "'g'; the epilogue is given the product and 0 of args=",
    ),
    "an argument too many": (
        lambda: gemmery.matmul(t(3, 4), t(4, 6), epilogue=lambda acc: acc, args=(1.0,)), TypeError,
        "2 were given; the epilogue is given the product and 1 of args=",
    ),
    "fp8": (lambda: gemmery.quantize(t(6, 32), "fp8"), ValueError, "did you mean 'e4m3'?"),
    "capitals": (lambda: gemmery.quantize(t(6, 32), "INT4"), ValueError, "did you mean 'int4'?"),
    "transposed scales": (
        lambda: gemmery.formats.from_codes(
            torch.zeros(64, 256, dtype=torch.uint8), "int4", scales=torch.ones(4, 64).half()
        ),
        ValueError, "scales is (4, 64); with codes (64, 256) it must be (N, groups)",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", HINTS)
def test_messages_say_what_to_do(name):
    call, error, text = HINTS[name]
    fails(error, call, text)


def test_errors_inside_an_epilogue_stay_as_they_are():
    with pytest.raises(TypeError) as caught:
        gemmery.matmul(t(3, 4), t(4, 6), epilogue=lambda acc: acc + "1")
    assert "args=" not in str(caught.value)
