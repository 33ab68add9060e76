"""Linear layers with quantised weights: made, put in the place of plain ones, and of other libraries' layers."""

import copy
import importlib.util
import io
import json
import os
import pickle
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import gemmery.nn
from gemmery.formats import QuantizedTensor, load_safetensors, save_safetensors
from gemmery.nn import QuantizedLinear, packed
from gemmery.nn.blocks import PackedGatedMLP
from gemmery.nn.foreign import recognise

DATA = Path(__file__).resolve().parents[1] / "data" / "checkpoints"


def close(layer, x, weight, bias=None):
    """The product of 16-bit numbers in float32, rounded once."""
    expected = F.linear(x.to(weight.dtype).float(), weight.float(), None if bias is None else bias.float())
    torch.testing.assert_close(layer(x).float(), expected, rtol=2**-7, atol=1e-2)


@pytest.fixture
def weight():
    torch.manual_seed(0)
    return gemmery.quantize(torch.randn(32, 128).bfloat16(), "int4", group_size=32)


# --- the module


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("has_bias", [True, False])
def test_forward(weight, has_bias, dtype):
    bias = torch.randn(32).bfloat16() if has_bias else None
    layer = QuantizedLinear(weight, bias)
    x = torch.randn(2, 3, 128, dtype=dtype)
    assert layer(x).shape == (2, 3, 32)
    assert layer(x).dtype == dtype
    close(layer, x, weight.dequantize(), bias)


@pytest.mark.parametrize("format", ["int8", "int4", "e4m3", "e5m2", "mxfp4", "nvfp4", "nf4"])
def test_every_format(format):
    plain = nn.Linear(128, 32, dtype=torch.bfloat16)
    layer = QuantizedLinear.from_linear(plain, format)
    assert layer.bias is plain.bias
    close(layer, torch.randn(4, 128).bfloat16(), layer.quantized.dequantize(), plain.bias)


def test_parameters_and_gradients(weight):
    layer = QuantizedLinear(weight, nn.Parameter(torch.zeros(32, dtype=torch.bfloat16)))
    assert isinstance(layer.weight, QuantizedTensor)
    assert isinstance(layer.weight, nn.Parameter)
    assert [name for name, p in layer.named_parameters() if p.requires_grad] == ["bias"]
    x = torch.randn(4, 128, dtype=torch.bfloat16, requires_grad=True)
    layer(x).sum().backward()
    torch.testing.assert_close(x.grad, weight.dequantize().sum(0).expand(4, -1), rtol=2**-6, atol=0.1)
    assert layer.bias.grad.equal(torch.full((32,), 4, dtype=torch.bfloat16))


def test_errors_of_the_module(weight):
    with pytest.raises(
        TypeError,
        match=r"QuantizedLinear: weight is a Tensor; it must be a QuantizedTensor, see gemmery.quantize",
    ):
        QuantizedLinear(torch.ones(4, 4))
    with pytest.raises(ValueError, match=r"bias is \(31,\) and weight \(32, 128\); bias must be \(32,\)"):
        QuantizedLinear(weight, torch.ones(31))
    with pytest.raises(
        ValueError, match=r"weight is \(2, 16, 32\); it must be \(out_features, in_features\)"
    ):
        QuantizedLinear(gemmery.quantize(torch.ones(2, 16, 32), "mxfp4"))


def test_it_says_what_it_is(weight):
    text = "in_features=128, out_features=32, bias=True, format=int4, group_size=32, batch_invariant=True"
    assert repr(QuantizedLinear(weight, torch.ones(32), batch_invariant=True)) == f"QuantizedLinear({text})"


@pytest.mark.parametrize("way", ["deepcopy", "pickle", "torch.save", "safetensors"])
def test_copies_and_files(weight, way, tmp_path):
    if way == "safetensors":
        pytest.importorskip("safetensors")
    layer = QuantizedLinear(weight, torch.randn(32).bfloat16())
    if way == "deepcopy":
        other = copy.deepcopy(layer)
        assert other.weight.words.data_ptr() != layer.weight.words.data_ptr()
    elif way == "pickle":
        other = pickle.loads(pickle.dumps(layer))
    else:
        other = QuantizedLinear(
            gemmery.quantize(torch.zeros(32, 128).bfloat16(), "int4", group_size=32),
            torch.zeros(32).bfloat16(),
        )
        if way == "torch.save":
            file = io.BytesIO()
            torch.save(layer.state_dict(), file)
            file.seek(0)
            other.load_state_dict(torch.load(file))
        else:
            save_safetensors(tmp_path / "layer.safetensors", layer.state_dict())
            other.load_state_dict(load_safetensors(tmp_path / "layer.safetensors"))
    assert isinstance(other.weight, nn.Parameter)
    x = torch.randn(4, 128).bfloat16()
    assert other(x).equal(layer(x))


def test_loading_another_format_and_what_is_none(weight):
    layer = QuantizedLinear(weight)
    other = QuantizedLinear(gemmery.quantize(torch.randn(32, 128), "nf4"))
    layer.load_state_dict(other.state_dict())
    assert layer.quantized.format.name == "nf4"
    assert layer.quantized.dequantize().equal(other.quantized.dequantize())
    with pytest.raises(RuntimeError, match=r"Error.* in loading state_dict"):
        layer.load_state_dict({"weight": torch.ones(32, 128)})
    with pytest.raises(RuntimeError, match="size mismatch for weight"):
        layer.load_state_dict({"weight": gemmery.quantize(torch.ones(16, 128), "nf4")})


@pytest.mark.parametrize("format", ["int8", "int4", "e4m3", "e5m2", "mxfp4", "nvfp4", "nf4"])
def test_loading_into_a_model_on_meta(format, tmp_path):
    pytest.importorskip("safetensors")

    def build():
        return nn.Sequential(nn.Linear(128, 64), nn.LayerNorm(64), nn.Linear(64, 128)).bfloat16()

    torch.manual_seed(0)
    model = build()
    gemmery.nn.quantize(model, format)
    save_safetensors(tmp_path / "model.safetensors", model.state_dict())
    with torch.device("meta"):
        other = build()
        report = gemmery.nn.quantize(other, format)
    assert len(report.replaced) == 2
    assert {p.device.type for p in other.parameters()} == {"meta"}
    loaded = load_safetensors(tmp_path / "model.safetensors")
    other.load_state_dict(loaded, assign=True)
    assert other[0].weight.words.data_ptr() == loaded["0.weight"].words.data_ptr()
    assert [p.requires_grad for p in other.parameters()] == [p.requires_grad for p in model.parameters()]
    x = torch.randn(4, 128).bfloat16()
    assert torch.equal(other(x), model(x))


def test_moving(weight):
    model = nn.Sequential(QuantizedLinear(weight, torch.randn(32).bfloat16()))
    model.to(torch.float16).to("cpu")
    assert model[0].weight.dtype == model[0].bias.dtype == torch.float16
    assert isinstance(model[0].weight, nn.Parameter)
    assert model[0].weight.dequantize().equal(weight.to(torch.float16).dequantize())
    close(model[0], torch.randn(4, 128).half(), model[0].weight.dequantize(), model[0].bias)
    model.to("meta")
    assert model[0].weight.device.type == "meta"


# --- quantising a model


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(50, 64)
        self.up = nn.Linear(64, 128)
        self.down = gemmery.nn.Linear(128, 64, bias=False)
        self.same = self.up
        self.tied = nn.Linear(64, 128)
        self.tied.weight = self.up.weight
        self.gate = nn.Linear(64, 4)
        self.lm_head = nn.Linear(64, 50, bias=False)
        self.lm_head.weight = self.embed.weight

    def forward(self, ids):
        x = self.embed(ids)
        x = x + self.down(self.up(x) + self.tied(x))
        return self.lm_head(x * self.gate(x).mean(-1, keepdim=True))


def test_inputs_of_no_floating_type_are_refused():
    layer = QuantizedLinear(gemmery.quantize(torch.randn(16, 64).bfloat16(), "int8"))
    for dtype in (torch.int32, torch.bool):
        with pytest.raises(TypeError, match=f"the input is {dtype}; it must be a floating-point type"):
            layer(torch.ones(2, 64, dtype=dtype))


def test_only_linear_layers_are_taken():
    with pytest.raises(
        TypeError, match=r"QuantizedLinear\.from_linear: layer is a Conv2d; it must be a torch\.nn\.Lin"
    ):
        QuantizedLinear.from_linear(nn.Conv2d(16, 16, 1), "int8")


def test_what_is_to_be_skipped_and_is_not_there():
    report = gemmery.nn.quantize(Model().bfloat16(), "int8", skip=("gate", "lm_haed", "nothing.*"))
    assert [x for x in report.left if x[0] in ("lm_haed", "nothing.*")] == [
        ("lm_haed", "named in skip, but no linear layer has this name"),
        ("nothing.*", "named in skip, but no linear layer has this name"),
    ]


def test_quantize_and_undo():
    model = Model().bfloat16().eval()
    ids = torch.arange(5)[None]
    before, up = model(ids), model.up
    report = gemmery.nn.quantize(model, "int8", skip=("gate",))
    assert report.replaced == [("up", "Linear"), ("down", "Linear"), ("tied", "Linear")]
    assert report.left == [
        ("gate", "skipped by name ('gate')"),
        ("lm_head", "its weight is shared with embed"),
    ]
    assert model.up is model.same
    assert model.tied.weight is model.up.weight
    assert not model.up.training
    torch.testing.assert_close(model(ids), before, rtol=0.05, atol=0.05)
    report.undo()
    assert model.up is up
    assert model(ids).equal(before)


def test_defaults_and_patterns():
    model = nn.ModuleDict(
        {"a": nn.Linear(128, 16), "vision": nn.Sequential(nn.Linear(128, 16)), "lm_head": nn.Linear(128, 16)}
    )
    assert [name for name, _ in gemmery.nn.quantize(copy.deepcopy(model)).replaced] == ["a", "vision.0"]
    report = gemmery.nn.quantize(
        model, "int4", group_size=64, symmetric=False, skip=("vis*", "lm_head"), dtype=torch.float16
    )
    assert [name for name, _ in report.left] == ["vision.0", "lm_head"]
    assert (model["a"].quantized.group_size, model["a"].weight.dtype) == (64, torch.float16)
    assert model["a"].quantized.zeros is not None


def test_what_quantize_leaves():
    class Special(nn.Linear):
        pass

    model = nn.ModuleDict({name: nn.Linear(64, 16) for name in ("hooked", "nan", "parametrised")})
    model.update({"special": Special(64, 16), "attention": nn.MultiheadAttention(64, 4)})
    model["hooked"].register_forward_hook(lambda *args: None)
    model["nan"].weight.data[0, 0] = float("nan")
    nn.utils.parametrizations.weight_norm(model["parametrised"])
    model["done"] = QuantizedLinear(gemmery.quantize(torch.randn(16, 64), "nf4"))
    reasons = dict(gemmery.nn.quantize(model, "int8").left)
    assert reasons["hooked"] == "it has hooks"
    assert "NaN or infinity" in reasons["nan"]
    assert reasons["parametrised"] == "it is parametrized"
    assert "Special, not torch's own Linear" in reasons["special"]
    assert "NonDynamicallyQuantizableLinear" in reasons["attention.out_proj"]
    assert reasons["done"] == "it is quantized already"
    assert len(reasons) == 6
    assert gemmery.nn.quantize(nn.Linear(64, 16)).left == [
        ("", "it is not inside a module, so it can't be replaced; wrap it, as in torch.nn.Sequential(model)")
    ]


def test_errors_of_quantize():
    model = Model()
    with pytest.raises(TypeError, match="model is a Tensor; it must be a"):
        gemmery.nn.quantize(torch.ones(1))
    with pytest.raises(
        TypeError,
        match=r"skip is the string 'lm_head'; it must be a sequence of names, such as \('lm_head',\)",
    ):
        gemmery.nn.quantize(model, skip="lm_head")
    with pytest.raises(ValueError, match="group_size is 48"):
        gemmery.nn.quantize(model, "int4", group_size=48)
    with pytest.raises(ValueError, match="format is 'int5'"):
        gemmery.nn.quantize(model, "int5")
    assert type(model.up) is nn.Linear


def test_quantize_inside_a_fused_block():
    os.environ["HF_HUB_OFFLINE"] = "1"
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=50, hidden_size=64, intermediate_size=128, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).bfloat16().eval()
    ids = torch.arange(8)[None]
    with torch.no_grad():
        before = model(ids).logits
        assert len(gemmery.nn.quantize(model, "int8")) == 7
        quantised = model(ids).logits
        gemmery.nn.swap(model, precision="torch")
        report = gemmery.nn.swap(model, precision="torch")
        assert sum(why == "already a gemmery module" for _, why in report.left) >= 7
        torch.testing.assert_close(model(ids).logits, quantised, rtol=0.05, atol=0.05)
    torch.testing.assert_close(quantised, before, rtol=0.1, atol=0.1)


GATED = {
    "llama": ("LlamaConfig", "LlamaForCausalLM", {}), "llama-bias": ("LlamaConfig", "LlamaForCausalLM", {"mlp_bias": True}),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM", {}), "gemma": ("GemmaConfig", "GemmaForCausalLM", {}),
}  # fmt: skip


def gated(name, **sizes):
    os.environ["HF_HUB_OFFLINE"] = "1"
    transformers = pytest.importorskip("transformers")
    config, cls, more = GATED[name]
    torch.manual_seed(0)
    config = getattr(transformers, config)(**{
        "vocab_size": 50, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 16, **more, **sizes,
    })  # fmt: skip
    model = getattr(transformers, cls)(config).bfloat16().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4 if parameter.dim() == 2 else 1)
            if parameter.dim() == 1 and name.endswith("bias"):
                parameter.add_(torch.randn_like(parameter) / 4)
    return model


@torch.no_grad()
def logits(model):
    return model(torch.arange(8)[None]).logits


def composed(model, format, order):
    """The reports of swap and quantize, called in an order."""
    steps = {"swap": gemmery.nn.swap, "quantize": lambda x: gemmery.nn.quantize(x, format)}
    return [steps[step](model) for step in order]


BOTH = (("swap", "quantize"), ("quantize", "swap"))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("format", ["int4", "e4m3", "mxfp4", "nf4", "nvfp4"])
@pytest.mark.parametrize("name", GATED)
def test_swap_and_quantize_compose(name, format, monkeypatch):
    model = gated(name)
    plain, names = logits(model), model.state_dict().keys()
    apart = copy.deepcopy(model)
    gemmery.nn.quantize(apart, format)
    found = []
    for order in BOTH:
        made = copy.deepcopy(model)
        reports = composed(made, format, order)
        mlp = made.model.layers[0].mlp
        assert type(mlp) is PackedGatedMLP
        assert [name for name, _ in mlp.named_children()] == ["gate_up_proj", "down_proj", "act_fn"]
        assert mlp.gate_up_proj.weight.shape == (192, 64)
        halves = [
            apart.model.layers[0].mlp.get_submodule(x).weight.dequantize() for x in ("gate_proj", "up_proj")
        ]
        assert mlp.gate_up_proj.weight.dequantize().equal(torch.cat(halves))
        # State dicts go both ways.
        assert made.state_dict().keys() == names
        other = copy.deepcopy(apart)
        other.load_state_dict(made.state_dict())
        assert logits(other).equal(logits(apart))
        found.append(logits(made))
        made.load_state_dict(apart.state_dict())
        assert logits(made).equal(found[-1])
        assert logits(pickle.loads(pickle.dumps(made))).equal(found[-1])
        again = gemmery.nn.swap(made)
        assert ("model.layers.0.mlp", "already a gemmery module") in again.left
        for report in reversed(reports):
            report.undo()
        assert type(made.model.layers[0].mlp) is type(model.model.layers[0].mlp)
        assert logits(made).equal(plain)
    assert found[0].equal(found[1])
    scale = plain.float().abs().max()
    assert (found[0].float() - logits(apart).float()).abs().max() <= 0.03 * scale


def test_the_product_of_a_quantised_block_is_one(monkeypatch):
    calls = []
    whole = packed.linear
    monkeypatch.setattr(
        packed,
        "linear",
        lambda *args, **options: calls.append(options.get("epilogue")) or whole(*args, **options),
    )
    model = gated("llama")
    composed(model, "int4", BOTH[0])
    mlp, x = model.model.layers[0].mlp, torch.randn(1, 5, 64).bfloat16()
    expected = mlp(x)
    assert [epilogue is not None for epilogue in calls] == [True, False]
    # A hook runs, and sees both halves.
    seen = []
    hook = mlp.gate_up_proj.register_forward_hook(lambda module, args, output: seen.append(output.shape))
    torch.testing.assert_close(mlp(x), expected, rtol=0.05, atol=0.05)
    assert seen == [(1, 5, 192)]
    hook.remove()
    assert mlp(x[0, 0]).shape == (64,)


@pytest.mark.parametrize("order", BOTH)
def test_halves_that_can_not_be_one_weight_stay_apart(order):
    model = gated("llama", intermediate_size=104)
    before = logits(model)
    reports = composed(model, "int8", order)
    mlp = model.model.layers[0].mlp
    assert type(mlp.gate_proj) is QuantizedLinear
    if order[1] == "swap":
        assert dict(reports[1].left)["model.layers.0.mlp"] == (
            "its gate_proj and up_proj can't be one packed weight: weight 0 has 104 rows; all but the last one must have a "
            "multiple of 16"
        )
    torch.testing.assert_close(logits(model), before, rtol=0.1, atol=0.1)


@pytest.mark.parametrize("order", BOTH)
def test_undo_of_a_quantised_block_keeps_what_was_learned(order):
    model = gated("llama-bias")
    reports = composed(model, "int8", order)
    bias = model.model.layers[0].mlp.gate_up_proj.bias
    assert bias.requires_grad
    with torch.no_grad():
        bias.copy_(torch.arange(192))
    model.eval().model.layers[0].mlp.train()
    if order[0] == "swap":
        with pytest.raises(ValueError, match="not what swap put there"):
            reports[0].undo()
    reports[1].undo()
    mlp = model.model.layers[0].mlp
    assert mlp.up_proj.bias.equal(torch.arange(96, 192).bfloat16())
    assert mlp.training
    assert mlp.gate_proj.training


def test_a_quantised_block_says_what_it_can_not_load():
    model, other = gated("llama"), gated("llama")
    composed(model, "int8", BOTH[0])
    with pytest.raises(RuntimeError, match="the source is a Tensor and the weight QuantizedTensor"):
        model.load_state_dict(other.state_dict())
    gemmery.nn.quantize(other, "int8", skip=("up_proj", "lm_head"))
    with pytest.raises(RuntimeError, match=r"gate_proj.weight and .*up_proj.weight can't be one weight"):
        model.load_state_dict(other.state_dict())
    state = model.state_dict()
    del state["model.layers.0.mlp.up_proj.weight"]
    with pytest.raises(RuntimeError, match=r"Missing key\(s\).*gate_up_proj.weight"):
        model.load_state_dict(state)


def test_gemmerys_own_blocks_run_quantised_halves_as_one_product():
    x = torch.randn(3, 64).bfloat16()
    for hidden in (96, 40):
        block = gemmery.nn.GatedMLP(64, hidden, dtype=torch.bfloat16)
        gemmery.nn.quantize(block, "int8")
        gate, up = block.gate_up(x).chunk(2, dim=-1)
        expected = block.down(F.silu(gate.float()).mul(up.float()).bfloat16())
        torch.testing.assert_close(block(x), expected, rtol=0.03, atol=0.01)


# --- other libraries' layers


def stored(name):
    safe_open = pytest.importorskip("safetensors").safe_open
    with safe_open(DATA / f"{name}.safetensors", "pt") as file:
        about = json.loads(file.metadata()["about"])
        tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118  (it is no mapping)
    return {key.removeprefix("layer."): x for key, x in tensors.items()}, tensors["expected"], about


class QuantLinear(nn.Module):
    """As AutoGPTQ, GPTQModel and AutoAWQ have it."""

    def __init__(self, tensors, **attributes):
        super().__init__()
        for name in ("qweight", "qzeros", "scales", "g_idx"):
            if name in tensors:
                self.register_buffer(name, tensors[name])
        for name, value in attributes.items():
            setattr(self, name, value)


def swapped(layer, expected, what):
    """Swaps one layer of a model and checks what it computes."""
    model = nn.Sequential(nn.ReLU(), layer).eval()
    bias = getattr(layer, "bias", None)
    report = gemmery.nn.swap(model, precision="torch")
    assert report.left == []
    assert report.replaced == [("1", what)]
    after = model[1]
    assert type(after) is QuantizedLinear
    assert not after.training
    rtol = 2**-7 if "nf4" in what else 0
    torch.testing.assert_close(after.quantized.dequantize().to(expected.dtype), expected, rtol=rtol, atol=0)
    close(after, torch.randn(4, expected.shape[1]).to(expected.dtype), after.quantized.dequantize(), bias)
    report.undo()
    assert model[1] is layer


def left(layer):
    """Why a swap leaves a layer."""
    model = nn.Sequential(layer)
    ((_, reason),) = gemmery.nn.swap(model, precision="torch").left
    assert model[0] is layer
    return reason


@pytest.mark.parametrize("name", ["gptq-int4", "gptq-int4-order", "gptq-int8", "gptq-int8-order", "awq-int4"])
def test_swap_of_gptq_and_awq(name):
    tensors, expected, _ = stored(name)
    N, K = expected.shape
    what = f"QuantLinear ({name.split('-')[1]})"
    bias = torch.randn(N).half()
    swapped(
        QuantLinear(tensors, infeatures=K, outfeatures=N, bits=4, group_size=32, bias=bias), expected, what
    )
    swapped(QuantLinear(tensors, in_features=K, out_features=N, bias=None), expected, what)


def test_swap_of_gptq_whose_zero_points_were_converted():
    tensors, expected, _ = stored("gptq-int4")
    later = tensors | {
        "qzeros": (tensors["qzeros"].view(torch.uint8).int() + 0x11).to(torch.uint8).view(torch.int32)
    }
    if not any(
        (x & 15) == 15 or x >> 4 == 15 for x in tensors["qzeros"].view(torch.uint8).flatten().tolist()
    ):
        swapped(QuantLinear(later, qzero_format=lambda: 2), expected, "QuantLinear (int4)")
    else:
        pytest.fail("the file has zero points that carry; make it anew")


def test_gptq_layers_that_are_left():
    tensors, expected, _ = stored("gptq-int4")
    N, K = expected.shape
    assert "(16, 128), and those of the weight (32, 128)" in left(
        QuantLinear(tensors, infeatures=K, outfeatures=N // 2)
    )
    assert "stores the weight in a backend-specific order" in left(QuantLinear(tensors, q_handle=1))
    assert "the kernel of MarlinQuantLinear stores" in left(
        type("MarlinQuantLinear", (QuantLinear,), {})(tensors)
    )
    assert "with an adapter" in left(QuantLinear(tensors, adapter=object()))
    reason = left(QuantLinear(tensors | {"qweight": tensors["qweight"].view(4, -1)}))
    assert reason.startswith("it is GPTQ or AWQ's, and read_weight: the layer has qweight (4, 128)")
    layer = QuantLinear(tensors)
    layer.register_forward_hook(lambda *args: None)
    assert left(layer) == "it has hooks"


@pytest.mark.parametrize("double", [False, True])
def test_swap_of_bitsandbytes_in_a_fake_layer(double):
    tensors, expected, _ = stored("bnb-nf4-double" if double else "bnb-nf4")
    rest = json.loads(bytes(tensors["weight.quant_state.bitsandbytes__nf4"].tolist()))
    state = SimpleNamespace(
        absmax=tensors["weight.absmax"], shape=torch.Size(rest["shape"]), blocksize=rest["blocksize"], quant_type="nf4",
        code=tensors["weight.quant_map"], dtype=torch.bfloat16, state2=None, offset=None,
    )  # fmt: skip
    if double:
        state.state2 = SimpleNamespace(
            absmax=tensors["weight.nested_absmax"],
            code=tensors["weight.nested_quant_map"],
            blocksize=rest["nested_blocksize"],
        )
        state.offset = torch.tensor(rest["nested_offset"])
    layer = type("Linear4bit", (nn.Linear,), {})(128, 16)
    layer.weight = nn.Parameter(tensors["weight"], requires_grad=False)
    layer.weight.quant_state, layer.weight.quant_type = state, "nf4"
    swapped(layer, expected, "Linear4bit (nf4)")
    layer.weight.quant_state = None
    assert "its weight is not quantized yet" in left(layer)


def test_swap_of_bitsandbytes_8_bits_in_a_fake_layer():
    layer = type("Linear8bitLt", (nn.Linear,), {})(64, 16, bias=False)
    codes = torch.randint(-127, 128, (16, 64), dtype=torch.int8)
    layer.weight = nn.Parameter(codes, requires_grad=False)
    layer.weight.SCB, layer.state = None, SimpleNamespace(SCB=torch.rand(16) + 1)
    swapped(layer, (codes * (layer.state.SCB / 127)[:, None]).half(), "Linear8bitLt (int8)")
    layer.state.SCB = None
    assert "its weight is not quantized yet" in left(layer)


COMPRESSED = {
    "int4": "int4", "int4-zeros": "int4", "int8-packed": "int8", "int8": "int8", "int8-zeros": "int8",
    "fp8-tensor": "e4m3", "fp8-channel": "e4m3", "fp8-block": "e4m3", "nvfp4": "nvfp4", "mxfp4": "mxfp4",
}  # fmt: skip


@pytest.mark.parametrize("name, format", COMPRESSED.items())
def test_swap_of_compressed_tensors_in_a_fake_layer(name, format):
    tensors, expected, about = stored(f"compressed-{name}")
    layer = nn.Linear(128, 16, dtype=torch.bfloat16)
    del layer.weight
    for key, x in tensors.items():
        if key != "expected":
            layer.register_parameter(key, nn.Parameter(x, requires_grad=False))
    weights = SimpleNamespace(**about["config"]["config_groups"]["group_0"]["weights"])
    layer.quantization_scheme = SimpleNamespace(weights=weights)
    layer.forward = lambda x: x  # the library replaces it by one that decompresses
    swapped(layer, expected, f"Linear ({format})")


def test_swap_of_fp8_blocks():
    layer = type("FP8Linear", (nn.Linear,), {})(192, 160, bias=False)
    layer.weight = nn.Parameter(torch.randn(160, 192).to(torch.float8_e4m3fn), requires_grad=False)
    scale = torch.rand(2, 2) + 0.5
    layer.weight_scale_inv, layer.block_size = nn.Parameter(scale), (128, 128)
    spread = scale.repeat_interleave(128, 0).repeat_interleave(128, 1)[:160, :192]
    swapped(layer, (layer.weight.float() * spread).bfloat16(), "FP8Linear (e4m3)")
    layer.weight_scale_inv, layer.block_size = nn.Parameter(torch.tensor(0.5)), None
    swapped(layer, (layer.weight.float() * 0.5).bfloat16(), "FP8Linear (e4m3)")
    layer.n_groups = 2
    assert "it multiplies 2 groups of its input separately" in left(layer)
    del layer.n_groups
    layer.weight = nn.Parameter(torch.ones(160, 192))
    assert "its weight is torch.float32; it must be in fp8" in left(layer)


def test_fp8_of_transformers_itself():
    os.environ["HF_HUB_OFFLINE"] = "1"
    module = pytest.importorskip("transformers.integrations.finegrained_fp8")
    layer = module.FP8Linear(256, 128, block_size=(128, 128))
    layer.weight.data = torch.randn(128, 256).to(torch.float8_e4m3fn)
    layer.weight_scale_inv.data = torch.tensor([[0.5, 3.0]])
    spread = layer.weight_scale_inv.detach().repeat_interleave(128, 1)
    swapped(layer, (layer.weight.float() * spread).bfloat16(), "FP8Linear (e4m3)")


def test_swap_of_modelopt_nvfp4():
    tensors, expected, _ = stored("compressed-nvfp4")
    layer = nn.Linear(128, 16, bias=False)
    layer.weight = nn.Parameter(tensors["weight_packed"], requires_grad=False)
    layer.register_buffer("weight_scale", tensors["weight_scale"])
    layer.register_buffer("weight_scale_2", tensors["weight_global_scale"].reciprocal())
    swapped(layer, expected, "Linear (nvfp4)")


def test_quantised_embeddings_are_no_linear_layers():
    embedding = nn.Embedding(16, 32)
    embedding.weight = nn.Parameter(embedding.weight.data.to(torch.float8_e4m3fn), requires_grad=False)
    embedding.weight_scale = nn.Parameter(torch.ones(1))
    model = nn.Sequential(embedding)
    report = gemmery.nn.swap(model, precision="torch")
    assert report.left == report.replaced == []
    assert model[0] is embedding


def test_a_plain_model_has_nothing_to_recognise():
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Conv1d(4, 4, 1), nn.Embedding(4, 4))
    assert all(recognise(module) is None for module in model.modules())


@pytest.fixture(scope="module")
def make():
    spec = importlib.util.spec_from_file_location("checkpoints_make", DATA / "make.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("double", [False, True])
def test_bitsandbytes_itself(make, double):
    pytest.importorskip("bitsandbytes")
    tensors, _ = make.bnb(double)
    swapped(make.bnb_linear(double), tensors["expected"], "Linear4bit (nf4)")


@pytest.mark.parametrize(
    "kind, format", [("int8", "int8"), ("intx4", "int4"), ("intx8", "int8"), ("float8", "e4m3")]
)
def test_torchao_itself(make, kind, format):
    pytest.importorskip("torchao")
    layer = nn.Linear(128, 16, bias=False)
    layer.weight = make.torchao_weight(kind)
    swapped(layer, layer.weight.dequantize(), f"Linear ({format})")


@pytest.mark.parametrize("name, format", COMPRESSED.items())
def test_compressed_tensors_itself(make, name, format):
    compression = pytest.importorskip("compressed_tensors.compressors")
    quantization = pytest.importorskip("compressed_tensors.quantization")
    tensors, about = make.compressed(make.COMPRESSED[name][0], **make.COMPRESSED[name][1])
    weights = quantization.QuantizationArgs(**about["config"]["config_groups"]["group_0"]["weights"])
    layer = nn.Linear(128, 16, bias=False, dtype=torch.bfloat16)
    scheme = quantization.QuantizationScheme(
        targets=["Linear"], weights=weights, format=make.COMPRESSED[name][0]
    )
    quantization.initialize_module_for_quantization(layer, scheme)
    state = {key.removeprefix("layer."): x for key, x in tensors.items() if key != "expected"}
    for key in ("weight", *layer._parameters):
        if key in layer._parameters and key != "bias":
            delattr(layer, key)
    for key, x in state.items():
        layer.register_parameter(key, nn.Parameter(x, requires_grad=False))
    assert compression is not None
    swapped(layer, tensors["expected"], f"Linear ({format})")


@pytest.mark.parametrize("format", ("int8", "e4m3"))
def test_loading_keeps_shared_weights_shared(format):
    def tied():
        a, b = nn.Linear(64, 32, bias=False), nn.Linear(64, 32, bias=False)
        b.weight = a.weight
        return nn.ModuleList([a, b])

    model, other = tied(), tied()
    gemmery.nn.quantize(model, "int8")
    gemmery.nn.quantize(other, format)
    kept = model[0].weight
    model.load_state_dict(other.state_dict())
    assert model[0].weight is model[1].weight is kept
    assert model[0].quantized.format.name == format
    assert torch.equal(model[1].quantized.dequantize(), other[0].quantized.dequantize())
