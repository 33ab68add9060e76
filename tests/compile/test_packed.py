"""The code for packed weights on Hopper: unpacked in registers, and only when no product reads these any more."""

import re

import pytest

from gemmery.schedules.specialized import SPECIALIZED
from tests.compile.compiling import ptx, sass


def loop(name, config):
    """The PTX of the loop along K."""
    text = ptx(name, "bf16", config)
    bodies = re.findall(r"^(\$L__BB\d+_\d+):.*?\n(.*?bra \t\1;)", text, re.DOTALL | re.MULTILINE)
    (body,) = [text for _, text in bodies if "wgmma.mma_async" in text]
    return body


@pytest.mark.parametrize(
    ("name", "config", "word"),
    [
        ("int4_gelu", "256x128x64-g1-w8-s3-tile-descriptor-swap", "0x000F000F"),
        ("nf4", "64x64x256-g1-w4-s3-tile-descriptor-swap", "prmt.b32"),
        ("e4m3_packed", "256x64x64-g2-w4-s3-tile-descriptor-swap", "e4m3x2"),
        ("nvfp4", "64x64x128-g1-w4-s4-tile-descriptor-swap", "0x81C081C0"),
    ],
)
def test_what_is_unpacked_comes_after_a_wait(name, config, word):
    body = loop(name, config)
    before, products = body.split("wgmma.mma_async", 1)
    waits = [int(n) for n in re.findall(r"wgmma\.wait_group\.sync\.aligned (\d+)", before)]
    # Ever fewer products may go on, and none when the last part is written.
    assert waits
    assert waits == sorted(waits, reverse=True)
    assert waits[-1] == 0
    # Each decoder begins with its wait, and all of them come before the step's products.
    unpacked = re.split(r"wgmma\.wait_group\.sync\.aligned \d+;", before)
    assert word not in unpacked[0]
    assert all(word in part for part in unpacked[1:])
    assert word not in products
    # Nothing goes through shared memory on its way, but for the words and what groups share.
    assert "st.shared" not in body


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("name", "dtype", "config", "sums"),
    [
        ("int4_gelu", "bf16", "128x64x128-g2-w4-s3-tile-descriptor-swap", 64),
        ("int4_swiglu", "bf16", "64x64x128-g1-w4-s4-tile-descriptor-k2-swap", 32),
        # Two groups of warps.
        ("nvfp4", "bf16", "64x128x256-g1-w8-s3-specialized-descriptor-swap", 2 * 32),
        ("nvfp4", "fp16", "128x64x128-g2-w4-s3-tile-descriptor-swap", 0),
        ("e4m3_packed", "bf16", "128x64x128-g1-w4-s4-tile-descriptor-swap", 0),
        ("nf4", "bf16", "64x64x256-g1-w4-s3-tile-descriptor-swap", 0),
    ],
)
def test_what_decoders_leave_to_the_sum_is_made_up_for_once(name, dtype, config, sums):
    """A multiplication by 2^40 for each of a thread's sums, of the codes whose numbers are too small by that."""
    if "specialized" in config and not SPECIALIZED.available():
        pytest.skip("specialised warps need another Triton")
    text = ptx(name, dtype, config)
    factor = "0f53800000"
    assert len(re.findall(rf"(?:mul|fma)\.[a-z.]*f32[^;]*{factor}", text)) == text.count(factor) == sums


@pytest.mark.parametrize(
    "config", ["16x128x256-g1-w4-s3-tile-descriptor-swap", "64x128x256-g1-w8-s3-specialized-descriptor-swap"]
)
def test_the_table_of_nf4_stays_in_registers(config):
    """The assembler moves nothing there for each look-up, of which there are twice as many as numbers."""
    if "specialized" in config and not SPECIALIZED.available():
        pytest.skip("specialised warps need another Triton")
    text = sass("nf4", "bf16", config, 16)
    found = len(re.findall(r"\sPRMT ", text))
    moves = len(re.findall(r"\s(?:IMAD\.MOV(?:\.U32)?|IMAD\.U32|MOV) ", text))
    assert found > 350
    assert moves < found / 4
