"""2:4 sparse weights by `mma.sp`: every kernel that may be chosen compiles without spills, and its PTX is right."""

import re

import pytest
import torch
from torch.nn import functional as F
from torch.sparse._semi_structured_conversions import sparse_semi_structured_from_dense_cutlass

import gemmery
from gemmery import epilogues
from gemmery.devices import ARCHS
from gemmery.formats.sparse import SparseTensor
from gemmery.lab.abstract import linear_problem
from gemmery.lab.inspection.resources import usage
from gemmery.lab.inspection.sass import disassemble
from gemmery.operands.sparse import SparseOperand
from gemmery.problem import Config
from gemmery.schedules import bind
from gemmery.schedules.sliced_sparse import SLICED_SPARSE
from gemmery.select.space import tiles_of

from .compiling import device_of, strictly_for
from .running import Memory, Program, parameters

pytestmark = pytest.mark.skipif(not SLICED_SPARSE.available(), reason="sliced_sparse needs another Triton")

TARGETS = SLICED_SPARSE.archs
#: Targets, and the tiles that there are for them.
TILES = [
    (target, str(x.config))
    for target in TARGETS
    for x in tiles_of(ARCHS[target].family, "sparse")
    if x.config.schedule == "sliced_sparse"
]


def on_meta(tensor):
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def bound(target, text, x, weight, bias=None, epilogue=None):
    """The binding of a product, and its kernel."""
    tensors = [on_meta(x), weight.to("meta"), None if bias is None else on_meta(bias)]
    problem = linear_problem(tensors[0], tensors[1], device_of(target), bias=tensors[2], epilogue=epilogue)
    with strictly_for(target):
        binding = bind(problem, Config.of(text))
        out = torch.empty(problem.M, problem.out_n, dtype=x.dtype, device="meta")
        launched = (
            tensors[0],
            *SparseOperand(tensors[1]).launched,
            out,
            *([] if bias is None else tensors[2:]),
        )
        return binding, binding.compile(launched, (1, 1))


@pytest.mark.sampled(41)
@pytest.mark.parametrize("cut", ["", "-k2"], ids=["whole", "cut"])
@pytest.mark.parametrize(("target", "text"), TILES)
def test_no_number_spills(target, text, cut):
    x = torch.empty(int(text.split("x")[0]), 2048, dtype=torch.bfloat16, device="meta")
    weight = gemmery.sparsify(torch.zeros(512, 2048, dtype=torch.bfloat16)).to("meta")
    binding, compiled = bound(target, f"{text.removesuffix('-swap')}{cut}-swap", x, weight)
    assert compiled.asm["ptx"].count("mma.sp::ordered_metadata.sync.aligned.m16n8k32") >= 8
    # Of four matrices at a time, and nothing is loaded by smaller parts.
    assert "ldmatrix.sync.aligned.m8n8.x4" in compiled.asm["ptx"]
    took, sass = usage(compiled), disassemble(compiled.asm["cubin"])
    assert took.spilled <= 4 * binding.harmless_spills
    # What spills lies outside the loop, whose instructions lie between the first product and the last one.
    loop = sass[sass.index("HMMA.SP") : sass.rindex("HMMA.SP")]
    assert not re.findall(r"\b(?:STL|LDL)\b.*", loop)
    assert took.shared <= device_of(target).target.shared
    assert "HMMA.SP.16832" in sass
    # Before the loop and in it, a lane loads eight times 16 bytes of kept numbers of each step, and its activations.
    c = binding.config
    activations = max(1, c.block_m * c.block_k // 8 // (32 * c.num_warps))
    assert len(re.findall(r"LDG\.E\.128", sass)) == 2 * c.num_stages * (8 + activations)
    assert not re.findall(r"LDG\.E\.U16", sass)


def torch_weight(n, k, dtype):
    """A weight as torch's own converter lays it out, and the dense one."""
    dense = gemmery.sparsify(torch.randn(n, k)).dense(dtype)
    values, metadata = sparse_semi_structured_from_dense_cutlass(F.pad(dense, (0, -k % 64, 0, -n % 32)))
    words = metadata.contiguous().view(torch.int32).view(-1, values.shape[0])
    return SparseTensor((n, k), values, words), dense


def result(target, text, x, weight, bias=None, epilogue=None, change=str):
    """What a kernel's PTX computes, amid poison. It is passed through `change` before."""
    binding, compiled = bound(target, text, x, weight, bias, epilogue)
    out = torch.full((x.shape[0], binding.problem.out_n), torch.nan, dtype=x.dtype)
    tensors = [x, *SparseOperand(weight).launched, out, *([] if bias is None else [bias])]
    bytes_, counters = binding.workspace_size
    workspace = (torch.full((bytes_ // 4,), torch.nan), torch.zeros(counters, dtype=torch.int32))
    binding.workspace = lambda device: workspace
    memory = Memory([*tensors, *workspace])
    places = {
        t.data_ptr(): at for t, at in zip([*tensors, *workspace], memory.places, strict=True) if t.numel()
    }
    values = parameters(binding, binding.arguments(tensors, (1, 1)), places)
    Program(change(compiled.asm["ptx"]), values, memory, compiled.metadata.shared).run(binding.grid[0])
    if counters:
        assert not memory.tensor(len(tensors) + 1, workspace[1]).any()
    return memory.tensor(3, out)


def wrong(found, want):
    return ((found.double() - want).norm() / want.norm()).item()


#: Target, config, M, N, K, and how much longer rows of activations are in memory: warps along K and along N, one and
#: several tiles, parts of K, and sizes that divide by nothing.
RUNS = [
    ("sm_80", "8x32x512-g1-w4-s2-sliced_sparse-pointer-swap", 5, 64, 1024, 0),
    ("sm_90", "8x64x256-g1-w4-s2-sliced_sparse-pointer-swap", 3, 100, 100, 3),
    ("sm_80", "16x64x512-g1-w8-s2-sliced_sparse-pointer-k2-swap", 13, 72, 1040, 8),
    ("sm_86", "32x128x128-g1-w4-s2-sliced_sparse-pointer-k3-swap", 33, 96, 420, 0),
    ("sm_89", "64x128x128-g1-w4-s2-sliced_sparse-pointer-swap", 61, 129, 132, 1),
    ("sm_80", "8x32x1024-g1-w8-s2-sliced_sparse-pointer-k2-swap", 1, 33, 4, 0),
    ("sm_90", "8x32x512-g1-w4-s4-sliced_sparse-pointer-swap", 8, 40, 2600, 0),
    ("sm_90", "8x32x256-g1-w2-s4-sliced_sparse-pointer-k4-swap", 11, 96, 1700, 8),
    ("sm_80", "16x32x512-g1-w4-s1-sliced_sparse-pointer-swap", 9, 64, 1100, 0),
]


@pytest.mark.parametrize(
    ("dtype", "bound"), [(torch.bfloat16, 2e-3), (torch.float16, 3e-4)], ids=["bf16", "f16"]
)
@pytest.mark.parametrize("case", RUNS, ids=str)
def test_products(case, dtype, bound):
    target, text, m, n, k, more = case
    torch.manual_seed(m)
    weight, dense = torch_weight(n, k, dtype)
    x = torch.randn(m, k + more).to(dtype)[:, :k]
    assert wrong(result(target, text, x, weight), x.double() @ dense.double().T) < bound


def test_a_part_takes_nothing_of_the_next_one():
    """Steps after a part's last one are loaded with it, and must not multiply its zeros by the next part's infinity.

    The emulator also multiplies pruned elements, so these give NaN.
    """
    torch.manual_seed(1)
    weight, dense = torch_weight(64, 768, torch.bfloat16)
    x = torch.randn(4, 768).bfloat16()
    x[1, 300] = torch.inf
    found = result("sm_90", "8x32x256-g1-w2-s2-sliced_sparse-pointer-k3-swap", x, weight)
    kept = dense[:, 300] != 0
    assert kept.any()
    assert found[1].isinf().equal(kept)
    assert found[[0, 2, 3]].isfinite().all()


@pytest.mark.parametrize("text", [
    "16x64x256-g1-w4-s2-sliced_sparse-pointer-swap", "8x128x128-g1-w4-s2-sliced_sparse-pointer-k2-swap",
])  # fmt: skip
def test_epilogues(text):
    torch.manual_seed(1)
    weight, dense = torch_weight(192, 400, torch.bfloat16)
    x, bias = torch.randn(11, 400).bfloat16(), torch.randn(192).bfloat16()
    product = x.double() @ dense.double().T
    found = result("sm_80", text, x, weight, bias, F.gelu)
    assert wrong(found, F.gelu(product + bias.double())) < 2e-3
    found = result("sm_80", text, x, weight, epilogue=epilogues.swiglu)
    assert wrong(found, F.silu(product[:, :96]) * product[:, 96:]) < 2e-3


#: What is changed.
MUTANTS = {
    "a step takes the place of one that is read": (r"bar\.sync[^;]*;", ""),
    "both 16 rows have the same metadata": (r"(mma\.sp[^;]*), 1;", r"\1, 0;"),
    "numbers behind the weight are read": (r"@%p\d+ (ld\.global\S*cache_hint\.v4)", r"\1"),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_mutants_are_caught(mutant):
    old, new = MUTANTS[mutant]
    torch.manual_seed(1)
    weight, dense = torch_weight(32, 576, torch.bfloat16)
    x = torch.randn(8, 576).bfloat16()

    def change(text):
        assert re.search(old, text)
        return re.sub(old, new, text, count=0 if new else 1)

    def is_right(change):
        try:
            found = result("sm_80", "8x32x256-g1-w2-s2-sliced_sparse-pointer-swap", x, weight, change=change)
        except AssertionError:
            return False
        return wrong(found, x.double() @ dense.double().T) < 2e-3

    assert is_right(str)
    assert not is_right(change)
