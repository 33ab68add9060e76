"""Triton's disk cache knows the functions that a kernel is composed of: an edited one is compiled anew.

Functions that come in as constexpr parameters are part of the key only because each is a parameter of its own; were
they missing, an edit would silently run the old code.
"""

import json
import os
import shutil
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest

import gemmery

pytestmark = [
    # Long, and about gemmery more than about Triton.
    pytest.mark.slow,
    # The tests share a copy, so one worker runs them all.
    pytest.mark.xdist_group("cache key"),
]


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
        command = [sys.executable, Path(__file__).with_name("child.py"), layout]
        run = subprocess.run(command, capture_output=True, text=True, env=environment)
        assert run.returncode == 0, run.stderr
        report = json.loads(run.stdout)
        assert Path(report["file"]).is_relative_to(self.package)
        return report["code"]

    def entries(self):
        """The names of the cache's entries."""
        return sorted(entry.name for entry in self.cache.iterdir())

    @contextmanager
    def edited(self, module, before, after):
        """Within, a line of the copy is another one; the others are where they were."""
        path = self.package / "kernels" / module
        text = path.read_text()
        assert before in text, f"{module} has no {before!r} any more; let this test edit something else"
        path.write_text(text.replace(before, after))
        try:
            yield
        finally:
            path.write_text(text)


@pytest.fixture(scope="module")
def copy(tmp_path_factory):
    return Copy(tmp_path_factory.mktemp("copy"))


@pytest.fixture(scope="module")
def code(copy):
    """The code before any edit."""
    return copy.compile()


def test_without_an_edit_the_cache_serves(copy, code):
    entries = copy.entries()
    assert entries
    assert copy.compile() == code
    assert copy.entries() == entries


@pytest.mark.parametrize(
    ("module", "before", "after"),
    [
        ("operands.py", "mask=row_inside, other=0.0)", "mask=row_inside, other=1.0)"),
        ("operands.py", "tl.store(pointers, value, mask", "tl.store(pointers, -value, mask"),
        ("epilogues.py", "return acc + tl.load(bias", "return acc - tl.load(bias"),
        ("order.py", "return first_m + within", "return first_m * 2 + within"),
        ("numerics.py", "return x.to(DTYPE)", "return (x * 2).to(DTYPE)"),
        ("overlap.py", "setp.eq.s32 first, thread, 0", "setp.eq.s32 first, thread, 32"),
    ],
    ids=["loader", "store", "epilogue", "order", "cast", "assembly"],
)
@pytest.mark.sampled(2)
def test_an_edited_part_is_compiled_anew(copy, code, module, before, after):
    entries = copy.entries()
    with copy.edited(module, before, after):
        assert copy.compile() != code
    assert set(copy.entries()) > set(entries)
