"""Every kind of operand with every kind of result in every context of torch: the table, and what each cell asserts.

A cell computes a product and compares it with float64, gradients included, or expects the documented error. No cell is
left out: `verdict` says of each what is expected, and `test_contexts` counts them.
"""

from __future__ import annotations

import copy
import functools
import io
import itertools
import pickle
import re
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import gemmery
from gemmery import devices

#: M, N and K.
SIZE = (4, 32, 128)
#: Of products with scales of blocks: several blocks of 128 along N and K, the last of them not whole.
SIZES = {"scaled by block": (4, 192, 320), "scaled by mx": (4, 192, 320)}
PACKED = ("int8", "int4", "e4m3", "e5m2", "mxfp4", "nvfp4", "nf4")
#: All kinds whose weight is one tensor of several.
WEIGHTS = (*PACKED, "sparse")
SCALED = ("tensor", "row", "block", "mx")
KINDS = ("dense", "pair", "groups", "blocks", *WEIGHTS, *[f"scaled by {x}" for x in SCALED])
#: The ends of the groups of M rows, one of them empty; the last row is behind them.
ENDS = (1, 3, 3)
#: Kinds of operands whose types are float32.
WIDE = ("dense", "pair", "groups", "blocks")
#: Of a block-sparse weight, the sizes of its blocks, and which are stored.
BLOCK, STORED = 16, ((0, 1, 0, 0, 1, 0, 1, 0), (0, 0, 1, 0, 1, 0, 0, 0))
RESULTS = ("bare", "bias", "plain epilogue", "prebuilt epilogue", "prologue", "several", "out")
CONTEXTS = (
    "eager", "no_grad", "inference_mode", "autograd", "double backward", "autocast", "checkpoint", "compiled",
    "compiled dynamic", "compiled with gradients", "make_fx", "fake tensors", "vmap", "func.grad", "dispatch mode",
    "batch_invariant", "CUDA graph", "deepcopy", "pickle", "DTensor",
)  # fmt: skip


# ---------------------------------------------------------------------------------------------------------------------
# What is computed


def activated(acc, r):
    """An epilogue of a matrix."""
    return torch.tanh(acc) + r


def gated(acc, r):
    """One that halves the columns."""
    gate, up = acc.chunk(2, -1)
    return torch.sigmoid(gate) * up + r


def activated_and_amax(acc, r):
    """One with two results."""
    return torch.tanh(acc) + r, acc.amax(-1)


def gated_and_amax(acc, r):
    """The same that halves the columns."""
    return gated(acc, r), acc.amax(-1)


def stretched(x, s):
    """A prologue."""
    return x * s


PREBUILT = {f: gemmery.epilogue(f) for f in (activated, gated, activated_and_amax, gated_and_amax)}


def values(*shape, seed):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@dataclass
class Case:
    """A product: a function of tensors, `leaves`, which gradients may be asked of, and what it is in float64.

    Attributes:
        held: the packed or sparse weight, the two scaled operands or the ends of groups, which are no leaves.
    """

    kind: str
    result: str
    device: torch.device
    leaves: dict[str, torch.Tensor]
    held: tuple[Any, ...]
    out: torch.Tensor | None

    @classmethod
    def of(cls, kind: str, result: str, device: torch.device) -> Case:
        dtype = torch.float32 if kind in WIDE else torch.bfloat16
        M, N, K = SIZES.get(kind, SIZE)
        x, w = values(M, K, seed=1), values(N, K, seed=2) / K**0.5
        # Parts of a matrix differ in size, so that a scale in another's place shows.
        x, w = (
            x * torch.exp2(torch.arange(K) // 32 % 5 - 2),
            w * torch.exp2(torch.arange(N) // 64 % 3 - 1)[:, None],
        )
        columns = N // 2 if kind == "pair" else N
        leaves, held = {"x": x}, ()
        if kind == "dense":
            leaves["w"] = w
        elif kind == "pair":
            leaves["gate"], leaves["up"] = w.chunk(2)
        elif kind == "groups":
            leaves["w"] = torch.stack([w, w.flip(0), -w])
            held = (torch.tensor(ENDS, dtype=torch.int32, device=device),)
        elif kind == "blocks":
            ends, places, parts = _indices(w)
            leaves["w"] = parts
            held = (ends.to(device), places.to(device))
        elif kind in WEIGHTS:
            held = (_packed(kind, w.to(dtype), device),)
        else:
            held = _scaled(kind.removeprefix("scaled by "), x.float(), w.float(), device)
            leaves = {}
        if result == "bias":
            leaves["bias"] = values(*([len(ENDS)] if kind == "groups" else []), N, seed=3)
        if result in ("plain epilogue", "prebuilt epilogue", "several") or kind == "pair":
            leaves["r"] = values(M, columns, seed=4)
        if result == "prologue":
            leaves["s"] = values(M, 1, seed=5)
        leaves = {name: t.to(device, dtype).contiguous() for name, t in leaves.items()}
        out = torch.full((M, columns), torch.nan, dtype=dtype, device=device) if result == "out" else None
        return cls(kind, result, device, leaves, held, out)

    @property
    def function(self):
        """The epilogue, if there is one."""
        if self.result == "several":
            return gated_and_amax if self.kind == "pair" else activated_and_amax
        if self.kind == "pair" and self.result not in ("bare", "bias"):
            return gated
        return activated if "epilogue" in self.result else None

    def run(
        self, *tensors: torch.Tensor, held: tuple[Any, ...] | None = None, out=None, **options: Any
    ) -> Any:
        """gemmery's product of the leaves."""
        given = dict(zip(self.leaves, tensors, strict=True))
        held = self.held if held is None else held
        how: dict[str, Any] = dict(options)
        if self.function is not None:
            # Compiled code takes prebuilt ones alone; the plain one has a column of its own.
            plain = self.result == "plain epilogue"
            how.setdefault("epilogue", self.function if plain else PREBUILT[self.function])
            how["args"] = (given["r"],)
        if "s" in given:
            how["prologue"], how["prologue_args"] = stretched, (given["s"],)
        if self.out is not None:
            how["out"] = self.out if out is None else out
        if "bias" in given:
            how["bias"] = given["bias"].chunk(2) if self.kind == "pair" else given["bias"]
        if self.kind.startswith("scaled"):
            return gemmery.scaled_matmul(*held, **how)
        if self.kind == "groups":
            return gemmery.grouped_linear(given["x"], given["w"], offs=held[0], **how)
        if self.kind == "blocks":
            shape = SIZE[1:]
            weight = torch.sparse_bsr_tensor(*held, given["w"], size=shape, check_invariants=False)
            return gemmery.linear(given["x"], weight, **how)
        weight = (given["gate"], given["up"]) if self.kind == "pair" else held[0] if held else given["w"]
        return gemmery.linear(given["x"], weight, **how)

    def reference(self, *tensors: torch.Tensor) -> Any:
        """The same in float64."""
        given = dict(zip(self.leaves, tensors, strict=True))
        if self.kind.startswith("scaled"):
            x, w = (t.dequantize().double() for t in self.held)
        else:
            x = given["x"]
            pair = torch.cat((given["gate"], given["up"])) if self.kind == "pair" else None
            packed = plain(self.held[0]).double() if self.kind in WEIGHTS else None
            w = next((x for x in (pair, packed) if x is not None), given.get("w"))
        if "s" in given:
            x = stretched(x, given["s"])
        if self.kind == "blocks":
            w = _whole(w)
        if self.kind == "groups":
            return self._of_groups(x, w, given)
        acc = F.linear(x, w, given.get("bias"))
        return acc if self.function is None else self.function(acc, given["r"])

    def _of_groups(self, x: torch.Tensor, w: torch.Tensor, given: dict[str, torch.Tensor]) -> Any:
        """Rows behind the last group are 0 in all results."""
        biases = given.get("bias", [None] * len(w))
        bounds = zip((0, *ENDS), ENDS, w, biases, strict=False)
        acc = torch.cat([F.linear(x[i:j], of_group, bias) for i, j, of_group, bias in bounds])
        count, behind = ENDS[-1], x.shape[0] - ENDS[-1]
        made = acc if self.function is None else self.function(acc, given["r"][:count])
        padded = [
            torch.cat((y, y.new_zeros(behind, *y.shape[1:])))
            for y in (made if isinstance(made, tuple) else (made,))
        ]
        return tuple(padded) if isinstance(made, tuple) else padded[0]

    def wide(self) -> list[torch.Tensor]:
        """The leaves in float64."""
        return [t.detach().double() for t in self.leaves.values()]

    @property
    def tolerance(self) -> float:
        """Of the norm of an error over that of what is right."""
        return 2e-5 if self.kind in WIDE else 2e-2


def _indices(w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Where the blocks of a block-sparse weight are, in BSR, and those of a matrix."""
    mask = torch.tensor(STORED, dtype=torch.bool)
    parts = w.unflatten(1, (-1, BLOCK)).unflatten(0, (-1, BLOCK)).permute(0, 2, 1, 3)
    return F.pad(mask.sum(1).cumsum(0), (1, 0)), mask.nonzero()[:, 1].contiguous(), parts[mask]


def _whole(values: torch.Tensor) -> torch.Tensor:
    """The dense weight of its blocks."""
    rows, cols = torch.tensor(STORED, device=values.device).nonzero().T
    whole = values.new_zeros(len(STORED), len(STORED[0]), BLOCK, BLOCK).index_put((rows, cols), values)
    return whole.permute(0, 2, 1, 3).reshape(SIZE[1:])


def plain(weight: Any) -> torch.Tensor:
    """The plain tensor of a packed or sparse weight."""
    return weight.dense() if isinstance(weight, gemmery.SparseTensor) else weight.dequantize()


def _packed(format: str, w: torch.Tensor, device: torch.device) -> Any:
    if format == "sparse":
        return gemmery.sparsify(w.to(device))
    group = {"group_size": 32} if format in ("int4", "nf4") else {}
    return gemmery.quantize(w.to(device), format, **group)


def _scaled(per: str, x: torch.Tensor, w: torch.Tensor, device: torch.device) -> tuple[Any, Any]:
    x, w = x.to(device), w.to(device)
    if per == "block":
        down, along = -(-w.shape[0] // 128), -(-w.shape[1] // 128)
        scale = torch.exp2(torch.arange(down * along, device=device).float() - 6).reshape(down, along)
        spread = scale.repeat_interleave(128, 0).repeat_interleave(128, 1)[: w.shape[0], : w.shape[1]]
        weight = gemmery.ScaledTensor((w / spread).clamp(-448, 448).to(torch.float8_e4m3fn), scale)
        return gemmery.quantize_activations(x, per="block"), weight
    per = {"row": "token"}.get(per, per)
    return gemmery.quantize_activations(x, per=per), gemmery.quantize_activations(w, per=per)


# ---------------------------------------------------------------------------------------------------------------------
# What is expected of each cell


@dataclass(frozen=True)
class Raises:
    """A cell that raises a documented error.

    Attributes:
        kind: of the error.
        message: a piece of it.
    """

    kind: type[Exception]
    message: str


@dataclass(frozen=True)
class Absent:
    """A cell that can't exist."""

    why: str


#: The value, compared with float64.
VALUE = "value"
_GRADIENTS = ("autograd", "double backward", "checkpoint", "compiled with gradients", "func.grad")
_COMPILED = ("compiled", "compiled dynamic", "compiled with gradients")
_WITHOUT_BSR = (*_COMPILED, "double backward", "make_fx", "fake tensors", "func.grad")
_SEEN = ("make_fx", "vmap", "func.grad", "dispatch mode", "batch_invariant", "fake tensors")


def verdict(kind: str, result: str, context: str, gpu: bool, kernels: bool) -> Any:
    """What is expected of a cell: `VALUE`, `Raises` or `Absent`.

    Args:
        gpu: whether it runs on one.
        kernels: whether kernels run, compiled or interpreted, and not the reference.
    """
    scaled = kind.startswith("scaled")
    if scaled and result == "prologue":
        return Absent("scaled_matmul has no prologue: its operand is quantised already")
    if context == "CUDA graph" and not gpu:
        return Absent("there are no CUDA graphs without a GPU")
    is_plain = kind == "dense" and result not in ("prebuilt epilogue", "several")
    if context in ("deepcopy", "pickle") and (is_plain or (kind == "pair" and result in ("bare", "bias"))):
        return Absent("tensors and plain functions are torch's and Python's to copy")
    if context == "DTensor" and scaled:
        return Absent("a ScaledTensor is no tensor, and distribute_tensor does not take it")
    if scaled and context in _GRADIENTS:
        if not set(_leaf_names(kind, result)):
            return Absent("nothing that can require a gradient goes in")
        return Raises(Exception if context in _COMPILED else TypeError, "no gradient for")
    if kind == "pair" and result in ("bare", "bias"):
        return Raises(Exception if context in _COMPILED else TypeError, "is a pair")
    if kind == "blocks" and context in _WITHOUT_BSR:
        return Absent("torch makes no BSR tensors there, or its own have no such derivative")
    if context == "vmap" and kind == "blocks" and result != "out":
        return Raises(NotImplementedError, "vmap: a product with a block-sparse operand can't be mapped")
    if context == "vmap" and kind == "groups" and result != "out":
        return Raises(NotImplementedError, "vmap: a grouped product can't be mapped")
    if context == "vmap" and scaled and result in ("bare", "bias", "out"):
        return Absent("a ScaledTensor can't be mapped, and nothing else goes in that could be")
    if context == "DTensor":
        return _of_dtensors(kind, result)
    return _of_out(kind, context) if result == "out" else VALUE


def _of_dtensors(kind: str, result: str) -> Any:
    """Of DTensors, of which a packed or block-sparse weight is none."""
    if kind == "blocks":
        return Raises(RuntimeError, "mixed torch.Tensor and DTensor")
    if result == "out":
        return Raises(ValueError, "out= does not support DTensors")
    if kind == "groups":
        return Raises(ValueError, "a product of DTensors can't have groups")
    if kind in ("dense", "pair"):
        return VALUE
    return Raises(TypeError, "x is a DTensor and weight's (words|values) a plain tensor")


def _of_out(kind: str, context: str) -> Any:
    """Of out=, which no gradient goes through."""
    if context in ("func.grad", "vmap"):
        return Absent("transforms have no place that a function could write to")
    fused = kind != "dense"
    if context in _COMPILED:
        if kind in ("dense", "groups") and context != "compiled with gradients":
            return VALUE
        return Raises(Exception, "out=")
    if context in _GRADIENTS:
        return Raises(ValueError, "out= .*does not support gradients|out= does not support gradients")
    if context in _SEEN and fused:
        return Raises(ValueError, "out= with")
    return VALUE


def _leaf_names(kind: str, result: str) -> list[str]:
    return list(Case.of(kind, result, torch.device("cpu")).leaves)


# ---------------------------------------------------------------------------------------------------------------------
# Contexts: what each asserts


def near(found: Any, want: Any, tolerance: float, what: str) -> None:
    """One result, or several, near what is right."""
    many = isinstance(want, tuple | list)
    assert isinstance(found, tuple | list) == many, f"{what}: {type(found).__name__}"
    for x, y in zip(found if many else [found], want if many else [want], strict=True):
        assert x is not None, f"{what}: nothing"
        assert x.shape == y.shape, f"{what}: {tuple(x.shape)} for {tuple(y.shape)}"
        error = (x.detach().double() - y.detach()).norm() / y.detach().norm().clamp(min=1e-3)
        assert error < tolerance, f"{what}: off by {error:.2g}"


def total(results: Any) -> torch.Tensor:
    """A number that depends on all results."""
    parts = results if isinstance(results, tuple | list) else (results,)
    return sum((x.double() ** 2).sum() for x in parts)


def eager(case: Case) -> None:
    found = case.run(*case.leaves.values())
    near(found, case.reference(*case.wide()), case.tolerance, "value")
    if case.out is not None:
        assert found is case.out


def no_grad(case: Case) -> None:
    for leaf in case.leaves.values():
        leaf.requires_grad_()
    with torch.no_grad():
        eager(case)


def inference_mode(case: Case) -> None:
    with torch.inference_mode():
        eager(Case.of(case.kind, case.result, case.device))


def _gradients(case: Case, run: Any, names: list[str]) -> None:
    leaves = [t.detach().requires_grad_(name in names) for name, t in case.leaves.items()]
    wide = [t.requires_grad_(name in names) for name, t in zip(case.leaves, case.wide(), strict=True)]
    results, want = run(*leaves), case.reference(*wide)
    near(results, want, case.tolerance, "value")
    chosen = [[t for t in each if t.requires_grad] for each in (leaves, wide)]
    found = torch.autograd.grad(total(results), chosen[0])
    expected = torch.autograd.grad(total(want), chosen[1])
    for name, x, y in zip(names, found, expected, strict=True):
        near(x, y, 2 * case.tolerance, f"gradient of {name} where {', '.join(names)} require one")


def _subsets(case: Case) -> list[list[str]]:
    names = list(case.leaves)
    return [list(some) for n in range(1, len(names) + 1) for some in itertools.combinations(names, n)]


def autograd(case: Case) -> None:
    for names in _subsets(case):
        _gradients(case, case.run, names)


def double_backward(case: Case) -> None:
    def second(f: Any, leaves: list[torch.Tensor]) -> Any:
        first = torch.autograd.grad(total(f(*leaves)), leaves, create_graph=True)
        return torch.autograd.grad(sum((g.double() ** 2).sum() for g in first), leaves)

    found = second(case.run, [t.detach().requires_grad_() for t in case.leaves.values()])
    want = second(case.reference, [t.requires_grad_() for t in case.wide()])
    for name, x, y in zip(case.leaves, found, want, strict=True):
        near(x, y, 4 * case.tolerance, f"second derivative by {name}")


def autocast(case: Case) -> None:
    with torch.autocast(case.device.type, torch.bfloat16):
        found = case.run(*case.leaves.values())
    near(found, case.reference(*case.wide()), 2e-2, "value")
    first = found[0] if isinstance(found, tuple) else found
    assert first.dtype == (torch.bfloat16 if case.out is None else case.out.dtype)


def checkpointed(case: Case) -> None:
    run = functools.partial(checkpoint, case.run, use_reentrant=False)
    _gradients(case, run, list(case.leaves))


def compile_case(case: Case, **options: Any) -> Any:
    torch.compiler.reset()
    return torch.compile(lambda *tensors: case.run(*tensors), fullgraph=True, backend="aot_eager", **options)


def compiled(case: Case) -> None:
    near(compile_case(case)(*case.leaves.values()), case.reference(*case.wide()), case.tolerance, "value")


def compiled_dynamic(case: Case) -> None:
    step = compile_case(case, dynamic=True)
    near(step(*case.leaves.values()), case.reference(*case.wide()), case.tolerance, "value")
    if case.kind.startswith("scaled"):
        return  # the rows are those of an operand, which is no argument
    case.leaves = {n: torch.cat((t, t[:3])) if n in ("x", "r", "s") else t for n, t in case.leaves.items()}
    if case.out is not None:
        case.out = torch.cat((case.out, case.out[:3]))
    near(step(*case.leaves.values()), case.reference(*case.wide()), case.tolerance, "value of more rows")


def compiled_with_gradients(case: Case) -> None:
    _gradients(case, compile_case(case), list(case.leaves))


def make_fx(case: Case) -> None:
    from torch.fx.experimental.proxy_tensor import make_fx

    parts, rebuild = _data(case)
    count = len(case.leaves)

    def run(*tensors: torch.Tensor) -> Any:
        return case.run(*tensors[:count], held=rebuild(tensors[count:]))

    graph = make_fx(run)(*case.leaves.values(), *parts)
    assert "gemmery." in graph.code or devices.current(case.device) is None, "no product in the graph"
    # With other values than those that it was traced with.
    case.leaves = {name: -t / 2 for name, t in case.leaves.items()}
    # By their bytes: not every type of 8 bits can be rolled.
    parts = [p.view(torch.uint8).roll(1, 0).view(p.dtype) if p.dim() > 1 else p for p in parts]
    case.held = rebuild(parts)
    near(
        graph(*case.leaves.values(), *parts), case.reference(*case.wide()), case.tolerance, "value of others"
    )


def _data(case: Case) -> tuple[list[torch.Tensor], Any]:
    """The tensors of scaled operands, which are given as the leaves are; and what makes operands of such."""
    if not case.kind.startswith("scaled"):
        return [], lambda parts: case.held
    parts = [t for x in case.held for t in (x.data, x.scale)]
    # Other values by rolling rows: dtypes of 8 bits have no arithmetic.
    return parts, lambda parts: tuple(gemmery.ScaledTensor(*parts[i : i + 2]) for i in (0, 2))


def fake_tensors(case: Case) -> None:
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

    want = case.reference(*case.wide())
    with FakeTensorMode() as mode:
        held = tuple(_faked(x, mode) for x in case.held)
        out = None if case.out is None else mode.from_tensor(case.out)
        found = case.run(*[mode.from_tensor(t) for t in case.leaves.values()], held=held, out=out)
    real = case.run(*case.leaves.values())
    several = (r if isinstance(r, tuple) else (r,) for r in (found, want, real))
    for x, y, z in zip(*several, strict=True):
        assert isinstance(x, FakeTensor), "a result with data"
        assert x.shape == y.shape
        assert (x.dtype, x.stride(), x.device) == (z.dtype, z.stride(), z.device)


def _faked(value: Any, mode: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return mode.from_tensor(value)
    return gemmery.ScaledTensor(mode.from_tensor(value.data), mode.from_tensor(value.scale))


def vmap(case: Case) -> None:
    first = next(iter(case.leaves)) if not case.kind.startswith("scaled") else "r"
    place = list(case.leaves).index(first)
    dims = tuple(0 if i == place else None for i in range(len(case.leaves)))
    batches = []
    for leaves in (list(case.leaves.values()), case.wide()):
        leaves[place] = torch.stack([leaves[place], leaves[place] / 2, -leaves[place]])
        batches.append(leaves)
    found = torch.vmap(case.run, dims)(*batches[0])
    near(found, torch.vmap(case.reference, dims)(*batches[1]), case.tolerance, "value")


def func_grad(case: Case) -> None:
    every = tuple(range(len(case.leaves)))
    found = torch.func.grad(lambda *t: total(case.run(*t)), every)(*case.leaves.values())
    want = torch.func.grad(lambda *t: total(case.reference(*t)), every)(*case.wide())
    for name, x, y in zip(case.leaves, found, want, strict=True):
        near(x, y, 2 * case.tolerance, f"gradient of {name}")


class _Watching(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


def dispatch_mode(case: Case) -> None:
    with _Watching() as mode:
        eager(case)
    assert any(name.startswith("gemmery.") for name in mode.seen), f"the mode saw {mode.seen}"


def batch_invariant(case: Case) -> None:
    """The value, and a row has the same bits alone."""
    with gemmery.batch_invariant():
        eager(case)
        together = case.run(*case.leaves.values())
        row = {name: t[1:2] if name in ("x", "r", "s") else t for name, t in case.leaves.items()}
        held = tuple([
            _row_of(x) if i == 0 and case.kind.startswith("scaled") else x for i, x in enumerate(case.held)
        ])  # fmt: skip
        if case.kind == "groups":
            # The row is one of the second group's.
            held = ((held[0] - 1).clamp(0, 1),)
        out = None if case.out is None else torch.empty_like(case.out[1:2])
        alone = case.run(*row.values(), held=held, out=out)
    for x, y in zip(*(r if isinstance(r, tuple) else (r,) for r in (together, alone)), strict=True):
        assert torch.equal(x[1:2], y), "a row differs"


def _row_of(x: Any) -> Any:
    return gemmery.ScaledTensor(x.data[1:2], x.scale if x.kind == "tensor" else x.scale[1:2])


def cuda_graph(case: Case) -> None:
    leaves = list(case.leaves.values())
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        case.run(*leaves)
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        found = case.run(*leaves)
    for leaf in leaves:
        leaf.neg_()
    graph.replay()
    torch.cuda.synchronize()
    near(found, case.reference(*case.wide()), case.tolerance, "value after a replay with other data")


def deepcopied(case: Case) -> None:
    held = copy.deepcopy(case.held)
    _with_copies(case, held, copy.deepcopy)


def pickled(case: Case) -> None:
    file = io.BytesIO()
    torch.save(case.held, file)
    file.seek(0)
    held = torch.load(file, weights_only=False)
    _with_copies(case, held, lambda epilogue: pickle.loads(pickle.dumps(epilogue)))


def _with_copies(case: Case, held: tuple[Any, ...], copied: Any) -> None:
    """The value by copies of what is held, and of the epilogue."""
    how = {} if case.function is None else {"epilogue": copied(PREBUILT[case.function])}
    found = case.run(*case.leaves.values(), held=held, **how)
    near(found, case.reference(*case.wide()), case.tolerance, "value of copies")


def dtensor(case: Case) -> None:
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, distribute_tensor

    begun = not dist.is_initialized()
    if begun:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh(case.device.type, (1,))
        found = case.run(*[distribute_tensor(t, mesh, [Replicate()]) for t in case.leaves.values()])
        whole = [x.full_tensor() for x in (found if isinstance(found, tuple | list) else [found])]
        want = case.reference(*case.wide())
        near(whole if isinstance(want, tuple | list) else whole[0], want, case.tolerance, "value")
    finally:
        if begun:
            dist.destroy_process_group()


CHECKS = dict(zip(CONTEXTS, (
    eager, no_grad, inference_mode, autograd, double_backward, autocast, checkpointed, compiled, compiled_dynamic,
    compiled_with_gradients, make_fx, fake_tensors, vmap, func_grad, dispatch_mode, batch_invariant, cuda_graph,
    deepcopied, pickled, dtensor,
), strict=True))  # fmt: skip


# ---------------------------------------------------------------------------------------------------------------------
# Running cells


def run_cell(kind: str, result: str, context: str, device: torch.device) -> str | None:
    """What is wrong with a cell; None if it is as expected."""
    kernels = devices.current(device) is not None
    expected = verdict(kind, result, context, device.type == "cuda", kernels)
    if isinstance(expected, Absent):
        return None
    case = Case.of(kind, result, device)
    try:
        CHECKS[context](case)
    except Exception as error:
        if isinstance(expected, Raises):
            return _not_as_said(expected, error)
        text = str(error).strip().splitlines()
        return f"{type(error).__name__}: {text[0][:200] if text else ''}"
    return f"no error; expected {expected.message!r}" if isinstance(expected, Raises) else None


def _not_as_said(expected: Raises, error: Exception) -> str | None:
    if isinstance(error, expected.kind) and re.search(expected.message, str(error)):
        return None
    return f"{type(error).__name__}: {str(error)[:200]}; expected {expected.message!r}"


def check(kind: str, context: str, device: torch.device, results: tuple[str, ...] = RESULTS) -> None:
    """All results of a kind in a context; raises an AssertionError that names the cells that are wrong."""
    wrong = {result: run_cell(kind, result, context, device) for result in results}
    said = [f"{kind}, {result}, {context}: {what}" for result, what in wrong.items() if what is not None]
    assert not said, "\n" + "\n".join(said)


def here() -> torch.device:
    """The device on which kernels run in this process, or the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() and not devices.INTERPRETED else "cpu")
