"""A sample of kernels compiled for every target: what comes out is what the selector counts on.

`gemmery.lab.targets` compiles and judges; these tests ask it, and make sure that its sample covers what it should.
All kernels of all targets: `make check-targets`.
"""

import functools
import os
import subprocess
import sys
from collections import Counter

import pytest
import triton

from gemmery.devices import ARCHS
from gemmery.dtypes import DTYPE_NAMES
from gemmery.lab.fused_targets import FUSED, GRADIENTS
from gemmery.lab.targets import TARGETS, check
from gemmery.select.tiles import ALIKE


@functools.cache
def reports(target):
    return check(target, everything=False)


#: The Triton for which the tiles were chosen. Others allocate registers otherwise, and a few rows spill some bytes; a
#: plan then takes the next row, so there it is enough that every case has one without faults.
CHOSEN_FOR = "3.7.1"
#: What passes with other versions of Triton look at: one target for each compiler's back end.
QUICK = ("sm_80", "sm_90", "gfx942")


@pytest.mark.parametrize(
    "target", [pytest.param(x, marks=() if x in QUICK else pytest.mark.slow) for x in TARGETS]
)
def test_target(target):
    found = reports(target)
    faulty = {str(report["case"]): [] for report in found}
    for report in found:
        if report["faults"]:
            faulty[str(report["case"])].append(f"{report['config']}: {'; '.join(report['faults'])}")
    if triton.__version__ == CHOSEN_FOR:
        assert not any(faulty.values()), faulty
    total = Counter(str(report["case"]) for report in found)
    assert all(len(faults) < total[case] for case, faults in faulty.items()), faulty
    arch = ARCHS[target]
    cases = [report["case"] for report in found]
    assert {case["dtype"] for case in cases} == {"fp16", "bf16", "fp32", "fp64", "int8"} | {
        DTYPE_NAMES[x] for x in arch.fp8
    }
    assert {case["precision"] for case in cases if case["dtype"] == "fp32"} == set(arch.precisions)
    assert {case["aligned"] for case in cases} == {True, False}
    # Traced epilogues, but for those that take types that the target lacks, and kernels of their gradients.
    traced = {name for name, how in FUSED.items() if how.needs is None or how.needs in arch.fp8}
    assert traced <= {case["epilogue"] for case in cases if case["layout"]}
    assert set(GRADIENTS) == {case["epilogue"] for case in cases if not case["layout"]}
    # 16-bit products use the target's matrix unit: all but those with fewer rows than its large instruction takes.
    units = [
        report["instructions"]
        for report in found
        if report["case"]["dtype"] in ("fp16", "bf16") and report["case"]["layout"]
    ]
    assert all(units)
    assert sum(arch.matrix in unit for unit in units) > len(units) / 2
    if arch.family in ALIKE:
        assert set(map(tuple, units)) == {(arch.matrix,)}


_DESCRIPTORS = """
import torch
from gemmery.lab import targets
targets.use_target("sm_90")
from gemmery.devices import TABLE
from gemmery.schedules import bind
from gemmery.layout import make_problem
from gemmery.problem import Config
a, b = (torch.empty(4096, 4096, dtype=torch.bfloat16, device="meta") for _ in range(2))
out, b = torch.empty_like(a), b.t()
problem = make_problem(
    a, b, out, None, scaled=False, precision="ieee", fast_accum=False, device=TABLE["NVIDIA H200"]
)
config = Config(128, 128, 64, num_warps=8, schedule="%s", loader="%s")
print(bind(problem, config).compile((a, b, out), (1, 1)).asm["ptx"])
"""


def ptx(schedule, loader):
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", _DESCRIPTORS % (schedule, loader)]
    run = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert run.returncode == 0, run.stderr
    return run.stdout


@pytest.mark.parametrize("schedule", ["tile", "persistent"])
def test_descriptors_are_loaded_and_stored_by_hardware(schedule):
    """On Hopper: TMA both ways and the warpgroup's instruction, and no load of an operand besides."""
    text = ptx(schedule, "descriptor")
    assert "cp.async.bulk.tensor.2d.shared" in text
    assert "cp.async.bulk.tensor.2d.global" in text
    assert "wgmma.mma_async" in text
    assert "ld.global" not in text
    assert "st.global" not in text


def test_pointers_are_loaded_asynchronously():
    """Without descriptors, blocks still go to shared memory while others are computed, 16 bytes a thread at a time."""
    text = ptx("tile", "pointer")
    assert "cp.async.cg.shared.global" in text
    assert "wgmma.mma_async" in text
    assert "cp.async.bulk.tensor" not in text
