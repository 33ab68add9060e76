"""Programs in which one warp loads and two groups of four multiply; see `kernels.specialized`.

For packed weights, which are unpacked between two products. The kernel is imported only where it can run.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..epilogues.device import digest, with_constants
from ..formats.packing import STRIP, block_columns
from ..kernels import place
from ..kernels.numerics import cast
from ..operands.packed import Packed, PackedAccess
from .binding import (
    SHORT_ROWS,
    Binding,
    epilogue_arguments,
    epilogue_of,
    needs_only_its_block,
    overlap_of,
    sorted_tensors,
    storable,
    suits_tma,
)  # fmt: skip
from .persistent_static import PersistentStatic, Work
from .waves import Split

if TYPE_CHECKING:
    from ..problem import Config, Problem

#: Warps that multiply, in groups of four; columns of a tile that a group has, see `kernels.specialized`.
WARPS, OWN = 8, 64
#: Rows of a tile up to which columns of tiles begin at different steps: with more of them it takes longer.
FEW = 16
#: The longest side of a piece that is stored, and where the epilogue reads or writes whole matrices, which takes
#: registers.
PIECE, PIECE_OF_BLOCKS = 128, 32


@functools.cache
def streams() -> bool:
    """Whether `Config.stream` makes a difference with this version of Triton: whether it can tell TMA so."""
    if not SPECIALIZED.available():
        return False
    from ..kernels.rings import READ_ONCE

    return READ_ONCE.value is not None


class Specialized(PersistentStatic):
    """Programs that take tiles in turn. Tiles that would not fill a last wave are cut along K."""

    name = "specialized"
    about = "as many programs as run at once; one warp loads, two groups of four multiply"
    title = "specialised warps"
    knobs = frozenset({"split_k", "swap", "stream"})
    archs = ("sm_90",)
    # Those whose Gluon has the names that the kernel is written in.
    versions = ("3.6", "3.7", "3.8", "3.9")
    reason = "chosen for packed weights"
    # If `Config.stream` makes a difference, the second table shows it, also with few rows and for other schedules.
    tables = ("specialized", "specialized-streamed")

    def own_tables(self) -> tuple[str, ...]:
        return self.tables[: 2 if streams() else 1] if self.available() else ()

    def needs(self, problem: Problem) -> Iterator[tuple[bool, str]]:
        p = problem
        yield from super().needs(p)
        yield not p.ragged and not p.batch, "a product without groups and without a batch"
        yield _packed(p), "a packed weight"
        yield p.a.col == 1 and suits_tma(p), "rows of a with adjacent elements"
        yield (
            p.out.col == 1
            and p.out.dtype in (torch.float16, torch.bfloat16)
            and storable(p.out, p.M, p.out_n, ()),
            "an fp16 or bf16 output that a descriptor can store",
        )
        yield needs_only_its_block(p), "an epilogue that reduces no rows"
        yield p.a.suits_registers, SHORT_ROWS

    def check(self, config: Config) -> None:
        if config.split_store:
            raise ValueError(
                "Config: the specialized schedule has no split_store, because it stores tiles in pieces"
            )
        super().check(config)
        if (config.loader, config.num_warps) != ("descriptor", 8):
            raise ValueError("Config: the specialized schedule needs the descriptor loader and 8 warps")

    def refusal(self, problem: Problem, config: Config) -> str | None:
        p, c = problem, config
        if (unsuited := self.unsuited(p)) is not None:
            return unsuited
        assert isinstance(p.b, Packed)
        step = block_columns(p.b.packed_bits)
        if not c.swap or c.block_n not in (OWN, OWN * WARPS // 4) or c.block_k % step or c.block_m > 256:
            needs = f"block_n 64 or 128, block_k a multiple of {step} and block_m up to 256"
            return f"packed weights need swap, {needs}"
        if _turns(c) and c.num_stages % (WARPS // 4):
            return "groups of warps take turns in tiles of 64 columns, which needs an even num_stages"
        return None

    def bind(self, problem: Problem, config: Config) -> Binding:
        return SpecializedBinding(problem, config, self.work(problem, config))

    def cuts(self, problem: Problem, config: Config) -> list[str]:
        return ["what fills no last wave is cut along K"] if config.split_k > 1 else []


def _packed(problem: Problem) -> bool:
    # Offsets in group parameters are counted in 32 bits; `suits_tma` ensures that units of 16 bytes can be copied.
    p = problem
    if not isinstance(p.b, Packed):
        return False
    group = p.b.group
    return p.a.dtype.itemsize == 2 and (not group or -(-p.K // group) * (p.N + STRIP) < 1 << 31)


def _turns(config: Config) -> bool:
    """Whether groups of warps take turns along K."""
    return config.block_n == OWN


def _descriptor(
    tensor: Tensor, shape: Sequence[int], strides: Sequence[int], block: Sequence[int], dtype: torch.dtype
) -> Any:  # fmt: skip
    """A tensor descriptor for Gluon, with the layout of its blocks in shared memory."""
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    elements = {torch.float16: gl.float16, torch.bfloat16: gl.bfloat16, torch.int32: gl.int32}
    shared = gl.NVMMASharedLayout.get_default_for(list(block), elements[dtype])
    return TensorDescriptor(tensor, list(shape), list(strides), list(block), shared)


class SpecializedBinding(Binding):
    """A `Binding` of the kernel with specialized warps."""

    def __init__(self, problem: Problem, config: Config, work: Work) -> None:
        from ..kernels import dialect, rings, specialized

        p, c = problem, config
        self.problem, self.config, self.work = p, c, work
        self.a, self.b = p.a.access(p, is_b=False, tma=True), p.b.access(p, is_b=True, tma=True)
        self.split = Split.of(p, c)
        self.kernel = specialized.gemm_specialized
        self.grid = (self.work.programs, 1, 1)
        self.constants = {
            **self._of_packed(),
            "PLACE": dialect.in_gluon(place.whole_tile),
            "TAIL_PLACE": dialect.in_gluon(place.tail_chunk),
            "EPILOGUE": dialect.in_gluon(epilogue_of(p)),
            "CAST": dialect.in_gluon(cast),
            "BLOCK_M": c.block_m,
            "BLOCK_N": c.block_n,
            "BLOCK_K": c.block_k,
            "BAND_M": c.group_m,
            "STAGES": c.num_stages,
            "PAIRED": p.paired,
            # Each block of B is read once by a row of tiles.
            "STREAM": c.stream and streams() and c.block_m >= p.M,
            # Does not depend on M, as the order of a sum depends on it.
            "ROTATE": c.block_m <= FEW,
            "TURNS": _turns(c),
            **overlap_of(p),
            "SOURCE": digest(rings),
            # Those of the first warpgroup; the compiler adds those of the others.
            "num_warps": 4,
        }

    def _of_packed(self) -> dict[str, Any]:
        from ..kernels import dialect, specialized

        b = self.problem.b
        assert isinstance(b, Packed)
        assert isinstance(self.b, PackedAccess)
        # Without waits: pieces that are unpacked during a product have separate registers.
        unpack, per = dialect.in_gluon(self.b.unpacker(waits=False)), 32 // b.packed_bits
        multiply = with_constants(specialized.multiply_packed, UNPACK=unpack, PER=per, GROUP=b.group)
        return {"MULTIPLY": dialect.in_gluon(multiply), "PER": per, "GROUP": b.group}

    def arguments(self, tensors: Sequence[Any], numbers: Sequence[float] = ()) -> list[Any]:
        """The kernel's run-time arguments, as for `Binding.arguments`."""
        p, c, w = self.problem, self.config, self.work
        given = sorted_tensors(p, tensors)
        a, b, out, _ = given
        workspace = None if self.split is None else self.workspace(out.device)
        return [
            _descriptor(a[0], (p.M, p.K), (p.a.row, 1), (c.block_m, c.block_k), p.a.dtype),
            self._words(b), self._out(out), p.M, p.N, p.K, *w.units(c.block_k), (), self._step_args(b),
            epilogue_arguments(p, 0, given, numbers), workspace,
        ]  # fmt: skip

    def _words(self, tensors: Sequence[Any]) -> Any:
        words = self.b.argument(tensors, self.config.block_k, self.config.block_n)
        return _descriptor(tensors[0], words.shape, words.strides, words.block_shape, torch.int32)

    def _out(self, tensor: Tensor) -> Any:
        p, c = self.problem, self.config
        columns = OWN // 2 if p.paired else OWN
        piece = PIECE_OF_BLOCKS if p.wants_subtiles else PIECE
        block = (min(c.block_m, piece), columns)
        return _descriptor(tensor, (p.M, p.out_n), (p.out.row, 1), block, p.out.dtype)

    def _step_args(self, b: Sequence[Any]) -> tuple[Any, ...]:
        """MULTIPLY's arguments besides the blocks."""
        assert isinstance(self.b, PackedAccess)
        return (*[*b[1:], None, None][:2], self.b.groups, self.b.columns)

    @property
    def workspace_size(self) -> tuple[int, int]:
        """Bytes of memory for the parts of tiles, and counters of their arrivals; none if no tile is cut."""
        c = self.config
        floats = self.work.partials(c.block_m, c.block_n)
        pieces = 1 if _turns(c) else WARPS // 4
        return floats * torch.float32.itemsize, self.work.counters(pieces)


SPECIALIZED = Specialized()
