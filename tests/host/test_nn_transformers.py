"""Models of transformers that are quantised while they are loaded, saved, loaded again, and taken back."""

import copy
import importlib
import json
import logging
import os
import subprocess
import sys

import pytest
import torch

os.environ["HF_HUB_OFFLINE"] = "1"
import gemmery.nn
from gemmery.formats import QuantizedTensor
from gemmery.formats.files import texts_of_file
from gemmery.nn import Experts, QuantizedLinear
from gemmery.nn.blocks import FusedGatedMLP, PackedGatedMLP
from gemmery.nn.packed import PackedLinear

transformers = pytest.importorskip("transformers", minversion="5")
# It needs transformers, of which the line above makes sure.
GemmeryConfig = importlib.import_module("gemmery.nn.transformers").GemmeryConfig

TINY = {
    "vocab_size": 50, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 32, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip
MIXTURE = TINY | {
    "num_local_experts": 4,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
}
GPT2 = {
    "vocab_size": 50, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 32, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
MODELS = {
    "llama": ("LlamaConfig", "LlamaForCausalLM", TINY),
    "llama-bias": ("LlamaConfig", "LlamaForCausalLM", TINY | {"mlp_bias": True}),
    "llama-tied": ("LlamaConfig", "LlamaForCausalLM", TINY | {"tie_word_embeddings": True}),
    "qwen2": ("Qwen2Config", "Qwen2ForCausalLM", TINY),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM", TINY),
    "gemma": ("GemmaConfig", "GemmaForCausalLM", TINY),
    "gemma3": ("Gemma3TextConfig", "Gemma3ForCausalLM", TINY),
    "gpt2": ("GPT2Config", "GPT2LMHeadModel", GPT2),
    "mixtral": ("MixtralConfig", "MixtralForCausalLM", MIXTURE),
    "gpt-oss": ("GptOssConfig", "GptOssForCausalLM", MIXTURE),
}
#: Those with blocks that swap fuses.
GATED = ("llama", "llama-bias", "qwen2", "qwen3", "gemma", "gemma3")
FORMATS = ("int4", "nf4", "e4m3", "mxfp4")


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    """A function that gives a model's class and the folder with its plain checkpoint."""
    made = {}

    def find(name):
        config, model, sizes = MODELS[name]
        cls = getattr(transformers, model)
        if name not in made:
            torch.manual_seed(0)
            fresh = cls(getattr(transformers, config)(**sizes)).bfloat16()
            with torch.no_grad():
                for key, parameter in fresh.named_parameters():
                    if parameter.dim() > 1:
                        parameter.mul_(4)
                    elif key.endswith("_proj.bias"):
                        parameter.add_(torch.randn_like(parameter) / 4)
            made[name] = tmp_path_factory.mktemp(name)
            fresh.save_pretrained(made[name])
        return cls, made[name]

    return find


@torch.no_grad()
def logits(model):
    ids = torch.randint(3, 50, (2, 7), generator=torch.Generator().manual_seed(1))
    return model(ids, attention_mask=torch.ones_like(ids)).logits


def quantised(stored, name="llama", *arguments, **options):
    cls, folder = stored(name)
    return cls.from_pretrained(folder, quantization_config=GemmeryConfig(*arguments, **options))


def packed_names(model):
    return [name for name, x in model.named_parameters() if isinstance(x, QuantizedTensor)]


# --- loading and saving


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("name", ["llama", "gpt2", "mixtral"])
def test_saved_and_loaded_again_it_has_the_same_bits(name, format, stored, tmp_path):
    cls, folder = stored(name)
    by_hand = cls.from_pretrained(folder)
    report = gemmery.nn.quantize(by_hand, format)
    model = quantised(stored, name, format)
    assert packed_names(model) == packed_names(by_hand)
    assert [x.split(":")[0] for x in str(model.hf_quantizer.report).splitlines()] == [
        x.split(":")[0] for x in str(report).splitlines()
    ]
    assert logits(model).equal(logits(by_hand))
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    again, info = cls.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info.values())
    assert packed_names(again) == packed_names(model)
    assert logits(again).equal(logits(model))


@pytest.mark.parametrize("name", [x for x in MODELS if x not in ("llama", "gpt2", "mixtral")])
def test_other_models(name, stored, tmp_path):
    cls, folder = stored(name)
    by_hand = cls.from_pretrained(folder)
    gemmery.nn.quantize(by_hand, "int4", group_size=32)
    model = quantised(stored, name, "int4", group_size=32)
    assert packed_names(model) == packed_names(by_hand)
    assert logits(model).equal(logits(by_hand))
    model.save_pretrained(tmp_path)
    again = cls.from_pretrained(tmp_path)
    assert logits(again).equal(logits(model))
    if name == "llama-tied":
        assert again.lm_head.weight is again.model.embed_tokens.weight


@pytest.mark.parametrize("options", [
    {"format": "int8"}, {"format": "nvfp4"}, {"format": "e5m2", "scale": "tensor"}, {"format": "e4m3", "scale": "block"},
    {"format": "int4", "group_size": 16, "symmetric": False}, {"format": "int8", "dtype": torch.float16},
])  # fmt: skip
def test_options_come_back(options, stored, tmp_path):
    model = quantised(stored, "llama", **options)
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path)
    assert again.config.quantization_config == GemmeryConfig(**options)
    for (name, x), (_, y) in zip(model.named_parameters(), again.named_parameters(), strict=True):
        assert repr(x) == repr(y) if isinstance(x, QuantizedTensor) else x.equal(y), name
    assert logits(again).equal(logits(model))


def test_the_configuration_is_json(stored, tmp_path):
    quantised(
        stored, "llama", "int4", group_size=32, modules_to_not_convert=["lm_head", "q_proj"]
    ).save_pretrained(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    assert written["quant_method"] == "gemmery"
    assert (written["format"], written["group_size"], written["dtype"]) == ("int4", 32, None)
    assert GemmeryConfig.from_dict(written).modules_to_not_convert == ["lm_head", "q_proj"]
    assert transformers.AutoConfig.from_pretrained(tmp_path).quantization_config == written
    cls, folder = stored("llama")
    from_dict = cls.from_pretrained(folder, quantization_config=written)
    assert logits(from_dict).equal(logits(cls.from_pretrained(tmp_path)))


def test_layers_that_stay(stored, tmp_path):
    plain = quantised(stored, modules_to_not_convert=["up_proj", r"model.layers.1"])
    names = {name.split(".", 2)[2] for name in packed_names(plain) if name.startswith("model")}
    assert names == {f"0.self_attn.{x}_proj.weight" for x in "qkvo"} | {
        f"0.mlp.{x}_proj.weight" for x in ("gate", "down")
    }
    # As for other quantizers, a list takes the default's place.
    assert isinstance(plain.lm_head, QuantizedLinear)
    assert ("model.layers.0.mlp.up_proj", "skipped by name ('up_proj')") in plain.hf_quantizer.report.left
    plain.save_pretrained(tmp_path)
    assert packed_names(type(plain).from_pretrained(tmp_path)) == packed_names(plain)
    # Tied weights stay, whatever is named: packed, they would not be the embedding's.
    tied = quantised(stored, "llama-tied", modules_to_not_convert=[])
    assert type(tied.lm_head) is torch.nn.Linear
    assert tied.lm_head.weight is tied.model.embed_tokens.weight


def test_types(stored, tmp_path):
    cls, folder = stored("llama")
    config = GemmeryConfig("int8")
    half = cls.from_pretrained(folder, quantization_config=config, dtype=torch.float16)
    wide = cls.from_pretrained(folder, quantization_config=config, dtype=torch.float32)
    found = [
        (x.dtype, x.lm_head.weight.dtype, x.model.layers[0].mlp.up_proj.weight.dtype) for x in (half, wide)
    ]
    assert found == [(torch.float16,) * 3, (torch.float32, torch.float32, torch.bfloat16)]
    half.save_pretrained(tmp_path)
    assert cls.from_pretrained(tmp_path).model.layers[0].mlp.up_proj.weight.dtype == torch.float16
    other = cls.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert other.model.layers[0].mlp.up_proj.weight.dtype == torch.bfloat16
    assert logits(wide).dtype == torch.float32


def test_a_part_of_the_model_and_a_head_of_its_own(stored, tmp_path):
    model = quantised(stored)
    model.save_pretrained(tmp_path)
    base = transformers.LlamaModel.from_pretrained(tmp_path)
    assert base.layers[0].mlp.up_proj.weight.words.equal(model.model.layers[0].mlp.up_proj.weight.words)
    # The checkpoint has no such head, so that it is initialised, and then quantised as asked.
    _, folder = stored("llama")
    config = GemmeryConfig("int8", modules_to_not_convert=[])
    fresh = transformers.LlamaForSequenceClassification.from_pretrained(folder, quantization_config=config)
    assert fresh.score.weight.dequantize().isfinite().all()
    assert fresh.score.weight.dequantize().float().std() > 0


def test_metadata_that_was_lost(stored, tmp_path):
    from safetensors.torch import load_file, save_file

    model = quantised(stored, "llama", "nf4")
    model.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    assert len(texts_of_file(file)) == 14
    save_file(load_file(file), file, metadata={"format": "pt"})
    assert logits(type(model).from_pretrained(tmp_path)).equal(logits(model))


def test_files_are_read_by_load_safetensors(stored, tmp_path):
    model = quantised(stored)
    model.save_pretrained(tmp_path)
    found = gemmery.formats.load_safetensors(tmp_path / "model.safetensors")
    assert found.keys() == model.state_dict().keys()
    other = quantised(stored, "llama", "int8")
    other.load_state_dict(found)
    assert logits(other).equal(logits(model))


_LOAD = """
import re, sys, threading, time
import torch, transformers
from gemmery.nn.transformers import GemmeryConfig

def anonymous():
    return int(re.search(r"RssAnon:\\s+(\\d+)", open("/proc/self/status").read())[1]) * 1024

folder, format = sys.argv[1:]
GemmeryConfig(format).pack(torch.randn(64, 64))
cls, peak, done = transformers.LlamaForCausalLM, 0, False
def watch():
    global peak
    while not done:
        peak = max(peak, anonymous())
        time.sleep(0.0005)
thread = threading.Thread(target=watch)
begun = anonymous()
thread.start()
model = cls.from_pretrained(folder, quantization_config=GemmeryConfig(format) if format != "none" else None)
done = True
thread.join()
print((peak - begun) / sum(x.nbytes for x in model.parameters()))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "format", [x if x == "e4m3" else pytest.param(x, marks=pytest.mark.exhaustive) for x in FORMATS]
)
def test_loading_takes_little_more_memory_than_the_packed_model(format, tmp_path_factory, request):
    """Memory that the process owns: pages of the mapped files are the system's, which it takes back when it needs them."""
    folder = tmp_path_factory.getbasetemp() / "many-layers"
    if not folder.exists():
        config = transformers.LlamaConfig(
            vocab_size=1000, hidden_size=1024, intermediate_size=2816, num_hidden_layers=8, num_attention_heads=16,
            num_key_value_heads=8,
        )  # fmt: skip
        with torch.device("meta"):
            model = transformers.LlamaForCausalLM(config).bfloat16()
        model = model.to_empty(device="cpu")
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.normal_(std=0.02)
        model.save_pretrained(folder, max_shard_size="50MB")
    done = subprocess.run(
        [sys.executable, "-c", _LOAD, str(folder), format],
        capture_output=True,
        text=True,
        check=True,
        timeout=600,
    )
    assert float(done.stdout.split()[-1]) <= 1.2


@pytest.mark.slow
def test_importing_gemmery_does_not_import_transformers():
    code = "import gemmery, gemmery.nn, sys; assert 'transformers' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


# --- what else is expected of such a model


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", GATED)
@pytest.mark.parametrize("format", FORMATS)
def test_a_swapped_model_has_fused_blocks(name, format, stored, tmp_path):
    model = quantised(stored, name, format)
    plain = quantised(stored, name, format).dequantize()
    apart, names = logits(model), set(model.state_dict())
    gemmery.nn.swap(model)
    mlp = model.model.layers[0].mlp
    assert isinstance(mlp, PackedGatedMLP)
    assert mlp.gate_up_proj.weight.shape == (192, 64)
    assert model.model.layers[0].self_attn.qkv_proj.weight.shape == (128, 64)
    assert set(model.state_dict()) == names
    for expected in (apart, logits(plain)):
        scale = expected.float().abs().max()
        assert (logits(model).float() - expected.float()).abs().max() <= 0.03 * scale
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path)
    assert logits(again).equal(apart)
    gemmery.nn.swap(again)
    assert logits(again).equal(logits(model))


@pytest.mark.parametrize("swapped", [False, True])
@pytest.mark.parametrize("name", ["llama-bias", "qwen2", "gpt2", "mixtral", "gpt-oss"])
def test_the_way_back(name, swapped, stored, tmp_path):
    cls, folder = stored(name)
    plain = cls.from_pretrained(folder)
    model = quantised(stored, name, "int8", group_size=32)
    want = {name: x.dequantize() for name, x in model.named_parameters() if isinstance(x, QuantizedTensor)}
    if swapped:
        gemmery.nn.swap(model)
    with pytest.raises(TypeError, match=r"dtype is torch\.int8; it must be a floating type"):
        model.dequantize(torch.int8)
    model.save_pretrained(tmp_path)
    assert model.dequantize() is model
    assert not hasattr(model.config, "quantization_config")
    found = model.state_dict()
    assert found.keys() == plain.state_dict().keys()
    for key, x in plain.state_dict().items():
        assert x.shape == found[key].shape, key
        torch.testing.assert_close(found[key], x, rtol=0.02, atol=0.02 * x.abs().max().item())
        if key in want and want[key].dim() == 2:
            assert found[key].equal(want[key].t() if name == "gpt2" else want[key])
    kinds = (PackedLinear, PackedGatedMLP, Experts)
    assert not any(isinstance(x, kinds) for x in model.modules())
    if not swapped:
        assert [type(x) for x in model.modules()] == [type(x) for x in plain.modules()]
    model.save_pretrained(tmp_path)
    assert cls.from_pretrained(tmp_path).state_dict().keys() == found.keys()


def test_gradients_reach_what_is_trained(stored):
    model = quantised(stored, "llama-bias")
    assert model.hf_quantizer.is_trainable
    assert not model.hf_quantizer.is_qat_trainable
    ids = torch.arange(3, 11)[None]
    model(ids, labels=ids).loss.backward()
    missing = [name for name, x in model.named_parameters() if x.requires_grad and x.grad is None]
    assert not missing
    assert all(not x.requires_grad for x in model.parameters() if isinstance(x, QuantizedTensor))
    assert model.model.layers[0].mlp.up_proj.bias.grad.abs().max() > 0


@pytest.mark.slow
def test_it_compiles_generates_and_is_copied(stored):
    model = quantised(stored)
    assert model.hf_quantizer.is_compileable
    expected = logits(model)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(logits(compiled), expected, rtol=2e-2, atol=2e-2)
    ids = torch.arange(3, 8)[None]
    made = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=4, do_sample=False)
    assert made.shape == (1, 9)
    assert logits(copy.deepcopy(model)).equal(expected)


def test_sizes_that_transformers_plans_with(stored):
    model = quantised(stored, "llama", "int4", group_size=64)
    quantizer, weight = model.hf_quantizer, model.model.layers[0].mlp.up_proj.weight
    bytes_of = quantizer.param_element_size
    assert bytes_of(model, "model.layers.0.mlp.up_proj.weight", weight) == weight.nbytes / weight.numel()
    assert bytes_of(model, "lm_head.weight", model.lm_head.weight) == 2


# --- errors


@pytest.mark.parametrize(("arguments", "error", "words"), [
    ({"format": "int3"}, ValueError, "GemmeryConfig: format is 'int3'; it must be one of int8, int4"),
    ({"format": 4}, TypeError, "GemmeryConfig: format is a int"),
    ({"group_size": 48}, ValueError, "group_size is 48; with int4 it must be one of 0, 16"),
    ({"group_size": "64"}, TypeError, "group_size is '64'; it must be an int or None"),
    ({"format": "nf4", "symmetric": False}, ValueError, "symmetric=False is for int8 and int4"),
    ({"symmetric": 1}, TypeError, "symmetric is 1; it must be True or False"),
    ({"scale": "block"}, ValueError, "scale is 'block', which is for e4m3 and e5m2"),
    ({"dtype": "float32"}, ValueError, "dtype is 'float32'; it must be float16 or bfloat16"),
    ({"dtype": torch.int8}, ValueError, "dtype is 'int8'; it must be float16 or bfloat16"),
    ({"batch_invariant": 1}, TypeError, "batch_invariant is 1; it must be True or False"),
    ({"modules_to_not_convert": "lm_head"}, TypeError, "modules_to_not_convert is 'lm_head'; it must be a list"),
    ({"modules_to_not_convert": [3]}, TypeError, "modules_to_not_convert has 3; it must have names"),
])  # fmt: skip
def test_errors_of_the_configuration(arguments, error, words):
    with pytest.raises(error, match=words):
        GemmeryConfig(**arguments)
    with pytest.raises(error, match=words):
        GemmeryConfig.from_dict({"quant_method": "gemmery", **arguments})


def test_errors_of_stored_configurations():
    with pytest.raises(
        ValueError, match=r"there is no 'bits'; the configuration has batch_invariant, dtype, format"
    ):
        GemmeryConfig.from_dict({"quant_method": "gemmery", "bits": 4})
    with pytest.raises(ValueError, match="quant_method is 'gptq'; it must be 'gemmery'"):
        GemmeryConfig.from_dict({"quant_method": "gptq"})


def test_a_value_that_was_set_later_is_refused_before_any_work(stored):
    cls, folder = stored("llama")
    config = GemmeryConfig("int4")
    config.group_size = 48
    with pytest.raises(ValueError, match="group_size is 48"):
        cls.from_pretrained(folder, quantization_config=config)


@pytest.mark.parametrize(("device_map", "refused"), [
    ({"": "cpu"}, False), ({"": 0}, False), ({"a": 0, "b": 1}, False), ({"a": 0, "b": "cpu"}, True), ({"": "disk"}, True),
])  # fmt: skip
def test_offloading_is_refused(device_map, refused, stored):
    quantizer = quantised(stored).hf_quantizer
    if not refused:
        quantizer.validate_environment(device_map=device_map)
        return
    with pytest.raises(ValueError, match="packed weights are not offloaded"):
        quantizer.validate_environment(device_map=device_map)


def test_a_weight_that_no_format_holds_is_named(stored, tmp_path, caplog, monkeypatch):
    cls, folder = stored("llama")
    model = cls.from_pretrained(folder)
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[3, 5] = float("nan")
    model.save_pretrained(tmp_path)
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    with pytest.raises(RuntimeError, match="conversion of the weights"):
        cls.from_pretrained(tmp_path, quantization_config=GemmeryConfig("int4"))
    assert "model.layers.1.mlp.up_proj can't be quantized: quantize: w has NaN or infinity" in caplog.text
    kept = cls.from_pretrained(
        tmp_path,
        quantization_config=GemmeryConfig(
            "int4", modules_to_not_convert=["model.layers.1.mlp.up_proj", "lm_head"]
        ),
    )
    assert len(packed_names(kept)) == 13


def test_a_weight_of_another_shape_is_transformers_to_tell(stored, tmp_path):
    cls, folder = stored("llama")
    _, other = stored("llama-bias")
    config = transformers.AutoConfig.from_pretrained(other)
    config.intermediate_size = 128
    with pytest.raises(RuntimeError, match="mismatch"):
        cls.from_pretrained(folder, config=config, quantization_config=GemmeryConfig("int4"))


def test_a_fused_block_that_is_not_quantised_is_no_packed_one(stored):
    cls, folder = stored("llama")
    model = cls.from_pretrained(folder)
    gemmery.nn.swap(model)
    gemmery.nn.quantize(model, "int8", skip=("up_proj", "lm_head"))
    assert isinstance(model.model.layers[0].mlp, FusedGatedMLP)
    assert isinstance(model.model.layers[0].mlp.gate_proj, QuantizedLinear)
