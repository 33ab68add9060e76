"""Tiles of any width: their sizes, what refuses them, what they cost, and what the ring's views rest on."""

import itertools

import numpy as np
import pytest
import torch

from gemmery import Config, schedules
from gemmery.launch.explain import explain_problem
from gemmery.schedules import any_width
from gemmery.select import candidates, rank
from gemmery.select.shapes import device_named, problem_of
from gemmery.select.space import tiles_of
from gemmery.tuning import tuner

pytest.importorskip("triton.experimental.gluon.language.nvidia.hopper")
from gemmery.kernels.any_width import boxes, largest_box, parts_of, stage_rows

H200 = device_named("H200")
ROWS = [
    tile.config for tile in tiles_of("hopper", "half") if tile.config.schedule in ("cooperative", "pingpong")
]


def problem(M=1000, N=1536, K=2048, **more):
    return problem_of(M, N, K, device=H200, **more)


def sides(config):
    return (config.block_n, config.block_m) if config.swap else (config.block_m, config.block_n)


@pytest.mark.parametrize("rows", range(16, 257, 8))
@pytest.mark.parametrize("turned", [False, True])
def test_boxes_cover_the_rows_once_and_begin_at_multiples_of_their_size(rows, turned):
    largest = largest_box.fn(rows, turned)
    found = boxes.fn(rows, largest, turned)
    reached = 0
    for size, at, _ in found:
        assert at == reached
        assert (64 * 3 + at) % size == 0
        reached += size
    assert reached == (-(-rows // 64) * 64 if turned else rows)
    assert len({number for *_, number in found}) <= 4
    for x_rows in (64, 128, 192, 256):
        stage = stage_rows.fn(x_rows, rows, turned)
        assert stage >= x_rows + reached
        # So that a view of the ring in blocks of a box's size has one that begins at each box of each stage.
        assert all(stage % size == 0 and x_rows % size == 0 for size, *_ in found)


@pytest.mark.parametrize("rows", range(16, 257, 8))
def test_parts_of_a_tile_cover_it(rows):
    for width in (16, 32, 64):
        if width <= rows:
            found = parts_of.fn(rows, width)
            assert set().union(*(range(at, at + width) for at in found)) == set(range(rows))


def test_rows_are_configs_that_fit():
    assert len(ROWS) > 150
    assert {Config.of(str(config)) for config in ROWS} == set(ROWS)
    shared = H200.target.shared
    for config, layout in itertools.product(ROWS, ("NT", "NN", "TN")):
        p = problem(layout=layout)
        parts = any_width.buffers(p, config) * config.num_warps // 4 * 64 * any_width.width_of(p, config) * 2
        assert config.num_stages * any_width.stage_bytes(p, config) + parts + any_width.BARRIERS <= shared


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("128x172x64-g8-w8-s4-cooperative-descriptor", "multiple of 8 from 16 to 256"),
        ("256x184x64-g8-w8-s4-cooperative-descriptor", "multiple of 8 from 16 to 176"),
        ("192x208x64-g8-w12-s4-cooperative-descriptor", "multiple of 8 from 16 to 200"),
        ("128x184x64-g8-w8-s4-pingpong-descriptor", "multiple of 8 from 16 to 176"),
        ("128x8x64-g8-w8-s4-cooperative-descriptor", "multiple of 8 from 16"),
        ("96x128x64-g8-w8-s4-cooperative-descriptor", "64 or 128 rows for each warpgroup"),
        ("128x128x64-g8-w12-s4-cooperative-descriptor", "64 or 128 rows for each warpgroup"),
        ("128x128x128-g8-w8-s4-cooperative-descriptor", "block_k 64"),
        ("128x128x64-g8-w8-s4-cooperative-pointer", "descriptor loader"),
        ("128x128x64-g8-w4-s4-pingpong-descriptor", "8 warps"),
        ("128x128x64-g8-w8-s4-pingpong-descriptor-k2", "split_k needs"),
        ("128x128x64-g8-w8-s4-cooperative-descriptor-k2", "split_k needs"),
        ("128x128x64-g8-w8-s4-cooperative-descriptor/2", "split_store needs"),
    ],
)
def test_configs_that_are_none(text, message):
    with pytest.raises(ValueError, match=message):
        Config.of(text)


@pytest.mark.parametrize(
    ("given", "text", "message"),
    [
        ({"layout": "NN"}, "128x176x64-g8-w8-s4-cooperative-descriptor", "multiple of 64"),
        ({"layout": "TT"}, "176x128x64-g8-w8-s4-cooperative-descriptor-swap", "multiple of 64"),
        ({"batch": (3,)}, "128x176x64-g8-w8-s4-cooperative-descriptor", "no batch"),
        ({"batch_invariant": True}, "128x176x64-g8-w8-s4-cooperative-descriptor", "no batch invariance"),
        ({"dtype": torch.float32}, "128x176x64-g8-w8-s4-cooperative-descriptor", "fp16 or bf16"),
        ({"N": 1001}, "128x176x64-g8-w8-s4-cooperative-descriptor", "16-byte units"),
        ({"bias": True}, "128x72x64-g8-w8-s4-cooperative-descriptor", "multiple of 16"),
    ],
)
def test_what_a_problem_refuses(given, text, message):
    with pytest.raises(ValueError, match=message):
        schedules.bind(problem(**given), Config.of(text))


@pytest.mark.parametrize("layout", ["NT", "NN", "TN", "TT"])
@pytest.mark.parametrize("M", [1, 100, 1000, 5000])
@pytest.mark.parametrize("bias", [False, True])
def test_what_is_ranked_runs(layout, M, bias):
    p = problem(-(-M // 8) * 8 if layout[0] == "T" else M, layout=layout, bias=bias)
    for config, _ in rank(p):
        assert schedules.of(config.schedule).refusal(p, config) is None, str(config)


def test_they_are_proposed_where_powers_of_two_leave_a_wave_half_empty():
    # 128 x 256 makes 288 tiles for 132 multiprocessors, 128 x 176 three waves of 128.
    found = explain_problem(problem(4096, 2112, 7168))
    config = found.quicker.config
    assert config.schedule in ("cooperative", "pingpong")
    x, y = sides(config)
    tiles = -(-(2112 if config.swap else 4096) // x) * -(-(4096 if config.swap else 2112) // y)
    assert tiles / (-(-tiles // 132) * 132) > 0.9
    # Nothing is chosen for every number of rows by a prediction alone.
    assert found.choices[0].config.schedule not in ("cooperative", "pingpong")
    assert config in dict(rank(problem(4096, 2112, 7168)))
    assert config not in candidates(problem(4096, 2112, 7168))


@pytest.mark.parametrize(
    "text", ["128x176x64-g8-w8-s4-pingpong-descriptor", "64x72x64-g4-w4-s8-cooperative-descriptor"]
)
def test_the_walk_covers_every_tile_and_all_of_k_once(text):
    p, config = problem(200, 520, 2048), Config.of(text)
    walk = schedules.of(config.schedule).walk(p, config)
    covered = np.zeros((200, 520), int)
    for i in range(len(walk)):
        rows, cols = (
            slice(walk.row[i], walk.row[i] + walk.rows[i]),
            slice(walk.col[i], walk.col[i] + walk.cols[i]),
        )
        covered[rows, cols] += walk.last_k[i] - walk.first_k[i]
    assert (covered == 2048).all()


def test_a_ring_that_begins_elsewhere_is_refused():
    line = "getelementptr (i8, ptr addrspace(3) @global_smem, i32 {})"
    any_width.check_ring(line.format(4096) + line.format(8192), 4096)
    with pytest.raises(RuntimeError, match="does not begin where shared memory does"):
        any_width.check_ring(line.format(4096) + line.format(1024), 4096)
    with pytest.raises(RuntimeError, match="does not begin"):
        any_width.check_ring("", 4096)


def test_tuning_measures_the_best_of_them():
    p = problem(4096, 2112, 7168)
    promising = tuner._promising(rank(p))
    ours = [config for config in promising if config.schedule in ("cooperative", "pingpong")]
    times = dict(rank(p))
    assert len(ours) == tuner.PREDICTED
    assert ours == sorted(ours, key=lambda config: times[config].total)
    assert explain_problem(p).quicker.config == ours[0]
    assert len(promising) > len(ours)
