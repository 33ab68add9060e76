"""Adapters of peft on layers of gemmery: what peft computes, its switches, files, and what it can't do."""

import copy

import pytest
import torch
from torch import nn

pytest.importorskip("peft")

import peft
from peft import LoraConfig, PeftModel, get_peft_model

import gemmery.nn
import gemmery.nn.peft as ours
from gemmery.nn.peft import LoraLinear

BF16, F32 = torch.bfloat16, torch.float32


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(64, 96), nn.Linear(96, 32, bias=False)

    def forward(self, x):
        return self.down(torch.nn.functional.silu(self.up(x)))


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def adapted(dtype=F32, format=None, *, is_ours=False, seed=1, **options):
    """A model with adapters that are not zero."""
    model = Model().to(dtype)
    if format is not None:
        gemmery.nn.quantize(model, format)
    if is_ours:
        model.up, model.down = map(gemmery.nn.Linear.from_torch, (model.up, model.down))
    options = {"r": 4, "lora_alpha": 8, "target_modules": ["up", "down"]} | options
    made = get_peft_model(model, ours.register(LoraConfig(**options)))
    randomize(made, seed)
    return made


def randomize(model, seed):
    draws = torch.Generator().manual_seed(seed)
    for name, value in model.named_parameters():
        if "lora_B" in name:
            with torch.no_grad():
                value.copy_(torch.randn(value.shape, generator=draws) * 0.3)


def as_peft(model):
    """The same model with peft's own layers, over dense weights."""
    model = copy.deepcopy(model)
    for module in model.modules():
        if isinstance(module, LoraLinear):
            module.__class__ = peft.tuners.lora.layer.Linear
            base = module.base_layer
            if isinstance(base, gemmery.nn.QuantizedLinear):
                plain = nn.Linear(
                    base.in_features, base.out_features, base.bias is not None, dtype=base.weight.dtype
                )
                plain.weight = nn.Parameter(base.weight.dequantize(), requires_grad=False)
                plain.bias = base.bias
                module.base_layer = plain
    return model


def grads_of(model, x):
    y = model(x)
    y.float().square().sum().backward()
    return y.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def compare(model, x, limit):
    found, wanted = grads_of(model, x), grads_of(as_peft(model), x)
    assert found[1].keys() == wanted[1].keys()
    assert all("lora" in name for name in found[1])
    for f, w in ((found[0], wanted[0]), *((found[1][name], wanted[1][name]) for name in found[1])):
        assert (f.dtype, f.shape) == (w.dtype, w.shape)
        assert (f - w).float().norm() <= limit * w.float().norm()


def calls(monkeypatch):
    """How often the one call is taken."""
    seen = []
    real = ours.lora_linear
    monkeypatch.setattr(
        ours, "lora_linear", lambda *args, **kwargs: seen.append(kwargs) or real(*args, **kwargs)
    )
    return seen


OPTIONS = {
    "plain": {}, "rslora": {"use_rslora": True}, "bias of the adapter": {"lora_bias": True, "target_modules": ["up"]},
}  # fmt: skip


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_a_dense_layer(options, monkeypatch):
    seen = calls(monkeypatch)
    model = adapted(is_ours=True, **options)
    compare(model, torch.randn(3, 5, 64), 1e-5)
    assert len(seen) == len(options.get("target_modules", "12"))


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("format", ["int4", "nf4", "e4m3"])
def test_a_packed_layer(format, options, monkeypatch):
    seen = calls(monkeypatch)
    # peft multiplies adapters of float32 in float32 here, and rounds otherwise.
    compare(adapted(BF16, format, **options), torch.randn(40, 64, dtype=BF16), 2e-2)
    assert seen
    assert {p.dtype for name, p in adapted(BF16, format).named_parameters() if "lora" in name} == {F32}


def test_autocast():
    with torch.autocast("cpu", BF16):
        compare(adapted(BF16, "int4"), torch.randn(40, 64, dtype=BF16), 2e-2)
        compare(adapted(F32, is_ours=True), torch.randn(40, 64), 2e-2)


def test_layers_of_torch_are_fused(monkeypatch):
    seen = calls(monkeypatch)
    model = get_peft_model(Model(), LoraConfig(r=4, target_modules=["up", "down"]))
    randomize(model, 1)
    assert ours.fuse(model) == ["base_model.model.up", "base_model.model.down"]
    assert ours.fuse(model) == []
    compare(model, torch.randn(6, 64), 1e-5)
    assert len(seen) == 2


def test_dropout(monkeypatch):
    seen = calls(monkeypatch)
    model = adapted(is_ours=True, lora_dropout=0.5)
    x = torch.randn(6, 64)
    torch.manual_seed(3)
    found = grads_of(model, x)
    torch.manual_seed(3)
    wanted = grads_of(as_peft(model), x)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-4)
    assert all(kwargs["lora_x"] is not None for kwargs in seen)
    seen.clear()
    model.eval()(x)
    assert all(kwargs["lora_x"] is None for kwargs in seen)
    assert len(seen) == 2


def test_several_adapters(monkeypatch):
    model = adapted(is_ours=True)
    second = ours.register(LoraConfig(r=2, lora_alpha=6, target_modules=["up"]))
    model.add_adapter("second", second)
    randomize(model, 7)
    model.base_model.set_adapter(["default", "second"])
    seen = calls(monkeypatch)
    compare(model, torch.randn(6, 64), 1e-5)
    assert len(seen) == 2


def test_what_peft_does_itself(monkeypatch):
    seen = calls(monkeypatch)
    model, x = adapted(is_ours=True), torch.randn(6, 64)
    wanted = model(x)
    assert len(seen) == 2
    seen.clear()
    with model.disable_adapter():
        assert not torch.equal(model(x), wanted)
    torch.testing.assert_close(model.eval()(x, adapter_names=["default"] * 6), wanted)
    model.merge_adapter()
    torch.testing.assert_close(model(x), wanted)
    assert not seen
    model.unmerge_adapter()
    torch.testing.assert_close(model(x), wanted)
    assert len(seen) == 2
    seen.clear()
    handle = model.base_model.model.up.base_layer.register_forward_hook(lambda *given: None)
    torch.testing.assert_close(model(x), wanted)
    assert len(seen) == 1
    handle.remove()


def test_dora_is_pefts(monkeypatch):
    seen = calls(monkeypatch)
    model = adapted(is_ours=True, use_dora=True)
    compare(model, torch.randn(6, 64), 1e-5)
    assert not seen


def test_a_packed_weight_takes_no_adapter_in():
    model = adapted(BF16, "int4")
    with pytest.raises(NotImplementedError, match=r"merge: the layer's weight is packed \(format=int4\)"):
        model.merge_adapter()
    with model.disable_adapter():
        assert torch.equal(
            model(torch.ones(2, 64, dtype=BF16)), as_plain(model)(torch.ones(2, 64, dtype=BF16))
        )


def as_plain(model):
    """The model without its adapters."""
    return model.unload()


def test_files(tmp_path):
    model, x = adapted(BF16, "int4"), torch.randn(6, 64, dtype=BF16)
    wanted = model(x)
    model.save_pretrained(tmp_path)
    torch.manual_seed(0)
    base = Model().to(BF16)
    gemmery.nn.quantize(base, "int4")
    config = ours.register(LoraConfig.from_pretrained(tmp_path))
    again = PeftModel.from_pretrained(base, tmp_path, config=config)
    assert torch.equal(again(x), wanted)


def test_training_and_copies():
    model, x = adapted(BF16, "nf4"), torch.randn(64, 64, dtype=BF16)
    target = torch.randn(64, 32)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    losses = []
    for _ in range(20):
        loss = (model(x).float() - target).square().mean()
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert losses[-1] < 0.8 * losses[0]
    assert torch.equal(copy.deepcopy(model)(x), model(x))


def test_wrong_config():
    with pytest.raises(TypeError, match=r"config is a dict; it must be a peft.LoraConfig"):
        ours.register({})


@pytest.mark.parametrize("options", [{}, {"lora_dropout": 0.5}], ids=["plain", "dropout"])
def test_compile(options):
    model, x = adapted(BF16, "int4", **options), torch.randn(6, 64, dtype=BF16)
    compiled = torch.compile(model.base_model.model, backend="aot_eager", fullgraph=True)
    torch.manual_seed(3)
    found = grads_of(compiled, x)
    model.zero_grad()
    torch.manual_seed(3)
    wanted = grads_of(model.base_model.model, x)
    assert torch.equal(found[0], wanted[0])
    for f, w in zip(found[1].values(), wanted[1].values(), strict=True):
        assert (f - w).norm() <= 1e-5 * w.norm()
