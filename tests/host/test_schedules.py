"""Schedules are values in a registry: a new one is considered, costed, bound and shown without another edit."""

import ast
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import gemmery
from gemmery import Config, devices, schedules
from gemmery.kernels import gemm
from gemmery.lab.doctor.machine import runs
from gemmery.lab.page.predicted import knobs
from gemmery.lab.tile_order import programs_at_once, walk
from gemmery.launch.explain import explain_problem
from gemmery.schedules.binding import Binding
from gemmery.schedules.tile import Tile
from gemmery.select import candidates, measured, rank, shortlist, space, tiles
from gemmery.select.shapes import problem_of

H200 = devices.TABLE["NVIDIA H200"]
ROOT = Path(gemmery.__file__).parent
TEXT = "128x128x64-g8-w4-s4-toy-descriptor"


class ToyBinding(Binding):
    """Each program has two tiles."""

    def _programs(self, units):
        return -(-units // 2)


class Toy(Tile):
    """As a new GPU's kernel would be: on one architecture, for some problems, twice as quick as the others."""

    name = "toy"
    about = "a program for two tiles"
    title = "toys"
    knobs = frozenset({"split_k"})
    universal = False
    archs = ("sm_90",)
    reason = "chosen for 100 to 999 rows"
    instead = "nothing to play with"
    splits = (2, 5)
    tables = ("toy",)

    def needs(self, problem):
        yield from super().needs(problem)
        yield not problem.batch, "no batch"

    def considers(self, problem, rows, config):
        return (rows >= 100) & (rows < 1000)

    def refusal(self, problem, config):
        return self.unsuited(problem) or super().refusal(problem, config)

    def bind(self, problem, config):
        return ToyBinding(problem, config)

    def costs(self, problem, space, given):
        cost = super().costs(problem, space, given)
        return replace(cost, total=cost.total / 100)


def forget():
    for cached in (space.tiles_of, space._space, measured._table_of, shortlist._of, shortlist.numerics):
        cached.cache_clear()


@pytest.fixture
def toy(monkeypatch):
    """A schedule that is registered, with one row in one table of tiles."""
    forget()
    made = Toy()
    monkeypatch.setitem(schedules.REGISTRY, "toy", made)
    monkeypatch.setitem(tiles.HOPPER["half"], ("descriptor", "toy"), "128x128x64 8 4 4 1.0 splits")
    yield made
    forget()


def of(M, **options):
    return problem_of(M, 4096, 4096, device=options.pop("device", H200), **options)


def test_a_config_names_it(toy):
    config = Config.of(TEXT)
    assert config.schedule == "toy"
    assert str(config) == TEXT
    assert Config.of(TEXT + "-k5").split_k == 5
    with pytest.raises(
        ValueError,
        match="swap needs the tile schedule, the specialized one, the cooperative one, the pingpong one",
    ):
        replace(config, swap=True)
    with pytest.raises(
        ValueError,
        match=r"split_k needs the tile schedule, .*the sliced_k one, the sliced_sparse one or the toy one",
    ):
        Config.of("128x128x64-g8-w4-s4-persistent-descriptor-k2")


def test_a_config_names_it_only_while_it_is_registered():
    with pytest.raises(ValueError, match="is not of the form"):
        Config.of(TEXT)
    with pytest.raises(ValueError, match="schedule is 'toy'; it must be one of"):
        Config(128, 128, 64, schedule="toy")


def test_it_is_considered_where_it_suits(toy):
    def splits(problem):
        return {config.split_k for config in space.space_of(problem).configs if config.schedule == "toy"}

    assert splits(of(200)) == {1, 2, 5}
    assert splits(of(200, batch=(3,))) == set()
    assert splits(of(200, device=devices.TABLE["NVIDIA A100"])) == set()
    assert splits(of(200, dtype=torch.int8)) == set()


def test_it_is_costed_and_chosen(toy):
    ranked = rank(of(200))
    config, cost = ranked[0]
    assert config.schedule == "toy"
    assert cost.total < min(other.total for found, other in ranked if found.schedule != "toy") / 10
    assert candidates(of(200))[0] == config
    # Outside of its rows the others are ranked as without it.
    assert candidates(of(2000))[0].schedule != "toy"


def test_the_others_cost_what_they_did(monkeypatch):
    forget()
    before = dict(rank(of(200)))
    monkeypatch.setitem(schedules.REGISTRY, "toy", Toy())
    monkeypatch.setitem(tiles.HOPPER["half"], ("descriptor", "toy"), "128x128x64 8 4 4 1.0 splits")
    forget()
    after = {config: cost for config, cost in rank(of(200)) if config.schedule != "toy"}
    assert after == before
    forget()


def test_it_is_bound_to_its_kernel(toy):
    binding = schedules.bind(of(200), Config.of(TEXT))
    assert type(binding) is ToyBinding
    assert binding.kernel is gemm.gemm_tiles
    assert binding.grid == (32, 1, 1)
    with pytest.raises(ValueError, match=r"^config 128x.*needs a GPU of sm_90"):
        schedules.bind(of(200, device=devices.TABLE["NVIDIA A100"]), Config.of(TEXT))


def test_it_is_shown(toy):
    problem, config = of(200), Config.of(TEXT)
    assert TEXT.partition("-")[0] in str(explain_problem(problem))
    assert {"name": "schedule", "value": "toy", "about": toy.about} in knobs(problem, config)
    assert runs(devices.ARCHS["sm_90"])["toys"] == toy.reason
    assert runs(devices.ARCHS["sm_80"])["toys"] == f"none: {toy.instead}"
    assert programs_at_once(problem, config) == toy.at_once(problem, config)
    assert len(np.unique(walk(problem, config).program)) == 64


def test_its_own_measurements_count(toy, monkeypatch, tmp_path):
    for table in measured.TABLES.glob("nvidia-h200-half*.json"):
        (tmp_path / table.name).write_text(table.read_text())
    (tmp_path / "nvidia-h200-half-toy.json").write_text(
        json.dumps({"shapes": [[1, 200, 4096, 4096]], "configs": [TEXT], "microseconds": [[1e6]]})
    )
    monkeypatch.setattr(measured, "TABLES", tmp_path)
    assert "toy" in {table.suffix for table in measured.tables_of(H200)}
    assert rank(of(200))[0][0] != Config.of(TEXT)


# ---------------------------------------------------------------------------------------------------------------------
# Nobody else knows their names

#: Their own modules, and tables of tiles with texts of configs.
KNOWN = ("schedules/", "select/tiles.py", "select/quantized_tiles.py", "select/block_tiles.py")
#: Files that still compare a schedule with a name.
STILL = {
    # What a matrix with scales along K refuses.
    "operands/scaled.py",
}


def named(tree):
    """Names of schedules that a module has as strings: any but "tile", which has other meanings too."""
    names = set(schedules.REGISTRY)
    for node in ast.walk(tree):
        compared = isinstance(node, ast.Compare) and "schedule" in ast.unparse(node)
        looked_at = ast.walk(node) if compared else [node]
        for one in looked_at:
            if isinstance(one, ast.Constant) and one.value in names - (set() if compared else {"tile"}):
                yield one.value


def test_no_schedule_is_named_elsewhere():
    found = set()
    for path in ROOT.rglob("*.py"):
        file = path.relative_to(ROOT).as_posix()
        if not file.startswith(KNOWN) and any(named(ast.parse(path.read_text(encoding="utf-8")))):
            found.add(file)
    assert found == STILL


#: The schedules of the configs that are tried first, of products of all kinds; run with another version of Triton.
TRIED = """
import json, sys
import triton
triton.__version__ = sys.argv[1]
from gemmery.devices import TABLE
from gemmery.lab.fused_targets import FUSED, abstract_product
from gemmery.select import candidates

found = {}
for name in ("bias_gelu", "int4_gelu", "nvfp4", "sparse", "sparse_int4", "sparse_fp8", "scaled_blocks", "dequantised"):
    problem, _ = abstract_product(name, FUSED[name].dtypes[0], 300, 1024, TABLE["NVIDIA H200"])
    found[name] = sorted({config.schedule for config in candidates(problem)})
print(json.dumps(found))
"""


@pytest.mark.slow
def test_a_triton_that_nobody_read_gets_kernels_that_run_with_all_of_them():
    versioned = {name for name, each in schedules.REGISTRY.items() if each.versions}
    assert versioned

    def tried(version):
        environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
        run = subprocess.run(
            [sys.executable, "-c", TRIED, version], capture_output=True, text=True, env=environment
        )
        assert run.returncode == 0, run.stderr
        return json.loads(run.stdout)

    known, newer = tried("3.9.0"), tried("3.10.0")
    assert known.keys() == newer.keys()
    assert set().union(*known.values()) & versioned
    assert all(newer.values()), newer
    assert not set().union(*newer.values()) & versioned
