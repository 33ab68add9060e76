"""Every operand in every context, without kernels; see `tests.contexts`."""

import collections
import itertools

import pytest
import torch

from tests import contexts

CELLS = list(itertools.product(contexts.KINDS, contexts.RESULTS, contexts.CONTEXTS))
#: How many cells have a value ("str"), an error or none; on a GPU or not, with kernels or without.
COUNTS = (
    (False, False, {"str": 1562, "Raises": 328, "Absent": 350}),
    (False, True, {"str": 1562, "Raises": 328, "Absent": 350}),
    (True, True, {"str": 1668, "Raises": 330, "Absent": 242}),
)


#: One format stands for the others of packed weights, which go the same way.
SAMPLED = [
    pytest.param(kind, marks=pytest.mark.exhaustive)
    if (kind in contexts.PACKED and kind != "int4") or kind in ("scaled by row", "scaled by block")
    else kind
    for kind in contexts.KINDS
]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("context", contexts.CONTEXTS)
@pytest.mark.parametrize("kind", SAMPLED)
def test_cells(kind, context):
    contexts.check(kind, context, torch.device("cpu"))


@pytest.mark.parametrize(("gpu", "kernels", "counts"), COUNTS)
def test_no_cell_is_left_out(gpu, kernels, counts):
    """Whoever adds a kind, a result or a context says of each new cell what it is; these numbers change then."""
    verdicts = [contexts.verdict(*cell, gpu, kernels) for cell in CELLS]
    assert len(verdicts) == 16 * 7 * 20
    assert collections.Counter(type(x).__name__ for x in verdicts) == counts
    assert all(x.why for x in verdicts if isinstance(x, contexts.Absent))
