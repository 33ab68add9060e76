"""Launches compiled kernels with a stand-in for the GPU's driver, the ordinary way and the short way.

Prints, as JSON, by case: null where both hand Triton's C function the same, or what differs.
"""

import json
import re
import sys
import traceback
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia import driver as nvidia

from gemmery.devices import TABLE
from gemmery.formats import quantize
from gemmery.kernels.shards import begin_call, wait_for_ranks
from gemmery.lab.fused_targets import abstract_product
from gemmery.launch import bound, direct
from gemmery.launch.plan import Plan
from gemmery.launch.unpacking import unpacking
from gemmery.layout import make_problem
from gemmery.operands import PackedOperand
from gemmery.problem import Config
from gemmery.schedules import bind
from gemmery.schedules.specialized import SPECIALIZED
from gemmery.schedules.workspace import WORKSPACES

STREAM, FUNCTION = 11, 77
#: Triton's own; checks change it.
VERSION = triton.__version__


@dataclass(frozen=True)
class KernelArg:
    """What Triton 3.7 and newer describe an argument by."""

    nested_tuple: Any
    type: int


class Recorder:
    """Stands for a C function; it has no code that could be looked into, as those have none."""

    def __init__(self):
        self.calls = []

    def __call__(self, *args):
        self.calls.append(args)


LAUNCHES = Recorder()


class Utils:
    """As much of CudaUtils as a launch uses."""

    launch = LAUNCHES

    def load_binary(self, name, kernel, shared, device):
        return 1, FUNCTION, 100, 0, 1024

    def unload_module(self, module):
        pass

    def get_device_properties(self, device):
        return {"max_shared_mem": 232448}

    def fill_tma_descriptor(self, address, *layout):
        return "map", address, repr(layout)

    fill_tma_descriptor_tiled = fill_tma_descriptor

    def build_signature_metadata(self, signature):
        return bytes(len(signature))


class Driver:
    """As much of CudaDriver."""

    utils = Utils()
    launcher_cls = nvidia.CudaLauncher

    def get_current_device(self):
        return 0

    def set_current_device(self, device):
        assert device == 0

    def get_current_stream(self, device=0):
        return STREAM

    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)


def set_up():
    triton.runtime.driver.set_active(Driver())
    nvidia.PyKernelArg = KernelArg
    nvidia.ARG_CONSTEXPR, nvidia.ARG_KERNEL, nvidia.ARG_TUPLE = 0, 1, 2
    # Triton 3.6 compiles a C module for each signature.
    nvidia.compile_module_from_src = lambda **_: type("Module", (), {"launch": LAUNCHES})
    nvidia.library_dirs = list


# ---------------------------------------------------------------------------------------------------------------------
# What the C function would read


def plain(value):
    """A pointer as the number that it is, whoever asks the tensor for it."""
    return value.data_ptr() if isinstance(value, torch.Tensor) else value


def by_annotations(args, annotations):
    """Triton 3.7 and newer: tuples flattened and constants left out as the description says."""
    flat = []
    for value, annotation in zip(args, annotations, strict=True):
        if annotation.type == nvidia.ARG_TUPLE:
            flat += by_annotations(value, annotation.nested_tuple)
        elif annotation.type == nvidia.ARG_KERNEL:
            flat.append(plain(value))
    return flat


def by_signature(args, signature):
    """Triton 3.6: the same by the kernel's signature, in which a descriptor is a map and some integers."""
    flat, rest = [], list(args)
    for kind in signature:
        if isinstance(kind, tuple):
            flat += by_signature(rest.pop(0), kind)
        elif kind == "constexpr":
            rest.pop(0)
        else:
            rank = len(re.search(r"\[([^]]*)\]", kind)[1].split(",")) if kind.startswith("tensordesc") else 0
            flat += [plain(rest.pop(0)) for _ in range(1 + 2 * rank)]
    assert not rest
    return flat


def read(call, compiled):
    """What a call means: the grid, stream, function and options, and the kernel's arguments, flat."""
    grid, stream, function, options = call[:3], call[3], call[4], call[5:7]
    if VERSION.startswith("3.6."):
        scratch, packed = call[7:9], call[9]
        values = by_signature(call[13:], compiled.src.signature.values())
    else:
        packed, scratch, (annotations, signature, args) = call[7], call[11:13], call[13:]
        values = by_annotations(args, annotations)
        assert len(values) == len(signature)
    return grid, stream, function, options, scratch, packed, values


# ---------------------------------------------------------------------------------------------------------------------
# Cases


def bf16(*shape):
    return torch.ones(shape, dtype=torch.bfloat16)


def tensors(m, n, k, batch=(), bias=(), order="N"):
    b = bf16(*batch, k, n) if order == "N" else bf16(*batch, n, k).mT
    return bf16(*batch, m, k), b, bf16(*batch, m, n), bf16(*bias) if bias else None


TILE = "64x64x64-g8-w4-s3-tile-"
#: The config, and the tensors' kind.
CASES = {
    "pointers": (TILE + "pointer", {"m": 128, "n": 192, "k": 256}),
    "odd": (TILE + "pointer", {"m": 127, "n": 191, "k": 255}),
    "descriptors": (TILE + "descriptor", {"m": 128, "n": 192, "k": 256, "order": "T"}),
    "batch": (TILE + "descriptor", {"m": 128, "n": 192, "k": 256, "batch": (3,)}),
    "persistent": ("128x128x64-g8-w8-s3-persistent-descriptor", {"m": 512, "n": 512, "k": 256}),
    "tail": ("128x128x64-g8-w8-s3-persistent-descriptor-t4", {"m": 2100, "n": 2200, "k": 256}),
    "row": (TILE + "descriptor", {"m": 128, "n": 192, "k": 256, "bias": (192,)}),
    "matrix": (TILE + "descriptor", {"m": 128, "n": 192, "k": 256, "bias": (128, 192)}),
    "scale": (TILE + "pointer", {"m": 128, "n": 192, "k": 256}),
    "split": (TILE + "pointer-k4", {"m": 128, "n": 192, "k": 1024}),
}
#: Factors of the launches, one after the other.
FACTORS = {"scale": [(2.0, 1), (0.0, 1), (-0.0, 1), (2.0, 1)], "matrix": [(1, 1), (0.5, 3), (0.1, 1)]}


#: Products with a traced epilogue, by the name that they have in `fused_targets`: also the operands' type.
FUSED = {
    "fused": ("bias_gelu", "bf16", TILE + "descriptor"),
    "packed": ("int4_gelu", "bf16", "64x64x128-g1-w4-s3-tile-descriptor-k2-swap"),
    "adapted": ("adapted_int4", "bf16", "64x64x128-g1-w4-s3-tile-descriptor-k2-swap"),
}
if SPECIALIZED.available():
    FUSED |= {
        "specialized packed": ("int4_gelu", "bf16", "128x128x64-g1-w8-s4-specialized-descriptor-k2-swap"),
        "any width scaled": ("scaled_blocks", "e4m3", "64x64x128-g0-w4-s8-cooperative-descriptor"),
        "any width adapted": ("adapted_bias", "bf16", "64x64x64-g0-w4-s8-cooperative-descriptor-k2-swap"),
        "cluster": ("bias_gelu", "bf16", "16x64x64-g0-w4-s8-cluster-descriptor-k2-swap"),
    }


def one_workspace(binding):
    """As on a GPU, where there is one for each stream; without one, each call gets a new one."""
    if binding.split is not None:
        partials, arrivals = WORKSPACES.get(torch.device("cpu"), *binding.workspace_size)
        WORKSPACES.get = lambda device, *room: tuple(x.to(device) for x in (partials, arrivals))
        WORKSPACES.on_stream = lambda index, stream, *room: (partials, arrivals)


def same_way_fused(name):
    """The same for a product whose epilogue was traced."""
    posed, dtype, config = FUSED[name]
    # Parts of all tiles of a cluster's config have to run at once.
    device = replace(TABLE["NVIDIA H200"], sms=1024)
    problem, (given, numbers) = abstract_product(posed, dtype, 300, 1024, device)
    binding = bind(problem, Config.of(config))
    one_workspace(binding)
    compiled = binding.compile(given, numbers)
    launch = direct.prepare(binding, compiled, 0, given, numbers)
    assert launch is not None, "there is no short way"
    for _ in range(2):
        real = [torch.empty_like(x, device="cpu") for x in given]
        LAUNCHES.calls.clear()
        binding.launch(real, numbers)
        assert launch([x.data_ptr() for x in real], numbers)
        ordinary, short = (read(call, compiled) for call in LAUNCHES.calls)
        assert repr(short) == repr(ordinary), f"{short} is not {ordinary}"


def there(operands):
    """The tensors of a launch: all that there are."""
    return [x for x in operands if x is not None]


def same_way(name):
    """Launch a case's kernel both ways, with one set of tensors after the other."""
    config, shape = CASES[name]
    first = tensors(**shape)
    a, b, out, addend = first
    problem = make_problem(
        a, b, out, addend, scaled=name in FACTORS, precision="ieee", fast_accum=False,
        device=TABLE["NVIDIA H200"],
    )  # fmt: skip
    binding = bind(problem, Config.of(config))
    one_workspace(binding)
    factors = FACTORS.get(name, [(1, 1)])
    compiled = binding.compile(there(first), factors[0])
    # One tensor for two of the operands must not make them one for ever.
    twice = (a, a if a.shape == b.shape else b, out, addend)
    launch = direct.prepare(binding, compiled, 0, there(twice), factors[0])
    assert launch is not None, "there is no short way"
    for operands in (first, tensors(**shape), first):
        for alpha, beta in factors:
            LAUNCHES.calls.clear()
            binding.launch(there(operands), (alpha, beta))
            assert launch([x.data_ptr() for x in there(operands)], (alpha, beta))
            ordinary, short = (read(call, compiled) for call in LAUNCHES.calls)
            assert repr(short) == repr(ordinary), f"{short} is not {ordinary}"
    return launch


def hooks():
    """Whoever listens to launches hears of each: those go the ordinary way."""
    launch, knobs = same_way("pointers"), triton.knobs.runtime
    operands = [x.data_ptr() for x in there(tensors(**CASES["pointers"][1]))]
    for hook in ("launch_enter_hook", "launch_exit_hook"):
        chain = getattr(knobs, hook)
        chain.add(print)
        assert not launch(operands, (1, 1))
        chain.remove(print)
        assert launch(operands, (1, 1))
        with knobs.scope():
            setattr(knobs, hook, print)
            assert not launch(operands, (1, 1))
        assert launch(operands, (1, 1))


def unknown():
    """Another launcher, another call of it, a kernel with scratch memory: no short way, and no error."""
    config, shape = CASES["pointers"]
    operands = tensors(**shape)
    problem = make_problem(
        *operands, scaled=False, precision="ieee", fast_accum=False, device=TABLE["NVIDIA H200"]
    )
    binding = bind(problem, Config.of(config))
    compiled = binding.compile(there(operands), (1, 1))
    compiled._init_handles()

    def refused():
        return direct.prepare(binding, compiled, 0, there(operands), (1, 1)) is None

    assert not refused()
    launcher = compiled._run
    for name, value in (("global_scratch_size", 64), ("profile_scratch_size", 64), ("gsan_enabled", True)):
        before = getattr(launcher, name, None)
        setattr(launcher, name, value)
        assert refused(), name
        setattr(launcher, name, before)
    cooperative = launcher.launch_cooperative_grid
    del launcher.launch_cooperative_grid
    assert refused()
    launcher.launch_cooperative_grid = cooperative
    compiled._run = lambda *args: None
    assert refused()
    compiled._run = launcher
    call = nvidia.CudaLauncher.__call__
    nvidia.CudaLauncher.__call__ = lambda self, grid, *args: None
    assert refused(), "another call"
    nvidia.CudaLauncher.__call__ = call
    assert not refused()


#: Formats of a weight that is unpacked, by what is checked.
UNPACKED = {"unpacked scales": ("nf4", {"group_size": 64}), "unpacked channel": ("int8", {})}


def same_way_unpacked(name):
    """The same for a kernel that is no product's, which is kept by the layout of its tensors."""
    format, options = UNPACKED[name]

    def given(shift=0):
        weight = quantize(torch.ones(64, 256), format, **options)
        out = torch.empty(64 * 256 + shift, dtype=torch.bfloat16)[shift:].view(64, 256)
        return weight, [*PackedOperand(weight).tensors, out]

    weight, first = given()
    made = unpacking(weight, TABLE["NVIDIA H200"])
    made.shorten(first)
    assert made.direct is not None, "there is no short way"
    compiled = made.compile(first)
    bindings = []

    def bind():
        bindings.append(unpacking(weight, TABLE["NVIDIA H200"]))
        return bindings[-1]

    for count, shift in ((1, 0), (1, 0), (2, 1), (2, 0)):
        _, tensors = given(shift)
        LAUNCHES.calls.clear()
        made.launch(tensors)
        bound.launch((name,), tensors, bind)
        ordinary, short = (read(call, made.compile(tensors)) for call in LAUNCHES.calls)
        assert repr(short) == repr(ordinary), f"{short} is not {ordinary}"
        assert len(bindings) == count, (shift, len(bindings))
    assert compiled is made.compile(first)


#: Kernels that are always launched with the same tensors: their arguments, given three tensors, and constants.
SAME = {
    "begin call": (
        begin_call, lambda x: (tuple(x[:-1]), x[-1], 1 << 40, 1000), {"RANK": 0, "RANKS": 2, "WAITS": True},
    ),
    "wait for ranks": (wait_for_ranks, lambda x: (x[0], x[-1], 1 << 40, 0, 2, 1000), {"RANK": 0}),
}  # fmt: skip


def same_way_always(name):
    """The same for a kernel whose tensors are the same in every launch."""
    kernel, arguments, constants = SAME[name]
    given = [torch.zeros(4, dtype=torch.int32) for _ in range(3)]
    ordinary = bound.Bound(kernel, 1, arguments, constants)
    compiled = ordinary.compile(given)
    launch = bound.same(kernel, given, arguments, constants)
    with mock.patch.object(bound.Bound, "launch", side_effect=AssertionError("there is no short way")):
        LAUNCHES.calls.clear()
        launch()
        launch()
    ordinary.launch(given)
    *short, last = (repr(read(call, compiled)) for call in LAUNCHES.calls)
    assert short == [last, last], f"{short} is not {last}"


def newer():
    """With a Triton that nobody has read yet, a plan's launches go the ordinary way, and hand over what they always do."""
    config, shape = CASES["pointers"]
    operands = there(tensors(**shape))
    problem = make_problem(
        *operands, None, scaled=False, precision="ieee", fast_accum=False, device=TABLE["NVIDIA H200"]
    )

    def launched():
        made = Plan(problem, Config.of(config))
        made.fit(operands, pinned=True)
        made.shorten(operands[0].get_device(), operands)
        LAUNCHES.calls.clear()
        made(*operands)
        (call,) = LAUNCHES.calls
        return made.direct is not None, read(call, made._compiled)

    short, known = launched()
    assert short, "there is no short way"
    for number in ("3.10.0", "3.60.0", "3.99.1+git0123abc", "4.0.0", "40.0"):
        triton.__version__ = number
        short, unknown = launched()
        assert not short, number
        assert repr(unknown) == repr(known), f"{number}: {unknown} is not {known}"
    triton.__version__ = VERSION
    assert launched()[0]


def main():
    set_up()
    found = {}
    checks = {name: lambda name=name: same_way(name) for name in CASES}
    checks |= {name: lambda name=name: same_way_fused(name) for name in FUSED}
    checks |= {name: lambda name=name: same_way_unpacked(name) for name in UNPACKED}
    checks |= {name: lambda name=name: same_way_always(name) for name in SAME}
    checks |= {"hooks": hooks, "unknown": unknown, "newer": newer}
    for name, check in checks.items():
        try:
            check()
            found[name] = None
        except Exception:
            found[name] = traceback.format_exc(limit=-4)
    print(json.dumps(found))


if __name__ == "__main__":
    sys.exit(main())
