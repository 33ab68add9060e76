"""The kernels of quantising compile for a sample of targets, keep to their registers, and move 16 bytes a thread at a time."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

CHILD = Path(__file__).with_name("quantize_child.py")
#: One for each of the compiler's back ends.
SAMPLE = ("sm_80", "sm_90", "gfx942")


@pytest.mark.parametrize("target", [pytest.param(x, marks=pytest.mark.slow) for x in SAMPLE])
def test_target(target):
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    run = subprocess.run(
        [sys.executable, str(CHILD), target], capture_output=True, text=True, env=environment
    )
    assert run.returncode == 0, run.stderr
    report = json.loads(run.stdout)
    assert len(report) >= 15
    for made in report:
        assert made["spilled"] == 0, made
        assert made["exact"], made
        if target.startswith("sm_"):
            assert "ld.global.v4.b32" in made["moves"], made
            assert made["kernel"].startswith("largest") or "st.global.v4.b32" in made["moves"], made
