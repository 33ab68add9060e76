"""Rung 9: a fused epilogue.

A product is rarely the only operation. A Linear layer adds a bias, and an activation follows: out = gelu(a @ w.T +
bias). With separate kernels, the product is written to memory and read again, twice:

    separate    product -> out        out + bias -> out         gelu(out) -> out
                write MN              read MN, write MN         read MN, write MN

    fused       product, bias, gelu in registers -> out
                write MN

For 4096 x 14336 in float16, each pass over the output is 117 MB, which takes 28 µs at 4.2 TB/s. The arithmetic is
only partly hidden: while threads compute the gelu, they start no products, but the loads of the next tile continue.
The last lines of the benchmark compare it with the bare product of rung 8.

The fused kernel is also more accurate: bias and gelu receive the float32 accumulator instead of a product that was
rounded to float16.

The kernel is that of rung 8 with two more arguments. `EPILOGUE` is a jitted function, passed as a constant. The
compiler inlines it into the kernel, so a new epilogue is a function of a few lines and not a new kernel. It runs on
half a tile at a time, after the split, so that only half of the results exist at once.

    gelu(x) = x / 2 · (1 + erf(x / √2))

In gemmery, you do not write this function in Triton. An epilogue is a torch function, and gemmery generates the
kernel's code and the gradient from it. The same fusion, with the same matrices:

    import gemmery
    out = gemmery.matmul(a, w.T, epilogue=lambda acc, bias: F.gelu(acc + bias), args=(bias,))

docs/epilogues.md has more examples: residuals, gates, several results, sums of rows.

Epilogues as composable functions: Chen et al., "EVT: Accelerating Deep Learning Training with Epilogue Visitor Tree",
ASPLOS 2024, and CUTLASS. GELU: Hendrycks and Gimpel, 2016.

**What it gained, and why.** It is 1.10 times as fast as torch's addmm and gelu at 4096x4096x4096, and 1.03 times at
4096x14336x4096. The table of epilogues is a second measurement, and has 1.10 and 1.12: there, torch takes 839 µs for
the larger product instead of 783 µs. The polynomial makes the difference. With `tl.erf`, which takes 68 instructions
per output element instead of 20, the rung is slower than torch: 0.93 to 0.95. The fused kernel takes 1 to 3 % longer
than rung 8 for the product alone.

*Where it loses.* torch also fuses the bias, in addmm, and its gelu is a pass over an output that is partly in L2. So
there is less to gain than the count of passes suggests: torch takes 1.14 times as long for all three steps as for the
product alone. At 4001x4104x4088 the product itself is slow, as in rung 8, and the fused epilogue does not make up for
it: 0.79. In all of these kernels, the tensor cores are idle during the epilogue. Rung 10 overlaps it with the products.
"""

from collections.abc import Callable, Sequence
from typing import Any

from _common import (
    INTERPRETED,
    Exercise,
    Question,
    Record,
    Row,
    bench_products,
    compare,
    normal,
    output,
    poisoned,
    product_sizes,
    run,
    rung,
)

# isort: split
import torch
import triton
import triton.language as tl
from torch.nn import functional as F
from triton.tools.tensor_descriptor import TensorDescriptor

NUMBER = 9
TITLE = "fused epilogue: bias and activation"

before = rung(8)  # for its choice of a config, its checks and the comparison


@triton.jit
def bias_only(acc, bias):
    return acc + bias


@triton.jit
def bias_relu(acc, bias):
    return tl.maximum(acc + bias, 0.0)


@triton.jit
def bias_gelu_erf(acc, bias):
    x = acc + bias
    return 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))


def fitted(degree: int = 5) -> list[float]:
    """The factors of a, a², ... in a polynomial for log2(2·Φ(-a)), 0 <= a <= 5.5.

    Least squares, weighted by a·Φ(-a): by how much an error in the exponent changes the gelu.
    """
    a = torch.linspace(0, 5.5, 1000, dtype=torch.float64)
    tail = torch.erfc(a / 2**0.5) / 2
    weights = a * tail
    powers = a[:, None] ** torch.arange(1, degree + 1)
    found = torch.linalg.lstsq(powers * weights[:, None], (torch.log2(2 * tail) * weights)[:, None])
    return [float(factor) for factor in found.solution]


P1, P2, P3, P4, P5 = (tl.constexpr(factor) for factor in fitted())


@triton.jit
def bias_gelu(acc, bias):
    x = acc + bias
    a = tl.minimum(tl.abs(x), 6.0)  # beyond, the gelu is 0 or x
    exponent = a * (P1 + a * (P2 + a * (P3 + a * (P4 + a * P5))))
    return tl.maximum(x, 0.0) - a * tl.exp2(exponent - 1.0)


@triton.jit
def finish(acc, bias_ptr, out, row, col, N, EPILOGUE: tl.constexpr):
    """Bias and epilogue in float32, then one rounding, then the store."""
    n = col + tl.arange(0, acc.shape[1])
    bias = tl.load(bias_ptr + n, mask=n < N, other=0.0).to(tl.float32)
    out.store([row, col], EPILOGUE(acc, bias[None, :]).to(tl.float16))


@triton.jit
def linear_kernel(
    a, w, bias_ptr, out, M, N, K,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr,
    NUM_SMS: tl.constexpr, EPILOGUE: tl.constexpr,
):  # fmt: skip
    tiles_m = tl.cdiv(M, BLOCK_M)
    tiles_n = tl.cdiv(N, BLOCK_N)
    for tile in tl.range(tl.program_id(0), tiles_m * tiles_n, NUM_SMS, flatten=True):
        tile_m, tile_n = tl.swizzle2d(tile // tiles_n, tile % tiles_n, tiles_m, tiles_n, GROUP)
        row, col = tile_m * BLOCK_M, tile_n * BLOCK_N

        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for k in range(0, K, BLOCK_K):
            acc = tl.dot(a.load([row, k]), w.load([col, k]).T, acc)

        left, right = acc.reshape(BLOCK_M, 2, BLOCK_N // 2).permute(0, 2, 1).split()
        finish(left, bias_ptr, out, row, col, N, EPILOGUE)
        finish(right, bias_ptr, out, row, col + BLOCK_N // 2, N, EPILOGUE)


# Each activation, and what it means in torch.
ACTIVATIONS: dict[str, tuple[Any, Callable[[torch.Tensor], torch.Tensor]]] = {
    "none": (bias_only, lambda x: x),
    "relu": (bias_relu, torch.relu),
    "gelu": (bias_gelu, F.gelu),
    "gelu by erf": (bias_gelu_erf, F.gelu),
}


def linear(
    a: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor,
    activation: str = "gelu",
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """activation(a @ w.T + bias) for float16 matrices a, (M, K), and w, (N, K), and a bias, (N,)."""
    M, N, K = product_sizes(a, w.T)
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation {activation!r}: wanted one of {', '.join(ACTIVATIONS)}")
    if bias.shape != (N,) or bias.dtype != a.dtype or bias.device != a.device or not bias.is_contiguous():
        raise ValueError(
            f"bias must be contiguous, ({N},) of {a.dtype} on {a.device}, got {tuple(bias.shape)} of {bias.dtype} "
            f"on {bias.device}"
        )
    for name, t in (("a", a), ("w", w)):
        before.check_descriptor(name, t)
    out = output(out, a, M, N)
    before.check_descriptor("out", out)
    sms, config = before.machine(a.device)
    tiles = triton.cdiv(M, config.block_m) * triton.cdiv(N, config.block_n)
    linear_kernel[(min(sms, tiles),)](
        TensorDescriptor.from_tensor(a, [config.block_m, config.block_k]),
        TensorDescriptor.from_tensor(w, [config.block_n, config.block_k]),
        bias,
        TensorDescriptor.from_tensor(out, [config.block_m, config.block_n // 2]),
        M, N, K,
        BLOCK_M=config.block_m, BLOCK_N=config.block_n, BLOCK_K=config.block_k, GROUP=config.group, NUM_SMS=sms,
        EPILOGUE=ACTIVATIONS[activation][0], num_warps=config.warps, num_stages=config.stages,
    )  # fmt: skip
    return out


def weight(n: int, k: int) -> torch.Tensor:
    """A weight as in a trained layer: products of the size of their inputs, where a gelu is neither 0 nor x."""
    return normal(n, k, scale=k**-0.5)


# ---------------------------------------------------------------------------------------------------------------------
# Predict before you run, and exercises


def traffic_answer() -> str:
    separate, fused = (solved_traffic(4096, 14336, way) for way in (False, True))
    return f"{separate / 1e6:.0f} MB or {fused / 1e6:.0f}: {(separate - fused) / 4.2e12 * 1e6:.0f} us less at 4.2 TB/s."


def arithmetic_answer() -> str:
    elements, clock = 4096 * 14336 / 132, 1.6e9
    found = (
        f"{name}: {elements * count / 128 / clock * 1e6:.0f} us"
        for name, count in (("erf", 68), ("polynomial", 20))
    )
    return f"{', '.join(found)}, if nothing hides it. That is the cost of the epilogue in this kernel."


def depth_answer() -> str:
    depth = 20 / 128 * 2048 / 0.05
    return (
        f"A number of the output takes K / 2048 clocks of the tensor cores and 20 / 128 of the rest: K = {depth:.0f}. "
        "Below that, it pays to multiply the next tile meanwhile, as rung 10 does."
    )


QUESTIONS = (
    Question(
        "4096 x 14336: how many bytes go to and from memory after the product, with separate kernels and fused?",
        traffic_answer,
    ),
    Question(
        "tl.erf takes 68 instructions, the polynomial 20. How long is that, with 128 per clock and multiprocessor?",
        arithmetic_answer,
    ),
    Question("From which K on does the cheaper gelu cost less than 5 % of the product?", depth_answer),
)


def traffic(M: int, N: int, fused: bool) -> int:
    """Exercise 1: bytes read and written for an output of float16, from the product's store on."""
    raise NotImplementedError("count the passes over the output: five apart, one fused; the bias is small")


def check_traffic(answer: Callable[[int, int, bool], int]) -> None:
    assert answer(4096, 14336, True) == 117440512
    assert answer(100, 10, False) == 10000


def gelu(x: torch.Tensor) -> torch.Tensor:
    """Exercise 2: the kernel's gelu in torch, with the coefficients of `fitted`."""
    raise NotImplementedError("max(x, 0) - a * 2 ** (polynomial of a - 1), where a = min(|x|, 6)")


def check_gelu(answer: Callable[[torch.Tensor], torch.Tensor]) -> None:
    x = torch.linspace(-50, 50, 100001, dtype=torch.float64)
    wrong = (answer(x) - F.gelu(x)).abs().max()
    assert wrong < 1e-6, f"off by {wrong:.1e}; float16 does not show 1e-6"


# ---------------------------------------------------------------------------------------------------------------------
# The check and the measurement


def check() -> list[Row]:
    rows = []
    sizes = [(33, 72, 40), (100, 200, 88)]
    if not INTERPRETED:
        sizes.append((3001, 4008, 152))
    for m, n, k in sizes:
        a, w, bias = normal(m, k), weight(n, k), normal(n)
        for activation, (_, meaning) in ACTIVATIONS.items():
            out = linear(a, w, bias, activation, out=poisoned(m, n))
            peer = meaning(F.linear(a, w, bias))
            reference = meaning(F.linear(a.double(), w.double(), bias.double()))
            rows += compare("rung 9", f"{m}x{n}x{k}, {activation}", out, peer, reference, 5e-4)
    return rows


def bench() -> list[Row]:
    rows = []
    for m, n, k in ((4096, 4096, 4096), (4096, 14336, 4096), (4001, 4104, 4088)):
        bias = normal(n)

        def unfused(a: torch.Tensor, w: torch.Tensor, out: torch.Tensor, bias: torch.Tensor = bias) -> None:
            before.matmul(a, w, out)
            torch.add(out, bias, out=out)
            torch.ops.aten.gelu.out(out, out=out)

        def eager(a: torch.Tensor, w: torch.Tensor, out: torch.Tensor, bias: torch.Tensor = bias) -> None:
            torch.addmm(bias, a, w.T, out=out)
            torch.ops.aten.gelu.out(out, out=out)

        def meaning(a: torch.Tensor, w: torch.Tensor, bias: torch.Tensor = bias) -> torch.Tensor:
            return F.gelu(F.linear(a.double(), w.double(), bias.double()))

        rows += bench_products(
            ((m, n, k),),
            [
                ("rung 9, gelu", "this", lambda a, w, out, bias=bias: linear(a, w, bias, "gelu", out)),
                ("rung 8, then bias, gelu", "before", unfused),
                ("torch: addmm, gelu", "torch", eager),
            ],
            meaning,
            weight,
        )
        rows += bench_products(
            ((m, n, k),),
            [
                (
                    "rung 9, gelu by erf",
                    "other",
                    lambda a, w, out, bias=bias: linear(a, w, bias, "gelu by erf", out),
                )
            ],
            meaning,
            weight,
        )
        rows += bench_products(
            ((m, n, k),), [("rung 8, product alone", "other", before.matmul)], weight=weight
        )
    return rows


def main(arguments: Sequence[str] | None = None) -> Record:
    return run(NUMBER, TITLE, check, bench, arguments, QUESTIONS, EXERCISES)


# ---------------------------------------------------------------------------------------------------------------------
# Solutions of the exercises


def solved_traffic(M: int, N: int, fused: bool) -> int:
    return M * N * 2 * (1 if fused else 5)


def solved_gelu(x: torch.Tensor) -> torch.Tensor:
    a = x.abs().clamp(max=6)
    exponent = sum(factor * a ** (i + 1) for i, factor in enumerate(fitted()))
    return x.clamp(min=0) - a * torch.exp2(exponent - 1)


EXERCISES = (
    Exercise(traffic, solved_traffic, check_traffic),
    Exercise(gelu, solved_gelu, check_gelu),
)


if __name__ == "__main__":
    main()
