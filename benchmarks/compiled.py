"""Measure what max-autotune makes of a transformer block with gemmery among its choices, and without.

python benchmarks/compiled.py --out DIR [--case NAME] [--seconds N]    writes DIR/compiled.json behind each case

A case is a block, a number of rows, and whether it is trained. Both functions are compiled in this process with the
same Inductor cache, first the one without gemmery; Triton's templates, which compile in other processes, are then
found by the second. The time that gemmery adds to a compilation is therefore measured where it arises: Inductor
measures gemmery's choice for each product, which includes the compilation of its kernel.

A time of a block is that of many calls in a row, after a load of the same; the functions take turns in a new order each
round. Inference is `mode="max-autotune"`, with CUDA graphs; training is "max-autotune-no-cudagraphs", forward and
backward. No case is begun after N seconds.
"""

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch._inductor.utils import fresh_cache
from torch.nn import functional as F

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT)]

import gemmery.compile  # noqa: E402
from gemmery.compile import choice  # noqa: E402
from gemmery.lab.results import describe_run  # noqa: E402

OUT = ROOT / "benchmarks" / "results" / "compiled"
OURS, PEER = "gemmery", "torch"
#: Seconds of load and of timing of a figure, and rounds.
LOAD, TIMED, ROUNDS = 0.15, 0.25, 9
BF16 = torch.bfloat16

Call = Callable[[], Any]


class Llama(nn.Module):
    """A block of Llama 3: grouped-query attention with rotary positions, a gated feed-forward, and RMSNorms."""

    def __init__(self, width: int = 4096, hidden: int = 14336, heads: int = 32, groups: int = 8) -> None:
        super().__init__()
        self.size = width // heads
        self.norms = nn.ModuleList(nn.RMSNorm(width, 1e-5) for _ in range(2))
        self.q, self.o = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)
        self.k, self.v = (nn.Linear(width, groups * self.size, bias=False) for _ in range(2))
        self.gate, self.up = (nn.Linear(width, hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(hidden, width, bias=False)
        angles = torch.outer(torch.arange(8192), 5e5 ** -(torch.arange(0, self.size, 2) / self.size))
        self.register_buffer("cos", angles.cos().repeat(1, 2))
        self.register_buffer("sin", angles.sin().repeat(1, 2))

    def turned(self, x: Tensor) -> Tensor:
        """(B, heads, T, size), turned by positions."""
        low, high = x.chunk(2, -1)
        length = x.shape[-2]
        return x * self.cos[:length] + torch.cat((-high, low), -1) * self.sin[:length]

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, width) to the same."""
        h = self.norms[0](x)
        q, k, v = (f(h).unflatten(-1, (-1, self.size)).transpose(1, 2) for f in (self.q, self.k, self.v))
        made = F.scaled_dot_product_attention(
            self.turned(q), self.turned(k), v, is_causal=True, enable_gqa=True
        )
        x = x + self.o(made.transpose(1, 2).flatten(-2))
        h = self.norms[1](x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class Gpt(nn.Module):
    """A block of GPT: attention and a feed-forward with GELU, biases everywhere, and LayerNorms."""

    def __init__(self, width: int = 4096, heads: int = 32) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.qkv, self.o = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, width) to the same."""
        q, k, v = self.qkv(self.norms[0](x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        made = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(made.transpose(1, 2).flatten(-2))
        return x + self.down(F.gelu(self.up(self.norms[1](x)), approximate="tanh"))


#: By name: a block, sequences, their length, and whether it is trained. The first are the most important.
CASES: dict[str, tuple[type[nn.Module], int, int, bool]] = {
    "Llama, 16 rows": (Llama, 16, 1, False),
    "Llama, 2048 rows": (Llama, 1, 2048, False),
    "Llama, 256 rows": (Llama, 1, 256, False),
    "GPT, 512 rows": (Gpt, 1, 512, False),
    "Llama, 4096 rows, trained": (Llama, 2, 2048, True),
    "Llama, 8192 rows": (Llama, 4, 2048, False),
    "GPT, 4096 rows": (Gpt, 2, 2048, False),
    "Llama, 64 rows": (Llama, 64, 1, False),
}
#: Sizes at which a CPU has a result soon.
SMALL: dict[str, dict[str, int]] = {
    "Llama": {"width": 64, "hidden": 96, "heads": 2, "groups": 1}, "Gpt": {"width": 64, "heads": 2},
}  # fmt: skip


def wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


class Added:
    """The time that Inductor spends on gemmery's choices, by product."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def __enter__(self) -> "Added":
        self.original = original = choice._Caller.benchmark

        def benchmark(caller: Any, *args: Any, out: Any) -> Any:
            begun = time.perf_counter()
            try:
                return original(caller, *args, out=out)
            finally:
                name = f"{caller.record.op} {'x'.join(map(str, caller.record.shape))}"
                self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - begun

        choice._Caller.benchmark = benchmark
        return self

    def __exit__(self, *_: object) -> None:
        choice._Caller.benchmark = self.original


def call_of(run: Callable[..., Tensor], block: nn.Module, x: Tensor, is_trained: bool) -> Call:
    """One call of a block's compiled function."""
    if not is_trained:

        def infer() -> Tensor:
            with torch.no_grad():
                return run(block, x)

        return infer
    gradient = torch.randn_like(x)

    def step() -> Tensor:
        x.grad = None
        block.zero_grad(set_to_none=True)
        y = run(block, x)
        y.backward(gradient)
        return y.detach()

    return step


def compiled(name: str, block: nn.Module, x: Tensor, is_trained: bool) -> tuple[Call, float]:
    """A block under torch.compile as a call, and the seconds of its first call.

    Args:
        name: of the function's code: the compiler keeps what it compiled by the code object, for all blocks.
    """
    forward = type(block).forward
    code = forward.__code__.replace(co_name=name)
    run = FunctionType(code, forward.__globals__, name, forward.__defaults__, forward.__closure__)
    mode = "max-autotune-no-cudagraphs" if is_trained or x.device.type == "cpu" else "max-autotune"
    call = call_of(torch.compile(run, mode=mode, dynamic=False, fullgraph=True), block, x, is_trained)
    begun = time.perf_counter()
    call()
    wait(x.device.type)
    first = time.perf_counter() - begun
    for _ in range(3):  # CUDA graphs are recorded
        call()
    wait(x.device.type)
    return call, first


def span(call: Call, count: int, load: int, device: str) -> float:
    """Seconds per call of many in a row."""
    for _ in range(load):
        call()
    if device == "cpu":
        begun = time.perf_counter()
        for _ in range(count):
            call()
        return (time.perf_counter() - begun) / count
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(count):
        call()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / 1e3 / count


def in_turn(calls: dict[str, Call], device: str) -> list[dict[str, float]]:
    """Rounds of seconds by method."""
    estimates = {name: span(call, 5, 1, device) for name, call in calls.items()}
    order, rounds = random.Random(0), []
    for _ in range(ROUNDS):
        found = {}
        for name in order.sample(list(calls), len(calls)):
            counts = [max(1, round(seconds / estimates[name])) for seconds in (TIMED, LOAD)]
            found[name] = span(calls[name], *counts, device)
        rounds.append(found)
    return rounds


def offered(before: dict[int, tuple[int, int]]) -> list[dict[str, Any]]:
    """What Inductor could choose gemmery for since `before`, with the times in seconds of all choices."""
    rows = []
    for x in gemmery.compile.choices():
        count, used = before.get(id(x), (0, 0))
        if x.count > count:
            rows.append({
                "op": x.op, "shape": x.shape, "strides": x.strides, "times": x.times, "count": x.count - count,
                "used": x.used - used,
            })  # fmt: skip
    return rows


def case(name: str, device: str) -> dict[str, Any]:
    """One line of the result."""
    kind, sequences, length, is_trained = CASES[name]
    torch.manual_seed(0)
    sizes = SMALL[kind.__name__] if device == "cpu" else {}
    with torch.device(device):
        block = kind(**sizes).to(BF16)
        width = block.o.in_features
        x = torch.randn(sequences, length if device == "cuda" else min(length, 8), width).to(BF16)
    block.requires_grad_(is_trained)
    x.requires_grad_(is_trained)
    torch._dynamo.reset()
    calls, first = {}, {}
    calls[PEER], first[PEER] = compiled(PEER, block, x, is_trained)
    wanted = calls[PEER]().clone()
    before = {id(x): (x.count, x.used) for x in gemmery.compile.choices()}
    with gemmery.compile.enable(), Added() as added:
        calls[OURS], first[OURS] = compiled(OURS, block, x, is_trained)
    found = calls[OURS]().clone()
    exact = kind(**sizes).to(device)
    exact.load_state_dict(block.state_dict())
    with torch.no_grad():
        right = exact(x.float())
        errors = {
            method: float((y.float() - right).norm() / right.norm())
            for method, y in ((PEER, wanted), (OURS, found))
        }
    del exact, right, found, wanted
    return {
        "name": name, "rows": sequences * length, "trained": is_trained, "first_call": first, "added": added.seconds,
        "products": offered(before), "errors": errors, "rounds": in_turn(calls, device),
    }  # fmt: skip


def show(entry: dict[str, Any]) -> None:
    ratios = [x[PEER] / x[OURS] for x in entry["rounds"]]
    times = {method: statistics.median(x[method] for x in entry["rounds"]) for method in (PEER, OURS)}
    print(
        f"{entry['name']}: {statistics.median(ratios):.3f} ({min(ratios):.3f}-{max(ratios):.3f}); "
        + ", ".join(f"{method} {seconds * 1e6:.1f} us" for method, seconds in times.items())
        + f"; first calls {entry['first_call']}; errors {entry['errors']}",
        flush=True,
    )
    print(f"  added {entry['added']}", flush=True)
    for row in entry["products"]:
        best = sorted(row["times"], key=row["times"].__getitem__)
        shown = [x for x in best if x in best[:2] or x.startswith("gemmery") or not x.startswith("triton")]
        times = ", ".join(f"{x} {row['times'][x] * 1e6:.1f}" for x in shown)
        print(f"  {row['op']} {row['shape']}: {times}; used {row['used']} of {row['count']}", flush=True)


def main() -> None:
    """Measure, and write behind each case."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--case", choices=CASES, action="append", metavar="NAME", help="; ".join(CASES))
    parser.add_argument("--out", type=Path, default=OUT, metavar="DIR")
    parser.add_argument("--seconds", type=float, default=float("inf"))
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    header = describe_run(0, ROUNDS, (), device, (PEER,))
    result = {
        key: header[key] for key in ("gpu", "torch", "triton", "cuda", "commit", "date", "ours", "peers")
    }
    result["protocol"] = {"rounds": ROUNDS, "load_s": LOAD, "timed_s": TIMED}
    result["entries"] = []
    options.out.mkdir(parents=True, exist_ok=True)
    begun = time.perf_counter()
    with fresh_cache():
        for name in options.case or CASES:
            if time.perf_counter() - begun > options.seconds:
                print(f"{name}: left out, no time", flush=True)
                continue
            result["entries"].append(case(name, device))
            show(result["entries"][-1])
            text = json.dumps(result, indent=1, ensure_ascii=False)
            (options.out / "compiled.json").write_text(text + "\n", encoding="utf-8")
            print(f"{time.perf_counter() - begun:.0f} s so far", flush=True)


if __name__ == "__main__":
    main()
