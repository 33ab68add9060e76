"""Composing a kernel of functions costs nothing: the compiler makes of it what it makes of one long function."""

import json
import os
import subprocess
import sys
from pathlib import Path


def compiled(*arguments):
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    command = [sys.executable, Path(__file__).with_name("child.py"), *arguments]
    run = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)


def test_composed_kernel_is_as_good_as_a_plain_one():
    composed, plain = compiled("gemm", "NT"), compiled("plain")
    # Tensor-core instructions, copies to shared memory, stores and barriers.
    assert composed["counts"] == plain["counts"]
    assert composed["counts"]["wgmma.mma_async"] > 0
    assert abs(composed["registers"] - plain["registers"]) <= 8
    assert composed["shared"] == plain["shared"]
    assert composed["spilled"] == plain["spilled"] == 0
