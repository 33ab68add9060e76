"""Packed weights with K shared by warps: the assembly, run by `lanes` in Python, against float64; and the schedule around it."""

import random
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
import triton.language as tl

pytest.importorskip("triton.experimental.gluon.language.nvidia.hopper")

import gemmery
from gemmery import Config, schedules, select
from gemmery.kernels import decoders, sliced_k_loop
from gemmery.kernels.sliced_k_loop import COLUMNS, DEPTH, SUM_ROW, Shape
from gemmery.lab.abstract import abstract_problem, linear_problem
from gemmery.operands.packed import PackedOperand
from gemmery.schedules import sliced_k
from gemmery.schedules.base import Forms
from gemmery.schedules.sliced_k import SLICED_K, X_BYTES
from gemmery.select import space
from gemmery.select.model import costs
from gemmery.select.shapes import device_named

from .lanes import Block

H200 = device_named("H200")


problem_of = partial(abstract_problem, device=H200, weight="int4")


def memory_of(tensors):
    """Tensors side by side in bytes, poison between them, and where each begins."""
    parts, places = [], []
    for tensor in tensors:
        own = tensor.contiguous().view(torch.uint8).flatten().numpy()
        places.append(sum(map(len, parts)))
        parts += [own, np.full(-len(own) % 16 + 16, 0xFF, np.uint8)]
    return np.concatenate(parts), places


def error(M, N, K, bundle, strips, warps=4, slots=3, chunk=0, buffers=1, seed=1, *, first=0, unit=0, units=0, text=str, **more):  # fmt: skip
    """The largest error of a program's sums, over the largest sum.

    Args:
        bundle, strips, warps, slots: see `Shape`, and strips of a program.
        chunk, buffers: see `sliced_k.multiply_strips`; without, all units are one chunk.
        first: the program's first strip.
        unit, units: its range of K; without, all from `unit` on.
        text: changes the assembly.
        more: of `gemmery.quantize`.
    """
    torch.manual_seed(seed)
    weight = gemmery.quantize(torch.randn(N, K), "int4", dtype=torch.bfloat16, **more)
    x = torch.randn(M, K).bfloat16()
    spec = linear_problem(x.to("meta"), weight.to("meta"), H200).b
    memory, places = memory_of([*PackedOperand(weight).launched, x])
    units = units or -(-K // DEPTH) - unit
    bundles, own = -(-strips // bundle), min(strips, -(-N // 16) - first)
    shape = Shape(spec.staged, "bf16", bundle, warps, slots, 1 << 16, warps % bundles != 0)
    words, scales, shifts = [*places[:-1], 0, 0][:3]
    lines = -(-K // 64) * 4
    operands = [
        words, scales, shifts, places[-1], lines * 128, 2 * K, M, K, first, own, bundles, unit, units, chunk or units,
        buffers, -(-K // spec.group), -(-N // 16) * 32,
    ]  # fmt: skip
    block = Block(
        text(sliced_k_loop.assembly(shape)), operands, memory, shape.bytes, warps, random.Random(seed)
    )
    block.run()
    found = np.zeros((COLUMNS, own * 16))
    size = SUM_ROW * COLUMNS
    for strip in range(own):
        # As `sliced_k.sums_of` finds them.
        each = strip // bundle
        low = max(-(-each * warps // bundles) - 1, 0) if shape.spans else each * warps // bundles
        for warp in range(low, -(-(each + 1) * warps // bundles)):
            at = ((warp + each) * bundle + strip % bundle) * size
            part = block.shared[at : at + size].view(np.float32).reshape(COLUMNS, -1)[:, :16]
            found[:, 16 * strip : 16 * strip + 16] += part
    exponent = decoders.unit_of(spec.staged.code, spec.staged.bits, tl.bfloat16, 90)
    along = slice(unit * DEPTH, (unit + units) * DEPTH)
    want = x.double()[:, along] @ weight.dequantize(torch.float64)[:, along].T
    want = want[:, 16 * first : 16 * (first + own)].numpy()
    return np.abs(found[:M, : want.shape[1]] * 2.0**exponent - want).max() / np.abs(want).max()


#: M, N, K, strips of a bundle and of a program, and what else is not as usual.
CASES = {
    "one bundle": ((4, 64, 1024, 4, 4), {}),
    "one strip": ((1, 16, 1024, 1, 1), {"chunk": 4, "buffers": 2}),
    "K ends within a step": ((8, 64, 1032, 4, 4), {"chunk": 4, "buffers": 2}),
    "K ends behind a step": ((3, 64, 960, 4, 4), {"chunk": 3, "buffers": 3}),
    "warps with two bundles": ((7, 200, 1000, 2, 6), {"warps": 8, "chunk": 3, "buffers": 3}),
    "fewer strips than a bundle": ((7, 200, 1000, 4, 8), {"warps": 8, "chunk": 2, "buffers": 4, "first": 8}),
    "a part of K": ((8, 96, 1600, 1, 5), {"warps": 8, "chunk": 2, "buffers": 2, "unit": 1, "units": 7, "first": 1}),
    "more slots": ((2, 64, 2048, 2, 4), {"slots": 5, "chunk": 5, "buffers": 2}),
    "groups of 16": ((5, 64, 520, 4, 4), {"group_size": 16}),
    "groups of 64": ((5, 64, 520, 4, 4), {"group_size": 64}),
    "large groups": ((5, 64, 1544, 4, 4), {"group_size": 256, "chunk": 4, "buffers": 2}),
    "zeros": ((5, 200, 1000, 4, 4), {"group_size": 32, "symmetric": False, "chunk": 4, "buffers": 2}),
}  # fmt: skip


@pytest.mark.sampled(5)
@pytest.mark.parametrize("case", CASES)
def test_sums(case):
    given, more = CASES[case]
    assert error(*given, **more) < 1e-5


def changed(old, new, count=-1):
    def change(text):
        assert old in text
        return text.replace(old, new, count)

    return change


#: What is left out or changed, and in which case it shows.
MUTANTS = {
    "words are not waited for": (
        "warps with two bundles",
        changed("mbarrier.try_wait.parity.shared::cta.b64 done, [full], phase;", "setp.eq.s32 done, 0, 0;"),
    ),
    "activations are not waited for": (
        "warps with two bundles",
        changed("mbarrier.try_wait.parity.shared::cta.b64 done, [row], buffer_phase;", "setp.eq.s32 done, 0, 0;"),
    ),
    "group parameters are not waited for": (
        "zeros", changed("cp.async.wait_group 1;", "cp.async.wait_group 9;"),
    ),
    "a chunk takes the place of one that is read": (
        "warps with two bundles", changed("\nCHUNK: bar.sync 0;", "\nCHUNK: "),
    ),
    "sums take the place of what is read": (
        "one bundle", changed("bar.sync 0; add.s32 row, warp, first_bundle;", "add.s32 row, warp, first_bundle;"),
    ),
    "a slot is filled while it is read": (
        "one bundle", changed("[arrives]", "[full]"),
    ),
    "nothing is put behind K": (
        "K ends within a step", changed("st.shared.v4.b32 [to], {bytes, bytes, bytes, bytes};", ""),
    ),
    "bytes of strips that do not exist are waited for": (
        "fewer strips than a bundle", changed("min.s32 left, left, 4;", "mov.b32 left, 4;"),
    ),
    "both of a warp's bundles have one sum": (
        "warps with two bundles", changed("mov.b32 other0, swapped;", ""),
    ),
    "phases do not change": (
        "more slots", changed("@more xor.b32 phase, phase, 1;", ""),
    ),
}  # fmt: skip


@pytest.mark.sampled(2)
@pytest.mark.parametrize("mutant", MUTANTS)
def test_mutants_are_caught(mutant):
    case, text = MUTANTS[mutant]
    given, more = CASES[case]

    def caught(seed):
        try:
            return not error(*given, seed=seed, text=text, **more) < 1e-5
        except (AssertionError, KeyError):
            return True

    assert any(caught(seed) for seed in range(1, 6))


def tile(text):
    return Config.of(f"{text}-sliced_k-pointer-swap")


def test_chunks_of_activations_fit():
    """In every config, and what `ldmatrix` reads of rows that do not exist lies in the program's shared memory."""
    own = [each.config for each in space.tiles_of("hopper", "packed4") if each.config.schedule == "sliced_k"]
    assert len(own) > 20
    r = random.Random(0)
    for config in own:
        for M in (1, r.randint(2, 7), 8):
            problem = problem_of(M, 512, 8 * r.randint(1, 4000))
            cut = replace(config, split_k=r.choice((1, 2, 5)))
            binding = schedules.bind(problem, cut)
            chunk, count = binding.chunks
            pitch = chunk * sliced_k_loop.ROW + sliced_k_loop.COPY
            assert ((count - 1) * M + COLUMNS) * pitch <= X_BYTES[config.num_warps]
            length = -(-problem.K // DEPTH) if binding.split is None else binding.split.length // DEPTH
            assert chunk >= length if count == 1 else 2 <= count <= sliced_k_loop.MOST_CHUNKS


def test_kernels_that_are_one_have_the_same_constants():
    """Where `code` says that configs share a kernel, they do."""
    problem, seen = problem_of(4, 4096, 4096), {}
    for each in space.tiles_of("hopper", "packed4"):
        if each.config.schedule == "sliced_k":
            constants = schedules.bind(problem, each.config).constants
            code = SLICED_K.code(each.config, Forms.of(problem))
            assert seen.setdefault(code, constants) == constants
    assert len(seen) < 20


def test_every_number_is_computed_once():
    for text, K in (("8x48x128-g1-w8-s3", 1000), ("8x128x128-g1-w4-s3", 4096)):
        problem = problem_of(5, 1000, K)
        for split in (1, 3):
            walk = SLICED_K.walk(problem, replace(tile(text), split_k=split))
            assert sorted(set(walk.col.tolist())) == list(range(0, 1000, tile(text).block_n))
            assert sum(walk.last_k - walk.first_k) == K * len(set(walk.col.tolist()))


@pytest.mark.parametrize(("text", "words"), [
    ("8x64x64-g1-w8-s3", "block_k"), ("8x64x128-g1-w2-s3", "warps"), ("16x64x128-g1-w8-s3", "block_m"),
    ("8x40x128-g1-w8-s3", "block_n"), ("8x64x128-g1-w8-s2", "num_stages"),
])  # fmt: skip
def test_configs_that_are_none(text, words):
    with pytest.raises(ValueError, match=words):
        tile(text)


def test_products_that_are_refused():
    config, problem = tile("8x64x128-g1-w8-s3"), problem_of(4, 512, 512)
    assert SLICED_K.refusal(problem, config) is None
    invariant = replace(problem, batch_invariant=True)
    assert "order of a sum" in SLICED_K.refusal(invariant, config)
    assert "shared memory" in SLICED_K.refusal(problem, replace(config, num_stages=12))
    assert "needs" in SLICED_K.refusal(replace(problem, b=replace(problem.b, group=48)), config)
    for K in (1001, 1004, 4090):
        # Bulk copies are of whole 16 bytes.
        assert "K a multiple of 8" in SLICED_K.refusal(
            replace(problem_of(4, 512, -(-K // 8) * 8), K=K), config
        )
    many = replace(problem_of(4, 1024, 512), M=(1 << 30) - 1)
    assert "counts tiles and parts of tiles to 1073741823" in SLICED_K.refusal(many, config)
    assert not SLICED_K.considers(problem, np.array([[9]]), config).any()


def test_it_is_chosen_for_few_rows_of_a_large_weight():
    first = {M: select.rank(problem_of(M, 32768, 8192))[0][0].schedule for M in (1, 5, 16)}
    assert first[5] == "sliced_k"
    assert first[16] != "sliced_k"


@pytest.mark.parametrize("num_warps", [4, 8, 16])
def test_a_program_more_than_there_is_room_for_costs_a_wave(num_warps):
    config = Config.of(f"8x16x128-g1-w{num_warps}-s3-sliced_k-pointer-swap")
    room = SLICED_K.at_once(problem_of(8, 4096, 4096), config)

    def seconds(programs):
        problem = problem_of(8, 16 * programs, 4096)
        found = space.space_of(problem)
        return costs(problem, found).overhead[found.configs.index(config)]

    assert seconds(room) == pytest.approx(seconds(room - 1))
    assert seconds(room + 1) == pytest.approx(seconds(room) + sliced_k.WAVE)
