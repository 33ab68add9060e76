"""The kernel that unpacks a weight compiles for every target, keeps to its registers, and stores 16 bytes a thread."""

import re

import pytest
import torch

import gemmery
from gemmery.lab.inspection.resources import usage
from gemmery.lab.targets import TARGETS
from gemmery.launch.unpacking import unpacking
from gemmery.operands import PackedOperand
from tests.compile.compiling import device_of, strictly_for, waits_first

CASES = {
    "int4": {"group_size": 128}, "int8": {}, "nf4": {"group_size": 64}, "nvfp4": {}, "e4m3": {},
}  # fmt: skip


def check(target, format):
    weight = gemmery.quantize(torch.randn(64, 256), format, **CASES[format])
    out = torch.empty(weight.shape, dtype=weight.dtype)
    with strictly_for(target):
        compiled = unpacking(weight, device_of(target)).compile([*PackedOperand(weight).tensors, out])
    assert usage(compiled).spilled == 0
    assert waits_first(compiled)
    if target.startswith("sm_"):
        assert "st.global.v4.b32" in set(re.findall(r"\bst\.global\S*", compiled.asm["ptx"]))


@pytest.mark.parametrize("format", ["int4", "nf4"])
def test_formats_of_adapters(format):
    check("sm_90", format)


@pytest.mark.sampled(3)
@pytest.mark.slow
@pytest.mark.parametrize("format", CASES)
@pytest.mark.parametrize("target", TARGETS)
def test_a_format_of_every_target(target, format):
    check(target, format)
