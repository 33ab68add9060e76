"""Reinforcement learning on policy: sampling and training compute the same log-probabilities, bit for bit.

    pip install . transformers
    python examples/same_log_probs.py    # a small Llama with random weights

A policy is sampled token by token, with a cache, in one batch. It is trained on the same tokens, in whole sequences and
in smaller batches. A BLAS chooses its kernel by the number of rows, and other kernels add in other orders. The
log-probabilities of training therefore differ from those of sampling, and their ratio, which a policy gradient
multiplies, is not 1. Inside `gemmery.batch_invariant()`, every matrix product gives a row the same bits in each batch.

A model also adds up numbers in its norms, its softmax and its loss. torch's kernels for these sums depend on the number
of rows too. Here, each of these sums is a product with a column of ones, which gemmery computes. The rest is
elementwise, or a maximum, which does not depend on the order. Attention always runs over all places of the cache: the
places behind a token have weight 0.

Without a GPU the same runs in torch, row by row, with smaller sizes.
"""

import argparse
import contextlib

import torch
from torch import Tensor, nn

try:
    from transformers import AttentionInterface, LlamaConfig, LlamaForCausalLM, StaticCache
    from transformers.masking_utils import AttentionMaskInterface, eager_mask
    from transformers.models.llama.modeling_llama import LlamaRMSNorm
except ImportError as missing:
    raise SystemExit(f"{missing}; this example needs transformers: pip install transformers") from missing

import gemmery

#: Hidden size, layers, sequences, tokens of a prompt, all tokens of a sequence, sequences in a step of training.
SMALL, LARGE = (64, 2, 6, 4, 16, 2), (1024, 8, 24, 16, 128, 8)


def row_sums(x: Tensor) -> Tensor:
    """(..., N) to (..., 1): a matrix product, so that gemmery determines the order of the sum."""
    return x @ x.new_ones(x.shape[-1], 1)


class Norm(LlamaRMSNorm):
    """Llama's norm, with its sum as a product."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        """(..., N) to (..., N)."""
        x = hidden_states.float()
        mean = row_sums(x * x) / x.shape[-1]
        return self.weight * (x * torch.rsqrt(mean + self.variance_epsilon)).to(hidden_states.dtype)


def attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor, scaling: float, **_: object
) -> tuple[Tensor, None]:  # fmt: skip
    """Attention, (B, heads, T, D) to (B, T, heads, D), with the sums of its softmax as products."""
    groups = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(groups, dim=1) for x in (key, value))
    scores = (query @ key.mT).float() * scaling + attention_mask
    weights = torch.exp(scores - scores.amax(-1, keepdim=True).detach())
    y = (weights / row_sums(weights)).to(value.dtype) @ value
    return y.transpose(1, 2).contiguous(), None


def log_probs(logits: Tensor, tokens: Tensor) -> Tensor:
    """The log-probabilities of tokens (B, T), from logits (B, T, vocabulary)."""
    z = logits.float()
    z = z - z.amax(-1, keepdim=True).detach()
    return (z.gather(-1, tokens[..., None]) - row_sums(z.exp()).log()).squeeze(-1)


def policy(hidden: int, layers: int, device: str, dtype: torch.dtype) -> LlamaForCausalLM:
    """A Llama over bytes with random weights, the same one each time."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256, hidden_size=hidden, intermediate_size=3 * hidden, num_hidden_layers=layers,
        num_attention_heads=hidden // 32, num_key_value_heads=hidden // 64,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    for path, module in list(model.named_modules()):
        if isinstance(module, LlamaRMSNorm):
            model.set_submodule(path, Norm(module.weight.numel(), module.variance_epsilon))
    AttentionInterface.register("sums_as_products", attention)
    AttentionMaskInterface.register("sums_as_products", eager_mask)
    model.set_attn_implementation("sums_as_products")
    return model.to(device, dtype)


@torch.no_grad()
def sample(model: LlamaForCausalLM, prompts: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """Tokens (B, length) that begin with the prompts, and the log-probabilities of those that were sampled."""
    cache = StaticCache(config=model.config, max_cache_len=length)
    draws = torch.Generator(prompts.device).manual_seed(1)
    tokens, found = prompts, []
    given = prompts
    while tokens.shape[1] < length:
        logits = model(input_ids=given, past_key_values=cache, use_cache=True, logits_to_keep=1).logits
        given = torch.multinomial(logits[:, -1].float().softmax(-1), 1, generator=draws)
        found.append(log_probs(logits, given))
        tokens = torch.cat((tokens, given), dim=1)
    return tokens, torch.cat(found, dim=1)


def train(model: LlamaForCausalLM, tokens: Tensor, sampled: Tensor, count: int) -> Tensor:
    """One step of a policy gradient, `count` sequences at a time; returns the log-probabilities that it computed."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    rewards = (tokens[:, -sampled.shape[1] :] == ord("e")).float()
    advantages = rewards - rewards.mean()
    found = []
    for ids, old, advantage in zip(
        tokens.split(count), sampled.split(count), advantages.split(count), strict=True
    ):
        logits = model(input_ids=ids, use_cache=False).logits[:, -sampled.shape[1] - 1 : -1]
        new = log_probs(logits, ids[:, -sampled.shape[1] :])
        loss = -((new - old).exp() * advantage).sum() / sampled.numel()
        loss.backward()
        found.append(new.detach())
    optimizer.step()
    return torch.cat(found)


def main() -> None:
    """Sample and train, without batch invariance and with it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=2, help="steps of sampling and training")
    steps = parser.parse_args().steps
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    hidden, layers, sequences, start, length, count = LARGE if device == "cuda" else SMALL

    for name, context in (("torch's products", contextlib.nullcontext), ("gemmery", gemmery.batch_invariant)):
        model = policy(hidden, layers, device, dtype)
        draws = torch.Generator().manual_seed(2)
        for step in range(steps):
            prompts = torch.randint(256, (sequences, start), generator=draws).to(device)
            with context():
                tokens, sampled = sample(model, prompts, length)
                trained = train(model, tokens, sampled, count)
            difference = (trained - sampled).expm1().abs().max().item()
            print(
                f"{name}, step {step}: {int((trained != sampled).sum())} of {sampled.numel()} log-probabilities "
                f"differ, the ratio is off 1 by up to {difference:.1e}"
            )


if __name__ == "__main__":
    main()
