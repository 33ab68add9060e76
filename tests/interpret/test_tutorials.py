"""Every rung of the ladder through the interpreter, and what the tile order of rung 5 promises."""

import dataclasses
import json
import math
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks import ladder_results
from docs.hooks import notebooks, rungs
from gemmery.lab import ladder

TUTORIALS = Path(__file__).resolve().parents[2] / "tutorials"
FILES = sorted(TUTORIALS.glob("[0-9][0-9]_*.py"))
MATMULS = range(3, 9)

pytestmark = pytest.mark.filterwarnings("ignore:tl.make_block_ptr is deprecated")


@pytest.fixture(scope="module")
def common() -> Iterator[ModuleType]:
    """The tutorials' common file, imported as the tutorials import it: from the folder that they lie in."""
    sys.path.insert(0, str(TUTORIALS))
    try:
        import _common

        yield _common
    finally:
        sys.path.remove(str(TUTORIALS))


@pytest.fixture(scope="module")
def order(common: ModuleType) -> ModuleType:
    return common.rung(5)


# ---------------------------------------------------------------------------------------------------------------------
# The rungs


def test_there_are_twelve_rungs() -> None:
    assert [path.name[:2] for path in FILES] == [f"{number:02d}" for number in range(1, 13)]
    assert list(ladder.tutorial_files().values()) == FILES


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_rung(common: ModuleType, path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    number = int(path.name[:2])
    module = common.rung(number)
    written = tmp_path / "record.json"
    record = module.main(["--json", str(written)])

    assert record.number == number
    assert module.__doc__.startswith(f"Rung {number}: ")
    assert record.interpreted
    assert sum(row.role == "this" for row in record.rows) >= 3
    for row in record.rows:
        assert row.time_us is None, "the interpreter's time says nothing"
        assert row.error is not None
        assert row.error < 1e-3
    assert record.title in capsys.readouterr().out

    again = ladder.read_record(written.read_text(encoding="utf-8"))
    assert dataclasses.asdict(again) == dataclasses.asdict(record) | {
        "rows": tuple(map(dataclasses.asdict, record.rows))
    }


def test_same_seed_same_result(common: ModuleType) -> None:
    first, second = (common.rung(4).main(["--seed", "7"]) for _ in range(2))
    assert first == second


def product(
    common: ModuleType, number: int, a: torch.Tensor, w: torch.Tensor, out: torch.Tensor | None = None
) -> torch.Tensor:
    """a @ w.T by a rung: some take the weight, some its transpose."""
    return common.rung(number).matmul(a, w if number in (3, 8) else w.T, out)


@pytest.mark.parametrize("number", MATMULS)
def test_an_unwritten_element_is_noticed(common: ModuleType, number: int) -> None:
    a, w = common.normal(64, 64), common.normal(64, 64)
    out = common.poisoned(64, 64)
    assert product(common, number, a, w, out) is out
    out[-1, -1] = math.nan
    with pytest.raises(AssertionError, match="relative error nan"):
        common.compare("a rung", "64x64x64", out, a @ w.T, a.double() @ w.double().T, 1e-3)


@pytest.mark.parametrize("number", MATMULS)
def test_what_no_rung_takes(common: ModuleType, number: int) -> None:
    a, w = common.normal(64, 64), common.normal(64, 64)
    with pytest.raises(ValueError, match=r"\(64, 64\) and \(32, 64\)"):
        product(common, number, a, common.normal(64, 32))
    with pytest.raises(ValueError, match="float16"):
        product(common, number, a.float(), w.float())
    with pytest.raises(ValueError, match="out must be"):
        product(common, number, a, w, common.poisoned(64, 63))


def test_what_single_rungs_refuse(common: ModuleType) -> None:
    vector = common.normal(64, dtype=torch.float32)
    for number in (1, 2):
        add = common.rung(number).add
        with pytest.raises(ValueError, match="contiguous"):
            add(vector[::2], vector[::2])
        with pytest.raises(ValueError, match=r"\(64,\).*\(32,\)"):
            add(vector, vector[:32])
    with pytest.raises(ValueError, match="16 bytes"):
        common.rung(2).add(vector[1:], vector[1:], window="descriptor")

    a, w = common.normal(64, 64), common.normal(64, 64)
    with pytest.raises(ValueError, match="multiples of 32"):
        common.rung(3).matmul(a[:63], w)
    with pytest.raises(ValueError, match="contiguous"):
        common.rung(3).matmul(a.T, w)
    with pytest.raises(ValueError, match=r"w: .*16 bytes"):
        common.rung(8).matmul(a, w.T)
    with pytest.raises(ValueError, match="empty"):
        common.rung(8).matmul(a[:0], w)
    with pytest.raises(ValueError, match="bias must be"):
        common.rung(9).linear(a, w, common.normal(63))
    with pytest.raises(ValueError, match="'tanh'"):
        common.rung(9).linear(a, w, common.normal(64), "tanh")


def test_empty_vectors_and_products(common: ModuleType) -> None:
    nothing = common.normal(0, dtype=torch.float32)
    assert common.rung(1).add(nothing, nothing).shape == (0,)
    assert common.rung(2).add(nothing, nothing).shape == (0,)
    for number in (4, 5, 6, 7):
        matmul = common.rung(number).matmul
        assert matmul(common.normal(0, 8), common.normal(8, 5)).shape == (0, 5)
        # A sum of nothing is 0.
        assert torch.equal(
            matmul(common.normal(3, 0), common.normal(0, 5), common.poisoned(3, 5)), torch.zeros(3, 5).half()
        )


# ---------------------------------------------------------------------------------------------------------------------
# Questions and exercises


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_questions_have_answers(common: ModuleType, path: Path) -> None:
    questions = common.rung(int(path.name[:2])).QUESTIONS
    assert 2 <= len(questions) <= 3
    for question in questions:
        assert question.text.endswith("?")
        assert question.answer().endswith(".")


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_exercises_have_solutions(
    common: ModuleType, path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    module = common.rung(int(path.name[:2]))
    lines = path.read_text(encoding="utf-8").splitlines()
    assert len(module.EXERCISES) == 2
    for i, exercise in enumerate(module.EXERCISES, 1):
        assert exercise.stub.__doc__.startswith(f"Exercise {i}: ")
        with pytest.raises(SystemExit) as ended:
            module.main(["--exercise", str(i)])
        name = exercise.stub.__name__
        told = re.fullmatch(rf"Write `{name}` in \S*{path.name}:(\d+)\. Hint: .+", ended.value.code)
        assert told
        assert lines[int(told[1]) - 1].startswith(f"def {name}(")
        assert dataclasses.replace(exercise, stub=exercise.solution).review() is None
        # Who writes an exercise does not see its solution.
        assert exercise.solution.__code__.co_firstlineno > lines.index(ladder_results.SOLUTIONS)
    # As a reader does it: the stub is replaced.
    solved = tuple(dataclasses.replace(exercise, stub=exercise.solution) for exercise in module.EXERCISES)
    monkeypatch.setattr(module, "EXERCISES", solved)
    with pytest.raises(SystemExit) as ended:
        module.main(["--exercise", "2"])
    assert not ended.value.code
    assert "is right" in capsys.readouterr().out


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_wrong_answer_is_told_in_a_line(common: ModuleType, path: Path) -> None:
    def nothing(*_: object) -> None: ...

    def failing(*_: object) -> int:
        return 1 // 0

    for exercise in common.rung(int(path.name[:2])).EXERCISES:
        told = dataclasses.replace(exercise, stub=nothing).review()
        assert re.fullmatch(r"`nothing\(.*\)`: got None, wanted .+", told)
        told = dataclasses.replace(exercise, stub=failing).review()
        where = failing.__code__.co_firstlineno + 1
        assert re.fullmatch(
            rf"`failing\(.*\)` raises ZeroDivisionError in \S*{Path(__file__).name}:{where}: .+", told
        )


def test_a_wrong_answer_is_told_with_the_right_one(common: ModuleType) -> None:
    masked, _ = common.rung(1).EXERCISES
    told = dataclasses.replace(masked, stub=lambda n, block: n % block).review()
    assert told.endswith("(1, 1024)`: got 1, wanted 1023 (1 elements in blocks of 1024)")
    # A check that refuses the solution is the file's fault, and not the reader's.

    def check(answer: Callable[[int, int], int]) -> None:
        assert answer(1, 1024) == 0, "never"

    with pytest.raises(AssertionError, match="never"):
        dataclasses.replace(masked, stub=masked.solution, check=check).review()


@pytest.mark.slow
@pytest.mark.parametrize("number", [3, 5, 12])
def test_notebook_runs(tmp_path: Path, number: int) -> None:
    rung = next(rung for rung in rungs.rungs() if rung.number == number)
    cells = list(notebooks.cells(rung))
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    # Triton reads a kernel's source where it is defined.
    path = tmp_path / "notebook.py"
    path.write_text("\n\n\n".join(code) + "\n", encoding="utf-8")
    # The notebook itself turns the interpreter on.
    own = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, str(path)], capture_output=True, encoding="utf-8", check=False, env=own
    )
    assert not done.returncode, done.stderr
    assert f"Rung {number}: " in done.stdout
    # The exercises, which nobody has written yet.
    names = [stub.name for stub, _, _ in rung.tasks]
    assert re.findall(r"^Write `(\w+)` in .+ Hint: ", done.stdout, re.MULTILINE) == names


# ---------------------------------------------------------------------------------------------------------------------
# The protocol of rung 10


@given(
    m=st.integers(1, 300), n=st.integers(1, 40), k=st.integers(1, 60), width=st.integers(8, 22),
    turns=st.booleans(), programs=st.integers(1, 3), stages=st.integers(2, 5),
)  # fmt: skip
def test_warps_meet(
    common: ModuleType, m: int, n: int, k: int, width: int, turns: bool, programs: int, stages: int
) -> None:
    rung = common.rung(10)
    # Sums of small integers are exact.
    a, w = torch.randint(-3, 4, (m, 8 * k)).half(), torch.randint(-3, 4, (8 * n, 8 * k)).half()
    tile = rung.Tile(8 * width, turns)
    out = rung.emulated(a, w, common.poisoned(m, 8 * n), tile, programs=programs, stages=stages)
    assert torch.equal(out, a @ w.T)


@pytest.mark.parametrize("broken", ["full", "free"])
@pytest.mark.parametrize("turns", [True, False])
def test_a_barrier_that_lets_all_through_is_noticed(
    common: ModuleType, monkeypatch: pytest.MonkeyPatch, broken: str, turns: bool
) -> None:
    rung = common.rung(10)
    right, made = rung.Barrier.is_over, []
    stages = 3

    class Barrier(rung.Barrier):
        def __init__(self, count: int) -> None:
            super().__init__(count)
            made.append(self)

        def is_over(self, parity: int) -> bool:
            # They are made in this order: all of `full`, all of `free`, two turns.
            kind = made.index(self) % (2 * stages + 2) // stages
            return kind == ["full", "free"].index(broken) or right(self, parity)

    monkeypatch.setattr(rung, "Barrier", Barrier)
    a, w = common.normal(512, 512), common.normal(512, 512)
    for _ in range(5):
        try:
            out = rung.emulated(a, w, common.poisoned(512, 512), rung.Tile(128, turns), stages=stages)
        except RuntimeError:
            return  # a deadlock
        if not torch.allclose(out.float(), (a @ w.T).float(), atol=0.5, rtol=0.1):
            return
    pytest.fail("the result is right without the barrier")


def test_a_slot_that_is_filled_too_early_is_noticed(
    common: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With an odd number of parts, a tile begins with the slot that the one before has stored last."""
    rung = common.rung(10)
    right = rung.Stores.is_over
    monkeypatch.setattr(rung.Stores, "is_over", lambda self, newest: right(self, max(newest, 1)))
    a, w = common.normal(512, 64), common.normal(1024, 64)
    for _ in range(20):
        out = rung.emulated(a, w, common.poisoned(512, 1024), rung.Tile(136, False), programs=1)
        if not torch.allclose(out.float(), (a @ w.T).float(), atol=0.5, rtol=0.1):
            return
    pytest.fail("the result is right without the wait")


# ---------------------------------------------------------------------------------------------------------------------
# The order of rung 5

GRIDS = {"tiles_m": st.integers(1, 40), "tiles_n": st.integers(1, 40), "group": st.integers(1, 16)}


@given(**GRIDS)
def test_formula_is_swizzle2d(order: ModuleType, tiles_m: int, tiles_n: int, group: int) -> None:
    written = order.places(tiles_m, tiles_n, group, "written out")
    assert written == order.places(tiles_m, tiles_n, group, "tl.swizzle2d")


@given(**GRIDS)
def test_each_tile_exactly_once(order: ModuleType, tiles_m: int, tiles_n: int, group: int) -> None:
    written = order.places(tiles_m, tiles_n, group, "written out")
    assert sorted(written) == [(row, col) for row in range(tiles_m) for col in range(tiles_n)]


@given(**GRIDS)
def test_groups_are_walked_column_by_column(
    order: ModuleType, tiles_m: int, tiles_n: int, group: int
) -> None:
    expected = [
        (row, col)
        for first in range(0, tiles_m, group)
        for col in range(tiles_n)
        for row in range(first, min(first + group, tiles_m))
    ]
    assert order.places(tiles_m, tiles_n, group, "written out") == expected


@settings(max_examples=10)
@given(tiles_m=st.integers(1, 5), tiles_n=st.integers(1, 5), group=st.integers(1, 4))
def test_product_in_any_order(
    common: ModuleType, order: ModuleType, tiles_m: int, tiles_n: int, group: int
) -> None:
    m, n = tiles_m * order.TILE_M - 1, tiles_n * order.TILE_N - 1
    a, b = common.normal(m, 20), common.normal(20, n)
    results = [order.matmul(a, b, common.poisoned(m, n), name, group) for name in order.ORDERS]
    assert torch.equal(results[0], results[1])
    assert common.relative_error(results[0], a.double() @ b.double()) < 5e-4


def test_groups_touch_fewer_blocks(order: ModuleType) -> None:
    assert order.blocks_touched(8, 8, 1, 8) == 1 + 8
    assert order.blocks_touched(8, 8, 4, 8) == 4 + 2


# ---------------------------------------------------------------------------------------------------------------------
# The command


@pytest.mark.slow
def test_ladder_runs_a_rung_alone(
    common: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    written = tmp_path / "ladder.json"
    assert ladder.ladder([1], written) == 0
    (record,) = json.loads(written.read_text(encoding="utf-8"))
    assert record["number"] == 1
    out = capsys.readouterr().out
    assert "interpreter" in out
    assert "vector add with pointers" in " ".join(out.split())
    # As the file does by itself.
    for question in common.rung(1).QUESTIONS:
        assert question.text in out
        assert question.answer() in out


def test_ladder_without_such_a_rung(capsys: pytest.CaptureFixture[str]) -> None:
    assert ladder.ladder([3, 13]) == 2
    assert "no rung 13: there are 1 to 12" in capsys.readouterr().out


@pytest.mark.parametrize("only", [[], [1]])
def test_ladder_reports_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], only: list[int]
) -> None:
    broken = tmp_path / "01_broken.py"
    broken.write_text("print('so far')\nraise SystemExit('and no further')\n", encoding="utf-8")
    monkeypatch.setattr(ladder, "tutorial_files", lambda: {1: broken})
    assert ladder.ladder(only) == 1
    out = capsys.readouterr().out
    assert out.count("so far") == out.count("and no further") == 1


def test_gains() -> None:
    def row(role: str, shape: str, time_us: float | None, rate: float | None = 1.0) -> ladder.Row:
        return ladder.Row(role, role, shape, time_us, rate, "TFLOP/s", None)

    rows = [
        row("this", "checked", None),
        row("this", "a", 50.0),
        row("before", "a", 100.0),
        row("torch", "a", 40.0),
        row("other", "a", 1.0),
        row("this", "b", 10.0),
        row("torch", "b", 10.0),
        row("torch", "c", 10.0),
    ]
    a, b = ladder.gains(rows)
    assert (a.shape, a.time_us, a.over_before, a.over_torch, a.over_copy) == ("a", 50.0, 2.0, 0.8, None)
    assert (b.shape, b.over_before, b.over_torch) == ("b", None, 1.0)

    record = ladder.Record(4, "strides", "a GPU", False, "2", "3", 0, tuple(rows))
    cells = [list(column.cells) for column in ladder.timing_table([record]).columns]
    assert cells[0] == ["4 strides", "", ""]
    assert cells[4] == ["2.00x", "", "2.00x"]
    assert cells[5] == ["0.80x", "1.00x", "0.89x"]


def test_a_rung_is_a_program_of_its_own(tmp_path: Path) -> None:
    """From any directory, and with nothing said about the interpreter where there is no GPU."""
    done = subprocess.run(
        [sys.executable, "-B", str(FILES[7])],
        cwd=tmp_path,
        capture_output=True,
        encoding="utf-8",
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "Rung 8" in done.stdout
