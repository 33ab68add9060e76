"""Tiles of any width compile for sm_90 without spills in their loops, with instructions of their width, and the ring where it has to be."""

import re

import pytest
import torch

from gemmery import Config, schedules
from gemmery.lab.abstract import abstract_problem
from gemmery.lab.inspection.resources import usage
from gemmery.lab.inspection.sass import disassemble
from gemmery.launch.cross_compile import compiling_for
from gemmery.schedules.any_width import COOPERATIVE
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
    ("NT", "16x64x64-g8-w4-s12-cooperative-descriptor-swap"),
]


def check_spills(compiled):
    """A few of the kernel's arguments are spilled where roles begin and where a tile ends, and nothing in a K loop."""
    assert usage(compiled).spilled <= 24
    code = [line for line in disassemble(compiled.asm["cubin"]).splitlines() if ";" in line]
    products, spills = (
        [at for at, line in enumerate(code) if re.search(rf"\b(?:{names})\b", line)]
        for names in ("[HQ]GMMA", "STL|LDL")
    )
    assert products
    # No instruction of a loop is farther than this from one of its products.
    assert all(abs(product - spill) > 40 for product in products for spill in spills)


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
    widths = range(k["LEAST"], k["MOST"] + 1, k["EACH"])
    assert width in widths
    assert set(re.findall(r"wgmma\.mma_async\.sync\.aligned\.(\S+)", compiled.asm["ptx"])) == {
        f"m64n{each}k16.f32.{kind}.{kind}" for each in widths
    }


#: What `abstract_problem` takes, and a config.
KINDS = [
    ({"epilogue": "swiglu"}, "128x144x64-g8-w8-s4-pingpong-descriptor"),
    ({"epilogue": "swiglu"}, "144x256x64-g8-w8-s4-cooperative-descriptor-swap"),
    ({"epilogue": "swiglu"}, "16x64x64-g8-w4-s12-cooperative-descriptor-k2-swap"),
    ({"dtype": "fp8fast", "scales": "row"}, "192x192x128-g8-w12-s4-cooperative-descriptor"),
    ({"dtype": "fp8", "scales": "row"}, "176x128x128-g8-w8-s4-cooperative-descriptor-k2-swap"),
    ({"dtype": "fp8", "scales": "row"}, "192x128x128-g8-w12-s5-cooperative-descriptor"),
    ({"dtype": "fp8", "scales": "row"}, "64x192x128-g8-w4-s6-cooperative-descriptor-k2"),
    ({"dtype": "fp8", "scales": "block"}, "192x96x128-g8-w12-s5-cooperative-descriptor"),
    ({"dtype": "fp8", "scales": "block"}, "64x176x128-g8-w4-s6-cooperative-descriptor"),
]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("format", ["int4", "int8", "nvfp4", "nf4", "e4m3"])
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("text", [
    "64x64x64-g8-w4-s8-cooperative-descriptor-k2-swap", "256x64x64-g8-w4-s5-cooperative-descriptor-swap",
    "224x128x64-g8-w8-s4-cooperative-descriptor-swap", "192x192x64-g8-w12-s4-cooperative-descriptor-swap",
    "128x256x64-g8-w8-s4-cooperative-descriptor-swap", "128x128x64-g8-w8-s6-pingpong-descriptor-swap",
])  # fmt: skip
def test_products_with_packed_weights_do_not_wait_for_each_other(text, format, dtype):
    problem = abstract_problem(3000, 1024, 4096, device=device_named("H200"), weight=format, dtype=dtype)
    with compiling_for("sm_90"):
        compiled = schedules.bind(problem, Config.of(text)).compile(*arguments(problem, "meta"))
    check_spills(compiled)
    # The assembler has a wait for all products behind each one where it finds no registers for several.
    code = disassemble(compiled.asm["cubin"])
    assert code.count("WARPGROUP.DEPBAR.LE gsb0, 0x3") >= 6 * Config.of(text).num_warps // 4


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("kind", "text"), KINDS, ids=str)
def test_other_kinds_compile(kind, text):
    config = Config.of(text)
    problem = abstract_problem(3000, 1024, 4096, device=device_named("H200"), **kind)
    with compiling_for("sm_90"):
        compiled = schedules.bind(problem, config).compile(*arguments(problem, "meta"))
    check_spills(compiled)
