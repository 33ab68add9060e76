"""Block-sparse operands without a kernel: patterns, what is kept of them, the reference, errors, and torch.compile."""

import gc
import re

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional as F

import gemmery
from gemmery import select
from gemmery.devices import TABLE
from gemmery.formats import blocks
from gemmery.layout import fold
from gemmery.operands import BlocksOperand, DenseOperand
from gemmery.operands.blocks import rounded
from gemmery.select.tiles import FAMILIES
from tests.blocks import SIZES, mask_of, problem_of, random_matrix, sparse, values_at, whole

F32 = torch.float32


def stored(x):
    return blocks.stored("linear", "weight", x)


# ---------------------------------------------------------------------------------------------------------------------
# Patterns


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("index", [torch.int32, torch.int64])
def test_visits_have_each_stored_block_once(seed, index):
    mask = mask_of(7, 5, 0.4, seed)
    w = sparse(torch.zeros(int(mask.sum()), 16, 16), mask)
    w = torch.sparse_bsr_tensor(
        w.crow_indices().to(index), w.col_indices().to(index), w.values(), size=w.shape, check_invariants=True
    )
    pattern = stored(w).pattern
    rows, cols = mask.nonzero().T
    assert pattern.lines_of.tolist() == rows.tolist()
    assert pattern.places_of.tolist() == cols.tolist()
    for visits, counts, own, other in (
        (pattern.along, mask.sum(1), rows, cols), (pattern.across, mask.sum(0), cols, rows),
    ):  # fmt: skip
        assert all(x.dtype == torch.int32 for x in visits if x is not None)
        numbers, first, last = visits.lines.T.tolist()
        assert sorted(numbers) == list(range(len(counts)))
        lengths = [j - i for i, j in zip(first, last, strict=True)]
        # The longest first.
        assert lengths == sorted(counts.tolist(), reverse=True)
        for number, i, j in zip(numbers, first, last, strict=True):
            slots = list(range(i, j)) if visits.slots is None else visits.slots[i:j].tolist()
            assert [own[s].item() for s in slots] == [number] * (j - i)
            assert [other[s].item() for s in slots] == visits.steps[i:j].tolist()


def test_an_empty_pattern_has_tables_with_memory():
    pattern = stored(sparse(torch.zeros(0, 16, 16), torch.zeros(3, 2, dtype=torch.bool))).pattern
    for visits in (pattern.along, pattern.across):
        assert visits.steps.numel() == 1
        assert visits.lines[:, 1:].abs().sum() == 0


def test_a_pattern_is_prepared_once():
    w, _, _ = random_matrix(3, 4, 16)
    before = stored(w).pattern
    assert stored(w).pattern is before
    # torch gives the indices as new tensors each time, and other values may have them.
    other = torch.sparse_bsr_tensor(
        w.crow_indices(), w.col_indices(), w.values() * 2, size=w.shape, check_invariants=True
    )
    assert stored(other).pattern is before
    # New values change the version that the indices have, too, and not the pattern.
    w.values().mul_(2)
    assert stored(w).pattern is before
    assert stored(w.t()).pattern is before
    # As an operator rebuilds it of its tensors.
    rebuilt = blocks.Stored(w.values(), w.crow_indices(), w.col_indices(), (3, 4), True)
    assert rebuilt.pattern is before


@pytest.fixture
def comparisons(monkeypatch):
    """A list that gets an entry each time a kept pattern is compared, which waits for the GPU."""
    made, has = [], blocks.Pattern.has
    monkeypatch.setattr(blocks.Pattern, "has", lambda *given: made.append(1) or has(*given))
    return made


@pytest.mark.parametrize("needs", [(True, False), (False, True), (True, True), (False, False)])
def test_an_update_in_place_is_compared_once(comparisons, needs):
    w, _, _ = random_matrix(3, 4, 16)
    x = torch.randn(5, 64)
    w.requires_grad_(needs[1])
    x.requires_grad_(needs[0])
    gemmery.linear(x, w)
    for step in range(1, 4):
        with torch.no_grad():
            w.values().mul_(2)
        made = gemmery.linear(x, w)
        if any(needs):
            inputs = [one for one, need in zip((x, w), needs, strict=True) if need]
            torch.autograd.grad(made.sum(), inputs)
        gemmery.matmul(torch.randn(5, 48), w)
        gemmery.linear(torch.randn(5, 48), w.t())
        assert len(comparisons) == step


def test_the_sparse_tensor_of_a_step_is_not_compared(comparisons):
    """As in training: the same indices, new values."""
    w, _, _ = random_matrix(3, 4, 16)
    ends, places, values = w.crow_indices(), w.col_indices(), w.values().clone().requires_grad_()
    for _ in range(3):
        made = torch.sparse_bsr_tensor(ends, places, values, size=w.shape, check_invariants=False)
        gemmery.linear(torch.randn(5, 64), made).sum().backward()
    assert not comparisons


def test_each_tensor_counts_its_own_changes():
    """Two tensors have the same indices and were written to equally often, one of them at its indices."""
    w, _, _ = random_matrix(3, 4, 16)
    x = torch.randn(5, 64)
    w.values().mul_(2)
    gemmery.linear(x, w)
    other = torch.sparse_bsr_tensor(
        w.crow_indices(), w.col_indices(), w.values(), size=w.shape, check_invariants=False
    )
    other.col_indices().copy_(3 - w.col_indices())
    assert w._version == other._version
    torch.testing.assert_close(gemmery.linear(x, other), x @ other.to_dense().T)


def test_autograd_notices_values_that_change_before_the_backward_pass():
    w, _, _ = random_matrix(3, 4, 16)
    x = torch.randn(5, 64, requires_grad=True)
    for _ in range(2):
        made = gemmery.linear(x, w)
        w.values().mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            made.sum().backward()


def test_what_sampled_addmm_returns_does_not_keep_its_input():
    w, _, _ = random_matrix(3, 4, 16)
    made = gemmery.sampled_addmm(w, torch.randn(48, 8), torch.randn(8, 64))
    values = StorageWeakRef(w.values().untyped_storage())
    del w
    assert values.expired()
    assert made.shape == (48, 64)


def strided(values):
    """The same blocks, of which neither rows nor columns are adjacent."""
    return values.repeat_interleave(2, 2)[:, :, ::2]


@pytest.mark.parametrize("layout", [torch.Tensor.contiguous, strided])
def test_changes_in_inference_mode_are_noticed(layout):
    def close():
        torch.testing.assert_close(gemmery.linear(x, w), x @ w.to_dense().T)
        torch.testing.assert_close(gemmery.matmul(w, x.T), w.to_dense() @ x.T)

    mask = mask_of(3, 4, 0.5, 0)
    x = torch.randn(5, 64)
    with torch.inference_mode():
        w, other = (sparse(layout(torch.randn(int(mask.sum()), 16, 16)), m) for m in (mask, mask.flip(1)))
        assert w.is_inference()
        close()
        w.values().mul_(2)
        close()
        w.col_indices().copy_(other.col_indices())
        close()
        w.copy_(other)
        close()
    # A tensor from outside counts its changes there, too.
    w = sparse(layout(torch.randn(int(mask.sum()), 16, 16)), mask)
    with torch.inference_mode():
        close()
        w.values().mul_(2)
        close()
        w.col_indices().copy_(other.col_indices())
        close()


def test_what_a_capture_is_told(monkeypatch):
    x = torch.randn(5, 64)
    w, _, _ = random_matrix(3, 4, 16)
    gemmery.linear(x, w)
    monkeypatch.setattr(blocks, "_is_capturing", lambda indices: True)
    gemmery.linear(x, w)
    gemmery.linear(x.clone().requires_grad_(), w).sum().backward()
    w.values().mul_(2)
    refuses(
        RuntimeError, "linear: weight: the values or the indices have changed since the last call; call it once",
        gemmery.linear, x, w,
    )  # fmt: skip
    other, _, _ = random_matrix(3, 4, 16, seed=5)
    refuses(RuntimeError, "linear: weight: the pattern is new, and", gemmery.linear, x, other)
    with torch.inference_mode():
        other = other.clone()
    monkeypatch.setattr(blocks, "_is_capturing", lambda indices: False)
    gemmery.linear(x, other)
    monkeypatch.setattr(blocks, "_is_capturing", lambda indices: True)
    refuses(RuntimeError, "linear: weight: it was made in inference mode", gemmery.linear, x, other)


def test_indices_that_change_in_place_are_another_pattern():
    w, _, _ = random_matrix(3, 4, 16)
    before = stored(w).pattern
    assert len(w.col_indices()) > 0
    w.col_indices()[0] = (w.col_indices()[0] + 1) % 4
    after = stored(w).pattern
    assert after is not before
    assert after.places_of.tolist() == w.col_indices().tolist()


def test_a_pattern_is_forgotten_with_its_indices():
    blocks._patterns.clear()
    blocks._known.clear()
    w, _, _ = random_matrix(3, 4, 16)
    stored(w)
    assert len(blocks._known) == len(blocks._patterns) == 1
    del w
    gc.collect()
    assert not blocks._known
    assert not blocks._patterns


def test_a_pattern_lives_as_long_as_its_indices():
    blocks._patterns.clear()
    w, _, _ = random_matrix(3, 4, 16)
    ends, places = w.crow_indices(), w.col_indices()
    before = stored(w).pattern
    del w
    gc.collect()
    assert len(blocks._patterns) == 1
    values = torch.randn(len(places), 16, 16)
    assert (
        stored(torch.sparse_bsr_tensor(ends, places, values, size=(48, 64), check_invariants=False)).pattern
        is before
    )
    del ends
    gc.collect()
    assert not blocks._patterns


def test_lengths_are_rounded():
    assert [rounded(x) for x in (0, 0.5, 1, 1.5, 2.5, 3.1, 5, 7, 8.5, 13, 65)] == [
        1, 1, 1, 2, 3, 4, 6, 8, 12, 16, 96,
    ]  # fmt: skip


# ---------------------------------------------------------------------------------------------------------------------
# The reference


@pytest.mark.parametrize("block", SIZES)
def test_the_reference(block):
    torch.manual_seed(0)
    w, dense, mask = random_matrix(3, 4, block)
    x, y, bias = torch.randn(2, 5, 4 * block), torch.randn(5, 3 * block), torch.randn(3 * block)
    torch.testing.assert_close(gemmery.linear(x, w, bias), F.linear(x, dense, bias))
    torch.testing.assert_close(gemmery.matmul(y, w), y @ dense)
    torch.testing.assert_close(gemmery.matmul(w, x.mT), dense @ x.mT)
    torch.testing.assert_close(gemmery.matmul(x, w.t()), x @ dense.T)
    torch.testing.assert_close(gemmery.linear(x, w, epilogue=F.silu), F.silu(F.linear(x, dense)))
    a, b = torch.randn(3 * block, 7), torch.randn(7, 4 * block)
    made = gemmery.sampled_addmm(w, a, b, alpha=2, beta=0.5)
    torch.testing.assert_close(made.to_dense(), (2 * (a @ b) + 0.5 * dense) * whole(mask, block))
    assert made.crow_indices().data_ptr() == w.crow_indices().data_ptr()


def test_gradients_of_the_reference():
    torch.manual_seed(0)
    _, dense, mask = random_matrix(3, 4, 16)
    x, values = torch.randn(5, 64), values_at(dense, mask)
    ours = [x.clone().requires_grad_(), values.clone().requires_grad_()]
    theirs = [x.clone().requires_grad_(), dense.clone().requires_grad_()]
    gemmery.linear(ours[0], sparse(ours[1], mask), epilogue=F.silu).sum().backward()
    F.silu(F.linear(theirs[0], theirs[1] * whole(mask, 16))).sum().backward()
    torch.testing.assert_close(ours[0].grad, theirs[0].grad)
    torch.testing.assert_close(ours[1].grad, values_at(theirs[1].grad, mask))


def test_compiled_code_is_interrupted():
    """torch.compile takes no sparse tensors, and leaves the product to eager mode."""
    torch.manual_seed(0)
    w, dense, _ = random_matrix(3, 4, 16)
    compiled = torch.compile(lambda x, w: torch.relu(gemmery.linear(x + 1, w)) * 2, backend="eager")
    x = torch.randn(5, 64)
    torch.testing.assert_close(compiled(x, w), torch.relu((x + 1) @ dense.T) * 2)
    compiled = torch.compile(lambda w, a, b: gemmery.sampled_addmm(w, a, b, beta=0), backend="eager")
    made = compiled(w, torch.ones(48, 3), torch.ones(3, 64))
    assert bool((made.values() == 3).all())


# ---------------------------------------------------------------------------------------------------------------------
# Problems and choices


def problem(x, w, is_b=True):
    sparse = BlocksOperand(stored(w).mT if is_b else stored(w), is_b)
    left, right = (DenseOperand(x), sparse) if is_b else (sparse, DenseOperand(x))
    out = (
        torch.empty(*x.shape[:-1], w.shape[0])
        if is_b
        else torch.empty(*x.shape[:-2], w.shape[0], x.shape[-1])
    )
    return fold(left, right, out, [], TABLE["NVIDIA H200"])[0]


def test_the_density_is_not_part_of_the_problem_to_the_block():
    x = torch.empty(8, 128 * 16)
    made = {
        problem(x, sparse(torch.empty(int(mask.sum()), 16, 16), mask))
        for mask in (mask_of(64, 128, 0.11, seed, gaps=False) for seed in range(8))
    }
    assert len(made) == 1


def test_rows_of_a_batch_are_folded_where_that_is_possible():
    w, _, _ = random_matrix(3, 4, 16)
    assert problem(torch.empty(2, 5, 64), w).M == 10
    made = problem(torch.empty(1, 64, 7).expand(5, 64, 7), w, is_b=False)
    assert (made.M, made.batch) == (48, (5,))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("block", SIZES)
@pytest.mark.parametrize("is_b", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, F32])
def test_every_tile_fits_the_blocks(family, block, is_b, dtype):
    device = next(row for row in TABLE.values() if row.target.family == family)
    p = problem_of(4096, 4096, 4096, block, is_b=is_b, average=8, device=device, dtype=dtype)
    space = select.space.space_of(p)
    assert len(space)
    assert all(p.by_blocks.refusal(p, config) is None for config in space.configs)


def test_more_blocks_are_predicted_to_take_longer():
    device = TABLE["NVIDIA H200"]
    times = [
        select.best_time(problem_of(4096, 8192, 8192, 64, is_b=True, average=n, device=device))
        for n in (4, 12, 32, 64, 128)
    ]
    assert times == sorted(times)
    assert times[-1] > 8 * times[0]


# ---------------------------------------------------------------------------------------------------------------------
# Errors


def refuses(kind, message, function, *args, **kwargs):
    with pytest.raises(kind, match=re.escape(message)):
        function(*args, **kwargs)


def test_errors_of_blocks():
    x = torch.randn(4, 48)

    def matrix(rows, cols):
        values = torch.randn(1, rows, cols)
        return torch.sparse_bsr_tensor([0, 1], [0], values, size=(rows, cols), check_invariants=True)

    refuses(
        ValueError,
        "linear: weight has blocks of 48x48; they must be one of 16x16,",
        gemmery.linear,
        x,
        matrix(48, 48),
    )
    refuses(ValueError, "matmul: b has blocks of 16x32;", gemmery.matmul, torch.randn(4, 16), matrix(16, 32))
    w = random_matrix(3, 3, 16)[0]
    batch = torch.sparse_bsr_tensor(
        w.crow_indices().expand(2, -1), w.col_indices().expand(2, -1), w.values().expand(2, -1, -1, -1),
        check_invariants=True,
    )  # fmt: skip
    refuses(ValueError, "; block-sparse, it must be a matrix and no batch", gemmery.matmul, x, batch)
    whole = torch.sparse_bsr_tensor(
        w.crow_indices(), w.col_indices(), w.values().to(torch.int8), size=w.shape, check_invariants=True
    )
    refuses(
        TypeError,
        "linear: weight is block-sparse and torch.int8; its type must be one of",
        gemmery.linear,
        x,
        whole,
    )


def test_errors_of_indices():
    values, x = torch.randn(2, 16, 16), torch.randn(4, 32)
    for ends, places, message in (
        ([0, 2, 1], [0, 1], "its compressed indices must begin with 0, end with 2 and not decrease"),
        ([0, 1, 2], [0, 2], "its plain indices must be from 0 to 1"),
    ):
        w = torch.sparse_bsr_tensor(
            torch.tensor(ends), torch.tensor(places), values, size=(32, 32), check_invariants=False
        )
        for _ in range(2):
            refuses(ValueError, f"linear: weight: {message}", gemmery.linear, x, w)


def test_errors_of_products():
    w = random_matrix(3, 4, 16)[0]
    x = torch.randn(5, 64)
    refuses(TypeError, "matmul: a and b are both block-sparse", gemmery.matmul, w, w.t())
    refuses(
        ValueError, "linear: x is (5, 48) and weight is (48, 64), which is (N, K): inner sizes 48 and 64 differ",
        gemmery.linear, x[:, :48], w,
    )  # fmt: skip
    refuses(
        ValueError,
        "matmul: a is (48, 64) and b is (48, 5): inner sizes 64 and 48 differ",
        gemmery.matmul,
        w,
        x.T[:48],
    )
    refuses(
        TypeError, "linear: x is torch.float64 and weight is torch.float32", gemmery.linear, x.double(), w
    )
    refuses(ValueError, "linear: x is (64,); with a block-sparse weight", gemmery.linear, x[0], w)
    refuses(ValueError, "bmm: b is block-sparse; use matmul", gemmery.bmm, x[None], w)
    refuses(
        TypeError,
        "matmul: a is block-sparse; b must be one tensor",
        gemmery.matmul,
        w,
        (x.T, x.T),
        epilogue=F.silu,
    )
    refuses(
        TypeError,
        "a prologue applies only to a dense operand; apply it to the values",
        gemmery.matmul,
        w,
        x.T,
        prologue=F.silu,
    )
    packed = gemmery.quantize(torch.randn(32, 64), "int8")
    refuses(
        TypeError, "b is a QuantizedTensor; sparse and quantized weights must be", gemmery.matmul, w, packed
    )
    csr = torch.eye(64).to_sparse_csr()
    refuses(TypeError, "linear: weight is sparse (torch.sparse_csr)", gemmery.linear, x, csr)
    refuses(TypeError, "addmm: input is sparse", gemmery.addmm, w, x, x.T)
    refuses(
        ValueError,
        "linear: out is (5, 64); the result is (5, 48)",
        gemmery.linear,
        x,
        w,
        out=torch.empty(5, 64),
    )


def test_errors_of_sampled_addmm():
    w, a, b = random_matrix(3, 4, 16)[0], torch.randn(48, 8), torch.randn(8, 64)
    sampled = gemmery.sampled_addmm
    refuses(
        TypeError,
        "sampled_addmm: input is torch.strided; it must be block-sparse",
        sampled,
        w.to_dense(),
        a,
        b,
    )
    refuses(ValueError, "sampled_addmm: out= is not supported", sampled, w, a, b, out=w)
    refuses(
        ValueError,
        "sampled_addmm: a is (2, 48, 8); it must have 2 dimensions",
        sampled,
        w,
        a.expand(2, 48, 8),
        b,
    )
    refuses(
        ValueError,
        "sampled_addmm: a is (48, 7) and b is (8, 64): inner sizes 7 and 8 differ",
        sampled,
        w,
        a[:, :7],
        b,
    )
    refuses(
        ValueError,
        "a is (48, 8) and b is (8, 32); input is (48, 64), and must be (48, 32)",
        sampled,
        w,
        a,
        b[:, :32],
    )
    refuses(TypeError, "input is torch.float32 and a is torch.float64", sampled, w, a.double(), b.double())
    refuses(TypeError, "a is torch.float32 and b is torch.float64", sampled, w, a, b.double())
    refuses(TypeError, "alpha is a Tensor", sampled, w, a, b, alpha=torch.ones(()))
    refuses(TypeError, "a is sparse (torch.sparse_bsr)", sampled, w, w, b)
