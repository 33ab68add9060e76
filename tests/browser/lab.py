"""The lab's page as a test uses it, and what the Python model says that it has to show."""

from urllib.parse import parse_qs, urlencode, urlsplit

from selenium.webdriver.common.by import By
from selenium.webdriver.support.ui import Select, WebDriverWait

from gemmery.lab.page import api
from gemmery.lab.page.query import Query

#: All texts of the page that have a name, at once.
TEXTS = """
const found = {};
for (const element of document.querySelectorAll("#results [id]")) {
  if (element.childElementCount === 0) found[element.id] = element.textContent;
}
return found;
"""
#: Elements that stick out of the window, but for what scrolls by itself.
STICKING_OUT = """
return [...document.querySelectorAll("body *")]
  .filter((x) => x.getClientRects().length && !x.closest(".scroll, .skip") && x.getBoundingClientRect().right > innerWidth + 0.5)
  .map((x) => `${x.tagName}#${x.id}.${x.className}`);
"""


class Lab:
    """The page in a browser."""

    def __init__(self, driver, address):
        self.driver, self.address = driver, address

    def reset(self):
        """A desktop's window, light colours, nothing remembered."""
        self.window(1280, 900)
        self.media({"prefers-color-scheme": "light", "prefers-reduced-motion": "no-preference"})
        self.driver.get(self.address)
        self.driver.execute_script("localStorage.clear()")

    def window(self, width, height):
        self.driver.execute_cdp_cmd(
            "Emulation.setDeviceMetricsOverride",
            {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600},
        )

    def media(self, features):
        values = [{"name": name, "value": value} for name, value in features.items()]
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": values})

    def open(self, address=None, **query):
        """Open the page with a product, and wait for its answer."""
        if address is None:
            address = self.address + (f"?{urlencode(query)}" if query else "")
        self.driver.get(address)
        self.settle()

    def find(self, name):
        return self.driver.find_element(By.ID, name)

    def choose(self, name, value):
        Select(self.find(name)).select_by_value(value)
        self.settle()

    def script(self, text, *arguments):
        return self.driver.execute_script(text, *arguments)

    def wait(self, condition):
        return WebDriverWait(self.driver, 10, poll_frequency=0.02).until(lambda _: condition())

    def settle(self):
        """Wait until what was asked last is answered."""
        self.wait(lambda: self.script("return document.getElementById('results').ariaBusy === 'false'"))

    def query(self):
        """The product in the page's address."""
        parts = urlsplit(self.driver.current_url)
        return Query.of({name: values[0] for name, values in parse_qs(parts.query or parts.fragment).items()})

    def texts(self):
        return self.script(TEXTS)

    def value(self, name):
        return self.script("return document.getElementById(arguments[0]).value", name)

    def sticking_out(self):
        return self.script(STICKING_OUT)

    def errors(self):
        """What went wrong in the page. A refused product is answered by status 400, which Chromium notes as well."""
        entries = self.driver.get_log("browser")
        return [
            x["message"]
            for x in entries
            if x["level"] == "SEVERE" and "400 (Bad Request)" not in x["message"]
        ]


def wanted(query):
    """What the page has to show of a product, by the names of its elements."""
    found = api.product(query)
    times, choice, waves, traffic = (found[name] for name in ("times", "choice", "waves", "traffic"))
    shown = {
        "headline-title": found["title"], "gemmery-headline": times["gemmery"]["text"], "room": times["room"]["text"],
        "chosen": choice["config"], "roofline-text": found["roofline"]["text"],
        "waves-text": waves["text"], "waves-tiles": waves["tiles"]["text"], "waves-busy": waves["busy"]["text"],
        "waves-inside": waves["inside"]["text"], "order-text": found["order"]["text"],
    }  # fmt: skip
    if times["ratio"]:
        shown["ratio"] = times["ratio"]["text"]
    for name in ("gemmery", "cublas", "roofline"):
        if times[name]:
            shown |= {f"{name}-time": times[name]["text"], f"{name}-rate": times[name]["rate"]["text"]}
    shown |= {f"{point['name']}-point": point["rate"]["text"] for point in found["roofline"]["points"]}
    shown |= {f"part-{part['name']}": part["seconds"]["text"] for part in choice["parts"]}
    shown |= {f"candidate-{i}": x["predicted"]["text"] for i, x in enumerate(choice["candidates"])}
    shown |= {f"level-{i}": level["bytes"]["text"] for i, level in enumerate(traffic["levels"])}
    return shown | {f"hits-{i}": way["hits"] for i, way in enumerate(found["order"]["orders"])}
