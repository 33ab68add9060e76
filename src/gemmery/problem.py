"""The plain values that stages pass on: the product, and the knobs of its computation.

A `Problem` holds everything that decides which code runs and nothing else, so that it can be the key of every cache.
It is made from tensors' shapes and strides by `layout` and never sees data.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Literal

import torch

from . import schedules
from .devices import Device
from .dtypes import OUT_DTYPES, Precision
from .operands.base import Layout, Spec, Traced


@dataclass(frozen=True, slots=True)
class Fusion(Traced):
    """A traced epilogue; its operands are over (batch, M, columns).

    Attributes:
        paired: whether the columns of the product are two halves in one tile, so that the output has
            half as many.
        reduces: whether it leaves parts of reduced rows.
        stores: whether the kernel stores a result of it, or it stores all itself.
        ahead: the texts of the same in two functions, or None; see `epilogues.lower.Program`.
        both: the text of the same as a function of two results, or None; see there.
        place: which of the operands `ahead` loads or `both` returns, or None.
        whole: whether it needs tiles as wide as the product.
    """

    paired: bool = False
    reduces: bool = False
    stores: bool = True
    ahead: tuple[str, str] | None = None
    both: str | None = None
    place: int | None = None
    whole: bool = False

    @property
    def is_identity(self) -> bool:
        """Whether the product itself is all that is stored."""
        is_alone = self.stores and not (self.operands or self.numbers or self.paired or self.reduces)
        return is_alone and "\n    return tl.broadcast_to(acc, (ROWS, COLS))\n" in self.source

    @property
    def matrix(self) -> Layout | None:
        """The one matrix that it reads or writes, if `ahead` loads it or `both` returns it.

        An operand of the output's shape whose rows or columns are all the same one is no matrix in memory.
        """
        if self.place is None or len(self.matrix_operands) != 1:
            return None
        operand = self.operands[self.place]
        return operand if operand.row and operand.col else None


@dataclass(frozen=True, slots=True)
class Problem:
    """`out[z] = epilogue(a[z] @ b[z])` for every z of a batch; a is (M, K), b is (K, N), out is (M, N).

    Attributes:
        batch: the shape of the batch, with mergeable dimensions merged; () for a single product.
        epilogue: the name of the epilogue: identity, scale, add_row or add_matrix; or "fused".
        addend: the layout of the matrix or row that the epilogue adds, if it adds one.
        fusion: the traced epilogue, if `epilogue` is "fused".
        precision: how fp32 operands are multiplied: "ieee", "tf32" or "tf32x3".
        fast_accum: whether fp8 products may be accumulated at the tensor cores' reduced precision.
        batch_invariant: whether a row of the result must have the same bits whatever M and the batch are.
        device: the row of the device table that it runs on.
    """

    M: int
    N: int
    K: int
    batch: tuple[int, ...]
    a: Spec
    b: Spec
    out: Layout
    device: Device
    epilogue: str = "identity"
    addend: Layout | None = None
    precision: Precision = "ieee"
    fast_accum: bool = False
    batch_invariant: bool = False
    fusion: Fusion | None = None

    @property
    def paired(self) -> bool:
        """Whether the two halves of the product's columns become one column of the output each; see `Fusion`."""
        return self.fusion is not None and self.fusion.paired

    @property
    def out_n(self) -> int:
        """Columns of the output."""
        return self.N // 2 if self.paired else self.N

    @property
    def extras(self) -> tuple[Layout, ...]:
        """Matrices that the epilogue reads and writes besides the product and the output."""
        if self.fusion is not None:
            return self.fusion.operands
        return () if self.addend is None else (self.addend,)

    @property
    def wants_subtiles(self) -> bool:
        """Whether a traced epilogue takes many registers: for more as large as the output, or for random numbers."""
        return self.fusion is not None and bool(self.fusion.matrix_operands or self.fusion.draws)

    @property
    def wants_room(self) -> bool:
        """Whether a tile's end takes more than usual: registers, see `wants_subtiles`, or shared memory.

        Elements that are wider than those of the operands' usual result take more of it, and so does a matrix that is
        added: Triton moves each block of it through shared memory.
        """
        is_stored = self.fusion is None or self.fusion.stores
        is_wide = is_stored and self.out.dtype.itemsize > OUT_DTYPES[self.a.dtype][0].itemsize
        return self.wants_subtiles or self.epilogue == "add_matrix" or is_wide

    @property
    def layouts(self) -> tuple[Layout, ...]:
        """The layouts of all tensors of a launch, in its order: those of a, of b, the output, the epilogue's."""
        return (*self.a.layouts, *self.b.layouts, self.out, *self.extras)

    @property
    def summed(self) -> torch.dtype:
        """The type of the sum."""
        return self.b.summed

    @property
    def matrices(self) -> int:
        """The number of products in the batch."""
        count = 1
        for size in self.batch:
            count *= size
        return count

    @property
    def ragged(self) -> str:
        """The kind of groups that a has, whose ends only the GPU knows; see `Spec.ragged`."""
        return self.a.ragged

    @property
    def by_blocks(self) -> Spec | None:
        """The operand by whose stored blocks tiles step along K, if there is one; see `operands.blocks`."""
        return next((x for x in (self.a, self.b) if x.by_blocks), None)

    @property
    def has_ranges(self) -> bool:
        """Whether tiles have ranges of K that the host does not know."""
        return self.ragged == "k" or self.by_blocks is not None

    def tile_rows(self, block_m: int) -> int:
        """The number of rows of tiles of this height, in all matrices; for groups of rows, the largest possible one."""
        if self.ragged != "rows":
            return self.matrices * -(-self.M // block_m)
        # Each group may have a tile that is not full, and so may the rows after the last one.
        groups = min(self.matrices + 1, self.M)
        return (self.M + groups * (block_m - 1)) // block_m

    @property
    def predicted(self) -> Problem:
        """The product whose time is predicted in place of this one's: if groups are ragged, the product of equal
        groups.

        Its number of nonempty groups is that of a random assignment of rows to groups. With a block-sparse operand, it
        is the product of lines with as many blocks as there are on average.
        """
        if (sparse := self.by_blocks) is not None:
            return replace(self, K=sparse.mean_k)
        if not self.ragged:
            return self
        p = self
        inner = p.a.ungrouped
        if self.ragged == "k":
            return replace(p, K=-(-p.K // max(p.matrices, 1)), a=inner)
        groups = max(round(p.matrices * (1 - math.exp(-p.M / p.matrices))), 1) if p.matrices else 1
        M = -(-p.M // groups)
        batch = (groups,) if p.batch else ()
        steps = (M * p.a.row,) if p.batch else ()
        out = replace(p.out, steps=(M * p.out.row,) if p.batch else ())
        return replace(p, M=M, batch=batch, a=replace(inner, steps=steps), out=out)

    @property
    def takes_numbers(self) -> bool:
        """Whether every launch receives alpha and beta; otherwise, both are 1."""
        own = 0 if self.fusion is None else self.fusion.numbers
        return self.epilogue in ("scale", "add_matrix") or own + self.a.numbers + self.b.numbers > 0

    @property
    def flops(self) -> int:
        """Floating-point (or integer) operations: a multiplication and an addition per inner step."""
        K = self.K if self.by_blocks is None else self.by_blocks.mean_k
        return 2 * self.matrices * self.M * self.N * K

    @property
    def bytes(self) -> int:
        """The fewest bytes that can be moved: each distinct matrix once."""
        outputs = sum(x.bytes(self.M, self.out_n, self.batch) for x in (self.out, *self.extras))
        read = self.a.bytes(self.M, self.K, self.batch) + self.b.bytes(self.K, self.N, self.batch)
        return read + outputs

    def __str__(self) -> str:
        batch = "x".join(map(str, self.batch)) + " of " if self.batch else ""
        is_plain = self.epilogue == "identity" or (self.fusion is not None and self.fusion.is_identity)
        fused = "" if is_plain else f" +{self.fusion or self.epilogue}"
        fused += f" {self.precision}" if self.precision != "ieee" else ""
        fused += " fast" if self.fast_accum else ""
        fused += self.b.note
        invariant = " invariant" if self.batch_invariant else ""
        return f"{batch}{self.M}x{self.N}x{self.K} {self.a} @ {self.b} -> {self.out}{fused}{invariant}"


_INTEGERS = ("block_m", "block_n", "block_k", "group_m", "num_warps", "num_stages", "tail", "split_k")


@dataclass(frozen=True, slots=True)
class Config:
    """The knobs of a kernel.

    Attributes:
        block_m, block_n, block_k: the tile of the output that a program computes, and the K step. They are powers of
            two, except that block_n may be the sum of two, such as 192, and that the schedules for tiles of any width
            accept multiples of 8.
        group_m: the height, in tiles, of the bands in which tiles are visited. 0 derives the height from the sizes;
            only the schedules for tiles of any width accept it.
        num_warps: the number of warps in a program.
        num_stages: the number of blocks of A and B in flight; for "sliced_sparse" the steps that are loaded at a time.
        schedule: how the programs of a launch walk over its tiles, one of `schedules.REGISTRY`: "tile", "persistent",
            "specialized", "cooperative", "pingpong", "cluster", "sliced_k" or "sliced_sparse". Not every schedule
            supports every knob.
        loader: "pointer" supports any strides; "descriptor" needs TMA and 16-byte alignment.
        split_store: store a tile as two halves, which halves the staging memory.
        tail: the number of parts of tiles that would not fill the last wave, or that extend over the last column: 2 or
            4 along N, or 8, 2 along M by 4 along N; 1 leaves the tiles whole.
        split_k: the number of parts along K of a tile, each for one program. The schedule decides whether all tiles are
            split, or only those that would not fill the last wave.
        swap: compute the transposed product, so that few rows are the narrow side of the tensor cores.
        stream: B is read once and need not stay in L2 (from Triton 3.9 on; no effect before).
    """

    block_m: int
    block_n: int
    block_k: int
    group_m: int = 8
    num_warps: int = 4
    num_stages: int = 3
    schedule: str = schedules.DEFAULT
    loader: Literal["pointer", "descriptor"] = "pointer"
    split_store: bool = False
    tail: int = 1
    split_k: int = 1
    swap: bool = False
    stream: bool = False

    def __post_init__(self) -> None:
        for name in _INTEGERS:
            if type(getattr(self, name)) is not int:
                raise ValueError(f"Config: {name} is {getattr(self, name)!r}; it must be an integer")
        for name in ("split_store", "swap", "stream"):
            if type(getattr(self, name)) is not bool:
                raise ValueError(f"Config: {name} is {getattr(self, name)!r}; it must be True or False")
        for name, allowed in (("schedule", tuple(schedules.REGISTRY)), ("loader", ("pointer", "descriptor"))):
            if getattr(self, name) not in allowed:
                raise ValueError(f"Config: {name} is {getattr(self, name)!r}; it must be one of {allowed}")
        schedules.of(self.schedule).check_sizes(self)
        least = {
            "group_m": 0 if schedules.of(self.schedule).sizes_bands else 1,
            "num_stages": 1,
            "split_k": 1,
        }
        for name, smallest in least.items():
            if getattr(self, name) < smallest:
                raise ValueError(f"Config: {name} is {getattr(self, name)!r}; it must be at least {smallest}")
        if self.tail not in (1, 2, 4, 8) or (
            self.tail > 1 and min(self.block_n // self.tail_n, self.block_m // self.tail_m) < 16
        ):
            raise ValueError(
                f"Config: tail is {self.tail!r}; it must be 1, 2, 4 or 8 and leave parts of 16 by 16 or more"
            )
        schedules.of(self.schedule).check(self)

    @property
    def main_n(self) -> int:
        """Columns of a tile that are one block of the kernel: all, or the larger of the two powers of two."""
        return 1 << (self.block_n.bit_length() - 1)

    @property
    def rest_n(self) -> int:
        """Columns of a tile beyond `main_n`: a second block beside the first, or 0."""
        return self.block_n - self.main_n

    @property
    def tail_m(self) -> int:
        """Parts of a split tile along M."""
        return 2 if self.tail == 8 else 1

    @property
    def tail_n(self) -> int:
        """Parts of a split tile along N."""
        return min(self.tail, 4)

    @property
    def tail_k(self) -> int:
        """Step along K of the tail's tiles: longer where they are so small that it fits into the same memory."""
        return self.block_k * 2 if self.tail >= 4 else self.block_k

    @classmethod
    def of(cls, value: Config | dict[str, Any] | str) -> Config:
        """A Config from itself, from a dict of its fields, or from its string."""
        if isinstance(value, cls):
            return value
        if isinstance(value, str):
            value = _parse(value)
        if not isinstance(value, dict):
            raise TypeError(
                f"config is a {type(value).__name__}; it must be a gemmery.Config, a dict or a string"
            )
        unknown = set(value) - {field.name for field in fields(cls)}
        if unknown:
            raise ValueError(f"Config has no {', '.join(sorted(unknown))}")
        return cls(**value)

    def asdict(self) -> dict[str, Any]:
        """The fields as a plain dict, for JSON."""
        return asdict(self)

    def __str__(self) -> str:
        halves = "/2" if self.split_store else ""
        tail = f"-t{self.tail}" if self.tail > 1 else ""
        parts = f"-k{self.split_k}" if self.split_k != 1 else ""
        swap = "-swap" if self.swap else ""
        stream = "-stream" if self.stream else ""
        return (
            f"{self.block_m}x{self.block_n}x{self.block_k}-g{self.group_m}-w{self.num_warps}-s{self.num_stages}"
            f"-{self.schedule}-{self.loader}{halves}{tail}{parts}{swap}{stream}"
        )


def config_text(config: Config | dict[str, Any] | str | None) -> str | None:
    """A config as an operator's string argument; written so that torch.compile can trace it."""
    if isinstance(config, dict):
        return ",".join([f"{name}={value}" for name, value in config.items()])
    return None if config is None else str(config)


def _parse(text: str) -> dict[str, Any]:
    """The fields of a Config from a string: `128x256x64-g8-w8-s4-persistent-descriptor/2` or `block_m=128,...`."""
    import re

    if "=" in text:
        return {name: _value(word) for name, word in (pair.split("=", 1) for pair in text.split(","))}
    names = "|".join(map(re.escape, schedules.REGISTRY))
    pattern = (
        rf"(\d+)x(\d+)x(\d+)-g(\d+)-w(\d+)-s(\d+)-({names})-(pointer|descriptor)(/2)?"
        r"(?:-t(\d))?(?:-k(\d+))?(-swap)?(-stream)?"
    )
    match = re.fullmatch(pattern, text)
    if match is None:
        raise ValueError(
            f"config {text!r} is not of the form "
            "128x256x64-g8-w8-s4-persistent-descriptor[/2][-t4][-k2][-swap][-stream]"
        )
    knobs = ("block_m", "block_n", "block_k", "group_m", "num_warps", "num_stages")
    numbers: dict[str, Any] = {name: int(match[i + 1]) for i, name in enumerate(knobs)}
    optional = (("tail", 10), ("split_k", 11))
    numbers |= {name: int(match[i]) for name, i in optional if match[i]}
    flags = {name: match[i] is not None for name, i in (("split_store", 9), ("swap", 12), ("stream", 13))}
    return numbers | flags | {"schedule": match[7], "loader": match[8]}


def _value(word: str) -> Any:
    if word in ("True", "False"):
        return word == "True"
    return int(word) if word.lstrip("-").isdigit() else word
