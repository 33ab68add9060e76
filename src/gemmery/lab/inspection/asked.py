"""What `gemmery inspect` is asked for, from words: the problem, the GPU or the target, the configs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ...devices import ARCHS, TABLE, Device
from ...problem import Problem
from ...select.shapes import device_named, problem_of
from ..tuning import kind_named
from .report import Inspection, inspect


@dataclass(frozen=True)
class Request:
    """A product in words.

    Attributes:
        dtype: as the bench calls types.
        layout: for a and then b, N for row-major and T for column-major.
        batch: leading dimensions; only without a packed weight, scales and an epilogue.
        weight, scales, epilogue: as for `posing.posed`, or "".
        device: a GPU of the device table, or a part of its name; or None.
        target: an architecture, or None; the first GPU of it in the table decides which config is chosen.
        configs: what to compile; the chosen config without any.
    """

    M: int
    N: int
    K: int
    dtype: str = "bf16"
    layout: str = "NT"
    batch: tuple[int, ...] = ()
    bias: bool = False
    batch_invariant: bool = False
    weight: str = ""
    scales: str = ""
    epilogue: str = ""
    device: str | None = None
    target: str | None = None
    configs: Sequence[str] = ()

    def problem(self) -> Problem:
        """The problem.

        Raises:
            ValueError, TypeError: a size or a name is none, or they do not go together.
        """
        device = device_of(self.device, self.target)
        if self.weight or self.scales or self.epilogue:
            return self._fused(device)
        kind = kind_named(self.dtype)
        return problem_of(
            self.M, self.N, self.K, dtype=kind.dtype, precision=kind.precision, fast_accum=kind.fast_accum,
            layout=self.layout, batch=self.batch, bias=self.bias, batch_invariant=self.batch_invariant, device=device,
        )  # fmt: skip

    def _fused(self, device: Device) -> Problem:
        # Scaled products' epilogues bring torch's compiler, which takes a second.
        from ..posing import posed

        if self.batch:
            raise ValueError("a batch is for bare products, without weight, scales and epilogue")
        return posed(
            self.M, self.N, self.K, device=device, dtype=self.dtype, weight=self.weight, scales=self.scales,
            bias=self.bias, epilogue=self.epilogue, batch_invariant=self.batch_invariant, layout=self.layout,
        )  # fmt: skip

    def inspections(self) -> list[Inspection]:
        """The kernels, one for each config.

        Raises:
            ValueError, TypeError: as `problem` and `inspect` do.
        """
        problem = self.problem()
        return [inspect(problem, config) for config in self.configs] or [inspect(problem)]


def device_of(device: str | None, target: str | None) -> Device:
    """A GPU of the device table by its name or by its architecture; by default the current one's, or an H200's row.

    Raises:
        ValueError: there is none, or the two do not go together.
    """
    if target is None:
        return device_named(device)
    known = [name for name, arch in ARCHS.items() if arch.multiprocessor is not None]
    if target not in known:
        raise ValueError(f"target is {target!r}; it must be one of {', '.join(known)}")
    if device is None:
        return next(row for row in TABLE.values() if row.arch == target)
    row = device_named(device)
    if row.arch != target:
        raise ValueError(
            f"device is {device!r}, which is of target {row.arch}, and target is {target!r}; give one"
        )
    return row
