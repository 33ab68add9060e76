"""Waves of tiles over the multiprocessors, and the tiles that are cut.

`cut_last_wave` works on numbers and on numpy arrays alike, so that the launch and the model of its time agree.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from .walk import divisor, uncounted

if TYPE_CHECKING:
    from ..problem import Config, Problem
    from ..select.space import Space
    from .cost import Floats

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


class Counts(NamedTuple):
    """What `place.counted_part` counts: tiles, parts of each, K in a part, and tiles along N."""

    tiles: int
    parts: int
    part_k: int
    tiles_n: int

    @classmethod
    def of(cls, problem: Problem, config: Config) -> Counts:
        """The counts of a product without a batch."""
        p, c, split = problem, config, Split.of(problem, config)
        tiles_n = -(-p.N // c.block_n)
        parts, length = (1, p.K) if split is None else (split.parts, split.length)
        return cls(-(-p.M // c.block_m) * tiles_n, parts, length, tiles_n)

    @property
    def arguments(self) -> tuple[int, ...]:
        """A kernel's run-time arguments: the counts, and the divisors of both numbers of tiles."""
        return *self, divisor(max(self.tiles, 1)), divisor(max(self.tiles_n, 1))

    @property
    def refusal(self) -> str | None:
        """See `walk.uncounted`."""
        return uncounted(self.tiles * self.parts)


class Busiest(NamedTuple):
    """The work of the multiprocessor that has most of it, for all configs of a space, as arrays.

    Attributes:
        programs: how many it runs.
        waves: how many of these follow each other.
        parts: of a tile along K.
        length: steps of a part.
        units: parts of all tiles of the launch.
    """

    programs: Floats
    waves: Floats
    parts: Floats
    length: Floats
    units: Floats

    @classmethod
    def of(cls, problem: Problem, space: Space, rows: Floats, resident: Floats) -> Busiest:
        """The work if each part of a tile has a program, and a multiprocessor holds `resident` programs at once."""
        p, s, sms = problem, space, problem.device.sms
        tiles = -(-rows // s.block_m) * -(-p.N // s.block_n)
        steps = np.ceil(max(p.K, 1) / s.block_k)
        length = np.ceil(steps / s.split_k)
        parts = np.ceil(steps / length)
        units = tiles * parts
        waves = np.ceil(units / (sms * resident))
        programs = np.where(waves > 1, waves * resident, np.ceil(units / sms))
        return cls(programs, waves, parts, length, units)
