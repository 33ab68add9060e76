"""Clusters of programs, which sum the parts of a tile of any width: what they send, and when they are taken.

No interpreter of Triton runs their assembly. Here `finish_in_cluster` runs in Python for every program of a cluster, and
`Cluster` takes the place of the programs' shared memory and barriers.
"""

import inspect
import itertools
import random
import re
import types
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch

import gemmery
from gemmery import Config, schedules
from gemmery.kernels.dialect import value_of
from gemmery.lab.abstract import abstract_problem, linear_problem
from gemmery.lab.fused_targets import abstract_sparse, grouped_problem, ranges_problem
from gemmery.schedules import any_width_cost, cluster_launch
from gemmery.schedules.any_width_tile import CLUSTER_PART, MOST_STAGES, PLAIN, RULES, Tile, x_bytes
from gemmery.schedules.base import Forms
from gemmery.schedules.cluster import CLUSTER
from gemmery.schedules.walk import divisor
from gemmery.select import candidates, rank, samples
from gemmery.select.model import costs
from gemmery.select.shapes import device_named, problem_of
from gemmery.select.space import space_of, tiles_of

pytest.importorskip("triton.experimental.gluon.language.nvidia.hopper")
from gemmery.kernels import any_width
from gemmery.kernels import any_width_cluster as kernel

from .device_functions import device_functions
from .test_any_width import fused_problem, matrix, sparse_problem, state_of
from .test_any_width_ring import Constant, program

H200 = device_named("H200")
ROWS = [tile.config for tile in tiles_of("hopper", "half") if tile.config.schedule == "cluster"]

# ---------------------------------------------------------------------------------------------------------------------
# What programs send and receive

MOST, BLOCK = kernel.MOST.value, kernel.BLOCK_BYTES.value
#: Where another program's shared memory begins, counted from its number plus one.
APART = 1 << 32
#: Those of a warpgroup's threads that run, and how many there are for each.
THREADS = (0, 33, 78, 127)
EACH = 128 // len(THREADS)


class Wrong(AssertionError):
    """The programs have broken the rules."""


class Waits(Exception):
    """A program waits for what others send."""


class Cluster:
    """The shared memory and the barriers of a cluster's programs, for some threads of a warpgroup at a time.

    Args:
        ring: bytes of the ring.
        room: bytes at its end for what is received.
        barriers_at: where the barriers begin.
    """

    def __init__(self, programs, ring, room, barriers_at):
        self.programs, self.ring, self.room, self.barriers_at = programs, ring, room, barriers_at
        self.memory = [{} for _ in range(programs)]
        self.expected, self.got, self.arrivals = Counter(), Counter(), Counter()
        self.thread = self.rank = 0
        self.arrived = False

    def ptx(self, code, arguments, value):
        """See `ptx.Program.run`."""
        at = [
            sum(self.number(value(x)) for x in each[1:-1].split(" + "))
            for each in arguments
            if each[0] == "["
        ]
        if code == "mbarrier.arrive.expect_tx.shared::cta.b64":
            self.expected[self.rank, at[0]] += value(arguments[2])
            self.arrivals[self.rank, at[0]] += 1
        elif code == "mapa.shared::cluster.u32":
            address, target = value(arguments[1]), value(arguments[2])
            if not 0 <= target < self.programs:
                raise Wrong("sent to a program outside of the cluster")
            return arguments[0], (1 + target) * APART + address
        elif code.startswith("st.async"):
            assert code == "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32"
            self._send(*at, [value(each) for each in arguments[1].strip("{}").split(",")])
        elif code == "ld.shared.v4.f32":
            names = [each.strip() for each in arguments[0].strip("{}").split(",")]
            found = self.memory[self.rank].get(at[0])
            if found is None or at[0] % BLOCK != 16 * (self.thread % 128):
                raise Wrong("nothing was sent there for this thread")
            return dict(zip(names, found, strict=True))
        elif code == "mov.f32":
            assert arguments[1] == "0f00000000"
            return arguments[0], np.float32(0)
        elif code == "add.f32":
            return arguments[0], np.float32(
                self.number(value(arguments[1])) + self.number(value(arguments[2]))
            )
        else:
            raise AssertionError(code)
        return None

    @staticmethod
    def number(found):
        if isinstance(found, str) and not found.isdigit():
            raise Wrong("a register that holds nothing is read")
        return int(found) if isinstance(found, str) else found

    def _send(self, at, barrier, numbers):
        if not self.arrived:
            raise Wrong("sent before the others are there")
        (target, at), (other, barrier) = divmod(at, APART), divmod(barrier, APART)
        if target != other:
            raise Wrong("arrives at another program's barrier")
        if not self.ring - self.room <= at <= self.ring - 16:
            raise Wrong("sent to a stage, or beyond the ring")
        # A thread's place within a block is its own, so that different threads never meet.
        if at % BLOCK != 16 * (self.thread % 128):
            raise Wrong("not the thread's place in a block")
        if at in self.memory[target - 1]:
            raise Wrong("two programs send to one place")
        self.memory[target - 1][at] = numbers
        self.got[target - 1, barrier] += 16 * EACH

    def wait(self, barrier, phase):
        """Raises an error unless every program has received what it waits for."""
        assert phase == 0
        key = self.rank, barrier
        if self.arrivals[key] != 1:
            raise Wrong("not one arrival at the barrier")
        if self.got[key] != self.expected[key]:
            raise Wrong("other bytes are received than are awaited")


def assembly_of(name, edit, *arguments):
    """The program of the assembly that one of the cluster's functions writes."""
    found = []

    def inline_asm_elementwise(text, constraints, given, *, pack, **how):
        assert pack == 4
        found.append(text)
        return ()

    gl = types.SimpleNamespace(
        inline_asm_elementwise=inline_asm_elementwise, int32=int, float32=float, tuple=list
    )
    names = {"gl": gl, "value_of": value_of, "MOST": kernel.MOST, "BLOCK_BYTES": kernel.BLOCK_BYTES}
    types.FunctionType(inspect.unwrap(getattr(kernel, name)).__code__, names, name, (None,))(*arguments)
    return program(edit(found[0]))


def numbers_of(rank, m, column, thread):
    """The four numbers that a thread of a program has in a block: distinct integers of fp32, times a power of two.

    The sums of several programs are rounded, so their order matters.
    """
    first = ((rank * 8 + m) * 16 + column) * 2048 + 4 * thread
    return [np.float32((first + i + 1) * 2.0 ** (9 * (rank % 4))) for i in range(4)]


def emulate(x, groups, own_rows, width, programs, edit=lambda text: text):
    """Runs the end of a tile in every program of a cluster, and checks what arrives and what is finished.

    Args:
        x, groups, own_rows: see `Tile`.
        edit: changes the assembly.
    """
    tile = Tile(x, width, groups, own_rows, clustered=True)
    rows, part, barriers_at = own_rows // 64, tile.part, tile.slots * tile.part * 128
    cluster = Cluster(programs, tile.ring_rows * 128, tile.received, barriers_at)
    parts, blocks = -(-width // part), part // 8
    # Where the columns of each block of an accumulator begin; the last part ends where the width does.
    columns = [min(i * part, width - part) + 8 * j for i in range(parts) for j in range(blocks)]
    nothing = types.SimpleNamespace(values=[None] * (rows * len(columns)))
    send, receive = (
        assembly_of("send_parts", edit, nothing, 0, 0, 0, 0, own_rows, part),
        assembly_of("received", edit, 0, 0, 0, part),
    )
    finished, group = Counter(), 0

    def threads():
        for thread in THREADS:
            # Warpgroups begin at multiples of 128 threads.
            cluster.thread = 128 * group + thread
            yield thread

    def send_parts(acc, to, arrived, turns, awaited, OWN, PART):
        assert (own_rows, part) == (OWN, PART)
        for thread in threads():
            mine = [
                x
                for m in range(rows)
                for column in columns
                for x in numbers_of(cluster.rank, group * rows + m, column // 8, thread)
            ]
            given = [each for each in (to, arrived, turns, awaited) for _ in range(4)]
            send.run([None] * 4 + mine + given, cluster)

    def received(at, size, count, PART):
        found = {}
        for thread in threads():
            operands = [None] * (4 * blocks) + [each for each in (at, size, count) for _ in range(4)]
            receive.run(operands, cluster)
            found[thread] = operands[: 4 * blocks]
        return found

    def finish_part(
        found, out, slots, ring, first, own, spread, number, taken, in_ring, args, shape, row, col, *_
    ):
        numbers.append(number)
        finished[row, col] += 1
        m = row // 64
        for thread, sums in found.items():
            wanted = []
            for j in range(blocks):
                total = [np.float32(0)] * 4
                for sender in range(programs):
                    sent = numbers_of(sender, m, col // 8 + j, thread)
                    total = [np.float32(a + b) for a, b in zip(total, sent, strict=True)]
                wanted += total
            if sums != wanted:
                raise Wrong("not the sums of all programs in their order")

    def arrived():
        cluster.arrived = True

    def waits(barrier, phase):
        if not has_sent:
            raise Waits
        cluster.wait(barrier, phase)

    gl = types.SimpleNamespace(
        cdiv=lambda a, b: -(-a // b),
        minimum=min,
        maximum=max,
        static_range=range,
        to_tensor=bool,
        constexpr=int,
    )
    names = {
        "gl": gl, "quotient": device_functions()["quotient"], "STAGES": MOST_STAGES, "BLOCK_BYTES": Constant(BLOCK),
        "in_block": lambda x: x, "shared_at": lambda at: at, "wait_for_cluster": arrived, "received": received,
        "send_parts": lambda *given: None if has_sent else send_parts(*given), "finish_part": finish_part,
        "rank_in_cluster": lambda: cluster.rank, "mbarrier": types.SimpleNamespace(wait=waits),
    }  # fmt: skip
    finish = types.FunctionType(kernel.finish_in_cluster.fn.__code__, names)
    barriers = types.SimpleNamespace(index=lambda at: barriers_at + 8 * at)
    of_cluster = programs, divisor(programs)
    # All programs send, and then each of them receives.
    for has_sent, group, cluster.rank in itertools.product((False, True), range(groups), range(programs)):
        cluster.arrived, numbers = has_sent, []
        try:
            finish(
                None, None, None, (barriers, 4), (), (), group * own_rows, 0, width, of_cluster, 0, group, None, None,
                False, "rows", "rows", own_rows, tile.buffers, part, tile.ring_rows * 128, barriers_at,
            )  # fmt: skip
        except Waits:
            assert not has_sent
        # A slot is free again after as many parts as there are buffers, so parts are counted.
        assert numbers == list(range(len(numbers)))
    assert finished == {
        (64 * m, min(i * part, width - part)): 1 for m in range(groups * rows) for i in range(parts)
    }
    # Each program has received a barrier's bytes of each warpgroup, and of nothing else.
    assert set(cluster.arrivals) == {
        (rank, barriers_at + 8 * (2 * MOST_STAGES + 4 + group))
        for rank in range(programs)
        for group in range(groups)
    }
    assert set(cluster.got) <= set(cluster.arrivals)


#: Rows of X, warpgroups and rows of X of each; and widths.
SIZES = [
    (*sizes, width)
    for sizes in ((64, 1, 64), (96, 2, 64), (128, 2, 64), (128, 1, 128), (192, 3, 64), (256, 2, 128))
    for width in (16, 24, 32, 40, 64, 80, 96, 104, 112, 128, 144)
    if Tile(*sizes[:1], width, *sizes[1:], clustered=True).most_stages() >= 2
    and width <= Tile(*sizes[:1], width, *sizes[1:]).widest(PLAIN)
    and width % Tile(*sizes[:1], width, *sizes[1:]).each_of(RULES[""]) == 0
]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("programs", range(2, MOST + 1))
def test_each_part_is_finished_once_with_the_sum_of_all_programs(size, programs):
    emulate(*size, programs)


def test_the_sizes_include_those_that_may_be_chosen():
    kept = {(tile.x, tile.groups, tile.own, tile.y) for tile in map(CLUSTER.tile, ROWS)}
    assert len(kept) >= 6
    assert kept <= set(SIZES)
    assert {rows for _, _, rows, _ in SIZES} == {64, 128}


MUTANTS = {
    "a turn that is not reset": {
        "message": "sent to a stage, or beyond the ring",
        "edit": lambda text: text.replace("@last mov.b32 turn, 0;", ""),
    },
    "all parts for the first program": {
        "message": "two programs send to one place",
        "edit": lambda text: text.replace("@last add.s32 target, target, 1;", ""),
    },
    "a program too many": {
        "message": "sent to a program outside of the cluster",
        "edit": lambda text: text.replace("mov.b32 target, 0;", "mov.b32 target, 1;"),
    },
    "parts that are a block apart": {
        "message": "two programs send to one place",
        "edit": lambda text: text.replace("mad.lo.s32 at, at, 4096, first", "mad.lo.s32 at, at, 2048, first"),
    },
    "all rows in one place": {
        "message": "two programs send to one place",
        "edit": lambda text: text.replace("turns, 1, turn", "turns, 0, turn"),
    },
    "the sender's barrier": {
        "message": "arrives at another program's barrier",
        "edit": lambda text: re.sub(r"(u32 there, \$\d+), target", r"\1, 0", text),
    },
    "blocks of threads that overlap": {
        "message": "not the thread's place in a block",
        "edit": lambda text: text.replace("first, thread, 16,", "first, thread, 8,"),
    },
    "a second warpgroup's threads beside the first's": {
        "message": "two programs send to one place",
        "edit": lambda text: text.replace("and.b32 thread, thread, 127; mad.lo.s32 first", "mad.lo.s32 first"),
    },
    "every thread arrives": {
        "message": "not one arrival at the barrier",
        "edit": lambda text: text.replace("@own mbarrier", "mbarrier"),
    },
    "the first program's numbers for all": {
        "message": "not the sums of all programs in their order",
        "edit": lambda text: re.sub(r"add\.s32 at, at, \$\d+;", "", text),
    },
    "numbers of an earlier round": {
        "message": "not the sums of all programs in their order",
        "edit": lambda text: re.sub(r"(DONE;.*)", lambda found: found[1].replace("mov.f32 n", "mov.f32 unread"), text),
    },
    "four programs at most": {
        "message": "not the sums of all programs in their order",
        "edit": lambda text: text.replace("@there bra DONE;", "bra DONE;"),
    },
    "numbers that nobody has sent": {
        "message": "nothing was sent there for this thread",
        "edit": lambda text: text.replace("@there ld.shared", "ld.shared"),
    },
    "the second block of a part for both": {
        "message": "not the sums of all programs in their order",
        "edit": lambda text: re.sub(r"(ld\.shared\.v4\.f32 \{[^}]*\}, \[at \+) 0\]", r"\1 2048]", text),
    },
}  # fmt: skip


@pytest.mark.parametrize("mutant", MUTANTS)
def test_mutants_are_caught(mutant):
    """Every mutant is caught, by the message that it names."""
    message, found = MUTANTS[mutant]["message"], set()
    for size, programs in itertools.product(((128, 2, 64, 40), (128, 1, 128, 64)), (2, 3, 6, 8)):
        try:
            emulate(*size, programs, edit=MUTANTS[mutant]["edit"])
        except Wrong as wrong:
            found.add(str(wrong))
    assert message in found


def test_what_is_received_is_behind_all_stages():
    for tile in (
        CLUSTER.tile(config) for kind in ("half", "fp8", "packed4", "sparse") for config in rows_of(kind)
    ):
        parts = -(-tile.y // CLUSTER_PART)
        # Of as many programs as there may be, the room that each one's parts take.
        most = max(n * -(-parts // n) for n in range(2, MOST + 1)) * CLUSTER_PART * 64 * tile.groups * 4
        assert tile.received == most > 0
        assert (tile.most_stages() * (x_bytes(tile.x, None) + 128 * tile.y)) + most <= tile.ring_rows * 128
        assert (
            tile.most_stages() < tile._replace(clustered=False).most_stages()
            or tile.most_stages() == MOST_STAGES
        )


# ---------------------------------------------------------------------------------------------------------------------
# The schedule


def rows_of(kind):
    """The configs of a kind of operand, with each number of programs of a cluster."""
    own = [tile for tile in tiles_of("hopper", kind) if tile.config.schedule == "cluster"]
    assert own
    assert all(tile.splits for tile in own)
    return [replace(tile.config, split_k=programs) for tile in own for programs in CLUSTER.splits]


def problem(M=4, N=1536, K=16384, **more):
    return problem_of(M, N, K, device=H200, **more)


NARROW = "16x64x64-g0-w4-s12-cluster-descriptor{}-swap"


@pytest.mark.parametrize(
    ("given", "split", "message"),
    [
        ({}, "", "split_k is 1; a cluster has 2 to 8 programs"),
        ({}, "-k9", "split_k is 9; a cluster has 2 to 8 programs"),
        ({"N": 64 * 34}, "-k4", "each of 34 tiles needs several steps along K, and parts of all tiles at most 132"),
        ({"N": 64 * 132}, "-k2", "each of 132 tiles needs several steps"),
        # The last wave's tiles could be cut.
        ({"N": 64 * 133}, "-k2", "each of 133 tiles needs several steps"),
        ({"K": 64}, "-k2", "each of 24 tiles needs several steps"),
        ({"batch": (3,)}, "-k2", "one matrix, since tiles of a batch are not cut along K"),
        ({"batch_invariant": True}, "-k2", "depends on the number of rows"),
        ({"M": 1, "bias": True}, "-k2", "may be the output itself"),
    ],
)  # fmt: skip
def test_what_a_cluster_refuses(given, split, message):
    with pytest.raises(ValueError, match=message):
        schedules.bind(problem(**given), Config.of(NARROW.format(split)))
    schedules.bind(problem(), Config.of(NARROW.format("-k4")))
    schedules.bind(problem(N=64 * 33), Config.of(NARROW.format("-k4")))
    schedules.bind(problem(K=128), Config.of(NARROW.format("-k2")))


def test_an_epilogue_with_a_matrix_is_refused():
    config = Config.of("64x64x64-g0-w4-s8-cluster-descriptor-k2")
    vector = torch.empty(1536, dtype=torch.bfloat16, device="meta")
    few = replace(H200, sms=1 << 20)
    for p in (fused_problem(lambda acc, x: acc + x, matrix()), fused_problem(lambda acc: (acc.relu(), acc))):
        with pytest.raises(ValueError, match="an epilogue that reads and writes no other matrix"):
            schedules.bind(replace(p, device=few), config)
        assert "cluster" not in {each.schedule for each in candidates(p)}
    schedules.bind(replace(fused_problem(lambda acc, x: acc + x, vector), device=few), config)
    p = abstract_problem(4, 1536, 16384, device=H200, epilogue="bias_residual")
    assert "no other matrix" in CLUSTER.refusal(p, Config.of(NARROW.format("-k2")))


def test_groups_of_rows_are_refused():
    p = grouped_problem(64, 2, 1536, 16384, device=H200)
    for config in rows_of("half"):
        assert not CLUSTER.takes(config, Forms.of(p))
        assert "tiles of a batch are not cut along K" in CLUSTER.refusal(p, config)


def test_ranges_of_k_have_no_clusters():
    """Tiles of ranges of K are split by any schedule that splits, and only by these."""
    ranked = [config for config, _ in rank(ranges_problem(8192, 32, 2048, 1024, device=H200))]
    assert "cluster" not in {config.schedule for config in ranked}
    split = {config.schedule for config in ranked if config.split_k > 1}
    assert split
    assert all("split_k" in schedules.of(name).knobs for name in split)


@pytest.mark.parametrize("kind", ["half", "int4", "sparse"])
def test_what_is_considered_is_what_runs(kind):
    """For random sizes, a config is refused for its tiles and steps alone, and then it is not considered."""
    r, seen = random.Random(kind), Counter()
    for _ in range(60):
        M, N, K = r.choice((1, 4, 16, 60, 200, 500)), 64 * r.randint(1, 120), 64 * r.randint(1, 200)
        if kind == "sparse":
            p = sparse_problem(M, N, K)
        else:
            p = abstract_problem(M, N, K, device=H200, weight="" if kind == "half" else kind)
        space = space_of(p)
        own = space.where(space.schedule == "cluster")
        considered = CLUSTER.considers(p, np.array([[M]]), own)
        assert considered.shape == (1, len(own))
        for config, is_considered in zip(own.configs, considered[0].tolist(), strict=True):
            refusal = CLUSTER.refusal(p, config)
            assert (refusal is None) == is_considered, (M, N, K, str(config), refusal)
            assert refusal is None or re.match(r"each of \d+ tiles needs several steps", refusal)
            assert CLUSTER.considers(p, np.array([[M]]), config).tolist() == [[is_considered]]
            seen[is_considered] += 1
    assert min(seen[True], seen[False]) > 100


#: Sizes and configs of which a cluster has all programs that its config asks for, or fewer.
WALKS = [
    ((4, 1536, 16384), "16x64x64-g0-w4-s12-cluster-descriptor-k4-swap"),
    ((40, 504, 1000), "16x64x64-g0-w4-s12-cluster-descriptor-k3-swap"),
    ((200, 520, 2048), "64x128x64-g0-w8-s6-cluster-descriptor-k6-swap"),
    ((200, 520, 2048), "64x64x64-g2-w4-s8-cluster-descriptor-k3"),
    # 9 steps for 8 programs are two for each of 5.
    ((130, 200, 520), "64x64x64-g0-w4-s8-cluster-descriptor-k8"),
    ((130, 328, 712), "128x40x64-g0-w8-s6-cluster-descriptor-k2"),
]


@pytest.mark.parametrize(("sizes", "text"), WALKS)
def test_the_walk_covers_every_tile_and_all_of_k_once(sizes, text):
    (M, N, K), config = sizes, Config.of(text)
    p = problem(M, N, K)
    binding, walk = schedules.bind(p, config), CLUSTER.walk(p, config)
    parts = binding.cluster
    assert 2 <= parts <= config.split_k
    covered, ends = np.zeros((M, N), int), {}
    for i in range(len(walk)):
        rows = slice(walk.row[i], walk.row[i] + walk.rows[i])
        cols = slice(walk.col[i], walk.col[i] + walk.cols[i])
        covered[rows, cols] += walk.last_k[i] - walk.first_k[i]
        assert walk.last_k[i] > walk.first_k[i]
        assert walk.first_k[i] % config.block_k == 0
        # The parts of a tile belong to a cluster, in their order.
        corner, rank = (walk.row[i], walk.col[i]), walk.program[i] % parts
        cluster, end = ends.setdefault(corner, (walk.program[i] // parts, 0))
        assert (cluster, end) == (walk.program[i] // parts, walk.first_k[i])
        assert rank == round(walk.first_k[i] / walk.last_k[0])
        ends[corner] = cluster, walk.last_k[i]
    assert (covered == K).all()
    assert {end for _, end in ends.values()} == {K}
    assert sorted(cluster for cluster, _ in ends.values()) == list(range(len(ends)))
    assert walk.program.tolist() == list(range(len(walk)))
    assert not walk.turn.any()


@pytest.mark.parametrize(("sizes", "text"), WALKS)
def test_a_launch_has_a_cluster_for_each_tile_and_no_workspace(sizes, text):
    p, config = problem(*sizes), Config.of(text)
    binding, work = schedules.bind(p, config), CLUSTER.work(p, config)
    assert (work.whole, binding.cluster) == (0, work.parts)
    assert binding.grid == (work.cut, 1, 1)
    assert binding.grid[0] * binding.cluster == work.programs <= H200.sms
    # Launches take a workspace where there is a split.
    assert binding.split is None
    given = binding.arguments(*samples.arguments(p, "meta"))
    of = dict(zip(binding.kernel.arg_names, given, strict=False))
    assert of["workspace"] is None
    assert (of["units"], of["whole"], of["parts"]) == (work.programs, 0, binding.cluster)
    assert of["cut_divisor"] == divisor(binding.cluster)
    assert binding.constants["CLUSTERED"] is True
    assert binding.constants["WIDTHS"] == (CLUSTER.tile(config).y,)


@pytest.mark.parametrize(("sizes", "text"), WALKS)
def test_the_kernel_places_units_as_the_walk_does(sizes, text):
    p, config = problem(*sizes), Config.of(text)
    binding, walk = schedules.bind(p, config), CLUSTER.walk(p, config)
    assert binding.place.__name__ == "sized_part_of_cluster"
    placed, (state, band) = device_functions()["sized_part_of_cluster"], state_of(binding)
    found = [placed(unit, state, sizes, config.block_m, config.block_n, band) for unit in range(state[0])]
    wanted = zip(walk.batch, walk.row, walk.col, walk.first_k, walk.last_k, strict=True)
    assert [(batch, row, col, first, last) for batch, row, col, _, first, last in found] == [
        tuple(map(int, each)) for each in wanted
    ]


def test_other_bindings_have_clusters_of_one_program():
    for text in ("128x128x64-g8-w8-s4-cooperative-descriptor", "64x64x64-g8-w4-s4-tile-descriptor"):
        binding = schedules.bind(problem(1000), Config.of(text))
        assert binding.cluster == 1
    config = Config.of("128x72x64-g4-w8-s6-cooperative-descriptor-k3")
    binding = schedules.bind(problem(200, 520, 2048), config)
    assert (binding.cluster, binding.constants["CLUSTERED"]) == (1, False)
    assert binding.split is not None
    assert binding.place.__name__ == "sized_part"


@pytest.mark.parametrize("cluster", [2, 5, 8])
def test_triton_is_told_how_many_programs_a_cluster_has(cluster):
    compiled = types.SimpleNamespace(packed_metadata=(8, 1, 200000))
    assert cluster_launch.in_clusters(compiled, cluster) == (8, cluster, 200000)


@pytest.mark.parametrize("layout", ["NT", "NN", "TN", "TT"])
@pytest.mark.parametrize(
    "text", ["64x64x64-g0-w4-s8-cluster-descriptor-k2", "64x64x64-g0-w4-s8-cluster-descriptor-k2-swap"]
)
def test_boxes_are_those_of_the_tensor_maps(layout, text):
    """On both paths of a launch, a load has as many rows as the kernel is told, whatever its operands' layouts."""
    p = abstract_problem(64, 1536, 2048, device=H200, layout=layout)
    binding = schedules.bind(p, Config.of(text))
    for made in (binding.arguments, binding.direct_arguments):
        of = dict(zip(binding.kernel.arg_names, made(*samples.arguments(p, "meta")), strict=False))
        for name, form in zip("xy", binding.forms, strict=True):
            box = getattr(of[name], "box", of[name].block_shape)
            assert of[f"{name}_box"] == box[1 if form == "turned" else 0], (name, form)


def test_a_kernel_with_scratch_memory_is_refused():
    run = types.SimpleNamespace(global_scratch_size=0, profile_scratch_size=16)
    compiled = types.SimpleNamespace(_init_handles=lambda: None, run=run)
    with pytest.raises(RuntimeError, match="scratch memory"):
        cluster_launch.launch(compiled, (24, 1, 1), 4, [])


def test_a_launch_gives_all_arguments_in_their_order(monkeypatch):
    """The ordinary launch takes the kernel's parameters as they are declared, constants too, over a grid of clusters."""
    p = problem()
    binding, seen = schedules.bind(p, Config.of(NARROW.format("-k4"))), []
    monkeypatch.setattr(binding, "compile", lambda tensors, numbers=(): "compiled")
    monkeypatch.setattr(cluster_launch, "launch", lambda *given: seen.append(given))
    tensors, numbers = samples.arguments(p, "meta")
    binding.launch(tensors, numbers)
    ((compiled, grid, cluster, arguments),) = seen
    assert (compiled, grid, cluster) == ("compiled", (24, 1, 1), 4)
    of = dict(zip(binding.kernel.arg_names, arguments, strict=True))
    assert (of["M"], of["N"], of["K"], of["parts"], of["CLUSTERED"], of["X_ROWS"]) == (
        4,
        1536,
        16384,
        4,
        True,
        64,
    )


# ---------------------------------------------------------------------------------------------------------------------
# The choice


@pytest.mark.parametrize("sizes", [(4, 1536, 16384), (16, 4096, 4096), (64, 2048, 8192)])
def test_clusters_are_chosen_for_few_tiles_of_many_steps(sizes):
    M, N, K = sizes
    x, weight = (torch.empty(rows, K, dtype=torch.bfloat16, device="meta") for rows in (M, N))
    p = linear_problem(x, weight, H200)
    config = candidates(p)[0]
    assert config.schedule == "cluster"
    assert CLUSTER.refusal(p, config) is None
    found = gemmery.explain(M, N, K, dtype=torch.bfloat16, layout="NT", device="H200")
    assert found.choices[0].config == config
    assert str(config) in str(found)


def test_clusters_are_not_chosen_for_many_tiles():
    assert "cluster" not in {config.schedule for config in candidates(problem(4096, 4096, 4096))}


@pytest.mark.parametrize("kind", ["half", "int4", "sparse", "fp8fast"])
def test_each_kind_of_operand_has_clusters(kind):
    if kind == "sparse":
        p = sparse_problem(4, 1536, 16384)
    elif kind.startswith("fp8"):
        p = abstract_problem(4, 1536, 16384, device=H200, dtype=kind)
    else:
        p = abstract_problem(4, 1536, 16384, device=H200, weight="" if kind == "half" else kind)
    ranked = [(config, cost) for config, cost in rank(p) if config.schedule == "cluster"]
    assert {config.split_k for config, _ in ranked} >= {2, 3, 4}
    for config, cost in ranked:
        assert CLUSTER.refusal(p, config) is None, str(config)
        assert cost.total > cost.reduction > 0


def test_other_kinds_of_operands_have_clusters():
    widened = linear_problem(
        torch.empty(4, 4096, dtype=torch.bfloat16, device="meta"), abstract_sparse("e4m3", 1536, 4096, torch.bfloat16),
        H200,
    )  # fmt: skip
    for p in (
        widened,
        abstract_problem(4, 1536, 4096, device=H200, dtype="fp8"),
        abstract_problem(4, 1536, 4096, device=H200, epilogue="swiglu"),
        abstract_problem(4, 1536, 4096, device=H200, weight="nf4"),
    ):
        assert CLUSTER.unsuited(p) is None, str(p)
        assert "cluster" in {config.schedule for config, _ in rank(p)}, str(p)


def test_a_matrix_descriptor_has_no_bits_of_the_program():
    """An address has the number of the cluster's program from bit 24 on, where a descriptor has the layout."""
    for chunk in (16, 8192):
        for address in (0x400, 0x12340, 0x38000):
            want = any_width.matrix_descriptor.fn(address, chunk)
            assert want == address >> 4 | chunk // 16 << 16
            assert any_width.matrix_descriptor.fn(7 << 24 | address, chunk) == want


def cost_of(tiles, split, sms=132):
    """The predicted seconds of so many narrow tiles of one size along K."""
    p = problem_of(16, 64 * tiles, 16384, device=replace(H200, sms=sms))
    space = space_of(p)
    own = space.where((space.schedule == "cluster") & (space.split_k == split) & (space.block_m == 16))
    own = own.where(own.block_n == 64)
    assert len(own) == 1
    return costs(p, own).total.item()


@pytest.mark.parametrize("split", CLUSTER.splits)
def test_clusters_that_cannot_all_run_at_once_take_longer(split):
    """As many clusters as run at once, and one more, differ by more than the time of one more tile's bytes."""
    share = any_width_cost.CLUSTERS[split]
    at_once = int(share * H200.sms) // split
    fewer, most = cost_of(at_once - 1, split), cost_of(at_once, split)
    assert fewer < most
    if share == 1:
        assert at_once * split == H200.sms
        return
    assert (at_once + 1) * split <= H200.sms
    assert cost_of(at_once + 1, split) - most > 5 * (most - fewer) + any_width_cost.AGAIN


def test_every_size_of_a_cluster_has_a_share_of_the_multiprocessors():
    assert len(any_width_cost.CLUSTERS) == MOST + 1
    assert ((any_width_cost.CLUSTERS > 0.5) & (any_width_cost.CLUSTERS <= 1)).all()
    # Pairs of multiprocessors share a cluster.
    assert any_width_cost.CLUSTERS[2] == 1
