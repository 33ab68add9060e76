"""Measure 2:4 sparse weights on the GPU at hand, beside torch's dense product and cuSPARSELt.

python benchmarks/sparse.py --list                              names the rows; needs no GPU
python benchmarks/sparse.py --seed 7 --output FILE              the suite, and 16 random rows of a seed at each end of M
python benchmarks/sparse.py --rows 8192 --configs 2             times configs of some rows, too, for fits of the model

Each result is compared with the dense product of the same weight in float32 before it is timed. cuSPARSELt's weight is
compressed by torch, and its algorithm is the fastest that it finds. Configs are those that gemmery chooses untuned,
unless `--configs` says otherwise. The file is written behind each row.
"""

import argparse
import json
import random
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import NamedTuple

import torch
from torch.nn import functional as F

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT)]

import gemmery  # noqa: E402
from gemmery import devices, epilogues  # noqa: E402
from gemmery.lab import random_products, timing  # noqa: E402
from gemmery.lab.abstract import linear_problem  # noqa: E402
from gemmery.lab.fused_targets import abstract_sparse  # noqa: E402
from gemmery.lab.results import describe_run  # noqa: E402
from gemmery.product.spec import Options  # noqa: E402
from gemmery.select.model import costs  # noqa: E402
from gemmery.select.shortlist import allowed  # noqa: E402
from gemmery.tuning.stopwatch import Stopwatch  # noqa: E402

BF16 = torch.bfloat16
#: The largest ‖out − ref‖ / ‖ref‖ that counts as right.
RIGHT = 4e-3
#: torch's dense product, cuSPARSELt's, and gemmery's with a dense weight of the same code.
PEERS = ("torch", "torch rows", "cusparselt", "dense")


class Row(NamedTuple):
    """A product.

    Attributes:
        gated: whether the weight is gate and up of swiglu.
        code: of kept numbers of 8 bits or 4, "" for bf16. A dense weight with the same code is a peer then; int4 has
            groups of 128 columns in both. "fp8" is e4m3 with activations of e4m3 and scales of rows, as is "fp8 fast",
            which is summed as tensor cores do; the peer is torch's product of the same kind with one scale, which is
            cuBLAS's, or with those of rows.
    """

    name: str
    M: int
    N: int
    K: int
    gated: bool = False
    code: str = ""


SUITE = [
    *[Row(f"decode {m}x8192x8192", m, 8192, 8192) for m in (1, 16, 64, 128)],
    Row("decode 16x28672x8192", 16, 28672, 8192),
    Row("swiglu 16x28672x4096", 16, 28672, 4096, True),
    Row("prefill 512x8192x8192", 512, 8192, 8192),
    Row("prefill 4096x4096x4096", 4096, 4096, 4096),
    Row("prefill 4096x14336x4096", 4096, 14336, 4096),
    Row("prefill 8192x8192x8192", 8192, 8192, 8192),
    *[
        Row(f"{code} decode {m}x8192x8192", m, 8192, 8192, False, code)
        for code in ("e4m3", "int8", "int4")
        for m in (1, 16, 64)
    ],
    *[
        Row(f"{code} {m}x{n}x{k}", m, n, k, False, code)
        for code in ("fp8 fast", "fp8")
        for m, n, k in ((4096, 11008, 4096), (8192, 8192, 8192), (512, 8192, 8192), (16, 8192, 8192))
    ],
]


def random_rows(seed, count):
    """Random projections of transformers, as in the other suites, whose N and K are multiples of 32."""
    found = []
    for name, low in (("decode", 1), ("prefill", 1024)):
        rows = random_products.draw(
            seed, name, count, lambda x, low=low: x.N % 32 == 0 and x.K % 32 == 0 and low <= x.M
        )
        found += [Row(f"random {name} {x.M}x{x.N}x{x.K}", x.M, x.N, x.K) for x in rows]
    return found


def cusparselt(x, w):
    """A call of cuSPARSELt's product with its fastest algorithm, and what makes an (M, N) tensor of its result.

    The result is the product of x with rows of zeros below.
    """
    if not torch.backends.cusparselt.is_available() or min(w.shape) < 64:
        return None
    packed = torch._cslt_compress(w.contiguous())
    rows = -(-x.shape[0] // 16) * 16
    b = F.pad(x, (0, 0, 0, rows - x.shape[0])).t()
    alg, split, mode, _ = torch._C._cusparselt.mm_search(packed, b, None, None, None, True)
    call = partial(
        torch._cslt_sparse_mm, packed, b, transpose_result=True, alg_id=alg, split_k=split, split_k_mode=mode
    )
    return call, lambda out: (out if out.shape == (rows, w.shape[0]) else out.t())[: x.shape[0]]


def choices(row, every):
    """Configs that can run a product with their predicted times, so many of each schedule, the quickest first.

    Without any, the quickest one.
    """
    x = torch.empty(row.M, row.K, dtype=BF16, device="meta")
    code, group = "e4m3" if row.code.startswith("fp8") else row.code, 128 if row.code == "int4" else 0
    weight = abstract_sparse(code, row.N, row.K, BF16, group)
    if row.code.startswith("fp8"):
        x = gemmery.ScaledTensor(x.to(torch.float8_e4m3fn), torch.empty(row.M, 1, device="meta"))
        weight = weight.with_parts(weight.parts() | {"channel": torch.empty(row.N, device="meta")})
    problem = linear_problem(
        x,
        weight,
        devices.current(torch.device("cuda")),
        epilogue=epilogues.swiglu if row.gated else None,
        options=Options(fast_accum=row.code == "fp8 fast"),
    )
    space = allowed(problem)
    times = costs(problem, space).total
    taken, kept = {}, {}
    for i in times.argsort():
        config = space.configs[i]
        if not every:
            return {str(config): float(times[i])}
        if config.schedule not in ("cooperative", "pingpong", "cluster", "sliced_sparse", "tile"):
            continue
        key = (config.schedule, config.block_n, config.num_warps)
        if taken.setdefault(key, 0) < (every if config.schedule != "tile" else 1):
            taken[key] += 1
            kept[str(config)] = float(times[i])
    return kept


def operands(row):
    """x, the sparse weight, and the epilogue of a row."""
    _, m, n, k, gated, code = row
    g = torch.Generator(device="cuda").manual_seed(random.getrandbits(40))
    x = torch.randn(m, k, device="cuda", dtype=BF16, generator=g)
    w = torch.randn(n, k, device="cuda", dtype=BF16, generator=g)
    sparse = gemmery.sparsify(w)
    if code.startswith("fp8"):
        return gemmery.quantize_activations(x, "e4m3"), gemmery.quantize(sparse, "e4m3"), None
    return x, gemmery.quantize(sparse, code) if code else sparse, epilogues.swiglu if gated else None


def product_of(row, x, sparse, epilogue, **more):
    """gemmery's product of a row's operands."""
    if row.code.startswith("fp8"):
        return gemmery.scaled_matmul(x, sparse, fast_accum=row.code == "fp8 fast", **more)
    return gemmery.linear(x, sparse, epilogue=epilogue, **more)


def fp8_peers(x, sparse, code):
    """torch's products of fp8 with one scale and with those of rows, and gemmery's dense one."""
    weight = sparse.in_code().unscaled().dense()
    rows = sparse.channel.unsqueeze(-1)
    one, fast = torch.ones((), device="cuda"), code == "fp8 fast"
    times = partial(torch._scaled_mm, x.data, weight.t(), out_dtype=BF16)
    found = {"torch": partial(times, one, one, use_fast_accum=fast)} if x.shape[0] % 16 == 0 else {}
    if found and fast:
        found["torch rows"] = partial(times, x.scale, rows.t(), use_fast_accum=True)
    dense = gemmery.ScaledTensor(weight, rows)
    return found | {"dense": partial(gemmery.scaled_matmul, x, dense, fast_accum=fast)}


def compile_one(job):
    """Compiles a config in a process of its own, for Triton's cache."""
    row, config = job
    x, sparse, epilogue = operands(row)
    try:
        product_of(row, x, sparse, epilogue, config=config)
    except (ValueError, RuntimeError) as error:
        return f"{config}: {str(error)[:200]}"
    return None


def compile_all(rows, args):
    """Compiles what will be timed, several kernels at a time."""
    seen, jobs = set(), []
    for row in rows:
        for name in [*choices(row, args.configs), *args.config]:
            config = gemmery.Config.of(name)
            tile = (
                config.schedule,
                config.block_n,
                config.num_warps,
                config.split_k > 1,
                row.gated,
                row.code,
            )
            if config.schedule == "tile" or config.block_m < 64:
                tile = (*tile, config.block_m, config.block_k, config.num_stages)
            if tile not in seen:
                seen.add(tile)
                jobs.append((row, name))
    with ProcessPoolExecutor(min(args.jobs, max(len(jobs), 1)), mp_context=get_context("spawn")) as pool:
        for text in pool.map(compile_one, jobs):
            if text:
                print("   ", text, flush=True)


def measure(row, watch, args):
    """One row's entry."""
    name, m, n, k, gated, code = row
    x, sparse, epilogue = operands(row)
    dense, is_fp8 = sparse.dense(), code.startswith("fp8")
    # Of codes, their numbers, which bf16 holds, before the rows' scales.
    want = (x.dequantize() if is_fp8 else x.float()) @ sparse.unscaled().dense(torch.float32).T
    if sparse.channel is not None:
        want *= sparse.channel
    if gated:
        want = F.silu(want[:, : n // 2]) * want[:, n // 2 :]
    entry = {"name": name, "M": m, "N": n, "K": k, "errors": {}}

    def error(out):
        return float((out.float() - want).norm() / want.norm())

    def eager():
        gate, up = F.linear(x, dense).chunk(2, -1)
        return F.silu(gate) * up

    calls = {} if is_fp8 else {"torch": eager if gated else partial(F.linear, x, dense)}
    if is_fp8:
        calls = fp8_peers(x, sparse, code)
    elif code:
        calls["dense"] = partial(gemmery.linear, x, gemmery.quantize(dense, code))
    if not gated and not code and not args.no_peers:
        try:
            call, shaped = cusparselt(x, dense)
            entry["errors"]["cusparselt"] = error(shaped(call()))
            calls["cusparselt"] = call
        except (RuntimeError, TypeError, AttributeError) as problem:
            entry["errors"]["cusparselt"] = str(problem)[:200]
    entry["config"] = str(gemmery.plan(x, sparse, epilogue=epilogue, fast_accum=code == "fp8 fast").config)
    ours = {"gemmery": partial(product_of, row, x, sparse, epilogue)}
    entry["predicted"] = choices(row, args.configs) if args.configs else {}
    for config in dict.fromkeys([*entry["predicted"], *args.config]):
        ours[config] = partial(product_of, row, x, sparse, epilogue, config=config)
    for label, call in list(ours.items()):
        try:
            out = call()
            entry["errors"][label] = error(out)
            if not entry["errors"][label] < RIGHT:
                raise RuntimeError(f"{name} {label}: error {entry['errors'][label]}")
            if not all(out.equal(call()) for _ in range(3)):
                raise RuntimeError(f"{name} {label}: other bits when repeated")
        except (ValueError, RuntimeError) as problem:
            if label == "gemmery" or "CUDA" in str(problem):
                raise
            entry["errors"][label] = str(problem)[:300]
            print("   ", label, str(problem)[:300], flush=True)
            del ours[label]
    regimes = ("burst", "steady") if args.steady and m >= 512 else ("burst",)
    entry["seconds"] = timing.compare({**calls, **ours}, rounds=args.rounds, regimes=regimes, watch=watch)
    return entry


def report(entry):
    """A line of an entry."""
    for regime, rounds in entry["seconds"].items():
        labels = list(rounds[0])
        medians = {x: sorted(r[x] for r in rounds)[len(rounds) // 2] for x in labels}
        best = min((x for x in labels if x not in PEERS), key=medians.get)
        texts = [f"{x} {medians[x] * 1e6:.1f}" for x in (*PEERS, "gemmery") if x in medians]
        others = [x for x in ("torch", "torch rows") if x in medians]
        is_fp8 = entry["name"].startswith("fp8")
        peer = min(others, key=medians.get) if is_fp8 else "dense" if "dense" in medians else "torch"
        ratio = timing.ratio(rounds, peer, "gemmery")
        print(
            f"{entry['name']:34} {regime:6} {'  '.join(texts)}"
            f"  ratio {ratio.median:.3f} ({ratio.min:.3f}-{ratio.max:.3f})"
            f"  {entry['config']}  best {best} {medians[best] * 1e6:.1f}",
            flush=True,
        )


def main():
    """The command; exit status 2 where there is no GPU."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, default=None, help="of random rows; none without it")
    parser.add_argument("--count", type=int, default=16, help="random rows at each end of M")
    parser.add_argument(
        "--rows", default=None, help="only rows whose name has one of these, with commas between"
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steady", action="store_true")
    parser.add_argument(
        "--configs", type=int, default=0, help="time so many configs of each schedule as well"
    )
    parser.add_argument("--config", action="append", default=[], help="time this config as well")
    parser.add_argument("--jobs", type=int, default=12, help="kernels that are compiled at a time")
    parser.add_argument("--no-peers", action="store_true", help="without cuSPARSELt")
    parser.add_argument("--seconds", type=float, default=1e9, help="begin no row after so many seconds")
    parser.add_argument("--compile", action="store_true", help="fill Triton's cache, and measure nothing")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--list", action="store_true", help="name the rows")
    args = parser.parse_args()
    rows = SUITE if args.seed is None else [*SUITE, *random_rows(args.seed, args.count)]
    rows = [
        row for row in rows if args.rows is None or any(text in row.name for text in args.rows.split(","))
    ]
    if args.list:
        for row in rows:
            print(row)
        return 0
    if not torch.cuda.is_available():
        print("sparse: there is no GPU to measure", file=sys.stderr)
        return 2
    begun = time.monotonic()
    compile_all(rows, args)
    print(f"compiled after {time.monotonic() - begun:.0f} s", flush=True)
    if args.compile:
        return 0
    watch = Stopwatch()
    regimes = ("burst", "steady") if args.steady else ("burst",)
    entries = []
    data = describe_run(args.seed or 0, args.rounds, regimes, "cuda", PEERS)
    for row in rows:
        if time.monotonic() - begun > args.seconds:
            print("time is up before", row.name, flush=True)
            break
        entries.append(measure(row, watch, args))
        report(entries[-1])
        if args.output:
            args.output.write_text(json.dumps(data | {"rows": entries}, indent=1) + "\n")
    for kind in ("random decode", "random prefill"):
        own = [
            timing.ratio(e["seconds"]["burst"], "torch", "gemmery").median
            for e in entries
            if e["name"].startswith(kind)
        ]
        if own:
            print(
                f"{kind}: geometric mean {timing.geometric_mean(own):.3f}, worst {min(own):.3f}, {len(own)} rows"
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
