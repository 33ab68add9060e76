"""Clusters of CTAs that share what they load; see `kernels.cluster`, which is imported where it can run alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import triton
from torch import Tensor

from ..epilogues.device import with_constants
from ..kernels import place
from ..kernels.numerics import cast
from ..operands import Dense, Layout
from .binding import Binding, epilogue_arguments, epilogue_of, sorted_tensors, storable, suits_tma
from .persistent_static import PersistentStatic, Work
from .waves import Split

if TYPE_CHECKING:
    from ..problem import Config, Problem

#: One entry for each bit of a CTA's number in its cluster: how far along M and N it moves, counted in CTAs.
Bases = tuple[tuple[int, int], ...]


def bases(rows: int, cols: int) -> Bases:
    """A cluster of `rows` by `cols` CTAs, powers of two; CTAs one below the other have adjacent numbers."""
    down = tuple((1 << bit, 0) for bit in range(rows.bit_length() - 1))
    return down + tuple((0, 1 << bit) for bit in range(cols.bit_length() - 1))


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


class Cluster(PersistentStatic):
    """Clusters that take tiles in turn; what would not fill a last wave is cut along K or N."""

    name = "cluster"
    about = "clusters of programs that share what they load"
    title = "clusters"
    knobs = frozenset({"tail", "split_k", "split_store", "cluster", "stream"})
    archs = ("sm_90",)
    # Those whose Gluon the kernel is written in.
    versions = ("3.9",)
    # What was measured. With fewer, `tl` kernels read memory as quickly; with more they are not held up by L2.
    rows = range(65, 512)
    reason = "chosen for 65 to 511 rows"
    instead = "one program a multiprocessor"
    lacking = "65 to 511 rows of 16 bits run without, some slower"
    tables = ("cluster",)

    def suits(self, problem: Problem) -> bool:
        p = problem
        # Its epilogues count offsets within a block in 32 bits.
        near = p.addend is None or (p.addend.row + p.addend.col) * 256 < 1 << 31
        return (
            self.runs_on(p.device.target)
            and not p.batch
            # Traced epilogues have run only in the other schedules.
            and p.fusion is None
            and type(p.a) is type(p.b) is Dense
            and all(operand.dtype.itemsize == 2 for operand in (p.a, p.b, p.out))
            and suits_tma(p)
            and p.out.col == 1
            and storable(p.out, p.M, p.N, ())
            and near
        )

    def check(self, config: Config) -> None:
        super().check(config)
        c = config
        if c.loader != "descriptor" or c.num_warps not in (4, 8):
            raise ValueError("Config: the cluster schedule needs the descriptor loader and 4 or 8 warps")
        if c.tail > 1 and (c.split_k > 1 or c.tail > 4):
            raise ValueError(
                "Config: with the cluster schedule tail is 2 or 4, and 1 where split_k is above 1"
            )
        for name in ("cluster_m", "cluster_n"):
            if getattr(c, name) not in (1, 2):
                raise ValueError(f"Config: {name} is {getattr(c, name)!r}; it must be 1 or 2")
        if c.block_m // c.cluster_m < 64:
            raise ValueError(f"Config: block_m is {c.block_m}; each CTA of a cluster needs 64 rows")

    def refusal(self, problem: Problem, config: Config) -> str | None:
        p, c = problem, config
        if not self.suits(p):
            return (
                f"schedule 'cluster' needs Triton {' or '.join(self.versions)}, a GPU of sm_90, fp16 or bf16, K > 0, "
                f"no batch, a and b that suit the descriptor loader, and an output with adjacent columns and rows of "
                f"whole 16-byte units; given {p} on {p.device.arch} with Triton {triton.__version__}"
            )
        if max(c.block_m, c.block_n, c.block_k) > 256:
            return "clusters take blocks of at most 256 along each side"
        return None

    def bind(self, problem: Problem, config: Config) -> Binding:
        return ClusterBinding(problem, config, self.work(problem, config))

    def cuts(self, problem: Problem, config: Config) -> list[str]:
        return [
            f"a program is a cluster of {config.ctas} multiprocessors, which cuts up what fills no last wave"
        ]


#: With more registers at its start a kernel of four consuming warps is given 256 for each of their threads, which
#: setmaxnreg does not take.
_REGISTERS_AT_START = {4: 136}


class ClusterBinding(Binding):
    """A `Binding` of the clusters' kernel; a program is a cluster."""

    def __init__(self, problem: Problem, config: Config, work: Work) -> None:
        from ..kernels import cluster, dialect

        p, c = problem, config
        self.problem, self.config, self.work = p, c, work
        self.split = Split.of(p, c)
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
    def workspace_size(self) -> tuple[int, int]:
        """Bytes in which parts of tiles meet, and counters of their arrivals; none where no tile is cut."""
        c = self.config
        floats = self.work.partials(c.block_m, c.block_n)
        return floats * torch.float32.itemsize, self.work.counters(c.ctas)


CLUSTER = Cluster()
