"""Composing a kernel of functions costs nothing: the compiler makes of it what it makes of one long function."""

from tests.compile import child
from tests.compile.compiling import strictly_for


def test_composed_kernel_is_as_good_as_a_plain_one():
    with strictly_for("sm_90"):
        composed, plain = (
            child.report_of(made) for made in (child.compile_gemm("NT"), child.compile_plain())
        )
    # Tensor-core instructions, copies to shared memory, stores and barriers.
    assert composed["counts"] == plain["counts"]
    assert composed["counts"]["wgmma.mma_async"] > 0
    assert abs(composed["registers"] - plain["registers"]) <= 8
    assert composed["shared"] == plain["shared"]
    assert composed["spilled"] == plain["spilled"] == 0
