"""The page of `gemmery order` as a user meets it: it plays, it can be moved by keyboard, and it shows the model's numbers."""

import numpy as np
import pytest
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.ui import WebDriverWait

from gemmery.lab.order_pictures import draw
from gemmery.lab.orders import amount, compare, launch_of

#: Different colours that are drawn on a canvas, as many as there are.
COLOURS = """
const canvas = document.querySelectorAll("canvas")[arguments[0]];
const data = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
return new Set(new Uint32Array(data.buffer)).size;
"""


@pytest.fixture(scope="module")
def found():
    return compare(
        launch_of(
            2048, 2048, 2048, tile=(128, 128, 64), group_size=4, programs=20, l2_bytes=1 << 20, device="H200"
        )
    )


@pytest.fixture
def page(found, driver, tmp_path):
    draw(found, tmp_path / "order.html")
    driver.get((tmp_path / "order.html").as_uri())
    yield driver
    assert [entry for entry in driver.get_log("browser") if entry["level"] == "SEVERE"] == []


def captions(page):
    return [element.text for element in page.find_elements(By.TAG_NAME, "figcaption")]


def test_moved_by_keyboard_it_shows_the_models_numbers(page, found):
    time = page.find_element(By.ID, "time")
    assert time.get_attribute("value") == "20"
    time.send_keys(Keys.ARROW_RIGHT * 5)
    for order, caption in zip(found.shown, captions(page), strict=True):
        read = np.cumsum(order.traffic.wave_memory)[1]
        assert f"{order.label}: 25 of 256 tiles, wave 2 of 13; {amount(read)} read" in caption
    before = page.execute_script(COLOURS, 1)
    time.send_keys(Keys.END)
    for order, caption in zip(found.shown, captions(page), strict=True):
        assert f"256 of 256 tiles, wave 13 of 13; {amount(order.traffic.memory)} read" in caption
    assert page.execute_script(COLOURS, 1) > before
    rows = page.find_elements(By.CSS_SELECTOR, "tbody tr")
    for order, row in zip(found.table, rows, strict=True):
        traffic = order.traffic
        label, *rates, memory = [cell.text for cell in row.find_elements(By.TAG_NAME, "td")]
        assert (label, memory) == (order.label, amount(traffic.memory))
        exact = [100 * rate for rate in (traffic.hit_rate, traffic.hit_rate_a, traffic.hit_rate_b)]
        assert [float(rate.removesuffix("%")) for rate in rates] == pytest.approx(exact, abs=0.0501)


def test_it_plays_and_pauses(page):
    button, time = page.find_element(By.ID, "play"), page.find_element(By.ID, "time")
    button.send_keys(Keys.SPACE)
    assert button.text == "Pause"
    WebDriverWait(page, 10).until(lambda _: int(time.get_attribute("value")) > 25)
    button.send_keys(Keys.SPACE)
    assert button.text == "Play"
    stopped = time.get_attribute("value")
    page.execute_async_script("setTimeout(arguments[0], 300)")
    assert time.get_attribute("value") == stopped


def test_on_a_phone_nothing_sticks_out(page):
    page.execute_cdp_cmd(
        "Emulation.setDeviceMetricsOverride",
        {"width": 390, "height": 800, "deviceScaleFactor": 2, "mobile": True},
    )
    assert page.execute_script("return document.documentElement.scrollWidth <= window.innerWidth")
    page.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
