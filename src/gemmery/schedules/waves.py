"""Waves of tiles over the multiprocessors, and the tiles that are cut.

`cut_last_wave` works on numbers and on numpy arrays alike, so that the launch and the model of its time agree.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from .walk import divisor

if TYPE_CHECKING:
    from ..problem import Config, Problem

#: The time of a part of a tile, relative to the whole tile's; the index is the number of parts. Small
#: tiles read more from L2 for what they compute; measured on an H200.
PART_TIME = np.array([0, 1, 0.62, 0, 0.43, 0, 0, 0, 0.29])


def cut_last_wave(
    rows: Any, N: Any, block_n: Any, tail_m: Any, tail_n: Any, sms: int
) -> tuple[Any, Any, Any, Any]:
    """Whole tiles, whole tiles beyond those that are cut, strips in the ragged columns of a row of parts, small tiles.

    The last wave is cut if the launch then ends sooner. For less than one wave, smaller tiles are used instead.

    Args:
        rows: of tiles, in all matrices.
        tail_m, tail_n: parts of a cut tile along M and N, as in `Config`; 1 and 1 for no cutting.
    """
    tail = tail_m * tail_n
    whole = rows * (N // block_n)
    strips = -(-(N % block_n) // (block_n // tail_n))
    ragged = rows * tail_m * strips
    rest = whole % sms
    if_cut = -(-(rest * tail + ragged) // sms) * PART_TIME[tail]
    if_whole = (rest > 0) + -(-ragged // sms) * PART_TIME[tail]
    cut = np.where((whole >= sms) & (if_cut < if_whole), rest, 0)
    cuts = tail > 1
    return (
        np.where(cuts, whole - cut, rows * -(-N // block_n)),
        np.where(cuts, cut, 0),
        np.where(cuts, strips, 0),
        np.where(cuts, cut * tail + ragged, 0),
    )


@dataclass(frozen=True)
class Waves:
    """The work of a launch: whole tiles, and a tail of small ones; see `kernels.gemm.gemm_persistent`.

    Attributes:
        tiles: whole tiles that are computed as such.
        cut: whole tiles beyond those that are cut into `config.tail` parts.
        strips: parts that cover the ragged columns of one row of parts, 0 if whole tiles cover them.
        parts: small tiles in all.
    """

    tiles: int
    cut: int
    strips: int
    parts: int

    @classmethod
    def of(cls, problem: Problem, config: Config) -> Waves:
        """The work of a problem with a config."""
        rows = problem.tile_rows(config.block_m)
        work = cut_last_wave(
            rows, problem.N, config.block_n, config.tail_m, config.tail_n, problem.device.sms
        )
        return cls(*map(int, work))

    @property
    def units(self) -> int:
        """Tiles, whole or small."""
        return self.tiles + self.parts


@dataclass(frozen=True)
class Split:
    """The cuts along K of a launch's tiles; see `kernels.parts`.

    Attributes:
        parts: of each tile; of ranges of K, of one of average length.
        length: of a part, in elements of K; a tile's last part may be shorter.
        of_matrices: of ranges of K, how many parts all matrices together can have at most; otherwise 0.
    """

    parts: int
    length: int
    of_matrices: int = 0

    @classmethod
    def of(cls, problem: Problem, config: Config) -> Split | None:
        """The split that is nearest to `config.split_k` parts of whole steps; None if tiles stay whole.

        They also stay whole if the end of the last part would not fit into the 32 bits in which the kernel counts K.
        """
        is_ranges = problem.ragged == "k"
        K = -(-problem.K // max(problem.matrices, 1)) if is_ranges else problem.K
        steps = -(-K // config.block_k)
        if config.split_k == 1 or steps < 2:
            return None
        each = -(-steps // config.split_k)
        parts, length = -(-steps // each), each * config.block_k
        # Each range may have a part that is shorter, or empty.
        of_matrices = problem.matrices + problem.K // length if is_ranges else 0
        return cls(parts, length, of_matrices) if parts * length < 1 << 31 else None

    def units(self, problem: Problem, tiles: int) -> int:
        """Parts of all tiles at most.

        Args:
            tiles: of all matrices.
        """
        if not self.of_matrices:
            return self.parts * tiles
        return self.of_matrices * (tiles // max(problem.matrices, 1))


def counts_of(problem: Problem, config: Config) -> tuple[int, int, int, int, int, int]:
    """Tiles, parts of each, K in a part, tiles along N and divisors, as `place.counted_part` and its kernels take them.

    The product has no batch.
    """
    p, c, split = problem, config, Split.of(problem, config)
    tiles_n = -(-p.N // c.block_n)
    tiles = -(-p.M // c.block_m) * tiles_n
    parts, length = (1, p.K) if split is None else (split.parts, split.length)
    return tiles, parts, length, tiles_n, divisor(max(tiles, 1)), divisor(max(tiles_n, 1))


def uncounted(problem: Problem, config: Config) -> str | None:
    """Why a launch has more parts of tiles than `order.quotient` counts; None if it has not."""
    tiles, parts, *_ = counts_of(problem, config)
    most = (1 << 30) - 1
    return (
        f"{problem} takes {tiles * parts} programs; at most {most} are counted"
        if tiles * parts > most
        else None
    )
