"""Random products on the GPU, in every respect in which calls differ, with canaries around every output."""

from dataclasses import dataclass

import pytest
import torch

import gemmery
from tests.gpu.common import (
    DEVICE,
    DRY,
    DTYPES,
    FP8,
    HALVES,
    Layout,
    assert_product,
    matrix,
    place,
    size,
    some_layout,
    values,
)  # fmt: skip

pytestmark = pytest.mark.gpu

CASES = 150
#: The largest extent of most cases, and of every fifteenth.
EXTENT, LARGE = (150, 200) if DRY else (700, 3000)


@dataclass(frozen=True)
class Case:
    """One call; what it says of itself is what a failure prints."""

    a: torch.Tensor
    b: torch.Tensor
    addend: torch.Tensor | None
    alpha: float
    beta: float
    out_dtype: torch.dtype
    precision: str
    fast_accum: bool

    def __str__(self):
        tensors = {"a": self.a, "b": self.b, "addend": self.addend}
        lines = [
            f"{k}: {tuple(t.shape)} {t.stride()} +{t.data_ptr() % 16} {t.dtype}"
            for k, t in tensors.items()
            if t is not None
        ]
        return "; ".join(
            [*lines, f"{self.alpha=} {self.beta=} {self.out_dtype} {self.precision} {self.fast_accum=}"]
        )


def extent(rand, most):
    return rand.choice(
        (rand.randint(1, most), rand.randint(1, most), rand.choice((1, 16, 17, 64, 65, 128, 129)))
    )


def random_case(rand, large):
    dtype = rand.choice(DTYPES)
    b_dtype = rand.choice(FP8) if dtype in FP8 else dtype
    m, n, k = (extent(rand, LARGE if large else EXTENT) for _ in range(3))
    batch = [] if large else [rand.randint(1, 4) for _ in range(rand.choice((0, 0, 0, 1, 1, 2)))]
    # Each operand has a part of the batch dimensions, with ones where the other decides.
    own = [
        [rand.choice((extent, extent, 1)) for extent in batch][rand.choice((0, 0, len(batch))) :]
        for _ in range(2)
    ]
    a = place((*own[0], m, k), dtype, some_layout(rand, (*own[0], m, k), dtype.itemsize)).view
    b = place((*own[1], k, n), b_dtype, some_layout(rand, (*own[1], k, n), dtype.itemsize)).view
    shape = (*torch.broadcast_shapes(a.shape[:-2], b.shape[:-2]), m, n)
    addend = None
    if rand.random() < 0.6:
        kind = rand.choice(((n,), (n,), (m, n), (m, 1), shape))
        added = rand.choice((torch.int8, torch.int32) if dtype == torch.int8 else (dtype, torch.float32))
        added = torch.bfloat16 if added in FP8 else added
        if added == torch.int32:
            addend = values(kind, torch.int8).to(torch.int32)
        else:
            addend = place(kind, added, some_layout(rand, kind, added.itemsize)).view
    alpha = beta = 1
    if addend is not None and len(shape) == 2 and rand.random() < 0.6:
        factors = (0, 1, -2, 3) if dtype == torch.int8 else (0, 1, -1, 0.1, 2.5)
        alpha, beta = rand.choice(factors), rand.choice(factors)
    if dtype == torch.int8:
        out_dtype = torch.int32
    elif dtype == torch.float64:
        out_dtype = rand.choice((torch.float64, torch.float64, torch.float32))
    else:
        usual = torch.bfloat16 if dtype in FP8 else dtype
        out_dtype = rand.choice((usual, usual, *HALVES, torch.float32))
    precision = rand.choice(("ieee", "tf32", "tf32x3"))
    return Case(a, b, addend, alpha, beta, out_dtype, precision, rand.random() < 0.3)


def compute(case, out, config=None):
    common = {
        "out_dtype": case.out_dtype,
        "precision": case.precision,
        "fast_accum": case.fast_accum,
        "config": config,
    }
    if case.alpha != 1 or case.beta != 1:
        return gemmery.addmm(case.addend, case.a, case.b, alpha=case.alpha, beta=case.beta, out=out, **common)
    return gemmery.matmul(case.a, case.b, bias=case.addend, out=out, **common)


def verify(result, case):
    assert result.dtype == case.out_dtype
    assert_product(
        result, case.a, case.b, case.addend, case.alpha, case.beta, case.precision, case.fast_accum
    )


@pytest.mark.parametrize("index", range(CASES))
def test_random_products(index, seeded):
    case = random_case(seeded, large=index % 15 == 14)
    print(case)
    if seeded.random() < 0.3:
        verify(compute(case, None), case)
        return
    shape = (
        *torch.broadcast_shapes(case.a.shape[:-2], case.b.shape[:-2]),
        case.a.shape[-2],
        case.b.shape[-1],
    )
    placed = place(
        shape, case.out_dtype, some_layout(seeded, shape, case.out_dtype.itemsize, shared=False), filled=False
    )
    assert compute(case, placed.view) is placed.view
    verify(placed.view, case)
    placed.assert_outside_unchanged()


#: Every way through the kernels: schedule, loader, whole or halved stores, every cut of the tail.
CONFIGS = (
    "64x64x32-g8-w4-s3-tile-pointer",
    "16x64x64-g1-w4-s2-tile-pointer",
    "128x64x32-g8-w4-s2-tile-pointer/2",
    "64x64x32-g3-w4-s3-persistent-pointer",
    "64x128x32-g8-w4-s2-persistent-pointer-t2",
    "64x64x64-g3-w4-s3-tile-descriptor",
    "128x64x64-g8-w4-s3-tile-descriptor/2",
    "64x64x64-g8-w4-s3-persistent-descriptor",
    "128x128x64-g4-w8-s3-persistent-descriptor/2",
    "64x64x64-g8-w4-s3-persistent-descriptor-t2",
    "128x128x64-g8-w8-s3-persistent-descriptor-t4",
    "128x128x64-g4-w8-s3-persistent-descriptor/2-t2",
    "128x256x64-g16-w8-s2-persistent-descriptor/2-t4",
    "64x64x32-g8-w4-s3-tile-pointer-k3",
    "128x64x64-g8-w4-s3-tile-descriptor/2-k2",
    "64x64x64-g8-w4-s3-tile-descriptor-k3",
    "64x192x64-g8-w4-s3-tile-descriptor",
    "128x96x32-g8-w4-s3-tile-pointer",
    "128x192x64-g8-w8-s3-tile-descriptor-k2",
    "128x320x64-g8-w8-s3-tile-descriptor/2",
    "16x64x64-g8-w4-s3-tile-descriptor-swap",
    "32x64x64-g8-w4-s3-tile-pointer-k2-swap",
    "64x64x64-g8-w4-s4-tile-descriptor-k3-swap",
    "32x192x64-g8-w4-s3-tile-descriptor-k2-swap",
)


def output(shape, dtype, order="N"):
    """An output with 16-byte strides, row- or column-major, in a buffer of canaries."""
    dims = tuple(range(len(shape)))[::-1]
    dims = dims if order == "N" else (dims[1], dims[0], *dims[2:])
    return place(shape, dtype, Layout(dims, pad=-shape[dims[0]] % 16 + 16), filled=False)


def pinned(config, a, b, addend, alpha, beta, out, **kwargs):
    """One product with a pinned config into guarded memory, checked."""
    if alpha != 1 or beta != 1:
        gemmery.addmm(addend, a, b, alpha=alpha, beta=beta, out=out.view, config=config, **kwargs)
    else:
        gemmery.matmul(a, b, bias=addend, out=out.view, config=config, **kwargs)
    assert_product(out.view, a, b, addend, alpha, beta, **kwargs)
    out.assert_outside_unchanged()


@pytest.mark.parametrize("config", CONFIGS)
def test_every_way_through_the_kernels(config):
    """More tiles than fit at once, a last wave that is not full, ragged edges in all three sizes."""
    m, n, k = size(1608), size(1400), size(200)
    a, b = matrix(m, k, torch.bfloat16), matrix(k, n, torch.bfloat16, "T")
    bias = values((n,), torch.float32)
    pinned(config, a, b, bias, 1, 1, output((m, n), torch.bfloat16))


@pytest.mark.parametrize("config", CONFIGS)
def test_every_way_through_the_kernels_transposed(config):
    """The other loaders: both operands and the output transposed, with factors and a matrix that is added."""
    m, n, k = size(1000), size(1416), size(72)
    a, b = matrix(m, k, torch.float16, "T"), matrix(k, n, torch.float16)
    pinned(config, a, b, matrix(m, n, torch.float16, "T"), 0.5, -2, output((m, n), torch.float16, "T"))


@pytest.mark.parametrize("config", CONFIGS)
def test_every_way_through_the_kernels_batched(config):
    m, n, k = size(520), size(696), size(136)
    a, b = values((3, m, k), torch.bfloat16), values((1, n, k), torch.bfloat16).mT
    # Not one matrix of 3 M rows: the added row differs from batch to batch.
    bias = values((3, 1, n), torch.bfloat16)
    pinned(config, a, b, bias, 1, 1, output((3, m, n), torch.bfloat16))


@pytest.mark.parametrize(
    ("dtype", "block_k", "kwargs"),
    [
        (torch.float32, 32, {"precision": "tf32"}),
        (torch.float32, 32, {"precision": "tf32x3"}),
        (torch.int8, 128, {}),
        (torch.float8_e4m3fn, 128, {}),
        (torch.float8_e5m2, 128, {"fast_accum": True}),
    ],
    ids=str,
)
@pytest.mark.parametrize("schedule", ["tile-pointer", "tile-descriptor", "persistent-descriptor/2-t2"])
def test_every_way_through_the_kernels_by_type(schedule, dtype, block_k, kwargs):
    m, n, k = size(1000), size(1424), size(208)
    a, b = matrix(m, k, dtype), matrix(k, n, dtype, "T")
    out = output(
        (m, n), {1: torch.bfloat16, 4: torch.float32}[dtype.itemsize] if dtype != torch.int8 else torch.int32
    )
    pinned(f"64x64x{block_k}-g8-w4-s2-{schedule}", a, b, None, 1, 1, out, **kwargs)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64, torch.int8], ids=str)
def test_empty_products(dtype):
    """Nothing to sum gives zeros, or what is added; nothing to compute gives an empty result."""
    for m, n, k in ((0, 5, 7), (5, 0, 7), (0, 0, 0)):
        assert gemmery.matmul(matrix(m, k, dtype), matrix(k, n, dtype)).shape == (m, n)
    a, b = matrix(33, 0, dtype), matrix(0, 65, dtype)
    placed = output((33, 65), torch.int32 if dtype == torch.int8 else dtype)
    gemmery.matmul(a, b, out=placed.view)
    assert not placed.view.any()
    placed.assert_outside_unchanged()
    bias = values((65,), dtype)
    added = gemmery.addmm(bias, a, b, beta=2)
    assert torch.equal(added, (bias.to(added.dtype) * 2).expand(33, 65))
    assert gemmery.bmm(torch.empty(0, 3, 4, device=DEVICE), torch.empty(0, 4, 5, device=DEVICE)).shape == (
        0,
        3,
        5,
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_an_addend_that_is_not_read(dtype):
    """With beta 0 the addend may hold NaN; with out as its own addend each element is read before it is written."""
    a, b = matrix(size(300), size(200), dtype), matrix(size(200), size(264), dtype)
    shape = (a.shape[0], b.shape[1])
    assert_product(
        gemmery.addmm(torch.full(shape, torch.nan, dtype=dtype, device=DEVICE), a, b, beta=0), a, b
    )
    out = matrix(*shape, dtype)
    before = out.clone()
    gemmery.addmm(out, a, b, beta=0.5, alpha=2, out=out)
    assert_product(out, a, b, before, 2, 0.5)
