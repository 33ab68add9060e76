"""Experts: two grouped products with an activation in between, for tokens that have chosen their experts.

This takes four kernels: routing; the first product, which gathers tokens and ends in the activation; the second
product; and the weighted sum of each token's rows. The router weights are applied in that sum, in float32. In an
epilogue of the second product, they would save nothing, because the rows of a token must be summed in any case.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.compiler import is_compiling

from ..dtensors import is_sharded
from ..epilogues import library
from ..epilogues.function import Epilogue, memoised
from ..formats.weight import PackedWeight
from ..grouped import check_sum, grouped_linear
from ..precision import AskedPrecision
from ..product.check import check_tensor
from ..product.spec import Factor
from .routing import check_id_type, combine, route


@dataclass(frozen=True)
class Unfused:
    """An activation that torch runs after the first product, for functions that can't be part of a kernel.

    Attributes:
        function: of the whole first product, (R, 2I) or (R, I), whose columns are in the order of the weight's.
    """

    function: Callable[[Tensor], Tensor]


class Product(NamedTuple):
    """One of the two grouped products.

    Attributes:
        weight: (E, rows, columns), or a pair of such; maybe packed.
        bias: (E, rows), a pair, or None.
        epilogue: its epilogue, if any.
    """

    weight: Any
    bias: Any
    epilogue: Any = None


Activation = str | Callable[..., Tensor] | Epilogue[..., Tensor] | Unfused


def experts(
    x: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor | None,
    gate_up: Factor,
    down: Tensor,
    *,
    activation: Activation = "silu",
    gate_up_bias: Factor | None = None,
    down_bias: Tensor | None = None,
    gated: bool = True,
    transposed: bool = False,
    concatenated: bool = True,
    post_norm: Callable[[Tensor], Tensor] | None = None,
    gate_up_grad: Factor | None = None,
    down_grad: Tensor | None = None,
    precision: AskedPrecision = "ieee",
    batch_invariant: bool = False,
) -> Tensor:
    """The experts of a mixture-of-experts layer: `sum_j weight[j] * down[e_j](act(gate[e_j](x)) * up[e_j](x))`.

    On a GPU, this runs four kernels, and the host does not wait for them. A CUDA graph can be replayed with other
    choices. x is not copied. Gradients reach x, the router weights, dense weights of the experts, and biases.

    All tensors may be DTensors: weights and biases sharded by experts, and the others by tokens. The result is then a
    DTensor too, and a partial sum if the experts are sharded.

    Args:
        x: (..., H), the tokens.
        top_k_index: (..., k), int32 or int64, the experts of each token. Ids outside `0..E - 1`, as under expert
            parallelism, add nothing.
        top_k_weights: (..., k), floating point, the router weights; None means ones.
        gate_up: (E, 2I, H), the rows of gate before those of up; or a pair (gate, up) of (E, I, H), with the same
            strides; or packed, a `gemmery.QuantizedTensor` or `SparseTensor`. Without a gate, (E, I, H).
        down: (E, H, I), dense or packed. Its number of rows may differ from the number of columns of x.
        activation: "silu", "gelu", "gelu_tanh", "relu" or "relu_squared" of the gate, which then multiplies up; or a
            torch function of (gate, up), such as `clamped_swiglu`, that returns a tensor of their shape. Without a
            gate, it is a function of the first product. An `Epilogue`, such as `gate` returns, is a function of the
            whole first product, (R, 2I). Under torch.compile, it must be a name or an `Epilogue`.
        gate_up_bias: (E, 2I), in the order of the weight's rows. For a pair, also a pair of (E, I).
        down_bias: (E, H).
        gated: whether there is a gate.
        transposed: whether dense weights are (E, H, 2I) and (E, I, H). They are not copied.
        concatenated: False if rows of gate and up are interleaved, as in gpt-oss: gate 0, up 0, gate 1. They are not
            copied. Packed weights are always concatenated.
        post_norm: a torch function of the rows of the second product, (R, H), that runs before they are summed.
        gate_up_grad, down_grad: float32 tensors (float64 for float64) of the weights' shapes, any strides. The backward
            pass adds the weights' gradients to them, without rounding, and autograd has none; see `weight_grad` of
            `gemmery.grouped_linear`.
        precision, batch_invariant: see `gemmery.matmul`.

    Returns:
        (..., H), in x's type.

    Raises:
        ValueError: shapes, layouts or devices do not fit, or no activation has this name.
        TypeError: a type is not supported, or two types differ.

    Example:
        >>> import torch
        >>> from gemmery.moe import experts
        >>> x, gate_up, down = torch.randn(5, 8), torch.randn(4, 12, 8), torch.randn(4, 8, 6)
        >>> index, weights = torch.tensor([[0, 3], [1, 3], [0, 1], [3, 1], [3, 0]]), torch.rand(5, 2)
        >>> y = experts(x, index, weights, gate_up, down)
        >>> def expert(x, e):
        ...     gate, up = (x @ gate_up[e].T).chunk(2, -1)
        ...     return torch.nn.functional.silu(gate) * up @ down[e].T
        >>> torch.testing.assert_close(y[0], weights[0, 0] * expert(x[0], 0) + weights[0, 1] * expert(x[0], 3))
    """
    tokens = {"x": x, "top_k_index": top_k_index, "top_k_weights": top_k_weights}
    parameters = {"gate_up": gate_up, "down": down, "gate_up_bias": gate_up_bias, "down_bias": down_bias}
    if _has_parts((*tokens.values(), *parameters.values())):
        _check(x, top_k_index, gate_up, down, gated, transposed)
        run = functools.partial(
            experts, activation=activation, gated=gated, transposed=transposed, concatenated=concatenated,
            post_norm=post_norm, precision=precision, batch_invariant=batch_invariant,
        )  # fmt: skip
        sums = {"gate_up_grad": gate_up_grad, "down_grad": down_grad}
        return _of_parts(run, tokens, parameters, sums, down.shape[-1 if transposed else -2])
    first, between, second = products_of(
        gate_up, down, activation=activation, gate_up_bias=gate_up_bias, down_bias=down_bias, gated=gated,
        transposed=transposed, concatenated=concatenated,
    )  # fmt: skip
    of_first = None if gate_up_grad is None else _oriented("gate_up_grad", gate_up_grad, transposed)
    of_second = None if down_grad is None else _oriented("down_grad", down_grad, transposed)
    if of_first is not None and isinstance(first.weight, tuple) and not isinstance(gate_up, tuple | list):
        of_first = _apart(of_first)
    _check(x, top_k_index, gate_up, down, gated, transposed)
    for name, given, weight in (("gate_up_grad", gate_up_grad, gate_up), ("down_grad", down_grad, down)):
        if isinstance(given, Tensor) and isinstance(weight, Tensor):
            check_sum("experts", name, given, weight, tuple(weight.shape))
    rows = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
    how: dict[str, Any] = {"precision": precision, "batch_invariant": batch_invariant}
    routing = route(top_k_index, second.weight.shape[0])
    hidden: Tensor = grouped_linear(
        rows, first.weight, first.bias, offs=routing.offs, gather=routing.token, epilogue=first.epilogue,
        weight_grad=of_first, **how,
    )  # fmt: skip
    if between is not None:
        hidden = between(hidden)
    y: Tensor = grouped_linear(
        hidden, second.weight, second.bias, offs=routing.offs, weight_grad=of_second, **how
    )  # fmt: skip
    if post_norm is not None:
        y = post_norm(y)
    return combine(y, routing, top_k_weights).to(x.dtype)


def _has_parts(values: Iterable[Any]) -> bool:
    """Whether one of the tensors is a DTensor, or contains one."""
    return is_sharded([getattr(x, x.INNER[0]) if isinstance(x, PackedWeight) else x for x in values])


def _of_parts(run: Callable[..., Tensor], *given: Any) -> Tensor:
    """See `sharded.experts_of_parts`, which has these arguments."""
    # It imports torch.distributed.tensor, which takes a second.
    from .sharded import experts_of_parts

    *_, parameters, _, _ = given
    if is_compiling() and any(isinstance(x, PackedWeight) for x in parameters.values()):
        # The compiler can't trace the construction of a packed weight from parts.
        from ..product.compiled import uncompiled

        made: Tensor = uncompiled(experts_of_parts, run, *given)
        return made
    return experts_of_parts(run, *given)


def products_of(
    gate_up: Factor, down: Tensor, *, activation: Activation, gate_up_bias: Factor | None, down_bias: Tensor | None,
    gated: bool, transposed: bool = False, concatenated: bool = True,
) -> tuple[Product, Callable[[Tensor], Tensor] | None, Product]:  # fmt: skip
    """The products of `experts`, which has these arguments, and the activation that torch runs between them."""
    epilogue, between = _activation(activation, gated)
    first, second = _oriented("gate_up", gate_up, transposed), _oriented("down", down, transposed)
    _check_biases(gate_up_bias, down_bias, first, second)
    if gated and not concatenated and between is None and not isinstance(first, tuple):
        first, gate_up_bias = _apart(first), _bias_apart(gate_up_bias)
    return Product(first, gate_up_bias, epilogue), between, Product(second, down_bias)


def clamped_swiglu(gate: Tensor, up: Tensor, alpha: float = 1.702, limit: float = 7.0) -> Tensor:
    """gpt-oss's activation: `g * sigmoid(alpha * g) * (u + 1)` with g at most `limit` and u between `-limit` and
    `limit`.

    Use functools.partial for other values of `alpha` and `limit`.

    Example:
        >>> import functools, torch
        >>> from gemmery.moe import clamped_swiglu
        >>> clamped_swiglu(torch.tensor([1.0, 9.0]), torch.tensor([0.0, 9.0]))
        tensor([ 0.8458, 55.9996])
        >>> functools.partial(clamped_swiglu, limit=2.0)(torch.tensor([9.0]), torch.tensor([9.0]))
        tensor([5.8070])
    """
    gate, up = gate.clamp(max=limit), up.clamp(min=-limit, max=limit)
    return gate * torch.sigmoid(alpha * gate) * (up + 1)


def gate(function: Callable[[Tensor, Tensor], Tensor]) -> Epilogue[..., Tensor]:
    """An epilogue from a function of gate and up, for a product whose columns are those of the gate, then those of up.

    `experts` creates it from its activation. Under torch.compile, create it beforehand. The same function gives the
    same epilogue.

    Args:
        function: a torch function of two tensors that returns a tensor of their shape.

    Raises:
        TypeError: it is not a function, or it is a module.

    Example:
        >>> import torch
        >>> from gemmery.moe import gate
        >>> sum_of_both = gate(lambda gate, up: gate + up)
        >>> sum_of_both(torch.tensor([[1.0, 2.0, 30.0, 40.0]]))
        tensor([[31., 42.]])
    """
    if isinstance(function, torch.nn.Module) or not callable(function):
        kind = "module " if isinstance(function, torch.nn.Module) else ""
        raise TypeError(
            f"gate: given a {kind}{type(function).__name__}; it must be a torch function of (gate, up)"
        )
    if _takes_one(function):
        name = getattr(function, "__name__", "the function")
        raise TypeError(
            f"gate: {name} takes one tensor; it must be a torch function of (gate, up). For an activation of the gate, "
            "which then multiplies up, give `experts` its name, such as 'silu'"
        )
    # A function that is created again, such as a lambda, is the same function if it captures the same values.
    is_made_once = isinstance(function, types.FunctionType) and "<" not in function.__qualname__
    return _gate(function if is_made_once else memoised(function))


def _takes_one(function: Callable[..., Any]) -> bool:
    """Whether a function needs only one argument, as activations do."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        # Of torch's own functions that are not written in Python.
        return getattr(function, "__name__", "") in ("gelu", "relu", "sigmoid", "silu", "tanh")
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    needed = [p for p in parameters if p.kind in positional and p.default is p.empty]
    return len(needed) == 1 and not any(p.kind is p.VAR_POSITIONAL for p in parameters)


# ---------------------------------------------------------------------------------------------------------------------
# Activations


def _halved(function: Callable[[Tensor, Tensor], Tensor], acc: Tensor) -> Tensor:
    gate, up = acc.chunk(2, dim=-1)
    return function(gate, up)


def _times_up(function: Callable[[Tensor], Tensor], acc: Tensor) -> Tensor:
    gate, up = acc.chunk(2, dim=-1)
    return function(gate) * up


@functools.lru_cache(256)
def _gate(known: Any) -> Epilogue[..., Tensor]:
    function = known.__gemmery_epilogue__ if isinstance(known, Epilogue) else known
    halved = functools.partial(_halved, function)
    functools.update_wrapper(halved, function, assigned=("__name__",), updated=())
    return Epilogue(halved)


_FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": library.gelu,
    "gelu_tanh": library.gelu_tanh,
    "relu": library.relu,
    "relu_squared": library.relu_squared,
    "silu": library.silu,
}
#: Made once each: code under torch.compile takes only epilogues that exist before it runs.
_ALONE = {name: Epilogue(function) for name, function in _FUNCTIONS.items()}
_GATED = {name: Epilogue(functools.partial(_times_up, function)) for name, function in _FUNCTIONS.items()}


def _activation(given: Any, gated: bool) -> tuple[Any, Callable[[Tensor], Tensor] | None]:
    """The first product's epilogue, or the activation that torch runs after it."""
    if isinstance(given, Unfused):
        return None, given.function
    if isinstance(given, Epilogue):
        return given, None
    if isinstance(given, str):
        known = _GATED if gated else _ALONE
        if given not in known:
            raise ValueError(
                f"experts: activation is {given!r}; it must be a function or one of {', '.join(known)} (of the gate, "
                "where there is one: swiglu is 'silu')"
            )
        return known[given], None
    if not callable(given):
        raise TypeError(
            f"experts: activation is a {type(given).__name__}; it must be a name or a torch function"
        )
    if not gated:
        return given, None
    if is_compiling():
        raise TypeError(
            "experts: under torch.compile, activation must be a name or the result of gemmery.moe.gate(f), created "
            "outside compiled code"
        )
    return gate(given), None


# ---------------------------------------------------------------------------------------------------------------------
# Weights


def _oriented(name: str, weight: Any, transposed: bool) -> Any:
    """A weight, or each of a pair, as (E, rows, columns)."""
    if isinstance(weight, tuple | list):
        return tuple([_oriented(f"{name}[{i}]", x, transposed) for i, x in enumerate(weight)])
    check_tensor("experts", name, weight)
    if weight.dim() != 3:
        raise ValueError(f"experts: {name} is {tuple(weight.shape)}; it must have three dimensions")
    if not transposed:
        return weight
    if isinstance(weight, PackedWeight):
        raise ValueError(
            f"experts: {name} is packed, with transposed=True; pack weights of (E, 2I, H) and (E, H, I)"
        )
    return weight.mT


def _apart(weight: Any) -> tuple[Tensor, Tensor]:
    """The rows of gate, and those of up, of a weight in which they alternate, or of its gradient."""
    if isinstance(weight, tuple):
        raise TypeError("experts: gate_up_grad is a pair, and gate_up is not; give one tensor")
    if isinstance(weight, PackedWeight):
        raise ValueError(
            "experts: gate_up is packed, with concatenated=False; pack the rows of gate before those of up"
        )
    return weight[:, 0::2], weight[:, 1::2]


def _bias_apart(bias: Any) -> Any:
    return (bias[:, 0::2], bias[:, 1::2]) if isinstance(bias, Tensor) and bias.dim() == 2 else bias


def _check_biases(gate_up_bias: Any, down_bias: Any, first: Any, second: Any) -> None:
    """ValueError unless each bias has a row for each expert and a column for each row of its weight."""
    pairs = [("down_bias", down_bias, second)]
    weights = first if isinstance(first, tuple | list) else (first,)
    biases = gate_up_bias if isinstance(gate_up_bias, tuple | list) else (gate_up_bias,)
    if len(weights) == len(biases):
        pairs += [("gate_up_bias", bias, weight) for bias, weight in zip(biases, weights, strict=True)]
    for name, bias, weight in pairs:
        if isinstance(bias, Tensor) and tuple(bias.shape) != tuple(weight.shape[:2]):
            raise ValueError(f"experts: {name} is {tuple(bias.shape)}; it must be {tuple(weight.shape[:2])}")


def _check(x: Tensor, top_k_index: Tensor, gate_up: Any, down: Tensor, gated: bool, transposed: bool) -> None:
    """ValueError unless tokens, choices and weights fit each other; the parts check the rest."""
    check_tensor("experts", "x", x)
    check_tensor("experts", "top_k_index", top_k_index)
    if x.dim() == 0 or top_k_index.dim() == 0 or x.shape[:-1] != top_k_index.shape[:-1]:
        raise ValueError(
            f"experts: x is {tuple(x.shape)} and top_k_index {tuple(top_k_index.shape)}; they must be (..., H) and "
            "(..., k)"
        )
    check_id_type("experts", top_k_index, ", and top_k_weights comes after it")
    pair = gate_up if isinstance(gate_up, tuple | list) else (gate_up,)
    if len(pair) not in (1, 2) or (len(pair) == 2 and not gated):
        raise ValueError(
            f"experts: gate_up is a tuple of {len(pair)}; it must be a tensor or, with a gate, a pair (gate, up)"
        )
    width, columns = down.shape[-2 if transposed else -1], x.shape[-1]
    rows = width * (2 if gated and len(pair) == 1 else 1)
    wanted = (down.shape[0], columns, rows) if transposed else (down.shape[0], rows, columns)
    for part in pair:
        if part.dim() == down.dim() == 3 and part.shape[0] != down.shape[0]:
            raise ValueError(f"experts: gate_up has {part.shape[0]} experts and down {down.shape[0]}")
        if tuple(part.shape) != wanted:
            wide = "I" if rows == width else "2I"
            names = f"(E, H, {wide}) and (E, I, H)" if transposed else f"(E, {wide}, H) and (E, H, I)"
            other = "False" if transposed else "True"
            raise ValueError(
                f"experts: x has {columns} columns, gate_up is {tuple(part.shape)} and down {tuple(down.shape)}; with "
                f"transposed={transposed} the weights must be {names}, so that gate_up would be {wanted}. "
                f"transposed={other} is for their transposes"
            )
