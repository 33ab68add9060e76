"""Write the tables of README.md from benchmarks/results/*.json, between its two marks.

python benchmarks/readme_tables.py           rewrite README.md
python benchmarks/readme_tables.py --check   exit 1 if README.md is out of date
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
BEGIN, END = "<!-- results:begin -->", "<!-- results:end -->"
#: Suites in the order in which they are shown; others follow by name.
ORDER = ("square", "llm", "llm_large", "decode", "odd", "layouts")
REGIMES = ("burst", "steady")

Data = dict[str, Any]


def read_results(folder: Path) -> list[Data]:
    """All results of a folder in the order of the tables; ValueError names a file that is none."""
    results = []
    for path in sorted(folder.glob("*.json")):
        data = json.loads(path.read_text(encoding="utf-8"))
        if missing := {"suite", "dtype", "rows", "summary", "peers", "protocol"} - set(data):
            raise ValueError(
                f"{path.name} is no benchmark result: it is without {', '.join(sorted(missing))}"
            )
        results.append(data)
    return sorted(results, key=_place)


def _place(result: Data) -> tuple[int, str, str]:
    suite = result["suite"]
    return (ORDER.index(suite) if suite in ORDER else len(ORDER), suite, result["dtype"])


def _cell(text: str) -> str:
    """A text as one cell: neither bars nor line ends may split it."""
    return " ".join(text.replace("|", "\\|").split())


def _shape(row: Data) -> str:
    return "×".join(str(size) for size in (*row["batch"], row["M"], row["N"], row["K"]))


def _ratio(row: Data, regime: str, peer: str) -> str:
    if regime not in row["summary"]:
        return ""
    ratio = row["summary"][regime]["ratio"][peer]
    return f"{ratio['median']:.3f} ({ratio['min']:.3f}–{ratio['max']:.3f})"


def table_row(row: Data, ours: str, peer: str, regimes: list[str]) -> str:
    """One row's line. Times are those of the first regime that the table shows."""
    cells = [_cell(row["name"]), _shape(row)]
    if "error" in row:
        cells += [f"failed: {_cell(row['error'])}", "", *("" for _ in regimes)]
    else:
        times = row["summary"].get(regimes[0], {}).get("us", {})
        cells += [f"{times[name]:.1f}" if name in times else "" for name in (ours, peer)]
        cells += [_ratio(row, regime, peer) for regime in regimes]
    return f"| {' | '.join(cells)} |"


def summary_lines(result: Data, peer: str) -> list[str]:
    """Geometric mean and worst row of each regime, as a sentence each."""
    lines = []
    for regime in REGIMES:
        figures = result["summary"].get(regime, {}).get(peer)
        if figures is not None:
            lines.append(
                f"{regime.capitalize()}: geometric mean **{figures['geomean']:.3f}**, worst {figures['worst']:.3f}"
                f" ({_cell(figures['worst_row'])}), {figures['rows']} rows."
            )
    return lines


def section(result: Data) -> str:
    """The heading, table and summary of one suite in one type."""
    ours, peer = result["ours"], result["peers"][0]
    regimes = [regime for regime in REGIMES if regime in result["protocol"]["regimes"]]
    ratios = [f"{peer} / {ours}, {regime}" for regime in regimes]
    head = ["row", "M×N×K", f"{ours} µs ({regimes[0]})", f"{peer} µs ({regimes[0]})", *ratios]
    lines = [f"### {result['suite']}, {result['dtype']}", "", f"| {' | '.join(head)} |"]
    lines.append("|---|---|" + "---:|" * (len(head) - 2))
    lines += [table_row(row, ours, peer, regimes) for row in result["rows"]]
    host = ", ".join(f"{name} {us:.1f} µs" for name, us in result["host_us"].items())
    lines += ["", *summary_lines(result, peer)]
    lines.append(
        f"{result['gpu']}, torch {result['torch']}, Triton {result['triton']}, CUDA {result['cuda']}, commit "
        f"{result['commit']}, {result['date'][:10]}, {result['protocol']['rounds']} rounds. Host time per call: {host}."
    )
    return "\n".join(lines)


def tables(results: list[Data]) -> str:
    """Everything between the marks."""
    if not results:
        return "No results yet: `python benchmarks/run.py` makes them."
    about = (
        "A ratio is the peer's time divided by ours, above 1 where gemmery is faster: the median over the rounds, "
        "with the smallest and the largest."
    )
    return "\n\n".join([about, *map(section, results)])


def rewritten(readme: str, inside: str) -> str:
    """The text of README.md with `inside` between its marks; ValueError unless each mark is there once, in order."""
    if readme.count(BEGIN) != 1 or readme.count(END) != 1 or readme.index(END) < readme.index(BEGIN):
        raise ValueError(f"README must have {BEGIN} once and {END} once after it")
    before, rest = readme.split(BEGIN)
    return f"{before}{BEGIN}\n\n{inside}\n\n{END}{rest.split(END)[1]}"


def main(arguments: list[str] | None = None) -> int:
    """Run; 0 if README.md is (now) up to date, 1 if --check finds that it is not, 2 if it can't be."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--check", action="store_true", help="change nothing, exit 1 if README.md is out of date"
    )
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks" / "results", metavar="DIR")
    parser.add_argument("--readme", type=Path, default=ROOT / "README.md", metavar="FILE")
    options = parser.parse_args(arguments)
    readme = options.readme.read_text(encoding="utf-8")
    try:
        wanted = rewritten(readme, tables(read_results(options.results)))
    except ValueError as error:
        print(f"readme_tables: {error}", file=sys.stderr)
        return 2
    if options.check:
        if readme != wanted:
            print(f"{options.readme.name} is out of date: run benchmarks/readme_tables.py", file=sys.stderr)
        return int(readme != wanted)
    options.readme.write_text(wanted, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
