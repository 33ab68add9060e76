"""The places of tiles of any width in shared memory; see `any_width`.

Where a program's next tile is follows from divisions, and with groups of rows or ranges of K from numbers in memory.
Warpgroups would do this between two tiles, while the tensor cores may have nothing else to do. So the loading warp,
which is ahead of them, does it once and posts what they need. CUTLASS's tile schedulers do the same.

A place is `COUNT` numbers: the corner of the tile in X and in Y, the end of its rows of the output, its matrix, where
its range of K begins, and, in one number, its steps with the stage and the parity of the first one.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin

from .any_width_loop import WAIT
from .dialect import value_of

#: Places that there is memory for, a power of two. The loading warp posts a tile's place when it has issued the loads
#: of the tile before. It is at most `any_width_loop.STAGES` steps ahead then, and a tile has a step or more. So when it
#: posts a place over another one, warpgroups have taken that one.
PLACES = gl.constexpr(16)
#: Numbers of a place.
COUNT = gl.constexpr(6)
#: Words of 8 bytes: a barrier for each place, and then the places.
WORDS = gl.constexpr(PLACES.value * (1 + COUNT.value // 2))
#: Bits of the number of a stage.
BITS = gl.constexpr(4)


@gluon.jit
def post_place(places, number, corner, first_k, steps, stage, phase, LOADERS: gl.constexpr):
    """One thread of the loading warps stores a tile's place, for warpgroups that wait for it.

    Args:
        places: the address of the first word.
        number: how many were posted before.
        corner, first_k: the first four numbers and the fifth one.
        steps, stage, phase: of the tile.
        LOADERS: the number of loading warps.
    """
    row, col, end, batch = corner
    of_steps = (steps << BITS | stage) << 1 | phase
    put_place(places, number, (row, col, end, batch, first_k, of_steps), LOADERS)


@gluon.jit
def take_place(places, number):
    """Waits until a place is posted. Returns its corner, where K begins, its steps, its stage and its parity."""
    row, col, end, batch, first_k, steps = got_place(places, number)
    stage = steps >> 1 & ((1 << BITS) - 1)
    return row, col, end, batch, first_k, steps >> BITS + 1, stage, steps & 1


@builtin
def put_place(places, number, place, LOADERS, _semantic=None):
    """Stores a place; see `post_place`."""
    # The number of the first of some loading warps is a multiple of 4. That of a single one may be any.
    of_first = "mov.u32 warp, %tid.x; shr.u32 warp, warp, 5; and.b32 warp, warp, 3; setp.eq.and.u32 own, warp, 0, own;"
    gl.inline_asm_elementwise(
        f"{{ .reg .pred own; .reg .b32 warp, at, to; elect.sync _|own, 0xffffffff; {of_first * (value_of(LOADERS) > 1)}"
        f"and.b32 to, $2, {PLACES.value - 1}; mad.lo.s32 at, to, 8, $1; mad.lo.s32 to, to, {4 * COUNT.value}, $1;"
        + "".join(
            f"@own st.shared.v2.b32 [to + {8 * PLACES.value + 4 * i}], {{${3 + i}, ${4 + i}}};"
            for i in range(0, COUNT.value, 2)
        )
        + "@own mbarrier.arrive.shared::cta.b64 _, [at]; mov.b32 $0, 0; }",
        ",".join(["=r"] + ["r"] * (2 + COUNT.value)), [places, number, *place],
        dtype=gl.int32, is_pure=False, pack=1, _semantic=_semantic,
    )  # fmt: skip


@builtin
def got_place(places, number, _semantic=None):
    """Waits until a place is posted, and returns its numbers; see `take_place`."""
    number_, places_ = (f"${COUNT.value + i}" for i in range(2))
    wait = WAIT.format(barrier="at", phase="parity")
    made = gl.inline_asm_elementwise(
        f"{{ .reg .pred done; .reg .b32 at, to, parity; and.b32 to, {number_}, {PLACES.value - 1};"
        f"mad.lo.s32 at, to, 8, {places_}; mad.lo.s32 to, to, {4 * COUNT.value}, {places_};"
        f"shr.u32 parity, {number_}, {PLACES.value.bit_length() - 1}; and.b32 parity, parity, 1; {wait}"
        + "".join(
            f"ld.shared.v2.b32 {{${i}, ${i + 1}}}, [to + {8 * PLACES.value + 4 * i}];"
            for i in range(0, COUNT.value, 2)
        )
        + "}",
        ",".join(["=&r"] * COUNT.value + ["r"] * 2), [number, places],
        dtype=[gl.int32] * COUNT.value, is_pure=False, pack=1, _semantic=_semantic,
    )  # fmt: skip
    return gl.tuple(list(made))
