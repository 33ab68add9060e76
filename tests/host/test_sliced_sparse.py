"""2:4 sparse weights by `mma.sp`: how its operands lie, what is refused, and where it is chosen."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch

pytest.importorskip("triton.experimental.gluon.language.nvidia.hopper")

import gemmery
from gemmery import Config, epilogues, schedules, select
from gemmery.devices import ARCHS, TABLE
from gemmery.formats.sparse import SparseTensor, padded
from gemmery.kernels import sparse_fragments as fragments
from gemmery.lab.abstract import linear_problem
from gemmery.product.spec import Options
from gemmery.schedules.sliced_sparse import SLICED_SPARSE
from gemmery.schedules.waves import Counts
from gemmery.select.space import space_of, tiles_of
from gemmery.tuning.tuner import _promising

from .device_functions import device_functions

DEVICES = {arch: next(row for row in TABLE.values() if row.arch == arch) for arch in SLICED_SPARSE.archs}
TEXT = "16x64x256-g1-w4-s2-sliced_sparse-pointer-swap"
CONFIG = Config.of(TEXT)
needs_gluon = pytest.mark.skipif(not SLICED_SPARSE.available(), reason="the schedule needs another Triton")


def meta(*shape, dtype=torch.bfloat16):
    return torch.empty(shape, dtype=dtype, device="meta")


def weight_of(N, K, dtype=torch.bfloat16, code=""):
    rows, columns = padded(N, K)
    values = meta(rows, columns // 2, dtype=torch.int8 if code else dtype)
    words = meta(columns // 32, rows, dtype=torch.int32)
    return SparseTensor((N, K), values, words, code=code, dtype=dtype if code else None)


def problem_of(M, N, K, arch="sm_80", code="", dtype=torch.bfloat16, **more):
    return linear_problem(meta(M, K, dtype=dtype), weight_of(N, K, dtype, code), DEVICES[arch], **more)


# --- operands --------------------------------------------------------------------------------------------------------


def called(function, *given):
    """What a device function that calls others gives for numpy's numbers."""
    names = dict(function.fn.__globals__)
    for name in function.fn.__code__.co_names:
        if hasattr(names.get(name), "fn"):
            names[name] = lambda *x, inner=names[name]: called(inner, *x)
    return type(called)(function.fn.__code__, names)(*given)


def test_metadata_by_instruction():
    """Four bits of each group come into the word of the group's instruction, in the order of 16 columns each."""
    words = np.random.default_rng(1).integers(0, 1 << 32, (4, 1000)).astype(np.uint32)
    found = called(fragments.of_instructions, *words)
    for j, half, i in itertools.product(range(4), range(2), range(4)):
        group = words[i] >> (16 * half + 4 * j) & 15
        assert np.array_equal(found[j] >> (16 * half + 4 * i) & 15, group)


def placed(layout, rank):
    """The element of each warp's, lane's and register's number in a linear layout."""
    bases = [*layout.reg_bases, *layout.lane_bases, *layout.warp_bases]
    found = np.zeros((1 << len(bases), rank), int)
    for number in range(len(found)):
        for bit, base in enumerate(bases):
            if number >> bit & 1:
                found[number] ^= np.array(base)
    return found.reshape(-1, 32, 1 << len(layout.reg_bases), rank)


@pytest.mark.parametrize(("k", "n", "tiles"), [(1, 1, 1), (4, 1, 1), (2, 2, 4), (1, 8, 8)])
def test_fragments(k, n, tiles):
    """A fragment's dimensions are warps along K, along N, lanes, and then registers; others are what is loaded of it."""
    own = placed(fragments.fragment(k, n, tiles), 5)
    words = placed(fragments.words_of_step(k, n, 4, 4), 5)
    x = placed(fragments.activations_of_step(k, n, tiles), 2)
    assert own.shape[:3] == (k * n, 32, 4 * tiles)
    for warp, lane in itertools.product(range(k * n), range(32)):
        for register in range(4 * tiles):
            place = [warp // n, warp % n, lane, register // 4, register % 4]
            assert own[warp, lane, register].tolist() == place
            # `ldmatrix` gives lane 4 g + t word t of row g, of each of four matrices of 8 rows by 4 words.
            row, word = 8 * (register // 4) + lane // 4, 16 * (warp // n) + 4 * (register % 4) + lane % 4
            assert x[warp, lane, register].tolist() == [row, word]
        for register in range(16):
            place = [warp // n, warp % n, lane, register // 4, register % 4]
            assert words[warp, lane, register].tolist() == place


# --- configs ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("text", "words"), [
    ("12x64x256-g1-w4-s2", "block_m is 12"), ("128x64x256-g1-w4-s2", "block_m is 128"),
    ("16x64x256-g1-w8-s2", "8 warps with a tile of 64 columns and steps of 256"), ("16x48x256-g1-w4-s2", "warps"),
    ("16x96x128-g1-w3-s2", "warps"), ("16x64x64-g1-w2-s2", "warps"), ("16x64x256-g1-w4-s5", "at most 4 stages"),
])  # fmt: skip
def test_configs_that_are_none(text, words):
    with pytest.raises(ValueError, match=words):
        Config.of(f"{text}-sliced_sparse-pointer-swap")


def test_configs_with_other_knobs():
    for text in (TEXT.removesuffix("-swap"), TEXT.replace("pointer", "descriptor")):
        with pytest.raises(ValueError, match="needs swap, the pointer loader and at most 4 stages"):
            Config.of(text)
    with pytest.raises(ValueError, match="tail needs"):
        replace(CONFIG, tail=2)


@needs_gluon
@pytest.mark.parametrize("arch", SLICED_SPARSE.archs)
def test_products_that_it_runs(arch):
    for M, N, K in ((1, 32, 64), (64, 1000, 4096), (70, 33, 4)):
        problem = problem_of(M, N, K, arch)
        assert SLICED_SPARSE.refusal(problem, CONFIG) is None
        binding = schedules.bind(problem, replace(CONFIG, split_k=4))
        assert binding.grid[0] % binding.counts.tiles == 0
    swiglu = problem_of(4, 128, 256, arch, epilogue=epilogues.swiglu)
    assert SLICED_SPARSE.refusal(swiglu, CONFIG) is None


@needs_gluon
def test_products_that_are_refused():
    problem = problem_of(4, 512, 512)
    for other, needed in (
        (problem_of(4, 512, 512, code="e4m3"), "a 2:4 sparse weight of 16 bits"),
        (replace(problem, K=0), "a weight of 1 to"),
        (replace(problem, N=1 << 20, K=1 << 13), "a weight of 1 to"),
        # 2^27 - 1 rows of 64 columns are stored as 2^27 rows.
        (replace(problem, N=(1 << 27) - 1, K=64), "a weight of 1 to"),
        (replace(problem, batch=(2,)), "a product without groups and without a batch"),
        (replace(problem, device=TABLE["NVIDIA B200"]), "a GPU of sm_80"),
        (replace(problem, a=replace(problem.a, row=1, col=4)), "rows of a with adjacent elements"),
        (replace(problem, b=replace(problem.b, aligned=False)), "a weight at addresses"),
    ):
        assert f"schedule 'sliced_sparse' needs {needed}" in SLICED_SPARSE.refusal(other, CONFIG)
        with pytest.raises(ValueError, match=f"schedule 'sliced_sparse' needs {needed}"):
            schedules.bind(other, CONFIG)
    invariant = problem_of(4, 512, 512, options=Options(None, "ieee", False, True, None))
    assert "order of a sum" in SLICED_SPARSE.refusal(invariant, CONFIG)
    halves = problem_of(4, 128, 256, epilogue=epilogues.swiglu)
    assert "two halves" in SLICED_SPARSE.refusal(halves, Config.of(TEXT.replace("16x64x256", "16x32x512")))
    halves = problem_of(4, 96, 256, epilogue=epilogues.swiglu)
    assert "48 rows each" in SLICED_SPARSE.refusal(halves, CONFIG)
    many = replace(problem_of(4, 1024, 512), M=(1 << 30) - 1)
    assert "counts tiles and parts of tiles to 1073741823" in SLICED_SPARSE.refusal(many, CONFIG)


@needs_gluon
def test_every_number_is_computed_once():
    for split in (1, 3):
        walk = SLICED_SPARSE.walk(problem_of(20, 200, 1100), replace(CONFIG, split_k=split))
        assert sorted(walk.program.tolist()) == list(range(2 * 4 * split))
        assert sum(walk.last_k - walk.first_k) == 1100 * 8
        # First come the first parts of all tiles.
        assert (np.diff(walk.first_k[np.argsort(walk.program)]) >= 0).all()


@needs_gluon
@pytest.mark.parametrize("text", [TEXT, "8x32x512-g1-w4-s4-sliced_sparse-pointer-swap"])
def test_kernels_place_parts_as_the_walk_does(text):
    """By multiplication with the divisors that the host prepares."""
    counted_part = device_functions()["counted_part"]
    for split in (1, 2, 3):
        problem, config = problem_of(20, 200, 1100), replace(Config.of(text), split_k=split)
        counts = Counts.of(problem, config)
        tiles, _, part_k, tiles_n, *divisors = counts.arguments
        state, sizes = (tiles, part_k, tiles_n, divisors), (problem.M, problem.N, problem.K)
        walk = SLICED_SPARSE.walk(problem, config)
        assert sorted(walk.program.tolist()) == list(range(counts.tiles * counts.parts))
        for i, program in enumerate(walk.program.tolist()):
            placed = counted_part(program, state, sizes, config.block_m, config.block_n, 1)
            own = walk.row[i], walk.col[i], problem.M, walk.first_k[i], walk.last_k[i]
            assert placed == (0, *map(int, own))


# --- choices ---------------------------------------------------------------------------------------------------------


def test_every_family_has_its_tiles():
    for arch in SLICED_SPARSE.archs:
        own = [
            x.config for x in tiles_of(ARCHS[arch].family, "sparse") if x.config.schedule == "sliced_sparse"
        ]
        assert {config.block_m for config in own} == ({8} if arch == "sm_90" else {8, 16, 32, 64})
        assert not any(
            config.schedule == "sliced_sparse"
            for config in space_of(problem_of(4, 512, 512, arch, "e4m3")).configs
        )


@needs_gluon
@pytest.mark.parametrize(
    "arch", [arch for arch in SLICED_SPARSE.archs if arch not in SLICED_SPARSE.chosen_on]
)
@pytest.mark.parametrize("M", [1, 16, 64, 65])
def test_only_a_tuner_considers_it(M, arch):
    """It comes last, behind all that was timed somewhere, but a tuner takes what is predicted to be quick."""
    ranked = select.rank(problem_of(M, 8192, 8192, arch))
    names = [config.schedule for config, _ in ranked]
    count = names.count("sliced_sparse")
    assert (count > 0) == (M <= 64)
    assert "sliced_sparse" not in names[: len(names) - count]
    tuned = {config.schedule for config in _promising(ranked)}
    if M <= 16:
        assert "sliced_sparse" in tuned


@pytest.fixture
def chosen(monkeypatch):
    """A function that lets architectures choose the schedule."""

    def choose(*archs):
        monkeypatch.setattr(type(SLICED_SPARSE), "chosen_on", archs)

    select.shortlist._of.cache_clear()
    yield choose
    select.shortlist._of.cache_clear()


@needs_gluon
def test_hopper_chooses_it_for_few_rows_and_small_weights():
    for (M, N, K), expected in {
        (1, 1536, 1024): True, (4, 1056, 800): True, (8, 736, 2336): False, (4, 28672, 8192): False,
        (9, 1536, 1024): True, (64, 512, 768): True, (64, 1920, 3072): False, (16, 8192, 8192): False,
        (65, 512, 768): False,
    }.items():  # fmt: skip
        names = [config.schedule for config, _ in select.rank(problem_of(M, N, K, "sm_90"))]
        assert (names[0] == "sliced_sparse") == expected
        assert ("sliced_sparse" in names) == (M <= 64)


@needs_gluon
def test_it_is_chosen_where_it_was_measured(chosen):
    chosen("sm_80")
    assert select.rank(problem_of(1, 8192, 8192))[0][0].schedule == "sliced_sparse"
    assert select.rank(problem_of(1, 8192, 8192, "sm_86"))[0][0].schedule == "tile"


def test_others_are_chosen_everywhere():
    assert all(
        each.chosen_on is None for each in schedules.REGISTRY.values() if each.name != SLICED_SPARSE.name
    )
    assert gemmery.Config.of(TEXT).schedule == SLICED_SPARSE.name
