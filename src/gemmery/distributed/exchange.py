"""The memory through which the ranks of a process group exchange rows and partial sums.

GPUs of one host with access to each other's memory use torch's symmetric memory. Processes that run Triton's
interpreter share files. See `kernels.ranks` and `kernels.shards`.
"""

from __future__ import annotations

import math
import os
import socket
import tempfile
import warnings
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
import triton
from torch import Tensor

from .. import __version__, devices
from ..kernels.ranks import EMPTY
from ..memo import keep
from ..operands import Exchange

#: The most ranks of an exchange: the GPUs of one host.
MOST_RANKS = 8
#: Microseconds that a kernel counts in a second, in the interpreter.
KERNEL_MICROSECONDS = 2000


class Kind(NamedTuple):
    """A kind of memory. Sizes are powers of two.

    Attributes:
        least, most: the initial size, and the largest one.
        words: 32-bit words of a rank's buffer, given how many ranks there are and the size.
        counters: of a rank, given the size.
        content: the initial value of all words.
    """

    name: str
    least: int
    most: int
    words: Callable[[int, int], int]
    counters: Callable[[int], int]
    content: int


def _flagged(name: str) -> Kind:
    """A kind whose size is in 32-bit words; two numbers for each rank follow them, see `Numbers`."""
    return Kind(name, 1 << 20, 1 << 28, lambda n, size: size + 2 * n, lambda size: 1, 0)


#: For partial sums that all ranks add up: the size is the number of places of the product, see `Exchange`.
SUMS = Kind("sums", 1 << 20, 1 << 23, lambda n, size: 2 * n * size, lambda size: size // 64 + 1, EMPTY.value)
#: For the rows of all ranks, for sums of a rank's rows that it receives, and for results of a rank's rows.
ROWS, PARTIALS, RESULTS = _flagged("rows"), _flagged("partial sums"), _flagged("results")


class Seconds:
    """The time that a kernel waits for another rank; see `set_timeout`."""

    timeout = 30.0


def set_timeout(seconds: float) -> None:
    """Set how long the kernels of this module's products wait for another rank; the default is 30 seconds.

    The time is approximate, and a product waits up to three times for a rank that does not come. If a rank arrives
    later, the results are wrong, and the next call, or `gemmery.distributed.check`, raises an error on the ranks that
    waited for it.

    Args:
        seconds: above 0, and finite.

    Raises:
        ValueError: `seconds` is not above 0 and finite.
    """
    if not 0 < seconds < math.inf:
        raise ValueError(f"set_timeout: seconds is {seconds}; it must be above 0 and finite")
    Seconds.timeout = seconds


@dataclass
class Memory:
    """A group's buffers, of one kind and size, and their owner.

    Attributes:
        buffers: one of each rank, of `Kind.words` int32, each of which all ranks can write.
        counters: of `Kind.counters` int32, of this rank.
        failures: of one element, which the GPU can write and the host can read.
        owner: an object that keeps the buffers of other ranks mapped.
        views: objects made from the buffers, and kept with them.
    """

    buffers: tuple[Tensor, ...]
    counters: Tensor
    failures: Tensor
    owner: Any
    size: int
    views: dict[Any, Any] = field(default_factory=dict)
    failed: np.ndarray[Any, Any] = field(init=False)

    def __post_init__(self) -> None:
        self.failed = self.failures.numpy()

    def view(self, key: Any, make: Callable[[], Any]) -> Any:
        """The object that belongs to a key, one for each size of a product; it is made at the first call."""
        found = self.views.get(key)
        return keep(self.views, key, make()) if found is None else found


class Beside:
    """A context whose work on the GPU runs in parallel with later work, until `join`."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._stream = device.index, torch.cuda.Stream(device)
        #: Events: the data is ready, and has been sent.
        self._ready, self._sent = torch.cuda.Event(), torch.cuda.Event()
        self._outer = self._stream

    def __enter__(self) -> None:
        self._outer = torch.cuda.current_stream(self._device)
        self._ready.record(self._outer)
        self._stream.wait_event(self._ready)
        torch.cuda.set_stream(self._stream)

    def __exit__(self, *error: object) -> None:
        self._sent.record(self._stream)
        torch.cuda.set_stream(self._outer)

    def join(self) -> None:
        """Makes later work of the stream in which the context was entered wait for the context's work."""
        self._outer.wait_event(self._sent)


class Shared:
    """The memory of a process group for exchanges on one device.

    Attributes:
        rank, ranks: this rank, and how many there are.
        works: whether the ranks can reach each other's memory.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        # This must not keep the group alive.
        self._group, self.device = weakref.ref(group), device
        self.rank, self.ranks = dist.get_rank(group), dist.get_world_size(group)
        self.works = self.ranks <= MOST_RANKS and self._reachable()
        #: By the kind's name. Memory of earlier sizes is kept, too: a captured graph may use it.
        self._memories: dict[str, list[Memory]] = {}
        self._beside = Beside(device) if self.device.type == "cuda" else None

    @property
    def group(self) -> dist.ProcessGroup:
        """The process group, which exists as long as it is in use."""
        group = self._group()
        assert group is not None
        return group

    def beside(self) -> AbstractContextManager[None]:
        """A context whose work runs in parallel with later work, until `join`; on a CPU, it runs at once."""
        return self._beside or nullcontext()

    def join(self) -> None:
        """Makes later work wait for the work in the last context of `beside`."""
        if self._beside is not None:
            self._beside.join()

    @property
    def patience(self) -> int:
        """The time that kernels wait, in the kernels' unit."""
        each = KERNEL_MICROSECONDS if devices.INTERPRETED else 1_000_000
        return min(max(round(Seconds.timeout * each), 2), (1 << 31) - 1)

    def _reachable(self) -> bool:
        """Whether all ranks have the same GPU and host, and can write each other's memory; the same answer on all."""
        name = torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else ""
        # Ranks must choose the same kernels.
        alike = (name, triton.__version__, torch.__version__, __version__)
        own = (socket.gethostname(), self.device.type, self.device.index, (devices.INTERPRETED, alike))
        found: list[Any] = [None] * self.ranks
        dist.all_gather_object(found, own, group=self.group)
        if any(x[0] != own[0] or x[1] != own[1] or x[3] != own[3] for x in found):
            return False
        if devices.INTERPRETED:
            return self.device.type == "cpu"
        if self.device.type != "cuda" or torch.version.hip is not None:
            return False
        others = [x[2] for x in found if x[2] != self.device.index]
        can = len(others) == self.ranks - 1 and all(
            i < torch.cuda.device_count() and torch.cuda.can_device_access_peer(self.device.index, i)
            for i in others
        )
        answers: list[Any] = [None] * self.ranks
        dist.all_gather_object(answers, can, group=self.group)
        return all(answers)

    def exchange(self, op: str, places: int) -> Exchange:
        """Memory with this many places for a product; see `memory`."""
        memory = self.memory(op, SUMS, places)
        return Exchange(
            memory.buffers, memory.counters, self.rank, memory.size, memory.failures.data_ptr(), self.patience
        )

    def memory(self, op: str, kind: Kind, size: int) -> Memory:
        """Memory of a kind and at least a size. If it has to grow, all ranks call this together.

        Raises:
            RuntimeError: an exchange failed, or memory would have to be allocated while a graph is captured.
        """
        self.check(op)
        found = self._memories.get(kind.name)
        if found and found[-1].size >= size:
            return found[-1]
        return self._grow(op, kind, size)

    def give_up(self) -> None:
        """Makes later calls raise an error, since this rank did not send data for which the others wait."""
        for memories in self._memories.values():
            for memory in memories:
                memory.failed[0] = 1 + self.rank

    def check(self, op: str) -> None:
        """Raises RuntimeError if a rank did not arrive at an exchange."""
        for memories in self._memories.values():
            for memory in memories:
                if memory.failed[0]:
                    raise RuntimeError(f"{op}: {self._failure(int(memory.failed[0]) - 1)}")

    def _failure(self, rank: int) -> str:
        if rank == self.rank:
            return (
                "an earlier call failed on this rank, and the others waited in vain; this process group can't be used "
                "for such products any more"
            )
        return (
            f"rank {rank} of the group did not arrive within about {Seconds.timeout:g} seconds "
            "(gemmery.distributed.set_timeout), and the results since then are wrong; this process group can't be used "
            "for such products any more"
        )

    def _grow(self, op: str, kind: Kind, size: int) -> Memory:
        if self.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                f"{op}: memory of all ranks can't be allocated while a graph is captured; call it once before, with as "
                "large a product"
            )
        size = max(kind.least, 1 << (size - 1).bit_length())
        make = _shared_files if self.device.type == "cpu" else _symmetric
        # Tensors of inference mode could not be written outside of it.
        with torch.inference_mode(False):
            memory = make(self, kind, size)
        self._memories.setdefault(kind.name, []).append(memory)
        return memory


def _symmetric(shared: Shared, kind: Kind, size: int) -> Memory:
    """Memory of GPUs."""
    import torch.distributed._symmetric_memory as symmetric

    count = kind.words(shared.ranks, size)
    with torch.cuda.device(shared.device):
        own = symmetric.empty(count, dtype=torch.int32, device=shared.device)
        own.fill_(kind.content)
        counters = torch.zeros(kind.counters(size), dtype=torch.int32, device=shared.device)
        failures = torch.zeros(1, dtype=torch.int32, pin_memory=True)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            handle = symmetric.rendezvous(own, shared.group.group_name)
        torch.cuda.synchronize(shared.device)
        # No rank stores before all memory has its initial content.
        dist.barrier(shared.group)
        buffers = tuple([handle.get_buffer(rank, (count,), torch.int32) for rank in range(shared.ranks)])
    return Memory(buffers, counters, failures, (own, handle), size)


def _shared_files(shared: Shared, kind: Kind, size: int) -> Memory:
    """Memory of processes on one machine."""
    count = kind.words(shared.ranks, size)
    handle, own = tempfile.mkstemp(prefix="gemmery-exchange-")
    os.close(handle)
    mine = torch.from_file(own, shared=True, size=count, dtype=torch.int32)
    mine.fill_(kind.content)
    names: list[Any] = [None] * shared.ranks
    try:
        dist.all_gather_object(names, own, group=shared.group)
        buffers = tuple([
            mine if rank == shared.rank else torch.from_file(name, shared=True, size=count, dtype=torch.int32)
            for rank, name in enumerate(names)
        ])  # fmt: skip
        dist.barrier(shared.group)
    finally:
        os.unlink(own)
    counters = torch.zeros(kind.counters(size), dtype=torch.int32)
    return Memory(buffers, counters, torch.zeros(1, dtype=torch.int32), None, size)


_Devices = dict[torch.device, Shared]
_shared: weakref.WeakKeyDictionary[dist.ProcessGroup, _Devices] = weakref.WeakKeyDictionary()


def shared_by(group: dist.ProcessGroup, device: torch.device) -> Shared:
    """The memory of a group on a device; all ranks make the first call together."""
    of_group = _shared.get(group)
    if of_group is None:
        of_group = _shared[group] = {}
    found = of_group.get(device)
    if found is None:
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "a product of several ranks is captured into a graph before any other of its group; call it once "
                "before, with as large a product"
            )
        found = of_group[device] = Shared(group, device)
    return found


def check() -> None:
    """Wait for the GPU, and raise an error if a rank did not arrive at a product of this module.

    Raises:
        RuntimeError: a rank sent nothing within the time of `set_timeout`; the message names the rank.
    """
    for of_group in list(_shared.values()):
        for device, found in of_group.items():
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            found.check("check")
