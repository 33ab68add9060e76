"""The lab's page as a user meets it: by keyboard, on a phone, in the dark, shared, exported."""

import re

import pytest
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys

from gemmery.lab.page import api, export, texts
from gemmery.lab.page.query import Query, presets, stops
from gemmery.lab.prediction import predict
from tests.browser.lab import wanted


def check(lab, query):
    """Every number on the page is what Python says of a product."""
    shown = lab.texts()
    for name, text in wanted(query).items():
        assert shown[name] == text, name
    model = predict(query.problem())
    assert shown["gemmery-headline"] == texts.seconds(model.gemmery)["text"]
    assert shown["room"] == texts.part(1 - model.roofline / model.gemmery)["text"]
    assert shown["chosen"] == model.config
    return shown


def test_a_slider_moved_by_keyboard_shows_the_models_numbers(lab):
    lab.open()
    assert lab.query() == Query()
    before = check(lab, Query())
    slider = lab.find("M-slider")
    slider.send_keys(Keys.ARROW_LEFT * 3)
    lab.settle()
    sizes = stops()
    moved = Query(M=sizes[sizes.index(4096) - 3])
    assert lab.query() == moved
    assert lab.value("M") == str(moved.M)
    assert slider.get_attribute("aria-valuetext") == str(moved.M)
    assert check(lab, moved) != before
    slider.send_keys(Keys.HOME)
    lab.settle()
    check(lab, Query(M=1))
    # What a screen reader is told.
    said = lab.find("summary").get_attribute("textContent")
    assert texts.seconds(predict(Query(M=1).problem()).gemmery)["text"] in said


def test_every_control(lab):
    lab.open()
    number = lab.find("K")
    number.clear()
    number.send_keys("1000", Keys.ENTER)
    lab.settle()
    check(lab, Query(K=1000))
    lab.choose("gpu", "NVIDIA A100")
    lab.choose("dtype", "fp16")
    lab.choose("weight", "int4")
    lab.choose("epilogue", "bias_gelu")
    lab.choose("layout", "TT")
    wide = Query("NVIDIA A100", "fp16", 4096, 28672, 1000, "TT", "bias_gelu", "int4")
    assert lab.query() == wide
    check(lab, wide)
    layers = [layer for preset in presets() for layer in preset["layers"]]
    place = next(i for i, layer in enumerate(layers) if (layer["N"], layer["K"]) == (2112, 7168))
    lab.choose("preset", str(place))
    lab.driver.find_element(By.CSS_SELECTOR, "[data-rows='128']").click()
    lab.settle()
    named = Query("NVIDIA A100", "fp16", 128, 2112, 7168, "TT", "bias_gelu", "int4")
    assert (lab.value("M"), lab.value("N"), lab.value("K")) == ("128", "2112", "7168")
    assert (
        lab.driver.find_element(By.CSS_SELECTOR, "[data-rows='128']").get_attribute("aria-pressed") == "true"
    )
    check(lab, named)


def test_a_link_shows_the_same_and_the_way_back_is_kept(lab):
    lab.open(gpu="4090", M=300, N=5000, K=777, dtype="fp16")
    asked = Query("NVIDIA GeForce RTX 4090", "fp16", 300, 5000, 777)
    shown = check(lab, asked)
    assert lab.value("gpu") == "NVIDIA GeForce RTX 4090"
    link = lab.driver.current_url
    lab.choose("dtype", "fp32")
    lab.choose("gpu", "NVIDIA L4")
    lab.driver.back()
    lab.wait(lambda: lab.value("gpu") == "NVIDIA GeForce RTX 4090")
    lab.settle()
    assert lab.value("dtype") == "fp32"
    lab.driver.back()
    lab.wait(lambda: lab.value("dtype") == "fp16")
    lab.settle()
    assert lab.texts() == shown
    lab.driver.forward()
    lab.wait(lambda: lab.value("dtype") == "fp32")
    lab.settle()
    check(lab, Query("NVIDIA GeForce RTX 4090", "fp32", 300, 5000, 777))
    lab.open(link)
    assert lab.texts() == shown


def test_what_can_not_be_computed_is_said_beside_the_control(lab):
    lab.open()
    lab.choose("dtype", "fp32")
    shown = lab.texts()
    lab.choose("weight", "nf4")
    weight, error = lab.find("weight"), lab.find("weight-error")
    assert weight.get_attribute("aria-invalid") == "true"
    assert weight.get_attribute("aria-describedby") == "weight-error"
    assert "bf16 or fp16" in error.text
    # The answer before stays, but for its colour.
    assert {k: v for k, v in lab.texts().items() if k != "failure"} == {
        k: v for k, v in shown.items() if k != "failure"
    }
    lab.choose("dtype", "bf16")
    assert weight.get_attribute("aria-invalid") is None
    assert error.text == ""
    check(lab, Query(weight="nf4"))
    number = lab.find("M")
    number.send_keys(Keys.CONTROL, "a")
    number.send_keys("0", Keys.ENTER)
    lab.settle()
    assert "from 1 to" in lab.find("M-error").text
    lab.open(M="many")
    assert "'many'" in lab.find("M-error").text
    lab.open(gpu="V100")
    assert "V100" in lab.find("gpu-error").text
    # The default stands in the place of what there is not.
    assert "the default is shown" in lab.find("gpu-error").text
    assert lab.value("gpu") == "NVIDIA H200"


def test_a_product_without_a_kernel(lab):
    lab.open(gpu="NVIDIA A100", dtype="fp8")
    shown = lab.texts()
    assert "gemmery-headline" not in shown
    assert shown["roofline-time"] == api.product(Query("NVIDIA A100", "fp8"))["times"]["roofline"]["text"]
    assert "reference" in lab.find("config").text
    assert "no tiles" in lab.find("waves").text


def test_a_phone_has_room_for_everything(lab):
    for width in (360, 768):
        lab.window(width, 740)
        lab.open(weight="int4", epilogue="bias_relu_squared", M=1)
        lab.script("for (const more of document.querySelectorAll('details')) more.open = true")
        assert lab.sticking_out() == []
        assert lab.script("return document.documentElement.scrollWidth") <= width
    lab.window(360, 740)
    # The numbers stay in sight while the controls fill the screen.
    seen = lab.find("summary").rect
    assert 0 < seen["height"] < 100
    assert lab.script("return document.getElementById('summary').getBoundingClientRect().bottom") == 740
    for name in ("M-slider", "play", "gpu", "theme"):
        assert lab.find(name).rect["height"] >= 24


def contrast(lab, chosen):
    """The contrast of an element's text with what is behind it, as WCAG 2 reckons."""
    colours = lab.script("""
        const element = document.querySelector(arguments[0]);
        let behind = element;
        while (getComputedStyle(behind).backgroundColor === "rgba(0, 0, 0, 0)") behind = behind.parentElement;
        return [getComputedStyle(element).color, getComputedStyle(behind).backgroundColor];
    """, chosen)  # fmt: skip

    def luminance(text):
        parts = [int(x) / 255 for x in re.findall(r"\d+", text)[:3]]
        linear = [x / 12.92 if x <= 0.04045 else ((x + 0.055) / 1.055) ** 2.4 for x in parts]
        return sum(weight * x for weight, x in zip((0.2126, 0.7152, 0.0722), linear, strict=True))

    light, dark = sorted(map(luminance, colours), reverse=True)
    return (light + 0.05) / (dark + 0.05)


TEXT = (
    "h1", "h1 span", ".top p", "label", "select", "#gpu-error", "h2", "#gemmery-headline", ".figure dt", ".note",
    ".reasons li", ".knobs dt", "summary", "#order-text", "[aria-pressed=true]", "[aria-pressed=false]", "output",
)  # fmt: skip


def brightness(lab):
    found = lab.script("return getComputedStyle(document.body).backgroundColor")
    return sum(map(int, re.findall(r"\d+", found)[:3]))


def test_light_and_dark(lab):
    lab.open()
    assert brightness(lab) > 600
    for chosen in TEXT:
        assert contrast(lab, chosen) >= 4.5, chosen
    lab.media({"prefers-color-scheme": "dark"})
    assert brightness(lab) < 150
    for chosen in TEXT:
        assert contrast(lab, chosen) >= 4.5, chosen
    lab.find("theme").click()
    assert brightness(lab) > 600
    # What was chosen is remembered.
    lab.open()
    assert brightness(lab) > 600
    lab.find("theme").click()
    assert brightness(lab) < 150


def test_everything_is_reached_by_keyboard(lab):
    lab.open()
    seen = []
    for _ in range(60):
        lab.driver.switch_to.active_element.send_keys(Keys.TAB)
        name, outline = lab.script("""
            const active = document.activeElement;
            return [active === document.body ? "" : active.id || active.textContent, getComputedStyle(active).outlineStyle];
        """)
        if name == "":  # past the last, where the browser's own controls would come
            break
        assert outline != "none", name
        seen.append(name)
    controls = lab.script("""
        return [...document.querySelectorAll("select, input, button, summary, a")]
          .map((x) => x.id || x.textContent);
    """)
    assert set(controls) <= set(seen)
    labelled = lab.script("""
        return [...document.querySelectorAll("select, input")]
          .filter((x) => !(x.labels.length || x.getAttribute("aria-label"))).map((x) => x.id);
    """)
    assert labelled == []


def test_the_film_of_the_order(lab):
    lab.open()
    found = api.product(Query())["order"]
    waves = -(-found["tiles"] // found["programs"])

    def captions():
        return [x.text for x in lab.driver.find_elements(By.CLASS_NAME, "wave-text")]

    assert lab.find("time-text").text == f"wave 1 of {waves}"
    assert captions() == [way["waves"][0] for way in found["orders"]]
    lab.find("step").send_keys(Keys.ENTER)
    assert lab.find("time-text").text == f"wave 2 of {waves}"
    assert captions() == [way["waves"][1] for way in found["orders"]]
    assert lab.value("time") == str(2 * found["programs"])
    lab.find("back").click()
    lab.find("time").send_keys(Keys.END)
    assert lab.find("time-text").text == f"wave {waves} of {waves}"
    assert captions() == [way["waves"][-1] for way in found["orders"]]
    lab.find("time").send_keys(Keys.HOME)
    lab.find("play").click()
    assert lab.find("play").text == "Pause"
    lab.wait(lambda: int(lab.value("time")) > 50)
    lab.find("play").click()
    still = lab.value("time")
    assert lab.find("play").text == "Play"
    # Nothing glides where the user wants less motion: whole waves.
    lab.media({"prefers-reduced-motion": "reduce", "prefers-color-scheme": "light"})
    lab.find("play").click()
    lab.wait(lambda: lab.value("time") != still)
    assert int(lab.value("time")) % found["programs"] == 0
    lab.find("play").click()


def test_the_film_draws_the_tiles_of_a_wave(lab):
    # 8 × 8 tiles: so large that each can be looked at.
    lab.open(M=1024, N=1024, K=64, gpu="NVIDIA L4")
    found = api.product(Query("NVIDIA L4", M=1024, N=1024, K=64))["order"]
    rows, columns = found["rows"], found["columns"]
    lab.script(
        "const t = document.getElementById('time'); t.value = arguments[0]; t.dispatchEvent(new Event('input'))",
        found["tiles"] // 2,
    )
    for number, way in enumerate(found["orders"]):
        seen = set(way["visits"][: found["tiles"] // 2])
        colours = lab.script("""
            const canvas = document.querySelectorAll("canvas")[arguments[0]], [rows, columns] = arguments[1];
            const pen = canvas.getContext("2d"), edge = 12, found = [];
            for (let row = 0; row < rows; row++) for (let column = 0; column < columns; column++) {
              const x = edge + (column + 0.4) * (canvas.width - edge) / columns;
              const y = edge + (row + 0.4) * (canvas.height - edge) / rows;
              found.push(pen.getImageData(x, y, 1, 1).data.join());
            }
            return found;
        """, number, [rows, columns])  # fmt: skip
        (empty,) = {colours[tile] for tile in set(range(rows * columns)) - seen}
        assert empty not in {colours[tile] for tile in seen}


def test_the_roofline_point_lies_where_its_numbers_say(lab):
    lab.open(M=16)
    found = api.product(Query(M=16))["roofline"]
    x, y = lab.script(
        "const p = document.querySelector('.point.gemmery'); return [p.cx.baseVal.value, p.cy.baseVal.value]"
    )
    lines = lab.script(
        "return [...document.querySelectorAll('svg .grid')].map((l) => ['x1', 'x2', 'y1', 'y2'].map((k) => l[k].baseVal.value))"
    )
    upright = [line[0] for line in lines if line[0] == line[1]]
    level = [line[2] for line in lines if line[2] == line[3]]

    def between(places, axis, value):
        """Where a value lies between the two ticks around it, which are a factor of ten apart."""
        ticks = [tick["value"] for tick in axis["ticks"]]
        low = max(i for i, tick in enumerate(ticks[:-1]) if tick <= value)
        from math import log10

        return places[low] + (places[low + 1] - places[low]) * log10(value / ticks[low])

    point = next(p for p in found["points"] if p["name"] == "gemmery")
    assert x == pytest.approx(between(upright, found["x"], found["intensity"]["value"]), abs=0.5)
    assert y == pytest.approx(between(level, found["y"], point["rate"]["value"]), abs=0.5)


def test_the_exported_file_works_without_a_server(lab, tmp_path):
    path = tmp_path / "lab.html"
    choices = {"gpu": ["H200", "NVIDIA A100"], "dtype": ["bf16", "fp8"]}
    path.write_text(export.page([(16, 4096, 4096), (4096, 4096, 4096)], choices), encoding="utf-8")
    lab.open(path.as_uri())
    check(lab, Query(M=16, N=4096, K=4096))
    lab.choose("shape", "1")
    check(lab, Query(M=4096, N=4096, K=4096))
    lab.choose("gpu", "NVIDIA A100")
    check(lab, Query("NVIDIA A100", M=4096, N=4096, K=4096))
    shown, link = lab.texts(), lab.driver.current_url
    assert lab.script("return [...document.getElementById('gpu').options].map((x) => x.value)") == [
        "NVIDIA H200", "NVIDIA A100",
    ]  # fmt: skip
    assert not lab.find("layout").is_enabled()
    assert lab.driver.find_elements(By.ID, "M") == []
    lab.choose("dtype", "fp8")
    assert "reference" in lab.find("config").text
    lab.driver.back()
    lab.wait(lambda: lab.value("dtype") == "bf16")
    lab.settle()
    assert lab.texts() == shown
    lab.driver.get("about:blank")
    lab.open(link)
    assert lab.texts() == shown
    loaded = lab.script("return performance.getEntriesByType('resource').map((x) => x.name)")
    assert [name for name in loaded if not name.startswith("data:")] == []
    lab.window(360, 740)
    assert lab.sticking_out() == []


def test_a_server_that_is_gone_is_told(lab):
    lab.open()
    lab.driver.execute_cdp_cmd("Network.enable", {})
    lab.driver.execute_cdp_cmd("Network.setBlockedURLs", {"urls": ["*/api/product*"]})
    try:
        lab.choose("dtype", "fp16")
        assert "does not answer" in lab.find("failure").text
    finally:
        lab.driver.execute_cdp_cmd("Network.setBlockedURLs", {"urls": []})
    lab.driver.get_log("browser")
    lab.choose("dtype", "bf16")
    assert not lab.find("failure").is_displayed()
    check(lab, Query())


def test_what_the_address_names_and_the_page_has_not_becomes_the_default(lab):
    lab.open(M="512", dtype="complex128", epilogue="nothing")
    lab.settle()
    assert (lab.value("dtype"), lab.value("epilogue")) == ("bf16", "none")
    for field, said in (("dtype", "complex128"), ("epilogue", "nothing")):
        text = lab.find(f"{field}-error").text
        assert said in text
        assert "the default is shown" in text
    assert lab.value("M") == "512"
    assert lab.find("gemmery-headline").text
    lab.choose("dtype", "fp16")
    lab.settle()
    assert lab.find("dtype-error").text == ""
