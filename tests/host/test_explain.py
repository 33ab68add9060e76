"""Explanations: what they show, for any GPU of the table, with and without timings."""

import dataclasses
import itertools
import json

import pytest
import torch

import gemmery
from gemmery import Config, devices
from gemmery.launch import explain
from gemmery.launch.explain import PARTS, explain_problem
from gemmery.select import candidates, rank, store
from gemmery.select.shapes import device_named, problem_of
from tests.problems import make

H200 = devices.TABLE["NVIDIA H200"]


@pytest.mark.parametrize("device", devices.TABLE)
def test_every_known_gpu_is_explained(device):
    for dtype, layout in itertools.product((torch.bfloat16, torch.float32), ("NN", "NT", "TN", "TT")):
        found = gemmery.explain(1000, 512, 256, dtype=dtype, layout=layout, device=device, top=3)
        p = problem_of(1000, 512, 256, dtype=dtype, layout=layout, device=devices.TABLE[device])
        assert found.problem == p
        assert [choice.config for choice in found.choices] == candidates(p)[:3]
        assert found.considered == len(rank(p))
        lines = str(found).splitlines()
        assert str(p) in lines[0]
        assert device in lines[0]
        for choice, line in zip(found.choices, lines[2:], strict=False):
            assert line.startswith(str(choice.config))
            for part in ("total", *PARTS):
                assert f"{getattr(choice.cost, part) * 1e6:.1f}" in line
        assert lines[2 + len(found.choices) :] == found.reasons


def test_an_explanation_says_what_binds():
    seen = set()
    for sizes in ((8192, 8192, 8192), (16, 28672, 8192), (16, 16, 16), (64, 64, 8192), (300, 300, 64)):
        found = gemmery.explain(*sizes, device="H200")
        cost = found.choices[0].cost
        part = max(explain.BINDING, key=lambda name: getattr(cost, name))
        if getattr(cost, part) < cost.total / 2:
            part = "overhead"
        assert part in found.reasons[0], found
        assert f"of {H200.sms} multiprocessors" in found.reasons[0]
        seen.add(part)
    assert {"memory", "overhead"} < seen
    slower = [choice for choice in found.choices[1:] if choice.cost.total > cost.total]
    assert slower
    assert f"{slower[0].config} is predicted to take" in found.reasons[-1]


def test_a_quicker_kernel_that_is_not_kept_is_named():
    explained = (
        gemmery.explain(m, 9216, 3072, dtype=torch.bfloat16, device="H200", top=20)
        for m in range(65, 4096, 122)
    )
    found = next(each for each in explained if each.quicker is not None)
    assert found.quicker.config not in [choice.config for choice in found.choices[:8]]
    assert found.quicker.cost.total < min(choice.cost.total for choice in found.choices[:8])
    assert f"{found.quicker.config} is predicted to take" in str(found)
    assert found.asdict()["quicker"] == str(found.quicker.config)
    assert gemmery.explain(4096, 4096, 4096, dtype=torch.bfloat16, device="H200").quicker is None


def test_the_reference_is_explained():
    found = gemmery.explain(64, 64, 64, dtype=torch.float8_e5m2, device="RX 7900")
    assert found.choices == ()
    assert found.untuned is None
    assert "torch reference" in str(found)
    assert json.loads(json.dumps(found.asdict()))["choices"] == []


@pytest.fixture
def kept(tmp_path, monkeypatch):
    monkeypatch.setenv("GEMMERY_STORE", "1")
    monkeypatch.setenv("GEMMERY_CACHE_DIR", str(tmp_path))
    return store.current()


def test_timings_stand_beside_the_predictions(kept):
    p = make(512, 4096, 4096, device="NVIDIA H200")
    ranked = [config for config, _ in rank(p)]
    kept.record(p, ranked[0], 123.4e-6)
    kept.record(p, ranked[2], 111.1e-6)
    kept.record(p, ranked[1], None, "no")
    found = explain_problem(p, top=3)
    assert [(choice.config, choice.measured) for choice in found.choices] == [
        (ranked[2], 111.1e-6), (ranked[0], 123.4e-6), (ranked[1], None),
    ]  # fmt: skip
    lines = str(found).splitlines()
    assert lines[2].endswith(" 111.1")
    assert lines[3].endswith(" 123.4")
    assert any(f"without timings it would be {ranked[0]}" in reason for reason in found.reasons)
    assert found.asdict()["choices"][0]["measured"] == 111.1e-6


def test_a_measured_config_outside_the_space(kept):
    p = make(512, 4096, 4096, device="NVIDIA H200")
    outside = Config(32, 32, 32, group_m=3)
    kept.record(p, outside, 1e-6)
    found = explain_problem(p)
    assert found.choices[0] == explain.Choice(outside, None, 1e-6)
    assert str(outside) in str(found)
    assert f"without timings it would be {rank(p)[0][0]}" in found.reasons[0]
    assert found.asdict()["choices"][0]["predicted"] is None


def test_an_explanation_as_json():
    found = gemmery.explain(512, 4096, 4096, batch=(3,), bias=True, device="H200", top=2)
    values = json.loads(json.dumps(found.asdict()))
    assert values["device"] == "NVIDIA H200 (132 SMs)"
    assert [Config.of(choice["config"]) for choice in values["choices"]] == [c.config for c in found.choices]
    assert values["choices"][0]["predicted"] == dataclasses.asdict(found.choices[0].cost)
    assert values["problem"]["batch"] == [3]
    assert values["problem"]["epilogue"] == "add_row"


def test_devices_by_name():
    assert device_named("H200") is device_named("nvidia h200") is H200
    assert device_named("L4").name == "NVIDIA L4"
    assert device_named("a10").name == "NVIDIA A10"
    assert device_named("mi300x").name == "AMD Instinct MI300X"
    if not torch.cuda.is_available():
        assert device_named() is H200
    with pytest.raises(ValueError, match=r"3090 and .* have that name"):
        device_named("RTX")
    with pytest.raises(ValueError, match="no GPU in the device table has that name"):
        device_named("V100")


WRONG = [
    ((0, 1, 1), {}, ValueError, "M is 0"),
    ((1, 1.0, 1), {}, ValueError, "N is 1.0"),
    ((1, 1, -1), {}, ValueError, "K is -1"),
    ((1, 1, 1), {"batch": (0,)}, ValueError, "batch is 0"),
    ((1, 1, 1), {"layout": "nt"}, ValueError, "layout is 'nt'"),
    ((1, 1, 1), {"precision": "tf16"}, ValueError, "precision is 'tf16'"),
    ((1, 1, 1), {"dtype": torch.complex64}, TypeError, "dtype is torch.complex64"),
    ((1, 1, 1), {"out_dtype": torch.int8}, TypeError, "out_dtype is torch.int8"),
    ((1, 1, 1), {"top": 0}, ValueError, "top is 0"),
]


@pytest.mark.parametrize(("sizes", "options", "error", "message"), WRONG, ids=[one[3] for one in WRONG])
def test_what_can_not_be_explained(sizes, options, error, message):
    with pytest.raises(error, match=message):
        gemmery.explain(*sizes, **options)


def test_an_empty_sum_is_explained():
    assert gemmery.explain(64, 64, 0, device="H200").choices
