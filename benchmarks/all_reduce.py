"""Measure products whose sum is spread over the GPUs of one host, beside cuBLAS with NCCL and with symmetric memory.

python benchmarks/all_reduce.py --list                           names the rows; needs no GPU
python benchmarks/all_reduce.py --seed 7 --output FILE           the suite, and 8 random rows of a seed
python benchmarks/all_reduce.py --rows 16x,int4 --seconds 120    some of it; begins no row after two minutes
python benchmarks/all_reduce.py --stress 10000                   calls of random sizes, whose results are compared
python benchmarks/all_reduce.py --late 1 --dead --graph          a rank that is late, one that is missing, CUDA graphs
python benchmarks/all_reduce.py --device cpu --rows 16x8192x4096 --shrink 32    the script itself, over gloo

It starts its own ranks. Each result is compared with float64 before it is timed, and must have the same bits on all
ranks and when it is computed again. Calls are timed in a CUDA graph with as many copies of the weight as L2 can't hold;
the time is that of the slowest rank. "eager" is the time of a call from the host, many in a row. Configs are those that
gemmery chooses untuned. The file is written behind each row.
"""

import argparse
import gc
import itertools
import json
import random
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
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
from benchmarks import all_reduce_checks as checks  # noqa: E402
from benchmarks import processes  # noqa: E402
from benchmarks.processes import Ranks  # noqa: E402
from gemmery import epilogues  # noqa: E402
from gemmery.lab import random_products, timing  # noqa: E402
from gemmery.lab.peers import OURS  # noqa: E402
from gemmery.lab.results import describe_run  # noqa: E402
from gemmery.product import cache  # noqa: E402
from gemmery.tuning.stopwatch import BURST_MOST, Stopwatch  # noqa: E402

BF16 = torch.bfloat16
#: The largest ‖out − ref‖ / ‖ref‖ that counts as right, of a sum of rounded sums.
RIGHT = 6e-3
#: Bytes of weights that calls in a graph go through, so many calls at least, and so many copies at most.
BYTES, CALLS, COPIES = 200 * 10**6, 20, 64
#: Seconds of load and of timing in one figure, and eager calls in one.
LOAD, TIMED, EAGER = 4e-3, 12e-3, 200
#: Seconds that the GPUs sleep before a single call, so that the host has queued it when it starts; and the most tries.
PAUSE, TRIES = 4e-3, 70
PEERS = [
    f"{product} + {sum}" for product in ("cublas", "gemmery") for sum in ("nccl", "one_shot", "two_shot")
]

#: By number of the copy of the weight, queues a product.
Call = Callable[[int], Tensor]


class Row(NamedTuple):
    """A product.

    Attributes:
        K: of each rank.
        code: of the weight, "" for bf16. int4 has groups of 128 columns. Products of cuBLAS have a bf16 weight.
        fused: whether a bias and a residual are added.
        eager: whether calls from the host are timed as well.
    """

    name: str
    M: int
    N: int
    K: int
    code: str = ""
    fused: bool = False
    eager: bool = False


def _row(m: int, n: int, k: int, code: str = "", fused: bool = False) -> Row:
    kind = "bias and residual" if fused else code or "bf16"
    return Row(f"{kind} {m}x{n}x{k}", m, n, k, code, fused, m == 16)


SHAPES = ((8192, 4096), (8192, 14336))
#: What counts most comes first.
SUITE = [
    *[_row(m, n, k) for m in (16, 128) for n, k in SHAPES],
    *[_row(m, n, k, code) for code in ("int4", "e4m3") for m in (16, 128) for n, k in SHAPES],
    _row(16, 8192, 4096, fused=True),
    *[_row(m, n, k) for m in (1, 64, 256, 1024) for n, k in SHAPES],
]


def random_rows(seed: int, count: int) -> list[Row]:
    """Projections of random transformers as in the other suites, whose N and K are multiples of 64."""
    found = []
    for which in ("decode", "mid"):
        drawn = random_products.draw(seed, which, count // 2, _is_summed)
        found += [Row(f"random {which} {x.M}x{x.N}x{x.K}", x.M, x.N, x.K) for x in drawn]
    return found


def _is_summed(x: random_products.Product) -> bool:
    """Whether a product is one that tensor parallelism sums over ranks, and not too large for a quick check."""
    return x.projection in ("o", "down") and x.N % 64 == 0 and x.K % 64 == 0 and x.N * x.K <= 2**27


# ---------------------------------------------------------------------------------------------------------------------
# What is measured


@dataclass
class Inputs:
    """The inputs of a row.

    Attributes:
        dense, own: copies of the weight: in bf16, and as the row has it.
        bias, residual: the same on all ranks.
    """

    x: Tensor
    dense: list[Tensor]
    own: list[Any]
    bias: Tensor | None
    residual: Tensor | None

    @property
    def calls(self) -> int:
        """In one graph: all copies of the weight are used equally often."""
        copies = len(self.own)
        return copies * -(-CALLS // copies)


def copies(size: int, make: Callable[[], Any]) -> list[Any]:
    """Enough copies to exceed L2."""
    return [make() for _ in range(max(2, min(COPIES, -(-BYTES // size))))]


def inputs(row: Row, ranks: Ranks, seed: int) -> Inputs:
    """Random ones, another x and another weight on each rank."""
    own = torch.Generator(ranks.device).manual_seed(1000 * seed + ranks.rank)
    shared = torch.Generator(ranks.device).manual_seed(1000 * seed + 999)

    def normal(*shape: int, generator: torch.Generator = own) -> Tensor:
        return torch.randn(shape, dtype=BF16, device=ranks.device, generator=generator)

    x, w = normal(row.M, row.K), normal(row.N, row.K) / row.K**0.5
    if row.code:
        packed = gemmery.quantize(w, row.code, **({"group_size": 128} if row.code == "int4" else {}))
        w = packed.dequantize()
        size = sum(part.nbytes for part in packed.parts().values())
        weights = copies(
            size, lambda: packed.with_parts({name: part.clone() for name, part in packed.parts().items()})
        )
    dense = copies(w.nbytes, w.clone)
    bias = normal(row.N, generator=shared) if row.fused else None
    residual = normal(row.M, row.N, generator=shared) if row.fused else None
    return Inputs(x, dense, weights if row.code else dense, bias, residual)


def wanted(given: Inputs, weight: Any, ranks: Ranks) -> Tensor:
    """The sum in float64, of all ranks' operands."""
    w = weight.dequantize(torch.float32) if isinstance(weight, gemmery.QuantizedTensor) else weight
    total = sum(
        x.double() @ each.double().T
        for x, each in zip(ranks.gathered(given.x), ranks.gathered(w), strict=True)
    )
    if given.bias is not None:
        total = total + given.bias.double() + given.residual.double()
    return total


class Buffer:
    """Symmetric memory for the largest product of the peers.

    Args:
        size: its elements.
    """

    def __init__(self, size: int) -> None:
        import torch.distributed._symmetric_memory as symm

        self.group = dist.group.WORLD.group_name
        symm.enable_symm_mem_for_group(self.group)
        self.whole = symm.empty(size, dtype=BF16, device=torch.device("cuda", torch.cuda.current_device()))
        symm.rendezvous(self.whole, self.group)

    def of(self, row: Row) -> Tensor:
        """Its first elements, as the row's result."""
        return self.whole[: row.M * row.N].view(row.M, row.N)


def candidates(
    row: Row, given: Inputs, ranks: Ranks, buffer: Buffer | None, pinned: list[str]
) -> dict[str, Call]:
    """By name, functions that compute the row's product with one of the copies of the weight."""
    # A bias is added on one rank, and what comes behind the sum is one kernel.
    bias = given.bias if ranks.rank == 0 else None

    def ours(i: int, config: str | None = None) -> Tensor:
        how: dict[str, Any] = {"config": config}
        if given.residual is not None:
            how |= {"epilogue": epilogues.residual, "args": (given.residual,)}
        return gemmery.distributed.linear_all_reduce(
            given.x, given.own[i % len(given.own)], given.bias, group=dist.group.WORLD, **how
        )

    def cublas(i: int, out: Tensor | None = None) -> Tensor:
        w = given.dense[i % len(given.dense)]
        if out is None:
            return F.linear(given.x, w, bias)
        return torch.mm(given.x, w.T, out=out) if bias is None else torch.addmm(bias, given.x, w.T, out=out)

    def unfused(i: int, out: Tensor | None = None) -> Tensor:
        return gemmery.linear(given.x, given.own[i % len(given.own)], bias, out=out)

    def finished(y: Tensor) -> Tensor:
        return y if given.residual is None else y.add_(given.residual)

    def by_group(product: Callable[..., Tensor], i: int) -> Tensor:
        y = product(i)
        dist.all_reduce(y)
        return finished(y)

    def by_symmetric(product: Callable[..., Tensor], function: Any, i: int) -> Tensor:
        return finished(function(product(i, buffer.of(row)), "sum", buffer.group))

    calls: dict[str, Call] = {OURS: ours}
    calls |= {f"gemmery {config}": partial(ours, config=config) for config in pinned}
    for name, product in (("cublas", cublas), ("gemmery", unfused)):
        calls[f"{name} + nccl"] = partial(by_group, product)
        if buffer is None or (product is unfused and not row.code):
            continue
        operators = torch.ops.symm_mem
        calls[f"{name} + one_shot"] = partial(by_symmetric, product, operators.one_shot_all_reduce)
        calls[f"{name} + two_shot"] = partial(by_symmetric, product, operators.two_shot_all_reduce_)
    return calls


# ---------------------------------------------------------------------------------------------------------------------
# Timing: all ranks time the same call at the same time


def recorded(call: Call, count: int) -> Callable[[], None]:
    """A CUDA graph of calls."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for i in range(count):
            call(i)
    return graph.replay


def graph_rounds(
    calls: dict[str, Call], count: int, ranks: Ranks, watch: Stopwatch, rounds: int, order: random.Random,
    load: float = LOAD,
) -> list[timing.Round]:  # fmt: skip
    """Seconds of a call in a CUDA graph by name, round by round.

    Args:
        load: seconds for which the same graph is replayed before it is timed.
    """
    replays = {name: recorded(call, count) for name, call in calls.items()}
    seconds = {}
    for name, replay in replays.items():
        replay()
        ranks.wait()
        # All ranks replay equally often.
        (seconds[name],) = ranks.largest([watch.span(replay, 2)[0] / 2])

    def figure(name: str) -> float:
        ranks.wait()
        before, timed = (max(1, round(s / seconds[name])) for s in (load, TIMED))
        return watch.span(replays[name], timed, before)[0] / (timed * count)

    return _rounds(figure, list(calls), ranks, rounds, order)


def eager_rounds(
    calls: dict[str, Call], ranks: Ranks, rounds: int, order: random.Random, count: int = EAGER
) -> list[timing.Round]:
    """Seconds of a call from the host, of so many in a row behind as many others; on a CPU, of one."""
    # The clock of a GPU that has just exchanged data is higher for some tens of milliseconds.
    count, before = (count, count) if ranks.on_gpu else (1, 0)

    def figure(name: str) -> float:
        for i in range(before):
            calls[name](i)
        ranks.wait()
        begun = time.perf_counter()
        for i in range(count):
            calls[name](i)
        ranks.synchronize()
        return (time.perf_counter() - begun) / count

    return _rounds(figure, list(calls), ranks, rounds, order)


def burst_rounds(
    calls: dict[str, Call], ranks: Ranks, watch: Stopwatch, rounds: int, order: random.Random
) -> list[timing.Round]:
    """Seconds of a single call after a pause, with empty caches, on the slowest rank; round by round."""
    meeting = torch.zeros(1, device=ranks.device)

    def launched(call: Call, i: int) -> tuple[float, float]:
        """The seconds of a call on the slowest rank, and whether a host queued it too late."""
        ranks.wait()
        # All GPUs start together.
        seconds, is_late = watch.single(partial(call, i), PAUSE, partial(dist.all_reduce, meeting))
        seconds, any_late = ranks.largest([seconds, is_late])
        return seconds, any_late

    def figure(name: str) -> float:
        tried = (launched(calls[name], i) for i in range(TRIES))
        found = list(itertools.islice((seconds for seconds, is_late in tried if not is_late), BURST_MOST))
        if len(found) < BURST_MOST:
            raise RuntimeError(f"{name}: the host does not queue a call within {PAUSE * 1e3:.0f} ms")
        return statistics.median(found)

    return _rounds(figure, list(calls), ranks, rounds, order)


def _rounds(
    figure: Callable[[str], float], names: list[str], ranks: Ranks, rounds: int, order: random.Random
) -> list[timing.Round]:
    """Figures by name in a new order each round, the same on all ranks; of each that of the slowest rank."""
    found = [{name: figure(name) for name in order.sample(names, len(names))} for _ in range(rounds)]
    slowest = iter(ranks.largest([each for times in found for each in times.values()]))
    return [{name: next(slowest) for name in times} for times in found]


# ---------------------------------------------------------------------------------------------------------------------
# Rows


def facts(call: Call, want: Tensor, ranks: Ranks) -> dict[str, Any]:
    """The error of a result, and whether it has the same bits on all ranks and when it is computed again."""
    results = [call(0).clone() for _ in range(2)]
    ranks.synchronize()
    error = float((results[0].double() - want).norm() / want.norm())
    return {
        "error": error,
        "same_on_ranks": ranks.same(results[0]),
        "repeats": results[0].equal(results[1]),
    }


def measure(
    row: Row, ranks: Ranks, watch: Stopwatch | None, buffer: Buffer | None, args: Any
) -> dict[str, Any]:
    """One row's entry."""
    given = inputs(row, ranks, args.seed or 0)
    wants = [wanted(given, given.dense[0], ranks)]
    wants.append(wanted(given, given.own[0], ranks) if row.code else wants[0])
    entry: dict[str, Any] = row._asdict() | {"calls": given.calls, "copies": len(given.own), "facts": {}}
    calls = candidates(row, given, ranks, buffer, args.config)
    for name, call in list(calls.items()):
        failure = ""
        try:
            found = facts(call, wants[not name.startswith("cublas")], ranks)
        except (RuntimeError, ValueError, TypeError) as error:
            if name == OURS:
                raise
            failure = f"{type(error).__name__}: {error}"
            found = {"failure": failure}
        # A peer that failed on one rank is left out on all.
        (is_out,) = ranks.largest([bool(failure)])
        entry["facts"][name] = found
        if is_out:
            ranks.say("   ", name, failure)
            del calls[name]
        elif name == OURS and not (found["error"] < RIGHT and found["same_on_ranks"] and found["repeats"]):
            raise RuntimeError(f"{row.name}: {found}")
        if name == OURS:
            entry["config"] = configs(lambda p: p.a.is_summed)[-1:]
    order = random.Random(args.seed or 0)
    entry["seconds"] = {}
    if watch is not None:
        entry["seconds"]["graph"] = graph_rounds(calls, given.calls, ranks, watch, args.rounds, order)
    if row.eager or watch is None:
        entry["seconds"]["eager"] = eager_rounds(calls, ranks, args.rounds, order)
    return entry


def configs(suits: Callable[[Any], bool]) -> list[str]:
    """Those of all problems so far that suit, the last one last."""
    return [str(x.plan.config) for x in cache._known.values() if suits(x.plan.problem)]


def report(entry: dict[str, Any]) -> str:
    """Lines of an entry: the config, times in microseconds, and the ratio to the fastest peer."""
    lines = [f"{entry['name']:32} {' '.join(entry['config'])}"]
    for regime, rounds in entry["seconds"].items():
        medians = {name: statistics.median(times[name] for times in rounds) for name in rounds[0]}
        lines.append(
            f"{entry['name']:32} {regime:6} "
            + "  ".join(f"{name} {medians[name] * 1e6:.1f}" for name in medians)
        )
        others = {"cublas": best(rounds, "cublas"), "all": best(rounds, "")}
        for which, peer in others.items():
            ratio = timing.ratio(rounds, peer, OURS)
            lines.append(f"{'':39} {ratio.median:.3f} ({ratio.min:.3f}-{ratio.max:.3f}) of {which}: {peer}")
    return "\n".join(lines)


def best(rounds: list[timing.Round], kind: str) -> str:
    """The peer of a kind that takes the least time."""
    names = [name for name in rounds[0] if name in PEERS and name.startswith(kind)]
    return min(names, key=lambda name: statistics.median(times[name] for times in rounds))


def benchmark(ranks: Ranks, args: Any) -> None:
    """All rows, on each rank."""
    begun = time.monotonic()
    rows = chosen(args)
    watch = Stopwatch() if ranks.on_gpu else None
    buffer = Buffer(max(row.M * row.N for row in rows)) if ranks.on_gpu else None
    data = describe_run(args.seed or 0, args.rounds, ("graph", "eager"), ranks.device, PEERS)
    data["protocol"] |= {
        "ranks": ranks.count,
        "graph": {"calls": CALLS, "bytes": BYTES, "load_s": LOAD, "timed_s": TIMED},
        "eager": {"calls": EAGER},
    }
    entries = []
    for row in rows:
        (elapsed,) = ranks.largest([time.monotonic() - begun])
        if elapsed > args.seconds:
            ranks.say("time is up before", row.name)
            break
        entries.append(measure(row, ranks, watch, buffer, args))
        gc.collect()
        ranks.say(report(entries[-1]), f" after {time.monotonic() - begun:.0f} s")
        if args.output and ranks.rank == 0:
            args.output.parent.mkdir(parents=True, exist_ok=True)
            args.output.write_text(json.dumps(data | {"rows": entries}, indent=1) + "\n")


def chosen(args: Any) -> list[Row]:
    """The rows that the command names."""
    rows = SUITE if args.seed is None else [*SUITE, *random_rows(args.seed, args.count)]
    if args.rows is not None:
        rows = [row for row in rows if any(text in row.name for text in args.rows.split(","))]
    return [
        row._replace(N=max(row.N // args.shrink, 256), K=max(row.K // args.shrink, 256)) if args.shrink > 1 else row
        for row in rows
    ]  # fmt: skip


def main() -> int:
    """The command; exit status 2 where there are too few GPUs, 1 where something is wrong."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rows", help="only rows whose name has one of these, with commas between")
    parser.add_argument("--seed", type=int, help="of random rows, none without it; and of all random numbers")
    parser.add_argument("--count", type=int, default=8, help="random rows")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--config", action="append", default=[], help="time gemmery with a config, too")
    parser.add_argument("--seconds", type=float, default=1e9, help="begin no row after so many seconds")
    parser.add_argument("--limit", type=float, default=560, help="end all ranks after so many seconds")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--list", action="store_true", help="name the rows")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--shrink", type=int, default=1, help="divide N and K by this, for a run on a CPU")
    parser.add_argument("--stress", type=int, metavar="N", help="N calls of random sizes")
    parser.add_argument("--late", type=float, metavar="SECONDS", help="a rank that is late by so much")
    parser.add_argument("--dead", action="store_true", help="a rank that makes no call")
    parser.add_argument("--graph", action="store_true", help="CUDA graphs between eager calls")
    parser.add_argument("--timeout", type=float, help="seconds that a kernel waits for other ranks")
    args = parser.parse_args()
    if args.list:
        for row in chosen(args):
            print(row)
        return 0
    if args.device == "cuda" and torch.cuda.device_count() < args.ranks:
        print(f"all_reduce: there are no {args.ranks} GPUs to measure", file=sys.stderr)
        return 2
    found = checks.wanted(args) or [benchmark]
    return max(processes.run(run, args.ranks, args.device, args, args.limit) for run in found)


if __name__ == "__main__":
    sys.exit(main())
