"""gemmery in vLLM: with vLLM's own classes where vLLM is installed, otherwise with a stub that has their signatures."""

import importlib
import inspect
import logging
import sys
import tomllib
from pathlib import Path

import pytest
import torch
from torch import nn

import gemmery
from tests import vllm_stub as stub

pytest.importorskip("transformers", minversion="5")

from tests.vllm_layers import (
    FP8,
    NAMES,
    REAL,
    GemmeryIntKernel,
    GemmeryQuantization,
    created,
    fp8_config,
    int_layer,
    loaded,
    packing,
    there,
)

with there():
    from vllm.model_executor.kernels import linear as lists
    from vllm.model_executor.kernels.linear.mixed_precision.MPLinearKernel import MPLinearLayerConfig
    from vllm.model_executor.layers.fused_moe import RoutedExperts, UnquantizedFusedMoEMethod
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod
    from vllm.model_executor.layers.quantization import get_quantization_config
    from vllm.platforms import PlatformEnum
    from vllm.scalar_type import scalar_types

    from gemmery.nn import vllm as plugin
    from gemmery.nn.vllm.kernels import OF_KIND, PLATFORMS, GemmeryFp8BlockKernel, GemmeryFp8Kernel
    from gemmery.nn.vllm.methods import GemmeryPackedLinearMethod


@pytest.fixture(autouse=True)
def engine(tmp_path):
    """What vLLM's layers need around them."""
    if not REAL:
        with there():
            yield
        return
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel

    with set_current_vllm_config(VllmConfig()):
        if not torch.distributed.is_initialized():
            init_distributed_environment(1, 0, f"file://{tmp_path}/store", 0, "gloo")
            initialize_model_parallel(1, 1)
        yield


# --- Registration -----------------------------------------------------------------------------------------------------


@pytest.fixture
def untouched():
    """vLLM's lists as they are without kernels of gemmery's."""

    def clean():
        for parts in OF_KIND.values():
            for _, name, kernel in parts:
                for platform in PLATFORMS:
                    known = getattr(lists, name)[platform]
                    known[:] = [x for x in known if x is not kernel]

    clean()
    yield
    clean()


def heads():
    return {
        kernel.__name__: [getattr(lists, name)[platform][0] is kernel for platform in PLATFORMS]
        for parts in OF_KIND.values()
        for _, name, kernel in parts
    }


def lengths():
    return [
        len(getattr(lists, name)[PlatformEnum.CUDA]) for parts in OF_KIND.values() for _, name, _ in parts
    ]


@pytest.mark.usefixtures("untouched")
def test_nothing_but_the_name_is_added_unless_asked_for(monkeypatch):
    monkeypatch.delenv(plugin.VARIABLE, raising=False)
    before = lengths()
    plugin.register()
    assert get_quantization_config("gemmery") is GemmeryQuantization
    assert lengths() == before
    assert set(map(tuple, heads().values())) == {(False, False)}


@pytest.mark.usefixtures("untouched")
def test_kernels_come_first_once(monkeypatch):
    monkeypatch.setenv(plugin.VARIABLE, "fp8")
    before = lengths()
    plugin.register()
    plugin.register()
    assert heads() == {
        "GemmeryIntKernel": [False, False], "GemmeryFp8Kernel": [True, True], "GemmeryFp8BlockKernel": [True, True],
    }  # fmt: skip
    assert lengths() == [before[0], before[1] + 1, before[2] + 1]
    monkeypatch.setenv(plugin.VARIABLE, "int, fp8")
    plugin.register()
    assert set(map(tuple, heads().values())) == {(True, True)}


def test_unknown_kernels(monkeypatch):
    monkeypatch.setenv(plugin.VARIABLE, "int,gguf")
    with pytest.raises(ValueError, match="GEMMERY_VLLM_KERNELS: there is no 'gguf'; it may have int and fp8"):
        plugin.register()


def test_another_vllm_is_left_alone(monkeypatch, caplog):
    names = [name for name in sys.modules if name.startswith("gemmery.nn.vllm.")]
    for name in names:
        monkeypatch.delitem(sys.modules, name)
    for name in ("config", "kernels", "methods"):
        monkeypatch.delattr(plugin, name, raising=False)
    monkeypatch.delattr("vllm.model_executor.parameter.permute_param_layout_")
    monkeypatch.delenv(plugin.VARIABLE, raising=False)
    with caplog.at_level(logging.WARNING, "gemmery"):
        plugin.register()
    assert "other interfaces than version 0.33" in caplog.text
    assert "permute_param_layout_" in caplog.text
    monkeypatch.setenv(plugin.VARIABLE, "int")
    with pytest.raises(ImportError, match="permute_param_layout_"):
        plugin.register()


def test_the_entry_point():
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    (path,) = project["entry-points"]["vllm.general_plugins"].values()
    module, _, name = path.partition(":")
    assert getattr(importlib.import_module(module), name) is plugin.register


# --- Layers -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float32), ids=str)
def test_a_dense_layer(dtype):
    x, weight, bias = torch.randn(5, 96).to(dtype), torch.randn(48, 96).to(dtype), torch.randn(48).to(dtype)
    layer = loaded(GemmeryQuantization(), weight, bias)
    assert torch.equal(layer.weight, weight)
    assert torch.equal(layer(x), gemmery.linear(x, weight, bias))
    assert dtype in GemmeryQuantization().get_supported_act_dtypes()


@pytest.mark.parametrize(
    "how",
    ({"format": "int4", "group_size": 32}, {"format": "e4m3", "scale": "block"}, {"format": "nf4"}),
    ids=lambda how: how["format"],
)
@pytest.mark.parametrize("biased", (False, True))
def test_a_packed_layer(how, biased):
    x, weight = torch.randn(5, 128).bfloat16(), torch.randn(48, 128).bfloat16()
    bias = torch.randn(48).bfloat16() if biased else None
    layer = loaded(packing(**how), weight, bias)
    want = gemmery.quantize(weight, **how)
    assert isinstance(layer.weight, gemmery.QuantizedTensor)
    assert torch.equal(layer(x), gemmery.linear(x, want, bias))
    layer.quant_method.process_weights_after_loading(layer)  # vLLM does so for all layers at the end
    assert torch.equal(layer.weight.words, want.words)


@pytest.mark.parametrize(
    "config", (GemmeryQuantization(), packing(format="int4", group_size=64)), ids=("dense", "int4")
)
def test_batch_invariance(config, monkeypatch):
    x, weight = torch.randn(33, 256).bfloat16(), torch.randn(64, 256).bfloat16()
    layer, asked = loaded(config, weight), []

    def spy(*args, **how):
        asked.append(how["batch_invariant"])
        return gemmery.linear(*args, **how)

    monkeypatch.setattr("gemmery.nn.vllm.methods.linear", spy)
    layer(x)
    monkeypatch.setattr("vllm.envs.VLLM_BATCH_INVARIANT", True, raising=False)
    assert torch.equal(layer(x)[3:4], layer(x[3:4]))
    assert asked == [False, True, True]


@pytest.mark.parametrize(
    "config", (GemmeryQuantization(), packing(format="int4", group_size=64)), ids=("dense", "int4")
)
def test_compiled(config):
    layer = loaded(config, torch.randn(64, 256).bfloat16())
    compiled = torch.compile(layer.forward, fullgraph=True, dynamic=True, backend="aot_eager")
    for rows in (3, 7):
        x = torch.randn(rows, 256).bfloat16()
        assert torch.equal(compiled(x), layer(x))


def test_what_is_left():
    config = packing(format="int4", modules_to_not_convert=["o_proj", "layers.1", "gate_proj", "up_proj"])
    config.packed_modules_mapping = {
        "qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"],
    }  # fmt: skip

    def method(name):
        return type(
            created(config, torch.empty(48, 128).bfloat16(), name=f"model.layers.{name}").quant_method
        )

    left = ("0.self_attn.o_proj", "1.mlp.down_proj", "0.mlp.gate_up_proj")
    assert [method(name) for name in left] == [UnquantizedLinearMethod] * 3
    packed = ("0.self_attn.qkv_proj", "10.mlp.down_proj")
    assert [method(name) for name in packed] == [GemmeryPackedLinearMethod] * 2
    config.how.modules_to_not_convert.append("k_proj")
    with pytest.raises(
        ValueError, match=r"self_attn.qkv_proj: vLLM computes .* must name all of them, and has only"
    ):
        method("0.self_attn.qkv_proj")


def test_other_layers():
    config = packing(format="int4")
    assert config.get_quant_method(nn.Embedding(4, 4), "embed") is None
    experts = RoutedExperts.__new__(RoutedExperts)
    nn.Module.__init__(experts)
    if REAL:
        return  # its method needs a whole configuration
    experts.moe_config = "how"
    assert config.get_quant_method(experts, "experts") == UnquantizedFusedMoEMethod("how")


def test_errors():
    with pytest.raises(
        NotImplementedError, match="can't read the packed weights that save_pretrained has written"
    ):
        GemmeryQuantization.from_config({"quant_method": "gemmery", "format": "int4"})
    with pytest.raises(ValueError, match="there is no 'bits'"):
        packing(bits=4)
    with pytest.raises(
        ValueError, match=r"mlp.down_proj can't be quantized: .*; name it in modules_to_not_convert"
    ):
        loaded(packing(format="int4"), torch.full((48, 128), torch.nan).bfloat16())


# --- Kernels ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ("gptq", "compressed-tensors"))
@pytest.mark.parametrize("zero_points", (False, True))
@pytest.mark.parametrize("bits,group", ((4, 32), (4, 128), (4, -1), (8, 64)))
def test_integer_weights(bits, group, zero_points, layout):
    kernel, layer, weight = int_layer(bits, group, zero_points, layout)
    kernel.process_weights_after_loading(layer)
    x, bias = torch.randn(2, 5, 128).bfloat16(), torch.randn(48).bfloat16()
    y, want = kernel.apply_weights(layer, x, bias).float(), x.float() @ weight.T + bias.float()
    torch.testing.assert_close(layer.qweight.dequantize(torch.float32), weight, rtol=1e-2, atol=1e-6)
    assert y.shape == want.shape
    assert (y - want).norm() < 5e-3 * want.norm()
    # Words of the checkpoint, scales and zero points are freed.
    assert sum(p.nbytes for p in layer.parameters()) == layer.qweight.nbytes


def test_integer_weights_of_other_kernels():
    *_, config = (int_layer(4, 32, False, "gptq")[0].config,)
    for name, value, reason in (
        ("weight_type", scalar_types.uint3b4, "it must be"),
        ("weight_type", scalar_types.uint4, "it must be"),
        ("act_type", FP8, "both must be float16 or bfloat16"),
        ("out_type", torch.float32, "both must be float16 or bfloat16"),
        ("group_size", 8, "power of two of at least 16"),
    ):
        other = MPLinearLayerConfig(**{**vars(config), name: value})
        done, why = GemmeryIntKernel.can_implement(other)
        assert not done
        assert reason in why


@pytest.mark.parametrize("x_scale", ((-1, -1), (1, -1)), ids=("tensor", "token"))
@pytest.mark.parametrize("w_scale", ((-1, -1), (-1, 1)), ids=("tensor", "channel"))
@pytest.mark.parametrize("rows", (1, 5))
def test_fp8(x_scale, w_scale, rows):
    config = fp8_config(x_scale, w_scale)
    assert GemmeryFp8Kernel.can_implement(config) == (True, None)
    kernel = GemmeryFp8Kernel(config, NAMES)
    a, b, bias = torch.randn(rows, 256).to(FP8), torch.randn(48, 256).to(FP8), torch.randn(48).bfloat16()
    of_a = torch.rand(rows if x_scale == (1, -1) else 1, 1) + 0.5
    of_b = torch.rand(48, 1) + 0.5 if w_scale == (-1, 1) else torch.rand(()) + 0.5
    want = (a.float() * of_a) @ (b.float() * of_b).T + bias.float()
    # compressed-tensors has (N, 1), ModelOpt (N,).
    for scale in (of_b, of_b.flatten()):
        y = kernel.apply_scaled_mm(
            A=a, B=b.t(), out_dtype=torch.bfloat16, As=of_a, Bs=scale, bias=bias, output_shape=[1, rows, 48]
        )
        assert y.shape == (1, rows, 48)
        torch.testing.assert_close(y[0].float(), want, rtol=1e-2, atol=0.1)


def test_fp8_in_blocks():
    config = fp8_config((1, 128), (128, 128))
    assert GemmeryFp8BlockKernel.can_implement(config) == (True, None)
    kernel = GemmeryFp8BlockKernel(config)
    a, b = torch.randn(5, 256).to(FP8), torch.randn(192, 256).to(FP8)
    of_a, of_b = torch.rand(5, 2) + 0.5, torch.rand(2, 2) + 0.5
    y = kernel.apply_block_scaled_mm(a, b, of_a, of_b)
    wide = of_b.repeat_interleave(128, 0)[:192].repeat_interleave(128, 1)
    want = (a.float() * of_a.repeat_interleave(128, 1)) @ (b.float() * wide).T
    torch.testing.assert_close(y.float(), want, rtol=1e-2, atol=0.1)


def test_fp8_of_other_kernels():
    for kernel, x, weight, static in (
        (GemmeryFp8Kernel, (1, 128), (-1, -1), False),
        (GemmeryFp8Kernel, (1, -1), (128, 128), False),
        (GemmeryFp8BlockKernel, (1, 64), (128, 128), False),
        (GemmeryFp8BlockKernel, (1, 128), (64, 128), False),
        (GemmeryFp8BlockKernel, (1, 128), (128, 128), True),
    ):
        assert not kernel.can_implement(fp8_config(x, weight, static=static))[0]
    for kernel in (GemmeryFp8Kernel, GemmeryFp8BlockKernel):
        assert [kernel.is_supported(x)[0] for x in (None, 80, 89, 90)] == [True, False, True, True]


@pytest.mark.parametrize("kind", ("int", "fp8", "fp8_block"))
def test_kernels_compiled(kind):
    if kind == "int":
        kernel, layer, _ = int_layer(4, 32, True, "gptq")
        kernel.process_weights_after_loading(layer)

        def run(x):
            return kernel.apply_weights(layer, x)
    elif kind == "fp8_block":
        kernel = GemmeryFp8BlockKernel(fp8_config((1, 128), (128, 128)))
        weight, scale = torch.randn(48, 128).to(FP8), torch.rand(1, 1)

        def run(x):
            of_x = x.float().abs().amax(1, keepdim=True) / 448
            return kernel.apply_block_scaled_mm((x / of_x).to(FP8), weight, of_x, scale)
    else:
        kernel = GemmeryFp8Kernel(fp8_config((1, -1), (-1, 1)), NAMES)
        weight, scale = torch.randn(48, 128).to(FP8), torch.rand(48, 1)

        def run(x):
            of_x = x.float().abs().amax(1, keepdim=True) / 448
            return kernel.apply_scaled_mm(
                A=(x / of_x).to(FP8), B=weight.t(), out_dtype=torch.bfloat16, As=of_x, Bs=scale, bias=None,
                output_shape=[x.shape[0], 48],
            )  # fmt: skip

    compiled = torch.compile(run, fullgraph=True, dynamic=True, backend="aot_eager")
    for rows in (3, 7):
        x = torch.randn(rows, 128).bfloat16()
        torch.testing.assert_close(compiled(x), run(x), rtol=1e-2, atol=1e-2)


# --- The stub ---------------------------------------------------------------------------------------------------------


def signature(function):
    """Names, kinds and whether there is a default, without types."""
    return [(x.name, x.kind, x.default is x.empty) for x in inspect.signature(function).parameters.values()]


@pytest.mark.skipif(not REAL, reason="vLLM is not installed: this compares the stub with it")
def test_the_stub_is_like_vllm():
    for path, found in stub.MODULES.items():
        for ours in found:
            theirs = getattr(importlib.import_module(path), ours.__name__)
            if inspect.isfunction(ours):
                assert signature(ours) == signature(theirs), ours
                continue
            for name, value in vars(ours).items():
                function = inspect.unwrap(getattr(value, "__func__", value))
                if inspect.isfunction(function) and (not name.startswith("__") or name == "__init__"):
                    assert signature(getattr(ours, name)) == signature(getattr(theirs, name)), (ours, name)
    for path, values in stub.VALUES.items():
        for name, value in values.items():
            assert isinstance(getattr(importlib.import_module(path), name), type(value)), name
