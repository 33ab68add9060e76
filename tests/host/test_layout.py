"""From tensors to problems: what is folded and merged leads to the same elements, and overlaps are seen."""

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gemmery import devices
from gemmery.layout import extent_bytes, make_problem, overlap, overlaps_itself, same_layout
from tests.oracle import layouts, place

DEVICE = devices.TABLE["NVIDIA H100"]


def problem_of(a, b, out, addend=None, scaled=False):
    return make_problem(a, b, out, addend, scaled=scaled, precision="ieee", fast_accum=False, device=DEVICE)


def elements(tensor):
    """Which element of the memory each index leads to."""
    memory = torch.arange(tensor.untyped_storage().nbytes() // tensor.element_size())
    return memory.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def addressed(tensor, operand, batch, rows, cols):
    """The same by a problem's strides."""
    memory = torch.arange(tensor.untyped_storage().nbytes() // tensor.element_size())
    return memory.as_strided(
        (*batch, rows, cols), (*operand.steps, operand.row, operand.col), tensor.storage_offset()
    )


@st.composite
def calls(draw):
    """a, b, out and maybe an addend of fitting shapes, in any layouts."""
    extent = st.sampled_from((1, 2, 3, 5))
    m, n, k = draw(extent), draw(extent), draw(extent)
    batch = draw(st.lists(extent, max_size=3))

    def tensor(shape, shared=True):
        return place(shape, torch.float32, draw(layouts(len(shape), shared=shared))).view

    def part(full):
        sizes = [draw(st.sampled_from((size, size, 1))) for size in full]
        return tuple(sizes[draw(st.integers(0, len(sizes))) :])

    a, b, out = (
        tensor((*part(batch), m, k)),
        tensor((*part(batch), k, n)),
        tensor((*batch, m, n), shared=False),
    )
    addend = tensor(part((*batch, m, n))) if draw(st.booleans()) else None
    return a, b, out, addend, draw(st.booleans())


@given(calls())
def test_a_problem_addresses_the_same_elements(call):
    a, b, out, addend, scaled = call
    *batch, m, n = out.shape
    k = a.shape[-1]
    p = problem_of(a, b, out, addend, scaled)
    assert (n, k) == (p.N, p.K)
    assert p.matrices * p.M == math.prod(batch) * m
    assert p.flops == 2 * math.prod(batch) * m * n * k

    # What each of the original matrices is multiplied with, number by number, in the order of the batch.
    for tensor, operand, cols in ((a, p.a, k), (out, p.out, n), (addend, p.addend, n)):
        if tensor is None:
            continue
        full = (
            elements(tensor).expand(*batch, m, cols)
            if tensor is not addend
            else elements(tensor).expand(out.shape)
        )
        mine = addressed(tensor, operand, p.batch, p.M, cols)
        assert torch.equal(mine.reshape(-1, cols), full.reshape(-1, cols))
    shared = elements(b).expand(*batch, k, n).reshape(-1, k, n)
    mine = addressed(b, p.b, p.batch, k, n).reshape(-1, k, n)
    # Where leading dimensions became rows, one right matrix serves several of the left ones.
    assert torch.equal(mine.repeat_interleave(len(shared) // len(mine), 0), shared)


@given(calls())
def test_a_problem_is_as_small_as_it_can_be(call):
    """No dimension of one, no two dimensions that are one walk for all."""
    p = problem_of(*call)
    assert 1 not in p.batch
    steps = [x.steps for x in (p.a, p.b, p.out, p.addend) if x is not None]
    for i in range(len(p.batch) - 1):
        assert any(step[i] != step[i + 1] * p.batch[i + 1] for step in steps)
    if p.batch and p.b.steps[-1] == 0:
        walkers = [x for x in (p.a, p.out, p.addend) if x is not None]
        assert any(x.steps[-1] != x.row * p.M for x in walkers)


def test_batches_with_gaps_stay_apart():
    """Two dimensions merge only where the step of one ends where the other begins."""
    a, b, out = (torch.zeros(2, 4, 5, 5)[:, :3] for _ in range(3))
    assert problem_of(a, b, out).batch == (2, 3)
    assert problem_of(a, b, torch.zeros(2, 3, 5, 5)).batch == (2, 3)
    assert problem_of(*(torch.zeros(2, 3, 5, 5) for _ in range(3))).batch == (6,)
    assert problem_of(*(torch.zeros(2, 3, 5, 5)[:, :, ::2, ::2] for _ in range(3))).batch == (6,)


def test_rows_with_gaps_stay_rows():
    """Leading dimensions become rows of a shared matrix only where all rows lie evenly."""
    b, out = torch.zeros(5, 6), torch.zeros(3, 4, 6)
    assert (problem_of(torch.zeros(3, 4, 5), b, out).M, problem_of(torch.zeros(3, 4, 5), b, out).batch) == (
        12,
        (),
    )
    gap = problem_of(torch.zeros(3, 8, 5)[:, :4], b, out)
    assert (gap.M, gap.batch, gap.b.steps) == (4, (3,), (0,))
    even = problem_of(torch.zeros(3, 8, 5)[:, ::2], b, out)
    assert (even.M, even.batch, even.a.row) == (12, (), 10)


@given(calls())
def test_strides_of_dimensions_of_one_suit_a_descriptor(call):
    a, b, out, _, _ = call
    p = problem_of(a, b, out)
    for operand, rows, cols in ((p.a, p.M, p.K), (p.b, p.K, p.N), (p.out, p.M, p.N)):
        if 1 in (rows, cols):
            assert 1 in (operand.row, operand.col) or max(rows, cols) > 1
        if rows == 1 and operand.col == 1:
            assert operand.row >= cols
            assert operand.row % 16 == 0


@pytest.mark.parametrize(
    ("bias", "scaled", "epilogue"),
    [(None, False, "identity"), (None, True, "scale"), ((5,), False, "add_row"), ((1, 5), False, "add_row"),
     ((), False, "add_row"), ((5,), True, "add_matrix"), ((4, 1), False, "add_matrix"), ((4, 5), False, "add_matrix"),
     ((2, 1, 5), False, "add_matrix")],
)  # fmt: skip
def test_epilogues(bias, scaled, epilogue):
    addend = None if bias is None else torch.zeros(bias).expand(2, 4, 5)
    p = problem_of(torch.zeros(2, 4, 3), torch.zeros(2, 3, 5), torch.zeros(2, 4, 5), addend, scaled)
    assert p.epilogue == epilogue
    assert (p.addend is None) == (bias is None)


@pytest.mark.parametrize(("offset", "aligned"), [(0, True), (1, False), (2, False), (4, True)])
def test_alignment_of_the_first_element(offset, aligned):
    a = torch.zeros(64)[offset:].as_strided((4, 4), (4, 1), offset)
    assert problem_of(a, torch.zeros(4, 4), torch.zeros(4, 4)).a.aligned == aligned


# ---------------------------------------------------------------------------------------------------------------------
# Overlaps

strided = st.tuples(
    st.lists(st.integers(0, 4), max_size=3), st.lists(st.integers(0, 7), min_size=3, max_size=3), st.integers(0, 30),
    st.sampled_from((torch.int8, torch.int16, torch.int32)),
)  # fmt: skip


def view(memory, description):
    shape, strides, offset, dtype = description
    return memory.view(dtype).as_strided(shape, strides[: len(shape)], offset)


def touched(tensor):
    """Every byte of every element, as a list with repetitions."""
    item = tensor.element_size()
    places = [
        sum(i * stride for i, stride in zip(index, tensor.stride(), strict=True))
        for index in itertools.product(*map(range, tensor.shape))
    ]
    return [(tensor.storage_offset() + at) * item + byte for at in places for byte in range(item)]


@given(strided, strided)
def test_overlap_is_exact(first, second):
    memory = torch.zeros(1024, dtype=torch.int8)
    x, y = view(memory, first), view(memory, second)
    assert overlap(x, y) == bool(set(touched(x)) & set(touched(y)))
    assert overlap(y, x) == overlap(x, y)


@given(strided)
def test_overlaps_of_a_tensor_with_itself_are_never_missed(description):
    x = view(torch.zeros(1024, dtype=torch.int8), description)
    bytes_of = touched(x)
    if len(bytes_of) != len(set(bytes_of)):
        assert overlaps_itself(x)


@given(st.data(), st.lists(st.integers(0, 5), max_size=4))
def test_slices_and_permutations_do_not_overlap_themselves(data, shape):
    x = place(shape, torch.int8, data.draw(layouts(len(shape), shared=False))).view
    assert not overlaps_itself(x)


@given(strided)
def test_extent(description):
    x = view(torch.zeros(1024, dtype=torch.int8), description)
    bytes_of = touched(x)
    assert extent_bytes(x) == (max(bytes_of) + 1 - x.storage_offset() * x.element_size() if bytes_of else 0)


def test_overlap_of_interleaved_columns():
    """Ranges that contain one another and share nothing, and the same shifted by one."""
    memory = torch.zeros(64, 64)
    assert not overlap(memory[:, ::2], memory[:, 1::2])
    assert overlap(memory[:, ::2], memory[:, 1::3])
    assert not overlap(memory[:32], memory[32:])
    assert overlap(memory[:33], memory[32:])


def test_too_hard_counts_as_shared():
    """A knapsack of six strides and more work than a check before a launch is worth."""
    shape, strides = (40,) * 6, (10007, 10009, 10037, 10039, 10061, 10067)
    memory = torch.empty(4 * 40 * sum(strides), dtype=torch.int8)
    x = memory.as_strided(shape, strides)
    y = memory.as_strided(shape, tuple(2 * stride for stride in strides), 5)
    assert overlap(x, y)
    assert not overlap(x, y[:0])


def test_same_layout():
    x = torch.zeros(4, 4)
    assert same_layout(x, x.view(4, 4))
    for other in (x.t(), x[:, :3], x.view(2, 8), x.clone(), x.view(torch.int32), x[1:]):
        assert not same_layout(x, other)
