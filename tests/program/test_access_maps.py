"""Access maps of data movement, walked point by point, give what numpy gives."""

import itertools
from collections.abc import Iterator

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from distmega.program.ops import data_movement
from distmega.program.ops.parts import Built
from distmega.program.types import Access, Index, Op, Tensor

shapes = st.lists(st.integers(1, 5), min_size=1, max_size=3).map(tuple)


def points(op: Op) -> Iterator[dict[str, int]]:
    """Every point of the iteration space."""
    names = [axis.name for axis in op.axes]
    for values in itertools.product(*(range(axis.extent) for axis in op.axes)):
        yield dict(zip(names, values, strict=True))


def position(op: Op, index: Index, point: dict[str, int]) -> int:
    """Where an index points: its axes are mixed-radix digits, outer first."""
    digits = 0
    for name in index.axes:
        digits = digits * op.axis(name).extent + point[name]
    return index.offset + index.stride * digits


def moved(built: Built, operands: dict[str, np.ndarray]) -> np.ndarray:
    """The output of an op that copies what it reads; every element is written exactly once."""
    op, (out,) = built
    result = np.full(out.shape, -1)
    for point in points(op):
        where = locate(op, op.writes[0], point)
        for read in op.reads:
            source, place = operands[read.tensor], locate(op, read, point)
            if all(0 <= at < extent for at, extent in zip(place, source.shape, strict=True)):
                assert result[where] == -1
                result[where] = source[place]
    assert (result >= 0).all()
    return result


def locate(op: Op, access: Access, point: dict[str, int]) -> tuple[int, ...]:
    return tuple(position(op, index, point) for index in access.dims)


def filled(*shape: int, start: int = 0) -> np.ndarray:
    return start + np.arange(np.prod(shape, dtype=int)).reshape(shape)


def tensor(name: str, array: np.ndarray) -> Tensor:
    return Tensor(name=name, shape=array.shape, dtype="i64", role="input")


@given(st.data(), shapes)
def test_transpose(data: st.DataObject, shape: tuple[int, ...]):
    x = filled(*shape)
    order = data.draw(st.permutations(range(len(shape))))
    built = data_movement.transpose("y", tensor("x", x), order)
    np.testing.assert_array_equal(moved(built, {"x": x}), x.transpose(order))


@given(st.data(), shapes)
def test_slice(data: st.DataObject, shape: tuple[int, ...]):
    x = filled(*shape)
    dim = data.draw(st.integers(-len(shape), len(shape) - 1))
    start = data.draw(st.integers(0, shape[dim] - 1))
    stop = data.draw(st.integers(start + 1, shape[dim]))
    step = data.draw(st.integers(1, 6))
    built = data_movement.slice_dim("y", tensor("x", x), dim, start, stop, step)
    expected = x.swapaxes(0, dim)[start:stop:step].swapaxes(0, dim)
    np.testing.assert_array_equal(moved(built, {"x": x}), expected)


@given(st.data(), shapes)
def test_concat(data: st.DataObject, shape: tuple[int, ...]):
    dim = data.draw(st.integers(0, len(shape) - 1))
    extents = data.draw(st.lists(st.integers(1, 3), min_size=1, max_size=3))
    arrays = {}
    for number, extent in enumerate(extents):
        part = (*shape[:dim], extent, *shape[dim + 1 :])
        arrays[f"x{number}"] = filled(*part, start=1000 * number)
    built = data_movement.concat("y", [tensor(name, array) for name, array in arrays.items()], dim)
    np.testing.assert_array_equal(moved(built, arrays), np.concatenate([*arrays.values()], dim))


@given(st.data(), st.lists(st.integers(1, 4), min_size=1, max_size=4))
def test_reshape(data: st.DataObject, factors: list[int]):
    x = filled(*regroup(data, factors))
    shape = regroup(data, factors)
    built = data_movement.reshape("y", tensor("x", x), shape)
    np.testing.assert_array_equal(moved(built, {"x": x}), x.reshape(shape))


def regroup(data: st.DataObject, factors: list[int]) -> tuple[int, ...]:
    """A shape whose dims are products of neighbouring factors, and some ones."""
    shape, size = [], 1
    for factor in factors:
        size *= factor
        if data.draw(st.booleans()):
            shape.append(size)
            size = 1
        if size == 1 and data.draw(st.booleans()):
            shape.append(1)
    return (*shape, size)


@given(shapes)
def test_set(shape: tuple[int, ...]):
    x = filled(*shape)
    np.testing.assert_array_equal(moved(data_movement.copy("y", tensor("x", x)), {"x": x}), x)
