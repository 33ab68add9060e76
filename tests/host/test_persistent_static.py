"""The division of tiles between programs that know their share beforehand: every step once, and the model's time alike."""

import itertools

from gemmery.schedules.persistent_static import Work


def shares(work, steps):
    """The shares of tiles that each program computes, as kernels do: program, tile, first step and end of the steps."""
    for program in range(work.programs):
        for tile in range(program, work.whole, work.programs):
            yield program, tile, 0, steps
        if program // work.parts < work.cut:
            low = program % work.parts * work.chunk
            yield program, work.whole + program // work.parts, low, min(low + work.chunk, steps)


CASES = [
    (tiles, steps, most, split)
    for tiles, steps, most, split in itertools.product(
        (1, 13, 40, 66, 80, 132, 168, 224), (1, 2, 8, 63, 64, 112, 400), (30, 66, 132), (1, 2, 3, 4, 8)
    )
]


def test_every_step_is_taken_once():
    for case in CASES:
        every_step_is_taken_once(*case)


def every_step_is_taken_once(tiles, steps, most, split):
    work = Work.divide(tiles, steps, most, split)
    assert work.programs <= most
    parts = {}
    for program, tile, low, high in shares(work, steps):
        assert low < high
        parts.setdefault(tile, []).append((low, high, program))
    assert sorted(parts) == list(range(tiles))
    for each in parts.values():
        ends = [0, *(high for _, high, _ in sorted(each))]
        assert [low for low, _, _ in sorted(each)] == ends[:-1]
        assert ends[-1] == steps


def test_a_cut_tile_has_several_parts_and_room_for_each():
    for case in CASES:
        work = Work.divide(*case)
        assert work.parts >= 2 if work.cut else work.parts == 1
        cut = [program for program, tile, _, _ in shares(work, case[1]) if tile >= work.whole]
        assert sorted(cut) == list(range(work.cut * work.parts))
        assert work.partials(16, 128) == 16 * 128 * len(cut)
        assert work.counters(2) == 2 * work.cut
        assert work.units(64) == (work.whole, len(cut), work.parts, 64 * work.chunk)


def test_shares_along_k():
    assert Work.divide(32, 224, 66, 2) == Work(64, 0, cut=32, parts=2, chunk=112)
    assert Work.divide(80, 80, 66, 4) == Work(66, 66, cut=14, parts=4, chunk=20)
    assert Work.divide(80, 80, 66, 8) == Work(66, 80)  # 112 parts for 66 programs
    assert Work.divide(60, 64, 66) == Work(60, 60)


def test_many_at_once():
    for tiles, steps, most, split in CASES:
        work = Work.divide(tiles, steps, most, split)
        whole, chunk, parts = map(int, Work.divide_many(tiles, steps, most, split))
        assert whole == -(-work.whole // most)
        assert chunk == (work.chunk if work.cut else 0)
        assert parts == work.parts
