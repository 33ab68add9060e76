"""The lab's page: its answers against the model, its server, the exported file, the command."""

import base64
import dataclasses
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import urllib.request
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import parse_qs, urlencode

import numpy as np
import pytest
from starlette.testclient import TestClient
from typer.testing import CliRunner

from gemmery import Config, devices
from gemmery.cli import app as command_line
from gemmery.lab import l2, suites
from gemmery.lab.page import api, command, document, export, query, server, texts
from gemmery.lab.page.command import Request
from gemmery.lab.page.launched import Launch, order, traffic, waves
from gemmery.lab.page.query import NONE, Query, QueryError
from gemmery.lab.prediction import predict
from gemmery.lab.prediction.calibration import NOT_MEASURED
from gemmery.lab.tile_order import programs_at_once, visits, walk
from gemmery.launch import padding
from gemmery.launch.explain import explain_problem

ROOT = Path(__file__).resolve().parents[2]
SMALL = Query(M=16, N=4096, K=4096)


# --- what there is to choose -----------------------------------------------------------------------------------------


def test_every_gpu_of_the_table_but_the_interpreter_is_offered():
    offered = [choice["value"] for choice in api.options()["controls"]["gpu"]]
    assert offered == [name for name in devices.TABLE if name != "interpreter"]


def test_the_controls_offer_what_a_query_takes():
    controls = api.options()["controls"]
    for name, choices in controls.items():
        for choice in choices:
            try:
                found = Query.of({name: choice["value"]})
            except QueryError as error:
                raise AssertionError(f"{name} {choice['value']} is offered and refused") from error
            assert getattr(found, name) == choice["value"]
    assert {choice["value"] for choice in controls["dtype"]} == set(suites.DTYPES)
    assert {choice["value"] for choice in controls["weight"]} == {NONE, *suites.WEIGHTS}
    assert {choice["value"] for choice in controls["epilogue"]} == {NONE, *suites.EPILOGUES}
    assert Query.of({}).asdict() == api.options()["defaults"]


@pytest.mark.parametrize("n", [4097, 8191])
def test_all_parts_of_an_answer_are_of_one_config(n):
    """Also where the selector's first leaves no room for the output's rows, which begin anywhere."""
    query_ = Query(M=4096, N=n, K=4096)
    answer = api.product(query_)
    config = Config.of(answer["choice"]["config"])
    assert str(config) == predict(query_.problem()).config
    assert str(config) != answer["choice"]["candidates"][0]["config"]
    assert answer["choice"]["reasons"][0].startswith(
        f"the selector's first, {answer['choice']['candidates'][0]['config']}"
    )
    assert answer["waves"]["grid"] == f"{-(-4096 // config.block_m)} × {-(-n // config.block_n)}"


def test_presets_are_the_layers_of_the_suites():
    layers = {
        (f"{preset['model']} {layer['name']}", layer["N"], layer["K"])
        for preset in api.options()["presets"]
        for layer in preset["layers"]
    }
    rows = [*suites.load("llm"), *suites.load("decode")]
    assert layers == {(row.name.rsplit(" ", 1)[0], row.N, row.K) for row in rows}
    models = [preset["model"] for preset in api.options()["presets"]]
    assert {"Llama-3-8B", "Llama-3-70B", "Qwen3-8B", "Qwen3-32B", "DeepSeek-V3"} == set(models)


def test_a_slider_stops_at_evenly_spread_sizes():
    sizes = api.options()["sizes"]
    stops = sizes["stops"]
    assert (stops[0], stops[-1]) == (sizes["least"], sizes["most"]) == (1, query.MOST)
    assert {1 << power for power in range(19)} <= set(stops)
    assert all(1 < after / before <= 2 for before, after in itertools.pairwise(stops))


WRONG = [
    ({"M": "0"}, "M", "from 1 to 262144"),
    ({"N": "12.5"}, "N", "whole number"),
    ({"K": ""}, "K", "whole number"),
    ({"K": "²"}, "K", "whole number"),
    ({"M": "9" * 5000}, "M", "from 1 to 262144"),
    ({"gpu": "V100"}, "gpu", "one of NVIDIA A100"),
    ({"gpu": "RTX"}, "gpu", "part of a name"),
    ({"gpu": "interpreter"}, "gpu", "one of"),
    ({"dtype": "bf17"}, "dtype", "one of bf16"),
    ({"layout": "nt"}, "layout", "NN, NT, TN, TT"),
    ({"epilogue": "softmax"}, "epilogue", "bias_gelu"),
    ({"weight": "int3"}, "weight", "int4"),
    ({"weight": "int4", "dtype": "fp32"}, "weight", "bf16 or fp16"),
    ({"weight": "int4", "layout": "NN"}, "weight", "NT or TT"),
    ({"batch": "4"}, "batch", "there is no batch"),
]


@pytest.mark.parametrize(("given", "field", "words"), WRONG, ids=[str(given)[:40] for given, _, _ in WRONG])
def test_a_wrong_value_is_told_with_its_control(given, field, words):
    with pytest.raises(QueryError) as caught:
        Query.of(given)
    assert caught.value.field == field
    assert words in str(caught.value)


def test_what_does_not_go_together_is_told_with_its_control():
    with pytest.raises(QueryError, match="4095") as caught:
        api.product(Query(epilogue="swiglu", N=4095))
    assert caught.value.field == "epilogue"


def test_a_gpu_by_a_part_of_its_name():
    assert Query.of({"gpu": "h200"}) == Query()
    assert Query.of({"gpu": "4090"}).gpu == "NVIDIA GeForce RTX 4090"


# --- answers ---------------------------------------------------------------------------------------------------------

QUERIES = [
    Query(), SMALL, Query(gpu="NVIDIA A100", dtype="fp16", M=512, N=8192, K=28672),
    Query(gpu="AMD Instinct MI300X", dtype="fp64", M=1000, N=999, K=998, layout="TN"),
    Query(weight="int4", M=64, epilogue="swiglu"), Query(dtype="fp8", epilogue="bias_gelu", layout="TT"),
    Query(gpu="NVIDIA B200", dtype="int8", layout="NN", M=8192, epilogue="bias"), Query(dtype="tf32", M=4095, K=1),
    Query(M=1, N=1, K=1), Query(weight="e4m3", M=16, layout="TT", dtype="fp16"),
]  # fmt: skip


@pytest.mark.parametrize("asked", QUERIES, ids=str)
def test_times_and_config_are_the_models(asked):
    found, problem = api.product(asked), asked.problem()
    model, why = predict(problem), explain_problem(problem)
    for name in ("gemmery", "cublas", "roofline"):
        seconds = getattr(model, name)
        assert (found["times"][name] or {"value": None})["value"] == seconds
        if seconds is not None:
            assert found["times"][name]["text"] == texts.seconds(seconds)["text"]
            assert found["times"][name]["rate"]["value"] == pytest.approx(problem.flops / seconds)
    assert found["times"]["room"]["value"] == pytest.approx(1 - model.roofline / model.gemmery)
    assert found["choice"]["config"] == model.config == str(why.choices[0].config)
    assert found["choice"]["reasons"] == why.reasons
    assert [x["config"] for x in found["choice"]["candidates"]] == [str(x.config) for x in why.choices]
    assert found["query"] == asked.asdict()
    json.dumps(found, allow_nan=False)


def test_the_layout_reaches_the_problem():
    for weight, epilogue, letters in itertools.product(
        (NONE, "nf4"), (NONE, "bias_gelu"), ("NT", "TT", "NN", "TN")
    ):
        if weight != NONE and letters[1] == "N":
            continue
        p = Query(layout=letters, weight=weight, epilogue=epilogue).problem()
        assert (p.a.col == 1) == (letters[0] == "N")
        assert weight != NONE or (p.b.col == 1) == (letters[1] == "N")
        assert (not p.b.unpacks) == (weight == NONE)
        assert (p.fusion is None) == (weight == epilogue == NONE)


@pytest.mark.parametrize("gpu", query.GPUS)
def test_every_gpu_and_type_has_an_answer(gpu):
    for dtype in suites.DTYPES:
        found = api.product(Query(gpu=gpu, dtype=dtype, M=300, N=1024, K=512))
        runs = found["choice"]["config"] is not None
        assert (found["times"]["gemmery"] is not None) == runs
        assert (
            (found["waves"] is None) == (found["order"] is None) == (found["traffic"] is None) == (not runs)
        )
        assert runs or "reference" in found["missing"]
        assert found["vendor"] == ("hipBLASLt" if gpu.startswith("AMD") else "cuBLAS")


@pytest.mark.parametrize("weight", query.suites.WEIGHTS)
def test_every_weight_with_every_epilogue_has_an_answer(weight):
    for epilogue in query.EPILOGUES:
        found = api.product(Query(M=64, N=4096, weight=weight, epilogue=epilogue))
        assert found["times"]["gemmery"]["value"] > 0
        # A packed weight is smaller than 8 bits and a half for each of its numbers.
        assert found["traffic"]["levels"][-1]["bytes"]["value"] < 4096 * 4096 * 1.07 + 64 * 4096 * 2


def test_what_a_gpu_lacks_is_said():
    assert "no TF32" in api.product(Query(gpu="AMD Radeon RX 7900 XTX", dtype="tf32"))["notes"][0]
    assert api.product(Query(dtype="tf32"))["notes"] == []
    found = api.product(Query(gpu="NVIDIA A100", dtype="fp8"))
    assert "torch reference" in found["choice"]["reasons"][0]
    assert found["times"]["roofline"]["value"] > 0


def test_too_many_tiles_are_not_looked_at():
    found = api.product(Query(M=query.MOST, N=query.MOST, K=64))
    assert found["waves"] is found["order"] is found["traffic"] is None
    assert "tiles" in found["missing"]
    assert found["times"]["gemmery"]["value"] > 0


def test_the_roofline_plot():
    found, problem = api.product(Query(dtype="fp16"))["roofline"], Query(dtype="fp16").problem()
    h200 = devices.TABLE["NVIDIA H200"]
    start, ridge, end = found["roof"]
    assert ridge == [pytest.approx(h200.fp16 / h200.bandwidth), h200.fp16]
    assert start[1] == pytest.approx(start[0] * h200.bandwidth)
    assert end == [found["x"]["to"], h200.fp16]
    assert found["intensity"]["value"] == pytest.approx(problem.flops / problem.bytes)
    for axis, values in (
        ("x", [found["intensity"]["value"], start[0]]),
        (
            "y",
            [point["rate"]["value"] for point in found["points"]] + [start[1], found["attainable"]["value"]],
        ),
    ):
        assert all(found[axis]["from"] <= value <= found[axis]["to"] for value in values)
        assert [tick["value"] for tick in found[axis]["ticks"]][:: len(found[axis]["ticks"]) - 1] == [
            found[axis]["from"], found[axis]["to"],
        ]  # fmt: skip
    assert "arithmetic is the limit" in found["text"]
    assert "memory is the limit" in api.product(SMALL)["roofline"]["text"]


def test_the_cards_do_not_contradict_each_other():
    """The headline says what the kernel waits for; the roofline, where the datasheet's limit is another, says both."""
    differ = 0
    for gpu in ("AMD Instinct MI300X", "NVIDIA H200", "NVIDIA GeForce RTX 4090"):
        for M in (16, 64, 256, 4096):
            query = Query(gpu=gpu, M=M, N=4096, K=4096, weight="int4")
            found, why = api.product(query), predict(query.problem())
            limit = {"compute": "arithmetic", "memory": "memory"}[why.limit]
            text = found["roofline"]["text"]
            assert f"{limit} is the limit" in text
            bound = found["times"]["bound"]
            assert (
                (why.bound == why.limit)
                == ("but this kernel is" not in text)
                == ("perfect kernel" not in bound)
            )
            if why.bound != why.limit:
                differ += 1
                assert bound.split(",")[0] in text
                assert f"by {limit}" in bound
    assert differ


def test_the_page_marks_gpus_that_were_not_measured():
    other, known = (api.product(Query(gpu=gpu)) for gpu in ("AMD Instinct MI300X", "NVIDIA H200"))
    assert other["times"]["mark"] == other["roofline"]["mark"] == other["summary"][0]["text"] == NOT_MEASURED
    assert known["times"]["mark"] == known["roofline"]["mark"] == ""
    assert "0.3 of the vendor's BLAS" in other["times"]["basis"]
    assert NOT_MEASURED not in json.dumps(known)


# --- waves, order, traffic -------------------------------------------------------------------------------------------


def launch(M, N, K, config, **fields):
    problem = Query(M=M, N=N, K=K, **fields).problem()
    return Launch(padding.launched(problem), config)


TILE = Config(128, 128, 64, num_warps=8)


def test_waves_by_hand():
    # 100 tiles for 132 multiprocessors; 8 of 1000 columns hang over.
    found = waves(launch(1280, 1272, 512, TILE))
    assert found["text"] == "One of 100 of 132"
    assert found["tiles"] == {"value": 100, "text": "100"}
    assert found["busy"]["value"] == pytest.approx(100 / 132)
    assert found["inside"]["value"] == pytest.approx(1272 / 1280)
    # 16 × 16 tiles: a full wave and one of 124.
    found = waves(launch(2048, 2048, 512, TILE))
    assert found["text"] == "1 full wave and one of 124 of 132"
    assert [(run["waves"], run["filled"], run["length"]) for run in found["runs"]] == [
        (1, 1, 0.5),
        (1, 124 / 132, 0.5),
    ]
    assert found["busy"]["value"] == pytest.approx(256 / 264)


def test_waves_of_tiles_that_are_cut():
    # 4 tiles, each cut along K into 16 parts.
    found = waves(launch(256, 256, 8192, dataclasses.replace(TILE, split_k=16)))
    assert found["text"] == "One of 64 of 132"
    assert "64 pieces" in found["grid"]
    # 16 × 34 tiles: four waves, and 16 tiles beyond them that are cut into four parts each.
    tail = Config(128, 256, 64, num_warps=8, num_stages=4, schedule="persistent", loader="descriptor", tail=4)
    found = waves(launch(2048, 8704, 512, tail))
    assert found["text"] == "4 full waves and one of 64 of 132"
    assert "592 pieces" in found["grid"]
    assert [run["length"] for run in found["runs"]] == [pytest.approx(4 / 4.25), pytest.approx(0.25 / 4.25)]
    assert found["busy"]["value"] == pytest.approx(544 / (4.25 * 132))


@pytest.mark.parametrize("asked", QUERIES, ids=str)
def test_waves_lose_no_work(asked):
    found = api.product(asked)["waves"]
    made = Launch(padding.launched(asked.problem()), Config.of(api.product(asked)["choice"]["config"]))
    schedule = walk(made.problem, made.config)
    work = (schedule.rows * schedule.cols * (schedule.last_k - schedule.first_k)).astype(float)
    assert found["inside"]["value"] == pytest.approx(asked.M * asked.N * asked.K / work.sum())
    sms = made.problem.device.sms
    busiest = np.bincount(schedule.program % sms, work).max()
    # No multiprocessor computes longer than all waves together.
    assert found["busy"]["value"] <= work.sum() / busiest / sms + 1e-9
    assert sum(run["length"] for run in found["runs"]) == pytest.approx(1)


def test_the_film_shows_the_order_that_the_kernel_visits_tiles_in():
    config = dataclasses.replace(TILE, group_m=4)
    made = launch(2048, 3072, 512, config)
    found = order(made)
    assert (found["rows"], found["columns"], found["tiles"]) == (16, 24, 384)
    plain, own = found["orders"]
    assert plain["visits"] == list(range(384))
    assert own["visits"] == [row * 24 + column for row, column in visits(16, 24, "grouped", 4).tolist()]
    assert own["visits"][:5] == [0, 24, 48, 72, 1]
    for way, group in ((plain, 1), (own, 4)):
        seen = l2.simulate(
            2048, 3072, 512, tile=(128, 128, 64), order="grouped", group_size=group,
            programs=programs_at_once(made.problem, config), l2=made.problem.device.l2,
        )  # fmt: skip
        assert (
            f"hit rate {texts.part(seen.hit_rate)['text']}, {texts.size(seen.memory)['text']} from"
            in way["hits"]
        )
        assert len(way["waves"]) == -(-384 // found["programs"])
        now = np.array(way["visits"][: found["programs"]])
        rows, columns = len(set((now // 24).tolist())), len(set((now % 24).tolist()))
        assert f"{texts.count(rows, 'row')} of A and {texts.count(columns, 'column')} of B" in way["waves"][0]


def test_a_long_film_is_cut():
    found = order(launch(16384, 16384, 64, Config(64, 128, 64)))
    assert found["tiles"] < 256 * 128
    assert found["tiles"] % found["programs"] == 0
    assert len(found["orders"][0]["visits"]) == found["tiles"]
    assert "the first" in found["where"]


def test_traffic_by_hand():
    made = launch(1024, 2048, 512, TILE)
    used, asked, read, least = (level["bytes"]["value"] for level in traffic(made)["levels"])
    assert used == 1024 * 2048 * 512 * 2 * 2
    assert asked == 8 * 16 * (128 + 128) * 512 * 2
    assert least == (1024 + 2048) * 512 * 2
    assert least <= read <= asked
    packed = traffic(launch(64, 4096, 4096, TILE, weight="int4"))["levels"]
    # Half a byte and a scale of two bytes for each 128 of the weight's numbers.
    assert packed[-1]["bytes"]["value"] == 64 * 4096 * 2 + 4096 * 4096 // 2 + 4096 * 32 * 2


# --- the server ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def client():
    with TestClient(server.app) as made:
        yield made


def test_the_page_has_all_its_parts(client):
    page = client.get("/")
    assert page.status_code == 200
    assert page.headers["content-type"].startswith("text/html")
    imports = json.loads(re.search(r'<script type="importmap">(.*?)</script>', page.text)[1])["imports"]
    assert len(imports) == len(document.modules()) > 5
    for name, address in imports.items():
        got = client.get(address)
        assert got.status_code == 200
        assert "javascript" in got.headers["content-type"]
        assert set(re.findall(r'from "(.*?)"', got.text)) <= set(imports), name
    assert client.get("/static/style.css").status_code == 200
    assert client.get("/static/../api.py").status_code == 404


def test_the_server_answers_as_the_functions_do(client):
    assert client.get("/api/options").json() == json.loads(json.dumps(api.options()))
    got = client.get("/api/product", params={"M": "16", "N": "4096", "gpu": "h200"})
    assert got.status_code == 200
    assert got.json() == json.loads(json.dumps(api.product(SMALL)))
    assert got.headers["cache-control"] == "no-store"


@pytest.mark.parametrize("given", [{"M": "0"}, {"weight": "int4", "layout": "NN"}, {"colour": "red"}])
def test_the_server_refuses(client, given):
    got = client.get("/api/product", params=given)
    assert got.status_code == 400
    assert got.json()["error"]["field"] in given
    assert got.json()["error"]["message"]


def test_the_server_keeps_answers(client):
    params = {"M": "48", "N": "1024", "K": "1024"}
    client.get("/api/product", params=params)
    before = server._body.cache_info().hits
    client.get("/api/product", params=params)
    assert server._body.cache_info().hits == before + 1


# --- the exported file -----------------------------------------------------------------------------------------------


class _Elements(HTMLParser):
    def __init__(self):
        super().__init__()
        self.addresses, self.texts, self._open = [], {}, None

    def handle_starttag(self, tag, attrs):
        given = dict(attrs)
        self.addresses += [given[name] for name in ("src", "href", "action", "data") if name in given]
        self._open = given.get("id") or given.get("type") or tag
        self.texts.setdefault(self._open, "")

    def handle_endtag(self, tag):
        self._open = None

    def handle_data(self, data):
        if self._open is not None:
            self.texts[self._open] += data


@pytest.fixture(scope="module")
def exported():
    return export.page(
        [(16, 4096, 4096), (512, 4096, 4096)],
        {"gpu": ["h200", "A100"], "weight": ["none", "int4"], "dtype": ["bf16", "fp32"]},
    )


def test_the_file_loads_nothing(exported):
    seen = _Elements()
    seen.feed(exported)
    assert all(address.startswith(("data:", "#")) for address in seen.addresses)
    imports = json.loads(seen.texts["importmap"])["imports"]
    for name, address in imports.items():
        kind, code = address.split(",", 1)
        assert kind == "data:text/javascript;base64"
        text = base64.b64decode(code).decode()
        assert text == (document.STATIC / f"{name.removeprefix('lab/')}.js").read_text()
        assert set(re.findall(r'from "(.*?)"', text)) <= set(imports)
        assert re.findall(r"https?://[^\s\"']*", text) in ([], ["http://www.w3.org/2000/svg"])
    assert "url(" not in seen.texts["style"]
    assert "@import" not in seen.texts["style"]


def test_the_file_has_every_product(exported):
    seen = _Elements()
    seen.feed(exported)
    data = json.loads(seen.texts["answers"])
    given = [dict(zip(q, (v[0] for v in q.values()), strict=True)) for q in map(parse_qs, data["answers"])]
    assert len(given) == 2 * 2 * 2 * 2
    assert {(q["M"], q["N"], q["K"]) for q in given} == {("16", "4096", "4096"), ("512", "4096", "4096")}
    for q, answer in zip(given, data["answers"].values(), strict=True):
        if q["weight"] == "int4" and q["dtype"] == "fp32":
            assert answer["error"]["field"] == "weight"
        else:
            assert answer == json.loads(json.dumps(api.product(Query.of(q))))
    options = data["options"]
    assert {name: [x["value"] for x in choices] for name, choices in options["controls"].items()} == {
        "gpu": ["NVIDIA H200", "NVIDIA A100"], "dtype": ["bf16", "fp32"], "layout": ["NT"], "epilogue": ["none"],
        "weight": ["none", "int4"],
    }  # fmt: skip
    assert urlencode(options["defaults"]) in data["answers"]
    assert [(x["M"], x["N"], x["K"]) for x in options["shapes"]] == [
        ("16", "4096", "4096"),
        ("512", "4096", "4096"),
    ]


def test_no_text_ends_the_element_that_it_is_in():
    seen = _Elements()
    seen.feed(document.whole({"said": "</script><!-- <b>"}))
    assert json.loads(seen.texts["answers"]) == {"said": "</script><!-- <b>"}


def test_a_file_has_the_suites_shapes_by_default():
    assert set(export.shapes()) == {(r.M, r.N, r.K) for name in ("llm", "decode") for r in suites.load(name)}


@pytest.mark.parametrize(
    ("sizes", "choices", "words"),
    [
        ([(0, 1, 1)], {}, "M is 0"),
        ([(1, 1, 1)], {"gpu": ["V100"]}, "V100"),
        ([(1, 1, 1)], {"weight": ["int4"], "dtype": ["fp32"]}, "bf16 or fp16"),
        ([(M, 1, 1) for M in range(1, 502)], {"dtype": ["bf16", "fp16"]}, "1002 products"),
    ],
)
def test_what_can_not_be_exported(sizes, choices, words):
    with pytest.raises(QueryError, match=words):
        export.page(sizes, choices)


# --- the command -----------------------------------------------------------------------------------------------------


def run(*arguments):
    return CliRunner().invoke(command_line, ["lab", *arguments])


def test_the_command_writes_an_answer(tmp_path):
    path = tmp_path / "answer.json"
    ran = run("--json", str(path), "--shapes", "16x4096x4096", "--gpu", "A100", "--weight", "int4")
    assert ran.exit_code == 0, ran.output
    wanted = api.product(Query(gpu="NVIDIA A100", M=16, N=4096, K=4096, weight="int4"))
    assert json.loads(path.read_text()) == json.loads(json.dumps(wanted))


def test_the_command_exports(tmp_path):
    path = tmp_path / "page.html"
    ran = run("--export", str(path), "--shapes", "16x4096x4096,64x4096x4096", "--dtype", "fp16")
    assert ran.exit_code == 0, ran.output
    assert str(path) in ran.output.replace("\n", "")
    assert path.read_text() == export.page([(16, 4096, 4096), (64, 4096, 4096)], {"dtype": ["fp16"]})


MISTAKES = [
    (["--json", "answer.json", "--shapes", "1x2x3,4x5x6"], "one product"),
    (["--json", "answer.json", "--dtype", "bf16,fp16"], "one product"),
    (["--json", "answer.json", "--shapes", "1x2"], "MxNxK"),
    (["--json", "answer.json", "--shapes", "8x1x2x3"], "MxNxK"),
    (["--gpu", "V100"], "V100"),
    (["--export", "absent/page.html"], "there is no directory"),
    (["--host", "192.0.2.1", "--no-open"], "nothing can be served at 192.0.2.1"),
]


@pytest.mark.parametrize(("arguments", "words"), MISTAKES, ids=[" ".join(a) for a, _ in MISTAKES])
def test_mistakes_are_told_in_a_line(arguments, words, monkeypatch, tmp_path):
    monkeypatch.setenv("COLUMNS", "300")
    monkeypatch.chdir(tmp_path)
    ran = run(*arguments)
    assert ran.exit_code == 2
    assert words in ran.output
    assert "Traceback" not in ran.output
    assert not list(tmp_path.iterdir())


def test_without_the_servers_libraries_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    ran = run("--no-open")
    assert ran.exit_code != 0
    assert "pip install 'gemmery[lab]'" in str(ran.exception)


def test_the_page_opens_with_what_was_asked_for():
    request = Request({"gpu": ["a100", "H200"], "dtype": []}, ["16x32x64", "1x1x1"])
    assert request.first() == Query(gpu="NVIDIA A100", M=16, N=32, K=64)


def test_the_page_opens_with_the_gpu_at_hand(monkeypatch):
    monkeypatch.setattr(command, "gpu_here", lambda: devices.TABLE["NVIDIA L40S"])
    assert Request({}).first() == Query(gpu="NVIDIA L40S")
    assert Request({"gpu": ["H200"]}).first() == Query()
    unknown = dataclasses.replace(devices.TABLE["NVIDIA L40S"], name="NVIDIA L40")
    monkeypatch.setattr(command, "gpu_here", lambda: unknown)
    assert Request({}).first() == Query()


@pytest.mark.slow
def test_the_command_serves_until_it_is_interrupted():
    paths = os.pathsep.join(filter(None, (str(ROOT / "src"), os.environ.get("PYTHONPATH"))))
    words = ["lab", "--no-open", "--port", "0", "--shapes", "16x4096x4096"]
    ran = subprocess.Popen(
        [sys.executable, "-m", "gemmery", *words], cwd=ROOT, env=os.environ | {"PYTHONPATH": paths},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        address = re.search(r"http://127\.0\.0\.1:\d+/\S*", ran.stdout.readline())[0]
        assert Query.of({k: v[0] for k, v in parse_qs(address.split("?")[1]).items()}) == SMALL
        with urllib.request.urlopen(address, timeout=20) as page:
            assert b"gemmery" in page.read()
    finally:
        ran.send_signal(signal.SIGINT)
        said, errors = ran.communicate(timeout=20)
    assert ran.returncode == 0, errors
    assert "Traceback" not in said + errors
