"""The bytes that a product reads from memory through an L2 cache, by tile order.

A simulation that is exact for a simple cache. Programs that run at once advance along K together: in every step, each
of them requests its block of A and its block of B, and a block that several request is read once. The cache is one pool
of bytes from which blocks go in the order in which they were last used (LRU); those of the same step go together.

Left out, so that the numbers are for comparing orders, not for predicting a counter of a profiler: the output, which
passes through L2 as well; ways, sectors and the two halves of the cache of an A100 or H100, each of which keeps what
its own multiprocessors read; programs that run ahead of others; parts of tiles along K.

No block is followed on its way through the cache. A block that was last used in wave v and is used again in wave w, at
the same step along K both times, is still there if all different bytes that were used from its step in v to the step
before its own in w fit. These are, for the steps from its own on, the rows of A and the columns of B that the waves v
to w - 1 use, and for the steps before it, those that v + 1 to w use: two sums for each pair of waves.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np

from .tile_order import visits

Ints = np.ndarray


@dataclass(frozen=True)
class Traffic:
    """Bytes of A and B that programs request from L2, and those that L2 reads from memory.

    Attributes:
        requested_a, requested_b: the requests of all programs.
        memory_a, memory_b: the requests that miss L2.
        least_a, least_b: each matrix once, the minimum for any order.
        wave_memory: the bytes that each wave of programs reads from memory, of both matrices.
    """

    requested_a: int
    requested_b: int
    memory_a: int
    memory_b: int
    least_a: int
    least_b: int
    wave_memory: tuple[int, ...] = field(default=(), repr=False)

    @property
    def requested(self) -> int:
        """The sum over both matrices."""
        return self.requested_a + self.requested_b

    @property
    def memory(self) -> int:
        """The sum over both matrices."""
        return self.memory_a + self.memory_b

    @property
    def least(self) -> int:
        """The sum over both matrices."""
        return self.least_a + self.least_b

    @property
    def hit_rate(self) -> float:
        """The fraction of the requested bytes that hit L2, over both matrices."""
        return 1 - self.memory / self.requested if self.requested else 1.0

    @property
    def hit_rate_a(self) -> float:
        """The hit rate of A."""
        return 1 - self.memory_a / self.requested_a if self.requested_a else 1.0

    @property
    def hit_rate_b(self) -> float:
        """The hit rate of B."""
        return 1 - self.memory_b / self.requested_b if self.requested_b else 1.0

    def asdict(self) -> dict[str, Any]:
        """The sums as plain values, for JSON; sizes in bytes."""
        sums = [x.name for x in fields(self) if x.name != "wave_memory"]
        rates = ("requested", "memory", "least", "hit_rate", "hit_rate_a", "hit_rate_b")
        return {name: getattr(self, name) for name in (*sums, *rates)}


def simulate(
    M: int, N: int, K: int, *, tile: tuple[int, int, int], order: str = "grouped", group_size: int = 8,
    itemsize_a: float = 2, itemsize_b: float = 2, programs: int = 132, l2: int = 60 << 20,
) -> Traffic:  # fmt: skip
    """The traffic of the product of an M by K and a K by N matrix.

    Args:
        tile: rows, columns and K step of a tile.
        order, group_size: see `tile_order.visits`.
        itemsize_a, itemsize_b: bytes per element; 0.5 if two elements share a byte.
        programs: the number of programs that run at once, one tile each.
        l2: bytes of the cache.

    Raises:
        ValueError: a size is too small, or there is no such order.

    Example:
        >>> row = simulate(4096, 4096, 4096, tile=(128, 128, 64), order="row", l2=8 << 20)
        >>> grouped = simulate(4096, 4096, 4096, tile=(128, 128, 64), order="grouped", l2=8 << 20)
        >>> row.memory // 2**20, grouped.memory // 2**20
        (295, 220)
    """
    names = ("M", "N", "K", "block_m", "block_n", "block_k", "programs")
    for name, value in zip(names, (M, N, K, *tile, programs), strict=True):
        if value < 1:
            raise ValueError(f"{name} is {value}; it must be at least 1")
    if min(itemsize_a, itemsize_b) <= 0 or l2 < 0:
        raise ValueError(
            f"itemsize_a is {itemsize_a}, itemsize_b {itemsize_b}, l2 {l2}; no bytes are fewer than 0"
        )
    block_m, block_n, block_k = tile
    tiles_m, tiles_n = -(-M // block_m), -(-N // block_n)
    order_of_tiles = visits(tiles_m, tiles_n, order, group_size)
    # Rows of A first, then columns of B: the bytes that each has for every element along K.
    width = np.concatenate([
        np.minimum(M - np.arange(tiles_m) * block_m, block_m) * itemsize_a,
        np.minimum(N - np.arange(tiles_n) * block_n, block_n) * itemsize_b,
    ])  # fmt: skip
    cache = _Cache(width, K, block_k, l2)
    requested, memory = np.zeros(2), []
    for first in range(0, len(order_of_tiles), programs):
        rows, columns = order_of_tiles[first : first + programs].T
        used = np.concatenate([np.unique(rows), tiles_m + np.unique(columns)])
        missed = cache.use(used)
        requested += width[rows].sum() * K, width[tiles_m + columns].sum() * K
        memory.append((missed[used < tiles_m].sum(), missed[used >= tiles_m].sum()))
    read = np.sum(memory, axis=0)
    return Traffic(
        round(requested[0]), round(requested[1]), round(read[0]), round(read[1]),
        round(M * K * itemsize_a), round(K * N * itemsize_b), tuple([round(a + b) for a, b in memory]),
    )  # fmt: skip


class _Cache:
    """The time of the last use of each strip of A and B, rows of A or columns of B; see the module's text."""

    def __init__(self, width: np.ndarray, K: int, block_k: int, capacity: int) -> None:
        self.width, self.K, self.capacity = width, K, capacity
        #: The first element of each K step, and its length.
        self.before = np.arange(0, K, block_k)
        self.length = np.minimum(K - self.before, block_k)
        self.last = np.full(len(width), -1)
        self.wave = -1

    def use(self, strips: Ints) -> np.ndarray:
        """The bytes of strips that the next wave, which uses these, finds missing."""
        self.wave += 1
        since = self.last[strips]
        earlier = np.unique(since[since >= 0])
        # Bytes, for each element along K, that waves from `v` to the one before this used, for each v.
        from_v = [self.width[self.last >= v].sum() for v in earlier]
        self.last[strips] = self.wave
        behind_v = [self.width[self.last > v].sum() for v in earlier]
        there = np.zeros(len(strips))
        for v, used_from, used_behind in zip(earlier, from_v, behind_v, strict=True):
            used = used_from * (self.K - self.before) + used_behind * self.before
            there[since == v] = self.length[used <= self.capacity].sum()
        return np.asarray(self.width[strips] * (self.K - there))
