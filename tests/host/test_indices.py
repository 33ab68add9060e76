"""Offsets and masks of programs: a product computed through them alone, from flat memory, is the product."""

import doctest
import io

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from gemmery import Config, devices
from gemmery.lab import indices
from gemmery.lab.indices import ASTRAY, BEYOND, INSIDE, accesses, problem_of_strides, schedule_of, show
from gemmery.lab.tile_order import plain_walk

H200 = devices.TABLE["NVIDIA H200"]


def test_examples():
    result = doctest.testmod(indices)
    assert result.attempted > 0
    assert result.failed == 0


def extent(shape, strides):
    """Elements from the first one of a tensor to the end of its last one."""
    return 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))


@st.composite
def layouts(draw, shape, shared=False):
    """Strides under which no two elements are one, but for shared batch dimensions; with gaps, in any order."""
    strides, step = [0] * len(shape), draw(st.integers(1, 3))
    for place in draw(st.permutations(range(len(shape)))):
        if shared and place < len(shape) - 2 and draw(st.booleans()):
            continue
        strides[place] = step
        step = step * shape[place] + draw(st.integers(0, 3))
    return tuple(strides)


@st.composite
def products(draw):
    M, N, K = (draw(st.integers(1, 9)) for _ in range(3))
    batch = tuple(draw(st.lists(st.integers(1, 3), max_size=2)))
    a = draw(layouts((*batch, M, K), shared=True))
    b = draw(layouts((*batch, K, N), shared=True))
    return M, N, K, batch, a, b, draw(layouts((*batch, M, N)))


def filled(shape, strides, random):
    memory = random.integers(-9, 10, extent(shape, strides)).astype(np.float64)
    return memory, torch.from_numpy(memory).as_strided(shape, strides)


@settings(max_examples=25)
@given(products(), st.tuples(*[st.integers(1, 5)] * 3), st.integers(1, 4), st.integers(0, 99))
def test_a_product_through_offsets_alone(product, tile, group_size, seed):
    M, N, K, batch, of_a, of_b, of_c = product
    random = np.random.default_rng(seed)
    (a, left), (b, right) = filled((*batch, M, K), of_a, random), filled((*batch, K, N), of_b, random)
    c = np.full(extent((*batch, M, N), of_c), np.nan)
    problem = problem_of_strides(
        M, N, K, batch=batch, strides_a=of_a, strides_b=of_b, strides_c=of_c, device="H200"
    )
    schedule = plain_walk(problem, tile, group_size)
    for pid in range(schedule.programs):
        found = accesses(problem, schedule, pid)
        total = np.zeros(found.c.offsets.shape)
        for step in range(found.steps):
            found = accesses(problem, schedule, pid, step=step)
            x, y = (
                np.where(block.mask, memory[np.where(block.mask, block.offsets, 0)], 0.0)
                for block, memory in ((found.a, a), (found.b, b))
            )
            total += x @ y
        assert np.isnan(c[found.c.offsets[found.c.mask]]).all()  # nobody was here before
        c[found.c.offsets[found.c.mask]] = total[found.c.mask]
    torch.testing.assert_close(
        torch.from_numpy(c).as_strided((*batch, M, N), of_c), left @ right, rtol=0, atol=0
    )


@given(products(), st.tuples(*[st.integers(1, 5)] * 3))
def test_blocks_are_slices(product, tile):
    """With every element of A's memory its own offset, each block is a slice of A with more around it."""
    M, N, K, _, of_a, _, _ = product
    strides = of_a[-2:] if min(of_a[-2:]) > 0 else (K, 1)
    problem = problem_of_strides(M, N, K, strides_a=strides, device="H200")
    whole = torch.arange(extent((M, K), strides)).as_strided((M, K), strides).numpy()
    schedule = plain_walk(problem, tile)
    for pid in range(schedule.programs):
        for step in range(accesses(problem, schedule, pid).steps):
            block = accesses(problem, schedule, pid, step=step).a
            rows, cols = block.offsets.shape
            part = whole[block.row : block.row + rows, block.col : block.col + cols]
            inside = np.zeros((rows, cols), dtype=bool)
            inside[: part.shape[0], : part.shape[1]] = True
            np.testing.assert_array_equal(block.mask, inside)
            np.testing.assert_array_equal(block.offsets[inside].reshape(part.shape), part)
            np.testing.assert_array_equal(block.lanes == INSIDE, inside)
            off = block.offsets[~inside]
            np.testing.assert_array_equal(
                block.lanes[~inside] == BEYOND, (off < whole.min()) | (off > whole.max())
            )


def test_lanes_by_hand():
    # A is 2 by 3, its rows 4 apart: 0 1 2 . 4 5 6. The tile asks for 3 by 4.
    problem = problem_of_strides(2, 5, 3, layout="NN", strides_a=(4, 1), device="H200")
    block = accesses(problem, plain_walk(problem, (3, 4, 4)), 0).a
    assert block.offsets.tolist() == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
    assert block.lanes.tolist() == [
        [INSIDE, INSIDE, INSIDE, ASTRAY],
        [INSIDE, INSIDE, INSIDE, BEYOND],
        [BEYOND] * 4,
    ]
    values = block.asdict()
    assert (values["masked_off"], values["astray"], values["beyond"]) == (6, 1, 5)
    assert (values["first"], values["last"], values["corner"]) == (0, 6, 0)


def test_turns_of_persistent_programs():
    problem = problem_of_strides(2048, 2048, 64, device="H200")
    schedule = schedule_of(problem, config="128x128x64-g1-w8-s3-persistent-descriptor")
    assert schedule.programs == 132
    found = accesses(problem, schedule, 3, turn=1)
    assert divmod(3 + 132, 16) == (found.c.row // 128, found.c.col // 128)
    assert "its tile 2 of 2" in found.where


def test_offsets_beyond_32_bits_are_said():
    problem = problem_of_strides(70000, 70000, 16, layout="NN", device="H200")
    schedule = plain_walk(problem, (128, 128, 16))
    found = accesses(problem, schedule, schedule.programs - 1)
    assert found.c.offsets.max() == (69888 + 127) * 70000 + 69888 + 127
    assert any("need 64 bits" in line for line in indices.described(found.c))
    assert not any("need 64 bits" in line for line in indices.described(found.a))


def test_the_default_is_what_gemmery_chooses():
    problem = problem_of_strides(4096, 4096, 4096, device="H200")
    config = Config.of("128x128x64-g4-w8-s3-persistent-descriptor")
    chosen = schedule_of(problem)
    assert chosen.programs == 132
    assert (schedule_of(problem, group_size=1).row != chosen.row).any()
    assert set(schedule_of(problem, config=config).rows) == {128}
    assert schedule_of(problem, tile=(100, 100, 100)).programs == 41 * 41


def test_text_marks_lanes():
    problem = problem_of_strides(2, 5, 3, layout="NN", strides_a=(4, 1), device="H200")
    console = Console(width=100, record=True, file=io.StringIO())
    show(accesses(problem, plain_walk(problem, (3, 4, 4)), 0), console)
    said = console.export_text()
    assert "~3" in said
    assert "!11" in said
    assert "offset[i, j] = (0 + i)·4 + (0 + j)·1 = 0 + i·4 + j·1" in said


@pytest.mark.parametrize(
    "options, said",
    [
        ({"pid": 4}, "pid is 4; there are 4 programs"),
        ({"pid": -1}, "pid is -1"),
        ({"pid": 0, "turn": 1}, "program 0 has 1 tiles"),
        ({"pid": 0, "step": 2}, "the K loop has 2 steps"),
    ],
)
def test_what_is_not_there_is_said(options, said):
    problem = problem_of_strides(4, 4, 4, device="H200")
    with pytest.raises(ValueError, match=said):
        accesses(problem, plain_walk(problem, (2, 2, 2)), **options)


def test_wrong_strides_and_layouts_are_said():
    with pytest.raises(ValueError, match="strides of B are"):
        problem_of_strides(4, 4, 4, strides_b=(1, 2, 3))
    with pytest.raises(ValueError, match="strides of C are"):
        problem_of_strides(4, 4, 4, strides_c=(-1, 2))
    with pytest.raises(ValueError, match="layout is 'XY'"):
        problem_of_strides(4, 4, 4, layout="XY")
    problem = problem_of_strides(10, 10, 10, device="H200")
    with pytest.raises(ValueError, match="needs TMA"):
        schedule_of(problem, config="128x128x64-g1-w8-s3-persistent-descriptor")
    with pytest.raises(ValueError, match="give one of them"):
        schedule_of(problem, tile=(1, 1, 1), config="128x128x64-g1-w8-s3-persistent-descriptor")


def oklab(colour):
    """A colour where distances are those that people see; see Ottosson, "A perceptual color space", 2020."""
    from matplotlib.colors import to_rgb

    linear = np.array([c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in to_rgb(colour)])
    cones = np.array([
        [0.4122214708, 0.5363325363, 0.0514459929],
        [0.2119034982, 0.6806995451, 0.1073969566],
        [0.0883024619, 0.2817188376, 0.6299787005],
    ]) @ linear  # fmt: skip
    return np.array([
        [0.2104542553, 0.7936177850, -0.0040720468],
        [1.9779984951, -2.4285922050, 0.4505937099],
        [0.0259040371, 0.7827717662, -0.8086757660],
    ]) @ np.cbrt(cones)  # fmt: skip


def test_lanes_that_are_masked_off_are_told_apart_by_colour():
    from gemmery.lab.index_pictures import MASKED

    one, other = map(oklab, MASKED.values())
    # More than twice what two oranges of one palette are apart.
    assert np.linalg.norm(one - other) > 2 * np.linalg.norm(oklab("#e69f00") - oklab("#d55e00")) > 0.2
