"""Linear layers, and swapping them into models that exist."""

import copy
import pickle

import pytest
import torch
from torch import nn

import gemmery.nn
from tests.oracle import assert_product, values


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
    assert gemmery.nn.swap(after) == 3
    linears = [module for module in after.modules() if isinstance(module, nn.Linear)]
    assert [type(module) for module in linears] == [gemmery.nn.Linear] * 3
    assert all(parameter is parameters[name] for name, parameter in after.named_parameters())
    assert list(after.state_dict()) == list(before.state_dict())
    assert (after[0].weight.requires_grad, after[0].training, after[3].training) == (False, True, False)
    assert repr(after) == repr(before)
    torch.testing.assert_close(after(x), before(x))
    assert gemmery.nn.swap(after) == 0


def test_a_swapped_model_trains_like_before():
    before, after = model(), model()
    gemmery.nn.swap(after)
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
    assert gemmery.nn.swap(parent) == 1
    assert type(parent.first[0]) is gemmery.nn.Linear
    assert parent.first[0] is parent.second[0]


def test_one_layer_twice_in_one_module_stays_one():
    layer = nn.Linear(4, 4)
    twice = nn.Sequential(layer, nn.ReLU(), layer)
    assert gemmery.nn.swap(twice) == 1
    assert type(twice[2]) is gemmery.nn.Linear
    assert twice[0] is twice[2]


def test_tied_parameters_stay_tied():
    embedding, head = nn.Embedding(10, 4), nn.Linear(4, 10, bias=False)
    head.weight = embedding.weight
    tied = Parent(embedding=embedding, head=head)
    assert gemmery.nn.swap(tied) == 1
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
    assert gemmery.nn.swap(parent) == 1
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
    gemmery.nn.swap(swapped)
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


def test_frozen_and_quantised_types_do_not_matter_to_a_swap():
    """Any dtype of a plain layer is swapped: what the product supports is checked when it runs."""
    parent = nn.Sequential(nn.Linear(4, 4, dtype=torch.float16), nn.Linear(4, 4, device="meta"))
    assert gemmery.nn.swap(parent) == 2
    assert parent[1].weight.is_meta
