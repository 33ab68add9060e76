"""QLoRA: fine-tune adapters on a model whose weights are four-bit numbers, with transformers and peft.

    pip install . transformers peft
    python examples/qlora.py    # a small Llama with random weights, which learns this file
    python examples/qlora.py --model meta-llama/Llama-3.2-1B --text my.txt --out adapter

The linear layers are quantized to nf4 while the model is loaded, and stay as they are. peft puts an adapter of two thin
matrices on each, and only these are trained. `gemmery.nn.peft.register` makes each layer and its adapter one call:
forward, the weight is multiplied as it is packed, and the adapter is added in the same kernel; backward, the weight is
unpacked for one product and freed. The adapters are saved as any of peft's, and loaded onto the quantized model again.

Without a GPU the same runs in torch, with smaller sizes.
"""

import argparse
import tempfile
import time
from pathlib import Path

import torch
from torch import Tensor

try:
    from peft import LoraConfig, PeftModel, get_peft_model
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM
except ImportError as missing:
    raise SystemExit(
        f"{missing}; this example needs transformers and peft: pip install transformers peft"
    ) from missing

import gemmery.nn
from gemmery.nn.peft import register
from gemmery.nn.transformers import GemmeryConfig

#: What gets an adapter: all linear layers of a Llama's blocks.
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
#: Of a model with random weights: hidden size, layers, sequences at a time, and their length.
SMALL, LARGE = (64, 2, 4, 32), (2048, 8, 4, 1024)


def random_model(hidden: int, layers: int, device: str) -> LlamaForCausalLM:
    """A Llama over bytes, quantized; the same one each time."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256, hidden_size=hidden, intermediate_size=3 * hidden, num_hidden_layers=layers,
        num_attention_heads=hidden // 64, num_key_value_heads=max(hidden // 256, 1),
    )  # fmt: skip
    with torch.device(device):
        model = LlamaForCausalLM(config).bfloat16()
    gemmery.nn.quantize(model, "nf4")
    return model


def adapted(model: torch.nn.Module, rank: int, dropout: float) -> PeftModel:
    """The model with adapters, which alone are trained, and with activations recomputed in the backward pass."""
    config = LoraConfig(
        r=rank, lora_alpha=2 * rank, lora_dropout=dropout, target_modules=list(TARGETS), task_type="CAUSAL_LM"
    )
    model = get_peft_model(model, register(config))
    model.enable_input_require_grads()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model


def batches(tokens: Tensor, count: int, length: int, steps: int) -> list[Tensor]:
    """Pieces of a text at random places."""
    draws = torch.Generator().manual_seed(0)
    last = max(len(tokens) - length, 1)
    starts = torch.randint(last, (steps, count), generator=draws).tolist()
    return [torch.stack([tokens[i : i + length] for i in row]) for row in starts]


def train(model: PeftModel, data: list[Tensor], rate: float) -> list[float]:
    """The loss of each step."""
    device = next(model.parameters()).device
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=rate)
    losses = []
    model.train()
    for step, batch in enumerate(data):
        begun = time.perf_counter()
        ids = batch.to(device)
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if step % 10 == 0 or step == len(data) - 1:
            rate_of = ids.numel() / (time.perf_counter() - begun)
            print(f"step {step:4}: loss {losses[-1]:.3f}, {rate_of:.0f} tokens/s")
    return losses


@torch.no_grad()
def loss_of(model: torch.nn.Module, batch: Tensor) -> float:
    """A loss without dropout."""
    ids = batch.to(next(model.parameters()).device)
    return float(model.eval()(input_ids=ids, labels=ids).loss)


def main() -> None:
    """Load, train, save, and load again."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model", help="a causal language model of transformers; by default a small random one"
    )
    parser.add_argument(
        "--text", type=Path, default=Path(__file__), help="what is learned; by default this file"
    )
    parser.add_argument("--out", type=Path, help="where the adapters go; by default to a temporary folder")
    parser.add_argument("--steps", type=int, help="by default 200 on a GPU, and 20 elsewhere")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--dropout", type=float, default=0.05)
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    hidden, layers, count, length = LARGE if device == "cuda" else SMALL
    steps = args.steps or (200 if device == "cuda" else 20)
    text = args.text.read_text()

    def base() -> torch.nn.Module:
        if args.model is None:
            return random_model(hidden, layers, device)
        how = {"quantization_config": GemmeryConfig("nf4", group_size=64), "dtype": torch.bfloat16}
        return AutoModelForCausalLM.from_pretrained(args.model, device_map=device, **how)

    if args.model is None:
        tokens = torch.tensor(list(text.encode()))
    else:
        tokens = AutoTokenizer.from_pretrained(args.model)(text, return_tensors="pt").input_ids[0]
    length = min(length, len(tokens))
    data = batches(tokens, count, length, steps)
    model = adapted(base(), args.rank, args.dropout)
    model.print_trainable_parameters()
    before = loss_of(model, data[0])
    train(model, data, 1e-3 if args.model is None else 2e-4)
    after = loss_of(model, data[0])
    print(f"loss of the first batch: {before:.3f} before, {after:.3f} after")
    if device == "cuda":
        print(f"peak memory: {torch.cuda.max_memory_allocated() / 2**30:.2f} GiB")

    with tempfile.TemporaryDirectory() as temporary:
        folder = args.out or Path(temporary)
        model.save_pretrained(folder)
        # The adapters do not say what their layers are computed with.
        config = register(LoraConfig.from_pretrained(folder))
        again = PeftModel.from_pretrained(base(), folder, config=config)
        print(f"saved, and loaded again: {loss_of(again, data[0]):.3f}")


if __name__ == "__main__":
    main()
