"""The short way into the driver hands Triton's C function what the ordinary launch of this version hands it.

Kernels are compiled for an H200 and launched with a stand-in for its driver, in a process of their own (`direct_child`).
"""

import functools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from gemmery.schedules.specialized import SPECIALIZED

# One process launches all kernels, so one worker asks it.
pytestmark = pytest.mark.xdist_group("direct")

CHECKS = (
    "pointers", "odd", "descriptors", "batch", "persistent", "tail", "row", "matrix", "scale", "split", "fused",
    "packed", "adapted", "unpacked scales", "unpacked channel", "begin call", "wait for ranks", "hooks",
    "unknown", "newer",
)  # fmt: skip
if SPECIALIZED.available():
    CHECKS += ("specialized packed", "any width scaled", "any width adapted", "cluster")


@functools.cache
def found():
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    command = [sys.executable, Path(__file__).with_name("direct_child.py")]
    run = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout.splitlines()[-1])


@pytest.mark.parametrize("check", CHECKS)
def test_direct(check):
    assert found()[check] is None, found()[check]


def test_all_checks_are_named():
    assert set(found()) == set(CHECKS)
