"""Write the ladder's rungs as notebooks, for a hosted GPU.

python -m docs.hooks.notebooks FOLDER

A notebook has the text and the code of the file: its explanation, its kernels, questions with their answers, its check
and measurement, and its exercises. It imports gemmery, which brings the files that a rung needs. It also has the output
of the recorded run on a GPU, unless the rung's code has changed since then.
"""

from __future__ import annotations

import argparse
import ast
import itertools
import json
import re
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from docs.hooks.rungs import Rung, asked, printed, rungs

#: What a notebook begins with: it finds `_common` and the other rungs in the package.
SETUP = """# On a hosted GPU, first: %pip install gemmery
import os
import sys

import torch

# Without a GPU, kernels run in Triton's interpreter. Triton reads this variable when it is imported.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

from gemmery.lab import ladder

sys.path.insert(0, str(ladder.tutorial_files()[{number}].parent))"""
#: Lines that head a section of a file.
_HEAD = re.compile(r"^# -{20,}\n# (.+)\n", re.MULTILINE)


def cell(kind: str, text: str, output: str | None = "") -> dict[str, Any]:
    """A cell.

    Args:
        kind: "markdown" or "code".
        text: what is in it.
        output: what its code has printed; None if the cell has not been run.
    """
    made: dict[str, Any] = {
        "cell_type": kind,
        "metadata": {},
        "source": text.strip().splitlines(keepends=True),
    }
    if kind != "code":
        return made
    said = (
        [{"output_type": "stream", "name": "stdout", "text": output.splitlines(keepends=True)}]
        if output
        else []
    )
    # `notebook` numbers the cells that were run.
    return made | {"execution_count": None if output is None else 0, "outputs": said}


def cells(rung: Rung) -> Iterator[dict[str, Any]]:
    """The cells of a rung's notebook."""
    yield cell("markdown", f"# {rung.number} · {rung.title}\n\n{rung.told}")
    yield cell("code", SETUP.format(number=rung.number))
    checks = _sections(rung.code("check"))
    yield cell("code", next(checks)[1])  # what it imports
    for title, text in _sections(rung.code("kernel")):
        if title:
            yield cell("markdown", f"## {title}")
        yield cell("code", text)
    yield cell("markdown", "## Predict before you read on")
    course = rung.code("course")
    for _, text in _sections(course):
        yield cell("code", text)
    questions, answers = (
        "".join(f"{line}\n" for line in lines) for lines in zip(*asked()[rung.number], strict=True)
    )
    yield cell("code", "for question in QUESTIONS:\n    print(question.text)", questions)
    # The answers need these; an editor shows them only on demand.
    for _, text in _sections(rung.code("solutions")):
        yield cell("code", text) | {"metadata": {"jupyter": {"source_hidden": True}}}
    yield cell("code", "for question in QUESTIONS:\n    print(question.answer())", answers)
    yield cell("markdown", "## Check and measurement\n\nWithout a GPU, nothing is timed.")
    for _, text in checks:
        yield cell("code", re.sub(r'\n+if __name__ == "__main__":\n    main\(\)', "", text))
    output, where = printed().get(rung.number, ("", ""))
    yield cell("code", _run(rung), output)
    if where:
        yield cell("markdown", f"Measured on {where}.")
    yield cell(
        "markdown",
        "## Exercises\n\nWrite each function and run its cell, which says what is wrong until it is right.",
    )
    for stub, solution, check in rung.tasks:
        review = (
            f'print(Exercise({stub.name}, {solution.name}, {check.name}).review() or "{stub.name} is right.")'
        )
        yield cell("code", f"{rung.source(stub)}\n\n\n{review}", None)


def _run(rung: Rung) -> str:
    """The body of a rung's `main`, without the questions, which the notebook has asked already."""
    (main,) = (node for node in rung.tree.body if isinstance(node, ast.FunctionDef) and node.name == "main")
    body = textwrap.dedent("\n".join(rung.text.splitlines()[main.body[0].lineno - 1 : main.end_lineno]))
    body = body.replace("arguments, QUESTIONS, EXERCISES", "[]").replace("return run(", "record = run(")
    return body.removesuffix("\nreturn record")


def _sections(code: str) -> Iterator[tuple[str, str]]:
    """A title, empty for the first section, and the code below it."""
    first, *rest = _HEAD.split(code)
    if first.strip():
        yield "", first.strip()
    for title, text in zip(rest[::2], rest[1::2], strict=True):
        yield title, text.strip()


def notebook(rung: Rung) -> dict[str, Any]:
    """A rung as a notebook. If its measurement was not recorded, none of its cells counts as run."""
    made = [each | {"id": f"{rung.number:02}-{place}"} for place, each in enumerate(cells(rung))]
    ran = itertools.count(1)
    for each in made:
        if each.get("execution_count") is not None:
            each["execution_count"] = next(ran) if rung.number in printed() else None
    return {
        "cells": made,
        "metadata": {
            "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
            "language_info": {"name": "python"},
            "accelerator": "GPU",
        },
        "nbformat": 4,
        "nbformat_minor": 5,
    }


def main(arguments: list[str] | None = None) -> int:
    """Write all notebooks."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, metavar="FOLDER")
    options = parser.parse_args(arguments)
    options.folder.mkdir(parents=True, exist_ok=True)
    for rung in rungs():
        path = options.folder / f"{rung.path.stem}.ipynb"
        path.write_text(json.dumps(notebook(rung), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
