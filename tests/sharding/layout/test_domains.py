"""Splits, merges, swizzles: positions per parallel coordinate, and shardings compared by them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distmega.errors import VerifyError
from distmega.program.types import Index
from distmega.sharding.layout.domains import (
    Device,
    LoopDomain,
    Serial,
    Stream,
    Task,
    dim_positions,
)
from distmega.sharding.layout.equality import shardings_differ
from distmega.sharding.layout.mesh import DeviceMesh

TP = DeviceMesh(tp=2)


def vector(extent: int) -> LoopDomain:
    return LoopDomain.of([("i", extent)])


def matrix(rows: int, columns: int) -> LoopDomain:
    return LoopDomain.of([("i", rows), ("j", columns)])


ROWS = (Index(axes=("i",)), Index(axes=("j",)))


def test_an_outer_split_gives_each_rank_a_block():
    domain = vector(9).shard("i", "tp", 2)
    assert str(domain) == "[i.o:2 Device(tp), i.i:5]"
    assert domain.positions("i", {Device("tp"): 0}) == ((0, 5),)
    assert domain.positions("i", {Device("tp"): 1}) == ((5, 9),)
    assert domain.positions("i", {}) == ((0, 9),)


def test_an_inner_split_interleaves():
    domain = vector(7).split("i", 2).parallelize("i.i", Task())
    assert domain.axis("i.o").extent == 4
    assert domain.positions("i", {Task(): 1}) == ((1, 2), (3, 4), (5, 6))


def test_ranks_past_the_end_have_nothing():
    domain = vector(9).shard("i", "tp", 8)
    assert domain.positions("i", {Device("tp"): 4}) == ((8, 9),)
    assert domain.positions("i", {Device("tp"): 5}) == ()


def test_a_merge_runs_both_axes():
    domain = matrix(3, 4).merge("i", "j").split("i&j", 5, outer=True)
    domain = domain.parallelize("i&j.o", Device("tp"))
    assert domain.positions("i", {Device("tp"): 1}) == ((0, 2),)
    assert domain.positions("j", {Device("tp"): 1}) == ((0, 2), (3, 4))
    pairs = [domain.enumerate(("i", "j"), {Device("tp"): r}) for r in range(4)]
    found = [pair for p in pairs for pair in zip(p["i"], p["j"], strict=True)]
    assert sorted(found) == [(i, j) for i in range(3) for j in range(4)]


def test_a_ring_visits_every_block_once_from_the_own_one():
    domain = vector(8).split("i", 4, outer=True).swizzle("i.o", "tp")
    domain = domain.parallelize("i.o.r", Stream())
    visits = [domain.positions("i", {Stream(): s, Device("tp"): 3}) for s in range(4)]
    assert visits == [((6, 8),), ((0, 2),), ((2, 4),), ((4, 6),)]


def test_reorder_moves_axes_in_front_and_keeps_the_rest():
    domain = LoopDomain.of([("a", 2), ("b", 3), ("c", 4)]).reorder(["c", "a"])
    assert [axis.name for axis in domain.axes] == ["c", "a", "b"]
    assert [axis.parallel for axis in domain.axes] == [Serial()] * 3


@pytest.mark.parametrize(
    "make",
    [
        lambda: vector(4).split("x", 2),
        lambda: vector(4).split("i", 0),
        lambda: matrix(4, 4).shard("i", "tp", 2).shard("j", "tp", 2),
        lambda: vector(4).split("i", 2).axis("i"),
        lambda: vector(4).split("i", 2.0),
        lambda: vector(4).split("i", True),
        lambda: vector(4).merge("i", "i"),
        lambda: matrix(4, 4).reorder(["i", "i"]),
        lambda: LoopDomain.of([("i", 2), ("i", 3)]),
        lambda: LoopDomain.of([("i", 4), ("i.o", 3)]).split("i", 2),
    ],
)
def test_bad_transforms_are_refused(make):
    with pytest.raises(VerifyError):
        make()


@given(st.data())
def test_transforms_lose_and_repeat_nothing(data):
    """However a domain is transformed, its parallel coordinates cover every value exactly once."""
    extent = data.draw(st.integers(1, 30))
    domain = vector(extent)
    for _ in range(data.draw(st.integers(0, 3))):
        axis = data.draw(st.sampled_from(domain.axes))
        factor = data.draw(st.integers(1, 5))
        domain = domain.split(axis.name, factor, outer=data.draw(st.booleans()))
    names = [axis.name for axis in domain.axes]
    if data.draw(st.booleans()):
        domain = domain.swizzle(names[0], "ring")
        names[0] += ".r"
    domain = domain.parallelize(names[0], Device("tp"))
    marks: list = [Device("tp")]
    if len(names) > 1:
        domain, marks = domain.parallelize(names[1], Stream()), [*marks, Stream()]
    shift = {Device("ring"): data.draw(st.integers(0, 3))} if names[0].endswith(".r") else {}
    found = []
    for r in range(domain.extent_of(Device("tp"))):
        for s in range(domain.extent_of(Stream())):
            place = {Device("tp"): r, **({Stream(): s} if len(marks) > 1 else {}), **shift}
            found += [v for a, b in domain.positions("i", place) for v in range(a, b)]
    assert sorted(found) == list(range(extent))


@pytest.mark.parametrize(
    ("index", "expected"),
    [
        (Index(axes=("i",), offset=1), ((4, 6),)),
        (Index(axes=("i",), stride=2), ((6, 7), (8, 9))),
        (Index(axes=("i", "j")), ((12, 20),)),
        (Index(axes=("j", "i")), ((3, 5), (8, 10), (13, 15), (18, 20))),
        (Index(offset=2), ((2, 3),)),
    ],
)
def test_positions_of_a_dim_follow_its_index(index, expected):
    domain = matrix(5, 4).shard("i", "tp", 2)
    assert dim_positions(domain, index, 20, {Device("tp"): 1}) == expected


def test_case_n10_equal_shardings_are_equal_index_maps():
    def streamed(axis: str) -> LoopDomain:
        return matrix(4, 6).split(axis, 2, outer=True).parallelize(f"{axis}.o", Stream())

    shape = (4, 6)
    same = (shape, (streamed("i"), ROWS), (streamed("i"), ROWS))
    assert not shardings_differ(*same, Stream(), TP)
    across = (shape, (streamed("i"), ROWS), (streamed("j"), ROWS))
    assert shardings_differ(*across, Stream(), TP)
    assert not shardings_differ(*across, Device("tp"), TP)


def test_case_n10_a_ring_swizzle_reshards_device_and_stream():
    shape = (4, 6)
    sharded = matrix(4, 6).shard("i", "tp", 2)
    ring = matrix(4, 6).split("i", 2, outer=True).swizzle("i.o", "tp")
    ring = ring.parallelize("i.o.r", Stream())
    assert shardings_differ(shape, (sharded, ROWS), (ring, ROWS), Device("tp"), TP)
    assert shardings_differ(shape, (sharded, ROWS), (ring, ROWS), Stream(), TP)
    plain = matrix(4, 6).split("i", 2, outer=True).parallelize("i.o", Stream())
    assert shardings_differ(shape, (plain, ROWS), (ring, ROWS), Stream(), TP)


def test_parts_of_one_axis_that_go_round_another_are_resharded():
    """Each of four ranks reads the half that another one wrote, and no axis shows it by itself."""
    mesh = DeviceMesh(dp=2, tp=2)
    halves = matrix(4, 6).split("i", 2, outer=True)
    made, used = (
        halves.swizzle("i.o", "dp", shift).parallelize("i.o.r", Device("tp")) for shift in (0, 1)
    )
    found = [
        shardings_differ((4, 6), (made, ROWS), (side, ROWS), Device(axis), mesh)
        for side in (made, used)
        for axis in mesh.names
    ]
    assert found == [False, False, False, True]


def test_shardings_are_compared_by_positions_not_names():
    """Splitting h of a dim h.d is splitting the dim in two only if both come out even."""
    for heads, differ in ((4, False), (3, True)):
        folded = LoopDomain.of([("h", heads), ("d", 8)]).shard("h", "tp", 2)
        flat = LoopDomain.of([("n", heads * 8)]).shard("n", "tp", 2)
        sides = (folded, [Index(axes=("h", "d"))]), (flat, [Index(axes=("n",))])
        assert shardings_differ((heads * 8,), *sides, Device("tp"), TP) is differ


def test_a_stream_inside_a_shard_agrees_with_the_same_stream():
    both = matrix(4, 6).shard("i", "tp", 2).split("j", 3, outer=True)
    both = both.parallelize("j.o", Stream())
    only = matrix(4, 6).split("j", 3, outer=True).parallelize("j.o", Stream())
    assert not shardings_differ((4, 6), (both, ROWS), (only, ROWS), Stream(), TP)
    assert shardings_differ((4, 6), (both, ROWS), (only, ROWS), Device("tp"), TP)


def test_mesh_axes_are_compared_one_by_one():
    mesh = DeviceMesh(dp=2, tp=3)
    rows = matrix(4, 6).shard("i", "dp", 2)
    both = rows.shard("j", "tp", 3)
    assert not shardings_differ((4, 6), (rows, ROWS), (both, ROWS), Device("dp"), mesh)
    assert shardings_differ((4, 6), (rows, ROWS), (both, ROWS), Device("tp"), mesh)


def test_a_merged_split_is_compared_point_by_point():
    """Equal ranges in every dim are not enough where the parts are no boxes."""
    merged = matrix(4, 4).merge("i", "j").split("i&j", 2).parallelize("i&j.i", Device("tp"))
    columns = matrix(4, 4).split("j", 2).parallelize("j.i", Device("tp"))
    turned = matrix(4, 4).merge("j", "i").split("j&i", 2).parallelize("j&i.i", Device("tp"))
    for other, differ in ((columns, False), (turned, True)):
        sides = (merged, ROWS), (other, ROWS)
        assert shardings_differ((4, 4), *sides, Device("tp"), TP) is differ


@pytest.mark.parametrize(("shape", "dims"), [((), []), ((1,), [Index()])])
def test_a_number_is_everywhere_however_axes_are_merged(shape, dims):
    domain = matrix(4, 6).merge("i", "j").split("i&j", 2, outer=True)
    devices, streams = (domain.parallelize("i&j.o", kind) for kind in (Device("tp"), Stream()))
    plain = LoopDomain.of([])
    assert not shardings_differ(shape, (devices, dims), (plain, dims), Device("tp"), TP)
    assert not shardings_differ(shape, (streams, dims), (plain, dims), Stream(), TP)
