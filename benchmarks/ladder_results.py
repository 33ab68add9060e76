"""Bring runs of `benchmarks/ladder.py` into the results of the repository, from which the ladder's pages are made.

python benchmarks/ladder_results.py FOLDER ...    of several runs, later ones replace what earlier ones have

Each rung's record keeps what ran where and when; rungs that no run has stay as they are.
"""

import argparse
import ast
import hashlib
import io
import json
import sys
import tokenize
from pathlib import Path
from typing import Any

OUT = Path(__file__).resolve().parents[1] / "benchmarks" / "results" / "ladder"
#: Comments in a rung's file above its questions and exercises, above what it measures, and above its solutions.
COURSE, CHECKS = "# Predict before you run, and exercises", "# The check and the measurement"
SOLUTIONS = "# Solutions of the exercises"
HEADER = ("gpu", "torch", "triton", "cuda", "commit", "date")


def code_digest(path: Path) -> str:
    """A digest of the code that decides what a rung prints, without imports, docstrings, comments and the course.

    The course is the questions and the exercises with their solutions.
    """
    text = path.read_text(encoding="utf-8")
    lines = text.splitlines()
    tree = ast.parse(text)
    left_out = set(range(lines.index(COURSE) + 1, lines.index(CHECKS) + 1))
    if SOLUTIONS in lines:
        left_out |= set(range(lines.index(SOLUTIONS) + 1, tree.body[-1].lineno))
    for node in ast.walk(tree):
        told = (
            isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
            and ast.get_docstring(node) is not None
        )
        part = node.body[0] if told else node
        if told or isinstance(node, ast.Import | ast.ImportFrom):
            left_out.update(range(part.lineno, (part.end_lineno or 0) + 1))
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            row, column = token.start
            lines[row - 1] = lines[row - 1][:column].rstrip()
    kept = (line for number, line in enumerate(lines, 1) if number not in left_out and line)
    return hashlib.sha256("\n".join(kept).encode()).hexdigest()


def read(path: Path) -> dict[str, Any]:
    """A file of results; nothing where there is none."""
    data: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    return data


def write(path: Path, data: dict[str, Any]) -> None:
    """Write results as the others are written."""
    path.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")


def header(data: dict[str, Any]) -> dict[str, Any]:
    """The GPU, the versions, the commit and the date of a run."""
    return {key: data[key] for key in HEADER}


def main(arguments: list[str] | None = None) -> int:
    """Merge the runs."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folders", type=Path, nargs="+", metavar="FOLDER")
    parser.add_argument("--out", type=Path, default=OUT, metavar="FOLDER")
    options = parser.parse_args(arguments)
    old = read(options.out / "rungs.json")
    records = {record["number"]: {"measured": header(old), **record} for record in old.get("rungs", [])}
    probes = read(options.out / "probes.json")
    printed = {each["number"]: each for each in read(options.out / "printed.json").get("rungs", [])}
    last = old
    for folder in options.folders:
        found = read(folder / "rungs.json")
        last = found
        records |= {record["number"]: {"measured": header(found), **record} for record in found["rungs"]}
        new = read(folder / "printed.json")
        printed |= {each["number"]: {"measured": header(new), **each} for each in new.get("rungs", [])}
        sizes = read(folder / "sizes.json")
        if sizes.get("sizes"):
            write(options.out / "sizes.json", sizes)
        new = read(folder / "probes.json")
        probes |= {name: {"measured": header(new), "shapes": new[name]} for name in new if name not in HEADER}
    write(
        options.out / "rungs.json", header(last) | {"rungs": [records[number] for number in sorted(records)]}
    )
    write(options.out / "probes.json", probes)
    write(options.out / "printed.json", {"rungs": [printed[number] for number in sorted(printed)]})
    return 0


if __name__ == "__main__":
    sys.exit(main())
