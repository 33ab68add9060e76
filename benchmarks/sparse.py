"""Measure 2:4 sparse weights on the GPU at hand, beside torch's dense product and cuSPARSELt.

python benchmarks/sparse.py --seed 7 --output FILE              the suite, and 16 random rows of a seed at each end of M
python benchmarks/sparse.py --rows 8192 --configs all           times every config of some rows, for fits of the model

Each result is compared with the dense product of the same weight in float32 before it is timed. The weight of
cuSPARSELt is compressed by torch, and its algorithm is the fastest of those it has. Configs are those that gemmery
chooses untuned, unless `--configs` says otherwise. The file is written behind each row.
"""

import argparse
import json
import math
import random
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import torch
from torch.nn import functional as F

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT)]

import gemmery  # noqa: E402
from gemmery import epilogues  # noqa: E402
from gemmery.lab import timing  # noqa: E402
from gemmery.lab.results import describe_run  # noqa: E402
from gemmery.select.model import costs  # noqa: E402
from gemmery.select.shortlist import allowed  # noqa: E402
from gemmery.tuning.stopwatch import Stopwatch  # noqa: E402

BF16 = torch.bfloat16
#: The largest ‖out − ref‖ / ‖ref‖ that counts as right.
RIGHT = 4e-3
#: (name, M, N, K, whether the weight is gate and up).
SUITE = [
    *[(f"decode {m}x8192x8192", m, 8192, 8192, False) for m in (1, 16, 64, 128)],
    ("decode 16x28672x8192", 16, 28672, 8192, False),
    ("swiglu 16x28672x4096", 16, 28672, 4096, True),
    ("prefill 512x8192x8192", 512, 8192, 8192, False),
    ("prefill 4096x4096x4096", 4096, 4096, 4096, False),
    ("prefill 4096x14336x4096", 4096, 14336, 4096, False),
    ("prefill 8192x8192x8192", 8192, 8192, 8192, False),
]
HIDDEN = (1024, 1536, 2048, 2880, 3072, 4096, 5120, 6144, 7168, 8192)


def random_rows(seed, count):
    """Random products of M from 1 to 64 and from 1024 to 8192, whose N and K are multiples of 32."""
    rng = random.Random(f"{seed} sparse")
    found = []
    for low, high, name in ((1, 64, "decode"), (1024, 8192, "prefill")):
        for _ in range(count):
            hidden = rng.choice(HIDDEN)
            other = round(hidden * rng.choice((0.5, 1, 1.5, 2.67, 3.5, 4)) / 32) * 32
            n, k = (hidden, other) if rng.random() < 0.5 else (other, hidden)
            m = int(math.exp(rng.uniform(math.log(low), math.log(high + 1))))
            found.append((f"random {name} {m}x{n}x{k}", m, n, k, False))
    return found


def cusparselt(x, w):
    """A call of cuSPARSELt's product with its fastest algorithm, and what makes an (M, N) tensor of its result."""
    if not torch.backends.cusparselt.is_available() or min(w.shape) < 64:
        return None
    packed = torch._cslt_compress(w.contiguous())
    rows = -(-x.shape[0] // 16) * 16
    b = F.pad(x, (0, 0, 0, rows - x.shape[0])).t()
    alg, split, mode, _ = torch._C._cusparselt.mm_search(packed, b, None, None, None, True)
    call = partial(
        torch._cslt_sparse_mm, packed, b, transpose_result=True, alg_id=alg, split_k=split, split_k_mode=mode
    )
    return call, lambda out: (out.t() if out.shape[0] == w.shape[0] and out.shape[1] == rows else out)[
        : x.shape[0]
    ]


def choices(x, weight, epilogue, every):
    """Configs that can run a product with their predicted times, so many of each schedule, the quickest first."""
    plan = gemmery.plan(x, weight, epilogue=epilogue)
    space = allowed(plan.problem)
    times = costs(plan.problem, space).total
    taken, kept = {}, {}
    for i in times.argsort():
        config = space.configs[i]
        if config.schedule not in ("cooperative", "pingpong", "tile"):
            continue
        key = (config.schedule, config.block_n, config.num_warps)
        if taken.setdefault(key, 0) < (every if config.schedule != "tile" else 1):
            taken[key] += 1
            kept[str(config)] = float(times[i])
    return kept


def operands(row):
    """x, the sparse weight, and the epilogue of a row."""
    _, m, n, k, gated = row
    g = torch.Generator(device="cuda").manual_seed(random.getrandbits(40))
    x = torch.randn(m, k, device="cuda", dtype=BF16, generator=g)
    w = torch.randn(n, k, device="cuda", dtype=BF16, generator=g)
    return x, gemmery.sparsify(w), epilogues.swiglu if gated else None


def compile_one(job):
    """Compiles a config in a process of its own, for Triton's cache."""
    row, config = job
    x, sparse, epilogue = operands(row)
    try:
        gemmery.plan(x, sparse, epilogue=epilogue, config=config)
    except (ValueError, RuntimeError) as error:
        return f"{config}: {str(error)[:200]}"
    return None


def compile_all(rows, args):
    """Compiles what will be timed, several kernels at a time."""
    seen, jobs = set(), []
    for row in rows:
        x, sparse, epilogue = operands(row)
        names = [*choices(x, sparse, epilogue, args.configs)] if args.configs else []
        for name in [*names, *args.config]:
            config = gemmery.Config.of(name)
            tile = (config.schedule, config.block_n, config.num_warps, config.split_k > 1, row[4])
            if config.schedule == "tile" or config.block_m < 64:
                tile = (*tile, config.block_m, config.block_k, config.num_stages)
            if tile not in seen:
                seen.add(tile)
                jobs.append((row, name))
        del x, sparse
    torch.cuda.empty_cache()
    with ProcessPoolExecutor(min(args.jobs, max(len(jobs), 1)), mp_context=get_context("spawn")) as pool:
        for text in pool.map(compile_one, jobs):
            if text:
                print("   ", text, flush=True)


def measure(row, watch, args):
    """One row's entry."""
    name, m, n, k, gated = row
    x, sparse, epilogue = operands(row)
    dense = sparse.dense()
    want = x.float() @ dense.float().T
    if gated:
        want = F.silu(want[:, : n // 2]) * want[:, n // 2 :]
    entry = {"name": name, "M": m, "N": n, "K": k, "errors": {}}

    def error(out):
        return float((out.float() - want).norm() / want.norm())

    def eager():
        gate, up = F.linear(x, dense).chunk(2, -1)
        return F.silu(gate) * up

    calls = {"torch": eager if gated else partial(F.linear, x, dense)}
    if not gated and not args.no_peers:
        try:
            call, shaped = cusparselt(x, dense)
            entry["errors"]["cusparselt"] = error(shaped(call()))
            calls["cusparselt"] = call
        except (RuntimeError, TypeError, AttributeError) as problem:
            entry["errors"]["cusparselt"] = str(problem)[:200]
    entry["config"] = str(gemmery.plan(x, sparse, epilogue=epilogue).config)
    ours = {"gemmery": partial(gemmery.linear, x, sparse, epilogue=epilogue)}
    entry["predicted"] = choices(x, sparse, epilogue, args.configs) if args.configs else {}
    for config in dict.fromkeys([*entry["predicted"], *args.config]):
        ours[config] = partial(gemmery.linear, x, sparse, epilogue=epilogue, config=config)
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
        best = min((x for x in labels if x not in ("torch", "cusparselt")), key=medians.get)
        texts = [f"{x} {medians[x] * 1e6:.1f}" for x in ("torch", "cusparselt", "gemmery") if x in medians]
        ratio = timing.ratio(rounds, "torch", "gemmery")
        print(
            f"{entry['name']:34} {regime:6} {'  '.join(texts)}  ratio {ratio.median:.3f}"
            f" ({ratio.min:.3f}-{ratio.max:.3f})  {entry['config']}  best {best} {medians[best] * 1e6:.1f}",
            flush=True,
        )


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, default=None, help="of random rows; none without it")
    parser.add_argument("--count", type=int, default=16, help="random rows at each end of M")
    parser.add_argument("--rows", default=None, help="only rows whose name has this")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steady", action="store_true")
    parser.add_argument(
        "--configs", type=int, default=0, help="time so many configs of each schedule as well"
    )
    parser.add_argument("--config", action="append", default=[], help="time this config as well")
    parser.add_argument("--jobs", type=int, default=12, help="kernels that are compiled at a time")
    parser.add_argument("--no-peers", action="store_true", help="without cuSPARSELt")
    parser.add_argument("--seconds", type=float, default=1e9, help="begin no row after so many seconds")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    rows = SUITE if args.seed is None else [*SUITE, *random_rows(args.seed, args.count)]
    rows = [row for row in rows if args.rows is None or args.rows in row[0]]
    begun = time.monotonic()
    if args.configs or args.config:
        compile_all(rows, args)
        print(f"compiled after {time.monotonic() - begun:.0f} s", flush=True)
    watch = Stopwatch()
    regimes = ("burst", "steady") if args.steady else ("burst",)
    entries = []
    data = describe_run(args.seed or 0, args.rounds, regimes, "cuda", ["torch", "cusparselt"])
    for row in rows:
        if time.monotonic() - begun > args.seconds:
            print("time is up before", row[0], flush=True)
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


if __name__ == "__main__":
    main()
