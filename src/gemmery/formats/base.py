"""Formats: the number for each stored code, and the parameters that a group of codes shares.

A stored number is `(values[code] - zero) * scale` or `values[code] * scale + offset`, in which zero, scale and offset
are shared by a group of neighboring columns of a row; what a whole row, or all, shares besides, multiplies the product
instead.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from . import packing


@dataclass(frozen=True)
class Format:
    """The values of codes with a few bits.

    Attributes:
        name: the name in the API and in `problem.Packing`.
        bits: the number of bits of a code.
        code: the kind of decoder in `kernels.decoders`: "int", "e2m1", "nf4", "e4m3" or "e5m2".
        zero: the code that stands for 0 if there are no zero points.
        about: a description, with its source.
        stored: the code that words contain for each code; () if it is the code itself.
    """

    name: str
    bits: int
    code: str
    zero: int
    about: str
    stored: tuple[int, ...] = ()

    @property
    def order(self) -> packing.Order:
        """The order of two columns' elements in a word, from `ORDERS`."""
        if (self.code, self.bits) not in ORDERS:
            known = ", ".join(f"{code} of {bits}" for code, bits in ORDERS)
            raise ValueError(
                f"Format {self.name!r}: code is {self.code!r} of {self.bits} bits; it must be one of {known}, or get a "
                "line in ORDERS"
            )
        return ORDERS[self.code, self.bits]

    @functools.cached_property
    def values(self) -> Tensor:
        """The value of each code before zero points: float32, of length `2**bits`, on the CPU."""
        codes = torch.arange(1 << self.bits, dtype=torch.uint8)
        if self.code == "int":
            return codes.float()
        if self.code in ("e4m3", "e5m2"):
            return codes.view(torch.float8_e4m3fn if self.code == "e4m3" else torch.float8_e5m2).float()
        if self.code == "e2m1":
            magnitudes = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
            return torch.cat([magnitudes, -magnitudes])
        if self.code == "nf4":
            return torch.tensor(NF4)
        raise ValueError(
            f"Format {self.name!r}: code is {self.code!r}; it must be one of int, e4m3, e5m2, e2m1 and nf4, or get a "
            "branch in Format.values"
        )

    @functools.cached_property
    def stored_values(self) -> Tensor:
        """The value of each code as words contain it."""
        if not self.stored:
            return self.values
        return self.values[torch.tensor(self.stored).argsort()]

    def to_stored(self, codes: Tensor) -> Tensor:
        """The codes as words contain them."""
        if not self.stored:
            return codes
        return torch.tensor(self.stored, dtype=torch.uint8, device=codes.device)[codes.long()]


#: QLoRA's 4-bit NormalFloat (Dettmers et al., 2023, arXiv:2305.14314, appendix E). `kernels.decoders` has it in the
#: order of `NF4_STORED`.
NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip

#: The decoder wants both bytes of a bf16 number to be at least those of the number 8 after it, and at most 127 more;
#: see `kernels.decoders.ptx_of_nf4`.
NF4_STORED = (0, 1, 9, 2, 10, 8, 3, 12, 13, 4, 14, 11, 5, 15, 7, 6)

#: Of four numbers of a column, e2m1's mantissa, exponent (the lower bit first) and sign. The first one has them where
#: bf16 has its highest bit of the mantissa, its lowest two of the exponent, and the sign. The second and the third one
#: lie three and six bits lower. The last one has the bits that are left, so that a product takes them to their places;
#: see `kernels.decoders.ptx_of_e2m1`.
_E2M1_HALF = (6, 7, 8, 15, 3, 4, 5, 12, 0, 1, 2, 9, 13, 14, 10, 11)

#: The order of numbers in words, by `Format.code` and bits, with which the decoder needs the fewest instructions:
#: integers 16 bits apart, where a mask leaves a pair; nf4 in turn, as selectors of prmt; fp8 as the GPU's conversion
#: takes it.
ORDERS: dict[tuple[str, int], packing.Order] = {
    ("int", 4): packing.APART,
    ("int", 8): packing.APART,
    ("e2m1", 4): _E2M1_HALF + tuple(16 + place for place in _E2M1_HALF),
    ("nf4", 4): packing.in_turn(4),
    ("e4m3", 8): packing.in_turn(8),
    ("e5m2", 8): packing.in_turn(8),
}

FORMATS: dict[str, Format] = {
    x.name: x
    for x in (
        Format("int8", 8, "int", 128, "Integers from -128 to 127, stored with 128 added."),
        Format("int4", 4, "int", 8, "Integers from -8 to 7, stored with 8 added; as GPTQ and AWQ have them."),
        Format("e4m3", 8, "e4m3", 0, "fp8 with 4 bits of exponent and NaN, no infinities (OCP FP8, 2023)."),
        Format("e5m2", 8, "e5m2", 0, "fp8 with 5 bits of exponent, infinities and NaN (OCP FP8, 2023)."),
        Format("mxfp4", 4, "e2m1", 0, "e2m1 with a power of two for 32 columns (OCP Microscaling, 2023)."),
        Format("nvfp4", 4, "e2m1", 0, "e2m1 with an e4m3 scale for 16 columns and one of fp32 for all."),
        Format(
            "nf4", 4, "nf4", 7, "Quantiles of a normal distribution (QLoRA, arXiv:2305.14314).", NF4_STORED
        ),
    )
}
