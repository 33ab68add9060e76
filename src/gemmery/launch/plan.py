"""Plans: a Problem, the Config that was chosen for it, and the compiled kernel, ready for calls."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.errors import TritonError

from .. import reference
from ..devices import INTERPRETED, on_device
from ..dtypes import FP8
from ..problem import Config, Problem
from ..schedules import bind
from ..schedules.binding import Binding
from ..select import candidates, log
from . import direct, padding
from .occupancy import Occupancy, occupancy, tensor_memory

#: The most plans, and the most calls with a known plan, that are kept; older ones are dropped.
PLANS = 4096
#: The number of spilling kernels that a plan compiles before it accepts one, and the most words that this one may
#: spill.
SPILLING = 3
LITTLE = 16


@dataclass(frozen=True)
class Resources:
    """The share of a multiprocessor that a compiled kernel takes.

    Attributes:
        registers: per thread.
        spills: 32-bit words per thread in local memory, because registers ran out.
        shared: bytes of shared memory per program.
        threads: per program.
        occupancy: how many programs a multiprocessor runs at a time, and what limits it; None in the interpreter.
    """

    registers: int
    spills: int
    shared: int
    threads: int
    occupancy: Occupancy | None = None


class Plan:
    """The launch of a problem. Called with tensors of the layout that it was made for, it only launches.

    Attributes:
        problem: the problem that is computed.
        config: the config of the kernel; None if the torch reference runs because the device lacks the instructions.
        copies: names of the matrices that are copied before every launch, because their layout is slow to read.
    """

    def __init__(self, problem: Problem, config: Config | None = None) -> None:
        self.problem = problem
        #: The launched problem on copies of some of its matrices, or None for the problem itself.
        self._padded: padding.Padded | None = None
        #: For each tensor, the bits that must be 0 in its address.
        self._misaligned = tuple(15 if x.aligned else 0 for x in problem.layouts)
        self._index = -1
        self._compiled: Any = None
        #: The fast launch, if there is one, for GPU number `_index`.
        self.direct: direct.Launch | None = None
        self._binding: Binding | None = None
        self._choices: list[Config] = []
        if config is not None:
            self._choices = [config]
        elif runs_on(problem):
            # A copy would separate the paired halves of columns.
            self._padded = None if problem.paired else padding.worth_copying(problem)
            self._choices = candidates(self._launched)
        if self._choices:
            self._binding = bind(self._launched, self._choices[0])

    @property
    def _launched(self) -> Problem:
        return self.problem if self._padded is None else self._padded.problem

    @property
    def copies(self) -> tuple[str, ...]:
        """Names of the matrices that are copied before every launch."""
        return () if self._padded is None else self._padded.names

    def _copied(self, tensors: Sequence[Any], empty: bool = False) -> Sequence[Any]:
        """The tensors that the launch reads: copies of matrices that are slow to read, the others as they are.

        Args:
            empty: the copies need only have memory.
        """
        if self._padded is None:
            return tensors
        found = list(tensors)
        for place, copy in ((0, self._padded.a), (len(self.problem.a.layouts), self._padded.b)):
            if copy is not None:
                found[place] = copy.memory(found[place].device) if empty else copy(found[place])
        return found

    @property
    def config(self) -> Config | None:
        """The config of the kernel; None if the torch reference runs."""
        return self._binding.config if self._binding else None

    def __call__(
        self,
        a: Tensor,
        b: Tensor,
        out: Tensor,
        addend: Tensor | None = None,
        alpha: float = 1,
        beta: float = 1,
    ) -> Tensor:
        """`out = alpha * a @ b + beta * addend`, written into `out`, which is returned.

        The tensors must have the shapes, strides, types and alignment of those that the plan was made for. This is not
        checked again, nor whether `out` overlaps another tensor. Autograd does not record the write to `out`. The
        launch goes to the current stream of the tensors' device.

        Raises:
            ValueError: the plan requires an addend or scalars and they are missing, or the reverse.
        """
        if self.problem.fusion is not None:
            raise ValueError(
                f"{self}: has an epilogue, so the plan can't be called; call the product instead"
            )
        p = self.problem
        if (addend is None) is (p.addend is not None):
            raise ValueError(
                f"{self}: made for a call {'without' if addend is not None else 'with'} an addend"
            )
        if (alpha != 1 or (addend is not None and beta != 1)) and not p.takes_numbers:
            raise ValueError(f"{self}: made for alpha and beta of 1, called with {alpha} and {beta}")
        self.run((a, b, out) if addend is None else (a, b, out, addend), (alpha, beta))
        return out

    def run(self, tensors: Sequence[Tensor], numbers: tuple[float, ...] = ()) -> None:
        """Launch, with tensors in the order of `Problem.layouts`, and numbers as `Binding.arguments` takes them."""
        if self.direct is not None and tensors[0].get_device() == self._index:
            addresses = [x.data_ptr() for x in tensors]
            # The ordinary launch compiles another kernel for tensors that are not aligned as those before.
            if self.takes(addresses) and self.direct(addresses, numbers):
                return
        if self._binding is None:
            self._run_reference(*tensors, numbers=numbers)
            return
        # Triton launches on the current device, whatever device the tensors are on.
        with on_device(tensors[0]):
            self._binding.launch(self._copied(tensors), numbers)

    def _run_reference(
        self, a: Tensor, b: Tensor, out: Tensor, addend: Tensor | None = None, *, numbers: tuple[float, ...]
    ) -> None:
        alpha, beta = numbers
        dtype, by_rows = self.problem.out.dtype, self.problem.batch_invariant
        out.copy_(reference.gemm(a, b, addend, alpha=alpha, beta=beta, out_dtype=dtype, by_rows=by_rows))

    def takes(self, addresses: Sequence[int]) -> bool:
        """Whether the compiled kernel can be launched with tensors at these addresses."""
        # A loop: a generator takes a held plan a tenth longer.
        for at, bits in zip(addresses, self._misaligned, strict=True):  # noqa: SIM110
            if at & bits:
                return False
        return True

    @property
    def slots(self) -> int:
        """The number of partial results for each row in a fused epilogue's reductions."""
        assert self._binding is not None
        return -(-self.problem.out_n // self._binding.slot)

    def fit(self, tensors: Sequence[Any], numbers: Sequence[float] = (), *, pinned: bool) -> None:
        """Compile for the current GPU: configs in ranked order, until a kernel fits without harmful spills.

        An epilogue, such as a sine, may spill in every tile. After a few spilling kernels, one that spills little is
        accepted.

        Args:
            pinned: the config was given by the user: only a kernel that can't run at all is rejected.

        Raises:
            ValueError: no config fits, or the pinned one does not.
        """
        if self._binding is None or INTERPRETED:
            return
        self._binding, self._compiled, _ = compile_first_fitting(
            self._launched, self._choices, (self._copied(tensors, empty=True), numbers), _load, pinned
        )

    def shorten(self, index: int, tensors: Sequence[Any], numbers: tuple[float, ...] = ()) -> None:
        """Prepare the fast launch for calls on GPU number `index`, the current one, if that is possible."""
        # Copies use the ordinary path, which takes more host time than the launch.
        if self._binding is not None and self._compiled is not None and self._padded is None:
            self._index = index
            self.direct = direct.prepare(self._binding, self._compiled, index, tensors, numbers)

    def resources(self) -> Resources | None:
        """The share of a multiprocessor that the compiled kernel takes; None if nothing was compiled for a GPU.

        `gemmery.lab.inspection.inspect(plan)` analyzes its code.
        """
        if self._compiled is None:
            return None
        kernel, arch = self._compiled, self.problem.device.target
        held = occupancy(
            arch, kernel.n_regs, kernel.metadata.shared, kernel.metadata.num_warps, tensor_memory(kernel)
        )
        threads = kernel.metadata.num_warps * arch.warp_size
        return Resources(kernel.n_regs, kernel.n_spills, kernel.metadata.shared, threads, held)

    def roofline(self) -> float:
        """The least seconds that the device's data sheet allows: the larger of arithmetic and memory traffic."""
        p = self.problem
        return max(p.flops / p.device.rate(p.a.dtype, p.precision), p.bytes / p.device.bandwidth)

    def explain(self, top: int = 5) -> str:
        """The best configs with the predicted cost of each part, and why the first is chosen; see `gemmery.explain`."""
        from .explain import explain_problem

        return f"{explain_problem(self.problem, top)}\nthis plan: {self.config or 'torch reference'}"

    def __str__(self) -> str:
        copies = "".join(f", a copy of {name}" for name in self.copies)
        return f"{self.problem}: {self.config or 'torch reference'}{copies}"

    __repr__ = __str__


class FirstFitting(NamedTuple):
    """The result of `compile_first_fitting`.

    Attributes:
        binding: of the config that is taken.
        compiled: its kernel.
        passed: the other configs that were compiled, and why they were rejected.
    """

    binding: Binding
    compiled: Any
    passed: dict[Config, str]


def compile_first_fitting(
    problem: Problem, configs: Sequence[Config], given: tuple[Sequence[Any], Sequence[float]],
    examine: Callable[[Any], int], pinned: bool = False,
) -> FirstFitting:  # fmt: skip
    """Compile configs in order until a kernel fits without harmful spills; see `Plan.fit`.

    Args:
        given: arguments of `Binding.compile`; tensors may be on the meta device.
        examine: returns the 32-bit words per thread that a compiled kernel spills, or raises Triton's error for one
            that does not fit.
        pinned: whether spills are ignored.

    Raises:
        ValueError: no config fits.
    """
    spilling: list[tuple[int, Binding, Any]] = []
    seen: set[Any] = set()
    passed: dict[Config, str] = {}
    refusal: Exception | None = None
    for config in configs:
        binding = bind(problem, config)
        try:
            compiled = binding.compile(*given)
            spills = examine(compiled)
        except torch.OutOfMemoryError:
            raise
        except (TritonError, RuntimeError) as error:
            # Compilers fail in many ways if a config does not fit; another config may fit.
            refusal = error
            passed[config] = str(error)
            continue
        if spills <= binding.allowed_spills or pinned:
            return FirstFitting(binding, compiled, passed)
        passed[config] = f"spills {4 * spills} bytes a thread"
        # Configs that cut K differently may share one kernel.
        if compiled.hash in seen:
            continue
        seen.add(compiled.hash)
        spilling.append((spills, binding, compiled))
        if len(spilling) >= SPILLING and min(spilling, key=_spills)[0] <= LITTLE:
            break
    if not spilling:
        raise ValueError(
            f"no config of {len(configs)} fits {problem} on {problem.device.name}: {refusal}"
        ) from refusal
    _, binding, compiled = min(spilling, key=_spills)
    del passed[binding.config]
    return FirstFitting(binding, compiled, passed)


def _spills(found: tuple[int, Binding, Any]) -> int:
    return found[0]


def _load(compiled: Any) -> int:
    """Load a kernel onto the current GPU, whose driver may reject it, and return its spills."""
    compiled._init_handles()
    return int(compiled.n_spills)


def runs_on(problem: Problem) -> bool:
    """Whether the device has the instructions for a problem. Otherwise the torch reference runs."""
    return not any(
        operand.dtype in FP8 and operand.dtype not in problem.device.target.fp8
        for operand in (problem.a, problem.b)
    )


@functools.lru_cache(PLANS)
def _cached(problem: Problem, config: Config | None, device: int) -> tuple[Plan, list[bool]]:
    if problem.fusion is None:
        log.note(problem)
    return Plan(problem, config), []


def make_plan(
    problem: Problem, config: Config | None, tensors: Sequence[Tensor], numbers: tuple[float, ...] = ()
) -> Plan:
    """The plan for a problem, compiled for the GPU of `tensors`, which are in the order of `Problem.layouts`; memoized.

    Raises:
        ValueError: a pinned config does not suit the problem or does not fit the GPU.
    """
    index = tensors[0].device.index if tensors[0].is_cuda else -1
    plan, ready = _cached(problem, config, index)
    if not ready:
        with on_device(tensors[0]):
            plan.fit(tensors, numbers, pinned=config is not None)
            plan.shorten(index, tensors, numbers)
        ready.append(True)
    return plan


def forget_plans() -> None:
    """Drop the memoized plans, so that the next call for each problem asks the selector again."""
    _cached.cache_clear()
