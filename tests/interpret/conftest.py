"""A quick interpreter, and tests that do not depend on those before them."""

import pytest

from tests.interpreter import make_quick


@pytest.fixture(autouse=True)
def nothing_is_remembered():
    """Each test begins without the calls and plans of the tests before it, so it does the same alone and among them."""
    from gemmery.product import cache

    cache.forget()


@pytest.fixture(scope="session", autouse=True)
def quick_interpreter():
    with pytest.MonkeyPatch.context() as patches:
        make_quick(patches.setattr)
        yield
