"""What torch expects of an operator: gradients, the compiler, fakes, autocast, transforms."""

import math

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

import gemmery
from gemmery.epilogues.function import hold
from gemmery.product.flat import arguments_of
from gemmery.product.run import checked
from gemmery.product.spec import NONE, Functions, Options
from tests.oracle import values

OPS, BF16 = torch.ops.gemmery, torch.bfloat16


def leaf(*shape, seed=0, dtype=torch.float64):
    return values(shape, dtype, seed).requires_grad_()


# ---------------------------------------------------------------------------------------------------------------------
# Gradients

#: name -> our function, torch's, and the shapes of the arguments.
CASES = {
    "matmul": (gemmery.matmul, torch.matmul, [(3, 4), (4, 5)]),
    "dot": (gemmery.matmul, torch.matmul, [(4,), (4,)]),
    "vector by matrix": (gemmery.matmul, torch.matmul, [(4,), (4, 5)]),
    "matrix by vector": (gemmery.matmul, torch.matmul, [(3, 4), (4,)]),
    "vector by batch": (gemmery.matmul, torch.matmul, [(4,), (2, 4, 5)]),
    "batch by vector": (gemmery.matmul, torch.matmul, [(2, 3, 4), (4,)]),
    "batch by matrix": (gemmery.matmul, torch.matmul, [(2, 3, 4), (4, 5)]),
    "matrix by batch": (gemmery.matmul, torch.matmul, [(3, 4), (2, 4, 5)]),
    "broadcast batches": (gemmery.matmul, torch.matmul, [(2, 1, 3, 4), (1, 2, 4, 3)]),
    "more dimensions right": (gemmery.matmul, torch.matmul, [(2, 3, 4), (2, 2, 4, 3)]),
    "one batch for all": (gemmery.matmul, torch.matmul, [(1, 3, 4), (3, 4, 2)]),
    "row bias": (lambda a, b, c: gemmery.matmul(a, b, bias=c), lambda a, b, c: a @ b + c, [(3, 4), (4, 5), (5,)]),
    "column bias": (lambda a, b, c: gemmery.matmul(a, b, bias=c), lambda a, b, c: a @ b + c, [(2, 3, 4), (4, 5), (3, 1)]),
    "scalar bias": (lambda a, b, c: gemmery.matmul(a, b, bias=c), lambda a, b, c: a @ b + c, [(3, 4), (4, 5), ()]),
    "full bias": (lambda a, b, c: gemmery.matmul(a, b, bias=c), lambda a, b, c: a @ b + c, [(3, 4), (2, 4, 5), (2, 3, 5)]),
    "linear": (gemmery.linear, torch.nn.functional.linear, [(2, 3, 4), (5, 4), (5,)]),
    "linear, no bias": (gemmery.linear, torch.nn.functional.linear, [(3, 4), (5, 4)]),
    "linear of a vector": (gemmery.linear, torch.nn.functional.linear, [(4,), (5, 4), (5,)]),
    "linear to one": (gemmery.linear, torch.nn.functional.linear, [(3, 4), (4,)]),
    "addmm": (
        lambda c, a, b: gemmery.addmm(c, a, b, alpha=0.5, beta=-2),
        lambda c, a, b: torch.addmm(c, a, b, alpha=0.5, beta=-2), [(3, 5), (3, 4), (4, 5)],
    ),
    "addmm of a row": (
        lambda c, a, b: gemmery.addmm(c, a, b, alpha=3), lambda c, a, b: torch.addmm(c, a, b, alpha=3),
        [(5,), (3, 4), (4, 5)],
    ),
    "addmm of a column": (
        lambda c, a, b: gemmery.addmm(c, a, b, beta=3), lambda c, a, b: torch.addmm(c, a, b, beta=3),
        [(3, 1), (3, 4), (4, 5)],
    ),
    "addmm without beta": (
        lambda c, a, b: gemmery.addmm(c, a, b, beta=0), lambda c, a, b: torch.addmm(c, a, b, beta=0),
        [(3, 5), (3, 4), (4, 5)],
    ),
    "bmm": (gemmery.bmm, torch.bmm, [(2, 3, 4), (2, 4, 5)]),
    "nothing to sum": (gemmery.matmul, torch.matmul, [(3, 0), (0, 5)]),
    "no rows": (gemmery.linear, torch.nn.functional.linear, [(0, 3, 4), (5, 4)]),
    "nothing to sum in a batch": (gemmery.linear, torch.nn.functional.linear, [(2, 3, 0), (5, 0)]),
    "no columns in a batch": (gemmery.linear, torch.nn.functional.linear, [(2, 3, 4), (0, 4)]),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_gradients_are_those_of_torch(name):
    function, reference, shapes = CASES[name]
    ours = [leaf(*shape, seed=i) for i, shape in enumerate(shapes)]
    theirs = [tensor.detach().clone().requires_grad_() for tensor in ours]
    result, want = function(*ours), reference(*theirs)
    weights = values(want.shape, torch.float64, 9)
    (result * weights).sum().backward()
    (want * weights).sum().backward()
    torch.testing.assert_close(result, want)
    for mine, other in zip(ours, theirs, strict=True):
        # Where beta is 0 torch gives no addend a gradient of zeros; none at all means the same.
        expected = torch.zeros_like(other) if other.grad is None else other.grad
        actual = torch.zeros_like(mine) if mine.grad is None else mine.grad
        torch.testing.assert_close(actual, expected)


@pytest.mark.sampled(5)
@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name, (*_, shapes) in CASES.items() if 0 not in sum(shapes, ())])
def test_gradcheck(name):
    function, _, shapes = CASES[name]
    tensors = [leaf(*shape, seed=i) for i, shape in enumerate(shapes)]
    assert torch.autograd.gradcheck(function, tensors, fast_mode=True)


@pytest.mark.slow
@pytest.mark.parametrize("name", ("dot", "broadcast batches", "addmm of a row", "linear of a vector"))
def test_double_backward(name):
    function, _, shapes = CASES[name]
    tensors = [leaf(*shape, seed=i) for i, shape in enumerate(shapes)]
    assert torch.autograd.gradgradcheck(function, tensors, fast_mode=True)


@pytest.mark.parametrize("needed", ((True, False, False), (False, True, False), (False, False, True)))
def test_gradients_only_for_those_that_want_them(needed):
    a, b, c = (values(shape, torch.float32, i) for i, shape in enumerate(((3, 4), (4, 5), (5,))))
    for tensor, wanted in zip((a, b, c), needed, strict=True):
        tensor.requires_grad_(wanted)
    gemmery.matmul(a, b, bias=c).sum().backward()
    assert tuple(tensor.grad is not None for tensor in (a, b, c)) == needed


@pytest.mark.parametrize("dtype", (torch.float16, torch.bfloat16, torch.float32), ids=str)
def test_gradients_have_the_types_of_their_tensors(dtype):
    a, b = leaf(3, 4, dtype=dtype), leaf(4, 5, seed=1, dtype=dtype)
    c = leaf(5, seed=2, dtype=torch.float32)
    result = gemmery.matmul(a, b, bias=c, out_dtype=torch.float32)
    result.sum().backward()
    assert [tensor.grad.dtype for tensor in (a, b, c)] == [dtype, dtype, torch.float32]
    torch.testing.assert_close(a.grad, b.detach().float().sum(1).to(dtype).expand(3, 4))
    torch.testing.assert_close(b.grad, a.detach().float().sum(0).to(dtype)[:, None].expand(4, 5))
    assert torch.equal(c.grad, torch.full((5,), 3.0))


def test_gradients_keep_precision_and_invariance(monkeypatch):
    """A product in tf32 has gradients in tf32, and the default never turns into it; the same for batch_invariant."""
    from gemmery.product import gradients

    asked = []
    original = gradients.plain_product

    def noted(a, b, options, *more):
        asked.append((options.precision, options.fast_accum, options.batch_invariant))
        return original(a, b, options, *more)

    monkeypatch.setattr(gradients, "plain_product", noted)
    for precision, invariant in (("tf32x3", False), ("ieee", True)):
        a, b = leaf(3, 4, dtype=torch.float32), leaf(4, 5, dtype=torch.float32)
        gemmery.matmul(a, b, precision=precision, batch_invariant=invariant).sum().backward()
    assert asked == [("tf32x3", False, False)] * 2 + [("ieee", False, True)] * 2


def test_no_gradient_for_fp8():
    """Said when the product is made, not when its gradient is asked for."""
    a = torch.ones(4, 4).to(torch.float8_e5m2).requires_grad_()
    with pytest.raises(TypeError, match=r"no gradient for torch\.float8_e5m2"):
        gemmery.matmul(a, a.detach())
    with torch.no_grad():
        assert torch.equal(gemmery.matmul(a, a), torch.full((4, 4), 4.0, dtype=torch.bfloat16))


def test_out_takes_no_gradients():
    a, b = leaf(3, 4), values((4, 5), torch.float64)
    out = torch.full((3, 5), math.nan, dtype=torch.float64)
    with pytest.raises(ValueError, match="matmul: out= does not support gradients"):
        gemmery.matmul(a, b, out=out)
    assert out.isnan().all()
    with torch.no_grad():
        gemmery.matmul(a, b, out=out)
    torch.testing.assert_close(out, a.detach() @ b)


@pytest.mark.parametrize("mode", (torch.no_grad, torch.inference_mode))
def test_no_graph_where_none_is_wanted(mode):
    a, b = leaf(3, 4), leaf(4, 5)
    with mode():
        result = gemmery.matmul(a, b)
    assert not result.requires_grad
    torch.testing.assert_close(result, (a @ b).detach())


# ---------------------------------------------------------------------------------------------------------------------
# Forward mode, transforms


def test_forward_mode_does_not_lose_tangents():
    """A tangent, or an error that says that there is none; never a silent zero."""
    a, b = values((3, 4), torch.float64, 1), values((4, 5), torch.float64, 2)
    tangent = values((3, 4), torch.float64, 3)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(a, tangent)
        try:
            result = torch.autograd.forward_ad.unpack_dual(gemmery.matmul(dual, b)).tangent
        except (RuntimeError, NotImplementedError) as error:
            assert "forward" in str(error)  # noqa: PT017
            return
    torch.testing.assert_close(result, tangent @ b)


def test_jvp_does_not_lose_tangents():
    a, b = values((3, 4), torch.float64, 1), values((4, 5), torch.float64, 2)
    try:
        _, tangent = torch.func.jvp(gemmery.matmul, (a, b), (a, b))
    except (RuntimeError, NotImplementedError) as error:
        assert "forward" in str(error)  # noqa: PT017
        return
    torch.testing.assert_close(tangent, 2 * a @ b)


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("dims", ((0, None), (None, 0), (0, 0)))
def test_vmap(dims):
    a = values((2, 3, 4) if dims[0] == 0 else (3, 4), torch.float64, 1)
    b = values((2, 4, 5) if dims[1] == 0 else (4, 5), torch.float64, 2)
    torch.testing.assert_close(torch.func.vmap(gemmery.matmul, dims)(a, b), a @ b)


# ---------------------------------------------------------------------------------------------------------------------
# The operators themselves


def operator_arguments(op, a, b, bias=None, functions=NONE, alpha=1, beta=1, **how):
    """What the operator is given for a call; and what holds its epilogue, which has to live on."""
    call = checked(op, a, b, bias, functions, None, Options(**how), alpha, beta)
    held = None if functions.epilogue is None else hold(call.captured)
    return arguments_of(call, "" if held is None else held.name), held


OPERANDS = {
    "dense": lambda: ("matmul", leaf(3, 4), leaf(4, 5)),
    "a batch": lambda: ("matmul", leaf(2, 3, 4), leaf(4, 5), leaf(5)),
    "pair": lambda: ("matmul", leaf(3, 4), (leaf(4, 5), leaf(4, 5))),
    "int4": lambda: ("linear", leaf(3, 128, dtype=BF16), gemmery.quantize(values((32, 128), BF16), "int4")),
    "int8": lambda: ("linear", leaf(3, 128, dtype=BF16), gemmery.quantize(values((32, 128), BF16), "int8")),
    "scaled by row": lambda: ("scaled_matmul", *scaled("token")),
    "scaled by block": lambda: ("scaled_matmul", *scaled("block")),
}


def scaled(per):
    x, w = values((3, 160), torch.float32), values((24, 160), torch.float32, 1)
    # opcheck compares arguments before and after, which torch can't do in fp8.
    return tuple(gemmery.quantize_activations(t, "int8", per=per) for t in (x, w))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "fused"),
    # Halves take an epilogue that joins them.
    [(kind, fused) for kind in OPERANDS for fused in (False, True) if fused or kind != "pair"],
)
def test_opcheck(kind, fused):
    """Schema, fakes, autograd and symbolic sizes of the one operator, for every kind of operand."""
    function = (
        (lambda acc: torch.relu(acc.chunk(2, -1)[0]) * acc.chunk(2, -1)[1]) if kind == "pair" else torch.tanh
    )
    functions = Functions(function) if fused else NONE
    arguments, held = operator_arguments(*OPERANDS[kind](), functions=functions)
    grad = any(x.requires_grad for x in arguments[0])
    torch.library.opcheck(OPS.product.default, (*arguments, grad and fused))
    assert (held is not None) == fused


@pytest.mark.slow
def test_opcheck_of_scalars_and_options():
    a, b, c = (leaf(*shape, dtype=torch.float32) for shape in ((3, 4), (4, 5), (3, 5)))
    arguments, _ = operator_arguments("addmm", a, b, c, alpha=0.5, beta=2)
    torch.library.opcheck(OPS.product.default, (*arguments, False))
    how = {"out_dtype": BF16, "precision": "tf32", "config": "16x16x16-g1-w4-s2-tile-pointer"}
    arguments, _ = operator_arguments("matmul", a.detach(), b.detach(), batch_invariant=True, **how)
    torch.library.opcheck(OPS.product.default, (*arguments, False))


@pytest.mark.slow
def test_opcheck_out():
    a, b, c = (values(shape, torch.float32, i) for i, shape in enumerate(((3, 4), (4, 5), (5,))))
    arguments, _ = operator_arguments("addmm", a, b, c, alpha=2, beta=0.5)
    for out in (torch.empty(3, 5), torch.empty(5, 3).t()):
        torch.library.opcheck(OPS.product_out.default, (*arguments, out))


@pytest.mark.parametrize(
    "shapes", (((3, 4), (4, 5)), ((2, 3, 4), (4,)), ((0, 4), (4, 5)), ((2, 1, 3, 4), (5, 4, 6))), ids=str
)
@pytest.mark.parametrize("dtype", (torch.float16, torch.float8_e4m3fn, torch.int8), ids=str)
def test_fakes(shapes, dtype):
    """The fake result is the real one without its data."""
    real = [torch.zeros(shape).to(dtype) for shape in shapes]
    want = gemmery.matmul(*real)
    with FakeTensorMode() as mode:
        fake = gemmery.matmul(*(mode.from_tensor(tensor) for tensor in real))
    assert type(fake) is FakeTensor
    assert (fake.shape, fake.stride(), fake.dtype) == (want.shape, want.stride(), want.dtype)


def test_fakes_check_as_well():
    with FakeTensorMode(), pytest.raises(ValueError, match=r"inner sizes 4 and 5 differ"):
        gemmery.matmul(torch.empty(3, 4), torch.empty(5, 6))


def test_fake_out():
    with FakeTensorMode():
        out = torch.empty(3, 5)
        assert gemmery.matmul(torch.empty(3, 4), torch.empty(4, 5), out=out) is out


# ---------------------------------------------------------------------------------------------------------------------
# torch.compile


def compiled(function, dynamic=None):
    torch._dynamo.reset()
    return torch.compile(function, fullgraph=True, backend="aot_eager", dynamic=dynamic)


@pytest.mark.sampled(5)
@pytest.mark.slow
@pytest.mark.parametrize("dynamic", (False, True))
@pytest.mark.parametrize("name", ("matmul", "broadcast batches", "batch by vector", "linear", "addmm", "bmm"))
def test_compile(name, dynamic):
    function, reference, shapes = CASES[name]
    optimised = compiled(function, dynamic)
    for growth in (0, 3):
        grown = [tuple(size + growth if size > 2 else size for size in shape) for shape in shapes]
        ours = [leaf(*shape, seed=i) for i, shape in enumerate(grown)]
        theirs = [tensor.detach().clone().requires_grad_() for tensor in ours]
        result, want = optimised(*ours), reference(*theirs)
        torch.testing.assert_close(result, want)
        result.sum().backward()
        want.sum().backward()
        for mine, other in zip(ours, theirs, strict=True):
            torch.testing.assert_close(mine.grad, other.grad)


@pytest.mark.slow
def test_one_dynamic_graph_serves_all_sizes():
    calls = []

    def backend(graph, inputs):
        calls.append([node.target for node in graph.graph.nodes if node.op == "call_function"])
        return graph.forward

    torch._dynamo.reset()
    function = torch.compile(
        lambda x, w: gemmery.linear(x, w).relu(), fullgraph=True, backend=backend, dynamic=True
    )
    weight = values((6, 5), torch.float32, 1)
    for rows in (3, 7, 12, 33):
        x = values((rows, 5), torch.float32, rows)
        torch.testing.assert_close(function(x, weight), (x @ weight.t()).relu())
    assert len(calls) == 1
    assert sum("gemm" in str(target) for target in calls[0]) == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", (lambda config: config, str, gemmery.Config.asdict), ids=("Config", "string", "dict")
)
def test_compile_with_out_and_config(kind):
    config = kind(gemmery.Config(16, 16, 16, schedule="persistent", split_store=True))

    def function(a, b, out):
        gemmery.matmul(a, b, out=out, config=config, precision="tf32")
        return out * 2

    a, b = values((3, 4), torch.float32, 1), values((4, 5), torch.float32, 2)
    out = torch.full((3, 5), math.nan)
    torch.testing.assert_close(compiled(function)(a, b, out), 2 * a @ b)
    torch.testing.assert_close(out, a @ b)


@pytest.mark.slow
def test_compile_of_a_swapped_model():
    import gemmery.nn

    model = torch.nn.Sequential(torch.nn.Linear(6, 9), torch.nn.GELU(), torch.nn.Linear(9, 4)).double()
    x = values((5, 6), torch.float64, 1)
    want = model(x)
    assert gemmery.nn.swap(model, precision="torch") == 2
    torch.testing.assert_close(compiled(model)(x), want)


# ---------------------------------------------------------------------------------------------------------------------
# Autocast


def test_autocast():
    a, b, c = (values(shape, torch.float32, i) for i, shape in enumerate(((3, 40), (40, 5), (5,))))
    low = [tensor.bfloat16() for tensor in (a, b, c)]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        result = gemmery.matmul(a, b, bias=c)
        linear = gemmery.linear(a, b.t(), c)
        kept = gemmery.matmul(a, b, out_dtype=torch.float32)
    assert result.dtype == linear.dtype == torch.bfloat16
    assert torch.equal(result, gemmery.matmul(low[0], low[1], bias=low[2]))
    assert torch.equal(linear, result)
    assert torch.equal(kept, gemmery.matmul(low[0], low[1], out_dtype=torch.float32))


def test_autocast_leaves_other_types_alone():
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for dtype, want in (
            (torch.float64, torch.float64),
            (torch.int8, torch.int32),
            (torch.float8_e5m2, torch.bfloat16),
        ):
            assert gemmery.matmul(torch.ones(3, 4).to(dtype), torch.ones(4, 5).to(dtype)).dtype == want


def test_autocast_mixes_types_and_passes_gradients():
    a, b = leaf(3, 4, dtype=torch.float32), leaf(4, 5, seed=1, dtype=torch.bfloat16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        result = gemmery.matmul(a, b)
    result.float().sum().backward()
    assert (a.grad.dtype, b.grad.dtype) == (torch.float32, torch.bfloat16)
    torch.testing.assert_close(a.grad, b.detach().float().sum(1).bfloat16().float().expand(3, 4))


def test_no_autocast_where_it_is_off():
    a, b = torch.ones(3, 4), torch.ones(4, 5)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=False):
        assert gemmery.matmul(a, b).dtype == torch.float32
