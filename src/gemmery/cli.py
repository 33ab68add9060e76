"""The command line: `gemmery demo`, `bench`, `explain`, `tune`, `warmup`, `store`, `ladder`, `doctor`.

A command imports what it needs when it runs, so that `--help` and a mistyped option answer at once.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

try:
    import typer
except ModuleNotFoundError as error:
    raise SystemExit("gemmery's command line needs typer and rich: pip install 'gemmery[cli]'") from error

app = typer.Typer(
    help="GEMM for PyTorch, written in Triton.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        from . import __version__

        typer.echo(f"gemmery {__version__}")
        raise typer.Exit


def _place_for_json(path: Path | None) -> Path | None:
    # Before the work, not after a minute of it.
    if path is not None and not path.absolute().parent.is_dir():
        raise typer.BadParameter(f"there is no directory {path.absolute().parent}")
    return path


JsonFile = Annotated[
    Path | None,
    typer.Option(
        "--json",
        metavar="FILE",
        dir_okay=False,
        writable=True,
        callback=_place_for_json,
        help="Write everything that is printed, and more, to this file.",
    ),
]


def _interpret_without_gpu() -> None:
    """Without a GPU, start this command again with Triton's interpreter on, unless TRITON_INTERPRET says otherwise.

    Triton decides when a kernel is defined whether it is interpreted, and the kernels are defined by the time that a
    command runs; so it takes a new process, which replaces this one.
    """
    import torch

    if "TRITON_INTERPRET" in os.environ or torch.cuda.is_available():
        return
    typer.echo("No GPU here: the kernels run in Triton's interpreter on the CPU (TRITON_INTERPRET=1).")
    sys.stdout.flush()
    command = [sys.executable, "-m", "gemmery.cli", *sys.argv[1:]]
    os.execve(sys.executable, command, os.environ | {"TRITON_INTERPRET": "1"})


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version and leave."
        ),
    ] = False,
) -> None:
    """GEMM for PyTorch, written in Triton."""


@app.command()
def demo(json: JsonFile = None) -> None:
    """Run a sentence model with every linear layer through gemmery and compare it with torch."""
    _interpret_without_gpu()
    from .lab.demo import demo as run

    raise typer.Exit(run(json))


@app.command()
def ladder(
    rungs: Annotated[
        list[int] | None, typer.Argument(metavar="RUNG", help="Numbers of rungs; all without.")
    ] = None,
    json: JsonFile = None,
) -> None:
    """Climb the tutorials from a vector add to a persistent kernel, each rung checked and measured."""
    _interpret_without_gpu()
    from .lab.ladder import ladder as run

    raise typer.Exit(run(rungs or [], json))


@app.command()
def doctor(json: JsonFile = None) -> None:
    """Say what this machine has, what it can't do, and what runs instead."""
    from .lab.doctor import doctor as run

    raise typer.Exit(run(json))


def _words(given: list[str] | None) -> list[str]:
    """The words of an option that may be repeated or hold several between commas."""
    return [word for text in given or [] for word in text.split(",") if word]


def _steady_rows(text: str) -> str:
    if text != "all" and not text.isdecimal():
        raise typer.BadParameter(f"{text!r} given; a number of rows or 'all' is wanted")
    return text


def _place_for_results(path: Path | None) -> Path | None:
    return _place_for_json(path) if path is not None and path.suffix == ".json" else path


@app.command()
def bench(
    suite: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="What is measured; all, or names that --list shows.")
    ] = None,
    dtype: Annotated[
        list[str] | None,
        typer.Option(metavar="TYPE", help="bf16 (default), fp16, ...; for rows that have no type of their own."),
    ] = None,
    against: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PEER",
            help="cublas (default): torch; compile, compile_default: torch.compile with and without max-autotune; "
            "seed: the tutorials; tinygemm, torchao, gemlite: other libraries, for packed weights.",
        ),
    ] = None,
    regimes: Annotated[
        list[str] | None,
        typer.Option(metavar="REGIME", help="burst, steady, graph, host; the first two unless the suite differs."),
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Per row and regime; fewer than 5 are only a look.")] = 5,
    steady_rows: Annotated[
        str,
        typer.Option(metavar="N|all", callback=_steady_rows, help="Rows of a suite timed in steady, evenly spread."),
    ] = "8",
    rows: Annotated[str, typer.Option(metavar="REGEX", help="Only rows whose name matches.")] = "",
    seed: Annotated[int | None, typer.Option(help="Of inputs and orders; a new one without.")] = None,
    tuned: Annotated[
        bool, typer.Option("--tuned", help="Let timings of this machine's store choose; else gemmery is as it ships.")
    ] = False,
    json: Annotated[
        Path | None,
        typer.Option(
            "--json", "--out", metavar="FILE|DIR", callback=_place_for_results,
            help="Write the result to this .json file, or each to one of its own in this directory.",
        ),
    ] = None,
    listing: Annotated[
        bool, typer.Option("--list", help="Show the rows and about how long they take; measure nothing.")
    ] = False,
) -> None:  # fmt: skip
    """Measure suites of products against other implementations, on the GPU at hand.

    Options that name things take several between commas, or are repeated: --suite square,llm --dtype bf16 --dtype fp16.
    """
    if not suite and not listing:
        raise typer.BadParameter("name a suite, or see --list", param_hint="--suite")
    from .lab.bench import Request, runs, show
    from .lab.bench import bench as run

    request = Request(
        suites=_words(suite) or ["all"],
        dtypes=_words(dtype) or ["bf16"],
        against=_words(against) or ["cublas"],
        regimes=_words(regimes),
        rounds=rounds,
        steady_rows=None if steady_rows == "all" else int(steady_rows),
        rows=rows,
        seed=seed,
        tuned=tuned,
        json=json,
    )
    try:
        planned = runs(request)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    if listing:
        show(request, planned)
    else:
        raise typer.Exit(run(request, planned))


@contextmanager
def _told() -> Iterator[None]:
    """What a user got wrong is said in a line, without a traceback."""
    try:
        yield
    except (ValueError, TypeError, OSError) as error:
        raise typer.BadParameter(str(error)) from error


@app.command()
def explain(
    m: Annotated[int, typer.Argument(metavar="M")],
    n: Annotated[int, typer.Argument(metavar="N")],
    k: Annotated[int, typer.Argument(metavar="K")],
    dtype: Annotated[str, typer.Option(metavar="TYPE", help="bf16, fp16, fp32, tf32, fp64, int8, fp8, ...")] = "bf16",
    layout: Annotated[
        str, typer.Option(metavar="NN|NT|TN|TT", help="N: row-major, T: column-major, as a Linear's weight is for b.")
    ] = "NT",
    batch: Annotated[list[str] | None, typer.Option(metavar="SIZES", help="Leading dimensions: --batch 8,16.")] = None,
    bias: Annotated[bool, typer.Option("--bias", help="Add N numbers to each row.")] = False,
    batch_invariant: Annotated[
        bool, typer.Option("--batch-invariant", help="With results that do not depend on M.")
    ] = False,
    device: Annotated[
        str | None, typer.Option(metavar="NAME", help="A GPU, such as H200; the one at hand without, or else an H200.")
    ] = None,
    top: Annotated[int, typer.Option(min=1, help="How many configs to show.")] = 5,
    json: JsonFile = None,
) -> None:  # fmt: skip
    """Say which config runs a product of an M by K and a K by N matrix, and why, on any known GPU; runs nothing."""
    from .lab.tuning import kind_named
    from .select.explain import explain as run

    with _told():
        kind = kind_named(dtype)
        explanation = run(
            m, n, k, dtype=kind.dtype, precision=kind.precision, fast_accum=kind.fast_accum, layout=layout,
            batch=[int(word) for word in _words(batch)], bias=bias, batch_invariant=batch_invariant, device=device,
            top=top,
        )  # fmt: skip
    typer.echo(str(explanation))
    _write_json(json, explanation.asdict())


@app.command()
def tune(
    suite: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="Suites of the bench, see gemmery bench --list.")
    ] = None,
    shapes: Annotated[
        list[str] | None, typer.Option(metavar="MxNxK", help="Sizes, or BxMxNxK with a batch.")
    ] = None,
    from_log: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Problems that a program met which ran with GEMMERY_LOG=FILE.", exists=True),
    ] = None,
    dtype: Annotated[
        list[str] | None, typer.Option(metavar="TYPE", help="bf16 (default), fp16, ...; where nothing else says.")
    ] = None,
    layout: Annotated[str, typer.Option(metavar="NN|NT|TN|TT", help="Of --shapes, see gemmery explain.")] = "NT",
    bias: Annotated[bool, typer.Option("--bias", help="Of --shapes: add N numbers to each row.")] = False,
    exhaustive: Annotated[
        bool, typer.Option("--exhaustive", help="Measure all configs, not only those predicted near the best.")
    ] = False,
    again: Annotated[bool, typer.Option("--again", help="Measure also what was measured before.")] = False,
    seconds: Annotated[float | None, typer.Option(min=0, help="Begin no measurement after so long.")] = None,
    json: JsonFile = None,
) -> None:  # fmt: skip
    """Measure which configs are quickest on this GPU; later calls of the same shapes take them.

    Each timing is kept as it comes: press Ctrl-C, and the same command goes on from there.
    """
    if not (suite or shapes or from_log):
        raise typer.BadParameter("name suites, shapes or a log", param_hint="--suite, --shapes or --from-log")
    from .devices import TABLE
    from .lab.tuning import Request, gpu_here
    from .lab.tuning import tune as run

    request = Request(
        suites=_words(suite), shapes=_words(shapes), log=from_log, dtypes=_words(dtype) or ["bf16"], layout=layout,
        bias=bias,
    )  # fmt: skip
    with _told():
        problems = request.problems(gpu_here() or TABLE["interpreter"])
    raise typer.Exit(run(problems, exhaustive=exhaustive, again=again, seconds=seconds, json_path=json))


@app.command()
def warmup(
    model_shapes: Annotated[
        Path,
        typer.Option(
            metavar="FILE", exists=True, dir_okay=False,
            help='A list of weights: [{"name": "qkv", "N": 6144, "K": 4096, "bias": false}, ...].',
        ),
    ],
    max_m: Annotated[int, typer.Option(min=1, help="For inputs of 1 to so many rows.")] = 8192,
    dtype: Annotated[str, typer.Option(metavar="TYPE", help="Of weights that name none.")] = "bf16",
    json: JsonFile = None,
) -> None:  # fmt: skip
    """Compile every kernel that products with a model's weights run, so that a server compiles nothing later."""
    from .lab.tuning import read_weights
    from .lab.tuning import warmup as run

    with _told():
        weights = read_weights(model_shapes, dtype)
    raise typer.Exit(run(weights, max_m=max_m, json_path=json))


store_app = typer.Typer(
    help="Show, export or import the timings that tune has measured.", no_args_is_help=True
)
app.add_typer(store_app, name="store")


@store_app.command("show")
def store_show(json: JsonFile = None) -> None:
    """Say where the timings are, and how many there are of which device and version."""
    from .lab.timings import show

    contents = show()
    _write_json(json, contents)


@store_app.command("export")
def store_export(
    file: Annotated[Path, typer.Argument(metavar="FILE", dir_okay=False, callback=_place_for_json)],
    from_log: Annotated[
        Path | None, typer.Option(metavar="LOG", help="Only the problems that GEMMERY_LOG=LOG has noted.", exists=True)
    ] = None,
    everything: Annotated[
        bool, typer.Option("--all", help="Also timings of other versions of Triton and of the kernels.")
    ] = False,
) -> None:  # fmt: skip
    """Write timings to a JSON file, to ship with a model."""
    from .lab.timings import export

    with _told():
        count = export(file, log_path=from_log, everything=everything)
    typer.echo(f"{count} timings written to {file}")


@store_app.command("import")
def store_import(
    file: Annotated[Path, typer.Argument(metavar="FILE", dir_okay=False, exists=True)],
) -> None:
    """Take over the timings of a JSON file, but for those that were measured here later."""
    from .lab.timings import take

    with _told():
        count = take(file)
    typer.echo(f"{count} timings taken from {file}")


def _write_json(path: Path | None, values: object) -> None:
    if path is not None:
        import json

        path.write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")


def main() -> None:
    """The entry point of the `gemmery` command."""
    app(prog_name="gemmery")


if __name__ == "__main__":
    main()
