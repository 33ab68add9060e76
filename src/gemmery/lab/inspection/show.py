"""An inspection as text: facts, the loop's pipeline, its instructions; of two, side by side with differences marked."""

from __future__ import annotations

import difflib
import io
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import zip_longest
from typing import TYPE_CHECKING

from .code import KINDS, Loop, of_kind
from .pipeline import Run, counts, pipeline
from .report import Inspection
from .source import function_at

if TYPE_CHECKING:
    from rich.console import Console

#: The mark of lines in which inspections differ.
MARK = "≠"


def text(found: Sequence[Inspection], *, listing: bool = False, width: int = 110) -> str:
    """The text that `show` prints."""
    from rich.console import Console

    file = io.StringIO()
    show(found, Console(file=file, width=width), listing=listing)
    return file.getvalue().rstrip("\n")


def show(
    found: Sequence[Inspection], console: Console, *, listing: bool = False, texts: Sequence[str] = ()
) -> None:
    """Print inspections.

    Args:
        found: one, or several of which the differences are marked.
        listing: whether every instruction of the loops is printed.
        texts: which of the compiler's texts are printed after it.
    """
    from rich.table import Table

    for line in dict.fromkeys(map(_heading, found)):
        _say(console, line)
    table = Table(box=None, pad_edge=False)
    table.add_column("")
    for one in found:
        table.add_column(f"{one.config}{'' if one.given else ' (chosen)'}", overflow="fold")
    for name, cells in _rows([facts(one) for one in found]):
        differ = len(set(cells)) > 1
        table.add_row(f"{name}{f' {MARK}' if differ else ''}", *cells, style="bold" if differ else None)
    console.print(table, markup=False, highlight=False)
    _say(console, "")
    if len(found) == 2:
        _side_by_side(console, *found)
    else:
        for one in found:
            _pipeline(console, one)
    for one in found:
        if listing:
            _say(console, f"\n{_title(one, len(found))}")
            for line in _listing(one):
                _say(console, line)
        for name in texts:
            _say(console, f"\n{name} of {one.config}\n{one.texts[name].rstrip()}")
    _say(console, f"\n{_times(found)}")


def _say(console: Console, line: str) -> None:
    console.print(line, markup=False, highlight=False, soft_wrap=True)


def _heading(found: Inspection) -> str:
    copied = f", of copies of {' and '.join(found.copies)}" if found.copies else ""
    return f"{found.problem}{copied}, on {found.problem.device.name}, {found.target}"


def _title(found: Inspection, of: int) -> str:
    return "the loop along K" + (f" of {found.config}" if of > 1 else "")


def _rows(columns: Sequence[dict[str, str]]) -> Iterator[tuple[str, list[str]]]:
    for name in dict.fromkeys(name for column in columns for name in column):
        yield name, [column.get(name, "–") for column in columns]


def facts(found: Inspection) -> dict[str, str]:
    """The facts of an inspection that a table shows, by name."""
    took, room = found.usage, found.problem.device.target.shared
    spills = Counter(i.opcode for i in of_kind(found.code.instructions, "spill"))
    shown = {
        "kernel": f"{found.kernel}, {found.programs} programs of {took.warps} warps",
        "registers": f"{took.registers} a thread",
        "spills": f"{took.spilled} bytes a thread: {_several(spills)}" if took.spilled or spills else "none",
        "shared memory": f"{took.shared:,} of {room:,} bytes"
        + (": more than there are, so that it can't be launched" if took.shared > room else ""),
    }
    if found.buffers:
        shown["its blocks"] = ", ".join(found.buffers)
    if took.tensor_memory:
        shown["tensor memory"] = f"{took.tensor_memory} of 512 columns"
    if found.occupancy is not None:
        held = found.occupancy
        shown["on a multiprocessor"] = (
            f"{held.programs} program{'s' * (held.programs != 1)}, {held.warps} of {held.most} warps, limited by "
            f"{', '.join(held.limited_by)}"
        )
    shown |= _of_loop(found)
    rest = Counter({(m.kind, m.opcode, m.bits): m.count for m in found.moves if not m.in_loop})
    for kind in ("load", "copy", "store"):
        if words := [_move(n, opcode, bits) for (of, opcode, bits), n in rest.items() if of == kind]:
            shown[f"{_SHORT[kind]}, elsewhere"] = ", ".join(words)
    for number, warning in enumerate(found.warnings):
        shown["warning" + f" {number + 1}" * bool(number)] = warning
    for config, why in found.passed.items():
        shown[f"not {config}"] = why
    return shown


_SHORT = {"copy": "global to shared", "load": "global loads", "read": "shared reads", "write": "shared writes",
          "store": "global stores", "spill": "local memory"}  # fmt: skip


def _of_loop(found: Inspection) -> dict[str, str]:
    loop = found.loop
    if loop is None:
        return {"loop along K": "none"}
    c, products = found.config, found.products
    tile = f"{c.block_m}×{c.block_n}×{c.block_k}"
    step = "" if products is None else f": a step of {tile}"
    if products not in (None, 1):
        step = f": {products:g} times what a step of {tile} multiplies"
    shown = {"tensor cores, a pass": f"{_several(found.tensor)}{step}" if found.tensor else "not used"}
    if found.ahead is not None:
        shown["loads ahead"] = f"{found.ahead:g} step{'s' * (found.ahead != 1)}"
    for kind, name in _SHORT.items():
        if words := [_move(m.count, m.opcode, m.bits) for m in found.moves if m.in_loop and m.kind == kind]:
            shown[f"{name}, a pass"] = ", ".join(words)
    shown["instructions, a pass"] = f"{len(loop.body)}: " + ", ".join(
        f"{n} {kind}" for kind, n in counts(loop.body).items()
    )
    if loop.aside:
        shown["in some passes only"] = f"{len(loop.aside)}: " + ", ".join(
            f"{n} {kind}" for kind, n in counts(loop.aside).items()
        )
    return shown


def _several(found: Counter[str]) -> str:
    return ", ".join(f"{n} {opcode}" for opcode, n in found.items()) or "none"


def _move(count: int, opcode: str, bits: int) -> str:
    # An instruction that moves no bits per lane moves blocks: TMA, or a copy into tensor memory.
    return f"{count} {opcode} ({f'{bits} bits a lane' if bits else 'whole blocks'})"


def _lines(loop: Loop | None) -> list[tuple[str, str]]:
    """A pipeline's lines, and the notes beside them."""
    return [(_line(run), run.note) for run in pipeline(loop)] if loop else []


def _line(run: Run) -> str:
    count = f" ×{len(run.instructions)}" if len(run.instructions) > 1 else ""
    return f"{run.kind:6} {run.name}{count}{f'  +{run.between}' if run.between else ''}"


def _pipeline(console: Console, found: Inspection) -> None:
    lines = _lines(found.loop)
    if not lines:
        return
    _say(
        console, "a pass of the loop along K, in order (+n: integers, arithmetic and branches up to the next)"
    )
    width = min(48, max(len(line) for line, _ in lines))
    for line, note in lines:
        _say(console, f"  {line:{width}}  {note}".rstrip())


def _side_by_side(console: Console, left: Inspection, right: Inspection) -> None:
    """Two pipelines, with equal lines beside each other."""
    columns = [[line for line, _ in _lines(one.loop)] for one in (left, right)]
    if not any(columns):
        return
    _say(console, f"a pass of each loop along K, in order ({MARK}: they differ)")
    # The instructions in between nearly always differ.
    first, second = ([line.split("  +")[0] for line in lines] for lines in columns)
    width = max(len(line) for lines in columns for line in lines)
    for kind, a, b, c, d in difflib.SequenceMatcher(None, first, second, autojunk=False).get_opcodes():
        for one, other in zip_longest(columns[0][a:b], columns[1][c:d], fillvalue=""):
            _say(console, f"{MARK if kind != 'equal' else ' '} {one:{width}}  {other}".rstrip())


def _listing(found: Inspection) -> Iterator[str]:
    """Every instruction of the loop, with its kind, its effect and its source line."""
    loop = found.loop
    if loop is None:
        yield "none"
        return
    skipped = sorted(i.address for i in loop.aside)
    width = min(64, max(len(str(i)) for i in loop.body))
    for instruction in loop.body:
        before = [address for address in skipped if address < instruction.address]
        if before:
            yield f"  {'…':>8} {len(before)} instructions that are not in every pass"
            skipped = skipped[len(before) :]
        function = function_at(instruction.source)
        where = f"{instruction.source}{f' {function}' if function else ''}"
        line = f"  {instruction.address:8x} {instruction.kind:8}{instruction!s:{width}}  {where:32} {instruction.note}"
        yield line.rstrip()
    if skipped:
        yield f"  {'…':>8} {len(skipped)} instructions that are not in every pass"
    used = counts(loop.body)
    yield "  " + "; ".join(f"{kind}: {meaning}" for kind, meaning in KINDS.items() if kind in used)


def _times(found: Sequence[Inspection]) -> str:
    seconds: Counter[str] = Counter()
    for one in found:
        seconds.update(one.seconds)
    return ", ".join(f"{name} {value:.2f} s" for name, value in seconds.items())
