"""Tensors for a problem that is known by its description alone: laid out as it says, with random numbers or nothing."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..formats.packing import LINE, STRIP, block_columns
from ..problem import Operand, Problem


class Sample(NamedTuple):
    """The arguments of a Plan's call.

    Attributes:
        a, b, out: (*batch, M, K), (*batch, K, N) and (*batch, M, N).
        addend: (*batch, M, N), or None where the problem adds nothing.
        alpha, beta: numbers that suit its epilogue.
    """

    a: Tensor
    b: Tensor
    out: Tensor
    addend: Tensor | None
    alpha: float
    beta: float


def sample(problem: Problem, device: torch.device | str, seed: int | None = None) -> Sample:
    """Tensors with a problem's shapes, strides, types and alignment.

    Args:
        device: "meta" for layouts without memory, as compiling needs.
        seed: fill all of them with random numbers, normal ones or small integers; without, they hold anything.
    """
    p = problem
    generator = None if seed is None else torch.Generator(device).manual_seed(seed)
    a = _tensor(p.a, (*p.batch, p.M, p.K), device, generator)
    b = _tensor(p.b, (*p.batch, p.K, p.N), device, generator)
    out = _tensor(p.out, (*p.batch, p.M, p.N), device, generator)
    addend = None if p.addend is None else _tensor(p.addend, (*p.batch, p.M, p.N), device, generator)
    return Sample(a, b, out, addend, 2 if p.epilogue == "scale" else 1, 1)


def arguments(problem: Problem, device: torch.device | str) -> tuple[Any, ...]:
    """What a `launch.Binding` of a problem compiles with: its sample, or with a traced epilogue what that takes."""
    p = problem
    if p.fusion is None:
        return sample(p, device)
    a = _tensor(p.a, (*p.batch, p.M, p.K), device, None)
    b = _words(p, device) if p.packing else _tensor(p.b, (*p.batch, p.K, p.N), device, None)
    traced = [(p.fusion, p.out_n)] + ([(p.fusion.prologue, p.K)] if p.fusion.prologue else [])
    extras = [_tensor(x, (*p.batch, p.M, n), device, None) for part, n in traced for x in part.operands]
    extras += [_tensor(x, shape, device, None) for x, shape in zip(p.shared, _shared_shapes(p), strict=True)]
    numbers = (1.0,) * sum(part.numbers for part, _ in traced)
    return a, b, _tensor(p.out, (*p.batch, p.M, p.out_n), device, None), tuple(extras), numbers


def _words(problem: Problem, device: torch.device | str) -> Tensor:
    """A packed B's words; see `formats.packing`."""
    p, packing = problem, problem.packing
    assert packing is not None
    lines = 4 * -(-p.K // block_columns(packing.bits))
    shape = (packing.matrices, -(-p.N // STRIP), lines, LINE)
    steps = (shape[1] * lines * LINE, lines * LINE)
    return _tensor(Operand(torch.int32, steps, LINE, 1, p.b.aligned), shape, device, None)


def _shared_shapes(problem: Problem) -> list[tuple[int, ...]]:
    """The shapes of `Problem.shared`."""
    p = problem
    if p.scales is not None:
        steps = -(-p.K // p.scales.step)
        rows = ((p.M, p.scales.a_every), (p.N, p.scales.b_every))
        return [(*p.batch, -(-size // every), steps) for size, every in rows]
    if p.packing is None or not p.packing.group:
        return []
    rows_of_scales = p.packing.matrices * -(-p.K // p.packing.group)
    return [(rows_of_scales, x.row) for x in p.shared]


def _tensor(
    operand: Operand, shape: tuple[int, ...], device: torch.device | str, generator: torch.Generator | None
) -> Tensor:
    strides = (*operand.steps, operand.row, operand.col)
    reach = sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    # Allocations are aligned, so that the second element is not.
    start = 0 if operand.aligned else 1
    length = start + (reach + 1 if 0 not in shape else 0)
    if generator is None:
        buffer = torch.empty(length, dtype=operand.dtype, device=device)
    elif operand.dtype.is_floating_point:
        # Not every type has random numbers of its own.
        buffer = torch.randn(length, device=device, generator=generator).to(operand.dtype)
    else:
        buffer = torch.randint(-127, 128, (length,), device=device, generator=generator).to(operand.dtype)
    return buffer.as_strided(shape, strides, start)
