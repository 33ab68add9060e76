"""The examples in docstrings run and print what they say."""

import doctest
import importlib

import pytest


@pytest.mark.parametrize("name", ["gemmery.api", "gemmery.nn.linear"])
def test_examples(name):
    result = doctest.testmod(importlib.import_module(name))
    assert result.attempted > 0
    assert result.failed == 0
