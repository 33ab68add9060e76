"""Wide elements and matrices that are added: the config that is tried first fits, as the model takes it to."""

import pytest
import torch

from gemmery import select
from gemmery.devices import TABLE
from gemmery.lab.inspection.resources import usage
from gemmery.operands import Dense, Layout
from gemmery.problem import Problem
from gemmery.schedules import bind
from tests.compile.compiling import strictly_for

F32, BF16 = torch.float32, torch.bfloat16
SIZES = (8192, 4096, 8192)


def problem_of(out, adds):
    M, N, K = SIZES
    stored = Layout(out, (), N, 1, True)
    return Problem(
        M=M, N=N, K=K, batch=(), device=TABLE["NVIDIA H200"], a=Dense(BF16, (), K, 1, True),
        b=Dense(BF16, (), N, 1, True), out=stored, addend=stored if adds else None,
        epilogue="add_matrix" if adds else "identity",
    )  # fmt: skip


@pytest.mark.parametrize("adds", [False, True])
@pytest.mark.parametrize("out", [BF16, F32], ids=str)
def test_the_first_candidate_fits(out, adds):
    problem = problem_of(out, adds)
    config = select.candidates(problem)[0]
    # Its tile is among the largest.
    assert config.block_m * config.block_n >= 128 * 192
    (M, N, K), kinds = SIZES, [out] * (1 + adds)
    tensors = [torch.empty(shape, dtype=BF16, device="meta") for shape in ((M, K), (K, N))]
    tensors += [torch.empty(M, N, dtype=kind, device="meta") for kind in kinds]
    with strictly_for("sm_90"):
        took = usage(bind(problem, config).compile(tensors, (1.0, 1.0) if adds else ()))
    assert took.spilled == 0
    assert took.shared <= problem.device.target.shared
