"""Linear layers, and swapping them into models that exist."""

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import gemmery.nn
from tests.oracle import assert_product, values

# What these tests are about does not depend on Triton's version.
pytestmark = pytest.mark.slow


def model():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(6, 9), nn.GELU(), nn.Sequential(nn.Linear(9, 9, bias=False), nn.Tanh()), nn.Linear(9, 4)
    )


@pytest.mark.parametrize("bias", (True, False))
def test_linear_is_torch_linear(bias):
    torch.manual_seed(0)
    ours = gemmery.nn.Linear(12, 7, bias=bias)
    torch.manual_seed(0)
    theirs = nn.Linear(12, 7, bias=bias)
    assert isinstance(ours, nn.Linear)
    assert repr(ours) == repr(theirs)
    assert ours.state_dict().keys() == theirs.state_dict().keys()
    assert all(torch.equal(ours.state_dict()[name], value) for name, value in theirs.state_dict().items())
    x = values((2, 3, 12), torch.float32)
    assert_product(ours(x), x, ours.weight.detach().t(), ours.bias.detach() if bias else None)


def test_linear_takes_device_dtype_and_precision():
    layer = gemmery.nn.Linear(4, 5, dtype=torch.bfloat16, device="cpu", precision="tf32")
    assert layer.weight.dtype == torch.bfloat16
    assert "precision='tf32'" in repr(layer)
    assert layer(torch.ones(2, 4, dtype=torch.bfloat16)).dtype == torch.bfloat16


def test_swap_keeps_values_parameters_and_state():
    before = model()
    after = copy.deepcopy(before)
    parameters = dict(after.named_parameters())
    after[0].weight.requires_grad_(False)
    after[3].eval()
    x = values((5, 6), torch.float32)
    assert len(gemmery.nn.swap(after, precision="torch")) == 3
    linears = [module for module in after.modules() if isinstance(module, nn.Linear)]
    assert [type(module) for module in linears] == [gemmery.nn.Linear] * 3
    assert all(parameter is parameters[name] for name, parameter in after.named_parameters())
    assert list(after.state_dict()) == list(before.state_dict())
    assert (after[0].weight.requires_grad, after[0].training, after[3].training) == (False, True, False)
    assert repr(after).replace(", precision='torch'", "") == repr(before)
    torch.testing.assert_close(after(x), before(x))
    assert len(gemmery.nn.swap(after, precision="torch")) == 0


def test_a_swapped_model_trains_like_before():
    before, after = model(), model()
    gemmery.nn.swap(after, precision="torch")
    x = values((5, 6), torch.float32)
    for each in (before, after):
        optimizer = torch.optim.SGD(each.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            each(x).square().sum().backward()
            optimizer.step()
    for ours, theirs in zip(after.parameters(), before.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs)


class Parent(nn.Module):
    def __init__(self, **children):
        super().__init__()
        for name, child in children.items():
            setattr(self, name, child)


def test_one_layer_in_two_modules_stays_one():
    layer = nn.Linear(4, 4)
    parent = Parent(first=nn.Sequential(layer), second=nn.Sequential(layer))
    assert len(gemmery.nn.swap(parent, precision="torch")) == 1
    assert type(parent.first[0]) is gemmery.nn.Linear
    assert parent.first[0] is parent.second[0]


def test_one_layer_twice_in_one_module_stays_one():
    layer = nn.Linear(4, 4)
    twice = nn.Sequential(layer, nn.ReLU(), layer)
    assert len(gemmery.nn.swap(twice, precision="torch")) == 1
    assert type(twice[2]) is gemmery.nn.Linear
    assert twice[0] is twice[2]


def test_tied_parameters_stay_tied():
    embedding, head = nn.Embedding(10, 4), nn.Linear(4, 10, bias=False)
    head.weight = embedding.weight
    tied = Parent(embedding=embedding, head=head)
    assert len(gemmery.nn.swap(tied, precision="torch")) == 1
    assert tied.head.weight is tied.embedding.weight


class Doubled(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


def patched():
    layer = nn.Linear(4, 4)
    layer.forward = lambda x: 3 * nn.Linear.forward(layer, x)
    return layer


def hooked(register):
    layer = nn.Linear(4, 4)
    register(layer)
    return layer


def parametrised():
    layer = nn.Linear(4, 4)
    nn.utils.parametrize.register_parametrization(layer, "weight", nn.Tanh())
    return layer


ALONE = {
    "subclass": lambda: Doubled(4, 4),
    "forward hook": lambda: hooked(
        lambda layer: layer.register_forward_hook(lambda module, args, out: 5 * out)
    ),
    "forward pre-hook": lambda: hooked(
        lambda layer: layer.register_forward_pre_hook(lambda module, args: (5 * args[0],))
    ),
    "backward hook": lambda: hooked(
        lambda layer: layer.register_full_backward_hook(lambda module, into, out: None)
    ),
    "backward pre-hook": lambda: hooked(
        lambda layer: layer.register_full_backward_pre_hook(lambda module, out: None)
    ),
    "parametrisation": parametrised,
    "weight norm": lambda: nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)),
    "patched forward": patched,
}


@pytest.mark.parametrize("name", ALONE)
def test_layers_with_code_of_their_own_are_left_alone(name):
    layer = ALONE[name]()
    parent = nn.Sequential(layer, nn.Linear(4, 4))
    x = values((2, 4), torch.float32)
    want = parent(x)
    assert len(gemmery.nn.swap(parent, precision="torch")) == 1
    assert parent[0] is layer
    torch.testing.assert_close(parent(x), want)


@pytest.mark.parametrize(
    "copied", (lambda m: pickle.loads(pickle.dumps(m)), copy.deepcopy), ids=("pickle", "deepcopy")
)
def test_copies(copied):
    original = model()
    gemmery.nn.swap(original, precision="tf32x3")
    again = copied(original)
    x = values((5, 6), torch.float32)
    assert type(again[0]) is gemmery.nn.Linear
    assert again[0].precision == "tf32x3"
    assert torch.equal(again(x), original(x))
    assert all(one is not other for one, other in zip(again.parameters(), original.parameters(), strict=True))


def test_state_dicts_go_both_ways(tmp_path):
    plain, swapped = model(), model()
    gemmery.nn.swap(swapped, precision="torch")
    with torch.no_grad():
        for parameter in plain.parameters():
            parameter.mul_(-2)
    torch.save(plain.state_dict(), tmp_path / "state.pt")
    swapped.load_state_dict(torch.load(tmp_path / "state.pt"))
    x = values((5, 6), torch.float32)
    torch.testing.assert_close(swapped(x), plain(x))
    plain.load_state_dict(swapped.state_dict())


def test_weights_changed_in_place_count():
    layer = gemmery.nn.Linear(4, 4, bias=False)
    x = values((3, 4), torch.float32)
    with torch.no_grad():
        first = layer(x)
        layer.weight.mul_(2)
        assert torch.equal(layer(x), 2 * first)


def test_undo_puts_the_same_layers_back():
    original = model()
    before, x = dict(original.named_modules()), values((5, 6), torch.float32)
    want = original(x)
    report = gemmery.nn.swap(original, precision="torch")
    report.undo()
    after = dict(original.named_modules())
    assert after.keys() == before.keys()
    assert all(after[name] is module for name, module in before.items())
    assert torch.equal(original(x), want)


def test_frozen_and_quantised_types_do_not_matter_to_a_swap():
    """Any dtype of a plain layer is swapped: what the product supports is checked when it runs."""
    parent = nn.Sequential(nn.Linear(4, 4, dtype=torch.float16), nn.Linear(4, 4, device="meta"))
    assert len(gemmery.nn.swap(parent, precision="torch")) == 2
    assert parent[1].weight.is_meta


# ---------------------------------------------------------------------------------------------------------------------
# Feed-forward blocks

ACTS = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
    "relu_squared": lambda x: F.relu(x).square(),
}

#: Against float64, relative to the largest element: a product, an activation and another product, rounded three times.
#: In bfloat16 the weights are given, so that only the values between the products and the last ones are rounded.
TOLERANCE = {torch.float64: 1e-14, torch.float32: 2e-6, torch.bfloat16: 2.0**-7}


def assert_near(actual, exact):
    assert actual.shape == exact.shape
    error = (actual.double() - exact).abs().max() / exact.abs().max()
    assert error <= TOLERANCE[actual.dtype], f"relative error {error}"


def wide(block):
    return {name: parameter.detach().double() for name, parameter in block.named_parameters()}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
@pytest.mark.parametrize("bias", (True, False))
@pytest.mark.parametrize("name", ACTS)
def test_mlp(name, bias, dtype):
    torch.manual_seed(0)
    block = gemmery.nn.MLP(9, 20, 5, activation=name, bias=bias, dtype=dtype)
    x, w = values((2, 3, 9), dtype), wide(block)
    want = F.linear(x.double(), w["up.weight"], w.get("up.bias"))
    want = F.linear(ACTS[name](want), w["down.weight"], w.get("down.bias"))
    with torch.no_grad():
        assert block(x).dtype == dtype
        assert_near(block(x), want)
        assert_near(block(x[0, 0]), want[0, 0])
        assert block(x[:0]).shape == (0, 3, 5)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
@pytest.mark.parametrize("stacked", (True, False))
@pytest.mark.parametrize("name", ACTS)
def test_gated_mlp(name, stacked, dtype):
    torch.manual_seed(0)
    bias = name in ("silu", "relu")
    block = gemmery.nn.GatedMLP(9, 20, 5, activation=name, bias=bias, stacked=stacked, dtype=dtype)
    assert {n: tuple(p.shape) for n, p in block.named_parameters() if "weight" in n} == (
        {"gate_up.weight": (40, 9), "down.weight": (5, 20)}
        if stacked
        else {"gate.weight": (20, 9), "up.weight": (20, 9), "down.weight": (5, 20)}
    )
    x, w = values((2, 3, 9), dtype), wide(block)
    if stacked:
        both = F.linear(x.double(), w["gate_up.weight"], w.get("gate_up.bias"))
        gate, up = both[..., :20], both[..., 20:]
    else:
        gate, up = (
            F.linear(x.double(), w[f"{part}.weight"], w.get(f"{part}.bias")) for part in ("gate", "up")
        )
    want = F.linear(ACTS[name](gate) * up, w["down.weight"], w.get("down.bias"))
    with torch.no_grad():
        assert block(x).dtype == dtype
        assert_near(block(x), want)
        assert_near(block(x[0, 0]), want[0, 0])
        assert block(x[:, :0]).shape == (2, 0, 5)


BLOCKS = {
    "mlp": lambda act: gemmery.nn.MLP(6, 10, activation=act, dtype=torch.float64),
    "stacked": lambda act: gemmery.nn.GatedMLP(6, 10, activation=act, dtype=torch.float64),
    "two": lambda act: gemmery.nn.GatedMLP(
        6, 10, activation=act, bias=True, stacked=False, dtype=torch.float64
    ),
}


def by_modules(block, x):
    """The block by torch's functions, with its parameters."""
    layer = lambda part, x: F.linear(x, part.weight, part.bias)  # noqa: E731
    if isinstance(block, gemmery.nn.MLP):
        return layer(block.down, block.activation(layer(block.up, x)))
    if block.stacked:
        gate, up = layer(block.gate_up, x).chunk(2, -1)
    else:
        gate, up = layer(block.gate, x), layer(block.up, x)
    return layer(block.down, block.activation(gate) * up)


def softcapped(x):
    return 3 * torch.tanh(x / 3)


@pytest.mark.parametrize("act", ("gelu", "silu", softcapped), ids=lambda act: getattr(act, "__name__", act))
@pytest.mark.parametrize("kind", BLOCKS)
def test_gradients_of_blocks(kind, act):
    torch.manual_seed(0)
    block = BLOCKS[kind](act)
    x = values((4, 6), torch.float64).requires_grad_()
    given = (x, *block.parameters())
    got, want = (torch.autograd.grad(y.square().sum(), given) for y in (block(x), by_modules(block, x)))
    for one, other in zip(got, want, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("kind", BLOCKS)
def test_copies_of_blocks(kind):
    block = BLOCKS[kind](softcapped)
    x = values((4, 6), torch.float64)
    with torch.no_grad():
        for again in (copy.deepcopy(block), pickle.loads(pickle.dumps(block))):
            assert torch.equal(again(x), block(x))
            assert repr(again) == repr(block)
            assert "activation=softcapped" in repr(again)


@pytest.mark.parametrize("kind", BLOCKS)
def test_hooks_on_layers_of_blocks_run(kind):
    block = BLOCKS[kind]("silu")
    x = values((4, 6), torch.float64)
    with torch.no_grad():
        want, seen = block(x), []
        for layer in block.children():
            layer.register_forward_hook(lambda module, args, out: seen.append(out.shape))
        torch.testing.assert_close(block(x), want)
    assert len(seen) == len(list(block.children()))


def test_options_reach_the_products():
    block = gemmery.nn.GatedMLP(32, 40, stacked=False, batch_invariant=True)
    assert all(layer.batch_invariant for layer in block.children())
    x = values((7, 32), torch.float32)
    with torch.no_grad():
        assert torch.equal(block(x)[3:4], block(x[3:4]))
    single = gemmery.nn.MLP(32, 40, precision="tf32x3")
    assert {layer.precision for layer in single.children()} == {"tf32x3"}


def test_what_blocks_refuse():
    with pytest.raises(ValueError, match=r"MLP: hidden_features is -1; it must be an integer, 0 or more"):
        gemmery.nn.MLP(4, -1)
    with pytest.raises(ValueError, match=r"GatedMLP: in_features is 4\.0"):
        gemmery.nn.GatedMLP(4.0, 4)
    with pytest.raises(ValueError, match="activation is 'softmax'"):
        gemmery.nn.MLP(4, 4, activation="softmax")
    x, w = torch.ones(2, 3), torch.ones(4, 3)
    with pytest.raises(
        ValueError, match=r"w_gate is \(4, 3\) and w_up is \(5, 3\); they must have the same shape"
    ):
        gemmery.nn.gated_linear(x, w, torch.ones(5, 3))
    with pytest.raises(ValueError, match=r"weight is \(5, 3\); it must be \(2 \* hidden, in\)"):
        gemmery.nn.stacked_gated_linear(x, torch.ones(5, 3))
    with pytest.raises(ValueError, match="inner sizes 3 and 4 differ"):
        gemmery.nn.activated_linear(x, torch.ones(4, 4))


def test_a_swapped_transformer_runs_its_kernels(monkeypatch):
    """One layer of a Llama and of a BERT, interpreted: within 1e-5 of torch, and every block is fused."""
    transformers = pytest.importorskip("transformers")
    from gemmery.product import run

    sizes = {
        "vocab_size": 20, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2,
        "max_position_embeddings": 16,
    }  # fmt: skip
    launched = []
    compute = run.compute

    def noted(call, *rest):
        if not call.ready:
            launched.append(call.op)
        return compute(call, *rest)

    monkeypatch.setattr(run, "compute", noted)
    for config, kind, block in (
        (transformers.LlamaConfig(**sizes), transformers.LlamaModel, "LlamaMLP (silu)"),
        (transformers.BertConfig(**sizes), transformers.BertModel, "BertIntermediate (gelu)"),
    ):
        torch.manual_seed(0)
        whole = kind(config).eval()
        ids = torch.tensor([[3, 4, 5, 6], [7, 8, 9, 10]])
        with torch.no_grad():
            want = whole(ids).last_hidden_state
            report = gemmery.nn.swap(whole, precision="torch")
            assert block in [what for _, what in report.replaced]
            got = whole(ids).last_hidden_state
        assert launched == ["linear"]
        launched.clear()
        assert (got - want).abs().max() <= 1e-5 * want.abs().max()


@pytest.mark.parametrize("format", ["int4", "e4m3", "mxfp4", "nf4"])
def test_a_quantised_block_runs_its_kernels(format, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=64,
        intermediate_size=96,
        num_attention_heads=4,
        num_hidden_layers=1,
        vocab_size=32,
        mlp_bias=True,
    )
    torch.manual_seed(0)
    model = transformers.LlamaModel(config).bfloat16()
    for parameter in model.layers[0].mlp.parameters():
        nn.init.normal_(parameter, std=0.3)
    gemmery.nn.quantize(model, format)
    gate, up, down = (model.layers[0].mlp.get_submodule(f"{name}_proj") for name in ("gate", "up", "down"))
    report = gemmery.nn.swap(model)
    assert f"LlamaMLP (silu, {format})" in {kind for _, kind in report.replaced}
    x = torch.randn(5, 64).bfloat16()

    def product(layer, x):
        return F.linear(x.float(), layer.weight.dequantize().float(), layer.bias.float())

    hidden = (F.silu(product(gate, x)) * product(up, x)).bfloat16()
    expected = product(down, hidden)
    actual = model.layers[0].mlp(x)
    torch.testing.assert_close(actual.float(), expected, rtol=0.02, atol=0.02 * expected.abs().max().item())


def test_conv1d_runs_a_kernel():
    pytest.importorskip("transformers")
    from transformers.pytorch_utils import Conv1D

    model = nn.Sequential(Conv1D(48, 32)).bfloat16()
    x = torch.randn(2, 5, 32).bfloat16()
    expected = model(x)
    assert len(gemmery.nn.swap(model)) == 1
    torch.testing.assert_close(model(x), expected, rtol=0.02, atol=0.02)
    assert len(gemmery.nn.quantize(model, "int8")) == 1
    torch.testing.assert_close(model(x), expected, rtol=0.05, atol=0.05)
