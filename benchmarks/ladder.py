"""Check the ladder's rungs on a GPU, time them beside cuBLAS and the library, and look into what their texts claim.

python benchmarks/ladder.py [--out FOLDER] [--seconds 230] [--rounds 3] [--only JOB ...]

Each job is a process of its own, so that one that fails or hangs takes nothing else with it. FOLDER gets

    rungs.json     the record of each rung, as of `benchmarks/rungs.py`
    sizes.json     speed over the size of square products: all rungs, torch and gemmery
    probes.json    what single texts claim: tiles of rung 10, groups at odd sizes, configs and `tl.assume`, epilogues
    log.txt        what all jobs printed

Jobs come in the order of their worth. Those for which no time is left are named at the end. While one is timed, the
next one imports what it needs; a lock keeps it from the GPU.
"""

import argparse
import contextlib
import fcntl
import importlib.util
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
TUTORIALS = ROOT / "tutorials"
sys.path[:0] = [str(ROOT / "src"), str(TUTORIALS)]

# Squares, and the rungs that multiply.
SIZES = (4096, 512, 1024, 2048, 3072, 8192)
PRODUCTS = (3, 4, 5, 6, 7, 8, 10)
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
    return str(number) not in os.environ.get("LADDER_WITHOUT", "").split()


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


def sizes() -> dict[str, Any]:
    """Speed over the size of square products."""
    import _common
    import torch

    import gemmery

    found = {}
    methods: dict[str, Callable[..., Any]] = {f"rung {i}": product_of(i) for i in PRODUCTS if usable(i)}
    methods["torch"] = lambda a, w, out: torch.matmul(a, w.T, out=out)
    methods["gemmery"] = lambda a, w, out: gemmery.matmul(a, w.T, out=out)
    for n in SIZES:
        a, w, out = _common.normal(n, n), _common.normal(n, n), _common.poisoned(n, n)
        exact = a.double() @ w.double().T
        calls = {
            name: (lambda call=call, a=a, w=w, out=out: call(a, w, out)) for name, call in methods.items()
        }
        errors = {name: error_of(call, out, exact) for name, call in calls.items()}
        del exact
        found[str(n)] = report(f"{n}x{n}x{n}", timed(calls), 2.0 * n**3, errors)
    return found


def tiles() -> dict[str, Any]:
    """Rung 10: its tiles beside the library and torch, alone ("burst") and, at the first shape, in a row ("steady")."""
    import _common
    import torch

    import gemmery
    from gemmery.lab.timing import compare

    rung = _common.rung(10)
    chosen = [(112, True), (128, True), (176, True), (256, False), (208, False), (192, False)]
    found: dict[str, Any] = {}
    for dtype, shapes in (
        (torch.bfloat16, [(4096, 4096, 4096), (8192, 8192, 8192), (1500, 5760, 2880), (4096, 14336, 4096)]),
        (torch.float16, [(4096, 4096, 4096)]),
    ):
        for m, n, k in shapes:
            a, w = _common.normal(m, k, dtype=dtype), _common.normal(n, k, dtype=dtype)
            out, exact = _common.poisoned(m, n, dtype=dtype), a.double() @ w.double().T
            calls: dict[str, Callable[[], object]] = {
                "torch": lambda a=a, w=w, out=out: torch.matmul(a, w.T, out=out),
                "gemmery": lambda a=a, w=w, out=out: gemmery.matmul(a, w.T, out=out),
                "rung 8": lambda a=a, w=w, out=out: _common.rung(8).matmul(a, w, out),
                "rung 10": lambda a=a, w=w, out=out: rung.matmul(a, w, out),
            }
            if dtype != torch.float16:
                del calls["rung 8"]
            for width, turns in chosen:
                tile = rung.Tile(width, turns)
                calls[f"rung 10, {width} {'turns' if turns else 'shared'}"] = (
                    lambda a=a, w=w, out=out, tile=tile: rung.matmul(a, w, out, tile)
                )
            calls = {name: call for name, call in calls.items() if runs(name, call)}
            errors = {name: error_of(call, out, exact) for name, call in calls.items()}
            shape = f"{m}x{n}x{k} {str(dtype)[6:]}"
            print(f"\nrung 10 takes {rung.tile_for(m, n, k, 132)} there")
            rounds = compare(calls, rounds=5, regimes=("burst",))["burst"]
            times = {name: 1e6 * statistics.median(each[name] for each in rounds) for name in calls}
            found[f"burst {shape}"] = report(f"burst, {shape}", times, 2.0 * m * n * k, errors)
            if (m, n, k) == (4096, 4096, 4096) and dtype == torch.bfloat16:
                fastest = sorted(
                    (name for name in calls if name.startswith("rung 10,")), key=times.__getitem__
                )[:3]
                some = {name: calls[name] for name in ("torch", "gemmery", "rung 10", *fastest)}
                rounds = compare(some, rounds=3, regimes=("steady",))["steady"]
                times = {name: 1e6 * statistics.median(each[name] for each in rounds) for name in some}
                found[f"steady {shape}"] = report(f"steady, {shape}", times, 2.0 * m * n * k)
    return found


def odd() -> dict[str, Any]:
    """Rung 5 at sizes that divide by nothing: is it the order, or the code?"""
    import _common
    import torch

    found = {}
    for m, n, k in ((4001, 4099, 4093), (4001, 4099, 4096)):
        a, w, out = _common.normal(m, k), _common.normal(n, k), _common.poisoned(m, n)
        calls: dict[str, Callable[[], object]] = {
            "torch": lambda a=a, w=w, out=out: torch.matmul(a, w.T, out=out)
        }
        calls["rung 4"] = lambda a=a, w=w, out=out: _common.rung(4).matmul(a, w.T, out)
        for group in (1, 2, 3, 4, 8, 12, 16, 32):
            calls[f"rung 5, groups of {group}"] = lambda a=a, w=w, out=out, group=group: _common.rung(
                5
            ).matmul(a, w.T, out, group=group)
        for number in (6, 7):
            product = product_of(number)
            calls[f"rung {number}"] = lambda a=a, w=w, out=out, product=product: product(a, w, out)
        times = timed(calls)
        found[f"{m}x{n}x{k}"] = report(f"{m}x{n}x{k}", times, 2.0 * m * n * k)
    return found


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
    import triton

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
                    options = {
                        **config.kwargs,
                        "num_warps": config.num_warps,
                        "num_stages": config.num_stages,
                    }
                    count = triton.cdiv(m, config.kwargs["BLOCK_M"]) * triton.cdiv(
                        n, config.kwargs["BLOCK_N"]
                    )
                    if number == 7:
                        options["NUM_SMS"], count = 132, min(count, 132)
                    size = "x".join(str(config.kwargs[f"BLOCK_{x}"]) for x in "MNK")
                    name = f"rung {number}, {size} w{config.num_warps} s{config.num_stages} g{config.kwargs['GROUP']}"
                    name += " flat" * bool(config.kwargs.get("FLATTEN")) + more
                    values = (a, w.T, out, m, n, k, *a.stride(), *w.T.stride(), *out.stride())
                    calls[name] = (
                        lambda kernel=module.matmul_kernel, values=values, options=options, count=count: (
                            kernel[(count,)](*values, **options)
                        )
                    )
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
                gemmery.matmul(a, w.T, bias=bias, epilogue="gelu", out=out)
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


PROBES: dict[str, Callable[[], dict[str, Any]]] = {
    "sizes": sizes, "tiles": tiles, "odd": odd, "groups": groups, "configs": configs, "epilogues": epilogues,
}  # fmt: skip


# ---------------------------------------------------------------------------------------------------------------------
# Jobs

# By worth, with the seconds of the GPU that each may take.
ORDER = (
    ("rung 10", 60), ("tiles", 50), ("sizes", 70), ("epilogues", 40), ("configs", 60), ("rung 11", 30), ("rung 9", 30),
    ("odd", 40), ("rung 6", 40), ("rung 7", 40), ("rung 8", 40), ("rung 5", 30), ("rung 4", 20), ("rung 3", 20),
    ("rung 12", 40), ("groups", 20), ("rung 2", 20), ("rung 1", 20),
)  # fmt: skip


@contextlib.contextmanager
def gpu(seconds: float, lock: Path | None) -> Iterator[None]:
    """The GPU for this process alone, for some seconds: then the process ends, wherever it is."""
    with contextlib.ExitStack() as stack:
        if lock is not None:
            fcntl.flock(stack.enter_context(lock.open("w")), fcntl.LOCK_EX)
        signal.alarm(max(1, int(seconds)))
        yield


def job(name: str, result: Path, seconds: float, lock: Path | None, check: bool, rounds: int) -> None:
    """Do one job, which writes its JSON to `result`; with `check`, only a rung's checks, beside other processes."""
    import _common

    import gemmery  # noqa: F401

    _common.ROUNDS = rounds
    if name in PROBES:
        with gpu(seconds, lock):
            result.write_text(json.dumps(PROBES[name]()) + "\n", encoding="utf-8")
        return
    module = _common.rung(int(name.split()[1]))
    with gpu(seconds, None if check else lock):
        module.main(["--json", str(result), *["--check"] * check])


def run_job(
    name: str, folder: Path, seconds: float, more: Sequence[str], without: Sequence[str]
) -> tuple[str, Any]:
    """What a job printed, a traceback in a few lines, and what it wrote; None if it failed.

    Args:
        seconds: of the GPU.
        without: rungs that others are not to run.
    """
    result = folder / f"{name}{len(more)}.json"
    environment = {**os.environ, "LADDER_WITHOUT": " ".join(without)}
    begun = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-B", __file__, "--job", name, "--result", str(result), "--seconds", str(seconds), *more],
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
    without: list[str] = []
    jobs = [
        (name, most)
        for name, most in ORDER
        if (not only or name in only) and (name in PROBES or int(name.split()[1]) in RUNGS)
    ]

    def left() -> float:
        return seconds - (time.monotonic() - begun)

    with tempfile.TemporaryDirectory() as made_in, (out / "log.txt").open("w", encoding="utf-8") as log:
        folder = Path(made_in)

        def say(text: str) -> None:
            print(text, flush=True)
            log.write(text + "\n")
            log.flush()

        # All checks at once: they compile what is timed afterwards, on as many processors as there are.
        rungs = [name for name, _ in jobs if name not in PROBES]
        with ThreadPoolExecutor(max(1, len(rungs))) as pool:
            checks = pool.map(lambda name: run_job(name, folder, min(90, left()), ["--check"], ()), rungs)
            for name, (text, made) in zip(rungs, checks, strict=True):
                # What went well is said by the later run.
                if made is None:
                    say(text)
                    failed.append(f"{name} --check")
                    without.append(name.split()[1])
        say(f"----- {time.monotonic() - begun:.0f} s for the checks; failed: {', '.join(failed) or 'none'}")

        def run(name_and_most: tuple[str, float]) -> tuple[str, str, Any]:
            name, most = name_and_most
            if left() < 10:
                return name, "", None
            more = ["--lock", str(folder / "lock"), "--rounds", str(rounds)]
            return name, *run_job(name, folder, min(most, left()), more, without)

        with ThreadPoolExecutor(2) as pool:
            for name, text, made in pool.map(run, jobs):
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
    header = {key: run[key] for key in ("gpu", "torch", "triton", "cuda", "commit", "date")}
    records = [made for name, made in results.items() if name.startswith("rung") and made is not None]
    files = {
        "rungs": {"rungs": sorted(records, key=lambda record: int(record["number"]))},
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
    parser.add_argument("--seconds", type=float, default=230.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", nargs="*", default=(), metavar="JOB")
    parser.add_argument("--job", help=argparse.SUPPRESS)
    parser.add_argument("--result", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--lock", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--check", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.job is not None:
        job(options.job, options.result, options.seconds, options.lock, options.check, options.rounds)
        return 0
    options.out.mkdir(parents=True, exist_ok=True)
    return run_jobs(options.out, options.seconds, options.rounds, options.only)


if __name__ == "__main__":
    sys.exit(main())
