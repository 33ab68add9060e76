"""The actions of `gemmery lab`: one answer, a file, or a server."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import threading
import webbrowser
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlencode

from ...select.shapes import sizes
from ..tuning import gpu_here
from . import api, export
from .query import GPUS, Query


def default_gpu() -> str:
    """The GPU of this machine, where there is one that the page knows."""
    here = gpu_here()
    return here.name if here is not None and here.name in GPUS else Query().gpu


@dataclass(frozen=True)
class Request:
    """The request of the command.

    Attributes:
        choices: the given values by the name of a control; none for the default.
        shapes: texts such as 4096x14336x4096.
    """

    choices: Mapping[str, Sequence[str]]
    shapes: Sequence[str] = ()

    @property
    def sizes(self) -> list[export.Shape]:
        """(M, N, K) of the shapes.

        Raises:
            ValueError: a text is of another form.
        """
        found = []
        for text in self.shapes:
            each = sizes(text)
            if len(each) != 3:
                raise ValueError(f"shape is {text!r}; it must be MxNxK, such as 64x4096x4096")
            found.append((each[0], each[1], each[2]))
        return found

    def first(self) -> Query:
        """The product that the page opens with: the first of everything that was given.

        Raises:
            ValueError: there is no such product.
        """
        given = {"gpu": default_gpu()} | {name: values[0] for name, values in self.choices.items() if values}
        for size in self.sizes[:1]:
            given |= dict(zip("MNK", map(str, size), strict=True))
        return Query.of(given)

    def only(self) -> Query:
        """The same, where no more than one was given.

        Raises:
            ValueError: there is no such product, or there are several.
        """
        for name, values in (*self.choices.items(), ("shapes", self.shapes)):
            if len(values) > 1:
                raise ValueError(f"--json is for one product; {name} has {len(values)}: {', '.join(values)}")
        return self.first()


def answer(request: Request) -> dict[str, Any]:
    """The server's answer about one product."""
    return api.product(request.only())


def exported(request: Request) -> str:
    """The page for all products that were given."""
    gpus = request.choices.get("gpu") or [default_gpu()]
    return export.page(request.sizes or export.shapes(), {**request.choices, "gpu": gpus})


def serve(request: Request, host: str, port: int, open_page: bool | None) -> None:
    """Serve the page until Ctrl-C.

    Args:
        open_page: whether to open it in a browser; None for where there is a desktop.

    Raises:
        ValueError: a choice is invalid.
        OSError: nothing can be served there.
        SystemExit: the server's libraries are not installed.
    """
    first = request.first()
    query = "" if first == Query() else f"?{urlencode(first.asdict())}"
    server = _server()
    with _listening(host, port) as listening:
        shown = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)
        address = f"http://{shown}:{listening.getsockname()[1]}/{query}"
        print(f"The lab is at {address}\nCtrl-C ends it.", flush=True)
        if _has_desktop() if open_page is None else open_page:
            threading.Timer(0.5, webbrowser.open, [address]).start()
        # Ctrl-C ends the server, which has closed its connections.
        with contextlib.suppress(KeyboardInterrupt):
            server.run(sockets=[listening])


def _listening(host: str, port: int) -> socket.socket:
    try:
        return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError as error:
        raise OSError(f"nothing can be served at {host}, port {port}: {error.strerror or error}") from error


def _server() -> Any:
    try:
        import uvicorn

        from .server import app
    except ModuleNotFoundError as error:
        raise SystemExit(
            f"gemmery lab needs {error.name} to serve its page: pip install 'gemmery[lab]'"
        ) from error
    return uvicorn.Server(uvicorn.Config(app, log_level="warning"))


def _has_desktop() -> bool:
    """Whether a browser would be a window, and not a program that takes over the terminal."""
    return sys.platform in ("darwin", "win32") or bool(
        os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")
    )
