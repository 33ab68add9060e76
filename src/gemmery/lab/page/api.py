"""The data of the page: everything about one product, as plain values for JSON. Needs neither a GPU nor a server."""

from __future__ import annotations

from typing import Any

from ...launch import padding
from ...launch.explain import explain_problem
from ...problem import Config, Problem
from ..prediction import predict
from ..tuning import kind_named
from . import launched, predicted
from .query import Query, QueryError, options

__all__ = ["Query", "QueryError", "options", "product"]

#: Candidates that stand beside the one that runs.
CANDIDATES = 5


def product(query: Query) -> dict[str, Any]:
    """The predictions for a product: times, the config and its reasons, waves, roofline, tile order, traffic.

    Numbers come as {"value": ..., "text": ...}: seconds, bytes, operations or bytes per second, parts of 1. If the GPU
    lacks the instructions, torch's reference runs, and values that depend on a config are None.

    Raises:
        QueryError: the product can't be computed like this; its `field` says which choice it is about.

    Example:
        >>> found = product(Query(gpu="NVIDIA H200", M=16, N=4096, K=4096))
        >>> found["times"]["bound"], found["choice"]["config"]  # doctest: +ELLIPSIS
        ('...', '16x...')
    """
    problem = query.problem()
    try:
        found, why = predict(problem), explain_problem(problem, CANDIDATES)
    except ValueError as error:
        raise QueryError("epilogue" if problem.fusion else "dtype", str(error)) from error
    made: dict[str, Any] = {
        "query": query.asdict(),
        "problem": str(problem),
        "title": f"{query.M} × {query.N} × {query.K} on {query.gpu}",
        "about": query.words(),
        "vendor": found.vendor,
        "summary": predicted.summary(found),
        "notes": notes(query, problem),
        "times": predicted.times(found),
        "choice": predicted.choice(why, found),
        "roofline": predicted.roofline(found),
        "waves": None,
        "order": None,
        "traffic": None,
        "missing": "",
    }
    if not why.choices:
        return made | {"missing": "Torch's reference runs: there are no tiles."}
    launch = launched.Launch(padding.launched(problem), Config.of(found.config))
    tiles_m, tiles_n = launch.tiles
    if tiles_m * tiles_n > launched.TILES:
        return made | {"missing": f"{tiles_m} × {tiles_n} tiles are too many to show one by one."}
    return made | {
        "waves": launched.waves(launch),
        "order": launched.order(launch),
        "traffic": launched.traffic(launch),
    }


def notes(query: Query, problem: Problem) -> list[str]:
    """The differences from the request that the GPU requires."""
    asked = kind_named(query.dtype).precision
    if problem.precision != asked:
        return [f"{query.gpu} has no TF32 units: fp32 is multiplied in IEEE precision."]
    return []
