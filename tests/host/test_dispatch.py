"""The cache of plans, threads, and which way a call goes."""

import random
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import gemmery
from gemmery import dispatch, ops
from tests.oracle import assert_product, values


@pytest.fixture
def cache(monkeypatch):
    """An empty cache of prepared calls that holds eight."""
    prepared = {}
    monkeypatch.setattr(dispatch, "_prepared", prepared)
    monkeypatch.setattr(dispatch, "PLANS", 8)
    return prepared


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
def test_threads(cache, monkeypatch, bound):
    """Eight threads with shapes of their own, all at once, over a cache that is full all the time."""
    monkeypatch.setattr(dispatch, "PLANS", bound)
    start = threading.Barrier(8)

    def work(thread):
        numbers = random.Random(thread)
        start.wait()
        largest = 0
        for i in range(60):
            m, n, k = (numbers.randint(1, 12) for _ in range(3))
            a, b = values((m, k), torch.float32, i), values((k, n), torch.float32, i + 1)
            assert_product(gemmery.matmul(a, b), a, b)
            largest = max(largest, len(cache))
        return largest

    with ThreadPoolExecutor(8) as pool:
        assert max(pool.map(work, range(8))) <= bound


# ---------------------------------------------------------------------------------------------------------------------
# Which way


@pytest.fixture
def ways(monkeypatch):
    """One entry for every call that reached the implementation through torch's dispatcher."""
    seen = []
    implementation = ops.eager
    monkeypatch.setattr(ops, "eager", lambda *args: seen.append("operator") or implementation(*args))
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
