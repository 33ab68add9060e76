"""Accumulators of tiles of any width: tuples of blocks of 64 by 8; see `any_width`."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin

from .any_width_loop import switch
from .dialect import value_of
from .rings import beside

#: The accumulator of a warpgroup for 8 columns.
BLOCK8 = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 8, 16]))


@builtin
def blocks_of(acc, FIRST, COUNT, _semantic=None):
    """Some of an accumulator's blocks of 8 columns."""
    return gl.tuple(list(acc.values)[value_of(FIRST) : value_of(FIRST) + value_of(COUNT)])


@gluon.jit
def zeros_of(COUNT: gl.constexpr):
    """An accumulator of `COUNT` blocks of 8 columns."""
    acc = ()
    for _ in gl.static_range(COUNT):
        acc += (gl.zeros([64, 8], gl.float32, BLOCK8),)  # type: ignore[assignment]
    return acc


@gluon.jit
def in_block(value):
    """A block with the same number in each place of an accumulator's block, as assembly takes it."""
    return gl.full([64, 8], value, value.dtype, BLOCK8)


@gluon.jit
def sums_of(left, right):
    """The sums of two accumulators' blocks."""
    made = ()
    for i in gl.static_range(len(left)):
        made += (left[i] + right[i],)  # type: ignore[assignment]
    return made


@gluon.jit
def columns_of(blocks):
    """Blocks of 8 columns, a power of two of them, as one tensor; no number moves."""
    COUNT: gl.constexpr = len(blocks)
    if COUNT == 1:
        return blocks[0]
    else:
        left = columns_of(blocks_of(blocks, 0, COUNT // 2))
        right = columns_of(blocks_of(blocks, COUNT // 2, COUNT // 2))
        LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 8 * COUNT, 16])
        return gl.convert_layout(beside(left, right), LAYOUT, assert_trivial=True)


@builtin
def picked(acc, index, PART, _semantic=None):
    """Part number `index` of an accumulator's blocks, in separate registers."""
    numbers, size = 4 * len(acc.values), value_of(PART) // 2
    cases = [
        "".join(f"mov.b32 ${j}, ${size + first + j};" for j in range(size))
        for first in range(0, numbers, size)
    ]
    made = gl.inline_asm_elementwise(
        switch(f"${size + numbers}", range(len(cases)), cases),
        ",".join(["=&f"] * size + ["f"] * numbers + ["r"] * 4), [*acc.values, index],
        dtype=[gl.float32] * (size // 4), is_pure=True, pack=4, _semantic=_semantic,
    )  # fmt: skip
    return gl.tuple(list(made))
