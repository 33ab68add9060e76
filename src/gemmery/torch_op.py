"""The operator that torch's own machinery sees: `torch.ops.gemmery.product`, and its backward pass.

A call is flattened into what an operator can take: tensors, sizes, numbers, and a text that says what they are
(`Described`). It is registered with `torch.library.Library`, which costs less a call than `custom_op`. Fake
implementations give shapes and types to torch.compile and export. Eager inference goes past all of this, see
`product.run`.

What is saved for the backward pass: the tensors, and, where the epilogue's vector-Jacobian product needs it, the bare
product in the operands' type, which the same kernel writes.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch._guards import detect_fake_mode
from torch.compiler import is_compiling

from . import backward, devices
from .epilogues.check import warn
from .epilogues.function import Held, hold, named
from .epilogues.identity import Captured
from .epilogues.results import returned
from .operands import DenseOperand, Operand, rebuild
from .problem import config_text
from .product.check import check, check_out, result_dtype
from .product.epilogue import outputs_of
from .product.run import inside
from .product.seen import check_forward_mode, in_transform, is_differentiated, wants_gradient
from .product.spec import Call, Options, OutTypes, unchanged

LIBRARY = torch.library.Library("gemmery", "DEF")
_ARGUMENTS = "Tensor[] tensors, SymInt[] sizes, Scalar[] numbers, str text, bool batch_invariant"
LIBRARY.define(f"product({_ARGUMENTS}, bool save) -> Tensor[]", tags=torch.Tag.pt2_compliant_tag)
LIBRARY.define(f"product_out({_ARGUMENTS}, Tensor(a!) out) -> ()", tags=torch.Tag.pt2_compliant_tag)
LIBRARY.define(
    f"product_backward({_ARGUMENTS}, Tensor? product, Tensor[] grads, int[] given, bool[] wanted) -> Tensor[]",
    tags=torch.Tag.pt2_compliant_tag,
)

# ---------------------------------------------------------------------------------------------------------------------
# A call as an operator's arguments, and back


@dataclass(frozen=True)
class Described:
    """What an operator's text says.

    Attributes:
        a, b: the operands, as `operands.rebuild` takes them, and how many of the tensors each has.
        kinds: a letter for each input: t(ensor), f(loat), i(nt), N(one), T(rue) or F(alse).
        biases: how many of the inputs are added first.
        epilogue: the name of the function; "" for none.
        is_compiled: whether it comes from compiled code, which has no tensors of the function's closure.
        scaled: whether alpha and beta are the first numbers; else they are 1.
        out_dtype: see `type_text`.
        precision, fast_accum, config: see `product.spec.Options`.
    """

    op: str
    a: str
    of_a: int
    b: str
    of_b: int
    kinds: str
    biases: int
    epilogue: str
    is_compiled: bool
    scaled: bool
    out_dtype: str
    precision: str
    fast_accum: bool
    config: str


def text_of(
    op: str, a: str, of_a: int, b: str, of_b: int, kinds: str, biases: int, epilogue: str, is_compiled: bool,
    scaled: bool, options: Options,
) -> str:  # fmt: skip
    """The text of a call; written so that torch.compile can trace it."""
    out_dtype, precision, fast_accum, _, config = options
    parts = [
        op, a, str(of_a), b, str(of_b), kinds, str(biases), epilogue, str(int(is_compiled)), str(int(scaled)),
        type_text(out_dtype), precision, str(int(fast_accum)), config_text(config) or "",
    ]  # fmt: skip
    return "|".join(parts)


@functools.lru_cache(4096)
def described(text: str) -> Described:
    """What a text says."""
    op, a, of_a, b, of_b, kinds, biases, epilogue, is_compiled, scaled, out_dtype, precision, fast, config = (
        text.split("|")
    )
    return Described(
        op, a, int(of_a), b, int(of_b), kinds, int(biases), epilogue, is_compiled == "1", scaled == "1", out_dtype,
        precision, fast == "1", config,
    )  # fmt: skip


def flatten(inputs: Sequence[Any]) -> tuple[list[Tensor], list[float], str]:
    """Tensors, numbers, and a letter for each input; see `Described`."""
    tensors, numbers, kinds = [], [], ""
    for value in inputs:
        if isinstance(value, Tensor):
            tensors.append(value)
            kinds += "t"
        elif value is None:
            kinds += "N"
        elif isinstance(value, bool):
            kinds += "T" if value else "F"
        elif isinstance(value, int | float):
            numbers.append(value)
            kinds += "i" if isinstance(value, int) else "f"
        else:
            raise TypeError(
                f"epilogue: an argument is a {type(value).__name__}; with gradients and under torch.compile, arguments "
                f"are tensors, numbers, True, False and None"
            )
    return tensors, numbers, kinds


def unflatten(tensors: Sequence[Tensor], numbers: Sequence[float], kinds: str) -> list[Any]:
    """What `flatten` was given."""
    left, counted = iter(tensors), iter(numbers)
    constants = {"N": None, "T": True, "F": False}
    values: list[Any] = []
    for kind in kinds:
        if kind == "t":
            values.append(next(left))
        elif kind in "fi":
            number = next(counted)
            values.append(float(number) if kind == "f" else int(number))
        else:
            values.append(constants[kind])
    return values


def type_text(out_dtype: OutTypes) -> str:
    """Types as an operator's argument."""
    types = out_dtype if isinstance(out_dtype, tuple) else (out_dtype,)
    names = ",".join(["" if x is None else str(x).removeprefix("torch.") for x in types])
    return names + ("," if isinstance(out_dtype, tuple) else "")


def type_of_text(text: str) -> OutTypes:
    """Types from an operator's argument."""
    types = tuple([getattr(torch, name) if name else None for name in text.split(",")])
    return types[:-1] if "," in text else types[0]


def call_of(
    tensors: Sequence[Tensor], sizes: Sequence[int], numbers: Sequence[Any], text: str, batch_invariant: bool
) -> Call:
    """The call that an operator was given."""
    d = described(text)
    a = rebuild(d.a, tensors[: d.of_a], ())
    b = rebuild(d.b, tensors[d.of_a : d.of_a + d.of_b], sizes)
    alpha, beta = numbers[:2] if d.scaled else (1, 1)
    inputs = tuple(unflatten(tensors[d.of_a + d.of_b :], numbers[2 if d.scaled else 0 :], d.kinds))
    options = Options(type_of_text(d.out_dtype), d.precision, d.fast_accum, batch_invariant, d.config or None)  # type: ignore[arg-type]
    captured = held_by(d).captured
    function = captured.rebuild(inputs[len(inputs) - captured.count :]) if d.epilogue else unchanged
    ready = not d.epilogue and a.is_dense and b.is_dense
    outer = tuple([x for x in (a.outer, b.outer) if x is not None])
    return Call(d.op, a, b, function, captured, inputs, d.biases, options, alpha, beta, ready, outer)


def held_by(d: Described) -> Any:
    """The function that an operator names as its epilogue.

    Raises:
        ValueError: it is from compiled code and has tensors that the compiler does not know of.
        RuntimeError: it is from compiled code, and a number of it has changed since.
    """
    if not d.epilogue:
        from .product.build import UNCHANGED

        return UNCHANGED
    held: Held = named(d.epilogue)
    if d.is_compiled:
        if held.captured.count:
            raise ValueError(
                "epilogue: under torch.compile its tensors have to come through args, not from its closure"
            )
        held.check_unchanged()
    return held


def arguments_of(call: Call, epilogue: str) -> tuple[list[Tensor], list[int], list[Any], str, bool]:
    """A call as an operator's arguments.

    Args:
        epilogue: the name of what is held of its function; "" for none.
    """
    tensors, numbers, kinds = flatten(call.inputs)
    scaled = not (call.alpha == 1 and call.beta == 1)
    a, b = call.a, call.b
    text = text_of(
        call.op, a.text, len(a.tensors), b.text, len(b.tensors), kinds, call.biases, epilogue, False, scaled,
        call.options,
    )  # fmt: skip
    given = [call.alpha, call.beta, *numbers] if scaled else numbers
    return [*a.tensors, *b.tensors, *tensors], b.sizes, given, text, call.options.batch_invariant


# ---------------------------------------------------------------------------------------------------------------------
# The operators


def _results(call: Call, name: str, save: bool, compute: Any) -> list[Tensor]:
    """A call's results, and with `save` what is saved of the product behind them: nothing where it is not needed.

    Args:
        compute: what computes a call: its results, and whether they are a tuple.
    """
    if not name:
        made, _ = compute(call)
        return [*made, call.a.matrix.new_empty(0)] if save else made
    saves = save and backward.needs_product(call)
    made, many = compute(replace(call, saves=saves))
    # For those who come from outside the compiler, and know the epilogue.
    named(name).many = many and not (saves and len(made) == 2 and not many)
    if len(made) == 1 + saves and many and is_compiling():
        raise ValueError("epilogue: under torch.compile, return the tensor itself, not a tuple of one")
    return made if saves or not save else [*made, call.a.matrix.new_empty(0)]


def _product(*arguments: Any) -> list[Tensor]:
    *flat, save = arguments
    call = call_of(*flat)
    name = described(flat[3]).epilogue
    return unalias(_results(call, name, save, inside), call.tensors)


def _product_out(*arguments: Any) -> None:
    *flat, out = arguments
    from .product.run import compute

    with torch.no_grad():
        compute(call_of(*flat), out)


def _product_fake(*arguments: Any) -> list[Tensor]:
    *flat, save = arguments
    call = call_of(*flat)
    check(call)
    like = call.a.matrix.new_empty(call.shape, dtype=call.summed)

    def fakes(call: Call) -> tuple[list[Tensor], bool]:
        # In a thread of its own torch dispatches as it does for users, whose functions may use torch.func.
        with ThreadPoolExecutor(1) as thread:
            made, many = thread.submit(_outputs_of, call, like).result()
        return [x.new_empty(x.shape) for x in made], many

    return _results(call, described(flat[3]).epilogue, save, fakes)


def _outputs_of(call: Call, product: Tensor) -> tuple[list[Tensor], bool]:
    with detect_fake_mode(product) or nullcontext(), torch.no_grad():
        return outputs_of(call, product, call.given)


def _product_out_fake(*arguments: Any) -> None:
    *flat, out = arguments
    call = call_of(*flat)
    check(call)
    check_out(call, out, (call.shape, result_dtype(call.op, call.dtype, call.options.out_dtype)))


def unalias(results: Sequence[Tensor], inputs: Sequence[Tensor]) -> list[Tensor]:
    """Results of which none shares memory with another or with an input, as operators have to return them."""
    taken = {x.untyped_storage().data_ptr() for x in inputs}
    kept = []
    for x in results:
        at = x.untyped_storage().data_ptr()
        kept.append(x.clone() if at in taken and x.numel() else x)
        taken.add(at)
    return kept


def _product_backward(*arguments: Any) -> list[Tensor]:
    *flat, product, grads, given, wanted = arguments
    call = call_of(*flat)
    found = backward.run(call, product, placed(grads, given), wanted)
    return unalias(found, [*call.tensors, *grads, *([] if product is None else [product])])


def _product_backward_fake(*arguments: Any) -> list[Tensor]:
    *flat, _, _, _, wanted = arguments
    call = call_of(*flat)
    tensors = [x for x in call.inputs if isinstance(x, Tensor)]
    return [
        call.a.matrix.new_empty(call.shape),
        *[
            torch.empty_like(x, memory_format=torch.contiguous_format)
            for x, w in zip(tensors, wanted, strict=True)
            if w
        ],
    ]


def placed(grads: Sequence[Tensor], given: Sequence[int]) -> list[Tensor | None]:
    """Gradients of all results, None for those that nothing depends on."""
    left = iter(grads)
    return [next(left) if there else None for there in given]


for _key in ("CPU", "CUDA"):
    LIBRARY.impl("product", _product, _key)
    LIBRARY.impl("product_out", _product_out, _key)
    LIBRARY.impl("product_backward", _product_backward, _key)
torch.library.register_fake("gemmery::product", _product_fake, lib=LIBRARY)
torch.library.register_fake("gemmery::product_out", _product_out_fake, lib=LIBRARY)
torch.library.register_fake("gemmery::product_backward", _product_backward_fake, lib=LIBRARY)


# ---------------------------------------------------------------------------------------------------------------------
# Gradients


class _Saved:
    """What a backward pass has of its call: everything but the tensors, which autograd keeps."""

    def __init__(self, call: Call, flat: Sequence[Any]) -> None:
        if not call.dtype.is_floating_point or call.dtype.itemsize == 1:
            raise TypeError(
                f"{call.op}: no gradient for {call.dtype} operands, but one of the arguments requires it"
            )
        self.sizes, self.numbers, self.text, self.batch_invariant = flat
        # Compiled kernels find the epilogue by its name as long as somebody holds it.
        name = described(self.text).epilogue
        self.epilogue = named(name) if name else None
        self.addends = [(x.shape, x.dtype) for x in call.inputs] if call.ready else []

    def call(self, tensors: Sequence[Tensor]) -> Call:
        """The call again."""
        return call_of(tensors, self.sizes, self.numbers, self.text, self.batch_invariant)


def _gradients_of(
    saved: _Saved, tensors: Sequence[Tensor], product: Tensor | None, grads: Sequence[Tensor | None],
    needs: Sequence[bool],
) -> list[Tensor | None]:  # fmt: skip
    """Gradients of a product's tensors.

    Args:
        product: what was saved of it, if anything was.
        grads: of its results, None for those that nothing depends on.
        needs: which of the tensors' are needed.
    """
    call, given = saved.call(tensors), [g for g in grads if g is not None]
    if not given:
        return [None] * len(tensors)
    of_a, of_b = len(call.a.tensors), len(call.b.tensors)
    wanted = list(needs[of_a + of_b :])
    if call.function is unchanged and not call.biases:
        of_product, of_inputs = given[0], []
    elif call.ready:
        of_product = given[0]
        of_inputs = [_of_addend(given[0], call, x) for x, w in zip(call.inputs, wanted, strict=True) if w]
    else:
        flat = (tensors, saved.sizes, saved.numbers, saved.text, saved.batch_invariant)
        places = [int(g is not None) for g in grads]
        of_product, *of_inputs = torch.ops.gemmery.product_backward(*flat, product, given, places, wanted)
    left = iter(of_inputs)
    of_others = [next(left) if w else None for w in wanted]
    a = call.a.matrix
    multiply = functools.partial(_multiply, call)
    found = call.b.gradients(a, of_product.to(a.dtype), multiply, (needs[0], needs[of_a : of_a + of_b]))
    return [found[0], *[None] * (of_a - 1), *found[1], *of_others]


def _of_addend(grad: Tensor, call: Call, addend: Tensor) -> Tensor:
    scaled = grad if call.beta == 1 else grad * call.beta
    return scaled.sum_to_size(addend.shape).to(addend.dtype)


def _multiply(call: Call, x: Tensor, y: Operand, addend: Tensor | None = None) -> Tensor:
    """A product of a backward pass, computed as the forward one is."""
    how = Options(None, call.options.precision, False, call.options.batch_invariant)
    return bare(x, y, how, "matmul", addend, call.alpha)


def bare(
    a: Tensor, b: Operand, options: Options, op: str = "matmul", addend: Tensor | None = None, alpha: Any = 1
) -> Tensor:
    """A product without an epilogue, as the operator, which torch.func's transforms differentiate too."""
    inputs = () if addend is None else (addend,)
    left = DenseOperand(a)
    tensors = [a, *b.tensors, *inputs]
    numbers = [] if alpha == 1 else [alpha, 1]
    text = text_of(
        op,
        left.text,
        1,
        b.text,
        len(b.tensors),
        "t" * len(inputs),
        len(inputs),
        "",
        False,
        bool(numbers),
        options,
    )
    flat = b.sizes, numbers, text, options.batch_invariant
    made: Tensor
    if in_transform():
        made = Product.apply(flat, *tensors)  # type: ignore[no-untyped-call]
    else:
        (made,) = torch.ops.gemmery.product(tensors, *flat, False)
    return made


def _save(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    tensors, *flat, save = inputs
    call = call_of(tensors, *flat)
    ctx.saved = _Saved(call, flat)
    if ctx.saved.epilogue is not None and not save:
        raise RuntimeError("gemmery.product: gradients are asked for, and nothing was saved for them")
    ctx.saves = save
    ctx.save_for_backward(*tensors, *([output[-1]] if save else []))
    if save:
        ctx.mark_non_differentiable(output[-1])
    ctx.set_materialize_grads(False)


def _gradients(ctx: Any, grads: list[Tensor | None]) -> tuple[Any, ...]:
    tensors, product = ctx.saved_tensors, None
    of_results = list(grads)
    if ctx.saves:
        *tensors, product = tensors
        of_results = of_results[:-1]
    needs = ctx.needs_input_grad[0]
    if not isinstance(needs, list | tuple):
        needs = [x.requires_grad for x in tensors]
    product = product if product is not None and product.dim() > 1 else None
    found = _gradients_of(ctx.saved, list(tensors), product, of_results, list(needs))
    # torch takes a list of numbers for one value, unless it is empty.
    return found, None if ctx.saved.sizes else [], None if ctx.saved.numbers else [], None, None, None


torch.library.register_autograd("gemmery::product", _gradients, setup_context=_save, lib=LIBRARY)


class Product(torch.autograd.Function):
    """A bare product as torch.func differentiates it: its gradients don't take what `register_autograd` makes."""

    @staticmethod
    def forward(flat: Any, *tensors: Tensor) -> Tensor:  # noqa: D102
        (made,) = torch.ops.gemmery.product(list(tensors), *flat, False)
        return made  # type: ignore[no-any-return]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:  # noqa: D102
        flat, *tensors = inputs
        ctx.saved = _Saved(call_of(tensors, *flat), flat)
        ctx.save_for_backward(*tensors)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # noqa: D102
        needs = ctx.needs_input_grad[1:]
        return None, *_gradients_of(ctx.saved, ctx.saved_tensors, None, [grad], needs)

    @staticmethod
    def vmap(info: Any, in_dims: Any, flat: Any, *tensors: Tensor) -> Any:  # noqa: D102
        mapped, flat = _mapped(info.batch_size, list(tensors), in_dims[1:], flat)
        made = Product.apply(flat, *mapped)  # type: ignore[no-untyped-call]
        return made, 0


# ---------------------------------------------------------------------------------------------------------------------
# Second derivatives


def _save_backward(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    tensors, *flat, _, grads, given, wanted = inputs
    ctx.saved = _Saved(call_of(tensors, *flat), flat)
    ctx.count, ctx.given, ctx.wanted = len(tensors), given, wanted
    ctx.save_for_backward(*tensors, *grads)
    ctx.set_materialize_grads(False)


def _gradients_backward(ctx: Any, of_results: list[Tensor | None]) -> tuple[Any, ...]:
    """Of what the backward pass was given, by torch, which runs that pass again on the product of a and b."""
    with torch.enable_grad():
        # Views: one of these tensors may have been computed from another, which must not count here.
        inputs = [x.view_as(x) for x in ctx.saved_tensors]
        results = _again(ctx, inputs[: ctx.count], inputs[ctx.count :])
    found = _derivatives(results, inputs, of_results)
    # torch takes a list of numbers for one value, unless it is empty.
    none: list[Any] = [None if x else [] for x in (ctx.saved.sizes, ctx.saved.numbers, ctx.given, ctx.wanted)]
    return found[: ctx.count], *none[:2], None, None, None, found[ctx.count :], *none[2:]


def _again(ctx: Any, tensors: Sequence[Tensor], grads: Sequence[Tensor]) -> list[Tensor]:
    call = ctx.saved.call(tensors)
    how = Options(None, call.options.precision, False, call.options.batch_invariant)
    if call.b.halves > 1:
        product = torch.cat([bare(call.a.matrix, DenseOperand(x), how) for x in call.b.tensors], dim=-1)
    else:
        product = bare(call.a.matrix, call.b, how)
    if call.biases:
        product = product + torch.cat(list(call.inputs[: call.biases]), dim=-1)
    return backward.by_torch(call, product, placed(grads, ctx.given), ctx.wanted)


def _derivatives(
    results: Sequence[Tensor], inputs: Sequence[Tensor], of_results: Sequence[Tensor | None]
) -> list[Tensor | None]:
    """Gradients of inputs from those of results; None where there is none."""
    asked = [i for i, x in enumerate(inputs) if x.requires_grad]
    pairs = [(y, g) for y, g in zip(results, of_results, strict=True) if g is not None and y.requires_grad]
    if not pairs or not asked:
        return [None] * len(inputs)
    found = torch.autograd.grad(
        [y for y, _ in pairs], [inputs[i] for i in asked], [g for _, g in pairs], allow_unused=True,
        create_graph=torch.is_grad_enabled(),
    )  # fmt: skip
    known = dict(zip(asked, found, strict=True))
    return [known.get(i) for i in range(len(inputs))]


torch.library.register_autograd(
    "gemmery::product_backward", _gradients_backward, setup_context=_save_backward, lib=LIBRARY
)


# ---------------------------------------------------------------------------------------------------------------------
# vmap: the dimension that it hides becomes the first of the product's batch


def _mapped(
    size: int, tensors: list[Tensor], dims: Sequence[int | None], flat: tuple[Any, ...]
) -> tuple[list[Tensor], tuple[Any, ...]]:
    from .operands.dense import leading

    call, d = call_of(tensors, *flat), described(flat[2])
    end = d.of_a + d.of_b
    dims_a, dims_b = dims[: d.of_a], dims[d.of_a : end]
    rank = max(
        x.matrix.dim() - any(dim is not None for dim in its)
        for x, its in ((call.a, dims_a), (call.b, dims_b))
    )
    is_mapped = any(dim is not None for dim in dims_b)
    b = call.b.mapped(dims_b, rank, size, is_mapped)
    # The product has the dimension in any case.
    a = call.a.mapped(dims_a, rank, size, everywhere=not is_mapped)
    others = [leading(x, dim, rank, size) for x, dim in zip(tensors[end:], dims[end:], strict=True)]
    # Now there is one dimension more than the user knows of, which only a general product takes.
    sizes, numbers, text, batch_invariant = flat
    return [*a.tensors, *b.tensors, *others], (
        sizes,
        numbers,
        f"matmul|{text.split('|', 1)[1]}",
        batch_invariant,
    )


def _vmap(info: Any, in_dims: Any, tensors: list[Tensor], *rest: Any) -> Any:
    *flat, save = rest
    mapped, again = _mapped(info.batch_size, tensors, in_dims[0], tuple(flat))
    results = torch.ops.gemmery.product(mapped, *again, save)
    return results, [0 if x.dim() > 1 else None for x in results]


torch.library.register_vmap("gemmery::product", _vmap, lib=LIBRARY)


# ---------------------------------------------------------------------------------------------------------------------
# The way in


def dispatched(call: Call, out: Tensor | None) -> Any:
    """A checked call that something in torch wants to see, outside the compiler."""
    tensors = call.tensors
    check_forward_mode(call.op, tensors)
    grad = wants_gradient(tensors)
    if out is not None:
        return _dispatched_out(call, out)
    if grad and not (call.a.is_differentiable and call.b.is_differentiable):
        raise TypeError(
            f"{call.op}: no gradient for {call.dtype} operands, but one of the arguments requires it"
        )
    if call.ready or (call.function is unchanged and not is_differentiated()):
        return _whole(call)
    if (grad and not _runs_again(call)) or is_differentiated():
        if call.device.type == "cpu" and call.captured.key is not None:
            warn(call)
        return unfused(call)
    held = hold(call.captured)
    results = torch.ops.gemmery.product(*arguments_of(call, held.name), grad)
    return returned(list(results)[: len(results) - grad], held.many)


def _runs_again(call: Call) -> bool:
    """Whether a gradient can run a call's function again: as it was, and in a kernel, which draws no random numbers."""
    return runs_again(call.captured, call.device)


def runs_again(captured: Captured, device: torch.device) -> bool:
    """Whether a gradient can run a function again: as it was, and in a kernel, which draws no random numbers."""
    return captured.key is not None and devices.current(device) is not None


def _whole(call: Call) -> Any:
    """A call without a function of the user's, as one operator."""
    a, b, inputs = call.a, call.b, list(call.inputs)
    vector_a, vector_b = a.matrix.dim() == 1, b.matrix.dim() == 1
    if vector_a or vector_b:
        # A vector a is one row, a vector b one column; the operator has matrices.
        if inputs:
            addend = inputs[0].expand(call.shape)
            addend = addend.unsqueeze(-1) if vector_b else addend
            inputs = [addend.unsqueeze(-2) if vector_a else addend]
        a = DenseOperand(a.matrix.unsqueeze(0)) if vector_a else a
        b = DenseOperand(b.matrix.unsqueeze(-1)) if vector_b else b
        call = replace(call, op="matmul", a=a, b=b, inputs=tuple(inputs))
    if in_transform() and call.ready:
        tensors, *flat = arguments_of(call, "")
        made = Product.apply(tuple(flat), *tensors)  # type: ignore[no-untyped-call]
    else:
        (made,) = torch.ops.gemmery.product(*arguments_of(call, ""), False)
    made = made.squeeze(-1) if vector_b else made
    return made.squeeze(-2 if not vector_b else -1) if vector_a else made


def unfused(call: Call) -> Any:
    """A product in two steps: the bare product, which is an operator, then the function, in torch.

    The function runs once, as the user wrote it, and its gradient is torch's. Gradients go this way where there is no
    kernel, where the function can't be run again as it was, and where torch.func differentiates.
    """
    b = call.b if call.b.halves == 1 else DenseOperand(call.b.in_torch())
    product = bare(call.a.matrix, b, call.options._replace(out_dtype=call.wide), call.op)
    if call.does_nothing:
        return product.to(call.options.out_dtype or call.b.default)  # type: ignore[arg-type]  # one, without a function
    # The operator has multiplied by the operands' scales.
    results, many = outputs_of(replace(call.opened(), outer=()), product)
    return returned(results, many)


def _dispatched_out(call: Call, out: Tensor) -> Tensor:
    if not call.ready:
        what = "a packed weight" if call.b.is_packed else "an epilogue"
        raise ValueError(
            f"{call.op}: out= with {what} does not support gradients, transforms, modes and subclasses of tensors; use "
            f"what is returned"
        )
    if wants_gradient((*call.tensors, out)):
        raise ValueError(
            f"{call.op}: out= does not support gradients, but one of the arguments requires them"
        )
    check_out(call, out, (call.shape, result_dtype(call.op, call.dtype, call.options.out_dtype)))
    torch.ops.gemmery.product_out(*arguments_of(call, ""), out)
    return out
