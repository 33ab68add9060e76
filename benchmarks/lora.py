"""Measure `gemmery.lora_linear` on the GPU at hand, forward and backward, beside bitsandbytes' path and torch.compile.

python benchmarks/lora.py check --out DIR   against float64, and what a call does besides
python benchmarks/lora.py time --out DIR    times and memory: 4096 tokens, 4096 x 4096, ranks 16 and 64
python benchmarks/lora.py parts --out DIR   what each product takes, and other ways to the same result

A weight of four bits is dequantized to bfloat16 and multiplied by cuBLAS, in the forward pass and again in the backward
pass, and the adapter's products are separate: that is what peft and bitsandbytes do, and torch.compile with them. It is
computed with gemmery's kernel that unpacks, which reads and writes each byte once; "bitsandbytes" is the package's own
function, where it is installed. "peft's" has adapters in float32, as peft makes them by default.

A time is that of many calls in a row ("steady"), from Python and in a CUDA graph: each method loads the GPU with itself
and is timed; methods take turns in a new order each round. Memory is the peak of one call beside its inputs, and what
is kept between its passes. Each step is written behind it to DIR/STEP.json.
"""

import argparse
import gc
import random
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT), str(ROOT / "benchmarks")]

from linear_cross_entropy import Report, error, span  # noqa: E402

import gemmery  # noqa: E402
from gemmery import lora  # noqa: E402
from gemmery.launch.unpacking import unpacked  # noqa: E402

BF16, F32, F64 = torch.bfloat16, torch.float32, torch.float64
#: Tokens, rows of the weight, columns.
SIZE = (4096, 4096, 4096)
#: By name: how a weight is stored.
WEIGHTS: dict[str, tuple[str, int] | None] = {
    "int4 g128": ("int4", 128),
    "nf4 g64": ("nf4", 64),
    "dense": None,
}
RANKS = (16, 64)
#: Further sizes, at rank 16 with nf4: those of a model's feed-forward.
OTHERS = ((4096, 14336, 4096), (4096, 4096, 14336))
OURS, PATH = "gemmery", "dequantize, torch"
SCALE = 2.0
#: Seconds of load and of timing, and calls in a CUDA graph.
LOAD, TIMED, CAPTURED = 0.05, 0.1, 4
#: bitsandbytes' own formats.
BNB = {"nf4 g64": "nf4"}

Call = Callable[[Tensor, Tensor, Tensor], Tensor]


def inputs_of(
    M: int, N: int, K: int, r: int, how: tuple[str, int] | None, adapter: torch.dtype = BF16
) -> Any:
    """x, the factors, the weight, and what it was before."""
    x = torch.randn(M, K, device="cuda", dtype=BF16).requires_grad_()
    a = (torch.randn(r, K, device="cuda") * K**-0.5).to(adapter).requires_grad_()
    b = torch.randn(N, r, device="cuda").to(adapter).requires_grad_()
    dense = (torch.randn(N, K, device="cuda") * K**-0.5).to(BF16)
    weight = dense if how is None else gemmery.quantize(dense, how[0], group_size=how[1])
    return x, a, b, weight, dense


# ---------------------------------------------------------------------------------------------------------------------
# Methods


@torch.library.custom_op("gemmery_benchmark::dense_of", mutates_args=())
def dense_of(parts: list[Tensor], sizes: list[int], text: str) -> Tensor:
    """The weight that an operand's parts stand for."""
    return unpacked(lora.rebuild(text, parts, sizes).weight)


@dense_of.register_fake
def _(parts: list[Tensor], sizes: list[int], text: str) -> Tensor:
    return parts[0].new_empty(sizes[1:], dtype=BF16)


class Dequantized(torch.autograd.Function):
    """`F.linear` with a packed weight, which is dequantized in both passes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, sizes: list[int], text: str, *parts: Tensor) -> Tensor:
        """The product."""
        ctx.sizes, ctx.text = sizes, text
        ctx.save_for_backward(*parts)
        return F.linear(x, dense_of(list(parts), sizes, text))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        """The gradient of x."""
        parts = list(ctx.saved_tensors)
        return grad @ dense_of(parts, ctx.sizes, ctx.text), None, None, *[None] * len(parts)


def base_of(weight: Tensor) -> Callable[[Tensor], Tensor]:
    """The layer without its adapter, in torch."""
    if not isinstance(weight, gemmery.QuantizedTensor):
        return lambda x: F.linear(x, weight)
    operand = lora.weight_operand(weight)
    parts, sizes, text = list(operand.tensors), operand.sizes, operand.text
    return lambda x: Dequantized.apply(x, sizes, text, *parts)


def with_adapter(base: Callable[[Tensor], Tensor]) -> Call:
    """A layer and its adapter as torch computes them, in x's type."""

    def run(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
        return base(x) + F.linear(F.linear(x, a.to(x.dtype)), b.to(x.dtype)) * SCALE

    return run


def as_peft(base: Callable[[Tensor], Tensor]) -> Call:
    """The same as peft's `Linear4bit` has it: with a copy, and the adapter in its own type."""

    def run(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
        made = base(x).clone()
        return made + (F.linear(F.linear(x.to(a.dtype), a), b) * SCALE).to(made.dtype)

    return run


def bitsandbytes_of(dense: Tensor, kind: str) -> Callable[[Tensor], Tensor]:
    """The layer by bitsandbytes, with scales that are quantized too, as in QLoRA."""
    import bitsandbytes as bnb

    stored, state = bnb.functional.quantize_4bit(
        dense, blocksize=64, quant_type=kind, compress_statistics=True
    )
    return lambda x: bnb.matmul_4bit(x, stored, state)


def methods_of(
    name: str, weight: Tensor, dense: Tensor, adapter: torch.dtype, report: Report, few: bool
) -> Any:
    """The functions to time."""
    makers: dict[str, Callable[[], Call]] = {
        OURS: lambda: lambda x, a, b: gemmery.lora_linear(x, weight, a, b, scale=SCALE),
        PATH: lambda: with_adapter(base_of(weight)),
    }
    if adapter == F32:
        makers["peft's, dequantize"] = lambda: as_peft(base_of(weight))
    if name in BNB:
        makers["bitsandbytes"] = lambda: with_adapter(bitsandbytes_of(dense, BNB[name]))
        if adapter == F32:
            makers["peft's, bitsandbytes"] = lambda: as_peft(bitsandbytes_of(dense, BNB[name]))
    if not few:
        makers["torch.compile"] = lambda: torch.compile(with_adapter(base_of(weight)))
        makers["gemmery, three calls"] = lambda: three_calls(weight)
    found = {method: report.attempt(f"{name}: {method}", make) for method, make in makers.items()}
    return {method: call for method, call in found.items() if call is not None}


def three_calls(weight: Tensor) -> Call:
    """The same products, each differentiated by itself."""

    def run(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
        u = gemmery.linear(x, a.to(x.dtype)) * SCALE
        return gemmery.linear(x, weight, gemmery.linear(u, b.to(x.dtype)))

    return run


# ---------------------------------------------------------------------------------------------------------------------
# Right or wrong


def reference(
    x: Tensor, weight: Tensor, a: Tensor, b: Tensor, bias: Tensor | None, lora_x: Tensor | None
) -> Tensor:
    """The same in torch, in the type of x."""
    y = x @ weight.T + SCALE * ((x if lora_x is None else lora_x) @ a.T) @ b.T
    return y if bias is None else y + bias


def check_case(
    name: str, r: int, adapter: torch.dtype, extra: bool, shape: tuple[int, int, int], report: Report
) -> None:
    """Errors of the result and of gradients against float64, and those of torch in bfloat16."""
    torch.manual_seed(0)
    M, N, K = shape
    x, a, b, weight, _ = inputs_of(M, N, K, r, WEIGHTS[name], adapter)
    bias = torch.randn(N, device="cuda", dtype=BF16).requires_grad_() if extra else None
    lora_x = F.dropout(x.detach(), 0.1).requires_grad_() if extra else None
    leaves = [t for t in (x, a, b, bias, lora_x) if t is not None]
    y = gemmery.lora_linear(x, weight, a, b, bias, scale=SCALE, lora_x=lora_x)
    up = torch.randn_like(y)
    found = [y, *torch.autograd.grad(y, leaves, up)]
    is_packed = isinstance(weight, gemmery.QuantizedTensor)

    def by_torch(kind: torch.dtype) -> list[Tensor]:
        own = [t.detach().to(kind).requires_grad_() for t in leaves]
        dense = weight.dequantize(kind) if is_packed else weight.to(kind)
        made = reference(own[0], dense, *own[1:3], own[3] if extra else None, own[4] if extra else None)
        return [made, *torch.autograd.grad(made, own, up.to(kind))]

    names = ["y", "x", "a", "b", "bias", "lora_x"][: len(found)]
    wanted = by_torch(F64)
    errors = {n: error(f, w) for n, f, w in zip(names, found, wanted, strict=True)}
    torchs = {n: error(f, w) for n, f, w in zip(names, by_torch(BF16), wanted, strict=True)}
    del wanted
    is_right = all(value < 1e-2 for value in errors.values())
    label = f"{name}, rank {r}, {adapter}, {'bias and dropout' if extra else 'plain'}, {shape}"
    report.data.setdefault("cases", {})[label] = {"right": is_right, "ours": errors, "torch": torchs}
    print(f"{'ok   ' if is_right else 'WRONG'} {label}: {errors}; torch {torchs}", flush=True)


def check_unpacking(report: Report) -> None:
    """The kernel that unpacks gives the bits of `dequantize`."""
    rows: dict[str, Any] = report.data.setdefault("unpacked", {})
    formats: dict[str, dict[str, Any]] = {
        "int4": {"group_size": 128}, "int8": {}, "nf4": {"group_size": 64}, "mxfp4": {}, "nvfp4": {}, "e4m3": {},
        "e5m2": {},
    }  # fmt: skip
    for format, options in formats.items():
        for dtype in (BF16, torch.float16):
            for shape in ((1000, 1100), (3, 48, 256)):
                weight = gemmery.quantize(torch.randn(shape, device="cuda"), format, dtype=dtype, **options)
                rows[f"{format} {dtype} {shape}"] = torch.equal(unpacked(weight), weight.dequantize())
    print("unpacked:", {name for name, same in rows.items() if not same} or "all the same bits", flush=True)


def check_behaviour(report: Report) -> None:
    """The same bits each run, no synchronisation with the host, a CUDA graph, the same under torch.compile."""
    x, a, b, weight, _ = inputs_of(2048, 1024, 2048, 16, ("int4", 128), F32)
    up = torch.randn(2048, 1024, device="cuda", dtype=BF16)

    def call(
        function: Call = lambda x, a, b: gemmery.lora_linear(x, weight, a, b, scale=SCALE),
    ) -> list[Tensor]:
        leaves = [t.detach().requires_grad_() for t in (x, a, b)]
        y = function(*leaves)
        return [y.detach(), *torch.autograd.grad(y, leaves, up)]

    found: dict[str, Any] = report.data.setdefault("behaviour", {})
    first = call()
    found["same bits"] = all(torch.equal(f, g) for _ in range(5) for f, g in zip(first, call(), strict=True))

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
        found["graph"] = all(torch.equal(f, g) for f, g in zip(first, made, strict=True))

    def is_compiled() -> None:
        made = call(
            torch.compile(lambda x, a, b: gemmery.lora_linear(x, weight, a, b, scale=SCALE), fullgraph=True)
        )
        found["compiled"] = all(torch.equal(f, g) for f, g in zip(first, made, strict=True))

    for step in (synchronises, graphed, is_compiled):
        report.attempt(step.__name__, step)
    print(found, flush=True)


def check(report: Report, budget: float) -> None:
    """All of it."""
    report.attempt("unpacking", lambda: check_unpacking(report))
    report.attempt("behaviour", lambda: check_behaviour(report))
    cases = [
        *[(name, r, BF16, False, SIZE) for name in WEIGHTS for r in RANKS],
        *[(name, 8, F32, True, (1000, 784, 1152)) for name in WEIGHTS],
        *[("nf4 g64", 16, F32, True, (M, 4096, 4096)) for M in (1, 7, 300)],
    ]
    for case in cases:
        if time.perf_counter() - report.begun < budget:
            report.attempt(f"{case}", lambda case=case: check_case(*case, report))
        report.save()


# ---------------------------------------------------------------------------------------------------------------------
# Time and memory


def steady(call: Callable[[], Any], seconds: float) -> float:
    """Seconds per call in a steady stream of them."""
    return span(call, max(2, round(TIMED / seconds)), max(1, round(LOAD / seconds)))


def measured(call: Callable[[], Any], forward: Callable[[], Any]) -> dict[str, Any]:
    """The first call, memory, and an estimate of the time."""
    begun = time.perf_counter()
    call()
    torch.cuda.synchronize()
    first = time.perf_counter() - begun
    call()
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    made = forward()
    kept = torch.cuda.memory_allocated() - before - made.numel() * made.element_size()
    del made
    torch.cuda.reset_peak_memory_stats()
    call()
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - before
    return {
        "first": first,
        "peak": peak,
        "kept": kept,
        "estimate": span(call, 5),
        "rounds": [],
        "graph": [],
        "forward": [],
    }


def captured(call: Callable[[], Any]) -> Callable[[], Any]:
    """A replay of a CUDA graph of `CAPTURED` calls."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(CAPTURED):
            call()
    return graph.replay


def time_case(
    name: str,
    r: int,
    adapter: torch.dtype,
    size: tuple[int, int, int],
    rounds: int,
    few: bool,
    report: Report,
) -> None:
    """Times and memory of all methods for one weight."""
    torch.manual_seed(0)
    x, a, b, weight, dense = inputs_of(*size, r, WEIGHTS[name], adapter)
    up = torch.randn(size[0], size[1], device="cuda", dtype=BF16)
    label = f"{name}, rank {r}, adapter {str(adapter)[6:]}, {'x'.join(map(str, size))}"
    rows: dict[str, Any] = report.data.setdefault("cases", {}).setdefault(label, {})
    calls: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {}
    graphs: dict[str, Callable[[], Any]] = {}
    for method, function in methods_of(name, weight, dense, adapter, report, few).items():

        def both(function: Call = function) -> Any:
            # New leaves: torch keeps the stream on which it first met a leaf, and that may not be the one of a capture.
            leaves = [t.detach().requires_grad_() for t in (x, a, b)]
            return torch.autograd.grad(function(*leaves), leaves, up)

        def forward(function: Call = function) -> Tensor:
            return function(x, a, b)

        found = report.attempt(f"{label}: {method}", lambda c=both, f=forward: measured(c, f))
        if found is not None:
            rows[method], calls[method] = found, (both, forward)
            graphs[method] = report.attempt(f"{label}: {method}, graph", lambda c=both: captured(c))
            if graphs[method] is None:
                del graphs[method]
    order = random.Random(0)
    for _ in range(rounds):
        for method in order.sample(list(calls), len(calls)):
            both, forward = calls[method]
            rows[method]["rounds"].append(steady(both, rows[method]["estimate"]))
            if method in graphs:
                rows[method]["graph"].append(
                    steady(graphs[method], rows[method]["estimate"] * CAPTURED) / CAPTURED
                )
            with torch.no_grad():
                rows[method]["forward"].append(steady(forward, rows[method]["estimate"] / 2) if few else 0.0)
    print(label, flush=True)
    for method, row in rows.items():
        if not row["rounds"]:
            continue
        row["median"] = statistics.median(row["rounds"])
        for kind, name in (("rounds", "this / ours"), ("graph", "this / ours, graph")):
            pairs = zip(row[kind], rows[OURS][kind], strict=False) if OURS in rows else []
            row[name] = statistics.median([t / o for t, o in pairs] or [0.0])
        print(
            f"  {method:24} {row['median'] * 1e6:8.1f} us  = {row['this / ours']:.3f} x ours; in a graph "
            f"{statistics.median(row['graph'] or [0.0]) * 1e6:8.1f} us = {row['this / ours, graph']:.3f} x; forward "
            f"{statistics.median(row['forward']) * 1e6:7.1f} us; peak {row['peak'] / 2**20:6.1f} MiB, kept "
            f"{row['kept'] / 2**20:6.1f}",
            flush=True,
        )
    report.save()


def time_all(report: Report, budget: float, rounds: int) -> None:
    """The cases, the most important first."""
    cases = [
        *[(name, r, BF16, SIZE, True) for name in WEIGHTS for r in RANKS],
        ("nf4 g64", 16, F32, SIZE, True),
        *[("nf4 g64", 16, BF16, size, True) for size in OTHERS],
        *[(name, 16, BF16, SIZE, False) for name in WEIGHTS],
    ]
    for name, r, adapter, size, few in cases:
        if time.perf_counter() - report.begun > budget:
            report.data["failed"][f"{name} {r} {size} {few}"] = "left out: no time"
            continue
        case = lambda: time_case(name, r, adapter, size, rounds, few, report)  # noqa: E731, B023
        report.attempt(f"{name} {r} {size} {few}", case)
        gc.collect()
        torch.cuda.empty_cache()


def time_parts(report: Report, budget: float) -> None:
    """Times each product in a CUDA graph, and other ways to the same result, in microseconds."""
    rows: dict[str, Any] = report.data.setdefault("parts", {})

    def take(name: str, call: Callable[[], Any]) -> None:
        if time.perf_counter() - report.begun > budget:
            return

        def run() -> None:
            call()
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                for _ in range(8):
                    call()
            rows[name] = steady(graph.replay, span(graph.replay, 3)) / 8 * 1e6
            print(f"{name:60} {rows[name]:8.1f} us", flush=True)

        report.attempt(name, run)

    with torch.no_grad():
        for r in RANKS:
            parts_of_rank(r, take)
        for name in WEIGHTS:
            parts_of_weight(name, take)
    report.save()


def parts_of_rank(r: int, take: Callable[[str, Callable[[], Any]], None]) -> None:
    """The thin products, in both orientations, beside torch's."""
    M, N, K = SIZE
    x, a, b, _, _ = inputs_of(M, N, K, r, None)
    g, u = torch.randn(M, N, device="cuda", dtype=BF16), torch.randn(M, r, device="cuda", dtype=BF16)
    ut = u.mT.contiguous()
    z, of_b = torch.empty(M, N, device="cuda", dtype=BF16), torch.empty(N, r, device="cuda", dtype=BF16)
    of_u, apart = (
        torch.empty(M, r, device="cuda", dtype=BF16).mT,
        torch.empty(r, M, device="cuda", dtype=BF16),
    )
    linear, matmul, addmm = gemmery.linear, gemmery.matmul, gemmery.addmm
    take(
        f"r={r} u.T = s a x.T, as the library does", lambda: addmm(of_u, a, x.mT, beta=0, alpha=2.0, out=of_u)
    )
    take(
        f"r={r} u.T = s a x.T, stored as (r, M)", lambda: addmm(apart, a, x.mT, beta=0, alpha=2.0, out=apart)
    )
    take(f"r={r} u.T = a x.T, without s", lambda: linear(a, x))
    take(f"r={r} u = x a.T", lambda: linear(x, a))
    take(f"r={r} u = x a.T, torch", lambda: F.linear(x, a))
    take(f"r={r} z = u b.T, u transposed", lambda: matmul(ut.mT, b.mT, out=z))
    take(f"r={r} z = u b.T", lambda: linear(u, b, out=z))
    take(f"r={r} z = u b.T, torch", lambda: F.linear(u, b))
    take(
        f"r={r} v.T = b.T g.T, as the library does",
        lambda: addmm(of_u, b.mT, g.mT, beta=0, alpha=2.0, out=of_u),
    )
    take(f"r={r} v = g b", lambda: matmul(g, b))
    take(f"r={r} v = g b, torch", lambda: g @ b)
    take(f"r={r} of b, transposed into (N, r), as the library does", lambda: matmul(u.mT, g, out=of_b.mT))
    take(f"r={r} of b, transposed into (N, r), of u as (r, M)", lambda: matmul(ut, g, out=of_b.mT))
    take(f"r={r} of b, (r, N)", lambda: matmul(ut, g))
    take(f"r={r} of b = g.T u", lambda: matmul(g.mT, u))
    take(f"r={r} of b = g.T u, torch", lambda: g.mT @ u)
    take(f"r={r} of a = v.T x, as the library does", lambda: matmul(u.mT, x))
    take(f"r={r} of a = v.T x, of v as (r, M)", lambda: matmul(ut, x))
    take(f"r={r} of a = v.T x, float32", lambda: matmul(ut, x, out_dtype=F32))
    take(f"r={r} of a = v.T x, torch", lambda: ut @ x)


def parts_of_weight(name: str, take: Callable[[str, Callable[[], Any]], None]) -> None:
    """The large products, and ways to add an adapter to one."""
    M, N, K = SIZE
    r = 16
    x, a, b, weight, dense = inputs_of(M, N, K, r, WEIGHTS[name])
    g, u = torch.randn(M, N, device="cuda", dtype=BF16), torch.randn(M, r, device="cuda", dtype=BF16)
    how = lora.How()
    z = torch.randn(M, N, device="cuda", dtype=BF16)
    is_packed = isinstance(weight, gemmery.QuantizedTensor)
    linear, matmul, addmm = gemmery.linear, gemmery.matmul, gemmery.addmm
    take(f"{name}: y = x w.T", lambda: linear(x, weight))
    fused = {"epilogue": lora.RESIDUAL, "args": (z,)}
    take(
        f"{name}: y = x w.T + u b.T, as the library does",
        lambda: lora._sum("linear", x, weight, u.mT, b.mT, None, None, how),
    )
    take(f"{name}: y = x w.T + z", lambda: linear(x, weight, **fused))
    if is_packed:
        take(f"{name}: w unpacked", lambda: unpacked(weight))
        take(f"{name}: w by dequantize()", weight.dequantize)
        take(f"{name}: y + z, w unpacked", lambda: linear(x, unpacked(weight), **fused))
        take(f"{name}: of x = g w + z", lambda: matmul(g, unpacked(weight), **fused))
        take(f"{name}: y, then u b.T added to it", lambda: (y := linear(x, weight), addmm(y, u, b.mT, out=y)))
        return
    take("dense: torch's y = x w.T", lambda: F.linear(x, dense))
    take("dense: torch's y = z + x w.T", lambda: torch.addmm(z, x, dense.mT))
    take("dense: y = x w.T + z, added to z itself", lambda: addmm(z, x, dense.mT, out=z))
    take(
        "dense: of x = g w + v a, as the library does",
        lambda: lora._sum("matmul", g, dense, u.mT, a, None, None, how),
    )
    take("dense: of x = g w + z", lambda: matmul(g, dense, **fused))
    take(
        "dense: y, then u b.T added to it in place", lambda: (y := linear(x, dense), addmm(y, u, b.mT, out=y))
    )
    both, wide = torch.cat([x, u], 1), torch.cat([dense, b], 1)
    take("dense: [x, u] [w, b].T, put together before", lambda: linear(both, wide))
    take("dense: [x, u] put together", lambda: torch.cat([x, u], 1))
    take("torch's z * s", lambda: z * SCALE)
    take("torch's z + z", lambda: z + g)


def main() -> int:
    """Run a step."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("step", choices=["check", "time", "parts"])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--budget", type=float, default=600.0, help="seconds")
    args = parser.parse_args()
    report = Report(args.out, f"lora-{args.step}", args.rounds if args.step == "time" else 0)
    if args.step == "check":
        check(report, args.budget)
    elif args.step == "time":
        time_all(report, args.budget, args.rounds)
    else:
        time_parts(report, args.budget)
    report.save()
    print(f"{report.data['seconds']} s; failed: {list(report.data['failed'])}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
