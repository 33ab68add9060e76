"""The lab's numpy account of tile orders and schedules is what the kernels do."""

from dataclasses import replace

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given, settings
from hypothesis import strategies as st

from gemmery import Config, devices
from gemmery.kernels import order
from gemmery.lab.tile_order import visits, walk
from gemmery.schedules import bind
from gemmery.schedules.waves import Waves
from gemmery.select.shapes import problem_of

SMALL = replace(devices.TABLE["interpreter"], sms=5)


@triton.jit
def _record(out, tiles_m, tiles_n, ORDER: tl.constexpr, GROUP: tl.constexpr):
    tile = tl.program_id(0)
    _, row, col = ORDER(tile, tiles_m, tiles_n, GROUP)
    tl.store(out + 2 * tile, row)
    tl.store(out + 2 * tile + 1, col)


extents = st.integers(1, 7)


@settings(max_examples=25)
@given(extents, extents, st.sampled_from((1, 2, 3, 4, 8, 16)))
def test_visits_are_those_of_the_kernels(tiles_m, tiles_n, group):
    out = torch.full((tiles_m * tiles_n, 2), -1, dtype=torch.int32)
    _record[(len(out),)](out, tiles_m, tiles_n, order.grouped, group)
    assert visits(tiles_m, tiles_n, "grouped", group).tolist() == out.tolist()


@triton.jit
def _stamp(
    x,
    shape,
    strides,
    sizes,
    batch,
    row,
    col,
    value,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    WIDE: tl.constexpr,
):
    """A `store` that leaves, instead of the product, the program's number and how many stores came before."""
    _steps, stride_row, stride_col = strides
    before = tl.atomic_add(x - 1, 1.0)
    rows = row + tl.arange(0, ROWS)[:, None]
    cols = col + tl.arange(0, COLS)[None, :]
    stamp = tl.zeros((ROWS, COLS), tl.float32) + before * 1024 + tl.program_id(0)
    inside = (rows < shape[0]) & (cols < shape[1])
    tl.store(x + batch * shape[0] * shape[1] + rows * stride_row + cols * stride_col, stamp, mask=inside)


@triton.jit
def _note(
    x, shape, strides, sizes, batch, row, col,
    ROWS: tl.constexpr, COLS: tl.constexpr, CHECK_ROWS: tl.constexpr, CHECK_COLS: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """A loader that loads nothing, but notes how often a program asked, and the first and the last corner."""
    at = x + 5 * tl.program_id(0)
    asked = tl.load(at)
    tl.store(at, asked + 1)
    tl.store(at + 1, row, mask=asked == 0)
    tl.store(at + 2, col, mask=asked == 0)
    tl.store(at + 3, row)
    tl.store(at + 4, col)
    return tl.zeros((ROWS, COLS), tl.float32)


def launched(problem, config, out, **parts):
    """Launch the real kernel with some of its parts replaced; what its loaders were asked for, a row a program."""
    binding = bind(problem, config)
    binding.constants |= {"LOAD_A": _note, "LOAD_B": _note} | parts
    a, b = (torch.zeros(binding.grid[0], 5, dtype=torch.int32) for _ in range(2))
    binding.launch((a, b, out), (1, 1))
    return a.numpy(), b.numpy()


def stamped(problem, config):
    """For every element of the output, its program and how many units were stored before it, by the real kernel."""
    shape = (*problem.batch, problem.M, problem.N)
    memory = torch.full((1 + np.prod(shape),), -1.0)
    memory[0] = 0
    launched(problem, config, memory[1:].view(shape), STORE=_stamp)
    stamps = memory[1:].view(problem.matrices, problem.M, problem.N).numpy().astype(int)
    return stamps % 1024, stamps // 1024


def painted(problem, schedule):
    """The same of a schedule. The interpreter runs one program after the other, each with all of its units."""
    program = np.full((problem.matrices, problem.M, problem.N), -1)
    before = program.copy()
    for place, unit in enumerate(np.lexsort((schedule.turn, schedule.program))):
        z, row, col = schedule.batch[unit], schedule.row[unit], schedule.col[unit]
        within = np.s_[z, row : row + schedule.rows[unit], col : col + schedule.cols[unit]]
        program[within] = schedule.program[unit]
        before[within] = place
    return program, before


CONFIGS = [
    "16x16x16-g1-w4-s2-tile-pointer",
    "16x32x16-g3-w4-s2-tile-pointer",
    "16x16x16-g8-w4-s2-persistent-pointer",
    "32x32x16-g2-w4-s2-persistent-pointer-t2",
    "16x64x16-g2-w4-s2-persistent-pointer-t4",
    "32x64x16-g3-w4-s2-persistent-pointer-t8",
]


#: M, N and K, and the batch.
SHAPES = [(1, 1, 24), (100, 70, 24), (33, 130, 8), (40, 50, 16, 3)]


@pytest.mark.parametrize("text", CONFIGS)
@pytest.mark.parametrize("shape", SHAPES)
def test_schedules_are_those_of_the_kernels(text, shape):
    M, N, K, *batch = shape
    problem = problem_of(M, N, K, dtype=torch.float32, layout="NN", batch=batch, device=SMALL)
    schedule = walk(problem, Config.of(text))
    program, before = stamped(problem, Config.of(text))
    expected_program, expected_before = painted(problem, schedule)
    np.testing.assert_array_equal(program, expected_program)
    np.testing.assert_array_equal(before, expected_before)


def test_tiles_as_wide_as_two_powers_of_two():
    problem = problem_of(50, 200, 24, dtype=torch.float32, layout="NN", device=SMALL)
    config = Config(16, 48, 16, group_m=2)
    program, _ = stamped(problem, config)  # which stores each tile in two blocks
    np.testing.assert_array_equal(program, painted(problem, walk(problem, config))[0])


def test_some_of_these_schedules_cut_tiles():
    work = [
        Waves.of(problem_of(M, N, K, layout="NN", batch=batch, device=SMALL), Config.of(text))
        for text in CONFIGS
        for M, N, K, *batch in SHAPES
    ]
    assert any(each.cut for each in work)
    assert any(each.strips for each in work)
    assert any(each.cut and each.strips for each in work)


@pytest.mark.parametrize("sizes", [(40, 20, 100), (16, 70, 64), (33, 33, 300)])
@pytest.mark.parametrize("parts", [2, 3, 8])
def test_parts_along_k_are_those_of_the_kernel(sizes, parts):
    problem = problem_of(*sizes, dtype=torch.float32, layout="NN", device=SMALL)
    config = Config(16, 16, 32, group_m=2, split_k=parts)
    schedule = walk(problem, config)
    assert (schedule.program == np.arange(len(schedule))).all()
    left, right = launched(problem, config, torch.zeros(problem.M, problem.N))
    steps = -(-(schedule.last_k - schedule.first_k) // schedule.step)
    last = schedule.first_k + (steps - 1) * schedule.step
    for noted, expected in (
        (left, [steps, schedule.row, schedule.first_k, schedule.row, last]),
        (right, [steps, schedule.first_k, schedule.col, last, schedule.col]),
    ):
        np.testing.assert_array_equal(noted, np.stack(expected, axis=1))
