"""Block-sparse products on a GPU: every tile, sizes of blocks, types, gradients, and one graph for other values."""

import pytest
import torch
from torch.nn import functional as F

import gemmery
from gemmery import epilogues, select
from gemmery.devices import current
from gemmery.formats import blocks
from gemmery.layout import fold
from gemmery.operands import BlocksOperand, DenseOperand
from tests.blocks import SIZES, random_matrix, sparse, values_at, whole
from tests.gpu.common import DEVICE, HALVES, needs_cuda, size, wide

pytestmark = pytest.mark.gpu

BF16, F32 = torch.bfloat16, torch.float32
TOLERANCES = {BF16: 6e-3, torch.float16: 1e-3, F32: 1e-5, torch.float64: 1e-12}


def close(ours, theirs, dtype):
    """Whether a result is that of float64, by norms."""
    assert ours.dtype == dtype
    assert ours.shape == theirs.shape
    ours, theirs = wide(ours), theirs.double().to(ours.device)
    return (ours.to(theirs) - theirs).norm() <= TOLERANCES[dtype] * theirs.norm() + 1e-30


def normal(*shape, dtype, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(dtype).to(DEVICE)


@pytest.mark.parametrize("dtype", [*HALVES, F32, torch.float64])
@pytest.mark.parametrize("block", SIZES)
@pytest.mark.parametrize("op", ["linear", "second", "first", "transposed"])
def test_products(op, block, dtype):
    w, dense, _ = random_matrix(6, 9, block, 0.4, dtype, DEVICE)
    x, y, full = normal(301, 9 * block, dtype=dtype), normal(301, 6 * block, dtype=dtype), dense.double()
    if op == "linear":
        assert close(gemmery.linear(x, w), x.double() @ full.T, dtype)
    elif op == "second":
        assert close(gemmery.matmul(y, w), y.double() @ full, dtype)
    elif op == "first":
        assert close(gemmery.matmul(w, x.T), full @ x.double().T, dtype)
    else:
        assert close(gemmery.matmul(w.t(), y.T.contiguous()), full.T @ y.double().T, dtype)


def configs_of(x, w, is_b):
    """All configs that the selector may choose."""
    stored = blocks.stored("linear", "weight", w)
    sparse_one = BlocksOperand(stored.mT if is_b else stored, is_b)
    left, right = (DenseOperand(x), sparse_one) if is_b else (sparse_one, DenseOperand(x))
    out = x.new_empty(left.matrix.shape[0], right.matrix.shape[1])
    return select.candidates(fold(left, right, out, [], current(torch.device(DEVICE)))[0])


@pytest.mark.parametrize("block", SIZES)
@pytest.mark.parametrize("is_b", [True, False])
def test_every_tile(block, is_b):
    """With empty lines and lines of many lengths, and a number of rows that no tile divides."""
    n = max(size(4096) // block // 4, 3)
    w, dense, _ = random_matrix(n, n + 3, block, 0.2, BF16, DEVICE, seed=block)
    x = normal(size(1000), (n + 3) * block, dtype=BF16)
    x = x if is_b else x.T.contiguous() if x.shape[0] % 8 == 0 else x.T
    theirs = x.double() @ dense.double().T if is_b else dense.double() @ x.double()
    for config in configs_of(x, w, is_b):
        made = gemmery.linear(x, w, config=config) if is_b else gemmery.matmul(w, x, config=config)
        assert close(made, theirs, BF16), config


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("block", [32, 64, 128])
def test_gradients(block, dtype):
    _, dense, mask = random_matrix(7, 5, block, 0.5, dtype, DEVICE)
    x, bias = normal(2, 150, 5 * block, dtype=dtype), normal(7 * block, dtype=dtype)
    given = [t.clone().requires_grad_() for t in (x, values_at(dense, mask), bias)]
    exact = [t.double().requires_grad_() for t in (x, dense, bias)]
    made = gemmery.linear(given[0], sparse(given[1], mask), given[2], epilogue=F.silu)
    theirs = F.silu(F.linear(exact[0], exact[1] * whole(mask, block).to(DEVICE), exact[2]))
    assert close(made, theirs, dtype)
    cotangent = normal(*made.shape, dtype=dtype)
    found = torch.autograd.grad(made, given, cotangent)
    of_x, of_dense, of_bias = torch.autograd.grad(theirs, exact, cotangent.double())
    for ours, want in zip(found, (of_x, values_at(of_dense, mask), of_bias), strict=True):
        assert (ours.double() - want).norm() <= 3 * TOLERANCES[dtype] * want.norm()


@pytest.mark.parametrize("block", SIZES)
@pytest.mark.parametrize("dtype", [BF16, F32])
def test_sampled_addmm(block, dtype):
    w, dense, mask = random_matrix(6, 9, block, 0.5, dtype, DEVICE)
    a, b = normal(6 * block, 333, dtype=dtype), normal(333, 9 * block, dtype=dtype)
    product = a.double() @ b.double()
    for alpha, beta in ((1, 0), (1, 1), (0.5, 2.0)):
        made = gemmery.sampled_addmm(w, a, b, alpha=alpha, beta=beta)
        assert close(made.values(), values_at(alpha * product + beta * dense.double(), mask), dtype)
    # Operands that TMA loads.
    a, b = normal(6 * block, 320, dtype=dtype), normal(9 * block, 320, dtype=dtype).T
    assert close(
        gemmery.sampled_addmm(w, a, b, beta=0).values(), values_at(a.double() @ b.double(), mask), dtype
    )


def test_batches_and_epilogues():
    w, dense, _ = random_matrix(8, 6, 64, 0.4, BF16, DEVICE)
    b, bias = normal(3, 6 * 64, 200, dtype=BF16), normal(200, dtype=BF16)
    product = dense.double() @ b.double() + bias.double()
    assert close(gemmery.matmul(w, b, bias=bias, epilogue=F.gelu), F.gelu(product), BF16)
    made = gemmery.matmul(w, b, bias=bias, epilogue=epilogues.swiglu)
    gate, up = product.chunk(2, -1)
    assert close(made, F.silu(gate) * up, BF16)
    x, residual = normal(3, 70, 6 * 64, dtype=BF16), normal(3, 70, 8 * 64, dtype=BF16)
    made = gemmery.linear(x, w, epilogue=lambda acc, r: torch.relu(acc) + r, args=(residual,))
    assert close(made, torch.relu(x.double() @ dense.double().T) + residual.double(), BF16)


def test_what_is_not_stored_is_not_read():
    w, dense, mask = random_matrix(5, 6, 64, 0.3, BF16, DEVICE)
    x = normal(100, 6 * 64, dtype=BF16)
    x[:, whole(~mask.any(0)[None], 64)[0].to(DEVICE)] = torch.nan
    made = gemmery.linear(x, w)
    assert close(made, torch.nan_to_num(x.double()) @ dense.double().T, BF16)
    assert bool((made[:, :64] == 0).all())


def test_repeated_calls_take_other_patterns():
    """Patterns of about as many blocks share a plan, and its tensor maps."""
    x = normal(256, 16 * 64, dtype=BF16)
    for seed in range(12):
        w, dense, _ = random_matrix(16, 16, 64, 0.3, BF16, DEVICE, seed=seed)
        for _ in range(2):
            assert close(gemmery.linear(x, w), x.double() @ dense.double().T, BF16)


@needs_cuda
def test_a_graph_with_other_values():
    w, dense, _ = random_matrix(8, 6, 64, 0.4, BF16, DEVICE)
    x = normal(128, 6 * 64, dtype=BF16)
    gemmery.linear(x, w)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = gemmery.linear(x, w)
    x.neg_()
    w.values().mul_(2)
    graph.replay()
    assert close(made, 2 * x.double() @ dense.double().T, BF16)


@needs_cuda
def test_a_new_pattern_in_a_capture_is_an_error():
    w, _, _ = random_matrix(8, 6, 64, 0.4, BF16, DEVICE, seed=77)
    x = normal(128, 6 * 64, dtype=BF16)
    with pytest.raises(RuntimeError, match="the pattern is new"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        gemmery.linear(x, w)
    torch.cuda.synchronize()


@needs_cuda
def test_nothing_waits_for_the_gpu():
    """Forward, and for the gradient of x; torch's own gradient of a sparse tensor's values waits."""
    w, _, _ = random_matrix(8, 6, 64, 0.4, BF16, DEVICE)
    x = normal(128, 6 * 64, dtype=BF16).requires_grad_()
    gemmery.linear(x, w).sum().backward()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(3):
            gemmery.linear(x, w).sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
