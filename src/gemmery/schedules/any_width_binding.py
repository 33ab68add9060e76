"""The launch of tiles of any width: constants, tensor maps and arguments of `kernels.any_width`."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import numpy as np
import torch

from ..epilogues.device import digest, function
from ..kernels import place
from ..kernels.any_width_load import LAST_ROW
from ..kernels.any_width_stage import params_bytes, x_bytes, y_blocks_of
from ..kernels.numerics import cast
from ..operands import DenseAccess
from .any_width_compiled import check_memory, waits_for_each
from .any_width_edge import Edges, may_have_edges
from .any_width_tile import (
    EIGHT,
    KINDS,
    MOST_STAGES,
    ROW,
    ROWS,
    Form,
    Tile,
    every_of,
    forms_of,
    numbers_for,
    rules_of,
)
from .base import Forms
from .binding import (
    BOX,
    TL,
    Binding,
    epilogue_arguments,
    epilogue_of,
    of_sum,
    overlap_of,
    phases,
    promotes,
    sorted_tensors,
)  # fmt: skip
from .cost import functions_of
from .persistent_static import Work
from .walk import divisor
from .waves import Split

if TYPE_CHECKING:
    from ..problem import Config, Problem

#: By the number of warpgroups: registers of a thread in all but the first one, and in the other warps.
REGISTERS = {1: (0, 40), 2: (232, 40), 3: (160, 32)}
#: An operand leaves L2 first if it is larger than all other data by this factor. Measured on an H200.
STREAMED = 1.5
#: Rows in the outer dimensions along which groups and ranges have their ends, see `any_width_finish.store_slot`; and
#: elements from one row of the outermost to the next, and one row more.
MOST_ROWS, APART = (1 << 31) - 1, 1 << 34


def descriptor(
    tensor: Any, shape: Sequence[int], strides: Sequence[int], block: Sequence[int], swizzle: int = ROW
) -> Any:
    """A tensor descriptor as Gluon takes it, swizzled by as many bytes as a row of the block has, up to `swizzle`."""
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    item = tensor.dtype.itemsize
    layout = gl.NVMMASharedLayout(min(swizzle, block[-1] * item), 8 * item, len(block))
    return TensorDescriptor(tensor, list(shape), list(strides), list(block), layout)


class AnyWidthBinding(Binding):
    """A `Binding` of the kernel for tiles of any width."""

    # Spills at the end of a tile are harmless; `tests/compile` checks the loops of the machine code.
    harmless_spills = 56

    def __init__(
        self, problem: Problem, config: Config, work: Work, tile: Tile, band: int, takes_turns: bool
    ) -> None:
        from ..kernels import any_width, dialect

        p, c = problem, config
        self.problem, self.config, self.tile = p, c, tile
        self.a, self.b = p.a.access(p, is_b=False, tma=True), p.b.access(p, is_b=True, tma=True)
        self.split = Split.of(p, c)
        self.work, self.band = work, band
        self.kernel = any_width.gemm_any_width
        self.grid = (self.work.programs, 1, 1)
        forms = Forms.of(p)
        self.forms, self.format = forms_of(c.swap, forms), forms.packed and forms.packed.of_step(c.block_k)
        self.part = tile.part
        self.widths = tile.widths(self.format, self.forms[1], numbers_for(p))
        registers, loader = REGISTERS[tile.groups]
        shares_tiles = not takes_turns and not tile.clustered and self.split is None
        # A kernel for one width has no code for narrower tiles.
        has_code = may_have_edges(p) and shares_tiles and len(self.widths) > 1
        self.edges = Edges.of(p, c, np.asarray(p.M)) if has_code else None
        x, y = (p.b.dtype, p.a.dtype) if c.swap else (p.a.dtype, p.b.dtype)
        given, second = self._matrix_map()
        ready = self.a.ready()
        epilogue = self._epilogue(given, second)
        self.constants = {
            "PLACE": dialect.in_gluon(self.place),
            "EDGES": self.edges is not None,
            "READY": None if ready is None else dialect.in_gluon(ready),
            "GROUP_OF": dialect.in_gluon(self.a.group_of()) if p.ragged == "rows" else None,
            "GIVEN": given,
            "SECOND": second,
            "EPILOGUE": dialect.in_gluon(epilogue),
            "CAST": dialect.in_gluon(cast),
            "KIND": f"{KINDS[x]}.{KINDS[y]}",
            "PROMOTES": p.b.by_steps or promotes(p),
            "EVERY": every_of(p),
            "X_ROWS": tile.x,
            "WIDTHS": self.widths,
            "RING_ROWS": tile.ring_rows,
            "GROUPS": tile.groups,
            "SWAP": c.swap,
            "CLUSTERED": tile.clustered,
            "LOOPS": self._loops(takes_turns, given, second),
            "PINGPONG": takes_turns,
            "FORMAT": str(self.format) if self.format else None,
            "X_FORM": self.forms[0],
            "Y_FORM": self.forms[1],
            "BUFFERS": tile.buffers,
            "REGISTERS": registers,
            "LOADER_REGISTERS": loader,
            **overlap_of(p),
            "SOURCE": source(),
            # Those of the first warpgroup; the compiler adds those of the others.
            "num_warps": 4,
        }

    @property
    def place(self) -> Any:
        """`PLACE` of the kernel."""
        from ..kernels import any_width_groups

        if self.problem.ragged == "rows":
            return any_width_groups.next_tile_of_rows
        if self.problem.ragged:
            return place.sized_tile_of_ranges
        if self.problem.batch:
            return place.sized_tile_of_batch
        is_cut = self.split is not None
        if self.a.ready() is not None:
            return place.sized_part if is_cut else place.sized_tile
        return self.a.place(place.sized_part if is_cut else place.sized_tile, is_cut)

    def _loops(self, takes_turns: bool, given: object, second: object) -> bool:
        """`LOOPS` of the kernel, as far as it gained on an H200 (`any_width_epilogues-bf16`).

        Epilogues that read a matrix were not measured. Three warpgroups have no registers for two results beside a
        whole accumulator.
        """
        p = self.problem
        suits = given is None and not (second is not None and self.tile.groups > 2)
        return functions_of(p) > 0 and not takes_turns and not p.paired and suits

    def _epilogue(self, given: object, second: object) -> Any:
        """The function of a part's block. With a matrix, it also takes or returns the matrix's block."""
        p = self.problem
        if given is not None:
            return phases(p)[1]
        if second is not None and p.fusion is not None:
            return of_sum(p, function(p.fusion.both))
        return epilogue_of(p)

    def _matrix_map(self) -> tuple[tuple[int, Any] | None, int | None]:
        """`GIVEN` and `SECOND` of the kernel."""
        from ..kernels import any_width_given

        fusion = self.problem.fusion
        if fusion is None or fusion.matrix is None:
            return None, None
        number = any_width_given.map_of(self.format, *self.forms)
        return (None, number) if fusion.both else ((number, TL[fusion.matrix.dtype]), None)

    def compile(self, tensors: Sequence[Any], numbers: Sequence[float] = ()) -> Any:
        """See `Binding.compile`.

        If products wait for each other in a packed weight's kernel for several widths, it is compiled again with its
        widths in other orders, and at last for this tile's width alone.
        """
        compiled = super().compile(tensors, numbers)
        present = self.constants["WIDTHS"]
        if rules_of(self.format).shared is None or len(present) == 1:
            return compiled
        if compiled not in _ORDERS:
            _ORDERS[compiled] = self._order(compiled, tensors, numbers)
        widths = _ORDERS[compiled] or (self.tile.y,)
        if widths == present:
            return compiled
        self.constants["WIDTHS"] = widths
        return super().compile(tensors, numbers)

    def _order(self, compiled: Any, tensors: Sequence[Any], numbers: Sequence[float]) -> tuple[int, ...]:
        """The widths in an order with which products do not wait for each other; () if there is none.

        Args:
            compiled: the kernel with the widths in the present order.
        """
        present: tuple[int, ...] = self.constants["WIDTHS"]
        for first in range(len(present)):
            widths = present[first:] + present[:first]
            if first:
                self.constants["WIDTHS"] = widths
                compiled = super().compile(tensors, numbers)
            if not waits_for_each(compiled):
                return widths
        return ()

    def check(self, compiled: Any) -> None:
        """Raises RuntimeError unless the ring, its barriers and the tensor maps are where the assembly expects them."""
        from ..kernels import any_width, any_width_places

        super().check(compiled)
        words = 2 * MOST_STAGES + 4 + self.parts_barriers + any_width_places.WORDS.value
        words += int(any_width.table_words(*self.forms))
        check_memory(compiled.asm["llir"], self.tile.slots * self.tile.part * ROW, words)

    @property
    def parts_barriers(self) -> int:
        """Barriers at which parts of the epilogue's matrix arrive."""
        from ..kernels import any_width_given

        return int(any_width_given.barriers_of(self.constants["GIVEN"], self.tile.groups))

    @property
    def counted(self) -> int:
        """What PLACE divides by last: tiles along N of groups, a matrix's tiles in a batch, tiles that are cut, or
        programs, see `kernels.any_width.edge_of`.
        """
        p, c = self.problem, self.config
        tiles_m, tiles_n = -(-p.M // c.block_m), -(-p.N // c.block_n)
        if p.ragged == "rows":
            return tiles_n
        if self.edges is not None:
            return self.work.programs
        return tiles_m * tiles_n if p.batch or p.ragged else self.work.cut

    def arguments(self, tensors: Sequence[Any], numbers: Sequence[float] = ()) -> list[Any]:
        """The kernel's run-time arguments, as for `Binding.arguments`."""
        y = ROWS if self.forms[1].endswith("turned") else self.part
        return self._arguments(tensors, numbers, (ROWS, y))

    def direct_arguments(self, tensors: Sequence[Any], numbers: Sequence[float] = ()) -> list[Any]:
        """See `Binding.direct_arguments`."""
        p, tile = self.problem, self.tile
        sizes = (p.N, p.M) if self.config.swap else (p.M, p.N)
        boxes = map(self._rows_at_a_time, self.forms, (tile.x, tile.y), sizes)
        return self._arguments(tensors, numbers, tuple(boxes))

    def _rows_at_a_time(self, form: Form, rows: int, size: int) -> int:
        """Rows of a block of an operand that TMA loads at a time.

        Args:
            form: of the operand.
            rows: of the block.
            size: rows of the operand.
        """
        if not form.endswith("turned"):
            return ROWS if rows > BOX else rows
        # The tensor map has an end only for the first 64 turned rows of a load, so a larger box must lie within the
        # operand. `kernels.any_width.corner` moves tiles there, except those that are cut behind whole ones.
        whole, cut, *_ = self.work.units(self.config.block_k)
        moves = size >= rows and not (whole and cut)
        return rows if moves or size % rows == 0 else ROWS

    def _arguments(
        self, tensors: Sequence[Any], numbers: Sequence[float], boxes: tuple[int, ...]
    ) -> list[Any]:
        """The kernel's arguments, with tensor maps that load `boxes` rows of X and of Y at a time."""
        p, c, tile = self.problem, self.config, self.tile
        given = sorted_tensors(p, tensors)
        of_a, of_b, out, extras = given
        a, b = of_a[0], of_b[0]
        step_args = (*self.a.step_scales(of_a), *self.b.step_scales(of_b))
        # Both numbers of a pair make one.
        rows, columns = (self.part, ROWS) if c.swap else (ROWS, self.part)
        block = rows, columns * p.out_n // p.N
        x, y = (b, a) if c.swap else (a, b)
        whole, cut, *parts = self.work.units(c.block_k)
        loaded = [-(-rows // box) * box for rows, box in zip((tile.x, tile.y), boxes, strict=True)]
        x_size = x_bytes(loaded[0], self.format) + params_bytes(loaded[0], self.format)
        y_size = loaded[1] * ROW * y_blocks_of(self.format)
        x_map, *params = self._staged(of_b, boxes[0]) or [self._operand(x, c.swap, ROWS, boxes[0])]
        params = [*params, None, None][:2]
        workspace = None if self.split is None else self.workspace(out.device)
        tiles_m, tiles_n, band = -(-p.M // c.block_m), -(-p.N // c.block_n), self.band
        units, edge = whole + cut, tile.y
        if (edges := self.edges) is not None and edges.width:
            tiles_m, tiles_n, edge = tiles_m - c.swap, tiles_n - (not c.swap), int(edges.width)
            whole, programs = tiles_m * tiles_n, self.work.programs
            units = (whole // programs + int(edges.turns)) * programs
        last_band = tiles_m - (tiles_m - 1) // band * band
        # Groups need the divisor of the rows of a tile.
        area = c.block_m if p.ragged == "rows" else band * tiles_n
        place_args = self.a.place_args(of_a, numbers[len(numbers) - p.a.numbers :])
        divisors = map(divisor, (area, band, last_band, max(1, self.counted)))
        return [
            x_map, self._operand(y, not c.swap, self.part, boxes[1]), self._output(out, block), *params,
            self._matrix(extras, block), p.M, p.N, p.K, units, whole, *parts,
            tiles_m, tiles_n, *divisors, tile.y, band, edge, boxes[0], x_size, boxes[1], y_size, self.streams,
            c.num_stages, divisor(c.num_stages), place_args, step_args,
            epilogue_arguments(p, self.part, given, numbers), workspace, *self._vectors(extras),
        ]  # fmt: skip

    def _vectors(self, extras: Sequence[Any]) -> tuple[tuple[Any, ...], ...]:
        """Vectors along X, and along Y, with adjacent elements that the epilogue reads."""
        p = self.problem
        if p.batch or p.ragged or p.paired:
            return (), ()
        along_m, along_n = (
            tuple(
                [x for layout, x in zip(p.extras, extras, strict=False) if (layout.row, layout.col) == steps]
            )
            for steps in ((1, 0), (0, 1))
        )
        return (along_n, along_m) if self.config.swap else (along_m, along_n)

    def _output(self, out: Any, block: tuple[int, int]) -> Any:
        """The descriptor of the output, for blocks that are stored at a time."""
        p = self.problem
        if p.ragged == "rows":
            shape, row = (MOST_ROWS, MOST_ROWS, LAST_ROW.value, p.out_n), p.out.row
            return descriptor(out, shape, (APART - row, row, row, 1), (1, 1, *block))
        # Ranges of K are always a batch.
        batch, steps = (p.batch, p.out.steps) if p.batch or not p.ragged else ((1,), (p.out.row,))
        many = (1,) * len(batch)
        return descriptor(out, (*batch, p.M, p.out_n), (*steps, p.out.row, 1), (*many, *block))

    def _matrix(self, extras: Sequence[Any], block: Sequence[int]) -> Any:
        """The descriptor of the one matrix that the epilogue reads or writes; None if there is none."""
        p = self.problem
        if p.fusion is None or p.fusion.place is None or p.fusion.matrix is None:
            return None
        return descriptor(extras[p.fusion.place], (p.M, p.out_n), (p.fusion.matrix.row, 1), block)

    @property
    def streams(self) -> int:
        """The operand that leaves L2 first: 1 for X, 2 for Y, 0 for neither.

        If an operand is most of the data, its blocks replace each other in L2, and not data that other kernels have
        written, which would first have to go to memory. Otherwise both operands are read again, and stay in L2.
        """
        p = self.problem
        if p.ragged:
            return 0
        a, b = (rows * p.K * x.bits / 8 for rows, x in ((p.M, p.a), (p.N, p.b)))
        out = p.M * p.out_n * p.out.dtype.itemsize
        first, last = (2, 1) if self.config.swap else (1, 2)
        if a > STREAMED * (b + out):
            return first
        return last if b > STREAMED * (a + out) else 0

    @property
    def workspace_size(self) -> tuple[int, int]:
        """Bytes of memory for the parts of tiles, and counters of their arrivals; none if no tile is cut."""
        w, tile = self.work, self.tile
        return w.partials(tile.multiplied, tile.y) * torch.float32.itemsize, w.counters(tile.groups)

    def _operand(self, tensor: Any, is_b: bool, rows: int, box: int) -> Any:
        """The descriptor of an operand: the blocks of its type have `rows` rows, and its tensor map loads `box` at a
        time.
        """
        p = self.problem
        step = ROW // p.a.dtype.itemsize
        # Strides along K and along the rows.
        along, across, size = (p.b.row, p.b.col, p.N) if is_b else (p.a.col, p.a.row, p.M)
        # Groups of rows are in one matrix.
        batch, steps = (p.batch, (p.b if is_b else p.a).steps) if is_b or not p.ragged else ((), ())
        many, K = [1] * len(batch), p.K
        if p.ragged == "k":
            batch, steps, many, K = (MOST_ROWS, MOST_ROWS), (APART - along, along), [1, 1], LAST_ROW.value
        if along != 1:
            # A box has blocks of 64 rows, each with all of a step's K. TMA counts the blocks along a dimension of its
            # own, whose stride of 64 rows is less than the size of the rows' dimension.
            shape, strides = (*batch, -(-size // ROWS), K, size), (*steps, ROWS, along, 1)
            made = descriptor(tensor, shape, strides, (*many, 1, step, ROWS))
            made.box = [*many, box // ROWS, step, ROWS]
            return made
        if not (is_b and p.paired):
            made = descriptor(tensor, (*batch, size, p.K), (*steps, across, 1), (*many, rows, step))
            made.box = [*many, box, step]
            return made
        # Eight rows of one half, then eight of the other.
        assert isinstance(self.b, DenseAccess)
        assert self.b.half_stride is not None
        both = 2 * EIGHT
        shape, strides = (size // both, 2, EIGHT, p.K), (EIGHT * across, self.b.half_stride, across, 1)
        made = descriptor(tensor, shape, strides, (rows // both, 2, EIGHT, step))
        made.box = [box // both, 2, EIGHT, step]
        return made

    def _staged(self, tensors: Sequence[Any], box: int) -> list[Any]:
        """The descriptors of a weight with a `Stage`, `box` rows at a time: of X, and of its parameters."""
        found: list[Any] = []
        if self.format is None:
            return found
        for x in self.b.stage_maps(tensors, box, self.config.block_k):
            made = descriptor(x.tensor, x.shape, x.strides, x.block, ROW if x.is_swizzled else 0)
            made.box = list(x.box)
            found.append(made)
        return found


@functools.cache
def source() -> str:
    """The `digest` of the kernel's files."""
    from ..kernels import (
        any_width,
        any_width_acc,
        any_width_cluster,
        any_width_cut,
        any_width_finish,
        any_width_given,
        any_width_groups,
        any_width_load,
        any_width_loop,
        any_width_order,
        any_width_packed,
        any_width_places,
        any_width_scales,
        any_width_sparse,
        any_width_stage,
        decoders,
        rings,
        shards,
    )

    return digest(
        any_width, any_width_acc, any_width_cluster, any_width_cut, any_width_finish, any_width_given,
        any_width_groups, any_width_load, any_width_loop, any_width_order, any_width_packed, any_width_places,
        any_width_scales, any_width_sparse, any_width_stage, decoders, rings, shards,
    )  # fmt: skip


#: For each kernel with several widths of a packed weight, its widths in a good order; see `_order`.
_ORDERS: WeakKeyDictionary[Any, tuple[int, ...]] = WeakKeyDictionary()
