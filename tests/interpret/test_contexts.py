"""A sample of operands in contexts, by interpreted kernels: every kind in every context, and each with every result."""

import pytest
import torch

from tests import contexts

# What these tests are about does not depend on Triton's version.
pytestmark = pytest.mark.slow


@pytest.mark.sampled(7)
@pytest.mark.parametrize("context", contexts.CONTEXTS)
@pytest.mark.parametrize("kind", contexts.KINDS)
def test_cells(kind, context):
    place = contexts.KINDS.index(kind) + contexts.CONTEXTS.index(context)
    contexts.check(kind, context, torch.device("cpu"), (contexts.RESULTS[place % len(contexts.RESULTS)],))


@pytest.mark.parametrize("kind", ("scaled by block", "scaled by mx"))
def test_a_compiled_product_with_scales_of_blocks_has_no_wide_operands(kind):
    case, graphs = contexts.Case.of(kind, "bare", torch.device("cpu")), []

    def backend(graph, inputs):
        graphs.append(graph.code)
        return graph

    torch.compiler.reset()
    torch.compile(lambda: case.run(), fullgraph=True, backend=backend)()
    assert graphs
    assert not any("gemmery.gemm" in code or "torch.float32" in code for code in graphs)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("kind", contexts.WEIGHTS)
def test_a_compiled_packed_product_saves_no_wide_matrix(kind):
    """Its epilogue is in the kernel forward, and what is saved of the product is in the operands' type."""
    case = contexts.Case.of(kind, "prebuilt epilogue", torch.device("cpu"))
    leaves = [t.detach().requires_grad_() for t in case.leaves.values()]
    step, saved = contexts.compile_case(case), []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        step(*leaves)
    assert saved
    assert not [t for t in saved if t.shape == contexts.SIZE[:2] and t.dtype == torch.float32]
