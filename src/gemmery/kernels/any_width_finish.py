"""The epilogue and the store of tiles of any width, part by part; see `any_width`."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from . import any_width_given as given
from .any_width_acc import blocks_of, columns_of, in_block, picked
from .any_width_cut import summed
from .any_width_load import (
    LAST_ROW,
    in_groups,
    is_any,
    is_batch,
    is_paired,
    issue,
    maps_of,
    matrix_of,
    unused,
)
from .dialect import value_of
from .rings import applied, barrier, column_halves, upright


@gluon.constexpr_function
def lie_beside(X_FORM, SECOND, X_ROWS):
    """Whether the parts of a program's last tile are adjacent in the ring."""
    return X_FORM == "packed" or X_FORM.startswith("sparse") or SECOND is not None or X_ROWS % 64 > 0


@gluon.jit
def slots_of(
    ring, is_last, is_whole, width, own_slot, CUTS: gl.constexpr, BEFORE: gl.constexpr, PINGPONG: gl.constexpr,
    X_FORM: gl.constexpr, SECOND: gl.constexpr, X_ROWS: gl.constexpr, PART: gl.constexpr,
):  # fmt: skip
    """Whether a tile's parts are spread over the ring, and the first of their slots; see `finish_tile`.

    They are for the program's last tile, when nothing more is loaded, unless it is cut along K. Returns once the slots
    are free.

    Args:
        BEFORE: rows of X that the warpgroups before this one store.
    """
    BESIDE: gl.constexpr = lie_beside(X_FORM, SECOND, X_ROWS)
    spread = is_last
    if not BESIDE:
        spread = spread & (gl.cdiv(width, PART) <= ring[1])
    if CUTS:
        spread = spread & is_whole
    in_ring = BEFORE // PART
    if BESIDE:
        in_ring = BEFORE // 64 * gl.cdiv(width, PART) * (1 if SECOND is None else 2)
    first_slot = gl.where(spread, in_ring, own_slot)
    if spread:
        if PINGPONG or BESIDE:
            # Other warpgroups read what is there.
            mbarrier.wait(unused(ring), 0)
        barrier()
    return spread, first_slot


@builtin
def store_slot(at, warp, row, col, shape, X_FORM, Y_FORM, MAP, _semantic=None):
    """One thread of a warp begins to store a part of a result from a slot.

    A result of groups of rows has three dimensions along its rows, of 2^30 rows each or more. The address of row
    (z, y, x) is that of row x + y + (2^34 / stride - 1) z. So the row with x = 2^30 - (end - row), y = end and z = 2^30
    is number `row`, since addresses are of 64 bits, and TMA leaves out rows from `end` on, where x would be 2^30. The
    idea is that of `tools/ragged_tma.py` of Triton.

    Args:
        at: the slot's place, in bytes from the beginning of shared memory.
        row, col: where the part begins.
        shape: (end of the rows, columns of the product, which matrix of a batch, and how many groups of rows).
        X_FORM, Y_FORM: the forms of the operands.
        MAP: the number of the kernel's parameter that is the result's tensor map; None for the output's.
    """
    number = value_of(MAP) or maps_of(X_FORM, Y_FORM).out
    if is_any("grouped", X_FORM, Y_FORM):
        issue(
            "{ .reg .b32 x, z; mov.b32 at, global_smem; add.s32 at, at, $2; sub.s32 x, $3, $5;"
            f"add.s32 x, x, {LAST_ROW.value}; mov.b32 z, {LAST_ROW.value};"
            "@own cp.async.bulk.tensor.4d.global.shared::cta.bulk_group [map, {$4, x, $5, z}], [at]; }"
            "@own cp.async.bulk.commit_group;",
            warp, [at, row, col, shape.values[0]], number, _semantic=_semantic,
        )  # fmt: skip
        return
    batch = matrix_of(shape.values[2], X_FORM, Y_FORM)
    made, hint, policy = "", "", ""
    if is_any("ranged", X_FORM, Y_FORM):
        # Many short ranges take as long as their stores, which are faster if results leave L2 first
        # (`grouped_starts-bf16.json`).
        made = ".reg .b64 policy; createpolicy.fractional.L2::evict_first.b64 policy, 1.0;"
        hint, policy = ".L2::cache_hint", ", policy"
    issue(
        f"{{ {made} mov.b32 at, global_smem; add.s32 at, at, $2;"
        f"@own cp.async.bulk.tensor.{2 + len(batch)}d.global.shared::cta.bulk_group{hint}"
        f" [map, {{$4, $3{', $5' * len(batch)}}}], [at]{policy}; @own cp.async.bulk.commit_group; }}",
        warp, [at, row, col, *batch], number, _semantic=_semantic,
    )  # fmt: skip


@builtin
def wait_for_slot(warp, _semantic=None):
    """Waits, in one warp, until its stores have read their slots."""
    gl.inline_asm_elementwise(
        "{ .reg .pred own; .reg .b32 warp; mov.u32 warp, %tid.x; shr.u32 warp, warp, 5; and.b32 warp, warp, 3;"
        "setp.eq.u32 own, warp, $1; @own cp.async.bulk.wait_group.read 0; mov.b32 $0, 0; }",
        "=r,r", [warp], dtype=gl.int32, is_pure=False, pack=1, _semantic=_semantic,
    )  # fmt: skip


@gluon.jit
def leave(
    value, slots, slot, warp, waits, row, col, shape, EACH: gl.constexpr, SLOT: gl.constexpr, X_FORM: gl.constexpr,
    Y_FORM: gl.constexpr, MAP: gl.constexpr,
):  # fmt: skip
    """Begins to store a part of a result through a slot.

    Args:
        waits: whether the warp may still be storing an earlier part from the slot.
        EACH: columns of the product that make one of the output. A slot has room for all.
        SLOT: bytes of a slot.
        shape, X_FORM, Y_FORM, MAP: see `store_slot`.
    """
    if waits:
        wait_for_slot(warp)
        barrier()
    slots.index(slot * EACH).store(value.to(slots.dtype, bitcast=True))
    hopper.fence_async_shared()
    barrier()
    store_slot(slot * SLOT, warp, row, col, shape, X_FORM, Y_FORM, MAP)


@gluon.jit
def finish_part(
    blocks, out, slots, ring, first_slot, own_slot, spread, part, taken, in_ring, args, shape, row, col,
    GIVEN: gl.constexpr, SECOND: gl.constexpr, GROUP: gl.constexpr, EPILOGUE: gl.constexpr, CAST: gl.constexpr,
    SWAP: gl.constexpr, X_FORM: gl.constexpr, Y_FORM: gl.constexpr, BUFFERS: gl.constexpr,
):  # fmt: skip
    """Epilogue and store of 64 rows of X by some of Y, which begin at `row` and `col`, through a slot.

    Args:
        first_slot, own_slot, spread, taken: see `finish_tile`.
        part: which part of the tile this is.
        in_ring: the part's slot, counted from the first, where parts are spread over the ring.
    """
    PAIRED: gl.constexpr = is_paired(X_FORM, Y_FORM)
    EACH: gl.constexpr = 2 if PAIRED else 1
    SLOT: gl.constexpr = out.block_type.shape[-2] * out.block_type.shape[-1] * 2 * EACH
    at_row, at_col = row, col
    if SWAP:
        at_row, at_col = col, row
    block = upright(columns_of(blocks), SWAP, PAIRED)
    # Issuing a store takes a while, so warps take turns.
    number = taken + part
    if SECOND is not None:
        number = 2 * part
    slot = first_slot + gl.where(spread, in_ring, number % BUFFERS)
    warp = gl.where(spread, part % 4, number % BUFFERS)
    waits = spread == 0
    if GIVEN is not None:
        # Both numbers of a pair make one.
        like = block
        if PAIRED:
            like, _ = column_halves(block)
        read = given.block_of(
            ring, slots, part, taken, own_slot, spread, slot, like, GIVEN[1], GROUP, EACH, BUFFERS
        )  # fmt: skip
        args = (args, read)
    GROUPED: gl.constexpr = in_groups(X_FORM, Y_FORM)
    value = applied(
        block, args, shape, at_row, at_col, EPILOGUE, PAIRED, GROUPED and is_batch(X_FORM, Y_FORM)
    )
    if GROUPED:
        # Rows after the last group become 0.
        value = gl.where(shape[2] < shape[3], value, gl.zeros_like(value))
    if GIVEN is not None:
        # All threads have read the part, whose slot may be this one.
        barrier()
        waits = gl.to_tensor(False)
    second = None
    if SECOND is not None:
        value, second = value
    value = CAST(value, out.dtype)
    at_col = at_col // EACH
    leave(value, slots, slot, warp, waits, at_row, at_col, shape, EACH, SLOT, X_FORM, Y_FORM, None)
    if SECOND is not None:
        slot = first_slot + gl.where(spread, in_ring + 1, (number + 1) % BUFFERS)
        warp = gl.where(spread, (part + 2) % 4, (number + 1) % BUFFERS)
        leave(second, slots, slot, warp, waits, at_row, at_col, shape, EACH, SLOT, X_FORM, Y_FORM, SECOND)


@gluon.jit
def finish_next(
    blocks, out, slots, ring, ring_slots, own_slot, spread, part, total, taken, m, i, cut, args, shape, row, col, width,
    GIVEN: gl.constexpr, SECOND: gl.constexpr, GROUP: gl.constexpr, EPILOGUE: gl.constexpr, CAST: gl.constexpr,
    SWAP: gl.constexpr, X_FORM: gl.constexpr, Y_FORM: gl.constexpr, BUFFERS: gl.constexpr, PART: gl.constexpr,
    BARRIERS_AT: gl.constexpr,
):  # fmt: skip
    """Finishes a tile's part number `part` of `total`, which is number `i` of its 64 rows of X number `m`.

    Args:
        ring_slots: see `any_width_given.read_others`.
        own_slot, spread, taken, cut: see `finish_tile`.
    """
    if GIVEN is not None:
        EACH: gl.constexpr = 2 if is_paired(X_FORM, Y_FORM) else 1
        given.read_others(
            out, part, (row, col, width), total, taken, own_slot, spread, ring_slots, GIVEN[0], GROUP, SWAP, EACH,
            BUFFERS, PART, BARRIERS_AT,
        )  # fmt: skip
    first_slot, each, every = ring_slots
    at = gl.minimum(i * PART, width - PART)
    if cut is not None:
        blocks = summed(blocks, cut, (m * width + at) // 8)
    finish_part(
        blocks, out, slots, ring, first_slot, own_slot, spread, part, taken, m * every + i * each, args, shape,
        row + 64 * m, col + at, GIVEN, SECOND, GROUP, EPILOGUE, CAST, SWAP, X_FORM, Y_FORM, BUFFERS,
    )  # fmt: skip


@gluon.jit
def finish_tile(
    acc, out, slots, ring, args, shape, row, col, width, spread, first_slot, own_slot, cut, taken,
    GIVEN: gl.constexpr, SECOND: gl.constexpr, GROUP: gl.constexpr, EPILOGUE: gl.constexpr, CAST: gl.constexpr,
    SWAP: gl.constexpr, LOOPS: gl.constexpr, X_FORM: gl.constexpr, Y_FORM: gl.constexpr, OWN: gl.constexpr,
    X_ROWS: gl.constexpr, BUFFERS: gl.constexpr, PART: gl.constexpr, BARRIERS_AT: gl.constexpr,
):  # fmt: skip
    """Epilogue and store of a warpgroup's part of a tile, `PART` columns at a time.

    The last columns may overlap those before. They are then stored twice, with the same bits.

    Args:
        spread: whether each part has its own slot, in the ring, where this warpgroup's rows of X were: 64 rows of
            X have one in each stage. With a packed weight, whose words are smaller, and with two results, all parts
            are adjacent there. Otherwise parts take the warpgroup's `BUFFERS` in turn.
        first_slot: the first of these slots.
        own_slot: the first of the warpgroup's slots.
        cut: see `summed`; None if no tile is cut.
        taken: parts of the tiles before, where the epilogue reads a matrix; otherwise 0.
        LOOPS: whether a loop runs over the parts. The unrolled code of a long epilogue takes longer to fetch than to
            run.
    """
    COUNT: gl.constexpr = len(acc) // (OWN // 64)
    BESIDE: gl.constexpr = lie_beside(X_FORM, SECOND, X_ROWS)
    RESULTS: gl.constexpr = 1 if SECOND is None else 2
    # Slots of 64 rows of X, and from one part to the next.
    SLOTS: gl.constexpr = 64 // PART
    NEXT: gl.constexpr = RESULTS if BESIDE else X_ROWS // PART
    parts = gl.cdiv(width, PART)
    total = OWN // 64 * parts
    own = SLOTS
    if BESIDE:
        own = parts * RESULTS
    ring_slots = (first_slot, NEXT, own)
    if LOOPS:
        for part in range(total):
            m = part // parts
            i = part - m * parts
            blocks = picked(acc, in_block(m * (COUNT * 8 // PART) + i), PART)
            finish_next(
                blocks, out, slots, ring, ring_slots, own_slot, spread, part, total, taken, m, i, cut, args, shape, row,
                col, width, GIVEN, SECOND, GROUP, EPILOGUE, CAST, SWAP, X_FORM, Y_FORM, BUFFERS, PART, BARRIERS_AT,
            )  # fmt: skip
    else:
        for m in gl.static_range(OWN // 64):
            for i in gl.static_range(COUNT * 8 // PART):
                if i < parts:
                    blocks = blocks_of(acc, m * COUNT + i * PART // 8, PART // 8)
                    finish_next(
                        blocks, out, slots, ring, ring_slots, own_slot, spread, m * parts + i, total, taken, m, i, cut,
                        args, shape, row, col, width, GIVEN, SECOND, GROUP, EPILOGUE, CAST, SWAP, X_FORM, Y_FORM,
                        BUFFERS, PART, BARRIERS_AT,
                    )  # fmt: skip
