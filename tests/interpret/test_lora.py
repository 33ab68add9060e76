"""A linear layer with an adapter through the interpreter, and the kernel that unpacks its weight."""

import gc
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

import gemmery
from gemmery.launch import bound
from gemmery.launch.bound import Bound
from gemmery.launch.unpacking import unpacked
from gemmery.product import cache, compute
from tests.lora import CASES, WEIGHTS, by_torch, errors, inputs

F32, BF16, F16, F64 = torch.float32, torch.bfloat16, torch.float16, torch.float64


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("format", ["dense", "int4", "nf4"])
def test_result_and_gradients(format, case):
    assert max(errors(*inputs((3, 7), 48, 200, 8, BF16, format=format, adapter=F32, case=case))) < 1e-2


def test_autocast_keeps_no_copy_of_the_weight_after_the_backward_pass():
    x, weight, a, b = torch.randn(5, 72), torch.randn(40, 72), torch.randn(4, 72), torch.randn(40, 4)
    with torch.autocast("cpu", torch.bfloat16):
        y = gemmery.lora_linear(x, weight, a.requires_grad_(), b.requires_grad_())
    y.float().sum().backward()
    gc.collect()
    tensors = [t for t in gc.get_objects() if isinstance(t, torch.Tensor) and t.dtype == BF16]
    assert not [t for t in tensors if t.numel() == weight.numel()]
    assert y.grad_fn is not None


@pytest.mark.parametrize("rows", [5, (2, 3), ()])
def test_the_result_may_be_changed_in_place(rows):
    x, weight, others = inputs(rows, 24, 40, 4, F32)
    leaves = [x, *others.values()]
    y, meant = gemmery.lora_linear(x, weight, **others), by_torch(x, weight, **others)
    y[..., :3] = 0
    y += 1
    found, wanted = (
        torch.autograd.grad(z.relu_().sum(), leaves) for z in (y, F.pad(meant[..., 3:], (3, 0)) + 1)
    )
    torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("how", ["mode", "negated"])
def test_torch_sees_a_backward_pass_for_which_something_is_to_be_done(how):
    x, weight, others = inputs((2, 3), 24, 40, 4, F32)
    leaves, up = [x, *others.values()], torch.randn(2, 3, 24)
    wanted = torch.autograd.grad(by_torch(x, weight, **others), leaves, up)
    y = gemmery.lora_linear(x, weight, **others)
    if how == "mode":
        with FlopCounterMode(display=False):
            found = torch.autograd.grad(y, leaves, up)
    else:
        found = torch.autograd.grad(y, leaves, torch._neg_view(-up))
    torch.testing.assert_close(found, wanted)


def test_no_columns():
    x, weight, a, b = torch.randn(3, 0), torch.randn(8, 0), torch.randn(2, 0), torch.randn(8, 2)
    assert torch.equal(gemmery.lora_linear(x, weight, a, b), torch.zeros(3, 8))


@pytest.mark.slow
def test_an_adapter_much_smaller_than_the_weight_changes_the_result():
    x, weight = torch.randn(160, 128).bfloat16(), gemmery.quantize(torch.ones(32, 128), "int4", group_size=64)
    a, b = torch.randn(4, 128).bfloat16().float(), torch.randn(32, 4)
    # At most half a unit in the last place of ones.
    b *= 2.0**-9 / (b @ a).abs().max()
    with torch.no_grad():
        without = gemmery.linear(x, weight).double()
        found = gemmery.lora_linear(x, weight, a, b).double() - without
    wanted = x.double() @ a.bfloat16().double().T @ b.bfloat16().double().T
    assert float((found * wanted).sum() / wanted.square().sum()) == pytest.approx(1, abs=0.2)


@pytest.mark.parametrize("format", sorted(set(WEIGHTS) - {"dense", "int4", "nf4"}))
def test_formats(format):
    assert max(errors(*inputs(5, 32, 128, 4, F16, format=format))) < 2e-3


@pytest.mark.parametrize(("dtype", "limit"), [(F32, 1e-6), (F64, 1e-14)], ids=str)
def test_types(dtype, limit):
    assert max(errors(*inputs(21, 48, 40, 3, dtype, case="bias, dropout"))) < limit


def test_a_row_has_the_same_bits_in_every_batch():
    x, weight, others = inputs(37, 32, 128, 8, BF16, format="int4")
    with torch.no_grad():
        whole = gemmery.lora_linear(x, weight, **others, batch_invariant=True)
        for rows in (slice(0, 1), slice(5, 9)):
            part = gemmery.lora_linear(x[rows], weight, **others, batch_invariant=True)
            assert torch.equal(part, whole[rows])


@pytest.mark.sampled(7)
@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
@pytest.mark.parametrize(
    ("format", "options"),
    [
        ("int4", {}), ("int4", {"group_size": 32, "symmetric": False}), ("int4", {"group_size": 128}), ("int8", {}),
        ("int8", {"group_size": 16}), ("nf4", {"group_size": 16}), ("mxfp4", {}), ("nvfp4", {}), ("e4m3", {}),
        ("e5m2", {}),
    ],
)  # fmt: skip
def test_an_unpacked_weight_has_the_bits_that_it_stands_for(format, options, dtype):
    for shape in ((40, 200), (2, 16, 64), (1, 300)):
        weight = gemmery.quantize(torch.randn(shape), format, dtype=dtype, **options)
        assert torch.equal(unpacked(weight), weight.dequantize()), shape
    assert unpacked(gemmery.quantize(torch.randn(0, 64), format, dtype=dtype, **options)).shape == (0, 64)


@pytest.fixture
def launches(monkeypatch):
    """Counts launches the short way, which compute nothing, so that only the host's work is left."""
    counted, prepare = Counter(), compute.prepare

    def launch(*given):
        counted["launches"] += 1
        return True

    def prepared(call, out):
        known = prepare(call, out)
        known.plan.direct, known.plan.run = launch, lambda *given: None
        return known

    monkeypatch.setattr(compute, "prepare", prepared)
    monkeypatch.setattr(Bound, "shorten", lambda self, tensors: setattr(self, "direct", launch))
    monkeypatch.setattr(Bound, "launch", lambda self, tensors: None)
    monkeypatch.setattr(bound, "_known", {})
    # Where another test has imported this, operands are examined for DTensors.
    monkeypatch.delitem(sys.modules, "torch.distributed.tensor", raising=False)
    cache.forget()
    yield counted
    # The plans do not launch anything.
    cache.forget()


@pytest.mark.parametrize(("format", "most"), [("dense", 90), ("nf4", 108)])
def test_a_repeated_step_takes_few_python_calls(launches, format, most):
    """Of gemmery's functions: each takes the host a microsecond, or two where autograd's thread runs it."""
    x, weight, others = inputs((3, 8), 64, 192, 16, BF16, format=format)
    up, calls = torch.randn(3, 8, 64).bfloat16(), Counter()

    def step():
        return torch.autograd.grad(gemmery.lora_linear(x, weight, **others), [x, *others.values()], up)

    def count(frame, event, _):
        if event == "call" and frame.f_code.co_filename.startswith(str(Path(gemmery.__file__).parent)):
            calls[frame.f_code.co_name] += 1

    step()
    launches.clear()
    sys.setprofile(count)
    try:
        step()
    finally:
        sys.setprofile(None)
    # None goes another way than the shortest.
    assert launches["launches"] == calls["launch"] >= 6
    assert calls.total() <= most, calls.most_common()
