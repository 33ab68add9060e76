"""The tutorials' kernels as a peer of the bench."""

import dataclasses

import pytest

from gemmery.lab import peers
from gemmery.lab.inputs import check, make_inputs
from gemmery.lab.suites import Row

ROW = Row("r", 40, 48, 64)


@pytest.mark.parametrize(
    ("row", "rung"),
    [
        (ROW, 8),
        (dataclasses.replace(ROW, b="row"), 6),
        (dataclasses.replace(ROW, a="row+odd"), 6),
        (dataclasses.replace(ROW, out="col"), 6),
    ],
)
def test_the_highest_rung_that_takes_the_operands(monkeypatch, row, rung):
    inputs = make_inputs(row, "fp16", 1, "cpu")
    call = peers.seed(inputs)
    assert check(call, inputs, range(row.M)) < 1e-3
    ran = []
    for number in (6, 8):
        tutorial = peers._rung(number)
        monkeypatch.setattr(tutorial, "matmul", lambda *_, number=number: ran.append(number))
    call()
    assert ran == [rung]


@pytest.mark.parametrize(
    ("row", "dtype", "message"),
    [(ROW, "bf16", "float16 matrices"), (dataclasses.replace(ROW, batch=(2,)), "fp16", "without batches")],
)
def test_what_no_rung_takes_is_left_out(row, dtype, message):
    with pytest.raises(peers.Unsuited, match=message):
        peers.seed(make_inputs(row, dtype, 1, "cpu"))
