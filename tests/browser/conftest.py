"""The lab's server in a thread, and Chromium without a window, for all tests here."""

import shutil
import threading
import time

import pytest
import uvicorn
from selenium.webdriver import Chrome, ChromeOptions, ChromeService

from gemmery.lab.page.server import app
from tests.browser.lab import Lab

BROWSERS = ("chromium", "chromium-browser", "google-chrome")


@pytest.fixture(scope="session")
def address():
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="warning"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        assert thread.is_alive(), "the server ended while it started"
        time.sleep(0.01)
    yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}/"
    server.should_exit = True
    thread.join(timeout=10)


@pytest.fixture(scope="session")
def driver():
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    helper = shutil.which("chromedriver")
    if browser is None or helper is None:
        # Not skipped: a page that no browser has opened is not tested.
        pytest.fail(
            "these tests need chromium and chromedriver: apt-get install chromium chromium-driver",
            pytrace=False,
        )
    options = ChromeOptions()
    options.binary_location = browser
    # --no-sandbox: Chromium refuses to run as root otherwise, as continuous integration does.
    for word in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--hide-scrollbars"):
        options.add_argument(word)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    made = Chrome(options=options, service=ChromeService(helper))
    yield made
    made.quit()


@pytest.fixture
def lab(driver, address):
    """The page as a user has it before them; a fresh one for each test, without errors on its console after it."""
    made = Lab(driver, address)
    made.reset()
    yield made
    assert made.errors() == []
