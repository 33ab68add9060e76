"""The libraries that `grouped.py` measures beside gemmery where they can be imported: QuACK and Liger.

QuACK (quack-kernels) has products of groups of rows and of ranges, a gather of rows, and a gated activation. It has no
routing: its block has torch's around its products. Liger (liger-kernel) has whole experts, forward and backward.

Both tune themselves by default, which takes long. Like gemmery's, their configs are untuned here unless `find` is told
otherwise. QuACK's is then its default config, and Liger's the one that LIGER_FUSED_MOE_AUTOTUNE=0 pins. Tuned methods
have names of their own.

Liger's forward reads a number from the GPU to size its buffers, so the host waits in the middle of it. `Waiting` marks
such calls. They can't be in a CUDA graph. `PatientStopwatch` times them with the idle time that the wait causes.
"""

import importlib
import importlib.metadata
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.grouped_summary import LIBRARIES
from gemmery.tuning.stopwatch import SLEEP, Call, Stopwatch

#: By library, what is imported, and the distribution whose version is noted.
SOURCES = {"quack": ("quack.gemm_interface", "quack-kernels"), "liger": ("liger_kernel.ops", "liger-kernel")}
#: Behind the names of methods that tune themselves.
TUNED = "-tuned"

#: Weights of experts: (E, 2I, H), the rows of gate before those of up, and (E, H, I). In gpt-oss's style they are
#: transposed, the columns of gate and up alternate, and there are two biases.
Weights = Sequence[Tensor]
#: Experts with routing: of tokens, choices, and the router's weights.
Block = Callable[[Tensor, Tensor, Tensor], Tensor]


# ---------------------------------------------------------------------------------------------------------------------
# torch's routing


def sorted_choices(index: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Choices by expert as transformers' "grouped_mm" sorts them: the experts, the order, the ends of groups."""
    ids, order = index.flatten().sort()
    # histc takes integers on a GPU alone.
    numbers = ids.int() if ids.is_cuda else ids.float()
    return ids, order, torch.histc(numbers, count, 0, count - 1).cumsum(0, dtype=torch.int32)


def weighted_sum(y: Tensor, order: Tensor, weights: Tensor) -> Tensor:
    """Sorted rows, weighted, put back and summed by token as transformers' "grouped_mm" does it."""
    tokens, k = weights.shape
    y = y * weights.flatten()[order].unsqueeze(-1)
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(order.shape[0], device=order.device)
    return y[inverse].view(tokens, k, -1).sum(1)


# ---------------------------------------------------------------------------------------------------------------------
# Libraries


def starts_of(offs: Tensor) -> Tensor:
    """Ends of groups as QuACK takes them: int32, with a zero before."""
    return F.pad(offs, (1, 0))


@dataclass(frozen=True)
class Quack:
    """QuACK's products.

    Attributes:
        module: quack.gemm_interface.
        is_tuned: whether each new shape is timed with all configs, as it is by default in QuACK.
    """

    module: Any
    is_tuned: bool = False

    def rows(self, x: Tensor, y: Tensor, starts: Tensor) -> Tensor:
        """Groups of rows (R, K) by (G, K, N)."""
        made: Tensor = self.module.gemm(x, y, cu_seqlens_m=starts, tuned=self.is_tuned)
        return made

    def ranges(self, x: Tensor, y: Tensor, starts: Tensor) -> Tensor:
        """Ranges of (M, R) and (R, N), all products (G, M, N). The rows of both lie along M and N."""
        made: Tensor = self.module.gemm(x, y, cu_seqlens_k=starts, tuned=self.is_tuned)
        return made

    def block(self, experts: Weights) -> Block:
        """Experts, forward alone. QuACK's activation in gpt-oss's style is one that does not clamp."""
        gate_up, down, *biases = experts
        first, second = (gate_up, down) if biases else (gate_up.mT, down.mT)
        bias, last = biases or (None, None)
        # Columns of gate and up alternate, unless "B" is said to have one behind the other.
        how = {"activation": "swiglu_oai"} if biases else {"activation": "swiglu", "concat_layout": ("B",)}

        def block(x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
            _, order, offs = sorted_choices(index, down.shape[0])
            starts = starts_of(offs)
            # The gather is part of the first product too.
            _, hidden = self.module.gemm_gated(
                x, first, bias=bias, store_preact=False, cu_seqlens_m=starts,
                A_idx=(order // index.shape[1]).int(), tuned=self.is_tuned, **how,
            )  # fmt: skip
            y = self.module.gemm(hidden, second, bias=last, cu_seqlens_m=starts, tuned=self.is_tuned)
            return weighted_sum(y, order, weights)

        return block


@dataclass(frozen=True)
class Liger:
    """Liger's experts.

    Attributes:
        module: liger_kernel.ops.
        is_tuned: whether kernels are tuned, as they are by default in Liger.
    """

    module: Any
    is_tuned: bool = False

    def block(self, experts: Weights) -> Block:
        """Experts without biases, with gradients: what LigerExperts.forward calls."""
        gate_up, down, *biases = experts
        if self.is_tuned:
            self._forget()

        def block(x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
            if biases:
                raise NotImplementedError("Liger has no experts with biases")
            apply = self.module.LigerFusedMoEFunction.apply
            made: Tensor = apply(x, gate_up, down, index.to(torch.int32), weights)
            return made

        return block

    def _forget(self) -> None:
        """Have kernels tuned again: else one token's choice would be used for thousands of tokens of the same model."""
        kernels = importlib.import_module("liger_kernel.ops.fused_moe_kernels")
        for kernel in vars(kernels).values():
            if hasattr(kernel, "configs") and hasattr(kernel, "cache"):
                kernel.cache.clear()


@dataclass(frozen=True)
class Peers:
    """The peers beside torch's products and Hugging Face's paths.

    Attributes:
        is_compiled: whether torch.compile is.
        is_tuned: whether libraries tune themselves.
        quack, liger: the libraries; None where they are not measured.
        versions: of the libraries that are there.
        absent: by library, why it can't be imported.
    """

    is_compiled: bool = False
    is_tuned: bool = False
    quack: Quack | None = None
    liger: Liger | None = None
    versions: dict[str, str] = field(default_factory=dict)
    absent: dict[str, str] = field(default_factory=dict)

    def name(self, library: str) -> str:
        """The name of a library's methods."""
        return library + TUNED * self.is_tuned

    def blocks(self, experts: Weights, has_gradient: bool) -> dict[str, Block]:
        """Experts with routing by method; QuACK leaves gradients of them to its callers."""
        found: dict[str, Block] = {}
        if self.quack and not has_gradient:
            found[self.name("quack")] = self.quack.block(experts)
        if self.liger:
            found[self.name("liger")] = self.liger.block(experts)
        return found

    def record(self) -> dict[str, Any]:
        """Their record in the head of the results."""
        return {
            "compiled": self.is_compiled, "libraries": self.versions, "absent": self.absent,
            "libraries_tuned": self.is_tuned,
        }  # fmt: skip

    def __str__(self) -> str:
        there = [f"{name} {version}" for name, version in self.versions.items()]
        return "libraries: " + (
            "; ".join(there + [f"no {name}: {why}" for name, why in self.absent.items()]) or "none"
        )


def find(names: Iterable[str] = LIBRARIES, is_tuned: bool = False, is_compiled: bool = False) -> Peers:
    """Import the libraries that are there."""
    # Liger reads it when it is imported.
    os.environ["LIGER_FUSED_MOE_AUTOTUNE"] = str(int(is_tuned))
    modules, versions, absent = {}, {}, {}
    for name in names:
        module, distribution = SOURCES[name]
        try:
            modules[name] = importlib.import_module(module)
        except (
            Exception
        ) as error:  # a package that is there may fail in many ways where another one is missing
            absent[name] = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
            continue
        try:
            versions[name] = importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = "of an unknown version"
    return Peers(
        is_compiled, is_tuned,
        Quack(modules["quack"], is_tuned) if "quack" in modules else None,
        Liger(modules["liger"], is_tuned) if "liger" in modules else None,
        versions, absent,
    )  # fmt: skip


# ---------------------------------------------------------------------------------------------------------------------
# Calls that wait

#: Libraries whose calls wait for the GPU.
WAITS = ("liger",)
#: Why they are not in CUDA graphs.
NO_GRAPH = "it waits for the GPU, which no CUDA graph can record"


@dataclass(frozen=True)
class Waiting:
    """A call that waits for the GPU."""

    call: Call

    def __call__(self) -> object:
        """Make the call."""
        return self.call()


class PatientStopwatch(Stopwatch):
    """A stopwatch that also times calls which wait for the GPU, with the time in which the GPU then waits for the host.

    They begin as other calls do, with the GPU asleep and the host ahead. A user's training step is like that too.
    """

    def cold(self, call: Call, launches: int) -> list[float]:
        """As `Stopwatch.cold`; of a `Waiting` call, all figures count."""
        if not isinstance(call, Waiting):
            return super().cold(call, launches)
        return [self.single(call, SLEEP)[0] for _ in range(launches)]
