"""The layers and kernels of gemmery.nn.vllm on the GPU, in CUDA graphs and compiled, with vLLM or with its stub."""

import pytest
import torch

import gemmery
from tests.gpu.common import DEVICE, DRY, needs_cuda

pytestmark = pytest.mark.gpu
pytest.importorskip("transformers", minversion="5")

from tests.vllm_layers import (  # noqa: E402
    FP8,
    NAMES,
    GemmeryQuantization,
    fp8_config,
    int_layer,
    loaded,
    packing,
    there,
)

with there():
    from gemmery.nn.vllm.kernels import GemmeryFp8BlockKernel, GemmeryFp8Kernel

K, N = (256, 48) if DRY else (2048, 1536)


def quantized(x, in_blocks):
    """fp8 activations with their scales, a row's or one per 128 columns."""
    parts = x.float().reshape(len(x), -1, 128 if in_blocks else K)
    scale = parts.abs().amax(-1) / 448
    return (parts / scale[..., None]).reshape(x.shape).to(FP8), scale


def dense():
    layer = loaded(GemmeryQuantization(), torch.randn(N, K).bfloat16(), torch.randn(N).bfloat16())
    return layer, layer.weight.float(), layer.bias.float()


def int4():
    layer = loaded(packing(format="int4", group_size=64), torch.randn(N, K).bfloat16())
    assert isinstance(layer.weight, gemmery.QuantizedTensor)
    return layer, layer.weight.dequantize(torch.float32), 0.0


def gptq():
    kernel, layer, weight = int_layer(4, 128, True, "gptq", K, N)
    kernel.process_weights_after_loading(layer)
    return lambda x: kernel.apply_weights(layer, x), weight, 0.0


def fp8():
    kernel = GemmeryFp8Kernel(fp8_config((1, -1), (-1, 1)), NAMES)
    weight, scale = torch.randn(N, K).to(FP8), torch.rand(N, 1) + 0.5

    def run(x):
        a, of_a = quantized(x, False)
        return kernel.apply_scaled_mm(
            A=a,
            B=weight.t(),
            out_dtype=torch.bfloat16,
            As=of_a,
            Bs=scale,
            bias=None,
            output_shape=[len(x), N],
        )

    return run, weight.float() * scale, 0.0


def fp8_in_blocks():
    kernel = GemmeryFp8BlockKernel(fp8_config((1, 128), (128, 128)))
    weight, scale = torch.randn(N, K).to(FP8), torch.rand(-(-N // 128), K // 128) + 0.5
    wide = scale.repeat_interleave(128, 0)[:N].repeat_interleave(128, 1)

    def run(x):
        a, of_a = quantized(x, True)
        return kernel.apply_block_scaled_mm(a, weight, of_a, scale)

    return run, weight.float() * wide, 0.0


@pytest.fixture(params=(dense, int4, gptq, fp8, fp8_in_blocks), ids=lambda f: f.__name__)
def made(request):
    """A layer as a function, its weight and its bias in float32."""
    torch.manual_seed(0)
    with there(), torch.no_grad():
        with torch.device(DEVICE):
            made = request.param()
        yield made


@pytest.mark.parametrize("rows", (1, 17, 300))
def test_results(made, rows):
    run, weight, bias = made
    x = torch.randn(rows, K, device=DEVICE).bfloat16()
    want = x.double() @ weight.double().T + bias
    # Activations of fp8 have 4 bits.
    assert (run(x) - want).norm() < 3e-2 * want.norm()


@needs_cuda
def test_in_a_graph(made):
    run, *_ = made
    x = torch.randn(16, K, device=DEVICE).bfloat16()
    want = run(x).clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = run(x)
    y.zero_()
    graph.replay()
    assert torch.equal(y, want)


@needs_cuda
def test_compiled(made):
    run, *_ = made
    compiled = torch.compile(lambda x: run(x), fullgraph=True, dynamic=True)
    for rows in (16, 33):
        x = torch.randn(rows, K, device=DEVICE).bfloat16()
        torch.testing.assert_close(compiled(x), run(x), rtol=2e-2, atol=0.5)
