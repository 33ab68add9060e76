"""Problems from sizes and a device's name, for questions about products without tensors."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

import torch

from ..devices import TABLE, Device, current
from ..dtypes import DTYPE_NAMES, OUT_DTYPES, PRECISIONS, Precision
from ..layout import make_problem
from ..problem import Problem

LAYOUTS = ("NN", "NT", "TN", "TT")
#: The most rows or columns of a matrix, since kernels count them in 32 bits.
LARGEST_SIZE = 2**31 - 1
#: The most elements of a matrix; a few such matrices fill the memory of a large machine.
LARGEST_MATRIX = 2**40
#: The default device, without a name and without a GPU.
DEFAULT_DEVICE = "NVIDIA H200"


def device_named(name: str | None = None) -> Device:
    """A row of the device table by its name or words of it, such as "h200"; the current GPU's by default.

    Raises:
        ValueError: no row has that name, or several do.
    """
    if name is None:
        here = current(torch.device("cuda")) if torch.cuda.is_available() else None
        return here or TABLE[DEFAULT_DEVICE]
    # Whole words: an H20 is not an H200.
    found = [row for row in TABLE.values() if f" {name.lower()} " in f" {row.name.lower()} "]
    if len(found) != 1:
        what = (
            f"{' and '.join(row.name for row in found)} have" if found else "no GPU in the device table has"
        )
        raise ValueError(f"device is {name!r}; {what} that name; there are {', '.join(TABLE)}")
    return found[0]


def sizes(text: str) -> list[int]:
    """The sizes in a text such as 64x4096x4096, or with a batch 8x64x4096x4096.

    Raises:
        ValueError: the text is of another form.
    """
    if not re.fullmatch(r"[0-9]+([x×][0-9]+){2,}", text):
        raise ValueError(
            f"shape is {text!r}; it must be MxNxK, or BxMxNxK with a batch, such as 64x4096x4096"
        )
    return [int(word) for word in re.split("[x×]", text)]


def check_sizes(M: int, N: int, K: int, batch: Sequence[int] = (), least_k: int = 1) -> None:
    """Raises ValueError unless sizes are integers within the kernels' limits."""
    for name, size in (("M", M), ("N", N), ("K", K), *(("batch", size) for size in batch)):
        least = least_k if name == "K" else 1
        if type(size) is not int or not least <= size <= LARGEST_SIZE:
            raise ValueError(f"{name} is {size!r}; it must be an integer from {least} to {LARGEST_SIZE}")
    elements = max(M * N, M * K, K * N) * math.prod(batch)
    if elements > LARGEST_MATRIX:
        raise ValueError(
            f"a matrix of {elements:.3g} elements is larger than any memory; at most {LARGEST_MATRIX:.3g} are taken"
        )


def problem_of(
    M: int,
    N: int,
    K: int,
    *,
    dtype: torch.dtype = torch.bfloat16,
    out_dtype: torch.dtype | None = None,
    layout: str = "NT",
    batch: Sequence[int] = (),
    bias: bool = False,
    precision: Precision = "ieee",
    fast_accum: bool = False,
    batch_invariant: bool = False,
    device: Device,
) -> Problem:
    """The problem of `a @ b [+ bias]` for contiguous, aligned operands.

    Args:
        M, N, K: (*batch, M, K) times (*batch, K, N).
        layout: for a and then b, N for row-major and T for column-major; b of a Linear's weight is T.
        bias: whether N numbers of the result's type are added to each row.

    The other arguments are those of `gemmery.matmul`.

    Raises:
        ValueError: a size, the layout or the precision is invalid.
        TypeError: a type is not supported.
    """
    check_sizes(M, N, K, batch, least_k=0)
    if layout not in LAYOUTS:
        raise ValueError(f"layout is {layout!r}; it must be one of {', '.join(LAYOUTS)}")
    if precision not in PRECISIONS:
        raise ValueError(f"precision is {precision!r}; it must be one of {', '.join(PRECISIONS)}")
    if dtype not in OUT_DTYPES:
        raise TypeError(f"dtype is {dtype!r}; it must be one of {', '.join(map(str, OUT_DTYPES))}")
    out_dtype = out_dtype or OUT_DTYPES[dtype][0]
    if out_dtype not in OUT_DTYPES[dtype]:
        known = ", ".join(map(str, OUT_DTYPES[dtype]))
        raise TypeError(f"out_dtype is {out_dtype}; for {dtype} operands it can be {known}")

    def matrix(rows: int, cols: int, dtype: torch.dtype, letter: str) -> torch.Tensor:
        shape = (rows, cols) if letter == "N" else (cols, rows)
        whole = torch.empty(*batch, *shape, dtype=dtype, device="meta")
        return whole if letter == "N" else whole.mT

    return make_problem(
        matrix(M, K, dtype, layout[0]), matrix(K, N, dtype, layout[1]), matrix(M, N, out_dtype, "N"),
        torch.empty(N, dtype=out_dtype, device="meta") if bias else None,
        scaled=False, precision=precision if precision in device.target.precisions else "ieee",
        fast_accum=fast_accum, batch_invariant=batch_invariant, device=device,
    )  # fmt: skip


def short_name(name: str) -> str:
    """The short name of a type, given its short name or torch's name; other names are returned as they are.

    Example:
        >>> [short_name(name) for name in ("bfloat16", "torch.float32", "bf16", "tf32")]
        ['bf16', 'fp32', 'bf16', 'tf32']
    """
    of_torch = {str(dtype): short for dtype, short in DTYPE_NAMES.items()}
    return of_torch.get(f"torch.{name.removeprefix('torch.')}", name)


def dtype_named(name: str) -> torch.dtype:
    """A type by its short name, as in `problem.DTYPE_NAMES`, or by torch's.

    Raises:
        ValueError: there is none.
    """
    named = {short: dtype for dtype, short in DTYPE_NAMES.items()}
    if not isinstance(name, str) or short_name(name) not in named:
        raise ValueError(f"dtype is {name!r}; it must be one of {', '.join(named)}, or torch's name of one")
    return named[short_name(name)]
