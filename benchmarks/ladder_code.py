"""Compile the ladder's kernels for a Hopper GPU, which need not be there, and write down what the compiler made of it.

python benchmarks/ladder_code.py [--out FILE]    writes benchmarks/results/ladder/code.json

The pages of the ladder show it beside what was measured, so run it with the Triton with which the rungs were timed.
"""

import argparse
import json
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "src"), str(ROOT / "tutorials")]
# Else the rungs would turn the interpreter on.
os.environ["TRITON_INTERPRET"] = "0"

import _common  # noqa: E402
import torch  # noqa: E402
import triton  # noqa: E402
from triton.runtime.jit import JITFunction  # noqa: E402

from benchmarks.ladder import without_assumption  # noqa: E402
from gemmery.devices import ARCHS  # noqa: E402
from gemmery.lab.inspection import sass  # noqa: E402
from gemmery.lab.inspection.code import of_kind  # noqa: E402
from gemmery.lab.inspection.resources import usage  # noqa: E402
from gemmery.launch.cross_compile import compiling_for  # noqa: E402
from gemmery.launch.occupancy import occupancy  # noqa: E402

OUT = ROOT / "benchmarks" / "results" / "ladder" / "code.json"
EVEN, ODD = (4096, 4096, 4096), (4001, 4099, 4093)
SMS = 132


def matrices(m: int, n: int, k: int, dtype: torch.dtype = torch.float16) -> tuple[torch.Tensor, ...]:
    """a, (m, k), w, (n, k), and an output. Nothing is ever read or written there."""
    return tuple(torch.empty(shape, dtype=dtype) for shape in ((m, k), (n, k), (m, n)))


def tuned(module: ModuleType, config: str, shape: tuple[int, int, int]) -> Callable[[], object]:
    """Rung 6 or 7 with the config that begins so: "128x256x64 8 4", with "flat" behind it in rung 7."""
    a, w, out = matrices(*shape)
    sizes, warps, stages, *flat = config.split()
    block = dict(zip(("BLOCK_M", "BLOCK_N", "BLOCK_K"), map(int, sizes.split("x")), strict=True))
    options: dict[str, Any] = {**block, "GROUP": 8, "num_warps": int(warps), "num_stages": int(stages)}
    if module.NUMBER == 7:
        options |= {"FLATTEN": bool(flat), "NUM_SMS": SMS}
    strides = (*a.stride(), *w.T.stride(), *out.stride())
    return lambda: module.matmul_kernel[(1,)](a, w.T, out, *shape, *strides, **options)


def dequantised(module: ModuleType, rows: int) -> Callable[[], object]:
    """Rung 11 with so many rows of x."""
    n = k = 8192
    a, sums = torch.empty(rows, k, dtype=torch.float16), torch.empty(rows, n)
    words, scales = torch.empty(n, k // 8, dtype=torch.int32), torch.empty(n, k // 64, dtype=torch.float16)
    block_m, block_n = min(64, max(16, triton.next_power_of_2(rows))), 64
    split = max(1, min(4 * SMS // (n // block_n * triton.cdiv(rows, block_m)), k // 512))
    return lambda: module.partial_kernel[(1,)](
        a, words, scales, sums, rows, n, k, a.stride(0), BLOCK_M=block_m, BLOCK_N=block_n, STEP=64, SPLIT=split,
        num_warps=4, num_stages=4,
    )  # fmt: skip


def sparse(module: ModuleType, rows: int, fragments: bool) -> Callable[[], object]:
    """Rung 12 with so many rows of x: with the weight in the order of the lanes, or expanded in registers."""
    n = k = 8192
    a, out = torch.empty(rows, k, dtype=torch.float16), torch.empty(rows, n, dtype=torch.float16)
    if not fragments:
        words = torch.empty(n, k // 16, dtype=torch.int16)
        weight = module.Compressed(torch.empty(n, k // 2, dtype=torch.float16), words)
        return lambda: module.expanded(a, weight, out)
    codes = torch.empty(n // 16, k // 64, 32, dtype=torch.int32)
    packed = module.Fragments(torch.empty(n // 16, k // 32, 32, 4, dtype=torch.int32), codes)
    module.has_mma_sp = lambda: True
    return lambda: module.matmul(a, packed, out)


def cases() -> Iterator[tuple[int, str, str, Callable[[], object]]]:
    """Kernels: the rung, a name, the shape, and a call."""
    rungs = {number: _common.rung(number) for number in (3, 4, 5, 6, 7, 8, 9, 10, 11, 12)}
    rungs[7].num_sms = lambda device: SMS
    rungs[8].machine = lambda device: (SMS, rungs[8].CONFIGS[0])
    if hasattr(rungs[9], "machine"):
        rungs[9].machine = rungs[8].machine
    for window in rungs[3].WINDOWS:
        a, w, out = matrices(*EVEN)
        yield (
            3,
            window,
            "x".join(map(str, EVEN)),
            lambda a=a, w=w, out=out, x=window: rungs[3].matmul(a, w, out, x),
        )
    for number in (4, 5):
        for shape in (EVEN, ODD):
            a, w, out = matrices(*shape)
            yield (
                number, "", "x".join(map(str, shape)),
                lambda a=a, w=w, out=out, number=number: rungs[number].matmul(a, w.T, out),
            )  # fmt: skip
    for number, configs in (
        (6, ("128x256x64 8 4", "128x256x64 8 3", "128x128x64 8 3", "256x128x64 8 4")),
        (7, ("128x256x64 8 3", "128x256x64 8 3 flat", "128x128x64 8 4", "128x128x64 8 4 flat")),
    ):
        for shape in (EVEN, ODD):
            for config in configs:
                yield number, config, "x".join(map(str, shape)), tuned(rungs[number], config, shape)
    yield 6, "128x256x64 8 3, no assumption", "x".join(map(str, EVEN)), tuned(
        without_assumption(6), "128x256x64 8 3", EVEN
    )  # fmt: skip
    a, w, out = matrices(*EVEN)
    yield 8, "", "x".join(map(str, EVEN)), lambda: rungs[8].matmul(a, w, out)
    bias = torch.empty(EVEN[1], dtype=torch.float16)
    for name in rungs[9].ACTIVATIONS:
        yield 9, name, "x".join(map(str, EVEN)), lambda name=name: rungs[9].linear(a, w, bias, name, out)
    for rows in (1, 16, 256):
        yield 11, f"{rows} row{'s' * (rows > 1)}", f"{rows}x8192x8192", dequantised(rungs[11], rows)
    for rows in (1, 64):
        yield (
            12,
            f"expanded, {rows} row{'s' * (rows > 1)}",
            f"{rows}x8192x8192",
            sparse(rungs[12], rows, False),
        )
    for rows in (1, 16, 64):
        yield 12, f"mma.sp, {rows} row{'s' * (rows > 1)}", f"{rows}x8192x8192", sparse(rungs[12], rows, True)
    for tile in rungs[10].SHOWN:
        for given, more in ((None, ""), (bias, ", gelu")):
            yield (
                10, f"width {tile.width}, {'turns' if tile.turns else 'shared'}{more}", "x".join(map(str, EVEN)),
                lambda tile=tile, given=given: rungs[10].matmul_kernel[(1,)](
                    **rungs[10].arguments(a, w, out, tile, SMS, given)
                ),
            )  # fmt: skip


@contextmanager
def recorded() -> Iterator[list[Any]]:
    """Within, kernels that are launched are only compiled; what came out is in the list."""
    kernels: list[Any] = []
    original = JITFunction.run

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        kernels.append(original(self, *args, grid=grid, warmup=True, **options))
        return kernels[-1]

    with compiling_for("sm_90"), mock.patch.object(JITFunction, "run", run):
        yield kernels


def read(compiled: Any) -> dict[str, Any]:
    """Facts about a compiled kernel."""
    code = sass.read(sass.disassemble(compiled.asm["cubin"]))
    took, loop = usage(compiled), code.main_loop
    assert loop is not None
    held = occupancy(ARCHS["sm_90"], took.registers, took.shared, took.warps)
    moved = Counter(
        (i.kind, i.opcode, i.bits) for i in of_kind(loop.body, "copy", "load", "read", "write", "spill")
    )
    return {
        "registers": took.registers, "spilled": took.spilled, "shared": took.shared, "warps": took.warps,
        "programs": None if held is None else held.programs,
        "tensor": dict(Counter(i.opcode for i in loop.tensor)),
        "moves": [
            {"kind": kind, "opcode": opcode, "bits": bits, "count": n} for (kind, opcode, bits), n in moved.items()
        ],
        "waits": sorted(i.brief for i in loop.body if "DEPBAR" in i.opcode),
        "others": len(loop.body) - sum(moved.values()) - len(loop.tensor),
    }  # fmt: skip


def main(arguments: list[str] | None = None) -> int:
    """Compile all and write it down."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=OUT, metavar="FILE")
    options = parser.parse_args(arguments)
    found = []
    for number, name, shape, call in cases():
        with recorded() as kernels:
            call()
        found.append({"rung": number, "name": name, "shape": shape, **read(kernels[0])})
        print(json.dumps(found[-1]), flush=True)
    data = {"triton": triton.__version__, "target": "sm_90", "kernels": found}
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
