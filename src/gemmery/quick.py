"""The short way of a product with a prebuilt epilogue: what a call looks like is compared with calls before it.

As `dispatch.eager` does for bare products. A call is known again by its epilogue, which must still mean what it meant,
and by the layouts of its tensors; then its results are allocated and its kernel is entered, and nothing else happens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._C import _are_functorch_transforms_active, _len_torch_dispatch_stack
from torch.autograd import forward_ad

from .call import Call, look_at
from .dispatch import maker
from .epilogues.function import Epilogue, Held
from .formats.tensor import QuantizedTensor
from .launch.plan import Plan
from .memo import keep
from .results import Results

_PLAIN = (Tensor, torch.nn.Parameter)
#: The number of the first device whose tensors go the short way.
FIRST = 0
#: The kind of device that they are on.
DEVICE = "cuda"


@dataclass(frozen=True, slots=True)
class Known:
    """How to run calls that look alike.

    Attributes:
        makers: allocate the results, in their order.
        tensors: of the launch: places among the call's values, or of a result, inverted.
        numbers: places of its numbers among the call's values.
        many: whether it returns a tuple.
        direct: enters the kernel.
    """

    makers: tuple[Callable[[], Tensor], ...]
    tensors: tuple[int, ...]
    numbers: tuple[int, ...]
    many: bool
    direct: Any


_known: dict[Any, Known] = {}


def run(op: str, a: Any, b: Any, bias: Any, functions: tuple[Any, ...], options: tuple[Any, ...]) -> Any:
    """The result of a call that is known; None of any other. Arguments are those of `fused.product`."""
    epilogue, args, prologue, _ = functions
    if type(epilogue) not in (Epilogue, Held) or prologue is not None:
        return None
    captured = epilogue.known
    if captured is None or _is_seen():
        return None
    looked = _look((a, b, bias, *args, *captured.tensors), torch.is_grad_enabled())
    if looked is None:
        return None
    values, looks = looked
    known = _known.get((op, captured.number, options, *looks))
    if known is None:
        return None
    results = [make() for make in known.makers]
    addresses = [values[i] if i >= 0 else results[~i].data_ptr() for i in known.tensors]
    if not known.direct(addresses, tuple([values[i] for i in known.numbers])):
        return None
    return tuple(results) if known.many else results[0]


def may_learn(call: Call, epilogue: Any) -> bool:
    """Whether calls like this one may go the short way: not one whose operands autocast has made others of."""
    return (
        not _is_seen()
        and type(epilogue) in (Epilogue, Held)
        and call.captured.key is not None
        and call.a.get_device() >= FIRST
        and call.right is None
        and call.prologue is None
    )


def learn(
    call: Call, given: Sequence[Any], options: tuple[Any, ...], results: Results, plan: Plan
) -> None:  # fmt: skip
    """Remember a call that has run, if calls like it can go the short way.

    Args:
        given: a, b, the bias and the epilogue's arguments, as the user gave them.
        options: see `fused.product`.
    """
    program = results.program
    copied = any(x.same is not None or x.kept is not None for x in program.outputs)
    if program.main is None or results.reduces or plan.direct is None or copied:
        return
    looked = _look((*given, *call.captured.tensors), torch.is_grad_enabled())
    if looked is None:
        return
    scales, zeros, offsets, channel = range(len(looked[0]) - 4, len(looked[0]))
    weight = call.weight
    # A bias that is not there has a place among the values, and none among the call's inputs.
    shift = (2 if call.biases else 3) - call.scaled
    own = [channel if call.scaled and i == 0 else i + shift for i in program.inputs]
    written = [~i for i, x in enumerate(program.outputs) if x.places]
    shared = []
    if weight is not None and weight.scales is not None:
        shifts = [zeros] * (weight.zeros is not None) + [offsets] * (weight.offsets is not None)
        shared = [scales, *shifts]
    places = (0, 1, *shared, ~program.main, *own, *written)
    # What is allocated is aligned.
    if not plan.takes([looked[0][i] if i >= 0 else 0 for i in places]):
        return
    known = Known(
        tuple([maker(*matrix, call.a.device) for matrix in results.matrices if matrix is not None]),
        places, tuple([i + shift for i in program.numbers]),
        program.many, plan.direct,
    )  # fmt: skip
    keep(_known, (call.op, call.captured.number, options, *looked[1]), known)


def _is_seen() -> bool:
    """Whether something in torch wants to see calls."""
    return bool(
        _len_torch_dispatch_stack()
        or _are_functorch_transforms_active()
        or forward_ad._current_level >= 0
        or torch.is_autocast_enabled(DEVICE)
    )


def _look(given: Sequence[Any], grad: bool) -> tuple[list[Any], list[Any]] | None:
    """Addresses and numbers of what is given, and what of it decides which code runs; None where torch has to look.

    Behind them come the addresses of a packed weight's scales, zeros, offsets and channel, 0 for what there is not.
    """
    values: list[Any] = []
    looks: list[Any] = []
    tail: list[int] = []
    for x in given:
        kind = type(x)
        if kind in _PLAIN:
            device = x.get_device()
            if device < FIRST or (grad and x.requires_grad) or x.is_neg():
                return None
            address = x.data_ptr()
            values.append(address)
            looks += (x.shape, x.stride(), x.dtype, device, address & 15)
        elif kind is QuantizedTensor:
            at, key = look_at(x)
            values.append(at[0])
            tail = at[1:]
            looks += key
        elif kind is float or kind is int:
            values.append(x)
            looks.append(kind)
        elif x is None or kind is bool:
            values.append(x)
            looks.append(x)
        else:
            return None
    if tail:
        values += tail
    return values, looks
