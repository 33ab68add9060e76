"""Compiles kernels for GPUs that are not at hand, in the process of the test, so that none waits for an import of torch."""

import functools
import os
import re
import warnings
from contextlib import contextmanager
from unittest import mock

import torch

from gemmery.devices import TABLE
from gemmery.dtypes import DTYPE_NAMES, OUT_DTYPES
from gemmery.lab.fused_targets import abstract_product
from gemmery.lab.inspection.sass import disassemble
from gemmery.launch.cross_compile import compiling_for
from gemmery.layout import make_problem
from gemmery.problem import Config
from gemmery.schedules import bind


def device_of(target):
    """A device of the table that has this architecture."""
    return next(row for row in TABLE.values() if row.arch == target)


@contextmanager
def strictly_for(target):
    """Within, kernels are compiled for a target, and whatever the compiler warns of is an error: users would see it."""
    with (
        warnings.catch_warnings(),
        mock.patch.dict(os.environ, {"TRITON_DEFAULT_FP_FUSION": "1"}),
        compiling_for(target),
    ):
        warnings.simplefilter("error", UserWarning)
        yield


def compile_dense(target, config, dtype="bf16", *, bias=False, precision="ieee", fast_accum=False):
    """A product of a row-major and a column-major matrix of 4096 by 4096."""
    kind = next(kind for kind, name in DTYPE_NAMES.items() if name == dtype)
    a, b, out = (torch.empty(4096, 4096, dtype=x, device="meta") for x in (kind, kind, OUT_DTYPES[kind][0]))
    tensors = (a, b.t(), out, *([out.new_empty(4096)] if bias else []))
    problem = make_problem(
        *tensors[:3], tensors[3] if bias else None, scaled=False, precision=precision, fast_accum=fast_accum,
        device=device_of(target),
    )  # fmt: skip
    with strictly_for(target):
        return bind(problem, Config.of(config)).compile(tensors, (1, 1))


@functools.cache
def compile_posed(target, name, dtype, config, rows=4096):
    """A product of `lab.fused_targets.FUSED`, whose other sizes are 4096."""
    with strictly_for(target):
        problem, tensors = abstract_product(name, dtype, rows, 4096, device_of(target))
        return bind(problem, Config.of(config)).compile(*tensors)


def overlaps(compiled):
    """Whether launches of a kernel begin before earlier ones have ended."""
    return getattr(compiled.metadata, "launch_pdl", False)


def waits_first(compiled):
    """Whether a kernel whose launches overlap waits for earlier launches before it accesses memory; true for others."""
    text = compiled.asm.get("ptx", "")
    wait = text.find("griddepcontrol.wait")
    if not overlaps(compiled):
        return wait < 0
    access = re.search(
        r"\b(ld|st|atom|red)\.(global|acquire|release|relaxed)|cp\.async|prefetch\.global", text
    )
    return access is not None and 0 <= wait < access.start()


def ptx(name, dtype, config, rows=4096):
    """A config's kernel for sm_90; `name` is of `lab.fused_targets.FUSED`."""
    return compile_posed("sm_90", name, dtype, config, rows).asm["ptx"]


def sass(name, dtype, config, rows=4096):
    """The same as the GPU's own instructions."""
    return disassemble(compile_posed("sm_90", name, dtype, config, rows).asm["cubin"])
