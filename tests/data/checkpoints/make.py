"""Small weights as the libraries themselves store them, with what the libraries make of them again.

Each function needs its library, and returns tensors of one layer named "layer", the library's own dequantised weight as
"expected", and what else is needed to read them. As a script it writes them beside itself; AutoGPTQ's and AutoAWQ's
packing modules are loaded from unpacked releases in the folders that are given, for neither installs any more:

    python tests/data/checkpoints/make.py [auto_gptq's folder] [awq's folder]

Its formats of 2:4 sparse weights compressed-tensors writes in releases such as 0.9.4, which has other functions:

    python tests/data/checkpoints/make.py sparse
"""

import importlib.util
import json
import sys
import types
from importlib import metadata
from pathlib import Path

import torch
from torch import nn

ROWS, COLUMNS = 16, 128


def plain(dtype=torch.bfloat16, rows=ROWS, columns=COLUMNS):
    """Weights whose groups are not alike."""
    generator = torch.Generator().manual_seed(0)
    w = torch.randn(rows, columns, generator=generator) * torch.linspace(0.2, 2, columns)
    return (w * 0.05 + 0.01).to(dtype)


def of(tensors):
    return {f"layer.{name}": x.detach().clone().contiguous() for name, x in tensors.items()}


# --- bitsandbytes


def bnb_linear(double, dtype=torch.bfloat16):
    import bitsandbytes as bnb

    options = {"compress_statistics": double, "quant_type": "nf4", "compute_dtype": dtype}
    layer = bnb.nn.Linear4bit(COLUMNS, ROWS, bias=False, **options)
    layer.weight = bnb.nn.Params4bit(
        plain(dtype), requires_grad=False, compress_statistics=double, quant_type="nf4"
    )
    return layer.to("cpu")


def bnb(double):
    from bitsandbytes import functional

    layer = bnb_linear(double)
    if layer.weight.quant_state is None:
        layer.weight._quantize("cpu")
    expected = functional.dequantize_4bit(layer.weight.data, layer.weight.quant_state)
    return of(layer.state_dict()) | {"expected": expected}, {"library": "bitsandbytes"}


# --- compressed-tensors


def compressed(name, strategy="group", **options):
    """What compressor `name` makes of a weight quantised with these `QuantizationArgs`."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from compressed_tensors.quantization.utils import calculate_qparams
    from compressed_tensors.quantization.utils.helpers import generate_gparam

    args = QuantizationArgs(strategy=strategy, **options)
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    w = plain()
    rows, columns = w.shape
    high, wide = {
        "tensor": (rows, columns), "channel": (1, columns), "block": tuple(args.block_structure or ()),
    }.get(strategy, (1, args.group_size))  # fmt: skip
    blocks = w.view(rows // high, high, columns // wide, wide)
    state = {"weight": w}
    if strategy == "tensor_group":
        state["weight_global_scale"] = generate_gparam(w.min(), w.max())
    low, top = blocks.amin((1, 3)), blocks.amax((1, 3))
    if strategy == "tensor":
        low, top = low.flatten(), top.flatten()
    scale, zeros = calculate_qparams(low, top, args, global_scale=state.get("weight_global_scale"))
    state["weight_scale"] = scale
    if not args.symmetric:
        state["weight_zero_point"] = zeros
    compressor = BaseCompressor.get_value_from_registry(name)
    packed = compressor.compress(state, scheme)
    expected = compressor.decompress(packed, scheme)["weight"]
    config = {
        "quant_method": "compressed-tensors", "format": name,
        "config_groups": {"group_0": {"weights": json.loads(args.model_dump_json(exclude_none=True))}},
    }  # fmt: skip
    return of(packed) | {"expected": expected}, {"library": "compressed-tensors", "config": config}


def pruned(rows, columns, dtype):
    """A weight of which each four numbers of a row have two that are not 0."""
    groups = plain(dtype, rows, columns).view(rows, -1, 4)
    least = groups.abs().argsort(-1)[..., :2]
    return groups.scatter(-1, least, 0).view(rows, columns)


def sparse24():
    from compressed_tensors.compressors.sparse_compressors.sparse_24_bitmask import Sparse24BitMaskTensor

    w = pruned(ROWS, COLUMNS, torch.bfloat16)
    tensors = Sparse24BitMaskTensor.from_dense(w).dict("layer.weight")
    config = {
        "quant_method": "compressed-tensors",
        "sparsity_config": {"format": "sparse-24-bitmask", "sparsity_structure": "2:4"},
    }
    return tensors | {"expected": w}, {"library": "compressed-tensors", "config": config}


def marlin24(columns, **options):
    """The library has no way back from this format; what it quantised to is expected."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs
    from compressed_tensors.quantization.lifecycle.forward import quantize

    args = QuantizationArgs(**options)
    rows, groups = 64, columns // (args.group_size or columns)
    w = pruned(rows, columns, torch.float16)
    scale = (w.view(rows, groups, -1).abs().amax(-1) / (2 ** (args.num_bits - 1) - 1)).half()
    zeros = torch.zeros(rows, groups, dtype=torch.int8)
    state = {"layer.weight": w, "layer.weight_scale": scale, "layer.weight_zero_point": zeros}
    packed = BaseCompressor.load_from_registry("marlin-24").compress(state, {"layer": args})
    codes = quantize(w, scale, zeros, args).view(rows, groups, -1)
    expected = (codes.float() * scale.float().unsqueeze(-1)).view(rows, columns).half()
    config = {
        "quant_method": "compressed-tensors", "format": "marlin-24",
        "config_groups": {"group_0": {"weights": json.loads(args.model_dump_json(exclude_none=True))}},
    }  # fmt: skip
    return packed | {"expected": expected}, {"library": "compressed-tensors", "config": config}


# --- torchao


def torchao_weight(kind, dtype=torch.bfloat16):
    """A weight of one of torchao's classes."""
    from torchao.quantization import (
        Float8WeightOnlyConfig,
        Int8WeightOnlyConfig,
        IntxWeightOnlyConfig,
        PerGroup,
        quantize_,
    )

    config = {
        "int8": lambda: Int8WeightOnlyConfig(),
        "intx4": lambda: IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=PerGroup(32)),
        "intx8": lambda: IntxWeightOnlyConfig(weight_dtype=torch.int8),
        "float8": lambda: Float8WeightOnlyConfig(),
    }[kind]()
    model = nn.Sequential(nn.Linear(COLUMNS, ROWS, bias=False, dtype=dtype))
    model[0].weight = nn.Parameter(plain(dtype), requires_grad=False)
    quantize_(model, config)
    return model[0].weight


def torchao(kind):
    weight = torchao_weight(kind)
    expected = weight.dequantize()
    tensors = {name: getattr(weight, name, None) for name in ("qdata", "scale", "zero_point")}
    about = {"library": "torchao", "class": type(weight).__name__, "dtype": "bfloat16"}
    about["block_size"] = list(weight.block_size)
    if hasattr(weight, "target_dtype"):
        about["target_dtype"] = str(weight.target_dtype)
    return of({name: x for name, x in tensors.items() if x is not None}) | {"expected": expected}, about


# --- AutoGPTQ and AutoAWQ


def grouped(bits, size, g_idx=None):
    """A weight that `bits` bits hold exactly, with its scales and zero points, both (rows, groups)."""
    groups = COLUMNS // size
    generator = torch.Generator().manual_seed(2)
    codes = torch.randint(0, 1 << bits, (ROWS * 2, COLUMNS), generator=generator)
    zeros = torch.randint(1, 1 << bits, (ROWS * 2, groups), generator=generator)
    scales = (torch.rand(ROWS * 2, groups, generator=generator) + 0.5).half()
    g_idx = torch.arange(COLUMNS) // size if g_idx is None else g_idx
    return ((codes - zeros[:, g_idx]) * scales[:, g_idx].float()), scales, zeros


def gptq(folder, bits, act_order):
    path = Path(folder) / "auto_gptq/nn_modules/qlinear/qlinear_cuda.py"
    spec = importlib.util.spec_from_file_location("auto_gptq_qlinear_cuda", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    size = 32
    g_idx = torch.arange(COLUMNS) // size
    if act_order:
        g_idx = g_idx[torch.randperm(COLUMNS, generator=torch.Generator().manual_seed(1))]
    w, scales, zeros = grouped(bits, size, g_idx)
    layer = nn.Linear(COLUMNS, ROWS * 2, bias=False, dtype=torch.float16)
    # Rounded to the nearest code again by pack, in float32, in which the weight is exact.
    layer.weight.data = w
    packed = module.QuantLinear(bits, size, COLUMNS, ROWS * 2, bias=False)
    packed.pack(layer, scales.float(), zeros.float(), g_idx.int())
    packed.scales = scales.T.contiguous()
    expected = packed.float()(torch.eye(COLUMNS)).T.half()
    tensors = {name: getattr(packed, name) for name in ("qweight", "qzeros", "g_idx")}
    tensors["scales"] = scales.T
    config = {"quant_method": "gptq", "bits": bits, "group_size": size, "desc_act": act_order}
    return of(tensors) | {"expected": expected}, {"version": "auto-gptq 0.7.1", "config": config}


def awq(folder):
    for name in ("awq", "awq.utils", "awq.modules", "awq.modules.linear", "awq.modules.triton"):
        stub = types.ModuleType(name)
        stub.__path__ = [str(Path(folder) / name.replace(".", "/"))]
        sys.modules.setdefault(name, stub)
    stub = types.ModuleType("awq.utils.module")
    stub.try_import = lambda name: (None, "not here")
    sys.modules.setdefault("awq.utils.module", stub)
    stub = types.ModuleType("awq.utils.utils")
    stub.get_best_device = lambda: "cpu"
    sys.modules.setdefault("awq.utils.utils", stub)
    from awq.modules.linear.gemm import WQLinear_GEMM
    from awq.utils.packing_utils import dequantize_gemm

    w, scales, zeros = grouped(4, 32)
    layer = nn.Linear(COLUMNS, ROWS * 2, bias=False)
    layer.weight.data = w
    packed = WQLinear_GEMM.from_linear(layer, 4, 32, scales=scales.T.contiguous(), zeros=zeros.T.contiguous())
    expected = dequantize_gemm(packed.qweight, packed.qzeros, packed.scales, 4, 32).T
    tensors = {name: getattr(packed, name) for name in ("qweight", "qzeros", "scales")}
    config = {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm", "zero_point": True}
    return of(tensors) | {"expected": expected}, {"version": "autoawq 0.2.9", "config": config}


INT4 = {"num_bits": 4, "group_size": 32}
COMPRESSED = {
    "int4": ("pack-quantized", INT4),
    "int4-zeros": ("pack-quantized", {**INT4, "symmetric": False}),
    "int8-packed": ("pack-quantized", {"num_bits": 8, "strategy": "channel"}),
    "int8": ("int-quantized", {"num_bits": 8, "strategy": "channel"}),
    "int8-zeros": ("int-quantized", {"num_bits": 8, "strategy": "channel", "symmetric": False}),
    "fp8-tensor": ("float-quantized", {"num_bits": 8, "type": "float", "strategy": "tensor"}),
    "fp8-channel": ("float-quantized", {"num_bits": 8, "type": "float", "strategy": "channel"}),
    "fp8-block": ("float-quantized", {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [8, 64]}),
    "nvfp4": ("nvfp4-pack-quantized", {
        "num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16, "scale_dtype": torch.float8_e4m3fn,
    }),
    "mxfp4": ("mxfp4-pack-quantized", {"num_bits": 4, "type": "float", "group_size": 32, "scale_dtype": torch.uint8}),
}  # fmt: skip
SPARSE = {
    "compressed-sparse24": sparse24,
    "compressed-marlin24-int4": lambda: marlin24(384, num_bits=4, strategy="group", group_size=128),
    "compressed-marlin24-int8": lambda: marlin24(64, num_bits=8, strategy="channel"),
}
TORCHAO = ("int8", "intx4", "intx8", "float8")


def main(gptq_folder=None, awq_folder=None):
    from safetensors.torch import save_file

    if gptq_folder == "sparse":
        write(SPARSE, save_file)
        return
    cases = {"bnb-nf4": lambda: bnb(False), "bnb-nf4-double": lambda: bnb(True)}
    for name, (format, options) in COMPRESSED.items():
        cases[f"compressed-{name}"] = lambda format=format, options=options: compressed(format, **options)
    for kind in TORCHAO:
        cases[f"torchao-{kind}"] = lambda kind=kind: torchao(kind)
    if gptq_folder:
        for bits in (4, 8):
            for order in (False, True):
                name = f"gptq-int{bits}{'-order' if order else ''}"
                cases[name] = lambda bits=bits, order=order: gptq(gptq_folder, bits, order)
    if awq_folder:
        cases["awq-int4"] = lambda: awq(awq_folder)
    write(cases, save_file)


def write(cases, save_file):
    for name, make in cases.items():
        tensors, about = make()
        if "library" in about:
            about["version"] = f"{about['library']} {metadata.version(about.pop('library'))}"
        about = {"made by": about.pop("version"), "about": json.dumps(about)}
        tensors = {key: x.detach().contiguous() for key, x in tensors.items()}
        save_file(tensors, Path(__file__).with_name(f"{name}.safetensors"), metadata=about)
        print(name, about)


if __name__ == "__main__":
    main(*sys.argv[1:])
