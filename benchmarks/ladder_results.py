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
#: What of `tutorials/_common.py` decides what a rung prints: its inputs, errors, times and tables.
SHARED = {
    "ROUNDS", "bench_products", "captured", "compare", "normal", "poisoned", "print_rows", "relative_error", "time_us",
}  # fmt: skip
HEADER = ("gpu", "torch", "triton", "cuda", "commit", "date")


def code_digest(path: Path) -> str:
    """A digest of the code that decides what a rung prints.

    It covers the rung's file, the rungs that it loads, and what `SHARED` names of the common file. Imports, docstrings,
    comments and the course (the questions and the exercises with their solutions) do not count.
    """
    files: set[Path] = set()
    new = {path}
    while new:
        files |= new
        numbers = {number for file in new for number in _loaded(_parsed(file))}
        new = {file for number in numbers for file in path.parent.glob(f"{number:02d}_*.py")} - files
    parts = [_code(file, _course(file)) for file in sorted(files)]
    common = path.parent / "_common.py"
    parts.append(_code(common, _unshared(common)))
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def _parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def _code(path: Path, left_out: set[int]) -> str:
    """The lines of a file without imports, docstrings, comments, and the lines that are left out."""
    text = path.read_text(encoding="utf-8")
    lines = text.splitlines()
    left_out = set(left_out)
    for node in ast.walk(ast.parse(text)):
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
    return "\n".join(line for number, line in enumerate(lines, 1) if number not in left_out and line)


def _course(path: Path) -> set[int]:
    """The lines of a rung's questions and exercises."""
    lines = path.read_text(encoding="utf-8").splitlines()
    found = set(range(lines.index(COURSE) + 1, lines.index(CHECKS) + 1))
    if SOLUTIONS in lines:
        found |= set(range(lines.index(SOLUTIONS) + 1, _parsed(path).body[-1].lineno))
    return found


def _loaded(tree: ast.Module) -> set[int]:
    """The numbers of the rungs that a rung loads, by `rung(NUMBER)`."""
    calls = (node for node in ast.walk(tree) if isinstance(node, ast.Call))
    return {
        call.args[0].value
        for call in calls
        if isinstance(call.func, ast.Name)
        and call.func.id == "rung"
        and isinstance(call.args[0], ast.Constant)
    }


def _unshared(path: Path) -> set[int]:
    """The lines of the common file's statements that `SHARED` does not name."""
    tree = _parsed(path)
    kept: set[int] = set()
    for node in tree.body:
        names = [getattr(node, "name", "")] + [ast.unparse(x) for x in getattr(node, "targets", ())]
        if SHARED.intersection(names):
            kept |= set(range(node.lineno, (node.end_lineno or 0) + 1))
    return set(range(1, (tree.body[-1].end_lineno or 0) + 1)) - kept


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
