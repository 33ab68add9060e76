"""Block-sparse products in the interpreter, against dense ones in float64: patterns, sizes, tiles, types, gradients."""

import pytest
import torch
from torch.nn import functional as F

import gemmery
from gemmery import Config, epilogues
from gemmery.formats.blocks import Stored
from gemmery.operands import BlocksOperand, DenseOperand
from gemmery.product.gradients import plain_product
from gemmery.product.spec import Options
from tests.blocks import SIZES, mask_of, random_matrix, sparse, values_at, whole

F32 = torch.float32
TOLERANCES = {F32: 1e-5, torch.float64: 1e-11, torch.bfloat16: 2e-2, torch.float16: 3e-3}
silu_of = gemmery.epilogue(F.silu)


def close(ours, theirs, dtype=F32):
    """Whether a result is that of float64, beside the largest of its numbers."""
    assert ours.dtype == dtype
    assert ours.shape == theirs.shape
    return (ours.double() - theirs.double()).abs().max() <= TOLERANCES[
        dtype
    ] * theirs.double().abs().max() + 1e-30


@pytest.mark.parametrize("block", SIZES)
@pytest.mark.parametrize("kind", ["linear", "second", "first", "transposed"])
def test_products(kind, block):
    torch.manual_seed(0)
    w, dense, _ = random_matrix(3, 4, block)
    wide, x, y = dense.double(), torch.randn(37, 4 * block), torch.randn(37, 3 * block)
    if kind == "linear":
        assert close(gemmery.linear(x, w), x.double() @ wide.T)
    elif kind == "second":
        assert close(gemmery.matmul(y, w), y.double() @ wide)
    elif kind == "first":
        assert close(gemmery.matmul(w, x.T), wide @ x.double().T)
    else:
        # torch's transpose is in BSC.
        assert close(gemmery.matmul(x, w.t()), x.double() @ wide.T)
        assert close(gemmery.matmul(w.t(), y.T), wide.T @ y.double().T)


#: Tiles with parts of blocks, by both loaders and schedules, of blocks of 64.
TILES = [
    "64x64x64-g8-w4-s2-persistent-descriptor",
    "128x64x32-g8-w4-s2-tile-descriptor",
    "32x32x64-g2-w4-s2-tile-descriptor",
    "16x64x64-g1-w4-s2-tile-descriptor-swap",
    "64x32x16-g8-w4-s2-tile-pointer",
    "32x16x32-g8-w4-s2-persistent-pointer",
    "64x64x64-g8-w4-s2-persistent-descriptor/2",
]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("text", TILES)
@pytest.mark.parametrize("op", ["linear", "matmul"])
@pytest.mark.parametrize("is_b", [True, False])
def test_tiles(text, op, is_b):
    torch.manual_seed(0)
    w, dense, _ = random_matrix(4, 5, 64, seed=3)
    config = Config.of(text)
    if not is_b:
        config = Config.of(config.asdict() | {"block_m": config.block_n, "block_n": config.block_m})
    if is_b:
        # In BSR or, transposed, in the other order of stored blocks.
        x = torch.randn(150, 320 if op == "linear" else 256)
        made = getattr(gemmery, op)(x, w, config=config)
        assert close(made, x.double() @ (dense.double().T if op == "linear" else dense.double()))
    else:
        a, wide = (w, dense.double()) if op == "matmul" else (w.t(), dense.double().T)
        b = torch.randn(a.shape[1], 152)
        assert close(gemmery.matmul(a, b, config=config), wide @ b.double())


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("block", [16, 64])
def test_types(block, dtype):
    torch.manual_seed(0)
    w, dense, _ = random_matrix(3, 4, block, dtype=dtype)
    x = torch.randn(21, 4 * block).to(dtype)
    assert close(gemmery.linear(x, w), x.double() @ dense.double().T, dtype)
    b = x.T.contiguous()
    assert close(gemmery.matmul(w, b), dense.double() @ b.double(), dtype)


@pytest.mark.parametrize(
    "density", [pytest.param(0.0, id="nothing stored"), pytest.param(1.1, id="everything stored")]
)
def test_full_and_empty_patterns(density):
    torch.manual_seed(0)
    w, dense, _ = random_matrix(3, 2, 16, density, gaps=False)
    x, bias = torch.randn(5, 32), torch.randn(48)
    assert close(gemmery.linear(x, w, bias), x.double() @ dense.double().T + bias.double())
    sampled = gemmery.sampled_addmm(w, torch.randn(48, 8), torch.randn(8, 32))
    assert sampled.values().shape == w.values().shape


def test_what_is_not_stored_is_not_read():
    """Rows of K without a block may hold anything, and a line without a block is 0."""
    torch.manual_seed(0)
    w, dense, mask = random_matrix(4, 4, 16, 0.4)
    x = torch.randn(20, 64)
    x[:, whole(~mask.any(0)[None], 16)[0]] = torch.nan
    made = gemmery.linear(x, w)
    assert close(made, torch.nan_to_num(x.double()) @ dense.double().T)
    assert bool((made[:, :16] == 0).all())


@pytest.mark.parametrize("shape", [(2, 3, 7), (5, 1), (0, 4), (2, 0)])
def test_batches_of_dense_operands(shape):
    torch.manual_seed(0)
    w, dense, _ = random_matrix(3, 4, 16)
    x = torch.randn(*shape, 64)
    assert (
        close(gemmery.linear(x, w), x.double() @ dense.double().T)
        if x.numel()
        else gemmery.linear(x, w).shape == (*shape, 48)
    )
    if x.numel():
        apart = torch.randn(*shape, 128)[..., ::2].transpose(0, -2)
        assert close(gemmery.linear(apart, w), apart.double() @ dense.double().T)
        b = x.mT
        assert close(gemmery.matmul(w, b), dense.double() @ b.double())
        assert close(
            gemmery.matmul(w, b[:1].expand(3, *b.shape[1:])),
            (dense.double() @ b[:1].double()).expand(3, *b.shape[1:-2], 48, b.shape[-1]),
        )


def test_epilogues_and_prologues():
    torch.manual_seed(0)
    w, dense, _ = random_matrix(3, 4, 32)
    x, bias, residual, shift = torch.randn(37, 128), torch.randn(96), torch.randn(37, 96), torch.randn(128)
    product = x.double() @ dense.double().T
    assert close(gemmery.linear(x, w, bias, epilogue=F.silu), F.silu(product + bias.double()))
    made = gemmery.linear(x, w, bias, epilogue=lambda acc, r: torch.relu(acc) + r, args=(residual,))
    assert close(made, torch.relu(product + bias.double()) + residual.double())
    made, sums = gemmery.linear(x, w, epilogue=lambda acc: (acc, acc.sum(-1)))
    assert close(made, product)
    assert close(sums, product.sum(-1))
    made = gemmery.linear(x, w, prologue=lambda x, s: torch.cos(x + s), prologue_args=(shift,))
    assert close(made, torch.cos(x.double() + shift.double()) @ dense.double().T)
    b = torch.randn(128, 26)
    made = gemmery.matmul(w, b, bias=torch.ones(26), epilogue=epilogues.swiglu)
    gate, up = (dense.double() @ b.double() + 1).chunk(2, -1)
    assert close(made, F.silu(gate) * up)


def test_halves_of_sparse_columns_are_refused():
    w, _, _ = random_matrix(4, 4, 16)
    with pytest.raises(ValueError, match=r"block-sparse; .*halves"):
        gemmery.linear(torch.randn(8, 64), w, epilogue=epilogues.swiglu)


def test_a_config_that_does_not_fit_the_blocks():
    w, _, _ = random_matrix(4, 4, 32)
    for text in (
        "64x64x32-g8-w4-s2-tile-pointer",
        "64x32x64-g8-w4-s2-tile-pointer",
        "64x32x32-g8-w4-s2-tile-pointer-k2",
    ):
        with pytest.raises(ValueError, match=r"blocks of 32x32|split_k"):
            gemmery.linear(torch.randn(8, 128), w, config=text)


def gradients(function, tensors, cotangent=None):
    """A result and the gradients of tensors."""
    made = function(*tensors)
    cotangent = torch.ones_like(made) if cotangent is None else cotangent
    return made, torch.autograd.grad(made, tensors, cotangent.to(made.dtype))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("block", [16, 64])
@pytest.mark.parametrize("kind", ["linear", "epilogue", "second", "first", "batch"])
def test_gradients(kind, block):
    torch.manual_seed(0)
    _, dense, mask = random_matrix(3, 4, block)
    values = values_at(dense, mask)
    x, bias = torch.randn(2, 9, 4 * block), torch.randn(3 * block)
    inside = whole(mask, block, torch.float64)

    def ours(x, values, bias):
        w = sparse(values, mask)
        if kind in ("linear", "epilogue"):
            return gemmery.linear(x, w, bias, epilogue=silu_of if kind == "epilogue" else None)
        if kind == "second":
            return gemmery.matmul(x[..., : 3 * block], w) + bias[0]
        b = x.mT if kind == "batch" else x[0].T
        return gemmery.matmul(w, b, bias=bias[:9])

    def theirs(x, dense, bias):
        w = dense * inside
        if kind in ("linear", "epilogue"):
            y = F.linear(x, w, bias)
            return F.silu(y) if kind == "epilogue" else y
        if kind == "second":
            return x[..., : 3 * block] @ w + bias[0]
        return w @ (x.mT if kind == "batch" else x[0].T) + bias[:9]

    given = [t.clone().requires_grad_() for t in (x, values, bias)]
    wide = [t.double().requires_grad_() for t in (x, dense, bias)]
    cotangent = torch.randn(theirs(*wide).shape)
    made, found = gradients(ours, given, cotangent)
    expected, (of_x, of_dense, of_bias) = gradients(theirs, wide, cotangent)
    assert close(made, expected)
    for y, z in zip(found, (of_x, values_at(of_dense, mask), of_bias), strict=True):
        assert close(y, z)


def test_gradients_of_sparse_tensors():
    """A sparse leaf has a sparse gradient."""
    torch.manual_seed(0)
    w, _, mask = random_matrix(3, 4, 16)
    w.requires_grad_()
    x = torch.randn(9, 64)
    (found,) = torch.autograd.grad(gemmery.linear(x, w).sum(), w)
    assert found.layout == torch.sparse_bsr
    expected = values_at((torch.ones(9, 48).T @ x).double(), mask)
    assert close(found.values(), expected)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("block", [16, 64])
@pytest.mark.parametrize(("alpha", "beta"), [(1, 0), (1, 1), (2.5, 0), (0.5, -2.0)])
@pytest.mark.parametrize("transposed", [False, True])
def test_sampled_addmm(alpha, beta, block, transposed):
    torch.manual_seed(0)
    _, dense, mask = random_matrix(3, 4, block)
    values, a, b = values_at(dense, mask), torch.randn(3 * block, 23), torch.randn(23, 4 * block)
    inside = whole(mask, block, torch.float64)

    def ours(values, a, b):
        pattern = sparse(values, mask)
        if not transposed:
            return gemmery.sampled_addmm(pattern, a, b, alpha=alpha, beta=beta).values()
        made = gemmery.sampled_addmm(pattern.t(), b.T, a.T, alpha=alpha, beta=beta)
        assert made.layout == torch.sparse_bsc
        return made.t().values()

    def theirs(dense, a, b):
        return (beta * dense + alpha * (a @ b)) * inside

    given = [t.clone().requires_grad_() for t in (values, a, b)]
    wide = [t.double().requires_grad_() for t in (dense, a, b)]
    made = ours(*given)
    expected = theirs(*wide)
    assert close(made, values_at(expected, mask))
    cotangent = torch.randn(expected.shape)
    found = torch.autograd.grad(made, given, values_at(cotangent, mask), allow_unused=True)
    of_dense, of_a, of_b = torch.autograd.grad(expected, wide, cotangent.double())
    if beta:
        assert close(found[0], values_at(of_dense, mask))
    assert close(found[1], of_a)
    assert close(found[2], of_b)


def test_sampled_addmm_does_not_read_what_beta_leaves_out():
    w, _, mask = random_matrix(3, 4, 16)
    nothing = sparse(torch.full_like(w.values(), torch.nan), mask)
    made = gemmery.sampled_addmm(nothing, torch.ones(48, 8), torch.ones(8, 64), beta=0)
    assert bool((made.values() == 8).all())


@pytest.mark.parametrize("is_b", [True, False])
def test_second_derivatives(is_b):
    """Of the operands themselves: torch's sparse tensors have none with respect to the values that they are made of."""
    torch.manual_seed(0)
    mask = mask_of(2, 3, 0.6, gaps=False)
    pattern = sparse(torch.ones(int(mask.sum()), 16, 16), mask)
    indices = pattern.crow_indices(), pattern.col_indices()
    values = torch.randn(pattern.values().shape, dtype=torch.float64, requires_grad=True)
    x = torch.randn(3, 32 if is_b else 48, dtype=torch.float64, requires_grad=True)

    def multiply(x, values):
        blocks = BlocksOperand(Stored(values, *indices, (2, 3), True), is_b)
        left, right = (x, blocks) if is_b else (blocks, DenseOperand(x.T))
        return plain_product(left, right, Options())

    assert torch.autograd.gradcheck(multiply, (x, values), fast_mode=True)
    assert torch.autograd.gradgradcheck(multiply, (x, values), fast_mode=True)


def test_repeated_calls_follow_the_tensors():
    """What is remembered of a call is given other values, other rows and another pattern."""
    torch.manual_seed(0)
    first, dense, _ = random_matrix(3, 4, 16, seed=1)
    second, other, _ = random_matrix(3, 4, 16, seed=2)
    x, y = torch.randn(9, 64), torch.randn(9, 64)
    for _ in range(2):
        for z, w, wide in ((x, first, dense), (y, first, dense), (x, second, other)):
            assert close(gemmery.linear(z, w, epilogue=silu_of), F.silu(z.double() @ wide.double().T))
    first.values().mul_(2)
    assert close(gemmery.linear(x, first), 2 * x.double() @ dense.double().T)
    # The same memory with other places: the blocks of the last row move to the first one.
    ends = first.crow_indices()
    ends[1:3] = ends[3]
    values, places = first.values(), first.col_indices()
    wide = torch.zeros(48, 64, dtype=torch.float64)
    for value, place in zip(values, places.tolist(), strict=True):
        wide[:16, 16 * place : 16 * place + 16] += value.double()
    assert close(gemmery.linear(x, first), x.double() @ wide.T)


def test_out():
    torch.manual_seed(0)
    w, dense, _ = random_matrix(3, 4, 16)
    x, out = torch.randn(9, 64), torch.empty(48, 9).T
    assert gemmery.linear(x, w, out=out) is out
    assert close(out, x.double() @ dense.double().T)


def test_batch_invariance():
    torch.manual_seed(0)
    w, _, _ = random_matrix(3, 4, 16)
    x = torch.randn(70, 64)
    whole_batch = gemmery.linear(x, w, batch_invariant=True)
    assert torch.equal(gemmery.linear(x[:3], w, batch_invariant=True), whole_batch[:3])


def test_autocast():
    torch.manual_seed(0)
    w, dense, _ = random_matrix(3, 4, 16)
    x = torch.randn(9, 64)
    with torch.autocast("cpu", torch.bfloat16):
        made = gemmery.linear(x, w)
    assert close(made, x.double() @ dense.double().T, torch.bfloat16)
