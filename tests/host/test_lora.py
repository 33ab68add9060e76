"""A linear layer with an adapter where no kernel runs: what it means, what it refuses, and what torch expects of it."""

import doctest

import pytest
import torch
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import gemmery
from gemmery import lora, lora_linear
from tests.lora import CASES, WEIGHTS, by_torch, dense, errors, inputs

F32, F64, BF16, F16 = torch.float32, torch.float64, torch.bfloat16, torch.float16


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def test_examples():
    result = doctest.testmod(lora)
    assert result.attempted > 0
    assert result.failed == 0


# ---------------------------------------------------------------------------------------------------------------------
# Meaning


@pytest.mark.parametrize("case", CASES)
def test_a_dense_weight(case):
    assert max(errors(*inputs((3, 7), 48, 40, 8, F64, case=case))) < 1e-14
    assert max(errors(*inputs((3, 7), 48, 40, 8, F32, case=case))) < 1e-6
    assert max(errors(*inputs((3, 7), 48, 40, 8, BF16, case=case))) < 1e-2


@pytest.mark.parametrize("adapter", [BF16, F32], ids=str)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("format", sorted(set(WEIGHTS) - {"dense"}))
def test_a_packed_weight(format, case, adapter):
    assert max(errors(*inputs(21, 48, 128, 8, BF16, format=format, case=case, adapter=adapter))) < 1e-2


def test_a_sparse_weight():
    x, weight, others = inputs(21, 64, 128, 8, BF16)
    assert max(errors(x, gemmery.sparsify(weight.detach()), others)) < 1e-2


def test_a_permuted_weight():
    for case in CASES:
        x, weight, others = inputs(21, 48, 128, 8, BF16, format="int4", case=case)
        order = torch.randperm(128)
        permuted = weight.with_parts(weight.parts() | {"permutation": order})
        assert max(errors(x, permuted, others)) < 1e-2


@pytest.mark.parametrize("shape", [(), (7,), (2, 3), (2, 0), (0,)])
def test_any_shape(shape):
    x, a, b = torch.randn(*shape, 8), torch.randn(3, 8), torch.randn(20, 3)
    weight = torch.randn(20, 8)
    a.requires_grad_()
    y = lora_linear(x, weight, a, b, scale=0.5)
    torch.testing.assert_close(y, by_torch(x, weight, a, b, scale=0.5))
    y.sum().backward()
    assert a.grad.shape == a.shape
    if not x.numel():
        assert not a.grad.any()


def test_any_strides():
    x, weight, others = inputs(24, 20, 16, 4, F64)
    wanted = lora_linear(x[::2], weight, **others)
    turned = {name: value.detach().t().contiguous().t() for name, value in others.items()}
    torch.testing.assert_close(
        lora_linear(x[::2].t().contiguous().t(), weight.t().contiguous().t(), **turned), wanted
    )
    # The gradient of a sum has strides of 0.
    assert torch.autograd.grad(wanted.sum(), others["a"])[0].shape == (4, 16)


@pytest.mark.parametrize("wanted", ["x", "a", "b", "bias", "lora_x"])
@pytest.mark.parametrize("format", ["dense", "int4"])
def test_one_gradient_alone(format, wanted):
    x, weight, others = inputs(21, 48, 128, 8, BF16, format=format, case="bias, dropout")
    every = {"x": x, **others}
    for name, value in every.items():
        value.requires_grad_(name == wanted)
    lora_linear(x, weight, **others).float().square().sum().backward()
    assert {name for name, value in every.items() if value.grad is not None} == {wanted}


def test_what_is_kept_for_the_backward_pass():
    x, weight, others = inputs(21, 48, 128, 8, BF16, format="int4")
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.numel()) or t, lambda t: t):
        lora_linear(x, weight, **others)
    # x, a, b, u and the packed weight, and nothing as large as the result or the unpacked weight.
    assert sorted(kept)[-2:] == [x.numel(), x.numel()] or max(kept) == x.numel()
    assert sum(kept) == x.numel() + 8 * (128 + 48 + 21) + sum(t.numel() for t in weight.parts().values())


def test_a_dense_weight_with_a_gradient():
    x, weight, others = inputs(21, 48, 40, 8, F64)
    weight.requires_grad_()
    leaves = [x, weight, *others.values()]
    found = torch.autograd.grad(lora_linear(x, weight, **others, scale=2.0).square().sum(), leaves)
    wanted = torch.autograd.grad(by_torch(x, weight, **others, scale=2.0).square().sum(), leaves)
    torch.testing.assert_close(found, wanted)


# ---------------------------------------------------------------------------------------------------------------------
# With torch


@pytest.mark.parametrize("format", ["dense", "nf4"])
def test_autocast(format):
    x, weight, others = inputs(21, 48, 128, 8, BF16, format=format, adapter=F32, case="bias")
    wide = x.detach().float().requires_grad_()
    given = weight.detach().float() if format == "dense" else weight
    with torch.autocast("cpu", BF16):
        y = lora_linear(wide, given, **others, scale=2.0)
    assert y.dtype == BF16
    grads = torch.autograd.grad(y.float().sum(), [wide, *others.values()])
    assert [g.dtype for g in grads] == [F32, F32, F32, BF16]
    torch.testing.assert_close(y, lora_linear(x, weight, **others, scale=2.0))
    with (
        torch.autocast("cpu", F16),
        pytest.raises(TypeError, match="autocast") if format == "nf4" else no_error(),
    ):
        lora_linear(wide, given, **others)


def no_error():
    """A context in which nothing is expected."""
    return torch.no_grad()


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing(reentrant):
    x, weight, others = inputs(21, 48, 128, 8, BF16, format="int4")

    def layer(x):
        return lora_linear(F.gelu(x), weight, **others)

    leaves = [x, *others.values()]
    layer(x).float().square().sum().backward()
    wanted = [leaf.grad.clone() for leaf in leaves]
    for leaf in leaves:
        leaf.grad = None
    checkpoint(layer, x, use_reentrant=reentrant).float().square().sum().backward()
    assert all(map(torch.equal, (leaf.grad for leaf in leaves), wanted))


@pytest.mark.parametrize("case", ["plain", "bias, dropout"])
@pytest.mark.parametrize("format", ["dense", "int4"])
def test_compile(format, case):
    x, weight, others = inputs(21, 48, 128, 8, BF16, format=format, adapter=F32, case=case)

    def step(x, others):
        return lora_linear(x, weight, **others, scale=2.0)

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager", dynamic=True)
    for rows in (21, 8):
        leaves = [x[:rows].detach().requires_grad_(), *others.values()]
        given = {name: v[:rows] if name == "lora_x" else v for name, v in others.items()}
        made, wanted = compiled(leaves[0], given), step(leaves[0], given)
        assert torch.equal(made, wanted)
        pairs = zip(
            *(torch.autograd.grad(y.float().square().sum(), leaves) for y in (made, wanted)), strict=True
        )
        assert all(torch.equal(f, w) for f, w in pairs)


def test_operators_are_as_torch_wants_them():
    x, weight, others = inputs(6, 16, 64, 4, BF16, format="int4", case="bias, dropout")
    operand = lora.weight_operand(weight)
    own = list(operand.tensors), operand.sizes, operand.text
    arguments = (x, *own, others["a"], others["b"], others["bias"], others["lora_x"], 2.0, "ieee", False)
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(torch.ops.gemmery.lora_linear.default, arguments, test_utils=checks)


@pytest.mark.parametrize("format", ["dense", "int4"])
def test_transforms(format):
    x, weight, others = inputs(6, 16, 64, 4, F32 if format == "dense" else BF16, format=format)

    def loss(a, x):
        return lora_linear(x, weight, a, others["b"], scale=2.0).float().square().sum()

    a = others["a"].detach()
    found = torch.func.grad(loss)(a, x.detach())
    a.requires_grad_()
    # Separate products round what the layer's own kernel does not.
    assert (torch.autograd.grad(loss(a, x), a)[0] - found).float().norm() < 2e-2 * found.float().norm()
    each = torch.func.vmap(torch.func.grad(loss), (None, 0))(a.detach(), x.detach().unsqueeze(1))
    assert (each.sum(0) - found).float().norm() < 2e-2 * found.float().norm()


def test_no_second_derivative():
    x, weight, others = inputs(6, 16, 64, 4, F32)
    (grad,) = torch.autograd.grad(lora_linear(x, weight, **others).square().sum(), x, create_graph=True)
    with pytest.raises(NotImplementedError, match="no gradient of a gradient"):
        grad.sum().backward()


def test_no_forward_mode():
    x, weight, others = inputs(6, 16, 64, 4, F32)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x.detach(), torch.ones_like(x))
        with pytest.raises(NotImplementedError, match="no forward-mode derivative"):
            lora_linear(dual, weight, **others)


# ---------------------------------------------------------------------------------------------------------------------
# Errors


def meta(*shape, dtype=F32):
    return torch.empty(shape, dtype=dtype)


WRONG = [
    ({"x": meta(5, 9)}, ValueError, r"x is \(5, 9\) and weight \(6, 8\); x must be \(..., 8\)"),
    ({"weight": meta(6)}, ValueError, r"weight is \(6,\); it must be \(N, K\)"),
    ({"a": meta(8, 3)}, ValueError, r"a is \(8, 3\) and weight \(6, 8\); a must be \(r, 8\)"),
    ({"b": meta(3, 6)}, ValueError, r"b is \(3, 6\), a \(3, 8\) and weight \(6, 8\); b must be \(6, 3\)"),
    ({"b": meta(6, 4)}, ValueError, r"b must be \(6, 3\)"),
    ({"bias": meta(5)}, ValueError, r"bias is \(5,\); it must be \(6,\)"),
    ({"lora_x": meta(4, 8)}, ValueError, r"lora_x is \(4, 8\) and x \(5, 8\); they must be alike"),
    ({"x": meta(5, 8, dtype=torch.int8)}, TypeError, r"x is torch.int8; it must be one of"),
    ({"weight": meta(6, 8, dtype=BF16)}, TypeError, r"weight is torch.bfloat16; they must have the same type"),
    ({"a": meta(3, 8, dtype=BF16)}, TypeError, r"a is torch.bfloat16; a must be torch.float32"),
    ({"a": meta(3, 8).to("meta")}, ValueError, r"x is on cpu and a on meta"),
    ({"a": [1]}, TypeError, r"a is a list; it must be a torch.Tensor"),
    ({"b": None}, TypeError, r"b is a NoneType; it must be a torch.Tensor"),
    ({"scale": True}, TypeError, r"scale is a bool; it must be a number"),
    ({"scale": torch.ones(())}, TypeError, r"scale is a Tensor; it must be a number"),
    ({"a": gemmery.quantize(torch.zeros(16, 64), "int8")}, TypeError, r"a is a QuantizedTensor"),
    ({"weight": gemmery.quantize(torch.zeros(16, 64), "int8")}, TypeError, r"weight is torch.bfloat16"),
    ({"precision": "fast"}, ValueError, r"precision is 'fast'"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "kind", "text"), WRONG, ids=[text for *_, text in WRONG])
def test_wrong_arguments(change, kind, text):
    given = {"x": meta(5, 8), "weight": meta(6, 8), "a": meta(3, 8), "b": meta(6, 3)}
    with pytest.raises(kind, match=text):
        lora_linear(**(given | change))


def test_adapters_of_another_type_than_x_or_float32():
    x, weight, others = inputs(6, 16, 64, 4, BF16, format="int4")
    others["a"] = others["a"].detach().half()
    with pytest.raises(TypeError, match=r"a is torch.float16; a must be torch.bfloat16 or torch.float32"):
        lora_linear(x, weight, **others)


def test_dense_of_the_tests_is_what_a_weight_stands_for():
    _, weight, _ = inputs(6, 16, 64, 4, BF16, format="int4")
    assert torch.equal(dense(weight).to(BF16), weight.dequantize())


def test_sharded_tensors_are_refused(tmp_path):
    from torch import distributed
    from torch.distributed.tensor import DeviceMesh, distribute_tensor

    distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        sharded = distribute_tensor(meta(6, 8), DeviceMesh("cpu", [0]))
        with pytest.raises(ValueError, match="lora_linear: a tensor is a DTensor"):
            lora_linear(meta(5, 8), sharded, meta(3, 8), meta(6, 3))
    finally:
        distributed.destroy_process_group()
