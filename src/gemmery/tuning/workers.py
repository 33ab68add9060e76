"""Compilation in other processes, so that several kernels compile at once and a compiler that dies affects nothing
else.

A worker compiles for a target through `launch.cross_compile` and never touches a GPU. The compiled kernels are in
Triton's cache on disk, where this process then finds them. Workers are plain programs that are given lines of pickled
jobs, not `multiprocessing`, which would import the user's main program again.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import pickle
import subprocess
import sys
import tempfile
import threading
import warnings
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import IO, NamedTuple

from ..problem import Config, Problem

#: The default limit: one worker takes some hundred megabytes.
MOST = 8
#: Fewer kernels than this compile in this process in the time in which a worker starts.
WORTH_WORKERS = 4


class Target(NamedTuple):
    """The target to compile for, with the fields of Triton's GPUTarget."""

    backend: str
    arch: int | str
    warp_size: int

    @classmethod
    def active(cls) -> Target:
        """That of the current GPU."""
        from triton.runtime import driver

        target = driver.active.get_current_target()
        return cls(target.backend, target.arch, target.warp_size)


class Workers:
    """Worker processes, begun when they are first needed and ended by `close`, or at the end of a `with` block.

    Args:
        target: what to compile for.
        count: how many; by default one a core that this process may use but one, and at most `MOST`.
    """

    def __init__(self, target: Target, count: int | None = None) -> None:
        self.target = target
        self.count = max(1, min(MOST, len(os.sched_getaffinity(0)) - 1)) if count is None else count
        self._pool = ThreadPoolExecutor(self.count, "gemmery-compile")
        self._mine = threading.local()
        self._started: list[_Worker] = []
        self._broken = self._closed = False

    def submit(self, problem: Problem, config: Config) -> Future[str | None]:
        """Compile a config for a problem; the future gives None, or what the compiler died of.

        A kernel that does not compile is not such a death: its next caller receives the compiler's error.
        """
        job = base64.b64encode(pickle.dumps((problem, config))).decode()
        return self._pool.submit(self._compile, job)

    def _compile(self, job: str) -> str | None:
        worker = getattr(self._mine, "worker", None) or self._start()
        if worker is None:
            return None
        self._mine.worker = worker
        if worker.ask(job) is None:
            self._mine.worker = None
            return worker.last_words()
        return None

    def _start(self) -> _Worker | None:
        """A new process that is ready for work; None if there can't be one."""
        if self._broken or self._closed:
            return None
        worker = _Worker(self.target)
        self._started.append(worker)
        if self._closed:
            worker.kill()
        if worker.ask("") is None:
            if not self._closed:
                # Not the fault of any kernel. This process compiles them all, one after the other.
                self._broken = True
                warnings.warn(
                    f"gemmery: no kernels compile in parallel: {worker.last_words()}", RuntimeWarning, 2
                )
            return None
        return worker

    def close(self) -> None:
        """Give up what is not done and end the processes."""
        self._closed = True
        for worker in list(self._started):
            worker.kill()
        self._pool.shutdown(wait=True, cancel_futures=True)
        for worker in self._started:
            worker.close()
        self._started.clear()

    def __enter__(self) -> Workers:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class _Worker:
    """One process, and lines to and from it."""

    def __init__(self, target: Target) -> None:
        self._errors: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115  (closed with the process)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "gemmery.tuning.workers", json.dumps(target)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, env=_environment(), text=True,
            # Ctrl-C is for the program that waits for them, which ends them itself.
            start_new_session=True,
        )  # fmt: skip

    def ask(self, line: str) -> str | None:
        """Send a line and wait for the answer; None if the process died instead."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(line + "\n")
            self._process.stdin.flush()
        except (BrokenPipeError, ValueError):
            return None
        return self._process.stdout.readline() or None

    def last_words(self) -> str:
        """The process's exit status, and the last line that it printed."""
        status = self._process.wait()
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").strip().splitlines()
        how = f"signal {-status}" if status < 0 else f"status {status}"
        return f"the compiler's process ended with {how}" + (f": {lines[-1]}" if lines else "")

    def kill(self) -> None:
        """End the process, whatever it is doing."""
        self._process.kill()

    def close(self) -> None:
        """Wait for the end of a killed process and close the files that lead to it."""
        self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()
        self._errors.close()
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            # Unsent tasks can't be sent any more.
            self._process.stdin.close()


def _environment() -> dict[str, str]:
    """This process's environment, in which the worker finds the same gemmery and Triton, and the same cache."""
    root = str(Path(__file__).parents[2])
    # Behind what is there, which may put another Triton first.
    path = os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), root)))
    return os.environ | {"PYTHONPATH": path}


def _work(target: Target) -> None:
    """Compile what standard input asks for, and answer each line with one."""
    # Triton and its tools may print: only answers go to the standard output that this process was begun with.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    from ..launch.cross_compile import use
    from ..schedules import bind
    from ..select.samples import arguments

    use(*target)
    for line in sys.stdin:
        answer = "ready"
        if line.strip():
            problem, config = pickle.loads(base64.b64decode(line))
            try:
                bind(problem, config).compile(*arguments(problem, "meta"))
                answer = "done"
            except Exception as error:
                # The process that asked compiles it again and meets the same error, where it can be dealt with.
                answer = f"{type(error).__name__}"
        print(answer, file=answers, flush=True)


if __name__ == "__main__":
    _work(Target(*json.loads(sys.argv[1])))
