"""Tiles of any width: right at ragged sizes, in every layout, with epilogues, and the same every time."""

from dataclasses import replace
from functools import partial
from typing import NamedTuple

import pytest
import torch
import triton
from torch.nn import functional as F

import gemmery
from gemmery import Config, schedules
from gemmery.devices import current
from gemmery.lab.abstract import linear_problem, of_row
from gemmery.lab.fusions import FUSIONS
from gemmery.lab.inputs import check, make_inputs
from gemmery.lab.suites import Row
from gemmery.schedules.any_width import COOPERATIVE
from gemmery.select.shapes import device_named, problem_of
from gemmery.select.space import kind_of, tiles_of
from gemmery.tuning.workers import Target, Workers
from tests.gpu.common import HALVES, on_hopper, rng, values, wide

pytestmark = on_hopper(COOPERATIVE, "tiles of any width")

TILES = [tile for tile in tiles_of("hopper", "half") if tile.config.schedule in ("cooperative", "pingpong")]
EPILOGUES = {
    "none": lambda a, b, **more: gemmery.matmul(a, b, **more),
    "bias": lambda a, b, **more: gemmery.matmul(a, b, bias=a.new_ones(b.shape[1]), **more),
    "gelu": lambda a, b, **more: gemmery.matmul(a, b, epilogue=F.gelu, **more),
}
WANTED = {"none": lambda x: x, "bias": lambda x: x + 1, "gelu": F.gelu}


def operand(rows, cols, transposed, dtype):
    return values((cols, rows), dtype).t() if transposed else values((rows, cols), dtype)


def by_ordinary_launch(call):
    """The result of a call, launched by Triton, as a hook wants it."""
    seen = []
    hooks = triton.knobs.runtime.launch_enter_hook
    hooks.add(seen.append)
    try:
        result = call()
    finally:
        hooks.remove(seen.append)
    assert seen
    return result


PARTS = range(6)


class Case(NamedTuple):
    """A product, with a config that does not refuse it."""

    m: int
    n: int
    k: int
    layout: str
    dtype: torch.dtype
    config: Config
    epilogue: str

    @property
    def problem(self):
        """The product's problem; with a bias for any epilogue, which leaves the same registers for tiles."""
        return problem_of(
            self.m, self.n, self.k, layout=self.layout, dtype=self.dtype, bias=self.epilogue != "none",
            device=device_named("H200"),
        )  # fmt: skip

    def operands(self):
        a = operand(self.m, self.k, self.layout[0] == "T", self.dtype)
        return a, operand(self.k, self.n, self.layout[1] == "T", self.dtype)


def some_case(r):
    while True:
        tile = r.choice(TILES)
        layout, dtype = r.choice(("NT", "NT", "NN", "TN", "TT")), r.choice(HALVES)
        m, n, k = r.randint(1, 700), 8 * r.randint(2, 90), 8 * r.randint(1, 250)
        m = -(-m // 8) * 8 if layout[0] == "T" else m
        config = replace(tile.config, split_k=r.choice((1, 2, 3, 4))) if tile.splits else tile.config
        case = Case(m, n, k, layout, dtype, config, r.choice(list(EPILOGUES)))
        if schedules.of(config.schedule).refusal(case.problem, config) is None:
            return case


def some_cases(part):
    r = rng("any width", part)
    return [some_case(r) for _ in range(8)]


def compile_ahead(cases, target):
    """Compiles kernels of cases in several processes, so that the tests find them; those of traced epilogues are left."""
    with Workers(target) as workers:
        plain = [case for case in cases if case.epilogue != "gelu"]
        for future in [workers.submit(case.problem, case.config) for case in plain]:
            assert future.result() is None


@pytest.fixture(scope="module")
def cases():
    found = {part: some_cases(part) for part in PARTS}
    compile_ahead([case for own in found.values() for case in own], Target.active())
    return found


@pytest.mark.parametrize("part", PARTS)
def test_random_tiles_and_products(part, cases):
    rng("any width", "values", part)
    for case in cases[part]:
        a, b = case.operands()
        config, epilogue = case.config, case.epilogue
        want = WANTED[epilogue](wide(a) @ wide(b))
        result = torch.full(want.shape, torch.nan, dtype=a.dtype, device="cuda")
        EPILOGUES[epilogue](a, b, out=result, config=config)
        theirs = WANTED[epilogue]((a @ b).to(torch.float64)) - want
        allowed = 1.05 * theirs.abs().max() + want.abs().max() * 2**-8
        assert (result - want).abs().max() <= allowed, (str(config), a.shape, b.shape, epilogue)
        for _ in range(5):
            again = EPILOGUES[epilogue](a, b, config=config)
            assert torch.equal(again, result), (str(config), a.shape, b.shape, epilogue)


@pytest.mark.parametrize("text", [
    "128x144x64-g8-w8-s4-pingpong-descriptor", "64x72x64-g8-w4-s8-cooperative-descriptor",
    "192x144x64-g8-w12-s4-cooperative-descriptor", "112x128x64-g8-w8-s5-pingpong-descriptor-swap",
    "128x176x64-g8-w8-s5-cooperative-descriptor-k2", "72x64x64-g8-w4-s8-cooperative-descriptor-k4-swap",
    "64x128x64-g0-w8-s6-cluster-descriptor-k4-swap", "128x64x64-g0-w8-s6-cluster-descriptor-k3",
])  # fmt: skip
def test_under_load_on_two_streams_and_in_a_graph(text):
    a, b = values((333, 2048), torch.bfloat16), values((600, 2048), torch.bfloat16).t()
    want = gemmery.matmul(a, b, config=text)
    streams = [torch.cuda.Stream() for _ in range(2)]
    outs = [[torch.empty_like(want) for _ in range(50)] for _ in streams]
    torch.cuda.synchronize()
    for i in range(50):
        for stream, mine in zip(streams, outs, strict=True):
            with torch.cuda.stream(stream):
                gemmery.matmul(a, b, out=mine[i], config=text)
    torch.cuda.synchronize()
    assert all(torch.equal(x, want) for mine in outs for x in mine)
    out = torch.empty_like(want)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        gemmery.matmul(a, b, out=out, config=text)
    for _ in range(200):
        out.fill_(torch.nan)
        graph.replay()
        assert torch.equal(out, want)


def test_parts_behind_whole_tiles_that_end_outside_the_output():
    # 132 whole tiles and parts of 11, whose neighbours have other bits where both would store the same elements.
    a, b = values((1600, 1024), torch.bfloat16), values((1408, 1024), torch.bfloat16).t()
    text = "128x128x64-g8-w8-s4-cooperative-descriptor-k2"
    result = gemmery.matmul(a, b, config=text)
    want = wide(a) @ wide(b)
    theirs = (a @ b).to(torch.float64) - want
    assert (result - want).abs().max() <= 1.05 * theirs.abs().max() + want.abs().max() * 2**-8
    assert all(torch.equal(gemmery.matmul(a, b, config=text), result) for _ in range(200))


@pytest.mark.parametrize("text", [
    "128x176x64-g8-w8-s4-cooperative-descriptor", "176x128x64-g8-w8-s4-cooperative-descriptor-swap",
    "192x144x64-g8-w12-s4-cooperative-descriptor", "128x80x64-g8-w8-s6-pingpong-descriptor",
    "128x176x64-g8-w8-s5-cooperative-descriptor-k3", "64x128x64-g0-w8-s6-cluster-descriptor-k4-swap",
    "128x64x64-g0-w8-s6-cluster-descriptor-k3", "64x192x64-g0-w12-s3-cluster-descriptor-k4-swap",
])  # fmt: skip
def test_an_ordinary_launch_has_the_same_bits(text):
    # Its tensor maps load 64 rows at a time, those of a direct launch all rows of a tile.
    a, b = values((333, 2048), torch.bfloat16), values((600, 2048), torch.bfloat16).t()
    want = gemmery.matmul(a, b, config=text)
    assert torch.equal(by_ordinary_launch(lambda: gemmery.matmul(a, b, config=text)), want)


@pytest.mark.parametrize("layout", ["NT", "NN", "TN", "TT"])
@pytest.mark.parametrize("text", [
    "128x128x64-g0-w8-s6-cooperative-descriptor", "64x128x64-g0-w8-s8-cooperative-descriptor-swap",
    "128x64x64-g0-w8-s6-pingpong-descriptor", "192x128x64-g0-w12-s4-cooperative-descriptor",
    "256x128x64-g0-w8-s3-cooperative-descriptor", "64x64x64-g0-w4-s12-cooperative-descriptor",
])  # fmt: skip
def test_a_batch(text, layout):
    # Matrices that are smaller than a tile, or end within one; fewer tiles than programs, and more.
    for count, M, N, K in ((3, 40, 48, 136), (7, 200, 136, 520), (50, 264, 528, 72)):
        a, b = (values((count, *sizes), torch.bfloat16) for sizes in ((M, K), (K, N)))
        if layout[0] == "T":
            a = a.mT.contiguous().mT
        if layout[1] == "T":
            b = b.mT.contiguous().mT
        # The output's matrices do not touch, and what is around them stays as it is.
        around = torch.full((count, M + 3, N + 24), torch.nan, dtype=a.dtype, device="cuda")
        out = around[:, 1 : M + 1, 8 : N + 8]
        run = partial(gemmery.bmm, a, b, config=text)
        run(out=out)
        want = wide(a) @ wide(b)
        theirs = torch.bmm(a, b).to(torch.float64) - want
        assert (out - want).abs().max() <= 1.05 * theirs.abs().max() + want.abs().max() * 2**-8
        assert torch.isnan(around).sum() == around.numel() - out.numel()
        for _ in range(5):
            assert torch.equal(run(), out)
        assert torch.equal(by_ordinary_launch(run), out)
        # Each matrix has the bits that it has alone, and in a batch of heads side by side.
        assert torch.equal(gemmery.matmul(a[-1], b[-1], config=text), out[-1])
        if layout == "NT":
            beside = torch.empty(M, count, K, dtype=a.dtype, device="cuda").transpose(0, 1).copy_(a)
            assert torch.equal(gemmery.bmm(beside, b, config=text), out)


#: What a row of a suite says besides its sizes, and its type.
KINDS = {
    "pairs": ({"epilogue": "swiglu", "call": "linear"}, "bf16"),
    "matrix": ({"epilogue": "bias_residual", "call": "linear"}, "bf16"),
    "fp8": ({"scales": "row", "call": "matmul"}, "fp8"),
    "fp8 fast": ({"scales": "row", "call": "matmul"}, "fp8fast"),
    "fp8 blocks": ({"scales": "block", "call": "matmul"}, "fp8"),
}


def some_row(r, kind):
    """A product of a kind, and a config that does not refuse it."""
    more, dtype = KINDS[kind]
    while True:
        # `make_inputs` makes whole blocks of a weight.
        unit = 128 if kind == "fp8 blocks" else 16
        row = Row(
            kind,
            r.randint(1, 700),
            unit * r.randint(1, 1400 // unit),
            unit * r.randint(1, 3200 // unit),
            **more,
        )
        problem = of_row(row, dtype, device_named("H200"))
        own = [
            x
            for x in tiles_of("hopper", kind_of(problem))
            if x.config.schedule in ("cooperative", "pingpong")
        ]
        tile = r.choice(own)
        config = replace(tile.config, split_k=r.choice((1, 2, 3, 4))) if tile.splits else tile.config
        if schedules.of(config.schedule).refusal(problem, config) is None:
            return row, dtype, config


@pytest.fixture(scope="module")
def rows():
    found = {}
    for kind in KINDS:
        r = rng("any width", kind)
        found[kind] = [some_row(r, kind) for _ in range(16)]
    with Workers(Target.active()) as workers:
        asked = [
            workers.submit(of_row(row, dtype, current(torch.device("cuda"))), config)
            for own in found.values()
            for row, dtype, config in own
        ]
        assert [future.result() for future in asked] == [None] * len(asked)
    return found


def called(inputs, config):
    if inputs.scaled is not None:
        return gemmery.scaled_matmul(*inputs.scaled, fast_accum=inputs.kind.fast_accum, config=config)
    epilogue = inputs.row.epilogue
    function = FUSIONS[epilogue].function if epilogue else None
    return gemmery.linear(inputs.a, inputs.b.mT, epilogue=function, args=inputs.args, config=config)


def check_launches(inputs, config, repeats):
    """The result is right, and the same in every launch, the ordinary one among them."""
    # The result is likely to come into the memory that this leaves.
    torch.full_like(inputs.out, torch.nan)
    check(partial(called, inputs, config), inputs, range(inputs.row.M))
    first = inputs.out.clone()
    for _ in range(repeats):
        assert torch.equal(called(inputs, config), first), (str(config), inputs.row)
    assert torch.equal(by_ordinary_launch(partial(called, inputs, config)), first), (str(config), inputs.row)


@pytest.mark.parametrize("kind", KINDS)
def test_other_kinds_of_operands(kind, rows):
    for row, dtype, config in rows[kind]:
        inputs = make_inputs(row, dtype, 1)
        check_launches(inputs, config, 5)


def added(acc, residual):
    return acc + residual


def gated(acc, residual):
    gate, up = acc.chunk(2, dim=-1)
    return F.silu(gate) * up + residual


def activated(acc, residual):
    return F.gelu(acc) + residual


@pytest.mark.parametrize("function", [added, gated, activated])
@pytest.mark.parametrize("text", [
    "128x176x64-g8-w8-s4-cooperative-descriptor", "176x128x64-g8-w8-s4-cooperative-descriptor-swap",
    "192x144x64-g8-w12-s4-cooperative-descriptor", "128x80x64-g8-w8-s6-pingpong-descriptor",
    "112x128x64-g8-w8-s5-pingpong-descriptor-swap", "256x160x64-g8-w8-s3-cooperative-descriptor",
    "64x64x64-g8-w4-s12-cooperative-descriptor", "64x144x64-g8-w4-s6-cooperative-descriptor-k3",
])  # fmt: skip
def test_an_epilogue_reads_a_matrix(text, function):
    # Tiles for each program: less than one, one, and several; the matrix has rows of its own and another type.
    for M, N, K in ((100, 336, 520), (1333, 1200, 136), (3000, 3088, 264)):
        x, weight = values((M, K), torch.bfloat16), values((N, K), torch.bfloat16)
        columns = N // 2 if function is gated else N
        residual = values((M, columns + 24), torch.float16)[:, 8 : columns + 8]
        want = function(wide(x) @ wide(weight).mT, wide(residual))
        out = torch.full_like(want, torch.nan, dtype=torch.bfloat16)
        run = partial(gemmery.linear, x, weight, epilogue=function, args=(residual,), config=text)
        run(out=out)
        theirs = function(x.float() @ weight.float().mT, residual.float()).to(torch.bfloat16)
        assert (wide(out) - want).abs().max() <= 1.05 * (wide(theirs) - want).abs().max() + 1e-2
        for _ in range(5):
            assert torch.equal(run(), out)
        assert torch.equal(by_ordinary_launch(run), out)


@pytest.mark.parametrize(
    "function", [lambda acc, r: acc + r, lambda acc, r: (F.gelu(acc + r), acc + r)], ids=["one", "two"]
)
def test_one_row_for_many_products(function):
    x, weight, row = (
        values((64, 1, 520), torch.bfloat16),
        values((336, 520), torch.bfloat16),
        values((1, 336), torch.bfloat16),
    )
    found = gemmery.linear(x, weight, epilogue=function, args=(row,))
    wants = function(wide(x) @ wide(weight).mT, wide(row))
    for result, want in zip(
        found if isinstance(found, tuple) else (found,),
        wants if isinstance(wants, tuple) else (wants,),
        strict=True,
    ):
        assert ((wide(result) - want).norm() / want.norm()).item() < 4e-3


def with_its_input(acc, bias):
    x = acc + bias
    return F.gelu(x), x


def gated_with_half(acc, bias):
    gate, up = (acc + bias).chunk(2, dim=-1)
    return F.silu(gate) * up, up.to(torch.float16)


@pytest.mark.parametrize("function", [with_its_input, gated_with_half])
@pytest.mark.parametrize("text", [
    "128x176x64-g8-w8-s4-cooperative-descriptor", "176x128x64-g8-w8-s4-cooperative-descriptor-swap",
    "192x144x64-g8-w12-s4-cooperative-descriptor", "128x80x64-g8-w8-s6-pingpong-descriptor",
    "112x128x64-g8-w8-s5-pingpong-descriptor-swap", "256x160x64-g8-w8-s3-cooperative-descriptor",
    "64x144x64-g8-w4-s6-cooperative-descriptor-k3",
])  # fmt: skip
def test_an_epilogue_has_a_second_result(text, function):
    for M, N, K in ((100, 336, 520), (1333, 1200, 136), (3000, 3088, 264)):
        x, weight, bias = (
            values((M, K), torch.bfloat16),
            values((N, K), torch.bfloat16),
            values(N, torch.bfloat16),
        )
        run = partial(gemmery.linear, x, weight, epilogue=function, args=(bias,), config=text)
        wants = function(wide(x) @ wide(weight).mT, wide(bias))
        found = run()
        for result, want in zip(found, wants, strict=True):
            assert ((wide(result) - want).norm() / want.norm()).item() < 4e-3
        for again in (*[run() for _ in range(5)], by_ordinary_launch(run)):
            assert all(map(torch.equal, again, found))


@pytest.mark.parametrize("name", ["int4", "int8 32 zeros"])
def test_packed_weights_with_a_matrix(name):
    x, weight, problem = packed_product(name, torch.bfloat16, 333, 1200, 1032)
    residual = values((333, 1200), torch.bfloat16)
    want = added(wide(x) @ weight.dequantize(torch.float64).mT, wide(residual))
    for text in packed_tiles(problem):
        run = partial(gemmery.linear, x, weight, epilogue=added, args=(residual,), config=text)
        found = run()
        assert ((wide(found) - want).norm() / want.norm()).item() < 4e-3, text
        assert all(torch.equal(run(), found) for _ in range(5)), text


#: Formats of packed weights, with what is asked for besides.
PACKED = {
    "int4": {}, "int4 16": {"group_size": 16}, "int4 64 zeros": {"group_size": 64, "symmetric": False},
    "int4 channel": {"group_size": 0}, "int8": {}, "int8 32 zeros": {"group_size": 32, "symmetric": False},
    "e4m3": {}, "e5m2": {}, "mxfp4": {}, "nvfp4": {}, "nf4": {},
}  # fmt: skip
PACKED_TILES = (
    "96x64x64-g8-w4-s6-cooperative-descriptor-k2-swap", "160x128x64-g8-w8-s5-cooperative-descriptor-swap",
    "64x192x64-g8-w12-s6-cooperative-descriptor-swap", "128x256x64-g8-w8-s4-cooperative-descriptor-swap",
    "96x128x64-g8-w8-s5-pingpong-descriptor-swap", "64x64x128-g1-w4-s4-tile-descriptor-swap",
)  # fmt: skip
#: Those with long steps, which not all formats have.
LONG_TILES = (
    "96x64x128-g8-w4-s6-cooperative-descriptor-k2-swap", "112x128x128-g8-w8-s5-cooperative-descriptor-swap",
    "64x192x128-g8-w12-s5-cooperative-descriptor-swap", "80x256x128-g8-w8-s4-cooperative-descriptor-swap",
    "96x128x128-g8-w8-s5-pingpong-descriptor-swap",
)  # fmt: skip


def packed_tiles(problem):
    return LONG_TILES * (problem.b.staged.of_step(128) is not None) + PACKED_TILES


def packed_case(name, dtype):
    """A product with a packed weight, and its problem; N and K divide by nothing, a tile may be larger than M."""
    r = rng("any width", name, dtype)
    return packed_product(name, dtype, r.randint(60, 700), 8 * r.randint(9, 90), 8 * r.randint(20, 250))


def packed_product(name, dtype, m, n, k):
    """Activations, a weight in a format of `PACKED`, and the problem of their product."""
    x, w = values((m, k), dtype), values((n, k), torch.float32) / 4

    def quantized(w):
        return gemmery.quantize(w, name.split()[0], dtype=dtype, **PACKED[name])

    problem = linear_problem(x.to("meta"), quantized(w.to("meta")), current(torch.device("cuda")))
    return x, quantized(w), problem


@pytest.fixture(scope="module")
def packed():
    found = {(name, dtype): packed_case(name, dtype) for name in PACKED for dtype in HALVES}
    with Workers(Target.active()) as workers:
        asked = [
            workers.submit(problem, Config.of(text))
            for _, _, problem in found.values()
            for text in packed_tiles(problem)
        ]
        assert [future.result() for future in asked] == [None] * len(asked)
    return found


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("name", PACKED)
def test_packed_weights(name, dtype, packed):
    x, weight, problem = packed[name, dtype]
    want = wide(x) @ weight.dequantize(torch.float64).mT
    theirs = (wide(x @ weight.dequantize().mT) - want).norm() / want.norm()
    *_, tile = [gemmery.linear(x, weight, config=text) for text in packed_tiles(problem)]
    for text in packed_tiles(problem):
        refusal = schedules.of(Config.of(text).schedule).refusal(problem, Config.of(text))
        assert refusal is None, refusal
        torch.full_like(tile, torch.nan)
        result = gemmery.linear(x, weight, config=text)
        assert (wide(result) - want).norm() / want.norm() <= 1.05 * theirs + 1e-5, text
        # The same numbers in the same order, but where K is cut.
        assert "-k2" in text or torch.equal(result, tile), text
        for _ in range(5):
            assert torch.equal(gemmery.linear(x, weight, config=text), result), text
        assert torch.equal(by_ordinary_launch(partial(gemmery.linear, x, weight, config=text)), result), text


@pytest.mark.parametrize("name", ["int4", "int8 32 zeros"])
def test_parts_of_packed_weights_behind_whole_tiles(name):
    # 132 whole tiles and parts of 11; N ends within a tile.
    x, w = values((1408, 1024), torch.bfloat16), values((1592, 1024), torch.float32) / 4
    weight = gemmery.quantize(w, name.split()[0], dtype=torch.bfloat16, **PACKED[name])
    text = "128x128x64-g4-w8-s6-cooperative-descriptor-k2-swap"
    result = gemmery.linear(x, weight, config=text)
    want = wide(x) @ weight.dequantize(torch.float64).mT
    assert (wide(result) - want).norm() / want.norm() <= 3e-3
    assert all(torch.equal(gemmery.linear(x, weight, config=text), result) for _ in range(20))


@pytest.mark.parametrize("apart", [False, True])
def test_halves_of_one_allocation_or_two(apart):
    x, weight = values((200, 1024), torch.bfloat16), values((1200, 1024), torch.bfloat16)
    halves = weight[:600], weight[600:]
    pair = tuple(half.clone() for half in reversed(halves))[::-1] if apart else halves
    want = FUSIONS["swiglu"].function(wide(x) @ wide(weight).mT)
    for text in (
        "128x144x64-g8-w8-s4-pingpong-descriptor",
        "144x128x64-g8-w8-s4-cooperative-descriptor-swap",
    ):
        result = gemmery.linear(x, pair, epilogue=FUSIONS["swiglu"].function, config=text)
        assert ((wide(result) - want).norm() / want.norm()).item() < 4e-3


def test_rows_do_not_depend_on_the_batch():
    x, weight = values((700, 2048), torch.bfloat16), values((1536, 2048), torch.bfloat16)
    texts = (
        "128x176x64-g8-w8-s4-cooperative-descriptor", "16x64x64-g8-w4-s12-cooperative-descriptor-swap",
        "128x144x64-g8-w8-s4-pingpong-descriptor", "144x192x64-g8-w12-s4-cooperative-descriptor-swap",
        "256x144x64-g8-w8-s3-cooperative-descriptor", "128x256x64-g16-w8-s4-persistent-descriptor/2",
    )  # fmt: skip
    want = gemmery.linear(x, weight, batch_invariant=True)
    for text in texts:
        for M in (1, 17, 130, 700):
            found = gemmery.linear(x[:M], weight, batch_invariant=True, config=text)
            assert torch.equal(found, want[:M]), (text, M)


#: Programs of a cluster; and sizes that suit no tile, with the last steps along K not whole. With the second K, clusters
#: of 6 and 8 have steps for fewer programs.
PROGRAMS = (2, 3, 4, 6, 8)
CLUSTERED = [(1, 520, 4128), (13, 328, 608), (70, 200, 4128), (200, 136, 3104)]
#: Weights: what makes one of a matrix, and what it stands for.
WEIGHTS = {
    "dense": (lambda w: w, wide),
    "sparse": (gemmery.sparsify, lambda w: wide(w.dense(torch.float64))),
    "sparse e4m3": (
        lambda w: gemmery.quantize(gemmery.sparsify(w), "e4m3"),
        lambda w: wide(w.dense(torch.float64)),
    ),
    "nf4": (
        lambda w: gemmery.quantize(w, "nf4", dtype=w.dtype),
        lambda w: w.dequantize(torch.float64),
    ),
    "int4": (
        lambda w: gemmery.quantize(w, "int4", dtype=w.dtype),
        lambda w: w.dequantize(torch.float64),
    ),
}


def with_bias(acc, bias):
    return F.gelu(acc + bias)


def clusters_for(problem, programs):
    """The configs of clusters of so many programs, at most, that do not refuse a problem."""
    own = [tile.config for tile in tiles_of("hopper", kind_of(problem)) if tile.config.schedule == "cluster"]
    found = [replace(config, split_k=programs) for config in own]
    assert found
    return [config for config in found if schedules.of(config.schedule).refusal(problem, config) is None]


@pytest.mark.parametrize("programs", PROGRAMS)
@pytest.mark.parametrize("name", WEIGHTS)
def test_clusters(name, programs):
    made, full = WEIGHTS[name]
    taken = 0
    for M, N, K in CLUSTERED:
        x, bias = values((M, K), torch.bfloat16), values(N, torch.bfloat16)
        weight = made(values((N, K), torch.bfloat16))
        problem = linear_problem(
            x.to("meta"), weight.to("meta"), current(x.device), epilogue=with_bias, args=(bias.to("meta"),)
        )
        want = with_bias(wide(x) @ full(weight).mT, wide(bias))
        for config in clusters_for(problem, programs):
            taken += 1
            # What is around the output stays as it is.
            around = torch.full((M + 2, N + 16), torch.nan, dtype=x.dtype, device="cuda")
            out = around[1 : M + 1, 8 : N + 8]
            run = partial(gemmery.linear, x, weight, epilogue=with_bias, args=(bias,), config=config)
            run(out=out)
            assert torch.isnan(around).sum() == around.numel() - out.numel(), (str(config), M, N, K)
            assert ((wide(out) - want).norm() / want.norm()).item() < 4e-3, (str(config), M, N, K)
            for _ in range(20):
                assert torch.equal(run(), out), (str(config), M, N, K)
            assert torch.equal(by_ordinary_launch(run), out), (str(config), M, N, K)
    assert taken >= 4


@pytest.mark.parametrize("programs", PROGRAMS)
@pytest.mark.parametrize("kind", ["pairs", "fp8", "fp8 fast"])
def test_clusters_of_other_kinds(kind, programs):
    more, dtype = KINDS[kind]
    taken = 0
    for M, N, K in CLUSTERED:
        row = Row(kind, M, -(-N // 16) * 16, -(-K // 16) * 16, **more)
        inputs = make_inputs(row, dtype, 1)
        for config in clusters_for(of_row(row, dtype, current(torch.device("cuda"))), programs):
            taken += 1
            check_launches(inputs, config, 20)
    assert taken >= 4


@pytest.mark.parametrize("programs", PROGRAMS)
def test_clusters_in_a_graph(programs):
    """Launches follow each other in a graph, each with what the one before has made."""
    x, square = values((16, 1024), torch.bfloat16), values((1024, 1024), torch.bfloat16) / 32
    config = f"16x64x64-g0-w4-s12-cluster-descriptor-k{programs}-swap"

    def run(x, **more):
        return gemmery.linear(x, square, epilogue=torch.tanh, config=config, **more)

    want = run(run(run(x)))
    outs = [torch.empty_like(want) for _ in range(3)]
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for before, out in zip((x, *outs), outs, strict=False):
            run(before, out=out)
    for _ in range(100):
        for out in outs:
            out.fill_(torch.nan)
        graph.replay()
        assert torch.equal(outs[-1], want)
