"""Runs inline assembly for the warps of a program whose threads may go different ways, so far as the tests need it.

Copies are made late or at once, as a random number says: late ones when a thread waits for them, and no sooner.
"""

import numpy as np

from .ptx import Program, number

LANES = 32
_COMPARE = {
    "eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal,
}  # fmt: skip


def rounded(x):
    """Numbers in bf16, to the nearest and to even, as their bits."""
    bits = np.asarray(x, np.float32).view(np.uint32).astype(np.uint64)
    return ((bits + 0x7FFF + (bits >> np.uint64(16) & np.uint64(1))) >> np.uint64(16)) & np.uint64(0xFFFF)


def numbers(bits):
    """The numbers of bits in bf16."""
    return (np.asarray(bits).astype(np.uint32) << np.uint32(16)).view(np.float32)


class Warp:
    """A warp's threads: their registers, and where each is in the program."""

    def __init__(self, number):
        self.thread = np.arange(LANES) + LANES * number
        self.registers = {}
        self.at = np.zeros(LANES, int)
        self.waits = np.zeros(LANES, bool)
        self.open, self.groups = [[] for _ in range(LANES)], [[] for _ in range(LANES)]


class Block:
    """A program: its warps and both kinds of memory.

    Args:
        text: the assembly.
        operands: the values of $1, $2, and so on.
        memory: global memory, as bytes.
        shared: bytes of shared memory.
        warps: how many.
        r: Python's random numbers.
    """

    def __init__(self, text, operands, memory, shared, warps, r):
        self.program, self.operands, self.memory, self.r = Program(text), operands, memory, r
        self.shared = np.full(shared, 0xFF, np.uint8)
        self.warps = [Warp(i) for i in range(warps)]
        #: By the address of a barrier: its phase, the arrivals and bytes that it waits for, and copies that are on the way.
        self.barriers = {}
        self.spins = 0

    def run(self):
        """Run all warps to the end, each for a random while at a time, in random order."""
        end = len(self.program.statements)
        while any((w.at < end).any() for w in self.warps):
            for warp in self.r.sample(self.warps, len(self.warps)):
                for _ in range(self.r.randint(1, 2000)):
                    ready = ~warp.waits & (warp.at < end)
                    if not ready.any():
                        break
                    at = warp.at[ready].min()
                    self._step(warp, at, ready & (warp.at == at))
            if all((w.waits | (w.at >= end)).all() for w in self.warps):
                waiting = np.concatenate([w.waits for w in self.warps])
                assert waiting.all() or not waiting.any(), "some threads have ended, others wait at a barrier"
                for warp in self.warps:
                    warp.waits[:] = False

    # --- one statement ---------------------------------------------------------------------------------------------

    def _step(self, warp, at, active):
        predicate, code, (to, *given), _, names = self.program.statements[at]
        warp.at[active] += 1
        if predicate:
            held = warp.registers[predicate.lstrip("!")].astype(bool)
            active = active & (held != predicate.startswith("!"))
        if not active.any():
            return
        if names:
            warp.at[active] = self.program.targets[at][0]
            return
        kind = code.split(".")[0]
        special = getattr(self, f"_{kind}", None)
        if special is not None:
            special(warp, active, code, to, given)
            return
        self._set(warp, active, to, self._computed(warp, code, kind, given))

    def _value(self, warp, text):
        text = text.strip()
        if text.startswith("$"):
            return np.full(LANES, self.operands[int(text[1:]) - 1], np.int64)
        if number(text) is not None:
            return np.full(LANES, number(text), np.int64)
        if text.startswith("0f"):
            return np.full(LANES, np.uint32(int(text[2:], 16)).view(np.float32), np.float32)
        if text == "%tid.x":
            return warp.thread
        if text == "global_smem":
            return np.zeros(LANES, np.int64)
        return warp.registers[text]

    @staticmethod
    def _set(warp, active, name, value):
        before = warp.registers.get(name)
        if before is None or before.dtype != value.dtype:
            before = np.zeros(LANES, value.dtype)
        warp.registers[name] = np.where(active, value, before)

    def _computed(self, warp, code, kind, given):
        if kind == "mov" and given[0].startswith("{"):
            low, high = [self._value(warp, x) for x in given[0].strip("{}").split(",")]
            return low | high << 16
        a, b, c = [*[self._value(warp, x) for x in given], None, None][:3]
        if code.endswith("bf16x2"):
            return self._pairs(kind, a, b, c)
        if kind == "setp":
            more = c.astype(bool) if c is not None else True
            a, b = (a & 0xFFFFFFFF, b & 0xFFFFFFFF) if ".u32" in code else (a, b)
            return _COMPARE[code.split(".")[1]](a, b) & more
        if kind == "selp":
            return np.where(c.astype(bool), a, b)
        made = {
            "mov": lambda: a, "cvt": lambda: a, "add": lambda: a + b, "sub": lambda: a - b, "mul": lambda: a * b,
            "mad": lambda: a * b + c, "min": lambda: np.minimum(a, b), "max": lambda: np.maximum(a, b), "xor": lambda: a ^ b, "and": lambda: a & b,
            "shl": lambda: a << b & 0xFFFFFFFF, "shr": lambda: (a & 0xFFFFFFFF) >> b,
        }[kind]()  # fmt: skip
        return made

    @staticmethod
    def _pairs(kind, a, b, c):
        both = []
        for shift in (0, 16):
            x, y = (numbers(v >> shift & 0xFFFF).astype(np.float64) for v in (a, b))
            z = numbers(c >> shift & 0xFFFF) if kind == "fma" else 0.0
            both.append(rounded(x * y + z).astype(np.int64) << shift)
        return both[0] | both[1]

    # --- memory ----------------------------------------------------------------------------------------------------

    def _place(self, warp, text):
        name, _, offset = text.strip("[]").partition("+")
        return self._value(warp, name) + (self._value(warp, offset) if offset else 0)

    def _cp(self, warp, active, code, to, given):
        if "bulk" in code:
            self._bulk(warp, active, to, given)
            return
        for lane in np.flatnonzero(active):
            if code.endswith("commit_group"):
                warp.groups[lane].append(warp.open[lane])
                warp.open[lane] = []
            elif "wait" in code:
                left = 0 if code.endswith("wait_all") else int(to)
                while len(warp.groups[lane]) > left:
                    for copy in warp.groups[lane].pop(0):
                        self._copy(*copy)
            else:
                at, of = self._place(warp, to)[lane], self._place(warp, given[0])[lane]
                size = self._value(warp, given[2])[lane] if len(given) > 2 else 16
                # What is read must be there, and written to the end.
                assert at >= 0
                assert at % 16 == of % 16 == 0
                assert not size or 0 <= of <= len(self.memory) - size, "a copy from outside of memory"
                self.shared[at : at + 16] = 0xFF
                if self.r.random() < 0.5:
                    self._copy(at, of, size)
                else:
                    warp.open[lane].append((at, of, size))

    def _copy(self, at, of, size):
        self.shared[at : at + 16] = 0
        self.shared[at : at + size] = self.memory[of : of + size]

    def _bulk(self, warp, active, to, given):
        for lane in np.flatnonzero(active):
            at, of, size, barrier = (
                int(x[lane])
                for x in (
                    self._place(warp, to), self._place(warp, given[0]), self._value(warp, given[1]),
                    self._place(warp, given[2]),
                )
            )  # fmt: skip
            assert at % 16 == of % 16 == size % 16 == 0, (at, of, size)
            assert size > 0
            assert of >= 0, "a copy from outside of memory"
            assert of + size <= len(self.memory), "a copy from outside of memory"
            self.shared[at : at + size] = 0xFF
            self.barriers[barrier]["copies"].append((at, of, size))
            if self.r.random() < 0.5:
                self._arrive(barrier)

    def _arrive(self, barrier):
        """Makes a barrier's copies; its phase is over when it has all bytes and arrivals."""
        state = self.barriers[barrier]
        for at, of, size in state["copies"]:
            self._copy(at, of, size)
            state["bytes"] -= size
        state["copies"] = []
        if not state["bytes"] and not state["arrivals"]:
            state.update(phase=state["phase"] ^ 1, arrivals=state["count"])

    def _mbarrier(self, warp, active, code, to, given):
        for lane in np.flatnonzero(active):
            if "init" in code:
                barrier = int(self._place(warp, to)[lane])
                assert barrier % 8 == 0
                count = int(self._value(warp, given[0])[lane])
                self.barriers[barrier] = {
                    "phase": 0,
                    "arrivals": count,
                    "count": count,
                    "bytes": 0,
                    "copies": [],
                }
            elif "arrive" in code:
                barrier = int(self._place(warp, given[0])[lane])
                state = self.barriers[barrier]
                assert state["arrivals"], "more arrive than are waited for"
                state["arrivals"] -= 1
                if "expect_tx" in code:
                    state["bytes"] += int(self._value(warp, given[1])[lane])
                else:
                    self._arrive(barrier)
        if "try_wait" in code:
            barriers = self._place(warp, given[0])
            assert active.all(), "a part of a warp waits"
            assert len(set(barriers)) == 1
            barrier = int(barriers[0])
            if self.barriers[barrier]["phase"] == self._value(warp, given[1])[0] and self.r.random() < 0.5:
                self._arrive(barrier)
            over = self.barriers[barrier]["phase"] != self._value(warp, given[1])[0]
            self._set(warp, active, to, np.full(LANES, over))
            self.spins = 0 if over else self.spins + 1
            assert self.spins < 100000, "a wait for what does not come"

    def _fence(self, warp, active, code, to, given):
        pass

    def _createpolicy(self, warp, active, code, to, given):
        self._set(warp, active, to, np.zeros(LANES, np.int64))

    def _ld(self, warp, active, code, to, given):
        place, size = self._place(warp, given[0]), 2 if "b16" in code else 4
        for i, name in enumerate(to.strip("{}").split(",")):
            value = np.zeros(LANES, np.int64)
            for lane in np.flatnonzero(active):
                at = place[lane] + size * i
                value[lane] = int.from_bytes(self.shared[at : at + size].tobytes(), "little")
            self._set(warp, active, name.strip(), value)

    def _st(self, warp, active, code, to, given):
        place = self._place(warp, to)
        if "v4" in code:
            numbers = [self._value(warp, x) for x in given[0].strip("{}").split(",")]
            for lane in np.flatnonzero(active):
                words = np.array([x[lane] for x in numbers], np.uint32)
                self.shared[place[lane] : place[lane] + 16] = words.view(np.uint8)
            return
        value = self._value(warp, given[0])
        for lane in np.flatnonzero(active):
            self.shared[place[lane] : place[lane] + 4] = (
                value[lane : lane + 1].astype(np.float32).view(np.uint8)
            )

    def _ldmatrix(self, warp, active, code, to, given):
        assert active.all(), "ldmatrix by a part of a warp"
        place = self._place(warp, given[0])
        for i, name in enumerate(to.strip("{}").split(",")):
            rows = np.stack([self.shared[at : at + 16] for at in place[8 * i : 8 * i + 8]])
            self._set(warp, active, name.strip(), rows.reshape(-1).view(np.uint32).astype(np.int64))

    def _mma(self, warp, active, code, to, given):
        assert active.all(), "mma by a part of a warp"
        a, b, c = ([self._value(warp, x) for x in text.strip("{}").split(",")] for text in given)
        left, right, total = np.zeros((16, 16)), np.zeros((16, 8)), np.zeros((16, 8))
        row, pair = np.arange(LANES) // 4, np.arange(LANES) % 4 * 2
        for i, word in enumerate(a):
            for j in range(2):
                left[row + 8 * (i % 2), pair + 8 * (i // 2) + j] = numbers(word >> 16 * j & 0xFFFF)
        for i, word in enumerate(b):
            for j in range(2):
                # Poison is a signalling NaN.
                with np.errstate(invalid="ignore"):
                    right[pair + 8 * i + j, row] = numbers(word >> 16 * j & 0xFFFF)
        for i, found in enumerate(c):
            total[row + 8 * (i // 2), pair + i % 2] = found
        with np.errstate(invalid="ignore"):
            total = left @ right + total
        for i, name in enumerate(to.strip("{}").split(",")):
            self._set(warp, active, name.strip(), total[row + 8 * (i // 2), pair + i % 2].astype(np.float32))

    def _bar(self, warp, active, code, to, given):
        if "warp" in code:
            assert active.all(), "a barrier for a part of a warp"
        else:
            warp.waits |= active
