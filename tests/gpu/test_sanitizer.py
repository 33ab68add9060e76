"""compute-sanitizer's memcheck finds nothing in a small run of every kernel."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.gpu

SCRIPT = Path(__file__).with_name("sanitize.py")
SANITIZER = shutil.which(
    "compute-sanitizer", path=os.pathsep.join((os.environ.get("PATH", ""), "/usr/local/cuda/bin"))
)


def sanitize(*command):
    run = subprocess.run(
        [*command, sys.executable, SCRIPT],
        capture_output=True,
        text=True,
        timeout=300,
        env=os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},
    )
    text = run.stdout + run.stderr
    assert run.returncode == 0, text[-4000:]
    assert re.search(r"\d+ kernels ran", text), text[-4000:]
    return text


def test_the_run_itself_succeeds():
    sanitize()


@pytest.mark.skipif(SANITIZER is None, reason="there is no compute-sanitizer on this machine")
def test_memcheck():
    # A config that the driver refuses is passed over; the call that asked for it is no error of a kernel's.
    text = sanitize(
        SANITIZER, "--tool", "memcheck", "--error-exitcode", "1", "--target-processes", "application-only",
        "--report-api-errors", "no",
    )  # fmt: skip
    assert "ERROR SUMMARY: 0 errors" in text, text[-4000:]
