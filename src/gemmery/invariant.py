"""torch's own matrix products made batch-invariant within a context: `with gemmery.batch_invariant():`.

Two of torch's modes do it. They are a thread's own, go along with a backward pass to the threads that run it, and leave
no state outside. Every product, from any caller (`@`, einsum, C++ code, a backward pass), passes the dispatch mode,
below autograd, autocast, vmap and tensor subclasses, which see what they always see. The function mode only mends
`linear`, which torch computes in one step or two, as the strides of its input have it.
"""

from __future__ import annotations

import contextlib
import functools
import math
import re
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch._C import _len_torch_dispatch_stack
from torch.autograd import forward_ad
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from .product.compute import compute
from .product.run import checked, product
from .product.shape import result_shape
from .product.spec import NONE, Number, Options, scalars_of

_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_DEVICES = ("cuda", "cpu")
_LINEAR = torch.ops.aten.linear.default
#: The `__torch_dispatch__` of tensors that don't define one; they may still carry the flag of those that do.
_NO_WAY = torch._C._disabled_torch_dispatch_impl

#: Operators that multiply matrices by internal code, which other modes and gemmery do not see.
_OPAQUE = (
    "_sparse_semi_structured_linear", "_mixed_dtypes_linear", "_transformer_encoder_layer_fwd",
    "_native_multi_head_attention", "_cudnn_rnn", "miopen_rnn", "mkldnn_rnn_layer",
)  # fmt: skip
#: The names of torch's other matrix products: scaled, grouped, sparse, of packed weights, and new ones.
_PRODUCT = re.compile(r"(mm|mv|matmul|mkldnn_linear)(_|$)")
#: Products whose sums are exact.
_EXACT = ("_int_mm",)

_Handler = Callable[..., Any]


# ---------------------------------------------------------------------------------------------------------------------
# torch's operators in terms of gemmery's. A handler returns NotImplemented for calls that torch must compute.


def _product(
    op: str, a: Tensor, b: Tensor, addend: Tensor | None = None, alpha: Number = 1, beta: Number = 1,
    out: Tensor | None = None, out_dtype: torch.dtype | None = None,
) -> Any:  # fmt: skip
    """A product with batch-invariant rows; NotImplemented where it is torch's to compute."""
    if a.device.type not in _DEVICES:
        return NotImplemented
    for tensor in (a, b):
        if tensor.is_complex() or tensor.layout != torch.strided or tensor.is_nested:
            kind = "nested" if tensor.is_nested else "sparse" if not tensor.is_complex() else "complex"
            # Otherwise a product that is not invariant would go unnoticed.
            raise _refusal(f"a product of {kind} tensors")
    if a.dtype not in _FLOATS or a.dtype != b.dtype:
        # Sums of integers are exact, and torch rejects all other types.
        return NotImplemented
    if out is not None:
        shape = result_shape(op, a, b.t() if op == "linear" else b)
        if out.shape != shape:
            out.resize_(shape)
    options = Options(out_dtype, "ieee", False, True, None)
    # The function mode would look at every attribute that is read, and gradients are handled above.
    with torch._C.DisableTorchFunction(), torch.no_grad():
        if forward_ad._current_level >= 0 and not _len_torch_dispatch_stack():
            # torch computes the tangents, above this level.
            call = checked(op, a, b, addend, NONE, out, options, alpha, beta)
            return compute(call, out)[0][0]
        return product(op, a, b, addend, NONE, out, options, scalars_of(alpha, beta))


def _refusal(what: str) -> NotImplementedError:
    return NotImplementedError(
        f"batch_invariant: {what} has no batch-invariant form here; "
        "inside `with gemmery.batch_invariant(False):`, torch computes it as usual"
    )


def _mm(a: Tensor, b: Tensor, out_dtype: torch.dtype | None = None, *, out: Tensor | None = None) -> Any:
    return _product("matmul", a, b, out=out, out_dtype=out_dtype)


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, out: Tensor | None = None) -> Any:
    return _product("linear", x, weight, bias, out=out)


def _addmm(
    input: Tensor, a: Tensor, b: Tensor, out_dtype: torch.dtype | None = None,
    *, beta: Number = 1, alpha: Number = 1, out: Tensor | None = None,
) -> Any:  # fmt: skip
    return _product("matmul", a, b, input, alpha, beta, out, out_dtype)


def _addmm_in_place(input: Tensor, a: Tensor, b: Tensor, *, beta: Number = 1, alpha: Number = 1) -> Any:
    return _product("matmul", a, b, input, alpha, beta, input)


def _addmm_activation(
    input: Tensor, a: Tensor, b: Tensor,
    *, beta: Number = 1, alpha: Number = 1, use_gelu: bool = False, out: Tensor | None = None,
) -> Any:  # fmt: skip
    result = _product("matmul", a, b, input, alpha, beta, out)
    if result is not NotImplemented:
        result.copy_(F.gelu(result, approximate="tanh") if use_gelu else torch.relu(result))
    return result


def _side_by_side(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """The operands whose product is the sum of a batch of products."""
    return a.transpose(0, 1).flatten(1), b.flatten(0, 1)


def _addbmm(
    input: Tensor, a: Tensor, b: Tensor, *, beta: Number = 1, alpha: Number = 1, out: Tensor | None = None
) -> Any:
    return _product("matmul", *_side_by_side(a, b), input, alpha, beta, out)


def _addbmm_in_place(input: Tensor, a: Tensor, b: Tensor, *, beta: Number = 1, alpha: Number = 1) -> Any:
    return _product("matmul", *_side_by_side(a, b), input, alpha, beta, input)


#: gemmery's operators with a product.
_OWN = ("product", "product_out")


def _own(operator: Any) -> _Handler:
    """One of gemmery's own operators, with its argument `batch_invariant` set."""
    place = [argument.name for argument in operator._schema.arguments].index("batch_invariant")

    def asked(*arguments: Any, **more: Any) -> Any:
        return operator(*arguments[:place], True, *arguments[place + 1 :], **more)

    return asked


def _refuse(name: str, *arguments: Any, **more: Any) -> Any:
    raise _refusal(f"torch.ops.aten.{name}")


@functools.cache
def _handlers() -> dict[Any, _Handler]:
    """The replacement of each of torch's operators, by overload."""
    aten = torch.ops.aten
    products: dict[Any, _Handler] = {
        aten.mm: _mm, aten.bmm: _mm, aten.matmul: _mm, aten.mv: _mm, aten.dot: _mm, aten.vdot: _mm,
        aten.linear: _linear, aten.addmm: _addmm, aten.baddbmm: _addmm, aten.addmv: _addmm, aten.addbmm: _addbmm,
        aten.addmm_: _addmm_in_place, aten.baddbmm_: _addmm_in_place, aten.addmv_: _addmm_in_place,
        aten.addbmm_: _addbmm_in_place, aten._addmm_activation: _addmm_activation,
    }  # fmt: skip
    # Some of them are newer than the oldest torch.
    products |= {
        getattr(aten, name): functools.partial(_refuse, name) for name in _OPAQUE if hasattr(aten, name)
    }
    handlers = {
        getattr(packet, overload): handler
        for packet, handler in products.items()
        for overload in packet.overloads()
    }
    # All of these are defined by then.
    from .product import run  # noqa: F401

    own = [getattr(torch.ops.gemmery, name).default for name in _OWN]
    return handlers | {operator: _own(operator) for operator in own}


@functools.cache
def _is_composite(func: Any) -> bool:
    """Whether an operator is nothing but others. Only under inference_mode, such an operator is not decomposed before
    it gets here.
    """
    if not isinstance(func, torch._ops.OpOverload):
        return False
    kernels = ("CompositeImplicitAutograd", "CUDA", "CPU")
    found = [torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), key) for key in kernels]
    return found == [True, False, False]


@functools.cache
def _handler(func: Any) -> _Handler | None:
    """Returns the replacement of an operator; None for an operator that is not a product, and for exact products."""
    known = _handlers().get(func)
    if known is not None or not isinstance(func, torch._ops.OpOverload) or func.namespace != "aten":
        return known
    if _is_composite(func):
        return None
    name = func._opname
    return functools.partial(_refuse, name) if _PRODUCT.search(name) and name not in _EXACT else None


# ---------------------------------------------------------------------------------------------------------------------
# The modes


@functools.cache
def _stand_ins() -> tuple[type, ...]:
    """The types of tensors with which torch traces, and which have no data."""
    from torch._subclasses.fake_tensor import FakeTensor
    from torch._subclasses.functional_tensor import FunctionalTensor

    return FakeTensor, FunctionalTensor


def _handled(handler: _Handler, func: Any, args: Any, kwargs: Any) -> Any:
    """Runs a handler; raises torch's error for arguments that torch rejects."""
    try:
        return handler(*args, **kwargs)
    except (ValueError, TypeError):
        args, kwargs = pytree.tree_map_only(Tensor, lambda x: x.to("meta"), (args, kwargs))
        func(*args, **kwargs)
        raise


class _Products(TorchDispatchMode):
    """Makes gemmery compute torch's products."""

    #: Attention as a higher-order operator goes by, as other attention does.
    supports_higher_order_operators = True
    enabled = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        ways = [kind for kind in types if kind.__torch_dispatch__ is not _NO_WAY]
        if self.enabled and not any(issubclass(kind, _stand_ins()) for kind in ways):
            if ways:
                # A subclass takes itself apart, and comes back with plain tensors.
                return NotImplemented
            handler = _handler(func)
            result = NotImplemented if handler is None else _handled(handler, func, args, kwargs)
            if result is not NotImplemented:
                return result
            if handler is None and _is_composite(func):
                with self:
                    return func.decompose(*args, **kwargs)
        return func(*args, **kwargs)


class _Linears(TorchFunctionMode):
    """Makes linear layers add their bias before rounding, for any strides of their input."""

    def __init__(self, products: _Products) -> None:
        super().__init__()
        self._products = products

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        # `types` are those of tensors with their own dispatch.
        if self._products.enabled and not types and (func is F.linear or func is _LINEAR):
            return _one_step(*args, **kwargs)
        return func(*args, **kwargs)


def _one_step(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """torch's linear, with a bias always as one addmm.

    torch itself takes a product and a sum, each rounded, where the input is not contiguous. A batch of one often is
    when a larger one is not.
    """
    if bias is None or input.dim() == 2 or weight.dim() != 2:
        return F.linear(input, weight, bias)
    *lead, k = input.shape
    rows = input.reshape(math.prod(lead), k)
    return torch.addmm(bias, rows, weight.t()).reshape(*lead, weight.shape[0])


# ---------------------------------------------------------------------------------------------------------------------
# The context


class _Uncompiled:
    """Makes functions under torch.compile run uncompiled while any thread is inside the context.

    Compiled code has products that no mode sees. torch would run such functions uncompiled as well, but also after the
    mode.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._inside = 0
        self._stance: Any = None

    def __enter__(self) -> None:
        with self._lock:
            if not self._inside:
                try:
                    self._stance = torch.compiler.set_stance("force_eager")
                except RuntimeError as error:
                    raise RuntimeError(_COMPILED) from error
            self._inside += 1

    def __exit__(self, *exception: object) -> None:
        with self._lock:
            self._inside -= 1
            if not self._inside:
                self._stance.__exit__(*exception)


_COMPILED = (
    "gemmery.batch_invariant() can't be entered by a function under torch.compile: enter it around the call, which "
    "then runs uncompiled, or call gemmery's functions with batch_invariant=True, which compile"
)
_uncompiled = _Uncompiled()
_thread = threading.local()


@contextlib.contextmanager
def batch_invariant(enabled: bool = True) -> Iterator[None]:
    """A context in which torch's own matrix products are batch-invariant, as gemmery's with `batch_invariant=True`.

    Inside the context, gemmery computes `torch.mm`, `addmm`, `bmm`, `baddbmm`, `matmul` (`@`), `mv`, `dot`,
    `nn.functional.linear` and functions that decompose into them (`nn.Linear`, `einsum`, ...). A row of the result has
    the same bits for any number of rows and of matrices, any other rows, and any memory layout of the operands. fp32 is
    IEEE, regardless of torch's `allow_tf32`. gemmery's own functions are batch-invariant inside the context as well.

    The context applies to the current thread, and to a backward pass that is started inside it. A CUDA graph that is
    captured inside keeps the guarantee. Functions under torch.compile run uncompiled as long as any thread is inside.

    All other operations remain torch's: convolutions, fused attention, norms, other reductions. Products for which
    gemmery has no invariant form (complex, sparse, nested, scaled fp8, grouped, cuDNN's RNNs) raise a
    NotImplementedError. Products of integers are exact, and remain torch's.

    Args:
        enabled: False suspends an outer context, for operations that it does not support or that need not be invariant.

    Raises:
        RuntimeError: a function under torch.compile enters the context.

    Example:
        >>> import torch, gemmery
        >>> x, layer = torch.randn(8, 32), torch.nn.Linear(32, 16)
        >>> with gemmery.batch_invariant(), torch.no_grad():
        ...     together, alone = layer(x), layer(x[3:4])
        >>> torch.equal(together[3:4], alone)
        True
    """
    if torch.compiler.is_compiling():
        raise RuntimeError(_COMPILED)
    outer: _Products | None = getattr(_thread, "products", None)
    if outer is not None:
        before, outer.enabled = outer.enabled, enabled
        try:
            yield
        finally:
            outer.enabled = before
    elif not enabled:
        yield
    else:
        products = _Products()  # type: ignore[no-untyped-call]
        with _uncompiled, _Linears(products), products:
            _thread.products = products
            try:
                yield
            finally:
                _thread.products = None
