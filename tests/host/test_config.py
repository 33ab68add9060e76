"""Config and Problem: plain values that can be written down, compared and sent."""

import copy
import json
import pickle
from dataclasses import FrozenInstanceError, replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import gemmery
from gemmery import Config, devices
from gemmery.layout import make_problem
from gemmery.problem import Problem

block = st.sampled_from((16, 32, 64, 128, 256))


@st.composite
def configs(draw):
    schedule, tail = draw(st.sampled_from((("tile", 1), *(("persistent", tail) for tail in (1, 2, 4, 8)))))
    block_m = max(draw(block), 32 if tail == 8 else 16)
    return Config(
        block_m, max(draw(block), 16 * min(tail, 4)), draw(block),
        group_m=draw(st.integers(1, 64)), num_warps=draw(st.sampled_from((1, 2, 4, 8, 16, 32))),
        num_stages=draw(st.integers(1, 9)), schedule=schedule, loader=draw(st.sampled_from(("pointer", "descriptor"))),
        split_store=draw(st.booleans()), tail=tail,
    )  # fmt: skip


@st.composite
def streamed(draw):
    return Config(
        draw(st.sampled_from((16, 64, 128))), draw(st.sampled_from((64, 128))), draw(st.sampled_from((64, 128, 256))),
        num_warps=8, num_stages=draw(st.integers(1, 12)), schedule="specialized", loader="descriptor",
        split_k=draw(st.integers(1, 4)), swap=draw(st.booleans()), stream=draw(st.booleans()),
    )  # fmt: skip


@given(configs() | streamed())
def test_round_trips(config):
    assert Config.of(str(config)) == config
    assert Config.of(config.asdict()) == config
    assert Config.of(json.loads(json.dumps(config.asdict()))) == config
    assert Config.of(config) is config
    assert pickle.loads(pickle.dumps(config)) == copy.deepcopy(config) == config
    assert hash(Config.of(str(config))) == hash(config)


@given(configs() | streamed(), configs() | streamed())
def test_different_configs_have_different_names(one, other):
    assert (str(one) == str(other)) == (one == other)


def test_the_form_that_is_documented():
    config = Config(128, 256, 64, 16, 8, 4, "persistent", "descriptor", True, 4)
    assert str(config) == "128x256x64-g16-w8-s4-persistent-descriptor/2-t4"
    assert str(Config(16, 32, 64)) == "16x32x64-g8-w4-s3-tile-pointer"
    text = "16x128x256-g1-w8-s4-specialized-descriptor-k2-swap-stream"
    assert str(Config.of(text)) == text
    assert (Config.of(text).split_k, Config.of(text).swap, Config.of(text).stream) == (2, True, True)


GOOD = {"block_m": 64, "block_n": 64, "block_k": 64}
SPECIALIZED = {"schedule": "specialized", "loader": "descriptor", "num_warps": 8}
WRONG = [
    ({"block_m": 48}, "block_m is 48"),
    ({"block_n": 8}, "block_n is 8"),
    ({"block_k": 64.0}, "block_k is 64.0"),
    ({"block_k": "64"}, "block_k is '64'"),
    ({"block_m": -16}, "block_m is -16"),
    ({"num_warps": 3}, "num_warps is 3"),
    ({"num_warps": 64}, "num_warps is 64"),
    ({"num_stages": 0}, "num_stages is 0"),
    ({"group_m": 0}, "group_m is 0"),
    ({"split_k": 0}, "split_k is 0; it must be at least 1"),
    ({"split_k": 0, "schedule": "persistent"}, "split_k is 0; it must be at least 1"),
    (SPECIALIZED | {"split_k": 0}, "split_k is 0; it must be at least 1"),
    (SPECIALIZED | {"split_k": -1}, "split_k is -1; it must be at least 1"),
    ({"group_m": 2.5}, "group_m is 2.5"),
    ({"group_m": "8"}, "group_m is '8'"),
    ({"tail": 3, "schedule": "persistent"}, "tail is 3"),
    ({"tail": 4, "block_n": 32, "schedule": "persistent"}, "tail is 4"),
    ({"tail": 8, "block_m": 16, "schedule": "persistent"}, "tail is 8"),
    ({"tail": 2}, "tail needs the persistent schedule"),
    ({"schedule": "stream"}, "schedule is 'stream'"),
    ({"loader": "tma"}, "loader is 'tma'"),
    ({"stream": True}, "stream needs the specialized schedule"),
    ({"stream": 1}, "stream is 1"),
    ({"split_k": True}, "split_k is True"),
    ({"schedule": "specialized"}, "needs the descriptor loader"),
    (SPECIALIZED | {"num_warps": 4}, "needs the descriptor loader and 8 warps"),
    ({"stages": 3, "warps": 4}, "Config has no stages, warps"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "message"), WRONG, ids=[message for _, message in WRONG])
def test_wrong_knobs_are_named(change, message):
    with pytest.raises(ValueError, match=message):
        Config.of(GOOD | change)


@pytest.mark.parametrize(
    "text", ("", "64x64", "64x64x64", "64x64x64-g8-w4-s3-tile", "64x64x64-g8-w4-s3-tile-pointer/3", " 64x64x64-g8-w4-s3-tile-pointer",
             "64x64x64-g8-w4-s3-tile-pointer-t", "-64x64x64-g8-w4-s3-tile-pointer"),
)  # fmt: skip
def test_strings_that_are_no_config(text):
    with pytest.raises(ValueError, match="is not of the form 128x256x64") as caught:
        Config.of(text)
    assert repr(text) in str(caught.value)


@pytest.mark.parametrize("value", (3, 6.5, ["64x64x64"], (64, 64, 64)))
def test_values_that_are_no_config(value):
    with pytest.raises(TypeError, match=f"config is a {type(value).__name__}"):
        gemmery.matmul(torch.ones(2, 2), torch.ones(2, 2), config=value)


def test_incomplete_dicts():
    with pytest.raises((TypeError, ValueError), match="block_k"):
        Config.of({"block_m": 64, "block_n": 64})


# ---------------------------------------------------------------------------------------------------------------------
# Problems


def problem(m=64, n=32, k=16, lead=(), dtype=torch.float16, device="NVIDIA H100", bias=False, **kwargs):
    a, b, out = (
        torch.empty(*lead, m, k, dtype=dtype),
        torch.empty(*lead, k, n, dtype=dtype),
        torch.empty(*lead, m, n, dtype=dtype),
    )
    addend = torch.empty(n, dtype=dtype) if bias else None
    options = {"scaled": False, "precision": "ieee", "fast_accum": False, "device": devices.TABLE[device]}
    return make_problem(a, b, out, addend, **options | kwargs)


def test_equal_layouts_make_one_problem():
    assert problem() == problem()
    assert hash(problem()) == hash(problem())
    assert len({problem(), problem(), problem(bias=True)}) == 2


@pytest.mark.parametrize(
    "change",
    [{"m": 65}, {"n": 33}, {"k": 17}, {"lead": (3,)}, {"dtype": torch.bfloat16}, {"device": "NVIDIA A100"}, {"bias": True},
     {"scaled": True}, {"precision": "tf32"}, {"fast_accum": True}, {"batch_invariant": True}],
    ids=lambda change: next(iter(change)),
)  # fmt: skip
def test_whatever_decides_tells_problems_apart(change):
    assert problem(**change) != problem()


def test_layouts_tell_problems_apart():
    a, b, out = torch.empty(16, 16), torch.empty(16, 16), torch.empty(16, 16)
    options = {
        "scaled": False,
        "precision": "ieee",
        "fast_accum": False,
        "device": devices.TABLE["NVIDIA H100"],
    }
    shifted = torch.empty(16 * 16 + 1)[1:].view(16, 16)
    seen = {make_problem(x, y, z, None, **options) for x, y, z in (
        (a, b, out), (a.t(), b, out), (a, b.t(), out), (a, b, out.t()), (shifted, b, out), (a, shifted, out),
        (torch.empty(16, 32)[:, :16], b, out), (torch.empty(16, 32)[:, ::2], b, out), (a[:1].expand(16, 16), b, out),
    )}  # fmt: skip
    assert len(seen) == 9


def test_data_does_not_tell_problems_apart():
    a, b, out = torch.ones(16, 16), torch.ones(16, 16), torch.ones(16, 16)
    options = {
        "scaled": False,
        "precision": "ieee",
        "fast_accum": False,
        "device": devices.TABLE["NVIDIA H100"],
    }
    assert make_problem(a, b, out, None, **options) == make_problem(a + 1, b + 2, out + 3, None, **options)


def test_problems_are_frozen_and_can_be_sent():
    p = problem(lead=(3,), bias=True)
    with pytest.raises(FrozenInstanceError):
        p.M = 3
    again = pickle.loads(pickle.dumps(p))
    assert again == p == copy.deepcopy(p)
    assert hash(again) == hash(p)
    assert isinstance(again, Problem)


def test_what_a_problem_moves_and_computes():
    p = problem(m=8, n=4, k=2)
    assert p.flops == 2 * 8 * 4 * 2
    assert p.bytes == 2 * (8 * 2 + 2 * 4 + 8 * 4)
    assert problem(m=8, n=4, k=2, bias=True).bytes == p.bytes + 2 * 4
    batch = problem(m=8, n=4, k=2, lead=(3, 5))
    assert (batch.matrices, batch.batch) == (15, (15,))
    assert batch.bytes == 15 * p.bytes
    one = replace(batch, b=replace(batch.b, steps=(0,)))
    assert one.bytes == batch.bytes - 14 * 2 * 2 * 4


def test_problems_read_well():
    assert str(problem(lead=(3,), bias=True)) == "3 of 64x32x16 fp16[row] @ fp16[row] -> fp16[row] +add_row"
