"""The plain values handed from stage to stage: what is to be computed, and the knobs of how.

A `Problem` holds everything that decides which code runs and nothing else, so that it can be the key of every cache.
It is made from tensors' shapes and strides by `layout` and never sees data.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any, Literal

import torch

from .devices import Device

Precision = Literal["ieee", "tf32", "tf32x3"]
PRECISIONS: tuple[Precision, ...] = ("ieee", "tf32", "tf32x3")

#: Short names, as they appear in plans, tables and file names.
DTYPE_NAMES: dict[torch.dtype, str] = {
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.float32: "fp32",
    torch.float64: "fp64",
    torch.float8_e4m3fn: "e4m3",
    torch.float8_e5m2: "e5m2",
    torch.int8: "int8",
    torch.int32: "int32",
}
FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)

#: What a product of two such matrices may be stored as; the first is the default.
OUT_DTYPES: dict[torch.dtype, tuple[torch.dtype, ...]] = {
    torch.float16: (torch.float16, torch.float32, torch.bfloat16),
    torch.bfloat16: (torch.bfloat16, torch.float32, torch.float16),
    torch.float32: (torch.float32, torch.float16, torch.bfloat16),
    torch.float64: (torch.float64, torch.float32),
    torch.float8_e4m3fn: (torch.bfloat16, torch.float16, torch.float32),
    torch.float8_e5m2: (torch.bfloat16, torch.float16, torch.float32),
    torch.int8: (torch.int32,),
}


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """The type in which products of `dtype` are summed: fp64 for fp64, int32 for int8, else fp32."""
    return {torch.float64: torch.float64, torch.int8: torch.int32}.get(dtype, torch.float32)


@dataclass(frozen=True, slots=True)
class Operand:
    """How one matrix (or batch of them) lies in memory; strides in elements.

    Attributes:
        dtype: element type.
        steps: one stride for each dimension of the problem's batch, 0 where the matrix is shared.
        row: distance from one row to the next.
        col: distance from one column to the next.
        aligned: whether the first element's address is a multiple of 16 bytes.
    """

    dtype: torch.dtype
    steps: tuple[int, ...]
    row: int
    col: int
    aligned: bool

    def __str__(self) -> str:
        order = "row" if self.col == 1 else "col" if self.row == 1 else f"{self.row},{self.col}"
        return f"{DTYPE_NAMES.get(self.dtype, str(self.dtype).removeprefix('torch.'))}[{order}]"


@dataclass(frozen=True, slots=True)
class Packing:
    """How the numbers of B are packed; see `formats`.

    Attributes:
        format: its name in `formats.FORMATS`.
        bits: of a number.
        group: rows of B, along K, that share a scale; 0 where none do.
        shifts: what comes with the scales: "zeros", "offsets" or "" for nothing.
        wide: whether scales are fp32, rather than of A's type.
        matrices: how many lie one behind the other in memory.
        aligned: whether the addresses of scales and shifts, of each that there is, are multiples of 16 bytes.
    """

    format: str
    bits: int
    group: int = 0
    shifts: str = ""
    wide: bool = False
    matrices: int = 1
    aligned: tuple[bool, ...] = (True, True)

    def bytes(self, N: int, K: int) -> int:
        """Of one matrix with all that belongs to it."""
        groups = -(-K // self.group) if self.group else 0
        each = (4 if self.wide else 2) + (2 if self.shifts else 0)
        return N * (K * self.bits // 8 + groups * each)

    def __str__(self) -> str:
        return (
            f"{self.format}{f'/{self.group}' if self.group else ''}{f'+{self.shifts}' if self.shifts else ''}"
        )


#: Columns of K that share a factor in `Scales`: in blocks of fp32 scales, and in those of the MX formats.
SCALED_EVERY, MX_EVERY = 128, 32


@dataclass(frozen=True, slots=True)
class Scales:
    """Factors of both operands that change along K; see `kernels.scales`.

    Attributes:
        a, b: the factors' layouts: a row of them for `a_every` rows of A and for `b_every` columns of B.
        step: columns of K that share a factor, `SCALED_EVERY` or `MX_EVERY`.
    """

    a: Operand
    b: Operand
    a_every: int
    b_every: int
    step: int = SCALED_EVERY

    @property
    def exact(self) -> bool:
        """Whether all are powers of two, by which numbers of fp8 can be multiplied in bf16 without rounding.

        From 2^-133 on, that is, and below 2^128: bf16 ends there.
        """
        return self.a.dtype == self.b.dtype == torch.uint8

    def takes(self, block_k: int) -> bool:
        """Whether a step may be so long: as what shares a factor, or a multiple of it where factors are exact."""
        return block_k % self.step == 0 if self.exact else block_k == self.step


@dataclass(frozen=True, slots=True)
class Fusion:
    """What a traced epilogue makes of the product.

    Attributes:
        source: its device function's text; see `epilogues.lower`.
        operands: what it reads and writes besides the product, one layout a tensor, over (batch, M, columns).
        numbers: how many numbers come with every call.
        paired: whether the columns of the product come in two halves, which lie in one tile, so that the output has
            half as many.
        between: elements from the left half of B's columns to the right one, where these are two matrices.
        reduces: whether it leaves parts of reduced rows.
        stores: whether the kernel stores a result of it, or it stores all itself.
        prologue: what becomes of A's tiles as they are loaded, if anything does: its text, operands over
            (batch, M, K) and numbers, which come after the epilogue's own.
        ahead: the texts of the same in two functions, or None; see `epilogues.lower.Program`.
        whole: whether it needs tiles as wide as the product.
    """

    source: str
    operands: tuple[Operand, ...]
    numbers: int = 0
    paired: bool = False
    between: int | None = None
    reduces: bool = False
    stores: bool = True
    prologue: Fusion | None = None
    ahead: tuple[str, str] | None = None
    whole: bool = False

    def __str__(self) -> str:
        return self.source.split("(", 1)[0].split()[-1]


@dataclass(frozen=True, slots=True)
class Problem:
    """`out[z] = epilogue(a[z] @ b[z])` for every z of a batch; a is (M, K), b is (K, N), out is (M, N).

    Attributes:
        batch: shape of the batch, dimensions that can be merged merged, () for a single product.
        epilogue: name of the epilogue: identity, scale, add_row or add_matrix; or "fused".
        addend: layout of the matrix or row that the epilogue adds, if it adds one.
        fusion: the traced epilogue, where it is "fused".
        precision: how fp32 operands are multiplied: "ieee", "tf32" or "tf32x3".
        fast_accum: whether fp8 products may be summed at the tensor cores' reduced precision.
        batch_invariant: whether a row of the result must have the same bits whatever M and the batch are.
        device: the row of the device table that it runs on.
        packing: how B's numbers are packed, if they are; `b` is then what they stand for, with the steps of its batch
            in matrices.
        scales: factors that change along K, if there are any.
    """

    M: int
    N: int
    K: int
    batch: tuple[int, ...]
    a: Operand
    b: Operand
    out: Operand
    device: Device
    epilogue: str = "identity"
    addend: Operand | None = None
    precision: Precision = "ieee"
    fast_accum: bool = False
    batch_invariant: bool = False
    fusion: Fusion | None = None
    packing: Packing | None = None
    scales: Scales | None = None

    @property
    def paired(self) -> bool:
        """Whether the two halves of the product's columns become one column of the output each; see `Fusion`."""
        return self.fusion is not None and self.fusion.paired

    @property
    def out_n(self) -> int:
        """Columns of the output."""
        return self.N // 2 if self.paired else self.N

    @property
    def extras(self) -> tuple[Operand, ...]:
        """What the epilogue reads and writes besides the product and the output."""
        if self.fusion is not None:
            return self.fusion.operands
        return () if self.addend is None else (self.addend,)

    @property
    def wants_pieces(self) -> bool:
        """Whether a traced epilogue takes many registers: for more as large as the output, or for random numbers."""
        if self.fusion is None:
            return False
        return any(x.row and x.col for x in self.fusion.operands) or "uniform(" in self.fusion.source

    @property
    def tensors(self) -> tuple[Operand | None, ...]:
        """The layouts of all tensors of a launch, in its order."""
        if self.fusion is None:
            return self.a, self.b, self.out, self.addend
        before = self.fusion.prologue.operands if self.fusion.prologue else ()
        return self.a, self.b, self.out, *self.fusion.operands, *before, *self.shared

    @property
    def shared(self) -> tuple[Operand, ...]:
        """The layouts of what belongs to the factors: a packed B's scales and shifts, or scales of both."""
        if self.scales is not None:
            return self.scales.a, self.scales.b
        if self.packing is None or not self.packing.group:
            return ()
        columns = -(-self.N // 16) * 16
        types = [torch.float32 if self.packing.wide else self.b.dtype] + [self.b.dtype] * bool(
            self.packing.shifts
        )
        pairs = zip(types, self.packing.aligned, strict=False)
        return tuple(Operand(dtype, (), columns, 1, aligned) for dtype, aligned in pairs)

    @property
    def matrices(self) -> int:
        """How many products there are in the batch."""
        count = 1
        for size in self.batch:
            count *= size
        return count

    @property
    def takes_factors(self) -> bool:
        """Whether the epilogue is given numbers with every call; others are for calls where alpha and beta are 1."""
        return self.epilogue in ("scale", "add_matrix") or (
            self.fusion is not None
            and self.fusion.numbers + (self.fusion.prologue.numbers if self.fusion.prologue else 0) > 0
        )

    @property
    def flops(self) -> int:
        """Floating-point (or integer) operations: a multiplication and an addition per inner step."""
        return 2 * self.matrices * self.M * self.N * self.K

    @property
    def bytes(self) -> int:
        """The fewest bytes that can be moved: each distinct matrix once."""
        total = 0
        for operand, rows, cols in (
            (self.a, self.M, self.K), (self.b, self.K, self.N), (self.out, self.M, self.out_n),
            *((extra, self.M, self.out_n) for extra in self.extras),
        ):  # fmt: skip
            if operand is self.b and self.packing is not None:
                total += self.packing.bytes(self.N, self.K) * min(self.matrices, self.packing.matrices)
                continue
            size = operand.dtype.itemsize
            for extent, stride in zip(
                (*self.batch, rows, cols), (*operand.steps, operand.row, operand.col), strict=True
            ):
                size *= extent if stride or extent == 0 else 1
            total += size
        return total

    def __str__(self) -> str:
        batch = "x".join(map(str, self.batch)) + " of " if self.batch else ""
        fused = "" if self.epilogue == "identity" else f" +{self.fusion or self.epilogue}"
        fused += f" {self.precision}" if self.precision != "ieee" else ""
        fused += " fast" if self.fast_accum else ""
        fused += " scaled along K" if self.scales is not None else ""
        invariant = " invariant" if self.batch_invariant else ""
        right = self.b if self.packing is None else self.packing
        return f"{batch}{self.M}x{self.N}x{self.K} {self.a} @ {right} -> {self.out}{fused}{invariant}"


@dataclass(frozen=True, slots=True)
class Config:
    """The knobs of a kernel.

    Attributes:
        block_m, block_n, block_k: the tile of the output that a program computes, and the step along K; powers of two,
            but block_n can be the sum of two, as 192 is.
        group_m: height in tiles of the bands in which tiles are visited.
        num_warps: warps in a program.
        num_stages: blocks of A and B in flight.
        schedule: "tile" starts one program a tile, "persistent" as many programs as run at once; "cluster" as many
            clusters of CTAs as run at once, with a tile each: see `kernels.cluster`, which not every Triton has;
            "specialized" as many programs, in which one warp loads: see `kernels.specialized`.
        loader: "pointer" takes any strides, "descriptor" needs TMA and 16-byte alignment.
        split_store: store a tile as two halves, which halves the staging memory.
        tail: parts into which tiles are cut that would not fill a last wave, or not all of whose columns exist: 2 or 4
            along N, or 8, 2 along M by 4 along N; 1 leaves them whole. Not for the "tile" schedule.
        split_k: parts along K into which every tile is cut, each for a program of its own ("tile" schedule), or those
            tiles that would not fill a last wave ("cluster" and "specialized").
        swap: give the tensor cores the transposed product, so that a block of few rows lies on their narrow side.
        cluster_m, cluster_n: CTAs of a cluster along M and N, which divide its tile ("cluster" schedule).
        stream: B is read once and need not stay in L2 ("cluster", and "specialized" where a single row of tiles reads
            it; from Triton 3.9 on, before that it changes nothing).
    """

    block_m: int
    block_n: int
    block_k: int
    group_m: int = 8
    num_warps: int = 4
    num_stages: int = 3
    schedule: Literal["tile", "persistent", "cluster", "specialized"] = "tile"
    loader: Literal["pointer", "descriptor"] = "pointer"
    split_store: bool = False
    tail: int = 1
    split_k: int = 1
    swap: bool = False
    cluster_m: int = 1
    cluster_n: int = 1
    stream: bool = False

    def __post_init__(self) -> None:
        for name in ("group_m", "num_warps", "num_stages", "tail", "split_k", "cluster_m", "cluster_n"):
            if type(getattr(self, name)) is not int:
                raise ValueError(f"Config: {name} is {getattr(self, name)!r}; it must be an integer")
        for name in ("split_store", "swap", "stream"):
            if type(getattr(self, name)) is not bool:
                raise ValueError(f"Config: {name} is {getattr(self, name)!r}; it must be True or False")
        for name in ("block_m", "block_n", "block_k"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 16 or (name != "block_n" and value & (value - 1)):
                raise ValueError(f"Config: {name} is {value!r}; it must be a power of two of at least 16")
        if self.rest_n and (self.rest_n < 16 or self.rest_n & (self.rest_n - 1)):
            raise ValueError(
                f"Config: block_n is {self.block_n}; it must be a power of two, or the sum of two, of at least 16"
            )
        if self.num_warps not in (1, 2, 4, 8, 16, 32):
            raise ValueError(f"Config: num_warps is {self.num_warps!r}; it must be a power of two up to 32")
        for name in ("group_m", "num_stages", "split_k"):
            if getattr(self, name) < 1:
                raise ValueError(f"Config: {name} is {getattr(self, name)!r}; it must be at least 1")
        if (
            self.tail not in (1, 2, 4, 8)
            or self.block_n // self.tail_n < 16
            or self.block_m // self.tail_m < 16
        ):
            raise ValueError(
                f"Config: tail is {self.tail!r}; it must be 1, 2, 4 or 8 and leave parts of 16 by 16 or more"
            )
        if self.tail > 1 and self.schedule not in ("persistent", "cluster"):
            raise ValueError("Config: tail needs the persistent schedule, or clusters")
        if self.split_k != 1 and self.schedule == "persistent":
            raise ValueError("Config: split_k is not for the persistent schedule")
        if self.swap and self.schedule not in ("tile", "specialized"):
            raise ValueError("Config: swap needs the tile schedule, or specialised warps")
        if self.rest_n and self.schedule != "tile":
            raise ValueError("Config: a block_n that is no power of two needs the tile schedule")
        schedules = ("tile", "persistent", "cluster", "specialized")
        for name, allowed in (("schedule", schedules), ("loader", ("pointer", "descriptor"))):
            if getattr(self, name) not in allowed:
                raise ValueError(f"Config: {name} is {getattr(self, name)!r}; it must be one of {allowed}")
        if self.schedule == "specialized" and (self.loader, self.num_warps) != ("descriptor", 8):
            raise ValueError("Config: the specialized schedule needs the descriptor loader and 8 warps")
        if self.schedule == "specialized" and self.split_store:
            raise ValueError("Config: the specialized schedule has pieces of its own, and no split_store")
        self._check_cluster()

    def _check_cluster(self) -> None:
        if self.schedule != "cluster":
            if (self.cluster_m, self.cluster_n) != (1, 1):
                raise ValueError("Config: cluster_m and cluster_n need the cluster schedule")
            if self.stream and self.schedule != "specialized":
                raise ValueError("Config: stream needs the cluster schedule or the specialized one")
            return
        if self.loader != "descriptor" or self.num_warps not in (4, 8):
            raise ValueError("Config: the cluster schedule needs the descriptor loader and 4 or 8 warps")
        if self.tail > 1 and (self.split_k > 1 or self.tail > 4):
            raise ValueError(
                "Config: with the cluster schedule tail is 2 or 4, and 1 where split_k is above 1"
            )
        for name in ("cluster_m", "cluster_n"):
            if getattr(self, name) not in (1, 2):
                raise ValueError(f"Config: {name} is {getattr(self, name)!r}; it must be 1 or 2")
        if self.block_m // self.cluster_m < 64:
            raise ValueError(f"Config: block_m is {self.block_m}; each CTA of a cluster needs 64 rows")

    @property
    def ctas(self) -> int:
        """CTAs in a program: 1 but for clusters."""
        return self.cluster_m * self.cluster_n

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
        """Parts of a cut tile along M."""
        return 2 if self.tail == 8 else 1

    @property
    def tail_n(self) -> int:
        """Parts of a cut tile along N."""
        return min(self.tail, 4)

    @property
    def tail_k(self) -> int:
        """Step along K of the tail's tiles: longer where they are so small that it fits into the same memory."""
        return self.block_k * 2 if self.tail >= 4 else self.block_k

    @classmethod
    def of(cls, value: Config | dict[str, Any] | str) -> Config:
        """A Config from itself, from a dict of its fields, or from the string that `str` gives."""
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
        cluster = f"-c{self.cluster_m}x{self.cluster_n}" if self.ctas > 1 else ""
        stream = "-stream" if self.stream else ""
        return (
            f"{self.block_m}x{self.block_n}x{self.block_k}-g{self.group_m}-w{self.num_warps}-s{self.num_stages}"
            f"-{self.schedule}-{self.loader}{halves}{tail}{parts}{swap}{cluster}{stream}"
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
    pattern = (
        r"(\d+)x(\d+)x(\d+)-g(\d+)-w(\d+)-s(\d+)-(tile|persistent|cluster|specialized)-(pointer|descriptor)(/2)?"
        r"(?:-t(\d))?(?:-k(\d+))?(-swap)?(?:-c(\d)x(\d))?(-stream)?"
    )
    match = re.fullmatch(pattern, text)
    if match is None:
        raise ValueError(
            f"config {text!r} is not of the form "
            "128x256x64-g8-w8-s4-persistent-descriptor[/2][-t4][-k2][-swap][-c2x1][-stream]"
        )
    names = ("block_m", "block_n", "block_k", "group_m", "num_warps", "num_stages")
    numbers: dict[str, Any] = {name: int(match[i + 1]) for i, name in enumerate(names)}
    optional = (("tail", 10), ("split_k", 11), ("cluster_m", 13), ("cluster_n", 14))
    numbers |= {name: int(match[i]) for name, i in optional if match[i]}
    flags = {name: match[i] is not None for name, i in (("split_store", 9), ("swap", 12), ("stream", 15))}
    return numbers | flags | {"schedule": match[7], "loader": match[8]}


def _value(word: str) -> Any:
    if word in ("True", "False"):
        return word == "True"
    return int(word) if word.lstrip("-").isdigit() else word
