"""A compiled model that picks gemmery: torch.compile's max-autotune with gemmery among the kernels that it measures.

    pip install . transformers
    python examples/compiled_model.py    # a small Llama with random weights
    python examples/compiled_model.py --model meta-llama/Llama-3.2-1B --tokens 512

The model is not changed. `gemmery.compile.enable` has Inductor measure gemmery beside torch's kernels and its own
templates, for each product of the model, and the compiled code calls what was the fastest. This program compiles the
model without gemmery and with it, prints what was measured, and compares both with the model as it is.

Compilation takes several seconds for each distinct product, most of it for Inductor's templates. Without a GPU, there
is nothing to choose: max-autotune is left out, and the program only shows that the compiled model computes the same.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor

try:
    from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
except ImportError as missing:
    raise SystemExit(f"{missing}; this example needs transformers: pip install transformers") from missing

import gemmery.compile

#: Of a model with random weights: hidden size and layers.
SMALL, LARGE = (64, 2), (2048, 4)
ROUNDS, CALLS = 7, 20

Call = Callable[[Tensor], Tensor]


def random_model(hidden: int, layers: int) -> LlamaForCausalLM:
    """A Llama with the proportions of Llama 3."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=16 * hidden, hidden_size=hidden, intermediate_size=4 * hidden, num_hidden_layers=layers,
        num_attention_heads=hidden // 64, num_key_value_heads=max(hidden // 256, 1),
    )  # fmt: skip
    return LlamaForCausalLM(config).bfloat16()


def logits(model: torch.nn.Module) -> Call:
    """The model as a function of its tokens."""

    def run(ids: Tensor) -> Tensor:
        return model(ids, use_cache=False).logits

    return run


def compiled(model: torch.nn.Module, ids: Tensor) -> Call:
    """The function, compiled by its first call."""
    # All that was compiled before is forgotten; without it, the code without gemmery would be used again.
    torch.compiler.reset()
    how = {"mode": "max-autotune"} if ids.is_cuda else {"backend": "aot_eager"}
    call = torch.compile(logits(model), dynamic=False, **how)
    begun = time.perf_counter()
    call(ids)
    print(f"compiled in {time.perf_counter() - begun:.1f} s")
    return call


def seconds(call: Call, ids: Tensor) -> float:
    """The median time of a call on the GPU."""
    times = []
    for _ in range(ROUNDS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        call(ids)
        begin.record()
        for _ in range(CALLS):
            call(ids)
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) / 1e3 / CALLS)
    return statistics.median(times)


@torch.no_grad()
def main() -> None:
    """Compile without gemmery and with it, and compare."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", help="a causal language model of transformers; by default a random one")
    parser.add_argument(
        "--tokens", type=int, help="of the one sequence; by default 512 on a GPU, and 16 elsewhere"
    )
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if args.model is None:
        model = random_model(*(LARGE if device == "cuda" else SMALL))
    else:
        model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.bfloat16)
    model = model.to(device).eval()
    tokens = args.tokens or (512 if device == "cuda" else 16)
    ids = torch.randint(model.config.vocab_size, (1, tokens), device=device)
    eager = logits(model)(ids).float()

    times = {}
    for name in ("without gemmery", "with gemmery"):
        print(f"{name}: ", end="", flush=True)
        if name == "with gemmery":
            gemmery.compile.enable()
        call = compiled(model, ids)
        made = call(ids).float()
        print(f"  relative difference to the eager model: {float((made - eager).norm() / eager.norm()):.1e}")
        if device == "cuda":
            times[name] = seconds(call, ids)
            print(f"  {times[name] * 1e6:.1f} µs per call")
    gemmery.compile.disable()

    if device == "cpu":
        print("Not shown without a GPU: max-autotune, which measures kernels, and gemmery among them.")
        return
    print("\nWhat Inductor measured: gemmery and the fastest other kernel of each product")
    for offer in gemmery.compile.choices():
        print(f"  {offer}")
    print(f"\n{times['without gemmery'] / times['with gemmery']:.3f} times the speed")


if __name__ == "__main__":
    main()
