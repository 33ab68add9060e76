"""What test_shards.py runs on each of two ranks: products whose rows are sharded over the ranks, against float64."""

import copy
import gc
import pickle
import time
import weakref

import pytest
import torch
import torch.distributed as dist

import gemmery
import gemmery.nn
from gemmery import devices, epilogues, memo
from gemmery import distributed as ours
from gemmery.distributed import all_reduce, exchange, reduce_scatter
from gemmery.distributed import gathered as of_gathered
from gemmery.distributed import rows as of_rows
from gemmery.product import cache
from tests import ranks
from tests.summed import CLOSE, check, dense, normal


def close(got, want, text=""):
    error = float((got.double() - want).abs().max() / want.abs().max())
    assert error <= CLOSE[got.dtype], f"{text}: {error}"


def own(x, dim=0):
    """A rank's shard."""
    return x.chunk(ranks.COUNT, dim)[dist.get_rank()]


def plans():
    """The cached plans of products that wait for the sums of other ranks."""
    return [x.plan for x in cache._known.values() if x.plan.problem.a.awaits]


def exchanged(kind):
    """How many calls went through the ranks' memory for this kind of data."""
    device = torch.empty(0, device=ranks.HERE.device).device
    found = exchange.shared_by(dist.group.WORLD, device)._memories
    return int(found[kind.name][-1].counters[0]) if kind.name in found else 0


def whole(rows, N, K, dtype=torch.bfloat16, seed=0):
    """x of all ranks, and each rank's weight."""
    scale = ranks.HERE.scale
    x = normal(ranks.COUNT * rows * scale, K * scale, seed=seed, dtype=dtype)
    return x, [normal(N * scale, K * scale, seed=seed + 1 + i, dtype=dtype) for i in range(ranks.COUNT)]


def gathered():
    """Sizes that suit kernels and others, in three types, twice each, so that some are known."""
    rank = dist.get_rank()
    for _ in range(2):
        before = exchanged(exchange.ROWS)
        for rows, N, K, dtype in (
            (64, 48, 64, torch.bfloat16), (128, 40, 48, torch.float16), (64, 72, 40, torch.float32),
            (24, 64, 32, torch.bfloat16), (33, 24, 64, torch.bfloat16), (64, 48, 64, torch.bfloat16),
        ):  # fmt: skip
            x, weights = whole(rows, N, K, dtype)
            w, want = weights[rank], x.double() @ weights[rank].double().T
            close(ours.all_gather_linear(own(x), w), want, f"{rows}x{N}x{K} {dtype}")
            close(ours.all_gather_matmul(own(x), w.T), want)
            strided = torch.empty(x.shape[1], x.shape[0] // 2, dtype=dtype, device=x.device).T
            strided.copy_(own(x))
            close(ours.all_gather_linear(strided, w), want, "transposed shard")
    assert exchanged(exchange.ROWS) - before == 18


def moved():
    """Some of a rank's rows are multiplied together with the other's: any number of them, with rows of arguments."""
    rank = dist.get_rank()
    rows, N, K = 64, 48, 40
    x, weights = whole(rows, N, K)
    w, count = weights[rank], x.shape[0] // ranks.COUNT
    bias, residual = normal(w.shape[0], seed=70), normal(x.shape[0], w.shape[0], seed=71)
    product = x.double() @ w.double().T
    strided = torch.empty(x.shape[1], count, dtype=x.dtype, device=x.device).T
    before = of_gathered.moved_rows
    try:
        for i, number in enumerate((0, 1, 8, 24, count - 1, 8)):
            of_gathered.moved_rows = lambda *_, number=number: number
            of_gathered.ranges.cache_clear()
            for scale in (1, 2):
                delay(i % ranks.COUNT)
                close(ours.all_gather_linear(own(x) * scale, w), product * scale, f"{number} rows moved")
                strided.copy_(own(x)).mul_(scale)
                got = ours.all_gather_linear(strided, w, bias, epilogue=epilogues.residual, args=(residual,))
                close(got, product * scale + bias.double() + residual.double(), f"{number} rows moved")
            got, largest = ours.all_gather_linear(own(x), w, epilogue=with_largest)
            close(got, product)
            close(largest.bfloat16(), product.amax(-1))
            shard, weight = own(x).clone().requires_grad_(), w.clone().requires_grad_()
            ours.all_gather_linear(shard, weight).backward(residual)
            close(weight.grad, residual.double().T @ x.double(), f"{number} rows moved")
            first, last = of_gathered.ranges(
                rank, ranks.COUNT, count, w.shape[0], devices.current(x.device).sms
            )[0]
            assert last - first == count - number
    finally:
        of_gathered.moved_rows = before
        of_gathered.ranges.cache_clear()


def delay(rank):
    """On one of several GPUs, the next rows are sent and placed some milliseconds after the product has begun."""
    shared = exchange.shared_by(dist.group.WORLD, torch.empty(0, device=ranks.HERE.device).device)
    if shared.device.type == "cuda" and shared.rank == rank:
        with shared.beside():
            torch.cuda._sleep(10_000_000)


def scattered():
    """The same of sums; each rank has its rows."""
    rank = dist.get_rank()
    for _ in range(2):
        for rows, N, K, dtype in (
            (64, 48, 64, torch.bfloat16), (128, 40, 48, torch.float16), (64, 72, 40, torch.float32),
            (24, 64, 32, torch.bfloat16), (33, 24, 64, torch.bfloat16), (64, 48, 64, torch.bfloat16),
        ):  # fmt: skip
            pairs = [whole(rows, N, K, dtype, seed=9 * i) for i in range(ranks.COUNT)]
            want = own(sum(x.double() @ w[0].double().T for x, w in pairs))
            x, (w, *_) = pairs[rank]
            close(ours.linear_reduce_scatter(x, w), want, f"{rows}x{N}x{K} {dtype}")
            close(ours.matmul_reduce_scatter(x, w.T), want)
    assert plans()


def behind():
    """Bias and epilogues: of all rows where they are gathered, of the rank's where they are scattered."""
    rank = dist.get_rank()
    pairs = [whole(64, 64, 48, seed=9 * i) for i in range(ranks.COUNT)]
    x, (w, *_) = pairs[rank]
    bias, residual = normal(w.shape[0], seed=70), normal(x.shape[0], w.shape[0], seed=71)
    product = pairs[0][0].double() @ w.double().T
    got = ours.all_gather_linear(own(pairs[0][0]), w, bias, epilogue=epilogues.residual, args=(residual,))
    close(got, product + bias.double() + residual.double())
    total = own(sum(x.double() @ w[0].double().T for x, w in pairs))
    got = ours.linear_reduce_scatter(x, w, bias, epilogue=epilogues.residual, args=(own(residual),))
    close(got, total + bias.double() + own(residual).double())
    # One that halves columns, and one that reduces rows.
    gate, up = product.chunk(2, 1)
    got = ours.all_gather_linear(own(pairs[0][0]), w, epilogue=epilogues.swiglu)
    close(got, torch.nn.functional.silu(gate) * up)
    gate, up = total.chunk(2, 1)
    close(ours.linear_reduce_scatter(x, w, epilogue=epilogues.swiglu), torch.nn.functional.silu(gate) * up)
    got, largest = ours.linear_reduce_scatter(x, w, epilogue=with_largest)
    close(got, total)
    # Partial sums were rounded on their way.
    close(largest.bfloat16(), total.amax(-1))
    assert len(plans()) >= 3
    # Two results, of which each product has some rows.
    got, largest = ours.all_gather_linear(own(pairs[0][0]), w, epilogue=with_largest)
    close(got, product)
    close(largest.bfloat16(), product.amax(-1))
    # What depends on the place in the whole product is computed from the whole.
    before = exchanged(exchange.ROWS)
    got = ours.all_gather_linear(own(pairs[0][0]), w, epilogue=lambda acc, r=residual: acc + r)
    close(got, product + residual.double())
    got = ours.all_gather_linear(own(pairs[0][0]), w, epilogue=epilogues.dropout, args=(0.5, 7))
    assert got.equal(gemmery.linear(pairs[0][0], w, epilogue=epilogues.dropout, args=(0.5, 7)))
    assert exchanged(exchange.ROWS) == before
    with torch.autocast(ranks.HERE.device, torch.bfloat16):
        close(ours.all_gather_linear(own(pairs[0][0]), w.float(), bias), product + bias.double())


def with_largest(acc):
    return acc, acc.amax(-1)


def dimensions():
    """Any dimension but the last one can be sharded, also with arguments that have rows."""
    rank = dist.get_rank()
    weights = [normal(48, 32, seed=i) for i in range(ranks.COUNT)]
    xs = [normal(3, 128, 32, seed=10 + i) for i in range(ranks.COUNT)]
    residual = normal(3, 128, 48, seed=20)
    w, x = weights[rank], xs[rank]
    for dim in (1, -2):
        want = xs[0].double() @ w.double().T
        close(ours.all_gather_linear(own(xs[0], 1), w, gather_dim=dim), want)
        got = ours.all_gather_linear(
            own(xs[0], 1), w, gather_dim=dim, epilogue=epilogues.residual, args=(residual,)
        )
        close(got, want + residual.double())
        total = sum(x.double() @ w.double().T for x, w in zip(xs, weights, strict=True))
        close(ours.linear_reduce_scatter(x, w, scatter_dim=dim), own(total, 1))
        got = ours.linear_reduce_scatter(
            x, w, scatter_dim=dim, epilogue=epilogues.residual, args=(own(residual, 1),)
        )
        close(got, own(total + residual.double(), 1))
    # Arguments that broadcast leave it a batch.
    scale = normal(3, 1, 48, seed=30)
    got = ours.all_gather_linear(own(xs[0], 1), w, gather_dim=1, epilogue=torch.mul, args=(scale,))
    close(got, want * scale.double())
    got = ours.linear_reduce_scatter(x, w, scatter_dim=1, epilogue=torch.mul, args=(scale,))
    close(got, own(total, 1) * scale.double())


def gradients():
    """Those of a block of two layers whose rows are sharded outside, by kernels and by the process group."""
    for rows, dtype in ((64, torch.float32), (33, torch.float32), (64, torch.bfloat16)):
        x = normal(2 * rows, 48, seed=1, dtype=dtype)
        up, down = normal(64, 48, seed=2, dtype=dtype) / 7, normal(48, 64, seed=3, dtype=dtype) / 8
        seed = normal(2 * rows, 48, seed=4, dtype=dtype)
        wide = [t.double().requires_grad_() for t in (x, up, down)]
        y = torch.nn.functional.silu(wide[0] @ wide[1].T) @ wide[2].T
        y.backward(seed.double())
        leaves = [own(x).clone(), own(up).clone(), own(down, 1).clone()]
        leaves = [t.requires_grad_() for t in leaves]
        got = ours.all_gather_linear(leaves[0], leaves[1])
        got = ours.linear_reduce_scatter(torch.nn.functional.silu(got), leaves[2])
        close(got.detach(), own(y.detach()), "forward")
        got.backward(own(seed))
        for name, leaf, grad in zip(["x", "up", "down"], leaves, wide, strict=True):
            want = own(grad.grad, 1 if name == "down" else 0)
            error = float((leaf.grad.double() - want).abs().max() / want.abs().max())
            assert error < (3e-2 if dtype == torch.bfloat16 else 1e-5), f"{rows} {dtype} {name}: {error}"
    # Of a weight that is frozen, and of an input that is.
    frozen = own(up).clone()
    leaf = own(x).clone().requires_grad_()
    ours.all_gather_linear(leaf, frozen).sum().backward()
    assert leaf.grad is not None
    assert frozen.grad is None
    leaf = own(down, 1).clone().requires_grad_()
    ours.linear_reduce_scatter(normal(2 * rows, leaf.shape[1], seed=5, dtype=dtype), leaf).sum().backward()
    assert leaf.grad is not None
    # With an epilogue.
    leaves = [own(x).clone().requires_grad_(), own(up).clone().requires_grad_()]
    got = ours.all_gather_linear(*leaves, epilogue=torch.nn.functional.silu)
    got.sum().backward()
    assert all(leaf.grad is not None for leaf in leaves)


def packed(kind):
    """Packed and sparse weights, also with an activation order."""
    rank = dist.get_rank()
    pairs = [whole(64, 64, 128, seed=9 * i) for i in range(ranks.COUNT)]
    made = [
        gemmery.sparsify(w[0]) if kind == "2:4" else gemmery.quantize(w[0], kind, **({"group_size": 32} if kind == "int4" else {}))
        for _, w in pairs
    ]  # fmt: skip
    x, w = pairs[rank][0], made[rank]
    close(ours.all_gather_linear(own(pairs[0][0]), w), pairs[0][0].double() @ dense(w).double().T)
    total = sum(x.double() @ dense(w).double().T for (x, _), w in zip(pairs, made, strict=True))
    close(ours.linear_reduce_scatter(x, w), own(total))
    assert plans()


def errors():
    x, w = normal(64, 32, seed=1), normal(16, 32, seed=2)
    for function, name in ((ours.all_gather_linear, "gather"), (ours.linear_reduce_scatter, "scatter")):
        with pytest.raises(ValueError, match=f"{name}_dim is 1 and x is"):
            function(x, w, **{f"{name}_dim": 1})
        with pytest.raises(ValueError, match="at least 2 dimensions"):
            function(x[0], w)
        with pytest.raises(TypeError, match="x is a list"):
            function([x], w)
        with pytest.raises(TypeError, match="group is a str; it must be a ProcessGroup"):
            function(x, w, group="default")
        with pytest.raises(ValueError, match="inner sizes 32 and 16 differ"):
            function(x, w[:, :16])
    with pytest.raises(ValueError, match="must be a multiple of the 2 ranks"):
        ours.linear_reduce_scatter(x[:63], w)
    # A group that the other rank is not in.
    alone = [dist.new_group([rank]) for rank in range(ranks.COUNT)]
    for function in (ours.all_gather_linear, ours.linear_reduce_scatter, ours.linear_all_reduce):
        close(function(x, w, group=alone[dist.get_rank()]), x.double() @ w.double().T)
        with pytest.raises(ValueError, match=f"{function.__name__}: this process is not in the group"):
            function(x, w, group=alone[1 - dist.get_rank()])
    # The ranks go on.
    close(ours.all_gather_linear(x, w), torch.cat([x, x]).double() @ w.double().T)


def configs(texts, rows=64, N=128, K=192):
    """Configs that are pinned, gathered and scattered."""
    rank = dist.get_rank()
    pairs = [whole(rows, N, K, seed=9 * i) for i in range(ranks.COUNT)]
    total = own(sum(x.double() @ w[0].double().T for x, w in pairs))
    x, (w, *_) = pairs[rank]
    for text in texts:
        got = ours.all_gather_linear(own(pairs[0][0]), w, config=text)
        close(got, pairs[0][0].double() @ w.double().T, text)
        close(ours.linear_reduce_scatter(x, w, config=text), total, text)
    assert {str(x.config) for x in plans()} >= set(texts)


def repeats():
    """Many calls of two sizes in turn: their rows and sums do not mix, where both are kept or replace each other."""
    rank = dist.get_rank()
    pairs = {rows: [whole(rows, 64, 32, seed=rows + 9 * i) for i in range(ranks.COUNT)] for rows in (64, 128)}
    totals = {rows: own(sum(x.double() @ w[0].double().T for x, w in each)) for rows, each in pairs.items()}
    shared = exchange.shared_by(dist.group.WORLD, pairs[64][0][0].device)
    most = memo.KEPT
    for i in range(12):
        if i == 6:
            memo.KEPT = 1
            for kind in (exchange.ROWS, exchange.PARTIALS):
                shared._memories[kind.name][-1].views.clear()
        rows = (64, 128, 128)[i % 3]
        x, (w, *_) = pairs[rows][rank]
        close(ours.linear_reduce_scatter(x, w), totals[rows], f"call {i}")
        x0 = pairs[rows][0][0] + i
        close(ours.all_gather_linear(own(x0), w), x0.double() @ w.double().T, f"call {i}")
    memo.KEPT = most
    assert {len(shared._memories[kind.name][-1].views) for kind in (exchange.ROWS, exchange.PARTIALS)} == {1}


def late(seconds):
    """One rank comes later, by turns."""
    rank = dist.get_rank()
    pairs = [whole(64, 64, 32, seed=9 * i) for i in range(ranks.COUNT)]
    x, (w, *_) = pairs[rank]
    total = own(sum(x.double() @ w[0].double().T for x, w in pairs))
    for i in range(4):
        if i % 2 == rank:
            time.sleep(seconds)
        close(ours.all_gather_linear(own(pairs[0][0]), w), pairs[0][0].double() @ w.double().T)
        close(ours.linear_reduce_scatter(x, w), total)


def missing(seconds, name):
    """The last rank does not come: an error on the others that says so, within about the time that was set."""
    rank = dist.get_rank()
    x, (w, *_) = whole(64, 64, 32)
    function = getattr(ours, name)
    x = own(x) if name == "all_gather_linear" else x
    function(x, w)
    ours.check()
    if rank == ranks.COUNT - 1:
        dist.barrier()
        return 0.0
    ours.set_timeout(seconds)
    begun = time.monotonic()
    try:
        function(x, w)
        with pytest.raises(RuntimeError, match=f"rank {ranks.COUNT - 1} of the group did not arrive"):
            ours.check()
        with pytest.raises(RuntimeError, match=f"{name}: rank 1 of the group did not arrive"):
            function(x, w)
    finally:
        exchange.Seconds.timeout = 30.0
        dist.barrier()
    return time.monotonic() - begun


def large():
    """More than memory is taken for goes by the process group, as do rows of fp8."""
    x, weights = whole(64, 64, 32)
    most = reduce_scatter.PARTIALS, of_rows.ROWS
    try:
        reduce_scatter.PARTIALS, of_rows.ROWS = (kind._replace(most=64) for kind in most)
        got = ours.linear_reduce_scatter(x, weights[0])
        gathered = ours.all_gather_linear(own(x), weights[0])
    finally:
        reduce_scatter.PARTIALS, of_rows.ROWS = most
    close(got, 2 * own(x.double() @ weights[0].double().T))
    close(gathered, x.double() @ weights[0].double().T)
    x, w = x.to(torch.float8_e4m3fn), weights[0].to(torch.float8_e4m3fn)
    close(ours.all_gather_linear(own(x), w), x.double() @ w.double().T)


def styles():
    """A block whose layers exchange their rows, against the same block on one rank: results and gradients."""
    from torch import nn
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor
    from torch.distributed.tensor.parallel import parallelize_module

    class Own(nn.Linear):
        def forward(self, x):
            return super().forward(x)

    class Block(nn.Module):
        def __init__(self, bias):
            super().__init__()
            self.up = nn.Linear(48, 64, bias=bias)
            self.down = gemmery.nn.Linear(64, 48, bias=bias)

        def forward(self, x):
            return self.down(torch.nn.functional.silu(self.up(x)))

    mesh = init_device_mesh(ranks.HERE.device, (ranks.COUNT,))
    plan = {
        "up": ours.ColwiseParallel(input_layouts=Shard(1), overlap=True),
        "down": ours.RowwiseParallel(output_layouts=Shard(1), overlap=True),
    }
    for bias in (False, True):
        torch.manual_seed(1)
        whole, block = Block(bias).to(ranks.HERE.device), Block(bias).to(ranks.HERE.device)
        block.load_state_dict(whole.state_dict())
        parallelize_module(block, mesh, plan)
        assert "".join(block.state_dict()) == "".join(whole.state_dict())
        x, seed = (normal(2, 128, 48, seed=i, dtype=torch.float32) for i in (5, 6))
        want = whole(x)
        want.backward(seed)
        got = block(own(x, 1))
        close(got.detach(), own(want, 1).detach().double())
        got.backward(own(seed, 1))
        for (name, p), q in zip(whole.named_parameters(), block.parameters(), strict=True):
            close(q.grad.full_tensor(), p.grad.double(), name)
        with torch.no_grad():
            got = block(own(x, 1))
            close(got, own(want, 1).double())
            block.down = pickle.loads(pickle.dumps(block.down))
            assert copy.deepcopy(block)(own(x, 1)).equal(got)
    # Ranks with different numbers of columns; rows that ranks do not divide.
    x, odd = normal(4, 128, 8, seed=8, dtype=torch.float32), nn.Linear(8, 25, device=ranks.HERE.device)
    want = odd(x).detach()
    style = ours.ColwiseParallel(input_layouts=Shard(1), overlap=True, use_local_output=False)
    parallelize_module(odd, mesh, style)
    with torch.no_grad():
        got = odd(own(x, 1))
        assert got.shape == want.shape
        close(got.full_tensor(), want.double())
        with pytest.raises(ValueError, match="its dimension 1 must be a multiple of the 2 ranks"):
            odd(distribute_tensor(x[:, :127], mesh, [Shard(1)]))
    with pytest.raises(
        ValueError, match="the weight has 25 columns; with overlap=True they must be a multiple"
    ):
        parallelize_module(nn.Linear(25, 8), mesh, ours.RowwiseParallel(overlap=True))
    with pytest.raises(
        ValueError, match=r"input_layouts is Replicate\(\); with overlap=True it must be Shard"
    ):
        parallelize_module(nn.Linear(8, 8), mesh, ours.ColwiseParallel(overlap=True))
    with pytest.raises(
        ValueError, match=r"output_layouts is Partial\(sum\); with overlap=True it must be Shard"
    ):
        parallelize_module(
            nn.Linear(8, 8), mesh, ours.RowwiseParallel(output_layouts=Partial(), overlap=True)
        )
    with pytest.raises(
        ValueError, match=r"output_layouts is Replicate\(\); with overlap=True it must be Shard"
    ):
        parallelize_module(nn.Linear(8, 8), mesh, ours.ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate(), overlap=True))  # fmt: skip
    for style in (ours.ColwiseParallel(), ours.RowwiseParallel(overlap=True)):
        name = type(style).__name__
        assert repr(style).startswith(f"{name}(")
        assert repr(style).endswith(f", overlap={style.overlap})")
        with pytest.raises(TypeError, match=f"{name}: MLP is a whole block; use FeedForwardParallel"):
            parallelize_module(gemmery.nn.MLP(8, 16), mesh, style)
    with pytest.raises(TypeError, match="Own; with overlap=True"):
        parallelize_module(Own(8, 8), mesh, ours.RowwiseParallel(output_layouts=Shard(1), overlap=True))


def summing_styles():
    """Layers and blocks whose sum all ranks have, dense and packed, against the same on one rank."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Partial, Shard
    from torch.distributed.tensor.parallel import parallelize_module

    mesh = init_device_mesh(ranks.HERE.device, (ranks.COUNT,))
    how = {"device": ranks.HERE.device, "dtype": torch.bfloat16}
    torch.manual_seed(2)
    block, whole = [gemmery.nn.GatedMLP(64, 128, stacked=False, bias=True, **how) for _ in range(2)]
    whole.load_state_dict(block.state_dict())
    dense = gemmery.nn.Linear(128, 64, **how)
    packed = gemmery.nn.QuantizedLinear(
        gemmery.quantize(dense.weight.detach(), "int4", group_size=64), dense.bias.detach()
    )
    x, wide = normal(2, 64, 64, seed=5), normal(2, 64, 128, seed=6)
    wants = [each(given).detach() for each, given in ((block, x), (dense, wide), (packed, wide))]
    with pytest.raises(
        ValueError, match=r"output_layouts is Partial\(sum\); with overlap=True it must be Shard"
    ):
        parallelize_module(block, mesh, ours.FeedForwardParallel(output_layouts=Partial(), overlap=True))
    parallelize_module(block, mesh, ours.FeedForwardParallel(overlap=True))
    for layer in (dense, packed):
        parallelize_module(layer, mesh, ours.RowwiseParallel(overlap=True))
        assert "SumsOutput" in type(layer).__name__
    with torch.no_grad():
        for got, want in zip((block(x), dense(own(wide, 2)), packed(own(wide, 2))), wants, strict=True):
            check(got, want.double())
        for layer in (dense, packed):
            for made in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
                assert type(made) is type(layer)
                assert made(own(wide, 2)).equal(layer(own(wide, 2)))
    seed = normal(2, 64, 64, seed=7)
    block(x).backward(seed)
    whole(x).backward(seed)
    for (name, p), q in zip(whole.named_parameters(), block.parameters(), strict=True):
        close(q.grad.full_tensor(), p.grad.double(), name)
    scattered = gemmery.nn.GatedMLP(64, 128, stacked=False, **how)
    want = scattered(x).detach()
    sharded = ours.FeedForwardParallel(input_layouts=Shard(1), output_layouts=Shard(1), overlap=True)
    parallelize_module(scattered, mesh, sharded)
    with torch.no_grad():
        close(scattered(own(x, 1)), own(want, 1).double())


def reduced():
    """Sums of many rows that all ranks have: scattered, and their results gathered."""
    rank = dist.get_rank()
    before = all_reduce.BY_ROWS
    try:
        all_reduce.BY_ROWS = 128
        for rows, N, dtype in ((64, 96, torch.bfloat16), (64, 40, torch.float32), (128, 64, torch.bfloat16)):
            pairs = [whole(rows, N, 48, dtype, seed=9 * i) for i in range(ranks.COUNT)]
            total = sum(x.double() @ w[0].double().T for x, w in pairs)
            x, (w, *_) = pairs[rank]
            check(ours.linear_all_reduce(x, w), total)
            residual, bias = normal(x.shape[0], N, seed=70, dtype=dtype), normal(N, seed=71, dtype=dtype)
            got = ours.linear_all_reduce(x, w, bias, epilogue=epilogues.residual, args=(residual,))
            check(got, total + bias.double() + residual.double())
            got, largest = ours.linear_all_reduce(x.view(2, rows, -1), w, epilogue=with_largest)
            check(got.view(2 * rows, -1), total)
            check(largest.view(2 * rows).bfloat16(), total.amax(-1))
            # An epilogue that holds a matrix is part of the one kernel.
            check(
                ours.linear_all_reduce(x, w, epilogue=lambda acc, r=residual: acc + r),
                total + residual.double(),
            )
        dropped = ours.linear_all_reduce(x, w, epilogue=epilogues.dropout, args=(0.5, 7))
    finally:
        all_reduce.BY_ROWS = before
    # The same numbers are drawn whatever way a product goes.
    assert dropped.equal(ours.linear_all_reduce(x, w, epilogue=epilogues.dropout, args=(0.5, 7)))
    assert plans()


def frozen():
    """Gradients of a weight alone, whose rows no product waits for, with a rank that is late."""
    rank = dist.get_rank()
    x, weights = whole(64, 48, 32, torch.float32, seed=5)
    w = weights[rank].clone().requires_grad_()
    seed = normal(x.shape[0], w.shape[0], seed=3, dtype=torch.float32)
    for function, given in ((ours.all_gather_linear, own(x)), (ours.linear_reduce_scatter, x)):
        w.grad, y = None, function(given, w)
        if rank:
            time.sleep(0.3)
        y.backward(seed if y.shape == seed.shape else own(seed))
        close(w.grad, seed.double().T @ x.double())


def contexts():
    """Memory of inference mode serves other calls, too; autocast; epilogues are not kept alive."""
    x, (w, *_) = whole(256, 48, 32)
    total = 2 * own(x.double() @ w.double().T)
    with torch.inference_mode():
        close(ours.all_gather_linear(own(x), w), x.double() @ w.double().T)
        close(ours.linear_reduce_scatter(x, w), total)
    close(ours.all_gather_linear(own(x), w), x.double() @ w.double().T)
    close(ours.linear_reduce_scatter(x, w), total)
    held = []
    for i in range(2):
        residual = normal(*total.shape, seed=i)
        got = ours.linear_reduce_scatter(x, w, epilogue=lambda acc, r=residual: acc + r)
        close(got, total + residual.double())
        held.append(weakref.ref(residual))
    del residual
    gc.collect()
    assert not any(each() is not None for each in held)
    before = all_reduce.BY_ROWS
    try:
        all_reduce.BY_ROWS = 128
        with torch.autocast(x.device.type, torch.bfloat16):
            got = ours.linear_all_reduce(x.float(), w.float())
        assert got.dtype == torch.bfloat16
        close(own(got), total)
    finally:
        all_reduce.BY_ROWS = before


PRODUCTS = (
    gathered, moved, scattered, behind, dimensions, gradients, frozen, contexts, repeats, errors, large, reduced, styles, summing_styles
)  # fmt: skip
KINDS = ("int4", "e4m3", "nf4", "2:4")
