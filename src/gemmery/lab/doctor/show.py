"""An examination on a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

#: The ways in which kernels run, in words.
_WAYS = {
    "compiled": "compiled for the GPU",
    "interpreted": "interpreted on the CPU",
    "reference": "no kernels run; torch computes the products",
}


def show(found: dict[str, Any], console: Console) -> None:
    """Print what `examine` found."""
    _software(found, console)
    _heading(console, "kernels")
    _say(console, _WAYS[found["kernels"]])
    _trials(found["trials"], console)
    if found["gpus"]:
        _gpus(found["gpus"], console)
    _heading(console, "targets that this machine can compile for")
    for target in found["targets"]:
        state = "" if target["compiles"] else " (this Triton has no such backend)"
        _say(console, f"{target['name']:8} {'; '.join(target['cannot']) or 'everything'}{state}")
    _findings(
        found["limits"], console, "what this machine can't do, and what runs instead", "nothing is missing"
    )
    if found["broken"]:
        _findings(found["broken"], console, "[red]broken[/]", "")
    else:
        _heading(console, "[green]nothing is broken[/]")


def _say(console: Console, text: str) -> None:
    console.print(escape(text), soft_wrap=True, highlight=False)


def _heading(console: Console, text: str) -> None:
    console.print(f"\n[bold]{text}[/]")


def _software(found: dict[str, Any], console: Console) -> None:
    python = found["python"]
    _say(console, f"Python {python['version']}, {python['platform']}")
    _say(console, ", ".join(f"{name} {has}" for name, has in found["versions"].items()))
    _say(console, ", ".join(f"{name} {has or 'not installed'}" for name, has in found["optional"].items()))
    toolkit = [f"{name.upper()} {has}" for name, has in found["torch"].items() if has]
    _say(console, f"torch was built for {', '.join(toolkit) or 'the CPU alone'}")
    for name, path in found["tools"].items():
        _say(console, f"{name}: {path or 'none'}")
    cache = found["cache"]
    _say(console, f"kernel cache: {cache['path']}, {cache['free'] / 2**30:.0f} GiB free")
    _say(console, f"store of timings: {_store(found['store'])}")
    for name, value in found["variables"].items():
        _say(console, f"{name}={value}")


def _store(store: dict[str, Any]) -> str:
    if not store["on"]:
        return "turned off"
    if store["path"] is None:
        return "in memory alone"
    held = [f"{n} of {device}" for device, n in store["timings"].items()]
    stale = sum(store["stale"].values())
    old = [f"{stale} of other versions"] if stale else []
    return f"{store['path']}: {', '.join([*held, *old]) or 'no timings'}"


def _trials(trials: Sequence[dict[str, Any]], console: Console) -> None:
    table = Table("device", "type", "ran")
    table.add_column("error", justify="right")
    for trial in trials:
        error = "" if trial["error"] is None else f"{trial['error']:.1e}"
        table.add_row(trial["device"], trial["dtype"], escape(trial["ran"]), error)
    console.print(table)


def _gpus(gpus: Sequence[dict[str, Any]], console: Console) -> None:
    _heading(console, "GPUs, and what the selector believes of them")
    table = Table("", "name", "arch")
    for name in ("SMs", "memory", "L2", "bandwidth", "16 bit", "fp32"):
        table.add_column(name, justify="right")
    for gpu in gpus:
        row, known = gpu["row"], ["unknown", *[""] * 4]
        sizes = (str(gpu["sms"]), f"{gpu['memory'] / 2**30:.0f} GiB")
        if row is not None:
            known = [
                row["arch"],
                f"{row['l2'] / 2**20:.0f} MiB",
                f"{row['bandwidth'] / 1e12:.2f} TB/s",
                f"{row['fp16'] / 1e12:.0f} TFLOP/s",
                f"{row['fp32'] / 1e12:.0f} TFLOP/s",
            ]
        table.add_row(str(gpu["index"]), gpu["name"], known[0], *sizes, *known[1:])
    console.print(table)
    for gpu in gpus:
        for name, how in gpu["runs"].items():
            _say(console, f"GPU {gpu['index']}, {name}: {how}")
        if gpu["tables"]:
            _say(console, f"GPU {gpu['index']}, measured times shipped: {', '.join(gpu['tables'])}")


def _findings(found: Sequence[dict[str, str]], console: Console, heading: str, nothing: str) -> None:
    _heading(console, heading)
    if not found:
        _say(console, nothing)
    for finding in found:
        _say(console, f"- {finding['what']}: {finding['instead']}")
        _say(console, f"    → {finding['advice']}")
