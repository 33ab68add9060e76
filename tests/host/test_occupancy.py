"""Occupancy, compared with what NVIDIA's own calculator gives, and how loops are found in code."""

import pytest

from gemmery.devices import ARCHS
from gemmery.lab.inspection.code import Code, Instruction
from gemmery.launch.occupancy import occupancy

#: Registers, shared memory, warps of a program; then what cudaOccMaxActiveBlocksPerMultiprocessor of CUDA 13's
#: cuda_occupancy.h gives, and the resources that it names as the limit.
CALCULATED = {
    "sm_80": [
        (222, 49152, 8, 1, {"registers"}),
        (64, 81920, 4, 2, {"shared memory"}),
        (32, 0, 2, 32, {"registers", "warps", "programs"}),
        (168, 166912, 4, 1, {"shared memory"}),
        (255, 1024, 1, 8, {"registers"}),
    ],
    "sm_86": [(128, 49152, 4, 2, {"shared memory"}), (40, 0, 1, 16, {"programs"}), (72, 0, 8, 3, {"registers"})],
    "sm_89": [(40, 0, 1, 24, {"programs"}), (40, 0, 2, 24, {"registers", "warps", "programs"})],
    "sm_90": [
        (174, 229408, 8, 1, {"registers", "shared memory"}),
        (90, 115712, 4, 2, {"shared memory"}),
        (90, 115840, 4, 1, {"shared memory"}),
        (114, 41536, 4, 4, {"registers"}),
    ],
    "sm_120": [(245, 49152, 4, 2, {"registers", "shared memory"})],
}  # fmt: skip


@pytest.mark.parametrize(
    "case",
    [(arch, *case) for arch, cases in CALCULATED.items() for case in cases],
    ids=lambda case: "-".join(map(str, case[:4])),
)
def test_occupancy_is_nvidias(case):
    arch, registers, shared, warps, programs, limits = case
    found = occupancy(ARCHS[arch], registers, shared, warps)
    assert found.programs == programs
    assert set(found.limited_by) == limits
    assert found.warps == programs * warps <= found.most


def test_what_does_not_fit_has_no_occupancy():
    found = occupancy(ARCHS["sm_90"], 100, ARCHS["sm_90"].shared + 1, 4)
    assert found.programs == 0
    assert found.limited_by == ("shared memory",)
    assert occupancy(ARCHS["sm_100"], 64, 0, 4, tensor_memory=256).limits["tensor memory"] == 2


def test_the_interpreter_has_no_multiprocessors():
    assert occupancy(ARCHS["interpreter"], 1, 1, 1) is None


def code(text):
    """Code of one letter an instruction: M uses the tensor cores; `x>label` branches, `x>>label` always."""
    instructions, labels = [], {}
    for word in text.split():
        if word.endswith(":"):
            labels[word[:-1]] = len(instructions)
            continue
        name, always, target = word.partition(">>") if ">>" in word else word.partition(">")
        kind = "tensor" if name == "M" else "control" if target else "integer"
        instructions.append(
            Instruction(len(instructions), "", name, "", kind, goes_to=target, falls=always != ">>")
        )
    return Code(tuple(instructions), labels)


def names(instructions):
    return "".join(i.opcode for i in instructions)


def test_a_wait_behind_the_end_is_no_loop_of_its_own_and_its_way_back_none():
    """What ptxas does with a barrier that is seldom waited for: a branch back from it crosses the loop's end."""
    found = code("a top: b w>spin back: M c>top d>>end spin: s>spin t>>back end: e")
    loops = {names(loop.body) for loop in found.loops}
    assert loops == {"bwMc", "s"}
    main = found.main_loop
    assert names(main.body) == "bwMc"
    assert names(main.aside) == "st"


def test_the_innermost_loop_is_the_main_one():
    found = code("a tile: b k: M c>k e f>tile g")
    assert names(found.main_loop.body) == "Mc"


def test_what_is_skipped_in_some_passes_stands_aside():
    found = code("a top: b>over x y over: M c>top d")
    assert names(found.main_loop.body) == "bMc"
    assert names(found.main_loop.aside) == "xy"


def test_products_that_one_thread_starts_belong_to_every_pass():
    found = code("a top: b>over M M over: c d>top e")
    assert names(found.main_loop.body) == "bMMcd"


def test_of_several_loops_the_one_with_most_work_is_the_main_one():
    found = code("a: M b>a c: M M d>c e: f>e g")
    assert names(found.main_loop.body) == "MMd"
    assert code("a b").main_loop is None
