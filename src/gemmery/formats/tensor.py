"""A weight whose numbers are stored in a few bits each, as a tensor that modules and checkpoints can hold."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from ..files import parse_json
from . import aten, decode, packing, pieces
from .base import FORMATS, Format

#: The tensors that a QuantizedTensor consists of, in the order in which they are stored.
INNER = ("words", "scales", "zeros", "offsets", "channel", "permutation")
#: Those that have numbers for groups of columns.
GROUPED = ("scales", "zeros", "offsets")
#: The least number of columns with one scale.
SMALLEST_GROUP = 16
#: Scales in bfloat16 of these codes, without zeros or offsets, are below this: kernels multiply them by powers of two,
#: see `kernels.decoders.UNIT`.
LIMITED_CODES, LARGEST_SCALE = ("int", "e2m1"), 2.0**35
#: What a weight can be multiplied with.
DTYPES = (torch.float16, torch.bfloat16)
_OWN = frozenset((*INNER, "format_name", "group_size", "static"))

Inner = Mapping[str, Tensor | None]


class QuantizedTensor(Tensor):
    """A weight (*batch, N, K) in one of `gemmery.formats.FORMATS`, for activations of type `dtype`.

    Element (n, k) of the packed matrix, whose code is `c`, stands for a number of type `dtype`, T below:

        v = T(format.values[c])               rounded to T
        v = v - zero                          in T; exact for integers, whose zero is `format.zero` without `zeros`
        v = T(v * scale)                      in T, or in float32 and then rounded to T where scales are float32
        v = T(v * scale + offset)             instead, with offsets: rounded once

    which a kernel multiplies and sums in float32; where there is a `channel`, the sum is then multiplied by
    `channel[n]`, in float32 as well. `dequantize` gives exactly these numbers. Zeros and offsets need scales, and there
    can't be both: instead of zeros, what offsets add can be less by zero * scale, for integers by
    (zero - `format.zero`) * scale.

    It is made by `quantize`, by `from_codes` or by a reader of checkpoints. It moves between devices and between
    float16 and bfloat16, can be a parameter without gradient, copied, pickled, saved, indexed along its batch, and cut
    at multiples of 16 rows (which copies). It can't be written to, except by `copy_` from
    another one of the same layout, and `F.linear(x, weight, bias)` with it is `gemmery.linear`.

    Args:
        shape: (*batch, N, K).
        format: one of `FORMATS`, or its name.
        words: int32, (*batch, strips, lines, 32), contiguous, from `packing.pack` in the format's order.
        dtype: torch.float16 or torch.bfloat16.
        group_size: columns that share a scale, and a zero or an offset, a power of two of at least 16; 0 where there
            are no scales.
        scales: (*batch, ceil(K / group_size), Np), contiguous, where Np is N rounded up to 16, and what pads is 0; of
            type `dtype` or, without offsets, float32. In bfloat16 and without zeros or offsets, those of integers and
            e2m1 must be below 2^35, which `from_codes` checks; here values are not looked at.
        zeros: like scales, of type `dtype`; subtracted before scaling.
        offsets: like zeros, and in their place; added after scaling.
        channel: float32, (*batch, N) or (1,).
        permutation: int64, (K,): column k of the packed matrix is column `permutation[k]` of the weight.

    Raises:
        ValueError, TypeError: one of the tensors has another shape, type, device or layout, or no kernel knows what
            they are together.

    Example:
        >>> import torch
        >>> from gemmery.formats import QuantizedTensor, packing
        >>> codes = torch.full((16, 64), 11, dtype=torch.uint8)
        >>> w = QuantizedTensor((16, 64), "int4", packing.pack(codes, 4, packing.APART), dtype=torch.bfloat16)
        >>> w.dequantize()[0, :3]
        tensor([3., 3., 3.], dtype=torch.bfloat16)
    """

    format_name: str
    group_size: int
    #: What tells weights apart, but for their tensors: shape, type, format, group size.
    static: tuple[Any, ...]
    words: Tensor
    scales: Tensor | None
    zeros: Tensor | None
    offsets: Tensor | None
    channel: Tensor | None
    permutation: Tensor | None

    @staticmethod
    def __new__(  # noqa: D102  (the class has it)
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
        """How codes stand for numbers."""
        # Kept by its name, of which the compiler can make a constant where a weight is made in what it compiles.
        return FORMATS[self.format_name]

    # --- as values -------------------------------------------------------------------------------------------------

    def parts(self) -> dict[str, Tensor]:
        """The tensors that there are, by name."""
        return {name: value for name in INNER if (value := getattr(self, name)) is not None}

    def with_parts(
        self, inner: Inner, shape: Any = None, dtype: torch.dtype | None = None
    ) -> QuantizedTensor:
        """The same format with other tensors, which must fit the shape and type."""
        shape, dtype = self.shape if shape is None else shape, dtype or self.dtype
        return type(self)._assemble(shape, self.format, dtype, self.group_size, inner)

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """The numbers that the weight stands for, columns in their logical order.

        Args:
            dtype: of the result; the weight's own by default. Of a weight with a `channel` it is the float32 product of
                number and channel that is rounded to it, so that float32 and float64 lose nothing.

        Returns:
            A plain tensor (*batch, N, K).

        Example:
            >>> import torch, gemmery
            >>> gemmery.quantize(torch.eye(16), "mxfp4").dequantize(torch.float32).equal(torch.eye(16))
            True
        """
        return decode.dequantize(self, dtype or self.dtype)

    def unscaled(self) -> QuantizedTensor:
        """The weight without its `channel`."""
        return self if self.channel is None else self.with_parts(self.parts() | {"channel": None})

    def shard(self, dim: int, index: int, count: int) -> QuantizedTensor:
        """Part `index` of `count` equal ones, for tensor parallelism.

        Args:
            dim: -2 for rows (N: column parallel in torch's words) or -1 for columns (K: row parallel), or the same
                counted from the front.
            index: which part.
            count: how many there are. Parts must be multiples of 16 rows, or of what a block of words and a group of
                columns have (64 columns for 4 bits in groups of up to 64, 128 in groups of 128).

        Returns:
            A weight of its own, (*batch, N / count, K) or (*batch, N, K / count).

        Raises:
            ValueError: the parts can't be cut there, or a permutation moves columns from one part into another.

        Example:
            >>> import torch, gemmery
            >>> w = gemmery.quantize(torch.randn(64, 256), "int4", group_size=64)
            >>> w.shard(-1, 1, 4).shape
            torch.Size([64, 64])
        """
        return pieces.shard(self, dim, index, count)

    @property
    def nbytes(self) -> int:  # type: ignore[override]
        """Bytes of all tensors that the weight consists of."""
        return sum(x.nbytes for x in self.parts().values())

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        group = f", group_size={self.group_size}" if self.group_size else ""
        return (
            f"{type(self).__name__}({tuple(self.shape)}, format={self.format.name}{group}, dtype={self.dtype}, "
            f"device={str(self.device)!r}, bytes={self.nbytes})"
        )

    # --- as tensors and text -----------------------------------------------------------------------------------------

    def to_tensors(self, prefix: str = "") -> tuple[dict[str, Tensor], dict[str, str]]:
        """What `from_tensors` makes the weight of again: plain tensors, named `prefix` + "words" etc., and texts.

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
        """The weight of which `to_tensors` gave these; tensors of other names are ignored.

        Raises:
            ValueError, TypeError: something is missing or does not fit.
        """
        if missing := {"format", "shape", "dtype", "group_size"} - texts.keys():
            raise ValueError(f"from_tensors: the texts have no {', '.join(sorted(missing))}")
        if wrong := [name for name, text in texts.items() if not isinstance(text, str)]:
            raise TypeError(f"from_tensors: {wrong[0]} is {texts[wrong[0]]!r}; it must be a text")
        if (version := texts.get("packing", "1")) not in ("2", str(packing.VERSION)):
            raise ValueError(
                f"from_tensors: the words of {prefix!r} are of version {version} of their order; this gemmery reads 2 "
                f"and {packing.VERSION}: quantise the weight anew, or use the gemmery that wrote it"
            )
        dtype = next((x for x in DTYPES if str(x) == f"torch.{texts['dtype']}"), None)
        if dtype is None:
            raise ValueError(f"from_tensors: dtype is {texts['dtype']!r}; it must be float16 or bfloat16")
        if prefix + "words" not in tensors:
            raise ValueError(f"from_tensors: there is no tensor {prefix + 'words'!r}")
        words, *rest = (tensors.get(prefix + name) for name in INNER)
        assert words is not None
        format = lookup("from_tensors", texts["format"])
        options: dict[str, Any] = dict(zip(INNER[1:], rest, strict=True))
        group_size = _number("group_size", texts["group_size"])
        result = cls(_shape(texts["shape"]), format, words, dtype=dtype, group_size=group_size, **options)
        _check_permutation(result.permutation)
        if version == "2" and format.code == "e2m1":
            words = packing.reordered(words, format.bits, packing.APART, format.order)
            result = result.with_parts(result.parts() | {"words": words})
        return result

    # --- copies and files --------------------------------------------------------------------------------------------

    def _extras(self) -> dict[str, Any]:
        """What others have set on the weight, such as that it is a parameter."""
        return {name: value for name, value in self.__dict__.items() if name not in _OWN}

    def storage(self) -> Any:
        """Raises an error, since a packed weight consists of several tensors.

        Raises:
            ValueError: always. Functions that write files ask for it, such as a Hugging Face model's `save_pretrained`.
        """
        raise ValueError(
            f"{self!r} has no storage of its own: save_pretrained and safetensors' own functions can't write packed "
            "weights. Write the state dict with gemmery.formats.save_safetensors(file, model.state_dict()), or with "
            "torch.save"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> QuantizedTensor:
        if id(self) in memo:
            return memo[id(self)]  # type: ignore[no-any-return]
        memo[id(self)] = result = self.detach().clone()
        result.__dict__.update(copy.deepcopy(self._extras(), memo))
        return result  # type: ignore[return-value]

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        tensors, texts = self.to_tensors()
        return restore, (tensors, texts, self._extras())

    # --- to torch ----------------------------------------------------------------------------------------------------

    def __tensor_flatten__(self) -> tuple[list[str], tuple[str, torch.dtype, int]]:
        return list(self.parts()), (self.format.name, self.dtype, self.group_size)

    @classmethod
    def __tensor_unflatten__(
        cls, inner: dict[str, Tensor], context: tuple[str, torch.dtype, int], size: Any, stride: Any
    ) -> QuantizedTensor:
        name, dtype, group_size = context
        return cls._assemble(size, FORMATS[name], dtype, group_size, inner)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in TORCH_FUNCTIONS:
            return TORCH_FUNCTIONS[func](*args, **(kwargs or {}))
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch's own is no class method
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return aten.call(cls, func, args, kwargs or {})


def _number(name: str, text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 10):
        raise ValueError(f"from_tensors: {name} is {text!r}; it must be a whole number")
    return int(text)


def _shape(text: str) -> tuple[int, ...]:
    sizes = parse_json(text, "from_tensors: shape")
    if not isinstance(sizes, list) or not all(type(size) is int and size >= 0 for size in sizes):
        raise ValueError(f"from_tensors: shape is {text!r}; it must be a list of sizes")
    return tuple(sizes)


def _check_permutation(permutation: Tensor | None) -> None:
    """An error about columns that there are not: a kernel would read them."""
    if permutation is None or aten.has_no_values(permutation):
        return
    if not permutation.sort()[0].equal(torch.arange(permutation.numel(), device=permutation.device)):
        raise ValueError(f"from_tensors: permutation must have each of 0 to {permutation.numel() - 1} once")


def restore(tensors: dict[str, Tensor], texts: dict[str, str], extras: dict[str, Any]) -> QuantizedTensor:
    """What a pickle calls: the weight, and what others had set on it."""
    result = QuantizedTensor.from_tensors(tensors, texts)
    result.__dict__.update({name: value for name, value in extras.items() if name not in _OWN})
    return result


# torch.load calls nothing else by default. It builds a weight from tensors, after the same checks as the constructor.
torch.serialization.add_safe_globals([restore])


def _set_requires_grad(self: QuantizedTensor, requires_grad: bool = True) -> QuantizedTensor:
    if requires_grad:
        raise ValueError(
            f"requires_grad: {self!r} has no gradient; make parameters of it with requires_grad=False"
        )
    return self


def _set_data(self: QuantizedTensor, data: Any) -> None:
    """`weight.data = other`, which for a wrapper would be lost: torch knows of no parts."""
    if not isinstance(data, QuantizedTensor):
        raise TypeError(f"data: a {type(data).__name__} can't be the data of {self!r}; see gemmery.quantize")
    if (data.shape, data.dtype, data.device) != (self.shape, self.dtype, self.device):
        raise ValueError(
            f"data: {data!r} can't be that of {self!r}: shape, dtype and device must be the same"
        )
    self.format_name, self.group_size, self.static = data.format_name, data.group_size, data.static
    for name in INNER:
        setattr(self, name, getattr(data, name))


def _share_memory(self: QuantizedTensor) -> QuantizedTensor:
    for part in self.parts().values():
        part.share_memory_()
    return self


#: torch's functions that do something of their own with a packed weight. Those that multiply are added where products
#: are made, in `gemmery.api`.
TORCH_FUNCTIONS: dict[Any, Callable[..., Any]] = {
    Tensor.data.__set__: _set_data,  # type: ignore[attr-defined]
    Tensor.share_memory_: _share_memory,
    Tensor.requires_grad_: _set_requires_grad,
    Tensor.requires_grad.__set__: _set_requires_grad,  # type: ignore[attr-defined]
}


def lookup(caller: str, format: Format | str) -> Format:
    """A format by its name, or itself."""
    name = format.name if isinstance(format, Format) else format
    if not isinstance(name, str):
        raise TypeError(
            f"{caller}: format is a {type(name).__name__}; it must be one of {', '.join(FORMATS)}"
        )
    if name not in FORMATS:
        raise ValueError(f"{caller}: format is {name!r}; it must be one of {', '.join(FORMATS)}")
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
    """Whether so many columns can share a scale: kernels take powers of two that are no less than a step's 16.

    Example:
        >>> [size for size in (0, 8, 16, 48, 64) if is_group_size(size)]
        [16, 64]
    """
    return isinstance(size, int) and size >= SMALLEST_GROUP and not size & (size - 1)


def check_shared(caller: str, format: Format, dtype: torch.dtype, group_size: int, inner: Inner) -> None:
    """Errors about what groups share: what no kernel knows is no weight either."""
    scales, zeros, offsets = (inner[name] for name in GROUPED)
    shifts = " and ".join(name for name in GROUPED[1:] if inner[name] is not None)
    if shifts and scales is None:
        raise ValueError(f"{caller}: there are {shifts} without scales; they need scales, which can be all 1")
    if zeros is not None and offsets is not None:
        zero = f"(zeros - {format.zero})" if format.code == "int" else "zeros"
        raise ValueError(
            f"{caller}: there are both zeros and offsets; give one of them: offsets - {zero} * scales can be given as "
            "offsets, without zeros"
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
