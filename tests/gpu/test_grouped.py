"""Products of groups: every case with gradients in 16 bits, random groups in every tile, and one graph for many groups."""

from itertools import pairwise

import pytest
import torch
from torch.nn import functional as F

import gemmery
from gemmery import Config, epilogues, schedules
from gemmery.devices import current
from gemmery.lab.fused_targets import grouped_problem
from tests.gpu.common import DEVICE, HALVES, needs_cuda, size, values, wide
from tests.grouped import ACCUMULATED, CASES, KINDS, accumulated, close, compared, ends_of, rows_of, scaled

pytestmark = pytest.mark.gpu

SIZES = {"M": 200, "N": 136, "K": 264}
BF16 = torch.bfloat16


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("name", CASES)
def test_results_and_gradients(name, dtype):
    for ours, theirs in compared(CASES[name], SIZES, dtype, DEVICE):
        assert close(ours, theirs, dtype)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("kind", ACCUMULATED)
def test_gradients_that_are_added_to_others(kind, dtype):
    for ours, theirs in accumulated(kind, dtype, DEVICE):
        assert close(ours, theirs, dtype)


def random_counts(rng, rows, groups, how):
    counts = [0] * groups
    live = {
        "all": range(groups),
        "some": [g for g in range(groups) if rng.random() < 0.5] or [0],
        "one": [0],
    }[how]
    for _ in range(rows):
        counts[rng.choice(live)] += 1
    return counts


CONFIGS = [
    None,
    "128x192x64-g0-w8-s4-cooperative-descriptor",
    "64x256x64-g0-w8-s4-pingpong-descriptor",
    "128x192x64-g0-w8-s4-pingpong-descriptor",
    "176x128x64-g0-w8-s5-pingpong-descriptor-swap",
    "192x160x64-g0-w12-s4-cooperative-descriptor",
    "104x128x64-g0-w8-s4-cooperative-descriptor-swap",
    "16x128x64-g0-w8-s6-cooperative-descriptor-swap",
    "64x96x64-g0-w4-s5-cooperative-descriptor",
    "128x256x64-g8-w8-s3-tile-descriptor/2",
    "16x128x128-g8-w4-s3-tile-descriptor-swap",
    "64x64x64-g8-w4-s3-tile-pointer",
]
#: Of a weight's gradient.
RANGES = [
    None,
    "128x192x64-g0-w8-s4-cooperative-descriptor",
    "192x128x64-g0-w8-s4-cooperative-descriptor-swap",
    "64x128x64-g0-w4-s4-cooperative-descriptor",
    "128x192x64-g0-w8-s4-pingpong-descriptor",
    "192x128x64-g0-w8-s4-pingpong-descriptor-swap",
    "64x64x64-g8-w4-s3-tile-pointer",
    "64x128x32-g8-w4-s3-tile-pointer-k3",
    "128x128x64-g8-w8-s3-tile-pointer/2-k8-swap",
]


def usable(text, problem):
    if text is not None and (
        reason := schedules.of(Config.of(text).schedule).refusal(problem, Config.of(text))
    ):
        pytest.skip(reason)


@pytest.mark.parametrize("how", ["all", "some", "one"])
@pytest.mark.parametrize("groups", [1, 7, 130, 512, 1100])
@pytest.mark.parametrize("config", CONFIGS)
def test_groups_of_rows(config, groups, how, seeded):
    rows, behind = seeded.choice([1, 77, size(1500)]), seeded.choice([0, 3, 150])
    N, K = 16 * seeded.randrange(1, 20), 16 * seeded.randrange(1, 20)
    usable(config, grouped_problem(rows + behind, groups, N, K, device=current(torch.device(DEVICE))))
    offs = ends_of(random_counts(seeded, rows, groups, how), DEVICE)
    x, w, b = values((rows + behind, K), BF16), values((groups, N, K), BF16), values((groups, N), BF16)
    x[rows:] = torch.nan
    y = gemmery.grouped_linear(x, w, b, offs=offs, epilogue=F.silu, config=config)
    x[rows:] = 0
    expected = rows_of(wide(x), offs, lambda r, g: F.silu(r @ wide(w[g]).T + wide(b[g])))
    assert close(y, expected, BF16)
    assert (y[rows:] == 0).all()
    for _ in range(3):
        assert torch.equal(gemmery.grouped_linear(x, w, b, offs=offs, epilogue=F.silu, config=config), y)


@pytest.mark.parametrize("how", ["all", "some", "one"])
@pytest.mark.parametrize("groups", [1, 7, 130, 512, 600])
@pytest.mark.parametrize("config", RANGES)
def test_ranges_of_k(config, groups, how, seeded):
    rows, behind = seeded.choice([1, 77, size(1500)]), seeded.choice([0, 3, 150])
    M, N = 16 * seeded.randrange(1, 20), 16 * seeded.randrange(1, 20)
    if config is not None and "descriptor" in config:
        usable(config, grouped_problem(rows, groups, M, M, device=current(torch.device(DEVICE))))
    offs = ends_of(random_counts(seeded, rows, groups, how), DEVICE)
    a, b = values((rows + behind, M), BF16), values((rows + behind, N), BF16)
    a[rows:], b[rows:] = torch.nan, torch.inf
    y = gemmery.grouped_mm(a.mT, b, offs=offs, config=config)
    ends = [0, *offs.tolist()]
    expected = torch.stack([wide(a[i:j]).T @ wide(b[i:j]) for i, j in pairwise(ends)])
    assert close(y, expected, BF16)
    assert torch.equal(gemmery.grouped_mm(a.mT, b, offs=offs, config=config), y)


@pytest.mark.parametrize("format", ["int4", "int8", "mxfp4", "nvfp4", "e4m3"])
@pytest.mark.parametrize("rows", [60, 700])
def test_packed_weights(format, rows, seeded):
    groups, N, K = 9, 256, 512
    offs = ends_of(random_counts(seeded, rows, groups, "some"), DEVICE)
    x = values((rows + 5, K), BF16)
    w = gemmery.quantize(values((groups, N, K), torch.float32) / 8, format)
    exact = w.dequantize(torch.float64)
    z = rows_of(wide(x), offs, lambda r, g: r @ exact[g].T)
    assert close(gemmery.grouped_linear(x, w, offs=offs), z, BF16)
    gate, up = z.chunk(2, -1)
    assert close(gemmery.grouped_linear(x, w, offs=offs, epilogue=epilogues.swiglu), F.silu(gate) * up, BF16)


@pytest.mark.parametrize("gathers", [False, True])
@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("kinds", [("row", "row"), ("tensor", "row"), *KINDS], ids="-".join)
def test_scaled_operands(kinds, dtype, gathers, seeded):
    if dtype == torch.int8 and "1x32" in kinds:
        pytest.skip("scales of 32 columns are for fp8")
    groups, rows, tokens = seeded.choice([1, 9, 130]), seeded.choice([3, 77, 1500]), 300
    N, K = 16 * seeded.randrange(1, 30), 16 * seeded.randrange(1, 40)
    offs = ends_of(random_counts(seeded, rows, groups, "some"), DEVICE)
    gather = torch.randint(tokens, (rows + 5,), dtype=torch.int32, device=DEVICE) if gathers else None
    x = scaled(kinds[0], (tokens if gathers else rows + 5, K), dtype, DEVICE)
    weight = scaled(kinds[1], (groups, N, K), dtype, DEVICE)
    bias = values((groups, N), torch.float32)
    exact, full = x.dequantize(torch.float64), weight.dequantize(torch.float64)
    exact = exact[gather.long()] if gathers else exact
    expected = rows_of(exact, offs, lambda r, g: r @ full[g].T + wide(bias[g]))
    for _ in range(2):
        y = gemmery.grouped_linear(x, weight, bias, offs=offs, gather=gather, out_dtype=torch.float32)
        assert close(y, expected, torch.float32)


@pytest.mark.parametrize("gathers", [False, True])
def test_prologue(gathers, seeded):
    groups, rows, tokens, N, K = 9, 700, 300, 256, 512
    offs = ends_of(random_counts(seeded, rows, groups, "some"), DEVICE)
    gather = torch.randint(tokens, (rows,), dtype=torch.int32, device=DEVICE) if gathers else None
    x, w = values((tokens if gathers else rows, K), BF16), values((groups, N, K), BF16)
    y = gemmery.grouped_linear(x, w, offs=offs, gather=gather, prologue=F.silu)
    given = F.silu(x.float()).to(BF16)
    given = given[gather.long()] if gathers else given
    assert close(y, rows_of(wide(given), offs, lambda r, g: r @ wide(w[g]).T), BF16)


@needs_cuda
@pytest.mark.parametrize("rows", [64, 3000])
def test_one_graph_for_many_groups(rows, seeded):
    """Forward and backward, with the bits of eager calls."""
    groups, N, K = 40, 256, 320
    x, w = values((rows, K), BF16).requires_grad_(), values((groups, N, K), BF16).requires_grad_()
    grad, offs = values((rows, N // 2), BF16), ends_of([0] * groups, DEVICE)

    def step():
        y = gemmery.grouped_linear(x, w, offs=offs, epilogue=epilogues.swiglu)
        return y, *torch.autograd.grad(y, (x, w), grad)

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for _ in range(200 if rows < 1000 else 20):
        offs.copy_(ends_of(random_counts(seeded, seeded.randrange(rows + 1), groups, "some")))
        graph.replay()
        for ours, eager in zip(captured, step(), strict=True):
            assert torch.equal(ours, eager)


@needs_cuda
def test_more_elements_than_32_bits_count():
    groups, N, K = 70, 8192, 4096
    free, _ = torch.cuda.mem_get_info()
    if free < 12 << 30:
        pytest.skip("needs 12 GB")
    w = torch.empty(groups, N, K, dtype=BF16, device=DEVICE).normal_()
    x = values((groups, K), BF16)
    offs = torch.arange(1, groups + 1, dtype=torch.int32, device=DEVICE)
    y = gemmery.grouped_linear(x, w, offs=offs)
    for g in (0, groups - 1):
        assert close(y[g], wide(x[g]) @ wide(w[g]).T, BF16)
