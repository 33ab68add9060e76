"""What tests of block-sparse products share: random matrices with their dense twins, and problems without tensors."""

from __future__ import annotations

import torch

from gemmery import Problem
from gemmery.operands import Dense, Layout
from gemmery.operands.blocks import Blocks, Picked

SIZES = (16, 32, 64, 128)


def mask_of(rows, cols, density, seed=0, gaps=True):
    """Which of so many blocks are stored; with `gaps`, none of the first row and of the last column, if there are more."""
    generator = torch.Generator().manual_seed(seed)
    mask = torch.rand(rows, cols, generator=generator) < density
    if gaps and rows > 1 and cols > 1:
        mask[0] = False
        mask[:, -1] = False
    return mask


def values_at(dense, mask):
    """The blocks of a matrix where a mask is true, row by row."""
    block = dense.shape[0] // mask.shape[0]
    parts = dense.unflatten(1, (-1, block)).unflatten(0, (-1, block)).permute(0, 2, 1, 3)
    return parts[mask.to(dense.device)]


def sparse(values, mask):
    """The BSR tensor of blocks where a mask is true; differentiable."""
    block, device = values.shape[-1], values.device
    ends = torch.cat([torch.zeros(1, dtype=torch.int64), mask.sum(1).cumsum(0)]).to(device)
    places = mask.nonzero()[:, 1].contiguous().to(device)
    size = tuple(block * n for n in mask.shape)
    return torch.sparse_bsr_tensor(ends, places, values, size=size, check_invariants=False)


def whole(mask, block, dtype=torch.bool):
    """A mask of blocks as one of elements."""
    return mask.repeat_interleave(block, 0).repeat_interleave(block, 1).to(dtype)


def random_matrix(rows, cols, block, density=0.5, dtype=torch.float32, device="cpu", seed=0, gaps=True):
    """A block-sparse matrix of so many blocks, the same as a dense one, and its mask."""
    mask = mask_of(rows, cols, density, seed, gaps)
    generator = torch.Generator().manual_seed(seed + 1)
    dense = torch.randn(rows * block, cols * block, generator=generator) * whole(mask, block)
    dense = dense.to(dtype).to(device)
    return sparse(values_at(dense, mask), mask), dense, mask


def problem_of(M, N, K, block, *, is_b, average, device, dtype=torch.bfloat16, direct=True, turned=None):
    """The problem of a product with a block-sparse operand.

    Args:
        average: blocks of a line.
        direct: whether blocks are stored in the order of visits.
        turned: whether blocks are column-major; as of a Linear's weight by default.
    """
    turned = is_b and direct if turned is None else turned
    strides = (1, block) if turned else (block, 1)
    tables = (Layout(torch.int32, (), 0, 1, True),) * (2 if direct else 3)
    blocks = Blocks(dtype, (), *strides, True, None, block, is_b, average, tables)
    a = blocks if not is_b else Dense(dtype, (), K, 1, True)
    b = blocks if is_b else Dense(dtype, (), N, 1, True)
    return Problem(M=M, N=N, K=K, batch=(), a=a, b=b, out=Dense(dtype, (), N, 1, True), device=device)


def sampled_problem(count, K, block, *, device, rows=4096, cols=4096, dtype=torch.bfloat16):
    """The problem of a product that is computed at so many blocks."""
    steps = (block * block,)
    table = Layout(torch.int32, (0,), 0, 1, True)
    a = Picked(dtype, (0,), K, 1, True, None, block, rows, table)
    b = Picked(dtype, (0,), cols, 1, True, None, block, cols, table)
    out = Dense(dtype, steps, block, 1, True)
    return Problem(M=block, N=block, K=K, batch=(count,), a=a, b=b, out=out, device=device)
