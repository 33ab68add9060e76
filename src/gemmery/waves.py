"""How the tiles of a product fall into waves over the multiprocessors, and what becomes of the last one."""

from __future__ import annotations

from dataclasses import dataclass

from .problem import Config, Problem

#: Time of a tile of a half or a quarter of the columns, as part of a whole one's. Narrow tiles read more from L2 for what
#: they compute: 1.25 and 1.7 times their share of the columns, measured on an H200.
NARROW = {2: 0.62, 4: 0.43}


@dataclass(frozen=True)
class Waves:
    """The work of a launch: whole tiles, and a tail of narrow ones; see `kernels.gemm.gemm_persistent`.

    Attributes:
        tiles: whole tiles that are computed as such.
        cut: whole tiles beyond those that are cut into `config.tail` parts.
        strips: parts that cover the ragged columns of one row of tiles, 0 if whole tiles cover them.
        parts: narrow tiles in all.
    """

    tiles: int
    cut: int
    strips: int
    parts: int

    @classmethod
    def of(cls, problem: Problem, config: Config) -> Waves:
        """Cut the last wave where that ends sooner."""
        p, c, sms = problem, config, problem.device.sms
        rows = p.matrices * -(-p.M // c.block_m)
        if c.tail == 1:
            return cls(rows * -(-p.N // c.block_n), 0, 0, 0)
        whole = rows * (p.N // c.block_n)
        strips = -(-(p.N % c.block_n) // (c.block_n // c.tail))
        rest = whole % sms
        narrow = NARROW[c.tail]
        if_cut = -(-(rest * c.tail + rows * strips) // sms) * narrow
        if_whole = bool(rest) + -(-rows * strips // sms) * narrow
        cut = rest if if_cut < if_whole else 0
        return cls(whole - cut, cut, strips, cut * c.tail + rows * strips)

    @property
    def units(self) -> int:
        """Tiles, whole or narrow."""
        return self.tiles + self.parts
