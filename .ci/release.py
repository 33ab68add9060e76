"""Whether the repository is ready for a release: `make check-release`, before a tag and again in the release workflow.

Every fault is printed with what to do about it; the exit status is 1 if there is any. `--notes` prints the version's
part of CHANGELOG.md instead.
"""

from __future__ import annotations

import argparse
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

ROOT = Path(__file__).resolve().parents[1]


def version(root: Path) -> str:
    """The version, from the one place that has it."""
    text = (root / "src/gemmery/__init__.py").read_text(encoding="utf-8")
    (found,) = re.findall(r'^__version__ = "([^"]+)"$', text, re.MULTILINE)
    return found


def repository(root: Path) -> str:
    """The repository's public address; empty as long as nobody filled it in."""
    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))
    found: str = project["tool"]["hatch"]["metadata"]["hooks"]["custom"]["repository"]
    return found


def section(root: Path, name: str) -> tuple[str, str] | None:
    """A version's date, or other words behind it, in CHANGELOG.md, and the text of its section; None without one."""
    text = (root / "CHANGELOG.md").read_text(encoding="utf-8")
    found = re.search(rf"^## \[{re.escape(name)}\](.*)\n((?:(?!## ).*\n?)*)", text, re.MULTILINE)
    return (found[1].removeprefix(" - ").strip(), found[2].strip()) if found else None


def faults(root: Path, tag: str | None = None) -> Iterator[str]:
    """The reasons why a release can't be made; none if it can."""
    number = version(root)
    if not re.fullmatch(r"\d+\.\d+\.\d+((a|b|rc)\d+)?", number):
        yield f"the version {number} is no version of a release: set __version__ in src/gemmery/__init__.py"
    if tag is not None and tag != f"v{number}":
        yield f"the tag is {tag}, and __version__ in src/gemmery/__init__.py is {number}: the tag must be v{number}"
    where = urlsplit(repository(root))
    if where.scheme != "https" or not where.hostname or not where.path.strip("/"):
        yield (
            "the repository's public address is not filled in: set repository under "
            "[tool.hatch.metadata.hooks.custom] in pyproject.toml, such as https://HOST/OWNER/NAME"
        )
    changes = section(root, number)
    if changes is None:
        yield f"CHANGELOG.md has no heading '## [{number}] - YYYY-MM-DD': write what users notice under it"
    else:
        date, text = changes
        if not re.fullmatch(r"\d{4}-\d\d-\d\d", date):
            yield f"CHANGELOG.md has {date or 'nothing'} behind [{number}]: write the day of the release, YYYY-MM-DD"
        if not text:
            yield f"CHANGELOG.md says nothing about {number}: write what users notice"
    packages = sorted(path.name for path in (root / "dist").glob("gemmery-*"))
    wanted = [f"gemmery-{number}-py3-none-any.whl", f"gemmery-{number}.tar.gz"]
    if packages != wanted:
        yield f"dist/ has {', '.join(packages) or 'no package'}: run make package, which makes {', '.join(wanted)}"


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tag", help="of the release; it has to be the version's")
    parser.add_argument("--notes", action="store_true", help="print the version's part of CHANGELOG.md")
    given = parser.parse_args()
    if given.notes:
        _, text = section(ROOT, version(ROOT)) or ("", "")
        print(text)
        return 0
    found = list(faults(ROOT, given.tag))
    for fault in found:
        print(f"not ready: {fault}")
    if not found:
        print(f"ready to release {version(ROOT)}")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
