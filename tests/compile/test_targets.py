"""A sample of kernels compiled for every target: what comes out is what the selector counts on.

`gemmery.lab.targets` compiles and judges; these tests ask it, and make sure that its sample covers what it should.
All kernels of all targets: `make check-targets`.
"""

from collections import Counter

import pytest
import triton

from gemmery.devices import ARCHS
from gemmery.dtypes import DTYPE_NAMES
from gemmery.lab.fused_targets import FUSED, GRADIENTS
from gemmery.lab.targets import TARGETS, check
from gemmery.select.tiles import ALIKE
from tests.compile.compiling import compile_dense

#: The Triton for which the tiles were chosen. Others allocate registers otherwise, and a few rows spill some bytes; a
#: plan then takes the next row, so there it is enough that every case has one without faults.
CHOSEN_FOR = "3.7.1"


@pytest.mark.exhaustive
@pytest.mark.parametrize("target", TARGETS)
def test_target(target):
    found = check(target, everything=False)
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
    reports = [
        report for report in found if report["case"]["dtype"] in ("fp16", "bf16") and report["case"]["layout"]
    ]
    units = [report["instructions"] for report in reports]
    assert all(units)
    assert sum(arch.matrix in unit for unit in units) > len(units) / 2
    if arch.family in ALIKE:
        # An adapter's second product is part of the epilogue, with the instruction of a warp.
        plain = [x["instructions"] for x in reports if not x["case"]["epilogue"].startswith("adapted")]
        assert set(map(tuple, plain)) == {(arch.matrix,)}
        assert all(arch.matrix in unit for unit in units)


def ptx(schedule, loader):
    return compile_dense("sm_90", f"128x128x64-g8-w8-s3-{schedule}-{loader}").asm["ptx"]


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
