"""The rows of tiles of any width, see `kernels.any_width`: all that registers and shared memory hold.

There are too many to write down, and nothing to say of one that does not follow from its sizes.
"""

from __future__ import annotations

#: Bytes of shared memory for stages and for what is stored; of a row of a stage.
SHARED, ROW = 231424, 128
#: Rows of X, warpgroups, and the widest tile that registers hold: of tiles that warpgroups share, and of those that
#: they take in turn.
SHARED_TILES = ((64, 1, 256), (128, 2, 256), (192, 3, 200), (256, 2, 168))
TURNS = ((128, 2, 168),)
#: Stages that are enough.
MOST_STAGES = 12


def _rows(sizes: tuple[tuple[int, int, int], ...]) -> str:
    lines = []
    for x, groups, widest in sizes:
        for y in range(16, widest + 1, 8):
            if stages := _stages(x, groups, y):
                lines.append(f"{x}x{y}x64 8 {4 * groups} {stages} 1.0")
                lines.append(f"{y}x{x}x64 8 {4 * groups} {stages} 1.0 swap")
    return "\n".join(lines)


def _stages(x: int, groups: int, y: int) -> int:
    """Stages that fit beside one or two parts of the output for each warpgroup; 0 for fewer than 3."""
    stage = (x + -(-y // 64) * 64) * ROW
    part = groups * 64 * min(64, 1 << (y.bit_length() - 1)) * 2
    found = (SHARED - 2 * part) // stage
    return min(MOST_STAGES, found if found > 3 else max(found, (SHARED - part) // stage))


COOPERATIVE, PINGPONG = _rows(SHARED_TILES), _rows(TURNS)
