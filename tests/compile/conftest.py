"""The order of tests that compile for several targets."""

import pytest

#: Targets without instructions for fp8.
WITHOUT_FP8 = ("sm_80", "sm_86")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Those targets first: Triton 3.6 keeps, for the whole process, whether the first one that converts fp8 has them."""

    def is_later(item: pytest.Item) -> bool:
        target = item.callspec.params.get("target") if hasattr(item, "callspec") else None
        return target not in WITHOUT_FP8

    items.sort(key=is_later)
