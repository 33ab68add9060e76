"""Rows whose bits do not depend on the batch: configs that sum alike, every number of rows, graphs, and whole models."""

import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import gemmery
import gemmery.nn
from gemmery import ScaledTensor, devices, schedules
from gemmery.schedules.base import Forms
from gemmery.select.space import tiles_of
from gemmery.select.tiles import FAMILIES
from tests.gpu.common import DEVICE, DRY, FP8, LAYOUTS, needs_cuda, size, values, wide

pytestmark = pytest.mark.gpu

#: For each part of a family's tiles the operands that want it, and how they are multiplied.
KINDS = {
    "half": (torch.bfloat16, {}),
    "fp8": (FP8[0], {"fast_accum": True}),
    "fp8 accurate": (FP8[0], {}),
    "int8": (torch.int8, {}),
    "tf32": (torch.float32, {"precision": "tf32"}),
    "tf32x3": (torch.float32, {"precision": "tf32x3"}),
    "ieee": (torch.float32, {}),
    "fp64": (torch.float64, {}),
}
#: The same for kinds whose operands are quantised: a format of packed weights, or what shares a factor in a and in b.
QUANTISED = {
    "packed4": "int4", "packed8": "int8", "scaled": ("block", "block"), "scaled32": ("mx", "token"), "mx": ("mx", "mx"),
}  # fmt: skip
#: All that can be multiplied.
OPERANDS = {"fp16": (torch.float16, {}), "e5m2": (FP8[1], {})} | KINDS


def same_bits(first, second):
    """Whether two tensors are the same to the last bit, the sign of a zero included."""
    integers = {2: torch.int16, 4: torch.int32, 8: torch.int64}[first.dtype.itemsize]
    return torch.equal(first.contiguous().view(integers), second.contiguous().view(integers))


def assert_same_bits(first, second, what=""):
    if not same_bits(first, second):
        differ = first != second
        raise AssertionError(
            f"{what}: {int(differ.sum())} of {differ.numel()} elements differ, by up to "
            f"{(wide(first) - wide(second)).abs().max().item():.3g}"
        )


# ---------------------------------------------------------------------------------------------------------------------
# Configs

FAMILY = "hopper"
if DRY or torch.cuda.is_available():
    FAMILY = getattr(devices.current(torch.device(DEVICE)), "target", devices.ARCHS["sm_90"]).family
ROWS = [
    (kind, number)
    for kind in FAMILIES[FAMILY]
    if kind in KINDS or kind in QUANTISED
    for number, tile in enumerate(tiles_of(FAMILY, kind))
    # The programs of a cluster have parts of K, which have no such number.
    if schedules.of(tile.config.schedule).available() and tile.config.schedule != "cluster"
]


def laid_out(tensor, letter):
    """The same matrix in row-major (N) or column-major (T) order."""
    return tensor.contiguous() if letter == "N" else tensor.t().contiguous().t()


def assert_configs_agree(kind, number, first):
    """Two rows give the same bits: at sizes at which tiles are cut for a last wave and K ends within a step, A and B
    row- and column-major, and wherever a row lies."""
    dtype, options = KINDS[kind]
    tiles = tiles_of(FAMILY, kind)
    config, other = tiles[number].config, tiles[first].config
    m, n, k = size(2192), size(2112), size(1040)
    torch.manual_seed(0)
    a, b = values((m, k), dtype), values((n, k), dtype).t()
    if dtype.is_floating_point:
        a[::7], a[1::7] = 0.0, -0.0  # the signs of zeros are bits, too
    want = gemmery.matmul(a, b, config=other, **options)
    takes = schedules.of(config.schedule).takes
    for layout in ("NT", LAYOUTS[number % 4]):
        if not takes(config, Forms(layout[0] == "T", layout[1] == "N", paired=False)):
            continue
        x, y = laid_out(a, layout[0]), laid_out(b, layout[1])
        assert_same_bits(
            gemmery.matmul(x, y, config=config, **options), want, f"{config} {layout} and {other} NT"
        )
        for start, rows in ((0, 1), (16, 5), (64, 60)):
            part = slice(start, start + rows)
            result = gemmery.matmul(x[part], y, config=config, **options)
            assert_same_bits(result, want[part], f"{config} {layout}, rows {part}")


def quantised(kind, m, n, k):
    """The product of some rows of a matrix and a weight, both of which are quantised as a kind of tiles wants it."""
    x, w = values((m, k), torch.bfloat16), values((n, k), torch.bfloat16)
    how = QUANTISED[kind]
    if isinstance(how, str):
        weight = gemmery.quantize(w, how)
        return lambda rows, **options: gemmery.linear(x[rows], weight, **options)
    a, b = (gemmery.quantize_activations(t, per=per) for t, per in zip((x, w), how, strict=True))
    if kind == "scaled":
        # Specialised warps want blocks.
        b = ScaledTensor(b.data, torch.rand(-(-n // 128), -(-k // 128), device=DEVICE) + 0.5)
    return lambda rows, **options: gemmery.scaled_matmul(
        ScaledTensor(a.data[rows], a.scale[rows]), b, **options
    )


def assert_quantised_configs_agree(kind, number, first):
    """The same for quantised operands, which lie in one way."""
    tiles = tiles_of(FAMILY, kind)
    config, other = tiles[number].config, tiles[first].config
    torch.manual_seed(0)
    product = quantised(kind, size(2192), size(2112), size(1152))
    want = product(slice(None), config=other)
    for start, rows in ((0, size(2192)), (0, 1), (16, 5), (64, 60)):
        part = slice(start, start + rows)
        assert_same_bits(product(part, config=config), want[part], f"{config} and {other}, rows {part}")


@pytest.mark.parametrize(("kind", "number"), ROWS, ids=[f"{kind} {number}" for kind, number in ROWS])
def test_configs_of_a_class_give_the_same_bits(kind, number):
    tiles = tiles_of(FAMILY, kind)
    first = next(i for i, tile in enumerate(tiles) if tile.numerics == tiles[number].numerics)
    agree = assert_quantised_configs_agree if kind in QUANTISED else assert_configs_agree
    agree(kind, number, first)


# ---------------------------------------------------------------------------------------------------------------------
# gemmery's functions

COUNTS = (1, 2, 3, 8, 15, 16, 17, 33, 64, 65, 100, 128, 129, 200, 256, 384, 512, 777, 1024, 2048, 4096)
MOST = 128 if DRY else 4096


def case(kind, k, n=1000):
    """Rows, a weight, what is added, and the function of rows and what is added that is meant."""
    dtype, options = OPERANDS[kind]
    torch.manual_seed(k)
    x, w = values((MOST, k), dtype), values((size(n), k), dtype)
    out = {torch.int8: torch.int32}.get(dtype, torch.bfloat16 if dtype in FP8 else dtype)
    bias = values((w.shape[0],), torch.int8).to(out) if dtype == torch.int8 else values((w.shape[0],), out)
    return x, w, lambda rows: gemmery.linear(rows, w, bias, batch_invariant=True, **options)


@pytest.mark.parametrize(
    ("kind", "k"),
    [*((kind, 1024) for kind in OPERANDS), ("half", 1001), ("ieee", 1001), ("fp8 accurate", 1001)],
)
def test_a_row_is_the_same_in_every_batch(kind, k):
    x, _, linear = case(kind, size(k))
    whole = linear(x)
    for rows in (count for count in COUNTS if count <= MOST):
        start = rows * 7 % (MOST - rows + 1)
        part = slice(start, start + rows)
        assert_same_bits(linear(x[part]), whole[part], f"rows {part}")


@pytest.mark.parametrize("kind", QUANTISED)
def test_a_row_of_a_quantised_product_is_the_same_in_every_batch(kind):
    torch.manual_seed(1)
    product = quantised(kind, MOST, size(1024), size(1024))
    whole = product(slice(None), batch_invariant=True)
    for rows in (count for count in COUNTS if count <= MOST):
        start = rows * 7 % (MOST - rows + 1)
        part = slice(start, start + rows)
        assert_same_bits(product(part, batch_invariant=True), whole[part], f"rows {part}")


@pytest.mark.parametrize("kind", [kind for kind in OPERANDS if kind != "int8"])
def test_what_other_rows_hold_and_how_they_lie_does_not_matter(kind):
    x, _, linear = case(kind, size(1024))
    x = x[: size(700)]
    whole = linear(x)
    others = x.clone()
    others[1::2] = (
        torch.tensor([math.nan, math.inf, 1e4, 448.0], device=DEVICE).repeat(x.shape[1] // 4).to(x.dtype)
    )
    assert_same_bits(linear(others)[::2], whole[::2], "NaN, infinity and large numbers in other rows")
    assert_same_bits(linear(x.t().contiguous().t()), whole, "column-major")
    odd = len(x) - 1 - len(x) % 2
    assert_same_bits(linear(x[:odd].t().contiguous().t()), whole[:odd], "column-major, an odd number of rows")
    assert_same_bits(linear(x[:48].unflatten(0, (4, 3, 4))).flatten(0, 2), whole[:48], "leading dimensions")
    assert_same_bits(linear(x[:48].unflatten(0, (4, 12)).transpose(0, 1))[5], whole[5:48:12], "turned")


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float32, torch.float64), ids=str)
def test_factors_and_addends_of_every_kind(dtype):
    m, n, k = size(300), size(520), size(1024)
    a, b = values((m, k), dtype), values((k, n), dtype)
    for addend in (values((n,), dtype), values((m, n), dtype), values((m, 1), dtype)):
        whole = gemmery.addmm(addend, a, b, alpha=0.7, beta=1.3, batch_invariant=True)
        plain = gemmery.matmul(a, b, bias=addend, batch_invariant=True)
        for part in (slice(5, 6), slice(3, 20), slice(100, m - 1)):
            own = addend if addend.dim() == 1 else addend[part]
            result = gemmery.addmm(own, a[part], b, alpha=0.7, beta=1.3, batch_invariant=True)
            assert_same_bits(result, whole[part], f"addmm, {tuple(addend.shape)}, rows {part}")
            result = gemmery.matmul(a[part], b, bias=own, batch_invariant=True)
            assert_same_bits(result, plain[part], f"bias, {tuple(addend.shape)}, rows {part}")


@pytest.mark.parametrize("k", (256, 250))
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float32), ids=str)
def test_a_matrix_is_the_same_in_every_batch(dtype, k):
    a, b = values((24, size(200), k), dtype), values((24, k, size(136)), dtype)
    whole = gemmery.bmm(a, b, batch_invariant=True)
    for i in (0, 5, 23):
        assert_same_bits(
            gemmery.bmm(a[i : i + 1], b[i : i + 1], batch_invariant=True)[0], whole[i], "one of one"
        )
        assert_same_bits(gemmery.matmul(a[i], b[i], batch_invariant=True), whole[i], "a matrix")
        assert_same_bits(gemmery.matmul(a[i, 7], b[i], batch_invariant=True), whole[i, 7], "a row")
    assert_same_bits(gemmery.bmm(a[3:10], b[3:10], batch_invariant=True), whole[3:10], "seven")


@needs_cuda
@pytest.mark.parametrize("kind", ("half", "ieee"))
def test_a_graph_gives_the_bits_of_an_eager_call(kind):
    x, _, linear = case(kind, 1024)
    for rows in (1, 48, 300):
        part = x[:rows].contiguous()
        want = linear(part)
        assert_same_bits(captured(lambda part=part: linear(part)), want, f"{rows} rows")


def captured(function):
    """What a function computes when it is captured in a graph and replayed."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        function()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = function()
    result.zero_()
    graph.replay()
    torch.cuda.synchronize()
    return result


# ---------------------------------------------------------------------------------------------------------------------
# torch's own products, and models made of them


class Attention(nn.Module):
    """With products of torch, since a fused kernel for attention need not be invariant."""

    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.into, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x):
        q, k, v = self.into(x).unflatten(-1, (3 * self.heads, -1)).transpose(1, 2).chunk(3, 1)
        weights = torch.softmax(q @ k.mT / math.sqrt(q.shape[-1]), -1)
        return self.out((weights @ v).transpose(1, 2).flatten(2))


class Transformer(nn.Module):
    """A small one, with random weights."""

    def __init__(self, width=256, heads=4, layers=2, words=1000):
        super().__init__()
        self.embed = nn.Embedding(words, width)
        self.layers = nn.ModuleList(
            nn.ModuleDict({
                "norm": nn.LayerNorm(width), "attention": Attention(width, heads), "second": nn.LayerNorm(width),
                "up": nn.Linear(width, 4 * width), "down": nn.Linear(4 * width, width, bias=False),
            })
            for _ in range(layers)
        )  # fmt: skip
        self.head = nn.Linear(width, words, bias=False)

    def forward(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            x = x + layer["attention"](layer["norm"](x))
            x = x + layer["down"](F.gelu(layer["up"](layer["second"](x))))
        return self.head(x)


def transformer(dtype):
    torch.manual_seed(1)
    model = Transformer(*(64, 2, 1, 100) if DRY else ()).to(DEVICE, dtype).eval()
    return model, torch.randint(0, 100, (6, 24), device=DEVICE)


def linears_of(model, *inputs):
    """Every call of a Linear while a model runs (the layer, its input and its output), and the model's result."""
    calls = []
    hooks = [
        layer.register_forward_hook(lambda layer, x, y: calls.append((layer, x[0], y)))
        for layer in model.modules()
        if isinstance(layer, nn.Linear)
    ]
    result = model(*inputs)
    for hook in hooks:
        hook.remove()
    return calls, result


def assert_linears_see_no_batch(calls):
    for layer, x, y in calls:
        for i in (0, len(x) // 2):
            assert_same_bits(layer(x[i : i + 1]), y[i : i + 1], f"{layer}, a prompt")
        assert_same_bits(layer(x[1, -1]), y[1, -1], f"{layer}, a token")
        poisoned = x.clone()
        poisoned[1:] = math.nan
        assert_same_bits(layer(poisoned)[:1], y[:1], f"{layer}, NaN in other prompts")


@pytest.mark.parametrize("grad", (torch.no_grad, torch.inference_mode))
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float32), ids=str)
def test_the_linear_layers_of_a_model_see_no_batch(dtype, grad):
    model, tokens = transformer(dtype)
    with grad(), gemmery.batch_invariant():
        calls, result = linears_of(model, tokens)
        assert len(calls) == 4 * len(model.layers) + 1
        assert_linears_see_no_batch(calls)
        # Softmax and the norms of torch work on a row at a time.
        for i in range(len(tokens)):
            assert_same_bits(model(tokens[i : i + 1]), result[i : i + 1], "logits of a prompt")
    with grad():
        torch.testing.assert_close(
            result, model(tokens), rtol=0.1, atol=0.1 if dtype == torch.bfloat16 else 1e-3
        )


@needs_cuda
@torch.inference_mode()
def test_the_linear_layers_of_a_language_model_see_no_batch():
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=1000, hidden_size=256, intermediate_size=688, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config).to(DEVICE, torch.bfloat16).eval()
    tokens = torch.randint(0, 1000, (6, 24), device=DEVICE)
    with gemmery.batch_invariant():
        calls, _ = linears_of(model, tokens)
        assert len(calls) == 2 * 7 + 1
        assert_linears_see_no_batch(calls)


@needs_cuda
@torch.inference_mode()
def test_a_graph_of_a_model_that_is_captured_within_is_invariant():
    model, tokens = transformer(torch.bfloat16)
    with gemmery.batch_invariant():
        want = model(tokens)
        result = captured(lambda: model(tokens))
    assert_same_bits(result, want, "a graph and an eager call")


@pytest.mark.parametrize("within", (True, False))
def test_gradients_of_rows_are_the_same_in_every_batch(within):
    """On a GPU a backward pass runs in a thread of its own."""
    layer = nn.Linear(size(512), size(520)).to(DEVICE)
    x, weights = values((size(300), size(512)), torch.float32), values((size(300), size(520)), torch.float32)
    gradients = []
    for part in (slice(0, len(x)), slice(17, 18)):
        rows = x[part].clone().requires_grad_()
        if within:
            with gemmery.batch_invariant():
                (layer(rows) * weights[part]).sum().backward()
        else:
            # What is invariant by its own argument has a gradient that is, wherever it is asked for.
            linear = gemmery.linear(rows, layer.weight, layer.bias, batch_invariant=True)
            (linear * weights[part]).sum().backward()
        gradients.append(rows.grad)
    assert_same_bits(gradients[0][17:18], gradients[1], "the gradient of a row")


@needs_cuda
def test_fp32_is_ieee_whatever_torch_says():
    a, b = values((64, 2048), torch.float32), values((2048, 512), torch.float32)
    want = a.double() @ b.double()
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = True
    try:
        with gemmery.batch_invariant():
            result = a @ b
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before
    assert ((result.double() - want).norm() / want.norm()).item() < 1e-6


@needs_cuda
@torch.inference_mode()
def test_swapped_layers_are_invariant_and_compile():
    model = nn.Sequential(nn.Linear(512, 1024), nn.GELU(), nn.Linear(1024, 256)).to(DEVICE, torch.bfloat16)
    assert gemmery.nn.swap(model, batch_invariant=True) == 2
    compiled = torch.compile(model, fullgraph=True, dynamic=True)
    x = values((300, 512), torch.bfloat16)
    whole = compiled(x)
    for part in (slice(5, 7), slice(0, 100)):
        assert_same_bits(compiled(x[part]), whole[part], f"rows {part}")


@needs_cuda
def test_what_cannot_be_done_on_a_gpu_is_refused():
    a = values((64, 64), torch.bfloat16).to(FP8[0])
    one = torch.ones((), device=DEVICE)
    with gemmery.batch_invariant():
        with pytest.raises(NotImplementedError, match="_scaled_mm"):
            torch._scaled_mm(a, a.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16)
        with pytest.raises(NotImplementedError, match="_cudnn_rnn"):
            nn.LSTM(8, 8).to(DEVICE)(torch.ones(2, 3, 8, device=DEVICE))
