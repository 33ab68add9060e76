"""Sharded products and modules against whole ones, on each of two ranks.

tests/host runs all of it in float64 over gloo, tests/gpu some of it in bf16 over NCCL: see `tests.ranks.Place`. What is
compared with is computed on the CPU, in float64 where no weight is packed.
"""

import copy
import functools
import itertools
import tempfile

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoint
import torch.distributed.tensor.parallel as torch_styles
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import SequenceParallel, parallelize_module

import gemmery
import gemmery.nn
from gemmery import distributed as ours
from gemmery.formats.weight import PackedWeight
from gemmery.product import repeated as known_products
from gemmery.product import sharded as sharded_products
from tests import ranks

R, ROWS, COLUMNS = Replicate(), Shard(0), Shard(1)


@functools.cache
def mesh(*shape):
    names = ("data", "model")[: len(shape)] or None
    return init_device_mesh(ranks.HERE.device, shape or (2,), mesh_dim_names=names)


def sized(*sizes):
    """Sizes of a small case, as they are here."""
    return tuple(n * ranks.HERE.scale for n in sizes)


def values(*shape, seed=0, dtype=None):
    made = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    return made.to(ranks.HERE.device, dtype or ranks.HERE.dtype)


def here(module, dtype=None):
    """A module in the type and on the device of this process."""
    return module.to(ranks.HERE.device, dtype or ranks.HERE.dtype)


def dealt(x, *placements):
    return distribute_tensor(x, mesh(), list(placements))


def results_of(made):
    return list(made) if isinstance(made, tuple) else [made]


def exact(x):
    """A tensor, or a module without packed weights, on the CPU, in float64."""
    if isinstance(x, nn.Module):
        return copy.deepcopy(x).cpu().double()
    return x.detach().cpu().double() if x.is_floating_point() else x.cpu()


def close(got, want, text="", least=1e-9):
    """Compare a result, or the whole of one in parts, with what it is to be, as its type allows.

    Args:
        text: what it is.
        least: the smallest difference that is allowed.
    """
    if isinstance(got, DTensor):
        with torch.no_grad():
            got = got.full_tensor()
    assert got.shape == want.shape, f"{text}: {got.shape} for {want.shape}"
    kind, got, want = got.dtype, exact(got), exact(want)
    # Of rounded numbers, sums that are near zero are as far off as others.
    scale = want.square().mean().sqrt().item() if want.numel() else 0.0
    rtol, of_scale = {torch.float64: (least, 0.0), torch.float32: (1e-4, 1e-4)}.get(kind, (2e-2, 8e-2))
    torch.testing.assert_close(
        got, want, rtol=rtol, atol=least + of_scale * scale, msg=lambda own: f"{text}: {own}" if text else own
    )


def compare(function, tensors, placements, grads=True, reference=None):
    """A function of tensors on whole ones and on DTensors, with the gradients; returns the results' placements.

    Args:
        reference: the function of whole tensors in float64, where it is another one.
    """
    whole = [exact(x).requires_grad_(grads) for x in tensors]
    parts = [dealt(x, p).detach().requires_grad_(grads) for x, p in zip(tensors, placements, strict=True)]
    want, got = results_of((reference or function)(*whole)), results_of(function(*parts))
    assert len(want) == len(got)
    for a, b in zip(got, want, strict=True):
        assert a.dtype == tensors[0].dtype
        close(a, b)
    with torch.no_grad():
        # The second call may be known from the first.
        for _ in range(2):
            for a, b, c in zip(results_of(function(*parts)), want, got, strict=True):
                assert (a.placements, a.dtype, a.shape, a.stride()) == (
                    c.placements,
                    c.dtype,
                    c.shape,
                    c.stride(),
                )
                close(a, b)
    if grads:
        seeds = [values(*x.shape, seed=9, dtype=x.dtype) for x in got]
        wanted = torch.autograd.grad(want, whole, [exact(x) for x in seeds])
        found = torch.autograd.grad([x.full_tensor() for x in got], parts, seeds)
        for i, (a, b) in enumerate(zip(found, wanted, strict=True)):
            close(a, b, f"gradient {i}")
    return [x.placements for x in got]


# ---------------------------------------------------------------------------------------------------------------------
# Products

SHIFTED = gemmery.epilogue(lambda acc, y, number: (torch.relu(acc) * y + number, acc))


def linears(kind):
    """All placements of x and the weight, with a bias and the epilogue's argument."""
    m, n, k = sized(6, 10, 8)
    x, w, b, y = values(m, k), values(n, k, seed=1), values(n, seed=2), values(m, n, seed=3)
    functions = {
        "bare": lambda x, w: gemmery.linear(x, w),
        "bias": lambda x, w, b: gemmery.linear(x, w, b),
        "relu": lambda x, w, b: gemmery.linear(x, w, b, epilogue=torch.relu),
        "args": lambda x, w, b, y: gemmery.linear(x, w, b, epilogue=SHIFTED, args=(y, 0.5)),
    }
    function = functions[kind]
    tensors = [x, w, b, y][: {"bare": 2, "args": 4}.get(kind, 3)]
    found = {}
    for px, pw in itertools.product((R, ROWS, COLUMNS), repeat=2):
        for others in ((R, R), (ROWS, COLUMNS)):
            placements = (px, pw, *others)[: len(tensors)]
            (first, *_) = compare(function, tensors, placements)
            found[f"{px} {pw}"] = str(first[0])
    return found


def unusual():
    """Batches, vectors, sizes that two ranks don't share evenly, and none at all."""
    shapes = (
        ((4, 6, 8), (4, 8, 10)), ((4, 6, 8), (8, 10)), ((6, 8), (4, 8, 10)), ((8,), (4, 8, 10)), ((4, 6, 8), (8,)),
        ((8,), (8,)), ((3, 1, 6, 8), (4, 8, 10)), ((5, 7), (7, 3)), ((1, 7), (7, 1)), ((0, 4), (4, 3)), ((3, 0), (0, 2)),
    )  # fmt: skip
    for a, b in shapes:
        for i, j in itertools.product((None, *range(len(a))), (None, *range(len(b)))):
            placements = [R if k is None else Shard(k) for k in (i, j)]
            compare(gemmery.matmul, [values(*a), values(*b, seed=1)], placements)


def addends():
    """`addmm`, whose addend is added once, and inputs of which each rank has a part of the sum."""
    m, n, k = sized(4, 6, 8)
    tensors = [values(m, n), values(m, k, seed=1), values(k, n, seed=2)]
    for placements in itertools.product((R, ROWS, COLUMNS), repeat=3):
        compare(lambda c, a, b: gemmery.addmm(c, a, b, beta=2, alpha=0.5), tensors, placements)
    c, a, b = tensors
    want = 2 * (exact(c) + exact(a) @ exact(b))
    for place in (R, ROWS, COLUMNS):
        part = DTensor.from_local(a, mesh(), [Partial()])
        close(gemmery.addmm(DTensor.from_local(c, mesh(), [Partial()]), part, dealt(b, place)), want)
    infinite = torch.full_like(c[0], torch.inf)
    made = gemmery.matmul(dealt(a, COLUMNS), dealt(b, ROWS), bias=dealt(infinite, R))
    assert made.full_tensor().isposinf().all()


def two_dimensions():
    """A mesh of two dimensions, of which each shards another dimension of the product, or the same."""
    x, w, b = values(6, 8), values(10, 8, seed=1), values(10, seed=2)
    for shape in ((1, 2), (2, 1)):
        own = mesh(*shape)
        for px, pw in itertools.product(itertools.product((R, ROWS, COLUMNS), repeat=2), repeat=2):
            parts = [distribute_tensor(t, own, list(p)) for t, p in ((x, px), (w, pw), (b, (R, R)))]
            for epilogue in (None, torch.relu):
                want = gemmery.linear(x, w, b, epilogue=epilogue)
                close(gemmery.linear(*parts, epilogue=epilogue), want)


def halves():
    """Gate and up as two weights, with biases, of which each is sharded."""

    def function(x, gate, up, of_gate, of_up, y):
        return gemmery.linear(
            x,
            (gate, up),
            (of_gate, of_up),
            epilogue=lambda acc, y: gemmery.epilogues.swiglu(acc) * y,
            args=(y,),
        )

    m, n, k = sized(4, 6, 8)
    tensors = [values(m, k), values(n, k, seed=1), values(n, k, seed=2), values(n, seed=3), values(n, seed=4)]
    tensors.append(values(m, n, seed=5))
    found = {}
    for px, pw in ((R, ROWS), (ROWS, ROWS), (ROWS, R), (COLUMNS, COLUMNS), (R, COLUMNS)):
        (place,) = compare(function, tensors, (px, pw, pw, R, R, ROWS))
        found[f"{px} {pw}"] = str(place[0])
    return found


def rows_of_results():
    """Epilogues that reduce rows, or halve them, where rows are whole."""
    m, n, k = sized(4, 12, 8)
    x, w = values(m, k), values(n, k, seed=1)
    for epilogue in (
        gemmery.epilogues.swiglu,
        lambda acc: (acc, acc.sum(-1)),
        lambda acc: acc.softmax(-1),
        lambda acc: acc.amax(-1, keepdim=True),
    ):
        for px, pw in ((R, R), (ROWS, R), (COLUMNS, R), (COLUMNS, COLUMNS), (R, COLUMNS)):
            compare(functools.partial(gemmery.linear, epilogue=epilogue), [x, w], (px, pw), grads=False)


FORMATS = {
    "int4": lambda w: gemmery.quantize(w, "int4", group_size=64),
    "zeros": lambda w: gemmery.quantize(w, "int4", group_size=32, symmetric=False),
    "int8": lambda w: gemmery.quantize(w, "int8"),
    "e4m3": lambda w: gemmery.quantize(w, "e4m3"),
    "nf4": lambda w: gemmery.quantize(w, "nf4", group_size=64),
    "2:4": gemmery.sparsify,
    "2:4 int4": lambda w: gemmery.quantize(gemmery.sparsify(w), "int4", group_size=64),
}


def packed(name):
    """A packed weight whose parts are DTensors."""
    x, w = values(6, 256), values(64, 256, seed=1, dtype=torch.bfloat16) / 16
    weight, b = FORMATS[name](w), values(64, seed=2, dtype=torch.bfloat16)
    x, dense = x.bfloat16(), numbers_of(weight)
    for px, pw in itertools.product((R, ROWS, COLUMNS), (R, Shard(-2), Shard(-1))):
        part = ours.distribute_weight(weight, mesh(), [pw])
        assert part.shape == weight.shape
        whole = ours.full_weight(part)
        assert all(x.equal(whole.parts()[key]) for key, x in weight.parts().items())
        for epilogue in (None, torch.relu):

            def function(x, b, w=part, epilogue=epilogue):
                return gemmery.linear(x, w, b, epilogue=epilogue)

            compare(function, [x, b], (px, R), reference=functools.partial(function, w=dense))


def numbers_of(weight):
    """What a packed weight stands for, on the CPU."""
    is_sparse = isinstance(weight, gemmery.SparseTensor)
    return (weight.dense if is_sparse else weight.dequantize)(torch.float64).cpu()


def a_batch_of_packed_weights():
    weight = gemmery.quantize(values(4, 32, 64).bfloat16(), "int8")
    x = values(4, 6, 64, seed=1).bfloat16() / 8
    for px, pw in itertools.product((R, Shard(0), Shard(1)), (R, Shard(0), Shard(1))):
        part = ours.distribute_weight(weight, mesh(), [pw])
        made = gemmery.bmm(dealt(x, px), part)
        close(made, gemmery.bmm(x, weight))


def a_permuted_weight():
    """Act-order: x is brought to the order of the columns, of which each rank needs all."""
    w = gemmery.quantize(values(32, 128).bfloat16(), "int4", group_size=64)
    order = torch.randperm(128, generator=torch.Generator().manual_seed(0))
    weight = w.with_parts(w.parts() | {"permutation": order})
    part = ours.distribute_weight(weight, mesh(), [ROWS])
    x = values(4, 128, seed=1).bfloat16() / 8
    for place in (R, ROWS, COLUMNS):
        made = gemmery.linear(dealt(x, place), part)
        close(made, gemmery.linear(x, weight))


def scaled():
    """8-bit numbers with scales of rows."""
    a, b = (values(*shape, seed=i).mul(9).to(torch.int8) for i, shape in enumerate(((32, 128), (64, 128))))
    sa, sb = (values(n, 1, seed=i, dtype=torch.float32).abs() for i, n in ((2, 32), (3, 64)))
    scale = torch.tensor(0.5, device=a.device)
    for px, pw in itertools.product((R, ROWS, COLUMNS), repeat=2):
        for left, right in ((sa, sb), (scale, sb), (scale, scale)):
            of_scales = [p if p == ROWS and s.dim() else R for p, s in ((px, left), (pw, right))]
            parts = [
                gemmery.ScaledTensor(dealt(x, p), dealt(s, q) if s.dim() else s)
                for x, p, s, q in zip((a, b), (px, pw), (left, right), of_scales, strict=True)
            ]
            made = gemmery.scaled_matmul(*parts, out_dtype=torch.float32)
            assert made.dtype == torch.float32
            close(made, (exact(a.float()) * exact(left)) @ (exact(b.float()) * exact(right)).T)


def others():
    """A prologue, which is elementwise in torch; and a gradient of a gradient."""

    def function(a, b, y):
        return gemmery.matmul(a, b, prologue=lambda a, y: a * y, prologue_args=(y,))

    for pa, pb in ((R, COLUMNS), (ROWS, R), (COLUMNS, ROWS)):
        compare(function, [values(4, 8), values(8, 6, seed=1), values(4, 1, seed=2)], (pa, pb, R))

    tensors = [values(4, 8), values(6, 8, seed=1), values(6, seed=2)]
    for px, pw in itertools.product((R, ROWS, COLUMNS), repeat=2):
        for epilogue in (None, torch.tanh):
            parts = [dealt(x, p) for x, p in zip(tensors, (px, pw, R), strict=True)]
            found = [_second_gradients(x, epilogue) for x in (tensors, parts)]
            for a, b in zip(*found, strict=True):
                close(b, a)


def _second_gradients(tensors, epilogue):
    """Gradients of a function of a linear product's gradients."""
    x, w, b = (t.detach().requires_grad_() for t in tensors)
    grads = torch.autograd.grad(
        gemmery.linear(x, w, b, epilogue=epilogue).square().sum(), (x, w, b), create_graph=True
    )
    return torch.autograd.grad(sum(g.square().sum() for g in grads), (x, w, b))


def _scaled_by(number):
    return lambda acc: acc * number


def repeated():
    """A call like one before is not looked at again; one that differs in a fact is."""
    m, n, k = sized(4, 6, 8)
    x, w, b, y = values(m, k), values(n, k, seed=1), values(n, seed=2), values(m, n, seed=3)
    packed = gemmery.quantize(values(64, 256, dtype=torch.bfloat16) / 16, "int4", group_size=64)
    rows = values(4, 256, dtype=torch.bfloat16)
    calls = {
        "bare": (lambda x, w: gemmery.linear(x, w), (x, w), (R, ROWS)),
        "bias": (lambda x, w, b: gemmery.linear(x, w, b), (x, w, b), (R, ROWS, ROWS)),
        "once": (lambda x, w, b: gemmery.linear(x, w, b), (x, w, b), (COLUMNS, COLUMNS, R)),
        "args": (lambda x, w, y: gemmery.linear(x, w, epilogue=SHIFTED, args=(y, 2.5)), (x, w, y), (R, ROWS, COLUMNS)),
        "pair": (
            lambda x, w, v, b, c: gemmery.linear(x, (w, v), (b, c), epilogue=gemmery.epilogues.swiglu),
            (x, w, w + 1, b, b + 1), (R, ROWS, ROWS, ROWS, ROWS),
        ),
        "addmm": (lambda y, x, w: gemmery.addmm(y, x, w.mT, alpha=2.0, beta=0.5), (y, x, w), (COLUMNS, R, ROWS)),
    }  # fmt: skip
    made = {
        name: (
            functools.partial(f, *[dealt(t, p) for t, p in zip(given, places, strict=True)]),
            f(*map(exact, given)),
        )
        for name, (f, given, places) in calls.items()
    }
    for placement in (Shard(-2), Shard(-1)):
        part = ours.distribute_weight(packed, mesh(), [placement])
        given = dealt(rows, R if placement == Shard(-2) else COLUMNS)
        made[f"packed {placement}"] = (
            functools.partial(gemmery.linear, given, part),
            gemmery.linear(rows, packed),
        )
    looked = []
    known_products._known.clear()
    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        own = sharded_products.sharding_of
        patch.setattr(sharded_products, "sharding_of", lambda call: (looked.append(call.op), own(call))[1])
        for name, (call, want) in made.items():
            for inference in (False, False, True):
                with torch.inference_mode(inference):
                    for x, y in zip(results_of(call()), results_of(want), strict=True):
                        close(x, y)
            assert len(looked) == 1, name
            looked.clear()


def alike():
    """What two calls with the same tensors may differ in."""
    x, w, b = values(4, 8), values(6, 8, seed=1), values(6, seed=2)
    parts = dealt(x, R), dealt(w, ROWS), dealt(b, ROWS)
    with torch.no_grad():
        for _ in range(2):
            for number in (2.0, 3.0):
                got = gemmery.linear(*parts, epilogue=_scaled_by(number))
                close(got, (x @ w.T + b) * number)
            for bias in (None, parts[2]):
                got = gemmery.linear(*parts[:2], bias)
                close(got, x @ w.T + (0 if bias is None else b))
            for alpha in (1, 2.0):
                got = gemmery.addmm(parts[2], parts[0], parts[1].mT, alpha=alpha)
                close(got, alpha * (x @ w.T) + b)
            for dtype in (None, torch.float32):
                got = gemmery.linear(parts[0].float(), parts[1].float(), out_dtype=dtype)
                assert got.dtype == torch.float32
                with torch.autocast("cpu", torch.bfloat16):
                    got = gemmery.linear(parts[0].float(), parts[1].float(), out_dtype=dtype)
                assert got.dtype == got._spec.tensor_meta.dtype == (dtype or torch.bfloat16)
            for own in (mesh(1, 2)["model"], mesh(2, 1)["data"]):
                got = gemmery.linear(distribute_tensor(x, own, [R]), distribute_tensor(w, own, [ROWS]))
                assert got.device_mesh is own
                close(got, x @ w.T)
    weight = parts[1].detach().requires_grad_()
    gemmery.linear(parts[0], weight).sum().backward()
    close(weight.grad, x.sum(0).expand(6, 8))
    with pytest.raises(ValueError, match="out= does not support DTensors"), torch.no_grad():
        gemmery.linear(*parts[:2], out=dealt(x @ w.T, COLUMNS))


def lowered():
    """Under autocast, and in inference mode."""
    x, w = values(4, 8, dtype=torch.float32), values(6, 8, seed=1, dtype=torch.float32)
    parts = dealt(x, R), dealt(w, ROWS)
    with torch.autocast("cpu", torch.bfloat16):
        made = gemmery.linear(*parts)
        want = gemmery.linear(x, w)
    assert made.dtype == torch.bfloat16
    torch.testing.assert_close(made.full_tensor(), want)
    with torch.inference_mode():
        torch.testing.assert_close(gemmery.linear(*parts).full_tensor(), gemmery.linear(x, w))


# ---------------------------------------------------------------------------------------------------------------------
# What is refused


def _random(acc):
    return torch.where(torch.rand_like(acc) > 0.5, acc, 0)


_X, _W = values(4, 8), values(12, 8, seed=1)
_PACKED = gemmery.quantize(values(32, 128).bfloat16(), "int8")
_ROWS = values(4, 128).bfloat16()


def _groups():
    offs = dealt(torch.tensor([2, 4], dtype=torch.int32), R)
    return gemmery.grouped_mm(dealt(_X, R), dealt(values(2, 8, 4), R), offs=offs)


def _blocks():
    a, b = (torch.ones(128, 256).to(torch.float8_e4m3fn) for _ in range(2))
    parts = [
        DTensor.from_local(x, mesh(), [R], run_check=False)
        for x in (a, torch.ones(128, 2), b, torch.ones(1, 2))
    ]
    return gemmery.scaled_matmul(gemmery.ScaledTensor(*parts[:2]), gemmery.ScaledTensor(*parts[2:]))


def _experts(placement=ROWS, count=4, given=None, **others):
    """`experts` of DTensors, with other arguments than usual."""
    x, ids, weights = given or (dealt(_X, R), dealt(torch.zeros(4, 1, dtype=torch.int64), R), None)
    first, down = values(count, 32, 8), values(count, 8, 16, seed=1)
    return gemmery.moe.experts(x, ids, weights, dealt(first, placement), dealt(down, R), **others)


def _plain_experts():
    return _experts(given=(_X, torch.zeros(4, 1, dtype=torch.int64), None))


def _sums_of_rows():
    wanted = torch.zeros(4, 32, 8, dtype=torch.float64)
    return _experts(gate_up_grad=dealt(wanted, R))


def _few_experts():
    return parallelize_module(gemmery.nn.Experts(1, 8, 16), mesh(), ours.ExpertParallel())


def _experts_with_a_norm():
    layer = gemmery.nn.Experts(4, 8, 16)
    layer.norm = nn.LayerNorm(8)
    return parallelize_module(layer, mesh(), ours.ExpertParallel())


def _whole_state_of_experts():
    layer = EXPERTS["int4"]()
    state = copy.deepcopy(layer.state_dict())
    parallelize_module(layer, mesh(), ours.ExpertParallel())
    layer.load_state_dict(state)


def _whole_state():
    layer = nn.Sequential(gemmery.nn.QuantizedLinear(_PACKED))
    state = copy.deepcopy(layer.state_dict())
    parallelize_module(layer, mesh(), {"0": ours.ColwiseParallel()})
    layer.load_state_dict(state)


def _adapter():
    block = _gated()
    block.up = nn.Sequential(block.up)
    return parallelize_module(block, mesh(), ours.FeedForwardParallel())


def _ordered():
    weight = _PACKED.with_parts(_PACKED.parts() | {"permutation": torch.arange(128).flip(0)})
    return ours.distribute_weight(weight, mesh(), [COLUMNS])


def _sparse_linear():
    layer = gemmery.nn.SparseLinear(8, 12)
    return parallelize_module(layer, mesh(), torch_styles.ColwiseParallel())(_X.float())


def _other_mesh():
    own = mesh(1, 2)["model"]
    return gemmery.linear(dealt(_X, R), distribute_tensor(_W, own, [R]))


def _linear(epilogue, px, pw, args=()):
    return gemmery.linear(dealt(_X, px), dealt(_W, pw), epilogue=epilogue, args=args)


def _pair(epilogue, args=()):
    return gemmery.linear(dealt(_X, R), (dealt(_W, ROWS), dealt(_W, ROWS)), epilogue=epilogue, args=args)


def _block(**plan):
    return parallelize_module(gemmery.nn.GatedMLP(8, 16), mesh(), plan)(_X.float())


#: What is called, the error, and what it says.
REFUSALS = {
    "stacked": (lambda: _linear(gemmery.epilogues.swiglu, R, ROWS), ValueError, "no rank has both halves"),
    "reduces": (lambda: _linear(lambda acc: acc.sum(-1), R, ROWS), ValueError, "the epilogue reduces its rows"),
    "softmax": (lambda: _linear(lambda acc: acc.softmax(-1), R, ROWS), ValueError, "the epilogue reduces its rows"),
    "means": (lambda: _linear(lambda acc: acc - acc.mean(), ROWS, R), ValueError, "its rows and the epilogue needs all"),
    "draws": (lambda: _linear(_random, ROWS, R), ValueError, "its rows and the epilogue needs all"),
    "dropout": (
        lambda: _linear(gemmery.epilogues.dropout, R, ROWS, (0.5, 1)), ValueError, "it draws random numbers",
    ),
    "elementwise halves": (lambda: _pair(torch.relu), ValueError, "the epilogue must halve these"),
    "both halves": (lambda: _pair(lambda acc: (gemmery.epilogues.swiglu(acc), acc)), ValueError, "it returns both"),
    "wide argument": (
        lambda: _pair(lambda acc, y: gemmery.epilogues.swiglu(acc + y), (dealt(values(24), R),)), ValueError,
        "as many columns as one half",
    ),
    "mixed": (lambda: gemmery.linear(_X, dealt(_W, R)), TypeError, "weight is a DTensor and x a plain tensor"),
    "mixed bias": (
        lambda: gemmery.linear(dealt(_X, R), dealt(_W, R), values(12)), TypeError, "x is a DTensor and bias a plain",
    ),
    "mixed packed": (
        lambda: gemmery.linear(dealt(_ROWS, R), _PACKED), TypeError, "weight's words a plain tensor.*distribute_weight",
    ),
    "two meshes": (_other_mesh, ValueError, "they must be on the same mesh"),
    "out": (
        lambda: gemmery.linear(dealt(_X, R), dealt(_W, R), out=dealt(values(4, 12), R)), ValueError,
        "out= does not support DTensors",
    ),
    "plan": (lambda: gemmery.plan(dealt(_X, R), dealt(_W.T, R)), ValueError, "plan: a tensor is a DTensor"),
    "groups": (_groups, ValueError, "can't have groups"),
    "experts of plain tokens": (_plain_experts, TypeError, "experts: gate_up is a DTensor and x a plain tensor"),
    "rows of experts": (lambda: _experts(Shard(1)), ValueError, "must be sharded along the experts"),
    "too few experts": (lambda: _experts(count=1), ValueError, "leaves a rank without one"),
    "too few experts' style": (_few_experts, ValueError, "leaves a rank without one"),
    "sums of experts": (_sums_of_rows, ValueError, "gate_up_grad is placed .*must be placed as the gradient is"),
    "a whole state of experts": (_whole_state_of_experts, ValueError, "gate_up_proj: one of .* consists of DTensors"),
    "experts with a norm": (_experts_with_a_norm, ValueError, "norm.bias is a parameter of all experts"),
    "experts' style": (
        lambda: parallelize_module(gemmery.nn.Linear(8, 16), mesh(), ours.ExpertParallel()), TypeError,
        "ExpertParallel: module is a Linear",
    ),
    "quantize": (lambda: gemmery.quantize(dealt(_W, ROWS), "int8"), TypeError, r"quantize: w is sharded \(a DTensor\)"),
    "quantize sparse": (
        lambda: gemmery.quantize(
            ours.distribute_weight(gemmery.sparsify(values(64, 128).bfloat16()), mesh(), [ROWS]), "int8"
        ),
        TypeError, r"quantize: w is sharded \(a DTensor\)",
    ),
    "sparsify": (lambda: gemmery.sparsify(dealt(_W, ROWS)), TypeError, r"sparsify: weight is sharded \(a DTensor\)"),
    "block-sparse": (
        lambda: gemmery.matmul(dealt(values(4, 16, dtype=torch.float32), R), torch.eye(16).to_sparse_bsr((16, 16))), ValueError, "block-sparse",
    ),
    "scales of blocks": (_blocks, ValueError, "scales of blocks"),
    "strips": (
        lambda: ours.distribute_weight(gemmery.quantize(values(48, 64).bfloat16(), "int8"), mesh(), [Shard(-2)]),
        ValueError, "48 rows and is sharded into 2 parts; each must have a multiple of 16",
    ),
    "words": (
        lambda: ours.distribute_weight(gemmery.quantize(values(32, 96).bfloat16(), "int8"), mesh(), [Shard(-1)]),
        ValueError, "96 columns and is sharded into 2 parts; each must have a multiple of 32",
    ),
    "words by x": (
        lambda: gemmery.linear(
            dealt(_ROWS[:, :96], COLUMNS),
            ours.distribute_weight(gemmery.quantize(values(32, 96).bfloat16(), "int8"), mesh(), [R]),
        ),
        ValueError, "weight has 96 columns and is sharded into 2 parts",
    ),
    "act-order": (_ordered, ValueError, "it can be sharded by its rows alone"),
    "a plain weight": (lambda: ours.distribute_weight(_W, mesh(), [R]), TypeError, "it must be a QuantizedTensor"),
    "twice": (
        lambda: ours.distribute_weight(ours.distribute_weight(_PACKED, mesh(), [R]), mesh(), [R]), ValueError,
        "is distributed already",
    ),
    "a partial weight": (lambda: ours.distribute_weight(_PACKED, mesh(), [Partial()]), ValueError, "a placement is"),
    "two placements": (lambda: ours.distribute_weight(_PACKED, mesh(), [R, R]), ValueError, "for a mesh of 1 dim"),
    "torch's distribute_tensor": (
        lambda: distribute_tensor(_PACKED, mesh(), [ROWS]), NotImplementedError, "gemmery.distributed shards it",
    ),
    "torch's style": (
        lambda: parallelize_module(gemmery.nn.QuantizedLinear(_PACKED), mesh(), torch_styles.ColwiseParallel()),
        NotImplementedError, "only support nn.Linear",
    ),
    "FSDP of packed weights": (
        lambda: fully_shard(gemmery.nn.QuantizedLinear(_PACKED), mesh=mesh()), NotImplementedError, "ignored_params",
    ),
    "SparseLinear": (_sparse_linear, ValueError, "can't be tensor-parallel"),
    "a whole state": (_whole_state, ValueError, "0.weight: one of .* consists of DTensors; both must be sharded alike"),
    "stacked block": (
        lambda: _block(gate_up=torch_styles.ColwiseParallel(), down=torch_styles.RowwiseParallel()), ValueError,
        "gate_up returns 16 columns and the block has 32",
    ),
    "stacked block's style": (
        lambda: parallelize_module(gemmery.nn.GatedMLP(8, 16), mesh(), ours.FeedForwardParallel()), ValueError,
        "make it with stacked=False",
    ),
    "a block with an adapter": (_adapter, TypeError, "up is a Sequential; it must be a Linear"),
    "a layer's style": (
        lambda: parallelize_module(gemmery.nn.Linear(8, 16), mesh(), ours.FeedForwardParallel()), TypeError,
        "module is a Linear",
    ),
}  # fmt: skip


def refusal(name):
    """The type and the text of what a call raises."""
    function, *_ = REFUSALS[name]
    try:
        function()
    except (ValueError, TypeError, NotImplementedError) as error:
        return type(error), str(error)
    return None, ""


# ---------------------------------------------------------------------------------------------------------------------
# Modules


def is_packed(module):
    return any(isinstance(x, PackedWeight) for x in module.parameters())


def reference_of(module):
    """A module on the CPU, in float64 if no weight is packed, and what makes inputs for it."""
    if not is_packed(module):
        return exact(module), exact
    return copy.deepcopy(module).cpu(), lambda x: x.detach().cpu()


def compare_modules(whole, part, x, local=lambda x: x):
    """Results and gradients of a module and of the same in parts."""
    whole, given = reference_of(whole)
    xs = [given(x).requires_grad_(), x.clone().requires_grad_()]
    want, got = whole(xs[0]), part(xs[1])
    assert got.dtype == x.dtype
    close(got, local(want))
    with torch.no_grad():
        close(part(xs[1]), local(want))
    seed = values(*want.shape, seed=9, dtype=got.dtype)
    names = [name for name, p in whole.named_parameters() if p.requires_grad]
    wanted = torch.autograd.grad(want, [xs[0], *[whole.get_parameter(n) for n in names]], given(seed))
    found = torch.autograd.grad(got, [xs[1], *[part.get_parameter(n) for n in names]], local(seed))
    for name, a, b in zip(("input", *names), found, wanted, strict=True):
        close(a, b, name)


def _sequential():
    own, hidden = sized(16, 24)
    return nn.Sequential(gemmery.nn.Linear(own, hidden), nn.ReLU(), gemmery.nn.Linear(hidden, own))


def _mlp():
    return gemmery.nn.MLP(*sized(16, 24))


def _gated():
    return gemmery.nn.GatedMLP(*sized(16, 24), stacked=False, bias=True)


def _odd():
    own, hidden = sized(16, 24)
    return gemmery.nn.GatedMLP(own, hidden + 1, stacked=False)


def plans(styles):
    column, row = styles.ColwiseParallel, styles.RowwiseParallel
    return {
        _sequential: {"0": column(), "2": row()},
        _mlp: {"up": column(), "down": row()},
        _gated: {"gate": column(), "up": column(), "down": row()},
    }


BLOCKS = {
    _mlp: ours.FeedForwardParallel(),
    _gated: ours.FeedForwardParallel(),
    _odd: ours.FeedForwardParallel(),
}
PLANS = {"torch": plans(torch_styles), "ours": plans(ours), "blocks": BLOCKS}


def tensor_parallel(which):
    for make, plan in PLANS[which].items():
        torch.manual_seed(0)
        whole = here(make())
        part = parallelize_module(copy.deepcopy(whole), mesh(), plan)
        assert which != "blocks" or part.fused_product() is not None
        compare_modules(whole, part, values(2, 6, *sized(16)))


def compiled(which, backend="aot_eager"):
    """Code that torch.compile traces without a break: modules, and a packed layer."""
    torch.manual_seed(0)
    if which in FORMATS:
        layer = gemmery.nn.PrunedLinear if which == "2:4" else gemmery.nn.QuantizedLinear
        weight = FORMATS[which](values(64, 256, dtype=torch.bfloat16) / 16)
        whole = nn.Sequential(layer(weight, values(64, dtype=torch.bfloat16)))
        style, x = {"0": ours.ColwiseParallel()}, values(4, 256, dtype=torch.bfloat16)
        local = functools.partial(_own, dim=-1)
    else:
        make, style = list(PLANS[which].items())[-1]
        whole, x, local = here(make()), values(2, 6, *sized(16)), lambda x: x
    part = parallelize_module(copy.deepcopy(whole), mesh(), style)
    run = torch.compile(part, backend=backend, fullgraph=True)
    run.get_parameter = part.get_parameter
    compare_modules(whole, run, x, local)
    torch.compiler.reset()


def _own(x, dim):
    """This rank's part."""
    return x.chunk(2, dim)[dist.get_rank()]


def compiled_products():
    """Epilogues, behind whole sums and parts of them, and an error that says what it says in eager mode."""

    def function(x, w, b):
        return gemmery.linear(x, w, b, epilogue=torch.relu)

    w, b = values(6, 8, seed=1), values(6, seed=2)
    run = torch.compile(function, backend="aot_eager", fullgraph=True, dynamic=True)
    for rows, (px, pw) in itertools.product((4, 6), ((R, ROWS), (COLUMNS, COLUMNS))):
        x = values(rows, 8)
        made = run(dealt(x, px), dealt(w, pw), dealt(b, R))
        close(made, function(x, w, b))
        assert made.placements == ((COLUMNS,) if pw == ROWS else (R,))
    stacked = torch.compile(
        functools.partial(gemmery.linear, epilogue=gemmery.epilogues.swiglu),
        backend="aot_eager",
        fullgraph=True,
    )
    with pytest.raises(torch._dynamo.exc.Unsupported, match="no rank has both halves"):
        stacked(dealt(x, R), dealt(w, ROWS))
    torch.compiler.reset()


def a_sharded_sequence():
    """Input and output sharded along the sequence: all-gather before the block, reduce-scatter behind it."""
    torch.manual_seed(0)
    whole = here(_gated())
    part = copy.deepcopy(whole)
    style = ours.FeedForwardParallel(input_layouts=Shard(1), output_layouts=Shard(1))
    parallelize_module(part, mesh(), style)
    x = values(2, 6, *sized(16))
    close(part(_own(x, 1)), _own(exact(whole)(exact(x)), 1))


def packed_layers(formats=("int8", "int4", "2:4")):
    """Quantised and pruned layers, by gemmery's styles."""
    for name in formats:
        torch.manual_seed(0)
        plain = here(nn.Linear(128, 64), torch.bfloat16)
        layer = (
            gemmery.nn.PrunedLinear.from_linear(plain)
            if name == "2:4"
            else gemmery.nn.QuantizedLinear.from_linear(
                plain, name, **({"group_size": 64} if name == "int4" else {})
            )
        )
        whole = nn.Sequential(layer)
        for style in (ours.ColwiseParallel(output_layouts=R), ours.RowwiseParallel(input_layouts=R)):
            part = parallelize_module(copy.deepcopy(whole), mesh(), {"0": style})
            assert copy.deepcopy(part)[0].weight.shape == whole[0].weight.shape
            compare_modules(whole, part, values(4, 128, dtype=torch.bfloat16))
    whole = here(nn.Sequential(gemmery.nn.GatedMLP(64, 128, stacked=False)), torch.bfloat16)
    assert gemmery.nn.quantize(whole, "int8") == 3
    part = parallelize_module(copy.deepcopy(whole), mesh(), {"0": ours.FeedForwardParallel()})
    compare_modules(whole, part, values(4, 64, dtype=torch.bfloat16))


def fully_sharded(is_compiled):
    """FSDP2 of whole blocks, and of each of their layers."""
    own, hidden = sized(16, 24)
    makes = {
        _sequential: ranks.HERE.dtype,
        _gated: ranks.HERE.dtype,
        (lambda: gemmery.nn.GatedMLP(own, hidden)): ranks.HERE.dtype,
        (lambda: nn.Sequential(gemmery.nn.SparseLinear(own, hidden))): torch.float32,
    }
    for (make, dtype), each in itertools.product(makes.items(), (False, True)):
        torch.manual_seed(0)
        whole = here(make(), dtype)
        part = copy.deepcopy(whole)
        for layer in list(part.children()) if each else ():
            if list(layer.parameters()):
                fully_shard(layer, mesh=mesh())
        fully_shard(part, mesh=mesh())
        run = torch.compile(part, backend="aot_eager") if is_compiled else part
        x = values(4, 6, own, dtype=dtype)
        # Which numbers a sparse layer keeps is a matter of its type.
        whole = exact(whole) if dtype != torch.float32 else copy.deepcopy(whole).cpu()
        want, got = whole(x.to("cpu", next(whole.parameters()).dtype)), run(x)
        close(got, want)
        want.square().mean().backward()
        got.square().mean().backward()
        for name, p in whole.named_parameters():
            close(part.get_parameter(name).grad, p.grad, name)
        torch.compiler.reset()


def experts_and_a_way_back():
    """FSDP2 of experts; and `undo` of a swap behind which the model was sharded."""
    torch.manual_seed(0)
    whole = gemmery.nn.Experts(4, 8, 16)
    part = copy.deepcopy(whole)
    fully_shard(part, mesh=mesh())
    given = values(6, 8, dtype=torch.float32), torch.arange(12).view(6, 2) % 4, torch.full((6, 2), 0.5)
    for module in (whole, part):
        module(*given).square().sum().backward()
    for a, b in zip(part.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(a.grad.full_tensor(), b.grad)

    whole = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 8)).double()
    part = copy.deepcopy(whole)
    report = gemmery.nn.swap(part, precision="ieee")
    parallelize_module(
        part, mesh(), {"0": torch_styles.ColwiseParallel(), "1": torch_styles.RowwiseParallel()}
    )
    close(part(values(4, 8)), whole(values(4, 8)))
    report.undo()
    assert type(part[0]) is nn.Linear
    close(part(values(4, 8)), whole(values(4, 8)))


def a_packed_layer_that_fsdp_ignores():
    torch.manual_seed(0)
    whole = nn.Sequential(gemmery.nn.QuantizedLinear.from_linear(nn.Linear(64, 32), "int8"))
    part = copy.deepcopy(whole)
    fully_shard(part, mesh=mesh(), ignored_params={part[0].weight})
    assert isinstance(part[0].bias, DTensor)
    x = values(4, 64, dtype=torch.float32)
    torch.testing.assert_close(part(x), whole(x))


def both_kinds():
    """Tensor parallelism inside FSDP2, on a mesh of two dimensions, and a step of an optimiser."""
    for shape in ((1, 2), (2, 1)):
        torch.manual_seed(0)
        whole = here(nn.Sequential(_gated(), _gated()), torch.float64)
        part, own = copy.deepcopy(whole), mesh(*shape)
        parallelize_module(part, own["model"], {"*": ours.FeedForwardParallel()})
        for layer in part:
            fully_shard(layer, mesh=own["data"])
        fully_shard(part, mesh=own["data"])
        x = values(4, *sized(16), dtype=torch.float64)
        steps = [torch.optim.AdamW(m.parameters(), lr=0.1) for m in (whole, part)]
        for _ in range(2):
            for module, step in zip((whole, part), steps, strict=True):
                step.zero_grad()
                module(x).square().sum().backward()
                step.step()
        torch.testing.assert_close(part(x), whole(x), rtol=1e-6, atol=1e-6)


def replicated_parameters():
    """A sharded sequence makes partial gradients of a layer that all ranks have; an optimiser's step adds them up."""
    torch.manual_seed(0)
    own, outputs = sized(16, 8)
    whole = here(gemmery.nn.Linear(own, outputs))
    part, whole = copy.deepcopy(whole), exact(whole)
    for name, parameter in list(part.named_parameters()):
        setattr(part, name, nn.Parameter(dealt(parameter.detach(), R)))
    x = values(6, own)
    for module, given in ((whole, exact(x)), (part, dealt(x, ROWS))):
        step = torch.optim.SGD(module.parameters(), lr=0.1)
        module(given).sum().backward()
        step.step()
    close(part.weight, whole.weight)
    close(part.bias, whole.bias)


# ---------------------------------------------------------------------------------------------------------------------
# Experts


def choices(tokens=(6,), count=4, k=2):
    """What tokens have chosen, ids among it that there are not, and the weights of the router."""
    generator = torch.Generator().manual_seed(5)
    ids = torch.randint(-1, count + 1, (*tokens, k), generator=generator).to(ranks.HERE.device)
    weights = torch.rand(*tokens, k, generator=generator, dtype=torch.float64)
    return ids, weights.to(ranks.HERE.device, ranks.HERE.dtype)


def packed_experts(pack):
    first, down = (values(4, 128, 64, seed=i, dtype=torch.bfloat16) / 8 for i in (1, 2))
    biases = values(4, 128, seed=3, dtype=torch.bfloat16), values(4, 64, seed=4, dtype=torch.bfloat16)
    return gemmery.nn.Experts.of(pack(first), pack(down.mT[:, :, :64].contiguous()), *biases)


def _experts_of(count, **how):
    return lambda: here(gemmery.nn.Experts(count, *sized(16, 24), **how))


EXPERTS = {
    "gated": _experts_of(4),
    "biases": _experts_of(5, bias=True, activation="gelu"),
    "ungated": _experts_of(2, bias=True, gated=False, activation="relu_squared"),
    "int4": lambda: packed_experts(FORMATS["int4"]),
    "mxfp4": lambda: packed_experts(lambda w: gemmery.quantize(w, "mxfp4")),
    "2:4": lambda: packed_experts(FORMATS["2:4"]),
}


def _of_experts(name):
    """A module, its parts, and what both are given."""
    torch.manual_seed(0)
    whole = EXPERTS[name]()
    part = parallelize_module(copy.deepcopy(whole), mesh(), ours.ExpertParallel())
    ids, weights = choices((3, 2), whole.num_experts)
    x = values(3, 2, whole.in_features)
    if whole.packed:
        return whole, part, (x.bfloat16(), ids, weights.float())
    return whole, part, (x, ids, weights)


def compare_experts(whole, part, given, run=None):
    """Results and gradients of experts, and of the same of which each rank has some."""
    results = []
    whole, own = reference_of(whole)
    for module, call, (x, ids, weights) in (
        (whole, whole, [own(x) if x.is_floating_point() else x.cpu() for x in given]),
        (part, part if run is None else run, given),
    ):
        x, weights = x.clone().requires_grad_(), weights.clone().requires_grad_()
        y = call(x, ids, top_k_weights=weights)
        names = [name for name, p in module.named_parameters() if p.requires_grad]
        inputs = [x, weights, *[module.get_parameter(name) for name in names]]
        grads = torch.autograd.grad(y, inputs, values(*y.shape, seed=9).to(y))
        results.append([("result", y), *zip(("x", "weights", *names), grads, strict=True)])
        with torch.no_grad():
            results[-1].append(("without gradients", call(x, ids, weights)))
    for (name, want), (_, got) in zip(*results, strict=True):
        close(got, want, name, 1e-9 if run is None else 1e-6)


def expert_parallel(name):
    """Each rank holds a range of experts, and 3 of 5 are on the first."""
    whole, part, given = _of_experts(name)
    compare_experts(whole, part, given)
    held = (
        part.down_proj.words
        if name in ("int4", "mxfp4")
        else part.down_proj.values
        if name == "2:4"
        else part.down_proj
    )
    count = whole.num_experts
    assert held.to_local().shape[0] == (-(-count // 2), count // 2)[dist.get_rank()]
    with torch.no_grad():
        x, ids, _ = given
        close(part(x, ids, None), whole(x, ids, None))
        # A rank whose experts nobody has chosen.
        first = torch.zeros_like(ids)
        close(part(x, first, None), whole(x, first, None))


def compiled_experts(name):
    whole, part, given = _of_experts(name)
    # The compiler can't follow how a packed weight is made of parts.
    run = torch.compile(part, backend="aot_eager", fullgraph=not whole.packed)
    compare_experts(whole, part, given, run)
    torch.compiler.reset()


def experts_of_a_sharded_sequence():
    """Tokens are gathered before the experts, and their sums scattered behind them."""
    module = EXPERTS["gated"]()
    whole = exact(module)
    for dim in (0, 1):
        style = ours.ExpertParallel(input_layouts=Shard(dim), output_layouts=Shard(dim))
        part = parallelize_module(copy.deepcopy(module), mesh(), style)
        whole.zero_grad()
        given = values(4, 6, whole.in_features), *choices((4, 6))
        xs = [exact(given[0]).requires_grad_(), _own(given[0], dim).clone().requires_grad_()]
        want = whole(xs[0], *[exact(x) if x.is_floating_point() else x.cpu() for x in given[1:]])
        got = part(xs[1], *[_own(x, dim) for x in given[1:]])
        close(got, _own(want, dim))
        want.square().mean().backward()
        (got.square().sum() / want.numel()).backward()
        close(xs[1].grad, _own(xs[0].grad, dim))
        close(part.down_proj.grad, whole.down_proj.grad)


def placements_of_experts():
    """The function, of weights and tokens in all placements, also on a mesh of two dimensions, one for each."""
    x, gate, up, down = values(5, 3, 8), *[values(4, 12, 8, seed=i) for i in (1, 2)], values(4, 8, 12, seed=3)
    ids, weights = choices((5, 3))

    def function(x, weights, gate, up, down, ids):
        return gemmery.moe.experts(x, ids.to(x.device), weights, (gate, up), down)

    tensors = [x, weights, gate, up, down]
    for tokens, experts in itertools.product((R, Shard(0), Shard(1)), (R, Shard(0))):
        own = dealt(ids, tokens)

        def call(*given, own=own):
            return function(*given, own if isinstance(given[0], DTensor) else ids)

        (place,) = compare(call, tensors, (tokens, tokens, experts, experts, R))
        assert place == ((Partial(),) if experts == Shard(0) else (tokens,))
    for shape in ((1, 2), (2, 1)):
        both = mesh(*shape)
        parts = [distribute_tensor(t, both, [Shard(0), R]) for t in (x, weights)]
        parts += [distribute_tensor(t, both, [R, Shard(0)]) for t in (gate, up, down)]
        made = function(*parts, distribute_tensor(ids, both, [Shard(0), R]))
        assert made.placements == (Shard(0), Partial())
        close(made, function(*tensors, ids))


def sums_of_experts():
    """Gradients of weights that are added to `main_grad`, of which each rank has its part."""
    torch.manual_seed(0)
    whole = EXPERTS["gated"]()
    part = parallelize_module(copy.deepcopy(whole), mesh(), ours.ExpertParallel())
    given = values(6, whole.in_features), *choices()
    for module in (whole, part):
        module.fuse_wgrad_accumulation = True
        for parameter in module.parameters():
            parameter.main_grad = torch.zeros_like(parameter.detach())
        for _ in range(2):
            module(*given).square().sum().backward()
    for a, b in zip(part.parameters(), whole.parameters(), strict=True):
        assert a.grad is None
        close(a.main_grad, b.main_grad)


def states_of_experts(name):
    """State dicts of experts: written in parts, and read whole, and in parts."""
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folder)
    whole, part, given = _of_experts(name)
    checkpoint.save(ours.flat_state_dict(part), checkpoint_id=folder[0])
    want = whole(*given)
    for style in (None, ours.ExpertParallel()):
        torch.manual_seed(1)
        other = EXPERTS[name]()
        with torch.no_grad():
            other.down_proj_bias.fill_(7)
        assert not torch.allclose(other(*given), want)
        if style is not None:
            parallelize_module(other, mesh(), style)
        state = ours.flat_state_dict(other)
        checkpoint.load(state, checkpoint_id=folder[0])
        ours.load_flat_state_dict(other, state)
        close(other(*given), want)
    again = parallelize_module(EXPERTS[name](), mesh(), ours.ExpertParallel())
    again.load_state_dict(part.state_dict())
    close(again(*given), want)


def experts_of_a_model(change):
    """Experts of a Hugging Face model that are replaced before the model is sharded."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        hidden_size=64, intermediate_size=128, moe_intermediate_size=64, num_hidden_layers=1, num_experts=4,
        num_experts_per_tok=2, num_attention_heads=4, num_key_value_heads=4, vocab_size=64,
    )  # fmt: skip
    model = Qwen3MoeForCausalLM(config).bfloat16().eval()
    CHANGES[change](model)
    ids = torch.arange(10).unsqueeze(0)
    with torch.no_grad():
        want = model(ids).logits
        parallelize_module(model, mesh(), {"model.layers.*.mlp.experts": ours.ExpertParallel()})
        experts = model.model.layers[0].mlp.experts
        assert type(experts).__name__ == ("FusedExperts" if change == "swap" else "Experts")
        down = experts.down_proj
        held = down if change == "swap" else next(iter(down.parts().values()))
        assert held.to_local().shape[0] == 2
        close(model(ids).logits, want)


def experts_that_are_sharded(change):
    """They are left alone."""
    sharded = nn.Sequential(gemmery.nn.Experts(4, 64, 64).bfloat16())
    for name, parameter in list(sharded[0].named_parameters()):
        setattr(sharded[0], name, nn.Parameter(dealt(parameter.detach(), ROWS)))
    report = CHANGES[change](sharded)
    return len(report), report.left


def experts_in_fsdp():
    """Experts that are sharded over one dimension of the mesh, inside FSDP2 over the other."""
    for shape in ((1, 2), (2, 1)):
        torch.manual_seed(0)
        whole, own = nn.Sequential(EXPERTS["biases"]()), mesh(*shape)
        part = copy.deepcopy(whole)
        parallelize_module(part, own["model"], {"0": ours.ExpertParallel()})
        fully_shard(part[0], mesh=own["data"])
        fully_shard(part, mesh=own["data"])
        given = values(6, 16), *choices((6,), 5)
        for module in (whole, part):
            module[0](*given).square().sum().backward()
        for a, b in zip(part.parameters(), whole.parameters(), strict=True):
            close(a.grad, b.grad)


# ---------------------------------------------------------------------------------------------------------------------
# Models, and their state


def checkpoints():
    """A state dict is written in parts, and read by one process's model, and by parts of another kind."""
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folder)
    torch.manual_seed(0)
    whole = here(_sequential())
    x = values(4, *sized(16))
    part = parallelize_module(copy.deepcopy(whole), mesh(), plans(torch_styles)[_sequential])
    checkpoint.save(part.state_dict(), checkpoint_id=f"{folder[0]}/plain")
    for sharded in (False, True):
        other = here(_sequential())
        if sharded:
            fully_shard(other, mesh=mesh())
        state = other.state_dict()
        checkpoint.load(state, checkpoint_id=f"{folder[0]}/plain")
        other.load_state_dict(state)
        close(other(x), whole(x))


def packed_checkpoints():
    """The same of packed weights, by the tensors that they consist of."""
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folder)

    def make(name):
        return nn.Sequential(
            gemmery.nn.QuantizedLinear(
                FORMATS[name](values(64, 128, seed=int(name == "int4"), dtype=torch.bfloat16))
            )
        )

    style = {"0": ours.ColwiseParallel(output_layouts=R)}
    torch.manual_seed(0)
    x = values(4, 128, dtype=torch.bfloat16)
    whole = make("int8")
    want = whole(x)
    part = parallelize_module(copy.deepcopy(whole), mesh(), style)
    checkpoint.save(ours.flat_state_dict(part), checkpoint_id=f"{folder[0]}/packed")
    for sharded in (False, True):
        other = nn.Sequential(
            gemmery.nn.QuantizedLinear(
                gemmery.quantize(values(64, 128, seed=5, dtype=torch.bfloat16), "int8")
            )
        )
        if sharded:
            parallelize_module(other, mesh(), {"0": ours.RowwiseParallel(input_layouts=R)})
        state = ours.flat_state_dict(other)
        checkpoint.load(state, checkpoint_id=f"{folder[0]}/packed")
        ours.load_flat_state_dict(other, state)
        found = ours.full_weight(other[0].weight).parts()
        assert all(x.equal(found[key]) for key, x in whole[0].weight.parts().items())
        assert other(x).shape == want.shape
    with pytest.raises(ValueError, match=r"0.weight is \{'format': 'int8'"):
        ours.load_flat_state_dict(make("int4"), ours.flat_state_dict(whole))
    # A rank's own file, of torch.save.
    file = f"{folder[0]}/own{dist.get_rank()}"
    torch.save(part.state_dict(), file)
    again = parallelize_module(make("int8"), mesh(), style)
    again.load_state_dict(torch.load(file, weights_only=True))
    torch.testing.assert_close(again(x), want, rtol=0, atol=0)


def _llama():
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=128, intermediate_size=256, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=4,
        vocab_size=64,
    )  # fmt: skip
    return here(LlamaForCausalLM(config), torch.bfloat16).eval()


def _plan(styles, mlp=None):
    column, row = styles.ColwiseParallel, styles.RowwiseParallel
    layer = "model.layers.*"
    plan = {f"{layer}.self_attn.{name}_proj": column() for name in "qkv"} | {
        f"{layer}.self_attn.o_proj": row()
    }
    if mlp is not None:
        return plan | {f"{layer}.mlp": mlp}
    return (
        plan
        | {f"{layer}.mlp.{name}_proj": column() for name in ("gate", "up")}
        | {f"{layer}.mlp.down_proj": row()}
    )


def _by_hugging_face(model):
    """As transformers shards a model by its `tp_plan`: every layer gets a forward of its own."""
    from fnmatch import fnmatchcase

    from transformers.distributed.tensor_parallel import apply_tensor_parallelism

    plan = {}
    for pattern, style in model.config.base_model_tp_plan.items():
        for name, module in model.named_modules():
            if fnmatchcase(name, f"model.{pattern}"):
                plan |= {f"{name}.{own}": style for own, _ in module.named_parameters()} | {name: style}
    apply_tensor_parallelism(model, mesh(), plan)


def _fsdp(model):
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh())
    fully_shard(model, mesh=mesh())


SHARDERS = {
    "torch": lambda model: parallelize_module(model, mesh(), _plan(torch_styles)),
    "ours": lambda model: parallelize_module(model, mesh(), _plan(ours)),
    "blocks": lambda model: parallelize_module(model, mesh(), _plan(ours, ours.FeedForwardParallel())),
    "hugging_face": _by_hugging_face,
    "fsdp": _fsdp,
}
CHANGES = {
    "swap": gemmery.nn.swap,
    "quantize": lambda model: gemmery.nn.quantize(model, "int8"),
    "sparsify": gemmery.nn.sparsify,
}


def model_changed(change, sharder, first):
    """A model that is changed before it is sharded, or after; returns the report's `left`."""
    ids = torch.arange(10, device=ranks.HERE.device).unsqueeze(0)
    model = _llama()
    if first:
        report = CHANGES[change](model)
        with torch.no_grad():
            want = model(ids).logits
        SHARDERS[sharder](model)
    else:
        with torch.no_grad():
            want = model(ids).logits
        SHARDERS[sharder](model)
        report = CHANGES[change](model)
    with torch.no_grad():
        close(model(ids).logits, want)
    return len(report), report.left


def norms():
    """A swapped norm under SequenceParallel."""
    model = _llama()
    gemmery.nn.swap(model)
    norm = model.model.norm
    x = values(2, 6, 128, dtype=torch.bfloat16)
    want = norm(x).chunk(2, 1)[dist.get_rank()]
    assert type(norm).__name__ == "FusedRMSNorm"
    part = parallelize_module(norm, mesh(), SequenceParallel(use_local_output=True))
    torch.testing.assert_close(part(x.chunk(2, 1)[dist.get_rank()]), want)


# ---------------------------------------------------------------------------------------------------------------------
# Of the helper itself


def ready():
    """Nothing, once this module is imported, which can take seconds."""


def late():
    """One rank waits for the other, which does not come."""
    assert dist.get_rank() == 0, "the other rank"
    dist.barrier()
