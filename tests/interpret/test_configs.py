"""Every schedule, loader and knob: right results, the same bits wherever K is summed in the same steps."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import gemmery
from gemmery import Config
from tests.oracle import DTYPES, Layout, assert_product, default_out, output, place, sizes, values

# Layouts that tensor descriptors take: the smallest stride 1, all others multiples of 16 elements.
ROWS = Layout((1, 0), (1, 1), rounded=True)
COLS = Layout((0, 1), (1, 1), rounded=True)
BATCH_ROWS = Layout((2, 1, 0), (1, 1, 1), rounded=True)
BATCH_COLS = Layout((1, 2, 0), (1, 1, 1), rounded=True)

SCHEDULES = [("tile", 1), *(("persistent", tail) for tail in (1, 2, 4, 8))]
VARIANTS = [
    {"schedule": schedule, "tail": tail, "loader": loader, "split_store": split}
    for (schedule, tail), loader, split in itertools.product(
        SCHEDULES, ("pointer", "descriptor"), (False, True)
    )
]


@st.composite
def configs(draw):
    block = st.sampled_from((16, 32, 64, 64, 128))
    schedule, tail = draw(st.sampled_from(SCHEDULES))
    # Parts of a cut tile are 16 by 16 or more.
    block_m = max(draw(block), 32 if tail == 8 else 16)
    block_n = max(draw(block), 16 * min(tail, 4))
    only_tiles = {}
    if schedule == "tile":
        # A width may be the sum of two powers of two.
        block_n += draw(st.sampled_from((0, 0, *(16 << i for i in range(3) if 16 << i < block_n))))
        only_tiles = {"split_k": draw(st.sampled_from((1, 1, 2, 3, 7))), "swap": draw(st.booleans())}
    return Config(
        block_m, block_n, draw(block),
        group_m=draw(st.integers(1, 9)), num_warps=draw(st.sampled_from((1, 2, 4, 8))),
        num_stages=draw(st.integers(1, 5)), schedule=schedule, loader=draw(st.sampled_from(("pointer", "descriptor"))),
        split_store=draw(st.booleans()), tail=tail, **only_tiles,
    )  # fmt: skip


def check(draw, config, dtype, shapes, orders, seed):
    a, b = (
        place(shape, dtype, draw(st.sampled_from(orders)), values(shape, dtype, seed + i)).view
        for i, shape in enumerate(shapes)
    )
    shape = (*torch.broadcast_shapes(a.shape[:-2], b.shape[:-2]), a.shape[-2], b.shape[-1])
    c = values(shape[-draw(st.integers(0, len(shape))) :], default_out(dtype), seed + 2)
    bias = draw(st.sampled_from((None, c)))
    placed = output(draw, shape, default_out(dtype))
    result = gemmery.matmul(a, b, bias=bias, config=config, out=None if placed is None else placed.view)
    if placed is not None:
        placed.assert_outside_unchanged()
    assert_product(result, a, b, bias)


@given(
    st.data(),
    configs(),
    st.sampled_from(DTYPES),
    sizes(100),
    sizes(100),
    sizes(100),
    st.integers(0, 2**32 - 1),
)
def test_any_config(data, config, dtype, m, n, k, seed):
    k = max(k, 1)  # descriptors over nothing do not exist
    check(data.draw, config, dtype, ((m, k), (k, n)), (ROWS, COLS), seed)


@given(
    st.data(), configs(), st.sampled_from(DTYPES), sizes(40), sizes(40), sizes(40), st.integers(0, 2**32 - 1)
)
def test_any_config_on_a_batch(data, config, dtype, m, n, k, seed):
    k, count = max(k, 1), data.draw(st.integers(1, 3))
    lead = data.draw(st.sampled_from(((count, count), (count, 1), (1, count))))
    check(data.draw, config, dtype, ((lead[0], m, k), (lead[1], k, n)), (BATCH_ROWS, BATCH_COLS), seed)


@pytest.mark.parametrize(
    "dtype",
    [pytest.param(x, marks=() if x == torch.bfloat16 else pytest.mark.exhaustive) for x in DTYPES],
    ids=str,
)
def test_one_block_k_one_result(dtype):
    """Schedules, loaders and stores change which program does what and when, never what is summed in which order.

    The interpreter's device has 4 multiprocessors: 6 tiles are a full wave and a last one of two, cut up where there is a
    tail. Bits are compared among tiles cut alike: parts may step along K in other blocks, and numpy's own product may sum
    a narrower block in another order.
    """
    m, n, k = 40, 150, 150
    a, b = (place(size, dtype, ROWS, values(size, dtype, i)).view for i, size in enumerate(((m, k), (k, n))))
    c = values((m, n), default_out(dtype), 2)
    seen = {}
    for i, variant in enumerate(VARIANTS):
        config = Config(32, 64, 64, group_m=1 + i % 5, **variant)
        out = [None, torch.empty(n, m, dtype=default_out(dtype)).t()][i // 2 % 2]
        result = gemmery.addmm(c, a, b, alpha=3, beta=2, config=config, out=out)
        assert_product(result, a, b, c, 3, 2)
        assert torch.equal(result, seen.setdefault(config.tail, result)), config
    assert set(seen) == {1, 2, 4, 8}


@pytest.mark.parametrize("loader", ("pointer", "descriptor"))
@pytest.mark.parametrize("batch", ((), (3,), (5, 1)))
def test_a_batch_has_the_bits_of_its_matrices(batch, loader):
    """Tiles of one matrix know nothing of the others, as long as none are cut: which are depends on how many there are."""
    a, b = values((*batch, 48, 64), torch.float32, 1), values((*batch, 64, 80), torch.float32, 2)
    config = Config(32, 32, 16, schedule="persistent", loader=loader)
    whole = gemmery.matmul(a, b, config=config)
    for index in itertools.product(*map(range, batch)):
        assert torch.equal(whole[index], gemmery.matmul(a[index], b[index], config=config))


@pytest.mark.parametrize("out", ((1, 200), (200, 1), (3, 3)), ids=str)
def test_thin_results(out):
    """Fewer rows or columns than any block, in every variant."""
    m, n = out
    a = place((m, 40), torch.bfloat16, ROWS, values((m, 40), torch.bfloat16, 1)).view
    b = place((40, n), torch.bfloat16, COLS, values((40, n), torch.bfloat16, 2)).view
    for variant in VARIANTS:
        placed = place(out, torch.bfloat16, ROWS)
        gemmery.matmul(a, b, out=placed.view, config=Config(64, 64, 64, **variant))
        placed.assert_outside_unchanged()
        assert_product(placed.view, a, b)


@pytest.mark.sampled(3)
@pytest.mark.slow
@pytest.mark.parametrize("loader", ("pointer", "descriptor"))
@pytest.mark.parametrize("parts", (2, 3, 5, 9))
@pytest.mark.parametrize("block_n", (32, 48))
def test_parts_of_tiles_are_added_up(loader, parts, block_n):
    a = place((40, 300), torch.float32, ROWS, values((40, 300), torch.float32, 1)).view
    b = place((300, 90), torch.float32, COLS, values((300, 90), torch.float32, 2)).view
    config = Config(32, block_n, 32, loader=loader, split_k=parts)
    result = gemmery.matmul(a, b, config=config)
    assert_product(result, a, b)
    # The counters are back at zero, or the second launch would not add up.
    assert torch.equal(result, gemmery.matmul(a, b, config=config))


@pytest.mark.parametrize("m", (1, 33, 60))
def test_what_a_plan_says_is_what_runs(m):
    a, b = values((m, 64), torch.float16, 1), values((64, 96), torch.float16, 2)
    config = Config(16, 32, 16, schedule="persistent", loader="descriptor")
    plan = gemmery.plan(a, b, config=config)
    assert plan.config == config
    assert (m, 96, 64) == (plan.problem.M, plan.problem.N, plan.problem.K)
    out = torch.empty(m, 96, dtype=torch.float16)
    assert plan(a, b, out) is out
    assert torch.equal(out, gemmery.matmul(a, b, config=config))
    assert str(config) in plan.explain()


def test_the_default_is_the_best_of_the_ranking():
    from gemmery.select import rank

    plan = gemmery.plan(values((64, 64), torch.float16), values((64, 64), torch.float16))
    assert plan.config == rank(plan.problem)[0][0]


DESCRIPTOR = Config(32, 32, 32, loader="descriptor")
NEEDS = "loader 'descriptor' needs .*a and b with one unit stride"


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (torch.zeros(32, 33)[:, :32], torch.zeros(32, 32)),
        (torch.zeros(32, 32), torch.zeros(32, 64)[:, ::2]),
        (torch.zeros(32 * 32 + 1)[1:].view(32, 32), torch.zeros(32, 32)),
        (torch.zeros(1, 32).expand(32, 32), torch.zeros(32, 32)),
        (torch.zeros(2, 3, 32, 32).transpose(0, 1), torch.zeros(3, 2, 32, 32)),
    ],
    ids=("row stride 132 bytes", "no unit stride", "address", "row stride 0", "two batch dimensions"),
)
def test_descriptors_refuse_what_they_cannot_do(a, b):
    with pytest.raises(ValueError, match=NEEDS) as caught:
        gemmery.matmul(a, b, config=DESCRIPTOR)
    assert str(DESCRIPTOR) in str(caught.value)
    assert_product(gemmery.matmul(a, b), a, b)


def test_descriptors_refuse_an_empty_sum():
    with pytest.raises(ValueError, match="needs K > 0"):
        gemmery.matmul(place((32, 0), torch.float32, ROWS).view, torch.zeros(0, 32), config=DESCRIPTOR)


@pytest.mark.parametrize(
    "config", ("16x32x16-g3-w1-s1-tile-pointer", {"block_m": 16, "block_n": 32, "block_k": 16})
)
def test_a_config_may_be_a_string_or_a_dict(config):
    a, b = values((40, 40), torch.float32, 1), values((40, 40), torch.float32, 2)
    assert gemmery.plan(a, b, config=config).config == Config.of(config)
    assert torch.equal(gemmery.matmul(a, b, config=config), gemmery.matmul(a, b, config=Config(16, 32, 16)))
