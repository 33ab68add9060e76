"""Tiles of any width: their sizes, what refuses them, what they cost, and what the ring's views rest on."""

import inspect
import re
import types
from contextlib import nullcontext
from dataclasses import replace

import numpy as np
import pytest
import torch

from gemmery import Config, epilogues, quantize, schedules
from gemmery.kernels import any_width_cut, any_width_packed, any_width_stage
from gemmery.lab.abstract import abstract_problem, linear_problem, of_row
from gemmery.lab.fused_targets import abstract_sparse
from gemmery.lab.suites import EPILOGUES, Row
from gemmery.schedules import (
    any_width_binding,
    any_width_compiled,
    any_width_cost,
    any_width_edge,
    any_width_tile,
    binding,
    walk,
)
from gemmery.schedules.any_width_tile import RULES, Tile
from gemmery.schedules.base import Forms
from gemmery.select import candidates, measured, rank, samples, shortlist
from gemmery.select.shapes import device_named, problem_of
from gemmery.select.space import configs, kind_of, space_of, tiles_of
from gemmery.tuning import tuner

pytest.importorskip("triton.experimental.gluon.language.nvidia.hopper")
from gemmery.kernels import any_width as kernel
from gemmery.kernels import any_width_load
from gemmery.kernels import any_width_loop as loop
from gemmery.kernels.any_width_sparse import SparseStage

from .device_functions import device_functions
from .ptx import Program

H200, FP8 = device_named("H200"), torch.float8_e4m3fn
BOTH = ("cooperative", "pingpong")
ROWS = [tile.config for tile in tiles_of("hopper", "half") if tile.config.schedule in BOTH]


def problem(M=1000, N=1536, K=2048, **more):
    return problem_of(M, N, K, device=H200, **more)


def sides(config):
    return (config.block_n, config.block_m) if config.swap else (config.block_m, config.block_n)


def test_the_kernel_has_barriers_for_as_many_stages_as_there_may_be():
    assert kernel.STAGES.value == any_width_tile.MOST_STAGES


def tile_of(config):
    return schedules.of(config.schedule).tile(config)


def test_rows_are_configs_that_fit():
    assert len(ROWS) > 100
    assert {Config.of(str(config)) for config in ROWS} == set(ROWS)
    for config in ROWS:
        tile = tile_of(config)
        stored = tile.groups * tile.buffers * 64 * tile.part * 2
        stages = config.num_stages * (tile.x + tile.y) * 128
        assert stages <= tile.ring_rows * 128 <= H200.target.shared - any_width_tile.BARRIERS - stored
        assert tile.y >= tile.part
        assert tile.y <= tile.widest(any_width_tile.BARE)


@pytest.mark.parametrize("layout", ["NT", "NN", "TN", "TT"])
def test_the_kernel_of_a_row_has_its_width(layout):
    check_widths(problem(layout=layout), ROWS, 22)


@pytest.mark.parametrize("weight", ["int4", "nvfp4", "int8"])
def test_the_kernel_of_a_row_for_packed_weights_has_its_width(weight):
    p = abstract_problem(3000, 1024, 4096, device=H200, weight=weight)
    rows = [tile.config for tile in tiles_of("hopper", kind_of(p)) if tile.config.schedule in BOTH]
    # Long steps have kernels of their own.
    check_widths(p, rows, 33 if weight == "int4" else 25)


def sparse_problem(M=1000, N=1536, K=2048, epilogue=None):
    x = torch.empty(M, K, dtype=torch.bfloat16, device="meta")
    return linear_problem(x, abstract_sparse("", N, K, x.dtype), H200, epilogue=epilogue)


@pytest.mark.parametrize("epilogue", [None, epilogues.swiglu])
def test_the_kernel_of_a_row_for_sparse_weights_has_its_width(epilogue):
    p = sparse_problem(epilogue=epilogue)
    rows = [tile.config for tile in tiles_of("hopper", kind_of(p)) if tile.config.schedule in BOTH]
    assert rows
    # A warpgroup has whole rows of both halves.
    shared = [c for c in rows if c.block_n % 64]
    assert shared
    assert [c for c in rows if schedules.of(c.schedule).refusal(p, c) is not None] == (
        shared if epilogue else []
    )
    check_widths(p, rows, 20)


def check_widths(p, rows, most):
    """Each row's kernel has its width, and rows that `code` says share one do; there are so many kernels at most."""
    kernels = {}
    for config in rows:
        schedule = schedules.of(config.schedule)
        if schedule.refusal(p, config) is not None:
            continue
        binding = schedules.bind(p, config)
        k, tile = binding.constants, tile_of(config)
        format = p.b.staged and p.b.staged.of_step(config.block_k)
        assert tile.y in k["WIDTHS"]
        assert max(k["WIDTHS"]) <= tile.widest(any_width_tile.numbers_for(p))
        x_bytes = any_width_stage.x_bytes(tile.x, format) + any_width_stage.params_bytes(tile.x, format)
        assert (
            config.num_stages * (x_bytes + tile.y * any_width_tile.ROW * any_width_stage.y_blocks_of(format))
            <= k["RING_ROWS"] * any_width_tile.ROW
        )
        code = config.schedule, schedule.code(config, Forms.of(p))
        assert kernels.setdefault(code, str(k)) == str(k)
    assert len(set(kernels.values())) == len(kernels) <= most


def test_widths_of_packed_weights_share_kernels():
    """All rows of `any_width_tiles` do with 64 rows of X for each warpgroup."""
    p = abstract_problem(3000, 1024, 4096, device=H200, weight="int4")
    for tile in tiles_of("hopper", kind_of(p)):
        if tile.config.schedule in BOTH and tile_of(tile.config).own == 64:
            assert len(tile_of(tile.config).widths(p.b.staged, "rows", None)) > 2, tile.config


@pytest.mark.parametrize("well", [(80, 88, 96, 104, 64, 72), (64, 72, 80, 88, 96, 104), ()])
def test_a_kernel_whose_products_wait_is_compiled_again(well, monkeypatch):
    """With its widths in other orders, and at last for one width; and later at once with what was found."""
    Kernel = type("Kernel", (), {})
    made = {}

    def compile(binding, tensors, numbers=()):
        asked.append(binding.constants["WIDTHS"])
        return made.setdefault(asked[-1], Kernel())

    monkeypatch.setattr(any_width_binding.Binding, "compile", compile)
    monkeypatch.setattr(
        any_width_binding, "waits_for_each", lambda kernel: kernel is not made.get(well or (96,))
    )
    p, config = (
        abstract_problem(3000, 1024, 4096, device=H200, weight="int4"),
        "96x192x64-g0-w12-s8-cooperative-descriptor-swap",
    )
    first = (64, 72, 80, 88, 96, 104)
    orders, found = [first[i:] + first[:i] for i in range(6)], well or (96,)
    tried = orders[: orders.index(well) + 1] if well else orders
    ends = [] if found == first else [found]
    for sequence in ([*tried, *ends], [first, *ends]):
        asked, binding = [], schedules.bind(p, Config.of(config))
        assert binding.compile([]) is made[well or (96,)]
        assert binding.constants["WIDTHS"] == (well or (96,))
        assert asked == sequence
        assert binding.compile([]) is made[well or (96,)]


@pytest.mark.parametrize("text, rows", [("16x96x64-g0-w8-s8", 128), ("16x160x64-g0-w12-s8", 192)])
def test_parts_of_tiles_with_shared_rows_have_memory_for_all_warpgroups(text, rows):
    config = Config.of(f"{text}-cooperative-descriptor-k2-swap")
    found = schedules.bind(problem(16, 1024, 4096), config)
    work = found.work
    assert work.cut > 0
    assert found.workspace_size == (work.cut * 2 * rows * 16 * 4, work.cut * found.tile.groups)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("128x172x64-g8-w8-s4-cooperative-descriptor", "multiple of 8 from 16 to 256"),
        ("256x200x64-g8-w8-s3-cooperative-descriptor", "multiple of 8 from 16 to 192"),
        ("192x200x64-g8-w12-s3-cooperative-descriptor", "multiple of 8 from 16 to 192"),
        ("128x208x64-g8-w8-s4-pingpong-descriptor", "multiple of 16 from 16 to 192"),
        ("128x8x64-g8-w8-s4-cooperative-descriptor", "multiple of 8 from 16"),
        ("80x128x64-g8-w8-s4-cooperative-descriptor", "64 or 128 rows for each warpgroup"),
        ("96x128x64-g8-w12-s4-cooperative-descriptor", "64 or 128 rows for each warpgroup"),
        ("64x128x64-g8-w8-s4-cooperative-descriptor", "64 or 128 rows for each warpgroup"),
        ("192x128x64-g8-w8-s4-cooperative-descriptor", "64 or 128 rows for each warpgroup"),
        ("128x128x64-g8-w12-s4-cooperative-descriptor", "64 or 128 rows for each warpgroup"),
        ("128x256x64-g8-w8-s13-cooperative-descriptor", "barriers for 12"),
        ("128x128x64-g8-w8-s1-cooperative-descriptor", "needs at least 2"),
        ("128x128x32-g8-w8-s4-cooperative-descriptor", "block_k 64 or 128"),
        ("128x128x64-g8-w8-s4-cooperative-pointer", "descriptor loader"),
        ("128x128x64-g8-w4-s4-pingpong-descriptor", "8 warps"),
        ("128x128x64-g8-w8-s4-pingpong-descriptor-k2", "split_k needs"),
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
        (
            {"batch": (3,), "bias": True},
            "128x176x64-g8-w8-s4-cooperative-descriptor",
            "in a batch plain products",
        ),
        (
            {"batch": (3,), "dtype": FP8},
            "128x64x128-g8-w8-s4-cooperative-descriptor",
            "in a batch plain products",
        ),
        ({"batch": (3,)}, "128x176x64-g8-w8-s4-cooperative-descriptor-k2", "tiles of a batch are not cut"),
        (
            {"batch": (1 << 30,), "M": 1, "N": 8, "K": 8},
            "16x64x64-g8-w4-s4-cooperative-descriptor-swap",
            "to 1073741823; there are 1073741824",
        ),
        ({}, "128x256x64-g8-w8-s5-cooperative-descriptor", "there is shared memory for 4"),
        ({"dtype": torch.float32}, "128x176x64-g8-w8-s4-cooperative-descriptor", "fp16, bf16 or fp8"),
        ({}, "128x176x128-g8-w8-s4-cooperative-descriptor", "bfloat16 needs block_k 64"),
        ({"dtype": FP8}, "128x176x64-g8-w8-s4-cooperative-descriptor", "float8_e4m3fn needs block_k 128"),
        (
            {"batch_invariant": True},
            "128x176x64-g8-w8-s4-cooperative-descriptor-k2",
            "depends on the number of rows",
        ),
        ({"dtype": FP8}, "128x184x128-g8-w8-s4-cooperative-descriptor", "registers for a width of 176"),
        (
            {"dtype": FP8, "layout": "NN"},
            "128x64x128-g8-w8-s4-cooperative-descriptor",
            "adjacent elements along K",
        ),
        ({"N": 1001}, "128x176x64-g8-w8-s4-cooperative-descriptor", "16-byte units"),
        (
            {"M": 64, "N": 256, "K": (1 << 31) - 64},
            "128x176x64-g8-w8-s4-cooperative-descriptor",
            "K from 1 to 2147482624",
        ),
        ({"M": 1, "bias": True}, "128x72x64-g8-w8-s4-cooperative-descriptor", "may be the output itself"),
    ],
)
def test_what_a_problem_refuses(given, text, message):
    with pytest.raises(ValueError, match=message):
        schedules.bind(problem(**given), Config.of(text))


@pytest.mark.parametrize(
    ("N", "width", "message"),
    [(2048, 88, "a width that is a multiple of 16"), (2056, 96, "N a multiple of 16"), (2064, 96, None)],
)
def test_block_scales_are_of_16_columns(N, width, message):
    given = abstract_problem(512, N, 1024, device=H200, dtype="e4m3", scales="block")
    config = Config.of(f"128x{width}x128-g8-w8-s4-cooperative-descriptor")
    with nullcontext() if message is None else pytest.raises(ValueError, match=message):
        schedules.bind(given, config)


@pytest.mark.parametrize(
    ("N", "text", "message"),
    [
        (2176, "128x192x128-g8-w8-s4-cooperative-descriptor", None),
        (2176, "128x256x128-g8-w8-s3-cooperative-descriptor", None),
        (2176, "192x128x128-g8-w12-s4-cooperative-descriptor", None),
        (2176, "128x176x128-g8-w8-s4-cooperative-descriptor", "a width of 160 or one of 192 or one of 256"),
        (2176, "64x192x128-g8-w4-s4-cooperative-descriptor", "a width of 176"),
        (2176, "192x96x128-g8-w12-s4-cooperative-descriptor", "registers for one of 128"),
        (2176, "96x192x128-g8-w8-s4-cooperative-descriptor", "a width of 160$"),
        (2176, "64x192x128-g8-w8-s4-pingpong-descriptor", "a width of 160$"),
        (2176, "128x192x128-g8-w8-s4-cooperative-descriptor-k2", "192 columns are not cut along K"),
        (2176, "192x128x128-g8-w12-s4-cooperative-descriptor-k2", "128 columns are not cut along K"),
        (2176, "128x128x128-g8-w8-s4-cooperative-descriptor-k2", None),
        (2112, "128x160x128-g8-w8-s4-cooperative-descriptor", None),
        (2112, "128x192x128-g8-w8-s4-cooperative-descriptor", "a width of 160"),
        (2112, "128x256x128-g8-w8-s3-cooperative-descriptor", "a width of 160"),
        (2112, "192x128x128-g8-w12-s4-cooperative-descriptor", "no registers for 3 warpgroups"),
    ],
)
def test_wide_tiles_with_block_scales_need_whole_spans(N, text, message):
    given = abstract_problem(512, N, 1024, device=H200, dtype="e4m3", scales="block")
    with nullcontext() if message is None else pytest.raises(ValueError, match=message):
        schedules.bind(given, Config.of(text))


@pytest.mark.parametrize(
    ("N", "layout", "text", "message"),
    [
        (
            1536,
            "NT",
            "128x168x64-g8-w8-s4-cooperative-descriptor",
            "in two halves needs a width that is a multiple of 16",
        ),
        (1536, "NT", "64x16x64-g8-w4-s4-cooperative-descriptor", "from 32 on"),
        (1544, "NT", "128x176x64-g8-w8-s4-cooperative-descriptor", "a multiple of 8 in each"),
        (1536, "NN", "128x128x64-g8-w8-s4-cooperative-descriptor", "with adjacent elements"),
    ],
)
def test_what_weights_in_two_halves_need(N, layout, text, message):
    p = abstract_problem(1000, N, 2048, device=H200, epilogue="swiglu", layout=layout)
    with pytest.raises(ValueError, match=message):
        schedules.bind(p, Config.of(text))


@pytest.mark.parametrize(
    ("format", "more", "text", "message"),
    [
        ("int4", {}, "128x176x64-g8-w8-s4-cooperative-descriptor", "need swap"),
        ("int4", {}, "160x256x64-g8-w8-s4-cooperative-descriptor-swap", "registers for a width of 144"),
        ("int4", {}, "256x128x64-g8-w8-s6-cooperative-descriptor-swap", "there is shared memory for 5"),
        ("int4", {}, "128x128x64-g8-w8-s2-cooperative-descriptor-swap", "need at least 3"),
        (
            "int4",
            {"epilogue": "swiglu"},
            "128x128x64-g8-w8-s4-cooperative-descriptor-swap",
            "a packed weight no halves",
        ),
    ],
)
def test_what_packed_weights_need(format, more, text, message):
    p = abstract_problem(1000, 1536, 2048, device=H200, weight=format, **more)
    with pytest.raises(ValueError, match=message):
        schedules.bind(p, Config.of(text))


@pytest.mark.parametrize(
    ("epilogue", "text", "message"),
    [
        (None, "128x176x64-g8-w8-s4-cooperative-descriptor", "sparse weights need swap"),
        (None, "184x128x64-g8-w4-s4-cooperative-descriptor-swap", "from 16 to 128"),
        (None, "176x256x64-g8-w8-s6-cooperative-descriptor-swap", "there is shared memory for 5"),
        (None, "128x128x64-g8-w8-s2-cooperative-descriptor-swap", "need at least 3"),
        (None, "128x128x64-g8-w8-s4-pingpong-descriptor-swap", "take turns wait too often"),
        (epilogues.swiglu, "128x128x64-g8-w8-s4-pingpong-descriptor-swap", "take turns wait too often"),
    ],
)
def test_what_sparse_weights_need(epilogue, text, message):
    with pytest.raises(ValueError, match=message):
        schedules.bind(sparse_problem(epilogue=epilogue), Config.of(text))


@pytest.mark.parametrize("group", [0, 128])
@pytest.mark.parametrize("epilogue", [None, epilogues.swiglu])
def test_sparse_weights_of_4_bits_are_left_to_the_tile_schedule(epilogue, group):
    x = torch.empty(1000, 2048, dtype=torch.bfloat16, device="meta")
    p = linear_problem(x, abstract_sparse("int4", 1536, 2048, x.dtype, group), H200, epilogue=epilogue)
    assert {tile.config.schedule for tile in configs(p)} == {"tile"}
    config = Config.of("128x128x64-g8-w8-s4-cooperative-descriptor-swap")
    with pytest.raises(ValueError, match="of a sparse weight kept numbers of 16 or 8 bits"):
        schedules.bind(p, config)


@pytest.mark.parametrize(("text", "message"), [
    ("168x256x64-g8-w8-s4-cooperative-descriptor-swap", "need a width that is a multiple of 16"),
    ("136x256x64-g8-w8-s4-cooperative-descriptor-swap", "need a width that is a multiple of 16"),
])  # fmt: skip
def test_widths_that_only_sparse_weights_have(text, message):
    with pytest.raises(ValueError, match=message):
        schedules.bind(problem(), Config.of(text))
    schedules.bind(sparse_problem(), Config.of(text))


@pytest.mark.parametrize(("text", "message"), [
    ("256x176x64-g8-w8-s3-cooperative-descriptor", "128 rows for each warpgroup leaves registers for a width of 160"),
    ("192x104x64-g8-w12-s4-cooperative-descriptor", "need a width that is a multiple of 16"),
])  # fmt: skip
@pytest.mark.parametrize("more", [{"bias": True}, {"epilogue": "bias_gelu"}, {"batch": (2,)}])
def test_widths_that_only_bare_products_have(text, message, more):
    """A bias, an epilogue and a batch take registers."""
    schedules.bind(problem(), Config.of(text))
    p = abstract_problem(1000, 1536, 2048, device=H200, **more)
    with pytest.raises(ValueError, match=message):
        schedules.bind(p, Config.of(text))
    assert text not in map(str, candidates(p))
    assert any(config.schedule in BOTH for config in candidates(p))


@pytest.mark.parametrize("format", ["int4", "int8", "nf4", "e4m3", "mxfp4", "nvfp4"])
def test_every_tile_for_packed_weights_has_a_row_that_takes_them(format):
    p = abstract_problem(1000, 1536, 2048, device=H200, weight=format)
    taken = {}
    for tile in tiles_of("hopper", p.b.kind):
        config = tile.config
        if config.schedule in ("cooperative", "pingpong"):
            size = config.schedule, config.block_m, config.block_n
            refusal = schedules.of(config.schedule).refusal(p, config)
            is_missing = config.block_k == 128 and format not in ("int4", "nf4")
            expected = "no steps of 128 columns" if is_missing else "shared memory"
            assert refusal is None or expected in refusal
            taken[size] = taken.get(size, False) or refusal is None
    assert len(taken) > 20
    assert all(taken.values())


@pytest.mark.parametrize("format", ["int4", "nf4"])
def test_tiles_for_packed_weights_that_nobody_timed_are_doubted(format):
    p = abstract_problem(1000, 1536, 2048, device=H200, weight=format)
    space = space_of(p)
    factors = measured.factor(p, space, np.array([[1000.0]]))
    own = np.isin(space.schedule, ["cooperative", "pingpong"])
    assert own.any()
    # The model of these schedules is fitted to int4's times.
    assert np.allclose(np.log(factors[0, own]), 0 if format == "int4" else measured.DOUBT)
    assert not np.allclose(np.log(factors[0, ~own]), measured.DOUBT)


@pytest.mark.parametrize(
    "text", ["int/4/128//8/", "int/8/64//8/wide", "int/8/32/zeros/128/", "e4m3/8/0//0/", None]
)
def test_both_say_how_many_bytes_a_block_has(text):
    format = None if text is None else any_width_packed.StageFormat.of(text)
    assert loop.x_bytes_of(128, text) == any_width_stage.x_bytes(128, format)


@pytest.mark.parametrize("stage", [
    any_width_packed.StageFormat("int", 4, 128, "", 8), any_width_packed.StageFormat("int", 8, 32, "zeros", 128),
    any_width_packed.StageFormat("int", 4, 64, "", 8, wide=True), any_width_packed.StageFormat("e4m3", 8, 0, "", 0),
    SparseStage(), SparseStage(paired=True), SparseStage("int8"), SparseStage(fp8=True),
], ids=str)  # fmt: skip
def test_every_stage_has_its_rows_and_its_text_says_all(stage):
    assert stage.kind in any_width_tile.RULES.keys() & any_width_cost.TERMS.keys()
    assert loop.format_of(str(stage)) == stage
    assert loop.x_bytes_of(64, str(stage)) == any_width_stage.x_bytes(64, stage)
    maps = any_width_load.maps_of(stage.form, "rows", stage)
    assert sorted({*maps[:3], *maps.params, maps.matrix}) == [*maps[:3], *maps.params, maps.matrix]
    assert len(maps.params) == len(stage.kinds) <= 2


def test_each_kind_of_operand_is_considered():
    for more in (
        {"epilogue": "swiglu"},
        {"batch_invariant": True},
        {"dtype": "fp8", "scales": "row"},
        {"dtype": "fp8fast"},
    ):
        p = abstract_problem(300, 6144, 4096, device=H200, **more)
        assert {config.schedule for config, _ in rank(p)} >= {"cooperative", "pingpong"}, more
        for config, _ in rank(p):
            assert schedules.of(config.schedule).refusal(p, config) is None, str(config)


def test_fp8_rows_that_do_not_depend_on_the_batch_are_left_to_schedules_whose_bits_are_known():
    for dtype in ("fp8", "fp8fast"):
        p = abstract_problem(300, 6144, 4096, device=H200, dtype=dtype, scales="row", batch_invariant=True)
        assert not {config.schedule for config, _ in rank(p)} & {"cooperative", "pingpong"}


def test_rows_that_do_not_depend_on_the_batch_are_not_cut_along_k():
    p = problem(300, 6144, 4096, batch_invariant=True)
    assert {config.split_k for config, _ in rank(p)} == {1}


@pytest.mark.parametrize("layout", ["NT", "NN", "TN", "TT"])
@pytest.mark.parametrize("M", [1, 100, 1000, 5000])
@pytest.mark.parametrize("bias", [False, True])
def test_what_is_ranked_runs(layout, M, bias):
    p = problem(-(-M // 8) * 8 if layout[0] == "T" else M, layout=layout, bias=bias)
    for config, _ in rank(p):
        assert schedules.of(config.schedule).refusal(p, config) is None, str(config)


def test_they_are_chosen_where_powers_of_two_leave_a_wave_half_empty():
    # 128 x 256 makes 288 tiles for 132 multiprocessors, 128 x 176 three waves of 128.
    config = candidates(problem(4096, 2112, 7168))[0]
    assert config.schedule in ("cooperative", "pingpong")
    x, y = sides(config)
    tiles = -(-(2112 if config.swap else 4096) // x) * -(-(4096 if config.swap else 2112) // y)
    assert tiles / (-(-tiles // 132) * 132) > 0.9


@pytest.mark.parametrize("M", [1, 16, 32])
def test_narrow_tiles_are_considered_for_few_rows(M):
    found = [config for config in candidates(problem(M, 8192, 8192)) if config.schedule == "cooperative"]
    assert min(config.block_m for config in found) == 16


def test_a_row_that_is_added_to_one_row_is_left_to_other_schedules():
    found = {config.schedule for config in candidates(problem(1, 8192, 8192, bias=True))}
    assert found
    assert not found & {"cooperative", "pingpong"}


@pytest.mark.parametrize(
    ("M", "N", "swap", "streams"),
    [
        (64, 4096, True, 1),
        (64, 4096, False, 2),
        (4096, 64, True, 2),
        (4096, 64, False, 1),
        (4096, 4096, True, 0),
    ],
)
def test_an_operand_that_is_most_of_all_leaves_the_cache_first(M, N, swap, streams):
    text = f"64x64x64-g8-w4-s8-cooperative-descriptor{'-swap' if swap else ''}"
    assert schedules.bind(problem(M, N, 4096), Config.of(text)).streams == streams


def test_all_widths_of_a_kernel_are_there_for_every_number_of_rows():
    found = {str(candidates(problem(M, 2112, 7168))[0]) for M in range(512, 8192, 96)}
    forms = Forms.of(problem(512, 2112, 7168))
    codes = {
        (config.schedule, schedules.of(config.schedule).code(config, forms) or config)
        for config in map(Config.of, found)
    }
    assert len(codes) <= shortlist.KERNELS < len(found)


@pytest.mark.parametrize(
    "text",
    [
        "128x144x64-g8-w8-s4-pingpong-descriptor",
        "64x72x64-g4-w4-s8-cooperative-descriptor",
        "128x72x64-g4-w8-s6-cooperative-descriptor-k3",
    ],
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


@pytest.mark.parametrize(
    ("kind", "made"),
    [
        ("half", {}), ("fp8", {"dtype": "fp8fast"}), ("fp8 accurate", {"dtype": "fp8"}), ("packed4", {"weight": "int4"}),
        ("packed8", {"weight": "int8"}), ("scaled", {"dtype": "fp8", "scales": "block"}), ("sparse", None),
    ],
)  # fmt: skip
def test_what_takes_a_layout_runs_it_with_every_number_of_rows(kind, made):
    # As tests/gpu/test_invariance.py runs all rows of tiles.
    own = [
        tile.config
        for tile in tiles_of("hopper", kind)
        if tile.config.schedule in ("cooperative", "pingpong")
    ]
    assert own
    plain = made is not None and not {"weight", "scales"} & set(made)
    for layout in ("NT", "NN", "TN", "TT") if plain else ("NT",):
        # TMA wants columns of A that begin at multiples of 16 bytes.
        for M in (2192, 8, 64) if layout[0] == "T" else (2192, 1, 5, 60):
            # With scales along K, there are kernels of wide tiles for multiples of 128 columns.
            N = 2176 if kind == "scaled" else 2112
            if made is None:
                p = sparse_problem(M, N, 1152)
            else:
                p = abstract_problem(M, N, 1152, layout=layout, device=H200, **made)
            assert kind_of(p) == kind
            taken = [config for config in own if schedules.of(config.schedule).takes(config, Forms.of(p))]
            assert taken or (layout != "NT" and kind.startswith("fp8"))
            refused = {str(c): schedules.of(c.schedule).refusal(p, c) for c in taken}
            assert not {text: why for text, why in refused.items() if why is not None}, layout


def test_quotient_is_floor_division():
    quotient, most = device_functions()["quotient"], (1 << 30) - 1
    for number in (1, 2, 3, 5, 7, 8, 9, 127, 128, 132, 641, 65537, most - 1, most, 1 << 31):
        factor = walk.divisor(number)
        assert (1 << 31) <= factor < 1 << 37
        near = {least + i for least in range(0, most, most // 7) for i in (0, number - 1, number, number + 1)}
        near |= {most - most % number + i for i in (-1, 0)}
        for x in (each for each in near if 0 <= each <= most):
            assert quotient(x, factor) == x // number


@pytest.mark.parametrize("text", ["144x64x64-g{}-w4-s6-cooperative-descriptor-swap",
                                  "128x96x64-g{}-w8-s5-pingpong-descriptor"])  # fmt: skip
def test_bands_are_as_high_as_the_sizes_want_unless_they_are_given(text):
    def band(g, *sizes):
        config = Config.of(text.format(g))
        return schedules.of(config.schedule).band(problem(*sizes), config)

    # Several bands are in flight where there are few columns, and one band has all rows where these are few.
    assert band(0, 5000, 512, 1024) == 2
    assert band(0, 16, 65536, 1024) == 1
    height = band(0, 8192, 8192, 1024)
    assert 3 <= height <= 16
    assert (band(5, 8192, 8192, 1024), band(5, 16, 8192, 1024)) == (5, 1)
    with pytest.raises(ValueError, match="group_m is -1; it must be at least 0"):
        replace(Config.of(text.format(0)), group_m=-1)
    with pytest.raises(ValueError, match="group_m is 0; it must be at least 1"):
        Config.of("64x64x64-g0-w4-s3-tile-pointer")


def state_of(binding):
    """Returns the state and the band height that a kernel passes to its place."""
    given = binding.arguments(*samples.arguments(binding.problem, "meta"))
    names = inspect.signature(kernel.gemm_any_width.fn).parameters
    of = dict(zip(names, given, strict=False))
    numbers = [of[name] for name in ("units", "whole", "parts", "part_k", "tiles_m", "tiles_n")]
    divisors = tuple(of[f"{name}_divisor"] for name in ("area", "band", "last", "cut"))
    return (*numbers, divisors, ()), of["band_m"]


@pytest.mark.parametrize(
    "sizes", [(200, 520, 2048), (3000, 2048, 1000), (129, 6144, 4160), (2114, 512, 4096), (300, 520, 512, 7)]
)
@pytest.mark.parametrize(
    "text",
    [
        "128x72x64-g4-w8-s6-cooperative-descriptor",
        "136x64x64-g8-w4-s6-cooperative-descriptor-k3-swap",
        "144x64x64-g0-w4-s6-cooperative-descriptor-k4-swap",
        "64x208x64-g0-w4-s5-cooperative-descriptor-k2",
        "128x96x64-g0-w8-s5-pingpong-descriptor",
    ],
)
def test_the_kernel_places_units_as_the_walk_does(sizes, text):
    p, config = problem(*sizes[:3], batch=sizes[3:]), Config.of(text)
    if p.batch:
        config = replace(config, split_k=1)
    binding = schedules.bind(p, config)
    walk = schedules.of(config.schedule).walk(p, config)
    names = device_functions()
    placed = names[binding.place.__name__]
    state, band = state_of(binding)
    found = [
        placed(unit, state, (p.M, p.N, p.K), config.block_m, config.block_n, band) for unit in range(state[0])
    ]
    wanted = zip(walk.batch, walk.row, walk.col, walk.first_k, walk.last_k, strict=True)
    assert [(batch, row, col, first, last) for batch, row, col, _, first, last in found] == [
        tuple(map(int, each)) for each in wanted
    ]


def edges_of(p, config):
    return any_width_edge.Edges.of(p, config, np.asarray(p.M))


#: Products and tiles with edge tiles: programs have as many of them, or one more or less, and some have none.
WITH_EDGES = [
    ((2048, 8704, 1024), "176x128x64-g0-w8-s5-cooperative-descriptor-swap"),
    ((3000, 4096, 200), "184x128x64-g8-w8-s4-cooperative-descriptor-swap"),
    ((5000, 11648, 512), "128x176x64-g0-w8-s5-cooperative-descriptor"),
    ((301, 9216, 4608), "64x176x64-g4-w4-s6-cooperative-descriptor"),
    ((4096, 5120, 64), "248x128x64-g0-w8-s4-cooperative-descriptor-swap"),
    ((912, 9216, 512), "176x192x64-g0-w12-s4-cooperative-descriptor-swap"),
]


@pytest.mark.parametrize(("sizes", "text"), WITH_EDGES)
def test_edge_tiles_are_where_the_walk_has_them(sizes, text):
    p, config = problem(*sizes), Config.of(text)
    binding, walk, edge = (
        schedules.bind(p, config),
        schedules.of(config.schedule).walk(p, config),
        int(edges_of(p, config).width),
    )
    assert edge > 0
    state, band = state_of(binding)
    shape, programs, (x, y) = (p.M, p.N, p.K), binding.work.programs, sides(config)
    now = {}
    gl = types.SimpleNamespace(
        minimum=min, maximum=max, where=lambda condition, x, y: x if condition else y,
        program_id=lambda axis: now["program"], num_programs=lambda axis: programs,
    )  # fmt: skip
    names = device_functions() | {"gl": gl, "in_groups": lambda x, y: False, "in_ranges": lambda x, y: False}
    for name in ("placed", "edge_of", "end_of_units", "corner"):
        names[name] = types.FunctionType(getattr(kernel, name).fn.__code__, names)
    found, covered = [], np.zeros((p.M, p.N), int)
    for program in range(programs):
        now["program"] = program
        end = names["end_of_units"](state, shape, x, config.swap)
        for turn, unit in enumerate(range(program, end, programs)):
            at_x, at_y, *_ = names["corner"](
                unit, (), state, shape, (y, band, edge), names["sized_tile"], True, x, config.swap, "rows", "rows",
            )  # fmt: skip
            skipped = y - edge if unit >= state[1] else 0
            at, size = (at_x, at_y + skipped), (x, y - skipped)
            at, size = (at[::-1], size[::-1]) if config.swap else (at, size)
            covered[at[0] : at[0] + size[0], at[1] : at[1] + size[1]] += 1
            found.append((program, turn, *at, *size))
    assert (covered > 0).all()
    # In the walk, whole tiles are not moved back into the output.
    rows, cols = (np.minimum(first, most - size) for first, most, size in
                  ((walk.row, p.M, walk.rows), (walk.col, p.N, walk.cols)))  # fmt: skip
    assert sorted(found) == sorted(
        zip(
            *(map(int, each) for each in (walk.program, walk.turn, rows, cols, walk.rows, walk.cols)),
            strict=True,
        )
    )
    # Where there are none, the busiest program has as many turns as the whole tiles need.
    waves = -(-p.M // config.block_m) * -(-p.N // config.block_n) / programs
    assert edges_of(p, config).waves < np.ceil(waves)


@pytest.mark.parametrize("epilogue", EPILOGUES)
def test_no_config_that_is_chosen_is_refused(epilogue):
    # Weights of which tiles with shared rows are among the fastest.
    for M in (1, 2, 21, 64, 300):
        for N, K in ((8704, 7168), (5120, 10240), (12288, 2048), (1536, 4608)):
            p = of_row(Row(epilogue, M, N, K, epilogue=epilogue, call="linear"), "bf16", H200)
            for config in candidates(p):
                assert schedules.of(config.schedule).refusal(p, config) is None


def test_edge_tiles_only_where_they_save_time():
    config = Config.of("176x128x64-g0-w8-s5-cooperative-descriptor-swap")
    for M in range(8, 6000, 88):
        p = problem(M, 8704, 1024)
        edges = edges_of(p, config)
        tiles = -(-M // 176) * (8704 // 128)
        if edges.width:
            assert edges.waves < -(-tiles // 132)
            assert edges.width % 16 == 0
            assert M - M // 176 * 176 <= edges.width < 176
        assert not edges_of(p, replace(config, split_k=2)).width
    # Kernels of other kinds of products have none.
    for p in (
        problem(2048, 8704, 1024, batch=(2,)),
        abstract_problem(2048, 8704, 1024, device=H200, weight="int4"),
    ):
        assert not edges_of(p, config).width


def test_offsets_of_scales_have_32_bits():
    p = abstract_problem(1 << 20, 2176, 1 << 16, device=H200, dtype="e4m3", scales="block")
    config = Config.of("128x128x128-g8-w8-s4-cooperative-descriptor")
    # A scale of a row takes 4 bytes, and 2^10 of them are adjacent here.
    fits, beyond = (replace(p, M=M) for M in ((1 << 31) // (1 << 12) // 4, (1 << 31) // (1 << 12)))
    schedules.bind(fits, config)
    apart = replace(p.a, scale=replace(p.a.scale, row=1 << 12))
    with pytest.raises(ValueError, match="offsets of scales along K reach up to 2147483644 bytes"):
        schedules.bind(replace(beyond, a=apart), config)
    schedule, rows = schedules.of("cooperative"), np.array([[1], [1 << 17], [1 << 18]])
    found = schedule.considers(replace(p, a=apart), rows, config)
    assert found.ravel().tolist() == [True, True, False]
    assert not schedule.suits(replace(fits, b=replace(p.b, scale=replace(p.b.scale, row=1 << 26))))


@pytest.mark.parametrize("N", [2192, 2176])
def test_scales_along_k_have_no_edge_tiles(N):
    # The columns of an edge tile may begin at any multiple of 16.
    for M in range(8, 6000, 88):
        p = abstract_problem(M, N, 4096, device=H200, dtype="e4m3", scales="block")
        assert not any_width_edge.may_have_edges(p)
        for text in (
            "128x128x128-g0-w8-s5-cooperative-descriptor",
            "64x96x128-g0-w4-s6-cooperative-descriptor",
        ):
            assert not edges_of(p, Config.of(text)).width


@pytest.mark.parametrize(
    "sizes", [(1600, 1408, 4096), (1092, 3720, 4096), (200, 600, 2048), (4000, 1000, 640)]
)
@pytest.mark.parametrize("text", ["128x128x64-g8-w8-s4-cooperative-descriptor-k2",
                                  "176x128x64-g8-w8-s5-cooperative-descriptor-k3-swap"])  # fmt: skip
def test_elements_that_two_tiles_store_have_the_same_bits(sizes, text):
    # A tile that is moved back into the output overlaps another one, which must be cut as it is.
    p, config = problem(*sizes), Config.of(text)
    walk, work = schedules.of(config.schedule).walk(p, config), schedules.bind(p, config).work
    gl = types.SimpleNamespace(minimum=min, maximum=max, where=lambda condition, x, y: x if condition else y)
    names = {"gl": gl, "in_groups": lambda x, y: False, "in_ranges": lambda x, y: False}
    names["placed"] = types.FunctionType(kernel.placed.fn.__code__, names)
    corner = types.FunctionType(kernel.corner.fn.__code__, names)
    x, y = sides(config)
    cut = np.full((p.M, p.N), -1)
    for unit, (row, col) in enumerate(zip(walk.row, walk.col, strict=True)):
        state = (work.whole + work.cut * work.parts, work.whole, work.parts)
        at_x, at_y, *_ = corner(
            unit,
            (),
            state,
            (p.M, p.N, p.K),
            (y, 8),
            lambda *args, at=(row, col): (0, *at, p.M, 0, p.K),
            False,
            x,
            config.swap,
            "rows",
            "rows",
        )
        at_m, at_n = (at_y, at_x) if config.swap else (at_x, at_y)
        own = cut[at_m : at_m + config.block_m, at_n : at_n + config.block_n]
        mine = int(unit >= work.whole)
        assert ((own == -1) | (own == mine)).all()
        own[:] = mine
    assert (cut >= 0).all()


@pytest.mark.parametrize(
    ("programs", "count", "tiles"), [(132, 128, 96), (132, 7, 48), (5, 3, 2), (132, 40, 300), (1, 4, 1)]
)
def test_ranges_are_dealt_out_from_the_longest_on(programs, count, tiles):
    """Every tile once; and no program has much more to do than another."""
    from gemmery.kernels import any_width_order

    r = np.random.default_rng(0)
    lengths = (r.pareto(1.5, count) * 100).astype(int) + 1
    table = sorted(range(count), key=lambda i: (-lengths[i], i))
    gl = types.SimpleNamespace(
        where=lambda condition, x, y: x if condition else y, num_programs=lambda axis: programs
    )
    names = {
        "gl": gl, "MOST": 512, "ROUNDS": any_width_order.ROUNDS.value, "got": lambda at: table[at // 4],
        "quotient": lambda x, divisor: x // divisor,
    }  # fmt: skip
    for name in ("is_ordered", "in_order"):
        names[name] = types.FunctionType(getattr(any_width_order, name).fn.__code__, names)
    units = count * tiles
    state = (units, units, 1, 0, tiles, 1, (0, 0, 0, tiles), (None, count))
    placed = [names["in_order"](unit, state, 0) for unit in range(units)]
    assert sorted(placed) == list(range(units))
    loads = [sum(lengths[placed[u] // tiles] for u in range(p, units, programs)) for p in range(programs)]
    plain = [sum(lengths[u // tiles] for u in range(p, units, programs)) for p in range(programs)]
    if units >= 4 * programs:
        assert max(loads) <= max(plain)
    if tiles >= 2 * programs:
        assert placed == list(range(units))


@pytest.mark.parametrize("count", [1, 31, 128, 129, 300, 512, 513])
def test_ranges_are_put_into_order_from_the_longest_on(count):
    """Some have no rows; of equal ones, the first comes first."""
    from gemmery.kernels import any_width_order

    r = np.random.default_rng(count)
    lengths = r.integers(0, 20, count) * r.integers(0, 2, count)
    offs, memory = np.cumsum(lengths), np.full(2 * 512, -7)

    def load(at, mask, other):
        return np.where(mask, offs[np.clip(at, 0, count - 1)], other)

    def put(at, value, is_stored):
        at, value, is_stored = np.broadcast_arrays(at, value, is_stored)
        memory[at[is_stored == 1] // 4] = value[is_stored == 1]

    gl = types.SimpleNamespace(
        constexpr=int, int32=int, load=load, arange=lambda first, last, layout: np.arange(first, last),
        BlockedLayout=lambda *given: None, SliceLayout=lambda *given: None, minimum=np.minimum, maximum=np.maximum,
        where=np.where, num_programs=lambda axis: 132, zeros=lambda shape, *given: np.zeros(shape, int),
        expand_dims=np.expand_dims, sum=lambda x, axis: x.sum(axis),
    )  # fmt: skip
    names = {
        "gl": gl, "MOST": any_width_order.MOST.value, "ROUNDS": any_width_order.ROUNDS.value,
        "EACH": any_width_order.EACH.value, "put": put, "got": lambda at: memory[np.asarray(at) // 4],
        "barrier": lambda: None, "hopper": types.SimpleNamespace(fence_async_shared=lambda: None),
    }  # fmt: skip
    for name in ("is_ordered", "lengths_of", "put_in_order"):
        names[name] = types.FunctionType(getattr(any_width_order, name).fn.__code__, names)
    names["put_in_order"](0, 4 * 512, 0, count, offs[-1], 100)
    if count > 512:
        assert (memory == -7).all()
    else:
        assert memory[:count].tolist() == sorted(range(count), key=lambda i: (-lengths[i], i))


def test_parts_of_large_tiles_are_as_many_as_the_ring_holds():
    assert Tile(128, 256, 2, 64).most_parts == 2
    assert Tile(64, 64, 1, 64).most_parts > 4
    # Each warpgroup has whole rows of the ring.
    tile = Tile(192, 64, 3, 64)
    assert (tile.most_parts - 1) * tile.own * tile.y * 4 <= tile.ring_rows // 3 * 128
    config = Config.of("128x256x64-g8-w8-s4-cooperative-descriptor-k3")
    with pytest.raises(ValueError, match="the ring has room for the partial sums of 2 parts; given 3"):
        schedules.bind(problem(), config)


def test_the_ring_has_room_for_both_results_of_a_tile():
    for config in ROWS:
        tile = tile_of(config)
        for y in range(tile.part, tile.widest(any_width_tile.BARE) + 1, tile.each_of(RULES[""])):
            of_width = tile._replace(y=y)
            parts = -(-y // of_width.part) * tile.x // 64
            assert 2 * parts <= of_width.ring_rows // of_width.part, (str(config), y)


def test_a_ring_that_lies_elsewhere_is_refused():
    line = "getelementptr (i8, ptr addrspace(3) @global_smem, i32 {})\n"
    barrier = 'asm "mbarrier.inval.shared::cta.b64 [$1];" ' + line
    count = 2 * any_width_tile.MOST_STAGES + 4
    barriers = 8 * count
    named = 'asm "mov.b32 first, global_smem; add.s32 $0, first, {};"\n'
    others = line.format(4096 + barriers) + barrier.format(4096) + barrier.format(4104)
    right = others + named.format(4096) + named.format(2048)
    any_width_compiled.check_memory(right, 4096, count)
    for at in (1024, 4096 + barriers - 8):
        with pytest.raises(RuntimeError, match="do not have shared memory's first bytes alone"):
            any_width_compiled.check_memory(right + line.format(at), 4096, count)
    with pytest.raises(RuntimeError, match="first bytes alone"):
        any_width_compiled.check_memory(barrier.format(4096) + named.format(4096), 4096, count)
    with pytest.raises(RuntimeError, match="barriers are not 8192 bytes after"):
        any_width_compiled.check_memory(right, 8192, count)
    with pytest.raises(RuntimeError, match="barriers are not 4096 bytes after"):
        any_width_compiled.check_memory("", 4096, count)
    # What the assembly is looked for in may be written otherwise one day.
    for text in (right + named.format(4104), others, others + named.format(2048)):
        with pytest.raises(RuntimeError, match="looks for barriers elsewhere"):
            any_width_compiled.check_memory(text, 4096, count)


@pytest.mark.parametrize("part", [16, 32, 64])
def test_the_last_part_ends_where_the_width_does(part):
    for width in range(part, 257, 8):
        count, size = -(-width // part), part // 2
        registers = {f"$r{i}": i for i in range(count * size)}
        for to, of in re.findall(r"mov\.b32 (\S+), (\S+);", loop._tail(list(registers), width, part)):
            registers[to] = registers[of]
        found = list(registers.values())
        assert found[:-size] == list(range((count - 1) * size))
        assert found[-size:] == list(range(width // 2 - size, width // 2))


def test_a_parameter_that_is_no_tensor_map_is_refused():
    maps = ".param .align 64 .b8 gemm_any_width_param_0[128],\n.param .align 64 .b8 gemm_any_width_param_5[128]\n"
    used = "mov.b64 map, gemm_any_width_param_0; mov.b64 map, gemm_any_width_param_{};"
    binding.check_maps(maps + used.format(5))
    with pytest.raises(RuntimeError, match="gemm_any_width_param_4 is not a tensor map"):
        binding.check_maps(maps + ".param .u32 gemm_any_width_param_4\n" + used.format(4))


@pytest.mark.parametrize(
    ("layout", "text", "boxes"),
    [
        ("NT", "128x176x64-g8-w8-s4-cooperative-descriptor", (128, 176)),
        ("NT", "176x128x64-g8-w8-s4-cooperative-descriptor-swap", (128, 176)),
        ("TT", "192x144x64-g8-w12-s4-cooperative-descriptor", (192, 144)),
        ("NN", "192x128x64-g8-w12-s4-cooperative-descriptor", (192, 128)),
        ("NT", "64x64x64-g8-w4-s8-cooperative-descriptor", (64, 64)),
        ("NT", "64x24x64-g8-w4-s8-cooperative-descriptor", (64, 24)),
    ],
)
def test_a_direct_launch_loads_as_many_rows_at_a_time_as_a_tile_has(layout, text, boxes):
    p = problem(layout=layout)
    binding = schedules.bind(p, Config.of(text))
    names = binding.kernel.arg_names
    # An ordinary launch loads a power of two of rows at a time, of which the tile has at least one.
    powers = 64, min(64, 1 << (boxes[1].bit_length() - 1))
    for arguments, rows in ((binding.direct_arguments, boxes), (binding.arguments, powers)):
        given = dict(zip(names, arguments(*samples.arguments(p, "meta")), strict=False))
        assert (given["x_box"], given["y_box"]) == rows
        for name, box, power in zip("xy", rows, powers, strict=True):
            # The type is the same for all widths, so that one compiled kernel serves them.
            turned = layout["xy".index(name)] == "TN"["xy".index(name)]
            assert given[name].block_shape == ([1, 64, 64] if turned else [power, 64])
            assert given[name].box == ([box // 64, 64, 64] if turned else [box, 64])


@pytest.mark.parametrize(
    ("size", "text", "rows"),
    [
        ((1000, 1536), "128x192x64-g0-w8-s4-cooperative-descriptor", (128, 192)),
        ((104, 1536), "128x192x64-g0-w8-s4-cooperative-descriptor", (64, 192)),
        ((128, 128), "128x192x64-g0-w8-s4-cooperative-descriptor", (128, 64)),
        ((104, 1536), "192x128x64-g0-w8-s4-cooperative-descriptor-swap", (128, 64)),
        # Tiles that are cut along K are not moved into the operands.
        ((3000, 1536), "128x128x64-g0-w8-s4-cooperative-descriptor-k3", (64, 128)),
        ((3072, 1528), "128x128x64-g0-w8-s4-cooperative-descriptor-k3", (128, 64)),
    ],
)
def test_a_load_of_turned_rows_ends_where_the_operand_ends(size, text, rows):
    """A tensor map has an end only for the first 64 rows of a load."""
    p = problem(*size, layout="TN")
    binding = schedules.bind(p, Config.of(text))
    arguments = binding.direct_arguments(*samples.arguments(p, "meta"))
    given = dict(zip(binding.kernel.arg_names, arguments, strict=False))
    assert (given["x_box"], given["y_box"]) == rows


def fused_problem(function, *args):
    a, weight = (
        torch.empty(*shape, dtype=torch.bfloat16, device="meta") for shape in ((1000, 2048), (1536, 2048))
    )
    return linear_problem(a, weight, H200, epilogue=function, args=args)


def matrix(dtype=torch.bfloat16, columns=1536):
    return torch.empty(1000, columns, dtype=dtype, device="meta")


def test_an_epilogue_may_read_one_matrix():
    for given in (matrix(), matrix(torch.float16), matrix(columns=2048)[:, 8:1544]):
        p = fused_problem(lambda acc, x: acc + x, given)
        binding = schedules.bind(p, Config.of("128x176x64-g8-w8-s4-cooperative-descriptor"))
        descriptor = dict(
            zip(binding.kernel.arg_names, binding.arguments(samples.arguments(p, "meta")[0]), strict=False)
        )["matrix"]
        # As the output is stored.
        assert (descriptor.shape, descriptor.block_shape) == ([1000, 1536], [64, 64])
        assert descriptor.strides[0] == given.stride(0)
        assert candidates(p)[0].schedule in ("cooperative", "pingpong")


@pytest.mark.parametrize(
    "given", [matrix()[:1].expand(1000, -1), matrix()[:, :1].expand(-1, 1536)], ids=["row", "column"]
)
def test_what_is_expanded_to_a_matrix_is_loaded_as_what_it_is(given):
    p = fused_problem(lambda acc, x: acc + x, given)
    binding = schedules.bind(p, Config.of("128x176x64-g8-w8-s4-cooperative-descriptor"))
    assert (binding.constants["GIVEN"], binding.constants["SECOND"]) == (None, None)
    assert "fused_" in str(binding.constants["EPILOGUE"])


def test_an_epilogue_may_have_a_second_result():
    for function in (lambda acc: (acc.relu(), acc), lambda acc: (acc.relu(), acc.to(torch.float16))):
        p = fused_problem(function)
        binding = schedules.bind(p, Config.of("128x176x64-g8-w8-s4-cooperative-descriptor"))
        assert binding.constants["GIVEN"] is None
        assert "both_" in str(binding.constants["EPILOGUE"])
        assert candidates(p)[0].schedule in ("cooperative", "pingpong")


@pytest.mark.parametrize("p", [
    replace(problem(), epilogue="add_matrix", addend=problem().out),
    fused_problem(lambda acc, x, y: acc + x * y, matrix(), matrix()),
    fused_problem(lambda acc, x: (acc + x, acc - x), matrix()),
    fused_problem(lambda acc: (acc.relu(), acc, acc + 1)),
    fused_problem(lambda acc: (acc.relu(), acc.to(torch.int32))),
    fused_problem(lambda acc: (acc.relu(), torch.ones_like(acc))),
    fused_problem(lambda acc, x: (acc * x, x), torch.empty((), dtype=torch.bfloat16, device="meta")),
    fused_problem(lambda acc, x: (acc + x, acc), matrix()[:1].expand(1000, -1)),
    fused_problem(lambda acc: (acc.relu(), acc.amax(-1))),
    fused_problem(lambda acc, x: acc + x, matrix(torch.float32)),
    fused_problem(lambda acc, x: acc + x, torch.empty(1536, 1000, dtype=torch.bfloat16, device="meta").mT),
    fused_problem(lambda acc, x: acc + x, matrix(columns=1537)[:, :-1]),
    fused_problem(lambda acc, x: epilogues.dropout(acc + x, 0.5, 1), matrix()),
], ids=["add_matrix", "two", "one and two results", "three results", "wide result", "constant result", "number as a result", "one row and a second result", "row result", "fp32", "transposed", "odd rows", "random"])  # fmt: skip
def test_other_epilogues_with_matrices_are_refused(p):
    with pytest.raises(ValueError, match="an epilogue with at most one more matrix"):
        schedules.bind(p, Config.of("128x176x64-g8-w8-s4-cooperative-descriptor"))
    assert not {config.schedule for config in candidates(p)} & {"cooperative", "pingpong"}


def test_a_packed_weight_with_a_second_result_is_left_to_other_schedules():
    a, weight = (
        torch.empty(*shape, dtype=torch.bfloat16, device="meta") for shape in ((1000, 2048), (1536, 2048))
    )
    weight = quantize(weight, "int4", group_size=64)
    one, two = (
        linear_problem(a, weight, H200, epilogue=function)
        for function in (torch.relu, lambda acc: (acc.relu(), acc))
    )
    text = "96x128x64-g8-w8-s5-cooperative-descriptor-swap"
    schedules.bind(one, Config.of(text))
    with pytest.raises(ValueError, match="an epilogue with at most one more matrix"):
        schedules.bind(two, Config.of(text))


def test_tuning_measures_the_best_of_them():
    p = problem(4096, 2112, 7168)
    promising = tuner._promising(rank(p))
    limit = tuner.PRUNE * min(cost.total for _, cost in rank(p))
    for name in ("cooperative", "pingpong"):
        near = [config for config, cost in rank(p) if config.schedule == name and cost.total <= limit]
        ours = [config for config in promising if config.schedule == name]
        assert ours == near[: tuner.PER_SCHEDULE]
    assert len(promising) > tuner.PER_SCHEDULE


class Memory:
    """Records what a thread's assembly stores, copies and adds.

    A number is identified by its 64 rows, its 8 columns, its thread and its place among the thread's four.
    """

    def __init__(self):
        self.stored, self.copied, self.added, self.thread = {}, {}, [], 0

    def ptx(self, code, arguments, value):
        """See `ptx.Program.run`."""
        at = [sum(value(x) for x in re.split(r"\s\+\s", each[1:-1])) for each in arguments if each[0] == "["]
        if code == "st.global.v4.f32":
            for i, register in enumerate(arguments[1].strip("{}").split(",")):
                self.stored.setdefault(at[0] + 4 * i, set()).add(value(register))
        elif code == "cp.async.cg.shared.global":
            self.copied |= {at[0] + i: self.stored[at[1] + i] for i in range(0, 16, 4)}
        elif code == "ld.shared.v4.f32":
            return [name.strip() for name in arguments[0].strip("{}").split(",")], at[0]
        elif code == "add.f32":
            place = int(re.match(r"n(\d)", arguments[2])[1])
            self.added.append((value(arguments[1]), self.copied[value(arguments[2]) + 4 * place]))
        else:
            raise AssertionError(code)
        return None


def assembly_of(name, *arguments):
    """Returns the assembly that a function of tiles that are cut writes."""
    found = []

    def inline_asm_elementwise(text, *more, **how):
        found.append(text)
        return ()

    gl = types.SimpleNamespace(
        inline_asm_elementwise=inline_asm_elementwise, int32=int, float32=float, tuple=list
    )
    made = inspect.unwrap(getattr(any_width_cut, name))
    types.FunctionType(made.__code__, {"gl": gl, "value_of": loop.value_of}, name, made.__defaults__)(
        *arguments
    )
    return Program(found[0])


@pytest.mark.parametrize(("own", "width", "part", "most"), [(64, 72, 64, 256), (64, 200, 64, 256), (128, 144, 64, 144),
                                                            (64, 32, 32, 32), (128, 64, 64, 160)])  # fmt: skip
def test_parts_of_tiles_meet_number_by_number(own, width, part, most):
    """A part of a tile is stored as another warpgroup fetches it, and what is fetched is added to the same element."""
    each, to, ring = part // 8, 1 << 20, 4096
    parts, of_rows = -(-width // part), -(-most // part) * each
    columns = [min(i * part, width - part) // 8 + j for i in range(parts) for j in range(each)]
    columns += [None] * (of_rows - len(columns))

    def numbers(thread, blocks):
        return [(m, b, thread, i) for m, b in blocks for i in range(4)]

    blocks = [(m, column) for m in range(own // 64) for column in columns]
    nothing = types.SimpleNamespace(values=[None] * len(blocks))
    store, fetch = (
        assembly_of("store_partial", nothing, 0, 0, own, part),
        assembly_of("fetch_partial", 0, 0, 0),
    )
    memory = Memory()
    for memory.thread in range(128):
        store.run([None] * 4 + numbers(memory.thread, blocks) + [to] * 4 + [width] * 4, memory)
    size = own * width * 4
    for memory.thread in range(128):
        fetch.run([None, ring, to, size], memory)
    assert sorted(memory.stored) == list(range(to, to + size, 4))
    assert sorted(memory.copied) == list(range(ring, ring + size, 4))
    add = assembly_of("add_fetched", types.SimpleNamespace(values=[None] * each), 0)
    for m in range(own // 64):
        for i in range(parts):
            first = min(i * part, width - part)
            at = ring + (m * width + first) // 8 * 2048
            for memory.thread in (0, 1, 31, 77, 127):
                mine = numbers(memory.thread, [(m, first // 8 + j) for j in range(each)])
                memory.added = []
                add.run(mine + mine + [at] * 4, memory)
                assert memory.added == [(number, {number}) for number in mine]
