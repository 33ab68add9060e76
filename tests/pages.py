"""The code blocks of README and docs/, found and run as a reader would run them: one after the other, in one place.

| fence | what happens to it |
|---|---|
| `python` | runs; the blocks of a page share their names |
| `sh` | each line is a command, and runs; its exit status must be 0 |
| `console` | `$ ` begins a command; the lines below it are what it has to print: see `matches` |
| `text`, `json` | is shown |

A block that can't run here begins with a comment that says what it needs and why, such as `# Needs a GPU: it measures`;
it is compiled, or its options are parsed. `gemmery` runs in this process, so that a command takes milliseconds.
"""

import ast
import contextlib
import io
import os
import re
import runpy
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from gemmery.cli import app

ROOT = Path(__file__).resolve().parents[1]
#: What a reader reads, by its place in the repository.
PAGES = [
    "README.md",
    "CONTRIBUTING.md",
    *sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md")),
]
RUN, SHOWN = ("python", "sh", "console"), ("text", "json")
#: Set in a page that is for Triton's interpreter; `tests/interpret` runs those, `tests/host` the others.
INTERPRETED = "export TRITON_INTERPRET=1"

_FENCE = re.compile(r"^```([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_MARK = re.compile(r"# (Needs [^:\n]+|Takes [^:\n]+): .+")
_ASSIGNMENT = re.compile(r"([A-Z_]+)=(.*)")
#: A figure that a model or a clock has given: a number with a decimal point, or a percentage.
_FIGURE = re.compile(r"(?<![\w.])[+-]?(?:\d+\.\d+(?![\w.])|\d+(?=%))")
#: How far figures may be off what a page shows: by this part of them, or by so much.
NEAR, LITTLE = 0.15, 3.0


@dataclass(frozen=True)
class Block:
    """A block of code.

    Attributes:
        page, line: where its first line is.
        language: the first word behind its fence.
        needs: what its first line says that it needs, as "Needs a GPU"; empty where it runs.
    """

    page: str
    line: int
    language: str
    text: str
    needs: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def blocks(page: str) -> list[Block]:
    """The blocks of a page, in their order."""
    text = (ROOT / page).read_text(encoding="utf-8")
    found = []
    for fence in _FENCE.finditer(text):
        language = fence[1].split()[0] if fence[1].strip() else ""
        mark = _MARK.match(fence[2])
        line = text.count("\n", 0, fence.start(2)) + 1
        found.append(Block(page, line, language, fence[2], mark[1] if mark else ""))
    return found


def is_interpreted(page: str) -> bool:
    """Whether a page's kernels run through the interpreter."""
    lines = [line for block in blocks(page) for line in block.text.splitlines()]
    return any(line.startswith(INTERPRETED) for line in lines)


def matches(wanted: str, printed: str) -> bool:
    """Whether a command has printed what a page shows.

    White space may differ, `...` stands for anything, and figures need only be near: pages are not to change with
    every measurement that corrects a model.
    """
    figures = [float(figure) for figure in _FIGURE.findall(wanted)]
    parts = re.split(r"(\.\.\.)", _FIGURE.sub("\0", wanted).strip())
    pattern = "".join(".*?" if part == "..." else re.escape(" ".join(part.split())) for part in parts)
    pattern = pattern.replace(re.escape("\0"), f"({_FIGURE.pattern})").replace(r"\ ", r"\s+")
    found = re.fullmatch(r"\s*" + pattern + r"\s*", printed, re.DOTALL)
    if found is None:
        return False
    return all(
        abs(float(text) - figure) <= max(NEAR * abs(figure), LITTLE)
        for text, figure in zip(found.groups(), figures, strict=True)
    )


def _go_on(*arguments: object) -> None:
    raise AssertionError(f"{arguments[1]} would go on in a process of its own: say what it takes, or needs")


class Reader:
    """Somebody who works through a page, in a directory that is otherwise empty."""

    def __init__(self, directory: Path, patch: pytest.MonkeyPatch) -> None:
        self.directory, self.patch = directory, patch
        self.names: dict[str, object] = {"__name__": "__main__"}
        patch.chdir(directory)
        # As in the repository's root.
        for name in ("benchmarks", "tutorials"):
            (directory / name).symlink_to(ROOT / name)
        # A command that goes on as another program would end the tests with a success.
        patch.setattr(os, "execve", _go_on)
        patch.setenv("PWD", str(directory))
        patch.setenv("COLUMNS", "160")
        patch.setenv("GEMMERY_STORE", "1")
        patch.setenv("GEMMERY_CACHE_DIR", str(directory / "cache"))

    def read(self, page: str) -> None:
        """Run all blocks of a page that can run."""
        for block in blocks(page):
            if block.language in RUN:
                getattr(self, f"_{block.language}")(block)

    def _python(self, block: Block) -> None:
        # Errors name the page and the line.
        code = compile("\n" * (block.line - 1) + block.text, str(ROOT / block.page), "exec")
        if not block.needs:
            exec(code, self.names)

    def _sh(self, block: Block) -> None:
        for command in _lines(block.text):
            self._run(command, block)

    def _console(self, block: Block) -> None:
        for command, wanted in _dialogue(block.text):
            printed = self._run(command, block)
            if wanted and not block.needs:
                assert matches(wanted, printed), f"{block}: $ {command}\n{printed}"

    def _run(self, command: str, block: Block) -> str:
        """Run a command, or see that it could be run; what it prints."""
        words = shlex.split(command, comments=True)
        while words and (variable := _ASSIGNMENT.fullmatch(words[0])):
            self.patch.setenv(variable[1], variable[2])
            words.pop(0)
        if not words:
            return ""
        name, *arguments = words
        if name == "make":
            # Continuous integration runs those that it can. That there is such a target, make says without running it.
            subprocess.run(["make", "-n", *arguments], cwd=ROOT, check=True, capture_output=True)
            return ""
        if block.needs:
            if name == "gemmery":
                try:
                    self._parse(arguments)
                except Exception as error:
                    raise AssertionError(f"{block}: {command}: {error}") from error
            return ""
        return getattr(self, f"_run_{name}")(arguments, block)

    def _run_export(self, arguments: list[str], block: Block) -> str:
        for text in arguments:
            variable, value = text.split("=", 1)
            if variable == "TRITON_INTERPRET":
                assert os.environ[variable] == value, f"{block}: this page is for tests/interpret"
            self.patch.setenv(variable, os.path.expandvars(value))
        return ""

    def _run_source(self, arguments: list[str], block: Block) -> str:
        # The environment is the one that the tests run in.
        assert arguments == [".venv/bin/activate"], f"{block}: source {arguments}"
        return ""

    def _run_gemmery(self, arguments: list[str], block: Block) -> str:
        result = CliRunner().invoke(app, arguments, prog_name="gemmery")
        assert result.exit_code == 0, f"{block}: gemmery {shlex.join(arguments)}\n{result.output}"
        return result.output

    def _run_cat(self, arguments: list[str], block: Block) -> str:
        return "".join((self.directory / name).read_text(encoding="utf-8") for name in arguments)

    def _run_python(self, arguments: list[str], block: Block) -> str:
        program, *rest = arguments
        if program.startswith("tutorials/"):
            # tests/interpret/test_tutorials.py runs every rung.
            assert (self.directory / program).is_file(), f"{block}: there is no {program}"
            return ""
        self.patch.setattr(sys, "argv", [program, *rest])
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            runpy.run_path(str(self.directory / program), run_name="__main__")
        return printed.getvalue()

    def _parse(self, arguments: list[str]) -> None:
        """See that gemmery takes these arguments, without running the command."""
        for word in arguments:
            if word.endswith((".json", ".jsonl")):
                # A file that the reader has.
                (self.directory / word).touch()
        command = typer.main.get_command(app)
        context = command.make_context("gemmery", list(arguments))
        while isinstance(command, typer.core.TyperGroup):
            _, command, arguments = command.resolve_command(context, list(arguments))
            context = command.make_context(command.name, list(arguments), parent=context)


def _lines(text: str) -> Iterator[str]:
    """The commands of a shell block: its lines, where a backslash joins two."""
    yield from filter(None, (line.strip() for line in text.replace("\\\n", " ").splitlines()))


def _dialogue(text: str) -> Iterator[tuple[str, str]]:
    """Commands, and what each has to print."""
    for part in re.split(r"^\$ ", text, flags=re.MULTILINE)[1:]:
        command, _, printed = part.replace("\\\n", " ").partition("\n")
        yield command, printed


def names_of(program: str) -> set[str]:
    """What a program takes of the module gemmery."""
    return {
        node.attr
        for node in ast.walk(ast.parse(program))
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "gemmery"
    }
