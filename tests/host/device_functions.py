"""Device functions of numbers, run in Python."""

import types

from gemmery.kernels import order, place


def device_functions():
    """Returns the device's functions of numbers, which run in Python with 32-bit arithmetic."""

    def signed(x):
        return (x + (1 << 31)) % (1 << 32) - (1 << 31)

    tl = types.SimpleNamespace(
        minimum=min, maximum=max, where=lambda condition, x, y: x if condition else y, int32=32,
        cast=lambda x, bits: signed(x), umulhi=lambda x, y: signed((x % (1 << 32)) * (y % (1 << 32)) >> 32),
    )  # fmt: skip
    names = {"tl": tl, "min": min}
    own = (
        place.sized_tile, place.sized_part, place.sized_part_of_cluster, place.sized_tile_of_batch, place.counted_part,
    )  # fmt: skip
    for function in (order.quotient, order.divided, order.part_of, *own):
        names[function.fn.__name__] = types.FunctionType(function.fn.__code__, names)
    return names
