"""A fast launch: everything that the launches of a plan share is prepared once.

At every launch Triton binds and specializes the arguments, looks the kernel up and encodes a tensor map for each
descriptor. The launches of a plan differ only in addresses and numbers. So the arguments are prepared once in the form
that Triton's C function takes. A launch fills in the addresses and calls that function; tensor maps are cached by
address.

The C function is not a public interface. `_ENTRIES` lists the versions of Triton whose function is known. With any
other version, also a newer one, on AMD, for instrumented kernels, and for kernels with scratch memory, `prepare`
returns None, and plans launch on the ordinary path. Launches with a launch hook do, too.
"""

from __future__ import annotations

import copy
import inspect
import types
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from ..schedules.cluster_launch import in_clusters
from ..schedules.workspace import WORKSPACES

#: Launches, given the addresses of a launch's tensors, in the order of `Problem.layouts`, and its numbers; returns
#: False if the launch must take the ordinary path.
Launch = Callable[..., bool]
#: Calls Triton's C function with a stream and the kernel's arguments.
_Enter = Callable[[int, list[Any]], None]

#: The most addresses with cached tensor maps for one matrix, and the most numbers with cached arguments for one plan.
_MAPS, _NUMBERS = 512, 64


class Fixed(Protocol):
    """A kernel with everything fixed but its tensors and numbers: a `Binding`, or a `bound.Bound`.

    Attributes:
        kernel: the `@triton.jit` function.
        grid: programs along x, y, z, or clusters of programs.
        cluster: programs of a cluster.
        takes_numbers: whether numbers come with every launch.
        split: how tiles are cut along K; None if there is no workspace.
        workspace_size: see `Binding.workspace_size`.
    """

    kernel: Any

    @property
    def grid(self) -> tuple[int, int, int]: ...  # noqa: D102
    @property
    def cluster(self) -> int: ...  # noqa: D102
    @property
    def takes_numbers(self) -> bool: ...  # noqa: D102
    @property
    def split(self) -> Any: ...  # noqa: D102
    @property
    def workspace_size(self) -> tuple[int, int]: ...  # noqa: D102

    def direct_arguments(self, tensors: Sequence[Any], numbers: Sequence[float] = ()) -> Sequence[Any]:
        """The kernel's run-time arguments, in which a descriptor may have another box; see `Binding`."""


class _Unsuitable(Exception):
    """The arguments are of a kind that cannot be prepared."""


# ---------------------------------------------------------------------------------------------------------------------
# Tensor maps


class _Address:
    """Takes the place of a tensor where Triton only asks for an address."""

    def __init__(self, address: int) -> None:
        self.address = address

    def data_ptr(self) -> int:
        return self.address


class TensorMaps(dict[int, Any]):
    """A cache of one matrix's tensor maps by address. They are made on demand; a full cache drops all.

    A map depends on nothing else. It stays valid when the memory is freed and reused for another tensor of that
    layout.
    """

    def __init__(self, descriptor: TensorDescriptor, encode: Callable[[TensorDescriptor], Any]) -> None:
        super().__init__()
        self._descriptor, self._encode = descriptor, encode

    def __missing__(self, address: int) -> Any:
        if len(self) >= _MAPS:
            self.clear()
        descriptor = copy.copy(self._descriptor)
        descriptor.base = _Address(address)
        encoded = self[address] = self._encode(descriptor)
        return encoded


#: Plans for different M share the maps of their weights.
_shared: weakref.WeakValueDictionary[str, TensorMaps] = weakref.WeakValueDictionary()


def _maps(descriptor: TensorDescriptor, note: Any, expand: Callable[..., list[Any]]) -> TensorMaps:
    layout = copy.copy(descriptor)
    layout.base = None
    key = f"{layout} {note}"
    found = _shared.get(key)
    if found is None:
        found = _shared[key] = TensorMaps(layout, lambda descriptor: expand(descriptor, note)[0])
    return found


# ---------------------------------------------------------------------------------------------------------------------
# Arguments laid out ahead


@dataclass
class Arguments:
    """A kernel's arguments as the C function takes them, and the places of those that differ between launches.

    Attributes:
        values: all arguments, with None where an address or a tensor map belongs.
        addresses: (position, source) of each pointer; sources are counted as the launch's tensors are, the workspace's
            after them.
        maps: (position, source, maps) of each tensor map.
        tuples: (position, elements, ((index, source), ...)) of each tuple with pointers in it.
    """

    values: list[Any] = field(default_factory=list)
    addresses: list[tuple[int, int]] = field(default_factory=list)
    maps: list[tuple[int, int, TensorMaps]] = field(default_factory=list)
    tuples: list[tuple[int, list[Any], tuple[tuple[int, int], ...]]] = field(default_factory=list)


class _Layouter:
    """Prepares arguments for one version's C function.

    Args:
        sources: meta proxies of the launch's tensors. Each is a separate object, by which its tensor is recognized.
            Other tensors among the arguments are the workspace's, in its order.
        expand: turns a descriptor and the compiler's note about it into Triton's arguments: the tensor map, then
            integers.
        notes: the compiler's note about each descriptor, in order.
        nested: whether tuples stay tuples and constants keep their places. Otherwise all arguments are one flat list
            without constants.
    """

    def __init__(
        self, sources: tuple[Any, ...], expand: Callable[..., list[Any]], notes: Any, nested: bool
    ) -> None:
        self.sources, self.expand, self.notes, self.nested = list(sources), expand, iter(notes or ()), nested
        self.laid = Arguments()

    def source(self, value: Any) -> int | None:
        """The number of the tensor that an argument is; None for other arguments."""
        if not isinstance(value, Tensor):
            return None
        for i, known in enumerate(self.sources):
            if value is known:
                return i
        self.sources.append(value)
        return len(self.sources) - 1

    def add(self, value: Any, kind: Any) -> None:
        """Lay out one argument of the type that the compiled kernel's signature gives."""
        values = self.laid.values
        if isinstance(kind, tuple):
            self._add_tuple(value, kind)
        elif kind == "constexpr":
            values.extend([None] if self.nested else [])
        elif kind.startswith("tensordesc"):
            self._add_descriptor(value)
        else:
            source = self.source(value)
            if source is not None:
                self.laid.addresses.append((len(values), source))
            values.append(value if source is None else None)

    def _add_tuple(self, value: Any, kind: tuple[Any, ...]) -> None:
        if not self.nested:
            for element, its_kind in zip(value, kind, strict=True):
                self.add(element, its_kind)
            return
        if any(_holds_tensor(element) for element in value):
            raise _Unsuitable
        found = [(i, self.source(element)) for i, element in enumerate(value)]
        places = tuple((i, source) for i, source in found if source is not None)
        if places:
            inside = {i for i, _ in places}
            elements = [None if i in inside else element for i, element in enumerate(value)]
            self.laid.tuples.append((len(self.laid.values), elements, places))
        self.laid.values.append(None if places else value)

    def _add_descriptor(self, descriptor: TensorDescriptor) -> None:
        source, note = self.source(descriptor.base), next(self.notes, None)
        # Without the compiler's note, the kernel takes a pointer and offsets, which gemmery never uses.
        if source is None or note is None:
            raise _Unsuitable
        # See `Binding.direct_arguments`.
        box = getattr(descriptor, "box", None)
        if box is not None:
            note = {**note, "block_size": box}
        self.laid.maps.append((len(self.laid.values), source, _maps(descriptor, note, self.expand)))
        self.laid.values += [None, *descriptor.shape, *descriptor.strides]


def _holds_tensor(value: Any) -> bool:
    """Whether a value is a tuple that contains a tensor at any depth."""
    return isinstance(value, tuple) and any(isinstance(x, Tensor) or _holds_tensor(x) for x in value)


# ---------------------------------------------------------------------------------------------------------------------
# Versions of Triton


@dataclass(frozen=True)
class Entry:
    """The entry into the launcher of a version of Triton.

    Attributes:
        enter: returns the function that launches a compiled kernel over a grid, in clusters of some programs; None for
            an unknown launcher.
        nested: see `_Layouter`.
        module: names that Triton's module for NVIDIA's driver must have.
        launcher: names that a kernel's launcher must have.
        called: the parameters by which Triton calls a launcher, without the kernel's arguments. A build between two
            versions has the number of one of them, but may have another launcher.
    """

    enter: Callable[[Any, tuple[int, int, int], int], _Enter | None]
    nested: bool
    module: tuple[str, ...]
    launcher: tuple[str, ...]
    called: tuple[str, ...]


def _enter_own_module(compiled: Any, grid: tuple[int, int, int], cluster: int) -> _Enter | None:
    """Triton 3.6: a C module per signature, whose function takes the kernel's arguments as its own."""
    launcher = compiled.run
    launch = launcher.launch
    if isinstance(launch, types.FunctionType):
        # A function that encodes descriptors, and holds the C function in a closure.
        cells = dict(zip(launch.__code__.co_freevars, launch.__closure__ or (), strict=True))
        if "launcher" not in cells:
            return None
        launch = cells["launcher"].cell_contents
    x, y, z = grid
    function, packed = compiled.function, in_clusters(compiled, cluster)
    cooperative, dependent = launcher.launch_cooperative_grid, launcher.launch_pdl

    def enter(stream: int, values: list[Any]) -> None:
        launch(
            x, y, z, stream, function, cooperative, dependent, None, None, packed, None, None, None, *values
        )

    return enter


def _enter_shared_function(compiled: Any, grid: tuple[int, int, int], cluster: int) -> _Enter | None:
    """Triton 3.7 to 3.9: one C function for all kernels, which reads a list of arguments by a description of them."""
    from triton.backends.nvidia import driver

    launcher = compiled.run
    launch = getattr(triton.runtime.driver.active.utils, "launch", None)
    if launch is None:
        return None
    signature = launcher.kernel_signature
    # The launcher's own description is of nested tuples; here the arguments come as one flat list.
    annotations = [driver.PyKernelArg(nested_tuple=None, type=driver.ARG_KERNEL)] * len(signature)
    x, y, z = grid
    function, packed = compiled.function, in_clusters(compiled, cluster)
    cooperative, dependent = launcher.launch_cooperative_grid, launcher.launch_pdl

    def enter(stream: int, values: list[Any]) -> None:
        launch(
            x, y, z, stream, function, cooperative, dependent, packed, None, None, None, None, None,
            annotations, signature, values,
        )  # fmt: skip

    return enter


_CALLED = ("self", "gridX", "gridY", "gridZ", "stream", "function")
_OWN_MODULE = Entry(
    _enter_own_module, nested=True, module=("CudaLauncher", "make_tensordesc_arg"), launcher=("launch",),
    called=_CALLED,
)  # fmt: skip
_SHARED_FUNCTION = Entry(
    _enter_shared_function, nested=False,
    module=("CudaLauncher", "make_tensordesc_arg", "PyKernelArg", "ARG_KERNEL"), launcher=("kernel_signature",),
    called=(*_CALLED, "kernel_metadata", "launch_metadata", "launch_enter_hook", "launch_exit_hook"),
)  # fmt: skip
#: The versions that are known, by their first two numbers.
_ENTRIES = {
    "3.6": _OWN_MODULE,
    "3.7": _SHARED_FUNCTION,
    "3.8": _SHARED_FUNCTION,
    "3.9": _SHARED_FUNCTION,
}


def entry() -> Entry | None:
    """The entry into this Triton's launcher; None if it is not known."""
    known = _ENTRIES.get(".".join(triton.__version__.split(".")[:2]))
    if known is None or torch.version.hip is not None:
        return None
    from triton.backends.nvidia import driver

    if not all(hasattr(driver, name) for name in known.module):
        return None
    call = getattr(driver.CudaLauncher.__call__, "__code__", None)
    return known if call is not None and call.co_varnames[: call.co_argcount] == known.called else None


def _suits(entry: Entry, launcher: Any) -> bool:
    """Whether a kernel's launcher is the known one for NVIDIA, and only launches the kernel."""
    from triton.backends.nvidia import driver

    names = (*entry.launcher, "launch_cooperative_grid", "launch_pdl")
    return (
        type(launcher) is driver.CudaLauncher
        and all(hasattr(launcher, name) for name in names)
        and getattr(launcher, "global_scratch_size", None) == 0
        and getattr(launcher, "profile_scratch_size", None) == 0
        and not getattr(launcher, "gsan_enabled", False)
    )


def _expander() -> Callable[..., list[Any]]:
    """Triton's arguments for a descriptor and the compiler's note about it: the tensor map, then integers."""
    from triton.backends.nvidia import driver

    # Newer versions also pass a launch's other arguments, and do not read them.
    unread = [None] * (len(inspect.signature(driver.make_tensordesc_arg).parameters) - 2)
    active = triton.runtime.driver.active

    def expand(descriptor: TensorDescriptor, note: Any) -> list[Any]:
        # Encoding needs a CUDA context, which a new thread does not have.
        active.set_current_device(active.get_current_device())
        made: list[Any] = driver.make_tensordesc_arg(descriptor, note, *unread)
        return made

    return expand


# ---------------------------------------------------------------------------------------------------------------------
# Launches


def _meta_proxy(tensor: Tensor) -> Tensor:
    """A tensor of the same layout without memory. It is a new object, even if one tensor is passed twice."""
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def lay_out(
    entry: Entry, binding: Fixed, compiled: Any, proxies: tuple[Any, ...], numbers: tuple[float, ...]
) -> Arguments | None:
    """The arguments of a compiled kernel, given meta proxies of its tensors; None if they cannot be prepared."""
    arguments = binding.direct_arguments(proxies, numbers)
    values = dict(zip(binding.kernel.arg_names, arguments, strict=False))
    notes = getattr(compiled.metadata, "tensordesc_meta", None)
    layouter = _Layouter(proxies, _expander(), notes, entry.nested)
    try:
        for name, kind in compiled.src.signature.items():
            layouter.add(values.get(name), kind)
    except _Unsuitable:
        return None
    complete = entry.nested or len(layouter.laid.values) == len(compiled.run.kernel_signature)
    known = len(layouter.sources) == len(proxies) + (0 if binding.split is None else 2)
    return layouter.laid if complete and known else None


def prepare(
    binding: Fixed, compiled: Any, index: int, tensors: Sequence[Tensor], numbers: tuple[float, ...]
) -> Launch | None:
    """The fast launch of a compiled kernel on GPU number `index`; None if there is none.

    Args:
        tensors, numbers: of the first launch; see `Binding.arguments`.
    """
    known = entry()
    if known is None or not _suits(known, compiled.run):
        return None
    enter = known.enter(compiled, binding.grid, binding.cluster)
    if enter is None:
        return None
    proxies = tuple(map(_meta_proxy, tensors))

    def laid_out(numbers: tuple[float, ...]) -> Arguments | None:
        return lay_out(known, binding, compiled, proxies, numbers)

    first = laid_out(numbers)
    if first is None:
        return None
    by_numbers = _by_numbers(laid_out) if binding.takes_numbers else None
    workspace_size = None if binding.split is None else binding.workspace_size
    launch = _launch(index, enter, first, by_numbers, workspace_size, binding.kernel.pre_run_hooks)
    # Newer versions unload the code of a compiled kernel that is no longer referenced.
    launch.__dict__["compiled"] = compiled
    return launch


def _by_numbers(laid_out: Callable[..., Arguments | None]) -> Callable[..., Any]:
    """`laid_out` with a cache."""
    kept: dict[Any, Any] = {}

    def arguments(numbers: tuple[float, ...]) -> Any:
        # Zeros of different signs are distinguished, which a comparison does not do.
        key = tuple([number or str(number) for number in numbers])
        found = kept.get(key)
        if found is None:
            if len(kept) >= _NUMBERS:
                kept.clear()
            found = kept[key] = laid_out(numbers)
        return found

    return arguments


def _launch(
    index: int, enter: _Enter, fixed: Arguments, by_numbers: Callable[..., Any] | None,
    workspace_size: tuple[int, int] | None, hooks: list[Any],
) -> Launch:  # fmt: skip
    knobs, stream_of = triton.knobs.runtime, triton.runtime.driver.active.get_current_stream
    current = torch._C._cuda_getDevice if torch.cuda.device_count() > 1 else None

    def launch(sources: Sequence[int], numbers: tuple[float, ...] = ()) -> bool:
        # A hook is an object with a list of calls, or a function that a user has put in its place.
        if (
            getattr(knobs.launch_enter_hook, "calls", True)
            or getattr(knobs.launch_exit_hook, "calls", True)
            or hooks
        ):
            return False
        if current is not None and current() != index:
            with torch.cuda.device(index):
                return launch(sources, numbers)
        arguments = fixed if by_numbers is None else by_numbers(numbers)
        stream = stream_of(index)
        if workspace_size is not None:
            # Held until the launch is queued. Memory that is freed later is reused after the launch, on its stream.
            partials, arrivals = WORKSPACES.on_stream(index, stream, *workspace_size)
            sources = (*sources, partials.data_ptr(), arrivals.data_ptr())
        values = arguments.values.copy()
        for position, source, maps in arguments.maps:
            values[position] = maps[sources[source]]
        for position, source in arguments.addresses:
            values[position] = sources[source]
        for position, elements, places in arguments.tuples:
            filled = elements.copy()
            for place, source in places:
                filled[place] = sources[source]
            values[position] = tuple(filled)
        enter(stream, values)
        return True

    return launch
