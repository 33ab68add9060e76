"""2:4 sparse weights in tiles of any width: how a stage holds them, and the assembly of their products.

The weight is X. `wgmma.sp` of PTX reads its kept numbers from shared memory, 32 of a row for a step of 64 along K. It
takes the metadata from registers: for 16 rows and 64 columns, each thread of a warp has a word. A stage has the kept
numbers, swizzled by 64 bytes. The words of metadata follow the blocks of all stages; those of 32 rows and 32 columns
are adjacent; see `formats.sparse`. Short products have long steps of 128 columns, with kept numbers that are swizzled
by 128 bytes, a second word in each thread, and two blocks of Y. If both operands are fp8, a step has 128 columns, and a
thread's word belongs to one row: it is made of halves of two stored words.

If kept numbers have 8 bits and the other operand has 16, each thread reads its share of them and widens them to 16
bits, and the tensor cores take these from registers, too. These numbers are swizzled by 64 bytes in long steps, and not
at all in others.

The tensor cores read registers while they multiply. So there are two sets of registers, one for each step of a round.
After every round of `TOGETHER` steps a warpgroup waits for all of its products. If some stayed in flight from one round
of the loop to the next, the assembler of Triton 3.6 to 3.9 would make each product wait for the one before.
"""

from collections.abc import Callable
from typing import Literal, NamedTuple

from .any_width_stage import HEAD, LINE_BYTES, ROWS, Params

#: Rows whose words are stored together, and bytes of their words with 32 columns.
BLOCK, WORDS_BYTES = 32, 128
#: The upper half of the matrix descriptor of the kept numbers: swizzled by 64 bytes, 512 bytes from one 8 rows to the
#: next.
_HEAD = 2 << 30 | 32
#: Steps of a round of the loop, which is written for two.
TOGETHER = 2
#: Units of 16 bytes from 64 rows of kept numbers to the next.
_UNITS = 256
#: Bytes of a row's kept numbers in a step, up to which they are not swizzled.
UNSWIZZLED = 32


def _registers(which: int, i: int, number: int) -> list[str]:
    """The registers of one of two sets that an instruction takes X from, of 64 rows and 32 columns.

    They hold numbers of a row, of the row 8 below it, and of both, 8 kept numbers further along K.
    """
    return [f"kept{which}{i}{number}{n}" for n in range(4)]


def _of_e4m3(register: str, both: str, kind: str) -> str:
    """Assembly that makes a pair of numbers of two bytes in `both`, neither of which is NaN: one would become 480."""
    if kind == "f16":
        return f"cvt.rn.f16x2.e4m3x2 {register}, {both};"
    # Exponents of bfloat16 count from 2^-127, those of e4m3 from 2^-7. Conversions would take longer.
    return (
        f"cvt.u32.u16 {register}, {both}; prmt.b32 {register}, {register}, 0, 0x1404; shr.u32 left8, {register}, 4;"
        f"and.b32 left8, left8, 0x07f007f0; lop3.b32 {register}, {register}, 0x80008000, left8, 0xEA;"
        f"mov.b32 right8, 0x7b807b80; mul.rn.bf16x2 {register}, {register}, right8;"
    )


def _of_int8(register: str, both: str, kind: str) -> str:
    """The same of integers, whose bits become the last ones of a larger number, from which another is subtracted."""
    pair = f"cvt.u32.u16 {register}, {both}; prmt.b32 {register}, {register}, 0, 0x4140;"
    if kind == "f16":
        # 1024 and the integer with 128 added.
        return (
            f"{pair} mov.b32 left8, 0x64006400; lop3.b32 {register}, {register}, 0x00800080, left8, 0xBE;"
            f"mov.b32 right8, 0x64806480; sub.rn.f16x2 {register}, {register}, right8;"
        )
    # 128 and the last seven bits, minus 256 where the integer is negative and minus 128 elsewhere.
    return (
        f"{pair} mov.b32 right8, 0x43004300; lop3.b32 left8, {register}, 0x007f007f, right8, 0xEA;"
        f"lop3.b32 right8, {register}, 0x00800080, right8, 0xEA; sub.rn.bf16x2 {register}, left8, right8;"
    )


#: The functions that write assembly for codes of 8 bits. Weights with other codes take no tiles of any width.
DECODE = {"e4m3": _of_e4m3, "int8": _of_int8}


class SparseStage(NamedTuple):
    """The layout of a 2:4 sparse weight in a stage; an `any_width_stage.Stage`.

    Attributes:
        code: the type of kept numbers of 8 bits that are widened to 16, "e4m3" or "int8"; otherwise "".
        paired: whether the rows are of two halves in turn, eight of each; see the forms of `any_width`.
        fp8: whether both operands are fp8.
        wide: whether a step has 128 columns where the other operand has 16 bits. A short launch takes as long as its
            loads take to be issued, and there are half as many.
    """

    code: str = ""
    paired: bool = False
    fp8: bool = False
    wide: bool = False

    @classmethod
    def of(cls, text: str) -> "SparseStage | None":
        """The inverse of the format's `str`; None for that of a packed weight."""
        pattern, bits, code, pairs, fp8 = [*text.split("/"), "", "", ""][:5]
        wide = bits == ("8" if code else "16")
        return cls(code, bool(pairs), bool(fp8), wide) if pattern == "2:4" else None

    def __str__(self) -> str:
        return f"2:4/{self.bits}/{self.code}/{'pairs' * self.paired}/{'fp8' * self.fp8}"

    @property
    def kind(self) -> str:
        """See `Stage.kind`."""
        return "sparse decoded" if self.code else "sparse"

    @property
    def form(self) -> Literal["sparse", "sparse pairs"]:
        """See `Stage.form`."""
        return "sparse pairs" if self.paired else "sparse"

    @property
    def columns(self) -> int:
        """Of a kept number."""
        return 2

    def of_halves(self, paired: bool) -> "SparseStage":
        """See `Stage.of_halves`."""
        return self._replace(paired=paired)

    @property
    def bits(self) -> int:
        """Bits of a 64th of a row's step that are in the block of X."""
        return (4 if self.code else 8) * (2 if self.wide else 1)

    @property
    def step(self) -> int:
        """See `Stage.step`."""
        return self.blocks * BLOCK

    @property
    def y_blocks(self) -> int:
        """See `Stage.y_blocks`."""
        return 2 if self.wide else 1

    def of_step(self, columns: int) -> "SparseStage | None":
        """See `Stage.of_step`."""
        found = self if self.fp8 else self._replace(wide=columns == LINE_BYTES)
        return found if found.step == columns else None

    @property
    def words(self) -> int:
        """Bytes of the kept numbers of 16 rows and a step."""
        return 16 * 64 * self.bits // 8

    @property
    def _row(self) -> int:
        """Bytes of a row's kept numbers of a step."""
        return self.words // 16

    @property
    def is_swizzled(self) -> bool:
        """Whether the kept numbers of a row are swizzled in shared memory."""
        return self._row > UNSWIZZLED

    @property
    def params(self) -> int:
        """Bytes of the metadata of 64 rows and a step."""
        return ROWS // BLOCK * self.blocks * WORDS_BYTES

    @property
    def blocks(self) -> int:
        """Blocks of 32 columns in a step."""
        return 4 if self.fp8 or self.wide else 2

    @property
    def _products(self) -> int:
        """Instructions for 64 rows of X and a step."""
        return 4 if self.wide else 2

    @property
    def kinds(self) -> tuple[Params, ...]:
        """The parameters besides the numbers."""
        return (Params("metadata", self.params, 4 if self.paired else 3),)

    def load_params(self, rows: int, box: str, several: bool, maps: list[int], row: str, k: str) -> str:
        """See `Stage.load_params`."""
        # Words of 32 or 64 rows come at a time.
        (number,), (metadata,) = maps, self.kinds
        dims, shift = metadata.dims, 6 if self.paired else 5
        load = f"cp.async.bulk.tensor.{dims}d.shared::cluster.global.mbarrier::complete_tx::bytes"
        at = "{zero, group, zero, block}" if self.paired else "{zero, group, block}"
        begin = (
            ".reg .b64 map; .reg .b32 zero, group, block;"
            f"mov.b64 map, gemm_any_width_param_{number}; cvta.param.u64 map, map; mov.b32 zero, 0;"
            f"shr.u32 group, {k}, 5; shr.u32 block, {row}, {shift};"
        )
        if not several:
            return f"{{ {begin} {load} [params], [map, {at}], [at]; }}"
        return (
            # The last load may repeat words of the one before.
            f"{{ .reg .pred more; .reg .b32 first, last, next, own, to, count; {begin} mov.b32 first, block;"
            f"shr.u32 count, {box}, {shift}; sub.s32 last, {rows >> shift}, count; mov.b32 next, 0;\n"
            f"NEXT: min.s32 own, next, last; mad.lo.s32 to, own, {self.params >> (6 - shift)}, params;"
            f"add.s32 block, first, own; {load} [to], [map, {at}], [at];"
            f"add.s32 next, next, count; setp.lt.s32 more, next, {rows >> shift}; @more bra NEXT; }}"
        )

    def begin(self, rows: int, first: int, stages: str, y_rows: str) -> str:
        """See `Stage.begin`."""
        # By how many bits of the thread's number, a mask for them, and bytes for each. A lane is 4 g + t.
        rows_bytes = self.blocks * WORDS_BYTES
        places = [(1, 1, WORDS_BYTES), (2, 7, 16)]
        if self.paired:
            # A warp has eight rows of each half, which are the lower or the upper half of the words of both.
            places.append((6, 1, 8))
        else:
            places += [(5, 1, 8), (6, 1, rows_bytes)]
        if not self.fp8:
            # Of the first instruction's words lanes with t < 2 have those that it reads.
            places.append((0, 1, 4))
        elif self.paired:
            places.append((0, 1, rows_bytes))
        # The halves of two words that a thread takes: with fp8, its row is one of the first eight or of the last eight.
        which = 5 if self.paired else 0
        pick = (
            f"shr.u32 part, lane, {which}; and.b32 part, part, 1; setp.ne.s32 upper, part, 0;"
            f"selp.b32 pick, {0x7632}, {0x5410}, upper;"
        )
        return (
            f"{self._place()} .reg .pred upper; .reg .b32 lane, part, params, first_params, pick; mov.u32 lane, %tid.x;"
            f"mad.lo.s32 params, {y_rows}, {LINE_BYTES * self.y_blocks}, {rows // 16 * self.words};"
            f"mul.lo.s32 first_params, params, {stages};"
            "mov.b32 params, global_smem; add.s32 first_params, first_params, params;"
            f"add.s32 first_params, first_params, {first * self.params // ROWS};"
            + "".join(
                f"shr.u32 part, lane, {by}; and.b32 part, part, {mask}; mad.lo.s32 first_params, part, {each},"
                " first_params;"
                for by, mask, each in places
            )
            + pick * (self.paired or self.fp8)
        )

    def _place(self) -> str:
        """Assembly that finds a thread's first kept number of 8 bits in a block of 64 rows."""
        if not self.code:
            return ""
        # Rows of 64 bytes are swizzled: in row i, the n-th 16 bytes lie where those of number n xor (i / 2) would.
        swizzle = "shr.u32 quad, quad, 1; mad.lo.s32 place, quad, 16, place;" if self.is_swizzled else ""
        return (
            # A warp has 16 rows, and a thread the row that is its number divided by 4, and the row 8 below it.
            ".reg .b32 place, quad; mov.u32 quad, %tid.x; shr.u32 place, quad, 5; and.b32 place, place, 3;"
            f"mul.lo.s32 place, place, {16 * self._row}; shr.u32 quad, quad, 2; and.b32 quad, quad, 7;"
            f"mad.lo.s32 place, quad, {self._row}, place;"
            f"{swizzle} mov.u32 quad, %tid.x; and.b32 quad, quad, 3; mad.lo.s32 place, quad, 2, place;"
            # An address in a matrix descriptor lacks the bits that say which program of a cluster has the memory.
            f"mov.b32 quad, global_smem; and.b32 quad, quad, {0xFF000000}; add.s32 place, place, quad;"
        )

    def _stored(self, which: int, i: int) -> str:
        """Assembly that loads a thread's kept numbers of 8 bits of 64 rows and a step."""
        lines = []
        for n, register in enumerate(self._pairs(which, i)):
            part, rest = divmod(n, 4)
            at = ROWS * self._row * i + 8 * (rest // 2) + 8 * self._row * (rest % 2)
            if not rest:
                # Without a swizzle these bits of the address are 0, so that the xor adds.
                lines.append(f"xor.b32 part8, bytes, {16 * part};")
            lines.append(f"ld.shared.b16 {register}, [part8 + {at}];")
        return "".join(lines)

    def _pairs(self, which: int, i: int) -> list[str]:
        """The registers of pairs of kept numbers of 8 bits, which become those of all of a step's instructions."""
        return [f"both{which}{i}_{n}" for n in range(4 * self._products)]

    def _numbers(self, which: int, i: int, kind: str) -> str:
        """Assembly that widens them."""
        kept = [x for number in range(self._products) for x in _registers(which, i, number)]
        return "".join(
            DECODE[self.code](*pair, kind) for pair in zip(kept, self._pairs(which, i), strict=True)
        )

    def _words(self, register: str, at: int) -> str:
        """Assembly that loads a thread's word of metadata, which is `at` bytes after its first one of the stage."""
        load = f"ld.shared.b32 {register}, [params + {at}];"
        if not (self.paired or self.fp8):
            return load
        # The next 16 columns, or the same ones of the other half's rows.
        other = at + (4 if self.fp8 else self.blocks * WORDS_BYTES)
        return f"{load} ld.shared.b32 part, [params + {other}]; prmt.b32 {register}, {register}, part, pick;"

    def steps(
        self, sums: list[list[str]], KIND: str, turned: bool, promotes: bool, rows: int, arrived: str,
        release: Callable[[str], str], go_on: str, turns: str, ends: str,
    ) -> str:  # fmt: skip
        """See `Stage.steps`.

        Args:
            promotes: whether each round is summed separately and then added. It has as many numbers that are multiplied
                as a step of dense fp8.
        """
        own, kind = range(len(sums)), KIND.split(".")[0]
        each = rows * self.params // ROWS
        found = [[f"n{len(row) * i + j}" for j in range(len(row))] for i, row in enumerate(sums)]
        pairs = [pair for both in zip(sums, found, strict=True) for pair in zip(*both, strict=True)]
        declared, added = self._registers(len(sums)), ""
        if promotes:
            declared += f" .reg .f32 n<{len(pairs)}>;"
            added = "".join(f"add.f32 {total}, {total}, {number};" for total, number in pairs)

        def load(which: int) -> str:
            lines = [
                f"{{ {arrived} }} mad.lo.s32 params, stage, {each}, first_params;",
                self._loads(which, len(sums)),
                f"mov.b32 x{which}, x; mov.b32 y{which}, y;",
            ]
            if self.code:
                # The address in a matrix descriptor has 14 bits.
                lines.append(
                    "and.b32 bytes, x, 0x3fff; shl.b32 bytes, bytes, 4; add.s32 bytes, bytes, place;"
                )
                lines += [self._stored(which, i) for i in own]
            return "".join(lines)

        def multiply(which: int) -> str:
            lines = [self._numbers(which, i, kind) for i in own] if self.code else []
            lines.append("wgmma.fence.sync.aligned;")
            for i in own:
                for number in range(self._products):
                    adds = bool(number or which or not promotes)
                    lines.append(
                        self._product((found if promotes else sums)[i], KIND, turned, which, i, number, adds)
                    )
            return "".join([*lines, "wgmma.commit_group.sync.aligned;"])

        def done(pending: int) -> str:
            return f"wgmma.wait_group.sync.aligned {pending}; {release('before')}"

        # `go_on` sets `before` to the stage that it leaves.
        if self.code or len(sums) > 1:
            turn = f"{load(0)} {go_on} {load(1)} {multiply(0)} {multiply(1)}"
        else:
            # These products take less time, and waiting for two stages would delay the first ones.
            turn = f"{load(0)} {multiply(0)} {go_on} {load(1)} {multiply(1)}"
        turn += f"{done(1)} {go_on} {done(0)} {added}"
        few = (
            f"FEW: and.b32 rest, left, {TOGETHER - 1}; setp.eq.s32 few, rest, 0; @few bra.uni STEP;"
            f"{load(0)} {multiply(0)} {go_on} {done(0)} {added} @more bra.uni FEW; bra.uni DONE;"
        )
        return (
            f"{{ .reg .pred few; .reg .b32 rest; {declared} \n{few}\n"
            f"STEP: {turn} @more bra.uni STEP;\nDONE: {turns + ends} }}"
        )

    def _registers(self, count: int) -> str:
        """Assembly that declares the registers of metadata and of kept numbers, for a multiple of 64 rows of X."""
        each = [
            (which, i, number) for which in range(2) for i in range(count) for number in range(self._products)
        ]
        # Of numbers of 16 bits, a word serves two instructions.
        names = dict.fromkeys(self._word(*one) for one in each)
        text = f".reg .b32 {', '.join(names)}, x0, x1, y0, y1;"
        if self.wide:
            text += ".reg .b32 y_next; shr.u32 y_next, y_rows, 1;"
        if not self.code:
            return text
        kept = [x for one in each for x in _registers(*one)]
        pairs = [x for which in range(2) for i in range(count) for x in self._pairs(which, i)]
        return (
            f"{text} .reg .b32 {', '.join(kept)}, bytes, part8, left8, right8; .reg .b16 {', '.join(pairs)};"
        )

    def _word(self, which: int, i: int, number: int) -> str:
        """The register of an instruction's metadata."""
        return f"words{which}{i}{number if self.fp8 else number // 2 if self.wide else ''}"

    def _loads(self, which: int, count: int) -> str:
        """Assembly that loads a thread's words of metadata of a step, for a multiple of 64 rows of X."""
        return "".join(
            self._words(
                self._word(which, i, word * (self._products // 2)), self.params * i + 2 * word * WORDS_BYTES
            )
            for i in range(count)
            for word in range(self.blocks // 2)
        )

    def _product(
        self, sums: list[str], KIND: str, turned: bool, which: int, i: int, number: int, adds: bool
    ) -> str:  # fmt: skip
        """Assembly of one of a step's products of 64 rows of X.

        Args:
            which: of the two sets of registers.
            number: which of the products, along K.
            adds: whether it is added to what the registers have.
        """
        x, behind = "own_x", "1, 1" if self.fp8 else f"1, 1, 0, {int(turned)}"
        if self.code:
            x, behind = f"{{{', '.join(_registers(which, i, number))}}}", f"1, 1, {int(turned)}"
        # Each thread of a warp has metadata of 64 columns of fp8; of 32 columns of the others, half of the threads.
        depth, selector = (64, 0) if self.fp8 else (32, number % 2)
        units, head = (2 * _UNITS, HEAD) if self.wide else (_UNITS, _HEAD)
        return (
            f"add.s32 own, x{which}, {units * i + 2 * number}; mov.b64 own_x, {{own, {head}}};"
            f"add.s32 own, y{which}, {number % 2 * (256 if turned else 4)};"
            f"{'add.s32 own, own, y_next;' * (number > 1)} mov.b64 own_y, {{own, {HEAD}}};"
            f"wgmma.mma_async.sp.sync.aligned.m64n{2 * len(sums)}k{depth}.f32.{KIND}"
            f" {{{', '.join(sums)}}}, {x}, own_y, {self._word(which, i, number)}, {selector}, {int(adds)}, {behind};"
        )
