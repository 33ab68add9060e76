"""Measure the table of `gemmery/select/tables` for a format of packed weights, on the GPU at hand.

python benchmarks/packed_table.py --format int4
python benchmarks/packed_table.py --format int4 --schedule specialized
python benchmarks/packed_table.py --format int4 --rows 1,16

Times every tile, in every number of parts along K that is considered, on cold inputs, in shuffled order. A schedule
that not every Triton has gets a table of its own. A second one is for the Triton that streams, see `Config.stream`, and
is about other schedules as well. Most launches come behind one of another kernel, see `measured.OTHER_CODE`. With some
numbers of rows or small weights alone, the rest of a table is kept. Don't use this after adding tiles: they would have
no times in it.
"""

import argparse
import json
import random
import statistics
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from triton.runtime.errors import OutOfResources

import gemmery
from gemmery import devices
from gemmery.epilogues.results import Results
from gemmery.problem import Config, Problem
from gemmery.product.build import make_call
from gemmery.product.epilogue import program
from gemmery.product.prepare import problem_of_traced
from gemmery.product.spec import NONE, Options
from gemmery.schedules import REGISTRY, bind, of
from gemmery.select.measured import PACKED, file_name
from gemmery.select.space import space_of

sys.path.insert(0, str(Path(__file__).parent))
from measured_table import TABLES, text_of

#: Schedules that have tables of their own.
OWN = [schedule.name for schedule in REGISTRY.values() if schedule.tables]
#: Weights, N and K, and the numbers of rows with which they are timed.
WEIGHTS = ((8192, 8192), (14336, 4096), (4096, 14336), (4096, 4096), (28672, 4096), (2048, 8192))
ROWS = (1, 16, 32, 64, 96, 128, 192, 256, 512, 1024, 2048, 4096)
#: Small weights, and the numbers of rows with which they are timed.
SMALL = (
    (768, 1024),
    (768, 3072),
    (768, 9216),
    (2560, 1024),
    (2560, 3072),
    (9216, 1024),
    (9216, 3072),
    (1536, 16384),
)
FEW = (1, 16, 32, 64, 256)
#: How much more than the quickest a config may take in the first round to be timed again.
NEAR = 1.25
#: Microseconds for which each of these is timed, in at most so many rounds: one time of a short kernel says little.
ENOUGH, MOST_ROUNDS = 1000, 40


def product(format: str, M: int, N: int, K: int) -> tuple[Problem, tuple[Any, ...], Any]:
    """A product's problem, what its kernel is given, and the weight."""
    group = PACKED[format][1]
    dense = torch.randn(N, K, device="cuda", dtype=torch.bfloat16)
    weight = gemmery.quantize(dense, format, group_size=group or None)
    x = torch.randn(M, K, device="cuda", dtype=torch.bfloat16)
    call = make_call("linear", x, weight.unscaled(), None, NONE, Options())
    made = program(call)
    results = Results(made, call.shape, (torch.bfloat16,), torch.float32)
    out = results.allocate(x.device, 1)
    device = devices.current(x.device)
    assert device is not None
    return problem_of_traced(call, results, out, device), ((x, *call.b.launched, out[0]), ()), weight


def compile_one(job: tuple[str, Config]) -> str:
    """Compile a config into Triton's cache."""
    format, config = job
    problem, tensors, _ = product(format, 16, 256, 8192)
    reason = why_not(bind(problem, config).compile(*tensors))
    return f"{config}: {reason}" if reason else ""


def why_not(kernel: Any) -> str:
    """Why a kernel is not timed; empty if it is, and then it is loaded."""
    try:
        kernel._init_handles()
    except OutOfResources as error:
        return str(error)
    return f"{kernel.n_spills} words spilled" if kernel.n_spills else ""


def cold(call: Callable[[], object], scratch: torch.Tensor) -> tuple[Any, Any]:
    """Events before and after a call whose inputs are in no cache."""
    scratch.fill_(1)
    torch.cuda._sleep(1_000_000)
    scratch.fill_(0)
    first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    first.record()
    call()
    last.record()
    return first, last


def considered(problem: Problem, schedule: str) -> list[Config]:
    """The configs that a table is about: those of a schedule, or of all that every Triton has.

    A table for the Triton that streams is about both: its choices are between times of one Triton.
    """
    both = bool(schedule) and len(of(schedule).own_tables()) > 1
    return [
        config
        for config in space_of(problem).configs
        if config.loader == "descriptor"
        and (config.schedule == schedule or ((both or not schedule) and of(config.schedule).universal))
    ]


def measure(
    format: str, schedule: str, M: int, N: int, K: int, rounds: int, scratch: torch.Tensor
) -> dict[str, float]:
    """Microseconds of each config, the median of `rounds` or more for those near the quickest."""
    problem, tensors, weight = product(format, M, N, K)
    # Rows of all tiles: which of them are cut differs.
    some = torch.arange(0, M, max(M // 64, 1), device="cuda")
    want = tensors[0][0][some].double() @ weight.unscaled().dequantize(torch.float64).mT
    calls: dict[str, Callable[[], object]] = {}
    for config in considered(problem, schedule):
        if config.block_m > 2 * max(M, 16):
            continue
        binding = bind(problem, config)
        kernel = binding.compile(*tensors)
        if why_not(kernel):
            continue
        calls[str(config)] = lambda b=binding: b.launch(*tensors)
        tensors[0][-1].fill_(float("nan"))
        calls[str(config)]()
        error = ((tensors[0][-1][some].double() - want).norm() / want.norm()).item()
        if not error < 2.5e-3:
            raise SystemExit(f"{format} {M}x{N}x{K} {config}: error {error}")
    once = time_round(list(calls), calls, scratch)
    times = {name: [found] for name, found in once.items()}
    least = min(once.values(), default=0.0)
    near = [name for name in once if once[name] < NEAR * least]
    for _ in range(max(rounds, min(int(ENOUGH / least), MOST_ROUNDS)) - 1 if near else 0):
        for name, found in time_round(near, calls, scratch).items():
            times[name].append(found)
    return {name: round(statistics.median(found), 2) for name, found in times.items()}


def time_round(
    names: list[str], calls: dict[str, Callable[[], object]], scratch: torch.Tensor
) -> dict[str, float]:
    """Microseconds of each call, in shuffled order."""
    events = [(name, cold(calls[name], scratch)) for name in random.sample(names, len(names))]
    torch.cuda.synchronize()
    return {name: first.elapsed_time(last) * 1e3 for name, (first, last) in events}


def read(path: Path) -> dict[tuple[int, ...], dict[str, float]]:
    """What a table has."""
    table = json.loads(path.read_text(encoding="utf-8"))
    return {
        tuple(shape): {c: t for c, t in zip(table["configs"], line, strict=True) if t is not None}
        for shape, line in zip(table["shapes"], table["microseconds"], strict=True)
    }


def main() -> None:
    """Run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--format", choices=sorted(PACKED), required=True)
    parser.add_argument("--schedule", choices=OWN, default="", help="this one, in a table of its own")
    parser.add_argument("--rounds", type=int, default=5, help="at least so many")
    parser.add_argument("--processes", type=int, default=14)
    parser.add_argument("--small", action="store_true", help="small weights alone")
    parser.add_argument("--rows", help="these numbers of rows alone, separated by commas")
    parser.add_argument("--out", type=Path, default=TABLES, metavar="DIR")
    options = parser.parse_args()
    format = options.format
    problem, _, _ = product(format, 16, 256, 8192)
    configs = {replace(c, split_k=1 if c.split_k == 1 else 2) for c in considered(problem, options.schedule)}
    with ProcessPoolExecutor(options.processes, mp_context=get_context("spawn")) as pool:
        for line in pool.map(compile_one, [(format, config) for config in sorted(configs, key=str)]):
            if line:
                print(line, flush=True)
    scratch = torch.empty(1 << 28, dtype=torch.int8, device="cuda")
    some = {int(number) for number in options.rows.split(",")} if options.rows else {*ROWS, *FEW}
    if some - {*ROWS, *FEW}:
        parser.error(f"--rows: there are {', '.join(map(str, sorted({*ROWS, *FEW})))}")
    shapes = [(M, *weight) for weight in SMALL for M in FEW]
    if not options.small:
        shapes = [(M, *weight) for weight in WEIGHTS for M in ROWS] + shapes
    times = {}
    for M, N, K in shapes:
        if M not in some:
            continue
        found = measure(format, options.schedule, M, N, K, options.rounds, scratch)
        if not found:
            continue
        times[1, M, N, K] = found
        best = min(found, key=found.__getitem__)
        print(M, N, K, best, found[best], flush=True)
    import triton

    name = problem.device.name
    suffix = of(options.schedule).own_tables()[-1] if options.schedule else ""
    path = options.out / file_name(name, f"packed {format}", suffix)
    versions = {triton.__version__}
    if path.is_file() and (options.rows or options.small):
        times = read(path) | times
        versions |= set(json.loads(path.read_text(encoding="utf-8"))["triton"].split(", "))
    path.write_text(text_of(times, name, versions), encoding="utf-8")
    print(json.dumps({"table": str(path), "shapes": len(times)}))


if __name__ == "__main__":
    main()
