"""The entry of every product, which chooses how it runs.

In eager inference, a call that was seen before is launched at once (`cache`). A new one becomes a `Call`, which is
checked, prepared, launched and remembered. Under torch.compile, with gradients, inside a mode or a transform, and with
subclasses of tensors, a product is the operator `torch.ops.gemmery.product`, whose implementation returns here.
"""

from __future__ import annotations

from typing import Any

from torch import (
    Tensor,
    inference_mode,
    is_autocast_enabled,
    is_grad_enabled,
    is_inference_mode_enabled,
    no_grad,
)
from torch._C import _are_functorch_transforms_active, _len_torch_dispatch_stack
from torch.autograd import forward_ad
from torch.compiler import is_dynamo_compiling
from torch.nn import Parameter

from .. import devices
from ..dtensors import is_sharded
from ..epilogues.function import Epilogue, Held, memoised
from ..epilogues.results import returned
from ..formats.blocks import is_blocks, known
from ..formats.scaled import ScaledTensor
from ..formats.sparse import SparseTensor
from ..formats.tensor import QuantizedTensor
from ..formats.weight import PackedWeight
from ..launch.plan import Plan
from ..operands import AwaitingRows, BlocksOperand, Groups, PickedOperand, Sampled, SummedOver, WithAdapter
from ..problem import Config
from . import cache
from .build import lowered, make_call
from .check import (
    check,
    check_not_packed,
    check_scalars,
    check_tensor,
    result_dtype,
)
from .compute import compute
from .dispatch import dispatched
from .prepare import prepare
from .prologue import apply_prologue
from .seen import autocast_dtype, check_forward_mode, is_followed, needs_dispatcher
from .shape import OF_WEIGHTS
from .spec import ONES, Call, Functions, Number, Options, scalars_of

_HELD = (Epilogue, Held)
#: First operands that have more than a matrix.
_SPREAD = (Groups, SummedOver, AwaitingRows, WithAdapter)


def product(
    op: str, a: Any, b: Any, bias: Any, functions: tuple[Any, ...], out: Tensor | None, options: tuple[Any, ...],
    scalars: tuple[Number, Number] = ONES,
) -> Any:  # fmt: skip
    """A product as the user called it.

    Args:
        a, b, bias: see `build.make_call`.
        functions: see `spec.Functions`.
        options: see `spec.Options`.
        scalars: see `spec.scalars_of`.
    """
    if is_dynamo_compiling():
        # It imports the compiler, which takes a second.
        from .compiled import compiled

        if isinstance(b, PackedWeight) and isinstance(a, Tensor) and a.dim() == 1:
            return _of_vector(op, a, b, bias, Functions(*functions), out, Options(*options))
        return compiled(op, a, b, bias, Functions(*functions), out, Options(*options), *scalars)
    epilogue, _, prologue, _ = functions
    if epilogue is not None and type(epilogue) not in _HELD:
        # A known function means the same epilogue as before.
        epilogue = memoised(epilogue)
        functions = (epilogue, *functions[1:])
    if options[-1] is not None and not isinstance(options[-1], str):
        # A string is as good a key. To parse it in every call would take longer than the call.
        options = (*options[:-1], Config.of(options[-1]))
    key = None
    if not (
        _len_torch_dispatch_stack() or _are_functorch_transforms_active() or forward_ad._current_level >= 0
    ):
        kind = type(b)
        if (kind is Tensor or kind is Parameter) and type(a) not in _SPREAD:
            given, form = [a, b], None
        else:
            given, form = _parts(a, b)
        number: Any = 0
        if epilogue is not None or prologue is not None:
            number = _add_functions(given, functions, bias)
        elif bias is not None:
            given.append(bias)
        if out is not None:
            given.append(out)
        looked = None if number is None else cache.look(given, is_grad_enabled())
        if looked is None and number is not None and (is_blocks(b) or is_blocks(a)):
            # Checked last, since a look at the layout would take time in all other cases.
            if is_followed():
                # The compiler fails on objects that contain sparse tensors.
                from .compiled import uncompiled

                return uncompiled(product, op, a, b, bias, functions, out, options, scalars)
            form = _with_blocks(op, a, b, given)
            looked = None if form is None else cache.look(given, is_grad_enabled())
        if looked is not None:
            addresses, looks = looked
            scaling = None if scalars is ONES else _kind_of(scalars)
            key = (op, number, form, bias is None, out is None, options, scaling, *looks)
            known = cache.find(key)
            # Without an argument it means CUDA, and takes a third of the time.
            if known is not None and (
                out is not None
                or not (is_autocast_enabled() if looks[-1] >= 0 else is_autocast_enabled("cpu"))
            ):
                if scalars is not ONES:
                    check_scalars(op, a, *scalars)
                if out is None or not cache.may_overlap(known, addresses, given, out):
                    made = cache.launch(known, addresses, given, scalars, out)
                    return tuple(made) if known.many else made[0]
    return _first(op, a, b, bias, Functions(*functions), out, Options(*options), *scalars, key)


def _kind_of(scalars: tuple[Number, Number]) -> Any:
    """The properties of alpha and beta that select a kernel."""
    alpha, beta = scalars
    return alpha == 1, beta == 1, beta == 0


def _parts(a: Any, b: Any) -> tuple[list[Any], Any]:
    """The values of operands that are not both plain matrices, as in `Call.values`, and the rest of their key."""
    if type(a) is Groups:
        given, form = _parts(a.matrix, b)
        own = 1
        if type(a.matrix) is ScaledTensor:
            own = 2
            if a.scale is not None:
                given[1] = a.scale
        given[own:own] = [a.offs, a.gather, a.scatter]
        return given, (a.axis, form)
    if type(a) is SummedOver:
        e = a.exchange
        given, form = _parts(a.matrix, b)
        scale = b.__dict__.get("channel") if isinstance(b, PackedWeight) else None
        given[1:1] = [*e.buffers, e.uses, scale, e.failed, e.patience]
        return given, (e.rank, e.size, form)
    if type(a) is WithAdapter:
        given, form = _parts(a.matrix, b)
        given[1:1] = [a.left, a.right, b.__dict__.get("channel") if isinstance(b, PackedWeight) else None]
        return given, ("adapted", form)
    if type(a) is AwaitingRows:
        flags, calls, rank, ranks, failed, patience = a.arrivals
        given, form = _parts(a.matrix, b)
        given[1:1] = [flags, calls, failed, patience]
        return given, ("awaiting", rank, ranks, form)
    kind = type(b)
    if kind is QuantizedTensor:
        own = b.__dict__
        if own["permutation"] is not None:
            return [a, b], None  # it is looked at, and not known
        given = [a, own["words"], own["scales"], own["zeros"], own["offsets"], own["channel"]]
        return given, own["static"]
    if kind is SparseTensor:
        own = b.__dict__
        of_b = [own["values"], own["metadata"], own["scales"], own["channel"]]
        if type(a) is ScaledTensor:
            return [a.data, a.stored_scale, *of_b], (a.kind, own["static"])
        return [a, *of_b], own["static"]
    if kind is ScaledTensor and type(a) is ScaledTensor:
        if a.data.shape[-1] == 0:
            return [a, b], None  # it is examined every time, because a launch does not receive its scales
        return [a.data, a.stored_scale, b.data, b.stored_scale], (a.kind, b.kind)
    if kind is Sampled:
        picked = PickedOperand(a.matrix, a.stored, False), PickedOperand(b.matrix, b.stored, True)
        return [*picked[0].values, *picked[1].values], (picked[0].text, picked[1].text)
    if kind in (tuple, list) and len(b) == 2 and isinstance(b[0], Tensor) and isinstance(b[1], Tensor):
        return [a, *b], ("pair", b[1].data_ptr() - b[0].data_ptr())
    return [a, b], None


def _with_blocks(op: str, a: Any, b: Any, given: list[Any]) -> Any:
    """Put the values of a block-sparse operand in its place, and return the rest of its key; None if it is new."""
    is_b = is_blocks(b)
    x = b if is_b else a
    stored = known(x)
    if stored is None:
        return None
    operand = BlocksOperand(stored.mT if is_b and op in OF_WEIGHTS else stored, is_b)
    place = next(i for i, value in enumerate(given) if value is x)
    given[place : place + 1] = operand.values
    return operand.form


def _add_functions(given: list[Any], functions: tuple[Any, ...], bias: Any) -> Any:
    """Add the arguments of the functions, and biases, to a call's values; None for functions without a key.

    Returns the key of the functions.
    """
    epilogue, args, prologue, prologue_args = functions
    number: Any = (0, None)
    if isinstance(bias, tuple | list):
        given += bias
        number = (len(bias), None)
    elif bias is not None:
        given.append(bias)
    if epilogue is not None:
        captured = epilogue.captured if type(epilogue) in _HELD else None
        if captured is None or captured.key is None or not isinstance(args, tuple | list):
            return None
        given += args
        given += captured.tensors
        number = (number[0], captured.number)
    if prologue is not None:
        prologue = prologue if type(prologue) in _HELD else memoised(prologue)
        captured = prologue.captured if type(prologue) in _HELD else None
        if captured is None or captured.key is None or not isinstance(prologue_args, tuple | list):
            return None
        given[1:1] = [*prologue_args, *captured.tensors]
        number = (*number, captured.number, len(prologue_args))
    return number


# ---------------------------------------------------------------------------------------------------------------------
# A call that is new, or that a part of torch has to see


def _first(
    op: str, a: Any, b: Any, bias: Any, functions: Functions, out: Tensor | None, options: Options, alpha: Number,
    beta: Number, key: Any,
) -> Any:  # fmt: skip
    """A call that is not in the cache.

    Args:
        key: the key under which it is remembered; None if it cannot be.
    """
    if is_sharded([x.data if isinstance(x, ScaledTensor) else x for x in (a, b)]):
        if is_inference_mode_enabled():
            # There, torch has no views of DTensors.
            with inference_mode(False), no_grad():
                return _first(op, a, b, bias, functions, out, options, alpha, beta, key)
        # It imports torch.distributed.tensor, which takes a second.
        from .repeated import again, find

        scalars = scalars_of(alpha, beta)
        key = None if out is not None else _key_of_parts(op, a, b, bias, functions, options, scalars)
        known = None if key is None else find(key)
        if known is not None:
            return again(known, product, op, a, b, bias, functions, options, scalars)
    if isinstance(b, PackedWeight) and isinstance(a, Tensor) and not isinstance(a, PackedWeight):
        if a.dim() == 1:
            return _of_vector(op, a, b, bias, functions, out, options)
        if b.permutation is not None and a.shape[-1] == b.shape[-1]:
            a, functions = apply_prologue(a, functions)
            a = a.index_select(-1, b.permutation)
            b, key = b.unpermuted(), None
    call = checked(op, a, b, bias, functions, out, options, alpha, beta)
    tensors = call.tensors
    check_forward_mode(op, tensors)
    if needs_dispatcher((out, *tensors)):
        return dispatched(call.prologue_applied(), out, key)
    is_autocast = out is None and autocast_dtype(call.device) is not None
    return returned(*compute(call, out, None if is_autocast else key))


def _key_of_parts(
    op: str, a: Any, b: Any, bias: Any, functions: Functions, options: Options, scalars: tuple[Number, Number]
) -> Any:
    """The key of a product of DTensors; None if it must be examined again."""
    from .repeated import look

    if not isinstance(a, Tensor) or functions.prologue is not None:
        return None
    if _len_torch_dispatch_stack() or _are_functorch_transforms_active() or forward_ad._current_level >= 0:
        return None
    given, form = _parts(a, b)
    number = _add_functions(given, functions, bias)
    epilogue = functions.epilogue
    if number is None or (epilogue is not None and is_sharded(epilogue.captured.tensors)):
        return None
    looks = look(given, is_grad_enabled())
    if looks is None:
        return None
    # All that a call of plain tensors is known by, and the type of autocast, since that of the results is kept.
    how = bias is None, options, None if scalars is ONES else _kind_of(scalars), autocast_dtype(a.device)
    return (op, number, form, *how, *looks)


def checked(
    op: str, a: Any, b: Any, bias: Any, functions: Functions, out: Tensor | None, options: Options,
    alpha: Number = 1, beta: Number = 1,
) -> Call:  # fmt: skip
    """A user's call, with operands in autocast's type, and checked."""
    if out is not None:
        check_tensor(op, "out", out)
        check_not_packed(op, "out", out)
    if options.config is not None:
        Config.of(options.config)  # an invalid one is an error, whether a kernel runs or not
    # Rows of groups are not a ScaledTensor, and a sparse weight of fp8 has no scales.
    is_scaled = isinstance(a, ScaledTensor) or isinstance(b, ScaledTensor)
    if options.out_dtype is None and isinstance(out, Tensor) and (functions.epilogue is None or is_scaled):
        options = options._replace(out_dtype=out.dtype)
    call = make_call(op, a, b, bias, functions, options, alpha, beta)
    dtype = None if out is not None else autocast_dtype(call.device)
    if dtype is not None:
        call = lowered(call, dtype)
    check(call)
    if functions.epilogue is None and not is_scaled:
        # The types that a product can have without an epilogue.
        result_dtype(op, call.dtype, options.out_dtype)
    return call


def _of_vector(
    op: str, a: Tensor, b: PackedWeight, bias: Any, functions: Functions, out: Tensor | None, options: Options
) -> Any:  # fmt: skip
    """A product of a vector with a packed weight: that of one row, whose results have no rows."""
    if op == "bmm":
        raise ValueError(f"bmm: a is {tuple(a.shape)}; it must have 3 dimensions")
    rows = None if out is None else out.unsqueeze(-2)
    made = product(op, a.unsqueeze(0), b, bias, functions, rows, options)
    if out is not None:
        return out
    rank = b.dim()
    results = list(made) if isinstance(made, tuple) else [made]
    squeezed = [x.squeeze(-2 if x.dim() == rank else -1) for x in results]
    return tuple(squeezed) if isinstance(made, tuple) else squeezed[0]


def plan(
    op: str, a: Any, b: Any, bias: Any, functions: Functions, out: Tensor | None, options: Options
) -> Plan | None:
    """The plan that `product` launches with these arguments; None if it launches nothing."""
    call = checked(op, a, b, bias, functions, out, options)
    if is_sharded(call.tensors):
        raise ValueError(
            f"{op}: a tensor is a DTensor; give it the local tensors (to_local), which are launched"
        )
    call = call.ordered()
    if devices.current(call.device) is None or 0 in call.shape:
        return None
    return prepare(call, out).plan
