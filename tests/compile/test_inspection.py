"""What `inspect` says of kernels, beside what the assembler, the compiler and the config say of them."""

import functools
import json
import os
import re
import subprocess
from collections import Counter

import pytest
import torch
from typer.testing import CliRunner

import gemmery
from gemmery.cli import app
from gemmery.devices import ARCHS, TABLE
from gemmery.lab.abstract import abstract_problem
from gemmery.lab.fused_targets import abstract_product
from gemmery.lab.inspection import inspect, sass
from gemmery.lab.inspection.code import KINDS, of_kind
from gemmery.lab.inspection.compile import device_of
from gemmery.lab.inspection.resources import usage
from gemmery.lab.inspection.show import facts, text
from gemmery.launch.cross_compile import compiling_for
from gemmery.launch.plan import compile_first_fitting
from gemmery.problem import Config
from gemmery.schedules import bind
from gemmery.select import candidates
from gemmery.select.samples import arguments
from gemmery.select.shapes import problem_of

#: A config that every target can run.
POINTERS = "64x64x64-g8-w4-s3-tile-pointer"
#: 256 numbers of the sum in each of 64 threads, which have 255 registers.
SPILLING = "128x128x32-g8-w2-s2-tile-pointer"
NVIDIA = ("sm_80", "sm_90", "sm_100", "sm_120")
AMD = ("gfx942", "gfx1100")
#: What passes with other versions of Triton leave out.
SLOW = ("sm_100", "sm_120", "gfx1100")

each_target = pytest.mark.parametrize(
    "target", [pytest.param(x, marks=pytest.mark.slow if x in SLOW else ()) for x in (*NVIDIA, *AMD)]
)


# What one test has compiled, others ask for: one worker runs them all.
pytestmark = pytest.mark.xdist_group("inspection")


#: On Hopper, whose fastest kernels are inline assembly: one of Triton's own loops.
LOOP = "64x128x128-g8-w4-s4-tile-descriptor"


@functools.cache
def inspected(target, config=None, size=1024, **more):
    config = LOOP if target == "sm_90" and config is None else config
    return inspect(abstract_problem(size, size, size, device=device_of(None, target), **more), config)


def assembled(found):
    """What NVIDIA's assembler says when it is given the kernel's PTX again."""
    from triton.backends.nvidia.compiler import get_ptxas

    number = int(found.target.removeprefix("sm_"))
    name = re.search(r"\.target (\w+)", found.texts["ptx"])[1]
    run = subprocess.run(
        [get_ptxas(number).path, "-v", f"--gpu-name={name}", "-", "-o", os.devnull],
        input=found.texts["ptx"], capture_output=True, text=True, check=True,
    )  # fmt: skip
    return {
        "registers": int(re.search(r"Used (\d+) registers", run.stderr)[1]),
        "stack": int(re.search(r"(\d+) bytes stack frame", run.stderr)[1]),
        "stored": int(re.search(r"(\d+) bytes spill stores", run.stderr)[1]),
    }


@pytest.mark.parametrize(("target", "config"), [("sm_80", POINTERS), ("sm_80", SPILLING), ("sm_90", None)])
def test_registers_and_spills_are_the_assemblers(target, config):
    found = inspected(target, config)
    said = assembled(found)
    assert found.usage.registers == said["registers"]
    assert found.usage.spilled == said["stack"]
    stores = [i for i in found.code.instructions if i.opcode.startswith("STL")]
    assert sum(i.bits // 8 for i in stores) == said["stored"]


def test_a_config_that_spills_is_shown_with_its_spills():
    found = inspected("sm_80", SPILLING)
    assert found.usage.spilled > 0
    assert any("spills" in warning for warning in found.warnings)
    assert f"{found.usage.spilled} bytes a thread" in facts(found)["spills"]
    assert not inspected("sm_80", POINTERS).warnings
    assert facts(inspected("sm_80", POINTERS))["spills"] == "none"


@each_target
def test_the_matrix_instruction_is_the_targets(target):
    """The device table's, in the compiler's text, and in machine code what that becomes."""
    found = inspected(
        target, "128x128x64-g8-w4-s2-tile-pointer" if target in ("sm_90", "sm_100") else POINTERS
    )
    assembly = found.texts.get("ptx") or found.texts["amdgcn"]
    assert ARCHS[target].matrix in assembly
    (opcode,) = found.tensor
    names = {"mma.sync": "HMMA.", "wgmma.mma_async": "HGMMA.", "tcgen05.mma": "UTCHMMA"}
    assert opcode.startswith(names.get(ARCHS[target].matrix, ARCHS[target].matrix))


@each_target
@pytest.mark.parametrize("config", [None, POINTERS])
def test_the_loop_that_is_found_multiplies_one_tile(target, config):
    """Counted in machine code, over all warps: block_m by block_n by block_k, which only the config knew."""
    found = inspected(target, config)
    if any(opcode.startswith("UTC") for opcode in found.tensor):
        assert found.products is None
        # Each instruction goes 16 numbers along K.
        assert found.tensor == {"UTCHMMA": found.config.block_k // 16}
    else:
        assert found.products == 1
    # Besides, there is nothing but the first steps, or the last ones, as often as the pipeline has them.
    whole = Counter(i.opcode for i in of_kind(found.code.instructions, "tensor"))
    if found.config.schedule == "tile":
        assert whole.keys() == found.tensor.keys()
        assert all(whole[opcode] % n == 0 for opcode, n in found.tensor.items())


@each_target
def test_every_instruction_is_read_and_known(target):
    found = inspected(target, None)
    assert {i.kind for i in found.code.instructions} <= set(KINDS) - {"other"}
    if "sass" in found.texts:
        lines = re.findall(r"^\s+/\*[0-9a-f]{4,}\*/", found.texts["sass"], re.MULTILINE)
        assert [i.address for i in found.code.instructions] == [16 * n for n in range(len(lines))]
    else:
        # LLVM counts their bytes, of which each instruction has four, eight or twelve.
        size = int(re.search(r"; codeLenInByte = (\d+)", found.texts["amdgcn"])[1])
        assert 4 <= size / len(found.code.instructions) <= 12
    targets = {i.goes_to for i in found.code.instructions if i.goes_to}
    assert targets <= set(found.code.labels)
    assert all(i.source for i in found.loop.body)


@pytest.mark.slow
@pytest.mark.parametrize("target", ["sm_80", "gfx942"])
def test_widths_of_loads(target):
    """16 bytes a lane where rows begin at multiples of that, and less where they begin anywhere."""
    aligned, odd = inspected(target, POINTERS), inspected(target, POINTERS, size=1001)
    kind = "copy" if target == "sm_80" else "load"
    widths = {m.bits for m in aligned.moves if m.kind == kind and m.in_loop}
    assert widths == {128}
    if target == "sm_80":
        bytes_in_ptx = re.findall(
            r"cp\.async\.cg\.shared\.global \[.*?\], \[.*?\], 0x(\w+)", aligned.texts["ptx"]
        )
        assert {8 * int(n, 16) for n in bytes_in_ptx} == widths
    assert {m.bits for m in odd.moves if m.kind == "load" and m.in_loop} == {16}


def test_blocks_fill_the_shared_memory_that_is_taken():
    found = inspected("sm_80", POINTERS)
    assert found.buffers == ["2 × 64×64 bf16 (2 times)"]
    assert found.usage.shared == 2 * 2 * 64 * 64 * 2


@pytest.mark.parametrize(("target", "config"), [("sm_80", POINTERS), ("sm_90", None)])
def test_loads_are_ahead_by_the_stages_but_one(target, config):
    found = inspected(target, config)
    assert found.ahead == found.config.num_stages - 1
    assert f"{found.ahead:g} steps" == facts(found)["loads ahead"]


def test_on_hopper_blocks_are_copied_whole():
    found = inspected("sm_90", None)
    assert "cp.async.bulk.tensor" in found.texts["ptx"]
    copies = [m for m in found.moves if m.kind == "copy" and m.in_loop]
    assert [(m.opcode, m.count, m.bits) for m in copies] == [("UTMALDG.2D", 2, 0)]
    assert not [m for m in found.moves if m.kind == "load"]


@pytest.mark.parametrize("target", AMD)
def test_amds_occupancy_is_llvms(target):
    """Warps that a SIMD's registers have room for; LLVM does not know of the shared memory that a launch asks for."""
    found = inspected(target, POINTERS)
    said = int(re.search(r"; Occupancy: (\d+)", found.texts["amdgcn"])[1])
    parts = ARCHS[target].multiprocessor.parts
    assert found.occupancy.limits["registers"] == said * parts // found.usage.warps
    counted = re.search(r"\.vgpr_count: +(\d+)", found.texts["amdgcn"])[1]
    assert found.usage.registers == int(counted)


@pytest.mark.slow
def test_one_process_compiles_for_many_targets():
    """And what it compiled for one is not handed out for another; nor does its driver stay."""
    from triton.runtime import driver

    before = driver._active
    for target, opcode in (("sm_80", "HMMA"), ("gfx942", "v_mfma"), ("sm_80", "HMMA")):
        found = inspect(
            problem_of(1024, 1024, 1024, device=next(r for r in TABLE.values() if r.arch == target)), POINTERS
        )
        assert found.target == target
        assert next(iter(found.tensor)).startswith(opcode)
    assert driver._active is before
    with pytest.raises(ZeroDivisionError), compiling_for("sm_90"):
        raise ZeroDivisionError
    assert driver._active is before


@pytest.mark.slow
def test_the_chosen_config_is_the_selectors():
    found = inspect(abstract_problem(1024, 1024, 1024, device=device_of(None, "sm_90")))
    assert found.config == candidates(found.problem)[0]
    assert not found.given
    assert not found.passed
    assert inspected("sm_80", POINTERS).given


@pytest.mark.slow
def test_a_config_that_spills_is_passed_over_as_a_plan_does():
    problem = problem_of(1024, 1024, 1024, device=TABLE["NVIDIA A100"])
    configs = [Config.of(SPILLING), Config.of(POINTERS)]
    with compiling_for("sm_80"):
        settled = compile_first_fitting(
            problem, configs, arguments(problem, "meta"), lambda x: usage(x).spilled // 4
        )
    assert settled.binding.config == configs[1]
    assert settled.passed == {
        configs[0]: f"spills {inspected('sm_80', SPILLING).usage.spilled} bytes a thread"
    }


@pytest.mark.slow
def test_a_plan_is_inspected_as_it_is():
    problem = problem_of(1024, 1024, 1024, device=TABLE["NVIDIA A100"])
    found = inspect(gemmery.Plan(problem, Config.of(POINTERS)))
    assert found.usage == inspected("sm_80", POINTERS).usage
    with pytest.raises(TypeError, match="a plan has its config"):
        inspect(gemmery.Plan(problem), POINTERS)
    with pytest.raises(TypeError, match="problem is a NoneType"):
        inspect(None)


@pytest.mark.slow
def test_packed_weights_with_epilogues_compile_as_a_call_of_them_does():
    """What is made up of a problem alone, and what a call makes of tensors, are the same code."""
    config = "16x64x64-g8-w4-s3-tile-descriptor-swap"
    problem, tensors = abstract_product("int4_gelu", "bf16", 16, 1024, TABLE["NVIDIA H200"])
    made = inspect(problem, config)
    with compiling_for("sm_90"):
        called = bind(problem, Config.of(config)).compile(*tensors)
    there = sass.read(sass.disassemble(called.asm["cubin"]))
    assert list(map(str, made.code.instructions)) == list(map(str, there.instructions))
    asked = inspect(abstract_problem(16, 1024, 1024, device=device_of(None, "sm_90"), weight="int4"), config)
    assert asked.problem.b == problem.b
    assert asked.products == 1
    assert all("from registers" in i.note for i in asked.loop.tensor)


@pytest.mark.slow
def test_fp8_on_cdna3_is_multiplied_as_the_device_table_says():
    found = inspected("gfx942", "16x64x64-g8-w4-s2-tile-pointer", dtype="e4m3")
    assert all(opcode.endswith("_f16") for opcode in found.tensor)
    assert any("as fp16" in lack for lack in gemmery.devices.cannot("gfx942"))


@pytest.mark.slow
def test_two_configs_side_by_side():
    pair = [inspected("sm_80", POINTERS), inspected("sm_80", SPILLING)]
    shown = text(pair, width=200)
    rows = {line.split("  ")[0]: line for line in shown.splitlines()}
    assert "registers ≠" in rows
    assert "255 a thread" in rows["registers ≠"]
    assert "≠ tensor HMMA.16816.F32.BF16" in shown
    assert "  wait   BAR.SYNC.DEFER_BLOCKING" in shown
    same = text([pair[0], pair[0]], width=200)
    assert "≠" not in same.replace("≠: they differ", "")


@pytest.mark.slow
def test_the_text_tells_what_there_is():
    found = inspected("sm_80", POINTERS)
    shown = text([found], listing=True, width=160)
    assert f"{found.usage.registers} a thread" in shown
    assert f"limited by {', '.join(found.occupancy.limited_by)}" in shown
    assert "load_strided" in shown
    assert all(str(i) in shown for i in found.loop.body)
    assert str(found).splitlines()[0] == shown.splitlines()[0]


@pytest.mark.slow
def test_the_command_writes_what_it_shows(tmp_path):
    path = tmp_path / "found.json"
    words = [
        "inspect",
        "1024",
        "1024",
        "1024",
        "--target",
        "sm_80",
        "--config",
        POINTERS,
        "--config",
        SPILLING,
    ]
    ran = CliRunner().invoke(app, [*words, "--ttgir", "--sass", "--json", str(path)])
    assert ran.exit_code == 0, ran.output
    first, second = json.loads(path.read_text())["inspections"]
    assert first["config"] == POINTERS
    assert first["registers"] == inspected("sm_80", POINTERS).usage.registers
    assert second["spilled"] == inspected("sm_80", SPILLING).usage.spilled
    assert first["loop"]["counts"]["tensor"] == sum(i["count"] for i in first["tensor"])
    assert len(first["loop"]["body"]) == sum(first["loop"]["counts"].values())
    assert first["occupancy"]["programs"] == inspected("sm_80", POINTERS).occupancy.programs
    assert "tt.func" in first["texts"]["ttgir"]
    assert "HMMA" in first["texts"]["sass"]
    assert "tt.func" in ran.output
    assert "the loop along K of" in ran.output


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--config", "polish"], "is not of the form"),
        (["--target", "sm_70"], "target is 'sm_70'"),
        (["--target", "sm_80", "--device", "H200"], "give one"),
        (["--target", "sm_80", "--dtype", "e4m3"], "lacks the instructions"),
        (["--target", "sm_80", "--config", "128x128x64-g8-w8-s3-tile-descriptor"], "needs TMA"),
        (["--weight", "int4", "--batch", "2"], "batch"),
        (["--batch", "two"], "batch"),
        (["--epilogue", "polish"], "epilogue is 'polish'"),
    ],
)
def test_mistakes_are_told_in_a_line(words, message):
    ran = CliRunner().invoke(app, ["inspect", "512", "512", "512", *words], env={"COLUMNS": "300"})
    assert ran.exit_code == 2
    assert message in " ".join(ran.output.split())


@pytest.mark.slow
def test_kernels_that_are_interpreted_are_not_inspected(monkeypatch):
    from gemmery.launch import cross_compile

    monkeypatch.setattr(cross_compile, "INTERPRETED", True)
    with pytest.raises(ValueError, match="unset TRITON_INTERPRET"):
        inspect(problem_of(64, 64, 64, dtype=torch.bfloat16, device=TABLE["NVIDIA A100"]), POINTERS)
