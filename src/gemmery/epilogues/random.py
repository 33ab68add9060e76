"""Random numbers that depend only on a seed and a position: the same on every device.

`torch.ops.gemmery.uniform` means the same as `kernels.fused.uniform`, to the bit: Philox 4x32-10, Salmon et al.,
"Parallel random numbers: as easy as 1, 2, 3" (SC 2011), whose key is the seed and whose counter is an element's number.
"""

from __future__ import annotations

import torch
from torch import Tensor

_LIBRARY = torch.library.Library("gemmery", "FRAGMENT")
_LIBRARY.define("uniform(Tensor like, Tensor seed) -> Tensor", tags=torch.Tag.pt2_compliant_tag)

_LOW = 0xFFFFFFFF
#: The number of elements that are computed at once, to limit memory.
_PIECE = 1 << 24


def _times(x: Tensor, factor: int) -> tuple[Tensor, Tensor]:
    """The upper and the lower 32 bits of a product of two numbers of 32 bits, by halves so that no int64 overflows."""
    left, right = x * (factor >> 16), x * (factor & 0xFFFF)
    return (left + (right >> 16)) >> 16, (((left & 0xFFFF) << 16) + right) & _LOW


def philox(counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
    """Philox 4x32-10: four numbers of 32 bits from a counter and a key, all of them int64 tensors that broadcast."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        upper0, lower0 = _times(c0, 0xD2511F53)
        upper2, lower2 = _times(c2, 0xCD9E8D57)
        c0, c1, c2, c3 = upper2 ^ c1 ^ k0, lower2, upper0 ^ c3 ^ k1, lower0
        k0, k1 = (k0 + 0x9E3779B9) & _LOW, (k1 + 0xBB67AE85) & _LOW
    return c0, c1, c2, c3


def _uniform(like: Tensor, seed: Tensor) -> Tensor:
    out = like.new_empty(like.shape, dtype=torch.float32)
    flat = out.view(-1)
    seed = seed.to(device=like.device, dtype=torch.int64)
    key = (seed & _LOW, (seed >> 32) & _LOW)
    for first in range(0, flat.numel(), _PIECE):
        last = min(first + _PIECE, flat.numel())
        numbers = torch.arange(first, last, device=like.device, dtype=torch.int64)
        zero = torch.zeros((), device=like.device, dtype=torch.int64)
        bits = philox((numbers & _LOW, numbers >> 32, zero, zero), key)[0]
        # The upper 24 bits fill a single-precision number exactly.
        flat[first:last] = (bits >> 8).to(torch.float32) * 2.0**-24
    return out


def _uniform_fake(like: Tensor, seed: Tensor) -> Tensor:
    return like.new_empty(like.shape, dtype=torch.float32)


for _key in ("CPU", "CUDA"):
    _LIBRARY.impl("uniform", _uniform, _key)
torch.library.register_fake("gemmery::uniform", _uniform_fake, lib=_LIBRARY)


def uniform(like: Tensor, seed: int | Tensor) -> Tensor:
    """Numbers in [0, 1) of a tensor's shape, in float32; the i-th, row by row, depends on the seed and on i alone.

    Args:
        seed: 64 bits, as a Python integer or an int64 tensor of shape ().
    """
    if not isinstance(seed, Tensor):
        if isinstance(seed, bool) or not isinstance(seed, int):
            raise TypeError(
                f"seed is a {type(seed).__name__}; it must be an integer or an int64 tensor without dimensions"
            )
        # Above 2^63 as a negative number of the same bits.
        seed = (seed + (1 << 63)) % (1 << 64) - (1 << 63)
        seed = torch.full((), seed, dtype=torch.int64, device=like.device)
    elif seed.dim() or seed.dtype != torch.int64:
        raise TypeError(
            f"seed is {seed.dtype} of shape {tuple(seed.shape)}; it must be int64 without dimensions"
        )
    # Without a gradient, since steps have none.
    drawn: Tensor = torch.ops.gemmery.uniform(like.detach(), seed)
    return drawn
