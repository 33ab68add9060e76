"""Inductor's side: the choices that are offered, and the calls of compiled code.

Inductor calls the functions of `preprocessing_fns` with the choices of each kernel that it is about to choose. `offer`
looks for torch's own product among them and adds one of `CHOICES` after it, with the same inputs, layout and scalars.
Importing this file registers the kernels, which is why compiled code imports it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch._inductor import config, ir
from torch._inductor.select_algorithm import (
    ExternKernelCaller,
    ExternKernelChoice,
    get_algorithm_selector_cache,
)
from torch._inductor.virtualized import V

from .. import __version__, devices
from ..api import addmm, bmm, matmul
from ..layout import make_problem
from ..problem import Problem
from ..tuning.warm import fitted
from . import finalists
from .record import PREFIX, Offer, offered
from .tag import is_tagged

#: In other types, gemmery is at most as fast as torch.
TYPES = (torch.float16, torch.bfloat16)
#: gemmery is chosen where the fastest other kernel takes longer by more than this share, which is about the error of a
#: time.
MARGIN = 0.02


def _mm(a: Tensor, b: Tensor, *, out: Tensor) -> None:
    matmul(a, b, out=out)


def _addmm(input: Tensor, a: Tensor, b: Tensor, *, out: Tensor, alpha: float = 1, beta: float = 1) -> None:
    addmm(_unexpanded(input), a, b, beta=beta, alpha=alpha, out=out)


def _unexpanded(bias: Tensor) -> Tensor:
    """A bias as a vector, which is read once. Inductor expands it to the product's rows."""
    return bias[0] if bias.dim() == 2 and bias.stride(0) == 0 else bias


def _bmm(a: Tensor, b: Tensor, *, out: Tensor) -> None:
    bmm(a, b, out=out)


class _Choice(ExternKernelChoice):
    """A kernel by its name."""

    def hash_key(self) -> str:  # type: ignore[override]  # torch memoizes its own
        """The key of its times; times of another version are not valid."""
        return f"{super().hash_key()}-{__version__}"


#: By the names that torch's own products have among Inductor's choices.
CHOICES = {
    name: _Choice(kernel, name=PREFIX + name)
    for name, kernel in (("mm", _mm), ("addmm", _addmm), ("bmm", _bmm))
}


class _Kernel(ir.ExternKernelOut):
    """A call in compiled code."""

    def codegen(self, wrapper: Any) -> None:
        """Write the call, and the import that it needs in a process that has not enabled gemmery."""
        whole = wrapper
        while hasattr(whole, "parent_wrapper"):  # a subgraph's own imports may be dropped
            whole = whole.parent_wrapper
        whole.add_import_once(f"import {__name__}")
        super().codegen(wrapper)


class _Caller(ExternKernelCaller):
    """gemmery as a choice for one product."""

    def __init__(self, same: ExternKernelCaller, torchs: Sequence[ExternKernelCaller], record: Offer) -> None:
        super().__init__(CHOICES[same.choice.name], same.input_nodes, same.layout, same.kwargs)
        self.torchs = torchs
        self.record = record
        #: The inputs and the output with which Inductor measured it; None if it did not.
        self.given: tuple[Sequence[Any], Tensor] | None = None

    def precompile(self) -> None:
        """Compile the kernel. Inductor asks for it in a thread, while its templates are compiled in other processes."""
        place = self.layout.device
        # The thread does not know its GPU, and Triton loads kernels into the context that is bound to the thread.
        with torch.cuda.device(place) if place.type == "cuda" else nullcontext():
            if place.type == "cuda":
                torch.cuda.set_device(place)
            fitted(self.problem())

    def benchmark(self, *args: Any, out: Tensor) -> float:
        """The time in milliseconds as Inductor measures it."""
        self.given = args, out
        measured: float = super().benchmark(*args, out=out)  # type: ignore[no-untyped-call]  # torch's method has no types
        return measured

    def settle(self, times: dict[Any, float]) -> None:
        """Replace the times of the kernels that may be the fastest by new ones, in milliseconds; see `finalists`.

        The times of an equal product are Inductor's, from its cache; they are replaced by the same new ones.
        """
        given, self.given = self.given, None
        if given is not None:
            again = finalists.seconds(self, self.torchs, times, *given)
            self.record.again = {choice.name: seconds for choice, seconds in again.items()}
        for choice in times:
            if choice.name in self.record.again:
                times[choice] = self.record.again[choice.name] * 1e3
        self.record.times = {choice.name: milliseconds / 1e3 for choice, milliseconds in times.items()}
        times[self] *= 1 + MARGIN

    def problem(self) -> Problem:
        """The product as the selector knows it; Inductor's tensors are aligned."""
        *added, a, b = [_meta(x.get_size(), x.get_stride(), x.get_dtype()) for x in self.input_nodes]
        out = _meta(self.layout.size, self.layout.stride, self.layout.dtype)
        row = devices.current(self.layout.device)
        assert row is not None
        scalars = self.kwargs.get("alpha", 1), self.kwargs.get("beta", 1)
        addend = _unexpanded(added[0]) if added and scalars[1] != 0 else None
        scaled = scalars[0] != 1 or (addend is not None and scalars[1] != 1)
        return make_problem(a, b, out, addend, scaled=scaled, precision="ieee", fast_accum=False, device=row)

    def output_node(self) -> Any:
        """The call; Inductor asks for it where it has chosen gemmery."""
        self.record.used += 1
        kernel = _Kernel(
            layout=self.layout,
            inputs=self.input_nodes,
            python_kernel_name=self.choice.call_name(),
            kwargs=self.kwargs,
        )
        return ir.TensorBox.create(kernel)


def _meta(size: Iterable[Any], stride: Iterable[Any], dtype: torch.dtype) -> Tensor:
    return torch.empty_strided([int(x) for x in size], [int(x) for x in stride], dtype=dtype, device="meta")


def begin() -> None:
    """Have Inductor ask and tell, where it does not. Nothing follows from that while `is_tagged` is false."""
    cache = get_algorithm_selector_cache()
    if offer not in cache.preprocessing_fns:
        # Before the functions that select choices by their names.
        cache.preprocessing_fns.insert(0, offer)
    if measured not in cache.feedback_saver_fns:
        cache.feedback_saver_fns.append(measured)


def offer(choices: list[Any]) -> list[Any]:
    """Inductor's choices for a kernel, with gemmery after torch's if it can compute the same product."""
    place = next((i for i, x in enumerate(choices) if _is_torchs(x)), None)
    # Without the tag, the code would be cached as code of a process in which gemmery is not enabled.
    if place is None or not is_tagged() or not _measures() or not _suits(choices[place]):
        return choices
    same = choices[place]
    a, b = same.input_nodes[-2:]
    shape = [*a.get_size()[:-2], a.get_size()[-2], b.get_size()[-1], a.get_size()[-1]]
    strides = [[int(x) for x in node.get_stride()] for node in (a, b)]
    record = offered(same.choice.name, [int(x) for x in shape], same.layout.dtype, strides)
    # A bias may be added by another of torch's kernels.
    torchs = [x for x in choices if isinstance(x, ExternKernelCaller)]
    return [*choices[: place + 1], _Caller(same, torchs, record), *choices[place + 1 :]]


def _is_torchs(choice: Any) -> bool:
    return isinstance(choice, ExternKernelCaller) and choice.choice.name in CHOICES


def _measures() -> bool:
    """Whether Inductor is choosing by measurements of which gemmery can be a part, and writes Python."""
    in_process = not (config.autotune_in_subproc or config.pipeline_max_autotune_gemm)
    in_python = not (V.graph.cpp_wrapper or V.graph.fx_wrapper)
    return (config.max_autotune or config.max_autotune_gemm) and in_process and in_python


def _suits(torchs: ExternKernelCaller) -> bool:
    """Whether gemmery has kernels for a product, of which all sizes and strides are known."""
    nodes = torchs.input_nodes
    numbers = [x for node in nodes for x in (*node.get_size(), *node.get_stride())]
    if not _are_known(numbers) or any(0 in node.get_size() for node in nodes):
        return False
    types = {torchs.layout.dtype, *[node.get_dtype() for node in nodes]}
    if len(types) != 1 or types.pop() not in TYPES:
        return False
    return devices.current(torchs.layout.device) is not None


def _are_known(numbers: Iterable[Any]) -> bool:
    return all(isinstance(x, int) or x.is_Integer for x in numbers)


def measured(times: dict[Any, float], *_: Any) -> None:
    """Keep what was measured, and leave to Inductor the times by which it is to choose, in milliseconds.

    Inductor has printed the times, and chooses by this dictionary. gemmery's time is raised by `MARGIN`.
    """
    for choice in list(times):
        if isinstance(choice, _Caller):
            choice.settle(times)
