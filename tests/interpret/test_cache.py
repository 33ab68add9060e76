"""The cache of plans, threads, and which way a call goes."""

import threading
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import gemmery
from gemmery import memo
from gemmery.product import cache as known_calls
from gemmery.product import operator, run
from tests.oracle import assert_product, values


@pytest.fixture
def cache(monkeypatch):
    """An empty cache of prepared calls that holds eight."""
    known = {}
    monkeypatch.setattr(known_calls, "_known", known)
    monkeypatch.setattr(known_calls, "find", known.get)
    monkeypatch.setattr(memo, "KEPT", 8)
    return known


def test_the_cache_is_bounded(cache):
    sizes = []
    for n in range(1, 60):
        a, b = values((3, n), torch.float32, 1), values((n, 4), torch.float32, 2)
        assert_product(gemmery.matmul(a, b), a, b)
        sizes.append(len(cache))
    assert max(sizes) == 8
    assert min(sizes[8:]) >= 4


def test_what_was_dropped_comes_back(cache):
    def call(n):
        a, b = values((3, n), torch.float32, n), values((n, 4), torch.float32, n)
        assert_product(gemmery.matmul(a, b), a, b)

    for n in [*range(1, 20), 1, 19, 1]:
        call(n)
    assert 1 <= len(cache) <= 8


def test_one_entry_for_one_layout(cache):
    for _ in range(3):
        gemmery.matmul(torch.ones(3, 4), torch.ones(4, 5))
    assert len(cache) == 1
    gemmery.matmul(torch.ones(3, 4), torch.ones(5, 4).t())
    gemmery.matmul(torch.ones(3, 4), torch.ones(4, 5), out_dtype=torch.float16)
    assert len(cache) == 3
    # The same strides from an address that a tensor descriptor does not take.
    gemmery.matmul(torch.ones(13)[1:].view(3, 4), torch.ones(4, 5))
    assert len(cache) == 4


def test_factors_share_an_entry(cache):
    a, b, c = torch.ones(3, 4), torch.ones(4, 5), torch.ones(5)
    for alpha in (2, 3, 0.5, -1.0, True + 1):
        assert torch.equal(gemmery.addmm(c, a, b, alpha=alpha), torch.full((3, 5), 4.0 * alpha + 1))
    assert len(cache) == 1


def test_a_wrong_call_leaves_no_entry(cache):
    with pytest.raises(ValueError, match="inner sizes"):
        gemmery.matmul(torch.ones(3, 4), torch.ones(5, 6))
    assert cache == {}


def test_entries_hold_no_memory(cache):
    """A plan outlives the tensors that it was made for."""
    a = torch.ones(3, 4)
    gone = weakref.ref(a)
    gemmery.matmul(a, torch.ones(4, 5))
    del a
    assert len(cache) == 1
    assert gone() is None


@pytest.mark.parametrize("bound", (8, 4096))
def test_threads(monkeypatch, bound):
    """Eight threads that remember calls, all at once, over a memory that is full all the time."""
    monkeypatch.setattr(memo, "KEPT", bound)
    start, kept = threading.Barrier(8), {}

    def work(thread):
        start.wait()
        largest = 0
        for i in range(2000):
            assert memo.keep(kept, (thread, i % 50), i) == i
            largest = max(largest, len(kept))
        return largest

    with ThreadPoolExecutor(8) as pool:
        assert max(pool.map(work, range(8))) <= bound


# ---------------------------------------------------------------------------------------------------------------------
# Which way


@pytest.fixture
def ways(monkeypatch):
    """One entry for every call that reached the implementation through torch's dispatcher."""
    seen = []
    implementation = operator.inside
    monkeypatch.setattr(operator, "inside", lambda *args: seen.append("operator") or implementation(*args))
    return seen


def test_inference_goes_straight(ways):
    a, b = torch.ones(3, 4), torch.nn.Parameter(torch.ones(4, 5))
    with torch.no_grad():
        gemmery.matmul(a, b)
    with torch.inference_mode():
        gemmery.matmul(a, b)
    gemmery.matmul(a, b.detach())
    assert ways == []


class Subclass(torch.Tensor):
    pass


class Mode(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


def test_whatever_torch_must_see_takes_the_operator(ways):
    a, b = torch.ones(3, 4), torch.ones(4, 5)
    gemmery.matmul(a, torch.nn.Parameter(b))
    gemmery.matmul(a.as_subclass(Subclass), b)
    with Mode():
        gemmery.matmul(a, b)
    assert ways == ["operator"] * 3


def test_autograd_sees_writes_into_out():
    """A tensor that was saved for a gradient and then written must not give a wrong one."""
    x = torch.ones(3, 3, requires_grad=True)
    saved = torch.ones(3, 3)
    result = x * saved
    with torch.no_grad():
        gemmery.matmul(torch.ones(3, 2), torch.ones(2, 3), out=saved)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        result.sum().backward()


# ---------------------------------------------------------------------------------------------------------------------
# The second call


@pytest.fixture
def warm(cache, monkeypatch):
    """Makes the calls that follow fail if they check, lock, choose or plan anything."""

    def fail(*args, **kwargs):
        raise AssertionError("a call like one before did more than look itself up")

    def spring():
        monkeypatch.setattr(run, "_first", fail)

    return spring


def test_the_second_call_only_looks_itself_up(warm, monkeypatch):
    monkeypatch.setattr(memo, "KEPT", 64)
    a, b, c, out = torch.ones(3, 4), torch.ones(4, 5), torch.ones(5), torch.zeros(3, 5)
    calls = [
        lambda: gemmery.matmul(a, b),
        lambda: gemmery.matmul(a, b, out=out),
        lambda: gemmery.matmul(a, b, bias=c, out_dtype=torch.float16),
        lambda: gemmery.linear(a, b.t(), c),
        lambda: gemmery.addmm(c, a, b, alpha=2, beta=3),
        lambda: gemmery.bmm(a[None], b[None]),
        lambda: gemmery.matmul(a, b, config="16x16x16-g1-w4-s2-tile-pointer"),
        lambda: gemmery.matmul(a, b, config={"block_m": 16, "block_n": 16, "block_k": 16}),
    ]
    first = [call().clone() for call in calls]
    warm()
    for call, want in zip(calls, first, strict=True):
        assert torch.equal(call(), want)


def test_a_call_is_not_taken_for_another_operations(cache):
    """What matmul takes, addmm and bmm may not."""
    a, b = torch.ones(2, 3, 4), torch.ones(2, 4, 5)
    gemmery.matmul(a, b)
    with pytest.raises(ValueError, match="addmm: a is"):
        gemmery.addmm(torch.ones(5), a, b)
    x, w = torch.ones(4, 4), torch.arange(16.0).view(4, 4)
    assert not torch.equal(gemmery.matmul(x, w), gemmery.linear(x, w))
    assert torch.equal(gemmery.linear(x, w), x @ w.t())


def test_what_was_checked_once_is_checked_again_where_it_may_differ(cache):
    memory = torch.ones(64)
    a, b, out = memory[:16].view(4, 4), torch.ones(4, 4), memory[32:48].view(4, 4)
    gemmery.matmul(a, b, out=out)
    with pytest.raises(ValueError, match="out and a share memory"):
        gemmery.matmul(a, b, out=memory[12:28].view(4, 4))
    with pytest.raises(ValueError, match="out and b share memory"):
        gemmery.matmul(b, a, out=a)
    c, i, total = (
        torch.ones(4, 4, dtype=torch.int8),
        torch.ones(4, dtype=torch.int32),
        torch.ones(4, 4, dtype=torch.int32),
    )
    gemmery.addmm(i, c, c, alpha=2, out=total)
    with pytest.raises(TypeError, match="alpha is 2"):
        gemmery.addmm(i, c, c, alpha=2.5, out=total)


def test_tensors_without_data_are_not_taken_for_others(cache):
    a, b = torch.ones(3, 4), torch.ones(4, 5)
    gemmery.matmul(a, b)
    gemmery.matmul(a, b, out=torch.empty(3, 5))
    for tensors in ((a.to("meta"), b), (a, b.to("meta"))):
        with pytest.raises(ValueError, match="must be on the same device"):
            gemmery.matmul(*tensors)
    with pytest.raises(ValueError, match="must be on the same device"):
        gemmery.matmul(a, b, out=torch.empty(3, 5, device="meta"))
    assert gemmery.matmul(a.to("meta"), b.to("meta")).is_meta
    gemmery.matmul(a[:0], b)
    with pytest.raises(ValueError, match="must be on the same device"):
        gemmery.matmul(a[:0].to("meta"), b)


def test_a_sparse_tensor_is_told_from_a_dense_one(cache):
    a, b = torch.eye(4), torch.ones(4, 5)
    gemmery.matmul(a, b)
    with pytest.raises(TypeError, match="a is sparse"):
        gemmery.matmul(a.to_sparse(), b)


def test_autocast_and_gradients_come_before_the_cache(cache, ways):
    a, b = torch.ones(3, 4), torch.ones(4, 5)
    assert gemmery.matmul(a, b).dtype == torch.float32
    with torch.autocast("cpu", torch.bfloat16):
        assert gemmery.matmul(a, b).dtype == torch.bfloat16
    assert gemmery.matmul(a, b.clone().requires_grad_()).requires_grad
    assert ways == ["operator"]
