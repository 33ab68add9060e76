"""The page as one file, with the answers for a fixed set of products instead of a server."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import urlencode

from .. import suites
from . import document
from .api import Query, QueryError, options, product

#: Products that a file can hold; an answer takes 10 to 50 KB.
MOST = 1000
#: The parameters of a query besides its sizes.
CHOICES = ("gpu", "dtype", "layout", "epilogue", "weight")

Shape = tuple[int, int, int]


def shapes() -> list[Shape]:
    """The default shapes of a file: those of the suites of language models."""
    rows = (*suites.load("llm"), *suites.load("decode"))
    return list(dict.fromkeys((row.M, row.N, row.K) for row in rows))


def page(sizes: Sequence[Shape], choices: Mapping[str, Sequence[str]]) -> str:
    """The page with the answers for every shape with every combination of choices.

    Args:
        sizes: (M, N, K).
        choices: by the name of a control what it offers; the default where one is not named. The file opens with the
            first of everything.

    Raises:
        QueryError: a size or a name is invalid, there are too many products, or none of them can be computed.
    """
    sizes = list(dict.fromkeys(sizes))
    for shape in sizes:
        for name, size in zip("MNK", shape, strict=True):
            _checked(name, str(size))
    default = Query().asdict()
    offered = {
        name: [_checked(name, value) for value in dict.fromkeys(choices.get(name) or [default[name]])]
        for name in CHOICES
    }
    asked = list(_asked(sizes, offered))
    if len(asked) > MOST:
        raise QueryError("shape", f"{len(asked)} products are requested; a file can hold {MOST}")
    answers = [_answer(given) for given in asked]
    answered = [given for given, answer in zip(asked, answers, strict=True) if "error" not in answer]
    if not answered:
        raise QueryError(**answers[0]["error"])
    data = {
        "options": _options(sizes, offered, answered[0]),
        "answers": dict(zip(map(urlencode, asked), answers, strict=True)),
    }
    return document.whole(data)


def _checked(name: str, value: str) -> str:
    """A value as a query has it, if it is one at all."""
    return str(Query.of({name: value}).asdict()[name])


def _asked(sizes: Sequence[Shape], offered: Mapping[str, Sequence[str]]) -> Iterator[dict[str, str]]:
    """The queries as texts, in the order of a query's fields, by which the page finds their answers."""
    for names in itertools.product(*offered.values()):
        for M, N, K in sizes:
            given = dict(zip(offered, names, strict=True)) | {"M": str(M), "N": str(N), "K": str(K)}
            yield {field: given[field] for field in Query().asdict()}


def _answer(given: Mapping[str, str]) -> dict[str, Any]:
    try:
        return product(Query.of(given))
    except QueryError as error:
        # Types and formats that do not match: the page shows the server's error.
        return error.asdict()


def _options(
    sizes: Sequence[Shape], offered: Mapping[str, Sequence[str]], first: Mapping[str, str]
) -> dict[str, Any]:
    """The controls, limited to what is in the file."""
    every = options()
    controls = {
        name: [choice for value in values for choice in every["controls"][name] if choice["value"] == value]
        for name, values in offered.items()
    }
    layers = {
        (layer["N"], layer["K"]): f", {preset['model']} {layer['name']}"
        for preset in reversed(every["presets"])
        for layer in preset["layers"]
    }
    listed = [
        {"M": str(M), "N": str(N), "K": str(K), "text": f"{M} × {N} × {K}{layers.get((N, K), '')}"}
        for M, N, K in sizes
    ]
    return {"controls": controls, "shapes": listed, "defaults": first}
