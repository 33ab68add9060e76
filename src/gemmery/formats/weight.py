"""The base of weights in a packed form: their behavior as torch tensors."""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from ..dtensors import is_sharded
from ..files import parse_json
from . import aten

#: The types that a weight can be multiplied with.
DTYPES = (torch.float16, torch.bfloat16)

Inner = Mapping[str, Tensor | None]


class PackedWeight(Tensor):
    """A weight (*batch, N, K) that consists of several tensors, such as codes with scales, or kept values with places.

    To torch it is one tensor of its shape and type. It supports moves between devices and types, copies, pickling,
    saving, indexing along its batch and slicing, and no arithmetic but `F.linear`.

    Attributes:
        INNER: the names of the tensors, in the order in which they are stored.
        OWN: the names of all attributes that are the weight's own.
        FORMATS: what the "format" of its texts may be. Files find the class by it.
        made_by: the function that makes one.
        plain: the method that gives a plain tensor.
        state: what a layer with such a weight is, for reports.
        prepared_by: for errors, how a model gets layers that can load such weights.
    """

    INNER: ClassVar[tuple[str, ...]]
    OWN: ClassVar[frozenset[str]]
    FORMATS: ClassVar[Collection[str]]
    made_by: ClassVar[str]
    plain: ClassVar[str]
    state: ClassVar[str]
    prepared_by: ClassVar[str]
    #: Every class of packed weights.
    KINDS: ClassVar[list[type[PackedWeight]]] = []
    #: Makes one of what `to_tensors` gave and of `_extras`; a function of a module, which a pickle can name.
    _restore: ClassVar[Callable[..., Any]]
    #: The part of a repeated call's key that the tensors do not tell.
    static: tuple[Any, ...]
    #: A number for each row, by which the product's columns are multiplied.
    channel: Tensor | None
    #: The order of the columns, where it is not that of x's.
    permutation: Tensor | None

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        PackedWeight.KINDS.append(cls)

    # --- each kind has its own -------------------------------------------------------------------------------------

    @abstractmethod
    def with_parts(self, inner: Inner, shape: Any = None, dtype: torch.dtype | None = None) -> Self:
        """The same kind of weight with other tensors, which must fit the shape and type."""

    @abstractmethod
    def in_type(self, dtype: torch.dtype) -> Self:
        """The weight for activations of another type; its tensors are not copied if they stay the same."""

    @abstractmethod
    def of_batch(self, batch: tuple[int, ...], take: Callable[[Tensor], Tensor]) -> Self:
        """A weight of the parts that `take` takes of every tensor's leading dimensions, which become `batch`."""

    @abstractmethod
    def cut_rows(self, start: int, stop: int, caller: str = "slice") -> Self:
        """A copy of rows `start` to before `stop`."""

    @abstractmethod
    def cut_columns(self, start: int, stop: int, caller: str = "slice") -> Self:
        """A copy of columns `start` to before `stop`."""

    @classmethod
    def stack_rows(cls, weights: Sequence[Self]) -> Self:
        """One weight with the rows of several, see `torch.cat`."""
        raise NotImplementedError(f"cat: a {cls.__name__} can't be concatenated; use its {cls.plain}()")

    @abstractmethod
    def to_tensors(self, prefix: str = "") -> tuple[dict[str, Tensor], dict[str, str]]:
        """Plain tensors by name, and texts, of which `from_tensors` makes the weight again."""

    @classmethod
    def from_tensors(
        cls, tensors: Mapping[str, Tensor], texts: Mapping[str, str], prefix: str = ""
    ) -> PackedWeight:
        """The weight of which `to_tensors` gave these, of the class that has the format in the texts.

        Raises:
            ValueError, TypeError: no class has it, or something is missing or does not fit.
        """
        check_texts(texts, "format")
        format = texts["format"]
        for kind in PackedWeight.KINDS:
            if format in kind.FORMATS:
                return kind.from_tensors(tensors, texts, prefix)
        known = ", ".join(name for kind in PackedWeight.KINDS for name in kind.FORMATS)
        raise ValueError(f"from_tensors: format is {format!r}; it must be one of {known}")

    @abstractmethod
    def about(self) -> dict[str, Any]:
        """The properties, except tensors' shapes and types, in which two weights must agree for one to be copied into
        the other.
        """

    @property
    @abstractmethod
    def form(self) -> str:
        """The stored form of the weight, for the `repr` of modules."""

    # --- as values -------------------------------------------------------------------------------------------------

    def parts(self) -> dict[str, Tensor]:
        """The tensors that there are, by name."""
        return {name: value for name in self.INNER if (value := getattr(self, name)) is not None}

    def unscaled(self) -> Self:
        """The weight without its `channel`."""
        return self if self.channel is None else self.with_parts(self.parts() | {"channel": None})

    def unpermuted(self) -> Self:
        """The weight with its columns in the order in which they are stored."""
        return self.with_parts(self.parts() | {"permutation": None})

    def shard(self, dim: int, index: int, count: int) -> Self:
        """Part `index` of `count` equal parts, for tensor parallelism.

        Args:
            dim: -2 for rows (N: column parallel in torch's terms) or -1 for columns (K: row parallel), or the same
                counted from the front.
            index: the index of the part.
            count: the number of parts. A `QuantizedTensor` can be split at multiples of 16 rows, or of the columns of a
                block of words and of a group (64 columns for 4 bits in groups of up to 64, 128 in groups of 128); a
                `SparseTensor` at multiples of 32 rows, or of 64 columns and whole groups.

        Returns:
            A separate weight, (*batch, N / count, K) or (*batch, N, K / count).

        Raises:
            ValueError: the weight can't be split there, or a permutation moves columns from one part into another.

        Example:
            >>> import torch, gemmery
            >>> w = gemmery.quantize(torch.randn(64, 256), "int4", group_size=64)
            >>> w.shard(-1, 1, 4).shape
            torch.Size([64, 64])
        """
        for name, value in (("dim", dim), ("index", index), ("count", count)):
            if isinstance(value, bool) or not isinstance(value, int):
                raise TypeError(f"shard: {name} is {value!r}; it must be an int")
        axis = dim if dim < 0 else dim - self.ndim
        if axis not in (-2, -1):
            raise ValueError(
                f"shard: dim is {dim} of {self!r}; it must be -2 (rows) or -1 (columns), or "
                f"{self.ndim - 2} or {self.ndim - 1}"
            )
        if count < 1 or not 0 <= index < count:
            raise ValueError(f"shard: index is {index} and count {count}; it must be 0 <= index < count")
        size = self.shape[axis]
        if size % count:
            what = "rows" if axis == -2 else "columns"
            raise ValueError(f"shard: {size} {what} of {self!r} can't be split into {count} equal parts")
        part = size // count
        cut = self.cut_rows if axis == -2 else self.cut_columns
        return cut(index * part, (index + 1) * part, "shard")

    @property
    def nbytes(self) -> int:  # type: ignore[override]
        """The bytes of all tensors of the weight."""
        # Under torch.compile sizes may be symbols, of which torch's own can't tell.
        return sum(x.numel() * x.element_size() for x in self.parts().values())

    # --- copies and files --------------------------------------------------------------------------------------------

    def _extras(self) -> dict[str, Any]:
        """The attributes that others have set on the weight, such as that it is a parameter."""
        return {name: value for name, value in self.__dict__.items() if name not in self.OWN}

    def storage(self) -> Any:
        """Raises an error, since a packed weight consists of several tensors.

        Raises:
            ValueError: always. Functions that write files ask for it, such as a Hugging Face model's `save_pretrained`.
        """
        raise ValueError(
            f"{self!r} has no storage of its own: save_pretrained and safetensors' own functions can't write packed "
            "weights. Write the state dict with gemmery.formats.save_safetensors(file, model.state_dict()), or with "
            "torch.save. A model of transformers that from_pretrained quantized, with "
            "gemmery.nn.transformers.GemmeryConfig, can be saved by save_pretrained"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        if id(self) in memo:
            return memo[id(self)]  # type: ignore[no-any-return]
        memo[id(self)] = result = self.detach().clone()
        result.__dict__.update(copy.deepcopy(self._extras(), memo))
        return result  # type: ignore[return-value]

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        tensors, texts = self.to_tensors()
        return self._restore, (tensors, texts, self._extras())

    # --- to torch ----------------------------------------------------------------------------------------------------

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in TORCH_FUNCTIONS:
            return TORCH_FUNCTIONS[func](*args, **(kwargs or {}))
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch's is not a class method
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return aten.call(cls, func, args, kwargs or {})


def check_strided(caller: str, name: str, value: Tensor) -> None:
    """TypeError for a tensor of one of torch's own sparse layouts."""
    if value.layout != torch.strided:
        raise TypeError(
            f"{caller}: {name} is sparse ({value.layout}); it must be a strided tensor, such as its to_dense()"
        )


def check_whole(caller: str, name: str, value: Tensor) -> None:
    """TypeError for a weight that is sharded: a DTensor, or a packed weight of DTensors."""
    parts = value.parts().values() if isinstance(value, PackedWeight) else (value,)
    if is_sharded(parts):
        raise TypeError(
            f"{caller}: {name} is sharded (a DTensor); give the whole weight, and shard the result with "
            "gemmery.distributed.distribute_weight, or change the model before it is sharded"
        )


# ---------------------------------------------------------------------------------------------------------------------
# Texts of files


def shape_of_text(text: str) -> tuple[int, ...]:
    """The shape that a text of `to_tensors` says."""
    sizes = parse_json(text, "from_tensors: shape")
    if not isinstance(sizes, list) or not all(type(size) is int and size >= 0 for size in sizes):
        raise ValueError(f"from_tensors: shape is {text!r}; it must be a list of sizes")
    return tuple(sizes)


def dtype_of_text(text: str) -> torch.dtype:
    """The type that a text of `to_tensors` says."""
    dtype = next((x for x in DTYPES if str(x) == f"torch.{text}"), None)
    if dtype is None:
        raise ValueError(f"from_tensors: dtype is {text!r}; it must be float16 or bfloat16")
    return dtype


def number_of_text(name: str, text: str) -> int:
    """The integer in a text of `to_tensors`."""
    if not (text.isascii() and text.isdigit() and len(text) < 10):
        raise ValueError(f"from_tensors: {name} is {text!r}; it must be a whole number")
    return int(text)


def check_texts(texts: Mapping[str, str], *names: str) -> None:
    """An error about texts of `to_tensors` that are missing, or are none."""
    if missing := set(names) - texts.keys():
        raise ValueError(f"from_tensors: the texts have no {', '.join(sorted(missing))}")
    if wrong := [name for name, text in texts.items() if not isinstance(text, str)]:
        raise TypeError(f"from_tensors: {wrong[0]} is {texts[wrong[0]]!r}; it must be a text")


# ---------------------------------------------------------------------------------------------------------------------
# Functions of torch


def _set_requires_grad(self: PackedWeight, requires_grad: bool = True) -> PackedWeight:
    if requires_grad:
        raise ValueError(
            f"requires_grad: {self!r} has no gradient; make parameters of it with requires_grad=False"
        )
    return self


def _set_data(self: PackedWeight, data: Any) -> None:
    """`weight.data = other`, which for a wrapper would be lost: torch knows of no parts."""
    if type(data) is not type(self):
        raise TypeError(f"data: a {type(data).__name__} can't be the data of {self!r}; see {self.made_by}")
    if (data.shape, data.dtype, data.device) != (self.shape, self.dtype, self.device):
        raise ValueError(
            f"data: {data!r} can't be that of {self!r}: shape, dtype and device must be the same"
        )
    for name in self.OWN:
        setattr(self, name, getattr(data, name))


def _share_memory(self: PackedWeight) -> PackedWeight:
    for part in self.parts().values():
        part.share_memory_()
    return self


def _to_dense(
    self: PackedWeight, dtype: torch.dtype | None = None, *, masked_grad: bool | None = None
) -> Tensor:
    """torch's method treats a wrapper as a dense tensor, and returns it unchanged."""
    found: Tensor = getattr(self, self.plain)(dtype)
    return found


#: torch's functions that packed weights override. Those that multiply are added where products
#: are made, in `gemmery.api`.
TORCH_FUNCTIONS: dict[Any, Callable[..., Any]] = {
    Tensor.data.__set__: _set_data,  # type: ignore[attr-defined]
    Tensor.share_memory_: _share_memory,
    Tensor.to_dense: _to_dense,
    Tensor.requires_grad_: _set_requires_grad,
    Tensor.requires_grad.__set__: _set_requires_grad,  # type: ignore[attr-defined]
}
