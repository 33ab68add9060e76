"""The experts of a mixture-of-experts layer as a module."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ..epilogues.function import Epilogue
from ..formats.weight import PackedWeight
from ..moe.experts import experts
from ..precision import AskedPrecision
from .activations import Activation, activation
from .packed import check_sharded_alike

ExpertActivation = str | Callable[..., Tensor] | Activation | Epilogue[..., Tensor]


class Experts(nn.Module):
    """Experts with a gate, `down(act(gate(x)) * up(x))`, or without one, for tokens that have chosen their experts.

    `gemmery.moe.experts` computes them. Parameters have Hugging Face's names and shapes: `gate_up_proj` is (E, 2I, H),
    the gate's rows first, or without a gate `up_proj` (E, I, H); `down_proj` is (E, H, I); biases are
    `gate_up_proj_bias` or `up_proj_bias`, and `down_proj_bias`. Weights may be packed, see `of`. The router is not part
    of the module.

    Args:
        num_experts: E.
        in_features: H, the number of columns of the input and of the output.
        hidden_features: I, the width between the two products.
        activation: a name or an elementwise function, see `gemmery.nn.activation`; or an `Epilogue` of the whole first
            product, (R, 2I), as `gemmery.moe.gate(f)` creates it from a function of (gate, up).
        gated: whether there is a gate.
        bias: whether there are biases.
        device, dtype: of the parameters, as for torch.nn.Linear.
        precision, batch_invariant: see `gemmery.matmul`.
        fuse_wgrad_accumulation: whether the backward pass adds the gradients of both weights, without rounding, to
            their attribute `main_grad`, a float32 tensor of the weight's shape, and leaves their `grad` alone; see
            `weight_grad` of `gemmery.grouped_linear`. Transformer Engine uses the same name. It can also be set later.

    Raises:
        ValueError: a size is negative, or no activation has this name.
        TypeError: the activation is not a function.

    Example:
        >>> import torch, gemmery.nn
        >>> layer = gemmery.nn.Experts(8, 16, 24)
        >>> logits = torch.randn(5, 8)
        >>> weights, index = logits.softmax(-1).topk(2)
        >>> layer(torch.randn(5, 16), index, weights).shape
        torch.Size([5, 16])
    """

    down_proj: nn.Parameter
    down_proj_bias: nn.Parameter | None
    fuse_wgrad_accumulation = False

    def __init__(
        self,
        num_experts: int,
        in_features: int,
        hidden_features: int,
        *,
        activation: ExpertActivation = "silu",
        gated: bool = True,
        bias: bool = False,
        device: Any = None,
        dtype: torch.dtype | None = None,
        precision: AskedPrecision = "ieee",
        batch_invariant: bool = False,
        fuse_wgrad_accumulation: bool = False,
    ) -> None:
        super().__init__()
        self.fuse_wgrad_accumulation = fuse_wgrad_accumulation
        sizes = {"num_experts": num_experts, "in_features": in_features, "hidden_features": hidden_features}
        for name, size in sizes.items():
            if not isinstance(size, int) or size < 0:
                raise ValueError(f"Experts: {name} is {size!r}; it must be an integer, 0 or more")
        self.num_experts, self.in_features, self.hidden_features = num_experts, in_features, hidden_features
        self.gated, self.precision, self.batch_invariant = gated, precision, batch_invariant
        self.activation = _resolve(activation)
        rows = 2 * hidden_features if gated else hidden_features

        def empty(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(shape, device=device, dtype=dtype))

        self.register_parameter(self.first, empty(num_experts, rows, in_features))
        self.register_parameter("down_proj", empty(num_experts, in_features, hidden_features))
        self.register_parameter(f"{self.first}_bias", empty(num_experts, rows) if bias else None)
        self.register_parameter("down_proj_bias", empty(num_experts, in_features) if bias else None)
        self.reset_parameters()

    @classmethod
    def of(
        cls,
        first: Tensor,
        down: Tensor,
        first_bias: Tensor | None = None,
        down_bias: Tensor | None = None,
        *,
        activation: ExpertActivation = "silu",
        gated: bool = True,
        precision: AskedPrecision = "ieee",
        batch_invariant: bool = False,
    ) -> Experts:
        """Experts from existing weights, dense or packed; parameters are shared.

        Args:
            first: (E, 2I, H), the gate's rows first, or without a gate (E, I, H).
            down: (E, H, I).
            first_bias, down_bias: (E, 2I) or (E, I), and (E, H).
            activation, gated, precision, batch_invariant: see `Experts`.

        Raises:
            ValueError: shapes do not fit.

        Example:
            >>> import torch, gemmery.nn
            >>> first, down = torch.randn(8, 64, 32), torch.randn(8, 32, 32)
            >>> gemmery.nn.Experts.of(gemmery.quantize(first, "mxfp4"), gemmery.quantize(down, "mxfp4"))
            Experts(num_experts=8, in_features=32, hidden_features=32, activation=silu, bias=False, format=mxfp4)
        """
        count, in_features, hidden_features = down.shape if down.dim() == 3 else (0, 0, 0)
        rows = 2 * hidden_features if gated else hidden_features
        if down.dim() != 3 or tuple(first.shape) != (count, rows, in_features):
            names = "(E, 2I, H)" if gated else "(E, I, H)"
            raise ValueError(
                f"Experts: the weights are {tuple(first.shape)} and {tuple(down.shape)}; they must be {names} and "
                "(E, H, I)"
            )
        made = cls.__new__(cls)
        nn.Module.__init__(made)
        made.num_experts, made.in_features, made.hidden_features = count, in_features, hidden_features
        made.gated, made.precision, made.batch_invariant = gated, precision, batch_invariant
        made.activation = _resolve(activation)
        named = {
            made.first: first, "down_proj": down, f"{made.first}_bias": first_bias, "down_proj_bias": down_bias,
        }  # fmt: skip
        for name, value in named.items():
            made.register_parameter(name, _parameter(value))
        return made

    def reset_parameters(self) -> None:
        """Initialize each expert's layers as torch.nn.Linear does."""
        for name, inputs in ((self.first, self.in_features), ("down_proj", self.hidden_features)):
            bound = 1 / math.sqrt(inputs) if inputs else 0.0
            for parameter in (getattr(self, name), getattr(self, f"{name}_bias")):
                if parameter is not None:
                    nn.init.uniform_(parameter, -bound, bound)

    @property
    def first(self) -> str:
        """The name of the first product's weight."""
        return "gate_up_proj" if self.gated else "up_proj"

    @property
    def packed(self) -> bool:
        """Whether a weight is quantized or sparse; it is then a parameter without a gradient."""
        return any(isinstance(x, PackedWeight) for x in self._parameters.values())

    @property
    def epilogue(self) -> Epilogue[..., Tensor]:
        """The epilogue of the first product."""
        act = self.activation
        if isinstance(act, Activation):
            return act.gated if self.gated else act.alone
        return act

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor | None) -> Tensor:
        """(..., H) to (..., H).

        Args:
            hidden_states: the tokens; cast to the type of packed weights, and the result back.
            top_k_index: (..., k), the experts of each token; ids outside `0..E - 1` add nothing.
            top_k_weights: (..., k), the router weights.
        """
        weights = (getattr(self, self.first), self.down_proj)
        packed = next((x for x in weights if isinstance(x, PackedWeight)), None)
        x = hidden_states if packed is None else hidden_states.to(packed.dtype)
        y = experts(
            x, top_k_index, top_k_weights, **self.given(), gate_up_grad=self._main_grad(self.first),
            down_grad=self._main_grad("down_proj"), precision=self.precision, batch_invariant=self.batch_invariant,
        )  # fmt: skip
        return y.to(hidden_states.dtype)

    def given(self) -> dict[str, Any]:
        """The arguments of `gemmery.moe.experts.products_of`."""
        return {
            "gate_up": getattr(self, self.first), "down": self.down_proj, "activation": self.epilogue,
            "gate_up_bias": getattr(self, f"{self.first}_bias"), "down_bias": self.down_proj_bias, "gated": self.gated,
        }  # fmt: skip

    def _main_grad(self, name: str) -> Tensor | None:
        """The tensor to which a weight's gradient is added; None if autograd has it, or there is none."""
        weight = getattr(self, name)
        if not self.fuse_wgrad_accumulation or not weight.requires_grad or not torch.is_grad_enabled():
            return None
        found: Tensor | None = getattr(weight, "main_grad", None)
        if found is None:
            raise ValueError(
                f"Experts: {name} has no main_grad, to which fuse_wgrad_accumulation=True adds; set it to "
                f"{'float64' if weight.dtype == torch.float64 else 'float32'} zeros of the shape {tuple(weight.shape)}"
            )
        return found

    def extra_repr(self) -> str:
        """The sizes, the activation, and what the weights are."""
        act, weight = self.activation, getattr(self, self.first)
        name = act.name if isinstance(act, Activation) else getattr(act, "__name__", "epilogue")
        text = (
            f"num_experts={self.num_experts}, in_features={self.in_features}, "
            f"hidden_features={self.hidden_features}, activation={name}, "
            f"bias={self.down_proj_bias is not None}"
        )
        text += "" if self.gated else ", gated=False"
        if isinstance(weight, PackedWeight):
            text += f", {weight.form}"
        text += ", fuse_wgrad_accumulation=True" if self.fuse_wgrad_accumulation else ""
        return text + (", batch_invariant=True" if self.batch_invariant else "")

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, local_metadata: dict[str, Any], *args: Any
    ) -> None:
        if not local_metadata.get("assign_to_params_buffers", False):
            for name in (self.first, "down_proj"):
                _take(f"{prefix}{name}", getattr(self, name), state_dict.get(f"{prefix}{name}"))
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *args)


def _take(name: str, own: Any, given: Any) -> None:
    """Puts a packed weight into the parameter of another one, as `QuantizedLinear` does, for any format."""
    packed = isinstance(own, PackedWeight) and isinstance(given, PackedWeight)
    if packed and given.shape == own.shape:
        check_sharded_alike(name, own, given)
        torch.utils.swap_tensors(own, nn.Parameter(given.to(own.device).clone(), requires_grad=False))


def _resolve(given: ExpertActivation) -> Activation | Epilogue[..., Tensor]:
    return given if isinstance(given, Epilogue) else activation(given)


def _parameter(value: Tensor | None) -> nn.Parameter | None:
    # An existing parameter may be shared.
    if value is None or isinstance(value, nn.Parameter):
        return value
    return nn.Parameter(value, requires_grad=False)
