"""Domains under random transforms against brute force: positions, and whether two sides agree."""

from collections.abc import Sequence
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distmega.errors import VerifyError
from distmega.program.types import Index
from distmega.sharding.layout.domains import (
    Device,
    LoopDomain,
    Merge,
    Parallel,
    Split,
    Stream,
    Swizzle,
    Task,
    dim_positions,
)
from distmega.sharding.layout.equality import Side, shardings_differ
from distmega.sharding.layout.mesh import DeviceMesh

MESH = DeviceMesh(dp=2, tp=2)
Place = dict[Parallel, int]


def values(domain: LoopDomain, place: Place) -> list[dict[str, int]]:
    """Root values at a place, one by one: every value of every axis, transforms undone."""
    found = []
    for digits in product(*(range(axis.extent) for axis in domain.axes)):
        known = dict(zip((axis.name for axis in domain.axes), digits, strict=True))
        if any(
            place.get(axis.parallel, known[axis.name]) != known[axis.name] for axis in domain.axes
        ):
            continue
        real = True
        for t in reversed(domain.transforms):
            if isinstance(t, Split):
                known[t.source] = known[t.outer] * t.inner_extent + known[t.inner]
                real = real and known[t.source] < t.extent
            elif isinstance(t, Merge):
                known[t.outer], known[t.inner] = divmod(known[t.result], t.inner_extent)
            else:
                shift = t.shift + place.get(Device(t.axis), 0)
                known[t.source] = (known[t.result] + shift) % t.extent
        if real:
            found.append({root: known[root] for root, _ in domain.roots})
    return found


def position(domain: LoopDomain, index: Index, at: dict[str, int]) -> int:
    digits = 0
    for name in index.axes:
        digits = digits * dict(domain.roots)[name] + at[name]
    return digits * index.stride + index.offset


def touched(shape: tuple[int, ...], side: Side, place: Place) -> set[tuple[int, ...]]:
    """Elements of a tensor that a side touches."""
    domain, dims = side
    found = {tuple(position(domain, index, at) for index in dims) for at in values(domain, place)}
    return {each for each in found if all(0 <= p < e for p, e in zip(each, shape, strict=True))}


@st.composite
def domains(draw: st.DrawFn, roots: list[tuple[str, int]]) -> LoopDomain:
    """Splits, merges, swizzles and a new order; devices, a stream and tasks on any axes."""
    domain = LoopDomain.of(roots)
    for _ in range(draw(st.integers(0, 3))):
        axis = draw(st.sampled_from(domain.axes))
        match draw(st.sampled_from(("split", "merge", "swizzle"))):
            case "split":
                factor, outer = draw(st.integers(1, 4)), draw(st.booleans())
                domain = domain.split(axis.name, factor, outer=outer)
            case "merge" if len(domain.axes) > 1:
                other = draw(st.sampled_from([a for a in domain.axes if a != axis]))
                domain = domain.merge(axis.name, other.name)
            case "swizzle":
                mesh_axis = draw(st.sampled_from(MESH.names))
                domain = domain.swizzle(axis.name, mesh_axis, draw(st.integers(0, 2)))
    for parallel in draw(st.sets(st.sampled_from(("dp", "tp", "stream", "task")))):
        axis = draw(st.sampled_from(domain.axes))
        marks = {"stream": Stream(), "task": Task()}
        if parallel in MESH.names:
            domain = domain.split(axis.name, MESH.size(parallel), outer=True)
            axis = domain.axis(f"{axis.name}.o")
        if str(axis.parallel) == "Serial":
            domain = domain.parallelize(axis.name, marks.get(parallel, Device(parallel)))
    return domain.reorder(draw(st.permutations([axis.name for axis in domain.axes])))


SHAPE = (4, 3)
FLAT = Index(axes=("i", "j"))
ACCESSES = {
    SHAPE: [Index(axes=("i",)), Index(axes=("j",))],
    SHAPE[::-1]: [Index(axes=("j",)), Index(axes=("i",))],
    (12,): [FLAT],
    (5, 8): [Index(axes=("i",), offset=1), Index(axes=("j",), stride=3)],
}


def places(axes: tuple[Parallel, ...], counts: tuple[int, ...]) -> list[Place]:
    return [dict(zip(axes, at, strict=True)) for at in product(*map(range, counts))]


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(list(ACCESSES)), st.data())
def test_positions_are_what_brute_force_finds(shape: tuple[int, ...], data: st.DataObject):
    domain = data.draw(domains([("i", 4), ("j", 3)]))
    dims = ACCESSES[shape]
    kinds: tuple[Parallel, ...] = (Device("dp"), Device("tp"), Stream(), Task())
    counts = (2, 2, domain.extent_of(Stream()), domain.extent_of(Task()))
    whole: set[tuple[int, ...]] = set()
    for place in places(kinds, counts):
        held = touched(shape, (domain, dims), place)
        whole |= held
        for dim, index in enumerate(dims):
            ranges = dim_positions(domain, index, shape[dim], place)
            found = {p for a, b in ranges for p in range(a, b)}
            assert found >= {each[dim] for each in held}
            if held and len(domain.roots) == len(dims):
                assert found == {each[dim] for each in held}
    every = LoopDomain.of([("i", 4), ("j", 3)])
    if not any(isinstance(t, Swizzle) for t in domain.transforms):
        assert whole == touched(shape, (every, dims), {}), "nothing is lost"


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(list(ACCESSES)), st.sampled_from(MESH.names), st.data())
def test_device_shardings_agree_when_each_coordinate_touches_the_same(
    shape: tuple[int, ...], axis: str, data: st.DataObject
):
    roots = [("i", 4), ("j", 3)]
    sides = [(data.draw(domains(roots)), ACCESSES[shape]) for _ in range(2)]
    if data.draw(st.booleans()):
        sides[1] = sides[0][0].reorder([sides[0][0].axes[-1].name]), sides[0][1]
    ranks = [{Device(name): c for name, c in at.items()} for at in MESH.coordinates()]
    held = [[touched(shape, side, rank) for rank in ranks] for side in sides]

    def along(name: str) -> list[list[set[tuple[int, ...]]]]:
        """What the ranks of each coordinate touch together, on either side."""
        of = [rank[Device(name)] for rank in ranks]
        each = range(MESH.size(name))
        return [
            [set().union(*(x for x, c in zip(one, of, strict=True) if c == at)) for at in each]
            for one in held
        ]

    told = {name: along(name)[0] != along(name)[1] for name in MESH.names}
    divides = any(side[0].extent_of(Device(axis)) > 1 for side in sides)
    hidden = divides and held[0] != held[1] and not any(told.values())
    assert shardings_differ(shape, *sides, Device(axis), MESH) == (told[axis] or hidden)


def of_roots(domain: LoopDomain, roots: Sequence[str]) -> LoopDomain:
    """What becomes of some roots, where none are merged."""

    def is_own(name: str) -> bool:
        return name.partition(".")[0] in roots

    return LoopDomain(
        roots=tuple(pair for pair in domain.roots if is_own(pair[0])),
        transforms=tuple(
            t for t in domain.transforms if not isinstance(t, Merge) and is_own(t.source)
        ),
        axes=tuple(axis for axis in domain.axes if is_own(axis.name)),
    )


def streamed_positions(
    shape: tuple[int, ...], side: Side, at: Place, count: int, *, whole: bool
) -> list[list[set[tuple[int, ...]]]]:
    """What each of `count` iterations touches on a rank: of the tensor as a whole, or of each dim
    by itself, which takes a domain without merges.
    """
    each = [(shape, side)]
    if not whole:
        each = [
            ((extent,), (of_roots(side[0], dim.axes), [dim]))
            for extent, dim in zip(shape, side[1], strict=True)
        ]
    return [
        [touched(extents, part, {**at, Stream(): s}) for s in range(count)]
        for extents, part in each
    ]


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(list(ACCESSES)), st.data())
def test_streams_agree_when_no_iteration_or_each_touches_the_same(
    shape: tuple[int, ...], data: st.DataObject
):
    roots = [("i", 4), ("j", 3)]
    sides = [(data.draw(domains(roots)), ACCESSES[shape]) for _ in range(2)]
    if data.draw(st.booleans()):
        sides[1] = sides[0]
    count = max(side[0].extent_of(Stream()) for side in sides)
    whole = any(isinstance(t, Merge) for side in sides for t in side[0].transforms)
    expected = False
    for coordinate in MESH.coordinates():
        at: Place = {Device(name): c for name, c in coordinate.items()}
        made, used = (streamed_positions(shape, side, at, count, whole=whole) for side in sides)
        for one, other in zip(made, used, strict=True):
            constant = all(x == one[0] for x in one) and all(x == other[0] for x in other)
            expected |= not constant and one != other
    assert shardings_differ(shape, *sides, Stream(), MESH) == expected


def test_stream_and_device_on_one_dim_differ_by_their_order():
    outer = LoopDomain.of([("i", 12)]).split("i", 2, outer=True).parallelize("i.o", Stream())
    outer = outer.split("i.i", 3, outer=True).parallelize("i.i.o", Device("tp"))
    inner = LoopDomain.of([("i", 12)]).shard("i", "tp", 3)
    inner = inner.split("i.i", 2, outer=True).parallelize("i.i.o", Stream())
    row = [Index(axes=("i",))]
    assert outer.positions("i", {Device("tp"): 1}) == ((2, 4), (8, 10))
    assert inner.positions("i", {Device("tp"): 1}) == ((4, 8),)
    for kind in (Device("tp"), Stream()):
        assert shardings_differ((12,), (outer, row), (inner, row), kind, MESH)
        assert not shardings_differ((12,), (outer, row), (outer, row), kind, MESH)


def test_several_tasks_are_dims_of_one_grid():
    domain = LoopDomain.of([("i", 4), ("j", 6)]).split("j", 2)
    domain = domain.parallelize("i", Task()).parallelize("j.o", Task(1))
    assert str(domain) == "[i:4 Task, j.o:3 Task(1), j.i:2]"
    assert domain.positions("j", {Task(): 3, Task(1): 2}) == ((4, 6),)
    with pytest.raises(VerifyError, match="merge the two first"):
        domain.parallelize("j.i", Task(1))
