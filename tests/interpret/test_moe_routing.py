"""Routing and combining by their kernels: against the reference, bit for bit, and gradients against differences."""

import pytest
import torch

from gemmery.moe import combine, route
from gemmery.moe import routing as moe

F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
NAN = float("nan")


def ids_of(shape, low, high, seed=0):
    return torch.randint(low, high, shape, generator=torch.Generator().manual_seed(seed))


def values(shape, dtype=F32, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=F64).to(dtype)


@pytest.fixture(params=["few", "many"])
def kernels(request, monkeypatch):
    """Both ways of sorting; with many ids in blocks so small that a few hundred fill several of everything."""
    if request.param == "many":
        sizes = {"_FEW": 0, "_BLOCK": 64, "_LARGE_BLOCK": 64, "_BINS": 32, "_CHUNK": 4, "_OTHERS": 16}
    else:
        sizes = {"_COLS": 128}
    for name, size in sizes.items():
        monkeypatch.setattr(moe, name, size)
    return request.param


# ---------------------------------------------------------------------------------------------------------------------
# Routing

#: The ids and the number of groups.
ROUTINGS = {
    "random": lambda: (ids_of((129, 3), 0, 9), 9),
    "one choice": lambda: (ids_of((300, 1), 0, 5), 5),
    "one token": lambda: (ids_of((1, 8), 0, 128), 128),
    "a vector": lambda: (ids_of((5,), 0, 4), 4),
    "dimensions": lambda: (ids_of((3, 5, 7, 2), 0, 6), 6),
    "one group": lambda: (torch.zeros(70, 2, dtype=torch.int64), 1),
    "all in one": lambda: (torch.full((70, 3), 5), 8),
    "empty groups": lambda: (ids_of((100, 2), 0, 2) * 30 + 3, 40),
    "many groups": lambda: (ids_of((50, 4), 0, 300), 300),
    "sentinels": lambda: (ids_of((90, 4), -3, 20), 16),
    "nothing but sentinels": lambda: (torch.full((40, 2), 7), 7),
    "extreme ids": lambda: (torch.tensor([[2**63 - 1, 1], [-(2**63), 2**32], [1, -1], [2**31, 0]]), 2),
    "powers of two": lambda: (ids_of((64, 4), 0, 32), 32),
    "transposed": lambda: (ids_of((4, 60), 0, 10).t(), 10),
    "slices": lambda: (ids_of((120, 12), 0, 10)[1::2, 3::4], 10),
    "flipped dimensions": lambda: (ids_of((5, 2, 30), 0, 10).permute(2, 0, 1), 10),
    "broadcast": lambda: (ids_of((1, 4), 0, 6).expand(60, 4), 6),
    "no tokens": lambda: (ids_of((0, 4), 0, 6), 6),
    "no choices": lambda: (ids_of((3, 0), 0, 6), 6),
}


@pytest.mark.sampled(7)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("name", ROUTINGS)
def test_routing(name, dtype, kernels):
    ids, groups = ROUTINGS[name]()
    if dtype == torch.int32:
        ids = ids.clamp(-(2**31), 2**31 - 1).to(dtype) if name == "extreme ids" else ids.to(dtype)
    routing = route(ids, groups)
    want = moe.reference_route(ids.reshape(-1, ids.shape[-1]) if ids.numel() else ids, groups)
    assert routing.shape == tuple(ids.shape)
    for field, got, meant in zip(routing._fields, routing[:-1], want, strict=False):
        assert got.dtype == torch.int32
        assert got.is_contiguous()
        assert torch.equal(got, meant), field


@pytest.mark.sampled(3)
@pytest.mark.parametrize("few", [moe._FEW, 0], ids=["few", "many"])
@pytest.mark.parametrize("groups", [128, 1100])
def test_sizes_as_they_are(groups, few, monkeypatch):
    """Blocks and tables of the sizes that GPUs get."""
    monkeypatch.setattr(moe, "_FEW", few)
    ids = ids_of((300, 4), -2, groups + 2)
    for got, meant in zip(route(ids, groups), moe.reference_route(ids, groups), strict=False):
        assert torch.equal(got, meant)


# ---------------------------------------------------------------------------------------------------------------------
# Combining


def routed(tokens, k, groups=6, low=0, high=None):
    return route(ids_of((tokens, k), low, groups if high is None else high), groups)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("weights", [None, F16, BF16, F32, F64], ids=str)
@pytest.mark.parametrize("dtype", [F16, BF16, F32, F64], ids=str)
def test_combining(dtype, weights):
    routing = routed(9, 3, low=-2, high=8)
    y = values((27, 37), dtype)
    y[routing.offs[-1] :] = NAN
    w = None if weights is None else values((9, 3), weights, 1)
    got = combine(y, routing, w)
    assert got.dtype == dtype
    assert got.is_contiguous()
    assert torch.equal(got, moe.reference_combine(y, w, routing.inverse, routing.offs, 9, 3))


LAYOUTS = {
    "transposed": lambda y: y.t().contiguous().t(),
    "slices": lambda y: torch.cat([y, y], 1).repeat_interleave(2, 0)[::2, : 2 * y.shape[1] : 2],
    "one row for all": lambda y: y[:1].expand_as(y),
    "offset": lambda y: torch.cat([y[:, :3], y], 1)[:, 3:],
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_strides(layout, monkeypatch):
    """Of y, of the weights and of gradients, in several blocks of columns."""
    monkeypatch.setattr(moe, "_WIDTH", 64)
    routing = routed(10, 4, low=-1)
    y = LAYOUTS[layout](values((40, 50))).requires_grad_()
    w = LAYOUTS[layout](values((10, 4), seed=1)).requires_grad_()
    out = combine(y, routing, w)
    where = (routing.inverse, routing.offs)
    assert torch.equal(out, moe.reference_combine(y.detach(), w.detach(), *where, 10, 4))
    grad = LAYOUTS[layout](values((10, 50), seed=2))
    of_y, of_w = torch.autograd.grad(out, (y, w), grad)
    assert torch.equal(of_y, moe.reference_spread(grad, w.detach(), *where, 4))
    torch.testing.assert_close(of_w, moe.reference_dots(grad, y.detach(), *where, 4, F32))


@pytest.mark.parametrize("k", [1, 5, 16, 19])
def test_choices(k):
    """Up to 16 are loaded at once; more take turns."""
    routing = routed(4, k, low=-1)
    y, w = values((4 * k, 20)).requires_grad_(), values((4, k), seed=1).requires_grad_()
    out = combine(y, routing, w)
    where = (routing.inverse, routing.offs)
    assert torch.equal(out, moe.reference_combine(y.detach(), w.detach(), *where, 4, k))
    of_y, of_w = torch.autograd.grad(out, (y, w), out.detach())
    assert torch.equal(of_y, moe.reference_spread(out.detach(), w.detach(), *where, k))
    torch.testing.assert_close(of_w, moe.reference_dots(out.detach(), y.detach(), *where, k, F32))


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
def test_the_tail_counts_as_zero():
    ids = torch.tensor([[0, 9], [-1, 9]])
    routing = route(ids, 2)
    y = torch.tensor([[3.0], [NAN], [NAN], [NAN]]).requires_grad_()
    w = torch.tensor([[2.0, NAN], [NAN, float("inf")]]).requires_grad_()
    out = combine(y, routing, w)
    assert out.tolist() == [[6.0], [0.0]]
    of_y, of_w = torch.autograd.grad(out, (y, w), torch.tensor([[1.0], [NAN]]))
    assert of_y.tolist() == [[2.0], [0.0], [0.0], [0.0]]
    assert of_w.tolist() == [[3.0, 0.0], [0.0, 0.0]]


def test_nan_is_passed_on_elsewhere():
    routing = route(torch.tensor([[0, 1]]), 2)
    assert combine(torch.tensor([[NAN], [1.0]]), routing, torch.zeros(1, 2)).isnan().all()


def test_dimensions_come_back():
    routing = route(ids_of((3, 5, 2), 0, 4), 4)
    y, w = values((30, 8)), values((3, 5, 2), seed=1)
    assert combine(y, routing, w).shape == (3, 5, 8)
    flat = route(ids_of((3, 5, 2), 0, 4).reshape(15, 2), 4)
    assert torch.equal(combine(y, routing, w).reshape(15, 8), combine(y, flat, w.reshape(15, 2)))
    assert combine(y[:2], route(torch.tensor([1, 0]), 2)).shape == (8,)


@pytest.mark.parametrize("shape", [(0, 3, 5), (3, 0, 5), (3, 2, 0)])
def test_nothing_to_combine(shape):
    tokens, k, columns = shape
    routing = route(torch.zeros(tokens, k, dtype=torch.int64), 2)
    y, w = torch.ones(tokens * k, columns, requires_grad=True), torch.ones(tokens, k, requires_grad=True)
    out = combine(y, routing, w)
    assert torch.equal(out, torch.zeros(tokens, columns))
    of_y, of_w = torch.autograd.grad(out.sum(), (y, w))
    assert torch.equal(of_y, torch.zeros_like(y))
    assert torch.equal(of_w, torch.zeros_like(w))


# ---------------------------------------------------------------------------------------------------------------------
# Gradients


@pytest.mark.parametrize("weighted", [False, True])
def test_gradients_are_those_of_differences(weighted):
    routing = routed(4, 3, groups=3, low=-1, high=4)
    y = values((12, 5), F64).requires_grad_()
    w = values((4, 3), F64, 1).requires_grad_()
    if weighted:
        assert torch.autograd.gradcheck(lambda y, w: combine(y, routing, w), (y, w))
    else:
        assert torch.autograd.gradcheck(lambda y: combine(y, routing), (y,))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("weights", [F16, F32], ids=str)
@pytest.mark.parametrize("dtype", [F16, BF16, F32, F64], ids=str)
def test_types_of_gradients(dtype, weights):
    routing = routed(7, 2, low=-1)
    y, w = values((14, 40), dtype).requires_grad_(), values((7, 2), weights, 1).requires_grad_()
    grad = values((7, 40), dtype, 2)
    of_y, of_w = torch.autograd.grad(combine(y, routing, w), (y, w), grad)
    where = (routing.inverse, routing.offs)
    assert of_y.dtype == dtype
    assert torch.equal(of_y, moe.reference_spread(grad, w.detach(), *where, 2))
    assert of_w.dtype == weights
    want = moe.reference_dots(grad, y.detach(), *where, 2, weights)
    torch.testing.assert_close(of_w, want, rtol=2e-3 if weights == F16 else 1e-5, atol=1e-4)


def test_one_gradient_alone():
    routing = routed(5, 2)
    y, w = values((10, 8)), values((5, 2), seed=1)
    both = [x.clone().requires_grad_() for x in (y, w)]
    want = torch.autograd.grad(combine(both[0], routing, both[1]).sum(), both)
    assert torch.equal(torch.autograd.grad(combine(both[0], routing, w).sum(), both[0])[0], want[0])
    assert torch.equal(torch.autograd.grad(combine(y, routing, both[1]).sum(), both[1])[0], want[1])
