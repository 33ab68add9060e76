"""Packed weights with K shared by warps: right in every format at ragged sizes, and the same every time."""

from functools import partial

import pytest
import torch
from torch.nn import functional as F

import gemmery
from gemmery import Config, schedules
from gemmery.devices import current
from gemmery.lab.abstract import linear_problem
from gemmery.schedules.sliced_k import SLICED_K
from gemmery.tuning.workers import Target, Workers
from tests.gpu.common import HALVES, on_hopper, rng, values, wide
from tests.gpu.test_any_width import PACKED, by_ordinary_launch, packed_product

pytestmark = on_hopper(SLICED_K, "sliced_k")

#: With one bundle and several, with warps that have units of two, and with K cut.
TILES = (
    "8x16x128-g1-w8-s3-sliced_k-pointer-swap", "8x64x128-g1-w4-s3-sliced_k-pointer-swap",
    "8x48x128-g1-w16-s3-sliced_k-pointer-k2-swap", "8x96x128-g1-w8-s3-sliced_k-pointer-k3-swap",
    "8x224x128-g1-w16-s3-sliced_k-pointer-swap", "8x128x128-g1-w4-s3-sliced_k-pointer-swap",
)  # fmt: skip
LARGE = "8x128x128-g1-w4-s3-sliced_k-pointer-k3-swap"


def case(name, dtype):
    """A product with a packed weight, and its problem; N and K divide by nothing."""
    r = rng("sliced k", name, dtype)
    return packed_product(name, dtype, r.randint(1, 8), 8 * r.randint(2, 200), 8 * r.randint(16, 800))


@pytest.fixture(scope="module")
def cases():
    found = {(name, dtype): case(name, dtype) for name in PACKED for dtype in HALVES}
    with Workers(Target.active()) as workers:
        asked = [
            workers.submit(problem, Config.of(text))
            for _, _, problem in found.values()
            for text in TILES
            if SLICED_K.refusal(problem, Config.of(text)) is None
        ]
        assert [future.result() for future in asked] == [None] * len(asked)
    return found


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("name", PACKED)
def test_formats(name, dtype, cases):
    x, weight, problem = cases[name, dtype]
    want = wide(x) @ weight.dequantize(torch.float64).mT
    theirs = (wide(x @ weight.dequantize().mT) - want).norm() / want.norm()
    taken = [text for text in TILES if SLICED_K.refusal(problem, Config.of(text)) is None]
    assert len(taken) >= 2
    for text in taken:
        torch.full_like(want, torch.nan, dtype=dtype)
        result = gemmery.linear(x, weight, config=text)
        assert (wide(result) - want).norm() / want.norm() <= 1.05 * theirs + 1e-5, text
        for _ in range(5):
            assert torch.equal(gemmery.linear(x, weight, config=text), result), text
        assert torch.equal(by_ordinary_launch(partial(gemmery.linear, x, weight, config=text)), result), text


@pytest.mark.parametrize("M", [1, 7, 8, 20])
def test_epilogues_and_more_rows_than_a_tile(M):
    x, w = values((M, 1000), torch.bfloat16), values((333, 1000), torch.float32) / 4
    weight, bias = gemmery.quantize(w, "int4", dtype=torch.bfloat16), values((333,), torch.bfloat16)
    sum_ = wide(x) @ weight.dequantize(torch.float64).mT + wide(bias)
    for text in TILES:
        for epilogue in (None, F.gelu):
            want = sum_ if epilogue is None else epilogue(sum_)
            result = gemmery.linear(x, weight, bias, epilogue=epilogue, config=text)
            assert (wide(result) - want).norm() / want.norm() <= 4e-3, (text, epilogue)


def test_many_launches_on_two_streams_and_in_a_graph():
    x, w = values((5, 4096), torch.bfloat16), values((2048, 4096), torch.float32) / 4
    weight = gemmery.quantize(w, "int4", dtype=torch.bfloat16)
    first = gemmery.linear(x, weight, config=LARGE)
    streams = [torch.cuda.Stream() for _ in range(2)]
    torch.cuda.synchronize()
    found = []
    for _ in range(100):
        for stream in streams:
            with torch.cuda.stream(stream):
                found.append(gemmery.linear(x, weight, config=LARGE))
    torch.cuda.synchronize()
    assert all(torch.equal(each, first) for each in found)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = gemmery.linear(x, weight, config=LARGE)
    for _ in range(100):
        graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(captured, first)


def test_it_is_chosen_for_few_rows():
    x = values((2, 4096), torch.bfloat16)
    weight = gemmery.quantize(values((32768, 4096), torch.float32), "int4", dtype=torch.bfloat16)
    problem = linear_problem(x.to("meta"), weight.to("meta"), current(torch.device("cuda")))
    chosen = gemmery.select.candidates(problem)[0]
    assert schedules.of(chosen.schedule) is SLICED_K
