"""Problems for tests of the selection: made from tensors on the meta device, which have layouts and no memory."""

import torch

from gemmery import devices
from gemmery.layout import make_problem


def make(
    M=512, N=384, K=256, *, device="interpreter", dtype=torch.float16, out_dtype=None, layout="NT", batch=(), bias=False,
    scaled=False, pad=0, start=0, **more,
):  # fmt: skip
    """A product of operands in N (row-major) or T (column-major) layout, in rows `pad` longer, from element `start` on."""

    def matrix(rows, cols, letter):
        outer, inner = (rows, cols) if letter == "N" else (cols, rows)
        size = outer * (inner + pad)
        flat = torch.empty(*batch, size + start, dtype=dtype, device="meta")[..., start:]
        whole = flat.as_strided(
            (*batch, outer, inner), (*flat.stride()[:-1], inner + pad, 1), flat.storage_offset()
        )
        return whole if letter == "N" else whole.mT

    a, b = matrix(M, K, layout[0]), matrix(K, N, layout[1])
    out = torch.empty(*batch, M, N, dtype=out_dtype or dtype, device="meta")
    addend = torch.empty(N, dtype=dtype, device="meta") if bias else None
    known = {"precision": "ieee", "fast_accum": False} | more
    return make_problem(a, b, out, addend, scaled=scaled, device=devices.TABLE[device], **known)
