"""Measure on a GPU what suites of products do not show: blocks, models, what an epilogue costs, and first calls.

python benchmarks/models.py [--only PART] [--out DIR]      needs transformers; writes a file a part

Every entry has the times of all rounds, in seconds; methods of an entry run in turn, in a new order each round.
"""

import copy
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT)]

import gemmery  # noqa: E402
import gemmery.nn as gnn  # noqa: E402
from benchmarks.parts import Call, Entry, compared, in_turn, run  # noqa: E402
from gemmery import epilogues  # noqa: E402

OUT = ROOT / "benchmarks" / "results" / "models"
ROUNDS = 7
#: Llama-3-8B: width, hidden width of its feed-forward blocks.
WIDTH, HIDDEN = 4096, 14336
#: Of about 1.2 billion parameters, with Llama 3's vocabulary.
LLAMA = {
    "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32,
    "num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 4096, "attn_implementation": "sdpa",
    "tie_word_embeddings": True,
}  # fmt: skip


def filled(*shape: int) -> Tensor:
    """Normal random numbers in bfloat16."""
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


# ---------------------------------------------------------------------------------------------------------------------
# What epilogues cost


def costs() -> Iterator[Entry]:
    """Each ready-made elementwise epilogue beside the bare product."""
    m = 4096
    x, w = filled(m, WIDTH), filled(HIDDEN, WIDTH) / WIDTH**0.5
    rows, columns, matrix = torch.rand(m, 1, device="cuda"), filled(HIDDEN), filled(m, HIDDEN)
    given: dict[str, tuple[Any, ...]] = {
        "bias": (columns,), "column_scale": (columns,), "row_scale": (rows,), "relu": (), "relu_squared": (),
        "gelu": (), "gelu_tanh": (), "silu": (), "sigmoid": (), "tanh": (), "softcap": (30.0,), "residual": (matrix,),
        "logsumexp": (),
    }  # fmt: skip

    def fused(name: str) -> Call:
        return lambda: gemmery.linear(x, w, epilogue=getattr(epilogues, name), args=given[name])

    methods = {"bare": lambda: gemmery.linear(x, w), **{name: fused(name) for name in given}}
    yield {"name": f"epilogues, {m}×{HIDDEN}×{WIDTH}", "times": compared(methods, ROUNDS)}


# ---------------------------------------------------------------------------------------------------------------------
# A feed-forward block, trained


class Plain(nn.Module):
    """A gated block as models have it."""

    def __init__(self) -> None:
        super().__init__()
        how = {"bias": False, "device": "cuda", "dtype": torch.bfloat16}
        self.gate, self.up = nn.Linear(WIDTH, HIDDEN, **how), nn.Linear(WIDTH, HIDDEN, **how)
        self.down = nn.Linear(HIDDEN, WIDTH, **how)

    def forward(self, x: Tensor) -> Tensor:
        """(M, WIDTH) to (M, WIDTH)."""
        return self.down(F.silu(self.gate(x)) * self.up(x))


def gated() -> Iterator[Entry]:
    """Forward and backward of a block at 8192 tokens, and the memory that it holds between the two."""
    m = 8192
    plain = Plain()
    ours = gnn.GatedMLP(WIDTH, HIDDEN, stacked=True, device="cuda", dtype=torch.bfloat16)
    with torch.no_grad():
        ours.gate_up.weight.copy_(torch.cat((plain.gate.weight, plain.up.weight)))
        ours.down.weight.copy_(plain.down.weight)
    blocks = {"gemmery": ours, "compile": torch.compile(plain), "eager": plain}
    x, gradient = filled(m, WIDTH).requires_grad_(), filled(m, WIDTH)

    def step(block: nn.Module) -> Call:
        def run() -> None:
            x.grad = None
            block.zero_grad(set_to_none=True)
            block(x).backward(gradient)

        return run

    held = {}
    for name, block in blocks.items():
        step(block)()
        x.grad = None
        block.zero_grad(set_to_none=True)
        before = torch.cuda.memory_allocated()
        y = block(x)
        held[name] = torch.cuda.memory_allocated() - before - y.numel() * y.element_size()
        del y
    times = in_turn({name: step(block) for name, block in blocks.items()}, 10, ROUNDS)
    yield {
        "name": f"GatedMLP, forward and backward, M={m}",
        "times": times,
        "held_bytes": held,
    }


# ---------------------------------------------------------------------------------------------------------------------
# A model


def llama() -> Iterator[Entry]:
    """A Llama, swapped: a prompt, and a step of decoding in a CUDA graph."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(**LLAMA)
    with torch.device("cuda"):
        eager = LlamaForCausalLM(config).to(torch.bfloat16).eval()
    ours = copy.deepcopy(eager)
    report = str(gnn.swap(ours))
    models = {
        "gemmery": ours, "eager": eager, "compile": torch.compile(eager), "gemmery compiled": torch.compile(ours),
    }  # fmt: skip
    ids = torch.randint(0, config.vocab_size, (8, 1024), device="cuda")

    def prompt(model: Any) -> Call:
        return lambda: model(ids, use_cache=False, logits_to_keep=1).logits

    with torch.no_grad():
        times = in_turn({name: prompt(model) for name, model in models.items()}, 5, ROUNDS)
        yield {
            "name": "Llama of 1.2B, prompts of 8×1024 tokens",
            "times": times,
            "swap": report,
        }
        steps = {name: _decoding(model, config) for name, model in models.items()}
        times = in_turn({name: graph.replay for name, (graph, _) in steps.items()}, 25, ROUNDS)
        yield {"name": "Llama of 1.2B, decoding 16 rows in a CUDA graph", "times": times}


def _decoding(model: Any, config: Any, rows: int = 16, past: int = 512) -> tuple[torch.cuda.CUDAGraph, Any]:
    """A graph of one step behind `past` tokens, and what must live as long as it does."""
    from transformers.cache_utils import StaticCache

    cache = StaticCache(config=config, max_cache_len=past + 64)
    token = torch.randint(0, config.vocab_size, (rows, 1), device="cuda")
    position = torch.full((rows, 1), past, device="cuda")
    model(
        torch.randint(0, config.vocab_size, (rows, past), device="cuda"),
        past_key_values=cache,
        logits_to_keep=1,
    )

    def step() -> Tensor:
        for layer in cache.layers:
            layer.cumulative_length.fill_(past)  # each replay is the same step
        logits: Tensor = model(token, past_key_values=cache, position_ids=position).logits
        return logits

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        logits = step()
    return graph, (cache, token, position, logits)


# ---------------------------------------------------------------------------------------------------------------------
# First calls

FIRST = {
    "silu": "lambda acc: F.silu(acc) * 1.25",
    "bias, gelu": "lambda acc, b: F.gelu(acc + b)",
    "bias, softplus": "lambda acc, b: F.softplus(acc + b) * 0.37",
}
_FIRST = """
import json, time, torch, gemmery
from torch.nn import functional as F
x = torch.randn(512, 4096, device="cuda", dtype=torch.bfloat16)
w = torch.randn(14336, 4096, device="cuda", dtype=torch.bfloat16)
b = torch.randn(14336, device="cuda")
function = {function}
args = (b,) if function.__code__.co_argcount == 2 else ()
def call(rows, epilogue):
    torch.cuda.synchronize()
    begun = time.perf_counter()
    gemmery.linear(x[:rows], w, **({{"epilogue": epilogue, "args": args}} if epilogue else {{}}))
    torch.cuda.synchronize()
    return time.perf_counter() - begun
call(512, None)
print(json.dumps([call(512, function), call(100, function), call(512, function)]))
"""


def first() -> Iterator[Entry]:
    """First calls of new epilogues, each in a process of its own, after a bare product; nothing compiled is kept."""
    times: dict[str, list[float]] = {}
    for name, function in FIRST.items():
        script = _FIRST.format(function=function)
        environment = {"TRITON_ALWAYS_COMPILE": "1", "PYTHONPATH": str(ROOT / "src")}
        done = subprocess.run(
            ["env", *[f"{k}={v}" for k, v in environment.items()], sys.executable, "-c", script],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        if done.returncode:
            raise RuntimeError(done.stderr)
        call, other, again = json.loads(done.stdout.splitlines()[-1])
        times |= {name: [call], f"{name}, then another M": [other], f"{name}, again": [again]}
    yield {"name": f"first calls, 512×{HIDDEN}×{WIDTH}", "times": times}


def host() -> Iterator[Entry]:
    """Host time of prebuilt epilogues beside the bare product's."""
    x, w, b = filled(16, 256), filled(256, 256), torch.randn(256, device="cuda")
    plain, added = gemmery.epilogue(torch.relu), gemmery.epilogue(lambda acc, b: torch.relu(acc + b))
    methods = {
        "bare": lambda: gemmery.linear(x, w),
        "relu": lambda: gemmery.linear(x, w, epilogue=plain),
        "bias, relu": lambda: gemmery.linear(x, w, epilogue=added, args=(b,)),
        "torch": lambda: F.linear(x, w),
    }
    yield {"name": "host time of a call, 16×256×256", "times": compared(methods, ROUNDS, "host")}


PARTS = {"costs": costs, "gated": gated, "llama": llama, "first": first, "host": host}


if __name__ == "__main__":
    run(__doc__, PARTS, OUT)
