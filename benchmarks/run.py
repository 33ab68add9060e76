"""Measure suites of matrix products on the GPU at hand, by the protocol of gemmery.lab.timing.

python benchmarks/run.py --suite square llm --dtype bf16 fp16
python benchmarks/run.py --suite llm_large --regimes steady --steady-rows all --rows 'Llama|Qwen'
python benchmarks/run.py --suite decode odd --list
"""

import argparse
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# What is measured is this checkout, not a copy that happens to be installed.
sys.path.insert(0, str(ROOT / "src"))

from gemmery.lab import suites, timing  # noqa: E402


def rows_or_all(text: str) -> int | None:
    """A number of rows, or None for "all"."""
    if text == "all":
        return None
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} given; a number of rows or 'all' is wanted")
    return int(text)


def parser() -> argparse.ArgumentParser:
    """The command line."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument(
        "--suite",
        nargs="+",
        required=True,
        choices=suites.names(),
        metavar="SUITE",
        help=", ".join(suites.names()),
    )
    p.add_argument(
        "--dtype",
        nargs="+",
        default=["bf16"],
        choices=suites.DTYPES,
        metavar="TYPE",
        help=", ".join(suites.DTYPES) + " (default: bf16)",
    )
    p.add_argument("--regimes", nargs="+", default=list(timing.REGIMES), choices=timing.REGIMES)
    p.add_argument(
        "--rounds", type=int, default=5, help="per row and regime (default: 5; fewer are only a look)"
    )
    p.add_argument(
        "--steady-rows",
        type=rows_or_all,
        default="8",
        metavar="N|all",
        help="rows of a suite that are timed in steady, evenly spread (default: 8)",
    )
    p.add_argument(
        "--rows",
        type=re.compile,
        default=re.compile(""),
        metavar="REGEX",
        help="only rows whose name matches",
    )
    p.add_argument("--min-m", type=int, default=0, metavar="M", help="only rows with at least this M")
    p.add_argument(
        "--min-tiles", type=int, default=0, metavar="N", help="only rows with at least N tiles of 128x256"
    )
    p.add_argument("--seed", type=int, help="of inputs and orders (default: a new one)")
    p.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results", metavar="DIR")
    p.add_argument(
        "--json-name",
        default="{suite}-{dtype}.json",
        metavar="NAME",
        help="of a result's file; {suite} and {dtype} are filled in (default: %(default)s)",
    )
    p.add_argument(
        "--list", action="store_true", help="show rows and about how long they take; measure nothing"
    )
    return p  # fmt: skip


def selected(name: str, options: argparse.Namespace) -> list[suites.Row]:
    """The rows of a suite that the options leave."""
    return [
        row
        for row in suites.load(name)
        if options.rows.search(row.name) and options.min_m <= row.M and row.tiles() >= options.min_tiles
    ]


def expected(rows: list[suites.Row], options: argparse.Namespace) -> float:
    """About how many seconds of GPU time the rows take, for two methods."""
    steady = rows if options.steady_rows is None else suites.spread(rows, options.steady_rows)
    total = 0.0
    for regime in options.regimes:
        count = len(steady) if regime == "steady" else len(rows)
        total += count * timing.expected_seconds(2, rounds=options.rounds, regimes=[regime])
    return total


def show(plan: dict[str, list[suites.Row]], options: argparse.Namespace) -> None:
    """Print the rows and the time of each suite."""
    for name, rows in plan.items():
        print(
            f"{name}: {len(rows)} rows, about {expected(rows, options):.0f} s for each of {', '.join(options.dtype)}"
        )
        for row in rows:
            batch = "".join(f"{size}×" for size in row.batch)
            layouts = f"A {row.a}, B {row.b}, out {row.out}"
            print(f"  {row.name:32} {batch}{row.M}×{row.N}×{row.K}  {layouts}")


def main(arguments: list[str] | None = None) -> int:
    """Run; 0 if all rows could be measured, 1 if some failed, 2 if nothing could be run."""
    options = parser().parse_args(arguments)
    plan = {name: selected(name, options) for name in options.suite}
    files = [options.json_name.format(suite=suite, dtype=dtype) for suite in plan for dtype in options.dtype]
    if len(set(files)) < len(files):
        print(
            f"--json-name {options.json_name!r} gives several results one file; use {{suite}} and {{dtype}}",
            file=sys.stderr,
        )
        return 2
    if empty := [name for name, rows in plan.items() if not rows]:
        print(f"no row of {', '.join(empty)} is left by --rows, --min-m and --min-tiles", file=sys.stderr)
        return 2
    if options.list:
        show(plan, options)
        return 0

    import torch

    if not torch.cuda.is_available():
        print("no GPU that torch can use: nothing to measure (--list shows the rows)", file=sys.stderr)
        return 2
    from gemmery.lab.bench import run_suite

    watch, failed = timing.Stopwatch(), []
    for name, rows in plan.items():
        for dtype in options.dtype:
            path = options.out / options.json_name.format(suite=name, dtype=dtype)
            print(
                f"{name}, {dtype}: {len(rows)} rows, about {expected(rows, options):.0f} s, to {path}",
                flush=True,
            )
            result = run_suite(
                name, dtype=dtype, rows=rows, regimes=options.regimes, rounds=options.rounds,
                steady_rows=options.steady_rows, seed=options.seed, path=path, watch=watch,
            )  # fmt: skip
            failed += [f"{name}, {dtype}: {row}" for row in result.failed]
    for row in failed:
        print(f"failed: {row}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
