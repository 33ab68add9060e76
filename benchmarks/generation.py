"""Measure generation with a Llama of 1.2B parameters in a CUDA graph: int4 weights beside bf16 ones, and peers.

python benchmarks/generation.py --out DIR      needs transformers and accelerate; writes DIR/generation.json

The configuration is that of Llama-3.2-1B; the weights are random. A method is a process of its own, which loads the
model from one checkpoint, compiles a step, captures it in a CUDA graph, and waits. A step takes the last token of each
row, and appends the most probable next one; the static cache has room for all tokens. The parent asks one process after
the other for a generation, in a new order each round: the prompt is in the cache, and `--new` replays follow.

With "int4 head", the output embeddings are int4 as well, apart from the input embeddings, which stay bf16. `--profile`
prints the kernels of a step. `--device cpu` runs the same without a graph, with a small model, to try the script.
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
#: Relative errors of logits beside those of the same numbers in torch, and beside the bf16 model.
SAME, QUANTIZED = 0.03, 0.5


@dataclass(frozen=True)
class Method:
    """One way to generate.

    Attributes:
        weights: "bf16", "torchao" or "gemmery", the last two in int4.
        head: how the output embeddings are stored, as above.
        mode: of torch.compile, "default" or "max-autotune-no-cudagraphs"; None for none.
        together: whether the weights of q, k and v are one, and their product is one.
    """

    weights: str
    head: str
    mode: str | None
    together: bool = False


BF16, OURS = "bf16, torch.compile", "gemmery int4, int4 head, torch.compile"
COMPILED, TUNED = "default", "max-autotune-no-cudagraphs"
METHODS = {
    BF16: Method("bf16", "bf16", COMPILED),
    "bf16, torch.compile, max-autotune": Method("bf16", "bf16", TUNED),
    "bf16, qkv as one, torch.compile": Method("bf16", "bf16", COMPILED, True),
    "torchao int4, torch.compile": Method("torchao", "bf16", COMPILED),
    "torchao int4, int4 head, torch.compile": Method("torchao", "torchao", COMPILED),
    "gemmery int4, no compiler": Method("gemmery", "bf16", None),
    "gemmery int4, torch.compile": Method("gemmery", "bf16", COMPILED),
    OURS: Method("gemmery", "gemmery", COMPILED),
    "gemmery int4, int4 head, qkv as one, torch.compile": Method("gemmery", "gemmery", COMPILED, True),
}


@dataclass(frozen=True)
class Setting:
    """What all methods of a run share.

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
    model.save_pretrained(folder)


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
    if weights == "torchao":
        quantize_by_torchao(model.model)
    return model


def quantize_by_torchao(module: nn.Module) -> None:
    """The linear layers of a module in int4, in the layout that runs without a further library."""
    from torchao.quantization import Int4WeightOnlyConfig, quantize_

    quantize_(module, Int4WeightOnlyConfig(group_size=GROUP, int4_packing_format="tile_packed_to_4d"))


def head_of(model: Any, how: str) -> Callable[[Tensor], Tensor]:
    """The product with the output embeddings."""
    import gemmery
    from gemmery.nn import QuantizedLinear

    head = model.lm_head
    if how == "gemmery":
        return QuantizedLinear(gemmery.quantize(head.weight.detach(), "int4", group_size=GROUP))
    if how == "torchao":
        own = nn.Linear(head.in_features, head.out_features, bias=False, device="meta")
        own.weight = nn.Parameter(head.weight.detach().clone(), requires_grad=False)
        quantize_by_torchao(own_model := nn.Sequential(own))
        return own_model
    return head


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
    """Makes q, k and v of each layer one weight."""
    from gemmery.nn import QuantizedLinear

    for layer in model.model.layers:
        attention = layer.self_attn
        parts = [getattr(attention, f"{name}_proj") for name in "qkv"]
        weight = torch.cat([x.weight.detach() for x in parts])
        if isinstance(parts[0], QuantizedLinear):
            whole: nn.Module = QuantizedLinear(weight)
        else:
            whole = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
            whole.weight = nn.Parameter(weight, requires_grad=False)
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

    def __init__(self, method: Method, setting: Setting) -> None:
        from transformers.cache_utils import StaticCache

        self.method, self.setting = method, setting
        self.on_gpu = setting.device == "cuda"
        self.facts: dict[str, Any] = {}
        model = load(method.weights, setting)
        if self.on_gpu and method.weights == "gemmery":
            packed = sum(x.nbytes for x in model.parameters())
            self.facts["loading"] = torch.cuda.max_memory_allocated() / packed
        self.model, self.head = model, head_of(model, method.head)
        self.cache = StaticCache(config=model.config, max_cache_len=setting.prompt + setting.new + 8)
        torch.manual_seed(1)
        shape = (setting.batch, setting.prompt)
        self.prompt = torch.randint(0, model.config.vocab_size, shape, device=setting.device)
        self.token = self.prompt[:, -1:].clone()
        self.facts["error"] = self._prepare()

    def _body(self, body: Callable[..., Any], token: Tensor) -> Tensor:
        hidden: Tensor = body(input_ids=token, past_key_values=self.cache, use_cache=True).last_hidden_state
        return hidden

    def rewind(self) -> None:
        """Back to the end of the prompt, whose last token is the next input."""
        for layer in self.cache.layers:
            layer.cumulative_length.fill_(self.setting.prompt - 1)
        self.token.copy_(self.prompt[:, -1:])

    @torch.no_grad()
    def _prepare(self) -> float:
        """Fills the cache, compiles and captures; the error of the first logits."""
        from gemmery import nn as gnn

        model, method = self.model, self.method
        self._body(model.model, self.prompt)
        wanted = self._reference()
        if method.weights == "gemmery":
            gnn.swap(model)
        if method.together:
            put_together(model)
        body, head = model.model, self.head

        def chosen(hidden: Tensor) -> Tensor:
            return head(hidden[:, -1:]).argmax(-1)

        if method.mode is not None:
            how: dict[str, Any] = {"dynamic": False, "fullgraph": True}
            how |= {"mode": method.mode} if self.on_gpu else {"backend": "aot_eager"}
            body, chosen = torch.compile(body, **how), torch.compile(chosen, **how)

        def step() -> None:
            self.token.copy_(chosen(self._body(body, self.token)))

        self.rewind()
        found = head(self._body(body, self.token)[:, -1:]).double()
        self.run = captured(step, self.rewind) if self.on_gpu else step
        self.rewind()
        self.facts["same tokens"] = self._generate_twice()
        return float((found - wanted).norm() / wanted.norm())

    def _reference(self) -> Tensor:
        """Logits of torch's operators: of the same numbers where gemmery quantized them, else of the bf16 model."""
        from transformers import LlamaForCausalLM

        import gemmery

        self.rewind()
        if self.method.weights == "bf16":
            return self.head(self._body(self.model.model, self.token)[:, -1:]).double()
        plain = LlamaForCausalLM.from_pretrained(
            self.setting.folder, dtype=torch.bfloat16, device_map=self.setting.device,
            attn_implementation=self.setting.attention,
        )  # fmt: skip
        weight = plain.lm_head.weight
        if self.method.weights == "gemmery":
            for name, x in self.model.named_parameters():
                if isinstance(x, gemmery.QuantizedTensor):
                    plain.get_parameter(name).data = x.dequantize()
        if self.method.head == "gemmery":
            weight = gemmery.quantize(weight.detach(), "int4", group_size=GROUP).dequantize()
        # Keys and values of the prompt are the quantized model's in both.
        found = F.linear(self._body(plain.model, self.token)[:, -1:], weight).double()
        del plain, weight
        if self.on_gpu:
            torch.cuda.empty_cache()
        self.rewind()
        return found

    def _generate_twice(self) -> bool:
        found = []
        for _ in range(2):
            self.rewind()
            tokens = []
            for _ in range(4):
                self.run()
                tokens.append(self.token.clone())
            found.append(torch.cat(tokens, 1))
        return found[0].equal(found[1])

    def seconds(self) -> float:
        """Of a token, in a generation."""
        self.rewind()
        if not self.on_gpu:
            begun = time.perf_counter()
            self.run()
            return time.perf_counter() - begun
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        begin.record()
        for _ in range(self.setting.new):
            self.run()
        end.record()
        torch.cuda.synchronize()
        return begin.elapsed_time(end) / 1e3 / self.setting.new

    def kernels(self) -> list[tuple[str, int, float]]:
        """Of a step: names, how often each runs, and microseconds of all."""
        from torch.profiler import ProfilerActivity, profile

        self.rewind()
        with profile(activities=[ProfilerActivity.CUDA]) as found:
            self.run()
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
        # Searches that time kernels run one after the other.
        if method.mode == TUNED:
            with alone:
                made = Generator(method, setting)
        else:
            made = Generator(method, setting)
        pipe.send(made.facts | {"prepared_s": time.monotonic() - begun})
        while (asked := pipe.recv()) is not None:
            with torch.no_grad():
                pipe.send(getattr(made, asked)())
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

    def ask(self, what: str) -> Any:
        """The result of a method of its `Generator`."""
        self.pipe.send(what)
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
        print(f"batch {one.setting.batch}, {one.setting.attention}, {one.name}: {shown}", flush=True)
    return made


def measure(batch: int, served: list[Served], profiles: bool) -> dict[str, Any]:
    """The times of all methods with a number of rows."""
    live = {_label(one): one for one in served if one.lives}
    times: dict[str, list[float]] = {label: [] for label in live}
    for one in live.values():
        one.ask("seconds")
    for _ in range(ROUNDS):
        for label in random.sample(list(live), len(live)):
            times[label].append(live[label].ask("seconds"))
    if profiles:
        for one in live.values():
            one.facts["kernels"] = one.ask("kernels")
    return {
        "name": f"Llama of 1.2B, a token of {batch} row{'s' * (batch > 1)}",
        "times": times,
        "facts": {_label(one): one.facts for one in served},
        "batch": batch,
    }


def _label(one: Served) -> str:
    return one.name if one.setting.attention == "grouped" else f"{one.name}, {one.setting.attention}"


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
    """The times, and ratios to ours."""
    medians = {name: statistics.median(x) for name, x in entry["times"].items()}
    print(entry["name"], flush=True)
    base = medians.get(BF16)
    for name, x in medians.items():
        ratio = "" if base is None else f"  bf16 / it {base / x:.3f}"
        print(f"  {x * 1e6:9.1f} us  {name}{ratio}", flush=True)
    for name, facts in entry["facts"].items():
        if "kernels" in facts:
            total, count = sum(x[2] for x in facts["kernels"]), sum(x[1] for x in facts["kernels"])
            print(f"  {name}: {count} kernels, {total:.0f} us", flush=True)
            for kernel, times, us in facts["kernels"][:14]:
                print(f"    {us:8.1f} us  {times:4d}  {kernel[:90]}", flush=True)
        if "failed" in facts:
            print(f"  {name} FAILED: {facts['failed'][-1500:]}", flush=True)


def setting_of(options: argparse.Namespace, folder: str, batch: int, attention: str) -> Setting:
    """The setting of a case."""
    return Setting(folder, batch, options.prompt, options.new, attention, options.device, options.threads)


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
    parser.add_argument(
        "--attention", nargs="+", default=["grouped"], metavar="NAME", help="sdpa, flex_attention or grouped"
    )
    parser.add_argument("--limit", type=float, default=240, help="seconds to prepare a batch")
    parser.add_argument("--threads", type=int, default=4, help="with which each process compiles")
    parser.add_argument("--profile", action="store_true", help="print the kernels of a step")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    options = parser.parse_args()
    from gemmery.lab.results import describe_run

    options.out.mkdir(parents=True, exist_ok=True)
    header = describe_run(0, ROUNDS, (), options.device, ())
    result: dict[str, Any] = {
        **{key: header[key] for key in ("gpu", "torch", "triton", "cuda", "commit", "date")},
        "part": "generation", "protocol": {"rounds": ROUNDS}, "layers": options.layers,
        "prompt": options.prompt, "new": options.new, "entries": [],
    }  # fmt: skip
    bad = False
    with tempfile.TemporaryDirectory() as folder:
        maker = get_context("spawn").Process(
            target=make_checkpoint, args=(folder, options.layers, options.device)
        )
        maker.start()
        maker.join()
        cases = []
        for batch in options.batch:
            for name in options.only:
                # Which attention is best is a question apart.
                names = options.attention if name in (BF16, OURS) else options.attention[:1]
                cases += [(name, setting_of(options, folder, batch, attention)) for attention in names]
        served = prepared(cases, options.limit)
        for batch in options.batch:
            entry = measure(batch, [one for one in served if one.setting.batch == batch], options.profile)
            show(entry)
            result["entries"].append(entry)
            text = json.dumps(result, indent=1, ensure_ascii=False)
            (options.out / "generation.json").write_text(text + "\n", encoding="utf-8")
        end(served)
        for one in served:
            limit = QUANTIZED if METHODS[one.name].weights == "torchao" else SAME
            bad |= not one.lives or not one.facts["error"] < limit or not one.facts["same tokens"]
    return int(bad)


if __name__ == "__main__":
    sys.exit(main())
