"""Every kernel compiled for every target that it is for: a sample of what `make test-all` compiles with all configs."""

from dataclasses import replace

import pytest
import triton

from gemmery.devices import ARCHS
from gemmery.lab.fused_targets import gradient
from gemmery.lab.inspection.resources import usage
from gemmery.lab.targets import TARGETS, Case, cases, expected, serialised
from gemmery.problem import Config
from gemmery.schedules import specialized
from gemmery.select.space import tiles_of
from tests.compile.compiling import (
    compile_dense,
    compile_posed,
    device_of,
    overlaps,
    strictly_for,
    waits_first,
)
from tests.compile.test_targets import CHOSEN_FOR

#: Configs that every target can run. An instruction for a warpgroup takes at least 64 rows.
TILE = "64x64x64-g8-w4-s2-tile-pointer"
SHORT = "64x64x32-g8-w4-s2-tile-pointer"
#: For products without a matrix unit, which take more registers.
SMALL = "64x64x16-g8-w8-s2-tile-pointer"
PERSISTENT = "64x64x32-g8-w4-s2-persistent-pointer"
#: Products by what is special about them: the name in `lab.fused_targets.FUSED`, the type and the config.
POSED = {
    "traced": ("several", "bf16", TILE),
    "pair": ("swiglu_pair", "bf16", TILE),
    "packed": ("int4_gelu", "bf16", TILE + "-swap"),
    "sparse": ("sparse_gelu", "bf16", TILE + "-swap"),
    "sparse int4": ("sparse_int4", "bf16", TILE + "-swap"),
    "scaled": ("scaled_blocks", "int8", "64x64x128-g8-w4-s2-tile-pointer"),
    "adapted": ("adapted_bias", "bf16", TILE),
    "adapted int4": ("adapted_int4", "bf16", TILE + "-swap"),
    "summed": ("summed_residual", "bf16", "64x32x64-g8-w4-s2-tile-pointer"),
}
#: Kernels that only Hopper can run, and only some versions of Triton can compile, with their names.
SPECIALIZED = {
    "packed": ("int4_gelu", "bf16", "64x64x128-g1-w8-s4-specialized-descriptor-swap", 16, "gemm_specialized"),
    "scaled": (
        "scaled_blocks",
        "e4m3",
        "128x256x128-g0-w8-s4-cooperative-descriptor",
        4096,
        "gemm_any_width",
    ),
}

#: The same for sums over ranks, with the kernel's name; the last one's columns come in pairs.
SUMMED = {
    "one part": ("summed", "16x64x64-g0-w4-s12-cooperative-descriptor-swap", 16, "gemm_any_width"),
    "many parts": ("summed", "64x64x64-g0-w4-s12-cooperative-descriptor-k2-swap", 128, "gemm_any_width"),
    "packed": ("summed_int4", "16x64x256-g1-w8-s8-specialized-descriptor-k3-swap", 16, "gemm_specialized"),
    "sliced": ("summed_int4", "8x32x128-g1-w8-s3-sliced_k-pointer-k2-swap", 8, "gemm_sliced_k"),
    "pairs": ("summed_swiglu", "16x64x64-g0-w4-s12-cooperative-descriptor-swap", 16, "gemm_any_width"),
}

#: Of a product of thin matrices that is added: the kernel's instruction for it, and others.
ADAPTED = {
    "dense": (
        "adapted_bias",
        "256x128x64-g0-w8-s4-cooperative-descriptor-swap",
        4096,
        "gemm_any_width",
        True,
    ),
    "turns": ("adapted", "128x128x64-g0-w8-s6-pingpong-descriptor", 4096, "gemm_any_width", True),
    "packed": (
        "adapted_nf4",
        "256x128x64-g0-w8-s5-cooperative-descriptor-swap",
        4096,
        "gemm_any_width",
        True,
    ),
    "many parts": (
        "adapted_int4",
        "64x64x64-g0-w4-s8-cooperative-descriptor-k2-swap",
        128,
        "gemm_any_width",
        True,
    ),
    "with a matrix": (
        "adapted_residual",
        "128x176x64-g0-w8-s4-cooperative-descriptor",
        4096,
        "gemm_any_width",
        True,
    ),
    "sparse": (
        "adapted_sparse",
        "64x128x64-g0-w8-s4-cooperative-descriptor-swap",
        128,
        "gemm_any_width",
        True,
    ),
    "specialized": (
        "adapted_nf4",
        "256x128x64-g4-w8-s5-specialized-descriptor-swap",
        4096,
        "gemm_specialized",
        True,
    ),
    "few rows": ("adapted_int4", "8x32x128-g1-w8-s3-sliced_k-pointer-k2-swap", 8, "gemm_sliced_k", False),
}

#: Of products that wait for other ranks.
WAITING = {
    "a matrix": ("received", "256x128x64-g0-w8-s4-cooperative-descriptor-swap"),
    "many parts": ("received", "128x160x64-g0-w8-s5-cooperative-descriptor-k2"),
    "pairs": ("received_swiglu", "128x256x64-g0-w8-s4-cooperative-descriptor"),
    "without Gluon": ("received", "128x128x64-g8-w8-s3-tile-descriptor"),
}

every_target = pytest.mark.parametrize("target", TARGETS)


def check(target, compiled, kernel, *units, spilled=0, more=0):
    """The kernel is the one that was meant, fits the GPU, and multiplies with one of the instructions, if any.

    It spills `spilled` bytes of a thread, or up to `more` more.
    """
    took, text = usage(compiled), compiled.asm.get("ptx") or compiled.asm["amdgcn"]
    assert compiled.metadata.name == kernel
    assert spilled <= took.spilled <= spilled + more
    assert took.shared <= device_of(target).target.shared
    assert not units or any(unit in text for unit in units)
    assert waits_first(compiled)


@every_target
@pytest.mark.parametrize(("kernel", "config"), [("gemm_tiles", TILE), ("gemm_persistent", PERSISTENT)])
def test_dense(target, kernel, config):
    compiled = compile_dense(target, config, bias=True)
    check(target, compiled, kernel, ARCHS[target].matrix)
    assert not serialised(compiled)
    assert overlaps(compiled) == (target in ("sm_90", "sm_100", "sm_120"))


#: Types, with precisions and sums: every one that a target has.
TYPES = [
    (target, case.dtype, case.precision, case.fast_accum)
    for target in TARGETS
    for case in cases(target, False)
    if case.layout == "NN" and case.dtype != "bf16"
]


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("target", "dtype", "precision", "fast_accum"), TYPES)
def test_types(target, dtype, precision, fast_accum):
    config = SMALL if dtype in ("fp32", "fp64") and precision == "ieee" else SHORT
    compiled = compile_dense(target, config, dtype, precision=precision, fast_accum=fast_accum)
    case = Case(dtype, "NT", "identity", True, precision, fast_accum)
    check(target, compiled, "gemm_tiles", *expected(target, case, Config.of(config)))


@pytest.mark.sampled(3)
@every_target
@pytest.mark.parametrize("name", POSED)
def test_operands_and_epilogues(target, name):
    # Eight bits are multiplied by older instructions on some targets.
    units = [ARCHS[target].matrix] if POSED[name][1] == "bf16" else []
    check(target, compile_posed(target, *POSED[name]), "gemm_tiles", *units)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "name, kind",
    [
        ("sparse", "sparse"),
        ("sparse_gelu", "sparse"),
        ("sparse_swiglu", "sparse"),
        ("sparse_int4", "sparse4"),
        ("sparse_int4_swiglu", "sparse4"),
    ],
)
@every_target
def test_rows_for_sparse_weights(target, name, kind):
    """All of the tile schedule, with and without parts of K."""
    spills = {}
    rows = [tile for tile in tiles_of(ARCHS[target].family, kind) if tile.config.schedule == "tile"]
    configs = {replace(tile.config, split_k=k) for tile in rows for k in ((1, 2) if tile.splits else (1,))}
    for config in configs:
        compiled = compile_posed(target, name, "bf16", str(config))
        spills[str(config)] = usage(compiled).spilled
        # What spills is passed over by a plan.
        check(target, compiled, "gemm_tiles", ARCHS[target].matrix, spilled=spills[str(config)])
    assert not all(spills.values())
    assert triton.__version__ != CHOSEN_FOR or not any(spills.values()), spills


@every_target
def test_pointwise(target):
    with strictly_for(target):
        compiled = gradient("swiglu", "bf16", 4096, device_of(target))
    check(target, compiled, "pointwise")


@pytest.mark.parametrize("name", SPECIALIZED)
@pytest.mark.skipif(not specialized.SPECIALIZED.available(), reason="specialised warps need another Triton")
def test_specialized(name):
    *abstract_problem, config, rows, kernel = SPECIALIZED[name]
    compiled = compile_posed("sm_90", *abstract_problem, config, rows)
    check("sm_90", compiled, kernel, "wgmma.mma_async")


@pytest.mark.parametrize("name", SUMMED)
@pytest.mark.skipif(not specialized.SPECIALIZED.available(), reason="specialised warps need another Triton")
def test_sums_over_ranks(name):
    fused, config, rows, kernel = SUMMED[name]
    compiled = compile_posed("sm_90", fused, "bf16", config, rows)
    check("sm_90", compiled, kernel)
    # Ranks wait in assembly, without a vote: no other shared memory is taken.
    assert "%globaltimer" in compiled.asm["ptx"]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", ADAPTED)
@pytest.mark.skipif(not specialized.SPECIALIZED.available(), reason="specialised warps need another Triton")
def test_thin_products_in_registers(name):
    fused, config, rows, kernel, in_fragments = ADAPTED[name]
    compiled = compile_posed("sm_90", fused, "bf16", config, rows)
    took = usage(compiled)
    assert compiled.metadata.name == kernel
    assert took.shared <= device_of("sm_90").target.shared
    # Where a tile ends, as `AnyWidthBinding.harmless_spills` allows it.
    assert took.spilled <= 136
    text = compiled.asm["ptx"]
    assert (
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16" in text
    ) is in_fragments or kernel == "gemm_sliced_k"
    assert not serialised(compiled)


@pytest.mark.parametrize("name", WAITING)
@pytest.mark.skipif(not specialized.SPECIALIZED.available(), reason="specialised warps need another Triton")
def test_waiting_for_other_ranks(name):
    fused, config = WAITING[name]
    compiled = compile_posed("sm_90", fused, "bf16", config, 4096)
    kernel = "gemm_tiles" if "-tile-" in config else "gemm_any_width"
    # Warpgroups keep the numbers of a part while they wait.
    check("sm_90", compiled, kernel, "wgmma.mma_async", more=8 if name == "many parts" else 0)
    # Launches behind it would take room that other streams need.
    assert not overlaps(compiled)
    # What other GPUs have written is seen before tensor maps load it.
    text = compiled.asm["ptx"]
    assert "ld.acquire.sys" in text or "ld.global.sys.acquire" in text
    assert "fence.proxy.async;" in text
