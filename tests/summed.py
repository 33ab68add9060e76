"""What test_all_reduce.py runs on each of two ranks: products that are summed over the ranks, against float64."""

import time
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.nn import functional as F

import gemmery
from gemmery import distributed as ours
from gemmery.distributed import all_reduce, exchange
from gemmery.product import cache
from tests import ranks

#: The largest error, as a part of the largest number.
CLOSE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2, torch.int32: 0}


def normal(*shape, seed, dtype=torch.bfloat16):
    made = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return made.to(dtype).to(ranks.HERE.device)


def operands(M, N, K, dtype=torch.bfloat16, seed=0):
    """x and weight of each rank."""
    return [
        tuple(normal(*shape, seed=4 * seed + 2 * rank + i, dtype=dtype) for i, shape in enumerate(((M, K), (N, K))))
        for rank in range(ranks.COUNT)
    ]  # fmt: skip


def total(pairs):
    return sum(x.double() @ w.double().T for x, w in pairs)


def dense(w):
    return w.dequantize() if isinstance(w, gemmery.QuantizedTensor) else w.dense()


def check(got, want, text=""):
    """A result is close to what is wanted, and has the same bits on all ranks."""
    found = [torch.empty_like(got) for _ in range(ranks.COUNT)]
    dist.all_gather(found, got.contiguous())
    assert all(torch.equal(x, found[0]) for x in found), f"{text}: other bits on another rank"
    error = float((got.double() - want).abs().max() / want.abs().max())
    assert error <= CLOSE[got.dtype], f"{text}: {error}"


def used():
    """The names of the schedules of all products that were summed in a kernel and are remembered."""
    plans = [known.plan for known in cache._known.values()]
    return {plan.config.schedule for plan in plans if plan.problem.a.is_summed}


def shapes():
    """Sizes that tiles divide and others, in three types; the same ones again, when they are known."""
    for _ in range(2):
        for seed, (M, N, K, dtype) in enumerate((
            (16, 64, 64, torch.bfloat16), (5, 96, 80, torch.float16), (33, 72, 40, torch.float32),
            (1, 40, 24, torch.bfloat16), (70, 130, 64, torch.bfloat16), (16, 64, 64, torch.bfloat16),
        )):  # fmt: skip
            pairs = operands(M, N, K, dtype, seed)
            x, w = pairs[dist.get_rank()]
            check(ours.linear_all_reduce(x, w), total(pairs), f"{M}x{N}x{K} {dtype}")
            check(ours.matmul_all_reduce(x, w.T), total(pairs))
    assert used()


def integers():
    g = torch.Generator().manual_seed(3)
    pairs = [
        tuple(torch.randint(-127, 128, s, generator=g, dtype=torch.int8).to(ranks.HERE.device) for s in ((16, 64), (32, 64)))
        for _ in range(ranks.COUNT)
    ]  # fmt: skip
    got = ours.linear_all_reduce(*pairs[dist.get_rank()])
    assert got.dtype == torch.int32
    check(got, total(pairs))


def configs(texts, M=40):
    """Each of some configs."""
    pairs = operands(M, 192, 160)
    x, w = pairs[dist.get_rank()]
    for text in texts:
        check(ours.linear_all_reduce(x, w, config=text), total(pairs), text)


def swiglu(acc):
    gate, up = acc.chunk(2, -1)
    return F.silu(gate) * up


def gelu_and_add(acc, residual):
    return F.gelu(acc) + residual


def epilogues():
    """They see the sum; columns in pairs, of halves that no 8 divides; a bias that is added once."""
    for M, N in ((7, 64), (20, 2 * 36), (72, 64)):
        pairs = operands(M, N, 64, torch.float16)
        x, w = pairs[dist.get_rank()]
        bias, residual = normal(N, seed=50, dtype=torch.float16), normal(M, N, seed=51, dtype=torch.float16)
        want = total(pairs)
        check(ours.linear_all_reduce(x, w, bias), want + bias.double())
        got = ours.linear_all_reduce(x, w, bias, epilogue=gelu_and_add, args=(residual,))
        check(got, F.gelu(want + bias.double()) + residual.double())
        check(ours.linear_all_reduce(x, w, epilogue=swiglu), swiglu(want))
        y, rows = ours.linear_all_reduce(x, w, epilogue=lambda acc: (acc, acc.float().square().sum(-1)))
        check(y, want)
        torch.testing.assert_close(rows.double(), want.square().sum(-1), rtol=1e-3, atol=1e-2)
        check(ours.linear_all_reduce(x, w, out_dtype=torch.float32), want)
    batch = normal(2, 3, 64, seed=70 + dist.get_rank())
    w = operands(4, 32, 64)[dist.get_rank()][1]
    found = (
        [torch.empty_like(batch) for _ in range(ranks.COUNT)],
        [torch.empty_like(w) for _ in range(ranks.COUNT)],
    )
    dist.all_gather(found[0], batch)
    dist.all_gather(found[1], w)
    check(
        ours.linear_all_reduce(batch, w), sum(x.double() @ y.double().T for x, y in zip(*found, strict=True))
    )


def batches():
    """Of matrices whose rows do not lie evenly, and infinite sums."""
    rank = dist.get_rank()
    whole = [normal(3, 12, 80, seed=20 + i) for i in range(ranks.COUNT)]
    weights = [normal(48, 64, seed=30 + i) for i in range(ranks.COUNT)]
    parts = [x[:, 1:6, :64] for x in whole]
    want = sum(x.double() @ w.double().T for x, w in zip(parts, weights, strict=True))
    check(ours.linear_all_reduce(parts[rank], weights[rank]), want)
    shared = normal(1, 5, 48, seed=40)
    got = ours.linear_all_reduce(parts[rank], weights[rank], epilogue=lambda acc, y: acc + y, args=(shared,))
    check(got, want + shared.double())
    x, w = operands(16, 32, 64, torch.float32)[rank]
    x[3] = 0 if rank else torch.inf
    made = ours.linear_all_reduce(x, w.abs())
    assert made[3].isposinf().all()
    assert made[:3].isfinite().all()


def packed(kind):
    """Weights whose rows have another scale on each rank, too."""
    pairs = operands(6, 64, 256)
    if kind == "2:4":
        weights = [gemmery.sparsify(w, "2:4") for _, w in pairs]
    elif kind == "act-order":
        order = torch.randperm(256, generator=torch.Generator().manual_seed(1)).to(ranks.HERE.device)
        weights = [gemmery.quantize(w[:, order], "int4", group_size=64) for _, w in pairs]
        weights = [w.with_parts(w.parts() | {"permutation": order.int()}) for w in weights]
    else:
        weights = [
            gemmery.quantize(w, kind, **({"group_size": 64} if kind in ("int4", "nf4") else {}))
            for _, w in pairs
        ]
    if kind in ("e4m3", "int8"):
        assert weights[0].channel is not None
        assert not weights[0].channel.equal(weights[1].channel)
    want = total([(x, dense(w)) for (x, _), w in zip(pairs, weights, strict=True)])
    rank = dist.get_rank()
    for _ in range(2):
        check(ours.linear_all_reduce(pairs[rank][0], weights[rank]), want, kind)


def many():
    """Sizes in a random order, so that products find the places that others have left."""
    draw = torch.Generator().manual_seed(11)
    sizes = [(16, 64, 32), (8, 32, 32), (24, 80, 48), (3, 40, 64), (72, 48, 32)]
    made = [operands(*size, seed=i) for i, size in enumerate(sizes)]
    wants = [total(pairs) for pairs in made]
    for i in torch.randint(len(sizes), (40,), generator=draw).tolist():
        check(ours.linear_all_reduce(*made[i][dist.get_rank()]), wants[i], str(sizes[i]))


def grows():
    """A larger product than before takes new memory, and smaller ones go on."""
    pairs = operands(16, 64, 32)
    x, w = pairs[dist.get_rank()]
    check(ours.linear_all_reduce(x, w), total(pairs))
    (shared,) = exchange._shared[dist.group.WORLD].values()
    memories = shared._memories["sums"]
    size, count = memories[-1].size, len(memories)
    shared.exchange("test", size + 1)
    assert len(memories) == count + 1
    assert memories[-1].size == 2 * size
    check(ours.linear_all_reduce(x, w), total(pairs))
    with pytest.raises(ValueError, match="seconds is 0"):
        ours.set_timeout(0)


def gradients():
    """With gradients it is a product, an all-reduce and the epilogue; so are results that are too large."""
    pairs = operands(6, 32, 48, torch.float32)
    rank = dist.get_rank()
    bias = normal(32, seed=8, dtype=torch.float32)
    whole = [[t.clone().requires_grad_() for t in pair] for pair in pairs]
    want = F.gelu(sum(x @ w.T for x, w in whole) + bias)
    seed = normal(6, 32, seed=9, dtype=torch.float32)
    want.backward(seed)
    x, w = (t.clone().requires_grad_() for t in pairs[rank])
    got = ours.linear_all_reduce(x, w, bias, epilogue=F.gelu)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
    got.backward(seed)
    torch.testing.assert_close(x.grad, whole[rank][0].grad, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(w.grad, whole[rank][1].grad, rtol=1e-4, atol=1e-4)
    # What a function holds may require a gradient, too.
    factor = torch.nn.Parameter(torch.tensor(2.0, device=ranks.HERE.device))
    scaled = ours.linear_all_reduce(*pairs[rank], epilogue=lambda acc: acc * factor)
    torch.testing.assert_close(scaled, 2 * total(pairs).float(), rtol=1e-4, atol=1e-4)
    scaled.sum().backward()
    torch.testing.assert_close(factor.grad, total(pairs).sum().float(), rtol=1e-3, atol=1e-3)
    if ranks.HERE.device == "cuda":
        pairs = operands(1025, 8192, 16)
        check(ours.linear_all_reduce(*pairs[rank]), total(pairs))


def refusals():
    """Errors come before any launch."""
    x, w = operands(4, 16, 32)[dist.get_rank()]
    with pytest.raises(ValueError, match="inner sizes 32 and 16 differ"):
        ours.linear_all_reduce(x, w[:, :16])
    with pytest.raises(TypeError, match="x is a list"):
        ours.linear_all_reduce([1], w)
    with pytest.raises(TypeError, match="weight is a pair"):
        ours.linear_all_reduce(x, (w, w))
    with pytest.raises(TypeError, match="x is a ScaledTensor"):
        ours.linear_all_reduce(gemmery.quantize_activations(x), w)
    check(ours.linear_all_reduce(x, w), total(operands(4, 16, 32)))


def vectors():
    """One row without its dimension."""
    pairs = operands(1, 48, 64)
    rank = dist.get_rank()
    x, w = pairs[rank]
    check(ours.linear_all_reduce(x[0], w), total(pairs)[0])
    weights = [gemmery.quantize(w, "int4", group_size=64) for _, w in pairs]
    want = total([(x, w.dequantize()) for (x, _), w in zip(pairs, weights, strict=True)])
    check(ours.linear_all_reduce(x[0], weights[rank]), want[0])


def failing():
    """A call that fails on one rank: its next one is an error, and the other rank waits in vain."""
    pairs = operands(16, 64, 32)
    rank = dist.get_rank()
    x, w = pairs[rank]
    check(ours.linear_all_reduce(x, w), total(pairs))
    ours.set_timeout(1.0)
    if rank:
        with (
            mock.patch.object(all_reduce, "product", side_effect=torch.OutOfMemoryError("none left")),
            pytest.raises(torch.OutOfMemoryError),
        ):
            ours.linear_all_reduce(x, w)
        with pytest.raises(RuntimeError, match="linear_all_reduce: an earlier call failed on this rank"):
            ours.linear_all_reduce(x, w)
    else:
        assert ours.linear_all_reduce(x, w).isnan().all()
        with pytest.raises(RuntimeError, match="rank 1 of the group did not arrive"):
            ours.linear_all_reduce(x, w)


def late(seconds):
    """One rank after the other comes late."""
    pairs = operands(16, 64, 32)
    for rank in range(ranks.COUNT):
        dist.barrier()
        if rank == dist.get_rank():
            time.sleep(seconds)
        check(ours.linear_all_reduce(*pairs[dist.get_rank()]), total(pairs))
    ours.check()


def missing(seconds):
    """The last rank makes no call: the results of the others are NaN, and the next call is an error."""
    pairs = operands(16, 64, 32)
    rank = dist.get_rank()
    x, w = pairs[rank]
    check(ours.linear_all_reduce(x, w), total(pairs))
    ours.set_timeout(seconds)
    begun = time.monotonic()
    if rank < ranks.COUNT - 1:
        assert ours.linear_all_reduce(x, w).isnan().all()
        with pytest.raises(RuntimeError, match=f"rank {ranks.COUNT - 1} of the group did not arrive"):
            ours.check()
        with pytest.raises(RuntimeError, match="linear_all_reduce: rank 1 of the group did not arrive"):
            ours.linear_all_reduce(x, w)
    return time.monotonic() - begun


#: What both kinds of ranks run as it is.
PRODUCTS = (shapes, integers, epilogues, batches, many, grows, gradients, refusals, vectors)
KINDS = ("int4", "nf4", "e4m3", "int8", "2:4", "act-order")


def graphs():
    """Captured calls, between others, and memory that can't grow meanwhile."""
    pairs = operands(16, 256, 64)
    x, w = pairs[dist.get_rank()]
    other = operands(8, 512, 64, seed=3)
    ours.linear_all_reduce(x, w)
    recorded = torch.cuda.CUDAGraph()
    with torch.cuda.graph(recorded, capture_error_mode="thread_local"):
        results = [ours.linear_all_reduce(x, w) for _ in range(3)]
    for _ in range(20):
        recorded.replay()
        check(ours.linear_all_reduce(*other[dist.get_rank()]), total(other))
        for y in results:
            check(y, total(pairs))
    (shared,) = exchange._shared[dist.group.WORLD].values()
    with (
        pytest.raises(RuntimeError, match="can't be allocated while a graph is captured"),
        torch.cuda.graph(torch.cuda.CUDAGraph(), capture_error_mode="thread_local"),
    ):
        shared.exchange("test", 2 * shared._memories["sums"][-1].size)
