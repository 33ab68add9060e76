"""Compiling in other processes: the code is found in Triton's cache, and whatever happens to a worker is told."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from gemmery import Config
from gemmery.select import keys
from gemmery.tuning import workers
from gemmery.tuning.workers import Target, Workers
from tests.problems import make

# Long, and about gemmery more than about Triton.
pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
HOPPER = Target("cuda", 90, 32)
CONFIG = Config(64, 64, 64, num_stages=2)
#: Wants everything that a description can say: misaligned, batched, with a bias.
P = make(130, 70, 99, device="NVIDIA H200", dtype=torch.bfloat16, batch=(3,), bias=True, pad=1, start=1)

#: Compiles the same in another process, as the one does that measures, and says whether it was found in the cache.
FINDS = """
import json, sys
from triton import knobs
from gemmery import Config, devices
from gemmery.lab import targets
from gemmery.schedules import bind
from gemmery.select import keys
from gemmery.select.samples import sample
targets.use_target("sm_90")
hits = []
knobs.compilation.listener = lambda *, cache_hit, **more: hits.append(cache_hit)
problem = keys.from_dict(json.loads(sys.argv[1]), devices.TABLE["NVIDIA H200"])
bind(problem, Config.of(sys.argv[2])).compile(*sample(problem, "meta").given)
print(json.dumps(hits))
"""


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """A cache of kernels of this test's own."""
    from triton import knobs

    monkeypatch.setattr(knobs.cache, "dir", str(tmp_path))
    return tmp_path


def finds(cache, problem, config):
    environment = os.environ | {
        "TRITON_CACHE_DIR": str(cache),
        "PYTHONPATH": workers._environment()["PYTHONPATH"],
    }
    run = subprocess.run(
        [sys.executable, "-c", FINDS, keys.to_text(problem), str(config)], env=environment, capture_output=True,
        text=True, check=True,
    )  # fmt: skip
    return json.loads(run.stdout)


def test_another_process_finds_what_a_worker_compiled(cache):
    with Workers(HOPPER, 1) as pool:
        assert pool.submit(P, CONFIG).result() is None
    assert finds(cache, P, CONFIG) == [True]
    assert finds(cache, P, Config(32, 64, 64, num_stages=2)) == [False]


#: Has a worker compile products with traced functions, and says whether they are found in the cache then.
TRACED = """
import json
from triton import knobs
from gemmery.devices import TABLE
from gemmery.lab import targets
targets.use_target("sm_90")
from gemmery.lab.fused_targets import abstract_product
from gemmery.schedules import bind
from gemmery.select import candidates
from gemmery.tuning.workers import Target, Workers
hits = []
knobs.compilation.listener = lambda *, cache_hit, **more: hits.append(cache_hit)
abstract_problem = [abstract_product(name, "bf16", 16, 4096, TABLE["NVIDIA H200"]) for name in ("swiglu_pair", "normed_swiglu", "several")]
with Workers(Target.active(), 1) as pool:
    for problem, _ in abstract_problem:
        assert pool.submit(problem, candidates(problem)[0]).result() is None
for problem, tensors in abstract_problem:
    bind(problem, candidates(problem)[0]).compile(*tensors)
print(json.dumps(hits))
"""


@pytest.mark.exhaustive
def test_workers_compile_traced_functions(cache):
    environment = os.environ | {
        "TRITON_CACHE_DIR": str(cache),
        "PYTHONPATH": workers._environment()["PYTHONPATH"],
    }
    run = subprocess.run([sys.executable, "-c", TRACED], env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert json.loads(run.stdout) == [True] * 3


@pytest.mark.exhaustive
def test_workers_work_side_by_side_and_end(cache):
    with Workers(HOPPER, 2) as pool:
        futures = [pool.submit(make(m, 64, 64, device="NVIDIA H200"), CONFIG) for m in (64, 128, 256)]
        assert [future.result() for future in futures] == [None] * 3
        processes = [worker._process for worker in pool._started]
        assert len(processes) == 2
    assert all(process.poll() is not None for process in processes)
    with pytest.raises(RuntimeError):
        pool.submit(P, CONFIG)


def test_a_kernel_that_does_not_compile_ends_no_worker(cache):
    """The worker answers, and goes on with the next; what is wrong is found by whoever compiles it again."""
    impossible = Config(64, 64, 64, loader="descriptor")
    with Workers(HOPPER, 1) as pool:
        assert pool.submit(P, impossible).result() is None
        assert pool.submit(P, CONFIG).result() is None
        assert len(pool._started) == 1


def test_a_compiler_that_dies_is_reported_and_replaced(cache):
    with Workers(HOPPER, 1) as pool:
        pool.submit(P, CONFIG).result()
        os.kill(pool._started[0]._process.pid, signal.SIGSEGV)
        time.sleep(0.5)
        assert "signal 11" in pool.submit(P, CONFIG).result()
        assert pool.submit(P, CONFIG).result() is None
        assert len(pool._started) == 2


def test_where_no_worker_starts_all_compile_in_this_process(cache, monkeypatch):
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with Workers(HOPPER, 1) as pool:
        with pytest.warns(RuntimeWarning, match="no kernels compile in parallel: .* status 1"):
            assert pool.submit(P, CONFIG).result() is None
        assert pool.submit(P, CONFIG).result() is None
        assert len(pool._started) == 1


def test_leaving_early_gives_up_what_is_not_done(cache):
    begun = time.perf_counter()
    with Workers(HOPPER, 1) as pool:
        futures = [pool.submit(make(m, 64, 64, device="NVIDIA H200"), CONFIG) for m in range(1, 200)]
    assert time.perf_counter() - begun < 30
    assert all(future.done() for future in futures)
    assert sum(not future.cancelled() for future in futures) < 100
    assert all(worker._process.poll() is not None for worker in pool._started)


def test_a_worker_ends_with_the_process_that_began_it(cache):
    code = (
        "import time, os, sys\n"
        "from gemmery.tuning.workers import Target, _Worker\n"
        "worker = _Worker(Target('cuda', 90, 32)); worker.ask('')\n"
        "print(worker._process.pid, flush=True); os._exit(0)\n"
    )
    environment = os.environ | {"PYTHONPATH": workers._environment()["PYTHONPATH"]}
    run = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    number = int(run.stdout)
    for _ in range(100):
        status = Path(f"/proc/{number}/stat")
        if not status.exists() or status.read_text().rsplit(")", 1)[1].split()[0] == "Z":
            return
        time.sleep(0.1)
    pytest.fail("the worker is still there")
