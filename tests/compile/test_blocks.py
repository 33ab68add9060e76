"""Block-sparse products compile for every target: what the selector tries first, without spills; for sm_90 every tile."""

import pytest
import torch

from gemmery import schedules, select
from gemmery.lab.inspection.resources import usage
from gemmery.lab.targets import TARGETS, serialised
from gemmery.select.samples import arguments
from gemmery.select.space import space_of
from tests.blocks import SIZES, problem_of, sampled_problem
from tests.compile.compiling import device_of, strictly_for

BACK_ENDS = ("sm_90", "sm_80", "gfx942")


def compiled(target, problem, config):
    with strictly_for(target):
        return schedules.bind(problem, config).compile(*arguments(problem, "meta"))


def problems(device):
    how = {"average": 16, "device": device}
    for block in SIZES:
        yield problem_of(4096, 8192, 8192, block, is_b=True, **how)
        yield problem_of(4096, 8192, 8192, block, is_b=True, direct=False, **how)
        yield problem_of(4096, 8192, 8192, block, is_b=False, **how)
        yield problem_of(4096, 8192, 8192, block, is_b=False, direct=False, turned=True, **how)
    yield problem_of(4096, 8192, 8192, 64, is_b=True, dtype=torch.float16, **how)
    yield problem_of(4096, 4096, 4096, 64, is_b=True, dtype=torch.float32, **how)
    for block in (32, 64, 128):
        yield sampled_problem(500, 4096, block, device=device)


def check_first(target):
    device = device_of(target)
    for problem in problems(device):
        kernel = compiled(target, problem, select.candidates(problem)[0])
        took = usage(kernel)
        assert took.spilled == 0, problem
        assert took.shared <= device.target.shared, problem


@pytest.mark.sampled(3)
@pytest.mark.parametrize("target", BACK_ENDS)
def test_every_back_end(target):
    check_first(target)


@pytest.mark.exhaustive
@pytest.mark.parametrize("target", [x for x in TARGETS if x not in BACK_ENDS])
def test_every_target(target):
    check_first(target)


@pytest.mark.parametrize("block", [64, 128])
@pytest.mark.parametrize("is_b", [True, False])
def test_every_tile_for_hopper(block, is_b):
    """Each fits with as many blocks in flight as the config says, and multiplies with wgmma, without a wait for each."""
    device = device_of("sm_90")
    problem = problem_of(4096, 8192, 8192, block, is_b=is_b, average=16, device=device)
    for c in space_of(problem).configs:
        kernel = compiled("sm_90", problem, c)
        took = usage(kernel)
        assert took.spilled == 0, c
        assert (
            2 * (c.block_m + c.block_n) * c.block_k * c.num_stages <= took.shared <= device.target.shared
        ), c
        assert "wgmma.mma_async" in kernel.asm["ptx"], c
        assert ("cp.async.bulk.tensor" in kernel.asm["ptx"]) == (c.loader == "descriptor"), c
        assert not serialised(kernel), c
