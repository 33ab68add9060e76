"""torch.func: gradients, Jacobians and vmap of products."""

import pytest

from tests import func


@pytest.mark.parametrize("name", func.FUNCTIONS)
def test_transforms(name):
    func.check(name)


def test_vectors():
    func.check_vectors()


def test_packed_weights():
    func.check_packed()
