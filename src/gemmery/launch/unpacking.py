"""The dense matrix that a packed weight stands for, written out by a kernel."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import triton.language as tl
from torch import Tensor

from .. import devices
from ..formats.packing import STRIP, block_columns
from ..formats.pieces import is_per_row
from ..formats.tensor import QuantizedTensor
from ..kernels import decoders
from ..kernels.unpacking import unpack_weight
from ..operands.packed import PARTS, Packed, asm_of, loader
from .bound import Bound, launch

if TYPE_CHECKING:
    from ..devices import Device

#: Columns of K and rows of N that a program unpacks.
_BLOCK = 128, 32


def unpacked(weight: QuantizedTensor) -> Tensor:
    """`weight.dequantize()` of a weight without a permutation, by a kernel if there is one; the same bits."""
    # Not the tensor's own properties, which pass through `__torch_function__`.
    own = weight.__dict__
    shape, dtype, _, group = own["static"]
    place = own["words"].device
    device = devices.current(place)
    if device is None or 0 in shape or group.bit_count() > 1:
        return weight.dequantize()
    out = torch.empty(shape, dtype=dtype, device=place)
    looks: list[Any] = []
    tensors: list[Tensor] = []
    for name in PARTS:
        part = own[name]
        if part is None:
            looks.append(None)
            continue
        looks.append((part.shape, part.dtype))
        tensors.append(part if part.is_contiguous() else part.contiguous())
    tensors.append(out)
    launch(("unpack", own["static"], *looks), tensors, lambda: unpacking(weight, device))
    return out


def unpacking(weight: QuantizedTensor, device: Device) -> Bound:
    """A launch that unpacks a weight. Its tensors are those of `PARTS` that the weight has, and the result."""
    (*batch, N, K), group, format = weight.shape, weight.group_size, weight.format
    there = {name: getattr(weight, name) is not None for name in PARTS}
    shifts = "zeros" if there["zeros"] else "offsets" if there["offsets"] else ""
    wide = weight.scales is not None and weight.scales.dtype == torch.float32
    spec = Packed.of(weight.dtype, format.name, format.bits, group, shifts, wide, N=N, K=K)
    kind = getattr(tl, str(weight.dtype).removeprefix("torch."))
    lines, groups = 4 * -(-K // block_columns(format.bits)), -(-K // group) if group else 0
    # A single matrix is not a batch: Triton 3.6 fails on a tuple in which an integer is 1.
    count = math.prod(batch)
    steps, sizes = ((-1,), (count,)) if count > 1 else ((), ())
    strips = -(-N // STRIP)
    rest = N, K, (steps, strips, lines, groups, strips * STRIP), sizes
    rows, columns = _BLOCK
    constants = {
        "LOAD": loader(spec, asm_of(device), waits=False, tma=False, paired=False),
        "FACTOR": 2.0 ** decoders.unit_of(format.code, format.bits, kind, asm_of(device)),
        "PER_ROW": is_per_row(weight), "ROWS": rows, "COLS": columns, "DTYPE": kind, **device.target.overlap,
    }  # fmt: skip
    programs = count * -(-N // columns) * -(-K // rows)
    return Bound(unpack_weight, programs, _arguments(there, bool(group), shifts, rest), constants)


def _arguments(
    there: dict[str, bool], grouped: bool, shifts: str, rest: tuple[Any, ...]
) -> Callable[[Sequence[Any]], list[Any]]:  # fmt: skip
    """The kernel's arguments for tensors.

    Args:
        there: which of `PARTS` are among the tensors.
        rest: the arguments that are not tensors.
    """

    def arguments(tensors: Sequence[Any]) -> list[Any]:
        left = iter(tensors)
        part = {name: next(left) if is_there else None for name, is_there in there.items()}
        words = (part["words"], part["scales"], part.get(shifts)) if grouped else part["words"]
        return [words, part["channel"], next(left), *rest]

    return arguments
