"""Small products, tried and compared with float64, wherever gemmery runs on this machine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

import gemmery

from ... import devices, reference
from ...dtypes import OUT_DTYPES

#: Types that are tried, and the format of a weight of few bits.
DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.int8)
WEIGHT = "int4"
#: Rows, columns and inner size: they divide by nothing.
_M, _N, _K = 37, 53, 75
#: The inner size of 8-bit types, which an odd one has unpacked byte by byte, and of a packed weight's groups.
_EVEN_K = 128


@dataclass(frozen=True)
class Trial:
    """One product of gemmery, compared with float64.

    Attributes:
        ran: the config of the kernel, or its replacement.
        error: ||y - exact|| / ||exact||; None if the call failed.
        failure: its error message, or that the error is too large; None if it is right.
    """

    device: str
    dtype: str
    ran: str
    error: float | None
    failure: str | None


def trials(gpus: Sequence[Any]) -> list[Trial]:
    """A product in each type, and one with a packed weight, on every GPU or else on the CPU."""
    places = [torch.device("cpu")]
    if gpus and not devices.INTERPRETED:
        places = [torch.device("cuda", index) for index in range(len(gpus))]
    return [_trial(place, dtype) for place in places for dtype in (*DTYPES, WEIGHT)]


def _trial(device: torch.device, kind: torch.dtype | str) -> Trial:
    name = f"{kind} weight" if isinstance(kind, str) else str(kind).removeprefix("torch.")
    try:
        ran, error, allowed = _compare(device, kind)
    except Exception as failure:  # any error is a finding
        return Trial(str(device), name, "", None, f"{type(failure).__name__}: {failure}")
    wrong = None if error <= allowed else f"relative error {error:.1e}, at most {allowed:.1e} is right"
    return Trial(str(device), name, ran, error, wrong)


def _compare(device: torch.device, kind: torch.dtype | str) -> tuple[str, float, float]:
    """The product that ran, its error, and the largest allowed error."""
    generator = torch.Generator().manual_seed(0)
    if isinstance(kind, str):
        a = torch.randn(_M, _EVEN_K, generator=generator).to(device, torch.bfloat16)
        b: Any = gemmery.quantize(
            torch.randn(_N, _EVEN_K, generator=generator).to(device, torch.bfloat16), kind
        )
        exact_b, out = b.dequantize().double().t(), torch.bfloat16
    else:
        inner = _EVEN_K if kind.itemsize == 1 else _K
        a, b = (_random(shape, kind, generator).to(device) for shape in ((_M, inner), (inner, _N)))
        exact_b, out = b.double(), OUT_DTYPES[kind][0]
    plan = gemmery.plan(a, b)
    y = gemmery.matmul(a, b)
    exact = reference.gemm(a.double(), exact_b)
    error = float((y.double() - exact).norm() / exact.norm())
    allowed = 4 * torch.finfo(out).eps if out.is_floating_point else 0.0
    ran = str(plan.config) if plan is not None and plan.config is not None else "torch reference"
    return ran, error, allowed


def _random(shape: tuple[int, int], dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    if dtype == torch.int8:
        return torch.randint(-127, 128, shape, generator=generator).to(dtype)
    return torch.randn(shape, generator=generator).to(dtype)
