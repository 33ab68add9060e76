"""2:4 sparse weights: right against float64 in every tile, with epilogues and halves, the same bits each time."""

import math
from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F

import gemmery
import gemmery.nn
from gemmery import epilogues, schedules
from gemmery.select.space import tiles_of
from tests.gpu.common import DEVICE, DRY, HALVES, needs_cuda, rng, size, values, wide

pytestmark = pytest.mark.gpu

#: M, N and K that suit no tile; the last K has a step of 64 that is not whole.
SHAPES = [
    (1, 64, 64),
    (3, 96, 256),
    (17, 4096, 1024),
    (64, 1000, 2048),
    (129, 544, 4096),
    (777, 1056, 736),
    (2048, 3104, 1312),
]


#: Codes of kept numbers, of int4 with the size of its groups.
CODES = ("", "e4m3", "int8", "int4/0", "int4/32", "int4/128")


def weight(n, k, dtype, batch=(), code=""):
    sparse = gemmery.sparsify(values((*batch, n, k), dtype))
    name, _, size = code.partition("/")
    how = {"group_size": int(size)} if size else {}
    return gemmery.quantize(sparse, name, **how) if code else sparse


def full(w):
    """What a weight stands for, as the kernel has it: its numbers, and the rows' scales behind the sum."""
    return wide(w.dense(torch.float64))


def relative(result, want):
    assert result.isfinite().all()
    return ((wide(result) - want).norm() / want.norm()).item()


def assert_right(result, x, w, want):
    """No worse than torch's own product of the dense weight, but for a twentieth."""
    rounded = wide(want.to(result.dtype))
    theirs = ((rounded - want).norm() / want.norm()).item()
    assert relative(result, want) <= 1.05 * theirs + 1e-4


@pytest.mark.parametrize("code", CODES)
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_linear(shape, dtype, code):
    rng("sparse linear", shape, dtype, code)
    m, n, k = map(size, shape)
    x, w = values((m, k), dtype), weight(n, k // 4 * 4, dtype, code=code)
    x = x[:, : w.shape[-1]].contiguous()
    want = wide(x) @ full(w).T
    result = gemmery.linear(x, w)
    assert_right(result, x, w, want)
    assert all(gemmery.linear(x, w).equal(result) for _ in range(5))


FAMILY = "interpreter" if DRY else "hopper"
KINDS = {"": "sparse", "e4m3": "sparse8", "int4/32": "sparse4", "int4/128": "sparse4"}
TILES = [(code, tile) for code, kind in KINDS.items() for tile in tiles_of(FAMILY, kind)]


def with_parts(tile, random):
    """The tile's config, in two parts if it is a cluster's, which has no fewer, and perhaps if it may have parts."""
    config = tile.config
    if config.schedule == "cluster" or (tile.splits and random.random() < 0.5):
        return replace(config, split_k=2)
    return config


@pytest.mark.parametrize("code, tile", TILES, ids=lambda x: x if isinstance(x, str) else str(x.config))
def test_every_tile(code, tile):
    random = rng("sparse tile", code, str(tile.config))
    if not schedules.of(tile.config.schedule).available():
        pytest.skip("the schedule needs another Triton")
    m = size(tile.config.block_m * random.choice((1, 2)) + random.choice((0, 3)))
    # More than one step of 128 columns: each program of a cluster has at least one.
    n, k = size(32 * random.randint(4, 40)), size(32 * random.randint(5, 40))
    x, w = values((m, k), torch.bfloat16), weight(n, k, torch.bfloat16, code=code)
    want = wide(x) @ full(w).T
    config = with_parts(tile, random)
    out = torch.full((m, n), math.nan, dtype=torch.bfloat16, device=DEVICE)
    gemmery.linear(x, w, out=out, config=config)
    assert_right(out, x, w, want)


def fp8_operands(m, n, k):
    """fp8 activations with a scale for each row, a sparse weight of e4m3, and their product."""
    x = gemmery.quantize_activations(values((m, k), torch.bfloat16), "e4m3")
    w = weight(n, k, torch.bfloat16, code="e4m3")
    return x, w, wide(x.dequantize(torch.float64)) @ full(w).T


#: What sums of fp8 may be off, promoted and as tensor cores have them.
FP8_ERRORS = {False: 3e-4, True: 2e-3}


@pytest.mark.parametrize("fast", (False, True))
@pytest.mark.parametrize("shape", [(m, n, -(-k // 16) * 16) for m, n, k in SHAPES], ids=str)
def test_fp8(shape, fast):
    rng("sparse fp8", shape, fast)
    x, w, want = fp8_operands(*map(size, shape))
    result = gemmery.scaled_matmul(x, w, fast_accum=fast)
    theirs = relative(want.to(result.dtype), want)
    assert relative(result, want) <= 1.05 * theirs + FP8_ERRORS[fast]
    assert all(gemmery.scaled_matmul(x, w, fast_accum=fast).equal(result) for _ in range(5))


TILES_FP8 = [
    (tile, fast)
    for fast in (False, True)
    for tile in tiles_of(FAMILY, "sparse fp8" if fast or DRY else "sparse fp8 accurate")
]


@pytest.mark.parametrize("tile, fast", TILES_FP8, ids=lambda x: str(getattr(x, "config", x)))
def test_every_tile_of_fp8(tile, fast):
    random = rng("sparse fp8 tile", str(tile.config))
    if not schedules.of(tile.config.schedule).available():
        pytest.skip("the schedule needs another Triton")
    m = size(tile.config.block_m * random.choice((1, 2)) + random.choice((0, 3)))
    n, k = size(32 * random.randint(4, 40)), size(128 * random.randint(2, 20))
    x, w, want = fp8_operands(m, n, k)
    config = with_parts(tile, random)
    out = torch.full((m, n), math.nan, dtype=torch.bfloat16, device=DEVICE)
    gemmery.scaled_matmul(x, w, out=out, fast_accum=fast, config=config)
    assert relative(out, want) <= 1.05 * relative(want.to(out.dtype), want) + FP8_ERRORS[fast]


@pytest.mark.parametrize("m", (1, 33, 200))
@pytest.mark.parametrize("n", (128, 1088))
@pytest.mark.parametrize("fast", (False, True))
def test_swiglu_of_fp8(m, n, fast):
    rng("sparse fp8 swiglu", m, n)
    x, w, product = fp8_operands(size(m), n if not DRY else 128, 512)
    want = F.silu(product[:, : w.shape[0] // 2]) * product[:, w.shape[0] // 2 :]
    got = gemmery.scaled_matmul(x, w, epilogue=epilogues.swiglu, fast_accum=fast)
    assert relative(got, want) <= 1.05 * relative(want.to(got.dtype), want) + 2 * FP8_ERRORS[fast]


@pytest.mark.parametrize("m", (1, 16, 100, 1030))
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_epilogues(m, dtype):
    rng("sparse epilogues", m, dtype)
    m, n, k = size(m), 512, 448
    x, w, bias, r = values((m, k), dtype), weight(n, k, dtype), values((n,), dtype), values((m, n), dtype)
    product = wide(x) @ full(w).T
    got = gemmery.linear(x, w, bias, epilogue=F.gelu)
    assert_right(got, x, w, F.gelu(product + wide(bias)))
    got = gemmery.linear(x, w, bias, epilogue=epilogues.residual, args=(r,))
    assert_right(got, x, w, product + wide(bias) + wide(r))


@pytest.mark.parametrize("m", (1, 7, 33, 64, 200, 1500))
@pytest.mark.parametrize("n", (128, 1088, 4096))
@pytest.mark.parametrize("code", ("", "e4m3", "int4/32"))
def test_swiglu(m, n, code):
    rng("sparse swiglu", m, n, code)
    m, n, k = size(m), n if not DRY else 128, 512
    x, w = values((m, k), torch.bfloat16), weight(n, k, torch.bfloat16, code=code)
    product = wide(x) @ full(w).T
    want = F.silu(product[:, : n // 2]) * product[:, n // 2 :]
    got = gemmery.linear(x, w, epilogue=epilogues.swiglu)
    assert_right(got, x, w, want)


def test_gradients():
    rng("sparse gradients")
    m, n, k = size(300), 256, 512
    x, w = values((m, k), torch.bfloat16).requires_grad_(), weight(n, k, torch.bfloat16)
    w.values.requires_grad_()
    y = gemmery.linear(x, w, epilogue=F.silu)
    g = values((m, n), torch.bfloat16)
    y.backward(g)
    xd, wd = wide(x).detach().requires_grad_(), wide(w.dense()).detach().requires_grad_()
    F.silu(xd @ wd.T).backward(wide(g))
    from gemmery.operands.sparse import sampled

    assert relative(x.grad, xd.grad) < 1e-2
    assert relative(w.values.grad, wide(sampled(wd.grad, w))) < 1e-2


@pytest.mark.parametrize("code", ("", "int4/64"))
def test_batch(code):
    rng("sparse batch", code)
    x, w = values((3, size(100), 192), torch.float16), weight(160, 192, torch.float16, (3,), code)
    assert_right(gemmery.bmm(x, w), x, w, wide(x) @ full(w).mT)


@pytest.mark.parametrize("rows", (7, 600))
@pytest.mark.parametrize("code", ("", "int4/64"))
def test_groups(rows, code):
    rng("sparse groups", rows, code)
    rows, n, k = size(rows), 128, 192
    x, w = values((rows, k), torch.bfloat16), weight(n, k, torch.bfloat16, (3,), code)
    ends = [rows // 3, rows // 3, rows]
    offs = torch.tensor(ends, dtype=torch.int32, device=DEVICE)
    dense = wide(w.dense())
    want = torch.cat([wide(x)[: ends[0]] @ dense[0].T, wide(x)[ends[0] :] @ dense[2].T])
    assert_right(gemmery.grouped_linear(x, w, offs=offs), x, w, want)
    want = F.silu(want[:, : n // 2]) * want[:, n // 2 :]
    assert_right(gemmery.grouped_linear(x, w, offs=offs, epilogue=epilogues.swiglu), x, w, want)


@pytest.mark.parametrize("method", ("magnitude", "transposable"))
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float32), ids=str)
def test_a_layer_that_is_trained(method, dtype):
    """Steps of an optimiser: the forward product, both gradients, and a weight that is pruned anew."""
    rng("sparse layer", method, dtype)
    m, n, k = size(1000), 256, 512
    layer = gemmery.nn.SparseLinear(k, n, method=method, dtype=dtype, device=DEVICE)
    optimizer = torch.optim.SGD(layer.parameters(), 0.1)
    for _ in range(3):
        x, grad = values((m, k), dtype).requires_grad_(), values((m, n), dtype)
        y = layer(x)
        y.backward(grad)
        dense = wide(layer.pruned().dense())
        assert relative(y, wide(x.detach()) @ dense.T + wide(layer.bias.detach())) < 1e-2
        assert relative(x.grad, wide(grad) @ dense) < 1e-2
        assert relative(layer.weight.grad, wide(grad).T @ wide(x.detach())) < 1e-2
        optimizer.step()
        optimizer.zero_grad()


@needs_cuda
def test_torch_weights():
    """torch's own compressed weights are taken; of CUTLASS's nothing is copied."""
    rng("sparse torch")
    dense = weight(256, 512, torch.float16).dense()
    theirs = torch.sparse.SparseSemiStructuredTensorCUTLASS.from_dense(dense)
    ours = gemmery.sparsify(theirs)
    assert ours.values.data_ptr() == theirs.packed.data_ptr()
    assert ours.dense().equal(dense)


@needs_cuda
def test_graph():
    rng("sparse graph")
    x, w = values((16, 1024), torch.bfloat16), weight(2048, 1024, torch.bfloat16)
    want = gemmery.linear(x, w)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = gemmery.linear(x, w)
    for _ in range(200):
        graph.replay()
    assert out.equal(want)
