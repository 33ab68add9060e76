"""The GPU tests' random numbers: new ones each run, printed where a test fails."""

import pytest
import torch

from tests.gpu.common import DRY, SEED, rng


def pytest_report_header():
    where = (
        "a dry run on the CPU"
        if DRY
        else torch.cuda.get_device_name()
        if torch.cuda.is_available()
        else "no GPU"
    )
    return f"tests/gpu: {where}, GEMMERY_TEST_SEED={SEED}"


@pytest.fixture(autouse=True)
def seeded(request):
    """Seed torch and hand out Python's random numbers, both by the run's seed and the test's name."""
    print(f"GEMMERY_TEST_SEED={SEED}")  # pytest shows it with a failure
    return rng(request.node.name)
