"""Routing and combining where no kernel runs: what they mean, what they refuse, and what torch expects of operators."""

import doctest
import pickle

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.autograd import forward_ad

from gemmery import moe
from gemmery.moe import Routing, combine, route, routing

OPS = torch.ops.gemmery


def ids_of(shape, low, high, seed=0):
    return torch.randint(low, high, shape, generator=torch.Generator().manual_seed(seed))


def values(shape, dtype=torch.float32, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def test_examples():
    result = doctest.testmod(routing)
    assert result.attempted > 0
    assert result.failed == 0


def test_public_names():
    found = {name: getattr(moe, name) for name in moe.__all__}
    assert found | {"Routing": Routing, "combine": combine, "route": route} == found


# ---------------------------------------------------------------------------------------------------------------------
# Meaning


@pytest.mark.parametrize("groups", [1, 7, 1100])
@pytest.mark.parametrize("k", [1, 4])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_routing_means_a_stable_sort(groups, k, dtype):
    ids = ids_of((50, k), -2, groups + 2).to(dtype)
    made = route(ids, groups)
    keys = [x if 0 <= x < groups else groups for x in ids.flatten().tolist()]
    order = sorted(range(len(keys)), key=keys.__getitem__)  # Python's sort is stable
    assert made.order.tolist() == order
    assert made.token.tolist() == [x // k for x in order]
    assert [made.inverse[x].item() for x in order] == list(range(len(keys)))
    assert made.counts.tolist() == [keys.count(group) for group in range(groups)]
    assert made.offs.tolist() == made.counts.cumsum(0).tolist()
    assert all(x.dtype == torch.int32 and x.is_contiguous() for x in made[:-1])
    assert made.shape == (50, k)


def plain(y, made, w=None):
    """`combine` as one writes it, differentiable; in float64."""
    inverse = made.inverse.reshape(made.shape).long()
    here = inverse < made.offs[-1]
    parts = torch.where(here.unsqueeze(-1), y.double()[inverse], 0)
    return (parts if w is None else parts * torch.where(here, w.double(), 0).unsqueeze(-1)).sum(-2)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("weighted", [False, True])
def test_combining_and_its_gradients(dtype, weighted):
    made = route(ids_of((4, 5, 3), -1, 7), 6)
    y = values((60, 8), dtype).requires_grad_()
    w = values((4, 5, 3), dtype, 1).requires_grad_() if weighted else None
    inputs = [y, w] if weighted else [y]
    out, want = combine(y, made, w), plain(y, made, w)
    assert (out.shape, out.dtype) == ((4, 5, 8), dtype)
    near = {"rtol": 2e-2, "atol": 2e-2} if dtype.itemsize == 2 else {"rtol": 1e-5, "atol": 1e-5}
    torch.testing.assert_close(out, want.to(dtype), **near)
    grad = values((4, 5, 8), dtype, 2)
    for got, meant in zip(
        torch.autograd.grad(out, inputs, grad), torch.autograd.grad(want, inputs, grad.double()), strict=True
    ):
        assert got.dtype == meant.dtype
        torch.testing.assert_close(got, meant, **near)


def test_sums_are_in_the_order_of_choices():
    """In float32: 2^24 + 1 is lost, and 1 + 1 is not."""
    made = route(torch.tensor([[2, 1, 0], [0, 1, 2]]), 3)
    y = torch.zeros(6, 1)
    y[made.inverse.long()] = torch.tensor([2.0**24, 1.0, 1.0, 1.0, 1.0, 2.0**24]).unsqueeze(1)
    assert combine(y, made).tolist() == [[2.0**24], [2.0**24 + 2]]


def test_it_is_pickled():
    made = route(torch.tensor([[1, 0]]), 2)
    again = pickle.loads(pickle.dumps(made))
    assert isinstance(again, Routing)
    assert torch.equal(combine(torch.ones(2, 3), again), torch.full((1, 3), 2.0))


# ---------------------------------------------------------------------------------------------------------------------
# Errors

IDS = torch.tensor([[0, 1], [1, 1]])
MADE = route(IDS, 2)
Y = torch.ones(4, 3)


class Large(torch.Tensor):
    """Says that it has very many elements."""

    def numel(self):
        return 2**31


WRONG = [
    (lambda: route([[0]], 2), TypeError, "route: top_k_index is a list; it must be a torch.Tensor"),
    (lambda: route(IDS.float(), 2), TypeError, "route: top_k_index is torch.float32; it must be torch.int32 or torch.int64"),
    (lambda: route(IDS.short(), 2), TypeError, "route: top_k_index is torch.int16; it must be torch.int32 or torch.int64"),
    (lambda: route(IDS[0, 0], 2), ValueError, "route: top_k_index is (); it must be (..., k)"),
    (lambda: route(IDS.as_subclass(Large), 2), ValueError, "route: top_k_index is (2, 2); it must have at most 2^31 - 1024 elements"),
    (lambda: route(IDS, 2.0), TypeError, "route: num_groups is a float; it must be an int"),
    (lambda: route(IDS, True), TypeError, "route: num_groups is a bool; it must be an int"),
    (lambda: route(IDS, 0), ValueError, "route: num_groups is 0; it must be from 1 to 2^24"),
    (lambda: route(IDS, 2**31), ValueError, f"route: num_groups is {2**31}; it must be from 1 to 2^24"),
    (lambda: combine(1, MADE), TypeError, "combine: y is a int; it must be a torch.Tensor"),
    (lambda: combine(Y, MADE[:5]), TypeError, "combine: routing is a tuple; it must be the result of gemmery.moe.route"),
    (lambda: combine(Y[0], MADE), ValueError, "combine: y is (3,); it must be (4, H), a row for each assignment"),
    (lambda: combine(Y[:3], MADE), ValueError, "combine: y is (3, 3); it must be (4, H), a row for each assignment"),
    (lambda: combine(Y[:, :1].expand(4, 2**31), MADE), ValueError, f"combine: y is (4, {2**31}); it must have at most 2^31 - 1024 columns"),
    (lambda: combine(Y.int(), MADE), TypeError, "combine: y is torch.int32; it must be one of torch.float16, torch.bfloat16, torch.float32, torch.float64"),
    (lambda: combine(Y, MADE, 2.0), TypeError, "combine: top_k_weights is a float; it must be a torch.Tensor"),
    (lambda: combine(Y, MADE, torch.ones(4)), ValueError, "combine: top_k_weights is (4,) and the ids were (2, 2); they must have the same shape"),
    (lambda: combine(Y, MADE, IDS), TypeError, "combine: top_k_weights is torch.int64; it must be one of torch.float16, torch.bfloat16, torch.float32, torch.float64"),
    (lambda: combine(Y.to("meta"), MADE), ValueError, "combine: y is on meta and routing on cpu; they must be on the same device"),
    (lambda: combine(Y, MADE, torch.ones(2, 2, device="meta")), ValueError, "combine: top_k_weights is on meta and routing on cpu; they must be on the same device"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "error", "said"), WRONG, ids=[said for *_, said in WRONG])
def test_errors(call, error, said):
    with pytest.raises(error) as caught:
        call()
    assert caught.type is error
    assert str(caught.value) == said


def test_no_gradient_of_a_gradient():
    y, w = Y.clone().requires_grad_(), torch.ones(2, 2, requires_grad=True)
    for of in (y, w):
        (first,) = torch.autograd.grad(combine(y, MADE, w).square().sum(), of, create_graph=True)
        with pytest.raises(NotImplementedError, match="combine: second derivatives are not supported"):
            first.sum().backward()


def test_no_forward_mode():
    with forward_ad.dual_level(), pytest.raises(NotImplementedError, match="combine: no forward-mode"):
        combine(forward_ad.make_dual(Y, Y), MADE)


# ---------------------------------------------------------------------------------------------------------------------
# Operators


def block(ids, y, w):
    made = route(ids, 5)
    return combine(y * 2, made, w), made


def arguments(tokens, grad=False):
    y, w = values((tokens * 2, 6)), values((tokens, 2), seed=1)
    return ids_of((tokens, 2), -1, 6, seed=tokens), y.requires_grad_(grad), w.requires_grad_(grad)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled(backend, grad, dynamic):
    torch.compiler.reset()
    compiled = torch.compile(block, backend=backend, fullgraph=True, dynamic=dynamic)
    for tokens in (3, 7):
        given = arguments(tokens, grad)
        (want, meant), (got, made) = block(*given), compiled(*given)
        assert torch.equal(got, want)
        assert isinstance(made, Routing)
        assert made.shape == meant.shape
        for x, y in zip(made[:-1], meant[:-1], strict=True):
            assert torch.equal(x, y)
        if grad:
            for x, y in zip(*(torch.autograd.grad(out.sum(), given[1:]) for out in (got, want)), strict=True):
                assert torch.equal(x, y)
    if dynamic:
        with torch.compiler.set_stance("fail_on_recompile"):
            assert torch.equal(compiled(*arguments(9, grad))[0], block(*arguments(9, grad))[0])


def test_opcheck():
    ids, y, w = arguments(4, grad=True)
    made = route(ids, 5)
    where = (made.inverse, made.offs)
    torch.library.opcheck(OPS.moe_route.default, (ids, 5))
    torch.library.opcheck(OPS.moe_combine.default, (y, w, *where, 4, 2))
    torch.library.opcheck(OPS.moe_combine.default, (y, None, *where, 4, 2))
    grad = values((4, 6))
    torch.library.opcheck(OPS.moe_spread.default, (grad, w.detach(), *where, 2))
    torch.library.opcheck(OPS.moe_dots.default, (grad, y.detach(), *where, 2, torch.float16))


def test_fake_tensors():
    with FakeTensorMode():
        out, made = block(torch.zeros(5, 2, dtype=torch.int32), torch.empty(10, 8).half(), None)
    assert isinstance(out, FakeTensor)
    assert (out.shape, out.dtype) == ((5, 8), torch.float16)
    assert [tuple(x.shape) for x in made[:-1]] == [(5,), (5,), (10,), (10,), (10,)]
    assert {x.dtype for x in made[:-1]} == {torch.int32}


def test_meta_tensors():
    made = route(torch.zeros(5, 2, dtype=torch.int64, device="meta"), 3)
    out = combine(torch.empty(10, 8, device="meta"), made)
    assert out.is_meta
    assert out.shape == (5, 8)
