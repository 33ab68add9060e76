"""Routing and combining on the GPU: sizes of models, graphs that are replayed with other ids, the same bits each run."""

import pytest
import torch

from gemmery.moe import combine, route
from gemmery.moe import routing as moe
from tests.gpu.common import DEVICE, DRY, ROUNDING, needs_cuda, values, wide

pytestmark = pytest.mark.gpu

HALVES, F32, F64 = (torch.float16, torch.bfloat16), torch.float32, torch.float64
#: Tokens, choices and groups: those of decoding, of training, and at the border between the two ways of sorting.
SIZES = [
    (1, 8, 128), (64, 8, 128), (256, 10, 512), (708, 8, 128), (709, 8, 128), (4096, 8, 128), (32768, 8, 128),
    (131072, 8, 1100), (999_999, 1, 1), (33333, 3, 7), (4096, 4, 3000), (7, 3, 100_000), (20000, 2, 100_000),
]  # fmt: skip


def ids_of(tokens, k, groups, skew=1.0):
    """Random ids, more of them among the first groups the larger the skew; a few outside."""
    ids = (torch.rand(tokens, k, device=DEVICE) ** skew * (groups + 2)).long() - 1
    return ids.clamp(-1, groups)


def assert_routed(ids, groups):
    want = moe.reference_route(ids.cpu(), groups)
    made = route(ids, groups)
    for name, got, meant in zip(made._fields, made[:-1], want, strict=False):
        assert torch.equal(got.cpu(), meant), name
    return made


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("skew", [1.0, 6.0])
@pytest.mark.parametrize(("tokens", "k", "groups"), SIZES)
def test_routing(tokens, k, groups, skew, dtype):
    if DRY:
        tokens, groups = min(tokens, 100), min(groups, 100)
    assert_routed(ids_of(tokens, k, groups, skew).to(dtype), groups)


@pytest.mark.parametrize("tokens", [64, 32768])
def test_routing_of_any_strides(tokens):
    ids = ids_of(64 if DRY else tokens, 16, 64)
    for view in (ids.t().contiguous().t(), ids[::2, 3::2], ids[:, :1].expand(-1, 4), ids.int()[1::2, :5]):
        assert_routed(view, 64)


@pytest.mark.parametrize("dtype", [*HALVES, F32, F64], ids=str)
@pytest.mark.parametrize(
    ("tokens", "k", "columns"), [(1, 8, 2048), (64, 8, 7168), (500, 19, 100), (4096, 8, 2880)]
)
def test_combining(tokens, k, columns, dtype):
    if DRY:
        tokens, columns = min(tokens, 16), min(columns, 200)
    routing = route(ids_of(tokens, k, 40), 40)
    y, w = values((tokens * k, columns), dtype), torch.rand(tokens, k, device=DEVICE)
    end = int(routing.offs[-1])
    y[end:] = float("nan")
    rows = routing.inverse.long()
    here = (rows < end).reshape(tokens, k)
    parts = torch.where((rows < end).unsqueeze(1), wide(y)[rows], 0).reshape(tokens, k, columns)
    for weights in (None, w):
        factors = here.double() if weights is None else torch.where(here, weights.double(), 0)
        want, most = ((factors.unsqueeze(1) @ x).squeeze(1) for x in (parts, parts.abs()))
        bound = ROUNDING[dtype] * want.abs() + 2 * k * ROUNDING[F64 if dtype == F64 else F32] * most + 1e-7
        assert ((wide(combine(y, routing, weights)) - want).abs() <= bound).all()


@pytest.mark.parametrize("dtype", [*HALVES, F32], ids=str)
def test_gradients(dtype):
    tokens, k, columns = (16, 8, 200) if DRY else (512, 8, 2048)
    routing = route(ids_of(tokens, k, 40), 40)
    y, w = values((tokens * k, columns), dtype).requires_grad_(), torch.rand(tokens, k, device=DEVICE)
    w.requires_grad_()
    grad = values((tokens, columns), dtype)
    of_y, of_w = torch.autograd.grad(combine(y, routing, w), (y, w), grad)
    where = (routing.inverse, routing.offs)
    assert torch.equal(of_y, moe.reference_spread(grad, w.detach(), *where, k))
    want = moe.reference_dots(grad.double(), y.detach().double(), *where, k, F64)
    torch.testing.assert_close(of_w.double(), want, rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize("tokens", [64, 8192])
def test_the_same_bits_each_run(tokens):
    tokens, columns = (16, 200) if DRY else (tokens, 2048)
    ids, w = ids_of(tokens, 8, 128), torch.rand(tokens, 8, device=DEVICE, requires_grad=True)
    y = values((tokens * 8, columns), torch.bfloat16).requires_grad_()

    def run():
        routing = route(ids, 128)
        out = combine(y, routing, w)
        return *routing[:-1], out, *torch.autograd.grad(out, (y, w), out.detach())

    first = run()
    for _ in range(1 if DRY else 10):
        for x, again in zip(first, run(), strict=True):
            assert torch.equal(x, again)


@needs_cuda
@pytest.mark.parametrize("tokens", [64, 8192])
def test_a_graph_is_replayed_with_other_ids(tokens):
    groups = 128
    ids, w = ids_of(tokens, 8, groups), torch.rand(tokens, 8, device=DEVICE)
    y = values((tokens * 8, 1024), torch.bfloat16)
    combine(y, route(ids, groups), w)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        routing = route(ids, groups)
        out = combine(y, routing, w)
    for skew in (1.0, 4.0, 20.0):
        ids.copy_(ids_of(tokens, 8, groups, skew))
        y.copy_(values(y.shape, y.dtype))
        for x in (*routing[:-1], out):
            x.fill_(-1)
        graph.replay()
        again = route(ids, groups)
        for x, want in zip((*routing[:-1], out), (*again[:-1], combine(y, again, w)), strict=True):
            assert torch.equal(x, want)
        assert_routed(ids, groups)


@needs_cuda
def test_nothing_waits_for_the_gpu():
    ids, w = ids_of(64, 8, 128), torch.rand(64, 8, device=DEVICE, requires_grad=True)
    y = values((512, 256), torch.bfloat16).requires_grad_()
    combine(y, route(ids, 128), w).sum().backward()
    torch.cuda.set_sync_debug_mode("error")
    try:
        combine(y, route(ids, 128), w).sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@needs_cuda
def test_compiled():
    def block(ids, y, w):
        routing = route(ids, 128)
        return combine(y * 2, routing, w), routing.offs

    compiled = torch.compile(block, fullgraph=True)
    for tokens in (16, 200):
        given = (
            ids_of(tokens, 8, 128),
            values((tokens * 8, 256), torch.bfloat16),
            torch.rand(tokens, 8, device=DEVICE),
        )
        for x, want in zip(compiled(*given), block(*given), strict=True):
            assert torch.equal(x, want)


@needs_cuda
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one GPU")
def test_a_gpu_that_is_not_the_current_one():
    ids = ids_of(64, 8, 128).to("cuda:1")
    y = torch.randn(512, 64, device="cuda:1")
    routing = assert_routed(ids, 128)
    want = moe.reference_combine(y, None, routing.inverse, routing.offs, 64, 8)
    torch.testing.assert_close(combine(y, routing), want)
