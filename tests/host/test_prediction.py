"""Predicted times: how near they come to recorded ones of shapes that the fit has not seen, and what they are made of."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from typer.testing import CliRunner

from benchmarks import fit_prediction
from gemmery import devices
from gemmery.cli import app
from gemmery.lab import results, suites
from gemmery.lab.abstract import abstract_problem, of_row
from gemmery.lab.fusions import FUSIONS, in_torch
from gemmery.lab.inputs import KINDS
from gemmery.lab.prediction import calibration, ours, predict, recorded, vendor
from gemmery.lab.prediction.describe import describe
from gemmery.lab.prediction.predict import BINDING, roofline
from gemmery.lab.prediction.residuals import Correction, Prior, Samples
from gemmery.lab.rooflines import results_of, rooflines
from gemmery.lab.suites import SPARSE_WEIGHTS, Row
from gemmery.problem import Config

H200 = devices.TABLE["NVIDIA H200"]
GPUS = [device for name, device in devices.TABLE.items() if name != "interpreter"]
RESULTS = recorded.folder()
#: The most that the median and the 90th percentile of the relative error may be, over all suites.
MEDIAN, HIGH = 0.08, 0.20


# The times of all shapes are predicted once, so one worker runs these tests.
pytestmark = pytest.mark.xdist_group("prediction")


@pytest.fixture(scope="session")
def data():
    return {each.method: each for each in fit_prediction.read(RESULTS, H200)}


@pytest.fixture(scope="session")
def held_out(data):
    return {method: fit_prediction.cross_validate(each) for method, each in data.items()}


# --- against recorded times -----------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("method", calibration.METHODS)
def test_shapes_that_were_left_out_are_predicted(data, held_out, method):
    found = fit_prediction.summarise(data[method], held_out[method][0])
    print(json.dumps(found, indent=1))
    assert found["all"]["median"] <= MEDIAN
    assert found["all"]["p90"] <= HIGH
    # No suite is far off where the others make up for it.
    assert all(suite["median"] <= 1.5 * MEDIAN and suite["p90"] <= 2 * HIGH for suite in found.values())


def outdated(row):
    """Whether a result's row names a config that this version does not have."""
    try:
        Config.of(row["plan"].partition(": ")[2].partition(", ")[0]) if row.get("plan") else None
    except ValueError:
        return True
    return False


@pytest.mark.slow
def test_no_recorded_row_is_left_out(data, held_out):
    files = [results.read(path) for path in recorded.fitted(RESULTS)]
    rows = [row for file in files for row in file["rows"] if "burst" in row.get("summary", {})]
    assert len(rows) > 300
    for method in calibration.METHODS:
        timed = [row for row in rows if method in row["summary"]["burst"]["us"]]
        # The vendor's times stand whatever config of ours ran beside them.
        gone = sum(outdated(row) for row in timed) if method == "gemmery" else 0
        measured = len(timed) - gone
        assert np.isfinite(held_out[method][0]).sum() == measured
        assert {file["suite"] for file in files} >= {"lowbit", "scaled", "fused", "views", "odd", "strided"}


@pytest.mark.slow
def test_random_products_are_not_fitted_to(tmp_path):
    """Not by the script, nor by anything else that reads recorded results."""
    known = tmp_path / "decode-bf16.json"
    few = json.loads((RESULTS / known.name).read_text())
    known.write_text(json.dumps(few | {"rows": few["rows"][:4]}))
    before = fit_prediction.read(tmp_path, H200), fit_prediction.sources(tmp_path, H200)
    for name in suites.RANDOM:
        data = json.loads(known.read_text()) | {"suite": name, "drawn": 7}
        (tmp_path / f"{name}.json").write_text(json.dumps(data))
    after = fit_prediction.read(tmp_path, H200), fit_prediction.sources(tmp_path, H200)
    assert [data.shapes for data in after[0]] == [data.shapes for data in before[0]]
    assert after[1] == before[1]
    assert [path.name for path in recorded.fitted(tmp_path)] == [known.name]


#: Results with rows of kernels that this version does not have.
OLD = {"decode-bf16-triton3.9"}


def test_every_recorded_config_is_still_there():
    read = recorded.read_results(RESULTS)
    assert len(read) > 300
    assert {row.suite for row in read if row.outdated} == OLD


def test_times_of_kernels_that_are_gone_are_not_told():
    rows = recorded.read_result(RESULTS / "decode-bf16-triton3.9.json")
    old = [row for row in rows if row.outdated]
    assert 0 < len(old) < len(rows)
    for row in old:
        found = recorded.measured_of(row.problem)
        assert found is None or found.source.startswith("decode-bf16.json")
    told = results_of(H200, RESULTS)["decode"]
    assert len(told) == 2 * len(rows) - len(old)


@pytest.mark.slow
def test_a_shape_is_predicted_without_its_own_times(data, held_out):
    """Whatever the times of a shape are, in suites and tables, what is predicted of it stays."""
    each = data["gemmery"]
    shape = (64, 8192, 8192)
    own = np.array([one == shape for one in each.shapes])
    asked = own & (np.array(each.suites) != "")
    assert own.sum() > asked.sum() > 5
    changed = fit_prediction.Data(**(vars(each) | {"logs": np.where(own, each.logs + 1.0, each.logs)}))
    before, after = held_out["gemmery"][0][asked], fit_prediction.cross_validate(changed)[0][asked]
    np.testing.assert_allclose((1 + after) * math.e, 1 + before, rtol=1e-9)


def test_folds_hold_whole_shapes():
    shapes = [(i % 37, 1, 1) for i in range(200)]
    fold = fit_prediction.fold_of(shapes, 5, seed=3)
    assert set(fold) == set(range(5))
    assert all(
        len({int(f) for f, s in zip(fold, shapes, strict=True) if s == shape}) == 1 for shape in shapes
    )


def test_the_shipped_constants_are_of_the_recorded_results():
    written = json.loads(calibration.path_of("NVIDIA H200").read_text())["sources"]
    now = fit_prediction.sources(RESULTS, H200)
    assert written == now, "results or tables have changed: run python benchmarks/fit_prediction.py"


@pytest.mark.slow
def test_errors_are_expected_to_be_as_large_as_they_are(data, held_out):
    known, _ = calibration.calibration_of(H200)
    for method, (errors, deviation) in held_out.items():
        rows = np.isfinite(errors)
        within = np.abs(errors[rows]) <= known.half[method] * deviation[rows]
        assert 0.4 < within.mean() < 0.6


def test_recorded_products_are_predicted_from_the_shipped_constants():
    rows = recorded.read_result(RESULTS / "square-bf16.json") + recorded.read_result(
        RESULTS / "odd-bf16.json"
    )
    found = [predict(row.problem) for row in rows]
    for method in calibration.METHODS:
        errors = [
            abs(getattr(p, method) / row.seconds[method] - 1) for p, row in zip(found, rows, strict=True)
        ]
        assert np.median(errors) < 0.05
    # And the config is the one that ran, though some do not fit that were ranked before it, and where tiles of any
    # width are predicted to be quicker now, others ran.
    same = [
        p.config == str(row.config) or Config.of(p.config).schedule in ("cooperative", "pingpong", "cluster")
        for p, row in zip(found, rows, strict=True)
    ]
    assert np.mean(same) > 0.75


def test_no_recorded_time_is_below_the_datasheets():
    """The roofline, below which no prediction goes, is a limit that nothing measured has passed."""
    for one in recorded.read_results(RESULTS):
        least = roofline(one.problem)
        assert all(one.seconds[method] > least for method in calibration.METHODS if method in one.seconds)


def _named(mine, theirs, measured_mine, measured_theirs):
    """How many rows have a winner by intervals, and how many of these a wrong one."""
    ours_wins, theirs_wins = mine[1] < theirs[0], theirs[1] < mine[0]
    wrong = (ours_wins & (measured_mine >= measured_theirs)) | (
        theirs_wins & (measured_mine <= measured_theirs)
    )
    return int((ours_wins | theirs_wins).sum()), int(wrong.sum())


@pytest.mark.slow
def test_winners_of_rows_that_were_left_out_are_right_as_often_as_is_said(data, held_out):
    known, _ = calibration.calibration_of(H200)
    ends, times = {}, {}
    for method, (errors, deviation) in held_out.items():
        rows = np.isfinite(errors)
        times[method] = np.exp(data[method].logs[rows])
        predicted, off = times[method] * (1 + errors[rows]), known.wide[method] * deviation[rows]
        ends[method] = predicted / (1 + off), predicted / (1 - off)
        inside = (ends[method][0] <= times[method]) & (times[method] <= ends[method][1])
        assert inside.mean() == pytest.approx(calibration.COVERAGE, abs=0.03)
    # Of the vendor's times those that stand beside one of ours.
    stands = np.array([not row.outdated for row in recorded.read_results(RESULTS)])
    ends["cublas"], times["cublas"] = [end[stands] for end in ends["cublas"]], times["cublas"][stands]
    named, wrong = _named(ends["gemmery"], ends["cublas"], times["gemmery"], times["cublas"])
    assert named > 100
    assert wrong <= (1 - calibration.COVERAGE) * named


@pytest.mark.slow
@pytest.mark.parametrize("step", [11, pytest.param(1, marks=pytest.mark.exhaustive)])
def test_winners_of_recorded_rows_are_not_named_wrongly(step):
    rows = [row for row in recorded.read_results(RESULTS) if set(calibration.METHODS) <= set(row.seconds)]
    named = wrong = 0
    for row in rows[::step]:
        winner = replace(predict(row.problem), recorded=None).winner
        quicker = min(calibration.METHODS, key=row.seconds.__getitem__)
        named += winner is not None
        wrong += winner not in (None, quicker)
    assert named > 100 / step
    assert wrong <= (1 - calibration.COVERAGE) * named


# --- what a prediction says -----------------------------------------------------------------------------------------

ASKED = [
    {},
    {"dtype": "fp16", "layout": "TN"},
    {"dtype": "tf32"},
    {"dtype": "fp32", "layout": "NN"},
    {"dtype": "fp64"},
    {"dtype": "int8"},
    {"dtype": "fp8"},
    {"dtype": "fp8fast"},
    {"batch": (8,)},
    {"bias": True},
    {"batch_invariant": True},
    {"weight": "int4"},
    {"weight": "nf4", "epilogue": "bias_gelu"},
    {"epilogue": "swiglu"},
    {"epilogue": "bias_residual"},
    {"dtype": "fp8fast", "scales": "row"},
    {"dtype": "fp8", "scales": "block"},
    {"dtype": "int8", "scales": "tensor"},
]


@pytest.mark.parametrize("asked", ASKED, ids=str)
def test_every_gpu_has_a_prediction(asked):
    for device in GPUS:
        problem = abstract_problem(512, 4096, 4096, device=device, **asked)
        found = predict(problem)
        lacks = found.gemmery is None
        assert lacks == (not found.cost) == (found.config == "torch reference") == (found.bound == "")
        assert lacks == any(
            x.dtype.itemsize == 1 and x.dtype.is_floating_point and x.dtype not in device.target.fp8
            for x in (problem.a, problem.b)
        )
        assert (found.cublas is None) == (not found.calls) == (not found.cublas_cost)
        for seconds, cost in ((found.gemmery, found.cost), (found.cublas, found.cublas_cost)):
            if seconds is not None:
                assert found.roofline * 0.9 < seconds < 1
                assert max(cost[name] for name in BINDING) < 1.5 * seconds
        if not lacks:
            assert found.bound in (*BINDING, "overhead")
            assert Config.of(found.config).block_m >= 16
        assert (found.measured_on is None) == (not found.expected_error) == (device is not H200)
        assert "NVIDIA H200" in found.basis
        assert json.loads(json.dumps(found.asdict()))["gemmery"] == found.gemmery


@given(
    st.integers(1, 20000), st.integers(1, 20000), st.integers(1, 20000), st.sampled_from(GPUS),
    st.sampled_from(["bf16", "fp32", "int8"]), st.sampled_from(["NN", "NT", "TN", "TT"]),
)  # fmt: skip
def test_any_size_has_a_prediction(m, n, k, device, dtype, layout):
    found = predict(abstract_problem(m, n, k, device=device, dtype=dtype, layout=layout))
    for seconds in (found.gemmery, found.cublas):
        assert seconds is None or (math.isfinite(seconds) and seconds > 1e-6)


SHAPES = [
    (1, 4096, 4096),
    (64, 8192, 8192),
    (4096, 4096, 64),
    (8192, 8192, 8192),
    (16384, 16384, 32),
    (300, 776, 5000),
]


@pytest.mark.sampled(5)
@pytest.mark.parametrize("device", GPUS, ids=lambda device: device.name)
@pytest.mark.parametrize("asked", ASKED, ids=str)
def test_no_prediction_beats_the_datasheet(device, asked):
    for m, n, k in SHAPES:
        if "batch" in asked and m * n > 1 << 26:
            continue
        if k % 32 and {"weight", "scales"} & set(asked):
            continue
        found = predict(abstract_problem(m, n, k, device=device, **asked))
        p = found.problem
        peak = device.rate(p.a.dtype, p.precision)
        for seconds, (low, high) in (
            (found.gemmery, found.interval.get("gemmery", (math.inf, math.inf))),
            (found.cublas, found.interval.get("cublas", (math.inf, math.inf))),
        ):
            for time in filter(None, (seconds, low)):
                assert p.flops / time <= peak * (1 + 1e-9)
                assert p.bytes / time <= device.bandwidth * (1 + 1e-9)
            assert seconds is None or (low == math.inf or low <= seconds <= high)


def test_a_vendors_product_with_a_packed_weight_reads_the_unpacked_one():
    for device in GPUS:
        found = predict(abstract_problem(1, 8192, 8192, device=device, weight="int4"))
        assert found.cublas >= 2 * 8192**2 / device.bandwidth


def test_what_was_measured_of_a_product_is_told():
    rows = recorded.read_result(RESULTS / "square-bf16.json")
    row = next(row for row in rows if row.shape == (4096, 4096, 4096))
    found = predict(row.problem)
    # The time that the tables show: of the round whose ratio is the median.
    shown = [
        one
        for path in RESULTS.glob("*.json")
        for one in results.read(path)["rows"]
        if one["M"] == one["K"] == 4096
    ]
    times = {one["summary"]["burst"]["us"]["gemmery"] for one in shown if "burst" in one["summary"]}
    assert any(found.recorded.seconds["gemmery"] == pytest.approx(us * 1e-6) for us in times)
    lines = describe(found).splitlines()
    assert "gemmery, measured" in lines[2]
    assert f"{found.recorded.seconds['gemmery'] * 1e6:.1f}" in lines[2]
    assert lines.index(next(x for x in lines if "gemmery, predicted" in x)) > 2
    assert found.asdict()["recorded"]["seconds"] == found.recorded.seconds
    # Nothing was recorded of a product that differs in anything, or elsewhere.
    for other in (abstract_problem(4096, 4096, 4104, device=H200), abstract_problem(4096, 4096, 4096, device=H200, layout="TT", dtype="fp64"),
                  abstract_problem(4096, 4096, 4096, device=devices.TABLE["NVIDIA H100"])):  # fmt: skip
        assert predict(other).recorded is None
        assert ", measured" not in describe(predict(other))
    # Nor of another kernel than the one that ran.
    assert predict(row.problem, "64x64x64-g8-w4-s3-tile-descriptor").recorded is None


def test_measured_times_decide_before_predicted_ones():
    found = predict(abstract_problem(4096, 4096, 4096, device=H200))
    for low, high, winner in ((1e-6, 2e-6, "gemmery"), (1.0, 2.0, "cublas"), (1e-6, 2.0, None)):
        measured = replace(found.recorded, spread={"gemmery": (low, high), "cublas": (1e-3, 2e-3)})
        assert replace(found, recorded=measured).winner == winner
        apart = {"gemmery": (low, high), "cublas": (1e-3, 2e-3)}
        assert replace(found, recorded=None, interval=apart).winner == winner
    assert replace(found, recorded=None, interval={}).winner is None


def test_gpus_that_were_not_measured_say_so_everywhere():
    for device in GPUS:
        found = predict(abstract_problem(512, 4096, 4096, device=device))
        said = [
            describe(found),
            json.dumps(found.asdict()),
            str(rooflines(device)),
            json.dumps(rooflines(device).asdict()),
        ]
        shown = [calibration.NOT_MEASURED in text for text in said]
        assert shown == [device is not H200] * len(said)
        assert found.asdict()["measured"] == (device is H200)
        assert device is H200 or found.winner is None
    assert "0.3 of the vendor's BLAS" in describe(
        predict(abstract_problem(512, 512, 512, device=devices.TABLE["AMD Instinct MI300X"]))
    )


def test_larger_products_take_longer():
    for device in (H200, devices.TABLE["NVIDIA A100"]):
        for rows in ((16, 4096, 16384), (256, 2048, 16384)):
            times = [predict(abstract_problem(m, 8192, 8192, device=device)) for m in rows]
            for method in calibration.METHODS:
                seconds = [getattr(found, method) for found in times]
                assert seconds == sorted(seconds)


def test_what_binds_is_what_should():
    large, thin = (predict(abstract_problem(m, 8192, 8192, device=H200)) for m in (8192, 8))
    assert (large.bound, thin.bound) == ("compute", "memory")
    assert predict(abstract_problem(64, 64, 64, device=H200)).bound == "overhead"
    assert large.room == pytest.approx(1 - large.roofline / large.gemmery)
    assert large.ratio == pytest.approx(large.cublas / large.gemmery)
    assert large.roofline == pytest.approx(2 * 8192**3 / H200.fp16)
    assert thin.roofline == pytest.approx(thin.problem.bytes / H200.bandwidth)


def test_a_config_can_be_given():
    problem = abstract_problem(4096, 4096, 4096, device=H200)
    best = predict(problem)
    other = predict(problem, "64x64x64-g8-w4-s3-tile-descriptor")
    assert other.config.startswith("64x64x64")
    assert other.gemmery > 1.3 * best.gemmery
    with pytest.raises(ValueError, match="not among those that are considered"):
        predict(problem, "16x16x16-g1-w1-s1-tile-pointer")


# --- gemmery's launches ---------------------------------------------------------------------------------------------


def row(name="x", M=4096, N=4096, K=4096, dtype="bf16", **more):
    return of_row(Row(name, M, N, K, **more), dtype, H200)


def test_tiles_that_leave_no_room_for_single_stores_are_passed_over():
    aligned, odd = ours.launch(row()), ours.launch(row(N=4097))
    assert aligned.config.block_m * aligned.config.block_n >= 128 * 256
    assert odd.config.block_m * odd.config.block_n < 128 * 256
    assert not ours.fits(row(N=4097), aligned.config)


def test_single_loads_and_stores_cost_something():
    def parts(**more):
        return ours.parts(ours.launch(row(M=16, **more), copied=False))

    plain = parts()
    assert plain["loads"] == plain["stores"] == plain["stores_apart"] == plain["copies"] == 0
    assert parts(b="col+step")["loads"] > parts(b="col+odd")["loads"] > 0
    assert parts(out="row+odd")["stores"] > 0
    assert parts(out="row+step")["stores_apart"] > parts(out="row+odd")["stores"]
    copied = ours.parts(ours.launch(row(a="row+odd"), copied=True))
    assert copied["copies"] == 1
    assert copied["copies_straight"] == pytest.approx(4 * 4096**2 / H200.bandwidth)


# --- the vendor's BLAS ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("made", "copied"),
    [
        (row(), ()),
        (row(a="row+pad", b="col+odd"), ()),
        (row(a="row+step"), ("a",)),
        (row(a="row+half"), ("a",)),
        (row(out="row+step"), ("out",)),
        (row(batch=(64,), M=512, N=512, K=64), ()),
        # Views of (B, S, H, D): matrices lie apart, so that batches can't be merged.
        (row(batch=(4, 32), M=512, N=512, K=64, a="x m y k", b="x n y k"), ("a", "b")),
        (row(batch=(4, 32), M=512, N=64, K=512, b="x k y n", out="x m y n"), ("b", "out")),
    ],
    ids=str,
)
def test_torch_copies_what_the_blas_does_not_take(made, copied):
    found = vendor.route(made)
    assert found.copied == copied
    assert bool(found.copies.launches) == bool(copied)
    parts = vendor.parts(found)
    assert (parts["copies_straight"] + parts["copies_turned"] > 0) == bool(copied)


class Kernels(TorchDispatchMode):
    """Counts operators that compute something."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.overloadpacket.__name__
        if name not in ("t", "split", "mm", "view", "_unsafe_view", "slice"):
            self.names.append(name)
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", FUSIONS)
def test_operators_behind_a_product_are_counted_as_torch_launches_them(name):
    fusion = FUSIONS[name]
    shapes = {"row": (8,), "matrix": (4, 8)}
    args = [torch.ones(shapes[x]) for x in fusion.operands]
    a, weight = torch.ones(4, 8), torch.ones(8, 8)
    with Kernels() as seen:
        in_torch(fusion.function)(a, weight, *args)
    found = vendor.route(abstract_problem(64, 256, 256, device=H200, epilogue=name))
    assert found.kernels == len(seen.names)
    least = 2 * 64 * found.problem.out_n * 2
    assert found.elementwise >= least * found.kernels


def test_what_torch_does_not_have_has_no_time():
    for device, asked in (
        (devices.TABLE["NVIDIA A100"], {"dtype": "fp8"}),
        (devices.TABLE["NVIDIA B200"], {"dtype": "fp8", "scales": "block"}),
        (H200, {"dtype": "int8", "batch": (4,)}),
        (H200, {"dtype": "fp8", "layout": "NN"}),
    ):
        assert predict(abstract_problem(64, 256, 256, device=device, **asked)).cublas is None
    assert predict(abstract_problem(16, 256, 256, device=H200, dtype="int8")).cublas is None
    assert predict(abstract_problem(17, 256, 256, device=H200, dtype="int8")).cublas is not None


def test_a_packed_weight_is_multiplied_unpacked_by_the_vendor():
    plain, packed = (
        predict(abstract_problem(64, 4096, 4096, device=H200, **how)) for how in ({}, {"weight": "int4"})
    )
    assert packed.cublas == pytest.approx(plain.cublas)
    assert packed.roofline < 0.5 * plain.roofline


@pytest.mark.parametrize(
    ("weight", "bits"), [("2:4", 9), ("2:4-int8", 5), ("2:4-e4m3", 5), ("2:4-int4", 3 + 16 / 128)]
)
def test_a_sparse_weight_is_multiplied_dense_by_the_vendor(weight, bits):
    plain, sparse = (
        predict(abstract_problem(M, 4096, 4096, device=H200, weight=w)) for M, w in ((64, ""), (64, weight))
    )
    assert sparse.cublas == pytest.approx(plain.cublas)
    assert sparse.calls == plain.calls
    read = 4096 * 4096 * (16 - bits) / 8 / H200.bandwidth
    assert plain.roofline - sparse.roofline == pytest.approx(read, rel=0.02)
    many = [predict(abstract_problem(8192, 4096, 4096, device=H200, weight=w)) for w in ("", weight)]
    assert many[1].roofline == pytest.approx(many[0].roofline / 2)


def test_sparse_weights_are_named_as_they_are_made():
    for name in SPARSE_WEIGHTS:
        problem = abstract_problem(16, 256, 256, device=H200, weight=name)
        assert problem.b.is_sparse
        assert problem.b.code == name.partition("-")[2]
    with pytest.raises(ValueError, match="group_size is 64; a weight 2:4 of 16 bits has no groups"):
        abstract_problem(16, 256, 256, device=H200, weight="2:4", group_size=64)
    with pytest.raises(ValueError, match=r"weight is '2:5'; it must be one of int4, .*, 2:4, 2:4-int8"):
        abstract_problem(16, 256, 256, device=H200, weight="2:5")


# --- the correction -------------------------------------------------------------------------------------------------


def test_a_correction_is_learnt_nearby_and_forgotten_far_away():
    prior = Prior(kind=0.0, words=0.0, local=0.2, reach=1.0, unlike=0.5, noise=0.01)
    known = Samples.of([([float(x), 0.0], ["half"]) for x in range(10)])
    correct = Correction(known, np.sin(np.arange(10) / 3) / 5, prior)
    asked = Samples.of([([4.5, 0.0], ["half"]), ([100.0, 0.0], ["half"]), ([4.5, 0.0], ["fp8"])])
    mean, deviation = correct(asked)
    assert mean[0] == pytest.approx(math.sin(1.5) / 5, abs=0.01)
    assert mean[1] == pytest.approx(0, abs=1e-6)
    assert 0.3 * mean[0] < mean[2] < 0.7 * mean[0]
    assert deviation[0] < 0.03 < deviation[2] < deviation[1] < 0.21


def test_products_of_a_kind_are_off_together():
    prior = Prior(kind=0.3, words=0.0, local=0.0, reach=1.0, unlike=0.5, noise=0.05)
    known = Samples.of([([0.0], ["fp8", str(i)]) for i in range(20)])
    mean, _ = Correction(known, np.full(20, 0.25), prior)(
        Samples.of([([50.0], ["fp8", "new"]), ([0.0], ["int8", "0"])])
    )
    assert mean[0] == pytest.approx(0.25, abs=0.01)
    assert mean[1] == 0


# --- problems that nobody has tensors of ----------------------------------------------------------------------------


def test_torch_has_mx_products_in_bf16():
    problem = abstract_problem(512, 4096, 4096, device=H200, dtype="fp8", scales="mx")
    found = vendor.route(problem)
    assert found is not None
    assert (found.kind, found.problem.a.dtype, found.problem.b.is_scaled) == ("half", torch.bfloat16, False)


def test_rows_of_all_suites_are_posed():
    for name in suites.whole():
        for one in suites.load(name):
            dtype = one.dtype or "bf16"
            problem = of_row(one, dtype, H200)
            assert (problem.K, problem.a.dtype) == (one.K, KINDS[dtype].dtype)
            assert problem.flops == one.flops
            assert problem.b.unpacks == bool(one.weight)
            assert problem.b.is_scaled == (one.scales in ("block", "mx"))


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"M": 0}, "M is 0"),
        ({"weight": "int3"}, "weight is 'int3'"),
        ({"epilogue": "sin"}, "epilogue is 'sin'"),
        ({"scales": "row"}, "operands of 8 bits"),
        ({"weight": "int4", "scales": "row"}, "contains scales"),
        ({"weight": "int4", "batch": (4,)}, "batch is not supported with"),
        ({"layout": "XY"}, "layout is 'XY'"),
    ],
    ids=str,
)
def test_what_can_not_be_asked(asked, said):
    with pytest.raises(ValueError, match=said):
        abstract_problem(**({"M": 64, "N": 64, "K": 64, "device": H200} | asked))


# --- the command ----------------------------------------------------------------------------------------------------


def test_the_command_says_it_all(tmp_path):
    path = tmp_path / "p.json"
    asked = ["predict", "16", "8192", "8192", "--weight", "int4", "--device", "h200", "--json", str(path)]
    done = CliRunner().invoke(app, asked)
    assert done.exit_code == 0, done.output
    found = json.loads(path.read_text())
    for text in (
        "gemmery", "cuBLAS", "roofline", found["config"], "room left", f"{found['gemmery'] * 1e6:.1f}",
        f"{found['cublas'] * 1e6:.1f}", f"{found['room']:.0%}", "measurements on an NVIDIA H200",
    ):  # fmt: skip
        assert text in done.output
    assert found["gemmery"] == predict(abstract_problem(16, 8192, 8192, device=H200, weight="int4")).gemmery


def test_the_command_on_a_gpu_that_was_not_measured():
    done = CliRunner().invoke(app, ["predict", "64", "4096", "4096", "--device", "MI300X", "--dtype", "fp16"])
    assert done.exit_code == 0, done.output
    assert "hipBLASLt" in done.output
    assert "has not been measured" in done.output
    assert "±" not in done.output


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["0", "1", "1"], "M is 0"),
        (["1", "1", "1", "--dtype", "bf17"], "bf17"),
        (["1", "1", "1", "--device", "H300"], "H300"),
        (["64", "64", "64", "--config", "nonsense"], "nonsense"),
    ],
)
def test_mistakes_are_told_in_a_line(words, said):
    done = CliRunner().invoke(app, ["predict", "--device", "H200", *words])
    assert done.exit_code == 2
    assert said in done.output
    assert "Traceback" not in done.output
