"""The query, key and value projections of attention as one packed weight: products, state, adapters, and what is left."""

import ast
import copy
import importlib
import inspect
import os
import pickle
import textwrap

import pytest
import torch

os.environ["HF_HUB_OFFLINE"] = "1"
import gemmery.nn
from gemmery.nn import QuantizedLinear, packed, projections
from gemmery.nn.projections import CLASSES, PROJECTIONS, StackedLinear, StackedPart

transformers = pytest.importorskip("transformers", minversion="5")

SIZES = {
    "vocab_size": 50, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16,
}  # fmt: skip
IDS = torch.arange(8)[None]


def model_of(family="Qwen2", **sizes):
    """Of these, Qwen2's projections have biases."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**SIZES | sizes)
    model = getattr(transformers, f"{family}ForCausalLM")(config).bfloat16().eval()
    with torch.no_grad():
        for name, x in model.named_parameters():
            x.mul_(4 if x.dim() == 2 else 1)
            if name.endswith("_proj.bias"):
                x.add_(torch.randn_like(x) / 4)
    return model


def quantised(format="int4", **sizes):
    model = model_of(**sizes)
    gemmery.nn.quantize(model, format)
    return model


@pytest.fixture(scope="module")
def apart():
    return quantised()


@pytest.fixture
def joined(apart):
    model = copy.deepcopy(apart)
    model.report = gemmery.nn.swap(model)
    return model


@torch.no_grad()
def logits(model):
    return model(IDS).logits


def attention_of(model):
    return model.model.layers[0].self_attn


def near(found, expected, limit=0.03):
    assert (found - expected).float().norm() <= limit * expected.float().norm()


def test_three_projections_are_one_product(apart, joined, monkeypatch):
    attention, alone = attention_of(joined), attention_of(apart)
    assert ("model.layers.0.self_attn", "Qwen2Attention (q, k and v, int4)") in joined.report.replaced
    x, calls = torch.randn(2, 3, 64).bfloat16(), []
    linear = packed.linear
    monkeypatch.setattr(
        packed, "linear", lambda x, w, *a, **o: calls.append(w.shape) or linear(x, w, *a, **o)
    )
    found = [getattr(attention, name)(x) for name in PROJECTIONS]
    assert calls == [(128, 64)]
    assert attention.qkv_proj.kept is None
    for name, y in zip(PROJECTIONS, found, strict=True):
        part, layer = getattr(attention, name), getattr(alone, name)
        assert y.shape == (2, 3, layer.out_features)
        near(y, layer(x), 0.01)
        assert part.weight.dequantize().equal(layer.weight.dequantize())
        assert part.bias.equal(layer.bias)
        exact = torch.nn.functional.linear(
            x.double(), layer.weight.dequantize().double(), layer.bias.double()
        )
        near(y.double(), exact, 0.004)
    # Called alone, out of order, or with something else, each still computes its own.
    y = attention.k_proj(x)
    assert y.equal(found[1])
    near(attention.v_proj(2 * x), alone.v_proj(2 * x), 0.01)
    attention.q_proj(x)
    near(attention.k_proj(x + 1), alone.k_proj(x + 1), 0.01)
    # The tensor may be the same one and have other numbers.
    attention.q_proj(x)
    for name in ("k_proj", "q_proj", "q_proj", "v_proj"):
        x.mul_(-2)
        near(getattr(attention, name)(x), getattr(alone, name)(x), 0.01)
    with torch.inference_mode():
        x = torch.randn(2, 64).bfloat16()
        for name in PROJECTIONS:
            near(getattr(attention, name)(x), getattr(alone, name)(x), 0.01)


def test_a_product_is_not_reused_where_it_would_be_another(apart, joined):
    attention, alone = attention_of(joined), attention_of(apart)
    x = torch.randn(3, 64).bfloat16()
    expected = alone.k_proj(x).detach()
    # Whoever gets a part may change it.
    attention.q_proj(x)
    attention.k_proj(x).detach().zero_()
    near(attention.k_proj(x), expected, 0.01)
    # Recorded or not.
    x.requires_grad_()
    with torch.no_grad():
        attention.q_proj(x)
    y = attention.k_proj(x)
    y.sum().backward()
    assert x.grad is not None
    with torch.inference_mode():
        attention.q_proj(x)
    with torch.no_grad():
        assert not attention.k_proj(x).is_inference()
    # The bias has changed, or been moved.
    attention.q_proj(x)
    with torch.no_grad():
        attention.qkv_proj.bias.add_(1)
    assert (attention.k_proj(x) - y).min() > 0.5
    attention.q_proj(x)
    attention.to("cpu")
    assert attention.qkv_proj.kept is None


def test_parts_may_be_changed_in_place_while_gradients_are_recorded(apart, joined):
    grads = []
    for model in (copy.deepcopy(apart), joined):
        attention, x = attention_of(model), torch.ones(3, 64).bfloat16().requires_grad_()
        parts = [getattr(attention, name)(x) for name in PROJECTIONS]
        for i, part in enumerate(parts):
            part.mul_(i + 1)
        sum(part.float().square().sum() for part in parts).backward()
        grads.append(x.grad)
    near(*grads)


def test_state_dicts_are_those_of_the_layers(apart, joined):
    expected = logits(joined)
    state = joined.state_dict()
    assert state.keys() == apart.state_dict().keys()
    other = quantised("nf4")
    other.load_state_dict(state)
    assert logits(other).equal(logits(apart))
    # Another format comes with all three, or not at all.
    other = quantised("nf4")
    joined.load_state_dict(other.state_dict())
    gemmery.nn.swap(other)
    assert logits(joined).equal(logits(other))
    mixed = joined.state_dict() | {
        key: x for key, x in state.items() if key == "model.layers.0.self_attn.q_proj.weight"
    }
    with pytest.raises(
        RuntimeError, match="q_proj, k_proj, v_proj can't be one packed weight: weight 0 has format"
    ):
        joined.load_state_dict(mixed)
    assert logits(joined).equal(logits(other))
    joined.load_state_dict(state)
    assert logits(joined).equal(expected)
    # One layer by itself.
    attention = attention_of(joined)
    attention.q_proj.load_state_dict({"weight": state["model.layers.1.self_attn.q_proj.weight"],
                                      "bias": state["model.layers.1.self_attn.q_proj.bias"]})  # fmt: skip
    assert attention.q_proj.weight.dequantize().equal(
        joined.model.layers[1].self_attn.q_proj.weight.dequantize()
    )
    # What is given is moved to the layer's device.
    elsewhere = attention_of(copy.deepcopy(joined).to("meta"))
    elsewhere.q_proj.load_state_dict(attention.q_proj.state_dict())
    assert not elsewhere.qkv_proj.pending
    attention.q_proj.load_state_dict(other.model.layers[0].self_attn.q_proj.state_dict())
    with pytest.raises(RuntimeError, match="was given other formats for some of them"):
        logits(joined)


@pytest.mark.parametrize(("change", "words"), [
    (lambda x: x.pop("q_proj.bias"), r"Missing key.*q_proj\.bias"),
    (lambda x: x.update({"q_proj.other": torch.zeros(1)}), r"Unexpected key.*q_proj\.other"),
    (lambda x: x.update({"qkv_proj.weight": torch.zeros(1)}), r"Unexpected key.*qkv_proj\.weight"),
    (lambda x: x.update({"q_proj.bias": torch.zeros(3)}), r"q_proj\.bias is tensor"),
    (lambda x: x.update({"q_proj.bias": 3}), r"q_proj\.bias is 3"),
    (lambda x: x.update({"k_proj.weight": torch.zeros(32, 64)}), r"k_proj\.weight is tensor"),
])  # fmt: skip
def test_state_dicts_that_do_not_fit(change, words, joined):
    attention = attention_of(joined)
    state = dict(attention.state_dict())
    change(state)
    with pytest.raises(RuntimeError, match=words):
        attention.load_state_dict(state)


def test_copies_and_undo(apart, joined):
    expected = logits(joined)
    for other in (copy.deepcopy(joined), pickle.loads(pickle.dumps(joined))):
        assert logits(other).equal(expected)
        part = attention_of(other).k_proj
        assert part.whole is attention_of(other).qkv_proj
        assert part.whole is not attention_of(joined).qkv_proj
    again = gemmery.nn.swap(joined)
    assert not again.replaced
    with torch.no_grad():
        attention_of(joined).qkv_proj.bias.add_(1)
    bias = attention_of(joined).k_proj.bias
    joined.requires_grad_(False)
    attention_of(joined).k_proj.register_forward_hook(lambda *_: None)
    joined.report.undo()
    attention = attention_of(joined)
    assert not attention.k_proj.bias.requires_grad
    assert attention.k_proj._forward_hooks
    assert [type(x) for x in attention.children()] == [type(x) for x in attention_of(apart).children()]
    assert "qkv_proj" not in attention._modules
    assert attention.k_proj.bias.equal(bias)


def test_it_compiles_and_gradients_are_those_of_the_layers(apart, joined):
    compiled = torch.compile(joined, backend="aot_eager", fullgraph=True)
    near(logits(compiled), logits(joined), 0.01)
    found = []
    for model, names in ((apart, PROJECTIONS), (joined, ("qkv_proj",))):
        attention, x = attention_of(model), torch.randn(1, 4, 64, generator=torch.Generator().manual_seed(1))
        x = x.bfloat16().requires_grad_()
        sum(getattr(attention, name)(x).float().square().sum() for name in PROJECTIONS).backward()
        biases = [getattr(attention, name).bias.grad for name in names]
        found.append((x.grad, torch.cat(biases)))
    for one, other in zip(*found, strict=True):
        near(other, one)


def test_adapters_find_the_projections(apart, joined):
    peft = pytest.importorskip("peft")
    from gemmery.nn.peft import register

    found = []
    for model in (apart, joined):
        config = register(peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False))
        torch.manual_seed(1)
        made = peft.get_peft_model(copy.deepcopy(model), config)
        y = made(IDS).logits
        y.float().square().mean().backward()
        found.append((y.detach(), [x.grad for name, x in made.named_parameters() if "lora" in name], made))
        with made.disable_adapter():
            near(logits(made), logits(model))
    (y, grads, _), (other, others, made) = found
    assert len(grads) == len(others) == 8
    near(other, y)
    for one, two in zip(grads, others, strict=True):
        near(two, one, 0.1)
    assert isinstance(attention_of(made.base_model.model).q_proj.base_layer, StackedPart)


def test_an_adapter_of_all_rows_is_refused(joined):
    peft = pytest.importorskip("peft")
    from gemmery.nn.peft import register

    config = register(peft.LoraConfig(target_modules=r".*self_attn.*proj"))
    with pytest.raises(ValueError, match="rows of q_proj, k_proj, v_proj can't have an adapter"):
        peft.get_peft_model(joined, config)


def test_attention_by_itself():
    attention = attention_of(quantised())
    gemmery.nn.swap(attention)
    assert isinstance(attention.q_proj, StackedPart)


def test_projections_that_stay_apart():
    # Their rows are no multiple of 16.
    model = quantised(head_dim=12, num_attention_heads=5)
    report = dict(gemmery.nn.swap(model).left)
    assert report["model.layers.0.self_attn"] == (
        "its q_proj, k_proj and v_proj can't be one packed weight: weight 0 has 60 rows; all but the last one must have "
        "a multiple of 16"
    )
    model = quantised()
    attention_of(model).k_proj.register_forward_hook(lambda *_: None)
    report = dict(gemmery.nn.swap(model).left)
    assert report["model.layers.0.self_attn"] == "of its k_proj: it has hooks"
    assert type(attention_of(model).q_proj) is QuantizedLinear
    assert isinstance(model.model.layers[1].self_attn.q_proj, StackedPart)
    model = quantised()
    attention_of(model).k_proj.bias.requires_grad_(False)
    report = dict(gemmery.nn.swap(model).left)
    assert report["model.layers.0.self_attn"] == (
        "the biases of its q_proj, k_proj and v_proj differ in requires_grad"
    )
    model = quantised()
    gemmery.nn.swap(model, fuse=False)
    assert type(attention_of(model).q_proj) is QuantizedLinear
    # Only where all three are quantised.
    model = model_of()
    gemmery.nn.quantize(model, "int4", skip=("v_proj",))
    gemmery.nn.swap(model)
    assert not any(isinstance(x, StackedLinear) for x in model.modules())


def test_a_part_can_not_be_sharded(joined):
    from gemmery.distributed import styles

    with pytest.raises(ValueError, match="one packed weight with k_proj and v_proj, which can't be sharded"):
        styles._shard(attention_of(joined).q_proj, None, styles.COLUMN_WISE, 0)


def test_the_classes_that_are_known_call_their_projections_with_one_input():
    """Every class of these names in the release that is installed."""
    import transformers.models as models

    for name in CLASSES:
        package = {"Qwen2Moe": "qwen2_moe", "Qwen3Moe": "qwen3_moe"}.get(name.removesuffix("Attention"))
        package = package or name.removesuffix("Attention").lower()
        module = importlib.import_module(f"{models.__name__}.{package}.modeling_{package}")
        cls = getattr(module, name)
        body = ast.unparse(ast.parse(textwrap.dedent(inspect.getsource(cls.forward))))
        for each in PROJECTIONS:
            assert body.count(f"self.{each}") == 1, (name, each)
            assert f"self.{each}(hidden_states).view(hidden_shape)" in body, (name, each)
        assert body.count("hidden_states =") == 0, name
        made = cls.__new__(cls)
        torch.nn.Module.__init__(made)
        assert projections.projections_of(made) == dict.fromkeys(PROJECTIONS), name
