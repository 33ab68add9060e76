"""The tables of the suites' results: README.md's, those of docs/results.md, and every row for RESULTS.md."""

import itertools
import statistics
from collections.abc import Sequence
from pathlib import Path

from benchmarks import grouped_summary, sparse_summary
from benchmarks import lowbit as packed
from benchmarks.records import (
    Bar,
    Data,
    bar_of,
    cell,
    groups,
    kind,
    parts,
    peers,
    read_models,
    read_results,
    regimes,
    row_round,
    run_line,
    table,
    three,
    two_groups,
    versions,
)
from gemmery.lab import suites
from gemmery.lab.display import left_out, ratio
from gemmery.lab.results import GAP
from gemmery.lab.suites import Row

TWO = "‡"
NONE = "No results yet: `make bench` makes them."
ABOUT = (
    "A ratio is the peer's time divided by gemmery's: the median over the rounds, with the smallest and the largest in "
    "parentheses. Above 1, gemmery is faster. A time is from the round with the median ratio to the first peer, with "
    f"the shortest and the longest in parentheses. {TWO} marks rows whose rounds form two groups: gemmery's times have "
    f"a gap of over {GAP:.0%}, with two rounds or more on either side. The lines below the table list both groups. The "
    "ratio of such a row is more meaningful than its time."
)


def readme(folder: Path) -> str:
    """Everything between the marks of README.md."""
    return few_lines([*read_results(folder), *sparse_summary.read(folder)])


def page(folder: Path) -> str:
    """Everything between the marks of docs/results.md."""
    return summary(read_results(folder), read_models(folder))


def rows(folder: Path) -> str:
    """The text of RESULTS.md."""
    return every_row(read_results(folder), grouped_summary.read(folder), sparse_summary.read(folder))


# --- the README's table ---------------------------------------------------------------------------------------------


def few_lines(results: list[Data]) -> str:
    """Everything between the marks of README.md."""
    if not results:
        return NONE
    found = groups(results)
    shown = versions(found)
    head = ["products and peer", *(f"Triton {version}" for version in shown), "rows"]
    lines = []
    for group, each in found:
        counts = sorted({len(pooled.ratios) for pooled in each.values()})
        cells = [three(each[version].figures) if version in each else "" for version in shown]
        lines.append([group.title, *cells, " or ".join(map(str, counts))])
    return table(head, lines, "lrr")


# --- the summary ----------------------------------------------------------------------------------------------------


def _there(name: str, measured: int) -> int:
    """Rows that a suite has; as many as were measured where there is no such suite any more."""
    return len(suites.load(name)) if name in suites.names() else measured


def _verdict(bar: Bar | None, figures: Data, complete: bool) -> str:
    """A bar, and whether it is met."""
    if bar is None:
        return ""
    met = figures["geomean"] >= bar.geomean and (bar.worst is None or figures["worst"] >= bar.worst)
    worst = "" if bar.worst is None else f", {bar.worst:.2f}"
    verdict = ("met" if complete else "not all rows") if met else "**missed**"
    return f"≥ {bar.geomean:.2f}{worst}: {verdict}"


def summary_rows(result: Data) -> list[list[str]]:
    """A line for the suite and each part of it, by regime and peer."""
    failed = sum("error" in row for row in result["rows"])
    lines = []
    for name, found in parts(result):
        for regime, peer in itertools.product(regimes(result), peers(result)):
            figures = found.get(regime, {}).get(peer)
            if figures is None:
                continue
            there = max(_there(name, figures["rows"]), figures["rows"])
            # By the protocol, some rows are enough in steady.
            complete = figures["rows"] == there or regime == "steady"
            count = str(there) if figures["rows"] == there else f"{figures['rows']} of {there}"
            missing = f", {failed} failed" if failed and name == result["suite"] else ""
            lines.append([
                name.replace("_", " "), peer,
                f"**{figures['geomean']:.3f}**", f"{figures['p10']:.3f}",
                f"{figures['worst']:.3f} ({cell(figures['worst_row'])})", kind(result), regime, count + missing,
                _verdict(bar_of(name, result, regime) if peer == peers(result)[-1] else None, figures, complete),
            ])  # fmt: skip
    return lines


def _duration(seconds: float) -> str:
    for unit, factor in (("s", 1.0), ("ms", 1e3)):
        if seconds * factor >= 1:
            return f"{seconds * factor:.3g} {unit}"
    return f"{seconds * 1e6:.3g} µs"


def model_rows(entry: Data) -> list[list[str]]:
    """A line for each method of an entry of `models.py`, against gemmery or against the bare product.

    A method's time is of the round with the median ratio, and so is the time that it is compared with. The others' are
    medians.
    """
    times = entry["times"]
    base = next((name for name in ("gemmery", "bare") if name in times), None)
    lines = []
    for name, seconds in times.items():
        shown, base_time, found = statistics.median(seconds), "", ""
        if base is not None and name != base:
            pairs = [{name: x, base: y} for x, y in zip(seconds, times[base], strict=True)]
            one = row_round(pairs, [name], base)
            shown, base_time = one[name], _duration(one[base])
            ratios = [pair[name] / pair[base] for pair in pairs]
            found = f"{one[name] / one[base]:.3f} ({min(ratios):.3f}–{max(ratios):.3f})"
        held = entry.get("held_bytes", {}).get(name)
        memory = "" if held is None else f"{held / 2**20:.0f} MiB"
        lines.append(["", cell(name), found, _duration(shown), base_time, memory])
    lines[0][0] = cell(entry["name"])
    return lines


def models(results: Sequence[Data]) -> str:
    """The table of blocks and models, with where it was measured."""
    head = [
        "blocks and models",
        "",
        "ratio",
        "time",
        "time of gemmery, or of the bare product",
        "held for backward",
    ]
    lines = [line for result in results for entry in result["entries"] for line in model_rows(entry)]
    runs: dict[str, list[str]] = {}
    for result in results:
        runs.setdefault(run_line(result), []).append(result["part"])
    places = "\n".join(f"- {line}: {', '.join(names)}." for line, names in runs.items())
    return f"{table(head, lines, 'llrrrr')}\n\n{places}"


def lowbit(results: Sequence[Data]) -> list[str]:
    """The tables of packed weights: the formats, and fused products against bare ones."""
    texts = []
    formats = [result for result in results if result["suite"] == "lowbit_formats"]
    if lines := packed.format_rows(formats):
        texts += [table(packed.format_heading(formats), lines, "llr"), packed.ABOUT_FORMATS]
    fused = [result for result in results if result["suite"] == "lowbit_fused"]
    if lines := packed.fused_rows(fused):
        texts += [table(packed.FUSED_HEADING, lines, "lllr"), packed.geomeans(fused)]
    return texts


def summary(results: list[Data], of_models: Sequence[Data] = ()) -> str:
    """Everything between the marks of docs/results.md."""
    if not results:
        return NONE
    head = [
        "suite",
        "against",
        "geometric mean",
        "10th percentile",
        "worst row",
        "type",
        "regime",
        "rows",
        "bar",
    ]
    runs: dict[str, list[str]] = {}
    for result in results:
        runs.setdefault(run_line(result), []).append(f"{result['suite']} {kind(result)}")
    places = [f"- {line}: {', '.join(names)}." for line, names in runs.items()]
    return "\n\n".join(
        [
            table(head, [line for result in results for line in summary_rows(result)], "llrrrllrl"),
            "\n".join(places),
            *lowbit(results),
            *([models(of_models)] if of_models else []),
        ]
    )


# --- every row ------------------------------------------------------------------------------------------------------


def _time(row: Data, regime: str, name: str) -> str:
    figures = row["summary"].get(regime, {})
    if name not in figures.get("us", {}):
        return ""
    low, high = figures["spread_us"][name]
    return f"{figures['us'][name]:.1f} ({low:.1f}–{high:.1f})"


def _two(row: Data, regime: str) -> tuple[list[float], list[float]] | None:
    """A row's two groups of rounds, in seconds, if it has them."""
    return two_groups(row.get("rounds", {}).get(regime, []))


def in_two_groups(rows: Sequence[Data], regime: str) -> str:
    """The rows whose rounds are in two groups, each with both; empty where there is none."""
    found = []
    for row in rows:
        if both := _two(row, regime):
            spans = [f"{len(group)} at {group[0] * 1e6:.1f}–{group[-1] * 1e6:.1f} µs" for group in both]
            found.append(f"{cell(row['name'])} ({', '.join(spans)})")
    return f"{TWO} Rounds of gemmery in two groups, {regime}: {'; '.join(found)}." if found else ""


def _roofline(row: Data, regime: str, name: str) -> str:
    shares = row["summary"].get(regime, {}).get("roofline", {})
    return f"{shares[name]:.0%}" if name in shares else ""


def table_row(row: Data, result: Data) -> list[str]:
    """One row's line. Times are those of the first regime."""
    ours, peers, shown = result["ours"], result["peers"], regimes(result)
    mark = f" {TWO}" if _two(row, shown[0]) else ""
    cells = [cell(row["name"]) + mark, Row.of(row).shape]
    if "error" in row:
        return [*cells, f"failed: {cell(row['error'])}", *[""] * (1 + len(peers) * (1 + len(shown)))]
    # Ratios first: a narrow screen shows the first columns alone.
    for regime in shown:
        cells += [ratio(row["summary"], regime, peer) if regime in row["summary"] else "" for peer in peers]
    cells += [_time(row, shown[0], name) for name in (ours, *peers)]
    cells.append(_roofline(row, shown[0], ours))
    return cells


def section(result: Data) -> str:
    """The heading, table and summary of one suite in one type."""
    ours, peers, shown = result["ours"], result["peers"], regimes(result)
    head = ["row", "M×N×K", *(f"{peer} / {ours}, {regime}" for regime in shown for peer in peers)]
    head += [*(f"{name} µs ({shown[0]})" for name in (ours, *peers)), "of roofline"]
    lines = [
        f"{name}, {regime}, {peer}: geometric mean **{figures['geomean']:.3f}**, 10th percentile {figures['p10']:.3f}, "
        f"worst {figures['worst']:.3f} ({cell(figures['worst_row'])}), {figures['rows']} rows."
        for name, summary in parts(result)
        for regime, each in summary.items()
        for peer, figures in each.items()
    ]
    lines += [f"{cell(line)}." for line in left_out(result["rows"])]
    lines += [line] if (line := in_two_groups(result["rows"], shown[0])) else []
    lines.append(f"{run_line(result)}.")
    if "host_us" in result:
        host = ", ".join(f"{name} {us:.1f} µs" for name, us in result["host_us"].items())
        lines.append(f"Host time per call: {host}.")
    shown_rows = table(head, [table_row(row, result) for row in result["rows"]], "llr")
    return "\n\n".join(
        [f"## {result['suite']}, {kind(result)}", shown_rows, "\n".join(f"- {x}" for x in lines)]
    )


def every_row(results: list[Data], of_groups: Sequence[Data] = (), of_sparse: Sequence[Data] = ()) -> str:
    """The text of RESULTS.md."""
    title = "# Results, row by row"
    origin = "Written by `benchmarks/readme_tables.py` from the files under `benchmarks/results/`."
    sections = [section(result) for result in results] or [NONE]
    sections += [*grouped_summary.sections(of_groups), *map(section, of_sparse)]
    return "\n\n".join([title, f"{ABOUT} {origin}", *sections]) + "\n"
