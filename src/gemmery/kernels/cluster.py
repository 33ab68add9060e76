"""The matrix product on clusters of CTAs: TMA loads that several CTAs share, issued by a warp of their own.

For Hopper, and in Gluon, whose names are those of Triton 3.9: other versions cannot compile this. A program is a
cluster. Its tile of `BLOCK_M` by `BLOCK_N` is dealt out to the CTAs as the layout of the output's descriptor says, so
that some of them need the same block of A or of B. Such a block is read once and multicast, which halves what the L2
cache has to deliver: the limit where M is a few hundred.

Within a CTA one warp issues the loads (`produce`) and the others multiply and store (`consume`). What they share is the
`ring`: blocks of A and B for each stage of the pipeline, and for each stage three kinds of barrier:

- `full`: one a CTA, complete when both its blocks have arrived.
- `a_free` and `b_free`: one for each set of CTAs that hold the same block. All of them arrive there when they have used
  it, and the one that loads for the set waits for that.

`shape` and `state` say what there is to do, see `rings`.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from .rings import READ_ONCE, combine, finish, following


@gluon.constexpr_function
def shares(layout, dim):
    """Into how many parts the CTAs of a cluster divide dimension `dim`."""
    return 2 ** sum(basis[dim] != 0 for basis in layout.cga_layout)


@gluon.constexpr_function
def sets(layout):
    """How many different blocks the CTAs of a cluster hold."""
    return 2 ** sum(any(basis) for basis in layout.cga_layout)


@gluon.constexpr_function
def barriers_of_sets(layout):
    """The layout of barriers of which CTAs that hold the same block share one."""
    bases: list[list[int]] = []
    for basis in layout.cga_layout:
        bases.append([2 ** sum(any(base) for base in bases)] if any(basis) else [0])
    return mbarrier.MBarrierLayout(bases)


@gluon.constexpr_function
def all_load(*layouts):
    """Whether every CTA of a cluster loads a block of one of the operands: it is the first of those that hold it."""
    masks = [sum(2**bit for bit, basis in enumerate(each.cga_layout) if any(basis)) for each in layouts]
    return all(any(rank & mask == rank for mask in masks) for rank in range(2 ** len(layouts[0].cga_layout)))


@gluon.constexpr_function
def accumulator_layout(layout, rows, cols, warps):
    """A tile's accumulator: 64 rows a warpgroup, and where there are no more rows the columns divided."""
    down = min(warps, rows // shares(layout, 0) // 16)
    return gl.NVMMADistributedLayout(
        version=[3, 0],
        warps_per_cta=[down, warps // down],
        instr_shape=[16, min(256, cols // shares(layout, 1) // (warps // down)), 16],
        cga_layout=[list(basis) for basis in layout.cga_layout],
    )


@gluon.constexpr_function
def one_a_thread(warps, ctas):
    """The layout of a vector with one element a thread; each CTA has its own."""
    return gl.BlockedLayout([1], [32], [warps], [0], [[0]] * (ctas.bit_length() - 1))


@gluon.constexpr_function
def policy(stream):
    """What TMA is told of blocks of B, which with `stream` are read once."""
    return READ_ONCE.value if stream else None


@gluon.jit
def cta_rank():
    """The number of this CTA in its cluster."""
    return gl.inline_asm("mov.u32 $0, %cluster_ctarank;", "=r", [], gl.int32, is_pure=True)


@gluon.jit
def moved_up(row, end, LAYOUT: gl.constexpr, BLOCK_M: gl.constexpr, STRICT: gl.constexpr):
    """The row at which a tile begins for this CTA, so that none of its own rows lies behind `end`, if there are enough.

    TMA fills rows outside with zeros, at a tenth of the speed of loads. The rows that this CTA then has in common with
    one above it are computed and stored twice, with the same bits: they are summed in the same order, unless tiles are
    cut along K at different steps. So `STRICT` stays within the tile.
    """
    ROWS: gl.constexpr = BLOCK_M // shares(LAYOUT, 0)
    above = 0
    for bit in gl.static_range(len(LAYOUT.cga_layout)):
        above += (cta_rank() >> bit & 1) * (LAYOUT.cga_layout[bit][0] * ROWS)
    first = max(min(row + above, end - ROWS), row if STRICT else 0)
    return first - above


@gluon.jit
def locate(
    unit, state, shape, PLACE: gl.constexpr, LAYOUT: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr,
    BAND_M: gl.constexpr, SHIFT: gl.constexpr, STRICT: gl.constexpr,
):  # fmt: skip
    """Where a unit begins, the end of its rows, and its range of K: row, col, end, first_k, last_k.

    With `SHIFT` the row may differ between the CTAs of a cluster, see `moved_up`.
    """
    _, row, col, end, first_k, last_k = PLACE(unit, state, shape, BLOCK_M, BLOCK_N, BAND_M)
    if SHIFT:
        row = moved_up(row, end, LAYOUT, BLOCK_M, STRICT)
    return row, col, end, first_k, last_k


@gluon.jit
def load(
    a, b, ring, row, col, first_k, last_k, stage, phase, BLOCK_K: gl.constexpr, STAGES: gl.constexpr,
    A_ROWS: gl.constexpr, B_ROWS: gl.constexpr, STREAM: gl.constexpr,
):  # fmt: skip
    """Loads the blocks of one tile, from `first_k` to `last_k`, as far ahead as there are stages."""
    a_blocks, b_blocks, full, a_free, b_free = ring
    for k in range(first_k, last_k, BLOCK_K):
        mbarrier.wait(a_free.index(stage), phase)
        mbarrier.wait(b_free.index(stage), phase)
        arrived = full.index(stage)
        if not all_load(a.layout, b.layout):
            # Who loads nothing has not waited for anything, and must not get ahead of what others load for it.
            mbarrier.wait(arrived, phase)
        mbarrier.expect(arrived, a.nbytes_per_cta + b.nbytes_per_cta)
        at_a = [row, k] if A_ROWS else [k, row]
        at_b = [k, col] if B_ROWS else [col, k]
        to_b = b_blocks.index(stage).reinterpret(b.dtype, b.block_shape, b.layout)
        tma.async_load(a, at_a, arrived, a_blocks.index(stage), multicast=True)
        tma.async_load(b, at_b, arrived, to_b, multicast=True, cache_policy=policy(STREAM))
        stage, phase = following(stage, phase, STAGES)
    return stage, phase


@gluon.jit
def produce(
    a, b, b_tail, ring, shape, state, PLACE: gl.constexpr, TAIL_PLACE: gl.constexpr, LAYOUT: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, BAND_M: gl.constexpr, STAGES: gl.constexpr,
    A_ROWS: gl.constexpr, B_ROWS: gl.constexpr, TAIL: gl.constexpr, SPLIT: gl.constexpr, SHIFT: gl.constexpr,
    STREAM: gl.constexpr,
):  # fmt: skip
    """Loads what `consume` multiplies, in the same order."""
    tiles, tail_units = state[0], state[1]
    stage = gl.to_tensor(0)
    # The parity before the first: what has not been used yet is free.
    phase = gl.to_tensor(1)
    for unit in range(gl.program_id(0), tiles, gl.num_programs(0)):
        row, col, _, first_k, last_k = locate(
            unit, state, shape, PLACE, LAYOUT, BLOCK_M, BLOCK_N, BAND_M, SHIFT, SPLIT
        )
        stage, phase = load(
            a, b, ring, row, col, first_k, last_k, stage, phase, BLOCK_K, STAGES, A_ROWS, B_ROWS, STREAM
        )
    if TAIL > 1:
        for unit in range(gl.program_id(0), tail_units, gl.num_programs(0)):
            row, col, _, first_k, last_k = locate(
                unit, state, shape, TAIL_PLACE, LAYOUT, BLOCK_M, BLOCK_N, BAND_M, SHIFT, SPLIT
            )
            stage, phase = load(
                a, b_tail, ring, row, col, first_k, last_k, stage, phase, BLOCK_K, STAGES, A_ROWS, B_ROWS, STREAM
            )  # fmt: skip
    if SPLIT:
        unit = gl.program_id(0)
        if unit < tail_units:
            row, col, _, first_k, last_k = locate(
                unit, state, shape, TAIL_PLACE, LAYOUT, BLOCK_M, BLOCK_N, BAND_M, SHIFT, SPLIT
            )
            stage, phase = load(
                a, b, ring, row, col, first_k, last_k, stage, phase, BLOCK_K, STAGES, A_ROWS, B_ROWS, STREAM
            )


@gluon.jit
def add_product(x, y, acc):
    """A step along K: begins to add the product of two blocks to the sum."""
    return hopper.warpgroup_mma(x, y, acc, is_async=True)


@gluon.jit
def sum_steps(
    b, ring, first_k, last_k, stage, phase, MULTIPLY: gl.constexpr, LAYOUT: gl.constexpr, BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr, A_ROWS: gl.constexpr, B_ROWS: gl.constexpr,
):  # fmt: skip
    """The K loop: the sum of the products of a tile's blocks from `first_k` to `last_k`, at least one."""
    a_blocks, b_blocks, full, a_free, b_free = ring
    acc = gl.zeros([BLOCK_M, BLOCK_N], gl.float32, LAYOUT)
    for k in range(first_k, last_k, BLOCK_K):
        mbarrier.wait(full.index(stage), phase)
        x = a_blocks.index(stage)
        y = b_blocks.index(stage).reinterpret(b.dtype, b.block_shape, b.layout)
        x = x if A_ROWS else x.permute((1, 0))
        y = y if B_ROWS else y.permute((1, 0))
        acc = MULTIPLY(x, y, acc)
        # One product stays in flight, so the one before it is done with its blocks.
        acc = hopper.warpgroup_mma_wait(1, deps=[acc])
        # Computed, not kept from the last round: Triton 3.9 takes a variable that is set to another one for a constant.
        before = gl.where(stage == 0, STAGES - 1, stage - 1)
        mbarrier.arrive(a_free.index(before), pred=k > first_k)
        mbarrier.arrive(b_free.index(before), pred=k > first_k)
        stage, phase = following(stage, phase, STAGES)
    acc = hopper.warpgroup_mma_wait(0, deps=[acc])
    before = gl.where(stage == 0, STAGES - 1, stage - 1)
    mbarrier.arrive(a_free.index(before))
    mbarrier.arrive(b_free.index(before))
    return acc, stage, phase


@gluon.jit
def last_to_arrive(semaphore, others):
    """Counts this CTA once all its threads are here, and says whether `others` came before it; see `rings`."""
    layout: gl.constexpr = one_a_thread(gl.num_warps(), gl.num_ctas())
    gl.barrier()
    # Triton's own atomics answer to a whole cluster. Here the first thread of a CTA asks, and a sum tells the others.
    before = gl.inline_asm(
        "{ .reg .pred p; .reg .b32 t; mov.u32 t, %tid.x; setp.eq.u32 p, t, 0; mov.u32 $0, 0;"
        "@p atom.add.acq_rel.gpu.global.u32 $0, [$1], 1; }",
        "=r,l",
        [semaphore],
        gl.distributed_type(gl.int32, [32 * gl.num_warps()], layout),
    )
    last = gl.sum(before, 0) == others
    if last:
        gl.inline_asm("st.relaxed.gpu.global.u32 [$0], 0;", "l", [semaphore])
    return last


@gluon.jit
def consume(
    b, out, b_tail, out_tail, ring, args, workspace, shape, state, PLACE: gl.constexpr, TAIL_PLACE: gl.constexpr,
    MULTIPLY: gl.constexpr, EPILOGUE: gl.constexpr, CAST: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr, BAND_M: gl.constexpr, STAGES: gl.constexpr, A_ROWS: gl.constexpr, B_ROWS: gl.constexpr,
    TAIL: gl.constexpr, SPLIT: gl.constexpr, SHIFT: gl.constexpr,
):  # fmt: skip
    """Multiplies and stores: first whole tiles, then narrow ones or parts along K."""
    N = shape[1]
    tiles, tail_units, parts = state[0], state[1], state[2]
    LAYOUT: gl.constexpr = out.layout
    ACC: gl.constexpr = accumulator_layout(LAYOUT, BLOCK_M, BLOCK_N, gl.num_warps())
    staged = gl.allocate_shared_memory(out.dtype, out.block_shape, LAYOUT)
    stage = gl.to_tensor(0)
    phase = gl.to_tensor(0)
    for unit in range(gl.program_id(0), tiles, gl.num_programs(0)):
        row, col, end, first_k, last_k = locate(
            unit, state, shape, PLACE, LAYOUT, BLOCK_M, BLOCK_N, BAND_M, SHIFT, SPLIT
        )
        acc, stage, phase = sum_steps(
            b, ring, first_k, last_k, stage, phase, MULTIPLY, ACC, BLOCK_M, BLOCK_N, BLOCK_K, STAGES, A_ROWS, B_ROWS
        )  # fmt: skip
        finish(acc, out, staged, args, (end, N), row, col, EPILOGUE, CAST, False, False)
    if TAIL > 1:
        WIDTH: gl.constexpr = BLOCK_N // TAIL
        TAIL_ACC: gl.constexpr = accumulator_layout(LAYOUT, BLOCK_M, WIDTH, gl.num_warps())
        tail_staged = staged.reinterpret(out_tail.dtype, out_tail.block_shape, out_tail.layout)
        for unit in range(gl.program_id(0), tail_units, gl.num_programs(0)):
            row, col, end, first_k, last_k = locate(
                unit, state, shape, TAIL_PLACE, LAYOUT, BLOCK_M, BLOCK_N, BAND_M, SHIFT, SPLIT
            )
            acc, stage, phase = sum_steps(
                b_tail, ring, first_k, last_k, stage, phase, MULTIPLY, TAIL_ACC, BLOCK_M, WIDTH, BLOCK_K, STAGES,
                A_ROWS, B_ROWS,
            )  # fmt: skip
            finish(acc, out_tail, tail_staged, args, (end, N), row, col, EPILOGUE, CAST, False, False)
    if SPLIT:
        partials, semaphores = workspace
        unit = gl.program_id(0)
        if unit < tail_units:
            row, col, end, first_k, last_k = locate(
                unit, state, shape, TAIL_PLACE, LAYOUT, BLOCK_M, BLOCK_N, BAND_M, SHIFT, SPLIT
            )
            acc, stage, phase = sum_steps(
                b, ring, first_k, last_k, stage, phase, MULTIPLY, ACC, BLOCK_M, BLOCK_N, BLOCK_K, STAGES, A_ROWS, B_ROWS
            )  # fmt: skip
            tile = unit // parts
            semaphore = semaphores + tile * gl.num_ctas() + cta_rank()
            acc, done = combine(acc, tile, parts, partials, semaphore, last_to_arrive, 0, 1)
            if done:
                finish(acc, out, staged, args, (end, N), row, col, EPILOGUE, CAST, False, False)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["M", "N", "K", "tiles", "tail_units", "parts", "part_k"])
def gemm_cluster(
    a, b, out, b_tail, out_tail, M, N, K, tiles, tail_units, parts, part_k, place_args, args, workspace,
    PLACE: gl.constexpr, TAIL_PLACE: gl.constexpr, MULTIPLY: gl.constexpr, EPILOGUE: gl.constexpr, CAST: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, BAND_M: gl.constexpr, STAGES: gl.constexpr,
    A_ROWS: gl.constexpr, B_ROWS: gl.constexpr, TAIL: gl.constexpr, SHIFT: gl.constexpr, STREAM: gl.constexpr,
):  # fmt: skip
    """As many clusters as run at once, each taking every num_programs-th of the first `tiles` tiles, which stay whole.

    The other tiles, which would not fill a wave, are divided into `tail_units`, in one of two ways:

    - `TAIL` above 1: tiles of `BLOCK_N / TAIL` columns, for which `b_tail` and `out_tail` are b and out.
    - With a workspace: along K, each tile in `parts` of `part_k`, one a program.

    Args:
        a, b, out: descriptors of blocks of a whole cluster. The CTAs divide those of `out`, which may be narrower than
            `BLOCK_N` and are then stored one after the other; those of `a` and `b` have the same bases, 0 along K.
        place_args, args: run-time arguments of PLACE and TAIL_PLACE, and of the epilogue.
        workspace: (partials, semaphores): memory for an fp32 tile a part, and zeros, one a cut tile and CTA of a
            cluster, which are zeros again afterwards. None where no tile is cut along K.
        CAST: `cast(value, dtype)` rounds what the epilogue returns.
        A_ROWS, B_ROWS: whether the columns of a (M, K) and of b (K, N) are adjacent, else their rows are.
        SHIFT: whether the last rows may be computed twice, see `moved_up`; not where an epilogue reads what is stored.
        STREAM: whether B is read once and leaves L2 first.
    """
    shape = (M, N, K)
    state = (tiles, tail_units, parts, part_k, place_args)
    SPLIT: gl.constexpr = workspace is not None
    a_blocks = gl.allocate_shared_memory(a.dtype, [STAGES] + a.block_shape, a.layout)  # noqa: RUF005
    b_blocks = gl.allocate_shared_memory(b.dtype, [STAGES] + b.block_shape, b.layout)  # noqa: RUF005
    full = mbarrier.allocate_mbarrier(batch=STAGES)
    a_free = gl.allocate_shared_memory(gl.int64, [STAGES, sets(a.layout)], barriers_of_sets(a.layout))
    b_free = gl.allocate_shared_memory(gl.int64, [STAGES, sets(b.layout)], barriers_of_sets(b.layout))
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(a_free.index(stage), count=1)
        mbarrier.init(b_free.index(stage), count=1)
    ring = (a_blocks, b_blocks, full, a_free, b_free)
    LAYOUT: gl.constexpr = out.layout
    gl.warp_specialize(
        [
            (
                consume,
                (
                    b, out, b_tail, out_tail, ring, args, workspace, shape, state, PLACE, TAIL_PLACE, MULTIPLY,
                    EPILOGUE, CAST, BLOCK_M, BLOCK_N, BLOCK_K, BAND_M, STAGES, A_ROWS, B_ROWS, TAIL, SPLIT, SHIFT,
                ),
            ),
            (
                produce,
                (
                    a, b, b_tail, ring, shape, state, PLACE, TAIL_PLACE, LAYOUT, BLOCK_M, BLOCK_N, BLOCK_K, BAND_M,
                    STAGES, A_ROWS, B_ROWS, TAIL, SPLIT, SHIFT, STREAM,
                ),
            ),
        ],
        [1],
        [24],
    )  # fmt: skip
