"""gemmery.compile: what is set, and that it can be undone; that a CPU is offered nothing."""

import subprocess
import sys

import pytest
import torch

import gemmery.compile
from tests.choosing import close, compiled, mm, operands

IMPORT = """
import sys, torch
before = torch.compiler.config.cache_key_tag
import gemmery.compile
assert torch.compiler.config.cache_key_tag == before
print([name for name in ("torch._inductor.select_algorithm", "torch._dynamo") if name in sys.modules])
"""


@pytest.mark.slow
def test_the_import_changes_nothing():
    ran = subprocess.run([sys.executable, "-c", IMPORT], capture_output=True, text=True, check=True)
    assert ran.stdout.split() == ["[]"]


def _functions():
    from torch._inductor.select_algorithm import get_algorithm_selector_cache

    cache = get_algorithm_selector_cache()
    return [*cache.preprocessing_fns, *cache.feedback_saver_fns]


@torch.compiler.config.patch(cache_key_tag="mine")
def test_what_is_enabled_is_undone():
    gemmery.compile.enable()
    before = _functions()
    gemmery.compile.enable()
    assert gemmery.compile.is_enabled()
    assert _functions() == before
    torch.compiler.config.cache_key_tag += " and more"
    gemmery.compile.disable()
    gemmery.compile.disable()
    assert torch.compiler.config.cache_key_tag == "mine and more"
    assert not gemmery.compile.is_enabled()


def test_a_context_leaves_what_it_found():
    with gemmery.compile.enable():
        with gemmery.compile.enable():
            pass
        assert gemmery.compile.is_enabled()
    assert not gemmery.compile.is_enabled()


def test_functions_that_others_cleared():
    from torch._inductor.select_algorithm import clear_feedback_savers, clear_preprocessing_fns

    with gemmery.compile.enable():
        clear_preprocessing_fns()
        clear_feedback_savers()
    assert not gemmery.compile.is_enabled()
    before = _functions()
    with gemmery.compile.enable():
        assert len(_functions()) == len(before) + 2


def test_a_cpu_is_offered_nothing():
    """Its kernels are those of the reference, which is torch."""
    a, b, _, _ = operands()
    with gemmery.compile.enable():
        result, code = compiled(mm, a, b)
    assert "gemmery" not in code
    assert close(result, mm, (a, b))
