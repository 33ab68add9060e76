"""Fit what `gemmery predict` knows of a GPU to its recorded measurements, and say how well it does on shapes left out.

python benchmarks/fit_prediction.py             write src/gemmery/lab/prediction/data/nvidia-h200.json
python benchmarks/fit_prediction.py --check     only cross-validate

Constants of the laws of time are fitted by least squares of logarithms; what these leave is kept as samples for the
correction, rounded. Results are those of benchmarks/results in the regime "burst", without the suites of random
products, and for gemmery the quickest config of each shape in the selector's tables; rows of configs that this version
does not have are left out. In the cross-validation neither the constants nor the correction have seen any measurement
of a shape (M, N, K), of whatever type, layout or batch, that is predicted.
"""

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from scipy.optimize import least_squares

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "src"))

from gemmery.devices import TABLE, Device  # noqa: E402
from gemmery.lab.prediction import calibration, ours, recorded, vendor  # noqa: E402
from gemmery.lab.prediction.residuals import Correction, Samples  # noqa: E402
from gemmery.lab.results import read as result_of  # noqa: E402

FOLDS = 5
#: A measurement that is farther off than this, as a logarithm, pulls less.
ROBUST = 0.1
#: How far constants are thought to be from where they start, as logarithms: those of which few shapes tell stay there.
WIDTH = 0.7
#: Steps of the fit; it has settled by then.
STEPS = 8
#: Digits of what is written.
DIGITS = 4

Constants = dict[str, float]


@dataclass(frozen=True, eq=False)
class Data:
    """The measurements of one method.

    Attributes:
        shapes: what is held out together; suites: "" for a row of the selector's tables.
        samples: what the correction looks at, with the features that they are made of.
        logs: logarithms of the measured seconds.
        law: seconds of the measurements with these indices, given constants.
        start, given: constants before the fit, and which of them stay.
    """

    method: str
    shapes: list[tuple[int, ...]]
    suites: list[str]
    features: list[tuple[list[float], list[str]]]
    samples: Samples
    logs: np.ndarray
    law: Callable[[np.ndarray, Constants], np.ndarray]
    start: Mapping[str, float]
    given: Sequence[str]

    def fit(self, index: np.ndarray) -> Constants:
        """The constants that suit these measurements best."""
        free = [name for name in self.start if name not in self.given]
        first = np.log([self.start[name] for name in free])

        def constants(x: np.ndarray) -> Constants:
            return dict(self.start) | dict(zip(free, np.exp(x).tolist(), strict=True))

        def far(x: np.ndarray) -> np.ndarray:
            off = np.log(self.law(index, constants(x))) - self.logs[index]
            return np.concatenate([off / ROBUST, (x - first) / WIDTH])

        found = least_squares(far, first, loss="soft_l1", max_nfev=STEPS, diff_step=1e-4)
        return constants(found.x)

    def residuals(self, constants: Constants, index: np.ndarray) -> np.ndarray:
        """Logarithms of measured over predicted time."""
        return self.logs[index] - np.log(self.law(index, constants))


def read(results: Path, device: Device) -> list[Data]:
    """The measurements of gemmery and of the vendor's BLAS on a device."""
    rows = [row for row in recorded.read_results(results) if row.problem.device == device]
    if not rows:
        raise ValueError(f"no results of an {device.name} in {results}")
    return [_ours(rows, device), _vendor(rows)]


def _ours(rows: list[recorded.Recorded], device: Device) -> Data:
    rows = [row for row in rows if not row.outdated]
    timed = list(recorded.read_tables(device))
    launches = [ours.launch(row.problem, row.config, row.copied) for row in rows]
    launches += [ours.launch(one.problem, one.config) for one in timed]
    found = [launch for launch in launches if launch is not None]
    parts = {name: np.array(values) for name, values in _columns(map(ours.parts, found)).items()}
    features = [ours.features(launch) for launch in found]
    shapes = [(p.M, p.N, p.K) for p in (one.problem for one in timed)]
    return Data(
        method="gemmery",
        shapes=[row.shape for row in rows] + shapes,
        suites=[row.suite for row in rows] + [""] * len(timed),
        features=features,
        samples=Samples.of(features),
        logs=np.log([row.seconds["gemmery"] for row in rows] + [one.seconds for one in timed]),
        law=lambda index, c: ours.seconds({name: value[index] for name, value in parts.items()}, c),
        start=ours.START,
        given=ours.GIVEN,
    )


def _vendor(rows: list[recorded.Recorded]) -> Data:
    rows = [row for row in rows if recorded.CUBLAS in row.seconds]
    routes = [vendor.route(row.problem) for row in rows]
    missing = [row.row.name for row, route in zip(rows, routes, strict=True) if route is None]
    if missing:
        raise ValueError(f"torch is said to have no such product, but was measured: {', '.join(missing)}")
    found = [route for route in routes if route is not None]
    columns = _columns(map(vendor.parts, found))
    parts = {name: np.stack([np.atleast_1d(x) for x in values]) for name, values in columns.items()}

    def law(index: np.ndarray, c: Constants) -> np.ndarray:
        rates = np.array([[vendor.rate(found[i], c)] for i in index])
        seconds: np.ndarray = vendor.seconds({name: value[index] for name, value in parts.items()}, rates, c)
        return seconds

    features = [vendor.features(route) for route in found]
    return Data(
        method="cublas",
        shapes=[row.shape for row in rows],
        suites=[row.suite for row in rows],
        features=features,
        samples=Samples.of(features),
        logs=np.log([row.seconds[recorded.CUBLAS] for row in rows]),
        law=law,
        start=vendor.START,
        given=vendor.GIVEN,
    )


def _columns(rows: Any) -> dict[str, list[Any]]:
    """A list of dicts as a dict of lists."""
    listed = list(rows)
    return {name: [row[name] for row in listed] for name in listed[0]}


# --- shapes that are left out ---------------------------------------------------------------------------------------


def fold_of(shapes: Sequence[tuple[int, ...]], folds: int, seed: int) -> np.ndarray:
    """For each measurement the fold in which it is left out, with all others of its shape."""
    distinct = sorted(set(shapes))
    order = np.random.default_rng(seed).permutation(len(distinct))
    fold = {shape: int(place) % folds for shape, place in zip(distinct, order, strict=True)}
    return np.array([fold[shape] for shape in shapes])


def cross_validate(data: Data, folds: int = FOLDS, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Relative errors of the suites' rows, each predicted without any measurement of its shape.

    Returns:
        Predicted over measured time, less 1, and the standard deviation that the correction expects; NaN for rows of
        the selector's tables, which only help.
    """
    fold = fold_of(data.shapes, folds, seed)
    asked = np.array([suite != "" for suite in data.suites])
    errors, expected = np.full(len(fold), np.nan), np.full(len(fold), np.nan)
    for left_out in range(folds):
        known, unknown = np.flatnonzero(fold != left_out), np.flatnonzero((fold == left_out) & asked)
        constants = data.fit(known)
        correct = Correction(data.samples[known], data.residuals(constants, known))
        mean, deviation = correct(data.samples[unknown])
        errors[unknown] = np.expm1(mean - data.residuals(constants, unknown))
        expected[unknown] = deviation
    return errors, expected


def summarise(data: Data, errors: np.ndarray) -> dict[str, dict[str, Any]]:
    """For all rows of suites and for each suite: how many, the median and the 90th percentile of the error's size."""
    suites = np.array(data.suites)

    def of(rows: np.ndarray) -> dict[str, Any]:
        median, high = np.percentile(np.abs(errors[rows]), (50, 90)).round(DIGITS).tolist()
        return {"rows": int(rows.sum()), "median": median, "p90": high}

    each = {suite: of(suites == suite) for suite in sorted({suite for suite in data.suites if suite})}
    return {"all": of(suites != ""), **each}


def within(errors: np.ndarray, expected: np.ndarray, part: float) -> float:
    """How many of the expected standard deviations a part of the errors is within: 0.67 for half, were they normal."""
    return float(np.nanquantile(np.abs(errors) / expected, part).round(DIGITS))


# --- the file -------------------------------------------------------------------------------------------------------


def sources(results: Path, device: Device) -> list[dict[str, Any]]:
    """The files that the measurements come from."""
    found: list[dict[str, Any]] = []
    for path in recorded.fitted(results):
        data = result_of(path)
        rows = sum("burst" in row.get("summary", {}) for row in data["rows"])
        if recorded.device_of(data["gpu"]) == device and rows:
            known = {name: data[name] for name in ("commit", "date", "torch", "triton")}
            found.append({"file": f"benchmarks/results/{path.name}", "rows": rows, **known})
    for path, _, _ in recorded.tables(device):
        data = json.loads(path.read_text(encoding="utf-8"))
        place = path.relative_to(ROOT).as_posix()
        found.append({"file": place, "rows": len(data["shapes"]), "triton": data["triton"]})
    return found


def text_of(
    device: Device,
    files: list[dict[str, Any]],
    data: Sequence[Data],
    held_out: dict[str, Any],
    half: dict[str, float],
    wide: dict[str, float],
) -> str:
    """The file: a line for each source and each sample."""
    constants, samples = {}, {}
    for each in data:
        index = np.arange(len(each.logs))
        fitted = {name: float(f"{value:.{DIGITS}g}") for name, value in each.fit(index).items()}
        constants[each.method] = fitted
        residuals = each.residuals(fitted, index).round(DIGITS).tolist()
        samples[each.method] = [
            [[round(x, DIGITS) for x in numbers], words, residual]
            for (numbers, words), residual in zip(each.features, residuals, strict=True)
        ]
    head = {
        "about": "Written by benchmarks/fit_prediction.py. A sample is what a product is like, in numbers and words, "
        "and the logarithm of its measured over its predicted time.",
        "gpu": device.name,
        "sources": files,
        "constants": constants,
        "half": half,
        "wide": wide,
        "held_out": held_out,
    }
    lines = [f" {json.dumps(name)}: {_lines(value)}" for name, value in head.items()]
    each_method = ",\n".join(
        f'  "{method}": [\n' + ",\n".join("   " + json.dumps(sample) for sample in rows) + "\n  ]"
        for method, rows in samples.items()
    )
    return "{\n" + ",\n".join([*lines, f' "samples": {{\n{each_method}\n }}']) + "\n}\n"


def _lines(value: Any) -> str:
    """JSON with a line for each element of a list, or of a dict of dicts."""
    if isinstance(value, list):
        return "[\n  " + ",\n  ".join(json.dumps(one) for one in value) + "\n ]"
    if isinstance(value, dict):
        parts = [f"{json.dumps(name)}: {json.dumps(one)}" for name, one in value.items()]
        return "{\n  " + ",\n  ".join(parts) + "\n }"
    return json.dumps(value)


def main(arguments: list[str] | None = None) -> int:
    """Run; 2 if there are no results of the GPU."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks" / "results", metavar="DIR")
    parser.add_argument("--device", default=calibration.REFERENCE, choices=TABLE, metavar="NAME")
    parser.add_argument("--check", action="store_true", help="only cross-validate")
    parser.add_argument("--out", type=Path, metavar="FILE", help="default: the package's own")
    options = parser.parse_args(arguments)
    device = TABLE[options.device]
    try:
        data = read(options.results, device)
    except ValueError as error:
        print(f"fit_prediction: {error}", file=sys.stderr)
        return 2
    held_out, half, wide = {}, {}, {}
    for each in data:
        errors, expected = cross_validate(each)
        held_out[each.method] = summarise(each, errors)
        half[each.method] = within(errors, expected, 0.5)
        wide[each.method] = within(errors, expected, calibration.COVERAGE)
        for suite, found in held_out[each.method].items():
            print(
                f"{each.method:8} {suite:26} {found['rows']:4} rows: median {found['median']:6.1%}, "
                f"90th percentile {found['p90']:6.1%}"
            )
    if not options.check:
        path = options.out or calibration.path_of(device.name)
        path.write_text(
            text_of(device, sources(options.results, device), data, held_out, half, wide), encoding="utf-8"
        )
        print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
