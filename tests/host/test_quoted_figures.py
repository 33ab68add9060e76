"""Figures that README and docs/ quote in sentences: each is what the recorded results have."""

import json
import re
from pathlib import Path

import pytest

from benchmarks import grouped_summary, records
from docs.hooks import rungs
from gemmery.lab import ladder

ROOT = Path(__file__).resolve().parents[2]
RESULTS = records.read_results(records.RESULTS)
MODELS = {entry["name"]: entry for data in records.read_models(records.RESULTS) for entry in data["entries"]}


def result(suite, triton="3.6", dtype=None):
    """The result of a suite: bf16, or of rows with types of their own."""
    wanted = ("bf16", "mixed") if dtype is None else (dtype,)
    (found,) = [
        one
        for one in RESULTS
        if one["suite"] == suite
        and one["dtype"] in wanted
        and one["triton"].startswith(triton)
        and "drawn" not in one
    ]
    return found


def row(suite, name, regime="burst", **which):
    (found,) = [one for one in result(suite, **which)["rows"] if one["name"] == name]
    return found["summary"][regime]["ratio"]["cublas"]["median"]


def times(suite, name):
    """Microseconds by method."""
    (found,) = [one for one in result(suite)["rows"] if one["name"] == name]
    return found["summary"]["burst"]["us"]


def summary(suite, name=None):
    """The figures of a suite, or of a part of it, beside cuBLAS."""
    return dict(records.parts(result(suite)))[name or suite]["burst"]["cublas"]


def rows(suite):
    return {one["name"]: row(suite, one["name"]) for one in result(suite)["rows"]}


def beside(entry, method, base):
    """A method's time over that of another, the median over the rounds."""
    times = MODELS[entry]["times"]
    ratios = sorted(x / y for x, y in zip(times[method], times[base], strict=True))
    return ratios[len(ratios) // 2]


def held(method):
    return MODELS[GATED]["held_bytes"][method] / 2**20


def experts(some):
    """The speed of whole layers of experts over Hugging Face's, with the newest version of Triton."""
    kind = next(x for x in grouped_summary.KINDS if x.title.startswith(f"experts with routing, {some}"))
    newest = next(iter(grouped_summary.pooled(grouped_summary.read(records.RESULTS)).values()))
    return grouped_summary.figures(kind, newest).geomean


def costs(*names):
    return [100 * (beside("epilogues, 4096×14336×4096", name, "bare") - 1) for name in names]


GATED = "GatedMLP, forward and backward, M=8192"
LLAMA = "Llama of 1.2B, decoding 16 rows in a CUDA graph"
#: Page, sentence with a group for each figure, and what these have to be.
QUOTED = {
    "experts": (
        "README.md",
        r"([\d.]*\d) times as fast as Hugging Face's best path with 4096 tokens and more, and ([\d.]*\d) times with up to 256",
        lambda: tuple(experts(some) for some in ("T ≥ 4096", "T ≤ 256")),
    ),
    "invariance": (
        "README.md",
        r"on average \((\d+) products of known models, ratio ([\d.]*\d)\) and at worst (\d+) %, or (\d+) % in",
        lambda: (
            summary("invariant")["rows"], summary("invariant")["geomean"], 100 * (1 - summary("invariant")["worst"]),
            100 * (1 - summary("random_invariant")["worst"]),
        ),
    ),
    "invariance, on its page": (
        "docs/batch-invariance.md",
        r"([\d.]*\d) in the geometric mean of (\d+) products of known models and ([\d.]*\d) at worst, and ([\d.]*\d) at",
        lambda: (
            *(summary("invariant")[name] for name in ("geomean", "rows", "worst")), summary("random_invariant")["worst"],
        ),
    ),
    "memory": (
        "README.md",
        r"it holds (\d+) MiB, `torch.compile` (\d+) and eager torch (\d+), in the same time \(ratios ([\d.]*\d) and ([\d.]*\d)\)",
        lambda: (
            *map(held, ("gemmery", "compile", "eager")),
            *(beside(GATED, name, "gemmery") for name in ("compile", "eager")),
        ),
    ),
    "layouts": (
        "README.md",
        r"ratio is ([\d.]*\d) for odd sizes, ([\d.]*\d) for views of batches and ([\d.]*\d) for strided operands; the worst "
        r"of these is ([\d.]*\d)",
        lambda: (*(summary(name)["geomean"] for name in ("odd", "views", "strided")), summary("strided")["worst"]),
    ),
    "fp32 and tf32": (
        "README.md",
        r"TF32:\*\* ([\d.]*\d) of cuBLAS. `precision=\"tf32\"` reaches ([\d.]*\d) if b is stored as \(N, K\), else ([\d.]*\d)",
        lambda: tuple(row("dtypes", name) for name in ("fp32 4096", "tf32 4096", "tf32 NN 4096")),
    ),
    "tiny matrices": ("README.md", r"independent matrices: ([\d.]*\d) with 16384", lambda: (row("bmm", "16384 of 32"),)),
    "batches": (
        "README.md",
        r"([\d.]*\d) in the mean of (\d+)\.",
        lambda: (summary("bmm")["geomean"], summary("bmm")["rows"]),
    ),
    "a compiled model": (
        "README.md",
        r"a compiled Llama takes ([\d.]*\d) of the time of a swapped one, and a swapped and compiled one ([\d.]*\d)",
        lambda: tuple(beside(LLAMA, name, "gemmery") for name in ("compile", "gemmery compiled")),
    ),
    "shapes that nobody chose": (
        "docs/overview.md",
        r"with 512 to 8192 rows ([\d.]*\d) of its speed in the\s+geometric mean\. With 65 to 511 rows it is ([\d.]*\d), "
        r"but ([\d.]*\d) at the 10th percentile",
        lambda: (
            summary("random_prefill")["geomean"], summary("random_mid")["geomean"], summary("random_mid")["p10"],
        ),
    ),
    "fp32, by layout": (
        "docs/overview.md",
        r"reaches ([\d.]*\d) of cuBLAS where K is adjacent in b, as in a Linear's weight, and ([\d.]*\d) where",
        lambda: tuple(row("dtypes", name) for name in ("fp32 4096", "fp32 NN 4096")),
    ),
    "MXFP8": (
        "docs/low-bit/operands.md",
        r"takes ([\d.]*\d) times as long as cuBLAS .* at 16 rows, ([\d.]*\d) times at 128, and ([\d.]*\d) times with many",
        lambda: tuple(1 / row("scaled_mx", name) for name in ("mx 8192 M=16", "mx 8192 M=128", "mx 8192 M=1024")),
    ),
    "a slow shape": (
        "docs/recipes/slow-shape.md",
        r"4097 bf16\[row\].*gemmery, measured (\d+\.\d) .*cuBLAS, measured (\d+\.\d) .*gemmery, predicted",
        lambda: tuple(times("odd", "K odd")[name] for name in ("gemmery", "cublas")),
    ),
    "epilogues": (
        "docs/epilogues.md",
        r"GELU, SiLU, sigmoid and tanh (\d+) to (\d+) %, a residual (\d+) %, and `logsumexp` (\d+) %",
        lambda: (
            min(costs("gelu", "silu", "sigmoid", "tanh")), max(costs("gelu", "silu", "sigmoid", "tanh")),
            *costs("residual", "logsumexp"),
        ),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", QUOTED)
def test_what_a_page_quotes_is_what_was_measured(name):
    page, sentence, figures = QUOTED[name]
    text = " ".join((ROOT / page).read_text(encoding="utf-8").split())
    found = re.search(sentence, text)
    assert found, f"{page} has no such sentence any more"
    for quoted, measured in zip(found.groups(), figures(), strict=True):
        digits = len(quoted.partition(".")[2])
        assert float(quoted) == pytest.approx(measured, abs=0.5000001 * 10**-digits), (quoted, measured)


def test_mxfp8_is_slower_than_bf16_where_pages_say_so():
    ratios = rows("scaled_mx")
    assert [name for name, ratio in ratios.items() if ratio > 1] == ["mx 8192 M=16"]
    assert all(0.3 < ratio < 0.37 for name, ratio in ratios.items() if not name.endswith(("M=16", "M=128")))
    for page in ("README.md", "docs/overview.md", "docs/support.md", "docs/low-bit/operands.md"):
        text = " ".join((ROOT / page).read_text(encoding="utf-8").split())
        assert re.search(r"MXFP8[^.]*slower than bf16", text.replace("**", "")), page


# --- the ladder

#: Microseconds in the text about a rung's figures that are computed, by the rung; all others were measured.
COMPUTED = {1: {3}, 11: {8, 14}, 12: {18}}


def ladder_times():
    """For each rung the microseconds of its run and of all further measurements."""
    run, probes = rungs.recorded(), json.loads(rungs.PROBES.read_text(encoding="utf-8"))
    looks = [
        us for probe in probes.values() for shape in probe["shapes"].values() for us in shape["us"].values()
    ]
    return {
        number: [row.time_us for row in record.rows if row.time_us is not None] + looks
        for number, record in run.records.items()
    }


def ladder_ratios():
    """Speeds over torch of all rungs and methods, in each run that has both."""
    found = [
        ratio
        for record in rungs.recorded().records.values()
        for gain in ladder.gains(record.rows)
        for ratio in (gain.over_torch, gain.over_before)
        if ratio is not None
    ]
    probes = json.loads(rungs.PROBES.read_text(encoding="utf-8"))
    shapes = [shape["us"] for probe in probes.values() for shape in probe["shapes"].values()]
    shapes += [shape["us"] for shape in json.loads(rungs.SIZES.read_text(encoding="utf-8"))["sizes"].values()]
    return found + [us["torch"] / time for us in shapes for time in us.values() if "torch" in us]


@pytest.mark.parametrize("rung", rungs.rungs(), ids=lambda rung: rung.path.stem)
def test_times_and_ratios_of_a_rung_are_those_of_its_record(rung):
    text = rung.told.partition(rungs.LESSON)[2].replace("\n", " ")
    measured = {round(us) for us in ladder_times()[rung.number]}
    quoted = {int(us) for us in re.findall(r"(\d+) µs", text)}
    assert quoted <= measured | COMPUTED.get(rung.number, set())
    ratios = {f"{ratio:.2f}" for ratio in ladder_ratios()}
    compared = set(re.findall(r"(\d\.\d\d) of cuBLAS", text))
    assert compared <= ratios
    # Two rungs quote neither in this form.
    assert quoted or compared or rung.number in (4, 9), "nothing was found to compare"
