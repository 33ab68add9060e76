"""The bases of all operands: their layouts in memory, their part of a launch, and their loaders.

An `Operand` has the tensors of one call. Its `Spec` is what decides which code runs, a field of `Problem`. An `Access`
is how kernels load it with one config. Kinds differ in what they override: see `dense`, `pair`, `packed`, `scaled` and
`row_scaled`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from torch import Tensor

from .. import reference
from ..dtypes import DTYPE_NAMES, OUT_DTYPES, accumulator
from ..kernels import steps

if TYPE_CHECKING:
    from ..devices import Device
    from ..kernels.any_width_stage import Stage
    from ..problem import Config, Problem
    from ..product.prologue import Prologue


@dataclass(frozen=True, slots=True)
class Layout:
    """How one matrix (or batch of them) lies in memory; strides in elements.

    Attributes:
        dtype: element type.
        steps: one stride for each dimension of the problem's batch, 0 where the matrix is shared.
        row: distance from one row to the next.
        col: distance from one column to the next.
        aligned: whether the first element's address is a multiple of 16 bytes.
    """

    dtype: torch.dtype
    steps: tuple[int, ...]
    row: int
    col: int
    aligned: bool

    @property
    def stored(self) -> torch.dtype:
        """The element type of its tensor."""
        return self.dtype

    def strides_of(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The strides of its tensor of a shape, where the layout does not say them all: as it lies in memory."""
        return (*self.steps, self.row, self.col)

    def takes_tma(self, batch: tuple[int, ...]) -> bool:
        """Whether a tensor descriptor can describe the matrix: TMA's rules on strides and addresses."""
        item = self.dtype.itemsize
        outer = self.row if self.col == 1 else self.col
        return (
            self.aligned
            and 1 in (self.row, self.col)
            and outer > 0
            and len(batch) <= 1
            and all(stride * item % 16 == 0 and stride * item < 1 << 40 for stride in (outer, *self.steps))
        )

    def bytes(self, rows: int, cols: int, batch: tuple[int, ...]) -> int:
        """The fewest bytes that reading it can move: each distinct element once."""
        size = self.dtype.itemsize
        extents = (*batch, rows, cols)
        for extent, stride in zip(extents, (*self.steps, self.row, self.col), strict=True):
            size *= extent if stride or extent == 0 else 1
        return size

    @property
    def has_aligned_rows(self) -> bool:
        """Whether each row, or column, begins at a multiple of 16 elements."""
        outer = self.row if self.col == 1 else self.col
        strides = (outer, *self.steps)
        return self.aligned and 1 in (self.row, self.col) and all(stride % 16 == 0 for stride in strides)

    def __str__(self) -> str:
        order = "row" if self.col == 1 else "col" if self.row == 1 else f"{self.row},{self.col}"
        return f"{DTYPE_NAMES.get(self.dtype, str(self.dtype).removeprefix('torch.'))}[{order}]"


@dataclass(frozen=True, slots=True)
class Traced:
    """A traced function as device code.

    Attributes:
        source: its text; see `epilogues.lower`.
        operands: the tensors that it reads and writes besides the block that it is given, one layout each.
        numbers: how many numbers come with every call.
    """

    source: str
    operands: tuple[Layout, ...]
    numbers: int = 0

    @property
    def matrix_operands(self) -> tuple[Layout, ...]:
        """Those of its operands that differ from element to element."""
        return tuple([x for x in self.operands if x.row and x.col])

    @property
    def draws(self) -> bool:
        """Whether it draws random numbers."""
        return "uniform(" in self.source

    def __str__(self) -> str:
        return self.source.split("(", 1)[0].split()[-1]


@dataclass(frozen=True, slots=True)
class Spec(Layout):
    """An operand of a product, as far as it decides which code runs; the defaults are those of a plain matrix.

    The layout is that of the matrix that the operand stands for, and of the first of its tensors.

    Attributes:
        prologue: what becomes of its blocks as they are loaded, with tensors over (batch, rows, columns), if anything.
    """

    prologue: Traced | None = None

    @property
    def note(self) -> str:
        """A note that a problem's description has behind the epilogue."""
        return ""

    @property
    def kind(self) -> str:
        """The name of its own tables of tiles; "" where its type says it."""
        return ""

    @property
    def format(self) -> str:
        """The name of its own measurements among those of its kind; "" where it has none."""
        return ""

    @property
    def unpacks(self) -> bool:
        """Whether its numbers are unpacked in registers, from words."""
        return False

    @property
    def is_sparse(self) -> bool:
        """Whether two of each four numbers along K are stored."""
        return False

    @property
    def is_encoded(self) -> bool:
        """Whether it stands for a matrix that is stored in another form, and that torch would be given instead."""
        return self.unpacks or self.is_sparse

    @property
    def staged(self) -> Stage | None:
        """How stages of `schedules.any_width` hold a weight in a form of its own, without `Stage.of_halves`.

        None where they do not, and of plain matrices.
        """
        return None

    @property
    def ragged(self) -> str:
        """What groups it comes in, of which only the GPU knows where they end: "rows", "k", or "" for none."""
        return ""

    @property
    def ungrouped(self) -> Spec:
        """The same without groups."""
        return self

    @property
    def gathers(self) -> bool:
        """Whether rows of the product come from others than those with their numbers."""
        return False

    @property
    def by_blocks(self) -> bool:
        """Whether steps along K are its stored blocks."""
        return False

    @property
    def is_summed(self) -> bool:
        """Whether the product is summed over ranks, so that no element may be computed twice; see `summed`."""
        return False

    @property
    def arrives(self) -> bool:
        """Whether other GPUs send something that tiles wait for; see `arriving`."""
        return False

    @property
    def shards(self) -> int:
        """In how many parts of equal size rows come, one for each of several GPUs; a tile has rows of one of them."""
        return 1

    @property
    def mean_k(self) -> int:
        """Of an operand by whose blocks a product steps: the length of a tile's range along K on average."""
        raise NotImplementedError

    @property
    def takes_copies(self) -> bool:
        """Whether a copy of the matrix can take its place."""
        return True

    @property
    def is_scaled(self) -> bool:
        """Whether its scales change along K."""
        return False

    @property
    def by_steps(self) -> bool:
        """Whether the product of each step along K is multiplied by scales."""
        return False

    @property
    def bits(self) -> float:
        """Of a number in memory."""
        return self.dtype.itemsize * 8

    @property
    def summed(self) -> torch.dtype:
        """The type in which its products are summed."""
        return accumulator(self.dtype)

    @property
    def layouts(self) -> tuple[Layout, ...]:
        """The layouts of its tensors, in the order in which a launch is given them; the prologue's come last."""
        return (self, *(self.prologue.operands if self.prologue else ()))

    @property
    def numbers(self) -> int:
        """The count of numbers that a launch is given for it: the prologue's."""
        return self.prologue.numbers if self.prologue else 0

    def shapes(self, rows: int, cols: int, batch: tuple[int, ...], is_b: bool) -> list[tuple[int, ...]]:
        """The shapes of its tensors, of which `layouts` has the strides, for a matrix of so many rows and columns."""
        return [(*batch, rows, cols)] * len(self.layouts)

    def usual(self, row: int, col: int) -> Spec:
        """The same kind of operand, of one aligned matrix with these strides."""
        raise NotImplementedError

    def alike(self) -> Spec:
        """One of those for which the same kernels run, the same for all of these."""
        return self

    def suits_tma(self, problem: Problem, is_b: bool) -> bool:
        """Whether tensor descriptors can load it."""
        raise NotImplementedError

    def refusal(self, problem: Problem, config: Config) -> str | None:
        """Why a config can't run a problem with this operand; None if it can."""
        return None

    def of_sum(self, epilogue: Any, device: Device) -> Any:
        """An epilogue's device function, given the sum as the kernel has it."""
        return epilogue

    def of_partial_sum(self, problem: Problem, epilogue: Any, reads_ahead: bool) -> Any:
        """An epilogue's device function, given the sum over this operand's columns, which are some of all.

        Args:
            reads_ahead: whether it is given (args, block), see `kernels.epilogues`.
        """
        return epilogue

    def before_sum(self, prefetch: Any) -> Any:
        """The device function that reads ahead, given the arguments of `of_partial_sum`'s function."""
        return prefetch

    def sum_arguments(
        self, problem: Problem, tensors: Sequence[Any], numbers: Sequence[float]
    ) -> tuple[Any, ...]:
        """Arguments of `of_partial_sum`'s function, which come before the epilogue's.

        Args:
            tensors: the operand's.
            numbers: the launch's, of which its own are the last.
        """
        return ()

    def columns(self, config: Config) -> tuple[int, int]:
        """Columns of a tile that are one block of the kernel, and those of the second block beside it, or 0."""
        return config.main_n, config.rest_n

    def k_step(self, problem: Problem) -> tuple[Any, Any]:
        """LOAD_STEP and MULTIPLY of products with this second operand; see `kernels.steps`."""
        return None, steps.add_product

    def access(self, problem: Problem, is_b: bool, tma: bool) -> Access:
        """Its access by kernels.

        Args:
            is_b: whether it is the second operand, (K, N), or the first one, (M, K).
            tma: whether through tensor descriptors, or pointers.
        """
        raise NotImplementedError


class Operand:
    """An operand of one call: the tensors that it is made of, and what else makes it.

    Attributes:
        matrix: (..., M, K) of the first operand or (..., K, N) of the second, with the strides that the spec is made
            of. It has the shape, the type and the device; of a packed weight it has no data.
        tensors: what it is made of: what operators, autograd and the overlap check see, in an order of its kind's.
        launched: those that a launch is given, in the order of `Spec.layouts`.
        places: where these are among `values`.
        buffers: one for each of its matrices, to which the matrix's gradient is added in place of being returned; or
            none.
    """

    #: Whether `matrix` is the right one of two halves; only for kernels.
    swapped = False
    #: Whether `outer` is for others to multiply by.
    has_outer = True
    matrix: Tensor
    tensors: tuple[Tensor, ...]
    launched: tuple[Tensor, ...]
    places: tuple[int, ...]
    buffers: tuple[Tensor, ...] = ()

    @property
    def values(self) -> tuple[Any, ...]:
        """The values in a call's key: its tensors, with None where a kind may have one and this operand has none."""
        return self.tensors

    @property
    def form(self) -> tuple[Any, ...]:
        """The rest of a call's key, which the tensors do not tell."""
        return self.text, *self.sizes

    @property
    def halves(self) -> int:
        """The number of matrices that stand side by side."""
        return 1

    @property
    def outer(self) -> Tensor | None:
        """Scales of the product's rows, or columns, by which it is multiplied before anything else."""
        return None

    @property
    def outer_place(self) -> int:
        """Where that is among `values`."""
        raise NotImplementedError

    def without_outer(self) -> Operand:
        """The same, of whose `outer` another operand takes care."""
        made = copy.copy(self)
        made.has_outer = False
        return made

    @property
    def default(self) -> torch.dtype:
        """The type of results where nobody asks for one."""
        return OUT_DTYPES.get(self.matrix.dtype, (self.matrix.dtype,))[0]

    @property
    def summed(self) -> torch.dtype:
        """The type of the sum."""
        return accumulator(self.matrix.dtype)

    @property
    def is_differentiable(self) -> bool:
        """Whether products have gradients with respect to the other operand."""
        return self.matrix.dtype.is_floating_point and self.matrix.dtype.itemsize > 1

    @property
    def number_places(self) -> tuple[int, ...]:
        """Where the numbers that a launch is given for it are among `values`."""
        return ()

    @property
    def is_packed(self) -> bool:
        """Whether it is a `formats.weight.PackedWeight`, (*batch, N, K)."""
        return False

    @property
    def strip(self) -> int:
        """Rows of a packed weight that are stored together, so that its halves have to be multiples of it."""
        return 1

    @property
    def is_dense(self) -> bool:
        """Whether it is one plain matrix and nothing else."""
        return False

    @property
    def is_ragged(self) -> bool:
        """Whether it comes in groups of which only the GPU knows where they end."""
        return False

    @property
    def scatters(self) -> bool:
        """Whether rows of the result go elsewhere."""
        return False

    @property
    def keeps_rows(self) -> bool:
        """Whether the rows of the product are those of one matrix, to which no batch can be added."""
        return self.is_ragged

    @property
    def by_blocks(self) -> bool:
        """Whether the product steps through its stored blocks."""
        return False

    def shape_of(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The product's shape, of that of a batch of matrices."""
        return shape

    def named(self, name: str) -> list[tuple[str, Tensor]]:
        """Its tensors, each with what a user calls it who calls the operand `name`."""
        raise NotImplementedError

    def lowered(self, op: str, names: tuple[str, str], dtype: torch.dtype) -> Operand:
        """The same in the type that autocast asks for.

        Raises:
            TypeError: it can't be brought to that type.
        """
        return self

    def in_torch(self) -> Tensor:
        """The matrix that it stands for, without `outer`."""
        raise NotImplementedError

    def multiplied(self, b: Operand, dtype: torch.dtype, by_rows: bool) -> Tensor:
        """The product with a second operand, in torch; see `reference.gemm`."""
        return reference.gemm(self.in_torch(), b.in_torch(), out_dtype=dtype, by_rows=by_rows)

    def of_rows(self, value: Any) -> Any:
        """An input of an epilogue as torch broadcasts it to the product."""
        return value

    def finished(self, results: Sequence[Tensor], is_scattered: bool = True) -> list[Tensor]:
        """An epilogue's results as a kernel stores them, of those that torch computed for the product's rows.

        Args:
            is_scattered: whether rows go where the kernel would store them.
        """
        return list(results)

    def of_results(self, grads: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Gradients of results, row by row as the product has them."""
        return list(grads)

    def unscattered(self) -> Operand:
        """The same for a product whose rows stay where they are."""
        return self

    def with_prologue(self, prologue: Prologue) -> Operand:
        """The same with a prologue, for a plain matrix."""
        raise NotImplementedError

    def prologue_applied(self) -> Operand:
        """The same without a prologue, which is applied in torch."""
        return self

    def accumulating(self, buffers: Sequence[Tensor]) -> Operand:
        """The same with `buffers`."""
        raise NotImplementedError

    def parts(self) -> list[Operand]:
        """The matrices that stand side by side, each as an operand."""
        return [self]

    def ordered(self) -> Operand:
        """The same, of two halves the one first that comes first in memory, as kernels want them."""
        return self

    def loadable(self) -> Operand:
        """The same as kernels can load it."""
        return self

    def along(self) -> list[tuple[Tensor, int]]:
        """Tensors over (..., M, columns), with their columns, whose rows are folded with those of the product."""
        return []

    def spec(self, matrix: Spec, along: Sequence[Layout], problem: Problem) -> Spec:
        """The spec.

        Args:
            matrix: the spec of a plain matrix, which `matrix` became when dimensions were folded.
            along: what the tensors that `along` gives became.
            problem: the product, with plain matrices.
        """
        return matrix

    # --- for the operator --------------------------------------------------------------------------------------------

    @property
    def text(self) -> str:
        """A text from which `operands.rebuild` makes the operand again, given its tensors and `sizes`."""
        raise NotImplementedError

    @property
    def sizes(self) -> list[int]:
        """Sizes that its tensors do not tell, which may be symbols."""
        return []

    def axes(self, rows: str, columns: str) -> list[tuple[str, ...]]:
        """For each of its tensors, which dimension of the product each of its own is, for products of DTensors.

        A batch dimension is "b-1", "b-2"..., counted from the last one; "" is none along which it can be sharded. Of a
        kind that can't be sharded there are none at all.

        Args:
            rows, columns: what those of `matrix` are: "M" and "K", or "K" and "N".
        """
        return []

    def sizes_of_part(self, parts: Callable[[str], int]) -> list[int]:
        """`sizes` of a rank's part.

        Args:
            parts: into how many parts a dimension is cut, by its name; see `axes`.
        """
        return self.sizes

    def grain(self, axis: str) -> int:
        """Of how many rows or columns a part of a sharded operand has a multiple; 0 where parts may differ in size."""
        return 0

    def mapped(self, dims: Sequence[int | None], rank: int, size: int, everywhere: bool) -> Operand:
        """The operand of a product in which a dimension that `torch.vmap` hides has become the first of the batch.

        Args:
            dims: for each of its tensors, where the dimension is; None where it is not mapped.
            rank: dimensions of the product without it.
            everywhere: whether it is to have the dimension, mapped or not.
        """
        raise NotImplementedError

    def gradients(
        self, a: Tensor, grad: Tensor, multiply: Multiply, needs: tuple[bool, Sequence[bool]]
    ) -> tuple[Tensor | None, list[Tensor | None]]:
        """Gradients of a product with respect to `a`, (..., M, K), and to this second operand's tensors.

        Args:
            grad: of the product, (..., M, N), in a's type.
            multiply: `multiply(x, y, addend=None)` is `x @ y + addend` for a tensor and an operand.
            needs: whether that of a is needed, and which of the tensors'.
        """
        raise NotImplementedError

    def gradients_with(
        self, b: Operand, grad: Tensor, multiply: Multiply, needs: tuple[Sequence[bool], Sequence[bool]]
    ) -> tuple[list[Tensor | None], list[Tensor | None]]:
        """Gradients of a product with respect to this first operand's tensors and to those of `b`; see `gradients`."""
        of_a, of_b = b.gradients(self.matrix, grad, multiply, (needs[0][0], needs[1]))
        return [of_a, *[None] * (len(self.tensors) - 1)], of_b

    def summed_over_groups(
        self, grad: Tensor, like: Tensor, multiply: Callable[[Operand, Operand], Tensor]
    ) -> Tensor | None:
        """The gradient of an epilogue's input of which one part belongs to a group of rows; None for other inputs.

        Args:
            grad: of what every row of the product saw.
            like: the input.
            multiply: gives a product without an epilogue, in the input's type.
        """
        return None


def batch_axes(x: Tensor, own: int) -> tuple[str, ...]:
    """What the batch dimensions of a tensor are, see `Operand.axes`; one that is broadcast is none.

    Args:
        own: dimensions behind those of the batch.
    """
    count = x.dim() - own
    return tuple(["" if x.shape[i] == 1 else f"b-{count - i}" for i in range(count)])


class Multiply(Protocol):
    """A product of a matrix and an operand; see `Operand.gradients`."""

    def __call__(
        self, x: Tensor | Operand, y: Operand, addend: Tensor | None = None, into: Tensor | None = None
    ) -> Tensor:
        """`x @ y + addend`, or with `into` that matrix, to which `x @ y` has been added."""


class StageMap(NamedTuple):
    """A tensor descriptor for stages of `schedules.any_width`.

    Attributes:
        shape, strides: of the tensor as the descriptor sees it.
        block: the size that the kernel's type has, of 64 rows.
        box: what the tensor map loads at a time.
        is_swizzled: whether the bytes of a row are swizzled in shared memory.
    """

    tensor: Tensor
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    block: tuple[int, ...]
    box: tuple[int, ...]
    is_swizzled: bool = False


class Access:
    """An operand's loader, and its arguments to a kernel.

    Attributes:
        strides: what its loader takes as `strides`; see `kernels.operands`.
        gathers: whether it loads rows with certain numbers; see `gathering`.
        scatters: whether rows of the result go elsewhere; see `scattered`.
    """

    strides: tuple[Any, ...]
    gathers = False
    scatters = False

    def loader(self) -> Any:
        """The device function that loads a block."""
        raise NotImplementedError

    def gathering(self) -> Access:
        """The same for rows with certain numbers, which come behind the strides; see `load_gathered`."""
        raise NotImplementedError

    def argument(self, tensors: Sequence[Tensor], block_rows: int, block_cols: int) -> Any:
        """The kernel's argument for blocks of such a size: a pointer or a tensor descriptor."""
        raise NotImplementedError

    def group_params(self, tensors: Sequence[Tensor], block_rows: int, block_cols: int) -> list[Any]:
        """Scales and shifts of a packed weight's groups, None for what there is not."""
        return [None, None]

    def stage_maps(self, tensors: Sequence[Tensor], box: int, step: int) -> list[StageMap]:
        """The tensor maps of a weight with a `Spec.staged`: of what is X, and of each of `Stage.kinds`.

        Args:
            box: rows that they load at a time.
            step: columns of a step.
        """
        raise NotImplementedError

    def behind_strides(self, tensors: Sequence[Tensor], numbers: Sequence[float]) -> tuple[Any, ...]:
        """Further arguments of the loader, which come behind the strides."""
        return ()

    def step_scales(self, tensors: Sequence[Tensor]) -> tuple[Any, ...]:
        """The scales by which the product of each step along K is multiplied: pointer and strides; () for none."""
        return ()

    def place(self, own: Any, is_cut: bool) -> Any:
        """The PLACE of products with this operand, see `kernels.place`.

        Args:
            own: the schedule's.
            is_cut: whether tiles are cut along K.
        """
        return own

    def ready(self) -> Any:
        """What waits for what other GPUs send to the epilogue, for kernels that call it before that; or None.

        In others, PLACE waits.
        """
        return None

    def leading(self, other: Access) -> Access:
        """The other operand's access, where this one says which parts along K it loads."""
        return other

    def given(self, tensors: Sequence[Tensor]) -> tuple[Any, ...]:
        """Arguments of the other operand's loader, which come behind all of its own."""
        return ()

    def group_of(self) -> Any:
        """The device function that finds a group of rows, see `place.group_of`; None where there are none."""
        return None

    def place_args(self, tensors: Sequence[Tensor], numbers: Sequence[float]) -> tuple[Any, ...]:
        """Its `place_args`, given the operand's tensors and numbers."""
        return ()

    def scattered(self, tensors: Sequence[Tensor]) -> tuple[Any, ...]:
        """The argument of the store behind its strides, which says where rows of the result go; () where they stay."""
        return ()


def negated(layout: Layout, tma: bool = False) -> tuple[int, ...]:
    """A matrix's batch steps as loaders take them; with `tma` they only say where it is shared."""
    # Negated, see `kernels.operands`.
    return tuple(-int(step != 0) if tma else -step for step in layout.steps)


def refuse_gradients(named: Sequence[tuple[str, Tensor]], needs: Sequence[bool]) -> None:
    """TypeError for a tensor of an operand that requires a gradient, of those that products compute none for."""
    for (name, _), need in zip(named, needs, strict=True):
        if need:
            raise TypeError(f"no gradient for {name}, which requires one: call requires_grad_(False) on it")
