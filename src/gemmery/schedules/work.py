"""How tiles are divided between programs whose number is fixed ahead, and what fills no last wave is cut.

`Work.divide` is for a launch, `Work.divide_many` for the model of its time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np


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

    def counters(self, ctas: int) -> int:
        """Counters that cut tiles need."""
        return self.cut * ctas
