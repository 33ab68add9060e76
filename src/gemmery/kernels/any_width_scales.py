"""Scales along K in tiles of any width: each step's sums are multiplied by them before they are added; see `scales`.

Warpgroups do this each at its own pace, so the tensor cores work for one while another one adds. This is how DeepGEMM
(github.com/deepseek-ai/DeepGEMM) keeps them busy.

Shared memory is what such a product waits for, and each load of a scale takes a part of its bandwidth. A thread has 64
rows' scales of two rows, which the four threads of a quad have in common. Therefore each of these loads the scales of
one of four steps, multiplies those of its rows by those of the columns, and gives the others the results.
"""

import math
from typing import NamedTuple

#: Columns that share a scale, numbers of a thread in 16 columns of 64 rows, and operands of an inline assembly for one
#: block of 64 by 8.
SPAN, PAIR, EACH = 128, 8, 4
#: The widest tile whose sums of a step fit into registers beside the accumulator.
WIDEST_PIECE = 192


def starts_of(width: int, apart: int) -> int:
    """The number of which the first columns of all tiles of a width are multiples.

    Args:
        apart: a divisor of the matrix's columns. The last tile ends with them.
    """
    return math.gcd(width, apart, SPAN)


def spans_of(width: int, apart: int) -> int:
    """How many spans a tile of a width can touch."""
    return -(-(SPAN - starts_of(width, apart) + width) // SPAN)


class Scales(NamedTuple):
    """Assembly that multiplies sums by scales.

    Attributes:
        first: the number of the first operand that `scales_of` gives.
        steps: a register with the number of steps, at least one.
        width: of the tile.
        apart: see `starts_of`.
    """

    first: int
    steps: str
    width: int
    apart: int

    @property
    def spans(self) -> int:
        """How many spans the tile can touch."""
        return spans_of(self.width, self.apart)

    @property
    def _places(self) -> dict[str, int]:
        """Of the scales of a thread's two rows and of the spans, the operands that say where they are."""
        # The two rows of a thread are those of the first and the third number of its part of a block.
        found = {"row0": self.first + 2 * EACH, "row1": self.first + 2 * EACH + 2}
        return found | {f"col{j}": self.first + EACH * (3 + j) for j in range(self.spans)}

    @property
    def _ahead(self) -> str:
        """A register: blocks of 8 columns in the tile's first span."""
        return f"${self.first + 8 * EACH}"

    def begin(self) -> str:
        """Assembly that declares registers, and loads the scales of the first steps.

        The last group of four steps is full, and the first one may not be. Its steps are those of the quad's last
        threads.
        """
        row_step, col_step = (f"${self.first + i * EACH}" for i in (6, 7))
        products = ", ".join(f"of{i}{j}, both{i}{j}" for i in range(2) for j in range(self.spans))
        begins = "".join(
            f"mad.lo.s32 at_{name}, own, {row_step if name[:3] == 'row' else col_step}, ${i};"
            for name, i in self._places.items()
        )
        return (
            f".reg .f32 {', '.join(self._places)}, {products}, scale0, scale1; .reg .pred has;"
            f".reg .b32 {', '.join(f'at_{name}' for name in self._places)}, quad, row_step, col_step, beyond<8>;"
            # Threads without a step in the first group load the first step's scales, which nobody uses.
            "{ .reg .b32 own, none; mov.u32 own, %laneid; and.b32 own, own, 3;"
            f"neg.s32 none, {self.steps}; and.b32 none, none, 3; sub.s32 own, own, none; max.s32 none, own, 0;"
            f"{begins.replace('own', 'none')} {self._loads()} {begins} }}"
            f"shl.b32 row_step, {row_step}, 2; shl.b32 col_step, {col_step}, 2;"
            f"setp.le.s32 has, {self.steps}, 4; {{ {self._next_group()} }} {self._masks()}"
        )

    def _loads(self) -> str:
        """Assembly that loads a thread's scales."""
        bases = {"row": f"${self.first}", "col": f"${self.first + EACH}"}
        return "".join(
            f"{{ .reg .b64 address; cvt.s64.s32 address, at_{name}; add.s64 address, address, {bases[name[:3]]};"
            f"ld.global.f32 {name}, [address]; }}"
            for name in self._places
        )

    def _masks(self) -> str:
        """Assembly that sets all bits of the registers `beyond` whose columns belong to the next span.

        Those of `beyond1` are the 16 columns from the 16th of a tile on, and so on.
        """
        pairs = range(0, SPAN // 16, starts_of(self.width, self.apart) // 16)[1:]
        return "".join(
            f"setp.le.s32 has, {self._ahead}, {2 * pair}; selp.b32 beyond{pair}, -1, 0, has;"
            for pair in pairs
        )

    def _next_group(self) -> str:
        """Assembly that goes on to the next four steps; `has` says whether they are the last ones."""
        return (
            "".join(f"mul.f32 of{i}{j}, row{i}, col{j};" for i in range(2) for j in range(self.spans))
            + "@has bra.uni SAME;"
            + "".join(f"add.s32 at_{name}, at_{name}, {name[:3]}_step;" for name in self._places)
            + f"{self._loads()}\nSAME: "
        )

    def of_piece(self, first: int, width: int, last: bool) -> str:
        """Assembly that finds the scales of a piece of a step, of which `left` counts the remaining ones.

        Args:
            first, width: the span in which its first column lies, if the tile begins with a span, and its columns.
            last: whether this is the step's last piece.
        """
        # The four threads of a quad have registers of their own.
        finds = "".join(
            f"shfl.sync.idx.b32 both{i}{j}, of{i}{j}, quad, 0x1C1F, 0xffffffff;"
            for i in range(2)
            for j in range(first, first + spans_of(width, self.apart))
        )
        after = (
            "{ .reg .pred same; setp.ne.s32 same, quad, 3; @same bra.uni SAME; setp.le.s32 has, left, 5;"
            f"{self._next_group()} }}"
        )
        return f"neg.s32 quad, left; and.b32 quad, quad, 3; {finds} {after if last else ''}"


def scaled_sums(totals: list[str], numbers: list[str], first: int, starts: int) -> str:
    """Assembly that multiplies a step's numbers by their scales and adds them.

    Args:
        totals, numbers: registers, of which 16 columns of 64 rows have 8.
        first: the span in which the first column lies.
        starts: see `starts_of`. As many columns have the same scale.
    """
    lines = []
    for at in range(0, len(totals), PAIR):
        span, pair = divmod(at // PAIR, SPAN // 16)
        span += first
        scales = [f"both{row}{span}" for row in range(2)]
        # A tile's first columns, and those a multiple of a span further, never belong to the next span.
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
            for i in range(at, at + PAIR)
        ]
    return "".join(lines)
