"""The script that makes shipped tables: what it takes of exported timings, and that the selector reads the result."""

import importlib.util
import json
from pathlib import Path

import numpy as np
import pytest
import torch

from gemmery import Config, devices
from gemmery.lab import suites
from gemmery.lab.abstract import abstract_problem
from gemmery.schedules.specialized import SPECIALIZED
from gemmery.select import measured, rank
from gemmery.select.keys import to_dict

ROOT = Path(__file__).resolve().parents[2]
H200 = devices.TABLE["NVIDIA H200"]


@pytest.fixture
def script():
    spec = importlib.util.spec_from_file_location("measured_table", ROOT / "benchmarks" / "measured_table.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def exported(entries, device="NVIDIA H200 (132 SMs)"):
    return {
        "gemmery timings": 1,
        "sets": [{"device": device, "triton": "3.6.0", "source": "x", "problems": entries}],
    }


def entry(problem, **microseconds):
    configs = {text: {"seconds": us and us * 1e-6, "measured": 1} for text, us in microseconds.items()}
    return {"problem": to_dict(problem), "configs": configs}


TILES = "128x192x64-g8-w8-s5-tile-descriptor", "64x320x64-g8-w4-s4-tile-descriptor"


def test_the_last_file_has_the_last_word(tmp_path):
    """Of a shape and a config; what it does not say stands as it was."""
    first, second = TILES

    def write(name, shapes, lines, configs=TILES):
        data = {"shapes": shapes, "configs": list(configs), "microseconds": lines}
        path = tmp_path / name
        path.write_text(json.dumps(data))
        return path

    own, other = [1, 64, 512, 256], [1, 128, 512, 256]
    paths = (
        write("a.json", [own, other], [[10.0, 20.0], [30.0, None]]),
        write("b.json", [own], [[None, 5.0]]),
        write("c.json", [other], [[7.0]], (second,)),
    )
    both = measured.Table.read(paths[0], H200, torch.bfloat16, *paths[1:])
    want = measured.Table.read(
        write("d.json", [own, other], [[10.0, 5.0], [30.0, 7.0]]), H200, torch.bfloat16
    )
    for name in ("places", "known", "residuals"):
        assert np.array_equal(getattr(both, name), getattr(want, name)), name
    columns = [both.column[Config.of(text)] for text in (first, second)]
    assert both.known[:, columns].tolist() == [[1, 1], [1, 1]]


def test_plain_products_become_a_table_that_is_read(script, tmp_path):
    plain = [
        measured._problem(shape, H200, torch.bfloat16, "half")
        for shape in ([1, 64, 512, 256], [3, 40, 512, 256])
    ]
    other = measured._problem([1, 64, 512, 256], H200, torch.float16, "half")
    first, second = TILES
    data = exported(
        [
            entry(plain[0], **{first: 12.5, second: 11.0}),
            entry(plain[1], **{first: 20.0, second: None}),
            entry(other, **{first: 1.0}),
        ]
    )
    file = tmp_path / "timings.json"
    file.write_text(json.dumps(data))
    assert script.main([str(file), "--device", "NVIDIA H200", "--out", str(tmp_path)]) == 0
    made = tmp_path / "nvidia-h200-half.json"
    read = json.loads(made.read_text())
    assert read["shapes"] == [[1, 64, 512, 256], [3, 40, 512, 256]]
    assert read["configs"] == sorted(TILES)
    assert read["microseconds"] == [[12.5, 11.0], [20.0, None]]
    table = measured.Table.read(made, H200, torch.bfloat16)
    assert table.known.sum() == 3
    assert np.isfinite(table.residuals).all()


def test_random_products_come_into_no_table(script, tmp_path, capsys):
    held_out = sorted(suites.held_out())
    random = [
        entry(measured._problem([1, *size], H200, torch.bfloat16, "half"), **{TILES[0]: 1.0})
        for size in held_out
    ]
    file = tmp_path / "timings.json"
    file.write_text(json.dumps(exported(random)))
    options = [str(file), "--device", "NVIDIA H200", "--out", str(tmp_path)]
    assert script.main(options) == 2
    assert "no plain bf16 products" in capsys.readouterr().err
    other = measured._problem([1, 64, 512, 256], H200, torch.bfloat16, "half")
    file.write_text(json.dumps(exported([*random, entry(other, **{TILES[0]: 1.0})])))
    assert script.main(options) == 0
    assert json.loads((tmp_path / "nvidia-h200-half.json").read_text())["shapes"] == [[1, 64, 512, 256]]


def test_shipped_tables_of_plain_products_have_no_random_ones():
    tables = [path for path in measured.TABLES.glob("*.json") if "packed" not in path.name]
    assert tables
    for path in tables:
        shapes = {tuple(shape[1:]) for shape in json.loads(path.read_text())["shapes"]}
        assert not shapes & suites.held_out(), path.name


@pytest.mark.parametrize(
    ("file", "rows"),
    [
        ("any_width_times-bf16", "rows"),
        ("any_width_bands-bf16", "heights"),
        ("any_width_packed-bf16", "fit"),
        ("any_width_pieces-bf16", "fit"),
        ("any_width_kinds-mixed", "rows"),
        ("any_width_epilogues-bf16", "rows"),
        ("packed_long_steps-bf16-triton3.9", "rows"),
        ("random_seed608-mixed-triton3.9", "rows"),
        ("random_seed611-mixed-triton3.9", "rows"),
    ],
)
def test_what_the_model_is_fitted_to_has_no_random_ones(file, rows):
    found = json.loads((ROOT / f"benchmarks/results/looks/{file}.json").read_text())[rows]
    assert found
    assert not {(row["M"], row["N"], row["K"]) for row in found} & suites.held_out()


def test_nothing_that_belongs_there(script, tmp_path, capsys):
    file = tmp_path / "timings.json"
    file.write_text(json.dumps(exported([], "NVIDIA A100 (108 SMs)")))
    assert script.main([str(file), "--device", "NVIDIA H200", "--out", str(tmp_path)]) == 2
    assert "no plain bf16 products" in capsys.readouterr().err


@pytest.mark.sampled(4)
@pytest.mark.parametrize("format", measured.PACKED)
def test_few_rows_of_a_packed_weight_take_few_rows_of_tiles(format):
    """Also between the numbers of rows that were timed, and where tiles of more rows were not."""
    for M in (1, 2, 5, 8, 13, 16, 20, 32, 50, 64):
        for N, K in ((8192, 8192), (14336, 4096), (4096, 14336), (6144, 4096)):
            config = rank(abstract_problem(M, N, K, device=H200, weight=format))[0][0]
            rows = max(16, 1 << (M - 1).bit_length())
            # Not every width of a packed weight's tiles has a kernel, so it may be one of the next two.
            if config.schedule in ("cooperative", "pingpong", "cluster"):
                rows += 32
            assert config.block_m <= rows, (M, N, K, str(config))


@pytest.mark.slow
@pytest.mark.sampled(4)
@pytest.mark.parametrize("format", measured.PACKED)
def test_what_was_timed_decides_where_it_was(format):
    """Not what was not: a model that is too hopeful of such a tile must not have the say."""
    times = {}
    for suffix in ("", *SPECIALIZED.own_tables()):
        data = json.loads(
            (measured.TABLES / measured.file_name(H200.name, f"packed {format}", suffix)).read_text()
        )
        for shape, line in zip(map(tuple, data["shapes"]), data["microseconds"], strict=True):
            found = {Config.of(c): t for c, t in zip(data["configs"], line, strict=True) if t is not None}
            times[shape] = times.get(shape, {}) | found
    for shape, found in times.items():
        _, M, N, K = shape
        config = rank(abstract_problem(M, N, K, device=H200, weight=format))[0][0]
        # Some tables have shapes that others have not.
        if config in found or any(other.schedule == config.schedule for other in found):
            assert found.get(config, np.inf) <= 1.1 * min(found.values()), (shape, str(config))


def test_shipped_tables_are_what_the_script_writes(script):
    for path in measured.TABLES.glob("*.json"):
        data = json.loads(path.read_text())
        assert {"about", "device", "triton", "shapes", "configs", "microseconds"} <= set(data)
        assert data["device"] in devices.TABLE
        assert len(data["microseconds"]) == len(data["shapes"])
        assert all(len(row) == len(data["configs"]) for row in data["microseconds"])
