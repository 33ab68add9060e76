"""Tiles of any width whose last ones are narrower, whose warpgroups share rows, or whose steps are long."""

from functools import partial

import numpy as np
import pytest
import torch

import gemmery
from gemmery import Config, schedules
from gemmery.devices import current
from gemmery.lab.abstract import linear_problem, of_row
from gemmery.lab.inputs import make_inputs
from gemmery.lab.suites import Row
from gemmery.schedules.any_width import COOPERATIVE
from gemmery.schedules.any_width_edge import Edges
from gemmery.select.space import kind_of, tiles_of
from gemmery.tuning.workers import Target, Workers
from tests.gpu.common import rng, values, wide
from tests.gpu.test_any_width import KINDS, WEIGHTS, by_ordinary_launch, check_launches, with_bias
from tests.gpu.test_any_width import pytestmark as pytestmark

#: Rows of a suite for each kind of operand that has edge tiles; "turned" products lie in another way than "plain" ones.
#: Accurate fp8 has none, and neither has fp8 with scales along K.
ROWS = {kind: row for kind, row in KINDS.items() if kind not in ("fp8", "fp8 blocks")} | {
    "plain": ({"call": "matmul"}, "bf16"),
    "turned": ({"a": "col", "b": "row", "call": "matmul"}, "bf16"),
}
WEIGHT_NAMES = ("dense", "sparse", "sparse e4m3")


def configs_with_edges(problem):
    """The configs of a problem whose launches have edge tiles."""
    own = [
        tile.config
        for tile in tiles_of("hopper", kind_of(problem))
        if tile.config.schedule == COOPERATIVE.name
    ]
    return [
        config
        for config in own
        if COOPERATIVE.refusal(problem, config) is None
        and Edges.of(problem, config, np.asarray(problem.M)).width > 0
    ]


def some_row(r, kind, device):
    """A product of a kind with a config that has edge tiles."""
    more, dtype = ROWS[kind]
    for _ in range(1000):
        m, n, k = 8 * r.randint(64, 500), 16 * r.randint(62, 312), 16 * r.randint(1, 81)
        row = Row(kind, m, n, k, **more)
        if found := configs_with_edges(of_row(row, dtype, device)):
            return row, dtype, r.choice(found)
    raise AssertionError(f"no product of {kind} has edge tiles")


def some_weight(r, device, name):
    made, _ = WEIGHTS[name]
    for _ in range(100):
        m, n, k = r.randint(200, 4000), 32 * r.randint(30, 150), 32 * r.randint(1, 40)
        weight = made(values((n, k), torch.bfloat16))
        problem = problem_with(m, weight, device)
        if found := configs_with_edges(problem):
            return m, weight, r.choice(found)
    raise AssertionError(f"no product of {name} has edge tiles")


def problem_with(m, weight, device):
    x = torch.empty(m, weight.shape[1], dtype=torch.bfloat16, device="meta")
    bias = torch.empty(weight.shape[0], dtype=torch.bfloat16, device="meta")
    return linear_problem(x, weight.to("meta"), device, epilogue=with_bias, args=(bias,))


@pytest.fixture(scope="module")
def cases():
    device = current(torch.device("cuda"))
    found = {kind: [some_row(rng("edges", kind, i), kind, device) for i in range(8)] for kind in ROWS}
    with Workers(Target.active()) as workers:
        asked = [
            workers.submit(of_row(row, dtype, device), config)
            for own in found.values()
            for row, dtype, config in own
        ]
        assert [future.result() for future in asked] == [None] * len(asked)
    return found


@pytest.mark.parametrize("kind", ROWS)
def test_edge_tiles(kind, cases):
    for row, dtype, config in cases[kind]:
        check_launches(make_inputs(row, dtype, 1), config, 5)


def check_weight(m, name, weight, config):
    _, full = WEIGHTS[name]
    N, K = weight.shape
    x, bias = values((m, K), torch.bfloat16), values(N, torch.bfloat16)
    want = with_bias(wide(x) @ full(weight).mT, wide(bias))
    # What is around the output stays as it is.
    around = torch.full((m + 2, N + 16), torch.nan, dtype=x.dtype, device="cuda")
    out = around[1 : m + 1, 8 : N + 8]
    run = partial(gemmery.linear, x, weight, epilogue=with_bias, args=(bias,), config=config)
    run(out=out)
    assert torch.isnan(around).sum() == around.numel() - out.numel(), (str(config), m, N, K)
    assert ((wide(out) - want).norm() / want.norm()).item() < 4e-3, (str(config), m, N, K)
    for _ in range(5):
        assert torch.equal(run(), out), (str(config), m, N, K)
    assert torch.equal(by_ordinary_launch(run), out), (str(config), m, N, K)


@pytest.mark.parametrize("name", WEIGHT_NAMES)
def test_edge_tiles_of_weights(name):
    device = current(torch.device("cuda"))
    for i in range(6):
        m, weight, config = some_weight(rng("edges", name, i), device, name)
        check_weight(m, name, weight, config)


@pytest.mark.parametrize("name, text", [
    # Warpgroups that share rows, in programs alone, in parts of tiles and in clusters.
    ("dense", "16x96x64-g0-w8-s11-cooperative-descriptor-swap"),
    ("dense", "32x160x64-g0-w12-s7-cooperative-descriptor-k2-swap"),
    ("sparse", "16x96x64-g0-w8-s12-cooperative-descriptor-k3-swap"),
    ("dense", "16x96x64-g0-w8-s9-cluster-descriptor-k4-swap"),
    # Steps of 128 columns.
    ("sparse", "16x64x128-g0-w4-s11-cooperative-descriptor-swap"),
    ("sparse", "32x128x128-g0-w8-s6-cooperative-descriptor-k2-swap"),
    ("sparse", "32x160x128-g0-w12-s5-cooperative-descriptor-swap"),
    ("sparse", "16x64x128-g0-w4-s8-cluster-descriptor-k4-swap"),
    ("sparse e4m3", "16x64x128-g0-w4-s12-cooperative-descriptor-swap"),
    ("sparse e4m3", "32x128x128-g0-w8-s8-cooperative-descriptor-k2-swap"),
    ("sparse e4m3", "16x96x128-g0-w8-s8-cooperative-descriptor-swap"),
    ("sparse e4m3", "32x64x128-g0-w4-s8-cluster-descriptor-k4-swap"),
])  # fmt: skip
def test_shared_rows_and_long_steps(name, text):
    made, _ = WEIGHTS[name]
    config = Config.of(text)
    # The last steps are not whole, and tiles end outside.
    for m, N, K in ((1, 480, 1056), (16, 672, 2080), (30, 928, 1312)):
        weight = made(values((N, K), torch.bfloat16))
        problem = problem_with(m, weight, current(torch.device("cuda")))
        assert schedules.of(config.schedule).refusal(problem, config) is None
        check_weight(m, name, weight, config)
