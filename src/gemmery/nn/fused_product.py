"""The product with an epilogue that replaces the first layers of a block: for compilation in advance."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor, nn

from ..epilogues.function import Epilogue
from ..precision import AskedPrecision
from ..product.spec import Factor
from .activations import Activation, recognised
from .linear import Linear, is_plain, is_untouched


@dataclass(frozen=True)
class FusedProduct:
    """A product that replaces layers of a block in their present state.

    Attributes:
        layers: their names; their own products do not run.
        weight, bias, epilogue, precision, batch_invariant: as `gemmery.linear` takes them.
    """

    layers: tuple[str, ...]
    weight: Factor
    bias: Factor | None
    epilogue: Epilogue[..., Tensor]
    precision: AskedPrecision
    batch_invariant: bool

    @classmethod
    def of(
        cls, names: tuple[str, ...], layer: Linear, weight: Factor, bias: Factor | None, epilogue: Epilogue[..., Tensor]
    ) -> FusedProduct:  # fmt: skip
        """One that is computed as a layer is."""
        return cls(names, weight, bias, epilogue, layer.precision, layer.batch_invariant)


def activated_product(
    name: str, layer: nn.Module, act: Activation, module: Callable[[Tensor], Tensor]
) -> FusedProduct | None:
    """From a layer and a module that computes `act`; None if calling them may do something else."""
    if not (is_plain(layer) and computes(module, act)):
        return None
    return FusedProduct.of((name,), layer, layer.weight, layer.bias, act.alone)


def gated_product(
    names: tuple[str, str], gate: Linear, up: Linear, act: Activation, module: Callable[[Tensor], Tensor]
) -> FusedProduct | None:  # fmt: skip
    """From a gate, the layer that it gates, and a module that computes `act`; also None."""
    if not (are_alike(gate, up) and computes(module, act)):
        return None
    return FusedProduct.of(names, gate, *halves(gate.weight, up.weight, gate.bias, up.bias), act.gated)


def stacked_product(name: str, layer: nn.Module, act: Activation) -> FusedProduct | None:
    """From a layer that is both, the gate first; also None."""
    return FusedProduct.of((name,), layer, layer.weight, layer.bias, act.gated) if is_plain(layer) else None


def are_alike(*layers: Linear) -> bool:
    """Whether calls of layers only multiply, with the same settings."""
    hows = {(layer.precision, layer.batch_invariant) if is_plain(layer) else None for layer in layers}
    return len(hows) == 1 and None not in hows


def computes(module: Callable[[Tensor], Tensor], act: Activation) -> bool:
    """Whether a call of an activation's module would still have the effect that it had when the block was created."""
    if module is act:
        return True
    return recognised(module) is act and (not isinstance(module, nn.Module) or is_untouched(module))


def halves(
    gate: Tensor, up: Tensor, of_gate: Tensor | None, of_up: Tensor | None
) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor] | None]:
    """Weights and biases as one product takes them: of one layout, and both biases or none."""
    if gate.stride() != up.stride():
        gate, up = gate.contiguous(), up.contiguous()
    if of_gate is None and of_up is None:
        return (gate, up), None
    none = gate.new_zeros(gate.shape[0])
    return (gate, up), (none if of_gate is None else of_gate, none if of_up is None else of_up)
