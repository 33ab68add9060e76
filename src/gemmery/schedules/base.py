"""The base of schedules, and their registry.

A schedule is the order in which the programs of a launch compute the tiles of a product. It is an object that knows
its name and its knobs, the GPUs and problems for which it runs, its reasons to refuse a config, its binding to a
kernel, its costs, and its division of the work. All other code asks the registry. A new schedule is one module here,
and its rows in `select.tiles`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, ClassVar, NamedTuple

import numpy as np
import triton

if TYPE_CHECKING:
    from ..devices import Arch
    from ..kernels.any_width_stage import Stage
    from ..problem import Config, Problem
    from ..select.space import Space
    from .binding import Binding
    from .cost import Costs, Floats, Given
    from .walk import Ints, Walk

#: Knobs that not every schedule takes, with the value that stands for none, and how a message about them begins.
KNOBS = {
    "tail": (1, "tail needs"),
    "split_k": (1, "split_k needs"),
    "split_store": (False, "split_store needs"),
    "swap": (False, "swap needs"),
    "rest_n": (0, "a block_n that is not a power of two needs"),
    "stream": (False, "stream needs"),
}


class Forms(NamedTuple):
    """The layout of a problem's operands, as far as possible tiles and a kernel's code depend on it.

    Attributes:
        a_turned, b_turned: whether adjacent elements are along M in a, and along N in b.
        paired: see `Problem.paired`.
        packed: `Spec.staged` of b, of halves where these are paired.
        batched: whether there is a batch of them.
        ragged: see `Problem.ragged`.
        by_steps: see `Spec.by_steps`, of b.
    """

    a_turned: bool
    b_turned: bool
    paired: bool
    packed: Stage | None = None
    batched: bool = False
    ragged: str = ""
    by_steps: bool = False

    @classmethod
    def of(cls, problem: Problem) -> Forms:
        p, staged = problem, problem.b.staged
        packed = None if staged is None else staged.of_halves(p.paired)
        return cls(p.a.col != 1, p.b.row != 1, p.paired, packed, bool(p.batch), p.ragged, p.b.by_steps)


class Schedule:
    """One schedule. Each has its own class.

    Attributes:
        name: how `Config.schedule` names it.
        about: what its programs do, in words.
        title: its name for users, as available or not on a GPU.
        knobs: those of `KNOBS` that it takes.
        universal: whether it runs every problem on every GPU, with some config.
        archs, versions: architectures and versions of Triton for which it is written; empty for all.
        reason: when it is chosen, for `gemmery doctor`.
        chosen_on: architectures on which it is chosen untuned, since it was measured to be faster there; None for all.
            Elsewhere its configs come last: a tuner measures them, and a config may name them.
        instead: what replaces it where it does not run; "" if this needs no mention.
        instruction: the matrix instruction of its kernels in PTX, if it is not the architecture's usual one.
        splits: parts along K that are considered for rows of tiles that say `splits`.
        overlaps_stores: whether a program stores a tile while it computes its next one.
        sizes_bands: whether `Config.group_m` may be 0, for bands as high as `band` says.
        tables: suffixes of a kind in the names of its own tables of measured times; each table replaces those before
            it.
        awaits: whether its kernels wait for what an operand with `Spec.awaits` says.
        fits: the tables, by their `select.measured.table_name`, to which its model is itself fitted.
    """

    name: ClassVar[str]
    about: ClassVar[str]
    title: ClassVar[str] = ""
    knobs: ClassVar[frozenset[str]] = frozenset()
    universal: ClassVar[bool] = True
    archs: tuple[str, ...] = ()
    versions: tuple[str, ...] = ()
    reason: ClassVar[str] = ""
    chosen_on: ClassVar[tuple[str, ...] | None] = None
    instead: ClassVar[str] = ""
    instruction: ClassVar[str] = ""
    splits: tuple[int, ...] = ()
    overlaps_stores: ClassVar[bool] = False
    sizes_bands: ClassVar[bool] = False
    awaits: ClassVar[bool] = False
    tables: tuple[str, ...] = ()
    fits: tuple[str, ...] = ()

    # --- where it runs ---------------------------------------------------------------------------------------------

    def available(self) -> bool:
        """Whether this version of Triton can compile its kernel."""
        return not self.versions or triton_version() in self.versions

    def runs_on(self, arch: Arch) -> bool:
        """Whether it runs on an architecture with this version of Triton."""
        return self.available() and (not self.archs or arch.name in self.archs)

    def is_chosen_on(self, arch: Arch) -> bool:
        """Whether it is chosen on an architecture without a measurement there."""
        return self.chosen_on is None or arch.name in self.chosen_on

    def needs(self, problem: Problem) -> Iterator[tuple[bool, str]]:
        """The conditions on a problem under which some config runs it, whatever the number of rows.

        Yields whether a condition holds, and the condition in words. A condition that does not hold is the last one,
        so later conditions may rely on it.
        """
        target = problem.device.target
        yield self.available(), f"Triton {', '.join(self.versions)}"
        yield not self.archs or target.name in self.archs, f"a GPU of {', '.join(self.archs)}"
        yield self.awaits or not problem.a.awaits, "a product that does not wait for other GPUs"

    def suits(self, problem: Problem) -> bool:
        """Whether `needs` holds."""
        return all(holds for holds, _ in self.needs(problem))

    def unsuited(self, problem: Problem) -> str | None:
        """The first of `needs` that does not hold, as a message; None if all do."""
        needed = next((words for holds, words in self.needs(problem) if not holds), None)
        if needed is None:
            return None
        return (
            f"schedule {self.name!r} needs {needed}; given {problem} on {problem.device.arch} with Triton "
            f"{triton.__version__}"
        )

    def takes(self, config: Config, forms: Forms) -> bool:
        """Whether a config of it can run a problem that it suits, for any sizes that `considers` allows."""
        return True

    def considers(self, problem: Problem, rows: Floats, config: Config | Space) -> np.ndarray:
        """The numbers of rows, and the configs, that are considered, for a problem that it suits.

        Args:
            config: see `repeats`.
        """
        return np.ones(np.shape(rows), bool)

    def has_room(self, problem: Problem, space: Space) -> np.ndarray:
        """A mask of the configs whose blocks, with the stored part of a tile, fit into shared memory by their sizes.

        A kernel has the last word when it is compiled. But a config that never runs may not stand for others on a
        shortlist.

        Args:
            space: configs that are all of this schedule.
        """
        return np.ones(len(space), bool)

    def repeats(self, problem: Problem, rows: Ints, config: Config | Space) -> np.ndarray:
        """The numbers of rows, and the configs, for which tiles overlap, so that elements are computed twice.

        Products that are summed over ranks do not allow this.

        Args:
            config: one of it, or many, all of which are of it.
        """
        return np.zeros(np.shape(rows), bool)

    def code(self, config: Config, forms: Forms) -> object:
        """The part of a config that decides which compiled kernel runs; None stands for the whole config.

        Only for configs that `takes` accepts.
        """
        return None

    def own_tables(self) -> tuple[str, ...]:
        """Those of `tables` that count with this version of Triton."""
        return self.tables if self.available() else ()

    # --- configs ---------------------------------------------------------------------------------------------------

    def check_sizes(self, config: Config) -> None:
        """Raises ValueError for a Config whose tile or number of warps is invalid."""
        c = config
        for name in ("block_m", "block_n", "block_k"):
            value = getattr(c, name)
            if value < 16 or (name != "block_n" and value & (value - 1)):
                raise ValueError(f"Config: {name} is {value!r}; it must be a power of two of at least 16")
        if c.rest_n and (c.rest_n < 16 or c.rest_n & (c.rest_n - 1)):
            raise ValueError(
                f"Config: block_n is {c.block_n}; it must be a power of two, or the sum of two, of at least 16"
            )
        if c.num_warps not in (1, 2, 4, 8, 16, 32):
            raise ValueError(f"Config: num_warps is {c.num_warps!r}; it must be a power of two up to 32")

    def check(self, config: Config) -> None:
        """Raises ValueError for a Config whose knobs do not go together."""
        for knob, (none, message) in KNOBS.items():
            if knob not in self.knobs and getattr(config, knob) != none:
                raise ValueError(f"Config: {message} {_names(knob)}")

    def refusal(self, problem: Problem, config: Config) -> str | None:
        """The reason why a config cannot run a problem; None if it can."""
        raise NotImplementedError

    def bind(self, problem: Problem, config: Config) -> Binding:
        """The binding of a problem and a supported config."""
        raise NotImplementedError

    # --- work and its time -----------------------------------------------------------------------------------------

    def costs(self, problem: Problem, space: Space, given: Given) -> Costs:
        """The predicted costs of a space's configs, all of which are of this schedule."""
        raise NotImplementedError

    def band(self, problem: Problem, config: Config) -> int:
        """The height in tiles of the bands in which a launch visits its tiles."""
        return config.group_m

    def at_once(self, problem: Problem, config: Config) -> int:
        """The number of programs that a GPU holds at once, as the costs assume it."""
        raise NotImplementedError

    def walk(self, problem: Problem, config: Config) -> Walk:
        """The units that each program computes, and their order."""
        raise NotImplementedError

    def turns(self, problem: Problem, config: Config) -> float:
        """Tiles, whole or small, that a program has one after the other, where `costs` leaves that out."""
        return 0.0

    def cuts(self, problem: Problem, config: Config) -> list[str]:
        """A sentence for each way in which tiles are cut up."""
        return []


def triton_version() -> str:
    """The first two numbers of Triton's version."""
    return ".".join(triton.__version__.split(".")[:2])


#: All schedules by their names. Tables of measured times count in this order.
REGISTRY: dict[str, Schedule] = {}


def register(schedule: Schedule) -> None:
    """Add a schedule to the registry."""
    REGISTRY[schedule.name] = schedule


def of(name: str) -> Schedule:
    """The schedule of a name.

    Raises:
        ValueError: there is none.
    """
    if name not in REGISTRY:
        raise ValueError(f"schedule is {name!r}; it must be one of {tuple(REGISTRY)}")
    return REGISTRY[name]


def _names(knob: str) -> str:
    """The schedules that take a knob, as the end of a message."""
    first, *more = [schedule.name for schedule in REGISTRY.values() if knob in schedule.knobs]
    each = [f"the {first} schedule", *(f"the {name} one" for name in more)]
    return " or ".join(filter(None, (", ".join(each[:-1]), each[-1])))
