"""The short way into the driver: the same bits as the ordinary launch, wherever that would have gone, in less time."""

import functools
import gc
import random
import statistics
import threading
import time

import pytest
import torch
import triton

import gemmery
from gemmery.launch import direct
from gemmery.product.build import make_call
from gemmery.product.prepare import prepare
from gemmery.product.spec import NONE, Options
from tests.gpu.common import DRY, assert_product, matrix, values

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        DRY or direct.entry() is None, reason=f"no short way is known for Triton {triton.__version__} here"
    ),
]

BF16, F32 = torch.bfloat16, torch.float32


def case(m, n, k, layout="NT", dtype=BF16, batch=()):
    """a, b and room for their product."""
    if batch:
        a, b = values((*batch, m, k), dtype), values((*batch, k, n), dtype)
    else:
        a, b = matrix(m, k, dtype, layout[0]), matrix(k, n, dtype, layout[1])
    return a, b, torch.empty(*batch, m, n, dtype=dtype, device=a.device)


def ordinary(plan, *arguments):
    """What Triton's own launch of a plan's kernel computes."""
    out = arguments[2]
    out.fill_(-1)
    tensors = [x for x in arguments[:4] if x is not None]
    plan._binding.launch(tensors, tuple(arguments[4:]) or (1, 1))
    return out.clone()


CASES = {
    "descriptors": (256, 512, 256, "NT"),
    "rows": (256, 512, 256, "NN"),
    "columns": (256, 512, 256, "TN"),
    "odd": (129, 257, 65, "NT"),
    "flat": (16, 4096, 4096, "NT"),
    "large": (3072, 3072, 512, "NT"),
    "fp32": (200, 300, 100, "NT", F32),
    "batch": (128, 256, 128, "NN", BF16, (5,)),
}


@pytest.mark.parametrize("name", CASES)
def test_the_same_bits(name):
    a, b, out = case(*CASES[name])
    plan = gemmery.plan(a, b, out=out)
    assert plan.direct is not None
    want = ordinary(plan, a, b, out, None, 1, 1)
    for _ in range(3):
        out.fill_(-1)
        assert plan(a, b, out) is out
        assert torch.equal(out, want)
    out.fill_(-1)
    assert torch.equal(gemmery.matmul(a, b, out=out), want)
    assert torch.equal(gemmery.matmul(a, b), want)


@pytest.mark.parametrize("bias", [(512,), (256, 512), (256, 1)], ids=str)
def test_the_same_bits_with_an_addend(bias):
    a, b, out = case(256, 512, 256)
    c = values(bias, BF16)
    plan = gemmery.plan(a, b, bias=c, out=out)
    want = ordinary(plan, a, b, out, c.expand(out.shape) if len(bias) > 1 else c, 1, 1)
    assert torch.equal(gemmery.matmul(a, b, bias=c, out=out), want)
    assert torch.equal(gemmery.matmul(a, b, bias=c.clone()), want)


@pytest.mark.parametrize(
    "config", ["64x64x64-g8-w4-s3-tile-descriptor-k4", "64x64x64-g8-w4-s3-tile-pointer-k3"]
)
def test_the_same_bits_with_a_workspace(config):
    """On two streams in turn, each with a workspace of its own, and with one that has to grow between the calls."""
    a, b, out = case(128, 192, 2048)
    plan = gemmery.plan(a, b, out=out, config=config)
    want = ordinary(plan, a, b, out, None, 1, 1)
    side = torch.cuda.Stream()
    torch.cuda.synchronize()
    for stream in (torch.cuda.current_stream(), side, torch.cuda.current_stream(), side):
        with torch.cuda.stream(stream):
            assert torch.equal(plan(a, b, torch.empty_like(out)), want)
            larger = case(1024, 1024, 2048)
            assert_product(gemmery.matmul(larger[0], larger[1], config=config), *larger[:2])
            assert torch.equal(plan(a, b, torch.empty_like(out)), want)
        stream.synchronize()


def test_factors_that_change():
    a, b, out = case(200, 300, 100, dtype=F32)
    c = values((300,), F32)
    plan = prepare(make_call("addmm", a, b, c, NONE, Options(), 2, 3), out).plan
    for alpha, beta in ((2, 1), (0.3, -7.5), (2, 1), (0.0, 1), (-0.0, 1), (1e-3, 0.5), (1, 2), (True, 1.0)):
        want = ordinary(plan, a, b, out, c, alpha, beta)
        out.fill_(-1)
        assert torch.equal(plan(a, b, out, c, alpha, beta).view(torch.int32), want.view(torch.int32))
        assert_product(gemmery.addmm(c, a, b, alpha=alpha, beta=beta), a, b, c, alpha, beta)


def test_other_addresses():
    """More of them than tensor maps are kept for, and one memory for tensors of several layouts."""
    a, b, out = case(64, 64, 64)
    plan = gemmery.plan(a, b, out=out)
    want = ordinary(plan, a, b, out, None, 1, 1)
    pool = torch.empty(2 * direct._MAPS + 8, 64, 64, dtype=BF16, device=a.device)
    for slot in pool:
        plan(a, b, slot)
    assert torch.equal(pool, want.expand_as(pool))
    memory = torch.empty(1 << 16, dtype=BF16, device=a.device)
    for m, k in ((64, 64), (128, 64), (64, 128), (32, 256), (64, 64)):
        x = memory[: m * k].view(m, k).copy_(values((m, k), BF16))
        y = values((k, 64), BF16)
        assert_product(gemmery.matmul(x, y), x, y)


def test_one_tensor_for_both_factors():
    """A plan that was made by `x @ x` serves `x @ y` of the same layout."""
    x, y = matrix(128, 128, BF16), matrix(128, 128, BF16)
    for a, b in ((x, x), (x, y), (y, x), (y, y)):
        assert_product(gemmery.matmul(a, b), a, b)
    z = torch.ones_like(x)
    assert_product(gemmery.addmm(z, x, y, out=z), x, y, torch.ones_like(x))
    assert_product(gemmery.addmm(y, x, y, out=z), x, y, y)


@pytest.mark.parametrize("shift", [1, 4])
@pytest.mark.parametrize("which", ["a", "b", "out"])
@pytest.mark.parametrize("k", [256, 250], ids=["descriptors", "pointers"])
def test_misaligned_tensors(which, shift, k):
    """Through `matmul`, which has a plan for each alignment; and a held plan never reads misaligned ones as aligned."""
    a, b, out = case(128, 256, k, "NN")
    tensors = {"a": a, "b": b, "out": out}
    there = tensors[which]
    tensors[which] = torch.empty(there.numel() + 8, dtype=BF16, device=a.device)[shift:][: there.numel()]
    tensors[which] = tensors[which].view(there.shape).copy_(there)
    want = gemmery.matmul(a, b)
    gemmery.matmul(tensors["a"], tensors["b"], out=tensors["out"])
    assert_product(tensors["out"], a, b)
    assert torch.equal(gemmery.matmul(a, b), want)
    plan = gemmery.plan(a, b, out=out, config="64x64x32-g8-w4-s3-tile-pointer")
    tensors["out"].fill_(-1)
    plan(tensors["a"], tensors["b"], tensors["out"])
    assert_product(tensors["out"], a, b)


def test_launch_hooks_hear_of_every_launch():
    a, b, out = case(256, 512, 256)
    plan = gemmery.plan(a, b, out=out)
    want = plan(a, b, out).clone()
    seen = []
    chain = triton.knobs.runtime.launch_enter_hook

    def hook(metadata):
        seen.append(metadata.get()["name"])

    chain.add(hook)
    try:
        out.fill_(-1)
        assert torch.equal(plan(a, b, out), want)
        assert torch.equal(gemmery.matmul(a, b), want)
    finally:
        chain.remove(hook)
    assert len(seen) == 2
    assert all("gemm" in name for name in seen)
    assert torch.equal(plan(a, b, out), want)
    assert len(seen) == 2


def test_the_current_stream_and_capture():
    a, b, out = case(256, 512, 256)
    plan = gemmery.plan(a, b, out=out)
    side, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    new = matrix(256, 256, BF16)
    with torch.cuda.stream(side):
        torch.cuda._sleep(50_000_000)
        a.copy_(new)
        plan(a, b, out)
        assert torch.cuda.default_stream().query()
        assert not side.query()
    side.synchronize()
    assert_product(out, new, b)
    with torch.cuda.graph(graph):
        plan(a, b, out)
        fresh = gemmery.matmul(a, b)
    a.copy_(matrix(256, 256, BF16))
    out.fill_(-1)
    fresh.fill_(-1)
    graph.replay()
    torch.cuda.synchronize()
    assert_product(out, a, b)
    assert torch.equal(fresh, out)


@pytest.mark.skipif(not DRY and torch.cuda.device_count() < 2, reason="one GPU")
def test_two_gpus():
    """Whichever is current: the launch, its stream and the output are on the tensors' GPU."""
    for index in (0, 1, 0, 1):
        a, b, out = (tensor.to(f"cuda:{index}") for tensor in case(256, 512, 256))
        plan = gemmery.plan(a, b, out=out)
        for current in (0, 1):
            with torch.cuda.device(current):
                out.fill_(-1)
                assert_product(plan(a, b, out), a, b)
                fresh = gemmery.matmul(a, b)
                assert fresh.device == a.device
                assert torch.equal(fresh, out)
                assert torch.cuda.current_device() == current
    # A plan goes with its GPU; for tensors on another it compiles anew.
    other = torch.device("cuda", 1 - a.get_device())
    a, b, out = a.to(other), b.to(other), out.to(other).fill_(-1)
    assert_product(plan(a, b, out), a, b)


@pytest.mark.parametrize("way", ["short", "ordinary"])
def test_a_launch_is_the_first_that_a_thread_does_with_cuda(way, monkeypatch):
    a, b, out = case(64, 64, 64)
    plan, found = gemmery.plan(a, b, out=out), []
    if way == "ordinary":
        monkeypatch.setattr(plan, "direct", None)
    fresh = torch.empty_like(out)

    def work():
        found.append(plan(a, b, fresh))
        found.append(gemmery.matmul(a, b))
        torch.cuda.synchronize()

    torch.cuda.synchronize()
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert len(found) == 2
    for result in found:
        assert_product(result, a, b)


def test_threads_launch_at_once():
    """With addresses that nobody has seen, from threads that never used CUDA before."""
    a, b, out = case(64, 64, 64)
    plan, failures = gemmery.plan(a, b, out=out), []
    want = plan(a, b, out).clone()
    torch.cuda.synchronize()

    def work():
        try:
            outs = [torch.empty_like(out) for _ in range(200)]
            for fresh in outs:
                plan(a, b, fresh)
            torch.cuda.synchronize()
            assert all(torch.equal(fresh, want) for fresh in outs)
            assert torch.equal(gemmery.matmul(a, b), want)
        except BaseException as failure:
            failures.append(failure)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]


def test_fresh_outputs_are_ordinary_tensors():
    a, b, _ = case(64, 96, 64)
    for call in (lambda: gemmery.matmul(a, b), lambda: gemmery.linear(a, b.t())):
        result = call()
        assert (result.stride(), result.dtype, result.device) == ((96, 1), BF16, a.device)
        assert not result.requires_grad
        assert not result.is_inference()
        result.add_(1)
        assert result._version == 1
        weight = torch.ones_like(result, requires_grad=True)
        (result * weight).sum().backward()
        assert torch.equal(weight.grad, result)
        with torch.inference_mode():
            assert call().is_inference()


# ---------------------------------------------------------------------------------------------------------------------
# Time


def host_times(calls, rounds=15, count=500):
    """Median microseconds that the host is busy with each call, by turns."""
    for call in calls.values():
        for _ in range(count):
            call()
    times = {name: [] for name in calls}
    gc.disable()
    try:
        for _ in range(rounds):
            for name in random.sample(list(calls), len(calls)):
                torch.cuda.synchronize()
                begun = time.perf_counter()
                for _ in range(count):
                    calls[name]()
                times[name].append((time.perf_counter() - begun) / count * 1e6)
    finally:
        gc.enable()
    return {name: statistics.median(found) for name, found in times.items()}


@pytest.mark.parametrize("layout", ["NN", "NT"])
@pytest.mark.parametrize(("m", "n", "k"), [(128, 128, 128), (16, 256, 256)])
def test_a_call_costs_the_host_little(m, n, k, layout):
    """At most 1.2 times torch's `matmul(out=)`; a held plan at most 0.8 times."""
    a, b, out = case(m, n, k, layout)
    plan = gemmery.plan(a, b, out=out)
    partial = functools.partial
    with torch.no_grad():
        times = host_times({
            "torch": partial(torch.matmul, a, b, out=out),
            "matmul": partial(gemmery.matmul, a, b, out=out),
            "plan": partial(plan, a, b, out),
        })  # fmt: skip
    print({name: f"{found:.2f} us" for name, found in times.items()})
    assert times["matmul"] <= 1.2 * times["torch"], times
    assert times["plan"] <= 0.8 * times["torch"], times
