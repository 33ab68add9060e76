"""Pages whose kernels run through the interpreter: the recipes, as a newcomer without a GPU works through them."""

import pytest

from tests import pages


@pytest.mark.slow
@pytest.mark.parametrize("page", [page for page in pages.PAGES if pages.is_interpreted(page)])
def test_code_of_pages_runs(page, tmp_path, monkeypatch):
    pages.Reader(tmp_path, monkeypatch).read(page)


def test_two_recipes_are_for_the_interpreter():
    found = [page for page in pages.PAGES if pages.is_interpreted(page)]
    assert found == ["docs/recipes/fused-kernel.md", "docs/recipes/tuned-shape.md"]
