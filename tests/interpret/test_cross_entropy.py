"""Losses of a linear layer through the interpreter: each epilogue, blocks that are not whole, and the same bits."""

import pytest
import torch

from gemmery import linear_cross_entropy, logits
from tests.cross_entropy import CASES, errors, inputs

F32, BF16, F16, F64 = torch.float32, torch.bfloat16, torch.float16, torch.float64


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("case", CASES)
def test_loss_and_gradients_are_torchs(case):
    # The last block has 33 classes, an odd number; rows and features fill no tile.
    assert max(errors(linear_cross_entropy, case, 37, 289, 24, F32, chunk_size=256)) < 1e-5


@pytest.mark.parametrize(("dtype", "limit"), [(BF16, 1e-2), (F16, 1e-3), (F64, 1e-12)], ids=str)
def test_types(dtype, limit):
    assert max(errors(linear_cross_entropy, "bias", 37, 289, 24, dtype, chunk_size=128)) < limit


@pytest.mark.parametrize(("dtype", "limit"), [(BF16, 1e-2), (F32, 1e-5)], ids=str)
def test_blocks_that_lie_in_the_gradient_of_the_weight(dtype, limit):
    blocks = [block.place for block in logits.blocks_of(13, 289, 72, 64, is_kept=True)]
    assert len(blocks) - blocks.count(None) == 4
    assert max(errors(linear_cross_entropy, "bias", 13, 289, 72, dtype, chunk_size=64)) < limit


@pytest.mark.slow
def test_the_same_bits_each_time_and_in_a_forward_pass_alone():
    x, weight, target, bias, _ = inputs(37, 289, 24, BF16, bias=True)

    def run():
        loss = linear_cross_entropy(x, weight, target, linear_bias=bias, chunk_size=128)
        return [loss, *torch.autograd.grad(loss, [x, weight, bias])]

    first = run()
    assert all(map(torch.equal, first, run()))
    with torch.no_grad():
        assert torch.equal(linear_cross_entropy(x, weight, target, linear_bias=bias), first[0])


def test_large_logits():
    x, weight, target, *_ = inputs(6, 40, 8, F32)
    with torch.no_grad():
        x *= 300
    loss = linear_cross_entropy(x, weight, target)
    wanted = torch.nn.functional.cross_entropy(x.double() @ weight.double().T, target)
    torch.testing.assert_close(loss.double(), wanted)
    assert torch.autograd.grad(loss, x)[0].isfinite().all()


@pytest.mark.parametrize("name", ["STATISTICS", "STATISTICS_AND_TOTAL", "GRADIENT"])
def test_epilogues_are_known(name):
    # So they are traced once, and never again.
    assert getattr(logits, name).captured.key is not None
