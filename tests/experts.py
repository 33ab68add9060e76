"""Experts: their meaning in float64, layouts of their weights, and small models of transformers that have some."""

import os
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional as F

os.environ["HF_HUB_OFFLINE"] = "1"  # read when transformers is imported

from gemmery.moe import clamped_swiglu

#: Experts, columns of tokens, columns between the products, choices of a token; and an expert that nobody chooses.
EXPERTS, IN, HIDDEN, CHOICES, UNUSED = 5, 48, 32, 2, 3


def choices(tokens, experts=EXPERTS, k=CHOICES, seed=0):
    """Different experts for each token, and weights of them."""
    made = torch.Generator().manual_seed(seed)
    allowed = [x for x in range(experts) if x != UNUSED or experts <= UNUSED + 1]
    index = torch.stack([torch.randperm(len(allowed), generator=made)[:k] for _ in range(tokens)])
    return torch.tensor(allowed)[index], torch.rand(tokens, k, generator=made)


def meaning(x, index, weights, first, down, function, first_bias=None, down_bias=None):
    """Token by token; `function` is of the whole first product. Ids outside add nothing."""
    rows = []
    for token, chosen, factors in zip(x, index.tolist(), weights, strict=True):
        total = x.new_zeros(down.shape[1])
        for e, factor in zip(chosen, factors, strict=True):
            if 0 <= e < down.shape[0]:
                hidden = first[e] @ token if first_bias is None else first[e] @ token + first_bias[e]
                y = down[e] @ function(hidden)
                total = total + factor * (y if down_bias is None else y + down_bias[e])
        rows.append(total)
    return torch.stack(rows)


def gated(function):
    """A function of (gate, up) as one of the whole product."""
    return lambda acc: function(*acc.chunk(2, -1))


def alternating(x):
    """Rows of gate and up, one behind the other, as rows that alternate."""
    return torch.stack(x.chunk(2, 1), 2).flatten(1, 2)


#: By name: the arguments that a layout makes of weights and biases that are stacked, the gate's rows first.
LAYOUTS = {
    "stacked": lambda w, d, b: ((w, d), {"gate_up_bias": b}),
    "a pair": lambda w, d, b: ((w.chunk(2, 1), d), {"gate_up_bias": None if b is None else b.chunk(2, 1)}),
    "transposed": lambda w, d, b: (
        (w.mT.contiguous(), d.mT.contiguous()), {"gate_up_bias": b, "transposed": True},
    ),
    "alternating": lambda w, d, b: (
        (alternating(w), d), {"gate_up_bias": None if b is None else alternating(b), "concatenated": False},
    ),
    "alternating and transposed": lambda w, d, b: (
        (alternating(w).mT.contiguous(), d.mT.contiguous()),
        {"gate_up_bias": None if b is None else alternating(b), "concatenated": False, "transposed": True},
    ),
}  # fmt: skip

#: By name: what `experts` is given, and what it means for gate and up.
ACTIVATIONS = {
    "silu": ("silu", lambda gate, up: F.silu(gate) * up),
    "gelu_tanh": ("gelu_tanh", lambda gate, up: F.gelu(gate, approximate="tanh") * up),
    "clamped_swiglu": (clamped_swiglu, clamped_swiglu),
    "a function": (lambda gate, up: torch.tanh(gate) + up.abs(), lambda gate, up: torch.tanh(gate) + up.abs()),
}  # fmt: skip


def leaves(dtype=torch.float64, tokens=7, hidden=HIDDEN, biases=True, seed=0):
    """Tokens, stacked weights and biases."""
    torch.manual_seed(seed)
    shapes = [(tokens, IN), (EXPERTS, 2 * hidden, IN), (EXPERTS, IN, hidden)]
    shapes += [(EXPERTS, 2 * hidden), (EXPERTS, IN)] if biases else []
    made = [
        torch.randn(shape, dtype=torch.float64) / (shape[-1] ** 0.5 if len(shape) == 3 else 1)
        for shape in shapes
    ]
    return [x.to(dtype) for x in made]


# ---------------------------------------------------------------------------------------------------------------------
# Models

_COMMON = {
    "vocab_size": 50, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 32, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "num_experts_per_tok": 2,
    "attn_implementation": "eager",
}  # fmt: skip


@dataclass(frozen=True)
class Model:
    """A small model of transformers.

    Attributes:
        name: of its class, without what it is for.
        sizes: of its configuration.
        layers: how many of its layers have experts.
        experts: the class of these.
    """

    name: str
    sizes: dict[str, Any]
    layers: int
    experts: str

    def make(self, scale=5.0, **sizes):
        """The model for language, with larger weights than freshly initialised ones, whose experts would hardly show."""
        import transformers

        torch.manual_seed(0)
        config = getattr(transformers, f"{self.name}Config")(**_COMMON | self.sizes | sizes)
        made = getattr(transformers, f"{self.name}ForCausalLM")(config)
        with torch.no_grad():
            for name, parameter in made.named_parameters():
                if parameter.dim() > 1:
                    parameter.mul_(scale)
                elif name.endswith("bias"):
                    parameter.normal_()
        return made.eval()


MODELS = {
    "qwen3": Model(
        "Qwen3Moe",
        {"moe_intermediate_size": 32, "intermediate_size": 48, "num_experts": 6, "head_dim": 8},
        2, "Qwen3MoeExperts",
    ),
    "mixtral": Model("Mixtral", {"intermediate_size": 48, "num_local_experts": 4}, 2, "MixtralExperts"),
    "deepseek": Model(
        "DeepseekV3",
        {
            "moe_intermediate_size": 32, "intermediate_size": 48, "n_routed_experts": 8, "n_group": 2, "topk_group": 1,
            "n_shared_experts": 1, "first_k_dense_replace": 1, "kv_lora_rank": 8, "q_lora_rank": 8, "v_head_dim": 8,
            "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "num_key_value_heads": 4,
        },
        1, "DeepseekV3Experts",
    ),
    "gpt-oss": Model(
        "GptOss",
        {"intermediate_size": 32, "num_local_experts": 4, "head_dim": 8, "sliding_window": 8},
        2, "GptOssExperts",
    ),
}  # fmt: skip


def ids(rows=3, columns=7):
    return torch.randint(3, 50, (rows, columns), generator=torch.Generator().manual_seed(1))


def experts_of(model):
    """The modules of experts in a model, whichever."""
    return [x for x in model.modules() if "down_proj" in x._parameters]


def error(got, want):
    """The largest error, relative to the largest number."""
    return ((got.double() - want.double()).abs().max() / want.double().abs().max()).item()
