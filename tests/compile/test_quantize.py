"""The kernels of quantising compile for every target, keep to their registers, and move 16 bytes a thread at a time."""

import pytest

from gemmery.lab.targets import TARGETS
from tests.compile.quantizing import SHAPES, formats, reports

#: One for each of the compiler's back ends.
BACK_ENDS = ("sm_80", "sm_90", "gfx942")


def check(target, format, shape):
    found = list(reports(target, format, shape))
    assert len(found) >= 5
    for made in found:
        assert made["spilled"] == 0, made
        assert made["waits"], made
        assert made["exact"], made
        if target.startswith("sm_"):
            assert "ld.global.v4.b32" in made["moves"], made
            assert made["kernel"].startswith("largest") or "st.global.v4.b32" in made["moves"], made


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
def test_a_format_of_every_target(target):
    check(target, next(formats(target)), SHAPES[0])


@pytest.mark.exhaustive
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(("target", "format"), [(x, format) for x in BACK_ENDS for format in formats(x)])
def test_every_format_and_shape(target, format, shape):
    check(target, format, shape)
