"""Damaged files: what is read from one is right or refused with a ValueError, and products go on without a store."""

import copy
import json
import struct
import tempfile
import warnings
from pathlib import Path

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from gemmery import Config, quantize, sparsify
from gemmery.formats import (
    QuantizedTensor,
    SparseTensor,
    from_codes,
    load_safetensors,
    read_weight,
    save_safetensors,
)
from gemmery.lab.tuning import read_weights
from gemmery.select import exchange, log, rank, store
from gemmery.select.store import Store
from tests.problems import make

safetensors = pytest.importorskip("safetensors")
CHECKPOINTS = Path(__file__).resolve().parents[1] / "data" / "checkpoints"
#: What is put in the place of a JSON value.
ODD = (
    None, True, 0, -1, 1.5, 10**400, 1e400, float("nan"), "", "x", "4", "\ud800", "null", "[" * 2000, [], {}, [None], [[]],
    [-1], [2.0], [10**30], {"": None},
)  # fmt: skip


def folder():
    """A new directory, which fixtures of pytest would make once for all examples of a test."""
    return tempfile.TemporaryDirectory()


def attempt(file, read):
    """What a call gives; None where it refuses a file with an error that names it."""
    try:
        return read()
    except ValueError as error:
        if file not in str(error):
            raise
        return None


@st.composite
def damage(draw, size):
    """What can happen to `size` bytes, as a function of them."""
    kind = draw(st.sampled_from(["flip", "set", "fill", "cut", "drop", "repeat"]))
    at = draw(st.integers(0, size - 1))
    length = draw(st.integers(1, 64))
    value = draw(st.integers(0, 255))

    def apply(good):
        data = bytearray(good)
        if kind == "flip":
            data[at] ^= 1 << value % 8
        elif kind == "set":
            data[at] = value
        elif kind == "fill":
            data[at : at + length] = bytes([value]) * len(data[at : at + length])
        elif kind == "cut":
            del data[at:]
        elif kind == "drop":
            del data[at : at + length]
        else:
            data[at:at] = data[at : at + length]
        return bytes(data)

    return apply


def places(value, path=()):
    """The place of everything within a JSON value."""
    yield path
    children = (
        value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    )
    for name, child in children:
        yield from places(child, (*path, name))


@st.composite
def altered(draw, good):
    """A JSON value of which one part is missing, another one or under another name."""
    if draw(st.integers(0, 9)) == 0:
        return draw(st.sampled_from(ODD))
    value = copy.deepcopy(good)
    *front, last = draw(st.sampled_from([path for path in places(good) if path]))
    inner = value
    for name in front:
        inner = inner[name]
    kind = draw(st.sampled_from(["other", "other", "missing", "renamed"]))
    if kind == "other":
        inner[last] = draw(st.sampled_from(ODD))
    elif kind == "renamed" and isinstance(inner, dict):
        inner[draw(st.sampled_from(["", "x", "version", "M"]))] = inner.pop(last)
    else:
        del inner[last]
    return value


# --- the store -------------------------------------------------------------------------------------------------------

CONFIGS = [Config(64, 64, 64), Config(32, 32, 32), Config(128, 128, 64)]
PROBLEMS = [make(M=m) for m in (64, 65, 96, 128)]


def filled():
    """The bytes of a store with some timings."""
    with folder() as place:
        path = Path(place) / store.FILE
        for p in PROBLEMS:
            for number, config in enumerate(CONFIGS):
                Store(path).record(
                    p, config, None if number == 2 else 1e-3 * (number + 1), "does not fit" * (number == 2)
                )
        return path.read_bytes()


STORE = filled()


@given(damage(len(STORE)), st.booleans())
def test_a_damaged_store_is_used_or_begun_anew(apply, reads_first):
    with folder() as place, warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        path = Path(place) / store.FILE
        path.write_bytes(apply(STORE))
        kept, p = Store(path), PROBLEMS[1]
        if reads_first:
            assert all(isinstance(config, Config) for config in kept.timings(p))
            assert rank(p)
            kept.rows()
        kept.record(p, CONFIGS[1], 1e-9, "new")
        again = Store(path)
        timing = again.timings(p)[CONFIGS[1]]
        assert (timing.seconds, timing.note) == (1e-9, "new")
        assert again.best(p) == CONFIGS[1]
        again.rows()
    for one in said:
        assert issubclass(one.category, RuntimeWarning)
        assert "is broken (" in str(one.message)


# --- JSON ------------------------------------------------------------------------------------------------------------


def exported():
    """The text of a store's timings as JSON."""
    with folder() as place:
        path, kept = Path(place) / "timings.json", Store(Path(place) / store.FILE)
        for p in (make(batch=(2,), bias=True), make(M=7)):
            kept.record(p, CONFIGS[0], 1e-3)
            kept.record(p, CONFIGS[2], None, "does not fit")
        exchange.export_json(path, kept)
        return path.read_bytes()


JSON = exported()
WEIGHTS = [{"name": "qkv", "N": 6144, "K": 4096, "bias": True, "dtype": "fp16"}, {"N": 64, "K": 32}]


def check_import(data):
    """Of a file of timings: all is taken and found, or nothing is and the error names the file."""
    with folder() as place:
        path, kept = Path(place) / "timings.json", Store(Path(place) / store.FILE)
        path.write_bytes(data)
        count = attempt(str(path), lambda: exchange.import_json(path, kept))
        assert len(kept.rows()) <= (count or 0)
        again = Path(place) / "again.json"
        exchange.export_json(again, kept)
        other = Store(Path(place) / "other.sqlite")
        exchange.import_json(again, other)
        assert other.rows() == kept.rows()


@given(damage(len(JSON)))
def test_damaged_bytes_of_exported_timings(apply):
    check_import(apply(JSON))


@given(altered(json.loads(JSON)))
def test_other_values_in_exported_timings(values):
    check_import(json.dumps(values).encode())


def problem_line():
    return json.loads(JSON)["sets"][0]["problems"][0]


@given(altered({"problem": problem_line()["problem"], "device": "a GPU"}))
def test_other_values_in_a_log(values):
    with folder() as place:
        path = Path(place) / "log.jsonl"
        path.write_text(json.dumps(values) + "\n")
        problems = attempt(f"{path}, line 1", lambda: log.read(path, make().device))
    assert problems is None or len(problems) == 1


@given(altered(WEIGHTS))
def test_other_values_in_a_file_of_weights(values):
    with folder() as place:
        path = Path(place) / "weights.json"
        path.write_text(json.dumps(values))
        weights = attempt(str(path), lambda: read_weights(path))
    assert weights is None or len(weights) == len(values)


# --- safetensors -----------------------------------------------------------------------------------------------------


def saved():
    """A file with plain and quantised tensors, some of them under two names, and what is in it."""
    torch.manual_seed(0)
    plain, weight = torch.randn(4, 6), torch.randn(32, 64)
    order = torch.randperm(64)
    codes = torch.randint(0, 16, (16, 64), dtype=torch.uint8)
    tensors = {
        "plain": plain, "tied": plain, "int4": quantize(weight, "int4", group_size=32), "nf4": quantize(weight, "nf4"),
        "ordered": from_codes(codes, "int4", scales=torch.ones(16, 2), permutation=order), "sparse": sparsify(weight),
    }  # fmt: skip
    with folder() as place:
        path = Path(place) / "w.safetensors"
        save_safetensors(path, tensors)
        return path.read_bytes(), tensors


FILE, TENSORS = saved()
HEAD = struct.unpack("<Q", FILE[:8])[0]
HEADER = json.loads(FILE[8 : 8 + HEAD])


def loaded(data):
    """The tensors of a file, or None where it was refused with an error that names it."""
    with folder() as place:
        path = Path(place) / "w.safetensors"
        path.write_bytes(data)
        return attempt(str(path), lambda: load_safetensors(path))


def numbers_of(tensor):
    """A plain tensor of the numbers that one has."""
    if isinstance(tensor, SparseTensor):
        return tensor.dense()
    return tensor.dequantize() if isinstance(tensor, QuantizedTensor) else tensor


def is_sound(tensor):
    """Whether a tensor can be used: a packed one can be decoded."""
    return numbers_of(tensor).shape == tensor.shape


@given(damage(8 + HEAD))
def test_a_damaged_header_of_safetensors(apply):
    result = loaded(apply(FILE[: 8 + HEAD]) + FILE[8 + HEAD :])
    if result is not None:
        assert all(map(is_sound, result.values()))


@given(damage(len(FILE)))
def test_a_damaged_file_of_safetensors(apply):
    result = loaded(apply(FILE))
    if result is not None:
        assert all(map(is_sound, result.values()))


@given(altered(json.loads(HEADER["__metadata__"]["gemmery"])))
def test_other_values_in_the_metadata_of_safetensors(about):
    header = HEADER | {"__metadata__": {"gemmery": json.dumps(about)}}
    head = json.dumps(header).encode()
    result = loaded(struct.pack("<Q", len(head)) + head + FILE[8 + HEAD :])
    if result is not None:
        assert all(map(is_sound, result.values()))
        for name in result.keys() & TENSORS.keys():
            if type(result[name]) is type(TENSORS[name]) and result[name].dtype == TENSORS[name].dtype:
                same = result[name].shape == TENSORS[name].shape
                assert not same or is_same(result[name], TENSORS[name], about)


def is_same(one, other, about):
    """Whether two tensors have the same numbers, for metadata that still says so."""
    if isinstance(one, QuantizedTensor):
        if one.format_name != other.format_name or one.group_size != other.group_size:
            return True
        return all(value.equal(getattr(other, name)) for name, value in one.parts().items())
    return numbers_of(one).equal(numbers_of(other))


# --- checkpoints -----------------------------------------------------------------------------------------------------


def checkpoint(name):
    """The tensors and the configuration of a small checkpoint, and what its weight is."""
    with safetensors.safe_open(CHECKPOINTS / f"{name}.safetensors", framework="pt") as file:
        about = json.loads(file.metadata()["about"])
        tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118  (it is no mapping)
    del tensors["expected"]
    return tensors, about.get("config"), numbers_of(read_weight(tensors, "layer", about.get("config")))


SMALL = {
    path.stem: checkpoint(path.stem)
    for path in sorted(CHECKPOINTS.glob("*.safetensors"))
    if not path.stem.startswith("torchao")
}
#: What a configuration alone says: with another one, numbers are others.
MEANT = ("quant_method", "checkpoint_format", "format", "version")


def read_damaged(tensors, config):
    """A layer's numbers, or None where it was refused."""
    weight = attempt("", lambda: read_weight(tensors, "layer", config))
    return None if weight is None else numbers_of(weight)


@given(st.sampled_from([name for name, one in SMALL.items() if one[1] is not None]), st.data())
def test_other_values_in_the_configuration_of_a_checkpoint(name, data):
    tensors, config, numbers = SMALL[name]
    other = data.draw(altered(config))
    assume(other is None or isinstance(other, dict))
    found = read_damaged(tensors, other)
    assert found is None or found.shape == numbers.shape
    if found is None or other is None or "block" in name:
        return
    if all(other.get(key) == config.get(key) for key in MEANT):
        assert found.equal(numbers)


@given(st.sampled_from([name for name in SMALL if name.startswith("bnb")]), st.data())
def test_a_damaged_quant_state(name, data):
    tensors, config, numbers = SMALL[name]
    key = "layer.weight.quant_state.bitsandbytes__nf4"
    text = bytes(tensors[key].tolist())
    if data.draw(st.booleans()):
        text = data.draw(damage(len(text)))(text)
    else:
        text = json.dumps(data.draw(altered(json.loads(text)))).encode()
    state = torch.tensor(list(text), dtype=torch.uint8)
    found = read_damaged(tensors | {key: state}, config)
    assert found is None or found.numel() == numbers.numel()


DTYPES = (
    torch.uint8, torch.int8, torch.int32, torch.int64, torch.float16, torch.float32, torch.float64, torch.bool,
    torch.float8_e4m3fn, torch.complex64,
)  # fmt: skip


@st.composite
def other_tensor(draw, x):
    """A tensor of another shape, another type or other numbers."""
    kind = draw(
        st.sampled_from(["type", "flat", "more", "less", "turned", "cut", "empty", "scalar", "ends", "twice"])
    )
    if kind == "type":
        return x.float().to(draw(st.sampled_from(DTYPES)))
    if kind == "ends":
        wide = torch.iinfo(x.dtype) if not (x.is_floating_point() or x.dtype == torch.bool) else None
        return (
            torch.full_like(x, float("nan"))
            if wide is None
            else torch.full_like(x, draw(st.sampled_from([wide.min, wide.max])))
        )
    last = x.dim() - 1
    shapes = {
        "flat": lambda: x.flatten(), "more": lambda: x.unsqueeze(0), "less": lambda: x[0] if x.dim() else x,
        "turned": lambda: x.mT if x.dim() > 1 else x, "cut": lambda: x.narrow(last, 0, x.shape[last] // 2) if x.dim() else x,
        "empty": lambda: x.flatten()[:0], "scalar": lambda: x.flatten()[0], "twice": lambda: torch.cat([x, x]) if x.dim() else x,
    }  # fmt: skip
    return shapes[kind]()


@given(st.sampled_from(sorted(SMALL)), st.data())
def test_other_tensors_in_a_checkpoint(name, data):
    tensors, config, _ = SMALL[name]
    key = data.draw(st.sampled_from(sorted(tensors)))
    changed = dict(tensors)
    if data.draw(st.integers(0, 9)) == 0:
        del changed[key]
    else:
        changed[key] = data.draw(other_tensor(tensors[key]))
    config = config if data.draw(st.booleans()) else None
    found = read_damaged(changed, config)
    assert found is None or found.dim() == 2
