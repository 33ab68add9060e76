"""Compiles the kernels of quantising for a target in a process of its own, and prints what came out as JSON."""

import json
import re
import sys

import torch

from gemmery.devices import ARCHS
from gemmery.formats import activations
from gemmery.kernels import quantize
from gemmery.lab import targets
from gemmery.lab.inspection.resources import usage

#: Rows and columns of x: rows that share a program, a row for each, and one that no program holds.
SHAPES = ((4096, 128), (4096, 5120), (64, 65536))


def kernels(x, format):
    """The kernels of an input, compiled, by name."""
    data = torch.empty(x.shape, dtype=activations.FORMATS[format][0], device="meta")
    scale = torch.empty(1, device="meta")
    how = activations._format(format)
    exponent = activations._EXPONENTS.get(format)
    lines = [("token", x.shape[-1], None), ("block", activations.BLOCK, None)]
    lines += [("mx", activations.MX_BLOCK, exponent)] if exponent else []
    for name, span, power in lines:
        walk = activations._walk(x, span)
        constants = {"WHOLE": walk.constants["COLS"] >= span, "EXPONENT": power, **how, **walk.constants}
        scales = scale if power is None else torch.empty(1, dtype=torch.uint8, device="meta")
        arguments = (x, data, scales, *walk.arguments)
        yield name, quantize.quantize_lines.warmup(*arguments, **constants, grid=(1,))
    walk = activations._walk(x, None)
    arguments = (x, scale, walk.blocks, *walk.arguments)
    yield "largest", quantize.largest_magnitudes.warmup(*arguments, **walk.constants, grid=(1,))
    for name, found in (("tensor", 512), ("known", 0)):
        arguments = (x, data, scale, scale, 512, *walk.arguments)
        yield (
            name,
            quantize.quantize_known.warmup(*arguments, FOUND=found, **how, **walk.constants, grid=(1,)),
        )


def main():
    target = sys.argv[1]
    targets.use_target(target)
    report = []
    for format, (dtype, _) in activations.FORMATS.items():
        if dtype.itemsize == 1 and dtype.is_floating_point and dtype not in ARCHS[target].fp8:
            continue
        for shape in SHAPES:
            for name, compiled in kernels(torch.empty(shape, dtype=torch.bfloat16, device="meta"), format):
                spilled = usage(compiled).spilled
                text = compiled.asm.get("ptx", "")
                moves = sorted(set(re.findall(r"\b(?:ld|st)\.global\S*", text)))
                report.append(
                    {
                        "kernel": f"{name} {format} {shape}",
                        "spilled": spilled,
                        "moves": moves,
                        "exact": "div.full" not in text,
                    }
                )
    print(json.dumps(report))


if __name__ == "__main__":
    main()
