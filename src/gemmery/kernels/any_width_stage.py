"""Stages of tiles of any width that hold a weight in its stored form; see `any_width`.

Each form is a class with the members of `Stage`. Code that loads and multiplies uses these members, and does not check
the class.
"""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple, Protocol

#: Rows that an instruction multiplies, and whose parameters are stored together; bytes of a row of a stage.
ROWS, LINE_BYTES = 64, 128
#: The upper half of the matrix descriptors of dense operands: swizzled by 128 bytes, 1024 bytes from one 8 rows to the
#: next.
HEAD = 1 << 30 | 64


class Params(NamedTuple):
    """A kind of parameters that come with a weight's numbers, such as scales.

    Attributes:
        name: registers are named after it.
        size: bytes of `ROWS` rows and a step.
        dims: dimensions of its tensor map.
    """

    name: str
    size: int
    dims: int


class Stage(Protocol):
    """The layout of a weight, which is X, in a stage.

    A stage is a value that `str` describes completely. The second part of the text, between slashes, is `bits`.
    """

    @property
    def kind(self) -> str:
        """The name of its rows in the tables of schedules."""

    @property
    def form(self) -> Literal["packed", "sparse", "sparse pairs"]:
        """The form of X, see the forms of `any_width`."""

    @property
    def bits(self) -> int:
        """Bits of a row and a step in the block of X, divided by 64."""

    @property
    def words(self) -> int:
        """Bytes of 16 rows and a step in the block of X."""

    @property
    def columns(self) -> int:
        """Columns for which one place along K in the tensor map of X stands, a power of two."""

    @property
    def step(self) -> int:
        """Columns of a step."""

    @property
    def y_blocks(self) -> int:
        """Blocks of `LINE_BYTES` of each row of Y in a step. They follow each other in a stage."""

    @property
    def kinds(self) -> tuple[Params, ...]:
        """The kinds of parameters that there are, at most two. They are adjacent in a stage."""

    def of_step(self, columns: int) -> "Stage | None":
        """The same with steps of so many columns; None if there are none."""

    def of_halves(self, paired: bool) -> "Stage | None":
        """The same for a weight in two halves, if `paired`; None if stages cannot hold such a weight."""

    def load_params(self, rows: int, box: str, several: bool, maps: list[int], row: str, k: str) -> str:
        """Assembly that begins to load a stage's parameters.

        Args:
            rows: of X.
            box: rows that the tensor maps load at a time.
            several: whether `box` may be less than `rows`, so that the parameters take several loads.
            maps: the numbers of the kernel's parameters that are tensor maps, of each of `kinds`.
            row, k: registers that say where the step begins.

        Register `params` is the stage's place, and `at` its barrier.
        """

    def begin(self, rows: int, first: int, stages: str, y_rows: str) -> str:
        """Assembly that finds where a thread's numbers and parameters are, as `steps` counts from there.

        Args:
            rows: of X in a stage.
            first: the first of the warpgroup's rows.
            stages, y_rows: registers; how many stages there are, and rows of Y in each.
        """

    def steps(
        self, sums: list[list[str]], KIND: str, turned: bool, promotes: bool, rows: int, arrived: str,
        release: Callable[[str], str], go_on: str, turns: str, ends: str,
    ) -> str:  # fmt: skip
        """Assembly of the steps' loop.

        Args:
            sums: for each 64 rows of X the registers of the accumulator, which are 0.
            KIND: see `any_width_loop.multiply_steps`.
            turned: whether adjacent elements of Y are along its rows.
            promotes: whether the products of some steps are summed separately and then added.
            rows: of X in a stage.
            arrived: assembly that waits for a stage.
            release: gives assembly that releases a stage, of which a register has the address of its barrier.
            go_on: assembly that advances to the next step, and sets whether there is `more`.
            turns: assembly that gives another warpgroup its turn, if it waits for one, when the last products have
                begun.
            ends: assembly that follows them.
        """


def zeroed(sums: list[list[str]]) -> str:
    """Assembly that sets the registers of an accumulator to 0."""
    return "".join(f"mov.b32 {register}, 0;" for row in sums for register in row)


def x_bytes(rows: int, format: Stage | None) -> int:
    """Bytes of these rows of X in a stage: of the operand, or of a weight's stored form."""
    return rows * LINE_BYTES if format is None else rows // 16 * format.words


def own_rows(rows: Any, groups: Any) -> Any:
    """Rows of X of each warpgroup that shares a tile of `rows`; of numbers and of arrays."""
    return -(-rows // (ROWS * groups)) * ROWS


def y_blocks_of(format: Stage | None) -> int:
    """Blocks of `LINE_BYTES` of each row of Y in a step."""
    return 1 if format is None else format.y_blocks


def params_bytes(rows: int, format: Stage | None) -> int:
    """Bytes of the parameters of `rows` rows of X in a stage."""
    return 0 if format is None else rows * sum(kind.size for kind in format.kinds) // ROWS
