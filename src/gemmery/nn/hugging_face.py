"""Experts of Hugging Face's transformers by gemmery: as an implementation that a model selects, and as replacements.

transformers decorates classes of experts with `use_experts_implementation`, which describes them by flags, and selects
the function that computes them from a table. This module adds one to that table. No other module imports it:
`register_experts` imports transformers.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling
from torch.nn.utils import parametrize

from ..epilogues.function import Epilogue
from ..moe.experts import Unfused, experts
from ..precision import AskedPrecision
from ..product.fusible import check
from .activations import Activation, recognised
from .experts import Experts
from .linear import inherit, is_untouched, own_code

#: The name under which transformers registers it.
NAME = "gemmery"


def register_experts() -> None:
    """Register "gemmery" as an implementation of experts in Hugging Face's models.

    After it `model.set_experts_implementation("gemmery")` and `from_pretrained(..., experts_implementation="gemmery")`
    work, for every model whose experts have transformers' `use_experts_implementation`. The model itself does not
    change; `model.set_experts_implementation("grouped_mm")` reverts this. float32 products follow
    `torch.set_float32_matmul_precision`. A second call does nothing.

    An activation that can't be part of a kernel runs in torch between the two products. Under torch.compile, this
    applies to every activation that a model class defines itself, such as gpt-oss's, unless `gemmery.nn.swap` has
    replaced the experts.

    Raises:
        ImportError: transformers is not installed, or is older than 5.

    Example:
        >>> import gemmery.nn
        >>> gemmery.nn.register_experts()
        >>> from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
        >>> "gemmery" in ALL_EXPERTS_FUNCTIONS
        True
    """
    try:
        from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
    except ImportError as error:
        raise ImportError(
            f"register_experts: it needs transformers 5 or later, which has transformers.integrations.moe: {error}"
        ) from error
    ALL_EXPERTS_FUNCTIONS.register(NAME, experts_forward)


def experts_forward(
    self: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """The forward pass of a module of experts, with transformers' arguments.

    Args:
        self: a module whose class has `use_experts_implementation`.
        hidden_states: (T, H).
        top_k_index: (T, k), the experts of each token; ids outside `0..E - 1` add nothing.
        top_k_weights: (T, k), the weights of the router.

    Returns:
        (T, H), in the tokens' type.
    """
    return _computed(self, (hidden_states, top_k_index, top_k_weights), "torch", False)


class FusedExperts(nn.Module):
    """Hugging Face's experts by `gemmery.moe.experts`, for any implementation that the model selects.

    Made by `gemmery.nn.swap`.

    Attributes:
        original: the name of the replaced class.
        apply_gate: the class's `_apply_gate`.
        how: precision and batch_invariant, see `gemmery.matmul`.
        prepared: the activation at the time of construction, for code under torch.compile, which can't create one.
    """

    def __init__(self, module: nn.Module, precision: AskedPrecision, batch_invariant: bool) -> None:
        super().__init__()
        self.original, self.apply_gate = type(module).__name__, _apply_gate_of(module)
        self.how, self.prepared = (precision, batch_invariant), fusible(module)
        for name, parameter in module._parameters.items():
            self.register_parameter(name, parameter)
        self._modules.update(module._modules)
        inherit(self, module)

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """(T, H) to (T, H), see `experts_forward`."""
        return _computed(self, (hidden_states, top_k_index, top_k_weights), *self.how)

    @property
    def precision(self) -> AskedPrecision:
        """See `gemmery.matmul`."""
        return self.how[0]

    @property
    def batch_invariant(self) -> bool:
        """See `gemmery.matmul`."""
        return self.how[1]

    def given(self) -> dict[str, Any]:
        """See `gemmery.nn.Experts.given`."""
        return given_of(self)

    def _apply_gate(self, gate_up: Tensor) -> Tensor:
        made: Tensor = self.apply_gate(self, gate_up)
        return made

    def extra_repr(self) -> str:
        """The class that it replaces, and its number of experts."""
        return f"{self.original}, num_experts={_weight(self, 'down_proj').shape[0]}"


def _computed(
    module: nn.Module, inputs: tuple[Tensor, Tensor, Tensor], precision: AskedPrecision, batch_invariant: bool
) -> Tensor:
    return experts(
        *inputs, **given_of(module), post_norm=_post_norm(module), precision=precision,
        batch_invariant=batch_invariant,
    )  # fmt: skip


def given_of(module: nn.Module) -> dict[str, Any]:
    """The arguments of `gemmery.moe.experts.products_of` for a module of experts."""
    first, has_bias = _first(module), _flag(module, "has_bias", False)
    return {
        "gate_up": _weight(module, first), "down": _weight(module, "down_proj"), "activation": _activation(module),
        "gate_up_bias": _weight(module, f"{first}_bias") if has_bias else None,
        "down_bias": _weight(module, "down_proj_bias") if has_bias else None,
        "gated": _flag(module, "has_gate", True), "transposed": _flag(module, "is_transposed", False),
        "concatenated": _flag(module, "is_concatenated", True),
    }  # fmt: skip


# ---------------------------------------------------------------------------------------------------------------------
# What a module of experts is


def _flag(module: nn.Module, name: str, default: bool) -> bool:
    """A flag that the decorator has set; some versions of transformers lack some flags."""
    return bool(getattr(module, name, default))


def _first(module: nn.Module) -> str:
    return "gate_up_proj" if _flag(module, "has_gate", True) else "up_proj"


def _weight(module: nn.Module, name: str) -> Tensor:
    found: Tensor = getattr(module, name)
    return found


def _post_norm(module: nn.Module) -> Any:
    return module.post_expert_norm if _flag(module, "has_post_expert_norm", False) else None


def _apply_gate_of(module: nn.Module) -> Any:
    """The function `_apply_gate` of a module's class; None if the module defines its own."""
    if "_apply_gate" in module.__dict__:
        return None
    if isinstance(module, FusedExperts):
        return module.apply_gate
    return getattr(type(module), "_apply_gate", None)


def _is_default(apply: Any) -> bool:
    return getattr(apply, "__name__", "") == "_default_apply_gate"


def _activation(module: nn.Module) -> Epilogue[..., Tensor] | Unfused:
    """The activation between the products: in the first one's kernel, if possible."""
    found = fusible(module)
    if found is not None:
        return found
    if not _flag(module, "has_gate", True):
        return Unfused(module.act_fn)  # type: ignore[arg-type]
    return Unfused(module._apply_gate)  # type: ignore[arg-type]


def fusible(module: nn.Module) -> Epilogue[..., Tensor] | None:
    """The activation of a module of experts as an epilogue of the first product; None if it can't be one.

    It is checked at every call, because it may have changed.
    """
    concatenated = _flag(module, "is_concatenated", True)
    known = _known(getattr(module, "act_fn", None))
    if not _flag(module, "has_gate", True):
        return None if known is None else known.alone
    apply = _apply_gate_of(module)
    if _is_default(apply) and concatenated:
        return None if known is None else known.gated
    if is_compiling():
        return module.prepared if isinstance(module, FusedExperts) else None
    if not isinstance(apply, types.FunctionType):
        return None
    names = tuple([x for x in apply.__code__.co_names if x in module.__dict__ or x in module._modules])
    if "act_fn" in names and known is None:
        return None
    values = tuple([known if x == "act_fn" else getattr(module, x) for x in names])
    if not all([isinstance(x, int | float | None | Activation) for x in values]):
        return None
    return _gate(apply, names, values, tuple(map(type, values)), concatenated)


def _known(function: Any) -> Activation | None:
    """The activation that calling something runs, and nothing else; None if it is not one of gemmery's."""
    if isinstance(function, nn.Module) and not is_untouched(function):
        return None
    return recognised(function)


# ---------------------------------------------------------------------------------------------------------------------
# A class's own `_apply_gate` as an epilogue


class Gate:
    """A class's `_apply_gate` as a function of a product whose columns are those of gate, then those of up.

    It never changes, because all of its state is in its values.

    Args:
        apply: `_apply_gate(self, gate_up)`.
        names, values: the attributes that its module has.
        concatenated: whether it receives columns in this order; if not, columns of gate and up alternate.
    """

    def __init__(
        self,
        apply: Callable[..., Tensor],
        names: tuple[str, ...],
        values: tuple[Any, ...],
        concatenated: bool,
    ) -> None:
        self.apply, self.concatenated = apply, concatenated
        self.module = types.SimpleNamespace(**dict(zip(names, values, strict=True)))
        self.__name__ = apply.__qualname__

    def __call__(self, acc: Tensor) -> Tensor:
        """(R, 2I) to (R, I)."""
        return self.apply(self.module, acc if self.concatenated else Alternating(*acc.chunk(2, dim=-1)))

    def __repr__(self) -> str:
        return self.__name__

    def __deepcopy__(self, memo: dict[int, Any]) -> Gate:
        return self


class Alternating:
    """Columns of gate and up that alternate, as an `_apply_gate` separates them; they are never one tensor."""

    def __init__(self, gate: Tensor, up: Tensor) -> None:
        self.gate, self.up = gate, up

    def __getitem__(self, index: Any) -> Tensor:
        if isinstance(index, tuple) and len(index) == 2 and index[0] is Ellipsis:
            start, stop, step = (getattr(index[1], name, 0) for name in ("start", "stop", "step"))
            if stop is None and step == 2 and start in (None, 0, 1):
                return self.up if start == 1 else self.gate
        raise TypeError(f"columns of gate and up alternate; {index} is not those of one of them")


@functools.lru_cache(256)
def _gate(
    apply: Callable[..., Tensor], names: tuple[str, ...], values: tuple[Any, ...], kinds: tuple[type, ...],
    concatenated: bool,
) -> Epilogue[..., Tensor] | None:  # fmt: skip
    """The epilogue of a class's `_apply_gate`; None if it can't be part of a kernel.

    Args:
        kinds: the values' types, which tell apart what is equal.
    """
    made: Epilogue[..., Tensor] = Epilogue(Gate(apply, names, values, concatenated))
    try:
        check(made)
    except Exception:  # torch runs functions that can't be fused
        return None
    return made


# ---------------------------------------------------------------------------------------------------------------------
# For `swap` and `quantize`


def resembles(module: nn.Module) -> bool:
    """Whether a module is a module of experts that transformers has decorated, with any code."""
    return (
        hasattr(module, "_apply_gate")
        and isinstance(module.__dict__.get("has_gate"), bool)
        and "down_proj" in module._parameters
    )


def refusal(module: nn.Module) -> str | None:
    """Why a module of experts is not replaced; None if it can be."""
    cls = type(module)
    # The decorator's, which asks transformers' table.
    asks = getattr(cls.forward, "__globals__", {}).get("__name__") == "transformers.integrations.moe"
    if not (asks or cls is FusedExperts):
        return f"a {cls.__module__}.{cls.__qualname__}, whose forward is not known"
    code = own_code(module)
    if code is not None:
        return code
    if parametrize.is_parametrized(module):
        return "it is parametrized"
    if "_apply_gate" in module.__dict__:
        return "its _apply_gate was replaced"
    first = _first(module)
    names = {first, "down_proj"}
    if _flag(module, "has_bias", False):
        names |= {f"{first}_bias", "down_proj_bias"}
    norms = {"post_expert_norm"} if _flag(module, "has_post_expert_norm", False) else set()
    given = {name for name, x in module._parameters.items() if x is not None}
    if given != names or module._buffers or not norms <= set(module._modules) <= norms | {"act_fn"}:
        return "it has other parameters, buffers or children than its class gives it"
    for name in sorted(names):
        kind = type(module._parameters[name])
        if kind is not nn.Parameter:
            return f"its {name} is a {kind.__name__}, not a plain parameter"
    # Run by torch, it might need other attributes of its class.
    own = _flag(module, "has_gate", True) and not _is_default(_apply_gate_of(module))
    return "its _apply_gate can't be part of a product" if own and fusible(module) is None else None


def stacked(module: nn.Module) -> Experts | str:
    """A module of experts as `Experts`, with weights that are copied if their layout differs; or why not.

    Args:
        module: a supported module, or a `FusedExperts`.
    """
    act = fusible(module)
    if act is None:
        return "its activation can't be part of a product"
    if _post_norm(module) is not None:
        return "it has a norm after its second product"
    first, gated = _first(module), _flag(module, "has_gate", True)
    apart = gated and not _flag(module, "is_concatenated", True)

    def ordered(x: Tensor) -> Tensor:
        return torch.cat((x[:, 0::2], x[:, 1::2]), dim=1).contiguous() if apart else x

    up, down = _weight(module, first).detach(), _weight(module, "down_proj").detach()
    if _flag(module, "is_transposed", False):
        up, down = up.mT, down.mT.contiguous()
    biases: list[nn.Parameter | None] = [None, None]
    if _flag(module, "has_bias", False):
        own, of_down = (getattr(module, f"{name}_bias") for name in (first, "down_proj"))
        biases = [nn.Parameter(ordered(own.detach()), own.requires_grad) if apart else own, of_down]
    how: Any = getattr(module, "how", ("torch", False))
    made = Experts.of(
        ordered(up), down, *biases, activation=act, gated=gated, precision=how[0], batch_invariant=how[1]
    )  # fmt: skip
    return made.train(module.training)
