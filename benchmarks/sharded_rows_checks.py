"""Checks of `sharded_rows.py` that time nothing: many calls, CUDA graphs, a rank that is late or missing."""

import random
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

import gemmery.distributed
from benchmarks.processes import Ranks

BF16 = torch.bfloat16
#: Rows of all ranks; columns of the product, and K, of the calls that are made.
ROWS, SIZES = (128, 640, 1920, 4096), ((512, 1024), (1536, 512), (640, 2048))
#: Rows of all ranks, columns and K of calls in which ranks multiply some of their rows together with the other's.
MOVED = 4096, 5120, 512
#: Calls between looks at the clock.
TOGETHER = 500
#: The config of these calls on GPUs: to compile those that gemmery chooses for all sizes would take minutes.
CONFIG = "64x128x64-g0-w8-s8-cooperative-descriptor-swap"
#: Seconds that kernels wait for a rank that is missing.
TIMEOUT = 3.0


class Item(NamedTuple):
    """A call, and what it returned first, which was compared with float64."""

    name: str
    call: Callable[[], Tensor]
    want: Tensor


def wanted(args: Any) -> list[Callable[[Ranks, Any], None]]:
    """The checks that a command asks for."""
    found = [
        (args.stress, stress),
        (args.graph, graphs),
        (args.late, late),
        (args.dead, dead),
    ]
    return [function for asked, function in found if asked]


def items(ranks: Ranks, args: Any, rows: tuple[int, ...] = ROWS, config: str | None = None) -> list[Item]:
    """Calls of both kinds, each compared with float64."""
    own = torch.Generator(ranks.device).manual_seed(ranks.rank)
    made, small = [], args.shrink
    sizes = [(max(M // small, 128), N // small, K // small, config) for M in rows for N, K in SIZES]
    if config is not None:
        # Rows are moved only if gemmery chooses the config.
        sizes.append((*MOVED, None))
    for M, N, K, pinned in dict.fromkeys(sizes):
        x = torch.randn(M, K, dtype=BF16, device=ranks.device, generator=own)
        w = torch.randn(N, K, dtype=BF16, device=ranks.device, generator=own)
        shard = x[: M // ranks.count]
        total = x.double() @ w.double().T
        dist.all_reduce(total)
        whole = torch.cat(ranks.gathered(shard)).double() @ w.double().T
        for name, given, want in (
            ("all_gather_linear", shard, whole),
            ("linear_reduce_scatter", x, total.chunk(ranks.count)[ranks.rank]),
        ):

            def call(
                name: str = name, given: Tensor = given, w: Tensor = w, pinned: str | None = pinned
            ) -> Tensor:
                result: Tensor = getattr(gemmery.distributed, name)(given, w, config=pinned)
                return result

            got = call().clone()
            error = float((got.double() - want).norm() / want.norm())
            if not error < 6e-3:
                raise RuntimeError(f"{name} {M}x{N}x{K}: error {error}")
            made.append(Item(f"{name} {M}x{N}x{K}", call, got))
    return made


def stress(ranks: Ranks, args: Any) -> None:
    """Many calls in random order, the same on all ranks, each of which must give the bits of the first."""
    begun = time.monotonic()
    found, order = items(ranks, args, config=CONFIG if ranks.on_gpu else None), random.Random(args.seed)
    ranks.say(f"{len(found)} products are right after {time.monotonic() - begun:.0f} s")
    different, made, elapsed = torch.zeros((), dtype=torch.int64, device=ranks.device), 0, 0.0
    while made < args.stress and elapsed < args.seconds:
        for _ in range(min(TOGETHER, args.stress - made)):
            item = order.choice(found)
            different += (item.call() != item.want).any()
            made += 1
        ranks.synchronize()
        (elapsed,) = ranks.largest([time.monotonic() - begun])
        ranks.say(f"{made} calls after {elapsed:.0f} s, {int(different)} different")
    gemmery.distributed.check()
    (wrong,) = ranks.largest([float(different)])
    if wrong:
        raise RuntimeError(f"{wrong:.0f} of {made} results differ")
    ranks.say(f"stress: {made} calls, all with the same bits, {elapsed:.0f} s")


def graphs(ranks: Ranks, args: Any) -> None:
    """Replays of a graph of several products, between eager calls."""
    found, order = items(ranks, args, (128, 1024)), random.Random(args.seed)
    captured = order.sample(found, 6)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        results = [item.call() for item in captured]
    different = torch.zeros((), dtype=torch.int64, device=ranks.device)
    for _ in range(50):
        for result in results:
            result.zero_()
        graph.replay()
        for result, item in zip(results, captured, strict=True):
            different += (result != item.want).any()
        item = order.choice(found)
        different += (item.call() != item.want).any()
    gemmery.distributed.check()
    (wrong,) = ranks.largest([float(different)])
    if wrong:
        raise RuntimeError(f"{wrong:.0f} results of graphs or between them differ")
    ranks.say("graphs: 50 replays of 6 products between eager calls, all with the same bits")


def late(ranks: Ranks, args: Any) -> None:
    """A rank whose host, or whose GPU, is late, by turns."""
    found = items(ranks, args, (256, 1024))
    for i, item in enumerate(found):
        if i % ranks.count == ranks.rank:
            if i % 3 and ranks.on_gpu:
                torch.cuda._sleep(int(args.late * 1e9))
            else:
                time.sleep(args.late)
        if not item.call().equal(item.want):
            raise RuntimeError(f"{item.name}: other bits where rank {i % ranks.count} was late")
    gemmery.distributed.check()
    ranks.say(f"late: {len(found)} calls right where a rank was {args.late} s late")


def dead(ranks: Ranks, args: Any) -> None:
    """The last rank makes no call: an error on the others that says so."""
    for name in ("all_gather_linear", "linear_reduce_scatter"):
        # A failed exchange is the end of its process group.
        group = dist.new_group(list(range(ranks.count)))
        function = getattr(gemmery.distributed, name)
        x, w = (torch.ones(256, 512, dtype=BF16, device=ranks.device) for _ in range(2))
        function(x, w, group=group)
        gemmery.distributed.check()
        ranks.wait()
        if ranks.rank < ranks.count - 1:
            gemmery.distributed.set_timeout(TIMEOUT)
            begun = time.monotonic()
            function(x, w, group=group)
            try:
                gemmery.distributed.check()
            except RuntimeError as error:
                ranks.say(f"{name}: after {time.monotonic() - begun:.1f} s of {TIMEOUT} s: {str(error)[:80]}")
            else:
                raise RuntimeError(f"{name}: no error")
            for shared in gemmery.distributed.exchange._shared[group].values():
                shared._memories.clear()
        ranks.store.set(f"{name} {ranks.rank}", "done")
        ranks.store.wait([f"{name} {rank}" for rank in range(ranks.count)])
