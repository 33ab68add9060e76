"""The ring of tiles of any width, run in Python: no interpreter of Triton runs its assembly.

The kernel's own functions run, each warp in a thread, and `ptx` runs their assembly. `Machine` takes the place of
barriers, of loads and of the tensor cores. It lets one thread run at a time, and picks the next one at random. It fails
if a block is read before it was loaded, if it is loaded while it is read, or if all warps wait.
"""

import functools
import inspect
import math
import operator
import random
import re
import threading
import types
from collections import Counter

import pytest
import torch

pytest.importorskip("triton.experimental.gluon.language.nvidia.hopper")
from gemmery.kernels import (
    any_width,
    any_width_cluster,
    any_width_finish,
    any_width_load,
    any_width_loop,
    any_width_packed,
    any_width_places,
    any_width_scales,
    any_width_sparse,
    any_width_stage,
)
from gemmery.schedules import any_width_tile
from gemmery.schedules.walk import divisor

from .device_functions import device_functions
from .ptx import Program

BARRIERS_AT = 1 << 17


class Wrong(AssertionError):
    """The warps have broken the ring's rules."""


class Constant(int):
    """A constant of the kernel's file, a number to what it traces and an object to what writes assembly."""

    value = property(int)


STEP, ROW, STAGES = 64, Constant(any_width_load.ROW.value), Constant(any_width.STAGES.value)
#: Where barriers begin of which each stage has one, those of turns, and the last one.
FREE_AT, TURNS_AT, UNUSED_AT = (BARRIERS_AT + 8 * at for at in (STAGES, 2 * STAGES, 2 * STAGES + 2))
#: The number of the barrier of the first place, and where that is.
PLACES = 2 * STAGES + 4
PLACES_AT = BARRIERS_AT + 8 * PLACES
TAKEN_AT = PLACES_AT + 8 * any_width_places.TAKEN_AT.value
#: 4-bit integers with scales, of which two steps have the same.
INT4 = any_width_packed.StageFormat("int", 4, 2 * STEP, "", 8)
#: The same with steps of 128 columns, and such steps with two groups.
LONG, TWO_GROUPS = INT4._replace(wide=True), INT4._replace(wide=True, group=STEP)
SPARSE, SPARSE_PAIRS = any_width_sparse.SparseStage(), any_width_sparse.SparseStage(paired=True)
WIDE, WIDE_PAIRS = SPARSE._replace(wide=True), SPARSE_PAIRS._replace(wide=True)
#: Bytes of the words of 32 rows and 32 columns.
WORDS = any_width_sparse.WORDS_BYTES
#: Warpgroups and widths of tiles with scales that have a kernel of their own, where N is a multiple of 128.
WIDE_SCALED = [
    (groups, width) for groups, widths in any_width_tile.WHOLE_SPANS.wide.items() for width in widths
]
#: From a row of a matrix of a batch to that of the next one.
MATRIX = 1 << 20
QUOTIENT = device_functions()["quotient"]
program = functools.cache(Program)


class Barrier:
    def __init__(self, count):
        self.count = self.pending = count
        self.bytes = self.phase = 0
        # Who has made it, and has not yet shown it to others.
        self.maker = threading.get_ident()

    def arrive(self, count=1):
        self.pending -= count
        if self.pending < 0:
            raise Wrong("more arrivals than a phase has")
        self.complete()

    def complete(self):
        if self.pending == 0 and self.bytes == 0:
            self.pending, self.phase = self.count, self.phase ^ 1


def of_threads(compute, *values):
    """The results of the four threads of a quad: a `Quad`, or one value if all results are the same."""
    each = [
        compute(*(value.each[i] if isinstance(value, Quad) else value for value in values)) for i in range(4)
    ]
    return each[0] if each.count(each[0]) == 4 else Quad(each)


def _operator(compute):
    return lambda self, *others: of_threads(compute, self, *others)


class Quad:
    """A register that differs between the four threads of a quad. Any other value is that of all threads."""

    def __init__(self, each):
        self.each = each

    def __bool__(self):
        raise Wrong("the threads of a quad go different ways")

    __add__ = __radd__ = _operator(operator.add)
    __mul__ = __rmul__ = _operator(operator.mul)
    __and__ = __rand__ = _operator(operator.and_)
    __sub__, __rsub__ = _operator(operator.sub), _operator(lambda x, y: y - x)
    __lshift__, __neg__ = _operator(operator.lshift), _operator(operator.neg)
    __eq__, __ne__ = _operator(operator.eq), _operator(operator.ne)
    __lt__, __le__ = _operator(operator.lt), _operator(operator.le)
    __gt__, __ge__ = _operator(operator.gt), _operator(operator.ge)
    __hash__ = None


class StepScales:
    """Scales along K, which are known by where they are, and the tiles that they are loaded for.

    Args:
        sizes: of the product.
        every: rows of A and columns of B that share a scale.
    """

    #: Where the scales of A and of B begin, and the bytes to the next row's or column's, and to the next step's.
    PLACES = ((1 << 20, 4, 10000), (1 << 30, 8, 1000))
    #: The threads of the quad that is run, and the first of its rows.
    LANES = range(20, 24)
    FIRST = LANES[0] // 4

    def __init__(self, sizes, every):
        self.sizes, self.every, self.tiles = sizes, every, {}
        self.step_args = [
            torch.tensor(each, dtype=torch.int64)
            for at, other, step in self.PLACES
            for each in (at, 0, other // 4, step // 4)
        ]

    def of_tile(self, step_args, row, col, shape, first_k, every_m, every_n):
        """Runs `any_width.scales_of`. A thread has two numbers of one row, and two of the row 8 behind it."""
        self.tiles[threading.get_ident()] = row, col, first_k // STEP
        gl = types.SimpleNamespace(
            int32=torch.int32, int64=torch.int64, static_range=range, SliceLayout=lambda *given: None,
            arange=lambda first, end, layout: torch.arange(first, end), expand_dims=torch.unsqueeze,
            zeros=lambda size, dtype, layout: torch.zeros(size, dtype=dtype),
            minimum=lambda x, y: x.clamp(max=y) if isinstance(x, torch.Tensor) else min(x, y),
            cast=lambda x, dtype: torch.as_tensor(x).to(dtype),
        )  # fmt: skip
        names = {"gl": gl, "BLOCK8": None, "in_block": lambda value: value}
        made = types.FunctionType(any_width.scales_of.fn.__code__, names)
        given = made(step_args, row, col, shape, first_k // STEP * 128, every_m, every_n)
        ends = [self.FIRST, self.FIRST + 8]
        return tuple(
            [each for row in torch.as_tensor(value)[ends, :2].tolist() for each in row]
            if torch.as_tensor(value).ndim
            else int(value)
            for value in given
        )

    def check(self, number, step, scale):
        """A number of an accumulator is added times the scales of its row and of its columns."""
        row, col, low = self.tiles[threading.get_ident()]
        # Rows and columns outside have some scale.
        row = min(row + self.FIRST + number // 2 % 2 * 8, self.sizes[0] - 1) // self.every[0]
        col = min(col + number // 4 * 8, self.sizes[1] - 1) // 128 * 128 // self.every[1]
        wanted = tuple(
            at + other * each + along_k * (low + step)
            for (at, other, along_k), each in zip(self.PLACES, (row, col), strict=True)
        )
        if scale != wanted:
            raise Wrong("not the scales of this block and step")

    def check_loads(self, loaded, steps):
        """The scales of all steps of a tile were loaded, and no other ones."""
        low = self.tiles[threading.get_ident()][2]
        middle = self.PLACES[1][0] // 2
        for (at, _, along_k), found in zip(
            self.PLACES, ([x for x in loaded if (x > middle) == of_b] for of_b in (False, True)), strict=True
        ):
            if {(x - at) // along_k - low for x in found} != set(range(steps)):
                raise Wrong("not the scales of the steps that exist")


#: What computes a register of others. A scale is a tuple of where it is, and a product has those of its factors.
COMPUTE = {"neg.s32": operator.neg, "max.s32": max, "mul.f32": operator.add}


class Machine:
    """Shared memory by rows of 128 bytes, or of 64 where kept numbers are; barriers by address, and loads under way."""

    def __init__(self, seed, waits):
        self.waits = waits
        self.random = random.Random(seed)
        self.barriers, self.rows, self.loads, self.met = {}, {}, [], {}
        # Places by their address, and how many warps have yet to take each.
        self.places, self.takers, self.untaken = {}, 0, {}
        self.reading = Counter()
        self.turns, self.warps, self.blocked, self.error = [], [], set(), None
        self.now = self.late = None

    # --- threads ---

    def run(self, functions):
        self.warps = list(range(len(functions)))
        # Each waits for its own, so that a turn wakes one thread.
        self.turns = [threading.Semaphore(0) for _ in functions]
        self.late = self.random.choice(self.warps)
        threads = [threading.Thread(target=self._warp, args=each) for each in enumerate(functions)]
        for thread in threads:
            thread.start()
        # No sooner: a thread that ended before another one began would lend it its identifier.
        self._pass_on(self.random.choice(self.warps))
        for thread in threads:
            thread.join()
        if self.error is not None:
            raise self.error

    def _warp(self, number, function):
        try:
            self._wait_for_turn(number)
            function()
        except Exception as error:
            # A thread can't raise it to the test; `run` does.
            self.error = self.error or error
        self.warps.remove(number)
        self._next()

    def _wait_for_turn(self, number):
        self.turns[number].acquire()
        if self.error is not None:
            raise self.error

    def _next(self):
        while self.loads and (self.random.random() < 0.2 or len(self.blocked) == len(self.warps)):
            self._land(self.loads.pop(self.random.randrange(len(self.loads))))
        if self.warps and len(self.blocked) == len(self.warps):
            self.error = self.error or Wrong("all wait")
        free = [warp for warp in self.warps if warp not in self.blocked]
        # One warp is late most of the time.
        others = [warp for warp in free if warp != self.late]
        self._pass_on(self.random.choice((others if self.random.random() < 0.95 else free) or free or [None]))

    def _pass_on(self, number):
        self.now = number
        if self.error is not None:
            # All end.
            for each in tuple(self.warps):
                self.turns[each].release()
        elif number is not None:
            self.turns[number].release()

    def pause(self, ready=lambda: True):
        """Lets another warp go on, and comes back when `ready` says so."""
        number = self.now
        while True:
            if not ready():
                self.blocked.add(number)
            self._next()
            self._wait_for_turn(number)
            if ready():
                return

    def changed(self):
        self.blocked.clear()

    # --- memory ---

    def wait(self, address, phase):
        if self.hidden(address):
            raise Wrong("a barrier that others do not see")
        barrier = self.barriers[address]
        self.pause(lambda: barrier.phase != phase or not self.waits(address))

    def arrive(self, address):
        if self.hidden(address):
            raise Wrong("a barrier that others do not see")
        self.barriers[address].arrive()
        self.changed()
        self.pause()

    def meet(self, key):
        """The four warps of a group wait for each other."""
        met = self.met.setdefault(key, [0])
        met[0] += 1
        last = -(-met[0] // 4) * 4
        self.changed()
        self.pause(lambda: met[0] >= last)

    def expect(self, address, count):
        if address not in self.barriers:
            raise Wrong("no barrier there")
        self.barriers[address].bytes += count
        self.barriers[address].arrive()
        self.changed()
        self.pause()

    def hidden(self, address):
        return address in self.barriers and self.barriers[address].maker is not None

    def show(self):
        """Others see the barriers that this thread has made."""
        for barrier in self.barriers.values():
            if barrier.maker == threading.get_ident():
                barrier.maker = None

    def put(self, address, numbers):
        if self.untaken.get(address):
            raise Wrong("a place that is not taken is written over")
        self.places[address], self.untaken[address] = numbers, self.takers
        self.pause()

    def take(self, address):
        if not self.untaken.get(address):
            raise Wrong("no place there")
        self.untaken[address] -= 1
        return self.places[address]

    def load(self, address, count, writes):
        self.loads.append((self.barriers[address], count, writes))
        self.pause()

    def _land(self, load):
        barrier, count, writes = load
        if any(self.reading[row] for row in writes):
            self.error = self.error or Wrong("loaded while it is read")
        self.rows.update(writes)
        barrier.bytes -= count
        barrier.complete()
        self.changed()


class Warp:
    """One warp's assembly.

    Args:
        boxes, forms: rows that are loaded at a time, and how they lie, of X and of Y.
        scaled: the `StepScales` that sums are multiplied by before they are added; None if there are none.
        streams: 1 where X is loaded with a cache policy, 2 where Y is.
        stage: the format of X, which is packed or sparse; otherwise None.
    """

    def __init__(self, machine, boxes, forms, streams, scaled, stage):
        self.stage = stage
        # A step of 128 columns is kept as two of 64.
        self.wide = stage is not None and stage.step > STEP
        self.machine, self.boxes, self.forms, self.streams, self.scaled = (
            machine,
            boxes,
            forms,
            streams,
            scaled,
        )
        self.thread, self.group, self.under_way = 0, [], []
        # For the registers of each sum of a group, its number, and the fourths along K that were multiplied.
        self.summed = {}
        # Registers that products under way read, and those that were written behind the last fence.
        self.busy, self.unfenced = Counter(), set()
        self.begin()

    def begin(self):
        self.steps, self.pieces, self.added, self.last = [], [], Counter(), (-1, -1)
        # Registers with sums that are not added yet, and where scales were loaded from.
        self.unadded, self.loaded = set(), set()

    @property
    def result(self):
        """The blocks of all steps that an accumulator holds."""
        if not self.added:
            return self.steps
        steps, last = [], ()
        for x, y in self.pieces:
            # Both 64 rows of a step begin at the same place along K.
            if x[0][-1:] != last:
                steps.append([])
            elif x == steps[-1][-1][0]:
                # A piece of a wide tile has the next columns.
                y = steps[-1].pop()[1] + y
            steps[-1].append((x, y))
            last = x[0][-1:]
        if set(self.added.values()) != {len(steps)}:
            raise Wrong("not all sums are added")
        if self.scaled is not None:
            self.scaled.check_loads(self.loaded, len(steps))
        return steps

    def ptx(self, code, arguments, value):
        """See `Program.run`."""
        if self.scaled is not None and (found := self._of_scales(code, arguments, value)) is not None:
            return arguments[0], found
        address = [self._address(each, value) for each in arguments if each.startswith("[")]
        if any(self.machine.hidden(each) for each in address if not code.startswith("mbarrier.init")):
            raise Wrong("a barrier that others do not see")
        if code.startswith("mbarrier.try_wait"):
            self.machine.wait(address[0], value(arguments[2]))
            return arguments[0], True
        if code.startswith("elect"):
            return arguments[0].split("|")[1], True
        if code.startswith("createpolicy"):
            return None
        if code.startswith("mbarrier.arrive.expect_tx"):
            self.machine.expect(address[0], value(arguments[2]))
        elif code.startswith("mbarrier.init"):
            assert address[0] not in self.machine.barriers
            # All four warps of a group arrive behind turns, of which Gluon makes one.
            each = 4 if UNUSED_AT <= address[0] < PLACES_AT else 1
            self.machine.barriers[address[0]] = Barrier(each * int(arguments[1]))
        elif code.startswith("fence.mbarrier_init"):
            self.machine.show()
        elif code.startswith("mbarrier.arrive"):
            self.machine.arrive(address[0])
        elif code.startswith("cp.async.bulk.tensor"):
            self._load(code, arguments, address, value)
        elif code.startswith("wgmma.mma_async.sp"):
            self._multiply_sparse(int(re.search(r"m64n(\d+)k32", code)[1]), arguments, value)
        elif code.startswith("wgmma.mma_async"):
            self._multiply(int(re.search(r"m64n(\d+)", code)[1]), arguments, value)
        elif code.startswith("wgmma.commit_group"):
            assert all(len(parts) == 4 for _, parts in self.summed.values())
            self.under_way.append([row for rows in self.group for row in rows])
            self.group = []
        elif code == "st.shared.v2.b32":
            self.machine.put(address[0], [value(each) for each in re.findall(r"[\w.$]+", arguments[1])])
        elif code == "ld.shared.v2.b32":
            return dict(zip(re.findall(r"[\w.$]+", arguments[0]), self.machine.take(address[0]), strict=True))
        elif code == "ld.shared.v4.b32":
            found = self.machine.rows.get(address[0] // 128 * 128)
            # The first thread's 16 bytes are the first of a block's first line, or, swizzled, the fifth.
            if found is None or address[0] % 128 != 64 * (found[2] % self.stage.step // STEP):
                raise Wrong("no words there")
            return re.findall(r"[\w.]+", arguments[0]), found
        elif code == "ld.shared.b16":
            # Those of a row, and of the one 8 behind it.
            return arguments[0], self.machine.rows.get(address[0] // 128 * 128)
        elif code == "ld.shared.b32":
            return arguments[0], self._metadata(arguments[0], address[0])
        elif code == "prmt.b32":
            self._write(arguments[0])
            return arguments[0], tuple(map(value, arguments[1:]))
        elif code == "unpack":
            self._unpack(arguments, value)
            return re.findall(r"[\w.]+", arguments[0]), (value(arguments[1]), int(arguments[3]))
        elif code.startswith("wgmma.wait_group"):
            self.wait(value(arguments[0]))
        elif code == "add.f32":
            total, same, number = arguments
            assert total == same
            self._add(total, number, value(total))
        elif code == "selp.b32":
            return arguments[0], value(arguments[1 if value(arguments[3]) else 2])
        elif code == "fma.rn.f32":
            total, number, scale, same = arguments
            assert total == same
            self._add(total, number, value(total), value(scale))
        elif code.startswith("wgmma.fence"):
            self.unfenced.clear()
        else:
            assert code.startswith(("fence.proxy.async", "prefetch.tensormap")), code
        return None

    def _of_scales(self, code, arguments, value):
        """Returns what an instruction writes that finds scales, and None of any other instruction."""
        if code == "ld.global.f32":
            return self._loaded(value(arguments[1].strip("[]")))
        if code in COMPUTE:
            return of_threads(COMPUTE[code], *map(value, arguments[1:]))
        if code == "shfl.sync.idx.b32":
            # A thread gets the register of the thread of its quad that it names.
            assert arguments[3:] == ["0x1C1F", "0xffffffff"]
            given, lane = map(value, arguments[1:3])
            return of_threads(lambda i: given.each[i & 3] if isinstance(given, Quad) else given, lane)
        if code == "lop3.b32":
            # Bits of the second where those of the first are set, otherwise of the third.
            assert arguments[4] == "0xCA"
            return value(arguments[{-1: 2, 0: 3}[value(arguments[1])]])
        return None

    def _loaded(self, address):
        """A scale is known by where it is. If several threads load the same one, only the last of them may use it.

        The others have no step of their own in the first group.
        """
        each = address.each if isinstance(address, Quad) else [address] * 4
        self.loaded.update(each)
        return Quad([("nobody's",) if at in each[i + 1 :] else (at,) for i, at in enumerate(each)])

    def _write(self, register):
        """A register with metadata is written, which no product reads any more."""
        if self.busy[register]:
            raise Wrong("metadata changes while products read it")
        self.unfenced.add(register)

    def _metadata(self, register, address):
        """Returns the first row and column of the block of words that a word is of."""
        self._write(register)
        found = self.machine.rows.get(address // WORDS * WORDS)
        if found is None:
            raise Wrong("no metadata there")
        return found

    def _unpack(self, arguments, value):
        """An operand is unpacked into registers that no product reads any more, with the scales of its words."""
        if any(self.busy[each] for each in re.findall(r"[\w.]+", arguments[0])):
            raise Wrong("unpacked while products read it")
        (_, row, k), scale = value(arguments[1]), value(arguments[2])
        if scale != ("s", row, k // self.stage.group):
            raise Wrong("not the words' scales")

    def _add(self, total, number, start, scale=None):
        """A thread's number of the step's product is added to its total, maybe times a scale.

        Args:
            start: what the total was set to before the first step.
        """
        if self.under_way:
            raise Wrong("added before it is there")
        if start != 0:
            raise Wrong("a sum that does not begin with 0")
        of, place = (int(re.search(r"\d+", each)[0]) for each in (total, number))
        if place == 0:
            # The second piece of a step goes on behind the first one's totals.
            goes_on = self.pieces and self.pieces[-1][0] == self.steps[-1][0][0]
            self.pieces += self.steps[-1]
            self.last = self.last[0] if goes_on else -1, -1
        assert place == self.last[1] + 1, "not the next number"
        assert of > self.last[0], "not the next total"
        if scale is not None:
            if of != self.last[0] + 1:
                raise Wrong("not the next total")
            self.scaled.check(of, self.added[total], scale)
        self.last = of, place
        self.added[total] += 1
        self.unadded.discard(number)

    @staticmethod
    def _address(text, value):
        return sum(
            part if isinstance(part := value(each), int) else 0 for each in text.strip("[]").split("+")
        )

    def _load(self, code, arguments, address, value):
        tensor_map, at = re.fullmatch(r"\[(\S+), (\{.*\})\]", arguments[1]).groups()
        number, places = value(tensor_map), [value(each) for each in at.strip("{}").split(",")]
        is_sparse = self.forms[0].startswith("sparse")
        maps = any_width_load.maps_of(*self.forms)
        is_params = number not in (f"gemm_any_width_param_{maps.x}", f"gemm_any_width_param_{maps.y}")
        if is_sparse and is_params:
            _, group, *_, block = places
            # In a stage, blocks of words are first of 32 columns, then of a half's rows, then of 32 or 64 rows.
            pairs, blocks = self.forms[0].endswith("pairs"), 4 if self.wide else 2
            firsts = [
                32 * (2 * (block + i) if pairs else block + i) + 8 * half
                for i in range(self.boxes[0] // (64 if pairs else 32))
                for half in range(2 if pairs else 1)
            ]
            writes = {
                address[0] + WORDS * (blocks * i + j): ("m", first, 32 * (group + j))
                for i, first in enumerate(firsts)
                for j in range(blocks)
            }
            self.machine.load(address[-1], WORDS * len(writes), writes)
            return
        if self.forms[0] == "packed" and is_params:
            row, group = places
            # If a step has several groups, 64 rows are loaded at a time.
            groups = self.stage.groups
            rows = self.boxes[0] if groups == 1 else 64
            writes = {
                address[0] + 2 * groups * i + 128 * j: ("s", row + i, group + j)
                for i in range(0, rows, 64)
                for j in range(groups)
            }
            self.machine.load(address[-1], 2 * groups * rows, writes)
            return
        operand = 0 if number == "gemm_any_width_param_0" else 1
        if operand == 0 and self.forms[0] == "packed":
            _, line, strip = places
            each = self.stage.words // 128
            lines = self.boxes[0] // 16 * each
            writes = {
                address[0] + 128 * i: ("x", 16 * (strip + i // each), 16 * (line + i % each))
                for i in range(lines)
            }
            self.machine.load(address[-1], 128 * lines, writes)
            return
        k, row, *more = places
        if self.forms[operand].endswith("turned"):
            (row, k), (first, *more) = (k, row), more
            assert first == 0
        if self.forms[operand].startswith("many"):
            row += MATRIX * more[0]
        of_kept = is_sparse and operand == 0
        if of_kept:
            k *= 2
        if self.forms[operand].endswith("pairs"):
            # Its first coordinates are k and a row of the first eight of the first half.
            assert (row, more[0]) == (0, 0)
            row = 16 * more[1]
        if code.endswith("cache_hint") != (self.streams == operand + 1):
            raise Wrong("not the operand's cache policy")
        rows, name, size = self.boxes[operand], "xy"[operand], 64 if of_kept and not self.wide else 128
        if self.forms[operand].endswith("turned"):
            writes = {
                address[0] + 8192 * block + 128 * i: (name, row + 64 * block, k + i)
                for block in range(rows // 64)
                for i in range(64)
            }
        else:
            writes = {address[0] + size * i: (name, row + i, k) for i in range(rows)}
        self.machine.load(address[-1], size * rows, writes)

    def _multiply(self, width, arguments, value):
        if arguments[1].startswith("{"):
            self._multiply_pieces(width, arguments, value)
            return
        at = [value(each) * 16 for each in arguments[1:3]]
        # A fourth along K of each 64 rows of X, and then the next one.
        part = at[1] % 8192 // 2048 if self.forms[1].endswith("turned") else at[1] % 128 // 32
        lines = [self._lines(i, at[i], rows, part) for i, rows in ((0, 64), (1, width))]
        self.machine.reading.update(lines[0] + lines[1])
        self.group.append(lines[0] + lines[1])
        self.machine.pause()
        read = tuple(self._read(i, lines[i], part) for i in range(2))
        if len(self.group) == 1:
            # A piece of a step that is promoted begins a sum of its own.
            self.steps = [*(self.steps if value(arguments[3]) else []), []]
            self.summed = {}
        registers = tuple(re.findall(r"[$\w.]+", arguments[0]))
        number, parts = self.summed.setdefault(registers, (len(self.summed), []))
        assert parts == [*range(part)], "not the next fourth along K of these sums"
        parts.append(part)
        if part == 0 and not value(arguments[3]):
            self._begin_sums(registers)
        if part == 0:
            self.steps[-1].append(read)
        elif read != self.steps[-1][number]:
            raise Wrong("a stage changes while it is read")

    def _begin_sums(self, registers):
        """Sums of a step that is promoted are written to registers whose sums were added."""
        if not self.unadded.isdisjoint(registers):
            raise Wrong("sums are overwritten before they are added")
        self.unadded.update(each for each in registers if not each.startswith("$"))

    def _lines(self, operand, at, rows, part):
        """Returns where the lines are that hold a fourth of a step: one for each row, or 16 for each 64 turned rows."""
        if self.forms[operand].endswith("turned"):
            assert at % 8192 == 2048 * part, "not the next fourth along K"
            return [at + 8192 * chunk + 128 * i for chunk in range(-(-rows // 64)) for i in range(16)]
        assert at % 128 == 32 * part, "not the next fourth along K"
        return [at - 32 * part + 128 * i for i in range(rows)]

    def _read(self, operand, lines, part):
        """Returns the contents of lines, as rows that begin where the step begins along K."""
        found = [self.machine.rows.get(line) for line in lines]
        if not self.forms[operand].endswith("turned") or None in found:
            return tuple(found)
        name, first, k = found[0]
        if found != [(name, first + 64 * (i // 16), k + i % 16) for i in range(len(found))]:
            return tuple(found)
        return tuple((name, first + i, k - 16 * part) for i in range(64 * len(found) // 16))

    def _multiply_sparse(self, width, arguments, value):
        """As `_multiply`, of half of 64 columns, with X's kept numbers and a word of metadata."""
        x, y = (value(each) * 16 for each in arguments[1:3])
        words, half = arguments[3], value(arguments[4])
        if half != len(self.group) % 2:
            raise Wrong("not the lanes that have this half's metadata")
        # Which 64 columns of a wide step.
        part = len(self.group) % 4 // 2 if self.wide else 0
        size, at = (128, 32 * half + 64 * part) if self.wide else (64, 32 * half)
        assert x % size == at, "not the next half of the kept numbers"
        kept = [x - at + size * i for i in range(64)]
        turned = self.forms[1].endswith("turned")
        if turned:
            assert y % 8192 == 4096 * half, "not the next half of Y"
            others = [y + 8192 * chunk + 128 * i for chunk in range(-(-width // 64)) for i in range(32)]
        else:
            assert y % 128 == 64 * half, "not the next half of Y"
            others = [y - 64 * half + 128 * i for i in range(width)]
        if words in self.unfenced:
            raise Wrong("no fence behind the metadata")
        self.machine.reading.update(kept + others)
        self.busy[words] += 1
        self.group.append([*kept, *others, words])
        self.machine.pause()
        read = tuple(map(self.machine.rows.get, kept)), tuple(map(self.machine.rows.get, others))
        if turned and None not in read[1]:
            name, first, k = read[1][0]
            if list(read[1]) != [(name, first + 64 * (i // 32), k + i % 32) for i in range(len(others))]:
                raise Wrong("not the blocks of this step")
            read = read[0], tuple((name, first + i, k - 32 * half) for i in range(64 * len(others) // 32))
        if part and None not in read[0]:
            read = tuple((name, row, k + 64) for name, row, k in read[0]), read[1]
        self._check_words(read[0][0], value(words), half)
        adds = value(arguments[5])
        sums = re.findall(r"[$\w.]+", arguments[0])
        if adds and sums[0].startswith("$") and any(value(each) != 0 for each in sums):
            raise Wrong("a sum that does not begin with 0")
        if half and not adds:
            raise Wrong("half a step is not added")
        if len(self.group) == 1:
            self.steps = [*(self.steps if adds else []), [], *([[]] if self.wide else [])]
        step = self.steps[part - 2 if self.wide else -1]
        if half == 0:
            step.append(read)
        elif read != step[-1]:
            raise Wrong("a stage changes while it is read")

    def _check_words(self, first, found, half):
        """A thread's word must be of the rows whose first one is given, if the product of this half reads the word."""
        if first is None or self.thread // 2 % 2 != half:
            return
        _, row, k = first
        upper, last = self.thread // 32 % 2, self.thread // 64 % 2
        if self.forms[0].endswith("pairs"):
            # Lower or upper halves of both words.
            blocks = [("m", row + 8 * i, k + 32 * half) for i in range(2)]
            wanted = (*blocks, 0x7632 if upper else 0x5410)
        else:
            wanted = ("m", row + 32 * last, k + 32 * half)
        if found != wanted:
            raise Wrong("not the metadata of these numbers")

    def _multiply_pieces(self, width, arguments, value):
        """As `_multiply`, with one of the operands of a packed step."""
        pieces = re.findall(r"[\w.]+", arguments[1])
        (found, part), y = value(pieces[0]), value(arguments[2]) * 16
        assert y % 128 == 32 * part, "not the operand's sixteenth along K"
        others = [y - 32 * part + 128 * i for i in range(width)]
        self.machine.reading.update(others)
        self.busy.update(pieces)
        self.group.append([*others, *pieces])
        self.machine.pause()
        _, row, k = found
        read = (
            tuple(("x", row + i, k) for i in range(64)),
            tuple(self.machine.rows.get(each) for each in others),
        )
        if part == 0 and len(self.group) == 1:
            if value(arguments[3]) == 0:
                self.steps = []
            self.steps.append([])
        if part == 0:
            self.steps[-1].append(read)
        elif read not in self.steps[-1]:
            raise Wrong("a stage changes while it is read")

    def wait(self, left):
        while len(self.under_way) > left:
            done = self.under_way.pop(0)
            for each in done:
                (self.machine.reading if isinstance(each, int) else self.busy)[each] -= 1


def kernel(machine, number, programs, groups, threads, boxes, forms, streams, scaled, stage, edit, changes):
    """The kernel's functions with what stands in for Gluon.

    Args:
        number: which program this is.
        groups: the warpgroup of each thread of Python; None for a loader's.
        threads: the number of the first thread of each loader's warp.
        boxes, forms, streams, scaled, stage: see `Warp`.
        edit: changes the assembly.
    """
    warps = {}

    def inline_asm_elementwise(text, constraints, given, *, pack, **more):
        warp = warps.setdefault(threading.get_ident(), Warp(machine, boxes, forms, streams, scaled, stage))
        outputs = constraints.count("=")
        values = [None] * outputs
        for each in given:
            # A list has what each number of a thread is.
            values += each if isinstance(each, list) else [each] * pack
        text = edit(text).replace("%laneid", f"${len(values)}")
        values.append(Quad(StepScales.LANES))
        warp.begin()
        warp.thread = threads.get(threading.get_ident(), 0)
        program(text).run(values, warp)
        if warp.under_way or warp.group:
            raise Wrong("the sum is read before it is there")
        # The numbers of a place come back one by one.
        return values[:outputs] if constraints.startswith("=&r") else warp.result

    def barrier():
        # Loaders' warps do not wait for each other.
        group = groups[threading.get_ident()]
        if group is not None:
            machine.meet(group)

    gl = types.SimpleNamespace(
        constexpr=int, where=lambda condition, x, y: x if condition else y, to_tensor=int, cdiv=lambda x, y: -(-x // y),
        program_id=lambda axis: number, num_programs=lambda axis: programs, minimum=min, maximum=max, int32=int,
        float32=float, inline_asm_elementwise=inline_asm_elementwise, tuple=list,
    )  # fmt: skip
    own = {
        name: value
        for file in (any_width_load, any_width_loop, any_width_places, any_width)
        for name, value in vars(file).items()
        if name[:2] != "__"
    }
    kept = (
        "matrix_of",
        "is_any",
        "value_of",
        "x_bytes",
        "params_bytes",
        "y_blocks_of",
        "HEAD",
        "releasing",
        "switch",
        "WAIT",
        "NOWHERE",
        "maps_of",
        "SPAN",
        "WIDEST_PIECE",
        "Scales",
        "scaled_sums",
        "starts_of",
    )

    def unpacked(format, kind, own, piece):
        lines = []
        for i in range(own):
            pieces = ", ".join(any_width_packed.pieces_of(i, piece))
            word = any_width_packed.words_of(format, i, piece * format.blocks // format.pieces)[0]
            scale = any_width_packed.suffix(i, piece * format.groups // format.pieces, 0)
            lines.append(f"unpack {{{pieces}}}, {word}, scale{scale}, {piece % any_width_packed.PIECES};")
        return "".join(lines)

    unpacking = vars(any_width_packed) | {"prepare": lambda *given: "", "unpacked": unpacked}
    steps = types.FunctionType(any_width_packed.StageFormat.steps.__code__, unpacking)
    emulated = type("Emulated", (any_width_packed.StageFormat,), {"steps": steps})

    def format_of(text):
        found = any_width_loop.format_of(text)
        return emulated(*found) if isinstance(found, any_width_packed.StageFormat) else found

    names = {
        name: value for name, value in own.items() if name.startswith("_") or name in kept
    } | {
        "format_of": format_of,
        "x_bytes_of": lambda rows, format: any_width_stage.x_bytes(rows, any_width_loop.format_of(format)),
        "lie_beside": any_width_finish.lie_beside, "own_rows": any_width.own_rows, "first_row": any_width.first_row,
        "is_paired": lambda x, y: x.endswith("pairs") or y.endswith("pairs"), "is_turned": lambda form: form.endswith("turned"), "zeroed": any_width_stage.zeroed,
        "in_groups": lambda x, y: "grouped" in x + y, "in_ranges": lambda x, y: "ranged" in x,
        "gl": gl, "ahead_of": ahead_of, "loaders_of": any_width_load.loaders_of, "LOADERS": any_width_cluster.LOADERS, "LAST_ROW": any_width_load.LAST_ROW, "SMALL": any_width_load.SMALL, "ROW": ROW, "STAGES": STAGES,
        "PLACES": Constant(any_width_places.PLACES.value), "COUNT": Constant(any_width_places.COUNT.value), "BITS": any_width_places.BITS.value,
        "LEAD": any_width_places.LEAD.value, "TAKEN": Constant(any_width_places.TAKEN.value), "TAKEN_AT": Constant(any_width_places.TAKEN_AT.value),
        "step_of": any_width_loop.step_of,
        "later": types.FunctionType(any_width.later.fn.__code__, {"quotient": QUOTIENT}), "quotient": QUOTIENT, "shared_at": lambda at: at,
        "matrix_descriptor": lambda address, chunk: address // 16,
        "in_block": lambda value: value,
        "prefetch_vectors": lambda *given: None,
        "barrier": barrier, "computed": lambda value: value, "mbarrier": types.SimpleNamespace(wait=machine.wait, arrive=machine.arrive),
        "tma": types.SimpleNamespace(store_wait=lambda left: None)
    } | changes  # fmt: skip
    for name in (
        "begin",
        "load_steps",
        "multiply_steps",
        "put_place",
        "got_place",
        "say_taken",
        "wait_until_taken",
    ):
        function = inspect.unwrap(own[name])
        made = types.FunctionType(function.__code__, names, name, function.__defaults__)
        names.setdefault(name, made)
    for name in (
        "_operands",
        "_load",
        "_places",
        "_steps",
        "_step",
        "_promoted_step",
        "_tail",
        "_products",
    ):
        names[name] = types.FunctionType(own[name].__code__, names, name, own[name].__defaults__)
    for name in (
        "turn_at",
        "edge_of",
        "end_of_units",
        "unused",
        "placed",
        "corner",
        "sum_steps",
        "post_place",
        "take_place",
        "take_next",
        "place_tiles",
        "produce",
        "heads_of",
        "slots_of",
        "consume",
    ):
        made = types.FunctionType(getattr(any_width, name).fn.__code__, names, name)
        names.setdefault(name, made)
    return names


def emulate(
    seed,
    groups,
    x_rows,
    width,
    stages,
    takes_turns,
    sizes,
    parts=1,
    forms=("rows", "rows"),
    promotes=False,
    scales=False,
    format=None,
    clustered=False,
    edge=0,
    ranges=(),
    arrivals=0,
    waits=lambda at: True,
    edit=lambda text: text,
    **changes,
):
    """One program of three, or of those of all clusters, whose tiles must have the blocks of the right rows and steps.

    Returns the numbers of its edge tiles.

    Args:
        parts: of tiles that would not fill a last wave, along K.
        forms: how X and Y lie.
        promotes: whether each step is summed by itself and then added.
        scales: whether it is multiplied by scales before.
        format: of X, which is packed.
        clustered: whether all tiles are cut, and the programs that have the parts of one are a cluster.
        edge: columns that the tiles at the end of Y multiply, which come last; 0 if all their columns.
        ranges: of K, one for each row of tiles; () if all tiles have all of K. All tiles are whole.
        arrivals: how many more a stage waits for than there are before it is loaded again.
        waits: whether there is any waiting at a barrier.
        edit: changes the assembly.
        changes: functions of the kernel that others take the place of.
    """
    M, N, K = sizes
    machine = Machine(seed, waits)
    done, own = [], x_rows if takes_turns else -(-x_rows // (64 * groups)) * 64

    def combine(acc, unit, ring, *rest):
        # This program's part is the last one to be done: the other ones come into the ring.
        machine.wait(unused, 0)
        if any(machine.reading.values()):
            raise Wrong("the ring is read when other parts come into it")
        return True, part_of(unit)

    def finish_tile(
        acc, out, slots, ring, args, shape, row, col, width, spread, first_slot, own_slot, cut, *rest
    ):
        # What is stored lies where this warpgroup's rows of X were.
        slot_rows = [
            128 * (64 * first_slot + stage * x_rows + i) for stage in range(stages) for i in range(own)
        ]
        if format is not None or x_rows % 64:
            # All of it: parts lie side by side.
            slot_rows = range(0, 128 * stages * (x_rows + width), 64)
        if spread and any(machine.reading[at] for at in slot_rows):
            raise Wrong("the ring is read when it has become slots")
        first_k, last_k = (0, K) if cut is None or cut[0] is False else cut
        if ranges:
            first_k, last_k = ranges[row // x_rows]
        # Rows of the second matrix of a batch have large numbers.
        row, col = (each + MATRIX * shape[2] for each in (row, col))
        for step, found in enumerate(acc):
            k = first_k + step * STEP
            y = tuple(("y", col + i, k) for i in range(width))
            firsts = range(row, row + own, 64)
            if found != [(tuple(("x", first + i, k) for i in range(64)), y) for first in firsts]:
                raise Wrong("not the blocks of this step")
        if len(acc) != -(-(last_k - first_k) // step_size) * step_size // STEP:
            raise Wrong("not all steps")
        done.append((row, col))

    def finish_in_cluster(acc, out, slots, ring, args, shape, row, col, width, cluster, own_slot, *rest):
        assert cluster == (parts, divisor(parts))
        finish_tile(
            acc, out, slots, ring, args, shape, row, col, width, False, own_slot, own_slot, part_of(1)
        )

    every = [(1, 128), (128, 256)][seed % 4 == 3]
    scaled = StepScales(sizes, every) if scales else None
    of_thread, threads, begun, met = {}, {}, [], []
    readers = 4 * (1 if takes_turns else groups) + arrivals
    loading = 2 if x_rows == any_width_load.SMALL[0] else 1
    machine.takers = 4 * (1 if takes_turns else groups) + loading
    # Two boxes of each operand, of which the second one has some rows of the first.
    boxes = tuple((rows // 32 + 1) * 16 for rows in (x_rows, width))
    # Turned rows are loaded 64 at a time, or all at once.
    turned = (64, max(x_rows, width))[seed % 2]
    boxes = tuple(
        min(turned, rows) if form.endswith("turned") else box
        for form, rows, box in zip(forms, (x_rows, width), boxes, strict=True)
    )
    if format is not None:
        boxes = random.Random(seed).choice((64, x_rows)), boxes[1]
    stood_in = {
        "finish_tile": finish_tile, "combine": combine, "finish_in_cluster": finish_in_cluster,
        "scales_of": scaled and scaled.of_tile,
        "arrive_in_cluster": lambda: met.append(threading.get_ident()),
        "in_ranges": lambda x_form, y_form: bool(ranges), "in_order": lambda unit, state, table: unit,
    } | changes  # fmt: skip
    stage_format, is_sparse = any_width_loop.format_of(format), forms[0].startswith("sparse")
    step_size = STEP if stage_format is None else stage_format.step
    streams, apart = random.Random(seed).randrange(3), 16 if forms[0] == "packed" or scales else 8
    less, more = (edge, 2 * width - edge) if edge else (width - apart, width + apart)
    widths = random.Random(seed).sample([less, width, more], 3)
    if scales and (groups, width) in WIDE_SCALED:
        assert N % 128 == 0
        widths = [width]
    unused = BARRIERS_AT + 8 * (2 * STAGES + 2)
    barriers = types.SimpleNamespace(index=lambda at: BARRIERS_AT + 8 * at)
    ring = (barriers, stages, divisor(stages))
    down, across = -(-M // x_rows), -(-N // width) - (edge > 0)
    each = down * across
    tiles = each * (2 if forms[0].startswith("many") else 1)

    # Three programs run at once, or all clusters.
    whole = 0 if clustered else tiles if parts == 1 else tiles // 3 * 3
    units, part_k = whole + (tiles - whole) * parts, -(-K // step_size // parts) * step_size
    programs = units if clustered else 3
    edges = []
    if edge:
        # Those of program 1, and the end of the last turn.
        free = programs - whole % programs
        edges = list(range(1 - whole % programs, down, free)) if whole % programs < 2 else []
        units = (whole // programs - -down // free) * programs
    names = kernel(
        machine, 1, programs, of_thread, threads, boxes, forms, streams, scaled, stage_format, edit, stood_in
    )

    def part_of(unit):
        first_k = (unit - whole) % parts * part_k
        return (0, K) if unit < whole else (first_k, min(first_k + part_k, K))

    def place(unit, state, shape, rows, cols, band):
        number = min(unit, whole) + max(unit - whole, 0) // parts
        matrix, number = divmod(number, each)
        row, col = number // across * rows, number % across * cols
        return matrix, row, col, shape[0], *(ranges[number // across] if ranges else part_of(unit))

    last = divisor(programs if edge else parts)
    state, tile = (units, whole, parts, part_k, down, across, (1, 1, 1, last)), (width, 8, edge)
    # PROMOTES, EVERY, X_ROWS, its widths, SWAP, CLUSTERED, LOOPS, PINGPONG, FORMAT, both forms, BUFFERS, PART, RING_BYTES,
    # BARRIERS_AT and PLACES.
    constants = (
        promotes,
        (*every, math.gcd(N, 128)) if scales else None,
        x_rows,
        widths,
        False,
        clustered,
        False,
        takes_turns,
        format,
        *forms,
        1,
        16 if clustered else 64,
        BARRIERS_AT // 2,
        BARRIERS_AT,
        PLACES,
    )

    def first():
        return names["corner"](
            1, ("the order of ranges",), state, sizes, tile, place, False, x_rows, False, *forms
        )

    def wait_for_roles():
        machine.pause(lambda: begun)

    # No epilogue, and no matrix of one.
    parameters = list(inspect.signature(any_width.consume.fn).parameters)
    nothing = [None] * (parameters.index("KIND") - parameters.index("READY"))

    def consume(group, warp):
        wait_for_roles()
        of_thread[threading.get_ident()] = group
        if is_sparse:
            # Which word a thread has depends on its number.
            threads[threading.get_ident()] = 32 * warp + random.Random(seed + warp).randrange(32)
        names["consume"](
            None,
            None,
            ring,
            first(),
            scaled.step_args if scales else (),
            (),
            None if parts == 1 else (),
            sizes,
            state,
            tile,
            group,
            groups,
            edge > 0,
            *nothing,
            "bf16.bf16",
            *constants,
        )

    def produce(warp):
        of_thread[threading.get_ident()] = None
        # All boxes of each operand; the last one of rows that warpgroups share may repeat some.
        counts = [128 * box * -(-rows // box) for box, rows in zip(boxes, (x_rows, width), strict=True)]
        if format is not None:
            loaded = boxes[0] * -(-x_rows // boxes[0])
            of_params = any_width_stage.params_bytes(loaded, stage_format)
            counts[0] = any_width_stage.x_bytes(loaded, stage_format) + of_params
            counts[1] *= stage_format.y_blocks
        loads = boxes[0], counts[0], boxes[1], counts[1], streams
        behind = x_rows, step_size
        lie = format, *forms, BARRIERS_AT, PLACES
        if warp == 0:
            # One thread stands in for all of the first warpgroup. Its first warp may use no other one's barriers.
            row, col, _, first_k, last_k, batch, _ = first()
            last_k = min(last_k, first_k + min(stages, ahead_of(x_rows)) * step_size)
            given = first_k, last_k, row, *loads[:2], col, width, *loads[2:], batch
            for each in range(4):
                threads[threading.get_ident()] = 32 * each
                names["begin"](BARRIERS_AT, stages, *given, readers, groups, *behind, *lie[:-2])
            begun.append(True)
            machine.changed()
        # The number of the first of some loading warps is a multiple of 4. Triton may put warps before a single one.
        threads[threading.get_ident()] = 32 * (warp if loading > 1 else 2)
        wait_for_roles()
        names["produce"](
            ring,
            first(),
            sizes,
            state,
            tile,
            loads,
            ((), ()),
            edge > 0,
            *behind,
            False,
            clustered,
            *lie,
        )

    def place_tiles():
        of_thread[threading.get_ident()] = None
        wait_for_roles()
        names["place_tiles"](
            ring,
            first(),
            sizes,
            state,
            tile,
            place,
            edge > 0,
            x_rows,
            step_size,
            False,
            *forms,
            BARRIERS_AT,
            PLACES,
        )

    if clustered:
        loading = any_width_cluster.LOADERS.value
    loaders = [lambda warp=warp: produce(warp) for warp in range(loading)]
    loaders += [] if clustered else [place_tiles]
    consumers = [
        lambda group=group, warp=warp: consume(group, warp) for group in range(groups) for warp in range(4)
    ]
    machine.run(loaders + consumers)
    expected = Counter()
    for row in edges:
        for group in range(groups):
            at = min(row * x_rows, M - x_rows) + min(group * own, x_rows - own)
            expected[at, N - edge] += 4
    for unit in range(1, whole if edge else units, programs):
        matrix, row, col, *_ = place(unit, state, sizes, x_rows, width, 8)
        if unit < whole or not whole:
            last = -(-M // 32) * 32 if forms[0] == "sparse" else M
            row, col = min(row, last - x_rows), min(col, N - width)
        row, col = row + MATRIX * matrix, col + MATRIX * matrix
        for group in range(1 if takes_turns else groups):
            expected[row + min(group * own, x_rows - own), col] += 4
    assert Counter(done) == expected
    # All threads of a cluster's program arrive once at the cluster's barrier.
    assert Counter(met).total() == len(set(met)) == (len(loaders + consumers) if clustered else 0)
    return edges


#: The forms, and that steps are promoted and scaled.
_BY_SCALES = ("rows", "rows"), True, True
#: Cases whose steps are multiplied by scales before they are added; see CASES.
SCALED = [
    # Tiles begin at multiples of 16.
    (2, 128, 80, 3, False, (300, 400, 330), 2, *_BY_SCALES),
    (1, 64, 160, 3, False, (200, 720, 200), 1, *_BY_SCALES),
    (2, 128, 144, 3, False, (300, 1008, 200), 1, *_BY_SCALES),
    (2, 128, 48, 3, False, (300, 400, 330), 2, *_BY_SCALES),
    (2, 128, 128, 3, False, (300, 592, 330), 1, *_BY_SCALES),
    # At multiples of 32, 64 and 128.
    (1, 64, 96, 4, False, (200, 608, 600), 1, *_BY_SCALES),
    (2, 128, 160, 3, False, (300, 640, 330), 1, *_BY_SCALES),
    (2, 128, 64, 3, False, (300, 576, 330), 2, *_BY_SCALES),
    (2, 128, 128, 3, False, (300, 640, 600), 2, *_BY_SCALES),
    # Warpgroups that take turns, and clusters.
    (2, 64, 128, 3, True, (256, 640, 330), 1, *_BY_SCALES),
    (2, 64, 112, 4, True, (256, 592, 600), 1, *_BY_SCALES),
    (1, 64, 64, 4, False, (100, 192, 1000), 3, *_BY_SCALES, None, True),
    # Tiles that have a kernel of their own: one piece, two pieces, and three warpgroups.
    (2, 128, 192, 3, False, (300, 640, 330), 1, *_BY_SCALES),
    (2, 128, 256, 3, False, (300, 640, 330), 1, *_BY_SCALES),
    (3, 192, 128, 3, False, (400, 384, 520), 1, *_BY_SCALES),
]
CASES = [
    # groups, rows of X, width, stages, taking turns, sizes, parts along K of what fills no last wave
    (1, 64, 72, 3, False, (256, 300, 200)),
    (2, 128, 88, 4, False, (300, 400, 330)),
    (3, 192, 64, 3, False, (400, 256, 128)),
    (2, 64, 80, 3, True, (256, 400, 200)),
    (2, 64, 80, 4, True, (320, 400, 64)),
    (2, 128, 88, 3, False, (400, 600, 500), 2),
    (1, 64, 72, 3, False, (64, 72, 700), 3),
    # No more stages than steps that are loaded ahead, one tile for two warpgroups, one loader for 64 rows.
    (2, 128, 88, 2, False, (300, 400, 330)),
    (2, 64, 80, 3, True, (64, 160, 200)),
    (1, 64, 136, 3, False, (256, 600, 200)),
    # Two blocks of 64 rows for each warpgroup.
    (2, 256, 88, 3, False, (600, 300, 200)),
    (2, 256, 176, 3, False, (600, 300, 200)),
    (3, 192, 104, 3, False, (600, 300, 200)),
    (2, 128, 80, 3, True, (400, 300, 200)),
    # Two halves by eights, as X and as Y.
    (2, 128, 80, 3, False, (400, 300, 200), 2, ("pairs", "rows")),
    (2, 64, 80, 4, True, (300, 400, 200), 1, ("rows", "pairs")),
    # Adjacent elements along the rows of X, of Y and of both.
    (2, 128, 72, 3, False, (400, 300, 200), 2, ("turned", "rows")),
    (2, 128, 128, 3, True, (400, 640, 200), 1, ("rows", "turned")),
    (3, 192, 64, 4, False, (600, 320, 264), 1, ("turned", "turned")),
    # Two matrices of each operand.
    (2, 128, 88, 3, False, (300, 200, 330), 1, ("many rows", "many rows")),
    (2, 128, 64, 3, True, (150, 200, 200), 1, ("many turned", "many rows")),
    (1, 64, 128, 3, False, (100, 300, 200), 1, ("many rows", "many turned")),
    # Steps that are summed by themselves.
    (2, 128, 88, 3, False, (300, 400, 330), 2, ("rows", "rows"), True),
    (2, 256, 80, 3, False, (600, 300, 200), 1, ("rows", "rows"), True),
    (2, 64, 80, 3, True, (256, 400, 200), 1, ("rows", "rows"), True),
    (2, 256, 136, 3, False, (600, 300, 200), 1, ("rows", "rows"), True),
    # Packed weights.
    (2, 128, 64, 3, False, (304, 300, 330), 2, ("packed", "rows"), False, False, str(INT4)),
    (2, 256, 64, 4, False, (608, 300, 200), 1, ("packed", "rows"), False, False, str(INT4)),
    (2, 128, 96, 3, True, (400, 300, 200), 1, ("packed", "rows"), False, False, str(INT4)),
    (1, 64, 96, 3, False, (64, 96, 700), 3, ("packed", "rows"), False, False, str(INT4)),
    # Packed weights with steps of 128 columns, the last of which are not whole.
    (2, 128, 64, 3, False, (304, 300, 650), 2, ("packed", "rows"), False, False, str(LONG)),
    (2, 256, 64, 4, False, (608, 300, 400), 1, ("packed", "rows"), False, False, str(TWO_GROUPS)),
    (2, 128, 96, 3, True, (400, 300, 400), 1, ("packed", "rows"), False, False, str(LONG)),
    (1, 64, 96, 3, False, (64, 96, 1300), 3, ("packed", "rows"), False, False, str(TWO_GROUPS)),
    (3, 192, 64, 4, False, (400, 300, 520), 1, ("packed", "rows"), False, False, str(LONG)),
    # Sparse weights: one, two and three warpgroups, with 64 and 128 rows each, and tiles that are cut along K.
    (1, 64, 72, 3, False, (300, 300, 700), 1, ("sparse", "rows"), False, False, str(SPARSE)),
    (2, 128, 88, 4, False, (300, 400, 330), 2, ("sparse", "rows"), False, False, str(SPARSE)),
    (3, 192, 96, 3, False, (400, 300, 520), 1, ("sparse", "rows"), False, False, str(SPARSE)),
    (2, 256, 136, 4, False, (608, 300, 400), 2, ("sparse", "rows"), False, False, str(SPARSE)),
    (1, 64, 96, 5, False, (64, 96, 1400), 3, ("sparse", "rows"), False, False, str(SPARSE)),
    (2, 128, 64, 3, False, (300, 200, 330), 1, ("sparse", "turned"), False, False, str(SPARSE)),
    # Two halves by eights.
    (1, 64, 64, 3, False, (64, 192, 700), 3, ("sparse pairs", "rows"), False, False, str(SPARSE_PAIRS)),
    (2, 128, 88, 4, False, (320, 400, 330), 2, ("sparse pairs", "rows"), False, False, str(SPARSE_PAIRS)),
    (2, 256, 128, 3, False, (640, 300, 520), 1, ("sparse pairs", "turned"), False, False, str(SPARSE_PAIRS)),
    (3, 192, 88, 5, False, (448, 200, 400), 1, ("sparse pairs", "rows"), False, False, str(SPARSE_PAIRS)),
    # Warpgroups that share rows: two of three and of two, a part along K, and two halves by eights.
    (2, 96, 72, 3, False, (300, 400, 330), 2),
    (3, 160, 64, 4, False, (400, 256, 200)),
    (2, 96, 80, 3, False, (400, 300, 200), 2, ("pairs", "rows")),
    (2, 96, 72, 4, False, (300, 400, 330), 2, ("sparse", "rows"), False, False, str(SPARSE)),
    (3, 160, 48, 3, False, (400, 300, 520), 1, ("sparse", "rows"), False, False, str(SPARSE)),
    # Clusters of programs, with four loading warps: two of them load, one of them, and one for a large tile.
    (1, 64, 64, 4, False, (100, 150, 1000), 3, ("rows", "rows"), False, False, None, True),
    (1, 64, 136, 3, False, (64, 300, 700), 2, ("rows", "rows"), False, False, None, True),
    (2, 128, 64, 4, False, (300, 64, 1300), 4, ("rows", "turned"), False, False, None, True),
    (2, 128, 64, 3, False, (304, 64, 900), 2, ("packed", "rows"), False, False, str(INT4), True),
    (2, 128, 64, 3, False, (304, 64, 1800), 2, ("packed", "rows"), False, False, str(LONG), True),
    (1, 64, 96, 5, False, (64, 96, 1400), 3, ("sparse", "rows"), False, False, str(SPARSE), True),
    (2, 96, 64, 5, False, (200, 96, 1400), 3, ("sparse", "rows"), False, False, str(SPARSE), True),
    # Steps of 128 columns, the last of which are not whole.
    (1, 64, 72, 3, False, (300, 300, 700), 1, ("sparse", "rows"), False, False, str(WIDE)),
    (2, 128, 88, 4, False, (300, 400, 650), 2, ("sparse", "rows"), False, False, str(WIDE)),
    (2, 256, 40, 3, False, (608, 300, 400), 1, ("sparse", "rows"), False, False, str(WIDE)),
    (2, 96, 72, 4, False, (300, 400, 640), 1, ("sparse", "rows"), False, False, str(WIDE)),
    (2, 128, 64, 4, False, (320, 300, 650), 2, ("sparse pairs", "rows"), False, False, str(WIDE_PAIRS)),
    (1, 64, 64, 5, False, (64, 96, 2400), 3, ("sparse", "rows"), False, False, str(WIDE), True),
    *SCALED,
]


#: Warpgroups, rows of X, width, stages, sizes, forms, format, and the width of an edge tile. The emulated program has no
#: edge tile in the last case, and at least one in the others.
EDGES = [
    (2, 128, 128, 4, (500, 572, 330), ("rows", "rows"), None, 64),
    (1, 64, 104, 3, (290, 250, 200), ("rows", "rows"), None, 72),
    (2, 256, 96, 3, (1000, 360, 200), ("sparse", "rows"), str(SPARSE), 80),
    (2, 128, 128, 3, (384, 430, 200), ("rows", "turned"), None, 64),
    (3, 192, 96, 4, (752, 460, 520), ("pairs", "rows"), None, 80),
    (1, 64, 104, 3, (290, 146, 200), ("rows", "rows"), None, 72),
]


@pytest.mark.parametrize("case", EDGES, ids=str)
def test_edge_tiles(case):
    groups, x_rows, width, stages, sizes, forms, format, edge = case
    for seed in range(2):
        edges = emulate(
            seed, groups, x_rows, width, stages, False, sizes, 1, forms, False, False, format, edge=edge
        )
        assert bool(edges) == (case is not EDGES[-1])


#: Rows of tiles whose ranges of K have 1 to 6 steps.
RANGES = [(0, 1), (64, 384), (384, 448), (448, 800), (800, 928), (928, 992), (992, 1200)]


@pytest.mark.parametrize("takes_turns", (False, True))
def test_ranges_of_different_lengths(takes_turns):
    for seed in range(3):
        x_rows, tiles = (64, 3) if takes_turns else (128, 2)
        sizes = (len(RANGES) * x_rows, tiles * 72, RANGES[-1][1])
        emulate(seed, 2, x_rows, 72, 4, takes_turns, sizes, ranges=RANGES)


@pytest.mark.parametrize("takes_turns", (False, True))
def test_more_tiles_than_there_are_places(takes_turns):
    """Each tile has one step, so the loading warp is many tiles ahead."""
    emulate(1, 2, 128, 64, 12, takes_turns, (1280, 640, 64))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("seed", range(3))
def test_every_warp_reads_what_was_loaded_for_it(case, seed):
    emulate(seed, *case)


#: Warpgroups, rows of X, width and columns of products with scales, which have two tiles beside each other.
OF_STEPS = [
    (1, 64, 112, 208),
    (2, 128, 96, 160),
    (2, 128, 128, 256),
    (2, 128, 192, 256),
    (2, 128, 256, 384),
    (3, 192, 128, 256),
]


@pytest.mark.sampled(5)
@pytest.mark.parametrize("case", OF_STEPS, ids=str)
@pytest.mark.parametrize("steps", range(1, 10))
def test_scales_of_so_many_steps(steps, case):
    """Four steps' scales are loaded at once, and before them those of the steps that are left over."""
    groups, x_rows, width, N = case
    emulate(steps, groups, x_rows, width, 3, False, (2 * x_rows, N, 64 * steps), 1, *_BY_SCALES)
    # The program's second tile begins in the middle of K. Launches do not cut wide tiles, but the loop could.
    emulate(steps + 1, groups, x_rows, width, 3, False, (2 * x_rows, N, 64 * 3 * steps - 32), 3, *_BY_SCALES)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("steps", range(1, 13))
def test_sparse_weights_of_so_many_steps(steps):
    """Rounds of `any_width_sparse.TOGETHER` steps, with as many before them as are left over."""
    for seed, format in enumerate((SPARSE, SPARSE_PAIRS)):
        forms = f"sparse{' pairs' * format.paired}", "rows"
        emulate(seed, 2, 128, 72, 3, False, (256, 144, 64 * steps), 1, forms, False, False, str(format))
        emulate(seed, 1, 64, 64, 4, False, (128, 192, 64 * steps - 32), 1, forms, False, False, str(format))
        emulate(seed, 2, 256, 72, 3, False, (256, 256, 64 * steps), 1, forms, False, False, str(format))


def ahead_of(rows):
    """`any_width_load.ahead_of`."""
    return int(any_width_load.ahead_of(rows))


def made_by_another_warp(text):
    """The assembly with what the first warp makes before its loads, in the second one's part."""
    for steps in (6, 2):
        made = "".join(f"mbarrier.init.shared::cta.b64 [$1 + {8 * i}], 2;" for i in range(steps))
        if made in text:
            return text.replace(made, "").replace("OTHER1: ", f"OTHER1: {made} ")
    return text


def first_blocks_of_y(text):
    """The assembly whose promoted steps all multiply the first stage's blocks of Y."""
    found = re.search(r"sub\.s32 first_y, (\$\d+)", text)
    return re.sub(r"mad\.lo\.s32 y, at, [^;]*;", f"mov.b32 y, {found[1]};", text) if found else text


MUTANTS = {
    "phases that never change": {
        "message": "loaded while it is read",
        "edit": lambda text: text.replace("xor.b32 phase, phase, 1", "mov.b32 phase, phase"),
    },
    "products that are not waited for": {
        "message": "loaded while it is read",
        "edit": lambda text: text.replace("wait_group.sync.aligned 1", "wait_group.sync.aligned 9"),
    },
    "accumulators that are not set to 0": {
        "message": "a sum that does not begin with 0",
        "edit": lambda text: re.sub(r"mov\.b32 \$\d+, 0;(?! \})", "", text),
    },
    "sums that are promoted too early": {
        "message": "added before it is there",
        "edit": lambda text: text.replace("wait_group.sync.aligned 0", "wait_group.sync.aligned 9"),
    },
    "promoted steps of the first stage's blocks": {
        "message": "not the blocks of this step",
        "cases": [case for case in CASES if case[8:9] == (True,)],
        "edit": first_blocks_of_y,
    },
    "a ring of promoted steps that does not begin again": {
        "message": "all wait",
        "cases": [case for case in CASES if case[8:9] == (True,)],
        "edit": lambda text: text.replace("wraps, at, end", "wraps, stage, end"),
    },
    "operands that are unpacked while they are read": {
        "message": "unpacked while products read it",
        "edit": lambda text: text.replace("wait_group.sync.aligned 3", "wait_group.sync.aligned 9"),
    },
    "two operands at a time that are unpacked while they are read": {
        "message": "unpacked while products read it",
        "edit": lambda text: text.replace("wait_group.sync.aligned 1", "wait_group.sync.aligned 9"),
    },
    "a packed stage that is free while it is read": {
        "message": "loaded while it is read",
        "edit": lambda text: text.replace("mov.b32 earlier, before", "mov.b32 earlier, at"),
    },
    "the group parameters of another stage": {
        "message": "not the words' scales",
        "edit": lambda text: text.replace(
            "mad.lo.s32 params, stage, 256, first", "mad.lo.s32 params, left, 256, first"
        ),
    },
    "a packed stage that is never free": {
        "message": "all wait",
        "edit": lambda text: text.replace(
            "@one mbarrier.arrive.shared::cta.b64 _, [earlier", "@!one exit [earlier"
        ),
    },
    "the first 64 columns of Y for all of a long step": {
        "message": "not the blocks of this step",
        "edit": lambda text: text.replace("y_next, y_next, y;", "y_next, y, 0;"),
    },
    "a long packed stage that is free while it is read": {
        "message": "loaded while it is read",
        "cases": [case for case in CASES if str(LONG) in case],
        "edit": lambda text: text.replace("cta.b64 _, [before", "cta.b64 _, [at"),
    },
    "the first words for all of a long step": {
        "message": "no words there",
        "edit": lambda text: text.replace("[own + 512]", "[own + 0]"),
        "cases": [case for case in CASES if str(LONG) in case],
    },
    "the first group's scales for both of a long step": {
        "message": "not the words' scales",
        "edit": lambda text: text.replace("[params + 128]", "[params + 0]"),
        "cases": [case for case in CASES if str(TWO_GROUPS) in case],
    },
    "rows of one half for those of two": {
        "message": "not the blocks of this step",
        "edit": lambda text: text.replace(", 4; cp.async", ", 3; cp.async"),
    },
    "a stage that is free while it is read": {
        "message": "loaded while it is read",
        "edit": lambda text: text.replace("cta.b64 _, [before", "cta.b64 _, [at"),
    },
    "the first warp's barriers made by another one": {
        "message": "no barrier there",
        "edit": made_by_another_warp,
    },
    "no fence behind the first warp's barriers": {
        "message": "a barrier that others do not see",
        "edit": lambda text: text.replace("fence.mbarrier_init.release.cluster; setp", "setp"),
    },
    "no fence behind the other warps' barriers": {
        "message": "a barrier that others do not see",
        "edit": lambda text: text.replace("fence.mbarrier_init.release.cluster; bra", "bra"),
    },
    "one arrival for both operands": {
        "message": "more arrivals than a phase has",
        "edit": lambda text: text.replace("], 2;", "], 1;") if "OTHER2" in text else text,
    },
    "a ring that does not begin again": {
        "message": "not the blocks of this step",
        "edit": lambda text: text.replace("@wraps mov.b32 x,", "@wraps mov.b32 own,"),
    },
    "a box that is not counted": {
        "message": "all wait",
        "edit": lambda text: text.replace("_, [at], $13", "_, [at], 64"),
    },
    "the second 64 rows of X taken for the first": {
        "message": "a stage changes while it is read",
        "edit": lambda text: text.replace("own, x, 512;", "own, x, 0;"),
    },
    "the first matrix of a batch for all": {
        "message": "not the blocks of this step",
        "edit": lambda text: text.replace(", $15}", ", 0}"),
    },
    "another width's instructions": {
        "message": "not the blocks of this step",
        "edit": lambda text: re.sub(r"(targets) (\w+), (\w+)", r"\1 \3, \2", text),
    },
    "the other operand's cache policy": {
        "message": "not the operand's cache policy",
        "edit": lambda text: text.replace("streams, $14, 1", "streams, $14, 2"),
    },
    "no wait for a place": {
        "message": "no place there",
        "waits": lambda at: not PLACES_AT <= at < TAKEN_AT,
    },
    "no wait until places are taken": {
        "message": "a place that is not taken is written over",
        "cases": [(2, 128, 64, 12, False, (1280, 640, 64))],
        "waits": lambda at: at < TAKEN_AT,
    },
    "places that are not said to be taken": {
        "message": "all wait",
        "edit": lambda text: re.sub(r"@own (mbarrier\S+) _, \[at \+", r"@own \1 _, [at + 8 +", text),
    },
    "fewer places than steps that are loaded ahead": {
        "message": "a place that is not taken is written over",
        "PLACES": Constant(2),
    },
    "another warpgroup's place": {
        "message": "all wait",
        "edit": lambda text: text.replace("and.b32 to, $6, 15", "xor.b32 to, $6, 1; and.b32 to, to, 15"),
    },
    "one arrival too many": {"message": "all wait", "arrivals": 1},
    "one arrival too few": {"message": "loaded while it is read", "arrivals": -1},
    "no wait for a stage that is read": {
        "message": "loaded while it is read",
        "waits": lambda at: not FREE_AT <= at < TURNS_AT,
    },
    # Most of the time another warpgroup's place comes too late for an error.
    "no wait for a turn": {
        "message": "loaded while it is read",
        "cases": [(2, 64, 80, 3, True, (256, 400, 200), 1, ("rows", "rows"), True)],
        "waits": lambda at: not TURNS_AT <= at < UNUSED_AT,
    },
    "no meeting before rows of X become slots": {
        "message": "the ring is read when it has become slots",
        "barrier": lambda: None,
    },
    "no wait for the other warpgroup's rows of X": {
        "message": "the ring is read when it has become slots",
        "waits": lambda at: at != UNUSED_AT,
    },
    "no wait for loads": {"message": "not the blocks of this step", "waits": lambda at: at >= FREE_AT},
}


#: Those of sparse weights.
SPARSE_MUTANTS = {
    "one register for the metadata of all steps": {
        "message": "metadata changes while products read it",
        "edit": lambda text: re.sub(r"words1(\d)", r"words0\1", text),
    },
    "sparse products that are not waited for in a round": {
        "message": "loaded while it is read",
        "edit": lambda text: text.replace("wait_group.sync.aligned 1", "wait_group.sync.aligned 9"),
    },
    "sparse products that are not waited for behind a round": {
        "message": "metadata changes while products read it",
        "edit": lambda text: re.sub(r"aligned 0;([^\n]*@more bra\.uni STEP;)", r"aligned 1;\1", text),
    },
    "sparse products that are not waited for before the rounds": {
        "message": "metadata changes while products read it",
        "edit": lambda text: re.sub(r"aligned 0;([^\n]*@more bra\.uni FEW;)", r"aligned 9;\1", text),
    },
    "a sparse stage that is free while it is read": {
        "message": "loaded while it is read",
        "edit": lambda text: re.sub(
            r"(wgmma\.wait_group\.sync\.aligned 1;)( elect[^;]*;[^;]*;)", r"\2 \1", text
        ),
    },
    "a sparse stage that is never free": {
        "message": "all wait",
        "edit": lambda text: text.replace(
            "@one mbarrier.arrive.shared::cta.b64 _, [before", "@!one exit [before"
        ),
    },
    "no fence behind metadata": {
        "message": "no fence behind the metadata",
        "edit": lambda text: text.replace("wgmma.fence.sync.aligned;", ""),
    },
    "the first stage's metadata for all": {
        "message": "not the metadata of these numbers",
        "edit": lambda text: text.replace("params, stage, 512, first", "params, 0, 512, first"),
    },
    "metadata of the first 64 rows for all": {
        "message": "not the metadata of these numbers",
        "edit": lambda text: text.replace("[params + 512]", "[params + 0]"),
    },
    "metadata of the first warpgroup for all": {
        "message": "not the metadata of these numbers",
        "edit": lambda text: text.replace(
            "first_params, first_params, 512;", "first_params, first_params, 0;"
        ),
    },
    "metadata of the other half of 64 rows": {
        "message": "not the metadata of these numbers",
        "edit": lambda text: text.replace("shr.u32 part, lane, 6;", "shr.u32 part, lane, 7;"),
    },
    "the lower halves of words for the upper ones": {
        "message": "not the metadata of these numbers",
        "edit": lambda text: text.replace("setp.ne.s32 upper, part", "setp.eq.s32 upper, part"),
    },
    "the first half's lanes for both": {
        "message": "not the lanes that have this half's metadata",
        "edit": lambda text: re.sub(r"(words\d\d), 1,", r"\1, 0,", text),
    },
    "the first half of the kept numbers for both": {
        "message": "a stage changes while it is read",
        "edit": lambda text: re.sub(r"own, (x\d), 256;", r"own, \1, 0;", text),
    },
    "metadata of other columns": {
        "message": "not the metadata of these numbers",
        "edit": lambda text: text.replace("shr.u32 group, k, 5", "shr.u32 group, k, 6"),
    },
    "metadata of other rows": {
        "message": "not the metadata of these numbers",
        "edit": lambda text: re.sub(r"shr\.u32 block, (\$\d+), 5", r"shr.u32 block, \1, 6", text),
    },
    "all boxes of metadata in one place": {
        "message": "no metadata there",
        "edit": lambda text: re.sub(r"mad\.lo\.s32 to, own, \d+", "mad.lo.s32 to, own, 0", text),
    },
    "a box of metadata that is not loaded": {
        "message": "all wait",
        "edit": lambda text: re.sub(r"setp\.lt\.s32 more, next, \d+", "setp.lt.s32 more, next, 0", text),
    },
    "kept numbers of other columns": {
        "message": "not the metadata of these numbers",
        "edit": lambda text: text.replace("shr.u32 line, k, 1;", "mov.b32 line, k;"),
    },
    "rounds that begin too early": {
        "message": "not the blocks of this step",
        "edit": lambda text: text.replace("and.b32 rest, left, 1", "and.b32 rest, left, 0"),
    },
    "a sum that begins again": {
        "message": "not the blocks of this step",
        "edit": lambda text: re.sub(r"(words\d\d, 0), 1,", r"\1, 0,", text),
    },
}
NO_SCALES = "not the scales of this block and step"
#: Those of scales along K.
SCALE_MUTANTS = {
    "the first 128 columns' scales for all": {
        "message": NO_SCALES,
        "edit": lambda text: text.replace("-1, 0, has", "0, 0, has"),
    },
    "tiles that are thought to begin with 128 columns": {
        "message": NO_SCALES,
        "starts_of": lambda width, apart: 128,
    },
    "one row's scales for both": {
        "message": NO_SCALES,
        "edit": lambda text: re.sub(r"(both1\d, of)1", r"\g<1>0", text),
    },
    "columns' scales that stay those of the first steps": {
        "message": NO_SCALES,
        "edit": lambda text: text.replace("add.s32 at_col0, at_col0, col_step;", ""),
    },
    "rows' scales that stay those of the first steps": {
        "message": NO_SCALES,
        "edit": lambda text: text.replace("add.s32 at_row1, at_row1, row_step;", ""),
    },
    "the first thread's scales for all": {
        "message": NO_SCALES,
        "edit": lambda text: text.replace(", quad, 0x1C1F", ", 0, 0x1C1F"),
    },
    "the next thread's scales": {
        "message": NO_SCALES,
        "edit": lambda text: text.replace("neg.s32 quad, left", "sub.s32 quad, 1, left"),
    },
    "threads that have the steps from the first thread on": {
        "message": NO_SCALES,
        "edit": lambda text: text.replace("sub.s32 own, own, there;", ""),
    },
    "the next group's scales a step too early": {
        "message": NO_SCALES,
        "edit": lambda text: text.replace("same, quad, 3", "same, quad, 2"),
    },
    "the next group's scales a step too late": {
        "message": NO_SCALES,
        "edit": lambda text: text.replace("same, quad, 3", "same, quad, 0"),
    },
    "no next group after the first one": {
        "message": NO_SCALES,
        "edit": lambda text: re.sub(r"has, (\$\d+), 4;", r"has, \1, 8;", text),
    },
    "a next group after the first one, which is the last": {
        "message": "not the scales of the steps that exist",
        "edit": lambda text: re.sub(r"has, (\$\d+), 4;", r"has, \1, 0;", text),
    },
    "a next group after the last one": {
        "message": "not the scales of the steps that exist",
        "edit": lambda text: text.replace("has, left, 5", "has, left, 1"),
    },
    "scales of steps before the first one": {
        "message": "not the scales of the steps that exist",
        "edit": lambda text: text.replace("max.s32 there, own, 0", "mov.b32 there, own"),
    },
    "threads that go different ways": {
        "message": "the threads of a quad go different ways",
        "edit": lambda text: re.sub(
            r"max\.s32 there, own, 0;", r"\g<0> setp.le.s32 has, own, 0; @has bra NONE; NONE:", text
        ),
    },
}
#: Those of steps with two pieces.
PIECE_MUTANTS = {
    "the first piece's columns for both": {
        "message": "not the blocks of this step",
        "edit": lambda text: re.sub(
            r"own, y, (10\d\d);", lambda found: f"own, y, {int(found[1]) - 1024};", text
        ),
    },
    "the first piece's scales for both": {
        "message": NO_SCALES,
        "edit": lambda text: re.sub(r"(both\d1, of\d)1", r"\g<1>0", text),
    },
    "a first piece that is not waited for": {
        "message": "added before it is there",
        "edit": lambda text: text.replace("aligned 0; fma", "aligned 9; fma"),
    },
    "a second piece that is multiplied before the first one is added": {
        "message": "sums are overwritten before they are added",
        "edit": lambda text: re.sub(
            r"((?:fma[^;]*;)+)(wgmma\.fence.*?commit_group\.sync\.aligned;)", r"\2\1", text, flags=re.DOTALL
        ),
    },
    "a stage that is free after the first piece": {
        "message": "loaded while it is read",
        "edit": lambda text: re.sub(
            r"(aligned 0; )(fma.*?)(elect\.sync[^;]*;[^;]*;)", r"\1\3\2", text, flags=re.DOTALL
        ),
    },
}
#: Those of clusters.
CLUSTER_MUTANTS = {
    "idle warps that load": {
        "message": "more arrivals than a phase has",
        "edit": lambda text: re.sub(r"setp\.ge\.u32 more, warp, \d; @more bra DONE;", "", text),
    },
    "a loading warp that is idle": {
        "message": "all wait",
        "edit": lambda text: text.replace("setp.ge.u32 more, warp, 2;", "setp.ge.u32 more, warp, 1;"),
    },
}
MUTANTS |= SPARSE_MUTANTS | SCALE_MUTANTS | PIECE_MUTANTS | CLUSTER_MUTANTS


@pytest.mark.sampled(5)
@pytest.mark.parametrize("mutant", MUTANTS)
def test_mutants_are_caught(mutant):
    """Every mutant is caught, by the message that it names."""
    message, found = MUTANTS[mutant]["message"], set()
    changes = {name: value for name, value in MUTANTS[mutant].items() if name not in ("message", "cases")}
    cases = MUTANTS[mutant].get("cases", CASES[1:])
    if mutant in SPARSE_MUTANTS:
        cases = [case for case in cases if len(case) > 7 and case[7][0].startswith("sparse")]
    if mutant in SCALE_MUTANTS:
        cases = SCALED
    if mutant in PIECE_MUTANTS:
        cases = [case for case in SCALED if case[2] > any_width_scales.WIDEST_PIECE]
    if mutant in CLUSTER_MUTANTS:
        cases = [case for case in cases if len(case) > 11 and case[11]]
    # Some need a warp to be late by a whole tile.
    for seed in range(60):
        for case in cases:
            try:
                emulate(seed, *case, **changes)
            except Wrong as wrong:
                found.add(str(wrong))
                if message in found:
                    return
    pytest.fail(f"not {message!r}, but {found or 'nothing'}")
