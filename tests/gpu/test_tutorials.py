"""The rungs in Gluon on the GPU: what they check themselves, and mma.sp against its emulation."""

import time
from pathlib import Path

import pytest
import torch

from tests.gpu.common import needs_cuda

pytestmark = [pytest.mark.gpu, needs_cuda]

TUTORIALS = Path(__file__).resolve().parents[2] / "tutorials"


@pytest.fixture(scope="module")
def common():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(TUTORIALS))
        import _common

        yield _common


@pytest.fixture(scope="module")
def rung(common):
    module = common.rung(12)
    if not module.has_mma_sp():
        pytest.skip("no sparse tensor cores")
    return module


@pytest.mark.parametrize(
    "m, n, k", [(1, 16, 64), (7, 64, 128), (8, 16, 192), (17, 80, 256), (64, 4096, 4096), (300, 1040, 2112)]
)
def test_mma_sp_is_its_emulation(rung, m, n, k):
    a = torch.randint(-3, 4, (m, k), device="cuda").half()
    w = rung.prune(torch.randint(-3, 4, (n, k), device="cuda").half())
    compressed = rung.compress(w)
    packed = rung.fragments(compressed)
    want = a.double() @ w.double().T  # sums of integers are exact in all of them
    assert torch.equal(rung.matmul(a, packed, torch.full_like(want, torch.nan).half()), want.half())
    assert torch.equal(rung.expanded(a, compressed, torch.full_like(want, torch.nan).half()), want.half())
    if n * m * k < 1 << 25:
        assert torch.equal(rung.emulated(a, packed, torch.full_like(want, torch.nan).half()), want.half())


def test_the_rung_checks_it(rung):
    names = {row.name for row in rung.check() if row.role == "this"}
    assert {"3 mma.sp", "3 mma.sp, emulated"} <= names


def test_the_warp_specialised_rung_checks_itself(common):
    module = common.rung(10)
    if not module.has_wgmma():
        pytest.skip("no wgmma")
    assert {"rung 10", "rung 10, gelu"} <= {row.name for row in module.check()}


def test_host_time_does_not_count(common):
    x = torch.zeros(1024, device="cuda")

    def slow() -> None:
        time.sleep(0.001)
        x.add_(1)

    (timed,) = common.time_us([slow], rounds=1)
    assert timed < 200
