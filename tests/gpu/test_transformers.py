"""Models of transformers that are quantised while they are loaded: bits, and generation in a CUDA graph."""

import importlib
import os

import pytest
import torch

os.environ["HF_HUB_OFFLINE"] = "1"
import gemmery.nn
from gemmery.formats import QuantizedTensor
from gemmery.nn.blocks import PackedGatedMLP
from gemmery.nn.projections import StackedLinear
from tests.gpu.common import DEVICE, DRY, needs_cuda

transformers = pytest.importorskip("transformers", minversion="5")
pytest.importorskip("accelerate", reason="transformers loads to a device with it")
GemmeryConfig = importlib.import_module("gemmery.nn.transformers").GemmeryConfig

pytestmark = pytest.mark.gpu

FORMATS = ("int4", "nf4", "e4m3", "mxfp4")
SIZES = {
    "vocab_size": 512, "hidden_size": 128 if DRY else 1024, "intermediate_size": 128 if DRY else 2816,
    "num_hidden_layers": 2 if DRY else 8, "num_attention_heads": 4 if DRY else 16, "num_key_value_heads": 2,
    "head_dim": 32 if DRY else 64, "max_position_embeddings": 64,
}  # fmt: skip
FAMILIES = {"Llama": "LlamaConfig", "Qwen3": "Qwen3Config", "Gemma": "GemmaConfig"}


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    """A function that gives a model's class and the folder with its plain checkpoint."""
    made = {}

    def find(family):
        cls = getattr(transformers, f"{family}ForCausalLM")
        if family not in made:
            made[family] = tmp_path_factory.mktemp(family)
            config = getattr(transformers, FAMILIES[family])(**SIZES)
            cls(config).bfloat16().save_pretrained(made[family], max_shard_size="50MB")
        return cls, made[family]

    return find


@torch.no_grad()
def logits(model):
    ids = torch.randint(3, 500, (2, 7), generator=torch.Generator().manual_seed(1)).to(DEVICE)
    return model(ids, attention_mask=torch.ones_like(ids)).logits


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("family", FAMILIES)
def test_saved_and_loaded_again_it_has_the_same_bits_and_fused_blocks(family, format, stored, tmp_path):
    cls, folder = stored(family)
    how = {"device_map": DEVICE, "dtype": torch.bfloat16}
    model = cls.from_pretrained(folder, quantization_config=GemmeryConfig(format), **how)
    apart = logits(model)
    model.save_pretrained(tmp_path, max_shard_size="20MB")
    again = cls.from_pretrained(tmp_path, **how)
    assert logits(again).equal(apart)
    plain = cls.from_pretrained(folder, **how)
    for name, x in model.named_parameters():
        if isinstance(x, QuantizedTensor):
            plain.get_parameter(name).data = x.dequantize()
    gemmery.nn.swap(again)
    blocks = [x for x in again.modules() if isinstance(x, PackedGatedMLP)]
    stacks = [x for x in again.modules() if isinstance(x, StackedLinear)]
    assert len(blocks) == len(stacks) == SIZES["num_hidden_layers"]
    wanted = logits(plain).double()
    for found in (apart, logits(again)):
        assert (found.double() - wanted).norm() <= 0.03 * wanted.norm()


@needs_cuda
@pytest.mark.parametrize("compiled", [False, True], ids=["no compiler", "torch.compile"])
def test_a_captured_step_generates_probable_tokens(compiled, stored):
    cls, folder = stored("Llama")
    how = {"device_map": DEVICE, "dtype": torch.bfloat16}
    model = cls.from_pretrained(folder, quantization_config=GemmeryConfig("int4"), **how).eval()
    gemmery.nn.swap(model)
    ids = torch.randint(3, 500, (2, 8), device=DEVICE)
    cache = transformers.StaticCache(config=model.config, max_cache_len=32)
    token = ids[:, -1:].clone()
    body = torch.compile(model, dynamic=False, fullgraph=True) if compiled else model

    def rewind():
        for layer in cache.layers:
            layer.cumulative_length.fill_(ids.shape[1] - 1)
        token.copy_(ids[:, -1:])

    def step():
        token.copy_(body(token, past_key_values=cache).logits[:, -1].argmax(-1, keepdim=True))

    with torch.no_grad():
        model(ids, past_key_values=cache)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                rewind()
                step()
        torch.cuda.current_stream().wait_stream(stream)
        rewind()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
    rewind()
    found = []
    for _ in range(12):
        graph.replay()
        found.append(token.clone())
    made = torch.cat([ids, *found], 1)
    with torch.no_grad():
        scores = model(made[:, :-1]).logits[:, ids.shape[1] - 1 :].float()
    chosen = scores.gather(-1, made[:, ids.shape[1] :, None]).squeeze(-1)
    # Rounding may decide between two tokens that are about as probable.
    assert (chosen >= scores.amax(-1) - 0.03 * scores.abs().amax(-1)).all()
