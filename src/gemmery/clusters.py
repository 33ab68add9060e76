"""What the host has to know of `kernels.cluster`: where it runs, how it lays out blocks, how it divides the work.

Where it can run, `launch.bind` binds its configs here, and they are part of the space; elsewhere nothing of it is
imported.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import triton
from torch import Tensor

from .epilogues.device import with_constants
from .kernels import place
from .kernels.numerics import cast
from .launch import Binding, described, epilogue_arguments, epilogue_of, sorted_tensors, storable
from .operands import Dense, Layout
from .problem import Config, Problem
from .waves import Split

#: Versions of Triton whose Gluon the kernel is written in.
VERSIONS = ("3.9",)
#: Numbers of rows for which it is chosen: what was measured. With fewer, `tl` kernels read memory as quickly; with more
#: they are not held up by L2.
ROWS = range(65, 512)

#: One entry for each bit of a CTA's number in its cluster: how far along M and N it moves, counted in CTAs.
Bases = tuple[tuple[int, int], ...]


def available() -> bool:
    """Whether this version of Triton can compile `kernels.cluster`, which may not be imported otherwise."""
    return ".".join(triton.__version__.split(".")[:2]) in VERSIONS


def bases(rows: int, cols: int) -> Bases:
    """A cluster of `rows` by `cols` CTAs, powers of two; CTAs one below the other have adjacent numbers."""
    down = tuple((1 << bit, 0) for bit in range(rows.bit_length() - 1))
    return down + tuple((0, 1 << bit) for bit in range(cols.bit_length() - 1))


def suits(problem: Problem) -> bool:
    """Whether the kernel can run a problem, whatever its number of rows."""
    p = problem
    # Its epilogues count offsets within a block in 32 bits.
    near = p.addend is None or (p.addend.row + p.addend.col) * 256 < 1 << 31
    return (
        available()
        and p.device.arch == "sm_90"
        and not p.batch
        # Traced epilogues have run only in the other schedules.
        and p.fusion is None
        and type(p.a) is type(p.b) is Dense
        and all(operand.dtype.itemsize == 2 for operand in (p.a, p.b, p.out))
        and described(p)
        and p.out.col == 1
        and storable(p.out, p.M, p.N, ())
        and near
    )


def descriptor(
    tensor: Any, shape: Sequence[int], stride: int, block: Sequence[int], dims: Sequence[int | None], cluster: Bases
) -> Any:  # fmt: skip
    """A tensor descriptor for blocks of a whole cluster.

    Args:
        shape: of a matrix whose columns are adjacent and whose rows are `stride` elements apart.
        dims: for its rows and its columns, the dimension of the product that they run along: 0 for M, 1 for N, None
            for K, of which all CTAs have the same part.
    """
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
    from triton.tools.tensor_descriptor import canonicalize_dtype

    element = gl.dtype(canonicalize_dtype(tensor.dtype))
    layout = [[0 if dim is None else basis[dim] for dim in dims] for basis in cluster]
    shared = gl.NVMMASharedLayout.get_default_for(list(block), element, cga_layout=layout)
    return TensorDescriptor(tensor, list(shape), [stride, 1], list(block), shared)


@dataclass(frozen=True, slots=True)
class Work:
    """How tiles are divided between programs, which are clusters; see `kernels.cluster.gemm_cluster`.

    Attributes:
        programs: how many there are.
        whole: tiles that are computed whole, by the programs in turn.
        tail: parts of the other tiles, cut into columns.
        cut: other tiles, cut along K.
        parts: of a tile that is cut along K, each for a program.
        chunk: steps of a part; the last one may have fewer.
    """

    programs: int
    whole: int
    tail: int = 0
    cut: int = 0
    parts: int = 1
    chunk: int = 1

    @classmethod
    def divide(cls, tiles: int, steps: int, most: int, tail: int = 1, split: int = 1) -> Work:
        """Tiles of `steps` steps along K for at most `most` programs at a time.

        What would not fill a last wave is cut along K, into `split` parts a tile, where that gives each program one; or
        else into `tail` parts a tile along N, where no program then has as many parts as make a tile.
        """
        whole = tiles // most * most
        rest = tiles - whole
        if rest and split > 1:
            chunk = -(-steps // split)
            parts = -(-steps // chunk)
            if chunk < steps and rest * parts <= most:
                return cls(most if whole else rest * parts, whole, 0, rest, parts, chunk)
        if rest and -(-rest * tail // most) < tail:
            return cls(min(most, max(whole, rest * tail)), whole, rest * tail)
        return cls(min(tiles, most), tiles)

    @staticmethod
    def divide_many(
        tiles: Any, steps: Any, most: Any, tail: Any, split: Any
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """The same for arrays, of what decides the time.

        Returns:
            Whole tiles and parts of tiles along N on the busiest program; the steps that it has of tiles that are cut
            along K, 0 where none is; and the parts of such a tile.
        """
        whole, rest = tiles // most, tiles % most
        chunk = -(-steps // split)
        parts = -(-steps // chunk)
        cut = (rest > 0) & (split > 1) & (chunk < steps) & (rest * parts <= most)
        tailed = (rest > 0) & (-(-rest * tail // most) < tail) & ~cut
        return (
            whole + ((rest > 0) & ~cut & ~tailed),
            np.where(tailed, -(-rest * tail // most), 0),
            np.where(cut, chunk, 0),
            np.where(cut, parts, 1),
        )

    def partials(self, block_m: int, block_n: int) -> int:
        """Floats of workspace that cut tiles need."""
        return self.cut * self.parts * block_m * block_n

    def units(self, block_k: int) -> tuple[int, int, int, int]:
        """The numbers that kernels take: whole tiles, units behind them, parts of a cut tile, K in a part."""
        return self.whole, self.tail or self.cut * self.parts, self.parts, self.chunk * block_k

    def counters(self, ctas: int) -> int:
        """Counters that cut tiles need."""
        return self.cut * ctas


#: With more registers at its start a kernel of four consuming warps is given 256 for each of their threads, which
#: setmaxnreg does not take.
_REGISTERS_AT_START = {4: 136}


class ClusterBinding(Binding):
    """A `Binding` of the clusters' kernel; a program is a cluster."""

    def __init__(self, problem: Problem, config: Config) -> None:
        p, c = problem, config
        self.problem, self.config = p, c
        if not suits(p):
            raise ValueError(
                f"config {c}: schedule 'cluster' needs Triton {' or '.join(VERSIONS)}, a GPU of sm_90, fp16 or bf16, "
                f"K > 0, no batch, a and b that suit the descriptor loader, and an output with adjacent columns and "
                f"rows of whole 16-byte units; given {p} on {p.device.arch} with Triton {triton.__version__}"
            )
        if max(c.block_m, c.block_n, c.block_k) > 256:
            raise ValueError(f"config {c}: clusters take blocks of at most 256 along each side")
        from .kernels import cluster, dialect

        tiles = -(-p.M // c.block_m) * -(-p.N // c.block_n)
        steps = -(-p.K // c.block_k)
        self.split = Split.of(p, c)
        self.work = Work.divide(
            tiles, steps, max(p.device.sms // c.ctas, 1), c.tail, c.split_k if self.split else 1
        )
        self.kernel = cluster.gemm_cluster
        self.grid = (self.work.programs, 1, 1)
        self.cluster = bases(c.cluster_m, c.cluster_n)
        self.constants = {
            "PLACE": dialect.in_gluon(place.whole_tile),
            "TAIL_PLACE": dialect.in_gluon(self._tail_place()),
            "MULTIPLY": cluster.add_product,
            "EPILOGUE": dialect.in_gluon(epilogue_of(p)),
            "CAST": dialect.in_gluon(cast),
            "BLOCK_M": c.block_m,
            "BLOCK_N": c.block_n,
            "BLOCK_K": c.block_k,
            "BAND_M": c.group_m,
            "STAGES": c.num_stages,
            "A_ROWS": p.a.col == 1,
            "B_ROWS": p.b.col == 1,
            # What M makes of a config is no other code: none of its tiles may happen to be cut.
            "TAIL": c.tail,
            # The matrix that is added may be the output: what was stored there must not be read as such.
            "SHIFT": p.epilogue != "add_matrix",
            "STREAM": c.stream,
            "num_warps": c.num_warps,
            "num_ctas": c.ctas,
        }
        if c.num_warps in _REGISTERS_AT_START:
            self.constants["maxnreg"] = _REGISTERS_AT_START[c.num_warps]

    def _tail_place(self) -> Any:
        """The device function that places what is behind the whole tiles."""
        if self.split is not None:
            return place.tail_chunk
        return with_constants(place.tail_columns, PARTS_N=self.config.tail)

    def arguments(self, tensors: Sequence[Any], numbers: Sequence[float] = ()) -> list[Any]:
        """The kernel's run-time arguments, as for `Binding.arguments`."""
        p, c, w = self.problem, self.config, self.work
        (a,), (b,), out, extras = sorted_tensors(p, tensors)
        tail: tuple[Any, Any] = (None, None)
        if c.tail > 1:
            columns = c.block_n // c.tail
            tail = (self._b(b, columns), self._out(out, columns))
        workspace = None if self.split is None else self.workspace(a.device)
        return [
            self._described(p.a, a, (p.M, p.K), (c.block_m, c.block_k), (0, None)),
            self._b(b, c.block_n),
            self._out(out, c.block_n // 2 if c.split_store else c.block_n),
            *tail, p.M, p.N, p.K, *w.units(c.block_k), (), epilogue_arguments(p, c.block_n, extras, numbers), workspace,
        ]  # fmt: skip

    def _b(self, tensor: Tensor, columns: int) -> Any:
        p, c = self.problem, self.config
        return self._described(p.b, tensor, (p.K, p.N), (c.block_k, columns), (None, 1))

    def _out(self, tensor: Tensor, columns: int) -> Any:
        p, c = self.problem, self.config
        return self._described(p.out, tensor, (p.M, p.N), (c.block_m, columns), (0, 1))

    def _described(
        self, operand: Layout, tensor: Tensor, sizes: tuple[int, int], block: tuple[int, int],
        dims: tuple[int | None, int | None],
    ) -> Any:  # fmt: skip
        if operand.col == 1:
            return descriptor(tensor, sizes, operand.row, block, dims, self.cluster)
        return descriptor(tensor, sizes[::-1], operand.col, block[::-1], dims[::-1], self.cluster)

    @property
    def room(self) -> tuple[int, int]:
        """Bytes in which parts of tiles meet, and counters of their arrivals; none where no tile is cut."""
        c = self.config
        floats = self.work.partials(c.block_m, c.block_n)
        return floats * torch.float32.itemsize, self.work.counters(c.ctas)
