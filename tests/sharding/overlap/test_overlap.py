"""Matmuls and their collectives: which are pairs, what each way takes, what is chosen."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from distmega.errors import PlanError
from distmega.kernels.gemm.times.matmul_ways import tiles_choice
from distmega.kernels.gemm.times.tile_times import WHOLE
from distmega.kernels.gemm.times.ways import rates_of
from distmega.kernels.machines import CPU, H100, H200
from distmega.program.builder import ProgramBuilder
from distmega.program.types import Program
from distmega.sharding.layout.mesh import DeviceMesh
from distmega.sharding.layout.placements import replicate, shard, stream
from distmega.sharding.overlap.pairs import Overlap
from distmega.sharding.overlap.products import Extents, Product, Way
from distmega.sharding.planner import plan_program

TP = DeviceMesh(tp=2)
ROWS, COLUMNS = shard(0, "tp"), shard(1, "tp")
EXTENTS = Extents(rows=4096, columns=5120, depth=8192, num_ranks=2)
BACK = replace(EXTENTS, columns=8192, depth=5120)
GATHERING = Product(collective="all_gather", extents=EXTENTS, dtype="bf16")
SCATTERING = Product(collective="reduce_scatter", extents=BACK, dtype="bf16")
REDUCING = replace(SCATTERING, collective="all_reduce")


def one_linear(*, rows: int = 512, bias: bool = False, twice: bool = False) -> Program:
    p = ProgramBuilder("one")
    x, w = p.input("x", (rows, 256), "bf16"), p.weight("w", (512, 256), "bf16")
    b = p.weight("b", (512,), "bf16") if bias else None
    y = p.linear(x, w, b, name="y")
    return p.build(y, x.map("a0 * 2.0", name="z")) if twice else p.build(y)


def pairs(program: Program, marks: dict, mesh: DeviceMesh = TP) -> list[str]:
    return [c.pair.kind for c in plan_program(program, mesh, H200, marks).overlaps]


def test_what_is_a_pair():
    gathered = {"x": ROWS, "w": ROWS, "y": COLUMNS}
    summed = {"x": COLUMNS, "w": COLUMNS}
    assert pairs(one_linear(), gathered) == ["all_gather_matmul"]
    assert pairs(one_linear(), {**summed, "y": ROWS}) == ["matmul_reduce_scatter"]
    assert pairs(one_linear(), summed) == ["matmul_all_reduce"]
    assert pairs(one_linear(), {"w": ROWS, "y": COLUMNS}) == []
    assert pairs(one_linear(bias=True), gathered) == []


@pytest.mark.parametrize(
    ("marks", "replicated"),
    [({"w": replicate(), "y": replicate()}, True), ({"w": ROWS, "y": COLUMNS}, False)],
)
def test_tiles_stay_whole_where_all_ranks_compute_the_same(marks: dict, replicated: bool):
    """Rows come to each rank in an order of its own, so its last wave has tiles of its own."""
    p = ProgramBuilder("wide")
    x, w = p.input("x", (4096, 512), "bf16"), p.weight("w", (5120, 512), "bf16")
    program = p.build(p.linear(x, w, name="y"))
    (choice,) = plan_program(program, TP, H200, {"x": ROWS} | marks).overlaps
    extents = choice.pair.product.extents
    assert (choice.pair.kind, extents.replicated) == ("all_gather_matmul", replicated)
    deep = replace(extents, depth=8192, columns=5120)
    assert (tiles_choice("all_gather", deep, rates_of(H200)).split == WHOLE) == replicated


def test_a_sum_over_ranks_in_front_of_a_matmul_is_in_no_pair():
    p = ProgramBuilder("front")
    h = p.reduce(p.input("x", (4, 512, 256), "bf16"), 0, name="h")
    program = p.build(p.linear(h, p.weight("w", (512, 256), "bf16"), name="y"))
    marks = {"x": ROWS, "w": ROWS, "y": COLUMNS}
    plan = plan_program(program, TP, H200, marks)
    assert any(step.reads == ("h.partial",) for step in plan.steps)
    assert not plan.overlaps


def test_what_others_read_as_well_is_in_no_pair():
    marks = {"x": ROWS, "w": ROWS, "y": COLUMNS}
    assert pairs(one_linear(twice=True), {**marks, "z": ROWS}) == ["all_gather_matmul"]
    plan = plan_program(one_linear(twice=True), TP, H200, {**marks, "z": COLUMNS})
    assert sum("x.whole" in step.reads for step in plan.steps) == 2
    assert not plan.overlaps


def test_chunks_that_a_user_asked_for_leave_no_pair():
    marks = {"x": ROWS, "w": ROWS, "y": COLUMNS | stream(0, 2, ring="tp")}
    plan = plan_program(one_linear(), TP, H200, marks)
    assert plan.host_loops
    assert not plan.overlaps


class Asked:
    """A model of overlap by which one way is the fastest."""

    host_us = replay_us = 1.0
    rank_rows = 1

    def __init__(self, way: Way) -> None:
        self.way, self.products = way, list[Product]()

    def way_times_us(self, product: Product, chunk_counts: Sequence[int], *, peer_copies: bool):
        self.products.append(product)
        ways = {("sequential", 0): 9.0, ("kernel", 0): 9.0, ("ring", 2): 9.0, ("chunks", 4): 9.0}
        return ways | {key: 1.0 for key in ways if key[0] == self.way}, {}


@pytest.mark.parametrize("way", ["sequential", "kernel", "ring", "chunks"])
def test_the_model_that_the_machine_brings_decides(way: Way):
    model = Asked(way)
    marks = {"x": COLUMNS, "w": COLUMNS, "y": ROWS}
    plan = plan_program(one_linear(), TP, replace(H200, overlap=model), marks)
    assert [choice.way for choice in plan.overlaps] == [way]
    extents = Extents(rows=512, columns=512, depth=128, num_ranks=2)
    assert set(model.products) == {
        Product(collective="reduce_scatter", extents=extents, dtype="bf16")
    }


@pytest.mark.parametrize("product", [GATHERING, SCATTERING, REDUCING])
@pytest.mark.parametrize("machine", [H100, H200])
def test_one_kernel_wins_where_matmuls_are_long(product: Product, machine):
    times, _ = machine.overlap.way_times_us(product, (2, 4))
    assert min(times, key=lambda way: times[way]) == ("kernel", 0)
    assert times["kernel", 0] < 0.95 * times["sequential", 0]


@pytest.mark.parametrize(
    ("product", "way", "measured_us"),
    [
        (GATHERING, ("sequential", 0), 606),
        (GATHERING, ("ring", 2), 512),
        (GATHERING, ("kernel", 0), 449),
        (SCATTERING, ("sequential", 0), 617),
        (SCATTERING, ("kernel", 0), 493),
        (REDUCING, ("sequential", 0), 729),
        (REDUCING, ("chunks", 2), 727),
        (REDUCING, ("chunks", 4), 782),
    ],
)
def test_times_are_near_what_was_measured(product: Product, way, measured_us: float):
    """On two H200s, docs/notes/host_overlap.md."""
    times, _ = H200.overlap.way_times_us(product, (2, 4))
    assert times[way] == pytest.approx(measured_us, rel=0.15)


@pytest.mark.parametrize("product", [GATHERING, SCATTERING, REDUCING])
def test_nothing_is_gained_where_ranks_share_cores(product: Product):
    times, _ = CPU.overlap.way_times_us(product, (2, 4))
    assert min(times, key=lambda way: times[way]) == ("sequential", 0)


def test_why_a_way_is_impossible():
    assert H200.overlap.way_times_us(REDUCING, ())[1] == {
        "chunks": "at most 4096 chunks",
        "ring": "an all-gather or a reduce-scatter",
    }
    refused = H200.overlap.way_times_us(
        replace(GATHERING, extents=replace(EXTENTS, rows=4100)), (2,)
    )[1]
    assert refused["kernel"] == "rows a multiple of 256 and columns of 8, not 4100 x 5120"
    assert "f32" in H200.overlap.way_times_us(replace(GATHERING, dtype="f32"), (2,))[1]["kernel"]
    assert (
        "2 to 8 ranks"
        in H200.overlap.way_times_us(replace(REDUCING, extents=replace(BACK, num_ranks=16)), ())[1][
            "kernel"
        ]
    )


def test_a_way_for_one_pair_leaves_the_others():
    p = ProgramBuilder("two")
    x = p.input("x", (512, 256), "bf16")
    h = p.linear(x, p.weight("w1", (512, 256), "bf16"), name="h")
    program = p.build(p.linear(h, p.weight("w2", (256, 512), "bf16"), name="y"))
    marks = {"x": ROWS, "w1": ROWS, "h": COLUMNS, "w2": COLUMNS, "y": ROWS}
    asked = {"h": "kernel", "y": Overlap(way="chunks", num_chunks=4)}
    plan = plan_program(program, TP, H200, marks, overlap=asked)
    assert [(c.way, c.num_chunks, c.forced) for c in plan.overlaps] == [
        ("kernel", 0, True), ("chunks", 4, True),
    ]  # fmt: skip
    assert [loop.num_chunks for loop in plan.host_loops] == [4]
    assert "chunks of 4, as asked" in plan.explain()
    with pytest.raises(PlanError, match=r"there are \['h', 'y'\]"):
        plan_program(program, TP, H200, marks, overlap={"x": "kernel"})


def test_what_feeds_a_ring_stays_whole():
    p = ProgramBuilder("fed")
    x = p.input("x", (512, 256), "bf16")
    h = p.linear(x, p.weight("w1", (512, 256), "bf16"), name="h").map("relu(a0)", name="act")
    program = p.build(p.linear(h, p.weight("w2", (256, 512), "bf16"), name="y"))
    marks = {"w1": ROWS, "h": COLUMNS, "w2": COLUMNS, "y": ROWS}
    plan = plan_program(program, TP, H200, marks, overlap="ring")
    (loop,) = plan.host_loops
    assert [name for name, _ in loop.splits] == ["y", "y.reduce_scatter"]


@pytest.mark.parametrize(
    ("way", "num_chunks", "words"),
    [
        ("fast", 0, "one of sequential, chunks, ring, kernel"),
        ("chunks", 1, "at least 2"),
        ("kernel", 4, 'with overlap "chunks"'),
    ],
)
def test_requests_are_checked(way: str, num_chunks: int, words: str):
    with pytest.raises(PlanError, match=words):
        Overlap(way=way, num_chunks=num_chunks)
