"""How the tiles of a product fall into waves over the multiprocessors, and what becomes of the last one."""

from __future__ import annotations

from dataclasses import dataclass

from .problem import Config, Problem

#: Time of a part of a tile that is cut into so many, as part of the whole one's. Small tiles read more from L2 for what
#: they compute; measured on an H200.
PART_TIME = {2: 0.62, 4: 0.43, 8: 0.29}


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
        """Cut the last wave where that ends sooner; a launch of less than one wave is left to smaller tiles."""
        p, c, sms = problem, config, problem.device.sms
        rows = p.matrices * -(-p.M // c.block_m)
        if c.tail == 1:
            return cls(rows * -(-p.N // c.block_n), 0, 0, 0)
        whole = rows * (p.N // c.block_n)
        strips = -(-(p.N % c.block_n) // (c.block_n // c.tail_n))
        ragged = rows * c.tail_m * strips
        rest = whole % sms
        if_cut = -(-(rest * c.tail + ragged) // sms) * PART_TIME[c.tail]
        if_whole = bool(rest) + -(-ragged // sms) * PART_TIME[c.tail]
        cut = rest if whole >= sms and if_cut < if_whole else 0
        return cls(whole - cut, cut, strips, cut * c.tail + ragged)

    @property
    def units(self) -> int:
        """Tiles, whole or small."""
        return self.tiles + self.parts


@dataclass(frozen=True)
class Split:
    """How the tiles of a launch are cut along K; see `kernels.parts`.

    Attributes:
        parts: of each tile.
        length: of a part, in elements of K; a tile's last part may be shorter.
    """

    parts: int
    length: int

    @classmethod
    def of(cls, problem: Problem, config: Config) -> Split | None:
        """The split that comes nearest to `config.split_k` parts of whole steps; None if tiles stay whole."""
        steps = -(-problem.K // config.block_k)
        if config.split_k == 1 or steps < 2:
            return None
        each = -(-steps // config.split_k)
        return cls(-(-steps // each), each * config.block_k)
