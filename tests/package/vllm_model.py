"""A Llama in vLLM with the quantization "gemmery", on the CPU, where vLLM's compiled parts need not be there.

    VLLM_TARGET_DEVICE=cpu python tests/package/vllm_model.py int4
    VLLM_TARGET_DEVICE=cpu python tests/package/vllm_model.py int4 --ranks 2
    VLLM_TARGET_DEVICE=cpu python tests/package/vllm_model.py compressed-int4

With the name of a format, vLLM creates, loads and processes the model. Each linear layer has to give the bits of gemmery.linear with the weight
quantized by gemmery. With "compressed-", the checkpoint is one of compressed-tensors, vLLM reads it, and each layer has
to be computed by gemmery's kernel. In both cases, the logits have to be those of transformers with such weights. What
is in vLLM's compiled parts runs in torch here: attention, and the vendor's product of the embeddings.
"""

import argparse
import json
import os
import tempfile
from pathlib import Path

os.environ["VLLM_PLUGINS"] = ""  # this script registers the plugin itself

import torch
from safetensors.torch import save_file
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
from vllm.platforms import current_platform

import gemmery.nn
from gemmery.nn import vllm as plugin
from gemmery.nn.vllm import kernels

HIDDEN, WIDTH, TOKENS, GROUP = 128, 256, 9, 32
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


def compressed(model, kind):
    """Gives the linear layers of a model the values of quantized weights.

    Returns:
        The tensors of a checkpoint of compressed-tensors, and its configuration.
    """
    tensors = {name: x for name, x in model.state_dict().items() if "_proj" not in name}
    for name, layer in model.named_modules():
        if not name.endswith("_proj"):
            continue
        weight = layer.weight.data.float()
        parts = weight.unflatten(1, (-1, GROUP if kind == "int4" else weight.shape[1]))
        scales = (parts.abs().amax(-1) / (7 if kind == "int4" else 448)).bfloat16()
        numbers = parts / scales.float()[..., None]
        if kind == "int4":
            numbers = numbers.round().clamp(-8, 7)
            codes = (numbers.flatten(1) + 8).to(torch.int64).unflatten(1, (-1, 8))
            words = (codes << torch.arange(0, 32, 4)).sum(-1)
            tensors[f"{name}.weight_packed"] = torch.where(words < 1 << 31, words, words - (1 << 32)).int()
            tensors[f"{name}.weight_shape"] = torch.tensor(weight.shape)
        else:
            numbers = numbers.to(torch.float8_e4m3fn)
            tensors[f"{name}.weight"] = numbers.flatten(1)
        tensors[f"{name}.weight_scale"] = scales
        layer.weight.data = (numbers.float() * scales.float()[..., None]).flatten(1).to(layer.weight.dtype)
    of_weight = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": GROUP}
    of_x = None
    if kind == "fp8":
        of_weight = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel"}
        of_x = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "token", "dynamic": True}
    group = {"targets": ["Linear"], "weights": of_weight, "input_activations": of_x}
    return tensors, {
        "quant_method": "compressed-tensors", "config_groups": {"group_0": group}, "ignore": ["lm_head"],
        "format": "pack-quantized" if kind == "int4" else "float-quantized", "quantization_status": "compressed",
    }  # fmt: skip


def write(model, kind, folder):
    """A checkpoint of compressed-tensors."""
    tensors, quantization = compressed(model, kind)
    save_file({name: x.contiguous() for name, x in tensors.items()}, Path(folder) / "model.safetensors")
    config = {
        **model.config.to_dict(),
        "architectures": ["LlamaForCausalLM"],
        "quantization_config": quantization,
    }
    (Path(folder) / "config.json").write_text(json.dumps(config))


def loaded(folder, rank, args, **how):
    """vLLM's model from a folder, or a rank's part of it, and its configuration."""
    config = EngineArgs(
        model=folder, skip_tokenizer_init=True, dtype="bfloat16", max_model_len=64, enforce_eager=True,
        tensor_parallel_size=args.ranks, **how,
    ).create_engine_config()  # fmt: skip
    with set_current_vllm_config(config):
        init_distributed_environment(args.ranks, rank, f"file://{folder}/ranks", rank, "gloo")
        initialize_model_parallel(args.ranks, 1)
        model = get_model_loader(config.load_config).load_model(config, config.model_config)
    for module in model.modules():
        if isinstance(module, CustomOp):
            module._forward_method = module.forward_native
    return model, config


def grouped(format):
    """Groups that a rank's part of a weight divides."""
    return {"group_size": GROUP} if format in ("int4", "nf4") else {}


def weight_of(layer, names, options):
    """What a layer of vLLM has to hold, from the modules of transformers."""
    dense = torch.cat([layer.get_submodule(name).weight.detach() for name in names])
    left = any(name.endswith(tuple(options.get("modules_to_not_convert", ()))) for name in names)
    return (
        dense
        if not options or left
        else gemmery.quantize(dense, options["format"], **grouped(options["format"]))
    )


def check_layers(original, model, options):
    """Each linear layer gives the bits of gemmery.linear."""
    for ours, theirs in zip(original.model.layers, model.model.layers, strict=True):
        for name, parts in PARTS.items():
            layer = theirs.get_submodule(name)
            x = torch.randn(5, WIDTH if name == "mlp.down_proj" else HIDDEN).bfloat16()
            assert torch.equal(layer(x)[0], gemmery.linear(x, weight_of(ours, parts, options))), name
            print(f"{name}: {type(layer.quant_method).__name__}, the same bits")


def check_kernels(model, wanted):
    """Each linear layer has one of gemmery's kernels."""
    for block in model.model.layers:
        for name in PARTS:
            scheme = block.get_submodule(name).scheme
            found = [x for x in vars(scheme).values() if isinstance(x, wanted)]
            assert len(found) == 1, (name, vars(scheme))
            print(f"{name}: {type(found[0]).__name__}")


def llama():
    """The same model in each process."""
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=256, hidden_size=HIDDEN, intermediate_size=WIDTH, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2,
        )
    ).bfloat16()  # fmt: skip


def quantized_by_gemmery(original, folder, rank, args):
    """The model in vLLM; transformers' gets the same weights."""
    plugin.register()
    options = {}
    if args.format != "dense":
        options = {"format": args.format, "modules_to_not_convert": args.left, **grouped(args.format)}
    how = {"quantization_config_dict_json": json.dumps(options)} if options else {}
    model, config = loaded(folder, rank, args, quantization="gemmery", hf_overrides=how)
    if args.ranks == 1:
        check_layers(original, model, options)
    if options:
        gemmery.nn.quantize(original, args.format, skip=("lm_head", *args.left), **grouped(args.format))
    return model, config


def of_compressed_tensors(folder, rank, args):
    """The model in vLLM, with gemmery's kernels."""
    kernels.PLATFORMS = (current_platform._enum,)
    os.environ[plugin.VARIABLE] = "int,fp8"
    plugin.register()
    model, config = loaded(folder, rank, args)
    check_kernels(model, (kernels.GemmeryIntKernel, kernels.GemmeryFp8Kernel))
    return model, config


@torch.no_grad()
def run(rank, folder, args):
    """What each rank does."""
    in_torch()
    original = llama()
    kind = args.format.removeprefix("compressed-")
    if kind != args.format:
        compressed(original, kind)
        model, config = of_compressed_tensors(folder, rank, args)
    else:
        model, config = quantized_by_gemmery(original, folder, rank, args)
    torch.manual_seed(1)
    ids = torch.randint(256, (TOKENS,))
    with set_current_vllm_config(config), set_forward_context(None, config):
        logits = model.compute_logits(model(ids, torch.arange(TOKENS)))
    if rank == 0:
        want = original(ids[None]).logits[0].float()
        difference = (logits.float() - want).norm() / want.norm()
        print(f"logits: relative difference {difference:.1e}")
        # Activations of fp8 have 4 bits.
        assert difference < (1e-1 if args.format == "compressed-fp8" else 1e-2)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    formats = ("dense", "int4", "e4m3", "nf4", "mxfp4", "compressed-int4", "compressed-fp8")
    parser.add_argument("format", choices=formats)
    parser.add_argument("--left", nargs="*", default=[], help="ends of names of layers that stay dense")
    parser.add_argument(
        "--ranks", type=int, default=1, choices=(1, 2), help="processes of tensor parallelism"
    )
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if args.format.startswith("compressed-"):
            write(llama(), args.format.removeprefix("compressed-"), folder)
        else:
            llama().save_pretrained(folder)
        if args.ranks == 1:
            run(0, folder, args)
        else:
            torch.multiprocessing.spawn(run, (folder, args), nprocs=args.ranks)


if __name__ == "__main__":
    main()
