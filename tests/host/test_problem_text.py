"""Problems as text and back, tensors made from them, and the log of problems that a program met."""

import json
import multiprocessing
import os
from dataclasses import MISSING, fields, replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import gemmery
from gemmery import devices
from gemmery.dtypes import OUT_DTYPES
from gemmery.launch.plan import forget_plans, make_plan
from gemmery.layout import make_problem
from gemmery.operands import Layout
from gemmery.problem import Problem
from gemmery.select import keys, log
from gemmery.select.samples import sample
from tests.problems import make

INTERPRETER = devices.TABLE["interpreter"]


@st.composite
def problems(draw):
    dtype = draw(st.sampled_from(list(OUT_DTYPES)))
    return make(
        *(draw(st.integers(1, 70)) for _ in range(3)),
        dtype=dtype,
        out_dtype=draw(st.sampled_from(OUT_DTYPES[dtype])),
        layout=draw(st.sampled_from(("NN", "NT", "TN", "TT"))),
        batch=draw(st.sampled_from(((), (3,), (2, 5)))),
        bias=draw(st.booleans()) and dtype.itemsize > 1,
        scaled=draw(st.booleans()),
        pad=draw(st.sampled_from((0, 1, 16))),
        start=draw(st.sampled_from((0, 1))),
        fast_accum=draw(st.booleans()),
        batch_invariant=draw(st.booleans()),
    )


@given(problems())
def test_a_problem_and_its_text(p):
    text = keys.to_text(p)
    assert "\n" not in text
    assert keys.from_dict(json.loads(text), INTERPRETER) == p
    assert keys.to_text(keys.from_dict(json.loads(text), p.device)) == text


@given(problems(), problems())
def test_different_problems_have_different_texts(one, other):
    assert (keys.to_text(one) == keys.to_text(other)) == (one == other)


def test_every_field_counts():
    """Whoever adds a field to Problem learns here whether its kind can be written down."""
    p = make(batch=(3,), bias=True)
    for field in fields(Problem):
        # Products with a traced epilogue are not written down, and others are neither packed nor scaled along K.
        if field.name in ("device", "fusion"):
            continue
        value = getattr(p, field.name)
        if isinstance(value, Layout):
            other = replace(value, row=value.row + 16)
        elif isinstance(value, bool):
            other = not value
        else:
            other = {int: 7, str: "tf32", tuple: (5,)}[type(value)]
        changed = replace(p, **{field.name: other})
        assert keys.to_text(changed) != keys.to_text(p), field.name
        assert keys.from_dict(keys.to_dict(changed), p.device) == changed
        if field.default is not MISSING:
            default = replace(p, **{field.name: field.default})
            assert field.name not in keys.to_dict(default)


def test_a_device_is_told_by_name_and_size():
    h200 = devices.TABLE["NVIDIA H200"]
    assert keys.device_text(h200) == "NVIDIA H200 (132 SMs)"
    assert keys.device_text(replace(h200, sms=66)) != keys.device_text(h200)


GOOD = keys.to_dict(make(batch=(2,)))
WRONG = [
    ([], "object with M, N, K"),
    ({"M": 1}, "without N, K, batch, a, b, out"),
    (GOOD | {"P": 1}, "has no P"),
    (GOOD | {"M": 1.0}, "M is of type int; given 1.0"),
    (GOOD | {"M": True}, "M is of type int; given True"),
    (GOOD | {"K": -1}, "K is at least 0; given -1"),
    (GOOD | {"batch": 2}, "batch is a list of sizes; given 2"),
    (GOOD | {"batch": [2, 3]}, "one a batch dimension"),
    (GOOD | {"precision": "ieee64"}, "one of ieee, tf32, tf32x3; given 'ieee64'"),
    (GOOD | {"fast_accum": 1}, "fast_accum is of type bool; given 1"),
    (GOOD | {"a": {}}, "a is an object with aligned, col, dtype, row, steps"),
    (GOOD | {"a": GOOD["a"] | {"dtype": "fp4"}}, "a has a dtype of fp16, .*; given 'fp4'"),
    (GOOD | {"a": GOOD["a"] | {"dtype": []}}, "a has a dtype"),
    (GOOD | {"b": GOOD["b"] | {"row": "4"}}, "b has strides"),
    (GOOD | {"out": GOOD["out"] | {"aligned": 1}}, "out is aligned or not"),
]


@pytest.mark.parametrize(("values", "message"), WRONG, ids=[message for _, message in WRONG])
def test_what_does_not_describe_a_problem(values, message):
    with pytest.raises(ValueError, match=message):
        keys.from_dict(values, INTERPRETER)


# ---------------------------------------------------------------------------------------------------------------------
# Tensors for a problem


@given(problems(), st.sampled_from((None, 1)))
def test_tensors_have_the_problems_layout(p, seed):
    a, b, out, addend, alpha, beta = sample(p, "cpu" if seed else "meta", seed)
    again = make_problem(
        a, b, out, addend, scaled=alpha != 1 or beta != 1, precision=p.precision, fast_accum=p.fast_accum,
        batch_invariant=p.batch_invariant, device=p.device,
    )  # fmt: skip
    expected = replace(p, epilogue=again.epilogue) if p.addend is not None else p
    assert replace(again, addend=p.addend) == expected
    if p.addend is not None:
        assert (again.addend.row, again.addend.col, again.addend.steps) == (
            p.addend.row,
            p.addend.col,
            p.addend.steps,
        )


def test_numbers_are_random_and_the_same_for_a_seed():
    for dtype in OUT_DTYPES:
        p = make(dtype=dtype, out_dtype=OUT_DTYPES[dtype][0], bias=dtype.itemsize > 1)
        first, again, other = (sample(p, "cpu", seed) for seed in (1, 1, 2))
        assert torch.equal(first.a.double(), again.a.double())
        assert not torch.equal(first.a.double(), other.a.double())
        assert first.a.double().std() > 0.5
        assert first.a.double().isfinite().all()


# ---------------------------------------------------------------------------------------------------------------------
# The log


def write_many(path, number):
    os.environ["GEMMERY_LOG"] = str(path)
    for m in range(200):
        log.note(make(M=200 * number + m + 1, batch=(7,), bias=True))


def test_processes_share_a_log(tmp_path):
    path = tmp_path / "problems.jsonl"
    context = multiprocessing.get_context("fork")
    with context.Pool(4) as pool:
        pool.starmap(write_many, [(path, number) for number in range(4)])
    assert sorted(p.M for p in log.read(path, INTERPRETER)) == list(range(1, 801))


def test_a_problem_is_logged_once_a_plan(tmp_path, monkeypatch):
    path = tmp_path / "problems.jsonl"
    p = make(device="NVIDIA H200", precision="tf32", dtype=torch.float32)
    tensors = sample(p, "meta").given
    monkeypatch.setattr(gemmery.Plan, "fit", lambda *these, **those: None)
    forget_plans()
    make_plan(p, None, *tensors)  # no log asked for
    monkeypatch.setenv("GEMMERY_LOG", str(path))
    make_plan(p, None, *tensors)  # has its plan
    assert not path.exists()
    forget_plans()
    for _ in range(3):
        make_plan(p, None, *tensors)
    assert len(path.read_text().splitlines()) == 1
    forget_plans()
    make_plan(p, None, *tensors)
    assert len(path.read_text().splitlines()) == 2
    forget_plans()
    assert log.read(path, devices.TABLE["NVIDIA H200"]) == [p]
    # On a GPU without those units the product runs otherwise.
    (elsewhere,) = log.read(path, devices.TABLE["AMD Instinct MI300X"])
    assert elsewhere == replace(p, device=devices.TABLE["AMD Instinct MI300X"], precision="ieee")


@pytest.mark.filterwarnings("error")
def test_a_log_that_can_not_be_written_is_said_once(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("GEMMERY_LOG", str(tmp_path / "file" / "log"))
    with pytest.warns(RuntimeWarning, match="GEMMERY_LOG"):
        log.note(make())
    log.note(make())  # a second warning would be an error


@pytest.mark.parametrize("line", ["{", "{}", "3", '{"problem": {"M": 1}}'])
def test_a_line_that_is_no_problem_is_named(line, tmp_path):
    path = tmp_path / "problems.jsonl"
    path.write_text(json.dumps({"problem": keys.to_dict(make())}) + "\n\n" + line + "\n")
    with pytest.raises(ValueError, match=r"problems\.jsonl, line 3"):
        log.read(path, INTERPRETER)
