"""How a packed weight reaches the kernel: its loader, made for the format, and its arguments."""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from .epilogues.device import compiled
from .formats.base import FORMATS
from .formats.packing import LINE, STRIP, block_columns, runs
from .kernels import decoders
from .kernels.packed import load_packed, unpack
from .problem import Config, Packing, Problem

#: What does the work for each kind of code, by `Format.code` and bits, which tell the two of integers apart.
DECODERS = {
    ("int", 4): decoders.decode_int4,
    ("int", 8): decoders.decode_int8,
    ("e2m1", 4): decoders.decode_e2m1,
    ("nf4", 4): decoders.decode_nf4,
    ("e4m3", 8): decoders.decode_e4m3,
    ("e5m2", 8): decoders.decode_e5m2,
}

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
        UNPACK, {per}, {group}, {described}, {paired}
    )
"""
_ENLARGED = """\
def enlarged_{name}(
    acc, args, shape, sizes, batch, row, col, ROWS: tl.constexpr, COLS: tl.constexpr, WIDE: tl.constexpr
):
    return EPILOGUE(acc * {factor}, args, shape, sizes, batch, row, col, ROWS, COLS, WIDE)
"""


def of_sum(epilogue: Any, packing: Packing, dtype: torch.dtype, asm: int) -> Any:
    """A device function of an epilogue, for a sum of which `unpacker`'s numbers were factors."""
    format = FORMATS[packing.format]
    unit = decoders.unit_of(format.code, packing.bits, getattr(tl, str(dtype).removeprefix("torch.")), asm)
    return _enlarged(epilogue, unit) if unit else epilogue


@functools.lru_cache(1024)
def _enlarged(epilogue: Any, unit: int) -> Any:
    text = _ENLARGED.format(name=epilogue.__name__, factor=2.0**unit)
    return compiled(text, {"EPILOGUE": epilogue})


@functools.cache
def unpacker(packing: Packing, dtype: torch.dtype, asm: int, waits: bool) -> Any:
    """What turns a format's words into numbers; see `kernels.packed.unpack`."""
    format = FORMATS[packing.format]
    if (format.code, packing.bits) not in DECODERS:
        known = ", ".join(f"{code} of {bits} bits" for code, bits in DECODERS)
        raise NotImplementedError(
            f"format {format.name!r} has no decoder for {format.code!r} of {packing.bits} bits, so that no kernel can "
            f"multiply it; packed_access.DECODERS has {known}"
        )
    facts = {
        "code": format.code, "per": 32 // packing.bits, "zero": format.zero, "offsets": packing.shifts == "offsets",
        "dtype": "tl." + str(dtype).removeprefix("torch."), "asm": asm, "waits": waits,
    }  # fmt: skip
    space = {
        "UNPACK": unpack,
        "DECODE": DECODERS[format.code, packing.bits],
        "RUNS": tl.constexpr(runs(format.order, format.bits)),
    }
    return compiled(_UNPACK.format(name=_name(facts), **facts), space)


@functools.cache
def loader(packing: Packing, dtype: torch.dtype, asm: int, waits: bool, described: bool, paired: bool) -> Any:
    """The loader of a format; see `kernels.packed.load_packed`."""
    made = unpacker(packing, dtype, asm, waits)
    facts = {"per": 32 // packing.bits, "group": packing.group, "described": described, "paired": paired}
    name = made.__name__.removeprefix("unpack_") + "_" + _name(facts)
    return compiled(_LOADER.format(name=name, **facts), {"LOAD": load_packed, "UNPACK": made})


def _name(facts: dict[str, Any]) -> str:
    return "_".join(str(x).replace(".", "_") for x in facts.values())


def refusal(problem: Problem, config: Config) -> str | None:
    """Why a config can't run a problem with a packed B; None if it can."""
    packing = problem.packing
    assert packing is not None
    if not config.swap or config.rest_n:
        return "packed weights need swap, in the tile schedule, and a block_n that is a power of two"
    if config.block_k % (step := block_columns(packing.bits)):
        return f"block_k must be a multiple of {step} for {packing.bits} bits"
    if problem.paired and config.block_n < 2 * STRIP:
        return f"block_n must be at least {2 * STRIP} for halves of packed columns"
    return None


def asm_of(problem: Problem) -> int:
    """The compute capability whose PTX decoders may use; 0 for AMD and the interpreter."""
    name = problem.device.target.name
    return int(name.removeprefix("sm_")) if name.startswith("sm_") else 0


class PackedAccess:
    """How a packed B reaches the kernel; what `launch._Access` is for a plain one."""

    def __init__(self, problem: Problem, described: bool) -> None:
        packing = problem.packing
        assert packing is not None
        self.packing, self.problem, self.described = packing, problem, described
        N, K = problem.N, problem.K
        # A block of words is four lines of a strip.
        self.step = block_columns(packing.bits)
        self.strips, self.lines = -(-N // STRIP), -(-K // self.step) * 4
        self.groups = -(-K // packing.group) if packing.group else 0
        self.columns = self.strips * STRIP
        steps = tuple(-step for step in problem.b.steps)
        self.strides = (steps, self.strips, self.lines, self.groups, self.columns)

    def loader(self) -> Any:
        """The device function that loads a block."""
        p = self.problem
        waits = p.device.target.family == "hopper"
        return loader(self.packing, p.b.dtype, asm_of(p), waits, self.described, p.paired)

    def argument(self, words: Tensor, block_k: int, block_n: int) -> Any:
        """The words."""
        if not self.described:
            return words
        strips, lines = self.packing.matrices * self.strips, self.lines
        block = [block_n // STRIP, block_k * 4 // self.step, LINE]
        if self.problem.paired:
            half = strips // 2
            shape, strides = [2, half, lines, LINE], [half * lines * LINE, lines * LINE, LINE, 1]
            return TensorDescriptor(words, shape, strides, [2, block[0] // 2, *block[1:]])
        return TensorDescriptor(words, [strips, lines, LINE], [lines * LINE, LINE, 1], block)

    def shared(self, given: tuple[Tensor, ...], block_k: int, block_n: int) -> list[Any]:
        """Scales and shifts, or None for what there is not."""
        filled: list[Any] = [*given, None, None][:2]
        if not self.described:
            return filled
        return [None if x is None else self._descriptor(x, block_k, block_n) for x in filled]

    def _descriptor(self, shared: Tensor, block_k: int, block_n: int) -> TensorDescriptor:
        rows, columns = self.packing.matrices * self.groups, self.columns
        groups = max(block_k // self.packing.group, 1)
        if self.problem.paired:
            shape, strides = [rows, 2, columns // 2], [columns, columns // 2, 1]
            return TensorDescriptor(shared, shape, strides, [groups, 2, block_n // 2])
        return TensorDescriptor(shared, [rows, columns], [columns, 1], [groups, block_n])
