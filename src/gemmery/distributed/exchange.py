"""The memory in which the ranks of a process group exchange partial sums; see `kernels.ranks`.

GPUs of one host with access to each other's memory have it through torch's symmetric memory, and processes that run
Triton's interpreter through files that they share.
"""

from __future__ import annotations

import math
import os
import socket
import tempfile
import warnings
import weakref
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import triton
from torch import Tensor

from .. import __version__, devices
from ..kernels.ranks import EMPTY
from ..operands import Exchange

#: Places for the largest product that ranks exchange: 32 MiB of partial sums for each pair of ranks, twice.
MOST = 1 << 23
#: Places that there are at first.
LEAST = 1 << 20
#: Ranks that exchange at most: the GPUs of one host.
MOST_RANKS = 8
#: Microseconds that a kernel counts in a second, in the interpreter.
KERNEL_MICROSECONDS = 2000


class Seconds:
    """How long a kernel waits for the partial sums of another rank; see `set_timeout`."""

    timeout = 30.0


def set_timeout(seconds: float) -> None:
    """Set how long the kernels of `matmul_all_reduce` wait for another rank, about; 30 seconds to begin with.

    A rank that is later has its partial sums left out. The results are NaN then, and the next call, or
    `gemmery.distributed.check`, raises an error on the ranks that have waited in vain.

    Args:
        seconds: above 0, and finite.

    Raises:
        ValueError: it is not.
    """
    if not 0 < seconds < math.inf:
        raise ValueError(f"set_timeout: seconds is {seconds}; it must be above 0 and finite")
    Seconds.timeout = seconds


@dataclass
class Memory:
    """A group's buffers, of one size, and what keeps them.

    Attributes:
        failures: of one element, which the GPU can write and the host can read.
        owner: what keeps the buffers of other ranks mapped.
    """

    buffers: tuple[Tensor, ...]
    uses: Tensor
    failures: Tensor
    owner: Any
    size: int
    failed: np.ndarray[Any, Any] = field(init=False)

    def __post_init__(self) -> None:
        self.failed = self.failures.numpy()


class Shared:
    """What a process group has for exchanges on one device.

    Attributes:
        rank, ranks: this rank, and how many there are.
        works: whether the ranks can reach each other's memory.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        # What is kept for a group must not keep it.
        self._group, self.device = weakref.ref(group), device
        self.rank, self.ranks = dist.get_rank(group), dist.get_world_size(group)
        self.works = self.ranks <= MOST_RANKS and self._reachable()
        #: Memory of earlier sizes is kept, too: a captured graph may use it.
        self._memories: list[Memory] = []

    @property
    def group(self) -> dist.ProcessGroup:
        """The process group, which is there as long as somebody uses it."""
        group = self._group()
        assert group is not None
        return group

    def _reachable(self) -> bool:
        """Whether all ranks are alike, of one host, and can write each other's memory; the same answer on all."""
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
        """Memory with so many places for a product; all ranks call this together where it has to grow.

        Raises:
            RuntimeError: an exchange failed, or memory has to be allocated while a graph is captured.
        """
        self.check(op)
        memory = self._memories[-1] if self._memories else None
        if memory is None or memory.size < places:
            memory = self._grow(op, places)
        each = KERNEL_MICROSECONDS if devices.INTERPRETED else 1_000_000
        patience = min(max(round(Seconds.timeout * each), 2), (1 << 31) - 1)
        return Exchange(
            memory.buffers, memory.uses, self.rank, memory.size, memory.failures.data_ptr(), patience
        )

    def give_up(self) -> None:
        """Have later calls raise an error, since this rank did not send what the others wait for."""
        for memory in self._memories:
            memory.failed[0] = 1 + self.rank

    def check(self, op: str) -> None:
        """RuntimeError if a rank did not arrive at an exchange."""
        for memory in self._memories:
            if memory.failed[0] == 1 + self.rank:
                raise RuntimeError(
                    f"{op}: an earlier call failed on this rank, and the others waited in vain; this process group "
                    "can't be used for such products any more"
                )
            if memory.failed[0]:
                raise RuntimeError(
                    f"{op}: rank {memory.failed[0] - 1} of the group did not arrive within about {Seconds.timeout:g} "
                    "seconds (gemmery.distributed.set_timeout), and the results since then are NaN; this process group "
                    "can't be used for such products any more"
                )

    def _grow(self, op: str, places: int) -> Memory:
        if self.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                f"{op}: memory of all ranks can't be allocated while a graph is captured; call it once before, with as "
                "large a product"
            )
        size = max(LEAST, 1 << (places - 1).bit_length())
        make = _shared_files if self.device.type == "cpu" else _symmetric
        memory = make(self, size)
        self._memories.append(memory)
        return memory


def _symmetric(shared: Shared, size: int) -> Memory:
    """Memory of GPUs."""
    import torch.distributed._symmetric_memory as symmetric

    count = 2 * shared.ranks * size
    with torch.cuda.device(shared.device):
        own = symmetric.empty(count, dtype=torch.int32, device=shared.device)
        own.fill_(EMPTY.value)
        uses = torch.zeros(size // 64 + 1, dtype=torch.int32, device=shared.device)
        failures = torch.zeros(1, dtype=torch.int32, pin_memory=True)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            handle = symmetric.rendezvous(own, shared.group.group_name)
        torch.cuda.synchronize(shared.device)
        # Nobody stores before all places are empty.
        dist.barrier(shared.group)
        buffers = tuple([handle.get_buffer(rank, (count,), torch.int32) for rank in range(shared.ranks)])
    return Memory(buffers, uses, failures, (own, handle), size)


def _shared_files(shared: Shared, size: int) -> Memory:
    """Memory of processes on one machine."""
    count = 2 * shared.ranks * size
    handle, own = tempfile.mkstemp(prefix="gemmery-exchange-")
    os.close(handle)
    mine = torch.from_file(own, shared=True, size=count, dtype=torch.int32)
    mine.fill_(EMPTY.value)
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
    uses, failures = torch.zeros(size // 64 + 1, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    return Memory(buffers, uses, failures, None, size)


_Devices = dict[torch.device, Shared]
_shared: weakref.WeakKeyDictionary[dist.ProcessGroup, _Devices] = weakref.WeakKeyDictionary()


def shared_by(group: dist.ProcessGroup, device: torch.device) -> Shared:
    """What a group has on a device; all ranks call this together the first time."""
    of_group = _shared.get(group)
    if of_group is None:
        of_group = _shared[group] = {}
    found = of_group.get(device)
    if found is None:
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "a product that is summed over ranks is captured into a graph before any other of its group; call it "
                "once before, with as large a product"
            )
        found = of_group[device] = Shared(group, device)
    return found


def check() -> None:
    """Wait for the GPU, and raise an error if a rank did not arrive at a product of `matmul_all_reduce`.

    Raises:
        RuntimeError: it says which rank, of which the kernels had no partial sums within the time of `set_timeout`.
    """
    for of_group in list(_shared.values()):
        for device, found in of_group.items():
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            found.check("check")
