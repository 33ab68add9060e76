"""The only cache of calls: how calls that look alike run.

A call is recognized by its functions, which must not have changed, and by the layouts of its tensors. Then only the
results must be allocated and the kernel entered. `look` and `launch` run in every call, so their time counts:
everything that a call shares with an earlier one is looked up, and only the rest is examined.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch._C import _increment_version
from torch.nn import Parameter

from ..epilogues.results import Results
from ..launch.plan import Plan, forget_plans
from ..memo import keep


@dataclass(frozen=True, slots=True)
class Known:
    """The launch of all calls that look alike.

    Attributes:
        plan: what is launched.
        pick: the places of the launch's tensors among the call's values and, after them, the results from the last to
            the first.
        numbers: places of the launch's numbers among the call's values; None for alpha and beta.
        makers: allocate the results, from the last to the first.
        results: the epilogue's results, if more has to be done than to return the allocated tensors.
        many: whether it returns a tuple.
        extents: places of the tensors among the values, with the bytes from the first element to the end of the last.
        out_bytes: the same bytes of the first result.
        sum_place: place of the addend that may be the output itself; -1 if there is none.
    """

    plan: Plan
    pick: Callable[[Sequence[Any]], Sequence[Any]]
    numbers: tuple[int, ...] | None
    makers: tuple[Callable[[], Tensor], ...]
    results: Results | None
    many: bool
    extents: tuple[tuple[int, int], ...]
    out_bytes: int
    sum_place: int = -1


_known: dict[Any, Known] = {}
find = _known.get


def remember(key: Any, known: Known) -> None:
    """Keep how a call runs, for the next one like it."""
    keep(_known, key, known)


def forget() -> None:
    """Drop all memoized calls and plans, so that the next call of each shape asks the selector again."""
    forget_plans()
    _known.clear()


def look(given: Sequence[Any], grad: bool) -> tuple[list[Any], list[Any]] | None:
    """The addresses and numbers of the given values, and their properties that decide which code runs.

    None if torch must see the call, or if the values are on several devices.

    Args:
        grad: whether gradients are recorded.
    """
    addresses: list[Any] = []
    looks: list[Any] = []
    place = None
    try:
        for x in given:
            kind = type(x)
            # `seen.PLAIN`, written out: this is the hot path.
            if kind is Tensor or kind is Parameter:
                device = x.get_device()
                if device != place:
                    if place is not None:
                        return None
                    place = device
                if (grad and x.requires_grad) or x.is_neg() or (device < 0 and x.is_meta):
                    return None
                address = x.data_ptr()
                addresses.append(address)
                looks.append((x.shape, x.stride(), x.dtype, address & 15))
            elif kind is float or kind is int:
                addresses.append(x)
                looks.append(kind)
            elif x is None or kind is bool:
                addresses.append(0)
                looks.append(x)
            else:
                return None
    except RuntimeError:
        return None  # a sparse tensor
    looks.append(place)
    return addresses, looks


def launch(
    known: Known,
    addresses: list[Any],
    objects: Sequence[Any],
    scalars: tuple[float, float],
    out: Tensor | None,
) -> list[Tensor]:
    """The results of a known call.

    Args:
        addresses, objects: the call's values: as `look` gives them, and themselves. Addresses of results are added.
        scalars: alpha and beta.
        out: the tensor for the result; it does not overlap any other.
    """
    plan, results = known.plan, known.results
    numbers: tuple[Any, ...] = scalars
    if known.numbers is not None:
        numbers = tuple([objects[i] for i in known.numbers]) if known.numbers else ()
    allocated: list[Any] = []
    # The results, from the last to the first. A loop: before Python 3.12 a comprehension is a call.
    made: list[Any] = []
    if results is not None:
        allocated = results.allocate(objects[0].device, plan.slots if results.reduces else 1, out)
        made += reversed(results.flat(allocated))
    elif out is not None:
        made.append(out)
    else:
        for make in known.makers:
            made.append(make())
    for x in made:
        addresses.append(x.data_ptr())
    direct = plan.direct
    if direct is None or not direct(known.pick(addresses), numbers):
        plan.run(known.pick([*objects, *made]), numbers)
    if out is not None:
        # Autograd must know that a tensor was written to.
        _increment_version((out,))
        return [out]
    return made[::-1] if results is None else results.unalias(results.finish(allocated))


def may_overlap(known: Known, addresses: Sequence[Any], objects: Sequence[Any], out: Tensor) -> bool:
    """Whether the memory of `out` may overlap that of an input; `check.check_memory` decides exactly.

    Args:
        addresses, objects: the call's values, and `out` as the last.
    """
    start = addresses[-1]
    end = start + known.out_bytes
    for i, extent in known.extents:
        at = addresses[i]
        if at < end and start < at + extent and (objects[i] is not out or i != known.sum_place):
            return True
    return False
