"""Scales along K in tiles of any width: each step's sums are multiplied by them before they are added; see `scales`.

Warpgroups do not wait for each other, so the tensor cores work for one while another one adds. This is how DeepGEMM
(github.com/deepseek-ai/DeepGEMM) keeps them busy.

The bandwidth of shared memory limits these products, and loads of scales use part of it. The four threads of a quad
have sums of the same two rows. So each of them loads the scales of one of four steps, multiplies those of the rows by
those of the columns, and passes the results to the others by shuffles.

A span is 128 columns of B from a multiple of 128 on, which share a scale.
"""

import math
from typing import NamedTuple

#: Columns of a span; numbers of a thread in 16 columns of 64 rows; and operands of an inline assembly for one argument.
SPAN, NUMBERS, OPERANDS = 128, 8, 4
#: The widest tile whose step is summed at once. Wider tiles are summed in pieces of `SPAN` columns.
WIDEST_PIECE = 192


def starts_of(width: int, divisor: int) -> int:
    """The largest power of two, up to 128, that divides the first column of every tile of a width.

    Args:
        divisor: gcd(N, 128). The last tile is moved back, so that it ends at column N.
    """
    return math.gcd(width, divisor, SPAN)


def spans_of(width: int, divisor: int) -> int:
    """How many spans a tile of a width can touch; see `starts_of`."""
    return -(-(SPAN - starts_of(width, divisor) + width) // SPAN)


class Scales(NamedTuple):
    """Assembly that multiplies sums by scales.

    Attributes:
        first: the number of the first operand that `scales_of` gives.
        steps: a register with the number of steps, at least one.
        width: of the tile.
        divisor: see `starts_of`.
    """

    first: int
    steps: str
    width: int
    divisor: int

    def _operand(self, number: int) -> str:
        """A register of the argument that `scales_of` gives with this number."""
        return f"${self.first + number * OPERANDS}"

    @property
    def _places(self) -> dict[str, str]:
        """The registers with the offsets of the first step's scales, by name.

        There are two for the thread's rows, "row0" and "row1", and "col0" and so on for the spans.
        """
        # The two rows of a thread are those of the first and the third number of its part of a block.
        rows = {"row0": self._operand(2), "row1": f"${self.first + 2 * OPERANDS + 2}"}
        return rows | {f"col{j}": self._operand(3 + j) for j in range(spans_of(self.width, self.divisor))}

    def begin(self) -> str:
        """Assembly that declares registers, and loads the scales of the first steps.

        Steps are loaded in groups of four. The last group is always full. If the first group has fewer steps, they
        belong to the last threads of the quad.
        """
        spans = spans_of(self.width, self.divisor)
        products = ", ".join(f"of{i}{j}, both{i}{j}" for i in range(2) for j in range(spans))
        steps = {"row": self._operand(6), "col": self._operand(7)}

        def at_step(step: str) -> str:
            return "".join(
                f"mad.lo.s32 at_{name}, {step}, {steps[name[:3]]}, {first};"
                for name, first in self._places.items()
            )

        return (
            f".reg .f32 {', '.join(self._places)}, {products}, scale0, scale1; .reg .pred has;"
            f".reg .b32 {', '.join(f'at_{name}' for name in self._places)}, quad, row_step, col_step, beyond<8>;"
            # A thread without a step in the first group loads the first step's scales, which are not used.
            "{ .reg .b32 own, there; mov.u32 own, %laneid; and.b32 own, own, 3;"
            f"neg.s32 there, {self.steps}; and.b32 there, there, 3; sub.s32 own, own, there; max.s32 there, own, 0;"
            f"{at_step('there')} {self._loads()} {at_step('own')} }}"
            f"shl.b32 row_step, {steps['row']}, 2; shl.b32 col_step, {steps['col']}, 2;"
            f"setp.le.s32 has, {self.steps}, 4; {{ {self._next_group()} }} {self._masks()}"
        )

    def _loads(self) -> str:
        """Assembly that loads a thread's scales."""
        bases = {"row": self._operand(0), "col": self._operand(1)}
        return "".join(
            f"{{ .reg .b64 address; cvt.s64.s32 address, at_{name}; add.s64 address, address, {bases[name[:3]]};"
            f"ld.global.f32 {name}, [address]; }}"
            for name in self._places
        )

    def _masks(self) -> str:
        """Assembly that sets all bits of register `beyond` i if columns 16 i to 16 i + 15 belong to the next span.

        These are the columns of each 128 of the tile.
        """
        # Blocks of 8 columns in the tile's first span.
        ahead = self._operand(8)
        pairs = range(0, SPAN // 16, starts_of(self.width, self.divisor) // 16)[1:]
        return "".join(
            f"setp.le.s32 has, {ahead}, {2 * pair}; selp.b32 beyond{pair}, -1, 0, has;" for pair in pairs
        )

    def _next_group(self) -> str:
        """Assembly that multiplies the scales that were loaded, and loads those of the next four steps.

        `has` says whether there are no further steps.
        """
        spans = spans_of(self.width, self.divisor)
        return (
            "".join(f"mul.f32 of{i}{j}, row{i}, col{j};" for i in range(2) for j in range(spans))
            + "@has bra.uni LAST;"
            + "".join(f"add.s32 at_{name}, at_{name}, {name[:3]}_step;" for name in self._places)
            + f"{self._loads()}\nLAST: "
        )

    def of_piece(self, first: int, width: int, last: bool) -> str:
        """Assembly that fetches the scales of a piece of a step.

        Register `left` has the number of remaining steps, this one included.

        Args:
            first: the piece's first column in the tile, divided by 128.
            width: its columns.
            last: whether this is the step's last piece.
        """
        # From the thread of the quad that loaded this step.
        finds = "".join(
            f"shfl.sync.idx.b32 both{i}{j}, of{i}{j}, quad, 0x1C1F, 0xffffffff;"
            for i in range(2)
            for j in range(first, first + spans_of(width, self.divisor))
        )
        after = (
            "{ .reg .pred same; setp.ne.s32 same, quad, 3; @same bra.uni SAME; setp.le.s32 has, left, 5;"
            f"{{ {self._next_group()} }}\nSAME: }}"
        )
        return f"neg.s32 quad, left; and.b32 quad, quad, 3; {finds} {after if last else ''}"


def scaled_sums(totals: list[str], numbers: list[str], first: int, starts: int) -> str:
    """Assembly that multiplies a step's numbers by their scales and adds them.

    Args:
        totals, numbers: registers, of which 16 columns of 64 rows have 8.
        first: the first column in the tile, divided by 128.
        starts: see `starts_of`. As many columns have the same scale.
    """
    lines = []
    for at in range(0, len(totals), NUMBERS):
        span, pair = divmod(at // NUMBERS, SPAN // 16)
        span += first
        scales = [f"both{row}{span}" for row in range(2)]
        # A tile's first columns, and those a multiple of 128 further, never belong to the next span.
        if beyond := pair - pair % (starts // 16):
            if pair == beyond:
                # Where bits of `beyond` are set, those of the next span's scale; otherwise those of this span's.
                lines += [
                    f"lop3.b32 scale{row}, beyond{pair}, both{row}{span + 1}, both{row}{span}, 0xCA;"
                    for row in range(2)
                ]
            scales = ["scale0", "scale1"]
        lines += [
            f"fma.rn.f32 {totals[i]}, {numbers[i]}, {scales[i // 2 % 2]}, {totals[i]};"
            for i in range(at, at + NUMBERS)
        ]
    return "".join(lines)
