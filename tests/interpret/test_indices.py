"""The lab's numpy account of offsets and masks is what the kernels' loaders and stores compute."""

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given, settings
from hypothesis import strategies as st

from gemmery.kernels.operands import block_offsets, load_strided, store_strided
from gemmery.lab.indices import accesses, problem_of_strides
from gemmery.lab.tile_order import plain_walk


@triton.jit
def _load(
    out, x, shape, strides, sizes, batch, row, col, ROWS: tl.constexpr, COLS: tl.constexpr, WIDE: tl.constexpr
):
    block = load_strided(x, shape, strides, sizes, batch, row, col, ROWS, COLS, True, True, WIDE)
    tl.store(out + tl.arange(0, ROWS)[:, None] * COLS + tl.arange(0, COLS)[None, :], block)


@triton.jit
def _store(
    x, shape, strides, sizes, batch, row, col, ROWS: tl.constexpr, COLS: tl.constexpr, WIDE: tl.constexpr
):
    lane = tl.arange(0, ROWS)[:, None] * COLS + tl.arange(0, COLS)[None, :] + 1
    store_strided(x, shape, strides, sizes, batch, row, col, lane, ROWS, COLS, WIDE)


@triton.jit
def _offsets(
    out, row, col, stride_row, stride_col, ROWS: tl.constexpr, COLS: tl.constexpr, WIDE: tl.constexpr
):
    corner, within = block_offsets(row, col, stride_row, stride_col, ROWS, COLS, WIDE)
    tl.store(out + tl.arange(0, ROWS)[:, None] * COLS + tl.arange(0, COLS)[None, :], corner + within)


@st.composite
def placed(draw):
    """Accesses of a program in a product of matrices with gaps between rows, columns and matrices."""
    M, N, K = (draw(st.integers(1, 40)) for _ in range(3))
    batch = draw(st.sampled_from([(), (3,), (2, 3)]))
    strides = {}
    for name, (rows, cols) in {"a": (M, K), "b": (K, N), "c": (M, N)}.items():
        inner = draw(st.integers(1, 2))
        by_rows = draw(st.booleans())
        outer = (cols if by_rows else rows) * inner + draw(st.integers(0, 3))
        steps, step = [], outer * (rows if by_rows else cols) + draw(st.integers(0, 5))
        for size in reversed(batch):
            steps.insert(0, step)
            step *= size
            step += draw(st.integers(0, 5))
        strides[f"strides_{name}"] = (*steps, *((outer, inner) if by_rows else (inner, outer)))
    problem = problem_of_strides(M, N, K, batch=batch, device="H200", **strides)
    tile = tuple(draw(st.sampled_from((4, 16))) for _ in range(3))
    schedule = plain_walk(problem, tile, draw(st.integers(1, 3)))
    pid = draw(st.integers(0, schedule.programs - 1))
    steps = accesses(problem, schedule, pid).steps
    return accesses(problem, schedule, pid, step=draw(st.integers(0, steps - 1)))


def arguments(found, block, operand):
    """Of a loader or a store, for one of the blocks."""
    strides = (tuple(-step for step in operand.steps), operand.row, operand.col)
    return (
        block.shape, strides, found.problem.batch, int(found.schedule.batch[found.unit]), block.row, block.col,
        *block.offsets.shape,
    )  # fmt: skip


@settings(max_examples=30)
@given(placed(), st.booleans())
def test_loads(found, wide):
    for block, operand in ((found.a, found.problem.a), (found.b, found.problem.b)):
        memory = torch.arange(1, 1 + max(int(block.offsets[block.mask].max(initial=0)), 0) + 1)
        out = torch.full(block.offsets.shape, -1, dtype=torch.int64)
        _load[(1,)](out, memory, *arguments(found, block, operand), wide)
        # Every element of memory is one more than its offset, and what is masked off is 0.
        np.testing.assert_array_equal(out.numpy(), np.where(block.mask, block.offsets + 1, 0))


@settings(max_examples=20)
@given(placed(), st.booleans())
def test_stores(found, wide):
    block = found.c
    memory = torch.zeros(int(block.offsets.max()) + 1, dtype=torch.int64)
    _store[(1,)](memory, *arguments(found, block, found.problem.out), wide)
    lanes = np.arange(1, block.offsets.size + 1).reshape(block.offsets.shape)
    expected = np.zeros(len(memory), dtype=np.int64)
    expected[block.offsets[block.mask]] = lanes[block.mask]
    np.testing.assert_array_equal(memory.numpy(), expected)


@pytest.mark.parametrize("wide", [False, True])
def test_a_corner_beyond_32_bits(wide):
    """The block's place passes 2^31, which a loader that counted in 32 bits would get wrong; no memory of that size is touched."""
    problem = problem_of_strides(1 << 20, 16, 4096, layout="NN", device="H200")
    schedule = plain_walk(problem, (16, 16, 16))
    found = accesses(problem, schedule, schedule.programs - 1, step=255)
    assert found.a.corner == ((1 << 20) - 16) * 4096 + 4080 > 1 << 31
    offsets = torch.full((16, 16), -1, dtype=torch.int64)
    _offsets[(1,)](offsets, found.a.row, found.a.col, *found.a.strides, 16, 16, wide)
    np.testing.assert_array_equal(offsets.numpy(), found.a.offsets)
