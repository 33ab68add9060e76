"""From a graph of aten operators to a device function in Triton, as text and compiled.

A value is a block (ROWS, COLS), a row (1, COLS), a column (ROWS, 1) or a number. If the function halves the last
dimension, COLS are columns of a half, and a value of whole width is two blocks, its halves, both of which are in the
tile.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
from torch import fx

from ..documentation import page
from ..dtypes import accumulator
from .device_function import device_name
from .record import Untraceable
from .table import (
    ARITHMETIC,
    BOOLEAN,
    CONSTANTS,
    FLOATING,
    LOGICAL,
    OF_BOOLS,
    OF_INTEGERS,
    QUOTIENTS,
    REDUCTIONS,
    TYPES,
    VIEWS,
)
from .trace import Argument, Number, Shape, Sizes


@dataclass(frozen=True)
class Value:
    """The value of a graph's node in the kernel.

    Attributes:
        names: of its variables: two for a value twice as wide as the output, else one.
        dtype: as torch has it; in the kernel, floating point is in the type that epilogues compute in.
        rows, wide: whether it differs from row to row, and from column to column.
        reduced: how its rows are put together from those of all blocks, where it is the result of a reduction.
    """

    names: tuple[str, ...]
    dtype: torch.dtype
    rows: bool = False
    wide: bool = False
    reduced: Reduction | None = None


@dataclass(frozen=True)
class Reduction:
    """A row reduction: the partial reductions of the blocks, and how they are combined.

    Attributes:
        kind: of `table.REDUCTIONS`.
        columns: how many columns of the product's there are in a row, as "N", "N/2" or "2N".
        parts: the variables, each (ROWS,), that a block leaves, with the value that changes nothing.
        shape: of the row in the stand-ins' sizes, without the dimension that was reduced.
        casts: the types that the row is brought to in turn, of which the first is torch's of such a reduction.
    """

    kind: str
    columns: str
    parts: tuple[tuple[str, float], ...]
    shape: tuple[int, ...]
    casts: tuple[torch.dtype, ...]
    keepdim: bool = False


@dataclass(frozen=True)
class Output:
    """One of the function's results.

    Attributes:
        dtype: as the function leaves it.
        columns: of the output, as "N", "N/2" or "2N"; "" for a reduced row.
        reduced: for such a row, how its parts are combined.
        kept: of a result that is less than the product's matrices or rows, such as one of an argument alone, for each
            dimension whether it is the product's, where it else is 1; it lacks the others, which come first. None for
            all. The kernel makes a matrix or rows of it, of which the first are kept.
        matrix: whether it is stored as matrices are, in the product's type; not a row, though it has one column.
        places: which of the epilogue's tensors it is, or its parts are; () for what the kernel stores itself.
        same: the number of an output before it that holds the same, if one does.
    """

    dtype: torch.dtype
    columns: str
    reduced: Reduction | None = None
    places: tuple[int, ...] = ()
    same: int | None = None
    kept: tuple[bool, ...] | None = None
    matrix: bool = True


@dataclass(frozen=True)
class Program:
    """An epilogue as a device function.

    Attributes:
        source: its text.
        paired: whether the product's columns come in halves; see `problem.Fusion`.
        inputs: which of the arguments after the product it reads, in the order of its tensors.
        numbers: which of them are the numbers that it takes, in their order.
        outputs: the values that it returns, in the function's order.
        tensors: how many tensors it takes: the inputs, then what it writes.
        ahead: the same in two texts, of a function that loads a block of the one matrix that it reads, and of the rest,
            whose arguments are (args, block); None if it reads none, several, or one of wide elements: two blocks of
            more do not fit into the registers beside the accumulator.
        both: the text of a function that returns the block of the one other matrix that it writes behind its own,
            instead of storing it; None if it writes none or several, or reads one.
        place: which of the tensors is the matrix that `ahead` loads or `both` returns; None without either.
        whole: whether it needs tiles as wide as the product, since it uses reduced rows again.
        many: whether the function returns a tuple.
    """

    source: str
    paired: bool
    inputs: tuple[int, ...]
    numbers: tuple[int, ...]
    outputs: tuple[Output, ...]
    tensors: int
    ahead: tuple[str, str] | None
    both: str | None
    place: int | None
    whole: bool
    many: bool

    @property
    def main(self) -> int | None:
        """The output that the kernel stores itself; None if the epilogue stores all."""
        found = (
            i for i, x in enumerate(self.outputs) if x.reduced is None and not x.places and x.same is None
        )
        return next(found, None)


# ---------------------------------------------------------------------------------------------------------------------
# Lowering


#: Columns of the widest product that one tile can cover.
WHOLE = 256
#: Keyword arguments that are read, of operators with a method.
_KEYWORDS = {
    "gelu": {"approximate"}, "clamp": {"min", "max"}, "rsub": {"alpha"}, "div": {"rounding_mode"},
    "_to_copy": {"dtype", "layout", "device", "pin_memory", "non_blocking", "memory_format"},
    "slice": {"dim", "start", "end", "step"}, "split": {"dim"}, "split_with_sizes": {"dim"}, "cat": {"dim"},
}  # fmt: skip


@dataclass
class _Lowering:
    """The state of lowering one graph."""

    arguments: Sequence[Argument]
    sizes: Sizes
    compute: torch.dtype
    paired: bool
    name: str
    role: str
    narrow: bool
    lines: list[str] = field(default_factory=list)
    values: dict[fx.Node, Any] = field(default_factory=dict)
    inputs: list[int] = field(default_factory=list)
    numbers: list[int] = field(default_factory=list)
    loads: list[tuple[int, int, torch.dtype, int]] = field(default_factory=list)  # line, halves, type, tensor
    count: int = 0
    #: Reduced rows that are used again, complete in a tile as wide as the product.
    complete: dict[fx.Node, Value] = field(default_factory=dict)

    # Variables

    def emit(self, expression: str) -> str:
        name = f"v{self.count}"
        self.count += 1
        self.lines.append(f"{name} = {expression}")
        return name

    def fail(self, node: fx.Node, what: str) -> Untraceable:
        where = f" ({node.meta['where']})" if "where" in node.meta else ""
        guide = page("epilogues", "what-can-be-traced")
        return Untraceable(f'the {self.role} {self.name} {what}{where}; see "What can be traced" in {guide}')

    @property
    def _width(self) -> int:
        """Columns of the output, in the sizes that the function is traced with."""
        return self.sizes.N // 2 if self.paired else self.sizes.N

    def form(self, node: fx.Node, shape: Sequence[int]) -> tuple[bool, bool, int]:
        """Whether a shape has rows and columns, and its width divided by the output's."""
        if tuple(shape) == self._product()[:-1]:
            # A row's number without a dimension for columns; torch combines it only with others of its kind.
            return True, False, 1
        dims = [*list(shape)[::-1], 1, 1]
        expected = (self.sizes.M, *self.sizes.batch[::-1])
        for size, full in zip(dims[1:], (*expected, *[1] * len(dims)), strict=False):
            if size not in (1, full):
                raise self.fail(
                    node, f"makes a tensor of {tuple(shape)} where the product is {self._product()}"
                )
        if dims[0] not in (1, self._width, 2 * self._width):
            raise self.fail(node, f"makes a tensor of {tuple(shape)} where the product is {self._product()}")
        return dims[1] != 1, dims[0] != 1, max(dims[0] // self._width, 1)

    def _product(self) -> tuple[int, ...]:
        return (*self.sizes.batch, self.sizes.M, self.sizes.N)

    # Inputs

    def placeholder(self, node: fx.Node, position: int) -> Value:
        given = self.arguments[position]
        if isinstance(given, Number):
            self.numbers.append(position)
            if given.integer:
                return Value((self.emit(f"whole(n{position})"),), torch.int64)
            return Value((self.emit(f"scalar(n{position}, {TYPES[self.compute]})"),), torch.float64)
        rows, wide, times = self.form(node, node.meta["val"].shape)
        if position == 0:
            if times == 1:
                return Value(("acc",), given.dtype, True, True)
            self.lines.append("left, right = column_halves(acc)")
            return Value(("left", "right"), given.dtype, True, True)
        if given.dtype not in TYPES:
            raise self.fail(node, f"takes a tensor of {given.dtype}, which no kernel reads")
        self.inputs.append(position)
        x = f"x{position}, s{position}"
        if wide and rows:
            self.loads.append((len(self.lines), times, given.dtype, len(self.inputs) - 1))
            loads = [
                f"load_block({x}, {h}, shape, sizes, batch, row, col, ROWS, COLS, WIDE)" for h in range(times)
            ]
        elif wide:
            loads = [f"load_row({x}, {half}, shape, sizes, batch, col, COLS)" for half in range(times)]
        elif rows:
            loads = [f"load_column({x}, shape, sizes, batch, row, ROWS)"]
        else:
            loads = [f"load_single({x}, sizes, batch)"]
        if wide and rows:
            loads = [self.emit(load) for load in loads]
        names = tuple(self.emit(self._computed(load, given.dtype)) for load in loads)
        return Value(names, given.dtype, rows, wide)

    def _computed(self, expression: str, dtype: torch.dtype) -> str:
        """A loaded value in the type that is computed in."""
        return f"as_type({expression}, {TYPES[self.compute]})" if dtype.is_floating_point else expression

    # Values in a type

    def inside(self, dtype: torch.dtype) -> str:
        """Triton's name of the type in which the kernel has a value of torch's `dtype`."""
        return TYPES[self.compute if dtype.is_floating_point else dtype]

    def rounded(self, expression: str, dtype: torch.dtype) -> str:
        """A value as torch would round it to its type."""
        if dtype in (self.compute, torch.float64) or not dtype.is_floating_point:
            return expression
        return f"as_type(as_type({expression}, {TYPES[dtype]}), {TYPES[self.compute]})"

    def constant(self, number: Any, kind: torch.dtype | None = None) -> str:
        """A Python number, in a type if there is one; integers wrap, as in torch."""
        if kind is not None and not kind.is_floating_point:
            return f"tl.full((), {_wrapped(number, kind)}, {TYPES[kind]})"
        if kind is not None:
            number = float(number)
            if kind != torch.float64 and self.compute == torch.float64:
                # With narrower tensors, torch has numbers in single precision.
                number = torch.tensor(number, dtype=torch.float32).item()
        if isinstance(number, float) and not math.isfinite(number):
            return f'float("{number}")'
        return repr(number)

    # Nodes

    def lower(self, node: fx.Node) -> Any:
        import operator

        if node.target is operator.getitem:
            return self.values[node.args[0]][node.args[1]]  # type: ignore[index]
        name = str(node.target).split(".")
        space, operator_name = name[0], name[1] if len(name) > 1 else name[0]
        if space == "gemmery" and operator_name == "uniform":
            return self._uniform(node)
        if space == "gemmery" and operator_name == "device":
            return self._device(node)
        if space != "aten":
            raise self.fail(node, f"uses {node.target}")
        self._check_results(node)
        if operator_name in REDUCTIONS:
            return self._reduction(node, operator_name)
        given = [self.values[x] for x in node.all_input_nodes]
        reduced = [x for x in given if isinstance(x, Value) and x.reduced is not None]
        if reduced and operator_name not in (*VIEWS, "_to_copy"):
            self._complete(node)
        special = {
            "gelu": self._gelu, "silu": self._silu, "softplus": self._softplus, "div": self._div,
            "where": self._where, "clamp": self._clamp, "pow": self._pow, "square": self._square,
            "rsub": self._rsub, "_to_copy": self._cast, "split_with_sizes": self._split, "split": self._split,
            "slice": self._slice, "cat": self._cat, "bitwise_not": self._not,
        }  # fmt: skip
        if operator_name in special:
            if unread := set(node.kwargs) - _KEYWORDS.get(operator_name, set()):
                raise self.fail(node, f"uses {node.target} with {', '.join(sorted(unread))}")
            return special[operator_name](node)
        own = OF_BOOLS if node.meta["val"].dtype == torch.bool else OF_INTEGERS
        if operator_name in own:
            return self._elementwise(node, own[operator_name], own)
        for table in (ARITHMETIC, FLOATING, LOGICAL, BOOLEAN):
            if operator_name in table:
                return self._elementwise(node, table[operator_name], table)
        if operator_name in CONSTANTS:
            return self._constant(node, operator_name)
        if operator_name in VIEWS:
            return self._view(node)
        raise self.fail(node, f"uses {node.target}")

    def _check_results(self, node: fx.Node) -> None:
        """Raises Untraceable for an unknown operator with several results, or one with a result of an unknown type."""
        if "val" not in node.meta:
            if not str(node.target).startswith("aten.split"):
                raise self.fail(node, f"uses {node.target}")
        elif node.meta["val"].dtype not in TYPES:
            raise self.fail(
                node, f"makes a tensor of {node.meta['val'].dtype}, which no kernel computes with"
            )

    def _apply(
        self, node: fx.Node, template: str, inputs: Sequence[Any], kind: torch.dtype | None = None
    ) -> Value:
        """An elementwise template, applied to values and constants.

        Args:
            kind: the type that the inputs are brought to; None leaves them.
        """
        result = node.meta["val"]
        rows, wide, _ = self.form(node, result.shape)
        times = max([len(x.names) for x in inputs if isinstance(x, Value)] or [1])
        # The interpreter loses the type of a scalar's comparison if it is combined with that of a block.
        single = result.dtype == torch.bool and not any(
            isinstance(x, Value) and (x.rows or x.wide) for x in inputs
        )
        names = []
        for half in range(times):
            texts = []
            for x in inputs:
                if not isinstance(x, Value):
                    text = self.constant(x, kind)
                    if kind is not None and kind.is_floating_point and "{0}, {1}" in template:
                        # Functions may check the types of their arguments.
                        text = f"tl.full((), {text}, {self.inside(kind)})"
                    texts.append(text)
                    continue
                text = x.names[half] if len(x.names) > 1 else x.names[0]
                if single:
                    text = f"tl.broadcast_to({text}, (1, 1))"
                texts.append(text if kind is None else self.converted(text, x.dtype, kind))
            expression = template.format(*[f"({text})" if " " in text else text for text in texts])
            names.append(self.emit(self.rounded(f"({expression})", result.dtype)))
        return Value(tuple(names), result.dtype, rows, wide)

    def converted(self, text: str, dtype: torch.dtype, kind: torch.dtype) -> str:
        """A value of one type in another, as torch converts combined operands."""
        if self.inside(dtype) == self.inside(kind):
            return text
        if kind == torch.bool:
            return f"truth({text})"
        made = f"{text}.to({self.inside(kind)})"
        # Floating-point numbers are rounded where they are made; an integer is here.
        is_whole = dtype != torch.bool and not dtype.is_floating_point
        return self.rounded(made, kind) if is_whole else made

    def shape_of(self, node: Any) -> tuple[int, ...]:
        """The shape of a node's tensor."""
        return tuple(node.meta["val"].shape)

    def _inputs(self, node: fx.Node) -> list[Any]:
        values = self.values if _only_seen(node) else self.values | self.complete
        return [values[x] if isinstance(x, fx.Node) else x for x in node.args]

    def _common(self, node: fx.Node) -> torch.dtype:
        """The type in which an operator's inputs are compared."""
        given: list[Any] = [x.meta["val"].meta if isinstance(x, fx.Node) else x for x in node.args]
        return torch.result_type(*given) if len(given) == 2 else given[0].dtype

    def _compare(self, node: fx.Node, template: str) -> Value:
        inputs, kind = self._inputs(node), self._common(node)
        if not kind.is_floating_point:
            # No integer is infinite or NaN.
            return self._apply(node, "{0} != {0}" if len(inputs) == 1 else template, inputs, kind)
        # One operand may need rounding to the other's type: a tensor's type takes precedence over a number's.
        for i, x in enumerate(inputs):
            if not isinstance(x, Value):
                inputs[i] = torch.tensor(x, dtype=kind).item()
            elif x.dtype != kind:
                inputs[i] = self._in_type(x, kind)
        return self._apply(node, template, inputs, kind)

    def _in_type(self, x: Value, kind: torch.dtype) -> Value:
        """A value in another floating-point type, rounded to it."""
        names = [self.rounded(self.converted(name, x.dtype, kind), kind) for name in x.names]
        return replace(x, names=tuple([self.emit(name) for name in names]), dtype=kind)

    def _elementwise(self, node: fx.Node, template: str, table: dict[str, str]) -> Value:
        inputs = self._inputs(node)
        arguments = template.count("{1}") > 0
        inputs, rest = (inputs[:2], inputs[2:]) if arguments else (inputs[:1], inputs[1:])
        if any(x is not None for x in rest) or {k for k in node.kwargs if k != "alpha"}:
            raise self.fail(node, f"uses {node.target} with {[*rest, *node.kwargs]}")
        if table is LOGICAL:
            return self._compare(node, template)
        dtype = node.meta["val"].dtype
        alpha = node.kwargs.get("alpha", 1)
        if alpha != 1:
            times = "&" if dtype == torch.bool else "*"
            template = template.replace("{1}", f"({self.constant(alpha, dtype)} {times} {{1}})")
        if table is FLOATING and not dtype.is_floating_point:
            return replace(self._apply(node, "{0}", inputs[:1]), dtype=dtype)  # rounding an integer
        return self._apply(node, template, inputs, torch.bool if table is BOOLEAN else dtype)

    def _not(self, node: fx.Node) -> Value:
        x, dtype = self._inputs(node)[0], node.meta["val"].dtype
        if dtype == torch.bool:
            return self._apply(node, BOOLEAN["bitwise_not"], [x], dtype)
        return self._apply(node, OF_INTEGERS["bitwise_xor"], [x, -1], dtype)

    def _div(self, node: fx.Node) -> Value:
        mode = node.kwargs.get("rounding_mode")
        template = FLOATING["div"] if mode is None else QUOTIENTS[str(mode)]
        return self._apply(node, template, self._inputs(node), node.meta["val"].dtype)

    def _where(self, node: fx.Node) -> Value:
        condition, *others = self._inputs(node)
        kind = node.meta["val"].dtype
        # The condition keeps its type.
        chosen = [self._of_kind(x, kind) for x in others]
        return self._apply(node, "tl.where({0}, {1}, {2})", [condition, *chosen])

    def _of_kind(self, x: Value, kind: torch.dtype) -> Value:
        """A value in another type, before it is combined."""
        if self.inside(x.dtype) == self.inside(kind):
            return x
        names = tuple(self.emit(self.converted(name, x.dtype, kind)) for name in x.names)
        return replace(x, names=names, dtype=kind)

    def _clamp(self, node: fx.Node) -> Value:
        x, *bounds = self._inputs(node)
        low, high = [*bounds, None, None][:2]
        low, high = node.kwargs.get("min", low), node.kwargs.get("max", high)
        kind = node.meta["val"].dtype
        value = self._apply(node, "maximum({0}, {1})", [x, low], kind) if low is not None else x
        return self._apply(node, "minimum({0}, {1})", [value, high], kind) if high is not None else value

    def _pow(self, node: fx.Node) -> Value:
        x, exponent = self._inputs(node)
        templates = {
            0: "tl.full({0}.shape, 1, {0}.dtype)", 1: "{0}", 2: "{0} * {0}", 3: "{0} * {0} * {0}",
            4: "({0} * {0}) * ({0} * {0})", -1: "1.0 / {0}", -2: "1.0 / ({0} * {0})", -3: "1.0 / ({0} * {0} * {0})",
            -4: "1.0 / (({0} * {0}) * ({0} * {0}))", 0.5: "tl.sqrt({0})", -0.5: "tl.rsqrt({0})",
        }  # fmt: skip
        if isinstance(exponent, Value) or not isinstance(x, Value) or exponent not in templates:
            given = "that is not a constant" if isinstance(exponent, Value) else f"of {exponent}"
            raise self.fail(node, f"uses {node.target} with an exponent {given}")
        return self._apply(node, templates[exponent], [x], node.meta["val"].dtype)

    def _gelu(self, node: fx.Node) -> Value:
        kind = "gelu_tanh" if node.kwargs.get("approximate", "none") == "tanh" else "gelu"
        return self._apply(node, f"{kind}({{0}})", self._inputs(node)[:1], node.meta["val"].dtype)

    def _silu(self, node: fx.Node) -> Value:
        # If the sigmoid is needed for something else, as in gradients, it is not computed twice.
        beside = any(str(user.target).startswith("aten.sigmoid.") for user in node.all_input_nodes[0].users)
        template = "{0} * sigmoid({0})" if beside else "silu({0})"
        return self._apply(node, template, self._inputs(node), node.meta["val"].dtype)

    def _softplus(self, node: fx.Node) -> Value:
        x, beta, threshold = (self._inputs(node) + [1, 20][len(node.args) - 1 :])[:3]
        value = "softplus({0})"
        if beta != 1 or threshold < 16 or self.compute == torch.float64:
            b, most = self.constant(float(beta)), self.constant(float(threshold))
            value = f"tl.where({{0}} * {b} > {most}, {{0}}, softplus({{0}} * {b}) / {b})"
        # Else, beyond the threshold, the sum is x in single precision.
        return self._apply(node, value, [x], node.meta["val"].dtype)

    def _square(self, node: fx.Node) -> Value:
        return self._apply(node, "{0} * {0}", self._inputs(node), node.meta["val"].dtype)

    def _rsub(self, node: fx.Node) -> Value:
        x, y, *alpha = self._inputs(node)
        factor = node.kwargs.get("alpha", alpha[0] if alpha else 1)
        kind = node.meta["val"].dtype
        template = "{1} - {0}" if factor == 1 else f"{{1}} - {self.constant(factor, kind)} * {{0}}"
        return self._apply(node, template, [x, y], kind)

    def _cast(self, node: fx.Node) -> Value:
        x: Value = self._inputs(node)[0]
        dtype = node.meta["val"].dtype
        if x.reduced is not None:
            return replace(x, dtype=dtype, reduced=replace(x.reduced, casts=(*x.reduced.casts, dtype)))
        names = tuple(self.emit(self._cast_to(name, x.dtype, dtype)) for name in x.names)
        return replace(x, names=names, dtype=dtype)

    def _cast_to(self, text: str, dtype: torch.dtype, kind: torch.dtype) -> str:
        """A value of one type as torch's `to` makes it another."""
        if not kind.is_floating_point and kind != torch.bool:
            return f"as_type({text}, {TYPES[kind]})"
        return self.rounded(self.converted(text, dtype, kind), kind)

    # Shapes

    def _view(self, node: fx.Node) -> Value:
        x: Value = self._inputs(node)[0]
        shape = node.meta["val"].shape
        if x.reduced is not None:
            if tuple(shape) not in (x.reduced.shape, (*x.reduced.shape, 1)):
                raise self.fail(node, f"gives a reduced row the shape {tuple(shape)}")
            return replace(x, reduced=replace(x.reduced, keepdim=len(shape) > len(x.reduced.shape)))
        rows, wide, times = self.form(node, shape)
        if (x.rows and not rows) or (x.wide and not wide) or (x.wide and len(x.names) != times):
            raise self.fail(node, f"uses {node.target} in a way that moves elements")
        return x

    def _split(self, node: fx.Node) -> list[Value]:
        x, size, *dim = self._inputs(node)
        rank = len(self.shape_of(node.args[0]))
        if dim and dim[0] % rank != rank - 1:
            raise self.fail(node, "splits a dimension other than the last")
        pieces = [size] if isinstance(size, int) else list(size)
        if len(x.names) == 1 and not x.wide:
            raise self.fail(node, "splits a dimension of size 1")
        if len(x.names) != 2 or any(piece != self._width for piece in pieces):
            raise self.fail(node, "splits the last dimension into something other than two halves")
        return [replace(x, names=(name,)) for name in x.names]

    def _slice(self, node: fx.Node) -> Value:
        inputs = self._inputs(node)
        x: Value = inputs[0]
        dim, start, end, step = (inputs[1:] + [0, None, None, 1][len(inputs) - 1 :])[:4]
        shape = self.shape_of(node.args[0])
        if shape == self.shape_of(node):
            return x
        start, end = start or 0, min(shape[dim] if end is None else end, shape[dim])
        start, end = start % shape[dim] if start < 0 else start, end % shape[dim] if end < 0 else end
        halves = {(0, self._width): 0, (self._width, 2 * self._width): 1}
        if dim % len(shape) != len(shape) - 1 or step != 1 or (start, end) not in halves or len(x.names) != 2:
            raise self.fail(
                node,
                "takes a slice that is not a half of the last dimension: take halves with chunk(2, dim=-1), slice "
                "arguments before the call, and the result after it",
            )
        return replace(x, names=(x.names[halves[start, end]],))

    def _cat(self, node: fx.Node) -> Value:
        joined: Sequence[Any] = cast(Sequence[Any], node.args[0])
        pieces = [self.values[x] for x in joined]
        rows, wide, times = self.form(node, node.meta["val"].shape)
        halves = all(self.shape_of(x)[-1] == self._width for x in joined)
        if len(pieces) != 2 or times != 2 or not halves or any(len(x.names) != 1 for x in pieces):
            raise self.fail(node, "concatenates something other than two halves of the last dimension")
        kind = node.meta["val"].dtype
        pieces = [self._of_kind(x, kind) for x in pieces]
        return Value(tuple(x.names[0] for x in pieces), kind, rows, wide)

    def _constant(self, node: fx.Node, name: str) -> Value:
        number: Any = {"zeros_like": 0, "zeros": 0, "ones_like": 1, "ones": 1}.get(name)
        if number is None:
            number = node.args[0] if name == "scalar_tensor" else node.args[1]
        if isinstance(number, fx.Node):
            return self._of_kind(self.values[number], node.meta["val"].dtype)
        dtype = node.meta["val"].dtype
        if not dtype.is_floating_point:
            return Value((self.emit(self.constant(number, dtype)),), dtype)
        return Value(
            (self.emit(f"tl.full((), {self.constant(number, dtype)}, {self.inside(dtype)})"),), dtype
        )

    def _uniform(self, node: fx.Node) -> Value:
        """Random numbers, counted by their place in the output."""
        like, seed = self._inputs(node)
        if not isinstance(like, Value) or not (like.rows and like.wide) or len(like.names) != 1:
            raise self.fail(node, "requests random numbers of another shape than the output's")
        seed = seed.names[0] if isinstance(seed, Value) else f"tl.full((), {seed}, tl.int64)"
        numbers = self.emit("numbered(shape, batch, row, col, ROWS, COLS)")
        drawn = self.emit(f"uniform({seed}, {numbers})")
        return Value((self.emit(f"{drawn}.to({TYPES[self.compute]})"),), torch.float32, True, True)

    def _device(self, node: fx.Node) -> Value:
        """A call of device code of the user's own."""
        acc, given, name = self._inputs(node)
        inputs: list[Value] = [acc, *[self.values[x] for x in given]]
        if any(len(x.names) != 1 for x in inputs) or not (acc.rows and acc.wide):
            raise self.fail(
                node, "passes device code something other than a block and values that broadcast to it"
            )
        names = ", ".join([x.names[0] for x in inputs])
        return Value((self.emit(f"{device_name(name)}({names})"),), acc.dtype, True, True)

    # Reductions

    def _reduction(self, node: fx.Node, kind: str) -> Value:
        if self.role == "prologue":
            raise self.fail(
                node,
                f"reduces, in {node.target}, rows of which its tiles have parts: do that before, and pass the result "
                f"through prologue_args",
            )
        x: Value = self._inputs(node)[0]
        shape = self.shape_of(node.args[0])
        dims: Any = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim")
        dims = [dims] if isinstance(dims, int) else list(dims or [])
        if dims not in ([-1], [len(shape) - 1]) or not x.wide:
            is_single = bool(shape) and dims in ([-1], [len(shape) - 1])
            over = "a dimension of one element" if is_single else f"dimensions {dims or 'all'}"
            raise self.fail(
                node, f"uses {node.target} over {over}; only rows, the last dimension, can be reduced"
            )
        if x.reduced is not None:
            raise self.fail(node, "reduces what has been reduced")
        keepdim = bool(node.args[2] if len(node.args) > 2 else node.kwargs.get("keepdim", False))
        kind_of = self.compute if x.dtype.is_floating_point else torch.int64
        first, last = (-math.inf, math.inf) if x.dtype.is_floating_point else _ends(torch.int64)
        neutral = {"amax": first, "amin": last, "logsumexp": first}.get(kind, 0)
        if kind_of == torch.int64 and kind not in ("sum", "amax", "amin"):
            raise self.fail(node, f"uses {node.target} on integers")
        inside = [
            self.emit(
                f"keep_inside({name}.to({self.inside(kind_of)}), shape, col, {self.constant(neutral)}, ROWS, COLS)"
            )
            for name in x.names
        ]
        parts = self._reduce(kind, inside, neutral)
        columns = {self.sizes.N: "N", self.sizes.N // 2: "N/2", 2 * self.sizes.N: "2N"}[shape[-1]]
        dtype = node.meta["val"].dtype
        reduction = Reduction(kind, columns, parts, tuple(shape[:-1]), (dtype,), keepdim)
        return Value((), dtype, x.rows, False, reduction)

    def _complete(self, node: fx.Node) -> None:
        """Convert the reduced rows that a node uses to numbers."""
        if not self.narrow:
            raise self.fail(
                node,
                f"uses the result of a reduction again, in {node.target}: a row of more than {WHOLE} columns is "
                f"complete only after the last tile. Return it, and use it after the product",
            )
        for each in node.all_input_nodes:
            row = self.values[each]
            if not isinstance(row, Value) or row.reduced is None or each in self.complete:
                continue
            reduction = row.reduced
            first, *more = [name for name, _ in reduction.parts]
            twice = reduction.columns == "2N" or (self.paired and reduction.columns == "N")
            number = {
                "mean": f"{first} / ({'2 * ' if twice else ''}shape[1])",
                "logsumexp": f"{first} + tl.log({more[0] if more else ''})",
            }.get(reduction.kind, first)
            name = self.emit(f"({number})[:, None]")
            # Integers are reduced in 64 bits.
            dtype = self.compute if reduction.casts[0].is_floating_point else torch.int64
            for cast_to in reduction.casts:
                text = self._cast_to(name, dtype, cast_to)
                name, dtype = name if text == name else self.emit(text), cast_to
            self.complete[each] = Value((name,), row.dtype, row.rows, False)

    def _reduce(self, kind: str, blocks: list[str], neutral: float) -> tuple[tuple[str, float], ...]:
        """The block's partial reduction of each row, from its halves if there are two."""
        if kind in ("sum", "mean"):
            sums = [self.emit(f"tl.sum({block}, 1)") for block in blocks]
            return ((sums[0] if len(sums) == 1 else self.emit(" + ".join(sums)), neutral),)
        function = "smallest" if kind == "amin" else "largest"
        found = [self.emit(f"{function}({block})") for block in blocks]
        extreme = found[0]
        if len(found) == 2:
            extreme = self.emit(f"{'minimum' if kind == 'amin' else 'maximum'}({found[0]}, {found[1]})")
        if kind != "logsumexp":
            return ((extreme, neutral),)
        sums = [self.emit(f"row_exponentials({block}, {extreme})") for block in blocks]
        return ((extreme, neutral), (sums[0] if len(sums) == 1 else self.emit(" + ".join(sums)), 0.0))


def _ends(kind: torch.dtype) -> tuple[int, int]:
    """The first and the last number of an integer type."""
    info = torch.iinfo(kind)
    return info.min, info.max


def _wrapped(number: Any, kind: torch.dtype) -> int | bool:
    """A Python number in an integer type, modulo its numbers."""
    if kind == torch.bool:
        return bool(number)
    first, last = _ends(kind)
    return (int(number) - first) % (last - first + 1) + first


def _only_seen(node: fx.Node) -> bool:
    """Whether an operator takes partially reduced rows."""
    words = str(node.target).split(".")
    return len(words) > 1 and words[1] in (*VIEWS, "_to_copy")


def _is_paired(graph: fx.Graph, sizes: Sizes) -> bool:
    """Whether some value is half as wide as the product."""
    return any(
        isinstance(x, torch.Tensor) and x.dim() and x.shape[-1] == sizes.N // 2 and sizes.N % 2 == 0
        for node in graph.nodes
        for value in (node.meta.get("val"),)
        for x in (value if isinstance(value, list | tuple) else (value,))
    )


def lower(
    graph: fx.Graph,
    arguments: Sequence[Argument],
    sizes: Sizes,
    name: str,
    role: str = "epilogue",
    narrow: bool = False,
) -> Program:
    """The device function of a graph.

    Args:
        arguments: the product's, and those of the others.
        name, role: of the user's function, for messages.
        narrow: whether a tile may be as wide as the product, so that its reduced rows are complete in it.

    Raises:
        Untraceable: an operator is not known, or used in a way that a tile can't follow.
    """
    product = arguments[0]
    assert isinstance(product, Shape)
    wide = accumulator(product.dtype) == torch.float64 or product.dtype == torch.float64
    state = _Lowering(
        arguments, sizes, torch.float64 if wide else torch.float32, _is_paired(graph, sizes), name, role, narrow,
    )  # fmt: skip
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    for node in graph.nodes:
        if node.op == "placeholder":
            position = placeholders.index(node)
            if node.users:
                state.values[node] = state.placeholder(node, position)
        elif node.op == "output":
            return _finished(state, node)
        elif str(node.target) == "aten.copy_.default" and not node.users:
            if node.args[0] is not placeholders[0]:
                raise state.fail(node, "changes one of its arguments in place")
        else:
            state.values[node] = state.lower(node)
    raise AssertionError("a graph ends with its output")


def _finished(state: _Lowering, node: fx.Node) -> Program:
    """The program, once all nodes are lowered, with stores of the outputs that the kernel does not store itself."""
    returned = node.args[0]
    many = isinstance(returned, list | tuple)
    flat: list[Any] = list(returned) if isinstance(returned, list | tuple) else [returned]
    if not flat:
        raise state.fail(node, "returns no tensor")
    results = [_result(state, node, x) for x in flat]
    all_kept = [_kept(state, x, value) for x, value in zip(flat, results, strict=True)]
    main = next(
        (
            i
            for i, (x, kept) in enumerate(zip(results, all_kept, strict=True))
            if x.reduced is None and kept is None and len(x.names) == 1
        ),
        None,
    )
    outputs: list[Output] = []
    # Lines that store a matrix, and the blocks that they store.
    stored: list[tuple[int, str]] = []
    second = None
    position = len(state.inputs)
    for i, x in enumerate(results):
        kept = all_kept[i]
        is_matrix = x.reduced is None and (kept is None or (len(kept) == len(state._product()) and kept[-1]))
        own = (x.names, x.dtype, kept)
        alike = (j for j, y in enumerate(results[:i]) if (y.names, y.dtype, all_kept[j]) == own)
        before = None if x.reduced is not None or kept is not None else next(alike, None)
        if before is not None:
            outputs.append(Output(x.dtype, _columns(state, len(x.names)), same=before))
            continue
        if x.reduced is not None:
            for k, (part, neutral) in enumerate(x.reduced.parts):
                state.lines.append(
                    f"store_row_partials(o{position + k}, t{position + k}, slot, shape, sizes, batch, row, col, "
                    f"{part}, {state.constant(neutral)}, ROWS, COLS)"
                )
            places = tuple(range(position, position + len(x.reduced.parts)))
            outputs.append(Output(x.dtype, "", x.reduced, places, None, kept, False))
        elif i == main:
            outputs.append(Output(x.dtype, _columns(state, 1)))
            continue
        else:
            places, second = (position,), position
            for half, name in enumerate(x.names):
                block = f"as_type({name}, o{position}.dtype.element_ty)"
                stored.append((len(state.lines), block))
                state.lines.append(
                    f"store_block(o{position}, t{position}, {half}, shape, sizes, batch, row, col, {block}, ROWS, "
                    "COLS, WIDE)"
                )
            columns = _columns(state, len(x.names))
            outputs.append(Output(x.dtype, columns, None, places, None, kept, is_matrix))
        position += len(places)
    block = "tl.full((1, 1), 0, tl.int32)" if main is None else results[main].names[0]
    state.lines.append(f"return tl.broadcast_to({block}, (ROWS, COLS))")
    both = None
    if main is not None and not any(x.kept is not None or x.reduced for x in outputs):
        # A number is not a block, and can't become one in Gluon.
        blocks = [state.values[x].rows or state.values[x].wide for x in flat]
        both = _both(state, position, stored) if all(blocks) else None
    ahead = _ahead(state, position)
    return Program(
        _source(state, position), state.paired, tuple(state.inputs), tuple(state.numbers), tuple(outputs), position,
        ahead, both, state.loads[0][3] if ahead else second if both else None, bool(state.complete), many,
    )  # fmt: skip


def _columns(state: _Lowering, times: int) -> str:
    return {1: "N/2" if state.paired else "N", 2: "N" if state.paired else "2N"}[times]


def _result(state: _Lowering, node: fx.Node, x: Any) -> Value:
    value = state.values.get(x) if isinstance(x, fx.Node) else None
    if not isinstance(value, Value):
        raise state.fail(node, "returns something that is not a tensor")
    if value.reduced is not None:
        return value
    _, _, times = state.form(node, x.meta["val"].shape)
    names = value.names if len(value.names) == times else value.names * times
    return replace(value, names=names, rows=True, wide=True)


def _kept(state: _Lowering, x: fx.Node, value: Value) -> tuple[bool, ...] | None:
    """See `Output.kept`."""
    *lead, columns = state._product()
    if value.reduced is not None:
        shape, full = value.reduced.shape, tuple(lead)
    else:
        shape = state.shape_of(x)
        full = (*lead, shape[-1] if shape and shape[-1] != 1 else columns)
    if shape == full:
        return None
    return tuple(a == b for a, b in zip(shape, full[len(full) - len(shape) :], strict=True))


def _unpacked(state: _Lowering, tensors: int) -> list[str]:
    """The lines that give the arguments their names."""
    inputs = [f"x{i}" for i in state.inputs] + [f"o{i}" for i in range(len(state.inputs), tensors)]
    strides = [f"s{i}" for i in state.inputs] + [f"t{i}" for i in range(len(state.inputs), tensors)]
    numbers = [f"n{i}" for i in state.numbers]
    slots = ["slot"] if any("store_row_partials" in line for line in state.lines) else []
    # Strides come one by one: Triton 3.6 fails on a tuple within a tuple in which an integer is 1.
    parts = [f"{name}_{part}" for name in strides for part in ("steps", "row", "col")]
    names = [*inputs, *parts, *numbers, *slots]
    unpack = [f"{', '.join(names)}{',' if len(names) == 1 else ''} = args"] if names else []
    return unpack + [f"{name} = ({name}_steps, {name}_row, {name}_col)" for name in strides]


def _text(kind: str, first: str, lines: Sequence[str]) -> str:
    """A device function; its name is that of its content."""
    body = "\n".join(f"    {line}" for line in lines)
    digest = hashlib.sha256(body.encode()).hexdigest()[:12]
    return (
        f"def {kind}_{digest}(\n    {first}, shape, sizes, batch, row, col, ROWS: tl.constexpr, COLS: tl.constexpr,"
        f" WIDE: tl.constexpr\n):\n{body}\n"
    )


def _source(state: _Lowering, tensors: int) -> str:
    return _text("fused", "acc, args", [*_unpacked(state, tensors), *state.lines])


def _both(state: _Lowering, tensors: int, stored: list[tuple[int, str]]) -> str | None:
    """See `Program.both`.

    Args:
        stored: lines that store a matrix, and what they store.
    """
    if len(stored) != 1 or state.loads:
        return None
    ((line, block),) = stored
    *lines, last = state.lines
    kept = [text for i, text in enumerate(lines) if i != line]
    return _text(
        "both",
        "acc, args",
        [*_unpacked(state, tensors), *kept, f"{last}, tl.broadcast_to({block}, (ROWS, COLS))"],
    )


def _ahead(state: _Lowering, tensors: int) -> tuple[str, str] | None:
    """See `Program.ahead`."""
    if len(state.loads) != 1:
        return None
    line, halves, dtype, _ = state.loads[0]
    if halves != 1 or dtype.itemsize > 2:
        return None
    unpack = _unpacked(state, tensors)
    name, load = state.lines[line].split(" = ", 1)
    before = [*unpack, f"return {load}"]
    after = ["args, block = given", *unpack, *state.lines]
    after[1 + len(unpack) + line] = f"{name} = brought(block)"
    return _text("ahead", "args", before), _text("behind", "acc, given", after)
