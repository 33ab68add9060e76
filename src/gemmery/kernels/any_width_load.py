"""The start and the loads of tiles of any width, as assembly; see `any_width`.

At its start, a launch has to wait for its first loads. So before warps have their roles, warp 0 initializes the
barriers of the first steps, see `ahead_of`, and issues their loads. Warps 1 to 3 initialize the other barriers.
Afterwards one warp loads. For a step of a small tile, the tensor cores need less time than one thread needs to issue
two loads. So small tiles have two loading warps, one for each operand. With two, large tiles would be up to 2 % slower.
"""

from collections.abc import Callable
from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin

from .any_width_loop import STAGES, WAIT, format_of
from .any_width_places import PLACES, TAKEN, TAKEN_AT
from .any_width_stage import params_bytes, x_bytes, y_blocks_of
from .dialect import value_of

#: Bytes of a row of a stage, the unit that TMA swizzles.
ROW = gl.constexpr(128)
#: The most rows of X and of Y in tiles that two warps load. With more rows of Y one of the two has nothing to do.
SMALL = (64, 96)
#: Dimensions of the tensor map of an operand of each form.
_DIMS = {
    "rows": 2, "turned": 3, "pairs": 4, "packed": 3, "sparse": 2, "sparse pairs": 4,
    "many rows": 3, "many turned": 4, "grouped rows": 2, "ranged turned": 5,
}  # fmt: skip
#: The end of the innermost of the dimensions that rows of groups and ranges of K have, see
#: `any_width_finish.store_slot`.
LAST_ROW = gl.constexpr(1 << 30)


@gluon.constexpr_function
def ahead_of(X_ROWS):
    """The number of steps that are loaded before warps have their roles.

    A loading warp issues its first load 800 clocks after warp 0 could have issued it. With tiles of 64 rows of X, six
    steps instead of two make short products 1 to 2 % faster; with larger tiles, warp 0 would begin to multiply too late
    (`benchmarks/results/looks/any_width_cluster-bf16.json`).
    """
    return 6 if SMALL[0] == X_ROWS else 2


@gluon.constexpr_function
def is_turned(FORM):
    """Whether adjacent elements of an operand are along its rows."""
    return FORM.endswith("turned")


@gluon.constexpr_function
def is_paired(X_FORM, Y_FORM):
    """Whether two columns of the product make one of the output."""
    return X_FORM.endswith("pairs") or Y_FORM.endswith("pairs")


def is_any(kind, *forms):
    """Whether some operands are of a kind, the first word of their forms."""
    return any(value_of(form).startswith(kind) for form in forms)


def matrix_of(batch, X_FORM, Y_FORM):
    """A list with one more operand for assembly if operands are a batch or ranges of K, otherwise empty.

    Args:
        batch: the number of the matrix, or the end of the range.
    """
    return [batch] if is_any("many", X_FORM, Y_FORM) or is_any("ranged", X_FORM, Y_FORM) else []


@gluon.constexpr_function
def in_groups(X_FORM, Y_FORM):
    """Whether A has groups of rows, each with its own matrix."""
    return X_FORM.startswith("grouped") or Y_FORM.startswith("grouped")


@gluon.constexpr_function
def in_ranges(X_FORM, Y_FORM):
    """Whether each matrix of a batch has a range of K."""
    return X_FORM.startswith("ranged")


@gluon.constexpr_function
def is_batch(X_FORM, Y_FORM):
    """Whether an operand is a batch."""
    return X_FORM.startswith("many") or Y_FORM.startswith("many")


class Maps(NamedTuple):
    """The numbers of the kernel's parameters that are tensor maps.

    Attributes:
        x, y, out: of X, of Y and of the output.
        params: of each of `Stage.kinds`.
        matrix: of the epilogue's matrix, where there is one.
    """

    x: int
    y: int
    out: int
    params: list[int]
    matrix: int


def maps_of(X_FORM, Y_FORM, format=None):
    """The `Maps` of a kernel; the sizes and strides of each are parameters, too.

    No packed weight is a batch, and no product with an epilogue's matrix. For the output of groups of rows see
    `any_width_finish.store_slot`.

    Args:
        format: the `Stage` of a weight; for one whose parameters do not matter None will do.
    """
    behind_x, behind_y = (1 + 2 * _DIMS[value_of(form)] for form in (X_FORM, Y_FORM))
    out = behind_x + behind_y
    dims = 4 if is_any("grouped", X_FORM, Y_FORM) else 2 + len(matrix_of(None, X_FORM, Y_FORM))
    params, behind = [], out + 1 + 2 * dims
    for kind in format.kinds if format else ():
        params.append(behind)
        behind += 1 + 2 * kind.dims
    return Maps(0, behind_x, out, params, behind)


@gluon.constexpr_function
def loaders_of(X_ROWS):
    """The number of warps that load."""
    return 2 if SMALL[0] == X_ROWS else 1


@builtin
def shared_at(AT, _semantic=None):
    """The address `AT` bytes after the beginning of shared memory, where the ring is.

    `schedules.any_width` checks in the compiled kernel that the ring is there.
    """
    return gl.inline_asm_elementwise(
        f"{{ .reg .b32 first; mov.b32 first, global_smem; add.s32 $0, first, {value_of(AT)}; }}", "=r", [],
        dtype=gl.int32, is_pure=True, pack=1, _semantic=_semantic,
    )  # fmt: skip


@gluon.jit
def unused(ring):
    """The barrier at which warpgroups arrive once they no longer read the ring."""
    return ring[0].index(2 * STAGES + 2)


@builtin
def issue(instruction, warp, operands, number, _semantic):
    """Runs an instruction in one thread of a warpgroup.

    Args:
        instruction: assembly. Predicate `own` is that of the thread, register `map` is where the tensor map is, and
            register `at` is free.
        warp: which of the warpgroup's four warps the thread is in.
        operands: numbers, the first of which is $2.
        number: of the kernel's parameter that is the tensor map.
    """
    gl.inline_asm_elementwise(
        "{ .reg .pred own, one; .reg .b32 warp, at; .reg .b64 map; elect.sync _|one, 0xffffffff; mov.u32 warp, %tid.x;"
        "shr.u32 warp, warp, 5; and.b32 warp, warp, 3; setp.eq.and.u32 own, warp, $1, one;"
        f"mov.b64 map, gemm_any_width_param_{number}; cvta.param.u64 map, map; {instruction} mov.b32 $0, 0; }}",
        ",".join(["=r"] + ["r"] * (1 + len(operands))), [warp, *operands],
        dtype=gl.int32, is_pure=False, pack=1, _semantic=_semantic,
    )  # fmt: skip


class _Operand(NamedTuple):
    """An operand, as the assembly of its loads needs it.

    Register `x` says where X's next block goes, `x_first` where that of the first stage goes, `x_bytes` how large a
    block is, and `x_map` where the tensor map is. Predicate `x_streams` says whether X is the first to leave L2, and
    `x_several` whether a block takes several loads. Likewise `y` and so on.

    Attributes:
        name: "x" or "y".
        load: writes the assembly of a load, given where it goes, its first row, and an operand for a cache policy.
        row, rows, box: registers or constants: where blocks begin, their rows, and rows that a load has.
        size: a register: bytes that a step loads.
        each: bytes of a row.
        params: writes assembly that loads the parameters of a step, given whether this may take several loads.
    """

    name: str
    load: Callable[..., str]
    row: str
    rows: str
    box: str
    size: str
    each: int
    params: Callable[[bool], str]

    def setup(self, MAP: int, streams: str) -> str:
        """Assembly that sets the operand's registers, except those that `_places` sets.

        Args:
            MAP: the number of the kernel's parameter that is the tensor map.
            streams: a register that says which operand leaves L2 first.
        """
        x = self.name
        return (
            f"mov.b64 {x}_map, gemm_any_width_param_{MAP}; cvta.param.u64 {x}_map, {x}_map;"
            f"setp.eq.s32 {x}_streams, {streams}, {'xy'.index(x) + 1};"
            f"setp.lt.s32 {x}_several, {self.box}, {self.rows}; mad.lo.s32 {x}, stage, {x}_bytes, {x}_first;"
        )

    def block(self, policy: str = "") -> str:
        """Assembly that loads a block at once."""
        return self._announced(self.load(self.name, self.row, policy), several=False)

    def several(self) -> str:
        """Assembly that loads a block in several loads. The last load may repeat rows of the one before."""
        x = self.name

        def either(to: str, row: str) -> str:
            return (
                f"{{ @{x}_streams bra HINTED; {self.load(to, row)} bra LOADED;\n"
                f"HINTED: {self.load(to, row, ', policy')}\nLOADED: }}"
            )

        return self._announced(
            f"{{ {either(x, self.row)} @!{x}_several bra DONE; sub.s32 last, {self.rows}, {self.box};"
            f"mov.b32 loaded, {self.box};\nNEXT: min.s32 n, loaded, last; mad.lo.s32 part, n, {self.each}, {x};"
            f"add.s32 n, n, {self.row}; {either('part', 'n')} add.s32 loaded, loaded, {self.box};"
            f"setp.lt.s32 more, loaded, {self.rows}; @more bra NEXT;\nDONE: }}",
            several=True,
        )

    def _announced(self, loads: str, several: bool) -> str:
        announced = f"mbarrier.arrive.expect_tx.shared::cta.b64 _, [at], {self.size};"
        return f"{announced} {loads} {self.params(several)}"


def _operands(X_ROWS, FORMAT, X_FORM, Y_FORM, batch, row, x_box, x_size, col, width, y_box, y_size):
    """X and Y, given registers of what `load_steps` takes; `batch` is used where there is one."""
    rows, format = value_of(X_ROWS), format_of(FORMAT)
    size = params_bytes(rows, format)

    def params(several: bool) -> str:
        if not size:
            return ""
        maps = maps_of(X_FORM, Y_FORM, format).params
        loads = format.load_params(rows, x_box, several, maps, row, "k")
        return f"mad.lo.s32 params, stage, {size}, params_first; {loads}"

    each, columns = x_bytes(rows, format) // rows, format.columns if format else 1
    return (
        _Operand(
            "x", _load("x", value_of(X_FORM), columns, batch, ""), row, str(rows), x_box, x_size, each, params
        ),
        _Operand(
            "y", _load("y", value_of(Y_FORM), 1, batch, width if y_blocks_of(format) > 1 else ""), col, width, y_box,
            y_size, ROW.value, lambda several: "",
        ),
    )  # fmt: skip


def _load(name, FORM, columns, batch, second):
    """A function that writes the assembly of a load; see `_Operand.load`.

    Args:
        name: of the operand.
        FORM: its form.
        columns: for which one place along K stands.
        batch: a register with the number of the matrix, in a batch; or with the end of the range of K.
        second: where each row has two blocks, which are adjacent along K, a register with the rows of a block; the
            second ones follow the first ones. Otherwise "".
    """
    code = f"cp.async.bulk.tensor.{_DIMS[FORM]}d.shared::cluster.global.mbarrier::complete_tx::bytes"
    # The assembler would make a slow division of one by a constant.
    line = f"shr.u32 line, k, {columns.bit_length() - 1};"

    def load(to, row, policy=""):
        at, before = {
            "rows": (f"{{k, {row}}}", ""),
            "turned": (f"{{{row}, k, zero}}", "mov.b32 zero, 0;"),
            "grouped rows": (f"{{k, {row}}}", ""),
            "ranged turned": (
                f"{{{row}, line, zero, {batch}, strip}}",
                f"mov.b32 zero, 0; sub.s32 line, k, {batch}; add.s32 line, line, {LAST_ROW.value};"
                f"mov.b32 strip, {LAST_ROW.value};",
            ),
            "many rows": (f"{{k, {row}, {batch}}}", ""),
            "many turned": (f"{{{row}, k, zero, {batch}}}", "mov.b32 zero, 0;"),
            "pairs": ("{k, zero, zero, eight}", f"mov.b32 zero, 0; shr.u32 eight, {row}, 4;"),
            "sparse": (f"{{line, {row}}}", line),
            "sparse pairs": (
                "{line, zero, zero, eight}",
                f"mov.b32 zero, 0; {line} shr.u32 eight, {row}, 4;",
            ),
            "packed": ("{zero, line, strip}", f"mov.b32 zero, 0; {line} shr.u32 strip, {row}, 4;"),
        }[FORM]
        made = f"{before} {code}{'.L2::cache_hint' * bool(policy)} [{to}], [{name}_map, {at}], [at]{policy};"
        if second:
            made += (
                f"add.s32 line, k, {ROW.value // 2}; mad.lo.s32 strip, {second}, {ROW.value}, {to};"
                f"{code}{'.L2::cache_hint' * bool(policy)} [strip], [{name}_map, {{line, {row}}}], [at]{policy};"
            )
        return made

    return load


#: Assembly that declares the registers of loads.
_REGISTERS = (
    ".reg .pred done, wraps, more, x_streams, y_streams, x_several, y_several; .reg .b64 policy, x_map, y_map;"
    ".reg .b32 stage, phase, at, k, x, x_first, x_bytes, y, y_first, y_bytes, params, params_first;"
    ".reg .b32 last, loaded, n, part, zero, eight, line, strip;"
)


def _places(x_bytes, stages, width, y_blocks):
    """Assembly that finds the places and sizes of the first stage's blocks, and a cache policy."""
    return (
        f"mov.b32 x_first, global_smem; mov.b32 x_bytes, {x_bytes};"
        f"mul.lo.s32 y_bytes, {width}, {ROW.value * y_blocks};"
        f"mad.lo.s32 y_first, {stages}, x_bytes, x_first; mad.lo.s32 params_first, {stages}, y_bytes, y_first;"
        "createpolicy.fractional.L2::evict_first.b64 policy, 1.0;"
    )


def _steps(operands, before, last_k, STEP, wraps):
    """Assembly that loads blocks of some operands for at least one step, and goes to DONE.

    Args:
        before: assembly that waits until a stage is free.
        last_k: a register; where the steps end.
        wraps: assembly that begins the ring again where it ends.
    """

    def loop(blocks):
        ahead = "".join(f"add.s32 {x.name}, {x.name}, {x.name}_bytes;" for x in operands)
        return (
            f"{{\nSTEP: {before} {''.join(blocks)} add.s32 k, k, {value_of(STEP)}; add.s32 at, at, 8; {ahead}"
            f"add.s32 stage, stage, 1; {wraps} setp.lt.s32 more, k, {last_k}; @more bra STEP; bra DONE; }}"
        )

    # There is a loop for each case, since branches take as long as loads. An explicit `evict_normal` would slow loads
    # of blocks that many programs read.
    text = "".join(f"@{x.name}_several bra SEVERAL;" for x in operands)
    text += "".join(f"@{x.name}_streams bra STREAMED_{x.name};" for x in operands)
    text += loop([x.block() for x in operands])
    for x in operands:
        text += f"\nSTREAMED_{x.name}: {loop([y.block(', policy' * (x is y)) for y in operands])}"
    return f"{text}\nSEVERAL: {loop([x.several() for x in operands])}"


@builtin
def prefetch_maps(FORMAT, X_FORM, Y_FORM, _semantic=None):
    """Prefetches the tensor maps of the operands, in one thread.

    Args:
        FORMAT: see `multiply_steps`.
        X_FORM, Y_FORM: the forms of the operands.
    """
    found = maps_of(X_FORM, Y_FORM, format_of(FORMAT))
    maps = "".join(
        f"mov.b64 map, gemm_any_width_param_{i}; cvta.param.u64 map, map; @first prefetch.tensormap [map];"
        for i in (found.x, found.y, *found.params)
    )
    gl.inline_asm_elementwise(
        "{ .reg .pred first; .reg .b32 thread; .reg .b64 map; mov.u32 thread, %tid.x; setp.eq.s32 first, thread, 0;"
        f"{maps} mov.b32 $0, 0; }}",
        "=r", [], dtype=gl.int32, is_pure=False, pack=1, _semantic=_semantic,
    )  # fmt: skip


@builtin
def prefetch_vector(at, first, count, size, _semantic=None):
    """Prefetches elements of a vector into L2. Each loading warp asks for all of them.

    Those that are in a line of memory with elements behind the last one may be left out.

    Args:
        at: where the vector is; its elements are adjacent.
        first, count: which elements; at most 32 times 128 bytes.
        size: how many the vector has. Elements behind it are left out.
    """
    # An element of bool has one bit for Triton.
    item = max(8, at.dtype.element_ty.primitive_bitwidth) // 8
    gl.inline_asm_elementwise(
        "{ .reg .pred own; .reg .b32 own_first; .reg .b64 own_at; mov.u32 own_first, %laneid;"
        f"mul.lo.s32 own_first, own_first, {128 // item}; setp.lt.s32 own, own_first, $3;"
        "add.s32 own_first, own_first, $2; setp.lt.and.s32 own, own_first, $4, own;"
        f"mad.wide.s32 own_at, own_first, {item}, $1; @own prefetch.global.L2 [own_at]; mov.b32 $0, 0; }}",
        "=r,l,r,r,r", [at, first, count, size],
        dtype=gl.int32, is_pure=False, pack=1, _semantic=_semantic,
    )  # fmt: skip


@gluon.jit
def prefetch_vectors(vectors, first, count, size):
    """As `prefetch_vector`, of some vectors."""
    for i in gl.static_range(len(vectors)):
        prefetch_vector(vectors[i], first, count, size)


@builtin
def begin(
    full, stages, k, last_k, row, x_box, x_size, col, width, y_box, y_size, streams, batch, READERS, GROUPS, X_ROWS,
    STEP, FORMAT, X_FORM, Y_FORM, PARTS=0, _semantic=None,
):  # fmt: skip
    """Makes all barriers, and loads the blocks of at most `ahead_of` steps; see `load_steps`.

    Args:
        k, last_k: where the steps begin and end along K, of which there may be none.
        READERS, GROUPS: arrivals at `free` and at `unused`. At `full` each operand arrives, and at a warpgroup's turn
            each warp of the other one.
        PARTS: barriers at which parts of the epilogue's matrix, or of a cluster's sums, arrive. Those of the tiles'
            places follow them, and behind the places those of taken ones.
    """
    full_, stages_, k_, last_, *of_operands, streams_ = (f"${i}" for i in range(1, 13))
    format = format_of(FORMAT)
    given = [full, stages, k, last_k, row, x_box, x_size, col, width, y_box, y_size, streams]
    given += matrix_of(batch, X_FORM, Y_FORM)
    x, y = _operands(X_ROWS, FORMAT, X_FORM, Y_FORM, "$13", *of_operands)
    maps = maps_of(X_FORM, Y_FORM)

    def made(first, count, arrivals):
        return "".join(
            f"mbarrier.init.shared::cta.b64 [{full_} + {8 * (first + i)}], {value_of(arrivals)};"
            for i in range(count)
        )

    ahead, most = value_of(ahead_of(value_of(X_ROWS))), STAGES.value
    # Warp 0's barriers are those of its loads.
    others = (
        made(most, most, READERS), made(ahead, most - ahead, 2),
        f"mov.b64 x_map, gemm_any_width_param_{maps.out}; cvta.param.u64 x_map, x_map; prefetch.tensormap [x_map];"
        # The last of all is `any_width_loop.NOWHERE`'s.
        + made(2 * most, 2, 4) + made(2 * most + 2, 2, GROUPS)
        + made(2 * most + 4, value_of(PARTS), 1)
        + made(2 * most + 4 + value_of(PARTS), PLACES.value, 1)
        + made(2 * most + 4 + value_of(PARTS) + TAKEN_AT.value, TAKEN.value, loaders_of(value_of(X_ROWS))),
    )  # fmt: skip
    gl.inline_asm_elementwise(
        f"{{ {_REGISTERS} .reg .b32 warp; elect.sync _|more, 0xffffffff; @!more bra DONE;"
        "mov.u32 warp, %tid.x; shr.u32 warp, warp, 5; setp.ne.s32 more, warp, 0; @more bra OTHERS;"
        f"{made(0, ahead, 2)} fence.mbarrier_init.release.cluster; setp.lt.s32 more, {k_}, {last_}; @!more bra DONE;"
        f"mov.b32 stage, 0; mov.b32 at, {full_}; mov.b32 k, {k_};"
        f"{_places(x_bytes(value_of(X_ROWS), format), stages_, of_operands[4], y_blocks_of(format))}"
        f"{x.setup(maps.x, streams_)} {y.setup(maps.y, streams_)} {_steps((x, y), '', last_, STEP, '')}"
        # Behind warp 0's code: branches before it would become a jump table, whose fetch delays warp 0.
        "\nOTHERS:" + "".join(f"setp.eq.s32 more, warp, {i + 1}; @more bra OTHER{i};" for i in range(2)) + "bra OTHER2;"
        + "".join(f"\nOTHER{i}: {each} fence.mbarrier_init.release.cluster; bra DONE;" for i, each in enumerate(others))
        + "\nDONE: mov.b32 $0, 0; }",
        ",".join(["=r"] + ["r"] * len(given)), given,
        dtype=gl.int32, is_pure=False, pack=1, _semantic=_semantic,
    )  # fmt: skip


@builtin
def load_steps(
    full, stage, phase, stages, k, last_k, row, x_box, x_size, col, width, y_box, y_size, streams, batch, X_ROWS, STEP,
    FORMAT, X_FORM, Y_FORM, IDLE, _semantic=None,
):  # fmt: skip
    """Loads the blocks of X and Y of some steps, each into its stage.

    A load of Gluon has a power of two of rows. Another width would need several loads, one after the other, and the
    tensor cores would wait for them.

    Args:
        full: the address of the first stage's barrier at which they arrive.
        stage, phase: of the first step; see `any_width.later`.
        k, last_k: where the steps begin and end along K.
        row, col: where the blocks begin in X and in Y.
        width: rows of Y.
        x_box, y_box: rows that the tensor maps load at a time.
        x_size, y_size: bytes that a step loads of X, with its group parameters, and of Y. Rows that two boxes load
            count twice.
        streams: 1 where X is the first to leave L2, 2 where Y is, 0 if neither is.
        batch: the number of the matrix, in a batch; or the end of the range of K.
        STEP: elements along K of a step.
        FORMAT: see `multiply_steps`.
        X_FORM, Y_FORM: the forms of the operands.
        IDLE: whether there are four loading warps, of which the last have nothing to do.
    """
    full_, stage_, phase_, stages_, k_, last_, *of_operands, streams_ = (f"${i}" for i in range(1, 15))
    width_ = of_operands[4]
    free = WAIT.format(barrier=f"at + {8 * STAGES.value}", phase="phase")
    wraps = (
        f"setp.ge.s32 wraps, stage, {stages_}; @wraps mov.b32 stage, 0; @wraps mov.b32 at, {full_};"
        "@wraps xor.b32 phase, phase, 1;"
    )

    def of(*operands):
        begins = "".join(f"@wraps mov.b32 {x.name}, {x.name}_first;" for x in operands)
        return f"{{ {_steps(operands, free, last_, STEP, wraps + begins)} }}"

    format = format_of(FORMAT)
    given = [full, stage, phase, stages, k, last_k, row, x_box, x_size, col, width, y_box, y_size, streams]
    given += matrix_of(batch, X_FORM, Y_FORM)
    x, y = _operands(X_ROWS, FORMAT, X_FORM, Y_FORM, "$15", *of_operands)
    maps = maps_of(X_FORM, Y_FORM)
    loads = of(x, y)
    # The number of the first of two or four loading warps is a multiple of 4.
    warp = "mov.u32 warp, %tid.x; shr.u32 warp, warp, 5; and.b32 warp, warp, 3;"
    if value_of(X_ROWS) == SMALL[0]:
        loads = (
            f"{'' if value_of(IDLE) else warp}"
            "setp.eq.s32 more, warp, 1;"
            f"setp.gt.s32 wraps, {width_}, {SMALL[1]}; @wraps bra BOTH; @more bra OTHER; {of(x)}\nOTHER: {of(y)}\n"
            f"BOTH: @more bra DONE; {loads}"
        )
    idle = ""
    if value_of(IDLE):
        idle = f"{warp} setp.ge.u32 more, warp, {value_of(loaders_of(value_of(X_ROWS)))}; @more bra DONE;"
    gl.inline_asm_elementwise(
        f"{{ {_REGISTERS} .reg .b32 warp; setp.lt.s32 more, {k_}, {last_}; @!more bra DONE;"
        f"{idle} elect.sync _|more, 0xffffffff; @!more bra DONE; mov.b32 stage, {stage_}; mov.b32 phase, {phase_};"
        f"mov.b32 k, {k_}; mad.lo.s32 at, stage, 8, {full_};"
        f"{_places(x_bytes(value_of(X_ROWS), format), stages_, width_, y_blocks_of(format))}"
        f"{x.setup(maps.x, streams_)} {y.setup(maps.y, streams_)} {loads}\nDONE: mov.b32 $0, 0; }}",
        ",".join(["=r"] + ["r"] * len(given)), given,
        dtype=gl.int32, is_pure=False, pack=1, _semantic=_semantic,
    )  # fmt: skip
