"""A GPU that is none: a queue with its own clock beside the host's, in the place of torch.cuda; and a suite on it."""

import io
from contextlib import contextmanager

from rich.console import Console

from gemmery.lab import bench
from gemmery.lab.inputs import UNWRITTEN
from gemmery.lab.peers import cublas, gemmery_call
from gemmery.lab.suites import Row

HZ = 1.98e9


class FakeEvent:
    def __init__(self, gpu):
        self.gpu, self.at = gpu, None

    def record(self):
        self.at = max(self.gpu.host, self.gpu.free)

    def query(self):
        return self.gpu.host >= self.at

    def synchronize(self):
        self.gpu.host = max(self.gpu.host, self.at)

    def elapsed_time(self, end):
        return (end.at - self.at) * 1e3


class FakeGraph:
    def __init__(self, gpu):
        self.gpu, self.work = gpu, []

    def replay(self):
        self.gpu.launch("replay", sum(seconds for _, seconds in self.work), host=10e-6)


class FakeGpu:
    """Stands for torch.cuda: `host` is the host's time, `free` the time at which the GPU's queue is empty."""

    def __init__(self):
        self.host = self.free = 0.0
        self.trace = []
        self.capture = None

    def launch(self, name, seconds, host=5e-6):
        self.host += host
        self.trace.append(name)
        if self.capture is None:
            self.free = max(self.host, self.free) + seconds
        else:
            self.capture.work.append((name, seconds))

    def kernel(self, name, seconds, host=5e-6):
        return lambda: self.launch(name, seconds() if callable(seconds) else seconds, host)

    def _sleep(self, cycles):
        self.launch("sleep", cycles / HZ)

    def flush(self):
        self.launch("flush", 60e-6)

    def clock(self):
        return self.host

    def Event(self, enable_timing):
        assert enable_timing
        return FakeEvent(self)

    def CUDAGraph(self):
        return FakeGraph(self)

    @contextmanager
    def graph(self, recorded):
        self.capture = recorded
        yield
        self.capture = None

    def synchronize(self):
        self.host = max(self.host, self.free)


ROWS = [
    Row("small", 16, 24, 32),
    Row("batched", 8, 8, 8, batch=(2,), b="row"),
    Row("odd", 7, 5, 3, a="col+odd"),
]


def on(gpu, method, name, seconds):
    """A method that computes on the CPU and takes its time on the simulated GPU."""

    def make(inputs):
        call = method(inputs)

        def timed():
            # Results do not change after the check; thousands of timed calls need not compute them again.
            unwritten = inputs.out.isnan() if inputs.out.is_floating_point() else inputs.out == UNWRITTEN
            result = call() if unwritten.any() else None
            gpu.launch(name, seconds)
            return result

        return timed

    return make


def suite(gpu, watch, **options):
    settings = {
        "dtype": "fp32", "rounds": 2, "rows": ROWS, "seed": 11, "watch": watch, "device": "cpu",
        "ours": on(gpu, gemmery_call, "gemmery", 200e-6),
        "peers": {"torch": on(gpu, cublas, "torch", 150e-6)},
        "console": Console(file=io.StringIO(), width=200),
    }  # fmt: skip
    return bench.run_suite("tiny", **(settings | options))
