"""Measure gemmery beside other libraries, for docs/when-to-use-what.md: a few products of each kind, all in one run.

python benchmarks/peers.py [--only PART] [--out DIR]     needs torchao, gemlite and liger-kernel; others are left out

The parts are "products", with the rows, the inputs and the checks of `gemmery bench`; "linear8", a linear layer that
quantizes its input to fp8 in each call; "groups"; and "loss". Each is written to DIR/PART.json. A time is that of a
launch with cold inputs ("burst"), and of the loss, that of calls in a row. Methods take turns in a new order each
round.
"""

import random
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT)]

import gemmery  # noqa: E402
from benchmarks import linear_cross_entropy as lce  # noqa: E402
from benchmarks.parts import Call, Entry, compared, in_turn, run  # noqa: E402
from gemmery.lab.bench import make_calls  # noqa: E402
from gemmery.lab.fusions import FUSIONS  # noqa: E402
from gemmery.lab.inputs import Inputs, Unsuited, WrongResult, make_inputs, sample_rows  # noqa: E402
from gemmery.lab.libraries import codes_of  # noqa: E402
from gemmery.lab.peers import PEERS, Method, compiled, gemmery_call  # noqa: E402
from gemmery.lab.suites import Row  # noqa: E402

OUT = ROOT / "benchmarks" / "results" / "peers"
ROUNDS = 5
OURS = "gemmery"
#: Llama-3-8B: width, and hidden width of its feed-forward blocks.
WIDTH, HIDDEN = 4096, 14336
LIMIT = 1e-2
#: Relative error of a product of operands in e4m3, beside the one that is not quantized.
EIGHT_BITS = 0.06


# ---------------------------------------------------------------------------------------------------------------------
# Further methods


def liger(inputs: Inputs) -> Call:
    """A product by cuBLAS, then Liger's kernel for the activation."""
    from liger_kernel.ops.swiglu import LigerSiLUMulFunction

    if inputs.row.epilogue != "swiglu":
        raise Unsuited("has the activation of SwiGLU alone")
    weight = inputs.b.mT

    def call() -> Tensor:
        gate, up = F.linear(inputs.a, weight).chunk(2, -1)
        found: Tensor = LigerSiLUMulFunction.apply(gate, up)
        return found

    return call


def torchao_float8(inputs: Inputs) -> Call:
    """torchao's weight of 8 bits with activations of 16, compiled as its documentation says."""
    from torchao.quantization import Float8Tensor

    codes, scale = codes_of(inputs)
    weight = Float8Tensor(
        codes.contiguous().view(torch.float8_e4m3fn), scale, block_size=[1, inputs.row.K], dtype=inputs.a.dtype
    )  # fmt: skip
    torch._dynamo.reset()
    best = torch.compile(F.linear, mode="max-autotune-no-cudagraphs", dynamic=False, fullgraph=True)
    return partial(best, inputs.a, weight)


METHODS: dict[str, Method] = {
    OURS: gemmery_call,
    "cuBLAS": PEERS["cublas"],
    "torch.compile": compiled,
    "torchao": PEERS["torchao"],
    "torchao fp8": torchao_float8,
    "gemlite": PEERS["gemlite"],
    "Liger": liger,
}


# ---------------------------------------------------------------------------------------------------------------------
# Products


def rows() -> Iterator[tuple[str, str, Row, tuple[str, ...]]]:
    """By kind: what it is, its type, its rows, and who is measured."""

    def row(m: int, n: int = HIDDEN, k: int = WIDTH, **options: Any) -> Row:
        what = " ".join(str(x) for x in options.values() if x != "linear")
        return Row(f"{what} {m}×{n}×{k}".strip(), m, n, k, **options)

    for m in (1, 16, 256, 4096):
        own = row(m, weight="int4", call="linear")
        yield "int4 weights", "bf16", own, ("cuBLAS", "torchao", "gemlite")
    yield "e4m3 weights", "bf16", row(16, weight="e4m3", call="linear"), ("cuBLAS", "torchao fp8", "gemlite")
    for m in (16, 4096):
        yield "bf16", "bf16", row(m), ("cuBLAS", "torch.compile")
    for m in (16, 4096):
        own = row(m, 2 * HIDDEN, epilogue="swiglu")
        yield "SwiGLU", "bf16", own, ("cuBLAS", "torch.compile", "Liger")
    yield "bias and GELU", "bf16", row(4096, epilogue="bias_gelu_tanh"), ("cuBLAS", "torch.compile")
    for m in (64, 4096):
        yield "fp8, scales of rows, fast sums", "fp8fast", row(m, scales="row"), ("cuBLAS",)
        yield "fp8, scales of rows, accurate sums", "fp8", row(m, scales="row"), ("cuBLAS",)
        yield "fp8, scales of blocks", "fp8", row(m, scales="block"), ("cuBLAS",)


def products() -> Iterator[Entry]:
    """The rows, each checked against float64 as `gemmery bench` does."""
    for kind, dtype, row, names in rows():
        if row.epilogue not in ("", *FUSIONS):
            raise ValueError(f"there is no epilogue {row.epilogue!r}")
        inputs = make_inputs(row, dtype, 0)
        methods = {name: METHODS[name] for name in (OURS, *names)}
        calls, errors, left_out = make_calls(methods, inputs, sample_rows(row.M, random.Random(0)))
        yield entry(kind, row.name, calls, errors, left_out)


def entry(
    kind: str, name: str, calls: Mapping[str, Call], errors: Mapping[str, float], left_out: Mapping[str, str]
) -> Entry:
    """The times of calls that were checked."""
    times = compared(calls, ROUNDS)
    return {"kind": kind, "name": name, "times": times, "errors": errors, "left_out": left_out}


# ---------------------------------------------------------------------------------------------------------------------
# A linear layer that quantizes its input


def linear8() -> Iterator[Entry]:
    """x in bf16, quantized in the call with a scale for each row, and a weight in e4m3."""
    for m in (16, 4096):
        x = torch.randn(m, WIDTH, device="cuda", dtype=torch.bfloat16)
        w = torch.randn(HIDDEN, WIDTH, device="cuda", dtype=torch.bfloat16)
        makers = {
            OURS: partial(ours8, x, w),
            "torchao": partial(torchao8, x, w),
            "cuBLAS, bf16": partial(plain, x, w),
        }
        calls, errors, left_out = checked(makers, partial(distance, x.double() @ w.double().T), EIGHT_BITS)
        yield entry(
            "fp8, activations quantized in the call", f"{m}×{HIDDEN}×{WIDTH}", calls, errors, left_out
        )


def ours8(x: Tensor, w: Tensor) -> Call:
    """Two kernels."""
    weight = gemmery.quantize_activations(w)
    return lambda: gemmery.scaled_matmul(gemmery.quantize_activations(x), weight, fast_accum=True)


def torchao8(x: Tensor, w: Tensor) -> Call:
    """torchao's configuration, compiled."""
    from torchao.quantization import Float8DynamicActivationFloat8WeightConfig, PerRow, quantize_

    layer = torch.nn.Linear(w.shape[1], w.shape[0], bias=False, device="meta")
    layer.weight = torch.nn.Parameter(w.clone(), requires_grad=False)
    model = torch.nn.Sequential(layer)
    quantize_(model, Float8DynamicActivationFloat8WeightConfig(granularity=PerRow()))
    torch._dynamo.reset()
    return partial(torch.compile(model, mode="max-autotune-no-cudagraphs", dynamic=False, fullgraph=True), x)


def plain(x: Tensor, w: Tensor) -> Call:
    """The product in 16 bits."""
    return partial(F.linear, x, w)


def checked(
    makers: Mapping[str, Callable[[], Call]], error_of: Callable[[Any], float], limit: float
) -> tuple[dict[str, Call], dict[str, float], dict[str, str]]:
    """The calls whose results are right, their errors, and why others are left out; ours may not be."""
    calls, errors, left_out = {}, {}, {}
    for name, make in makers.items():
        try:
            call = make()
            error = error_of(call())
            if not error <= limit:
                raise WrongResult(f"relative error {error:.2e} is over {limit:.0e}")
        except Exception as error:
            if name == OURS:
                raise
            # Kept in the results: a library that is missing, or refuses, says so in many ways.
            left_out[name] = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        else:
            calls[name], errors[name] = call, error
    return calls, errors, left_out


def distance(wanted: Tensor, found: Tensor) -> float:
    """The relative error of a result."""
    return float((found.double() - wanted).norm() / wanted.norm())


# ---------------------------------------------------------------------------------------------------------------------
# Groups


def groups() -> Iterator[Entry]:
    """Experts' products: groups of about as many rows."""
    for count, total, n, k in ((8, 64, HIDDEN, WIDTH), (8, 4096, HIDDEN, WIDTH), (64, 8192, 2048, 2048)):
        a = torch.randn(total, k, device="cuda", dtype=torch.bfloat16)
        b = torch.randn(count, n, k, device="cuda", dtype=torch.bfloat16).mT
        shares = torch.rand(count, device="cuda") + 0.5
        offs = (shares.cumsum(0) / shares.sum() * total).round().to(torch.int32)
        offs[-1] = total
        ends = [0, *offs.tolist()]
        wanted = torch.cat([a[ends[i] : ends[i + 1]].double() @ b[i].double() for i in range(count)])
        makers: dict[str, Callable[[], Call]] = {
            OURS: lambda a=a, b=b, offs=offs: partial(gemmery.grouped_mm, a, b, offs=offs),
            "torch._grouped_mm": lambda a=a, b=b, offs=offs: partial(torch._grouped_mm, a, b, offs=offs),
        }
        calls, errors, left_out = checked(makers, partial(distance, wanted), LIMIT)
        yield entry("groups, bf16", f"{count} groups, {total}×{n}×{k}", calls, errors, left_out)


# ---------------------------------------------------------------------------------------------------------------------
# A loss


def loss() -> Iterator[Entry]:
    """Linear and cross entropy with gradients, and the peak of memory in a step."""
    size = 8192, 131072, 4096
    given = lce.inputs_of(*size)
    makers = {
        name: lambda make=make: partial(step, make(), *given)
        for name, make in ((OURS, lce.ours), ("Liger", lce.liger), ("torch.compile", lce.torch_compiled))
    }
    wanted = [x.double() for x in right_step(*given)]

    def error_of(found: tuple[Tensor, ...]) -> float:
        return max(distance(right, one) for right, one in zip(wanted, found, strict=False))

    calls, errors, left_out = checked(makers, error_of, LIMIT)
    memory = {name: peak_of(call) for name, call in calls.items()}
    yield {
        "kind": "linear and cross entropy, with gradients", "name": "×".join(map(str, size)),
        "times": in_turn(calls, 2, ROUNDS), "errors": errors, "left_out": left_out, "peak_bytes": memory,
    }  # fmt: skip


def step(
    method: Callable[..., Tensor], x: Tensor, weight: Tensor, target: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The loss and its gradients."""
    found = method(x, weight, target)
    return found.detach(), *torch.autograd.grad(found, [x, weight])


def right_step(x: Tensor, weight: Tensor, target: Tensor, rows: int = 512) -> tuple[Tensor, Tensor]:
    """The loss and the gradient of x in float32, some rows at a time."""
    wide, count = weight.detach().float(), (target >= 0).sum()
    total, gradients = torch.zeros((), device=x.device), []
    for own, labels in zip(x.detach().float().split(rows), target.split(rows), strict=True):
        own.requires_grad_()
        part = F.cross_entropy(own @ wide.T, labels, reduction="sum") / count
        gradients.append(*torch.autograd.grad(part, own))
        total += part.detach()
    return total, torch.cat(gradients)


def peak_of(call: Call) -> int:
    """Bytes that a call allocates at most at a time."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    return torch.cuda.max_memory_allocated() - before


PARTS = {"products": products, "linear8": linear8, "groups": groups, "loss": loss}


def versions() -> dict[str, str]:
    """The versions of the installed peers."""
    from importlib.metadata import PackageNotFoundError, version

    found = {}
    for name in ("torchao", "gemlite", "liger-kernel", "quack-kernels"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


if __name__ == "__main__":
    run(__doc__, PARTS, OUT, libraries=versions())
