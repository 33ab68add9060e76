"""Which functions are one epilogue, what tracing refuses and how it says so, and the random numbers; all without a kernel."""

import doctest
import functools
import inspect
import operator
import subprocess
import sys
import traceback
import warnings

import pytest
import torch
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import gemmery
from gemmery import documentation, epilogues
from gemmery.epilogues import Untraceable, compose, library, programs, random
from gemmery.epilogues.decompositions import decompositions
from gemmery.epilogues.identity import capture
from gemmery.product import prologue
from gemmery.product.build import make_call
from gemmery.product.epilogue import program as program_of
from gemmery.product.spec import Functions, Options
from tests.oracle import values

A, B = values((24, 16), torch.float32, 1), values((16, 40), torch.float32, 2)
OPTIONS = Options(None, "ieee", False, False, None)


def program(function, args=(), a=A, b=B):
    """The device function of an epilogue, made as a product on a GPU would."""
    return program_of(make_call("matmul", a, b, None, Functions(function, args), OPTIONS))


def key(function):
    found = capture(function).key
    assert found is not None
    hash(found)
    return found


def line_of(function, text):
    """Where in this file a function has a line with a text, as errors say it."""
    lines, first = inspect.getsourcelines(function)
    return f"{__file__}:{first + next(i for i, line in enumerate(lines) if text in line)}"


# ---------------------------------------------------------------------------------------------------------------------
# Recording

ACTIVATIONS = {
    "silu": F.silu,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "relu": torch.relu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "softplus": F.softplus,
    "softplus of 2": lambda x: F.softplus(x, 2.0, 3.0),
}


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_decompositions_are_what_torch_computes(name):
    x = torch.cat((torch.linspace(-30, 30, 481, dtype=torch.float64), torch.tensor([0.0, -0.0])))
    table = decompositions()

    class Simpler(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            used.add(func)
            if func not in table:
                return func(*args, **(kwargs or {}))
            with self:
                return table[func](*args, **(kwargs or {}))

    used = set()
    whole = x.clone().requires_grad_()
    expected = ACTIVATIONS[name](whole)
    (slope,) = torch.autograd.grad(expected.sum(), whole)
    parts = x.clone().requires_grad_()
    with Simpler():
        result = ACTIVATIONS[name](parts)
        (made,) = torch.autograd.grad(result.sum(), parts)
    torch.testing.assert_close(result, expected, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(made, slope, rtol=1e-12, atol=1e-14)
    assert used & set(table)


IMPORTS = """
import sys, torch, gemmery
from torch.nn import functional as F
from gemmery.epilogues.trace import Shape, trace
def function(acc, bias, residual):
    gate, up = (acc + bias).chunk(2, dim=-1)
    y = F.silu(gate) * (1 - up).clamp(min=0) + F.gelu(residual) + F.softplus(up)
    return y.to(torch.bfloat16), torch.where(y > 0, y, 0)
wide = torch.float32
trace(function, [Shape(wide, ("M", "N")), Shape(torch.bfloat16, ("N",)), Shape(wide, ("M", "N/2"))], 2, False,
      torch.device("cpu"))
print(*[name for name in ("sympy", "torch._dynamo", "torch._inductor") if name in sys.modules])
"""


@pytest.mark.slow
def test_tracing_does_not_import_a_compiler():
    ran = subprocess.run([sys.executable, "-c", IMPORTS], capture_output=True, text=True, check=True)
    assert ran.stdout.split() == []


def test_constants_made_inside_a_function():
    assert "1.5" in program(lambda acc: acc * torch.tensor(1.5).item()).source
    with pytest.raises(Untraceable, match="neither an argument nor"):
        program(lambda acc: acc + torch.tensor([2.0]))


# ---------------------------------------------------------------------------------------------------------------------
# Identity


@pytest.fixture
def traced(monkeypatch):
    """The functions that were traced."""
    trace, found = programs.trace, []
    monkeypatch.setattr(
        programs, "trace", lambda function, *rest: found.append(function) or trace(function, *rest)
    )
    return found


def test_a_lambda_in_a_loop_is_traced_once(traced):
    made = {id(program(lambda acc: torch.relu(acc) * 3.25)) for _ in range(5)}
    assert len(made) == 1
    assert len(traced) == 1


def test_what_cannot_be_traced_is_tried_once(traced):
    for _ in range(3):
        with pytest.raises(Untraceable, match="cumsum"):
            program(lambda acc: acc.cumsum(-1) * 7.5)
    assert len(traced) == 1


def test_one_program_serves_all_sizes():
    function = lambda acc, s: torch.relu(acc) * s  # noqa: E731
    first = program(function, (torch.ones(40),))
    assert (
        program(function, (torch.ones(80),), values((7, 16), torch.float32), values((16, 80), torch.float32))
        is first
    )
    assert program(function, (torch.ones(40, dtype=torch.float16),)) is not first
    assert program(function, (torch.ones(24, 1),)) is not first
    assert program(function, (2.0,)) is program(function, (3.5,))
    assert program(function, (2,)) is not program(function, (2.0,))


def test_what_makes_a_function_another():
    def factor(x):
        return lambda acc: acc * x

    assert key(factor(2.0)) == key(factor(2.0))
    assert key(factor(2.0)) != key(factor(3.0))
    assert key(factor(0.0)) != key(factor(-0.0))
    assert key(factor(1)) != key(factor(True))
    assert key(factor(1)) != key(factor(1.0))
    assert key(factor(torch.ones(3))) == key(factor(torch.zeros(3)))
    # In one program both would read the same tensor.
    one, other = torch.ones(3), torch.ones(3)
    pair = lambda x, y: lambda acc: acc * x + y  # noqa: E731
    assert key(pair(one, other)) != key(pair(one, one))
    assert key(lambda acc, x=2: acc * x) != key(lambda acc, x=2: acc - x)
    assert key(functools.partial(epilogues.softcap, cap=3.0)) == key(
        functools.partial(epilogues.softcap, cap=3.0)
    )
    assert key(functools.partial(epilogues.softcap, cap=3.0)) != key(
        functools.partial(epilogues.softcap, cap=4.0)
    )


FACTOR = 2.0


def by_global(acc):
    return acc * FACTOR


def test_changed_numbers_are_seen(monkeypatch):
    number = 2.0
    function = lambda acc: acc * number  # noqa: E731
    for changed in (2.0, 3.0, -1.5):
        number = changed
        assert torch.equal(gemmery.matmul(A, B, epilogue=function), (A @ B) * changed)
        assert repr(changed) in program(function).source
        monkeypatch.setitem(globals(), "FACTOR", changed)
        assert torch.equal(gemmery.matmul(A, B, epilogue=by_global), (A @ B) * changed)
        assert repr(changed) in program(by_global).source


def test_changed_tensors_are_seen():
    row = torch.zeros(40)
    function = lambda acc: acc + row  # noqa: E731
    first = program(function)
    for i in range(3):
        row = values((40,), torch.float32, i)
        call = make_call("matmul", A, B, None, Functions(function, ()), OPTIONS)
        assert program_of(call) is first
        assert call.inputs[0] is row
        assert torch.equal(gemmery.matmul(A, B, epilogue=function), A @ B + row)
    row = torch.ones(24, 1)
    assert program(function) is not first


def test_objects_that_change_are_read_anew():
    class Scale:
        factor = 2.0

    scale = Scale()
    function = lambda acc: acc * scale.factor  # noqa: E731
    assert capture(function).key is None
    for factor in (2.0, 3.0):
        scale.factor = factor
        assert f"{factor}" in program(function).source


# ---------------------------------------------------------------------------------------------------------------------
# Composition


def test_compositions_are_one_epilogue():
    shift = lambda acc, b: acc + b  # noqa: E731
    assert key(compose(shift, torch.relu)) == key(compose(shift, torch.relu))
    assert key(compose(epilogues.bias, epilogues.gelu)) == key(compose(epilogues.bias, epilogues.gelu))
    assert key(compose(shift, torch.relu)) != key(compose(torch.relu, shift))
    assert key(compose(epilogues.bias, epilogues.gelu)) != key(compose(epilogues.bias, epilogues.silu))
    args = (torch.ones(40),)
    assert program(compose(shift, torch.relu), args) is program(compose(shift, torch.relu), args)
    # Made of compositions, or of all that is in them.
    nested = compose(compose(shift), gemmery.epilogue(compose(torch.relu, epilogues.silu)))
    assert key(nested) == key(compose(shift, torch.relu, epilogues.silu))


def test_composition_deals_out_arguments():
    b, s, r = (
        values((40,), torch.float32, 3),
        values((24, 1), torch.float32, 4),
        values((24, 40), torch.float32, 5),
    )
    product = A @ B
    chained = compose(
        epilogues.bias,
        epilogues.relu,
        lambda acc, s, by=2: acc * s * by,
        epilogues.residual,
        epilogues.logsumexp,
    )
    want = torch.relu(product + b) * s * 2 + r
    for x, y in zip(
        gemmery.matmul(A, B, epilogue=chained, args=(b, s, r)), (want, want.logsumexp(-1)), strict=True
    ):
        torch.testing.assert_close(x, y)
    assert chained.__name__ == "compose(bias, relu, <lambda>, residual, logsumexp)"


def test_composition_sees_new_tensors():
    row = torch.ones(40)
    made = lambda: compose(lambda acc: acc + row, torch.relu)  # noqa: E731
    first = program(made())
    row = row + 1
    assert program(made()) is first
    assert torch.equal(gemmery.matmul(A, B, epilogue=made()), torch.relu(A @ B + row))


def test_composition_says_what_does_not_fit():
    with pytest.raises(TypeError, match="compose: no function is given; give at least one"):
        compose()
    with pytest.raises(TypeError, match="compose: given a float; it must be a function"):
        compose(torch.relu, 2.0)
    with pytest.raises(TypeError, match="takes a variable number of arguments"):
        compose(lambda acc, *others: acc)
    with pytest.raises(TypeError, match="takes no argument"):
        compose(lambda: 3)
    text = r"given 1 arguments after the product; the functions take 2: bias 1, relu 0, residual 1"
    with pytest.raises(TypeError, match=text):
        gemmery.matmul(
            A, B, epilogue=compose(epilogues.bias, epilogues.relu, epilogues.residual), args=(B[0],)
        )
    with pytest.raises(TypeError, match="logsumexp returns 2 results; only the last"):
        gemmery.matmul(A, B, epilogue=compose(epilogues.logsumexp, torch.relu))


# ---------------------------------------------------------------------------------------------------------------------
# What can't be traced


def data_dependent(acc):
    if acc.sum() > 0:
        return acc
    return -acc


def sum_of_all(acc):
    total = acc * 2
    return acc, total.sum()


def unknown(acc):
    shifted = acc + 1
    return shifted.cumsum(-1)


def used_again(acc):
    largest = acc.amax(-1, keepdim=True)
    return torch.exp(acc - largest)


def by_size(acc):
    return acc / acc.shape[-1]


def in_another_function(acc):
    return unknown(torch.relu(acc))


def in_place(acc, r):
    r.add_(1)
    return acc + r


@pytest.mark.parametrize(
    ("function", "text", "line"),
    [
        (data_dependent, "control flow, or a Python number in it, depends on the data", None),
        (sum_of_all, "only rows, the last dimension, can be reduced", "total.sum()"),
        (unknown, "uses aten.cumsum", "cumsum"),
        (in_another_function, "uses aten.cumsum", None),
        (used_again, "uses the result of a reduction again", "acc - largest"),
        (by_size, "depends on the sizes of the product", None),
        (lambda acc: acc.t(), "uses aten.permute", None),
        (lambda acc: acc[:, :7], "takes a slice that is not a half", None),
        (lambda acc: acc[:3], "takes a slice that is not a half", None),
        (lambda acc: acc[:, 1:], "takes a part of a dimension that is not a half", None),
        (lambda acc: acc.chunk(3, -1)[0], "takes a part of a dimension that is not a half", None),
        (lambda acc: acc.topk(2).values, "uses aten.topk", None),
        (lambda acc: acc * 1j, "makes a tensor of torch.complex64", None),
        (print, "can't be printed", None),
        (lambda acc: acc.reshape(-1), "depends on the sizes of the product", None),
        (lambda acc: acc @ acc.mT, "uses aten.permute", None),
        (lambda acc: "product", "returns something that is not a tensor", None),
        (lambda acc: acc.to(torch.complex64), "makes a tensor of torch.complex64", None),
        (lambda acc: acc.nonzero(), "aten.nonzero", None),
        (lambda acc: torch.rand_like(acc) * acc, "draws random numbers .*gemmery.epilogues.dropout", None),
        (lambda acc: acc * acc.shape[0], "depends on the sizes of the product", None),
        (lambda acc: acc + torch.full_like(acc, acc.shape[-1]), "depends on the sizes of the product", None),
    ],
)
def test_untraceable(function, text, line):
    with pytest.raises(Untraceable, match=text) as caught:
        program(function, b=torch.randn(A.shape[-1], 300))
    message = str(caught.value)
    name = function.__name__
    assert f"the epilogue {name}" in message
    if line is not None:
        assert line_of(function, line) in message
    assert isinstance(caught.value, ValueError)


def test_functions_that_raised_in_a_trace_keep_no_variables():
    """torch's function for printing has a guard of its thread, which must be deleted before the thread ends."""
    with pytest.raises(Untraceable) as caught:
        program(print)
    error, frames = caught.value, []
    while error is not None:
        frames += [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
        error = error.__cause__
    printing = [frame for frame in frames if frame.f_code.co_filename.endswith("_tensor_str.py")]
    assert printing
    assert not any(frame.f_locals for frame in printing)


def test_an_error_that_is_its_own_cause():
    def function(acc):
        error = ValueError("a cause of itself")
        raise error from error

    with pytest.raises(Untraceable, match="a cause of itself"):
        program(function)


@pytest.mark.parametrize("dtype", [torch.uint16, torch.complex64], ids=str)
def test_an_argument_of_a_type_without_a_kernel_is_refused(dtype):
    given = torch.zeros(300).to(dtype)
    with pytest.raises(Untraceable, match=f"takes a tensor of {dtype}, which no kernel reads"):
        program(lambda acc, x: acc + x.to(acc.dtype), (given,), b=torch.randn(A.shape[-1], 300))


@pytest.mark.parametrize("function", [lambda acc: (), lambda acc: []])
def test_an_epilogue_that_returns_nothing_is_refused(function):
    with pytest.raises(Untraceable, match="returns no tensor"):
        program(function)
    with pytest.raises(TypeError, match="matmul: the epilogue returns no tensor"):
        gemmery.matmul(A, B, epilogue=function)


def test_untraceable_changes_of_arguments():
    with pytest.raises(Untraceable, match="changes one of its arguments in place"):
        program(in_place, (torch.ones(24, 40),))


def test_messages_name_the_page_and_not_all_operators():
    with pytest.raises(Untraceable, match=r'see "What can be traced" in \S+/epilogues\S+$') as caught:
        program(unknown)
    assert "sigmoid" not in str(caught.value)


@pytest.mark.parametrize("function", [F.dropout, torch.bernoulli, lambda acc: acc * torch.randn_like(acc)])
def test_torchs_random_numbers_are_refused_by_name(function):
    with pytest.raises(Untraceable, match=r"draws random numbers .*use gemmery\.epilogues\.dropout"):
        program(lambda acc: function(acc))
    program(lambda acc: F.dropout(acc, 0.5, training=False))


PLACES = torch.arange(40)
ROW, WIDE_ROW = torch.randn(40), torch.randn(257)
HINT = "a half as x.shape"


@pytest.mark.parametrize(
    ("function", "fits"),
    [
        (lambda acc: acc.view(24, 40), True),
        (lambda acc: acc.split([20, 20], -1)[0], True),
        (lambda acc: acc + torch.ones(40), True),
        (lambda acc, row: acc + row, False),
        (lambda acc: acc.no_such_method(), False),
        (lambda acc: acc + "1", False),
        (lambda acc: (_ for _ in ()).throw(ValueError("no")), False),
    ],
)
def test_sizes_are_hinted_at_where_torch_complains_about_them(function, fits):
    with pytest.raises(Untraceable, match="can't be traced") as caught:
        program(function)
    assert (HINT in str(caught.value)) is fits


def test_an_odd_number_of_columns_has_no_halves():
    with pytest.raises(Untraceable, match=r"swiglu .* odd number of columns"):
        program(epilogues.swiglu, b=torch.randn(A.shape[1], 47))


def test_lines_of_composed_functions():
    with pytest.raises(Untraceable, match="cumsum") as caught:
        program(compose(torch.relu, unknown))
    assert line_of(unknown, "cumsum") in str(caught.value)


def test_wrong_numbers_of_arguments():
    with pytest.raises(
        Untraceable, match=r"bias \(.*library.py:\d+\) can't be traced: TypeError: .*argument"
    ):
        program(epilogues.bias)
    with pytest.raises(Untraceable, match="the functions take 1: bias 1, relu 0"):
        program(compose(epilogues.bias, epilogues.relu))


def test_tensors_that_are_neither_arguments_nor_variables():
    class Holder:
        row = torch.ones(40)

    holder = Holder()
    with pytest.raises(Untraceable, match="pass the tensor through args"):
        program(lambda acc: acc + holder.row)
    # Without a kernel there is nothing against it.
    with pytest.warns(UserWarning, match="pass the tensor through args"):
        y = gemmery.matmul(A, B, epilogue=lambda acc: acc + holder.row)
    assert torch.equal(y, A @ B + 1)


@pytest.mark.parametrize("number", (24, 80, 40, 160, 65536, 5))
def test_numbers_that_happen_to_be_stand_ins_are_numbers(number):
    assert f"(acc * {float(number)})" in program(lambda acc: acc * number).source
    a, b = values((3, 24, 16), torch.float32), values((3, 16, 40), torch.float32)
    assert f"(acc * {float(number)})" in program(lambda acc: acc * number, (), a, b).source


# ---------------------------------------------------------------------------------------------------------------------
# What calls refuse


SHAPES = [(23,), (23, 1), (24, 39), (1, 24, 40), (25, 40), (10,), (40, 24)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_shapes_of_arguments(shape):
    with pytest.raises(ValueError, match=r"matmul: args\[1\] is \(") as caught:
        gemmery.matmul(A, B, epilogue=lambda acc, x, y: acc + x + y, args=(1.0, torch.ones(shape)))
    assert str(shape) in str(caught.value)
    assert "(24, 40)" in str(caught.value)


def test_other_errors():
    with pytest.raises(
        TypeError, match="args are given without an epilogue; give epilogue= too, or leave them out"
    ):
        gemmery.matmul(A, B, args=(torch.ones(40),))
    with pytest.raises(TypeError, match="args is a Tensor; it must be a tuple"):
        gemmery.matmul(A, B, epilogue=epilogues.bias, args=torch.ones(40))
    with pytest.raises(TypeError, match="args is a float; it must be a tuple"):
        gemmery.matmul(A, B, epilogue=epilogues.softcap, args=2.0)
    with pytest.raises(TypeError, match=r"epilogue is the class GELU; .*such as GELU\(\)"):
        gemmery.matmul(A, B, epilogue=torch.nn.GELU)
    with pytest.raises(TypeError, match="epilogue is a float; it must be a function"):
        gemmery.matmul(A, B, epilogue=2.0)
    with pytest.raises(TypeError, match="given a int; it must be a function"):
        gemmery.epilogue(3)
    with pytest.raises(ValueError, match="must be matrices"):
        gemmery.matmul(A[0], B, epilogue=epilogues.relu)
    row = torch.ones(7)
    with pytest.raises(ValueError, match=r"matmul: the epilogue's variable row is \(7,\)"):
        gemmery.matmul(A, B, epilogue=lambda acc: acc + row)
    with pytest.raises(ValueError, match="out_dtype names 2 types; the epilogue returns 1"):
        gemmery.matmul(A, B, epilogue=epilogues.relu, out_dtype=(torch.float16, None))
    with pytest.raises(ValueError, match=r"args\[1\] is 9223372036854775808; integers must fit in 64 bits"):
        gemmery.matmul(A, B, epilogue=epilogues.dropout, args=(0.5, 1 << 63))


# ---------------------------------------------------------------------------------------------------------------------
# Random numbers and the library


@pytest.mark.parametrize(
    ("counter", "seed", "want"),
    [
        ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
    ],
)
def test_philox(counter, seed, want):
    """The test vectors of Random123."""
    counter, seed = ([torch.tensor(int(x, 16)) for x in text.split()] for text in (counter, seed))
    assert " ".join(f"{int(x):08x}" for x in random.philox(tuple(counter), tuple(seed))) == want


def test_uniform_counts_row_by_row(monkeypatch):
    whole = random.uniform(torch.empty(6, 5, 7), 3)
    assert whole.dtype == torch.float32
    assert torch.equal(random.uniform(torch.empty(6 * 5 * 7, dtype=torch.float64), 3), whole.flatten())
    assert torch.equal(random.uniform(torch.empty(7, 5, 6).permute(2, 1, 0), 3), whole)
    assert torch.equal(random.uniform(torch.empty(6, 5, 7), torch.tensor(3)), whole)
    assert not torch.equal(random.uniform(torch.empty(6, 5, 7), 4), whole)
    assert torch.equal(random.uniform(torch.empty(4), 2**64 - 1), random.uniform(torch.empty(4), -1))
    assert random.uniform(torch.empty(0, 3), 3).shape == (0, 3)
    monkeypatch.setattr(random, "_PIECE", 64)
    assert torch.equal(random.uniform(torch.empty(6, 5, 7), 3), whole)


def test_uniform_refuses_other_seeds():
    for seed in (0.5, True, "x", torch.tensor([3]), torch.tensor(3, dtype=torch.int32), torch.tensor(0.5)):
        with pytest.raises(TypeError, match=r"seed is .*must be"):
            random.uniform(torch.empty(3), seed)


def test_dropout():
    x = values((200, 300), torch.float32, 1)
    dropped = epilogues.dropout(x, 0.25, 5)
    kept = dropped != 0
    assert abs(kept.double().mean() - 0.75) < 0.01
    torch.testing.assert_close(dropped[kept], x[kept] / 0.75)
    assert torch.equal(epilogues.dropout(x, 0.0, 5), x)
    for p in (-0.1, 1.0, 2):
        with pytest.raises(ValueError, match="dropout: p is"):
            epilogues.dropout(x, p, 5)
    # The backward pass drops the same.
    _, pullback = torch.func.vjp(lambda x: epilogues.dropout(x, 0.25, 5), x)
    assert torch.equal(pullback(torch.ones_like(x))[0], kept / 0.75)
    leaf = x.clone().requires_grad_()
    epilogues.dropout(leaf, 0.25, torch.tensor(5)).sum().backward()
    assert torch.equal(leaf.grad, kept / 0.75)


def test_uniform_as_an_operator():
    torch.library.opcheck(torch.ops.gemmery.uniform.default, (torch.empty(3, 5), torch.tensor(7)))
    assert "uniform(n" not in program(epilogues.relu).source
    assert "uniform(" in program(epilogues.dropout, (0.5, 3)).source
    assert program(epilogues.dropout, (0.5, 3)) is program(epilogues.dropout, (0.25, 4))


def test_library_is_exported():
    own = [
        name
        for name, x in vars(library).items()
        if inspect.isfunction(x) and x.__module__ == library.__name__
    ]
    for name in own:
        if not name.startswith("_"):
            assert getattr(epilogues, name) is getattr(library, name)
            assert name in epilogues.__all__
            assert getattr(library, name).__doc__
    assert operator.attrgetter("epilogues.swiglu")(gemmery) is library.swiglu


def test_examples():
    for module in (library, gemmery.epilogues.function, sys.modules["gemmery.product.fusible"]):
        result = doctest.testmod(module)
        assert result.attempted > 0
        assert result.failed == 0


@pytest.mark.parametrize(
    "function",
    [
        lambda acc, k: torch.nn.functional.leaky_relu(acc, k),
        lambda acc, k: torch.add(acc, acc, alpha=k),
    ],
)
def test_numbers_of_arguments_that_torch_wants_as_python_numbers(function):
    """They say what to do, and a number of the function's own does."""
    x, w = torch.randn(4, 8), torch.randn(6, 8)
    with pytest.raises(Untraceable, match="a number from args where torch requires a Python number"):
        program_of(
            make_call(
                "linear", x, w, None, Functions(function, (0.2,)), Options(None, "ieee", False, False, None)
            )
        )
    program(lambda acc: function(acc, 0.2))


def test_messages_of_prologues_say_so():
    x = torch.randn(4, 8)
    before = prologue.make("linear", x, lambda x: x.softmax(-1), ())
    with pytest.raises(
        Untraceable, match=r"the prologue .* reduces, in aten.amax.default, rows of which.*docs/epilogues.md"
    ):
        before.program(x)


def test_a_tensor_without_dimensions_is_no_number_of_the_arguments():
    x, w = torch.randn(4, 8), torch.randn(6, 8)
    how = Options(None, "ieee", False, False, None)
    function = lambda acc, s: acc * s.item()  # noqa: E731
    with pytest.raises(Untraceable, match="depends on the data of a tensor"):
        program_of(make_call("linear", x, w, None, Functions(function, (torch.tensor(2.0),)), how))


def test_indexing_by_integers_reads_no_data():
    x, w = torch.randn(4, 8), torch.randn(6, 8)
    how = Options(None, "ieee", False, False, None)
    with pytest.raises(
        Untraceable, match=r"it indexes a tensor \(aten\.index\.Tensor\).*index arguments before the call"
    ):
        program_of(
            make_call("linear", x, w, None, Functions(lambda acc, i: acc[:, i], (torch.arange(6),)), how)
        )


@pytest.mark.parametrize(
    ("function", "args"),
    [
        (lambda acc, t: acc * t[0], (torch.ones(24, 40),)),
        (lambda acc: acc[:, 0], ()),
        (lambda acc: acc[0, :], ()),
        (lambda acc: acc[:, torch.arange(39, -1, -1)], ()),
        (lambda acc: acc[:, [3, 2, 1]], ()),
        (lambda acc, i: acc.index_select(-1, i), (torch.arange(40),)),
        (lambda acc: acc[:, PLACES], ()),
    ],
)
def test_indexing_says_what_to_do(function, args):
    with pytest.raises(
        Untraceable, match=r"it indexes a tensor .*before the call.*result after it; take halves"
    ) as caught:
        program(function, args, b=torch.randn(16, 40))
    assert line_of(function, "lambda acc") in str(caught.value)


@pytest.mark.parametrize("function", [lambda acc: acc[:, ::2], lambda acc: acc[..., 1::2]])
def test_slices_say_what_to_do(function):
    with pytest.raises(
        Untraceable, match=r"a slice that is not a half .*chunk\(2, dim=-1\), slice arguments before"
    ):
        program(function)


def test_messages_have_the_address_of_the_page_where_there_is_one(monkeypatch):
    from email.message import Message

    installed = Message()
    installed["Project-URL"] = "Source, https://example.org/gemmery"
    monkeypatch.setattr(documentation.metadata, "metadata", lambda name: installed)
    assert documentation.page("epilogues", "errors") == "docs/epilogues.md"
    installed["Project-URL"] = "Documentation, https://example.org/docs/"
    assert documentation.page("epilogues", "errors") == "https://example.org/docs/epilogues/#errors"
    with pytest.raises(Untraceable, match=r"in https://example\.org/docs/epilogues/#what-can-be-traced$"):
        program(lambda acc: acc.cumsum(0))


def test_a_factor_of_rsub_is_read():
    from gemmery.epilogues.lower import _KEYWORDS

    assert "rsub" in _KEYWORDS
    program(lambda acc: torch.rsub(acc, acc, alpha=2.0))


# ---------------------------------------------------------------------------------------------------------------------
# Asked without a GPU


def test_check_says_whether_a_function_can_be_fused():
    epilogues.check(torch.relu)
    epilogues.check(torch.relu, dtype=torch.int8)
    epilogues.check(gemmery.epilogue(epilogues.swiglu), shape=(3, 24, 16))
    epilogues.check(epilogues.softcap, 2.0)
    epilogues.check(epilogues.scaled, 0.5, torch.ones(7, 1), torch.tensor(2.0))
    with pytest.raises(Untraceable, match=r"uses aten\.cumsum"):
        epilogues.check(unknown)
    softmax = lambda acc: acc.softmax(-1)  # noqa: E731
    epilogues.check(softmax, shape=(4, 256))
    with pytest.raises(Untraceable, match="a row of more than 256 columns"):
        epilogues.check(softmax)
    with pytest.raises(Untraceable, match="a row of more than 256 columns"):
        epilogues.check(lambda acc, b: softmax(acc + b), torch.ones(257))
    epilogues.check(lambda acc, b: softmax(acc + b), torch.ones(64))


def test_check_looks_at_arguments():
    with pytest.raises(Untraceable, match="missing 1 required positional argument"):
        epilogues.check(epilogues.bias)
    with pytest.raises(
        ValueError,
        match=r"check: args\[0\] is \(4,\) and args\[1\] is \(5,\); they must broadcast .*; give shape=\(M, N\)",
    ):
        epilogues.check(lambda acc, x, y: acc + x + y, torch.ones(4), torch.ones(5))
    with pytest.raises(ValueError, match=r"args\[0\] is \(4,\); it must broadcast to the product, \(3, 9\)"):
        epilogues.check(epilogues.bias, torch.ones(4), shape=(3, 9))
    for shape in ((3,), (0, 4), (3, 4.0)):
        with pytest.raises(ValueError, match="check: shape is"):
            epilogues.check(torch.relu, shape=shape)
    with pytest.raises(TypeError, match="epilogue is a int; it must be a function"):
        epilogues.check(3)


def test_check_takes_the_shape_of_captured_tensors():
    gain, matrix = torch.randn(70), torch.randn(50, 70)
    for function in (
        lambda acc: acc + gain,
        lambda acc: acc * matrix,
        gemmery.epilogue(lambda acc: acc * matrix + gain),
        functools.partial(lambda acc, row: acc * row, row=gain),
        lambda acc, row=gain: acc + row,
    ):
        epilogues.check(function)
    epilogues.check(lambda acc, r: (acc * matrix).softmax(-1) + r, torch.randn(3, 50, 1))
    with pytest.raises(Untraceable, match="a row of more than 256 columns"):
        epilogues.check(lambda acc: (acc + WIDE_ROW).softmax(-1))
    with pytest.raises(
        ValueError,
        match=r"check: args\[0\] is \(69,\) and the epilogue's variable gain is \(70,\); .* give shape=",
    ):
        epilogues.check(lambda acc, r: acc + gain + r, torch.randn(69))


def test_captured_tensors_have_the_names_of_the_code():
    class config:
        scale = torch.randn(40)

    pair = (torch.randn(40), torch.randn(40))
    captured = capture(lambda acc, shift=ROW: acc * config.scale + pair[1] + shift)
    assert captured.names == ("config.scale", "pair[0]", "pair[1]", "shift")
    assert capture(functools.partial(lambda acc, a, b: acc, ROW, b=pair[0])).names == ("partial.args[0]", "b")
    with pytest.raises(ValueError, match=r"matmul: the epilogue's variable config.scale is \(40,\)"):
        gemmery.matmul(A[:, :3], B[:3, :7], epilogue=lambda acc: acc * config.scale)
    with pytest.raises(ValueError, match="linear: the prologue's variable ROW is"):
        gemmery.linear(torch.ones(3, 8), torch.ones(4, 8), prologue=lambda x: x * ROW)


def test_the_cpu_warns_once_of_what_a_gpu_can_not_fuse():
    def by_columns(acc, factor=1.0):
        return acc.cumsum(-1) * factor

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for i in range(3):
            y = gemmery.matmul(A, B, epilogue=functools.partial(by_columns, factor=float(i)))
            torch.testing.assert_close(y, by_columns(A @ B, i))
        gemmery.matmul(A, B, epilogue=lambda acc: acc * 2)
    (warning,) = caught
    assert warning.category is UserWarning
    assert "uses aten.cumsum" in str(warning.message)
    assert warning.filename == __file__


def test_the_cpu_looks_once_at_a_function(monkeypatch):
    met = []
    monkeypatch.setattr("gemmery.product.fusible.program", lambda call: met.append(call))
    for i in range(3):
        gemmery.matmul(A, B, epilogue=lambda acc: acc * i + 12)  # noqa: B023
    assert len(met) == 1


def test_looking_never_makes_a_call_on_the_cpu_fail(monkeypatch):
    def broken(call):
        raise KeyError("a defect of tracing")

    monkeypatch.setattr("gemmery.product.fusible.program", broken)
    with pytest.warns(UserWarning, match="a defect of tracing"):
        y = gemmery.matmul(A, B, epilogue=lambda acc: acc - 11)
    torch.testing.assert_close(y, A @ B - 11)


def test_rows_of_a_narrow_product_keep_their_type_on_the_cpu():
    a, b = A.bfloat16(), B.bfloat16()
    for columns in (1, 2, 3):
        rows = gemmery.matmul(a, b[:, :columns], epilogue=lambda acc: acc.sum(-1, keepdim=True))
        assert (rows.shape, rows.dtype) == ((24, 1), torch.float32)
    assert gemmery.matmul(a, b[:, :2], epilogue=epilogues.swiglu).dtype == torch.bfloat16
    assert gemmery.matmul(a, b[:, :1], epilogue=torch.relu).dtype == torch.bfloat16


def test_gradients_of_rows_that_are_not_the_products():
    r = values((1, 8), torch.float32, 3).requires_grad_()
    a, b = values((2, 5, 4), torch.float32, 1), values((4, 8), torch.float32, 2)
    results = gemmery.matmul(a, b, epilogue=lambda acc, r: (acc * 2, r.logsumexp(-1), r * 3), args=(r,))
    (grad,) = torch.autograd.grad(results[1].sum() + results[2].sum(), r)
    (want,) = torch.autograd.grad(r.logsumexp(-1).sum() + (r * 3).sum(), r)
    torch.testing.assert_close(grad, want)


@pytest.mark.filterwarnings("ignore:gemmery. torch runs this epilogue")
def test_a_layer_norm_of_more_than_rows_is_torchs():
    a, b = torch.randn(2, 5, 8), torch.randn(8, 6)
    found = gemmery.matmul(a, b, epilogue=lambda acc: F.layer_norm(acc, acc.shape[-2:]))
    torch.testing.assert_close(found, F.layer_norm(a @ b, (5, 6)))
    with pytest.raises(RuntimeError, match=r"normalized_shape=\[5\]"):
        gemmery.matmul(a, b, epilogue=lambda acc: F.layer_norm(acc, (5,)))
