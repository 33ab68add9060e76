"""Random products: that a seed means the same everywhere, and that what is drawn is what models have."""

import itertools
import math

import pytest

from gemmery.lab import suites
from gemmery.lab.random_products import BACKWARD, CLASSES, ROWS, draw

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


@pytest.mark.parametrize("name", suites.RANDOM)
def test_a_suite_has_six_rows_of_each_of_its_seeds(name):
    found = suites.load(name)
    assert len(found) == 24
    assert len({row.name for row in found}) == 24
    seeds = [int(row.name.split("/")[0]) for row in found]
    assert {seed: seeds.count(seed) for seed in seeds} == dict.fromkeys((1, 2, 3, 4), 6)
    for seed, group in itertools.groupby(found, lambda row: int(row.name.split("/")[0])):
        sizes = [(row.M, row.N, row.K) for row in group]
        assert sizes == [(p.M, p.N, p.K) for p in draw(seed, suites.RANDOM[name], 6)]


def test_layouts_are_those_of_the_suites():
    orders = {"NT": ("row", "col"), "NN": ("row", "row"), "TN": ("col", "row")}
    found = suites.drawn("random_backward", 1, 30)
    assert {row.name.split()[-1] for row in found} == set(orders)
    assert all((row.a, row.b) == orders[row.name.split()[-1]] for row in found)


def test_other_suites_have_no_seeds():
    with pytest.raises(ValueError, match="suite 'llm' has no seeds; there are random_decode"):
        suites.drawn("llm", 1, 3)


def test_what_is_held_out_is_what_the_suites_have():
    held_out = suites.held_out()
    assert len(held_out) > 80
    assert all((row.M, row.N, row.K) in held_out for name in suites.RANDOM for row in suites.load(name))


def test_random_products_are_plain():
    """So that they are in no table of packed weights, which are measured on weights of their own."""
    for name in suites.RANDOM:
        assert not any(row.quantized or row.epilogue or row.batch or row.dtype for row in suites.load(name))
