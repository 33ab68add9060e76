"""What the site takes from files outside of docs/, and where its links to them lead.

Pages link to files of the repository, as `../CONTRIBUTING.md`, so that links work wherever the file is read. On the
site, `moved` turns them into links between its own pages.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

#: Files of the repository that are pages of the site, or in whose place the site has one.
PAGES = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "SECURITY.md": "security.md",
    "benchmarks/RESULTS.md": "results-rows.md",
}
#: Pages that are files of the repository as they stand.
WHOLE = {
    "contributing.md": "CONTRIBUTING.md",
    "changelog.md": "CHANGELOG.md",
    "security.md": "SECURITY.md",
    "results-rows.md": "benchmarks/RESULTS.md",
}

#: What a browser would fetch from elsewhere.
FETCHED = re.compile(
    r"<(?:script|img|iframe|source|video|audio)\b[^>]*\bsrc=[\"']?(?:https?:)?//[^\"'>]*"
    r"|<link\b(?![^>]*\brel=[\"']?canonical)[^>]*\bhref=[\"']?(?:https?:)?//[^\"'>]*"
    r"|@import[^;]*//|url\([\"']?(?:https?:)?//[^)]*"
)

_LINK = re.compile(r"(?<=\]\()(?!https?:|mailto:)([^)\s#]*)(#[^)\s]*)?(?=\))")
_RUNG = re.compile(r"tutorials/(\d\d)_\w+\.py")


def moved(text: str, source: str, page: str) -> str:
    """A text with its links to the repository's files led to the site's pages.

    Args:
        text: Markdown.
        source: the file of the repository that it is from, against which its links are relative.
        page: the page that it stands on, relative to docs/.

    Raises:
        ValueError: a link leads to a file that the site does not have.
    """
    here = posixpath.dirname(page)

    def lead(match: re.Match[str]) -> str:
        target, anchor = match[1], match[2] or ""
        path = posixpath.normpath(posixpath.join(posixpath.dirname(source), target)) if target else source
        if path.startswith("docs/"):
            place = path.removeprefix("docs/")
        elif path in PAGES:
            place = PAGES[path]
        elif rung := _RUNG.fullmatch(path):
            place = f"ladder/{rung[1]}.md"
        elif path in pictures():
            place = path
        else:
            raise ValueError(f"{source}: the site has no page for {path}{anchor}")
        if place == page:
            return anchor
        return posixpath.relpath(place, here or ".") + anchor

    return _LINK.sub(lead, text)


def pictures() -> list[str]:
    """The pictures that files of the repository show, relative to its root."""
    return [str(path.relative_to(ROOT)) for path in (ROOT / "benchmarks" / "results").glob("*.png")]


def source(name: str) -> str | None:
    """The file of the repository that a page of the site is written in; None for what is made of several."""
    if name in WHOLE:
        return WHOLE[name]
    if rung := re.fullmatch(r"ladder/(\d\d)\.md", name):
        (path,) = (ROOT / "tutorials").glob(f"{rung[1]}_*.py")
        return f"tutorials/{path.name}"
    return f"docs/{name}" if (ROOT / "docs" / name).is_file() else None


def page(name: str) -> str:
    """The text of a page that is made of a file of the repository."""
    source = WHOLE[name]
    return moved((ROOT / source).read_text(encoding="utf-8"), source, name)
