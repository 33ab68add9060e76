"""What is said of kernels without a GPU, beside what the driver says where there is one."""

import ctypes

import pytest
import torch

import gemmery
from gemmery.lab.inspection import inspect

pytestmark = pytest.mark.gpu

SIZES = [(4096, 4096, 4096), (16, 4096, 4096), (1001, 1003, 1005)]


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_resources_and_occupancy_are_the_drivers(sizes, dtype):
    if torch.version.hip is not None:
        pytest.skip("asks NVIDIA's driver")
    M, N, K = sizes
    a, b = (torch.randn(shape, device="cuda").to(dtype) for shape in ((M, K), (K, N)))
    plan = gemmery.plan(a, b)
    resources = plan.resources()
    found = inspect(plan)
    assert found.config == plan.config
    assert found.usage.registers == resources.registers
    assert found.usage.shared == resources.shared
    assert found.usage.spilled == 4 * resources.spills
    assert found.occupancy == resources.occupancy
    count = ctypes.c_int()
    status = ctypes.CDLL("libcuda.so.1").cuOccupancyMaxActiveBlocksPerMultiprocessor(
        ctypes.byref(count), ctypes.c_void_p(plan._compiled.function), ctypes.c_int(resources.threads),
        ctypes.c_size_t(resources.shared),
    )  # fmt: skip
    assert status == 0
    assert resources.occupancy.programs == count.value


def test_another_target_is_inspected_beside_a_gpu_that_goes_on():
    """The stand-in for the driver leaves, and what was compiled for the GPU still runs."""
    a, b = (torch.randn(256, 256, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    before = gemmery.matmul(a, b)
    other = "A100" if torch.cuda.get_device_capability() != (8, 0) else "H200"
    choice = gemmery.explain(256, 256, 256, device=other, top=1)
    assert inspect(choice.problem).target == choice.problem.device.arch
    assert torch.equal(gemmery.matmul(a, b), before)
    # A kernel that is compiled now, for the GPU again.
    after, exact = gemmery.matmul(a[:100], b.t()), a[:100].double() @ b.t().double()
    assert (after.double() - exact).norm() / exact.norm() < 4e-3
