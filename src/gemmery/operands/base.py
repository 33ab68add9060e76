"""The bases of all operands: their layouts in memory, their part of a launch, and their loaders.

An `Operand` has the tensors of one call. Its `Spec` is a field of `Problem` and decides which code runs. An `Access`
tells how kernels load it with one config. Kinds differ in what they override: see `dense`, `pair`, `packed`, `scaled`
and `row_scaled`.
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
    """The layout of one matrix (or batch of them) in memory; strides in elements.

    Attributes:
        dtype: element type.
        steps: one stride for each dimension of the problem's batch, 0 if the matrix is shared.
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
        """The strides of its tensor of this shape. Those that the layout leaves open are as in memory."""
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
        operands: one layout for each tensor that it reads or writes besides its block.
        numbers: how many numbers come with every call.
    """

    source: str
    operands: tuple[Layout, ...]
    numbers: int = 0

    @property
    def matrix_operands(self) -> tuple[Layout, ...]:
        """Its operands that differ from element to element."""
        return tuple([x for x in self.operands if x.row and x.col])

    @property
    def draws(self) -> bool:
        """Whether it draws random numbers."""
        return "uniform(" in self.source

    def __str__(self) -> str:
        return self.source.split("(", 1)[0].split()[-1]


@dataclass(frozen=True, slots=True)
class Spec(Layout):
    """The properties of an operand that decide which code runs; the defaults are those of a plain matrix.

    The layout is that of the matrix that the operand stands for, and of the first of its tensors.

    Attributes:
        prologue: a function that is applied to its blocks as they are loaded, with tensors over (batch, rows,
            columns); None for none.
    """

    prologue: Traced | None = None

    @property
    def note(self) -> str:
        """A note for a problem's description, after the epilogue."""
        return ""

    @property
    def kind(self) -> str:
        """The name of its own tables of tiles; "" if its type determines them."""
        return ""

    @property
    def format(self) -> str:
        """The name of its own measurements among those of its kind; "" if it has none."""
        return ""

    @property
    def unpacks(self) -> bool:
        """Whether its numbers are unpacked in registers, from words."""
        return False

    @property
    def is_sparse(self) -> bool:
        """Whether only two of each four numbers along K are stored."""
        return False

    @property
    def is_encoded(self) -> bool:
        """Whether it represents a matrix that is stored in another form; torch receives the matrix instead."""
        return self.unpacks or self.is_sparse

    @property
    def staged(self) -> Stage | None:
        """The layout of a weight in its stored form in stages of `schedules.any_width`, without `Stage.of_halves`.

        None if they cannot, and for plain matrices.
        """
        return None

    @property
    def ragged(self) -> str:
        """The kind of groups whose ends only the GPU knows: "rows", "k", or "" for none."""
        return ""

    @property
    def ungrouped(self) -> Spec:
        """The same without groups."""
        return self

    @property
    def gathers(self) -> bool:
        """Whether a row of the product may read another row than the one with its number."""
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
    def adapter_rank(self) -> int:
        """The short side of two thin matrices whose product is added to the sum; 0 for none; see `adapted`."""
        return 0

    @property
    def suits_registers(self) -> bool:
        """Whether threads can load these matrices straight into registers, as kernels in Gluon do."""
        return True

    @property
    def awaits(self) -> bool:
        """Whether tiles wait for data from other GPUs; see `awaiting`."""
        return False

    @property
    def mean_k(self) -> int:
        """The average length of a tile's range along K, if a product steps through the operand's blocks."""
        raise NotImplementedError

    @property
    def takes_copies(self) -> bool:
        """Whether a copy of the matrix can replace it."""
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
        """Bits of a number in memory."""
        return self.dtype.itemsize * 8

    @property
    def summed(self) -> torch.dtype:
        """The type in which its products are summed."""
        return accumulator(self.dtype)

    @property
    def layouts(self) -> tuple[Layout, ...]:
        """The layouts of its tensors, in the order of a launch; the prologue's come last."""
        return (self, *(self.prologue.operands if self.prologue else ()))

    @property
    def numbers(self) -> int:
        """The count of its numbers in a launch: those of the prologue."""
        return self.prologue.numbers if self.prologue else 0

    def shapes(self, rows: int, cols: int, batch: tuple[int, ...], is_b: bool) -> list[tuple[int, ...]]:
        """The shapes of its tensors, whose strides are in `layouts`, for a matrix of this many rows and columns."""
        return [(*batch, rows, cols)] * len(self.layouts)

    def usual(self, row: int, col: int) -> Spec:
        """The same kind of operand, of one aligned matrix with these strides."""
        raise NotImplementedError

    def alike(self) -> Spec:
        """A representative of all specs for which the same kernels run."""
        return self

    def suits_tma(self, problem: Problem, is_b: bool) -> bool:
        """Whether tensor descriptors can load it."""
        raise NotImplementedError

    def refusal(self, problem: Problem, config: Config) -> str | None:
        """The reason why a config cannot run a problem with this operand; None if it can."""
        return None

    def of_sum(self, epilogue: Any, device: Device) -> Any:
        """An epilogue's device function for the sum in the kernel's layout."""
        return epilogue

    def of_partial_sum(self, problem: Problem, epilogue: Any, reads_ahead: bool) -> Any:
        """An epilogue's device function for the sum over this operand's columns, to which another sum is added.

        Args:
            reads_ahead: whether it receives (args, block), see `kernels.epilogues`.
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
        """The columns of a kernel's first block of a tile, and those of the second block beside it, or 0."""
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
    """An operand of one call: its tensors and its other properties.

    Attributes:
        matrix: (..., M, K) of the first operand or (..., K, N) of the second, with the strides that the spec is made
            of. It has the shape, the type and the device. For a packed weight it has no data.
        tensors: its tensors, as operators, autograd and the overlap check see them, in the order of its kind.
        launched: the tensors of a launch, in the order of `Spec.layouts`.
        places: where these are among `values`.
        buffers: one for each of its matrices. The matrix's gradient is added to it instead of being returned. Or none.
    """

    #: Whether `matrix` is the right one of two halves; only for kernels.
    swapped = False
    #: Whether others multiply by `outer`.
    has_outer = True
    matrix: Tensor
    tensors: tuple[Tensor, ...]
    launched: tuple[Tensor, ...]
    places: tuple[int, ...]
    buffers: tuple[Tensor, ...] = ()

    @property
    def values(self) -> tuple[Any, ...]:
        """The values in a call's key: its tensors, with None for each tensor of its kind that it lacks."""
        return self.tensors

    @property
    def form(self) -> tuple[Any, ...]:
        """The part of a call's key that does not follow from the tensors."""
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
        """The place of it among `values`."""
        raise NotImplementedError

    def without_outer(self) -> Operand:
        """The same operand, whose `outer` another operand applies."""
        made = copy.copy(self)
        made.has_outer = False
        return made

    @property
    def default(self) -> torch.dtype:
        """The default type of results."""
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
        """The places among `values` of the numbers that a launch receives for it."""
        return ()

    @property
    def is_packed(self) -> bool:
        """Whether it is a `formats.weight.PackedWeight`, (*batch, N, K)."""
        return False

    @property
    def strip(self) -> int:
        """Rows of a packed weight that are stored together, so its halves must be multiples of it."""
        return 1

    @property
    def is_dense(self) -> bool:
        """Whether it is one plain matrix."""
        return False

    @property
    def is_ragged(self) -> bool:
        """Whether it has groups whose ends only the GPU knows."""
        return False

    @property
    def scatters(self) -> bool:
        """Whether rows of the result are stored in other places."""
        return False

    @property
    def keeps_rows(self) -> bool:
        """Whether the rows of the product are those of one matrix, which can't have a batch."""
        return self.is_ragged

    @property
    def by_blocks(self) -> bool:
        """Whether the product steps through its stored blocks."""
        return False

    def shape_of(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The product's shape, given that of a batch of matrices."""
        return shape

    def named(self, name: str) -> list[tuple[str, Tensor]]:
        """Its tensors, each with its name for a user who calls the operand `name`."""
        raise NotImplementedError

    def lowered(self, op: str, names: tuple[str, str], dtype: torch.dtype) -> Operand:
        """The same in autocast's type.

        Raises:
            TypeError: it cannot be converted to that type.
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
        """An epilogue's results as a kernel stores them, given those that torch computed for the product's rows.

        Args:
            is_scattered: whether rows are stored where the kernel would store them.
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
        """The adjacent matrices, each as an operand."""
        return [self]

    def ordered(self) -> Operand:
        """The same operand. Of two halves, the one that comes first in memory is first, as kernels expect."""
        return self

    def loadable(self) -> Operand:
        """The same operand in a form that kernels can load."""
        return self

    def along(self) -> list[tuple[Tensor, int]]:
        """Tensors over (..., M, columns), with their columns. Their rows are folded with those of the product."""
        return []

    def spec(self, matrix: Spec, along: Sequence[Layout], problem: Problem) -> Spec:
        """The spec.

        Args:
            matrix: the spec of the plain matrix that folding made of `matrix`.
            along: the tensors of `along`, folded.
            problem: the product, with plain matrices.
        """
        return matrix

    # --- for the operator --------------------------------------------------------------------------------------------

    @property
    def text(self) -> str:
        """A text from which `operands.rebuild` rebuilds the operand, given its tensors and `sizes`."""
        raise NotImplementedError

    @property
    def sizes(self) -> list[int]:
        """Sizes that do not follow from its tensors. They may be symbols."""
        return []

    def axes(self, rows: str, columns: str) -> list[tuple[str, ...]]:
        """For each of its tensors, the product's dimension that each of its dimensions is; for products of DTensors.

        A batch dimension is "b-1", "b-2"..., counted from the last one; "" is a dimension that cannot be sharded.
        Kinds that cannot be sharded return nothing.

        Args:
            rows, columns: the names of those of `matrix`: "M" and "K", or "K" and "N".
        """
        return []

    def sizes_of_part(self, parts: Callable[[str], int]) -> list[int]:
        """`sizes` of a rank's part.

        Args:
            parts: the number of parts of each dimension, by its name; see `axes`.
        """
        return self.sizes

    def grain(self, axis: str) -> int:
        """Each part of a sharded operand has a multiple of this number of rows or columns; 0 if parts may differ in
        size.
        """
        return 0

    def mapped(self, dims: Sequence[int | None], rank: int, size: int, everywhere: bool) -> Operand:
        """The operand of a product whose first batch dimension is the one that `torch.vmap` hides.

        Args:
            dims: for each of its tensors, the place of that dimension; None if it is not mapped.
            rank: dimensions of the product without it.
            everywhere: whether it gets the dimension even if it is not mapped.
        """
        raise NotImplementedError

    def gradients(
        self, a: Tensor, grad: Tensor, multiply: Multiply, needs: tuple[bool, Sequence[bool]]
    ) -> tuple[Tensor | None, list[Tensor | None]]:
        """Gradients of a product with respect to `a`, (..., M, K), and to this second operand's tensors.

        Args:
            grad: of the product, (..., M, N), in a's type.
            multiply: `multiply(x, y, addend=None)` is `x @ y + addend` for a tensor and an operand.
            needs: whether the gradient of a is needed, and which of the tensors' gradients are.
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
        """The gradient of an epilogue's input that has a part for each group of rows; None for other inputs.

        Args:
            grad: the gradient of the input as each row of the product saw it.
            like: the input.
            multiply: computes a product without an epilogue, in the input's type.
        """
        return None


def batch_axes(x: Tensor, own: int) -> tuple[str, ...]:
    """The names of a tensor's batch dimensions, see `Operand.axes`; "" for one that is broadcast.

    Args:
        own: the number of dimensions after those of the batch.
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
        box: the block that the tensor map loads at a time.
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
        gathers: whether it loads rows by their numbers; see `gathering`.
        scatters: whether rows of the result go elsewhere; see `scattered`.
    """

    strides: tuple[Any, ...]
    gathers = False
    scatters = False

    def loader(self) -> Any:
        """The device function that loads a block."""
        raise NotImplementedError

    def gathering(self) -> Access:
        """The same for gathered rows, whose numbers follow the strides; see `load_gathered`."""
        raise NotImplementedError

    def argument(self, tensors: Sequence[Tensor], block_rows: int, block_cols: int) -> Any:
        """The kernel's argument for blocks of such a size: a pointer or a tensor descriptor."""
        raise NotImplementedError

    def group_params(self, tensors: Sequence[Tensor], block_rows: int, block_cols: int) -> list[Any]:
        """Scales and shifts of a packed weight's groups; None for those that it lacks."""
        return [None, None]

    def stage_maps(self, tensors: Sequence[Tensor], box: int, step: int) -> list[StageMap]:
        """The tensor maps of a weight with a `Spec.staged`: that of X, and one for each of `Stage.kinds`.

        Args:
            box: rows that they load at a time.
            step: columns of a step.
        """
        raise NotImplementedError

    def behind_strides(self, tensors: Sequence[Tensor], numbers: Sequence[float]) -> tuple[Any, ...]:
        """Further arguments of the loader, which follow the strides."""
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
        """A device function that waits for data which other GPUs send to the epilogue; None if nothing is sent.

        For kernels that call it before the epilogue; in others, PLACE waits.
        """
        return None

    def leading(self, other: Access) -> Access:
        """The other operand's access, if this one tells which parts along K it loads."""
        return other

    def given(self, tensors: Sequence[Tensor]) -> tuple[Any, ...]:
        """Arguments of the other operand's loader, after all of its own arguments."""
        return ()

    def group_of(self) -> Any:
        """The device function that finds a group of rows, see `place.group_of`; None if there are none."""
        return None

    def place_args(self, tensors: Sequence[Tensor], numbers: Sequence[float]) -> tuple[Any, ...]:
        """Its `place_args`, given the operand's tensors and numbers."""
        return ()

    def scattered(self, tensors: Sequence[Tensor]) -> tuple[Any, ...]:
        """The argument of the store after its strides, with the places of the result's rows; () if they do not move."""
        return ()


def negated(layout: Layout, tma: bool = False) -> tuple[int, ...]:
    """A matrix's batch steps as loaders take them; with `tma` they only tell where it is shared."""
    # Negated, see `kernels.operands`.
    return tuple(-int(step != 0) if tma else -step for step in layout.steps)


def refuse_gradients(named: Sequence[tuple[str, Tensor]], needs: Sequence[bool]) -> None:
    """Raises TypeError if a tensor for which products compute no gradient requires one."""
    for (name, _), need in zip(named, needs, strict=True):
        if need:
            raise TypeError(f"no gradient for {name}, which requires one: call requires_grad_(False) on it")
