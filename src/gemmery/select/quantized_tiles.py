"""The tiles worth considering for packed weights, and for operands with scales along K, as data; see `tiles`.

Tiles for packed weights swap: the numbers go from registers to the tensor cores' left operand, and the rows of A,
which may be few, lie on the narrow side. If steps of the sum are scaled, there are two accumulators, and a step is as
long as the columns that share a scale. In "mx", numbers are scaled themselves. In both cases, two programs on a
multiprocessor can be better than a larger one: while one of them unpacks or scales, the other multiplies.
"""

from __future__ import annotations

from ..formats.packing import STRIP
from ..kernels.sliced_k_loop import COLUMNS, DEPTH
from . import any_width_tiles

Rows = dict[tuple[str, str], str]

#: Strips of tiles, by the number of warps; see `kernels.sliced_k`. Bundles of four take the least time. Other numbers
#: divide a weight evenly among multiprocessors.
STRIPS = {
    4: (1, 2, 4, 8, 12, 16),
    8: (1, 2, 3, 4, 6, 8, 10, 12, 14, 16, 20, 24, 28),
    16: (1, 2, 3, 6, 9, 10, 14, 18, 22, 26),
}


def _sliced_k() -> str:
    """The rows of tiles whose K is shared by warps."""
    return "\n".join(
        f"{COLUMNS}x{STRIP * each}x{DEPTH} 1 {warps} 3 1.0 swap splits apart"
        for warps, strips in STRIPS.items()
        for each in strips
    )


#: For sparse weights, with `mma` of dense numbers.
_SPARSE_TILES: Rows = {
    ("descriptor", "tile"): """
        16x64x128   1 4 4 0.08 swap splits
        32x64x128   1 4 4 0.15 swap splits
        64x64x128   1 4 4 0.25 swap splits
        128x64x64   2 4 4 0.27 swap splits
        128x128x64  2 8 3 0.38 swap
    """,
    ("pointer", "tile"): """
        64x64x64   8 4 3 0.10 swap strided splits
        16x64x64   8 4 3 0.05 swap strided splits
    """,
}
#: The same for fp8 activations.
_SPARSE_FP8: Rows = {
    ("descriptor", "tile"): """
        16x64x128   1 4 4 0.08 swap splits
        64x64x128   1 4 4 0.25 swap splits
        128x64x128  2 4 3 0.27 swap splits
        128x128x128 2 8 3 0.38 swap
    """,
    ("pointer", "tile"): """
        64x64x128  8 4 3 0.10 swap strided splits
        16x64x128  8 4 3 0.05 swap strided splits
    """,
}

#: For sparse weights by `mma.sp`, see `kernels.sliced_sparse`. More rows with fewer columns take too many registers.
_MMA_SP: Rows = {
    ("pointer", "sliced_sparse"): """
        8x32x512   1 4 2 0.60 swap splits apart
        8x32x1024  1 8 2 0.60 swap splits apart
        8x64x256   1 4 2 0.60 swap splits apart
        8x64x512   1 8 2 0.60 swap splits apart
        8x128x128  1 4 2 0.60 swap splits apart
        16x32x512  1 4 2 0.60 swap splits apart
        16x32x1024 1 8 2 0.60 swap splits apart
        16x64x256  1 4 2 0.60 swap splits apart
        16x64x512  1 8 2 0.60 swap splits apart
        32x64x256  1 4 2 0.60 swap splits apart
        32x64x512  1 8 2 0.60 swap splits apart
        32x128x128 1 4 2 0.60 swap splits apart
        64x128x128 1 4 2 0.60 swap splits apart
        64x128x256 1 8 2 0.60 swap splits apart
    """,
}

#: The same for Hopper, where `wgmma.sp` is faster for more rows.
_MMA_SP_HOPPER: Rows = {
    ("pointer", "sliced_sparse"): """
        8x32x512   1 4 2 0.60 swap splits apart
        8x32x512   1 4 4 0.60 swap splits apart
    """,
}

HOPPER: dict[str, Rows] = {
    "packed4": {
        ("descriptor", "tile"): """
            16x64x256   1 4 3 0.40 swap splits
            16x64x256   1 4 4 0.40 swap splits
            16x64x128   1 4 6 0.40 swap splits
            16x128x256  1 4 3 0.40 swap splits
            32x64x256   1 4 3 0.40 swap splits
            64x64x256   1 4 3 0.50 swap splits
            64x64x128   1 4 4 0.45 swap splits
            64x128x128  1 4 4 0.50 swap splits
            128x64x256  1 4 3 0.70 swap splits
            128x64x128  2 4 3 0.65 swap splits
            128x128x256 1 8 3 0.60 swap splits
            128x128x64  2 4 3 0.75 swap
            256x64x128  2 4 3 0.80 swap
            256x64x64   2 4 3 0.80 swap
            256x128x128 1 8 3 0.82 swap splits
            256x128x64  1 8 3 0.85 swap
        """,
        ("descriptor", "specialized"): """
            256x128x64  4 8 5 0.90 swap splits apart
            256x128x128 1 8 2 0.90 swap splits apart
            128x128x128 1 8 4 0.75 swap splits apart
            64x128x256  1 8 3 0.50 swap splits stream apart
            32x128x256  1 8 4 0.40 swap splits stream apart
            16x128x256  1 8 4 0.40 swap splits stream apart
            64x64x128   1 8 8 0.50 swap splits stream apart
            32x64x256   1 8 8 0.40 swap splits stream apart
            16x64x256   1 8 8 0.40 swap splits stream apart
        """,
        ("pointer", "sliced_k"): _sliced_k(),
        ("pointer", "tile"): """
            128x64x64  8 4 3 0.30 swap aligned strided
            64x64x64   8 4 3 0.20 swap strided splits
            16x64x128  8 4 3 0.20 swap strided splits
        """,
    }
    | any_width_tiles.staged_rows(any_width_tiles.packed(4), any_width_tiles.PACKED_LONG),
    "packed8": {
        ("descriptor", "tile"): """
            16x64x256   1 4 3 0.40 swap splits
            16x64x128   1 4 6 0.40 swap splits
            16x64x128   1 4 4 0.40 swap splits
            16x128x128  1 4 4 0.40 swap splits
            32x64x256   1 4 3 0.40 swap splits
            32x64x128   1 4 4 0.40 swap splits
            64x64x256   1 4 3 0.50 swap splits
            64x64x128   1 4 4 0.45 swap splits
            64x128x128  1 4 3 0.50 swap splits
            128x64x128  1 4 4 0.65 swap splits
            128x128x128 1 8 3 0.60 swap splits
            128x128x64  2 4 3 0.75 swap
            256x64x64   2 4 4 0.80 swap splits
            256x64x64   2 4 3 0.80 swap
            256x128x64  1 8 4 0.80 swap splits
            256x128x64  1 8 3 0.85 swap
        """,
        ("descriptor", "specialized"): """
            256x128x64  2 8 4 0.90 swap splits apart
            128x128x128 1 8 3 0.75 swap splits apart
            64x128x128  1 8 5 0.50 swap splits stream apart
            32x128x128  1 8 6 0.40 swap splits stream apart
            16x128x128  1 8 7 0.40 swap splits stream apart
            64x64x128   1 8 8 0.50 swap splits stream apart
            32x64x128   1 8 10 0.40 swap splits stream apart
            16x64x256   1 8 8 0.40 swap splits stream apart
        """,
        ("pointer", "tile"): """
            128x64x64  8 4 3 0.30 swap aligned strided
            64x64x64   8 4 3 0.20 swap strided splits
            16x64x128  8 4 3 0.20 swap strided splits
        """,
    }
    | any_width_tiles.staged_rows(any_width_tiles.packed(8)),
    "sparse": _SPARSE_TILES | any_width_tiles.staged_rows(any_width_tiles.SPARSE) | _MMA_SP_HOPPER,
    "sparse4": _SPARSE_TILES,
    "sparse8": _SPARSE_TILES | any_width_tiles.staged_rows(any_width_tiles.SPARSE8),
    "sparse fp8": _SPARSE_FP8 | any_width_tiles.staged_rows(any_width_tiles.SPARSE_FP8),
    "sparse fp8 accurate": _SPARSE_FP8 | any_width_tiles.staged_rows(any_width_tiles.SPARSE_FP8_ACCURATE),
    "scaled": {
        ("descriptor", "tile"): """
            128x128x128 16 8 3 0.56 split splits
            128x128x128 16 8 4 0.50
            64x128x128  8 4 4 0.36 splits
            64x64x128   8 4 4 0.33 splits
            64x64x128   8 4 4 0.30 swap splits
            32x64x128   8 4 5 0.28 swap splits
            16x64x128   8 4 6 0.35 swap splits
        """,
        ("pointer", "tile"): """
            64x64x128 16 4 3 0.21
            16x64x128 16 4 3 0.08 swap splits
        """,
    }
    | any_width_tiles.scaled_rows(),
    "scaled32": {
        ("descriptor", "tile"): """
            128x128x32 16 8 6 0.40 split splits
            64x128x32  8 4 6 0.30 splits
            64x64x32   8 4 8 0.25 swap splits
            16x64x32   8 4 8 0.15 swap splits
        """,
        ("pointer", "tile"): """
            64x64x32 16 4 4 0.15
            16x64x32 16 4 4 0.05 swap splits
        """,
    },
    "mx": {
        ("descriptor", "tile"): """
            128x256x64 8 8 3 0.15
            128x128x128 8 8 3 0.13
            128x128x64 8 8 4 0.10 splits
            64x128x64  8 4 4 0.11 splits
            64x64x128  8 4 4 0.10 splits
            64x64x128  8 4 4 0.11 swap splits
            32x64x128  8 4 4 0.09 swap splits
            16x64x256  8 4 3 0.10 swap splits
            16x64x128  8 4 5 0.10 swap splits
        """,
        ("pointer", "tile"): """
            64x64x64  16 4 3 0.10
            16x64x128 16 4 3 0.05 swap splits
        """,
    },
}

_SCALED: Rows = {
    ("pointer", "tile"): """
        64x64x128 8 4 2 0.60
        16x64x128 8 4 2 0.20 splits
    """,
}
_SCALED32: Rows = {
    ("pointer", "tile"): """
        64x64x32 8 4 3 0.30
        16x64x32 8 4 2 0.10 splits
    """,
}

_MX: Rows = {
    ("pointer", "tile"): """
        64x64x64 8 8 2 0.40
        64x64x32 8 4 2 0.30
        16x64x32 8 4 2 0.10 splits
    """,
}

_BLACKWELL: Rows = {
    ("descriptor", "tile"): """
        128x128x64 8 4 3 0.60 swap
        64x128x64  8 4 4 0.40 swap splits
        16x128x128 8 4 4 0.20 swap splits
    """,
    ("pointer", "tile"): """
        64x64x64  8 4 3 0.30 swap
        16x64x128 8 4 3 0.15 swap splits
    """,
}
_AMPERE: Rows = {
    ("pointer", "tile"): """
        128x64x64 8 4 3 0.70 swap aligned
        64x64x64  8 4 3 0.60 swap splits
        16x64x128 8 4 3 0.20 swap splits
    """,
}
_AMD: Rows = {
    ("pointer", "tile"): """
        64x64x64  8 4 2 0.60 swap splits
        16x64x64  8 4 2 0.20 swap splits
    """,
}
#: For sparse weights, tiles that do not spill: smaller ones if K is cut.
_BLACKWELL_SPARSE: Rows = {
    ("descriptor", "tile"): """
        128x128x64 8 4 3 0.60 swap
        64x128x64  8 4 4 0.40 swap splits
        16x128x128 8 8 4 0.20 swap splits
    """,
    ("pointer", "tile"): _BLACKWELL["pointer", "tile"],
}
_AMD_SPARSE: Rows = {
    ("pointer", "tile"): """
        64x64x64  8 4 2 0.60 swap aligned
        32x32x64  8 4 2 0.30 swap splits
        16x64x64  8 4 2 0.20 swap
        16x64x32  8 4 2 0.20 swap splits
    """,
}
_SPARSE = {"blackwell": _BLACKWELL_SPARSE, "cdna": _AMD_SPARSE, "rdna": _AMD_SPARSE}
#: Families that have `mma.sp`.
_HAVE_MMA_SP = ("ampere", "ada", "blackwell rtx")
_INTERPRETER: Rows = {
    ("descriptor", "tile"): "32x64x64 8 4 3 1.0 swap splits",
    ("pointer", "tile"): """
        32x64x64  8 4 3 0.9 swap splits
        16x32x128 8 4 3 0.5 swap
    """,
}

#: By family, and then by kind.
QUANTIZED: dict[str, dict[str, Rows]] = {
    "hopper": HOPPER,
    **{
        family: dict.fromkeys(("packed4", "packed8"), rows)
        | dict.fromkeys(("sparse", "sparse8", "sparse4", "sparse fp8"), _SPARSE.get(family, rows))
        | ({"sparse": rows | _MMA_SP} if family in _HAVE_MMA_SP else {})
        | {"scaled": _SCALED, "scaled32": _SCALED32, "mx": _MX}
        for family, rows in {
            "blackwell": _BLACKWELL,
            "ampere": _AMPERE,
            "ada": _AMPERE,
            "blackwell rtx": _AMPERE,
            "cdna": _AMD,
            "rdna": _AMD,
            "interpreter": _INTERPRETER,
        }.items()
    },
}
