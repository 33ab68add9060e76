"""Measure `gemmery.linear_cross_entropy` on the GPU at hand, forward and backward, beside torch's and Liger's.

python benchmarks/linear_cross_entropy.py check --out DIR           against float64, with all options
python benchmarks/linear_cross_entropy.py time --out DIR --size bar  times and peak memory, several block sizes
python benchmarks/linear_cross_entropy.py parts --out DIR           what each product of it takes, at the bar's size

A time is that of many calls in a row ("steady"): each method loads the GPU with itself for 0.25 s and is timed over
0.35 s; methods take turns in a new order each round. Memory is the peak of one call beside its inputs. Methods that are
not installed are left out, with the reason. Each step is written behind it to DIR/STEP.json.
"""

import argparse
import datetime
import gc
import json
import random
import statistics
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT)]

import gemmery  # noqa: E402
from gemmery import epilogues  # noqa: E402
from gemmery import logits as library  # noqa: E402
from gemmery.lab.results import commit  # noqa: E402

#: Tokens, classes, features.
SIZES = {
    "bar": (8192, 131072, 4096), "llama3": (8192, 128256, 4096), "llama2": (4096, 32000, 4096),
    "qwen": (16384, 151936, 2048),
}  # fmt: skip
OURS, LIGER = "gemmery", "Liger"
#: Configs of a product that is added to float32, beside the one that is chosen.
ADDING = (
    "128x256x64-g16-w8-s3-persistent-descriptor/2", "128x256x64-g16-w8-s3-persistent-descriptor/2-t2",
    "128x256x64-g16-w8-s3-persistent-descriptor/2-t4", "128x256x64-g8-w8-s4-tile-descriptor/2",
    "128x256x64-g16-w8-s3-tile-descriptor/2", "128x128x64-g8-w8-s6-tile-descriptor",
    "64x256x64-g8-w4-s5-tile-descriptor",
)  # fmt: skip
#: Seconds of load and of timing.
LOAD, TIMED = 0.25, 0.35
#: Part of the targets that are ignored.
IGNORED = 0.05

Method = Callable[[Tensor, Tensor, Tensor], Tensor]


class Report:
    """The results, written after each step."""

    def __init__(self, folder: Path, step: str, rounds: int = 0) -> None:
        self.path = folder / f"{step}.json"
        properties = torch.cuda.get_device_properties(0)
        self.data: dict[str, Any] = {
            "step": step, "gpu": properties.name, "torch": torch.__version__, "triton": triton.__version__,
            "cuda": torch.version.cuda, "commit": commit(), "date": datetime.datetime.now(datetime.UTC).isoformat(),
            "protocol": {"rounds": rounds}, "seconds": 0.0, "failed": {},
        }  # fmt: skip
        self.begun = time.perf_counter()

    def save(self) -> None:
        self.data["seconds"] = round(time.perf_counter() - self.begun, 1)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(json.dumps(self.data, indent=1))

    def attempt(self, name: str, run: Callable[[], Any]) -> Any:
        """What `run` returns; None where it fails, which is noted and printed."""
        try:
            return run()
        except Exception as error:
            last = traceback.extract_tb(error.__traceback__)[-1]
            text = f"{type(error).__name__}: {str(error)[:300]} ({Path(last.filename).name}:{last.lineno})"
            self.data["failed"][name] = text
            print(f"FAILED {name}: {text}", flush=True)
            self.save()
            return None


def inputs_of(
    N: int, V: int, K: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0
) -> tuple[Tensor, ...]:
    """Tokens, a weight with which logits have a variance of 1, and targets of which some are ignored."""
    torch.manual_seed(seed)
    x = torch.randn(N, K, device="cuda", dtype=dtype).requires_grad_()
    weight = (torch.randn(V, K, device="cuda", dtype=dtype) * K**-0.5).requires_grad_()
    target = torch.randint(V, (N,), device="cuda")
    target[torch.rand(N, device="cuda") < IGNORED] = -100
    return x, weight, target


# ---------------------------------------------------------------------------------------------------------------------
# Methods


def ours(chunk: int | None = None) -> Method:
    """The library's, with a block of so many columns."""
    return lambda x, weight, target: gemmery.linear_cross_entropy(x, weight, target, chunk_size=chunk)


def eager(x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    """torch's two steps."""
    return F.cross_entropy(F.linear(x, weight), target)


def liger(wide: bool = False) -> Method:
    """Liger's, with gradients of the weight summed up in 16 or in 32 bits."""
    from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction as Function

    names = (
        "bias", "ce_weight", "ignore_index", "lse_square_scale", "label_smoothing", "reduction", "softcap",
        "return_z_loss", "accum_dtype",
    )  # fmt: skip
    values = (None, None, -100, 0.0, 0.0, "mean", None, False, torch.float32 if wide else None)
    assert len(names) == len(values)

    def run(x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
        made = Function.apply(x, weight, target, *values)
        return made[0] if isinstance(made, tuple) else made

    return run


@triton.jit
def _to_gradient(logits, lse, target, scale, V, stride, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    at = logits + row * stride + col
    factor = tl.load(scale + row)
    z = tl.load(at, mask=col < V, other=0.0).to(tl.float32)
    grad = tl.exp(z - tl.load(lse + row)) - tl.where(col == tl.load(target + row), 1.0, 0.0)
    tl.store(at, (grad * factor).to(logits.dtype.element_ty), mask=col < V)


class Walk(torch.autograd.Function):
    """The other way, a sketch: over tokens, with gradients in the forward pass, and that of the weight summed up."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, target: Tensor, rows: int, wide: bool) -> Tensor:
        (N, K), V = x.shape, weight.shape[0]
        counts = target != -100
        scale = counts.float() / counts.sum()
        of_x = torch.empty_like(x)
        of_weight = torch.empty(V, K, device=x.device, dtype=torch.float32 if wide else x.dtype)
        own = target.to(torch.int32)
        losses = []
        for i in range(0, N, rows):
            part = slice(i, i + rows)
            made, lse = gemmery.linear(x[part], weight, epilogue=epilogues.logsumexp)
            at_target = made.gather(1, target[part].clamp(min=0)[:, None]).squeeze(1)
            losses.append(((lse - at_target) * scale[part]).sum())
            grid = (made.shape[0], triton.cdiv(V, 4096))
            _to_gradient[grid](made, lse, own[part], scale[part], V, made.stride(0), BLOCK=4096, num_warps=8)
            gemmery.matmul(made, weight, out=of_x[part])
            if i:
                gemmery.addmm(of_weight, made.mT, x[part], out=of_weight, out_dtype=of_weight.dtype)
            else:
                gemmery.matmul(made.mT, x[part], out=of_weight, out_dtype=of_weight.dtype)
            del made
        ctx.save_for_backward(of_x, of_weight.to(weight.dtype))
        return torch.stack(losses).sum()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        of_x, of_weight = ctx.saved_tensors
        return of_x, of_weight, None, None, None


def walk(rows: int, wide: bool) -> Method:
    """See `Walk`."""
    return lambda x, weight, target: Walk.apply(x, weight, target, rows, wide)


def torch_chunked() -> Method:
    """torch's own way by parts, where torch has it."""
    options = torch.nn.LinearCrossEntropyOptions()
    return lambda x, weight, target: F.linear_cross_entropy(x, weight, target, options=options)


def torch_compiled() -> Method:
    """torch.compile of the two steps."""
    return torch.compile(eager)


def methods_of(size: str, report: Report, few: bool) -> dict[str, Method]:
    """The functions to time, the most important first."""
    makers: dict[str, Callable[[], Method]] = {OURS: ours, LIGER: liger}
    makers["torch, eager"] = lambda: eager
    makers["torch.compile"] = torch_compiled
    if size == "bar":
        makers |= {f"{OURS}, {n} columns": lambda n=n: ours(n) for n in (8192, 16384)}
    if size == "bar" and not few:
        makers |= {f"sketch, {n} rows, 16 bits": lambda n=n: walk(n, False) for n in (1024, 2048)}
        makers |= {"sketch, 2048 rows, 32 bits": lambda: walk(2048, True)}
        makers[f"{LIGER}, 32 bits"] = lambda: liger(True)
    if hasattr(F, "linear_cross_entropy"):
        makers["torch, linear_cross_entropy"] = torch_chunked
    found = {name: report.attempt(name, make) for name, make in makers.items()}
    return {name: method for name, method in found.items() if method is not None}


# ---------------------------------------------------------------------------------------------------------------------
# Right or wrong


def error(found: Tensor, wanted: Tensor) -> float:
    """‖found − wanted‖ / ‖wanted‖."""
    return float((found.detach().double() - wanted.double()).norm() / wanted.double().norm())


def reference(
    x: Tensor, weight: Tensor, target: Tensor, *, linear_bias: Tensor | None = None, weight_of: Tensor | None = None,
    reduction: str = "mean", label_smoothing: float = 0.0, softcap: float | None = None, z_loss: float = 0.0,
) -> Tensor:  # fmt: skip
    """The same in torch, in the type that it is given."""
    z = F.linear(x, weight, linear_bias)
    z = z if softcap is None else softcap * torch.tanh(z / softcap)
    loss = F.cross_entropy(z, target, weight_of, reduction=reduction, label_smoothing=label_smoothing)
    counts = target != -100
    squares = torch.where(counts, z_loss * z.logsumexp(-1).square(), 0.0)
    if reduction == "none":
        return loss + squares
    return loss + (squares.sum() / counts.sum() if reduction == "mean" else squares.sum())


CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "bf16": ("bfloat16", {}),
    "bf16, bias, smoothing, softcap, z-loss, sum": (
        "bfloat16", {"reduction": "sum", "label_smoothing": 0.1, "softcap": 5.0, "z_loss": 1e-3, "bias": True},
    ),
    "bf16, class weights, smoothing, none": (
        "bfloat16", {"reduction": "none", "label_smoothing": 0.1, "weights": True},
    ),
    "fp16": ("float16", {}),
    "fp32": ("float32", {}),
}  # fmt: skip


def check_case(name: str, size: tuple[int, int, int], report: Report) -> None:
    """Errors of loss and gradients against float64, and those of torch in the operands' type."""
    kind, options = CASES[name]
    options = dict(options)
    x, weight, target = inputs_of(*size, dtype=getattr(torch, kind))
    bias = (
        torch.randn(size[1], device="cuda", dtype=x.dtype).requires_grad_()
        if options.pop("bias", 0)
        else None
    )
    factors = torch.rand(size[1], device="cuda") + 0.5 if options.pop("weights", 0) else None
    leaves = [t for t in (x, weight, bias) if t is not None]
    loss = gemmery.linear_cross_entropy(x, weight, target, linear_bias=bias, weight=factors, **options)
    up = torch.randn_like(loss)
    grads = torch.autograd.grad((loss * up).sum(), leaves)

    def by_torch(kind: torch.dtype) -> list[Tensor]:
        own = [t.detach().to(kind).requires_grad_() for t in leaves]
        made = reference(
            own[0], own[1], target, linear_bias=own[2] if bias is not None else None,
            weight_of=None if factors is None else factors.to(kind), **options,
        )  # fmt: skip
        return [made, *torch.autograd.grad((made * up.to(made.dtype)).sum(), own)]

    wanted = by_torch(torch.float64)
    names = ["loss", "x", "weight", "bias"][: len(wanted)]
    found = {n: error(a, b) for n, a, b in zip(names, [loss, *grads], wanted, strict=True)}
    torchs = {n: error(a, b) for n, a, b in zip(names, by_torch(x.dtype), wanted, strict=True)}
    limit = 2e-5 if x.dtype == torch.float32 else 1e-2
    is_right = all(value < limit for value in found.values())
    report.data.setdefault("cases", {})[name] = {"right": is_right, "ours": found, "torch": torchs}
    print(f"{'ok   ' if is_right else 'WRONG'} {name}: {found}; torch {torchs}", flush=True)


def check_behaviour(report: Report) -> None:
    """The same bits each run, no synchronisation with the host, a CUDA graph, and a forward pass alone."""
    x, weight, target = inputs_of(2048, 16384, 1024)

    def call() -> list[Tensor]:
        # New leaves: torch keeps the stream on which it first met a leaf, and that may not be the one of a capture.
        leaves = [t.detach().requires_grad_() for t in (x, weight)]
        loss = gemmery.linear_cross_entropy(*leaves, target, chunk_size=4096)
        return [loss.detach(), *torch.autograd.grad(loss, leaves)]

    found: dict[str, Any] = report.data.setdefault("behaviour", {})
    first = call()
    found["same bits"] = all(torch.equal(a, b) for _ in range(5) for a, b in zip(first, call(), strict=True))

    def synchronises() -> None:
        torch.cuda.set_sync_debug_mode("error")
        try:
            call()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        found["no synchronisation"] = True

    def graphed() -> None:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            made = call()
        graph.replay()
        found["graph"] = all(torch.equal(a, b) for a, b in zip(first, made, strict=True))

    def alone() -> None:
        with torch.no_grad():
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            loss = gemmery.linear_cross_entropy(x, weight, target)
            found["bytes of a forward pass"] = torch.cuda.max_memory_allocated() - before
        found["forward alone"] = torch.equal(loss, first[0])

    for step in (synchronises, graphed, alone):
        report.attempt(step.__name__, step)
    print(found, flush=True)


@dataclass
class Exact:
    """At a size where float64 would take too long for all: the loss, and gradients of some tokens and some classes."""

    loss: Tensor
    rows: Tensor
    of_x: Tensor
    columns: Tensor
    of_weight: Tensor

    @classmethod
    @torch.no_grad()
    def of(cls, x: Tensor, weight: Tensor, target: Tensor) -> "Exact":
        """In float64, with logarithms of sums in float32."""
        counts, wide = target != -100, weight.float()
        lse = torch.cat([(part.float() @ wide.T).logsumexp(-1) for part in x.split(512)]).double()
        del wide
        own = (x.double() * weight[target.clamp(min=0)].double()).sum(-1)
        scale = counts.double() / counts.sum()
        rows = torch.arange(0, x.shape[0], max(x.shape[0] // 61, 1), device="cuda")
        p = torch.exp(x[rows].double() @ weight.double().T - lse[rows, None])
        p[torch.arange(len(rows), device="cuda"), target[rows].clamp(min=0)] -= 1.0
        of_x = (p * scale[rows, None]) @ weight.double()
        # The first and the last class, one between, and some that are targets.
        V = weight.shape[0]
        columns = torch.cat([torch.tensor([0, V // 2, V - 1], device="cuda"), target[counts][:61]]).unique()
        p = torch.exp(x.double() @ weight[columns].double().T - lse[:, None])
        p = (p - (target[:, None] == columns).double()) * scale[:, None]
        return cls(((lse - own) * scale).sum(), rows, of_x, columns, p.T @ x.double())

    def errors(self, loss: Tensor, of_x: Tensor, of_weight: Tensor) -> dict[str, float]:
        """Those of what a method has found."""
        return {
            "loss": error(loss, self.loss), "x": error(of_x[self.rows], self.of_x),
            "weight": error(of_weight[self.columns], self.of_weight),
        }  # fmt: skip


# ---------------------------------------------------------------------------------------------------------------------
# Time and memory


def span(call: Callable[[], Any], count: int, load: int = 0) -> float:
    """Seconds per call of `count` calls in a row."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for _ in range(load):
        call()
    start.record()
    for _ in range(count):
        call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3 / count


def steady(call: Callable[[], Any], seconds: float, scale: float = 1.0) -> float:
    """Seconds per call in a steady stream of them."""
    return span(call, max(2, round(scale * TIMED / seconds)), max(1, round(scale * LOAD / seconds)))


def time_size(size: str, rounds: int, report: Report, budget: float, few: bool) -> None:
    """Times and memory of all methods, as long as there is time."""
    x, weight, target = inputs_of(*SIZES[size])
    rows: dict[str, dict[str, Any]] = report.data.setdefault("methods", {})
    report.data["size"] = SIZES[size]
    calls: dict[str, Callable[[], Any]] = {}
    exact = Exact.of(x, weight, target)
    for name, method in methods_of(size, report, few).items():
        if time.perf_counter() - report.begun > 0.6 * budget:
            report.data["failed"][name] = "left out: no time"
            continue

        def call(method: Method = method) -> tuple[Tensor, ...]:
            loss = method(x, weight, target)
            return (loss.detach(), *torch.autograd.grad(loss, [x, weight]))

        def look(call: Callable[[], Any] = call, name: str = name) -> dict[str, Any]:
            begun = time.perf_counter()
            loss, *grads = call()
            torch.cuda.synchronize()
            first = time.perf_counter() - begun
            errors = exact.errors(loss, *grads)
            del loss, grads
            gc.collect()
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            call()
            torch.cuda.synchronize()
            peak = torch.cuda.max_memory_allocated()
            estimate = span(call, 2)
            print(f"{name}: {estimate * 1e3:.2f} ms, {(peak - before) / 2**20:.0f} MiB, {errors}", flush=True)
            return {
                "first": first, "errors": errors, "peak": peak - before, "inputs": before, "estimate": estimate,
                "rounds": [],
            }  # fmt: skip

        found = report.attempt(name, look)
        gc.collect()
        torch.cuda.empty_cache()
        if found is not None:
            rows[name], calls[name] = found, call
            report.save()
    order = random.Random(0)
    for _ in range(rounds):
        if time.perf_counter() - report.begun > budget:
            break
        for name in order.sample(list(calls), len(calls)):
            rows[name]["rounds"].append(steady(calls[name], rows[name]["estimate"]))
            torch.cuda.empty_cache()
        report.save()
    forward = report.attempt("forward alone", lambda: time_forward(x, weight, target))
    report.data["forward alone"] = forward
    summarise(rows, report)
    report.save()


def time_forward(x: Tensor, weight: Tensor, target: Tensor) -> dict[str, float]:
    """Seconds of a forward pass without gradients."""
    with torch.no_grad():
        calls = {OURS: lambda: ours()(x, weight, target), "torch, eager": lambda: eager(x, weight, target)}
        return {name: steady(call, span(call, 2)) for name, call in calls.items()}


def summarise(rows: dict[str, dict[str, Any]], report: Report) -> None:
    """Median times, and how many times as fast as Liger in the same round."""
    least = min((row["peak"] for row in rows.values()), default=0) or 1
    for name, row in rows.items():
        if not row["rounds"]:
            continue
        row["median"] = statistics.median(row["rounds"])
        if LIGER in rows and rows[LIGER]["rounds"]:
            pairs = zip(rows[LIGER]["rounds"], row["rounds"], strict=False)
            row["liger / this"] = statistics.median(a / b for a, b in pairs)
        print(
            f"{name:32} {row['median'] * 1e3:8.2f} ms  Liger/this {row.get('liger / this', 0):.3f}  "
            f"{row['peak'] / 2**20:8.0f} MiB = {row['peak'] / least:.2f} x the least",
            flush=True,
        )
    print("forward alone:", report.data.get("forward alone"), flush=True)


def time_parts(report: Report, budget: float) -> None:
    """Times each product of a forward and a backward pass, and torch's product of the same shape."""
    N, V, K = SIZES["bar"]
    x, weight, target = (t.detach() for t in inputs_of(N, V, K))
    numbers, own = torch.arange(V, dtype=torch.int32, device="cuda"), target.to(torch.int32)[:, None]
    lse, one = torch.full((N, 1), 12.0, device="cuda"), torch.full((N, 1), 1.0 / N, device="cuda")
    rows: dict[str, Any] = report.data.setdefault("parts", {})

    def take(name: str, call: Callable[[], Any], flops: float) -> None:
        if time.perf_counter() - report.begun > budget:
            return

        def run() -> None:
            call()
            torch.cuda.synchronize()
            seconds = steady(call, span(call, 2), 0.5)
            rows[name] = {"seconds": seconds, "teraflops": flops / seconds / 1e12}
            print(f"{name:44} {seconds * 1e3:8.3f} ms {flops / seconds / 1e12:6.0f} TFLOP/s", flush=True)
            report.save()

        report.attempt(name, run)

    whole = 2.0 * N * V * K
    take("logits, cuBLAS", lambda: F.linear(x, weight), whole)
    take("logits", lambda: gemmery.linear(x, weight), whole)
    args = (numbers, own, None)
    take("statistics", lambda: gemmery.linear(x, weight, epilogue=library.STATISTICS, args=args), whole)
    only = gemmery.epilogue(lambda acc: acc.logsumexp(-1))
    take("logsumexp alone", lambda: gemmery.linear(x, weight, epilogue=only), whole)
    for n in (8192, 4096, 16384):
        n = min(n, V)
        w, wide = weight[:n], torch.zeros(N, K, device="cuda")
        grad, of_w = torch.empty(N, n, device="cuda", dtype=x.dtype), torch.empty_like(w)
        args = (numbers[:n], own, lse, one, -one, None, None, None)
        each = 2.0 * N * n * K

        def gradient(w: Tensor = w, args: Any = args, grad: Tensor = grad) -> None:
            gemmery.linear(x, w, epilogue=library.GRADIENT, args=args, out=grad)

        take(f"{n} columns: gradient of logits", gradient, each)
        torch.nn.init.normal_(grad)
        take(f"{n} columns: logits", lambda w=w: gemmery.linear(x, w), each)
        take(f"{n} columns: logits, cuBLAS", lambda w=w: F.linear(x, w), each)
        take(f"{n} columns: weight", lambda g=grad, o=of_w: gemmery.matmul(g.mT, x, out=o), each)
        take(f"{n} columns: weight, cuBLAS", lambda g=grad, o=of_w: torch.mm(g.T, x, out=o), each)
        take(
            f"{n} columns: x, added",
            lambda g=grad, w=w, o=wide: gemmery.addmm(o, g, w, out=o, out_dtype=torch.float32),
            each,
        )
        if n == 8192:
            for config in ADDING:
                take(
                    f"x, added, {config}",
                    lambda g=grad, w=w, o=wide, c=config: gemmery.addmm(
                        o, g, w, out=o, out_dtype=torch.float32, config=c
                    ),
                    each,
                )
        take(
            f"{n} columns: x, added, cuBLAS",
            lambda g=grad, w=w, o=wide: torch.addmm(o, g, w, out_dtype=torch.float32, out=o),
            each,
        )
        take(f"{n} columns: x, 16 bits", lambda g=grad, w=w: gemmery.matmul(g, w), each)
        # What a way between would take, that keeps logits of some columns.
        take(
            f"{n} columns: statistics, logits kept",
            lambda w=w: gemmery.linear(x, w, epilogue=epilogues.logsumexp),
            each,
        )
        plans = {
            "weight": lambda g=grad, o=of_w: gemmery.plan(g.mT, x, out=o),
            "x": lambda g=grad, w=w, o=wide: gemmery.plan(g, w, bias=o, out_dtype=torch.float32),
            "gradient": lambda w=w, args=args: gemmery.plan(x, w.T, epilogue=library.GRADIENT, args=args),
            "statistics": lambda: gemmery.plan(
                x, weight.T, epilogue=library.STATISTICS, args=(numbers, own, None)
            ),
        }
        configs = report.data.setdefault("configs", {}).setdefault(str(n), {})
        for name, plan in plans.items():
            configs[name] = str(report.attempt(f"plan of {name}", plan))
        report.save()
    print(json.dumps(report.data.get("configs"), indent=1), flush=True)


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("step", choices=["check", "time", "parts"])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--size", choices=list(SIZES), default="bar")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--few", action="store_true", help="no sketches, and no sums in 32 bits")
    parser.add_argument("--budget", type=float, default=60.0, help="seconds after which no new round begins")
    options = parser.parse_args()
    step = options.step if options.step != "time" else f"time-{options.size}"
    report = Report(options.out, step, options.rounds if options.step == "time" else 0)
    torch.backends.cuda.matmul.allow_tf32 = False
    if options.step == "check":
        report.attempt("behaviour", lambda: check_behaviour(report))
        for name in CASES:
            if time.perf_counter() - report.begun < options.budget:
                # No size is a multiple of a tile's, and classes take two blocks.
                report.attempt(name, lambda name=name: check_case(name, (1000, 70001, 512), report))
                report.save()
    elif options.step == "time":
        time_size(options.size, options.rounds, report, options.budget, options.few)
    else:
        time_parts(report, options.budget)
    report.save()
    print(f"{step}: {report.data['seconds']} s; failed: {list(report.data['failed'])}", flush=True)
    return 1 if report.data["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
