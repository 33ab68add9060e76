"""Experts where no kernel runs: what they mean, modules of them, and models of Hugging Face's that are set to gemmery,
swapped, trained and quantised."""

import copy
import doctest
import functools
import io
import pickle
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import gemmery.nn
from gemmery.formats import QuantizedTensor
from gemmery.moe import clamped_swiglu, experts, gate
from gemmery.nn import Experts, hugging_face
from gemmery.nn.hugging_face import FusedExperts, fusible
from tests.experts import (
    ACTIVATIONS,
    EXPERTS,
    HIDDEN,
    IN,
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

transformers = pytest.importorskip("transformers")

MODULES = ("gemmery.moe.experts", "gemmery.nn.experts", "gemmery.nn.hugging_face", "gemmery.nn.quantizing")


@pytest.mark.parametrize("name", MODULES)
def test_examples(name):
    result = doctest.testmod(sys.modules[name])
    assert result.attempted > 0
    assert result.failed == 0


# ---------------------------------------------------------------------------------------------------------------------
# What they mean


@pytest.mark.sampled(3)
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_and_activations_with_gradients(layout, activation):
    given, function = ACTIVATIONS[activation]
    inputs = [x.requires_grad_() for x in leaves()]
    index, weights = choices(7)
    weights = weights.double().requires_grad_()
    x, w, d, b, c = inputs
    (first, down), how = LAYOUTS[layout](w, d, b)
    y = experts(x, index, weights, first, down, activation=given, down_bias=c, **how)
    z = meaning(x, index, weights, w, d, gated(function), b, c)
    torch.testing.assert_close(y, z)
    grad = torch.randn(z.shape, dtype=z.dtype)
    ours = torch.autograd.grad(y, (*inputs, weights), grad)
    theirs = torch.autograd.grad(z, (*inputs, weights), grad)
    for got, want in zip(ours, theirs, strict=True):
        torch.testing.assert_close(got, want)
    assert (ours[1][UNUSED] == 0).all()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradients_that_are_added_to_others(layout):
    x, w, d, b, c = (t.requires_grad_() for t in leaves())
    index, weights = choices(7)
    (first, down), how = LAYOUTS[layout](w, d, b)
    of_w, of_d = torch.randn_like(w), torch.randn_like(d)
    (of_first, of_down), _ = LAYOUTS[layout](of_w.clone(), of_d.clone(), None)
    sums = of_first if isinstance(of_first, tuple) else (of_first,)
    before = [t.clone() for t in (*sums, of_down)]
    y = experts(x, index, weights, first, down, down_bias=c, gate_up_grad=of_first, down_grad=of_down, **how)
    own = [t.detach().requires_grad_() for t in (*(first if isinstance(first, tuple) else (first,)), down)]
    z = experts(x, index, weights, tuple(own[:-1]) if len(own) > 2 else own[0], own[-1], down_bias=c, **how)
    y.sum().backward()
    assert w.grad is None
    assert d.grad is None
    for total, start, want in zip((*sums, of_down), before, torch.autograd.grad(z.sum(), own), strict=True):
        torch.testing.assert_close(total - start, want)


@pytest.mark.parametrize(
    "given", ["relu_squared", torch.tanh, lambda acc: acc * 2], ids=["name", "function", "lambda"]
)
@pytest.mark.parametrize("transposed", [False, True])
def test_without_a_gate(given, transposed):
    function = given if callable(given) else lambda acc: torch.relu(acc).square()
    x, w, d, b, c = leaves()
    w, b = w[:, :HIDDEN], b[:, :HIDDEN]
    index, weights = choices(7)
    want = meaning(x, index, weights, w, d, function, b, c)
    if transposed:
        w, d = w.mT.contiguous(), d.mT.contiguous()
    y = experts(
        x,
        index,
        weights,
        w,
        d,
        activation=given,
        gated=False,
        transposed=transposed,
        gate_up_bias=b,
        down_bias=c,
    )
    torch.testing.assert_close(y, want)


def test_without_biases():
    x, w, d = leaves(biases=False)
    index, weights = choices(7)
    want = meaning(x, index, weights, w, d, gated(ACTIVATIONS["silu"][1]))
    for layout in LAYOUTS.values():
        (first, down), how = layout(w, d, None)
        torch.testing.assert_close(experts(x, index, weights, first, down, **how), want)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("of_weights", [torch.float32, torch.bfloat16])
def test_types(dtype, of_weights):
    x, w, d = leaves(dtype, biases=False)
    index, weights = choices(7)
    weights = weights.to(of_weights)
    y = experts(x, index, weights, w, d)
    want = meaning(
        *(t.double() for t in (x,)),
        index,
        weights.double(),
        w.double(),
        d.double(),
        gated(ACTIVATIONS["silu"][1]),
    )
    assert (y.shape, y.dtype) == (x.shape, dtype)
    assert error(y, want) < {torch.float16: 2e-3, torch.bfloat16: 1.5e-2, torch.float32: 1e-6}[dtype]


def test_ids_outside_add_nothing():
    x, w, d, b, c = leaves()
    index, weights = choices(7)
    index[0], index[1, 0], index[2, 1] = torch.tensor([EXPERTS, EXPERTS + 7]), -1, EXPERTS
    w.requires_grad_()
    weights = weights.double().requires_grad_()
    y = experts(x, index.int(), weights, w, d, gate_up_bias=b, down_bias=c)
    torch.testing.assert_close(y, meaning(x, index, weights, w, d, gated(ACTIVATIONS["silu"][1]), b, c))
    assert (y[0] == 0).all()
    y.sum().backward()
    assert (weights.grad[0] == 0).all()
    assert w.grad.isfinite().all()


def test_more_dimensions_no_weights_and_no_tokens():
    x, w, d = leaves(biases=False, tokens=12)
    index, weights = choices(12)
    y = experts(x, index, None, w, d)
    torch.testing.assert_close(y, experts(x, index, torch.ones_like(weights), w, d))
    again = experts(x.reshape(3, 4, IN), index.reshape(3, 4, -1), weights.reshape(3, 4, -1), w, d)
    assert torch.equal(again.reshape(12, IN), experts(x, index, weights, w, d))
    assert torch.equal(
        experts(x[0], index[0], weights[0], w, d), experts(x[:1], index[:1], weights[:1], w, d)[0]
    )
    assert experts(x[:0], index[:0], weights[:0], w, d).shape == (0, IN)
    assert experts(x, index[:, :0], weights[:, :0], w, d).equal(torch.zeros_like(x))


def test_the_norm_runs_before_the_sum():
    x, w, d = leaves(biases=False)
    index, weights = choices(7)

    def norm(rows):
        return rows / rows.square().mean(-1, keepdim=True).add(1e-6).sqrt()

    y = experts(x, index, weights, w, d, post_norm=norm)
    act = gated(ACTIVATIONS["silu"][1])
    parts = [
        weights[:, j, None] * norm(meaning(x, index[:, j : j + 1], torch.ones(7, 1), w, d, act))
        for j in range(2)
    ]
    torch.testing.assert_close(y, sum(parts).to(y.dtype))


def test_a_second_product_of_another_width():
    x, w, d = leaves(biases=False)
    index, weights = choices(7)
    y = experts(x, index, weights, w, d[:, :20])
    torch.testing.assert_close(y, experts(x, index, weights, w, d)[:, :20])


@pytest.mark.sampled(3)
@pytest.mark.parametrize("format", ["int4", "int8", "mxfp4", "nvfp4", "nf4", "e4m3", "e5m2"])
def test_packed_weights(format):
    x, w, d, b, c = leaves(torch.bfloat16)
    first, down = (
        gemmery.quantize(t, format, **({"group_size": 16} if format == "int4" else {})) for t in (w, d)
    )
    index, weights = choices(7)
    y = experts(x, index, weights, first, down, gate_up_bias=b, down_bias=c)
    exact = (t.dequantize(torch.float64) for t in (first, down))
    want = meaning(
        x.double(), index, weights.double(), *exact, gated(ACTIVATIONS["silu"][1]), b.double(), c.double()
    )
    assert error(y, want) < 1e-2
    x.requires_grad_()
    c.requires_grad_()
    experts(x, index, weights, first, down, gate_up_bias=b, down_bias=c).float().sum().backward()
    assert x.grad.abs().max() > 0
    assert c.grad.abs().max() > 0


@pytest.mark.slow
@pytest.mark.sampled(3)
@pytest.mark.parametrize("activation", ["silu", gate(clamped_swiglu)], ids=["silu", "clamped"])
@pytest.mark.parametrize("layout", ["stacked", "alternating and transposed"])
def test_compiled(layout, activation):
    x, w, d, b, c = (t.requires_grad_() for t in leaves(torch.float32, tokens=9))

    def block(x, index, weights, w, d, b, c):
        (first, down), how = LAYOUTS[layout](w, d, b)
        return experts(x, index, weights, first, down, activation=activation, down_bias=c, **how)

    compiled = torch.compile(block, fullgraph=True, backend="aot_eager", dynamic=True)
    for tokens in (9, 4):
        given = (x[:tokens], *choices(tokens), w, d, b, c)
        y, z = compiled(*given), block(*given)
        torch.testing.assert_close(y, z)
        for got, want in zip(
            *(torch.autograd.grad(t.square().sum(), (x, w, d, b, c)) for t in (y, z)), strict=True
        ):
            torch.testing.assert_close(got, want)


def test_compiled_code_takes_epilogues_alone():
    x, w, d = leaves(torch.float32, biases=False)
    index, weights = choices(7)
    compiled = torch.compile(
        lambda x: experts(x, index, weights, w, d, activation=clamped_swiglu),
        fullgraph=True,
        backend="aot_eager",
    )
    with pytest.raises(Exception, match=r"the result of gemmery\.moe\.gate\(f\)"):
        compiled(x)


def test_a_gate_is_the_same_for_one_function():
    def made(limit):
        return lambda gate, up: gate.clamp(max=limit) * up

    assert gate(made(2)) is gate(made(2))
    assert gate(made(2)) is not gate(made(3))
    assert gate(clamped_swiglu) is gate(clamped_swiglu)
    smaller = functools.partial(clamped_swiglu, limit=2.0)
    assert gate(smaller) is gate(functools.partial(clamped_swiglu, limit=2.0))
    acc = torch.randn(3, 8)
    assert torch.equal(gate(smaller)(acc), clamped_swiglu(*acc.chunk(2, -1), limit=2.0))


def test_the_clamped_swiglu_is_that_of_gpt_oss():
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

    gate_up = torch.randn(6, 32) * 8
    own = GptOssExperts._apply_gate(SimpleNamespace(limit=7.0, alpha=1.702), gate_up)
    torch.testing.assert_close(clamped_swiglu(gate_up[:, 0::2], gate_up[:, 1::2]), own)


# ---------------------------------------------------------------------------------------------------------------------
# What they refuse

E8, H8 = (4, 12, 8), (4, 8, 6)
REFUSED = {
    "ids of other tokens": ({"top_k_index": torch.zeros(3, 2, dtype=torch.int64)}, ValueError, r"x is \(5, 8\) and top_k_index \(3, 2\); they must be \(\.\.\., H\) and \(\.\.\., k\)"),
    "ids of a float type": ({"top_k_index": torch.zeros(5, 2)}, TypeError, r"experts: top_k_index is torch\.float32; .* and top_k_weights comes after it"),
    "weights of other tokens": ({"top_k_weights": torch.zeros(5, 3)}, ValueError, r"top_k_weights is \(5, 3\) and the ids were \(5, 2\)"),
    "no tensor": ({"gate_up": None}, TypeError, "experts: gate_up is a NoneType"),
    "a matrix": ({"gate_up": torch.zeros(12, 8)}, ValueError, r"gate_up is \(12, 8\); it must have three dimensions"),
    "a half": ({"gate_up": torch.zeros(4, 6, 8)}, ValueError, r"x has 8 columns, gate_up is \(4, 6, 8\) and down \(4, 8, 6\); with transposed=False .* gate_up would be \(4, 12, 8\)"),
    "a transpose": ({"gate_up": torch.zeros(4, 8, 12)}, ValueError, "transposed=True is for their transposes"),
    "of other experts": ({"gate_up": torch.zeros(3, 12, 8)}, ValueError, "experts: gate_up has 3 experts and down 4"),
    "three parts": ({"gate_up": (torch.zeros(4, 6, 8),) * 3}, ValueError, "gate_up is a tuple of 3"),
    "a pair without a gate": ({"gate_up": (torch.zeros(4, 6, 8),) * 2, "gated": False}, ValueError, "gate_up is a tuple of 2"),
    "packed and transposed": ({"gate_up": gemmery.quantize(torch.randn(4, 32, 8), "int8"), "transposed": True}, ValueError, "gate_up is packed, with transposed=True"),
    "packed and alternating": ({"gate_up": gemmery.quantize(torch.randn(4, 32, 8), "int8"), "concatenated": False}, ValueError, "gate_up is packed, with concatenated=False"),
    "an activation without a name": ({"activation": "mish"}, ValueError, "activation is 'mish'; it must be a function or one of gelu"),
    "an activation that is none": ({"activation": 3}, TypeError, "activation is a int; it must be a name or a torch function"),
    "a sum of gradients of another shape": (
        {"gate_up_grad": torch.zeros(4, 8, 12)}, ValueError, r"experts: gate_up_grad is \(4, 8, 12\); it must be \(4, 12, 8\)",
    ),
    "a sum of gradients in 16 bits": (
        {"down_grad": torch.zeros(H8).half()}, TypeError, r"experts: down_grad is torch\.float16",
    ),
    "an activation of one tensor": ({"activation": F.silu}, TypeError, "gate: silu takes one tensor.* such as 'silu'"),
    "torch's own of one tensor": ({"activation": torch.tanh}, TypeError, "gate: tanh takes one tensor"),
    "a module": ({"activation": nn.SiLU()}, TypeError, r"gate: given a module SiLU; it must be a torch function of \(gate, up\)"),
    "types": ({"x": torch.zeros(5, 8, dtype=torch.float16)}, TypeError, r"x is torch\.float16 and weight is torch\.float32"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_errors(name):
    wrong, kind, text = REFUSED[name]
    given = {
        "x": torch.zeros(5, 8), "top_k_index": torch.zeros(5, 2, dtype=torch.int64), "top_k_weights": torch.zeros(5, 2),
        "gate_up": torch.zeros(E8), "down": torch.zeros(H8),
    }  # fmt: skip
    with pytest.raises(kind, match=text):
        experts(**given | wrong)


# ---------------------------------------------------------------------------------------------------------------------
# The module


@pytest.mark.parametrize("gated_", [True, False])
@pytest.mark.parametrize("bias", [True, False])
def test_the_module(gated_, bias):
    layer = Experts(EXPERTS, IN, HIDDEN, activation="gelu_new", gated=gated_, bias=bias, dtype=torch.float64)
    first = "gate_up_proj" if gated_ else "up_proj"
    names = {first, "down_proj"} | ({f"{first}_bias", "down_proj_bias"} if bias else set())
    assert set(layer.state_dict()) == names
    assert layer.down_proj.abs().max() <= HIDDEN**-0.5
    x, (index, weights) = torch.randn(7, IN, dtype=torch.float64), choices(7)
    act = functools.partial(F.gelu, approximate="tanh")
    function = gated(lambda gate, up: act(gate) * up) if gated_ else act
    own = [getattr(layer, name) for name in (first, "down_proj")]
    biases = [getattr(layer, f"{name}_bias") for name in (first, "down_proj")]
    torch.testing.assert_close(layer(x, index, weights), meaning(x, index, weights, *own, function, *biases))
    layer(x, index, weights).sum().backward()
    assert all(p.grad is not None for p in layer.parameters())


def test_the_modules_own_sums_of_gradients():
    layer = Experts(EXPERTS, IN, HIDDEN, fuse_wgrad_accumulation=True)
    x, (index, weights) = torch.randn(7, IN), choices(7)
    with pytest.raises(ValueError, match="up_proj has no main_grad"):
        layer(x, index, weights)
    with torch.no_grad():
        layer(x, index, weights)
    for p in layer.parameters():
        p.main_grad = torch.zeros_like(p, dtype=torch.float32)
    for _ in range(2):
        layer(x, index, weights).sum().backward()
    assert all(p.grad is None for p in layer.parameters())
    layer.fuse_wgrad_accumulation = False
    layer(x, index, weights).sum().backward()
    for p in layer.parameters():
        torch.testing.assert_close(p.main_grad, 2 * p.grad)


def test_what_the_module_refuses():
    with pytest.raises(ValueError, match="Experts: in_features is -1; it must be an integer, 0 or more"):
        Experts(4, -1, 8)
    with pytest.raises(ValueError, match="activation is 'mish'"):
        Experts(4, 8, 8, activation="mish")
    with pytest.raises(
        ValueError, match=r"the weights are \(4, 6, 8\) and \(4, 8, 6\); they must be \(E, 2I, H\) and"
    ):
        Experts.of(torch.zeros(4, 6, 8), torch.zeros(4, 8, 6))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("way", ["deepcopy", "pickle", "state dict"])
@pytest.mark.parametrize("activation", ["silu", gate(clamped_swiglu)], ids=["silu", "clamped"])
def test_copies_of_the_module(way, activation):
    layer = Experts(EXPERTS, IN, HIDDEN, activation=activation, bias=True)
    if way == "deepcopy":
        other = copy.deepcopy(layer)
    elif way == "pickle":
        other = pickle.loads(pickle.dumps(layer))
    else:
        other = Experts(EXPERTS, IN, HIDDEN, activation=activation, bias=True)
        other.load_state_dict(layer.state_dict())
    given = (torch.randn(7, IN), *choices(7))
    assert torch.equal(other(*given), layer(*given))
    assert repr(other) == repr(layer)


def packed(format="int8", seed=0):
    torch.manual_seed(seed)
    w, d = torch.randn(EXPERTS, 2 * HIDDEN, IN), torch.randn(EXPERTS, IN, HIDDEN)
    return Experts.of(*(gemmery.quantize(t, format, dtype=torch.bfloat16) for t in (w, d)))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("way", ["deepcopy", "torch.save", "another format", "assign"])
def test_copies_of_a_packed_module(way):
    layer, given = packed(), (torch.randn(7, IN), *choices(7))
    if way == "deepcopy":
        other = copy.deepcopy(layer)
    else:
        other = packed("e4m3" if way == "another format" else "int8", seed=1)
        assert not torch.equal(other(*given), layer(*given))
        file = io.BytesIO()
        torch.save(layer.state_dict(), file)
        file.seek(0)
        other.load_state_dict(torch.load(file), assign=way == "assign")
    assert other.packed
    assert isinstance(other.gate_up_proj, QuantizedTensor)
    assert not other.gate_up_proj.requires_grad
    assert torch.equal(other(*given), layer(*given))
    assert other(*given).dtype == torch.float32
    assert "format=int8" in repr(other)


# ---------------------------------------------------------------------------------------------------------------------
# Models


@pytest.fixture(autouse=True)
def registered():
    gemmery.nn.register_experts()


def logits(model):
    with torch.no_grad():
        return model(ids()).logits


@functools.cache
def wanted(name):
    model = MODELS[name].make(experts_implementation="eager")
    return logits(model)


@pytest.fixture
def fused(monkeypatch):
    """Notes, for each time that experts are computed, whether their activation is part of a product."""
    seen, run = [], hugging_face.experts

    def noted(*given, **how):
        seen.append(not isinstance(how["activation"], hugging_face.Unfused))
        return run(*given, **how)

    monkeypatch.setattr(hugging_face, "experts", noted)
    return seen


@pytest.mark.parametrize("name", MODELS)
def test_a_model_set_to_gemmery(name, fused):
    model = MODELS[name].make()
    assert type(experts_of(model)[0]).__name__ == MODELS[name].experts
    model.set_experts_implementation("eager")
    assert torch.equal(logits(model), wanted(name))
    assert not fused
    model.set_experts_implementation("gemmery")
    assert error(logits(model), wanted(name)) < 2e-6
    assert fused == [True] * MODELS[name].layers
    experts_of(model)[-1].down_proj.data.zero_()
    assert error(logits(model), wanted(name)) > 1e-3


@pytest.mark.parametrize("name", ["qwen3", "gpt-oss"])
def test_a_model_loaded_with_gemmery(name, tmp_path, fused):
    model = MODELS[name].make()
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path, experts_implementation="gemmery")
    assert error(logits(loaded.eval()), wanted(name)) < 2e-6
    assert fused == [True] * MODELS[name].layers


def losses(model, steps=5):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    model.train()
    found = []
    for _ in range(steps):
        loss = model(ids(), labels=ids()).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


@pytest.mark.parametrize("way", ["set", "swapped"])
@pytest.mark.parametrize("name", MODELS)
def test_training_follows_eager(name, way):
    plain = losses(MODELS[name].make(scale=2.0, experts_implementation="eager"))
    model = MODELS[name].make(scale=2.0, experts_implementation="gemmery" if way == "set" else "eager")
    if way == "swapped":
        gemmery.nn.swap(model, precision="torch")
    ours = losses(model)
    assert plain[-1] < 0.95 * plain[0]
    assert ours == pytest.approx(plain, rel=1e-4)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", MODELS)
def test_swapped_and_undone(name, fused):
    model = MODELS[name].make(experts_implementation="eager")
    before, kept = experts_of(model), dict(model.named_parameters())
    state = model.state_dict()
    report = gemmery.nn.swap(model, precision="torch")
    assert [what for _, what in report.replaced].count(MODELS[name].experts) == MODELS[name].layers
    after = experts_of(model)
    assert all(type(x) is FusedExperts for x in after)
    assert MODELS[name].experts in repr(after[0])
    assert after[0].num_experts == before[0].num_experts
    assert error(logits(model), wanted(name)) < 1e-5
    assert fused == [True] * MODELS[name].layers
    assert {k: id(v) for k, v in model.named_parameters()} == {k: id(v) for k, v in kept.items()}
    assert list(model.state_dict()) == list(state)
    assert not [n for n, _ in report.left if n.endswith(".experts")]
    again = gemmery.nn.swap(model, precision="torch")
    assert (
        dict(again.left)[next(n for n, x in model.named_modules() if x is after[0])]
        == "already a gemmery module"
    )
    report.undo()
    assert [id(x) for x in experts_of(model)] == [id(x) for x in before]
    assert torch.equal(logits(model), wanted(name))


def test_a_swapped_model_goes_on_being_changed():
    """Training, moving and loading in between are kept, and so is what others do to parts."""
    model, plain = (MODELS["gpt-oss"].make(experts_implementation="eager") for _ in range(2))
    report = gemmery.nn.swap(model, precision="torch")
    for each in (model, plain):
        experts_of(each)[0].limit = 0.5
    assert error(logits(model), logits(plain)) < 1e-5
    assert error(logits(plain), wanted("gpt-oss")) > 1e-3
    loss = losses(model)
    state = {k: v.clone() for k, v in model.state_dict().items()}
    report.undo()
    assert type(experts_of(model)[0]).__name__ == "GptOssExperts"
    assert all(torch.equal(v, state[k]) for k, v in model.state_dict().items())
    assert model.training
    assert loss[-1] < loss[0]
    copied = copy.deepcopy(model)
    gemmery.nn.swap(copied, precision="torch")
    assert error(logits(copy.deepcopy(copied)), logits(copied)) == 0


def test_hooks_and_other_activations_in_a_swapped_model(fused):
    models = [MODELS["qwen3"].make(experts_implementation="eager") for _ in range(2)]
    gemmery.nn.swap(models[0], precision="torch")
    for model in models:
        experts_of(model)[0].act_fn.register_forward_hook(lambda module, args, out: out + 0.25)
        experts_of(model)[1].act_fn = nn.Mish()
    assert error(logits(models[0]), logits(models[1])) < 1e-5
    assert fused == [False, False]


def test_float32_experts_are_torchs_to_compute():
    model = MODELS["mixtral"].make()
    report = gemmery.nn.swap(model)
    assert "MixtralExperts" not in [what for _, what in report.replaced]
    assert any(
        why.startswith("its weight is float32") and name.endswith("experts") for name, why in report.left
    )
    report = gemmery.nn.swap(MODELS["mixtral"].make().bfloat16())
    assert "MixtralExperts" in [what for _, what in report.replaced]
    report = gemmery.nn.swap(MODELS["mixtral"].make().bfloat16(), fuse=False)
    assert "MixtralExperts" not in [what for _, what in report.replaced]


def change(kind, module):
    if kind == "a hook":
        module.register_forward_hook(lambda module, args, out: None)
    elif kind == "its forward":
        module.forward = lambda *args: args[0]
    elif kind == "its gate":
        module._apply_gate = lambda gate_up: gate_up.chunk(2, -1)[0]
    elif kind == "a parameter":
        module.scale = nn.Parameter(torch.ones(1))
    elif kind == "a kind of parameter":
        module.down_proj = type("Kind", (nn.Parameter,), {})(module.down_proj.data)
    else:
        module.__class__ = type("Own", (type(module),), {"forward": lambda self, *args: args[0]})


@pytest.mark.parametrize(
    "kind, why",
    [
        ("a hook", "it has hooks"),
        ("its forward", "its forward was replaced"),
        ("its gate", "its _apply_gate was replaced"),
        ("a parameter", "it has other parameters, buffers or children than its class gives it"),
        ("a kind of parameter", "its down_proj is a Kind, not a plain parameter"),
        ("a class", "whose forward is not known"),
    ],
)
def test_experts_that_stay(kind, why):
    model = MODELS["qwen3"].make(experts_implementation="eager").bfloat16()
    change(kind, experts_of(model)[0])
    for report in (gemmery.nn.swap(model), gemmery.nn.quantize(model, "int8")):
        assert why in dict(report.left)["model.layers.0.mlp.experts"]
        assert "model.layers.1.mlp.experts" in dict(report.replaced)
    alone = experts_of(MODELS["qwen3"].make())[0]
    assert gemmery.nn.swap(alone).left == [
        ("", "it is not inside a module, so it can't be replaced; wrap it, as in torch.nn.Sequential(model)")
    ]


# --- quantised


@pytest.mark.sampled(3)
@pytest.mark.parametrize("format", ["int4", "mxfp4", "e4m3", "int8"])
@pytest.mark.parametrize("name", MODELS)
def test_a_quantised_model(name, format):
    model = MODELS[name].make(experts_implementation="eager")
    options = {"group_size": 16} if format == "int4" else {}
    plain = copy.deepcopy(model)
    report = gemmery.nn.quantize(model, format, skip=("lm_head", "self_attn", "gate_proj", "up_proj", "down_proj"), **options)  # fmt: skip
    made = experts_of(model)
    assert [type(x) for x in made] == [Experts] * MODELS[name].layers
    assert [what for _, what in report.replaced] == [MODELS[name].experts] * MODELS[name].layers
    # The plain model with the numbers that the packed weights stand for.
    for own, theirs in zip(made, experts_of(plain), strict=True):
        w, d = own.gate_up_proj.dequantize(torch.float32), own.down_proj.dequantize(torch.float32)
        if name == "gpt-oss":
            (w, d), _ = LAYOUTS["alternating and transposed"](w, d, None)
        theirs.gate_up_proj.data, theirs.down_proj.data = w, d
    assert error(logits(model), logits(plain)) < 0.03
    report.undo()
    assert torch.equal(logits(model), wanted(name))


def test_a_quantised_model_and_what_swap_made_of_it():
    model = MODELS["gpt-oss"].make(experts_implementation="eager").bfloat16()
    swapped = gemmery.nn.swap(model)
    before = logits(model)
    report = gemmery.nn.quantize(model, "int8")
    assert [what for _, what in report.replaced].count("FusedExperts") == 2
    made = experts_of(model)[0]
    assert "activation=GptOssExperts._apply_gate, bias=True, format=int8" in repr(made)
    assert made.gate_up_proj_bias.requires_grad
    assert error(logits(model), before) < 0.1
    with pytest.raises(ValueError, match="not what swap put there"):
        swapped.undo()
    again = gemmery.nn.quantize(model, "int8")
    assert dict(again.left)["model.layers.0.mlp.experts"] == "it is quantized already"
    report.undo()
    assert torch.equal(logits(model), before)
    swapped.undo()
    assert type(experts_of(model)[0]).__name__ == "GptOssExperts"


def test_quantising_gemmerys_own_and_skipping():
    model = nn.ModuleDict({"a": Experts(4, 32, 16, dtype=torch.bfloat16), "b": Experts(4, 32, 16)})
    report = gemmery.nn.quantize(model, "int8", skip=("b",))
    assert report.replaced == [("a", "Experts")]
    assert report.left == [("b", "skipped by name ('b')")]
    assert model["a"].packed
    odd = nn.ModuleDict({"a": Experts(4, 32, 24)})
    assert gemmery.nn.quantize(odd, "int8").left == [
        ("a", "its gate has 24 rows; a packed gate must have a multiple of 16")
    ]


# --- flags


def config(**more):
    sizes = {
        "num_experts": 5, "n_routed_experts": 5, "moe_num_experts": 5, "num_local_experts": 5, "hidden_size": 32,
        "moe_intermediate_size": 16, "intermediate_size": 16, "moe_latent_size": None, "hidden_act": "silu",
        "mlp_hidden_act": "relu2", "moe_hidden_size": 32, "post_norm_eps": 1e-5, "swiglu_alpha": 1.702,
        "swiglu_limit": 7.0, "_experts_implementation": "eager",
    }  # fmt: skip
    return SimpleNamespace(**sizes | more)


def module_of(model, name, **more):
    found = getattr(__import__(f"transformers.models.{model}.modeling_{model}", fromlist=[name]), name)(
        config(**more)
    )
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in found.parameters():
            parameter.normal_()
    return found


OTHERS = {
    "without a gate": ("nemotron_h", "NemotronHExperts"),
    "transposed, one behind the other": ("aria", "AriaExperts"),
    "a norm behind": ("muse_spark", "MuseSparkExperts"),
    "a gate of its own": ("deepseek_v4", "DeepseekV4Experts"),
    "biases": ("openai_privacy_filter", "OpenAIPrivacyFilterExperts"),
}


@pytest.mark.parametrize("kind", OTHERS)
def test_flags(kind, fused):
    experts_ = module_of(*OTHERS[kind])
    holder = nn.ModuleDict({"experts": experts_})
    given = (torch.randn(9, 32), *choices(9))
    want = experts_(*given)
    experts_.config._experts_implementation = "gemmery"
    assert error(experts_(*given), want) < 1e-5
    experts_.config._experts_implementation = "eager"
    report = gemmery.nn.swap(holder, precision="torch")
    assert len(report) == 1
    assert error(holder["experts"](*given), want) < 1e-5
    assert fused == [True, True]
    report = gemmery.nn.quantize(holder, "int8")
    if kind == "a norm behind":
        assert report.left == [("experts", "it has a norm after its second product")]
    else:
        assert error(holder["experts"](*given), want) < 0.05


def own_gate(apply, **flags):
    """A module of experts, decorated as transformers' are, with a gate of its own."""
    from transformers.integrations.moe import use_experts_implementation

    class Own(nn.Module):
        def __init__(self, config):
            super().__init__()
            self.gate_up_proj = nn.Parameter(torch.randn(5, 32, 32))
            self.down_proj = nn.Parameter(torch.randn(5, 32, 16))
            self.act_fn, self.limit, self.bounds = nn.SiLU(), 1.5, {"limit": 1.5}
            self.scale = 2.0

        def forward(self, hidden_states, top_k_index, top_k_weights):
            raise NotImplementedError

        _apply_gate = apply

        def halves(self, x):
            return x.chunk(2, -1)

    made = use_experts_implementation(Own, **flags)(config(_experts_implementation="gemmery"))
    given = (torch.randn(9, 32), *choices(9))
    first, down = made.gate_up_proj, made.down_proj
    want = meaning(
        *(x.double() if x.is_floating_point() else x for x in given),
        first.double(),
        down.double(),
        made._apply_gate,
    )
    return made, given, want


def by_chunk(self, gate_up):
    gate, up = gate_up.chunk(2, dim=-1)
    return gate.clamp(max=self.limit) * up * self.scale


def by_steps(self, gate_up):
    return torch.tanh(gate_up[..., ::2]) * gate_up[..., 1::2]


def by_a_method(self, gate_up):
    gate, up = self.halves(gate_up)
    return gate * up


def by_a_dictionary(self, gate_up):
    gate, up = gate_up.chunk(2, dim=-1)
    return gate.clamp(max=self.bounds["limit"]) * up


def by_sorting(self, gate_up):
    gate, up = gate_up.chunk(2, dim=-1)
    return gate.sort(-1).values * up


GATES = {
    "halves": (by_chunk, {}, True),
    "alternating": (by_steps, {"is_concatenated": False}, True),
    "halves of what is said to alternate": (by_chunk, {"is_concatenated": False}, False),
    "alternating where it is said to be halves": (by_steps, {}, False),
    "a method of the module": (by_a_method, {}, False),
    "a value that may change": (by_a_dictionary, {}, False),
    "an operator that no kernel has": (by_sorting, {}, False),
}  # fmt: skip


@pytest.mark.parametrize("kind", GATES)
def test_gates_of_their_own(kind, fused):
    """Those that can't be part of a kernel are run by torch, and are as right."""
    apply, flags, can = GATES[kind]
    module, given, want = own_gate(apply, **flags)
    for _ in range(2):
        assert error(module(*given), want) < 1e-5
    assert fused == [can, can]
    model = nn.ModuleDict({"experts": module})
    report = gemmery.nn.swap(model, precision="torch")
    if not can:
        why = ("experts", "its _apply_gate can't be part of a product")
        assert report.left == gemmery.nn.quantize(model, "int8").left == [why]
        return
    assert report.replaced == [("experts", "Own")]
    assert error(model["experts"](*given), want) < 1e-5
    gemmery.nn.quantize(model, "int8")
    assert error(model["experts"](*given), want) < 0.05


def test_an_activation_that_no_kernel_has(fused):
    """Of transformers' own gate."""
    model = MODELS["qwen3"].make(hidden_act="mish", experts_implementation="eager")
    want = logits(model)
    model.set_experts_implementation("gemmery")
    assert error(logits(model), want) < 2e-6
    report = gemmery.nn.swap(model, precision="torch")
    assert dict(report.replaced)["model.layers.0.mlp.experts"] == "Qwen3MoeExperts (activation in torch)"
    assert error(logits(model), want) < 1e-5
    assert fused == [False] * 4
    left = dict(gemmery.nn.quantize(model, "int8").left)
    assert left["model.layers.0.mlp.experts"] == "its activation can't be part of a product"


def test_layers_share_a_gate():
    """So that it is traced once."""
    model = MODELS["gpt-oss"].make()
    one, two = experts_of(model)
    assert fusible(one) is fusible(two)
    two.limit = 3.0
    assert fusible(one) is not fusible(two)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("way", ["set", "swapped"])
def test_compiled_experts(name, way, fused):
    torch._dynamo.reset()
    model = MODELS[name].make(experts_implementation="gemmery")
    module = experts_of(model)[0]
    given = (torch.randn(9, 32), *choices(9, 4))
    want = module(*given)
    if way == "swapped":
        gemmery.nn.swap(model, precision="torch")
        module = experts_of(model)[0]
    del fused[:]
    got = torch.compile(module, fullgraph=True, backend="aot_eager")(*given)
    assert error(got, want) < 1e-6
    assert fused == [way == "swapped" or name != "gpt-oss"]


def test_sentinels_of_expert_parallelism():
    module = experts_of(MODELS["qwen3"].make(experts_implementation="gemmery"))[0]
    x, (index, weights) = torch.randn(9, 32), choices(9, 6)
    want = module(x, index, weights * (index < 4))
    for name in ("gate_up_proj", "down_proj"):
        setattr(module, name, nn.Parameter(getattr(module, name)[:4].detach()))
    index[index >= 4] = 4
    torch.testing.assert_close(module(x, index, weights), want)


def test_autocast():
    module = experts_of(MODELS["mixtral"].make(experts_implementation="gemmery"))[0]
    given = (torch.randn(9, 32), *choices(9, 4))
    want = module(*given)
    with torch.autocast("cpu", torch.bfloat16):
        got = module(*given)
    assert got.dtype == torch.float32
    assert 0 < error(got, want) < 0.03


# --- registering


@pytest.mark.slow
def test_importing_gemmery_leaves_transformers_alone():
    code = "import sys, gemmery.nn, gemmery.moe; sys.exit('transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_registering_without_transformers(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers.integrations.moe", None)
    with pytest.raises(ImportError, match="register_experts: it needs transformers 5 or later"):
        gemmery.nn.register_experts()
