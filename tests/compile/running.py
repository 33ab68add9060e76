"""Runs the whole PTX of a compiled kernel on numpy, so far as tests need it: one program at a time, all threads in step.

Threads may not part at branches. What a warp writes to shared memory, another one may read only behind a barrier, and
the other way round; so a barrier that is missing shows.
"""

import re

import numpy as np
import torch

LANES = 32
#: Where tensors begin in memory, and bytes of poison between them.
BASE, BETWEEN = 1 << 20, 256
_COMPARE = {
    "eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal,
    "neu": np.not_equal, "nan": lambda a, b: np.isnan(a) | np.isnan(b), "num": lambda a, b: ~(np.isnan(a) | np.isnan(b)),
}  # fmt: skip
_TYPES = {
    "pred": np.bool_, "b8": np.uint8, "u8": np.uint8, "b16": np.uint16, "u16": np.uint16, "s16": np.int16, "b32": np.uint32,
    "u32": np.uint32, "s32": np.int32, "f32": np.float32, "b64": np.uint64, "u64": np.uint64, "s64": np.int64,
}  # fmt: skip


def bf16_numbers(bits):
    """The numbers of bits in bf16."""
    return (np.asarray(bits).astype(np.uint32) << np.uint32(16)).view(np.float32)


def bf16_bits(x):
    """Numbers in bf16, to the nearest and to even."""
    bits = np.asarray(x, np.float32).view(np.uint32).astype(np.uint64)
    return ((bits + 0x7FFF + (bits >> np.uint64(16) & np.uint64(1))) >> np.uint64(16)).astype(np.uint16)


#: How 16 bits are numbers, and numbers 16 bits, as PTX names types.
NUMBERS = {"bf16": bf16_numbers, "f16": lambda bits: np.asarray(bits).astype(np.uint16).view(np.float16).astype(np.float32)}  # fmt: skip
BITS = {"bf16": bf16_bits, "f16": lambda x: np.asarray(x, np.float32).astype(np.float16).view(np.uint16)}


class Memory:
    """Global memory with copies of tensors, and poison between them.

    Args:
        tensors: what lies in it; each is copied with all that lies between its first and its last element.
    """

    def __init__(self, tensors):
        parts, self.places, at = [], [], BASE
        for tensor in tensors:
            count = 1 + sum(
                (size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True)
            )
            own = tensor.as_strided((count if tensor.numel() else 0,), (1,)).view(torch.uint8).numpy().copy()
            self.places.append(at)
            parts += [own, np.full(-len(own) % BETWEEN + BETWEEN, 0xFF, np.uint8)]
            at += sum(map(len, parts[-2:]))
        self.bytes = np.concatenate(parts)

    def at(self, addresses, size):
        """Where the bytes at some addresses are: an array with a dimension more."""
        found = np.asarray(addresses).astype(np.int64)[:, None] - BASE + np.arange(size)
        assert ((found >= 0) & (found < len(self.bytes))).all(), "outside of memory"
        assert not (np.asarray(addresses) % np.uint64(size)).any(), "not aligned"
        return found

    def tensor(self, number, like):
        """What has become of a tensor."""
        at = self.places[number] - BASE
        count = 1 + sum((size - 1) * step for size, step in zip(like.shape, like.stride(), strict=True))
        own = torch.from_numpy(self.bytes[at : at + count * like.itemsize].copy()).view(like.dtype)
        return own.as_strided(like.shape, like.stride())


def statements(text):
    """The statements of a kernel's body as (predicate, code, operands), and the places of labels."""
    body = re.sub(
        r"//[^\n]*|\.loc[^\n]*|\.pragma[^\n]*", "", text[text.index("{", text.index(".entry")) + 1 :]
    )
    found, labels = [], {}
    for piece in re.split(r";|(?<=:)\s", re.sub(r"\.(?:reg|section)[^;{}]*;", "", body)):
        line = piece.strip().strip("\n")
        while line[:1] in "{}" and line and not line.startswith("{%"):
            line = line[1:].strip()
        if line.startswith(".section") or line.startswith(".file"):
            break
        if not line:
            continue
        if line.endswith(":"):
            labels[line[:-1]] = len(found)
            continue
        predicate, code, rest = re.fullmatch(r"(?:@(!?%p\d+)\s+)?(\S+)\s*(.*)", line, re.DOTALL).groups()
        found.append(
            (predicate, code, [x.strip() for x in re.findall(r"\{[^}]*\}|\[[^\]]*\]|[^,\s{][^,]*", rest)])
        )
    return found, labels


class Program:
    """A kernel that can be run.

    Args:
        text: its PTX.
        values: of its parameters, in order.
        memory: see `Memory`.
        shared: bytes of shared memory.
    """

    def __init__(self, text, values, memory, shared):
        self.statements, self.labels = statements(text)
        self.threads = int(re.search(r"\.reqntid (\d+)", text)[1])
        self.values, self.memory, self.size = values, memory, shared

    def run(self, programs):
        """Run programs, one after the other."""
        for self.program in range(programs):
            self.programs, self.registers, at = programs, {}, 0
            self.shared = np.full(self.size, 0xFF, np.uint8)
            #: By word of shared memory: a bit for each warp that wrote or read it since the last barrier.
            self.written, self.read = (np.zeros(self.size // 4 + 1, np.int64) for _ in range(2))
            while at < len(self.statements):
                predicate, code, operands = self.statements[at]
                at += 1
                active = self._active(predicate)
                kind = code.split(".")[0]
                if kind in ("ret", "bra"):
                    assert active.all() or not active.any(), "threads part"
                    if active.all():
                        at = len(self.statements) if kind == "ret" else self.labels[operands[0]]
                elif active.any() and kind not in ("createpolicy", "griddepcontrol"):
                    getattr(self, f"_{kind}", self._compute)(code, operands, active)

    def _active(self, predicate):
        if predicate is None:
            return np.ones(self.threads, bool)
        return self.registers[predicate.lstrip("!")] != predicate.startswith("!")

    # --- values ------------------------------------------------------------------------------------------------------

    def _value(self, text, kind="b32"):
        """The value of an operand, as an array of a type."""
        dtype = np.dtype(_TYPES[kind])
        if text.startswith("0f"):
            return np.full(self.threads, np.uint32(int(text[2:], 16)).view(np.float32))
        if text == "%tid.x":
            return np.arange(self.threads).astype(dtype)
        if re.fullmatch(r"-?\d+|0x[0-9a-fA-F]+", text):
            value = int(text, 0) & ((1 << 8 * dtype.itemsize) - 1) if dtype != np.bool_ else int(text) != 0
            return (
                np.full(self.threads, value)
                .astype(f"u{dtype.itemsize}" if dtype != np.bool_ else bool)
                .view(dtype)
            )
        own = {"%ctaid.x": self.program, "%nctaid.x": self.programs, "%ctaid.y": 0, "global_smem": 0}
        if text in own:
            return np.full(self.threads, own[text]).astype(dtype)
        found = self.registers[text]
        if found.dtype == np.bool_ or dtype == np.bool_:
            return found
        return found.astype(f"u{dtype.itemsize}").view(dtype)

    def _set(self, name, value, active):
        value = np.ascontiguousarray(value)
        if value.dtype != np.bool_:
            value = value.view(f"u{value.itemsize}").astype(np.uint64)
        before = self.registers.get(name, np.zeros(self.threads, value.dtype))
        self.registers[name] = np.where(active, value, before)

    def _address(self, text):
        base, _, offset = text.strip("[]").partition("+")
        wide = "b64" if base.strip().startswith("%rd") else "b32"
        return self._value(base.strip(), wide).astype(np.uint64) + np.uint64(int(offset or "0") % (1 << 32))

    # --- arithmetic --------------------------------------------------------------------------------------------------

    def _compute(self, code, operands, active):
        kind, *words = code.split(".")
        to, *given = operands
        type = words[-1] if words[-1] in _TYPES else "b32"
        values = [self._value(x, type) for x in given if not x.startswith("{")]
        a, b, c = [*values, None, None, None][:3]
        bits = 8 * np.dtype(_TYPES[type]).itemsize
        with np.errstate(all="ignore"):
            made = {
                "add": lambda: a + b, "sub": lambda: a - b, "and": lambda: a & b, "or": lambda: a | b, "xor": lambda: a ^ b,
                "not": lambda: ~a, "neg": lambda: -a, "abs": lambda: np.abs(a), "min": lambda: np.minimum(a, b),
                "max": lambda: np.maximum(a, b), "rem": lambda: np.fmod(a, b), "fma": lambda: self._fused(a, b, c),
                "div": lambda: a / b if type == "f32" else np.trunc(a / b).astype(a.dtype),
                "ex2": lambda: np.exp2(a), "rcp": lambda: 1 / a, "tanh": lambda: np.tanh(a),
                "shl": lambda: self._shifted(np.left_shift, a, given[1], bits),
                "shr": lambda: self._shifted(np.right_shift, a, given[1], bits),
            }[kind]()  # fmt: skip
        self._set(to, made if type in ("f32", "pred") else made.astype(_TYPES[type]), active)

    @staticmethod
    def _fused(a, b, c):
        return (a.astype(np.float64) * b + c).astype(np.float32)

    def _shifted(self, shift, a, by, bits):
        count = self._value(by, "u32")
        within = shift(a, np.minimum(count, bits - 1).astype(a.dtype))
        return np.where(
            count < bits, within, (a >> (bits - 1)) * (shift is np.right_shift) * (a.dtype.kind == "i")
        )

    def _mul(self, code, operands, active, more=None):
        words = code.split(".")
        if words[-1] == "f32":
            self._set(operands[0], self._value(operands[1], "f32") * self._value(operands[2], "f32"), active)
            return
        a, b = (self._value(x, words[-1]) for x in operands[1:3])
        size = a.itemsize * (2 if words[1] == "wide" else 1)
        wide = np.int64 if a.dtype.kind == "i" else np.uint64
        with np.errstate(over="ignore"):
            made = a.astype(wide) * b.astype(wide)
            if more is not None:
                made = made + self._value(more, f"{words[-1][0]}{8 * size}").astype(wide)
        assert words[1] in ("lo", "wide") or words[1:] == ["hi", "u32"], code
        if words[1] == "hi":
            made = made >> np.uint64(32)
        self._set(operands[0], made.astype(f"{a.dtype.kind}{size}"), active)

    def _mad(self, code, operands, active):
        self._mul(code, operands, active, operands[3])

    def _setp(self, code, operands, active):
        _, compare, *_, type = code.split(".")
        a, b = (self._value(x, type) for x in operands[1:3])
        self._set(operands[0], _COMPARE[compare](a, b), active)

    def _selp(self, code, operands, active):
        type = code.split(".")[1]
        a, b = (self._value(x, type) for x in operands[1:3])
        self._set(operands[0], np.where(self._value(operands[3], "pred"), a, b), active)

    def _mov(self, code, operands, active):
        to, given = operands
        type = code.split(".")[1]
        size = np.dtype(_TYPES[type]).itemsize
        if given.startswith("{"):
            low, high = (
                self._value(x.strip(), f"u{4 * size}").astype(np.uint64) for x in given.strip("{}").split(",")
            )
            self._set(to, (low | high << np.uint64(4 * size)).astype(f"u{size}"), active)
        elif to.startswith("{"):
            value = self._value(given, type).view(f"u{size}")
            for i, name in enumerate(to.strip("{}").split(",")):
                if name.strip() != "_":
                    self._set(
                        name.strip(),
                        (value >> np.array(4 * size * i, value.dtype)).astype(f"u{size // 2}"),
                        active,
                    )
        else:
            self._set(to, self._value(given, type), active)

    def _bfe(self, code, operands, active):
        type = code.split(".")[1]
        a, at, count = (self._value(x, type).astype(np.int64) for x in operands[1:])
        found = (a >> at) & ((1 << count) - 1)
        if type == "s32":
            found -= (found >> (count - 1)) << count
        self._set(operands[0], found.astype(_TYPES[type]), active)

    def _prmt(self, code, operands, active):
        low, high, picked = (self._value(x, "u32").astype(np.uint64) for x in operands[1:])
        both = low | high << np.uint64(32)
        found = np.zeros_like(both)
        for i in range(4):
            at = (picked >> np.uint64(4 * i)) & np.uint64(7)
            found |= ((both >> (at * np.uint64(8))) & np.uint64(255)) << np.uint64(8 * i)
        self._set(operands[0], found.astype(np.uint32), active)

    def _cvt(self, code, operands, active):
        *_, to, given = code.split(".")
        if to.endswith("x2"):
            high, low = (BITS[to[:-2]](self._value(x, "f32")).astype(np.uint32) for x in operands[1:])
            self._set(operands[0], low | high << np.uint32(16), active)
        elif to in BITS:
            self._set(operands[0], BITS[to](self._value(operands[1], given)), active)
        elif given in NUMBERS:
            self._set(operands[0], NUMBERS[given](self._value(operands[1], "b16")), active)
        else:
            self._set(operands[0], self._value(operands[1], given).astype(_TYPES[to]), active)

    # --- memory ------------------------------------------------------------------------------------------------------

    def _moved(self, code, text):
        """Registers of a vector or one, and their type."""
        return [x.strip() for x in text.strip("{}").split(",")], code.split(".")[-1]

    def _ld(self, code, operands, active):
        names, type = self._moved(code, operands[0])
        if ".param" in code:
            number = int(re.search(r"_param_(\d+)", operands[1])[1])
            value = self.values[number]
            made = (
                np.float32(value)
                if type == "f32" or isinstance(value, float)
                else np.int64(value).astype(_TYPES[type])
            )
            self._set(names[0], np.full(self.threads, made), active)
            return
        size = np.dtype(_TYPES[type]).itemsize
        addresses = self._address(operands[1])[active]
        if ".shared" in code:
            found = self._shared_bytes(
                addresses, size * len(names), np.flatnonzero(active) // LANES, self.read
            )
        else:
            found = self.memory.bytes[self.memory.at(addresses, size * len(names))]
        for i, name in enumerate(names):
            whole = np.zeros((self.threads, size), np.uint8)
            whole[active] = found[:, size * i : size * (i + 1)]
            self._set(name, whole.view(f"u{size}")[:, 0], active)

    def _st(self, code, operands, active):
        names, type = self._moved(code, operands[1])
        size = np.dtype(_TYPES[type]).itemsize
        values = [self._value(x, type).view(f"u{size}")[active, None].view(np.uint8) for x in names]
        addresses = self._address(operands[0])[active]
        made = np.concatenate(values, 1)
        if ".shared" in code:
            warps = np.flatnonzero(active) // LANES
            self._shared_bytes(addresses, made.shape[1], warps, self.written)
            self.shared[addresses.astype(np.int64)[:, None] + np.arange(made.shape[1])] = made
        else:
            self.memory.bytes[self.memory.at(addresses, made.shape[1])] = made

    def _shared_bytes(self, addresses, size, warps, noted):
        """Bytes of shared memory; notes who was there, and asserts that a barrier lies between accesses that conflict."""
        at = addresses.astype(np.int64)[:, None] + np.arange(size)
        assert not (addresses % np.uint64(size)).any(), "not aligned"
        words, own = np.broadcast_arrays(at // 4, 1 << warps[:, None])
        before = self.written if noted is self.read else self.written | self.read
        assert not (before[words] & ~own).any(), "there is no barrier between"
        np.bitwise_or.at(noted, words, own)
        return self.shared[at]

    def _bar(self, code, operands, active):
        self.written[:], self.read[:] = 0, 0

    def _atom(self, code, operands, active):
        assert active.sum() == 1
        at = self.memory.at(self._address(operands[1])[active], 4)
        before = self.memory.bytes[at].view(np.uint32)[:, 0]
        self._set(operands[0], np.full(self.threads, before[0]), active)
        made = before + self._value(operands[2], "u32")[active]
        self.memory.bytes[at] = made.astype(np.uint32)[:, None].view(np.uint8)

    # --- warps -------------------------------------------------------------------------------------------------------

    def _shfl(self, code, operands, active):
        mode, lane = code.split(".")[2], np.arange(self.threads)
        by = self._value(operands[2], "u32").astype(np.int64)
        other = {"bfly": lambda: lane ^ by, "idx": lambda: lane // LANES * LANES + by % LANES}[mode]()
        self._set(operands[0], self._value(operands[1], "b32")[other], active)

    def _ldmatrix(self, code, operands, active):
        names, _ = self._moved(code, operands[0])
        assert len(names) == 4
        assert "trans" not in code
        warps = np.arange(self.threads) // LANES
        rows = self._shared_bytes(self._address(operands[1]), 16, warps, self.read).reshape(-1, 4, 8, 4, 4)
        for i, name in enumerate(names):
            self._set(name, rows[:, i].reshape(self.threads, 4).copy().view(np.uint32)[:, 0], active)

    def _mma(self, code, operands, active):
        """`mma.sp.m16n8k32` as PTX ISA describes it, with its fragments and the selector of its metadata."""
        assert re.match(r"mma\.sp::ordered_metadata\.sync\.aligned\.m16n8k32\.row\.col\.f32", code)
        kind = code.split(".")[-2]
        kept, x, acc = (
            np.stack([self._value(name.strip(), "b32") for name in text.strip("{}").split(",")], 1).reshape(
                -1, LANES, 4
            )
            for text in operands[1:4]
        )
        places = self._value(operands[4], "b32").reshape(-1, LANES)
        dense = expanded(halves(kept, kind), places, int(operands[5], 0))
        other = np.zeros((len(x), 32, 8), np.float32)
        numbers, lane = halves(x, kind), np.arange(LANES)
        for i in range(4):
            for e in range(2):
                other[:, lane % 4 * 2 + 8 * i + e, lane // 4] = numbers[:, :, i, e]
        with np.errstate(invalid="ignore"):
            product = dense.astype(np.float64) @ other
        for i, name in enumerate(operands[0].strip("{}").split(",")):
            own = product[:, lane // 4 + 8 * (i // 2), lane % 4 * 2 + i % 2] + acc[..., i].copy().view(
                np.float32
            )
            self._set(name.strip(), own.astype(np.float32).reshape(-1), active)


def halves(words, kind):
    """The numbers of words, with a dimension more."""
    return np.stack([NUMBERS[kind](words & 0xFFFF), NUMBERS[kind](words >> 16)], -1)


def expanded(kept, places, selector):
    """16 rows of 32 columns for each warp, of the fragment of kept numbers and the metadata of all lanes."""
    dense = np.zeros((len(kept), 16, 32), np.float32)
    for g in range(8):
        for i in range(4):
            for t in range(4):
                # Kept numbers 2 t and 2 t + 1 of a row, or 8 further on, are of one group of four columns.
                row, group = g + 8 * (i % 2), t + 4 * (i // 2)
                word = places[:, 4 * g + 2 * selector + group // 4]
                bits = word >> (16 * (i % 2) + 4 * (group % 4)) & 15
                first, second = bits & 3, bits >> 2
                assert (first < second).all(), "the places are not in order"
                for e, place in enumerate((first, second)):
                    dense[np.arange(len(kept)), row, 4 * group + place] = kept[:, 4 * g + t, i, e]
    return dense


def parameters(binding, arguments, places):
    """The values of a kernel's parameters: those of its arguments that Triton does not make constants of.

    Args:
        arguments: of `Binding.arguments`.
        places: of tensors by their addresses.
    """
    found = []

    def add(value, constant):
        if isinstance(value, torch.Tensor):
            found.append(places[value.data_ptr()])
        elif isinstance(value, tuple):
            for each in value:
                add(each, constant)
        elif value is not None and not (constant and value == 1 and type(value) is int):
            found.append(value)

    for parameter, value in zip(binding.kernel.params, arguments, strict=False):
        add(value, not parameter.do_not_specialize)
    # Memory for the compiler's own use, of which these kernels have none.
    return [*found, 0, 0]
