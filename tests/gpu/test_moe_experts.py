"""Experts on the GPU: sizes of models, gradients, packed weights, graphs that are replayed with other choices."""

import pytest
import torch
from torch.nn import functional as F

import gemmery.nn
from gemmery.moe import clamped_swiglu, experts, gate
from tests.experts import LAYOUTS, MODELS, error, ids
from tests.gpu.common import DEVICE, DRY, needs_cuda, size

pytestmark = pytest.mark.gpu

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
#: Columns of tokens and between the products, experts, choices, layout, activation, biases: of Qwen3-30B, of a part of
#: Mixtral, of gpt-oss-120b, and odd ones.
SIZES = {
    "qwen3": (2048, 768, 128, 8, "stacked", "silu", False),
    "mixtral": (4096, 1792, 8, 2, "stacked", "silu", False),
    "gpt-oss": (2880, 2880, 32, 4, "alternating and transposed", clamped_swiglu, True),
    "aria": (2560, 1664, 64, 6, "transposed", "silu", False),
    "odd": (515, 77, 9, 3, "a pair", "gelu_tanh", True),
}
ERRORS = {BF16: 1e-2, F16: 2e-3, F32: 1e-5}
FUNCTIONS = {
    "silu": lambda gate, up: F.silu(gate) * up,
    "gelu_tanh": lambda gate, up: F.gelu(gate, approximate="tanh") * up,
    clamped_swiglu: clamped_swiglu,
}


def choices(tokens, count, k, skew=1.0):
    """Different experts for each token, the first ones more often the larger the skew; a few ids outside."""
    scores = torch.rand(tokens, count, device=DEVICE) + skew * torch.linspace(1, 0, count, device=DEVICE)
    index = scores.topk(k, -1).indices
    index[torch.rand(tokens, k, device=DEVICE) < 0.02] = count
    return index, torch.rand(tokens, k, device=DEVICE)


def stacked(name, dtype):
    """Weights, and biases or None, the gate's rows first."""
    columns, hidden, count, _, _, _, biased = SIZES[name]
    columns, hidden, count = size(columns), size(hidden), min(count, 9) if DRY else count

    def values(*shape):
        return (torch.randn(shape, device=DEVICE) / (shape[-1] ** 0.5 if len(shape) == 3 else 1)).to(dtype)

    w, d = values(count, 2 * hidden, columns), values(count, columns, hidden)
    return w, d, *((values(count, 2 * hidden), values(count, columns)) if biased else (None, None))


def arguments(name, w, d, b, c):
    """What `experts` is given behind tokens and choices."""
    _, _, _, _, layout, activation, _ = SIZES[name]
    weights, how = LAYOUTS[layout](w, d, b)
    return weights, how | {"activation": activation, "down_bias": c}


def meaning(x, index, factors, w, d, b, c, function):
    """Expert by expert, in the type of the tokens."""
    out = torch.zeros(x.shape[0], d.shape[1], dtype=x.dtype, device=x.device)
    for e in range(w.shape[0]):
        token, choice = (index == e).nonzero(as_tuple=True)
        hidden = function(*(x[token] @ w[e].T + (0 if b is None else b[e])).chunk(2, -1))
        y = (hidden @ d[e].T + (0 if c is None else c[e])) * factors[token, choice, None]
        out = out.index_add(0, token, y)
    return out


def wide(*tensors):
    return [None if x is None else x.double() for x in tensors]


@pytest.mark.parametrize("skew", [0.0, 2.0])
@pytest.mark.parametrize("tokens", [1, 64, 2048])
@pytest.mark.parametrize("name", SIZES)
def test_sizes_of_models(name, tokens, skew):
    given = stacked(name, BF16)
    weights, how = arguments(name, *given)
    x = torch.randn(size(tokens), given[0].shape[2], device=DEVICE).to(BF16)
    index, factors = choices(x.shape[0], given[0].shape[0], SIZES[name][3], skew)
    y = experts(x, index, factors, *weights, **how)
    want = meaning(x.double(), index, factors.double(), *wide(*given), FUNCTIONS[how["activation"]])
    assert (y.shape, y.dtype) == (x.shape, BF16)
    assert error(y, want) < ERRORS[BF16]


@pytest.mark.parametrize("dtype", [BF16, F16, F32], ids=str)
@pytest.mark.parametrize("name", ["qwen3", "gpt-oss", "odd"])
def test_gradients(name, dtype):
    leaves = [None if x is None else x.requires_grad_() for x in stacked(name, dtype)]
    weights, how = arguments(name, *leaves)
    x = torch.randn(size(512), leaves[0].shape[2], device=DEVICE).to(dtype).requires_grad_()
    index, factors = choices(x.shape[0], leaves[0].shape[0], SIZES[name][3])
    factors.requires_grad_()
    inputs = [t for t in (x, factors, *leaves) if t is not None]
    theirs = [t.detach().double().requires_grad_() for t in inputs]
    left = iter(theirs[2:])
    again = [None if t is None else next(left) for t in leaves]
    y = experts(x, index, factors, *weights, **how)
    z = meaning(theirs[0], index, theirs[1], *again, FUNCTIONS[how["activation"]])
    grad = torch.randn(y.shape, device=DEVICE).to(dtype)
    made = torch.autograd.grad(y, inputs, grad)
    for got, want in zip(made, torch.autograd.grad(z, theirs, grad.double()), strict=True):
        assert error(got, want) < 2 * ERRORS[dtype]


@pytest.mark.parametrize("tokens", [1, 64, 1024])
@pytest.mark.parametrize("format", ["int4", "mxfp4", "e4m3"])
def test_packed_weights(format, tokens):
    w, d, b, c = stacked("gpt-oss", BF16)
    first, down = (gemmery.quantize(t, format) for t in (w, d))
    x = torch.randn(size(tokens), w.shape[2], device=DEVICE).to(BF16)
    index, factors = choices(x.shape[0], w.shape[0], 4)
    y = experts(x, index, factors, first, down, activation=clamped_swiglu, gate_up_bias=b, down_bias=c)
    exact = (t.dequantize(torch.float64) for t in (first, down))
    want = meaning(x.double(), index, factors.double(), *exact, *wide(b, c), clamped_swiglu)
    assert error(y, want) < ERRORS[BF16]


@needs_cuda
@pytest.mark.parametrize("tokens", [1, 64, 512])
@pytest.mark.parametrize("name", ["qwen3", "gpt-oss"])
def test_a_graph_is_replayed_with_other_choices(name, tokens):
    """A serving loop: the graph gives the bits of eager, whatever the tokens choose."""
    given = stacked(name, BF16)
    weights, how = arguments(name, *given)
    count, k = given[0].shape[0], SIZES[name][3]
    x = torch.randn(tokens, given[0].shape[2], device=DEVICE).to(BF16)
    index, factors = choices(tokens, count, k)
    experts(x, index, factors, *weights, **how)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = experts(x, index, factors, *weights, **how)
    for step in range(200):
        other, of_others = choices(tokens, count, k, skew=step % 5)
        if step == 7:
            other.fill_(count)
        index.copy_(other)
        factors.copy_(of_others)
        x.copy_(torch.randn(x.shape, device=DEVICE))
        out.fill_(float("nan"))
        graph.replay()
        assert torch.equal(out, experts(x, index, factors, *weights, **how)), step


@needs_cuda
def test_nothing_waits_for_the_gpu():
    leaves = [None if x is None else x.requires_grad_() for x in stacked("gpt-oss", BF16)]
    weights, how = arguments("gpt-oss", *leaves)
    x = torch.randn(64, leaves[0].shape[2], device=DEVICE).to(BF16).requires_grad_()
    index, factors = choices(64, 32, 4)
    experts(x, index, factors, *weights, **how).sum().backward()
    torch.cuda.set_sync_debug_mode("error")
    try:
        experts(x, index, factors, *weights, **how).sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_a_token_has_the_same_bits_in_every_batch():
    given = stacked("qwen3", BF16)
    weights, how = arguments("qwen3", *given)
    x = torch.randn(size(256), given[0].shape[2], device=DEVICE).to(BF16)
    index, factors = choices(x.shape[0], given[0].shape[0], 4 if DRY else 8)
    whole = experts(x, index, factors, *weights, batch_invariant=True, **how)
    for rows in (1, 17, 64):
        part = experts(x[:rows], index[:rows], factors[:rows], *weights, batch_invariant=True, **how)
        assert torch.equal(part, whole[:rows])


@needs_cuda
def test_compiled():
    given = stacked("gpt-oss", BF16)
    weights, how = arguments("gpt-oss", *given)
    how["activation"] = gate(clamped_swiglu)

    def block(x, index, factors):
        return experts(x * 2, index, factors, *weights, **how) + x

    compiled = torch.compile(block, fullgraph=True)
    for tokens in (16, 200):
        inputs = (torch.randn(tokens, 2880, device=DEVICE).to(BF16), *choices(tokens, 32, 4))
        assert error(compiled(*inputs), block(*inputs)) < ERRORS[BF16]


@pytest.mark.parametrize("name", MODELS)
def test_models(name):
    pytest.importorskip("transformers")
    gemmery.nn.register_experts()
    model = MODELS[name].make(scale=2.0, experts_implementation="eager").to(DEVICE)
    tokens = ids().to(DEVICE)
    with torch.no_grad():
        want = model(tokens).logits
        model.set_experts_implementation("gemmery")
        assert error(model(tokens).logits, want) < 1e-4
        model.set_experts_implementation("eager")
        report = gemmery.nn.swap(model, precision="ieee")
        assert error(model(tokens).logits, want) < 1e-4
        report.undo()
        model.bfloat16()
        report = gemmery.nn.quantize(model, "e4m3")
        assert error(model(tokens).logits, want) < 0.3
        report.undo()
    found = []
    for how in ("eager", "gemmery"):
        model.float().set_experts_implementation(how)
        loss = model(tokens, labels=tokens).loss
        found.append(
            torch.autograd.grad(loss, [p for p in model.parameters() if p.requires_grad], allow_unused=True)
        )
    for got, want in zip(*found, strict=True):
        assert got is None or error(got, want) < 1e-3
