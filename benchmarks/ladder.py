"""Check the ladder's rungs on a GPU, time them beside cuBLAS and the library, and look into what their texts claim.

python benchmarks/ladder.py [--out FOLDER] [--seconds 240] [--rounds 3] [--only JOB ...]

Each job is a process of its own, so that one that fails or hangs takes nothing else with it. FOLDER gets

    rungs.json     the record of each rung, as of `benchmarks/rungs.py`
    sizes.json     speed over the size of square products: all rungs, torch and gemmery
    probes.json    what single texts claim: tiles of rung 10, rows' alignment, groups, configs, epilogues
    printed.json   what each rung printed, which its notebook shows
    log.txt        what all jobs printed

First all rungs are checked at once, and their measurements are rehearsed. This compiles what is timed afterwards. Then
jobs run one at a time, in the order of their worth. Those for which no time is left are named at the end. While one is
timed, the next one imports what it needs; a lock keeps it from the GPU.
"""

import argparse
import contextlib
import fcntl
import importlib.util
import io
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

ROOT = Path(__file__).resolve().parents[1]
TUTORIALS = ROOT / "tutorials"
sys.path[:0] = [str(ROOT), str(ROOT / "src"), str(TUTORIALS)]

from benchmarks.ladder_results import HEADER, code_digest  # noqa: E402

# Squares, and the rungs that multiply.
SIZES = (4096, 512, 1024, 2048, 3072, 8192)
PRODUCTS = (3, 4, 5, 6, 7, 8, 10)
# Tiles that rung 10 checks, each in a process of its own.
CHECKED = 6
RUNGS = {int(path.name[:2]): path for path in sorted(TUTORIALS.glob("[0-9][0-9]_*.py"))}


# ---------------------------------------------------------------------------------------------------------------------
# What is timed


def product_of(number: int) -> Callable[..., Any]:
    """A rung's product of a, (M, K), and w, (N, K), into an output."""
    import _common

    matmul = _common.rung(number).matmul
    return matmul if number in (3, 8, 10) else lambda a, w, out: matmul(a, w.T, out)


def usable(number: int) -> bool:
    """Whether a rung's check went well. A kernel that fails takes the GPU from the process that it runs in."""
    failed = Path(os.environ["LADDER_FAILED"])
    return not failed.exists() or str(number) not in failed.read_text(encoding="utf-8").split()


def timed(calls: dict[str, Callable[[], object]]) -> dict[str, float]:
    """Microseconds by name, as the rungs take them: inputs not in L2, in a new order each round."""
    import _common

    return dict(zip(calls, _common.time_us(list(calls.values())), strict=True))


def error_of(call: Callable[[], object], out: Any, exact: Any) -> float:
    """The relative error of what a call writes to `out`."""
    import _common

    out.fill_(float("nan"))
    call()
    return _common.relative_error(out, exact)


def runs(name: str, call: Callable[[], object]) -> bool:
    """Whether a call goes through. If not, its error is printed in a few lines, and the probe goes on."""
    try:
        call()
    except Exception:
        print(f"{name} failed:\n" + "\n".join(traceback.format_exc().strip().splitlines()[-6:]), flush=True)
        return False
    return True


def report(
    name: str, times: dict[str, float], flops: float = 0.0, errors: dict[str, float] | None = None
) -> dict[str, Any]:
    """A probe's figures, printed and as they are stored."""
    print(f"\n{name}")
    peer = times.get("torch")
    for each, t in times.items():
        line = f"  {each:<42} {t:9.1f} us"
        line += f" {flops / t / 1e6:7.1f} TFLOP/s" if flops else ""
        line += f"  {peer / t:6.3f} x torch" if peer else ""
        line += f"  error {errors[each]:.1e}" if errors and each in errors else ""
        print(line)
    sys.stdout.flush()
    return {"us": times, "errors": errors or {}}


def squares() -> dict[str, Callable[..., Any]]:
    """The products whose speed is taken over the size, by name."""
    import torch

    import gemmery

    methods: dict[str, Callable[..., Any]] = {f"rung {i}": product_of(i) for i in PRODUCTS if usable(i)}
    methods["torch"] = lambda a, w, out: torch.matmul(a, w.T, out=out)
    methods["gemmery"] = lambda a, w, out: library(gemmery, a, w, out)
    return methods


def prepare_sizes() -> None:
    """Compile what `sizes` times."""
    methods = squares()
    calls = [lambda i=i: methods[f"rung {i}"](*inputs(512)) for i in (3, 4, 5, 8)]
    calls += [lambda n=n: methods["gemmery"](*inputs(n)) for n in SIZES]
    compile_all([*calls, *tuned_calls(4096, 4096, 4096)])


def tuned_calls(m: int, n: int, k: int, numbers: Sequence[int] = (6, 7)) -> list[Callable[[], object]]:
    """Calls of rungs 6 and 7, one for each config."""
    import _common

    a, w, out = inputs(n, m, k)
    modules = [(number, _common.rung(number)) for number in numbers]
    return [
        config_call(number, module, config, a, w, out)
        for number, module in modules
        for config in module.CONFIGS
    ]


def config_call(
    number: int, module: ModuleType, config: Any, a: Any, w: Any, out: Any
) -> Callable[[], object]:
    """A call of rung 6 or 7 with a config of its list."""
    import triton

    (m, n), k = out.shape, a.shape[1]
    options = {**config.kwargs, "num_warps": config.num_warps, "num_stages": config.num_stages}
    count = triton.cdiv(m, config.kwargs["BLOCK_M"]) * triton.cdiv(n, config.kwargs["BLOCK_N"])
    if number == 7:
        options["NUM_SMS"], count = 132, min(count, 132)
    values = (a, w.T, out, m, n, k, *a.stride(), *w.T.stride(), *out.stride())
    return lambda: module.matmul_kernel[(count,)](*values, **options)


def sizes() -> dict[str, Any]:
    """Speed over the size of square products, each call after a pause: the time of the host does not count."""
    from gemmery.lab.timing import compare

    methods, found = squares(), {}
    for n in SIZES:
        a, w, out = inputs(n)
        exact = a.double() @ w.double().T
        calls: dict[str, Callable[[], object]] = {
            name: (lambda call=call, a=a, w=w, out=out: call(a, w, out)) for name, call in methods.items()
        }
        errors = {name: error_of(call, out, exact) for name, call in calls.items()}
        del exact
        found[str(n)] = report(f"burst, {n}x{n}x{n}", burst(compare, calls), 2.0 * n**3, errors)
    return found


def inputs(n: int, m: int | None = None, k: int | None = None, dtype: Any = None) -> tuple[Any, Any, Any]:
    """a, (m, k), w, (n, k), and an output."""
    import _common
    import torch

    m, k, dtype = m or n, k or n, dtype or torch.float16
    return (
        _common.normal(m, k, dtype=dtype),
        _common.normal(n, k, dtype=dtype),
        _common.poisoned(m, n, dtype=dtype),
    )


def compile_all(calls: Iterable[Callable[[], object]]) -> None:
    """Make calls once, many at a time, for what they compile."""
    with ThreadPoolExecutor(12) as pool:
        list(pool.map(lambda call: runs("a call", call), calls))


def burst(
    compare: Callable[..., Any], calls: dict[str, Callable[[], object]], rounds: int = 3
) -> dict[str, float]:
    """Microseconds by name, of calls after a pause."""
    found = compare(calls, rounds=rounds, regimes=("burst",))["burst"]
    return {name: 1e6 * statistics.median(each[name] for each in found) for name in calls}


#: Tiles of rung 10 that are timed: those of its text, the narrow ones, and some between.
WIDTHS = ((112, True), (128, True), (144, True), (160, True), (176, True), (256, False), (240, False), (224, False),
          (208, False), (192, False))  # fmt: skip


def tile_cases() -> list[tuple[Any, tuple[int, int, int]]]:
    """The products for which tiles of rung 10 are timed: dtype, M, N and K."""
    import torch

    wide = [
        (4096, 4096, 4096), (8192, 8192, 8192), (1500, 5760, 2880), (4096, 14336, 4096), (2048, 2048, 2048),
        (3000, 7168, 4096),
    ]  # fmt: skip
    return [(torch.bfloat16, shape) for shape in wide] + [(torch.float16, wide[0])]


def tiles_of(rung: ModuleType, dtype: Any) -> list[Any]:
    """The tiles of rung 10 that are timed."""
    import torch

    return [rung.Tile(*tile) for tile in WIDTHS] if dtype == torch.bfloat16 else list(rung.SHOWN)


def prepare_tiles() -> None:
    """Compile what `tiles` times: the kernels of rung 10 once for each tile, those of the library as it chooses."""
    import _common

    import gemmery

    rung, cases = _common.rung(10), tile_cases()
    kernels = {(tile, dtype) for dtype, _ in cases for tile in tiles_of(rung, dtype)}
    kernels |= {(rung.tile_for(*shape, 132), dtype) for dtype, shape in cases}
    kernels |= {(rung.tile_for(n, n, n, 132), cases[-1][0]) for n in SIZES}
    compile_all(
        [
            lambda tile=tile, dtype=dtype: rung.matmul(*inputs(256, dtype=dtype), tile)
            for tile, dtype in kernels
        ]
        + [
            lambda dtype=dtype, shape=shape: library(gemmery, *inputs(shape[1], shape[0], shape[2], dtype))
            for dtype, shape in cases
        ]
    )


def tiles() -> dict[str, Any]:
    """Rung 10: its tiles beside the library and torch, alone ("burst") and, at the first shape, in a row ("steady")."""
    import _common
    import torch

    import gemmery
    from gemmery.lab.timing import compare

    rung, found = _common.rung(10), {}
    for dtype, (m, n, k) in tile_cases():
        a, w, out = inputs(n, m, k, dtype)
        exact = a.double() @ w.double().T
        calls: dict[str, Callable[[], object]] = {
            "torch": lambda a=a, w=w, out=out: torch.matmul(a, w.T, out=out),
            "gemmery": lambda a=a, w=w, out=out: library(gemmery, a, w, out),
            "rung 10": lambda a=a, w=w, out=out: rung.matmul(a, w, out),
        }
        for tile in tiles_of(rung, dtype):
            calls[f"rung 10, {tile.width} {'turns' if tile.turns else 'shared'}"] = (
                lambda a=a, w=w, out=out, tile=tile: rung.matmul(a, w, out, tile)
            )
        calls = {name: call for name, call in calls.items() if runs(name, call)}
        errors = {name: error_of(call, out, exact) for name, call in calls.items()}
        shape = f"{m}x{n}x{k} {str(dtype)[6:]}"
        print(f"\nrung 10 takes {rung.tile_for(m, n, k, 132)} there")
        times = burst(compare, calls, 5)
        found[f"burst {shape}"] = report(f"burst, {shape}", times, 2.0 * m * n * k, errors)
        if (m, n, k) == (4096, 4096, 4096) and dtype == torch.bfloat16:
            fastest = sorted((name for name in calls if name.startswith("rung 10,")), key=times.__getitem__)[
                :3
            ]
            some = {name: calls[name] for name in ("torch", "gemmery", "rung 10", *fastest)}
            rounds = compare(some, rounds=3, regimes=("steady",))["steady"]
            times = {name: 1e6 * statistics.median(each[name] for each in rounds) for name in some}
            found[f"steady {shape}"] = report(f"steady, {shape}", times, 2.0 * m * n * k)
    return found


def library(gemmery: ModuleType, a: Any, w: Any, out: Any) -> None:
    """The library's product."""
    gemmery.matmul(a, w.T, out=out)


def groups() -> dict[str, Any]:
    """Rung 5 at aligned sizes: what the order gains, and where."""
    import _common
    import torch

    found = {}
    for m, n, k in ((4096, 4096, 4096), (8192, 8192, 8192), (16384, 16384, 2048)):
        a, w, out = _common.normal(m, k), _common.normal(n, k), _common.poisoned(m, n)
        calls: dict[str, Callable[[], object]] = {
            "torch": lambda a=a, w=w, out=out: torch.matmul(a, w.T, out=out)
        }
        for group in (1, 2, 4, 8, 16, 32):
            calls[f"rung 5, groups of {group}"] = lambda a=a, w=w, out=out, group=group: _common.rung(
                5
            ).matmul(a, w.T, out, group=group)
        found[f"{m}x{n}x{k}"] = report(f"{m}x{n}x{k}", timed(calls), 2.0 * m * n * k)
    return found


def without_assumption(number: int) -> ModuleType:
    """A rung without its `tl.assume`."""
    text = RUNGS[number].read_text(encoding="utf-8").splitlines(keepends=True)
    kept = [line for line in text if not line.strip().startswith("tl.assume(K > 0)")]
    assert len(kept) < len(text)
    path = Path(tempfile.mkdtemp()) / f"without_{number}.py"
    path.write_text("".join(kept), encoding="utf-8")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def configs() -> dict[str, Any]:
    """Rungs 6 and 7: each config, with `tl.assume(K > 0)` and without."""
    import _common
    import torch

    modules = [
        (number, name, module)
        for number in (6, 7)
        for name, module in (("", _common.rung(number)), (", no assumption", without_assumption(number)))
    ]
    found = {}
    with ThreadPoolExecutor(12) as pool:
        for m, n, k in ((4096, 4096, 4096),):
            a, w, out = _common.normal(m, k), _common.normal(n, k), _common.poisoned(m, n)
            calls: dict[str, Callable[[], object]] = {
                "torch": lambda a=a, w=w, out=out: torch.matmul(a, w.T, out=out)
            }
            for number, more, module in modules:
                for config in module.CONFIGS:
                    if config.kwargs["BLOCK_M"] * config.kwargs["BLOCK_N"] < 128 * 128:
                        continue
                    size = "x".join(str(config.kwargs[f"BLOCK_{x}"]) for x in "MNK")
                    name = f"rung {number}, {size} w{config.num_warps} s{config.num_stages} g{config.kwargs['GROUP']}"
                    name += " flat" * bool(config.kwargs.get("FLATTEN")) + more
                    calls[name] = config_call(number, module, config, a, w, out)
            # Compiles many at a time.
            went = dict(zip(calls, pool.map(lambda item: runs(*item), calls.items()), strict=True))
            calls = {name: call for name, call in calls.items() if went[name]}
            found[f"{m}x{n}x{k}"] = report(f"{m}x{n}x{k}", timed(calls), 2.0 * m * n * k)
    return found


def epilogues() -> dict[str, Any]:
    """Rung 9: what each epilogue costs beside the bare product."""
    import _common
    import torch

    import gemmery
    from gemmery.epilogues import gelu

    rung, found = _common.rung(9), {}
    for m, n, k in ((4096, 14336, 4096), (4096, 4096, 4096)):
        a, w, bias, out = _common.normal(m, k), rung.weight(n, k), _common.normal(n), _common.poisoned(m, n)
        calls: dict[str, Callable[[], object]] = {
            "torch": lambda a=a, w=w, out=out, bias=bias: (
                torch.addmm(bias, a, w.T, out=out), torch.ops.aten.gelu.out(out, out=out),
            ),
            "torch, addmm alone": lambda a=a, w=w, out=out, bias=bias: torch.addmm(bias, a, w.T, out=out),
            "torch, product alone": lambda a=a, w=w, out=out: torch.matmul(a, w.T, out=out),
            "rung 8, product alone": lambda a=a, w=w, out=out: _common.rung(8).matmul(a, w, out),
            "gemmery, gelu": lambda a=a, w=w, out=out, bias=bias: (
                gemmery.matmul(a, w.T, bias=bias, epilogue=gelu, out=out)
            ),
        }  # fmt: skip
        if usable(10):
            ten = _common.rung(10)
            calls["rung 10, product alone"] = lambda a=a, w=w, out=out, ten=ten: ten.matmul(a, w, out)
            calls["rung 10, gelu"] = lambda a=a, w=w, out=out, bias=bias, ten=ten: ten.matmul(
                a, w, out, None, bias
            )
            for tile in ten.SHOWN[:3]:
                calls[f"rung 10, gelu, {tile.width} {'turns' if tile.turns else 'shared'}"] = (
                    lambda a=a, w=w, out=out, bias=bias, ten=ten, tile=tile: ten.matmul(a, w, out, tile, bias)
                )
        for name in rung.ACTIVATIONS:
            calls[f"rung 9, {name}"] = lambda a=a, w=w, out=out, bias=bias, name=name: rung.linear(
                a, w, bias, name, out
            )
        calls = {name: call for name, call in calls.items() if runs(name, call)}
        found[f"{m}x{n}x{k}"] = report(f"{m}x{n}x{k}", timed(calls), 2.0 * m * n * k)
    return found


def alignment() -> dict[str, Any]:
    """Rungs 8 and 10 where rows begin at multiples of 128 bytes, and where at multiples of 16; torch's kernels."""
    import _common
    import torch

    import gemmery

    rung, found = _common.rung(10), {}
    for m, n, k in (
        (4096, 4096, 4096),
        (4096, 4096, 4064),
        (4096, 4096, 4088),
        (4001, 4104, 4096),
        (4001, 4104, 4088),
    ):
        a, w, out = inputs(n, m, k)
        calls: dict[str, Callable[[], object]] = {
            "torch": lambda a=a, w=w, out=out: torch.matmul(a, w.T, out=out),
            "gemmery": lambda a=a, w=w, out=out: library(gemmery, a, w, out),
            "rung 8": lambda a=a, w=w, out=out: _common.rung(8).matmul(a, w, out),
            "rung 10": lambda a=a, w=w, out=out: rung.matmul(a, w, out),
        }
        for tile in rung.SHOWN:
            calls[f"rung 10, {tile.width} {'turns' if tile.turns else 'shared'}"] = (
                lambda a=a, w=w, out=out, tile=tile: rung.matmul(a, w, out, tile)
            )
        calls = {name: call for name, call in calls.items() if runs(name, call)}
        found[f"{m}x{n}x{k}"] = report(f"{m}x{n}x{k}", timed(calls), 2.0 * m * n * k)
        kernels: list[str] = []
        if runs(
            "the profiler", lambda kernels=kernels, call=calls["torch"]: kernels.extend(kernels_of(call))
        ):
            print(f"  torch runs {', '.join(kernels)}", flush=True)
        found[f"{m}x{n}x{k}"]["torch runs"] = kernels
    return found


def kernels_of(call: Callable[[], object]) -> list[str]:
    """The names of the kernels that a call runs."""
    import torch

    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        call()
        torch.cuda.synchronize()
    return [event.name for event in profile.events() if "memset" not in event.name.lower()]


PROBES: dict[str, Callable[[], dict[str, Any]]] = {
    "sizes": sizes, "tiles": tiles, "groups": groups, "configs": configs, "epilogues": epilogues,
    "alignment": alignment,
}  # fmt: skip

#: What compiles what a probe times, before it has the GPU for itself.
PREPARE: dict[str, Callable[[], None]] = {"sizes": prepare_sizes, "tiles": prepare_tiles}


# ---------------------------------------------------------------------------------------------------------------------
# Jobs

# By worth, with the seconds of the GPU that each may take.
ORDER = (
    ("rung 10", 60), ("rung 12", 60), ("rung 5", 60), ("rung 8", 60), ("rung 11", 60), ("rung 3", 40), ("rung 4", 40),
    ("rung 6", 60), ("rung 7", 60), ("rung 9", 60), ("rung 1", 40), ("rung 2", 40), ("sizes", 50), ("alignment", 30),
    ("tiles", 60), ("groups", 20), ("epilogues", 40), ("configs", 60),
)  # fmt: skip
# Products of rungs 6 and 7 that a rung's measurement tunes: their configs are compiled many at a time.
TUNED = {
    "rung 6": (((4096, 4096, 4096), (6,)), ((4001, 4099, 4093), (6,))),
    "rung 7": (((4096, 4096, 4096), (7,)), ((4001, 4099, 4093), (6, 7))),
    "rung 8": (((4001, 4104, 4088), (7,)),),
}
# Seconds for a check and the rehearsal after it.
CHECKING = 150


@contextlib.contextmanager
def gpu(seconds: float, until: float, lock: Path) -> Iterator[None]:
    """The GPU for this process alone, for some seconds: then the process ends, wherever it is.

    Args:
        until: when all of it ends.
    """
    with lock.open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        left = until - time.monotonic()
        if left < 8:
            sys.exit("no time was left for it")
        signal.alarm(int(min(seconds, left)))
        yield


def job(
    name: str, result: Path, seconds: float, until: float, lock: Path, check: int | None, rounds: int
) -> None:
    """Do one job, which writes its JSON to `result`.

    Args:
        seconds: of the GPU.
        until: when all of it ends.
        check: if given, only a rung's check is done, beside other processes; of rung 10 that of the tile with this
            number.
    """
    # Whatever hangs ends in time.
    signal.alarm(max(1, int(min(until - time.monotonic(), 600 if check is None else CHECKING))))
    import _common

    import gemmery  # noqa: F401

    _common.ROUNDS = rounds
    if name in PROBES:
        PREPARE.get(name, lambda: None)()
        ready_file(result).touch()
        with gpu(seconds, until, lock):
            result.write_text(json.dumps(PROBES[name]()) + "\n", encoding="utf-8")
        return
    module = _common.rung(int(name.split()[1]))
    if check is not None:
        check_rung(name, module, result, check)
        return

    # What the check said, if it was made before.
    def checked() -> list[Any]:
        files = sorted(result.parent.glob(f"{name}-check*.json"))
        done = [json.loads(path.read_text(encoding="utf-8")) for path in files]
        for line in dict.fromkeys("".join(each["said"] for each in done).splitlines()):
            print(line)
        return [_common.Row(**row) for each in done for row in each["rows"]]

    module.check = checked
    module.QUESTIONS = ()  # which the notebook asks by itself
    ready_file(result).touch()
    with gpu(seconds, until, lock), contextlib.redirect_stdout(io.StringIO()) as said:
        module.main(["--json", str(result)])
    print(said.getvalue())
    record = json.loads(result.read_text(encoding="utf-8"))
    result.write_text(json.dumps(record | {"printed": said.getvalue()}), encoding="utf-8")


def check_rung(name: str, module: ModuleType, result: Path, part: int) -> None:
    """Do a rung's check, and rehearse its measurement.

    Args:
        part: of rung 10's check, the number of the tile that is checked.
    """
    import _common

    made = module.check
    said = io.StringIO()

    def check() -> list[Any]:
        with contextlib.redirect_stdout(said):
            rows: list[Any] = made()
        # Each part has checked the protocol in Python; once is enough.
        pairs = list(zip(rows[::2], rows[1::2], strict=True)) if name == "rung 10" else [tuple(rows)]
        return [row for pair in pairs if not part or "emulated" not in pair[0].name for row in pair]

    module.check = check
    if name == "rung 10":
        module.CHECKED = module.CHECKED[part : part + 1]
    module.main(["--json", str(result), "--check"])
    record = json.loads(result.read_text(encoding="utf-8"))
    result.write_text(json.dumps(record | {"said": said.getvalue()}), encoding="utf-8")
    if not _common.INTERPRETED and not part:
        for shape, numbers in TUNED.get(name, ()):
            compile_all(tuned_calls(*shape, numbers))
        rehearse(module)


def rehearse(module: ModuleType) -> None:
    """Run a rung's measurement without timing anything, for what it compiles."""
    import triton

    def once(call: Callable[[], object], **_: Any) -> float:
        call()
        return 1.0

    with mock.patch.object(triton.testing, "do_bench", once), contextlib.redirect_stdout(io.StringIO()):
        module.bench()


def ready_file(result: Path) -> Path:
    """The file that says that a job waits for the GPU."""
    return result.with_suffix(".ready")


def run_job(name: str, result: Path, more: Sequence[str]) -> tuple[str, Any]:
    """The output of a job, with a shortened traceback, and the result that it wrote; None if it failed."""
    environment = {**os.environ, "LADDER_FAILED": str(result.parent / "failed")}
    begun = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-B", __file__, "--job", name, "--result", str(result), *more],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, encoding="utf-8", env=environment, check=False,
    )  # fmt: skip
    head, mark, tail = done.stdout.partition("Traceback (most recent call last)")
    if mark:
        head += "...\n" + "\n".join(tail.strip().splitlines()[-12:])
    made = json.loads(result.read_text(encoding="utf-8")) if result.exists() and not done.returncode else None
    ended = f"status {done.returncode}{', out of time' * (done.returncode == -signal.SIGALRM)}"
    return f"===== {name}: {ended}, {time.monotonic() - begun:.0f} s\n{head.strip()}\n", made


def run_jobs(out: Path, seconds: float, rounds: int, only: Sequence[str]) -> int:
    """Run all jobs, as far as the time allows; 0 if all went through."""
    begun = time.monotonic()
    results: dict[str, Any] = {}
    failed: list[str] = []
    late: list[str] = []
    jobs = [
        (name, most)
        for name, most in ORDER
        if (not only or name in only) and (name in PROBES or int(name.split()[1]) in RUNGS)
    ]

    def left() -> float:
        return seconds - (time.monotonic() - begun)

    with tempfile.TemporaryDirectory() as made_in, (out / "log.txt").open("w", encoding="utf-8") as log:
        folder = Path(made_in)
        lock = folder / "lock"
        shared = ["--lock", str(lock), "--rounds", str(rounds), "--until", str(begun + seconds)]

        def say(text: str) -> None:
            print(text, flush=True)
            log.write(text + "\n")
            log.flush()

        def check(name_and_part: tuple[str, int]) -> tuple[str, str, Any]:
            name, part = name_and_part
            result = folder / f"{name}-check{part}.json"
            return name, *run_job(name, result, ["--check", str(part), *shared])

        def run(name_and_most: tuple[str, float]) -> tuple[str, str, Any]:
            name, most = name_and_most
            if left() < 12:
                return name, "", None
            result = folder / f"{name}.json"
            done = run_job(name, result, ["--seconds", str(most), *shared])
            ready_file(result).touch()  # so that nobody waits for a job that failed early
            return name, *done

        # All checks at once: they compile what is timed afterwards, on as many processors as there are.
        checks = [
            (name, part)
            for name, _ in jobs
            if name not in PROBES
            for part in range(CHECKED if name == "rung 10" else 1)
        ]
        with lock.open("w") as held, ThreadPoolExecutor(2) as pool:
            fcntl.flock(held, fcntl.LOCK_EX)
            done = pool.map(run, jobs)
            with ThreadPoolExecutor(max(1, len(checks))) as checking:
                for name, text, made in checking.map(check, checks):
                    # What went well is said by the later run.
                    if made is None:
                        say(text)
                        failed.append(f"{name} --check")
                        with (folder / "failed").open("a", encoding="utf-8") as file:
                            file.write(f"{name.split()[1]}\n")
            say(
                f"----- {time.monotonic() - begun:.0f} s for the checks; failed: {', '.join(failed) or 'none'}"
            )
            first = [ready_file(folder / f"{name}.json") for name, _ in jobs[:2]]
            while left() > 0.5 * seconds and not all(file.exists() for file in first):
                time.sleep(0.1)
            say(f"----- {time.monotonic() - begun:.0f} s until all is compiled")
            fcntl.flock(held, fcntl.LOCK_UN)

            for name, text, made in done:
                if not text:
                    late.append(name)
                    continue
                say(text)
                results[name] = made
                if made is None:
                    failed.append(name)
                write(out, results)
        say(
            f"----- {time.monotonic() - begun:.0f} s; failed: {', '.join(failed) or 'none'}; "
            f"no time for: {', '.join(late) or 'none'}"
        )
    return 1 if failed else 0


def write(out: Path, results: dict[str, Any]) -> None:
    """Write down what there is so far."""
    import torch

    from gemmery.lab.results import describe_run

    device = "cuda" if torch.cuda.is_available() else "cpu"
    run = describe_run(seed=0, rounds=5, regimes=[], device=device, peers=[])
    header = {key: run[key] for key in HEADER}
    made = [dict(made) for name, made in results.items() if name.startswith("rung") and made is not None]
    made.sort(key=lambda record: int(record["number"]))
    printed = [
        {"number": number, "code": code_digest(RUNGS[number]), "text": record.pop("printed")}
        for record in made
        for number in [int(record["number"])]
    ]
    files = {
        "rungs": {"rungs": made},
        "printed": {"rungs": printed},
        "sizes": {"sizes": results.get("sizes")},
        "probes": {
            name: results[name] for name in PROBES if name != "sizes" and results.get(name) is not None
        },
    }
    for name, data in files.items():
        (out / f"{name}.json").write_text(json.dumps(header | data, indent=1) + "\n", encoding="utf-8")


def main(arguments: list[str] | None = None) -> int:
    """Run all jobs, or do one of them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", ".")), metavar="FOLDER")
    parser.add_argument("--seconds", type=float, default=240.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", nargs="*", default=(), metavar="JOB")
    parser.add_argument("--job", help=argparse.SUPPRESS)
    parser.add_argument("--result", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--until", type=float, help=argparse.SUPPRESS)
    parser.add_argument("--lock", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--check", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.job is not None:
        job(
            options.job, options.result, options.seconds, options.until, options.lock, options.check, options.rounds
        )  # fmt: skip
        return 0
    options.out.mkdir(parents=True, exist_ok=True)
    return run_jobs(options.out, options.seconds, options.rounds, options.only)


if __name__ == "__main__":
    sys.exit(main())
