"""The files of examples/ run as they stand, and print what their texts say; tests of QLoRA have a file of their own."""

import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@pytest.fixture
def printed(monkeypatch, capsys):
    """Runs an example in this process, as a script, and returns what it has printed."""
    pytest.importorskip("transformers", minversion="5")

    def run(name, *args):
        monkeypatch.setattr(sys, "argv", [name, *args])
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
        return capsys.readouterr().out

    return run


def test_every_example_has_a_test():
    tested = "".join(path.read_text(encoding="utf-8") for path in Path(__file__).parent.glob("test_*.py"))
    assert [path.name for path in EXAMPLES.glob("*.py") if f'"{path.name}"' not in tested] == []


def test_every_example_is_in_the_documentation():
    page = (EXAMPLES.parent / "docs" / "examples.md").read_text(encoding="utf-8")
    assert [path.name for path in EXAMPLES.glob("*.py") if f"examples/{path.name}" not in page] == []


def test_a_model_is_quantized_saved_loaded_and_served(printed, tmp_path):
    found = printed("serve.py", "--tokens", "4", "--out", str(tmp_path))
    assert "14 replaced: 14 Linear" in found
    assert "loaded again: the logits are the same" in found
    assert "2 LlamaMLP (silu, int4)" in found
    assert "generated 12 tokens" in found
    assert (tmp_path / "model.safetensors").is_file()


def test_experts_are_trained_and_quantized(printed):
    found = printed("mixture_of_experts.py", "--steps", "4")
    theirs, ours = (float(re.search(rf"{name}: loss (\S+)", found)[1]) for name in ("grouped_mm", "gemmery"))
    assert ours == pytest.approx(theirs, abs=2e-2)
    before, after = map(float, re.search(r"loss (\S+) before, (\S+) after", found).groups())
    assert before == pytest.approx(ours, abs=2e-2)
    assert after < before - 0.1
    assert "2 Qwen3MoeExperts" in found
    quantized = float(re.search(r"quantized to mxfp4: loss (\S+),", found)[1])
    assert abs(quantized - after) < before - after


def test_sampling_and_training_have_the_same_bits(printed):
    found = printed("same_log_probs.py")
    counts = re.findall(r"^(.*), step \d: (\d+) of 72 log-probabilities differ", found, re.MULTILINE)
    assert [name for name, _ in counts] == ["torch's products"] * 2 + ["gemmery"] * 2
    assert sum(int(count) for name, count in counts if name == "torch's products") > 0
    assert [count for name, count in counts if name == "gemmery"] == ["0", "0"]


# One worker starts processes at a time.
@pytest.mark.slow
@pytest.mark.xdist_group("ranks")
def test_two_ranks_give_what_one_does():
    how = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [sys.executable, *how, str(EXAMPLES / "tensor_parallel.py")],
        capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = dict(re.findall(r"^(\w+): relative difference from one rank (\S+)", done.stdout, re.MULTILINE))
    assert list(found) == ["whole", "overlap", "int4"]
    assert float(found["whole"]) < 1e-5
    assert float(found["overlap"]) < 1e-5
    assert float(found["int4"]) < 2e-2
