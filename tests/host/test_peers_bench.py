"""The benchmarks of other libraries and of generation: their tables, and the functions that models are changed by."""

import json
import os
import sys

import pytest
import torch
from torch.nn import functional as F

from benchmarks import generation, parts, peers, peers_summary

RUN = {
    "gpu": "NVIDIA H200", "torch": "2.11.0", "triton": "3.6.0", "cuda": "13.0", "commit": "abc1234",
    "date": "2026-11-28T00:00:00+00:00", "protocol": {"rounds": 3},
}  # fmt: skip


def products():
    entry = {
        "kind": "int4 weights", "name": "int4 1×2×3", "times": {"gemmery": [1e-5, 2e-5, 4e-5], "slow": [2e-5, 3e-5, 4e-5]},
        "errors": {}, "left_out": {"none | here": "ImportError: no\nmodule"}, "peak_bytes": {"gemmery": 2**20, "slow": 3 * 2**19},
    }  # fmt: skip
    return RUN | {"part": "products", "libraries": {"slow": "1.2"}, "entries": [entry]}


def steps():
    times = {
        "bf16, torch.compile": [3e-3, 3e-3, 3e-3], "gemmery int4, torch.compile": [2e-3, 1.5e-3, 1e-3],
        "torchao int4, torch.compile": [1e-3, 1.5e-3, 2e-3], "bf16, qkv as one, torch.compile": [2e-3, 2e-3, 2e-3],
        "gemmery int4, int4 head, torch.compile": [1e-3, 1e-3, 1e-3],
    }  # fmt: skip
    entries = [{"name": f"M{batch}", "batch": batch, "times": times, "left_out": {}} for batch in (1, 16)]
    entries[1]["left_out"] = {"other": "not prepared in time"}
    return RUN | {"layers": 16, "entries": entries}


def test_ratios_are_of_a_round_and_losing_rows_stay():
    first, left, memory = peers_summary.lines([products()])
    assert first == ["int4 weights, 1×2×3", "slow", "**1.50** (1.00–2.00)", "20.0", "30.0"]
    assert left[1:3] == ["none | here", "left out"]
    assert left[-1] == "ImportError: no module"
    assert memory[2:] == ["**1.50**", "1 MiB", "2 MiB"]
    lines = {line[0]: line[1:] for line in peers_summary.step_lines(steps())}
    assert lines["gemmery int4, torch.compile"] == ["1500.0", "**2.00** (1.50–3.00)"] * 2
    assert lines["bf16, torch.compile"] == ["3000.0", ""] * 2


def test_the_fastest_are_compared():
    bars = peers_summary.bars(steps()).splitlines()
    assert bars[:5] == [
        "M1:",
        "",
        '- "bf16, qkv as one, torch.compile" takes **1.33** (1.00–2.00) times as long as "gemmery int4, torch.compile".',
        '- "torchao int4, torch.compile" takes **1.00** (0.50–2.00) times as long as "gemmery int4, torch.compile".',
        '- "bf16, qkv as one, torch.compile" takes **2.00** (2.00–2.00) times as long as "gemmery int4, int4 head, torch.compile".',
    ]
    assert bars[-1] == '- Missing: "other", not prepared in time.'


def test_the_page_is_written_from_files(tmp_path):
    for folder, data in (("peers", products()), ("generation", steps())):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "a.json").write_text(json.dumps(data))
    text = peers_summary.page(tmp_path)
    assert "| int4 weights, 1×2×3 | slow | **1.50** (1.00–2.00) | 20.0 | 30.0 |" in text
    assert "commit abc1234, 2026-11-28, 3 rounds; slow 1.2." in text
    (tmp_path / "peers" / "b.json").write_text("{}")
    with pytest.raises(ValueError, match=r"peers/b\.json is not a result of peers\.py"):
        peers_summary.read(tmp_path)


def test_a_part_is_written_after_each_entry(tmp_path, monkeypatch, capsys):
    def broken():
        yield {"name": "first", "times": {"gemmery": [1e-6, 3e-6, 2e-6], "slow": [5e-6, 5e-6]}}
        raise RuntimeError("out of time")

    monkeypatch.setattr(parts, "describe_run", lambda *_: dict.fromkeys(RUN, "x"))
    monkeypatch.setattr(sys, "argv", ["script", "--only", "a", "--out", str(tmp_path)])
    with pytest.raises(RuntimeError, match="out of time"):
        parts.run("about", {"a": broken, "b": broken}, tmp_path / "other", libraries={"slow": "1"})
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]
    found = json.loads((tmp_path / "a.json").read_text())
    assert (found["part"], found["protocol"], found["libraries"]) == ("a", {"rounds": 2}, {"slow": "1"})
    assert [entry["name"] for entry in found["entries"]] == ["first"]
    assert "'gemmery': '2.0'" in capsys.readouterr().out


def test_other_libraries_are_left_out_where_they_are_wrong_and_ours_is_not():
    wanted = torch.ones(3, dtype=torch.float64)

    def error_of(found):
        return peers.distance(wanted, found)

    makers = {
        "gemmery": lambda: lambda: wanted.float(),
        "wrong": lambda: lambda: wanted.float() * 1.5,
        "missing": lambda: __import__("no_such_library"),
    }
    calls, errors, left_out = peers.checked(makers, error_of, 1e-2)
    assert (list(calls), list(errors)) == (["gemmery"], ["gemmery"])
    assert left_out["wrong"] == "WrongResult: relative error 5.00e-01 is over 1e-02"
    assert left_out["missing"].startswith("ModuleNotFoundError")
    with pytest.raises(peers.WrongResult):
        peers.checked({"gemmery": makers["wrong"]}, error_of, 1e-2)


def test_the_loss_that_others_are_compared_with():
    x = torch.randn(10, 8, dtype=torch.float64, requires_grad=True)
    weight, target = (
        torch.randn(5, 8, dtype=torch.float64),
        torch.tensor([0, 4, -100, 2, 1, 3, -100, 0, 4, 2]),
    )
    loss = F.cross_entropy(x @ weight.T, target)
    (gradient,) = torch.autograd.grad(loss, x)
    torch.testing.assert_close(
        peers.right_step(x, weight, target, rows=4), (loss.detach().float(), gradient.float())
    )


def test_the_most_probable_token_is_the_first_of_the_largest():
    logits = torch.randn(3, 1, 4 * generation.PART)
    logits[1, 0, [700, 70]] = 9.0
    for each in (logits, logits[..., :-1], logits.bfloat16()):
        assert generation.most_probable(each).equal(each.argmax(-1))


@pytest.mark.parametrize("queries", [1, 5])
def test_attention_that_reads_keys_once(queries):
    q = torch.randn(2, 8, queries, 16)
    k, v = torch.randn(2, 2, 2, 12, 16).unbind()
    mask = torch.ones(2, 1, queries, 12, dtype=torch.bool).tril(12 - queries)
    found, _ = generation.grouped_attention(None, q, k, v, mask, 0.3)
    wanted = F.scaled_dot_product_attention(q, k, v, mask, scale=0.3, enable_gqa=True).transpose(1, 2)
    torch.testing.assert_close(found, wanted)


def test_a_model_with_q_k_and_v_as_one_computes_the_same():
    os.environ["HF_HUB_OFFLINE"] = "1"
    transformers = pytest.importorskip("transformers", minversion="5")
    torch.manual_seed(0)
    sizes = {
        "vocab_size": 50, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 16,
    }  # fmt: skip
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes)).bfloat16().eval()
    ids = torch.arange(3, 11)[None]
    with torch.no_grad():
        wanted = model(ids).logits
        generation.put_together(model)
        found = model(ids).logits
    assert all(isinstance(layer.self_attn.v_proj, generation.Columns) for layer in model.model.layers)
    torch.testing.assert_close(found, wanted, rtol=2e-2, atol=2e-2)
