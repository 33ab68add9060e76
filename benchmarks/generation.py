"""Measure generation with a Llama of 1.2B parameters in a CUDA graph: int4 weights beside bf16 ones, and peers.

python benchmarks/generation.py --out DIR      needs transformers and accelerate; writes DIR/generation.json

The configuration is that of Llama-3.2-1B; the weights are random. A method is a process of its own, which loads the
model from one checkpoint, compiles a step, captures it in a CUDA graph, and waits. A step takes the last token of each
row, and appends the most probable next one; the static cache has room for all tokens. The parent asks one process after
the other for a generation, in a new order each round: the prompt is in the cache, and `--new` replays follow. It takes
minutes to compile all methods, and more memory than they need in the end; `--only` chooses some.

Quantized models are measured with two heads. The output embeddings are bf16, as libraries leave them where they are the
input embeddings too, or int4 as well, with input embeddings that stay bf16. `--profile` writes the kernels of a step.
`--device cpu` runs the same without a graph, with a small model, to try the script.
"""

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT)]

OUT = ROOT / "benchmarks" / "results" / "generation"
ROUNDS = 7
#: Llama-3.2-1B.
LLAMA = {
    "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32,
    "num_key_value_heads": 8, "head_dim": 64, "vocab_size": 128256, "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5, "tie_word_embeddings": True,
    "rope_parameters": {
        "rope_type": "llama3", "rope_theta": 500000.0, "factor": 32.0, "low_freq_factor": 1.0,
        "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
    },
}  # fmt: skip
#: What `--device cpu` has in their place.
SMALL = {"hidden_size": 128, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2,
         "head_dim": 32, "vocab_size": 500}  # fmt: skip
#: Columns of a scale, for all libraries.
GROUP = 128
#: Logits of which the largest is found first.
PART = 256
#: How many kernels of a step are written, the longest first.
KERNELS = 20
#: Relative errors of logits beside those of the same numbers in torch, and beside the bf16 model. With random weights,
#: 16 layers enlarge errors: bf16 with torch.compile is 0.03 from itself without, and int4 of torchao 0.65 from bf16.
SAME, QUANTIZED = 0.05, 0.8


@dataclass(frozen=True)
class Method:
    """One way to generate.

    Attributes:
        weights: "bf16", "torchao" or "gemmery", the last two in int4.
        mode: of torch.compile; None for no compiler.
        together: whether the weights of q, k and v, which are not gemmery's, are made one, and their product is one.
            `gemmery.nn.swap` does so by itself.
    """

    weights: str
    mode: str | None
    together: bool = False

    @property
    def heads(self) -> tuple[str, ...]:
        """How the output embeddings are stored."""
        return ("bf16",) if self.weights == "bf16" else ("bf16", "int4")


#: Modes of torch.compile, by what they are called here.
TUNED = "max-autotune-no-cudagraphs"
MODES = {"torch.compile": "default", "torch.compile, max-autotune": TUNED}
METHODS = {"gemmery int4, no compiler": Method("gemmery", None)} | {
    f"{title}{', qkv as one' * together}, {how}": Method(weights, mode, together)
    for title, weights in (("bf16", "bf16"), ("torchao int4", "torchao"), ("gemmery int4", "gemmery"))
    for together in (False, True)[: 1 if weights == "gemmery" else 2]
    for how, mode in MODES.items()
}


@dataclass(frozen=True)
class Setting:
    """The settings that all methods of a run share.

    Attributes:
        folder: with the checkpoint.
        batch, prompt, new: rows, and tokens of each.
        attention: as transformers calls it, or "grouped", see `grouped_attention`.
        device: "cuda" or "cpu".
        threads: with which a process compiles.
    """

    folder: str
    batch: int
    prompt: int
    new: int
    attention: str
    device: str
    threads: int


# ---------------------------------------------------------------------------------------------------------------------
# Models


def make_checkpoint(folder: str, layers: int, device: str) -> None:
    """A model with random weights, as a checkpoint in bf16."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = LLAMA | (SMALL if device == "cpu" else {}) | {"num_hidden_layers": layers}
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device(device):
        model = LlamaForCausalLM(LlamaConfig(**sizes))
    torch.set_default_dtype(torch.float32)
    model.save_pretrained(folder, max_shard_size="500MB")


def load(weights: str, setting: Setting) -> Any:
    """The model, quantized by a library's own interface."""
    from transformers import LlamaForCausalLM

    how: dict[str, Any] = {"dtype": torch.bfloat16, "device_map": setting.device}
    if weights == "gemmery":
        from gemmery.nn.transformers import GemmeryConfig

        how["quantization_config"] = GemmeryConfig("int4", group_size=GROUP)
    register_grouped()
    model = LlamaForCausalLM.from_pretrained(
        setting.folder, attn_implementation=setting.attention, **how
    ).eval()
    return model


def quantize_by_torchao(module: nn.Module) -> None:
    """The linear layers of a module in int4, in the layout that runs without a further library."""
    from torchao.quantization import Int4WeightOnlyConfig, quantize_

    quantize_(module, Int4WeightOnlyConfig(group_size=GROUP, int4_packing_format="tile_packed_to_4d"))


def head_of(model: Any, weights: str, how: str) -> tuple[Callable[[Tensor], Tensor], Tensor]:
    """The product with the output embeddings, and a weight of the same numbers; of torchao's, the one before."""
    import gemmery
    from gemmery.nn import QuantizedLinear

    head = model.lm_head
    if how == "bf16":
        return head, head.weight
    if weights == "gemmery":
        packed = gemmery.quantize(head.weight.detach(), "int4", group_size=GROUP)
        return QuantizedLinear(packed), packed.dequantize()
    own = nn.Sequential(linear_of(head.weight.detach().clone()))
    quantize_by_torchao(own)
    return own, head.weight


def linear_of(weight: Tensor) -> nn.Linear:
    """A layer with a weight."""
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    layer.weight = nn.Parameter(weight, requires_grad=False)
    return layer


def most_probable(logits: Tensor) -> Tensor:
    """(rows, 1, V) to (rows, 1): argmax in two steps, since torch.compile takes one program a row for one."""
    parts = logits.unflatten(-1, (-1, PART if logits.shape[-1] % PART == 0 else 1))
    best, at = parts.max(-1)
    part = best.argmax(-1, keepdim=True)
    return (part * parts.shape[-1] + at.gather(-1, part)).squeeze(-1)


class Together:
    """A linear layer whose columns several modules give, which are called in turn with one input."""

    def __init__(self, whole: nn.Module) -> None:
        self.whole = whole
        self.kept: Tensor | None = None


class Columns(nn.Module):
    """Some columns of a `Together`: the first of its modules multiplies, the last forgets the product."""

    def __init__(self, shared: Together, begin: int, end: int) -> None:
        super().__init__()
        self.shared, self.begin, self.end = shared, begin, end
        self.is_last = end == shared.whole.out_features
        if begin == 0:
            self.whole = shared.whole

    def forward(self, x: Tensor) -> Tensor:
        """(..., in) to (..., end - begin)."""
        if self.begin == 0:
            self.shared.kept = self.whole(x)
        product = self.shared.kept
        assert product is not None
        if self.is_last:
            self.shared.kept = None
        return product[..., self.begin : self.end]


def put_together(model: Any) -> None:
    """Makes q, k and v of each layer one plain weight."""
    for layer in model.model.layers:
        attention = layer.self_attn
        parts = [getattr(attention, f"{name}_proj") for name in "qkv"]
        whole = linear_of(torch.cat([x.weight.detach() for x in parts]))
        shared, begin = Together(whole), 0
        for name, part in zip("qkv", parts, strict=True):
            end = begin + part.out_features
            setattr(attention, f"{name}_proj", Columns(shared, begin, end))
            begin = end


def grouped_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, scaling: float,
    **options: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """Attention of heads that share keys, which it reads once.

    transformers' sdpa copies keys and values for each head where there is a mask, as there is with a static cache.
    """
    rows, heads, queries, width = query.shape
    groups = key.shape[1]
    q = (query * scaling).reshape(rows, groups, heads // groups * queries, width)
    scores = (q @ key.mT).float().unflatten(2, (heads // groups, queries))
    if attention_mask is not None:
        scores = scores.masked_fill(~attention_mask.unsqueeze(1), float("-inf"))
    shares = scores.softmax(-1).to(value.dtype).flatten(2, 3)
    found = (shares @ value).view(rows, heads, queries, width)
    return found.transpose(1, 2).contiguous(), None


def register_grouped() -> None:
    """Makes "grouped" a name that transformers knows."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

    AttentionInterface.register("grouped", grouped_attention)
    AttentionMaskInterface.register("grouped", sdpa_mask)


# ---------------------------------------------------------------------------------------------------------------------
# A step


class Generator:
    """A model that generates, with a prompt in its cache."""

    def __init__(self, method: Method, setting: Setting, alone: Any) -> None:
        from transformers.cache_utils import StaticCache

        self.method, self.setting, self.alone = method, setting, alone
        self.on_gpu = setting.device == "cuda"
        self.facts: dict[str, Any] = {}
        self.runs: dict[str, Callable[[], None]] = {}
        model = load(method.weights, setting)
        if self.on_gpu and method.weights == "gemmery":
            packed = sum(x.nbytes for x in model.parameters())
            self.facts["loading"] = torch.cuda.max_memory_allocated() / packed
        self.model = model
        self.cache = StaticCache(config=model.config, max_cache_len=setting.prompt + setting.new + 8)
        torch.manual_seed(1)
        shape = (setting.batch, setting.prompt)
        self.prompt = torch.randint(0, model.config.vocab_size, shape, device=setting.device)
        self.token = self.prompt[:, -1:].clone()
        self._prepare()

    def _body(self, body: Callable[..., Any], token: Tensor) -> Tensor:
        hidden: Tensor = body(input_ids=token, past_key_values=self.cache, use_cache=True).last_hidden_state
        return hidden

    def rewind(self) -> None:
        """Back to the end of the prompt, whose last token is the next input."""
        for layer in self.cache.layers:
            layer.cumulative_length.fill_(self.setting.prompt - 1)
        self.token.copy_(self.prompt[:, -1:])

    @torch.no_grad()
    def _prepare(self) -> None:
        """Fills the cache, compiles, and captures a step with each head."""
        model, method = self.model, self.method
        self._body(model.model, self.prompt)
        wanted = self._reference()
        self._change()
        body = self._compiled(model.model)
        # With one row, the compiler makes reductions of these products, among which there is nothing to search.
        if method.mode == TUNED and method.weights == "bf16" and self.setting.batch > 1:
            self._search(body)
        self.rewind()
        hidden = self._body(body, self.token)[:, -1:]
        for how in method.heads:
            head, weight = head_of(model, method.weights, how)
            chosen = self._compiled(lambda hidden, head=head: most_probable(head(hidden[:, -1:])))

            def step(chosen: Callable[[Tensor], Tensor] = chosen) -> None:
                self.token.copy_(chosen(self._body(body, self.token)))

            exact, found = F.linear(wanted, weight).double(), head(hidden).double()
            self.facts[f"error, {how} head"] = float((found - exact).norm() / exact.norm())
            if not most_probable(found).equal(found.argmax(-1)):
                raise RuntimeError("the most probable token is another")
            self.runs[how] = captured(step, self.rewind) if self.on_gpu else step
            self.facts[f"same tokens, {how} head"] = self._generate_twice(how)

    def _change(self) -> None:
        """Changes a loaded model as the method says."""
        from gemmery import nn as gnn

        if self.method.weights == "gemmery":
            gnn.swap(self.model)
        if self.method.together:
            put_together(self.model)
        if self.method.weights == "torchao":
            quantize_by_torchao(self.model.model)

    def _compiled(self, function: Any) -> Any:
        if self.method.mode is None:
            return function
        how: dict[str, Any] = {"dynamic": False, "fullgraph": True}
        how |= {"mode": self.method.mode} if self.on_gpu else {"backend": "aot_eager"}
        return torch.compile(function, **how)

    def _search(self, body: Callable[..., Any]) -> None:
        """Lets the compiler search with one layer, while no other process does; it keeps what it found."""
        config = self.model.config
        layers = config.num_hidden_layers
        with self.alone:
            config.num_hidden_layers = 1
            self.rewind()
            self._body(body, self.token)
            config.num_hidden_layers = layers

    def _reference(self) -> Tensor:
        """The hidden state by torch's operators: of gemmery's numbers where it quantized, else of the bf16 model."""
        from transformers import LlamaForCausalLM

        import gemmery

        self.rewind()
        if self.method.weights != "gemmery":
            return self._body(self.model.model, self.token)[:, -1:]
        plain = LlamaForCausalLM.from_pretrained(
            self.setting.folder, dtype=torch.bfloat16, device_map=self.setting.device,
            attn_implementation=self.setting.attention,
        )  # fmt: skip
        for name, x in self.model.named_parameters():
            if isinstance(x, gemmery.QuantizedTensor):
                plain.get_parameter(name).data = x.dequantize()
        # Keys and values of the prompt are the quantized model's in both.
        found = self._body(plain.model, self.token)[:, -1:]
        del plain
        if self.on_gpu:
            torch.cuda.empty_cache()
        return found

    def _generate_twice(self, head: str) -> bool:
        found = []
        for _ in range(2):
            self.rewind()
            tokens = []
            for _ in range(4):
                self.runs[head]()
                tokens.append(self.token.clone())
            found.append(torch.cat(tokens, 1))
        return found[0].equal(found[1])

    def seconds(self, head: str) -> float:
        """The seconds per token of a generation."""
        self.rewind()
        run = self.runs[head]
        if not self.on_gpu:
            begun = time.perf_counter()
            run()
            return time.perf_counter() - begun
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        begin.record()
        for _ in range(self.setting.new):
            run()
        end.record()
        torch.cuda.synchronize()
        return begin.elapsed_time(end) / 1e3 / self.setting.new

    def kernels(self, head: str) -> list[tuple[str, int, float]]:
        """The kernels of a step: their names, how often each runs, and their microseconds."""
        from torch.profiler import ProfilerActivity, profile

        self.rewind()
        with profile(activities=[ProfilerActivity.CUDA]) as found:
            self.runs[head]()
            torch.cuda.synchronize()
        sums: dict[str, tuple[int, float]] = {}
        for event in found.events():
            count, total = sums.get(event.name, (0, 0.0))
            sums[event.name] = (count + 1, total + event.device_time)
        return sorted(((name, *x) for name, x in sums.items()), key=lambda x: -x[2])


def captured(step: Callable[[], None], rewind: Callable[[], None]) -> Callable[[], None]:
    """A step as a CUDA graph."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            rewind()
            step()
    torch.cuda.current_stream().wait_stream(stream)
    rewind()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


# ---------------------------------------------------------------------------------------------------------------------
# Processes


def serve(pipe: Any, alone: Any, method: Method, setting: Setting) -> None:
    """A method's process: prepares, then answers."""
    begun = time.monotonic()
    torch.set_num_threads(2)
    try:
        if setting.device == "cuda":
            import torch._inductor.config as inductor

            inductor.compile_threads = setting.threads
        made = Generator(method, setting, alone)
        pipe.send(made.facts | {"prepared_s": time.monotonic() - begun})
        while (asked := pipe.recv()) is not None:
            with torch.no_grad():
                pipe.send(getattr(made, asked[0])(*asked[1:]))
    except EOFError:
        return
    except BaseException:
        pipe.send({"failed": traceback.format_exc()})


@dataclass
class Served:
    """A process of a method, and what it said when it was prepared."""

    name: str
    setting: Setting
    process: Any
    pipe: Any
    facts: dict[str, Any]

    def ask(self, what: str, head: str) -> Any:
        """The result of a method of its `Generator`."""
        self.pipe.send((what, head))
        return self.pipe.recv()

    @property
    def lives(self) -> bool:
        """Whether it can be asked."""
        return "failed" not in self.facts


def prepared(cases: list[tuple[str, Setting]], limit: float) -> list[Served]:
    """All processes, which prepare at the same time; those that need more than `limit` seconds failed."""
    context = get_context("spawn")
    alone, made = context.Lock(), []
    for name, setting in cases:
        pipe, other = context.Pipe()
        process = context.Process(target=serve, args=(other, alone, METHODS[name], setting), daemon=True)
        process.start()
        other.close()
        made.append(Served(name, setting, process, pipe, {}))
    end = time.monotonic() + limit
    for one in made:
        ready = one.pipe.poll(max(0.0, end - time.monotonic()))
        one.facts = one.pipe.recv() if ready else {"failed": "not prepared in time"}
        shown = {key: x if isinstance(x, str) else round(x, 4) for key, x in one.facts.items()}
        print(f"batch {one.setting.batch}, {one.name}: {shown}", flush=True)
    return made


def measure(batch: int, layers: int, served: list[Served], profiles: bool) -> dict[str, Any]:
    """The times of all methods and heads with a number of rows."""
    whole = LLAMA["num_hidden_layers"]
    model = "Llama-3.2-1B" if layers == whole else f"Llama-3.2-1B with {layers} of its {whole} layers"
    live = {
        label_of(one.name, head): (one, head)
        for one in served
        if one.lives
        for head in METHODS[one.name].heads
    }
    times: dict[str, list[float]] = {label: [] for label in live}
    for one, head in live.values():
        one.ask("seconds", head)
    for _ in range(ROUNDS):
        for label in random.sample(list(live), len(live)):
            one, head = live[label]
            times[label].append(one.ask("seconds", head))
    kernels = {label: one.ask("kernels", head) for label, (one, head) in live.items()} if profiles else {}
    return {
        "name": f"{model}, a token of {batch} row{'s' * (batch > 1)}",
        "times": times,
        "facts": {one.name: one.facts for one in served},
        "kernels": {label: found[:KERNELS] for label, found in kernels.items()},
        "sums": {
            label: [sum(x[1] for x in found), sum(x[2] for x in found)] for label, found in kernels.items()
        },
        "batch": batch,
    }


def label_of(name: str, head: str) -> str:
    """The name of a method with a head."""
    title, rest = name.split(", ", 1)
    return f"{title}, int4 head, {rest}" if head == "int4" else name


def end(served: list[Served]) -> None:
    """End the processes."""
    for one in served:
        if one.lives:
            one.pipe.send(None)
    for one in served:
        one.process.join(5)
        if one.process.is_alive():
            one.process.kill()


def show(entry: dict[str, Any]) -> None:
    """The times, and how they compare with the fastest in bf16."""
    print(entry["name"], flush=True)
    medians = {name: statistics.median(x) for name, x in entry["times"].items()}
    base = min((x for name, x in medians.items() if name.startswith("bf16")), default=None)
    for name, x in medians.items():
        count, total = entry["sums"].get(name, (0, 0.0))
        ratio = "" if base is None else f"{base / x:.3f}"
        print(f"  {x * 1e6:9.1f} us  {ratio:>6}  {count:4d} kernels {total:8.1f} us  {name}", flush=True)
    for name, facts in entry["facts"].items():
        if "failed" in facts:
            print(f"  {name} FAILED: {facts['failed'][-1500:]}", flush=True)


def is_right(one: Served) -> bool:
    """Whether a method generates the same tokens again, from logits that are near enough to the reference."""
    limit = QUANTIZED if METHODS[one.name].weights == "torchao" else SAME
    return one.lives and all(
        one.facts[f"error, {head} head"] < limit and one.facts[f"same tokens, {head} head"]
        for head in METHODS[one.name].heads
    )


def main() -> int:
    """Measure, and write after every batch; 1 if a method is missing or wrong."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=OUT, metavar="DIR")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--only", nargs="+", choices=METHODS, default=list(METHODS), metavar="METHOD")
    parser.add_argument("--layers", type=int, default=LLAMA["num_hidden_layers"])
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--new", type=int, default=64)
    parser.add_argument("--attention", default="grouped", metavar="NAME", help="grouped, or sdpa")
    parser.add_argument("--limit", type=float, default=600, help="seconds to prepare all methods")
    parser.add_argument("--threads", type=int, default=4, help="with which each process compiles")
    parser.add_argument("--profile", action="store_true", help="write the kernels of a step")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    options = parser.parse_args()
    from gemmery.lab.results import describe_run

    options.out.mkdir(parents=True, exist_ok=True)
    header = describe_run(0, ROUNDS, (), options.device, ())
    result: dict[str, Any] = {
        **{key: header[key] for key in ("gpu", "torch", "triton", "cuda", "commit", "date")},
        "part": "generation", "protocol": {"rounds": ROUNDS}, "layers": options.layers, "attention": options.attention,
        "prompt": options.prompt, "new": options.new, "entries": [],
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        maker = get_context("spawn").Process(
            target=make_checkpoint, args=(folder, options.layers, options.device)
        )
        maker.start()
        maker.join()
        cases = [
            (
                name,
                Setting(
                    folder,
                    batch,
                    options.prompt,
                    options.new,
                    options.attention,
                    options.device,
                    options.threads,
                ),
            )
            for batch in options.batch
            for name in options.only
        ]
        served = prepared(cases, options.limit)
        for batch in options.batch:
            entry = measure(
                batch, options.layers, [one for one in served if one.setting.batch == batch], options.profile
            )
            show(entry)
            result["entries"].append(entry)
            text = json.dumps(result, indent=1, ensure_ascii=False)
            (options.out / "generation.json").write_text(text + "\n", encoding="utf-8")
        end(served)
        bad = not all(is_right(one) for one in served)
    return int(bad)


if __name__ == "__main__":
    sys.exit(main())
