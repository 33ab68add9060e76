"""Compiles one product for sm_90 in a process of its own, and prints what came out as JSON.

    python child.py LAYOUT        gemmery's kernel for the layout: N is row-major, T column-major

Imported, it also compiles the kernel below, which is all in one function. Both are bf16, 128x128x64 tiles through
pointers, a product of 4096 by 4096 matrices with a bias.
"""

import json
import re
import sys

import torch
import triton
import triton.language as tl

SIZE = 4096
CONFIG = {"block_m": 128, "block_n": 128, "block_k": 64, "group_m": 8, "num_warps": 8, "num_stages": 3}


@triton.jit
def plain(
    a, b, out, bias, M, N, K, a_row, b_col, out_row, bias_stride,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
):  # fmt: skip
    """`a @ b + bias` for a row-major, b column-major: what one writes by hand, K a multiple of BLOCK_K."""
    tiles_m = tl.cdiv(M, BLOCK_M)
    tiles_n = tl.cdiv(N, BLOCK_N)
    tile = tl.program_id(0)
    first_m = tile // (GROUP_M * tiles_n) * GROUP_M
    band_rows = min(tiles_m - first_m, GROUP_M)
    within = tile - first_m * tiles_n
    row = (first_m + within % band_rows) * BLOCK_M
    col = within // band_rows * BLOCK_N
    rows = tl.arange(0, BLOCK_M)
    cols = tl.arange(0, BLOCK_N)
    ks = tl.arange(0, BLOCK_K)
    row_inside = (rows < M - row)[:, None]
    col_inside = (cols < N - col)[None, :]
    a_tile = a + row.to(tl.int64) * a_row
    b_tile = b + col.to(tl.int64) * b_col
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for k in range(0, K, BLOCK_K):
        x = tl.load(a_tile + k + (rows[:, None] * a_row + ks[None, :]), mask=row_inside, other=0.0)
        y = tl.load(b_tile + k + (ks[:, None] + cols[None, :] * b_col), mask=col_inside, other=0.0)
        acc = tl.dot(x, y, acc)
    acc += tl.load(bias + (col + cols) * bias_stride, mask=col + cols < N, other=0.0).to(tl.float32)[None, :]
    out_tile = out + row.to(tl.int64) * out_row + col
    tl.store(
        out_tile + (rows[:, None] * out_row + cols[None, :]),
        acc.to(tl.bfloat16),
        mask=row_inside & col_inside,
    )


def operands(layout):
    """a, b, the output and the bias, without memory."""
    a, b, out = (torch.empty(SIZE, SIZE, dtype=torch.bfloat16, device="meta") for _ in range(3))
    bias = torch.empty(SIZE, dtype=torch.bfloat16, device="meta")
    return a.t() if layout[0] == "T" else a, b.t() if layout[1] == "T" else b, out, bias


def compile_gemm(layout):
    """gemmery's kernel."""
    from gemmery.devices import TABLE
    from gemmery.layout import make_problem
    from gemmery.problem import Config
    from gemmery.schedules import bind

    a, b, out, bias = operands(layout)
    problem = make_problem(
        a, b, out, bias, scaled=False, precision="ieee", fast_accum=False, device=TABLE["NVIDIA H200"]
    )
    return bind(problem, Config.of(CONFIG)).compile((a, b, out, bias), (1, 1))


def compile_plain():
    """The kernel above."""
    knobs = {key.upper(): value for key, value in CONFIG.items() if not key.startswith("num")}
    options = {key: value for key, value in CONFIG.items() if key.startswith("num")}
    return plain.warmup(*operands("NT"), SIZE, SIZE, SIZE, SIZE, SIZE, SIZE, 1, grid=(1,), **knobs, **options)


def report_of(compiled):
    """What a kernel turned out to be."""
    from gemmery.lab.inspection.resources import usage

    took = usage(compiled)
    text = compiled.asm["ptx"]
    # What the source's lines are called in the debugging sections may differ between two copies of one source.
    lines = text.split(".section")[0].splitlines()
    words = ("wgmma.mma_async", "cp.async.cg", "cp.async.commit_group", "st.global", "ld.global", "bar.sync")
    return {
        "code": "\n".join(line for line in lines if not re.match(r"\s*(\.loc|\.file|//)", line)),
        "registers": took.registers,
        "spilled": took.spilled,
        "counts": {word: text.count(word) for word in words},
        "shared": compiled.metadata.shared,
    }


def main():
    import gemmery
    from gemmery.lab import targets

    targets.use_target("sm_90")
    print(json.dumps({"file": gemmery.__file__} | report_of(compile_gemm(sys.argv[1]))))


if __name__ == "__main__":
    main()
