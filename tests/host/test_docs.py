"""The pages of docs/, and what README shows: their code runs, and what they quote is what there is."""

import ast
import functools
import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

import gemmery
import gemmery.nn
from benchmarks import quantization_error
from benchmarks.ladder_results import code_digest
from docs.hooks import chart, drawings, notebooks, repository, rungs, site
from gemmery import distributed, documentation, epilogues, formats
from gemmery.epilogues import Untraceable, table
from gemmery.formats import FORMATS, from_codes
from gemmery.formats.checkpoints.torchao import READERS
from gemmery.product.build import make_call
from gemmery.product.epilogue import program
from gemmery.product.spec import Functions, Options
from tests import pages

ROOT = Path(__file__).resolve().parents[2]
EPILOGUES = (ROOT / "docs" / "epilogues.md").read_text()
LOW_BIT, FORMATS_PAGE, CHECKPOINTS = (
    (ROOT / "docs" / name).read_text()
    for name in ("low-bit.md", "low-bit/formats.md", "low-bit/checkpoints.md")
)


@pytest.mark.parametrize("page", [page for page in pages.PAGES if not pages.is_interpreted(page)])
def test_code_of_pages_runs(page, tmp_path, monkeypatch):
    """Those for Triton's interpreter are read by tests/interpret/test_pages.py."""
    pages.Reader(tmp_path, monkeypatch).read(page)


ALL = [block for page in pages.PAGES for block in pages.blocks(page)]


def test_every_block_says_what_it_is():
    assert not [str(block) for block in ALL if block.language not in (*pages.RUN, *pages.SHOWN)]
    assert sum(block.language in pages.RUN for block in ALL) > 100
    # What only shows something is no program in disguise.
    assert not [
        str(block) for block in ALL if block.language in pages.SHOWN and "import gemmery" in block.text
    ]


def test_few_blocks_need_what_is_not_here():
    marked = [block for block in ALL if block.needs]
    assert {block.needs.split(maxsplit=1)[0] for block in marked} <= {"Needs", "Takes"}
    assert len(marked) <= 17, [f"{block} {block.needs}" for block in marked]
    for block in marked:
        if block.language == "python":
            names = pages.names_of(block.text)
            assert all(hasattr(gemmery, name) for name in names), f"{block}: {names}"


@pytest.mark.parametrize(
    ("wanted", "printed", "same"),
    [
        ("a  b\n", "a b", True),
        ("a ...\nb", "a x\ny\nb\n", True),
        ("a b", "a c", False),
        ("a", "a b", False),
        ("178.0 and 78%", "180.4  and 76%", True),
        ("178.0 and 78%", "140.4 and 78%", False),
        ("178.0 and 78%", "178.0 and 60%", False),
        ("... 64x64x32 4 -1.5", "k 64x64x32 4 -0.5", True),
        ("64x64x32 4", "64x64x32 5", False),
        ("sm_90 1.5", "sm_90 1.5 more", False),
    ],
)
def test_figures_of_commands_need_only_be_near(wanted, printed, same):
    assert pages.matches(wanted, printed) is same


def test_a_wrong_page_is_noticed(tmp_path, monkeypatch):
    """The reader's own instruments: each kind of block fails where it is wrong."""
    wrong = {
        "python": "assert False",
        "sh": "gemmery polish",
        "console": "$ gemmery --version\ngemmery 99\n",
        "sh ": "make nothing",
        "sh  ": "# Needs a GPU: to measure\ngemmery tune --polish",
    }
    for number, (language, text) in enumerate(wrong.items()):
        (tmp_path / str(number)).mkdir()
        page = tmp_path / "page.md"
        page.write_text(f"```{language.strip()}\n{text}\n```\n")
        with pytest.raises((AssertionError, subprocess.CalledProcessError)):
            pages.Reader(tmp_path / str(number), monkeypatch).read(str(page))


# --- README


def test_readme_is_short():
    assert len((ROOT / "README.md").read_bytes()) <= 8192


def test_links_of_readme_lead_to_files():
    """The site does not have this page, so that its strict build does not check them."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    found = re.findall(r"\]\(([^)#\s]+)(?:#([^)\s]+))?\)", text)
    assert len(found) > 10
    for path, anchor in found:
        assert (ROOT / path).is_file(), path
        headings = (
            re.findall(r"^#+ (.+)$", (ROOT / path).read_text(encoding="utf-8"), re.MULTILINE)
            if anchor
            else []
        )
        assert not anchor or anchor in {heading.lower().replace(" ", "-") for heading in headings}


# --- the site


def test_pages_of_the_repository_are_found_and_their_links_led_on():
    for name in repository.WHOLE:
        assert repository.page(name).startswith("# ")
    lead = functools.partial(repository.moved, source="docs/recipes/x.md", page="recipes/x.md")
    assert (
        lead("[a](../../CONTRIBUTING.md) [b](../tuning.md#x)")
        == "[a](../contributing.md) [b](../tuning.md#x)"
    )
    assert lead("[c](../../tutorials/05_matmul_grouped.py)") == "[c](../ladder/05.md)"
    assert lead("[d](https://x.org/y.md) [e](#here)") == "[d](https://x.org/y.md) [e](#here)"
    with pytest.raises(ValueError, match=r"no page for src/gemmery/api\.py"):
        lead("[f](../../src/gemmery/api.py)")


def test_what_a_page_would_fetch_is_noticed():
    fetched = [
        '<script src="https://x.org/a.js">',
        "<link rel=stylesheet href=//x.org/a.css>",
        "url(https://x.org/f)",
    ]
    assert all(repository.FETCHED.search(text) for text in fetched)
    assert not repository.FETCHED.search('<a href="https://x.org/"> <script src="../a.js"> <img src="a.png">')


def test_every_page_says_where_its_text_is_written():
    for name, source in (
        ("low-bit/models.md", "docs/low-bit/models.md"),
        ("contributing.md", "CONTRIBUTING.md"),
        ("ladder/05.md", "tutorials/05_matmul_grouped.py"),
        ("ladder/index.md", None),
    ):
        assert repository.source(name) == source
        assert source is None or (ROOT / source).is_file()


def test_the_chart_of_the_first_page_has_all_rows_of_readme():
    rows = chart.ratios((ROOT / "README.md").read_text())
    assert len(rows) > 10
    assert all(row.worst <= row.mean for row in rows)
    drawn = chart.results()
    assert all(f">{row.mean:.2f}<" in drawn for row in rows)
    newest = "<!-- results:begin -->\n| a, against b | **1.20** · 1.10 · 0.90 | **0.80** · 0.70 · 0.60 | 3 |\n<!-- results:end -->"
    assert chart.ratios(newest) == [chart.Ratio("a (b)", 1.2, 0.9)]


def test_all_public_names_are_in_the_reference():
    text = "\n".join((ROOT / page).read_text() for page in pages.PAGES if page.startswith("docs/api/"))
    shown = set(re.findall(r"^::: ([\w.]+)$", text, re.MULTILINE))
    own = {name.rsplit(".", 1)[1] for name in shown}
    public = {
        *gemmery.__all__,
        *gemmery.nn.__all__,
        *gemmery.moe.__all__,
        *distributed.__all__,
        *epilogues.__all__,
        *formats.__all__,
    }
    public -= {"nn", "moe"}
    assert not public - own


def words(text):
    return " ".join(text.split())


@pytest.mark.parametrize(
    "group", ["ARITHMETIC", "FLOATING", "LOGICAL", "BOOLEAN", "VIEWS", "CONSTANTS", "REDUCTIONS"]
)
def test_all_operators_are_listed(group):
    section = EPILOGUES.split("## What can be traced")[1].split("\n## ")[0]
    missing = [name for name in getattr(table, group) if f"`{name}`" not in section]
    assert not missing


def test_all_ready_made_ones_are_listed():
    section = EPILOGUES.split("### 8.")[1].split("\n### ")[0]
    others = {"device_function", "check"}  # which have sections of their own
    missing = [n for n in epilogues.__all__ if n[0].islower() and n not in others and f"`{n}`" not in section]
    assert not missing


X, W, WIDE = torch.ones(8, 16), torch.ones(16, 12), torch.ones(16, 300)


class Holder:
    tensor = torch.ones(300)


HOLDER = Holder()

UNTRACEABLE = {
    "unknown": lambda acc: acc.cumsum(-1),
    "row again": lambda acc: acc * torch.rsqrt(acc.sum(-1, keepdim=True)),
    "columns": lambda acc: acc.sum(0),
    "indexing": lambda acc: acc[:, 0],
    "alternating": lambda acc: acc[..., ::2],
    "control flow": lambda acc: acc if acc.max() > 0 else -acc,
    "random": lambda acc: torch.nn.functional.dropout(acc, 0.5),
    "sizes": lambda acc: acc / acc.shape[-1],
    "thirds": lambda acc: acc.chunk(3, -1)[0],
    "held": lambda acc: acc * HOLDER.tensor,
    "nothing": lambda acc: None,
}


@pytest.mark.parametrize("function", UNTRACEABLE.values(), ids=UNTRACEABLE)
def test_messages_of_tracing_are_quoted(function):
    call = make_call("matmul", X, WIDE, None, Functions(function), Options())
    with pytest.raises(Untraceable) as raised:
        program(call)
    text = re.sub(rf"{re.escape(__file__)}:\d+", "FILE:LINE", str(raised.value))
    text = text.replace(documentation.page("epilogues", "what-can-be-traced"), "docs/epilogues.md")
    assert words(text) in words(EPILOGUES)


OUT = torch.empty(8, 12)
CALLS = {
    "shape": dict(epilogue=epilogues.bias, args=(torch.ones(7),)),
    "vector": dict(a=X[0], epilogue=epilogues.relu),
    "args": dict(epilogue=epilogues.bias, args=torch.ones(12)),
    "no epilogue": dict(args=(1,)),
    "no function": dict(epilogue="gelu"),
    "out of two": dict(epilogue=epilogues.logsumexp, out=OUT),
    "shape of out": dict(epilogue=epilogues.swiglu, out=OUT),
    "out is read": dict(epilogue=epilogues.residual, args=(OUT,), out=OUT),
    "out and gradients": dict(a=X.clone().requires_grad_(), epilogue=epilogues.relu, out=OUT),
    "types": dict(epilogue=epilogues.relu, out_dtype=(torch.float32, torch.float16)),
    "arguments of a composition": dict(
        epilogue=epilogues.compose(epilogues.bias, epilogues.relu, epilogues.residual), args=(torch.ones(12),)
    ),
}


@pytest.mark.parametrize("arguments", CALLS.values(), ids=CALLS)
def test_messages_of_calls_are_quoted(arguments):
    with pytest.raises((ValueError, TypeError)) as raised:
        gemmery.matmul(**{"a": X, "b": W, **arguments})
    kind = " (TypeError)" if isinstance(raised.value, TypeError) else "\n"
    # At the end of a line, or with the kind that it is.
    assert f"`{raised.value}`{kind}" in EPILOGUES


# --- sparse.md


SPARSE = (ROOT / "docs" / "sparse.md").read_text()


@pytest.mark.parametrize(
    "call",
    [
        lambda: gemmery.sparsify(torch.ones(64, 255)),
        lambda: gemmery.sparsify(torch.ones(64, 256), method="as_is"),
        lambda: gemmery.nn.SparseLinear(8, 6, method="transposable"),
        lambda: gemmery.nn.PrunedLinear(PACKED),
        lambda: gemmery.scaled_matmul(ROWS, gemmery.quantize(gemmery.sparsify(WEIGHT), "int4")),
        lambda: gemmery.scaled_matmul(
            gemmery.quantize_activations(WEIGHT, per="mx"),
            gemmery.quantize(gemmery.sparsify(WEIGHT), "e4m3"),
        ),
        lambda: gemmery.matmul(ROWS, gemmery.quantize(gemmery.sparsify(WEIGHT), "e4m3")),
        lambda: gemmery.linear(ROWS.data, gemmery.quantize(gemmery.sparsify(WEIGHT), "e4m3")),
        lambda: gemmery.scaled_matmul(WEIGHT, gemmery.quantize(gemmery.sparsify(WEIGHT), "e4m3")),
        lambda: gemmery.addmm(WEIGHT, WEIGHT, gemmery.sparsify(WEIGHT)),
        lambda: gemmery.sparsify(WEIGHT.to_sparse()),
    ],
)
def test_messages_of_sparse_weights_are_quoted(call):
    with pytest.raises((ValueError, TypeError)) as raised:
        call()
    kind = " (TypeError)" if isinstance(raised.value, TypeError) else " -"
    assert words(f"`{raised.value}`{kind}") in words(section(SPARSE, "Errors").replace("\n\n", " - "))


def test_what_sparse_weights_are_said_to_lack_is_not_there():
    """Whoever adds one of these takes it from the page."""
    lacks = words(section(SPARSE, "Limitations"))
    s, x = gemmery.sparsify(torch.ones(3, 64, 64)), torch.ones(4, 64, dtype=torch.bfloat16)
    for said, call, error in (
        ("other patterns than 2:4", lambda: gemmery.sparsify(torch.ones(4, 8), "1:2"), ValueError),
        ("two sparse weights as a pair of halves",
         lambda: gemmery.linear(x, (s[0], s[1]), epilogue=epilogues.swiglu), TypeError),
    ):  # fmt: skip
        assert said in lacks
        with pytest.raises(error):
            call()


# --- low-bit.md


def section(page, heading):
    return page.split(f"\n## {heading}\n")[1].split("\n## ")[0]


def test_errors_of_formats_are_those_of_the_file():
    result = json.loads(quantization_error.OUT.read_text())
    assert quantization_error.rewritten(FORMATS_PAGE, quantization_error.table(result)) == FORMATS_PAGE


def test_errors_were_measured_in_every_case():
    found = [
        {key: value for key, value in row.items() if key in ("format", "group_size", "symmetric", "scale")}
        for row in json.loads(quantization_error.OUT.read_text())["formats"]
    ]
    assert {row["format"] for row in found} == set(FORMATS)
    for row, (name, options) in zip(found, quantization_error.CASES, strict=True):
        assert row == row | {"format": name} | options


def test_what_is_said_not_to_work_does_not():
    operators = "`x @ q` and `torch.matmul` raise an error"
    for page, said, call, error in (
        ("low-bit.md", operators, lambda: WEIGHT @ PACKED, NotImplementedError),
        ("low-bit.md", operators, lambda: torch.matmul(WEIGHT, PACKED), NotImplementedError),
        ("low-bit/models.md", "`model.float()` raises an error",
         lambda: gemmery.nn.QuantizedLinear(PACKED).float(), ValueError),
    ):  # fmt: skip
        assert said in words((ROOT / "docs" / page).read_text())
        with pytest.raises(error):
            call()
    assert PACKED.nbytes < PACKED.numel() * PACKED.element_size() / 3


def test_all_formats_are_listed():
    missing = [name for name in FORMATS if f"| `{name}` |" not in section(FORMATS_PAGE, "Formats")]
    assert not missing


def test_all_of_torchaos_tensors_are_listed():
    missing = [name for name in READERS if f"`{name}`" not in section(CHECKPOINTS, "Read a checkpoint")]
    assert not missing


WEIGHT = torch.ones(64, 256, dtype=torch.bfloat16)
PACKED = gemmery.quantize(WEIGHT, "int4", group_size=64)
ROWS = gemmery.quantize_activations(WEIGHT)
CODES, ONES = torch.zeros(64, 256, dtype=torch.uint8), torch.ones(64, 4)
WRONG = {
    "format": lambda: gemmery.quantize(WEIGHT, "int3"),
    "group size": lambda: gemmery.quantize(WEIGHT, "int4", group_size=48),
    "no groups": lambda: gemmery.quantize(WEIGHT, "int8", symmetric=False),
    "NaN": lambda: gemmery.quantize(WEIGHT * float("nan"), "int4"),
    "another type": lambda: gemmery.linear(WEIGHT.float(), PACKED),
    "halves": lambda: gemmery.linear(WEIGHT, (PACKED, PACKED), epilogue=epilogues.swiglu),
    "batch": lambda: gemmery.linear(WEIGHT, gemmery.quantize(torch.ones(3, 64, 256), "int4")),
    "out and gradients": lambda: gemmery.linear(
        WEIGHT.clone().requires_grad_(), PACKED, out=torch.empty(64, 64, dtype=torch.bfloat16)
    ),
    "groups": lambda: from_codes(CODES[:, :48], "int4", scales=ONES[:, :2]),
    "no scales": lambda: from_codes(CODES, "int4", zeros=ONES),
    "zeros and offsets": lambda: from_codes(CODES, "int4", scales=ONES, zeros=ONES, offsets=ONES),
    "wide scales and offsets": lambda: from_codes(CODES, "int4", scales=ONES, offsets=ONES),
    "addmm": lambda: gemmery.addmm(WEIGHT, WEIGHT, PACKED),
    "shard": lambda: PACKED.shard(-1, 0, 3),
    "scaled": lambda: gemmery.scaled_matmul(ROWS, PACKED),
}


@pytest.mark.parametrize("call", WRONG.values(), ids=WRONG)
def test_messages_of_packed_weights_are_quoted(call):
    with pytest.raises((ValueError, TypeError)) as raised:
        call()
    kind = " (TypeError)" if isinstance(raised.value, TypeError) else " -"
    assert words(f"`{raised.value}`{kind}") in words(section(LOW_BIT, "Errors").replace("\n\n", " - "))


# --- output of commands


def test_the_style_sheet_is_told_how_long_the_lines_of_output_are():
    page = '<div class="language-console highlight"><pre><span></span><code>$ <b>a</b>\n&lt;12345&gt;\n</code></pre></div>'
    assert site.on_page_content(page).startswith(
        '<div class="language-console highlight" style="--columns: 7">'
    )
    code = page.replace("console", "python")
    assert site.on_page_content(code) == code
    assert "var(--columns" in (site.ROOT / "docs" / "assets" / "extra.css").read_text(encoding="utf-8")


# --- the ladder


@pytest.mark.slow
def test_a_rung_that_was_not_measured_says_so():
    (*_, last) = rungs.rungs()
    run = rungs.recorded()
    without = rungs.Recorded(run.header, {n: x for n, x in run.records.items() if n != last.number})
    assert f"## Gain\n\n{rungs.MISSING}." in rungs.page(last, without)
    assert f"({rungs.place(last)}) | {rungs.MISSING.lower()} |" in rungs.overview(without)
    assert f"({rungs.place(last)})" in rungs.overview(run)


@pytest.mark.slow
@pytest.mark.sampled(5)
@pytest.mark.parametrize("rung", rungs.rungs(), ids=lambda rung: rung.path.stem)
def test_a_rung_asks_and_explains(rung):
    questions = rungs.asked()[rung.number]
    assert len(questions) in (2, 3)
    assert len(rung.exercises) == 2
    page = rungs.page(rung, rungs.recorded())
    for text, answer in questions:
        assert rungs._linked(text) in page
        assert rungs._linked(answer) in page
    for text, stub, solution in rung.exercises:
        assert text
        assert stub in page
        assert solution in page
    # The kernel's code is without them.
    kernel = rung.code("kernel")
    assert "solved_" not in kernel
    assert "Question(" not in kernel
    assert "bench_products(" not in kernel
    # Whatever has a measurement says why it is what it is.
    assert not rung.lesson or rung.lesson in page


@pytest.mark.parametrize("rung", rungs.rungs(), ids=lambda rung: rung.path.stem)
def test_each_table_of_a_rung_names_its_protocol(rung):
    run = rungs.recorded()
    (*_, said) = rungs.gained(rung, run)
    assert rungs.PROTOCOL in said
    assert (rungs.HOST in said) == any(
        row.rate is None for row in run.records[rung.number].rows if row.time_us
    )
    for look in rungs.looks(rung.number):
        assert (rungs.PROTOCOL in look) != (rungs.BURST in look)


def test_the_ladders_first_page_says_how_far_its_runs_are_apart():
    page, run = rungs.overview(rungs.recorded()), rungs.recorded()
    times = [
        row.time_us
        for record in run.records.values()
        for row in record.rows
        if row.name == "torch" and row.shape == "8192x8192x8192" and row.time_us
    ]
    assert f"takes {min(times):.0f} to {max(times):.0f} µs in {len(times)} of them" in page
    assert rungs.PROTOCOL in page
    assert rungs.BURST in page


@pytest.mark.parametrize("rung", rungs.rungs(), ids=lambda rung: rung.path.stem)
def test_a_notebook_has_all_of_a_rung(rung):
    cells = notebooks.notebook(rung)["cells"]
    code = "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")
    for node in rung.tree.body[1:]:
        text = ast.get_source_segment(rung.text, node)
        assert text in code or "__main__" in text
    assert len({cell["id"] for cell in cells}) == len(cells)
    assert not any("```" in "".join(cell["source"]) for cell in cells)


def test_what_rungs_printed_is_of_their_present_code():
    stored = {each["number"]: each for each in json.loads(rungs.PRINTED.read_text(encoding="utf-8"))["rungs"]}
    old = stored.keys() - rungs.printed().keys()
    assert not old, (
        f"rungs {sorted(old)}: run benchmarks/ladder.py again, or take their output from {rungs.PRINTED.name}"
    )
    assert stored, "no rung's output is kept"
    for rung in rungs.rungs():
        cells = notebooks.notebook(rung)["cells"]
        said = [
            "".join(line for out in cell["outputs"] for line in out["text"])
            for cell in cells
            if "outputs" in cell
        ]
        assert (stored[rung.number]["text"] in said) if rung.number in stored else not said[-3]
        assert rung.number not in stored or f"Rung {rung.number}: " in stored[rung.number]["text"]


def test_the_digest_of_a_rung_follows_its_code(tmp_path):
    folder = tmp_path / "tutorials"
    shutil.copytree(ROOT / "tutorials", folder)

    def changed(number, old, new, of=3):
        """Whether the digest of a rung is another one when a file (0: what all rungs share) is changed."""
        (file,) = folder.glob(f"{number:02}_*.py") if number else [folder / "_common.py"]
        (rung,) = folder.glob(f"{of:02}_*.py")
        text, before = file.read_text(encoding="utf-8"), code_digest(rung)
        assert text.count(old) == 1
        file.write_text(text.replace(old, new), encoding="utf-8")
        after = code_digest(rung)
        file.write_text(text, encoding="utf-8")
        return after != before

    assert not changed(3, "Why tiles?", "Why tiles at all?")
    assert not changed(3, "# .T moves no data", "# .T does not move data")
    assert not changed(3, "by `gemmery predict`?", "according to `gemmery predict`?")
    assert not changed(3, "return 2 * block_m * block_n /", "return block_m * block_n * 2 /")
    assert changed(3, "acc = tl.dot(a.load([row, k])", "acc = tl.dot(w.load([row, k])")
    assert changed(3, "((4096, 4096, 4096), (8192, 8192, 8192))", "((4096, 4096, 4096),)")
    # What it prints of another rung is that one's, too; and all share how they measure.
    assert changed(3, "acc = tl.dot(a.load([row, k])", "acc = tl.dot(w.load([row, k])", of=5)
    assert changed(0, "ROUNDS = 5", "ROUNDS = 7")
    assert not changed(0, "Predict before you read on", "Think before you read on")


def test_pictures_of_fragments_are_drawn_by_the_rungs_functions():
    in_a, in_codes = drawings.functions(12, "place_in_a", "place_in_codes")
    assert (in_a(5, 3, 1), in_codes(6, 4)) == ((9, 11), (9, 8))
    page = rungs.page(rungs.rungs()[-1], rungs.recorded())
    assert page.count('<figure class="drawing">') == 2
    assert "row 9, columns 32 to 35" in page
    # Each lane has four registers of A, of B and of D.
    drawn = drawings.svg(drawings.fragments(), "")
    assert {drawn.count(f">{lane}</text>") for lane in range(32)} == {12}


# --- recipes


def test_the_prose_of_a_slow_shape_has_the_numbers_of_its_output():
    page = words((ROOT / "docs" / "recipes" / "slow-shape.md").read_text())
    shown = re.findall(r"gemmery, (measured|predicted) ([\d.]+) [\d.]+ (\d+)%", page)
    (first, first_share), (first_said, _), (slow, slow_share), (slow_said, _) = [
        (float(us), int(share)) for _, us, share in shown[:4]
    ]
    assert f"takes {slow / first:.2f} times as long" in page
    assert f"it reaches {slow_share} % of the roofline, and its neighbor {first_share} %" in page
    off = [abs(said / took - 1) * 100 for said, took in ((first_said, first), (slow_said, slow))]
    assert f"The predictions are off by {off[0]:.0f} % and {off[1]:.0f} %" in page
    low, high = re.findall(r"rounds: ([\d.]+) to ([\d.]+) µs", page)[0]
    assert f"near {float(low):.0f} µs and near {float(high):.0f} µs" in page
    assert f"`copies {re.findall(r', copies ([0-9.]+),', page)[0]}`" in page
