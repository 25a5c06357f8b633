"""Regions against brute-force enumeration, and against what numpy's views say."""

from collections.abc import Sequence
from contextlib import suppress
from itertools import product
from math import prod

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from distmega.errors import ProgramError
from distmega.kernels.tasks.footprints import Footprints
from distmega.kernels.tasks.regions import (
    Region,
    access_boxes,
    index_ranges,
    ranges_meet,
    regions_meet,
    split_digits,
    task_tiles,
    view_source,
)
from distmega.kernels.tasks.types import RangeSplit, TaskGroup
from distmega.program.builder import ProgramBuilder
from distmega.program.types import Access, Axis, Index, Op, Program, accesses
from tests.kernels.programs import even, random_programs, tile_ops

extents = st.lists(st.integers(1, 5), min_size=1, max_size=4)


@st.composite
def ranges(draw: st.DrawFn, stop: int) -> range:
    start = draw(st.integers(0, stop - 1))
    return range(start, draw(st.integers(start + 1, stop)), draw(st.integers(1, 7)))


def elements(region: Region) -> list[tuple[int, ...]]:
    return [point for box in region for point in product(*box)]


def num_elements(region: Region) -> int:
    return len(elements(region))


def cover_exactly_once(regions: list[Region], shape: Sequence[int]) -> bool:
    """Whether every element of a tensor of `shape` lies in exactly one box of `regions`."""
    found = [element for region in regions for element in elements(region)]
    return sorted(found) == sorted(product(*map(range, shape)))


@given(st.data(), extents)
def test_digits_are_those_of_every_number_once(data: st.DataObject, sizes: list[int]):
    values = data.draw(ranges(prod(sizes)))
    found = elements(split_digits(values, sizes))
    expected = {tuple(int(i) for i in np.unravel_index(v, sizes)) for v in values}
    assert len(found) == len(set(found))
    assert set(found) == expected


def test_contiguous_intervals_take_few_boxes():
    assert split_digits(range(64, 192), (4, 64)) == ((range(1, 3), range(0, 64)),)
    assert len(split_digits(range(3, 57), (3, 4, 5))) == 5
    assert len(split_digits(range(1, 5000, 2), (10, 50, 10))) <= 5
    assert split_digits(range(3), ()) == ((),)
    assert split_digits(range(0), (3,)) == ()


@given(st.data(), extents)
def test_index_reaches_every_position_once(data: st.DataObject, sizes: list[int]):
    names = [f"a{i}" for i in range(len(sizes))]
    tile = {name: data.draw(ranges(size)) for name, size in zip(names, sizes, strict=True)}
    chosen = tuple(data.draw(st.permutations(names))[: data.draw(st.integers(0, len(names)))])
    index = Index(
        axes=chosen, offset=data.draw(st.integers(-9, 9)), stride=data.draw(st.integers(1, 3))
    )
    dim, by_name = data.draw(st.integers(1, 40)), dict(zip(names, sizes, strict=True))
    found = [v for r in index_ranges(index, tile, by_name, dim) for v in r]
    expected = set()
    for point in product(*(tile[name] for name in chosen)):
        value = 0
        for name, digit in zip(chosen, point, strict=True):
            value = value * by_name[name] + digit
        expected.add(index.offset + index.stride * value)
    assert len(found) == len(set(found))
    assert set(found) == {v for v in expected if 0 <= v < dim}


@given(ranges(60), ranges(60))
def test_strided_ranges_meet_exactly_when_they_share_a_number(a: range, b: range):
    assert ranges_meet(a, b) == bool(set(a) & set(b))


def test_interleaved_ranges_do_not_meet():
    assert not ranges_meet(range(0, 100, 2), range(1, 100, 2))
    assert ranges_meet(range(0, 100, 6), range(4, 100, 10))
    assert not ranges_meet(range(0, 20, 6), range(4, 20, 10))
    assert not ranges_meet(range(0), range(5))


@given(random_programs())
def test_tasks_write_every_element_of_their_op_once(made: tuple):
    program, groups = made
    footprints = Footprints(program)
    for group in groups:
        for write in group.op.writes:
            footprint = footprints.footprint(group, write)
            regions = [footprints.region(write, group, t) for t in range(group.num_tasks)]
            found = [element for region in regions for element in elements(region)]
            assert footprints.num_elements(footprint) == len(found) == len(set(found))
            assert footprints.covers_once(footprint, len(found))
            assert not footprints.covers_once(footprint, len(found) + 1)


@st.composite
def views(draw: st.DrawFn) -> tuple[Program, str, np.ndarray]:
    """A chain of views of a state, with the flat positions it holds as numpy sees it."""
    p = ProgramBuilder("views")
    shape = draw(st.sampled_from(((24,), (4, 6), (2, 3, 4), (2, 2, 2, 3))))
    x = p.state("x", shape)
    held = np.arange(24).reshape(shape)
    for _ in range(draw(st.integers(1, 4))):
        kind = draw(st.sampled_from(("slice", "transpose", "merge", "split")))
        dim = draw(st.integers(0, len(x.shape) - 1))
        if kind == "slice":
            start = draw(st.integers(0, x.shape[dim] - 1))
            stop, step = draw(st.integers(start + 1, x.shape[dim])), draw(st.integers(1, 3))
            x = p.slice(x, dim, start, stop, step, view=True)
            held = held[(slice(None),) * dim + (slice(start, stop, step),)]
        elif kind == "transpose":
            order = draw(st.permutations(range(len(x.shape))))
            x, held = p.transpose(x, order, view=True), held.transpose(order)
        else:
            new = list(x.shape)
            if kind == "merge" and dim + 1 < len(new):
                new[dim : dim + 2] = [new[dim] * new[dim + 1]]
            elif kind == "split" and new[dim] % 2 == 0:
                new[dim : dim + 1] = [2, new[dim] // 2]
            with suppress(ProgramError):  # dims that no view can join stay apart
                x, held = p.reshape(x, new, view=True), held.reshape(new)
    return p.build(x.map("a0", name="y")), x.name, held


@given(st.data(), views())
def test_views_resolve_to_the_elements_they_share(data: st.DataObject, view: tuple):
    program, name, held = view
    shapes = {tensor.name: tensor.shape for tensor in program.tensors}
    box = tuple(data.draw(ranges(extent)) for extent in held.shape)
    region: Region = (box,)
    for op in reversed(program.ops):
        if op.is_view:
            region = view_source(region, op, shapes[op.reads[0].tensor])
    flat = [int(np.ravel_multi_index(e, shapes["x"])) for e in elements(region)]
    assert len(flat) == len(set(flat))
    assert set(flat) == set(held[np.ix_(*box)].ravel().tolist())
    group = TaskGroup(op=program.ops[-1])
    footprints = Footprints(program)
    assert footprints.base(name) == "x"
    read = footprints.region(program.ops[-1].reads[0], group, 0)
    assert num_elements(read) == held.size


def test_views_of_another_form_are_refused():
    axis, plain = Axis(name="a", extent=3), (Index(axes=("a",)),)
    shifted = Access(tensor="v", dims=(Index(axes=("a",), offset=1),))
    view = Op(
        name="v",
        kind="view",
        axes=(axis,),
        reads=(Access(tensor="x", dims=plain),),
        writes=(shifted,),
    )
    with pytest.raises(ProgramError, match="indexed by plain axes"):
        view_source(((range(3),),), view, (3,))


@given(random_programs())
def test_overlap_of_all_tasks_is_that_of_their_elements(made: tuple):
    program, groups = made
    footprints = Footprints(program)
    uses = [(group, access) for group in groups for access in accesses(group.op)]
    touched = {
        (place, task): set(elements(footprints.region(access, group, task)))
        for place, (group, access) in enumerate(uses)
        for task in range(group.num_tasks)
    }
    for i, (one, a) in enumerate(uses):
        for j, (other, b) in enumerate(uses):
            if footprints.base(a.tensor) == footprints.base(b.tensor):
                found = footprints.overlap(
                    footprints.footprint(one, a), footprints.footprint(other, b)
                )
                expected = [
                    [bool(touched[i, s] & touched[j, t]) for t in range(other.num_tasks)]
                    for s in range(one.num_tasks)
                ]
                assert found.tolist() == expected


@given(random_programs())
def test_tiles_cut_the_iteration_space_exactly(made: tuple):
    for group in made[1]:
        sizes = [axis.extent for axis in group.op.axes]
        names = [axis.name for axis in group.op.axes]
        tiles = [
            tuple(tile[name] for name in names)
            for task in range(group.num_tasks)
            for tile in task_tiles(group, task)
        ]
        assert cover_exactly_once([tuple(tiles)], sizes)


def test_equal_layers_share_footprints():
    p = ProgramBuilder("layers")
    x = p.state("x", (16, 8))
    for i in range(3):
        x = x.map("a0", name=f"y{i}")
    program = p.build(x)
    groups = tile_ops(program, **{f"y{i}": (even("i0", 16, 4),) for i in range(3)})
    footprints = Footprints(program)
    assert len({footprints.footprint(group, group.op.writes[0]) for group in groups}) == 1


def test_concat_reads_only_the_operand_a_tile_lies_in():
    p = ProgramBuilder("concat")
    xs = [p.state(f"x{i}", (extent, 4)) for i, extent in enumerate((3, 5))]
    program = p.build(p.concat(xs, 0, name="y"))
    group = TaskGroup(op=program.ops[0], splits=(RangeSplit(axes=("i0",), bounds=(0, 2, 4, 8)),))
    rows = [
        [
            access_boxes(read, task_tiles(group, task), {"i0": 8, "i1": 4}, shape)
            for task in range(3)
        ]
        for read, shape in zip(group.op.reads, ((3, 4), (5, 4)), strict=True)
    ]
    assert [[num_elements(region) // 4 for region in operand] for operand in rows] == [
        [2, 1, 0],
        [0, 1, 4],
    ]
    assert regions_meet(rows[0][0], ((range(1, 2), range(4)),))
