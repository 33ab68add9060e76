"""The tiles worth considering, as data: for every family of GPUs and every kind of operand, one row a config.

A row reads `MxNxK group_m num_warps num_stages efficiency` and then, where they apply, `split`, `tail=n` and `aligned`
(see `Config` and `space.Tile`). The efficiency is the part of the device's achievable rate that the tile's main loop
reaches once it is running: measured for Hopper on an H200, estimated elsewhere. Every row compiles without spills on
every architecture of its family, which `make check-targets` proves; another Triton allocates registers otherwise, so a
plan asks again.
"""

from __future__ import annotations

Rows = dict[tuple[str, str], str]

HOPPER: dict[str, Rows] = {
    "half": {
        ("descriptor", "persistent"): """
            128x256x64 16 8 4 1.00 split
            128x256x64 16 8 4 1.00 split tail=2
            128x256x64 16 8 4 1.00 split tail=4
            128x256x64 16 8 4 1.00 split tail=8
            128x256x64 16 8 3 0.98 split
            128x256x64 16 8 3 0.98
            128x128x64 16 8 4 0.90
        """,
        ("descriptor", "tile"): """
            128x128x64 16 4 3 0.87
            64x256x64  16 4 5 0.90
            64x128x128 16 4 4 0.78
            128x64x64  16 4 4 0.62
            64x64x128  16 4 4 0.50
            64x64x64   16 4 3 0.40
        """,
        ("pointer", "persistent"): "128x256x64 16 8 3 0.94 aligned",
        ("pointer", "tile"): """
            128x128x64 16 8 3 0.86
            64x128x64  16 4 3 0.62 aligned
            128x64x64  16 4 3 0.62
            64x64x64   16 4 3 0.40
            16x64x128  16 4 4 0.12
        """,
    },
    "fp8": {
        ("descriptor", "persistent"): """
            128x256x128 16 8 4 1.00 split
            256x128x128 16 8 3 0.94 split
            128x128x128 16 8 4 0.90
        """,
        ("descriptor", "tile"): """
            128x128x128 16 4 3 0.92
            64x128x128  16 4 4 0.72
            64x64x128   16 4 4 0.45
        """,
        ("pointer", "tile"): """
            128x128x64 16 8 3 0.50
            64x64x128  16 4 3 0.30
            16x64x128  16 4 3 0.10
        """,
    },
    "fp8 accurate": {
        ("descriptor", "persistent"): "256x128x128 16 8 3 0.80 split",
        ("descriptor", "tile"): """
            128x128x128 16 4 3 0.79
            64x128x128  16 4 4 0.68
            64x64x128   16 4 4 0.40
        """,
        ("pointer", "tile"): """
            64x64x128 16 4 3 0.25
            16x64x128 16 4 3 0.10
        """,
    },
    "int8": {
        ("descriptor", "persistent"): """
            128x256x128 16 8 3 0.80 split
            128x128x128 16 8 4 0.70
        """,
        ("descriptor", "tile"): """
            64x128x128 16 4 4 0.53
            64x64x128  16 4 4 0.35
        """,
        ("pointer", "tile"): """
            128x128x64 16 8 3 0.40
            64x64x128  16 4 3 0.25
            16x64x128  16 4 3 0.10
        """,
    },
    "tf32": {
        ("descriptor", "persistent"): """
            128x256x32 16 8 3 1.00 split
            128x128x32 16 8 4 0.88
        """,
        ("descriptor", "tile"): "64x64x64 16 4 3 0.50",
        ("pointer", "tile"): """
            128x128x32 16 8 3 0.76
            64x64x32   16 4 3 0.35
            16x64x64   16 4 3 0.10
        """,
    },
    "tf32x3": {
        ("descriptor", "persistent"): "128x128x32 16 8 3 0.70",
        ("pointer", "tile"): """
            64x64x32 16 4 3 0.60
            16x64x64 16 4 3 0.10
        """,
    },
    "ieee": {
        ("pointer", "tile"): """
            128x64x16 16 4 3 0.84 aligned
            64x64x32  16 4 3 0.80
            32x32x32  16 4 3 0.30
        """,
    },
    "fp64": {
        ("pointer", "tile"): """
            64x64x16 16 4 3 0.94
            32x32x16 16 4 3 0.40
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
            32x32x32 16 4 3 0.40
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
            64x64x16 8 4 2 0.80
            32x32x16 8 4 3 0.40
        """,
    },
}

# The same instructions as Ampere's with less shared memory.
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

# sm_120: Ada's instructions again, but its compiler finds other registers.
BLACKWELL_RTX: dict[str, Rows] = ADA | {
    "half": {
        ("pointer", "tile"): """
            128x128x32 8 4 4 0.95 aligned
            128x128x32 8 8 3 0.88
            64x64x64   8 4 3 0.60
            16x64x64   8 4 4 0.20
        """,
    },
    "fp64": {
        ("pointer", "tile"): """
            64x64x16 8 4 2 0.80
            32x32x32 8 8 2 0.40
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

# Every path that a kernel can take, in tiles that an interpreter gets through.
INTERPRETER: dict[str, Rows] = {
    kind: {
        ("descriptor", "persistent"): "64x64x64 8 4 3 1.0 split tail=2",
        ("pointer", "tile"): "64x64x64 8 4 3 0.9",
        ("pointer", "persistent"): "32x64x32 8 4 3 0.5",
    }
    for kind in HOPPER
}

FAMILIES: dict[str, dict[str, Rows]] = {
    "hopper": HOPPER,
    "blackwell": BLACKWELL,
    "ampere": AMPERE,
    "ada": ADA,
    "blackwell rtx": BLACKWELL_RTX,
    "cdna": CDNA,
    "rdna": RDNA,
    "interpreter": INTERPRETER,
}
