"""examples/compiled_model.py runs, and computes what the model computes."""

import re
import runpy
import sys
from pathlib import Path

import pytest

import gemmery.compile

pytest.importorskip("transformers", minversion="5")

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "compiled_model.py"


@pytest.mark.slow
def test_it_computes_the_same(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["compiled_model.py"])
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    printed = capsys.readouterr().out
    differences = [float(x) for x in re.findall(r"difference to the eager model: (\S+)", printed)]
    assert len(differences) == 2
    assert max(differences) < 1e-2
    assert "Not shown without a GPU" in printed
    assert not gemmery.compile.is_enabled()
