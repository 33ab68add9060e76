"""Linear layers with 2:4 sparse weights: one with a pruned weight, and one that trains a sparse weight."""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal, cast, get_args

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from ..api import linear, matmul
from ..dtensors import is_sharded
from ..formats.aten import has_no_values
from ..formats.sparse import GROUP, PATTERN, SparseTensor, sparsify, sparsify_as, transposable_mask
from ..formats.weight import DTYPES
from ..product.seen import autocast_dtype
from .linear import inherit
from .packed import PackedLinear, check_linear

#: The methods by which `SparseLinear` chooses the kept numbers.
PruningMethod = Literal["magnitude", "transposable"]


class PrunedLinear(PackedLinear):
    """A linear layer with a 2:4 sparse weight, computed by `gemmery.linear`.

    It is for inference. The weight is a parameter without a gradient; gradients reach the input and the bias. The input
    is cast to the weight's dtype, and the result back to that of the input. A state dict contains the `SparseTensor` as
    "weight". Loading one accepts any sparse weight of the layer's size, also of another type.
    `gemmery.formats.save_safetensors` writes such state dicts. `SparseLinear` is for training.

    Args:
        weight: a `gemmery.SparseTensor`, (out_features, in_features); a parameter is shared.
        bias: (out_features,); a parameter if it should be trained.
        batch_invariant: whether a row of the result has the same bits in every batch, see `gemmery.matmul`.

    Raises:
        TypeError, ValueError: the weight is not a sparse matrix, or the bias does not fit it.

    Example:
        >>> import torch, gemmery.nn
        >>> layer = gemmery.nn.PrunedLinear(gemmery.sparsify(torch.randn(32, 64), "2:4"))
        >>> layer
        PrunedLinear(in_features=64, out_features=32, bias=False, pattern=2:4)
        >>> layer(torch.randn(4, 64)).shape
        torch.Size([4, 32])
    """

    KIND = SparseTensor

    @classmethod
    def from_linear(
        cls, layer: nn.Linear, pattern: str = PATTERN, *, batch_invariant: bool = False, **options: Any
    ) -> PrunedLinear:
        """A layer with the pruned weight of a plain layer, and its bias, the same parameter.

        Args:
            layer: of any floating-point type.
            pattern, options: as for `gemmery.sparsify`.

        Example:
            >>> import torch, gemmery.nn
            >>> gemmery.nn.PrunedLinear.from_linear(torch.nn.Linear(64, 32), "2:4")
            PrunedLinear(in_features=64, out_features=32, bias=True, pattern=2:4)
        """
        check_linear("PrunedLinear.from_linear", layer)
        weight = sparsify(layer.weight.detach(), pattern, **options)
        made = cls(weight, layer.bias, batch_invariant=batch_invariant)
        return made.train(layer.training)

    @property
    def sparse(self) -> SparseTensor:
        """The weight, by its real type."""
        return self.weight  # type: ignore[return-value]  # a parameter of a tensor subclass is of that class


class SparseLinear(nn.Linear):
    """A linear layer that is trained with a 2:4 sparse weight.

    `weight` is dense, and the optimizer updates it: the layer is a subclass of torch.nn.Linear, with its parameters,
    initialization and state dict. Products use a pruned copy of the weight. The gradient of `weight` is that of the
    pruned weight, for all elements, including pruned ones (a straight-through estimator), so pruned elements can
    return. See "Accelerated sparse neural training" (Hubara et al., arXiv:2102.08124) for the transposable method, and
    "Learning N:M fine-grained structured sparse neural networks from scratch" (Zhou et al., arXiv:2102.04010) for
    `decay`.

    Products are computed in the weight's type if it is float16 or bfloat16, in autocast's type under autocast, and
    otherwise in bfloat16. A float32 weight therefore receives a float32 gradient of 16-bit products. The result has the
    input's type, or autocast's. The weight is pruned again when its version has changed, which every torch operator
    that writes to it does. Writing through `weight.data` does not change the version: call `prune()` afterwards.

    torch.compile leaves the layer out of its graphs. Double backward is not supported. Pruned copies take 9/16 of a
    16-bit weight, and twice that with "transposable". They are not part of copies, pickles and state dicts.

    Args:
        in_features, out_features, bias, device, dtype: as for torch.nn.Linear. in_features must be a multiple of 4.
        method: which elements are kept, see `gemmery.sparsify`. With "magnitude", the gradient of the input is a
            product with the expanded weight. With "transposable", the transpose is 2:4 too, and the gradient of the
            input is a sparse product as well; out_features must then be a multiple of 4.
        decay: the fraction of each pruned element that is added to its gradient, as in SR-STE, which uses 2e-4.
        batch_invariant: whether a row of the result has the same bits in every batch, see `gemmery.matmul`.

    Raises:
        ValueError: the sizes are not multiples of 4, there is no such method, or `decay` is negative.
        TypeError: `decay` is not a number.

    Example:
        >>> import torch, gemmery.nn
        >>> layer = gemmery.nn.SparseLinear(64, 32, method="transposable")
        >>> layer(torch.randn(8, 64)).sum().backward()
        >>> layer.weight.grad.shape, bool((layer.weight.grad != 0).float().mean() > 0.9)
        (torch.Size([32, 64]), True)
        >>> layer.to_inference()
        PrunedLinear(in_features=64, out_features=32, bias=True, pattern=2:4)
    """

    method: PruningMethod
    decay: float = 0.0
    batch_invariant: bool = False
    #: The last pruned weight; not copied.
    _last: _Pruned | None = None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        method: PruningMethod = "magnitude",
        decay: float = 0.0,
        batch_invariant: bool = False,
    ) -> None:
        _check(in_features, out_features, method, decay)
        super().__init__(in_features, out_features, bias, device, dtype)
        self.method, self.decay, self.batch_invariant = method, decay, batch_invariant

    @classmethod
    def from_linear(
        cls,
        layer: nn.Linear,
        *,
        method: PruningMethod = "magnitude",
        decay: float = 0.0,
        batch_invariant: bool = False,
    ) -> SparseLinear:
        """A layer that shares the parameters of a plain layer, and keeps its other attributes.

        Example:
            >>> import torch, gemmery.nn
            >>> plain = torch.nn.Linear(64, 32)
            >>> gemmery.nn.SparseLinear.from_linear(plain).weight is plain.weight
            True
        """
        check_linear("SparseLinear.from_linear", layer)
        _check(layer.in_features, layer.out_features, method, decay)
        made = cls.__new__(cls)
        nn.Module.__init__(made)
        made.in_features, made.out_features = layer.in_features, layer.out_features
        made.method, made.decay, made.batch_invariant = method, decay, batch_invariant
        made.register_parameter("weight", cast(nn.Parameter, layer.weight))
        made.register_parameter("bias", cast("nn.Parameter | None", layer.bias))
        inherit(made, layer)
        return made

    def to_inference(self) -> PrunedLinear:
        """A layer with only the pruned weight, and this layer's bias, the same parameter.

        Example: see `SparseLinear`.
        """
        made = PrunedLinear(self.pruned(), self.bias, batch_invariant=self.batch_invariant)
        return made.train(self.training)

    def pruned(self) -> SparseTensor:
        """The pruned weight that is used outside autocast, computed again.

        Example:
            >>> import torch, gemmery.nn
            >>> gemmery.nn.SparseLinear(64, 32).pruned()
            SparseTensor((32, 64), pattern=2:4, dtype=torch.bfloat16, device='cpu', bytes=2304)
        """
        return sparsify(self.weight, method=self.method)

    def prune(self) -> None:
        """Prune the weight again at the next call, even if its version has not changed.

        Example:
            >>> import torch, gemmery.nn
            >>> layer = gemmery.nn.SparseLinear(4, 4, bias=False, dtype=torch.bfloat16)
            >>> before = layer(torch.ones(1, 4, dtype=torch.bfloat16))
            >>> _ = layer.weight.data.fill_(1)
            >>> layer.prune()
            >>> layer(torch.ones(1, 4, dtype=torch.bfloat16))
            tensor([[2., 2., 2., 2.]], dtype=torch.bfloat16, grad_fn=<_ProductBackward>)
        """
        self._last = None

    def forward(self, input: Tensor) -> Tensor:
        """(..., in_features) to (..., out_features).

        Raises:
            TypeError: the type of the input is not floating point, so the result would be truncated.
            ValueError: the input or a parameter is a DTensor.
        """
        if torch.compiler.is_dynamo_compiling():
            from ..product.compiled import uncompiled

            broken: Tensor = uncompiled(self._multiply, input)
            return broken
        return self._multiply(input)

    def _multiply(self, input: Tensor) -> Tensor:
        if is_sharded((input, *self.parameters(recurse=False))):
            raise ValueError(
                "SparseLinear: its input or a parameter is a DTensor; a layer that prunes its weight can't be "
                "tensor-parallel. fully_shard gathers it, and to_inference() gives one that can be"
            )
        if not input.dtype.is_floating_point:
            raise TypeError(f"SparseLinear: the input is {input.dtype}; it must be a floating-point type")
        weight, asked = self.weight, autocast_dtype(input.device)
        dtype = asked or weight.dtype
        dtype = dtype if dtype in DTYPES else torch.bfloat16
        lowers = asked is not None
        with _without_autocast(input.device):
            pruned = self._of_type(dtype)
            output: Tensor = _Product.apply(  # type: ignore[no-untyped-call]
                input.to(dtype), weight, self.bias, pruned, self.decay, self.batch_invariant
            )
        return output if lowers else output.to(input.dtype)

    def _of_type(self, dtype: torch.dtype) -> _Pruned:
        last, weight = self._last, self.weight
        if last is not None and last.is_of(weight, dtype, self.method):
            return last
        made = _Pruned.of(weight, dtype, self.method)
        self._last = made if made.version is not None else None
        return made

    def __getstate__(self) -> dict[str, Any]:
        # A copy's weight counts its own versions.
        return {name: value for name, value in self.__dict__.items() if name != "_last"}

    def extra_repr(self) -> str:
        """The layer's sizes, and how it is pruned."""
        extra = f", decay={self.decay:g}" if self.decay else ""
        extra += ", batch_invariant=True" if self.batch_invariant else ""
        return f"{super().extra_repr()}, pattern={PATTERN}, method={self.method!r}{extra}"


def _check(in_features: int, out_features: int, method: str, decay: float) -> None:
    if isinstance(decay, bool) or not isinstance(decay, int | float):
        raise TypeError(f"SparseLinear: decay is {decay!r}; it must be a number")
    if not 0 <= decay < math.inf:
        raise ValueError(f"SparseLinear: decay is {decay}; it must be 0 or more, and finite")
    if method not in get_args(PruningMethod):
        raise ValueError(
            f"SparseLinear: method is {method!r}; it must be one of {', '.join(get_args(PruningMethod))}"
        )
    for name, size in (("in_features", in_features), ("out_features", out_features)):
        if size % GROUP and (name == "in_features" or method == "transposable"):
            why = " for method='transposable'" if name == "out_features" else ""
            raise ValueError(f"SparseLinear: {name} is {size}; it must be a multiple of {GROUP}{why}")


@dataclass(frozen=True, eq=False)
class _Pruned:
    """A pruned weight, and the dense weight that it is from.

    Attributes:
        weight, address, version, method: of the dense weight, and how it was pruned; the version is None if
            it is not known.
        forward: (N, K).
        backward: its transpose, (K, N), if that is 2:4 as well.
    """

    weight: Tensor
    address: int
    version: int | None
    method: str
    forward: SparseTensor
    backward: SparseTensor | None

    @classmethod
    def of(cls, weight: Tensor, dtype: torch.dtype, method: PruningMethod) -> _Pruned:
        """Prunes a weight."""
        w = weight.detach().to(dtype)
        backward = None
        if method == "transposable":
            mask = transposable_mask(w)
            forward, backward = sparsify_as(w, mask), sparsify_as(w.mT, mask.mT)
        else:
            forward = sparsify(w, method=method)
        version = _version(weight)
        return cls(weight, 0 if version is None else weight.data_ptr(), version, method, forward, backward)

    def is_of(self, weight: Tensor, dtype: torch.dtype, method: str) -> bool:
        """Whether this is the result of pruning a weight."""
        version = _version(weight)
        if self.weight is not weight or version is None:
            return False
        then = (self.address, self.version, self.method, self.forward.dtype, self.forward.device)
        return then == (weight.data_ptr(), version, method, dtype, weight.device)


def _version(weight: Tensor) -> int | None:
    """The number of writes to a weight; None for a weight without a counter, as in inference mode."""
    return None if weight.is_inference() or has_no_values(weight) else weight._version


def _without_autocast(device: torch.device) -> AbstractContextManager[Any]:
    """Inside, products of a device keep the types of their operands."""
    if autocast_dtype(device) is None:
        return nullcontext()
    return torch.autocast(device.type, enabled=False)


class _Product(torch.autograd.Function):
    """`x @ pruned.T + bias`; the gradient of the pruned weight is used as that of the dense weight."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, pruned: _Pruned, decay: float, batch_invariant: bool
    ) -> Tensor:  # fmt: skip
        ctx.pruned, ctx.decay, ctx.batch_invariant = pruned, decay, batch_invariant
        ctx.of_weight, ctx.of_bias = weight.dtype, None if bias is None else bias.dtype
        ctx.save_for_backward(x, weight if decay else None)
        bias = None if bias is None else bias.to(x.dtype)
        result: Tensor = linear(x, pruned.forward, bias, batch_invariant=batch_invariant)
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        # As in `forward`: autocast at this call does not affect the types of the products.
        with _without_autocast(grad.device):
            return _Product.gradients(ctx, grad)

    @staticmethod
    def gradients(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Of x, the weight and the bias, in the types that `forward` had."""
        x, weight = ctx.saved_tensors
        pruned, how = ctx.pruned, {"batch_invariant": ctx.batch_invariant}
        of_x = of_weight = of_bias = None
        if ctx.needs_input_grad[0]:
            other = pruned.backward
            of_x = (
                matmul(grad, pruned.forward.dense(), **how) if other is None else linear(grad, other, **how)
            )
        rows = grad.reshape(-1, grad.shape[-1])
        if ctx.needs_input_grad[1]:
            out_dtype = ctx.of_weight if ctx.of_weight in (*DTYPES, torch.float32) else torch.float32
            of_weight = matmul(rows.mT, x.reshape(-1, x.shape[-1]), out_dtype=out_dtype, **how)
            of_weight = of_weight.to(ctx.of_weight)
            if weight is not None:
                kept = pruned.forward.dense() != 0
                of_weight = torch.where(kept, of_weight, torch.add(of_weight, weight, alpha=ctx.decay))
        if ctx.needs_input_grad[2]:
            of_bias = rows.sum(0, dtype=torch.float32).to(ctx.of_bias)
        return of_x, of_weight, of_bias, None, None, None
