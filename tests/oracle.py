"""What the tests compare with: float64 arithmetic that shares no code with the library, error bounds, and memory layouts.

Every tensor that a test hands out lies in a larger buffer. Around an operand the buffer holds NaN (127 for int8), so a
result that depends on memory outside it shows; around an output it holds a sentinel, so a write outside it shows.
"""

import math
from dataclasses import dataclass

import torch
from hypothesis import strategies as st

HALVES = (torch.float16, torch.bfloat16)
FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
FLOATS = (*HALVES, torch.float32, torch.float64, *FP8)
DTYPES = (*FLOATS, torch.int8)

#: Half a unit in the last place, relative: what rounding once to a type may cost.
ROUNDING = {
    torch.float16: 2.0**-11,
    torch.bfloat16: 2.0**-8,
    torch.float32: 2.0**-24,
    torch.float64: 2.0**-53,
}
#: The smallest step of a type, which bounds the error where results are subnormal.
TINY = {torch.float16: 2.0**-25, torch.bfloat16: 2.0**-134, torch.float32: 2.0**-150, torch.float64: 0.0}
DEFAULT_OUT = {
    torch.float8_e4m3fn: torch.bfloat16,
    torch.float8_e5m2: torch.bfloat16,
    torch.int8: torch.int32,
}


def default_out(dtype):
    """The type of a product that was asked for none."""
    return DEFAULT_OUT.get(dtype, dtype)


def values(shape, dtype, seed=0):
    """Seeded normal numbers, or small integers for integer types, as a fresh contiguous tensor."""
    generator = torch.Generator().manual_seed(seed)
    if dtype.is_floating_point:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
    return torch.randint(-128, 128, shape, generator=generator, dtype=torch.int64).to(dtype)


def wide(tensor):
    """A tensor in the oracle's arithmetic: float64, or int64 for integers."""
    return tensor.to(torch.float64 if tensor.dtype.is_floating_point else torch.int64)


def product(a, b, addend=None, alpha=1, beta=1):
    """`alpha * a @ b + beta * addend` in the oracle's arithmetic."""
    result = torch.matmul(wide(a), wide(b)) * alpha
    return result if addend is None or beta == 0 else result + wide(addend) * beta


def assert_product(result, a, b, addend=None, alpha=1, beta=1, dtype=None):
    """Check a result's shape, type and values against the oracle.

    Integers have to agree exactly. For floats let S be the sum of the terms' magnitudes, |alpha| |a| @ |b| + |beta c|, u the
    rounding of the result's type and v that of the accumulator's. One rounding at the end costs u |r|; K products and sums, two
    factors that are rounded to v and multiplied, and a last sum cost at most (K + 4) v S: that bounds each element. Errors of a
    sum do not all point the same way: in norm they stay below 3 v S, for float32 and the sizes of these tests 1e-6 or so. Only
    where a and b are both constant along K does every sum consist of equal terms, whose errors do add up.
    """
    want = product(a, b, addend, alpha, beta)
    assert result.shape == want.shape
    assert result.dtype == (dtype or default_out(a.dtype))
    if not a.dtype.is_floating_point:
        assert torch.equal(wide(result), want)
        return
    error = (wide(result) - want).abs()
    terms = product(
        wide(a).abs(), wide(b).abs(), None if addend is None else wide(addend).abs(), abs(alpha), abs(beta)
    )
    once = ROUNDING[result.dtype]
    # The oracle for float64 rounds as often as the product does.
    inner = 2 * ROUNDING[torch.float64] if a.dtype == torch.float64 else ROUNDING[torch.float32]
    each = once * want.abs() + (a.shape[-1] + 4) * inner * (1 + once) * terms + TINY[result.dtype]
    bad = ~(error <= each)  # NaN is bad as well
    assert not bad.any(), f"{int(bad.sum())} of {bad.numel()} elements are wrong, by up to {error[bad].max()}"
    if a.stride(-1) == 0 and b.stride(0 if b.dim() == 1 else -2) == 0:
        return
    whole = once * want.norm() + 3 * inner * terms.norm() + TINY[result.dtype] * math.sqrt(want.numel())
    assert error.norm() <= whole, f"relative error {error.norm() / want.norm()}"


# ---------------------------------------------------------------------------------------------------------------------
# Layouts


@dataclass(frozen=True)
class Layout:
    """How a tensor lies in a buffer.

    Attributes:
        order: dimensions from the fastest to the slowest.
        steps: the elements between neighbours along each dimension, as a multiple of what would be dense.
        offset: elements between the end of the margin and the first element.
        shared: dimensions of stride 0.
        rounded: round all strides but the smallest up to 16 elements, as tensor descriptors want it.
    """

    order: tuple[int, ...]
    steps: tuple[int, ...]
    offset: int = 0
    shared: frozenset[int] = frozenset()
    rounded: bool = False

    def strides(self, shape):
        """Strides for a shape, and the elements from the first to one past the last."""
        strides, dense = [0] * len(shape), 1
        for i, dim in enumerate(self.order):
            if dim in self.shared:
                continue
            stride = dense * self.steps[dim]
            if self.rounded and i:
                stride = (stride + 15) // 16 * 16
            strides[dim] = stride
            dense = stride * max(shape[dim], 1)
        return tuple(strides), dense


#: Elements around every tensor: enough for a whole tile's row, and a multiple of 16 bytes in every type.
MARGIN = 512


@dataclass
class Placed:
    """A tensor in its buffer.

    Attributes:
        view: the tensor.
        buffer: all of the memory, one-dimensional.
        before: a copy of the buffer's bits.
        inside: which elements of the buffer belong to the view.
    """

    view: torch.Tensor
    buffer: torch.Tensor
    before: torch.Tensor
    inside: torch.Tensor

    def assert_outside_unchanged(self):
        """No element of the buffer outside the view has changed a bit."""
        changed = (_bits(self.buffer) != self.before) & ~self.inside
        where = changed.nonzero().flatten()[:5].tolist()
        assert not changed.any(), f"{int(changed.sum())} elements outside the output were written, at {where}"


def _bits(tensor):
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.view(integers[tensor.dtype.itemsize])


def _poison(dtype):
    if dtype.is_floating_point:
        return math.nan
    return 127 if dtype == torch.int8 else -0x5A5A5A5A


def place(shape, dtype, layout, content=None):
    """A tensor of a shape and layout amid poison, filled with `content` (of a shape that broadcasts) or with poison."""
    strides, extent = layout.strides(shape)
    size, start = extent + layout.offset + 2 * MARGIN, MARGIN + layout.offset
    buffer = torch.full(
        (size,), _poison(dtype), dtype=torch.float64 if dtype.is_floating_point else dtype
    ).to(dtype)
    inside = torch.zeros(size, dtype=torch.bool)
    view = buffer.as_strided(shape, strides, start)
    if view.numel():
        inside.as_strided(shape, strides, start).fill_(True)
    if content is not None and view.numel():
        # Of a dimension that is shared only one slice exists.
        one = tuple(slice(0, 1) if dim in layout.shared else slice(None) for dim in range(len(shape)))
        view[one].copy_(content.expand(shape)[one])
    return Placed(view, buffer, _bits(buffer).clone(), inside)


@st.composite
def layouts(draw, rank, shared=True):
    """Layouts of a tensor of some rank: half of them as descriptors want them, the others as wild as they come."""
    dims = tuple(range(rank))
    swap = draw(st.booleans())
    simple = tuple(reversed(dims))
    if rank > 1 and swap:
        simple = (dims[-2], dims[-1], *simple[2:])
    kind = draw(st.sampled_from(("described", "described", "dense", "sliced", "any", "any")))
    if kind == "described":
        lead = dims[:-2]
        broadcast = frozenset(lead) if shared and lead and draw(st.booleans()) else frozenset()
        return Layout(simple, (1,) * rank, 16 * draw(st.integers(0, 2)), broadcast, rounded=True)
    if kind == "dense":
        return Layout(simple, (1,) * rank, draw(st.integers(0, 3)))
    if kind == "sliced":
        return Layout(simple, tuple(draw(st.integers(1, 3)) for _ in dims), draw(st.integers(0, 3)))
    order = tuple(draw(st.permutations(dims)))
    steps = tuple(draw(st.integers(1, 3)) for _ in dims)
    zero = frozenset(draw(st.sets(st.sampled_from(dims), max_size=rank))) if shared and rank else frozenset()
    return Layout(order, steps, draw(st.integers(0, 3)), zero)


def sizes(most=200):
    """Extents of a matrix: any, and often one at which blocks begin or end."""
    edges = [size for size in (0, 1, 2, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129) if size <= most]
    return st.one_of(st.integers(1, most), st.integers(1, most), st.sampled_from(edges))


def operand(draw, shape, dtype, seed, layout=None):
    """An operand of random values in a drawn layout."""
    layout = draw(layouts(len(shape))) if layout is None else layout
    return place(shape, dtype, layout, values(shape, dtype, seed)).view


def output(draw, shape, dtype):
    """A place for a result in a drawn layout, poisoned inside and out; or None for a fresh one."""
    if draw(st.booleans()):
        return None
    return place(shape, dtype, draw(layouts(len(shape), shared=False)))
