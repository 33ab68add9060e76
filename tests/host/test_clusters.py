"""Clusters on the host: how work is divided, where they are offered, and that they change nothing elsewhere."""

import itertools
import json
from pathlib import Path

import numpy as np
import pytest
import torch

from gemmery import Config, devices, lab
from gemmery.schedules import bind
from gemmery.schedules import cluster as clusters
from gemmery.schedules.cluster import CLUSTER
from gemmery.schedules.persistent_static import Work
from gemmery.select import measured, rank, shortlist, space, tiles
from gemmery.select.shapes import problem_of

DECODE = Path(lab.__file__).with_name("suite_data") / "decode.json"
H200 = devices.TABLE["NVIDIA H200"]
PLAIN = Config.of("128x128x64-g8-w4-s8-cluster-descriptor-c2x1-stream")


def of(M, N=4096, K=4096, device=H200, **options):
    return problem_of(M, N, K, device=device, **options)


def forget():
    for cached in (space.tiles_of, space._space, measured._table_of, shortlist._of, shortlist.numerics):
        cached.cache_clear()


@pytest.fixture
def fresh():
    """Nothing is remembered of what was available before, nor afterwards of what this test made so."""
    forget()
    yield
    forget()


@pytest.fixture
def everywhere(monkeypatch, fresh):
    """As on a Triton that has clusters."""
    monkeypatch.setattr(CLUSTER, "available", lambda: True)


def shares(work, steps):
    """What `kernels.cluster` makes of the numbers: for each program the tiles along K that it takes, cut or whole."""
    for program in range(work.programs):
        for tile in range(program, work.whole, work.programs):
            yield program, tile, 0, steps
        if program // work.parts < work.cut:
            low = program % work.parts * work.chunk
            yield program, work.whole + program // work.parts, low, min(low + work.chunk, steps)


CASES = [
    (tiles, steps, most, split)
    for tiles, steps, most, split in itertools.product(
        (1, 13, 40, 66, 80, 132, 168, 224), (1, 2, 8, 63, 64, 112, 400), (30, 66, 132), (1, 2, 3, 4, 8)
    )
]


def test_every_step_is_taken_once():
    for case in CASES:
        every_step_is_taken_once(*case)


def every_step_is_taken_once(tiles, steps, most, split):
    work = Work.divide(tiles, steps, most, split=split)
    assert work.programs <= most
    parts = {}
    for program, tile, low, high in shares(work, steps):
        assert low < high
        parts.setdefault(tile, []).append((low, high, program))
    assert sorted(parts) == list(range(tiles))
    for each in parts.values():
        ends = [0, *(high for _, high, _ in sorted(each))]
        assert [low for low, _, _ in sorted(each)] == ends[:-1]
        assert ends[-1] == steps


def test_a_cut_tile_has_several_parts_and_room_for_each():
    for case in CASES:
        work = Work.divide(*case[:3], split=case[3])
        assert work.parts >= 2 if work.cut else work.parts == 1
        cut = [program for program, tile, _, _ in shares(work, case[1]) if tile >= work.whole]
        assert sorted(cut) == list(range(work.cut * work.parts))
        assert work.partials(16, 128) == 16 * 128 * len(cut)


def test_tails_cover_the_rest():
    assert Work.divide(224, 64, 66, tail=2) == Work(66, 198, tail=52)
    assert Work.divide(40, 64, 66, tail=4) == Work(66, 0, tail=160)
    assert Work.divide(132, 64, 66, tail=4) == Work(66, 132)
    assert Work.divide(60, 64, 66, tail=2) == Work(60, 60)


def test_shares_along_k():
    assert Work.divide(32, 224, 66, split=2) == Work(64, 0, cut=32, parts=2, chunk=112)
    assert Work.divide(80, 80, 66, split=4) == Work(66, 66, cut=14, parts=4, chunk=20)
    assert Work.divide(80, 80, 66, split=8, tail=2) == Work(66, 66, tail=28)  # 112 parts for 66 programs


def test_bases():
    assert clusters.bases(1, 1) == ()
    assert clusters.bases(2, 1) == ((1, 0),)
    assert clusters.bases(2, 4) == ((1, 0), (0, 1), (0, 2))


def test_many_at_once():
    for tiles_, steps, most, split in CASES:
        for tail in (1, 2, 4) if split == 1 else (1,):
            work = Work.divide(tiles_, steps, most, tail, split)
            whole, small, chunk, parts = map(int, Work.divide_many(tiles_, steps, most, tail, split))
            assert whole == -(-work.whole // most)
            assert small == -(-work.tail // most)
            assert chunk == (work.chunk if work.cut else 0)
            assert parts == work.parts


# ---------------------------------------------------------------------------------------------------------------------
# Where they are offered

UNSUITED = {
    "another GPU": {"device": devices.TABLE["NVIDIA A100"]},
    "a newer GPU": {"device": devices.TABLE["NVIDIA B200"]},
    "batch": {"batch": (3,)},
    "fp32": {"dtype": torch.float32},
    "int8": {"dtype": torch.int8},
    "fp8": {"dtype": torch.float8_e4m3fn},
    "fp32 output": {"out_dtype": torch.float32},
    "odd rows": {"K": 4097},
    "odd output": {"N": 4097},
    "empty sum": {"K": 0},
}


def clustered(problem):
    return [config for config, _ in rank(problem) if config.schedule == "cluster"]


@pytest.mark.parametrize("options", UNSUITED.values(), ids=UNSUITED)
def test_what_does_not_suit(everywhere, options):
    problem = of(200, **options)
    assert not CLUSTER.suits(problem)
    assert not clustered(problem)
    with pytest.raises(ValueError, match="schedule 'cluster' needs Triton"):
        bind(problem, PLAIN)


def test_a_triton_without_them(monkeypatch, fresh):
    monkeypatch.setattr(CLUSTER, "available", lambda: False)
    assert not clustered(of(200))
    with pytest.raises(ValueError, match="schedule 'cluster' needs Triton"):
        bind(of(200), PLAIN)


@pytest.mark.parametrize("M", (1, 16, 64, 512, 4096))
def test_other_numbers_of_rows(everywhere, M):
    assert not clustered(of(M))


def test_nothing_changes_where_they_are_not_available(monkeypatch, fresh, tmp_path):
    """The choices are those of a table of tiles, and of measurements, that never heard of clusters."""
    monkeypatch.setattr(CLUSTER, "available", lambda: False)
    problems = [
        of(M, N, K, batch=batch, dtype=dtype)
        for M, (N, K) in itertools.product((1, 48, 65, 128, 300, 511, 2048), ((4096, 4096), (28672, 4096), (2112, 7168)))
        for batch, dtype in (((), torch.bfloat16), ((4,), torch.float16), ((), torch.int8))
    ]  # fmt: skip
    before = [rank(problem) for problem in problems]
    forget()
    half = {key: rows for key, rows in tiles.HOPPER["half"].items() if "cluster" not in key}
    assert len(half) == len(tiles.HOPPER["half"]) - 1
    monkeypatch.setitem(tiles.HOPPER, "half", half)
    for table in measured.TABLES.glob("*.json"):
        if "cluster" not in table.name:
            (tmp_path / table.name).write_text(table.read_text())
    monkeypatch.setattr(measured, "TABLES", tmp_path)
    assert [rank(problem) for problem in problems] == before


def test_other_rows_are_ranked_among_themselves_as_before(monkeypatch, fresh):
    """What clusters measured says nothing of the other kernels' times."""
    problems = [of(M, N, K) for M, N, K in ((65, 4096, 4096), (300, 8192, 8192), (2048, 4096, 4096))]
    predicted = []
    for there in (False, True):
        monkeypatch.setattr(CLUSTER, "available", lambda there=there: there)
        forget()
        predicted.append([{c: cost for c, cost in rank(p) if c.schedule != "cluster"} for p in problems])
    for without, with_them in zip(*predicted, strict=True):
        assert set(without) == set(with_them)
        for config, cost in without.items():
            assert with_them[config].total == pytest.approx(cost.total, rel=1e-9)


def test_they_are_chosen_for_a_few_hundred_rows(everywhere):
    rows = json.loads(DECODE.read_text())["rows"]
    mid = [row for row in rows if CLUSTER.rows.start <= row["M"] < CLUSTER.rows.stop]
    chosen = [rank(of(row["M"], row["N"], row["K"]))[0][0].schedule for row in mid]
    # Most of the others are tiles of any width, which are predicted to be quicker.
    assert chosen.count("cluster") > len(mid) / 3


def test_few_kernels_serve_a_weight(everywhere):
    for N, K in ((6144, 4096), (8192, 8192), (28672, 4096)):
        assert len(shortlist.of(of(1, N, K))) <= shortlist.KERNELS


def test_the_model_comes_near_what_was_measured(everywhere):
    table = json.loads((measured.TABLES / "nvidia-h200-half-cluster.json").read_text())
    wrong = []
    for shape, times in zip(table["shapes"], table["microseconds"], strict=True):
        if shape[1] in CLUSTER.rows:
            predicted = {str(config): cost for config, cost in rank(of(*shape[1:]))}
            assert set(table["configs"]) <= set(predicted)
            wrong += [
                abs(np.log((predicted[text].total - predicted[text].correction) / (time * 1e-6)))
                for text, time in zip(table["configs"], times, strict=True)
                if time is not None
            ]
    assert len(wrong) > 300
    assert np.median(wrong) < 0.06


# ---------------------------------------------------------------------------------------------------------------------
# The binding

needs_gluon = pytest.mark.skipif(
    not CLUSTER.available(), reason=f"kernels.cluster needs Triton {' or '.join(CLUSTER.versions)}"
)


@needs_gluon
@pytest.mark.parametrize("layout", ("NN", "NT", "TN", "TT"))
def test_descriptors_cover_the_matrices(layout):
    problem = of(304, 512, 1024, layout=layout)
    a, b, out = (
        torch.empty(size, dtype=torch.bfloat16, device="meta")
        for size in ((304, 1024), (1024, 512), (304, 512))
    )
    described = bind(problem, PLAIN).arguments((a, b, out), (1, 1))[:3]
    assert described[0].shape == ([304, 1024] if layout[0] == "N" else [1024, 304])
    assert described[1].shape == ([1024, 512] if layout[1] == "N" else [512, 1024])
    assert [list(each.strides) for each in described] == [[each.shape[1], 1] for each in described]


@needs_gluon
def test_one_kernel_for_every_number_of_rows():
    for text in (
        str(PLAIN),
        str(PLAIN).replace("-c2x1", "-k2-c2x1"),
        str(PLAIN).replace("-c2x1", "-t2-c2x1"),
    ):
        bound = [bind(of(M, 2048, 4096), Config.of(text)) for M in range(65, 512, 7)]
        assert all(each.constants == bound[0].constants for each in bound)
        assert len({each.grid for each in bound}) > 1
