"""The matrix that an epilogue reads or writes, in tiles of any width: its parts pass through slots in the right order.

The kernel's own functions run in Python, for one warpgroup. `Slots` takes the place of shared memory and barriers. It
fails if a slot is overwritten that is still read or stored, or if a part is taken that is another one or not there.
"""

import inspect
import types

import pytest

pytest.importorskip("triton.experimental.gluon.language.nvidia.hopper")
from gemmery.kernels import any_width, any_width_acc, any_width_finish, any_width_given, any_width_loop

from .ptx import Program

PART_BYTES = 64 * 64 * 2
BARRIERS_AT, GROUP, OWN_SLOT = 1 << 20, 1, 40
FIRST_BARRIER = 2 * any_width.STAGES.value + 4 + any_width_given.OF_GROUP.value * GROUP


class Wrong(AssertionError):
    """A part was not where it was taken from, or a slot was not free."""


class Slots:
    """Slots and barriers of a warpgroup.

    Attributes:
        held: by slot: ("read", corner of the part that has been read into it) or ("stored", the warp that stores it).
        arrivals: by barrier, how often a part has arrived there.
        taken, results, seconds: corners of parts that were given to the epilogue, and of those that were stored.
        fetched: corners of parts that were fetched into L2.
    """

    def __init__(self):
        self.held, self.arrivals, self.taken, self.results, self.fetched, self.seconds = (
            {},
            {},
            [],
            [],
            [],
            [],
        )
        self.slot = None

    # --- what the kernel's functions call ---

    def read_into(self, at, arrived, warp, row, col, BYTES, MAP):
        slot, rest = divmod(at, PART_BYTES)
        assert (rest, BYTES, MAP) == (0, PART_BYTES, "map")
        what, whose = self.held.get(slot, ("free", None))
        if what == "read" or (what == "stored" and whose != warp):
            raise Wrong(f"slot {slot} is {what} by {whose}")
        self.held[slot] = ("read", (row, col))
        which, rest = divmod(arrived - BARRIERS_AT, 8)
        assert rest == 0
        self.arrivals[which] = self.arrivals.get(which, 0) + 1

    def fetch(self, warp, row, col, MAP):
        assert MAP == "map"
        self.fetched.append((row, col))

    def index(self, i):
        self.slot = i
        return self

    def wait(self, barrier, phase):
        which = barrier
        assert FIRST_BARRIER <= which < FIRST_BARRIER + any_width_given.OF_GROUP.value
        if self.arrivals.get(which, 0) == 0 or (self.arrivals[which] - 1) & 1 != phase:
            raise Wrong(f"nothing arrives at {which} in phase {phase}")

    def load(self, layout):
        what, corner = self.held.pop(self.slot, ("free", None))
        if what != "read":
            raise Wrong(f"slot {self.slot} is {what}")
        self.taken.append(corner)
        return types.SimpleNamespace(to=lambda dtype, bitcast: corner)

    def wait_for_slot(self, warp):
        self.held = {slot: held for slot, held in self.held.items() if held != ("stored", warp)}

    def store(self, value):
        # What is in the slot has been read, and what was stored from it has left it.
        if self.slot in self.held:
            raise Wrong(f"slot {self.slot} is {self.held[self.slot][0]}")
        self.held[self.slot] = ("written", value)

    def store_slot(self, at, warp, row, col, shape, X_FORM, Y_FORM, MAP):
        slot, rest = divmod(at, PART_BYTES)
        assert (rest, slot) == (0, self.slot)
        assert self.held[slot] == ("written", "second" if MAP else "first")
        self.held[slot] = ("stored", warp)
        (self.seconds if MAP else self.results).append((row, col))


def bodies(slots, **changed):
    """The kernel's functions with `slots` for what they call."""
    gl = types.SimpleNamespace(
        cdiv=lambda a, b: -(-a // b),
        to_tensor=bool,
        minimum=min,
        where=lambda p, a, b: a if p else b,
        static_range=range,
    )
    barriers = [types.SimpleNamespace(index=lambda i: i)]
    names = {
        "gl": gl, "STAGES": any_width.STAGES.value, "OF_GROUP": any_width_given.OF_GROUP.value,
        "IN_RING": any_width_given.IN_RING.value, "shared_at": lambda at: at, "read_into": slots.read_into,
        "fetch": slots.fetch, "mbarrier": types.SimpleNamespace(wait=slots.wait),
        "in_block": lambda value: value, "picked": lambda acc, index, PART: "blocks",
        "columns_of": lambda blocks: blocks, "blocks_of": lambda *more: "blocks",
        "lie_beside": any_width_finish.lie_beside, "wait_for_slot": slots.wait_for_slot, "upright": lambda blocks, *more: types.SimpleNamespace(type=types.SimpleNamespace(layout=None)),
        "column_halves": lambda block: (block, block), "barrier": lambda: None,
        "applied": lambda block, args, shape, row, col, EPILOGUE, PAIRED, IN_BATCH: EPILOGUE,
        "in_groups": lambda x, y: False, "is_batch": lambda x, y: False, "is_paired": lambda x, y: "pairs" in (x, y),
        "hopper": types.SimpleNamespace(fence_async_shared=lambda: None), "store_slot": slots.store_slot,
    }  # fmt: skip
    for module, chosen in ((any_width_given, ("corner_of", "read", "read_first", "read_others", "block_of")),
                           (any_width_finish, ("leave", "finish_part", "finish_next", "finish_tile"))):  # fmt: skip
        for name in chosen:
            made = inspect.unwrap(getattr(module, name))
            made = getattr(made, "fn", made)
            text = changed.get(name)
            if text is not None:
                made = text(made)
            names[name] = types.FunctionType(made.__code__, names, name, made.__defaults__)
    names["given"] = types.SimpleNamespace(read_first=names["read_first"], read_others=names["read_others"],
                                           block_of=names["block_of"])  # fmt: skip
    return types.SimpleNamespace(**names), barriers


class Value(str):
    """A block, named after the result that it is of."""

    def to(self, dtype, bitcast):
        return str(self)


def run(
    own, width, buffers, *, tiles, swap=False, packed=False, x_rows=128, reads=True, loops=False, **changed
):
    """Finishes some tiles, of which the last one is spread over the ring, as `any_width.consume` does.

    Args:
        reads: whether the epilogue reads a matrix; else it has a second result.
        loops: whether parts are finished in a loop.
    """
    slots = Slots()
    kernel, barriers = bodies(slots, **changed)
    out = types.SimpleNamespace(block_type=types.SimpleNamespace(shape=[64, 64]), dtype=None)
    slots.dtype = None
    total, taken, want = own // 64 * -(-width // 64), 0, []
    acc = ["block"] * (own // 64 * -(-256 // 64) * 8)
    x_form = "packed" if packed else "rows"
    for tile in range(tiles):
        row, col = 1000 * tile, 3000 * tile
        place = (row, col, width)
        if reads:
            kernel.given.read_first(
                out,
                place,
                total,
                taken,
                OWN_SLOT,
                tile == tiles - 1,
                "map",
                GROUP,
                swap,
                1,
                buffers,
                64,
                BARRIERS_AT,
            )
        spread = tile == tiles - 1
        kernel.finish_tile(
            acc, out, slots, barriers, (), None, row, col, width, spread, 0 if spread else OWN_SLOT, OWN_SLOT,
            None, taken, ("map", "dtype") if reads else None, None if reads else 7, GROUP,
            Value("first") if reads else (Value("first"), Value("second")), lambda value, dtype: value, swap, loops, x_form,
            "rows", own, x_rows, buffers, 64, BARRIERS_AT,
        )  # fmt: skip
        taken += total if reads else 0
        for m in range(own // 64):
            for at in range(0, width, 64):
                corner = row + 64 * m, col + min(at, width - 64)
                want.append(corner[::-1] if swap else corner)
    return slots, want


CASES = [(64, 64, 2), (64, 176, 2), (64, 256, 2), (128, 80, 2), (128, 144, 2), (128, 160, 1), (64, 200, 1)]


@pytest.mark.parametrize("swap", [False, True])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(("own", "width", "buffers"), CASES)
@pytest.mark.parametrize("tiles", [1, 2, 5])
@pytest.mark.parametrize("loops", [False, True])
def test_parts_come_in_order(own, width, buffers, packed, tiles, swap, loops):
    slots, want = run(own, width, buffers, tiles=tiles, swap=swap, packed=packed, loops=loops)
    assert slots.taken == want
    assert slots.results == want
    of_tile = len(want) // tiles
    assert slots.fetched == want[-of_tile:][buffers:]


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(("own", "width", "buffers"), CASES)
@pytest.mark.parametrize("tiles", [1, 3])
@pytest.mark.parametrize("loops", [False, True])
def test_second_results_leave_in_order(own, width, buffers, packed, tiles, loops):
    slots, want = run(own, width, buffers, tiles=tiles, packed=packed, reads=False, loops=loops)
    assert slots.results == slots.seconds == want
    assert not slots.taken


def replaced(old, new):
    """A function with other source, for a mutant."""

    def change(function):
        source = inspect.getsource(function)
        assert old in source, old
        lines = source[source.index("def ") :].replace(old, new)
        made = {}
        exec(compile("from __future__ import annotations\n" + lines, "mutant", "exec"), made)
        return made[function.__name__]

    return change


@pytest.mark.parametrize(("changed", "what"), [
    ({"read_others": replaced("part - 1 + BUFFERS", "part + BUFFERS")}, "nothing arrives"),
    ({"read_others": replaced("range(BUFFERS, total)", "range(BUFFERS + 1, total)")}, "nothing arrives"),
    ({"block_of": replaced("(taken + part) // BUFFERS & 1", "part // BUFFERS & 1")}, "in phase"),
    ({"read_first": replaced("own_slot + own, own, own", "own_slot + own, own, own + 1")}, "is stored by"),
    ({"corner_of": replaced("width - PART", "width")}, None),
])  # fmt: skip
def test_mistakes_are_found(changed, what):
    with pytest.raises(Wrong, match=what) if what else pytest.raises(AssertionError):
        for own, width, buffers in CASES:
            for tiles in (1, 2, 5):
                slots, want = run(own, width, buffers, tiles=tiles, **changed)
                assert slots.taken == want


@pytest.mark.parametrize("part", [16, 32, 64])
@pytest.mark.parametrize("parts", [1, 2, 3, 6])
def test_a_part_is_picked_out_of_an_accumulator(part, parts):
    texts = []

    def inline_asm_elementwise(text, *more, **how):
        texts.append(text)
        return ()

    gl = types.SimpleNamespace(
        inline_asm_elementwise=inline_asm_elementwise, int32=int, float32=float, tuple=list
    )
    made = inspect.unwrap(any_width_acc.picked)
    names = {"gl": gl, "value_of": any_width_loop.value_of, "switch": any_width_loop.switch}
    acc = types.SimpleNamespace(values=[None] * (parts * part // 8))
    types.FunctionType(made.__code__, names, "picked", made.__defaults__)(acc, None, part)
    size = part // 2
    for index in range(parts):
        registers = [None] * size + list(range(parts * size)) + [index] * 4
        Program(texts[0]).run(registers, types.SimpleNamespace(thread=0))
        assert registers[:size] == list(range(index * size, (index + 1) * size))
