"""Feed-forward blocks with a gradient of their own: right, differentiable again, compiled, and sparing of memory."""

import itertools

import pytest
import torch
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from gemmery import nn as gnn
from gemmery.launch.plan import Plan
from gemmery.product import vjp

# What these tests are about does not depend on Triton's version.
pytestmark = pytest.mark.slow

WIDTH, HIDDEN, ROWS = 6, 10, 5


def block(kind, bias=True, dtype=torch.float64, activation="silu"):
    torch.manual_seed(0)
    if kind == "mlp":
        return gnn.MLP(WIDTH, HIDDEN, activation=activation, bias=bias, dtype=dtype)
    return gnn.GatedMLP(
        WIDTH, HIDDEN, activation=activation, bias=bias, stacked=kind == "stacked", dtype=dtype
    )


def in_torch(module, x, function=F.silu):
    if isinstance(module, gnn.MLP):
        hidden = function(F.linear(x, module.up.weight, module.up.bias))
    else:
        layers = module.gate_up.weight.chunk(2) if module.stacked else (module.gate.weight, module.up.weight)
        biases = (None, None)
        if module.down.bias is not None:
            biases = module.gate_up.bias.chunk(2) if module.stacked else (module.gate.bias, module.up.bias)
        gate, up = (F.linear(x, w, b) for w, b in zip(layers, biases, strict=True))
        hidden = function(gate) * up
    return F.linear(hidden, module.down.weight, module.down.bias)


def values(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, dtype=dtype, generator=torch.Generator().manual_seed(seed))


def gradients(y, x, module):
    return torch.autograd.grad(y.square().sum(), (x, *module.parameters()))


KINDS = ("mlp", "stacked", "two")


@pytest.mark.parametrize("bias", (True, False))
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", ((ROWS, WIDTH), (2, 3, WIDTH), (WIDTH,), (0, WIDTH)))
def test_gradients(kind, bias, shape):
    module, x = block(kind, bias), values(*shape).requires_grad_()
    grads = gradients(module(x), x, module)
    torch.testing.assert_close(grads, gradients(in_torch(module, x), x, module))


@pytest.mark.parametrize("kind", KINDS)
def test_derivatives_of_higher_order(kind):
    module, x = block(kind), values(2, WIDTH).requires_grad_()

    def third(y):
        inputs = (x, *module.parameters())
        for power in (2, 3):
            grads = torch.autograd.grad(y.square().sum(), inputs, create_graph=True)
            y = torch.stack([g.pow(power).sum() for g in grads])
        return torch.autograd.grad(y.sum(), inputs)

    torch.testing.assert_close(third(module(x)), third(in_torch(module, x)))


FROZEN = [wants for wants in itertools.product((True, False), repeat=3) if any(wants)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("wants", FROZEN, ids=str)
def test_gradients_of_some(kind, wants):
    module, x = block(kind), values(ROWS, WIDTH).requires_grad_(wants[0])
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(wants[1 if name.startswith("down") else 2])
    leaves = [t for t in (x, *module.parameters()) if t.requires_grad]
    grads = torch.autograd.grad(module(x).square().sum(), leaves)
    torch.testing.assert_close(grads, torch.autograd.grad(in_torch(module, x).square().sum(), leaves))


def saved_by(y_of):
    """Bytes that autograd holds of a result, by tensor."""
    found = {}

    def pack(tensor):
        found[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        y = y_of()
    return y, found


@pytest.mark.parametrize(("kind", "wide"), (("mlp", 1), ("stacked", 2), ("two", 2)))
def test_hidden_values_are_not_saved(kind, wide):
    module, x = block(kind, dtype=torch.float32), values(64, WIDTH, dtype=torch.float32).requires_grad_()
    known = {t.untyped_storage().data_ptr() for t in (x, *module.parameters())}
    _, saved = saved_by(lambda: module(x))
    extra = sum(size for at, size in saved.items() if at not in known)
    assert extra == 64 * HIDDEN * wide * 4
    _, in_layers = saved_by(lambda: in_torch(module, x))
    assert extra < sum(size for at, size in in_layers.items() if at not in known)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("dynamic", (False, True))
@pytest.mark.parametrize("kind", KINDS)
def test_compiled(kind, dynamic):
    torch._dynamo.reset()
    module = block(kind)
    step = torch.compile(module, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for rows in (ROWS, 7, 8):
        x = values(rows, WIDTH, seed=rows).requires_grad_()
        y = step(x)
        torch.testing.assert_close(y, in_torch(module, x))
        torch.testing.assert_close(gradients(y, x, module), gradients(in_torch(module, x), x, module))


@pytest.mark.parametrize("kind", KINDS)
def test_checkpointed(kind):
    module, x = block(kind), values(ROWS, WIDTH).requires_grad_()
    y = checkpoint(module, x, use_reentrant=False)
    torch.testing.assert_close(gradients(y, x, module), gradients(in_torch(module, x), x, module))


@pytest.mark.parametrize("kind", KINDS)
def test_under_autocast(kind):
    module = block(kind, dtype=torch.float32)
    x = values(ROWS, WIDTH, dtype=torch.float32).requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        y = module(x)
        want = in_torch(module, x)
    assert y.dtype == torch.bfloat16
    got, wanted = gradients(y.float(), x, module), gradients(want.float(), x, module)
    assert [g.dtype for g in got] == [torch.float32] * len(got)
    torch.testing.assert_close(got, wanted, rtol=0.05, atol=0.05)


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("kind", KINDS)
def test_vmap(kind):
    module, x = block(kind), values(4, ROWS, WIDTH)
    with torch.no_grad():
        torch.testing.assert_close(torch.vmap(module)(x), in_torch(module, x))


@pytest.mark.parametrize("kind", ("mlp", "stacked"))
def test_an_activation_of_ones_own(kind):
    scale = torch.tensor(0.7, dtype=torch.float64)

    def capped(x):
        return torch.tanh(x * scale) / 0.7

    module, x = block(kind, activation=capped), values(ROWS, WIDTH).requires_grad_()
    wanted = in_torch(module, x, capped)
    torch.testing.assert_close(module(x), wanted)
    torch.testing.assert_close(gradients(module(x), x, module), gradients(wanted, x, module))


def test_a_layer_with_a_hook_is_called():
    module, x, seen = block("stacked"), values(ROWS, WIDTH).requires_grad_(), []
    module.down.register_forward_hook(lambda *_: seen.append(1))
    torch.testing.assert_close(gradients(module(x), x, module), gradients(in_torch(module, x), x, module))
    assert seen == [1]


def test_layers_that_multiply_in_two_ways_are_called(monkeypatch):
    run = Plan.run

    def bare(plan, *given):
        assert plan.problem.fusion is None, "they ran as one product"
        return run(plan, *given)

    monkeypatch.setattr(Plan, "run", bare)
    module, x = block("two", dtype=torch.float32), values(ROWS, WIDTH, dtype=torch.float32)
    module.up.precision = "tf32"
    assert module.fused_product() is None
    with torch.no_grad():
        torch.testing.assert_close(module(x), in_torch(module, x))


def test_products_of_a_step(monkeypatch):
    """Two forward, one for each gradient of an operand backward, and no elementwise kernel."""
    ran = []
    run = Plan.run
    monkeypatch.setattr(Plan, "run", lambda p, *a: (ran.append(p.problem.fusion is not None), run(p, *a))[1])
    monkeypatch.setattr(vjp, "pointwise", lambda *_: pytest.fail("an elementwise kernel ran"))
    module, x = block("stacked", bias=False), values(ROWS, WIDTH).requires_grad_()
    y = module(x)
    assert len(ran) == 2
    assert ran[0]
    ran.clear()
    y.sum().backward()
    assert len(ran) == 4
    assert ran.count(True) == 1
