"""The examples in docstrings run and print what they say."""

import doctest
import importlib

import pytest

MODULES = ("api", "invariant", "nn.linear", "select.explain", "select.tuner", "select.warm")


@pytest.mark.parametrize("name", [f"gemmery.{module}" for module in MODULES])
def test_examples(name):
    result = doctest.testmod(importlib.import_module(name))
    assert result.attempted > 0
    assert result.failed == 0
