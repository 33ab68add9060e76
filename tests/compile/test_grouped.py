"""Products of groups compile for every target: what the selector tries first, without spills; and for sm_90 every form."""

import pytest
import torch

from gemmery import Config, epilogues, schedules, select
from gemmery.lab.fused_targets import grouped_problem, ranges_problem
from gemmery.lab.inspection.resources import usage
from gemmery.lab.targets import TARGETS
from gemmery.schedules.any_width import COOPERATIVE
from gemmery.schedules.any_width_compiled import waits_for_each
from gemmery.select.samples import arguments
from tests.compile.compiling import device_of, strictly_for
from tests.compile.test_any_width import check_spills

BACK_ENDS = ("sm_90", "sm_80", "gfx942")
#: Rows of 32 groups, for few and for many in each.
ROWS = (100, 8192)


def problems(device):
    for rows in ROWS:
        yield "bare", grouped_problem(rows, 32, 2048, 1024, device=device)
        swiglu = {"gathers": True, "function": epilogues.swiglu}
        yield "gathered", grouped_problem(rows, 32, 2048, 1024, device=device, **swiglu)
    for dtype in (torch.int8, *device.target.fp8[:1]):
        yield "blocks", grouped_problem(8192, 32, 2048, 1024, device=device, dtype=dtype, gathers=True)
    if device.arch != "sm_86":
        # There the first config spills registers, and a launch takes the next one.
        yield (
            "prologue",
            grouped_problem(8192, 32, 2048, 1024, device=device, prologue=torch.nn.functional.silu),
        )
    yield "float32", grouped_problem(8192, 32, 2048, 1024, device=device, dtype=torch.float32)
    yield "gradient", ranges_problem(8192, 32, 2048, 1024, device=device)


def check_first(target):
    for name, problem in problems(device_of(target)):
        with strictly_for(target):
            compiled = schedules.bind(problem, select.candidates(problem)[0]).compile(
                *arguments(problem, "meta")
            )
        most = 136 if compiled.metadata.name == "gemm_any_width" else 0
        assert usage(compiled).spilled <= most, name


@pytest.mark.sampled(3)
@pytest.mark.parametrize("target", BACK_ENDS)
def test_every_back_end(target):
    check_first(target)


@pytest.mark.exhaustive
@pytest.mark.parametrize("target", [x for x in TARGETS if x not in BACK_ENDS])
def test_every_target(target):
    check_first(target)


@pytest.mark.sampled(3)
@pytest.mark.skipif(not COOPERATIVE.available(), reason="tiles of any width need another Triton")
@pytest.mark.parametrize(
    ("make", "text"),
    [
        (grouped_problem, "128x192x64-g0-w8-s4-cooperative-descriptor"),
        (grouped_problem, "144x128x64-g0-w8-s5-pingpong-descriptor-swap"),
        (grouped_problem, "192x160x64-g0-w12-s4-cooperative-descriptor"),
        (ranges_problem, "128x192x64-g0-w8-s4-cooperative-descriptor"),
        (ranges_problem, "192x128x64-g0-w8-s4-cooperative-descriptor-swap"),
        (ranges_problem, "192x192x64-g0-w12-s4-cooperative-descriptor"),
        (grouped_problem, "128x192x64-g0-w8-s4-pingpong-descriptor"),
        (ranges_problem, "128x192x64-g0-w8-s4-pingpong-descriptor"),
    ],
)
def test_tiles_of_any_width(make, text):
    problem, config = make(8192, 32, 2048, 1024, device=device_of("sm_90")), Config.of(text)
    with strictly_for("sm_90"):
        compiled = schedules.bind(problem, config).compile(*arguments(problem, "meta"))
    assert not waits_for_each(compiled)
    check_spills(compiled)


@pytest.mark.parametrize("target", BACK_ENDS)
def test_ranges_that_are_cut(target):
    problem = ranges_problem(65536, 4, 512, 256, device=device_of(target))
    config = Config.of("128x128x32-g8-w8-s3-tile-pointer-k8")
    with strictly_for(target):
        compiled = schedules.bind(problem, config).compile(*arguments(problem, "meta"))
    assert usage(compiled).spilled == 0
