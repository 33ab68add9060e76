"""Schedules of launches: every element of every product once, in the turns that the kernels take.

That single visits and schedules are those of the kernels, tests/interpret says, of those that it can run.
"""

import doctest
import itertools
from dataclasses import replace

import numpy as np
import pytest

from gemmery import Config, devices
from gemmery.lab import tile_order
from gemmery.lab.tile_order import band, plain_walk, programs_at_once, visits, walk
from gemmery.schedules.persistent_static import Work
from gemmery.select.shapes import problem_of
from tests.host.test_persistent_static import shares

H200 = devices.TABLE["NVIDIA H200"]


def test_examples():
    result = doctest.testmod(tile_order)
    assert result.attempted > 0
    assert result.failed == 0


def test_orders_by_name():
    rows = [[m, n] for m in range(3) for n in range(4)]
    assert visits(3, 4, "row", 7).tolist() == rows
    assert visits(3, 4, "column", 7).tolist() == sorted(rows, key=lambda visit: visit[::-1])
    assert visits(5, 2, "grouped", 2).tolist() == [
        [0, 0], [1, 0], [0, 1], [1, 1], [2, 0], [3, 0], [2, 1], [3, 1], [4, 0], [4, 1],
    ]  # fmt: skip


def test_what_is_wrong_is_said():
    with pytest.raises(ValueError, match="'diagonal'; it must be one of row, column, grouped"):
        band("diagonal", 4, 1)
    with pytest.raises(ValueError, match="group_size is 0"):
        visits(4, 4, "grouped", 0)
    with pytest.raises(ValueError, match="tiles_n is 0"):
        visits(4, 0)
    with pytest.raises(ValueError, match="block_k is 0"):
        plain_walk(problem_of(4, 4, 4, device=H200), (4, 4, 0))
    with pytest.raises(ValueError, match="give a larger tile"):
        plain_walk(problem_of(1 << 20, 1 << 20, 4, device=H200), (16, 16, 16))


def covered(problem, schedule):
    """How often each element of every product is summed up at each step along K."""
    count = np.zeros((problem.matrices, problem.M, problem.N, problem.K), dtype=int)
    for n in range(len(schedule)):
        row, col = schedule.row[n], schedule.col[n]
        count[
            schedule.batch[n], row : row + schedule.rows[n], col : col + schedule.cols[n],
            schedule.first_k[n] : schedule.last_k[n],
        ] += 1  # fmt: skip
    return count


@pytest.mark.parametrize(
    "text",
    [
        "128x128x64-g2-w8-s4-specialized-descriptor",
        "128x128x64-g2-w8-s4-specialized-descriptor-k3",
        "128x136x64-g2-w8-s4-cooperative-descriptor-k2",
        "128x144x64-g2-w8-s4-pingpong-descriptor",
        "64x64x64-g2-w4-s4-tile-pointer-k3",
        "64x128x64-g2-w4-s4-persistent-descriptor-t4",
        "128x128x64-g2-w4-s4-persistent-descriptor-t8",
    ],
)
def test_every_product_is_summed_up_once(text):
    for M, N, sms in itertools.product((100, 260), (136, 400), (6, 10)):
        problem = problem_of(M, N, 200, device=replace(H200, sms=sms))
        schedule = walk(problem, Config.of(text))
        assert (covered(problem, schedule) == 1).all(), (M, N, sms)
        # Nobody has two units in one turn, or leaves one out.
        for program in range(schedule.programs):
            turns = schedule.turn[schedule.program == program]
            assert sorted(turns) == list(range(len(turns)))


def test_programs_share_steps_as_their_kernel_does():
    config = Config.of("128x128x64-g1-w8-s4-specialized-descriptor-k2")
    problem = problem_of(128, 128 * 7, 640, device=replace(H200, sms=5))
    schedule = walk(problem, config)
    work = Work.divide(7, 10, 5, 2)
    assert work.cut == 2  # else the test is of nothing
    expected = sorted(shares(work, 10))
    found = zip(
        schedule.program, schedule.col // 128, schedule.first_k // 64, -(-schedule.last_k // 64), strict=True
    )
    assert sorted(tuple(map(int, unit)) for unit in found) == expected


def test_waves():
    problem = problem_of(1024, 1024, 64, device=replace(H200, sms=10))
    persistent = walk(problem, Config.of("128x128x64-g1-w8-s3-persistent-descriptor"))
    assert (persistent.programs, persistent.at_once) == (10, 10)
    assert persistent.wave.tolist() == [n // 10 for n in range(64)]
    assert persistent.program.tolist() == [n % 10 for n in range(64)]
    tiles = walk(problem, Config.of("128x128x64-g1-w4-s3-tile-descriptor"))
    assert (tiles.programs, tiles.at_once) == (64, 20)  # two fit into the shared memory and registers
    assert tiles.wave.tolist() == [n // 20 for n in range(64)]


def test_programs_at_once():
    problem = problem_of(4096, 4096, 4096, device=H200)
    assert programs_at_once(problem, Config.of("128x256x64-g8-w8-s4-persistent-descriptor/2")) == 132
    assert programs_at_once(problem, Config.of("128x128x64-g8-w8-s6-cooperative-descriptor")) == 132
