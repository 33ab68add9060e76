"""The tiles worth considering, as data: one row for each config, by family of GPUs and kind of operand.

A row reads `MxNxK group_m num_warps num_stages efficiency` and then, where they apply, the words

- `split`, `tail=n` and `swap`: see `Config`;
- `aligned`: only where rows begin at multiples of 16 elements, see `space.Tile`;
- `splits`: also considered with its tiles cut along K;
- `strided`: considered only for matrices that descriptors can't take;
- `apart`: it sums in another order than its family's other rows, as those do that have too few rows for the family's
  matrix instruction, or it is not known to sum in theirs;
- `blocks`: considered only where the end of a tile takes much shared memory, see `Problem.wants_room`;
- `stream`: see `Config`; rows of a schedule are considered where it suits, see `schedules`.

The efficiency is the part of the device's achievable rate that the tile's main loop reaches once it is running: fitted
to measurements for Hopper on an H200, estimated elsewhere. Every row compiles without spills on every architecture of
its family, which `make check-targets` proves; another version of Triton allocates registers differently, so a plan
checks again.
"""

from __future__ import annotations

from ..schedules.any_width_tile import PROMOTED
from . import any_width_tiles
from .block_tiles import kinds_of
from .quantized_tiles import QUANTIZED, Rows

HOPPER: dict[str, Rows] = {
    "half": {
        ("descriptor", "persistent"): """
            128x256x64 16 8 4 0.88 split
            128x256x64 16 8 4 0.87 split tail=2
            128x256x64 16 8 4 0.86 split tail=4
            128x256x64 16 8 3 0.85 split blocks
            128x256x64 16 8 3 0.85 split blocks tail=2
            128x256x64 16 8 3 0.84 split blocks tail=4
            128x128x64  8 8 6 0.74
            128x128x64  8 4 4 0.75
        """,
        ("descriptor", "tile"): """
            128x320x64 8 8 4 0.87 split
            128x256x64 8 8 4 0.77 split splits
            128x192x64 8 8 5 0.86
            128x128x64 8 8 6 0.76 splits
            128x128x64 8 4 3 0.81
            128x128x64 8 4 2 0.70
            128x64x128 8 4 4 0.57
            64x320x64  8 4 4 0.85
            64x256x64  8 4 5 0.86
            64x192x64  8 4 6 0.79
            64x160x64  8 4 7 0.72
            64x128x128 8 4 4 0.71
            64x128x64  8 4 8 0.67 splits
            64x64x64   8 4 2 0.44
            64x64x64   8 4 3 0.53
            64x64x128  8 4 6 0.50 swap
            64x64x128  8 4 5 0.46 swap splits
            64x64x128  8 4 3 0.48 swap
            64x64x64   8 4 6 0.44 swap splits
            32x128x128 8 8 5 0.42 swap
            32x64x256  8 4 4 0.37 swap
            32x64x128  8 4 9 0.37 swap
            32x64x128  8 4 3 0.37 swap splits
            16x128x128 8 4 5 0.37 swap
            16x128x128 8 4 3 0.37 swap
            16x64x256  8 4 4 0.37 swap splits
            16x64x128  8 4 5 0.37 swap
            16x64x128  8 4 3 0.37 swap
        """,
        ("pointer", "persistent"): "128x256x64 16 8 3 0.79 aligned strided",
        ("pointer", "tile"): """
            128x128x64 8 8 3 0.72 aligned strided
            128x128x64 8 4 3 0.76 aligned strided blocks
            64x128x64  8 4 3 0.52 aligned strided
            128x64x64  8 4 3 0.52 aligned strided
            64x64x64   8 4 4 0.40 aligned strided splits
            16x64x128  8 4 3 0.37 aligned strided swap splits
            128x128x64 8 8 2 0.14 strided
            64x64x64   8 4 3 0.11 strided splits
            64x256x32  8 8 3 0.11 strided
            16x64x128  8 4 4 0.10 strided swap splits
        """,
    }
    | any_width_tiles.rows(2),
    "fp8": {
        ("descriptor", "persistent"): """
            128x256x128 16 8 4 0.84 split
            256x128x128 16 8 3 0.79 split
            128x128x128 16 8 4 0.76
        """,
        ("descriptor", "tile"): """
            128x256x128 8 8 4 0.82 split
            128x128x128 8 8 6 0.82
            64x128x128  8 4 6 0.60
            64x64x256   8 4 4 0.45 swap
            64x64x128   8 4 6 0.42 swap splits
            32x64x256   8 4 5 0.42 swap
            16x64x256   8 4 5 0.42 swap splits
        """,
        ("pointer", "tile"): """
            128x128x64 16 8 3 0.42
            64x64x128  16 4 3 0.25
            16x64x128  16 4 3 0.08 apart
        """,
    }
    | any_width_tiles.rows(1),
    "fp8 accurate": {
        ("descriptor", "persistent"): "256x128x128 16 8 3 0.58 split",
        ("descriptor", "tile"): """
            256x128x128 8 8 4 0.64 split
            128x128x128 8 8 6 0.62
            64x128x128  16 4 4 0.58
            64x64x256   8 4 4 0.40 swap
            64x64x128   8 4 6 0.40 swap splits
            32x64x256   8 4 5 0.40 swap
            16x64x256   8 4 5 0.40 swap splits
        """,
        ("pointer", "tile"): """
            64x64x128 16 4 3 0.21
            16x64x128 16 4 3 0.08 apart
        """,
    }
    | any_width_tiles.rows(1, PROMOTED),
    "int8": {
        ("descriptor", "persistent"): """
            128x256x128 16 8 3 0.67 split
            128x128x128 16 8 4 0.62
        """,
        ("descriptor", "tile"): """
            256x128x128 8 8 4 0.72 split
            128x256x128 8 8 4 0.72 split
            64x128x128  8 4 6 0.50
            64x64x256   8 4 4 0.40 swap
            64x64x128   8 4 6 0.38 swap splits
            32x64x256   8 4 5 0.38 swap
            16x64x256   8 4 5 0.38 swap splits
        """,
        ("pointer", "tile"): """
            128x128x64 16 8 3 0.34
            64x64x128  16 4 3 0.21
            16x64x128  16 4 3 0.08
        """,
    },
    "tf32": {
        ("descriptor", "persistent"): """
            128x256x32 16 8 3 0.84 split
            128x128x32 16 8 4 0.74
        """,
        ("descriptor", "tile"): """
            128x256x32 8 8 4 0.86 split
            64x128x32  8 4 8 0.60
            16x64x128  8 4 4 0.40 swap splits
        """,
        ("pointer", "tile"): """
            128x128x32 16 8 3 0.64
            64x64x32   16 4 3 0.29
            16x64x64   16 4 3 0.08 apart
        """,
    },
    "tf32x3": {
        ("descriptor", "persistent"): "128x128x32 16 8 3 0.59",
        ("pointer", "tile"): """
            64x64x32 16 4 3 0.50
            16x64x64 16 4 3 0.08 apart
        """,
    },
    "ieee": {
        ("pointer", "tile"): """
            128x64x16 16 4 3 0.71 aligned
            64x64x32  16 4 3 0.67 aligned
            64x64x16  16 4 3 0.66
            32x32x32  16 4 3 0.25
        """,
    },
    "fp64": {
        ("pointer", "tile"): """
            64x64x16 16 4 3 0.79
            32x32x16 16 4 3 0.34
        """,
    },
}

BLACKWELL: dict[str, Rows] = {
    "half": {
        ("descriptor", "persistent"): """
            128x256x64 16 8 4 1.00 split
            128x128x64 16 4 4 0.85
        """,
        ("descriptor", "tile"): """
            128x128x64 16 4 3 0.80
            128x64x64  16 4 4 0.60
            64x64x64   16 4 4 0.40
        """,
        ("pointer", "tile"): """
            128x128x64 16 8 3 0.70
            64x64x64   16 4 3 0.35
            16x64x64   16 4 3 0.12
        """,
    },
    "fp8": {
        ("descriptor", "persistent"): "128x256x128 16 8 3 1.00 split",
        ("descriptor", "tile"): "128x128x128 16 4 3 0.80",
        ("pointer", "tile"): """
            128x128x64 16 8 3 0.50
            64x64x64   16 4 3 0.30
            16x64x64   16 4 3 0.10
        """,
    },
    "int8": {
        ("pointer", "tile"): """
            128x128x64 16 8 3 0.25
            64x64x64   16 8 3 0.20
            16x64x64   16 4 3 0.10
        """,
    },
    "tf32": {
        ("descriptor", "persistent"): "128x128x32 16 8 4 1.00",
        ("pointer", "tile"): """
            64x64x32 16 4 3 0.40
            16x64x32 16 4 3 0.10
        """,
    },
    "tf32x3": {
        ("pointer", "tile"): """
            64x64x32 16 4 3 0.60
            16x64x32 16 4 3 0.10
        """,
    },
    "ieee": {
        ("pointer", "tile"): """
            128x64x16 16 8 3 0.80
            32x32x32  16 4 3 0.30
        """,
    },
    "fp64": {
        ("pointer", "tile"): """
            64x64x16 16 4 2 0.80
            32x32x16 16 4 3 0.40
        """,
    },
}

AMPERE: dict[str, Rows] = {
    "half": {
        ("pointer", "tile"): """
            128x256x32 8 8 3 1.00 aligned
            128x128x32 8 4 4 0.95 aligned
            128x128x32 8 8 3 0.88
            64x128x32  8 4 4 0.80
            64x64x64   8 4 3 0.60
            16x64x64   8 4 4 0.20
        """,
    },
    "fp8": {
        ("pointer", "tile"): """
            128x128x64 8 8 3 0.90
            64x64x64   8 8 3 0.60
            16x64x64   8 4 3 0.20
        """,
    },
    "int8": {
        ("pointer", "tile"): """
            128x128x64 8 8 3 0.90
            64x64x64   8 8 3 0.60
            16x64x64   8 4 3 0.20
        """,
    },
    "tf32": {
        ("pointer", "tile"): """
            128x128x32 8 8 3 1.00 aligned
            64x64x32   8 8 3 0.60
            16x64x32   8 4 3 0.20
        """,
    },
    "tf32x3": {
        ("pointer", "tile"): """
            64x64x32 8 8 3 0.60
            16x64x32 8 4 3 0.20
        """,
    },
    "ieee": {
        ("pointer", "tile"): """
            128x64x16 8 8 3 0.80
            64x64x16  8 4 2 0.70
            32x32x32  8 4 3 0.30
        """,
    },
    "fp64": {
        ("pointer", "tile"): """
            64x64x16 8 4 3 0.80
            32x32x16 8 4 3 0.40
        """,
    },
}

# The instructions of Ampere, with less shared memory.
ADA: dict[str, Rows] = AMPERE | {
    "half": {
        ("pointer", "tile"): """
            128x128x32 8 4 4 0.95 aligned
            128x128x32 8 8 3 0.88
            64x128x32  8 4 4 0.80
            64x64x64   8 4 3 0.60
            16x64x64   8 4 4 0.20
        """,
    },
}

# sm_120: the instructions of Ada, but its compiler allocates registers differently.
BLACKWELL_RTX: dict[str, Rows] = ADA | {
    "half": {
        ("pointer", "tile"): """
            128x128x32 8 4 4 0.95 aligned
            128x128x32 8 8 3 0.88
            64x64x64   8 4 3 0.60
            16x64x64   8 4 4 0.20
        """,
    },
    "ieee": {
        ("pointer", "tile"): """
            128x64x16 8 8 3 0.80
            64x64x16  8 4 2 0.70
            32x32x16  8 4 3 0.30
        """,
    },
    "fp64": {
        ("pointer", "tile"): """
            64x64x16 8 4 3 0.80
            32x32x16 8 4 3 0.40
        """,
    },
}

CDNA: dict[str, Rows] = {
    "half": {
        ("pointer", "tile"): """
            128x128x32 8 4 2 1.00 aligned
            128x64x32  8 4 2 0.75
            64x64x32   8 4 2 0.60
            16x64x64   8 4 2 0.20
        """,
    },
    "fp8": {
        ("pointer", "tile"): """
            128x128x64 8 8 2 0.90 aligned
            64x64x64   8 4 2 0.60
            16x64x64   8 4 2 0.20
        """,
    },
    "int8": {
        ("pointer", "tile"): """
            128x128x64 8 8 2 0.90 aligned
            64x64x64   8 4 2 0.60
            16x64x64   8 4 2 0.20
        """,
    },
    "ieee": {
        ("pointer", "tile"): """
            64x64x32 8 4 2 0.80
            32x32x32 8 4 2 0.40
        """,
    },
    "fp64": {
        ("pointer", "tile"): """
            64x64x16 8 4 2 0.80
            32x32x16 8 4 2 0.40
        """,
    },
}

RDNA: dict[str, Rows] = {
    "half": {
        ("pointer", "tile"): """
            128x64x32 8 4 2 1.00 aligned
            64x64x32  8 4 2 0.80
            32x32x32  8 2 2 0.40
            16x64x32  8 2 2 0.30
        """,
    },
    "int8": {
        ("pointer", "tile"): """
            64x64x64 8 4 2 0.90
            32x32x64 8 2 2 0.40
        """,
    },
    "ieee": {
        ("pointer", "tile"): """
            32x32x16 8 4 2 0.60
            16x16x16 8 1 2 0.20
        """,
    },
    "fp64": {
        ("pointer", "tile"): """
            32x32x16 8 4 2 0.60
            16x16x16 8 1 2 0.20
        """,
    },
}

# Every path of the kernels, in tiles that are small enough for an interpreter.
INTERPRETER: dict[str, Rows] = {
    kind: {
        ("descriptor", "persistent"): "64x64x64 8 4 3 1.0 split tail=2",
        ("pointer", "tile"): "64x64x64 8 4 3 0.9",
        ("pointer", "persistent"): "32x64x32 8 4 3 0.5",
    }
    for kind in HOPPER
}

#: Families in which all rows for one kind of operand, except for those marked `apart`, give the same bits as long as K
#: is not cut: their instruction sums along K in an order that does not depend on the tile. Measured on an H200, which
#: tests/gpu/test_invariance.py repeats. In the other families, a single row serves all batch-invariant products.
ALIKE = frozenset({"hopper"})

FAMILIES: dict[str, dict[str, Rows]] = {
    family: rows | QUANTIZED[family] | kinds_of(family)
    for family, rows in {
        "hopper": HOPPER,
        "blackwell": BLACKWELL,
        "ampere": AMPERE,
        "ada": ADA,
        "blackwell rtx": BLACKWELL_RTX,
        "cdna": CDNA,
        "rdna": RDNA,
        "interpreter": INTERPRETER,
    }.items()
}
