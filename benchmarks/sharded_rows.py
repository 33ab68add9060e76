"""Measure products whose rows are sharded over the GPUs of one host, beside cuBLAS with NCCL and torch's async TP.

python benchmarks/sharded_rows.py --list                       names the rows; needs no GPU
python benchmarks/sharded_rows.py --output FILE                the suite
python benchmarks/sharded_rows.py --rows gather --seconds 90   some of it; begins no row after 90 seconds
python benchmarks/sharded_rows.py --stress 10000               calls of random sizes, whose results are compared
python benchmarks/sharded_rows.py --graph --late 0.5 --dead    CUDA graphs, a rank that is late, one that is missing
python benchmarks/sharded_rows.py --device cpu --shrink 32     the script itself, over gloo and in the interpreter

"gather" is a product of rows of which each rank has a shard; "scatter" is a product whose sum over the ranks is sharded
by rows. It starts its own ranks. Each result is compared with float64 before it is timed, and must have the same bits
when it is computed again. The time is that of the slowest rank. "graph" is a call in a CUDA graph, and "eager" one from
the host, many in a row, so that the power limit sets the clock; torch's async TP can't be captured. "burst" is a single
call from the host after a pause. Times of the product and the communication alone are measured in the same rounds.
Configs are those that gemmery chooses untuned. The file is written behind each row.
"""

import argparse
import gc
import json
import random
import statistics
import sys
import time
import warnings
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT)]

import gemmery.distributed  # noqa: E402
from benchmarks import processes  # noqa: E402
from benchmarks.all_reduce import (  # noqa: E402
    BF16,
    BYTES,
    CALLS,
    EAGER,
    PAUSE,
    RIGHT,
    TIMED,
    Call,
    burst_rounds,
    configs,
    copies,
    eager_rounds,
    graph_rounds,
)
from benchmarks.processes import Ranks  # noqa: E402
from benchmarks.sharded_rows_checks import wanted as checks_wanted  # noqa: E402
from gemmery.lab import timing  # noqa: E402
from gemmery.lab.peers import OURS  # noqa: E402
from gemmery.lab.results import describe_run  # noqa: E402
from gemmery.tuning.stopwatch import Stopwatch  # noqa: E402

#: Seconds for which a call runs in a graph before it is timed, so that its own power limits the clock.
STEADY = 60e-3
#: What computes all of a row, besides gemmery; and parts of it.
PEERS = ["cublas + nccl", "gemmery + nccl", "async_tp"]
PARTS = ["cublas alone", "gemmery alone", "nccl alone"]


class Row(NamedTuple):
    """A product.

    Attributes:
        kind: "gather" or "scatter".
        M: of all ranks together.
        K: of the rank.
    """

    name: str
    kind: str
    M: int
    N: int
    K: int


SUITE = [
    Row(f"{kind} {m}x{n}x{k}", kind, m, n, k)
    for m in (4096, 1024, 16384)
    for kind, n, k in (("gather", 5120, 8192), ("scatter", 8192, 4096))
]


class Inputs(NamedTuple):
    """The inputs of a row: of a rank, and for a product that gathers, the rows of all.

    Attributes:
        weights: copies of one weight.
        whole: all rows.
    """

    x: Tensor
    weights: list[Tensor]
    whole: Tensor


def inputs(row: Row, ranks: Ranks, seed: int) -> Inputs:
    """Random ones, of which each rank has others."""
    own = torch.Generator(ranks.device).manual_seed(1000 * seed + ranks.rank)
    rows = row.M // ranks.count if row.kind == "gather" else row.M
    x = torch.randn(rows, row.K, dtype=BF16, device=ranks.device, generator=own)
    w = torch.randn(row.N, row.K, dtype=BF16, device=ranks.device, generator=own) / row.K**0.5
    whole = torch.cat(ranks.gathered(x)) if row.kind == "gather" else x
    return Inputs(x, copies(w.nbytes, w.clone), whole)


def wanted(row: Row, given: Inputs, ranks: Ranks) -> Tensor:
    """The rank's result in float64."""
    product = given.whole.double() @ given.weights[0].double().T
    if row.kind == "gather":
        return product
    dist.all_reduce(product)
    return product.chunk(ranks.count)[ranks.rank].clone()


def candidates(
    row: Row, given: Inputs, ranks: Ranks, pinned: list[str]
) -> tuple[dict[str, Call], dict[str, Call]]:
    """By name, functions that compute the row's product with one of the copies of the weight; and parts of it."""
    x, weights, whole = given
    group = dist.group.WORLD
    gathered, scattered = torch.empty_like(whole), None
    if row.kind == "scatter":
        scattered = x.new_empty(row.M // ranks.count, row.N)

    def weight(i: int) -> Tensor:
        return weights[i % len(weights)]

    def ours(i: int, config: str | None = None) -> Tensor:
        function = gemmery.distributed.all_gather_linear
        if row.kind == "scatter":
            function = gemmery.distributed.linear_reduce_scatter
        return function(x, weight(i), group=group, config=config)

    def in_steps(linear: Any, i: int) -> Tensor:
        if row.kind == "gather":
            dist.all_gather_into_tensor(gathered, x)
            return linear(gathered, weight(i))
        total = torch.empty_like(scattered)
        dist.reduce_scatter_tensor(total, linear(x, weight(i)))
        return total

    def async_tp(i: int) -> Tensor:
        if row.kind == "gather":
            _, (made,) = torch.ops.symm_mem.fused_all_gather_matmul(x, [weight(i).T], 0, group.group_name)
            return made
        return torch.ops.symm_mem.fused_matmul_reduce_scatter(x, weight(i).T, "sum", 0, group.group_name)

    partial_sum = x.new_empty(row.M, row.N) if row.kind == "scatter" else None

    def nccl(i: int) -> Tensor:
        if row.kind == "gather":
            dist.all_gather_into_tensor(gathered, x)
            return gathered
        dist.reduce_scatter_tensor(scattered, partial_sum)
        return scattered

    calls = {
        OURS: ours, "cublas + nccl": partial(in_steps, F.linear), "gemmery + nccl": partial(in_steps, gemmery.linear)
    }  # fmt: skip
    calls |= {f"gemmery {config}": partial(ours, config=config) for config in pinned}
    if ranks.on_gpu:
        calls["async_tp"] = async_tp
    parts = {
        "cublas alone": lambda i: F.linear(whole, weight(i)),
        "gemmery alone": lambda i: gemmery.linear(whole, weight(i)),
        "nccl alone": nccl,
    }
    return calls, parts


def facts(call: Call, want: Tensor, ranks: Ranks) -> dict[str, Any]:
    """The largest error of a result on any rank, and whether it has the same bits when it is computed again."""
    results = [call(0).clone() for _ in range(2)]
    ranks.synchronize()
    error = float((results[0].double() - want).norm() / want.norm())
    differs = not results[0].equal(results[1])
    error, differs = ranks.largest([error, differs])
    return {"error": error, "repeats": not differs}


def measure(row: Row, ranks: Ranks, watch: Stopwatch | None, args: Any) -> dict[str, Any]:
    """One row's entry."""
    given = inputs(row, ranks, args.seed)
    want = wanted(row, given, ranks)
    entry: dict[str, Any] = row._asdict() | {"copies": len(given.weights), "facts": {}, "seconds": {}}
    calls, parts = candidates(row, given, ranks, args.config)
    for name, call in list(calls.items()):
        failure = ""
        try:
            found = facts(call, want, ranks)
            if name == OURS:
                entry["config"] = chosen_configs(row, row.M // ranks.count)
        except (RuntimeError, ValueError, TypeError) as error:
            if name == OURS:
                raise
            failure = f"{type(error).__name__}: {str(error)[:200]}"
            found = {"failure": failure}
        (is_out,) = ranks.largest([bool(failure)])
        entry["facts"][name] = found
        if is_out:
            ranks.say("   ", name, failure)
            del calls[name]
        elif name == OURS and not (found["error"] < RIGHT and found["repeats"]):
            raise RuntimeError(f"{row.name}: {found}")
    del want
    order = random.Random(args.seed)
    captured = {name: call for name, call in (calls | parts).items() if name != "async_tp"}
    count = len(given.weights) * max(1, -(-CALLS // len(given.weights)) * 1024 // row.M)
    entry["calls"] = count
    if watch is not None:
        entry["seconds"]["graph"] = graph_rounds(captured, count, ranks, watch, args.rounds, order, STEADY)
    eager = {name: call for name, call in calls.items() if name != "gemmery + nccl"}
    entry["seconds"]["eager"] = eager_rounds(eager, ranks, args.rounds, order, eager_calls(row))
    if watch is not None:
        entry["seconds"]["burst"] = burst_rounds(calls | parts, ranks, watch, args.rounds, order)
    return entry


def chosen_configs(row: Row, own: int) -> list[str]:
    """The configs of products of about as many rows as a rank has; see `gathered.parts_of` and `pieces`."""
    found = configs(lambda p: (p.N, p.K) == (row.N, row.K) and 3 * own < 4 * p.M < 5 * own)
    return list(dict.fromkeys(found))


def eager_calls(row: Row) -> int:
    """The number of calls in one figure, for about a tenth of a second where the host isn't slower."""
    return min(EAGER, EAGER * 4096 // row.M)


def report(entry: dict[str, Any]) -> str:
    """Lines of an entry: times in microseconds, and ratios to the peers and to the larger part."""
    lines = [f"{entry['name']:24} {' '.join(entry['config'])}"]
    for regime, rounds in entry["seconds"].items():
        medians = {name: statistics.median(times[name] for times in rounds) for name in rounds[0]}
        lines.append(f"    {regime:6} " + "  ".join(f"{name} {s * 1e6:.1f}" for name, s in medians.items()))
        for peer in [name for name in medians if name != OURS and "alone" not in name]:
            ratio = timing.ratio(rounds, peer, OURS)
            lines.append(f"           {ratio.median:.3f} ({ratio.min:.3f}-{ratio.max:.3f}) of {peer}")
        if "nccl alone" in medians:
            least = max(min(medians["cublas alone"], medians["gemmery alone"]), medians["nccl alone"])
            lines.append(f"           {medians[OURS] / least:.3f} of the larger part")
    return "\n".join(lines)


def benchmark(ranks: Ranks, args: Any) -> None:
    """All rows, on each rank."""
    begun = time.monotonic()
    warnings.simplefilter("ignore", FutureWarning)
    if ranks.on_gpu:
        import torch.distributed._symmetric_memory as symm

        symm.enable_symm_mem_for_group(dist.group.WORLD.group_name)
    watch = Stopwatch() if ranks.on_gpu else None
    data = describe_run(args.seed, args.rounds, ("graph", "eager", "burst"), ranks.device, PEERS + PARTS)
    data["protocol"] |= {
        "ranks": ranks.count, "graph": {"bytes": BYTES, "load_s": STEADY, "timed_s": TIMED},
        "eager": {"calls": {str(row.M): eager_calls(row) for row in SUITE}, "before": "as many"},
    }  # fmt: skip
    data["protocol"]["burst"]["sleep_s"] = PAUSE
    entries = []
    for row in chosen(args):
        (elapsed,) = ranks.largest([time.monotonic() - begun])
        if elapsed > args.seconds:
            ranks.say("time is up before", row.name)
            break
        entries.append(measure(row, ranks, watch, args))
        gc.collect()
        ranks.say(report(entries[-1]), f" after {time.monotonic() - begun:.0f} s")
        if args.output and ranks.rank == 0:
            args.output.parent.mkdir(parents=True, exist_ok=True)
            args.output.write_text(json.dumps(data | {"rows": entries}, indent=1) + "\n")


def chosen(args: Any) -> list[Row]:
    """The rows that the command names."""
    rows = [
        row for row in SUITE if args.rows is None or any(text in row.name for text in args.rows.split(","))
    ]
    if args.shrink > 1:
        small = args.shrink
        rows = [row._replace(M=max(row.M // small, 128), N=row.N // small, K=row.K // small) for row in rows]
    return rows


def main() -> int:
    """The command; exit status 2 where there are too few GPUs, 1 where something is wrong."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rows", help="only rows whose name has one of these, with commas between")
    parser.add_argument("--seed", type=int, default=0, help="of all random numbers")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--config", action="append", default=[], help="time gemmery with a config, too")
    parser.add_argument(
        "--seconds", type=float, default=1e9, help="begin no row, and no more calls, after so long"
    )  # fmt: skip
    parser.add_argument("--limit", type=float, default=560, help="end all ranks after so many seconds")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--list", action="store_true", help="name the rows")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--shrink", type=int, default=1, help="divide sizes by this, for a run on a CPU")
    parser.add_argument("--stress", type=int, metavar="N", help="N calls of random sizes")
    parser.add_argument("--late", type=float, metavar="SECONDS", help="a rank that is late by so much")
    parser.add_argument("--dead", action="store_true", help="a rank that makes no call")
    parser.add_argument("--graph", action="store_true", help="CUDA graphs between eager calls")
    args = parser.parse_args()
    if args.list:
        for row in chosen(args):
            print(row)
        return 0
    if args.device == "cuda" and torch.cuda.device_count() < args.ranks:
        print(f"sharded_rows: there are no {args.ranks} GPUs to measure", file=sys.stderr)
        return 2
    found = checks_wanted(args) or [benchmark]
    return max(processes.run(run, args.ranks, args.device, args, args.limit) for run in found)


if __name__ == "__main__":
    sys.exit(main())
