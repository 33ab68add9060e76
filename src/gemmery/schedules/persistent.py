"""As many programs as run at once, which take tiles in turn; see `kernels.gemm.gemm_persistent`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from ..kernels import gemm
from .binding import Binding, epilogue_subtiles
from .cost import ELEMENT, FUNCTION, STORE, Floats, added, along, calls_of, fitted, stage_bytes
from .tile import Tile
from .walk import Ints, Walk, in_turn, whole_tiles
from .waves import Waves

if TYPE_CHECKING:
    from ..problem import Config, Problem
    from ..select.space import Space

#: Seconds in which an element of a tile of fp8 is multiplied by the scales of its row and column. On an H200, where
#: random products have several tiles for each program, 13 times give 4.3e-11 with Triton 3.6
#: (`benchmarks/results/looks/any_width_kinds-mixed.json`), and 8 times give 5.7e-11 with 3.9
#: (`random_seed608-mixed-triton3.9.json`).
SCALED = 4.8e-11


class Persistent(Tile):
    """Programs that take tiles in turn. Tiles that would not fill a last wave can be cut into small ones."""

    name = "persistent"
    about = "as many programs as run at once, which take tiles in turn"
    knobs = frozenset({"tail", "split_store"})
    splits = ()
    overlaps_stores = True
    awaits = False

    def needs(self, problem: Problem) -> Iterator[tuple[bool, str]]:
        yield from super().needs(problem)
        yield not problem.ragged, "a product without groups"
        # ptxas makes every product wait for the one before where another one follows in the same loop.
        yield not problem.a.adapter_rank, "a product without an adapter"
        # They spill a lot: tiles are large, and the tail's code follows theirs.
        yield not problem.a.is_summed, "a product that is not summed over ranks"

    def refusal(self, problem: Problem, config: Config) -> str | None:
        return self.unsuited(problem) or super().refusal(problem, config)

    def bind(self, problem: Problem, config: Config) -> Binding:
        return PersistentBinding(problem, config)

    def resident(self, problem: Problem, columns: Space | Config, stage: Any) -> Any:
        """One, even if there is room for more: it loads its next tile while it stores this one."""
        return 1

    def has_room(self, problem: Problem, space: Space) -> np.ndarray:
        """See `Schedule.has_room`. The next tile is loaded while this one is stored, so they share no memory."""
        p, s = problem, space
        stages = stage_bytes(p, s) * s.num_stages
        subtiles = np.array([epilogue_subtiles(p, config) for config in s.configs])
        # A matrix that is added passes through separate shared memory. Exact for what Triton 3.7 compiles for Hopper.
        held = 0 if p.fusion is not None and not p.fusion.stores else 1 + (p.epilogue == "add_matrix")
        stored = s.block_m * s.block_n / subtiles / (2 if p.paired else 1) * p.out.dtype.itemsize * held
        return np.asarray((stages + stored < p.device.target.shared) | (s.loader != "descriptor"))

    def around(self, work: Floats, together: Floats, start: float, store: Floats) -> Floats:
        """See `Tile.around`."""
        return np.asarray(start + work * store * STORE)

    def epilogue(self, problem: Problem, space: Space, together: Floats) -> Floats:
        """See `Tile.epilogue`. A multiprocessor has one program."""
        seconds = added(problem, space)
        if not fitted(problem) or problem.fusion is None:
            is_fp8 = problem.a.dtype.itemsize == 1 and problem.a.dtype.is_floating_point
            return seconds + SCALED * (is_fp8 and all(along(problem)))
        return seconds + calls_of(problem) * FUNCTION + len(problem.fusion.matrix_operands) * ELEMENT

    def walk(self, problem: Problem, config: Config) -> Walk:
        """Whole tiles, and after them the small tiles of the tail."""
        work = Waves.of(problem, config)
        at_once = self.at_once(problem, config)
        programs = min(max(work.tiles, work.parts), at_once)
        tiles_n = -(-problem.N // config.block_n) if config.tail_n == 1 else problem.N // config.block_n
        program, turn = in_turn(work.tiles, programs)
        band = self.band(problem, config)
        columns = whole_tiles(problem, config, np.arange(work.tiles), tiles_n, band)
        if work.parts:
            small = _small_tiles(problem, config, work, tiles_n, band)
            columns = {name: np.concatenate([columns[name], small[name]]) for name in columns}
            own, turns = in_turn(work.parts, programs)
            before = np.bincount(program, minlength=programs)
            program, turn = np.concatenate([program, own]), np.concatenate([turn, before[own] + turns])
        return Walk(programs, at_once, program=program, turn=turn, **columns)

    def turns(self, problem: Problem, config: Config) -> float:
        work, sms = Waves.of(problem, config), problem.device.sms
        return float(-(-work.tiles // sms) + -(-work.parts // sms))

    def cuts(self, problem: Problem, config: Config) -> list[str]:
        work = Waves.of(problem, config)
        if not work.parts:
            return []
        cut = f"the last {work.cut} whole tiles" if work.cut else ""
        ragged = f"the {problem.N % config.block_n} columns beyond whole tiles" if work.strips else ""
        rows, cols = config.block_m // config.tail_m, config.block_n // config.tail_n
        return [
            f"{' and '.join(filter(None, (cut, ragged)))} are computed in {work.parts} small tiles of {rows}×{cols}; "
            f"drawn whole"
        ]


def _small_tiles(problem: Problem, config: Config, work: Waves, tiles_n: int, band: int) -> dict[str, Ints]:
    """The places of the parts of cut tiles, and after them of the ragged columns; as `kernels.place.tail_tile`."""
    c, tiles_m = config, -(-problem.M // config.block_m)
    unit = np.arange(work.cut * c.tail)
    columns = whole_tiles(problem, c, work.tiles + unit // c.tail, tiles_n, band)
    strip, part_n = np.divmod(np.arange(work.parts - len(unit)), max(work.strips, 1))
    strips = {
        "batch": strip // (tiles_m * c.tail_m), "row": strip // c.tail_m % tiles_m * c.block_m,
        "col": np.full_like(strip, tiles_n * c.block_n),
    }  # fmt: skip
    columns = {name: np.concatenate([columns[name], values]) for name, values in strips.items()}
    part_m = np.concatenate([unit % c.tail_m, strip % c.tail_m])
    part_n = np.concatenate([unit % c.tail // c.tail_m, part_n])
    rows, cols = c.block_m // c.tail_m, c.block_n // c.tail_n
    return columns | {
        "row": columns["row"] + part_m * rows, "col": columns["col"] + part_n * cols,
        "rows": np.full_like(part_m, rows), "cols": np.full_like(part_m, cols),
        "first_k": np.zeros_like(part_m), "last_k": np.full_like(part_m, problem.K),
        "step": np.full_like(part_m, c.tail_k),
    }  # fmt: skip


class PersistentBinding(Binding):
    """A `Binding` of the persistent kernel."""

    persistent = True
    kernel = gemm.gemm_persistent

    def _programs(self, units: int) -> int:
        return min(units, self.problem.device.sms)


PERSISTENT = Persistent()
