"""The selector's facts about GPUs: a table of architectures and a table of GPUs.

Adding a GPU is adding a row. Rates are dense datasheet peaks in operations per second, bandwidth in bytes per second,
sizes in bytes; a row's `achieved` is the part of the peak that a long product reaches in practice, measured for the
H200 and estimated elsewhere. Floating-point rates are those with sums in fp32, which is how every kernel here adds: a
GeForce has half the rate then that it has with sums in fp16, the figure that is often quoted; the other cards have one
rate for both. Sources: the vendors' datasheets and architecture whitepapers, for GeForce the appendices of NVIDIA's on
GA102, Ada and RTX Blackwell; shared memory per block from the CUDA programming guide and the AMD ISA guides.
"""

from __future__ import annotations

import contextlib
import functools
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from triton import knobs

#: Kernels run through Triton's interpreter in this process. Decided once: `@triton.jit` looks at it when it runs.
INTERPRETED: bool = bool(knobs.runtime.interpret)


@dataclass(frozen=True)
class Multiprocessor:
    """The resources that the programs on one multiprocessor (a compute unit on AMD) share.

    Attributes:
        parts: its schedulers (SIMDs on AMD), each of which has a share of the warps and of the registers.
        warps: most warps of a part.
        registers: of a part, for each lane of a warp.
        granule: a warp's registers per lane are rounded up to a multiple of this.
        shared: bytes of shared memory.
        reserved: bytes of it that each program takes besides its own.
        programs: most programs.
    """

    parts: int
    warps: int
    registers: int
    granule: int
    shared: int
    reserved: int
    programs: int


@dataclass(frozen=True)
class Arch:
    """The capabilities of an instruction set, independent of the size of the chip.

    Attributes:
        name: "sm_90", "gfx942", ...; also the name of a compilation target.
        family: the list of tiles that applies: "hopper", ....
        shared: bytes of shared memory that one block may use.
        warp_size: threads in a warp.
        tma: whether the hardware loads tensor descriptors.
        matrix: the instruction that a 16-bit dot must compile to, as it is spelled in PTX or AMD assembly.
        fp8: fp8 types that a dot accepts.
        precisions: precisions that an fp32 dot accepts.
        multiprocessor: the resources that programs share; None for the interpreter.
        overlaps: whether a launch can begin before the previous one has ended; see `kernels.overlap`.
    """

    name: str
    family: str
    shared: int
    warp_size: int
    tma: bool
    matrix: str
    fp8: tuple[torch.dtype, ...]
    precisions: tuple[str, ...]
    multiprocessor: Multiprocessor | None = None
    overlaps: bool = False

    @property
    def backend(self) -> str:
        """Triton's name of the backend: "cuda" or "hip"."""
        return "hip" if self.name.startswith("gfx") else "cuda"

    @property
    def overlap(self) -> dict[str, Any]:
        """Compile-time arguments of a kernel that waits for earlier launches; see `kernels.overlap`."""
        return {"OVERLAPS": True, "launch_pdl": True} if self.overlaps else {"OVERLAPS": False}


_FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
_E5M2 = (torch.float8_e5m2,)
_NV = ("ieee", "tf32", "tf32x3")
# The interpreter has no such launches, whatever GPU it stands for.
_OVERLAPS = not INTERPRETED
_AMD = ("ieee",)


def _sm(warps: int, shared: int, programs: int) -> Multiprocessor:
    """A multiprocessor of NVIDIA's: 64 K registers, and a KB of shared memory that each program pays."""
    return Multiprocessor(4, warps // 4, 512, 8, shared << 10, 1 << 10, programs)


ARCHS: dict[str, Arch] = {
    arch.name: arch
    for arch in (
        Arch("sm_80", "ampere", 163 << 10, 32, False, "mma.sync", _E5M2, _NV, _sm(64, 164, 32)),
        Arch("sm_86", "ada", 99 << 10, 32, False, "mma.sync", _E5M2, _NV, _sm(48, 100, 16)),
        Arch("sm_89", "ada", 99 << 10, 32, False, "mma.sync", _FP8, _NV, _sm(48, 100, 24)),
        Arch("sm_90", "hopper", 227 << 10, 32, True, "wgmma.mma_async", _FP8, _NV, _sm(64, 228, 32), _OVERLAPS),
        Arch("sm_100", "blackwell", 227 << 10, 32, True, "tcgen05.mma", _FP8, _NV, _sm(64, 228, 32), _OVERLAPS),
        Arch("sm_120", "blackwell rtx", 99 << 10, 32, True, "mma.sync", _FP8, _NV, _sm(48, 100, 24), _OVERLAPS),
        Arch("gfx942", "cdna", 64 << 10, 64, False, "v_mfma", _FP8, _AMD,
             Multiprocessor(4, 8, 512, 8, 64 << 10, 0, 16)),
        Arch("gfx1100", "rdna", 64 << 10, 32, False, "v_wmma", (), _AMD,
             Multiprocessor(2, 16, 1536, 24, 64 << 10, 0, 16)),
        Arch("interpreter", "interpreter", 1 << 30, 32, True, "", _FP8, _NV),
    )
}  # fmt: skip


@dataclass(frozen=True)
class Delays:
    """Times that do not depend on a GPU's size, in seconds; measured on an H200.

    Attributes:
        launch: of a launch, from its start to its end, besides its work.
        start: from a program's start to the first bytes.
        latency: between asking for bytes and having them, in a full pipeline.
        tail: between the whole tiles of a launch and a tail of small ones: the pipeline runs empty and is filled again.
        reduction: of meeting and adding up the parts of a tile.
    """

    launch: float = 2.0e-6
    start: float = 3.6e-6
    latency: float = 0.98e-6
    tail: float = 5.4e-6
    reduction: float = 2.1e-6


@dataclass(frozen=True)
class Device:
    """One GPU model.

    Attributes:
        name: the name that the driver reports, or the part of it that identifies the model.
        arch: the name of its row in `ARCHS`.
        sms: multiprocessors (compute units on AMD).
        l2: bytes of the last cache before memory, which all multiprocessors share: L2, or the Infinity Cache of an
            MI300X.
        bandwidth: of device memory, bytes per second.
        fp16, tf32, fp32, fp64, fp8, int8: dense peak rates with sums in fp32 (int32 for int8), operations per second.
            bf16 has the rate of fp16, and 0 means that there is no such unit.
        achieved: the fraction of the peak rate that a long 16-bit product reaches.
        l2_bandwidth_per_sm: bytes per second that one multiprocessor reads from L2; 0 if it was not measured.
        delays: times that do not depend on the size.
        note: an additional note about predictions for this GPU, in a sentence.
    """

    name: str
    arch: str
    sms: int
    l2: int
    bandwidth: float
    fp16: float
    tf32: float
    fp32: float
    fp64: float
    fp8: float
    int8: float
    achieved: float = 0.8
    l2_bandwidth_per_sm: float = 0.0
    delays: Delays = Delays()
    note: str = ""

    @property
    def target(self) -> Arch:
        """The row of the instruction set."""
        return ARCHS[self.arch]

    @property
    def sm_bandwidth(self) -> float:
        """Bytes per second that one multiprocessor reads.

        It is measured, or taken from another GPU of the architecture, or four times the multiprocessor's share of the
        memory bandwidth.
        """
        of_arch = (
            row.l2_bandwidth_per_sm
            for row in TABLE.values()
            if row.arch == self.arch and row.l2_bandwidth_per_sm
        )
        return self.l2_bandwidth_per_sm or next(of_arch, 4 * self.bandwidth / self.sms)

    @property
    def store_bandwidth(self) -> float:
        """Bytes per second that one multiprocessor stores."""
        return 0.35 * self.sm_bandwidth

    def rate(self, dtype: torch.dtype, precision: str = "ieee") -> float:
        """The peak rate for products of `dtype`, operations per second."""
        if dtype == torch.float32:
            return {"ieee": self.fp32, "tf32": self.tf32, "tf32x3": self.tf32 / 3}[precision] or self.fp32
        if dtype == torch.float64:
            return self.fp64
        if dtype == torch.int8:
            return self.int8 or self.fp16
        if dtype.itemsize == 1:
            return self.fp8 or self.fp16
        return self.fp16


_M = 1 << 20
_G = 1e9
_T = 1e12

#: The first row of an architecture, of a GeForce or not, stands for the architecture's GPUs without a row.
TABLE: dict[str, Device] = {
    device.name: device
    for device in (
        Device("NVIDIA A100", "sm_80", 108, 40 * _M, 2039 * _G, 312 * _T, 156 * _T, 19.5 * _T, 19.5 * _T, 0, 624 * _T),
        Device("NVIDIA GeForce RTX 3090", "sm_86", 82, 6 * _M, 936 * _G, 71 * _T, 35.6 * _T, 35.6 * _T, 0.56 * _T, 0,
               284 * _T),
        Device("NVIDIA A10", "sm_86", 72, 6 * _M, 600 * _G, 125 * _T, 62.5 * _T, 31.2 * _T, 0.49 * _T, 0, 250 * _T),
        Device("NVIDIA L40S", "sm_89", 142, 96 * _M, 864 * _G, 362 * _T, 183 * _T, 91.6 * _T, 1.43 * _T, 733 * _T,
               733 * _T),
        Device("NVIDIA L4", "sm_89", 58, 48 * _M, 300 * _G, 121 * _T, 60 * _T, 30.3 * _T, 0.47 * _T, 242 * _T,
               242 * _T),
        Device("NVIDIA GeForce RTX 4090", "sm_89", 128, 72 * _M, 1008 * _G, 165.2 * _T, 82.6 * _T, 82.6 * _T, 1.29 * _T,
               330.3 * _T, 660.6 * _T),
        Device("NVIDIA H200", "sm_90", 132, 60 * _M, 4800 * _G, 989 * _T, 494 * _T, 67 * _T, 67 * _T, 1979 * _T,
               1979 * _T, achieved=1.0, l2_bandwidth_per_sm=124 * _G),
        Device("NVIDIA H100", "sm_90", 132, 50 * _M, 3350 * _G, 989 * _T, 494 * _T, 67 * _T, 67 * _T, 1979 * _T,
               1979 * _T, achieved=0.95, l2_bandwidth_per_sm=124 * _G),
        Device("NVIDIA B200", "sm_100", 148, 126 * _M, 8000 * _G, 2250 * _T, 1100 * _T, 75 * _T, 37 * _T, 4500 * _T,
               4500 * _T),
        Device("NVIDIA GeForce RTX 5090", "sm_120", 170, 96 * _M, 1792 * _G, 209.5 * _T, 104.8 * _T, 104.8 * _T,
               1.64 * _T, 419 * _T, 838 * _T),
        Device("AMD Instinct MI300X", "gfx942", 304, 256 * _M, 5300 * _G, 1307 * _T, 0, 163 * _T, 163 * _T, 2615 * _T,
               2615 * _T, achieved=0.6,
               note="an estimate, because no kernel has run there: large products may reach about 0.3 of the vendor's "
               "BLAS, because the kernels are compiled for gfx942 but were never timed or tuned on it"),
        Device("AMD Radeon RX 7900 XTX", "gfx1100", 96, 6 * _M, 960 * _G, 123 * _T, 0, 61 * _T, 1.9 * _T, 0, 123 * _T,
               achieved=0.6),
        Device("interpreter", "interpreter", 4, 1 * _M, 10 * _G, 1e10, 1e10, 1e10, 1e10, 1e10, 1e10),
    )
}  # fmt: skip


@dataclass(frozen=True)
class Lack:
    """Something that a target can't do.

    Attributes:
        what: it lacks.
        instead: what runs.
        advice: what may be done about it.
    """

    what: str
    instead: str
    advice: str

    def __str__(self) -> str:
        return f"{self.what}: {self.instead}"


_NO_E4M3 = Lack(
    "no float8_e4m3fn dot", "such products run through the torch reference",
    "keep activations in bf16 or fp16 and pack the weight, gemmery.quantize(w, 'e4m3'), which is unpacked here",
)  # fmt: skip
_NO_TF32 = Lack(
    "no TF32 units", 'precision="tf32" and "tf32x3" run as "ieee"',
    "where fp32 is too slow and its exactness is not needed, multiply in bf16 or fp16",
)  # fmt: skip
_NO_TMA = Lack(
    "no tensor descriptors in hardware", "every operand is loaded through pointers",
    "keep adjacent elements adjacent and rows at multiples of 16 bytes, so that each lane loads 128 bits",
)  # fmt: skip
#: The features that a target lacks, by architecture.
_CANNOT: dict[str, tuple[Lack, ...]] = {
    "sm_80": (_NO_E4M3,),
    "sm_86": (_NO_E4M3,),
    "gfx942": (
        _NO_TF32,
        Lack(
            "no dot of torch's fp8 types, but of others with another bias", "they are multiplied as fp16",
            "pack the weight alone, gemmery.quantize(w, 'e4m3'), or keep it in bf16: fp8 gains nothing here",
        ),
    ),
    "gfx1100": (
        _NO_TF32,
        Lack(
            "no fp8 dot", "such products run through the torch reference",
            "keep activations in bf16 or fp16 and pack the weight, gemmery.quantize(w, 'e4m3'), which is unpacked here",
        ),
    ),
    "interpreter": (
        Lack(
            "kernels are interpreted on the CPU", "results are right, times say nothing",
            "for speed, use a machine with a GPU and unset TRITON_INTERPRET",
        ),
    ),
}  # fmt: skip


def lacks(arch: str) -> list[Lack]:
    """The features that a target lacks, what runs instead, and the remedies."""
    if arch not in ARCHS:
        return [
            Lack(
                f"{arch} is not in the architecture table", "every product runs through the torch reference",
                "add it: docs/extending.md, A GPU",
            )
        ]  # fmt: skip
    return [*_CANNOT.get(arch, ()), *([] if ARCHS[arch].tma else [_NO_TMA])]


def cannot(arch: str) -> list[str]:
    """Plain sentences about what a target can't do and what runs instead."""
    return list(map(str, lacks(arch)))


@functools.cache
def _of_index(index: int) -> Device | None:
    properties = torch.cuda.get_device_properties(index)
    if torch.version.hip is not None:
        arch = properties.gcnArchName.split(":")[0]
    else:
        arch = f"sm_{properties.major}{properties.minor}"
        arch = {"sm_103": "sm_100", "sm_121": "sm_120", "sm_87": "sm_86"}.get(arch, arch)
    return _matching(properties.name, arch, properties.multi_processor_count, properties.L2_cache_size)


def _matching(name: str, arch: str, sms: int, l2: int) -> Device | None:
    """The row of a GPU by its full name; else one made from its architecture's first row; None for an unknown one."""
    rows = [row for row in TABLE.values() if row.arch == arch]
    if not rows:
        return None
    # Whole words: an L40 is not an L4.
    words = f" {name.replace('-', ' ')} "
    named = [row for row in rows if f" {row.name} " in words and row.sms == sms]
    if named:
        return named[0]
    # A GPU without a row: the rates and the bandwidth of another, scaled by its size. A GeForce adds in fp32
    # at half the rate of other cards with the same chip, so that it is scaled from a GeForce.
    row = next((row for row in rows if ("GeForce" in row.name) == ("GeForce" in name)), rows[0])
    part = sms / row.sms
    scaled = ("bandwidth", "fp16", "tf32", "fp32", "fp64", "fp8", "int8")
    return replace(row, name=name, sms=sms, l2=l2, **{field: getattr(row, field) * part for field in scaled})


def current(device: torch.device) -> Device | None:
    """The row for a torch device; None if kernels can't run on it, so that the reference does."""
    if INTERPRETED:
        return TABLE["interpreter"]
    if device.type != "cuda":
        return None
    return _of_index(device.index if device.index is not None else torch.cuda.current_device())


def overlap_on(tensor: Tensor) -> dict[str, Any]:
    """Returns `Arch.overlap` of a tensor's device. Kernels must run there."""
    row = current(tensor.device)
    assert row is not None
    return row.target.overlap


def on_device(tensor: Tensor) -> contextlib.AbstractContextManager[Any]:
    """Makes a tensor's GPU the current one, also for a thread that has not used it yet."""
    if not tensor.is_cuda:
        return contextlib.nullcontext()
    if tensor.device.index == torch.cuda.current_device():
        # Binds the GPU's context to the thread; Triton encodes tensor maps without a check for a context.
        torch.cuda.set_device(tensor.device)
        return contextlib.nullcontext()
    return torch.cuda.device(tensor.device)
