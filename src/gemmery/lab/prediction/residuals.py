"""The residuals of a law of time, learned from measurements: a Gaussian process over the features of products.

The residual of a law, the logarithm of measured over predicted time, is taken to be the sum of what products of a kind
have in common, of what products with the same words have in common, and of a smooth function of sizes and knobs, which
differs the more the fewer words two products share (C. E. Rasmussen, C. K. I. Williams: Gaussian Processes for Machine
Learning, 2006, chapters 2 and 4). Far from all that was measured the correction is nothing, and its doubt is large.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

Floats = np.ndarray


@dataclass(frozen=True)
class Prior:
    """The prior of residuals. They are logarithms, so 0.1 is about 10 %.

    Attributes:
        kind: how far a kind's products are off together.
        words: the same for all products with the same words.
        local: how far the smooth function goes up and down.
        reach: how far it looks, in doublings of a size.
        unlike: what is left of the likeness of two products for each word that differs, in the smooth function and in
            what products with the same words share.
        noise: how far two measurements of the same differ.
    """

    kind: float
    words: float
    local: float
    reach: float
    unlike: float
    noise: float


#: Sizes that differ by two doublings say something of each other, and a kind's law may be off by a third. Rounds of one
#: measurement, and measurements of different days, are 5 to 10 % apart where the chip's power limits it.
PRIOR = Prior(kind=0.3, words=0.1, local=0.12, reach=2.0, unlike=0.6, noise=0.06)


@dataclass(frozen=True, eq=False)
class Samples:
    """Products with the features of each.

    Attributes:
        numbers: (products, numbers).
        words: (products, words), as numbers: equal where the words are.
    """

    numbers: Floats
    words: Floats

    @classmethod
    def of(cls, features: Sequence[tuple[Sequence[float], Sequence[str]]]) -> Samples:
        """From the features of each product."""
        numbers = np.array([numbers for numbers, _ in features], dtype=float)
        return cls(numbers, np.array([[_code(word) for word in words] for _, words in features]))

    def __getitem__(self, index: Floats) -> Samples:
        return Samples(self.numbers[index], self.words[index])


def _code(word: str) -> int:
    return zlib.crc32(word.encode())


def likeness(a: Samples, b: Samples, prior: Prior) -> Floats:
    """The covariance of the residuals of two lists of products, (a, b)."""
    # By the rule for squares of differences: an array of (a, b, numbers) would be large.
    squares = (a.numbers**2).sum(1)[:, None] + (b.numbers**2).sum(1) - 2 * a.numbers @ b.numbers.T
    different = sum(
        (a.words[:, None, i] != b.words[None, :, i]).astype(float) for i in range(a.words.shape[1])
    )
    alike = prior.unlike**different
    near = np.exp(-np.maximum(squares, 0.0) / (2 * prior.reach**2))
    kind = a.words[:, None, 0] == b.words[None, :, 0]
    shared = prior.kind**2 * kind + prior.words**2 * alike + prior.local**2 * near * alike
    return np.asarray(shared)


class Correction:
    """The posterior of residuals, given those of some products.

    Args:
        samples: the products.
        residuals: of each, the logarithm of measured over predicted time.
    """

    def __init__(self, samples: Samples, residuals: Floats, prior: Prior = PRIOR) -> None:
        self.samples, self.prior = samples, prior
        covariance = likeness(samples, samples, prior) + prior.noise**2 * np.eye(len(residuals))
        self._inverse = np.linalg.inv(covariance)
        self._weights = self._inverse @ residuals

    def __call__(self, samples: Samples) -> tuple[Floats, Floats]:
        """The expected residual of products, and the standard deviation of one measurement around it."""
        prior = self.prior
        near = likeness(samples, self.samples, prior)
        before = prior.kind**2 + prior.words**2 + prior.local**2 + prior.noise**2
        left = before - np.einsum("ij,jk,ik->i", near, self._inverse, near, optimize=True)
        return near @ self._weights, np.sqrt(np.maximum(left, prior.noise**2))
