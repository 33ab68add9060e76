"""Choosing a config: every choice can run, the same one each time, and the model's numbers make sense."""

import itertools
import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gemmery import Config, devices
from gemmery.lab.abstract import abstract_problem
from gemmery.launch import padding
from gemmery.launch.plan import Plan, runs_on
from gemmery.layout import make_problem
from gemmery.operands import Dense, Layout, Packed
from gemmery.problem import Problem
from gemmery.schedules import bind
from gemmery.schedules.waves import Waves
from gemmery.select import measured, rank, shortlist
from gemmery.select.model import costs
from gemmery.select.space import kind_of, space_of, tiles_of
from gemmery.select.tiles import FAMILIES

F8 = (torch.float8_e4m3fn, torch.float8_e5m2)
#: What kinds of operands there are, as dtype, precision and fast_accum.
KINDS = {
    "fp16": (torch.float16, "ieee", False),
    "bf16": (torch.bfloat16, "ieee", False),
    "fp32": (torch.float32, "ieee", False),
    "tf32": (torch.float32, "tf32", False),
    "tf32x3": (torch.float32, "tf32x3", False),
    "fp64": (torch.float64, "ieee", False),
    "e4m3": (F8[0], "ieee", False),
    "e5m2": (F8[1], "ieee", False),
    "e4m3 fast": (F8[0], "ieee", True),
    "int8": (torch.int8, "ieee", False),
}
OUT = {torch.int8: torch.int32} | dict.fromkeys(F8, torch.bfloat16)


def problem(device, kind, m=1024, n=768, k=512, aligned=True, lead=()):
    """A product without memory: tensors on the meta device have layouts alone."""
    dtype, precision, fast = KINDS[kind]
    pad = 0 if aligned else 1
    a = torch.empty(*lead, m, k + pad, dtype=dtype, device="meta")[..., :k]
    b = torch.empty(*lead, k, n + pad, dtype=dtype, device="meta")[..., :n]
    out = torch.empty(*lead, m, n, dtype=OUT.get(dtype, dtype), device="meta")
    row = devices.TABLE[device]
    if precision not in row.target.precisions:
        precision = "ieee"
    return make_problem(a, b, out, None, scaled=False, precision=precision, fast_accum=fast, device=row)


everything = pytest.mark.parametrize(("device", "kind"), list(itertools.product(devices.TABLE, KINDS)))
SIZES = ((1, 1, 1), (16, 4096, 4096), (1024, 768, 512), (8192, 8192, 8192), (4096, 4000, 100))


@pytest.mark.sampled(3)
@everything
@pytest.mark.parametrize("aligned", (True, False), ids=("aligned", "misaligned"))
def test_every_device_runs_every_kind_or_says_why_not(device, kind, aligned):
    for m, n, k in SIZES:
        p = problem(device, kind, m, n, k, aligned)
        if not runs_on(p):
            assert any("reference" in sentence for sentence in devices.cannot(p.device.arch)), p
            assert Plan(p).config is None
            continue
        ranked = rank(p)
        assert ranked, p
        rows = tiles_of(p.device.target.family, kind_of(p))
        # A row of one element, or of none, has no stride that could be misaligned.
        allowed = [row.config for row in rows if aligned or min(m, n, k) == 1 or not row.aligned]
        assert aligned or min(m, n, k) == 1 or all(config.loader == "pointer" for config, _ in ranked)
        for config, predicted in ranked:
            bind(p, config)
            assert replace(config, split_k=1) in allowed
            assert all(
                math.isfinite(part)
                for part in (predicted.total, predicted.compute, predicted.l2, predicted.memory)
            )
            modelled = predicted.total - predicted.correction
            assert modelled >= max(predicted.compute, predicted.l2, predicted.memory) > 0
            assert predicted.total > 0
            assert predicted.overhead > 0
            assert predicted.waves > 0
        space, short = space_of(p), shortlist.of(p)
        kernels = dict(zip(space.configs, space.kernel.tolist(), strict=True))
        listed = [cost.total for config, cost in ranked if kernels[config] in short]
        others = [cost.total for config, cost in ranked if kernels[config] not in short]
        assert [cost.total for _, cost in ranked] == sorted(listed) + sorted(others)
        assert len({config for config, _ in ranked}) == len(ranked)
        launched = padding.launched(p)
        assert Plan(p).config == rank(launched)[0][0]


@everything
def test_ranking_is_deterministic(device, kind):
    p = problem(device, kind)
    if runs_on(p):
        assert rank(p) == rank(problem(device, kind))


@pytest.mark.parametrize("device", devices.TABLE)
def test_what_a_device_cannot_do_is_said(device):
    """A kind without tiles would be a KeyError at somebody's desk."""
    row = devices.TABLE[device]
    for kind, (_, precision, _) in KINDS.items():
        p = problem(device, kind)
        if precision not in row.target.precisions:
            assert any(precision in sentence for sentence in devices.cannot(row.arch))
            assert p.precision == "ieee"
        if not runs_on(p):
            assert any("fp8" in sentence or "float8" in sentence for sentence in devices.cannot(row.arch))


@pytest.mark.parametrize("arch", devices.ARCHS)
def test_every_architecture_has_a_device_and_tiles(arch):
    assert any(row.arch == arch for row in devices.TABLE.values())
    assert devices.ARCHS[arch].family in FAMILIES
    assert devices.ARCHS[arch].backend == ("hip" if arch.startswith("gfx") else "cuda")


@pytest.mark.parametrize("family", FAMILIES)
def test_rows_of_the_space(family):
    """Each row once in its list, no descriptors where there are none, every tile can be some device's."""
    arch = next(arch for arch in devices.ARCHS.values() if arch.family == family)
    for kind in FAMILIES[family]:
        rows = tiles_of(family, kind)
        assert rows
        assert len({row.config for row in rows}) == len(rows)
        for row in rows:
            assert 0 < row.efficiency <= 1
            assert arch.tma or row.config.loader == "pointer"
        # A misaligned problem has tiles as well.
        assert any(row.config.loader == "pointer" and not row.aligned for row in rows), (family, kind)


def test_an_unknown_architecture():
    assert any("sm_999" in sentence for sentence in devices.cannot("sm_999"))


# ---------------------------------------------------------------------------------------------------------------------
# The model

devices_of_the_table = st.sampled_from(list(devices.TABLE))
kinds = st.sampled_from(list(KINDS))
extent = st.integers(1, 9000)


def monotone(small, large):
    """Costs of one space's whole configs. A tail comes and goes with the number of tiles: its start-up is forgiven."""
    space = space_of(small)
    whole = space.split_k == 1
    slack = np.where(space.tail_n > 1, small.device.delays.tail, 0)
    return (costs(large, space).total * (1 + 1e-9) + slack >= costs(small, space).total)[whole]


@given(devices_of_the_table, kinds, extent, extent, extent, st.integers(1, 4000))
def test_more_rows_never_cost_less(device, kind, m, n, k, more):
    small, large = problem(device, kind, m, n, k), problem(device, kind, m + more, n, k)
    if runs_on(small):
        assert monotone(small, large).all()


@given(devices_of_the_table, kinds, extent, extent, extent, st.integers(1, 4000))
def test_a_longer_sum_never_costs_less(device, kind, m, n, k, more):
    small, large = problem(device, kind, m, n, k), problem(device, kind, m, n, k + more)
    if runs_on(small):
        assert monotone(small, large).all()


@given(devices_of_the_table, kinds, extent, extent, extent, st.lists(extent, min_size=1, max_size=5))
def test_costs_of_many_rows_are_those_of_each(device, kind, m, n, k, rows):
    p = problem(device, kind, m, n, k)
    if not runs_on(p):
        return
    space = space_of(p)
    each = [replace(p, M=M) for M in rows]
    least = np.array([[q.bytes] for q in each], dtype=float)
    together = costs(p, space, np.array(rows)[:, None], least).total
    assert np.allclose(together, [costs(q, space).total for q in each], rtol=1e-12)


@given(kinds, extent, extent)
def test_few_kernels_serve_every_number_of_rows(kind, n, k):
    """The first choice for any M is one of `KERNELS` kernels."""
    used = set()
    for m in (1, 2, 7, 16, 17, 33, 64, 100, 128, 250, 256, 511, 700, 1024, 3000, 8192):
        p = problem("NVIDIA H200", kind, m, n, k)
        # The smallest matrices have other strides for one row or column, which is another problem.
        if runs_on(p) and m > 1:
            space = space_of(p)
            used.add(dict(zip(space.configs, space.kernel.tolist(), strict=True))[rank(p)[0][0]])
    assert len(used) <= shortlist.KERNELS


def test_a_gradient_of_a_weight_has_all_kernels():
    """Its M is a size of the weight, so no other M needs a kernel."""
    gradient, product = (
        abstract_problem(2112, 1152, 5149, device=devices.TABLE["NVIDIA H200"], layout=layout)
        for layout in ("TN", "NT")
    )
    space = shortlist.allowed(gradient)
    assert shortlist.of(gradient) == set(space.kernel[space.chosen(gradient)])
    assert len(shortlist.of(gradient)) > shortlist.KERNELS >= len(shortlist.of(product))
    first, *others = [cost.total for _, cost in rank(gradient)]
    assert first <= min(others)


@pytest.mark.parametrize("weight", ["int4", "2:4"])
def test_a_plain_product_names_no_epilogue(weight):
    plain, biased = (
        abstract_problem(300, 1152, 2048, device=devices.TABLE["NVIDIA H200"], weight=weight, bias=bias)
        for bias in (False, True)
    )
    assert "+" not in str(plain)
    assert "+fused" in str(biased)


@pytest.mark.parametrize(
    ("layout", "n", "taken"), [("TN", 1152, False), ("TN", 1280, True), ("NT", 1152, True)]
)
def test_tiles_of_two_blocks_end_with_the_operand_that_they_cut_along_its_rows(layout, n, taken):
    p = abstract_problem(2112, n, 5120, device=devices.TABLE["NVIDIA H200"], layout=layout)
    text = "64x320x64-g8-w4-s4-tile-descriptor"
    assert (text in {str(config) for config, _ in rank(p)}) == taken
    bind(p, Config.of(text))


def test_what_was_measured_is_predicted():
    """At a measured shape the correction goes most of the way to the measurement."""
    device = devices.TABLE["NVIDIA H200"]
    table = json.loads((measured.TABLES / "nvidia-h200-half.json").read_text())
    wrong, corrected = [], []
    rows = [*zip(table["shapes"], table["microseconds"], strict=True)]
    for shape, times in rows[::3]:
        p = measured._problem(shape, device, torch.bfloat16, "half")
        predicted = {str(config): cost for config, cost in rank(p)}
        for text, time in zip(table["configs"], times, strict=True):
            if time is not None and text in predicted:
                cost = predicted[text]
                corrected.append(abs(math.log(cost.total / (time * 1e-6))))
                wrong.append(abs(math.log((cost.total - cost.correction) / (time * 1e-6))))
    assert np.median(corrected) < 0.04
    assert np.median(corrected) < np.median(wrong) < 0.1


@given(devices_of_the_table, kinds, extent, extent, extent)
def test_no_prediction_beats_the_datasheet(device, kind, m, n, k):
    p = problem(device, kind, m, n, k)
    plan = Plan(p)
    if plan.config is not None:
        assert rank(p)[0][1].total > 0.9 * plan.roofline() > 0


@given(devices_of_the_table, kinds, extent, extent, st.integers(0, 2))
def test_an_empty_sum_is_ranked_as_well(device, kind, m, n, lead):
    p = problem(device, kind, m, n, 0, lead=(3,) * lead)
    if runs_on(p):
        assert all(config.loader == "pointer" for config, _ in rank(p))
        bind(p, rank(p)[0][0])


@pytest.mark.parametrize("device", ("NVIDIA H100", "NVIDIA A100", "AMD Instinct MI300X"))
def test_large_products_get_large_tiles_and_small_ones_small(device):
    large, small = (rank(problem(device, "fp16", size, size, 4096))[0][0] for size in (8192, 256))
    assert large.block_m * large.block_n > small.block_m * small.block_n


@pytest.mark.parametrize("device", ["NVIDIA H100", "NVIDIA H200"])
@pytest.mark.parametrize("rows", [8, 16])
def test_a_thin_operand_gets_thin_tiles_whatever_its_layout(device, rows):
    """TMA would fill most of a tile of 64 rows with zeros, in any layout.

    A cluster, which divides a tile's steps, is faster nevertheless: with 8 rows it takes 17.6 us, and thin tiles 19.2
    (`looks/any_width_cluster-bf16`).
    """
    for turned in (False, True):
        a = torch.empty(4096, rows, dtype=torch.bfloat16, device="meta").mT
        a = a if turned else torch.empty_like(a, memory_format=torch.contiguous_format)
        b = torch.empty(4096, 4096, dtype=torch.bfloat16, device="meta").mT
        out = torch.empty(rows, 4096, dtype=torch.bfloat16, device="meta")
        how = {"scaled": True, "precision": "ieee", "fast_accum": False}
        config, _ = rank(make_problem(a, b, out, None, device=devices.TABLE[device], **how))[0]
        assert config.block_m <= 32 or config.schedule == "cluster", config


def test_explain_names_what_was_chosen():
    plan = Plan(problem("NVIDIA H100", "fp16"))
    text = plan.explain(top=3)
    assert str(plan.problem) in text
    assert "NVIDIA H100" in text
    for config, _ in rank(plan.problem)[:3]:
        assert str(config) in text
    assert "torch reference" in Plan(problem("AMD Radeon RX 7900 XTX", "e5m2")).explain()


# ---------------------------------------------------------------------------------------------------------------------
# Waves


@given(
    devices_of_the_table,
    st.integers(1, 3000),
    st.integers(1, 3000),
    st.sampled_from((1, 2, 4, 8)),
    st.integers(0, 1),
)
def test_whole_tiles_and_parts_cover_the_output(device, m, n, tail, lead):
    p = problem(device, "fp16", m, n, lead=(3,) * lead)
    config = Config(64, 128, 32, schedule="persistent", tail=tail)
    work, sms = Waves.of(p, config), p.device.sms
    rows = p.matrices * math.ceil(p.M / 64)
    assert work.units == work.tiles + work.parts
    if tail == 1:
        assert (work.tiles, work.parts) == (rows * math.ceil(n / 128), 0)
        return
    part_rows, part_columns = (32, 32) if tail == 8 else (64, 128 // tail)
    assert work.tiles + work.cut == rows * (n // 128)
    assert work.cut in (0, (work.tiles + work.cut) % sms)
    assert work.strips == math.ceil(n % 128 / part_columns)
    assert work.parts == work.cut * tail + rows * (64 // part_rows) * work.strips


# ---------------------------------------------------------------------------------------------------------------------
# Wide offsets


@pytest.mark.parametrize(("stride", "wide"), [(1 << 20, False), (1 << 25, True)])
@pytest.mark.parametrize("position", range(3))
def test_offsets_within_a_block_are_wide_when_they_have_to_be(position, stride, wide):
    """128 rows 2^25 elements apart reach past 2^31."""
    tensors = [torch.empty(512, 512, dtype=torch.float16, device="meta") for _ in range(3)]
    tensors[position] = torch.empty_strided((512, 512), (stride, 1), dtype=torch.float16, device="meta")
    p = make_problem(
        *tensors, None, scaled=False, precision="ieee", fast_accum=False, device=devices.TABLE["NVIDIA A100"]
    )
    assert bind(p, Config(128, 128, 128)).constants["WIDE"] == wide


@pytest.mark.parametrize("device", devices.TABLE.values(), ids=lambda row: row.name)
@pytest.mark.parametrize("packing", [("int4", 4, 128), ("int8", 8)], ids=str)
def test_packed_weights_have_a_class_of_invariant_configs(device, packing):
    """The one for all numbers of rows and layouts, of the packed kind's own rows."""
    bf16 = torch.bfloat16
    found = set()
    for M, col in ((1, 4096), (100, 4096), (4096, 4096), (64, 4098)):
        p = Problem(
            M=M, N=4096, K=4096, batch=(), device=device, a=Dense(bf16, (), col, 1, col % 16 == 0),
            b=Packed.of(bf16, *packing, N=4096, K=4096), out=Layout(bf16, (), 4096, 1, True),
            batch_invariant=True,
        )  # fmt: skip
        space = shortlist.allowed(p)
        assert len(space)
        assert all(config.swap and config.split_k == 1 for config in space.configs)
        found |= set(space.numerics.tolist())
    assert len(found) == 1
