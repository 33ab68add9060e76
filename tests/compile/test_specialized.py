"""The code of specialised warps: what the compiler makes of the groups, each of which has a loop of its own."""

import re

import pytest
import triton

from gemmery.schedules import specialized
from gemmery.schedules.specialized import SPECIALIZED
from tests.compile.compiling import ptx

pytestmark = pytest.mark.skipif(not SPECIALIZED.available(), reason="specialised warps need another Triton")

CASES = [
    ("int4_gelu", "bf16", "16x64x256-g1-w8-s8-specialized-descriptor-k2-swap"),
    ("int4_swiglu", "bf16", "64x64x128-g1-w8-s8-specialized-descriptor-swap"),
    ("nvfp4", "fp16", "128x128x128-g1-w8-s3-specialized-descriptor-k2-swap"),
    ("int4_gelu", "bf16", "256x128x64-g4-w8-s5-specialized-descriptor-k2-swap"),
    ("int4_swiglu", "bf16", "256x128x128-g1-w8-s2-specialized-descriptor-swap"),
]


#: Whether this Triton can tell TMA what need not stay in L2.
HINTS = tuple(int(x) for x in triton.__version__.split(".")[:2]) >= (3, 9)


@pytest.mark.parametrize(("stream", "rows"), [("", 16), ("-stream", 16), ("-stream", 17)])
def test_what_is_read_once_need_not_stay(stream, rows):
    assert specialized.streams() == HINTS
    text = ptx("int4_gelu", "bf16", f"16x128x256-g1-w8-s4-specialized-descriptor-k2-swap{stream}", rows)
    loads = re.findall(r"cp\.async\.bulk\.tensor\.\S*global\S*", text)
    # x stays, whose blocks are two-dimensional; the words are not.
    hinted = {"3d" in load: "cache_hint" in load for load in loads}
    assert hinted == {False: False, True: HINTS and bool(stream) and rows <= 16}


def loops(text):
    """The innermost loops that multiply."""
    labels = {found[1]: found.start() for found in re.finditer(r"^(\$L__BB\d+_\d+):", text, re.MULTILINE)}
    jumps = [
        (labels[found[1]], found.end()) for found in re.finditer(r"bra(?:\.uni)?\s+(\$L__BB\d+_\d+);", text)
    ]
    spans = {(start, end) for start, end in jumps if start < end and "wgmma.mma_async" in text[start:end]}
    inner = [x for x in spans if not any(y != x and x[0] <= y[0] and y[1] <= x[1] for y in spans)]
    return [text[start:end] for start, end in sorted(inner)]


#: Steps that are unpacked in two pieces.
IN_PIECES = [
    ("int4_gelu", "bf16", "16x128x256-g1-w8-s4-specialized-descriptor-k2-swap"),
    ("int4_swiglu", "bf16", "64x128x256-g1-w8-s3-specialized-descriptor-swap"),
    ("nvfp4", "fp16", "32x128x256-g1-w8-s4-specialized-descriptor-k2-swap"),
    ("e4m3_packed", "bf16", "64x128x128-g1-w8-s5-specialized-descriptor-swap"),
    ("nf4", "bf16", "16x64x256-g1-w8-s8-specialized-descriptor-k2-swap"),
]


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("name", "dtype", "config"), IN_PIECES)
def test_a_piece_is_unpacked_under_the_product_of_the_one_before(name, dtype, config):
    for body in loops(ptx(name, dtype, config, 16)):
        first, second, rest = body.split("wgmma.commit_group")
        # Words of both are read, of different places; nothing is waited for but the last product.
        assert "wgmma.wait_group" not in first + second
        assert rest.count("wgmma.wait_group") == 1
        places = [
            set(re.findall(r"ld\.shared\.v[24]\.b32\s+\{[^}]*\}, \[([^\]]+)\]", part))
            for part in (first, second)
        ]
        assert all(places)
        assert not places[0] & places[1]
        products = [len(re.findall(r"wgmma\.mma_async", part)) for part in (first, second)]
        assert products[0] == products[1] > 1


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("name", "dtype", "config"), CASES)
def test_groups_multiply_at_their_own_pace(name, dtype, config):
    text = ptx(name, dtype, config)
    # All threads have announced their copies before the stage can be complete for the first time.
    copied = text.rindex("cp.async.mbarrier.arrive")
    assert "bar.warp.sync" in text[copied : text.index("expect_tx", copied)]
    found = loops(text)
    # A loop a group, and with parts along K one more.
    assert len(found) == (4 if "-k2" in config else 2)
    for body in found:
        # What a thread reads of a stage it reads itself: nothing goes through shared memory on its way.
        assert "st.shared" not in body
        # Nor does it wait for memory: what groups share has come with the stage, as everything else.
        assert "ld.global" not in body
        # A stage is given back when all threads of the group are done with it, and these are not all of the program.
        after = body.rsplit("wgmma.wait_group", 1)[1]
        before = after.split("mbarrier.arrive", 1)[0]
        (barrier,) = set(re.findall(r"(?:bar|barrier)(?:\.cta)?\.sync(?:\.aligned)?\s+(\d+, \d+)", before))
        assert barrier.endswith(", 128")
    barriers = {re.findall(r"\.sync(?:\.aligned)?\s+(\d+), 128", body)[-1] for body in found}
    assert len(barriers) == 2


def outside_of_loops(text):
    """The code without its loops that multiply."""
    for body in loops(text):
        text = text.replace(body, "")
    return text


@pytest.mark.parametrize(("turns", "config"), [(False, "16x128x256-g1-w8-s4"), (True, "16x64x256-g1-w8-s8")])
def test_groups_that_take_turns_meet_in_shared_memory(turns, config):
    text = outside_of_loops(ptx("int4_gelu", "bf16", f"{config}-specialized-descriptor-swap", 16))
    arrivals = [text[: found.start()] for found in re.finditer(r"(?<!async\.)mbarrier\.arrive\.shared", text)]
    assert len(arrivals) == (2 if turns else 0)
    kinds = []
    for before in arrivals:
        # A group waits for its turn, stores or reads 8 numbers a thread, waits for all of its threads, and says so.
        waited = before[before.rfind("mbarrier.try_wait") :]
        accesses = list(re.finditer(r"(st|ld)\.shared(?:\.v(\d))?\.[bf]32", waited))
        (kind,) = {found[1] for found in accesses}
        assert sum(int(found[2] or 1) for found in accesses) == 8
        behind = waited[accesses[-1].end() :]
        assert re.search(r"(?:bar|barrier)(?:\.cta)?\.sync(?:\.aligned)?\s+\d+, 128", behind)
        kinds.append(kind)
    assert sorted(kinds) == (["ld", "st"] if turns else [])
