"""Every operand in every context, on the GPU; see `tests.contexts`."""

import pytest
import torch

from tests import contexts

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("context", contexts.CONTEXTS)
@pytest.mark.parametrize("kind", contexts.KINDS)
def test_cells(kind, context):
    contexts.check(kind, context, torch.device("cuda"))
