"""Two processes that run functions together, and a time after which they are stopped.

On CPUs they communicate over gloo, on GPUs over NCCL. What the functions compute with is the module's `HERE`.
"""

import importlib
import multiprocessing
import os
import tempfile
import traceback
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch

from tests import interpreter

#: How many there are.
COUNT = 2
#: Seconds in which a function, and the start of the processes, has to be done.
LIMIT, START = 120.0, 300.0


@dataclass(frozen=True)
class Place:
    """What functions compute with.

    Attributes:
        device: "cpu", where the ranks communicate over gloo, or "cuda", where they do over NCCL.
        dtype: of numbers.
        scale: times how large sizes are.
    """

    device: str = "cpu"
    dtype: torch.dtype = torch.float64
    scale: int = 1


#: Of this process.
HERE = Place()


class Failed(AssertionError):
    """What a function raised on one of the ranks, or that it was not done in time."""


def _serve(rank, folder, pipe, place):
    import torch.distributed as dist

    global HERE
    HERE = place
    torch.set_num_threads(1)
    if os.environ.get("TRITON_INTERPRET") == "1":
        interpreter.make_quick()
    how = {"backend": "gloo"}
    if place.device == "cuda":
        torch.cuda.set_device(rank)
        how = {"backend": "nccl", "device_id": torch.device("cuda", rank)}
    store = dist.FileStore(str(Path(folder) / "store"), COUNT)
    dist.init_process_group(
        **how, store=store, rank=rank, world_size=COUNT, timeout=timedelta(seconds=2 * LIMIT)
    )
    pipe.send((True, None))
    while True:
        module, name, args = pipe.recv()
        try:
            pipe.send((True, getattr(importlib.import_module(module), name)(*args)))
        except BaseException:
            pipe.send((False, traceback.format_exc()))


class Ranks:
    """Processes with one process group; they are started when they are first needed, and anew after a failure."""

    def __init__(self, place=HERE):
        self._place = place
        self._folder, self._processes, self._pipes = None, [], []

    def __call__(self, function, *args, limit=LIMIT):
        """What a function of a module returns on each rank; a failure on one of them is one here."""
        if not self._processes:
            self._start()
        for pipe in self._pipes:
            pipe.send((function.__module__, function.__name__, args))
        return self._answers(limit)

    def _start(self):
        self._folder = tempfile.TemporaryDirectory()
        context = multiprocessing.get_context("spawn")
        for rank in range(COUNT):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve, args=(rank, self._folder.name, theirs, self._place), daemon=True
            )
            process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(ours)
        self._answers(START)

    def _answers(self, limit):
        found, errors = [], []
        for rank, pipe in enumerate(self._pipes):
            try:
                # A rank that waits for one that has failed is not waited for.
                done, value = (
                    pipe.recv() if pipe.poll(5 if errors else limit) else (False, "not done in time")
                )
            except EOFError:
                done, value = False, "it has ended"
            found.append(value)
            if not done:
                errors.append(f"rank {rank}: {value}")
        if errors:
            self.stop()
            raise Failed(os.linesep.join(errors))
        return found

    def stop(self):
        """End the processes."""
        for process in self._processes:
            process.kill()
            process.join()
        if self._folder is not None:
            self._folder.cleanup()
        self._folder, self._processes, self._pipes = None, [], []
