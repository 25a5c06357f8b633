"""Which inputs of a program are ids through and through, and below what they are."""

from collections.abc import Callable

import pytest

from distmega.kernels.machines import H200
from distmega.program.builder import Handle, ProgramBuilder
from distmega.program.ops.lookups import bounded_inputs
from distmega.sharding.layout.mesh import DeviceMesh
from distmega.sharding.layout.placements import shard
from distmega.sharding.localize import localize
from distmega.sharding.planner import plan_program

Use = Callable[[ProgramBuilder, Handle, Handle], Handle]


def overwritten(p: ProgramBuilder, ids: Handle, table: Handle) -> Handle:
    """Other ids are looked up than those that came in."""
    copied = p.set(ids)
    view = p.reshape(copied, (2, 3), view=True)
    p.set(view.map("a0 - 100"), into=view)
    return p.embedding(copied, table)


def packed_attention(p: ProgramBuilder, ids: Handle, table: Handle) -> Handle:
    """Of three caches."""
    caches, at = p.input("caches", (3, 2, 8, 4)), p.input("at", (6,), "i64")
    packed = ids, p.input("starts", (4,), "i64")
    return p.attention(p.input("q", (6, 2, 1, 4)), caches, caches, at, 0.5, packed=packed)


def append(p: ProgramBuilder, ids: Handle, table: Handle) -> Handle:
    """To caches of four positions."""
    cache = p.state("cache", (6, 2, 4, 5))
    p.kv_append(cache, p.input("x", (6, 2, 5)), ids)
    return cache


def packed_append(p: ProgramBuilder, ids: Handle, table: Handle) -> Handle:
    """To three caches, whose places are given in `at`."""
    cache, at = p.state("cache", (3, 2, 4, 5)), p.input("at", (6,), "i64")
    p.kv_append(cache, p.input("x", (6, 2, 5)), at, ids)
    return cache


USES: list[tuple[Use, dict[str, int]]] = [
    (lambda p, ids, table: p.embedding(ids, table), {"ids": 9}),
    (lambda p, ids, table: p.embedding(p.reshape(p.reshape(ids, (3, 2)), (6,)), table), {"ids": 9}),
    (lambda p, ids, table: p.embedding(p.set(ids, into=p.state("kept", (6,), "i64")), table),
     {"ids": 9}),
    (lambda p, ids, table: p.gather(table, p.expand(p.reshape(ids, (6, 1)), (6, 4)), 0),
     {"ids": 9}),
    (lambda p, ids, table: p.embedding(ids, table) + p.embedding(ids, p.weight("few", (5, 4))),
     {"ids": 5}),
    (lambda p, ids, table: p.rope(p.input("x", (6, 2, 4)), ids, table), {"ids": 9}),
    (packed_attention, {"ids": 3}),
    (append, {"ids": 4}),
    (packed_append, {"ids": 3, "at": 4}),
    (lambda p, ids, table: p.route(p.reshape(ids, (3, 2)), 5).counts, {"ids": 5}),
    (lambda p, ids, table: p.route(p.reshape(ids, (3, 2)), 5, p.input("n", (1,), "i32")).counts,
     {}),
    (lambda p, ids, table: p.embedding(p.slice(ids, 0, 0, 3), table), {}),
    (lambda p, ids, table: p.embedding(ids.map("a0 - 1"), table), {}),
    (overwritten, {}),
]  # fmt: skip


@pytest.mark.parametrize(("use", "bounds"), USES)
def test_inputs_are_bounded_where_each_element_is_looked_up(use: Use, bounds: dict[str, int]):
    p = ProgramBuilder("looks")
    ids, table = p.input("ids", (6,), "i64"), p.weight("table", (9, 4))
    assert bounded_inputs(p.build(use(p, ids, table))) == bounds


def test_a_part_of_a_table_bounds_ids_by_the_whole():
    p = ProgramBuilder("looks")
    ids, table = p.input("ids", (6,), "i64"), p.weight("table", (8, 4))
    program = p.build(p.embedding(ids, table))
    marks = {"table": shard(0, "tp")}
    local = localize(plan_program(program, DeviceMesh(tp=2), H200, marks)).program
    assert local.ops[0].extents["v"] == 4
    assert bounded_inputs(local) == {"ids": 8}
