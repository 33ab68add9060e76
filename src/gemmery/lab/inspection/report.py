"""The properties of a compiled kernel: the result of `inspect`, as facts and as plain values."""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any

from ...launch.occupancy import Occupancy, occupancy
from ...launch.plan import Plan
from ...problem import Config, Problem
from ...select.keys import device_text
from . import gcn, sass
from .code import Code, Instruction, Loop, of_kind
from .compile import Built, build, built
from .pipeline import counts, pipeline
from .resources import Usage
from .source import function_at

#: Kinds of instructions that move data, whose widths are told.
MOVES = ("copy", "load", "read", "write", "store", "spill")
#: Texts that can be requested, in addition to the machine code.
TEXTS = ("ttir", "ttgir", "llir", "ptx", "amdgcn")


@dataclass(frozen=True)
class Inspection:
    """The analysis of a compiled kernel; `str` gives it as text.

    Attributes:
        problem: the problem that the kernel computes.
        copies: matrices, of "a" and "b", that are copied first, because the kernel reads copies faster.
        config: the config of the kernel.
        target: the architecture that it was compiled for.
        kernel: the name of the device function.
        programs: the number of programs of a launch.
        usage: registers, spills and shared memory of one program.
        occupancy: programs and warps on one multiprocessor at a time, and what limits them.
        code: the instructions.
        texts: the kernel in the compiler's languages, by name, including "sass" on NVIDIA GPUs.
        given: whether the caller gave the config.
        passed: rejected configs, with the reason.
        seconds: the times of the steps.
    """

    problem: Problem
    copies: tuple[str, ...]
    config: Config
    target: str
    kernel: str
    programs: int
    usage: Usage
    occupancy: Occupancy | None
    code: Code = field(repr=False)
    texts: dict[str, str] = field(repr=False)
    given: bool
    passed: dict[Config, str]
    seconds: dict[str, float]

    @property
    def loop(self) -> Loop | None:
        """The K loop."""
        return self.code.main_loop

    @cached_property
    def tensor(self) -> Counter[str]:
        """The number of each tensor-core instruction in the K loop."""
        return Counter(i.opcode for i in self.loop.tensor) if self.loop else Counter()

    @cached_property
    def products(self) -> float | None:
        """The number of the config's K steps that an iteration multiplies; None if names do not determine it.

        It is 1 if an iteration is a step, and 3 if each product consists of three, as with "tf32x3".
        """
        if self.loop is None or not self.loop.tensor or not all(i.shape for i in self.loop.tensor):
            return None
        c = self.config
        # wgmma is issued by a warpgroup at a time.
        issuers = c.num_warps / (4 if "GMMA" in self.loop.tensor[0].opcode else 1)
        return self.loop.work * issuers / (c.block_m * c.block_n * c.block_k)

    @cached_property
    def ahead(self) -> float | None:
        """The number of K steps that loads are ahead of the products: copies before the loop, divided by those of an
        iteration.

        None if an iteration copies nothing past the registers.
        """
        inside = of_kind(self.loop.body, "copy") if self.loop else ()
        if self.loop is None or not inside:
            return None
        start = self.loop.start
        before = [i for i in of_kind(self.code.instructions, "copy") if i.address < start]
        return len(before) / len(inside)

    @cached_property
    def moves(self) -> list[Move]:
        """Instructions that move data: those of the loop, then the others."""
        inside = self.loop.body if self.loop else ()
        addresses = {i.address for i in inside}
        rest = [i for i in self.code.instructions if i.address not in addresses]
        return [*_moves(inside, True), *_moves(rest, False)]

    @cached_property
    def buffers(self) -> list[str]:
        """The buffers in shared memory, as rings of blocks, such as "4 × 128×64 bf16"; some share memory."""
        found = re.findall(r"local_alloc : \(\) -> !ttg\.memdesc<([x\d]+)x(\w+),", self.texts["ttgir"])
        made = []
        for sizes, element in found:
            *count, rows, columns = sizes.split("x")
            # One-column blocks of integers are barriers.
            if (rows, element) != ("1", "i64") and (columns, element) != ("1", "i64"):
                made.append(f"{count[0] if count else 1} × {rows}×{columns} {element}")
        return [f"{text}{f' ({n} times)' if n > 1 else ''}" for text, n in Counter(made).items()]

    @property
    def warnings(self) -> list[str]:
        """Plain sentences about problems of the kernel."""
        room, said = self.problem.device.target.shared, []
        if self.usage.shared > room:
            said.append(
                f"takes {self.usage.shared:,} bytes of shared memory of {room:,}: it can't be launched"
            )
        if self.usage.spilled:
            said.append(f"spills {self.usage.spilled} bytes a thread: registers that go to memory and back")
        inside = of_kind(self.loop.body, "spill") if self.loop else ()
        if inside:
            said.append(f"{len(inside)} of the loop's instructions move spilled registers")
        groups = [i for i in self.loop.tensor if "GMMA" in i.opcode] if self.loop else []
        if len(groups) > 1 and all("gsb0" in i.operands for i in groups):
            said.append("every wgmma is a separate group: the tensor cores wait for each")
        return said

    def asdict(self, texts: Sequence[str] = ()) -> dict[str, Any]:
        """All fields as plain values, for JSON.

        Args:
            texts: which of `texts` to include.
        """
        p, held = self.problem, self.occupancy
        tensor = {i.opcode: i.shape for i in (self.loop.tensor if self.loop else ())}
        return {
            "problem": str(p), "M": p.M, "N": p.N, "K": p.K, "batch": list(p.batch), "copies": list(self.copies),
            "device": device_text(p.device), "target": self.target,
            "config": str(self.config), "knobs": self.config.asdict(), "given": self.given,
            "passed": {str(config): why for config, why in self.passed.items()},
            "kernel": self.kernel, "programs": self.programs,
            **asdict(self.usage), "shared_limit": p.device.target.shared, "buffers": self.buffers,
            "occupancy": None if held is None else {**asdict(held), "limited_by": list(held.limited_by)},
            "tensor": [{"opcode": name, "count": n, "shape": tensor[name]} for name, n in self.tensor.items()],
            "products": self.products, "ahead": self.ahead, "moves": [asdict(move) for move in self.moves],
            "instructions": len(self.code.instructions),
            "loop": None if self.loop is None else _loop(self.loop),
            "warnings": self.warnings, "seconds": self.seconds,
            "texts": {name: self.texts[name] for name in texts},
        }  # fmt: skip

    def __str__(self) -> str:
        from .show import text

        return text([self])


@dataclass(frozen=True)
class Move:
    """Instructions of one name that move data.

    Attributes:
        kind: of `code.KINDS`.
        count: how many there are.
        bits: that each lane moves with one, 0 if one moves a whole block, as TMA's do.
        in_loop: whether they are in the loop along K.
    """

    kind: str
    opcode: str
    count: int
    bits: int
    in_loop: bool


def _moves(instructions: Iterable[Instruction], in_loop: bool) -> list[Move]:
    counts = Counter((i.kind, i.opcode, i.bits) for i in of_kind(instructions, *MOVES))
    ranked = sorted(counts.items(), key=lambda entry: MOVES.index(entry[0][0]))
    return [Move(kind, opcode, count, bits, in_loop) for (kind, opcode, bits), count in ranked]


def _loop(loop: Loop) -> dict[str, Any]:
    return {
        "start": loop.start,
        "counts": counts(loop.body),
        "aside": counts(loop.aside),
        "pipeline": [
            {"kind": run.kind, "name": run.name, "count": len(run.instructions), "between": run.between,
             "note": run.note}
            for run in pipeline(loop)
        ],
        "body": [
            {"address": i.address, "text": str(i), "kind": i.kind, "bits": i.bits, "source": i.source,
             "function": function_at(i.source), "note": i.note}
            for i in loop.body
        ],
    }  # fmt: skip


def inspect(problem: Problem | Plan, config: Config | dict[str, Any] | str | None = None) -> Inspection:
    """Compile the kernel of a problem, or take the kernel of a plan, and analyze it. Needs no GPU.

    Args:
        problem: the problem, which includes the GPU; or a plan, whose kernel is analyzed as it runs.
        config: the config, in any form that `Config.of` accepts; by default the one that gemmery chooses. A config that
            spills registers, or that no GPU can launch, is analyzed too.

    Raises:
        ValueError: the config is invalid or does not suit the problem, none fits, the GPU lacks the instructions, or
            kernels are interpreted in this process.
        TypeError: `problem` is neither a problem nor a plan, or a config is given for a plan, which has its own.

    Example:
        >>> from gemmery.devices import TABLE
        >>> from gemmery.lab.inspection import inspect
        >>> from gemmery.select.shapes import problem_of
        >>> found = inspect(problem_of(4096, 4096, 4096, device=TABLE["NVIDIA A100"]))  # doctest: +SKIP
        >>> found.usage.registers, dict(found.tensor)  # doctest: +SKIP
        (222, {'HMMA.16816.F32.BF16': 64})
    """
    if isinstance(problem, Plan):
        if config is not None:
            raise TypeError(
                "inspect: a plan has its config; give the plan alone, or its problem with another config"
            )
        return examined(built(problem))
    if not isinstance(problem, Problem):
        raise TypeError(f"inspect: problem is a {type(problem).__name__}; it must be a Problem or a Plan")
    return examined(build(problem, None if config is None else Config.of(config)))


def examined(found: Built) -> Inspection:
    """The inspection of a compiled kernel."""
    begun = time.perf_counter()
    asm, arch = found.compiled.asm, found.problem.device.target
    texts = {name: asm[name] for name in TEXTS if name in asm}
    if "cubin" in asm:
        texts["sass"] = sass.disassemble(asm["cubin"])
    code = sass.read(texts["sass"]) if "cubin" in asm else gcn.read(texts["amdgcn"])
    took = found.usage
    held = occupancy(arch, took.registers, took.shared, took.warps, took.tensor_memory)
    reading = time.perf_counter() - begun
    return Inspection(
        problem=found.problem, copies=found.copies, config=found.binding.config, target=arch.name,
        kernel=found.compiled.metadata.name, programs=found.binding.grid[0] * found.binding.cluster, usage=took,
        occupancy=held, code=code, texts=texts, given=found.given, passed=found.passed,
        seconds={"compile": found.seconds, "disassemble": reading},
    )  # fmt: skip
