"""A mixture-of-experts model of transformers whose experts gemmery computes: trained, then quantized.

    pip install . transformers
    python examples/mixture_of_experts.py    # a small Qwen3-MoE with random weights, which learns this file

transformers selects by name what computes a model's experts. `gemmery.nn.register_experts` adds the name "gemmery":
tokens are sorted by expert, and two grouped products compute all experts, with the activation inside the first. The
model itself does not change, so it trains, saves and loads as before. For inference, `gemmery.nn.quantize` packs the
weights of the experts and the other linear layers.

Without a GPU the same runs in torch, with smaller sizes.
"""

import argparse
import time
from pathlib import Path

import torch
from torch import Tensor, nn

try:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM
except ImportError as missing:
    raise SystemExit(f"{missing}; this example needs transformers: pip install transformers") from missing

import gemmery.nn

#: Hidden size, width of an expert, experts, layers, and tokens of a sequence.
SMALL, LARGE = (64, 64, 8, 2, 64), (2048, 768, 64, 4, 1024)
#: The implementations that are compared: transformers' own for training, and gemmery's.
NAMES = ("grouped_mm", "gemmery")


def random_model(hidden: int, width: int, experts: int, layers: int, device: str) -> Qwen3MoeForCausalLM:
    """A Qwen3-MoE over bytes in bfloat16, the same one each time."""
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=256, hidden_size=hidden, intermediate_size=2 * hidden, moe_intermediate_size=width,
        num_experts=experts, num_experts_per_tok=4, num_hidden_layers=layers, num_attention_heads=hidden // 32,
        num_key_value_heads=hidden // 32, head_dim=32, norm_topk_prob=True, bos_token_id=None, eos_token_id=None,
        pad_token_id=None,
    )  # fmt: skip
    with torch.device(device):
        return Qwen3MoeForCausalLM(config).bfloat16()


def mebibytes(model: nn.Module) -> float:
    """The size of all parameters; a packed weight counts its words and scales."""
    return sum(x.nbytes for x in model.parameters()) / 2**20


def loss_and_time(model: Qwen3MoeForCausalLM, ids: Tensor) -> str:
    """The loss, and on a GPU the time of a forward and backward pass, the least of three."""
    times = []
    for _ in range(4 if ids.is_cuda else 1):
        begun = time.perf_counter()
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        model.zero_grad()
        found = loss.item()  # waits for the GPU
        times.append(time.perf_counter() - begun)
    return f"loss {found:.3f}" + (f", {min(times[1:]) * 1e3:.1f} ms" if ids.is_cuda else "")


def train(model: Qwen3MoeForCausalLM, ids: Tensor, steps: int) -> tuple[float, float]:
    """The losses before and after some steps on the same tokens."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for _ in range(steps + 1):
        loss = model(input_ids=ids, labels=ids).loss
        losses.append(loss.item())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return losses[0], losses[-1]


def main() -> None:
    """Compare implementations, train, quantize and generate."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=10, help="steps of training")
    parser.add_argument("--format", default="mxfp4", help="int4, nf4, mxfp4, e4m3, ...; by default mxfp4")
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    *sizes, length = LARGE if device == "cuda" else SMALL
    model = random_model(*sizes, device)
    text = Path(__file__).read_bytes()[: 4 * length]
    ids = torch.tensor(list(text[: len(text) // length * length]), device=device).view(-1, length)

    gemmery.nn.register_experts()
    for name in NAMES:
        model.set_experts_implementation(name)
        print(f"{name}: {loss_and_time(model, ids)}")

    before, after = train(model, ids, args.steps)
    print(f"trained {args.steps} steps: loss {before:.3f} before, {after:.3f} after")

    model.eval()
    dense = mebibytes(model)
    print(gemmery.nn.quantize(model, args.format))
    with torch.inference_mode():
        loss = model(input_ids=ids, labels=ids).loss.item()
        new = model.generate(ids[:, :16], max_new_tokens=16, do_sample=False)[:, 16:]
    print(f"quantized to {args.format}: loss {loss:.3f}, {mebibytes(model):.1f} MiB instead of {dense:.1f}")
    print(f"generated: {bytes(new[0].tolist()).decode(errors='replace')!r}")


if __name__ == "__main__":
    main()
