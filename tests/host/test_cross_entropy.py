"""Losses of a linear layer where no kernel runs: what they mean, what they refuse, and what torch expects of them."""

import copy
import doctest
import inspect
import pickle

import pytest
import torch
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import gemmery
from gemmery import linear_cross_entropy, logits, losses
from gemmery.nn import LinearCrossEntropy, cross_entropy
from tests.cross_entropy import CASES, by_torch, errors, inputs

F32, F64, BF16 = torch.float32, torch.float64, torch.bfloat16


def grads_of(loss, leaves):
    return torch.autograd.grad(loss, leaves)


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


@pytest.mark.parametrize("module", [losses, cross_entropy], ids=lambda m: m.__name__)
def test_examples(module):
    result = doctest.testmod(module)
    assert result.attempted > 0
    assert result.failed == 0


# ---------------------------------------------------------------------------------------------------------------------
# Meaning


@pytest.mark.parametrize("chunk", [None, 100], ids=["whole", "chunks"])
@pytest.mark.parametrize("case", CASES)
def test_loss_and_gradients_are_torchs(case, chunk):
    # Factors of classes are given in float32.
    assert max(errors(linear_cross_entropy, case, 33, 300, 16, F64, chunk_size=chunk)) < 1e-6
    assert max(errors(linear_cross_entropy, case, 33, 300, 16, BF16, chunk_size=chunk)) < 1e-2


@pytest.mark.skipif(not hasattr(F, "linear_cross_entropy"), reason="this torch has no such function")
def test_arguments_are_torchs():
    ours, theirs = map(inspect.signature, (linear_cross_entropy, F.linear_cross_entropy))
    shared = [name for name in theirs.parameters if name != "options"]
    assert list(ours.parameters)[: len(shared)] == shared
    for name in shared:
        assert ours.parameters[name].default == theirs.parameters[name].default
    x, weight, target, bias, factors = inputs(12, 30, 8, F64, bias=True, weights=True)
    given = {"linear_bias": bias, "weight": factors.double(), "reduction": "sum", "label_smoothing": 0.2}
    torch.testing.assert_close(
        linear_cross_entropy(x, weight, target, **given), F.linear_cross_entropy(x, weight, target, **given)
    )
    module = torch.nn.LinearCrossEntropyLoss(8, 30, bias=True, dtype=F64)
    own = LinearCrossEntropy(8, 30, bias=True, dtype=F64)
    own.load_state_dict(module.state_dict())
    torch.testing.assert_close(own(x, target), module(x, target))


@pytest.mark.parametrize("shape", [(), (7,), (2, 3), (2, 0)])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_any_shape(shape, reduction):
    x, weight, target = torch.randn(*shape, 8), torch.randn(20, 8), torch.randint(20, shape)
    loss = linear_cross_entropy(x, weight, target, reduction=reduction)
    wanted = F.cross_entropy((x @ weight.T).reshape(-1, 20), target.reshape(-1), reduction=reduction)
    torch.testing.assert_close(loss, wanted.reshape(shape if reduction == "none" else ()), equal_nan=True)


@pytest.mark.parametrize("dtype", [F32, torch.float16], ids=str)
def test_no_rows_have_gradients_of_zero(dtype):
    x, weight = torch.randn(0, 8, dtype=dtype), torch.randn(20, 8, dtype=dtype)
    x, weight = x.requires_grad_(), weight.requires_grad_()
    loss = linear_cross_entropy(x, weight, torch.zeros(0, dtype=torch.long), reduction="sum")
    of_x, of_weight = grads_of(loss, [x, weight])
    assert of_x.shape == (0, 8)
    assert torch.equal(of_weight, torch.zeros(20, 8, dtype=dtype))


def test_small_gradients_of_fp16():
    # A mean over many tokens of many classes: 1e-9, where the smallest number of fp16 is 6e-8.
    x, weight, target, bias, _ = inputs(40, 3000, 8, torch.float16, bias=True)
    leaves = [x, weight, bias]
    grads = grads_of(linear_cross_entropy(x, weight, target, linear_bias=bias) * 1e-3, leaves)
    wide = [t.detach().double().requires_grad_() for t in leaves]
    wanted = grads_of(by_torch(wide[0], wide[1], target, linear_bias=wide[2]) * 1e-3, wide)
    # Of x and where targets are, gradients are larger than what fp16 resolves.
    for grad, want in zip(grads, wanted, strict=True):
        assert (grad.double() - want).abs().max() < 2e-3 * want.abs().max() + 2.0**-24
    zero = linear_cross_entropy(x, weight, target, linear_bias=bias) * 0
    assert not any(grad.any() for grad in grads_of(zero, leaves))


@pytest.mark.parametrize("ignored", [None, -1, 3])
def test_ignored_targets(ignored):
    number = -100 if ignored is None else ignored
    x, weight, target, *_ = inputs(20, 30, 8, F64, ignored=number)
    loss = linear_cross_entropy(x, weight, target, ignore_index=ignored, z_loss=0.1)
    wanted = by_torch(x, weight, target, ignore_index=number, z_loss=0.1)
    torch.testing.assert_close(loss, wanted)
    (of_x,) = grads_of(loss, [x])
    assert not of_x[target == number].any()
    rows = linear_cross_entropy(x, weight, target, ignore_index=ignored, z_loss=0.1, reduction="none")
    assert not rows[target == number].any()


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_nothing_but_ignored_targets(reduction):
    x, weight, target, *_ = inputs(5, 30, 8, F32)
    target.fill_(-100)
    loss = linear_cross_entropy(x, weight, target, reduction=reduction)
    assert loss.isnan() if reduction == "mean" else loss == 0


def test_a_target_that_is_no_class_is_nan():
    x, weight, target, *_ = inputs(5, 30, 8, F32)
    target[1], target[2] = 30, -7
    rows = linear_cross_entropy(x, weight, target, weight=torch.ones(30), reduction="none")
    assert rows.isnan().tolist() == [False, True, True, False, False]


def test_targets_of_32_bits_and_any_strides():
    x, weight, target, *_ = inputs(12, 30, 16, F64)
    wanted = linear_cross_entropy(x[::2, ::2], weight[:, ::2], target[::2])
    torch.testing.assert_close(
        linear_cross_entropy(x[::2, ::2].contiguous(), weight[:, ::2], target[::2].int()), wanted
    )
    columns = weight.detach().t().contiguous().t().requires_grad_()
    loss = linear_cross_entropy(x, columns, target)
    torch.testing.assert_close(grads_of(loss, [columns]), grads_of(by_torch(x, weight, target), [weight]))


@pytest.mark.parametrize("wanted", ["x", "weight", "bias"])
def test_one_gradient_alone(wanted):
    x, weight, target, bias, _ = inputs(12, 300, 8, F64, bias=True)
    leaves = {"x": x, "weight": weight, "bias": bias}
    whole = dict(
        zip(leaves, grads_of(linear_cross_entropy(x, weight, target, linear_bias=bias), [*leaves.values()]), strict=True)
    )  # fmt: skip
    given = {name: t if name == wanted else t.detach() for name, t in leaves.items()}
    loss = linear_cross_entropy(given["x"], given["weight"], target, linear_bias=given["bias"], chunk_size=64)
    torch.testing.assert_close(grads_of(loss, [leaves[wanted]])[0], whole[wanted])


def test_gradients_do_not_run_where_none_is_asked_for(monkeypatch):
    ran = []
    monkeypatch.setattr(logits, "_by_blocks", lambda *args: ran.append(args))
    x, weight, target, *_ = inputs(12, 30, 8, F32)
    with torch.no_grad():
        assert not linear_cross_entropy(x, weight, target).requires_grad
    assert linear_cross_entropy(x, weight, target).requires_grad
    assert not ran


def test_backward_twice():
    x, weight, target, *_ = inputs(12, 30, 8, F32)
    loss = linear_cross_entropy(x, weight, target)
    first = torch.autograd.grad(loss, [x, weight], retain_graph=True)
    assert all(map(torch.equal, first, torch.autograd.grad(loss, [x, weight])))


@pytest.mark.parametrize("most", [None, 1, 777, 8192])
@pytest.mark.parametrize("is_kept", [False, True])
def test_blocks_cover_all_columns(most, is_kept):
    sizes = [
        (1, 5, 7), (8192, 131072, 4096), (8192, 128257, 4096), (1 << 20, 50257, 64), (16, 1 << 20, 8), (0, 9, 4),
        (9, 4, 0),
    ]  # fmt: skip
    if most == 1:
        sizes = [(1, 5, 7), (8192, 1013, 40), (0, 9, 4), (9, 4, 0)]
    for rows, classes, features in sizes:
        blocks = list(logits.blocks_of(rows, classes, features, most, is_kept=is_kept))
        assert [x.columns.start for x in blocks] == [0, *(x.columns.stop for x in blocks[:-1])]
        assert blocks[-1].columns.stop == classes
        for columns, place in blocks:
            width = columns.stop - columns.start
            elements = rows * -(-width // 16) * 16
            assert 0 < width <= (classes if most is None else most)
            if place is not None:
                # Behind the rows that are made of it, and within the gradient.
                assert is_kept
                assert columns.stop * features <= place <= classes * features - elements
            elif most is None:
                assert elements <= max(logits.LAST_BLOCK if is_kept else logits.OWN_BLOCK, 1024 * rows)


def test_large_blocks_take_no_memory_of_their_own():
    blocks = list(logits.blocks_of(8192, 131072, 4096, None, is_kept=True))
    widths = [(x.columns.stop - x.columns.start, x.place is None) for x in blocks]
    halved = [width for width in (16384, 8192, 4096) for _ in range(3)]
    assert widths == [(32768, False), *((width, False) for width in halved), *[(4096, True)] * 3]


@pytest.mark.parametrize("dtype", [F32, torch.float64])
def test_blocks_in_the_gradient_are_not_overwritten_too_early(dtype, monkeypatch):
    for name in ("BLOCK", "LAST_BLOCK"):
        monkeypatch.setattr(logits, name, 1 << 10)
    monkeypatch.setattr(logits, "_FEWEST", 16)
    monkeypatch.setattr(logits, "_MULTIPLE", 16)
    x, weight, target, *_ = inputs(12, 400, 64, dtype)
    blocks = list(logits.blocks_of(12, 400, 64, None, is_kept=True))
    assert sum(block.place is not None for block in blocks) > 2
    found = grads_of(linear_cross_entropy(x, weight, target), [x, weight])
    wanted = grads_of(torch.nn.functional.cross_entropy(x @ weight.T, target), [x, weight])
    for grad, want in zip(found, wanted, strict=True):
        torch.testing.assert_close(grad, want)


# ---------------------------------------------------------------------------------------------------------------------
# torch's machinery


def test_autocast():
    x, weight, target, bias, _ = inputs(12, 30, 8, F32, bias=True)
    with torch.autocast("cpu", torch.bfloat16):
        loss = linear_cross_entropy(x, weight, target, linear_bias=bias)
        mixed = linear_cross_entropy(x.bfloat16(), weight, target, linear_bias=bias)
    lowered = [t.detach().bfloat16().requires_grad_() for t in (x, weight, bias)]
    wanted = linear_cross_entropy(*lowered[:2], target, linear_bias=lowered[2])
    assert loss.dtype == torch.float32
    assert torch.equal(loss, wanted)
    assert torch.equal(mixed, wanted)
    for grad, want in zip(grads_of(loss, [x, weight, bias]), grads_of(wanted, lowered), strict=True):
        assert grad.dtype == torch.float32
        assert torch.equal(grad, want.float())


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing(reentrant):
    x, weight, target, *_ = inputs(12, 30, 8, F32)
    loss = checkpoint(linear_cross_entropy, x, weight, target, use_reentrant=reentrant)
    loss.backward()
    wanted = grads_of(linear_cross_entropy(x, weight, target), [x, weight])
    assert torch.equal(x.grad, wanted[0])
    assert torch.equal(weight.grad, wanted[1])


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled(dynamic):
    module = LinearCrossEntropy(8, 30, bias=True, label_smoothing=0.1, z_loss=1e-3)

    @torch.compile(fullgraph=True, backend="aot_eager", dynamic=dynamic)
    def compiled(x, target):
        return 2 * module(x.sin(), target)

    for rows in (5, 9):
        x, target = torch.randn(rows, 8, requires_grad=True), torch.randint(30, (rows,))
        leaves = [x, *module.parameters()]
        loss, wanted = compiled(x, target), 2 * module(x.sin(), target)
        torch.testing.assert_close(loss, wanted)
        torch.testing.assert_close(grads_of(loss, leaves), grads_of(wanted, leaves))


def test_transforms():
    x, weight, target, *_ = inputs(12, 30, 8, F64)
    x, weight = x.detach(), weight.detach()
    wanted = torch.func.grad(by_torch, (0, 1))(x, weight, target)
    torch.testing.assert_close(torch.func.grad(linear_cross_entropy, (0, 1))(x, weight, target), wanted)
    each = torch.func.vmap(lambda x, t: linear_cross_entropy(x, weight, t, reduction="sum"))
    torch.testing.assert_close(
        each(x.view(3, 4, 8), target.view(3, 4)),
        torch.stack(
            [
                linear_cross_entropy(a, weight, t, reduction="sum")
                for a, t in zip(x.view(3, 4, 8), target.view(3, 4), strict=True)
            ]
        ),
    )


def test_operators_keep_torchs_rules():
    x, weight, target, bias, factors = inputs(6, 20, 4, F64, bias=True, weights=True)
    args = (x, weight, bias, target, factors.double(), True, 2.0, 8, "ieee")
    torch.library.opcheck(
        torch.ops.gemmery.logits_rows.default,
        args,
        test_utils=("test_schema", "test_autograd_registration", "test_faketensor"),
    )


def test_no_second_derivative():
    x, weight, target, *_ = inputs(6, 20, 4, F64)
    (grad,) = torch.autograd.grad(linear_cross_entropy(x, weight, target), [x], create_graph=True)
    with pytest.raises(NotImplementedError, match="no gradient of a gradient"):
        grad.sum().backward()


def test_no_forward_mode():
    x, weight, target, *_ = inputs(6, 20, 4, F64)
    with pytest.raises(NotImplementedError, match="no forward-mode derivative"):
        torch.func.jvp(
            lambda x: linear_cross_entropy(x, weight.detach(), target), (x.detach(),), (x.detach(),)
        )


# ---------------------------------------------------------------------------------------------------------------------
# The module


def test_module_is_the_function():
    given = {
        "reduction": "sum", "ignore_index": 3, "label_smoothing": 0.1, "softcap": 2.0, "z_loss": 1e-3, "chunk_size": 7,
    }  # fmt: skip
    x, _, target, _, factors = inputs(12, 30, 8, F32, weights=True, ignored=3)
    module = LinearCrossEntropy(8, 30, bias=True, weight=factors, **given)
    wanted = linear_cross_entropy(
        x, module.linear.weight, target, linear_bias=module.linear.bias, weight=factors, **given
    )
    assert torch.equal(module(x, target), wanted)
    assert list(module.state_dict()) == ["weight", "linear.weight", "linear.bias"]
    for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert torch.equal(other(x, target), wanted)
    assert "z_loss=0.001" in repr(module)
    assert torch.equal(module.linear(x), gemmery.linear(x, module.linear.weight, module.linear.bias))


def test_module_of_a_head_that_exists():
    head = torch.nn.Linear(8, 30, bias=False)
    module = LinearCrossEntropy.from_linear(head, softcap=5.0, reduction="sum")
    assert module.linear.weight is head.weight
    assert (module.softcap, module.reduction) == (5.0, "sum")
    x, target = torch.randn(4, 8), torch.randint(30, (4,))
    module(x, target).backward()
    assert head.weight.grad is not None


# ---------------------------------------------------------------------------------------------------------------------
# Errors

X, W, T = torch.ones(4, 8), torch.ones(20, 8), torch.zeros(4, dtype=torch.long)
WRONG = {
    "shape of input": ((torch.ones(4, 7), W, T), {}, "input is \\(4, 7\\).*must be \\(..., 8\\)", ValueError),
    "shape of weight": ((X, torch.ones(20), T), {}, "linear_weight is \\(20,\\).*\\(C, K\\)", ValueError),
    "no class": ((X, torch.ones(0, 8), T), {}, "at least one class", ValueError),
    "shape of target": ((X, W, T[:3]), {}, "target is \\(3,\\).*must be \\(4,\\)", ValueError),
    "shape of bias": ((X, W, T), {"linear_bias": torch.ones(8)}, "linear_bias is \\(8,\\)", ValueError),
    "shape of factors": ((X, W, T), {"weight": torch.ones(4, 20)}, "weight is \\(4, 20\\)", ValueError),
    "probabilities": ((X, W, torch.ones(4, 20)), {}, "probabilities of classes are not", TypeError),
    "types": ((X, W.half(), T), {}, "input is torch.float32 and linear_weight is torch.float16", TypeError),
    "type of bias": ((X, W, T), {"linear_bias": torch.ones(20).half()}, "linear_bias is torch.float16", TypeError),
    "type of factors": ((X, W, T), {"weight": torch.ones(20, dtype=torch.long)}, "weight is torch.int64", TypeError),
    "int8": ((X.to(torch.int8), W.to(torch.int8), T), {}, "input is torch.int8", TypeError),
    "no tensor": (([1.0], W, T), {}, "input is a list", TypeError),
    "device": ((X, W.to("meta"), T), {}, "input is on cpu and linear_weight on meta", ValueError),
    "packed": ((X, gemmery.quantize(torch.ones(64, 64), "int8"), T), {}, "linear_weight is a QuantizedTensor", TypeError),
    "reduction": ((X, W, T), {"reduction": "max"}, "reduction is 'max'.*mean, sum, none", ValueError),
    "smoothing": ((X, W, T), {"label_smoothing": 1.5}, "label_smoothing is 1.5", ValueError),
    "softcap": ((X, W, T), {"softcap": 0}, "softcap is 0; it must be positive", ValueError),
    "z-loss": ((X, W, T), {"z_loss": -1.0}, "z_loss is -1.0", ValueError),
    "z-loss, type": ((X, W, T), {"z_loss": torch.ones(())}, "z_loss is a Tensor", TypeError),
    "ignore_index": ((X, W, T), {"ignore_index": 1.0}, "ignore_index is a float", TypeError),
    "chunk_size": ((X, W, T), {"chunk_size": 0}, "chunk_size is 0", ValueError),
    "chunk_size, type": ((X, W, T), {"chunk_size": 1.5}, "chunk_size is a float", TypeError),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_errors(name):
    args, how, message, kind = WRONG[name]
    with pytest.raises(kind, match=f"^linear_cross_entropy: .*{message}"):
        linear_cross_entropy(*args, **how)


def test_errors_of_the_module():
    with pytest.raises(ValueError, match="LinearCrossEntropy: weight is \\(7,\\); it must be \\(20,\\)"):
        LinearCrossEntropy(8, 20, weight=torch.ones(7))
    with pytest.raises(ValueError, match="LinearCrossEntropy: softcap is -1"):
        LinearCrossEntropy(8, 20, softcap=-1)


def test_sharded_tensors_are_refused(tmp_path):
    from torch import distributed
    from torch.distributed.tensor import DeviceMesh, distribute_tensor

    distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        sharded = distribute_tensor(W, DeviceMesh("cpu", [0]))
        with pytest.raises(ValueError, match="linear_cross_entropy: a tensor is a DTensor"):
            linear_cross_entropy(X, sharded, T)
    finally:
        distributed.destroy_process_group()
