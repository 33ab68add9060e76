"""A sample of operands in contexts, by interpreted kernels: every kind in every context, and each with every result."""

import pytest
import torch

from tests import contexts

# What these tests are about does not depend on Triton's version.
pytestmark = pytest.mark.slow


@pytest.mark.parametrize("context", contexts.CONTEXTS)
@pytest.mark.parametrize("kind", contexts.KINDS)
def test_cells(kind, context):
    place = contexts.KINDS.index(kind) + contexts.CONTEXTS.index(context)
    contexts.check(kind, context, torch.device("cpu"), (contexts.RESULTS[place % len(contexts.RESULTS)],))


@pytest.mark.xfail(
    strict=True,
    raises=AssertionError,
    reason="compiled products with scales of blocks have a lane of their own",
)
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
