"""`gemmery order` and `gemmery indices`: numbers, text and pictures."""

import doctest
import importlib
import io
import itertools
import json
import re
import xml.etree.ElementTree as ET
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from rich.console import Console
from typer.testing import CliRunner

from gemmery import Config, devices, schedules
from gemmery.cli import app
from gemmery.lab import figures, order_pictures, orders
from gemmery.lab.l2 import simulate
from gemmery.lab.orders import compare, launch_of
from gemmery.launch.explain import explain
from gemmery.schedules.walk import Walk
from gemmery.select.shapes import problem_of

TUTORIAL = launch_of(144, 144, 144, tile=(16, 16, 16), group_size=3, device="H200")


@pytest.mark.parametrize("name", ["l2", "orders"])
def test_examples(name):
    result = doctest.testmod(importlib.import_module(f"gemmery.lab.{name}"))
    assert result.attempted > 0
    assert result.failed == 0


def run(*arguments, status=0):
    ran = CliRunner().invoke(app, [str(word) for word in arguments], env={"COLUMNS": "120"})
    assert ran.exit_code == status, ran.output
    return ran.output


# --- numbers ---------------------------------------------------------------------------------------------------------


def test_the_tutorials_nine_by_nine_blocks():
    """Of the Triton tutorial on matrix multiplication: 90 blocks for the first nine tiles row by row, 54 grouped."""
    row, grouped = compare(TUTORIAL, first=9).shown
    assert (row.first_blocks, grouped.first_blocks) == ((9, 81), (27, 27))
    assert sum(row.first_blocks) == 90
    assert sum(grouped.first_blocks) == 54
    assert (row.first_rows.tolist(), row.first_columns.tolist()) == ([0], list(range(9)))
    assert (grouped.first_rows.tolist(), grouped.first_columns.tolist()) == ([0, 1, 2], [0, 1, 2])


def test_the_default_is_the_config_that_gemmery_chooses():
    launch = launch_of(4096, 4096, 4096, device="3090")
    chosen = explain(4096, 4096, 4096, device="3090", top=1).choices[0].config
    assert launch.config == chosen
    assert launch.tile == (chosen.block_m, chosen.block_n, chosen.block_k)
    assert launch.group_size == chosen.group_m
    assert launch.l2 == 6 << 20
    assert isinstance(launch.schedule, Walk)
    other = launch_of(4096, 4096, 4096, device="3090", group_size=2, programs=7, l2_bytes=5)
    assert (other.group_size, other.programs, other.l2) == (2, 7, 5)


def test_the_table_is_of_the_simulation():
    launch = replace(TUTORIAL, programs=4, l2=2000)
    found = compare(launch, ("grouped",))
    assert [(order.name, order.group_size) for order in found.table] == [
        ("row", 1), ("grouped", 2), ("grouped", 3), ("grouped", 4), ("grouped", 8), ("column", 9),
    ]  # fmt: skip
    for order in found.table:
        expected = simulate(
            144,
            144,
            144,
            tile=(16, 16, 16),
            order=order.name,
            group_size=order.group_size,
            programs=4,
            l2=2000,
        )
        assert order.traffic == expected
    assert len({order.traffic.memory for order in found.table}) > 1


def test_conclusions():
    found = compare(replace(TUTORIAL, programs=9, l2=40 * 512))
    row, grouped = (order.traffic.memory for order in found.shown)
    assert grouped < row
    assert f"{row / grouped:.2f} times as much" in found.conclusion
    assert found.conclusion.startswith("in groups of 3, ")
    assert "their order changes nothing" in compare(TUTORIAL).conclusion
    assert "A and B once each" in compare(replace(TUTORIAL, programs=9)).conclusion


def test_a_chosen_group_that_reads_more_than_another_has_a_reason():
    found = compare(launch_of(4096, 4096, 4096, device="H200"))
    best = min(found.table, key=lambda order: order.traffic.memory)
    own = next(x for x in found.table if (x.name, x.group_size) == ("grouped", found.launch.group_size))
    assert own.traffic.memory > best.traffic.memory
    assert best.label in found.reason
    assert orders.amount(own.traffic.memory - best.traffic.memory) in found.reason
    assert found.asdict()["reason"] == found.reason
    # With room for all of A and B no order reads more, and a given tile was not chosen.
    assert compare(replace(found.launch, l2=1 << 30)).reason == ""
    assert compare(replace(found.launch, config=None)).reason == ""


def test_waves_of_the_simulation_are_turns_of_the_programs():
    """What is simulated in lock step are the tiles that persistent programs compute at the same time."""
    launch = launch_of(4096, 4096, 4096, device="H200")
    (order,) = compare(launch, ("grouped",)).shown
    units, (bm, bn, _) = launch.schedule, launch.tile
    assert launch.config.schedule == "persistent"
    full = np.bincount(units.turn[units.rows * units.cols == bm * bn])
    assert (full == launch.programs).any()
    for turn in np.flatnonzero(full == launch.programs):
        now = (units.turn == turn) & (units.rows * units.cols == bm * bn)
        seen = order.visits[turn * launch.programs : (turn + 1) * launch.programs]
        assert np.stack([units.row[now] // bm, units.col[now] // bn], 1).tolist() == seen.tolist()


@pytest.mark.parametrize(
    "sizes, config, said",
    [
        (
            (1024, 6144, 64), "128x256x64-g8-w8-s4-persistent-descriptor-t2",
            "the last 60 whole tiles are computed in 120 small tiles of 128×128; drawn whole",
        ),
        (
            (8192, 4100, 64), "128x256x64-g8-w8-s4-persistent-descriptor-t2",
            "the last 100 whole tiles and the 4 columns beyond whole tiles are computed in 264 small tiles of 128×128",
        ),
        ((64, 64, 4096), "64x64x64-g8-w4-s4-tile-pointer-k8", "K is cut into 8 parts"),
    ],
)  # fmt: skip
def test_what_is_left_out_is_said(sizes, config, said):
    problem = problem_of(*sizes, device=devices.TABLE["NVIDIA H200"])
    made = Config.of(config)
    (note,) = schedules.of(made.schedule).cuts(problem, made)
    assert said in note


def test_json_is_all_of_it():
    found = compare(launch_of(1000, 2000, 300, device="L4"), first=5)
    values = json.loads(json.dumps(found.asdict()))
    tiles = values["tiles"][0] * values["tiles"][1]
    for order, of_order in zip(found.shown, values["orders"], strict=True):
        assert of_order["visits"] == order.visits.tolist()
        assert len(of_order["visits"]) == tiles
        assert sum(of_order["wave_memory"]) == of_order["traffic"]["memory"]
        assert of_order["first"]["blocks"] == sum(order.first_blocks)
    schedule = values["schedule"]
    assert len(schedule["program"]) == tiles
    assert [*map(list, zip(schedule["row"], schedule["col"], strict=True))] == [
        [row * values["tile"][0], col * values["tile"][1]] for row, col in values["orders"][1]["visits"]
    ]


@pytest.mark.parametrize(
    "given, said",
    [
        ({"M": 0}, "M is 0"),
        ({"tile": (0, 1, 1)}, "tile is 0"),
        ({"group_size": 0}, "group_size is 0"),
        ({"M": 1 << 20, "N": 1 << 20, "tile": (16, 16, 16)}, "give a larger tile"),
        ({"device": "3090", "dtype": torch.float8_e4m3fn}, "torch reference"),
    ],
)
def test_what_is_wrong_is_said(given, said):
    sizes = [given.pop(name, 64) for name in "MNK"]
    with pytest.raises(ValueError, match=said):
        launch_of(*sizes, **given)


def test_wrong_orders_are_said():
    with pytest.raises(ValueError, match="must be one of row, column, grouped"):
        compare(TUTORIAL, ("spiral",))
    with pytest.raises(ValueError, match="first is 0"):
        compare(TUTORIAL, first=0)
    with pytest.raises(ValueError, match="no order"):
        compare(TUTORIAL, ())


def test_amounts():
    said = {
        0: "0 bytes",
        999: "999 bytes",
        1500: "1.50 kB",
        999_600: "1000 kB",
        122.4e6: "122 MB",
        27e6: "27.0 MB",
        2.31e9: "2.31 GB",
        12e12: "12000 GB",
    }
    assert {size: orders.amount(size) for size in said} == said


# --- text ------------------------------------------------------------------------------------------------------------


def test_text_has_the_numbers():
    console = Console(width=120, record=True, file=io.StringIO())
    orders.show(compare(TUTORIAL, first=9), console)
    said = console.export_text()
    assert re.search(r"row by row +│ +1 × 9 │ +9 × 9 │ +90 ", said)
    assert re.search(r"in groups of 3 +│ +3 × 9 │ +3 × 9 │ +54 ", said)
    assert " 0  3  6  9 12 15 18 21 24" in said
    assert "in groups of 3 ←" in said


# --- pictures --------------------------------------------------------------------------------------------------------


def test_names_of_pictures(tmp_path):
    figures.check_name(tmp_path / "a.PNG")
    with pytest.raises(ValueError, match=r"a.jpg: the name of a picture must end in .png or .svg"):
        figures.check_name(tmp_path / "a.jpg")
    with pytest.raises(ValueError, match=r"in .png, .svg, .gif or .html"):
        figures.check_name(tmp_path / "a", order_pictures.ENDINGS)
    with pytest.raises(OSError, match="there is no directory"):
        figures.check_name(tmp_path / "absent" / "a.png")


def texts(path):
    """All texts in an SVG."""
    return ["".join(node.itertext()) for node in ET.parse(path).iter("{http://www.w3.org/2000/svg}text")]


def test_a_saved_picture_is_what_its_name_says(tmp_path):
    with figures.figure(3, 2, "a title") as made:
        made.subplots().plot([1, 2], [3, 4], color=figures.COLOURS[0])
    for name in ("a.svg", "b.svg", "a.png"):
        figures.save(made, tmp_path / name)
    assert "a title" in texts(tmp_path / "a.svg")
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()
    assert Image.open(tmp_path / "a.png").size == (450, 300)


def test_style_ends_with_the_figure():
    import matplotlib as mpl

    before = mpl.rcParams["axes.spines.top"]
    with figures.figure(1, 1):
        assert mpl.rcParams["axes.spines.top"] is False
    assert mpl.rcParams["axes.spines.top"] == before


def test_ticks():
    assert figures.whole_ticks(1) == [0]
    assert figures.whole_ticks(9) == [0, 2, 4, 6, 8]
    assert figures.whole_ticks(64) == [0, 20, 40, 60]
    assert all(len(figures.whole_ticks(size)) <= 6 for size in range(1, 3000, 7))


def test_order_as_a_picture(tmp_path):
    order_pictures.draw(compare(TUTORIAL, first=9), tmp_path / "order.svg")
    said = texts(tmp_path / "order.svg")
    for text in (
        "the first 9 tiles read 90 blocks:",
        "the first 9 tiles read 54 blocks:",
        "27 of A and 27 of B",
    ):
        # In lines of the panel's width.
        assert text in " ".join(said), said
    # Every tile of both orders with its number, and the first ones again.
    assert all(said.count(str(n)) >= (4 if n < 9 else 2) for n in range(81))


@pytest.mark.parametrize("sizes", ((4096, 4096, 4096), (300, 7000, 512), (16384, 1024, 1024)))
def test_no_title_lies_over_another(sizes):
    launch = launch_of(*sizes, device="H200")
    made = order_pictures.picture(compare(launch))
    made.draw_without_rendering()
    axes = [x for part in made.subfigs for x in part.axes]
    said = [x._left_title for x in axes] + [
        x._suptitle for x in (made, *made.subfigs) if x._suptitle is not None
    ]
    boxes = [(x.get_text(), x.get_window_extent()) for x in said if x.get_text()]
    assert len(boxes) >= 6
    for (text, box), (other, its) in itertools.combinations(boxes, 2):
        assert not box.overlaps(its), (text, other)


def test_steps_of_an_animation_end_with_the_launch():
    for launch in (TUTORIAL, replace(TUTORIAL, programs=2), replace(TUTORIAL, programs=1)):
        steps = order_pictures.ends(launch)
        assert steps == sorted(set(steps))
        assert steps[-1] == 81
        assert len(steps) <= order_pictures.FRAMES
        assert launch.waves < 6 or all(step % launch.programs == 0 for step in steps[:-1])


def test_order_as_a_gif(tmp_path):
    found = compare(TUTORIAL)
    order_pictures.draw(found, tmp_path / "order.gif")
    film = Image.open(tmp_path / "order.gif")
    steps = order_pictures.ends(TUTORIAL)
    assert film.n_frames == len(steps) + 1

    def pink(frame):
        """Points of the colour of tiles that are computed now."""
        film.seek(frame)
        wanted = [int(order_pictures.NOW[place : place + 2], 16) for place in (1, 3, 5)]
        return int((np.abs(np.asarray(film.convert("RGB")).astype(int) - wanted).max(axis=2) < 12).sum())

    # As many tiles as the step has, in both orders; a few points are lost to the lines between them.
    counts = [pink(frame) for frame in range(film.n_frames)]
    assert counts[-1] < 0.05 * counts[0]
    np.testing.assert_allclose(counts[:-2], counts[0], rtol=0.05)
    assert counts[-2] < 0.7 * counts[0]


def test_order_as_a_page(tmp_path):
    found = compare(TUTORIAL, first=9)
    order_pictures.draw(found, tmp_path / "order.html")
    text = (tmp_path / "order.html").read_text(encoding="utf-8")
    assert not re.search(r"""(src|href)\s*=|https?:|@import|url\(""", text)  # it needs no other file
    (data,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', text)
    values = json.loads(data)
    assert values["orders"][0]["visits"] == found.shown[0].visits.tolist()
    assert values["table"][0]["label"] == "row by row"
    assert len(values["colours"]) == 64


# --- commands --------------------------------------------------------------------------------------------------------


def test_order_command(tmp_path):
    said = run(
        "order", 144, 144, 144, "--tile", "16x16x16", "--group-size", 3, "--first", 9, "--device", "H200",
        "--order", "row,grouped", "--json", tmp_path / "o.json", "--out", tmp_path / "o.png",
    )  # fmt: skip
    assert "9×9 tiles of 16×16" in said
    values = json.loads((tmp_path / "o.json").read_text())
    assert [order["first"]["blocks"] for order in values["orders"]] == [90, 54]
    assert Image.open(tmp_path / "o.png").width > 500


def test_order_command_on_every_gpu():
    for name in devices.TABLE:
        assert "read from memory" in run("order", 4096, 4096, 4096, "--device", name).replace("\n", " ")


def test_indices_command(tmp_path):
    said = run(
        "indices", 9, 7, 10, "--tile", "4x4x4", "--pid", 3, "--step", 2, "--layout", "NN", "--strides-b", "1,12",
        "--device", "H200", "--json", tmp_path / "i.json", "--out", tmp_path / "i.svg",
    )  # fmt: skip
    assert "C[0:4, 4:8]" in said
    values = json.loads((tmp_path / "i.json").read_text())
    assert values["blocks"]["B"]["offsets"][0] == [56, 68, 80, 92]
    assert values["blocks"]["B"]["mask"][1:3] == [[True, True, True, False], [False] * 4]
    assert {"92", "80"} <= set(texts(tmp_path / "i.svg"))


@pytest.mark.parametrize(
    "arguments, said",
    [
        (("order", 10, 10, 10, "--tile", "3x3"), "128x256x64"),
        (("order", 10, 10, 10, "--order", "spiral"), "row, column, grouped"),
        (("order", 10, 10, 10, "--out", "x.jpg"), "must end in"),
        (("order", 10, 10, 10, "--device", "nothing"), "device table"),
        (("indices", 10, 10, 10, "--tile", "4x4x4", "--pid", 99), "9 programs"),
        (("indices", 10, 10, 10, "--strides-a", "4;1"), "integers separated by commas"),
        (("indices", 10, 10, 10, "--out", "x.gif"), "must end in"),
        (("indices", 10, 10, 10, "--config", "nonsense"), "not of the form"),
    ],
)
def test_what_is_wrong_is_said_in_a_line(arguments, said):
    output = run(*arguments, status=2)
    assert said in re.sub(r"[│\s]+", " ", output)
    assert "Traceback" not in output


def test_the_page_of_the_package_is_there():
    assert Path(order_pictures.__file__).with_name("order.html").is_file()
