"""Records which code gemmery makes for the suites' rows, so that a change that should not change it can be judged.

    python benchmarks/code_record.py record before.json
    python benchmarks/code_record.py compare before.json after.json

For each row of each suite, in each type, and for one GPU of each target: the chosen config, the grid, the kernel's
numbers, the compiler's options, and a hash of the kernel's Triton IR without its source locations. Equal IR and options
make equal machine code with one version of Triton.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import re
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from gemmery.devices import TABLE, Device
from gemmery.dtypes import DTYPE_NAMES
from gemmery.lab import abstract, suites
from gemmery.lab.fused_targets import FUSED, abstract_product
from gemmery.lab.inputs import KINDS
from gemmery.lab.targets import TARGETS
from gemmery.launch.padding import launched
from gemmery.launch.plan import runs_on
from gemmery.problem import Problem
from gemmery.schedules import bind
from gemmery.select import candidates
from gemmery.select.samples import arguments

_hashes: dict[str, str] = {}


def device_of(target: str) -> Device:
    """The GPU of the device table that stands for a target."""
    return next(row for row in TABLE.values() if row.arch == target)


def rows() -> Iterator[tuple[str, Any, str]]:
    """All suites' rows, each with its suite and the type that it is measured in."""
    for suite in suites.whole():
        for row in suites.load(suite):
            yield suite, row, row.dtype or "bf16"


def ir_hash(
    kernel: Any, given: list[Any], grid: Any, constants: dict[str, Any]
) -> tuple[str, dict[str, Any]]:
    """A hash of a kernel's Triton IR, and the compiler's options."""
    from triton.compiler.compiler import ir, make_backend
    from triton.runtime import driver

    found: dict[str, Any] = {}

    def stop(src: Any, target: Any, options: dict[str, Any]) -> Any:
        chosen = {name: str(value) for name, value in sorted(options.items())}
        # Names of functions tell what they are: each text of one has a name of its own.
        key = repr(
            (src.fn.cache_key, sorted(src.signature.items()), src.constants_key, sorted(src.attrs.items()))
        )
        if key not in _hashes:
            backend = make_backend(target)
            parsed = backend.parse_options(dict(options))
            context = ir.context()
            ir.load_dialects(context)
            backend.load_dialects(context)
            functions, modules = backend.get_codegen_implementation(parsed), backend.get_module_map()
            made = src.make_ir(target, parsed, functions, modules, context)
            text = re.sub(r"^#loc.*$", "", str(made), flags=re.M)
            text = re.sub(r"\s*loc\([^)]*\)+", "", text)
            _hashes[key] = hashlib.sha256(text.encode()).hexdigest()[:16]
        found["hash"], found["options"] = _hashes[key], chosen
        raise _Stopped

    def with_key(src: Any, target: Any, options: dict[str, Any]) -> Any:
        src.constants_key = sorted(
            (str(k), str(getattr(v, "cache_key", v))) for k, v in src.constants.items()
        )
        return stop(src, target, options)

    # Triton sets `compile` when it meets a device first.
    kernel.device_caches[driver.active.get_current_device()]
    kernel.compile = with_key
    with contextlib.suppress(_Stopped):
        kernel.warmup(*given, grid=grid, **constants)
    return found["hash"], found["options"]


class _Stopped(Exception):
    """Compilation has got as far as it should."""


def numbers(value: Any) -> Any:
    """The plain numbers among a kernel's arguments."""
    if isinstance(value, list | tuple):
        return [x for x in map(numbers, value) if x is not None]
    if isinstance(value, int | float):
        return value
    shape = getattr(value, "block_shape", None)
    return None if shape is None else [list(map(int, x)) for x in (value.shape, value.strides, shape)]


def record(target: str) -> dict[str, Any]:
    """The record of a target, by suite, row and type."""
    from gemmery.launch.cross_compile import use_target

    use_target(target)
    device, made = device_of(target), {}
    fp8 = [DTYPE_NAMES[dtype] for dtype in device.target.fp8]
    for name, how in FUSED.items():
        for dtype in how.dtypes:
            if how.needs in (None, *device.target.fp8) and (dtype not in ("e4m3", "e5m2") or dtype in fp8):
                problem, given = abstract_product(name, dtype, how.rows, 4096, device)
                made[f"{target}/fused/{name}/{dtype}"] = describe(problem, given)
    for suite, row, dtype in rows():
        name = f"{target}/{suite}/{row.name}/{dtype}"
        if KINDS[dtype].precision not in ("ieee", *device.target.precisions):
            continue
        problem = abstract.of_row(row, dtype, device)
        if not runs_on(problem):
            continue
        problem = launched(problem) if not problem.paired else problem
        made[name] = describe(problem, arguments(problem, "meta"))
    return made


def describe(problem: Problem, tensors: Any) -> dict[str, Any]:
    """The record of a problem."""
    config = candidates(problem)[0]
    binding = bind(problem, config)
    given = binding.arguments(*tensors)
    code, options = ir_hash(binding.kernel, given, binding.grid, binding.constants)
    return {
        "config": str(config), "grid": list(binding.grid), "cluster": binding.cluster, "numbers": numbers(given),
        "code": code, "options": options,
    }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("command", choices=("record", "compare"))
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--targets", default=",".join(TARGETS))
    arguments = parser.parse_args()
    if arguments.command == "record":
        found: dict[str, Any] = {}
        with ProcessPoolExecutor(2) as pool:
            for made in pool.map(record, arguments.targets.split(",")):
                found |= made
        arguments.files[0].write_text(json.dumps(found, indent=0))
        print(f"{len(found)} rows")
        return 0
    before, after = (json.loads(file.read_text()) for file in arguments.files)
    differing = 0
    for name in sorted(before.keys() | after.keys()):
        parts = [k for k in ("config", "grid", "numbers", "code", "options")
                 if before.get(name, {}).get(k) != after.get(name, {}).get(k)]  # fmt: skip
        if parts:
            differing += 1
            print(name, *parts)
    print(f"{len(before)} and {len(after)} rows, {differing} differ")
    return 1 if differing else 0


if __name__ == "__main__":
    raise SystemExit(main())
