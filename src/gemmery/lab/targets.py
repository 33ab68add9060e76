"""Compiles every kernel that the selector may choose, for targets that are not at hand, and checks what comes out.

A process for each target compiles through `launch.cross_compile`, so that several are busy at once. Run as
`python -m gemmery.lab.targets [--all] [TARGET ...]`.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from ..launch.cross_compile import use_target
from ..schedules.binding import Binding
from .inspection.resources import Usage, usage

TARGETS = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120", "gfx942", "gfx1100")
#: Instructions of a matrix unit, any of which shows that a dot did not fall to scalar code.
_MATRIX = ("wgmma.mma_async", "mma.sync", "mma.sp::ordered_metadata", "tcgen05.mma", "v_mfma", "v_wmma")


@dataclass(frozen=True)
class Case:
    """One kernel to compile: operand types, layouts (N: row-major, T: column-major), epilogue and alignment.

    The epilogue is one of `kernels.epilogues`, or a traced one of `fused_targets`. An elementwise kernel, which is of
    a traced one's gradient, has no layouts.
    """

    dtype: str
    layout: str
    epilogue: str
    aligned: bool
    precision: str = "ieee"
    fast_accum: bool = False


@dataclass(frozen=True)
class Report:
    """The report of one compiled kernel.

    Attributes:
        faults: empty when all is well.
        passed: why a plan passes over it and takes the next config, as it may with a traced epilogue; else empty.
    """

    target: str
    case: Case
    config: str
    registers: int
    spilled: int
    shared: int
    instructions: tuple[str, ...]
    faults: tuple[str, ...]
    passed: tuple[str, ...] = ()


def cases(name: str, everything: bool) -> Iterator[Case]:
    """The cases to compile for a target: all supported types, in the layouts and epilogues that change the code
    most.
    """
    from ..devices import ARCHS
    from ..dtypes import DTYPE_NAMES
    from .fused_targets import FUSED, GRADIENTS

    arch = ARCHS[name]
    fp8 = [DTYPE_NAMES[dtype] for dtype in arch.fp8]
    kinds = [Case(dtype, "", "", True) for dtype in ("fp16", "bf16", "fp64", "int8")]
    kinds += [Case("fp32", "", "", True, precision) for precision in arch.precisions]
    kinds += [Case(dtype, "", "", True, fast_accum=fast) for dtype in fp8 for fast in (False, True)]
    for kind in kinds:
        variants = [("NN", "add_row", True), ("NT", "identity", True), ("NT", "identity", False)]
        if kind.dtype == "fp16" and not everything:
            # The tiles are those of bf16, and so is the code, but for the instructions' types.
            variants = variants[:1]
        if everything:
            variants += [("TN", "identity", True), ("TT", "scale", True), ("NN", "identity", False)]
        for layout, epilogue, aligned in variants:
            yield Case(kind.dtype, layout, epilogue, aligned, kind.precision, kind.fast_accum)
    for epilogue, how in FUSED.items():
        if how.needs is None or how.needs in arch.fp8:
            for dtype in how.dtypes if everything else how.dtypes[:1]:
                if dtype in fp8 or dtype not in ("e4m3", "e5m2"):
                    yield Case(dtype, "NT", epilogue, True)
            if everything and not how.aligned:
                yield Case(how.dtypes[0], "NT", epilogue, False)
    for epilogue in GRADIENTS:
        yield Case("bf16", "", epilogue, True)


def _tensors(case: Case, size: int) -> tuple[Any, ...]:
    from ..dtypes import DTYPE_NAMES, OUT_DTYPES

    dtype = {name: dtype for dtype, name in DTYPE_NAMES.items()}[case.dtype]
    a, b = (
        torch.empty(size, size, dtype=dtype, device="meta"),
        torch.empty(size, size, dtype=dtype, device="meta"),
    )
    out = torch.empty(size, size, dtype=OUT_DTYPES[dtype][0], device="meta")
    a, b = (x.t() if letter == "T" else x for x, letter in zip((a, b), case.layout, strict=True))
    addend = torch.empty(size, dtype=out.dtype, device="meta") if case.epilogue == "add_row" else None
    return a, b, out, addend


def compile_case(name: str, case: Case, everything: bool = True) -> Iterator[Report]:
    """Compile a case with every config that the selector may choose for it, and check each.

    Without `everything`, kernels that cut K are compiled for one case alone, and products with a traced
    epilogue as a plan compiles them: until one fits.
    """
    from ..devices import TABLE
    from .fused_targets import FUSED

    device = next(row for row in TABLE.values() if row.arch == name)
    if not case.layout:
        return _elementwise(case, device)
    return (_fused if case.epilogue in FUSED else _plain)(case, device, everything)


def _plain(case: Case, device: Any, everything: bool) -> Iterator[Report]:
    from ..layout import make_problem
    from ..schedules import bind, of
    from ..schedules.binding import promotes
    from ..select.space import configs

    # 4096 and 4099: every stride a multiple of 16, or none.
    a, b, out, addend = _tensors(case, 4096 if case.aligned else 4099)
    problem = make_problem(
        a, b, out, addend, scaled=case.epilogue == "scale", precision=case.precision,  # type: ignore[arg-type]
        fast_accum=case.fast_accum, device=device,
    )  # fmt: skip
    tensors = (a, b, out) if addend is None else (a, b, out, addend)
    for tile in configs(problem):
        if tile.config.split_k > 1 and not everything and (case.dtype, case.layout) != ("bf16", "NT"):
            continue
        if of(tile.config.schedule).refusal(problem, tile.config):
            # Clusters are for products with few tiles.
            continue
        binding = bind(problem, tile.config)
        compiled = binding.compile(tensors, (2.0, 1.0))
        yield _product(case, device, binding, compiled, promotes(problem))


def _fused(case: Case, device: Any, everything: bool) -> Iterator[Report]:
    from ..schedules import bind
    from ..schedules.binding import promotes
    from ..select import candidates
    from ..select.space import configs
    from .fused_targets import FUSED, abstract_product

    # As above, but even, since columns may be halved, and for sparse weights a multiple of 4.
    size = 4096 if case.aligned else 4100 if FUSED[case.epilogue].sparse is not None else 4098
    problem, tensors = abstract_product(
        case.epilogue, case.dtype, size if everything else FUSED[case.epilogue].rows, size, device
    )
    choices = [tile.config for tile in configs(problem)] if everything else candidates(problem)
    reports = []
    for config in choices:
        binding = bind(problem, config)
        compiled = binding.compile(*tensors)
        report = _product(case, device, binding, compiled, promotes(problem), passable=True)
        reports.append(report)
        if not (report.passed or everything):
            break
    if all(report.passed for report in reports):
        # Then a plan takes one that spills, or none.
        reports[-1] = replace(reports[-1], faults=(*reports[-1].faults, "is passed over, as all before"))
    yield from reports


def _elementwise(case: Case, device: Any) -> Iterator[Report]:
    from .fused_targets import gradient

    compiled = gradient(case.epilogue, case.dtype, 4096, device)
    took = usage(compiled)
    unfit = _unfit(took, device)
    yield Report(device.arch, case, "elementwise", took.registers, took.spilled, took.shared, (), unfit)


def _product(
    case: Case, device: Any, binding: Binding, compiled: Any, promoted: bool, passable: bool = False
) -> Report:
    """The report on a compiled product.

    Args:
        promoted: whether partial sums are promoted: they are added in registers then, with a wait each.
        passable: whether a plan may do without this config.
    """
    took, config = usage(compiled), binding.config
    text = compiled.asm.get("ptx") or compiled.asm["amdgcn"]
    found = tuple(word for word in _MATRIX if word in text)
    unfit = _unfit(took, device, 4 * binding.allowed_spills)
    faults = []
    if not promoted and not (passable and unfit) and serialised(compiled):
        faults.append("waits for every single wgmma")
    wanted = expected(device.arch, case, config)
    if wanted and not set(wanted) & set(found):
        faults.append(f"has {' and '.join(found) or 'no matrix instruction'}, not {' or '.join(wanted)}")
    all_faults, passed = (faults, unfit) if passable else ([*unfit, *faults], ())
    return Report(
        device.arch, case, str(config), took.registers, took.spilled, took.shared, found, tuple(all_faults),
        tuple(passed),
    )  # fmt: skip


def _unfit(took: Usage, device: Any, allowed: int = 0) -> tuple[str, ...]:
    """Why a plan would not launch a kernel.

    Args:
        allowed: bytes of a thread that it may spill.
    """
    words = []
    if took.spilled > allowed:
        words.append(f"spills {took.spilled} bytes")
    if took.shared > device.target.shared:
        words.append(f"takes {took.shared} bytes of shared memory of {device.target.shared}")
    return tuple(words)


def expected(name: str, case: Case, config: Any) -> tuple[str, ...]:
    """The matrix instructions, one of which a kernel must contain; none if the target has no unit for the type."""
    from .. import schedules
    from ..devices import ARCHS

    arch = ARCHS[name]
    if own := schedules.of(config.schedule).instruction:
        return (own,)
    if case.dtype == "fp32" and case.precision == "ieee":
        return ("v_mfma",) if arch.family == "cdna" else ()
    if case.dtype == "fp64":
        return {"ampere": ("mma.sync",), "hopper": ("mma.sync",), "cdna": ("v_mfma",)}.get(arch.family, ())
    if case.dtype == "int8" and arch.family == "blackwell":
        # Triton before 3.9 does not use the newer instruction here.
        return ("tcgen05.mma", "mma.sync")
    # wgmma and tcgen05 work on at least 64 rows a warpgroup; shorter tiles use the instruction of one warp.
    rows = config.block_n if config.swap else config.block_m
    if arch.family in ("hopper", "blackwell") and rows < 64:
        return ("mma.sync",)
    return (arch.matrix,)


def serialised(compiled: Any) -> bool:
    """Whether the assembler puts a wait after every wgmma, as it does if it can't follow the accumulators."""
    if "cubin" not in compiled.asm or "wgmma.mma_async" not in compiled.asm["ptx"]:
        return False
    from triton.backends.nvidia.compiler import get_ptxas

    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(compiled.asm["ptx"])
        file.flush()
        command = [get_ptxas(90).path, "-v", "--gpu-name=sm_90a", file.name, "-o", os.devnull]
        run = subprocess.run(command, capture_output=True, text=True, check=True)
    return "wgmma.mma_async instructions are serialized" in run.stderr


def check_here(name: str, everything: bool) -> list[Report]:
    """Compile and check all of a target's cases in this process."""
    use_target(name)
    return [report for case in cases(name, everything) for report in compile_case(name, case, everything)]


def check(name: str, everything: bool) -> list[dict[str, Any]]:
    """Compile and check all of a target's cases in a separate process; returns its reports as dicts."""
    command = [
        sys.executable,
        "-m",
        "gemmery.lab.targets",
        "--child",
        name,
        *(["--all"] if everything else []),
    ]
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    run = subprocess.run(command, capture_output=True, text=True, env=environment)
    if run.returncode:
        raise RuntimeError(f"{name}: compiling failed\n{run.stderr}")
    reports: list[dict[str, Any]] = json.loads(run.stdout.splitlines()[-1])
    return reports


def main() -> int:
    """Check the targets named on the command line, all by default; exit status 1 if any kernel is not as it must be."""
    parser = argparse.ArgumentParser(prog="python -m gemmery.lab.targets", description=main.__doc__)
    parser.add_argument("targets", nargs="*", metavar="TARGET", help=f"of {', '.join(TARGETS)}")
    parser.add_argument("--all", action="store_true", help="all layouts and epilogues, not a sample")
    parser.add_argument("--child", metavar="TARGET", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        print(json.dumps([asdict(report) for report in check_here(arguments.child, arguments.all)]))
        return 0
    unknown = set(arguments.targets) - set(TARGETS)
    if unknown:
        parser.error(f"no target {', '.join(sorted(unknown))}; there are {', '.join(TARGETS)}")
    bad = 0
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        targets = arguments.targets or TARGETS
        for target, reports in zip(
            targets, pool.map(lambda t: check(t, arguments.all), targets), strict=True
        ):
            faulty = [report for report in reports if report["faults"]]
            bad += len(faulty)
            passed = sum(bool(report["passed"]) for report in reports)
            print(
                f"{target}: {len(reports)} kernels, {len(faulty)} at fault, {passed} passed over", flush=True
            )
            for report in faulty:
                print(f"  {report['config']} {report['case']}: {'; '.join(report['faults'])}")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
