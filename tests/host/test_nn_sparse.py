"""Linear layers with 2:4 sparse weights: pruned ones, those that are trained so, and models with them."""

import copy
import io
import pickle

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import gemmery.nn
from gemmery.formats import SparseTensor, load_safetensors, save_safetensors
from gemmery.nn import PrunedLinear, SparseLinear

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
METHODS = ("magnitude", "transposable")


def close(layer, x, weight, bias=None):
    """The product of 16-bit numbers in float32, rounded once."""
    expected = F.linear(x.to(weight.dtype).float(), weight.float(), None if bias is None else bias.float())
    torch.testing.assert_close(layer(x).float(), expected, rtol=2**-7, atol=1e-2)


@pytest.fixture
def weight():
    torch.manual_seed(0)
    return gemmery.sparsify(torch.randn(32, 128).bfloat16())


# --- the module for inference


@pytest.mark.parametrize("dtype", [BF16, F16, F32])
@pytest.mark.parametrize("has_bias", [True, False])
def test_forward(weight, has_bias, dtype):
    bias = torch.randn(32).bfloat16() if has_bias else None
    layer = PrunedLinear(weight, bias)
    x = torch.randn(2, 3, 128, dtype=dtype)
    assert layer(x).shape == (2, 3, 32)
    assert layer(x).dtype == dtype
    close(layer, x, weight.dense(), bias)


def test_parameters_and_gradients(weight):
    layer = PrunedLinear(weight, nn.Parameter(torch.zeros(32, dtype=BF16)))
    assert isinstance(layer.weight, SparseTensor)
    assert isinstance(layer.weight, nn.Parameter)
    assert [name for name, p in layer.named_parameters() if p.requires_grad] == ["bias"]
    x = torch.randn(4, 128, dtype=BF16, requires_grad=True)
    layer(x).sum().backward()
    torch.testing.assert_close(x.grad, weight.dense().sum(0).expand(4, -1), rtol=2**-6, atol=0.1)
    assert layer.bias.grad.equal(torch.full((32,), 4, dtype=BF16))


def test_errors_and_text_of_the_module(weight):
    with pytest.raises(
        TypeError, match=r"PrunedLinear: weight is a Tensor; it must be a SparseTensor, see gemmery\.sparsify"
    ):
        PrunedLinear(torch.ones(4, 4))
    with pytest.raises(
        TypeError, match="PrunedLinear: weight is a QuantizedTensor; it must be a SparseTensor"
    ):
        PrunedLinear(gemmery.quantize(torch.ones(16, 32), "int8"))
    with pytest.raises(ValueError, match=r"PrunedLinear: bias is \(31,\) and weight \(32, 128\)"):
        PrunedLinear(weight, torch.ones(31))
    with pytest.raises(ValueError, match=r"PrunedLinear: weight is \(2, 32, 64\); it must be \(out_features"):
        PrunedLinear(gemmery.sparsify(torch.ones(2, 32, 64)))
    with pytest.raises(
        TypeError, match=r"PrunedLinear: the input is torch\.int64; it must be a floating-point type"
    ):
        PrunedLinear(weight)(torch.ones(2, 128, dtype=torch.int64))
    text = "in_features=128, out_features=32, bias=True, pattern=2:4, batch_invariant=True"
    assert repr(PrunedLinear(weight, torch.ones(32), batch_invariant=True)) == f"PrunedLinear({text})"


@pytest.mark.parametrize("way", ["deepcopy", "pickle", "torch.save", "safetensors"])
def test_copies_and_files(weight, way, tmp_path):
    if way == "safetensors":
        pytest.importorskip("safetensors")
    layer = PrunedLinear(weight, torch.randn(32).bfloat16())
    if way == "deepcopy":
        other = copy.deepcopy(layer)
        assert other.weight.values.data_ptr() != layer.weight.values.data_ptr()
    elif way == "pickle":
        other = pickle.loads(pickle.dumps(layer))
    else:
        # Of another type, and with a channel: loading takes what there is.
        given = gemmery.sparsify(torch.zeros(32, 128).half())
        given = given.with_parts(given.parts() | {"channel": torch.ones(32)})
        other = PrunedLinear(given, torch.zeros(32).bfloat16())
        if way == "torch.save":
            file = io.BytesIO()
            torch.save(layer.state_dict(), file)
            file.seek(0)
            other.load_state_dict(torch.load(file))
        else:
            save_safetensors(tmp_path / "layer.safetensors", layer.state_dict())
            other.load_state_dict(load_safetensors(tmp_path / "layer.safetensors"))
    assert isinstance(other.weight, nn.Parameter)
    x = torch.randn(4, 128).bfloat16()
    assert other(x).equal(layer(x))


def test_loading_what_is_none(weight):
    layer = PrunedLinear(weight)
    for given in (torch.ones(32, 128), gemmery.quantize(torch.ones(32, 128), "int8")):
        with pytest.raises(RuntimeError, match=r"Error.* in loading state_dict"):
            layer.load_state_dict({"weight": given})
    with pytest.raises(RuntimeError, match="size mismatch for weight"):
        layer.load_state_dict({"weight": gemmery.sparsify(torch.ones(16, 128))})
    for given, text in (
        (weight, "prune the model first with gemmery.nn.sparsify"),
        (gemmery.quantize(torch.ones(32, 128), "int8"), "quantize the model first with gemmery.nn.quantize"),
    ):
        with pytest.raises(RuntimeError, match=f"copy_: a plain tensor can't take .*{text}"):
            nn.Linear(128, 32, False).load_state_dict({"weight": given})


def test_moving(weight):
    model = nn.Sequential(PrunedLinear(weight, torch.randn(32).bfloat16()))
    model.to(F16).to("cpu")
    assert model[0].weight.dtype == model[0].bias.dtype == F16
    close(model[0], torch.randn(4, 128).half(), model[0].weight.dense(), model[0].bias)
    assert model.to("meta")[0].weight.device.type == "meta"


# --- pruning a model


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(50, 64)
        self.up = nn.Linear(64, 128)
        self.down = gemmery.nn.Linear(128, 64, bias=False)
        self.same = self.up
        self.tied = nn.Linear(64, 128)
        self.tied.weight = self.up.weight
        self.odd = nn.Linear(63, 16)
        self.experts = gemmery.nn.Experts(2, 64, 64)
        self.lm_head = nn.Linear(64, 50, bias=False)
        self.lm_head.weight = self.embed.weight

    def forward(self, ids):
        x = self.embed(ids)
        x = x + self.down(self.up(x) + self.tied(x))
        return self.lm_head(x * self.odd(x[..., 1:]).mean(-1, keepdim=True))


def test_sparsify_and_undo():
    model = Model().bfloat16().eval()
    ids = torch.arange(5)[None]
    before, up, w = model(ids), model.up, model.up.weight
    report = gemmery.nn.sparsify(model, skip=("gone", "lm_head"))
    assert report.replaced == [
        ("up", "Linear"), ("down", "Linear"), ("tied", "Linear"), ("experts", "Experts"),
    ]  # fmt: skip
    assert report.left == [
        ("odd", "sparsify: weight is (16, 63); it must be (*batch, N, K), where K is a multiple of 4"),
        ("lm_head", "skipped by name ('lm_head')"),
        ("gone", "named in skip, but no linear layer has this name"),
    ]
    assert model.up is model.same
    assert model.tied.weight is model.up.weight
    assert type(model.up) is PrunedLinear
    assert not model.up.training
    assert model.up.sparse.dense().equal(gemmery.sparsify(w).dense())
    x = torch.randn(2, 64).bfloat16()
    close(model.up, x, gemmery.sparsify(w).dense(), model.up.bias)
    again = gemmery.nn.sparsify(model)
    assert ("experts", "it is sparse already") in again.left
    assert ("up", "it is sparse already") in again.left
    assert ("up", "it is sparse already") in gemmery.nn.quantize(model, "int8").left
    model.down = nn.Identity()
    with pytest.raises(ValueError, match="undo: at down there is a Identity"):
        report.undo()
    model = Model().bfloat16().eval()
    up = model.up
    report = gemmery.nn.sparsify(model)
    report.undo()
    assert model.up is up
    assert model(ids).equal(before)


def test_methods_and_errors_of_sparsify():
    plain = nn.Sequential(nn.Linear(64, 32), nn.Linear(32, 6))
    model = copy.deepcopy(plain)
    report = gemmery.nn.sparsify(model, "2:4", method="transposable")
    assert report.replaced == [("0", "Linear")]
    assert report.left == [
        ("1", "sparsify: weight is (6, 32); for method='transposable' N must be a multiple of 4")
    ]
    dense = model[0].sparse.dense()
    gemmery.sparsify(dense.T, method="as_is")
    (why,) = [why for name, why in gemmery.nn.sparsify(nn.Sequential(nn.Linear(64, 32)), method="as_is").left]
    assert "method='as_is' allows at most two of every four" in why
    for arguments, error, text in (
        (("model",), TypeError, "model is a str; it must be a torch.nn.Module"),
        ((plain, "1:4"), ValueError, "pattern is '1:4'"),
    ):
        with pytest.raises(error, match=f"sparsify: {text}"):
            gemmery.nn.sparsify(*arguments)
    with pytest.raises(ValueError, match="sparsify: method is 'best'"):
        gemmery.nn.sparsify(plain, method="best")
    with pytest.raises(TypeError, match="sparsify: skip is the string 'a'; it must be a sequence of names"):
        gemmery.nn.sparsify(plain, skip="a")


def test_experts():
    torch.manual_seed(0)
    model = nn.ModuleDict({"a": gemmery.nn.Experts(3, 64, 32), "b": gemmery.nn.Experts(3, 64, 48)}).bfloat16()
    x, index, weights = torch.randn(5, 64).bfloat16(), torch.randint(3, (5, 2)), torch.rand(5, 2)
    plain = copy.deepcopy(model["a"])
    report = gemmery.nn.sparsify(model)
    assert report.left == [("b", "its gate has 48 rows; a packed gate must have a multiple of 32")]
    text = "num_experts=3, in_features=64, hidden_features=32, activation=silu, bias=False, pattern=2:4"
    assert repr(model["a"]) == f"Experts({text})"
    with torch.no_grad():
        for name in ("gate_up_proj", "down_proj"):
            getattr(plain, name).copy_(getattr(model["a"], name).dense())
    near(model["a"](x, index, weights), plain(x, index, weights))
    other = gemmery.nn.Experts.of(*[gemmery.sparsify(torch.zeros(3, 64, k)) for k in (64, 32)])
    other.load_state_dict(model["a"].state_dict())
    assert other(x, index, weights).equal(model["a"](x, index, weights))
    report.undo()
    assert model["a"].gate_up_proj.requires_grad


def test_blocks_and_what_is_left():
    block = gemmery.nn.GatedMLP(64, 32, dtype=BF16)
    model = nn.ModuleDict({"mlp": block, "hooked": nn.Linear(64, 16), "packed": nn.Linear(64, 16)})
    model["hooked"].register_forward_hook(lambda *args: None)
    model["packed"] = gemmery.nn.QuantizedLinear.from_linear(model["packed"], "int8")
    x = torch.randn(3, 64).bfloat16()
    report = gemmery.nn.sparsify(model)
    assert [name for name, _ in report.replaced] == ["mlp.gate_up", "mlp.down"]
    assert report.left == [("hooked", "it has hooks"), ("packed", "it is quantized already")]
    gate, up = (x @ block.gate_up.sparse.dense().T).chunk(2, -1)
    want = (F.silu(gate) * up) @ block.down.sparse.dense().T
    torch.testing.assert_close(block(x), want, rtol=5e-2, atol=2e-2)
    assert dict(gemmery.nn.swap(model, precision="torch").left)["mlp.down"] == "already a gemmery module"


def test_loading_into_a_model_on_meta(tmp_path):
    pytest.importorskip("safetensors")

    def build():
        return nn.Sequential(nn.Linear(128, 64), nn.LayerNorm(64), nn.Linear(64, 128)).bfloat16()

    model = build()
    gemmery.nn.sparsify(model)
    save_safetensors(tmp_path / "model.safetensors", model.state_dict())
    with torch.device("meta"):
        other = build()
        assert len(gemmery.nn.sparsify(other)) == 2
    assert {p.device.type for p in other.parameters()} == {"meta"}
    other.load_state_dict(load_safetensors(tmp_path / "model.safetensors"), assign=True)
    x = torch.randn(4, 128).bfloat16()
    assert torch.equal(other(x), model(x))


# --- training


def trained(method="magnitude", dtype=BF16, **options):
    torch.manual_seed(0)
    return SparseLinear(100, 36, method=method, dtype=dtype, **options)


def near(found, want, bound=1e-2):
    assert found.shape == want.shape
    assert (found.double() - want.double()).norm() < bound * want.double().norm()


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", [BF16, F16, F32])
@pytest.mark.parametrize("method", METHODS)
def test_forward_and_gradients(method, dtype, bias):
    layer = SparseLinear(100, 36, bias, method=method, dtype=dtype)
    x, grad = torch.randn(2, 5, 100, dtype=dtype, requires_grad=True), torch.randn(2, 5, 36, dtype=dtype)
    y = layer(x)
    y.backward(grad)
    w = layer.pruned().dense(torch.float64)
    assert (w != 0).sum() == w.numel() // 2
    assert y.dtype == x.grad.dtype == layer.weight.grad.dtype == dtype
    near(y, x.double() @ w.T + (layer.bias.double() if bias else 0))
    near(x.grad, grad.double() @ w)
    # Straight through: all numbers of the dense weight have one.
    near(layer.weight.grad, grad.double().flatten(0, 1).T @ x.detach().double().flatten(0, 1))
    assert (layer.weight.grad != 0).all()
    if bias:
        near(layer.bias.grad, grad.double().sum((0, 1)))


def test_the_gradient_of_the_input_is_a_sparse_product(monkeypatch):
    from gemmery.nn import sparse

    weights = []
    linear = sparse.linear
    monkeypatch.setattr(
        sparse, "linear", lambda x, w, *args, **how: weights.append(w) or linear(x, w, *args, **how)
    )
    layer = trained("transposable")
    layer(torch.randn(2, 100, dtype=BF16, requires_grad=True)).sum().backward()
    forward, backward = weights
    assert isinstance(backward, SparseTensor)
    assert backward.dense().equal(forward.dense().T)


def test_decay():
    layer, other = trained(decay=0.5), trained()
    x = torch.randn(4, 100, dtype=BF16)
    for each in (layer, other):
        each(x).sum().backward()
    pruned = layer.pruned().dense() == 0
    near(layer.weight.grad, other.weight.grad + 0.5 * layer.weight.detach() * pruned)
    assert layer.weight.grad[~pruned].equal(other.weight.grad[~pruned])


def test_it_is_pruned_when_the_weight_has_changed(monkeypatch):
    from gemmery.nn import sparse

    calls = []
    sparsify = sparse.sparsify
    monkeypatch.setattr(sparse, "sparsify", lambda *args, **how: calls.append(1) or sparsify(*args, **how))
    layer, x = trained(), torch.randn(3, 100, dtype=BF16)
    optimizer = torch.optim.SGD(layer.parameters(), 0.1)
    layer(x)
    layer(x).sum().backward()
    assert len(calls) == 1
    optimizer.step()
    layer(x)
    assert len(calls) == 2
    near(layer(x), F.linear(x, layer.pruned().dense(), layer.bias))
    calls.clear()
    with torch.no_grad():
        layer.weight.copy_(torch.randn(36, 100))
        near(layer(x), F.linear(x, layer.pruned().dense(), layer.bias))
    layer.weight = nn.Parameter(torch.randn(36, 100, dtype=BF16))
    near(layer(x), F.linear(x, layer.pruned().dense(), layer.bias))
    layer.weight.data = torch.randn(36, 100, dtype=BF16)
    near(layer(x), F.linear(x, layer.pruned().dense(), layer.bias))
    layer.method = "transposable"
    near(layer(x), F.linear(x, layer.pruned().dense(), layer.bias))
    layer.weight.data.normal_()  # which has no version
    layer.prune()
    near(layer(x), F.linear(x, layer.pruned().dense(), layer.bias))
    layer.half()
    near(layer(x.half()), F.linear(x.half(), layer.pruned().dense(), layer.bias))


def test_a_weight_of_inference_mode():
    with torch.inference_mode():
        layer, x = trained(), torch.randn(3, 100, dtype=BF16)
        layer(x)
        layer.weight.normal_()
        near(layer(x), F.linear(x, layer.pruned().dense(), layer.bias))


@pytest.mark.parametrize("method", METHODS)
def test_on_meta_and_with_fake_tensors(method):
    from torch._subclasses.fake_tensor import FakeTensorMode

    layer = SparseLinear(64, 32, device="meta", method=method)
    assert layer(torch.empty(2, 64, device="meta")).shape == (2, 32)
    with FakeTensorMode():
        layer = SparseLinear(64, 32, method=method)
        assert layer(torch.empty(2, 64)).shape == (2, 32)


@pytest.mark.parametrize("way", ["deepcopy", "pickle"])
def test_copies_have_weights_of_their_own(way):
    layer, x = trained(), torch.randn(3, 100, dtype=BF16)
    before = layer(x)
    other = copy.deepcopy(layer) if way == "deepcopy" else pickle.loads(pickle.dumps(layer))
    assert other(x).equal(before)
    with torch.no_grad():
        other.weight.neg_()
        other.bias.zero_()
        layer.bias.zero_()
    assert not other(x).equal(layer(x))
    near(other(x), -layer(x))


def test_its_state_dict_is_a_linear_layers():
    layer, plain = trained(), nn.Linear(100, 36, dtype=BF16)
    layer(torch.randn(2, 100, dtype=BF16))
    layer.load_state_dict(plain.state_dict())
    plain.load_state_dict(layer.state_dict())
    x = torch.randn(3, 100, dtype=BF16)
    near(layer(x), F.linear(x, gemmery.sparsify(plain.weight).dense(), plain.bias))
    assert isinstance(layer, nn.Linear)


@pytest.mark.parametrize("group_size", [0, 32])
def test_a_layer_of_int4(tmp_path, group_size):
    made = [
        gemmery.quantize(gemmery.sparsify(torch.randn(64, 128).bfloat16()), "int4", group_size=group_size)
        for _ in range(2)
    ]
    layer, other = (PrunedLinear(w, torch.randn(64).bfloat16()) for w in made)
    x = torch.randn(3, 128).bfloat16()
    near(layer(x), F.linear(x, layer.sparse.dense(), layer.bias))
    other.load_state_dict(layer.state_dict())
    assert other(x).equal(layer(x))
    assert copy.deepcopy(layer).half()(x.half()).dtype == F16
    pytest.importorskip("safetensors")
    save_safetensors(tmp_path / "layer.safetensors", layer.state_dict())
    fresh = PrunedLinear(gemmery.sparsify(torch.zeros(64, 128)), torch.zeros(64).bfloat16())
    fresh.load_state_dict(load_safetensors(tmp_path / "layer.safetensors"))
    assert fresh(x).equal(layer(x))
    assert fresh.sparse.group_size == group_size
    size = ", group_size=32" if group_size else ""
    assert f"pattern=2:4, code=int4{size})" in repr(layer)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("dtype", [BF16, F16])
def test_autocast(dtype, method):
    layer, x = trained(method, F32), torch.randn(3, 100, requires_grad=True)
    with torch.autocast("cpu", dtype):
        y = layer(x)
    assert y.dtype == dtype
    y.float().sum().backward()
    assert x.grad.dtype == layer.weight.grad.dtype == F32
    w = gemmery.sparsify(layer.weight.detach().to(dtype), method=method).dense()
    near(y, F.linear(x.to(dtype), w, layer.bias.to(dtype)))
    near(layer.weight.grad, x.detach().sum(0).expand(36, 100))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("dtype", [F16, BF16, F32])
def test_backward_inside_autocast_of_another_type(dtype, method):
    layer, x = trained(method, dtype), torch.randn(3, 100, requires_grad=True)
    other = BF16 if dtype == F16 else F16
    y = layer(x.to(dtype))
    expected = torch.autograd.grad(y.float().sum(), (x, *layer.parameters()), retain_graph=True)
    with torch.autocast("cpu", other):
        found = torch.autograd.grad(y.float().sum(), (x, *layer.parameters()))
        layer(x).sum().backward()
    assert all(a.equal(b) for a, b in zip(found, expected, strict=True))
    assert layer.weight.grad.dtype == dtype


@pytest.mark.parametrize("method", METHODS)
def test_compiled(method):
    model = nn.Sequential(trained(method), nn.ReLU(), nn.Linear(36, 4, dtype=BF16))
    step = torch.compile(model, backend="aot_eager")
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for seed in range(3):
        x = torch.randn(3, 100, generator=torch.Generator().manual_seed(seed)).bfloat16()
        assert step(x).equal(model(x))
        step(x).float().square().sum().backward()
        found = [p.grad.clone() for p in model.parameters()]
        optimizer.zero_grad()
        model(x).float().square().sum().backward()
        assert all(p.grad.equal(g) for p, g in zip(model.parameters(), found, strict=True))
        optimizer.step()
        optimizer.zero_grad()


def test_there_is_no_double_backward():
    layer, x = trained(), torch.randn(3, 100, dtype=BF16, requires_grad=True)
    (grad,) = torch.autograd.grad(layer(x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


def test_from_linear_and_to_inference():
    plain = nn.Linear(100, 36, dtype=BF16).eval()
    plain.note = "kept"
    layer = SparseLinear.from_linear(plain, method="transposable", decay=2e-4, batch_invariant=True)
    assert layer.weight is plain.weight
    assert layer.bias is plain.bias
    assert (layer.note, layer.training) == ("kept", False)
    text = "in_features=100, out_features=36, bias=True, pattern=2:4, method='transposable', decay=0.0002"
    assert repr(layer) == f"SparseLinear({text}, batch_invariant=True)"
    made, x = layer.to_inference(), torch.randn(3, 100, dtype=BF16)
    assert type(made) is PrunedLinear
    assert (made.bias is plain.bias, made.training, made.batch_invariant) == (True, False, True)
    assert made(x).equal(layer(x))
    model = nn.ModuleDict({"a": layer, "b": SparseLinear(64, 32)})
    model["b"].weight.data.normal_()
    report = gemmery.nn.sparsify(model)
    assert report.replaced == [("a", "SparseLinear"), ("b", "SparseLinear")]
    assert model["a"].sparse.dense().equal(made.sparse.dense())
    assert model["a"].batch_invariant
    report.undo()
    assert model["a"] is layer
    left = gemmery.nn.quantize(nn.Sequential(layer), "int8").left
    assert left == [("0", "it is a gemmery.nn.sparse.SparseLinear, not torch's own Linear")]
    assert gemmery.nn.swap(nn.Sequential(layer)).left == [("0", "already a gemmery module")]


def test_errors_of_the_layer():
    for arguments, how, text in (
        ((6, 4), {}, "in_features is 6; it must be a multiple of 4"),
        ((8, 6), {"method": "transposable"}, "out_features is 6; it must be a multiple of 4 for method"),
        ((8, 8), {"method": "as_is"}, "method is 'as_is'; it must be one of magnitude, transposable"),
    ):
        with pytest.raises(ValueError, match=f"SparseLinear: {text}"):
            SparseLinear(*arguments, **how)
        with pytest.raises(ValueError, match=f"SparseLinear: {text}"):
            SparseLinear.from_linear(nn.Linear(*arguments), **how)
    for decay, error, text in (
        (-1, ValueError, "decay is -1; it must be 0 or more"),
        (float("nan"), ValueError, "decay is nan"),
        ("a", TypeError, "decay is 'a'; it must be a number"),
        (True, TypeError, "decay is True"),
    ):
        with pytest.raises(error, match=f"SparseLinear: {text}"):
            SparseLinear(64, 96, decay=decay)
        with pytest.raises(error, match=f"SparseLinear: {text}"):
            SparseLinear.from_linear(nn.Linear(64, 96), decay=decay)
    for kind in (SparseLinear, PrunedLinear):
        text = f"{kind.__name__}.from_linear: layer is a Conv2d; it must be a torch.nn.Linear"
        with pytest.raises(TypeError, match=text):
            kind.from_linear(nn.Conv2d(4, 4, 1))
    assert SparseLinear(8, 6).weight.shape == (6, 8)
    with pytest.raises(TypeError, match=r"SparseLinear: the input is torch\.int64"):
        SparseLinear(8, 8)(torch.ones(2, 8, dtype=torch.int64))


@pytest.mark.parametrize("method", METHODS)
def test_training_finds_a_sparse_weight(method):
    """A regression onto a 2:4 matrix: the pattern is found from random numbers."""
    torch.manual_seed(0)
    target = gemmery.sparsify(torch.randn(16, 32), method="transposable").dense().float()
    layer = SparseLinear(32, 16, False, method=method)
    optimizer = torch.optim.Adam(layer.parameters(), 2e-2)
    for _ in range(300):
        x = torch.randn(64, 32)
        loss = F.mse_loss(layer(x), x @ target.T)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    error = (layer.pruned().dense().float() - target).norm() / target.norm()
    assert error < 0.3
