"""The code that Triton makes of a posed product, without a GPU, in a process of its own."""

import os
import subprocess
import sys

_SCRIPT = """
from gemmery.lab import targets
targets.use_target("sm_90")
from gemmery.devices import TABLE
from gemmery.lab.fused_targets import pose
from gemmery.schedules import bind
from gemmery.problem import Config
from gemmery.lab.inspection.sass import disassemble
problem, tensors = pose("%s", "%s", %d, 4096, TABLE["NVIDIA H200"])
asm = bind(problem, Config.of("%s")).compile(*tensors).asm
print(%s)
"""


def ptx(name, dtype, config, rows=4096):
    """A config's kernel for sm_90; `name` is of `lab.fused_targets.FUSED`."""
    return _text(name, dtype, rows, config, 'asm["ptx"]')


def sass(name, dtype, config, rows=4096):
    """The same as the GPU's own instructions."""
    return _text(name, dtype, rows, config, 'disassemble(asm["cubin"])')


def _text(*asked):
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    # What warns when a kernel is compiled warns users.
    environment |= {"TRITON_DEFAULT_FP_FUSION": "1"}
    command = [sys.executable, "-W", "error::UserWarning", "-c", _SCRIPT % asked]
    run = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert run.returncode == 0, run.stderr
    return run.stdout
