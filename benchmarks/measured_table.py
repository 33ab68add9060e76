"""Make a table of `gemmery/select/tables` from timings that `gemmery tune` measured.

gemmery tune --exhaustive --suite square --suite llm --suite decode --shapes 1x4096x14336,24x8192x8192
gemmery store export timings.json
python benchmarks/measured_table.py timings.json --device "NVIDIA H200"

Only plain products count, a (M, K) in rows by a weight (N, K), batches of them, and of one type. Those of the suites of
random products are left out: these are to tell how fast a product is that was never measured.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from gemmery.lab import suites
from gemmery.select.measured import file_name

ROOT = Path(__file__).resolve().parents[1]
TABLES = ROOT / "src" / "gemmery" / "select" / "tables"
ABOUT = (
    "Kernel times in microseconds, inputs cold, medians, of A (M, K) row-major by a weight (N, K); "
    "shapes are [batch, M, N, K]."
)
#: What a problem's text may say besides its sizes and operands for the problem to be plain.
PLAIN = {"M", "N", "K", "batch", "a", "b", "out"}

Times = dict[tuple[int, ...], dict[str, float]]


def shape_of(problem: dict[str, Any], dtype: str) -> tuple[int, ...] | None:
    """A problem's place in the table; None for one that is not plain."""
    if set(problem) - PLAIN or len(problem["batch"]) > 1 or problem["a"]["dtype"] != dtype:
        return None
    a, b, out = (problem[name] for name in ("a", "b", "out"))
    straight = a["col"] == b["row"] == out["col"] == 1 and all(x["aligned"] for x in (a, b, out))
    batch = problem["batch"][0] if problem["batch"] else 1
    return (batch, problem["M"], problem["N"], problem["K"]) if straight else None


def collect(data: dict[str, Any], device: str, dtype: str) -> tuple[Times, set[str]]:
    """All times of a device in an exported file, in microseconds, and the versions of Triton that they come from."""
    times: Times = {}
    versions = set()
    held_out = suites.held_out()
    for of_set in data["sets"]:
        if not of_set["device"].startswith(device):
            continue
        for entry in of_set["problems"]:
            shape = shape_of(entry["problem"], dtype)
            if shape is None or shape[1:] in held_out:
                continue
            versions.add(of_set["triton"])
            for config, timing in entry["configs"].items():
                if timing["seconds"]:
                    times.setdefault(shape, {})[config] = round(timing["seconds"] * 1e6, 2)
    return times, versions


def text_of(times: Times, device: str, versions: set[str]) -> str:
    """The table as JSON, one line a shape."""
    shapes, configs = sorted(times), sorted({config for each in times.values() for config in each})
    head = json.dumps({"about": ABOUT, "device": device, "triton": ", ".join(sorted(versions))}, indent=1)
    columns = {
        "shapes": [json.dumps(list(shape)) for shape in shapes],
        "configs": [json.dumps(config) for config in configs],
        "microseconds": [json.dumps([times[s].get(c) for c in configs]).replace(" ", "") for s in shapes],
    }
    parts = [f' "{name}": [\n  ' + ",\n  ".join(lines) + "\n ]" for name, lines in columns.items()]
    return head[:-2] + ",\n" + ",\n".join(parts) + "\n}\n"


def main(arguments: list[str] | None = None) -> int:
    """Run; 2 if the file has no timing that belongs into the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("timings", type=Path, help="a file that `gemmery store export` wrote")
    parser.add_argument("--device", required=True, help="the GPU's name in the device table")
    parser.add_argument("--dtype", default="bf16", help="type of the products (default: bf16)")
    parser.add_argument(
        "--kind", default="half", help="the part of the space, as in tiles.py (default: half)"
    )
    parser.add_argument("--out", type=Path, default=TABLES, metavar="DIR")
    options = parser.parse_args(arguments)
    data = json.loads(options.timings.read_text(encoding="utf-8"))
    times, versions = collect(data, options.device, options.dtype)
    if not times:
        print(f"{options.timings}: no plain {options.dtype} products of {options.device}", file=sys.stderr)
        return 2
    name = file_name(options.device, options.kind)
    (options.out / name).write_text(text_of(times, options.device, versions), encoding="utf-8")
    print(f"{options.out / name}: {len(times)} shapes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
