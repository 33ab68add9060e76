"""Results of a traced epilogue: the tensors that the kernel writes, and the results that are computed from them."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..allocation import maker
from .lower import Program, Reduction


@dataclass(frozen=True)
class Results:
    """The results of a program for a block of known shape.

    Attributes:
        program: the epilogue.
        shape: of its first argument, (..., M, N).
        types: of its results.
        wide: the type of sums.
        cleared: whether what the epilogue stores itself is 0 before, since it is not called for every row.
    """

    program: Program
    shape: tuple[int, ...]
    types: tuple[torch.dtype, ...]
    wide: torch.dtype
    cleared: bool = False

    @property
    def reduces(self) -> bool:
        """Whether rows are reduced."""
        return any(x.reduced is not None for x in self.program.outputs)

    def _columns(self, name: str) -> int:
        N = self.shape[-1]
        return {"N": N, "N/2": N // 2, "2N": 2 * N}[name]

    @property
    def matrices(self) -> list[tuple[tuple[int, ...], torch.dtype] | None]:
        """Shape and type of the matrix that is stored for each result, None for reduced rows."""
        return [
            None if x.reduced is not None else ((*self.shape[:-1], self._columns(x.columns)), dtype)
            for x, dtype in zip(self.program.outputs, self.types, strict=True)
        ]

    @property
    def whole(self) -> list[tuple[tuple[int, ...], torch.dtype] | None]:
        """The same for results that are these matrices, None for all others."""
        return [
            None if x.kept is not None else known
            for x, known in zip(self.program.outputs, self.matrices, strict=True)
        ]

    @property
    def is_plain(self) -> bool:
        """Whether the results are the matrices that the kernel stores, one per result."""
        copied = any(x.same is not None or x.kept is not None for x in self.program.outputs)
        return self.program.main is not None and not self.reduces and not copied

    def makers(self, device: torch.device) -> tuple[Callable[[], Tensor], ...]:
        """Functions that allocate the results, where these are plain."""
        found: list[Callable[[], Tensor]] = []
        for i, known in enumerate(self.matrices):
            if known is not None and self.cleared and i != self.program.main:
                found.append(functools.partial(torch.zeros, known[0], dtype=known[1], device=device))
            elif known is not None:
                found.append(maker(*known, device))
        return tuple(found)

    def flat(self, tensors: Sequence[Any]) -> list[Tensor]:
        """The tensors of `allocate`, one after the other, and last the substitute for the kernel's own output."""
        made: list[Tensor] = []
        for x in tensors:
            made += x if isinstance(x, list) else [x]
        return [*made, self.main(tensors)] if self.program.main is None else made

    @property
    def _begins(self) -> list[int]:
        """The place in `flat` at which each result begins, and the end of the last."""
        begins = [0]
        for x in self.program.outputs:
            begins.append(begins[-1] + (1 if x.reduced is None else len(x.places)))
        return begins

    @property
    def main_place(self) -> int:
        """The place in `flat` of the tensor that the kernel itself stores."""
        begins = self._begins
        return begins[-1] if self.program.main is None else begins[self.program.main]

    @property
    def written_places(self) -> list[int]:
        """The places in `flat` of the tensors that the epilogue writes, in its order."""
        begins = self._begins
        outputs = enumerate(self.program.outputs)
        return [place for i, x in outputs if x.places for place in range(begins[i], begins[i + 1])]

    def allocate(self, device: torch.device, slots: int, out: Tensor | None = None) -> list[Any]:
        """A tensor for each result; for a reduced row a list of (..., M, slots), rows adjacent, one a part."""
        tensors: list[Any] = []
        for i, (output, known) in enumerate(zip(self.program.outputs, self.matrices, strict=True)):
            make = torch.zeros if self.cleared and i != self.program.main else torch.empty
            if output.same is not None:
                tensors.append(tensors[output.same])
            elif output.reduced is None:
                assert known is not None
                tensors.append(make(known[0], dtype=known[1], device=device) if out is None else out)
            else:
                kind = self.wide if self.wide.is_floating_point else torch.float32
                kind = kind if output.reduced.casts[0].is_floating_point else torch.int64
                parts = [make((slots, *self.shape[:-1]), dtype=kind, device=device) for _ in output.places]
                tensors.append([part.movedim(0, -1) for part in parts])
        return tensors

    def main(self, tensors: Sequence[Any]) -> Tensor:
        """The tensor that the kernel stores itself, or its replacement if the epilogue stores all."""
        if self.program.main is not None:
            found: Tensor = tensors[self.program.main]
            return found
        *batch, M, N = self.shape
        width = N // 2 if self.program.paired else N
        device = tensors[0][0].device if isinstance(tensors[0], list) else tensors[0].device
        return torch.empty((), dtype=self.wide, device=device).expand(*batch, M, width)

    def extras(self, inputs: Sequence[Any], tensors: Sequence[Any]) -> tuple[Tensor, ...]:
        """The program's tensors in its order: what it reads, then what it writes."""
        extras = [inputs[i] for i in self.program.inputs]
        for output, result in zip(self.program.outputs, tensors, strict=True):
            if output.places:
                extras += result if isinstance(result, list) else [result]
        return tuple(extras)

    def widths(self, extras: Sequence[Tensor]) -> list[tuple[Tensor, int]]:
        """The program's tensors, each with the columns that it has or is broadcast to."""
        width, read = self.shape[-1] // (2 if self.program.paired else 1), len(self.program.inputs)
        return [
            (x, width if i < read and (x.dim() == 0 or x.shape[-1] == 1) else x.shape[-1])
            for i, x in enumerate(extras)
        ]

    def numbers(self, inputs: Sequence[Any]) -> tuple[float, ...]:
        """The program's numbers in its order; integers remain integers, because a float may not hold them."""
        given = [inputs[i] for i in self.program.numbers]
        return tuple([x if isinstance(x, int) else float(x) for x in given])

    def finish(self, tensors: list[Any]) -> list[Tensor]:
        """The results after the kernel has run: the parts of reduced rows are combined."""
        results = []
        for output, x, dtype in zip(self.program.outputs, tensors, self.types, strict=True):
            if output.reduced is not None:
                x = _joined(output.reduced, x, self._columns(output.reduced.columns))
                for cast in (*output.reduced.casts, dtype):
                    x = x.to(cast)
            x = x if output.kept is None else _cut(x, output.kept)
            results.append(x.unsqueeze(-1) if output.reduced is not None and output.reduced.keepdim else x)
        return results

    def unalias(self, tensors: list[Tensor]) -> list[Tensor]:
        """Results of which no two are one tensor, as torch's functions return them."""
        return [
            x if y.same is None else x.clone() for x, y in zip(tensors, self.program.outputs, strict=True)
        ]


def returned(results: Sequence[Tensor], many: bool) -> Any:
    """Results as the user's function returns them: the tensor, or a tuple."""
    return tuple(results) if many else results[0]


def _joined(reduction: Reduction, parts: list[Tensor], columns: int) -> Tensor:
    """A reduced row from the parts that blocks left, in a fixed order."""
    first = parts[0]
    if reduction.kind in ("sum", "mean"):
        row = first.sum(-1)
        row = row / columns if reduction.kind == "mean" else row
    elif reduction.kind in ("amax", "amin"):
        row = getattr(first, reduction.kind)(-1)
    else:
        largest = first.amax(-1, keepdim=True)
        shift = torch.where(largest.abs() == math.inf, 0.0, largest)
        row = (parts[1] * torch.exp(first - shift)).sum(-1).log() + shift.squeeze(-1)
    return row


def _cut(result: Tensor, kept: tuple[bool, ...]) -> Tensor:
    """The function's return value for a result that is constant along some dimensions; see `Output.kept`."""
    for _ in range(result.dim() - len(kept)):
        result = result.select(0, 0)
    for dim, is_kept in enumerate(kept):
        result = result if is_kept else result.narrow(dim, 0, 1)
    return result.clone(memory_format=torch.contiguous_format)
