"""Packed weights with K shared by warps: every kernel that may be chosen compiles, without spills."""

import re

import pytest
import torch

import gemmery
from gemmery.devices import TABLE
from gemmery.kernels.any_width_packed import StageFormat
from gemmery.lab.abstract import linear_problem
from gemmery.lab.inspection.sass import disassemble
from gemmery.operands.packed import PackedOperand
from gemmery.problem import Config
from gemmery.schedules import bind
from gemmery.schedules.base import Forms
from gemmery.schedules.sliced_k import SLICED_K
from gemmery.select.space import tiles_of

from .compiling import strictly_for

pytestmark = pytest.mark.skipif(not SLICED_K.available(), reason="sliced_k needs another Triton")

H200 = TABLE["NVIDIA H200"]
INT4 = Forms(False, False, False, StageFormat("int", 4, 128, "", 8))
#: A tile for each compiled kernel, cut along K and not.
TILES = {
    (SLICED_K.code(each.config, INT4), cut): f"{str(each.config).removesuffix('-swap')}{cut}-swap"
    for each in tiles_of("hopper", "packed4")
    if each.config.schedule == "sliced_k"
    for cut in ("", "-k2")
}


def compiled(text, dtype, name="int4", **more):
    weight = gemmery.quantize(torch.zeros(512, 2048), name, dtype=dtype, **more).to("meta")
    x, out = (torch.empty(8, n, dtype=dtype, device="meta") for n in (2048, 512))
    problem = linear_problem(x, weight, H200)
    with strictly_for("sm_90"):
        return bind(problem, Config.of(text)).compile((x, *PackedOperand(weight).launched, out), (1, 1))


@pytest.mark.sampled(8)
@pytest.mark.parametrize("text", TILES.values())
def test_no_number_spills(text):
    sass = disassemble(compiled(text, torch.bfloat16).asm["cubin"])
    assert "HMMA.16816" in sass
    assert "UBLKCP" in sass
    assert not re.findall(r"\b(?:STL|LDL)\b.*", sass)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("more", [
    {"group_size": 16}, {"group_size": 32, "symmetric": False}, {"group_size": 64}, {"group_size": 1024},
    {"name": "mxfp4"}, {"name": "nf4"},
], ids=str)  # fmt: skip
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_formats(more, dtype):
    text = "8x32x128-g1-w8-s3-sliced_k-pointer-k2-swap"
    assert "mma.sync.aligned.m16n8k16" in compiled(text, dtype, **more).asm["ptx"]
