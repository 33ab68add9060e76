"""The ladder's pages: text and code of each rung from its file, its gains from the recorded run, and its picture."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from docs.hooks import drawings
from docs.hooks.repository import ROOT
from gemmery.lab import ladder

#: What `benchmarks/rungs.py` wrote.
RECORDED = ROOT / "benchmarks" / "results" / "ladder" / "rungs.json"
#: What is said of a rung that is newer than that.
MISSING = "Not measured yet"
#: Functions of a rung that are about it and not of it.
AROUND = {"check", "bench", "main", "picture", "places", "blocks_touched", "print_winners", "results", "few_rows",
          "many_rows", "compared"}  # fmt: skip


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
    def story(self) -> str:
        """Its explanation, as Markdown with links."""
        story = (ast.get_docstring(self.tree) or "").split("\n", 1)[1].strip()
        return "\n".join(line if line.startswith("    ") else _linked(line) for line in story.split("\n"))

    def code(self, kernels: bool) -> str:
        """The source of its kernels and what they are called by, or of the checks and measurements around them."""
        lines = self.text.splitlines()
        first = self.tree.body[0].end_lineno or 0  # behind the explanation
        kept: list[str] = []
        for node in self.tree.body[1:]:
            last = node.end_lineno or 0
            if _is_around(node) is not kernels:
                # With its decorators, and with the comments and the empty lines above it.
                kept += lines[first:last]
            first = last
        return re.sub(r"\n{4,}", "\n\n\n", "\n".join(kept)).strip()


def _linked(line: str) -> str:
    """A line of text, with the pages and rungs that it names as links."""
    line = re.sub(r"\bdocs/([\w-]+)\.md\b", r"[docs/\1.md](../\1.md)", line)
    return re.sub(r"\brung (\d+)\b", lambda m: f"[rung {m[1]}]({int(m[1]):02}.md)", line)


def _is_around(node: ast.stmt) -> bool:
    if isinstance(node, ast.FunctionDef):
        return node.name in AROUND
    return isinstance(node, ast.Import | ast.ImportFrom | ast.If)


def rungs() -> list[Rung]:
    """All rungs, from the first to the last."""
    return [Rung(number, path) for number, path in sorted(ladder.tutorial_files().items())]


def place(rung: Rung) -> str:
    """Its page, beside those of the others."""
    return f"{rung.number:02}.md"


# --- what was measured ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Recorded:
    """One run of the ladder on a GPU."""

    header: dict[str, Any]
    records: dict[int, ladder.Record]

    @property
    def line(self) -> str:
        """What ran where and when."""
        head = self.header
        return (
            f"{head['gpu']}, torch {head['torch']}, Triton {head['triton']}, CUDA {head['cuda']}, commit "
            f"{head['commit']}, {head['date'][:10]}"
        )


def recorded() -> Recorded:
    """The run that is recorded in the repository."""
    data = json.loads(RECORDED.read_text(encoding="utf-8"))
    records = [ladder.read_record(json.dumps(record)) for record in data.pop("rungs")]
    return Recorded(data, {record.number: record for record in records})


def _ratio(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def gains(record: ladder.Record) -> str:
    """The table of a rung's gains: ratios of speed, above 1 where the rung is faster."""
    found = ladder.gains(record.rows)
    beside = {"over the rung before": "over_before", "over torch": "over_torch", "over a copy": "over_copy"}
    shown = [
        name for name, field in beside.items() if any(getattr(gain, field) is not None for gain in found)
    ]
    lines = [f"| shape | time | rate | {' | '.join(shown)} |", "| --- |" + " ---: |" * (2 + len(shown))]
    for gain in found:
        rate = "" if gain.rate is None else f"{gain.rate:.0f} {gain.unit}"
        ratios = " | ".join(_ratio(getattr(gain, beside[name])) for name in shown)
        lines.append(f"| {gain.shape} | {gain.time_us:.1f} µs | {rate} | {ratios} |")
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
    lines = [f"| measured besides, µs | {' | '.join(shapes)} |", "| --- |" + " ---: |" * len(shapes)]
    for name, found in times.items():
        cells = " | ".join(f"{found[shape]:.1f}" if shape in found else "" for shape in shapes)
        lines.append(f"| {name} | {cells} |")
    return "\n".join(lines)


# --- the pages ------------------------------------------------------------------------------------------------------


def page(rung: Rung, run: Recorded) -> str:
    """A rung's page."""
    return "\n\n".join(
        part
        for part in (
            f"# {rung.number} · {rung.title}",
            f"`tutorials/{rung.path.name}`; run it with `gemmery ladder {rung.number}`.",
            drawings.shown(rung.number),
            rung.story,
            "## What it gained",
            *gained(rung, run),
            "## The kernel",
            f"```python\n{rung.code(kernels=True)}\n```",
            "## Its check and its measurement",
            f"```python\n{rung.code(kernels=False)}\n```",
        )
        if part
    )


def gained(rung: Rung, run: Recorded) -> tuple[str, ...]:
    """The tables of what a rung has measured; or that the recorded run was before it was there."""
    record = run.records.get(rung.number)
    if record is None:
        return (f"{MISSING}. The other rungs were measured on {run.line}.",)
    measured = f"Ratios are of speed: above 1 the rung is faster. Measured by the file itself on {run.line}."
    return gains(record), others(record), measured


def overview(run: Recorded) -> str:
    """The ladder's first page: all rungs, and what each gained at its largest product."""
    text = (ROOT / "docs" / "hooks" / "ladder.md").read_text(encoding="utf-8")
    return text.format(
        picture=drawings.of_all(run.records), table="\n".join(_overview_rows(run)), line=run.line
    )


def _overview_rows(run: Recorded) -> Iterator[str]:
    yield "| rung | shape | time | over the rung before | over torch |"
    yield "| --- | --- | ---: | ---: | ---: |"
    for rung in rungs():
        name = f"[{rung.number} · {rung.title}]({place(rung)})"
        record = run.records.get(rung.number)
        if record is None:
            yield f"| {name} | {MISSING.lower()} | | | |"
            continue
        found = [gain for gain in ladder.gains(record.rows) if gain.rate is not None]
        largest = max(found, key=lambda gain: gain.time_us)
        ratios = " | ".join(map(_ratio, (largest.over_before, largest.over_torch)))
        yield f"| {name} | {largest.shape} | {largest.time_us:.0f} µs | {ratios} |"


def pages() -> dict[str, str]:
    """All pages of the ladder: their places on the site, and their texts."""
    run = recorded()
    made = {f"ladder/{place(rung)}": page(rung, run) for rung in rungs()}
    return {"ladder/index.md": overview(run), **made}
