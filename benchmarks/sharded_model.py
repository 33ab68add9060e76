"""Measure a Llama of about 1.2 billion parameters that is tensor-parallel over GPUs of one host.

python benchmarks/sharded_model.py --output FILE        torch with NCCL, and the swapped model; needs transformers
python benchmarks/sharded_model.py --device cpu --tiny  the script itself, over gloo

It starts its own ranks. "torch" is the model of transformers with torch's ColwiseParallel and RowwiseParallel.
"gemmery" is the same model, swapped, with `overlap=True` wherever partial sums are added. Both have the same weights,
which are sharded in the same way, and logits are gathered in the same way. Prompts and steps of decoding are timed in
turn, as CUDA graphs and as calls from the host; the time is that of the slowest rank. Logits of both are compared with
those of the model in float32 on one rank. The file is written behind each row.
"""

import argparse
import copy
import gc
import json
import random
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT)]

import gemmery.distributed as ours  # noqa: E402
import gemmery.nn as gnn  # noqa: E402
from benchmarks import processes  # noqa: E402
from benchmarks.models import LLAMA  # noqa: E402
from benchmarks.processes import Ranks  # noqa: E402
from gemmery.lab import timing  # noqa: E402
from gemmery.lab.results import describe_run  # noqa: E402

TINY = {
    "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 512,
}  # fmt: skip
#: Sequences and tokens of each.
PROMPTS = ((1, 2048), (4, 2048))
#: Sequences of a step of decoding, and tokens before it.
STEPS, PAST = (1, 16), 512
#: Seconds of load and of timing in one figure.
LOAD, TIMED = 10e-3, 60e-3
#: How much larger than torch's the error of the swapped model may be.
RIGHT = 1.1

Call = Callable[[], Tensor]


def models(config: Any, ranks: Ranks) -> tuple[nn.Module, dict[str, nn.Module], str]:
    """The model in float32, the sharded ones by name, and what was swapped."""
    from torch.distributed.device_mesh import init_device_mesh
    from transformers import LlamaForCausalLM

    torch.manual_seed(0)
    with torch.device(ranks.device):
        plain = LlamaForCausalLM(config).to(torch.bfloat16).eval().requires_grad_(False)
    swapped = copy.deepcopy(plain)
    report = str(gnn.swap(swapped))
    made = {"torch": copy.deepcopy(plain), "gemmery": swapped}
    mesh = init_device_mesh(ranks.device, (ranks.count,))
    shard_torch(made["torch"], mesh)
    shard_gemmery(made["gemmery"], mesh)
    return plain.float(), made, report


def shard_torch(model: Any, mesh: Any) -> None:
    """The styles that torch's documentation gives a Llama."""
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    parallelize_module(model, mesh, {"lm_head": ColwiseParallel(output_layouts=Replicate())})
    plan = {
        "self_attn.q_proj": ColwiseParallel(), "self_attn.k_proj": ColwiseParallel(),
        "self_attn.v_proj": ColwiseParallel(), "self_attn.o_proj": RowwiseParallel(),
        "mlp.gate_proj": ColwiseParallel(), "mlp.up_proj": ColwiseParallel(), "mlp.down_proj": RowwiseParallel(),
    }  # fmt: skip
    for layer in model.model.layers:
        parallelize_module(layer, mesh, plan)


def shard_gemmery(model: Any, mesh: Any) -> None:
    """The same, with feed-forward blocks that stay fused and sums inside products."""
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import parallelize_module

    from gemmery.distributed import ColwiseParallel, FeedForwardParallel, RowwiseParallel

    parallelize_module(model, mesh, {"lm_head": ColwiseParallel(output_layouts=Replicate())})
    plan = {
        "self_attn.q_proj": ColwiseParallel(), "self_attn.k_proj": ColwiseParallel(),
        "self_attn.v_proj": ColwiseParallel(), "self_attn.o_proj": RowwiseParallel(overlap=True),
        "mlp": FeedForwardParallel(overlap=True),
    }  # fmt: skip
    for layer in model.model.layers:
        parallelize_module(layer, mesh, plan)


# ---------------------------------------------------------------------------------------------------------------------
# Calls


def prompt(model: Any, ids: Tensor) -> Call:
    """Logits of the last tokens of prompts."""
    return lambda: model(ids, use_cache=False, logits_to_keep=1).logits


def step(model: Any, config: Any, ids: Tensor, past: int) -> Call:
    """Logits of one more token of each sequence, behind `past` others; each call is the same step."""
    from transformers.cache_utils import StaticCache

    cache = StaticCache(config=config, max_cache_len=past + 64)
    token = ids[:, past : past + 1].contiguous()
    position = torch.full((ids.shape[0], 1), past, device=ids.device)
    model(ids[:, :past], past_key_values=cache, logits_to_keep=1)

    def run() -> Tensor:
        for layer in cache.layers:
            layer.cumulative_length.fill_(past)
        logits: Tensor = model(token, past_key_values=cache, position_ids=position).logits
        return logits

    return run


def recorded(call: Call) -> Callable[[], None]:
    """A CUDA graph of a call."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        call()
    return graph.replay


# ---------------------------------------------------------------------------------------------------------------------
# Measuring


def rounds_of(calls: dict[str, Callable[[], object]], ranks: Ranks, count: int) -> list[timing.Round]:
    """Seconds of a call by name, round by round, in a new order each, of the slowest rank."""
    order, guesses = random.Random(0), {}
    for name, call in calls.items():
        call()
        guesses[name] = _span(call, 2, ranks) / 2
    guesses = dict(zip(guesses, ranks.largest(list(guesses.values())), strict=True))

    def figure(name: str) -> float:
        load, timed = (max(1, round(s / guesses[name])) for s in (LOAD, TIMED))
        for _ in range(load):
            calls[name]()
        return _span(calls[name], timed, ranks) / timed

    names = list(calls)
    found = [{name: figure(name) for name in order.sample(names, len(names))} for _ in range(count)]
    slowest = iter(ranks.largest([each for times in found for each in times.values()]))
    return [{name: next(slowest) for name in times} for times in found]


def _span(call: Callable[[], object], count: int, ranks: Ranks) -> float:
    """Seconds of so many calls, with the host's."""
    ranks.wait()
    begun = time.perf_counter()
    for _ in range(count):
        call()
    ranks.synchronize()
    return time.perf_counter() - begun


def errors(calls: dict[str, Call], want: Tensor, ranks: Ranks) -> dict[str, float]:
    """||logits - exact|| / ||exact||, of which all ranks must have the same bits.

    Raises:
        RuntimeError: the swapped model's is larger than torch's by more than a little, or ranks differ.
    """
    found = {}
    for name, call in calls.items():
        got = call().clone()
        if not ranks.same(got):
            raise RuntimeError(f"{name}: ranks have different logits")
        found[name] = float((got.double() - want.double()).norm() / want.double().norm())
    if not found["gemmery"] <= RIGHT * found["torch"]:
        raise RuntimeError(f"logits are wrong: {found}")
    return found


def benchmark(ranks: Ranks, args: Any) -> None:
    """All rows, on each rank."""
    # In inference mode, DTensor remembers no operator's sharding, and torch's model takes 0.4 s from the host.
    with torch.no_grad():
        _benchmark(ranks, args)


def _benchmark(ranks: Ranks, args: Any) -> None:
    from transformers import LlamaConfig

    # A head that is no embedding can be sharded by its rows.
    config = LlamaConfig(**{**LLAMA, **(TINY if args.tiny else {}), "tie_word_embeddings": False})
    exact, sharded, report = models(config, ranks)
    shapes = ((2, 128),) if args.tiny else PROMPTS
    steps, past = ((2,), 64) if args.tiny else (STEPS, PAST)
    data = describe_run(0, args.rounds, ("graph", "eager"), ranks.device, ["torch"])
    data["protocol"] |= {
        "ranks": ranks.count,
        "load_s": LOAD,
        "timed_s": TIMED,
        "model": config.to_diff_dict(),
    }
    data |= {"swap": report, "parameters": sum(p.numel() for p in exact.parameters())}
    entries: list[dict[str, Any]] = []

    def measure(name: str, calls: dict[str, Call], want: Tensor) -> None:
        entry: dict[str, Any] = {"name": name, "errors": errors(calls, want, ranks), "seconds": {}}
        entry["seconds"]["eager"] = rounds_of(dict(calls), ranks, args.rounds)
        if ranks.on_gpu:
            graphs = {each: recorded(call) for each, call in calls.items()}
            entry["seconds"]["graph"] = rounds_of(dict(graphs), ranks, args.rounds)
        entries.append(entry)
        ours.check()
        ranks.say(told(entry))
        if args.output and ranks.rank == 0:
            args.output.parent.mkdir(parents=True, exist_ok=True)
            args.output.write_text(json.dumps(data | {"rows": entries}, indent=1, default=str) + "\n")
        gc.collect()

    draw = torch.Generator(ranks.device).manual_seed(1)
    for rows in steps:
        ids = torch.randint(0, config.vocab_size, (rows, past + 1), device=ranks.device, generator=draw)
        want = exact(ids, use_cache=False, logits_to_keep=1).logits
        calls = {name: step(model, config, ids, past) for name, model in sharded.items()}
        measure(f"decoding {rows} behind {past}", calls, want)
    for rows, tokens in shapes:
        ids = torch.randint(0, config.vocab_size, (rows, tokens), device=ranks.device, generator=draw)
        want = exact(ids, use_cache=False, logits_to_keep=1).logits
        calls = {name: prompt(model, ids) for name, model in sharded.items()}
        measure(f"prompts of {rows}x{tokens}", calls, want)


def told(entry: dict[str, Any]) -> str:
    """An entry as lines: milliseconds, and the ratio of torch's time to gemmery's."""
    lines = []
    for regime, rounds in entry["seconds"].items():
        medians = {name: statistics.median(times[name] for times in rounds) * 1e3 for name in rounds[0]}
        ratio = timing.ratio(rounds, "torch", "gemmery")
        lines.append(
            f"{entry['name']:24} {regime:6} {medians['torch']:.3f} ms {medians['gemmery']:.3f} ms  "
            f"{ratio.median:.3f} ({ratio.min:.3f}-{ratio.max:.3f})"
        )
    return "\n".join([*lines, f"{'':24} errors {entry['errors']}"])


def main() -> int:
    """The command; exit status 2 where there are too few GPUs, 1 where something is wrong."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--limit", type=float, default=300, help="end all ranks after so many seconds")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--tiny", action="store_true", help="a model of two small layers")
    args = parser.parse_args()
    if args.device == "cuda" and torch.cuda.device_count() < args.ranks:
        print(f"sharded_model: there are no {args.ranks} GPUs to measure", file=sys.stderr)
        return 2
    return processes.run(benchmark, args.ranks, args.device, args, args.limit)


if __name__ == "__main__":
    sys.exit(main())
