"""Measure grouped products and experts on the GPU at hand, beside torch, Hugging Face's experts, QuACK and Liger.

python benchmarks/grouped.py --list                                  names what there is; needs no GPU
python benchmarks/grouped.py --seed 7 --output FILE                  the suite, and 24 random rows of a seed
python benchmarks/grouped.py --rows Mixtral --parts bare --compile   some of it, with torch.compile as a peer
python benchmarks/grouped.py --peers quack --tune-peers              with QuACK alone, which tunes itself

Each result is compared with float64 before it is timed. Configs are those that gemmery chooses untuned. QuACK and Liger
are peers where they can be imported, see grouped_peers.py. The file is written behind each measurement. Files under
benchmarks/results/grouped are what readme_tables.py makes tables of.
"""

import argparse
import contextlib
import gc
import importlib
import itertools
import json
import math
import random
import re
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.nn import functional as F

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT)]

import gemmery  # noqa: E402
from benchmarks import grouped_peers as libraries  # noqa: E402
from benchmarks import grouped_rows as rows_of  # noqa: E402
from benchmarks import grouped_summary as summary  # noqa: E402
from benchmarks.grouped_peers import PatientStopwatch, Peers, sorted_choices, weighted_sum  # noqa: E402
from benchmarks.grouped_rows import PARTS, Row, part_of  # noqa: E402
from benchmarks.grouped_summary import LIBRARIES, OURS, library_of  # noqa: E402
from gemmery import devices, moe, select  # noqa: E402
from gemmery.lab import timing  # noqa: E402
from gemmery.lab.inputs import WrongResult  # noqa: E402
from gemmery.lab.results import describe_run, triton_version  # noqa: E402
from gemmery.product import prepare, run  # noqa: E402
from gemmery.product.spec import Functions, Options  # noqa: E402
from gemmery.tuning.stopwatch import Call, Stopwatch  # noqa: E402
from gemmery.tuning.workers import Target, Workers  # noqa: E402

OUT = ROOT / "benchmarks" / "results" / summary.FOLDER
BF16 = torch.bfloat16
#: The largest ‖out − ref‖ / ‖ref‖ that counts as right: of one product, of several with rounding in between, of
#: gradients.
PRODUCT, BLOCK, GRADIENT = 4e-3, 1.2e-2, 2e-2
#: Tokens of a block that are compared, experts that are packed at once, and the part of the free memory that is used.
TOKENS, CHUNK, USABLE = 64, 8, 0.9

Entry = dict[str, Any]
#: No peers but torch and Hugging Face's paths.
NONE = Peers()


# ---------------------------------------------------------------------------------------------------------------------
# Peers


def torch_product(x: Tensor, y: Tensor, offs: Tensor) -> Tensor:
    """torch's product of groups."""
    function = getattr(F, "grouped_mm", None) or torch._grouped_mm
    made: Tensor = function(x, y, offs=offs)
    return made


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """torch.compile with its search over templates. The caller's CUDA graphs are the only ones."""
    # Without it, the eighth shape in a process would run uncompiled.
    torch._dynamo.reset()
    best: Callable[..., Any] = torch.compile(
        function, mode="max-autotune-no-cudagraphs", dynamic=False, fullgraph=True
    )
    return best


@dataclass(frozen=True)
class Experts:
    """Weights of experts, and what they compute.

    Attributes:
        gate_up, down: (E, 2I, H) and (E, H, I), the rows of gate before those of up; transposed, and with columns of
            gate and up that alternate, in gpt-oss's style.
        gate_up_bias, down_bias: (E, 2I) and (E, H) in gpt-oss's style, else None.
    """

    gate_up: Tensor
    down: Tensor
    gate_up_bias: Tensor | None = None
    down_bias: Tensor | None = None

    @property
    def is_gpt_oss(self) -> bool:
        """Whether they are in gpt-oss's style."""
        return self.gate_up_bias is not None

    @property
    def tensors(self) -> list[Tensor]:
        """Those that there are."""
        return [x for x in (self.gate_up, self.down, self.gate_up_bias, self.down_bias) if x is not None]

    def activation(self, product: Tensor) -> Tensor:
        """What is between the products, as torch's operators."""
        if self.is_gpt_oss:
            return moe.clamped_swiglu(product[..., ::2], product[..., 1::2])
        gate, up = product.chunk(2, -1)
        return F.silu(gate) * up

    def oriented(self) -> tuple[Tensor, Tensor]:
        """Both weights as right operands, (E, H, 2I) and (E, I, H)."""
        return (self.gate_up, self.down) if self.is_gpt_oss else (self.gate_up.mT, self.down.mT)

    def ours(self, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        """gemmery."""
        how: dict[str, Any] = {}
        if self.is_gpt_oss:
            how = {"activation": moe.clamped_swiglu, "transposed": True, "concatenated": False}
        return moe.experts(
            x, index, weights, self.gate_up, self.down, gate_up_bias=self.gate_up_bias, down_bias=self.down_bias, **how
        )  # fmt: skip

    def by_groups(self, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        """What transformers' "grouped_mm" does: sort, gather, multiply, weight, put back, sum."""
        ids, order, offs = sorted_choices(index, self.down.shape[0])
        first, second = self.oriented()
        y = torch_product(x[order // index.shape[1]], first, offs)
        if self.gate_up_bias is not None:
            y = y.add_(self.gate_up_bias[ids])
        y = torch_product(self.activation(y), second, offs)
        if self.down_bias is not None:
            y = y.add_(self.down_bias[ids])
        return weighted_sum(y, order, weights).to(x.dtype)

    def by_copies(self, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        """What transformers' "batched_mm" does: a copy of its expert for each choice of a token."""
        (tokens, k), ids = index.shape, index.flatten()
        y = _of_vectors(x.repeat_interleave(k, 0), self.gate_up[ids], self.is_gpt_oss)
        if self.gate_up_bias is not None:
            y = y.add_(self.gate_up_bias[ids])
        y = _of_vectors(self.activation(y), self.down[ids], self.is_gpt_oss)
        if self.down_bias is not None:
            y = y.add_(self.down_bias[ids])
        y = y * weights.reshape(-1, 1)
        return y.view(tokens, k, -1).sum(1).to(x.dtype)

    def exact(self, expert: int, x: Tensor, weights: Sequence[Tensor] | None = None) -> Tensor:
        """One expert's result for rows in float64; with weights and biases of its own, if these are given."""
        gate_up, down, *biases = weights or [tensor[expert].double() for tensor in self.tensors]
        if not self.is_gpt_oss:
            gate_up, down = gate_up.mT, down.mT
        y = x @ gate_up
        hidden = self.activation(y + biases[0] if biases else y)
        return hidden @ down + biases[1] if biases else hidden @ down

    def reference(self, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        """All of it in float64, for a few tokens."""
        out = x.new_zeros(x.shape[0], x.shape[1])
        for expert in index.unique().tolist():
            token, choice = (index == expert).nonzero(as_tuple=True)
            y = self.exact(expert, x[token]) * weights[token, choice].unsqueeze(-1)
            out = out.index_add(0, token, y)
        return out


def _of_vectors(x: Tensor, weights: Tensor, is_transposed: bool) -> Tensor:
    """The product of each row with a matrix of its own."""
    if is_transposed:
        return torch.bmm(x.unsqueeze(1), weights).squeeze(1)
    return torch.bmm(weights, x.unsqueeze(-1)).squeeze(-1)


def routed_by_torch(y: Tensor, index: Tensor, weights: Tensor, count: int) -> Tensor:
    """What transformers' "grouped_mm" does around its products but for the gather of tokens."""
    _, order, _ = sorted_choices(index, count)
    order // index.shape[1]
    return weighted_sum(y, order, weights).to(y.dtype)


# ---------------------------------------------------------------------------------------------------------------------
# Inputs


class Inputs:
    """What a row is measured on: random numbers, and choices of tokens. Weights are made when they are needed.

    Args:
        row: the experts and tokens.
        seed: of the run.
        device: "cuda"; "meta" to look plans up, "cpu" in a test.
    """

    def __init__(self, row: Row, seed: int, device: str = "cuda") -> None:
        self.row, self.device = row, device
        self.seed = rows_of.seed_of(seed, row.name)
        self.rng = random.Random(self.seed)
        torch.manual_seed(self.seed)
        top = rows_of.choices(row, self.seed)
        self.counts = rows_of.counts_of(top, row.E)
        self.top = top.to(device)

    def normal(self, *shape: int, scale: float = 1.0) -> Tensor:
        """Normal random numbers in bfloat16."""
        return torch.empty(shape, dtype=BF16, device=self.device).normal_(std=scale)

    @cached_property
    def up(self) -> Tensor:
        """(E, 2I, H)."""
        return self.normal(self.row.E, *self.row.product("up"), scale=self.row.H**-0.5)

    @cached_property
    def down(self) -> Tensor:
        """(E, H, I)."""
        return self.normal(self.row.E, *self.row.product("down"), scale=self.row.I**-0.5)

    @cached_property
    def experts(self) -> Experts:
        """The weights in the row's style."""
        row = self.row
        if row.style == "stacked":
            return Experts(self.up, self.down)
        return Experts(
            self.normal(row.E, row.H, 2 * row.I, scale=row.H**-0.5),
            self.normal(row.E, row.I, row.H, scale=row.I**-0.5),
            self.normal(row.E, 2 * row.I), self.normal(row.E, row.H),
        )  # fmt: skip

    @cached_property
    def router(self) -> Tensor:
        """(T, k), the weights of the router."""
        return self.normal(self.row.T, self.row.k).softmax(-1)

    def weight(self, which: str) -> Tensor:
        """That of the product "up" or "down"."""
        return self.up if which == "up" else self.down

    def turns(self, weight_bytes: int) -> list[int]:
        """By how many experts choices are moved in each turn, see `grouped_rows.turns`; one turn with many tokens."""
        if self.row.T > rows_of.DECODE:
            return [0]
        read = weight_bytes * rows_of.touched(self.counts) / self.row.E
        return rows_of.turns(read, self.row.E, timing.GRAPH_CALLS)

    def moved(self, by: int) -> list[int]:
        """The sizes of groups whose choices are moved."""
        return rows_of.moved(self.counts, by)

    def offs(self, by: int = 0) -> Tensor:
        """The ends of groups whose choices are moved."""
        ends = list(itertools.accumulate(self.moved(by)))
        return torch.tensor(ends, dtype=torch.int32, device=self.device)

    def token_sample(self) -> Tensor:
        """Some tokens, the first and the last among them."""
        T = self.row.T
        inner = self.rng.sample(range(T), min(TOKENS, T))
        return torch.tensor(sorted({0, T - 1, *inner}), device=self.device)


def pack(weight: Tensor, format: str) -> Any:
    """A packed weight, made of a few experts at a time: on the way there are numbers in float32."""
    parts = [gemmery.quantize(some, format) for some in weight.split(CHUNK)]
    whole = {
        name: torch.cat([part.parts()[name] for part in parts]) if value.dim() > 1 else value
        for name, value in parts[0].parts().items()
    }
    return parts[0].with_parts(whole, shape=weight.shape)


# ---------------------------------------------------------------------------------------------------------------------
# Checks


def difference(pairs: Iterator[tuple[Tensor, Tensor]]) -> float:
    """‖out − ref‖ / ‖ref‖ over all pairs of results and references."""
    wrong = norm = 0.0
    for got, wanted in pairs:
        wrong += (got.double() - wanted).square().sum().item()
        norm += wanted.square().sum().item()
    return math.sqrt(wrong / norm) if norm else math.nan


def rows_error(
    y: Tensor, x: Tensor, matrix: Callable[[int], Tensor], counts: Sequence[int], rng: random.Random
) -> float:
    """The error of a product of groups of rows, in some of them.

    Args:
        matrix: the second operand of a group, (K, N), in float64.
        counts: sizes of the groups.
    """

    def pairs() -> Iterator[tuple[Tensor, Tensor]]:
        for group, picked in rows_of.sampled(counts, rng).items():
            index = torch.tensor(picked, device=x.device)
            yield y[index], x[index].double() @ matrix(group)

    return difference(pairs())


def ranges_error(y: Tensor, grad: Tensor, x: Tensor, counts: Sequence[int], rng: random.Random) -> float:
    """The error of the gradient of weights (G, N, K), in some rows of some groups."""
    some = torch.tensor(sorted(rng.sample(range(y.shape[1]), min(16, y.shape[1]))), device=y.device)

    def pairs() -> Iterator[tuple[Tensor, Tensor]]:
        for group in rows_of.sampled(counts, rng):
            begin = sum(counts[:group])
            wanted = x.new_zeros(len(some), x.shape[1], dtype=torch.float64)
            # A part at a time: a group may have most of the rows.
            for rows in range(begin, begin + counts[group], 8192):
                part = slice(rows, min(rows + 8192, begin + counts[group]))
                wanted += grad[part][:, some].double().mT @ x[part].double()
            yield y[group][some], wanted

    return difference(pairs())


def empty_groups_are_zero(y: Tensor, counts: Sequence[int]) -> bool:
    """Whether gradients of weights that nobody used are 0."""
    empty = [group for group, count in enumerate(counts) if not count]
    return not any(bool(y[group].any().item()) for group in empty)


def floats_of(result: Any) -> list[Tensor]:
    """The tensors of floating point in a result."""
    parts = result if isinstance(result, tuple | list) else [result]
    return [x for x in parts if isinstance(x, Tensor) and x.is_floating_point()]


def poison(call: Call) -> None:
    """Call, and leave NaN in the memory of the result: the next one gets this memory, and what is not written shows."""
    shapes = [(x.shape, x.dtype, x.device) for x in floats_of(call())]
    filled = [torch.full(shape, math.nan, dtype=dtype, device=device) for shape, dtype, device in shapes]
    del filled


# ---------------------------------------------------------------------------------------------------------------------
# What is measured


@dataclass
class Task:
    """One measurement.

    Attributes:
        methods: of each method a call for each turn; ours is the first.
        error: of a method's result in a turn.
        tolerance: the largest error that counts as right.
        plans: what gemmery launches, as far as it can be looked up.
        floor_us: microseconds in which the touched weights are read once.
        flops: operations.
    """

    methods: dict[str, list[Call]]
    error: Callable[[str, int, Any], float]
    tolerance: float
    plans: Callable[[], list[Any]] = list
    floor_us: float | None = None
    flops: float = 0.0


def bare(inputs: Inputs, which: str, peers: Peers = NONE) -> Task:
    """The product up or down of rows that are sorted already."""
    (N, K), w = inputs.row.product(which), inputs.weight(which)
    x = inputs.normal(inputs.row.rows, K)
    shifts = inputs.turns(w.nbytes)
    offs = [inputs.offs(by) for by in shifts]
    methods: dict[str, list[Call]] = {
        OURS: [partial(gemmery.grouped_linear, x, w, offs=ends) for ends in offs],
        "torch": [partial(torch_product, x, w.mT, ends) for ends in offs],
    }
    if peers.is_compiled:
        best = compiled(torch_product)
        methods["compile"] = [partial(best, x, w.mT, ends) for ends in offs]
    if peers.quack:
        starts = [libraries.starts_of(ends) for ends in offs]
        methods[peers.name("quack")] = [partial(peers.quack.rows, x, w.mT, each) for each in starts]

    def error(name: str, turn: int, y: Any) -> float:
        return rows_error(y, x, lambda group: w[group].double().T, inputs.moved(shifts[turn]), inputs.rng)

    return Task(
        methods, error, PRODUCT, lambda: plans_of(methods[OURS][0]), rows_of.floor_us(inputs.counts, w.nbytes),
        2.0 * inputs.row.rows * N * K,
    )  # fmt: skip


def gradient(inputs: Inputs, what: str, peers: Peers = NONE) -> Task:
    """A gradient of the bare product: "up dX" or "down dW"."""
    which, of = what.split()
    N, K = inputs.row.product(which)
    grad, offs, counts = inputs.normal(inputs.row.rows, N), inputs.offs(), inputs.counts
    if of == "dX":
        w = inputs.weight(which)
        operands = (grad, w)
    else:
        x = inputs.normal(inputs.row.rows, K)
        operands = (grad.mT, x)
    methods: dict[str, list[Call]] = {
        OURS: [partial(gemmery.grouped_mm, *operands, offs=offs)],
        "torch": [partial(torch_product, *operands, offs)],
    }
    if peers.is_compiled:
        methods["compile"] = [partial(compiled(torch_product), *operands, offs)]
    if peers.quack:
        product = peers.quack.rows if of == "dX" else peers.quack.ranges
        methods[peers.name("quack")] = [partial(product, *operands, libraries.starts_of(offs))]

    def error(name: str, turn: int, y: Any) -> float:
        if of == "dX":
            return rows_error(y, grad, lambda group: operands[1][group].double(), counts, inputs.rng)
        # torch leaves open what the gradient of an empty group is.
        if name == OURS and not empty_groups_are_zero(y, counts):
            raise WrongResult("the gradient of an empty group is not 0")
        return ranges_error(y, grad, operands[1], counts, inputs.rng)

    return Task(
        methods, error, PRODUCT, lambda: plans_of(methods[OURS][0]), flops=2.0 * inputs.row.rows * N * K
    )


def packed(inputs: Inputs, what: str, peers: Peers = NONE) -> Task:
    """The bare product with a packed weight, "int4 up" or "mxfp4 down", beside ours with the same weight in bf16."""
    format, which = what.split()
    (N, K), w = inputs.row.product(which), inputs.weight(which)
    q = pack(w, format)
    x = inputs.normal(inputs.row.rows, K)
    shifts = inputs.turns(q.nbytes)
    offs = [inputs.offs(by) for by in shifts]
    methods: dict[str, list[Call]] = {
        OURS: [partial(gemmery.grouped_linear, x, q, offs=ends) for ends in offs],
        "bf16": [partial(gemmery.grouped_linear, x, w, offs=ends) for ends in offs],
    }

    def error(name: str, turn: int, y: Any) -> float:
        def matrix(group: int) -> Tensor:
            exact: Tensor = q[group].dequantize(torch.float32) if name == OURS else w[group]
            return exact.double().T

        return rows_error(y, x, matrix, inputs.moved(shifts[turn]), inputs.rng)

    return Task(
        methods, error, PRODUCT, lambda: plans_of(methods[OURS][0]), rows_of.floor_us(inputs.counts, q.nbytes),
        2.0 * inputs.row.rows * N * K,
    )  # fmt: skip


def block(inputs: Inputs, peers: Peers = NONE) -> Task:
    """Experts with routing."""
    row, experts, weights = inputs.row, inputs.experts, inputs.router
    x, size = inputs.normal(row.T, row.H), experts.gate_up.nbytes + experts.down.nbytes
    tops = [(inputs.top + by) % row.E for by in inputs.turns(size)]
    functions = {OURS: experts.ours, "grouped_mm": experts.by_groups}
    if rows_of.batched_fits(row):
        functions["batched_mm"] = experts.by_copies
    if peers.is_compiled:
        functions["compile"] = compiled(experts.by_groups)
    functions |= peers.blocks(experts.tensors, has_gradient=False)
    methods: dict[str, list[Call]] = {
        name: [partial(function, x, top, weights) for top in tops] for name, function in functions.items()
    }

    def error(name: str, turn: int, y: Any) -> float:
        some = inputs.token_sample()
        wanted = experts.reference(x[some].double(), tops[turn][some], weights[some].double())
        return difference(iter([(y[some], wanted)]))

    return Task(
        methods, error, BLOCK, lambda: plans_of(methods[OURS][0], inputs.normal(row.rows, row.I)),
        rows_of.floor_us(inputs.counts, size), 6.0 * row.rows * row.I * row.H,
    )  # fmt: skip


@dataclass
class Training:
    """A block whose gradients are wanted.

    Attributes:
        forward: by method, what returns the block's result.
        leaves: what has a gradient: the tokens, the weights of the router, those of the experts.
        grad: that of the result.
    """

    forward: dict[str, Callable[[], Tensor]]
    leaves: list[Tensor]
    grad: Tensor

    def backward(self, out: Tensor) -> tuple[Tensor, ...]:
        """All gradients."""
        return torch.autograd.grad(out, self.leaves, self.grad)

    def run(self, name: str) -> tuple[Tensor, ...]:
        """Forward and backward by a method."""
        return self.backward(self.forward[name]())


def training(inputs: Inputs, peers: Peers) -> Training:
    """The block of `block`, once."""
    row = inputs.row
    with torch.enable_grad():
        x, weights = inputs.normal(row.T, row.H).requires_grad_(), inputs.router.detach().requires_grad_()
        own = [tensor.detach().requires_grad_() for tensor in inputs.experts.tensors]
    experts = Experts(*own)
    functions = {OURS: experts.ours, "grouped_mm": experts.by_groups}
    if peers.is_compiled:
        functions["compile"] = compiled(experts.by_groups)
    functions |= peers.blocks(experts.tensors, has_gradient=True)
    forward: dict[str, Callable[[], Tensor]] = {
        name: partial(function, x, inputs.top, weights) for name, function in functions.items()
    }
    return Training(forward, [x, weights, *own], inputs.normal(row.T, row.H))


def step(inputs: Inputs, peers: Peers = NONE) -> Task:
    """Experts with routing, forward and backward."""
    row, made = inputs.row, training(inputs, peers)
    methods: dict[str, list[Call]] = {name: [partial(made.run, name)] for name in made.forward}
    hidden = inputs.normal(row.rows, row.I)

    def error(name: str, turn: int, grads: Any) -> float:
        return gradients_error(inputs, made, grads)

    return Task(
        methods,
        error,
        GRADIENT,
        lambda: plans_of(made.forward[OURS], hidden),
        flops=18.0 * row.rows * row.I * row.H,
    )


def gradients_error(inputs: Inputs, made: Training, grads: Sequence[Tensor]) -> float:
    """The largest error of the gradients: those of some tokens, and those of one expert's weights."""
    (x, weights, *_), experts = (leaf.detach() for leaf in made.leaves), inputs.experts
    some = inputs.token_sample()
    tokens, factors = (tensor[some].double().requires_grad_() for tensor in (x, weights))
    out = experts.reference(tokens, inputs.top[some], factors)
    wanted = torch.autograd.grad(out, [tokens, factors], made.grad[some].double())
    errors = [difference(iter([(got[some], want)])) for got, want in zip(grads, wanted, strict=False)]
    # One with as many rows as most have: the largest may have so many that float64 takes too much memory.
    there = sorted((count, expert) for expert, count in enumerate(inputs.counts) if count)
    expert = there[len(there) // 2][1]
    token, choice = (inputs.top == expert).nonzero(as_tuple=True)
    own = [tensor[expert].double().requires_grad_() for tensor in experts.tensors]
    y = experts.exact(expert, x[token].double(), own) * weights[token, choice].double().unsqueeze(-1)
    wanted = torch.autograd.grad(y, own, made.grad[token].double())
    errors += [difference(iter([(got[expert], want)])) for got, want in zip(grads[2:], wanted, strict=True)]
    return max(errors)


def routing(inputs: Inputs, peers: Peers = NONE) -> Task:
    """Routing and the weighted sum, with no products in between."""
    row, top, weights = inputs.row, inputs.top, inputs.router
    counts = torch.tensor(inputs.counts, device=inputs.device)
    # All rows of an expert are the same, since torch sorts in no particular order.
    own = inputs.normal(row.E, row.H)
    y = own.repeat_interleave(counts, 0, output_size=row.rows)
    methods: dict[str, list[Call]] = {
        OURS: [lambda: moe.combine(y, moe.route(top, row.E), weights)],
        "torch": [partial(routed_by_torch, y, top, weights, row.E)],
    }

    def error(name: str, turn: int, out: Any) -> float:
        if name == OURS and not torch.equal(
            moe.route(top, row.E).order.long(), top.flatten().argsort(stable=True)
        ):
            raise WrongResult("the order of the choices is not stable")
        return difference(iter([(out, (own.double()[top] * weights.double().unsqueeze(-1)).sum(1))]))

    return Task(methods, error, BLOCK)


def memory(inputs: Inputs, peers: Peers = NONE) -> Entry:
    """Peak bytes of forward and backward beyond the operands, and bytes held between the two, by method."""
    made = training(inputs, peers)
    entry: Entry = {"bytes": {}, "held_bytes": {}, "errors": {}, "left_out": {}}
    for name, forward in made.forward.items():
        try:
            # The first time, code is compiled and workspaces are made.
            found = gradients_error(inputs, made, made.run(name))
            entry["errors"][name] = checked(name, found, GRADIENT)
            entry["bytes"][name], entry["held_bytes"][name] = peak_of(made, forward)
        except Exception as error:
            if name == OURS:
                raise
            entry["left_out"][name] = reason_of(error)
    return entry


def peak_of(made: Training, forward: Callable[[], Tensor]) -> tuple[int, int]:
    """Peak bytes of one forward and backward, and bytes held between the two, beyond what there was before."""
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out = forward()
    held = torch.cuda.memory_allocated() - before - out.nbytes
    grads = made.backward(out)
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - before
    del out, grads
    return peak, held


def task_of(inputs: Inputs, measure: str, peers: Peers = NONE) -> Task:
    """The task of something in `PARTS` but "memory"."""
    match part_of(measure):
        case "bare":
            return bare(inputs, measure, peers)
        case "gradients":
            return gradient(inputs, measure, peers)
        case "packed":
            return packed(inputs, measure, peers)
        case part:
            return {"block": block, "step": step, "routing": routing}[part](inputs, peers)


# ---------------------------------------------------------------------------------------------------------------------
# Plans


class _Found(Exception):
    """Ends a call whose plans are known."""


def plans_of(call: Callable[[], Any], hidden: Tensor | None = None) -> list[Any]:
    """The plans of the grouped products in a call, none of which is launched.

    Args:
        hidden: what the first of two products returns; None if there is one.
    """
    found: list[Any] = []

    def product(op: str, a: Any, b: Any, bias: Any, functions: Any, out: Any, options: Any) -> Any:
        found.append(run.plan(op, a, b, bias, Functions(*functions), out, Options(*options)))
        if hidden is None or len(found) > 1:
            raise _Found
        return hidden

    with (
        mock.patch.object(importlib.import_module("gemmery.grouped"), "product", product),
        contextlib.suppress(_Found),
    ):
        call()
    return [plan for plan in found if plan is not None]


def configs_of(task: Task) -> list[str]:
    """The configs that were chosen; none where they can't be looked up."""
    try:
        return [str(plan.config) for plan in task.plans() if plan.config is not None]
    except Exception as error:
        print(f"no config: {error}", file=sys.stderr)
        return []


@contextlib.contextmanager
def abstract(device: devices.Device) -> Iterator[None]:
    """Within, tensors of the meta device count as those of a GPU, and plans are made without compiling."""

    def route(index: Tensor, count: int) -> moe.Routing:
        ends, ids = (index.new_empty(size, dtype=torch.int32) for size in (count, index.numel()))
        return moe.Routing(ends, ends, ids, ids, ids, tuple(index.shape))

    with (
        mock.patch.object(devices, "current", return_value=device),
        mock.patch.object(prepare, "make_plan", lambda problem, *_: SimpleNamespace(problem=problem)),
        mock.patch.object(sys.modules["gemmery.moe.experts"], "route", route),
    ):
        yield


def problems_of(wanted: Sequence[tuple[Row, str]], device: devices.Device) -> list[Any]:
    """The problems of everything that is to be measured, each once. What can't be looked up will say so later."""
    found: dict[Any, None] = {}
    with abstract(device), torch.no_grad():
        for row, each in itertools.groupby(wanted, lambda pair: pair[0]):
            inputs = Inputs(row, 0, "meta")
            for _, measure in each:
                if part_of(measure) in ("routing", "memory"):
                    continue
                with contextlib.suppress(Exception):
                    found |= {plan.problem: None for plan in task_of(inputs, measure).plans()}
    return list(found)


def compile_ahead(wanted: Sequence[tuple[Row, str]], processes: int) -> None:
    """Compile what will be chosen, in several processes; this one then finds it in Triton's cache."""
    device = devices.current(torch.device("cuda"))
    assert device is not None
    begun = time.monotonic()
    problems = problems_of(wanted, device)
    with Workers(Target.active(), processes) as workers:
        jobs = [workers.submit(problem, select.candidates(problem)[0]) for problem in problems]
        for job in jobs:
            if died := job.result():
                print(died, flush=True)
    print(f"compiled {len(jobs)} products in {time.monotonic() - begun:.0f} s", flush=True)


# ---------------------------------------------------------------------------------------------------------------------
# Measuring


def reason_of(error: BaseException) -> str:
    """An error in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


class InTurn:
    """Calls the next of several calls."""

    def __init__(self, calls: Sequence[Call]) -> None:
        self.calls = itertools.cycle(calls)

    def __call__(self) -> object:
        """What that call returns."""
        return next(self.calls)()


def checked(name: str, error: float, tolerance: float) -> float:
    """An error that is small; else WrongResult."""
    if not error <= tolerance:  # written this way round, NaN fails too
        raise WrongResult(f"{name}: relative error {error:.2e} is over {tolerance:.0e}")
    return error


def checked_calls(task: Task) -> tuple[dict[str, Call], dict[str, float], dict[str, str]]:
    """The calls of all methods whose results are right, their errors, and why peers were left out.

    Raises:
        Exception: whatever ours fails with.
    """
    calls: dict[str, Call] = {}
    errors, left_out = {}, {}
    for name, turns in task.methods.items():
        try:
            found = []
            for turn, call in enumerate(turns):
                poison(call)
                result = call()
                if name == OURS and not all(bool(x.isfinite().all()) for x in floats_of(result)):
                    raise WrongResult("something was not written or is not finite")
                found.append(checked(name, task.error(name, turn, result), task.tolerance))
                del result
            errors[name] = max(found)
            call = turns[0] if len(turns) == 1 else InTurn(turns)
            calls[name] = libraries.Waiting(call) if library_of(name) in libraries.WAITS else call
        except Exception as error:
            if name == OURS:
                raise
            left_out[name] = reason_of(error)
    return calls, errors, left_out


def timed(
    calls: dict[str, Call], regimes: Sequence[str], rounds: int, seed: int, watch: Stopwatch
) -> tuple[dict[str, list[timing.Round]], dict[str, str]]:
    """The rounds of each regime, and why libraries are not in some: a call that waits for the GPU is in no graph."""
    found: dict[str, list[timing.Round]] = {}
    left_out: dict[str, str] = {}
    for regime in regimes:
        waiting = [name for name, call in calls.items() if isinstance(call, libraries.Waiting)]
        without = dict.fromkeys(waiting if regime == "graph" else (), libraries.NO_GRAPH)
        there = {name: call for name, call in calls.items() if name not in without}
        try:
            compared = timing.measure(there, rounds=rounds, seed=seed, regimes=[regime], watch=watch)
        except Exception as error:
            # Whatever a library can't do, the others are timed.
            if isinstance(error, torch.OutOfMemoryError) or not any(map(library_of, there)):
                raise
            without |= {name: reason_of(error) for name in there if library_of(name)}
            there = {name: call for name, call in calls.items() if name not in without}
            compared = timing.measure(there, rounds=rounds, seed=seed, regimes=[regime], watch=watch)
        found |= compared.rounds
        left_out |= {f"{name} ({regime})": reason for name, reason in without.items()}
    return found, left_out


def measured(task: Task, regimes: Sequence[str], rounds: int, seed: int, watch: Stopwatch) -> Entry:
    """Check and time a task; what an entry has of it."""
    calls, errors, left_out = checked_calls(task)
    times, not_timed = timed(calls, regimes, rounds, seed, watch)
    left_out |= not_timed
    medians = {
        regime: {
            name: round(statistics.median(one[name] for one in each) * 1e6, 3)
            for name in calls
            if name in each[0]
        }
        for regime, each in times.items()
    }
    return {
        "configs": configs_of(task), "turns": len(task.methods[OURS]), "floor_us": task.floor_us, "flops": task.flops,
        "errors": errors, "left_out": left_out, "us": medians, "rounds": times,
    }  # fmt: skip


def measure(inputs: Inputs, what: str, rounds: int, peers: Peers, watch: Stopwatch) -> Entry:
    """One entry of the results."""
    row = inputs.row
    entry: Entry = {
        "name": row.name, "measure": what, "part": part_of(what), "row": row.record(),
        "touched": rows_of.touched(inputs.counts), "most_rows": max(inputs.counts),
    }  # fmt: skip
    needed, free = rows_of.needed_bytes(row, what), USABLE * torch.cuda.mem_get_info()[0]
    if needed > free:
        return entry | {"skipped": f"needs about {needed / 2**30:.0f} GiB, {free / 2**30:.0f} are free"}
    try:
        if what == "memory":
            return entry | memory(inputs, peers)
        with torch.set_grad_enabled(what == "step"):
            task = task_of(inputs, what, peers)
            return entry | measured(task, row.regimes(), rounds, inputs.seed, watch)
    except torch.OutOfMemoryError as error:
        return entry | {"skipped": reason_of(error)}
    except Exception as error:
        traceback.print_exc(file=sys.stderr)
        return entry | {"error": reason_of(error)}


def line_of(entry: Entry) -> str:
    """What is printed of an entry."""
    head = f"{entry['name']:28s} {entry['measure']:10s}"
    for reason in ("skipped", "error"):
        if reason in entry:
            return f"{head} {reason}: {entry[reason]}"
    if "bytes" in entry:
        peaks = " ".join(f"{name} {peak / 2**20:.0f} MiB" for name, peak in entry["bytes"].items())
        return "\n".join([f"{head} {peaks}", *without_of(entry, head)])
    lines = []
    for regime, us in entry["us"].items():
        times = " ".join(f"{name} {time:.1f}" for name, time in us.items())
        ratio, floor = summary.best_ratio(entry, regime), summary.floor_share(entry, regime)
        figures = ("" if ratio is None else f" ratio {ratio:.3f}") + (
            "" if floor is None else f" floor {floor:.2f}"
        )
        lines.append(f"{head} {regime:5s} {times}{figures} {' '.join(entry['configs'])}")
    return "\n".join([*lines, *without_of(entry, head)])


def without_of(entry: Entry, head: str) -> list[str]:
    """The lines that say which peers failed."""
    return [f"{head} without {name}: {reason}" for name, reason in entry["left_out"].items()]


# ---------------------------------------------------------------------------------------------------------------------
# The command


def arguments_of(words: Sequence[str] | None) -> argparse.Namespace:
    """The command's options."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--list", action="store_true", help="name the rows and what is measured of them")
    parser.add_argument(
        "--rows", default="", metavar="REGEX", help="these rows alone, by a part of their names"
    )
    parser.add_argument("--parts", default=",".join(PARTS), help=f"some of {', '.join(PARTS)}")
    parser.add_argument("--seed", type=int, metavar="N", help="add random rows of this seed")
    parser.add_argument("--count", type=int, default=24, help="how many random rows (24)")
    parser.add_argument("--no-suite", action="store_true", help="random rows alone")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--compile", action="store_true", help="torch.compile as one more peer; takes long")
    parser.add_argument(
        "--peers",
        default=",".join(LIBRARIES),
        help="libraries to measure where they are installed; all by default",
    )
    parser.add_argument("--tune-peers", action="store_true", help="libraries tune themselves; takes long")
    parser.add_argument(
        "--limit", type=float, default=math.inf, metavar="SECONDS", help="begin nothing after that"
    )
    parser.add_argument("--processes", type=int, default=15, help="that compile ahead; 0 for none (15)")
    parser.add_argument(
        "--inputs", type=int, metavar="N", help="the seed of inputs and choices; a new one by default"
    )
    parser.add_argument(
        "--without",
        type=Path,
        action="append",
        default=[],
        metavar="FILE",
        help="leave out what this result has",
    )
    parser.add_argument(
        "--output", type=Path, metavar="FILE", help="by default a file in benchmarks/results/grouped"
    )
    options = parser.parse_args(words)
    options.parts = options.parts.split(",")
    if unknown := set(options.parts) - set(PARTS):
        parser.error(f"--parts: unknown {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    options.peers = [name for name in options.peers.split(",") if name]
    if unknown := set(options.peers) - set(LIBRARIES):
        parser.error(f"--peers: unknown {', '.join(sorted(unknown))}; there are {', '.join(LIBRARIES)}")
    if options.no_suite and options.seed is None:
        parser.error("--no-suite: nothing is left; give --seed")
    return options


def wanted_of(options: argparse.Namespace) -> list[tuple[Row, str]]:
    """What is to be measured, row by row."""
    rows = [] if options.no_suite else rows_of.suite()
    rows += [] if options.seed is None else rows_of.draw(options.seed, options.count)
    results = [json.loads(path.read_text(encoding="utf-8")) for path in options.without]
    known = {
        summary.key(entry)
        for data in results
        for entry in data["entries"]
        if "us" in entry or "bytes" in entry
    }
    return [
        (row, what)
        for row in rows
        if re.search(options.rows, row.name)
        for what in row.measures()
        if part_of(what) in options.parts
        and summary.key({"name": row.name, "measure": what, "row": row.record()}) not in known
    ]


def listing(wanted: Sequence[tuple[Row, str]]) -> str:
    """What `--list` prints."""
    lines = []
    for row, each in itertools.groupby(wanted, lambda pair: pair[0]):
        lines.append(f"{row.name}: {row.sizes}; {', '.join(what for _, what in each)}")
    return "\n".join([*lines, f"{len(lines)} rows, {len(wanted)} measurements"])


def save(path: Path, header: Entry, entries: Sequence[Entry]) -> None:
    """Write the results."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(header | {"entries": list(entries)}, indent=1, ensure_ascii=False)
    path.write_text(text + "\n", encoding="utf-8")


def main(words: list[str] | None = None) -> int:
    """Run; 0 if everything was measured, 1 if something failed, 2 where there is no GPU."""
    options = arguments_of(words)
    begun, wanted = time.monotonic(), wanted_of(options)
    if options.list:
        print(listing(wanted))
        return 0
    if not torch.cuda.is_available():
        print("grouped: there is no GPU to measure", file=sys.stderr)
        return 2
    seed = random.SystemRandom().getrandbits(31) if options.inputs is None else options.inputs
    header: Entry = describe_run(seed, options.rounds, ["graph", "burst"], "cuda", [])
    header |= {"suite": summary.FOLDER}
    header |= {} if options.seed is None else {"drawn": options.seed}
    suffix = "" if options.seed is None else f"-seed{options.seed}"
    path = options.output or OUT / f"triton{triton_version(header)}{suffix}.json"
    if options.processes:
        compile_ahead(wanted, options.processes)
    peers = libraries.find(options.peers, options.tune_peers, options.compile)
    print(peers, flush=True)
    header |= peers.record()
    watch, seconds = PatientStopwatch(), dict.fromkeys(PARTS, 0.0)
    entries: list[Entry] = []
    for row, each in itertools.groupby(wanted, lambda pair: pair[0]):
        inputs = None
        for what in (what for _, what in each):
            start = time.monotonic()
            if start - begun > options.limit or is_broken(entries):
                break
            inputs = inputs or Inputs(row, seed)
            entries.append(measure(inputs, what, options.rounds, peers, watch))
            print(line_of(entries[-1]), flush=True)
            save(path, header, entries)
            free_memory(entries)
            seconds[part_of(what)] += time.monotonic() - start
        del inputs
        free_memory(entries)
    save(path, header, entries)
    print(summary.report(entries))
    print(", ".join(f"{part} {spent:.0f} s" for part, spent in seconds.items() if spent))
    if left := len(wanted) - len(entries):
        print(f"{left} of {len(wanted)} measurements were not begun")
    print(f"{len(entries)} measurements in {time.monotonic() - begun:.0f} s: {path}")
    return int(any("error" in entry for entry in entries))


def free_memory(entries: Sequence[Entry]) -> None:
    """Give back what nobody holds any more."""
    gc.collect()
    if not is_broken(entries):
        torch.cuda.empty_cache()


def is_broken(entries: Sequence[Entry]) -> bool:
    """Whether a kernel has failed so that this process can't use the GPU any more."""
    return bool(entries) and "CUDA error" in entries[-1].get("error", "")


if __name__ == "__main__":
    sys.exit(main())
