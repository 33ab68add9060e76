"""examples/qlora.py runs, learns, and loads what it has saved."""

import re
import runpy
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers", minversion="5")
pytest.importorskip("peft")

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "qlora.py"


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_it_learns_and_loads_what_it_saved(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(sys, "argv", ["qlora.py", "--steps", "6", "--rank", "4", "--out", str(tmp_path)])
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    printed = capsys.readouterr().out
    before, after = map(float, re.search(r"batch: (\S+) before, (\S+) after", printed).groups())
    assert after < before - 0.02
    assert f"loaded again: {after:.3f}" in printed
    assert (tmp_path / "adapter_model.safetensors").is_file()
