"""Draw benchmarks/results/*.json: the ratio of every row, and throughput over size.

python benchmarks/plots.py               write ratios.png and square.png beside the results
python benchmarks/plots.py --out DIR     or elsewhere

The same pictures of any results, and others: gemmery plot.
"""

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.records import RESULTS, read_results  # noqa: E402
from gemmery.lab.bench_plots import draw_ratios, draw_throughput  # noqa: E402


def main(arguments: list[str] | None = None) -> int:
    """Run; 0 if the pictures were written, 2 if there is nothing to draw."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--results", type=Path, default=RESULTS, metavar="DIR")
    parser.add_argument("--out", type=Path, metavar="DIR", help="default: beside the results")
    options = parser.parse_args(arguments)
    out = options.out or options.results
    try:
        results = read_results(options.results)
    except ValueError as error:
        print(f"plots: {error}", file=sys.stderr)
        return 2
    square = [result for result in results if result["suite"] == "square"]
    if not results:
        print(f"plots: no results in {options.results}", file=sys.stderr)
        return 2
    out.mkdir(parents=True, exist_ok=True)
    draw_ratios(results, out / "ratios.png")
    if square:
        draw_throughput(square, out / "square.png")
    return 0


if __name__ == "__main__":
    sys.exit(main())
