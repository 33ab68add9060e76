"""Tensors of small numbers with their scales: of the whole tensor, of each row, or of blocks of 128 or 32 columns."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

Kind = Literal["tensor", "row", "1x128", "128x128", "1x32"]
#: The supported types of numbers.
DTYPES = (torch.int8, torch.float8_e4m3fn, torch.float8_e5m2)
#: Columns, and for weights rows, that share a scale in the kinds with blocks; columns in the MX formats.
BLOCK, MX_BLOCK = 128, 32
#: The type of the MX formats' scales: the exponent of a power of two.
E8M0 = torch.float8_e8m0fnu


@dataclass(frozen=True, eq=False, repr=False)
class ScaledTensor:
    """A matrix of 8-bit elements, or a batch of matrices, with the value `data * scale`.

    The kinds are those of `torch._scaled_mm` and of DeepSeek-V3 (arXiv:2412.19437, section 3.3.2), whose activations
    have a scale per 1 x 128 elements and whose weights have one per 128 x 128. fp8 with a power of two per 1 x 32 is
    MXFP8 (OCP Microscaling Formats, specification 1.0).

    Args:
        data: (..., R, K) in int8, float8_e4m3fn or float8_e5m2, any strides.
        scale: float32 on data's device, or float8_e8m0fnu, any strides. Its shape determines what shares a scale:

            - `()` or `(1,)`: "tensor", the whole tensor
            - `(..., R, 1)`: "row", a row: a token, or an output channel
            - `(..., R, ceil(K / 128))`: "1x128", 128 columns of a row
            - `(..., ceil(R / 128), ceil(K / 128))`: "128x128", a block
            - `(..., R, ceil(K / 32))`: "1x32", 32 columns of a row of fp8, in float8_e8m0fnu

            If a shape matches several kinds, they have the same meaning, and the kind is the first one in this list.

    Attributes:
        kind: "tensor", "row", "1x128", "128x128" or "1x32".

    Raises:
        TypeError: data or scale is not a tensor, or does not have one of these types.
        ValueError: the scale fits no kind, or is on another device.

    Example:
        >>> import torch, gemmery
        >>> data = torch.tensor([[1, 2], [3, 4]], dtype=torch.int8)
        >>> x = gemmery.ScaledTensor(data, torch.tensor([[0.5], [2.0]]))
        >>> x
        ScaledTensor((2, 2), torch.int8, kind='row', device='cpu')
        >>> x.dequantize()
        tensor([[0.5000, 1.0000],
                [6.0000, 8.0000]])
    """

    data: Tensor
    scale: Tensor
    kind: Kind = field(init=False)

    def __post_init__(self) -> None:
        """Check what was given, and find the kind."""
        _check(self.data, self.scale)
        # The class is frozen for its users.
        object.__setattr__(self, "kind", _kind(self.data, self.scale))

    @property
    def shape(self) -> torch.Size:
        """The shape of the data, (..., R, K)."""
        return self.data.shape

    @property
    def dtype(self) -> torch.dtype:
        """The type of the data."""
        return self.data.dtype

    @property
    def device(self) -> torch.device:
        """The device of data and scale."""
        return self.data.device

    @property
    def stored_scale(self) -> Tensor:
        """The scale as kernels receive it: as bytes, because Triton has no type for exponents."""
        return self.scale.view(torch.uint8) if self.scale.dtype == E8M0 else self.scale

    @property
    def row_factors(self) -> Tensor:
        """The scale as a factor of a product with these rows: () or (..., R, 1); not for blocks."""
        return self.scale.reshape(()) if self.kind == "tensor" else self.scale

    @property
    def column_factors(self) -> Tensor:
        """The scale as a factor of a product with these columns: () or (..., R); not for blocks."""
        return self.scale.reshape(()) if self.kind == "tensor" else self.scale.squeeze(-1)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The data times the scales, (..., R, K), multiplied in float32 (float64 for that type) and rounded once.

        Example:
            >>> import torch, gemmery
            >>> gemmery.ScaledTensor(torch.ones(1, 2, dtype=torch.int8), torch.tensor(3.0)).dequantize(torch.float16)
            tensor([[3., 3.]], dtype=torch.float16)
        """
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        # torch lacks some conversions from fp8, but has that to float32.
        return (self.data.to(torch.float32).to(wide) * self._spread().to(wide)).to(dtype)

    def _spread(self) -> Tensor:
        """The scale in a shape that broadcasts to the numbers."""
        if self.kind in ("tensor", "row"):
            return self.row_factors
        R, K = self.shape[-2:]
        across = MX_BLOCK if self.kind == "1x32" else BLOCK
        spread = self.scale.to(torch.float32).repeat_interleave(across, -1)[..., :K]
        return spread.repeat_interleave(BLOCK, -2)[..., :R, :] if self.kind == "128x128" else spread

    def to(self, device: torch.device | str | int, *, non_blocking: bool = False) -> ScaledTensor:
        """The same tensor on another device.

        Raises:
            TypeError: the argument is a type; use `dequantize` for values in another type.
        """
        if isinstance(device, torch.dtype):
            raise TypeError(f"ScaledTensor.to: given {device}; it takes a device. For a type, use dequantize")
        data = self.data.to(device, non_blocking=non_blocking)
        return ScaledTensor(data, self.scale.to(device, non_blocking=non_blocking))

    def __reduce__(self) -> tuple[Any, ...]:
        return ScaledTensor, (self.data, self.scale)

    def __repr__(self) -> str:
        return f"ScaledTensor({tuple(self.shape)}, {self.dtype}, kind={self.kind!r}, device={str(self.device)!r})"


# By default, torch.load only calls the constructor, which checks its arguments.
torch.serialization.add_safe_globals([ScaledTensor])


def _check(data: Any, scale: Any) -> None:
    for name, value in (("data", data), ("scale", scale)):
        if not isinstance(value, Tensor):
            raise TypeError(f"ScaledTensor: {name} is a {type(value).__name__}; it must be a torch.Tensor")
        if value.layout != torch.strided:
            raise TypeError(f"ScaledTensor: {name} is sparse ({value.layout}); it must be a strided tensor")
    if data.dtype not in DTYPES:
        names = ", ".join(map(str, DTYPES))
        raise TypeError(f"ScaledTensor: data is {data.dtype}; it must be one of {names}")
    if scale.dtype not in (torch.float32, E8M0):
        raise TypeError(f"ScaledTensor: scale is {scale.dtype}; it must be torch.float32 or {E8M0}")
    if scale.dtype == E8M0 and data.dtype == torch.int8:
        raise TypeError(f"ScaledTensor: data is {data.dtype} and scale {E8M0}; such scales are for fp8")
    if data.dim() < 2:
        raise ValueError(f"ScaledTensor: data is {tuple(data.shape)}; it must be (..., R, K)")
    if data.device != scale.device:
        raise ValueError(
            f"ScaledTensor: data is on {data.device} and scale on {scale.device}; they must be on the same device"
        )


def _kind(data: Tensor, scale: Tensor) -> Kind:
    """The elements that share a scale; ValueError if the shapes fit no kind."""
    *lead, R, K = data.shape
    given = tuple(scale.shape)
    if scale.dtype == E8M0:
        wanted = (*lead, R, -(-K // MX_BLOCK))
        if given != wanted:
            raise ValueError(
                f"ScaledTensor: data is {tuple(data.shape)} and scale is {given} in {E8M0}; it must be {wanted}"
            )
        return "1x32"
    if given in ((), (1,)):
        return "tensor"
    if given == (*lead, R, 1):
        return "row"
    if given == (*lead, R, -(-K // BLOCK)):
        return "1x128"
    if given == (*lead, -(-R // BLOCK), -(-K // BLOCK)):
        return "128x128"
    rows = (R, -(-R // BLOCK))
    shapes = [(), (1,), (*lead, R, 1), *[(*lead, count, -(-K // BLOCK)) for count in rows]]
    listed = " or ".join(dict.fromkeys(map(str, shapes)))
    raise ValueError(f"ScaledTensor: data is {tuple(data.shape)} and scale is {given}; it must be {listed}")
