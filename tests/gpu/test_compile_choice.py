"""gemmery as a choice of torch.compile's max-autotune: with CUDA graphs, in training, and from the cache."""

import os
import subprocess
import sys

import pytest
import torch
from torch._inductor import config
from torch._inductor.utils import fresh_cache, run_and_get_code

import gemmery.compile
from gemmery.compile.choice import MARGIN
from tests.choosing import ONLY, OPTIONS, addmm, cases, offers, operands
from tests.gpu.common import DEVICE, DRY, HALVES, error, needs_cuda, size

pytestmark = pytest.mark.gpu

MODE = "max-autotune-no-cudagraphs" if DRY else "max-autotune"
#: Without templates, which take seconds.
ATEN = {"max_autotune_gemm_backends": "ATEN"}
SIZES = {"m": size(200), "n": size(768), "k": size(512)}


@pytest.fixture(autouse=True)
def enabled():
    torch._dynamo.reset()
    with gemmery.compile.enable(), fresh_cache():
        yield


def made(function, *args, only=True, mode=MODE):
    """A function as it is compiled with a mode, and its code."""
    with config.patch(ATEN | (ONLY if only else {})):
        run = torch.compile(function, mode=mode, dynamic=False, fullgraph=True)
        _, code = run_and_get_code(run, *args)
    return run, "\n".join(code)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("name", ["mm", "addmm", "scaled addmm", "bmm"])
def test_in_cuda_graphs(name, dtype):
    """Called often enough that a graph is recorded and replayed, with new numbers each time."""
    function, args, choice = cases(dtype=dtype, device=DEVICE, **SIZES)[name]
    args = tuple(torch.randn_like(x) for x in args)  # with the strides that it is called with
    run, code = made(function, *args)
    assert choice in code
    for _ in range(4):
        args = tuple(torch.randn_like(x) for x in args)
        assert error(run(*args), function(*(x.double() for x in args))) < 5e-3


@pytest.mark.parametrize("mode", [MODE, "max-autotune-no-cudagraphs"])
def test_training(mode):
    """Forward and backward call gemmery, and gradients are those of float64."""
    torch.manual_seed(0)
    layers = torch.nn.Sequential(
        torch.nn.Linear(512, 768), torch.nn.GELU(), torch.nn.Linear(768, 512, bias=False)
    ).to(DEVICE, torch.bfloat16)
    x = torch.randn(size(512), 512, device=DEVICE, dtype=torch.bfloat16)
    used = sum(offer.used for offer in gemmery.compile.choices())
    with config.patch(ATEN | ONLY):
        run = torch.compile(layers, mode=mode, dynamic=False, fullgraph=True)
        for _ in range(4):
            layers.zero_grad(set_to_none=True)
            run(x).float().square().mean().backward()
    assert sum(offer.used for offer in gemmery.compile.choices()) == used + 5
    found = [p.grad for p in layers.parameters()]
    exact = layers.double()
    exact.zero_grad(set_to_none=True)
    exact(x.double()).square().mean().backward()
    for gradient, p in zip(found, exact.parameters(), strict=True):
        assert error(gradient, p.grad) < 2e-2


def test_the_choice_is_that_of_the_times(capfd):
    """Inductor's log lists gemmery, and compiled code has what was faster."""
    a, b, bias, _ = operands(device=DEVICE, **SIZES | {"m": 72})
    _, code = made(addmm, bias, a, b, only=False)
    offer = offers()["addmm", (72, SIZES["n"], SIZES["k"])]
    assert {"addmm", "gemmery_addmm"} <= offer.times.keys()
    assert all(0 < seconds < float("inf") for seconds in offer.times.values())
    others = [seconds for name, seconds in offer.times.items() if name != "gemmery_addmm"]
    assert ("gemmery_addmm" in code) is (offer.times["gemmery_addmm"] * (1 + MARGIN) < min(others))
    assert "gemmery_addmm" in capfd.readouterr().err


@needs_cuda
def test_templates_with_what_is_behind_the_product_are_weighed():
    """With Triton's templates, which Inductor may choose for their fusion; whatever it chooses is right."""

    def behind(bias, a, b):
        return torch.nn.functional.gelu(torch.addmm(bias, a, b))

    a, b, bias, _ = operands(device=DEVICE, **SIZES | {"m": 136})
    result, code = run_and_get_code(torch.compile(behind, mode=MODE, dynamic=False), bias, a, b)
    offer = offers()["addmm", (136, SIZES["n"], SIZES["k"])]
    assert any(name.startswith("triton") for name in offer.times)
    assert ("gemmery_addmm" in "".join(code)) is (offer.used == 1)
    assert error(result, behind(bias.double(), a.double(), b.double())) < 5e-3


def test_dynamic_sizes_are_declined():
    a, b, bias, _ = operands(device=DEVICE, **SIZES)
    run = torch.compile(addmm, options=OPTIONS, dynamic=True, fullgraph=True)
    for rows in (8, 24, 33):
        result, code = run_and_get_code(run, bias, a[:rows], b)
        assert "gemmery" not in "".join(code)
        assert error(result, addmm(bias.double(), a[:rows].double(), b.double())) < 5e-3


CHILD = """
import torch, gemmery.compile
from torch._dynamo.utils import counters
from tests.choosing import ONLY, OPTIONS, close, mm, operands
with gemmery.compile.enable():
    a, b, _, _ = operands(device="{device}")
    result = torch.compile(mm, options=OPTIONS | ONLY, fullgraph=True, dynamic=False)(a, b)
assert close(result, mm, (a, b))
print(counters["inductor"]["fxgraph_cache_hit"], len(gemmery.compile.choices()))
"""


@needs_cuda
def test_a_fresh_process_finds_the_code(tmp_path):
    environment = os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    found = []
    for _ in range(2):
        child = subprocess.run(
            [sys.executable, "-c", CHILD.format(device=DEVICE)],
            env=environment, capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert child.returncode == 0, child.stderr[-3000:]
        found.append(child.stdout.split())
    assert found == [["0", "1"], ["1", "0"]]
