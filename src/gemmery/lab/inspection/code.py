"""Machine code for its reader: instructions by kind, basic blocks, and the loop that takes most of the time.

Nothing here knows an instruction set; `sass` and `gcn` read NVIDIA's and AMD's.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property

#: Operands that are numbers, counters of the hardware, or those with a number.
_PLAIN = re.compile(r"(?<![\w\[+-])(?:0x[0-9a-f]+|SB\d|gsb\d|\w+\(\d+\))(?![\w\]])")

#: Kinds of instructions, in the order in which they are listed, and what each is.
KINDS = {
    "tensor": "tensor cores",
    "copy": "copies from global to shared memory",
    "load": "loads from global memory into registers",
    "read": "reads of shared memory",
    "write": "writes to shared memory",
    "store": "stores to global memory",
    "spill": "local memory, which is where spilled registers are",
    "wait": "barriers and waits",
    "float": "arithmetic on numbers",
    "convert": "conversions between types",
    "integer": "integers: addresses, counters, predicates, moves",
    "control": "branches",
    "other": "not known to gemmery",
}


@dataclass(frozen=True)
class Instruction:
    """One instruction.

    Attributes:
        address: in bytes from the kernel's start; a number in sequence where the text has no addresses.
        guard: the predicate under which it does anything, such as "@!P0", or "".
        opcode: the mnemonic with its modifiers, such as "HMMA.16816.F32.BF16".
        operands: as the disassembler writes them.
        kind: of `KINDS`.
        goes_to: the label that it branches to.
        falls: whether the next instruction may follow.
        bits: of memory that each lane moves, 0 if it moves none or a block as a whole.
        shape: (M, N, K) of the product that a tensor-core instruction adds, where its name says.
        source: file and line of the kernel that it comes from, such as "operands.py:63", or "".
        note: what it does, where that is worth a word.
    """

    address: int
    guard: str
    opcode: str
    operands: str
    kind: str
    goes_to: str = ""
    falls: bool = True
    bits: int = 0
    shape: tuple[int, int, int] | None = None
    source: str = ""
    note: str = ""

    def __str__(self) -> str:
        return f"{self.guard} {self.opcode} {self.operands}".strip()

    @property
    def brief(self) -> str:
        """Its name with the operands that are not registers or addresses, such as the condition of a wait."""
        return " ".join([self.opcode, *_PLAIN.findall(self.operands)])


@dataclass(frozen=True)
class Loop:
    """A loop of the code.

    Attributes:
        code: that it is a part of.
        blocks: numbers of its basic blocks.
        always: those of them that every pass goes through.
        body: its instructions in every pass, by address; including those after a branch that use the tensor cores,
            which a few threads may do for all.
        aside: its other instructions: what is skipped in most passes, and where it waits for longer.
    """

    code: Code
    blocks: frozenset[int]
    always: frozenset[int]
    body: tuple[Instruction, ...]
    aside: tuple[Instruction, ...]

    @cached_property
    def tensor(self) -> tuple[Instruction, ...]:
        """Its instructions for tensor cores."""
        return of_kind(self.body, "tensor")

    @cached_property
    def work(self) -> int:
        """Multiplications of the tensor cores in a pass, by the warps or warpgroups that issue one instruction each.

        Without tensor cores, or where an instruction does not tell its shape, the number of instructions that do the
        work.
        """
        products = [i.shape[0] * i.shape[1] * i.shape[2] for i in self.tensor if i.shape]
        return sum(products) or len(self.tensor) or len(of_kind(self.body, "float"))

    @property
    def start(self) -> int:
        """The address of its first instruction."""
        return min(i.address for i in self.body)


@dataclass(frozen=True)
class Code:
    """The code of one kernel.

    Attributes:
        instructions: in the order of their addresses.
        labels: the number of the instruction that each stands before.
    """

    instructions: tuple[Instruction, ...]
    labels: dict[str, int] = field(default_factory=dict)

    @cached_property
    def blocks(self) -> list[range]:
        """Basic blocks: numbers of instructions that run one after the other."""
        count = len(self.instructions)
        reached = {self.labels.get(i.goes_to, 0) for i in self.instructions if i.goes_to}
        starts = {0, *(at for at in reached if at < count)}
        for number, instruction in enumerate(self.instructions):
            if (instruction.goes_to or not instruction.falls) and number + 1 < count:
                starts.add(number + 1)
        edges = [*sorted(starts), count]
        return [range(first, end) for first, end in itertools.pairwise(edges) if end > first]

    @cached_property
    def successors(self) -> list[list[int]]:
        """For each block, the blocks that may follow."""
        number_of = {block.start: number for number, block in enumerate(self.blocks)}
        found = []
        for number, block in enumerate(self.blocks):
            last = self.instructions[block[-1]]
            after = []
            if last.goes_to and self.labels.get(last.goes_to) in number_of:
                after.append(number_of[self.labels[last.goes_to]])
            if last.falls and number + 1 < len(self.blocks):
                after.append(number + 1)
            found.append(after)
        return found

    @cached_property
    def _predecessors(self) -> list[list[int]]:
        found: list[list[int]] = [[] for _ in self.blocks]
        for number, after in enumerate(self.successors):
            for following in after:
                found[following].append(number)
        return found

    @cached_property
    def dominators(self) -> list[frozenset[int]]:
        """For each block, those that every way to it goes through; none for blocks that nothing leads to."""
        everything = frozenset(range(len(self.blocks)))
        reached = self._reached()
        found = [everything if number in reached else frozenset() for number in everything]
        found[0] = frozenset({0})
        changed = True
        while changed:
            changed = False
            for number in sorted(reached - {0}):
                before = [found[p] for p in self._predecessors[number] if p in reached]
                new = frozenset.intersection(*before) | {number}
                changed |= new != found[number]
                found[number] = new
        return found

    def _reached(self) -> set[int]:
        seen, left = {0}, [0]
        while left:
            for following in self.successors[left.pop()]:
                if following not in seen:
                    seen.add(following)
                    left.append(following)
        return seen

    @cached_property
    def loops(self) -> list[Loop]:
        """Its natural loops (Aho et al., Compilers, 9.6), those with the same head as one.

        A branch to a smaller address is not enough: code that seldom runs is placed after the kernel's end and branches
        back.
        """
        latches: dict[int, set[int]] = {}
        for number, after in enumerate(self.successors):
            for head in after:
                if head in self.dominators[number]:
                    latches.setdefault(head, set()).add(number)
        return [self._loop(head, sources) for head, sources in sorted(latches.items())]

    def _loop(self, head: int, latches: set[int]) -> Loop:
        blocks, left = {head}, list(latches)
        while left:
            number = left.pop()
            if number not in blocks:
                blocks.add(number)
                left += self._predecessors[number]
        always = blocks & frozenset.intersection(*(self.dominators[latch] for latch in latches))
        body = {n for n in blocks if n in always or of_kind(self._in([n]), "tensor")}
        return Loop(self, frozenset(blocks), frozenset(always), self._in(body), self._in(blocks - body))

    def _in(self, blocks: Iterable[int]) -> tuple[Instruction, ...]:
        return tuple(self.instructions[i] for number in sorted(blocks) for i in self.blocks[number])

    @cached_property
    def main_loop(self) -> Loop | None:
        """The loop along K: the innermost of those that use the tensor cores, and of several the one with most work.

        In kernels that do not use them, the same for arithmetic. None if there is no loop with either.
        """
        for kind in ("tensor", "float"):
            working = [loop for loop in self.loops if of_kind(loop.body, kind)]
            inner = [loop for loop in working if not any(other.blocks < loop.blocks for other in working)]
            if inner:
                return max(inner, key=lambda loop: loop.work)
        return None


def all_but(number: int, things: str) -> str:
    """In words: "all loads", "all loads but the last", "all loads but the last 2"."""
    return (
        f"all {things}{'' if number == 0 else ' but the last' if number == 1 else f' but the last {number}'}"
    )


def of_kind(instructions: Iterable[Instruction], *kinds: str) -> tuple[Instruction, ...]:
    """Those of some kinds."""
    return tuple(i for i in instructions if i.kind in kinds)
