"""The parts of an answer that come from a launch with its config: waves, the order of tiles, traffic."""

from __future__ import annotations

import functools
import itertools
import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from ... import schedules
from ...problem import Config, Problem
from .. import l2, tile_order
from ..tile_order import walk
from . import texts

#: Waves that the film of the order shows, and tiles in all of them; what comes after looks like them.
WAVES, SHOWN = 64, 4096
#: The most tiles that the page describes; more would take seconds.
TILES = 1 << 16


@dataclass(frozen=True)
class Launch:
    """A launched product, and its config."""

    problem: Problem
    config: Config

    @property
    def tiles(self) -> tuple[int, int]:
        """Rows and columns of tiles."""
        return -(-self.problem.M // self.config.block_m), -(-self.problem.N // self.config.block_n)

    @property
    def orders(self) -> list[tuple[str, str, int]]:
        """The title of each order, its name in `tile_order`, and its group size: plain rows, and the config's."""
        band = schedules.of(self.config.schedule).band(self.problem, self.config)
        return [("row by row", "row", 1), (f"in groups of {band}", "grouped", band)]

    @functools.cached_property
    def programs(self) -> int:
        """The number of tiles that are computed at once."""
        return tile_order.programs_at_once(self.problem, self.config)

    @functools.cached_property
    def traffics(self) -> list[l2.Traffic]:
        """The bytes that each order reads from memory."""
        p, c = self.problem, self.config
        return [
            l2.simulate(
                p.M, p.N, p.K, tile=(c.block_m, c.block_n, c.block_k), order=order, group_size=group_size,
                itemsize_a=p.a.dtype.itemsize, itemsize_b=p.b.bytes(p.K, p.N, ()) / (p.N * p.K), programs=self.programs,
                l2=p.device.l2,
            )
            for _, order, group_size in self.orders
        ]  # fmt: skip


# --- waves -----------------------------------------------------------------------------------------------------------


def waves(launch: Launch) -> dict[str, Any]:
    """The waves of a launch over the multiprocessors, the occupancy of each wave, and the part outside the matrix.

    A wave is one unit of work, a tile or a part of one, for each multiprocessor. It takes as long as its longest
    unit, and a unit as long as it has to compute.
    """
    problem, config, (tiles_m, tiles_n) = launch.problem, launch.config, launch.tiles
    schedule = walk(problem, config)
    places = problem.device.sms
    whole = config.block_m * config.block_n * max(problem.K, 1)
    work = schedule.rows * schedule.cols * (schedule.last_k - schedule.first_k) / whole
    wave = schedule.program // places + schedule.turn
    units, long = np.bincount(wave), np.zeros(wave.max() + 1)
    np.maximum.at(long, wave, work)
    beside = launch.programs // places
    where = texts.count(places, "multiprocessor")
    tiles = tiles_m * tiles_n
    cut = "" if len(schedule) == tiles else f", some cut: {texts.count(len(schedule), 'piece')} of work"
    return {
        "where": where if beside < 2 else f"{where}, {beside} programs side by side on each",
        "text": _waves_text(units, places),
        "tiles": {"value": tiles, "text": texts.grouped(tiles)},
        "grid": f"{tiles_m} × {tiles_n}{cut}",
        "busy": texts.part(work.sum() / (long.sum() * places)),
        "inside": texts.part(problem.M * problem.N / (work.sum() * config.block_m * config.block_n)),
        "runs": _runs(units, long, places),
    }


def _runs(units: np.ndarray, long: np.ndarray, places: int) -> list[dict[str, Any]]:
    """Waves that are alike, one after the other, joined: how many, how full, and their part of the launch's length."""
    total, made = long.sum(), []
    for (count, length), group in itertools.groupby(zip(units.tolist(), long.tolist(), strict=True)):
        number = len(list(group))
        made.append({
            "waves": number, "filled": count / places, "length": number * length / total,
            "text": f"{texts.count(number, 'wave')} of {count} of {places}",
        })  # fmt: skip
    return made


def _waves_text(units: np.ndarray, places: int) -> str:
    full, rest = int((units == places).sum()), units[units != places].tolist()
    said = [texts.count(full, "full wave")] if full else []
    if len(rest) < 4:
        said += [f"one of {x} of {places}" for x in rest]
    else:
        said.append(texts.count(len(rest), "partial wave"))
    return " and ".join(filter(None, (", ".join(said[:-1]), said[-1]))).capitalize()


# --- the order of tiles ----------------------------------------------------------------------------------------------


def order(launch: Launch) -> dict[str, Any]:
    """The order in which tiles are visited, row by row beside the config's own, wave by wave, with what each reads."""
    (tiles_m, tiles_n), programs = launch.tiles, launch.programs
    tiles = tiles_m * tiles_n
    waves = min(WAVES, max(SHOWN // programs, 1), -(-tiles // programs))
    orders = []
    for (text, name, group_size), traffic in zip(launch.orders, launch.traffics, strict=True):
        seen = tile_order.visits(tiles_m, tiles_n, name, group_size)[: waves * programs]
        parts = [seen[first : first + programs] for first in range(0, len(seen), programs)]
        rate, memory = texts.part(traffic.hit_rate)["text"], texts.size(traffic.memory)["text"]
        orders.append({
            "text": text, "hits": f"L2 hit rate {rate}, {memory} from memory",
            "visits": (seen[:, 0] * tiles_n + seen[:, 1]).tolist(),
            "waves": [_wave(part, read) for part, read in zip(parts, traffic.wave_memory, strict=False)],
        })  # fmt: skip
    shown = "" if waves * programs >= tiles else f"; the first {texts.grouped(waves * programs)} are shown"
    return {
        "where": f"{tiles_m} × {tiles_n} tiles, {min(programs, tiles)} at once{shown}", "text": _order_text(launch),
        "rows": tiles_m, "columns": tiles_n, "programs": programs, "tiles": min(waves * programs, tiles),
        "orders": orders,
    }  # fmt: skip


def _wave(tiles: np.ndarray, memory: int) -> str:
    rows, columns = (len(np.unique(part)) for part in tiles.T)
    uses = f"{texts.count(rows, 'row')} of A and {texts.count(columns, 'column')} of B"
    return f"{texts.count(len(tiles), 'tile')} use {uses}; {texts.size(memory)['text']} from memory"


def _order_text(launch: Launch) -> str:
    """The effect of the order, in a sentence."""
    (plain, own), (text, _, _) = launch.traffics, launch.orders[1]
    if launch.tiles[0] * launch.tiles[1] <= launch.programs:
        return "All tiles are computed at once, so that their order changes nothing."
    if plain.memory == own.memory:
        return f"Row by row and {text}, the same is read from memory: {texts.size(own.memory)['text']}."
    most, least = max(plain.memory, own.memory), min(plain.memory, own.memory)
    more = "Row by row" if plain.memory > own.memory else text.capitalize()
    return f"{more}, {texts.times(most / least)['text']} as much is read from memory."


# --- traffic ---------------------------------------------------------------------------------------------------------


def traffic(launch: Launch) -> dict[str, Any]:
    """The bytes of A and B that each level passes on, from the multiplications down to memory."""
    p, found = launch.problem, launch.traffics[1]
    # Every multiplication takes an element of A and one of B.
    used = p.matrices * p.M * p.N * p.K * (found.least_a / (p.M * p.K) + found.least_b / (p.N * p.K))
    asked, read, least = found.requested, found.memory, found.least
    tile = f"{launch.config.block_m} × {launch.config.block_n}"
    hits = texts.part(found.hit_rate)["text"]
    levels = [
        ("registers", "The multiplications use", used, "an element of A and of B each, in registers"),
        ("l2", "Tiles ask L2 for", asked, f"{_less(used, asked)}: what a tile of {tile} is for"),
        ("memory", "L2 asks memory for", read, f"{_less(asked, read)}: {hits} was in L2, in a simulation"),
        ("least", "A and B are", least, "each is read once" if read <= least else f"{_less(read, least)}, each once"),
    ]  # fmt: skip
    low, high = math.log10(least) - 0.5, math.log10(max(used, asked))
    behind = texts.size(p.bytes - found.least)["text"]
    return {
        "where": f"L2 of {p.device.l2 >> 20} MiB",
        "text": f"The bars are logarithmic. Behind the product, {behind} more are read or written.",
        "levels": [
            {
                "kind": kind, "name": name, "bytes": texts.size(size), "about": about,
                "share": (math.log10(size) - low) / (high - low),
            }
            for kind, name, size, about in levels
        ],
    }  # fmt: skip


def _less(before: float, after: float) -> str:
    return (
        f"{texts.times(before / after)['text']} less"
        if before >= after
        else f"{texts.times(after / before)['text']} more"
    )
