"""Random products as models have them: a measure for unforeseen shapes.

A transformer is drawn (hidden size, heads, feed-forward width, tensor-parallel degree), of it a projection, and a
number of rows. The same seed gives the same products everywhere. Tuning and fitting leave out those of
`suites.held_out`. Needs neither torch nor a GPU.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

#: Hidden sizes of published language and vision models.
HIDDEN = (
    768, 1024, 1152, 1536, 2048, 2304, 2560, 2880, 3072, 3584, 4096, 4608, 5120, 5376, 6144, 6656, 7168, 8192, 9216,
    10240, 12288, 16384,
)  # fmt: skip
#: Sizes of a head, the queries' width over the hidden size, query heads that share a key, the feed-forward width over
#: the hidden size, and degrees of tensor parallelism. A value that appears several times is as many times as likely.
HEAD = (64, 80, 96, 128, 128, 128, 192, 256)
QUERIES = (0.5, 1, 1, 1, 2)
SHARING = (1, 2, 4, 8, 8)
WIDTH = (1, 2, 2.67, 3, 3.5, 4, 5.33)
PARALLEL = (1, 1, 1, 2, 4, 8)
#: Rows of a down-projection to a latent, as some models have before their heads.
LATENT = (512, 576, 1536, 2112)
#: Weights smaller than this in a dimension, of sizes that are no multiple of that, or of more elements are drawn again.
LEAST, STEP, MOST = 256, 16, 2**29
#: Rows of the activations, least and most, by class.
ROWS = {"decode": (1, 64), "mid": (65, 511), "prefill": (512, 8192)}
#: The class of the gradients: rows as in prefill, in the layouts of the product and of both gradients.
BACKWARD = "backward"
CLASSES = (*ROWS, BACKWARD)


@dataclass(frozen=True)
class Product:
    """One product, (M, K) by (K, N).

    Attributes:
        name: the projection, how many devices its weight is cut for, and the rows of the activations.
        layout: N for row-major and T for column-major, as BLAS has them: "NT" is a Linear, "NN" the gradient of its
            input, "TN" that of its weight.
    """

    name: str
    M: int
    N: int
    K: int
    layout: str

    @property
    def projection(self) -> str:
        """The name of the weight: qkv, o, gate_up, up, down or latent."""
        return self.name.partition(" ")[0]


def draw(
    seed: int, which: str, count: int, keep: Callable[[Product], bool] = lambda product: True
) -> list[Product]:
    """The first `count` products of a seed.

    Args:
        seed: any integer.
        which: of `CLASSES`.
        count: how many; the first ones do not depend on it.
        keep: says which products count; the others are passed over. There must be such products in the class.

    Raises:
        ValueError: the class is unknown, or fewer than one product is asked for.

    Example:
        >>> draw(5, "mid", 1)
        [Product(name='latent tp2 M=139', M=139, N=2112, K=4096, layout='NT')]
    """
    if which not in CLASSES:
        raise ValueError(f"class {which!r} given; there are {', '.join(CLASSES)}")
    if count < 1:
        raise ValueError(f"{count} products requested; at least one is required")
    return list(itertools.islice(filter(keep, _products(seed, which)), count))


# The order in which numbers are drawn is part of what a seed means: a change to it changes every suite.


def _products(seed: int, which: str) -> Iterator[Product]:
    """All products of a seed, without end."""
    rows = "prefill" if which == BACKWARD else which
    rng = random.Random(f"{seed} {rows}")
    while True:
        yield _product(rng, rows, which == BACKWARD)


def _product(rng: random.Random, rows: str, backward: bool) -> Product:
    projection, outputs, inputs = _weight(rng)
    M = _rows(rng, *ROWS[rows])
    layout = rng.choice(("NT", "NN", "TN")) if backward else "NT"
    sizes = {
        "NT": (M, outputs, inputs),
        "NN": (M, inputs, outputs),
        "TN": (outputs, inputs, M),
    }[layout]
    return Product(f"{projection} M={M}", *sizes, layout)


def _rows(rng: random.Random, least: int, most: int) -> int:
    """Log-uniform; one in three is rounded to a power of two."""
    drawn = math.exp(rng.uniform(math.log(least), math.log(most + 1)))
    power = rng.random() < 1 / 3
    return min(most, max(least, 2 ** round(math.log2(drawn)) if power else int(drawn)))


def _weight(rng: random.Random) -> tuple[str, int, int]:
    """A projection's name, and its weight's rows and columns on one device."""
    while True:
        devices, found = _transformer(rng)
        projection, outputs, inputs = rng.choice(found)
        large = outputs >= LEAST and inputs >= LEAST
        if large and outputs % STEP == inputs % STEP == 0 and outputs * inputs <= MOST:
            return f"{projection} tp{devices}" if devices > 1 else projection, outputs, inputs


def _transformer(rng: random.Random) -> tuple[int, list[tuple[str, int, int]]]:
    """A degree of tensor parallelism, and the projections of a transformer's block that is cut so."""
    hidden, head = rng.choice(HIDDEN), rng.choice(HEAD)
    heads = max(1, round(hidden * rng.choice(QUERIES) / head))
    keys = max(1, heads // rng.choice(SHARING))
    wide = round(hidden * rng.choice(WIDTH) / 64) * 64
    devices = rng.choice(PARALLEL)
    return devices, [
        ("qkv", (heads + 2 * keys) * head // devices, hidden),
        ("o", hidden, heads * head // devices),
        ("gate_up", 2 * wide // devices, hidden),
        ("up", wide // devices, hidden),
        ("down", hidden, wide // devices),
        ("latent", rng.choice(LATENT), hidden),
    ]
