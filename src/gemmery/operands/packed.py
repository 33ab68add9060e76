"""A weight of packed numbers: integers, floats or codes of a few bits, with scales for groups; see `formats`."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
import triton.language as tl
from torch import Tensor
from torch._C import _are_functorch_transforms_active, _len_torch_dispatch_stack
from torch.compiler import is_compiling
from triton.tools.tensor_descriptor import TensorDescriptor

from ..epilogues.device import compiled
from ..formats.base import FORMATS
from ..formats.packing import LINE, STRIP, block_columns, runs
from ..formats.pieces import is_per_row
from ..formats.tensor import QuantizedTensor
from ..formats.weight import PackedWeight
from ..kernels import decoders
from ..kernels.any_width_packed import StageFormat
from ..kernels.any_width_stage import ROWS
from ..kernels.packed import load_packed, unpack
from .base import Access, Layout, Multiply, Operand, Spec, StageMap, batch_axes, negated, refuse_gradients
from .dense import DenseOperand

if TYPE_CHECKING:
    from ..devices import Device
    from ..problem import Config, Problem


@dataclass(frozen=True, slots=True)
class Packed(Spec):
    """Packed numbers, unpacked in registers; the layout is that of the unpacked matrix, with steps in matrices.

    Attributes:
        format_name: of the format in `formats.FORMATS`.
        packed_bits: of a number.
        group: rows of B, along K, that share a scale; 0 if none do.
        shifts: what comes with the scales: "zeros", "offsets" or "" for nothing.
        wide: whether scales are fp32, rather than of A's type.
        matrices: the number of matrices, which are contiguous in memory.
        params: the layouts of the scales and the shifts that it has.
    """

    format_name: str = ""
    packed_bits: int = 0
    group: int = 0
    shifts: str = ""
    wide: bool = False
    matrices: int = 1
    params: tuple[Layout, ...] = ()

    @classmethod
    def of(
        cls, dtype: torch.dtype, format: str, bits: int, group: int = 0, shifts: str = "", wide: bool = False,
        *, N: int, K: int, steps: tuple[int, ...] = (), matrices: int = 1, aligned: Sequence[bool] = (),
    ) -> Packed:  # fmt: skip
        """The spec of a weight (N, K).

        Args:
            aligned: whether the addresses of words, scales and shifts are multiples of 16 bytes; all by default.
        """
        types = [torch.float32 if wide else dtype] * bool(group) + [dtype] * bool(group and shifts)
        is_aligned = (*aligned, True, True, True)
        columns = -(-N // STRIP) * STRIP
        params = tuple(Layout(kind, (), columns, 1, is_aligned[1 + i]) for i, kind in enumerate(types))
        col = -(-K // 16) * 16
        return cls(
            dtype, steps, 1, col, is_aligned[0], None, format, bits, group, shifts, wide, matrices, params
        )

    @property
    def kind(self) -> str:
        """Formats of as many bits share tiles."""
        return f"packed{self.packed_bits}"

    @property
    def format(self) -> str:
        """The format's name."""
        return self.format_name

    @property
    def unpacks(self) -> bool:
        """They are."""
        return True

    @property
    def bits(self) -> float:
        """Of a code."""
        return self.packed_bits

    @property
    def stored(self) -> torch.dtype:
        """Of words."""
        return torch.int32

    def strides_of(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Words are contiguous."""
        return torch.empty(shape, device="meta").stride()

    @property
    def staged(self) -> StageFormat | None:
        """See `Spec.staged`: groups of a power of two, with scales in the type of a."""
        format = FORMATS[self.format_name]
        fits = not self.group or (self.group >= STRIP and self.group.bit_count() == 1)
        known = (format.code, self.packed_bits) in decoders.DECODERS
        if self.wide or self.matrices != 1 or not (fits and known):
            return None
        return StageFormat(format.code, self.packed_bits, self.group, self.shifts, format.zero)

    @property
    def layouts(self) -> tuple[Layout, ...]:
        """The words, then scales and shifts."""
        return (self, *self.params)

    def shapes(self, rows: int, cols: int, batch: tuple[int, ...], is_b: bool) -> list[tuple[int, ...]]:
        """See `Spec.shapes`; words are (matrices, strips, lines, LINE), which have no strides."""
        lines = 4 * -(-rows // block_columns(self.packed_bits))
        groups = self.matrices * -(-rows // self.group) if self.group else 0
        words = (self.matrices, -(-cols // STRIP), lines, LINE)
        return [words, *[(groups, x.row) for x in self.params]]

    def bytes(self, rows: int, cols: int, batch: tuple[int, ...]) -> int:
        """Bytes of each matrix, with scales and shifts."""
        groups = -(-rows // self.group) if self.group else 0
        each = (4 if self.wide else 2) + (2 if self.shifts else 0)
        count = 1
        for size in batch:
            count *= size
        return min(count, self.matrices) * cols * (rows * self.packed_bits // 8 + groups * each)

    def usual(self, row: int, col: int) -> Packed:
        params = tuple(replace(x, row=0, aligned=True) for x in self.params)
        return replace(self, steps=(), row=row, col=col, aligned=True, matrices=1, params=params)

    def suits_tma(self, problem: Problem, is_b: bool) -> bool:
        """A descriptor over halves of packed columns has no dimension for a batch."""
        aligned = self.aligned and all(x.aligned for x in self.params)
        return aligned and not (problem.paired and problem.batch)

    @property
    def has_aligned_rows(self) -> bool:
        """All matrices are as aligned as the first one."""
        return self.aligned

    def refusal(self, problem: Problem, config: Config) -> str | None:
        if not config.swap or config.rest_n:
            return "packed weights need swap=True and, in the tile schedule, a block_n that is a power of two"
        if config.block_k % (step := block_columns(self.packed_bits)):
            return f"block_k must be a multiple of {step} for {self.packed_bits} bits"
        if problem.paired and config.block_n < 2 * STRIP:
            return f"block_n must be at least {2 * STRIP} for halves of packed columns"
        return None

    def access(self, problem: Problem, is_b: bool, tma: bool) -> PackedAccess:
        return PackedAccess(self, problem, tma)

    def of_sum(self, epilogue: Any, device: Device) -> Any:
        """A device function of an epilogue, for a sum of products of `unpacker`'s numbers."""
        kind = getattr(tl, str(self.dtype).removeprefix("torch."))
        unit = decoders.unit_of(FORMATS[self.format_name].code, self.packed_bits, kind, asm_of(device))
        return _enlarged(epilogue, unit) if unit else epilogue

    def __str__(self) -> str:
        group = f"/{self.group}" if self.group else ""
        return f"{self.format_name}{group}{f'+{self.shifts}' if self.shifts else ''}"


class PackedAccess(Access):
    """The loader of a packed weight and its arguments."""

    def __init__(self, spec: Packed, problem: Problem, tma: bool) -> None:
        self.spec, self.problem, self.tma = spec, problem, tma
        N, K = problem.N, problem.K
        # A block of words is four lines of a strip.
        self.step = block_columns(spec.packed_bits)
        self.strips, self.lines = -(-N // STRIP), -(-K // self.step) * 4
        self.groups = -(-K // spec.group) if spec.group else 0
        self.columns = self.strips * STRIP
        self.strides = (negated(spec), self.strips, self.lines, self.groups, self.columns)

    def loader(self) -> Any:
        device = self.problem.device
        waits = device.target.family == "hopper"
        return loader(self.spec, asm_of(device), waits, self.tma, self.problem.paired)

    def unpacker(self, waits: bool) -> Any:
        """The device function that turns words into numbers; see `kernels.packed.unpack`."""
        return unpacker(self.spec, asm_of(self.problem.device), waits)

    def argument(self, tensors: Sequence[Tensor], block_rows: int, block_cols: int) -> Any:
        """The words."""
        words = tensors[0]
        if not self.tma:
            return words
        strips, lines = self.spec.matrices * self.strips, self.lines
        block = [block_cols // STRIP, block_rows * 4 // self.step, LINE]
        if self.problem.paired:
            half = strips // 2
            shape, strides = [2, half, lines, LINE], [half * lines * LINE, lines * LINE, LINE, 1]
            return TensorDescriptor(words, shape, strides, [2, block[0] // 2, *block[1:]])
        return TensorDescriptor(words, [strips, lines, LINE], [lines * LINE, LINE, 1], block)

    def group_params(self, tensors: Sequence[Tensor], block_rows: int, block_cols: int) -> list[Any]:
        filled: list[Any] = [*tensors[1:], None, None][:2]
        if not self.tma:
            return filled
        return [None if x is None else self._descriptor(x, block_rows, block_cols) for x in filled]

    def stage_maps(self, tensors: Sequence[Tensor], box: int, step: int) -> list[StageMap]:
        words, *params = tensors
        lines = step * 4 // self.step
        shape, strides = (self.strips, self.lines, LINE), (self.lines * LINE, LINE, 1)
        found = [
            StageMap(
                words,
                shape,
                strides,
                (ROWS // STRIP, lines, LINE),
                (box // STRIP, lines, LINE),
                is_swizzled=True,
            )
        ]
        groups = max(step // self.spec.group, 1) if self.spec.group else 1
        # If there are several groups, `ROWS` rows must be stored together.
        of_params = groups, box if groups == 1 else ROWS
        found += [
            StageMap(each, (self.groups, self.columns), (self.columns, 1), (groups, ROWS), of_params)
            for each in params
        ]
        return found

    def _descriptor(self, params: Tensor, block_rows: int, block_cols: int) -> TensorDescriptor:
        rows, columns = self.spec.matrices * self.groups, self.columns
        groups = max(block_rows // self.spec.group, 1)
        if self.problem.paired:
            shape, strides = [rows, 2, columns // 2], [columns, columns // 2, 1]
            return TensorDescriptor(params, shape, strides, [groups, 2, block_cols // 2])
        return TensorDescriptor(params, [rows, columns], [columns, 1], [groups, block_cols])


#: The tensors that a packed weight without a permutation may have, in the order of `PackedOperand.values`.
PARTS = ("words", "scales", "zeros", "offsets", "channel")


class PackedOperand(Operand):
    """A packed weight (*batch, N, K) as the second operand, or its transpose.

    Args:
        weight: without a permutation.
        transposed: the operand is the weight as it is, (*batch, N, K), as for gradients.
    """

    def __init__(self, weight: QuantizedTensor, transposed: bool = False) -> None:
        self.weight, self.transposed = weight, transposed
        self._parts = (weight.words, weight.scales, weight.zeros, weight.offsets, weight.channel)
        self.matrix = meta_proxy(weight, weight.words.device, transposed)
        self.tensors = tuple([x for x in self._parts if x is not None])
        self.places = tuple([i for i, x in enumerate(self._parts[:4]) if x is not None])
        self.launched = tuple([x for x in self._parts[:4] if x is not None])

    @property
    def values(self) -> tuple[Any, ...]:
        """Of each of `PARTS`, the tensor or None."""
        return self._parts

    @property
    def is_packed(self) -> bool:
        """They are."""
        return True

    @property
    def strip(self) -> int:
        return STRIP

    @property
    def outer(self) -> Tensor | None:
        """A number for each row of the weight."""
        channel = self.weight.channel
        if channel is None or self.transposed or not self.has_outer:
            return None
        return channel if channel.dim() == 1 else channel.unsqueeze(-2)

    @property
    def outer_place(self) -> int:
        return PARTS.index("channel")

    def named(self, name: str) -> list[tuple[str, Tensor]]:
        own = zip(PARTS, self._parts, strict=True)
        return [(f"{name}'s {part}", x) for part, x in own if x is not None]

    def lowered(self, op: str, names: tuple[str, str], dtype: torch.dtype) -> Operand:
        if self.weight.dtype != dtype:
            first, second = names
            raise TypeError(
                f"{op}: autocast brings {first} to {dtype}, and {second} is packed for {self.weight.dtype}; "
                f"use autocast with that type, or {second}.to({dtype})"
            )
        return self

    def in_torch(self) -> Tensor:
        if self.transposed:
            return self.weight.dequantize()
        return self.weight.unscaled().dequantize().mT

    def loadable(self) -> Operand:
        """A transpose is unpacked, and is short-lived."""
        if not self.transposed:
            return self
        # Launches are made of operands.
        from ..launch.unpacking import unpacked

        return DenseOperand(unpacked(self.weight))

    def spec(self, matrix: Spec, along: Sequence[Layout], problem: Problem) -> Spec:
        w = self.weight
        shifts = "zeros" if w.zeros is not None else "offsets" if w.offsets is not None else ""
        wide = w.scales is not None and w.scales.dtype == torch.float32
        return Packed.of(
            w.dtype, w.format.name, w.format.bits, w.group_size, shifts, wide, N=problem.N, K=problem.K,
            steps=matrix.steps, matrices=w.shape[:-2].numel(), aligned=[x.data_ptr() % 16 == 0 for x in self.launched],
        )  # fmt: skip

    @property
    def text(self) -> str:
        w = self.weight
        return text_of(w.format_name, w.dtype, self._parts, self.transposed)

    @property
    def sizes(self) -> list[int]:
        """The group size, and the weight's shape."""
        return [self.weight.group_size, *self.weight.shape]

    @classmethod
    def rebuild(cls, facts: Sequence[str], tensors: Sequence[Tensor], sizes: Sequence[int]) -> PackedOperand:
        """See `operands.rebuild`."""
        format, dtype, there, transposed = facts
        group_size, *shape = sizes
        left = iter(tensors)
        inner = {
            name: next(left) if is_there == "1" else None for name, is_there in zip(PARTS, there, strict=True)
        }
        weight = QuantizedTensor._assemble(
            tuple(shape), FORMATS[format], getattr(torch, dtype), int(group_size), inner
        )
        return cls(weight, transposed == "T")

    def axes(self, rows: str, columns: str) -> list[tuple[str, ...]]:
        found: list[tuple[str, ...]] = []
        for name, x in zip(PARTS, self._parts, strict=True):
            if x is None:
                continue
            if name == "channel":
                found.append((*batch_axes(x, 1), columns) if is_per_row(self.weight) else ("",))
            elif name == "words":
                found.append((*batch_axes(x, 3), columns, rows, ""))
            else:
                found.append((*batch_axes(x, 2), rows, columns))
        return found

    def sizes_of_part(self, parts: Callable[[str], int]) -> list[int]:
        return [self.weight.group_size, *shape_of_part(self.weight, parts)]

    def grain(self, axis: str) -> int:
        if axis == "K":
            return math.lcm(block_columns(self.weight.format.bits), self.weight.group_size or 1)
        return STRIP if axis == "N" else 1

    def mapped(self, dims: Sequence[int | None], rank: int, size: int, everywhere: bool) -> Operand:
        if any(dim is not None for dim in dims):
            raise NotImplementedError(
                "vmap: a packed weight can't be mapped; map over x, or use a batch of weights"
            )
        return self

    def gradients(
        self, a: Tensor, grad: Tensor, multiply: Multiply, needs: tuple[bool, Sequence[bool]]
    ) -> tuple[Tensor | None, list[Tensor | None]]:
        """The gradient of a alone: a packed weight has none."""
        refuse_gradients(self.named("the weight"), needs[1])
        of_a = None
        if needs[0]:
            other = PackedOperand(self.weight, not self.transposed)
            of_a = multiply(grad, other).sum_to_size(a.shape)
        return of_a, [None] * len(self.tensors)


def shape_of_part(weight: PackedWeight, parts: Callable[[str], int]) -> list[int]:
    """The shape of a rank's part of a weight; see `Operand.sizes_of_part`."""
    count = weight.dim() - 2
    names = (*[f"b-{count - i}" for i in range(count)], "N", "K")
    return [size // parts(name) for size, name in zip(weight.shape, names, strict=True)]


def text_of(format: str, dtype: torch.dtype, parts: Sequence[Tensor | None], transposed: bool = False) -> str:
    """`PackedOperand.text`; written so that torch.compile can trace it."""
    there = "".join(["0" if x is None else "1" for x in parts])
    name = str(dtype).removeprefix("torch.")
    return f"packed:{format}:{name}:{there}:{'T' if transposed else 'N'}"


@functools.lru_cache(1024)
def _meta_proxy(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, transposed: bool) -> Tensor:
    *batch, rows, columns = shape
    strides = torch.empty((*batch, 1), device="meta").stride()[:-1]
    made = torch.empty_strided((*batch, rows, columns), (*strides, 0, 0), dtype=dtype, device=device)
    return made if transposed else made.mT


def meta_proxy(weight: PackedWeight, device: torch.device, transposed: bool) -> Tensor:
    """A tensor of the type of a packed weight (*batch, N, K); its strides count matrices.

    Args:
        device: the weight's.
        transposed: whether its shape is that of the weight; else it is (*batch, K, N).
    """
    if is_compiling() or _len_torch_dispatch_stack() or _are_functorch_transforms_active():
        # A tensor that is created inside a mode or a transform belongs to it.
        return _meta_proxy.__wrapped__(tuple(weight.shape), weight.dtype, device, transposed)
    # Reading these of the weight itself takes a microsecond each, since it is a subclass of Tensor.
    shape, dtype, *_ = weight.static
    return _meta_proxy(shape, dtype, device, transposed)


# ---------------------------------------------------------------------------------------------------------------------
# Device functions for a format

_UNPACK = """\
def unpack_{name}(words, scale, shift, ROWS: tl.constexpr, COLS: tl.constexpr, SPREAD: tl.constexpr):
    return UNPACK(
        words, scale, shift, ROWS, COLS, SPREAD, DECODE, RUNS, "{code}", {per}, {zero}, {offsets}, {dtype}, {asm},
        {waits}
    )
"""
_LOADER = """\
def load_{name}(
    x, shape, strides, sizes, batch, row, col, ROWS: tl.constexpr, COLS: tl.constexpr, CHECK_ROWS: tl.constexpr,
    CHECK_COLS: tl.constexpr, WIDE: tl.constexpr
):
    return LOAD(
        x, shape, strides, sizes, batch, row, col, ROWS, COLS, CHECK_ROWS, CHECK_COLS, WIDE,
        UNPACK, {per}, {group}, {tma}, {paired}
    )
"""
_ENLARGED = """\
def enlarged_{name}(
    acc, args, shape, sizes, batch, row, col, ROWS: tl.constexpr, COLS: tl.constexpr, WIDE: tl.constexpr
):
    return EPILOGUE(acc * {factor}, args, shape, sizes, batch, row, col, ROWS, COLS, WIDE)
"""


@functools.lru_cache(1024)
def _enlarged(epilogue: Any, unit: int) -> Any:
    text = _ENLARGED.format(name=epilogue.__name__, factor=2.0**unit)
    return compiled(text, {"EPILOGUE": epilogue})


def unpacker(spec: Packed, asm: int, waits: bool) -> Any:
    """The device function that turns a format's words into numbers; see `kernels.packed.unpack`."""
    return _unpacker(spec.format_name, spec.packed_bits, spec.shifts, spec.dtype, asm, waits)


@functools.cache
def _unpacker(name: str, bits: int, shifts: str, dtype: torch.dtype, asm: int, waits: bool) -> Any:
    format = FORMATS[name]
    if (format.code, bits) not in decoders.DECODERS:
        known = ", ".join(f"{code} of {bits} bits" for code, bits in decoders.DECODERS)
        raise NotImplementedError(
            f"format {format.name!r} has no decoder for {format.code!r} of {bits} bits, so that no kernel can "
            f"multiply it; kernels.decoders.DECODERS has {known}"
        )
    facts = {
        "code": format.code, "per": 32 // bits, "zero": format.zero, "offsets": shifts == "offsets",
        "dtype": "tl." + str(dtype).removeprefix("torch."), "asm": asm, "waits": waits,
    }  # fmt: skip
    space = {
        "UNPACK": unpack,
        "DECODE": decoders.DECODERS[format.code, bits].device,
        "RUNS": tl.constexpr(runs(format.order, format.bits)),
    }
    return compiled(_UNPACK.format(name=_name(facts), **facts), space)


def loader(spec: Packed, asm: int, waits: bool, tma: bool, paired: bool) -> Any:
    """The loader of a format; see `kernels.packed.load_packed`."""
    return _loader(unpacker(spec, asm, waits), 32 // spec.packed_bits, spec.group, tma, paired)


@functools.cache
def _loader(made: Any, per: int, group: int, tma: bool, paired: bool) -> Any:
    facts = {"per": per, "group": group, "tma": tma, "paired": paired}
    name = made.__name__.removeprefix("unpack_") + "_" + _name(facts)
    return compiled(_LOADER.format(name=name, **facts), {"LOAD": load_packed, "UNPACK": made})


def _name(facts: dict[str, Any]) -> str:
    return "_".join(str(x).replace(".", "_") for x in facts.values())


def asm_of(device: Device) -> int:
    """The compute capability whose PTX decoders may use; 0 for AMD and the interpreter."""
    name = device.target.name
    return int(name.removeprefix("sm_")) if name.startswith("sm_") else 0
