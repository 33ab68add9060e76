"""Products and modules of DTensors, on two ranks over gloo, against the same in one process."""

import re
from pathlib import Path

import pytest

import gemmery.nn
from tests import ranks as processes
from tests import sharded

PAGE = " ".join((Path(__file__).parents[2] / "docs" / "distributed.md").read_text(encoding="utf-8").split())
#: What `sharded.REFUSALS` has and the page quotes in full.
QUOTED = (
    "stacked",
    "reduces",
    "mixed bias",
    "elementwise halves",
    "words by x",
    "groups",
    "out",
    "SparseLinear",
    "stacked block",
    "experts of plain tokens",
    "rows of experts",
    "quantize",
)
# One worker starts the processes.
pytestmark = pytest.mark.xdist_group("ranks")
EXHAUSTIVE = pytest.mark.exhaustive


@pytest.fixture(scope="module")
def ranks():
    made = processes.Ranks()
    yield made
    made.stop()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ("bare", pytest.param("bias", marks=EXHAUSTIVE), "relu", "args"))
def test_all_placements_of_a_linear(ranks, kind):
    first, second = ranks(sharded.linears, kind)
    assert first == second
    assert len(first) == 9
    summed = "R" if kind in ("relu", "args") else "P(sum)"
    # A weight that is sharded decides; an epilogue runs behind the whole sum.
    assert first["R S(0)"] == first["S(0) S(0)"] == first["S(1) S(0)"] == "S(1)"
    assert first["S(1) S(1)"] == first["R S(1)"] == first["S(1) R"] == summed
    assert first["S(0) R"] == "S(0)"
    assert first["R R"] == "R"


@pytest.mark.parametrize(
    "function",
    (
        sharded.unusual, sharded.addends, sharded.two_dimensions, sharded.rows_of_results, sharded.scaled, sharded.lowered, sharded.others, sharded.repeated, sharded.alike,
        sharded.a_batch_of_packed_weights, sharded.a_permuted_weight,
    ),
    ids=lambda x: x.__name__,
)  # fmt: skip
def test_products(ranks, function):
    ranks(function)


def test_two_weights_are_sharded_half_by_half(ranks):
    found, _ = ranks(sharded.halves)
    assert found == {"R S(0)": "S(1)", "S(0) S(0)": "S(1)", "S(0) R": "S(0)", "S(1) S(1)": "R", "R S(1)": "R"}


@pytest.mark.parametrize("name", sharded.FORMATS)
def test_packed_weights(ranks, name):
    ranks(sharded.packed, name)


@pytest.mark.parametrize("name", sharded.REFUSALS)
def test_what_is_refused(ranks, name):
    _, kind, text = sharded.REFUSALS[name]
    for found, message in ranks(sharded.refusal, name):
        assert found is kind
        assert re.search(text, message), message
        assert name not in QUOTED or message in PAGE


@pytest.mark.parametrize("which", sharded.PLANS)
def test_tensor_parallel_modules(ranks, which):
    ranks(sharded.tensor_parallel, which)


@pytest.mark.slow
@pytest.mark.parametrize(
    "which",
    (
        "blocks",
        "int4",
        *(pytest.param(x, marks=EXHAUSTIVE) for x in ("torch", "ours", "int8", "zeros", "2:4")),
    ),
)
def test_compiled_modules(ranks, which):
    ranks(sharded.compiled, which)


@pytest.mark.parametrize(
    "is_compiled", (False, pytest.param(True, marks=EXHAUSTIVE)), ids=("eager", "compiled")
)
def test_fully_sharded_modules(ranks, is_compiled):
    ranks(sharded.fully_sharded, is_compiled)


@pytest.mark.slow
@pytest.mark.parametrize(
    "function",
    (
        sharded.a_sharded_sequence, sharded.a_packed_layer_that_fsdp_ignores, sharded.both_kinds,
        sharded.replicated_parameters, sharded.experts_and_a_way_back, sharded.packed_layers, sharded.compiled_products, sharded.checkpoints, sharded.packed_checkpoints,
    ),
    ids=lambda x: x.__name__,
)  # fmt: skip
def test_modules_and_their_state(ranks, function):
    ranks(function)


class TestExperts:
    """Experts of which each rank has some."""

    @pytest.mark.parametrize("name", sharded.EXPERTS)
    def test_expert_parallel(self, ranks, name):
        ranks(sharded.expert_parallel, name)

    @pytest.mark.slow
    @pytest.mark.parametrize(
        "name", ("gated", *(pytest.param(x, marks=EXHAUSTIVE) for x in ("biases", "int4", "2:4")))
    )
    def test_compiled(self, ranks, name):
        ranks(sharded.compiled_experts, name)

    @pytest.mark.parametrize("name", ("biases", "int4", "2:4"))
    def test_states(self, ranks, name):
        ranks(sharded.states_of_experts, name)

    @pytest.mark.parametrize(
        "function",
        (
            sharded.experts_of_a_sharded_sequence, sharded.placements_of_experts, sharded.sums_of_experts,
            sharded.experts_in_fsdp,
        ),
        ids=lambda x: x.__name__,
    )  # fmt: skip
    def test_modules(self, ranks, function):
        ranks(function)

    @pytest.mark.parametrize("change", sharded.CHANGES)
    def test_models(self, ranks, change):
        pytest.importorskip("transformers")
        ranks(sharded.experts_of_a_model, change)

    @pytest.mark.parametrize("change", ("quantize", "sparsify"))
    def test_after(self, ranks, change):
        (count, left), _ = ranks(sharded.experts_that_are_sharded, change)
        assert count == 0
        assert "is sharded (a DTensor)" in dict(left)["0"]


class TestModels:
    """`swap`, `quantize` and `sparsify` before a model is sharded, and after."""

    @pytest.fixture(autouse=True)
    def _needs_transformers(self):
        pytest.importorskip("transformers")

    @pytest.mark.parametrize("sharder", ("torch", "blocks", "hugging_face", "fsdp"))
    def test_swap_before(self, ranks, sharder):
        (count, left), _ = ranks(sharded.model_changed, "swap", sharder, True)
        assert (count, left) == (9, [])

    @pytest.mark.parametrize("change", ("quantize", "sparsify"))
    def test_packed_before(self, ranks, change):
        (count, left), _ = ranks(sharded.model_changed, change, "ours", True)
        assert (count, [name for name, _ in left]) == (7, ["lm_head"])

    @pytest.mark.parametrize("change", sharded.CHANGES)
    @pytest.mark.parametrize("sharder", ("torch", "hugging_face", "fsdp"))
    def test_after(self, ranks, change, sharder):
        (_, left), _ = ranks(sharded.model_changed, change, sharder, False)
        reasons = dict(left)
        for name in ("self_attn.q_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.down_proj"):
            assert "call this before the model is sharded" in reasons[f"model.layers.0.{name}"]

    def test_norms(self, ranks):
        ranks(sharded.norms)


def test_a_part_of_a_stacked_layers_output_is_refused():
    """As of a layer of torch's in its place whose rows are dealt out."""
    import torch

    block = gemmery.nn.GatedMLP(8, 16)
    block.gate_up = torch.nn.Linear(8, 16, bias=False)
    with pytest.raises(ValueError, match="16 columns and the block has 32"):
        block(torch.randn(4, 8))


@pytest.mark.slow
def test_a_hang_is_a_failure():
    own = processes.Ranks()
    own(sharded.ready)
    with pytest.raises(
        processes.Failed, match=r"(?s)rank 0: not done in time.*AssertionError: the other rank"
    ):
        own(sharded.late, limit=2)
    assert own._processes == []
