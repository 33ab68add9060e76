"""What the host knows of specialised warps: what they suit, how work is divided, and that their choice is data."""

import json
import math
from dataclasses import replace

import pytest
import torch

from gemmery import Config, devices
from gemmery.epilogues.device import compiled
from gemmery.epilogues.table import TYPES
from gemmery.kernels import dialect
from gemmery.lab.abstract import abstract_problem
from gemmery.schedules import REGISTRY, bind, specialized
from gemmery.schedules.specialized import SPECIALIZED
from gemmery.select import measured, rank
from gemmery.select.model import costs
from gemmery.select.space import space_of

H200 = devices.TABLE["NVIDIA H200"]
CONFIG = Config.of("256x128x64-g4-w8-s5-specialized-descriptor-k2-swap")
UPRIGHT = Config.of("128x256x128-g16-w8-s3-specialized-descriptor")


def packed(M=4096, N=8192, K=8192, **options):
    return abstract_problem(M, N, K, device=options.pop("device", H200), **{"weight": "int4"} | options)


def test_text_and_back():
    streams = replace(CONFIG, split_k=3, stream=True)
    assert str(streams) == "256x128x64-g4-w8-s5-specialized-descriptor-k3-swap-stream"
    assert Config.of(str(streams)) == streams
    assert Config.of(str(CONFIG)) == CONFIG
    assert CONFIG.schedule == "specialized"
    assert CONFIG.swap


@pytest.mark.parametrize("words", ["num_warps=4", "loader=pointer", "tail=2", "block_n=192", "split_store=1"])
def test_fields_that_do_not_go_together(words):
    name, value = words.split("=")
    given = CONFIG.asdict() | {name: int(value) if value.isdigit() else value}
    if name == "split_store":
        given[name] = True
    with pytest.raises(ValueError, match=r"^Config: "):
        Config(**given)


def test_what_it_suits():
    assert SPECIALIZED.suits(packed())
    assert SPECIALIZED.suits(packed(epilogue="bias_gelu"))
    assert SPECIALIZED.suits(packed(epilogue="swiglu"))
    # Others have nothing to unpack.
    assert not SPECIALIZED.suits(abstract_problem(4096, 8192, 8192, device=H200))
    assert not SPECIALIZED.suits(
        abstract_problem(4096, 8192, 8192, device=H200, dtype="e4m3", scales="block")
    )
    batch = replace(packed(), batch=(2,))
    assert not SPECIALIZED.suits(batch)
    columns = replace(packed(), a=replace(packed().a, row=1, col=4096))
    assert not SPECIALIZED.suits(columns)
    assert not SPECIALIZED.suits(packed(device=devices.TABLE["NVIDIA A100"]))


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_outputs_that_a_descriptor_is_made_for(dtype):
    out = replace(packed().out, dtype=dtype)
    assert SPECIALIZED.suits(replace(packed(), out=out)) is (dtype in (torch.float16, torch.bfloat16))


def test_copies_in_gluon_go_with_their_originals():
    """Another function at the address of one that is gone has a copy of its own."""
    made = set()
    for number in range(200):
        function = compiled(f"def one_{number}(x):\n    return x + {number}\n", {})
        copy = dialect.in_gluon(function)
        assert copy is dialect.in_gluon(function)
        assert copy.__name__ == f"one_{number}"
        made.add(copy.__name__)
        del function, copy
    assert len(made) == 200


def test_another_triton_does_without(monkeypatch):
    monkeypatch.setattr(SPECIALIZED, "versions", ("1.0",))
    problem = packed()
    assert "specialized" not in {config.schedule for config in space_of(problem).configs}
    with pytest.raises(ValueError, match="specialized"):
        bind(problem, CONFIG)


@pytest.mark.parametrize(
    ("problem", "config", "reason"),
    [
        (packed(), "128x32x64-g4-w8-s4-specialized-descriptor-swap", "block_n 64 or 128"),
        (packed(), "16x64x256-g1-w8-s7-specialized-descriptor-swap", "an even num_stages"),
        (packed(), "256x128x32-g4-w8-s5-specialized-descriptor-swap", "block_k a multiple of 64"),
        (packed(), str(UPRIGHT), "packed weights need swap"),
        (abstract_problem(4096, 8192, 8192, device=H200), str(UPRIGHT), "needs a packed weight"),
    ],
)
def test_configs_that_do_not_fit_are_refused(problem, config, reason):
    with pytest.raises(ValueError, match=f"^config .*{reason}"):
        bind(problem, Config.of(config))


@pytest.mark.parametrize("M", [1, 64, 200, 4096])
def test_every_config_binds(M):
    problem = packed(M)
    found = [config for config in space_of(problem).configs if config.schedule == "specialized"]
    assert found
    for config in found:
        binding = bind(problem, config)
        assert 1 <= binding.grid[0] <= H200.sms
        size, counters = binding.workspace_size
        assert (size > 0) == (counters > 0) == (binding.work.cut > 0)


def test_programs_share_all_steps():
    binding = bind(packed(M=256), CONFIG)
    work = binding.work
    # 64 tiles, each in two parts.
    assert (work.programs, work.whole, work.cut, work.chunk) == (128, 0, 64, 64)


@pytest.mark.parametrize("streams", [False, True])
def test_what_is_read_once_need_not_stay(streams, monkeypatch):
    monkeypatch.setattr(specialized, "streams", lambda: streams)
    config = Config.of("64x128x256-g1-w8-s3-specialized-descriptor-k2-swap-stream")
    for M, once in ((1, True), (64, True), (65, False), (4096, False)):
        assert bind(packed(M=M), config).constants["STREAM"] is (streams and once)
        assert bind(packed(M=M), replace(config, stream=False)).constants["STREAM"] is False


@pytest.mark.parametrize(("block_m", "rotates"), [(16, True), (32, False), (64, False)])
def test_where_columns_of_tiles_begin_does_not_depend_on_the_number_of_rows(block_m, rotates):
    config = Config.of(f"{block_m}x64x256-g1-w8-s4-specialized-descriptor-swap-stream")
    for M in (1, 16, 17, 4096):
        assert bind(packed(M=M), config).constants["ROTATE"] is rotates


def test_room_for_parts_of_tiles():
    for config, pieces in (("16x64x256-g1-w8-s8", 1), ("16x128x256-g1-w8-s4", 2)):
        binding = bind(packed(M=16, N=4096), Config.of(f"{config}-specialized-descriptor-k2-swap"))
        work = binding.work
        assert work.cut * work.parts == work.programs
        bytes_of_tile = 4 * binding.config.block_m * binding.config.block_n
        assert binding.workspace_size == (work.programs * bytes_of_tile, work.cut * pieces)


def test_all_tables_are_found_by_what_their_files_are_called():
    found = measured.tables_of(H200)
    assert sorted(measured.TABLES.glob("nvidia-h200-*.json")) == [table.path for table in found]
    assert {table.suffix for table in found} == {"", "specialized", "specialized-streamed"}


@pytest.mark.parametrize("streams", [False, True])
def test_tables_of_the_triton_that_streams(streams, monkeypatch):
    monkeypatch.setattr(specialized, "streams", lambda: streams)
    problem = packed(M=16)
    table = measured.table_of(H200, measured.table_name(problem), torch.bfloat16)
    found = [path.name for path in measured.TABLES.glob("nvidia-h200-packed-int4*.json")]
    assert "nvidia-h200-packed-int4-specialized-streamed.json" in found
    name = f"nvidia-h200-packed-int4-specialized{'-streamed' if streams else ''}.json"
    data = json.loads((measured.TABLES / name).read_text(encoding="utf-8"))
    config = "16x128x256-g1-w8-s4-specialized-descriptor-k2-swap-stream"
    us = data["microseconds"][data["shapes"].index([1, 16, 8192, 8192])][data["configs"].index(config)]
    column = table.column[Config.of(config)]
    row = table.places.tolist().index([4.0, 13.0, 13.0])
    shape = measured._problem([1, 16, 8192, 8192], H200, torch.bfloat16, "packed int4")
    space = space_of(shape)
    cost = costs(shape, space).total[space.configs.index(Config.of(config))]
    assert table.residuals[row, column] == pytest.approx(math.log((us * 1e-6 - measured.OTHER_CODE) / cost))
    assert measured.seconds_of(us, "half") == pytest.approx(us * 1e-6)


def test_it_is_chosen_where_it_was_measured_to_be_quicker():
    for problem in (packed(weight="mxfp4"), packed(epilogue="swiglu")):
        assert rank(problem)[0][0].schedule == "specialized"
    for M in (1, 4, 16):
        assert rank(packed(M=M))[0][0].block_m == (8 if M <= 8 else 16)


def test_results_that_must_not_depend_on_the_batch_do_without():
    assert all(REGISTRY[config.schedule].universal for config, _ in rank(packed(batch_invariant=True)))
