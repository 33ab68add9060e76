"""The suites: which products are measured. They are data, in suite_data/; this reads and checks them.

Needs neither torch nor a GPU.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

DATA = Path(__file__).with_name("suite_data")
#: So many that a suite in burst takes a minute or two.
MOST_ROWS = 24
#: "tf32" is fp32 data multiplied in TF32.
DTYPES = ("bf16", "fp16", "fp32", "tf32", "fp64")
#: "row" or "col" major, and how the matrix lies in its buffer: "+pad" in rows that are 64 elements longer, "+odd" in
#: rows one element longer and starting at the second one, so that nothing is aligned, "+step" in every second element.
LAYOUTS = tuple(order + view for order in ("row", "col") for view in ("", "+pad", "+odd", "+step"))


@dataclass(frozen=True)
class Row:
    """One product of a suite, (M, K) by (K, N).

    Attributes:
        batch: sizes of the leading dimensions, () for a single product.
        a, b, out: layouts, of `LAYOUTS`; b "col" is a Linear's weight, given as (N, K) row-major.
        dtype: of `DTYPES`; None where the suite is run in any.
    """

    name: str
    M: int
    N: int
    K: int
    batch: tuple[int, ...] = ()
    a: str = "row"
    b: str = "col"
    out: str = "row"
    dtype: str | None = None

    @property
    def matrices(self) -> int:
        """Products in the batch."""
        count = 1
        for size in self.batch:
            count *= size
        return count

    @property
    def flops(self) -> int:
        """Operations, a multiplication and an addition per inner step."""
        return 2 * self.matrices * self.M * self.N * self.K

    def tiles(self, rows: int = 128, cols: int = 256) -> int:
        """Tiles of `rows` × `cols` that the output takes."""
        return self.matrices * -(-self.M // rows) * -(-self.N // cols)


def _large(row: Row) -> bool:
    return row.M >= 1024 and row.tiles() >= 132


#: Suites that are part of another: its name, and which rows.
FILTERS: dict[str, tuple[str, Callable[[Row], bool]]] = {"llm_large": ("llm", _large)}


def names() -> list[str]:
    """All suites that `load` knows."""
    return sorted([path.stem for path in DATA.glob("*.json")] + list(FILTERS))


def load(name: str) -> list[Row]:
    """The rows of a suite.

    Raises:
        ValueError: there is no such suite, or its file is not valid; the message names file and row.
    """
    if name not in names():
        raise ValueError(f"there is no suite {name!r}; there are {', '.join(names())}")
    if name in FILTERS:
        source, keep = FILTERS[name]
        return [row for row in load(source) if keep(row)]
    return read(DATA / f"{name}.json")


def read(path: Path) -> list[Row]:
    """The rows of a suite's file: a JSON object with "about", a text, and "rows", a list of objects like `Row`.

    Raises:
        ValueError: the file is not valid; the message names file and row.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(f"{path.name}: not JSON: {error}") from error
    if not isinstance(data, dict) or set(data) != {"about", "rows"} or not isinstance(data["rows"], list):
        raise ValueError(f'{path.name}: must be an object with "about", a text, and "rows", a list')
    if not 1 <= len(data["rows"]) <= MOST_ROWS:
        raise ValueError(f"{path.name}: {len(data['rows'])} rows; there must be 1 to {MOST_ROWS}")
    rows = [_row(value, f"{path.name}, row {number}") for number, value in enumerate(data["rows"], 1)]
    seen: set[str] = set()
    for number, row in enumerate(rows, 1):
        if row.name in seen:
            raise ValueError(f"{path.name}, row {number}: there is already a row named {row.name!r}")
        seen.add(row.name)
    return rows


def _row(value: Any, where: str) -> Row:
    if not isinstance(value, dict):
        raise ValueError(f"{where}: {value!r} given; a row is an object")
    known = {field.name for field in fields(Row)}
    needed = {"name", "M", "N", "K"}
    if unknown := sorted(set(value) - known):
        raise ValueError(f"{where}: unknown {', '.join(unknown)}; a row has {', '.join(sorted(known))}")
    if missing := sorted(needed - set(value)):
        raise ValueError(f"{where}: without {', '.join(missing)}")
    if not isinstance(value["name"], str) or not value["name"]:
        raise ValueError(f"{where}: name is {value['name']!r}; it must be a text")
    where = f"{where} ({value['name']})"
    for name in ("M", "N", "K"):
        if not _positive(value[name]):
            raise ValueError(f"{where}: {name} is {value[name]!r}; it must be a positive integer")
    batch = value.get("batch", [])
    if not isinstance(batch, list) or not all(map(_positive, batch)):
        raise ValueError(f"{where}: batch is {batch!r}; it must be a list of positive integers")
    for name in ("a", "b", "out"):
        if name in value and value[name] not in LAYOUTS:
            raise ValueError(f"{where}: {name} is {value[name]!r}; it must be one of {', '.join(LAYOUTS)}")
    if value.get("dtype") not in (None, *DTYPES):
        raise ValueError(f"{where}: dtype is {value['dtype']!r}; it must be one of {', '.join(DTYPES)}")
    return Row(**(value | {"batch": tuple(batch)}))


def _positive(value: Any) -> bool:
    return type(value) is int and value > 0


def spread(rows: Sequence[Row], count: int) -> list[Row]:
    """At most `count` rows, evenly spread over the suite and with its first and last."""
    if count >= len(rows):
        return list(rows)
    if count < 2:
        return list(rows[:count])
    return [rows[round(i * (len(rows) - 1) / (count - 1))] for i in range(count)]
