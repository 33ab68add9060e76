"""Write the tables of benchmarks/results/: those between the two marks of each of `PAGES`, and every row in RESULTS.md.

python benchmarks/readme_tables.py           rewrite all
python benchmarks/readme_tables.py --check   exit 1 if one is out of date
"""

import argparse
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks import (  # noqa: E402
    compiled_summary,
    grouped_summary,
    peers_summary,
    ranks_summary,
    sparse_summary,
    suite_tables,
    training_summary,
)
from benchmarks.records import RESULTS  # noqa: E402

BEGIN, END = "<!-- results:begin -->", "<!-- results:end -->"
#: By the name of its option: a page, and what makes the text between its marks from a folder of results. Where the text
#: is empty, the page stays as it is.
PAGES: dict[str, tuple[str, Callable[[Path], str]]] = {
    "readme": ("README.md", suite_tables.readme),
    "page": ("docs/results.md", suite_tables.page),
    "grouped": ("docs/grouped.md", grouped_summary.page),
    "sparse": ("docs/sparse.md", partial(sparse_summary.page, name="sparse")),
    "blocks": ("docs/blocks.md", partial(sparse_summary.page, name="blocks")),
    "distributed": ("docs/distributed.md", ranks_summary.page),
    "peers": ("docs/when-to-use-what.md", peers_summary.page),
    "training": ("docs/training.md", training_summary.losses),
    "adapters": ("docs/adapters.md", training_summary.adapters),
    "compile": ("docs/compile.md", compiled_summary.page),
}


def rewritten(path: Path, inside: str) -> str:
    """A file's text with `inside` between its marks; ValueError unless each mark is there once, in order."""
    text = path.read_text(encoding="utf-8")
    if text.count(BEGIN) != 1 or text.count(END) != 1 or text.index(END) < text.index(BEGIN):
        raise ValueError(f"{path.name} must have {BEGIN} once and {END} once after it")
    before, rest = text.split(BEGIN)
    return f"{before}{BEGIN}\n\n{inside}\n\n{END}{rest.split(END)[1]}"


def main(arguments: list[str] | None = None) -> int:
    """Run; 0 if all files are (now) up to date, 1 if --check finds that one is not, 2 if they can't be."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="change nothing, exit 1 if one is out of date")
    parser.add_argument("--results", type=Path, default=RESULTS, metavar="DIR")
    for name, (path, _) in PAGES.items():
        parser.add_argument(f"--{name}", type=Path, default=ROOT / path, metavar="FILE")
    parser.add_argument("--rows", type=Path, default=ROOT / "benchmarks" / "RESULTS.md", metavar="FILE")
    options = parser.parse_args(arguments)
    wanted = {}
    try:
        for name, (_, text) in PAGES.items():
            path, inside = getattr(options, name), text(options.results)
            if inside and path.exists():
                wanted[path] = rewritten(path, inside)
        wanted[options.rows] = suite_tables.rows(options.results)
    except ValueError as error:
        print(f"readme_tables: {error}", file=sys.stderr)
        return 2
    stale = [p for p, text in wanted.items() if not p.exists() or p.read_text(encoding="utf-8") != text]
    if options.check and stale:
        print(
            f"out of date: {', '.join(p.name for p in stale)}; run benchmarks/readme_tables.py",
            file=sys.stderr,
        )
        return 1
    for path in stale:
        path.write_text(wanted[path], encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
