"""Users' files: whole or not at all, with errors that name them."""

import json
import os
import resource
import signal
import stat

import pytest
import torch

import gemmery
from gemmery import files
from gemmery.formats import load_safetensors, save_safetensors
from gemmery.formats.weight import PackedWeight
from gemmery.lab import figures, results


@pytest.fixture
def full():
    """A disk that has room for 4096 bytes of a file."""
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limit[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    signal.signal(signal.SIGXFSZ, handler)


def picture(path):
    with figures.figure(4, 4) as made:
        made.subplots().plot(range(2000), [n * 7919 % 1009 for n in range(2000)])
        figures.save(made, path)


def result(path):
    results.Result("square", "bf16", {"text": "x" * 9000}).save(path)


WRITERS = {
    "x.txt": lambda path: files.write_text(path, "x" * 9000),
    "x.json": lambda path: files.write_json(path, list(range(9000))),
    "x.safetensors": lambda path: save_safetensors(path, {"x": torch.ones(9000)}),
    "x.png": picture,
    "x.svg": picture,
    "result.json": result,
}


@pytest.mark.parametrize("name", WRITERS)
def test_a_full_disk_leaves_the_file_of_before(name, tmp_path, full):
    path = tmp_path / name
    path.write_text("before")
    with pytest.raises(files.WriteError, match=name):
        WRITERS[name](path)
    assert [file.name for file in tmp_path.iterdir()] == [name]
    assert path.read_text() == "before"


@pytest.mark.parametrize("name", WRITERS)
def test_a_file_is_replaced(name, tmp_path):
    path = tmp_path / name
    path.write_text("before")
    path.chmod(0o640)
    WRITERS[name](path)
    assert [file.name for file in tmp_path.iterdir()] == [name]
    assert path.stat().st_size > 4096
    assert stat.S_IMODE(path.stat().st_mode) == 0o640


def test_a_new_file_has_the_permissions_of_new_files(tmp_path):
    files.write_text(tmp_path / "ours", "")
    (tmp_path / "theirs").write_text("")
    assert (tmp_path / "ours").stat().st_mode == (tmp_path / "theirs").stat().st_mode


def test_a_link_goes_on_to_lead_to_its_file(tmp_path):
    (tmp_path / "link").symlink_to("file")
    for text in ("new", "newer"):
        files.write_text(tmp_path / "link", text)
        assert (tmp_path / "link").is_symlink()
        assert (tmp_path / "file").read_text() == text


def test_a_pipe_is_written_to(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    files.write_json(pipe, [1, 2])
    assert json.loads(os.read(reader, 100)) == [1, 2]
    os.close(reader)


@pytest.mark.parametrize("path, words", [
    ("absent/x.json", "there is no directory"), (".", "is a directory"), ("x.json", "no permission to write to .*"),
])  # fmt: skip
def test_what_can_not_be_written_is_told_before_the_work(path, words, tmp_path, monkeypatch):
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(files.WriteError, match=words):
        files.check_place(tmp_path / path)


def test_a_reason_keeps_its_number():
    with pytest.raises(files.WriteError, match="/dev/full can't be written: No space left") as error:
        files.write_text("/dev/full", "x")
    assert error.value.errno == 28


@pytest.mark.parametrize("view", [torch.conj, torch._neg_view, lambda x: torch._neg_view(x.conj())])
def test_what_a_view_does_to_numbers_is_saved_with_them(view, tmp_path):
    x = torch.randn(3, 4, dtype=torch.complex64)
    path = tmp_path / "x.safetensors"
    wanted = {"x": x, "seen": view(x), "imaginary": x.conj().imag}
    for names in (["seen"], ["imaginary"], list(wanted)):
        save_safetensors(path, {name: wanted[name] for name in names})
        found = load_safetensors(path)
        assert list(found) == sorted(names)
        for name in names:
            assert found[name].tolist() == wanted[name].tolist()


@pytest.mark.parametrize("text, words", [
    ("[" * 100_000, "nested too deeply"), ("9" * 5000, "digits"), ('["\\ud800"]', "surrogates"), (b"\xff", "codec"),
    ("{", "line 1"),
])  # fmt: skip
def test_what_is_no_json(text, words):
    with pytest.raises(ValueError, match=f"^x.json: not JSON: .*{words}"):
        files.parse_json(text, "x.json")


def test_swapped_arguments_of_save_safetensors(tmp_path):
    s = gemmery.sparsify(torch.ones(4, 4))
    with pytest.raises(
        TypeError, match=r"path is a dict and tensors a str; the order is save_safetensors\(path, ten"
    ):
        save_safetensors({"a": s}, str(tmp_path / "x.safetensors"))
    with pytest.raises(
        TypeError, match=r"save_safetensors: tensors\['a'\] is a float; .* all values tensors"
    ):
        save_safetensors(tmp_path / "x.safetensors", {"a": 1.0})


def test_files_find_a_weights_class_by_its_format():
    for weight in (gemmery.sparsify(torch.ones(4, 4)), gemmery.quantize(torch.ones(16, 16), "int8")):
        assert type(PackedWeight.from_tensors(*weight.to_tensors())) is type(weight)
    tensors, texts = weight.to_tensors()
    with pytest.raises(ValueError, match=r"from_tensors: format is '3:7'; it must be one of .*int8.* 2:4"):
        PackedWeight.from_tensors(tensors, texts | {"format": "3:7"})
