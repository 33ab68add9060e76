"""Tiles of any width compile for sm_90: with next to no spills in loops, instructions of their width, and a ring in place."""

import re
from dataclasses import replace

import pytest
import torch

from gemmery import Config, schedules
from gemmery.kernels.any_width_sparse import TOGETHER
from gemmery.lab.abstract import abstract_problem, linear_problem
from gemmery.lab.fused_targets import abstract_product, abstract_sparse
from gemmery.lab.inspection.resources import usage
from gemmery.lab.inspection.sass import disassemble
from gemmery.launch.cross_compile import compiling_for
from gemmery.schedules.any_width import COOPERATIVE
from gemmery.schedules.any_width_binding import AnyWidthBinding
from gemmery.schedules.any_width_compiled import PENDING, waits_for_each
from gemmery.schedules.any_width_tile import BARRIERS, ROW
from gemmery.select.samples import arguments
from gemmery.select.shapes import device_named, problem_of

pytestmark = pytest.mark.skipif(not COOPERATIVE.available(), reason="tiles of any width need another Triton")

CASES = [
    ("NT", "128x176x64-g8-w8-s4-cooperative-descriptor"),
    ("TN", "128x128x64-g8-w8-s4-pingpong-descriptor"),
    ("NT", "80x128x64-g8-w8-s6-pingpong-descriptor-swap"),
    ("NT", "192x192x64-g8-w12-s3-cooperative-descriptor"),
    ("NN", "160x256x64-g8-w8-s3-cooperative-descriptor-swap"),
    ("NT", "64x248x64-g8-w4-s4-cooperative-descriptor"),
    ("TT", "192x64x64-g8-w12-s4-cooperative-descriptor"),
    ("NT", "256x160x64-g8-w8-s3-cooperative-descriptor"),
    ("NT", "128x144x64-g8-w8-s4-pingpong-descriptor"),
    # Of bare products alone.
    ("NT", "192x256x64-g8-w8-s3-cooperative-descriptor-swap"),
    ("TN", "256x192x64-g8-w8-s3-cooperative-descriptor"),
    ("NT", "104x192x64-g8-w12-s5-cooperative-descriptor-swap"),
    ("NT", "16x64x64-g8-w4-s12-cooperative-descriptor-swap"),
    # Two warpgroups share rows.
    ("NT", "16x96x64-g8-w8-s8-cooperative-descriptor-k2-swap"),
]


def k_loops(code):
    """The first and the last line of each K loop in machine code: for each product the shortest loop with it."""
    labels = {found[1]: at for at, line in enumerate(code) if (found := re.match(r"\s*\.(\w+):", line))}
    jumps = [
        (labels.get(found[1]), at)
        for at, line in enumerate(code)
        if (found := re.search(r"\(\.(\w+)\)", line))
    ]
    # What waits longer comes back from the end of the code.
    loops = [(first, last) for first, last in jumps if first is not None and first < last < first + 1200]
    products = [at for at, line in enumerate(code) if re.search(r"\b[HQ]GMMA\b", line)]
    around = [[loop for loop in loops if loop[0] < at < loop[1]] for at in products]
    return {min(found, key=lambda loop: loop[1] - loop[0]) for found in around if found}


def check_spills(compiled, within=0, most=136):
    """Some of the kernel's arguments are spilled where roles begin and where a tile ends.

    The last part of a tile takes most registers, with 128 rows of X for each warpgroup.

    Args:
        within: how many accesses there may be in K loops.
        most: bytes of a thread.
    """
    assert usage(compiled).spilled <= most
    code = disassemble(compiled.asm["cubin"]).splitlines()
    loops = k_loops(code)
    assert loops
    accesses = [at for at, line in enumerate(code) if re.search(r"\b(?:STL|LDL)\b", line)]
    assert sum(any(first < at < last for first, last in loops) for at in accesses) <= within


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("layout", "text"), CASES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_tiles_compile(layout, text, dtype):
    config = Config.of(text)
    problem = problem_of(3000, 1024, 4096, layout=layout, dtype=dtype, bias=True, device=device_named("H200"))
    problem = problem if schedules.of(config.schedule).refusal(problem, config) is None else problem_of(
        3000, 1024, 4096, layout=layout, dtype=dtype, device=device_named("H200")
    )  # fmt: skip
    with compiling_for("sm_90"):
        binding = schedules.bind(problem, config)
        compiled = binding.compile(*arguments(problem, "meta"))
    check_spills(compiled)
    width = config.block_m if config.swap else config.block_n
    kind = "f16" if dtype == torch.float16 else "bf16"
    k = binding.constants
    widths = k["WIDTHS"]
    assert width in widths
    assert set(re.findall(r"wgmma\.mma_async\.sync\.aligned\.(\S+)", compiled.asm["ptx"])) == {
        f"m64n{each}k16.f32.{kind}.{kind}" for each in widths
    }


@pytest.mark.parametrize(("more", "text", "expected"), [
    ({"weight": "int4"}, "64x64x64-g8-w4-s8-cooperative-descriptor-swap", False),
    ({"dtype": "fp8", "scales": "row"}, "64x192x128-g8-w4-s6-cooperative-descriptor", True),
])  # fmt: skip
def test_waits_are_found_in_machine_code(more, text, expected):
    """A promoted step waits for its own products, so none stay under way."""
    problem = abstract_problem(3000, 1024, 4096, device=device_named("H200"), **more)
    with compiling_for("sm_90"):
        compiled = schedules.bind(problem, Config.of(text)).compile(*arguments(problem, "meta"))
    left = re.findall(r"WARPGROUP\.DEPBAR\.LE gsb0, (\w+)", disassemble(compiled.asm["cubin"]))
    assert sorted(each[0] for each in PENDING.findall(compiled.asm["cubin"])) == sorted(
        int(x, 16) for x in left
    )
    assert left
    assert waits_for_each(compiled) is expected


#: What `abstract_problem` takes, and a config.
KINDS = [
    ({"epilogue": "swiglu"}, "128x144x64-g8-w8-s4-pingpong-descriptor"),
    ({"epilogue": "swiglu"}, "144x256x64-g8-w8-s4-cooperative-descriptor-swap"),
    ({"epilogue": "swiglu"}, "16x64x64-g8-w4-s12-cooperative-descriptor-k2-swap"),
    ({"epilogue": "bias_gelu_tanh"}, "128x176x64-g8-w8-s4-cooperative-descriptor"),
    ({"epilogue": "bias_gelu_tanh"}, "192x192x64-g8-w12-s3-cooperative-descriptor-swap"),
    ({"epilogue": "bias_residual"}, "128x176x64-g8-w8-s4-cooperative-descriptor-k2"),
    ({"epilogue": "bias_residual"}, "160x256x64-g8-w8-s3-cooperative-descriptor-swap"),
    ({"epilogue": "bias_residual"}, "128x128x64-g8-w8-s4-pingpong-descriptor"),
    ({"epilogue": "bias_residual", "weight": "int4"}, "96x128x64-g8-w8-s5-cooperative-descriptor-swap"),
    ({"batch": (7,)}, "128x128x64-g8-w8-s6-pingpong-descriptor-swap"),
    ({"batch": (7,), "layout": "TN"}, "128x256x64-g8-w8-s4-cooperative-descriptor"),
    ({"dtype": "fp8fast", "scales": "row"}, "192x192x128-g8-w12-s4-cooperative-descriptor"),
    ({"dtype": "fp8", "scales": "row"}, "176x128x128-g8-w8-s4-cooperative-descriptor-k2-swap"),
    ({"dtype": "fp8", "scales": "row"}, "192x128x128-g8-w12-s5-cooperative-descriptor"),
    ({"dtype": "fp8", "scales": "row"}, "64x192x128-g8-w4-s6-cooperative-descriptor-k2"),
    ({"dtype": "fp8", "scales": "block"}, "128x160x128-g8-w8-s5-cooperative-descriptor-k2"),
    ({"dtype": "fp8", "scales": "block"}, "128x192x128-g8-w8-s4-cooperative-descriptor"),
    ({"dtype": "fp8", "scales": "block"}, "128x256x128-g8-w8-s4-cooperative-descriptor"),
    ({"dtype": "fp8", "scales": "block"}, "192x128x128-g8-w12-s5-cooperative-descriptor"),
    ({"dtype": "fp8", "scales": "block"}, "64x176x128-g8-w4-s6-cooperative-descriptor"),
]


@pytest.mark.sampled(7)
@pytest.mark.parametrize("format", ["int4", "int8", "nvfp4", "nf4", "e4m3"])
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("text", [
    "64x64x64-g8-w4-s8-cooperative-descriptor-k2-swap", "256x64x64-g8-w4-s5-cooperative-descriptor-swap",
    "64x128x64-g8-w8-s6-cooperative-descriptor-swap", "144x128x64-g8-w8-s4-cooperative-descriptor-swap",
    "224x128x64-g8-w8-s4-cooperative-descriptor-swap", "64x192x64-g8-w12-s5-cooperative-descriptor-swap",
    "112x192x64-g8-w12-s5-cooperative-descriptor-swap", "192x192x64-g8-w12-s4-cooperative-descriptor-swap",
    "128x256x64-g8-w8-s4-cooperative-descriptor-swap", "128x128x64-g8-w8-s6-pingpong-descriptor-swap",
])  # fmt: skip
def test_products_with_packed_weights_do_not_wait_for_each_other(text, format, dtype):
    check_packed(text, format, dtype)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("format", ["int4", "nf4"])
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("text", [
    "64x64x128-g8-w4-s8-cooperative-descriptor-k2-swap", "128x64x128-g8-w4-s5-cooperative-descriptor-swap",
    "96x128x128-g8-w8-s5-cooperative-descriptor-swap", "64x192x128-g8-w12-s5-cooperative-descriptor-swap",
    "112x192x128-g8-w12-s4-cooperative-descriptor-swap", "80x256x128-g8-w8-s4-cooperative-descriptor-swap",
    "96x128x128-g8-w8-s5-pingpong-descriptor-swap",
])  # fmt: skip
def test_long_steps_of_packed_weights_do_not_wait_for_each_other(text, format, dtype):
    check_packed(text, format, dtype)


def check_packed(text, format, dtype):
    problem = abstract_problem(3000, 1024, 4096, device=device_named("H200"), weight=format, dtype=dtype)
    with compiling_for("sm_90"):
        binding = schedules.bind(problem, Config.of(text))
        compiled = binding.compile(*arguments(problem, "meta"))
    # With Triton 3.9, of three warpgroups.
    check_spills(compiled, within=4 if Config.of(text).num_warps == 12 else 0)
    # The assembler has a wait for all products behind each one where it finds no registers for several.
    code = disassemble(compiled.asm["cubin"])
    groups, widths = Config.of(text).num_warps // 4, len(binding.constants["WIDTHS"])
    assert not waits_for_each(compiled)
    # One that is alone has two turns of two pieces, the others four of one.
    others, least = (1, 3) if groups == 1 else (3, 6)
    assert code.count(f"WARPGROUP.DEPBAR.LE gsb0, {others:#x}") >= least * groups * widths


#: Products of `lab.fused_targets.FUSED`, and configs of one, two and three warpgroups, with 64 and 128 rows each. In a
#: sample are kernels for few widths, which compile in seconds.
SPARSE = [
    ("sparse", "bf16", "16x64x64-g8-w4-s12-cooperative-descriptor-k2-swap"),
    ("sparse", "bf16", "64x64x64-g8-w4-s12-cooperative-descriptor-swap"),
    ("sparse", "bf16", "16x64x128-g8-w4-s12-cooperative-descriptor-swap"),
    ("sparse", "fp16", "16x96x128-g8-w8-s8-cooperative-descriptor-k2-swap"),
    ("sparse", "fp16", "176x256x64-g8-w8-s5-cooperative-descriptor-k2-swap"),
    ("sparse", "bf16", "192x192x64-g8-w12-s5-cooperative-descriptor-k2-swap"),
    ("sparse_e4m3", "bf16", "16x128x64-g8-w8-s12-cooperative-descriptor-k2-swap"),
    ("sparse_e4m3", "fp16", "64x64x64-g8-w4-s12-cooperative-descriptor-swap"),
    ("sparse_int8", "bf16", "64x192x64-g8-w12-s8-cooperative-descriptor-swap"),
    ("sparse_e4m3", "bf16", "16x64x128-g8-w4-s12-cooperative-descriptor-swap"),
    ("sparse_int8", "fp16", "32x128x128-g8-w8-s8-cooperative-descriptor-k2-swap"),
    ("sparse_gelu", "bf16", "16x128x64-g8-w8-s12-cooperative-descriptor-swap"),
    ("sparse_gelu", "bf16", "128x256x64-g8-w8-s5-cooperative-descriptor-swap"),
    ("sparse_gelu", "bf16", "256x128x64-g8-w8-s4-cooperative-descriptor-swap"),
    ("sparse_gelu", "bf16", "96x192x64-g8-w12-s7-cooperative-descriptor-swap"),
    ("sparse_swiglu", "bf16", "32x128x64-g8-w8-s12-cooperative-descriptor-swap"),
    ("sparse_swiglu", "bf16", "64x64x64-g8-w4-s12-cooperative-descriptor-k2-swap"),
    ("sparse_swiglu", "bf16", "176x256x64-g8-w8-s5-cooperative-descriptor-swap"),
    ("sparse_swiglu", "bf16", "128x192x64-g8-w12-s6-cooperative-descriptor-swap"),
]


#: Types of x, with the instructions in machine code for a sparse weight, before and behind their width.
SPARSE_PRODUCTS = {
    "bf16": ("HGMMA.SP.64x", "x32.F32.BF16"),
    "fp16": ("HGMMA.SP.64x", "x32.F32"),
    "e4m3": ("QGMMA.SP.64x", "x64.F32.E4M3.E4M3"),
    "e5m2": ("QGMMA.SP.64x", "x64.F32.E4M3.E5M2"),
}


def check_sparse(problem, tensors, config, dtype):
    """A product with a sparse weight has instructions for one, which do not wait for each other, and fits.

    Returns the kernel.
    """
    with compiling_for("sm_90"):
        binding = schedules.bind(problem, config)
        compiled = binding.compile(*tensors)
    check_spills(compiled, most=4 * AnyWidthBinding.harmless_spills)
    assert not waits_for_each(compiled)
    code = disassemble(compiled.asm["cubin"])
    widths, tile = binding.constants["WIDTHS"], binding.tile
    assert tile.y in widths
    product, kind = SPARSE_PRODUCTS[dtype]
    assert set(re.findall(r"[HQ]GMMA\.\S+", code)) == {f"{product}{y}{kind}" for y in widths}
    # Within a round, steps wait for the one before; see `any_width_sparse`.
    for y in widths:
        products = code.count(f"{product}{y}x")
        # Of the first step, of those that fill no round, and of a round, two for each 64 rows, or four in a long step.
        each = 4 if dtype in ("bf16", "fp16") and config.block_k == 128 else 2
        assert products == each * tile.own // 64 * (1 + TOGETHER) * tile.groups
    waits = len(re.findall(r"WARPGROUP\.DEPBAR\.LE gsb0, 0x1\b", code))
    assert waits == (TOGETHER - 1) * len(widths) * tile.groups
    ring = tile.slots * tile.part * ROW
    assert ring < usage(compiled).shared <= ring + BARRIERS
    return compiled


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("name", "dtype", "text"), SPARSE)
def test_products_with_sparse_weights_do_not_wait_for_each_other(name, dtype, text):
    check_sparse(*abstract_product(name, dtype, 4096, 4096, device_named("H200")), Config.of(text), dtype)


#: The same of fp8, and whether sums are fast; of large tiles, which compile for many widths, in `make test-all` alone.
SPARSE_FP8 = [
    ("sparse_fp8", "e4m3", True, "16x64x128-g8-w4-s12-cooperative-descriptor-swap"),
    ("sparse_fp8", "e4m3", False, "16x64x128-g8-w4-s12-cooperative-descriptor-k2-swap"),
    ("sparse_fp8", "e5m2", False, "32x128x128-g8-w8-s8-cooperative-descriptor-swap"),
    ("sparse_fp8_swiglu", "e4m3", False, "32x64x128-g8-w4-s8-cooperative-descriptor-swap"),
    *[
        pytest.param(*large, marks=pytest.mark.exhaustive)
        for large in (
            ("sparse_fp8", "e4m3", True, "160x192x128-g8-w12-s5-cooperative-descriptor-swap"),
            ("sparse_fp8", "e4m3", False, "176x128x128-g8-w8-s6-cooperative-descriptor-swap"),
            ("sparse_fp8_swiglu", "e4m3", True, "128x192x128-g8-w12-s6-cooperative-descriptor-swap"),
        )
    ],
]


@pytest.mark.parametrize(("name", "dtype", "fast", "text"), SPARSE_FP8)
def test_sparse_weights_of_fp8_are_promoted_by_rounds(name, dtype, fast, text):
    problem, tensors = abstract_product(name, dtype, 4096, 4096, device_named("H200"))
    compiled = check_sparse(replace(problem, fast_accum=fast), tensors, Config.of(text), dtype)
    products = re.findall(
        r"wgmma\.mma_async\.sp\.sync\.aligned\.m64n\d+k64\.f32\.e4m3\.(\S+) .*?, 0, ([01]), 1, 1;",
        compiled.asm["ptx"],
    )
    assert {of_x for of_x, _ in products} == {dtype}
    # A round that is promoted begins with a product that is added to nothing; so does a step outside of a round.
    begun = sum(adds == "0" for _, adds in products)
    assert begun * (1 + TOGETHER) == (0 if fast else len(products))


@pytest.mark.exhaustive
def test_sparse_weights_times_turned_rows_compile():
    x = torch.empty(4096, 4096, dtype=torch.bfloat16, device="meta").t()
    weight = abstract_sparse("", 4096, 4096, torch.bfloat16)
    problem = linear_problem(x, weight, device_named("H200"))
    config = Config.of("128x128x64-g8-w8-s7-cooperative-descriptor-swap")
    assert schedules.bind(problem, config).forms == ("sparse", "turned")
    check_sparse(problem, arguments(problem, "meta"), config, "bf16")


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("kind", "text"), KINDS, ids=str)
def test_other_kinds_compile(kind, text):
    config = Config.of(text)
    problem = abstract_problem(3000, 1024, 4096, device=device_named("H200"), **kind)
    with compiling_for("sm_90"):
        compiled = schedules.bind(problem, config).compile(*arguments(problem, "meta"))
    check_spills(compiled)


ONE_ROW = ["64x64x64-g0-w4-s12-cooperative-descriptor-swap", "128x176x64-g8-w8-s4-cooperative-descriptor"]


def masked(acc, mask):
    return torch.where(mask, acc, 0.0)


@pytest.mark.parametrize("text", ONE_ROW)
def test_vectors_of_any_type_are_prefetched(text):
    """One for the rows of X or of Y, with elements of one byte, too."""
    x, weight = torch.empty(256, 1024, dtype=torch.bfloat16), torch.empty(512, 1024, dtype=torch.bfloat16)
    mask = torch.empty(512, dtype=torch.bool)
    problem = linear_problem(
        x.to("meta"), weight.to("meta"), device_named("H200"), epilogue=masked, args=(mask.to("meta"),)
    )
    with compiling_for("sm_90"):
        compiled = schedules.bind(problem, Config.of(text)).compile(*arguments(problem, "meta"))
    assert compiled.asm["ptx"].count("prefetch.global.L2") == 1


@pytest.mark.parametrize("text", ONE_ROW)
def test_one_row_for_many_products_compiles(text):
    x, weight, row = (
        torch.empty(*size, dtype=torch.bfloat16, device="meta")
        for size in ((64, 1, 4096), (4096, 4096), (1, 4096))
    )
    problem = linear_problem(x, weight, device_named("H200"), epilogue=torch.add, args=(row,))
    with compiling_for("sm_90"):
        compiled = schedules.bind(problem, Config.of(text)).compile(*arguments(problem, "meta"))
    check_spills(compiled, most=4 * AnyWidthBinding.harmless_spills)


def with_its_input(acc, bias):
    x = acc + bias
    return torch.nn.functional.gelu(x), x


@pytest.mark.sampled(2)
@pytest.mark.parametrize("text", [
    "128x176x64-g8-w8-s4-cooperative-descriptor", "176x128x64-g8-w8-s4-cooperative-descriptor-k2-swap",
    "112x128x64-g8-w8-s5-pingpong-descriptor-swap", "192x144x64-g8-w12-s4-cooperative-descriptor",
])  # fmt: skip
def test_second_results_compile(text):
    x, weight, bias = (
        torch.empty(*size, dtype=torch.bfloat16, device="meta")
        for size in ((3000, 4096), (1024, 4096), (1024,))
    )
    problem = linear_problem(x, weight, device_named("H200"), epilogue=with_its_input, args=(bias,))
    with compiling_for("sm_90"):
        compiled = schedules.bind(problem, Config.of(text)).compile(*arguments(problem, "meta"))
    check_spills(compiled, most=4 * AnyWidthBinding.harmless_spills)
    # Two results, by one tensor map each.
    maps = set(
        re.findall(
            r"mov\.b64 map, (gemm_any_width_param_\d+);(?:[^;@]*;)*\s*@own cp\.async\.bulk\.tensor\.2d\.global",
            compiled.asm["ptx"],
        )
    )
    assert len(maps) == 2


#: Sizes, what else `abstract_problem` takes, and configs of clusters: narrow and square tiles, two and three
#: warpgroups, 64 and 128 rows each, a cluster of fewer programs than the config asks for, and other operands.
CLUSTERS = [
    ((16, 1536, 4096), {"bias": True}, "16x64x64-g0-w4-s12-cluster-descriptor-k4-swap"),
    ((200, 520, 4096), {"bias": True}, "64x64x64-g0-w4-s11-cluster-descriptor-k2"),
    ((60, 1536, 4096), {"epilogue": "bias_gelu_tanh"}, "64x128x64-g0-w8-s6-cluster-descriptor-k3-swap"),
    ((60, 1536, 4096), {"layout": "NN"}, "64x192x64-g0-w12-s3-cluster-descriptor-k4-swap"),
    ((200, 520, 4096), {}, "128x72x64-g0-w8-s5-cluster-descriptor-k6"),
    ((200, 520, 520), {}, "64x128x64-g0-w4-s4-cluster-descriptor-k6-swap"),
    ((60, 1536, 4096), {"weight": "int4"}, "64x128x64-g0-w8-s5-cluster-descriptor-k2-swap"),
    ((60, 1536, 4096), {"weight": "int4"}, "64x128x128-g0-w8-s4-cluster-descriptor-k2-swap"),
    ((30, 1536, 4096), {"weight": "2:4"}, "32x128x64-g0-w8-s10-cluster-descriptor-k2-swap"),
    ((16, 1536, 4096), {"weight": "2:4", "dtype": "fp16"}, "16x64x64-g0-w4-s12-cluster-descriptor-k4-swap"),
    (
        (16, 1536, 4096),
        {"dtype": "fp8fast", "scales": "row"},
        "16x64x128-g0-w4-s12-cluster-descriptor-k4-swap",
    ),
]


@pytest.mark.parametrize(("sizes", "more", "text"), CLUSTERS, ids=str)
def test_clusters_compile(sizes, more, text):
    config = Config.of(text)
    problem = abstract_problem(*sizes, device=device_named("H200"), **more)
    with compiling_for("sm_90"):
        binding = schedules.bind(problem, config)
        compiled = binding.compile(*arguments(problem, "meta"))
    check_spills(compiled)
    tile, ptx = binding.tile, compiled.asm["ptx"]
    # A cluster has one tile, and its kernel one width.
    assert set(re.findall(r"wgmma\.mma_async\S*\.m64n(\d+)k", ptx)) == {str(tile.y)}
    if "weight" in more:
        assert not waits_for_each(compiled)
    # All threads arrive once: those of each warpgroup, which wait, and loading ones. None waits for earlier stores.
    assert re.findall(r"barrier\.cluster\.arrive\S*", ptx) == ["barrier.cluster.arrive.relaxed.aligned;"] * (
        1 + tile.groups
    )
    assert (
        ptx.count("barrier.cluster.wait") == ptx.count("barrier.cluster.wait.acquire.aligned;") == tile.groups
    )
    # Each warpgroup has its code, which sends two blocks of 8 columns for each part of 64 rows.
    parts = -(-tile.y // tile.part)
    assert len(re.findall(r"\bst\.async\S*", ptx)) == tile.groups * tile.own // 64 * parts * 2
    ring = tile.slots * tile.part * ROW
    assert ring < usage(compiled).shared <= ring + BARRIERS
    # It is compiled without clusters, and a launch says how many programs one has.
    assert compiled.packed_metadata[1] == 1
    # Loading warps are four, so that only whole warpgroups arrive.
    assert usage(compiled).warps == 4 * (1 + tile.groups)


def test_other_kernels_have_no_clusters():
    problem = problem_of(3000, 1024, 4096, device=device_named("H200"))
    with compiling_for("sm_90"):
        binding = schedules.bind(problem, Config.of("64x64x64-g8-w4-s8-cooperative-descriptor"))
        compiled = binding.compile(*arguments(problem, "meta"))
    assert not re.search(r"barrier\.cluster|st\.async|mapa", compiled.asm["ptx"])
