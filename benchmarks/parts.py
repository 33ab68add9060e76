"""The shared parts of benchmarks: the command line, the files, and calls that take turns.

A part is a function that yields entries. An entry has at least a name, and the seconds of all rounds by method.
"""

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from gemmery.lab.results import describe_run
from gemmery.lab.timing import compare

Entry = dict[str, Any]
Call = Callable[[], Any]
Parts = Mapping[str, Callable[[], Iterator[Entry]]]


def compared(methods: Mapping[str, Call], rounds: int, regime: str = "burst") -> dict[str, list[float]]:
    """Seconds by method and round, in a regime of `gemmery bench`."""
    found = compare(methods, rounds=rounds, regimes=(regime,))[regime]
    return {name: [each[name] for each in found] for name in methods}


def in_turn(methods: Mapping[str, Call], calls: int, rounds: int) -> dict[str, list[float]]:
    """Seconds a call, by method and round: `calls` in a row between two events, after one that is not timed."""
    times: dict[str, list[float]] = {name: [] for name in methods}
    for call in methods.values():
        call()
        call()
    for _ in range(rounds):
        for name in random.sample(list(methods), len(methods)):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            methods[name]()
            torch.cuda.synchronize()
            begin.record()
            for _ in range(calls):
                methods[name]()
            end.record()
            torch.cuda.synchronize()
            times[name].append(begin.elapsed_time(end) / 1e3 / calls)
    return times


def run(about: str | None, parts: Parts, out: Path, **more: Any) -> None:
    """Measure the parts that are asked for, and write after every entry, so that what was measured is kept.

    Args:
        about: the script's docstring, for --help.
        parts: by name, in the order in which they are measured.
        out: the folder of the files, by default.
        **more: further values of each file.
    """
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=parts, action="append", metavar="PART", help=", ".join(parts))
    parser.add_argument("--out", type=Path, default=out, metavar="DIR")
    options = parser.parse_args()
    header = describe_run(0, 0, (), "cuda", ())
    kept = {key: header[key] for key in ("gpu", "torch", "triton", "cuda", "commit", "date")}
    options.out.mkdir(parents=True, exist_ok=True)
    for part in options.only or parts:
        begun, entries = time.time(), []
        for entry in parts[part]():
            entries.append(entry)
            _show(entry)
            rounds = min((len(each) for one in entries for each in one["times"].values()), default=0)
            result = {"part": part, **kept, **more, "protocol": {"rounds": rounds}, "entries": entries}
            text = json.dumps(result, indent=1, ensure_ascii=False)
            (options.out / f"{part}.json").write_text(text + "\n", encoding="utf-8")
        print(f"{part}: {time.time() - begun:.0f} s", flush=True)


def _show(entry: Entry) -> None:
    shown = {name: f"{statistics.median(times) * 1e6:.1f}" for name, times in entry["times"].items()}
    left_out = [f"left out: {entry['left_out']}"] if entry.get("left_out") else []
    print(entry.get("kind", ""), entry["name"], "µs:", shown, *left_out, flush=True)
