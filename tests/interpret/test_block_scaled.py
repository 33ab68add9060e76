"""Products with scales of blocks where torch looks on: modes, fakes, graphs, and memory that they share."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

import gemmery

# What these tests are about does not depend on Triton's version.
pytestmark = pytest.mark.slow


def values(rows, seed):
    return torch.randn(rows, 256, generator=torch.Generator().manual_seed(seed))


def blocks():
    """e4m3 with scales of 128 columns of x and of 128×128 of w."""
    scale = torch.tensor([[0.75, 1.25]])
    weight = gemmery.ScaledTensor(values(24, 1).to(torch.float8_e4m3fn), scale)
    return gemmery.quantize_activations(values(5, 0), per="block"), weight


def mx():
    return tuple(gemmery.quantize_activations(values(rows, rows), per="mx") for rows in (5, 24))


PAIRS = {"blocks": blocks, "mx": mx}


@pytest.fixture(params=PAIRS)
def pair(request):
    return PAIRS[request.param]()


def reference(a, b):
    return a.dequantize().double() @ b.dequantize().double().T


def near(y, want):
    assert y.dtype == torch.bfloat16
    assert (y.double() - want).norm() / want.norm() < 4e-3


class Seen(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.calls.append((str(func), args))
        return func(*args, **(kwargs or {}))


def test_a_mode_sees_the_product(pair):
    with Seen() as seen:
        y = gemmery.scaled_matmul(*pair)
    near(y, reference(*pair))
    assert [name for name, _ in seen.calls if name.startswith("gemmery")] == ["gemmery.product.default"]


def test_the_context_makes_it_invariant(pair, monkeypatch):
    from gemmery.product import cache, compute

    asked = []
    prepare = compute.prepare
    monkeypatch.setattr(cache, "find", lambda key: None)
    monkeypatch.setattr(
        compute, "prepare", lambda call, out: asked.append(call.options.batch_invariant) or prepare(call, out)
    )
    a, b = pair
    with gemmery.batch_invariant():
        together, one = (
            gemmery.scaled_matmul(a, b),
            gemmery.scaled_matmul(type(a)(a.data[2:3], a.scale[2:3]), b),
        )
    assert asked == [True, True]
    assert torch.equal(together[2:3], one)
    gemmery.scaled_matmul(a, b)
    assert asked[-1] is False


def test_fake_tensors_and_graphs(pair):
    a, b = pair
    with FakeTensorMode() as mode:
        fakes = [gemmery.ScaledTensor(mode.from_tensor(x.data), mode.from_tensor(x.scale)) for x in pair]
        y = gemmery.scaled_matmul(*fakes, bias=mode.from_tensor(torch.ones(24)), epilogue=torch.relu)
        assert (tuple(y.shape), y.dtype) == ((5, 24), torch.bfloat16)

    def function(data, scale):
        return gemmery.scaled_matmul(gemmery.ScaledTensor(data, scale), b, epilogue=torch.relu)

    graph = make_fx(function)(a.data, a.scale)
    near(graph(a.data, a.scale), reference(a, b).relu())
    assert "gemmery.product" in graph.code


def test_compiled(pair):
    a, b = pair
    made = gemmery.epilogue(lambda acc, r: torch.relu(acc) + r)
    step = torch.compile(
        lambda a, b, r: gemmery.scaled_matmul(a, b, epilogue=made, args=(r,)),
        fullgraph=True,
        backend="aot_eager",
    )
    r = torch.ones(24)
    near(step(a, b, r), reference(a, b).relu() + 1)


def test_what_goes_in_besides_can_be_mapped(pair):
    rows = torch.arange(72.0).view(3, 24)
    step = torch.vmap(lambda r: gemmery.scaled_matmul(*pair, epilogue=lambda acc, r: acc + r, args=(r,)))
    for made, row in zip(step(rows), rows, strict=True):
        near(made, reference(*pair) + row)


def test_mapping_a_weight_is_refused(pair):
    a, b = pair
    data = torch.stack([b.data.view(torch.uint8)] * 3).view(b.dtype)
    with pytest.raises(NotImplementedError, match="scales of blocks"):
        torch.vmap(lambda d: gemmery.scaled_matmul(a, gemmery.ScaledTensor(d, b.scale)))(data)


@pytest.mark.parametrize("which", (0, 1))
def test_out_may_not_be_the_scales(which):
    room = torch.rand(256)
    scales = [room[:10].view(5, 2) + 0, room[:2].view(1, 2) + 0]
    scales[which] = room[: scales[which].numel()].view(scales[which].shape)
    a, b = (
        gemmery.ScaledTensor(torch.ones(n, 256).to(torch.float8_e4m3fn), s)
        for n, s in zip((5, 24), scales, strict=True)
    )
    before = room.clone()
    with pytest.raises(ValueError, match="share memory"):
        gemmery.scaled_matmul(a, b, out=room.view(torch.bfloat16)[:120].view(5, 24))
    assert torch.equal(room, before)


@pytest.mark.parametrize("part", ("words", "scales", "zeros"))
def test_out_may_not_be_a_packed_weights_memory(part):
    x = torch.randn(4, 64).half()
    w = gemmery.quantize(torch.randn(16, 64).half(), "int4", group_size=16, symmetric=False)
    out = getattr(w, part).view(-1).view(torch.float16)[:64].view(4, 16)
    before = out.clone()
    with pytest.raises(ValueError, match=f"weight's {part} share memory"):
        gemmery.linear(x, w, out=out)
    assert torch.equal(out.view(torch.int16), before.view(torch.int16))
