"""Tile orders: from a running tile number to the batch and the tile's place in the output.

An order has the signature `order(tile, tiles_m, tiles_n, band_m) -> (batch, tile_m, tile_n)` and visits every
tile of a matrix before it goes on to the next matrix of the batch.
"""

import triton
import triton.language as tl  # noqa: F401  The interpreter wants it here.


@triton.jit
def grouped(tile, tiles_m, tiles_n, band_m):
    """Column by column within tile bands, so that tiles in flight share blocks of A and B in L2.

    A band is `band_m` tiles high, the last one perhaps less; `band_m=1` is plain row-major order. The scheme is the one
    of Triton's matmul tutorial and, under the name of threadblock swizzling, of CUTLASS.
    """
    batch = tile // (tiles_m * tiles_n)
    tile_m, tile_n = banded(tile % (tiles_m * tiles_n), tiles_m, tiles_n, band_m)
    return batch, tile_m, tile_n


@triton.jit
def banded(tile, tiles_m, tiles_n, band_m):
    """The same within one matrix: the tile's place in it."""
    band = tile // (band_m * tiles_n)
    first_m = band * band_m
    band_rows = min(tiles_m - first_m, band_m)
    within = tile - first_m * tiles_n
    return first_m + within % band_rows, within // band_rows
