"""Measure the GPU's power, clock and throughput under a steady load of dense and of 2:4 sparse products.

python benchmarks/power.py --output FILE              products of 8192 rows in bf16 and fp8
python benchmarks/power.py --rows "4096x4096x4096"    other rows of sparse.py

Each load runs for some seconds without a pause, and `nvidia-smi` is asked for power and clock during its second half.
FLOP are those of the dense product.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch
from torch.nn import functional as F

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT)]

from benchmarks import sparse  # noqa: E402
from gemmery.lab.results import describe_run  # noqa: E402

#: Launches between two looks at the clock of the host.
BATCH = 50


def load(call, seconds):
    """Launches a product again and again; yields the launches and the seconds so far, after each batch."""
    torch.cuda.synchronize()
    begun, launches = time.perf_counter(), 0
    while time.perf_counter() - begun < seconds:
        for _ in range(BATCH):
            call()
        launches += BATCH
        torch.cuda.synchronize()
        yield launches, time.perf_counter() - begun


def measured(call, flop, seconds):
    """Watt, MHz and TFLOP/s of the second half of a load; medians of what nvidia-smi says."""
    for _ in load(call, seconds / 2):
        pass
    command = [
        "nvidia-smi",
        "--query-gpu=power.draw.instant,clocks.sm",
        "--format=csv,noheader,nounits",
        "-lms",
        "100",
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as sampler:
        *_, (launches, passed) = load(call, seconds / 2)
        sampler.terminate()
        lines = sampler.stdout.read().strip().splitlines()
    samples = [tuple(map(float, line.split(","))) for line in lines if line.count(",") == 1]
    watt, clock = (statistics.median(one) for one in zip(*samples, strict=True))
    return {"watt": watt, "mhz": clock, "tflops": flop * launches / passed / 1e12, "samples": len(samples)}


def loads(row):
    """The products of a row: ours, torch's dense one, and cuSPARSELt's of 16 bits."""
    x, weight, epilogue = sparse.operands(row)
    found = {"gemmery": lambda: sparse.product_of(row, x, weight, epilogue)}
    if row.code:
        return found | sparse.fp8_peers(x, weight, row.code)
    dense = weight.dense()
    packed = sparse.cusparselt(x, dense)
    return found | {"torch": lambda: F.linear(x, dense)} | ({"cusparselt": packed[0]} if packed else {})


def main():
    """The command; exit status 2 where there is no GPU."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--rows", default="prefill 8192x8192x8192,fp8 fast 8192x8192x8192", help="names, with commas between"
    )
    parser.add_argument("--seconds", type=float, default=3.0, help="of each load")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print("power: there is no GPU to measure", file=sys.stderr)
        return 2
    limit = subprocess.run(
        ["nvidia-smi", "--query-gpu=power.limit,clocks.max.sm", "--format=csv,noheader"],
        check=True,
        capture_output=True,
        text=True,
    ).stdout.strip()
    entries = []
    for row in sparse.SUITE:
        if row.name not in args.rows.split(","):
            continue
        flop = 2 * row.M * row.N * row.K
        by_label = {label: measured(call, flop, args.seconds) for label, call in loads(row).items()}
        entries.append({"name": row.name, "loads": by_label})
        for label, found in by_label.items():
            print(row.name, label, {key: round(value, 1) for key, value in found.items()}, flush=True)
    if args.output:
        data = describe_run(0, 1, ("steady",), "cuda", ()) | {"limit": limit, "rows": entries}
        args.output.write_text(json.dumps(data, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
