"""Tuning and warming up with kernels that really run, through the interpreter, timed by a watch that pretends."""

import importlib
import io
import json
import statistics

import pytest
import torch
from rich.console import Console

import gemmery
import gemmery.nn
from gemmery import select
from gemmery.lab import tuning
from gemmery.nn.blocks import family, fuse
from gemmery.select import candidates, rank, store
from gemmery.select.samples import sample
from gemmery.tuning import warm
from gemmery.tuning.meter import Meter
from gemmery.tuning.stopwatch import Estimate
from gemmery.tuning.tuner import tune_problems

#: The module, which `gemmery.plan`, the function, hides.
plans = importlib.import_module("gemmery.launch.plan")


class Watch:
    """Runs what it times, and gives the figures that it was made with, one a call."""

    def __init__(self, figures=()):
        self.figures = list(figures)
        self.ran = 0

    def estimate(self, call):
        call()
        self.ran += 1
        return Estimate(seconds=1.0, host_bound=False)

    def cold(self, call, launches):
        call()
        figure = self.figures.pop(0) if self.figures else 1.0
        return [figure, figure, 9 * figure][:launches]


@pytest.fixture
def kept(tmp_path, monkeypatch):
    monkeypatch.setenv("GEMMERY_STORE", "1")
    monkeypatch.setenv("GEMMERY_CACHE_DIR", str(tmp_path))
    return store.current()


@pytest.mark.parametrize("bias", [False, True])
def test_later_calls_take_the_quickest(kept, bias):
    a, b = torch.randn(70, 52), torch.randn(52, 92)
    addend = torch.randn(92) if bias else None
    before = gemmery.plan(a, b, bias=addend)
    space = len(rank(before.problem))
    assert space > 1
    slowest_first = [1e-3 * (space - place) for place in range(space)]
    watch = Watch(slowest_first)
    (result,) = tune_problems([before.problem], exhaustive=True, watch=watch)
    assert list(result.seconds.values()) == slowest_first[::-1]
    assert watch.ran == len(slowest_first)
    assert result.best == rank(before.problem)[-1][0] != before.config
    # A plan that was held keeps its config; whoever asks again, by a call or for a plan, gets the other.
    after = gemmery.plan(a, b, bias=addend)
    assert after.config == candidates(before.problem)[0] == result.best
    exact = a.double() @ b.double() + (0 if addend is None else addend.double())
    assert (gemmery.matmul(a, b, bias=addend).double() - exact).norm() <= 1e-6 * exact.norm()
    assert gemmery.plan(a, b, bias=addend, config=before.config).config == before.config


def test_the_second_call_of_a_shape_asks_neither_the_store_nor_the_model(kept, monkeypatch, tmp_path):
    monkeypatch.setenv("GEMMERY_LOG", str(tmp_path / "log"))
    a, b = torch.randn(33, 48), torch.randn(48, 21)
    gemmery.matmul(a, b)
    assert len((tmp_path / "log").read_text().splitlines()) == 1

    def never(*these, **those):
        raise AssertionError("asked again")

    for module, name in (
        (plans, "candidates"),
        (plans.log, "note"),
        (store, "current"),
        (select, "_predict"),
    ):
        monkeypatch.setattr(module, name, never)
    gemmery.matmul(a, b)
    assert gemmery.plan(a, b) is not None
    with pytest.raises(AssertionError, match="asked again"):
        gemmery.matmul(a, b[:, :20])


def test_a_figure_is_the_median_of_its_launches(kept):
    p = gemmery.plan(torch.randn(20, 20), torch.randn(20, 20)).problem
    meter = Meter(Watch([5.0]))
    assert meter.seconds(p, rank(p)[0][0]) == statistics.median([5.0, 5.0, 45.0])


def test_a_problem_for_another_device_is_refused(kept):
    from tests.problems import make

    with pytest.raises(ValueError, match="for NVIDIA H200, and here is interpreter"):
        tune_problems([make(device="NVIDIA H200")], watch=Watch())


@pytest.mark.parametrize(
    "weight", [gemmery.sparsify, lambda w: gemmery.quantize(w, "int4"), lambda w: w.T.to_sparse_bsr((16, 16))]
)
def test_packed_and_sparse_weights_are_refused(kept, weight):
    x, w = torch.ones(16, 128).bfloat16(), torch.ones(64, 128).bfloat16()
    with pytest.raises(ValueError, match="tune: an operand is packed or sparse; only products of dense"):
        gemmery.tune(x, weight(w))


def test_interpreted_kernels_are_not_timed():
    with pytest.raises(ValueError, match="interpreted"):
        gemmery.tune(torch.ones(4, 8), torch.ones(8, 4))


@pytest.mark.parametrize("kind", [torch.float16, torch.int8, torch.float8_e5m2])
def test_every_kind_of_sample_runs(kept, kind):
    a, b = torch.randn(17, 40).to(kind), torch.randn(40, 24).to(kind)
    p = gemmery.plan(a, b).problem
    inputs = sample(p, "cpu", seed=0)
    gemmery.Plan(p)(*inputs)
    exact = inputs.a.double() @ inputs.b.double()
    assert (inputs.out.double() - exact).norm() <= 0.05 * exact.norm()


# ---------------------------------------------------------------------------------------------------------------------
# Warming up


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up = torch.nn.Linear(64, 256)
        self.up_again = torch.nn.Linear(64, 256)
        self.down = gemmery.nn.Linear(256, 64, bias=False, precision="tf32")
        self.other = torch.nn.Conv2d(1, 1, 1)


def test_all_linear_layers_of_a_model_are_warmed_up():
    seen = []
    first, second = gemmery.warmup(Block(), max_m=40, progress=lambda done, total: seen.append((done, total)))
    assert first.names == ["up", "up_again"]
    assert second.names == ["down"]
    assert (first.problem.N, first.problem.K, first.problem.epilogue) == (256, 64, "add_row")
    assert (second.problem.N, second.problem.K, second.problem.epilogue) == (64, 256, "identity")
    assert second.problem.precision == "tf32"
    assert first.rows == second.rows == 40
    assert first.kernels
    assert seen[-1] == (80, 80)
    assert seen == sorted(seen)


@pytest.mark.parametrize("layers", [torch.nn.Linear, gemmery.nn.Linear])
def test_what_is_warmed_up_is_what_a_call_runs(layers, monkeypatch):
    """Every problem that calls of the layer lead to was asked for by warming up, but for its M."""
    asked = set()
    real = warm.fitted
    monkeypatch.setattr(warm, "fitted", lambda problem: asked.add(problem) or real(problem))
    layer = layers(48, 80, dtype=torch.bfloat16)
    gemmery.warmup(layer, max_m=64)
    for shape in ((1, 48), (2, 48), (64, 48), (48,), (4, 16, 48), (1, 1, 48), (2, 3, 5, 48)):
        x = torch.randn(shape, dtype=torch.bfloat16)
        b = layer.weight.detach().t()
        assert gemmery.plan(x, b, bias=layer.bias.detach()).problem in asked, shape


def blocks(stacked, bias, dtype=torch.bfloat16):
    how = {"bias": bias, "dtype": dtype}
    return gemmery.nn.GatedMLP(48, 80, stacked=stacked, **how), gemmery.nn.MLP(
        48, 80, activation="gelu_tanh", **how
    )


class Llama(torch.nn.Module):
    """A block as Hugging Face's, whose replacement is made as `swap` makes it."""

    def __init__(self):
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = (
            torch.nn.Linear(*sizes, bias=False, dtype=torch.bfloat16)
            for sizes in ((48, 80), (48, 80), (80, 48))
        )
        self.act_fn = torch.nn.SiLU()


class Bert(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.dense = torch.nn.Linear(48, 80, dtype=torch.bfloat16)
        self.intermediate_act_fn = torch.nn.GELU()


def fused(block):
    kind = family(block)
    return fuse(
        kind, block, {name: gemmery.nn.Linear.from_torch(getattr(block, name)) for name in kind.layers}
    )


BLOCKS = {
    "stacked": (lambda: blocks(True, False)[0], ["gate_up", "down"]),
    "stacked, biases": (lambda: blocks(True, True)[0], ["gate_up", "down"]),
    "two": (lambda: blocks(False, False)[0], ["gate+up", "down"]),
    "two, biases": (lambda: blocks(False, True)[0], ["gate+up", "down"]),
    "mlp": (lambda: blocks(True, True)[1], ["up", "down"]),
    "mlp, no biases": (lambda: blocks(True, False)[1], ["up", "down"]),
    "Llama": (lambda: fused(Llama()), ["gate_proj+up_proj", "down_proj"]),
    "Bert": (lambda: fused(Bert()), ["dense"]),
}


@pytest.fixture
def ran(monkeypatch):
    """The problems that plans have run."""
    problems = []
    whole = gemmery.Plan.run
    monkeypatch.setattr(gemmery.Plan, "run", lambda p, *a: (problems.append(p.problem), whole(p, *a))[1])
    return problems


@pytest.mark.sampled(3)
@pytest.mark.slow
@pytest.mark.parametrize("kind", BLOCKS)
def test_blocks_are_warmed_up_as_they_run(kind, monkeypatch, ran):
    """Every problem that a forward leads to is asked for, and for every M no other."""
    make, names = BLOCKS[kind]
    asked = []
    real = warm.fitted
    monkeypatch.setattr(warm, "fitted", lambda problem: asked.append(problem) or real(problem))
    block = make()
    warmed = gemmery.warmup(block, max_m=64)
    assert [name for one in warmed for name in one.names] == names
    assert len(asked) == 64 * len(names)
    ran.clear()
    with torch.no_grad():
        for shape in ((1, 48), (2, 48), (64, 48), (48,), (4, 16, 48), (1, 1, 48), (2, 3, 5, 48)):
            block(torch.randn(shape, dtype=torch.bfloat16))
            assert set(ran) <= set(asked), shape
    sizes = {p.M for p in ran}
    assert set(ran) == {p for p in asked if p.M in sizes}


def test_layers_that_are_called_are_warmed_up_by_themselves():
    block, mlp = blocks(False, False)
    block.up.register_forward_hook(lambda *_: None)
    mlp.up = torch.nn.Linear(48, 80, dtype=torch.bfloat16)
    mlp.again = block.gate
    names = [name for one in gemmery.warmup(torch.nn.ModuleList([block, mlp]), max_m=2) for name in one.names]
    assert sorted(names) == ["0.down", "0.gate", "0.up", "1.down", "1.up"]
    # What a block runs in one product may be called elsewhere.
    block, mlp = blocks(False, False)
    mlp.again = block.gate
    names = [name for one in gemmery.warmup(torch.nn.ModuleList([block, mlp]), max_m=2) for name in one.names]
    assert sorted(names) == ["0.down", "0.gate+up", "1.again", "1.down", "1.up"]


def test_pairs_of_weights_are_alike_wherever_they_lie():
    """Up to their order in memory, which is other code, and to how the right half is aligned."""
    groups = warmed_pairs(blocks(False, False)[0] for _ in range(6))
    assert sorted(name for names in groups for name in names) == [f"{i}.gate+up" for i in range(6)]
    assert len(groups) <= 2
    groups = warmed_pairs(map(pair_apart, (0, 16, 4, 1 << 10)))
    assert groups == [["0.gate+up", "1.gate+up", "3.gate+up"], ["2.gate+up"]]


def warmed_pairs(modules):
    """The names of pairs that were warmed up together."""
    warmed = gemmery.warmup(torch.nn.ModuleList(modules), max_m=3)
    return [one.names for one in warmed if "+" in one.names[0]]


def pair_apart(gap):
    """A block with gate and up in one buffer, so many elements between them."""
    block, memory = blocks(False, False)[0], torch.randn(2 * 80 * 48 + gap, dtype=torch.bfloat16)
    block.gate.weight.data = memory[: 80 * 48].view(80, 48)
    block.up.weight.data = memory[80 * 48 + gap :].view(80, 48)
    return block


@pytest.mark.parametrize("stacked", (False, True))
def test_blocks_that_lie_elsewhere(stacked):
    with torch.device("meta"):
        block = blocks(stacked, True)[0]
    here = blocks(stacked, True)[0]
    for one, two in zip(
        gemmery.warmup(block, max_m=3, device="cpu"), gemmery.warmup(here, max_m=3), strict=True
    ):
        assert one.names == two.names
        assert (one.problem.N, one.problem.K, one.problem.epilogue) == (
            two.problem.N,
            two.problem.K,
            two.problem.epilogue,
        )


def test_the_command(tmp_path):
    console = Console(file=io.StringIO(), width=200)
    weights = [warm.Weight(96, 32, torch.float16, name="qkv"), warm.Weight(32, 96, torch.float16, bias=True)]
    assert tuning.warmup(weights, max_m=5, json_path=tmp_path / "warm.json", console=console) == 0
    qkv, _ = json.loads((tmp_path / "warm.json").read_text())
    assert (qkv["names"], qkv["N"], qkv["K"], qkv["dtype"], qkv["rows"]) == (["qkv"], 96, 32, "fp16", 5)
    said = console.file.getvalue()
    assert "qkv" in said
    assert all(config in said for config in qkv["kernels"])


def test_descriptions_stand_for_weights():
    one, two = gemmery.warmup(
        {"N": 96, "K": 32, "dtype": "fp16", "bias": True, "name": "x"}, torch.ones(96, 32), max_m=3
    )
    (layer,) = gemmery.warmup(torch.nn.Linear(32, 96, dtype=torch.float16), max_m=3)
    assert one.names == ["x"]
    assert one.problem == layer.problem
    assert two.problem.a.dtype == torch.float32
    (turned,) = gemmery.warmup(warm.Weight(96, 32, torch.float16, layout="NN"), sizes=[7])
    (held,) = gemmery.warmup(torch.ones(32, 96, dtype=torch.float16).t(), sizes=[7])
    assert turned.problem == held.problem
    assert turned.problem.M == 7


WRONG = [
    ((), {"max_m": 0}, ValueError, "from 1 on"),
    ((), {"sizes": [0]}, ValueError, "from 1 on"),
    ((3,), {}, TypeError, "an? int is given"),
    ((torch.ones(3),), {}, ValueError, r"\(3,\)"),
    ((torch.ones(3, 3, dtype=torch.complex64),), {}, TypeError, "complex64"),
    (({"N": 3},), {}, ValueError, "N, K"),
    (({"N": 3, "K": 3, "L": 3},), {}, ValueError, "N, K"),
    (({"N": 3.0, "K": 3},), {}, ValueError, "N is 3.0"),
    (({"N": 3, "K": 3, "dtype": "fp4"},), {}, ValueError, "fp4"),
    (({"N": 3, "K": 3, "layout": "TT"},), {}, ValueError, "TT"),
    (({"N": 3, "K": 3, "bias": 1},), {}, ValueError, "bias is 1"),
]


@pytest.mark.parametrize(
    ("weights", "options", "error", "message"), WRONG, ids=[str(one[3]) for one in WRONG]
)
def test_what_can_not_be_warmed_up(weights, options, error, message):
    with pytest.raises(error, match=message):
        gemmery.warmup(*weights, **options)


def test_conv1d_is_compiled_ahead():
    pytest.importorskip("transformers")
    from transformers.pytorch_utils import Conv1D

    model = torch.nn.Sequential(Conv1D(48, 32)).bfloat16()
    gemmery.nn.swap(model)
    assert [name for one in gemmery.warmup(model, max_m=2) for name in one.names] == ["0"]
