"""The tiles worth considering for block-sparse operands, as data; see `tiles`.

On the side of the block-sparse operand, a tile has one line of blocks, or an equal part of it. A step along K is one
block, or an equal part of it. The other side is free. If blocks are narrower than the tensor cores' left operand, the
free side becomes the left operand, by `swap` if it is N. Efficiencies are those of dense tiles of these sizes.
"""

from __future__ import annotations

from ..formats.blocks import SIZES

Rows = dict[tuple[str, str], str]

#: Of a block-sparse second operand in 16 bits, by the size of blocks.
_HOPPER_COLUMNS: dict[int, Rows] = {
    128: {
        ("descriptor", "persistent"): """
            256x128x64 8 8 4 0.75 split
            256x128x64 8 8 3 0.73 split blocks
            128x128x64 8 8 6 0.74
            128x128x64 8 4 4 0.75
        """,
        ("descriptor", "tile"): """
            256x128x64 8 8 4 0.90 swap
            256x128x64 8 8 4 0.86 split
            128x128x64 8 8 6 0.76
            128x128x64 8 4 3 0.76
            64x128x128 8 4 4 0.71
            64x128x64  8 4 8 0.67
            16x128x128 8 4 5 0.37 swap
            16x64x128  8 4 5 0.37 swap
        """,
        ("pointer", "tile"): """
            128x128x64 8 8 3 0.60
            64x128x64  8 4 3 0.40
            64x64x64   8 4 3 0.30
        """,
    },
    64: {
        ("descriptor", "persistent"): """
            256x64x64 8 8 4 0.62
            128x64x64 8 4 6 0.57
        """,
        ("descriptor", "tile"): """
            128x64x64 8 4 3 0.72 swap
            256x64x64 4 4 2 0.71 swap
            256x64x64 8 8 4 0.60
            256x64x64 8 8 2 0.60
            128x64x64 8 4 4 0.66
            128x64x64 8 4 3 0.70
            64x64x64  8 4 3 0.53
            16x64x64  8 4 8 0.37 swap
        """,
        ("pointer", "tile"): """
            128x64x64 8 4 3 0.45
            64x64x64  8 4 3 0.35
        """,
    },
    32: {
        ("descriptor", "tile"): """
            256x32x32 8 8 6 0.35
            128x32x32 8 4 6 0.33
            64x32x32  8 4 6 0.25
        """,
        ("pointer", "tile"): """
            128x32x32 8 4 4 0.25
            64x32x32  8 4 4 0.20
        """,
    },
    16: {
        ("descriptor", "tile"): """
            128x16x16 8 4 8 0.12
            64x16x16  8 4 8 0.10
        """,
        ("pointer", "tile"): """
            128x16x16 8 4 4 0.10
            64x16x16  8 4 4 0.08
        """,
    },
}  # fmt: skip
#: Of a block-sparse first operand.
_HOPPER_ROWS: dict[int, Rows] = {
    128: {
        ("descriptor", "persistent"): """
            128x256x64 16 8 4 0.88 split
            128x256x64 16 8 3 0.85 split blocks
            128x128x64  8 8 6 0.74
            128x128x64  8 4 4 0.75
        """,
        ("descriptor", "tile"): """
            128x256x64 8 8 4 0.77 split
            128x128x64 8 8 6 0.76
            128x128x64 8 4 3 0.81
            128x64x128 8 4 4 0.57
        """,
        ("pointer", "tile"): """
            128x128x64 8 8 3 0.60
            128x64x64  8 4 3 0.40
            64x64x64   8 4 3 0.30
        """,
    },
    64: {
        ("descriptor", "persistent"): """
            64x256x64 8 4 4 0.80
            64x128x64 8 4 6 0.60
        """,
        ("descriptor", "tile"): """
            64x256x64 8 4 5 0.86
            64x256x64 8 4 2 0.80
            64x128x64 8 4 4 0.67
            64x64x64  8 4 3 0.53
        """,
        ("pointer", "tile"): """
            64x128x64 8 4 3 0.45
            64x64x64  8 4 3 0.35
        """,
    },
    32: {
        ("descriptor", "tile"): """
            32x256x32 8 8 6 0.35 swap
            32x128x32 8 4 6 0.33 swap
            32x64x32  8 4 6 0.25 swap
        """,
        ("pointer", "tile"): """
            32x128x32 8 4 4 0.25 swap
            32x64x32  8 4 4 0.20 swap
        """,
    },
    16: {
        ("descriptor", "tile"): """
            16x128x16 8 4 8 0.12 swap
            16x64x16  8 4 8 0.10 swap
        """,
        ("pointer", "tile"): """
            16x128x16 8 4 4 0.10 swap
            16x64x16  8 4 4 0.08 swap
        """,
    },
}  # fmt: skip


def _tile(free: int, line: int, step: int, is_b: bool) -> str:
    return f"{free}x{line}x{step}" if is_b else f"{line}x{free}x{step}"


def _by_pointers(size: int, is_b: bool, stages: int, free: int = 128) -> Rows:
    """Rows for GPUs without a table, in 16 bits."""
    narrow, step = min(size, 64), min(size, 32)
    return {
        ("pointer", "tile"): f"""
            {_tile(free, narrow, step, is_b)} 8 4 {stages} 0.75
            {_tile(free // 2, min(narrow, 32), step, is_b)} 8 4 {stages} 0.50
        """
    }


def _blackwell(size: int, is_b: bool) -> Rows:
    return {
        ("descriptor", "tile"): f"""
            {_tile(128, size, min(size, 64), is_b)} 8 4 3 0.80
            {_tile(64, size, min(size, 64), is_b)} 8 4 3 0.50
        """,
        ("pointer", "tile"): f"{_tile(64, min(size, 64), min(size, 64), is_b)} 8 4 3 0.35",
    }


def _wide(size: int, is_b: bool, tiles: tuple[int, ...]) -> Rows:
    """Rows for numbers of 32 and 64 bits."""
    lines = [f"{_tile(free, min(size, free), 16, is_b)} 8 4 2 {0.01 * free:.2f}" for free in tiles]
    return {("pointer", "tile"): "\n".join(lines)}


def _interpreter(size: int, is_b: bool) -> Rows:
    """Both loaders, both schedules, and parts of blocks."""
    return {
        ("descriptor", "persistent"): f"{_tile(64, size, size, is_b)} 8 4 3 1.0",
        ("descriptor", "tile"): f"{_tile(64, size, max(size // 2, 16), is_b)} 8 4 3 0.9",
        ("pointer", "tile"): f"{_tile(64, max(size // 2, 16), max(size // 2, 16), is_b)} 8 4 3 0.8",
    }


def _of(family: str, size: int, is_b: bool) -> Rows:
    if family == "hopper":
        return (_HOPPER_COLUMNS if is_b else _HOPPER_ROWS)[size]
    if family == "blackwell":
        return _blackwell(size, is_b)
    if family == "interpreter":
        return _interpreter(size, is_b)
    if family == "rdna":
        return _by_pointers(size, is_b, 2, 64)
    return _by_pointers(size, is_b, 2 if family == "cdna" else 3)


def kinds_of(family: str) -> dict[str, Rows]:
    """A family's rows by kind, see `operands.blocks.Blocks.kind`."""
    kinds = {}
    for size in SIZES:
        for is_b in (False, True):
            name = f"block {'columns' if is_b else 'rows'} {size}"
            kinds[name] = _of(family, size, is_b)
            kinds[f"{name} wide"] = (
                kinds[name] if family == "interpreter" else _wide(size, is_b, (32,) if family == "rdna" else (64, 32))
            )  # fmt: skip
    return kinds
