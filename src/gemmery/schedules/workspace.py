"""Memory for the parts of tiles that are cut along K; see `kernels.parts`."""

from __future__ import annotations

import threading

import torch
from torch import Tensor

#: Counters of a stream's workspace, and of each launch that is captured: enough for most launches.
_COUNTERS = 1024
#: Launches whose counters are kept ready for capture into graphs, per device.
_RESERVED = 1024

Workspace = tuple[Tensor, Tensor]


class Workspaces:
    """One workspace per device and stream, where launches follow one another.

    A captured launch may be replayed on any stream, beside any other work. It gets memory from the graph's own pool,
    and counters that nothing else ever uses.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._buffers: dict[tuple[int, int], Workspace] = {}
        #: By device, the memory of counters for launches that are captured, and the counters that no graph has yet.
        self._reserved: dict[int, tuple[Tensor, list[Tensor]]] = {}

    def get(self, device: torch.device, size: int, counters: int) -> Workspace:
        """`size` bytes for parts, and int32 zeros for arrivals, free for the next launch on the current stream."""
        if device.type != "cuda":
            return torch.empty(size, dtype=torch.uint8, device=device), _zeros(counters, device)
        index = device.index if device.index is not None else torch.cuda.current_device()
        return self.on_stream(index, torch._C._cuda_getCurrentRawStream(index), size, counters)

    def on_stream(self, index: int, stream: int, size: int, counters: int) -> Workspace:
        """The same by the number of the current GPU and the handle of its current stream."""
        if torch.cuda.is_current_stream_capturing():
            device = torch.device("cuda", index)
            return torch.empty(size, dtype=torch.uint8, device=device), self._captured(index, counters)
        found = self._buffers.get((index, stream))
        if found is None or found[0].numel() < size or found[1].numel() < counters:
            with self._lock:
                found = self._grow((index, stream), torch.device("cuda", index), size, counters)
        return found

    def _grow(self, key: tuple[int, int], device: torch.device, size: int, counters: int) -> Workspace:
        # The allocator keeps the old buffers until the stream is done with them: they belong to this stream.
        old = self._buffers.get(key)
        if old is not None:
            size, counters = max(size, old[0].numel()), max(counters, old[1].numel())
        new = (torch.empty(size, dtype=torch.uint8, device=device), _zeros(max(counters, _COUNTERS), device))
        if key[0] not in self._reserved:
            memory = _zeros(_RESERVED * _COUNTERS, device)
            self._reserved[key[0]] = (memory, list(memory.split(_COUNTERS)))
            # Any stream may replay a graph that uses them.
            torch.cuda.synchronize(device)
        self._buffers[key] = new
        return new

    def _captured(self, index: int, counters: int) -> Tensor:
        if not counters:
            return _zeros(0, torch.device("cuda", index))
        with self._lock:
            _, ready = self._reserved.get(index, (None, []))
            if ready and counters <= _COUNTERS:
                return ready.pop()
        # Zeroed by the graph itself, on every replay.
        return _zeros(counters, torch.device("cuda", index))


def _zeros(count: int, device: torch.device) -> Tensor:
    return torch.zeros(count, dtype=torch.int32, device=device)


WORKSPACES = Workspaces()
