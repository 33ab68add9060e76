"""2:4 sparse weights: of each four numbers along K two are kept, and metadata says which.

Both lie as torch's `SparseSemiStructuredTensorCUTLASS` has them, so its weights are taken without a copy. The metadata
of four numbers are four bits: the place of the first kept number in the lower two, that of the second one above. A word
of metadata is of 16 columns, of row r in its lower half and of row r + 8 in its upper one. The words of 32 rows and 32
columns are adjacent, in the order in which the lanes of a warp hand them to the tensor cores.
"""

from __future__ import annotations

import functools
import itertools
import json
import math
from collections.abc import Callable, Mapping
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from . import aten
from .kept import CODES, NAMES, Code
from .weight import (
    DTYPES,
    Inner,
    PackedWeight,
    check_strided,
    check_texts,
    check_whole,
    dtype_of_text,
    number_of_text,
    shape_of_text,
)

#: The pattern in files; there is no other.
PATTERN = "2:4"
#: Columns of which two are kept; rows and columns of which storage has a multiple.
GROUP, ROWS, COLUMNS = 4, 32, 64
#: Rows and columns whose words of metadata are adjacent.
BLOCK = 32
#: The least number of columns with one scale: those of a block of metadata.
SMALLEST_GROUP = 32
#: The tensors that a SparseTensor consists of, in the order in which they are stored.
INNER = ("values", "metadata", "scales", "channel")

Method = Literal["magnitude", "transposable", "as_is"]


class SparseTensor(PackedWeight):
    """A 2:4 sparse weight (*batch, N, K), for activations of its type.

    `sparsify` creates it, and products accept it like a `QuantizedTensor`. It can be moved between devices and cast
    between float16 and bfloat16, can be a parameter without a gradient, copied, pickled, saved, indexed along its
    batch, and sliced at multiples of 32 rows or 64 columns (which copies).

    Args:
        shape: (*batch, N, K), where K is a multiple of 4.
        values: the kept elements, (*batch, Np, Kp / 2), contiguous, float16 or bfloat16, where Np is N rounded up to 32
            and Kp is K rounded up to 64; the padding is 0. With a `code`, int8: the bits of the elements. With "int4",
            (*batch, Np, Kp / 4): each byte contains the two kept elements of four columns, from -8 to 7, the first one
            in its lower half.
        metadata: int32, (*batch, Kp / 32, Np), contiguous; the docstring of the module defines it. Of every four
            elements, the first position is less than the second, in the padding too.
        scales: of the activations' type, (*batch, ceil(K / group_size), Np), contiguous: with the code "int4", a scale
            per group of columns. Scaled elements are rounded to the activations' type, as in `QuantizedTensor`.
        channel: float32, (*batch, N) or (1,): a scale per row, as in `QuantizedTensor`.
        code: "e4m3" or "int8" for kept elements of 8 bits, "int4" for 4 bits, "" for 16 bits. No element may be the NaN
            of e4m3, 0x7f or 0xff, which kernels would read as 480; `values` that you pass are checked.
        dtype: the type of the activations, with a `code`: float16 or bfloat16, in which all values of all codes are
            exact.
        group_size: the number of columns that share a scale, a power of two of at least 32; 0 if there are no scales.

    Raises:
        ValueError, TypeError: a tensor has another shape, type, device or layout, or contains the NaN of e4m3.

    Example:
        >>> import torch, gemmery
        >>> w = gemmery.sparsify(torch.tensor([[1.0, -3.0, 0.5, 2.0] * 16] * 32, dtype=torch.bfloat16), "2:4")
        >>> w.dense()[0, :4]
        tensor([ 0., -3.,  0.,  2.], dtype=torch.bfloat16)
    """

    INNER = INNER
    OWN = frozenset((*INNER, "static", "code", "group_size"))
    FORMATS = (PATTERN,)
    made_by = "gemmery.sparsify"
    plain = "dense"
    state = "sparse"
    prepared_by = "prune the model first with gemmery.nn.sparsify"

    code: str
    group_size: int
    values: Tensor  # type: ignore[assignment]  # torch's is for torch's sparse tensors
    metadata: Tensor
    scales: Tensor | None
    permutation = None

    @staticmethod
    def __new__(
        cls,
        shape: tuple[int, ...] | torch.Size,
        values: Tensor,
        metadata: Tensor,
        *,
        scales: Tensor | None = None,
        channel: Tensor | None = None,
        code: str = "",
        dtype: torch.dtype | None = None,
        group_size: int = 0,
    ) -> SparseTensor:
        inner = {"values": values, "metadata": metadata, "scales": scales, "channel": channel}
        _check(tuple(shape), inner, code, dtype, group_size)
        _check_numbers(values, code)
        return cls._assemble(shape, inner, code, dtype, group_size)

    @classmethod
    def _assemble(
        cls, shape: Any, inner: Inner, code: str, dtype: torch.dtype | None, group_size: int = 0
    ) -> SparseTensor:
        """One of parts that are known to fit; without a code, the type is that of the values."""
        values = inner["values"]
        assert values is not None
        kind = values.dtype if dtype is None or not code else dtype
        self = Tensor._make_wrapper_subclass(cls, torch.Size(shape), dtype=kind, device=values.device)
        self.code, self.group_size = code, group_size
        self.static = (tuple(shape), kind, code, group_size)
        for name in INNER:
            setattr(self, name, inner.get(name))
        return self

    # --- as values -------------------------------------------------------------------------------------------------

    def with_parts(self, inner: Inner, shape: Any = None, dtype: torch.dtype | None = None) -> SparseTensor:
        shape = self.shape if shape is None else shape
        return type(self)._assemble(shape, inner, self.code, dtype or self.dtype, self.group_size)

    def in_type(self, dtype: torch.dtype) -> SparseTensor:
        inner = self.parts()
        if not self.code:
            inner["values"] = aten.converted("to", "values", self.values, dtype, may_vanish=True)
        if self.scales is not None:
            inner["scales"] = aten.converted("to", "scales", self.scales, dtype)
        return self.with_parts(inner, dtype=dtype)

    def in_code(self) -> SparseTensor:
        """The weight for fp8 activations: its elements in their code, e4m3."""
        return self.with_parts(self.parts(), dtype=torch.float8_e4m3fn)

    def of_batch(self, batch: tuple[int, ...], take: Callable[[Tensor], Tensor]) -> SparseTensor:
        inner = self.parts()
        for name in inner:
            if name != "channel" or self._is_per_row:
                inner[name] = take(inner[name]).contiguous()
        return self.with_parts(inner, (*batch, *self.shape[-2:]))

    @property
    def _is_per_row(self) -> bool:
        """Whether `channel` has a number for each row, instead of one for all."""
        channel = self.channel
        return channel is not None and channel.ndim == self.ndim - 1 and tuple(channel.shape) != (1,)

    def cut_rows(self, start: int, stop: int, caller: str = "slice") -> SparseTensor:
        *batch, N, K = self.shape
        self._check_cut("rows", start, stop, N, ROWS, caller)
        inner = self.parts()
        last = -(-stop // ROWS) * ROWS
        inner["values"] = _copied(inner["values"][..., start:last, :])
        for name in inner.keys() & {"metadata", "scales"}:
            inner[name] = _copied(inner[name][..., start:last])
        if "channel" in inner:
            inner["channel"] = _copied(
                inner["channel"][..., start:stop] if self._is_per_row else inner["channel"]
            )
        return self.with_parts(inner, (*batch, stop - start, K))

    def cut_columns(self, start: int, stop: int, caller: str = "slice") -> SparseTensor:
        *batch, N, K = self.shape
        self._check_cut("columns", start, stop, K, math.lcm(COLUMNS, self.group_size or 1), caller)
        inner, each, group = self.parts(), CODES[self.code].each, self.group_size
        last = -(-stop // COLUMNS) * COLUMNS
        inner["values"] = _copied(inner["values"][..., start // each : last // each])
        if "scales" in inner:
            inner["scales"] = _copied(inner["scales"][..., start // group : -(-stop // group), :])
        inner["metadata"] = _copied(inner["metadata"][..., start // BLOCK : last // BLOCK, :])
        if "channel" in inner:
            inner["channel"] = inner["channel"].clone()
        return self.with_parts(inner, (*batch, N, stop - start))

    def _check_cut(self, what: str, start: int, stop: int, size: int, step: int, caller: str) -> None:
        if start % step or (stop % step and stop != size):
            raise ValueError(
                f"{caller}: {what} {start} to {stop} of {self!r}: it can only be sliced at multiples of {step}"
            )

    def about(self) -> dict[str, Any]:
        return {"code": self.code, "group_size": self.group_size}

    @property
    def form(self) -> str:
        code = f", code={self.code}" if self.code else ""
        return f"pattern={PATTERN}{code}{f', group_size={self.group_size}' if self.group_size else ''}"

    def kept_numbers(self) -> Tensor:
        """The kept elements before scaling, (*batch, Np, Kp / 2), in the weight's type."""
        if self.dtype.itemsize == 1:
            return self.values
        return CODES[self.code].to_numbers(self.values).to(self.dtype)

    def dense(self, dtype: torch.dtype | None = None) -> Tensor:
        """The weight as a plain tensor (*batch, N, K), with zeros in place of the pruned elements.

        Args:
            dtype: the type of the result; by default the weight's own. If the weight has a `channel`, the float32
                product of element and channel is rounded to it.

        Example:
            >>> import torch, gemmery
            >>> x = torch.randn(32, 64, dtype=torch.float16)
            >>> w = gemmery.sparsify(x, "2:4")
            >>> gemmery.sparsify(w.dense(), "2:4", method="as_is").dense().equal(w.dense())
            True
        """
        N, K = self.shape[-2:]
        # The bits of a weight in the type of its code, because fp8 does not support all operations here.
        found = expanded(self.kept_numbers(), self.metadata).view(self.dtype)[..., :N, :K]
        if self.scales is not None:
            scales = self.scales.mT[..., :N, :].repeat_interleave(self.group_size, -1)
            found = found * scales[..., :K]
        if self.channel is not None:
            found = found.float() * self.channel.unsqueeze(-1)
        return found.to(dtype or self.dtype)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return (
            f"{type(self).__name__}({tuple(self.shape)}, {self.form}, dtype={self.dtype}, "
            f"device={str(self.device)!r}, bytes={self.nbytes})"
        )

    # --- as tensors and text -----------------------------------------------------------------------------------------

    def to_tensors(self, prefix: str = "") -> tuple[dict[str, Tensor], dict[str, str]]:
        texts = {
            "format": PATTERN,
            "shape": json.dumps(list(self.shape)),
            "dtype": str(self.dtype).removeprefix("torch."),
            "code": self.code,
        }
        if self.group_size:
            texts["group_size"] = str(self.group_size)
        return {prefix + name: value for name, value in self.parts().items()}, texts

    @classmethod
    def from_tensors(
        cls, tensors: Mapping[str, Tensor], texts: Mapping[str, str], prefix: str = ""
    ) -> SparseTensor:
        """The weight from the result of `to_tensors`; tensors with other names are ignored.

        Raises:
            ValueError, TypeError: a part is missing or does not fit.
        """
        check_texts(texts, "format", "shape", "dtype")
        for name in ("values", "metadata"):
            if prefix + name not in tensors:
                raise ValueError(f"from_tensors: there is no tensor {prefix + name!r}")
        values, metadata, scales, channel = (tensors.get(prefix + name) for name in INNER)
        assert values is not None
        assert metadata is not None
        code, dtype = texts.get("code", ""), dtype_of_text(texts["dtype"])
        group_size = number_of_text("group_size", texts.get("group_size", "0"))
        result = cls(
            shape_of_text(texts["shape"]), values, metadata, scales=scales, channel=channel, code=code, dtype=dtype,
            group_size=group_size,
        )  # fmt: skip
        if not aten.has_no_values(metadata):
            check_metadata(metadata, "from_tensors")
        return result

    # --- to torch ----------------------------------------------------------------------------------------------------

    def __tensor_flatten__(self) -> tuple[list[str], tuple[str, torch.dtype, int]]:
        return list(self.parts()), (self.code, self.dtype, self.group_size)

    @classmethod
    def __tensor_unflatten__(
        cls, inner: dict[str, Tensor], context: tuple[str, torch.dtype, int], size: Any, stride: Any
    ) -> SparseTensor:
        return cls._assemble(size, inner, *context)


def restore(tensors: dict[str, Tensor], texts: dict[str, str], extras: dict[str, Any]) -> SparseTensor:
    """Restore a pickled weight, and the attributes that others had set on it."""
    result = SparseTensor.from_tensors(tensors, texts)
    result.__dict__.update({name: value for name, value in extras.items() if name not in SparseTensor.OWN})
    return result


SparseTensor._restore = staticmethod(restore)
torch.serialization.add_safe_globals([restore])


def _copied(x: Tensor) -> Tensor:
    return x.clone(memory_format=torch.contiguous_format)


def _check(
    shape: tuple[int, ...], inner: Inner, code: str, dtype: torch.dtype | None, group_size: int
) -> None:
    """Errors of the constructor."""
    if not isinstance(code, str) or code not in CODES:
        raise ValueError(f"SparseTensor: code is {code!r}; it must be one of {', '.join(NAMES)}, or ''")
    if code and dtype not in DTYPES:
        raise ValueError(
            f"SparseTensor: dtype is {dtype} with code {code!r}; it must be torch.float16 or torch.bfloat16"
        )
    if not code and dtype not in (
        None,
        inner["values"].dtype if isinstance(inner["values"], Tensor) else None,
    ):
        raise TypeError(f"SparseTensor: dtype is {dtype}; without a code it must be that of the values")
    if len(shape) < 2:
        raise ValueError(f"SparseTensor: shape is {shape}; it must be (*batch, N, K)")
    *batch, N, K = shape
    if K % GROUP:
        raise ValueError(f"SparseTensor: shape is {shape}; its last size must be a multiple of {GROUP}")
    check_groups("SparseTensor", code, inner["scales"] is not None, group_size)
    rows, columns = padded(N, K)
    wanted: dict[str, tuple[list[tuple[int, ...]], tuple[torch.dtype | None, ...]]] = {
        "values": ([(*batch, rows, columns // CODES[code].each)], (torch.int8,) if code else DTYPES),
        "metadata": ([(*batch, columns // BLOCK, rows)], (torch.int32,)),
        "scales": ([(*batch, -(-K // (group_size or 1)), rows)], (dtype,)),
        "channel": ([(*batch, N), (1,)], (torch.float32,)),
    }
    device = None
    for name, (shapes, dtypes) in wanted.items():
        part = inner[name]
        if part is None and name in ("scales", "channel"):
            continue
        if not isinstance(part, Tensor) or isinstance(part, PackedWeight):
            raise TypeError(f"SparseTensor: {name} is a {type(part).__name__}; it must be a plain tensor")
        if tuple(part.shape) not in shapes:
            texts = " or ".join(map(str, shapes))
            raise ValueError(f"SparseTensor: {name} is {tuple(part.shape)}; it must be {texts}")
        if part.dtype not in dtypes:
            texts = " or ".join(map(str, dtypes))
            raise TypeError(f"SparseTensor: {name} is {part.dtype}; it must be {texts}")
        if not part.is_contiguous():
            raise ValueError(f"SparseTensor: {name} has strides {part.stride()}; it must be contiguous")
        device = device or part.device
        if part.device != device:
            raise ValueError(f"SparseTensor: {name} is on {part.device} and values on {device}")


def _check_numbers(values: Tensor, code: str) -> None:
    """ValueError for NaN among the kept numbers of a code."""
    is_nan = CODES[code].is_nan
    if is_nan is None or aten.has_no_values(values):
        return
    wrong = is_nan(values)
    if wrong.any():
        at = wrong.nonzero()[0].tolist()
        bits = int(values[tuple(at)]) & 0xFF
        raise ValueError(
            f"SparseTensor: values{at} is {bits:#x}, NaN in {code}; the kept elements of a code must be finite"
        )


def check_groups(caller: str, code: str, has_scales: bool, group_size: int) -> None:
    """Errors about the size of groups: a weight that no kernel supports is not allowed."""
    if has_scales and not CODES[code].has_groups:
        names = " and ".join(repr(name) for name, other in CODES.items() if other.has_groups)
        raise ValueError(f"{caller}: there are scales with code {code!r}; scales of groups are for {names}")
    if not has_scales and group_size != 0:
        raise ValueError(f"{caller}: group_size is {group_size!r} without scales; it must be 0")
    if has_scales and not is_group_size(group_size):
        raise ValueError(
            f"{caller}: group_size is {group_size!r} with scales; it must be a power of two of at least "
            f"{SMALLEST_GROUP}"
        )


def is_group_size(size: object) -> bool:
    """Whether `size` columns can share a scale.

    Example:
        >>> [size for size in (0, 16, 32, 96, 128) if is_group_size(size)]
        [32, 128]
    """
    return isinstance(size, int) and size >= SMALLEST_GROUP and not size & (size - 1)


def padded(rows: int, columns: int) -> tuple[int, int]:
    """Rows and columns in stored order.

    Example:
        >>> padded(40, 64)
        (64, 64)
    """
    return -(-rows // ROWS) * ROWS, -(-columns // COLUMNS) * COLUMNS


# ---------------------------------------------------------------------------------------------------------------------
# Metadata


def packed_metadata(nibbles: Tensor) -> Tensor:
    """Words of metadata, (*batch, Kp / 32, Np), of four bits for each group of four numbers, (*batch, Np, Kp / 4)."""
    *batch, N, groups = nibbles.shape
    shifts = torch.arange(0, 16, 4, device=nibbles.device)
    halves = (nibbles.to(torch.int64).view(*batch, N, groups // 4, 4) << shifts).sum(-1)
    # Block of rows, s, half, g, block of columns, c; lanes are 4 g + 2 s + c.
    parts = halves.view(*batch, N // BLOCK, 2, 2, 8, groups // 8, 2)
    words = parts[..., 0, :, :, :] | parts[..., 1, :, :, :] << 16
    words = words.movedim(-2, -5).transpose(-3, -2).reshape(*batch, groups // 8, N)
    return ((words + (1 << 31)) % (1 << 32) - (1 << 31)).to(torch.int32)


def unpacked_metadata(metadata: Tensor) -> Tensor:
    """The four bits of each group of four numbers, int32, (*batch, Np, Kp / 4), of `packed_metadata`."""
    *batch, blocks, N = metadata.shape
    parts = metadata.view(*batch, blocks, N // BLOCK, 8, 2, 2)
    halves = torch.stack([parts & 0xFFFF, (parts >> 16) & 0xFFFF], -1)
    shifts = torch.arange(0, 16, 4, dtype=torch.int32, device=metadata.device)
    found = (halves.unsqueeze(-1) >> shifts) & 15
    # Block of columns, block of rows, g, s, c, half, group.
    b = len(batch)
    order = (*range(b), b + 1, b + 3, b + 5, b + 2, b, b + 4, b + 6)
    return found.permute(order).reshape(*batch, N, 8 * blocks)


def check_metadata(metadata: Tensor, caller: str) -> None:
    """ValueError for four bits whose first place is not below the second one; their effect in tensor cores is
    undefined.
    """
    check_places(unpacked_metadata(metadata), caller)


def check_places(found: Tensor, caller: str) -> None:
    """The same of the four bits of each group of four numbers, as `unpacked_metadata` gives them."""
    wrong = (found & 3) >= (found >> 2)
    if wrong.any():
        at = wrong.nonzero()[0].tolist()
        bits = int(found[tuple(at)])
        raise ValueError(
            f"{caller}: in the metadata, row {at[-2]}, columns {4 * at[-1]} to {4 * at[-1] + 3} have the places "
            f"{bits & 3} and {bits >> 2}; the first must be below the second"
        )


def expanded(values: Tensor, metadata: Tensor) -> Tensor:
    """The numbers with zeros between them, (*batch, Np, Kp)."""
    nibbles = unpacked_metadata(metadata).to(torch.int64)
    at = torch.stack([nibbles & 3, nibbles >> 2], -1)
    kept = values.unflatten(-1, (-1, 2))
    found = values.new_zeros(*nibbles.shape, GROUP).scatter(-1, at, kept)
    return found.flatten(-2)


# ---------------------------------------------------------------------------------------------------------------------
# Making one


def sparsify(weight: Tensor, pattern: str = PATTERN, *, method: Method = "magnitude") -> SparseTensor:
    """A weight that keeps two of every four elements along K.

    Args:
        weight: (*batch, N, K), float16, bfloat16 or a wider type, which becomes bfloat16; K is a multiple of 4. It may
            be one of torch's semi-structured weights. A `torch.sparse.SparseSemiStructuredTensorCUTLASS` is not copied;
            a cuSPARSELt weight is packed from its dense form. Their elements are kept unchanged, for any `method`.
        pattern: "2:4".
        method: which elements are kept.

            - "magnitude": the two largest of every four.
            - "transposable": those with the largest sum of magnitudes of each 4 by 4 block, so that each of its rows
              and columns keeps two, and the transpose is 2:4 as well. N must be a multiple of 4. See "Accelerated
              sparse neural training" (Hubara et al., arXiv:2102.08124).
            - "as_is": the nonzero elements; every four may contain two at most. -0.0 counts as 0.

    Returns:
        The weight, on the same device.

    Raises:
        ValueError: K is not a multiple of 4; or with "as_is", four elements contain more than two nonzero ones, and the
            message names the first position; or the weight is the transpose of one of torch's.
        TypeError: the weight is not a strided tensor of floating point, or is sharded (a DTensor).

    Example:
        >>> import torch, gemmery
        >>> w = gemmery.sparsify(torch.randn(64, 128), "2:4")
        >>> gemmery.linear(torch.randn(3, 128, dtype=torch.bfloat16), w).shape
        torch.Size([3, 64])
    """
    if pattern != PATTERN:
        raise ValueError(f"sparsify: pattern is {pattern!r}; it must be {PATTERN!r}")
    if method not in get_args(Method):
        raise ValueError(f"sparsify: method is {method!r}; it must be one of {', '.join(get_args(Method))}")
    if isinstance(weight, torch.sparse.SparseSemiStructuredTensor):
        return _of_torch(weight)
    if not isinstance(weight, Tensor) or isinstance(weight, PackedWeight):
        raise TypeError(f"sparsify: weight is a {type(weight).__name__}; it must be a plain tensor")
    check_whole("sparsify", "weight", weight)
    check_strided("sparsify", "weight", weight)
    if not weight.is_floating_point() or weight.itemsize == 1:
        raise TypeError(
            f"sparsify: weight is {weight.dtype}; it must be float16, bfloat16, float32 or float64"
        )
    if weight.dim() < 2 or weight.shape[-1] % GROUP:
        raise ValueError(
            f"sparsify: weight is {tuple(weight.shape)}; it must be (*batch, N, K), where K is a multiple of {GROUP}"
        )
    w = weight.detach()
    if w.dtype not in DTYPES:
        w = w.to(torch.bfloat16)
    return _packed(w, _kept(w, method))


def sparsify_as(weight: Tensor, mask: Tensor) -> SparseTensor:
    """A weight of which the numbers are kept that a mask says, without a look at the mask.

    Args:
        weight: (*batch, N, K), float16, bfloat16 or wider, which becomes bfloat16; K is a multiple of 4.
        mask: bool, of the weight's shape; of each four along K two are True.

    Example:
        >>> import torch
        >>> w = torch.arange(1.0, 5).bfloat16()[None]
        >>> sparsify_as(w, torch.tensor([[True, False, False, True]])).dense()
        tensor([[1., 0., 0., 4.]], dtype=torch.bfloat16)
    """
    w = weight.detach()
    w = w if w.dtype in DTYPES else w.to(torch.bfloat16)
    return _packed(w, places_of(mask))


def _packed(w: Tensor, kept: Tensor) -> SparseTensor:
    """A weight (*batch, N, K) of which the numbers in these places are kept, (*batch, N, K / 4, 2), in any order."""
    at = kept.sort(-1).values
    return of_kept(w.unflatten(-1, (-1, GROUP)).gather(-1, at).flatten(-2), at)


def of_kept(numbers: Tensor, at: Tensor) -> SparseTensor:
    """A weight (*batch, N, K) of its kept numbers.

    Args:
        numbers: (*batch, N, K / 2), float16 or bfloat16; -0.0 becomes 0.
        at: (*batch, N, K / 4, 2), integers: the places of each two in their four, the first below the second.

    Example:
        >>> of_kept(torch.tensor([[3.0, 4.0]]).half(), torch.tensor([[[1, 3]]])).dense()
        tensor([[0., 3., 0., 4.]], dtype=torch.float16)
    """
    *batch, N, half = numbers.shape
    # `dense` would return -0.0 unchanged, although it counts as 0.
    numbers = torch.where(numbers == 0, torch.zeros_like(numbers), numbers)
    return SparseTensor((*batch, N, 2 * half), *_laid(numbers, at))


def of_codes(
    codes: Tensor, at: Tensor, code: str, *, dtype: torch.dtype, scales: Tensor | None = None,
    channel: Tensor | None = None, group_size: int = 0,
) -> SparseTensor:  # fmt: skip
    """A weight (*batch, N, K) of kept integers.

    Args:
        codes: int8, (*batch, N, K / 2).
        at: see `of_kept`.
        code: "int8", or "int4" for integers from -8 to 7.
        dtype: of the activations.
        scales: of that type, (*batch, N, groups), with "int4".
        channel, group_size: see `SparseTensor`.

    Example:
        >>> codes, at = torch.tensor([[3, -4]], dtype=torch.int8), torch.tensor([[[1, 3]]])
        >>> of_codes(codes, at, "int4", dtype=torch.float16, channel=torch.tensor([0.5])).dense()
        tensor([[ 0.0000,  1.5000,  0.0000, -2.0000]], dtype=torch.float16)
    """
    *batch, N, half = codes.shape
    values, metadata = _laid(codes, at)
    values = CODES[code].to_values(values)
    shared = None if scales is None else laid_scales(scales, values.shape[-2])
    return SparseTensor(
        (*batch, N, 2 * half), values, metadata, scales=shared, channel=channel, code=code, dtype=dtype,
        group_size=group_size,
    )  # fmt: skip


def laid_scales(scales: Tensor, rows: int) -> Tensor:
    """Scales (*batch, N, groups) in stored order, padded to the number of stored rows."""
    padding = (0, rows - scales.shape[-2])
    found: Tensor = torch.nn.functional.pad(scales.transpose(-1, -2), padding)
    return found.contiguous()


def _laid(numbers: Tensor, at: Tensor) -> tuple[Tensor, Tensor]:
    """Kept numbers (*batch, N, K / 2) with what pads them, and the metadata of their places; see `of_kept`."""
    *batch, N, half = numbers.shape
    rows, columns = padded(N, 2 * half)
    values = numbers.new_zeros(*batch, rows, columns // 2)
    values[..., :N, :half] = numbers
    # Padding keeps the first two of four.
    shape = (*batch, rows, columns // GROUP)
    nibbles = torch.full(shape, 0b0100, dtype=torch.int32, device=numbers.device)
    nibbles[..., :N, : half // 2] = (at[..., 0] | at[..., 1] << 2).to(torch.int32)
    return values, packed_metadata(nibbles)


def places_of(mask: Tensor) -> Tensor:
    """The places at which a mask (*batch, N, K) with two of each four is True, in the form that `of_kept` takes."""
    return _first_two(mask.unflatten(-1, (-1, GROUP)).to(torch.int8))


def quantized(weight: SparseTensor, code: Code, dtype: torch.dtype) -> SparseTensor:
    """A sparse weight whose kept numbers are rounded to 8 bits, with a scale for each row; see `quantize`."""
    values = weight.values.detach().float()
    N = weight.shape[-2]
    largest = (
        values.abs().amax(-1, keepdim=True) if values.numel() else values.new_zeros(*values.shape[:-1], 1)
    )
    scale = torch.where(largest > 0, largest / code.largest, torch.ones_like(largest))
    # Rounding of the scale may have moved the largest beyond the limit.
    kept = (values / scale).clamp(-code.largest, code.largest)
    channel = scale.squeeze(-1)[..., :N].contiguous()
    if weight.channel is not None:
        channel = channel * weight.channel
    inner = {"values": code.to_values(kept), "metadata": weight.metadata, "channel": channel}
    return SparseTensor._assemble(weight.shape, inner, code.name, dtype)


def _kept(w: Tensor, method: Method) -> Tensor:
    """The places of the two kept numbers of each four, (*batch, N, K / 4, 2), in any order."""
    groups = w.unflatten(-1, (-1, GROUP))
    if method == "transposable":
        return places_of(transposable_mask(w))
    if method == "as_is":
        counts = (groups != 0).sum(-1)
        if not aten.has_no_values(w) and bool((counts > 2).any()):
            at = (counts > 2).nonzero()[0].tolist()
            place = "".join(f"{i}, " for i in at[:-1])
            raise ValueError(
                f"sparsify: weight[{place}{4 * at[-1]}:{4 * at[-1] + 4}] has {int(counts[tuple(at)])} nonzero "
                "elements; method='as_is' allows at most two of every four"
            )
        return _first_two((groups != 0).to(torch.int8))
    # NaN counts as the largest, so that it is seen.
    return _first_two(groups.float().abs().nan_to_num(nan=float("inf")))


def _first_two(sizes: Tensor) -> Tensor:
    """The places of the two largest of each row, of equal ones the first."""
    found: Tensor = sizes.sort(dim=-1, descending=True, stable=True).indices[..., :2]
    return found


def _patterns(device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """The 90 patterns of 4 by 4 with two in each row and column.

    Returns:
        The two places of each of the 6 patterns of a row, (6, 2); which of these the rows of each pattern are, (90, 4);
        and the patterns, bool, (90, 16).
    """
    rows = list(itertools.combinations(range(GROUP), 2))
    found = [
        pattern
        for pattern in itertools.product(range(len(rows)), repeat=GROUP)
        if all(sum(column in rows[i] for i in pattern) == 2 for column in range(GROUP))
    ]
    masks = [[column in rows[i] for i in pattern for column in range(GROUP)] for pattern in found]
    with torch.inference_mode(False):
        return tuple(torch.tensor(x, device=device) for x in (rows, found, masks))  # type: ignore[return-value]


#: The same, kept for each device, so that a CUDA graph can be captured of pruning.
_kept_patterns = functools.cache(_patterns)


def transposable_mask(w: Tensor) -> Tensor:
    """The mask of numbers that "transposable" keeps: bool, of the weight's shape.

    Raises: ValueError: N is not a multiple of 4.

    Example:
        >>> mask = transposable_mask(torch.randn(8, 8))
        >>> mask.sum(0).tolist(), mask.sum(1).tolist()
        ([4, 4, 4, 4, 4, 4, 4, 4], [4, 4, 4, 4, 4, 4, 4, 4])
    """
    *batch, N, K = w.shape
    if N % GROUP:
        raise ValueError(
            f"sparsify: weight is {tuple(w.shape)}; for method='transposable' N must be a multiple of {GROUP}"
        )
    # Tensors that are created during a trace belong to the trace.
    places, rows, masks = (_patterns if aten.has_no_values(w) else _kept_patterns)(w.device)
    blocks = w.detach().float().abs().reshape(*batch, N // GROUP, GROUP, K // GROUP, GROUP).transpose(-3, -2)
    # No matrix product, which autocast and TF32 would round.
    of_rows = blocks[..., places[:, 0]] + blocks[..., places[:, 1]]
    first, *others = (of_rows[..., row, :][..., rows[:, row]] for row in range(GROUP))
    scores = first
    for other in others:
        scores = scores + other
    best = masks[scores.argmax(-1)]
    found: Tensor = best.unflatten(-1, (GROUP, GROUP)).transpose(-3, -2).reshape(w.shape)
    return found


def _of_torch(weight: Any) -> SparseTensor:
    """A semi-structured weight of torch."""
    if getattr(weight, "packed", weight) is None:
        raise ValueError(
            f"sparsify: weight is the transpose of torch's semi-structured tensor, {tuple(weight.shape)}; give the "
            "tensor itself, whose rows are 2:4, without .t()"
        )
    is_whole = tuple(weight.shape) == padded(*weight.shape)
    if (
        type(weight).__name__ != "SparseSemiStructuredTensorCUTLASS"
        or weight.dtype not in DTYPES
        or not is_whole
    ):
        return sparsify(weight.to_dense(), method="as_is")
    N, K = weight.shape
    metadata = weight.meta.view(torch.int32).view(K // BLOCK, N)
    result = SparseTensor((N, K), weight.packed, metadata)
    check_metadata(metadata, "sparsify")
    return result
