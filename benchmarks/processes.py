"""Runs a function on several ranks, a process each, for the scripts that measure across GPUs."""

import faulthandler
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

#: Seconds that ranks have to end once one has failed, and after which a collective counts as hung.
GRACE, PATIENCE = 10.0, 120.0


@dataclass(frozen=True)
class Ranks:
    """This process among the others.

    Attributes:
        rank, count: which one it is, and how many there are.
        device: "cuda", whose ranks communicate over NCCL, or "cpu", over gloo.
        store: of the process group; ranks can wait for each other in it without a GPU.
    """

    rank: int
    count: int
    device: str
    store: dist.Store

    @property
    def on_gpu(self) -> bool:
        """Whether the ranks have GPUs."""
        return self.device == "cuda"

    def say(self, *texts: Any) -> None:
        """Print on the first rank."""
        if self.rank == 0:
            print(*texts, flush=True)

    def wait(self) -> None:
        """Until all ranks and their GPUs are here."""
        self.synchronize()
        dist.barrier()
        self.synchronize()

    def synchronize(self) -> None:
        """Until this rank's GPU is done."""
        if self.on_gpu:
            torch.cuda.synchronize()

    def gathered(self, x: Tensor) -> list[Tensor]:
        """A tensor of each rank."""
        found = [torch.empty_like(x) for _ in range(self.count)]
        dist.all_gather(found, x.contiguous())
        return found

    def largest(self, values: Sequence[float]) -> list[float]:
        """The largest value of each number on any rank."""
        made = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(made, op=dist.ReduceOp.MAX)
        return made.tolist()

    def same(self, x: Tensor) -> bool:
        """Whether a tensor has the same bits on all ranks."""
        bits = x.contiguous().view(torch.uint8)
        return all(bits.equal(each) for each in self.gathered(bits))


def run(function: Callable[..., None], count: int, device: str, args: Any, limit: float) -> int:
    """Call `function(ranks, args)` on all ranks; 0 if all of them return within `limit` seconds.

    Errors are printed in full. Where a rank has failed, or time is up, the others are ended; shortly before time is up,
    each says where it is.
    """
    context = get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        store, end = str(Path(folder) / "store"), time.monotonic() + limit
        processes = [
            context.Process(
                target=_serve, args=(rank, count, device, store, function, args, end), daemon=True
            )
            for rank in range(count)
        ]
        for process in processes:
            process.start()
        while any(process.is_alive() for process in processes) and time.monotonic() < end:
            time.sleep(0.05)
            if any(process.exitcode for process in processes):
                end = min(end, time.monotonic() + GRACE)
        for rank, process in enumerate(processes):
            if process.is_alive():
                print(f"rank {rank} had not ended and was stopped", file=sys.stderr, flush=True)
                process.kill()
            process.join()
            if process.exitcode:
                print(f"rank {rank} ended with {process.exitcode}", file=sys.stderr, flush=True)
    return int(any(process.exitcode for process in processes))


def _serve(
    rank: int, count: int, device: str, store: str, function: Callable[..., None], args: Any, end: float
) -> None:
    # All processes of a machine have one monotonic clock.
    faulthandler.dump_traceback_later(max(end - time.monotonic() - 5, 1))
    try:
        how: dict[str, Any] = {"backend": "gloo"}
        if device == "cuda":
            torch.cuda.set_device(rank)
            how = {"backend": "nccl", "device_id": torch.device("cuda", rank)}
        shared = dist.FileStore(store, count)
        dist.init_process_group(
            **how, store=shared, rank=rank, world_size=count, timeout=timedelta(seconds=PATIENCE)
        )
        function(Ranks(rank, count, device, dist.PrefixStore("own", shared)), args)
        dist.destroy_process_group()
    except BaseException:
        print(f"rank {rank}:\n{traceback.format_exc()}", file=sys.stderr, flush=True)
        # Without the end of the process group, which would wait for the others.
        os._exit(1)
