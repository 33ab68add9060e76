"""The kernels of routing compile for every target, keep to their registers, and move 16 bytes a thread at a time."""

import re

import pytest
import torch

from gemmery.devices import ARCHS
from gemmery.kernels import routing as kernels
from gemmery.lab.inspection.resources import usage
from gemmery.lab.targets import TARGETS
from gemmery.moe import routing as moe
from tests.compile.compiling import strictly_for, waits_first

#: One for each of the compiler's back ends.
BACK_ENDS = ("sm_80", "sm_90", "gfx942")
K, COLUMNS, GROUPS = 8, 2048, 128


def empty(*shape, dtype=torch.int32):
    return torch.empty(shape, dtype=dtype, device="meta")


def sorting(dtype, overlap):
    """The kernels of `route` for ids of a type, compiled, by name."""
    ids, made = empty(4096, dtype=dtype), [empty(4096) for _ in range(5)]
    for name, layout in (("", (1, 1, 0)), (" strided", (K, 64, 2))):
        given = (ids, *made, 4096, K, GROUPS, layout)
        few = kernels.route_few.warmup(
            *given, ROWS=moe._ROWS, COLS=moe._COLS, num_warps=8, grid=(1,), **overlap
        )
        yield "few" + name, few
        for groups, size, bins in ((GROUPS, moe._BLOCK, 256), (1100, moe._LARGE_BLOCK, moe._BINS)):
            given = (ids, made[0], 1 << 18, 1 << 11, groups, layout)
            how = {"BLOCK": size, "grid": (1,), **overlap}
            count = kernels.count_blocks.warmup(*given, BINS=bins, num_warps=size // 64, **how)
            yield f"count {groups}{name}", count
            given = (ids, *made, 1 << 18, 1 << 11, K, groups, layout)
            place = kernels.place_blocks.warmup(*given, COLS=moe._OTHERS, num_warps=size // 32, **how)
            yield f"place {groups}{name}", place
    yield "sum", kernels.sum_blocks.warmup(*made[:4], 1 << 11, GROUPS, CHUNK=moe._CHUNK, grid=(1,), **overlap)


def combining(dtype, weights, overlap):
    """The kernels of `combine` and its gradients, compiled, by name."""
    y, inverse, offs = empty(4096, COLUMNS, dtype=dtype), empty(4096), empty(GROUPS)
    w = None if weights is None else empty(4096, dtype=weights)
    how = {**moe._choices_of(K), **moe._widths(y), "grid": (1,), **overlap}
    given = (y, w, inverse, offs, y, GROUPS, COLUMNS, (COLUMNS, 1), (0, 0) if w is None else (K, 1))
    yield "combine", kernels.combine_rows.warmup(*given, **how)
    yield "spread", kernels.spread_rows.warmup(*given, **how)
    if w is not None:
        given = (y, y, inverse, offs, w, K, GROUPS, COLUMNS, (COLUMNS, 1), (COLUMNS, 1))
        yield "dots", kernels.dot_rows.warmup(*given, **moe._widths(y), grid=(1,), **overlap)


def check(target, ids, dtype, weights):
    with strictly_for(target):
        for name, compiled in sorting(ids, ARCHS[target].overlap):
            # ptxas may aim at so few registers that it parks some.
            assert usage(compiled).spilled <= 32, name
            assert waits_first(compiled), name
        for name, compiled in combining(dtype, weights, ARCHS[target].overlap):
            assert usage(compiled).spilled == 0, name
            assert waits_first(compiled), name
            moves = set(re.findall(r"\b(?:ld|st)\.global\S*", compiled.asm.get("ptx", "")))
            wide = "v2.b64" if dtype == torch.float64 else "v4.b32"
            assert not moves or f"ld.global.{wide}" in moves, (name, moves)
            assert not moves or name == "dots" or f"st.global.{wide}" in moves, (name, moves)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("target", BACK_ENDS)
def test_every_back_end(target):
    check(target, torch.int64, torch.bfloat16, torch.float32)


@pytest.mark.exhaustive
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("target", TARGETS)
def test_every_target(target, dtype):
    check(target, torch.int32, dtype, None if dtype == torch.float16 else dtype)
