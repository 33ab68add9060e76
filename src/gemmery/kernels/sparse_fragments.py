"""The registers that each lane of a warp gives to `mma.sp`, and how 2:4 sparse weights are read into them.

`mma.sp.m16n8k32` multiplies 16 rows of a weight, whose kept numbers are (16, 16), by 8 rows of activations, both 32
columns long. It sums eight groups of four columns. The choice of these groups is free if kept numbers, metadata and
activations agree. The choice here lets a lane read 16 bytes of kept numbers at a time, though the instruction takes
4 from a row: of a step of 128 columns, instruction `j` of four multiplies groups j, 4 + j, 8 + j, ..., 28 + j.

A lane is 4 g + t. Of a step and of 16 rows it has

- of rows g and g + 8, and of both 64 columns, the kept numbers of columns 16 t to 16 t + 15. These are four words. Word
  `j` is for instruction `j`.
- four words of metadata as they are stored, see `formats.sparse`: of the rows 16 (t // 2) below its block's first, and
  of the 64 columns number t % 2. The instruction's selector says whether lanes with t < 2 or the others give the
  metadata. So a lane's word serves one of both 16 rows of a block of 32. `of_instructions` brings the four bits of a
  group into the word of its instruction.
- of the activations in shared memory, which are stored by instruction, words t, 4 + t, 8 + t and 12 + t of row g, as
  `ldmatrix` gives them.

Values are words of 32 bits: `inline_asm_elementwise` wants as many elements of each operand. A fragment is a block
(warps along K, warps along N, 32 lanes, 8 rows of activations each, 4 registers).
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

#: Rows of a block of metadata, which a warp multiplies; numbers along K of a step of a warp; instructions of a step.
BLOCK, DEPTH, INSTRUCTIONS = gl.constexpr(32), gl.constexpr(128), gl.constexpr(4)
#: Rows of activations of an instruction.
COLUMNS = gl.constexpr(8)
#: Words of kept numbers, and of activations, of one instruction's 32 columns.
KEPT, WORDS = gl.constexpr(8), gl.constexpr(16)
#: Metadata of numbers that do not exist: their first place is below the second one.
NO_PLACES = gl.constexpr(0x44444444)


@gluon.constexpr_function
def bases(count, *shape):
    """Bases for `count` numbers, a power of two, of which the first one's place is `shape`."""
    return [[size << i for size in shape] for i in range(count.bit_length() - 1)]


@gluon.constexpr_function
def fragment(K_WARPS, N_WARPS, TILES):
    """The layout of a fragment."""
    return gl.DistributedLinearLayout(
        reg_bases=bases(4, 0, 0, 0, 0, 1) + bases(TILES, 0, 0, 0, 1, 0),
        lane_bases=bases(32, 0, 0, 1, 0, 0),
        warp_bases=bases(N_WARPS, 0, 1, 0, 0, 0) + bases(K_WARPS, 1, 0, 0, 0, 0),
        block_bases=[], shape=[K_WARPS, N_WARPS, 32, TILES, 4],
    )  # fmt: skip


@gluon.constexpr_function
def words_of_step(K_WARPS, N_WARPS, PARTS, EACH):
    """The layout of a lane's words of a step, as a block (warps along K, warps along N, 32 lanes, parts, words)."""
    return gl.DistributedLinearLayout(
        reg_bases=bases(EACH, 0, 0, 0, 0, 1) + bases(PARTS, 0, 0, 0, 1, 0),
        lane_bases=bases(32, 0, 0, 1, 0, 0),
        warp_bases=bases(N_WARPS, 0, 1, 0, 0, 0) + bases(K_WARPS, 1, 0, 0, 0, 0),
        block_bases=[], shape=[K_WARPS, N_WARPS, 32, PARTS, EACH],
    )  # fmt: skip


@gluon.constexpr_function
def activations_of_step(K_WARPS, N_WARPS, TILES):
    """The layout of an instruction's activations, as a block (rows, words): what `ldmatrix` loads."""
    return gl.DistributedLinearLayout(
        reg_bases=bases(4, 0, 4) + bases(TILES, COLUMNS.value, 0),
        lane_bases=bases(4, 0, 1) + bases(8, 1, 0),
        warp_bases=bases(N_WARPS, 0, 0) + bases(K_WARPS, 0, WORDS.value),
        block_bases=[], shape=[COLUMNS.value * TILES, WORDS.value * K_WARPS],
    )  # fmt: skip


@gluon.jit
def bytes_of_words(first, second):
    """Of two words, bytes 0 and 2 of both in turn, and bytes 1 and 3."""
    even = (first & 0x00FF00FF) | ((second & 0x00FF00FF) << 8)
    odd = ((first >> 8) & 0x00FF00FF) | (((second >> 8) & 0x00FF00FF) << 8)
    return even, odd


@gluon.jit
def nibbles_of_words(first, second):
    """Of two words, four bits of both in turn, from bits 0, 8, 16 and 24 on, and from bits 4, 12, 20 and 28 on."""
    even = (first & 0x0F0F0F0F) | ((second & 0x0F0F0F0F) << 4)
    odd = ((first >> 4) & 0x0F0F0F0F) | (((second >> 4) & 0x0F0F0F0F) << 4)
    return even, odd


@gluon.jit
def of_instructions(w0, w1, w2, w3):
    """Metadata by instruction, of metadata by columns: transposes the four bits of groups in each half of the words.

    Args:
        w0, w1, w2, w3: the words of 16 columns each. Four bits from 4 j on are those of group `j`.

    Returns:
        The words of instructions. Four bits from 4 i on are of the group that was in word `i`.
    """
    even, odd = nibbles_of_words(w0, w1)
    more_even, more_odd = nibbles_of_words(w2, w3)
    first, third = bytes_of_words(even, more_even)
    second, fourth = bytes_of_words(odd, more_odd)
    return first, second, third, fourth


@gluon.constexpr_function
def assembly(KIND, SELECTOR):
    """The instruction. `ordered_metadata` promises that metadata's places are in order; without it, it may be slow."""
    return (
        f"mma.sp::ordered_metadata.sync.aligned.m16n8k32.row.col.f32.{KIND}.{KIND}.f32"
        f" {{$0, $1, $2, $3}}, {{$4, $5, $6, $7}}, {{$8, $9, $10, $11}}, {{$0, $1, $2, $3}}, $16, {SELECTOR};"
    )


@gluon.jit
def multiplied(acc, kept, activations, places, KIND: gl.constexpr, SELECTOR: gl.constexpr):
    """The sum of a fragment and of the product of 16 rows by 32 columns with all rows of activations.

    Args:
        acc: a fragment of float32.
        kept: words, (..., 32 lanes, 1, 4).
        activations: words, a fragment.
        places: the metadata's words, (..., 32 lanes, 1, 1).
        KIND: the type of the numbers, as PTX names it.
        SELECTOR: which lanes give metadata; see the head of the module.
    """
    return gl.inline_asm_elementwise(
        assembly(KIND, SELECTOR), "=f,=f,=f,=f,r,r,r,r,r,r,r,r,0,1,2,3,r,r,r,r",
        [kept, activations, acc, places], dtype=gl.float32, is_pure=True, pack=4,
    )  # fmt: skip
