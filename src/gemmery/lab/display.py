"""A suite's table while it grows, and its summary."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from . import suites
from .peers import OURS
from .results import Result, summarise
from .suites import Row

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table


class Display(AbstractContextManager["Display"]):
    """A table that grows with the rows over a progress bar; if the output is not a terminal, one line per row."""

    def __init__(self, result: Result, total: int, console: Console | None) -> None:
        from rich.console import Console, Group
        from rich.live import Live
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        self.console = Console() if console is None else console
        self.result = result
        self.peers: list[str] = result.header["peers"]
        self.regimes: list[str] = result.header["protocol"]["regimes"]
        self.table = self._table()
        self.progress = Progress(
            TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
        )
        self.task = self.progress.add_task(result.suite, total=total)
        self.live: Live | None = None
        if self.console.is_terminal:
            view = Group(self.table, self.progress)
            self.live = Live(view, console=self.console, vertical_overflow="visible", refresh_per_second=4)

    def _table(self) -> Table:
        from rich.table import Table

        header = self.result.header
        table = Table(
            title=f"{self.result.suite}, {self.result.dtype}, {header['gpu']}, {header['commit']}",
            caption="a ratio is a peer's time / ours, with its spread over the rounds; – where a peer is left out",
        )
        # A narrow terminal wraps cells instead of truncating them.
        table.add_column("row", overflow="fold")
        table.add_column("M×N×K", overflow="fold")
        for heading in self._headings():
            table.add_column(heading, justify="right", overflow="fold")
        return table

    def _headings(self) -> list[str]:
        times = [f"{OURS} {regime} µs" for regime in self.regimes]
        ratios = [f"{peer} {regime}" for regime in self.regimes for peer in self.peers]
        return [*times, "TFLOP/s", "of roofline", *ratios, "error"]

    def __enter__(self) -> Display:
        if self.live is not None:
            self.live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.live is not None:
            self.live.stop()
        else:
            self.console.print(self.table)
        for line in [*left_out(self.result.rows), *self._summary()]:
            self.console.print(line, highlight=False, markup=False, soft_wrap=True)

    def _summary(self) -> list[str]:
        """A line for the suite and each of its parts that were run, by regime and peer."""
        name = self.result.suite
        lines = summary_lines(name, summarise(self.result.rows))
        for part, (whole, keep) in suites.PARTS.items():
            if whole == name:
                lines += summary_lines(part, summarise(self.result.rows, lambda row, k=keep: k(Row.of(row))))  # type: ignore[misc]
        return lines

    def begin(self, row: Row) -> None:
        """Show which row is running."""
        self.progress.update(self.task, description=row.name)

    def end(self, record: dict[str, Any]) -> None:
        """Add a row's record."""
        from rich.markup import escape

        cells = self._cells(record)
        self.table.add_row(*map(escape, cells))
        self.progress.advance(self.task)
        if self.live is None:
            plan = record.get("plan", "")
            self.console.print("  ".join(cells), plan, markup=False, highlight=False, soft_wrap=True)

    def _cells(self, record: dict[str, Any]) -> list[str]:
        cells = [record["name"], Row.of(record).shape]
        if "error" in record:
            return [*cells, *[""] * (len(self._headings()) - 1), record["error"]]
        summary = record["summary"]
        cells += [
            f"{summary[regime]['us'][OURS]:.1f}" if regime in summary else "" for regime in self.regimes
        ]
        cells += rate(summary)
        cells += [
            ratio(summary, regime, peer) if regime in summary else ""
            for regime in self.regimes
            for peer in self.peers
        ]
        return [*cells, f"{record['errors'][OURS]:.1e}"]


def rate(summary: dict[str, Any]) -> tuple[str, str]:
    """TFLOP/s and the percent of the roofline, in the first regime that has them."""
    figures: dict[str, Any] = next((figures for figures in summary.values() if "tflops" in figures), {})
    tflops = f"{figures['tflops'][OURS]:.1f}" if figures else ""
    return tflops, f"{figures['roofline'][OURS]:.0%}" if "roofline" in figures else ""


def ratio(summary: dict[str, Any], regime: str, peer: str) -> str:
    """The median ratio of a peer with its spread; a dash where the peer was left out."""
    found = summary[regime]["ratio"].get(peer)
    return "–" if found is None else f"{found['median']:.3f} ({found['min']:.3f}–{found['max']:.3f})"


def left_out(rows: list[dict[str, Any]]) -> list[str]:
    """A line for each peer and reason for which it was left out of rows."""
    found: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        for peer, reason in row.get("left_out", {}).items():
            found.setdefault((peer, reason), []).append(row["name"])
    return [
        f"{peer} left out of {', '.join(names) if len(names) < len(rows) else 'all rows'}: {reason}"
        for (peer, reason), names in found.items()
    ]


def summary_lines(name: str, summary: dict[str, dict[str, dict[str, Any]]]) -> list[str]:
    """Geometric mean, 10th percentile and worst row of each regime and peer."""
    return [
        f"{name}, {peer}, {regime}: geometric mean {figures['geomean']:.3f}, 10th percentile {figures['p10']:.3f}, "
        f"worst {figures['worst']:.3f} ({figures['worst_row']}), {figures['rows']} rows"
        for regime, peers in summary.items()
        for peer, figures in peers.items()
    ]
