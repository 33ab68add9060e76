"""gemmery as a choice of torch.compile's max-autotune: in compiled code, forward and backward, and where it is not."""

import math
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
from torch._dynamo.utils import counters
from torch._inductor.exc import InductorError
from torch._inductor.select_algorithm import ExternKernelCaller
from torch._inductor.utils import fresh_cache

import gemmery.compile
from gemmery.compile import choice, finalists
from gemmery.product import prepare
from tests.choosing import ONLY, OPTIONS, addmm, cases, close, compiled, mm, offers, operands


@pytest.fixture(autouse=True)
def enabled():
    with gemmery.compile.enable():
        yield
    assert not gemmery.compile.is_enabled()


@pytest.mark.parametrize("name", cases())
def test_compiled_code_calls_gemmery(name):
    torch.manual_seed(0)
    function, args, choice = cases()[name]
    before = {key: (x.count, x.used) for key, x in offers().items()}
    result, code = compiled(function, *args, **ONLY)
    assert f"extern_kernels.{choice}(" in code
    assert "import gemmery.compile.choice" in code
    assert close(result, function, args)
    changed = [
        (x.op, x.count - c, x.used - u)
        for key, x in offers().items()
        for c, u in [before.get(key, (0, 0))]
        if (x.count, x.used) != (c, u)
    ]
    assert changed == [(choice.removeprefix("gemmery_"), 1, 1)]


def test_a_thread_whose_code_is_cached_without_the_tag_is_offered_nothing():
    def found():
        _, code = compiled(mm, *operands()[:2], **(ONLY if gemmery.compile.is_enabled() else {}))
        return gemmery.compile.is_enabled(), "gemmery" in code

    with ThreadPoolExecutor(1) as thread:
        is_enabled, calls = thread.submit(found).result()
    assert calls == is_enabled
    assert found() == (True, True)


@pytest.mark.parametrize("name", cases())
def test_the_kernel_is_compiled_beforehand(name, monkeypatch):
    """For the problem that the call then has."""
    found = []
    monkeypatch.setattr(choice, "fitted", lambda problem: found.append(problem))
    # Inductor has no threads in some versions of Python, so it is asked here.
    output = choice._Caller.output_node
    monkeypatch.setattr(choice._Caller, "output_node", lambda self: (self.precompile(), output(self))[1])
    launched = []
    make = prepare.make_plan
    monkeypatch.setattr(
        prepare, "make_plan", lambda problem, *rest: launched.append(problem) or make(problem, *rest)
    )
    function, args, _ = cases(m=40)[name]
    compiled(function, *args, **ONLY)
    assert found == launched


def test_gradients():
    """The products of the backward pass are offered too."""
    a, b, bias, _ = operands(dtype=torch.float16)
    weight = torch.nn.Parameter(b.T.clone())
    x = a.clone().requires_grad_()

    def step(x, weight):
        return torch.addmm(bias.to(x.dtype), x, weight.T)

    gradient = torch.randn(16, 32, dtype=torch.float16)
    used = sum(x.used for x in gemmery.compile.choices())
    torch._dynamo.reset()
    with fresh_cache():
        y = torch.compile(step, options=OPTIONS | ONLY, fullgraph=True)(x, weight)
        y.backward(gradient)
    assert sum(x.used for x in gemmery.compile.choices()) == used + 3
    found = x.grad, weight.grad
    x.grad = weight.grad = None
    step(x.double(), weight.double()).backward(gradient.double())
    torch.testing.assert_close(found, (x.grad, weight.grad), rtol=5e-3, atol=5e-3)


@pytest.mark.parametrize("ours", [1.0, 1.95, 1.97, 3.0, math.inf])
def test_the_fastest_is_chosen_and_its_time_shown(ours, monkeypatch, capfd):
    """Whatever the times are: here they are given, in milliseconds. gemmery must be faster by more than a margin."""
    times = {"gemmery_mm": ours, "mm": 2.0}
    monkeypatch.setattr(ExternKernelCaller, "benchmark", lambda self, *_, **__: times[self.name])
    a, b, _, _ = operands(m=24)
    used = offers()["mm", (24, 32, 48)].used if ("mm", (24, 32, 48)) in offers() else 0
    _, code = compiled(mm, a, b)
    is_faster = ours < 1.96
    assert ("gemmery_mm" in code) is is_faster
    offer = offers()["mm", (24, 32, 48)]
    assert offer.times == {"gemmery_mm": ours / 1e3, "mm": 2.0 / 1e3}
    assert offer.used == used + is_faster
    assert f"gemmery_mm {ours * 1e3:.1f} µs, mm 2000.0 µs" in str(offer)
    assert math.isinf(ours) or f"gemmery_mm {ours:.4f} ms" in capfd.readouterr().err


def test_the_first_time_of_torch_may_be_wrong(monkeypatch):
    """It is measured again, in turn with gemmery. The second product has its times from Inductor's cache."""
    rest = {"gemmery_mm": iter((4.0, 3.0, 2.9)), "mm": iter((9.0, 2.5, 2.0))}
    monkeypatch.setattr(ExternKernelCaller, "benchmark", lambda self, *_, **__: next(rest[self.name]))
    a, b, _, _ = operands(m=56)
    _, code = compiled(lambda a, b, c: (torch.mm(a, b), torch.mm(c, b)), a, b, a * 2)
    assert "gemmery_mm" not in code
    offer = offers()["mm", (56, 32, 48)]
    assert offer.times == pytest.approx({"gemmery_mm": 2.9e-3, "mm": 2e-3})
    assert (offer.count, offer.used) == (2, 0)


@pytest.mark.parametrize(("mm_again", "other"), [(5.0, 1.0), (1.0, 5.0), (5.0, 5.0)])
def test_each_of_torchs_kernels_is_measured_again(mm_again, other, monkeypatch):
    """Some biases are added by another kernel of torch; no time is that of the first measurement."""
    kernels = {
        name: ExternKernelCaller.__new__(ExternKernelCaller) for name in ("addmm", "bias_addmm")
    } | {"gemmery_addmm": choice._Caller.__new__(choice._Caller)}  # fmt: skip
    for name, one in kernels.items():
        one.name = name
    ours = kernels["gemmery_addmm"]
    ours.torchs = [kernels["addmm"], kernels["bias_addmm"]]
    ours.record = gemmery.compile.Offer("addmm", (8, 8, 8), torch.bfloat16, ((8, 1), (8, 1)))
    times = {"addmm": mm_again, "bias_addmm": other, "gemmery_addmm": 2.0}
    monkeypatch.setattr(ExternKernelCaller, "benchmark", lambda self, *_, **__: times[self.name])
    found = {kernels["addmm"]: 3.0, kernels["bias_addmm"]: 3.0, ours: ours.benchmark(out=torch.empty(0))}
    choice.measured(found)
    assert [found[one] for one in kernels.values()] == pytest.approx([mm_again, other, 2.04])
    assert ours.record.times == pytest.approx({name: x / 1e3 for name, x in times.items()})


def test_a_kernel_of_torch_that_fails_leaves_gemmery_its_time(monkeypatch):
    ours = choice._Caller.__new__(choice._Caller)
    fails = ExternKernelCaller.__new__(ExternKernelCaller)
    ours.name, fails.name, ours.torchs = "gemmery_mm", "mm", [fails]
    ours.record = gemmery.compile.Offer("mm", (8, 8, 8), torch.bfloat16, ((8, 1), (8, 1)))

    def benchmark(self, *args, out):
        if self is fails:
            raise RuntimeError("CUBLAS_STATUS_NOT_SUPPORTED")
        return 2.0

    monkeypatch.setattr(ExternKernelCaller, "benchmark", benchmark)
    found = {fails: math.inf, ours: ours.benchmark(out=torch.empty(0))}
    choice.measured(found)
    assert found == {fails: math.inf, ours: pytest.approx(2.04)}


class Timed:
    """A choice with the time of the host and of the GPU, in seconds."""

    bmreq = "a request"

    def __init__(self, host, gpu):
        self.host, self.gpu = host, gpu


def test_the_host_takes_no_part_in_cuda_graphs(monkeypatch):
    """The fastest on the GPU is the fastest, though its launch takes longer."""
    ours, torchs = Timed(20e-6, 8e-6), Timed(30e-6, 12e-6)
    quick, slow, third = Timed(5e-6, 11e-6), Timed(5e-6, 13e-6), Timed(5e-6, 90e-6)
    fails, several = Timed(0, math.inf), Timed(0, 1e-6)
    several.bmreq = None
    times = {x: (x.host + x.gpu) * 1e3 for x in (third, ours, torchs, fails, quick, slow, several)}
    asked = []

    def measure(choice, args, out):
        asked.append(choice)
        return choice.gpu

    monkeypatch.setattr(finalists, "_on_the_gpu", lambda device: measure)
    with torch._inductor.config.patch({"triton.cudagraphs": True}):
        again = finalists.seconds(
            ours, [torchs, fails], times, (), SimpleNamespace(is_cuda=True, device="cuda")
        )
    assert set(asked) == set(again) == {ours, torchs, quick, slow}
    # The host's part is that of the fastest template for all.
    assert again == {x: pytest.approx(5e-6 + x.gpu) for x in again}


def _declined():
    a, b, bias, _ = operands()
    return {
        "the default mode": (mm, (a, b), {"max_autotune": False}),
        "fp32": (mm, (a.float(), b.float()), {}),
        "dynamic sizes": (addmm, (bias, a, b), {"dynamic": True}),
        "no elements": (mm, (a[:0], b), {}),
        "another process": (mm, (a, b), {"pipeline_max_autotune_gemm": True}),
    }


@pytest.mark.parametrize("name", _declined())
def test_not_offered(name):
    function, args, options = _declined()[name]
    before = sum(x.count for x in gemmery.compile.choices())
    result, code = compiled(function, *args, **options)
    assert "gemmery" not in code
    assert sum(x.count for x in gemmery.compile.choices()) == before
    assert close(result, function, args)


def test_regions_import_it():
    """A subgraph's own imports are dropped by Inductor."""
    inner = torch.compiler.nested_compile_region(addmm)
    a, b, bias, _ = operands()

    def twice(bias, a, b, c):
        return inner(bias, a, b), inner(bias, c, b)

    _, code = compiled(twice, bias, a, b, a * 2, **ONLY)
    assert "import gemmery.compile.choice" in code
    assert "gemmery_addmm" in code


def test_the_cache_tells_code_with_gemmery_from_code_without():
    a, b, _, _ = operands()

    def compile_again():
        torch._dynamo.reset()
        counters.clear()
        torch.compile(mm, options=OPTIONS | ONLY, fullgraph=True, dynamic=False)(a, b)
        return counters["inductor"]["fxgraph_cache_hit"]

    with fresh_cache():
        assert compile_again() == 0
        assert compile_again() == 1
        gemmery.compile.disable()
        with pytest.raises(InductorError, match="No choices"):
            compile_again()


CHILD = """
import torch, gemmery.compile
from torch._dynamo.utils import counters
from tests.choosing import ONLY, OPTIONS, close, mm, operands
with gemmery.compile.enable():
    a, b, _, _ = operands()
    result = torch.compile(mm, options=OPTIONS | ONLY, fullgraph=True, dynamic=False)(a, b)
assert close(result, mm, (a, b))
print(counters["inductor"]["fxgraph_cache_hit"], len(gemmery.compile.choices()))
"""


@pytest.mark.slow
def test_a_fresh_process_finds_the_code(tmp_path):
    """The second one runs what the first has compiled, and chooses nothing."""
    environment = os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    found = []
    for _ in range(2):
        child = subprocess.run(
            [sys.executable, "-c", CHILD], env=environment, capture_output=True, text=True, check=False
        )
        assert child.returncode == 0, child.stderr[-3000:]
        found.append(child.stdout.split())
    assert found == [["0", "1"], ["1", "0"]]
