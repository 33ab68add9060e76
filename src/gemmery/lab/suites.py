"""The suites: which products are measured. They are data, in suite_data/; this reads and checks them.

Needs neither torch nor a GPU.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from . import random_products
from .random_products import BACKWARD, ROWS, Product

DATA = Path(__file__).with_name("suite_data")
#: So many that a suite in burst takes a minute or two.
MOST_ROWS = 24
#: Types of operands. "tf32" is fp32 data multiplied in TF32; "fp8" is e4m3, and "fp8fast" the same with sums at the
#: tensor cores' own precision.
DTYPES = ("bf16", "fp16", "fp32", "tf32", "fp64", "int8", "fp8", "fp8fast")
#: "row" or "col" major, and the place of the matrix in its buffer: "+pad" in rows that are 64 elements longer, "+odd"
#: in rows one element longer and starting at the second one, so that nothing is aligned, "+step" in every second
#: element, "+half" in rows that each begin in the middle of the one before.
LAYOUTS = tuple(order + view for order in ("row", "col") for view in ("", "+pad", "+odd", "+step", "+half"))
#: Names of the batch dimensions, first to last, in an order (see `Row`).
BATCH_NAMES = "xyz"
#: Names of the dimensions of the matrices in an order.
MATRIX_NAMES = {"a": "mk", "b": "kn", "out": "mn"}
#: Epilogues, which `fusions` has.
EPILOGUES = ("swiglu", "bias", "bias_gelu", "bias_gelu_tanh", "bias_relu_squared", "bias_residual")
#: The call of a row: `matmul` into a given output or a new one, `linear`, or a plan made beforehand.
CALLS = ("matmul_out", "matmul", "linear", "plan")
#: The default number of an int4 weight's numbers that share a scale.
GROUP = 128
#: Formats of packed weights, each with how many numbers share a scale where the row does not say; None for the format's
#: default.
WEIGHTS = {"int4": GROUP, "int8": None, "e4m3": None, "e5m2": None, "mxfp4": None, "nvfp4": None, "nf4": None}
#: Formats of 2:4 sparse weights, of 16 bits or with codes. No suite has them; see `benchmarks/sparse.py`.
SPARSE_WEIGHTS = ("2:4", "2:4-int8", "2:4-e4m3", "2:4-int4")
#: The elements that share a scale if both operands have 8 bits: all, a row, blocks (1 × 128 of A, 128 × 128 of B), or
#: 32 columns of fp8 (MXFP8).
SCALES = ("tensor", "row", "block", "mx")
#: Columns, and rows of B, that share a scale of blocks.
BLOCK = 128


@dataclass(frozen=True)
class Row:
    """One product of a suite, (M, K) by (K, N).

    An operand has one of `LAYOUTS`, or an order: its dimensions from the outermost to the
    innermost in memory, x, y and z those of the batch. "x m y k" is a buffer (B, S, H, D) seen as (B, H, S, D). A
    number among them is a dimension of the buffer of which the operand is the first slice, "x m 3 y k" the queries of
    a fused (B, S, 3, H, D). A batch dimension that is not named is shared: of size 1, or, if it leads, not there.

    Attributes:
        batch: sizes of the leading dimensions, () for a single product.
        a, b, out: layouts or orders; b "col" is a Linear's weight, given as (N, K) row-major.
        dtype: of `DTYPES`; None if the suite is run in any.
        call: of `CALLS`.
        batch_invariant: whether ours is asked for results that do not depend on M.
        epilogue: of `EPILOGUES`, or "" for a bare product.
        weight: B's format, of `WEIGHTS`, "int4/32" with a scale for 32; "" if B is not a packed weight.
        scales: of `SCALES`, or "" if the operands have none.
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
    call: str = "matmul_out"
    batch_invariant: bool = False
    epilogue: str = ""
    weight: str = ""
    scales: str = ""

    @property
    def quantized(self) -> bool:
        """Whether operands represent other numbers than the stored ones."""
        return bool(self.weight or self.scales)

    @property
    def packing(self) -> tuple[str, int | None]:
        """The weight's format, and how many numbers share a scale; None for the format's default."""
        name, _, group = self.weight.partition("/")
        return name, int(group) if group else WEIGHTS[name]

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

    @property
    def shape(self) -> str:
        """The sizes as a text."""
        return "×".join(str(size) for size in (*self.batch, self.M, self.N, self.K))

    def tiles(self, rows: int = 128, cols: int = 256) -> int:
        """Tiles of `rows` × `cols` that the output takes."""
        return self.matrices * -(-self.M // rows) * -(-self.N // cols)

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> Row:
        """A row from its record among the results, which hold more than a row does."""
        known = {field.name: record[field.name] for field in fields(cls) if field.name in record}
        return cls(**(known | {"batch": tuple(record["batch"])}))


def _large(row: Row) -> bool:
    return row.M >= 1024 and row.tiles() >= 132


def _plain_not_nt(row: Row) -> bool:
    plain = {row.a, row.b} <= {"row", "col"} and row.out == "row"
    return plain and not row.batch and (row.a, row.b) != ("row", "col")


def _cubes(row: Row) -> bool:
    return row.M == row.N == row.K and (row.matrices, row.M) in ((512, 128), (64, 1024), (4096, 64))


def _int8_tf32(row: Row) -> bool:
    return row.dtype in ("int8", "tf32") and row.M == row.N and row.b == "col"


#: Suites that are part of another: its name, and which rows.
PARTS: dict[str, tuple[str, Callable[[Row], bool]]] = {
    "llm_large": ("llm", _large),
    "decode_small": ("decode", lambda row: row.M <= 64),
    "decode_mid": ("decode", lambda row: row.M > 64),
    "layouts_plain": ("layouts", _plain_not_nt),
    "bmm_cubes": ("bmm", _cubes),
    "dtypes_int8_tf32": ("dtypes", _int8_tf32),
    "fused_swiglu": ("fused", lambda row: row.epilogue == "swiglu" and row.M >= 512),
    "fused_swiglu_small": ("fused", lambda row: row.epilogue == "swiglu" and row.M < 512),
    "fused_bias": ("fused", lambda row: row.epilogue in ("bias_gelu", "bias_relu_squared", "bias_residual")),
    "lowbit_small": ("lowbit", lambda row: row.M <= 64),
    "lowbit_mid": ("lowbit", lambda row: 64 < row.M <= 512),
    "lowbit_large": ("lowbit", lambda row: row.M > 512),
    "lowbit_fused_swiglu": ("lowbit_fused", lambda row: row.epilogue == "swiglu"),
    "lowbit_fused_bias": ("lowbit_fused", lambda row: row.epilogue == "bias_gelu"),
    "scaled_tensor": ("scaled", lambda row: row.scales == "tensor"),
    "scaled_row": ("scaled", lambda row: row.scales == "row"),
    "scaled_block": ("scaled", lambda row: row.scales == "block"),
    "scaled_accurate_fp8": ("scaled_accurate", lambda row: row.dtype == "fp8"),
    "scaled_accurate_int8": ("scaled_accurate", lambda row: row.dtype == "int8"),
    "launch_out": ("launch", lambda row: row.call == "matmul_out"),
    "launch_plan": ("launch", lambda row: row.call == "plan"),
}

#: Suites made of others: which, how many rows of each, and what is different about these.
MIXTURES: dict[str, tuple[tuple[str, ...], int, dict[str, Any]]] = {
    "invariant": (("llm", "decode"), MOST_ROWS // 2, {"batch_invariant": True}),
}


@dataclass(frozen=True)
class Drawing:
    """A suite of random products.

    Attributes:
        classes: of `random_products`; row i is of class i modulo their number.
        changes: what is different about its rows, by fields of `Row`.
        keep: says which products it has; the others of a seed are passed over.
    """

    classes: tuple[str, ...]
    changes: Mapping[str, Any] = field(default_factory=dict)
    keep: Callable[[Product], bool] = lambda product: True


def _stacked(product: Product) -> bool:
    """Whether the weight is that of a gate and of what it gates, each with a multiple of `STEP` rows."""
    return product.projection == "gate_up" and product.N % (2 * random_products.STEP) == 0


def _whole_groups(product: Product) -> bool:
    return product.K % GROUP == 0


def _whole_blocks(product: Product) -> bool:
    return product.N % BLOCK == product.K % BLOCK == 0


def _epilogue(name: str) -> dict[str, Any]:
    return {"epilogue": name, "call": "linear"}


def _scales(name: str, dtype: str) -> dict[str, Any]:
    return {"scales": name, "dtype": dtype, "call": "matmul"}


_ALL = tuple(ROWS)
_INT4 = {"weight": "int4", "call": "linear"}

#: Suites of random products. Those of a seed and class are the same in all suites, as far as they are kept.
RANDOM: dict[str, Drawing] = {
    **{f"random_{which}": Drawing((which,)) for which in random_products.CLASSES},
    "random_invariant": Drawing(_ALL, {"batch_invariant": True}),
    "random_swiglu": Drawing(_ALL, _epilogue("swiglu"), _stacked),
    "random_bias_gelu": Drawing(_ALL, _epilogue("bias_gelu_tanh")),
    "random_bias_residual": Drawing(_ALL, _epilogue("bias_residual")),
    "random_int4_small": Drawing(("decode",), _INT4, _whole_groups),
    "random_int4": Drawing(
        ("mid", "prefill"), _INT4, lambda product: product.M >= 256 and _whole_groups(product)
    ),
    "random_fp8": Drawing(_ALL, _scales("row", "fp8fast")),
    "random_fp8_accurate": Drawing(_ALL, _scales("row", "fp8")),
    "random_fp8_blocks": Drawing(_ALL, _scales("block", "fp8"), _whole_blocks),
}
#: The seeds of their rows; each has as many.
SEEDS = (1, 2, 3, 4)

#: The name of the suite of a user's own shapes, in results and files.
SHAPES = "shapes"

#: Regimes that a suite is measured in where nothing else is asked for; else burst and steady.
REGIMES = {"launch": ("host", "graph")} | dict.fromkeys(RANDOM, ("burst",))


def whole() -> list[str]:
    """All suites but those that are part of another."""
    return sorted([path.stem for path in DATA.glob("*.json")] + list(MIXTURES) + list(RANDOM))


def names() -> list[str]:
    """All suites that `load` knows."""
    return sorted([*whole(), *PARTS])


def source(name: str) -> str:
    """The suite that contains a suite; its own name if none does."""
    return PARTS[name][0] if name in PARTS else name


def load(name: str) -> list[Row]:
    """The rows of a suite.

    Raises:
        ValueError: there is no such suite, or its file is not valid; the message names file and row.
    """
    if name not in names():
        raise ValueError(f"there is no suite {name!r}; there are {', '.join(names())}")
    if name in PARTS:
        whole_name, keep = PARTS[name]
        return [row for row in load(whole_name) if keep(row)]
    if name in MIXTURES:
        sources, count, changes = MIXTURES[name]
        return [replace(row, **changes) for one in sources for row in spread(load(one), count)]
    if name in RANDOM:
        return [row for seed in SEEDS for row in drawn(name, seed, MOST_ROWS // len(SEEDS))]
    return read(DATA / f"{name}.json")


def drawn(name: str, seed: int, count: int) -> list[Row]:
    """The first `count` rows that a suite of `RANDOM` has for a seed; names are seed/number, and what the product is.

    The first ones do not depend on the count.

    Raises:
        ValueError: there is no such suite, or fewer than one row is asked for.
    """
    if name not in RANDOM:
        raise ValueError(f"suite {name!r} has no seeds; there are {', '.join(RANDOM)}")
    if count < 1:
        raise ValueError(f"{count} rows requested; at least one is required")
    suite = RANDOM[name]
    each = -(-count // len(suite.classes))
    by_class = [random_products.draw(seed, which, each, suite.keep) for which in suite.classes]
    in_turn = [product for turn in zip(*by_class, strict=True) for product in turn]
    return [_of_product(f"{seed}/{number}", one, suite) for number, one in enumerate(in_turn[:count], 1)]


def _of_product(place: str, product: Product, suite: Drawing) -> Row:
    words = [place, product.name, *([product.layout] if BACKWARD in suite.classes else [])]
    a, b = ({"N": "row", "T": "col"}[letter] for letter in product.layout)
    return Row(" ".join(words), product.M, product.N, product.K, a=a, b=b, **suite.changes)


def held_out() -> set[tuple[int, int, int]]:
    """M, N and K of what a table or a fit must leave out: the rows of all suites of `RANDOM`."""
    return {(row.M, row.N, row.K) for name in RANDOM for row in load(name)}


def about(name: str) -> str:
    """A description of a suite."""
    if name == SHAPES:
        return "The shapes that were given."
    if name in PARTS:
        return f"Part of {source(name)}."
    if name in MIXTURES:
        sources, _, changes = MIXTURES[name]
        return f"Rows of {' and '.join(sources)} with {', '.join(changes)}."
    if name in RANDOM:
        seeds = ", ".join(map(str, SEEDS))
        given = ", ".join(
            key if value is True else f"{key} {value}" for key, value in RANDOM[name].changes.items()
        )
        return (
            f"Products of random transformers{f' with {given}' if given else ''}, unless others are drawn of seeds "
            f"{seeds}; nothing is tuned on them."
        )
    return str(json.loads((DATA / f"{name}.json").read_text(encoding="utf-8"))["about"])


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
    if not isinstance(batch, list) or not all(map(_positive, batch)) or len(batch) > len(BATCH_NAMES):
        raise ValueError(
            f"{where}: batch is {batch!r}; it must be a list of at most {len(BATCH_NAMES)} positive integers"
        )
    for name in MATRIX_NAMES:
        if name in value:
            _check_operand(name, value[name], len(batch), where)
    for name, allowed in (
        ("dtype", DTYPES),
        ("call", CALLS),
        ("batch_invariant", (True, False)),
        ("epilogue", EPILOGUES),
        ("scales", SCALES),
    ):
        if name in value and value[name] not in allowed:
            words = ", ".join(map(str, allowed))
            raise ValueError(f"{where}: {name} is {value[name]!r}; it must be one of {words}")
    if not isinstance(value.get("weight", ""), str):
        raise ValueError(f"{where}: weight is {value['weight']!r}; it must be a text")
    row = Row(**(value | {"batch": tuple(batch)}))
    _check_quantized(row, where)
    return row


def _check_quantized(row: Row, where: str) -> None:
    name, slash, group = row.weight.partition("/")
    if row.weight and (name not in WEIGHTS or (slash and not (group.isdecimal() and int(group)))):
        words = ", ".join(WEIGHTS)
        raise ValueError(f"{where}: weight is {row.weight!r}; it must be one of {words}, or such as int4/32")
    plain = (row.a, row.b, row.out, row.batch) == ("row", "col", "row", ())
    call = "linear" if row.weight else "matmul"
    if row.quantized and not (plain and row.call == call and not (row.weight and row.scales)):
        raise ValueError(
            f"{where}: operands that are quantized are two matrices, B as (N, K), with weight and the call linear, or "
            "with scales and the call matmul"
        )
    if row.scales and (row.dtype not in ("fp8", "fp8fast", "int8") or row.epilogue):
        raise ValueError(
            f"{where}: scales are for dtype fp8, fp8fast and int8, and the product has no epilogue"
        )


def _check_operand(name: str, value: Any, dims: int, where: str) -> None:
    if value in LAYOUTS:
        return
    words = value.split() if isinstance(value, str) else []
    letters = [word for word in words if not word.isdecimal()]
    matrix, batch = set(MATRIX_NAMES[name]), set(BATCH_NAMES[:dims])
    fits = matrix <= set(letters) <= matrix | batch and len(set(letters)) == len(letters)
    shared = name == "out" and not batch <= set(letters)
    if len(words) < 2 or not fits or shared or "0" in words:
        raise ValueError(
            f"{where}: {name} is {value!r}; it must be one of {', '.join(LAYOUTS)}, or an order of "
            f"{' '.join(sorted(batch) + list(MATRIX_NAMES[name]))} such as 'x m y k'"
        )


def _positive(value: Any) -> bool:
    return type(value) is int and value > 0


def spread(rows: Sequence[Row], count: int) -> list[Row]:
    """At most `count` rows, evenly spread over the suite and with its first and last."""
    if count >= len(rows):
        return list(rows)
    if count < 2:
        return list(rows[:count])
    return [rows[round(i * (len(rows) - 1) / (count - 1))] for i in range(count)]
