"""The fit to measurements of a GPU: the constants of the laws, and the residuals that correct them.

The files under data/ are written by benchmarks/fit_prediction.py.
"""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ...devices import Device
from .residuals import Correction, Samples

DATA = Path(__file__).with_name("data")
#: The GPU whose constants, as parts of datasheet rates, replace those of GPUs without measurements.
REFERENCE = "NVIDIA H200"
#: Whose times there are.
METHODS = ("gemmery", "cublas")
#: Part of the measurements that lie within a prediction's interval.
COVERAGE = 0.9
#: The mark in every output for a GPU without a file under data/.
NOT_MEASURED = "not measured: predicted from the data sheet"


@dataclass(frozen=True, eq=False)
class Calibration:
    """A file of constants.

    Attributes:
        gpu: the GPU that was measured.
        constants: by method, of its law; see `ours.START` and `vendor.START`.
        corrections: by method.
        half: by method, how many of the correction's standard deviations half of the errors of such shapes are within.
        wide: the same for `COVERAGE` of the errors.
        held_out: by method, the median and the 90th percentile of the relative error of shapes that were left out of
            the fit.
        samples: by method, how many measurements there are.
    """

    gpu: str
    constants: dict[str, dict[str, float]]
    corrections: dict[str, Correction]
    half: dict[str, float]
    wide: dict[str, float]
    held_out: dict[str, dict[str, float]]
    samples: dict[str, int]

    @classmethod
    def read(cls, path: Path) -> Calibration:
        """A file that benchmarks/fit_prediction.py wrote."""
        data = json.loads(path.read_text(encoding="utf-8"))
        return cls(
            gpu=data["gpu"],
            constants={method: data["constants"][method] for method in METHODS},
            corrections={method: _correction(data["samples"][method]) for method in METHODS},
            half=data["half"],
            wide=data["wide"],
            held_out={method: data["held_out"][method]["all"] for method in METHODS},
            samples={method: len(data["samples"][method]) for method in METHODS},
        )


def _correction(samples: list[list[Any]]) -> Correction:
    features = [(numbers, words) for numbers, words, _ in samples]
    return Correction(Samples.of(features), np.array([residual for *_, residual in samples]))


def path_of(gpu: str) -> Path:
    """The path of a GPU's constants, whether they exist or not."""
    return DATA / f"{gpu.lower().replace(' ', '-')}.json"


@functools.cache
def _read(gpu: str) -> Calibration:
    return Calibration.read(path_of(gpu))


def calibration_of(device: Device) -> tuple[Calibration, bool]:
    """The constants for a GPU, and whether they were measured on it, so that the corrections hold."""
    measured = path_of(device.name).is_file()
    return _read(device.name if measured else REFERENCE), measured


def mark_of(device: Device) -> str:
    """The mark beside all times of a GPU: `NOT_MEASURED`, or "" if measurements correct them."""
    return "" if path_of(device.name).is_file() else NOT_MEASURED
