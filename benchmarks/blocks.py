"""Measure block-sparse products on the GPU at hand, beside dense products by cuBLAS and torch's own BSR kernels.

python benchmarks/blocks.py --list                   names the rows; needs no GPU
python benchmarks/blocks.py --out FILE.json          the rows with bars, others by hand, and 8 random ones of a seed
python benchmarks/blocks.py --rows bar --configs 12  some rows, with the first 12 configs of the model timed as well

Each result is compared with float64 before it is timed. Times are those of single launches with cold caches ("burst").
A figure above 1 is how many times as fast as the peer ours is. torch's is the quicker one of `F.linear` or `@` and its
Triton kernel `bsr_dense_addmm`. The file is written behind each row.
"""

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT)]

import gemmery  # noqa: E402
from gemmery import devices, select  # noqa: E402
from gemmery.formats.blocks import stored  # noqa: E402
from gemmery.lab import timing  # noqa: E402
from gemmery.lab.results import describe_run  # noqa: E402
from gemmery.layout import fold  # noqa: E402
from gemmery.operands import BlocksOperand, DenseOperand  # noqa: E402
from gemmery.tuning.stopwatch import Stopwatch  # noqa: E402

OURS, DENSE = "gemmery", "cuBLAS, dense"
#: The largest ‖out − ref‖ / ‖ref‖ that counts as right, and the rows that are compared.
TOLERANCE, CHECKED = 5e-3, 96
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Row:
    """A product of an (N, K) matrix in BSR.

    Attributes:
        op: "linear" for x @ w.T, "first" for w @ x.T, "second" for x' @ w with x' (M, N), "sampled" for the blocks of
            y.T @ x with y (M, N) at w's pattern, as in the gradient of w.
        sparsity: the part of the blocks that is not stored.
        dense, torch: bars: how many times as fast as each peer ours is to be; 0 for none.
    """

    name: str
    M: int
    N: int
    K: int
    block: int
    sparsity: float
    op: str = "linear"
    dtype: str = "bf16"
    dense: float = 0.0
    torch: float = 0.0


ROWS = [
    Row("bar: blocks of 64", 4096, 8192, 8192, 64, 0.9, dense=4.0, torch=1.3),
    Row("bar: blocks of 128", 4096, 8192, 8192, 128, 0.5, dense=1.4, torch=1.3),
    Row("first operand", 4096, 8192, 8192, 64, 0.9, "first"),
    Row("gradient of x", 4096, 8192, 8192, 64, 0.9, "second"),
    Row("gradient of w", 4096, 8192, 8192, 64, 0.9, "sampled"),
    Row("blocks of 32", 4096, 4096, 4096, 32, 0.9),
    Row("blocks of 16", 4096, 4096, 4096, 16, 0.9),
]


def random_rows(seed: int, count: int = 8) -> list[Row]:
    """Rows of a seed, in sizes of layers."""
    rng = random.Random(seed)
    found = []
    for i in range(count):
        block = rng.choice([32, 64, 64, 128, 128])
        M = rng.randint(128, 8192)
        N, K = (128 * rng.randint(8, 96) for _ in range(2))
        sparsity = rng.choice([0.5, 0.6, 0.7, 0.8, 0.9, 0.95])
        op = rng.choice(["linear", "linear", "first", "second"])
        found.append(Row(f"random {seed}.{i}", M, N, K, block, sparsity, op, rng.choice(list(DTYPES))))
    return found


@dataclass
class Inputs:
    """A row's tensors: the sparse matrix, the same dense, and what it is multiplied by."""

    sparse: Tensor
    dense: Tensor
    x: Tensor
    y: Tensor

    @classmethod
    def of(cls, row: Row, seed: int) -> "Inputs":
        """Normal numbers, and a pattern in which each block is stored with the same probability."""
        generator = torch.Generator("cuda").manual_seed(seed)
        blocks = (row.N // row.block, row.K // row.block)
        mask = torch.rand(blocks, device="cuda", generator=generator) >= row.sparsity
        dtype = DTYPES[row.dtype]

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, device="cuda", generator=generator).to(dtype)

        values = normal(int(mask.sum()), row.block, row.block)
        ends = torch.cat([mask.new_zeros(1, dtype=torch.int32), mask.sum(1).cumsum(0).int()])
        places = mask.nonzero()[:, 1].int().contiguous()
        sparse = torch.sparse_bsr_tensor(ends, places, values, size=(row.N, row.K), check_invariants=False)
        whole = values.new_zeros(*blocks, row.block, row.block)
        whole[mask] = values
        dense = whole.permute(0, 2, 1, 3).reshape(row.N, row.K).contiguous()
        return cls(sparse, dense, normal(row.M, row.K), normal(row.M, row.N))


def ours(row: Row, i: Inputs, config: str | None = None) -> Callable[[], Tensor]:
    """gemmery's product."""
    if row.op == "linear":
        return lambda: gemmery.linear(i.x, i.sparse, config=config)
    if row.op == "first":
        b = i.x.t()
        return lambda: gemmery.matmul(i.sparse, b, config=config)
    if row.op == "second":
        return lambda: gemmery.matmul(i.y, i.sparse, config=config)
    a = i.y.t()
    return lambda: gemmery.sampled_addmm(i.sparse, a, i.x, beta=0, config=config).values()


def cublas(row: Row, i: Inputs) -> Callable[[], Tensor]:
    """The product of the dense matrix."""
    if row.op == "linear":
        return lambda: F.linear(i.x, i.dense)
    if row.op == "first":
        return lambda: i.dense @ i.x.t()
    if row.op == "second":
        return lambda: i.y @ i.dense
    return lambda: i.y.t() @ i.x


def torch_bsr(row: Row, i: Inputs) -> dict[str, Callable[[], Any]]:
    """torch's products of the BSR tensor."""
    if row.op == "linear":
        found = {"torch, F.linear": lambda: F.linear(i.x, i.sparse)}
    elif row.op == "first":
        b = i.x.t()
        found = {"torch, @": lambda: i.sparse @ b}
    else:
        return {}
    try:
        from torch.sparse._triton_ops import bsr_dense_addmm
    except ImportError:
        return found
    b, out = i.x.t(), torch.zeros(row.N, row.M, device="cuda", dtype=i.x.dtype)
    return found | {"torch, bsr_dense_addmm": lambda: bsr_dense_addmm(out, i.sparse, b, beta=0)}


def check(row: Row, i: Inputs, made: Tensor) -> float:
    """The error of a result beside float64, in some of its rows.

    Raises:
        ValueError: it is too large.
    """
    if row.op == "sampled":
        slots = torch.arange(0, made.shape[0], max(made.shape[0] // 8, 1), device="cuda")
        rows = torch.repeat_interleave(
            torch.arange(row.N // row.block, device="cuda"), i.sparse.crow_indices().diff()
        )[slots]
        cols = i.sparse.col_indices()[slots]
        y, x = i.y.unflatten(1, (-1, row.block)), i.x.unflatten(1, (-1, row.block))
        want = torch.stack([
            y[:, r].double().T @ x[:, c].double() for r, c in zip(rows.tolist(), cols.tolist(), strict=True)
        ])  # fmt: skip
        found = made[slots]
    else:
        left, right = {
            "linear": (i.x, i.dense.t()), "first": (i.dense, i.x.t()), "second": (i.y, i.dense),
        }[row.op]  # fmt: skip
        some = torch.linspace(0, left.shape[0] - 1, CHECKED, device="cuda").long()
        want, found = left[some].double() @ right.double(), made[some]
    error = ((found.double() - want).norm() / want.norm()).item()
    if not error <= TOLERANCE:
        raise ValueError(f"{row.name}: off by {error:.2g}")
    return error


def configs_of(row: Row, i: Inputs, count: int) -> list[str]:
    """The first configs of the model for a row."""
    if row.op == "sampled" or not count:
        return []
    w = stored("linear", "weight", i.sparse)
    x = {"linear": i.x, "first": i.x.t(), "second": i.y}[row.op]
    if row.op == "first":
        left, right = BlocksOperand(w, False), DenseOperand(x)
    else:
        left, right = DenseOperand(x), BlocksOperand(w.mT if row.op == "linear" else w, True)
    shape = left.matrix.shape[0], right.matrix.shape[1]
    device = devices.current(torch.device("cuda"))
    assert device is not None
    problem = fold(left, right, torch.empty(shape, device="cuda", dtype=x.dtype), [], device)[0]
    return [str(config) for config in select.candidates(problem)[:count]]


def chosen(row: Row, i: Inputs) -> str:
    """The config that runs a row."""
    if row.op == "sampled":
        return ""
    given = {"linear": (i.x, i.sparse.t()), "first": (i.sparse, i.x.t()), "second": (i.y, i.sparse)}[row.op]
    return str(getattr(gemmery.plan(*given), "config", ""))


def timed(methods: dict[str, Callable[[], Any]], rounds: int, seed: int, watch: Stopwatch) -> dict[str, Any]:
    """Burst times; those of a method that waits for the GPU are of calls in a row, with the host's part."""
    waits: dict[str, float] = {}
    alone = dict(methods)
    for name, call in methods.items():
        try:
            watch.cold(call, 1)
        except RuntimeError:
            waits[name] = statistics.median(watch.span(call, 1)[0] for _ in range(5))
            del alone[name]
    found = timing.compare(alone, rounds=rounds, seed=seed, regimes=("burst",), watch=watch)["burst"]
    return {"rounds": found, "waits": waits}


def measured(row: Row, options: argparse.Namespace, watch: Stopwatch) -> dict[str, Any]:
    """A row's entry."""
    i = Inputs.of(row, options.seed)
    run = ours(row, i)
    error = check(row, i, run())
    methods: dict[str, Callable[[], Any]] = {OURS: run, DENSE: cublas(row, i)}
    failed = {}
    for name, call in torch_bsr(row, i).items():
        try:
            call()
            torch.cuda.synchronize()
            methods[name] = call
        except Exception as problem:
            failed[name] = f"{type(problem).__name__}: {problem}"[:200]
    peers = [name for name in methods if name.startswith("torch")]
    for text in configs_of(row, i, options.configs):
        call = ours(row, i, text)
        try:
            check(row, i, call())
            methods[text] = call
        except Exception as problem:
            failed[text] = f"{type(problem).__name__}: {problem}"[:200]
    found = timed(methods, options.rounds, options.seed, watch)
    rounds, waits = found["rounds"], found["waits"]
    seconds = {name: statistics.median(each[name] for each in rounds) for name in rounds[0]} | waits
    best = min(peers, key=seconds.__getitem__, default=None)
    speeds = {DENSE: timing.ratio(rounds, DENSE, OURS).median}
    if best is not None:
        speeds["torch"] = seconds[best] / seconds[OURS]
    bars = {DENSE: row.dense, "torch": row.torch}
    return {
        "row": asdict(row), "blocks": i.sparse.values().shape[0], "error": error, "config": chosen(row, i),
        "rounds": rounds, "seconds": seconds, "speeds": speeds, "failed": failed, "waits": sorted(waits),
        "passed": all(speeds.get(name, 0) >= bar for name, bar in bars.items() if bar),
        "tflops": 2 * row.M * i.sparse.values().numel() / seconds[OURS] / 1e12,
    }  # fmt: skip


def main() -> int:
    """The command; exit status 1 if a bar is missed, 2 where there is no GPU."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="where the results go, as JSON")
    parser.add_argument("--seed", type=int, default=0, help="of the random rows and of the numbers")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rows", default="", help="only rows with this in their names")
    parser.add_argument("--configs", type=int, default=0, help="time so many configs of the model as well")
    parser.add_argument("--list", action="store_true", help="name the rows")
    options = parser.parse_args()
    rows = [row for row in (*ROWS, *random_rows(options.seed)) if options.rows in row.name]
    if options.list:
        for row in rows:
            print(row)
        return 0
    if not torch.cuda.is_available():
        print("blocks: there is no GPU to measure", file=sys.stderr)
        return 2
    watch = Stopwatch()
    result = describe_run(options.seed, options.rounds, ("burst",), "cuda", [DENSE, "torch"]) | {
        "entries": []
    }
    begun = time.perf_counter()
    for row in rows:
        try:
            entry = measured(row, options, watch)
        except Exception as problem:
            entry = {"row": asdict(row), "wrong": f"{type(problem).__name__}: {problem}", "passed": False}
        result["entries"].append(entry)
        if options.out:
            options.out.parent.mkdir(parents=True, exist_ok=True)
            options.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        show(row, entry, time.perf_counter() - begun)
        torch.cuda.empty_cache()
    return 0 if all(entry["passed"] for entry in result["entries"]) else 1


def show(row: Row, entry: dict[str, Any], since: float) -> None:
    """Print a row's figures."""
    size = f"{row.M}x{row.N}x{row.K} {row.dtype} {row.op}, {row.block}, {row.sparsity:.0%} empty"
    if "wrong" in entry:
        print(f"{since:5.0f} s  {row.name}: {size}: {entry['wrong']}", flush=True)
        return
    microseconds = {name: round(seconds * 1e6, 1) for name, seconds in entry["seconds"].items()}
    speeds = ", ".join(f"{speed:.2f} of {name}" for name, speed in entry["speeds"].items())
    mark = "" if entry["passed"] else "  BELOW ITS BAR"
    print(f"{since:5.0f} s  {row.name}: {size}: {speeds}; {entry['tflops']:.0f} TFLOP/s{mark}", flush=True)
    print(f"         {entry['config']}  {microseconds}", flush=True)
    for name, why in entry["failed"].items():
        print(f"         {name}: {why}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
