"""Rows whose bits do not depend on the batch: which configs may compute them, and torch's own products in a context.

On plain CPU tensors gemmery multiplies row by row, and torch does not: most of these products differ without it.
"""

import re
import threading
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import gemmery
import gemmery.nn
from gemmery import devices
from gemmery.launch.plan import Plan, runs_on
from gemmery.select import candidates
from gemmery.select.space import kind_of, tiles_of
from gemmery.select.tiles import ALIKE
from tests.problems import make

FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
KINDS = (
    (torch.float16, {}), (torch.bfloat16, {}), (torch.float32, {}), (torch.float32, {"precision": "tf32"}),
    (torch.float32, {"precision": "tf32x3"}), (torch.float64, {}), (FP8[0], {}), (FP8[1], {"fast_accum": True}),
)  # fmt: skip
ROWS = (1, 2, 5, 16, 63, 64, 100, 128, 200, 384, 500, 1000, 4096, 8192)

devices_of_the_table = st.sampled_from(list(devices.TABLE))
kinds = st.sampled_from(KINDS)


# ---------------------------------------------------------------------------------------------------------------------
# Selection


def known(device, more):
    """A precision that the device has."""
    precision = more.get("precision", "ieee")
    return more if precision in devices.TABLE[device].target.precisions else more | {"precision": "ieee"}


@st.composite
def problems(draw, device, dtype, more):
    """Products of one type on one device, alike in nothing else."""
    out = torch.bfloat16 if dtype in FP8 else dtype
    return make(
        draw(st.sampled_from(ROWS)), draw(st.integers(1, 5000)), draw(st.integers(0, 5000)), device=device, dtype=dtype,
        out_dtype=out, layout=draw(st.sampled_from(("NN", "NT", "TN", "TT"))),
        batch=draw(st.sampled_from(((), (3,), (2, 3)))), bias=draw(st.booleans()) and dtype not in FP8,
        scaled=draw(st.booleans()), pad=draw(st.sampled_from((0, 1, 8, 16))), start=draw(st.sampled_from((0, 1, 8))),
        batch_invariant=True, **known(device, more),
    )  # fmt: skip


@given(st.data(), devices_of_the_table, kinds)
def test_one_class_of_configs_serves_every_size_and_layout(data, device, kind):
    classes = set()
    for p in data.draw(st.lists(problems(device, *kind), min_size=2, max_size=4)):
        if runs_on(p):
            tiles = {tile.config: tile for tile in tiles_of(p.device.target.family, kind_of(p))}
            found = candidates(p)
            assert found
            assert all(config.split_k == 1 for config in found)
            classes |= {tiles[config].numerics for config in found}
    assert len(classes) <= 1


@pytest.mark.sampled(5)
@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("device", devices.TABLE)
def test_one_class_serves_a_weight_and_one_config_where_nothing_is_alike(device, kind):
    dtype, more = kind
    out = torch.bfloat16 if dtype in FP8 else dtype
    more = known(device, more) | {"device": device, "dtype": dtype, "out_dtype": out, "batch_invariant": True}
    layouts = (("NT", 0), ("NN", 1), ("TN", 0))
    every = [make(m, 4096, 4096, layout=layout, pad=pad, **more) for m in ROWS for layout, pad in layouts]
    if not runs_on(every[0]):
        return
    family, kind = every[0].device.target.family, kind_of(every[0])
    tiles = {tile.config: tile.numerics for tile in tiles_of(family, kind)}
    chosen = {config for p in every for config in candidates(p)}
    # A config whose tiles are cut along K is no row of the table.
    assert len({tiles[config] for config in chosen}) == 1
    assert len(chosen) == 1 or family in ALIKE


def test_integers_need_nothing_of_it():
    p = make(dtype=torch.int8, out_dtype=torch.int32, device="NVIDIA H200", batch_invariant=True)
    assert not p.batch_invariant
    assert p == make(dtype=torch.int8, out_dtype=torch.int32, device="NVIDIA H200")


def test_a_type_without_instructions_is_multiplied_by_rows():
    """Where a GPU can't multiply a type, the reference does, and keeps the promise."""
    more = {"dtype": FP8[0], "out_dtype": torch.bfloat16, "device": "NVIDIA A100", "batch_invariant": True}
    a, b = torch.randn(5, 32).to(FP8[0]), torch.randn(32, 12).to(FP8[0])
    whole, alone = torch.empty(5, 12, dtype=torch.bfloat16), torch.empty(1, 12, dtype=torch.bfloat16)
    Plan(make(5, 12, 32, layout="NN", **more))(a, b, whole)
    Plan(make(1, 12, 32, layout="NN", **more))(a[3:4], b, alone)
    assert torch.equal(whole[3:4], alone)


# ---------------------------------------------------------------------------------------------------------------------
# CPU tensors

floats = st.sampled_from((torch.float16, torch.bfloat16, torch.float32, torch.float64))


@given(
    st.integers(1, 40), st.integers(1, 70), st.integers(0, 300), floats, st.booleans(), st.integers(0, 2**31)
)
def test_a_row_is_the_same_alone_and_among_others(m, n, k, dtype, across, seed):
    torch.manual_seed(seed)
    x, w, bias = torch.randn(m, k).to(dtype), torch.randn(n, k).to(dtype), torch.randn(n).to(dtype)
    x = x.t().contiguous().t() if across else x
    whole = gemmery.linear(x, w, bias, batch_invariant=True)
    torch.testing.assert_close(
        whole, F.linear(x.double(), w.double(), bias.double()).to(dtype), rtol=0.02, atol=0.02
    )
    i = seed % m
    assert torch.equal(whole[i : i + 1], gemmery.linear(x[i : i + 1], w, bias, batch_invariant=True))
    assert torch.equal(whole[i], gemmery.linear(x[i], w, bias, batch_invariant=True))
    x[:i], x[i + 1 :] = float("nan"), float("inf")
    assert torch.equal(whole[i], gemmery.linear(x, w, bias, batch_invariant=True)[i])


def test_a_matrix_is_the_same_alone_and_in_a_batch():
    a, b = torch.randn(2, 5, 7, 65), torch.randn(5, 65, 33)
    whole = gemmery.matmul(a, b, batch_invariant=True)
    torch.testing.assert_close(whole, a @ b)
    for i in range(2):
        for j in range(5):
            assert torch.equal(whole[i, j], gemmery.matmul(a[i, j], b[j], batch_invariant=True))
    assert torch.equal(whole[1], gemmery.bmm(a[1], b, batch_invariant=True))


# ---------------------------------------------------------------------------------------------------------------------
# The context

SEEDED = torch.Generator().manual_seed(0)
X, W, B = (torch.randn(*shape, generator=SEEDED) for shape in ((12, 2, 384), (40, 384), (40,)))
PRODUCTS = {
    "linear": lambda x: F.linear(x, W, B),
    "linear without bias": lambda x: F.linear(x, W),
    "linear, turned": lambda x: F.linear(x.transpose(0, 1), W, B).transpose(0, 1),
    "linear of four dimensions": lambda x: F.linear(x.unsqueeze(2), W, B),
    "linear as an operator": lambda x: torch.ops.aten.linear.default(x.transpose(0, 1), W, B).transpose(0, 1),
    "module": nn.Linear(384, 40),
    "@": lambda x: x @ W.t(),
    "mm": lambda x: torch.mm(x.flatten(0, 1), W.t()).unflatten(0, (-1, 2)),
    "addmm": lambda x: torch.addmm(B, x.flatten(0, 1), W.t(), beta=0.3, alpha=1.7).unflatten(0, (-1, 2)),
    "addmm_": lambda x: torch.ones(len(x) * 2, 40).addmm_(x.flatten(0, 1), W.t(), beta=0.3).unflatten(0, (-1, 2)),
    "mm out": lambda x: torch.mm(x.flatten(0, 1), W.t(), out=torch.empty(0)).unflatten(0, (-1, 2)),
    "mv": lambda x: torch.mv(x.flatten(0, 1), W[0]).unflatten(0, (-1, 2)),
    "addmv": lambda x: torch.addmv(torch.ones(()), x.flatten(0, 1), W[0], alpha=2).unflatten(0, (-1, 2)),
    "bmm": lambda x: torch.bmm(x, W.t().expand(len(x), -1, -1)),
    "baddbmm": lambda x: torch.baddbmm(torch.ones(()), x, W.t().expand(len(x), -1, -1), beta=0.3, alpha=1.7),
    "einsum": lambda x: torch.einsum("bik,jk->bij", x, W),
    "tensordot": lambda x: torch.tensordot(x, W, ([2], [1])),
    "inner": lambda x: torch.inner(x, W),
    "multi_dot": lambda x: torch.linalg.multi_dot([x.flatten(0, 1), W.t(), W]).unflatten(0, (-1, 2)),
    "vmap": lambda x: torch.vmap(lambda rows: F.linear(rows, W, B))(x),
    "jvp": lambda x: torch.func.jvp(lambda x: F.linear(x, W, B), (x,), (x,))[1],
    "gemmery": lambda x: gemmery.linear(x, W, B),
}  # fmt: skip


def alone_and_together(function, x=X):
    with gemmery.batch_invariant():
        return function(x[2:3].clone()), function(x)[2:3]


@pytest.mark.parametrize("name", PRODUCTS)
@pytest.mark.parametrize("grad", (torch.enable_grad, torch.no_grad, torch.inference_mode))
def test_products_of_torch_are_those_of_gemmery(name, grad):
    with grad():
        alone, together = alone_and_together(PRODUCTS[name])
        assert torch.equal(alone, together)
        want = PRODUCTS[name](X)[2:3]
        # What sums of large numbers lose does not depend on how small they come out.
        torch.testing.assert_close(together, want, rtol=1e-4, atol=2e-6 * want.abs().max().item())


def test_without_the_context_they_are_not():
    """What the test above shows would be nothing if torch did it as well."""
    assert any(not torch.equal(f(X[2:3].clone()), f(X)[2:3]) for f in PRODUCTS.values())


@pytest.mark.parametrize("grad", (torch.enable_grad, torch.inference_mode))
def test_a_bias_is_added_before_rounding_whatever_the_strides(grad):
    """torch itself rounds twice where an input is not contiguous, as it is for several sequences and not for one."""
    x, w, b = (t.bfloat16() for t in (X, W, B))
    with grad(), gemmery.batch_invariant():
        want = gemmery.linear(x, w, b)
        for turned in (
            x.transpose(0, 1),
            x.flatten(0, 1).t().contiguous().t().unflatten(0, (12, 2)).transpose(0, 1),
        ):
            assert torch.equal(F.linear(turned, w, b).transpose(0, 1), want)
        assert torch.equal(F.linear(x[0, 0], w, b), want[0, 0])


def test_addbmm_sums_over_the_batch():
    a, b, c = torch.randn(3, 4, 5), torch.randn(3, 5, 6), torch.randn(4, 6)
    want = torch.addbmm(c, a, b, beta=0.5, alpha=2)
    with gemmery.batch_invariant():
        torch.testing.assert_close(torch.addbmm(c, a, b, beta=0.5, alpha=2), want)
        torch.testing.assert_close(c.clone().addbmm_(a, b, beta=0.5, alpha=2), want)
        assert torch.equal(torch.addbmm(c, a, b)[:1], torch.addbmm(c[:1], a[:, :1], b))


def test_what_is_not_a_product_is_left_alone():
    x = torch.randn(2, 3, 8)
    layers = (nn.LayerNorm(8), nn.Softmax(-1), nn.Conv1d(3, 4, 2))
    want = [layer(x) for layer in layers]
    with gemmery.batch_invariant():
        assert all(torch.equal(layer(x), result) for layer, result in zip(layers, want, strict=True))
        assert torch.equal(
            torch.ones(2, 3, dtype=torch.long) @ torch.ones(3, 2, dtype=torch.long), torch.full((2, 2), 3)
        )
        assert (torch.ones(2, 3, device="meta") @ torch.ones(3, 2, device="meta")).is_meta


@pytest.mark.parametrize("training", (False, True))
def test_attention_and_encoder_layers_take_no_way_past_it(training):
    """torch has fused forms of these, in which nobody would see the linear layers."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0, batch_first=True).train(training)
    inputs = {}
    for name, child in layer.named_modules():
        if isinstance(child, nn.Linear):
            child.register_forward_hook(
                lambda layer, x, y, name=name: inputs.update({name: (layer, x[0], y)})
            )
    with torch.no_grad(), gemmery.batch_invariant():
        layer(torch.randn(5, 7, 32))
        assert len(inputs) == 2
        for linear, x, y in inputs.values():
            assert torch.equal(linear(x[3:4]), y[3:4])


@pytest.mark.parametrize("what", ("complex", "sparse", "nested"))
def test_what_cannot_be_done_is_refused(what):
    a = torch.randn(3, 3, dtype=torch.complex64 if what == "complex" else torch.float32)
    b = a.clone()
    if what == "sparse":
        a = a.to_sparse()
    if what == "nested":
        a = torch.nested.nested_tensor([a, a])
        b = torch.nested.nested_tensor([b, b])
    with gemmery.batch_invariant():
        with pytest.raises(
            NotImplementedError, match=f"product of {what} tensors .* gemmery.batch_invariant\\(False\\)"
        ):
            torch.matmul(a, b)
        with gemmery.batch_invariant(False):
            torch.matmul(a, b)
        with pytest.raises(NotImplementedError, match=what):
            torch.matmul(a, b)


def test_operators_with_products_inside_are_refused():
    with gemmery.batch_invariant(), pytest.raises(NotImplementedError, match="mkldnn_rnn_layer"):
        nn.LSTM(4, 5)(torch.randn(2, 3, 4))


def test_errors_are_about_the_arguments():
    with gemmery.batch_invariant():
        with pytest.raises(RuntimeError, match="same dtype"):
            torch.mm(torch.ones(2, 3), torch.ones(3, 2, dtype=torch.float64))
        # torch's own, as outside.
        with pytest.raises(RuntimeError, match=r"2, 3"):
            torch.mm(torch.ones(2, 3), torch.ones(2, 3))
        with pytest.raises(RuntimeError):
            torch.addmm(torch.ones(5), torch.ones(2, 3), torch.ones(3, 4))


SPARSE = torch.eye(3).to_sparse()
DENSE = torch.ones(3, 3)
#: Sparse products under all the names that torch has for them.
SPARSE_PRODUCTS = {
    "sparse.mm": lambda: torch.sparse.mm(SPARSE, DENSE),
    "sparse.addmm": lambda: torch.sparse.addmm(DENSE, SPARSE, DENSE),
    "smm": lambda: torch.smm(SPARSE, DENSE),
    "hspmm": lambda: torch.hspmm(SPARSE, DENSE),
    "sspaddmm": lambda: torch.sspaddmm(SPARSE, SPARSE, DENSE),
    "sampled_addmm": lambda: torch.sparse.sampled_addmm(torch.eye(3).to_sparse_csr(), DENSE, DENSE),
    "reduced": lambda: torch.sparse.mm(torch.eye(3).to_sparse_csr(), DENSE, "mean"),
    "mv": lambda: torch.eye(3).to_sparse_csr() @ DENSE[0],
}


@pytest.mark.parametrize("product", SPARSE_PRODUCTS.values(), ids=SPARSE_PRODUCTS)
def test_sparse_products_are_refused(product):
    product()
    with gemmery.batch_invariant(), pytest.raises(NotImplementedError, match="no batch-invariant form"):
        product()
    with gemmery.batch_invariant(), gemmery.batch_invariant(False):
        product()


def test_every_product_of_torch_is_computed_or_refused():
    """By the names of torch's operators: whoever adds one finds it here, and not left as it is."""
    from gemmery.invariant import _EXACT, _handler, _is_composite

    names = {
        schema.name.removeprefix("aten::")
        for schema in torch._C._jit_get_all_schemas()
        if schema.name.startswith("aten::")
    }
    products = {name for name in names if re.search(r"(mm|mv|matmul)_?(_|$)", name)}
    # Not by `__getattr__`, which makes new packets, whose overloads are not those that torch dispatches.
    packets = [getattr(torch.ops.aten, name) for name in products]
    overloads = [getattr(packet, x) for packet in packets for x in packet.overloads()]
    left = {x._opname for x in overloads if _handler(x) is None and not _is_composite(x)}
    assert left == set(_EXACT)


# ---------------------------------------------------------------------------------------------------------------------
# Gradients, autocast, other modes, subclasses


def test_gradients_are_those_of_torch_and_rows_of_them_invariant():
    x, w, b = (t.clone().requires_grad_() for t in (X, W, B))
    weights = torch.randn(12, 2, 40)
    with gemmery.batch_invariant():
        (F.linear(x, w, b) * weights).sum().backward()
        row = X[2:3].clone().requires_grad_()
        (F.linear(row, w.detach(), b.detach()) * weights[2:3]).sum().backward()
    assert torch.equal(x.grad[2:3], row.grad)
    ours = [t.grad for t in (x, w, b)]
    x, w, b = (t.clone().requires_grad_() for t in (X, W, B))
    (F.linear(x, w, b) * weights).sum().backward()
    for mine, other in zip(ours, (x.grad, w.grad, b.grad), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-4)


def test_a_recomputed_forward_pass_is_invariant_as_well():
    seen = []

    def block(x):
        y = F.linear(x, W, B)
        seen.append(y.detach())
        return y.sin()

    x = X.clone().requires_grad_()
    with gemmery.batch_invariant():
        checkpoint(block, x, use_reentrant=False).sum().backward()
    assert len(seen) == 2
    assert torch.equal(*seen)


def test_autocast_is_honoured():
    with gemmery.batch_invariant(), torch.autocast("cpu", torch.bfloat16):
        alone, together = F.linear(X[2:3], W, B), F.linear(X, W, B)
    assert together.dtype == torch.bfloat16
    assert torch.equal(alone, together[2:3])


class Names(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.append(func._schema.name)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("first", (True, False))
def test_other_modes_see_the_calls(first):
    mode = Names()
    contexts = (mode, gemmery.batch_invariant()) if first else (gemmery.batch_invariant(), mode)
    with contexts[0], contexts[1]:
        together, alone = torch.mm(X[0], W.t()), torch.mm(X[0, 1:2], W.t())
        total = torch.ones(2, 40, requires_grad=True).clone().addmm_(X[0], W.t())
    assert torch.equal(together[1:2], alone)
    assert total.requires_grad
    assert ("gemmery::product" if first else "aten::mm") in mode.seen


def test_fake_tensors_have_the_shapes():
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode(), gemmery.batch_invariant():
        assert F.linear(torch.empty(2, 3, 8), torch.empty(5, 8), torch.empty(5)).shape == (2, 3, 5)
    with gemmery.batch_invariant(), FakeTensorMode():
        assert (torch.empty(3, 8) @ torch.empty(8, 5)).shape == (3, 5)


def test_subclasses_take_themselves_apart():
    from torch.testing._internal.two_tensor import TwoTensor

    with gemmery.batch_invariant(), torch.no_grad():
        whole = F.linear(TwoTensor(X, 2 * X), W, B)
        alone = F.linear(TwoTensor(X[2:3].clone(), 2 * X[2:3]), W, B)
    assert torch.equal(whole.a[2:3], alone.a)
    assert torch.equal(whole.b[2:3], alone.b)


@pytest.mark.parametrize("grad", (torch.enable_grad, torch.no_grad))
def test_jagged_batches_are_invariant(grad):
    parts = [X[0], X[1:4].flatten(0, 1)]
    with grad(), gemmery.batch_invariant():
        whole = F.linear(torch.nested.nested_tensor(parts, layout=torch.jagged), W, B)
        assert torch.equal(whole.values()[1:2], F.linear(X[0, 1:2], W, B))


def test_a_subclass_without_ways_of_its_own_is_a_tensor():
    class Marked(torch.Tensor):
        pass

    alone, together = alone_and_together(lambda x: F.linear(x.as_subclass(Marked), W, B))
    assert torch.equal(alone, together)


# ---------------------------------------------------------------------------------------------------------------------
# Entering and leaving


def is_on():
    """Whether this thread is within: then complex numbers are refused."""
    try:
        torch.ones(1, 1, dtype=torch.complex64) @ torch.ones(1, 1, dtype=torch.complex64)
    except NotImplementedError:
        return True
    return False


def test_it_nests_and_can_be_suspended():
    assert not is_on()
    with gemmery.batch_invariant(False):
        assert not is_on()
    with gemmery.batch_invariant():
        with gemmery.batch_invariant():
            assert is_on()
        with gemmery.batch_invariant(False):
            assert not is_on()
            with gemmery.batch_invariant():
                assert is_on()
            assert not is_on()
        assert is_on()
    assert not is_on()


def test_exceptions_leave_it():
    with pytest.raises(KeyError), gemmery.batch_invariant():
        raise KeyError
    with pytest.raises(KeyError), gemmery.batch_invariant(), gemmery.batch_invariant(False):
        raise KeyError
    assert torch._C._len_torch_dispatch_stack() == 0
    assert torch._C._len_torch_function_stack() == 0
    assert not is_on()


def test_as_a_decorator():
    @gemmery.batch_invariant()
    def inside():
        return is_on()

    assert inside()
    assert inside()
    assert not is_on()


def test_it_is_a_threads_own():
    found = []

    def work():
        found.append(is_on())
        with gemmery.batch_invariant():
            found.append(is_on())

    with gemmery.batch_invariant():
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        assert is_on()
    assert found == [False, True]


def test_threads_come_and_go():
    """Whether compiled functions run is one setting for all threads; the last to leave restores it."""
    function = torch.compile(lambda x: x + 1, backend="eager")
    inside, leave = threading.Barrier(2), threading.Event()

    def work():
        with gemmery.batch_invariant():
            inside.wait()
            leave.wait()

    thread = threading.Thread(target=work)
    with gemmery.batch_invariant():
        thread.start()
        inside.wait()
    stances = [stance()]
    leave.set()
    thread.join()
    assert [*stances, stance()] == ["force_eager", "default"]
    assert function(torch.ones(1)) == 2


def stance():
    from torch._dynamo import eval_frame

    return eval_frame._stance.stance


# ---------------------------------------------------------------------------------------------------------------------
# torch.compile


@pytest.fixture
def compiled():
    """A function, compiled, and how often its compiled code ran."""
    runs = []

    def backend(module, _):
        return lambda *arguments: runs.append(1) or module.forward(*arguments)

    torch._dynamo.reset()
    yield torch.compile(lambda x: F.linear(x, W, B).sin(), backend=backend), runs
    torch._dynamo.reset()


@pytest.mark.parametrize("before", (0, 1))
def test_compiled_functions_run_as_they_are_written(compiled, before):
    function, runs = compiled
    for _ in range(before):
        function(X)
    alone, together = alone_and_together(function)
    assert torch.equal(alone, together)
    assert len(runs) == before
    function(X)
    assert len(runs) == before + 1


@pytest.mark.parametrize("fullgraph", (False, True))
def test_a_compiled_function_cannot_enter_it(fullgraph):
    def function(x):
        with gemmery.batch_invariant():
            return F.linear(x, W)

    torch._dynamo.reset()
    with pytest.raises(RuntimeError, match=r"can't be entered by a function under torch\.compile"):
        torch.compile(function, backend="eager", fullgraph=fullgraph)(X)
    torch._dynamo.reset()
    assert stance() == "default"
    assert not is_on()


def test_swapped_layers_are_invariant_and_compile():
    model = nn.Sequential(nn.Linear(384, 40), nn.ReLU(), nn.Linear(40, 8))
    assert gemmery.nn.swap(model, batch_invariant=True) == 2
    assert "batch_invariant=True" in repr(model)
    torch._dynamo.reset()
    with torch.no_grad():
        for function in (model, torch.compile(model, backend="aot_eager", fullgraph=True, dynamic=True)):
            assert torch.equal(function(X)[2:3], function(X[2:3]))
    torch._dynamo.reset()


def test_a_pinned_config_is_kept():
    """The same config for every M sums alike, so that it may be one of another class."""
    p = make(device="NVIDIA H200", batch_invariant=True)
    config = gemmery.Config.of("16x64x128-g8-w4-s3-tile-pointer")
    assert Plan(replace(p, M=7), config).config == config
