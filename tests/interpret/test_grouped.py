"""Products of groups in the interpreter: every case with its gradients, types, layouts, tiles and odd groups."""

import gc

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

import gemmery
from gemmery import epilogues
from gemmery.product import gradients
from tests.grouped import (
    ACCUMULATED,
    BEHIND,
    CASES,
    COUNTS,
    GROUPS,
    KINDS,
    ROWS,
    accumulated,
    added_products,
    close,
    compared,
    ends_of,
    ranges_of,
    rows_of,
    scaled,
)  # fmt: skip

SIZES = {"M": 19, "N": 24, "K": 33}
F32 = torch.float32


@pytest.mark.sampled(5)
@pytest.mark.parametrize("name", CASES)
def test_results_and_gradients(name):
    for ours, theirs in compared(CASES[name], SIZES, F32):
        assert close(ours, theirs, F32)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["bias", "gather", "ranges of K"])
def test_types(name, dtype):
    for ours, theirs in compared(CASES[name], SIZES, dtype):
        assert ours.dtype == dtype
        assert close(ours, theirs, dtype)


def test_eight_bit_numbers():
    torch.manual_seed(0)
    offs = ends_of(COUNTS)
    x = torch.randint(-128, 128, (ROWS, 48), dtype=torch.int8)
    w = torch.randint(-128, 128, (GROUPS, 32, 48), dtype=torch.int8)
    y = gemmery.grouped_linear(x, w, offs=offs)
    assert y.dtype == torch.int32
    assert torch.equal(y, rows_of(x.long(), offs, lambda r, g: r @ w[g].long().T).int())


@pytest.mark.parametrize(
    "counts",
    [
        pytest.param([0] * 5, id="no rows"), pytest.param([9], id="one group"),
        pytest.param([0, 0, 40, 0], id="one that has everything"), pytest.param([1] * 30, id="a row each"),
        pytest.param([3, 0, 1] * 400, id="1200 groups", marks=pytest.mark.exhaustive),
    ],
)  # fmt: skip
def test_groups(counts):
    """No rows at all, one group, one that has everything, and more groups than are looked at together."""
    torch.manual_seed(0)
    offs = ends_of(counts)
    x, w = torch.randn(sum(counts) + 2, 17), torch.randn(len(counts), 8, 17)
    y = gemmery.grouped_linear(x, w, offs=offs)
    expected = rows_of(x.double(), offs, lambda r, g: r @ w[g].double().T)
    assert close(y, expected, F32)
    assert (y[-2:] == 0).all()
    a, b = torch.randn(6, sum(counts)), torch.randn(sum(counts), 8)
    if sum(counts):
        products = gemmery.grouped_mm(a, b, offs=offs)
        empty = torch.tensor(counts) == 0
        assert (products[empty] == 0).all()
        assert torch.allclose(products.sum(0), a @ b, atol=1e-4)


@pytest.mark.parametrize("shape", [(0, 5, 3, 4), (6, 0, 3, 4), (6, 5, 0, 4), (6, 5, 3, 0)], ids=str)
def test_nothing(shape):
    """No group, no column of K, no column of the result, no row."""
    N, K, G, R = shape
    y = gemmery.grouped_linear(
        torch.randn(R, K), torch.randn(G, N, K), offs=torch.zeros(G, dtype=torch.int32)
    )
    assert y.shape == (R, N)
    assert (y == 0).all()


def test_rows_behind_the_last_group_are_not_read():
    offs = ends_of(COUNTS)
    x, w, b = torch.randn(ROWS, 16), torch.randn(GROUPS, 8, 16), torch.randn(GROUPS, 8)
    x[-BEHIND:] = torch.nan
    y = gemmery.grouped_linear(x, w, b, offs=offs, epilogue=epilogues.gelu)
    assert y.isfinite().all()
    assert (y[-BEHIND:] == 0).all()
    gather = torch.arange(ROWS, dtype=torch.int32)
    gather[-BEHIND:] = 1 << 30
    assert torch.equal(gemmery.grouped_linear(x, w, b, offs=offs, gather=gather, epilogue=epilogues.gelu), y)


def test_their_gradients_are_zero():
    offs = ends_of(COUNTS)
    x, w = torch.randn(ROWS, 16, requires_grad=True), torch.randn(GROUPS, 8, 16, requires_grad=True)
    y = gemmery.grouped_linear(x, w, offs=offs, epilogue=epilogues.silu)
    grad = torch.randn(ROWS, 8)
    grad[-BEHIND:] = torch.nan
    y.backward(grad)
    assert (x.grad[-BEHIND:] == 0).all()
    assert w.grad.isfinite().all()
    assert (w.grad[torch.tensor(COUNTS) == 0] == 0).all()


def test_every_result_is_zero_behind_the_last_group():
    offs = ends_of(COUNTS)
    x, w = torch.randn(ROWS, 16), torch.randn(GROUPS, 8, 16)
    results = gemmery.grouped_linear(x, w, offs=offs, epilogue=lambda y: (y, y + 1, (y * y).sum(-1)))
    for result in results:
        assert (result[-BEHIND:] == 0).all()
    expected = rows_of(x, offs, lambda r, g: r @ w[g].T)
    torch.testing.assert_close(results[1][:-BEHIND], expected[:-BEHIND] + 1)
    torch.testing.assert_close(results[2], expected.square().sum(-1))


@pytest.mark.parametrize("config", ["16x16x16-g1-w4-s2-tile-pointer", "32x16x16-g2-w4-s2-tile-pointer/2", "16x32x16-g8-w4-s2-tile-pointer-swap"])  # fmt: skip
def test_tiles(config):
    offs = ends_of(COUNTS)
    x, w, b = torch.randn(ROWS, 40), torch.randn(GROUPS, 56, 40), torch.randn(GROUPS, 56)
    y = gemmery.grouped_linear(x, w, b, offs=offs, config=config)
    expected = rows_of(x.double(), offs, lambda r, g: r @ w[g].double().T + b[g].double())
    assert close(y, expected, F32)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("layout", ["x transposed", "x every second", "weight (G, K, N)", "weight shared"])
def test_layouts(layout):
    offs = ends_of(COUNTS)
    x, w = torch.randn(ROWS, 32), torch.randn(GROUPS, 16, 32)
    if layout == "x transposed":
        x = x.T.contiguous().T
    elif layout == "x every second":
        x = torch.randn(ROWS, 64)[:, ::2]
    elif layout == "weight (G, K, N)":
        w = w.mT.contiguous().mT
    else:
        w = w[:1].expand_as(w)
    out = torch.empty(32, ROWS).T[:, ::2]
    y = gemmery.grouped_linear(x, w, offs=offs, out=out)
    assert y is out
    assert close(y, rows_of(x.double(), offs, lambda r, g: r @ w[g].double().T), F32)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("format", ["int4", "int8", "mxfp4", "e4m3"])
def test_packed_weights(format):
    offs = ends_of(COUNTS)
    x = torch.randn(ROWS, 128).bfloat16()
    w = gemmery.quantize(torch.randn(GROUPS, 64, 128) / 8, format)
    y = gemmery.grouped_linear(x, w, offs=offs)
    exact = w.dequantize(torch.float64)
    assert close(y, rows_of(x.double(), offs, lambda r, g: r @ exact[g].T), torch.bfloat16)
    y = gemmery.grouped_linear(x, w, offs=offs, epilogue=epilogues.swiglu)
    z = rows_of(x.double(), offs, lambda r, g: r @ exact[g].T)
    gate, up = z.chunk(2, -1)
    assert close(y, torch.nn.functional.silu(gate) * up, torch.bfloat16)
    x.requires_grad_()
    gemmery.grouped_linear(x, w, offs=offs).float().sum().backward()
    assert close(
        x.grad, rows_of(torch.ones(ROWS, 64).double(), offs, lambda r, g: r @ exact[g]), torch.bfloat16
    )


def test_sparse_weights():
    offs = ends_of(COUNTS)
    x = torch.randn(ROWS, 128).bfloat16()
    w = gemmery.sparsify(torch.randn(GROUPS, 64, 128) / 8)
    exact = w.dense(torch.float64)
    z = rows_of(x.double(), offs, lambda r, g: r @ exact[g].T)
    assert close(gemmery.grouped_linear(x, w, offs=offs), z, torch.bfloat16)
    assert close(gemmery.grouped_mm(x, w, offs=offs), z, torch.bfloat16)
    y = gemmery.grouped_linear(x, w, offs=offs, epilogue=epilogues.swiglu)
    gate, up = z.chunk(2, -1)
    assert close(y, torch.nn.functional.silu(gate) * up, torch.bfloat16)
    x.requires_grad_()
    gemmery.grouped_linear(x, w, offs=offs).float().sum().backward()
    assert close(
        x.grad, rows_of(torch.ones(ROWS, 64).double(), offs, lambda r, g: r @ exact[g]), torch.bfloat16
    )


def test_a_call_sees_other_groups():
    """What is remembered of a call does not hold the groups."""
    x, w = torch.randn(20, 16), torch.randn(3, 8, 16)
    for counts in ([20, 0, 0], [0, 5, 9], [1, 2, 3], [0, 0, 20]):
        offs = ends_of(counts)
        y = gemmery.grouped_linear(x, w, offs=offs)
        assert close(y, rows_of(x.double(), offs, lambda r, g: r @ w[g].double().T), F32)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "config",
    [
        "32x32x16-g2-w4-s2-tile-pointer-k2", "32x16x16-g8-w4-s2-tile-pointer-k5", "16x32x16-g8-w4-s2-tile-pointer-k3-swap",
        "64x64x32-g8-w4-s2-tile-pointer/2-k4",
    ],
)  # fmt: skip
@pytest.mark.parametrize(
    "counts", [(5, 0, 70, 0, 12), (0, 0, 200), (100,), (0, 0), (1,) * 9, (33, 90, 0, 1, 64, 64, 64)], ids=str
)
def test_ranges_that_are_cut(counts, config):
    """Into as many parts as each needs, and each result has the same bits every time."""
    torch.manual_seed(0)
    offs = ends_of(counts)
    a, b = torch.randn(sum(counts) + 3, 40), torch.randn(sum(counts) + 3, 56)
    a[sum(counts) :], b[sum(counts) :] = torch.nan, torch.inf
    for _ in range(2):
        y = gemmery.grouped_mm(a.mT, b, offs=offs, config=config)
        assert close(y, ranges_of(a.double().mT, b.double(), offs), F32)
        assert torch.equal(gemmery.grouped_mm(a.mT, b, offs=offs, config=config), y)


def test_a_range_has_the_same_bits_beside_others():
    torch.manual_seed(0)
    a, b, how = torch.randn(300, 24), torch.randn(300, 40), "32x32x16-g2-w4-s2-tile-pointer-k3"
    y = gemmery.grouped_mm(a.mT, b, offs=ends_of((50, 150, 60)), config=how)
    z = gemmery.grouped_mm(a.mT, b, offs=ends_of((20, 30, 150)), config=how)
    assert torch.equal(y[1], z[2])


def test_ends_that_are_not_in_order_read_nothing_outside(monkeypatch):
    """A GPU is not asked whether they are; here the check is left out."""
    from gemmery import grouped
    from gemmery.operands import Groups

    monkeypatch.setattr(grouped, "_groups", lambda op, x, offs, axis, most, count=None: Groups(x, offs, axis))
    x, w = torch.randn(20, 16), torch.randn(3, 8, 16)
    around = torch.full((60, 8), torch.nan)
    cut = "16x16x16-g8-w4-s2-tile-pointer-k3"
    a, b, right = torch.randn(8, 200), torch.randn(200, 8), torch.tensor([50, 50, 200], dtype=torch.int32)
    want = ranges_of(a.double(), b.double(), right)
    for ends in ([9, 4, 900], [-9, 4, 5], [-(1 << 31), (1 << 31) - 1, 0], [200, 0, 200], [190, 60, 200]):
        offs = torch.tensor(ends, dtype=torch.int32)
        gemmery.grouped_linear(x, w, offs=offs, out=around[20:40])
        assert around[:20].isnan().all()
        assert around[40:].isnan().all()
        assert gemmery.grouped_mm(torch.randn(8, 20), x, offs=offs).isfinite().all()
        # Parts that meet are counted, and no count is left behind.
        gemmery.grouped_mm(a, b, offs=offs, config=cut)
        assert close(gemmery.grouped_mm(a, b, offs=right, config=cut), want, F32)


@pytest.mark.parametrize("scale", ["row", "tensor"])
@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_scaled_operands(dtype, scale):
    torch.manual_seed(0)
    offs, tokens = ends_of(COUNTS), 9
    gather = torch.randint(tokens, (ROWS,), dtype=torch.int32)
    a, w = (torch.randint(-9, 9, shape).to(dtype) for shape in ((tokens, 64), (GROUPS, 32, 64)))
    scales = (
        [torch.rand(tokens, 1), torch.rand(GROUPS, 32, 1)]
        if scale == "row"
        else [torch.rand(()), torch.rand(1)]
    )
    x, weight = gemmery.ScaledTensor(a, scales[0]), gemmery.ScaledTensor(w, scales[1])
    bias = torch.randn(GROUPS, 32)
    exact, full = x.dequantize(torch.float64)[gather.long()], weight.dequantize(torch.float64)
    for _ in range(2):
        y = gemmery.grouped_linear(x, weight, bias, offs=offs, gather=gather, epilogue=epilogues.swiglu)
        z = rows_of(exact, offs, lambda r, g: r @ full[g].T + bias[g].double())
        z[-BEHIND:] = 0
        gate, up = z.chunk(2, -1)
        assert y.dtype == torch.bfloat16
        assert close(y, torch.nn.functional.silu(gate) * up, torch.bfloat16)


def test_scaled_operands_without_columns():
    """Also the second time, when the call is known."""
    x = scaled("1x128", (ROWS, 0), torch.float8_e4m3fn)
    w = scaled("128x128", (GROUPS, 24, 0), torch.float8_e4m3fn)
    for _ in range(3):
        assert (gemmery.grouped_linear(x, w, offs=ends_of(COUNTS)) == 0).all()


@pytest.mark.sampled(5)
@pytest.mark.parametrize("gathers", [False, True])
@pytest.mark.parametrize("kinds", KINDS, ids="-".join)
def test_scales_of_blocks(kinds, gathers):
    """A tile of a group may begin at any row, and so in the middle of rows that share a scale."""
    torch.manual_seed(0)
    counts, K = (140, 0, 17, 3), 200
    offs, rows, tokens = ends_of(counts), sum(counts) + BEHIND, 150
    gather = torch.randint(tokens, (rows,), dtype=torch.int32) if gathers else None
    dtype = torch.float8_e4m3fn if "1x32" in kinds else torch.int8
    x = scaled(kinds[0], (tokens if gathers else rows, K), dtype)
    weight = scaled(kinds[1], (len(counts), 136, K), dtype)
    bias = torch.randn(len(counts), 136)
    exact, full = x.dequantize(torch.float64), weight.dequantize(torch.float64)
    exact = exact[gather.long()] if gathers else exact
    if gathers:
        gather[-BEHIND:] = 1 << 30
    expected = rows_of(exact, offs, lambda r, g: r @ full[g].T + bias[g].double())
    for _ in range(2):
        y = gemmery.grouped_linear(x, weight, bias, offs=offs, gather=gather, out_dtype=F32)
        assert close(y, expected, F32)


@pytest.mark.parametrize("split", ["", "/2"])
def test_halves_of_scaled_tiles(split):
    """A tile whose halves are summed one after the other clears both where rows lie behind the last group."""
    torch.manual_seed(0)
    offs = ends_of(COUNTS)
    x, weight = scaled("1x128", (ROWS, 256), torch.int8), scaled("128x128", (GROUPS, 128, 256), torch.int8)
    exact, full = x.dequantize(torch.float64), weight.dequantize(torch.float64)
    out = torch.full((ROWS, 64), torch.nan)
    config = f"16x64x128-g1-w4-s2-tile-pointer{split}"
    y = gemmery.grouped_linear(x, weight, offs=offs, epilogue=epilogues.swiglu, out=out, config=config)
    gate, up = rows_of(exact, offs, lambda r, g: r @ full[g].T).chunk(2, -1)
    assert y is out
    assert close(y, torch.nn.functional.silu(gate) * up, F32)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("gathers", [False, True])
@pytest.mark.parametrize("reads", ["nothing", "columns", "rows", "its closure"])
def test_prologue(reads, gathers):
    torch.manual_seed(0)
    offs, tokens = ends_of(COUNTS), 9
    gather = torch.randint(tokens, (ROWS,), dtype=torch.int32) if gathers else None
    x, w = torch.randn(tokens if gathers else ROWS, 40), torch.randn(GROUPS, 24, 40)
    columns, rows = torch.randn(40), torch.randn(x.shape[0], 1)
    prologue, args = {
        "nothing": (torch.exp, ()),
        "columns": (lambda x, c: torch.tanh(x) * c, (columns,)),
        "rows": (lambda x, r: torch.tanh(x) + r, (rows,)),
        "its closure": (lambda x: x + rows * columns, ()),
    }[reads]
    given = prologue(x.double(), *[y.double() for y in args])
    given = given if gather is None else given[gather.long()]
    expected = rows_of(given, offs, lambda r, g: r @ w[g].double().T)
    for _ in range(2):
        y = gemmery.grouped_linear(x, w, offs=offs, gather=gather, prologue=prologue, prologue_args=args)
        assert close(y, expected, F32)
    x.requires_grad_()
    gemmery.grouped_linear(
        x, w, offs=offs, gather=gather, prologue=prologue, prologue_args=args
    ).sum().backward()
    z = x.detach().double().requires_grad_()
    given = prologue(z, *[y.double() for y in args])
    given = given if gather is None else given[gather.long()]
    rows_of(given, offs, lambda r, g: r @ w[g].double().T).sum().backward()
    assert close(x.grad, z.grad, F32)


def test_rows_have_the_same_bits_in_every_group():
    """Batch-invariant: neither the size of the group nor the other groups have a say."""
    torch.manual_seed(0)
    x, w = torch.randn(40, 64).bfloat16(), torch.randn(3, 32, 64).bfloat16()
    first = gemmery.grouped_linear(x, w, offs=ends_of([40, 0, 0]), batch_invariant=True)
    for counts in ([1, 20, 19], [17, 0, 5], [8, 8, 8]):
        y = gemmery.grouped_linear(x, w, offs=ends_of(counts), batch_invariant=True)
        assert torch.equal(y[: counts[0]], first[: counts[0]])
    alone = gemmery.grouped_linear(x[:1], w, offs=ends_of([1, 0, 0]), batch_invariant=True)
    assert torch.equal(alone, first[:1])


@pytest.mark.sampled(5)
@pytest.mark.parametrize("dtype", [F32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("kind", ACCUMULATED)
def test_gradients_that_are_added_to_others(kind, dtype):
    for ours, theirs in accumulated(kind, dtype):
        assert close(ours, theirs, dtype)


@pytest.mark.parametrize("transposed", [False, True])
def test_products_that_are_added_to_others(transposed):
    for ours, theirs in added_products(transposed):
        assert close(ours, theirs, F32)


def test_a_backward_pass_frees_the_product(monkeypatch):
    """Before the gradients of the weights, which may be large; not if the graph is used again."""
    x, w = torch.randn(20, 16, requires_grad=True), torch.randn(3, 8, 16, requires_grad=True)
    y = gemmery.grouped_linear(x, w, offs=ends_of([9, 0, 11]), epilogue=epilogues.silu)
    saved = StorageWeakRef(y.grad_fn.saved_tensors[-1].untyped_storage())
    products, freed = gradients._of_operands, []

    def spy(*given):
        # The interpreter's own references are cycles.
        gc.collect()
        freed.append(saved.expired())
        return products(*given)

    monkeypatch.setattr(gradients, "_of_operands", spy)
    first = torch.autograd.grad(y.sum(), (x, w), retain_graph=True)
    second = torch.autograd.grad(y.sum(), (x, w))
    assert freed == [False, True]
    assert all(map(torch.equal, first, second))
