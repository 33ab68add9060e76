"""The places of tiles of any width in shared memory; see `any_width`.

Where a program's next tile is follows from divisions, and with groups of rows or ranges of K from numbers in memory.
Warpgroups would compute this between two tiles, while the tensor cores may be idle. The loading warp would compute it
instead of loading. So a warp of its own computes it and posts what the others need, as CUTLASS's scheduler warp does.

A place is `COUNT` numbers: the corner of the tile in X and in Y, the end of its rows of the output, its matrix, where
its range of K begins, and, in one number, its steps with the stage and the parity of the first one.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin

from .any_width_loop import STAGES, WAIT

#: Places that there is memory for, a power of two.
PLACES = gl.constexpr(16)
#: Places that may be posted and not yet taken by the loading warps, and barriers at which these arrive when they take
#: one. They take a tile's place when they have issued the loads of the tile before, which is at most
#: `any_width_loop.STAGES` steps ahead of the warpgroups, and a tile has a step or more. So when a place is posted over
#: another one, `LEAD + STAGES + 1` places later or more, warpgroups have taken that one.
LEAD, TAKEN = gl.constexpr(3), gl.constexpr(4)
assert LEAD.value + STAGES.value < PLACES.value
assert LEAD.value <= TAKEN.value
#: Numbers of a place.
COUNT = gl.constexpr(6)
#: Where the barriers of taken places lie, in words of 8 bytes: behind a barrier for each place, and the places.
TAKEN_AT = gl.constexpr(PLACES.value * (1 + COUNT.value // 2))
#: Words in all.
WORDS = gl.constexpr(TAKEN_AT.value + TAKEN.value)
#: Bits of the number of a stage.
BITS = gl.constexpr(4)


@gluon.jit
def post_place(places, number, corner, first_k, steps, stage, phase):
    """Stores a tile's place as soon as there is room, in one thread of a warp. Other warps wait for it.

    Args:
        places: the address of the first word.
        number: how many were posted before.
        corner, first_k: the first four numbers and the fifth one.
        steps, stage, phase: of the tile.
    """
    row, col, end, batch = corner
    of_steps = (steps << BITS | stage) << 1 | phase
    if number >= LEAD:
        wait_until_taken(places, number - LEAD)
    put_place(places, number, (row, col, end, batch, first_k, of_steps))


@gluon.jit
def take_place(places, number):
    """Waits until a place is posted. Returns its corner, where K begins, its steps, its stage and its parity."""
    row, col, end, batch, first_k, steps = got_place(places, number)
    stage = steps >> 1 & ((1 << BITS) - 1)
    return row, col, end, batch, first_k, steps >> BITS + 1, stage, steps & 1


@gluon.jit
def take_next(places, number):
    """As `take_place`, for loading warps, which say that they have taken it. Returns the corner, K and the steps."""
    row, col, end, batch, first_k, steps, _, _ = take_place(places, number)
    say_taken(places, number)
    return row, col, end, batch, first_k, steps


@builtin
def say_taken(places, number, _semantic=None):
    """One thread of a loading warp arrives at the barrier of a place that is taken."""
    gl.inline_asm_elementwise(
        f"{{ .reg .pred own; .reg .b32 at; elect.sync _|own, 0xffffffff; and.b32 at, $2, {TAKEN.value - 1};"
        f"mad.lo.s32 at, at, 8, $1; @own mbarrier.arrive.shared::cta.b64 _, [at + {8 * TAKEN_AT.value}];"
        "mov.b32 $0, 0; }",
        "=r,r,r", [places, number], dtype=gl.int32, is_pure=False, pack=1, _semantic=_semantic,
    )  # fmt: skip


@builtin
def wait_until_taken(places, number, _semantic=None):
    """Waits until the loading warps have taken a place."""
    wait = WAIT.format(barrier="at", phase="parity")
    gl.inline_asm_elementwise(
        f"{{ .reg .pred done; .reg .b32 at, parity; and.b32 at, $2, {TAKEN.value - 1}; mad.lo.s32 at, at, 8, $1;"
        f"add.s32 at, at, {8 * TAKEN_AT.value}; shr.u32 parity, $2, {TAKEN.value.bit_length() - 1};"
        f"and.b32 parity, parity, 1; {wait} mov.b32 $0, 0; }}",
        "=r,r,r", [places, number], dtype=gl.int32, is_pure=False, pack=1, _semantic=_semantic,
    )  # fmt: skip


@builtin
def put_place(places, number, place, _semantic=None):
    """Stores a place; see `post_place`."""
    gl.inline_asm_elementwise(
        "{ .reg .pred own; .reg .b32 at, to; elect.sync _|own, 0xffffffff;"
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
