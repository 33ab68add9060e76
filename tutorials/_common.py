"""Shared by all rungs: the switch to the interpreter, errors, timing, the record of a run and its printing.

A rung imports this file before it imports Triton, because Triton decides when `@triton.jit` runs whether a function is
compiled or interpreted. Without a GPU this file turns the interpreter on: the kernels then run on CPU tensors, program
after program in NumPy, which is slow but computes the same. This file hides nothing of a kernel.
"""

import argparse
import importlib.util
import inspect
import json
import math
import os
import random
import reprlib
import statistics
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

HERE = Path(__file__).resolve().parent

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# Only now that the switch is set.
import triton  # noqa: E402
import triton.language as tl  # noqa: E402

INTERPRETED = bool(triton.knobs.runtime.interpret)
DEVICE = "cpu" if INTERPRETED else "cuda"

# The name tl.make_block_ptr outlived block pointers and raises in newer versions; loads tell the truth.
HAS_BLOCK_POINTERS = "boundary_check" in inspect.signature(tl.load).parameters


# ---------------------------------------------------------------------------------------------------------------------
# The record of a run


@dataclass
class Row:
    """One line of a rung's result: how wrong something was, and on a GPU how fast.

    `role` is the meaning of the line for the ladder: "this" is the rung itself, "before" the rung before it, "torch"
    what torch offers for the same work, "copy" a plain copy (the yardstick of memory bandwidth), "other" a variant.
    """

    name: str
    role: str
    shape: str
    time_us: float | None = None
    rate: float | None = None
    unit: str = ""
    error: float | None = None


@dataclass
class Record:
    """The results of one run of a rung."""

    number: int
    title: str
    device: str
    interpreted: bool
    torch: str
    triton: str
    seed: int
    rows: list[Row]


# ---------------------------------------------------------------------------------------------------------------------
# Inputs, references, errors


def normal(*shape: int, dtype: torch.dtype = torch.float16, scale: float = 1.0) -> torch.Tensor:
    """Random normal numbers. Never time a GPU on zeros: they switch fewer transistors and run at a higher clock."""
    return (torch.randn(shape, device=DEVICE, dtype=torch.float32) * scale).to(dtype)


def poisoned(*shape: int, dtype: torch.dtype = torch.float16) -> torch.Tensor:
    """An output filled with NaN, so that the check finds an element that a kernel did not write."""
    return torch.full(shape, float("nan"), device=DEVICE, dtype=dtype)


def relative_error(got: torch.Tensor, reference: torch.Tensor) -> float:
    """‖got − reference‖ / ‖reference‖ in float64; NaN if anything in `got` is NaN."""
    reference = reference.double()
    return ((got.double() - reference).norm() / reference.norm()).item()


def compare(
    name: str, shape: str, got: torch.Tensor, peer: torch.Tensor, reference: torch.Tensor, tolerance: float
) -> list[Row]:
    """The errors of a rung and of torch against one float64 reference; raises if the rung's is over the tolerance."""
    error = relative_error(got, reference)
    if not error <= tolerance:  # written this way round, NaN fails too
        raise AssertionError(f"{name}, {shape}: relative error {error:.2e} is over {tolerance:.0e}")
    return [
        Row(name, "this", shape, error=error),
        Row("torch", "torch", shape, error=relative_error(peer, reference)),
    ]


def product_sizes(
    a: torch.Tensor, b: torch.Tensor, dtypes: Sequence[torch.dtype] = (torch.float16,)
) -> tuple[int, int, int]:
    """M, N and K of the product of a, (M, K), and b, (K, N); a ValueError that names what does not fit."""
    if a.dim() != 2 or b.dim() != 2 or a.shape[1] != b.shape[0]:
        raise ValueError(f"wanted matrices (M, K) and (K, N), got {tuple(a.shape)} and {tuple(b.shape)}")
    if a.dtype not in dtypes or b.dtype != a.dtype:
        names = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise ValueError(f"this rung multiplies {names} matrices, got {a.dtype} and {b.dtype}")
    if a.device != b.device:
        raise ValueError(f"both matrices must be on one device, got {a.device} and {b.device}")
    check_strides(a)
    check_strides(b)
    return a.shape[0], b.shape[1], a.shape[1]


def output(out: torch.Tensor | None, like: torch.Tensor, *shape: int) -> torch.Tensor:
    """The caller's output, if it has the right shape, dtype and device, or else a new one."""
    if out is None:
        return torch.empty(shape, device=like.device, dtype=like.dtype)
    if tuple(out.shape) != shape or out.dtype != like.dtype or out.device != like.device:
        raise ValueError(
            f"out must be {shape} of {like.dtype} on {like.device}, "
            f"got {tuple(out.shape)} of {out.dtype} on {out.device}"
        )
    check_strides(out)
    return out


def check_strides(t: torch.Tensor) -> None:
    """Within a tile, at most 256 elements long, the rungs compute offsets in 32 bits."""
    if any(size > 1 and stride >= 2**23 for size, stride in zip(t.shape, t.stride(), strict=True)):
        raise ValueError(
            f"strides of 2**23 elements and more do not fit the kernels' offsets, got {t.stride()}"
        )


# ---------------------------------------------------------------------------------------------------------------------
# Timing


ROUNDS = 5


def time_us(calls: Sequence[Callable[[], object]], rounds: int | None = None) -> list[float]:
    """Median device time of each call in microseconds.

    `do_bench` overwrites the L2 cache before every run, so that inputs come from memory as they mostly do in a model,
    and its median ignores a few slow runs. A GPU that has just run a light kernel has power to spare, which favors the
    next one; hence several rounds, each in a new order.
    """
    graphs = [captured(call) for call in calls]
    times: list[list[float]] = [[] for _ in calls]
    for _ in range(rounds or ROUNDS):
        for i in random.sample(range(len(calls)), len(calls)):
            run_once = graphs[i].replay
            times[i].append(triton.testing.do_bench(run_once, warmup=10, rep=40, return_mode="median") * 1e3)
    return [statistics.median(t) for t in times]


def captured(call: Callable[[], object]) -> torch.cuda.CUDAGraph:
    """A call as a CUDA graph, which the host launches in little time.

    Otherwise the GPU would wait, and be timed waiting, wherever Python takes longer to prepare a launch than a small
    product takes to run.
    """
    call()  # compiles and tunes, which a graph can't
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph


Product = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], object]


def bench_products(
    shapes: Sequence[tuple[int, int, int]],
    contenders: Sequence[tuple[str, str, Product]],
    reference: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = lambda a, w: a.double() @ w.double().T,
    weight: Callable[[int, int], torch.Tensor] = normal,
) -> list[Row]:
    """Time products of a, (M, K), with a weight w, (N, K), for every (M, N, K).

    A contender is a name, a role (see `Row`) and a function of a, w and the output. Ours are checked before they are
    timed, of torch the error is noted.
    """
    rows = []
    for m, n, k in shapes:
        a, w = normal(m, k), weight(n, k)
        expected = reference(a, w)
        errors = []
        for name, role, call in contenders:
            out = poisoned(m, n)
            call(a, w, out)
            errors.append(relative_error(out, expected))
            if role != "torch" and not errors[-1] <= 1e-3:
                raise AssertionError(f"{name}, {m}x{n}x{k}: relative error {errors[-1]:.2e} before timing")
        del expected
        out = poisoned(m, n)
        times = time_us([lambda call=call, a=a, w=w, out=out: call(a, w, out) for _, _, call in contenders])
        for (name, role, _), t, error in zip(contenders, times, errors, strict=True):
            rows.append(Row(name, role, f"{m}x{n}x{k}", t, 2 * m * n * k / t / 1e6, "TFLOP/s", error))
    return rows


# ---------------------------------------------------------------------------------------------------------------------
# Questions and exercises


@dataclass(frozen=True)
class Question:
    """A question to answer before the rung runs, and the answer, which is printed at the end."""

    text: str
    answer: Callable[[], str]


@dataclass(frozen=True)
class Exercise:
    """A function for the reader to write, a solution, and a check that raises AssertionError if a function is wrong."""

    stub: Callable[..., object]
    solution: Callable[..., object]
    check: Callable[[Any], None]

    def review(self) -> str | None:
        """The fault of the reader's function, in one line; None if it is right."""
        calls: list[tuple[Any, ...]] = []
        results: list[object] = []

        def watched(*arguments: object) -> object:
            calls.append(arguments)
            results.append(self.stub(*arguments))
            return results[-1]

        name, code = self.stub.__name__, self.stub.__code__
        try:
            self.check(watched)
        except NotImplementedError as error:
            return f"Write `{name}` in {place(code.co_filename, code.co_firstlineno)}. Hint: {error}"
        except Exception as error:
            if len(results) < len(calls):  # the reader's function itself raised it
                lines = [
                    line for frame, line in traceback.walk_tb(error.__traceback__) if frame.f_code is code
                ]
                where = place(code.co_filename, lines[-1])
                return f"`{name}{brief(calls[-1])}` raises {type(error).__name__} in {where}: {error}"
            for arguments, got in reversed(list(zip(calls, results, strict=True))):
                wanted = self.solution(*arguments)
                if not same(got, wanted):
                    said = f" ({error})" if isinstance(error, AssertionError) and str(error) else ""
                    return f"`{name}{brief(arguments)}`: got {brief(got)}, wanted {brief(wanted)}{said}"
            raise  # the check is wrong, or the solution is
        return None


def place(file: str, line: int) -> str:
    """A place in a file, as an editor takes it. A cell of a notebook has no file."""
    path = Path(file)
    if not path.exists():
        return f"this cell, line {line}"
    here = Path.cwd()
    return f"{path.relative_to(here) if path.is_relative_to(here) else path}:{line}"


def brief(value: object) -> str:
    """A value in a part of a line."""
    if isinstance(value, tuple):
        return f"({', '.join(map(brief, value))})"
    written = reprlib.Repr()
    written.maxlist, written.maxother = 8, 80
    return written.repr(value.tolist() if isinstance(value, torch.Tensor) else value)


def same(got: object, wanted: object) -> bool:
    """Whether two results are equal, floats up to rounding."""
    if isinstance(wanted, torch.Tensor):
        return isinstance(got, torch.Tensor) and got.shape == wanted.shape and torch.allclose(got, wanted)
    if isinstance(wanted, tuple | list):
        return isinstance(got, type(wanted)) and len(got) == len(wanted) and all(map(same, got, wanted))
    if isinstance(wanted, float):
        return isinstance(got, int | float) and math.isclose(got, wanted)
    return got == wanted


def predicted(m: int, n: int, k: int) -> str:
    """The time that gemmery predicts for cuBLAS in float16 on an H200, as text; `gemmery predict` shows details."""
    from gemmery.lab.abstract import abstract_problem
    from gemmery.lab.prediction import predict
    from gemmery.select.shapes import device_named

    problem = abstract_problem(m, n, k, device=device_named("H200"), dtype="fp16", layout="NT")
    found = predict(problem).asdict()
    low, high = (1e6 * seconds for seconds in found["interval"]["cublas"])
    return f"{1e6 * found['cublas']:.0f} us for cuBLAS, {low:.0f} to {high:.0f} in nine of ten cases"


# ---------------------------------------------------------------------------------------------------------------------
# Running a rung


def rung(number: int) -> ModuleType:
    """Another rung as a module. File names that start with a digit cannot be imported with a plain `import`."""
    (path,) = HERE.glob(f"{number:02d}_*.py")
    name = f"gemmery_tutorial_{path.stem}"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, path)
        if spec is None or spec.loader is None:
            raise ImportError(f"cannot load {path}")
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
    return sys.modules[name]


def run(
    number: int,
    title: str,
    check: Callable[[], list[Row]],
    bench: Callable[[], list[Row]],
    arguments: Sequence[str] | None = None,
    questions: Sequence[Question] = (),
    exercises: Sequence[Exercise] = (),
) -> Record:
    """Check a rung, time it if there is a GPU, print the results and, with `--json FILE`, save them.

    With `--exercise N`, only the reader's function for exercise N is checked.
    """
    parser = argparse.ArgumentParser(description=f"Rung {number}: {title}.")
    parser.add_argument(
        "--exercise",
        type=int,
        choices=range(1, len(exercises) + 1),
        metavar="N",
        help="only check what you wrote for exercise N",
    )
    parser.add_argument("--check", action="store_true", help="time nothing")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the record here")
    parser.add_argument("--seed", type=int, help="repeat the random inputs of an earlier run")
    options = parser.parse_args(arguments)
    if options.exercise is not None:
        exercise = exercises[options.exercise - 1]
        # A text as the status is printed, and counts as a failure.
        wrong = exercise.review()
        if wrong is None:
            print(f"Exercise {options.exercise}: {exercise.stub.__name__} is right.")
        sys.exit(wrong)

    seed = torch.seed() % 2**32 if options.seed is None else options.seed
    torch.manual_seed(seed)
    device = "cpu" if INTERPRETED else torch.cuda.get_device_name()
    print(f"Rung {number}: {title}")
    print(f"{device}, torch {torch.__version__}, Triton {triton.__version__}, seed {seed}")
    if INTERPRETED:
        print("The kernels run interpreted: results are checked, nothing is timed.")
    if questions:
        print("\nPredict before you read on")
        for i, question in enumerate(questions, 1):
            print(f"  {i}. {question.text}")

    rows = check()
    print_rows("Checked", rows)
    if not (INTERPRETED or options.check):
        timed = bench()
        print_rows("Timed, inputs not in L2", timed)
        rows += timed
    if questions:
        print("\nAnswers")
        for i, question in enumerate(questions, 1):
            print(f"  {i}. {question.answer()}")
    record = Record(number, title, device, INTERPRETED, torch.__version__, triton.__version__, seed, rows)
    if options.json is not None:
        options.json.write_text(json.dumps(asdict(record), indent=1) + "\n", encoding="utf-8")
    return record


def print_rows(title: str, rows: Sequence[Row]) -> None:
    """A plain table, with each row's speed relative to torch and to a copy where these are among the rows."""
    print(f"\n{title}")
    names = max((len(row.name) for row in rows), default=0)
    shapes = max((len(row.shape) for row in rows), default=0)
    for row in rows:
        line = f"  {row.shape:<{shapes}}  {row.name:<{names}}"
        if row.time_us is not None:
            line += f"  {row.time_us:10.1f} us"
        if row.rate is not None:
            line += f"  {row.rate:8.1f} {row.unit}"
        if row.error is not None:
            line += f"  error {row.error:.2e}"
        for role, text in (("torch", "{:.3f} x torch"), ("copy", "{:.1%} of a copy")):
            peer = next((r for r in rows if r.shape == row.shape and r.role == role and r.rate), None)
            if peer is not None and peer is not row and row.rate and row.unit == peer.unit:
                line += "  " + text.format(row.rate / peer.rate if peer.rate else math.nan)
        print(line)
