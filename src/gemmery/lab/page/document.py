"""The page's HTML: its parts linked, as the server has them, or all within, as an exported file does."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

STATIC = Path(__file__).with_name("static")


def _read(name: str) -> str:
    return (STATIC / name).read_text(encoding="utf-8")


def modules() -> list[str]:
    """The names of the page's JavaScript modules, which import each other as "lab/<name>"."""
    return sorted(path.stem for path in STATIC.glob("*.js"))


def _filled(style: str, addresses: Mapping[str, str], data: str = "") -> str:
    imports = json.dumps({"imports": {f"lab/{name}": address for name, address in addresses.items()}})
    parts = {"style": style, "imports": f'<script type="importmap">{imports}</script>', "data": data}
    page = _read("index.html")
    for name, text in parts.items():
        page = page.replace(f"<!--{name}-->", text)
    return page


def linked() -> str:
    """The page whose parts are under static/."""
    style = '<link rel="stylesheet" href="static/style.css">'
    return _filled(style, {name: f"./static/{name}.js" for name in modules()})


def whole(data: Any) -> str:
    """The page in one piece, with data in the place of a server; it loads nothing."""
    addresses = {
        name: "data:text/javascript;base64," + base64.b64encode(_read(f"{name}.js").encode()).decode()
        for name in modules()
    }
    # No text may end the element that it is in.
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":")).replace("<", "\\u003c")
    return _filled(
        f"<style>\n{_read('style.css')}</style>",
        addresses,
        f'<script type="application/json" id="answers">{text}</script>',
    )
