"""Compiling ahead of time: every kernel that products with given weights need, for every number of rows.

A server meets every M. Sizes are not compiled into the kernels, so a weight needs only a few of them. Once they are
compiled, a new M costs the choice of a config and a look-up in Triton's cache.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from .. import devices
from ..api import plan
from ..devices import Device
from ..dtypes import DTYPE_NAMES, OUT_DTYPES, PRECISIONS, Precision
from ..launch.padding import launched
from ..launch.plan import Plan, runs_on
from ..layout import make_problem
from ..moe.experts import Product, products_of
from ..operands import Groups
from ..precision import AskedPrecision, resolved
from ..problem import Config, Problem
from ..product.run import plan as planned
from ..product.spec import Functions, Options
from ..schedules import bind
from ..select import candidates
from ..select.samples import arguments
from ..select.shapes import LARGEST_SIZE, dtype_named
from .workers import WORTH_WORKERS, Target, Workers

if TYPE_CHECKING:
    from ..nn.experts import Experts
    from ..nn.fused_product import FusedProduct
    from ..nn.hugging_face import FusedExperts

#: The largest number of rows by default.
MOST_ROWS = 8192
#: Numbers of rows whose kernels are compiled in other processes first: all up to here, then every so manieth, a number
#: that has no factor in common with block sizes.
_EARLY, _STRIDE = 64, 37


@dataclass(frozen=True)
class Weight:
    """A weight by its description. Products are `x @ weight.T [+ bias]`, with x of (M, K) in contiguous rows.

    Attributes:
        N, K: the shape of the weight, (N, K), as a Linear's.
        layout: "NT" if it is stored as (N, K), "NN" if it is stored as (K, N).
        bias: whether N numbers are added.
        name: for messages and tables.
    """

    N: int
    K: int
    dtype: torch.dtype = torch.bfloat16
    layout: str = "NT"
    bias: bool = False
    precision: Precision = "ieee"
    batch_invariant: bool = False
    name: str = ""

    @classmethod
    def of(cls, values: Any, dtype: torch.dtype = torch.bfloat16) -> Weight:
        """A weight from an object of JSON with at least N and K; `dtype` where it names none.

        Raises:
            ValueError: the values do not describe a weight.
        """
        known = {one.name for one in fields(cls)}
        if not isinstance(values, dict) or not {"N", "K"} <= set(values) <= known:
            raise ValueError(
                f"a weight is an object with N, K and maybe {', '.join(sorted(known - {'N', 'K'}))}; {values!r}"
            )
        named = dtype_named(values["dtype"]) if "dtype" in values else dtype
        weight = cls(**(values | {"dtype": named}))
        for one in fields(cls):
            kind = int if one.name in ("N", "K") else type(one.default)
            if type(getattr(weight, one.name)) is not kind:
                raise ValueError(f"a weight's {one.name} is {getattr(weight, one.name)!r}")
        for name in ("N", "K"):
            if not 1 <= getattr(weight, name) <= LARGEST_SIZE:
                raise ValueError(
                    f"a weight's {name} is {getattr(weight, name)}; it must be from 1 to {LARGEST_SIZE}"
                )
        if weight.precision not in PRECISIONS:
            raise ValueError(
                f"a weight's precision is {weight.precision!r}; it must be one of {', '.join(PRECISIONS)}"
            )
        if weight.layout not in ("NT", "NN"):
            raise ValueError(f"a weight's layout is {weight.layout!r}; it must be NT or NN")
        return weight


@dataclass
class Warmed:
    """The kernels that were prepared for one weight, or for several weights of the same layout.

    Attributes:
        names: the names of the weights.
        problem: the product with the most rows.
        kernels: the compiled kernels, by the config that each runs with first.
        rows: the number of row counts that were requested.
        seconds: the time that it took.
    """

    names: list[str]
    problem: Problem
    kernels: list[Config] = field(default_factory=list)
    rows: int = 0
    seconds: float = 0.0

    def asdict(self) -> dict[str, Any]:
        """All fields as plain values, for JSON."""
        p = self.problem
        return {
            "names": self.names, "N": p.N, "K": p.K, "dtype": DTYPE_NAMES[p.b.dtype], "rows": self.rows,
            "kernels": [str(config) for config in self.kernels], "seconds": self.seconds,
        }  # fmt: skip


@dataclass(frozen=True)
class _RightOperand:
    """The right-hand side of products with any number of rows on the left.

    Attributes:
        b: (K, N), possibly on the meta device.
        bias: (N,).
    """

    name: str
    b: Tensor
    bias: Tensor | None
    precision: Precision
    batch_invariant: bool

    def problem(self, M: int, row: Device) -> Problem:
        """The product of M rows with it."""
        K, N = self.b.shape
        dtype = self.b.dtype
        out = torch.empty(M, N, dtype=OUT_DTYPES[dtype][0], device="meta")
        return make_problem(
            torch.empty(M, K, dtype=dtype, device="meta"), self.b, out, self.bias, scaled=False,
            precision=self.precision if self.precision in row.target.precisions else "ieee",
            fast_accum=False, batch_invariant=self.batch_invariant, device=row,
        )  # fmt: skip


@dataclass
class _Fused:
    """The right-hand side of products with an epilogue, which a block runs in the place of some of its layers.

    Attributes:
        place: where the products will run.
    """

    name: str
    product: FusedProduct
    batch_invariant: bool
    place: torch.device | None = None
    #: The product of one row, and that of more, whose number changes nothing but `Problem.M`.
    _known: dict[bool, Problem] = field(default_factory=dict)

    @property
    def halves(self) -> tuple[Tensor, ...]:
        """The weight, or both."""
        weight = self.product.weight
        return (weight,) if isinstance(weight, Tensor) else tuple(weight)

    @property
    def b(self) -> Tensor:
        """One of the matrices to multiply by."""
        return self.halves[0].detach().t()

    def problem(self, M: int, row: Device) -> Problem:
        """The product of M rows with it."""
        if (M == 1) not in self._known:
            self._known[M == 1] = self._plan(1 if M == 1 else 2).problem
        return replace(self._known[M == 1], M=M)

    def _plan(self, M: int) -> Plan:
        """The plan of a call. Only the call itself knows it: an epilogue must be traced, with its tensors."""
        how, place = self.product, self.place or self.b.device
        halves = [half.detach().t() for half in self.halves]
        given = () if how.bias is None else (how.bias,) if isinstance(how.bias, Tensor) else how.bias
        biases = [bias.detach() for bias in given]
        if torch.empty(0, device=place).device != self.b.device:
            # In one piece of memory, in the given order.
            memory = torch.empty(len(halves), *self.halves[0].shape, dtype=self.b.dtype, device=place)
            halves = [half.t() for half in memory]
            biases = [torch.empty_like(bias, device=place) for bias in biases]
        x = torch.empty(M, halves[0].shape[0], dtype=self.b.dtype, device=place)
        with torch.autocast(place.type, enabled=False):
            made = plan(
                x, halves[0] if len(halves) == 1 else halves, bias=biases or None, epilogue=how.epilogue,
                precision=how.precision, batch_invariant=how.batch_invariant or self.batch_invariant,
            )  # fmt: skip
        if made is None:
            raise ValueError(f"warmup: no kernel runs on {place}, so there is nothing to compile")
        return made


@dataclass
class _OfExperts:
    """The right-hand side of a grouped product of experts; the counts are of tokens.

    Attributes:
        top_k: how many experts each token chooses.
        gathers: whether it is the first product, which reads each token as often.
        place: where the products will run.
    """

    name: str
    product: Product
    top_k: int
    gathers: bool
    precision: AskedPrecision
    batch_invariant: bool
    place: torch.device | None = None
    _known: Problem | None = None

    @property
    def b(self) -> Tensor:
        """One of the matrices to multiply by."""
        weight = self.product.weight
        first: Tensor = weight[0] if isinstance(weight, tuple) else weight
        return first

    def problem(self, M: int, row: Device) -> Problem:
        """The product for M tokens."""
        if self._known is None:
            self._known = self._plan(2).problem
        return replace(self._known, M=M * self.top_k)

    def _plan(self, M: int) -> Plan:
        """The plan of a call, which traces the epilogue."""
        place = self.place or self.b.device
        if torch.empty(0, device=place).device != self.b.device:
            raise ValueError(
                f"warmup: experts {self.name} are on {self.b.device}; move them to {place} first"
            )
        weight, bias = _detached(self.product.weight), _detached(self.product.bias)
        count, columns, rows = self.b.shape[0], self.b.shape[-1], M * self.top_k
        x = torch.empty(M if self.gathers else rows, columns, dtype=self.b.dtype, device=place)
        numbers = torch.empty(max(count, rows), dtype=torch.int32, device=place)
        groups = Groups(x, numbers[:count], "rows", numbers[:rows] if self.gathers else None)
        biases = [
            None if one is None else one.unsqueeze(1)
            for one in (bias if isinstance(bias, tuple) else (bias,))
        ]
        options = Options(None, resolved(self.precision, x), False, self.batch_invariant, None)
        with torch.autocast(place.type, enabled=False):
            made = planned(
                "grouped_linear", groups, weight, tuple(biases) if isinstance(bias, tuple) else biases[0],
                Functions(self.product.epilogue), None, options,
            )  # fmt: skip
        if made is None:
            raise ValueError(f"warmup: no kernel runs on {place}, so there is nothing to compile")
        return made


def _detached(value: Any) -> Any:
    """A weight or a bias, or both of a pair, without gradients."""
    if isinstance(value, tuple | list):
        return tuple([x.detach() for x in value])
    return None if value is None else value.detach()


_Operand = _RightOperand | _Fused | _OfExperts


def warmup(
    *weights: nn.Module | Tensor | Weight | dict[str, Any],
    max_m: int = MOST_ROWS,
    sizes: Iterable[int] | None = None,
    top_k: int | None = None,
    batch_invariant: bool = False,
    device: torch.device | str | None = None,
    progress: Callable[[int, int], object] | None = None,
    workers: int | None = None,
) -> list[Warmed]:
    """Compile every kernel that products with these weights run, so that none is compiled later.

    The inputs are assumed to have contiguous, aligned rows, as those of a Linear have. The kernels also stay in
    Triton's cache on disk, so warming up ahead of time makes the warm-up of the next process fast.

    Args:
        weights: modules; tensors (N, K); or descriptions, such as {"N": 6144, "K": 4096, "dtype": "bf16", "bias":
            True}, see `tuning.warm.Weight`. Of a module, all Linear layers are prepared, the fused products of
            gemmery.nn's blocks without gradients, and the experts of gemmery.nn, including those that `swap` created.
        max_m: every number of rows from 1 to this one is prepared; for an input (B, T, K), this is B * T.
        sizes: only these numbers of rows.
        top_k: the number of experts that each token chooses; required for modules with experts.
        batch_invariant: for modules and tensors, whether the products will be called with it, or in its context.
        device: the GPU; by default that of the weights, or the current one.
        progress: called from time to time with the completed and the total amount of work.
        workers: the number of processes that compile, see `workers.Workers`; 0 compiles in this one.

    Returns:
        The prepared kernels, for each layout among the weights.

    Raises:
        ValueError: there is no GPU to compile for, a weight is invalid, or top_k is missing.
        TypeError: a weight's type is not supported.

    Example:
        >>> import torch, gemmery, gemmery.nn
        >>> if torch.cuda.is_available():
        ...     model = torch.nn.Sequential(torch.nn.Linear(512, 2048), torch.nn.Linear(2048, 512)).cuda()
        ...     print([len(warmed.kernels) for warmed in gemmery.warmup(model, max_m=1024)])
    """
    rows = list(range(1, max_m + 1) if sizes is None else sizes)
    if not rows or min(rows) < 1:
        raise ValueError(
            f"warmup: max_m is {max_m} and sizes {sizes}; there must be numbers of rows, from 1 on"
        )
    if top_k is not None and (type(top_k) is not int or top_k < 1):
        raise ValueError(f"warmup: top_k is {top_k!r}; it must be an integer, at least 1")
    operands = [operand for weight in weights for operand in _operands(weight, batch_invariant, top_k)]
    place = _place(device, operands)
    for operand in operands:
        if isinstance(operand, _Fused | _OfExperts):
            operand.place = place
    row = devices.current(place)
    if row is None:
        raise ValueError(f"warmup: no kernel runs on {place}, so there is nothing to compile")
    return _warm(operands, rows, row, place, progress, workers)


def _operands(weight: object, batch_invariant: bool, top_k: int | None = None) -> list[_Operand]:
    """The operands of whatever `warmup` is given."""
    if isinstance(weight, nn.Module):
        return _of_module(weight, batch_invariant, top_k)
    if isinstance(weight, Tensor):
        return [_operand("", weight, None, "ieee", batch_invariant)]
    if not isinstance(weight, Weight | dict):
        raise TypeError(
            f"warmup: a {type(weight).__name__} is given; it takes modules, tensors and descriptions"
        )
    if isinstance(weight, dict):
        weight = Weight.of(weight)
    shape = (weight.N, weight.K)
    held = torch.empty(shape if weight.layout == "NT" else shape[::-1], dtype=weight.dtype, device="meta")
    bias = torch.empty(weight.N, dtype=weight.dtype, device="meta") if weight.bias else None
    held = held if weight.layout == "NT" else held.t()
    return [_operand(weight.name, held, bias, weight.precision, weight.batch_invariant)]


def _of_module(module: nn.Module, batch_invariant: bool, top_k: int | None) -> list[_Operand]:
    """The operands of all products in a module: of its layers, except those that blocks run as one product."""
    from ..nn.blocks import Block
    from ..nn.experts import Experts
    from ..nn.hugging_face import FusedExperts
    from ..nn.transposed import TransposedLinear

    found: dict[Any, _Operand] = {}
    replaced: set[str] = set()
    # In all its places: the layers that a block replaces may be called separately elsewhere.
    for name, child in module.named_modules(remove_duplicate=False):
        product = child.fused_product() if isinstance(child, Block) else None
        prefix = f"{name}." if name else ""
        if product is not None:
            replaced |= {prefix + layer for layer in product.layers}
            found.setdefault(id(child), _Fused(prefix + "+".join(product.layers), product, batch_invariant))
        elif isinstance(child, Experts | FusedExperts):
            for one in _of_experts(name, child, batch_invariant, top_k):
                found.setdefault((id(child), one.gathers), one)
        elif isinstance(child, nn.Linear) and name not in replaced:
            precision: Any = getattr(child, "precision", "ieee")
            invariant = batch_invariant or getattr(child, "batch_invariant", False)
            found.setdefault(id(child), _operand(name, child.weight, child.bias, precision, invariant))
        elif isinstance(child, TransposedLinear):
            invariant = batch_invariant or child.batch_invariant
            found.setdefault(
                id(child), _operand(name, child.weight.t(), child.bias, child.precision, invariant)
            )
    return list(found.values())


def _of_experts(
    name: str, module: Experts | FusedExperts, batch_invariant: bool, top_k: int | None
) -> list[_OfExperts]:
    """Both products of a module of experts."""
    if top_k is None:
        raise ValueError(
            f"warmup: {name or type(module).__name__} has experts; give top_k, how many a token chooses"
        )
    first, _, second = products_of(**module.given())
    invariant = batch_invariant or module.batch_invariant
    return [
        _OfExperts(name, product, top_k, gathers, module.precision, invariant)
        for product, gathers in ((first, True), (second, False))
    ]


def _operand(
    name: str, weight: Tensor, bias: Tensor | None, precision: AskedPrecision, batch_invariant: bool
) -> _RightOperand:
    if weight.dim() != 2 or 0 in weight.shape:
        raise ValueError(
            f"warmup: weight {name} is {tuple(weight.shape)}; it must be (N, K), both at least 1"
        )
    if weight.dtype not in OUT_DTYPES:
        raise TypeError(
            f"warmup: weight {name} is {weight.dtype}; it must be one of {', '.join(map(str, OUT_DTYPES))}"
        )
    return _RightOperand(name, weight.detach().t(), bias, resolved(precision, weight), batch_invariant)


def _place(device: torch.device | str | None, operands: Sequence[_Operand]) -> torch.device:
    """The device to compile for: the one that is named, or the weights', or the current one."""
    if device is not None:
        return torch.device(device)
    places = {operand.b.device for operand in operands if operand.b.is_cuda}
    if len(places) > 1:
        raise ValueError(
            f"warmup: the weights are on {' and '.join(sorted(map(str, places)))}; name a device"
        )
    return next(iter(places), torch.device("cuda" if torch.cuda.is_available() else "cpu"))


def _warm(
    operands: Sequence[_Operand], rows: Sequence[int], row: Device, place: torch.device,
    progress: Callable[[int, int], object] | None, workers: int | None,
) -> list[Warmed]:  # fmt: skip
    groups: dict[Problem, tuple[_Operand, Warmed]] = {}
    with torch.cuda.device(place) if place.type == "cuda" else contextlib.nullcontext():
        for operand in operands:
            largest = operand.problem(max(rows), row)
            known = groups.setdefault(_alike(largest), (operand, Warmed([], largest, rows=len(rows))))
            known[1].names.append(operand.name)
        total = len(groups) * len(rows)
        _compile_early([operand for operand, _ in groups.values()], rows, row, workers)
        for number, (operand, warmed) in enumerate(groups.values()):
            begun = time.perf_counter()
            kernels: dict[object, Config] = {}
            for done, M in enumerate(rows, 1):
                plan = fitted(operand.problem(M, row))
                if plan.config is not None:
                    kernels.setdefault(_kernel(plan), plan.config)
                if progress is not None and (done % _STRIDE == 0 or done == len(rows)):
                    progress(number * len(rows) + done, total)
            warmed.kernels = list(kernels.values())
            warmed.seconds = time.perf_counter() - begun
    return [warmed for _, warmed in groups.values()]


def _alike(problem: Problem) -> Problem:
    """The same for problems that run the same kernels: of two weights in a product, it hardly matters how far apart."""
    return replace(problem, b=problem.b.alike())


def fitted(problem: Problem) -> Plan:
    """The plan that the first call would make, compiled for the current GPU.

    It is not kept, because the plans would evict others. The first call finds its kernel.
    """
    made = Plan(problem)
    made.fit(*arguments(problem, "meta"), pinned=False)
    return made


def _kernel(plan: Plan) -> object:
    """Tells compiled kernels apart; where nothing is compiled, what would be."""
    if plan._compiled is not None:
        return plan._compiled
    assert plan._binding is not None
    return plan._binding.kernel, str(plan._binding.constants)


def _compile_early(operands: Sequence[_Operand], rows: Sequence[int], row: Device, count: int | None) -> None:
    """Have other processes compile most of the kernels at once, so that this one finds them in Triton's cache."""
    if count == 0 or devices.INTERPRETED:
        return
    first: dict[object, tuple[Problem, Config]] = {}
    for operand in operands:
        for M in [*rows[:_EARLY], *rows[_EARLY::_STRIDE]]:
            problem = operand.problem(M, row)
            if runs_on(problem):
                problem = launched(problem)
                config = candidates(problem)[0]
                binding = bind(problem, config)
                first.setdefault((binding.kernel, str(binding.constants)), (problem, config))
    if count is None and len(first) < WORTH_WORKERS:
        return
    with Workers(Target.active(), count) as pool:
        for future in [pool.submit(problem, config) for problem, config in first.values()]:
            future.result()  # a compiler that dies will die again where it can be seen
