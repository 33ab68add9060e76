"""A small run of every kernel, for compute-sanitizer to watch (see test_sanitizer.py).

    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck --error-exitcode 1 python tests/gpu/sanitize.py

Without torch's memory cache every tensor is an allocation of its own size, so that one byte too far is an error.
Shapes are small, odd and ragged; random numbers and checks are the CPU's, so that hardly any kernel but ours runs. A
script: it shares nothing with the tests.
"""

import os
import sys

import torch

import gemmery

DEVICE = os.environ.get("GEMMERY_TEST_DEVICE", "cuda")

SCHEDULES = ("tile", "persistent")
HALF, TF32 = torch.float16, torch.float32
#: dtype, config, M, N, K, layout, what is added, further arguments. Descriptors want strides of 16 bytes.
RUNS = (
    *((HALF, f"32x32x32-g2-w4-s2-{schedule}-pointer", 67, 45, 51, "NN", "row", {}) for schedule in SCHEDULES),
    *(
        (HALF, f"64x32x32-g2-w4-s2-{schedule}-descriptor", 136, 72, 40, "NT", "row", {})
        for schedule in SCHEDULES
    ),
    (HALF, "32x32x32-g2-w4-s2-tile-pointer/2", 67, 45, 51, "TT", "matrix", {}),
    (HALF, "64x64x32-g2-w4-s2-tile-descriptor/2", 136, 72, 40, "TN", "matrix", {}),
    (HALF, "32x32x32-g2-w4-s2-persistent-pointer-t2", 333, 555, 35, "NT", None, {}),
    (HALF, "64x64x32-g2-w4-s2-persistent-descriptor-t4", 712, 888, 40, "NT", None, {}),
    (HALF, "64x64x32-g2-w4-s2-persistent-descriptor/2-t2", 712, 888, 40, "TN", "scale", {}),
    (HALF, None, 1, 301, 129, "NT", "row", {}),
    (torch.bfloat16, None, 130, 131, 65, "NN", None, {}),
    (torch.bfloat16, None, 264, 520, 136, "NT", "row", {}),
    (TF32, None, 65, 33, 17, "NT", "row", {}),
    (TF32, "64x32x32-g2-w4-s2-tile-descriptor", 68, 36, 44, "NT", None, {"precision": "tf32"}),
    (TF32, "32x32x32-g2-w4-s2-tile-pointer", 65, 33, 17, "TN", None, {"precision": "tf32x3"}),
    (torch.float64, None, 65, 33, 17, "NN", "matrix", {}),
    (torch.int8, "64x32x64-g2-w4-s2-tile-descriptor", 80, 48, 96, "NT", None, {}),
    (torch.int8, None, 65, 33, 99, "NN", None, {}),
    (torch.float8_e4m3fn, "64x32x64-g2-w4-s2-tile-descriptor", 80, 48, 96, "NT", None, {}),
    (torch.float8_e5m2, None, 65, 33, 99, "NT", None, {"fast_accum": True}),
)


def run(dtype, config, m, n, k, layout, added, kwargs, batch=()):
    """One call, compared with the CPU's float64."""

    def operand(rows, cols, order):
        shape = (*batch, rows, cols) if order == "N" else (*batch, cols, rows)
        cpu = torch.randint(-99, 99, shape) if dtype == torch.int8 else torch.randn(shape)
        cpu = cpu.to(dtype)
        return cpu.to(DEVICE) if order == "N" else cpu.to(DEVICE).mT

    a, b = operand(m, k, layout[0]), operand(k, n, layout[1])
    want = a.cpu().double() @ b.cpu().double()
    if added == "scale":
        addend = torch.zeros((), dtype=dtype, device=DEVICE)
        out = gemmery.addmm(addend, a, b, alpha=2, beta=0, config=config, **kwargs)
        want = want * 2
    elif added == "matrix":
        addend = torch.randn(m, n).to(dtype).to(DEVICE)
        out = gemmery.addmm(addend, a, b, alpha=2, beta=3, config=config, **kwargs)
        want = want * 2 + addend.cpu().double() * 3
    else:
        bias = torch.randn(n).to(dtype).to(DEVICE) if added else None
        out = gemmery.matmul(a, b, bias=bias, config=config, **kwargs)
        want = want if bias is None else want + bias.cpu().double()
    error = ((out.cpu().double() - want).norm() / want.norm()).item()
    # Memory is what this is about: bfloat16's rounding with room to spare.
    assert error < 1e-2, f"{dtype} {config} {m}x{n}x{k} {layout}: relative error {error}"


#: Configs of groups of rows, and of ranges of K. Those of tiles of any width are for Hopper.
GROUPED = {
    "rows": ("32x32x32-g2-w4-s2-tile-pointer", "32x32x64-g2-w4-s2-tile-descriptor"),
    "rows on hopper": (
        "64x96x64-g0-w4-s5-cooperative-descriptor",
        "64x128x64-g0-w8-s4-pingpong-descriptor-swap",
    ),
    "ranges": ("32x32x32-g2-w4-s2-tile-pointer", "32x32x16-g2-w4-s2-tile-pointer-k3"),
    "ranges on hopper": ("64x128x64-g0-w4-s4-cooperative-descriptor",),
}


def run_grouped(kind, config):
    """Groups of which some are empty, with rows behind the last one."""
    counts, behind = (5, 0, 70, 1, 0), 9
    ends = [sum(counts[: i + 1]) for i in range(len(counts))]
    offs = torch.tensor(ends, dtype=torch.int32).to(DEVICE)
    x, y = (torch.randn(ends[-1] + behind, n).bfloat16() for n in (72, 136))
    w = torch.randn(len(counts), 136, 72).bfloat16()
    bounds = list(zip([0, *ends[:-1]], ends, strict=True))
    if kind.startswith("rows"):
        out = gemmery.grouped_linear(x.to(DEVICE), w.to(DEVICE), offs=offs, config=config)
        want = torch.cat([x[i:j].double() @ w[g].double().T for g, (i, j) in enumerate(bounds)])
        assert (out[ends[-1] :] == 0).all()
        out = out[: ends[-1]]
    else:
        out = gemmery.grouped_mm(y.to(DEVICE).mT, x.to(DEVICE), offs=offs, config=config)
        want = torch.stack([y[i:j].double().T @ x[i:j].double() for i, j in bounds])
    error = ((out.cpu().double() - want).norm() / want.norm()).item()
    assert error < 1e-2, f"{kind} {config}: relative error {error}"


def main():
    torch.manual_seed(0)
    for case in RUNS:
        run(*case)
    is_hopper = DEVICE == "cuda" and torch.cuda.get_device_capability() == (9, 0)
    count = len(RUNS)
    for kind, configs in GROUPED.items():
        for config in configs if is_hopper or "hopper" not in kind else ():
            run_grouped(kind, config)
            count += 1
    for loader, k in (("pointer", 35), ("descriptor", 40)):
        run(HALF, f"64x32x32-g2-w4-s2-persistent-{loader}", 70, 40, k, "NT", None, {}, batch=(3,))
        count += 1
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    print(f"{count} kernels ran")
    return 0


if __name__ == "__main__":
    sys.exit(main())
