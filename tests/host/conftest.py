"""The simulated GPU and a stopwatch on it."""

import pytest

from gemmery.tuning.stopwatch import Stopwatch
from tests.host.simulated import FakeGpu


@pytest.fixture
def gpu():
    return FakeGpu()


@pytest.fixture
def watch(gpu):
    return Stopwatch(cuda=gpu, clock=gpu.clock, flush=gpu.flush)
