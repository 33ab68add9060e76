"""Measure the ladder on a GPU: every rung beside the one before it and torch, for the documentation's pages.

python benchmarks/rungs.py [--out FILE]    writes benchmarks/results/ladder/rungs.json
"""

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "src"))

from gemmery.lab.ladder import Failure, Record, run_ladder  # noqa: E402
from gemmery.lab.results import describe_run  # noqa: E402

OUT = ROOT / "benchmarks" / "results" / "ladder" / "rungs.json"


def main(arguments: list[str] | None = None) -> int:
    """Run; 0 if the record was written, 1 if a rung failed, 2 where there is no GPU to measure."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=OUT, metavar="FILE")
    options = parser.parse_args(arguments)
    results = run_ladder()
    records = [result for result in results if isinstance(result, Record)]
    for failure in (result for result in results if isinstance(result, Failure)):
        print(f"rung {failure.number} failed with status {failure.status}\n{failure.output}", file=sys.stderr)
    if len(records) < len(results):
        return 1
    if any(record.interpreted for record in records):
        print("rungs: kernels are interpreted here, so there is nothing to measure", file=sys.stderr)
        return 2
    run = describe_run(seed=0, rounds=5, regimes=[], device="cuda", peers=[])
    header = {key: run[key] for key in ("gpu", "torch", "triton", "cuda", "commit", "date")}
    options.out.parent.mkdir(parents=True, exist_ok=True)
    data = header | {"rungs": [asdict(record) for record in records]}
    options.out.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
