"""The ladder's pages: text, questions and code of each rung from its file, its gains from recorded runs, pictures."""

from __future__ import annotations

import ast
import functools
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from benchmarks.ladder_results import CHECKS, COURSE, SOLUTIONS, code_digest
from docs.hooks import drawings
from docs.hooks.repository import ROOT
from gemmery.lab import ladder

#: What `benchmarks/rungs.py`, `benchmarks/ladder.py` and `benchmarks/ladder_code.py` wrote.
RESULTS = ROOT / "benchmarks" / "results" / "ladder"
RECORDED, SIZES, CODE, PROBES, PRINTED = (
    RESULTS / f"{name}.json" for name in ("rungs", "sizes", "code", "probes", "printed")
)
#: How the rungs time a call, `time_us` of `tutorials/_common.py`.
PROTOCOL = (
    "Protocol: each call is a CUDA graph, so Python's time does not count. The L2 cache is overwritten before each "
    "call. The time is the median of five rounds, and each round runs the kernels in a new order."
)
#: What a row without a rate has measured instead.
HOST = "Host time is the time that Python and C++ take until a call is queued, without a CUDA graph."
#: How the probes of `benchmarks/ladder.py` time a call, unless they use the protocol of the rungs.
BURST = "Protocol: each call comes after a pause and finds its inputs in memory, not in the L2 cache."
#: What is said of a rung that is newer than that.
MISSING = "Not measured yet"
#: Functions of a rung that are about it and not of it, besides those behind `CHECKS`.
AROUND = {"picture", "places", "blocks_touched", "print_winners"}
#: How the part of a rung's text begins that explains its figures.
LESSON = "**What it gained, and why.** "
#: Further measurements of a rung: the probe of `benchmarks/ladder.py`, and what it is.
LOOKS = {
    5: [("groups", "Groups of different heights")],
    6: [("configs", "Each config")],
    9: [("epilogues", "Each epilogue, and the product alone")],
    10: [
        ("tiles", "Each tile, timed alone, after a pause"),
        ("alignment", "Rows that begin at multiples of 128, 64 and 16 bytes"),
    ],
}
#: Pictures that commands of gemmery draw, and what they show.
COMMANDS = {
    3: [("roofline 4096 4096 128 4096 4096 512 4096 4096 4096 --dtype fp16 --device H200",
         "A product of 4096 x 4096 x K under the roofline of an H200.")],
    4: [("indices 100 70 40 --tile 64x64x32 --pid 3 --device H200",
         "The pointers of one program, and the elements that its masks disable.")],
    5: [("order 8192 8192 4096 --tile 128x128x64 --device H200",
         "Both orders on an H200: the time of each tile, and the bytes read from memory."),
        ("order 8192 8192 4096 --tile 128x128x64 --device \"RTX 3090\"",
         "The same on a GPU with a tenth of the L2 cache and a fifth of the bandwidth.")],
}  # fmt: skip


@dataclass(frozen=True)
class Rung:
    """A tutorial, taken apart."""

    number: int
    path: Path

    @cached_property
    def text(self) -> str:
        """The file."""
        return self.path.read_text(encoding="utf-8")

    @cached_property
    def tree(self) -> ast.Module:
        """The file, parsed."""
        return ast.parse(self.text)

    @property
    def title(self) -> str:
        """Its heading, without the rung's number."""
        first = (ast.get_docstring(self.tree) or "").split("\n", 1)[0]
        name = first.removeprefix(f"Rung {self.number}: ").removesuffix(".")
        return name[0].upper() + name[1:]

    @property
    def told(self) -> str:
        """All that it says of itself below its heading."""
        return (ast.get_docstring(self.tree) or "").split("\n", 1)[1].strip()

    @cached_property
    def _told(self) -> tuple[str, str]:
        """Its explanation, and what it says of its figures, as Markdown with links."""
        lines = self.told.split("\n")
        text = "\n".join(line if line.startswith("    ") else _linked(line) for line in lines)
        story, _, lesson = text.partition(LESSON)
        return story.strip(), lesson.strip()

    @property
    def story(self) -> str:
        """Its explanation, as Markdown with links."""
        return self._told[0]

    @property
    def lesson(self) -> str:
        """The text about its figures."""
        return self._told[1]

    def code(self, part: str) -> str:
        """The source of a part of it.

        Args:
            part: "kernel", its kernels and what they are called by; "course", questions and exercises; "check", the
                checks and measurements around them; "solutions", the solutions of its exercises.
        """
        lines = self.text.splitlines()
        first = self.tree.body[0].end_lineno or 0  # behind the explanation
        kept: list[str] = []
        for node in self.tree.body[1:]:
            last = node.end_lineno or 0
            if self._part(node) == part:
                # With its decorators, and with the comments and the empty lines above it.
                kept += lines[first:last]
            first = last
        return re.sub(r"\n{4,}", "\n\n\n", "\n".join(kept)).strip()

    def _part(self, node: ast.stmt) -> str:
        heads = (COURSE, CHECKS, SOLUTIONS)
        begun = [line for line, text in enumerate(self.text.splitlines(), 1) if text in heads]
        passed = sum(line < node.lineno for line in begun)
        if passed == 1:
            return "course"
        if passed == len(heads) and not isinstance(node, ast.If):
            return "solutions"
        around = isinstance(node, ast.Import | ast.ImportFrom | ast.If) or (
            isinstance(node, ast.FunctionDef) and node.name in AROUND
        )
        return "check" if passed > 1 or around else "kernel"

    @cached_property
    def tasks(self) -> list[list[ast.FunctionDef]]:
        """Its exercises: the function to write, a solution, and its check."""
        functions = {node.name: node for node in self.tree.body if isinstance(node, ast.FunctionDef)}
        calls = [
            node
            for node in ast.walk(self.tree)
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "Exercise"
        ]
        return [[functions[ast.unparse(argument)] for argument in call.args] for call in calls]

    @property
    def exercises(self) -> list[tuple[str, str, str]]:
        """Its exercises: what is asked, the source of the function to write, and that of a solution."""
        return [
            ((ast.get_docstring(stub) or "").partition(": ")[2], self.source(stub), self.source(solution))
            for stub, solution, _ in self.tasks
        ]

    def source(self, node: ast.FunctionDef) -> str:
        """Of a function."""
        return "\n".join(self.text.splitlines()[node.lineno - 1 : node.end_lineno])


def _linked(line: str) -> str:
    """A line of text, with the pages and rungs that it names as links."""
    line = re.sub(r"\bdocs/([\w-]+)\.md\b", r"[docs/\1.md](../\1.md)", line)
    return re.sub(r"\brung (\d+)\b", lambda m: f"[rung {m[1]}]({int(m[1]):02}.md)", line)


def rungs() -> list[Rung]:
    """All rungs, from the first to the last."""
    return [Rung(number, path) for number, path in sorted(ladder.tutorial_files().items())]


def place(rung: Rung) -> str:
    """Its page, beside those of the others."""
    return f"{rung.number:02}.md"


# --- what was measured ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Recorded:
    """What runs of the ladder on a GPU have measured.

    Attributes:
        header: of the last run.
        records: of the rungs.
        measured: what ran where and when, of rungs that another run has measured.
    """

    header: dict[str, Any]
    records: dict[int, ladder.Record]
    measured: dict[int, dict[str, Any]] = field(default_factory=dict)

    def line(self, number: int | None = None) -> str:
        """What ran where and when, of a rung or of the last run."""
        head = self.header if number is None else self.measured.get(number, self.header)
        return (
            f"{head['gpu']}, torch {head['torch']}, Triton {head['triton']}, CUDA {head['cuda']}, commit "
            f"{head['commit']}, {head['date'][:10]}"
        )


def recorded() -> Recorded:
    """What is recorded in the repository."""
    data = json.loads(RECORDED.read_text(encoding="utf-8"))
    rungs = data.pop("rungs")
    measured = {record["number"]: record.pop("measured") for record in rungs if "measured" in record}
    records = [ladder.read_record(json.dumps(record)) for record in rungs]
    return Recorded(data, {record.number: record for record in records}, measured)


def _ratio(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def gains(record: ladder.Record) -> str:
    """The table of a rung's gains: ratios of speed, above 1 where the rung is faster."""
    found = ladder.gains(record.rows)
    beside = {"over the previous rung": "over_before", "over torch": "over_torch", "over a copy": "over_copy"}
    shown = [
        name for name, field in beside.items() if any(getattr(gain, field) is not None for gain in found)
    ]
    lines = [f"| shape | time | rate | {' | '.join(shown)} |", "| --- |" + " ---: |" * (2 + len(shown))]
    for gain in found:
        rate = "" if gain.rate is None else f"{gain.rate:.0f}\N{NO-BREAK SPACE}{gain.unit}"
        ratios = " | ".join(_ratio(getattr(gain, beside[name])) for name in shown)
        lines.append(f"| {gain.shape} | {gain.time_us:.1f}\N{NO-BREAK SPACE}µs | {rate} | {ratios} |")
    return "\n".join(lines)


def others(record: ladder.Record) -> str:
    """The table of what a rung measures besides: microseconds, method by method; empty where there is nothing."""
    times: dict[str, dict[str, float]] = {}
    for row in record.rows:
        if row.role == "other" and row.time_us is not None:
            times.setdefault(row.name, {})[row.shape] = row.time_us
    if not times:
        return ""
    shapes = list(dict.fromkeys(shape for found in times.values() for shape in found))
    lines = [f"| other kernels, µs | {' | '.join(shapes)} |", "| --- |" + " ---: |" * len(shapes)]
    for name, found in times.items():
        cells = " | ".join(f"{found[shape]:.1f}" if shape in found else "" for shape in shapes)
        lines.append(f"| {name} | {cells} |")
    return "\n".join(lines)


def looks(number: int) -> Iterator[str]:
    """Tables of further measurements of a rung: microseconds, method by method."""
    probes = json.loads(PROBES.read_text(encoding="utf-8"))
    for name, title in LOOKS.get(number, ()):
        if name not in probes:
            continue
        shapes = {
            shape.removeprefix("burst "): found["us"]
            for shape, found in probes[name]["shapes"].items()
            if not shape.startswith("steady")
        }
        methods = dict.fromkeys(method for times in shapes.values() for method in times)
        lines = [f"| µs | {' | '.join(shapes)} |", "| --- |" + " ---: |" * len(shapes)]
        for method in methods:
            cells = [f"{times[method]:.1f}" if method in times else "" for times in shapes.values()]
            lines.append(f"| {method} | {' | '.join(cells)} |")
        table = "\n".join(lines)
        how = BURST if any(shape.startswith("burst") for shape in probes[name]["shapes"]) else PROTOCOL
        where = Recorded(probes[name]["measured"], {}).line()
        yield _folded(title, f"{table}\n\n{how} Measured by `benchmarks/ladder.py` on {where}.")


@functools.cache
def printed() -> dict[int, tuple[str, str]]:
    """The output of each rung on the GPU where it was measured, with the place and the date.

    A rung whose code has changed since then has none.
    """
    found = json.loads(PRINTED.read_text(encoding="utf-8"))["rungs"]
    digests = {rung.number: code_digest(rung.path) for rung in rungs()}
    return {
        each["number"]: (each["text"], Recorded(each["measured"], {}).line())
        for each in found
        if digests.get(each["number"]) == each["code"]
    }


# --- what is asked --------------------------------------------------------------------------------------------------


@functools.cache
def asked() -> dict[int, list[tuple[str, str]]]:
    """The questions of each rung, with their answers, which the rungs compute."""
    # To import a rung turns Triton's interpreter on, so another process does it.
    program = (
        "import json, _common\n"
        f"rungs = [_common.rung(number) for number in {[rung.number for rung in rungs()]}]\n"
        "print(json.dumps({r.NUMBER: [(q.text, q.answer()) for q in r.QUESTIONS] for r in rungs}))"
    )
    path = os.pathsep.join(
        [str(ROOT / "src"), str(ROOT / "tutorials"), *filter(None, [os.environ.get("PYTHONPATH")])]
    )
    done = subprocess.run(
        [sys.executable, "-B", "-c", program], capture_output=True, encoding="utf-8", check=True,
        env={**os.environ, "PYTHONPATH": path, "TRITON_INTERPRET": "1"},
    )  # fmt: skip
    found = json.loads(done.stdout.splitlines()[-1])
    return {
        int(number): [(text, answer) for text, answer in questions] for number, questions in found.items()
    }


def _numbered(lines: list[str]) -> str:
    return "\n".join(f"{number}. {_linked(line)}" for number, line in enumerate(lines, 1))


def _folded(summary: str, text: str) -> str:
    """Something that is shown when the reader asks for it."""
    return f'<details markdown="1">\n<summary>{summary}</summary>\n\n{text}\n\n</details>'


def exercises(rung: Rung) -> Iterator[str]:
    """A rung's exercises."""
    yield (
        f"Write the function in `tutorials/{rung.path.name}`. The file checks it: "
        f"`python tutorials/{rung.path.name} --exercise 1`."
    )
    for number, (text, stub, solution) in enumerate(rung.exercises, 1):
        yield f"**{number}.** {text[:1].upper()}{text[1:]}"
        yield f"```python\n{stub}\n```"
        yield _folded("A solution", f"```python\n{solution}\n```")


# --- what the compiler made of it -----------------------------------------------------------------------------------


def _waits(waits: list[str]) -> str:
    """Which products a K step waits for."""
    if not waits:
        return "each by itself"
    left = [int(wait.rpartition("x")[2], 16) for wait in waits if wait.startswith("WARPGROUP")]
    said = "all but its own" if 1 in left else "all"
    return f"{said}, {len(left)} times" if len(left) > 1 else said


def compiled(number: int) -> str:
    """The table of what the compiler made of a rung's kernels; empty where nothing is known."""
    data = json.loads(CODE.read_text(encoding="utf-8"))
    found = [kernel for kernel in data["kernels"] if kernel["rung"] == number]
    if not found:
        return ""
    lines = [
        "| kernel | registers | spilled bytes | KB shared | programs on an SM | moves of a K step | waits for products "
        "| other instructions |",
        "| --- | ---: | ---: | ---: | ---: | --- | --- | ---: |",
    ]
    shapes = {kernel["shape"] for kernel in found}
    for kernel in found:
        name = (
            ", ".join(filter(None, [kernel["name"], kernel["shape"] if len(shapes) > 1 else ""]))
            or f"rung {number}"
        )
        moves = ", ".join(
            f"{move['count']} x {move['opcode']}" for move in kernel["moves"] if move["kind"] != "read"
        )
        lines.append(
            f"| {name} | {kernel['registers']} | {kernel['spilled'] or ''} | {kernel['shared'] / 1024:.0f} | "
            f"{kernel['programs']} | {moves or 'by another warp'} | {_waits(kernel['waits'])} | {kernel['others']} |"
        )
    said = (
        f"Compiled for Hopper by Triton {data['triton']}; registers and instructions are those of a thread. The last "
        "column is the number of instructions of a K step, without moves and products. `LDGSTS` copies to shared "
        "memory, `UTMALDG` is a request to the TMA unit, `LDG` loads into registers, `STS` writes registers to shared "
        "memory, and `LDL` and `STL` access spilled registers. `benchmarks/ladder_code.py` generates this table "
        "without a GPU. `gemmery inspect` shows the same for the library's kernels, with the instructions."
    )
    return "\n".join(lines) + f"\n\n{said}"


# --- the pages ------------------------------------------------------------------------------------------------------


def page(rung: Rung, run: Recorded) -> str:
    """A rung's page."""
    questions = asked().get(rung.number, [])
    table = compiled(rung.number)
    return "\n\n".join(
        part
        for part in (
            f"# {rung.number} · {rung.title}",
            f"`tutorials/{rung.path.name}`; run it with `gemmery ladder {rung.number}`.",
            drawings.shown(rung.number),
            rung.story,
            *(f"{text}\n\n<!-- picture: {command} -->" for command, text in COMMANDS.get(rung.number, ())),
            "## Predict before you read on" if questions else "",
            _numbered([text for text, _ in questions]),
            _folded("Answers", _numbered([answer for _, answer in questions])) if questions else "",
            "## Gain",
            *gained(rung, run),
            *looks(rung.number),
            rung.lesson,
            *output(rung),
            "## Compiled code" if table else "",
            table,
            "## The kernel",
            _code(rung.code("kernel")),
            "## Exercises" if rung.exercises else "",
            *(exercises(rung) if rung.exercises else ()),
            "## Check and measurement",
            _code(rung.code("check")),
        )
        if part
    )


def output(rung: Rung) -> Iterator[str]:
    """The output of a rung, and its notebook, which shows it as well."""
    name = f"{rung.path.stem}.ipynb"
    if found := printed().get(rung.number):
        text, where = found
        yield _folded("Output", f"```text\n{text.strip()}\n```\n\n{where}.")
        yield f'<a href="../notebooks/{name}" download>{name}</a> contains this rung as a notebook, with this output.'
    else:
        yield f'<a href="../notebooks/{name}" download>{name}</a> contains this rung as a notebook, without output.'


def _code(text: str) -> str:
    """A block of code, with rules that fit on a phone."""
    return f"```python\n{re.sub(r'^# -+$', '# ' + 40 * '-', text, flags=re.MULTILINE)}\n```"


def gained(rung: Rung, run: Recorded) -> tuple[str, ...]:
    """The tables of what a rung has measured; or that the recorded run was before it was there."""
    record = run.records.get(rung.number)
    if record is None:
        return (f"{MISSING}. The other rungs were measured on {run.line()}.",)
    where = run.line(rung.number)
    host = " " + HOST if any(gain.rate is None for gain in ladder.gains(record.rows)) else ""
    measured = (
        f"Ratios compare speeds within this run: above 1, the rung is faster. {PROTOCOL}{host} Measured by "
        f"`tutorials/{rung.path.name}` on {where}."
    )
    return gains(record), others(record), measured


def overview(run: Recorded) -> str:
    """The ladder's first page: all rungs, and what each gained at its largest product."""
    text = (ROOT / "docs" / "hooks" / "ladder.md").read_text(encoding="utf-8")
    return text.format(
        picture=drawings.of_all(run.records),
        table="\n".join(_overview_rows(run)),
        line=run.line(),
        sizes=over_sizes(),
        protocol=PROTOCOL,
        burst=BURST,
        apart=_apart(run),
    )


def _apart(run: Recorded, shape: str = "8192x8192x8192") -> str:
    """How far the runs of the rungs are apart, by the one call that most of them time."""
    times = [
        row.time_us
        for record in run.records.values()
        for row in record.rows
        if (row.role, row.shape) == ("torch", shape) and row.time_us is not None
    ]
    return f"torch's product of {shape} takes {min(times):.0f} to {max(times):.0f} µs in {len(times)} of them"


def over_sizes() -> str:
    """The picture of speed over size, with what ran where and when."""
    data = json.loads(SIZES.read_text(encoding="utf-8"))
    return f"{drawings.of_sizes(data['sizes'])}\n\n{Recorded(data, {}).line()}."


def _overview_rows(run: Recorded) -> Iterator[str]:
    yield "| rung | shape | time in its own run | over the previous rung, same run | over torch, same run |"
    yield "| --- | --- | ---: | ---: | ---: |"
    for rung in rungs():
        name = f"[{rung.number} · {rung.title}]({place(rung)})"
        record = run.records.get(rung.number)
        if record is None:
            yield f"| {name} | {MISSING.lower()} | | | |"
            continue
        found = [gain for gain in ladder.gains(record.rows) if gain.rate is not None]
        # Of rungs that are about the weight's memory, what they are for.
        shown = next((gain for gain in found if rung.number > 10), max(found, key=lambda gain: gain.time_us))
        ratios = " | ".join(map(_ratio, (shown.over_before, shown.over_torch)))
        yield f"| {name} | {shown.shape} | {shown.time_us:.0f}\N{NO-BREAK SPACE}µs | {ratios} |"


def pages() -> dict[str, str]:
    """All pages of the ladder: their places on the site, and their texts."""
    run = recorded()
    made = {f"ladder/{place(rung)}": page(rung, run) for rung in rungs()}
    return {"ladder/index.md": overview(run), **made}
