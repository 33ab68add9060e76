"""A Llama in vLLM with the quantization "gemmery", on the CPU, where vLLM's compiled parts need not be there.

    VLLM_TARGET_DEVICE=cpu python tests/package/vllm_model.py int4

vLLM creates, loads and processes the model. Each linear layer has to give the bits of gemmery.linear with the weight
quantized by gemmery, and the logits have to be those of transformers with such weights. What is in vLLM's compiled
parts runs in torch here: attention, and the vendor's product of the embeddings.
"""

import argparse
import json
import os
import tempfile

os.environ["VLLM_PLUGINS"] = ""  # this script registers the plugin itself

import torch
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM
from vllm.config import set_current_vllm_config
from vllm.distributed import init_distributed_environment, initialize_model_parallel
from vllm.engine.arg_utils import EngineArgs
from vllm.forward_context import set_forward_context
from vllm.model_executor.custom_op import CustomOp
from vllm.model_executor.layers import utils, vocab_parallel_embedding
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.model_loader import get_model_loader

import gemmery.nn
from gemmery.nn import vllm as plugin

HIDDEN, WIDTH, TOKENS = 128, 256, 9
#: What vLLM makes one layer of.
PARTS = {
    "self_attn.qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "self_attn.o_proj": ("self_attn.o_proj",),
    "mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj"),
    "mlp.down_proj": ("mlp.down_proj",),
}


def in_torch():
    """Has torch do what is in vLLM's compiled parts."""

    def dispatch(layer, remove_weight):
        layer.cpu_linear = F.linear

    def attend(self, query, key, value, *args, **how):
        q, k, v = (x.view(len(x), -1, self.head_size).transpose(0, 1) for x in (query, key, value))
        y = F.scaled_dot_product_attention(q[None], k[None], v[None], is_causal=True, enable_gqa=True)
        return y[0].transpose(0, 1).flatten(1)

    utils.dispatch_cpu_unquantized_gemm = vocab_parallel_embedding.dispatch_cpu_unquantized_gemm = dispatch
    Attention.forward = attend
    if not torch.accelerator.is_available():
        torch.accelerator.empty_cache = lambda: None


def loaded(folder, options):
    """vLLM's model from a folder, and its configuration."""
    how = {"quantization_config_dict_json": json.dumps(options)} if options else {}
    config = EngineArgs(
        model=folder, quantization="gemmery", hf_overrides=how, skip_tokenizer_init=True, dtype="bfloat16",
        max_model_len=64, enforce_eager=True,
    ).create_engine_config()  # fmt: skip
    with set_current_vllm_config(config), tempfile.NamedTemporaryFile() as store:
        init_distributed_environment(1, 0, f"file://{store.name}.ranks", 0, "gloo")
        initialize_model_parallel(1, 1)
        model = get_model_loader(config.load_config).load_model(config, config.model_config)
    for module in model.modules():
        if isinstance(module, CustomOp):
            module._forward_method = module.forward_native
    return model, config


def weight_of(layer, names, options):
    """What a layer of vLLM has to hold, from the modules of transformers."""
    dense = torch.cat([layer.get_submodule(name).weight.detach() for name in names])
    left = any(name.endswith(tuple(options.get("modules_to_not_convert", ()))) for name in names)
    return dense if not options or left else gemmery.quantize(dense, options["format"])


@torch.no_grad()
def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("format", choices=("dense", "int4", "e4m3", "nf4", "mxfp4"))
    parser.add_argument("--left", nargs="*", default=[], help="ends of names of layers that stay dense")
    args = parser.parse_args()
    options = {} if args.format == "dense" else {"format": args.format, "modules_to_not_convert": args.left}
    torch.manual_seed(0)
    original = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=256, hidden_size=HIDDEN, intermediate_size=WIDTH, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2,
        )
    ).bfloat16()  # fmt: skip
    plugin.register()
    in_torch()
    with tempfile.TemporaryDirectory() as folder:
        original.save_pretrained(folder)
        model, config = loaded(folder, options)

    for ours, theirs in zip(original.model.layers, model.model.layers, strict=True):
        for name, parts in PARTS.items():
            layer = theirs.get_submodule(name)
            x = torch.randn(5, WIDTH if name == "mlp.down_proj" else HIDDEN).bfloat16()
            want = gemmery.linear(x, weight_of(ours, parts, options))
            assert torch.equal(layer(x)[0], want), name
            print(f"{name}: {type(layer.quant_method).__name__}, the same bits")

    if options:
        gemmery.nn.quantize(original, args.format, skip=("lm_head", *args.left))
    ids = torch.randint(256, (TOKENS,))
    with set_current_vllm_config(config), set_forward_context(None, config):
        logits = model.compute_logits(model(ids, torch.arange(TOKENS))).float()
    want = original(ids[None]).logits[0].float()
    difference = (logits - want).abs().max() / want.abs().max()
    print(f"logits: largest difference {difference:.1e} of the largest")
    assert difference < 2e-2


if __name__ == "__main__":
    main()
