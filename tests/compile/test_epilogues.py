"""What compilers make of epilogues' integers, comparisons and remainders, which the interpreter computes with NumPy."""

import re

import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from gemmery.epilogues.device import compiled, function
from gemmery.kernels.fused import as_type
from gemmery.product.build import make_call
from gemmery.product.epilogue import program
from gemmery.product.spec import Functions, Options

KERNEL = """
def kernel(x, o):
    i = tl.arange(0, 16)[:, None] * 16 + tl.arange(0, 16)[None, :]
    tl.store(o + i, as_type(EPILOGUE(tl.load(x + i), (), (16, 16), (), 0, 0, 0, 16, 16, False), o.dtype.element_ty))
"""
EPILOGUES = {
    "or": lambda acc: (acc > 0) + (acc > 1),
    "and": lambda acc: (acc > 0) * (acc > 1),
    "alpha": lambda acc: torch.add(acc > 0, acc > 1, alpha=2),
    "larger": lambda acc: torch.maximum(acc > 0, acc > 1),
    "smaller": lambda acc: torch.minimum(acc > 0, acc > 1),
    "bytes": lambda acc: acc.to(torch.uint8).clamp(-20, 30) + 200,
    "signed": lambda acc: ~acc.to(torch.int8) % -3 + acc.to(torch.int8) // 7 - acc.to(torch.int8) * 100,
    "remainder": lambda acc: acc % 0.1 + torch.fmod(acc, 3.5) + acc // 0.3,
    "numbers": lambda acc: torch.where((torch.full((), 2.0, device=acc.device) > 1) & (acc > 0), acc, 0),
    "rows": lambda acc: acc - acc.to(torch.int8).amax(-1, keepdim=True),
    "power": lambda acc: acc**0 + acc.sign(),
}


def texts(target):
    """The operators of Triton's code, of a kernel of each epilogue, compiled for a target."""
    for name, epilogue in EPILOGUES.items():
        for kind, dtype in (("fp32", torch.float32), ("fp64", torch.float64)):
            a, b = torch.ones(16, 8, dtype=dtype), torch.ones(8, 16, dtype=dtype)
            made = program(make_call("matmul", a, b, None, Functions(epilogue), Options()))
            space = {"EPILOGUE": function(made.source), "as_type": as_type}
            kernel = compiled(KERNEL.replace("kernel", f"kernel_{name}_{kind}"), space)
            source = ASTSource(fn=kernel, signature={"x": f"*{kind}", "o": f"*{kind}"})
            yield f"{name} {kind}", triton.compile(source, target=GPUTarget(*target)).asm["ttir"]


@pytest.mark.parametrize(
    "target",
    [["cuda", 90, 32], ["hip", "gfx942", 64], pytest.param(["cuda", 80, 32], marks=pytest.mark.exhaustive)],
    ids=lambda x: str(x[1]),
)
def test_bools_are_bools_and_integers_keep_their_width(target):
    found = dict(texts(target))
    for kind in ("fp32", "fp64"):
        for name, wanted in (
            ("or", "ori"),
            ("larger", "ori"),
            ("alpha", "ori"),
            ("and", "andi"),
            ("smaller", "andi"),
        ):
            text = found[f"{name} {kind}"]
            # Addition of bits is an exclusive or.
            assert not re.search(r"arith\.(addi|subi|muli) .*xi1>", text), name
            assert re.search(rf"arith\.{wanted} .*xi1>", text), name
        for name in ("bytes", "signed"):
            assert re.search(r"arith\.addi .*xi8>", found[f"{name} {kind}"]), name
        # By integers, since a quotient is rounded.
        assert "arith.remsi" in found[f"remainder {kind}"]
        assert "arith.remf" not in found[f"remainder {kind}"]
