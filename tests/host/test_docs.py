"""The pages of docs/, and what README shows: their code runs, and what they quote is what there is."""

import json
import re
from pathlib import Path

import pytest
import torch

import gemmery
import gemmery.nn
from benchmarks import quantization_error
from gemmery import epilogues, fused
from gemmery.dispatch import Options
from gemmery.epilogues import Untraceable, table
from gemmery.formats import FORMATS, from_codes
from gemmery.formats.checkpoints.torchao import READERS

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted((ROOT / "docs").glob("*.md"))
EPILOGUES = (ROOT / "docs" / "epilogues.md").read_text()
LOW_BIT = (ROOT / "docs" / "low-bit.md").read_text()


def blocks(path):
    """The python blocks of a page, compiled so that errors name the page and the line."""
    text = path.read_text()
    for found in re.finditer(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        first = text.count("\n", 0, found.start(1))
        yield first + 1, found[1], compile("\n" * first + found[1], str(path), "exec")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_code_of_pages_runs(page):
    names = {"__name__": page.stem}
    count = 0
    for _, _, code in blocks(page):
        exec(code, names)
        count += 1
    assert count > 0


README = {line: (text, code) for line, text, code in blocks(ROOT / "README.md")}
#: Those that are whole programs and need no GPU.
WHOLE = [
    line for line, (text, _) in README.items()
    if text.startswith("import torch, gemmery") and ('"cuda"' not in text or "is_available()" in text)
]  # fmt: skip


@pytest.mark.parametrize("line", WHOLE, ids=lambda line: f"line-{line}")
def test_code_of_readme_runs(line):
    exec(README[line][1], {"__name__": "readme"})


def test_code_of_readme_is_found():
    assert len(WHOLE) >= 3


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
    others = {"device_function"}  # which has a section of its own
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
    "alternating": lambda acc: acc[..., ::2],
    "control flow": lambda acc: acc if acc.max() > 0 else -acc,
    "sizes": lambda acc: acc / acc.shape[-1],
    "thirds": lambda acc: acc.chunk(3, -1)[0],
    "held": lambda acc: acc * HOLDER.tensor,
    "nothing": lambda acc: None,
}


@pytest.mark.parametrize("function", UNTRACEABLE.values(), ids=UNTRACEABLE)
def test_messages_of_tracing_are_quoted(function):
    call = fused.make_call(
        "matmul", X, WIDE, None, function, (), None, Options(None, "ieee", False, False, None)
    )
    with pytest.raises(Untraceable) as raised:
        fused.program(call)
    text = re.sub(rf"{re.escape(__file__)}:\d+", "FILE:LINE", str(raised.value))
    text = re.sub(r"Epilogues can use .*", "Epilogues can use ...", text)
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


# --- low-bit.md


def section(page, heading):
    return page.split(f"\n## {heading}\n")[1].split("\n## ")[0]


def test_errors_of_formats_are_those_of_the_file():
    result = json.loads(quantization_error.OUT.read_text())
    assert quantization_error.rewritten(LOW_BIT, quantization_error.table(result)) == LOW_BIT


def test_errors_were_measured_in_every_case():
    found = [
        {key: value for key, value in row.items() if key in ("format", "group_size", "symmetric", "scale")}
        for row in json.loads(quantization_error.OUT.read_text())["formats"]
    ]
    assert {row["format"] for row in found} == set(FORMATS)
    for row, (name, options) in zip(found, quantization_error.CASES, strict=True):
        assert row == row | {"format": name} | options


def test_what_is_said_not_to_work_does_not():
    text = words(LOW_BIT)
    for said, call, error in (
        ("`x @ q` and `torch.matmul` are not there", lambda: WEIGHT @ PACKED, NotImplementedError),
        ("`model.float()` raises an error", lambda: gemmery.nn.QuantizedLinear(PACKED).float(), ValueError),
        (
            "`x @ q` and `torch.matmul` are not there",
            lambda: torch.matmul(WEIGHT, PACKED),
            NotImplementedError,
        ),
    ):
        assert said in text
        with pytest.raises(error):
            call()
    assert PACKED.nbytes < PACKED.numel() * PACKED.element_size() / 3


def test_all_formats_are_listed():
    missing = [name for name in FORMATS if f"| `{name}` |" not in section(LOW_BIT, "Formats")]
    assert not missing


def test_all_of_torchaos_tensors_are_listed():
    missing = [name for name in READERS if f"`{name}`" not in section(LOW_BIT, "Checkpoints")]
    assert not missing


WEIGHT = torch.ones(64, 256, dtype=torch.bfloat16)
PACKED = gemmery.quantize(WEIGHT, "int4", group_size=64)
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
    "scaled": lambda: gemmery.scaled_matmul(gemmery.quantize_activations(WEIGHT), PACKED),
}


@pytest.mark.parametrize("call", WRONG.values(), ids=WRONG)
def test_messages_of_packed_weights_are_quoted(call):
    with pytest.raises((ValueError, TypeError)) as raised:
        call()
    kind = " (TypeError)" if isinstance(raised.value, TypeError) else " -"
    assert words(f"`{raised.value}`{kind}") in words(section(LOW_BIT, "Errors").replace("\n\n", " - "))
