"""Installs the wheel and the sdist of dist/ where nothing of the checkout is, and runs `smoke.py` there: `make test-package`.

An environment is new and empty. Torch and what the command line needs are taken from the environment that runs this,
whose own gemmery stays out of sight, because a `.pth` file that is only named in another is not read. An older or newer
Triton stands before it. There is no compiler on the path.
"""

from __future__ import annotations

import argparse
import csv
import io
import os
import subprocess
import sys
import sysconfig
import tempfile
import venv
from concurrent.futures import ThreadPoolExecutor
from email.parser import HeaderParser
from pathlib import Path
from zipfile import ZipFile

ROOT = Path(__file__).resolve().parents[2]
SMOKE = Path(__file__).with_name("smoke.py")


class Environment:
    """A new environment in a directory, and on its path the directories given, which are not its own."""

    def __init__(self, place: Path, beside: list[str]) -> None:
        venv.create(place)
        self.bin, self.beside = place / "bin", beside
        self.packages = Path(
            sysconfig.get_path("purelib", "posix_prefix", {"base": str(place), "platbase": str(place)})
        )
        self.variables = {"PATH": str(self.bin), "HOME": str(place), "LANG": "C.UTF-8"}
        self.variables |= {
            name: value
            for name, value in os.environ.items()
            if name.startswith(("PIP_", "SSL_", "OPENBLAS_"))
        }

    def run(self, *words: str, may_fail: bool = False, **variables: str) -> str:
        """What the environment's Python prints; it has to succeed, unless it may fail."""
        return self._run([str(self.bin / "python"), "-I", *words], may_fail, variables)

    def pip(self, *words: str, may_fail: bool = False) -> str:
        """What pip says, which works on this environment from outside, since making one with a pip of its own is slow."""
        command = [sys.executable, "-m", "pip", "--python", str(self.bin / "python"), *words]
        return self._run(command, may_fail, {})

    def _run(self, command: list[str], may_fail: bool, variables: dict[str, str]) -> str:
        done = subprocess.run(
            command,
            env=self.variables | variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        if done.returncode and not may_fail:
            raise SystemExit(f"{' '.join(command)} failed with {done.returncode}:\n{done.stdout}")
        return done.stdout

    def install(self, package: Path, *, building: bool = False) -> None:
        """Install a package by itself; then let it see the packages of others.

        Args:
            building: the package is built first, by what `beside` has.
        """
        path = self.packages / "beside.pth"
        if building:
            path.write_text("\n".join(self.beside))
        words = (
            "--no-index",
            "--no-deps",
            "--ignore-installed",
            *(("--no-build-isolation",) if building else ()),
        )
        self.pip("install", "--quiet", *words, str(package))
        path.write_text("\n".join(self.beside))

    def files(self) -> set[tuple[str, str]]:
        """The files that are installed of gemmery and the hashes of their contents."""
        (record,) = self.packages.glob("gemmery-*.dist-info/RECORD")
        rows = csv.reader(io.StringIO(record.read_text(encoding="utf-8")))
        return {(path, digest) for path, digest, _ in rows if path.startswith("gemmery/") and digest}


def smoke(wheel: Path, place: Path, beside: list[str]) -> str:
    """Install the wheel, check that its requirements are met, and run the smoke test."""
    environment = Environment(place, beside)
    environment.install(wheel)
    # Of all that is on the path; how the packages of others go together is not asked here.
    missing = [x for x in environment.pip("check", may_fail=True).splitlines() if "gemmery" in x]
    assert not missing, missing
    return environment.run(str(SMOKE), SMOKE_WITHOUT_COMPILER="1", OMP_NUM_THREADS="1")


def installed(package: Path, place: Path, beside: list[str]) -> set[tuple[str, str]]:
    """The files that are there after a package was installed, with `beside` to build it."""
    environment = Environment(place, beside)
    environment.install(package, building=True)
    return environment.files()


def check_wheel(wheel: Path) -> None:
    """The wheel is for every machine, so that installing it compiles nothing, and has no file of anybody's else."""
    assert wheel.name.endswith("-py3-none-any.whl"), wheel.name
    with ZipFile(wheel) as archive:
        names = archive.namelist()
        (about,) = (name for name in names if name.endswith("/METADATA"))
        version = HeaderParser().parsestr(archive.read(about).decode())["Version"]
    tops = {name.split("/")[0] for name in names}
    assert tops == {"gemmery", f"gemmery-{version}.dist-info"}, tops
    wanted = {str(path.relative_to(ROOT / "src")) for path in (ROOT / "src/gemmery").rglob("*.py")}
    assert not wanted - set(names), sorted(wanted - set(names))


def main() -> None:
    """All checks."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("dist", type=Path)
    parser.add_argument("--triton", type=Path, action="append", default=[], help="where another Triton is")
    parser.add_argument(
        "--builder", type=Path, required=True, help="the environment that has the build backend"
    )
    given = parser.parse_args()
    ((wheel,), (sdist,)) = (sorted(given.dist.resolve().glob(kind)) for kind in ("*.whl", "*.tar.gz"))
    check_wheel(wheel)
    torch = sysconfig.get_paths()["purelib"]
    (builder,) = map(str, given.builder.resolve().glob("lib/python*/site-packages"))
    with tempfile.TemporaryDirectory() as directory:
        places = [Path(directory) / str(number) for number in range(len(given.triton))]
        with ThreadPoolExecutor(2) as pool:
            runs = [
                pool.submit(smoke, wheel, place, [str(triton.resolve()), torch])
                for place, triton in zip(places, given.triton, strict=True)
            ]
            same = [
                pool.submit(installed, package, Path(directory) / package.name, [builder])
                for package in (sdist, wheel)
            ]
            for run in runs:
                print(run.result(), end="", flush=True)
            built, files = (each.result() for each in same)
    assert files, "the wheel is empty"
    assert built == files, built ^ files
    print(f"{sdist.name} builds, without the network, what {wheel.name} has: {len(files)} files")
    print(f"{len(given.triton) + 1} passed, 0 failed")


if __name__ == "__main__":
    sys.exit(main())
