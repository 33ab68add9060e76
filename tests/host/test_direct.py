"""The parts of the short way into the driver that need neither a GPU nor a compiled kernel."""

import pytest
import torch
from triton.tools.tensor_descriptor import TensorDescriptor

from gemmery import devices
from gemmery.launch import direct
from gemmery.launch.plan import Plan
from gemmery.layout import make_problem


def descriptor(rows=64, block=16):
    return TensorDescriptor(torch.empty(rows, 64), [rows, 64], [64, 1], [block, 16])


def expand(described, meta):
    """In place of Triton's: says what it was asked to encode."""
    return [(described.base.data_ptr(), tuple(described.shape), meta["swizzle"]), *described.shape]


def test_a_tensor_map_is_made_once_for_an_address():
    made = []
    maps = direct.TensorMaps(
        descriptor(), lambda described: made.append(described.base.data_ptr()) or len(made)
    )
    assert [maps[16], maps[32], maps[16], maps[32]] == [1, 2, 1, 2]
    assert made == [16, 32]


def test_tensor_maps_are_bounded(monkeypatch):
    monkeypatch.setattr(direct, "_MAPS", 8)
    maps = direct.TensorMaps(descriptor(), lambda described: described.base.data_ptr())
    for address in range(0, 16 * 100, 16):
        assert maps[address] == address
        assert len(maps) <= 8


def test_matrices_of_one_layout_share_their_maps():
    meta = {"swizzle": 3}
    first = direct._maps(descriptor(), meta, expand)
    assert direct._maps(descriptor(), meta, expand) is first
    others = [
        direct._maps(descriptor(rows=128), meta, expand),
        direct._maps(descriptor(block=32), meta, expand),
        direct._maps(descriptor(), {"swizzle": 2}, expand),
    ]
    assert len({id(maps) for maps in (first, *others)}) == 4
    assert (first[64], others[0][64], others[2][64]) == (
        (64, (64, 64), 3),
        (64, (128, 64), 3),
        (64, (64, 64), 2),
    )


def test_maps_go_with_the_last_plan_that_uses_them():
    meta = {"swizzle": 17}
    maps = direct._maps(descriptor(), meta, expand)
    count = len(direct._shared)
    del maps
    assert len(direct._shared) == count - 1


def test_arguments_are_kept_by_numbers(monkeypatch):
    monkeypatch.setattr(direct, "_NUMBERS", 4)
    asked = []
    kept = direct._by_numbers(lambda numbers: asked.append(numbers) or len(asked))

    def arguments(*numbers):
        return kept(numbers)

    assert arguments(2, 0.5) == arguments(2.0, 0.5) == 1
    # Zeros of either sign give results that differ in theirs.
    assert len({arguments(0.0, 1), arguments(-0.0, 1), arguments(1, 0.0), arguments(1, -0.0)}) == 4
    for alpha in range(3, 40):
        arguments(alpha, 1)
    assert str(asked[1:3]) == "[(0.0, 1), (-0.0, 1)]"


# ---------------------------------------------------------------------------------------------------------------------
# What a plan makes of it


class Way:
    """In place of the short way: notes the launches, and takes them or not."""

    def __init__(self, takes=True):
        self.takes, self.seen = takes, []

    def __call__(self, *launch):
        self.seen.append(launch)
        return self.takes


@pytest.fixture
def plan(monkeypatch):
    """A plan for matrices of 16 by 16 on "GPU" number -1, where CPU tensors are; tensors; its ordinary launches."""
    tensors = [torch.ones(16, 16) for _ in range(3)]
    problem = make_problem(
        *tensors, None, scaled=False, precision="ieee", fast_accum=False, device=devices.TABLE["NVIDIA H200"]
    )
    made = Plan(problem)
    made.direct = Way()
    ordinary = []
    monkeypatch.setattr(made._binding, "launch", lambda *tensors: ordinary.append(tensors))
    return made, tensors, ordinary


def test_a_plan_takes_the_short_way(plan):
    made, (a, b, out), ordinary = plan
    assert made(a, b, out) is out
    assert made.direct.seen == [([a.data_ptr(), b.data_ptr(), out.data_ptr()], (1, 1))]
    assert ordinary == []


def test_where_the_short_way_does_not_take_it_the_launch_is_ordinary(plan):
    made, (a, b, out), ordinary = plan
    made.direct = Way(takes=False)
    assert made(a, b, out) is out
    assert len(ordinary) == len(made.direct.seen) == 1


def test_other_alignment_and_other_devices_are_launched_ordinarily(plan):
    made, (a, b, out), ordinary = plan
    shifted = torch.ones(16 * 16 + 1)[1:].view(16, 16)
    assert shifted.data_ptr() % 16
    made(shifted, b, out)
    made(a, shifted, out)
    made(a, b, shifted)
    made._index = 1
    made(a, b, out)
    assert len(ordinary) == 4
    assert made.direct.seen == []


def test_a_plan_still_says_what_it_is_not_for(plan):
    made, (a, b, out), ordinary = plan
    with pytest.raises(ValueError, match="without an addend"):
        made(a, b, out, out)
    with pytest.raises(ValueError, match="alpha and beta of 1"):
        made(a, b, out, None, 2)
    assert made.direct.seen == ordinary == []
