"""The page's queries: the product of a query string, checked, and all choices."""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from ...devices import TABLE, Device
from ...problem import Problem
from ...select.shapes import DEFAULT_DEVICE, LAYOUTS, device_named
from .. import suites
from ..abstract import abstract_problem
from ..fusions import FUSIONS

#: GPUs by their names; the interpreter's times say nothing.
GPUS: dict[str, Device] = {name: device for name, device in TABLE.items() if name != "interpreter"}
#: Sizes that a query may have. Above, no product fits a GPU's memory, and simulating its tiles takes seconds.
MOST = 1 << 18
#: The value for no epilogue, and for a weight that is not packed.
NONE = "none"
#: The functions that may follow a product, with their descriptions. "bias" is that of `gemmery.linear`; the others are
#: traced functions.
EPILOGUES = {
    NONE: "none",
    "bias": "bias",
    "bias_gelu": "bias, GELU",
    "bias_gelu_tanh": "bias, GELU by tanh",
    "bias_relu_squared": "bias, ReLU²",
    "bias_residual": "bias, residual",
    "swiglu": "SwiGLU of two halves",
}
DTYPES = {
    "bf16": "bf16", "fp16": "fp16", "fp32": "fp32, IEEE", "tf32": "fp32 in TF32", "fp64": "fp64", "int8": "int8",
    "fp8": "fp8 e4m3, accurate sums", "fp8fast": "fp8 e4m3, fast sums",
}  # fmt: skip
#: The layouts of A and B.
LAYOUT_WORDS = {
    "NT": "NT, as a Linear's weight", "NN": "NN, both row-major", "TN": "TN, A transposed", "TT": "TT, both transposed",
}  # fmt: skip
#: Types of activations that a packed weight supports.
PACKED_DTYPES = ("bf16", "fp16")


class QueryError(ValueError):
    """A query that can't be answered; `field` is the control that it is about."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(message)
        self.field, self.message = field, message

    def asdict(self) -> dict[str, Any]:
        """The error that the page receives instead of an answer."""
        return {"error": {"field": self.field, "message": self.message}}


@dataclass(frozen=True)
class Query:
    """A product to predict.

    Attributes:
        gpu: a name of `GPUS`.
        dtype: of `suites.DTYPES`.
        M, N, K: sizes; (M, K) times (K, N).
        layout: for A and then B, N for row-major and T for column-major.
        epilogue: of `EPILOGUES`.
        weight: B's format, of `suites.WEIGHTS`, or "none".
    """

    gpu: str = DEFAULT_DEVICE
    dtype: str = "bf16"
    M: int = 4096
    N: int = 28672
    K: int = 4096
    layout: str = "NT"
    epilogue: str = NONE
    weight: str = NONE

    def __post_init__(self) -> None:
        for name, known in _CHOICES.items():
            if getattr(self, name) not in known:
                raise QueryError(
                    name, f"{name} is {getattr(self, name)!r}; it must be one of {', '.join(known)}"
                )
        for name in ("M", "N", "K"):
            value = getattr(self, name)
            if type(value) is not int or not 1 <= value <= MOST:
                raise QueryError(name, f"{name} is {value}; it must be from 1 to {MOST}")
        if self.weight != NONE:
            self._check_packed()
        if self.epilogue in FUSIONS and FUSIONS[self.epilogue].halves and self.N % 2:
            raise QueryError(
                "epilogue",
                f"{self.epilogue} halves the product's columns, and N is {self.N}; it must be even",
            )

    def _check_packed(self) -> None:
        if self.dtype not in PACKED_DTYPES:
            wanted = " or ".join(PACKED_DTYPES)
            raise QueryError("weight", f"a packed weight goes with {wanted}; dtype is {self.dtype}")
        if self.layout[1] != "T":
            raise QueryError(
                "weight", f"a packed weight is (N, K), so B is transposed: NT or TT; layout is {self.layout}"
            )

    @classmethod
    def of(cls, given: Mapping[str, str]) -> Query:
        """The query that texts name, with defaults for the rest.

        A GPU may be given by a part of its name, as to `gemmery explain`.

        Raises:
            QueryError: a text is wrong, or there is no such field.
        """
        known = {field.name for field in fields(cls)}
        for name in given:
            if name not in known:
                raise QueryError(name, f"there is no {name}; there are {', '.join(sorted(known))}")
        values: dict[str, Any] = dict(given)
        for name in ("M", "N", "K"):
            if name in given:
                values[name] = _size(name, given[name])
        if "gpu" in given:
            values["gpu"] = _gpu(given["gpu"])
        return cls(**values)

    def asdict(self) -> dict[str, Any]:
        """The fields as plain values, in their order."""
        return asdict(self)

    def words(self) -> str:
        """The description of the product, without the sizes."""
        weight = "" if self.weight == NONE else f"weight in {self.weight}"
        epilogue = "" if self.epilogue == NONE else f"epilogue: {EPILOGUES[self.epilogue]}"
        return "; ".join(filter(None, (f"{DTYPES[self.dtype]}, {self.layout}", weight, epilogue)))

    @property
    def device(self) -> Device:
        """The GPU's row of the device table."""
        return GPUS[self.gpu]

    def problem(self) -> Problem:
        """The problem that gemmery would compute.

        Raises:
            QueryError: the epilogue or the packed weight does not go with the rest.
        """
        plain = self.epilogue in (NONE, "bias")
        try:
            return abstract_problem(
                self.M, self.N, self.K, device=self.device, dtype=self.dtype, layout=self.layout,
                weight="" if self.weight == NONE else self.weight, bias=self.epilogue == "bias",
                epilogue="" if plain else self.epilogue,
            )  # fmt: skip
        except (ValueError, TypeError) as error:
            raise QueryError("weight" if plain else "epilogue", str(error)) from error


def _size(name: str, text: str) -> int:
    if not (text.isascii() and text.isdigit()):
        raise QueryError(name, f"{name} is {text!r}; it must be a whole number from 1 to {MOST}")
    # Longer texts than Python turns into integers are no sizes either.
    return int(text) if len(text) < 20 else 10**20


def _gpu(text: str) -> str:
    try:
        return device_named(text).name
    except ValueError as error:
        raise QueryError(
            "gpu", f"gpu is {text!r}; it must be one of {', '.join(GPUS)}, or a part of a name"
        ) from error


_CHOICES: dict[str, Collection[str]] = {
    "gpu": GPUS, "dtype": DTYPES, "layout": LAYOUTS, "epilogue": EPILOGUES, "weight": (NONE, *suites.WEIGHTS),
}  # fmt: skip


# --- what there is to choose -----------------------------------------------------------------------------------------


def stops() -> list[int]:
    """The sizes that a slider stops at: every power of two up to `MOST`, and some in between."""
    between = {size * part // 4 for power in range(1, 18) for size in [1 << power] for part in (4, 5, 6, 7)}
    return sorted(x for x in between | {1, MOST} if x < 16 or x % 16 == 0)


def _layers() -> Iterator[tuple[str, str, int, int]]:
    """Model, layer, N and K of the rows of the suites of language models, each once."""
    seen = set()
    for row in (*suites.load("llm"), *suites.load("decode")):
        model, layer, _ = row.name.split(" ")
        if (model, layer) not in seen:
            seen.add((model, layer))
            yield model, layer, row.N, row.K


@functools.cache
def presets() -> list[dict[str, Any]]:
    """Models with their layers, from the suites of the bench."""
    models: dict[str, list[dict[str, Any]]] = {}
    for model, layer, N, K in _layers():
        models.setdefault(model, []).append({"name": layer, "N": N, "K": K})
    return [{"model": model, "layers": layers} for model, layers in models.items()]


def options() -> dict[str, Any]:
    """Everything that the controls offer, and where they stand at first."""
    weights = {NONE: "as the type"} | {name: _weight_words(name) for name in suites.WEIGHTS}
    return {
        "controls": {
            "gpu": _choices({name: name for name in GPUS}),
            "dtype": _choices(DTYPES),
            "layout": _choices(LAYOUT_WORDS),
            "epilogue": _choices(EPILOGUES),
            "weight": _choices(weights),
        },
        "sizes": {"least": 1, "most": MOST, "stops": stops()},
        "rows": [1, 16, 128, 512, 4096, 8192],
        "presets": presets(),
        "defaults": Query().asdict(),
    }


def _choices(words: Mapping[str, str]) -> list[dict[str, str]]:
    return [{"value": value, "text": text} for value, text in words.items()]


def _weight_words(name: str) -> str:
    group = suites.WEIGHTS[name]
    return f"{name}, a scale for {group}" if group else name
