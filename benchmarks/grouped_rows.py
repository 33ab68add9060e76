"""The rows that `grouped.py` measures: the suite's, random ones of a seed, and how their tokens choose experts."""

import json
import math
import random
import sys
import zlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from statistics import NormalDist
from typing import Any

import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "src"))

from gemmery.lab.random_products import HIDDEN  # noqa: E402

SUITE = Path(__file__).with_name("grouped_suite.json")
#: By part, what is measured of a row in it.
PARTS: dict[str, tuple[str, ...]] = {
    "bare": ("up", "down"),
    "gradients": ("up dX", "up dW", "down dX", "down dW"),
    "block": ("block",),
    "step": ("step",),
    "packed": ("int4 up", "int4 down", "mxfp4 up", "mxfp4 down"),
    "routing": ("routing",),
    "memory": ("memory",),
}
#: How weights of experts lie. "gpt-oss" has them transposed, gate and up alternate, and there are biases.
STYLES = ("stacked", "gpt-oss")
#: Most tokens that count as decoding, and are timed in CUDA graphs; fewest of a prefill.
DECODE, PREFILL = 256, 2048
#: Fewest tokens for which gradients, and blocks that do not decode, are measured.
GRADIENTS, BLOCKS = 8192, 4096
#: Tokens for which packed weights and routing are measured, and those for memory.
PACKED, MEMORY = 64, 32768
#: Bytes a second that an H200 reads, by which floors are computed.
BANDWIDTH = 4.3e12
#: Bytes of the L2 cache of an H200.
L2 = 60 << 20


@dataclass(frozen=True)
class Row:
    """Experts, and tokens for them.

    Attributes:
        H, I, E, k, T: columns of a token, columns between the two products, experts, choices of a token, tokens.
        imbalance: "uniform", "gini 0.2" with that Gini coefficient of probabilities, "zipf", "hot" with one expert that
            gets a quarter of the rows and 5 of 16 that get none, or "near" with shares that differ by at most 30 %.
        style: of `STYLES`.
        also: parts that are measured besides those that follow from T.
        only: what is measured, where it is not what follows from T.
    """

    name: str
    H: int
    I: int  # noqa: E741  (its name in models' papers)
    E: int
    k: int
    T: int
    imbalance: str = "uniform"
    style: str = "stacked"
    also: tuple[str, ...] = ()
    only: tuple[str, ...] = ()

    @property
    def rows(self) -> int:
        """Rows of the grouped products."""
        return self.T * self.k

    @property
    def sizes(self) -> str:
        """The sizes as a text."""
        return f"H={self.H} I={self.I} E={self.E} k={self.k} T={self.T} {self.imbalance}"

    def product(self, which: str) -> tuple[int, int]:
        """N and K of the product "up" or "down"."""
        return (2 * self.I, self.H) if which == "up" else (self.H, self.I)

    def measures(self) -> list[str]:
        """What is measured, see `PARTS`."""
        if self.only:
            return list(self.only)
        parts = {"bare", *self.also}
        parts |= {"gradients"} if self.T >= GRADIENTS else set()
        parts |= {"block"} if self.T <= DECODE or self.T >= BLOCKS else set()
        parts |= {"packed", "routing"} if self.T == PACKED else set()
        parts |= {"memory"} if self.T == MEMORY else set()
        return [name for part, names in PARTS.items() if part in parts for name in names]

    def regimes(self) -> tuple[str, ...]:
        """The regimes of `gemmery.lab.timing`, the first one that of the bars."""
        return ("graph", "burst") if self.T <= DECODE else ("burst",)

    def record(self) -> dict[str, Any]:
        """The row as JSON has it."""
        return {name: list(x) if isinstance(x, tuple) else x for name, x in asdict(self).items()}

    @classmethod
    def of(cls, record: dict[str, Any]) -> "Row":
        """A row from its record; ValueError says what is wrong with it."""
        if unknown := set(record) - {field.name for field in fields(cls)}:
            raise ValueError(f"row {record.get('name')!r} has unknown {', '.join(sorted(unknown))}")
        given: dict[str, Any] = {name: tuple(x) if isinstance(x, list) else x for name, x in record.items()}
        row = cls(**given)
        known = [name for names in PARTS.values() for name in names]
        if wrong := [*(set(row.also) - set(PARTS)), *(set(row.only) - set(known))]:
            raise ValueError(f"row {row.name!r} measures unknown {', '.join(sorted(wrong))}")
        if row.style not in STYLES:
            raise ValueError(f"row {row.name!r} has style {row.style!r}; there are {', '.join(STYLES)}")
        if not (min(row.H, row.I, row.T, row.k) > 0 and row.k <= row.E):
            raise ValueError(
                f"row {row.name!r} has sizes {row.sizes}; they must be positive, and k at most E"
            )
        shares(row.imbalance, row.E, 0)
        return row


def part_of(measure: str) -> str:
    """The part that something measured belongs to."""
    return next(part for part, names in PARTS.items() if measure in names)


def suite(path: Path = SUITE) -> list[Row]:
    """The rows of the suite; ValueError if its file is not valid."""
    rows = [Row.of(record) for record in json.loads(path.read_text(encoding="utf-8"))["rows"]]
    if len({row.name for row in rows}) < len(rows):
        raise ValueError(f"{path.name}: two rows have one name")
    return rows


# ---------------------------------------------------------------------------------------------------------------------
# Random rows

#: Experts, choices of a token, and columns between the products over those of a token, as published models have them.
EXPERTS = (8, 16, 32, 60, 64, 64, 96, 128, 128, 160, 256, 384, 512)
CHOICES = (1, 2, 2, 4, 4, 6, 8, 8, 8, 10)
WIDTHS = (0.25, 0.286, 0.375, 0.5, 0.75, 1.0, 1.75, 3.5)
#: Least and most columns of a token.
COLUMNS = (1024, 7168)
#: Kinds of imbalance; what stands here several times is as many times as likely.
IMBALANCES = ("gini", "gini", "gini", "uniform", "zipf", "hot")
#: Tokens: rows are of these in turn.
TOKENS = ((1, DECODE), (PREFILL, 32768))
#: Most elements of all weights, and most operations of a block.
MOST_WEIGHTS, MOST_FLOPS = 12e9, 2e13


def draw(seed: int, count: int) -> list[Row]:
    """The first `count` random rows of a seed. The first ones are the same whatever the count is."""
    rng = random.Random(f"{seed} grouped")
    return [_drawn(rng, f"{seed}/{number + 1}", *TOKENS[number % len(TOKENS)]) for number in range(count)]


def _drawn(rng: random.Random, place: str, least: int, most: int) -> Row:
    while True:
        H = rng.choice([columns for columns in HIDDEN if COLUMNS[0] <= columns <= COLUMNS[1]])
        I = max(64, round(H * rng.choice(WIDTHS) / 64) * 64)  # noqa: E741
        E = rng.choice(EXPERTS)
        k = rng.choice([choices for choices in CHOICES if choices <= E // 4])
        T = _tokens(rng, least, most)
        kind = rng.choice(IMBALANCES)
        imbalance = f"gini {rng.uniform(0.1, 0.25):.2f}" if kind == "gini" else kind
        if 3 * E * I * H <= MOST_WEIGHTS and 6 * T * k * I * H <= MOST_FLOPS:
            return Row(f"{place} {E}x{k} of {H}x{I} T={T} {imbalance}", H, I, E, k, T, imbalance)


def _tokens(rng: random.Random, least: int, most: int) -> int:
    """Log-uniform; one in three is rounded to a power of two."""
    drawn = math.exp(rng.uniform(math.log(least), math.log(most + 1)))
    power = rng.random() < 1 / 3
    return min(most, max(least, 2 ** round(math.log2(drawn)) if power else int(drawn)))


# ---------------------------------------------------------------------------------------------------------------------
# Choices of tokens


def seed_of(seed: int, name: str) -> int:
    """The seed of a row in a run, the same whatever other rows are run."""
    return seed ^ zlib.crc32(name.encode())


def shares(imbalance: str, E: int, seed: int) -> list[float]:
    """The probability of each expert; ValueError if there is no such imbalance."""
    kind, _, degree = imbalance.partition(" ")
    rng = random.Random(seed)
    if kind == "uniform" and not degree:
        found = [1.0] * E
    elif kind == "gini" and 0 < float(degree or 0) < 1:
        # The Gini coefficient of a log-normal distribution is 2 Φ(σ / √2) - 1.
        sigma = math.sqrt(2) * NormalDist().inv_cdf((1 + float(degree)) / 2)
        found = [math.exp(rng.gauss(0, sigma)) for _ in range(E)]
    elif kind == "zipf" and not degree:
        found = [1 / place for place in range(1, E + 1)]
        rng.shuffle(found)
    elif kind == "hot" and not degree:
        found = shares("gini 0.2", E, seed)
        chosen = rng.sample(range(E), min(E - 1, 1 + round(E * 5 / 16)))
        for expert in chosen:
            found[expert] = 0.0
        if (rest := sum(found)) > 0:
            found[chosen[0]] = rest / 3
    elif kind == "near" and not degree:
        found = [1 + rng.uniform(-0.3, 0.3) for _ in range(E)]
    else:
        raise ValueError(
            f"imbalance is {imbalance!r}; it must be uniform, gini and a number below 1, zipf, hot or near"
        )
    total = sum(found)
    return [share / total for share in found]


def choices(row: Row, seed: int) -> Tensor:
    """(T, k), int64, on the CPU: the experts of each token.

    They are different ones, but with "hot", whose first expert could not get a quarter of the rows otherwise. With
    "near" groups are as large as their shares say.
    """
    p = torch.tensor(shares(row.imbalance, row.E, seed), dtype=torch.float64)
    generator = torch.Generator().manual_seed(seed)
    if row.imbalance == "near":
        ends = (p.cumsum(0) * row.rows).round().long()
        ends[-1] = row.rows
        ids = torch.repeat_interleave(torch.arange(row.E), ends.diff(prepend=ends.new_zeros(1)))
        return ids[torch.randperm(row.rows, generator=generator)].reshape(row.T, row.k)
    if row.k == 1 or row.imbalance == "hot":
        drawn = torch.multinomial(p, row.rows, replacement=True, generator=generator)
        return drawn.reshape(row.T, row.k)
    return torch.multinomial(p.expand(row.T, row.E), row.k, generator=generator)


def counts_of(top: Tensor, E: int) -> list[int]:
    """The rows of each expert."""
    found: list[int] = torch.bincount(top.flatten(), minlength=E).tolist()
    return found


# ---------------------------------------------------------------------------------------------------------------------
# Bytes


def touched(counts: Sequence[int]) -> int:
    """Experts that any token has chosen."""
    return sum(count > 0 for count in counts)


def floor_us(counts: Sequence[int], weight_bytes: int) -> float:
    """Microseconds for reading the touched experts' part of a weight once, see `BANDWIDTH`."""
    return weight_bytes * touched(counts) / len(counts) / BANDWIDTH * 1e6


def turns(read_bytes: float, E: int, most: int, l2: int = L2) -> list[int]:
    """By how many experts choices are moved in each of several calls that run one behind the other.

    A call that reads what the one before has read would find it in the L2 cache. Choices that are moved have groups of
    the same sizes and other weights. There are so many that all of them read four times as much as the cache holds.

    Args:
        read_bytes: of one call.
        most: calls.
    """
    count = max(1, min(E, most, math.ceil(4 * l2 / max(read_bytes, 1.0))))
    return [turn * E // count for turn in range(count)]


def moved(counts: Sequence[int], by: int) -> list[int]:
    """Sizes of groups whose choices are moved by a number of experts."""
    return [counts[(expert - by) % len(counts)] for expert in range(len(counts))]


def needed_bytes(row: Row, measure: str) -> float:
    """About the GPU memory that a measurement takes, at most."""
    R, weights = row.rows, 6.0 * row.E * row.I * row.H
    if part_of(measure) == "routing":
        return 16.0 * R * row.H
    if part_of(measure) == "block":
        gathered = 6.0 * R * row.I * row.H if batched_fits(row) else 0.0
        return 2.0 * R * (6 * row.H + 8 * row.I) + gathered + weights
    if part_of(measure) in ("step", "memory"):
        return 2.0 * R * (12 * row.H + 16 * row.I) + 3 * weights
    *_, of = measure.split()
    N, K = row.product("down" if "down" in measure else "up")
    copies = {"dW": 4.0, "dX": 1.0}.get(of, 2.0 if part_of(measure) == "packed" else 1.0)
    return 2.0 * R * (3 * N + 3 * K) + copies * 2 * row.E * N * K + 16.0 * N * K


#: Bytes of weights up to which a copy of an expert for each choice of a token is measured as a peer.
MOST_GATHERED = 8e9


def batched_fits(row: Row) -> bool:
    """Whether Hugging Face's batched_mm is measured, which copies an expert's weights for each choice of a token."""
    return row.T <= DECODE and 6.0 * row.rows * row.I * row.H <= MOST_GATHERED


# ---------------------------------------------------------------------------------------------------------------------
# What is checked


def sampled(
    counts: Sequence[int], rng: random.Random, groups: int = 16, rows: int = 8
) -> dict[int, list[int]]:
    """Rows to compare, by group: ends and random rows of the first, last, largest and smallest group and of others."""
    there = [group for group, count in enumerate(counts) if count]
    if not there:
        return {}
    chosen = [there[0], there[-1], max(there, key=counts.__getitem__), min(there, key=counts.__getitem__)]
    chosen += rng.sample(there, min(groups, len(there)))
    found = {}
    for group in sorted(dict.fromkeys(chosen[: max(groups, 4)])):
        begin = sum(counts[:group])
        end = begin + counts[group]
        inner = rng.sample(range(begin, end), min(rows - 2, end - begin))
        found[group] = sorted({begin, end - 1, *inner})
    return found
