"""Tensors for a problem that is given by its description: with its layouts, and random or undefined content."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..operands import Layout
from ..problem import Problem


class Sample(NamedTuple):
    """The arguments of a Plan's call.

    Attributes:
        a, b, out: (*batch, M, K), (*batch, K, N) and (*batch, M, N).
        addend: (*batch, M, N), or None if the problem adds nothing.
        alpha, beta: numbers that suit its epilogue.
    """

    a: Tensor
    b: Tensor
    out: Tensor
    addend: Tensor | None
    alpha: float
    beta: float

    @property
    def given(self) -> tuple[tuple[Tensor, ...], tuple[float, float]]:
        """Tensors and numbers, as a `launch.Binding` takes them."""
        more = () if self.addend is None else (self.addend,)
        return (self.a, self.b, self.out, *more), (self.alpha, self.beta)


def sample(problem: Problem, device: torch.device | str, seed: int | None = None) -> Sample:
    """Tensors with a problem's shapes, strides, types and alignment.

    Args:
        device: "meta" for layouts without memory, as compiling needs.
        seed: the seed of random numbers, normal ones or small integers. Without it, the content is undefined.
    """
    p = problem
    generator = None if seed is None else torch.Generator(device).manual_seed(seed)
    a = _tensor(p.a, (*p.batch, p.M, p.K), device, generator)
    b = _tensor(p.b, (*p.batch, p.K, p.N), device, generator)
    out = _tensor(p.out, (*p.batch, p.M, p.N), device, generator)
    addend = None if p.addend is None else _tensor(p.addend, (*p.batch, p.M, p.N), device, generator)
    return Sample(a, b, out, addend, 2 if p.epilogue == "scale" else 1, 1)


def arguments(problem: Problem, device: torch.device | str) -> tuple[tuple[Tensor, ...], tuple[float, ...]]:
    """Arguments for compiling a `launch.Binding`: tensors in the order of `Problem.layouts`, and numbers."""
    p = problem
    shapes = [
        *p.a.shapes(p.M, p.K, p.batch, is_b=False), *p.b.shapes(p.K, p.N, p.batch, is_b=True),
        *[(*p.batch, p.M, p.out_n)] * (1 + len(p.extras)),
    ]  # fmt: skip
    tensors = tuple([_tensor(x, shape, device, None) for x, shape in zip(p.layouts, shapes, strict=True)])
    if p.fusion is None:
        return tensors, (2 if p.epilogue == "scale" else 1, 1)
    return tensors, (1.0,) * (p.fusion.numbers + p.a.numbers + p.b.numbers)


def _tensor(
    operand: Layout, shape: tuple[int, ...], device: torch.device | str, generator: torch.Generator | None
) -> Tensor:
    strides = operand.strides_of(shape)
    reach = sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    # Allocations are aligned, so that the second element is not.
    start = 0 if operand.aligned else 1
    length = start + (reach + 1 if 0 not in shape else 0)
    if generator is None:
        buffer = torch.empty(length, dtype=operand.stored, device=device)
    elif operand.dtype.is_floating_point:
        # Not every type has its own random numbers.
        buffer = torch.randn(length, device=device, generator=generator).to(operand.dtype)
    else:
        buffer = torch.randint(-127, 128, (length,), device=device, generator=generator).to(operand.dtype)
    return buffer.as_strided(shape, strides, start)
