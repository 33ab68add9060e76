"""Measure what max-autotune makes of a transformer block with gemmery among its choices, and without.

python benchmarks/compiled.py --out DIR [--case NAME] [--seconds N]    writes DIR/compiled.json behind each case

A case is a block, a number of rows, and whether it is trained. Each method has a process of its own, with empty caches
of Inductor and of Triton, so that both compile everything. A process first compiles a small product, by which it has
loaded what any compilation needs. Then the processes compile the block, one behind the other. Both compile templates in
threads, as Inductor does until its own processes have started: whether these have is a matter of chance, and with torch
2.11 it decided over 8 seconds a product.

A time of a block is that of many calls in a row, after a load of the same; the processes take turns in a new order each
round, and the others wait. Inference is `mode="max-autotune"`, with CUDA graphs; training is
"max-autotune-no-cudagraphs", forward and backward. No case is begun after N seconds.

With `TRITON_INTERPRET=1` and without a GPU, small blocks of the same kinds go through the same steps.
"""

import argparse
import contextlib
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._inductor import config
from torch._inductor.async_compile import AsyncCompile
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


class FeedForward(nn.Module):
    """The second half of a block of GPT."""

    def __init__(self, width: int = 4096) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, width) to the same."""
        return x + self.down(F.gelu(self.up(self.norm(x)), approximate="tanh"))


#: By name: a block, sequences, their length, and whether it is trained. The first are the most important.
CASES: dict[str, tuple[type[nn.Module], int, int, bool]] = {
    "GPT, 4096 rows": (Gpt, 2, 2048, False),
    "feed-forward of GPT, 4096 rows, trained": (FeedForward, 2, 2048, True),
    "Llama, 16 rows": (Llama, 16, 1, False),
    "Llama, 2048 rows": (Llama, 1, 2048, False),
    "Llama, 256 rows": (Llama, 1, 256, False),
    "GPT, 512 rows": (Gpt, 1, 512, False),
    "Llama, 4096 rows, trained": (Llama, 2, 2048, True),
    "GPT, 4096 rows, trained": (Gpt, 2, 2048, True),
    "Llama, 8192 rows": (Llama, 4, 2048, False),
    "Llama, 64 rows": (Llama, 64, 1, False),
}
#: Sizes at which a CPU has a result soon.
SMALL: dict[str, dict[str, int]] = {
    "Llama": {"width": 64, "hidden": 96, "heads": 2, "groups": 1}, "Gpt": {"width": 64, "heads": 2},
    "FeedForward": {"width": 64},
}  # fmt: skip


# ---------------------------------------------------------------------------------------------------------------------
# A process that has one method


def wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


class Added:
    """The seconds that gemmery's choices take, by product: to compile, beside Inductor's templates, and to measure."""

    def __init__(self) -> None:
        self.seconds: dict[str, dict[str, float]] = {}

    def __enter__(self) -> "Added":
        parts = {"precompile": "precompile", "benchmark": "benchmark", "settle": "benchmark"}
        self.originals = [(name, getattr(choice._Caller, name)) for name in parts]
        for name, original in self.originals:
            setattr(choice._Caller, name, self.timed(parts[name], original))
        return self

    def timed(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        """A method of a choice that adds to some seconds."""

        def run(caller: Any, *args: Any, **kwargs: Any) -> Any:
            begun = time.perf_counter()
            try:
                return original(caller, *args, **kwargs)
            finally:
                product = f"{caller.record.op} {'x'.join(map(str, caller.record.shape))}"
                found = self.seconds.setdefault(product, dict.fromkeys(("precompile", "benchmark"), 0.0))
                found[name] += time.perf_counter() - begun

        return run

    def __exit__(self, *_: object) -> None:
        for name, original in self.originals:
            setattr(choice._Caller, name, original)


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


def small_product(device: str) -> None:
    """Compile and run one, with the kernel behind it, and forget it."""
    a, b = (torch.randn(64, 64, device=device, dtype=BF16) for _ in range(2))
    with config.patch(max_autotune_gemm_backends="ATEN"):
        torch.compile(lambda a, b: (a @ b).relu() * 2, mode="max-autotune-no-cudagraphs", dynamic=False)(a, b)
    torch._dynamo.reset()


def block_of(name: str, device: str) -> tuple[nn.Module, Tensor]:
    """A case's block and its input, the same in each process."""
    kind, sequences, length, is_trained = CASES[name]
    torch.manual_seed(0)
    with torch.device(device):
        block = kind(**(SMALL[kind.__name__] if device == "cpu" else {})).to(BF16)
        width = next(m.in_features for m in block.modules() if isinstance(m, nn.Linear))
        x = torch.randn(sequences, length if device == "cuda" else min(length, 8), width).to(BF16)
    block.requires_grad_(is_trained)
    return block, x.requires_grad_(is_trained)


def first_call(block: nn.Module, x: Tensor) -> tuple[Call, float]:
    """A block under torch.compile as a call, and the seconds of its first call."""
    is_trained = x.requires_grad
    mode = "max-autotune-no-cudagraphs" if is_trained or x.device.type == "cpu" else "max-autotune"
    run = torch.compile(type(block).forward, mode=mode, dynamic=False, fullgraph=True)
    call = call_of(run, block, x, is_trained)
    begun = time.perf_counter()
    call()
    wait(x.device.type)
    seconds = time.perf_counter() - begun
    for _ in range(3):  # CUDA graphs are recorded
        call()
    wait(x.device.type)
    return call, seconds


def error_of(block: nn.Module, x: Tensor, found: Tensor) -> float:
    """The relative error of a result, beside the block in float32."""
    exact = type(block)(**(SMALL[type(block).__name__] if x.device.type == "cpu" else {})).to(x.device)
    exact.load_state_dict(block.state_dict())
    with torch.no_grad():
        right = exact(x.float())
    return float((found.float() - right).norm() / right.norm())


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


def serve(method: str, name: str, device: str) -> Iterator[Any]:
    """The answers of a process: first that it is ready, then the results of compiling, then a time for each request."""
    AsyncCompile.use_process_pool = classmethod(lambda cls: False)
    with gemmery.compile.enable() if method == OURS else contextlib.nullcontext():
        small_product(device)
        block, x = block_of(name, device)
        yield "ready"
        before = {id(x): (x.count, x.used) for x in gemmery.compile.choices()}
        with Added() as added:
            call, first = first_call(block, x)
        found = call().clone()
    error = error_of(block, x, found)
    yield {"first_call": first, "added": added.seconds, "products": offered(before), "error": error}
    estimate = span(call, 5, 1, device)
    counts = [max(1, round(seconds / estimate)) for seconds in (TIMED, LOAD)]
    while True:
        yield span(call, *counts, device)


def work(method: str, name: str, device: str) -> None:
    """Answer each line of the input with a line. All other output goes to stderr."""
    with os.fdopen(os.dup(1), "w") as answers:
        os.dup2(2, 1)
        for answer in serve(method, name, device):
            print(json.dumps(answer), file=answers, flush=True)
            if not sys.stdin.readline():
                return


# ---------------------------------------------------------------------------------------------------------------------
# The process that asks them


class Worker:
    """A process of one method, with caches of its own."""

    def __init__(self, method: str, name: str, folder: Path) -> None:
        caches = {f"{kind}_CACHE_DIR": str(folder / kind) for kind in ("TORCHINDUCTOR", "TRITON")}
        self.process = subprocess.Popen(
            [sys.executable, __file__, "--worker", method, "--case", name],
            env=os.environ | caches, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip

    def answer(self) -> Any:
        """Its next answer."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"a process ended with status {self.process.wait()}")
        return json.loads(line)

    def ask(self) -> Any:
        """Have it take the next step, and wait for the answer."""
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        return self.answer()

    def end(self) -> None:
        """End the process, which leaves at the end of its input."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(10)
        self.process.kill()


def case(name: str) -> dict[str, Any]:
    """One line of the result."""
    _, sequences, length, is_trained = CASES[name]
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder, contextlib.ExitStack() as ending:
        workers = {}
        for method in (PEER, OURS):
            workers[method] = Worker(method, name, Path(folder) / method)
            ending.callback(workers[method].end)
        for worker in workers.values():
            worker.answer()
        made = {method: worker.ask() for method, worker in workers.items()}
        order, rounds = random.Random(0), []
        for _ in range(ROUNDS):
            rounds.append({method: workers[method].ask() for method in order.sample(list(workers), 2)})
    return {
        "name": name, "rows": sequences * length, "trained": is_trained,
        **{key: {method: each[key] for method, each in made.items()} for key in ("first_call", "error")},
        "added": made[OURS]["added"], "products": made[OURS]["products"], "rounds": rounds,
    }  # fmt: skip


def show(entry: dict[str, Any]) -> None:
    ratios = [x[PEER] / x[OURS] for x in entry["rounds"]]
    times = {method: statistics.median(x[method] for x in entry["rounds"]) for method in (PEER, OURS)}
    print(
        f"{entry['name']}: {statistics.median(ratios):.3f} ({min(ratios):.3f}-{max(ratios):.3f}); "
        + ", ".join(f"{method} {seconds * 1e6:.1f} us" for method, seconds in times.items())
        + f"; first calls {entry['first_call']}; errors {entry['error']}",
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
    parser.add_argument("--worker", choices=(PEER, OURS), help=argparse.SUPPRESS)
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if options.worker:
        work(options.worker, options.case[0], device)
        return
    header = describe_run(0, ROUNDS, (), device, (PEER,))
    result = {
        key: header[key] for key in ("gpu", "torch", "triton", "cuda", "commit", "date", "ours", "peers")
    }
    result["protocol"] = {"rounds": ROUNDS, "load_s": LOAD, "timed_s": TIMED}
    result["entries"] = []
    options.out.mkdir(parents=True, exist_ok=True)
    begun = time.perf_counter()
    for name in options.case or CASES:
        if time.perf_counter() - begun > options.seconds:
            print(f"{name}: left out, no time", flush=True)
            continue
        result["entries"].append(case(name))
        show(result["entries"][-1])
        text = json.dumps(result, indent=1, ensure_ascii=False)
        (options.out / "compiled.json").write_text(text + "\n", encoding="utf-8")
        print(f"{time.perf_counter() - begun:.0f} s so far", flush=True)


if __name__ == "__main__":
    main()
