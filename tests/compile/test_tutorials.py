"""The rungs in Gluon compile for other machines' GPUs, and the layouts of the sparse one are Triton's own."""

import re
from pathlib import Path

import pytest
import torch
from triton import CompilationError
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from gemmery.lab.inspection.resources import usage
from gemmery.lab.inspection.sass import disassemble
from tests.compile.compiling import strictly_for

TUTORIALS = Path(__file__).resolve().parents[2] / "tutorials"


@pytest.fixture(scope="module")
def rung():
    """Loads a rung by its number, with kernels that are compiled, although there is no GPU."""
    with pytest.MonkeyPatch.context() as patch:
        # Else the tutorials would turn the interpreter on.
        patch.setenv("TRITON_INTERPRET", "0")
        patch.syspath_prepend(str(TUTORIALS))
        import _common

        yield _common.rung


@pytest.fixture(scope="module")
def sparse(rung):
    return rung(12)


# ---------------------------------------------------------------------------------------------------------------------
# The warp-specialised kernel


@pytest.mark.sampled(3)
@pytest.mark.parametrize("gelu", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("width", "turns"), [(128, True), (176, True), (72, True), (256, False), (192, False), (136, False)]
)
def test_warp_specialised_compiles(rung, width, turns, dtype, gelu):
    module = rung(10)
    tile = module.Tile(width, turns)
    assert tile in module.TILES
    a, w, out = (empty(4096, 4096, dtype=dtype) for _ in range(3))
    given = module.arguments(a, w, out, tile, 132, empty(4096, dtype=dtype) if gelu else None)
    with strictly_for("sm_90"):
        compiled = module.matmul_kernel.warmup(**given, grid=(1,))
    # With Triton 3.9, the epilogue does not find all its registers beside the widest accumulator.
    assert usage(compiled).spilled <= (96 if gelu and width == 176 else 0)
    # The newest step stays under way in the K loop, and none at the end of a tile, in both warpgroups.
    waits = re.findall(r"WARPGROUP\.DEPBAR\.LE gsb0, 0x(\d)", disassemble(compiled.asm["cubin"]))
    assert waits == ["1", "0", "1", "0"]
    kind = "bf16" if dtype == torch.bfloat16 else "f16"
    products = re.findall(r"wgmma\.mma_async\.sync\.aligned\.(\S+)", compiled.asm["ptx"])
    assert products == [f"m64n{width}k16.f32.{kind}.{kind}"] * (16 if turns else 8)
    # Everything else lies behind the ring, so that is where shared memory begins.
    others = {int(at) for at in re.findall(r"@global_smem, i32 (\d+)", compiled.asm["llir"])}
    assert min(others) == tile.stages * tile.stage_bytes


# ---------------------------------------------------------------------------------------------------------------------
# The sparse instruction


def empty(*shape, dtype=torch.int32):
    return torch.empty(shape, dtype=dtype, device="meta")


@pytest.mark.parametrize("target", ["sm_80", "sm_89", "sm_90", "sm_100", "sm_120"])
@pytest.mark.parametrize(
    ("tiles", "warps", "steps"), [(1, 8, 4), pytest.param(8, 4, 2, marks=pytest.mark.exhaustive)]
)
def test_mma_sp_compiles(sparse, target, tiles, warps, steps):
    m, n, k = 8 * tiles, 8192, 8192
    operands = (
        empty(n // 16, k // 32, 32, 4), empty(n // 16, k // 64, 32), empty(m, k // 2), empty(m, n, dtype=torch.float16),
    )  # fmt: skip
    with strictly_for(target):
        compiled = sparse.mma_sp_kernel.warmup(
            *operands, m, n, k, TILES=tiles, STEPS=steps, num_warps=warps, grid=(1,)
        )
    ptx = compiled.asm["ptx"]
    assert ptx.count("mma.sp::ordered_metadata") == ptx.count(sparse.INSTRUCTION) == 2 * steps * tiles
    assert compiled.asm["cubin"]  # so the assembler took it
    assert usage(compiled).spilled == 0
    # Each lane's 16 bytes of the weight at once, and once for all tiles.
    assert ptx.count("ld.global.v4") == 2 * steps


@pytest.mark.parametrize("target", ["sm_80", "sm_90"])
def test_expansion_compiles(sparse, target):
    half = torch.float16
    with strictly_for(target):
        compiled = sparse.expanded_kernel.warmup(
            empty(16, 4096, dtype=half), empty(4096, 2048, dtype=half), empty(4096, 256, dtype=torch.int16),
            empty(16, 4096, dtype=half), 16, 4096, 4096, 4096, 4096,
            BLOCK_M=16, BLOCK_N=64, BLOCK_K=128, num_warps=4, num_stages=4, grid=(1,),
        )  # fmt: skip
    ptx = compiled.asm["ptx"]
    assert ("wgmma" if target == "sm_90" else "mma.sync") in ptx
    assert "cp.async" in ptx  # kept numbers and x are loaded ahead


# ---------------------------------------------------------------------------------------------------------------------
# The layouts: of the dense instruction's operands Triton has its own. Those of the sparse one are the same, B twice as long.


@gluon.jit
def check_layout(shape: gl.constexpr, own: gl.constexpr, given: gl.constexpr):
    gl.static_assert(gl.to_linear_layout(own, shape) == given)


def linear(shape, places, registers):
    """The layout that a function of the rung says, by its values at powers of two."""
    lane = [list(places(2**i, *(0 for _ in registers[0]))) for i in range(5)]
    return gl.DistributedLinearLayout([list(places(0, *x)) for x in registers], lane, [], [], list(shape))


@pytest.mark.parametrize("operand", ["a", "b", "c"])
def test_layouts_are_tritons(sparse, operand):
    parent = gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[1, 1], instr_shape=[16, 8])
    shape, own, places, registers = {
        "a": ((16, 16), gl.DotOperandLayout(0, parent, 2), sparse.place_in_a, [(0, 1), (1, 0), (2, 0)]),
        "b": ((32, 8), gl.DotOperandLayout(1, parent, 2), sparse.place_in_b, [(0, 1), (1, 0), (2, 0)]),
        "c": ((16, 8), parent, sparse.place_in_c, [(1,), (2,)]),
    }[operand]
    with strictly_for("sm_80"):
        check_layout.warmup(shape, own, linear(shape, places, registers), num_warps=1, grid=(1,))
        # That it could fail: another order of registers.
        with pytest.raises(CompilationError):
            check_layout.warmup(shape, own, linear(shape, places, registers[::-1]), num_warps=1, grid=(1,))
