"""2:4 sparse weights by `mma.sp`: right against float64 in every tile, at sizes that suit none, the same bits each time."""

import math
from functools import partial

import pytest
import torch
from torch.nn import functional as F

import gemmery
from gemmery import Config, epilogues
from gemmery.devices import ARCHS
from gemmery.schedules.sliced_sparse import SLICED_SPARSE
from gemmery.select.space import tiles_of
from tests.gpu.common import DEVICE, DRY, HALVES, needs_cuda, rng, values, wide
from tests.gpu.test_any_width import by_ordinary_launch
from tests.gpu.test_sparse import assert_right, full, weight

NAME = SLICED_SPARSE.name


def runs_here():
    if DRY or not torch.cuda.is_available() or not SLICED_SPARSE.available():
        return False
    major, minor = torch.cuda.get_device_capability()
    return f"sm_{major}{minor}" in SLICED_SPARSE.archs


pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not runs_here(), reason=f"{NAME} needs a GPU with mma.sp, and another Triton"),
]

TILES = sorted({
    str(x.config)
    for arch in ("sm_80", "sm_90")
    for x in tiles_of(ARCHS[arch].family, "sparse")
    if x.config.schedule == NAME
})  # fmt: skip
#: For up to 8, 16 and 64 rows, and one that is cut along K.
SMALL, MIDDLE, LARGE = (
    f"8x32x512-g1-w4-s2-{NAME}-pointer-swap", f"16x64x256-g1-w4-s2-{NAME}-pointer-k3-swap",
    f"64x128x256-g1-w8-s2-{NAME}-pointer-swap",
)  # fmt: skip


def check(x, w, config, want, **more):
    """Result amid poison: right, and the same bits each time."""
    shape = (x.shape[0], want.shape[1])
    out = torch.full(shape, math.nan, dtype=x.dtype, device=DEVICE)
    gemmery.linear(x, w, out=out, config=config, **more)
    assert_right(out, x, w, want)
    for _ in range(5):
        assert gemmery.linear(x, w, config=config, **more).equal(out)


@pytest.mark.parametrize("cut", [1, 2, 4])
@pytest.mark.parametrize("text", TILES)
def test_every_tile(text, cut):
    r = rng("mma.sp tile", text, cut)
    config = Config.of(text.removesuffix("-swap") + (f"-k{cut}" if cut > 1 else "") + "-swap")
    m, n, k = r.randint(1, config.block_m), r.randint(1, 2000), 4 * r.randint(1, 2000)
    dtype = r.choice(HALVES)
    x, w = values((m, k), dtype), weight(n, k, dtype)
    check(x, w, config, wide(x) @ full(w).T)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("text", [SMALL, MIDDLE, LARGE])
@pytest.mark.parametrize(
    "shape", [(1, 32, 64), (8, 8192, 8192), (17, 1, 4), (64, 1000, 2052), (70, 33, 100)], ids=str
)
def test_sizes(shape, text, dtype):
    rng("mma.sp sizes", shape, text, dtype)
    m, n, k = shape
    x, w = values((m, k), dtype), weight(n, k, dtype)
    check(x, w, text, wide(x) @ full(w).T)


@pytest.mark.parametrize("m", range(1, 65, 3))
def test_rows(m):
    rng("mma.sp rows", m)
    x, w = values((m, 1024), torch.bfloat16), weight(480, 1024, torch.bfloat16)
    for text in (SMALL, MIDDLE, LARGE):
        check(x, w, text, wide(x) @ full(w).T)


@pytest.mark.parametrize(("first", "row"), [(0, 520), (1, 513), (8, 1024), (3, 700)])
def test_strides(first, row):
    """Rows that begin anywhere, and an output whose columns are adjacent."""
    rng("mma.sp strides", first, row)
    x = values((13, row), torch.bfloat16)[:, first : first + 508]
    w = weight(200, 508, torch.bfloat16)
    want = wide(x) @ full(w).T
    check(x, w, MIDDLE, want)
    out = torch.full((200, 13), math.nan, dtype=torch.bfloat16, device=DEVICE).t()
    gemmery.linear(x, w, out=out, config=MIDDLE)
    assert_right(out, x, w, want)


@pytest.mark.parametrize("text", [SMALL, MIDDLE, LARGE])
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_epilogues(dtype, text):
    rng("mma.sp epilogues", dtype, text)
    m, n, k = 11, 488, 444
    x, w, bias, r = values((m, k), dtype), weight(n, k, dtype), values((n,), dtype), values((m, n), dtype)
    product = wide(x) @ full(w).T
    check(x, w, text, F.gelu(product + wide(bias)), bias=bias, epilogue=F.gelu)
    check(x, w, text, product + wide(bias) + wide(r), bias=bias, epilogue=epilogues.residual, args=(r,))


@pytest.mark.parametrize("n", [128, 1088, 4096])
@pytest.mark.parametrize("text", [MIDDLE, LARGE])
def test_swiglu(text, n):
    rng("mma.sp swiglu", text, n)
    x, w = values((15, 772), torch.bfloat16), weight(n, 772, torch.bfloat16)
    product = wide(x) @ full(w).T
    want = F.silu(product[:, : n // 2]) * product[:, n // 2 :]
    check(x, w, text, want, epilogue=epilogues.swiglu)


def test_what_is_refused():
    x, w = values((4, 256), torch.bfloat16), weight(96, 256, torch.bfloat16)
    with pytest.raises(ValueError, match="multiple of 64"):
        gemmery.linear(x, w, epilogue=epilogues.swiglu, config=SMALL)
    with pytest.raises(ValueError, match="order of a sum"):
        gemmery.linear(x, w, batch_invariant=True, config=SMALL)


def test_both_launches_give_the_same():
    rng("mma.sp launches")
    x, w = values((5, 1024), torch.bfloat16), weight(480, 1024, torch.bfloat16)
    for text in (SMALL, MIDDLE):
        call = partial(gemmery.linear, x, w, config=text)
        assert call().equal(by_ordinary_launch(call))


@needs_cuda
def test_graph():
    rng("mma.sp graph")
    x, w = values((5, 1024), torch.bfloat16), weight(2048, 1024, torch.bfloat16)
    want = gemmery.linear(x, w, config=MIDDLE)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = gemmery.linear(x, w, config=MIDDLE)
    for _ in range(200):
        graph.replay()
    assert out.equal(want)


def test_it_is_taken_untuned_where_it_was_measured():
    x, w = values((5, 1024), torch.bfloat16), weight(2048, 1024, torch.bfloat16)
    plan = gemmery.plan(x, w)
    assert (plan.config.schedule == NAME) == SLICED_SPARSE.is_chosen_on(plan.problem.device.target)
    many = values((70, 1024), torch.bfloat16)
    assert gemmery.plan(many, w).config.schedule != NAME
