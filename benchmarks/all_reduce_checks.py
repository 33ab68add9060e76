"""Checks of products whose sum is spread over GPUs, for `all_reduce.py`: many calls, ranks that are late or missing.

Each is run on all ranks and raises an error where something is wrong.
"""

import random
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import gemmery.distributed
from benchmarks.processes import Ranks

#: Rows of the matrices of which calls take some, and most rows of a call.
ROWS, MOST = 2048, 1024
#: Seconds that a kernel waits for other ranks: where all of them come, and where one does not; and by how many seconds
#: the error may be later than that.
PATIENT, DEAD, LATER = 60.0, 2.0, 3.0
#: Different weights and numbers of rows in a run of many calls, and replays of a graph.
WEIGHTS, COUNTS, REPLAYS = 6, 64, 50


def wanted(args: Any) -> list[Callable[[Ranks, Any], None]]:
    """The checks that the command asks for."""
    asked = {stress: args.stress is not None, graph: args.graph, late: args.late is not None, dead: args.dead}
    return [check for check, is_asked in asked.items() if is_asked]


class Pool:
    """A weight and rows of x on each rank, and the sum over the ranks of all their products in float32.

    Args:
        kind: "bf16", "fp16" or "int4", whose weight has groups of 128 columns and whose x is of bf16.
    """

    def __init__(self, ranks: Ranks, seed: int, kind: str, n: int, k: int) -> None:
        torch.backends.cuda.matmul.allow_tf32 = False
        generator = torch.Generator(ranks.device).manual_seed(1000 * seed + ranks.rank)
        dtype = torch.float16 if kind == "fp16" else torch.bfloat16
        self.name = f"{kind} {n}x{k}"
        self.x = torch.randn(ROWS, k, device=ranks.device, generator=generator).to(dtype)
        dense = (torch.randn(n, k, device=ranks.device, generator=generator) / k**0.5).to(dtype)
        self.weight: Any = dense
        if kind == "int4":
            self.weight = gemmery.quantize(dense, "int4", group_size=128)
            dense = self.weight.dequantize(torch.float32)
        pairs = zip(ranks.gathered(self.x), ranks.gathered(dense), strict=True)
        self.want = sum(x.float() @ w.float().T for x, w in pairs)
        self.scale = self.want.square().mean().sqrt()

    def __call__(self, x: Tensor) -> Tensor:
        """The call that is checked, with some rows of x."""
        return gemmery.distributed.linear_all_reduce(x, self.weight, group=dist.group.WORLD)

    def rows(self, start: int, count: int) -> Tensor:
        """Some rows of x."""
        return self.x[start : start + count]

    def wrong(self, y: Tensor, start: int) -> Tensor:
        """How many elements of a result are wrong, without waiting for the GPU."""
        want = self.want[start : start + y.shape[0]]
        return (~((y.float() - want).abs() <= 2e-2 * want.abs() + 2e-2 * self.scale)).sum()


def checksum(y: Tensor) -> Tensor:
    """A number that depends on each bit of a result of 16 bits and on its place, without waiting for the GPU."""
    bits = y.contiguous().view(torch.int16).flatten().long()
    return (bits * (torch.arange(len(bits), device=y.device) * 2 + 1)).sum()


def _begin(ranks: Ranks, args: Any, timeout: float) -> float:
    timeout = timeout if args.timeout is None else args.timeout
    gemmery.distributed.set_timeout(timeout)
    ranks.wait()
    return timeout


def _pools(ranks: Ranks, args: Any, count: int) -> list[Pool]:
    """Weights of random sizes, the same ones on all ranks."""
    sizes, found = random.Random(args.seed or 0), []
    for i in range(count):
        kind = ("bf16", "int4", "fp16")[i % 3]
        step, group = (64, 128) if kind == "int4" else (8, 8)
        n, k = step * sizes.randint(1, 4096 // step), group * sizes.randint(1, 8192 // group)
        found.append(Pool(ranks, 100 + i, kind, n, k))
    return found


def _some(draw: random.Random) -> tuple[int, int]:
    """The first row, and how many, of a call: few are as likely as many."""
    count = min(MOST, round(2 ** draw.uniform(0, 10.1)))
    return draw.randrange(ROWS - count + 1), count


def stress(ranks: Ranks, args: Any) -> None:
    """Calls of random sizes in random order; nobody waits for a GPU before the last one."""
    pools = _pools(ranks, args, WEIGHTS)
    timeout = _begin(ranks, args, PATIENT)
    draw, begun, made = random.Random(args.seed or 0), time.monotonic(), []
    sums, wrong = [], []
    # Each pair of a weight and a number of rows takes the host some milliseconds when it is met first.
    counts = [_some(draw)[1] for _ in range(COUNTS)]
    for i in range(args.stress):
        pool, count = draw.choice(pools), draw.choice(counts)
        start = draw.randrange(ROWS - count + 1)
        y = pool(pool.rows(start, count))
        sums.append(checksum(y))
        wrong.append(pool.wrong(y, start))
        made.append(f"{pool.name} M={count}")
        if (i + 1) % (100 if i < 1000 else 1000) == 0:
            ranks.say(f"{i + 1} calls are queued after {time.monotonic() - begun:.0f} s")
    ranks.synchronize()
    gemmery.distributed.check()
    errors = torch.stack(wrong)
    each = ranks.gathered(torch.stack(sums))
    differ = torch.stack([x != each[0] for x in each]).any(0)
    bad, other = (x.nonzero().flatten()[:10].tolist() for x in (errors, differ))
    texts = [f"call {i}, {made[i]}: {int(errors[i])} elements are wrong" for i in bad]
    texts += [f"call {i}, {made[i]}: other bits on another rank" for i in other]
    _judge(texts)
    seconds = time.monotonic() - begun
    ranks.say(
        f"stress: {args.stress} calls in {seconds:.0f} s (timeout {timeout:g} s), all right, same bits on all ranks"
    )


def _judge(texts: list[str]) -> None:
    if texts:
        raise RuntimeError("\n".join(texts))


def _right(ranks: Ranks, pool: Pool, y: Tensor, start: int, text: str) -> list[str]:
    """The errors of a result, in words."""
    found = []
    if count := int(pool.wrong(y, start)):
        found.append(f"{text}: {count} of {y.numel()} elements are wrong")
    if not ranks.same(y):
        found.append(f"{text}: other bits on another rank")
    return found


def late(ranks: Ranks, args: Any) -> None:
    """Each rank in turn comes late, on the host and on the GPU; the others wait, and results are right."""
    pool = Pool(ranks, 1, "bf16", 1024, 512)
    timeout = _begin(ranks, args, 5 * args.late + 10)
    texts = _right(ranks, pool, pool(pool.rows(0, 16)), 0, "the first call")
    for rank in range(ranks.count):
        for where in ("host", "GPU"):
            if where == "GPU" and not ranks.on_gpu:
                continue
            ranks.wait()
            begun = time.monotonic()
            if rank == ranks.rank and where == "host":
                time.sleep(args.late)
            elif rank == ranks.rank:
                # About; a GPU's clock is between 1 and 2 GHz.
                torch.cuda._sleep(int(args.late * 1.7e9))
            results = [(start, pool(pool.rows(start, 16))) for start in (16, 32, 48)]
            ranks.synchronize()
            seconds = time.monotonic() - begun
            gemmery.distributed.check()
            for start, y in results:
                texts += _right(ranks, pool, y, start, f"rank {rank} late on the {where}")
            ranks.say(f"late: rank {rank} by {args.late:g} s on the {where}, done after {seconds:.2f} s")
    _judge(texts)
    ranks.say(f"late: all right (timeout {timeout:g} s)")


def dead(ranks: Ranks, args: Any) -> None:
    """The last rank makes no call: the others get an error in time."""
    pool = Pool(ranks, 1, "bf16", 1024, 512)
    timeout = _begin(ranks, args, DEAD)
    texts = _right(ranks, pool, pool(pool.rows(0, 16)), 0, "the first call")
    ranks.wait()
    missing = ranks.count - 1
    if ranks.rank != missing:
        begun, found = time.monotonic(), None
        try:
            for _ in range(2):
                pool(pool.rows(16, 16))
                ranks.synchronize()
                gemmery.distributed.check()
        except RuntimeError as error:
            found = error
        seconds = time.monotonic() - begun
        if found is None:
            texts.append(f"no error within {seconds:.1f} s")
        elif seconds > timeout + LATER:
            texts.append(f"an error after {seconds:.1f} s, which the timeout is {timeout:g} s for: {found}")
        print(
            f"dead: rank {ranks.rank} has after {seconds:.2f} s (timeout {timeout:g} s): {found!r}",
            flush=True,
        )
        # The GPU has to be of use still.
        if ranks.on_gpu and int(torch.ones(8, device="cuda").sum()) != 8:
            texts.append("the GPU can't be used")
    ranks.store.set(f"done {ranks.rank}", "1")
    ranks.store.wait([f"done {rank}" for rank in range(ranks.count)])
    _judge(texts)


def _recorded(calls: list[Callable[[], Tensor]], ranks: Ranks) -> tuple[Callable[[], None], list[Tensor]]:
    """A function that replays a CUDA graph of calls, or calls them again without a GPU; and their results."""
    if not ranks.on_gpu:
        results = [call() for call in calls]

        def again() -> None:
            for y, call in zip(results, calls, strict=True):
                y.copy_(call())

        return again, results
    recorded = torch.cuda.CUDAGraph()
    with torch.cuda.graph(recorded, capture_error_mode="thread_local"):
        results = [call() for call in calls]
    return recorded.replay, results


def graph(ranks: Ranks, args: Any) -> None:
    """A CUDA graph of three calls, replayed with other inputs between eager calls of other sizes."""
    sizes = ((16, Pool(ranks, 1, "bf16", 2048, 1024)), (128, Pool(ranks, 2, "int4", 1024, 2048)))
    sizes = (*sizes, (3, Pool(ranks, 3, "fp16", 1000, 504)))
    others = _pools(ranks, args, 4)
    timeout = _begin(ranks, args, PATIENT)
    given = [pool.rows(0, count).clone() for count, pool in sizes]
    for _ in range(2):
        for (_, pool), x in zip(sizes, given, strict=True):
            pool(x)
        for pool in others:
            pool(pool.rows(0, MOST))
    ranks.wait()
    replay, results = _recorded([partial(pool, x) for (_, pool), x in zip(sizes, given, strict=True)], ranks)
    draw, wrong, sums = random.Random(args.seed or 0), [], []
    for _ in range(REPLAYS):
        starts = []
        for (count, pool), x in zip(sizes, given, strict=True):
            starts.append(draw.randrange(ROWS - count + 1))
            x.copy_(pool.rows(starts[-1], count))
        replay()
        for (_, pool), y, start in zip(sizes, results, starts, strict=True):
            wrong.append(pool.wrong(y, start))
            sums.append(checksum(y))
        for _ in range(draw.randint(0, 3)):
            pool = draw.choice(others)
            start, count = _some(draw)
            y = pool(pool.rows(start, count))
            wrong.append(pool.wrong(y, start))
            sums.append(checksum(y))
    ranks.synchronize()
    gemmery.distributed.check()
    texts = []
    if bad := int((torch.stack(wrong) > 0).sum()):
        texts.append(f"graph: {bad} of {len(wrong)} results are wrong")
    if not ranks.same(torch.stack(sums)):
        texts.append("graph: other bits on another rank")
    _judge(texts)
    ranks.say(f"graph: {REPLAYS} replays, {len(wrong)} results, all right (timeout {timeout:g} s)")
