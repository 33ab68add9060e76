"""Random products: that a seed means the same everywhere, and that what is drawn is what models have."""

import dataclasses
import itertools
import json
import math

import pytest

from gemmery.lab import inputs, peers, suites
from gemmery.lab.abstract import of_row
from gemmery.lab.random_products import BACKWARD, CLASSES, ROWS, draw
from gemmery.select import candidates, measured
from gemmery.select.shapes import device_named

#: The first products of seed 9.
PINNED = {
    "decode": [(2, 1024, 4096, "NT"), (53, 17920, 5120, "NT"), (4, 768, 384, "NT")],
    "mid": [(422, 2112, 2560, "NT"), (70, 1536, 768, "NT"), (128, 2112, 768, "NT")],
    "prefill": [(1496, 13824, 4608, "NT"), (792, 1056, 2880, "NT"), (759, 576, 1024, "NT")],
    "backward": [(1496, 13824, 4608, "NT"), (792, 1056, 2880, "NT"), (576, 4096, 759, "TN")],
}  # fmt: skip
SEEDS = range(40)
COUNT = 50


def everything(which):
    return [product for seed in SEEDS for product in draw(seed, which, COUNT)]


def test_a_seed_means_the_same_for_ever():
    """Bars were read from these: whoever changes the drawing changes what they were read from."""
    sizes = {which: [(p.M, p.N, p.K, p.layout) for p in draw(9, which, 3)] for which in CLASSES}
    assert sizes == PINNED


def test_the_first_products_are_the_same_whatever_the_count():
    for which in CLASSES:
        assert draw(7, which, 30)[:6] == draw(7, which, 6)


def test_products_that_are_not_kept_are_passed_over():
    first = draw(7, "mid", 40)
    kept = [product for product in first if product.projection == "gate_up"]
    assert len(kept) > 3
    assert draw(7, "mid", len(kept), lambda product: product.projection == "gate_up") == kept


def test_seeds_and_classes_differ():
    drawn = [tuple(draw(seed, which, 6)) for seed in SEEDS for which in CLASSES]
    assert len(set(drawn)) == len(drawn)


@pytest.mark.parametrize("which", CLASSES)
def test_weights_are_ones_that_are_worth_a_kernel(which):
    for product in everything(which):
        N, K = weight(product)
        assert min(N, K) >= 256
        assert N % 16 == K % 16 == 0
        assert N * K <= 2**29


def weight(product):
    """Rows and columns of a product's weight, whichever operand or result it is."""
    places = {"NT": (product.N, product.K), "NN": (product.K, product.N), "TN": (product.M, product.N)}
    return places[product.layout]


def rows(product):
    return product.K if product.layout == "TN" else product.M


@pytest.mark.parametrize("which", ROWS)
def test_rows_are_log_uniform_in_their_class(which):
    least, most = ROWS[which]
    found = everything(which)
    assert all(least <= product.M <= most and product.layout == "NT" for product in found)
    middle = math.exp((math.log(least) + math.log(most + 1)) / 2)
    assert 0.4 < sum(middle > product.M for product in found) / len(found) < 0.6
    powers = sum(product.M & (product.M - 1) == 0 for product in found) / len(found)
    # One in three, but that 64 and 512 are not in mid, and that every second small number is one anyway.
    assert (0.18 if which == "mid" else 0.3) < powers < (0.75 if which == "decode" else 0.4)


def test_backward_has_all_layouts_and_the_rows_of_prefill():
    found = everything(BACKWARD)
    for layout in ("NT", "NN", "TN"):
        some = [product for product in found if product.layout == layout]
        assert 0.28 < len(some) / len(found) < 0.39
        assert all(ROWS["prefill"][0] <= rows(product) <= ROWS["prefill"][1] for product in some)
        assert all(f"M={rows(product)}" in product.name for product in some)


def test_projections_are_all_there_and_cut_for_several_devices():
    names = {product.name.split()[0] for product in everything("mid")}
    assert names == {"qkv", "o", "gate_up", "up", "down", "latent"}
    cut = sum(" tp" in product.name for product in everything("mid")) / (len(SEEDS) * COUNT)
    assert 0.35 < cut < 0.6


@pytest.mark.parametrize(
    ("which", "count", "said"), [("large", 3, "class 'large'"), ("mid", 0, "0 products")]
)
def test_what_can_not_be_drawn(which, count, said):
    with pytest.raises(ValueError, match=said):
        draw(1, which, count)


# --- the suites -----------------------------------------------------------------------------------------------------


#: Suites of one class and of nothing but bare products, and the others.
BARE = [f"random_{which}" for which in CLASSES]
OTHERS = [name for name in suites.RANDOM if name not in BARE]
ALL_ROWS = ("decode", "mid", "prefill")


def size(row):
    return row.M, row.N, row.K


def test_the_bare_suites_are_one_class_each():
    assert list(suites.RANDOM)[:4] == BARE
    for which in CLASSES:
        suite = suites.RANDOM[f"random_{which}"]
        assert (suite.classes, dict(suite.changes)) == ((which,), {})
        rows = suites.drawn(f"random_{which}", 9, 30)
        products = draw(9, which, 30)
        assert [size(row) for row in rows] == [(p.M, p.N, p.K) for p in products]
        ends = [f" {p.layout}" if which == BACKWARD else "" for p in products]
        named = [f"9/{i} {p.name}{end}" for i, (p, end) in enumerate(zip(products, ends, strict=True), 1)]
        assert [row.name for row in rows] == named


@pytest.mark.parametrize("name", suites.RANDOM)
def test_a_suite_has_six_rows_of_each_of_its_seeds(name):
    found = suites.load(name)
    assert len(found) == 24
    assert len({row.name for row in found}) == 24
    seeds = [int(row.name.split("/")[0]) for row in found]
    assert {seed: seeds.count(seed) for seed in seeds} == dict.fromkeys((1, 2, 3, 4), 6)
    for seed, group in itertools.groupby(found, lambda row: int(row.name.split("/")[0])):
        assert list(group) == suites.drawn(name, seed, 6)


@pytest.mark.parametrize("name", suites.RANDOM)
def test_the_first_rows_are_the_same_whatever_the_count(name):
    rows = suites.drawn(name, 7, 20)
    for count in (1, 2, 7, 19):
        assert suites.drawn(name, 7, count) == rows[:count]
    assert suites.drawn(name, 8, 20) != rows


@pytest.mark.parametrize("name", OTHERS)
def test_classes_take_turns(name):
    classes = suites.RANDOM[name].classes
    rows = suites.drawn(name, 11, 60)
    for start, which in enumerate(classes):
        found = rows[start :: len(classes)]
        least, most = ROWS[which]
        assert len(found) == 60 / len(classes)
        assert all(least <= row.M <= most for row in found)
        # They are those of the class's own suite, but for those that are passed over.
        own = iter(suites.drawn(f"random_{which}", 11, 1000))
        assert all(size(row) in map(size, own) for row in found)


#: What every row of a suite is besides its sizes, its classes, and which of their products it has.
KINDS = {
    "random_invariant": ({"batch_invariant": True}, ALL_ROWS, lambda row: True),
    "random_swiglu": (
        {"epilogue": "swiglu", "call": "linear"}, ALL_ROWS, lambda row: " gate_up " in row.name and row.N % 32 == 0,
    ),
    "random_bias_gelu": ({"epilogue": "bias_gelu_tanh", "call": "linear"}, ALL_ROWS, lambda row: True),
    "random_bias_residual": ({"epilogue": "bias_residual", "call": "linear"}, ALL_ROWS, lambda row: True),
    "random_int4_small": (
        {"weight": "int4", "call": "linear"}, ("decode",), lambda row: row.K % 128 == 0 and row.M <= 64,
    ),
    "random_int4": (
        {"weight": "int4", "call": "linear"}, ("mid", "prefill"), lambda row: row.K % 128 == 0 and row.M >= 256,
    ),
    "random_fp8": ({"scales": "row", "dtype": "fp8fast", "call": "matmul"}, ALL_ROWS, lambda row: True),
    "random_fp8_accurate": ({"scales": "row", "dtype": "fp8", "call": "matmul"}, ALL_ROWS, lambda row: True),
    "random_fp8_blocks": (
        {"scales": "block", "dtype": "fp8", "call": "matmul"}, ALL_ROWS, lambda row: row.N % 128 == row.K % 128 == 0,
    ),
}  # fmt: skip


def test_every_suite_has_its_kind():
    assert list(KINDS) == OTHERS


@pytest.mark.parametrize("name", KINDS)
def test_rows_are_of_their_kind_and_suit_it(name):
    changes, classes, suits = KINDS[name]
    assert suites.RANDOM[name].classes == classes
    plain = suites.Row("", 1, 1, 1)
    for seed in range(1, 9):
        for row in suites.drawn(name, seed, 24):
            assert dataclasses.replace(plain, name=row.name, M=row.M, N=row.N, K=row.K, **changes) == row
            assert suits(row), row
            # As good as one from a file.
            given = json.loads(
                json.dumps({k: v for k, v in dataclasses.asdict(row).items() if v not in (None, "")})
            )
            assert suites._row(given, "here") == row


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", OTHERS)
def test_what_is_drawn_can_be_chosen_for(name):
    device = device_named("H200")
    for seed in range(1, 9):
        for row in suites.drawn(name, seed, 6):
            problem = of_row(row, row.dtype or "bf16", device)
            assert size(row) == (problem.M, problem.N, problem.K)
            assert problem.batch_invariant == row.batch_invariant
            assert candidates(problem), row


@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.parametrize("M", [1, 30])
def test_small_rows_of_a_kind_are_multiplied(name, M, monkeypatch):
    """By both, on the CPU: torch has no product with scales there."""

    def scaled_mm(a, b, *, scale_a, scale_b, out_dtype, use_fast_accum):
        if suites.RANDOM[name].changes["scales"] == "block":
            scale_a = scale_a.repeat_interleave(128, 1)
            scale_b = scale_b.repeat_interleave(128, 0).repeat_interleave(128, 1)
        return ((a.float() * scale_a) @ (b.float() * scale_b)).to(out_dtype)

    monkeypatch.setattr("torch._scaled_mm", scaled_mm)
    row = dataclasses.replace(suites.load(name)[0], M=M, N=256, K=384)
    made = inputs.make_inputs(row, row.dtype or "bf16", 5, "cpu")
    assert made.out.shape == (M, 128 if name == "random_swiglu" else 256)
    for method in (peers.gemmery_call, peers.cublas):
        assert inputs.check(method(made), made, range(M)) > 0


def test_layouts_are_those_of_the_suites():
    orders = {"NT": ("row", "col"), "NN": ("row", "row"), "TN": ("col", "row")}
    found = suites.drawn("random_backward", 1, 30)
    assert {row.name.split()[-1] for row in found} == set(orders)
    assert all((row.a, row.b) == orders[row.name.split()[-1]] for row in found)


def test_other_suites_have_no_seeds():
    with pytest.raises(ValueError, match="suite 'llm' has no seeds; there are random_decode"):
        suites.drawn("llm", 1, 3)


@pytest.mark.parametrize("name", ["random_mid", "random_swiglu"])
def test_a_suite_has_a_row_at_least(name):
    with pytest.raises(ValueError, match="0 rows requested; at least one"):
        suites.drawn(name, 1, 0)


def test_what_is_held_out_is_what_the_suites_have():
    held_out = suites.held_out()
    assert len(held_out) > 80
    assert all((row.M, row.N, row.K) in held_out for name in suites.RANDOM for row in suites.load(name))


def test_bare_products_are_plain():
    for name in BARE:
        assert not any(row.quantized or row.epilogue or row.batch or row.dtype for row in suites.load(name))


def test_tables_of_packed_weights_have_no_random_ones():
    """They are measured on weights of their own; `held_out` has also the sizes of products that are not packed."""
    tables = list(measured.TABLES.glob("*packed*.json"))
    assert tables
    sizes = {size(row) for name in suites.RANDOM for row in suites.load(name) if row.weight}
    for path in tables:
        shapes = {tuple(shape[1:]) for shape in json.loads(path.read_text(encoding="utf-8"))["shapes"]}
        assert not shapes & sizes, path.name
