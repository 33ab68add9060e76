"""Tuning and warming up on a GPU: what is measured is used, and after a warm-up nothing compiles."""

import json
import os
import random
import statistics
import subprocess
import sys
import time

import pytest
import torch
from triton import knobs

import gemmery
import gemmery.nn
from gemmery.select import candidates, store
from gemmery.select.samples import sample
from gemmery.tuning.workers import Target, Workers
from tests.gpu.common import assert_product, matrix, needs_cuda, values

pytestmark = [pytest.mark.gpu, needs_cuda]


@pytest.fixture
def fresh(tmp_path, monkeypatch):
    """A store and a cache of kernels of this test's own."""
    monkeypatch.setenv("GEMMERY_STORE", "1")
    monkeypatch.setenv("GEMMERY_CACHE_DIR", str(tmp_path / "store"))
    monkeypatch.setattr(knobs.cache, "dir", str(tmp_path / "kernels"))


@pytest.fixture
def compilations(monkeypatch):
    """Grows with every kernel that this process compiles or loads from disk: whether it was found there."""
    seen = []
    monkeypatch.setattr(knobs.compilation, "listener", lambda *, cache_hit, **more: seen.append(cache_hit))
    return seen


def test_later_calls_take_the_quickest(fresh):
    a, b, bias = (
        matrix(640, 1024, torch.bfloat16),
        matrix(1024, 1408, torch.bfloat16, "T"),
        values((1408,), torch.bfloat16),
    )
    held = gemmery.plan(a, b, bias=bias)
    seen = []
    result = gemmery.tune(a, b, bias=bias, progress=seen.append)
    assert result.untuned == held.config
    assert result.best is not None
    assert result.gain >= 1
    assert len(seen) == seen[-1].total == len(result.seconds) + len(result.refused) > 1
    assert all(1e-6 < seconds < 1e-2 for seconds in result.seconds.values())
    assert gemmery.plan(a, b, bias=bias).config == result.best == candidates(held.problem)[0]
    assert_product(gemmery.matmul(a, b, bias=bias), a, b, bias)
    again = gemmery.tune(a, b, bias=bias)
    assert again.measured == 0
    assert again.seconds == result.seconds


def test_every_config_of_the_space_is_measured_or_refused(fresh):
    a, b = matrix(333, 1000, torch.float16), matrix(1000, 515, torch.float16)
    result = gemmery.tune(a, b, exhaustive=True)
    assert set(result.seconds) | set(result.refused) == set(candidates(result.problem))
    assert result.unmeasured == []


def test_workers_compile_for_this_gpu(fresh, compilations):
    """Their kernels are found in the cache, so they have the same key as those that this process would compile."""
    a, b = matrix(130, 256, torch.bfloat16), matrix(256, 390, torch.bfloat16, "T")
    problem = gemmery.plan(a, b).problem
    configs = candidates(problem)[1:4]
    with Workers(Target.active(), 2) as pool:
        assert [future.result() for future in [pool.submit(problem, config) for config in configs]] == [
            None
        ] * 3
    compilations.clear()
    for config in configs:
        gemmery.Plan(problem, config).fit(*sample(problem, "cuda").given, pinned=True)
    assert compilations == [True] * 3


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up = torch.nn.Linear(896, 2304)
        self.down = torch.nn.Linear(2304, 896, bias=False)


def test_after_a_warm_up_nothing_compiles_and_nothing_is_tuned(fresh, compilations, monkeypatch):
    block = Block().to("cuda", torch.bfloat16)
    rows = 2048
    for warmed in gemmery.warmup(block, max_m=rows):
        assert 0 < len(warmed.kernels) <= 8
    assert compilations
    compilations.clear()
    compiled = []
    monkeypatch.setattr(knobs.runtime, "jit_post_compile_hook", lambda **call: compiled.append(call["repr"]))
    times = []
    for M in [*range(1, 66), *random.sample(range(66, rows + 1), 60)]:
        x = torch.randn(M, 896, device="cuda", dtype=torch.bfloat16)
        begun = time.perf_counter()
        with torch.inference_mode():
            y = gemmery.linear(x, block.up.weight, block.up.bias)
            z = gemmery.linear(y, block.down.weight)
        times.append((time.perf_counter() - begun) / 2)
        assert_product(y, x, block.up.weight.t(), block.up.bias)
    torch.cuda.synchronize()
    assert z.shape == (M, 896)
    assert compilations == []
    assert compiled == []
    assert store.current().rows() == []
    assert statistics.median(times) < 50e-3


@pytest.mark.parametrize("kind", ["two", "stacked", "mlp"])
def test_after_a_warm_up_blocks_compile_nothing(fresh, compilations, kind):
    """Of three blocks of one shape, which lie in memory as they may."""
    how = {"device": "cuda", "dtype": torch.bfloat16}
    if kind == "mlp":
        model = [gemmery.nn.MLP(896, 2304, **how) for _ in range(3)]
    else:
        model = [gemmery.nn.GatedMLP(896, 2304, stacked=kind == "stacked", **how) for _ in range(3)]
    warmed = gemmery.warmup(torch.nn.ModuleList(model), max_m=1024)
    assert all(0 < len(one.kernels) <= 8 for one in warmed)
    assert len(warmed) <= (3 if kind == "two" else 2)
    assert compilations
    compilations.clear()
    with torch.no_grad():
        for M in [*range(1, 34), *random.sample(range(34, 1025), 30)]:
            x = torch.randn(M, 896, **how)
            for block in model:
                assert block(x).isfinite().all()
    assert compilations == []


def test_the_commands(fresh, tmp_path):
    pytest.importorskip("typer")
    pytest.importorskip("rich")
    environment = os.environ | {"TRITON_CACHE_DIR": str(tmp_path / "kernels")}

    def command(*words):
        run = subprocess.run(
            [sys.executable, "-m", "gemmery.cli", *map(str, words)],
            env=environment,
            capture_output=True,
            text=True,
        )
        assert run.returncode == 0, run.stdout + run.stderr
        return run.stdout

    said = command("tune", "--shapes", "256x512x512,64x512x512", "--json", tmp_path / "tuned.json")
    assert "2 problems" in said
    results = json.loads((tmp_path / "tuned.json").read_text())
    assert all(result["best"] for result in results)
    assert command("store", "export", tmp_path / "timings.json").startswith(
        str(sum(len(r["seconds"]) for r in results))
    )
    assert results[0]["best"] in command("explain", "256", "512", "512", "--top", "1")
    (tmp_path / "weights.json").write_text('[{"N": 512, "K": 512}]')
    command("warmup", "--model-shapes", tmp_path / "weights.json", "--max-m", 64)
