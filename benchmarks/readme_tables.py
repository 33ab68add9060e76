"""Write the tables of benchmarks/results/*.json: a few lines between README.md's two marks, all suites between those of
docs/results.md, every row in RESULTS.md. Where there are results of grouped.py, sparse.py, blocks.py, all_reduce.py,
sharded_rows.py, sharded_model.py, peers.py, generation.py, compiled.py, linear_cross_entropy.py or lora.py, theirs go
between the marks of the page that is about them.

python benchmarks/readme_tables.py           rewrite all
python benchmarks/readme_tables.py --check   exit 1 if one is out of date
"""

import argparse
import itertools
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks import (  # noqa: E402
    all_reduce_summary,
    grouped_summary,
    peers_summary,
    sharded_model_summary,
    sharded_rows_summary,
    sparse_summary,
    training_summary,
)
from benchmarks import compiled_summary as of_blocks  # noqa: E402
from benchmarks import lowbit as packed  # noqa: E402
from benchmarks.records import (  # noqa: E402
    RESULTS,
    Bar,
    Data,
    bar_of,
    groups,
    kind,
    parts,
    peers,
    read_models,
    read_results,
    regimes,
    row_round,
    run_line,
    three,
    two_groups,
    versions,
)  # fmt: skip
from gemmery.lab import suites  # noqa: E402
from gemmery.lab.display import left_out, ratio  # noqa: E402
from gemmery.lab.results import GAP  # noqa: E402
from gemmery.lab.suites import Row  # noqa: E402

BEGIN, END = "<!-- results:begin -->", "<!-- results:end -->"
TWO = "‡"
NONE = "No results yet: `make bench` makes them."
ABOUT = (
    "A ratio is the peer's time divided by gemmery's: the median over the rounds, with the smallest and the largest in "
    "parentheses. Above 1, gemmery is faster. A time is from the round with the median ratio to the first peer, with "
    f"the shortest and the longest in parentheses. {TWO} marks rows whose rounds form two groups: gemmery's times have "
    f"a gap of over {GAP:.0%}, with two rounds or more on either side. The lines below the table list both groups. The "
    "ratio of such a row is more meaningful than its time."
)


def _cell(text: str) -> str:
    """A text as one cell: neither bars nor line ends may split it."""
    return " ".join(text.replace("|", "\\|").split())


def _table(head: list[str], rows: list[list[str]], columns: str) -> str:
    """A table whose columns are aligned as their letters say, l or r; the last letter stands for the rest."""
    letters = columns + columns[-1] * (len(head) - len(columns))
    rule = ["---:" if letter == "r" else "---" for letter in letters]
    return "\n".join(f"| {' | '.join(line)} |" for line in [head, rule, *rows])


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
    return _table(head, lines, "lrr")


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
                f"{figures['worst']:.3f} ({_cell(figures['worst_row'])})", kind(result), regime, count + missing,
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
        lines.append(["", _cell(name), found, _duration(shown), base_time, memory])
    lines[0][0] = _cell(entry["name"])
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
    return f"{_table(head, lines, 'llrrrr')}\n\n{places}"


def lowbit(results: Sequence[Data]) -> list[str]:
    """The tables of packed weights: the formats, and fused products against bare ones."""
    texts = []
    formats = [result for result in results if result["suite"] == "lowbit_formats"]
    if lines := packed.format_rows(formats):
        texts += [_table(packed.format_heading(formats), lines, "llr"), packed.ABOUT_FORMATS]
    fused = [result for result in results if result["suite"] == "lowbit_fused"]
    if lines := packed.fused_rows(fused):
        texts += [_table(packed.FUSED_HEADING, lines, "lllr"), packed.geomeans(fused)]
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
            _table(head, [line for result in results for line in summary_rows(result)], "llrrrllrl"),
            "\n".join(places),
            *lowbit(results),
            *([models(of_models)] if of_models else []),
        ]
    )


# --- products of groups ---------------------------------------------------------------------------------------------


def grouped(results: Sequence[Data]) -> str:
    """Everything between the marks of docs/grouped.md."""
    head, lines = grouped_summary.class_lines(results)
    return "\n\n".join([_table(head, lines, "lrr"), grouped_summary.ABOUT, grouped_summary.places(results)])


def grouped_sections(results: Sequence[Data]) -> list[str]:
    """The headings and tables of all rows, by version of Triton."""
    return [
        "\n\n".join([
            f"## grouped, Triton {version}",
            _table(
                grouped_summary.ROW_HEADING,
                [[_cell(cell) for cell in line] for line in grouped_summary.row_lines(entries)],
                "lllrlrrrl",
            ),
        ])
        for version, entries in grouped_summary.pooled(results).items()
    ]  # fmt: skip


# --- sparse weights -------------------------------------------------------------------------------------------------


def sparse(results: Sequence[Data], page: str) -> str:
    """Everything between the marks of docs/sparse.md or docs/blocks.md."""
    head, lines = sparse_summary.page_lines(results, page)
    columns = "ll" + "r" * (len(head) - 4) + "lr"
    where = sparse_summary.places(sparse_summary.of_page(results, page))
    return "\n\n".join([_table(head, lines, columns), sparse_summary.ABOUT, where])


# --- several ranks --------------------------------------------------------------------------------------------------


def of_ranks(sums: Sequence[Data], rows: Sequence[Data], model: Sequence[Data]) -> str:
    """Everything between the marks of docs/distributed.md."""
    parts = []
    if sums:
        table = _table(all_reduce_summary.HEAD, all_reduce_summary.lines(sums), "lrlrrrr")
        parts += ["### Sums", table, all_reduce_summary.ABOUT, all_reduce_summary.places(sums)]
    if rows:
        table = _table(sharded_rows_summary.HEAD, sharded_rows_summary.lines(rows), "lrrlrrrr")
        parts += ["### Rows", table, sharded_rows_summary.ABOUT, sharded_rows_summary.places(rows)]
    if model:
        table = _table(sharded_model_summary.HEAD, sharded_model_summary.lines(model), "lrlrr")
        parts += ["### Model", table, sharded_model_summary.about(model), sharded_model_summary.places(model)]
    return "\n\n".join(parts)


# --- other libraries ------------------------------------------------------------------------------------------------


def of_peers(products: Sequence[Data], steps: Sequence[Data]) -> str:
    """Everything between the marks of docs/when-to-use-what.md."""
    parts = []
    if products:
        table = _table(peers_summary.HEAD, peers_summary.lines(products), "llrrr")
        parts += ["### Products", table, peers_summary.ABOUT, peers_summary.places(products)]
    for result in steps:
        table = _table(peers_summary.STEPS_HEAD, peers_summary.step_lines(result), "lr")
        parts += ["### A model", table, peers_summary.ABOUT_STEPS, peers_summary.bars(result)]
        parts.append(peers_summary.places([result]))
    return "\n\n".join(parts)


def of_training(results: Sequence[Data], name: str) -> str:
    """Everything between the marks of docs/training.md or docs/adapters.md; "" where nothing was measured."""
    s = training_summary
    head, lines, about, steps, align = {
        "training": (s.LOSS_HEAD, s.loss_lines(results), s.LOSS_ABOUT, "time-", "llrrrr"),
        "adapters": (s.LORA_HEAD, s.lora_lines(results), s.LORA_ABOUT, "lora-time", "llrrrrr"),
    }[name]
    return "\n\n".join([_table(head, lines, align), about, s.places(results, steps)]) if lines else ""


# --- compiled models ------------------------------------------------------------------------------------------------


def of_compiled(results: Sequence[Data]) -> str:
    """Everything between the marks of docs/compile.md."""
    return "\n\n".join([
        _table(of_blocks.HEAD, of_blocks.lines(results), "lr"), of_blocks.ABOUT,
        _table(of_blocks.PRODUCTS, of_blocks.product_lines(results), "lr"), of_blocks.ABOUT_PRODUCTS,
        of_blocks.places(results),
    ])  # fmt: skip


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
            found.append(f"{_cell(row['name'])} ({', '.join(spans)})")
    return f"{TWO} Rounds of gemmery in two groups, {regime}: {'; '.join(found)}." if found else ""


def _roofline(row: Data, regime: str, name: str) -> str:
    shares = row["summary"].get(regime, {}).get("roofline", {})
    return f"{shares[name]:.0%}" if name in shares else ""


def table_row(row: Data, result: Data) -> list[str]:
    """One row's line. Times are those of the first regime."""
    ours, peers, shown = result["ours"], result["peers"], regimes(result)
    mark = f" {TWO}" if _two(row, shown[0]) else ""
    cells = [_cell(row["name"]) + mark, Row.of(row).shape]
    if "error" in row:
        return [*cells, f"failed: {_cell(row['error'])}", *[""] * (1 + len(peers) * (1 + len(shown)))]
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
        f"worst {figures['worst']:.3f} ({_cell(figures['worst_row'])}), {figures['rows']} rows."
        for name, summary in parts(result)
        for regime, each in summary.items()
        for peer, figures in each.items()
    ]
    lines += [f"{_cell(line)}." for line in left_out(result["rows"])]
    lines += [line] if (line := in_two_groups(result["rows"], shown[0])) else []
    lines.append(f"{run_line(result)}.")
    if "host_us" in result:
        host = ", ".join(f"{name} {us:.1f} µs" for name, us in result["host_us"].items())
        lines.append(f"Host time per call: {host}.")
    table = _table(head, [table_row(row, result) for row in result["rows"]], "llr")
    return "\n\n".join([f"## {result['suite']}, {kind(result)}", table, "\n".join(f"- {x}" for x in lines)])


def every_row(results: list[Data], of_groups: Sequence[Data] = (), of_sparse: Sequence[Data] = ()) -> str:
    """The text of RESULTS.md."""
    title = "# Results, row by row"
    origin = "Written by `benchmarks/readme_tables.py` from the files under `benchmarks/results/`."
    sections = [section(result) for result in results] or [NONE]
    sections += [*grouped_sections(of_groups), *map(section, of_sparse)]
    return "\n\n".join([title, f"{ABOUT} {origin}", *sections]) + "\n"


# --- the files ------------------------------------------------------------------------------------------------------


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
    parser.add_argument("--readme", type=Path, default=ROOT / "README.md", metavar="FILE")
    parser.add_argument("--page", type=Path, default=ROOT / "docs" / "results.md", metavar="FILE")
    parser.add_argument("--grouped", type=Path, default=ROOT / "docs" / "grouped.md", metavar="FILE")
    parser.add_argument("--sparse", type=Path, default=ROOT / "docs" / "sparse.md", metavar="FILE")
    parser.add_argument("--blocks", type=Path, default=ROOT / "docs" / "blocks.md", metavar="FILE")
    parser.add_argument("--distributed", type=Path, default=ROOT / "docs" / "distributed.md", metavar="FILE")
    parser.add_argument("--peers", type=Path, default=ROOT / "docs" / "when-to-use-what.md", metavar="FILE")
    parser.add_argument("--training", type=Path, default=ROOT / "docs" / "training.md", metavar="FILE")
    parser.add_argument("--adapters", type=Path, default=ROOT / "docs" / "adapters.md", metavar="FILE")
    parser.add_argument("--compile", type=Path, default=ROOT / "docs" / "compile.md", metavar="FILE")
    parser.add_argument("--rows", type=Path, default=ROOT / "benchmarks" / "RESULTS.md", metavar="FILE")
    options = parser.parse_args(arguments)
    try:
        results = read_results(options.results)
        of_sparse = sparse_summary.read(options.results)
        readme = rewritten(options.readme, few_lines([*results, *of_sparse]))
        page = rewritten(options.page, summary(results, read_models(options.results)))
        of_groups = grouped_summary.read(options.results)
        pages = [(options.readme, readme), (options.page, page)]
        if of_groups and options.grouped.exists():
            pages.append((options.grouped, rewritten(options.grouped, grouped(of_groups))))
        for name, path in (("sparse", options.sparse), ("blocks", options.blocks)):
            if sparse_summary.of_page(of_sparse, name) and path.exists():
                pages.append((path, rewritten(path, sparse(of_sparse, name))))
        kinds = (all_reduce_summary, sharded_rows_summary, sharded_model_summary)
        of_kinds = [x.read(options.results) for x in kinds]
        if any(of_kinds) and options.distributed.exists():
            pages.append((options.distributed, rewritten(options.distributed, of_ranks(*of_kinds))))
        products, generation = peers_summary.read(options.results)
        if (products or generation) and options.peers.exists():
            pages.append((options.peers, rewritten(options.peers, of_peers(products, generation))))
        steps = training_summary.read(options.results)
        for name, path in (("training", options.training), ("adapters", options.adapters)):
            if path.exists() and (text := of_training(steps, name)):
                pages.append((path, rewritten(path, text)))
        compiled = of_blocks.read(options.results)
        if compiled and options.compile.exists():
            pages.append((options.compile, rewritten(options.compile, of_compiled(compiled))))
    except ValueError as error:
        print(f"readme_tables: {error}", file=sys.stderr)
        return 2
    stale = []
    for path, wanted in (*pages, (options.rows, every_row(results, of_groups, of_sparse))):
        if path.exists() and path.read_text(encoding="utf-8") == wanted:
            continue
        if options.check:
            stale.append(path.name)
        else:
            path.write_text(wanted, encoding="utf-8")
    if stale:
        print(f"out of date: {', '.join(stale)}; run benchmarks/readme_tables.py", file=sys.stderr)
    return int(bool(stale))


if __name__ == "__main__":
    sys.exit(main())
