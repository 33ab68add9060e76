"""A weight whose elements have a few bits each, as a tensor that modules and checkpoints can hold."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from . import aten, decode, packing, pieces
from .base import FORMATS, Format
from .weight import DTYPES, Inner, PackedWeight, check_texts, dtype_of_text, number_of_text, shape_of_text

#: The tensors that a QuantizedTensor consists of, in the order in which they are stored.
INNER = ("words", "scales", "zeros", "offsets", "channel", "permutation")
#: Those that have numbers for groups of columns.
GROUPED = ("scales", "zeros", "offsets")
#: The least number of columns with one scale.
SMALLEST_GROUP = 16
#: Scales in bfloat16 of these codes, without zeros or offsets, are below this: kernels multiply them by powers of two,
#: see `kernels.decoders.UNIT`.
LIMITED_CODES, LARGEST_SCALE = ("int", "e2m1"), 2.0**35


class QuantizedTensor(PackedWeight):
    """A weight (*batch, N, K) in one of `gemmery.formats.FORMATS`, for activations of type `dtype`.

    Element (n, k) of the packed matrix, with the code `c`, has a value of type `dtype`, T below:

        v = T(format.values[c])        rounded to T
        v = v - zero                   in T; exact for integers, whose zero is `format.zero` without `zeros`
        v = T(v * scale)               in T, or in float32 and then rounded to T if scales are float32
        v = T(v * scale + offset)      instead, with offsets: rounded once

    A kernel multiplies these values and accumulates in float32. If there is a `channel`, the sum is then multiplied by
    `channel[n]`, also in float32. `dequantize` returns exactly these values. Zeros and offsets require scales, and
    exclude each other. To replace zeros by offsets, subtract zero * scale from the offsets, or for integers (zero -
    `format.zero`) * scale.

    `quantize`, `from_codes` and the checkpoint readers create such weights. A weight can be moved between devices and
    cast between float16 and bfloat16, can be a parameter without a gradient, copied, pickled, saved, indexed along its
    batch, and sliced at multiples of 16 rows (which copies). `torch.cat` concatenates slices. Only `copy_` from another
    weight of the same layout writes to it. `F.linear(x, weight, bias)` calls `gemmery.linear`.

    Args:
        shape: (*batch, N, K).
        format: one of `FORMATS`, or its name.
        words: int32, (*batch, strips, lines, 32), contiguous, from `packing.pack` in the format's order.
        dtype: torch.float16 or torch.bfloat16.
        group_size: the number of columns that share a scale, and a zero or an offset, a power of two of at least 16; 0
            if there are no scales.
        scales: (*batch, ceil(K / group_size), Np), contiguous, where Np is N rounded up to 16, and the padding is 0; of
            type `dtype` or, without offsets, float32. In bfloat16 and without zeros or offsets, scales of integers and
            e2m1 must be below 2^35, which `from_codes` checks; values are not checked here.
        zeros: like scales, of type `dtype`; subtracted before scaling.
        offsets: like zeros, and in their place; added after scaling.
        channel: float32, (*batch, N) or (1,).
        permutation: int64, (K,): column k of the packed matrix is column `permutation[k]` of the weight.

    Raises:
        ValueError, TypeError: a tensor has another shape, type, device or layout, or no kernel supports this
            combination.

    Example:
        >>> import torch
        >>> from gemmery.formats import QuantizedTensor, packing
        >>> codes = torch.full((16, 64), 11, dtype=torch.uint8)
        >>> w = QuantizedTensor((16, 64), "int4", packing.pack(codes, 4, packing.APART), dtype=torch.bfloat16)
        >>> w.dequantize()[0, :3]
        tensor([3., 3., 3.], dtype=torch.bfloat16)
    """

    INNER = INNER
    OWN = frozenset((*INNER, "format_name", "group_size", "static"))
    FORMATS = FORMATS
    made_by = "gemmery.quantize"
    plain = "dequantize"
    state = "quantized"
    prepared_by = "quantize the model first with gemmery.nn.quantize"

    format_name: str
    group_size: int
    words: Tensor
    scales: Tensor | None
    zeros: Tensor | None
    offsets: Tensor | None
    channel: Tensor | None
    permutation: Tensor | None

    @staticmethod
    def __new__(
        cls,
        shape: tuple[int, ...] | torch.Size,
        format: Format | str,
        words: Tensor,
        *,
        dtype: torch.dtype,
        group_size: int = 0,
        scales: Tensor | None = None,
        zeros: Tensor | None = None,
        offsets: Tensor | None = None,
        channel: Tensor | None = None,
        permutation: Tensor | None = None,
    ) -> QuantizedTensor:
        format = lookup("QuantizedTensor", format)
        values = (words, scales, zeros, offsets, channel, permutation)
        inner = dict(zip(INNER, values, strict=True))
        _check(tuple(shape), format, dtype, group_size, inner)
        return cls._assemble(shape, format, dtype, group_size, inner)

    @classmethod
    def _assemble(
        cls, shape: Any, format: Format, dtype: torch.dtype, group_size: int, inner: Inner
    ) -> QuantizedTensor:
        """One of parts that are known to fit."""
        words = inner["words"]
        assert words is not None
        self = Tensor._make_wrapper_subclass(cls, torch.Size(shape), dtype=dtype, device=words.device)
        self.format_name, self.group_size = format.name, group_size
        self.static = (tuple(shape), dtype, format.name, group_size)
        for name in INNER:
            setattr(self, name, inner.get(name))
        return self

    @property
    def format(self) -> Format:
        """The format of the codes."""
        # Kept by its name, which the compiler can turn into a constant if compiled code creates a weight.
        return FORMATS[self.format_name]

    # --- as values -------------------------------------------------------------------------------------------------

    def with_parts(
        self, inner: Inner, shape: Any = None, dtype: torch.dtype | None = None
    ) -> QuantizedTensor:
        shape, dtype = self.shape if shape is None else shape, dtype or self.dtype
        return type(self)._assemble(shape, self.format, dtype, self.group_size, inner)

    def in_type(self, dtype: torch.dtype) -> QuantizedTensor:
        inner = self.parts()
        for name in inner.keys() & set(GROUPED):
            if inner[name].dtype == self.dtype:
                inner[name] = aten.converted("to", name, inner[name], dtype)
        return self.with_parts(inner, dtype=dtype)

    def of_batch(self, batch: tuple[int, ...], take: Callable[[Tensor], Tensor]) -> QuantizedTensor:
        return pieces.of_batch(self, batch, take)

    def cut_rows(self, start: int, stop: int, caller: str = "slice") -> QuantizedTensor:
        return pieces.rows(self, start, stop, caller)

    def cut_columns(self, start: int, stop: int, caller: str = "slice") -> QuantizedTensor:
        return pieces.columns(self, start, stop, caller)

    @classmethod
    def stack_rows(cls, weights: Sequence[QuantizedTensor]) -> QuantizedTensor:
        return pieces.stacked_rows(weights)

    def about(self) -> dict[str, Any]:
        return {"format": self.format.name, "group_size": self.group_size}

    @property
    def form(self) -> str:
        return f"format={self.format.name}"

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """The values of the weight, with columns in their logical order.

        Args:
            dtype: the type of the result; by default the weight's own. If the weight has a `channel`, the float32
                product of value and channel is rounded to it, so float32 and float64 lose nothing.

        Returns:
            A plain tensor (*batch, N, K).

        Example:
            >>> import torch, gemmery
            >>> gemmery.quantize(torch.eye(16), "mxfp4").dequantize(torch.float32).equal(torch.eye(16))
            True
        """
        return decode.dequantize(self, dtype or self.dtype)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        group = f", group_size={self.group_size}" if self.group_size else ""
        return (
            f"{type(self).__name__}({tuple(self.shape)}, format={self.format.name}{group}, dtype={self.dtype}, "
            f"device={str(self.device)!r}, bytes={self.nbytes})"
        )

    # --- as tensors and text -----------------------------------------------------------------------------------------

    def to_tensors(self, prefix: str = "") -> tuple[dict[str, Tensor], dict[str, str]]:
        """The weight as plain tensors, named `prefix` + "words" etc., and texts, for `from_tensors`.

        Example:
            >>> import torch, gemmery
            >>> tensors, texts = gemmery.quantize(torch.randn(16, 64), "int8").to_tensors("up.")
            >>> sorted(tensors), texts["format"]
            (['up.channel', 'up.words'], 'int8')
        """
        texts = {
            "format": self.format.name,
            "shape": json.dumps(list(self.shape)),
            "dtype": str(self.dtype).removeprefix("torch."),
            "group_size": str(self.group_size),
            "packing": str(packing.VERSION),
        }
        return {prefix + name: value for name, value in self.parts().items()}, texts

    @classmethod
    def from_tensors(
        cls, tensors: Mapping[str, Tensor], texts: Mapping[str, str], prefix: str = ""
    ) -> QuantizedTensor:
        """The weight from the result of `to_tensors`; tensors with other names are ignored.

        Raises:
            ValueError, TypeError: a part is missing or does not fit.
        """
        check_texts(texts, "format", "shape", "dtype", "group_size")
        if (version := texts.get("packing", "1")) not in ("2", str(packing.VERSION)):
            raise ValueError(
                f"from_tensors: the words of {prefix!r} are of version {version} of their order; this gemmery reads 2 "
                f"and {packing.VERSION}: quantize the weight again, or use the gemmery that wrote it"
            )
        dtype = dtype_of_text(texts["dtype"])
        if prefix + "words" not in tensors:
            raise ValueError(f"from_tensors: there is no tensor {prefix + 'words'!r}")
        words, *rest = (tensors.get(prefix + name) for name in INNER)
        assert words is not None
        format = lookup("from_tensors", texts["format"])
        options: dict[str, Any] = dict(zip(INNER[1:], rest, strict=True))
        group_size = number_of_text("group_size", texts["group_size"])
        result = cls(
            shape_of_text(texts["shape"]), format, words, dtype=dtype, group_size=group_size, **options
        )
        _check_permutation(result.permutation)
        if version == "2" and format.code == "e2m1":
            words = packing.reordered(words, format.bits, packing.APART, format.order)
            result = result.with_parts(result.parts() | {"words": words})
        return result

    # --- to torch ----------------------------------------------------------------------------------------------------

    def __tensor_flatten__(self) -> tuple[list[str], tuple[str, torch.dtype, int]]:
        return list(self.parts()), (self.format.name, self.dtype, self.group_size)

    @classmethod
    def __tensor_unflatten__(
        cls, inner: dict[str, Tensor], context: tuple[str, torch.dtype, int], size: Any, stride: Any
    ) -> QuantizedTensor:
        name, dtype, group_size = context
        return cls._assemble(size, FORMATS[name], dtype, group_size, inner)


def _check_permutation(permutation: Tensor | None) -> None:
    """An error about columns that there are not: a kernel would read them."""
    if permutation is None or aten.has_no_values(permutation):
        return
    if not permutation.sort()[0].equal(torch.arange(permutation.numel(), device=permutation.device)):
        raise ValueError(f"from_tensors: permutation must have each of 0 to {permutation.numel() - 1} once")


def restore(tensors: dict[str, Tensor], texts: dict[str, str], extras: dict[str, Any]) -> QuantizedTensor:
    """Restore a pickled weight, and the attributes that others had set on it."""
    result = QuantizedTensor.from_tensors(tensors, texts)
    result.__dict__.update({name: value for name, value in extras.items() if name not in QuantizedTensor.OWN})
    return result


QuantizedTensor._restore = staticmethod(restore)


# torch.load calls nothing else by default. It builds a weight from tensors, after the same checks as the constructor.
torch.serialization.add_safe_globals([restore])


def lookup(caller: str, format: Format | str) -> Format:
    """A format by its name, or itself."""
    name = format.name if isinstance(format, Format) else format
    if not isinstance(name, str):
        raise TypeError(
            f"{caller}: format is a {type(name).__name__}; it must be one of {', '.join(FORMATS)}"
        )
    if name not in FORMATS:
        near = "e4m3" if name.lower() in ("fp8", "float8") else name.lower()
        hint = f"; did you mean {near!r}?" if near in FORMATS else ""
        raise ValueError(f"{caller}: format is {name!r}; it must be one of {', '.join(FORMATS)}{hint}")
    return FORMATS[name]


def _check(shape: tuple[int, ...], format: Format, dtype: torch.dtype, group_size: int, inner: Inner) -> None:
    """Errors of the constructor."""
    if len(shape) < 2:
        raise ValueError(f"QuantizedTensor: shape is {shape}; it must be (*batch, N, K)")
    if dtype not in DTYPES:
        raise ValueError(f"QuantizedTensor: dtype is {dtype}; it must be torch.float16 or torch.bfloat16")
    check_shared("QuantizedTensor", format, dtype, group_size, inner)
    *batch, rows, columns = shape
    N, K = packing.padded(rows, columns, format.bits)
    groups = (*batch, -(-columns // group_size), N) if group_size else ()
    lines = K // packing.block_columns(format.bits) * 4
    _part("words", inner, [(*batch, N // packing.STRIP, lines, packing.LINE)], [torch.int32])
    _part("scales", inner, [groups], [dtype, torch.float32])
    _part("zeros", inner, [groups], [dtype])
    _part("offsets", inner, [groups], [dtype])
    _part("channel", inner, [(*batch, rows), (1,)], [torch.float32])
    _part("permutation", inner, [(columns,)], [torch.int64])


def is_group_size(size: object) -> bool:
    """Whether `size` columns can share a scale: kernels support powers of two of at least 16, a K step.

    Example:
        >>> [size for size in (0, 8, 16, 48, 64) if is_group_size(size)]
        [16, 64]
    """
    return isinstance(size, int) and size >= SMALLEST_GROUP and not size & (size - 1)


def check_shared(caller: str, format: Format, dtype: torch.dtype, group_size: int, inner: Inner) -> None:
    """Errors about the parameters of groups: a weight that no kernel supports is not allowed."""
    scales, zeros, offsets = (inner[name] for name in GROUPED)
    shifts = " and ".join(name for name in GROUPED[1:] if inner[name] is not None)
    if shifts and scales is None:
        raise ValueError(f"{caller}: there are {shifts} without scales; give scales too, which may all be 1")
    if zeros is not None and offsets is not None:
        zero = f"(zeros - {format.zero})" if format.code == "int" else "zeros"
        raise ValueError(
            f"{caller}: there are both zeros and offsets; give one of them: offsets - {zero} * scales as offsets, "
            "without zeros"
        )
    if scales is None and group_size != 0:
        raise ValueError(f"{caller}: group_size is {group_size!r} without scales; it must be 0")
    if scales is not None and not is_group_size(group_size):
        raise ValueError(
            f"{caller}: group_size is {group_size!r} with scales; it must be a power of two of at least "
            f"{SMALLEST_GROUP}"
        )
    if offsets is not None and isinstance(scales, Tensor) and scales.dtype in (torch.float32, torch.float64):
        raise ValueError(f"{caller}: scales are {scales.dtype} with offsets; they must be {dtype}")


def _part(name: str, inner: Inner, shapes: list[tuple[int, ...]], dtypes: list[torch.dtype]) -> None:
    """Errors about one of the tensors."""
    part, words = inner[name], inner["words"]
    if part is None and name != "words":
        return
    if not isinstance(part, Tensor) or isinstance(part, QuantizedTensor):
        raise TypeError(f"QuantizedTensor: {name} is a {type(part).__name__}; it must be a plain tensor")
    if tuple(part.shape) not in shapes:
        wanted = " or ".join(map(str, shapes))
        raise ValueError(f"QuantizedTensor: {name} is {tuple(part.shape)}; it must be {wanted}")
    if part.dtype not in dtypes:
        wanted = " or ".join(map(str, dtypes))
        raise TypeError(f"QuantizedTensor: {name} is {part.dtype}; it must be {wanted}")
    if not part.is_contiguous():
        raise ValueError(f"QuantizedTensor: {name} has strides {part.stride()}; it must be contiguous")
    if part.device != words.device:  # type: ignore[union-attr]  # words were checked first
        raise ValueError(f"QuantizedTensor: {name} is on {part.device} and words on {words.device}")  # type: ignore[union-attr]
