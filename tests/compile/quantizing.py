"""The kernels of quantising, compiled for a target."""

import re

import torch

from gemmery import activations
from gemmery.devices import ARCHS
from gemmery.kernels import quantize
from gemmery.lab.inspection.resources import usage
from tests.compile.compiling import strictly_for, waits_first

#: Rows and columns of x: rows that share a program, a row for each, and one that no program holds.
SHAPES = ((4096, 128), (4096, 5120), (64, 65536))


def kernels(x, format, overlap):
    """The kernels of an input, compiled, by name."""
    data = torch.empty(x.shape, dtype=activations.FORMATS[format][0], device="meta")
    scale = torch.empty(1, device="meta")
    how = activations._format(format)
    exponent = activations._EXPONENTS.get(format)
    lines = [("token", x.shape[-1], None), ("block", activations.BLOCK, None)]
    lines += [("mx", activations.MX_BLOCK, exponent)] if exponent else []
    for name, span, power in lines:
        walk = activations._walk(x, span)
        constants = {
            "WHOLE": walk.constants["COLS"] >= span,
            "EXPONENT": power,
            **how,
            **walk.constants,
            **overlap,
        }
        scales = scale if power is None else torch.empty(1, dtype=torch.uint8, device="meta")
        arguments = (x, data, scales, *walk.arguments)
        yield name, quantize.quantize_lines.warmup(*arguments, **constants, grid=(1,))
    walk = activations._walk(x, None)
    arguments = (x, scale, walk.blocks, *walk.arguments)
    yield "largest", quantize.largest_magnitudes.warmup(*arguments, **walk.constants, grid=(1,), **overlap)
    for name, found in (("tensor", 512), ("known", 0)):
        arguments = (x, data, scale, scale, 512, *walk.arguments)
        yield (
            name,
            quantize.quantize_known.warmup(
                *arguments, FOUND=found, **how, **walk.constants, grid=(1,), **overlap
            ),
        )


def formats(target):
    """The formats that a target can convert numbers to."""
    for format, (dtype, _) in activations.FORMATS.items():
        if dtype.itemsize > 1 or not dtype.is_floating_point or dtype in ARCHS[target].fp8:
            yield format


def reports(target, format, shape):
    """What the kernels of a format turn out to be, for an input of this shape."""
    with strictly_for(target):
        for name, compiled in kernels(
            torch.empty(shape, dtype=torch.bfloat16, device="meta"), format, ARCHS[target].overlap
        ):
            text = compiled.asm.get("ptx", "")
            yield {
                "kernel": f"{name} {format} {shape}",
                "spilled": usage(compiled).spilled,
                "waits": waits_first(compiled),
                "moves": sorted(set(re.findall(r"\b(?:ld|st)\.global\S*", text))),
                "exact": "div.full" not in text,
            }
