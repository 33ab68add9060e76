"""Experts in the interpreter: kernels for every layout of weights, their gradients, packed weights, and small models."""

import pytest
import torch
from torch.nn import functional as F

import gemmery.nn
from gemmery.moe import clamped_swiglu, experts
from gemmery.product import run
from tests.experts import (
    ACTIVATIONS,
    EXPERTS,
    LAYOUTS,
    MODELS,
    UNUSED,
    choices,
    error,
    experts_of,
    gated,
    ids,
    leaves,
    meaning,
)

SWIGLU = gated(ACTIVATIONS["silu"][1])


@pytest.fixture
def launched(monkeypatch):
    """The products that ran as kernels."""
    seen, compute = [], run.compute

    def noted(call, *rest):
        seen.append(call.op)
        return compute(call, *rest)

    monkeypatch.setattr(run, "compute", noted)
    return seen


@pytest.mark.parametrize(
    "layout, activation",
    [
        ("stacked", "silu"), ("a pair", "gelu_tanh"), ("transposed", "a function"),
        ("alternating and transposed", "clamped_swiglu"),
    ],
)  # fmt: skip
def test_layouts_with_gradients(layout, activation):
    given, function = ACTIVATIONS[activation]
    ours = [x.requires_grad_() for x in leaves(torch.float32)]
    theirs = [x.detach().double().requires_grad_() for x in ours]
    index, weights = choices(7)
    index[0, 0], index[3] = -1, EXPERTS
    factors = [weights.clone().requires_grad_(), weights.double().requires_grad_()]
    x, w, d, b, c = ours
    (first, down), how = LAYOUTS[layout](w, d, b)
    y = experts(x, index, factors[0], first, down, activation=given, down_bias=c, **how)
    z = meaning(theirs[0], index, factors[1], *theirs[1:3], gated(function), *theirs[3:])
    assert error(y, z) < 1e-5
    grad = torch.randn(z.shape)
    made = torch.autograd.grad(y, (*ours, factors[0]), grad)
    for got, want in zip(made, torch.autograd.grad(z, (*theirs, factors[1]), grad.double()), strict=True):
        assert error(got, want) < 2e-5
    assert (made[1][UNUSED] == 0).all()


def test_two_products_and_the_activation_in_the_first(launched):
    x, w, d = leaves(torch.float32, biases=False)
    experts(x, *choices(7), w, d)
    assert launched == ["grouped_linear"] * 2


def test_without_a_gate():
    x, w, d = leaves(torch.float32, biases=False)
    index, weights = choices(7)
    y = experts(x, index, weights, w[:, :32], d, activation="relu_squared", gated=False)
    want = meaning(
        x.double(), index, weights.double(), w[:, :32].double(), d.double(), lambda h: F.relu(h).square()
    )
    assert error(y, want) < 1e-5


@pytest.mark.sampled(3)
@pytest.mark.parametrize("format", ["int4", "mxfp4", "e4m3", "2:4"])
def test_packed_weights(format):
    x, w, d, b, c = leaves(torch.bfloat16)
    options = {"group_size": 16} if format == "int4" else {}
    make = gemmery.sparsify if format == "2:4" else gemmery.quantize
    first, down = (make(t, format, **options) for t in (w, d))
    index, weights = choices(7)
    how = {"activation": clamped_swiglu, "gate_up_bias": b, "down_bias": c}
    exact = [getattr(t, t.plain)(torch.float64) for t in (first, down)]
    want = meaning(x.double(), index, weights.double(), *exact, gated(clamped_swiglu), b.double(), c.double())
    assert error(experts(x, index, weights, first, down, **how), want) < 1e-2
    x.requires_grad_()
    wide = x.detach().double().requires_grad_()
    experts(x, index, weights, first, down, **how).float().sum().backward()
    z = meaning(wide, index, weights.double(), *exact, gated(clamped_swiglu), b.double(), c.double())
    z.sum().backward()
    assert error(x.grad, wide.grad) < 2e-2


def test_choices_change_between_calls():
    """What is remembered of a call does not hold them."""
    x, w, d = leaves(torch.float32, biases=False)
    for seed in range(3):
        index, weights = choices(7, seed=seed)
        index = index if seed else torch.zeros_like(index)
        want = meaning(x.double(), index, weights.double(), w.double(), d.double(), SWIGLU)
        assert error(experts(x, index, weights, w, d), want) < 1e-5


@pytest.mark.parametrize("name", ["qwen3", "gpt-oss"])
def test_models(name, launched):
    pytest.importorskip("transformers")
    gemmery.nn.register_experts()
    model = MODELS[name].make(
        num_hidden_layers=1, layer_types=["full_attention"], experts_implementation="eager"
    )
    with torch.no_grad():
        want = model(ids(1)).logits
        model.set_experts_implementation("gemmery")
        assert error(model(ids(1)).logits, want) < 1e-5
        assert len(launched) == 2
        model.set_experts_implementation("eager")
        report = gemmery.nn.swap(model, precision="torch")
        assert error(model(ids(1)).logits, want) < 2e-5
        report.undo()
        module = experts_of(model)[0]
        given = (torch.randn(5, 32), *choices(5, 4))
        plain = module(*given)
        gemmery.nn.quantize(model, "int8")
        assert error(experts_of(model)[0](*given), plain) < 0.05


def test_a_gradient_step_of_a_model():
    pytest.importorskip("transformers")
    gemmery.nn.register_experts()
    found = []
    for how in ("eager", "gemmery"):
        model = MODELS["mixtral"].make(num_hidden_layers=1, scale=2.0, experts_implementation=how)
        loss = model(ids(1), labels=ids(1)).loss
        found.append((loss, torch.autograd.grad(loss, list(model.parameters()))))
    (want, grads), (got, made) = found
    assert got.item() == pytest.approx(want.item(), rel=1e-5)
    assert all(error(x, y) < 1e-4 for x, y in zip(made, grads, strict=True))
