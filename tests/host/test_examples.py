"""The examples in docstrings run and print what they say."""

import ast
import doctest
import importlib
import re
import textwrap
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

MODULES = (
    "api", "epilogues.function", "epilogues.library", "activations", "formats.scaled", "invariant",
    "nn.activations", "nn.linear", "nn.mlp", "nn.swap", "launch.explain", "launch.occupancy", "scaled", "tuning.tuner", "tuning.warm",
    *(f"formats.{name}" for name in ("codes", "files", "kept", "packing", "quantize", "sparse", "tensor", "weight")),
    *(f"formats.checkpoints.{name}" for name in (
        "assemble", "bitsandbytes", "compressed_tensors", "fp8", "gptq", "microscaling", "read", "sparse", "torchao", "words",
    )),
    "distributed.state", "distributed.styles", "distributed.weights",
    *(f"nn.{name}" for name in ("foreign", "quantized", "quantizing", "replacing", "sparse", "sparsifying")),
)  # fmt: skip
MODULES += tuple(
    [f"formats.{x}" for x in ("codes", "files", "packing", "quantize", "sparse", "tensor", "weight")]
)
MODULES += tuple(
    [f"nn.{x}" for x in ("foreign", "quantized", "quantizing", "replacing", "sparse", "sparsifying")]
)
MODULES += tuple([f"formats.checkpoints.{x}" for x in (
    "assemble", "bitsandbytes", "compressed_tensors", "fp8", "gptq", "microscaling", "read", "sparse", "torchao", "words",
)])  # fmt: skip
TUTORIALS = Path(__file__).resolve().parents[2] / "tutorials"


@pytest.mark.parametrize("name", [f"gemmery.{module}" for module in MODULES])
def test_examples(name):
    result = doctest.testmod(importlib.import_module(name))
    assert result.attempted > 0
    assert result.failed == 0


def shown_in(rung, **names):
    """The names that there are after the lines with gemmery which a rung shows."""
    text = ast.get_docstring(ast.parse((TUTORIALS / rung).read_text(encoding="utf-8")))
    (example,) = re.findall(r"^ +import gemmery\n(?: +.*\n)+", text, re.MULTILINE)
    exec(textwrap.dedent(example), names)
    return names


def test_a_rung_shows_the_same_fusion_in_gemmery():
    a, w, bias = (torch.randn(size, dtype=torch.float16) for size in ((5, 8), (6, 8), 6))
    out = shown_in("09_fused_epilogue.py", F=F, a=a, w=w, bias=bias)["out"]
    torch.testing.assert_close(out, F.gelu(F.linear(a, w, bias)), rtol=1e-2, atol=1e-2)


def test_a_rung_shows_the_same_sparse_product_in_gemmery():
    a, w = (torch.randn(size, dtype=torch.float16) for size in ((5, 8), (6, 8)))
    names = shown_in("12_sparse.py", a=a, w=w)
    assert (names["s"].dense() != 0).sum() == w.numel() // 2
    torch.testing.assert_close(names["out"], F.linear(a, names["s"].dense()), rtol=1e-2, atol=1e-2)
