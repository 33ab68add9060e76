"""2:4 sparse weights in tiles of any width: a stage as TMA fills it, and the words that each thread takes from it.

The kernel's own assembly runs, with tensor maps of a real weight. What a warpgroup then holds must be what `wgmma.sp` of
PTX wants: expanded by it, the kept numbers are the weight.
"""

import itertools
import re

import numpy as np
import pytest
import torch

from gemmery import Config, ScaledTensor, epilogues, quantize, schedules, sparsify
from gemmery.lab.abstract import linear_problem
from gemmery.product.spec import Options
from gemmery.select import samples
from gemmery.select.shapes import device_named

pytest.importorskip("triton.experimental.gluon.language.nvidia.hopper")
from gemmery.kernels import any_width_load
from gemmery.kernels.any_width_loop import format_of
from gemmery.kernels.any_width_sparse import SparseStage

from .ptx import Program

H200 = device_named("H200")
#: The stage that is looked at, of how many, and rows of Y.
STAGE, STAGES, WIDTH = 1, 3, 80
#: Which words' halves `prmt` takes, by what it is told.
PICKED = {0x5410: 0, 0x7632: 16}


class Memory:
    """Shared memory, into which TMA loads.

    Args:
        maps: descriptors, by the name of the kernel's parameter that is the tensor map.
    """

    def __init__(self, maps):
        self.maps, self.bytes, self.thread = maps, np.full(1 << 18, 0xAA, np.uint8), 0
        self.announced = self.loaded = 0

    def ptx(self, code, arguments, value):
        """See `Program.run`."""
        if code.startswith("cp.async.bulk.tensor"):
            number, at = re.fullmatch(r"\[(\S+), \{(.*)\}\]", arguments[1]).groups()
            places = [value(each) for each in at.split(",")]
            assert f"tensor.{len(places)}d." in code
            self._load(value(arguments[0].strip("[]")), self.maps[value(number)], places[::-1])
        elif code.startswith("mbarrier.arrive.expect_tx"):
            self.announced += value(arguments[2])
        elif code == "ld.shared.b32":
            at = sum(map(value, arguments[1].strip("[]").split("+")))
            assert at % 4 == 0
            return arguments[0], int(self.bytes[at : at + 4].view(np.uint32)[0])
        elif code == "ld.shared.b16":
            at = sum(map(value, arguments[1].strip("[]").split("+")))
            assert at % 2 == 0
            return arguments[0], int(self.bytes[at : at + 2].view(np.uint16)[0])
        elif code == "selp.b32":
            return arguments[0], value(arguments[1 if value(arguments[3]) else 2])
        elif code == "prmt.b32":
            low, high, picked = map(value, arguments[1:])
            shift = PICKED[picked]
            return arguments[0], (low >> shift & 0xFFFF) | (high >> shift & 0xFFFF) << 16
        else:
            assert code.startswith("createpolicy"), code
        return None

    def _load(self, to, made, places):
        """A box of a tensor from these places on, with zeros where it has no elements."""
        found, inside = 0, True
        for i, (place, size, shape, stride) in enumerate(
            zip(places, made.box, made.shape, made.strides, strict=True)
        ):
            along = np.arange(place, place + size).reshape(-1, *[1] * (len(places) - 1 - i))
            found, inside = found + along * stride, inside & (along < shape)
        kinds = {1: torch.int8, 2: torch.int16, 4: torch.int32}
        numbers = made.base.view(kinds[made.base.itemsize]).flatten().numpy()
        # What TMA asks of strides and of a box.
        assert all(stride * numbers.itemsize % 16 == 0 for stride in made.strides[:-1])
        assert max(made.box) <= 256
        box = np.where(inside, numbers[np.where(inside, found, 0)], 0).astype(numbers.dtype)
        self.bytes[to : to + box.nbytes] = box.reshape(-1).view(np.uint8)
        self.loaded += box.nbytes


def loading(format, form, rows):
    """The assembly that loads a stage's numbers and metadata; $0 to $3 are the row, the box, the bytes and k."""
    given = (None, "$0", "$1", "$2", "$0", "$1", "$1", "$2")
    x, _ = any_width_load._operands(rows, str(format), form, "rows", *given)
    maps = any_width_load.maps_of(form, "rows")
    return Program(
        f"{{ {any_width_load._REGISTERS} mov.b32 stage, {STAGE}; mov.b32 at, 0; mov.b32 k, $3;"
        f"{any_width_load._places(format.words // 16 * rows, str(STAGES), str(WIDTH), format.y_blocks)} {x.setup(maps.x, '0')} {x.several()} }}"
    )


def taking(format, rows, first, own):
    """The assembly of a thread's words of a stage, of each 64 of its warpgroup's rows.

    They come in $0 and $1 for the first 64 rows, and in $2 and $3 for the next ones: one for each of a step's
    instructions, or the same one for both.
    """
    sums = [[f"$9{i}" for i in range(32)]] * own
    text = format.steps(sums, "bf16.bf16", False, False, rows, "", "{}".format, "", "", "")
    loads = re.search(r"mad\.lo\.s32 params, stage.*?(?=wgmma\.fence)", text, re.DOTALL)[0]
    # The first set of registers, of the first round.
    names = [
        re.search(r"words0\d\d?", part)[0]
        for i in range(own)
        for part in re.findall(rf"own_y, words0{i}\d?, \d, \d", text)[: 4 if format.wide else 2]
    ]
    return Program(
        f"{{ .reg .b32 stage, {', '.join(dict.fromkeys(names))}; mov.b32 stage, {STAGE};"
        f"{format.begin(rows, first, str(STAGES), str(WIDTH))} {loads}"
        f"{''.join(f'mov.b32 ${i}, {name};' for i, name in enumerate(names))} }}"
    )


def multiplied(kept, words):
    """64 rows as `wgmma.sp.m64nNk32` multiplies them, in two instructions with 32 columns each.

    Args:
        kept: (64, 32).
        words: of the 128 threads, for each instruction.
    """
    found = np.zeros((64, 64), kept.dtype)
    for thread, half, part in itertools.product(range(128), range(2), range(4)):
        warp, lane = divmod(thread, 32)
        g, t = divmod(lane, 4)
        selector, c = divmod(t, 2)
        row, column = 16 * warp + g + 8 * half, 32 * selector + 16 * c + 4 * part
        places = words[thread][selector] >> (16 * half + 4 * part)
        for i, place in enumerate((places & 3, places >> 2 & 3)):
            found[row, column + place] = kept[row, column // 2 + i]
    return found


def multiplied_fp8(kept, words):
    """The same by `wgmma.sp.m64nNk64`, with 64 columns each: of each row, two threads have words of 32 columns."""
    found = np.zeros((64, 128), kept.dtype)
    for thread, which, part in itertools.product(range(128), range(2), range(8)):
        warp, lane = divmod(thread, 32)
        g, t = divmod(lane, 4)
        row, column = 16 * warp + g + 8 * (t % 2), 64 * which + 32 * (t // 2) + 4 * part
        places = words[thread][which] >> 4 * part
        for i, place in enumerate((places & 3, places >> 2 & 3)):
            found[row, column + place] = kept[row, column // 2 + i]
    return found


def rows_of_x(bits, paired, count):
    """The rows of X, with zeros behind them up to `count`."""
    if paired:
        bits = bits.unflatten(0, (2, -1, 8)).transpose(0, 1).flatten(0, 2)
    found = bits.numpy()
    return np.pad(found, ((0, count - found.shape[0]), (0, -found.shape[1] % 128)))


def launched(problem, weight, text, direct):
    """A binding, its kernel's arguments by name, and the tensor maps of X and its metadata by parameter."""
    binding = schedules.bind(problem, Config.of(text))
    tensors, numbers = samples.arguments(problem, "cpu")
    tensors = tensors[0], weight.values, weight.metadata, *tensors[3:]
    made = (binding.direct_arguments if direct else binding.arguments)(tensors, numbers)
    given = dict(zip(binding.kernel.arg_names, made, strict=False))
    places = any_width_load.maps_of(binding.forms[0], "rows", format_of(binding.constants["FORMAT"]))
    maps = {
        f"gemm_any_width_param_{number}": given[name]
        for number, name in ((places.x, "x"), (places.params[0], "scales"))
    }
    return binding, given, maps


CASES = [
    # N, K, whether it is in two halves, and a config: 64, 128 and 192 rows of X, and 128 rows for each warpgroup.
    (104, 104, False, "80x64x64-g8-w4-s4-cooperative-descriptor-swap"),
    (288, 192, False, "80x128x64-g8-w8-s4-cooperative-descriptor-swap"),
    (352, 136, False, "80x192x64-g8-w12-s4-cooperative-descriptor-swap"),
    (608, 128, False, "80x256x64-g8-w8-s4-cooperative-descriptor-swap"),
    (32, 64, False, "80x128x64-g8-w8-s4-cooperative-descriptor-swap"),
    (192, 104, True, "80x64x64-g8-w4-s4-cooperative-descriptor-swap"),
    (320, 136, True, "80x128x64-g8-w8-s4-cooperative-descriptor-swap"),
    (448, 192, True, "80x192x64-g8-w12-s4-cooperative-descriptor-swap"),
    (576, 64, True, "80x256x64-g8-w8-s4-cooperative-descriptor-swap"),
    (64, 104, True, "80x128x64-g8-w8-s4-cooperative-descriptor-swap"),
    # Two warpgroups share rows.
    (352, 136, False, "80x96x64-g8-w8-s4-cooperative-descriptor-swap"),
    (352, 136, False, "80x160x64-g8-w12-s4-cooperative-descriptor-swap"),
    # Long steps.
    (104, 104, False, "80x64x128-g8-w4-s4-cooperative-descriptor-swap"),
    (288, 320, False, "80x128x128-g8-w8-s4-cooperative-descriptor-swap"),
    (352, 256, False, "80x96x128-g8-w8-s4-cooperative-descriptor-swap"),
    (320, 264, True, "80x128x128-g8-w8-s4-cooperative-descriptor-swap"),
    # fp8.
    (104, 128, False, "80x64x128-g8-w4-s4-cooperative-descriptor-swap", True),
    (288, 384, False, "80x128x128-g8-w8-s4-cooperative-descriptor-swap", True),
    (352, 240, False, "80x192x128-g8-w12-s4-cooperative-descriptor-swap", True),
    (608, 128, False, "80x256x128-g8-w8-s4-cooperative-descriptor-swap", True),
    (192, 256, True, "80x64x128-g8-w4-s4-cooperative-descriptor-swap", True),
    (576, 128, True, "80x256x128-g8-w8-s4-cooperative-descriptor-swap", True),
    (448, 368, True, "80x192x128-g8-w12-s4-cooperative-descriptor-swap", True),
]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("direct", [False, True])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_threads_have_the_metadata_that_their_products_read(case, direct):
    N, K, paired, text, *more = case
    generator = torch.Generator().manual_seed(N + K)
    weight = sparsify(torch.randn(N, K, generator=generator).to(torch.bfloat16))
    fp8, wide = bool(more), not more and "x128-g8" in text
    x = torch.empty(100, K, dtype=torch.bfloat16, device="meta")
    if fp8:
        # No product here has fp8 that is not promoted, so that widths are those of others.
        weight = quantize(weight, "e4m3").unscaled()
        x = ScaledTensor(x.to(torch.float8_e4m3fn), torch.ones((), device="meta"))
    problem = linear_problem(
        x, weight.to("meta"), H200, epilogue=epilogues.swiglu if paired else None,
        options=Options(fast_accum=True),
    )  # fmt: skip
    binding, given, maps = launched(problem, weight, text, direct)
    tile, format, form = binding.tile, format_of(binding.constants["FORMAT"]), binding.forms[0]
    assert form == ("sparse pairs" if paired else "sparse")
    assert (format, tile.y) == (SparseStage(paired=paired, fp8=fp8, wide=wide), WIDTH)
    # The assembly's matrix descriptors say how the numbers are swizzled; words are not.
    assert given["x"].layout.swizzle_byte_width == (128 if wide else 64)
    assert given["scales"].layout.swizzle_byte_width == 0
    load = loading(format, form, tile.x)
    first_rows = [min(first, tile.x - tile.own) for first in range(0, tile.x, tile.own)]
    takes = [taking(format, tile.x, first, tile.own // 64) for first in first_rows]
    bits = weight.in_code().dense().view(torch.int8) if fp8 else weight.dense().view(torch.int16)
    whole = rows_of_x(bits, paired, N + 2 * tile.x)
    columns, kind, product = (128, np.int8, multiplied_fp8) if fp8 else (64, np.int16, multiplied)
    step, each_row = format.step, format.words // 16
    # The last tile where it stays, and where `corner` moves it; and some that begin where no tile of this size does.
    each = 64 if paired else 32
    rows = {0, N // tile.x * tile.x, max(0, -(-N // each) * each - tile.x), min(each, N - N % each)}
    for row, k in itertools.product(sorted(rows), range(0, K, step)):
        memory = Memory(maps)
        load.run([row, given["x_box"], given["x_size"], k], memory)
        assert memory.announced == memory.loaded == given["x_size"]
        at = STAGE * each_row * tile.x
        kept = memory.bytes[at : at + each_row * tile.x].view(kind).reshape(tile.x, -1)
        for first, take in zip(first_rows, takes, strict=True):
            words = []
            for memory.thread in range(128):
                operands = [None] * (2 * tile.own // 64 * (step // columns))
                take.run(operands, memory)
                words.append(operands)
            for i in range(tile.own // 64):
                own = first + 64 * i
                for part in range(step // columns):
                    number, at = 2 * (i * (step // columns) + part), columns // 2 * part
                    found = product(
                        kept[own : own + 64, at : at + columns // 2],
                        [each[number : number + 2] for each in words],
                    )
                    begin = k + columns * part
                    wanted = whole[row + own : row + own + 64, begin : begin + columns]
                    assert (found == wanted).all(), (row, begin, own)


DECODED = [
    # N, K, whether it is in two halves, and a config.
    (104, 104, False, "80x64x64-g8-w4-s4-cooperative-descriptor-swap"),
    (352, 136, False, "80x192x64-g8-w12-s4-cooperative-descriptor-swap"),
    (320, 136, True, "80x128x64-g8-w8-s4-cooperative-descriptor-swap"),
    # Long steps, and warpgroups that share rows.
    (104, 264, False, "80x64x128-g8-w4-s4-cooperative-descriptor-swap"),
    (288, 320, False, "80x128x128-g8-w8-s4-cooperative-descriptor-swap"),
    (352, 136, False, "80x96x128-g8-w8-s4-cooperative-descriptor-swap"),
    (320, 264, True, "80x128x128-g8-w8-s4-cooperative-descriptor-swap"),
]


def swizzled(box):
    """Rows of 64 bytes as TMA swizzles them: of row i the n-th 16 bytes lie where those of n xor (i / 2) would."""
    rows, chunks = np.indices((len(box), 4))
    return box.reshape(-1, 4, 16)[rows, chunks ^ rows // 2 % 4].reshape(box.shape)


def pairs_of(format, rows, first, own):
    """The assembly of a thread's pairs of kept numbers of a stage, of each 64 of its warpgroup's rows."""
    loads = "".join(format._stored(0, i) for i in range(own))
    names = [name for i in range(own) for name in format._pairs(0, i)]
    moves = "".join(f"mov.b32 ${i}, {name};" for i, name in enumerate(names))
    text = format.steps(
        [[f"$9{i}" for i in range(32)]] * own, "bf16.bf16", False, False, rows, "", "{}".format, "", "", ""
    )
    finds = re.search(r"and\.b32 bytes, x, .*?(?=xor)", text)[0]
    at = (STAGE * rows + first) * format.words // 256
    return len(names), Program(
        f"{{ .reg .b32 x, bytes, part8, {', '.join(names)}; {format._place()} mov.b32 x, {at}; {finds} {loads} {moves} }}"
    )


@pytest.mark.parametrize("case", DECODED, ids=str)
def test_threads_have_the_numbers_of_8_bits_that_their_products_read(case):
    N, K, paired, text = case
    generator = torch.Generator().manual_seed(N + K)
    weight = quantize(sparsify(torch.randn(N, K, generator=generator).to(torch.bfloat16)), "e4m3")
    x = torch.empty(100, K, dtype=torch.bfloat16, device="meta")
    problem = linear_problem(x, weight.to("meta"), H200, epilogue=epilogues.swiglu if paired else None)
    binding, given, maps = launched(problem, weight, text, True)
    tile, format, form = binding.tile, format_of(binding.constants["FORMAT"]), binding.forms[0]
    assert format == SparseStage("e4m3", paired, wide="x128-g8" in text)
    size = format.words // 16
    assert given["x"].layout.swizzle_byte_width == (64 if size == 64 else 0)
    load = loading(format, form, tile.x)
    whole = rows_of_x(
        weight.values.view(torch.int8).reshape(-1, weight.values.shape[-1]), paired, N + 2 * tile.x
    )
    for row, k in itertools.product({0, N // 64 * 64}, range(0, K, format.step)):
        memory = Memory(maps)
        load.run([row, given["x_box"], given["x_size"], k], memory)
        at = slice(STAGE * size * tile.x, (STAGE + 1) * size * tile.x)
        if size == 64:
            memory.bytes[at] = swizzled(memory.bytes[at].reshape(-1, size)).reshape(-1)
        for first in {min(first, tile.x - tile.own) for first in range(0, tile.x, tile.own)}:
            count, take = pairs_of(format, tile.x, first, 1)
            for memory.thread in range(128):
                operands = [None] * count
                take.run(operands, memory)
                warp, lane = divmod(memory.thread, 32)
                g, t = divmod(lane, 4)
                # As `wgmma.sp` of 32 columns wants them: a row and the one 8 behind it, then 8 kept numbers further.
                wanted = [
                    whole[row + first + 16 * warp + g + 8 * down, k // 2 + 16 * part + 8 * right + 2 * t :][
                        :2
                    ]
                    for part in range(format.step // 32)
                    for right in range(2)
                    for down in range(2)
                ]
                assert operands == [int(pair.copy().view(np.uint16)[0]) for pair in wanted], (
                    row,
                    k,
                    memory.thread,
                )
