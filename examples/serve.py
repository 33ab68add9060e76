"""Quantize a model of transformers, save it, load it again and generate text for a batch of prompts.

    pip install . transformers
    python examples/serve.py    # a small Llama with random weights
    python examples/serve.py --model meta-llama/Llama-3.2-1B --format int4 --out packed

`from_pretrained` quantizes each weight as it is read, so the 16-bit model is never in memory as a whole.
`save_pretrained` writes the packed weights. The loaded model gives the same logits, bit for bit. `gemmery.nn.swap` then
fuses gate, up and activation of each feed-forward block.

Without a GPU the same runs in torch, with smaller sizes.
"""

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

try:
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM
except ImportError as missing:
    raise SystemExit(f"{missing}; this example needs transformers: pip install transformers") from missing

import gemmery.nn
from gemmery.nn.transformers import GemmeryConfig

#: Of a model with random weights: hidden size and layers.
SMALL, LARGE = (128, 2), (2048, 16)
PROMPTS = ["GEMM is", "A kernel that reads", "The weights of a model"]


class Bytes:
    """A tokenizer for models over bytes, as far as this example uses one."""

    def __call__(self, texts: list[str], **how: Any) -> dict[str, Tensor]:
        """Ids and mask, padded on the left."""
        rows = [list(text.encode()) for text in texts]
        longest = max(map(len, rows))
        pads = [longest - len(row) for row in rows]
        return {
            "input_ids": torch.tensor([[0] * pad + row for pad, row in zip(pads, rows, strict=True)]),
            "attention_mask": torch.tensor([[0] * pad + [1] * (longest - pad) for pad in pads]),
        }

    def batch_decode(self, ids: Tensor, **how: Any) -> list[str]:
        """The texts of rows of ids."""
        return [bytes(row).decode(errors="replace") for row in ids.tolist()]


def save_random_model(folder: Path, hidden: int, layers: int, device: str) -> None:
    """Write a Llama over bytes in bfloat16, the same one each time."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256, hidden_size=hidden, intermediate_size=4 * hidden, num_hidden_layers=layers,
        num_attention_heads=hidden // 64, num_key_value_heads=max(hidden // 256, 1), bos_token_id=None,
        eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    with torch.device(device):
        LlamaForCausalLM(config).bfloat16().save_pretrained(folder)


def mebibytes(model: nn.Module) -> float:
    """The size of all parameters; a packed weight counts its words and scales."""
    return sum(x.nbytes for x in model.parameters()) / 2**20


def generate(model: Any, tokenizer: Any, inputs: dict[str, Tensor], count: int) -> None:
    """Print `count` more tokens of each prompt, and the speed."""
    model.generate(**inputs, max_new_tokens=2, do_sample=False)  # compiles what is not compiled yet
    begun = time.perf_counter()
    ids = model.generate(**inputs, max_new_tokens=count, do_sample=False)
    taken = time.perf_counter() - begun
    new = ids[:, inputs["input_ids"].shape[1] :]
    for prompt, text in zip(PROMPTS, tokenizer.batch_decode(new, skip_special_tokens=True), strict=True):
        print(f"  {prompt!r} -> {text!r}")
    print(f"generated {new.numel()} tokens, {new.numel() / taken:.0f} tokens/s")


@torch.inference_mode()
def main() -> None:
    """Quantize, save, load, swap and generate."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model", help="a causal language model of transformers; by default a small random one"
    )
    parser.add_argument("--format", default="int4", help="int4, nf4, mxfp4, e4m3, ...; by default int4")
    parser.add_argument(
        "--out", type=Path, help="where the packed model goes; by default to a temporary folder"
    )
    parser.add_argument("--tokens", type=int, default=32, help="how many are generated for each prompt")
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"

    with tempfile.TemporaryDirectory() as temporary:
        source, packed = args.model or Path(temporary) / "dense", args.out or Path(temporary) / "packed"
        if args.model is None:
            save_random_model(source, *(LARGE if device == "cuda" else SMALL), device)
            tokenizer: Any = Bytes()
        else:
            tokenizer = AutoTokenizer.from_pretrained(source, padding_side="left")
            tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
        inputs = {
            name: x.to(device) for name, x in tokenizer(PROMPTS, padding=True, return_tensors="pt").items()
        }

        how = {"dtype": torch.bfloat16, "device_map": device}
        model = AutoModelForCausalLM.from_pretrained(
            source, quantization_config=GemmeryConfig(args.format), **how
        )
        print(model.hf_quantizer.report)
        print(f"{mebibytes(model):.1f} MiB of parameters")
        model.save_pretrained(packed)
        again = AutoModelForCausalLM.from_pretrained(packed, **how)
        alike = torch.equal(again(**inputs).logits, model(**inputs).logits)
        print(f"saved and loaded again: the logits are {'the same' if alike else 'different'}")

        print(gemmery.nn.swap(again))
        generate(again, tokenizer, inputs, args.tokens)


if __name__ == "__main__":
    main()
