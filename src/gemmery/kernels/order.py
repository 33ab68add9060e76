"""Tile orders: from a running tile number to the batch and the tile's place in the output.

An order has the signature `order(tile, tiles_m, tiles_n, band_m) -> (batch, tile_m, tile_n)` and visits every
tile of a matrix before it goes on to the next matrix of the batch.
"""

import triton
import triton.language as tl


@triton.jit
def grouped(tile, tiles_m, tiles_n, band_m):
    """Column by column within tile bands, so that tiles in flight share blocks of A and B in L2.

    A band is `band_m` tiles high, but the last one may be lower; `band_m=1` is plain row-major order. Triton's matmul
    tutorial and CUTLASS, which calls it threadblock swizzling, have the same order.
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


@triton.jit
def quotient(x, divisor):
    """Returns `x // d` for 0 <= x < 2^30, by a multiplication. A division would delay a launch's first load.

    The method is that of Granlund and Montgomery, Division by invariant integers using multiplication (PLDI 1994).

    Args:
        divisor: `schedules.walk.divisor(d)`.
    """
    return tl.umulhi(2 * x, tl.cast(divisor, tl.int32)) >> tl.cast(divisor >> 32, tl.int32)


@triton.jit
def divided(tile, tiles_m, tiles_n, band_m, divisors):
    """Returns what `banded` returns, without divisions.

    Args:
        divisors: those of a band's tiles, of `band_m` and of the last band's height, and maybe others.
    """
    first_m = quotient(tile, divisors[0]) * band_m
    within = tile - first_m * tiles_n
    left = tiles_m - first_m
    tile_n = quotient(within, tl.where(left < band_m, divisors[2], divisors[1]))
    return first_m + within - tile_n * tl.minimum(left, band_m), tile_n


@triton.jit
def part_of(unit, tiles, divisor):
    """Returns a unit's part and its cut tile. Units are the first part of every tile, then the second, and so on.

    Programs that start together then load the same blocks.

    Args:
        unit: its number after the whole tiles.
        tiles, divisor: how many tiles are cut, and the divisor of this number.
    """
    part = quotient(unit, divisor)
    return part, unit - part * tiles
