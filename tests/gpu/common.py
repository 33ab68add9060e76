"""What the GPU tests share: where they run, operands amid poison, float64 results and error bounds.

`GEMMERY_TEST_DEVICE=cpu` together with `TRITON_INTERPRET=1` sends the tests through Triton's interpreter at small
sizes. That tells whether the tests themselves work and nothing about a GPU; tests/conftest.py refuses the mixture, so
it takes `--confcutdir=tests/gpu`:

    GEMMERY_TEST_DEVICE=cpu TRITON_INTERPRET=1 PYTHONPATH=src python -m pytest --confcutdir=tests/gpu tests/gpu

`GEMMERY_TEST_SEED` repeats a run's random numbers; a failing test prints the seed.
"""

import math
import os
import random
import secrets
import zlib
from dataclasses import dataclass

import pytest
import torch

DEVICE = os.environ.get("GEMMERY_TEST_DEVICE", "cuda")
DRY = DEVICE == "cpu"
#: The same in all processes of a run: the first sets it and the others inherit the environment.
SEED = int(os.environ.setdefault("GEMMERY_TEST_SEED", str(secrets.randbits(31))))

#: For tests of CUDA itself, which have no meaning in the interpreter.
needs_cuda = pytest.mark.skipif(DRY, reason="about CUDA, and this is a dry run on the CPU")


def on_hopper(schedule, what):
    """The marks of tests of a schedule that runs on sm_90, and not with every Triton.

    Args:
        what: it is about, for the reason why tests are skipped.
    """
    away = DRY or not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0)
    return [
        pytest.mark.gpu,
        pytest.mark.skipif(not schedule.available(), reason=f"{what}: another Triton is needed"),
        pytest.mark.skipif(away, reason=f"{what}: a GPU of sm_90 is needed"),
    ]


HALVES = (torch.float16, torch.bfloat16)
FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
DTYPES = (*HALVES, torch.float32, torch.float64, *FP8, torch.int8)
LAYOUTS = ("NN", "NT", "TN", "TT")

#: Half a unit in the last place, relative: what rounding once to a type may cost.
ROUNDING = {
    torch.float16: 2.0**-11,
    torch.bfloat16: 2.0**-8,
    torch.float32: 2.0**-24,
    torch.float64: 2.0**-53,
}
#: Half the smallest step of a type, which bounds the error of rounding where results are subnormal.
TINY = {torch.float16: 2.0**-25, torch.bfloat16: 2.0**-134, torch.float32: 2.0**-150, torch.float64: 0.0}


def size(n):
    """A size as it is on a GPU, and a sixteenth of it or so in a dry run, as odd and as aligned as it was."""
    return n if not DRY or n <= 64 else 64 + n // 64 // 16 * 16 + n % 16


def rng(*name):
    """Python's random numbers for one test, and torch's set to go with them."""
    seed = zlib.crc32(repr((SEED, *name)).encode())
    torch.manual_seed(seed)
    return random.Random(seed)


def values(shape, dtype):
    """Normal numbers, or all of an integer type's."""
    if not dtype.is_floating_point:
        return torch.randint(-128, 128, shape, dtype=dtype, device=DEVICE)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    return torch.randn(shape, dtype=wide, device=DEVICE).to(dtype)


def matrix(rows, cols, dtype, order="N"):
    """A dense matrix of normal numbers: row-major (N) or column-major (T)."""
    return values((rows, cols), dtype) if order == "N" else values((cols, rows), dtype).t()


def operands(m, n, k, layout, dtype, b_dtype=None):
    """a and b of one product; layout NT is what a linear layer has: a row-major, b column-major."""
    return matrix(m, k, dtype, layout[0]), matrix(k, n, b_dtype or dtype, layout[1])


def wide(tensor):
    """A tensor in float64; by way of float32, which has conversions from all types."""
    return tensor.double() if tensor.dtype.itemsize > 1 else tensor.float().double()


def error(result, want):
    """The relative error of a whole result."""
    return ((wide(result) - want).norm() / want.norm()).item()


# ---------------------------------------------------------------------------------------------------------------------
# Memory: every operand lies in a larger buffer of 0xFF bytes, which are NaN in every float type and -1 in the
# integers, so that a result that depends on memory outside shows; around an output no byte may change.

MARGIN = 1024


@dataclass
class Placed:
    """A tensor in its buffer."""

    view: torch.Tensor
    buffer: torch.Tensor
    before: torch.Tensor

    def assert_outside_unchanged(self):
        """No byte outside the view has changed."""
        want = self.before.clone()
        elements = want.view(self.view.dtype)
        elements.as_strided(self.view.shape, self.view.stride(), self.view.storage_offset()).copy_(self.view)
        changed = (want != self.buffer).nonzero().flatten()
        assert not len(changed), (
            f"{len(changed)} bytes outside the output were written, first at {changed[:8].tolist()}"
        )


@dataclass(frozen=True)
class Layout:
    """How a tensor lies in its buffer.

    Attributes:
        order: dimensions from the fastest to the slowest.
        step: elements from one neighbour to the next along the fastest dimension.
        pad: elements added to the stride of the second dimension; together with `step` 1 and a pad that completes a
            multiple of 16 elements it is what tensor descriptors want.
        offset: elements before the first one.
        shared: dimensions of stride 0.
    """

    order: tuple[int, ...]
    step: int = 1
    pad: int = 0
    offset: int = 0
    shared: frozenset[int] = frozenset()

    def strides(self, shape):
        strides, reach, walked = [0] * len(shape), self.step, 0
        for dim in self.order:
            if dim not in self.shared:
                strides[dim] = reach
                reach = reach * max(shape[dim], 1) + (self.pad if walked == 0 else 0)
                walked += 1
        return tuple(strides), reach


def place(shape, dtype, layout, filled=True):
    """A tensor of random numbers, or of poison for an output, in a buffer of its own."""
    strides, reach = layout.strides(shape)
    item = dtype.itemsize
    buffer = torch.full(
        ((reach + layout.offset + 2 * MARGIN) * item,), 0xFF, dtype=torch.uint8, device=DEVICE
    )
    if not filled:
        buffer.fill_(0xA5)  # finite everywhere, so that a stray NaN is a change
    view = buffer.view(dtype).as_strided(shape, strides, MARGIN + layout.offset)
    if filled and view.numel():
        one = [1 if dim in layout.shared else extent for dim, extent in enumerate(shape)]
        buffer.view(dtype).as_strided(one, strides, MARGIN + layout.offset).copy_(values(one, dtype))
    return Placed(view, buffer, buffer.clone())


def some_layout(rand, shape, item, shared=True):
    """A layout: half of them as descriptors want them, the rest dense, sliced or anything."""
    dims = list(range(len(shape)))
    order = dims[::-1]
    if len(dims) > 1 and rand.random() < 0.5:
        order[0], order[1] = order[1], order[0]
    lead = dims[:-2] if shared else []
    broadcast = frozenset(dim for dim in lead if rand.random() < 0.3)
    kind = rand.choice(("described", "described", "dense", "sliced", "any"))
    if kind == "described":
        # Every stride a multiple of 16 bytes.
        unit = 16 // item
        return Layout(
            tuple(order),
            1,
            -shape[order[0]] % unit + unit * rand.randint(0, 2),
            16 * rand.randint(0, 2),
            broadcast,
        )
    if kind == "dense":
        return Layout(tuple(order), 1, 0, rand.randint(0, 3), broadcast)
    if kind == "sliced":
        return Layout(tuple(order), rand.randint(1, 3), rand.randint(0, 40), rand.randint(0, 3), broadcast)
    rand.shuffle(order)
    zero = frozenset(dim for dim in dims if shared and rand.random() < 0.2)
    return Layout(tuple(order), rand.randint(1, 3), rand.randint(0, 5), rand.randint(0, 20), broadcast | zero)


# ---------------------------------------------------------------------------------------------------------------------
# Values


def inner_error(dtype, k, precision="ieee", fast_accum=False):
    """What multiplying and summing may cost, as a part of the sum of the terms' magnitudes.

    Tensor cores cut off what they can't hold, up to a unit in the last place (2^-23) a step, and so many steps may
    all err in one direction: K times that, twice for good measure, bounds fp32 sums. Then, by type:

    tf32: each operand keeps 10 bits and loses up to 2^-10, so a product up to 2^-9 and a little.
    tf32x3: what the three products leave out is the product of the parts lost, 2^-20 and as much again.
    fp8: Hopper's tensor cores line 32 products up with the largest and keep 13 bits of each. Summed at that precision
        over 128 steps (accurate) the cut parts stay below 2^-9 of the terms; summed over all of K (fast) every 32
        steps add 2^-12.
    """
    if dtype == torch.float64:
        return (k + 4) * 2.0**-51  # the oracle rounds as often
    sums = (k + 4) * 2.0**-22
    if dtype == torch.float32:
        return sums + {"ieee": 0.0, "tf32": 2.1 * 2.0**-10, "tf32x3": 2.0**-19}[precision]
    if dtype in FP8:
        return sums + 2.0**-9 + (k / 32 * 2.0**-10 if fast_accum else 0.0)
    return sums


def assert_product(result, a, b, addend=None, alpha=1, beta=1, precision="ieee", fast_accum=False):
    """Check each element of `alpha * a @ b + beta * addend` against float64; integers exactly."""
    addend = None if beta == 0 else addend
    want = torch.matmul(wide(a), wide(b)) * alpha
    if addend is not None:
        want = want + wide(addend) * beta
    assert result.shape == want.shape
    got = wide(result)
    if a.dtype == torch.int8:
        assert torch.equal(got, want)
        return
    terms = torch.matmul(wide(a).abs(), wide(b).abs()) * abs(alpha)
    slack = terms * inner_error(a.dtype, a.shape[-1], precision, fast_accum)
    if addend is not None:
        # A product and a sum in the accumulator's type.
        last = 2.0**-51 if a.dtype == torch.float64 else 2.0**-22
        slack = slack + (terms + wide(addend).abs() * abs(beta)) * last
    once = ROUNDING[result.dtype]
    allowed = slack * (1 + once) + once * want.abs() + TINY[result.dtype]
    bad = ~((got - want).abs() <= allowed)  # NaN is bad as well
    if bad.any():
        where = bad.nonzero()[0].tolist()
        worst = ((got - want).abs() / allowed.clamp_min(math.ulp(0.0))).nan_to_num(math.inf).max().item()
        raise AssertionError(
            f"{int(bad.sum())} of {bad.numel()} elements are wrong, the first at {where}: "
            f"{got[tuple(where)].item()} for {want[tuple(where)].item()}; worst error {worst:.3g} of what is allowed"
        )
