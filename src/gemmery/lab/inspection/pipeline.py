"""A pass of a loop as its reader wants it: what is loaded, waited for and multiplied, in the order of issue."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from .code import KINDS, Instruction, Loop


@dataclass(frozen=True)
class Run:
    """Instructions of one name in a row, but for integers, arithmetic and branches in between.

    Attributes:
        instructions: what has the name.
        between: how many others are issued from the first of them to the next run.
    """

    instructions: tuple[Instruction, ...]
    between: int = 0

    @property
    def kind(self) -> str:
        """Of `code.KINDS`."""
        return self.instructions[0].kind

    @property
    def name(self) -> str:
        """Of the instructions; of those that wait, with what for."""
        first = self.instructions[0]
        return first.brief if first.kind == "wait" else first.opcode

    @property
    def note(self) -> str:
        """The effect of the instructions."""
        parts = [part for i in self.instructions for part in i.note.split("; ") if part]
        return "; ".join(dict.fromkeys(parts))


#: Kinds that are only counted in a pipeline.
_BETWEEN = ("integer", "float", "convert", "control", "other")


def pipeline(loop: Loop) -> list[Run]:
    """A pass of a loop as its reader wants it: what is loaded, waited for and multiplied, in the order of issue."""
    runs: list[Run] = []
    for instruction in loop.body:
        last = runs[-1] if runs else None
        if instruction.kind in _BETWEEN:
            if last is not None:
                runs[-1] = Run(last.instructions, last.between + 1)
            continue
        run = Run((instruction,))
        if last is not None and last.name == run.name:
            runs[-1] = Run((*last.instructions, instruction), last.between)
        else:
            runs.append(run)
    return runs


def counts(instructions: Iterable[Instruction]) -> dict[str, int]:
    """The number of instructions of each kind, in the order of `KINDS`; kinds without any are omitted."""
    found = Counter(i.kind for i in instructions)
    return {kind: found[kind] for kind in KINDS if found[kind]}
