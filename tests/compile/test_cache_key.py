"""Triton's disk cache knows the functions that a kernel is composed of: an edited one is compiled anew.

Functions that come in as constexpr parameters are part of the key only because each is a parameter of its own; were
they missing, an edit would silently run the old code.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import gemmery

# Long, and about gemmery more than about Triton.
pytestmark = pytest.mark.slow


class Copy:
    """A copy of the package that may be edited, with a cache of its own."""

    def __init__(self, folder):
        self.package, self.cache = folder / "gemmery", folder / "cache"
        shutil.copytree(
            Path(gemmery.__file__).parent, self.package, ignore=shutil.ignore_patterns("__pycache__")
        )

    def compile(self, layout="NT"):
        """The kernel's PTX from a new process that uses the copy and its cache."""
        environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
        path = os.pathsep.join((str(self.package.parent), os.environ.get("PYTHONPATH", "")))
        # Without compiled modules: an edit within a second that keeps the size would go unseen by Python itself.
        environment |= {
            "TRITON_CACHE_DIR": str(self.cache),
            "PYTHONPATH": path,
            "PYTHONDONTWRITEBYTECODE": "1",
        }
        command = [sys.executable, Path(__file__).with_name("child.py"), "gemm", layout]
        run = subprocess.run(command, capture_output=True, text=True, env=environment)
        assert run.returncode == 0, run.stderr
        report = json.loads(run.stdout)
        assert Path(report["file"]).is_relative_to(self.package)
        return report["code"]

    def entries(self):
        """The names of the cache's entries."""
        return sorted(entry.name for entry in self.cache.iterdir())

    def edit(self, module, before, after):
        """Change a line of the copy without moving the others."""
        path = self.package / "kernels" / module
        text = path.read_text()
        assert before in text, f"{module} has no {before!r} any more; let this test edit something else"
        path.write_text(text.replace(before, after))


@pytest.fixture
def copy(tmp_path):
    return Copy(tmp_path)


def test_without_an_edit_the_cache_serves(copy):
    code, entries = copy.compile(), copy.entries()
    assert entries
    assert copy.compile() == code
    assert copy.entries() == entries


@pytest.mark.parametrize(
    ("module", "before", "after"),
    [
        ("operands.py", "mask=row_inside, other=0.0)", "mask=row_inside, other=1.0)"),
        ("operands.py", "tl.store(pointers, value, mask", "tl.store(pointers, -value, mask"),
        ("epilogues.py", "return acc + tl.load(bias", "return acc - tl.load(bias"),
        ("order.py", "return batch, first_m + within", "return batch, first_m * 2 + within"),
        ("numerics.py", "return x.to(DTYPE)", "return (x * 2).to(DTYPE)"),
    ],
    ids=["loader", "store", "epilogue", "order", "cast"],
)
def test_an_edited_part_is_compiled_anew(copy, module, before, after):
    code, entries = copy.compile(), copy.entries()
    copy.edit(module, before, after)
    assert copy.compile() != code
    assert set(copy.entries()) > set(entries)
