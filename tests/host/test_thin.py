"""The product of thin matrices that kernels in Gluon add to their accumulators: its assembly, run by `lanes` in Python."""

import random

import numpy as np
import pytest

pytest.importorskip("triton.experimental.gluon.language.nvidia.hopper")

from gemmery.kernels.thin import fragments_text

from .lanes import LANES, Block, numbers, rounded

WARPS = 4


class Fragments(Block):
    """A program whose operands are $0, $1, and so on, with a value for each thread of all warps."""

    def _value(self, warp, text):
        if not text.strip().startswith("$"):
            return super()._value(warp, text)
        name = text.strip()
        return warp.registers.get(name, self.operands[int(name[1:])][warp.thread])

    def _ld(self, warp, active, code, to, given):
        """From global memory."""
        place, names = self._place(warp, given[0]), [x.strip() for x in to.strip("{}").split(",")]
        assert not place[active].size or (place[active] % (4 * len(names)) == 0).all()
        for i, name in enumerate(names):
            value = np.zeros(LANES, np.int64)
            for lane in np.flatnonzero(active):
                at = place[lane] + 4 * i
                assert 0 <= at <= len(self.memory) - 4, "a load from outside of memory"
                value[lane] = int.from_bytes(self.memory[at : at + 4].tobytes(), "little")
            self._set(warp, active, name, value)


def run(rank, words, count, rows_x, rows_y, stride):
    """The sums of 64 rows by `8 * count`, those that are wanted, and those of the beginning."""
    r = np.random.default_rng(0)
    bits = {name: rounded(r.standard_normal((rows, stride))) for name, rows in (("x", rows_x), ("y", rows_y))}
    # Poison behind the short side: NaN.
    for each in bits.values():
        each[:, rank:] = 0x7FC0
    memory = np.concatenate([each.astype(np.uint16).view(np.uint8).ravel() for each in bits.values()])
    thread = np.arange(WARPS * LANES)
    # As `wgmma` leaves them: rows g and g + 8 of a warp's 16, two columns each.
    row, quad = thread // 32 * 16 + thread % 32 // 4, thread % 4
    before = r.standard_normal((64, 8 * count)).astype(np.float32)
    sums = [
        before[row + 8 * (i // 2), 8 * block + 2 * quad + i % 2] for block in range(count) for i in range(4)
    ]
    given = (0, rows_x * stride * 2, 2 * stride, 2 * stride, rows_x, rows_y)
    operands = [*sums, *sums, *[thread * 0 + x for x in given for _ in range(4)]]
    program = Fragments(
        fragments_text(count, rank, words, "bf16"), operands, memory, 0, WARPS, random.Random(0)
    )
    program.run()
    found = np.zeros_like(before)
    for i in range(4 * count):
        value = np.concatenate([warp.registers[f"${i}"] for warp in program.warps])
        found[row + 8 * (i % 4 // 2), 8 * (i // 4) + 2 * quad + i % 2] = value
    x, y = [numbers(bits[name][:, :rank]).astype(np.float64) for name in "xy"]
    wanted = before.astype(np.float64)
    wanted[: min(64, rows_x), : min(8 * count, rows_y)] += x[:64] @ y[: 8 * count].T
    return found, wanted


@pytest.mark.parametrize(
    ("rank", "words", "count", "rows_x", "rows_y", "stride"),
    [
        (16, 2, 8, 64, 64, 16), (8, 2, 2, 64, 16, 8), (4, 2, 1, 64, 8, 4), (44, 2, 4, 70, 40, 48), (64, 4, 8, 64, 64, 64),
        (32, 4, 2, 33, 11, 40), (96, 4, 2, 64, 16, 96), (80, 2, 2, 1, 1, 80),
    ],
)  # fmt: skip
def test_sums(rank, words, count, rows_x, rows_y, stride):
    found, wanted = run(rank, words, count, rows_x, rows_y, stride)
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-4)
