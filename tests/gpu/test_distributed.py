"""Products and modules of DTensors in bf16, on two GPUs over NCCL, against float64 on the CPU.

The cases are those of tests/sharded.py, which tests/host runs in float64 over gloo. A dry run is over gloo as well:

    GEMMERY_TEST_DEVICE=cpu PYTHONPATH=src python -m pytest --confcutdir=tests/gpu tests/gpu/test_distributed.py
"""

import pytest
import torch

from tests import ranks as processes
from tests import sharded
from tests.gpu.common import DEVICE, DRY

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not DRY and torch.cuda.device_count() < processes.COUNT, reason="there are fewer than two GPUs"
    ),
    # One worker starts the processes.
    pytest.mark.xdist_group("ranks"),
]
#: Seconds for a case: most of it compiles kernels.
LIMIT = 240.0


@pytest.fixture(scope="module")
def ranks():
    made = processes.Ranks(processes.Place(DEVICE, torch.bfloat16, scale=16))
    yield made
    made.stop()


def test_all_placements_of_a_linear(ranks):
    """With a bias, an epilogue of two results and its arguments, and gradients."""
    first, second = ranks(sharded.linears, "args", limit=LIMIT)
    assert first == second
    assert first["R S(0)"] == "S(1)"
    assert first["S(1) S(1)"] == "R"
    assert first["S(0) R"] == "S(0)"


def test_partial_sums(ranks):
    first, _ = ranks(sharded.linears, "bias", limit=LIMIT)
    assert first["S(1) S(1)"] == first["R S(1)"] == first["S(1) R"] == "P(sum)"


@pytest.mark.parametrize(
    "function",
    (sharded.addends, sharded.halves, sharded.scaled, sharded.repeated),
    ids=lambda x: x.__name__,
)
def test_products(ranks, function):
    ranks(function, limit=LIMIT)


@pytest.mark.parametrize("name", ("int4", "e4m3", "2:4"))
def test_packed_weights(ranks, name):
    ranks(sharded.packed, name, limit=LIMIT)


@pytest.mark.parametrize("which", sharded.PLANS)
def test_tensor_parallel_modules(ranks, which):
    ranks(sharded.tensor_parallel, which, limit=LIMIT)


def test_packed_layers(ranks):
    ranks(sharded.packed_layers, ("int4", "e4m3", "2:4"), limit=LIMIT)


def test_compiled_modules(ranks):
    ranks(sharded.compiled, "blocks", "aot_eager" if DRY else "inductor", limit=LIMIT)


def test_fully_sharded_modules(ranks):
    ranks(sharded.fully_sharded, False, limit=LIMIT)


@pytest.mark.parametrize(
    "function",
    (
        sharded.a_sharded_sequence, sharded.both_kinds, sharded.replicated_parameters, sharded.checkpoints,
        sharded.packed_checkpoints,
    ),
    ids=lambda x: x.__name__,
)  # fmt: skip
def test_modules_and_their_state(ranks, function):
    ranks(function, limit=LIMIT)


@pytest.mark.parametrize("name", ("gated", "int4"))
def test_expert_parallel(ranks, name):
    ranks(sharded.expert_parallel, name, limit=LIMIT)


@pytest.mark.parametrize(
    "function, args",
    ((sharded.experts_of_a_sharded_sequence, ()), (sharded.states_of_experts, ("int4",))),
    ids=lambda x: getattr(x, "__name__", ""),
)
def test_experts(ranks, function, args):
    ranks(function, *args, limit=LIMIT)


def test_a_swapped_model(ranks):
    pytest.importorskip("transformers")
    (count, left), _ = ranks(sharded.model_changed, "swap", "blocks", True, limit=LIMIT)
    assert (count, left) == (9, [])
