"""Scales along K in tiles of any width: right for all numbers of steps and all layouts of scales, and the same each time."""

from dataclasses import replace
from typing import NamedTuple

import pytest
import torch

import gemmery
from gemmery import Config, ScaledTensor, schedules
from gemmery.devices import current
from gemmery.lab.abstract import linear_problem
from gemmery.product.spec import Options
from gemmery.schedules.any_width import COOPERATIVE
from gemmery.select.space import tiles_of
from gemmery.tuning.workers import Target, Workers
from tests.gpu.common import FP8, on_hopper, rng, values, wide

pytestmark = on_hopper(COOPERATIVE, "tiles of any width")

TILES = [tile for tile in tiles_of("hopper", "scaled") if tile.config.schedule == "cooperative"]
#: Tiles with a kernel of their own, which some parts have and random ones may not have.
WIDE = ("128x192x128", "128x256x128", "192x128x128")
PARTS = range(4)


class Case(NamedTuple):
    """A product, and its config.

    Attributes:
        rows_share: whether 128 rows of A share scales.
        by_steps: whether the scales of A that are used at the same time are adjacent.
        types: of A and B.
    """

    m: int
    n: int
    k: int
    config: Config
    rows_share: bool
    by_steps: bool
    types: tuple[torch.dtype, torch.dtype]

    def operands(self, device):
        steps, rows = -(-self.k // 128), -(-self.m // 128) if self.rows_share else self.m
        data = [
            values((size, self.k), torch.float32).to(dtype)
            for size, dtype in zip((self.m, self.n), self.types, strict=True)
        ]
        left = (
            torch.rand(steps, rows, device="cuda").T
            if self.by_steps
            else torch.rand(rows, steps, device="cuda")
        )
        right = torch.rand(-(-self.n // 128), steps, device="cuda")
        return [
            ScaledTensor(x.to(device), scale.to(device)) for x, scale in zip(data, (left, right), strict=True)
        ]

    @property
    def problem(self):
        options = Options(out_dtype=torch.bfloat16)
        return linear_problem(*self.operands("meta"), current(torch.device("cuda")), options=options)


def some_case(r, tiles):
    while True:
        tile, unit = r.choice(tiles), r.choice((16, 32, 64, 128))
        config = replace(tile.config, split_k=r.choice((1, 2, 3))) if tile.splits else tile.config
        # One step to nine, the last of which may be a part of one, or many.
        k = 16 * r.randint(1, 72) if r.random() < 0.7 else 16 * r.randint(72, 500)
        types = r.choice(FP8), r.choice(FP8)
        n = unit * r.randint(1, 1400 // unit)
        case = Case(r.randint(1, 700), n, k, config, r.random() < 0.2, r.random() < 0.5, types)
        if schedules.of(config.schedule).refusal(case.problem, config) is None:
            return case


@pytest.fixture(scope="module")
def cases():
    r = rng("scales along k")
    wide_tiles = [[tile for tile in TILES if str(tile.config).startswith(text)] for text in WIDE]
    found = {part: [some_case(r, tiles) for tiles in (*wide_tiles, *[TILES] * 5)] for part in PARTS}
    with Workers(Target.active()) as workers:
        asked = [workers.submit(case.problem, case.config) for own in found.values() for case in own]
        assert [future.result() for future in asked] == [None] * len(asked)
    return found


@pytest.mark.parametrize("part", PARTS)
def test_random_tiles_and_scales(part, cases):
    rng("scales along k", "values", part)
    for case in cases[part]:
        a, b = case.operands("cuda")
        want = wide(a.dequantize(torch.float32)) @ wide(b.dequantize(torch.float32)).T
        result = torch.full(want.shape, torch.nan, dtype=torch.bfloat16, device="cuda")
        gemmery.scaled_matmul(a, b, out=result, config=case.config)
        # The tensor cores sum a step at their own precision.
        error = (result - want).norm() / want.norm()
        assert error <= 2.5e-3, (case, error)
        for _ in range(5):
            assert torch.equal(gemmery.scaled_matmul(a, b, config=case.config), result), case
