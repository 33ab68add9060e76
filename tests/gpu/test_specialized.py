"""Specialised warps: right at ragged sizes, in every format, cut along K and whole, with epilogues, the same every time."""

from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F

import gemmery
from gemmery import epilogues
from gemmery.formats import FORMATS
from gemmery.formats.codes import from_codes
from gemmery.schedules.specialized import SPECIALIZED
from gemmery.select.space import tiles_of
from tests.gpu.common import HALVES, matrix, on_hopper, rng, values, wide
from tests.gpu.test_packed import KINDS, relative, weight

pytestmark = on_hopper(SPECIALIZED, "specialised warps")


def configs(kind):
    rows = [tile for tile in tiles_of("hopper", kind) if tile.config.schedule == "specialized"]
    cut = [replace(tile.config, split_k=parts) for tile in rows if tile.splits for parts in (2, 3)]
    return [tile.config for tile in rows] + cut


def some_sizes(r):
    return r.choice((1, 17, 130, 257, 600)), r.choice((128, 264, 1000, 4104)), r.choice((192, 1032, 4096))


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_packed(kind, dtype):
    r = rng("specialized", kind, dtype)
    for config in configs(f"packed{FORMATS[KINDS[kind][0]].bits}"):
        m, n, k = some_sizes(r)
        if not kind.startswith("int"):
            k = -(-k // 128) * 128
        x, w = values((m, k), dtype), weight(kind, n, k, dtype)
        want = wide(x) @ w.dequantize(torch.float64).mT
        result = gemmery.linear(x, w, config=config)
        theirs = relative(x @ w.dequantize().mT, want)
        assert relative(result, want) <= 1.05 * theirs + 1e-5, (config, m, n, k)
        for _ in range(5):
            assert torch.equal(gemmery.linear(x, w, config=config), result), (config, m, n, k)


def codes(kind, n, k, group):
    """A weight of codes with what no format has by itself."""
    groups = -(-k // group)
    scales = torch.rand(n, groups, device="cuda") / 8 + 0.01
    more = {"zeros": torch.randint(0, 16, (n, groups), device="cuda")} if kind == "fp32 scales" else {}
    if kind == "offsets":
        more = {"offsets": torch.randn(n, groups, device="cuda")}
    return from_codes(
        torch.randint(0, 16, (n, k), dtype=torch.uint8, device="cuda"), "int4", group_size=group, dtype=torch.bfloat16,
        scales=scales if kind == "fp32 scales" else scales.bfloat16(), **more,
    )  # fmt: skip


#: Tiles of 4 bits whose stages don't fit with all that groups of such a size share.
TOO_LARGE = {
    ("fp32 scales", 16): {(256, 128, 64), (32, 64, 256)},
    ("fp32 scales", 32): {(32, 64, 256)},
    ("offsets", 16): {(32, 64, 256)},
}


@pytest.mark.parametrize("group", [16, 32, 64, 256, 4096])
@pytest.mark.parametrize("kind", ["plain", "offsets", "fp32 scales"])
def test_codes(kind, group):
    rng("specialized codes", kind, group)
    m, n, k = 200, 1000, 4096
    x, w = values((m, k), torch.bfloat16), codes(kind, n, k, group)
    want = wide(x) @ w.dequantize(torch.float64).mT
    theirs = relative(x @ w.dequantize().mT, want)
    for config in configs("packed4"):
        if (config.block_m, config.block_n, config.block_k) in TOO_LARGE.get((kind, group), ()):
            with pytest.raises(ValueError, match="shared memory"):
                gemmery.linear(x, w, config=config)
            continue
        assert relative(gemmery.linear(x, w, config=config), want) <= 1.05 * theirs + 1e-5, config


@pytest.mark.parametrize("config", ["", "-k2", "-k3"])
@pytest.mark.parametrize("steps", [1, 3, 4, 7])
@pytest.mark.parametrize("stages", [2, 8])
def test_turns_with_any_number_of_steps(stages, steps, config):
    """Many tiles a program, of few steps: who has which of them changes from tile to tile."""
    rng("turns", stages, steps, config)
    config = gemmery.Config.of(f"16x64x256-g1-w8-s{stages}-specialized-descriptor{config}-swap")
    k = 256 * steps
    for m, n in ((600, 4104), (16, 4104), (40, 6000)):
        x, w = values((m, k), torch.bfloat16), weight("int4", n, k, torch.bfloat16)
        want = wide(x) @ w.dequantize(torch.float64).mT
        theirs = relative(x @ w.dequantize().mT, want)
        result = gemmery.linear(x, w, config=config)
        assert relative(result, want) <= 1.05 * theirs + 1e-5, (m, n)
        for _ in range(20):
            assert torch.equal(gemmery.linear(x, w, config=config), result), (m, n)


def test_large_scales_in_a_last_group():
    """What lies behind the last group is not a number times its scale, which could be infinite."""
    k = 192
    x, w = values((130, k), torch.float16) / 1e4, values((256, k), torch.float32)
    w[:, 128:] *= 6e4 / w.abs().max()
    packed = gemmery.quantize(w, "int4", group_size=64, dtype=torch.float16)
    want = wide(x) @ packed.dequantize(torch.float64).mT
    for config in configs("packed4"):
        assert relative(gemmery.linear(x, packed, config=config), want) <= 2e-3, config


def test_graphs_and_streams_have_parts_of_their_own():
    config = next(config for config in configs("packed4") if config.split_k == 2)
    w = weight("int4", 4096, 4096, torch.bfloat16)
    x, other = values((256, 4096), torch.bfloat16), values((256, 4096), torch.bfloat16)
    right, wrong = gemmery.linear(x, w, config=config), gemmery.linear(other, w, config=config)
    graph, given = torch.cuda.CUDAGraph(), other.clone()
    with torch.cuda.graph(graph):
        made = gemmery.linear(given, w, config=config)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    for _ in range(20):
        given.copy_(x)
        graph.replay()
        with torch.cuda.stream(stream):
            beside = gemmery.linear(other, w, config=config)
        assert torch.equal(gemmery.linear(x, w, config=config), right)
        stream.synchronize()
        assert torch.equal(beside, wrong)
        assert torch.equal(made, right)


EPILOGUES = {
    "gelu": (lambda x, r: F.gelu(x), False),
    "residual": (lambda x, r: x + r, True),
    "two results": (lambda x, r: (F.silu(x), x * r), True),
}


@pytest.mark.parametrize("name", EPILOGUES)
@pytest.mark.parametrize("kind", ["packed4", "packed8"])
def test_epilogues(kind, name):
    rng("specialized epilogues", kind, name)
    m, n, k = 300, 1000, 1024
    function, reads = EPILOGUES[name]
    bias, other = values((n,), torch.bfloat16), matrix(m, n, torch.bfloat16)
    a = values((m, k), torch.bfloat16)
    b = weight("int4" if kind == "packed4" else "int8", n, k, torch.bfloat16)
    product = wide(a) @ b.dequantize(torch.float64).mT
    want = function(product + wide(bias), wide(other))
    epilogue = gemmery.epilogue(function if reads else lambda x: function(x, None))
    for config in configs(kind):
        got = gemmery.linear(
            a, b, bias=bias, epilogue=epilogue, args=(other,) if reads else (), config=config
        )
        mine, right = (x if isinstance(x, tuple) else (x,) for x in (got, want))
        for one, that in zip(mine, right, strict=True):
            assert relative(one, that) <= 4e-3, config


@pytest.mark.parametrize("kind", ["int4", "int4 32", "int4 64 zeros", "int8", "e4m3", "nvfp4"])
def test_halves(kind):
    r = rng("specialized halves", kind)
    for config in configs(f"packed{FORMATS[KINDS[kind][0]].bits}"):
        m, n, k = (
            r.choice((1, 130, 300, 513)),
            2 * r.choice((64, 176, 1008, 2064)),
            r.choice((256, 1024, 4096)),
        )
        x, w = values((m, k), torch.bfloat16), weight(kind, n, k, torch.bfloat16)
        gate, up = (wide(x) @ w.dequantize(torch.float64).mT).chunk(2, -1)
        result = gemmery.linear(x, w, epilogue=epilogues.swiglu, config=config)
        assert relative(result, F.silu(gate) * up) <= 4e-3, (config, m, n, k)
        assert torch.equal(gemmery.linear(x, w, epilogue=epilogues.swiglu, config=config), result)


def test_it_is_chosen_for_many_rows():
    x, w = values((4096, 4096), torch.bfloat16), weight("int4", 4096, 4096, torch.bfloat16)
    assert gemmery.plan(x, w).config.schedule == "specialized"
