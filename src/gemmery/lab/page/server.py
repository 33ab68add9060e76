"""The server of the lab's page: the page, its parts, and the answers of `api` as JSON."""

from __future__ import annotations

import functools
import json
from typing import Any

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from . import document
from .api import Query, QueryError, options, product

#: Answers that are kept, as text.
KEPT = 1024


@functools.lru_cache(KEPT)
def _body(query: Query) -> bytes:
    return encoded(product(query))


def encoded(values: Any) -> bytes:
    """Plain values as JSON. NaN or infinity among them would be an error of ours."""
    return json.dumps(values, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()


def _json(body: bytes, status: int = 200) -> Response:
    # The model may be another one after a restart.
    return Response(body, status, {"Cache-Control": "no-store"}, "application/json")


async def _page(_: Request) -> Response:
    return HTMLResponse(document.linked())


async def _options(_: Request) -> Response:
    return _json(encoded(options()))


async def _product(request: Request) -> Response:
    try:
        query = Query.of(request.query_params)
        # Some milliseconds of arithmetic, during which the page's parts can be served.
        return _json(await run_in_threadpool(_body, query))
    except QueryError as error:
        return _json(encoded(error.asdict()), 400)


app = Starlette(
    routes=[
        Route("/", _page),
        Route("/api/options", _options),
        Route("/api/product", _product),
        Mount("/static", StaticFiles(directory=document.STATIC)),
    ]
)
