"""Feed-forward blocks whose activation runs inside the preceding product."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn

from ..api import linear
from ..epilogues.function import Epilogue
from ..formats.packing import STRIP
from ..formats.tensor import QuantizedTensor
from ..precision import AskedPrecision
from ..product.spec import Factor
from .activations import Activation, activation
from .feed_forward import Differentiable, feed_forward
from .fused_product import (
    FusedProduct,
    activated_product,
    are_alike,
    computes,
    gated_product,
    halves,
    stacked_product,
)  # fmt: skip
from .linear import Linear, is_plain
from .packed import PackedLinear, is_plain_packed

ActivationLike = str | Callable[..., Tensor] | Activation


def activated_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: ActivationLike = "gelu",
    *,
    precision: AskedPrecision = "ieee",
    batch_invariant: bool = False,
) -> Tensor:
    """`act(x @ weight.T + bias)` as one kernel; the sum is rounded once, after the activation.

    Args:
        x: (..., in) or (in,), of any type that a product with an epilogue supports.
        weight: (hidden, in), of x's type.
        bias: (hidden,).
        activation: a name or an elementwise function, see `gemmery.nn.activation`. Under torch.compile, a name or the
            result of `gemmery.nn.activation`.
        precision, batch_invariant: see `gemmery.matmul`.

    Returns:
        (..., hidden), in x's type.

    Raises:
        ValueError: shapes or devices do not fit, or no activation has this name.
        TypeError: types are not supported or differ.

    Example:
        >>> import torch, gemmery.nn
        >>> gemmery.nn.activated_linear(torch.ones(2, 3), -torch.ones(4, 3), activation="relu")
        tensor([[0., 0., 0., 0.],
                [0., 0., 0., 0.]])
    """
    epilogue = _resolve(activation).alone
    rows = x if x.dim() > 1 else x.unsqueeze(0)
    y: Tensor = linear(
        rows, weight, bias, epilogue=epilogue, precision=precision, batch_invariant=batch_invariant
    )
    return y if x.dim() > 1 else y.squeeze(0)


def gated_linear(
    x: Tensor,
    w_gate: Tensor,
    w_up: Tensor,
    activation: ActivationLike = "silu",
    bias_gate: Tensor | None = None,
    bias_up: Tensor | None = None,
    *,
    precision: AskedPrecision = "ieee",
    batch_invariant: bool = False,
) -> Tensor:
    """`act(x @ w_gate.T + bias_gate) * (x @ w_up.T + bias_up)` as one kernel: the first half of a SwiGLU block.

    Args:
        x: (..., in) or (in,), of any type that a product with an epilogue supports.
        w_gate, w_up: (hidden, in), of x's type.
        activation: a name or an elementwise function, see `gemmery.nn.activation`. Under torch.compile, a name or the
            result of `gemmery.nn.activation`.
        bias_gate, bias_up: (hidden,), or None for either.
        precision, batch_invariant: see `gemmery.matmul`.

    Returns:
        (..., hidden), in x's type.

    Raises:
        ValueError: shapes or devices do not fit, or no activation has this name.
        TypeError: types are not supported or differ.

    Example:
        >>> import torch, gemmery.nn
        >>> x, w = torch.ones(2, 3), torch.ones(4, 3)
        >>> gemmery.nn.gated_linear(x, w, 2 * w, activation="relu")
        tensor([[18., 18., 18., 18.],
                [18., 18., 18., 18.]])
    """
    if w_gate.shape != w_up.shape:
        raise ValueError(
            f"gated_linear: w_gate is {tuple(w_gate.shape)} and w_up is {tuple(w_up.shape)}; they must have the same "
            "shape"
        )
    epilogue = _resolve(activation).gated
    weights, biases = halves(w_gate, w_up, bias_gate, bias_up)
    rows = x if x.dim() > 1 else x.unsqueeze(0)
    y: Tensor = linear(
        rows, weights, biases, epilogue=epilogue, precision=precision, batch_invariant=batch_invariant
    )
    return y if x.dim() > 1 else y.squeeze(0)


def stacked_gated_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: ActivationLike = "silu",
    *,
    precision: AskedPrecision = "ieee",
    batch_invariant: bool = False,
) -> Tensor:
    """`gated_linear` for one weight whose first half is the gate's.

    Args:
        x: (..., in) or (in,), of any type that a product with an epilogue supports.
        weight: (2 * hidden, in): `torch.cat((w_gate, w_up))`, of x's type.
        bias: (2 * hidden,).
        activation: a name or an elementwise function, see `gemmery.nn.activation`. Under torch.compile, a name or the
            result of `gemmery.nn.activation`.
        precision, batch_invariant: see `gemmery.matmul`.

    Returns:
        (..., hidden), in x's type.

    Raises:
        ValueError: shapes or devices do not fit, no activation has this name, or the weight is a DTensor whose rows are
            sharded, so that no rank has both halves.
        TypeError: types are not supported or differ.

    Example:
        >>> import torch, gemmery.nn
        >>> x, w = torch.ones(2, 3), torch.ones(4, 3)
        >>> gemmery.nn.stacked_gated_linear(x, torch.cat((w, 2 * w)), activation="relu")
        tensor([[18., 18., 18., 18.],
                [18., 18., 18., 18.]])
    """
    if weight.dim() != 2 or weight.shape[0] % 2:
        raise ValueError(
            f"stacked_gated_linear: weight is {tuple(weight.shape)}; it must be (2 * hidden, in), gate before up"
        )
    epilogue = _resolve(activation).gated
    rows = x if x.dim() > 1 else x.unsqueeze(0)
    y: Tensor = linear(
        rows, weight, bias, epilogue=epilogue, precision=precision, batch_invariant=batch_invariant
    )
    return y if x.dim() > 1 else y.squeeze(0)


def _resolve(given: ActivationLike) -> Activation:
    # Modules pass on an Activation, so torch.compile need not trace the lookup.
    return given if isinstance(given, Activation) else activation(given)


def _check_sizes(owner: str, **sizes: int) -> None:
    for name, size in sizes.items():
        if not isinstance(size, int) or size < 0:
            raise ValueError(f"{owner}: {name} is {size!r}; it must be an integer, 0 or more")


class MLP(nn.Module):
    """`down(act(up(x)))`, with the activation fused into the first product.

    Its layers are gemmery's: `up.weight` is (hidden_features, in_features) and `down.weight` (out_features,
    hidden_features). A layer with hooks, or one that an adapter has replaced, is called as a module, so that its code
    runs.

    Args:
        in_features: the last dimension of the input.
        hidden_features: the width between the two layers.
        out_features: the last dimension of the output; in_features if None.
        activation: "gelu", "gelu_tanh", "silu", "relu", "relu_squared" or an elementwise torch function.
        bias: whether both layers have a bias.
        device, dtype: of the parameters, as for torch.nn.Linear.
        precision, batch_invariant: see `gemmery.matmul`.

    Raises:
        ValueError: a size is negative, or no activation has this name.
        TypeError: the activation is not a function.

    Example:
        >>> import torch, gemmery.nn
        >>> mlp = gemmery.nn.MLP(8, 32, activation="gelu_tanh")
        >>> mlp(torch.randn(2, 4, 8)).shape
        torch.Size([2, 4, 8])
    """

    def __init__(
        self,
        in_features: int,
        hidden_features: int,
        out_features: int | None = None,
        *,
        activation: ActivationLike = "gelu",
        bias: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
        precision: AskedPrecision = "ieee",
        batch_invariant: bool = False,
    ) -> None:
        super().__init__()
        out_features = in_features if out_features is None else out_features
        _check_sizes(
            "MLP", in_features=in_features, hidden_features=hidden_features, out_features=out_features
        )
        self.in_features, self.hidden_features, self.out_features = in_features, hidden_features, out_features
        self.activation = _resolve(activation)
        how: dict[str, Any] = {
            "device": device, "dtype": dtype, "precision": precision, "batch_invariant": batch_invariant,
        }  # fmt: skip
        self.up = Linear(in_features, hidden_features, bias, **how)
        self.down = Linear(hidden_features, out_features, bias, **how)

    def forward(self, input: Tensor) -> Tensor:
        """(..., in_features) to (..., out_features)."""
        return activated_block(self.up, self.down, self.activation, self.activation, input)

    def fused_product(self) -> FusedProduct | None:
        """The product that runs in place of `up`, or None."""
        return activated_product("up", self.up, self.activation, self.activation)

    def extra_repr(self) -> str:
        """The name of the activation."""
        return f"activation={self.activation.name}"


class GatedMLP(nn.Module):
    """`down(act(gate(x)) * up(x))`, as in SwiGLU and GeGLU blocks, with all elementwise operators fused into a product.

    One product computes gate and up, and combines the halves of its own result. With `stacked`, `gate_up.weight` is (2
    * hidden_features, in_features), the gate's rows first. Without it, `gate.weight` and `up.weight` are
    (hidden_features, in_features) each, as in most checkpoints. `down.weight` is (out_features, hidden_features).
    Layers with hooks, and modules that have replaced a layer, are called as modules, so that their code runs.

    Args:
        in_features: the last dimension of the input.
        hidden_features: the width of gate and up.
        out_features: the last dimension of the output; in_features if None.
        activation: of the gate: "silu", "gelu", "gelu_tanh", "relu", "relu_squared" or an elementwise torch function.
        bias: whether the layers have a bias.
        stacked: whether gate and up are one parameter.
        device, dtype: of the parameters, as for torch.nn.Linear.
        precision, batch_invariant: see `gemmery.matmul`.

    Raises:
        ValueError: a size is negative, or no activation has this name.
        TypeError: the activation is not a function.

    Example:
        >>> import torch, gemmery.nn
        >>> mlp = gemmery.nn.GatedMLP(8, 24, activation="silu")
        >>> mlp(torch.randn(2, 4, 8)).shape, mlp.gate_up.weight.shape
        (torch.Size([2, 4, 8]), torch.Size([48, 8]))
    """

    def __init__(
        self,
        in_features: int,
        hidden_features: int,
        out_features: int | None = None,
        *,
        activation: ActivationLike = "silu",
        bias: bool = False,
        stacked: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
        precision: AskedPrecision = "ieee",
        batch_invariant: bool = False,
    ) -> None:
        super().__init__()
        out_features = in_features if out_features is None else out_features
        _check_sizes(
            "GatedMLP", in_features=in_features, hidden_features=hidden_features, out_features=out_features
        )
        self.in_features, self.hidden_features, self.out_features = in_features, hidden_features, out_features
        self.activation, self.stacked = _resolve(activation), stacked
        how: dict[str, Any] = {
            "device": device, "dtype": dtype, "precision": precision, "batch_invariant": batch_invariant,
        }  # fmt: skip
        if stacked:
            self.gate_up = Linear(in_features, 2 * hidden_features, bias, **how)
        else:
            self.gate = Linear(in_features, hidden_features, bias, **how)
            self.up = Linear(in_features, hidden_features, bias, **how)
        self.down = Linear(hidden_features, out_features, bias, **how)

    def forward(self, input: Tensor) -> Tensor:
        """(..., in_features) to (..., out_features)."""
        if not self.stacked:
            return gated_block(self.gate, self.up, self.down, self.activation, self.activation, input)
        first, act = self.gate_up, self.activation
        if are_alike(first, self.down):
            return _block(input, first.weight, first.bias, self.down, act.gated, act.gated_with_gradient)
        output: Tensor = self.down(_stacked(first, act, input, self.hidden_features))
        return output

    def fused_product(self) -> FusedProduct | None:
        """The product that runs in place of gate and up, or None."""
        if self.stacked:
            return stacked_product("gate_up", self.gate_up, self.activation)
        return gated_product(("gate", "up"), self.gate, self.up, self.activation, self.activation)

    def extra_repr(self) -> str:
        """The name of the activation, and whether gate and up are one parameter."""
        return f"activation={self.activation.name}, stacked={self.stacked}"


# ---------------------------------------------------------------------------------------------------------------------
# Modules' layers, fused where nothing but their parameters matters


def activated(layer: nn.Module, act: Activation, module: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """`module(layer(x))`, where `module` computes `act`: fused if calling the layer would do nothing else."""
    if not computes(module, act):
        y: Tensor = module(layer(x))
        return y
    if is_plain_packed(layer):
        return layer.product(x, act.alone)
    if not is_plain(layer):
        y = module(layer(x))
        return y
    return activated_linear(
        x, layer.weight, layer.bias, act, precision=layer.precision, batch_invariant=layer.batch_invariant
    )


def activated_block(
    first: Linear, down: Linear, act: Activation, module: Callable[[Tensor], Tensor], x: Tensor
) -> Tensor:
    """`down(module(first(x)))`, where `module` computes `act`: fused if calling the layers would do nothing else."""
    if are_alike(first, down) and computes(module, act):
        return _block(x, first.weight, first.bias, down, act.alone, act.alone_with_gradient)
    y: Tensor = down(activated(first, act, module, x))
    return y


def gated_block(
    gate: Linear, up: Linear, down: Linear, act: Activation, module: Callable[[Tensor], Tensor], x: Tensor
) -> Tensor:  # fmt: skip
    """`down(module(gate(x)) * up(x))`, where `module` computes `act`: fused as `activated_block`."""
    alike = are_alike(gate, up, down) and computes(module, act)
    if not alike or (gate.bias is None) != (up.bias is None) or gate.weight.stride() != up.weight.stride():
        y: Tensor = down(_gated(gate, up, act, module, x))
        return y
    bias = None if gate.bias is None else (gate.bias, up.bias)
    return _block(x, (gate.weight, up.weight), bias, down, act.gated, act.gated_with_gradient)


def _block(
    x: Tensor, first: Factor, bias: Factor | None, down: Linear, epilogue: Epilogue[..., Tensor],
    differentiable: Differentiable,
) -> Tensor:  # fmt: skip
    rows = x if x.dim() > 1 else x.unsqueeze(0)
    y = feed_forward(
        rows,
        first,
        bias,
        down.weight,
        down.bias,
        epilogue,
        differentiable,
        down.precision,
        down.batch_invariant,
    )
    return y if x.dim() > 1 else y.squeeze(0)


def _gated(
    gate: Linear, up: Linear, act: Activation, module: Callable[[Tensor], Tensor], x: Tensor
) -> Tensor:
    """`module(gate(x)) * up(x)`, where `module` computes `act`: fused if calling the layers would do nothing else."""
    if not (are_alike(gate, up) and computes(module, act)):
        y: Tensor = module(gate(x)) * up(x)
        return y
    return gated_linear(
        x, gate.weight, up.weight, act, gate.bias, up.bias,
        precision=gate.precision, batch_invariant=gate.batch_invariant,
    )  # fmt: skip


def stacked_block(
    gate_up: nn.Module, down: nn.Module, act: Activation, module: Callable[[Tensor], Tensor], x: Tensor
) -> Tensor:
    """`down(module(gate) * up)` of the halves of `gate_up(x)`, where `module` computes `act`: fused likewise."""
    if computes(module, act) and has_packed_halves(gate_up):
        hidden = gate_up.product(x, act.gated)
    else:
        gate, up = gate_up(x).chunk(2, dim=-1)
        hidden = module(gate) * up
    y: Tensor = down(hidden)
    return y


def has_packed_halves(layer: nn.Module) -> TypeGuard[PackedLinear]:
    """Whether a layer is quantized, and a kernel can combine the halves of its result."""
    if not is_plain_packed(layer):
        return False
    return isinstance(layer.weight, QuantizedTensor) and layer.weight.shape[0] % (2 * STRIP) == 0


def _stacked(layer: nn.Module, act: Activation, x: Tensor, hidden: int) -> Tensor:
    if has_packed_halves(layer) and layer.out_features == 2 * hidden:
        return layer.product(x, act.gated)
    if not is_plain(layer):
        stacked = layer(x)
        if stacked.shape[-1] != 2 * hidden:
            raise ValueError(
                f"gate_up returns {stacked.shape[-1]} columns and the block has {2 * hidden}: a part of stacked gate "
                "and up does not contain halves of both; create the block with stacked=False"
            )
        gate, up = stacked.chunk(2, dim=-1)
        y: Tensor = act(gate) * up
        return y
    return stacked_gated_linear(
        x, layer.weight, layer.bias, act, precision=layer.precision, batch_invariant=layer.batch_invariant
    )
